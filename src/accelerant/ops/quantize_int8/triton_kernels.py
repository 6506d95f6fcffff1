"""quantize_int8: rounds rows to 8-bit integers with a scale per row.

    scale = max |x| / 127 (1 where that is 0)    q = round(x / scale), halves to even

Source: Jacob et al. 2018, arXiv:1712.05877, section 2, with zero point 0; scales per row as in Dettmers et al. 2022,
        arXiv:2208.07339, section 3.1. Rounds by adding 1.5 * 2^23, after which the low bits of the float32 are the
        integer.
Layout: x (M, N), rows of N contiguous elements x_stride apart; q (M, N) int8 dense; scale (M,) float32. Magnitudes are
        compared as bit patterns, in which NaN is above infinity; both become the row's scale, with q = 0.
Grid:   fwd: one program per ROWS rows, in registers. _wide: one program per row, which it reads twice, the second time
        from L2. _part, _join: programs for `span` columns of a row each; peaks (M, parts) int32.
Bound:  memory: x is read and q written once, 3 bytes per element of bfloat16; about 15 operations, one a division.
"""

import triton
import triton.language as tl

ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23


@triton.jit
def _magnitude(x):
    """Return the bits of |x| in float32: integers ordered as the magnitudes."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(bits):
    scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def _quantized(x, scale):
    y = tl.minimum(tl.maximum(tl.div_rn(x, scale), -127.0), 127.0)
    return tl.where(scale < float("inf"), (y + ROUND).to(tl.int32, bitcast=True), 0).to(tl.int8)


@triton.jit
def quantize_int8_fwd(
    x_ptr, q_ptr, scale_ptr, M, N, x_stride,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    here = row < M
    inside = here[:, None] if EXACT else here[:, None] & (columns < N)
    x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = _scale(tl.max(_magnitude(x), 1))
    tl.store(scale_ptr + row, scale, mask=here)
    q = _quantized(x, tl.broadcast_to(scale[:, None], x.shape))
    tl.store(q_ptr + row[:, None] * N + columns, q, mask=inside)


@triton.jit
def _peak(x_ptr, first, end, BLOCK_N: tl.constexpr):
    """Return the bits of the largest magnitude from first to end."""
    peak = tl.zeros([BLOCK_N], dtype=tl.int32)
    for start in range(first, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < end, other=0.0).to(tl.float32)
        peak = tl.maximum(peak, _magnitude(x))
    return tl.max(peak, 0)


@triton.jit
def _write(x_ptr, q_ptr, scale, first, end, BLOCK_N: tl.constexpr):
    for start in range(first, end, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < end, other=0.0).to(tl.float32)
        tl.store(q_ptr + at, _quantized(x, tl.broadcast_to(scale, x.shape)), mask=at < end)


@triton.jit
def quantize_int8_wide(x_ptr, q_ptr, scale_ptr, N, x_stride, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    scale = _scale(_peak(x_ptr, 0, N, BLOCK_N))
    tl.store(scale_ptr + row, scale)
    _write(x_ptr, q_ptr + row * N, scale, 0, N, BLOCK_N)


@triton.jit
def quantize_int8_part(x_ptr, peaks_ptr, N, x_stride, span, BLOCK_N: tl.constexpr):
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    peak = _peak(x_ptr + row * x_stride, part * span, tl.minimum(part * span + span, N), BLOCK_N)
    tl.store(peaks_ptr + row * tl.num_programs(0) + part, peak)


@triton.jit
def quantize_int8_join(
    x_ptr, peaks_ptr, q_ptr, scale_ptr, N, x_stride, span, BLOCK_N: tl.constexpr, PARTS: tl.constexpr
):
    part, row = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    parts, each = tl.num_programs(0), tl.arange(0, PARTS)
    scale = _scale(tl.max(tl.load(peaks_ptr + row * parts + each, mask=each < parts, other=0), 0))
    tl.store(scale_ptr + row, scale, mask=part == 0)
    end = tl.minimum(part * span + span, N)
    _write(x_ptr + row * x_stride, q_ptr + row * N, scale, part * span, end, BLOCK_N)
