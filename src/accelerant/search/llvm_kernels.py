"""Search on a CPU as LLVM IR: quick scores of blocks of rows, scans of lists, and the scores of answers.

    tiles    maxima of the quick scores of 64 rows, or all scores, for queries in the lanes of vectors
    scan     for each query the rows of its lists whose quick score is among the `wanted` largest, less a margin
    pairs    the scores of `lists.pair_scores`, bit for bit
    ranked   the same of what a scan found, with the ranks of ids as integers to sort

A quick score is that of a query and a row alone: in a tile a lane adds the products of one pair in the order of the
elements, in a scan a row's sums lie in vectors of their own. So no result depends on the batch.

A scan reads blocks of 32 rows of a list: vectors, or codes. Codes of 4 bits look up tables of bytes by the processor's
byte shuffle; a block has 16 bytes for each part, byte i has the codes of rows LANES[i] (low half) and LANES[i] + 16.
The tables of a query are rounded to integers whose sums fit 16 bits. Codes of 8 bits gather from tables of float32.

Source: Andre, Kermarrec and Le Scouarnec 2015, "Cache locality is not enough: high-performance nearest neighbor search
with product quantization fast scan"; the order of codes is that of FAISS's files.
Bound:  tiles multiply-add units; scan memory for vectors, shuffles for codes of 4 bits, loads for those of 8.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource, LlvmProgram
from accelerant.runtime.compilation.llvm import (
    NOINLINE,
    FunctionBuilder,
    Operand,
    Value,
    Variable,
    constant,
    lane_constants,
    lane_sums,
    program,
    suffix,
    vector,
)
from accelerant.runtime.provider import ComputeProvider

BLOCK = 64
"""Rows of a maximum."""

ROWS = 32
"""Rows of a block of a scan."""

LANES = (0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15)
"""Row of each of 16 bytes of a block of 4-bit codes: sums of even bytes are those of rows 0 to 7."""

_SHUFFLES = {
    "avx512bw": (4, "llvm.x86.avx512.pshuf.b.512"), "avx2": (2, "llvm.x86.avx2.pshuf.b"),
    "ssse3": (1, "llvm.x86.ssse3.pshuf.b.128"), "neon": (1, "llvm.aarch64.neon.tbl1.v16i8"), "": (1, ""),
}  # fmt: skip
"""Feature of the processor -> parts that one shuffle looks up, and its name; without one, bytes are loaded singly."""

_LEAST = -3.4028234663852886e38


@functools.cache
def features() -> tuple[int, str]:
    """Return the floats of a vector, and the processor's feature among those of _SHUFFLES."""
    import llvmlite.binding as llvm

    known = llvm.get_host_cpu_features()
    arm = llvm.get_process_triple().startswith(("aarch64", "arm64"))
    shuffle = "neon" if arm else next((name for name in _SHUFFLES if known.get(name)), "")
    return 16 if known.get("avx512f") else 8, shuffle


@functools.cache
def compiled(name: str, *options: str) -> tuple[ComputeProvider, Kernel]:
    """Return a kernel of the module, with its options: "tiles" mode and metric, "scan" kind and metric, others metric.

    A scan's third option is the feature of its shuffle, the processor's by default.
    """
    lanes, shuffle = features()
    if name == "scan" and len(options) == 2:
        options = (*options, shuffle)
    write, arguments = _WRITERS[name]
    kinds = ("*" if each.startswith("ptr") else "i64" for each in arguments)
    builder = LlvmProgram(
        (name, options, lanes), ("search/llvm_kernels.py",), functools.partial(write, lanes, *options),
        least_share=32 if name == "pairs" else 1,
    )  # fmt: skip
    provider = registry.create("cpu")
    return provider, provider.compile(KernelSource(f"search_{name}", {"llvm": builder}, {name: tuple(kinds)}))


def _begun(name: str, arguments: Sequence[str]) -> FunctionBuilder:
    return FunctionBuilder(name, ["i64 %begin", "i64 %end", *arguments], linkage="", attributes="nounwind")


