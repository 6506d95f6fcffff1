"""linear_int8: products with a weight of 8-bit integers, and optionally with x rounded to 8-bit integers.

    y = (x W^T) scale + b    dynamic: y = (q W^T) x_scale scale + b, the sums exact, in int32    dx = (dy scale) W

Source: 8-bit weights with a scale for each output as in Dettmers et al. 2022, arXiv:2208.07339, section 2; sums in
        int32 with the scales applied after them as in Jacob et al. 2018, arXiv:1712.05877, section 2.2.
        planes: x = unit (65536 high + 256 middle + low), integers of 8 bits, so that the sums are exact, in any order.
Layout: x (M, K), q (M, K) int8, weight (N, K) int8, dy and y (M, N), contiguous; scale and bias (N,), x_scale (M,).
        planes (M, 3, K) int8, units (M,) float32. If gated, the weight has 2 N rows, gates first.
        Integers are exact in every dtype that they are converted to before a product. Sums in float32. Where Triton has
        no integer tensor cores (Turing), dynamic multiplies in float16, each step exactly. bwd of float32 splits dy
        scale into three numbers of bfloat16, 24 bits in all, whose products with the integers are exact.
Grid:   dequantize: one program per row. row: one program per ROWS * BLOCK_N outputs of a row of x, over all of K; 16
        weights per thread and load, with ROWS * UNROLL loads in flight before the first is used. fwd, dynamic: one
        program per tile of y; fwd has the weight as the product's first operand, which tensor cores read from
        registers, where it was converted. bwd: one program per tile of dx and, for few rows, per part of the sum, in
        float32; linear_int8_sum adds the parts in order.
Bound:  row, and fwd of few rows: memory, K N bytes of weight. Else tensor cores, 2 M N K flops.
"""

import triton
import triton.language as tl

from accelerant.ops.linear_gelu.triton_kernels import _blocks, _step, _tile


@triton.jit
def _widened(w):
    """Convert integers to float32 by their bits: conversion instructions, at an eighth of the rate, would bound it."""
    return (w.to(tl.int32) + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0  # 1.5 * 2^23


@triton.jit
def linear_int8_dequantize(weight_ptr, scale_ptr, y_ptr, K, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row).to(tl.float32)
    for k in range(0, K, BLOCK):
        lanes = k + tl.arange(0, BLOCK)
        w = _widened(tl.load(weight_ptr + row * K + lanes, mask=lanes < K, other=0))
        tl.store(y_ptr + row * K + lanes, (w * scale).to(y_ptr.dtype.element_ty), mask=lanes < K)


@triton.jit
def _finish_strip(acc, scale_ptr, bias_ptr, y_ptr, first, N, BLOCK_N: tl.constexpr):
    outputs = first + tl.arange(0, BLOCK_N)
    here = outputs < N
    y = tl.sum(acc, 1)
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + outputs, mask=here, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + outputs, mask=here, other=0.0).to(tl.float32)
    tl.store(y_ptr + outputs, y.to(y_ptr.dtype.element_ty), mask=here)


