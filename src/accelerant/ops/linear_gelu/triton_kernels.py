"""linear_gelu: a matrix product whose epilogue adds the bias and applies gelu; the backward pass up to its products.

    z = x W^T + b    y = gelu(z)        dz = dy gelu'(z)    db = sum of dz over the rows    a = gelu(z), on request

Source: gelu as in accelerant.ops.gelu; tiles grouped by rows for reuse in the L2 cache as in Tillet et al. 2019,
        "Triton", and its tutorial on matrix products.
Layout: x (M, K), weight (N, K), y, z and dz (M, N), contiguous; dy (M, N) with a row stride. Products accumulate in
        float32; gelu is applied to the sum before it is rounded.
Grid:   fwd: one program per tile of y. _persistent: one program per multiprocessor loops over tiles and loads the next
        tile while it applies gelu to the last. bwd: one program per strip of BLOCK_N columns and `span` rows, with
        partial sums of the columns; _join: one program per BLOCK_N columns of these, added in a fixed order.
Bound:  fwd: tensor cores, 2 M N K flops, and about 15 operations per element of y. bwd: memory, 3 accesses and about 25
        operations per element; 4 and about 30 with a.
"""

import triton
import triton.language as tl

from accelerant.ops.gelu.triton_kernels import _gelu, _gelu_slope


@triton.jit
def _tile(number, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the first row and column of a tile; tiles are numbered down in groups of GROUP, then to the right."""
    down = tl.cdiv(M, BLOCK_M)
    in_group = GROUP * tl.cdiv(N, BLOCK_N)
    first = number // in_group * GROUP
    height = tl.minimum(down - first, GROUP)
    return (first + number % in_group % height) * BLOCK_M, number % in_group // height * BLOCK_N


@triton.jit
def _blocks(ptr, start, size, K, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return pointers to BLOCK rows of K elements; rows past the end point to the first of these."""
    lanes = tl.arange(0, BLOCK)
    rows = tl.where(start + lanes < size, lanes, 0)
    return ptr + start.to(tl.int64) * K + rows[:, None] * K + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _step(a_at, b_at, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the columns from k on of two operands' rows; zeros past the end."""
    if EVEN_K:
        return tl.load(a_at + k), tl.load(b_at + k)
    else:
        inside = (tl.arange(0, BLOCK_K) < K - k)[None, :]
        return tl.load(a_at + k, mask=inside, other=0), tl.load(b_at + k, mask=inside, other=0)


@triton.jit
def _dot(a_at, b_at, k, K, acc, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr):
    a, b = _step(a_at, b_at, k, K, BLOCK_K, EVEN_K)
    if UPCAST:  # the interpreter's bfloat16 products are wrong
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, tl.trans(b), acc, input_precision="ieee")


@triton.jit
def _finish(
    acc, bias_ptr, y_ptr, z_ptr, row, column, M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    FAST: tl.constexpr = y_ptr.dtype.element_ty != tl.float32
    lanes = tl.arange(0, BLOCK_N)
    columns = column + lanes
    in_row = columns < N
    rows = tl.arange(0, BLOCK_M)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)[None, :]
    at = row.to(tl.int64) * N + column
    local = rows[:, None] * N + lanes[None, :]
    inside = (row + rows < M)[:, None] & in_row[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + at + local, acc.to(z_ptr.dtype.element_ty), mask=inside)
    tl.store(y_ptr + at + local, _gelu(acc, TANH, FAST).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _halves(acc, BLOCK_M: tl.constexpr, HALF: tl.constexpr):
    """Return the left and the right columns of a tile."""
    return tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))