def _lanes(kind: str) -> int:
    return int(kind[1:].partition(" ")[0])


def _fma(code: FunctionBuilder, x: Value, y: Value, z: Value) -> Value:
    return code.intrinsic(z.type, f"llvm.fmuladd.{suffix(z.type)}", x, y, z)


def _fetch(code: FunctionBuilder, address: Value) -> None:
    """Append a hint that an address will be read; it may be any."""
    code.intrinsic("void", "llvm.prefetch.p0", address, *(constant("i32", each) for each in (0, 3, 1)))


def _reduced(code: FunctionBuilder, operation: str, x: Value) -> Value:
    """Append the joined lanes of a vector: "fmin", "fmax", "add"."""
    return code.intrinsic(x.type[1:-1].split(" x ")[1], f"llvm.vector.reduce.{operation}.{suffix(x.type)}", x)


# --- tiles -----------------------------------------------------------------------------------------------------------

_TILES = (
    "ptr noalias readonly %x", "i64 %stride", "ptr noalias readonly %q", "i64 %groups", "ptr noalias readonly %extra",
    "ptr noalias %y", "i64 %N", "i64 %d",
)  # fmt: skip
"""q (groups, d, lanes), y (blocks or N, groups * lanes) float32; an index is a block of 64 rows."""


def _tiles(lanes: int, mode: str, metric: str) -> str:
    code, real = _begun("tiles", _TILES), vector("float", lanes)
    rows, widest = (8, 3) if lanes == 16 else (4, 2)  # sums that fit 32 registers, or 16
    with code.loop("%begin", "%end") as block:
        first = code.i64("mul", block, BLOCK)
        stop = code.smin(code.i64("add", first, BLOCK), "%N")
        at = code.variable("i64", 0)
        for width in range(widest, 0, -1):
            with code.loop_while(functools.partial(_fits, code, at, width)):
                g = at.get()
                peaks = [code.variable(real, float("-inf")) for _ in range(width)]
                with code.loop(first, stop, rows) as row:
                    numbers = [code.smin(code.i64("add", row, i), code.i64("sub", "%N", 1)) for i in range(rows)]
                    for number, sums in zip(numbers, _tile(code, real, numbers, g, width), strict=True):
                        for j, score in enumerate(_finished(code, metric, number, sums)):
                            if mode == "maxima":
                                peak = peaks[j].get()
                                peaks[j].set(code.select(code.compare("ogt", score, peak), score, peak))
                            else:
                                _put(code, score, number, code.i64("add", g, j))
                if mode == "maxima":
                    for j, largest in enumerate(peaks):
                        _put(code, largest.get(), block, code.i64("add", g, j))
                at.set(code.i64("add", g, width))
    code.ret()
    return program([code])


def _fits(code: FunctionBuilder, at: Variable, width: int) -> Value:
    return code.compare("sle", code.op("add", at.get(), width), "%groups")


def _tile(code: FunctionBuilder, real: str, rows: list[Value], g: Value, width: int) -> list[list[Value]]:
    """Append the products of some rows with some groups of queries, element after element."""
    lanes = _lanes(real)
    xs = [code.at("float", "%x", code.i64("mul", row, "%stride")) for row in rows]
    of_group = code.i64("mul", "%d", lanes)
    qs = [code.at("float", "%q", code.i64("mul", code.i64("add", g, j), of_group)) for j in range(width)]
    sums = [[code.variable(real, 0.0) for _ in qs] for _ in xs]
    with code.loop(0, "%d") as k:
        at = code.i64("mul", k, lanes)
        queries = [code.load(real, code.at("float", q, at), align=4) for q in qs]
        for x, of_row in zip(xs, sums, strict=True):
            value = code.broadcast(code.load("float", x, k), lanes)
            for query, total in zip(queries, of_row, strict=True):
                total.set(_fma(code, value, query, total.get()))
    return [[total.get() for total in of_row] for of_row in sums]


