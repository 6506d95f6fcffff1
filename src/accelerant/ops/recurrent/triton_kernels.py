"""Recurrent layers on a GPU: one launch for all steps of a layer, with the recurrent weights kept on chip (persistent).

    forward     gates = (inputs' part of the gates) + W h_prev, then the cell, for t = 0, 1, ...
    backward    the cell's gradient, then dh_prev = W^T dgates, for t = T - 1, ..., 0

Source: the package has the cells; Diamos et al. 2016, "Persistent RNNs: stashing recurrent weights on-chip".
Layout: gates (B, T, G, H), replaced by the activated gates; w (G, H, H); y, aux, dy, dn (B, T, H); h, c, dh, dc (B, H);
        bias (H,); all dense. llvm_kernels.py describes them; the arguments are the same.
Grid:   one program per BLOCK_B rows of the batch, since states of different rows do not meet.
Bound:  latency of a step: a product of 16 rows whose weights are read from shared memory, G H^2 numbers, and an
        exchange of the state among the warps. A step's inputs are loaded one step ahead. An LSTM of 64 in 16 bits
        takes 34 KiB of shared memory; one of 128 takes 132 KiB, which compute capabilities 8.0, 9.0 and 10.0 have.
"""

import triton
import triton.language as tl

from accelerant.ops.attention.triton_kernels import _dot


@triton.jit
def _tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def recurrent_fwd(
    gates_ptr, w_ptr, y_ptr, h_ptr, aux_ptr, c_ptr, bias_ptr, B, T, H,
    CELL: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK_H)[None, :]
    inside = (rows < B) & (columns < H)
    k = tl.arange(0, BLOCK_H)[:, None]
    square = (k < H) & (columns < H)
    G: tl.constexpr = 4 if CELL == "lstm" else 3 if CELL == "gru" else 1
    at = columns * H + k  # W^T, so that the state is on the left
    w0 = tl.load(w_ptr + at, mask=square, other=0.0)
    gate = gates_ptr + rows * T * G * H + columns
    next0 = tl.load(gate, mask=inside, other=0.0)
    if G > 1:
        w1 = tl.load(w_ptr + H * H + at, mask=square, other=0.0)
        w2 = tl.load(w_ptr + 2 * H * H + at, mask=square, other=0.0)
        next1 = tl.load(gate + H, mask=inside, other=0.0)
        next2 = tl.load(gate + 2 * H, mask=inside, other=0.0)
    if G == 4:
        w3 = tl.load(w_ptr + 3 * H * H + at, mask=square, other=0.0)
        next3 = tl.load(gate + 3 * H, mask=inside, other=0.0)
        c = tl.load(c_ptr + rows * H + columns, mask=inside, other=0.0).to(tl.float32)
    if G == 3:
        bias = tl.load(bias_ptr + columns, mask=columns < H, other=0.0).to(tl.float32)
    h = tl.load(h_ptr + rows * H + columns, mask=inside, other=0.0)
    wide = h.to(tl.float32)
    state = rows * T * H + columns
    for t in range(T):
        ahead = inside & (tl.full([1, 1], t + 1, tl.int32) < T)
        a0 = next0.to(tl.float32)
        next0 = tl.load(gate + G * H, mask=ahead, other=0.0)
        if G > 1:
            a1 = next1.to(tl.float32)
            a2 = next2.to(tl.float32)
            next1 = tl.load(gate + (G + 1) * H, mask=ahead, other=0.0)
            next2 = tl.load(gate + (G + 2) * H, mask=ahead, other=0.0)
        if G == 4:
            a3 = next3.to(tl.float32)
            next3 = tl.load(gate + (G + 3) * H, mask=ahead, other=0.0)
        a0 = _dot(h, w0, a0, PRECISION, UPCAST)
        if G > 1:
            a1 = _dot(h, w1, a1, PRECISION, UPCAST)
        if CELL == "lstm":
            i = tl.sigmoid(a0)
            f = tl.sigmoid(a1)
            g = _tanh(_dot(h, w2, a2, PRECISION, UPCAST))
            o = tl.sigmoid(_dot(h, w3, a3, PRECISION, UPCAST))
            c = f * c + i * g
            wide = o * _tanh(c)
            tl.store(gate, i, mask=inside)
            tl.store(gate + H, f, mask=inside)
            tl.store(gate + 2 * H, g, mask=inside)
            tl.store(gate + 3 * H, o, mask=inside)
            tl.store(aux_ptr + state, c, mask=inside)
        elif CELL == "gru":
            s = _dot(h, w2, tl.zeros([BLOCK_B, BLOCK_H], tl.float32) + bias, PRECISION, UPCAST)
            r = tl.sigmoid(a0)
            z = tl.sigmoid(a1)
            n = _tanh(a2 + r * s)
            wide = n + z * (wide - n)
            tl.store(gate, r, mask=inside)
            tl.store(gate + H, z, mask=inside)
            tl.store(gate + 2 * H, n, mask=inside)
            tl.store(aux_ptr + state, s, mask=inside)
        elif CELL == "tanh":
            wide = _tanh(a0)
        else:
            wide = tl.maximum(a0, 0.0, propagate_nan=tl.PropagateNan.ALL)
        h = wide.to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + state, h, mask=inside)
        gate += G * H
        state += H


