"""pool2d: the maximum or the average of each window of an image, and the gradient.

    max  y[p] = x[a(p)], a(p) the position in window p of the first of its largest elements, or of the last NaN if any
         dx[h, w] = sum of dy[p] over the windows p with a(p) = (h, w)
    avg  y[p] = (sum of window p) / count(p)
         dx[h, w] = sum of dy[p] / count(p) over the windows p that contain (h, w)

Source: torch's max_pool2d and avg_pool2d; window (i, j) begins at (i SH - PH, j SW - PW) and has KH x KW elements, DH
        rows and DW columns apart.
Layout: x (B, C, H, W) and y (B, C, OH, OW) both contiguous, or both with the channels last. Positions like y: uint8,
        the number of the window's element, or int64, h W + w as in torch. Sums in float32.
Grid:   tiles of BLOCK_P by BLOCK_Q: rows of y of all channels and images, by columns; or with the channels last pixels
        of y by channels. A thread reads a window's elements in torch's order, and computes ROWS windows of a column,
        whose shared rows of x are read once. bwd: the same over cells of SH x SW elements of x. All elements of a cell
        lie in the same few windows, which are read once; their positions in these windows are compile-time constants.
        Each element of dx is written once, after sums in a fixed order.
Bound:  memory: x, y and positions once; elements shared by windows come from L1. With the channels first, windows are
        read element by element, with as many instructions as fit in the memory's time.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(height, width, images, channels, LAST: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Return the program's coordinates: plane or image, row, column, index along Q; and the masks along P and Q.

    Coordinates outside are clamped to the last ones inside, so that they can be read, except channels.
    """
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)[:, None]
    q = tl.program_id(1) * BLOCK_Q + tl.arange(0, BLOCK_Q)[None, :]
    if LAST:
        in_p, in_q = p < images * height * width, q < channels
        p = tl.minimum(p, images * height * width - 1)
        image = p // (height * width)
        pixel = p - image * (height * width)
        row = pixel // width
        return image, row, pixel - row * width, q, in_p, in_q
    else:  # no early return: Triton only skips branches of constant conditions
        in_p, in_q = p < images * channels * height, q < width
        p, q = tl.minimum(p, images * channels * height - 1), tl.minimum(q, width - 1)
        image = p // height
        return image, p - image * height, q, q, in_p, in_q


@triton.jit
def _at(ptr, image, row, column, q, height, width, channels, LAST: tl.constexpr):
    """Return pointers to elements; with the channels first as a row's pointer plus 32 bits, one instruction each."""
    line = (image * height + row).to(tl.int64) * width
    return ptr + (line + column) * channels + q if LAST else (ptr + line) + column


@triton.jit
def _counted(first, size, PAD: tl.constexpr, K: tl.constexpr, WITH_PAD: tl.constexpr):
    """Return the counted elements of windows from `first` on, along one dimension."""
    if WITH_PAD:  # but not what the last window has beyond the padding
        return tl.minimum(first + K, size + PAD) - first
    return tl.minimum(first + K, size) - tl.maximum(first, 0)


@triton.jit
def _divisor(
    divisor, row, column, H, W,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    WITH_PAD: tl.constexpr,
):  # fmt: skip
    if divisor is None:
        rows = _counted(row * SH - PH, H, PH, KH, WITH_PAD)
        count = rows * _counted(column * SW - PW, W, PW, KW, WITH_PAD)
    else:  # no early return: see _tile
        count = tl.full([1, 1], 0, tl.int32) + divisor
    return count.to(tl.float32)


@triton.jit
def _over(total, count, EXACT: tl.constexpr):
    """Return the quotient, correctly rounded if the result is float32."""
    total, count = tl.broadcast(total, count)
    return tl.div_rn(total, count) if EXACT else total / count


