"""layer_norm over rows of N elements.

    mu = mean(x)    r = 1 / sqrt(mean((x - mu)^2) + eps)    h = (x - mu) r    y = h w + b
    g  = dy w       dx = r (g - mean(g) - h mean(g h))      dw = sum over rows of dy h      db = sum over rows of dy

Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4; the gradient is theirs written out.
Layout: x and dy with a distance between rows, everything else dense; statistics and sums in float32.
Grid:   fwd takes ROWS rows a program. bwd is persistent: program p takes the rows p ROWS, (p + programs) ROWS, ... ROWS
        at a time, and keeps w and its part of dw and db in registers. bwd_reduce adds the programs' parts in a fixed
        order.
        The _wide kernels are for rows beyond the registers: one program a row, which reads it several times, from L2;
        bwd_columns then takes a strip of columns and a share of the rows.
Bound:  memory: 2 accesses an element forward, 3 backward (fwd_wide the same if L2 holds the row, bwd_wide with
        bwd_columns 5); about 9 operations forward, 18 backward.
"""

import triton
import triton.language as tl


@triton.jit
def layer_norm_fwd(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    M, N, x_stride, eps,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    # One group of rows a program and the weights read last: a persistent loop with the weights in registers took 14%
    # longer on an H200, since the L2 serves them at no cost and fewer registers mean more rows in flight.
    columns = tl.arange(0, BLOCK_N)[None, :]
    in_row = (columns < N) | EXACT
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = rows < M
    inside = in_rows[:, None] & in_row
    x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / N
    centred = tl.where(in_row, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / N + eps)
    y = centred * rstd[:, None]
    if weight_ptr is not None:
        y *= tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(y_ptr + rows[:, None] * N + columns, y.to(y_ptr.dtype.element_ty), mask=inside)
    if mean_ptr is not None:
        tl.store(mean_ptr + rows, mean, mask=in_rows)
        tl.store(rstd_ptr + rows, rstd, mask=in_rows)


@triton.jit
def layer_norm_bwd(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    M, N, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    # KEPT: rows of the running sums, 1 or ROWS. Where warps lie along the columns, adding a group's rows at once is
    # free and saves registers; where they lie along the rows it would cost a shuffle a step.
    columns = tl.arange(0, BLOCK_N)[None, :]
    in_row = (columns < N) | EXACT
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros([KEPT, BLOCK_N], dtype=tl.float32)
    dbias = tl.zeros([KEPT, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for start in tl.range(first, M, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        in_rows = rows < M
        inside = in_rows[:, None] & in_row
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=in_rows, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=in_rows, other=0.0)
        h = (x - mean[:, None]) * rstd[:, None]
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        g_mean = tl.sum(g, 1) / N  # outside the row dy is 0, and so are g and g h
        gh_mean = tl.sum(g * h, 1) / N
        dx = (g - g_mean[:, None] - h * gh_mean[:, None]) * rstd[:, None]
        tl.store(dx_ptr + rows[:, None] * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if dweight_ptr is not None:
            part = dy * h
            dweight += part if KEPT == ROWS else tl.sum(part, 0, keep_dims=True)
        if dbias_ptr is not None:
            dbias += dy if KEPT == ROWS else tl.sum(dy, 0, keep_dims=True)
    columns = tl.arange(0, BLOCK_N)
    at = tl.program_id(0).to(tl.int64) * N + columns
    if dweight_ptr is not None:
        tl.store(dweight_ptr + at, tl.sum(dweight, 0), mask=(columns < N) | EXACT)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + at, tl.sum(dbias, 0), mask=(columns < N) | EXACT)


@triton.jit
def layer_norm_bwd_reduce(
    dweight_parts_ptr, dbias_parts_ptr, dweight_ptr, dbias_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if dweight_parts_ptr is not None:
        _reduce(dweight_parts_ptr, dweight_ptr, columns, P, N, BLOCK_P, BLOCK_N)
    if dbias_parts_ptr is not None:
        _reduce(dbias_parts_ptr, dbias_ptr, columns, P, N, BLOCK_P, BLOCK_N)


@triton.jit
def _reduce(parts_ptr, out_ptr, columns, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        inside = (rows < P)[:, None] & (columns < N)[None, :]
        total += tl.load(parts_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def layer_norm_fwd_wide(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, N, x_stride, eps, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        total += tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    mean = tl.sum(total, 0) / N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        centred = tl.where(at < N, x - mean, 0.0)
        total += centred * centred
    rstd = tl.rsqrt(tl.sum(total, 0) / N + eps)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        y = (tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32) - mean) * rstd
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)
    if mean_ptr is not None:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_bwd_wide(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, N, dy_stride, x_stride, BLOCK_N: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    dx_ptr += row * N
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    g_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    gh_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        g = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        g_sum += g
        gh_sum += g * (tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32) - mean) * rstd
    g_mean = tl.sum(g_sum, 0) / N
    gh_mean = tl.sum(gh_sum, 0) / N
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        g = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        h = (tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32) - mean) * rstd
        tl.store(dx_ptr + at, ((g - g_mean - h * gh_mean) * rstd).to(dx_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def layer_norm_bwd_columns(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, dweight_ptr, dbias_ptr,
    M, N, dy_stride, x_stride,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dweight = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    dbias = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1).to(tl.int64) * ROWS
    step = tl.num_programs(1).to(tl.int64) * ROWS
    for start in range(first, M, step):
        rows = start + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + rows, mask=rows < M, other=0.0)
        rstd = tl.load(rstd_ptr + rows, mask=rows < M, other=0.0)
        dweight += dy * (x - mean[:, None]) * rstd[:, None]
        dbias += dy
    at = tl.program_id(1).to(tl.int64) * N + columns
    if dweight_ptr is not None:
        tl.store(dweight_ptr + at, tl.sum(dweight, 0), mask=columns < N)
    if dbias_ptr is not None:
        tl.store(dbias_ptr + at, tl.sum(dbias, 0), mask=columns < N)
