"""linear_fp8: rows in e4m3 and their scales, the products of them, and what stands between two of an MLP."""

import importlib.util

import pytest
import torch
from op_checks import ran
from torch.nn import functional

from accelerant.errors import ShapeError
from accelerant.ops import linear_fp8
from accelerant.ops.linear_fp8 import Float8Weight, Float8Weights, cases, flattened, unflattened
from accelerant.ops.registry import draw

F32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
ON_GPU = pytest.mark.gpu


def values(rounded):
    q, scale = rounded
    return q.double() * scale.double()[:, None]


def code(x):
    return x.view(torch.uint8)


# --- the reference ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("peak", [448.0, 448.5, 1.0, 1.75, 1.7500001, 3.0, 2.0**-60, 1e30, 7e-20])
def test_a_scale_is_the_least_power_of_two_that_holds_the_row(peak):
    x = torch.tensor([[peak, -peak / 2, 0.0]])
    _, scale = linear_fp8.rows_reference(x)
    assert torch.frexp(scale)[0].item() == 0.5
    assert float(x.abs().max()) <= 448 * float(scale)
    assert float(x.abs().max()) > 448 * float(scale) / 2


def test_rounding_is_within_a_sixteenth_of_an_element():
    """Three bits behind the point; below 2^-6 of the row's range, within half of the last one."""
    x = draw((50, 96), F32)
    q, scale = linear_fp8.rows_reference(x)
    off = (values((q, scale)) - x.double()).abs()
    assert bool((off <= torch.maximum(x.double().abs() / 16, scale[:, None].double() * 2**-10)).all())


def test_rows_of_zeros_and_rows_that_are_not_finite():
    x = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [torch.inf, 1.0], [1.0, 2.0]])
    q, scale = linear_fp8.rows_reference(x)
    assert scale.isnan().tolist() == [False, True, True, False]
    assert values((q, scale))[0].tolist() == [0.0, 0.0]
    assert values((q, scale))[3].tolist() == [1.0, 2.0]


