"""gelu, elementwise.

    none  y = x P(x)                 dx = dy (P(x) + x p(x)), P and p the standard normal's distribution and density
    tanh  y = x s, s = sigmoid(2u)   dx = dy (s + 2 x s (1 - s) u'), u = sqrt(2/pi) (x + 0.044715 x^3)

P is 0.5 (1 + erf(x / sqrt(2))). For float16 and bfloat16 it comes from the tail Q(|x|) = 0.5 erfc(|x| / sqrt(2)), a
polynomial in 1 / (1 + 0.3275911 |x| / sqrt(2)) times exp(-x^2 / 2), good to 1e-7: the library's erf took longer than
the memory (0.0525 ms for 8192 x 4096, torch 0.0469, H200). The backward pass has that exponential anyway.
The tanh form is the usual 0.5 x (1 + tanh u), since 0.5 (1 + tanh u) = sigmoid(2u): one exponential and one division.
Constants are folded where instructions bound the time: 23 an element backward took 0.0986 ms, 30 took 0.0992 (H200).

Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2. Polynomial: Abramowitz and Stegun 1964, 7.1.26.
Layout: any dense memory, taken as n elements in storage order; computed in float32.
Grid:   one program for each BLOCK elements; a thread holds BLOCK / (32 num_warps) of them.
Bound:  memory: 2 accesses an element forward, 3 backward; about 15 operations forward and 25 backward (tanh).
EVICTION: see ops/_launch.py.
"""

import triton
import triton.language as tl

SQRT_HALF = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)
# -2 u = x (EXPONENT_1 + EXPONENT_3 x^2) ln 2, so that its exponential is one of base 2; 2 u' = SLOPE_1 + SLOPE_3 x^2.
SLOPE_1 = tl.constexpr(1.5957691216057308)
SLOPE_3 = tl.constexpr(1.5957691216057308 * 0.134145)
EXPONENT_1 = tl.constexpr(-1.5957691216057308 * 1.4426950408889634)
EXPONENT_3 = tl.constexpr(-1.5957691216057308 * 1.4426950408889634 * 0.044715)
TAIL_SCALE = tl.constexpr(0.3275911 * 0.7071067811865476)
T1 = tl.constexpr(0.5 * 0.254829592)
T2 = tl.constexpr(0.5 * -0.284496736)
T3 = tl.constexpr(0.5 * 1.421413741)
T4 = tl.constexpr(0.5 * -1.453152027)
T5 = tl.constexpr(0.5 * 1.061405429)
LARGEST_SQUARE = tl.constexpr(1e4)  # s (1 - s) is 0 long before |x| = 100; an infinite x^2 would make a NaN of it


@triton.jit
def _distribution(x, bell, FAST: tl.constexpr):
    """P(x), given bell = exp(-x^2 / 2)."""
    if FAST:
        t = 1.0 / (1.0 + tl.abs(x) * TAIL_SCALE)
        tail = t * (T1 + t * (T2 + t * (T3 + t * (T4 + t * T5)))) * bell
        return tl.where(x < 0, tail, 1.0 - tail)
    else:
        return 0.5 * (1.0 + tl.erf(x * SQRT_HALF))


@triton.jit
def _gelu(x, TANH: tl.constexpr, FAST: tl.constexpr):
    square = x * x
    if TANH:
        return x / (1.0 + tl.exp2(x * (square * EXPONENT_3 + EXPONENT_1)))
    else:
        return x * _distribution(x, tl.exp(-0.5 * square), FAST)


@triton.jit
def _gelu_slope(x, TANH: tl.constexpr, FAST: tl.constexpr):
    square = tl.minimum(x * x, LARGEST_SQUARE)
    if TANH:
        s = 1.0 / (1.0 + tl.exp2(x * (square * EXPONENT_3 + EXPONENT_1)))
        return s + x * (s - s * s) * (square * SLOPE_3 + SLOPE_1)  # in this order a large x meets the 0 first
    else:
        bell = tl.exp(-0.5 * square)
        return _distribution(x, bell, FAST) + x * bell * INVERSE_SQRT_2_PI


@triton.jit
def gelu_fwd(x_ptr, y_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    FAST: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    x_ptr += start
    y_ptr += start
    if start + BLOCK <= n:  # without a mask, so that accesses are 16 bytes wide whatever n is
        x = tl.load(x_ptr + at, eviction_policy=EVICTION).to(tl.float32)
        tl.store(y_ptr + at, _gelu(x, TANH, FAST).to(y_ptr.dtype.element_ty))
    else:
        inside = at < n - start
        x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        tl.store(y_ptr + at, _gelu(x, TANH, FAST).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gelu_bwd(dy_ptr, x_ptr, dx_ptr, n, TANH: tl.constexpr, BLOCK: tl.constexpr, EVICTION: tl.constexpr):
    FAST: tl.constexpr = x_ptr.dtype.element_ty != tl.float32
    start = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    dy_ptr += start
    x_ptr += start
    dx_ptr += start
    if start + BLOCK <= n:
        x = tl.load(x_ptr + at, eviction_policy=EVICTION).to(tl.float32)
        dy = tl.load(dy_ptr + at, eviction_policy=EVICTION).to(tl.float32)
        tl.store(dx_ptr + at, (dy * _gelu_slope(x, TANH, FAST)).to(dx_ptr.dtype.element_ty))
    else:
        inside = at < n - start
        x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0, eviction_policy=EVICTION).to(tl.float32)
        tl.store(dx_ptr + at, (dy * _gelu_slope(x, TANH, FAST)).to(dx_ptr.dtype.element_ty), mask=inside)
