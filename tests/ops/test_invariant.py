"""Products of rows that do not depend on one another: the same bits at any number of rows, for drawn shapes."""

import pytest
import torch

from accelerant.ops import _invariant, _rows
from accelerant.ops.linear_int4.op import dequantize_int4
from accelerant.runtime.dispatch import force
from accelerant.runtime.streams.graphs import counting

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def drawn(rng, dtype, most=70):
    """x, a weight and its scales: of x's dtype, or of integers."""
    rows, N, K = rng.randint(1, most), rng.randint(1, 90), rng.choice([1, 7, 16, rng.randint(1, 300), 512])
    if rng.random() < 0.5:
        return torch.randn(rows, K).to(dtype), torch.randint(-128, 128, (N, K), dtype=torch.int8), torch.rand(N) / 50
    return torch.randn(rows, K).to(dtype), torch.randn(N, K).to(dtype), None


def wide(x, weight, scale, bias, residual=None, gated=False):
    y = x.double() @ (weight.double() * (1 if scale is None else scale.double()[:, None])).T
    y = y if bias is None else y + bias.double()
    if gated:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.search(0.02)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_a_row_is_the_same_among_any_others(dtype, rng, record_property):
    count = 15
    record_property("examples", count)
    for _ in range(count):
        x, weight, scale = drawn(rng, dtype)
        bias = rng.choice([None, torch.randn(len(weight)).to(dtype)])
        y = _invariant.linear(x, weight, bias, scale)
        assert y.dtype == dtype
        expected = wide(x, weight, scale, bias)
        bound = TOLERANCES[dtype] * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=bound)
        for _ in range(4):
            some = torch.randperm(len(x))[: rng.randint(1, len(x))]
            assert torch.equal(_invariant.linear(x[some], weight, bias, scale), y[some]), (x.shape, weight.shape, some)


def test_calls_are_counted_in_the_ledger_and_in_captured_graphs():
    x, weight = torch.randn(3, 40), torch.randn(24, 40)
    for _ in range(2):
        with counting(lambda device: True) as calls:
            _invariant.linear(x, weight, gated=True)
            _invariant.linear(x, weight.to(torch.int8), None, torch.ones(24))
        counted = {(op, name): count for (op, name, _, _), count in calls.items()}
        assert counted == {("linear_invariant", "llvm"): 1, ("swiglu_fwd", "torch"): 1}
        cases = [case for op, *_, case in calls if op == "linear_invariant"]
        assert cases == ["float32 24x40 float32, any rows", "float32 24x40 int8, any rows"]


def test_threads_do_not_change_a_sum(monkeypatch):
    x, weight = torch.randn(9, 200), torch.randn(150, 200)
    expected = _rows.products(x, weight)
    monkeypatch.setattr(_rows, "_SHARE_PRODUCTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    assert torch.equal(_rows.products(x, weight), expected)
    monkeypatch.setattr(_rows, "_BLOCK_BYTES", 1)
    assert torch.equal(_rows.products(x, weight), expected)


@pytest.mark.parametrize("wide", [True, False])
def test_narrow_vectors_too(wide, monkeypatch):
    """The kernel of processors without AVX-512, and one of a half precision, compute the same products."""
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if wide else "AVX2")
    _rows._compiled.cache_clear()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x, weight = torch.randn(7, 37), torch.randn(11, 37).to(dtype)
            torch.testing.assert_close(_rows.products(x, weight), x @ weight.float().T)
        q, scale, zero = torch.randint(0, 256, (9, 128), dtype=torch.uint8), torch.rand(9, 2), torch.rand(9, 2) * 15
        x = torch.randn(5, 256)
        halves = q.view(9, 2, 1, 64)
        numbers = torch.cat((halves & 15, halves >> 4), 2).view(9, 2, 128)
        expected = x @ ((numbers - zero[..., None]) * scale[..., None]).view(9, 256).T
        torch.testing.assert_close(_rows.products(x, q, scale, zero), expected, rtol=1e-4, atol=1e-4)
    finally:
        _rows._compiled.cache_clear()


def test_nothing_to_compute():
    for shape, N in (((0, 4), 3), ((2, 4), 0), ((2, 0), 3)):
        y = _invariant.linear(torch.zeros(shape), torch.zeros(N, shape[1]))
        assert y.shape == (shape[0], N)
        assert not y.any()
    assert _invariant.linear(torch.zeros(0, 4).double(), torch.zeros(3, 4).double()).shape == (0, 3)


def test_by_the_kernel_of_a_gpu(interpreted, monkeypatch):
    """The launches that a GPU gets, here in the interpreter."""
    monkeypatch.setattr(_invariant, "_on_cpu", lambda x: False)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        x, bias = torch.randn(21, 40).to(dtype), torch.randn(66).to(dtype)
        for weight, scale in (
            (torch.randn(66, 40).to(dtype) / 8, None),
            (torch.randint(-99, 99, (66, 40)).char(), torch.rand(66) / 99),
        ):
            for gated in (False, True):
                residual = torch.randn(21, 33 if gated else 66).to(dtype)
                y = _invariant.linear(x, weight, bias, scale, residual=residual, gated=gated)
                expected = wide(x, weight, scale, bias, residual, gated)
                bound = TOLERANCES[dtype] * float(expected.abs().max())
                torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=bound)
                part = _invariant.linear(x[5:7], weight, bias, scale, residual=residual[5:7], gated=gated)
                assert torch.equal(part, y[5:7])


