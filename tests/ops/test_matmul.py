import pytest
import torch
from op_checks import compiled_into

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.runtime.ledger import ledger


def counted():
    return [row for row in ledger().to_dict()["ops"] if row["op"] == "matmul"]


@pytest.mark.parametrize(
    ("a", "b", "size_bytes", "flops"),
    [
        ((8, 16), (16, 32), 4 * (8 * 16 + 16 * 32 + 8 * 32), 2 * 8 * 16 * 32),
        ((2, 4, 16), (16, 32), 4 * (8 * 16 + 16 * 32 + 8 * 32), 2 * 8 * 16 * 32),  # one product of eight rows
        ((3, 8, 16), (3, 16, 32), 3 * 4 * (8 * 16 + 16 * 32 + 8 * 32), 3 * 2 * 8 * 16 * 32),
        ((1, 8, 16), (3, 16, 32), 4 * (8 * 16 + 3 * 16 * 32 + 3 * 8 * 32), 3 * 2 * 8 * 16 * 32),
    ],
    ids=str,
)
def test_cost_in_the_ledger(a, b, size_bytes, flops):
    ops.matmul(torch.randn(a), torch.randn(b))
    (row,) = counted()
    assert (row["calls"], row["bytes"], row["flops"], row["own"]) == (1, size_bytes, flops, False)


def test_on_a_cpu_the_gradient_is_torchs_own():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    y = ops.matmul(a, b)
    assert y.grad_fn.name() == "MmBackward0"
    y.sum().backward()
    (row,) = counted()
    assert row["calls"] == 1
    assert "torch on the CPU: its own autograd" in row["reason"]


def test_backward_is_counted():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    ops.matmul(a, b).sum().backward()
    assert [(row["op"], row["calls"]) for row in ledger().to_dict()["ops"]] == [("matmul", 1), ("matmul_bwd", 1)]


def test_no_product_for_an_unwanted_gradient():
    a, b = torch.randn(8, 16), torch.randn(16, 32, requires_grad=True)
    y = ops.matmul(a, b)
    assert [function is not None for function, _ in y.grad_fn.next_functions] == [False, True]


def test_gradient_of_a_transposed_weight_is_dense():
    weight = torch.randn(32, 16, requires_grad=True)
    (gradient,) = torch.autograd.grad(ops.matmul(torch.randn(8, 16), weight.t()).sum(), weight)
    assert gradient.is_contiguous()


def test_autocast_casts_as_torch_does():
    a, b = torch.randn(8, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = ops.matmul(a, b), torch.matmul(a, b)
        mixed = ops.matmul(a, b.detach().bfloat16())
    assert y.dtype == expected.dtype == mixed.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.sum().backward()
    assert a.grad.dtype == b.grad.dtype == torch.float32


def test_meta_tensors_beside_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.matmul(torch.ones(2, 3, 4, device="meta"), torch.ones(4, 5, device="meta"))
    assert (y.device.type, y.shape, y.dtype) == ("meta", (2, 3, 5), torch.float32)


@pytest.mark.parametrize("batch", [(2, 1), (1, 3), ()], ids=str)
def test_broadcast_gradients_are_summed(batch):
    a = torch.randn(*batch, 4, 5, dtype=torch.float64, requires_grad=True)
    b = torch.randn(2, 3, 5, 6, dtype=torch.float64, requires_grad=True)
    dy = torch.randn(2, 3, 4, 6, dtype=torch.float64)
    actual = torch.autograd.grad(ops.matmul(a, b), (a, b), dy)
    expected = torch.autograd.grad(torch.matmul(a, b), (a, b), dy)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_is_torchs_own_under_compile():
    assert compiled_into(ops.matmul, torch.randn(3, 4), torch.randn(4, 5)) == [torch.matmul]


@pytest.mark.parametrize(("a", "b"), [((3, 4), (5, 6)), ((4,), (5,)), ((2, 3, 4), (3, 4)), ((3, 4), (5,))], ids=str)
def test_refuses_inner_sizes_that_differ(a, b):
    with pytest.raises(ShapeError, match="a must have as many columns as b has rows, got "):
        ops.matmul(torch.ones(a), torch.ones(b))


def test_refuses_batches_that_do_not_broadcast():
    with pytest.raises(ShapeError, match=r"leading dimensions of \(2, 3, 4\) and \(3, 4, 5\) do not broadcast"):
        ops.matmul(torch.ones(2, 3, 4), torch.ones(3, 4, 5))


def test_refuses_a_scalar():
    with pytest.raises(ShapeError, match=r"got \(\) and \(3, 4\)"):
        ops.matmul(torch.tensor(1.0), torch.ones(3, 4))


def test_refuses_two_dtypes():
    with pytest.raises(UnsupportedDtype, match="a and b must have one dtype, got float32 and bfloat16"):
        ops.matmul(torch.ones(3, 4), torch.ones(4, 5, dtype=torch.bfloat16))


def test_refuses_integers():
    with pytest.raises(UnsupportedDtype, match=r"matmul takes .*; a is int64"):
        ops.matmul(torch.ones(3, 4, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64))


def test_refuses_two_devices():
    with pytest.raises(ShapeError, match="a and b must be on one device, got cpu and meta"):
        ops.matmul(torch.ones(3, 4), torch.ones(4, 5, device="meta"))
