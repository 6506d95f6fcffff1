"""Search on a CPU as LLVM IR: quick scores of blocks of rows, scans of lists, and the scores of answers.

    tiles        maxima of the quick scores of 64 rows, or all scores, for queries in the lanes of vectors
    scan         a search: the lists nearest to a query, their rows whose quick score is among the `wanted` largest,
                 less a margin, and the k best of these by exact scores, ties by slot
    scan_blocks  the rows alone, of the blocks that tiles chose
    pairs        the scores of `lists.pair_scores`, bit for bit

A quick score is that of a query and a row alone: in a tile a lane adds the products of one pair in the order of the
elements, in a scan a row's sums lie in vectors of their own. So no result depends on the batch.

A filter is a byte or a bit for each slot (lists.Scan), looked up for the rows of the lists that are read; the vectors
that it hides are not. A scan reads blocks of 32 rows of a list: vectors, or codes. Codes of 4 bits look up tables of
bytes by the processor's byte shuffle; a block has 16 bytes for each part, byte i has the codes of rows LANES[i] (low
half) and LANES[i] + 16. The tables of a query are rounded to integers whose sums fit 16 bits. Codes of 8 bits gather
from tables of float32.

Source: Andre, Kermarrec and Le Scouarnec 2015, "Cache locality is not enough: high-performance nearest neighbor search
with product quantization fast scan"; the order of codes is that of FAISS's files.
Bound:  tiles multiply-add units; scan memory for vectors, shuffles for codes of 4 bits, loads for those of 8.
"""

from __future__ import annotations

import functools
import struct
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
    """Return a kernel, with its options: "tiles" mode and metric, "scan" kind, metric and source, others metric."""
    lanes, shuffle = features()
    if name == "scan":
        options = (*options, shuffle)
    write, arguments = _WRITERS[name]
    kinds = ("*" if each.startswith("ptr") and name != "scan" else "i64" for each in arguments)  # scan: an address
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


def _fetch(code: FunctionBuilder, row: Value, d: Operand) -> None:
    """Append hints that a row of d floats will be read."""
    with code.loop(0, d, 16) as i:  # lines of 64 bytes
        hints = (constant("i32", each) for each in (0, 3, 1))
        code.intrinsic("void", "llvm.prefetch.p0", code.at("float", row, i), *hints)


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

_CHAINS = 2
"""Sums of a vector that are independent."""

_AHEAD = 8
"""Pairs between one that is scored and one whose row is fetched: rows lie anywhere in memory."""


def _pairs(lanes: int, metric: str) -> str:
    code = _begun("pairs", _PAIRS)
    terms = code.stack("double", "%d", 64)
    with code.loop("%begin", "%end") as pair:
        rows = (code.load("i64", "%row", each) for each in (pair, _later(code, pair, "%end")))
        x, later = (code.at("float", "%x", code.i64("mul", row, "%stride")) for row in rows)
        _fetch(code, later, "%d")
        q = code.at("float", "%q", code.i64("mul", code.load("i64", "%query", pair), "%d"))
        code.store("float", _pair_score(code, terms, q, x, "%d", metric), "%y", pair)
    code.ret()
    return program([code])


def _later(code: FunctionBuilder, at: Value, stop: Operand) -> Value:
    return code.smin(code.i64("add", at, _AHEAD), code.i64("sub", stop, 1))


def _pair_score(code: FunctionBuilder, terms: Value, q: Value, x: Value, d: Operand, metric: str) -> Value:
    """Append the score of a query and a row; terms: room for d doubles."""

    def total(a: Value, b: Value) -> Value:
        for i, kind in _runs(code, d):
            u, v = (
                code.convert("fpext", code.load(_like(kind, "float"), code.at("float", each, i), align=4), "double")
                for each in (a, b)
            )
            u, v = (code.op("fsub", u, v),) * 2 if metric == "l2" else (u, v)
            code.store(kind, code.op("fmul", u, v), code.at("double", terms, i), align=8)
        return _halved(code, terms, d)

    score = total(q, x)
    if metric == "cosine":
        norm = code.intrinsic("double", "llvm.sqrt.f64", code.op("fmul", total(q, q), total(x, x)))
        least = Value(constant("double", 1e-300), "double")
        score = code.op("fdiv", score, code.select(code.compare("olt", norm, least), least, norm))
    return code.convert("fptrunc", score, "float")


def _like(kind: str, element: str) -> str:
    return kind.replace("double", element)


