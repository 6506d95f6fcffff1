"""Attention without materializing the score matrix.

    s[i, j] = scale q[i] . k[j] where query i sees key j, else -inf
    lse[i] = log sum_j exp s[i, j]        o[i] = sum_j exp(s[i, j] - lse[i]) v[j]

    p = exp(s - lse)    delta[i] = do[i] . o[i]    ds = p (do v^T - delta)
    dv = p^T do         dq = scale ds k            dk = scale ds^T q

Query i is at position i + Skv - S of the keys: the last query is aligned with the last key. CAUSAL: it sees no key
after its position. WINDOW: it sees no key more than `window` before it. A mask of numbers is added to s, where those up
to -1e30 hide a key, as 0 does in a mask of bytes. SEGMENTS: it only sees keys of its own segment; the mask is then the
table that `attention_segments` makes. Without a visible key, o = 0 and lse = -inf.

Source: Dao 2023, arXiv:2307.08691, algorithms 1 and 2; the running sum is that of Milakov and Gimelshein 2018,
        arXiv:1805.02867. The backward pass has two kernels that recompute s, so that no atomics are needed and results
        are deterministic: 7 matrix products instead of 5.
Layout: q, o, do, dq, k, v, dk, dv with strides (batch, head, row) and a contiguous last dimension; lse and delta with
        strides (batch, head); a mask with strides (batch, head, row, column), 0 to broadcast. With cu_q and cu_k the
        sequences are packed: sequence b is rows cu[b] to cu[b + 1], and the batch strides are 0. `group` neighbouring
        query heads share one key head.
Grid:   fwd, bwd_q: one program per BLOCK_M queries of a head, the longest rows first if CAUSAL. bwd_kv: one program per
        BLOCK_N keys of a key head, for all its query heads. bwd_q also computes delta, so it runs before bwd_kv.
Bound:  tensor cores, and exp2 at small D: 4 D flops per visible pair forward, 10 D (14 D executed) backward; float32 by
        the floating-point units. With PRECISION "fp16x3" a product in float32 is three in float16 on tensor cores
        (Ootomo and Yokota 2022, arXiv:2203.03341), so that it is bound by these and by splitting the tiles.
"""

import triton
import triton.language as tl

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _parts(x, AXIS: tl.constexpr, PRECISION: tl.constexpr):
    """Return x as `_dot` takes it; AXIS is that of the columns.

    For "fp16x3" that is (high, low, factor) with x = (high + low / 2048) factor: two float16 numbers, and a power of
    two for each row, whose largest number becomes 2^14 to 2^15. The rows differ in scale as much as float32 allows.
    """
    if PRECISION == "fp16x3":
        exponent = tl.maximum(tl.max(tl.abs(x), AXIS).to(tl.int32, bitcast=True) >> 23, 15)
        x *= tl.expand_dims(((268 - exponent) << 23).to(tl.float32, bitcast=True), AXIS)
        high = x.to(tl.float16)
        low = ((x - high.to(tl.float32)) * 2048.0).to(tl.float16)
        return high, low, ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def _turned(x, PRECISION: tl.constexpr):
    """Return the transpose of what `_parts` returned."""
    if PRECISION == "fp16x3":
        return tl.trans(x[0]), tl.trans(x[1]), x[2]
    else:
        return tl.trans(x)


@triton.jit
def _dot_scaled(a, b):
    """Return a b without their factors; low times low is below the last bit of float32."""
    part = tl.dot(a[1], b[0])
    part = tl.dot(a[0], b[1], part)
    return tl.dot(a[0], b[0], part * (1.0 / 2048.0))


