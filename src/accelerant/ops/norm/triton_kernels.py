"""The norms over rows of N elements: CENTRE for layer_norm, else rms_norm; with a residual, of s = x + residual.

    mu = mean(x), 0 unless CENTRE    r = 1 / sqrt(mean((x - mu)^2) + eps)    h = (x - mu) r    y = h w + b
    g  = dy w       dx = r (g - mean(g) - h mean(g h)) + ds, without mean(g) unless CENTRE
    dw = sum over rows of dy h      db = sum over rows of dy      dxsum = sum over rows of dx

Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4; Zhang and Sennrich 2019, arXiv:1910.07467,
        equation 4; the gradients are theirs written out.
Layout: x, residual, dy and ds with a distance between rows, everything else dense; sums in float32. Statistics are
        (M, 2): mu and r; (M, 1) unless CENTRE: r alone. (As (2, M), the offset M cost norm_bwd 30 registers.)
Grid:   fwd takes ROWS rows a program, as CHUNKS chunks of BLOCK_N columns. bwd is persistent: program p takes the rows
        p ROWS, (p + programs) ROWS, ... ROWS at a time, and keeps w and its part of the sums in registers. bwd_reduce
        adds the programs' parts in a fixed order.
        The _wide kernels are for rows beyond the registers: one program a row, which reads it several times, from L2,
        and corrects the roundings of mean and r, for an error of two units in the last place of the largest result;
        bwd_columns then takes a strip of columns and a share of the rows.
Bound:  memory: 2 accesses an element forward, 3 backward, with a residual 4 and 4 (fwd_wide the same if L2 holds the
        row, bwd_wide with bwd_columns 2 more); about 9 operations forward, 18 backward.
EVICTION: see ops/_launch.py; no gain in bwd, whose loads are staged in shared memory (measured).
"""

import triton
import triton.language as tl


@triton.jit
def norm_fwd(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, statistics_ptr,
    M, N, x_stride, residual_stride, eps,
    CENTRE: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, EXACT: tl.constexpr,
    EVICTION: tl.constexpr,
):  # fmt: skip
    # One group of rows a program and the weights read last: a persistent loop with the weights in registers took 14%
    # longer on an H200, since the L2 serves them at no cost and fewer registers mean more rows in flight.
    # Several chunks: fewer idle lanes where N is no power of two, and with 256 columns a row stays within one warp.
    columns = tl.arange(0, BLOCK_N)[None, :]
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_rows = (rows < M) | (ROWS == 1)
    xs = ()
    for i in tl.static_range(CHUNKS):
        at = columns + i * BLOCK_N
        inside = in_rows[:, None] & ((at < N) | EXACT)
        x_at = rows[:, None] * x_stride + at
        x = tl.load(x_ptr + x_at, mask=inside, other=0.0, eviction_policy=EVICTION)
        if residual_ptr is not None:
            residual_at = rows[:, None] * residual_stride + at
            residual = tl.load(residual_ptr + residual_at, mask=inside, other=0.0, eviction_policy=EVICTION)
            # Rounded before it is normalized: what the backward pass reads again, and what torch does unfused.
            x = (x.to(tl.float32) + residual.to(tl.float32)).to(s_ptr.dtype.element_ty)
            tl.store(s_ptr + rows[:, None] * N + at, x, mask=inside)
        xs = xs + (x.to(tl.float32),)  # noqa: RUF005 - Triton has no starred tuples
    mean = 0.0
    if CENTRE:
        total = xs[0]
        for i in tl.static_range(1, CHUNKS):
            total += xs[i]
        mean = (tl.sum(total, 1) / N)[:, None]
    squares = _centred(xs[0], mean, columns, N, CENTRE and not EXACT)
    squares *= squares
    for i in tl.static_range(1, CHUNKS):
        centred = _centred(xs[i], mean, columns + i * BLOCK_N, N, CENTRE and not EXACT)
        squares += centred * centred
    rstd = tl.rsqrt(tl.sum(squares, 1) / N + eps)
    for i in tl.static_range(CHUNKS):
        at = columns + i * BLOCK_N
        in_row = (at < N) | EXACT
        y = (xs[i] - mean) * rstd[:, None]
        # The vectors in the layout of x, so that they need not pass through shared memory from a layout of their own.
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + tl.broadcast_to(at, [ROWS, BLOCK_N]), mask=in_row, other=0.0)
            y *= weight.to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + tl.broadcast_to(at, [ROWS, BLOCK_N]), mask=in_row, other=0.0).to(tl.float32)
        tl.store(y_ptr + rows[:, None] * N + at, y.to(y_ptr.dtype.element_ty), mask=in_rows[:, None] & in_row)
    if statistics_ptr is not None:
        if CENTRE:
            tl.store(statistics_ptr + rows[:, None] * 2, mean, mask=in_rows[:, None])
        tl.store(statistics_ptr + rows * (1 + CENTRE) + CENTRE, rstd, mask=in_rows)