@triton.jit
def recurrent_bwd(
    gates_ptr, w_ptr, y_ptr, h_ptr, aux_ptr, c_ptr, dy_ptr, dh_ptr, dc_ptr, dgates_ptr, dn_ptr, B, T, H,
    CELL: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_H: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)[:, None]
    columns = tl.arange(0, BLOCK_H)[None, :]
    inside = (rows < B) & (columns < H)
    k = tl.arange(0, BLOCK_H)[:, None]
    square = (k < H) & (columns < H)
    G: tl.constexpr = 4 if CELL == "lstm" else 3 if CELL == "gru" else 1
    at = k * H + columns
    w0 = tl.load(w_ptr + at, mask=square, other=0.0)
    if G > 1:
        w1 = tl.load(w_ptr + H * H + at, mask=square, other=0.0)
        w2 = tl.load(w_ptr + 2 * H * H + at, mask=square, other=0.0)
    if G == 4:
        w3 = tl.load(w_ptr + 3 * H * H + at, mask=square, other=0.0)
        dc = tl.load(dc_ptr + rows * H + columns, mask=inside, other=0.0).to(tl.float32)
    first = rows * H + columns
    dh = tl.load(dh_ptr + first, mask=inside, other=0.0).to(tl.float32)
    kind = w_ptr.dtype.element_ty
    state = (rows * T + T - 1) * H + columns
    gate = (rows * T + T - 1) * G * H + columns
    for back in range(T):
        initial = inside & (tl.full([1, 1], back, tl.int32) == T - 1)
        later = inside & (tl.full([1, 1], back, tl.int32) < T - 1)
        dh += tl.load(dy_ptr + state, mask=inside, other=0.0).to(tl.float32)
        if CELL == "lstm":
            i = tl.load(gates_ptr + gate, mask=inside, other=0.0).to(tl.float32)
            f = tl.load(gates_ptr + gate + H, mask=inside, other=0.0).to(tl.float32)
            g = tl.load(gates_ptr + gate + 2 * H, mask=inside, other=0.0).to(tl.float32)
            o = tl.load(gates_ptr + gate + 3 * H, mask=inside, other=0.0).to(tl.float32)
            c = _tanh(tl.load(aux_ptr + state, mask=inside, other=0.0).to(tl.float32))
            before = tl.load(aux_ptr + state - H, mask=later, other=0.0).to(tl.float32)
            before += tl.load(c_ptr + first, mask=initial, other=0.0).to(tl.float32)
            dc += dh * o * (1.0 - c * c)
            d0 = (dc * g * i * (1.0 - i)).to(kind)
            d1 = (dc * before * f * (1.0 - f)).to(kind)
            d2 = (dc * i * (1.0 - g * g)).to(kind)
            d3 = (dh * c * o * (1.0 - o)).to(kind)
            dc = dc * f
            dh = tl.zeros([BLOCK_B, BLOCK_H], tl.float32)
        elif CELL == "gru":
            r = tl.load(gates_ptr + gate, mask=inside, other=0.0).to(tl.float32)
            z = tl.load(gates_ptr + gate + H, mask=inside, other=0.0).to(tl.float32)
            n = tl.load(gates_ptr + gate + 2 * H, mask=inside, other=0.0).to(tl.float32)
            s = tl.load(aux_ptr + state, mask=inside, other=0.0).to(tl.float32)
            before = tl.load(y_ptr + state - H, mask=later, other=0.0).to(tl.float32)
            before += tl.load(h_ptr + first, mask=initial, other=0.0).to(tl.float32)
            dn = dh * (1.0 - z) * (1.0 - n * n)
            tl.store(dn_ptr + state, dn, mask=inside)
            d0 = (dn * s * r * (1.0 - r)).to(kind)
            d1 = (dh * (before - n) * z * (1.0 - z)).to(kind)
            d2 = (dn * r).to(kind)
            dh = dh * z
        else:
            y = tl.load(y_ptr + state, mask=inside, other=0.0).to(tl.float32)
            slope = 1.0 - y * y if CELL == "tanh" else (y > 0.0).to(tl.float32)
            d0 = (dh * slope).to(kind)
            dh = tl.zeros([BLOCK_B, BLOCK_H], tl.float32)
        tl.store(dgates_ptr + gate, d0, mask=inside)
        dh = _dot(d0, w0, dh, PRECISION, UPCAST)
        if G > 1:
            tl.store(dgates_ptr + gate + H, d1, mask=inside)
            tl.store(dgates_ptr + gate + 2 * H, d2, mask=inside)
            dh = _dot(d1, w1, dh, PRECISION, UPCAST)
            dh = _dot(d2, w2, dh, PRECISION, UPCAST)
        if G == 4:
            tl.store(dgates_ptr + gate + 3 * H, d3, mask=inside)
            dh = _dot(d3, w3, dh, PRECISION, UPCAST)
        state -= H
        gate -= G * H
    tl.store(dh_ptr + first, dh, mask=inside)
    if G == 4:
        tl.store(dc_ptr + first, dc, mask=inside)
