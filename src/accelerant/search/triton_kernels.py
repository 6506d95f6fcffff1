"""Largest quick score of each block of 64 rows, and the quick scores of chosen blocks.

    s[q, n] = a (q . x[n]) b[n] - c[n]       a = 1, or 2 under l2; b = 1 / |x[n]| under cosine; c = |x[n]|^2 under l2
    search_maxima:  m[q, j] = max over n in block j of s[q, n], -inf for hidden rows and those beyond the last
    search_maxima_one: the same for one query
    search_scores:  s[q, n] for all n of block j, for pairs (q, j); sums in float32

The scores never exist in memory: maxima are 1/64 of them.

Source: Chern, Hechtman, Davis, Guo, Majnemer and Kumar 2022, "TPU-KNN: K nearest neighbor search at peak FLOP/s", for
        maxima of blocks as the first half of a top k.
Layout: q (Q, D) and x (N, D), last dimension contiguous, of one dtype, or float32 and another, which are rounded to
        bfloat16 for the product; extra (N,) float32; hidden bool, (N,) or (Q, N); m (Q, blocks) float32.
Grid:   maxima: one program per BLOCK_Q queries and BLOCK_N rows, queries fastest, so that rows are read from L2 again;
        one: one program per block; scores: one program per pair.
Bound:  maxima: tensor cores, memory below some 200 queries; one: memory, the rows once.
"""

import triton
import triton.language as tl

BLOCK = 64
_BLOCK = tl.constexpr(BLOCK)


@triton.jit
def _finished(scores, extra_ptr, hidden_ptr, queries, rows, N, hidden_row, METRIC: tl.constexpr):
    """Turn products (queries, rows) into scores."""
    inside = rows < N
    if METRIC == "l2":
        scores = 2.0 * scores - tl.load(extra_ptr + rows, mask=inside, other=0.0)[None, :]
    elif extra_ptr is not None:
        scores = scores * tl.load(extra_ptr + rows, mask=inside, other=0.0)[None, :]
    if hidden_ptr is not None:
        at = hidden_ptr + queries.to(tl.int64)[:, None] * hidden_row + rows[None, :]
        covered = tl.load(at, mask=inside[None, :], other=1).to(tl.int32)
        scores = tl.where(covered != 0, float("-inf"), scores)
    return tl.where(inside[None, :], scores, float("-inf"))


@triton.jit
def search_maxima(
    q_ptr, x_ptr, extra_ptr, hidden_ptr, maxima_ptr, Q, N, D, q_row, x_row, hidden_row, blocks,
    METRIC: tl.constexpr, KIND: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Q, BLOCK_Q)
    queries = tl.program_id(0) % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    in_queries = queries < Q
    tile = tl.program_id(0) // tiles
    rows = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = rows < N
    width = tl.arange(0, BLOCK_D)
    q_at = q_ptr + queries.to(tl.int64)[:, None] * q_row + width[None, :]
    x_at = x_ptr + rows[None, :] * x_row + width[:, None]
    products = tl.zeros([BLOCK_Q, BLOCK_N], tl.int32 if KIND == "int8" else tl.float32)
    for start in range(0, D, BLOCK_D):
        in_width = start + width < D
        q = tl.load(q_at, mask=in_queries[:, None] & in_width[None, :], other=0)
        x = tl.load(x_at, mask=in_rows[None, :] & in_width[:, None], other=0)
        if KIND == "int8":
            products = tl.dot(q, x, products, out_dtype=tl.int32)
        elif KIND == "upcast":  # the interpreter's products of bfloat16 are wrong
            products = tl.dot(q.to(tl.float32), x.to(tl.float32), products, input_precision="ieee")
        elif KIND == "bfloat16":
            products = tl.dot(q.to(tl.bfloat16), x.to(tl.bfloat16), products)
        else:
            products = tl.dot(q, x, products)
        q_at += BLOCK_D
        x_at += BLOCK_D
    seen = tl.minimum(queries, Q - 1)
    scores = _finished(products.to(tl.float32), extra_ptr, hidden_ptr, seen, rows, N, hidden_row, METRIC)
    parts: tl.constexpr = BLOCK_N // _BLOCK
    maxima = tl.max(tl.reshape(scores, [BLOCK_Q, parts, _BLOCK]), 2)
    block = tile * parts + tl.arange(0, parts)
    at = maxima_ptr + queries.to(tl.int64)[:, None] * blocks + block[None, :]
    tl.store(at, maxima, mask=in_queries[:, None] & (block < blocks)[None, :])


@triton.jit
def _block_scores(
    q_at, x_ptr, extra_ptr, hidden_ptr, query, rows, N, D, x_row, hidden_row,
    METRIC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Return the scores (1, 64) of one query and the rows of a block, sums in float32."""
    in_rows = rows < N
    width = tl.arange(0, BLOCK_D)
    sums = tl.zeros([_BLOCK, BLOCK_D], tl.float32)
    x_at = x_ptr + rows[:, None] * x_row + width[None, :]
    for start in range(0, D, BLOCK_D):
        in_width = start + width < D
        q = tl.load(q_at + start + width, mask=in_width, other=0).to(tl.float32)
        x = tl.load(x_at, mask=in_rows[:, None] & in_width[None, :], other=0).to(tl.float32)
        sums += x * q[None, :]
        x_at += BLOCK_D
    scores = tl.sum(sums, 1)[None, :]
    return _finished(scores, extra_ptr, hidden_ptr, query + tl.zeros([1], tl.int32), rows, N, hidden_row, METRIC)


@triton.jit
def search_maxima_one(
    q_ptr, x_ptr, extra_ptr, hidden_ptr, maxima_ptr, N, D, x_row, METRIC: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    block = tl.program_id(0)
    rows = block.to(tl.int64) * _BLOCK + tl.arange(0, _BLOCK)
    scores = _block_scores(q_ptr, x_ptr, extra_ptr, hidden_ptr, 0, rows, N, D, x_row, 0, METRIC, BLOCK_D)
    tl.store(maxima_ptr + block + tl.arange(0, 1), tl.max(scores, 1))


@triton.jit
def search_scores(
    q_ptr, x_ptr, extra_ptr, hidden_ptr, query_ptr, block_ptr, scores_ptr, N, D, q_row, x_row, hidden_row,
    METRIC: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0).to(tl.int64)
    query = tl.load(query_ptr + pair)
    rows = tl.load(block_ptr + pair) * _BLOCK + tl.arange(0, _BLOCK)
    q_at = q_ptr + query * q_row
    scores = _block_scores(q_at, x_ptr, extra_ptr, hidden_ptr, query, rows, N, D, x_row, hidden_row, METRIC, BLOCK_D)
    tl.store(scores_ptr + pair * _BLOCK + tl.arange(0, _BLOCK)[None, :], scores)