@triton.jit
def linear_int8_row(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, N, K,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, UNROLL: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    STEP: tl.constexpr = BLOCK_K * UNROLL
    row = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * (ROWS * BLOCK_N)
    outputs = tl.arange(0, BLOCK_N)
    lanes = tl.broadcast_to(tl.arange(0, BLOCK_K)[None, :], (BLOCK_N, BLOCK_K))
    x_at = x_ptr + row * K + lanes  # as wide as the weights, so that each thread holds the elements of x that it needs
    weight_at = ()
    for r in tl.static_range(ROWS):
        n = first + r * BLOCK_N + outputs
        n = tl.where(n < N, n, 0)  # rows past the end read the first
        weight_at = weight_at + (weight_ptr + n.to(tl.int64)[:, None] * K + lanes,)  # noqa: RUF005 - no starred tuples
    acc0 = tl.zeros([BLOCK_N, BLOCK_K], dtype=tl.float32)
    acc1, acc2, acc3 = acc0, acc0, acc0
    full = K // STEP * STEP
    for k in tl.range(0, full, STEP, num_stages=STAGES):
        parts, xs = (), ()
        for i in tl.static_range(UNROLL):
            xs = xs + (tl.load(x_at + k + i * BLOCK_K),)  # noqa: RUF005
            for r in tl.static_range(ROWS):
                parts = parts + (tl.load(weight_at[r] + k + i * BLOCK_K),)  # noqa: RUF005
        for i in tl.static_range(UNROLL):
            x = xs[i].to(tl.float32)
            acc0 += _widened(parts[i * ROWS]) * x
            if ROWS > 1:
                acc1 += _widened(parts[i * ROWS + 1]) * x
            if ROWS > 2:
                acc2 += _widened(parts[i * ROWS + 2]) * x
                acc3 += _widened(parts[i * ROWS + 3]) * x
    for k in range(full, K, BLOCK_K):
        inside = lanes < K - k
        x = tl.load(x_at + k, mask=inside, other=0.0).to(tl.float32)
        acc0 += _widened(tl.load(weight_at[0] + k, mask=inside, other=0)) * x
        if ROWS > 1:
            acc1 += _widened(tl.load(weight_at[1] + k, mask=inside, other=0)) * x
        if ROWS > 2:
            acc2 += _widened(tl.load(weight_at[2] + k, mask=inside, other=0)) * x
            acc3 += _widened(tl.load(weight_at[3] + k, mask=inside, other=0)) * x
    sums = (acc0, acc1, acc2, acc3)
    for r in tl.static_range(ROWS):
        _finish_strip(sums[r], scale_ptr, bias_ptr, y_ptr + row * N, first + r * BLOCK_N, N, BLOCK_N)


@triton.jit
def _exact(w, x, BITS: tl.constexpr):
    """Return integers in the dtype of x. BITS: by their bits, in two or four instructions for two of them.

    128 + the lower seven bits is a bfloat16 whose last bits these are; 128, or 256 if the highest bit is set, is
    subtracted. A float16 has room for all eight bits beside 1024.
    """
    if BITS and x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 n, low, high, one;
            mov.b32 one, 0x3F803F80;
            prmt.b32 n, $2, 0x43434343, 0x4140;
            and.b32 low, n, 0xFF7FFF7F;
            lop3.b32 high, n, 0xFF80FF80, 0x80008000, 0xEA;
            fma.rn.bf16x2 $0, low, one, high;
            prmt.b32 n, $2, 0x43434343, 0x4342;
            and.b32 low, n, 0xFF7FFF7F;
            lop3.b32 high, n, 0xFF80FF80, 0x80008000, 0xEA;
            fma.rn.bf16x2 $1, low, one, high;
            }""",
            "=r,=r,r",
            [w],
            dtype=tl.bfloat16,
            is_pure=True,
            pack=4,
        )
    elif BITS and x.dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 n, low, high, bias;
            mov.b32 bias, 0x64806480;
            xor.b32 n, $2, 0x80808080;
            prmt.b32 low, n, 0x64646464, 0x4140;
            prmt.b32 high, n, 0x64646464, 0x4342;
            sub.rn.f16x2 $0, low, bias;
            sub.rn.f16x2 $1, high, bias;
            }""",
            "=r,=r,r",
            [w],
            dtype=tl.float16,
            is_pure=True,
            pack=4,
        )
    else:
        return w.to(x.dtype)


