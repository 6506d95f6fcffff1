"""Quantization to 8-bit floating point (e4m3) for products: rows are scaled to its range and rounded.

    rows    q = e4m3(x f / s), s one power of two per row, f one factor per column (1 without)
    gelu    rows of gelu(z)
    dgelu   dz = da gelu'(z), a = gelu(z), sums of dz's columns, and rows of dz

s is the least power of two with max |x f| <= 448 s. For a gradient f are the scales of the weight's rows, which are
inside the product's sum and cannot be applied after it. Scaling by powers of two is exact. A row that is not finite
gets the scale NaN, and so does the row of the product.

Source: Micikevicius et al. 2022, arXiv:2209.05433, section 3 (e4m3: largest number 448, no infinity); gelu as in
        accelerant.ops.gelu.
Layout: x, z, da (M, N), rows of contiguous elements; x and da with row strides; q bytes (M, N) dense; s and f float32.
Grid:   rows, gelu: one program per ROWS rows, in registers. dgelu: one program per `span` rows, ROWS at a time, with
        partial sums of the columns.
Bound:  memory: 3 bytes per element of bfloat16 (rows, gelu), 9 (dgelu).
"""

import triton
import triton.language as tl

from accelerant.ops.gelu.triton_kernels import _gelu, _gelu_slope
from accelerant.ops.quantize_int8.triton_kernels import _magnitude

_TINY = tl.constexpr(0x0D800000)  # 2^-100: smaller rows count as 0, so that 1 / s stays finite


@triton.jit
def _scale(bits):
    """Return the scale of a row's largest magnitude; 448 = 1.75 * 2^8, so mantissas above 1.75 raise the exponent."""
    power = ((tl.maximum(bits, _TINY) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    return tl.where(bits < 0x7F800000, power, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _rounded(x, scale):
    return (x * (1.0 / scale)).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def linear_fp8_rows(
    x_ptr, factor_ptr, q_ptr, scale_ptr, M, N, stride,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    here = row < M
    inside = here[:, None] if EXACT else here[:, None] & (columns < N)
    x = tl.load(x_ptr + row[:, None] * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + columns, mask=columns < N, other=0.0)
    scale = _scale(tl.max(_magnitude(x), 1))
    tl.store(scale_ptr + row, scale, mask=here)
    tl.store(q_ptr + row[:, None] * N + columns, _rounded(x, scale[:, None]), mask=inside)


@triton.jit
def linear_fp8_gelu(
    z_ptr, q_ptr, scale_ptr, M, N,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_N)[None, :]
    here = row < M
    inside = here[:, None] if EXACT else here[:, None] & (columns < N)
    at = row[:, None] * N + columns
    a = _gelu(tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32), True, True)
    scale = _scale(tl.max(_magnitude(a), 1))
    tl.store(scale_ptr + row, scale, mask=here)
    tl.store(q_ptr + at, _rounded(a, scale[:, None]), mask=inside)


@triton.jit
def linear_fp8_dgelu(
    da_ptr, z_ptr, factor_ptr, dz_ptr, a_ptr, q_ptr, scale_ptr, partial_ptr, M, N, stride, span,
    EXACT: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_N)[None, :]
    factor = tl.load(factor_ptr + columns, mask=columns < N, other=0.0)
    end = tl.minimum((part + 1) * span, M)
    sums = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    for start in tl.range(part * span, end, ROWS, num_stages=STAGES):
        row = start + tl.arange(0, ROWS)
        here = row < end
        inside = here[:, None] if EXACT else here[:, None] & (columns < N)
        at = row[:, None] * N + columns
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_ptr + row[:, None] * stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(a_ptr + at, _gelu(z, True, True).to(a_ptr.dtype.element_ty), mask=inside)
        dz = da * _gelu_slope(z, True, True)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        sums += dz
        dz *= factor
        scale = _scale(tl.max(_magnitude(dz), 1))
        tl.store(scale_ptr + row, scale, mask=here)
        tl.store(q_ptr + at, _rounded(dz, scale[:, None]), mask=inside)
    tl.store(partial_ptr + part * N + tl.arange(0, BLOCK_N), tl.sum(sums, 0), mask=tl.arange(0, BLOCK_N) < N)
