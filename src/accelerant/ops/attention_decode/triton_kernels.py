"""Attention of a few new queries to a cache of keys and values (split-K).

    o[i] = sum_j exp(s[i, j]) v[j] / sum_j exp(s[i, j]),  s[i, j] = scale q[i] . k[j],  j <= length - Sq + i

The keys are split in parts, so that one sequence keeps all multiprocessors busy. Each part gives its own o and
lse = log sum_j exp(s); they combine to o = sum_p exp(lse_p - lse) o_p, lse = log sum_p exp(lse_p).

Source: Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding for long-context inference"; Dao 2023, arXiv:2307.08691 for
        the sums within a part.
Layout: q (B, Hq, Sq, D), caches (B, Hkv, T, D) with strides (batch, head, row), last dimension contiguous; nothing
        beyond a sequence's length is read. Parts of o (splits, B, Hq, Sq, D) and of lse (splits, B, Hq, Sq)
        float32, dense; o dense.
Grid:   fwd: one program per part of a key head and BLOCK_M of the rows (query head, query) that share it;
        combine: one program per row.
Bound:  memory: the caches are read once.
"""

import triton
import triton.language as tl

from accelerant.ops.attention.triton_kernels import _LN2, _LOG2E, _dot


@triton.jit
def attention_decode_fwd(
    q_ptr, k_ptr, v_ptr, lengths_ptr, o_ptr, lse_ptr, T, Sq, heads, group, row_blocks, splits, D, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % splits
    block = tl.program_id(0) // splits % row_blocks
    h = (tl.program_id(0) // splits // row_blocks % heads).to(tl.int64)  # key head
    b = (tl.program_id(0) // splits // row_blocks // heads).to(tl.int64)
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + b).to(tl.int32), 0), T)
    size = tl.cdiv(tl.cdiv(length, splits), BLOCK_N) * BLOCK_N
    begin = part * size
    end = tl.minimum(length, begin + size)

    rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
    in_rows = rows < group * Sq
    query = rows % Sq
    q_heads = h * group + rows // Sq
    last = length - Sq + query  # last visible key of each row
    width = tl.arange(0, BLOCK_D)
    in_width = width < D
    lanes = tl.arange(0, BLOCK_N)
    q_at = q_ptr + b * q_batch + q_heads * q_head + query * q_row
    q = tl.load(q_at[:, None] + width[None, :], mask=in_rows[:, None] & in_width[None, :], other=0.0)
    k_ptr += b * k_batch + h * k_head + begin.to(tl.int64) * k_row
    v_ptr += b * v_batch + h * v_head + begin.to(tl.int64) * v_row
    k_at = lanes[None, :] * k_row + width[:, None]
    v_at = lanes[:, None] * v_row + width[None, :]

    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        columns = start + lanes
        inside = columns < end
        k = tl.load(k_ptr + k_at, mask=inside[None, :] & in_width[:, None], other=0.0)
        v = tl.load(v_ptr + v_at, mask=inside[:, None] & in_width[None, :], other=0.0)
        s = _dot(q, k, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), "ieee", UPCAST) * (scale * _LOG2E)
        s = tl.where(inside[None, :] & (columns[None, :] <= last[:, None]), s, float("-inf"))
        larger = tl.maximum(peak, tl.max(s, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(p, 1)
        if not UPCAST:
            p = p.to(v.dtype)
        sums = _dot(p, v, sums * shrink[:, None], "ieee", UPCAST)
        peak = larger
        k_ptr += BLOCK_N * k_row
        v_ptr += BLOCK_N * v_row

    nothing = total == 0.0
    o = sums * (1.0 / tl.where(nothing, 1.0, total))[:, None]
    lse = tl.where(nothing, float("-inf"), peak * _LN2 + tl.log(tl.where(nothing, 1.0, total)))
    of_row = ((part * (tl.num_programs(0) // splits // row_blocks // heads) + b) * heads * group + q_heads) * Sq + query
    tl.store(
        o_ptr + of_row[:, None] * D + width[None, :],
        o.to(o_ptr.dtype.element_ty),
        mask=in_rows[:, None] & in_width[None, :],
    )
    if lse_ptr is not None:
        tl.store(lse_ptr + of_row, lse, mask=in_rows)


@triton.jit
def attention_decode_combine(
    parts_ptr, lse_ptr, o_ptr, rows, splits, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    each = tl.arange(0, BLOCK_S)
    width = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + each.to(tl.int64) * rows + row, mask=each < splits, other=float("-inf"))
    peak = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(peak == float("-inf"), 0.0, peak))
    total = tl.sum(weights, 0)
    weights = weights * (1.0 / tl.where(total == 0.0, 1.0, total))
    at = (each.to(tl.int64)[:, None] * rows + row) * D + width[None, :]
    parts = tl.load(parts_ptr + at, mask=(each < splits)[:, None] & (width < D)[None, :], other=0.0)
    o = tl.sum(parts * weights[:, None], 0)
    tl.store(o_ptr + row * D + width, o.to(o_ptr.dtype.element_ty), mask=width < D)