@triton.jit
def _finished(y, scale_ptr, bias_ptr, column, first, N):
    """Scale and bias a tile of sums (rows, outputs), of N outputs from the first on."""
    lanes = column + tl.arange(0, y.shape[1])
    if scale_ptr is not None:
        y *= tl.load(scale_ptr + first + lanes, mask=lanes < N, other=0.0).to(tl.float32)[None, :]
    if bias_ptr is not None:
        y += tl.load(bias_ptr + first + lanes, mask=lanes < N, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _store(y, residual_ptr, y_ptr, row, column, M, N):
    """Store a tile (rows, outputs), with the residual stream added."""
    rows, lanes = tl.arange(0, y.shape[0]), tl.arange(0, y.shape[1])
    inside = (row + rows < M)[:, None] & (column + lanes < N)[None, :]
    at = row.to(tl.int64) * N + column + rows[:, None] * N + lanes[None, :]
    if residual_ptr is not None:
        y += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _columns(at, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the columns from k on of rows; zeros past the end."""
    if EVEN_K:
        return tl.load(at + k)
    else:
        return tl.load(at + k, mask=(tl.arange(0, BLOCK_K) < K - k)[None, :], other=0)


@triton.jit
def _columns_of(at, there, k, K, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Load the columns from k on of the rows that are there; zeros for others, of which nothing is read."""
    if EVEN_K:
        return tl.load(at + k, mask=there[:, None], other=0)
    else:
        return tl.load(at + k, mask=there[:, None] & (tl.arange(0, BLOCK_K) < K - k)[None, :], other=0)


@triton.jit
def linear_int8_fwd(
    x_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K,
    EVEN_K: tl.constexpr, UPCAST: tl.constexpr, BITS: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    x_at = _blocks(x_ptr, row, M, K, BLOCK_M, BLOCK_K)
    weight_at = _blocks(weight_ptr, column, N, K, BLOCK_N, BLOCK_K)
    up_at = weight_at + tl.cast(N, tl.int64) * K
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    up = acc
    there = row + tl.arange(0, BLOCK_M) < M
    for k in range(0, K, BLOCK_K):
        x = _columns_of(x_at, there, k, K, BLOCK_K, EVEN_K)
        if UPCAST:  # the interpreter's bfloat16 products are wrong
            x = x.to(tl.float32)
        w = _exact(_columns(weight_at, k, K, BLOCK_K, EVEN_K), x, BITS)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
        if GATED:
            w = _exact(_columns(up_at, k, K, BLOCK_K, EVEN_K), x, BITS)
            up = tl.dot(w, tl.trans(x), up, input_precision="ieee")
    y = _finished(tl.trans(acc), scale_ptr, bias_ptr, column, 0, N)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * _finished(tl.trans(up), scale_ptr, bias_ptr, column, N, N)
    _store(y, residual_ptr, y_ptr, row, column, M, N)


@triton.jit
def linear_int8_dynamic(
    q_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, y_ptr, M, N, K,
    EVEN_K: tl.constexpr, INTEGERS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    q_at = _blocks(q_ptr, row, M, K, BLOCK_M, BLOCK_K)
    weight_at = _blocks(weight_ptr, column, N, K, BLOCK_N, BLOCK_K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.int32)
    for k in range(0, K, BLOCK_K):
        q, w = _step(q_at, weight_at, k, K, BLOCK_K, EVEN_K)
        if INTEGERS:
            acc = tl.dot(q, tl.trans(w), acc, out_dtype=tl.int32)
        else:  # exact as well: each product and the sum of BLOCK_K of them are below 2^24
            acc += tl.dot(q.to(tl.float16), tl.trans(w).to(tl.float16)).to(tl.int32)
    rows = row + tl.arange(0, BLOCK_M)
    x_scale = tl.load(x_scale_ptr + rows, mask=rows < M, other=0.0)[:, None]
    _store(
        _finished(acc.to(tl.float32) * x_scale, scale_ptr, bias_ptr, column, 0, N), None, y_ptr, row, column, M, N
    )  # fmt: skip


@triton.jit
def _sums(w, high, middle, low, sums):
    """Return the three sums of products of a weight and planes with one step's added."""
    return (
        tl.dot(w, tl.trans(high), sums[0], out_dtype=tl.int32),
        tl.dot(w, tl.trans(middle), sums[1], out_dtype=tl.int32),
        tl.dot(w, tl.trans(low), sums[2], out_dtype=tl.int32),
    )


@triton.jit
def _joined(sums):
    """Return 65536 high + 256 middle + low in float32; the products are exact."""
    return sums[0].to(tl.float32) * 65536.0 + (sums[1].to(tl.float32) * 256.0 + sums[2].to(tl.float32))


@triton.jit
def _whole(sums, units):
    """Return the sums (rows, outputs) in float32, times the rows' units."""
    return tl.trans(_joined(sums)) * units[:, None]


@triton.jit
def linear_int8_planes(
    planes_ptr, units_ptr, weight_ptr, scale_ptr, bias_ptr, residual_ptr, y_ptr, M, N, K,
    EVEN_K: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, N, BLOCK_M, BLOCK_N, GROUP)
    rows = row + tl.arange(0, BLOCK_M)
    there = rows < M
    x_at = planes_ptr + tl.where(there, rows, 0).to(tl.int64)[:, None] * (3 * K) + tl.arange(0, BLOCK_K)[None, :]
    weight_at = _blocks(weight_ptr, column, N, K, BLOCK_N, BLOCK_K)
    up_at = weight_at + tl.cast(N, tl.int64) * K
    zeros = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.int32)
    sums, ups = (zeros, zeros, zeros), (zeros, zeros, zeros)
    for k in range(0, K, BLOCK_K):
        w = _columns(weight_at, k, K, BLOCK_K, EVEN_K)
        high = _columns_of(x_at, there, k, K, BLOCK_K, EVEN_K)
        middle = _columns_of(x_at + K, there, k, K, BLOCK_K, EVEN_K)
        low = _columns_of(x_at + 2 * K, there, k, K, BLOCK_K, EVEN_K)
        sums = _sums(w, high, middle, low, sums)
        if GATED:
            ups = _sums(_columns(up_at, k, K, BLOCK_K, EVEN_K), high, middle, low, ups)
    units = tl.load(units_ptr + rows, mask=there, other=0.0)
    y = _finished(_whole(sums, units), scale_ptr, bias_ptr, column, 0, N)
    if GATED:
        y = y / (1.0 + tl.exp(-y)) * _finished(_whole(ups, units), scale_ptr, bias_ptr, column, N, N)
    _store(y, residual_ptr, y_ptr, row, column, M, N)


@triton.jit
def _product(x, w, acc, UPCAST: tl.constexpr):
    kind = tl.float32 if UPCAST else x.dtype
    return tl.dot(x.to(kind), w.to(kind), acc, input_precision="ieee")


@triton.jit
def linear_int8_bwd(
    dy_ptr, weight_ptr, scale_ptr, dx_ptr, M, N, K, part,
    UPCAST: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    row, column = _tile(tl.program_id(0), M, K, BLOCK_M, BLOCK_K, GROUP)
    begin = tl.program_id(1) * part
    end = tl.minimum(begin + part, N)
    dy_at = _blocks(dy_ptr, row, M, N, BLOCK_M, BLOCK_N)
    outputs = tl.arange(0, BLOCK_N)
    columns = column + tl.arange(0, BLOCK_K)
    in_row = (columns < K)[None, :]
    weight_at = weight_ptr + (begin.to(tl.int64) + outputs)[:, None] * K + columns[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_K], dtype=tl.float32)
    for n in range(begin, end, BLOCK_N):
        inside = outputs < end - n
        dy = tl.load(dy_at + n, mask=inside[None, :], other=0.0)
        scale = tl.load(scale_ptr + n + outputs, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight_at, mask=inside[:, None] & in_row, other=0)
        wide = dy.to(tl.float32) * scale[None, :]
        if SPLIT:
            high = wide.to(tl.bfloat16)
            rest = wide - high.to(tl.float32)
            rest = tl.where(rest == rest, rest, 0.0)  # NaN of what is not finite
            middle = rest.to(tl.bfloat16)
            acc = _product((rest - middle.to(tl.float32)).to(tl.bfloat16), w, acc, UPCAST)
            acc = _product(middle, w, acc, UPCAST)
            acc = _product(high, w, acc, UPCAST)
        else:
            acc = _product(wide.to(dy.dtype), w, acc, UPCAST)
        weight_at += tl.cast(BLOCK_N, tl.int64) * K
    rows = row + tl.arange(0, BLOCK_M)
    at = dx_ptr + (tl.program_id(1).to(tl.int64) * M + rows)[:, None] * K + columns[None, :]
    tl.store(at, acc.to(dx_ptr.dtype.element_ty), mask=(rows < M)[:, None] & in_row)


@triton.jit
def linear_int8_sum(parts_ptr, dx_ptr, count, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], dtype=tl.float32)
    parts_at = parts_ptr + at
    for _ in range(count):
        acc += tl.load(parts_at, mask=at < n, other=0.0)
        parts_at += n
    tl.store(dx_ptr + at, acc.to(dx_ptr.dtype.element_ty), mask=at < n)