def _finished(code: FunctionBuilder, metric: str, row: Value, sums: list[Value]) -> list[Value]:
    """Append the scores of a row from its products: less |x|^2 under l2, by 1 / |x| under cosine."""
    if metric == "ip":
        return sums
    extra = code.broadcast(code.load("float", "%extra", row), _lanes(sums[0].type))
    return [code.op("fsub" if metric == "l2" else "fmul", each, extra) for each in sums]


def _put(code: FunctionBuilder, score: Value, row: Value, group: Value) -> None:
    lanes = _lanes(score.type)
    line = code.i64("add", code.i64("mul", row, "%groups"), group)
    code.store(score.type, score, code.at("float", "%y", code.i64("mul", line, lanes)), align=4)


# --- pairs -----------------------------------------------------------------------------------------------------------

_PAIRS = (
    "ptr noalias readonly %q", "ptr noalias readonly %x", "i64 %stride", "ptr noalias readonly %query",
    "ptr noalias readonly %row", "ptr noalias %y", "i64 %d",
)  # fmt: skip
"""q (Q, d) and x (N, d), rows of x `stride` apart, float32; query and row (P,) int64; y (P,) float32."""

_WIDE = 8

_CHAINS = 4
"""Sums of a vector that are independent."""

_AHEAD = 8
"""Pairs between one that is scored and one whose row is fetched: rows lie anywhere in memory."""


def _pairs(lanes: int, metric: str) -> str:
    code = _begun("pairs", _PAIRS)
    terms = code.stack("double", "%d", 64)
    with code.loop("%begin", "%end") as pair:
        q = code.at("float", "%q", code.i64("mul", code.load("i64", "%query", pair), "%d"))
        score = _pair_score(code, terms, q, pair, code.i64("sub", "%end", 1), metric)
        code.store("float", score, "%y", pair)
    code.ret()
    return program([code])


_RANKED = (
    "ptr noalias readonly %q", "ptr noalias readonly %x", "i64 %stride", "ptr noalias readonly %row",
    "ptr noalias readonly %counts", "ptr noalias readonly %ranks", "ptr noalias %keys", "i64 %room", "i64 %d",
)  # fmt: skip
"""row (Q, room), counts (Q,) and keys (Q, room) int64, to be sorted; ranks (N,) int64. An index is a query."""


def _ranked(lanes: int, metric: str) -> str:
    code = _begun("ranked", _RANKED)
    terms = code.stack("double", "%d", 64)
    with code.loop("%begin", "%end") as query:
        q, first = code.at("float", "%q", code.i64("mul", query, "%d")), code.i64("mul", query, "%room")
        stop = code.i64("add", first, code.load("i64", "%counts", query))
        with code.loop(first, stop) as place:
            score = _pair_score(code, terms, q, place, code.i64("sub", stop, 1), metric)
            bits = _ordered(code, code.bitcast(code.op("fadd", score, 0.0), "i32"))  # -0 is 0
            high = code.i64(
                "shl", code.convert("sext", bits if metric == "l2" else code.op("xor", bits, -1), "i64"), 32
            )
            rank = code.load("i64", "%ranks", code.load("i64", "%row", place))
            code.store("i64", code.i64("or", high, rank), "%keys", place)
        with code.loop(stop, code.i64("add", first, "%room")) as place:
            code.store("i64", 2**63 - 1, "%keys", place)  # lists.NONE
    code.ret()
    return program([code])


