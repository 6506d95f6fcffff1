"""Weights of 4 bits: rounding, packing, and the same bits of a row among any others."""

import pytest
import torch

from accelerant import ops
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops.linear_int4.op import dequantize_int4, linear_int4_reference, quantize_int4
from refusals import assert_raises


@pytest.mark.parametrize("symmetric", [True, False])
def test_rounding_is_within_half_a_step(symmetric):
    weight = torch.randn(9, 384) + torch.linspace(-2, 2, 9)[:, None]
    weight[0, :128] = 0
    packed, scale, zero = quantize_int4(weight, symmetric=symmetric)
    assert packed.shape == (9, 192)
    assert (zero is None) == symmetric
    error = (dequantize_int4(packed, scale, zero) - weight).unflatten(1, (3, 128)).abs().amax(-1)
    assert (error <= scale * (0.501 if symmetric else 1.001)).all()  # a zero is an integer: its rounding is half a step
    assert not dequantize_int4(packed, scale, zero)[0, :128].any()


def test_zeros_serve_weights_that_are_all_positive():
    weight = torch.rand(4, 128) + 0.2
    errors = []
    for symmetric in (True, False):
        errors.append(float((dequantize_int4(*quantize_int4(weight, symmetric=symmetric)) - weight).abs().max()))
    assert errors[1] < errors[0]


def test_the_layout_that_is_documented():
    packed, scale, _ = quantize_int4(torch.arange(128.0).sub(64)[None] / 64 * 7.9)
    assert int(packed[0, 3] & 15) == round(float((3 - 64) / 64 * 7.9 / scale)) + 8
    assert int(packed[0, 3] >> 4) == round(float(3 / 64 * 7.9 / scale)) + 8


@pytest.mark.search(0.01)
def test_a_row_is_the_same_among_any_others(rng, record_property, uninterpreted):
    count = 12
    record_property("examples", count)
    for _ in range(count):
        rows, N, K = rng.randint(1, 50), rng.randint(1, 70), 128 * rng.randint(1, 5)
        dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
        x, weight = torch.randn(rows, K).to(dtype), quantize_int4(torch.randn(N, K), symmetric=rng.random() < 0.5)
        y = ops.linear_int4(x, *weight)
        expected = linear_int4_reference(x.double(), *weight)
        bound = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 0.15}[dtype]
        torch.testing.assert_close(y.double(), expected, rtol=bound, atol=bound)
        some = torch.randperm(rows)[: rng.randint(1, rows)]
        assert torch.equal(ops.linear_int4(x[some], *weight), y[some])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_row_is_the_same_on_a_gpu(dtype):
    for N, K in ((4096, 4096), (1000, 384), (512, 14336)):
        x = torch.randn(300, K, device="cuda").to(dtype)
        weight = quantize_int4(torch.randn(N, K, device="cuda"))
        y = ops.linear_int4(x, *weight)
        for rows in (1, 2, 16, 17, 64, 65, 299):
            assert torch.equal(ops.linear_int4(x[300 - rows :], *weight), y[300 - rows :]), (N, K, rows)


def test_gradients_reach_x():
    x, weight = torch.randn(3, 128, dtype=torch.float64, requires_grad=True), quantize_int4(torch.randn(4, 128))
    dense = dequantize_int4(*weight).double()
    ops.linear_int4(x, weight[0], weight[1].double()).sum().backward()
    torch.testing.assert_close(x.grad, dense.sum(0).expand(3, -1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("change", "error", "words"), [
    ({0: torch.zeros(128)}, ShapeError, r"with rows, got \(128,\)"),
    ({0: torch.zeros(2, 256)}, ShapeError, r"weight must be \(N, 256 / 2\)"),
    ({0: torch.zeros(2, 128, dtype=torch.int32)}, UnsupportedDtype, "x is int32"),
    ({1: torch.zeros(3, 64, dtype=torch.int8)}, UnsupportedDtype, "weight must be uint8"),
    ({2: None}, TypeError, "scale is a NoneType"),
    ({2: torch.zeros(3)}, ShapeError, r"scale must be \(3, 1\), got \(3,\)"),
    ({3: torch.zeros(3, 1).half()}, UnsupportedDtype, "zero must be float32, got float16"),
    ({4: torch.zeros(4)}, ShapeError, r"bias must be \(3,\), got \(4,\)"),
])  # fmt: skip
def test_refuses(change, error, words):
    args = [torch.zeros(2, 128), torch.zeros(3, 64, dtype=torch.uint8), torch.ones(3, 1), None, None]
    assert_raises(error, words, lambda: ops.linear_int4(*(change.get(at, x) for at, x in enumerate(args))))


def test_quantize_refuses_other_widths():
    assert_raises(ShapeError, "multiple of 128", quantize_int4, torch.zeros(2, 100))
