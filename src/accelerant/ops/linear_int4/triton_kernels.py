"""linear_int4: products with a weight of 4-bit integers, in groups of 128 columns with a scale and a zero each.

    y[m, n] = sum_g scale[n, g] (sum_k x[m, k] q[n, k] - zero[n, g] sum_k x[m, k]) + bias[n],  k in group g

Source: groups with scale and zero as in Frantar et al. 2022, arXiv:2210.17323, section 4.
Layout: x (M, K) and y (M, N), contiguous; weight (N, K / 2) uint8: byte i of a group's 64 has column i in its lower
        half and column i + 64 in its upper one; scale and zero (N, K / 128), a zero that is absent is 8. The integers
        are exact in every dtype, so products are those of x alone, scaled in float32 once per group.
Grid:   one program per tile of y, over all of K: its sums are in the same order whatever the tile and M.
Bound:  few rows: memory, N K / 2 bytes, and the conversion of the integers; many: tensor cores, 2 M N K flops.
"""

import triton
import triton.language as tl

from accelerant.ops.linear_gelu.triton_kernels import _tile
from accelerant.ops.linear_int8.triton_kernels import _finished, _joined, _store, _sums


@triton.jit
def _numbers(q, x, BITS: tl.constexpr):
    """Return integers below 16 in the dtype of x. BITS: as the last bits of 128 in bfloat16, without conversions."""
    if BITS:
        return ((q.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True)) - 128.0
    else:
        return q.to(x.dtype)


@triton.jit
def linear_int4_fwd(
    x_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, y_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, GROUP: tl.constexpr, UPCAST: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    groups = K // 128
    lanes = tl.arange(0, 64)
    lines, outputs = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    m = tl.where(row + lines < M, row + lines, 0).to(tl.int64)
    n = tl.where(column + outputs < N, column + outputs, 0).to(tl.int64)
    x_at = x_ptr + m[:, None] * K + lanes[None, :]
    weight_at = weight_ptr + n[:, None] * (groups * 64) + lanes[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for first in range(0, groups, UNROLL):
        for u in tl.static_range(UNROLL):
            g = first + u
            inside = (lanes < tl.where(g < groups, 64, 0))[None, :]
            q = tl.load(weight_at + g * 64, mask=inside, other=0)
            low = tl.load(x_at + g * 128, mask=inside, other=0.0)
            high = tl.load(x_at + g * 128 + 64, mask=inside, other=0.0)
            scale = tl.load(scale_ptr + n * groups + g, mask=outputs < tl.where(g < groups, BLOCK_N, 0), other=0.0)
            if UPCAST:
                low = low.to(tl.float32)
                high = high.to(tl.float32)
            part = tl.dot(_numbers(q & 15, low, BITS), tl.trans(low), input_precision="ieee")
            part = tl.dot(_numbers(q >> 4, low, BITS), tl.trans(high), part, input_precision="ieee")
            total = tl.sum(low.to(tl.float32), 1) + tl.sum(high.to(tl.float32), 1)
            if zero_ptr is None:
                part -= 8.0 * total[None, :]
            else:
                zero = tl.load(zero_ptr + n * groups + g, mask=outputs < tl.where(g < groups, BLOCK_N, 0), other=0.0)
                part -= zero.to(tl.float32)[:, None] * total[None, :]
            acc += part * scale.to(tl.float32)[:, None]
    here = column + outputs < N
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=here, other=0.0).to(tl.float32)[:, None]
    at = y_ptr + m[None, :] * N + n[:, None]
    tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=here[:, None] & (row + lines < M)[None, :])


