"""Updates of all parameters of a model in one launch, and the norm of all gradients.

Source: reference.py (AdamW: arXiv:1711.05101; SGD with momentum: Sutskever et al. 2013; clipping: arXiv:1211.5063).
Layout: a table of int64 with eight columns per tensor: addresses of parameter, gradient, first and second state and
        float32 master copy; address of the step counter (SGD: 1 if the momentum buffer is new); number of elements;
        row of the group's values. A group's row is seven float64 (as bits) and the address of a learning rate on the
        device, or 0 if the first of the seven is the learning rate. The small _prepare kernels compute a row of sixteen
        float32 coefficients per tensor, so that powers, quotients and the clipping coefficient are computed once per
        tensor, in float64 (1 - beta^step cancels), without synchronizing with the host.
        A map of int64, one per chunk: tensor * 2^32 + chunk of that tensor.
Grid:   one program per chunk of CHUNK elements, in steps of BLOCK; _total and _prepare: one program. Whole chunks take
        a path without masks, with 16-byte accesses if all addresses are multiples of 16.
Bound:  memory. AdamW in float32: 16 bytes read and 12 written per parameter, about 15 operations. SGD with momentum: 12
        and 8. Norm: 4 read. Maps and tables add about 100 bytes per chunk.
"""

import triton
import triton.language as tl


@triton.jit
def _pointer(address, KIND: tl.constexpr):
    if KIND == "fp32":
        return address.to(tl.pointer_type(tl.float32))
    elif KIND == "bf16":
        return address.to(tl.pointer_type(tl.bfloat16))
    else:
        return address.to(tl.pointer_type(tl.float16))