# --- kernels beside the reference ------------------------------------------------------------------------------------
@pytest.fixture(autouse=True)
def _rounding(monkeypatch):
    """Torch's cast to e4m3 for that of Triton's interpreter, which makes 64 of 127: no carry reaches the exponent."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        return
    from triton import language as tl
    from triton.runtime import interpreter

    usual = interpreter._convert_float

    def convert(x, given, wanted, mode):
        if wanted != tl.float8e4nv:
            return usual(x, given, wanted, mode)
        return code(torch.from_numpy(x.astype("float32")).to(E4M3)).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def same(found, expected):
    """Of rows and scales."""
    for each, other in zip(found, expected, strict=True):
        finite = torch.where(expected[1].isnan(), 0.0, 1.0) != 0
        assert torch.equal(each[finite].view(torch.uint8), other[finite].view(torch.uint8))
        assert torch.equal(found[1].isnan(), ~finite)


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("shape", cases.MATRICES, ids=str)
def test_rows(shape, dtype, interpreted):
    x = draw(shape, dtype)
    factor = torch.exp2(torch.arange(shape[1]) % 5 - 2.0)
    for each in (None, factor):
        same(linear_fp8._rounded(x, each), linear_fp8.rows_reference(x, each))
    assert ran("fp8_rows") == {"triton"}


def test_rows_with_gaps(interpreted):
    x = draw((20, 64), F32)
    for each in (x[:, 8:40], x.t()):
        same(linear_fp8._rounded(each, None), linear_fp8.rows_reference(each))


def test_rows_that_are_zero_or_not_finite(interpreted):
    x = torch.tensor([[0.0, 0.0], [1.0, torch.nan], [torch.inf, 1.0], [1e-38, 0.0]])
    q, scale = linear_fp8._rounded(x, None)
    assert scale.isnan().tolist() == [False, True, True, False]
    assert values((q, scale))[[0, 3]].tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("shape", cases.MATRICES, ids=str)
def test_gelu_and_its_gradient(shape, interpreted):
    z, da, factor = draw(shape, F32), draw(shape, F32, seed=1), torch.exp2(torch.arange(shape[1]) % 3 - 1.0)
    q, scale = linear_fp8.launch_gelu(z)
    if z.numel():
        torch.testing.assert_close(
            values((q, scale)), values(linear_fp8.gelu_reference(z)), rtol=2**-3, atol=2**-9 * float(scale.max())
        )
    *found, q, scale, partial = linear_fp8.launch_dgelu(da, z, factor)
    *expected, want, wanted, sums = linear_fp8.dgelu_reference(da, z, factor)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(partial.sum(0, keepdim=True), sums, rtol=1e-4, atol=1e-4)
    if z.numel():
        torch.testing.assert_close(
            values((q, scale)), values((want, wanted)), rtol=2**-3, atol=2**-9 * float(wanted.max())
        )


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.sample(3)
def test_weights(dtype, way):
    weights = [draw(shape, dtype, seed=at) for at, shape in enumerate(cases.WEIGHTS)]
    weights.append(draw((32, 16), dtype).t())
    found = Float8Weights(weights)
    for _ in range(2):  # the second time a weight has moved
        found.fill()
        for weight, each in zip(weights, found.each, strict=True):
            same((each.q, each.scale), linear_fp8.rows_reference(weight))
            assert torch.equal(code(each.transposed), code(each.q).t())
        weights[0].data = draw(cases.WEIGHTS[0], dtype, seed=9)
    assert ran("fp8_weight") == {way}


def test_a_weight_of_odd_sizes_is_refused():
    with pytest.raises(ShapeError, match=r"multiples of 16, got \(16, 20\)"):
        Float8Weight.empty(torch.zeros(16, 20))


def test_weights_come_apart_and_together():
    one = [Float8Weight.empty(torch.zeros(16, 32)) for _ in range(2)]
    assert unflattened(flattened(one)) == tuple(one)
    plain = [torch.zeros(2), torch.ones(2)]
    assert unflattened(flattened(plain)) == tuple(plain)


# --- the layer -------------------------------------------------------------------------------------------------------
def rounded_weight(weight):
    found = Float8Weights([weight])
    found.fill()
    return found.each[0]


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_the_product_of_rounded_rows(bias):
    x, weight, b = draw((24, 48), F32), draw((32, 48), F32, seed=1), draw((32,), F32, seed=2) if bias else None
    w8 = rounded_weight(weight)
    y = linear_fp8.linear(x, w8, b)
    expected = values(linear_fp8.rows_reference(x)) @ values((w8.q, w8.scale)).t() + (0 if b is None else b.double())
    torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
    exact = functional.linear(x, weight, b)
    assert float((y - exact).norm() / exact.norm()) < 0.04


def test_its_gradient_is_that_of_the_rounded_weight():
    dy, weight = draw((24, 32), F32), draw((32, 48), F32, seed=1) * torch.exp2(torch.arange(32) % 7 - 3.0)[:, None]
    w8 = rounded_weight(weight)
    dx = linear_fp8.linear_dx(dy, w8)
    expected = values(linear_fp8.rows_reference(dy, w8.scale)) @ w8.q.double()
    torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-3)
    exact = dy @ weight
    assert float((dx - exact).norm() / exact.norm()) < 0.05


def test_back_through_gelu():
    z, dy = draw((24, 64), F32), draw((24, 32), F32, seed=1)
    up, down = draw((64, 48), F32, seed=2), draw((32, 64), F32, seed=3)
    up8, down8 = rounded_weight(up), rounded_weight(down)
    dz, a, sums, rounded = linear_fp8.linear_dz(dy, down8, z, up8, F32)
    leaf = z.clone().requires_grad_()
    gelu = functional.gelu(leaf, approximate="tanh")
    (gelu @ down.t()).backward(dy)
    assert float((dz - leaf.grad).norm() / leaf.grad.norm()) < 0.05
    torch.testing.assert_close(a, gelu.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums, dz.sum(0), rtol=1e-4, atol=1e-4)
    dy1 = linear_fp8.rounded_dx(rounded, up8, F32)
    assert float((dy1 - dz @ up).norm() / (dz @ up).norm()) < 0.05
    m = linear_fp8.gelu_linear(z, down8, None)
    assert float((m - gelu.detach() @ down.t()).norm() / m.norm()) < 0.05


def test_nan_is_not_hidden():
    x = draw((4, 32), F32)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    y = linear_fp8.linear(x, rounded_weight(draw((16, 32), F32, seed=1)), None)
    assert y.isnan().all(1).tolist() == [False, True, True, False]
    assert y[0].isfinite().all()


# --- on a GPU --------------------------------------------------------------------------------------------------------
SHAPES = ((33, 768), (128, 2304), (257, 3072), (64, 16384), (5, 48))


@ON_GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_on_a_gpu(shape):
    x = draw(shape, BF16, "cuda") * torch.exp2(torch.arange(shape[0], device="cuda") % 40 - 20.0)[:, None].bfloat16()
    factor = torch.exp2(torch.arange(shape[1], device="cuda") % 9 - 4.0)
    for each in (None, factor):
        same(linear_fp8._rounded(x, each), linear_fp8.rows_reference(x, each))
    bad = x.clone()
    bad[1, 3], bad[2, 5] = torch.nan, torch.inf
    assert linear_fp8._rounded(bad, None)[1].isnan().nonzero().flatten().tolist() == [1, 2]
    assert ran("fp8_rows") == {"triton"}


@ON_GPU
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_and_its_gradient_on_a_gpu(shape):
    z, da, factor = draw(shape, BF16, "cuda"), draw(shape, BF16, "cuda", seed=1), torch.ones(shape[1], device="cuda")
    q, scale = linear_fp8.launch_gelu(z)
    torch.testing.assert_close(
        values((q, scale)), values(linear_fp8.gelu_reference(z)), rtol=2**-3, atol=2**-9 * float(scale.max())
    )
    *found, q, scale, partial = linear_fp8.launch_dgelu(da, z, factor)
    *expected, want, wanted, sums = linear_fp8.dgelu_reference(da, z, factor)
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=2e-2, atol=1e-3)
    torch.testing.assert_close(partial.sum(0, keepdim=True), sums, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(values((q, scale)), values((want, wanted)), rtol=2**-3, atol=2**-9 * float(wanted.max()))


@ON_GPU
def test_weights_on_a_gpu():
    weights = [draw(shape, F32, "cuda", seed=at) for at, shape in enumerate(((2304, 768), (768, 3072), (48, 32)))]
    found = Float8Weights(weights)
    found.fill()
    for weight, each in zip(weights, found.each, strict=True):
        same((each.q, each.scale), linear_fp8.rows_reference(weight))
        assert torch.equal(code(each.transposed), code(each.q).t())
    assert ran("fp8_weight") == {"triton"}


@ON_GPU
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("M", "N", "K"), [(512, 2304, 768), (100, 768, 3072), (33, 48, 32)])
def test_the_library_multiplies_what_the_reference_does(M, N, K, bias):
    x, weight = draw((M, K), BF16, "cuda"), draw((N, K), F32, "cuda", seed=1)
    b = draw((N,), BF16, "cuda", seed=2) if bias else None
    dy, w8 = draw((M, N), BF16, "cuda", seed=3), rounded_weight(weight)
    rows = linear_fp8.rows_reference(x)
    pairs = [(linear_fp8.linear(x, w8, b), linear_fp8.product_reference(*rows, w8.q, w8.scale, b, F32))]
    rows = linear_fp8.rows_reference(dy, w8.scale)
    pairs.append((linear_fp8.linear_dx(dy, w8), linear_fp8.product_reference(*rows, w8.transposed, None, None, F32)))
    for found, expected in pairs:
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=5e-3 * float(expected.abs().max()))
    assert ran("linear_fp8") == {"cublaslt"}