def _runs(code: FunctionBuilder, count: Operand) -> Iterator[tuple[Value, str]]:
    """Append loops over so many elements, by vectors and then singly; yields the first of each and the type."""
    whole = code.i64("sub", count, code.i64("and", count, _WIDE - 1))
    with code.loop(0, whole, _WIDE) as i:
        yield i, vector("double", _WIDE)
    with code.loop(whole, count) as i:
        yield i, "double"


def _halved(code: FunctionBuilder, terms: Value, d: Operand) -> Value:
    """Append the sum of d terms as `lists._sum` has it: in 128 lanes, whose second half is added to the first."""

    def add(first: Operand, count: Value) -> None:
        for i, kind in _runs(code, count):
            at = code.at("double", terms, i)
            other = code.load(kind, code.at("double", terms, code.i64("add", first, i)), align=8)
            code.store(kind, code.op("fadd", code.load(kind, at, align=8), other), at, align=8)

    with code.loop(128, d, 128) as first:
        add(first, code.smin(code.i64("sub", d, first), 128))
    n = code.smin(d, 128)
    for half in (64, 32, 16, 8, 4, 2, 1):
        fewer = code.smin(n, half)
        add(half, code.i64("sub", n, fewer))
        n = fewer
    return code.load("double", terms)


# --- scan ------------------------------------------------------------------------------------------------------------
_NULL = Value("null", "ptr")

_HEIGHT = 8
"""Rows of vectors that are scored together."""

FIELDS = {
    "data": "ptr", "stride": "i64", "extra": "ptr", "starts": "ptr", "lists": "i64", "N": "i64", "largest": "double",
    "vectors": "ptr", "row": "i64", "slots": "ptr", "coarse": "ptr", "columns": "i64", "squares": "ptr",
    "first_blocks": "ptr", "centroids": "ptr", "parts": "i64", "levels": "i64", "codes": "ptr", "code_bytes": "i64",
    "residual": "i64", "list_of": "ptr",
}  # fmt: skip
"""Fields of 8 bytes of a plan; lists.Scan describes them."""

_SCAN = (
    "ptr noalias readonly %plan", "ptr noalias readonly %q", "ptr noalias readonly %marks", "i64 %of_query",
    "i64 %shift", "ptr noalias readonly %given", "i64 %number", "ptr noalias readonly %products",
    "ptr noalias %scratch", "i64 %size", "i64 %wanted", "i64 %room", "i64 %nprobe", "i64 %k", "i64 %d",
    "ptr noalias %scores", "ptr noalias %ids", "ptr noalias %counts",
)  # fmt: skip
CALL = struct.Struct(f"{len(_SCAN)}q")
_CALL = ("ptr noalias readonly %call",)
"""The argument of a scan: one address is passed in less time than 18 numbers."""

_SCAN_BLOCKS = (
    "ptr noalias readonly %plan", "ptr noalias readonly %q", "ptr noalias readonly %probes",
    "ptr noalias readonly %offsets", "ptr noalias readonly %limits", "ptr noalias readonly %margins",
    "ptr noalias %scores", "ptr noalias %rows", "ptr noalias %counts", "i64 %wanted", "i64 %room", "i64 %d",
)  # fmt: skip
"""An index is a query; lists.py describes the arrays."""


def _scan(lanes: int, kind: str, metric: str, source: str, shuffle: str) -> str:
    code = FunctionBuilder("ranked", ["i64 %begin", "i64 %end", *_SCAN])
    _ScanWriter(code, lanes, kind, metric, shuffle).ranked(decodes=source == "codes")
    code.ret()
    entry = _begun("scan", _CALL)
    fields = (entry.load(each.partition(" ")[0], entry.at("i64", "%call", i)) for i, each in enumerate(_SCAN))
    entry.call("void", "ranked", "%begin", "%end", *fields)
    entry.ret()
    return program([_kept(lanes), _sorted(), code, entry])


def _scan_blocks(lanes: int, metric: str) -> str:
    code = _begun("scan_blocks", _SCAN_BLOCKS)
    _ScanWriter(code, lanes, "flat", metric, "").of_blocks()
    code.ret()
    return program([_kept(lanes), code])


