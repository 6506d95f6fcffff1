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
def _logs(x):
    """Return log x and log(1 - x), at least -100; NaN outside of [0, 1]."""
    valid = tl.where((x >= 0.0) & (x <= 1.0), 0.0, float("nan"))
    log_x = tl.where(x > 0.0, tl.maximum(tl.log(tl.where(x > 0.0, x, 1.0)), -100.0), -100.0)
    return log_x + valid, tl.where(x < 1.0, _log1p(-x), -100.0) + valid


@triton.jit
def _softpluses(x):
    """Return log(1 + exp(x)) and log(1 + exp(-x)), without cancellation."""
    rest = _log1p(tl.exp(-tl.abs(x)))
    return tl.maximum(x, 0.0) + rest, tl.maximum(-x, 0.0) + rest


@triton.jit
def _loss(x, t, p, KIND: tl.constexpr):
    if KIND == "mse_loss":
        loss = (x - t) * (x - t)
    elif KIND == "l1_loss":
        loss = tl.abs(x - t)
    elif KIND == "binary_cross_entropy":
        log_x, log_y = _logs(x)
        loss = -t * log_x - (1.0 - t) * log_y
    else:
        above, below = _softpluses(x)
        loss = (1.0 - t) * above + p * t * below
    return loss


@triton.jit
def _slopes(x, t, p, KIND: tl.constexpr):
    """Return dl/dx and dl/dt."""
    if KIND == "mse_loss":
        dx = 2.0 * (x - t)
        dt = -dx
    elif KIND == "l1_loss":
        d = x - t
        dx = tl.where(d > 0.0, 1.0, tl.where(d < 0.0, -1.0, d))  # 0 for 0, NaN for NaN
        dt = -dx
    elif KIND == "binary_cross_entropy":
        log_x, log_y = _logs(x)
        dx = (x - t) / tl.maximum(x * (1.0 - x), 1e-12)
        dt = log_y - log_x
    else:
        above, below = _softpluses(x)
        e = tl.exp(-tl.abs(x))
        dx = ((1.0 - t) * tl.where(x > 0.0, 1.0, e) - p * t * tl.where(x > 0.0, e, 1.0)) / (1.0 + e)
        dt = p * below - above
    return dx, dt


@triton.jit
def _weight(w_ptr, at, w_n):
    w = 1.0
    if w_ptr is not None:
        w = tl.load(w_ptr + at % w_n).to(tl.float32)
    return w


@triton.jit
def _weighted(x_ptr, t_ptr, w_ptr, p_ptr, start, n, w_n, p_n, KIND: tl.constexpr, BLOCK: tl.constexpr):
    at = start + tl.arange(0, BLOCK)
    if start + BLOCK <= n:  # without a mask, so that accesses are 16 bytes wide whatever n is
        x = tl.load(x_ptr + at).to(tl.float32)
        t = tl.load(t_ptr + at).to(tl.float32)
    else:
        x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    loss = _loss(x, t, _weight(p_ptr, at, p_n), KIND) * _weight(w_ptr, at, w_n)
    return tl.where(at < n, loss, 0.0)


@triton.jit
def losses_fwd(
    x_ptr, t_ptr, w_ptr, p_ptr, y_ptr, n, w_n, p_n, factor, KIND: tl.constexpr, SUM: tl.constexpr, BLOCK: tl.constexpr
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    if SUM:
        total = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(first, n, tl.num_programs(0).to(tl.int64) * BLOCK):
            total += _weighted(x_ptr, t_ptr, w_ptr, p_ptr, start, n, w_n, p_n, KIND, BLOCK)
        tl.store(y_ptr + tl.program_id(0), (tl.sum(total, 0) * factor).to(y_ptr.dtype.element_ty))
    else:
        loss = _weighted(x_ptr, t_ptr, w_ptr, p_ptr, first, n, w_n, p_n, KIND, BLOCK)
        at = first + tl.arange(0, BLOCK)
        tl.store(y_ptr + at, loss.to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def losses_bwd(
    dy_ptr, x_ptr, t_ptr, w_ptr, p_ptr, dx_ptr, dt_ptr, n, w_n, p_n, factor,
    KIND: tl.constexpr, SCALAR: tl.constexpr, BLOCK: tl.constexpr,
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
    dx, dt = _slopes(x, t, _weight(p_ptr, at, p_n), KIND)
    if dx_ptr is not None:
        tl.store(dx_ptr + at, (c * dx).to(dx_ptr.dtype.element_ty), mask=at < n)
    if dt_ptr is not None:
        tl.store(dt_ptr + at, (c * dt).to(dt_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def losses_total(part_ptr, y_ptr, parts, factor, PARTS: tl.constexpr):
    at = tl.arange(0, PARTS)
    total = tl.sum(tl.load(part_ptr + at, mask=at < parts, other=0.0), 0)
    tl.store(y_ptr, (total * factor).to(y_ptr.dtype.element_ty))
