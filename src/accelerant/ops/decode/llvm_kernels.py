"""attention_paged and the rotation before it on the CPU as LLVM IR: each token and head by itself, in the same bits.

    s[j] = scale q . k[j], or softcap tanh(that / softcap)      o = sum_j exp(s[j]) v[j] / sum_j exp(s[j])

Source: paged.py; the running sums as in Milakov and Gimelshein 2018, arXiv:1805.02867.
Layout: q and o (T, Hq, D) in float32, or float64 as the blocks; blocks (N, block, Hkv, D), D dense; table (R, M)
        int32;
        tiles (tiles, 4) int64: row, first token, number of tokens, a few of one row, and the first one's position; sums
        (T, Hq, 2), the running maximum, -inf at first, and total, 0, of each pair of token and head; o is 0 at first.
        An index is a tile and a key head.
        Keys are taken in vectors of as many keys as lanes, counted from the sequence's beginning: each lane sums the
        products of a key, and the vectors are then transposed by halves. A vector is used by all tokens of a tile and
        all heads that share it.
Bound:  one token: memory; prompts: loads, one for each multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    IndexKernel,
    Operand,
    Value,
    constant,
    exponential,
    lane_constants,
    lane_sums,
    suffix,
    vector,
)

_UNROLLED = 4  # vectors of a head that are used at a time

_MEMORY = {"double": ("double", 8), "float": ("float", 4), "bfloat": ("i16", 2), "half": ("half", 2)}
_POINTERS = ("q", "k", "v", "table", "tiles", "sums", "o")
_SIZES = ("M", "N", "block", "heads", "group", "D", "window", "of_block", "of_key", "of_head")


@dataclass(frozen=True, slots=True)
class PagedKernel(IndexKernel):
    """A Builder of attention_paged_<kind>(begin, end, pointers, sizes, scale, softcap), see the module.

    Sizes: M columns of the table, N blocks of `block` keys, key heads, query heads of each, D, window, and the strides
    of block, key and head; a window of -1 and a softcap of 0 are none.
    """

    kind: str
    lanes: int
    written_out, least_share, sources = True, 1, "ops/decode/llvm_kernels.py"

    @property
    def entry(self) -> str:
        return f"attention_paged_{self.kind}"

    @property
    def real(self) -> str:
        """The type that is computed in."""
        return "double" if self.kind == "double" else "float"

    def parameters(self) -> list[str]:
        pointers, sizes = [f"ptr noalias %{name}" for name in _POINTERS], [f"i64 %{name}" for name in _SIZES]
        return [*pointers, *sizes, f"{self.real} %scale", f"{self.real} %softcap"]

    def write(self, code: FunctionBuilder) -> None:
        _PagedWriter(self, code, self.real).write()


class _PagedWriter:
    """Writes the kernel: `h` is a key head, `first` the first key of a vector, `low` and `high` what a token sees."""

    def __init__(self, kernel: PagedKernel, code: FunctionBuilder, real: str) -> None:
        self.code, self.lanes, self.real, self.kind = code, kernel.lanes, real, kernel.kind
        self.vector, self.bytes = vector(real, kernel.lanes), 8 if real == "double" else 4

    def write(self) -> None:
        """Append the loops over indices and vectors of keys."""
        code, lanes = self.code, self.lanes
        self.places, self.weights = code.stack("i64", lanes), code.stack(self.real, lanes, align=64)
        self.left = code.i64("srem", "%D", lanes)
        self.full = code.i64("sub", "%D", self.left)
        self.most = code.i64("sub", "%D", code.i64("srem", "%D", _UNROLLED * lanes))
        self.inside = code.compare("slt", lane_constants("i64", range(lanes)), code.broadcast(self.left, lanes))
        with code.loop("%begin", "%end") as index:
            tile, self.h = code.i64("sdiv", index, "%heads"), code.i64("srem", index, "%heads")
            of_tile = code.i64("mul", tile, 4)
            self.row, self.token, count, self.position = (
                code.load("i64", "%tiles", code.i64("add", of_tile, i)) for i in range(4)
            )
            high = code.i64("add", self.position, count)
            low = self._low(code.i64("add", self.position, 1))
            aligned = code.i64("mul", code.i64("sdiv", low, lanes), lanes)
            with code.loop(aligned, high, lanes) as first:
                self._place(first, low, high)
                with code.loop(0, count) as i:
                    self._token(
                        code.i64("add", self.token, i), first, code.i64("add", self.position, code.i64("add", i, 1))
                    )
            with code.loop(0, count) as i, code.loop(0, "%group") as g:
                self._finish(self._pair(code.i64("add", self.token, i), g))

    def _low(self, high: Value) -> Value:
        """Return the first key that a token sees, of which `high` is the end of its keys."""
        code = self.code
        low = code.select(code.compare("slt", "%window", 0), 0, code.i64("sub", high, "%window"))
        return self._larger(low, 0)

    def _larger(self, x: Value, y: Operand) -> Value:
        return self.code.select(self.code.compare("sgt", x, y), x, y)

    def _pair(self, token: Value, g: Value) -> Value:
        """Return the number of a pair of token and query head."""
        code = self.code
        heads = code.i64("mul", "%heads", "%group")
        return code.i64("add", code.i64("mul", token, heads), code.i64("add", code.i64("mul", self.h, "%group"), g))

    def _place(self, first: Value, low: Value, high: Value) -> None:
        """Store where the keys of a vector begin in the blocks; for keys that no token of the tile sees, another's."""
        code, of_head = self.code, self.code.i64("mul", self.h, "%of_head")
        for i in range(self.lanes):
            j = self._larger(code.smin(code.i64("add", first, i), code.i64("sub", high, 1)), low)
            at = code.i64("add", code.i64("mul", self.row, "%M"), code.i64("sdiv", j, "%block"))
            block = code.convert("sext", code.load("i32", "%table", at), "i64")
            block = self._larger(code.smin(block, code.i64("sub", "%N", 1)), 0)
            in_block = code.i64("mul", code.i64("srem", j, "%block"), "%of_key")
            place = code.i64("add", code.i64("add", code.i64("mul", block, "%of_block"), in_block), of_head)
            code.store("i64", place, self.places, i)

    def _token(self, token: Value, first: Value, high: Value) -> None:
        """Append the part of a vector of keys in the sums of a token, where it sees one of them."""
        code, lanes = self.code, self.lanes
        low = self._low(high)
        begin = code.i64("sub", self._larger(low, first), first)
        end = code.i64("sub", code.smin(high, code.i64("add", first, lanes)), first)
        with code.when(code.compare("slt", begin, end)):
            ids = lane_constants("i64", range(lanes))
            from_low = code.compare("sge", ids, code.broadcast(begin, lanes))
            seen = code.op("and", from_low, code.compare("slt", ids, code.broadcast(end, lanes)))
            with code.loop(0, "%group") as g:
                pair = self._pair(token, g)
                shrink = self._weigh(pair, self._scores(pair), seen)
                self._mix(pair, shrink, begin, end)

    # --- scores ------------------------------------------------------------------------------------------------------
    def _scores(self, pair: Value) -> Value:
        """Append the products of a query with the keys of the vector, scaled and capped."""
        code = self.code
        q = code.at(self.real, "%q", code.i64("mul", pair, "%D"))
        sums = [code.variable(self.vector, 0.0) for _ in range(self.lanes)]
        for d, vectors, inside in self._widths():
            queries = [self._real(q, code.i64("add", d, u * self.lanes), inside) for u in range(vectors)]
            for i, total in enumerate(sums):
                key = code.load("i64", self.places, i)
                for u, query in enumerate(queries):
                    k = self._stored("%k", code.i64("add", key, code.i64("add", d, u * self.lanes)), inside)
                    total.set(self._fma(query, k, total.get()))
        scores = code.variable(
            self.vector,
            code.op("fmul", lane_sums(code, [total.get() for total in sums]), code.broadcast("%scale", self.lanes)),
        )
        with code.when(code.compare("ogt", "%softcap", 0.0)):
            cap = code.broadcast("%softcap", self.lanes)
            x = code.op("fdiv", scores.get(), cap)
            x = code.select(code.compare("ogt", x, 20.0), constant(self.vector, 20.0), x)
            x = code.select(code.compare("olt", x, -20.0), constant(self.vector, -20.0), x)
            power, rest = exponential(code, code.op("fadd", x, x))
            e = self._fma(power, rest, code.op("fsub", power, 1.0))
            scores.set(code.op("fmul", cap, code.op("fdiv", e, code.op("fadd", e, 2.0))))
        return scores.get()

    def _weigh(self, pair: Value, scores: Value, seen: Value) -> Value:
        """Append the weights of the keys of a vector, and the running maximum and total; return what sums shrink by."""
        code, lanes = self.code, self.lanes
        infinite = constant(self.vector, float("-inf"))
        scores = code.select(seen, scores, infinite)
        at = code.at(self.real, "%sums", code.i64("mul", pair, 2))
        before, peak = code.load(self.real, at), self._reduced(scores, self._maximum)
        after = self._maximum(peak, before)
        weights = code.select(
            seen, self._power(code.op("fsub", scores, code.broadcast(after, lanes))), constant(self.vector, 0.0)
        )
        shrink = self._power(code.broadcast(code.op("fsub", before, after), lanes))
        total = code.op("fmul", code.load(self.real, at, 1), code.lane(shrink, 0))
        total = code.op("fadd", total, self._reduced(weights, lambda x, y: code.op("fadd", x, y)))
        code.store(self.vector, weights, self.weights, align=64)
        code.store(self.real, after, at)
        code.store(self.real, total, at, 1)
        return shrink

    def _maximum(self, x: Value, y: Value) -> Value:
        return self.code.select(self.code.compare("ogt", x, y), x, y)

    def _power(self, x: Value) -> Value:
        """Append e^x of numbers up to 0."""
        code, least = self.code, -700.0 if self.real == "double" else -87.0
        power, rest = exponential(code, code.select(code.compare("olt", x, least), constant(x.type, least), x))
        return self._fma(power, rest, power)

    def _reduced(self, value: Value, joined: Callable[[Value, Value], Value]) -> Value:
        """Append the joined lanes of a vector, halves with halves."""
        code, width = self.code, self.lanes
        while width > 2:
            width //= 2
            value = joined(*(code.shuffle(value, None, range(at, at + width)) for at in (0, width)))
        return joined(code.lane(value, 0), code.lane(value, 1))

    # --- values ------------------------------------------------------------------------------------------------------
    def _mix(self, pair: Value, shrink: Value, begin: Value, end: Value) -> None:
        """Append the sums of a pair, shrunk, plus the weighted values of keys begin to end of the vector."""
        code = self.code
        o = code.at(self.real, "%o", code.i64("mul", pair, "%D"))
        for d, vectors, inside in self._widths():
            columns = [code.i64("add", d, u * self.lanes) for u in range(vectors)]
            sums = [code.variable(self.vector, code.op("fmul", shrink, self._real(o, at, inside))) for at in columns]
            with code.loop(begin, end) as j:
                weight = code.broadcast(code.load(self.real, self.weights, j), self.lanes)
                key = code.load("i64", self.places, j)
                for at, total in zip(columns, sums, strict=True):
                    v = self._stored("%v", code.i64("add", key, at), inside)
                    total.set(self._fma(weight, v, total.get()))
            for at, total in zip(columns, sums, strict=True):
                self._put(total.get(), o, at, inside)

    def _finish(self, pair: Value) -> None:
        """Append the division of a pair's sums by its total."""
        code = self.code
        total = code.load(self.real, "%sums", code.i64("add", code.i64("mul", pair, 2), 1))
        factor = code.select(code.compare("oeq", total, 0.0), 0.0, code.op("fdiv", 1.0, total))
        factors, o = code.broadcast(factor, self.lanes), code.at(self.real, "%o", code.i64("mul", pair, "%D"))
        for d, vectors, inside in self._widths():
            for u in range(vectors):
                at = code.i64("add", d, u * self.lanes)
                self._put(code.op("fmul", factors, self._real(o, at, inside)), o, at, inside)

    # --- memory ------------------------------------------------------------------------------------------------------
    def _widths(self) -> Iterator[tuple[Value, int, Value | None]]:
        """Append loops over a head's columns; yields the first one, the vectors from it, and a partial one's lanes."""
        code = self.code
        with code.loop(0, self.most, _UNROLLED * self.lanes) as d:
            yield d, _UNROLLED, None
        with code.loop(self.most, self.full, self.lanes) as d:
            yield d, 1, None
        with code.when(code.compare("sgt", self.left, 0)):
            yield self.full, 1, self.inside

    def _real(self, row: Value, at: Value, inside: Value | None) -> Value:
        return self._load(self.real, self.bytes, self.code.at(self.real, row, at), inside)

    def _put(self, value: Value, row: Value, at: Value, inside: Value | None) -> None:
        address = self.code.at(self.real, row, at)
        if inside is None:
            self.code.store(self.vector, value, address, align=self.bytes)
        else:
            self.code.masked_store(value, address, inside, self.bytes)

    def _stored(self, blocks: str, at: Value, inside: Value | None) -> Value:
        """Append the load of a vector of the cache."""
        code = self.code
        element, align = _MEMORY[self.kind]
        found = self._load(element, align, code.at(element, blocks, at), inside)
        if self.kind == "bfloat":
            return code.bitcast(code.op("shl", code.convert("zext", found, "i32"), 16), self.vector)
        return code.convert("fpext", found, "float") if self.kind == "half" else found

    def _load(self, element: str, align: int, address: Value, inside: Value | None) -> Value:
        kind = vector(element, self.lanes)
        if inside is None:
            return self.code.load(kind, address, align=align)
        return self.code.masked_load(kind, address, inside, align)

    def _fma(self, x: Value, y: Value, z: Value) -> Value:
        return self.code.intrinsic(self.vector, f"llvm.fmuladd.{suffix(self.vector)}", x, y, z)


