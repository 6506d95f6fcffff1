"""cross_entropy: each row's loss against its class, and optionally its gradient in the same pass.

    loss = (1 - s) (L - x_t) + s (L - mean x)            L = log sum exp x, t the row's class, s the smoothing
    dx   = c (exp(x - L) - (1 - s) [column = t] - s / N)  c the upstream gradient, divided by the count for a mean

L is stored as the row's maximum and 1 / sum of exp(x - maximum), which loses no precision for large logits. The
gradient has the same bits whether it is computed with the loss (fwd) or afterwards (bwd).

Source: Szegedy et al. 2016, arXiv:1512.00567, section 7 (smoothing); maximum and sum in one pass as in Milakov and
        Gimelshein 2018, arXiv:1805.02867, algorithm 3.
Layout: rows of N contiguous logits with a row stride; targets int64 or int32. Computed in float32. A row that does not
        start on a 16-byte boundary is read from the boundary before it (alignment VEC elements), and only its first and
        last blocks are masked, so that accesses are 16 bytes wide for any N.
Grid:   fwd: one program per ROWS rows, which stay in registers. _wide: one program per row; for the gradient the row is
        read again from L2, except HELD blocks of bfloat16 logits, which stay in registers. bwd: one program per tile of
        a row. _scale: a few programs per multiprocessor. _count: COUNTS programs. _reduce: one program. _few: one
        program for all rows, which needs no other launch for the count and the sum.
Bound:  memory: 1 access per element without the gradient, 2 with it; about 12 operations.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)  # finite, so that a row of only -inf does not give NaN too early


@triton.jit
def cross_entropy_count(target_ptr, counts_ptr, M, ignore_index, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(tl.program_id(0) * BLOCK, M, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += (tl.load(target_ptr + at, mask=at < M, other=ignore_index) != ignore_index).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def cross_entropy_reduce(loss_ptr, counts_ptr, y_ptr, n, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(loss_ptr + at, mask=at < n, other=0.0)
    y = tl.sum(total, 0)
    if counts_ptr is not None:
        y = y / tl.sum(tl.load(counts_ptr + tl.arange(0, COUNTS)), 0).to(tl.float32)
    tl.store(y_ptr + tl.program_id(0), y.to(y_ptr.dtype.element_ty))


@triton.jit
def cross_entropy_scale(dx_ptr, dy_ptr, counts_ptr, n, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    factor = tl.load(dy_ptr).to(tl.float32)
    if counts_ptr is not None:
        factor = factor / tl.sum(tl.load(counts_ptr + tl.arange(0, COUNTS)), 0).to(tl.float32)
    if factor != 1.0:  # true for NaN, too
        first = tl.program_id(0).to(tl.int64) * BLOCK
        step = tl.num_programs(0).to(tl.int64) * BLOCK
        for start in range(first, n, step):
            at = start + tl.arange(0, BLOCK)
            dx = tl.load(dx_ptr + at, mask=at < n).to(tl.float32) * factor
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _coefficient(row, counts_ptr, dy_ptr, dy_stride, COUNTS: tl.constexpr):
    c = 1.0
    if counts_ptr is not None:
        c = 1.0 / tl.sum(tl.load(counts_ptr + tl.arange(0, COUNTS)), 0).to(tl.float32)
    if dy_ptr is not None:
        c = c * tl.load(dy_ptr + row * dy_stride).to(tl.float32)
    return c


@triton.jit
def _loss(peak, total, x_target, x_sum, in_range, N, smoothing, SMOOTH: tl.constexpr):
    """Return the loss of a counted row; NaN if its target is out of range or a logit is inf."""
    nan = float("nan")
    y = (peak - x_target) + tl.log(total)
    if SMOOTH:
        y = (1.0 - smoothing) * y + smoothing * ((peak - x_sum / N) + tl.log(total))
    return tl.where(in_range & (peak < float("inf")), y, nan)


@triton.jit
def _gradient(x, columns, target, peak, scale, c, N, smoothing, SMOOTH: tl.constexpr):
    """Return the gradient; scale is c over the sum of exponentials, c is NaN if the target is out of range."""
    if SMOOTH:
        hit = tl.where(columns == target, c * (1.0 - smoothing), 0.0) + c * smoothing / N
    else:
        hit = tl.where(columns == target, c, 0.0)
    return tl.exp(x - peak) * scale - hit


@triton.jit
def _rows(
    x_ptr, target_ptr, dx_ptr, row, M, N, x_stride, dx_stride, ignore_index, smoothing, c,
    SMOOTH: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Write the rows' gradients; return their losses, 0 where not counted, maxima and sums of exponentials."""
    columns = tl.arange(0, BLOCK_N)[None, :]
    here = row < M
    inside = here[:, None] & (columns < N)
    target = tl.load(target_ptr + row, mask=here, other=ignore_index)
    counted = here & (target != ignore_index)
    in_range = (target >= 0) & (target < N)
    x_target = tl.load(x_ptr + row * x_stride + target, mask=counted & in_range, other=0.0).to(tl.float32)
    raw = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=inside, other=float("-inf"))
    x = raw.to(tl.float32)
    peak = tl.maximum(tl.max(x, 1), LOWEST)
    total = tl.sum(tl.exp(x - peak[:, None]), 1)
    x_sum = 0.0
    if SMOOTH:
        x_sum = tl.sum(tl.where(inside, x, 0.0), 1)
    y = tl.where(counted, _loss(peak, total, x_target, x_sum, in_range, N, smoothing, SMOOTH), 0.0)
    if dx_ptr is not None:
        c = tl.where(in_range & (peak < float("inf")), c, float("nan"))
        scale = (c * (1.0 / total))[:, None]
        dx = _gradient(x, columns, target[:, None], peak[:, None], scale, c[:, None], N, smoothing, SMOOTH)
        dx = tl.where(counted[:, None], dx, 0.0)
        tl.store(dx_ptr + row[:, None] * dx_stride + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    return y, peak, total


@triton.jit
def cross_entropy_fwd(
    x_ptr, target_ptr, loss_ptr, stat_ptr, dx_ptr, counts_ptr, dy_ptr,
    M, N, x_stride, dx_stride, dy_stride, ignore_index, smoothing,
    SMOOTH: tl.constexpr, COUNTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    here = row < M
    c = 1.0
    if dx_ptr is not None:
        c = _coefficient(row, counts_ptr, dy_ptr, dy_stride, COUNTS)
    y, peak, total = _rows(
        x_ptr, target_ptr, dx_ptr, row, M, N, x_stride, dx_stride, ignore_index, smoothing, c, SMOOTH, BLOCK_N
    )  # fmt: skip
    if loss_ptr is not None:
        tl.store(loss_ptr + row, y.to(loss_ptr.dtype.element_ty), mask=here)
    if stat_ptr is not None:
        tl.store(stat_ptr + row, peak, mask=here)
        tl.store(stat_ptr + M + row, 1.0 / total, mask=here)


@triton.jit
def cross_entropy_few(
    x_ptr, target_ptr, y_ptr, dx_ptr, M, N, x_stride, dx_stride, ignore_index, smoothing,
    MEAN: tl.constexpr, SMOOTH: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    count = 1.0
    if MEAN:
        counts = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, M, BLOCK):
            at = start + tl.arange(0, BLOCK)
            counts += (tl.load(target_ptr + at, mask=at < M, other=ignore_index) != ignore_index).to(tl.int32)
        count = tl.sum(counts, 0).to(tl.float32)
    losses = tl.zeros([ROWS], dtype=tl.float32)
    for start in range(0, M, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        y, _, _ = _rows(
            x_ptr, target_ptr, dx_ptr, row, M, N, x_stride, dx_stride, ignore_index, smoothing, 1.0 / count, SMOOTH,
            BLOCK_N,
        )  # fmt: skip
        losses += y
    tl.store(y_ptr, (tl.sum(losses, 0) / count).to(y_ptr.dtype.element_ty))


@triton.jit
def _zero(dx_ptr, N, BLOCK: tl.constexpr):
    """Write the gradient of a row that is not counted."""
    for start in range(0, N, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(dx_ptr + at, tl.zeros([BLOCK], dtype=dx_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def _join(x, largest, total):
    """Add an element to each lane's maximum and sum of exponentials, with one exponential."""
    above = x - largest
    e = tl.exp(-tl.abs(above))
    return tl.maximum(largest, x), tl.where(above > 0, total * e + 1.0, total + e)


@triton.jit
def _packed(raw, HALF: tl.constexpr):
    """Return pairs of neighbouring bfloat16 numbers as int32, the layout of a register."""
    low, high = tl.split(tl.reshape(raw.to(tl.int16, bitcast=True), (HALF, 2)))
    return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def _widened(pair, zero):
    """Return a pair in float32; zero, unknown to the compiler, makes it convert at each use, in fewer registers."""
    pair = pair ^ zero
    return (pair << 16).to(tl.float32, bitcast=True), (pair & -65536).to(tl.float32, bitcast=True)


@triton.jit
def cross_entropy_fwd_wide(
    x_ptr, target_ptr, loss_ptr, stat_ptr, dx_ptr, counts_ptr, dy_ptr,
    M, N, x_stride, dx_stride, dy_stride, ignore_index, smoothing,
    SMOOTH: tl.constexpr, COUNTS: tl.constexpr, VEC: tl.constexpr, SAME: tl.constexpr, BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    if target == ignore_index:
        if loss_ptr is not None:
            tl.store(loss_ptr + row, 0.0)
        if stat_ptr is not None:
            tl.store(stat_ptr + row, 0.0)
            tl.store(stat_ptr + M + row, 1.0)
        if dx_ptr is not None:
            _zero(dx_ptr + row * dx_stride, N, BLOCK)
        return
    in_range = (target >= 0) & (target < N)
    x_target = tl.load(x_ptr + row * x_stride + target, mask=in_range, other=0.0).to(tl.float32)
    place = row * x_stride
    lead = (place & (VEC - 1)).to(tl.int32)
    x_ptr += tl.multiple_of(place - lead, VEC)
    lanes = tl.arange(0, BLOCK)
    end = N + lead
    full = end // BLOCK * BLOCK
    largest = tl.full([BLOCK], LOWEST, dtype=tl.float32)  # per lane, combined at the end
    total = tl.zeros([BLOCK], dtype=tl.float32)
    x_sums = tl.zeros([BLOCK], dtype=tl.float32)
    first: tl.constexpr = BLOCK if VEC > 1 else 0  # held blocks follow the one that begins before the row
    begin: tl.constexpr = first + HELD * BLOCK
    HALF: tl.constexpr = BLOCK // 2
    held = ()
    for i in tl.static_range(HELD):
        held = held + (_packed(tl.load(x_ptr + (first + i * BLOCK) + lanes), HALF),)  # noqa: RUF005 - no stars in Triton
    if VEC > 1:
        inside = (lanes >= lead) & (lanes < end)
        x = tl.load(x_ptr + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        largest, total = _join(x, largest, total)
        if SMOOTH:
            x_sums += tl.where(inside, x, 0.0)
    for start in range(begin, full, BLOCK):
        x = tl.load(x_ptr + start + lanes).to(tl.float32)
        largest, total = _join(x, largest, total)
        if SMOOTH:
            x_sums += x
    if full >= begin:
        inside = full + lanes < end
        x = tl.load(x_ptr + full + lanes, mask=inside, other=float("-inf")).to(tl.float32)
        largest, total = _join(x, largest, total)
        if SMOOTH:
            x_sums += tl.where(inside, x, 0.0)
    peak = tl.max(largest, 0)
    if HELD:
        largest_held = tl.full([HALF], LOWEST, dtype=tl.float32)
        for i in tl.static_range(HELD):
            low, high = _widened(held[i], 0)
            largest_held = tl.maximum(largest_held, tl.maximum(low, high))
        peak = tl.maximum(peak, tl.max(largest_held, 0))
    whole = tl.sum(total * tl.exp(largest - peak), 0)
    x_sum = 0.0
    if SMOOTH:
        x_sum = tl.sum(x_sums, 0)
    if HELD:
        zero = (N < 0).to(tl.int32)
        total_held = tl.zeros([HALF], dtype=tl.float32)
        x_held = tl.zeros([HALF], dtype=tl.float32)
        for i in tl.static_range(HELD):
            low, high = _widened(held[i], zero)
            total_held += tl.exp(low - peak) + tl.exp(high - peak)
            if SMOOTH:
                x_held += low + high
        whole += tl.sum(total_held, 0)
        if SMOOTH:
            x_sum += tl.sum(x_held, 0)
    if loss_ptr is not None:
        y = _loss(peak, whole, x_target, x_sum, in_range, N, smoothing, SMOOTH)
        tl.store(loss_ptr + row, y.to(loss_ptr.dtype.element_ty))
    if stat_ptr is not None:
        tl.store(stat_ptr + row, peak)
        tl.store(stat_ptr + M + row, 1.0 / whole)
    if dx_ptr is not None:
        c = _coefficient(row, counts_ptr, dy_ptr, dy_stride, COUNTS)
        c = tl.where(in_range & (peak < float("inf")), c, float("nan"))
        scale = c * (1.0 / whole)
        target = target.to(tl.int32) + lead
        if SAME:
            dx_ptr += tl.multiple_of(place - lead, VEC)
        else:
            dx_ptr += row * dx_stride - lead
        if VEC > 1:
            inside = (lanes >= lead) & (lanes < end)
            x = tl.load(x_ptr + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            dx = _gradient(x, lanes, target, peak, scale, c, N, smoothing, SMOOTH)
            tl.store(dx_ptr + lanes, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        zero = (M < 0).to(tl.int32)
        for i in tl.static_range(HELD):
            low, high = _widened(held[i], zero)
            at = first + i * BLOCK + 2 * tl.arange(0, HALF)
            low = _gradient(low, at, target, peak, scale, c, N, smoothing, SMOOTH)
            high = _gradient(high, at + 1, target, peak, scale, c, N, smoothing, SMOOTH)
            both = tl.reshape(tl.join(low, high), (BLOCK,))
            tl.store(dx_ptr + (first + i * BLOCK) + lanes, both.to(dx_ptr.dtype.element_ty))
        for start in range(begin, full, BLOCK):
            x = tl.load(x_ptr + start + lanes).to(tl.float32)
            dx = _gradient(x, start + lanes, target, peak, scale, c, N, smoothing, SMOOTH)
            tl.store(dx_ptr + start + lanes, dx.to(dx_ptr.dtype.element_ty))
        if full >= begin:
            inside = full + lanes < end
            x = tl.load(x_ptr + full + lanes, mask=inside, other=float("-inf")).to(tl.float32)
            dx = _gradient(x, full + lanes, target, peak, scale, c, N, smoothing, SMOOTH)
            tl.store(dx_ptr + full + lanes, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def cross_entropy_bwd(
    x_ptr, target_ptr, stat_ptr, dx_ptr, counts_ptr, dy_ptr,
    M, N, x_stride, dx_stride, dy_stride, ignore_index, smoothing,
    SMOOTH: tl.constexpr, COUNTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    strips = tl.cdiv(N, BLOCK_N)
    row = (tl.program_id(0) // strips).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = (tl.program_id(0) % strips) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    here = row < M
    inside = here[:, None] & (columns < N)
    target = tl.load(target_ptr + row, mask=here, other=ignore_index)
    counted = here & (target != ignore_index)
    in_range = (target >= 0) & (target < N)
    x = tl.load(x_ptr + row[:, None] * x_stride + columns, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.load(stat_ptr + row, mask=here, other=0.0)
    inverse = tl.load(stat_ptr + M + row, mask=here, other=0.0)
    c = _coefficient(row, counts_ptr, dy_ptr, dy_stride, COUNTS)
    c = tl.where(in_range & (peak < float("inf")), c, float("nan"))
    scale = (c * inverse)[:, None]
    dx = _gradient(x, columns, target[:, None], peak[:, None], scale, c[:, None], N, smoothing, SMOOTH)
    dx = tl.where(counted[:, None], dx, 0.0)
    tl.store(dx_ptr + row[:, None] * dx_stride + columns, dx.to(dx_ptr.dtype.element_ty), mask=inside)
