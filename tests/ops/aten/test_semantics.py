"""What a stranger's program finds first: torch's rules at their edges, each compared with the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accelerant as acl


def test_sums_longer_than_a_thread_may_loop(device):
    x = torch.ones(100_000)
    assert acl.to(x, device).sum().item() == 100_000
    x[90_000] = 2
    assert acl.to(x, device).argmax().item() == 90_000
    index = torch.zeros(70_000, dtype=torch.int64)
    total = acl.to(torch.zeros(1), device).index_add(0, acl.to(index, device), acl.to(torch.ones(70_000), device))
    assert total.tolist() == [70_000]


def test_data_is_replaced_with_its_memory(device):
    x = acl.to(torch.ones(3), device)
    x.data = x.data * 2
    assert x.tolist() == [2, 2, 2]
    layer = acl.to(nn.Linear(2, 2, bias=False), device)
    with torch.no_grad():
        layer.weight.fill_(1.5)
    assert layer.half().weight.tolist() == [[1.5, 1.5]] * 2


def test_a_loss_without_targets_has_no_gradient(device):
    x = acl.to(torch.randn(4, 120), device).requires_grad_()
    F.cross_entropy(x, acl.to(torch.full((4,), -100), device), reduction="sum").backward()
    assert not x.grad.cpu().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_two_bytes_are_in_float32(device, dtype):
    x = torch.tensor([[256.0, 258.0, 256.0, 258.0]], dtype=dtype)
    torch.testing.assert_close(F.layer_norm(acl.to(x, device), (4,)).cpu(), F.layer_norm(x, (4,)))
    x = torch.tensor([256.0, 258.0] * 8, dtype=dtype)
    torch.testing.assert_close(acl.to(x, device).var(correction=0).cpu(), x.var(correction=0))
    q = torch.full((1, 1, 2, 64), 40.0, dtype=dtype)  # scores of 12,800 times 8 overflow float16
    y = F.scaled_dot_product_attention(*(acl.to(q, device),) * 3)
    torch.testing.assert_close(y.cpu(), q)


def test_a_row_that_the_mask_empties_is_zero(device):
    x = torch.ones(1, 1, 2, 4)
    mask = torch.tensor([[True, False], [False, False]])
    q = acl.to(x, device).requires_grad_()
    y = F.scaled_dot_product_attention(q, acl.to(x, device), acl.to(x, device), attn_mask=acl.to(mask, device))
    assert y[0, 0].tolist() == [[1.0] * 4, [0.0] * 4]
    y.sum().backward()
    assert not q.grad.isnan().any().item()


def test_memory_that_is_read_and_written_is_refused(device):
    x = acl.to(torch.ones(64), device)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        x[1:].add_(x[:-1])
    square = x.view(8, 8)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        square.add_(square.t())
    with pytest.raises(RuntimeError, match="more than one element"):
        x[:4].view(1, 4).expand(3, 4).add_(1)
    with pytest.raises(RuntimeError, match="can't be cast"):
        acl.to(torch.tensor([1, 2]), device).add_(0.5)
    assert x.add_(x).tolist() == [2.0] * 64  # the same elements are no overlap
    assert x[:32].add_(x[32:]).tolist() == [4.0] * 32


def test_numbers_beside_integers_and_halves(device):
    assert acl.to(torch.tensor([2**32]), device).any().item()
    assert acl.to(torch.tensor([True, False]), device).all(dim=()).tolist() == [True, False]
    assert (acl.to(torch.tensor([0.1], dtype=torch.float16), device) == 0.1).item()
    x, y = torch.tensor([1e9, 5.0, -7.0]), torch.tensor([3.0, math.inf, 3.0])
    assert torch.equal(torch.remainder(acl.to(x, device), acl.to(y, device)).cpu(), torch.remainder(x, y))
    assert acl.to(torch.tensor([math.inf]), device).log1p().item() == math.inf


def test_an_index_out_of_range_is_not_another_row(device):
    table = acl.to(torch.ones(3, 2), device)
    assert table[acl.to(torch.tensor([5]), device)].isnan().all().item()
    assert math.isnan(F.cross_entropy(acl.to(torch.zeros(2, 3), device), acl.to(torch.tensor([7, 1]), device)).item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_values_are_below_1(device, dtype):
    drawn = torch.rand_like(acl.to(torch.empty(1 << 16, dtype=dtype), device)).cpu().float()
    assert 0 <= drawn.min() < 0.01
    assert 0.99 < drawn.max() < 1
