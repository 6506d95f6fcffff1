import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import LAYOUTS

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops import norm
from accelerant.ops.norm import add_layer_norm_reference, add_rms_norm_reference, layer_norm_reference
from refusals import assert_raises


@pytest.mark.parametrize("width", [33, 768, 5000, 20000])
def test_large_mean_does_not_cancel(width, interpreted):
    """Off by the rounding of the mean, 3e-5 of the deviation; the mean of squares would be off by more than 0.1."""
    x = torch.randn(3, width) + 1000
    torch.testing.assert_close(ops.layer_norm(x), layer_norm_reference(x.double()).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("width", [2, 33, 768, 1280, 5000, 8192, 16384, 16385, 20000])
def test_rows_of_any_width(width, interpreted):
    """On both sides of what a program keeps in registers."""
    x, weight, bias = torch.randn(3, width) * 3 + 7, torch.randn(width), torch.randn(width)
    expected = torch.layer_norm(x.double(), (width,), weight.double(), bias.double(), 1e-3).float()
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-3), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ops.rms_norm(x, weight, eps=1e-3), torch.rms_norm(x, (width,), weight, 1e-3))


@pytest.mark.slow
def test_a_wide_row_is_as_exact_as_torchs(interpreted, rng):
    """In a row alone one unlucky rounding of mean, variance or rstd would be 2 to 26 times the error of torch's row."""
    for _ in range(12):
        width, scale = rng.randint(16385, 120_000), 10 ** rng.uniform(-3, 4)
        x = (torch.randn(1, width) + rng.choice([0.0, 1.0, 1000.0])) * scale
        for op, by_torch in ((ops.layer_norm, torch.layer_norm), (ops.rms_norm, torch.rms_norm)):
            exact = by_torch(x.double(), (width,), eps=1e-5)
            ours, torchs = (
                (y.double() - exact).abs().max() for y in (op(x, eps=1e-5), by_torch(x, (width,), eps=1e-5))
            )
            assert ours <= 1.7 * torchs, (op.__name__, width, scale)
            assert ours <= 2.0 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_a_wide_row_whose_squares_overflow_is_zero_as_torchs(interpreted):
    x = torch.randn(1, 16385) * 1e25
    assert not torch.layer_norm(x, (16385,)).any()
    assert not ops.layer_norm(x).any()
    x[0, 3] = float("nan")
    assert ops.layer_norm(x).isnan().all()


def test_shift_and_scale_of_x_change_nothing():
    x = torch.randn(4, 100)
    torch.testing.assert_close(ops.layer_norm(x, eps=0.0), ops.layer_norm(4 * x + 3, eps=0.0), rtol=1e-4, atol=1e-5)


def test_constant_row_gives_the_bias(interpreted):
    bias = torch.randn(64)
    y = ops.layer_norm(torch.full((2, 64), 5.0), torch.ones(64), bias)
    assert torch.equal(y, bias.expand(2, 64))


@pytest.mark.slow
def test_more_rows_than_a_pass(interpreted):
    """A persistent program takes several groups of rows, the last not full."""
    rows, width = 101, 1030
    plan = norm.backward_plan(width)
    assert rows > 2 * plan.rows * plan.grid(rows, torch.device("cpu"))
    assert rows % plan.rows
    x, weight = torch.randn(rows, width, requires_grad=True), torch.randn(width, requires_grad=True)
    dy = torch.randn(rows, width)
    ops.layer_norm(x, weight).backward(dy)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    layer_norm_reference(*exact).backward(dy.double())
    torch.testing.assert_close(x.grad, exact[0].grad.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weight.grad, exact[1].grad.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.sample(5, 2)
@pytest.mark.parametrize("needs", [(True, True, True), (True, False, True), (True, False, False)])
@pytest.mark.parametrize("shape", [(101, 50), (3, 9000), (0, 8)])
def test_sums_of_the_gradient_on_the_way(shape, needs, interpreted):
    x, dy, ds, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    _, statistics = norm.launch_forward(True, x, weight, weight, 1e-5)
    sums = torch.full(shape[1:], torch.nan)
    found = norm.launch_backward(True, dy, x, weight, weight, statistics, 1e-5, needs, ds, dxsum=sums)
    torch.testing.assert_close(sums, found[0].sum(0), rtol=1e-4, atol=1e-4)
    for one, other in zip(
        found, norm.launch_backward(True, dy, x, weight, weight, statistics, 1e-5, needs, ds), strict=True
    ):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 96), (torch.float16, 9000)])
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


