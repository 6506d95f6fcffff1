"""Rotary position embedding of heads of D = 2 HALF features.

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)      pairs (x_i, x_{i + HALF}), or (x_2i, x_{2i + 1}) if INTERLEAVED

Source: Su et al. 2021, arXiv:2104.09864, equation 34. The gradient of x is dy rotated with -sin, INVERSE.
Layout: x and y (B, H, S, D) with any strides but a contiguous last dimension; cos and sin dense (S, HALF), or
        (B, S, HALF) with a batch stride that is not 0. Computed in float32.
Grid:   (B S tokens in groups of TOKENS, heads in groups of HEADS); a program keeps TOKENS HEADS heads in registers,
        8 pairs per thread, and the program of one token reads its row of the tables once for all its heads.
Bound:  memory: 2 accesses and 3 operations per element. All heads but the first read the tables from L2.
"""

import triton
import triton.language as tl


@triton.jit
def rope_fwd(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    tokens, S, H, HALF, x_b, x_h, x_s, y_b, y_h, y_s, table_b,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    pairs = tl.arange(0, BLOCK)[None, :]
    in_half = (pairs < HALF) | EXACT
    if TOKENS == 1:
        token = tl.program_id(0).to(tl.int64)
        heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
        inside = heads < H
        b, s = token // S, token % S
        at_table = b * table_b + s * HALF + pairs
        table_mask = in_half
    else:
        row = tl.arange(0, TOKENS * HEADS)[:, None]
        token = tl.program_id(0).to(tl.int64) * TOKENS + row // HEADS
        heads = tl.program_id(1) * HEADS + row % HEADS
        inside = (token < tokens) & (heads < H)
        b, s = token // S, token % S
        at_table = b * table_b + s * HALF + pairs
        table_mask = inside & in_half
    x_ptr += b * x_b + heads * x_h + s * x_s
    y_ptr += b * y_b + heads * y_h + s * y_s
    cos = tl.load(cos_ptr + at_table, mask=table_mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + at_table, mask=table_mask, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if INTERLEAVED:
        whole = tl.arange(0, 2 * BLOCK)[None, :]
        mask = inside & ((whole < 2 * HALF) | EXACT)
        x = tl.load(x_ptr + whole, mask=mask, other=0.0).to(tl.float32)
        x1, x2 = tl.split(tl.reshape(x, [TOKENS * HEADS, BLOCK, 2]))
        y = tl.join(x1 * cos - x2 * sin, x2 * cos + x1 * sin)
        y = tl.reshape(y, [TOKENS * HEADS, 2 * BLOCK])
        tl.store(y_ptr + whole, y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        mask = inside & in_half
        x1 = tl.load(x_ptr + pairs, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x_ptr + HALF + pairs, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + pairs, (x1 * cos - x2 * sin).to(y_ptr.dtype.element_ty), mask=mask)
        tl.store(y_ptr + HALF + pairs, (x2 * cos + x1 * sin).to(y_ptr.dtype.element_ty), mask=mask)
