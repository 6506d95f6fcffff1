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
from accelerant.ops.triton_kernels import start_early


@triton.jit
def attention_decode_fwd(
    q_ptr, k_ptr, v_ptr, lengths_ptr, o_ptr, lse_ptr, T, Sq, heads, group, row_blocks, splits, D, scale,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_early(EARLY)
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
    parts_ptr, lse_ptr, o_ptr, rows, splits, D, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    start_early(EARLY)
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


# --- a cache in blocks -----------------------------------------------------------------------------------------------
#
#     paged_fwd:     as above, of keys that lie where a table says; a score s may become softcap tanh(s / softcap)
#     paged_combine: o of the rows of one token whose keys were split
#     paged_append:  keys and values of new tokens, to their slots
#
# Source: Kwon et al. 2023, arXiv:2309.06180. The sums over SPLIT keys each, counted from the sequence's beginning, are
#         merged in order, (sums, total, peak) <- (sums a + sums' b, total a + total' b, peak''), by explicit fma: by
#         one program, or by paged_combine with the same operations, so that a row's bits follow from its keys alone.
# Layout: q and o (T, Hq, D), strides (token, head); blocks (N, PAGE, Hkv, D), strides (block, key, head); table
#         (rows, columns), lengths (rows) and starts (rows + 1) int32. parts (splits, rows, Hq, D) and stats (splits,
#         rows, Hq, 2), peak and total, float32: of rows of one token. k and v of append (T, Hkv D), strides of tokens.
# Grid:   paged_fwd: one program for each tile of TOKENS tokens, key head and split; a tile is of one row, and there are
#         at most T / TOKENS + rows. All splits of a row of several tokens are the first one's. paged_combine: one for
#         each row and query head; append: one for each token.
# Bound:  memory for rows of one token; tensor cores for long prompts.


@triton.jit
def _paged_row(starts_ptr, tile, rows, TOKENS: tl.constexpr):
    """Return row, its first token, its tokens, and the first token of the tile within it."""
    if starts_ptr is None:
        return tile, tile, 1, 0
    else:
        left = 0
        right = rows
        while left < right:  # the first row whose first tile, starts[row] // TOKENS + row, is after this one
            middle = (left + right) // 2
            after = tl.load(starts_ptr + middle) // TOKENS + middle > tile
            left = tl.where(after, left, middle + 1)
            right = tl.where(after, middle, right)
        row = left - 1
        first = tl.load(starts_ptr + row)
        return row, first, tl.load(starts_ptr + row + 1) - first, (tile - first // TOKENS - row) * TOKENS


@triton.jit
def _paged_split(
    q, k_ptr, v_ptr, table_ptr, begin, end, low, last, blocks, window, scale, softcap, D, k_block, k_key, v_block,
    v_key,
    CAPPED: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Return sums, total and peak of queries whose last visible keys are `last`, over the keys begin to end."""
    width = tl.arange(0, BLOCK_D)
    in_width = width < D
    sums = tl.zeros([q.shape[0], BLOCK_D], tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    peak = tl.full([q.shape[0]], float("-inf"), tl.float32)
    for start in range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        inside = (columns < end) & (columns >= low)
        block = tl.load(table_ptr + columns // PAGE, mask=inside, other=0)
        block = tl.minimum(tl.maximum(block, 0), blocks - 1).to(tl.int64)
        k_at = k_ptr + block * k_block + (columns % PAGE) * k_key
        v_at = v_ptr + block * v_block + (columns % PAGE) * v_key
        k = tl.load(k_at[None, :] + width[:, None], mask=inside[None, :] & in_width[:, None], other=0.0)
        v = tl.load(v_at[:, None] + width[None, :], mask=inside[:, None] & in_width[None, :], other=0.0)
        s = _dot(q, k, tl.zeros([q.shape[0], BLOCK_N], tl.float32), "ieee", UPCAST) * scale
        if CAPPED:
            e = tl.exp2(tl.minimum(tl.maximum(s / softcap, -20.0), 20.0) * (2.0 * _LOG2E))
            s = softcap * ((e - 1.0) / (e + 1.0))
        s *= _LOG2E
        seen = inside[None, :] & (columns[None, :] <= last[:, None])
        if WINDOW:
            seen = seen & (columns[None, :] > last[:, None] - window)
        s = tl.where(seen, s, float("-inf"))
        larger = tl.maximum(peak, tl.max(s, 1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(p, 1)
        if not UPCAST:
            p = p.to(v.dtype)
        sums = _dot(p, v, sums * shrink[:, None], "ieee", UPCAST)
        peak = larger
    return sums, total, peak


@triton.jit
def _merged(sums, total, peak, more, more_total, more_peak):
    """Return the sums of both, by operations that no compiler joins in another way."""
    larger = tl.maximum(peak, more_peak)
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    a = tl.exp2(peak - shift)
    b = tl.exp2(more_peak - shift)
    total = tl.fma(more_total, b, total * a)
    a = tl.broadcast_to(a[:, None], sums.shape)
    b = tl.broadcast_to(b[:, None], sums.shape)
    return tl.fma(more, b, sums * a), total, larger


@triton.jit
def attention_paged_fwd(
    q_ptr, k_ptr, v_ptr, table_ptr, lengths_ptr, starts_ptr, o_ptr, parts_ptr, stats_ptr, rows, blocks, columns, heads,
    group, splits, D, window, scale, softcap, q_token, q_head, k_block, k_key, k_head, v_block, v_key, v_head,
    TOKENS: tl.constexpr, CAPPED: tl.constexpr, WINDOW: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, UPCAST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_early(EARLY)
    part = tl.program_id(0) % splits
    h = (tl.program_id(0) // splits % heads).to(tl.int64)
    row, begin, count, first = _paged_row(starts_ptr, tl.program_id(0) // splits // heads, rows, TOKENS)
    length = tl.minimum(tl.load(lengths_ptr + row), columns * PAGE)
    high = length - count + tl.minimum(first + TOKENS, count)  # the end of the keys that the tile's last token sees
    low = 0
    if WINDOW:
        low = tl.maximum(length - count + first + 1 - window, 0)
    from_split = low // SPLIT
    to_split = tl.cdiv(tl.maximum(high, 0), SPLIT)
    if parts_ptr is not None:
        if count == 1:
            to_split = tl.minimum(to_split, part + 1)
            from_split = tl.maximum(from_split, part)
            if from_split >= to_split:
                return
        elif part > 0:
            return
    if first >= count:
        return
    lines = tl.arange(0, BLOCK_M)
    tokens = first + lines // group
    here = (lines < TOKENS * group) & (tokens < count)
    q_heads = h * group + lines % group
    width = tl.arange(0, BLOCK_D)
    at = (begin + tokens).to(tl.int64)
    mask = here[:, None] & (width < D)[None, :]
    q = tl.load(q_ptr + (at * q_token + q_heads * q_head)[:, None] + width[None, :], mask=mask, other=0.0)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for split in range(from_split, to_split):
        start = tl.maximum(split * SPLIT, low // BLOCK_N * BLOCK_N)
        more, more_total, more_peak = _paged_split(
            q, k_ptr + h * k_head, v_ptr + h * v_head, table_ptr + row.to(tl.int64) * columns, start,
            tl.minimum(high, (split + 1) * SPLIT), low, length - count + tokens, blocks, window, scale, softcap, D,
            k_block, k_key, v_block, v_key, CAPPED, WINDOW, PAGE, BLOCK_N, BLOCK_D, UPCAST,
        )  # fmt: skip
        sums, total, peak = _merged(sums, total, peak, more, more_total, more_peak)
    if parts_ptr is not None:  # noqa: SIM102  the second is not known when it is compiled
        if count == 1:
            of_line = (part.to(tl.int64) * rows + row) * heads * group + q_heads
            tl.store(parts_ptr + of_line[:, None] * D + width[None, :], sums, mask=mask)
            tl.store(stats_ptr + 2 * of_line, peak, mask=here)
            tl.store(stats_ptr + 2 * of_line + 1, total, mask=here)
    if (parts_ptr is None) | (count != 1):
        o = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
        of_line = at * heads * group + q_heads
        tl.store(o_ptr + of_line[:, None] * D + width[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_paged_combine(
    parts_ptr, stats_ptr, lengths_ptr, starts_ptr, o_ptr, rows, columns, heads, D, window,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, PAGE: tl.constexpr, AHEAD: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    start_early(EARLY)
    row = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    token = row
    if starts_ptr is not None:
        token = tl.load(starts_ptr + row)
        if tl.load(starts_ptr + row + 1) - token != 1:
            return
    length = tl.maximum(tl.minimum(tl.load(lengths_ptr + row), columns * PAGE), 0)
    low = 0
    if WINDOW:
        low = tl.maximum(length - window, 0)
    width = tl.arange(0, BLOCK_D)
    lines = tl.arange(0, 1)
    mask = (lines >= 0)[:, None] & (width < D)[None, :]
    sums = tl.zeros([1, BLOCK_D], tl.float32)
    total = tl.zeros([1], tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    to_split = tl.cdiv(length, SPLIT)
    for first in range(low // SPLIT, to_split, AHEAD):
        parts, totals, peaks = (), (), ()
        for i in tl.static_range(AHEAD):  # all are on their way before the first is merged
            there = lines < to_split - first - i
            of_line = ((first + i) * rows.to(tl.int64) + row) * heads + head + lines
            more = tl.load(parts_ptr + of_line[:, None] * D + width[None, :], mask=mask & there[:, None], other=0.0)
            parts = parts + (more,)  # noqa: RUF005 - Triton has no starred tuples
            peaks = peaks + (tl.load(stats_ptr + 2 * of_line, mask=there, other=float("-inf")),)  # noqa: RUF005
            totals = totals + (tl.load(stats_ptr + 2 * of_line + 1, mask=there, other=0.0),)  # noqa: RUF005
        for i in tl.static_range(AHEAD):
            if first + i < to_split:
                sums, total, peak = _merged(sums, total, peak, parts[i], totals[i], peaks[i])
    o = sums * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    at = token.to(tl.int64) * heads + head + lines
    tl.store(o_ptr + at[:, None] * D + width[None, :], o.to(o_ptr.dtype.element_ty), mask=mask)


@triton.jit
def attention_paged_append(
    k_ptr, v_ptr, k_blocks_ptr, v_blocks_ptr, slots_ptr, width, page, D, k_token, v_token, k_block, k_key, k_head,
    v_block, v_key, v_head, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = lanes < tl.where(slot >= 0, width, 0)
    k = tl.load(k_ptr + token * k_token + lanes, mask=mask, other=0.0)
    v = tl.load(v_ptr + token * v_token + lanes, mask=mask, other=0.0)
    block, key = slot // page, slot % page
    tl.store(k_blocks_ptr + block * k_block + key * k_key + lanes // D * k_head + lanes % D, k, mask=mask)
    tl.store(v_blocks_ptr + block * v_block + key * v_key + lanes // D * v_head + lanes % D, v, mask=mask)


# --- the other steps of a decoder layer for one new token ------------------------------------------------------------
#
# A decoder layer's steps for one new token: matrix-vector products with prologue and epilogue, and the cache update.
#
#     linear:  y = f(z) + residual,  z = scale (h W^T),  h = x norm / sqrt(mean(x^2) + eps), or x
#              f(z) = z, or silu(z[:N]) z[N:] if the weight has 2 N rows, the gates first
#     rope:    rotate q and k by the angle of the token's position, if there are tables; q to its own tensor, k and v to
#              the caches
#     planes:  x, or x norm, as 24-bit integers in units of the largest magnitude / 8355000, stored as three signed
#         bytes
#     words:   linear of those and an int8 weight, four products per instruction, with exact sums
#
# Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4; Shazeer 2020, arXiv:2002.05202, equation 6; Su et al.
#         2021, arXiv:2104.09864, equation 34. Int8 weights with a scale for each output: Dettmers et al. 2022,
#         arXiv:2208.07339, section 2.
# Layout: linear: x (M, K), norm (K,), weight (N or 2 N, K), residual and y (M, N), all dense; scale float32 per row of
#         the weight. rope: qkv (B, (heads + 2 kv_heads) 2 HALF) dense; cos and sin (T, HALF) float32; caches (B,
#         kv_heads, T, 2 HALF) dense; positions (B,). A position of T or more writes nothing. With slots (B,) int64,
#         caches (blocks, PAGE, kv_heads, 2 HALF) dense; a slot of -1 writes nothing. All computed in float32.
# Grid:   linear: one program per SETS * BLOCK_N rows of the weight, over all of K, and row of x; 16 bytes per thread
#         and
#         load, SETS * UNROLL loads in flight before the first is used. 1 / sqrt(...) is applied last, so that x is read
#         once. rope: one program per HEADS heads of a sequence.
# Bound:  linear: memory, the weight is read once. rope: launch latency.


@triton.jit
def _wide(w, BYTES: tl.constexpr):
    """Convert weights to float32; 8-bit integers (BYTES) by their bits, since conversions would bound the kernel."""
    if BYTES:
        return (
            tl.inline_asm_elementwise(
                """{
            .reg .b32 t;
            xor.b32 t, $4, 0x80808080;
            prmt.b32 $0, t, 0x4B000000, 0x7440;
            prmt.b32 $1, t, 0x4B000000, 0x7441;
            prmt.b32 $2, t, 0x4B000000, 0x7442;
            prmt.b32 $3, t, 0x4B000000, 0x7443;
            }""",
                "=r,=r,=r,=r,r",
                [w],
                dtype=tl.float32,
                is_pure=True,
                pack=4,
            )
            - 8388736.0
        )
    else:
        return w.to(tl.float32)


@triton.jit
def _scaled(acc, factor, scale_ptr, n):
    """Return the sums of a set of rows, times the norm's factor and the weight's scale."""
    z = tl.sum(acc, 1) * factor
    if scale_ptr is not None:
        z *= tl.load(scale_ptr + n).to(tl.float32)
    return z


@triton.jit
def _rows(weight_ptr, first, lanes, N, K, GATED: tl.constexpr, SETS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return for each set the pointers to its rows of the weight, and their numbers."""
    OUTPUTS: tl.constexpr = SETS // 2 if GATED else SETS
    weight_at, numbers = (), ()
    for r in tl.static_range(SETS):
        n = first + (r % OUTPUTS) * BLOCK_N + tl.arange(0, BLOCK_N)
        n = tl.where(n < N, n, 0) + r // OUTPUTS * N  # rows past the end read the first; gates, then gated rows
        numbers = numbers + (n,)  # noqa: RUF005 - Triton has no starred tuples
        weight_at = weight_at + (weight_ptr + n.to(tl.int64)[:, None] * K + lanes,)  # noqa: RUF005
    return weight_at, numbers


@triton.jit
def _finish(
    z, residual_ptr, y_ptr, row, first, N, GATED: tl.constexpr, SETS: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Apply the gates, add the residual and store the outputs of each set's sums."""
    OUTPUTS: tl.constexpr = SETS // 2 if GATED else SETS
    for r in tl.static_range(OUTPUTS):
        n = first + r * BLOCK_N + tl.arange(0, BLOCK_N)
        y = z[r]
        if GATED:
            y = y / (1.0 + tl.exp(-y)) * z[OUTPUTS + r]
        if residual_ptr is not None:
            y += tl.load(residual_ptr + row * N + n, mask=n < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * N + n, y.to(y_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _products(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, row, first, N, K, eps,
    GATED: tl.constexpr, BYTES: tl.constexpr, SETS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Return z of a row of x, for each set of BLOCK_N rows of the weight from `first` on."""
    STEP: tl.constexpr = BLOCK_K * UNROLL
    lanes = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], (BLOCK_N, BLOCK_K))
    x_at = x_ptr + row * K + lanes  # as wide as the weights, so that each thread holds the elements of x that it needs
    weight_at, numbers = _rows(weight_ptr, first, lanes, N, K, GATED, SETS, BLOCK_N)
    start_early(EARLY)
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)  # a tuple of sums takes more registers
    acc1, acc2, acc3, squares = acc0, acc0, acc0, acc0
    full = K // STEP * STEP
    for k in range(0, full, STEP):
        parts, xs, gains = (), (), ()
        for i in tl.static_range(UNROLL):
            for r in tl.static_range(SETS):
                w = tl.load(weight_at[r] + k + i * BLOCK_K, eviction_policy="evict_first")
                parts = parts + (w,)  # noqa: RUF005
        for i in tl.static_range(UNROLL):
            xs = xs + (tl.load(x_at + k + i * BLOCK_K),)  # noqa: RUF005
            if norm_ptr is not None:
                gains = gains + (tl.load(norm_ptr + lanes + k + i * BLOCK_K),)  # noqa: RUF005
        for i in tl.static_range(UNROLL):
            x = xs[i].to(tl.float32)
            if norm_ptr is not None:
                squares += x * x
                x *= gains[i].to(tl.float32)
            acc0 += _wide(parts[i * SETS], BYTES) * x
            if SETS > 1:
                acc1 += _wide(parts[i * SETS + 1], BYTES) * x
            if SETS > 2:
                acc2 += _wide(parts[i * SETS + 2], BYTES) * x
                acc3 += _wide(parts[i * SETS + 3], BYTES) * x
    for k in range(full, K, BLOCK_K):
        inside = lanes < K - k
        x = tl.load(x_at + k, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            squares += x * x
            x *= tl.load(norm_ptr + lanes + k, mask=inside, other=0.0).to(tl.float32)
        acc0 += _wide(tl.load(weight_at[0] + k, mask=inside, other=0), BYTES) * x
        if SETS > 1:
            acc1 += _wide(tl.load(weight_at[1] + k, mask=inside, other=0), BYTES) * x
        if SETS > 2:
            acc2 += _wide(tl.load(weight_at[2] + k, mask=inside, other=0), BYTES) * x
            acc3 += _wide(tl.load(weight_at[3] + k, mask=inside, other=0), BYTES) * x
    factor = 1.0
    if norm_ptr is not None:
        factor = 1.0 / tl.sqrt(tl.sum(squares, 1) / K + eps)
    sums, z = (acc0, acc1, acc2, acc3), ()
    for r in tl.static_range(SETS):
        z = z + (_scaled(sums[r], factor, scale_ptr, numbers[r]),)  # noqa: RUF005
    return z


@triton.jit
def decode_linear(
    x_ptr, norm_ptr, weight_ptr, scale_ptr, residual_ptr, y_ptr, N, K, eps,
    GATED: tl.constexpr, BYTES: tl.constexpr, SETS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = SETS // 2 if GATED else SETS
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (OUTPUTS * BLOCK_N)
    z = _products(
        x_ptr, norm_ptr, weight_ptr, scale_ptr, row, first, N, K, eps, GATED, BYTES, SETS, BLOCK_N, BLOCK_K, UNROLL,
        EARLY,
    )  # fmt: skip
    _finish(z, residual_ptr, y_ptr, row, first, N, GATED, SETS, BLOCK_N)


@triton.jit
def decode_planes(x_ptr, norm_ptr, planes_ptr, units_ptr, K, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    start_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < K
    x = tl.load(x_ptr + row * K + lanes, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0
    if norm_ptr is not None:
        factor = 1.0 / tl.sqrt(tl.sum(x * x, 0) / K + eps)
        x *= tl.load(norm_ptr + lanes, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 0)
    top = tl.where(top > 0.0, top, 1.0)
    # A little less than 127 (2^16 + 2^8 + 1), the largest value of three bytes, since quotient and product round.
    n = tl.floor(x * (8355000.0 / top) + 0.5).to(tl.int32)
    low = ((n + 128) & 255) - 128
    n = (n - low) >> 8
    middle = ((n + 128) & 255) - 128
    high = (n - middle) >> 8
    planes_ptr += row * 3 * K
    tl.store(planes_ptr + lanes, high.to(tl.int8), mask=inside)
    tl.store(planes_ptr + K + lanes, middle.to(tl.int8), mask=inside)
    tl.store(planes_ptr + 2 * K + lanes, low.to(tl.int8), mask=inside)
    tl.store(units_ptr + row, factor * top / 8355000.0 + tl.sum(x * 0.0, 0))  # NaN where x is not finite


@triton.jit
def _dot4(w, x, sums, BYTES: tl.constexpr):
    """Return the sums plus four products of the signed bytes of the words w and x."""
    if BYTES:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [w, x, sums], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        for at in tl.static_range(0, 32, 8):
            sums += ((w << (24 - at)) >> 24) * ((x << (24 - at)) >> 24)
        return sums


@triton.jit
def _whole(high, middle, low, unit, scale_ptr, n):
    """Return the scaled float32 sum of the products' three bytes."""
    wide = high.to(tl.float32) * 65536.0 + middle.to(tl.float32) * 256.0 + low.to(tl.float32)
    return tl.sum(wide, 1) * unit * tl.load(scale_ptr + n).to(tl.float32)


@triton.jit
def decode_words(
    planes_ptr, units_ptr, weight_ptr, scale_ptr, residual_ptr, y_ptr, N, W,
    GATED: tl.constexpr, BYTES: tl.constexpr, SETS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    UNROLL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    BLOCK_W: tl.constexpr = BLOCK_K // 4  # words of four weights
    STEP: tl.constexpr = BLOCK_W * UNROLL
    OUTPUTS: tl.constexpr = SETS // 2 if GATED else SETS
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (OUTPUTS * BLOCK_N)
    lanes = tl.broadcast_to(tl.arange(0, BLOCK_W)[None, :], (BLOCK_N, BLOCK_W))
    x_at = planes_ptr + row * 3 * W + lanes
    weight_at, numbers = _rows(weight_ptr, first, lanes, N, W, GATED, SETS, BLOCK_N)
    start_early(EARLY)
    high = ()
    for _ in tl.static_range(SETS):
        high = high + (tl.zeros([BLOCK_N, BLOCK_W], dtype=tl.int32),)  # noqa: RUF005
    middle, low = high, high
    for k in range(0, W, STEP):
        parts = ()
        for i in tl.static_range(UNROLL):
            inside = lanes < W - k - i * BLOCK_W
            for r in tl.static_range(SETS):
                w = tl.load(weight_at[r] + k + i * BLOCK_W, mask=inside, other=0, eviction_policy="evict_first")
                parts = parts + (w,)  # noqa: RUF005
        for i in tl.static_range(UNROLL):
            inside = lanes < W - k - i * BLOCK_W
            x_high = tl.load(x_at + k + i * BLOCK_W, mask=inside, other=0)
            x_middle = tl.load(x_at + W + k + i * BLOCK_W, mask=inside, other=0)
            x_low = tl.load(x_at + 2 * W + k + i * BLOCK_W, mask=inside, other=0)
            highs, middles, lows = (), (), ()
            for r in tl.static_range(SETS):
                w = parts[i * SETS + r]
                highs = highs + (_dot4(w, x_high, high[r], BYTES),)  # noqa: RUF005
                middles = middles + (_dot4(w, x_middle, middle[r], BYTES),)  # noqa: RUF005
                lows = lows + (_dot4(w, x_low, low[r], BYTES),)  # noqa: RUF005
            high, middle, low = highs, middles, lows
    unit = tl.load(units_ptr + row)
    z = ()
    for r in tl.static_range(SETS):
        z = z + (_whole(high[r], middle[r], low[r], unit, scale_ptr, numbers[r]),)  # noqa: RUF005
    _finish(z, residual_ptr, y_ptr, row, first, N, GATED, SETS, BLOCK_N)


@triton.jit
def decode_rope(
    qkv_ptr, cos_ptr, sin_ptr, positions_ptr, slots_ptr, q_ptr, k_cache_ptr, v_cache_ptr, heads, kv_heads, T, HALF,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    start_early(EARLY)
    head = tl.program_id(0) * HEADS + tl.arange(0, HEADS)[:, None]
    b = tl.program_id(1).to(tl.int64)
    width = 2 * HALF
    pairs = tl.arange(0, BLOCK)[None, :]
    in_half = pairs < HALF
    mask = (head < heads + 2 * kv_heads) & in_half
    position = tl.load(positions_ptr + b).to(tl.int64)
    fits = tl.full([1, BLOCK], position, tl.int64) < T
    at = qkv_ptr + (b * (heads + 2 * kv_heads) + head) * width + pairs
    x1 = tl.load(at, mask=mask, other=0.0)
    x2 = tl.load(at + HALF, mask=mask, other=0.0)
    y1, y2 = x1.to(tl.float32), x2.to(tl.float32)
    if cos_ptr is not None:
        cos = tl.load(cos_ptr + position * HALF + pairs, mask=in_half & fits, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + position * HALF + pairs, mask=in_half & fits, other=0.0).to(tl.float32)
        y1, y2 = y1 * cos - y2 * sin, y2 * cos + y1 * sin
    y1, y2 = y1.to(q_ptr.dtype.element_ty), y2.to(q_ptr.dtype.element_ty)
    at = q_ptr + (b * heads + head) * width + pairs
    of_queries = mask & (head < heads)
    tl.store(at, y1, mask=of_queries)
    tl.store(at + HALF, y2, mask=of_queries)
    if slots_ptr is None:
        row, rows_of_head = b * kv_heads * T + position, T
    else:
        slot = tl.load(slots_ptr + b)
        fits = tl.full([1, BLOCK], slot, tl.int64) >= 0
        row, rows_of_head = slot * kv_heads, 1
    of_keys = mask & fits & (head >= heads) & (head < heads + kv_heads)
    at = (row + (head - heads) * rows_of_head) * width + pairs
    tl.store(k_cache_ptr + at, y1, mask=of_keys)
    tl.store(k_cache_ptr + at + HALF, y2, mask=of_keys)
    of_values = mask & fits & (head >= heads + kv_heads)
    at = (row + (head - heads - kv_heads) * rows_of_head) * width + pairs
    tl.store(v_cache_ptr + at, x1, mask=of_values)
    tl.store(v_cache_ptr + at + HALF, x2, mask=of_values)
