"""softmax over one dimension of N elements; with LOG its logarithm, log_softmax.

    y = exp(x - max x) / sum exp(x - max x)                 dx = y (dy - sum(y dy))
    y = x - max x - log sum exp(x - max x)    with LOG      dx = dy - exp(y) sum(dy)

Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", section 3; the looped kernels
        take maximum and sum in one pass, as Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
Layout: all but _inner: rows of N contiguous elements, inputs with a distance between rows. _inner: dense memory
        (outer, N, inner) with inner > 1. Computed in float32.
Grid:   fwd and bwd: ROWS rows a program, kept in registers; _wide: one program a row, which reads it twice, the second
        time from L2; _inner: one program for BLOCK_I neighbouring columns of one outer index, reading them twice.
Bound:  memory: 2 accesses an element forward, 3 backward (beyond the registers 3 and 5, where L2 does not help);
        about 5 operations forward, 4 backward. log2(e) is not folded into one multiply-add with the maximum: its
        product with a large maximum is rounded, and x = max x would no longer give exp 0.
EVICTION: see ops/_launch.py.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_fwd(
    x_ptr, y_ptr, M, N, x_stride,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)[None, :]
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = ((rows < M) | (ROWS == 1))[:, None] & ((columns < N) | EXACT)
    at = rows[:, None] * x_stride + columns
    x = tl.load(x_ptr + at, mask=inside, other=float("-inf"), eviction_policy=EVICTION).to(tl.float32)
    x -= tl.max(x, 1)[:, None]
    e = tl.exp(x)
    y = _normalised(x, e, tl.sum(e, 1)[:, None], LOG)
    tl.store(y_ptr + rows[:, None] * N + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride,
    LOG: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)[None, :]
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = ((rows < M) | (ROWS == 1))[:, None] & ((columns < N) | EXACT)
    at = rows[:, None] * N + columns
    y = tl.load(y_ptr + at, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    dy_at = rows[:, None] * dy_stride + columns
    dy = tl.load(dy_ptr + dy_at, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    dx = _gradient(dy, y, tl.sum(_term(dy, y, LOG), 1)[:, None], LOG)
    tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _normalised(x, e, total, LOG: tl.constexpr):
    """Return the result from x minus its maximum, the exponential of that, and their sum."""
    if LOG:
        return x - tl.log(total)
    else:
        return e * (1.0 / total)


@triton.jit
def _term(dy, y, LOG: tl.constexpr):
    if LOG:
        return dy
    else:
        return y * dy


@triton.jit
def _gradient(dy, y, total, LOG: tl.constexpr):
    if LOG:
        return dy - tl.exp(y) * total
    else:
        return y * (dy - total)


@triton.jit
def _shift(largest):
    """Return the shift of the exponent: 0 where all values so far are -inf, so that -inf - -inf gives no NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _sums(x_ptr, first, end, BLOCK_N: tl.constexpr):
    """Return the maximum of a part of a row, and the sum of exp(x - maximum): 0 where all is -inf."""
    largest = tl.full([BLOCK_N], float("-inf"), dtype=tl.float32)  # of each lane, joined at the end
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(largest - _shift(larger)) + tl.exp(x - _shift(larger))
        largest = larger
    peak = tl.max(largest, 0)
    return peak, tl.sum(total * tl.exp(largest - _shift(peak)), 0)


@triton.jit
def _write(x_ptr, y_ptr, peak, total, first, end, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    for start in range(first, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < end, other=float("-inf")).to(tl.float32)
        y = _normalised(x - peak, tl.exp(x - peak), total, LOG)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < end)