@triton.jit
def pool2d_fwd(
    x_ptr, y_ptr, positions_ptr, divisor, B, C, H, W, OH, OW,
    MAX: tl.constexpr, LAST: tl.constexpr, WITH_PAD: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, ROWS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    image, group, column, q, in_p, in_q = _tile(tl.cdiv(OH, ROWS), OW, B, C, LAST, BLOCK_P, BLOCK_Q)
    top, left = group * (ROWS * SH) - PH, column * SW - PW
    x_at = _at(x_ptr, image, top, left, q, H, W, C, LAST)
    step = C if LAST else 1
    xs = ()
    for r in tl.static_range((ROWS - 1) * SH + (KH - 1) * DH + 1):
        in_row = (top + r >= 0) & (top + r < H)
        for j in tl.static_range(KW):
            inside = in_row & (left + j * DW >= 0) & (left + j * DW < W)
            if LAST:
                inside = inside & in_q
            other = float("-inf") if MAX else 0.0
            xs = xs + (tl.load(x_at + (r * W + j * DW) * step, mask=inside, other=other).to(tl.float32),)  # noqa: RUF005
    for t in tl.static_range(ROWS):
        row = group * ROWS + t
        acc = tl.full([BLOCK_P, BLOCK_Q], float("-inf") if MAX else 0.0, tl.float32)
        position = tl.zeros([BLOCK_P, BLOCK_Q], dtype=tl.int32)
        if positions_ptr is not None:  # if all are -inf, the first that is not padding
            first = tl.cdiv(tl.maximum(-top - t * SH, 0), DH) * KW + tl.cdiv(tl.maximum(-left, 0), DW)
            position += first
        for i in tl.static_range(KH):
            for j in tl.static_range(KW):
                x = xs[(t * SH + i * DH) * KW + j]
                if not MAX:
                    acc += x
                elif positions_ptr is None:
                    acc = tl.maximum(acc, x, propagate_nan=tl.PropagateNan.ALL)
                else:
                    larger = (x > acc) | (x != x)
                    acc = tl.where(larger, x, acc)
                    position = tl.where(larger, i * KW + j, position)
        if not MAX:
            count = _divisor(divisor, row, column, H, W, KH, KW, SH, SW, PH, PW, WITH_PAD)
            acc = _over(acc, count, y_ptr.dtype.element_ty == tl.float32)
        inside = in_p & in_q & (row < OH)
        y_at = _at(y_ptr, image, row, column, q, OH, OW, C, LAST)
        if not LAST:  # one column per thread: several would move the addresses of neighbouring threads apart
            y_at = tl.max_contiguous(y_at, [1, 1])
        tl.store(y_at, acc.to(y_ptr.dtype.element_ty), mask=inside)
        if positions_ptr is not None:
            if positions_ptr.dtype.element_ty == tl.int64:
                position = (top + t * SH + position // KW * DH) * W + left + position % KW * DW
            positions_at = _at(positions_ptr, image, row, column, q, OH, OW, C, LAST)
            if not LAST:
                positions_at = tl.max_contiguous(positions_at, [1, 1])
            tl.store(positions_at, position.to(positions_ptr.dtype.element_ty), mask=inside)


@triton.constexpr_function
def _is_element(distance, K, D):
    """Return whether a window of K elements, D apart, has an element at this offset."""
    return 0 <= distance <= (K - 1) * D and distance % D == 0


@triton.jit
def _element(
    dys, positions, u, v, W,
    r: tl.constexpr, c: tl.constexpr, MAX: tl.constexpr, FLAT: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Return the gradient of element (r, c) of each cell; zh rows of y further its row is r + PH - zh SH."""
    ZH0: tl.constexpr = -(((KH - 1) * DH - PH) // SH)
    ZW0: tl.constexpr = -(((KW - 1) * DW - PW) // SW)
    ZH1: tl.constexpr = (SH - 1 + PH) // SH + 1
    ZW1: tl.constexpr = (SW - 1 + PW) // SW + 1
    acc = tl.zeros([BLOCK_P, BLOCK_Q], dtype=tl.float32)
    for zh in tl.static_range(ZH0, ZH1):
        for zw in tl.static_range(ZW0, ZW1):
            if _is_element(r + PH - zh * SH, KH, DH) and _is_element(c + PW - zw * SW, KW, DW):
                dy = dys[(zh - ZH0) * (ZW1 - ZW0) + zw - ZW0]
                if MAX:
                    position = positions[(zh - ZH0) * (ZW1 - ZW0) + zw - ZW0]
                    if FLAT:
                        here = position == (u * SH + r) * W + v * SW + c
                    else:
                        here = position == (r + PH - zh * SH) // DH * KW + (c + PW - zw * SW) // DW
                    dy = tl.where(here, dy, 0.0)
                acc += dy
    return acc


@triton.jit
def pool2d_bwd(
    dy_ptr, positions_ptr, dx_ptr, divisor, B, C, H, W, OH, OW,
    MAX: tl.constexpr, LAST: tl.constexpr, WITH_PAD: tl.constexpr, PAIRS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DH: tl.constexpr, DW: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    FLAT: tl.constexpr = MAX and positions_ptr.dtype.element_ty == tl.int64
    image, u, v, q, in_p, in_q = _tile(tl.cdiv(H, SH), tl.cdiv(W, SW), B, C, LAST, BLOCK_P, BLOCK_Q)
    dys, positions = (), ()
    for zh in tl.static_range(-(((KH - 1) * DH - PH) // SH), (SH - 1 + PH) // SH + 1):
        for zw in tl.static_range(-(((KW - 1) * DW - PW) // SW), (SW - 1 + PW) // SW + 1):
            row, column = u + zh, v + zw
            inside = in_p & in_q & (row >= 0) & (row < OH) & (column >= 0) & (column < OW)
            dy_at = _at(dy_ptr, image, row, column, q, OH, OW, C, LAST)
            dy = tl.load(dy_at, mask=inside, other=0.0).to(tl.float32)
            if MAX:
                positions_at = _at(positions_ptr, image, row, column, q, OH, OW, C, LAST)
                position = tl.load(positions_at, mask=inside, other=255)
                positions = positions + (position.to(tl.int32),)  # noqa: RUF005 - no starred tuples
            else:
                count = _divisor(divisor, row, column, H, W, KH, KW, SH, SW, PH, PW, WITH_PAD)
                dy = _over(dy, tl.where(inside, count, 1.0), dx_ptr.dtype.element_ty == tl.float32)
            dys = dys + (dy,)  # noqa: RUF005
    for r in tl.static_range(SH):
        in_row = in_p & (u * SH + r < H)
        if PAIRS:  # two neighbouring columns, so that stores are contiguous
            one = _element(dys, positions, u, v, W, r, 0, MAX, FLAT, KH, KW, SH, SW, PH, PW, DH, DW, BLOCK_P, BLOCK_Q)
            two = _element(dys, positions, u, v, W, r, 1, MAX, FLAT, KH, KW, SH, SW, PH, PW, DH, DW, BLOCK_P, BLOCK_Q)
            dx = tl.reshape(tl.join(one, two), (BLOCK_P, 2 * BLOCK_Q))
            w = tl.program_id(1) * (2 * BLOCK_Q) + tl.arange(0, 2 * BLOCK_Q)[None, :]
            dx_at = _at(dx_ptr, image, u * SH + r, w, w, H, W, C, LAST)
            tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=in_row & (w < W))
        else:
            for c in tl.static_range(SW):
                dx = _element(
                    dys, positions, u, v, W, r, c, MAX, FLAT, KH, KW, SH, SW, PH, PW, DH, DW, BLOCK_P, BLOCK_Q
                )
                w = v * SW + c
                dx_at = _at(dx_ptr, image, u * SH + r, w, q, H, W, C, LAST)
                tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=in_row & in_q & (w < W))