@dataclass(frozen=True, slots=True)
class RopeKernel(IndexKernel):
    """A Builder of decode_rope_<real>(begin, end, pointers, sizes): steps.append to a cache in blocks.

    An index is a token and one of its heads: of queries, which are rotated to q, of keys, rotated to the cache, or of
    values, copied there. Sizes: query heads, key heads, rows of the tables, D. Each product and sum is rounded.
    """

    real: str
    lanes: int
    written_out, least_share, sources = True, 64, "ops/decode/llvm_kernels.py"

    @property
    def entry(self) -> str:
        return f"decode_rope_{self.real}"

    def parameters(self) -> list[str]:
        read = [f"ptr noalias readonly %{name}" for name in ("qkv", "cos", "sin", "positions", "slots")]
        written = [f"ptr noalias %{name}" for name in ("q", "k", "v")]
        return [*read, *written, *(f"i64 %{name}" for name in ("heads", "kv_heads", "T", "D"))]

    def write(self, code: FunctionBuilder) -> None:
        half = code.i64("sdiv", "%D", 2)
        each = code.i64("add", "%heads", code.i64("mul", "%kv_heads", 2))
        with code.loop("%begin", "%end") as index:
            token, head = code.i64("sdiv", index, each), code.i64("srem", index, each)
            x = code.at(self.real, "%qkv", code.i64("mul", index, "%D"))
            position = code.smin(code.load("i64", "%positions", token), code.i64("sub", "%T", 1))
            angles = code.i64("mul", code.select(code.compare("slt", position, 0), 0, position), half)
            with code.when(code.compare("slt", head, "%heads")):
                line = code.i64("add", code.i64("mul", token, "%heads"), head)
                self._rotate(code, x, code.at(self.real, "%q", code.i64("mul", line, "%D")), angles, half)
            slot, of_cache = code.load("i64", "%slots", token), code.i64("sub", head, "%heads")
            is_written = code.op("and", code.compare("sge", slot, 0), code.compare("sge", of_cache, 0))
            with code.when(is_written):
                line = code.i64("add", code.i64("mul", slot, "%kv_heads"), code.i64("srem", of_cache, "%kv_heads"))
                at = code.i64("mul", line, "%D")
                for is_key in code.branches(code.compare("slt", of_cache, "%kv_heads")):
                    if is_key:
                        self._rotate(code, x, code.at(self.real, "%k", at), angles, half)
                    else:
                        y = code.at(self.real, "%v", at)
                        for j, kind in self._vectors(code, "%D"):
                            code.store(kind, self._at(code, kind, x, j), code.at(self.real, y, j), align=4)

    def _rotate(self, code: FunctionBuilder, x: Value, y: Value, angles: Value, half: Value) -> None:
        """Append the rotation of a head x to y."""
        for j, kind in self._vectors(code, half):
            upper, angle = code.i64("add", j, half), code.i64("add", angles, j)
            x1, x2 = (self._at(code, kind, x, at) for at in (j, upper))
            cos, sin = (self._at(code, kind, table, angle) for table in ("%cos", "%sin"))
            y1 = code.op("fsub", code.op("fmul", x1, cos), code.op("fmul", x2, sin))
            y2 = code.op("fadd", code.op("fmul", x2, cos), code.op("fmul", x1, sin))
            for value, at in ((y1, j), (y2, upper)):
                code.store(kind, value, code.at(self.real, y, at), align=4)

    def _at(self, code: FunctionBuilder, kind: str, pointer: Operand, index: Value) -> Value:
        return code.load(kind, code.at(self.real, pointer, index), align=4)

    def _vectors(self, code: FunctionBuilder, count: Operand) -> Iterator[tuple[Value, str]]:
        """Append loops over `count` numbers; yields the first one, and the type, of each vector or number."""
        full = code.i64("sub", count, code.i64("srem", count, self.lanes))
        with code.loop(0, full, self.lanes) as j:
            yield j, vector(self.real, self.lanes)
        with code.loop(full, count) as j:
            yield j, self.real
