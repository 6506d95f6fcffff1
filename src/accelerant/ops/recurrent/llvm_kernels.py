"""Recurrent layers on the CPU as LLVM IR: all steps of a layer in one call, with the gates fused into the product.

    forward     gates = (inputs' part of the gates) + W h_prev, then the cell, for t = 0, 1, ...
    backward    the cell's gradient, then dh_prev = W^T dgates, for t = T - 1, ..., 0

The product with the inputs, and the gradients of all weights, are products over all steps, which torch computes.

Source: __init__.py has the cells; `exponential` of compilation/llvm.py. tanh(x) = e / (e + 2) with e = exp(2 x) - 1,
        which keeps the relative error of small results.
Layout: an index is `share` rows of the batch. A tile is up to three rows times V vectors of 32 bytes: in the forward
        pass of LSTM and GRU one vector of each gate, else four vectors of states. Weights are packed to (blocks, K, V,
        lanes), so that a block, used by all rows, is read in order. After a block its states are computed, from cache.
Bound:  arithmetic of the product for several rows, 12 accumulators in AVX2's 16 registers (four rows of GRU, or the
        cell in the same function, spilled one of them, which took half as long again); with one row the reading of the
        weights from the cache that they fit. A result does not depend on the other rows, nor on threads.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from accelerant.runtime.compilation import llvm
from accelerant.runtime.compilation.llvm import FunctionBuilder, IndexKernel, Operand, Value, constant, suffix, vector

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}  # cells, and the number of their gates

_VECTOR_BYTES = 32
_ROWS = 3
_POINTERS = {
    False: ("gates", "w", "y", "h", "aux", "c", "bias"),
    True: ("gates", "w", "y", "h", "aux", "c", "dy", "dh", "dc", "dgates", "dn"),
}


def lanes(real: str) -> int:
    """Return the numbers in a vector of "float" or "double"."""
    return _VECTOR_BYTES // (8 if real == "double" else 4)


def vectors(cell: str, backward: bool) -> tuple[int, int]:
    """Return the gates in a tile, and the vectors of each."""
    gates = 1 if backward else GATES[cell]
    return gates, 1 if gates > 1 else 4


@dataclass(frozen=True, slots=True)
class RecurrentKernel(IndexKernel):
    """A Builder of recurrent_<cell>_fwd or _bwd (begin, end, pointers, steps, hidden, rows, share).

    Pointers of the forward pass: gates (B, T, G, H), the inputs' part, replaced by the activated gates; packed weights;
    y (B, T, H); h (B, H) before the first step; aux (B, T, H): c of LSTM, the states' part of n of GRU; c (B, H) before
    the first step; bias (H,), of the states' part of n. Of the backward pass, after the same six: dy; dh and dc (B, H),
    the gradients of the last state, replaced by those of the first; dgates (B, T, G, H), of the states' part; dn
    (B, T, H), of the inputs' part of n. What a cell lacks is not read.

    `cell` is "lstm", "gru", "tanh" or "relu", `real` "float" or "double".
    """

    cell: str
    backward: bool
    real: str
    written_out, least_share, sources = True, 1, "ops/recurrent/llvm_kernels.py"

    @property
    def entry(self) -> str:
        return f"recurrent_{self.cell}_{'bwd' if self.backward else 'fwd'}"

    def parameters(self) -> list[str]:
        pointers = [f"ptr %{name}" for name in _POINTERS[self.backward]]
        return [*pointers, *(f"i64 %{name}" for name in ("steps", "hidden", "rows", "share"))]

    def write(self, code: FunctionBuilder) -> None:
        _RecurrentWriter(self, code).write()


class _RecurrentWriter:
    """Writes one kernel: `i`, `t`, `b` are the index of a block of states, the step and the first row of a tile."""

    def __init__(self, kernel: RecurrentKernel, code: FunctionBuilder) -> None:
        self.cell, self.backward, self.real = kernel.cell, kernel.backward, kernel.real
        self.code, self.lanes, self.gates = code, lanes(kernel.real), GATES[kernel.cell]
        self.kind, self.bytes = vector(self.real, self.lanes), 8 if self.real == "double" else 4

    def write(self) -> None:
        """Append the loop over the steps."""
        code = self.code
        self.first = code.i64("mul", "%begin", "%share")
        self.stop = code.smin(code.i64("mul", "%end", "%share"), "%rows")
        tile_gates, blocks = vectors(self.cell, self.backward)
        self.width = tile_gates * blocks
        block = self.lanes * blocks
        with code.countdown("%steps") if self.backward else code.loop(0, "%steps") as t:
            if self.backward:
                with code.loop(self.first, self.stop) as b, code.loop(0, "%hidden", self.lanes) as j:
                    self._cell_backward(b, t, j)
            K = code.i64("mul", "%hidden", self.gates if self.backward else 1)
            with code.loop(0, "%hidden", block) as j:
                w = code.at(self.real, "%w", code.i64("mul", code.i64("mul", j, tile_gates), K))
                for b, rows in code.tiles(self.first, self.stop, range(_ROWS, 0, -1)):
                    self._product(b, rows, t, j, w, K)
                if not self.backward:  # apart from the product, in which its values would take registers
                    with (
                        code.loop(self.first, self.stop) as b,
                        code.loop(j, code.i64("add", j, block), self.lanes) as i,
                    ):
                        self._cell(b, t, i)

    # --- addresses ---------------------------------------------------------------------------------------------------
    def _row(self, name: str, b: Operand, t: Operand | None = None, gates: int = 1) -> Value:
        """Return the address of a row of an array (B, H), or with a step of one (B, T, gates H)."""
        code = self.code
        at = b if t is None else code.i64("add", code.i64("mul", b, "%steps"), t)
        return code.at(self.real, f"%{name}", code.i64("mul", code.i64("mul", at, "%hidden"), gates))

    def _before(self, states: str, initial: str, b: Operand, t: Value) -> Value:
        """Return the address of a row's state before step t."""
        code = self.code
        earlier = self._row(states, b, code.i64("sub", t, 1))
        return code.select(code.compare("eq", t, 0), self._row(initial, b), earlier)

    def _get(self, row: Value, j: Operand, gate: int = 0) -> Value:
        return self._load(self._at(row, j, gate))

    def _load(self, address: Value) -> Value:
        return self.code.load(self.kind, address, align=self.bytes)

    def _put(self, value: Operand, row: Value, j: Operand, gate: int = 0) -> None:
        self.code.store(self.kind, value, self._at(row, j, gate), align=self.bytes)

    def _at(self, row: Value, j: Operand, gate: int) -> Value:
        code = self.code
        return code.at(self.real, row, code.i64("add", j, code.i64("mul", "%hidden", gate)) if gate else j)

    # --- the product -------------------------------------------------------------------------------------------------
    def _product(self, b: Value, rows: int, t: Value, j: Value, w: Value, K: Value) -> None:
        """Append the product of a tile's rows and V vectors: of states, to the gates, or of gates, to the states."""
        code = self.code
        each = [code.i64("add", b, r) for r in range(rows)]
        sources = [
            self._row("dgates", one, t, self.gates) if self.backward else self._before("y", "h", one, t) for one in each
        ]
        zero = constant(self.kind, 0.0)
        sums: list[tuple[llvm.Variable, Value]] = []
        for one in each:
            row = self._row("dh", one) if self.backward else self._row("gates", one, t, self.gates)
            for v in range(self.width):
                if self.backward or self.gates == 1:
                    to = self._at(row, code.i64("add", j, v * self.lanes), 0)
                    first = self._load(to) if self.cell == "gru" or not self.backward else zero
                elif self.cell == "gru" and v == 2:
                    to, first = self._at(self._row("aux", one, t), j, 0), self._get(Value("%bias", "ptr"), j)
                else:
                    to = self._at(row, j, v)
                    first = self._load(to)
                sums.append((code.variable(self.kind, first), to))
        with code.loop(0, K) as k:
            weights = code.at(self.kind, w, code.i64("mul", k, self.width))
            scales = [code.broadcast(code.load(self.real, source, k), self.lanes) for source in sources]
            for v in range(self.width):
                weight = code.load(self.kind, weights, v, align=self.bytes)
                for r, scale in enumerate(scales):
                    total = sums[r * self.width + v][0]
                    total.set(self._fma(weight, scale, total.get()))
        for total, to in sums:
            code.store(self.kind, total.get(), to, align=self.bytes)

    # --- the forward pass --------------------------------------------------------------------------------------------
    def _cell(self, b: Value, t: Value, j: Value) -> None:
        """Append the gates and the next state of one vector of states."""
        y, row = self._row("y", b, t), self._row("gates", b, t, self.gates)
        totals = [self._get(row, j, v) for v in range(self.gates)]
        if self.cell == "lstm":
            i, f, o = (self._sigmoid(totals[v]) for v in (0, 1, 3))
            g = self._tanh(totals[2])
            c = self._fma(f, self._get(self._before("aux", "c", b, t), j), self._mul(i, g))
            self._put(c, self._row("aux", b, t), j)
            h, gates = self._mul(o, self._tanh(c)), [i, f, g, o]
        elif self.cell == "gru":
            reset, z = self._sigmoid(totals[0]), self._sigmoid(totals[1])
            n = self._tanh(self._fma(reset, self._get(self._row("aux", b, t), j), totals[2]))
            before = self._get(self._before("y", "h", b, t), j)
            h, gates = self._fma(z, self._sub(before, n), n), [reset, z, n]
        else:
            h, gates = self._tanh(totals[0]) if self.cell == "tanh" else self._relu(totals[0]), []
        self._put(h, y, j)
        for v, gate in enumerate(gates):
            self._put(gate, row, j, v)

    # --- the backward pass -------------------------------------------------------------------------------------------
    def _cell_backward(self, b: Value, t: Value, j: Value) -> None:
        """Append the gradients of the gates of one vector of states; dh gets what does not pass through them."""
        state, gates = self._row("dh", b), self._row("gates", b, t, self.gates)
        dgates = self._row("dgates", b, t, self.gates)
        dh = self.code.op("fadd", self._get(self._row("dy", b, t), j), self._get(state, j))
        if self.cell == "lstm":
            i, f, g, o = (self._get(gates, j, v) for v in range(4))
            cells = self._row("dc", b)
            tanh = self._tanh(self._get(self._row("aux", b, t), j))
            dc = self._fma(self._mul(dh, o), self._one_minus_square(tanh), self._get(cells, j))
            found = [
                self._mul(self._mul(dc, g), self._slope(i)),
                self._mul(self._mul(dc, self._get(self._before("aux", "c", b, t), j)), self._slope(f)),
                self._mul(self._mul(dc, i), self._one_minus_square(g)),
                self._mul(self._mul(dh, tanh), self._slope(o)),
            ]
            self._put(self._mul(dc, f), cells, j)
        elif self.cell == "gru":
            reset, z, n = (self._get(gates, j, v) for v in range(3))
            dn = self._mul(self._mul(dh, self._sub(1.0, z)), self._one_minus_square(n))
            before = self._get(self._before("y", "h", b, t), j)
            dz = self._mul(self._mul(dh, self._sub(before, n)), self._slope(z))
            dr = self._mul(self._mul(dn, self._get(self._row("aux", b, t), j)), self._slope(reset))
            found = [dr, dz, self._mul(dn, reset)]
            self._put(dn, self._row("dn", b, t), j)
            self._put(self._mul(dh, z), state, j)
        else:
            h = self._get(self._row("y", b, t), j)
            if self.cell == "tanh":
                found = [self._mul(dh, self._one_minus_square(h))]
            else:
                found = [self.code.select(self.code.compare("ogt", h, 0.0), dh, 0.0)]
        for v, one in enumerate(found):
            self._put(one, dgates, j, v)

    # --- arithmetic --------------------------------------------------------------------------------------------------
    def _mul(self, x: Operand, y: Operand) -> Value:
        return self.code.op("fmul", x, y)

    def _sub(self, x: Operand, y: Operand) -> Value:
        return self.code.op("fsub", x, y)

    def _fma(self, x: Operand, y: Operand, z: Operand) -> Value:
        operands = [one if isinstance(one, Value) else constant(self.kind, self._exact(one)) for one in (x, y, z)]
        return self.code.intrinsic(self.kind, f"llvm.fmuladd.{suffix(self.kind)}", *operands)

    def _exact(self, number: Operand) -> float:
        """Return a number rounded to the type."""
        return float(number) if self.real == "double" else float(struct.unpack("<f", struct.pack("<f", number))[0])

    def _slope(self, s: Value) -> Value:
        return self._mul(s, self._sub(1.0, s))

    def _one_minus_square(self, x: Value) -> Value:
        return self._fma(self.code.fneg(x), x, 1.0)

    def _relu(self, x: Value) -> Value:
        return self.code.select(self.code.compare("olt", x, 0.0), 0.0, x)  # NaN stays NaN

    def _clamped(self, x: Value, most: float) -> Value:
        code = self.code
        x = code.select(code.compare("ogt", x, most), constant(x.type, most), x)
        return code.select(code.compare("olt", x, -most), constant(x.type, -most), x)

    def _sigmoid(self, x: Value) -> Value:
        power, rest = llvm.exponential(
            self.code, self._clamped(self.code.fneg(x), 700.0 if self.real == "double" else 87.0)
        )
        return self.code.op("fdiv", 1.0, self.code.op("fadd", 1.0, self._fma(power, rest, power)))

    def _tanh(self, x: Value) -> Value:
        power, rest = llvm.exponential(self.code, self._clamped(self.code.op("fadd", x, x), 80.0))
        e = self._fma(power, rest, self._sub(power, 1.0))
        return self.code.op("fdiv", e, self.code.op("fadd", e, 2.0))
