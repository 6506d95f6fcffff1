"""leaky_relu, elementwise.

    y = x for x > 0, SLOPE x elsewhere        dx = dy for x > 0, SLOPE dy elsewhere

Source: Maas, Hannun and Ng 2013, "Rectifier nonlinearities improve neural network acoustic models", section 2.
Layout: any dense memory, taken as n elements in storage order; computed in float32.
Grid:   one program for each BLOCK elements.
Bound:  memory: 2 accesses an element forward, 3 backward.
"""

import triton
import triton.language as tl


@triton.jit
def leaky_relu_fwd(x_ptr, y_ptr, n, SLOPE: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    tl.store(y_ptr + at, tl.where(x > 0, x, SLOPE * x).to(y_ptr.dtype.element_ty), mask=at < n)


@triton.jit
def leaky_relu_bwd(dy_ptr, x_ptr, dx_ptr, n, SLOPE: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    dy = tl.load(dy_ptr + at, mask=at < n, other=0.0, eviction_policy=EVICTION).to(tl.float32)
    tl.store(dx_ptr + at, tl.where(x > 0, dy, SLOPE * dy).to(dx_ptr.dtype.element_ty), mask=at < n)