@triton.jit
def _centred(x, mean, columns, N, MASKED: tl.constexpr):
    """Less the mean, and 0 outside the row."""
    centred = x - mean
    if MASKED:
        centred = tl.where(columns < N, centred, 0.0)
    return centred


@triton.jit
def norm_bwd(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, statistics_ptr, dx_ptr, parts_ptr,
    M, N, dy_stride, ds_stride, x_stride, span, splits,
    CENTRE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, DXSUM: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr, KEPT: tl.constexpr,
    APART: tl.constexpr,
):  # fmt: skip
    # APART: sums are wanted of each `span` rows, so `splits` programs share these and no program has rows of two spans.
    # KEPT: rows of the running sums, 1 or ROWS. Where warps lie along the columns, adding a group's rows at once is
    # free and saves registers; where they lie along the rows it would cost a shuffle a step.
    columns = tl.arange(0, BLOCK_N)[None, :]
    in_row = (columns < N) | EXACT
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    dweight = tl.zeros([KEPT, BLOCK_N], dtype=tl.float32)
    dbias = tl.zeros([KEPT, BLOCK_N], dtype=tl.float32)
    dxsum = tl.zeros([KEPT, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(0).to(tl.int64) * ROWS
    step = tl.num_programs(0).to(tl.int64) * ROWS
    end = M
    if APART:
        begin = (tl.program_id(0) // splits).to(tl.int64) * span
        first = begin + (tl.program_id(0) % splits) * ROWS
        step = splits * ROWS
        end = begin + span
    for start in tl.range(first, end, step, num_stages=STAGES):
        rows = start + tl.arange(0, ROWS)
        in_rows = rows < end
        inside = in_rows[:, None] & in_row
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(statistics_ptr + rows * (1 + CENTRE) + CENTRE, mask=in_rows, other=0.0)
        if CENTRE:
            x -= tl.load(statistics_ptr + rows * 2, mask=in_rows, other=0.0)[:, None]
        h = x * rstd[:, None]
        g = dy
        if weight_ptr is not None:
            g = dy * weight
        g_mean = 0.0
        if CENTRE:
            g_mean = (tl.sum(g, 1) / N)[:, None]  # outside the row dy is 0, and so are g and g h
        gh_mean = tl.sum(g * h, 1) / N
        dx = (g - g_mean - h * gh_mean[:, None]) * rstd[:, None]
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + rows[:, None] * ds_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + rows[:, None] * N + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        if DWEIGHT:
            part = dy * h
            dweight += part if KEPT == ROWS else tl.sum(part, 0, keep_dims=True)
        if DBIAS:
            dbias += dy if KEPT == ROWS else tl.sum(dy, 0, keep_dims=True)
        if DXSUM:
            dxsum += dx if KEPT == ROWS else tl.sum(dx, 0, keep_dims=True)
    columns = tl.arange(0, BLOCK_N)
    at = tl.program_id(0).to(tl.int64) * N + columns
    inside = (columns < N) | EXACT
    _store_parts(parts_ptr, at, dweight, dbias, tl.num_programs(0), N, inside, DWEIGHT, DBIAS)
    if DXSUM:
        offset = tl.num_programs(0).to(tl.int64) * (N * (DWEIGHT + DBIAS))
        tl.store(parts_ptr + offset + at, tl.sum(dxsum, 0), mask=inside)


@triton.jit
def _store_parts(
    parts_ptr, at, dweight, dbias, programs, N, inside, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr
):  # fmt: skip
    """A program's sums of dw, then of all programs those of db, whichever are wanted."""
    if DWEIGHT:
        tl.store(parts_ptr + at, tl.sum(dweight, 0), mask=inside)
        parts_ptr += programs.to(tl.int64) * N
    if DBIAS:
        tl.store(parts_ptr + at, tl.sum(dbias, 0), mask=inside)


@triton.jit
def norm_bwd_reduce(
    parts_ptr, dweight_ptr, dbias_ptr, dxsum_ptr, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if dweight_ptr is not None:
        _reduce(parts_ptr, dweight_ptr, columns, P, N, BLOCK_P, BLOCK_N)
        parts_ptr += P * N.to(tl.int64)
    if dbias_ptr is not None:
        _reduce(parts_ptr, dbias_ptr, columns, P, N, BLOCK_P, BLOCK_N)
        parts_ptr += P * N.to(tl.int64)
    if dxsum_ptr is not None:
        _reduce(parts_ptr, dxsum_ptr, columns, P, N, BLOCK_P, BLOCK_N)


@triton.jit
def _reduce(parts_ptr, out_ptr, columns, P, N, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr):
    total = tl.zeros([BLOCK_P, BLOCK_N], dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = start + tl.arange(0, BLOCK_P)
        inside = (rows < P)[:, None] & (columns < N)[None, :]
        total += tl.load(parts_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + columns, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def _summed(x_ptr, residual_ptr, at, N, dtype: tl.constexpr):
    """Return a chunk of a row in float32, of the rounded sum where there is a residual."""
    x = tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        x = (x + tl.load(residual_ptr + at, mask=at < N, other=0.0).to(tl.float32)).to(dtype).to(tl.float32)
    return x


@triton.jit
def norm_fwd_wide(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, y_ptr, s_ptr, statistics_ptr,
    M, N, x_stride, residual_stride, eps,
    CENTRE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = y_ptr.dtype.element_ty if s_ptr is None else s_ptr.dtype.element_ty
    x_ptr += row * x_stride
    y_ptr += row * N
    if residual_ptr is not None:
        residual_ptr += row * residual_stride
        s_ptr += row * N
    mean = 0.0
    if CENTRE:
        total = tl.zeros([BLOCK_N], dtype=tl.float32)
        for start in range(0, N, BLOCK_N):
            total += _summed(x_ptr, residual_ptr, start + tl.arange(0, BLOCK_N), N, dtype)
        mean = tl.sum(total, 0) / N
    total = tl.zeros([BLOCK_N], dtype=tl.float32)
    drift = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        centred = _centred(_summed(x_ptr, residual_ptr, at, N, dtype), mean, at, N, CENTRE)
        total += centred * centred
        if CENTRE:
            drift += centred
    # One rounding of mean, variance or rstd moves the whole row, an unlucky one by more than all others: what they lack
    # is added to each element. The last sum in float64 is 16 additions a thread.
    variance = tl.sum(total.to(tl.float64), 0) / N + eps
    rstd = tl.rsqrt(variance.to(tl.float32))
    rstd_rest = (rstd * (0.5 - 0.5 * variance * rstd * rstd)).to(tl.float32)
    rstd_rest = tl.where(rstd_rest == rstd_rest, rstd_rest, 0.0)  # not a number where the variance is infinite
    mean_rest = 0.0
    if CENTRE:
        mean_rest = tl.sum(drift, 0) / N
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        x = _summed(x_ptr, residual_ptr, at, N, dtype)
        if s_ptr is not None:
            tl.store(s_ptr + at, x.to(dtype), mask=at < N)
        centred = x - mean - mean_rest
        y = centred * rstd + centred * rstd_rest
        if weight_ptr is not None:
            y *= tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            y += tl.load(bias_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=at < N)
    if statistics_ptr is not None:
        if CENTRE:
            tl.store(statistics_ptr + row * 2, mean)
        tl.store(statistics_ptr + row * (1 + CENTRE) + CENTRE, rstd)


@triton.jit
def norm_bwd_wide(
    dy_ptr, ds_ptr, x_ptr, weight_ptr, statistics_ptr, dx_ptr, N, dy_stride, ds_stride, x_stride,
    CENTRE: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dy_ptr += row * dy_stride
    x_ptr += row * x_stride
    dx_ptr += row * N
    if ds_ptr is not None:
        ds_ptr += row * ds_stride
    mean = 0.0
    if CENTRE:
        mean = tl.load(statistics_ptr + row * 2)
    rstd = tl.load(statistics_ptr + row * (1 + CENTRE) + CENTRE)
    g_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    gh_sum = tl.zeros([BLOCK_N], dtype=tl.float32)
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        g = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        g_sum += g
        gh_sum += g * (tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32) - mean) * rstd
    g_mean = 0.0
    if CENTRE:
        g_mean = tl.sum(g_sum, 0) / N
    gh_mean = tl.sum(gh_sum, 0) / N
    for start in range(0, N, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        g = tl.load(dy_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            g *= tl.load(weight_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        h = (tl.load(x_ptr + at, mask=at < N, other=0.0).to(tl.float32) - mean) * rstd
        dx = (g - g_mean - h * gh_mean) * rstd
        if ds_ptr is not None:
            dx += tl.load(ds_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def norm_bwd_columns(
    dy_ptr, x_ptr, statistics_ptr, parts_ptr,
    M, N, dy_stride, x_stride,
    CENTRE: tl.constexpr, DWEIGHT: tl.constexpr, DBIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dweight = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    dbias = tl.zeros([ROWS, BLOCK_N], dtype=tl.float32)
    first = tl.program_id(1).to(tl.int64) * ROWS
    step = tl.num_programs(1).to(tl.int64) * ROWS
    for start in range(first, M, step):
        rows = start + tl.arange(0, ROWS)
        in_rows = rows < M
        inside = in_rows[:, None] & (columns < N)[None, :]
        dy = tl.load(dy_ptr + rows[:, None] * dy_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
        if DWEIGHT:
            h = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=inside, other=0.0).to(tl.float32)
            if CENTRE:
                h -= tl.load(statistics_ptr + rows * 2, mask=in_rows, other=0.0)[:, None]
            rstd = tl.load(statistics_ptr + rows * (1 + CENTRE) + CENTRE, mask=in_rows, other=0.0)
            dweight += dy * h * rstd[:, None]
        if DBIAS:
            dbias += dy
    at = tl.program_id(1).to(tl.int64) * N + columns
    _store_parts(parts_ptr, at, dweight, dbias, tl.num_programs(1), N, columns < N, DWEIGHT, DBIAS)