@triton.jit
def _finish_halves(
    acc, bias_ptr, y_ptr, z_ptr, row, column, M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_N // 2
    left, right = _halves(acc, BLOCK_M, HALF)
    _finish(left, bias_ptr, y_ptr, z_ptr, row, column, M, N, TANH, BLOCK_M, HALF)
    _finish(right, bias_ptr, y_ptr, z_ptr, row, column + HALF, M, N, TANH, BLOCK_M, HALF)


@triton.jit
def _finish_parts(
    acc, bias_ptr, y_ptr, z_ptr, row, column, M, N,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Finish a tile in 1, 2 or 4 parts, one after the other, so that registers do not spill."""
    if PARTS == 4:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = _halves(acc, BLOCK_M, HALF)
        _finish_halves(left, bias_ptr, y_ptr, z_ptr, row, column, M, N, TANH, BLOCK_M, HALF)
        _finish_halves(right, bias_ptr, y_ptr, z_ptr, row, column + HALF, M, N, TANH, BLOCK_M, HALF)
    elif PARTS == 2:
        _finish_halves(acc, bias_ptr, y_ptr, z_ptr, row, column, M, N, TANH, BLOCK_M, BLOCK_N)
    else:
        _finish(acc, bias_ptr, y_ptr, z_ptr, row, column, M, N, TANH, BLOCK_M, BLOCK_N)


@triton.jit
def linear_gelu_fwd(
    x_ptr, weight_ptr, bias_ptr, y_ptr, z_ptr, M, N, K,
    TANH: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    x_at = _blocks(x_ptr, row, M, K, BLOCK_M, BLOCK_K)
    weight_at = _blocks(weight_ptr, column, N, K, BLOCK_N, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        acc = _dot(x_at, weight_at, k, K, acc, BLOCK_K, EVEN_K, UPCAST)
    _finish_parts(acc, bias_ptr, y_ptr, z_ptr, row, column, M, N, TANH, BLOCK_M, BLOCK_N, PARTS)


@triton.jit
def linear_gelu_fwd_persistent(
    x_ptr, weight_ptr, bias_ptr, y_ptr, z_ptr, M, N, K,
    TANH: tl.constexpr, EVEN_K: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(M, BLOCK_M) * tl.cdiv(N, BLOCK_N)
    programs = tl.num_programs(0)
    last = tl.program_id(0) - programs  # a counter of its own, so that the compiler can fuse the loops
    for number in tl.range(tl.program_id(0), tiles, programs, flatten=True):
        row, column = _tile(number, M, N, BLOCK_M, BLOCK_N, GROUP)
        x_at = _blocks(x_ptr, row, M, K, BLOCK_M, BLOCK_K)
        weight_at = _blocks(weight_ptr, column, N, K, BLOCK_N, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            acc = _dot(x_at, weight_at, k, K, acc, BLOCK_K, EVEN_K, UPCAST)
        last += programs
        row, column = _tile(last, M, N, BLOCK_M, BLOCK_N, GROUP)
        _finish_parts(acc, bias_ptr, y_ptr, z_ptr, row, column, M, N, TANH, BLOCK_M, BLOCK_N, PARTS)


@triton.jit
def linear_gelu_bwd(
    dy_ptr, z_ptr, dz_ptr, a_ptr, partial_ptr, M, N, dy_stride, span,
    TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    FAST: tl.constexpr = z_ptr.dtype.element_ty != tl.float32
    strips = tl.cdiv(N, BLOCK_N)
    part = tl.program_id(0) // strips
    columns = (tl.program_id(0) % strips) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_row = columns < N
    begin = part.to(tl.int64) * span
    end = tl.minimum(begin + span, M)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        inside = (rows < end)[:, None] & in_row[None, :]
        at = rows[:, None] * N + columns[None, :]
        z = tl.load(z_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        dz = dy * _gelu_slope(z, TANH, FAST)
        tl.store(dz_ptr + at, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        if a_ptr is not None:
            tl.store(a_ptr + at, _gelu(z, TANH, FAST).to(a_ptr.dtype.element_ty), mask=inside)
        sums += dz
    if partial_ptr is not None:
        tl.store(partial_ptr + part.to(tl.int64) * N + columns, tl.sum(sums, 0), mask=in_row)


@triton.jit
def linear_gelu_join(partial_ptr, sums_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        inside = (rows < P)[:, None] & (columns < N)[None, :]
        sums += tl.load(partial_ptr + rows[:, None] * N + columns[None, :], mask=inside, other=0.0)
    tl.store(sums_ptr + columns, tl.sum(sums, 0).to(sums_ptr.dtype.element_ty), mask=columns < N)