class _ScanWriter:
    """Writes the scan. A query keeps up to `room` rows, and as they are full those below its new limit are dropped."""

    def __init__(self, code: FunctionBuilder, lanes: int, kind: str, metric: str, shuffle: str) -> None:
        self.code, self.lanes, self.kind, self.metric = code, lanes, kind, metric
        self.real = vector("float", lanes)
        self.units, self.lookup = _SHUFFLES[shuffle]
        self.plan = {name: code.load(type, code.at("i64", "%plan", i)) for i, (name, type) in enumerate(FIELDS.items())}
        self.block_scores, self.new_limit = code.stack("float", ROWS, 64), code.stack("float")
        self.pending = code.stack("i64", 2 * ROWS, 64)
        """Rows of which _HEIGHT are scored at once."""
        self.count, self.full, self.waiting = (code.variable("i64", 0) for _ in range(3))
        self.limit, self.margin, self.base, self.scale = (code.variable("float", 0.0) for _ in range(4))

    def of_blocks(self) -> None:
        """Append the scans of the blocks that each query names."""
        code = self.code
        with code.loop("%begin", "%end") as query:
            kept = code.i64("mul", query, "%room")
            self.q = code.at("float", "%q", code.i64("mul", query, "%d"))
            self.scores, self.rows = code.at("float", "%scores", kept), code.at("i64", "%rows", kept)
            self._reset(code.load("float", "%limits", query), code.load("float", "%margins", query))
            last = code.load("i64", "%offsets", code.i64("add", query, 1))
            with code.loop(code.load("i64", "%offsets", query), last) as probe:
                self._list(code.load("i64", "%probes", probe), None, None)
            self._last()
            full = code.compare("ne", self.full.get(), 0)
            code.store("i64", code.select(full, -1, self.count.get()), "%counts", query)

    def ranked(self, *, decodes: bool) -> None:
        """Append the scans of the lists nearest to each query, and the order of what they keep, by exact scores."""
        code = self.code
        terms, decoded = code.stack("double", "%d", 64), code.stack("float", "%d", 64) if decodes else None
        with code.loop("%begin", "%end") as query:
            self.q = code.at("float", "%q", code.i64("mul", query, "%d"))
            scratch, at = code.at("i8", "%scratch", code.i64("mul", query, "%size")), Value("0", "i64")
            pieces = []
            for element, count in (
                ("i64", "%room"), ("i64", "%room"), ("i64", self.plan["columns"]), ("float", "%room"),
                ("float", self.plan["columns"]), ("float", code.i64("mul", self.plan["parts"], self._codes())),
            ):  # fmt: skip
                pieces.append(code.at("i8", scratch, at))
                at = code.i64("add", at, code.i64("mul", count, 8 if element == "i64" else 4))
            keys, self.rows, probes, self.scores, near, self.numbers = pieces
            self.table = code.at("i8", scratch, at)
            self._reset(_LEAST, 0.0)
            usual = self._margin()
            code.store("i64", -2, "%counts", query)
            with code.when(usual):
                seen = code.at("i8", "%marks", code.i64("mul", query, "%of_query"))
                with code.when(code.compare("sgt", "%nprobe", 0)):
                    self._choose(query, near, probes)
                if self.kind != "flat":
                    self._tables()
                with code.loop(0, "%nprobe") as probe:
                    key = code.load("i64", probes, probe)
                    at = code.i64("and", key, 0xFFFFFFFF)
                    self._list(at, seen, None if self.kind == "flat" else self._bias(key, at))
                if self.kind == "flat":
                    for given in code.branches(code.compare("ne", "%given", _NULL)):
                        if given:
                            self._given_rows()
                        else:
                            self._list(self.plan["lists"], seen, None)
                self._last()
                self._rank(terms, decoded, keys)
                self._give(query, keys)

    def _reset(self, limit: Operand, margin: Operand) -> None:
        for variable, value in (
            (self.limit, limit), (self.margin, margin), (self.base, 0.0), (self.scale, 0.0), (self.count, 0),
            (self.full, 0), (self.waiting, 0),
        ):  # fmt: skip
            variable.set(value)

    def _codes(self) -> int:
        return {"flat": 0, "4": 16, "8": 256}[self.kind]

    def _margin(self) -> Value:
        """Append twice the errors of quick scores, and of rounding exact ones; return whether the norm is usual."""
        code, total = self.code, self.code.variable("double", 0.0)
        with code.loop(0, "%d") as i:
            x = code.convert("fpext", code.load("float", self.q, i), "double")
            total.set(code.op("fadd", total.get(), code.op("fmul", x, x)))
        norm, largest = code.intrinsic("double", "llvm.sqrt.f64", total.get()), self.plan["largest"]
        bound = code.op("fmul", norm, largest)
        if self.metric == "l2":  # of q . x - |x|^2 / 2
            both = code.op("fadd", norm, largest)
            bound = code.op("fmul", code.op("fmul", both, both), 0.5)
        d = code("sitofp i64 %d to double", "double")
        share = code.op("fmul", code.op("fadd", d, 16.0), 4.2 * 2.0**-24)
        error = code.op("fadd", code.op("fmul", share, bound), code.op("fmul", d, 4.2e-37))
        self.margin.set(code.convert("fptrunc", error, "float"))
        return code.compare("olt", norm, 1e19)

    def _choose(self, query: Value, near: Value, probes: Value) -> None:
        """Append the choice of lists: keys of scores, the nearest first, and of lists."""
        code, lists, columns = self.code, self.plan["lists"], self.plan["columns"]
        for here in code.branches(code.compare("eq", "%products", _NULL)):
            if here:
                self._products(self.q, self.plan["coarse"], "%d", columns, near)
            with code.loop(0, lists) as at:
                if here:
                    score = code.load("float", near, at)
                    if self.metric == "l2":
                        score = code.op("fsub", score, code.load("float", self.plan["squares"], at))
                        code.store("float", score, near, at)
                else:
                    score = code.load("float", "%products", code.i64("add", code.i64("mul", query, lists), at))
                    code.store("float", score, near, at)
        with code.loop(0, lists) as at:
            code.store("i64", at, probes, at)
        count = code.variable("i64", lists)
        with code.when(code.compare("slt", "%nprobe", lists)):
            margin = Value(constant("float", 0.0), "float")
            arguments = (near, probes, lists, Value("%nprobe", "i64"), margin, self.new_limit)
            count.set(code.call("i64", "kept", *arguments))
        with code.loop(0, count.get()) as i:
            score, at = code.load("float", near, i), code.load("i64", probes, i)
            code.store("i64", self._key(score, at, rises=False), probes, i)
        code.call("void", "sorted", probes, count.get())

    def _key(self, score: Value, number: Value, *, rises: bool) -> Value:
        """Append an integer in the order of scores, the best first, and then of numbers below 2^32."""
        code = self.code
        bits = _ordered(code, code.bitcast(code.op("fadd", score, 0.0), "i32"))  # -0 is 0
        high = code.convert("sext", bits if rises else code.op("xor", bits, -1), "i64")
        return code.i64("or", code.i64("shl", high, 32), number)

    def _score(self, key: Value, *, rises: bool) -> Value:
        bits = self.code.convert("trunc", self.code.i64("ashr", key, 32), "i32")
        return self.code.bitcast(_ordered(self.code, bits if rises else self.code.op("xor", bits, -1)), "float")

    def _bias(self, key: Value, at: Value) -> Value:
        """Append the query's product with a list's centroid, where codes are of differences to it."""
        code, total = self.code, self.code.variable("float", self._score(key, rises=False))
        if self.metric == "l2":
            total.set(code.op("fadd", total.get(), code.load("float", self.plan["squares"], at)))
        with code.when(code.compare("eq", self.plan["residual"], 0)):
            total.set(0.0)
        return total.get()

    def _list(self, at: Value, seen: Value | None, bias: Value | None) -> None:
        """Append the rows of a list of which the query may see rows."""
        code = self.code
        bounds = [code.load("i64", self.plan["starts"], each) for each in (at, code.i64("add", at, 1))]
        number = code.i64("sub", bounds[1], bounds[0])
        if bias is not None:
            self.bias = code.op("fadd", self.base.get(), bias)
            block = code.load("i64", self.plan["first_blocks"], at)
        with code.loop(0, number, ROWS) as i:
            first, left = code.i64("add", bounds[0], i), code.i64("sub", number, i)
            ones = code.i64("lshr", -1, code.i64("sub", 64, code.smin(left, ROWS)))
            word = code.variable("i32", code.convert("trunc", ones, "i32"))
            if seen is not None:
                with code.when(code.compare("ne", "%marks", _NULL)):
                    self._see(word, seen, first, left)
            with code.when(code.compare("ne", word.get(), 0)):
                if bias is None:
                    self._append(word, first)
                else:
                    index = code.i64("add", block, code.i64("sdiv", i, ROWS))
                    self._block(word.get(), first, index)

    def _see(self, word: Variable, seen: Value, first: Value, left: Value) -> None:
        """Append the bits of the rows that the query may see."""
        code, slots = self.code, self.plan["slots"]
        for plain in code.branches(code.compare("eq", slots, _NULL)):
            if plain:
                inside = code.bitcast(word.get(), vector("i1", ROWS))
                marks = code.masked_load(vector("i8", ROWS), code.at("i8", seen, first), inside, 1)
                word.set(code.bitcast(code.compare("ne", marks, 0), "i32"))
                continue
            word.set(0)
            with code.loop(0, code.smin(left, ROWS)) as lane:
                slot = code.load("i64", slots, code.i64("add", first, lane))
                byte = code.convert("zext", code.load("i8", seen, code.i64("lshr", slot, "%shift")), "i64")
                place = code.i64("and", slot, code.i64("sub", code.i64("shl", 1, "%shift"), 1))
                bit = code.i64("and", code.i64("lshr", byte, place), 1)
                word.set(code.op("or", word.get(), code.convert("trunc", code.i64("shl", bit, lane), "i32")))

    def _append(self, word: Variable, first: Value) -> None:
        """Append the rows of a word's bits to those that wait for their scores."""
        code, waiting = self.code, self.waiting
        for dense in code.branches(code.compare("eq", word.get(), -1)):
            if dense:
                for i in range(0, ROWS, _HEIGHT):
                    rows = code.op("add", code.broadcast(first, _HEIGHT), lane_constants("i64", range(i, i + _HEIGHT)))
                    place = code.at("i64", self.pending, code.i64("add", waiting.get(), i))
                    code.store(rows.type, rows, place, align=8)
                waiting.set(code.i64("add", waiting.get(), ROWS))
            else:
                with code.loop_while(lambda: code.compare("ne", word.get(), 0)):
                    self._wait(code.i64("add", first, self._lowest(word)))
        self._score_waiting()

    def _given_rows(self) -> None:
        """Append the rows that are given, in any order."""
        code = self.code
        with code.loop(0, "%number", ROWS) as i:
            with code.loop(i, code.smin(code.i64("add", i, ROWS), "%number")) as at:
                self._wait(code.load("i64", "%given", at))
            self._score_waiting()

    def _wait(self, row: Value) -> None:
        code, waiting = self.code, self.waiting.get()
        code.store("i64", row, self.pending, waiting)
        self.waiting.set(code.i64("add", waiting, 1))
        _fetch(code, self._vector(row), "%d")

    def _lowest(self, word: Variable) -> Value:
        """Append the number of the lowest bit of a word, which it loses."""
        code, bits = self.code, word.get()
        word.set(code.op("and", bits, code.op("sub", bits, 1)))
        return code.convert("zext", code.intrinsic("i32", "llvm.cttz.i32", bits, constant("i1", True)), "i64")

    def _vector(self, row: Value) -> Value:
        return self.code.at("float", self.plan["data"], self.code.i64("mul", row, self.plan["stride"]))

    def _score_waiting(self) -> None:
        """Append the scores of the rows that wait, by 8; fewer stay."""
        code, waiting, at = self.code, self.waiting, self.code.variable("i64", 0)
        with code.loop_while(lambda: code.compare("sle", code.i64("add", at.get(), _HEIGHT), waiting.get())):
            self._several(at.get(), constant("i32", (1 << _HEIGHT) - 1))
            at.set(code.i64("add", at.get(), _HEIGHT))
        kind = vector("i64", _HEIGHT)
        rest = code.load(kind, code.at("i64", self.pending, at.get()), align=8)
        code.store(kind, rest, self.pending, align=8)
        waiting.set(code.i64("sub", waiting.get(), at.get()))

    def _last(self) -> None:
        """Append the scores of the fewer than 8 rows that wait, and drop what is too far."""
        code, kind = self.code, vector("i64", _HEIGHT)
        if self.kind == "flat":
            waiting = self.waiting.get()
            with code.when(code.compare("sgt", waiting, 0)):
                row = code.broadcast(code.load("i64", self.pending, 0), _HEIGHT)
                code.store(kind, row, code.at("i64", self.pending, waiting), align=8)
                ones = code.op("sub", code.op("shl", Value("1", "i32"), code.convert("trunc", waiting, "i32")), 1)
                self._several(Value("0", "i64"), ones)
        with code.when(code.compare("sgt", self.count.get(), "%wanted")):
            self._drop()

    def _several(self, at: Value, allowed: Value) -> None:
        """Append the scores of 8 rows that wait."""
        code = self.code
        rows = [code.load("i64", self.pending, code.i64("add", at, i)) for i in range(_HEIGHT)]
        scores = self._products_of_rows(rows)
        if self.metric != "ip":
            extra = code.join([code.load("float", self.plan["extra"], row) for row in rows])
            scores = code.op("fsub" if self.metric == "l2" else "fmul", scores, extra)
        hits = code.op("and", self._near(scores), allowed)
        with code.when(code.compare("ne", hits, 0)):
            self._keep([scores], hits, lambda lane: code.load("i64", self.pending, code.i64("add", at, lane)))

    def _block(self, word: Value, first: Value, block: Value) -> None:
        """Append the scores of a block of codes."""
        code, hits = self.code, Value("0", "i32")
        parts = self._nibbles(block) if self.kind == "4" else self._bytes(block)
        if self.metric == "l2":
            for i, at in enumerate(range(0, ROWS, _lanes(parts[0].type))):
                extra = _at(code, parts[i].type, self.plan["extra"], code.i64("add", first, at))
                parts[i] = code.op("fsub", parts[i], extra)
        for i, part in enumerate(parts):
            hits = code.op("or", code.op("shl", self._near(part), i * _lanes(part.type)), hits)
        hits = code.op("and", hits, word)
        with code.when(code.compare("ne", hits, 0)):
            self._keep(parts, hits, lambda lane: code.i64("add", first, lane))

    def _near(self, scores: Value) -> Value:
        """Append the bits of the scores that reach the limit."""
        code, lanes = self.code, _lanes(scores.type)
        near = code.compare("oge", scores, code.broadcast(self.limit.get(), lanes))
        return code(f"zext i{lanes} {code.bitcast(near, f'i{lanes}')} to i32", "i32")

    def _keep(self, parts: list[Value], hits: Value, row_of: Callable[[Value], Value]) -> None:
        """Append the rows of scores whose bits are set to those that are kept."""
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
            lane, count = self._lowest(left), self.count.get()
            code.store("float", code.load("float", self.block_scores, lane), self.scores, count)
            code.store("i64", row_of(lane), self.rows, count)
            self.count.set(code.i64("add", count, 1))

    def _crowded(self) -> Value:
        return self.code.compare("sgt", self.code.i64("add", self.count.get(), ROWS), "%room")

    def _drop(self) -> None:
        code, wanted = self.code, Value("%wanted", "i64")
        arguments = (self.scores, self.rows, self.count.get(), wanted, self.margin.get(), self.new_limit)
        self.count.set(code.call("i64", "kept", *arguments))
        self.limit.set(code.load("float", self.new_limit))

    # --- answers -----------------------------------------------------------------------------------------------------
    def _rank(self, terms: Value, decoded: Value | None, keys: Value) -> None:
        """Append the exact scores of the rows that are kept, as keys with their slots, in order."""
        code, count = self.code, self.count.get()
        with code.when(code.compare("sgt", count, 0)):
            with code.loop(0, count) as i:
                row, later = (code.load("i64", self.rows, each) for each in (i, _later(code, i, count)))
                if decoded is None:
                    first, stride = self.plan["vectors"], self.plan["row"]
                    x, ahead = (code.at("float", first, code.i64("mul", each, stride)) for each in (row, later))
                    _fetch(code, ahead, "%d")
                else:
                    x = decoded
                    self._decode(row, decoded)
                score, slot = _pair_score(code, terms, self.q, x, "%d", self.metric), code.variable("i64", row)
                with code.when(code.compare("ne", self.plan["slots"], _NULL)):
                    slot.set(code.load("i64", self.plan["slots"], row))
                code.store("i64", self._key(score, slot.get(), rises=self.metric == "l2"), keys, i)
            code.call("void", "sorted", keys, count)

    def _decode(self, row: Value, decoded: Value) -> None:
        """Append the vector that a row's code stands for."""
        code, columns = self.code, self.plan["columns"]
        at = code.load("i64", self.plan["list_of"], row)
        line = code.at("i8", self.plan["codes"], code.i64("mul", row, self.plan["code_bytes"]))
        width, bits = code.i64("sdiv", "%d", self.plan["parts"]), int(self.kind)
        with code.loop(0, "%d") as i:
            part = code.i64("sdiv", i, width)
            byte = code.convert("zext", code.load("i8", line, code.i64("sdiv", part, 8 // bits)), "i64")
            if bits == 4:
                byte = code.i64("and", code.i64("lshr", byte, code.i64("mul", code.i64("and", part, 1), 4)), 15)
            x = code.load("float", self.plan["centroids"], code.i64("add", code.i64("mul", i, self._codes()), byte))
            total = code.variable("float", x)
            with code.when(code.compare("ne", self.plan["residual"], 0)):
                centroid = code.load("float", self.plan["coarse"], code.i64("add", code.i64("mul", i, columns), at))
                total.set(code.op("fadd", x, centroid))
            code.store("float", total.get(), decoded, i)

    def _give(self, query: Value, keys: Value) -> None:
        """Append the scores and slots of the first k, and what stands for none."""
        code, rises = self.code, self.metric == "l2"
        count, first = code.smin(self.count.get(), "%k"), code.i64("mul", query, "%k")
        with code.loop(0, count) as i:
            key, place = code.load("i64", keys, i), code.i64("add", first, i)
            code.store("float", self._score(key, rises=rises), "%scores", place)
            code.store("i64", code.i64("and", key, 0xFFFFFFFF), "%ids", place)
        with code.loop(count, "%k") as i:
            place = code.i64("add", first, i)
            code.store("float", float("inf" if rises else "-inf"), "%scores", place)
            code.store("i64", -1, "%ids", place)
        full = code.compare("ne", self.full.get(), 0)
        code.store("i64", code.select(full, -1, count), "%counts", query)

    # --- scores of a block -------------------------------------------------------------------------------------------
    def _products_of_rows(self, rows: list[Value]) -> Value:
        """Append the products of the query with some vectors, one after the other."""
        code = self.code
        left, wide = code.i64("srem", "%d", self.lanes), code.i64("and", "%d", -_CHAINS * self.lanes)
        full = code.i64("sub", "%d", left)
        inside = code.compare("slt", lane_constants("i64", range(self.lanes)), code.broadcast(left, self.lanes))
        totals = []
        for x in map(self._vector, rows):
            sums = [code.variable(self.real, 0.0) for _ in range(_CHAINS)]

            def add(k: Value, some: list[Variable], x: Value = x) -> None:
                for j, total in enumerate(some):
                    at = code.i64("add", k, j * self.lanes)
                    total.set(_fma(code, _at(code, self.real, self.q, at), _at(code, self.real, x, at), total.get()))

            with code.loop(0, wide, _CHAINS * self.lanes) as k:
                add(k, sums)
            with code.loop(wide, full, self.lanes) as k:
                add(k, sums[:1])
            with code.when(code.compare("sgt", left, 0)):
                query, value = (code.masked_load(self.real, code.at("float", y, full), inside, 4) for y in (self.q, x))
                sums[0].set(_fma(code, query, value, sums[0].get()))
            totals.append(code.op("fadd", *(total.get() for total in sums)))
        return lane_sums(code, totals)

    def _nibbles(self, block: Value) -> list[Value]:
        """Append the sums of the bytes that 4-bit codes look up."""
        code, width = self.code, 16 * self.units
        codes = code.at("i8", self.plan["data"], code.i64("mul", block, self.plan["stride"]))
        sums = [code.variable(vector("i16", width // 2), 0) for _ in range(4)]
        with code.loop(0, self.plan["stride"], width) as at:
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

    def _bytes(self, block: Value) -> list[Value]:
        """Append the sums of the numbers that 8-bit codes look up."""
        code, count = self.code, ROWS // self.lanes
        codes = code.at("i8", self.plan["data"], code.i64("mul", block, self.plan["stride"]))
        sums = [code.variable(self.real, code.broadcast(self.bias, self.lanes)) for _ in range(count)]
        pointers, every = vector("ptr", self.lanes), constant(vector("i1", self.lanes), True)
        with code.loop(0, self.plan["parts"]) as part:
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
        code, size, parts = self.code, self._codes(), self.plan["parts"]
        width, spread = code.i64("sdiv", "%d", parts), code.variable("float", 0.0)
        with code.loop(0, parts) as part:
            first, numbers = code.i64("mul", part, width), code.at("float", self.numbers, code.i64("mul", part, size))
            centroids = code.at("float", self.plan["centroids"], code.i64("mul", first, size))
            self._products(code.at("float", self.q, first), centroids, width, Value(str(size), "i64"), numbers)
            if self.kind == "4":
                found = [_at(code, self.real, numbers, i) for i in range(0, size, self.lanes)]
                low, high = (self._joined(way, found) for way in ("fmin", "fmax"))
                self.base.set(code.op("fadd", self.base.get(), low))
                range_ = code.op("fsub", high, low)
                spread.set(code.select(code.compare("ogt", range_, spread.get()), range_, spread.get()))
                for i, each in enumerate(found):
                    above = code.op("fsub", each, code.broadcast(low, self.lanes))
                    code.store(self.real, above, code.at("float", numbers, i * self.lanes), align=4)
        if self.kind == "4":
            self._rounded(code.i64("mul", parts, size), spread.get())

    def _products(self, q: Value, columns: Value, d: Operand, count: Operand, y: Value) -> None:
        """Append products with vectors in columns (d, count), a multiple of 16 of them, element after element."""
        code, first = self.code, Value("0", "i64")
        for width in (64, 16):  # sums of 64 columns hide the latency of each
            stop = code.i64("and", count, -width)
            with code.loop(first, stop, width) as column:
                totals = [code.variable(self.real, 0.0) for _ in range(width // self.lanes)]
                with code.loop(0, d) as j:
                    x = code.broadcast(code.load("float", q, j), self.lanes)
                    line = code.i64("add", code.i64("mul", j, count), column)
                    for i, total in enumerate(totals):
                        some = _at(code, self.real, columns, code.i64("add", line, i * self.lanes))
                        total.set(_fma(code, x, some, total.get()))
                for i, total in enumerate(totals):
                    to = code.at("float", y, code.i64("add", column, i * self.lanes))
                    code.store(self.real, total.get(), to, align=4)
            first = stop

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
        levels = code.convert("sitofp", self.plan["levels"], "float")
        some = code.compare("ogt", spread, 2.0**-100)
        factor = code.select(some, code.op("fdiv", levels, code.select(some, spread, 1.0)), 0.0)
        self.scale.set(code.op("fdiv", spread, levels))
        parts = code.convert("sitofp", self.plan["parts"], "float")
        steps = code.op("fmul", parts, self.scale.get())  # half a step a part
        self.margin.set(code.op("fadd", self.margin.get(), steps))
        factors, half = code.broadcast(factor, self.lanes), constant(self.real, 0.5)
        with code.loop(0, numbers, self.lanes) as i:
            x = _fma(code, _at(code, self.real, self.numbers, i), factors, half)
            rounded = code.convert("trunc", code.convert("fptosi", x, "i32"), "i8")
            code.store(rounded.type, rounded, code.at("i8", self.table, i), align=1)
        with code.loop(numbers, self.plan["stride"], self.lanes) as i:  # of the parts that fill up a shuffle
            code.store(vector("i8", self.lanes), 0, code.at("i8", self.table, i), align=1)


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


def _sorted() -> FunctionBuilder:
    """Return the function that sorts integers: those at a falling distance are put in order, at last neighbors."""
    code = FunctionBuilder("sorted", ["ptr %keys", "i64 %count"], attributes=NOINLINE)
    gap, turned = code.variable("i64", "%count"), code.variable("i1", True)
    with code.loop_while(lambda: code.op("or", turned.get(), code.compare("sgt", gap.get(), 1))):
        shorter = code.i64("sdiv", code.i64("mul", gap.get(), 10), 13)
        gap.set(code.select(code.compare("sgt", shorter, 1), shorter, Value("1", "i64")))
        turned.set(False)
        distance = gap.get()
        with code.loop(0, code.i64("sub", "%count", distance)) as i:
            places = [code.at("i64", "%keys", each) for each in (i, code.i64("add", i, distance))]
            a, b = (code.load("i64", each) for each in places)
            turn = code.compare("sgt", a, b)
            for place, values in zip(places, ((b, a), (a, b)), strict=True):
                code.store("i64", code.select(turn, *values), place)
            turned.set(code.op("or", turned.get(), turn))
    code.ret()
    return code


def _ordered(code: FunctionBuilder, bits: Value) -> Value:
    """Append integers in the order of the floats that have these bits; its own inverse."""
    return code.op("xor", bits, code.op("lshr", code.op("ashr", bits, 31), 1))


_WRITERS: dict[str, tuple[Callable[..., str], tuple[str, ...]]] = {
    "tiles": (_tiles, _TILES), "scan": (_scan, _CALL), "scan_blocks": (_scan_blocks, _SCAN_BLOCKS),
    "pairs": (_pairs, _PAIRS),
}  # fmt: skip
