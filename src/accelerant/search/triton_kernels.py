"""Exact search on a GPU: quick scores of all rows, the blocks of rows that matter, and their exact scores.

    s[q, n] = a (q . x[n]) b[n] - c[n]       a = 1, or 2 under l2; b = 1 / |x[n]| under cosine; c = |x[n]|^2 under l2
    search_norms:   |x[n]|, the largest of them, the largest |x[n] - bfloat16(x[n])|, and a copy of x in bfloat16
    search_maxima:  m[q, j] = max over n in block j of s[q, n], -inf for hidden rows and those beyond the last; under ip
                    the largest norms too, of rows that lie in the cache since their product
    search_maxima_one: the same for one query, sums in float32 or of int8's words in int32, with the norms where those
                    are not known
    search_choose:  blocks with m[q, j] >= T - 2 e: T is the k-th largest of WIDTH maxima of m, e the bound of the error
    search_score:   the scores of the chosen blocks' rows: products and sums in float64, rounded once to float32
    search_best:    the k largest of a query, of equal ones the first rows
    search_finish:  the last three for one query; the last program that is done ranks
    search_compact: the rows that a mask selects, in any order, of which the host knows a bound of the number alone

A score and its row are one integer: the score's order above, the row's complement below. Scores of all rows never exist
in memory. No kernel waits for the host: `state` (int32) has, for Q queries, Q counts of chosen blocks (-1 where norms
are not finite or too large), Q counts of answers, the bits of the squares of the two largest norms, programs that are
done, and rows that a mask selects. Of one query the last program writes it to the host's memory, and leaves zeros.

Source: Chern, Hechtman, Davis, Guo, Majnemer and Kumar 2022, "TPU-KNN: K nearest neighbor search at peak FLOP/s", for
        maxima of blocks as the first half of a top k.
Layout: q (Q, D) and x (N, D), last dimension contiguous; at (N,) int64, the rows to read, or none for all; norms by row
        of x; seen bool (Q, rows of x); m (Q, blocks) float32. Blocks are interleaved: block b has the rows
        b // S * S R + b % S + i S, i < R, so that a thread of the tensor cores' layout reduces its own columns.
Grid:   maxima: one program per BLOCK_Q queries and BLOCK_N rows, queries fastest, so that rows are read from L2 again;
        one, norms: one program per R rows; choose, best: one per query; score: one per chosen block.
Bound:  maxima: tensor cores, memory below some 200 queries; one, norms: memory, the rows once.
"""

import triton
import triton.language as tl

_WIDTH = tl.constexpr(128)
_NONE = tl.constexpr(-(1 << 63))


@triton.jit
def _finished(scores, norms, seen_ptr, queries, place, rows, N, seen_row, METRIC: tl.constexpr):
    """Turn products (queries, rows) into scores."""
    if METRIC == "l2":
        scores = 2.0 * scores - (norms * norms)[None, :]
    elif METRIC == "cosine":
        scores = scores * tl.where(norms > 0.0, 1.0 / norms, 0.0)[None, :]
    if seen_ptr is not None:
        seen = tl.load(seen_ptr + queries.to(tl.int64)[:, None] * seen_row + rows[None, :]).to(tl.int32)
        scores = tl.where(seen != 0, scores, float("-inf"))
    return tl.where((place < N)[None, :], scores, float("-inf"))


@triton.jit
def _bits(squares):
    """Return the bits of numbers of at least 0, whose order is theirs; NaN is the largest."""
    return squares.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _squares(x):
    """Return the squares of elements, and of what rounding them to bfloat16 takes."""
    x = x.to(tl.float32)
    lost = x - x.to(tl.bfloat16).to(tl.float32)
    return x * x, lost * lost


@triton.jit
def _usual(total):
    """Return squares of norms, infinity for those of which float32 has no inverse."""
    return tl.where((total < 1e24) & ((total > 1e-24) | (total == 0.0)), total, float("inf"))


@triton.jit
def _ordered(score):
    """Return the integers (int32) that have the order of numbers."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _of_order(order):
    """Return the numbers of such integers."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _chosen(at_ptr, count_ptr, place, N):
    """Return the rows to read, some twice, and how many there are."""
    if count_ptr is not None:
        N = tl.minimum(tl.load(count_ptr), N)
    rows = tl.maximum(tl.minimum(place, N - 1), 0)
    if at_ptr is not None:
        rows = tl.load(at_ptr + rows, mask=rows < N, other=0)
    return rows, N


