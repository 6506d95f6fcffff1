"""softmax over one dimension of N elements.

    y = exp(x - max x) / sum exp(x - max x)        dx = y (dy - sum(y dy))

Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", section 3; the looped kernels
        take maximum and sum in one pass, as Milakov and Gimelshein 2018, arXiv:1805.02867, algorithm 3.
Layout: fwd, bwd, _wide: rows of N contiguous elements, inputs with a distance between rows. _inner: dense memory
        (outer, N, inner) with inner > 1. Computed in float32.
Grid:   fwd and bwd: ROWS rows a program, kept in registers, or a loop over such groups if there are fewer programs;
        _wide: one program a row, which reads it twice, the second time from L2; _inner: one program for BLOCK_I
        neighbouring columns of one outer index, reading them twice.
Bound:  memory: 2 accesses an element forward, 3 backward (beyond the registers 3 and 5, where L2 does not help);
        about 5 operations forward, 4 backward.
"""

import triton
import triton.language as tl


@triton.jit
def softmax_fwd(
    x_ptr, y_ptr, M, N, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)[None, :]
    in_row = (columns < N) | EXACT
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, M, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & in_row
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
        e = tl.exp(x - tl.max(x, 1)[:, None])
        y = e * (1.0 / tl.sum(e, 1))[:, None]
        tl.store(y_ptr + rows[:, None] * N + columns, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd(
    dy_ptr, y_ptr, dx_ptr, M, N, dy_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK_N)[None, :]
    in_row = (columns < N) | EXACT
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, M, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & in_row
        y = tl.load(y_ptr + rows[:, None] * N + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        dx = y * (dy - tl.sum(y * dy, 1)[:, None])
        tl.store(dx_ptr + rows[:, None] * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _shift(largest):
    """What to take off the exponent: 0 where all so far is -inf, so that -inf - -inf does not make a NaN of it."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def softmax_fwd_wide(x_ptr, y_ptr, N, x_stride, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * N
    largest = tl.full([BLOCK_N], float("-inf"), dtype=tl.float32)  # of each lane, joined at the end
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < N, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, x, propagate_nan=tl.PropagateNan.ALL)
        total = total * tl.exp(largest - _shift(larger)) + tl.exp(x - _shift(larger))
        largest = larger
    peak = tl.max(largest, 0)
    scale = 1.0 / tl.sum(total * tl.exp(largest - peak), 0)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < N, other=float("-inf")).to(tl.float32)
        tl.store(y_ptr + at, (tl.exp(x - peak) * scale).to(y_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def softmax_bwd_wide(dy_ptr, y_ptr, dx_ptr, N, dy_stride, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    y_ptr += row * N
    dx_ptr += row * N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        total += y * tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    dot = tl.sum(total, 0)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        y = tl.load(y_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (y * (dy - dot)).to(dx_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def softmax_fwd_inner(x_ptr, y_ptr, N, inner, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr):
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
    scale = 1.0 / tl.sum(total * tl.exp(largest - peak[None, :]), 0)
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & in_columns
        at = rows[:, None].to(tl.int64) * inner + columns[None, :]
        x = tl.load(x_ptr + at, mask=inside, other=float("-inf")).to(tl.float32)
        y = tl.exp(x - peak[None, :]) * scale[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def softmax_bwd_inner(dy_ptr, y_ptr, dx_ptr, N, inner, BLOCK_N: tl.constexpr, BLOCK_I: tl.constexpr):
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
        total += y * tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dot = tl.sum(total, 0)[None, :]
    for start in range(0, N, BLOCK_N):
        rows = start + tl.arange(0, BLOCK_N)
        inside = (rows < N)[:, None] & in_columns
        at = rows[:, None].to(tl.int64) * inner + columns[None, :]
        y = tl.load(y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, (y * (dy - dot)).to(dx_ptr.dtype.element_ty), mask=inside)