@triton.jit
def linear_int4_dequantize(weight_ptr, scale_ptr, zero_ptr, y_ptr, K, BLOCK: tl.constexpr):
    """Write a row of the represented weight."""
    row = tl.program_id(0).to(tl.int64)
    groups = K // 128
    lanes = tl.arange(0, 64)[None, :]
    for first in range(0, groups, BLOCK):
        group = first + tl.arange(0, BLOCK)[:, None]
        inside = group < groups
        q = tl.load(weight_ptr + row * (K // 2) + group * 64 + lanes, mask=inside, other=0)
        scale = tl.load(scale_ptr + row * groups + group, mask=inside, other=0.0).to(tl.float32)
        zero = 8.0
        if zero_ptr is not None:
            zero = tl.load(zero_ptr + row * groups + group, mask=inside, other=0.0).to(tl.float32)
        at = y_ptr + row * K + group * 128 + lanes
        low = ((q & 15).to(tl.float32) - zero) * scale
        high = ((q >> 4).to(tl.float32) - zero) * scale
        tl.store(at, low.to(y_ptr.dtype.element_ty), mask=inside)
        tl.store(at + 64, high.to(y_ptr.dtype.element_ty), mask=inside)


# --- x in 24-bit integers --------------------------------------------------------------------------------------------
#
#     z[m, n] = unit[m] sum_g scale[n, g] (sum_k i[m, k] (q[n, k] - 8) - (zero[n, g] - 8) sum_k i[m, k]) + bias[n]
#     y = f(z) + residual,  f(z) = z, or silu(z[:N]) z[N:] if the weight has 2 N rows, the gates first
#
# Layout: i = 65536 high + 256 middle + low; planes (M, 3, K) int8 and units (M,) float32, see ops/decode. The sums of a
#         group are exact, and groups are added one by one, in float32.
# Bound:  few rows: memory, N K / 2 bytes: integers are multiplied as they are, without conversion to floats.


@triton.jit
def _halves(q, BITS: tl.constexpr):
    """Return the lower and the upper halves of bytes, minus 8, as int8. BITS: four at a time."""
    if BITS:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high;
            and.b32 low, $2, 0x0F0F0F0F;
            shr.u32 high, $2, 4;
            and.b32 high, high, 0x0F0F0F0F;
            or.b32 low, low, 0x80808080;
            or.b32 high, high, 0x80808080;
            sub.u32 low, low, 0x08080808;
            sub.u32 high, high, 0x08080808;
            xor.b32 $0, low, 0x80808080;
            xor.b32 $1, high, 0x80808080;
            }""",
            "=r,=r,r",
            [q],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        return (q & 15).to(tl.int8) - 8, (q >> 4).to(tl.int8) - 8


@triton.jit
def _groups(
    planes_ptr, weight_ptr, scale_ptr, zero_ptr, row, outputs, there, K,
    BLOCK_M: tl.constexpr, UNROLL: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return the sums (outputs, rows) of a tile, of the groups one after another."""
    groups = K // 128
    lanes = tl.arange(0, 64)
    m = tl.where(there, row + tl.arange(0, BLOCK_M), 0).to(tl.int64)
    n = outputs.to(tl.int64)
    high_at = planes_ptr + m[:, None] * (3 * K) + lanes[None, :]
    weight_at = weight_ptr + n[:, None] * (groups * 64) + lanes[None, :]
    acc = tl.zeros([outputs.shape[0], BLOCK_M], dtype=tl.float32)
    zeros = tl.zeros([outputs.shape[0], BLOCK_M], dtype=tl.int32)
    for first in range(0, groups, UNROLL):
        for u in tl.static_range(UNROLL):
            g = first + u
            inside = (lanes < tl.where(g < groups, 64, 0))[None, :]
            of_rows, of_scales = there[:, None] & inside, outputs >= tl.where(g < groups, 0, 2147483647)
            q = tl.load(weight_at + g * 64, mask=inside, other=0)
            scale = tl.load(scale_ptr + n * groups + g, mask=of_scales, other=0.0).to(tl.float32)
            low, high = _halves(q, BITS)
            sums = (zeros, zeros, zeros)
            total = tl.zeros([BLOCK_M], dtype=tl.float32)
            for half in tl.static_range(2):
                at = g * 128 + half * 64
                a = tl.load(high_at + at, mask=of_rows, other=0)
                b = tl.load(high_at + K + at, mask=of_rows, other=0)
                c = tl.load(high_at + 2 * K + at, mask=of_rows, other=0)
                sums = _sums(low if half == 0 else high, a, b, c, sums)
                if zero_ptr is not None:
                    total += tl.sum((a.to(tl.int32) * 256 + b) * 256 + c, 1).to(tl.float32)
            part = _joined(sums)
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + n * groups + g, mask=of_scales, other=8.0).to(tl.float32)
                part -= (zero - 8.0)[:, None] * total[None, :]
            acc += part * scale[:, None]
    return acc


@triton.jit
def linear_int4_planes(
    planes_ptr, units_ptr, weight_ptr, scale_ptr, zero_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, UNROLL: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    rows, outputs = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    there = rows < M
    outputs = tl.where(outputs < N, outputs, 0)
    units = tl.load(units_ptr + rows, mask=there, other=0.0)[None, :]
    z = units * _groups(
        planes_ptr, weight_ptr, scale_ptr, zero_ptr, row, outputs, there, K, BLOCK_M, UNROLL, BITS
    )  # fmt: skip
    y = _finished(tl.trans(z), None, bias_ptr, column, 0, N)
    if GATED:
        z = units * _groups(
            planes_ptr, weight_ptr, scale_ptr, zero_ptr, row, outputs + N, there, K, BLOCK_M, UNROLL, BITS
        )  # fmt: skip
        y = y / (1.0 + tl.exp(-y)) * _finished(tl.trans(z), None, bias_ptr, column, N, N)
    _store(y, residual_ptr, y_ptr, row, column, M, N)
