"""dropout: Philox 4x32-10 from a seed and the element's index; no mask is stored.

    y = x / (1 - p) if the index's word, without its lowest bit, is at least p 2^31, else 0 x; dx from dy likewise

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 5.2.2 (Philox);
        Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting", section 10.
Layout: n contiguous elements, in groups of 4 GROUP: element i of run j of group t uses word j of the counter
        (GROUP t + i, 0, 0), 64 bits and two words. A thread's four words serve four loads of its own, and the mask
        depends on neither warps nor alignment. The seed is read from memory, so that launches can be prepared and a
        captured graph can draw another seed at each replay.
Grid:   one program per group.
Bound:  memory: 2 accesses per element, forward and backward; about 15 integer operations.
"""

import triton
import triton.language as tl

MULTIPLIER_0 = tl.constexpr(0xD2511F53)
MULTIPLIER_1 = tl.constexpr(0xCD9E8D57)
WEYL_0 = tl.constexpr(0x9E3779B9)
WEYL_1 = tl.constexpr(0xBB67AE85)


@triton.jit
def _philox(c0, c1, k0, k1):
    c2 = tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    for _ in tl.static_range(10):
        upper_0 = tl.umulhi(c0, MULTIPLIER_0)
        upper_1 = tl.umulhi(c2, MULTIPLIER_1)
        lower_0 = c0 * MULTIPLIER_0
        lower_1 = c2 * MULTIPLIER_1
        c0 = upper_1 ^ c1 ^ k0
        c2 = upper_0 ^ c3 ^ k1
        c1 = lower_1
        c3 = lower_0
        k0 = k0 + WEYL_0
        k1 = k1 + WEYL_1
    return c0, c1, c2, c3


@triton.jit
def _run(x_ptr, y_ptr, at, left, word, threshold, scale, WHOLE: tl.constexpr):
    factor = tl.where((word >> 1).to(tl.int32) >= threshold, scale, 0.0)
    if WHOLE:
        x = tl.load(x_ptr + at).to(tl.float32)
        tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty))
    else:
        x = tl.load(x_ptr + at, mask=at < left, other=0.0).to(tl.float32)
        tl.store(y_ptr + at, (x * factor).to(y_ptr.dtype.element_ty), mask=at < left)


@triton.jit
def dropout_fwd(x_ptr, seed_ptr, y_ptr, n, threshold, scale, GROUP: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, GROUP)
    seed = tl.load(seed_ptr)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    first = group * GROUP
    c0 = (first & 0xFFFFFFFF).to(tl.uint32) + at.to(tl.uint32)  # a group does not cross a multiple of 2^32
    c1 = tl.zeros_like(c0) + (first >> 32).to(tl.uint32)
    w0, w1, w2, w3 = _philox(c0, c1, k0, k1)
    start = 4 * first
    x_ptr += start
    y_ptr += start
    left = n - start
    if left >= 4 * GROUP:  # without a mask, so that accesses are 16 bytes wide whatever n is
        _run(x_ptr, y_ptr, at, left, w0, threshold, scale, True)
        _run(x_ptr, y_ptr, GROUP + at, left, w1, threshold, scale, True)
        _run(x_ptr, y_ptr, 2 * GROUP + at, left, w2, threshold, scale, True)
        _run(x_ptr, y_ptr, 3 * GROUP + at, left, w3, threshold, scale, True)
    else:
        _run(x_ptr, y_ptr, at, left, w0, threshold, scale, False)
        _run(x_ptr, y_ptr, GROUP + at, left, w1, threshold, scale, False)
        _run(x_ptr, y_ptr, 2 * GROUP + at, left, w2, threshold, scale, False)
        _run(x_ptr, y_ptr, 3 * GROUP + at, left, w3, threshold, scale, False)
