"""Functions that the kernels of fused functions call; the kernels themselves are written by code.py.

expm1 and log1p correct the rounding of exp and log near 0. exp keeps the rounding error of x log2(e), which tl.exp
loses: 60 units in the last place at 88. Powers are computed in float64.

Source: Kahan's correction of log1p and expm1, in Higham 2002, Accuracy and Stability of Numerical Algorithms, 1.14.1.
erfc: Press, Teukolsky, Vetterling and Flannery 2007, Numerical Recipes, third edition, section 6.2.2, 1.2e-7 relative.
"""

import triton
import triton.language as tl

from accelerant.ops.elementwise.triton_kernels import _tanh

INFINITY = tl.constexpr(float("inf"))
LOG2_E = tl.constexpr(1.4426950216293335)  # in float32, and the rest
LOG2_E_REST = tl.constexpr(1.9259629911266175e-08)
LN_2 = tl.constexpr(0.6931471805599453)
LOG10_2 = tl.constexpr(0.30102999566398120)


@triton.jit
def exp(x):
    up = tl.where(x > 0.0, 1.0, 0.0)  # a factor of 2, as 2^128 is infinite
    t = x * LOG2_E
    rest = (tl.fma(x, LOG2_E, -t) + x * LOG2_E_REST) * LN_2
    y = tl.exp2(t - up)
    return tl.where(tl.abs(t) < 256.0, y + y * rest, y) * (1.0 + up)


@triton.jit
def log10(x):
    return (tl.log2(x.to(tl.float64)) * LOG10_2).to(tl.float32)


@triton.jit
def power(x, y):
    """x^y of arrays or numbers, with the cases of C's pow."""
    zero = tl.zeros_like(x + y).to(tl.float64)
    a, n = zero + x, zero + y
    whole = tl.floor(n) == n
    negative = (a < 0.0) | ((a == 0.0) & (1.0 / a < 0.0))
    size = tl.where(tl.abs(a) == 1.0, 1.0, tl.exp2(n * tl.log2(tl.abs(a))))
    size = tl.where((n == 0.0) | (a == 1.0), 1.0, size)
    size = tl.where((a < 0.0) & (a > -INFINITY) & (whole == 0), float("nan"), size)
    return tl.where(negative & whole & (tl.floor(n * 0.5) != n * 0.5), -size, size).to(tl.float32)


@triton.jit
def erfc(x):
    z = tl.abs(x).to(tl.float64)
    t = 1.0 / (1.0 + 0.5 * z)
    p = t * 0.17087277 - 0.82215223
    p = t * p + 1.48851587
    p = t * p - 1.13520398
    p = t * p + 0.27886807
    p = t * p - 0.18628806
    p = t * p + 0.09678418
    p = t * p + 0.37409196
    p = t * p + 1.00002368
    y = t * tl.exp(t * p - z * z - 1.26551223)
    return tl.where(x < 0.0, 2.0 - y, y).to(tl.float32)


@triton.jit
def tanh(x):
    return tl.where(x == 0.0, x, _tanh(x))  # -0.0 stays


@triton.jit
def log1p(x):
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.where(u == INFINITY, u, tl.log(u) * (x / (u - 1.0))))


@triton.jit
def expm1(x):
    u = exp(x)
    return tl.where(u == 1.0, x, tl.where((u == INFINITY) | (u < 1e-8), u - 1.0, (u - 1.0) * (x / tl.log(u))))


@triton.jit
def round(x):
    """X to a whole number, half to even, with the sign of x."""
    down = tl.floor(tl.abs(x))
    rest = tl.abs(x) - down
    odd = tl.floor(down * 0.5) * 2.0 != down
    size = tl.where((rest > 0.5) | ((rest == 0.5) & odd), down + 1.0, down)
    size = tl.where(rest == 0.0, tl.abs(x), size)
    return tl.where(x != x, x, tl.where((x < 0.0) | (1.0 / x < 0.0), -size, size))


@triton.jit
def softplus(x):
    return tl.where(x > 0.0, x, 0.0) + log1p(exp(-tl.abs(x)))


@triton.jit
def compensated(total, rest, x):
    """Add x to a total; `rest` is the rounding error of the last addition, 0 where a sum is not finite."""
    term = x - rest
    result = total + term
    rest = (result - total) - term
    return result, tl.where(rest == rest, rest, 0.0)


@triton.jit
def larger(x, y):
    return tl.where((x > y) | (x != x), x, y)


@triton.jit
def largest(x):
    """The maximum of each row, NaN if there is one: tl.max may lose it."""
    has_nan = tl.max(tl.where(x != x, 1, 0), 1, keep_dims=True)
    return tl.where(has_nan > 0, float("nan"), tl.max(x, 1, keep_dims=True))