@pytest.mark.sample(3)
@pytest.mark.parametrize("op", [ops.layer_norm, ops.rms_norm])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_over_rows_have_the_precision_of_float32(op, dtype, wide):
    """torch's layer_norm sums the gradients of weight and bias in bfloat16 on a CPU: 7% off after 4,096 rows."""
    x, dy = torch.randn(4096, 48).to(dtype), torch.randn(4096, 48).to(dtype)
    vectors = [torch.randn(48).to(torch.float32 if wide else dtype) for _ in range(2 if op is ops.layer_norm else 1)]

    def gradients(x, vectors, dy):
        vectors = [each.clone().requires_grad_() for each in vectors]
        return torch.autograd.grad(op(x, *vectors), vectors, dy)

    exact = gradients(x.double(), [each.double() for each in vectors], dy.double())
    for found, wanted in zip(gradients(x, vectors, dy), exact, strict=True):
        assert (found - wanted).norm() < (1e-6 if wide else torch.finfo(dtype).eps) * wanted.norm()


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


@pytest.mark.parametrize("op", ["layer_norm", "add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_only_the_wanted_gradients(op, frozen, interpreted):
    adds = op.startswith("add")
    tensors = [torch.randn(3, 40), torch.randn((3, 40) if adds else 40), torch.randn(40)]
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(index != frozen)
    y = getattr(ops, op)(*tensors)
    (y[0].square().sum() + y[1].sum() if adds else y.sum()).backward()
    assert [tensor.grad is not None for tensor in tensors] == [index != frozen for index in range(3)]


ROWS = torch.ones(3, 5)
REFUSED = {
    "weight": (ops.layer_norm, (ROWS, torch.ones(4)), ShapeError, r"weight must be \(5,\), got \(4,\)"),
    "bias": (ops.layer_norm, (ROWS, ROWS[0], ROWS[:1]), ShapeError, r"bias must be \(5,\), got \(1, 5\)"),
    "a scalar": (ops.layer_norm, (ROWS[0, 0],), ShapeError, r"layer_norm takes \(\.\.\., N\), got a scalar"),
    "integers": (ops.layer_norm, (ROWS.long(),), UnsupportedDtype, "x is int64"),
    "devices": (
        ops.layer_norm, (ROWS, ROWS[0].to("meta")), ShapeError, "weight must be on cpu, where x is; it is on meta"
    ),
    "residual": (
        ops.add_layer_norm, (ROWS, ROWS[0]), ShapeError, r"residual must be \(3, 5\) as x is, got \(5,\)"
    ),
    "dtype of residual": (
        ops.add_rms_norm, (ROWS.bfloat16(), ROWS), UnsupportedDtype, "residual must be bfloat16 as x is, got float32"
    ),
    "device of residual": (
        ops.add_rms_norm, (ROWS, ROWS.to("meta")), ShapeError, "residual must be on cpu, where x is; it is on meta"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name):
    call, tensors, error, words = REFUSED[name]
    assert_raises(error, words, call, *tensors)


@pytest.mark.parametrize(("x", "weight"), [("float32", "bfloat16"), ("float64", "float32"), ("bfloat16", "float16")])
def test_refuses_mixtures_that_lose_precision(x, weight):
    with pytest.raises(UnsupportedDtype, match=f"weight must be .*{x}.* got {weight}"):
        ops.layer_norm(torch.ones(3, 5, dtype=getattr(torch, x)), torch.ones(5, dtype=getattr(torch, weight)))


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


# --- rms_norm, and the residual add ----------------------------------------------------------------------------------
@pytest.mark.sample(5, 3)
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("width", [40, 768, 20000])
def test_not_a_number_stays_in_its_row(op, value, width, interpreted):
    x, weight = torch.randn(3, width), torch.randn(width)
    x[1, 3] = value
    functional = torch.layer_norm if op.endswith("layer_norm") else torch.rms_norm
    expected = functional(x, (width,), weight)
    found = getattr(ops, op)(x, *([torch.zeros_like(x)] if op.startswith("add") else []), weight)
    y = found[0] if op.startswith("add") else found
    torch.testing.assert_close(y, expected, equal_nan=True, rtol=1e-4, atol=1e-5)
    assert y[1].isnan().any()
    assert y[::2].isfinite().all()


ADDS = pytest.mark.parametrize("op", ["layer_norm", "rms_norm"])


@pytest.mark.sample(5, 3)
@ADDS
@pytest.mark.parametrize("width", [40, 768, 9000, 20000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_normalises_the_rounded_sum(op, width, dtype, interpreted):
    """The same bits as the add followed by the norm in the same tiles: the fusion changes memory traffic alone."""
    x, residual, weight = torch.randn(4, width).to(dtype), torch.randn(4, width).to(dtype), torch.randn(width)
    centre, narrow = op == "layer_norm", width <= norm.WIDE_FORWARD
    plan = norm.forward_plan(width, centre, True) if narrow else None
    y, s = norm.launch_forward(centre, x, weight, None, 1e-5, False, residual, plan=plan)[:2]
    torch.testing.assert_close(s, x + residual)  # the interpreter cuts bfloat16
    assert torch.equal(y, norm.launch_forward(centre, s, weight, None, 1e-5, False, plan=plan)[0])


@pytest.mark.parametrize(
    ("op", "width"),
    [("layer_norm", 40), ("rms_norm", 40), pytest.param("layer_norm", 20000, marks=pytest.mark.slow)],
)
def test_a_wide_stream_and_narrow_branches(op, width, interpreted):
    """As under autocast: the residual is float32, and so are the sum and its gradient."""
    centre, low = op == "layer_norm", torch.float16
    x, residual, weight = torch.randn(2, width).to(low), torch.randn(2, width), torch.randn(width)
    y, s, statistics = norm.launch_forward(centre, x, weight, None, 1e-5, True, residual, low)
    assert (y.dtype, s.dtype) == (low, torch.float32)
    torch.testing.assert_close(s, x + residual)
    expected, kept = norm.launch_forward(centre, s, weight, None, 1e-5)
    assert torch.equal(statistics, kept)
    assert torch.equal(y, expected.to(low))
    dy, ds = torch.randn(2, width).to(low), torch.randn(2, width)
    arguments = (s, weight, None, statistics, 1e-5, (True, True, False), ds)
    found, wide = (norm.launch_backward(centre, each, *arguments) for each in (dy, dy.float()))
    assert found[0].dtype == torch.float32
    assert torch.equal(found[0], wide[0])
    assert torch.equal(found[1], wide[1])


@pytest.mark.sample(5, 3)
@ADDS
@pytest.mark.parametrize("width", [40, 9000])
@pytest.mark.parametrize("used", ["y", "s", "both"])
def test_results_may_go_unused(op, width, used, interpreted):
    tensors = [torch.randn(3, width), torch.randn(3, width), torch.randn(width)]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_()
    dy, ds = torch.randn(3, width), torch.randn(3, width)
    reference = add_layer_norm_reference if op == "layer_norm" else add_rms_norm_reference
    for leaves, function in ((tensors, getattr(ops, f"add_{op}")), (exact, reference)):
        y, s = function(*leaves)
        wanted = {"y": [(y, dy)], "s": [(s, ds)], "both": [(y, dy), (s, ds)]}[used]
        torch.autograd.backward([each for each, _ in wanted], [each.to(y.dtype) for _, each in wanted])
    for tensor, other in zip(tensors, exact, strict=True):
        expected = torch.zeros_like(tensor) if other.grad is None else other.grad.float()
        torch.testing.assert_close(tensor.grad, expected, rtol=1e-5, atol=1e-5)


def test_gradients_of_a_sum_are_apart(interpreted):
    """Two leaves that get the same gradient do not share its memory."""
    x, residual = (torch.randn(3, 40, requires_grad=True) for _ in range(2))
    ops.add_rms_norm(x, residual)[0].square().sum().backward()
    assert torch.equal(x.grad, residual.grad)
    assert x.grad.data_ptr() != residual.grad.data_ptr()


@ADDS
def test_any_layout_of_a_sum(op, interpreted):
    x, residual = torch.randn(33, 6).t(), torch.randn(6, 50)[:, 7:40]
    y, s = getattr(ops, f"add_{op}")(x, residual)
    assert y.is_contiguous()
    assert s.is_contiguous()
    torch.testing.assert_close(s, x + residual)
    torch.testing.assert_close(y, getattr(ops, op)(x + residual))


@ADDS
def test_a_chain_of_blocks(op, interpreted):
    """The residual stream of a transformer, its gradients through y and s together."""
    add_norm, norm = getattr(ops, f"add_{op}"), getattr(ops, op)
    x, weight = torch.randn(4, 24, requires_grad=True), torch.randn(3, 24, requires_grad=True)

    def fused():
        s, y = torch.zeros_like(x), x
        for each in weight:
            y, s = add_norm(y, s, each)
        return y, s

    def apart():
        s, y = torch.zeros_like(x), x
        for each in weight:
            s = s + y
            y = norm(s, each)
        return y, s

    dy, ds = torch.randn(4, 24), torch.randn(4, 24)
    found = [torch.autograd.grad(f(), (x, weight), (dy, ds)) for f in (fused, apart)]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(rows=st.integers(0, 9), width=st.integers(1, 300), op=st.sampled_from(["layer_norm", "rms_norm"]))
def test_any_shape(rows, width, op):
    tensors = [torch.randn(rows, width), torch.randn(rows, width), torch.randn(width)]
    exact = [tensor.double().requires_grad_() for tensor in tensors]
    for tensor in tensors:
        tensor.requires_grad_()
    reference = add_layer_norm_reference if op == "layer_norm" else add_rms_norm_reference
    results = getattr(ops, f"add_{op}")(*tensors), reference(*exact)
    dy, ds = torch.randn(rows, width), torch.randn(rows, width)
    for (y, s), leaves in zip(results, (tensors, exact), strict=True):
        torch.autograd.backward((y, s), (dy.to(y.dtype), ds.to(y.dtype)), inputs=leaves)
    # A row of one element, or of a few alike, has a small deviation: rstd up to 316 goes into what rounds.
    for tensor, other in zip(tensors, exact, strict=True):
        torch.testing.assert_close(tensor.grad, other.grad.float(), rtol=1e-3, atol=1e-2)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["rms_norm", "add_layer_norm", "add_rms_norm"])
def test_each_refuses_in_its_own_name(op):
    call = getattr(ops, op)
    x = torch.ones(3, 5)
    more = [x] if op.startswith("add") else []
    assert_raises(UnsupportedDtype, f"^{op} takes .*; x is int32", call, x.int(), *(each.int() for each in more))
    with pytest.raises(ShapeError, match=rf"^{op} takes \(\.\.\., N\), got a scalar"):
        call(torch.tensor(1.0), *(torch.tensor(1.0) for _ in more))
    assert_raises(ShapeError, r"weight must be \(5,\), got \(6,\)", call, x, *more, torch.ones(6))


def test_no_rows_give_zero_gradients():
    weight, bias = torch.ones(8, requires_grad=True), torch.zeros(8, requires_grad=True)
    ops.layer_norm(torch.empty(0, 8), weight, bias).sum().backward()
    assert torch.equal(weight.grad, torch.zeros(8))
    assert torch.equal(bias.grad, torch.zeros(8))
