"""Kernels of clipping, other than products.

    squares  parts[b, c] = sum of x[b, p]^2 over the span c of p
    sum      y[p] (+)= sum over b of weight[b] x[b, p], where weight[b] is not 0: x[b] is not read there
    scale    y[b, p] = weight[b] x[b, p], rounded once; exactly 0 where weight[b] is 0.
             With g: g[b, q] = 0 where drop[b]; others are neither read nor written
    ghost    parts[b, i, j] = sum over positions t of tile i, s of tile j of (A_bt . A_bs) (G_bt . G_bs), j <= i, those
             below the diagonal twice: without the (T, T) matrices in memory
             masses[b, i] = sum over positions t of tile i of |A_bt| |G_bt|

Source: Bu, Wang, Zha and Karypis 2022, arXiv:2210.00038, section 2; Li et al. 2022, arXiv:2110.05679, section 4.
Layout: dense; weights and sums in float32, squares of the rounded values.
Grid:   squares, scale: an example's span of SPAN values a program. sum: BLOCK_P columns a program, one example after
        the other. ghost: a pair of tiles of BLOCK_T positions of an example a program; those above the diagonal exit
        immediately.
Bound:  memory, except ghost: B P read by squares and sum, 2 B P by scale. ghost: T (T + BLOCK_T) (N + K) operations an
        example.
"""

import triton
import triton.language as tl


@triton.jit
def clip_squares(x_ptr, parts_ptr, P, chunks, SPAN: tl.constexpr, BLOCK: tl.constexpr):
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    x_ptr += row * P
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, SPAN, BLOCK):
        at = chunk * SPAN + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < P, other=0.0).to(tl.float32)
        total += x * x
    tl.store(parts_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def clip_sum(x_ptr, weights_ptr, y_ptr, B, P, ADDS: tl.constexpr, BLOCK_P: tl.constexpr, UNROLL: tl.constexpr):
    # One dimension, UNROLL examples in flight: with tiles of examples and a sum across warps it took 2.3 times as long.
    columns = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = columns < P
    total = tl.zeros([BLOCK_P], dtype=tl.float32)
    if ADDS:
        total += tl.load(y_ptr + columns, mask=inside, other=0.0)
    for start in range(0, B, UNROLL):
        for offset in tl.static_range(UNROLL):
            row = start + offset
            weight = tl.load(weights_ptr + row, mask=row < B, other=0.0)
            counts = inside & (weight + tl.zeros([BLOCK_P], dtype=tl.float32) != 0.0)
            x = tl.load(x_ptr + row.to(tl.int64) * P + columns, mask=counts, other=0.0)
            total += x.to(tl.float32) * weight
    tl.store(y_ptr + columns, total, mask=inside)


@triton.jit
def clip_scale(
    x_ptr, weights_ptr, y_ptr, g_ptr, drop_ptr, P, Q, chunks, SPAN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    weight = tl.load(weights_ptr + row)
    x_ptr += row * P
    y_ptr += row * P
    for start in range(0, SPAN, BLOCK):
        at = chunk * SPAN + start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + at, mask=at < tl.where(weight != 0.0, P, 0), other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (x * weight).to(y_ptr.dtype.element_ty), mask=at < P)
    if g_ptr is not None:  # noqa: SIM102  a condition of compilation
        if tl.load(drop_ptr + row) != 0:
            g_ptr += row * Q
            for start in range(chunk * BLOCK, Q, chunks * BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(g_ptr + at, tl.zeros([BLOCK], dtype=g_ptr.dtype.element_ty), mask=at < Q)


@triton.jit
def _products(x_ptr, left, right, T, K, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr):
    """Return the inner products of rows left and right of x (T, K), (BLOCK_T, BLOCK_T)."""
    total = tl.zeros([BLOCK_T, BLOCK_T], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        columns = start + tl.arange(0, BLOCK_K)
        at_left = left[:, None].to(tl.int64) * K + columns[None, :]
        at_right = right[None, :].to(tl.int64) * K + columns[:, None]
        a = tl.load(x_ptr + at_left, mask=(left < T)[:, None] & (columns < K)[None, :], other=0.0)
        b = tl.load(x_ptr + at_right, mask=(right < T)[None, :] & (columns < K)[:, None], other=0.0)
        if WIDEN:  # the interpreter has no products of bfloat16
            total = tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
        else:
            total = tl.dot(a, b, total, input_precision="ieee")
    return total


@triton.jit
def clip_ghost(
    a_ptr, g_ptr, parts_ptr, masses_ptr, T, K, N, tiles,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) // tiles
    j = tl.program_id(1) % tiles
    total = 0.0
    if j <= i:
        left = i * BLOCK_T + tl.arange(0, BLOCK_T)
        right = j * BLOCK_T + tl.arange(0, BLOCK_T)
        of_a = _products(a_ptr + row * T * K, left, right, T, K, BLOCK_T, BLOCK_K, WIDEN)
        of_g = _products(g_ptr + row * T * N, left, right, T, N, BLOCK_T, BLOCK_K, WIDEN)
        total = tl.sum(tl.sum(of_a * of_g, 1), 0) * tl.where(i == j, 1.0, 2.0)
        if i == j:
            same = left[:, None] == right[None, :]
            # 2^-100 a value, far below any that counts: squares below 2^-126 may be lost in of_a and of_g.
            squares_a = tl.sum(tl.where(same, of_a, 0.0), 1) + K * 7.888609052210118e-31
            squares_g = tl.sum(tl.where(same, of_g, 0.0), 1) + N * 7.888609052210118e-31
            each = tl.where(left < T, tl.sqrt(squares_a) * tl.sqrt(squares_g), 0.0)
            tl.store(masses_ptr + row * tiles + i, tl.sum(each, 0))
    tl.store(parts_ptr + row * tiles * tiles + tl.program_id(1), total)
