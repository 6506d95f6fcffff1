"""Transposed copies of matrices, one after another.

Layout: x (B, M, N) contiguous, y (B, N, M) contiguous. From channels first to last M is the channels and N the pixels,
        the other way round for the way back.
Grid:   one program a tile.
Bound:  memory, a read and a write of each element.
"""

import triton
import triton.language as tl


@triton.jit
def layout_transpose(x_ptr, y_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    down, right = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    matrix = tl.program_id(0) // (down * right)
    tile = tl.program_id(0) - matrix * (down * right)
    rows = (tile // right) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile % right) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    first = matrix.to(tl.int64) * M * N
    x = tl.load(x_ptr + first + rows[:, None].to(tl.int64) * N + columns[None, :], mask=inside)
    y_at = y_ptr + first + columns[:, None].to(tl.int64) * M + rows[None, :]
    tl.store(y_at, tl.trans(x), mask=(columns < N)[:, None] & (rows < M)[None, :])
