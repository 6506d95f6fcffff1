"""swiglu: the gated unit of a feed-forward layer.

    y = g s u, s = sigmoid(g)        dg = dy u (s + g s (1 - s))        du = dy g s

Source: Shazeer 2020, arXiv:2002.05202, equation 5.
Layout: rows of N contiguous elements; gate and up have row strides, so that they may be halves of one matrix, and so
        have their gradients; y and dy are dense. Dense tensors are treated as one row.
Grid:   one program per BLOCK columns of a row.
Bound:  memory: 3 accesses per element forward, 5 backward, where sigmoid is recomputed; about 5 and 12 operations.
"""

import triton
import triton.language as tl


@triton.jit
def _forward(g, u):
    return g / (1.0 + tl.exp(-g)) * u


@triton.jit
def _backward(dy, g, u):
    s = 1.0 / (1.0 + tl.exp(-g))
    return dy * u * (s * (1.0 + g * (1.0 - s))), dy * (g * s)


@triton.jit
def swiglu_fwd(gate_ptr, up_ptr, y_ptr, N, gate_stride, up_stride, BLOCK: tl.constexpr):
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    gate_ptr += row * gate_stride + start
    up_ptr += row * up_stride + start
    y_ptr += row * N + start
    if start + BLOCK <= N:  # without a mask, so that accesses are 16 bytes wide whatever N is
        g = tl.load(gate_ptr + at).to(tl.float32)
        u = tl.load(up_ptr + at).to(tl.float32)
        tl.store(y_ptr + at, _forward(g, u).to(y_ptr.dtype.element_ty))
    else:
        inside = at < N - start
        g = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, _forward(g, u).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_bwd(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, N, gate_stride, up_stride, gradient_stride, BLOCK: tl.constexpr
):
    blocks = tl.cdiv(N, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    start = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    dy_ptr += row * N + start
    gate_ptr += row * gate_stride + start
    up_ptr += row * up_stride + start
    dgate_ptr += row * gradient_stride + start
    dup_ptr += row * gradient_stride + start
    if start + BLOCK <= N:
        g = tl.load(gate_ptr + at).to(tl.float32)
        u = tl.load(up_ptr + at).to(tl.float32)
        dy = tl.load(dy_ptr + at).to(tl.float32)
        dg, du = _backward(dy, g, u)
        tl.store(dgate_ptr + at, dg.to(dgate_ptr.dtype.element_ty))
        tl.store(dup_ptr + at, du.to(dup_ptr.dtype.element_ty))
    else:
        inside = at < N - start
        g = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        dg, du = _backward(dy, g, u)
        tl.store(dgate_ptr + at, dg.to(dgate_ptr.dtype.element_ty), mask=inside)
        tl.store(dup_ptr + at, du.to(dup_ptr.dtype.element_ty), mask=inside)
