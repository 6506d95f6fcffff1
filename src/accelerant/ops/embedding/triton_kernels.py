"""embedding: lookup of T rows of a table (V, D) by their indices, and the sum of the gradients of each row.

    y[t] = weight[indices[t]]        dweight[v] = sum of dy[t] over the t with indices[t] = v, but 0 for v = PADDING

Source: Bengio, Ducharme, Vincent and Jauvin 2003, "A neural probabilistic language model", section 2 (the table C).
Layout: weight with a row stride, everything else dense. Sums in float32. An index outside [0, V) reads nothing and
        gives a row of NaN; its gradient is dropped.
Grid:   fwd: one program per ROWS tokens and BLOCK_D columns. bwd_atomic: the same, adding to a float32 (V, D).
        bwd (sorted): one program per CHUNK tokens in the order of their indices, and BLOCK_D columns; it writes the sum
        of each run of equal indices within its chunk. The sum of a run that began before the chunk goes to parts[chunk,
        0], that of a run that begins in the chunk and continues in the next to parts[chunk, 1]; bwd_join adds these in
        order, AT_ONCE parts per step. Deterministic.
        bwd_few: one program per token and BLOCK_D columns, FEW at least T: the program of an index's first token adds
        all its gradients. No sort; deterministic.
Bound:  memory: T D elements read and V D written, and the sort of T indices; T D additions backward.
"""

import triton
import triton.language as tl


@triton.jit
def embedding_fwd(
    indices_ptr, weight_ptr, y_ptr, T, V, D, stride, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EXACT: tl.constexpr
):
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    in_rows = tokens < T
    number = tl.load(indices_ptr + tokens, mask=in_rows, other=-1).to(tl.int64)
    known = (number >= 0) & (number < V)
    in_row = (columns < D) | EXACT
    row = tl.load(weight_ptr + number[:, None] * stride + columns, mask=known[:, None] & in_row, other=float("nan"))
    tl.store(y_ptr + tokens[:, None] * D + columns, row, mask=in_rows[:, None] & in_row)


@triton.jit
def embedding_bwd_atomic(
    dy_ptr, indices_ptr, sums_ptr, T, V, D, PADDING,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    number = tl.load(indices_ptr + tokens, mask=tokens < T, other=-1).to(tl.int64)
    counts = (number >= 0) & (number < V) & (number != PADDING)
    inside = counts[:, None] & ((columns < D) | EXACT)
    dy = tl.load(dy_ptr + tokens[:, None] * D + columns, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(sums_ptr + number[:, None] * D + columns, dy, mask=inside, sem="relaxed")


@triton.jit
def embedding_bwd_few(dy_ptr, indices_ptr, dweight_ptr, T, V, D, PADDING, FEW: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    tokens = tl.arange(0, FEW)
    number = tl.load(indices_ptr + token).to(tl.int64)
    same = (tokens < T) & (tl.load(indices_ptr + tokens, mask=tokens < T, other=-1).to(tl.int64) == number)
    first = tl.min(tl.where(same, tokens, FEW), 0) == token
    counts = first & (number >= 0) & (number < V) & (number != PADDING)
    inside = columns < tl.where(counts, D, 0)
    at = tokens[:, None].to(tl.int64) * D + columns[None, :]
    dy = tl.load(dy_ptr + at, mask=same[:, None] & inside[None, :], other=0.0).to(tl.float32)
    tl.store(dweight_ptr + number * D + columns, tl.sum(dy, 0).to(dweight_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _put(row_ptr, row, mask, ADDS: tl.constexpr):
    if ADDS:
        row += tl.load(row_ptr, mask=mask, other=0.0).to(tl.float32)
    tl.store(row_ptr, row.to(row_ptr.dtype.element_ty), mask=mask)


@triton.jit
def embedding_bwd(
    dy_ptr, sorted_ptr, order_ptr, dweight_ptr, parts_ptr, T, V, D, PADDING,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    first = chunk * CHUNK
    last = tl.minimum(first + CHUNK, T)
    parts_ptr += chunk * 2 * D + columns
    current = tl.load(sorted_ptr + first).to(tl.int64)
    before = tl.load(sorted_ptr + tl.maximum(first - 1, 0)).to(tl.int64)
    begun = (first == 0) | (before != current)  # whether the current run began in this chunk
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for at in range(first, last):
        number = tl.load(sorted_ptr + at).to(tl.int64)
        token = tl.load(order_ptr + at)
        dy = tl.load(dy_ptr + token * D + columns, mask=inside, other=0.0).to(tl.float32)
        if number != current:
            counts = (current >= 0) & (current < V) & (current != PADDING)
            _put(dweight_ptr + current * D + columns, total, columns < tl.where(counts & begun, D, 0), ADDS)
            tl.store(parts_ptr, total, mask=columns < tl.where(begun, 0, D))
            total = dy
            current = number
            begun = begun | (number == number)
        else:
            total += dy
    ends = (last == T) | (tl.load(sorted_ptr + tl.minimum(last, T - 1)).to(tl.int64) != current)
    counts = (current >= 0) & (current < V) & (current != PADDING)
    _put(dweight_ptr + current * D + columns, total, columns < tl.where(counts & begun & ends, D, 0), ADDS)
    tl.store(parts_ptr, total, mask=columns < tl.where(begun, 0, D))
    tl.store(parts_ptr + D, total, mask=columns < tl.where(begun, tl.where(ends, 0, D), 0))


@triton.jit
def embedding_bwd_join(
    sorted_ptr, dweight_ptr, parts_ptr, T, V, D, PADDING,
    CHUNK: tl.constexpr, BLOCK_D: tl.constexpr, ADDS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < D
    first = chunk * CHUNK
    # Another chunk follows: there is no program for the last one.
    number = tl.load(sorted_ptr + first + CHUNK - 1).to(tl.int64)
    goes_on = tl.load(sorted_ptr + first + CHUNK).to(tl.int64) == number
    begun = tl.load(sorted_ptr + tl.maximum(first - 1, 0)).to(tl.int64) != number
    counts = (number >= 0) & (number < V) & (number != PADDING)
    if goes_on & (begun | (first == 0)) & counts:
        total = tl.load(parts_ptr + (chunk * 2 + 1) * D + columns, mask=inside, other=0.0)
        following = chunk + 1
        while following >= 0:
            # Independent loads: with one part per step, 1024 chunks of one index took 0.6 us per step.
            at = following + tl.arange(0, AT_ONCE)
            same = tl.load(sorted_ptr + at * CHUNK, mask=at * CHUNK < T, other=-1).to(tl.int64) == number
            rows = parts_ptr + at[:, None] * 2 * D + columns[None, :]
            total += tl.sum(tl.load(rows, mask=same[:, None] & inside[None, :], other=0.0), 0)
            following = tl.where(tl.min(same.to(tl.int32), 0) == 1, following + AT_ONCE, -1)
        _put(dweight_ptr + number * D + columns, total, inside, ADDS)