@triton.jit
def _typed(address, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a typed pointer; the alignment hint must be on the pointer, since on the integer it is lost."""
    if ALIGNED:
        return tl.multiple_of(_pointer(address, KIND), 16)
    else:
        return _pointer(address, KIND)


@triton.jit
def multi_tensor_norm(
    map_ptr, table_ptr, partial_ptr, first,
    GRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    where = tl.load(map_ptr + tl.program_id(0))
    row = table_ptr + (where >> 32) * 8
    start = (where & 0xFFFFFFFF) * CHUNK
    g_ptr = _typed(tl.load(row + 1), GRAD, ALIGNED)
    numel = tl.load(row + 6)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    if start + CHUNK <= numel:
        for offset in tl.static_range(0, CHUNK, BLOCK):
            g = tl.load(g_ptr + start + offset + tl.arange(0, BLOCK)).to(tl.float32)
            total += g * g
    else:
        for begin in range(start, numel, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            g = tl.load(g_ptr + at, mask=at < numel, other=0.0).to(tl.float32)
            total += g * g
    tl.store(partial_ptr + first + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _norm(partial_ptr, partials, BLOCK_P: tl.constexpr):
    """Return the root of the sum of the partial sums, added in a fixed order."""
    total = tl.zeros([BLOCK_P], dtype=tl.float64)
    for start in range(0, partials, BLOCK_P):
        total += tl.load(partial_ptr + start + tl.arange(0, BLOCK_P)).to(tl.float64)
    return tl.sqrt(tl.sum(total, 0)).to(tl.float32)


@triton.jit
def _clip(norm, max_norm):
    """Return the clipping coefficient as torch computes it: NaN for a NaN norm, 0 for an infinite one."""
    quotient = max_norm / (norm + 1e-6)
    return tl.where(quotient > 1.0, 1.0, quotient)


@triton.jit
def multi_tensor_total(partial_ptr, partials, out_ptr, max_norm, BLOCK_P: tl.constexpr):
    norm = _norm(partial_ptr, partials, BLOCK_P)
    tl.store(out_ptr, norm)
    tl.store(out_ptr + 1, _clip(norm, max_norm))


@triton.jit
def multi_tensor_scale(
    map_ptr, table_ptr, scale_ptr,
    GRAD: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    scale = tl.load(scale_ptr)
    if scale != 1.0:  # most steps are not clipped, and read and write nothing
        where = tl.load(map_ptr + tl.program_id(0))
        row = table_ptr + (where >> 32) * 8
        start = (where & 0xFFFFFFFF) * CHUNK
        g_ptr = _typed(tl.load(row + 1), GRAD, ALIGNED)
        numel = tl.load(row + 6)
        if start + CHUNK <= numel:
            for offset in tl.static_range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                g = tl.load(g_ptr + at).to(tl.float32) * scale
                tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty))
        else:
            for begin in range(start, numel, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                g = tl.load(g_ptr + at, mask=at < numel, other=0.0).to(tl.float32) * scale
                tl.store(g_ptr + at, g.to(g_ptr.dtype.element_ty), mask=at < numel)


# --- coefficients ----------------------------------------------------------------------------------------------------
@triton.jit
def _scale_and_skip(
    partial_ptr, partials, norm_ptr, max_norm, grad_scale_ptr, found_inf_ptr, BLOCK_P: tl.constexpr, CLIP: tl.constexpr
):
    """Return the factor of all gradients, and 1 if the step is to change nothing, else 0.

    The factor is 1 / grad_scale, times the clipping coefficient of the unscaled gradients.
    """
    scale = tl.full([], 1.0, dtype=tl.float32)
    skip = tl.full([], 0.0, dtype=tl.float32)
    if found_inf_ptr is not None:
        skip = tl.where(tl.load(found_inf_ptr) != 0.0, 1.0, 0.0)
    if grad_scale_ptr is not None:
        scale = (1.0 / tl.load(grad_scale_ptr).to(tl.float64)).to(tl.float32)
    if CLIP:
        norm = _norm(partial_ptr, partials, BLOCK_P) * scale
        tl.store(norm_ptr, norm)
        scale = scale * _clip(norm, max_norm)
        if grad_scale_ptr is not None:
            overflow = tl.where(norm < float("inf"), 0.0, 1.0)  # NaN compares as false
            skip = overflow if found_inf_ptr is None else skip
    return scale, skip


@triton.jit
def _value(group_ptr, column: tl.constexpr, inside):
    return tl.load(group_ptr + column, mask=inside, other=0).to(tl.float64, bitcast=True)


@triton.jit
def _learning_rate(group_ptr, inside):
    address = tl.load(group_ptr + 7, mask=inside, other=0)
    on_device = tl.load(address.to(tl.pointer_type(tl.float32)), mask=inside & (address != 0), other=0.0)
    return tl.where(address != 0, on_device.to(tl.float64), _value(group_ptr, 0, inside))


@triton.jit
def multi_tensor_adamw_prepare(
    table_ptr, group_ptr, coefficient_ptr, tensors, partial_ptr, partials, norm_ptr, max_norm, grad_scale_ptr,
    found_inf_ptr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    scale, skip = _scale_and_skip(
        partial_ptr, partials, norm_ptr, max_norm, grad_scale_ptr, found_inf_ptr, BLOCK_P, CLIP
    )
    for begin in range(0, tensors, BLOCK_T):
        at = begin + tl.arange(0, BLOCK_T)
        inside = at < tensors
        group = group_ptr + tl.load(table_ptr + at * 8 + 7, mask=inside, other=0) * 8
        counter = tl.load(table_ptr + at * 8 + 5, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(counter, mask=inside, other=0.0) + 1.0  # stored by the update: this kernel changes no state
        t = step.to(tl.float64)
        lr = _learning_rate(group, inside)
        beta1 = _value(group, 1, inside)
        beta2 = _value(group, 2, inside)
        first = 1.0 - tl.exp(t * tl.log(beta1))  # log 0 = -inf gives 0
        second = 1.0 - tl.exp(t * tl.log(beta2))
        row = coefficient_ptr + at * 16
        sign = _value(group, 5, inside).to(tl.float32)
        tl.store(row + 0, scale * sign, mask=inside)
        tl.store(row + 1, tl.zeros([BLOCK_T], dtype=tl.float32) + skip, mask=inside)
        tl.store(row + 2, step, mask=inside)
        tl.store(row + 3, (1.0 - lr * _value(group, 4, inside)).to(tl.float32), mask=inside)
        tl.store(row + 4, (lr / first).to(tl.float32), mask=inside)
        tl.store(row + 5, (1.0 / tl.sqrt(second)).to(tl.float32), mask=inside)
        tl.store(row + 6, beta1.to(tl.float32), mask=inside)
        tl.store(row + 7, (1.0 - beta1).to(tl.float32), mask=inside)
        tl.store(row + 8, beta2.to(tl.float32), mask=inside)
        tl.store(row + 9, (1.0 - beta2).to(tl.float32), mask=inside)
        tl.store(row + 10, _value(group, 3, inside).to(tl.float32), mask=inside)


@triton.jit
def multi_tensor_sgd_prepare(
    table_ptr, group_ptr, coefficient_ptr, tensors, partial_ptr, partials, norm_ptr, max_norm, grad_scale_ptr,
    found_inf_ptr,
    BLOCK_T: tl.constexpr, BLOCK_P: tl.constexpr, CLIP: tl.constexpr,
):  # fmt: skip
    scale, skip = _scale_and_skip(
        partial_ptr, partials, norm_ptr, max_norm, grad_scale_ptr, found_inf_ptr, BLOCK_P, CLIP
    )
    for begin in range(0, tensors, BLOCK_T):
        at = begin + tl.arange(0, BLOCK_T)
        inside = at < tensors
        group = group_ptr + tl.load(table_ptr + at * 8 + 7, mask=inside, other=0) * 8
        new = tl.load(table_ptr + at * 8 + 5, mask=inside, other=0) != 0
        momentum = _value(group, 1, inside)
        take = tl.where(new, 1.0, 1.0 - _value(group, 2, inside))
        row = coefficient_ptr + at * 16
        sign = _value(group, 5, inside).to(tl.float32)
        tl.store(row + 0, scale * sign, mask=inside)
        tl.store(row + 1, tl.zeros([BLOCK_T], dtype=tl.float32) + skip, mask=inside)
        tl.store(row + 2, _learning_rate(group, inside).to(tl.float32), mask=inside)
        tl.store(row + 3, _value(group, 4, inside).to(tl.float32), mask=inside)
        tl.store(row + 4, momentum.to(tl.float32), mask=inside)
        tl.store(row + 5, take.to(tl.float32), mask=inside)
        tl.store(row + 6, _value(group, 3, inside).to(tl.float32), mask=inside)


@triton.jit
def _adamw_block(
    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, at, mask,
    scale, decay, step_size, root, beta1, take1, beta2, take2, eps, MASTER: tl.constexpr,
):  # fmt: skip
    g = tl.load(g_ptr + at, mask=mask).to(tl.float32) * scale
    m = tl.load(m_ptr + at, mask=mask).to(tl.float32)
    v = tl.load(v_ptr + at, mask=mask).to(tl.float32)
    p = tl.load(w_ptr + at, mask=mask) if MASTER else tl.load(p_ptr + at, mask=mask).to(tl.float32)
    m = beta1 * m + take1 * g
    v = beta2 * v + take2 * g * g
    p = p * decay - step_size * (m / (tl.sqrt(v) * root + eps))
    tl.store(m_ptr + at, m.to(m_ptr.dtype.element_ty), mask=mask)
    tl.store(v_ptr + at, v.to(v_ptr.dtype.element_ty), mask=mask)
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)
    if MASTER:
        tl.store(w_ptr + at, p, mask=mask)


@triton.jit
def multi_tensor_adamw(
    map_ptr, table_ptr, coefficient_ptr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, MASTER: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    where = tl.load(map_ptr + tl.program_id(0))
    row = table_ptr + (where >> 32) * 8
    coefficient = coefficient_ptr + (where >> 32) * 16
    start = (where & 0xFFFFFFFF) * CHUNK
    p_ptr = _typed(tl.load(row), PARAM, ALIGNED)
    g_ptr = _typed(tl.load(row + 1), GRAD, ALIGNED)
    m_ptr = _typed(tl.load(row + 2), STATE, ALIGNED)
    v_ptr = _typed(tl.load(row + 3), STATE, ALIGNED)
    w_ptr = _typed(tl.load(row + 4), "fp32", ALIGNED)
    numel = tl.load(row + 6)
    scale = tl.load(coefficient)
    decay = tl.load(coefficient + 3)
    step_size = tl.load(coefficient + 4)
    root = tl.load(coefficient + 5)
    beta1 = tl.load(coefficient + 6)
    take1 = tl.load(coefficient + 7)
    beta2 = tl.load(coefficient + 8)
    take2 = tl.load(coefficient + 9)
    eps = tl.load(coefficient + 10)
    if tl.load(coefficient + 1) == 0.0:
        if start == 0:
            tl.store(tl.load(row + 5).to(tl.pointer_type(tl.float32)), tl.load(coefficient + 2))
        if start + CHUNK <= numel:
            for offset in range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                _adamw_block(
                    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, at, None,
                    scale, decay, step_size, root, beta1, take1, beta2, take2, eps, MASTER,
                )  # fmt: skip
        else:
            for begin in range(start, numel, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                _adamw_block(
                    p_ptr, g_ptr, m_ptr, v_ptr, w_ptr, at, at < numel,
                    scale, decay, step_size, root, beta1, take1, beta2, take2, eps, MASTER,
                )  # fmt: skip


@triton.jit
def _sgd_block(
    p_ptr, g_ptr, b_ptr, w_ptr, at, mask, scale, lr, decay, momentum, take, nesterov,
    BUFFER: tl.constexpr, MASTER: tl.constexpr,
):  # fmt: skip
    g = tl.load(g_ptr + at, mask=mask).to(tl.float32) * scale
    p = tl.load(w_ptr + at, mask=mask) if MASTER else tl.load(p_ptr + at, mask=mask).to(tl.float32)
    g = tl.where(decay != 0.0, g + decay * p, g)  # an infinite parameter without decay has a finite gradient
    if BUFFER:
        b = momentum * tl.load(b_ptr + at, mask=mask).to(tl.float32) + take * g
        tl.store(b_ptr + at, b.to(b_ptr.dtype.element_ty), mask=mask)
        g = tl.where(nesterov != 0.0, g + momentum * b, b)
    p = p - lr * g
    tl.store(p_ptr + at, p.to(p_ptr.dtype.element_ty), mask=mask)
    if MASTER:
        tl.store(w_ptr + at, p, mask=mask)


@triton.jit
def multi_tensor_sgd(
    map_ptr, table_ptr, coefficient_ptr,
    PARAM: tl.constexpr, GRAD: tl.constexpr, STATE: tl.constexpr, BUFFER: tl.constexpr, MASTER: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    where = tl.load(map_ptr + tl.program_id(0))
    row = table_ptr + (where >> 32) * 8
    coefficient = coefficient_ptr + (where >> 32) * 16
    start = (where & 0xFFFFFFFF) * CHUNK
    p_ptr = _typed(tl.load(row), PARAM, ALIGNED)
    g_ptr = _typed(tl.load(row + 1), GRAD, ALIGNED)
    b_ptr = _typed(tl.load(row + 2), STATE, ALIGNED)
    w_ptr = _typed(tl.load(row + 4), "fp32", ALIGNED)
    numel = tl.load(row + 6)
    scale = tl.load(coefficient)
    lr = tl.load(coefficient + 2)
    decay = tl.load(coefficient + 3)
    momentum = tl.load(coefficient + 4)
    take = tl.load(coefficient + 5)
    nesterov = tl.load(coefficient + 6)
    if tl.load(coefficient + 1) == 0.0:
        if start + CHUNK <= numel:
            for offset in range(0, CHUNK, BLOCK):
                at = start + offset + tl.arange(0, BLOCK)
                _sgd_block(
                    p_ptr, g_ptr, b_ptr, w_ptr, at, None, scale, lr, decay, momentum, take, nesterov, BUFFER, MASTER
                )
        else:
            for begin in range(start, numel, BLOCK):
                at = begin + tl.arange(0, BLOCK)
                _sgd_block(
                    p_ptr, g_ptr, b_ptr, w_ptr, at, at < numel, scale, lr, decay, momentum, take, nesterov,
                    BUFFER, MASTER,
                )  # fmt: skip