def _pair_score(
    code: FunctionBuilder, terms: Value, q: Value, pair: Value, last: Value, metric: str
) -> Value:  # fmt: skip
    """Append the score of a query and the row of a pair; a later pair's row is fetched."""
    x, later = _row_of(code, pair), _row_of(code, code.smin(code.i64("add", pair, _AHEAD), last))
    with code.loop(0, "%d", 16) as i:  # lines of 64 bytes
        _fetch(code, code.at("float", later, i))

    def total(a: Value, b: Value) -> Value:
        for i, kind in _runs(code, "%d"):
            u, v = (
                code.convert("fpext", code.load(_like(kind, "float"), code.at("float", each, i), align=4), "double")
                for each in (a, b)
            )
            u, v = (code.op("fsub", u, v),) * 2 if metric == "l2" else (u, v)
            code.store(kind, code.op("fmul", u, v), code.at("double", terms, i), align=8)
        return _halved(code, terms)

    score = total(q, x)
    if metric == "cosine":
        norm = code.intrinsic("double", "llvm.sqrt.f64", code.op("fmul", total(q, q), total(x, x)))
        least = Value(constant("double", 1e-300), "double")
        score = code.op("fdiv", score, code.select(code.compare("olt", norm, least), least, norm))
    return code.convert("fptrunc", score, "float")


def _row_of(code: FunctionBuilder, pair: Value) -> Value:
    return code.at("float", "%x", code.i64("mul", code.load("i64", "%row", pair), "%stride"))


def _like(kind: str, element: str) -> str:
    return kind.replace("double", element)


def _runs(code: FunctionBuilder, count: Operand) -> Iterator[tuple[Value, str]]:
    """Append loops over so many elements, by vectors and then singly; yields the first of each and the type."""
    whole = code.i64("sub", count, code.i64("and", count, _WIDE - 1))
    with code.loop(0, whole, _WIDE) as i:
        yield i, vector("double", _WIDE)
    with code.loop(whole, count) as i:
        yield i, "double"


def _halved(code: FunctionBuilder, terms: Value) -> Value:
    """Append the sum of d terms as `lists._sum` has it: in 128 lanes, whose second half is added to the first."""

    def add(first: Operand, count: Value) -> None:
        for i, kind in _runs(code, count):
            at = code.at("double", terms, i)
            other = code.load(kind, code.at("double", terms, code.i64("add", first, i)), align=8)
            code.store(kind, code.op("fadd", code.load(kind, at, align=8), other), at, align=8)

    with code.loop(128, "%d", 128) as first:
        add(first, code.smin(code.i64("sub", "%d", first), 128))
    n = code.smin("%d", 128)
    for half in (64, 32, 16, 8, 4, 2, 1):
        fewer = code.smin(n, half)
        add(half, code.i64("sub", n, fewer))
        n = fewer
    return code.load("double", terms)


# --- scan ------------------------------------------------------------------------------------------------------------

_SCAN = (
    "ptr noalias readonly %q", "ptr noalias readonly %data", "i64 %stride", "ptr noalias readonly %extra",
    "ptr noalias readonly %seen", "i64 %of_query", "ptr noalias readonly %first_rows",
    "ptr noalias readonly %first_blocks", "ptr noalias readonly %probes", "ptr noalias readonly %offsets",
    "ptr noalias readonly %bias", "ptr noalias readonly %limits", "ptr noalias readonly %margins",
    "ptr noalias %scores", "ptr noalias %rows", "ptr noalias %counts", "i64 %wanted", "i64 %room", "i64 %d", "i64 %N",
    "ptr noalias readonly %centroids", "i64 %parts", "ptr noalias %tables", "ptr noalias %bytes", "i64 %levels",
)  # fmt: skip
"""An index is a query; lists.py describes the arrays."""


def _scan(lanes: int, kind: str, metric: str, shuffle: str) -> str:
    code = _begun("scan", _SCAN)
    _ScanWriter(code, lanes, kind, metric, shuffle).write()
    code.ret()
    return program([_kept(lanes), code])


