"""Kernels and functions that several ops share.

transpose: copies of matrices, one after another.
Layout: x (B, M, N) contiguous, y (B, N, M) contiguous. From channels first to last M is the channels and N the pixels,
        the other way round for the way back.
Grid:   one program a tile.
Bound:  memory, a read and a write of each element.

start_early: a start before the preceding kernel of the stream has ended (programmatic dependent launch). A kernel whose
code waits so is launched with that attribute; its result is the same as without. Source: PTX ISA 8.7, section
9.7.13.13, griddepcontrol.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def start_early(EARLY: tl.constexpr):
    """Wait for the preceding kernel, which this one may begin before the end of where EARLY."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


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
