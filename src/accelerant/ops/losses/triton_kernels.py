"""mse_loss, l1_loss and binary cross entropies: a loss of each element, summed in the same pass, and the gradients.

    mse_loss                          l = (x - t)^2
    l1_loss                           l = |x - t|
    binary_cross_entropy              l = -t max(log x, -100) - (1 - t) max(log(1 - x), -100)
    binary_cross_entropy_with_logits  l = (1 - t) log(1 + exp(x)) + p t log(1 + exp(-x)), p the positives' weight

Each l is multiplied by its weight. A gradient is c dl/dx or c dl/dt, c the upstream gradient times the weight, divided
by the number of elements for a mean.

Source: torch's functions of these names, whose clamps the third has.
Layout: n contiguous elements; weights repeat after w_n (p_n) elements. Computed in float32.
Grid:   fwd: one program per block; for a sum up to PARTS programs, which stride over the blocks, and a sum per program,
        added in a fixed order by _total. bwd: one program per block.
Bound:  memory: 2 accesses per element, 3 or 4 for the gradients; 2 to 20 operations.
"""

import triton
import triton.language as tl


@triton.jit
def _log1p(e):
    """Return log(1 + e) for e above -1, small results as exact as large ones."""
    u = 1.0 + e
    return tl.where(u == 1.0, e, tl.log(tl.where(u > 0.0, u, 1.0)) * (e / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def _mse(x, t, p):
    return (x - t) * (x - t)


@triton.jit
def _mse_slopes(x, t, p):
    return 2.0 * (x - t), 2.0 * (t - x)


@triton.jit
def _l1(x, t, p):
    return tl.abs(x - t)


@triton.jit
def _l1_slopes(x, t, p):
    d = x - t
    s = tl.where(d > 0.0, 1.0, tl.where(d < 0.0, -1.0, d))  # 0 for 0, NaN for NaN
    return s, -s


@triton.jit
def _logs(x):
    """Return log x and log(1 - x), at least -100; NaN outside of [0, 1]."""
    valid = tl.where((x >= 0.0) & (x <= 1.0), 0.0, float("nan"))
    log_x = tl.where(x > 0.0, tl.maximum(tl.log(tl.where(x > 0.0, x, 1.0)), -100.0), -100.0)
    return log_x + valid, tl.where(x < 1.0, _log1p(-x), -100.0) + valid


@triton.jit
def _bce(x, t, p):
    log_x, log_y = _logs(x)
    return -t * log_x - (1.0 - t) * log_y


@triton.jit
def _bce_slopes(x, t, p):
    log_x, log_y = _logs(x)
    return (x - t) / tl.maximum(x * (1.0 - x), 1e-12), log_y - log_x


@triton.jit
def _softpluses(x):
    """Return log(1 + exp(x)) and log(1 + exp(-x)), without cancellation."""
    rest = _log1p(tl.exp(-tl.abs(x)))
    return tl.maximum(x, 0.0) + rest, tl.maximum(-x, 0.0) + rest


@triton.jit
def _bce_logits(x, t, p):
    above, below = _softpluses(x)
    return (1.0 - t) * above + p * t * below


@triton.jit
def _bce_logits_slopes(x, t, p):
    above, below = _softpluses(x)
    e = tl.exp(-tl.abs(x))
    return ((1.0 - t) * tl.where(x > 0.0, 1.0, e) - p * t * tl.where(x > 0.0, e, 1.0)) / (1.0 + e), p * below - above


@triton.jit
def _weight(w_ptr, at, w_n):
    w = 1.0
    if w_ptr is not None:
        w = tl.load(w_ptr + at % w_n).to(tl.float32)
    return w


@triton.jit
def _weighted(x_ptr, t_ptr, w_ptr, p_ptr, start, n, w_n, p_n, LOSS: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask, so that accesses are 16 bytes wide whatever n is
        x = tl.load(x_ptr + at).to(tl.float32)
        t = tl.load(t_ptr + at).to(tl.float32)
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    loss = LOSS(x, t, _weight(p_ptr, at, p_n)) * _weight(w_ptr, at, w_n)
    return tl.where(at < n, loss, 0.0)


@triton.jit
def _forward(
    x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, LOSS: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if SUM:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            total += _weighted(x_ptr, t_ptr, w_ptr, p_ptr, start, n, w_n, p_n, LOSS, BLOCK)
        tl.store(y_ptr + tl.program_id(0), (tl.sum(total, 0) * factor).to(y_ptr.dtype.element_ty))
    else:
        loss = _weighted(x_ptr, t_ptr, w_ptr, p_ptr, first, n, w_n, p_n, LOSS, BLOCK)
        at = first + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, loss.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def _backward(
    dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor,
    SLOPES: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:
        x = tl.load(x_ptr + at).to(tl.float32)
        t = tl.load(t_ptr + at).to(tl.float32)
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    if SCALAR:
        c = tl.load(dy_ptr).to(tl.float32) * factor
    else:
        c = tl.load(dy_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    c = c * _weight(w_ptr, at, w_n)
    dx, dt = SLOPES(x, t, _weight(p_ptr, at, p_n))
    if dx_ptr is not None:
        tl.store(dx_ptr + at, (c * dx).to(dx_ptr.dtype.element_ty), mask=at < n)
    if dt_ptr is not None:
        tl.store(dt_ptr + at, (c * dt).to(dt_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def losses_total(part_ptr, y_ptr, parts, factor, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    total = tl.sum(tl.load(part_ptr + at, mask=at < parts, other=0.0), 0)
    tl.store(y_ptr, (total * factor).to(y_ptr.dtype.element_ty))


@triton.jit
def mse_loss_fwd(x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, SUM: tl.constexpr, BLOCK: tl.constexpr):
    _forward(x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, _mse, SUM, BLOCK)


@triton.jit
def mse_loss_bwd(
    dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, SCALAR: tl.constexpr, BLOCK: tl.constexpr
):
    _backward(dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, _mse_slopes, SCALAR, BLOCK)


@triton.jit
def l1_loss_fwd(x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, SUM: tl.constexpr, BLOCK: tl.constexpr):
    _forward(x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, _l1, SUM, BLOCK)


@triton.jit
def l1_loss_bwd(
    dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, SCALAR: tl.constexpr, BLOCK: tl.constexpr
):
    _backward(dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, _l1_slopes, SCALAR, BLOCK)


@triton.jit
def binary_cross_entropy_fwd(
    x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    _forward(x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, _bce, SUM, BLOCK)


@triton.jit
def binary_cross_entropy_bwd(
    dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, SCALAR: tl.constexpr, BLOCK: tl.constexpr
):
    _backward(dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, _bce_slopes, SCALAR, BLOCK)


@triton.jit
def binary_cross_entropy_with_logits_fwd(
    x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    _forward(x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, _bce_logits, SUM, BLOCK)


@triton.jit
def binary_cross_entropy_with_logits_bwd(
    dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, SCALAR: tl.constexpr, BLOCK: tl.constexpr
):
    _backward(
        dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor, _bce_logits_slopes, SCALAR, BLOCK
    )
