"""What a stranger's program finds first: torch's rules at their edges, each compared with the CPU."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accelerant as acl
from accelerant.errors import UnsupportedCase
from refusals import assert_raises
from requirements import require_backend


@pytest.fixture(scope="module")
def device(request):
    """WebGPU, where a test is of the table; each backend, where it is of their kernels."""
    return require_backend(getattr(request, "param", "webgpu"))


each_device = pytest.mark.parametrize(
    "device", [pytest.param("opencl", marks=pytest.mark.slow), "webgpu"], indirect=True
)


@each_device
def test_sums_longer_than_a_thread_may_loop(device):
    x = torch.ones(100_000)
    assert acl.to(x, device).sum().item() == 100_000
    x[90_000] = 2
    assert acl.to(x, device).argmax().item() == 90_000
    index = torch.zeros(70_000, dtype=torch.int64)
    total = acl.to(torch.zeros(1), device).index_add(0, acl.to(index, device), acl.to(torch.ones(70_000), device))
    assert total.tolist() == [70_000]


@each_device
@pytest.mark.parametrize("function", [
    lambda x: x.sum(), lambda x: x.mean(0), lambda x: x.reshape(2, -1).mean(-1), lambda x: (x * x).mean(),
    lambda x: x.reshape(-1, 2).sum(0), lambda x: x.norm(), lambda x: torch.dot(x, x),
    lambda x: torch.mv(x.reshape(20, -1), x[:50_000]), lambda x: x.reshape(20, -1) @ x.reshape(20, -1).T,
    lambda x: F.mse_loss(x, x * 0), lambda x: F.cross_entropy(x.reshape(-1, 2), (x.view(-1, 2)[:, 0] > 1).long()),
    lambda x: (x.reshape(2, -1) + x[:2, None] * 1e3).var(-1, unbiased=False) + 1,
    lambda x: torch.logsumexp(x, 0), lambda x: torch.softmax(x, 0)[:3] * 1e6,
])  # fmt: skip
def test_long_sums_lose_no_digits(device, function):
    x = torch.full((1_000_000,), 0.1)
    wanted = function(x.double())
    torch.testing.assert_close(function(acl.to(x, device)).cpu().double(), wanted, rtol=1.5e-6, atol=0)


@each_device
def test_infinite_and_missing_terms_of_sums(device):
    x = torch.ones(3, 5000)
    x[0, 7], x[1, 2000], x[2, 3], x[2, 4000] = math.inf, math.nan, math.inf, -math.inf
    assert str(acl.to(x, device).sum(-1).tolist()) == "[inf, nan, nan]"
    assert str((acl.to(x, device) @ acl.to(torch.ones(5000, 2), device))[:, 1].tolist()) == "[inf, nan, nan]"


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
    assert_raises(RuntimeError, "refer to a single memory location", lambda: x[1:].add_(x[:-1]))
    square = x.view(8, 8)
    assert_raises(RuntimeError, "refer to a single memory location", lambda: square.add_(square.t()))
    assert_raises(RuntimeError, "more than one element", lambda: x[:4].view(1, 4).expand(3, 4).add_(1))
    assert_raises(RuntimeError, "can't be cast", lambda: acl.to(torch.tensor([1, 2]), device).add_(0.5))
    assert x.add_(x).tolist() == [2.0] * 64  # the same elements are no overlap
    assert x[:32].add_(x[32:]).tolist() == [4.0] * 32


@each_device
def test_numbers_beside_integers_and_halves(device):
    assert acl.to(torch.tensor([2**32]), device).any().item()
    assert acl.to(torch.tensor([True, False]), device).all(dim=()).tolist() == [True, False]
    assert (acl.to(torch.tensor([0.1], dtype=torch.float16), device) == 0.1).item()
    x, y = torch.tensor([1e9, 5.0, -7.0]), torch.tensor([3.0, math.inf, 3.0])
    assert torch.equal(torch.remainder(acl.to(x, device), acl.to(y, device)).cpu(), torch.remainder(x, y))
    assert acl.to(torch.tensor([math.inf]), device).log1p().item() == math.inf
    assert math.isnan(acl.to(torch.tensor([-math.inf]), device).log1p().item())


@each_device
@pytest.mark.parametrize("name", ["rows", "rows and columns", "gather", "scatter", "classes"])
def test_an_index_out_of_range_raises_at_the_next_copy_to_the_host(device, name):
    table, low, high = (
        acl.to(torch.arange(6).reshape(3, 2), device),
        *acl.to([torch.tensor([-1]), torch.tensor([3])], device),
    )
    call, index = {
        "rows": (lambda: table[high], "index 3"),
        "rows and columns": (lambda: table[low, high], "an index of several dimensions"),
        "gather": (lambda: table.gather(0, low[None]), "index -1"),
        "scatter": (lambda: table.scatter(0, high[None], 7), "index 3"),
        "classes": (lambda: F.cross_entropy(acl.to(torch.zeros(1, 3), device), high), "index 3"),
    }[name]
    call()
    assert_raises(IndexError, f"{index} is out of bounds for a dimension of size [36], .* on {device}:0", table.cpu)
    assert table[low].tolist() == [[4, 5]]  # and the next copy is right
    ignored = F.cross_entropy(acl.to(torch.zeros(2, 3), device), acl.to(torch.tensor([-100, 1]), device))
    assert ignored.item() == pytest.approx(math.log(3))


def test_indices_of_an_empty_dimension_are_refused(device):
    with pytest.raises(IndexError, match=r"dimension 0, which is empty in \(0, 2\)"):
        acl.to(torch.ones(0, 2), device)[acl.to(torch.tensor([0]), device)]


def test_shapes_change_in_place(device):
    host = torch.arange(4.0).reshape(2, 2)
    moved = acl.to(host.clone(), device)
    base = moved.view(4)
    for x in (host, moved):
        x.t_()[0, 1] = 9  # of the transposed one
        x.unsqueeze_(0).transpose_(0, 1)
    assert (moved.shape, moved.stride()) == (host.shape, host.stride())
    assert torch.equal(moved.cpu(), host)
    assert base.tolist() == [0, 1, 9, 3]
    assert_raises(RuntimeError, "end behind the memory", base.as_strided, (5,), (1,))
    assert_raises(UnsupportedCase, "another shape", base.resize_, 2)


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN])
def test_recurrent_layers_with_batches_first(device, kind):
    layer, x = kind(3, 4, batch_first=True), torch.randn(2, 5, 3)
    expected, _ = layer(x)
    found, _ = acl.to(layer, device)(acl.to(x, device))
    torch.testing.assert_close(found.cpu(), expected)


def test_numbers_are_cast_as_torch_casts_them(device):
    small, truth = (acl.to(torch.tensor([0, 1, 255], dtype=dtype), device) for dtype in (torch.uint8, torch.bool))
    assert (small > -1).tolist() == [False, False, False]  # -1 is 255
    assert (small == acl.to(torch.tensor(257), device)).tolist() == [False, True, False]
    assert (small // -3).tolist() == [0, 0, 1]
    assert truth.fill_(0.5).tolist() == [True, True, True]
    assert_raises(RuntimeError, "uint8_t without overflow", small.fill_, 300)
    numbers = acl.to(torch.tensor([math.nan, 0.0, 1.0]), device)
    assert (numbers != 0).tolist() == [True, False, True]
    assert numbers[:1].any().item()


def test_a_scale_of_0_averages_the_values(device):
    q, v = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 2, 4)
    found = F.scaled_dot_product_attention(*(acl.to(x, device) for x in (q, q, v)), scale=0.0)
    torch.testing.assert_close(found.cpu(), v.mean(2, keepdim=True).expand_as(v))


def test_results_on_another_device_of_torch(device):
    x = acl.to(torch.ones(2, 3), device)
    for y in (x.to("meta"), torch.zeros_like(x, device="meta"), x.new_full((2, 3), 7, device="meta")):
        assert (y.shape, y.device.type) == (x.shape, "meta")
    assert x.to("cpu") is x


@each_device
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_uniform_values_are_below_1(device, dtype):
    drawn = torch.rand_like(acl.to(torch.empty(1 << 16, dtype=dtype), device)).cpu().float()
    assert 0 <= drawn.min() < 0.01
    assert 0.99 < drawn.max() < 1
