"""Steps of a transformer other than products, attention, norms and gelu.

    columns  sums[n] = sum over m of x[m, n]
    embed    y[t] = table[token[t]] + places[t mod time], rounded once

Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", for the sum of the two embeddings.
Layout: x (M, N) with a row stride, everything else dense; sums in float32. A token outside [0, V) reads nothing and
        gives a row of NaN.
Grid:   columns: one program per strip of BLOCK_N columns and `span` rows, with partial sums, which linear_gelu's kernel
        `join` adds. embed: one program per ROWS tokens and BLOCK_D columns.
Bound:  memory: columns 1 access per element, embed 3 and 2 of four bytes.
"""

import triton
import triton.language as tl


@triton.jit
def transformer_columns(
    x_ptr, partial_ptr, M, N, stride, span,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // strips
    columns = (tl.program_id(0) % strips) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = columns < N
    begin = part.to(tl.int64) * span
    end = tl.minimum(begin + span, M)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None] & in_row[None, :]
        sums += tl.load(x_ptr + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(partial_ptr + part.to(tl.int64) * N + columns, tl.sum(sums, 0), mask=in_row)


@triton.jit
def transformer_embed(
    tokens_ptr, table_ptr, places_ptr, y_ptr, T, V, D, time,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)[None, :]
    in_rows = rows < T
    inside = in_rows[:, None] & ((columns < D) | EXACT)
    token = tl.load(tokens_ptr + rows, mask=in_rows, other=-1).to(tl.int64)
    known = ((token >= 0) & (token < V))[:, None] & inside
    y = tl.load(table_ptr + token[:, None] * D + columns, mask=known, other=float("nan")).to(tl.float32)
    y += tl.load(places_ptr + (rows % time)[:, None] * D + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows[:, None] * D + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