class _ScanWriter:
    """Writes the scan. A query keeps up to `room` rows, and as they are full those below its new limit are dropped."""

    def __init__(self, code: FunctionBuilder, lanes: int, kind: str, metric: str, shuffle: str) -> None:
        self.code, self.lanes, self.kind, self.metric = code, lanes, kind, metric
        self.real = vector("float", lanes)
        self.units, self.lookup = _SHUFFLES[shuffle]
        self.block_scores = code.stack("float", ROWS, 64)
        self.new_limit = code.stack("float")

    def write(self) -> None:
        """Append the loops over queries, lists and blocks."""
        code = self.code
        with code.loop("%begin", "%end") as query:
            self.q = code.at("float", "%q", code.i64("mul", query, "%d"))
            self.query, kept = query, code.i64("mul", query, "%room")
            self.scores, self.rows = code.at("float", "%scores", kept), code.at("i64", "%rows", kept)
            self.count, self.full = code.variable("i64", 0), code.variable("i64", 0)
            self.limit = code.variable("float", code.load("float", "%limits", query))
            self.margin = code.load("float", "%margins", query)
            self.base, self.scale = (code.variable("float", 0.0) for _ in range(2))
            if self.kind != "flat":
                self._tables()
            seen = code.at("i32", "%seen", code.i64("mul", query, "%of_query"))
            last = code.load("i64", "%offsets", code.i64("add", query, 1))
            with code.loop(code.load("i64", "%offsets", query), last) as probe:
                self._list(probe, seen)
            with code.when(code.compare("sgt", self.count.get(), "%wanted")):
                self._drop()
            full = code.compare("ne", self.full.get(), 0)
            code.store("i64", code.select(full, -1, self.count.get()), "%counts", query)

    def _list(self, probe: Value, seen: Value) -> None:
        """Append the blocks of a list of which the query may see rows."""
        code = self.code
        at = code.load("i64", "%probes", probe)
        start, row = code.load("i64", "%first_blocks", at), code.load("i64", "%first_rows", at)
        if self.kind != "flat":
            self.bias = code.op("fadd", self.base.get(), code.load("float", "%bias", probe))
        with code.loop(start, code.load("i64", "%first_blocks", code.i64("add", at, 1))) as block:
            word = code.load("i32", seen, block)
            with code.when(code.compare("ne", word, 0)):
                first = code.i64("add", row, code.i64("mul", code.i64("sub", block, start), ROWS))
                parts = {"flat": self._vectors, "4": self._nibbles, "8": self._bytes}[self.kind](first, block)
                parts = self._finished(parts, first)
                hits = Value("0", "i32")
                for i, part in enumerate(parts):
                    lanes = _lanes(part.type)
                    near = code.compare("oge", part, code.broadcast(self.limit.get(), lanes))
                    bits = code(f"zext i{lanes} {code.bitcast(near, f'i{lanes}')} to i32", "i32")
                    hits = code.op("or", code.op("shl", bits, i * lanes), hits)
                hits = code.op("and", hits, word)
                with code.when(code.compare("ne", hits, 0)):
                    self._keep(parts, hits, first)

    def _finished(self, parts: list[Value], first: Value) -> list[Value]:
        if self.metric == "ip":
            return parts
        found, at = [], first
        for part in parts:
            extra = _at(self.code, part.type, "%extra", at)
            found.append(self.code.op("fsub" if self.metric == "l2" else "fmul", part, extra))
            at = self.code.i64("add", at, _lanes(part.type))
        return found

    def _keep(self, parts: list[Value], hits: Value, first: Value) -> None:
        """Append the rows of a block whose bits are set to those that are kept."""
        code, left = self.code, self.code.variable("i32", hits)
        with code.when(self._crowded()):
            self._drop()
            with code.when(self._crowded()):  # too many within the margin: the caller tries again with more room
                self.full.set(1)
                self.limit.set(float("inf"))
                left.set(0)
        at = 0
        for part in parts:
            code.store(part.type, part, code.at("float", self.block_scores, at), align=4)
            at += _lanes(part.type)
        with code.loop_while(lambda: code.compare("ne", left.get(), 0)):
            bits = left.get()
            lane = code.convert("zext", code.intrinsic("i32", "llvm.cttz.i32", bits, constant("i1", True)), "i64")
            count = self.count.get()
            code.store("float", code.load("float", self.block_scores, lane), self.scores, count)
            code.store("i64", code.i64("add", first, lane), self.rows, count)
            self.count.set(code.i64("add", count, 1))
            left.set(code.op("and", bits, code.op("sub", bits, 1)))

    def _crowded(self) -> Value:
        return self.code.compare("sgt", self.code.i64("add", self.count.get(), ROWS), "%room")

    def _drop(self) -> None:
        code = self.code
        arguments = (self.scores, self.rows, self.count.get(), Value("%wanted", "i64"), self.margin, self.new_limit)
        self.count.set(code.call("i64", "kept", *arguments))
        self.limit.set(code.load("float", self.new_limit))

    # --- scores of a block -------------------------------------------------------------------------------------------

    def _vectors(self, first: Value, block: Value) -> list[Value]:
        """Append the products of the query with 32 vectors, one after the other: memory is read in its order."""
        code, height, last = self.code, 8, self.code.i64("sub", "%N", 1)
        left, wide = code.i64("srem", "%d", self.lanes), code.i64("and", "%d", -_CHAINS * self.lanes)
        full = code.i64("sub", "%d", left)
        inside = code.compare("slt", lane_constants("i64", range(self.lanes)), code.broadcast(left, self.lanes))
        found = []
        for start in range(0, ROWS, height):
            totals = []
            for i in range(start, start + height):
                x = code.at("float", "%data", code.i64("mul", code.smin(code.i64("add", first, i), last), "%stride"))
                sums = [code.variable(self.real, 0.0) for _ in range(_CHAINS)]

                def add(k: Value, some: list[Variable], x: Value = x) -> None:
                    for j, total in enumerate(some):
                        at = code.i64("add", k, j * self.lanes)
                        total.set(
                            _fma(code, _at(code, self.real, self.q, at), _at(code, self.real, x, at), total.get())
                        )

                with code.loop(0, wide, _CHAINS * self.lanes) as k:
                    add(k, sums)
                with code.loop(wide, full, self.lanes) as k:
                    add(k, sums[:1])
                with code.when(code.compare("sgt", left, 0)):
                    query, value = (
                        code.masked_load(self.real, code.at("float", y, full), inside, 4) for y in (self.q, x)
                    )
                    sums[0].set(_fma(code, query, value, sums[0].get()))
                pairs = [code.op("fadd", sums[j].get(), sums[j + 1].get()) for j in range(0, _CHAINS, 2)]
                totals.append(code.op("fadd", *pairs))
            found.append(lane_sums(code, totals))
        return found

    def _nibbles(self, first: Value, block: Value) -> list[Value]:
        """Append the sums of the bytes that 4-bit codes look up."""
        code, width = self.code, 16 * self.units
        codes = code.at("i8", "%data", code.i64("mul", block, "%stride"))
        sums = [code.variable(vector("i16", width // 2), 0) for _ in range(4)]
        with code.loop(0, "%stride", width) as at:
            kind = vector("i8", width)
            both, table = _at(code, kind, codes, at, "i8"), code.at("i8", self.table, at)
            for i, half in enumerate((code.op("and", both, 15), code.op("lshr", both, 4))):
                found = code.bitcast(self._looked_up(table, half), sums[0].type)
                sums[2 * i].set(code.op("add", sums[2 * i].get(), found))  # the odd bytes are subtracted below
                sums[2 * i + 1].set(code.op("add", sums[2 * i + 1].get(), code.op("lshr", found, 8)))
        parts, scale, bias = [], code.broadcast(self.scale.get(), 8), code.broadcast(self.bias, 8)
        for even, odd in ((sums[0], sums[1]), (sums[2], sums[3])):
            for total in (code.op("sub", even.get(), code.op("shl", odd.get(), 8)), odd.get()):
                while total.type != vector("i16", 8):
                    lanes = _lanes(total.type) // 2
                    total = code.op("add", *(code.shuffle(total, None, range(at, at + lanes)) for at in (0, lanes)))
                wide = code.convert("uitofp", code.convert("zext", total, "i32"), "float")
                parts.append(_fma(code, wide, scale, bias))
        return parts

    def _looked_up(self, table: Value, index: Value) -> Value:
        code = self.code
        if self.lookup:
            return code.intrinsic(index.type, self.lookup, code.load(index.type, table, align=1), index)
        found = Value("poison", index.type)
        for lane in range(16):
            byte = code.load("i8", table, code.convert("zext", code.lane(index, lane), "i64"))
            found = code(f"insertelement {index.type} {found}, i8 {byte}, i64 {lane}", index.type)
        return found

    def _bytes(self, first: Value, block: Value) -> list[Value]:
        """Append the sums of the numbers that 8-bit codes look up."""
        code, count = self.code, ROWS // self.lanes
        codes = code.at("i8", "%data", code.i64("mul", block, "%stride"))
        sums = [code.variable(self.real, code.broadcast(self.bias, self.lanes)) for _ in range(count)]
        pointers, every = vector("ptr", self.lanes), constant(vector("i1", self.lanes), True)
        with code.loop(0, "%parts") as part:
            table = code.at("float", self.numbers, code.i64("mul", part, 256))
            of_part = code.i64("mul", part, ROWS)
            for i, total in enumerate(sums):
                index = code.convert(
                    "zext",
                    _at(code, vector("i8", self.lanes), codes, code.i64("add", of_part, i * self.lanes), "i8"),
                    "i32",
                )
                places = code(f"getelementptr float, ptr {table}, {code.typed(index)}", pointers)
                found = code.intrinsic(
                    self.real, f"llvm.masked.gather.{suffix(self.real)}.{suffix(pointers)}", places, constant("i32", 4),
                    every, constant(self.real, 0),
                )  # fmt: skip
                total.set(code.op("fadd", total.get(), found))
        return [total.get() for total in sums]

    # --- tables ------------------------------------------------------------------------------------------------------

    def _tables(self) -> None:
        """Append the query's products with the centroids of each part; those of 4-bit codes are rounded to bytes."""
        code, size = self.code, 16 if self.kind == "4" else 256
        numbers = code.i64("mul", "%parts", size)
        self.numbers = code.at("float", "%tables", code.i64("mul", self.query, numbers))
        width = code.i64("sdiv", "%d", "%parts")
        spread = code.variable("float", 0.0)
        with code.loop(0, "%parts") as part:
            from_ = code.i64("mul", part, width)
            totals = [code.variable(self.real, 0.0) for _ in range(min(size, 16) // self.lanes)]
            with code.loop(0, size, 16) as column:
                for total in totals:
                    total.set(0.0)
                with code.loop(0, width) as j:
                    x = code.broadcast(code.load("float", self.q, code.i64("add", from_, j)), self.lanes)
                    line = code.i64("add", code.i64("mul", code.i64("add", from_, j), size), column)
                    for i, total in enumerate(totals):
                        centroids = _at(code, self.real, "%centroids", code.i64("add", line, i * self.lanes))
                        total.set(_fma(code, x, centroids, total.get()))
                found = [total.get() for total in totals]
                if self.kind == "4":
                    low, high = (self._joined(way, found) for way in ("fmin", "fmax"))
                    self.base.set(code.op("fadd", self.base.get(), low))
                    range_ = code.op("fsub", high, low)
                    spread.set(code.select(code.compare("ogt", range_, spread.get()), range_, spread.get()))
                    found = [code.op("fsub", each, code.broadcast(low, self.lanes)) for each in found]
                at = code.i64("add", code.i64("mul", part, size), column)
                for i, each in enumerate(found):
                    code.store(
                        self.real, each, code.at("float", self.numbers, code.i64("add", at, i * self.lanes)), align=4
                    )
        if self.kind == "4":
            self._rounded(numbers, spread.get())

    def _joined(self, way: str, found: list[Value]) -> Value:
        """Append the least or the largest lane of some vectors."""
        relation, total = "olt" if way == "fmin" else "ogt", _reduced(self.code, way, found[0])
        for each in found[1:]:
            x = _reduced(self.code, way, each)
            total = self.code.select(self.code.compare(relation, x, total), x, total)
        return total

    def _rounded(self, numbers: Value, spread: Value) -> None:
        """Append the table in bytes: 0 to `levels` for the widest spread of a part."""
        code = self.code
        levels = code("sitofp i64 %levels to float", "float")
        some = code.compare("ogt", spread, 2.0**-100)
        factor = code.select(some, code.op("fdiv", levels, code.select(some, spread, 1.0)), 0.0)
        self.scale.set(code.op("fdiv", spread, levels))
        parts = code("sitofp i64 %parts to float", "float")
        self.margin = code.op("fadd", self.margin, code.op("fmul", parts, self.scale.get()))  # half a step a part
        self.table = code.at("i8", "%bytes", code.i64("mul", self.query, "%stride"))
        factors, half = code.broadcast(factor, self.lanes), constant(self.real, 0.5)
        with code.loop(0, numbers, self.lanes) as i:
            x = _fma(code, _at(code, self.real, self.numbers, i), factors, half)
            rounded = code.convert("trunc", code.convert("fptosi", x, "i32"), "i8")
            code.store(rounded.type, rounded, code.at("i8", self.table, i), align=1)


def _at(code: FunctionBuilder, kind: str, array: Operand, at: Operand, element: str = "float") -> Value:
    """Append the load of a vector that begins at an element."""
    return code.load(kind, code.at(element, array, at), align=1 if element == "i8" else 4)


def _kept(lanes: int) -> FunctionBuilder:
    """Return the function that drops the rows below the `wanted`-th largest score less a margin; returns how many stay.

    The score is found bit by bit: floats in an order of integers, of which those at least as large are counted.
    """
    arguments = ["ptr %scores", "ptr %rows", "i64 %count", "i64 %wanted", "float %margin", "ptr %limit"]
    code, kind = FunctionBuilder("kept", arguments, "i64", attributes=NOINLINE), vector("i32", lanes)
    whole = code.i64("and", code.i64("add", "%count", lanes - 1), -lanes)
    with code.loop("%count", whole) as i:
        code.store("float", float("-inf"), "%scores", i)
    found = code.variable("i32", -(2**31))
    with code.countdown(32) as bit:
        tried = code.op("add", found.get(), code.op("shl", Value("1", "i32"), code(f"trunc i64 {bit} to i32", "i32")))
        several, larger = code.broadcast(tried, lanes), code.variable(kind, 0)
        with code.loop(0, whole, lanes) as i:
            bits = _at(code, kind, "%scores", i)
            near = code.compare("sge", _ordered(code, bits), several)
            larger.set(code.op("sub", larger.get(), code.convert("sext", near, "i32")))
        count = code.convert("sext", _reduced(code, "add", larger.get()), "i64")
        found.set(code.select(code.compare("sge", count, "%wanted"), tried, found.get()))
    last = code.bitcast(_ordered(code, found.get()), "float")
    limit = code.op("fsub", last, "%margin")
    limit = code.select(code.compare("olt", limit, _LEAST), Value(constant("float", _LEAST), "float"), limit)
    stay = code.variable("i64", 0)
    with code.loop(0, "%count") as i:
        score, to = code.load("float", "%scores", i), stay.get()
        code.store("float", score, "%scores", to)
        code.store("i64", code.load("i64", "%rows", i), "%rows", to)
        stay.set(code.i64("add", to, code(f"zext i1 {code.compare('oge', score, limit)} to i64", "i64")))
    code.store("float", limit, "%limit")
    code.ret(stay.get())
    return code


def _ordered(code: FunctionBuilder, bits: Value) -> Value:
    """Append integers in the order of the floats that have these bits; its own inverse."""
    return code.op("xor", bits, code.op("lshr", code.op("ashr", bits, 31), 1))


_WRITERS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "tiles": (_tiles, _TILES), "scan": (_scan, _SCAN), "pairs": (_pairs, _PAIRS), "ranked": (_ranked, _RANKED),
}  # fmt: skip