@triton.jit
def _dot(a, b, sums, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return sums + a b; UPCAST: in float32, since no tensor core has the dtype (or the interpreter is wrong)."""
    if PRECISION == "fp16x3":
        part = _dot_scaled(a, b) * a[2][:, None]
        return tl.fma(part, tl.broadcast_to(b[2][None, :], part.shape), sums)
    elif UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), sums, input_precision="ieee")
    else:
        return tl.dot(a, b, sums, input_precision=PRECISION)


@triton.jit
def _dot_rows(weights, x, sums, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """Return sums + weights x; in float32 with a chain of additions per tile: rounding errors grow with the chain.

    The fma prevents the compiler from merging sums + dot into one chain.
    """
    if PRECISION == "fp16x3":
        weights = _parts(weights * x[2][None, :], 1, PRECISION)
        part = _dot_scaled(weights, x)
        return tl.fma(part, tl.broadcast_to(weights[2][:, None], part.shape), sums)
    elif PRECISION == "ieee" and x.dtype == tl.float32 and not UPCAST:
        part = tl.dot(weights, x, input_precision="ieee")
        return tl.fma(part, tl.full(part.shape, 1.0, tl.float32), sums)
    elif UPCAST:
        return _dot(weights, x, sums, PRECISION, UPCAST)
    else:
        return _dot(weights.to(x.dtype), x, sums, PRECISION, UPCAST)


@triton.jit
def _load(pointers, in_rows, in_width, CHECK: tl.constexpr, EXACT: tl.constexpr):
    """Load a tile; zeros outside in_rows if CHECK, and outside in_width unless EXACT."""
    if CHECK and EXACT:
        return tl.load(pointers, mask=in_rows, other=0.0)
    elif CHECK:
        return tl.load(pointers, mask=in_rows & in_width, other=0.0)
    elif EXACT:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=in_width, other=0.0)


@triton.jit
def _sequence(cu_ptr, b, length):
    if cu_ptr is None:
        first = 0
    else:
        first = tl.load(cu_ptr + b).to(tl.int32)
        length = tl.load(cu_ptr + b + 1).to(tl.int32) - first
    return first, length


@triton.jit
def _visible(rows, columns, offset, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):
    """Return the mask of visible pairs; rows and columns have shapes that broadcast."""
    seen = columns < keys
    if CAUSAL:
        seen = seen & (columns <= rows + offset)
    if WINDOW:
        seen = seen & (columns >= rows + offset - window)
    return seen


@triton.jit
def _masked(s, mask_ptr, rows, columns, S, keys, m_row, m_col, CHECK: tl.constexpr, SEGMENTS: tl.constexpr):
    """Return scores to base 2 under the mask's tile; without a mask, or where segments hide nothing, as they are."""
    if SEGMENTS:
        if CHECK:
            of_query = tl.load(mask_ptr + rows, mask=rows < S, other=0)
            of_key = tl.load(mask_ptr + S + columns, mask=columns < keys, other=0)
            s = tl.where(of_query == of_key, s, float("-inf"))
    elif mask_ptr is not None:
        at = rows.to(tl.int64) * m_row + columns.to(tl.int64) * m_col
        tile = tl.load(mask_ptr + at, mask=(rows < S) & (columns < keys), other=0)
        if mask_ptr.dtype.element_ty.is_floating():
            tile = tile.to(tl.float32)
            s = tl.where(tile <= -1e30, float("-inf"), s + tile * _LOG2E)
        else:
            s = tl.where(tile != 0, s, float("-inf"))
    return s


@triton.jit
def _key_ranges(
    first, S, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return low, a, b, high for queries first to first + BLOCK_M: they see keys in [low, high), and all in [a, b)."""
    offset = keys - S
    low = 0
    high = keys
    a = 0
    b = keys
    if CAUSAL:
        high = tl.maximum(tl.minimum(keys, tl.minimum(first + BLOCK_M, S) + offset), 0)
        b = tl.maximum(tl.minimum(keys, first + offset + 1), 0)
    b = b // BLOCK_N * BLOCK_N
    if WINDOW:
        low = tl.maximum(first + offset - window, 0) // BLOCK_N * BLOCK_N
        a = tl.cdiv(tl.maximum(first + BLOCK_M - 1 + offset - window, 0), BLOCK_N) * BLOCK_N
        b = tl.maximum(b, low)
        a = tl.minimum(a, b)
    return low, a, b, high


@triton.jit
def _within_segments(low, a, b, high, table_ptr, at, there, t_row, length, BLOCK: tl.constexpr):
    """Narrow low, a, b, high to what rows `at` of a table see of the `length` rows of the other side."""
    first = tl.load(table_ptr + t_row + at, mask=there, other=0)
    end = tl.load(table_ptr + 2 * t_row + at, mask=there, other=0)
    gap = tl.load(table_ptr + 3 * t_row + at, mask=there, other=length)
    low = tl.maximum(low, tl.min(tl.where(there, first, length), 0) // BLOCK * BLOCK)
    high = tl.minimum(high, tl.max(end, 0))
    a = tl.maximum(a, tl.cdiv(tl.max(first, 0), BLOCK) * BLOCK)
    b = tl.maximum(tl.minimum(b, tl.min(gap, 0) // BLOCK * BLOCK), low)
    a = tl.minimum(tl.maximum(a, low), b)
    return low, a, b, high


@triton.jit
def attention_segments(table_ptr, S, keys, blocks, t_batch, t_row, BLOCK: tl.constexpr):
    """Complete a table of S queries and then `keys` keys of each sequence from row 0, their segments.

    A query sees the keys of its own segment. Row 1: the first one; row 2: the end of the last one; row 3: the first key
    after row 1 that it does not see. For keys the same with the queries that see them. Without any: `length`, 0.
    """
    program = tl.program_id(0)
    block = program % blocks
    table_ptr += (program // blocks).to(tl.int64) * t_batch
    of_queries = tl.cdiv(S, BLOCK)
    is_key = block >= of_queries
    lanes = tl.arange(0, BLOCK)
    at = tl.where(is_key, S + (block - of_queries) * BLOCK, block * BLOCK) + lanes
    there = at < tl.where(is_key, S + keys, S)
    others_ptr = table_ptr + tl.where(is_key, 0, S)
    length = tl.where(is_key, S, keys)
    own = tl.load(table_ptr + at, mask=there, other=0)
    lowest = tl.zeros([BLOCK, BLOCK], tl.int32) + length
    gaps = lowest
    highest = tl.zeros([BLOCK, BLOCK], tl.int32)
    for start in range(0, length, BLOCK):
        i = start + lanes[None, :]
        same = (own[:, None] == tl.load(others_ptr + i, mask=i < length, other=0)) & (i < length)
        lowest = tl.minimum(lowest, tl.where(same, i, length))
        highest = tl.maximum(highest, tl.where(same, i + 1, 0))
    first = tl.min(lowest, 1)
    for start in range(0, length, BLOCK):
        i = start + lanes[None, :]
        same = own[:, None] == tl.load(others_ptr + i, mask=i < length, other=0)
        gaps = tl.minimum(gaps, tl.where((i > first[:, None]) & ~same, i, length))
    tl.store(table_ptr + t_row + at, first, mask=there)
    tl.store(table_ptr + 2 * t_row + at, tl.max(highest, 1), mask=there)
    tl.store(table_ptr + 3 * t_row + at, tl.min(gaps, 1), mask=there)


@triton.jit
def _accumulate(
    sums, total, peak, q, k_ptr, v_ptr, mask_ptr, rows, low, high, S, offset, keys, window, k_row, v_row, m_row, m_col,
    scale_2, D,
    CHECK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Update the running sums over keys [low, high), exponents to base 2; CHECK: not every pair is visible."""
    width = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    k_ptr += tl.cast(low, tl.int64) * k_row
    k_at = lanes[None, :] * k_row + width[:, None]
    v_ptr += tl.cast(low, tl.int64) * v_row
    v_at = lanes[:, None] * v_row + width[None, :]
    for start in range(low, high, BLOCK_N):
        columns = start + lanes
        k = _parts(_load(k_ptr + k_at, columns[None, :] < keys, width[:, None] < D, CHECK, EXACT), 0, PRECISION)
        s = _dot(q, k, tl.zeros([rows.shape[0], BLOCK_N], tl.float32), PRECISION, UPCAST) * scale_2
        s = _masked(s, mask_ptr, rows[:, None], columns[None, :], S, keys, m_row, m_col, CHECK, SEGMENTS)
        if CHECK:
            s = tl.where(
                _visible(rows[:, None], columns[None, :], offset, keys, window, CAUSAL, WINDOW), s, float("-inf")
            )
        larger = tl.maximum(peak, tl.max(s, 1))
        shift = larger
        if CHECK:  # a row without a visible key so far: -inf - -inf would be NaN
            shift = tl.where(larger == float("-inf"), 0.0, larger)
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None]
        v = _parts(_load(v_ptr + v_at, columns[:, None] < keys, width[None, :] < D, CHECK, EXACT), 1, PRECISION)
        sums = _dot_rows(p, v, sums, PRECISION, UPCAST)
        peak = larger
        k_ptr += BLOCK_N * k_row
        v_ptr += BLOCK_N * v_row
    return sums, total, peak


@triton.jit
def attention_fwd(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, mask_ptr, S, keys, heads, group, blocks, D, scale, window,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    lse_batch, lse_head, m_batch, m_head, m_row, m_col,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = program % blocks
    h = (program // blocks % heads).to(tl.int64)
    b = (program // blocks // heads).to(tl.int64)
    if CAUSAL:
        block = blocks - 1 - block
    first_q, S = _sequence(cu_q_ptr, b, S)
    first_k, keys = _sequence(cu_k_ptr, b, keys)
    first = block * BLOCK_M
    if first >= S:
        return
    rows = first + tl.arange(0, BLOCK_M)
    width = tl.arange(0, BLOCK_D)
    in_rows = rows[:, None] < S
    in_width = width[None, :] < D
    at = tl.cast(first_q + first, tl.int64)
    lanes = tl.arange(0, BLOCK_M)[:, None]
    q_ptr += b * q_batch + h * q_head + at * q_row
    k_ptr += b * k_batch + h // group * k_head + tl.cast(first_k, tl.int64) * k_row
    v_ptr += b * v_batch + h // group * v_head + tl.cast(first_k, tl.int64) * v_row
    if mask_ptr is not None:
        mask_ptr += b * m_batch + h * m_head
    q = _parts(_load(q_ptr + lanes * q_row + width[None, :], in_rows, in_width, True, EXACT), 1, PRECISION)
    sums = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    offset = keys - S
    scale_2 = scale * _LOG2E
    bounds = _key_ranges(first, S, keys, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if SEGMENTS:
        bounds = _within_segments(*bounds, mask_ptr, rows, rows < S, m_row, keys, BLOCK_N)
    for i in tl.static_range(3):
        if WINDOW or SEGMENTS or i > 0:
            sums, total, peak = _accumulate(
                sums, total, peak, q, k_ptr, v_ptr, mask_ptr, rows, bounds[i], bounds[i + 1], S, offset, keys, window,
                k_row, v_row, m_row, m_col, scale_2, D, i != 1 or (mask_ptr is not None and not SEGMENTS), CAUSAL,
                WINDOW, BLOCK_N, BLOCK_D, EXACT, PRECISION, UPCAST, SEGMENTS,
            )  # fmt: skip
    nothing = total == 0.0
    o = sums * (1.0 / tl.where(nothing, 1.0, total))[:, None]
    lse = tl.where(nothing, float("-inf"), peak * _LN2 + tl.log(tl.where(nothing, 1.0, total)))
    o_ptr += b * o_batch + h * o_head + at * o_row
    tl.store(o_ptr + lanes * o_row + width[None, :], o.to(o_ptr.dtype.element_ty), mask=in_rows & in_width)
    tl.store(lse_ptr + b * lse_batch + h * lse_head + first_q + rows, lse, mask=rows < S)


@triton.jit
def _exponent(lse_at, rows, S):
    """Load lse to base 2, for exp2(s - lse); +inf, which gives 0, for rows that see no key or do not exist."""
    lse = tl.load(lse_at, mask=rows < S, other=float("-inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * _LOG2E)


@triton.jit
def _accumulate_dq(
    dq, q, do, lse_2, delta, k_ptr, v_ptr, mask_ptr, rows, low, high, S, offset, keys, window, k_row, v_row, m_row,
    m_col, scale_2, D,
    CHECK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Return the part of dq / scale from keys [low, high)."""
    width = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_N)
    k_ptr += tl.cast(low, tl.int64) * k_row
    k_at = lanes[None, :] * k_row + width[:, None]
    v_ptr += tl.cast(low, tl.int64) * v_row
    v_at = lanes[None, :] * v_row + width[:, None]
    for start in range(low, high, BLOCK_N):
        columns = start + lanes
        k = _parts(_load(k_ptr + k_at, columns[None, :] < keys, width[:, None] < D, CHECK, EXACT), 0, PRECISION)
        v = _parts(_load(v_ptr + v_at, columns[None, :] < keys, width[:, None] < D, CHECK, EXACT), 0, PRECISION)
        nought = tl.zeros([rows.shape[0], BLOCK_N], tl.float32)
        s = _dot(q, k, nought, PRECISION, UPCAST) * scale_2
        s = _masked(s, mask_ptr, rows[:, None], columns[None, :], S, keys, m_row, m_col, CHECK, SEGMENTS)
        p = tl.exp2(s - lse_2[:, None])
        if CHECK:
            p = tl.where(_visible(rows[:, None], columns[None, :], offset, keys, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (_dot(do, v, nought, PRECISION, UPCAST) - delta[:, None])
        dq = _dot_rows(ds, _turned(k, PRECISION), dq, PRECISION, UPCAST)
        k_ptr += BLOCK_N * k_row
        v_ptr += BLOCK_N * v_row
    return dq


@triton.jit
def attention_bwd_q(
    q_ptr, k_ptr, v_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr, mask_ptr,
    S, keys, heads, group, blocks, D, scale, window,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    do_batch, do_head, do_row, dq_batch, dq_head, dq_row, lse_batch, lse_head, m_batch, m_head, m_row, m_col,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = program % blocks
    h = (program // blocks % heads).to(tl.int64)
    b = (program // blocks // heads).to(tl.int64)
    if CAUSAL:
        block = blocks - 1 - block
    first_q, S = _sequence(cu_q_ptr, b, S)
    first_k, keys = _sequence(cu_k_ptr, b, keys)
    first = block * BLOCK_M
    if first >= S:
        return
    rows = first + tl.arange(0, BLOCK_M)
    width = tl.arange(0, BLOCK_D)
    in_rows = rows[:, None] < S
    in_width = width[None, :] < D
    at = tl.cast(first_q + first, tl.int64)
    lanes = tl.arange(0, BLOCK_M)[:, None]
    q_ptr += b * q_batch + h * q_head + at * q_row
    o_ptr += b * o_batch + h * o_head + at * o_row
    do_ptr += b * do_batch + h * do_head + at * do_row
    dq_ptr += b * dq_batch + h * dq_head + at * dq_row
    k_ptr += b * k_batch + h // group * k_head + tl.cast(first_k, tl.int64) * k_row
    v_ptr += b * v_batch + h // group * v_head + tl.cast(first_k, tl.int64) * v_row
    if mask_ptr is not None:
        mask_ptr += b * m_batch + h * m_head
    of_row = b * lse_batch + h * lse_head + first_q + rows
    do = _load(do_ptr + lanes * do_row + width[None, :], in_rows, in_width, True, EXACT)
    o = _load(o_ptr + lanes * o_row + width[None, :], in_rows, in_width, True, EXACT)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + of_row, delta, mask=rows < S)
    q = _parts(_load(q_ptr + lanes * q_row + width[None, :], in_rows, in_width, True, EXACT), 1, PRECISION)
    do = _parts(do, 1, PRECISION)
    lse_2 = _exponent(lse_ptr + of_row, rows, S)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    offset = keys - S
    scale_2 = scale * _LOG2E
    bounds = _key_ranges(first, S, keys, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if SEGMENTS:
        bounds = _within_segments(*bounds, mask_ptr, rows, rows < S, m_row, keys, BLOCK_N)
    for i in tl.static_range(3):
        if WINDOW or SEGMENTS or i > 0:
            dq = _accumulate_dq(
                dq, q, do, lse_2, delta, k_ptr, v_ptr, mask_ptr, rows, bounds[i], bounds[i + 1], S, offset, keys,
                window, k_row, v_row, m_row, m_col, scale_2, D, i != 1 or (mask_ptr is not None and not SEGMENTS),
                CAUSAL, WINDOW, BLOCK_N, BLOCK_D, EXACT, PRECISION, UPCAST, SEGMENTS,
            )  # fmt: skip
    tl.store(
        dq_ptr + lanes * dq_row + width[None, :], (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_rows & in_width
    )


@triton.jit
def _row_ranges(
    first, S, keys, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Return low, a, b, high for keys first to first + BLOCK_N: queries in [low, high) see some, in [a, b) all."""
    offset = keys - S
    low = 0
    high = S
    a = 0
    b = S
    if WINDOW:
        high = tl.maximum(tl.minimum(S, first + BLOCK_N + window - offset), 0)
        b = tl.maximum(tl.minimum(S, first + window - offset + 1), 0)
    b = b // BLOCK_M * BLOCK_M
    if CAUSAL:
        low = tl.minimum(tl.maximum(first - offset, 0) // BLOCK_M * BLOCK_M, S)
        a = tl.cdiv(tl.maximum(first + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M
        b = tl.maximum(b, low)
        a = tl.minimum(a, b)
    return low, a, b, high


@triton.jit
def _accumulate_dkv(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, mask_ptr, columns, low, high, S, offset, keys, window, q_row,
    do_row, m_row, m_col, scale_2, D,
    CHECK: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    """Return the parts of dk / scale and dv from queries [low, high); scores are transposed, keys by queries."""
    width = tl.arange(0, BLOCK_D)
    lanes = tl.arange(0, BLOCK_M)
    q_ptr += tl.cast(low, tl.int64) * q_row
    q_at = lanes[None, :] * q_row + width[:, None]
    do_ptr += tl.cast(low, tl.int64) * do_row
    do_at = lanes[:, None] * do_row + width[None, :]
    for start in range(low, high, BLOCK_M):
        rows = start + lanes
        q = _parts(_load(q_ptr + q_at, rows[None, :] < S, width[:, None] < D, CHECK, EXACT), 0, PRECISION)
        lse_2 = _exponent(lse_ptr + rows, rows, S)
        nought = tl.zeros([columns.shape[0], BLOCK_M], tl.float32)
        s = _dot(k, q, nought, PRECISION, UPCAST) * scale_2
        s = _masked(s, mask_ptr, rows[None, :], columns[:, None], S, keys, m_row, m_col, CHECK, SEGMENTS)
        p = tl.exp2(s - lse_2[None, :])
        if CHECK:
            p = tl.where(_visible(rows[None, :], columns[:, None], offset, keys, window, CAUSAL, WINDOW), p, 0.0)
        do = _parts(_load(do_ptr + do_at, rows[:, None] < S, width[None, :] < D, CHECK, EXACT), 1, PRECISION)
        delta = tl.load(delta_ptr + rows, mask=rows < S, other=0.0)
        dv = _dot_rows(p, do, dv, PRECISION, UPCAST)
        ds = p * (_dot(v, _turned(do, PRECISION), nought, PRECISION, UPCAST) - delta[None, :])
        dk = _dot_rows(ds, _turned(q, PRECISION), dk, PRECISION, UPCAST)
        q_ptr += BLOCK_M * q_row
        do_ptr += BLOCK_M * do_row
    return dk, dv


@triton.jit
def attention_bwd_kv(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr, mask_ptr,
    S, keys, heads, group, blocks, D, scale, window,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, do_batch, do_head, do_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, lse_batch, lse_head, m_batch, m_head, m_row, m_col,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr, SEGMENTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    block = program % blocks
    h = (program // blocks % heads).to(tl.int64)  # key head
    b = (program // blocks // heads).to(tl.int64)
    first_q, S = _sequence(cu_q_ptr, b, S)
    first_k, keys = _sequence(cu_k_ptr, b, keys)
    first = block * BLOCK_N
    if first >= keys:
        return
    columns = first + tl.arange(0, BLOCK_N)
    width = tl.arange(0, BLOCK_D)
    in_keys = columns[:, None] < keys
    in_width = width[None, :] < D
    at = tl.cast(first_k + first, tl.int64)
    lanes = tl.arange(0, BLOCK_N)[:, None]
    k_ptr += b * k_batch + h * k_head + at * k_row
    v_ptr += b * v_batch + h * v_head + at * v_row
    dk_ptr += b * dk_batch + h * dk_head + at * dk_row
    dv_ptr += b * dv_batch + h * dv_head + at * dv_row
    k = _parts(_load(k_ptr + lanes * k_row + width[None, :], in_keys, in_width, True, EXACT), 1, PRECISION)
    v = _parts(_load(v_ptr + lanes * v_row + width[None, :], in_keys, in_width, True, EXACT), 1, PRECISION)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    offset = keys - S
    scale_2 = scale * _LOG2E
    bounds = _row_ranges(first, S, keys, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if SEGMENTS:
        bounds = _within_segments(*bounds, mask_ptr + b * m_batch, S + columns, columns < keys, m_row, S, BLOCK_M)
    for g in range(group):
        of_head = h * group + g
        q_of = q_ptr + b * q_batch + of_head * q_head + tl.cast(first_q, tl.int64) * q_row
        do_of = do_ptr + b * do_batch + of_head * do_head + tl.cast(first_q, tl.int64) * do_row
        lse_of = lse_ptr + b * lse_batch + of_head * lse_head + first_q
        delta_of = delta_ptr + b * lse_batch + of_head * lse_head + first_q
        mask_of = mask_ptr
        if mask_ptr is not None:
            mask_of = mask_ptr + b * m_batch + of_head * m_head
        for i in tl.static_range(3):
            if CAUSAL or SEGMENTS or i > 0:
                dk, dv = _accumulate_dkv(
                    dk, dv, k, v, q_of, do_of, lse_of, delta_of, mask_of, columns, bounds[i], bounds[i + 1], S, offset,
                    keys, window, q_row, do_row, m_row, m_col, scale_2, D,
                    i != 1 or (mask_ptr is not None and not SEGMENTS), CAUSAL, WINDOW, BLOCK_M, BLOCK_D, EXACT,
                    PRECISION, UPCAST, SEGMENTS,
                )  # fmt: skip
    inside = in_keys & in_width
    tl.store(dk_ptr + lanes * dk_row + width[None, :], (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptr + lanes * dv_row + width[None, :], dv.to(dv_ptr.dtype.element_ty), mask=inside)