def four_bits(N, K, zero, device="cpu"):
    """A weight for linear_int4, its scales and zeros, and what they represent."""
    q = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, device=device)
    scale = torch.rand(N, K // 128, device=device) / 8 + 0.01
    zeros = torch.rand(N, K // 128, device=device) * 15 if zero else None
    return q, scale, zeros, dequantize_int4(q, scale.double(), None if zeros is None else zeros.double())


@pytest.mark.parametrize("zero", [False, True])
def test_four_bits_by_the_kernel_of_a_gpu(zero, interpreted, monkeypatch):
    monkeypatch.setattr(_invariant, "_on_cpu", lambda x: False)
    for dtype in (torch.float32, torch.float16):
        x, residual = torch.randn(21, 384).to(dtype), torch.randn(21, 33).to(dtype)
        q, scale, zeros, dense = four_bits(33, 384, zero)
        y = _invariant.linear(x, q, None, scale, zeros, residual=residual)
        expected = wide(x, dense, None, None, residual)
        bound = TOLERANCES[dtype] * float(expected.abs().max())
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=bound)
        part = _invariant.linear(x[5:7], q, None, scale, zeros, residual=residual[5:7])
        assert torch.equal(part, y[5:7])


def test_a_row_that_is_not_finite_stays_so(interpreted, monkeypatch):
    """Integers have no NaN: the row's unit is."""
    monkeypatch.setattr(_invariant, "_on_cpu", lambda x: False)
    x = torch.randn(4, 128).half()
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    q, scale, _, _ = four_bits(5, 128, False)
    weight = torch.randint(-99, 99, (5, 128)).char()
    for norm in (None, torch.ones(128).half()):
        for args in ((weight, None, scale[:, 0]), (q, None, scale)):
            y = _invariant.linear(x, *args, norm=norm, eps=1e-5)
            assert y.isnan().all(1).tolist() == [False, True, True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_of_four_bits_is_the_same_on_a_gpu(dtype, zero, gated):
    for N, K in ((4096, 4096), (1000, 384), (514, 14336)):
        x = torch.randn(512, K, device="cuda").div(16).to(dtype)
        q, scale, zeros, dense = four_bits(N, K, zero, "cuda")
        residual = torch.randn(512, N // 2 if gated else N, device="cuda").to(dtype)
        y = _invariant.linear(x, q, None, scale, zeros, residual=residual, gated=gated)
        expected = wide(x, dense, None, None, residual, gated)
        bound = TOLERANCES[dtype] * float(expected.abs().max())
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=bound)
        for rows in (1, 2, 8, 9, 16, 17, 64, 65, 200):
            some = slice(512 - rows, None)
            part = _invariant.linear(x[some], q, None, scale, zeros, residual=residual[some], gated=gated)
            assert torch.equal(part, y[some]), (N, K, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("integers", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_is_the_same_on_a_gpu(dtype, integers, gated):
    """Each size of tile adds in the same order; see _invariant.tile_plan."""
    for N, K in ((4096, 4096), (1000, 336), (512, 14336)):
        x = torch.randn(512, K, device="cuda").to(dtype)
        weight, scale = (torch.randn(N, K, device="cuda") / K**0.5).to(dtype), None
        if integers:
            weight, scale = torch.randint(-128, 128, (N, K), device="cuda").char(), torch.rand(N, device="cuda") / 4096
        residual = torch.randn(512, N // 2 if gated else N, device="cuda").to(dtype)
        y = _invariant.linear(x, weight, None, scale, residual=residual, gated=gated)
        expected = wide(x, weight, scale, None, residual, gated)
        bound = TOLERANCES[dtype] * float(expected.abs().max())
        torch.testing.assert_close(y.double(), expected, rtol=TOLERANCES[dtype], atol=bound)
        for rows in (1, 2, 3, 16, 17, 64, 65, 128, 200, 511):
            some = slice(512 - rows, None)
            part = _invariant.linear(x[some], weight, None, scale, residual=residual[some], gated=gated)
            assert torch.equal(part, y[some]), (N, K, rows)


def test_linear_int8_of_a_cpu_has_the_same_rows(uninterpreted):
    from accelerant import ops

    x, weight, scale = torch.randn(40, 72), torch.randint(-128, 128, (50, 72), dtype=torch.int8), torch.rand(50)
    y = ops.linear_int8(x, weight, scale)
    assert torch.equal(ops.linear_int8(x[3:4], weight, scale), y[3:4])
    with force(linear_int8_fwd="torch"):
        torch.testing.assert_close(ops.linear_int8(x, weight, scale), y, rtol=1e-5, atol=1e-3)