@triton.jit
def softmax_fwd_wide(x_ptr, y_ptr, N, x_stride, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    peak, total = _sums(x_ptr, 0, N, BLOCK_N)
    _write(x_ptr, y_ptr + row * N, peak, total, 0, N, LOG, BLOCK_N)


@triton.jit
def softmax_fwd_part(x_ptr, sums_ptr, N, x_stride, span, BLOCK_N: tl.constexpr):
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    peak, total = _sums(x_ptr + row * x_stride, part * span, tl.minimum(part * span + span, N), BLOCK_N)
    parts = tl.num_programs(0)
    sums_ptr += row * 2 * parts + part
    tl.store(sums_ptr, peak)
    tl.store(sums_ptr + parts, total)


@triton.jit
def softmax_fwd_join(
    x_ptr, sums_ptr, y_ptr, N, x_stride, span, LOG: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr
):
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts, each = tl.num_programs(0), tl.arange(0, PARTS)
    sums_ptr += row * 2 * parts + each
    peaks = tl.load(sums_ptr, mask=each < parts, other=float("-inf"))
    totals = tl.load(sums_ptr + parts, mask=each < parts, other=0.0)
    peak = tl.max(peaks, 0)
    total = tl.sum(totals * tl.exp(peaks - peak), 0)
    end = tl.minimum(part * span + span, N)
    _write(x_ptr + row * x_stride, y_ptr + row * N, peak, total, part * span, end, LOG, BLOCK_N)


@triton.jit
def _gradient_sum(dy_ptr, y_ptr, first, end, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(first, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + at, mask=at < end, other=0.0).to(tl.float32)
        total += _term(tl.load(dy_ptr + at, mask=at < end, other=0.0).to(tl.float32), y, LOG)
    return tl.sum(total, 0)


@triton.jit
def _write_gradient(dy_ptr, y_ptr, dx_ptr, whole, first, end, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    for start in range(first, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + at, mask=at < end, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=at < end, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, _gradient(dy, y, whole, LOG).to(dx_ptr.dtype.element_ty), mask=at < end)


@triton.jit
def softmax_bwd_wide(dy_ptr, y_ptr, dx_ptr, N, dy_stride, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * N
    whole = _gradient_sum(dy_ptr, y_ptr, 0, N, LOG, BLOCK_N)
    _write_gradient(dy_ptr, y_ptr, dx_ptr + row * N, whole, 0, N, LOG, BLOCK_N)


@triton.jit
def softmax_bwd_part(dy_ptr, y_ptr, sums_ptr, N, dy_stride, span, LOG: tl.constexpr, BLOCK_N: tl.constexpr):
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    end = tl.minimum(part * span + span, N)
    total = _gradient_sum(dy_ptr + row * dy_stride, y_ptr + row * N, part * span, end, LOG, BLOCK_N)
    tl.store(sums_ptr + row * tl.num_programs(0) + part, total)


@triton.jit
def softmax_bwd_join(
    dy_ptr, y_ptr, sums_ptr, dx_ptr, N, dy_stride, span,
    LOG: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts, each = tl.num_programs(0), tl.arange(0, PARTS)
    whole = tl.sum(tl.load(sums_ptr + row * parts + each, mask=each < parts, other=0.0), 0)
    end = tl.minimum(part * span + span, N)
    dy_ptr += row * dy_stride
    _write_gradient(dy_ptr, y_ptr + row * N, dx_ptr + row * N, whole, part * span, end, LOG, BLOCK_N)


@triton.jit
def softmax_fwd_inner(x_ptr, y_ptr, N, inner, LOG: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr):
    strips = tl.cdiv(inner, BLOCK_I)
    outer = (tl.program_id(0) // strips).to(tl.int64)
    columns = (tl.program_id(0) % strips) * BLOCK_I + tl.arange(0, BLOCK_I)
    x_ptr += outer * N * inner
    y_ptr += outer * N * inner
    in_columns = (columns < inner)[None, :]
    largest = tl.full([BLOCK_N, BLOCK_I], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_N, BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & in_columns
        at = rows[:, None].to(tl.int64) * inner + columns[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(largest - _shift(larger)) + tl.exp(x - _shift(larger))
        largest = larger
    peak = tl.max(largest, 0)
    whole = tl.sum(total * tl.exp(largest - peak[None, :]), 0)[None, :]
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & in_columns
        at = rows[:, None].to(tl.int64) * inner + columns[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        y = _normalised(x - peak[None, :], tl.exp(x - peak[None, :]), whole, LOG)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd_inner(dy_ptr, y_ptr, dx_ptr, N, inner, LOG: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr):
    strips = tl.cdiv(inner, BLOCK_I)
    outer = (tl.program_id(0) // strips).to(tl.int64)
    columns = (tl.program_id(0) % strips) * BLOCK_I + tl.arange(0, BLOCK_I)
    dy_ptr += outer * N * inner
    y_ptr += outer * N * inner
    dx_ptr += outer * N * inner
    in_columns = (columns < inner)[None, :]
    total = tl.zeros([BLOCK_N, BLOCK_I], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & in_columns
        at = rows[:, None].to(tl.int64) * inner + columns[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        total += _term(tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32), y, LOG)
    whole = tl.sum(total, 0)[None, :]
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & in_columns
        at = rows[:, None].to(tl.int64) * inner + columns[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, _gradient(dy, y, whole, LOG).to(dx_ptr.dtype.element_ty), mask=inside)