@triton.jit
def search_compact(seen_ptr, at_ptr, count_ptr, N, ROOM, WIDTH: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * WIDTH + tl.arange(0, WIDTH)
    seen = (tl.load(seen_ptr + place, mask=place < N, other=0).to(tl.int32) != 0).to(tl.int32)
    to = tl.atomic_add(count_ptr, tl.sum(seen, 0)) + tl.cumsum(seen, 0) - 1
    tl.store(at_ptr + to, place, mask=(seen != 0) & (to < ROOM))


@triton.jit
def search_norms(
    x_ptr, at_ptr, count_ptr, norms_ptr, copy_ptr, largest_ptr, N, D, x_row,
    METRIC: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows, N = _chosen(at_ptr, count_ptr, place, N)
    width = tl.arange(0, BLOCK_D)
    sums = tl.zeros([ROWS, BLOCK_D], tl.float32)
    losses = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        inside = (start + width < D)[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_row + (start + width)[None, :], mask=inside, other=0)
        squares, lost = _squares(x)
        sums += squares
        losses += lost
        if copy_ptr is not None:
            to = copy_ptr + place[:, None] * D + (start + width)[None, :]
            tl.store(to, x.to(tl.float32).to(tl.bfloat16), mask=inside & (place < N)[:, None])
    total, lost = tl.sum(sums, 1), tl.sum(losses, 1)
    if METRIC == "cosine":  # the loss of a unit vector; norms of which float32 has no inverse count as infinite
        lost = tl.where(total > 0.0, lost / total, 0.0)
        total = _usual(total)
    if norms_ptr is not None:
        tl.store(norms_ptr + rows, tl.sqrt(total))
    tl.atomic_max(largest_ptr, tl.max(_bits(total), 0))
    tl.atomic_max(largest_ptr + 1, tl.max(_bits(lost), 0))


@triton.jit
def search_maxima(
    q_ptr, x_ptr, at_ptr, count_ptr, norms_ptr, seen_ptr, maxima_ptr, largest_ptr, Q, N, D, q_row, x_row, seen_row,
    blocks,
    METRIC: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, SETS: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(Q, BLOCK_Q)
    queries = tl.program_id(0) % tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    tile = tl.program_id(0) // tiles
    place = tile.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows, N = _chosen(at_ptr, count_ptr, place, N)
    reach = D if count_ptr is None else tl.where(tile.to(tl.int64) * BLOCK_N < N, D, 0)
    some = tl.minimum(queries, Q - 1)
    width = tl.arange(0, BLOCK_D)
    q_at = q_ptr + some.to(tl.int64)[:, None] * q_row + width[None, :]
    x_at = x_ptr + rows[None, :] * x_row + width[:, None]
    products = tl.zeros([BLOCK_Q, BLOCK_N], tl.int32 if KIND == "int8" else tl.float32)
    for start in range(0, reach, BLOCK_D):
        if EVEN:
            q = tl.load(q_at)
            x = tl.load(x_at)
        else:
            q = tl.load(q_at, mask=(start + width < D)[None, :], other=0)
            x = tl.load(x_at, mask=(start + width < D)[:, None], other=0)
        if KIND == "int8":
            products = tl.dot(q, x, products, out_dtype=tl.int32)
        elif KIND == "upcast":  # the interpreter's products of bfloat16 are wrong
            products = tl.dot(q.to(tl.float32), x.to(tl.float32), products, input_precision="ieee")
        elif KIND == "tf32":
            products = tl.dot(q, x, products, input_precision="tf32")
        elif KIND == "bfloat16":
            products = tl.dot(q.to(tl.bfloat16), x.to(tl.bfloat16), products)
        else:
            products = tl.dot(q, x, products)
        q_at += BLOCK_D
        x_at += BLOCK_D
    norms = rows
    if norms_ptr is not None:
        norms = tl.load(norms_ptr + rows)
    scores = _finished(products.to(tl.float32), norms, seen_ptr, some, place, rows, N, seen_row, METRIC)
    maxima = tl.max(tl.reshape(scores, [BLOCK_Q, BLOCK_N // SETS, SETS]), 1)
    block = tile * SETS + tl.arange(0, SETS)
    at = maxima_ptr + queries.to(tl.int64)[:, None] * blocks + block[None, :]
    tl.store(at, maxima, mask=(queries < Q)[:, None] & (block < blocks)[None, :])
    if largest_ptr is not None:  # noqa: SIM102  a condition of compilation
        if tl.program_id(0) % tiles == 0:
            again = x_ptr + rows[:, None] * x_row + width[None, :]
            total = tl.zeros([BLOCK_N], tl.float32)
            losses = tl.zeros([BLOCK_N], tl.float32)
            for start in range(0, reach, BLOCK_D):
                squares, lost = _squares(tl.load(again, mask=(start + width < D)[None, :], other=0))
                total += tl.sum(squares, 1)
                losses += tl.sum(lost, 1)
                again += BLOCK_D
            tl.atomic_max(largest_ptr, tl.max(_bits(total), 0))
            tl.atomic_max(largest_ptr + 1, tl.max(_bits(losses), 0))


@triton.jit
def _four_products(x, y, sums):
    """Return the sums (int32) and the products of the 4 int8 of each word."""
    return tl.inline_asm_elementwise("dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [x, y, sums], tl.int32, True, 1)


@triton.jit
def search_maxima_one(
    q_ptr, x_ptr, at_ptr, count_ptr, norms_ptr, seen_ptr, maxima_ptr, largest_ptr, N, D, x_row,
    METRIC: tl.constexpr, WORDS: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    place = block.to(tl.int64) * ROWS + tl.arange(0, ROWS)
    rows, N = _chosen(at_ptr, count_ptr, place, N)
    width = tl.arange(0, BLOCK_D)
    sums = tl.zeros([ROWS, BLOCK_D], tl.int32 if WORDS else tl.float32)
    squares = tl.zeros([ROWS, BLOCK_D], tl.int32 if WORDS else tl.float32)
    x_at = x_ptr + rows[:, None] * x_row + width[None, :]
    reach = D if count_ptr is None else tl.where(block.to(tl.int64) * ROWS < N, D, 0)
    for start in range(0, reach, BLOCK_D):
        inside = start + width < D
        q = tl.load(q_ptr + start + width, mask=inside, other=0)
        x = tl.load(x_at, mask=inside[None, :], other=0)
        if WORDS:
            sums = _four_products(x, tl.broadcast_to(q[None, :], [ROWS, BLOCK_D]), sums)
            if largest_ptr is not None:
                squares = _four_products(x, x, squares)
        else:
            x = x.to(tl.float32)
            sums += x * q.to(tl.float32)[None, :]
            if largest_ptr is not None:
                squares += x * x
        x_at += BLOCK_D
    norms = rows
    if norms_ptr is not None:
        norms = tl.load(norms_ptr + rows)
    if largest_ptr is not None:
        total = tl.sum(squares, 1).to(tl.float32)
        total = _usual(total) if METRIC == "cosine" else total
        tl.atomic_max(largest_ptr, tl.max(_bits(total), 0))
        norms = tl.sqrt(total)
    scores = tl.sum(sums, 1).to(tl.float32)[None, :]
    scores = _finished(scores, norms, seen_ptr, tl.zeros([1], tl.int32), place, rows, N, 0, METRIC)
    tl.store(maxima_ptr + block + tl.arange(0, 1), tl.max(scores, 1))


@triton.jit
def _limits(
    q_ptr, maxima_ptr, largest_ptr, D, blocks, K, share, tiny, least_norm,
    METRIC: tl.constexpr, ROUNDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Return the least maximum of the blocks to choose, the least score to keep, and whether the norms are usual."""
    lanes = tl.arange(0, WIDTH)
    sums = tl.zeros([WIDTH], tl.float32)
    losses = tl.zeros([WIDTH], tl.float32)
    for start in range(0, D, WIDTH):
        squares, lost = _squares(tl.load(q_ptr + start + lanes, mask=start + lanes < D, other=0))
        sums += squares
        losses += lost
    norm = tl.sqrt(tl.sum(sums, 0)) + tiny
    largest = tl.sqrt(tl.load(largest_ptr).to(tl.float32, bitcast=True)) * 1.001 + least_norm
    if METRIC == "l2":
        error = share * (norm + largest) * (norm + largest)
    elif METRIC == "cosine":
        error = 3.0 * share * norm
    else:
        error = share * norm * largest
    if ROUNDED:
        lost_of_x = tl.sqrt(tl.load(largest_ptr + 1).to(tl.float32, bitcast=True)) * 1.001 + tiny
        lost_of_q = tl.sqrt(tl.sum(losses, 0)) * 1.001 + tiny
        scale = 2.0 if METRIC == "l2" else 1.0
        reach = 1.0 if METRIC == "cosine" else largest
        error += scale * 1.01 * (lost_of_q * reach + norm * lost_of_x)

    tops = tl.full([WIDTH], float("-inf"), tl.float32)
    for start in range(0, blocks, WIDTH):
        maxima = tl.load(maxima_ptr + start + lanes, mask=start + lanes < blocks, other=float("-inf"))
        tops = tl.maximum(tops, maxima)
    order = _ordered(tops)
    low, high = tl.min(order, 0).to(tl.int64), tl.max(order, 0).to(tl.int64) + 1  # at least K are at least low
    most = K + (K >> 2) + 4 if WIDTH > 1024 else K  # a few more blocks take less time than a further round
    rounds, count = 0, tl.full([], WIDTH, tl.int64)
    while (rounds < 9) & (count > most):  # 4 bounds in between, whose counts are parts of one sum
        step = (high - low) // 5
        above = (order >= low + step).to(tl.int64) + ((order >= low + 2 * step).to(tl.int64) << 16)
        above += ((order >= low + 3 * step).to(tl.int64) << 32) + ((order >= low + 4 * step).to(tl.int64) << 48)
        above = tl.sum(above, 0)
        enough = ((above & 0xFFFF) >= K).to(tl.int64) + (((above >> 16) & 0xFFFF) >= K).to(tl.int64)
        enough += (((above >> 32) & 0xFFFF) >= K).to(tl.int64) + (((above >> 48) & 0xFFFF) >= K).to(tl.int64)
        count = tl.where(enough > 0, (above >> (16 * tl.maximum(enough - 1, 0))) & 0xFFFF, count)
        low += enough * step
        high = tl.where(enough < 4, low + step, high)
        rounds += 1
    least = _of_order(low.to(tl.int32))
    limit = tl.maximum(least - 2.0 * error, -3.0e38)  # -inf is hidden
    cut = least - 1.5 * error
    if METRIC == "l2":
        cut = cut - tl.sum(sums, 0)
    elif METRIC == "cosine":
        cut = cut / norm
    usual = (norm < 1e19) & (largest < 1e19)  # not of NaN
    if METRIC == "cosine":
        usual = usual & (norm > 1e-12)
    limit = tl.where(usual, limit, float("nan"))  # none is chosen
    return limit, tl.maximum(cut, -3.4e38), usual


@triton.jit
def search_choose(
    q_ptr, maxima_ptr, state_ptr, largest_ptr, cut_ptr, chosen_ptr, Q, D, q_row, blocks, K, CHOSEN, share, tiny,
    least_norm, METRIC: tl.constexpr, ROUNDED: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    lanes = tl.arange(0, WIDTH)
    q_ptr += query.to(tl.int64) * q_row
    maxima_ptr += query.to(tl.int64) * blocks
    limit, cut, usual = _limits(
        q_ptr, maxima_ptr, largest_ptr, D, blocks, K, share, tiny, least_norm, METRIC, ROUNDED, WIDTH
    )
    tl.store(cut_ptr + query, cut)
    if not usual:
        tl.store(state_ptr + query, -1)
    counts = state_ptr + query + tl.zeros([WIDTH], tl.int32)
    for start in range(0, blocks, WIDTH):
        maxima = tl.load(maxima_ptr + start + lanes, mask=start + lanes < blocks, other=float("-inf"))
        near = maxima >= limit
        at = tl.atomic_add(counts, 1, mask=near)
        tl.store(chosen_ptr + query.to(tl.int64) * CHOSEN + at, start + lanes, mask=near & (at < CHOSEN))


@triton.jit
def _halved(sums, ROWS: tl.constexpr):
    """Return the sums (rows,) of (rows, 128) by halves: additions of pairs, whose order no compiler chooses."""
    for level in tl.static_range(7):
        sums = tl.sum(tl.reshape(sums, [ROWS, 2, 64 >> level]), 1)
    return tl.reshape(sums, [ROWS])


@triton.jit
def _scored(q_ptr, x_ptr, rows, allowed, D, x_row, METRIC: tl.constexpr, LANES: tl.constexpr):
    """Return the scores of rows (LANES,), the largest for the nearest: sums in float64, rounded once."""
    width = tl.arange(0, _WIDTH)
    sums = tl.zeros([LANES, _WIDTH], tl.float64)
    of_q = tl.zeros([LANES, _WIDTH], tl.float64)
    of_x = tl.zeros([LANES, _WIDTH], tl.float64)
    for start in range(0, D, _WIDTH):
        inside = (start + width < D)[None, :]
        q = tl.load(q_ptr + (start + width)[None, :], mask=inside, other=0)
        x_at = x_ptr + rows[:, None] * x_row + (start + width)[None, :]
        x = tl.load(x_at, mask=allowed[:, None] & inside, other=0)
        q, x = q.to(tl.float32).to(tl.float64), x.to(tl.float32).to(tl.float64)
        if METRIC == "l2":
            sums += (q - x) * (q - x)
        else:
            sums += q * x
        if METRIC == "cosine":
            of_q += q * q
            of_x += x * x
    total = _halved(sums, LANES)
    if METRIC == "cosine":
        total = total / tl.maximum(tl.sqrt(_halved(of_q, LANES) * _halved(of_x, LANES)), 1e-300)
    score = total.to(tl.float32)
    return tl.where(score == 0.0, 0.0, -score if METRIC == "l2" else score)  # no -0


@triton.jit
def _keep(keys_ptr, count_ptr, score, rows, near, KEYS):
    """Append the keys of the rows that are near."""
    found = tl.sum(near.to(tl.int32), 0)
    if found > 0:
        to = tl.atomic_add(count_ptr, found) + tl.cumsum(near.to(tl.int32), 0) - 1
        key = (_ordered(score).to(tl.int64) << 32) | (0xFFFFFFFF - rows)
        tl.store(keys_ptr + to, key, mask=near & (to < KEYS))


@triton.jit
def search_score(
    q_ptr, x_ptr, at_ptr, count_ptr, seen_ptr, state_ptr, cut_ptr, chosen_ptr, keys_ptr, Q, N, D, q_row, x_row,
    seen_row, CHOSEN, KEYS,
    METRIC: tl.constexpr, SETS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    query = (tl.program_id(0) // PARTS).to(tl.int64)
    count = tl.minimum(tl.load(state_ptr + query), CHOSEN)
    cut = tl.load(cut_ptr + query)
    lanes = tl.arange(0, LANES)
    for item in range(tl.program_id(0) % PARTS, count, PARTS):
        block = tl.load(chosen_ptr + query * CHOSEN + item).to(tl.int64)
        place = block // SETS * (SETS * ROWS) + block % SETS + SETS * lanes
        rows, count_of_rows = _chosen(at_ptr, count_ptr, place, N)
        allowed = (lanes < ROWS) & (place < count_of_rows)
        if seen_ptr is not None:
            allowed = allowed & (tl.load(seen_ptr + query * seen_row + rows).to(tl.int32) != 0)
        score = _scored(q_ptr + query * q_row, x_ptr, rows, allowed, D, x_row, METRIC, LANES)
        _keep(keys_ptr + query * KEYS, state_ptr + Q + query, score, rows, allowed & (score >= cut), KEYS)


@triton.jit
def _rank(
    keys_ptr, count_ptr, scores_ptr, ids_ptr, counts_ptr, part, KEYS, K, first,
    METRIC: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write the answers that are among a part of a query's keys."""
    count = tl.minimum(tl.load(count_ptr) & 0x3FFFFFFF, KEYS)
    lanes = tl.arange(0, WIDTH)
    place = part * WIDTH + lanes
    tl.store(counts_ptr + lanes, tl.minimum(count, K).to(tl.int64) + tl.zeros([WIDTH], tl.int64), mask=place == 0)
    inside = place < count
    worst = float("inf") if METRIC == "l2" else float("-inf")
    absent = (place >= count) & (place < K)
    tl.store(scores_ptr + place, tl.zeros([WIDTH], tl.float32) + worst, mask=absent)
    tl.store(ids_ptr + place, tl.full([WIDTH], -1, tl.int64), mask=absent)
    own = tl.load(keys_ptr + place, mask=inside, other=_NONE)
    rank = tl.zeros([WIDTH], tl.int32)
    tied = tl.zeros([WIDTH], tl.int32)
    for start in range(0, count, WIDTH):
        keys = tl.load(keys_ptr + start + lanes, mask=start + lanes < count, other=_NONE)
        rank += tl.sum((keys[None, :] > own[:, None]).to(tl.int32), 1)
        equal = (keys[None, :] < own[:, None]) & ((keys >> 32)[None, :] == (own >> 32)[:, None])
        tied += tl.sum(equal.to(tl.int32), 1)
    score = _of_order((own >> 32).to(tl.int32))
    score = -score if METRIC == "l2" else score
    kept = inside & (rank < K)
    tl.store(scores_ptr + rank, tl.where(score == 0.0, 0.0, score), mask=kept)
    tl.store(ids_ptr + rank, 0xFFFFFFFF - (own & 0xFFFFFFFF) + first, mask=kept)
    last = tl.sum((inside & (rank == K - 1) & (tied > 0)).to(tl.int32), 0)
    if last > 0:
        tl.atomic_or(count_ptr, 1 << 30)


@triton.jit
def search_best(
    keys_ptr, state_ptr, scores_ptr, ids_ptr, counts_ptr, Q, KEYS, K, first,
    METRIC: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    parts = tl.cdiv(tl.maximum(KEYS, K), WIDTH)
    query = (tl.program_id(0) // parts).to(tl.int64)
    answers = scores_ptr + query * K, ids_ptr + query * K, counts_ptr + query
    _rank(
        keys_ptr + query * KEYS, state_ptr + Q + query, answers[0], answers[1], answers[2], tl.program_id(0) % parts,
        KEYS, K, first, METRIC, WIDTH,
    )  # fmt: skip


@triton.jit
def search_finish(
    q_ptr, x_ptr, at_ptr, count_ptr, seen_ptr, maxima_ptr, state_ptr, told_ptr, largest_ptr, keys_ptr, scores_ptr,
    ids_ptr, counts_ptr, N, D, x_row, blocks, KEYS, K, first, share, tiny, least_norm,
    METRIC: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    limit, cut, usual = _limits(
        q_ptr, maxima_ptr, largest_ptr, D, blocks, K, share, tiny, least_norm, METRIC, False, WIDTH
    )
    if not usual:
        tl.store(state_ptr, -1)
    lanes = tl.arange(0, CHUNK)
    for start in range(tl.program_id(0) * CHUNK, blocks, PARTS * CHUNK):
        maxima = tl.load(maxima_ptr + start + lanes, mask=start + lanes < blocks, other=float("-inf"))
        near = maxima >= limit
        for _ in range(tl.sum(near.to(tl.int32), 0)):
            item = tl.max(tl.where(near, lanes, -1), 0)
            near = near & (lanes != item)
            place = (start + item).to(tl.int64) * ROWS + tl.arange(0, ROWS)
            rows, count_of_rows = _chosen(at_ptr, count_ptr, place, N)
            allowed = place < count_of_rows
            if seen_ptr is not None:
                allowed = allowed & (tl.load(seen_ptr + rows).to(tl.int32) != 0)
            score = _scored(q_ptr, x_ptr, rows, allowed, D, x_row, METRIC, ROWS)
            _keep(keys_ptr, state_ptr + 1, score, rows, allowed & (score >= cut), KEYS)
    tl.debug_barrier()  # all keys of this program are written before it counts as done
    if tl.atomic_add(state_ptr + 4, 1) == PARTS - 1:
        for part in range(tl.cdiv(tl.maximum(KEYS, K), 64)):
            _rank(keys_ptr, state_ptr + 1, scores_ptr, ids_ptr, counts_ptr, part, KEYS, K, first, METRIC, 64)
        tl.debug_barrier()
        places = tl.arange(0, 8)
        state = tl.load(state_ptr + places, mask=places < 6, other=0, volatile=True)
        tl.debug_barrier()
        tl.store(told_ptr + places, state, mask=places < 6)
        tl.store(state_ptr + places, tl.zeros([8], tl.int32), mask=places < 6)
