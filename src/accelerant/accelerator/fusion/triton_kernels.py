"""Functions that the kernels of fused functions call; the kernels themselves are written by code.py.

tanh is as in ops/elementwise. expm1 and log1p correct the rounding of exp and log near 0.

Source: Kahan's correction of log1p and expm1, in Higham 2002, Accuracy and Stability of Numerical Algorithms, 1.14.1.
"""

import triton
import triton.language as tl

TANH_1 = tl.constexpr(-0.3333329751012878)
TANH_2 = tl.constexpr(0.13331915298814714)
TANH_3 = tl.constexpr(-0.053783293000263965)
TANH_4 = tl.constexpr(0.020794617709806007)
TANH_5 = tl.constexpr(-0.005893945302802656)
TANH_SMALL_SQUARE = tl.constexpr(0.36)
TWO_LOG2_E = tl.constexpr(2.8853900817779268)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def tanh(x):
    large = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * TWO_LOG2_E) + 1.0)
    z = x * x
    p = (((TANH_5 * z + TANH_4) * z + TANH_3) * z + TANH_2) * z + TANH_1
    return tl.where(z < TANH_SMALL_SQUARE, x + x * (z * p), tl.where(x < 0.0, -large, large))


@triton.jit
def log1p(x):
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(u == INFINITY, u, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def expm1(x):
    u = tl.exp(x)
    return tl.where(u == 1.0, x, tl.where((u == INFINITY) | (u < 1e-8), u - 1.0, (u - 1.0) * (x / tl.log(u))))


@triton.jit
def softplus(x):
    return tl.where(x > 0.0, x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def larger(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def largest(x):
    """The maximum of each row, NaN if there is one: tl.max may lose it."""
    has_nan = tl.max(tl.where(x != x, 1, 0), 1, keep_dims=True)
    return tl.where(has_nan > 0, float("nan"), tl.max(x, 1, keep_dims=True))
