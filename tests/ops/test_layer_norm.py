import pytest
import torch

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._rows import RowPlan
from accelerant.ops.layer_norm import launch
from accelerant.ops.layer_norm.reference import layer_norm_reference

WIDTHS = pytest.mark.parametrize("width", [2, 33, 768, 5000, 20000])


@WIDTHS
def test_rows_have_mean_0_and_variance_1(width, interpreted):
    y = ops.layer_norm(torch.randn(6, width) * 3 + 7)
    torch.testing.assert_close(y.mean(-1), torch.zeros(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(6), rtol=0, atol=1e-3)


@pytest.mark.parametrize("width", [33, 768, 5000, 20000])
def test_large_mean_does_not_cancel(width, interpreted):
    """Off by the rounding of the mean, 3e-5 of the deviation; the mean of squares would be off by more than 0.1."""
    x = torch.randn(3, width) + 1000
    torch.testing.assert_close(ops.layer_norm(x), layer_norm_reference(x.double()).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [8192, 16384, 16385, 20000])
def test_wide_rows(width, interpreted):
    """On both sides of what a program keeps in registers."""
    x, weight, bias = torch.randn(2, width), torch.randn(width), torch.randn(width)
    expected = layer_norm_reference(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(ops.layer_norm(x, weight, bias), expected, rtol=1e-5, atol=1e-5)


def test_shift_and_scale_of_x_change_nothing():
    x = torch.randn(4, 100)
    torch.testing.assert_close(ops.layer_norm(x, eps=0.0), ops.layer_norm(4 * x + 3, eps=0.0), rtol=1e-4, atol=1e-5)


def test_constant_row_gives_the_bias(interpreted):
    bias = torch.randn(64)
    y = ops.layer_norm(torch.full((2, 64), 5.0), torch.ones(64), bias)
    assert torch.equal(y, bias.expand(2, 64))


def test_gradient_has_no_part_along_ones(interpreted):
    x = torch.randn(5, 768, requires_grad=True)
    ops.layer_norm(x, torch.randn(768)).backward(torch.randn(5, 768))
    torch.testing.assert_close(x.grad.sum(-1), torch.zeros(5), rtol=0, atol=1e-4)


def test_more_rows_than_a_pass(interpreted):
    """A persistent program takes several groups of rows, the last not full."""
    rows, width = 101, 1030
    plan = launch.backward_plan(width)
    assert rows > 2 * plan.rows * plan.grid(rows, torch.device("cpu"))
    assert rows % plan.rows
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(width, requires_grad=True)
    dy = torch.randn(rows, width)
    ops.layer_norm(x, weight).backward(dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    layer_norm_reference(*exact).backward(dy.double())
    torch.testing.assert_close(x.grad, exact[0].grad.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, exact[1].grad.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("plan", [RowPlan(1, 64, 1), RowPlan(4, 64, 2, 1), RowPlan(8, 128, 4, 2, 2)], ids=str)
def test_any_plan_gives_the_same(plan, interpreted):
    x, dy, weight = torch.randn(37, 50), torch.randn(37, 50), torch.randn(50)
    y, mean, rstd = launch.launch_forward(x, weight, weight, 1e-5, plan=plan)
    torch.testing.assert_close(y, torch.layer_norm(x, (50,), weight, weight))
    dx, dweight, dbias = launch.launch_backward(dy, x, weight, mean, rstd, torch.float32, torch.float32, plan)
    expected = torch.ops.aten.native_layer_norm_backward(
        dy, x, (50,), mean[:, None], rstd[:, None], weight, weight, [True, True, True]
    )
    for actual, wanted in zip((dx, dweight, dbias), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [96, 9000])
def test_float32_weights_beside_low_precision(dtype, width, interpreted):
    x = torch.randn(5, width).to(dtype).requires_grad_()
    weight, bias = torch.randn(width, requires_grad=True), torch.randn(width, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = ops.layer_norm(x, weight, bias)
    dy = torch.randn(5, width).to(dtype)
    y.backward(dy)
    assert (y.dtype, x.grad.dtype, weight.grad.dtype, bias.grad.dtype) == (dtype, dtype, torch.float32, torch.float32)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight, bias)]
    layer_norm_reference(*exact).backward(dy.double())
    torch.testing.assert_close(weight.grad, exact[1].grad.float(), rtol=1e-5, atol=1e-5)  # sums stay in float32
    torch.testing.assert_close(bias.grad, exact[2].grad.float(), rtol=1e-5, atol=1e-5)


LAYOUTS = {
    "row of a wider matrix": lambda: torch.randn(6, 50)[:, 7:40],
    "transposed": lambda: torch.randn(33, 6).t(),
    "permuted batch": lambda: torch.randn(4, 3, 33).transpose(0, 1),
    "every second": lambda: torch.randn(6, 66)[:, ::2],
    "expanded": lambda: torch.randn(1, 33).expand(6, 33),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout(layout, interpreted):
    x = LAYOUTS[layout]()
    weight = torch.randn(66)[::2]
    y = ops.layer_norm(x, weight)
    assert y.is_contiguous()
    torch.testing.assert_close(y, layer_norm_reference(x.double(), weight.double()).float(), rtol=1e-5, atol=1e-5)
    leaf, exact = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    dy = LAYOUTS[layout]()
    ops.layer_norm(leaf, weight).backward(dy)
    layer_norm_reference(exact, weight.double()).backward(dy.double())
    torch.testing.assert_close(leaf.grad, exact.grad.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_the_wanted_gradients(frozen, interpreted):
    tensors = [torch.randn(3, 40), torch.randn(40), torch.randn(40)]
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index != frozen)
    ops.layer_norm(*tensors).sum().backward()
    assert [tensor.grad is not None for tensor in tensors] == [index != frozen for index in range(3)]


def test_eps_is_added_to_the_variance(interpreted):
    x = torch.tensor([[1.0, -1.0]])
    torch.testing.assert_close(ops.layer_norm(x, eps=3.0), torch.tensor([[0.5, -0.5]]))


def test_no_rows_give_zero_gradients():
    weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    ops.layer_norm(torch.empty(0, 8), weight, bias).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))
    assert torch.equal(bias.grad, torch.zeros(8))


def test_refuses_a_weight_of_another_width():
    with pytest.raises(ShapeError, match=r"weight must be \(5,\), got \(4,\)"):
        ops.layer_norm(torch.ones(3, 5), torch.ones(4))


def test_refuses_a_bias_of_two_dimensions():
    with pytest.raises(ShapeError, match=r"bias must be \(5,\), got \(1, 5\)"):
        ops.layer_norm(torch.ones(3, 5), torch.ones(5), torch.ones(1, 5))


def test_refuses_a_scalar():
    with pytest.raises(ShapeError, match=r"layer_norm takes \(\.\.\., N\), got a scalar"):
        ops.layer_norm(torch.tensor(1.0))


def test_refuses_integers():
    with pytest.raises(UnsupportedDtype, match="x is int64"):
        ops.layer_norm(torch.ones(3, 5, dtype=torch.int64))


@pytest.mark.parametrize(("x", "weight"), [("float32", "bfloat16"), ("float64", "float32"), ("bfloat16", "float16")])
def test_refuses_mixtures_that_lose_precision(x, weight):
    with pytest.raises(UnsupportedDtype, match=f"weight must be .*{x}.* got {weight}"):
        ops.layer_norm(torch.ones(3, 5, dtype=getattr(torch, x)), torch.ones(5, dtype=getattr(torch, weight)))


def test_refuses_two_devices():
    with pytest.raises(ShapeError, match="weight must be on cpu, where x is; it is on meta"):
        ops.layer_norm(torch.ones(3, 5), torch.ones(5, device="meta"))


def test_per_sample_gradients_of_a_wider_weight():
    x = torch.randn(3, 4, 8, dtype=torch.bfloat16)
    weight, bias = torch.randn(8), torch.randn(8)

    def loss(weight, bias, x):
        return ops.layer_norm(x, weight, bias).float().square().sum()

    batched = torch.func.vmap(torch.func.grad(loss, (0, 1)), (None, None, 0))(weight, bias, x)
    for at in range(3):
        leaves = weight.clone().requires_grad_(), bias.clone().requires_grad_()
        one = torch.autograd.grad(loss(*leaves, x[at]), leaves)
        for whole, part in zip(batched, one, strict=True):
            assert whole.dtype == torch.float32
            torch.testing.assert_close(whole[at], part, rtol=2e-2, atol=2e-1)
