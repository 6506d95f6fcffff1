"""Polynomials mod X^n + 1 in a residue number system (RNS): bases of primes, their tables, launches, and CPU kernels.

A polynomial is rows of n coefficients, one row for each prime of a base, as words of 32 bits. Bases are parts of one
RnsPrimes: those from `first` on. rns.c describes the kernels; the CPU has the same entry points and bounds in LLVM IR.
A product in the transformed domain is divided by R = 2^32, which the inverse transform of products multiplies by.

Conversions of base are those of Halevi, Polyakov and Shoup (CT-RSA 2019, eprint 2018/117, section 2.2), with
fixed-point numbers of 57 bits instead of floating point: exact for |x| < Q (1/2 - 2^-22), and beyond that off by one Q
at most.

In LLVM IR a register has `lanes` neighbouring coefficients; products are those of the even and of the odd lanes
("halves").
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.llvm_kernels import host_has
from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.algebra.field.parameters import Field, is_prime
from accelerant.algebra.field.program import read_files
from accelerant.algebra.ntt.plan import reversed_numbers
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects, LlvmProgram
from accelerant.runtime.compilation.llvm import FunctionBuilder, Operand, Value, Variable, program, vector
from accelerant.runtime.ledger import launch

U32 = np.dtype(np.uint32)
Words = npt.NDArray[np.uint32]

MOST_SOURCES = 32  # Most primes of a base that is converted to another

_LOG_TILE, _THREADS = 13, 256  # RNS_LOG_TILE, RNS_THREADS
_LEVEL = (("z", "roots", "primes"), ("first", "count", "log_n", "log_span", "inverse", "rows"))


def primes_below(bits: int, n: int, count: int) -> tuple[int, ...]:
    """Return the `count` largest primes of some bits that are 1 mod 2 n; ConfigError if there are not so many."""
    found = []
    for p in range((1 << bits) - 2 * n + 1, 1 << bits - 1, -2 * n):
        if is_prime(p):
            found.append(p)
            if len(found) == count:
                return tuple(found)
    raise ConfigError(f"there are {len(found)} primes of {bits} bits that are 1 mod {2 * n}, and {count} are needed")


@functools.cache
def rns_source(entry: str) -> KernelSource:
    """Return the program of one entry point: of rns_llvm.ENTRIES, or "level", which the CPU does not need."""

    def portable() -> str:
        name = entry if entry in ("forward", "inverse") else ""
        macros = {f"RNS_{other.upper()}": int(other == entry) for other in (*ENTRIES, "level")}
        macros |= {"RNS_SOURCES": MOST_SOURCES}
        text = "".join(f"#define {macro} {value}\n" for macro, value in macros.items())
        return text + f"#define RNS_NAME rns_{name}\n" * bool(name) + read_files("algebra/ntt", "rns.c")

    pointers, scalars = ENTRIES.get(entry, _LEVEL)
    dialects = LazyDialects(portable=portable, **({"llvm": lambda: rns_program(entry)} if entry in ENTRIES else {}))
    return KernelSource(f"rns_{entry}", dialects, {f"rns_{entry}": ("*u32",) * len(pointers) + ("i64",) * len(scalars)})


@dataclass(frozen=True, slots=True)
class Conversion:
    """The constants of z_j = (out x + fused a_j) / divide mod p_j; x is `scale` times the input mod Q, centred."""

    table: Any
    sources: int
    targets: int
    fused: bool


@dataclass(frozen=True, eq=False)
class RnsPrimes:
    """The primes of some bases, each below 2^30 and 1 mod 2 n, with tables in the memory of one device."""

    space: MemorySpace
    n: int
    primes: tuple[int, ...]
    roots: Any = field(init=False, repr=False)
    numbers: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Compute the tables: 16 n bytes for each prime."""
        n = self.n
        if n < 64 or n & (n - 1) or any(p >> 30 or (p - 1) % (2 * n) for p in self.primes):
            raise ConfigError(f"needed: n a power of two from 64 on, and primes below 2^30 that are 1 mod {2 * n}")
        roots = np.empty((len(self.primes), 4, n), np.uint32)
        numbers = np.zeros((len(self.primes), 8), np.uint32)
        reverse = reversed_numbers(self.log_n)
        for i, p in enumerate(self.primes):
            psi = _prime_field(p).root_of_unity(2 * n)
            for at, base in ((0, psi), (2, pow(psi, -1, p))):
                table = _powers(base, n, p)[reverse]
                roots[i, at], roots[i, at + 1] = table, (table << np.uint64(32)) // np.uint64(p)
            scales = [pow(n, -1, p), pow(n, -1, p) * 2**32 % p]
            pairs = [value for scale in scales for value in (scale, (scale << 32) // p)]
            numbers[i, :6] = [p, pow(p, -1, 1 << 32), *pairs]
        object.__setattr__(self, "roots", self.space.load(roots))
        object.__setattr__(self, "numbers", self.space.load(numbers))

    @property
    def log_n(self) -> int:
        """Return log2 n."""
        return self.n.bit_length() - 1

    def empty(self, *rows: int) -> Any:
        """Return (*rows, n) undefined words."""
        return self.space.empty((*rows, self.n), U32)

    def _launch(self, entry: str, rows: int, arrays: Sequence[Any], *scalars: int) -> None:
        """Launch a kernel that has an index for each coefficient, or on the CPU for each BLOCK."""
        total = rows * self.n
        grid = total // BLOCK if self.space.backend == "cpu" else -(-total // _THREADS)
        threads = 1 if self.space.backend == "cpu" else _THREADS
        if rows:
            launch(self.space, rns_source(entry), f"rns_{entry}", grid, threads, arrays, *scalars)

    def transform(self, z: Any, first: int, count: int, *, inverse: bool = False, products: bool = False) -> None:
        """Transform rows in place to bit-reversed order, or back; row r is of prime first + r mod count."""
        rows, entry = math.prod(z.shape[:-1]), "inverse" if inverse else "forward"
        arrays, place = (z, self.roots, self.numbers), (first, count, self.log_n)
        host, spans = self.space.backend == "cpu", range(_LOG_TILE, self.log_n)
        if not rows:
            return
        if not inverse and not host:
            for log_span in reversed(spans):
                self._launch("level", rows, arrays, *place, log_span, 0, rows)
        blocks = rows if host else rows << max(0, self.log_n - _LOG_TILE)
        threads = 1 if host else _THREADS
        launch(self.space, rns_source(entry), f"rns_{entry}", blocks, threads, arrays, *place, int(products))
        if inverse and not host:
            for log_span in spans:
                self._launch("level", rows, arrays, *place, log_span, 1, rows)

    def add(self, x: Any, y: Any, first: int, count: int, *, subtract: bool = False, alternate: bool = False) -> Any:
        """Return x + y or x - y, row by row; `alternate`: every second polynomial of y counts as 0."""
        rows = math.prod(x.shape[:-1])
        z = self.empty(*x.shape[:-1])
        mode = int(subtract) + 2 * int(alternate)
        self._launch("add", rows, (x, y, z, self.numbers), first, count, self.log_n, mode, rows)
        return z

    def galois(self, x: Any, element: int, first: int, count: int) -> Any:
        """Return x(X^element) for an odd element, row by row."""
        rows = math.prod(x.shape[:-1])
        z = self.empty(*x.shape[:-1])
        inverse = pow(element, -1, 2 * self.n)
        self._launch("galois", rows, (x, z, self.numbers), first, count, self.log_n, inverse, rows)
        return z

    def dot(
        self, x: Any, y: Any, z: Any, first: int, count: int, *, batch: int, terms: int = 1, parts: int = 1,
        x_at: tuple[int, int, int] = (0, 0, 0), y_at: tuple[int, int, int, int] = (0, 0, 0, 0),
        z_at: tuple[int, int, int] = (0, 0, 0),
    ) -> None:  # fmt: skip
        """Store sums of products over R: z[b, h] = sum_t x[b, t] y[b, h, t], each of `count` rows; see rns_dot.

        There are batch, parts and terms of b, h and t. x_at is the first row of x, and the rows from one b, and one t,
        to the next; y_at and z_at also those of one h, in the order (first, b, h, t).
        """
        rows = batch * parts * count
        scalars = (first, count, self.log_n, terms, parts, *x_at, *y_at, *z_at, rows)
        self._launch("dot", rows, (x, y, z, self.numbers), *scalars)

    def convert(
        self, conversion: Conversion, x: Any, z: Any, *, x_at: tuple[int, int], z_at: tuple[int, int],
        a: Any = None, a_at: tuple[int, int] = (0, 0), keep: int = -1,
    ) -> Any:  # fmt: skip
        """Convert polynomials of x to rows of z, and return z.

        x_at, a_at, z_at: the rows of a polynomial, and the first one to use. A fused conversion adds a multiple of a.
        From row `keep` of z on the sources are copied.
        """
        polynomials = math.prod(x.shape[:-1]) // x_at[0]
        arrays = (x, x if a is None else a, z, conversion.table)
        scalars = (self.log_n, conversion.sources, conversion.targets, *x_at, *a_at, *z_at, keep, int(conversion.fused))
        self._launch("convert", polynomials, arrays, *scalars, polynomials)
        return z

    def conversion(
        self, sources: Sequence[int], targets: Sequence[int], *, scale: int = 1, out: int = 1, fused: int = 0,
        divide: int = 1,
    ) -> Conversion:  # fmt: skip
        """Return the constants of a conversion, of which `divide` divides both out and fused mod the targets.

        There are at most MOST_SOURCES sources, all above 2^25; a source times a target is below a quarter of that times
        2^32.
        """
        product = math.prod(sources)
        words: list[int] = []
        for q in sources:
            c = scale * pow(product // q, -1, q) % q
            words += [c, (c << 32) // q, q, (1 << 57) // q]
        for p in targets:
            unit = pow(divide, -1, p) * 2**32
            words += [p, pow(p, -1, 1 << 32), fused * unit % p, -product * out * unit % p]
            words += [product // q * out * unit % p for q in sources]
        return Conversion(self.space.load(np.array(words, np.uint32)), len(sources), len(targets), fused != 0)


@functools.cache
def _prime_field(p: int) -> Field:
    generator = next(g for g in range(2, p) if pow(g, (p - 1) // 2, p) == p - 1)
    return Field(f"prime_{p}", p, generator)


def _powers(base: int, count: int, p: int) -> npt.NDArray[np.uint64]:
    """Return base^0, base^1, ... mod p < 2^32, by doubling; count is a power of two."""
    values = np.ones(1, np.uint64)
    while len(values) < count:
        values = np.concatenate((values, values * np.uint64(pow(base, len(values), p)) % np.uint64(p)))
    return values


BLOCK = 16  # coefficients of an index of all kernels but the transforms, whose index is a row

_MASK = 2**32 - 1
_ROWS = ("first", "count", "log_n")
ENTRIES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "forward": (("z", "roots", "primes"), (*_ROWS, "products")),
    "inverse": (("z", "roots", "primes"), (*_ROWS, "products")),
    "convert": (
        ("x", "a", "z", "table"),
        ("log_n", "sources", "targets", "x_rows", "x_from", "a_rows", "a_from", "z_rows", "z_from", "keep", "fused",
         "polynomials"),
    ),
    "dot": (
        ("x", "y", "z", "primes"),
        (*_ROWS, "terms", "parts", "x_0", "x_b", "x_t", "y_0", "y_b", "y_h", "y_t", "z_0", "z_b", "z_h", "rows"),
    ),
    "add": (("x", "y", "z", "primes"), (*_ROWS, "mode", "rows")),
    "galois": (("x", "z", "primes"), (*_ROWS, "inverse", "rows")),
}  # fmt: skip
"""Entry without its prefix rns_ -> arguments: pointers to u32, then i64."""

Halves = tuple[Value, Value]


def rns_program(entry: str) -> LlvmProgram:
    """Return the program of an entry point, for this processor's vectors."""
    lanes = 16 if host_has("avx512dq") else 8
    share = 4 if entry in ("forward", "inverse") else 256 if entry == "convert" else 2048
    write = functools.partial(_text, entry, lanes)
    sources = ("algebra/ntt", "algebra/field/llvm_kernels.py", "runtime/compilation/llvm.py")
    return LlvmProgram(("rns", entry, lanes), sources, write, written_out=False, least_share=share)


@functools.cache
def _text(entry: str, lanes: int) -> str:
    pointers, scalars = ENTRIES[entry]
    arguments = [f"ptr %{name}" for name in pointers] + [f"i64 %{name}" for name in scalars]
    code = _RnsKernel(f"rns_{entry}", ["i64 %begin", "i64 %end", *arguments], lanes)
    _WRITERS[entry](code)
    code.ret()
    return program([code])


class _RnsKernel(FunctionBuilder):
    """A kernel's instructions on registers of `lanes` words."""

    def __init__(self, name: str, arguments: Sequence[str], lanes: int) -> None:
        super().__init__(name, arguments, linkage="", attributes="nounwind")
        self.lanes, self.words, self.pairs = lanes, vector("i32", lanes), vector("i64", lanes // 2)

    def read(self, pointer: Operand, index: Operand) -> Value:
        return self.load(self.words, self.at("i32", pointer, index), align=4)

    def write(self, value: Value, pointer: Operand, index: Operand) -> None:
        self.store(self.words, value, self.at("i32", pointer, index), align=4)

    def word(self, pointer: Operand, index: Operand) -> Value:
        return self.load("i32", pointer, index, align=4)

    def everywhere(self, word: Value) -> Value:
        return self.broadcast(word, self.lanes)

    def halves(self, x: Value) -> Halves:
        """Return the even and the odd lanes as 64-bit numbers."""
        wide = self.bitcast(x, self.pairs)
        return self.op("and", wide, _MASK), self.op("lshr", wide, 32)

    def same(self, word: Value) -> Halves:
        """Return halves with a 32-bit number in every lane."""
        wide = self.broadcast(self.convert("zext", word, "i64"), self.lanes // 2)
        return wide, wide

    def products(self, x: Halves, y: Halves) -> Halves:
        return self.op("mul", x[0], y[0]), self.op("mul", x[1], y[1])

    def accumulate(self, totals: Sequence[Variable], x: Halves, y: Halves) -> None:
        for total, product in zip(totals, self.products(x, y), strict=True):
            total.set(self.op("add", total.get(), product))

    def upper(self, x: Halves) -> Value:
        """Return the upper words of halves, as a register."""
        order = [lane for i in range(1, self.lanes, 2) for lane in (i, self.lanes + i)]
        return self.shuffle(self.bitcast(x[0], self.words), self.bitcast(x[1], self.words), order)

    def less(self, x: Value, p: Value) -> Value:
        return self.intrinsic(self.words, f"llvm.umin.v{self.lanes}i32", x, self.op("sub", x, p))

    def shoup(self, x: Value, w: Value, quotient: Halves, p: Value) -> Value:
        """See rns_shoup."""
        q = self.upper(self.products(self.halves(x), quotient))
        return self.op("sub", self.op("mul", x, w), self.op("mul", q, p))

    def montgomery(self, total: Halves, p: Value, wide_p: Halves, inverse: Halves) -> Value:
        """See rns_montgomery."""
        low = tuple(self.op("and", half, _MASK) for half in total)
        factor = self.products((low[0], low[1]), inverse)
        reduction = self.products((self.op("and", factor[0], _MASK), self.op("and", factor[1], _MASK)), wide_p)
        result = self.op("add", self.op("sub", self.upper(total), self.upper(reduction)), p)
        return self.less(self.less(result, self.op("shl", p, 1)), p)

    def kept(self, total: Halves, wide_p: Halves) -> Halves:
        """See rns_kept: where the sum is less, the difference wraps."""
        bound = self.op("shl", wide_p[0], 33)
        kind, name = self.pairs, f"llvm.umin.v{self.lanes // 2}i64"
        first, second = (self.intrinsic(kind, name, half, self.op("sub", half, bound)) for half in total)
        return first, second

    def prime(self, row: Value) -> tuple[Value, Value]:
        """Return the index of a row's prime, and the address of its words."""
        prime = self.op("add", self.op("urem", row, "%count"), "%first")
        return prime, self.at("[8 x i32]", "%primes", prime)

    @contextmanager
    def blocks(self, rows: str) -> Iterator[tuple[Value, Value]]:
        """Append a loop over the blocks of [begin, min(end, those of the rows)); yields a row and a first column."""
        log = self.op("sub", "%log_n", BLOCK.bit_length() - 1)
        with self.loop("%begin", self.smin("%end", self.op("shl", rows, log))) as i:
            row = self.op("lshr", i, log)
            yield row, self.op("shl", self.op("sub", i, self.op("shl", row, log)), BLOCK.bit_length() - 1)

    def columns(self, column: Value) -> list[Value]:
        """Return the first columns of a block's registers."""
        return [self.op("add", column, k) for k in range(0, BLOCK, self.lanes)]

    def index(self, row: Value, column: Value) -> Value:
        return self.op("add", self.op("shl", row, "%log_n"), column)

    def sum_of(self, *terms: Operand) -> Value:
        return functools.reduce(lambda x, y: self.op("add", x, y), terms)  # type: ignore[return-value]


class _RnsTransform:
    """The writer of a transform of one row, forward or inverse."""

    def __init__(self, code: _RnsKernel, inverse: bool) -> None:
        self.code, self.inverse = code, inverse
        self.log_last = code.lanes.bit_length()  # levels in two registers
        self.n = code.i64("shl", 1, "%log_n")
        self.left = code.op("sub", "%log_n", self.log_last)
        with code.loop("%begin", "%end") as row:
            prime, numbers = code.prime(row)
            self.row = code.at("i32", "%z", code.op("shl", row, "%log_n"))
            self.roots = code.at("i32", "%roots", code.op("shl", prime, code.op("add", "%log_n", 2)))
            if inverse:
                self.roots = code.at("i32", self.roots, code.op("shl", self.n, 1))
            self.quotients = code.at("i32", self.roots, self.n)
            self.p = code.everywhere(code.word(numbers, 0))
            self.p2 = code.op("shl", self.p, 1)
            single = code.compare("ne", code.op("and", self.left, 1), 0)
            if inverse:
                self._within()
                level = code.variable("i64", self.left)  # log2 of the blocks of the level just done
                with code.loop_while(lambda: code.compare("sge", level.get(), 2)):
                    level.set(code.op("sub", level.get(), 2))
                    self._pairs(level.get())
                with code.when(single):
                    self._single()
                at = code.op("shl", "%products", 1)
                scale, quotient = (code.word(numbers, code.op("add", at, k)) for k in (2, 3))
                self._finish(code.everywhere(scale), code.same(quotient))
            else:
                with code.when(single):
                    self._single()
                level = code.variable("i64", code.op("and", self.left, 1))
                with code.loop_while(lambda: code.compare("slt", level.get(), self.left)):
                    self._pairs(level.get())
                    level.set(code.op("add", level.get(), 2))
                self._within()

    def butterfly(self, x: Value, y: Value, root: tuple[Value, Halves]) -> tuple[Value, Value]:
        """See rns_butterfly."""
        code = self.code
        if self.inverse:
            difference = code.op("add", code.op("sub", x, y), self.p2)
            return code.less(code.op("add", x, y), self.p2), code.shoup(difference, *root, self.p)
        product, kept = code.shoup(y, *root, self.p), code.less(x, self.p2)
        return code.op("add", kept, product), code.op("add", code.op("sub", kept, product), self.p2)

    def root(self, index: Operand) -> tuple[Value, Halves]:
        """Return one root in all lanes."""
        code = self.code
        return code.everywhere(code.word(self.roots, index)), code.same(code.word(self.quotients, index))

    def _single(self) -> None:
        """The level of one block."""
        code, half = self.code, self.code.op("lshr", self.n, 1)
        root = self.root(1)
        with code.loop(0, half, code.lanes) as j:
            other = code.op("add", j, half)
            x, y = self.butterfly(code.read(self.row, j), code.read(self.row, other), root)
            code.write(x, self.row, j)
            code.write(y, self.row, other)

    def _pairs(self, log_blocks: Value) -> None:
        """The levels of 2^log_blocks and of twice as many blocks."""
        code = self.code
        blocks = code.i64("shl", 1, log_blocks)
        quarter = code.op("lshr", self.n, code.op("add", log_blocks, 2))
        with code.loop(0, blocks) as block:
            first = code.op("add", blocks, block)
            second = code.op("shl", first, 1)
            roots = [self.root(first), self.root(second), self.root(code.op("add", second, 1))]
            start = code.op("mul", block, code.op("shl", quarter, 2))
            with code.loop(0, quarter, code.lanes) as j:
                at = [code.op("add", start, j)]
                for _ in range(3):
                    at.append(code.op("add", at[-1], quarter))
                v = [code.read(self.row, i) for i in at]
                steps = [(0, 2, 0), (1, 3, 0), (0, 1, 1), (2, 3, 2)]
                for a, b, root in reversed(steps) if self.inverse else steps:
                    v[a], v[b] = self.butterfly(v[a], v[b], roots[root])
                for i, value in zip(at, v, strict=True):
                    code.write(value, self.row, i)

    def _within(self) -> None:
        """The levels of 2 `lanes` neighbours."""
        code, lanes = self.code, self.code.lanes
        spans = [lanes >> k for k in range(self.log_last)]
        with code.loop(0, code.i64("shl", 1, self.left)) as group:
            start = code.op("mul", group, 2 * lanes)
            at = (start, code.op("add", start, lanes))
            x, y = (code.read(self.row, i) for i in at)
            order = list(range(2 * lanes))  # the position of each element of x, then of y
            for span in reversed(spans) if self.inverse else spans:
                wanted = [i for i in range(2 * lanes) if not i & span]
                wanted += [i + span for i in wanted]
                x, y = self._exchanged(x, y, order, wanted)
                order = wanted
                x, y = self.butterfly(x, y, self._roots(group, span))
            x, y = self._exchanged(x, y, order, list(range(2 * lanes)))
            for i, value in zip(at, (x, y), strict=True):
                code.write(value if self.inverse else code.less(code.less(value, self.p2), self.p), self.row, i)

    def _exchanged(self, x: Value, y: Value, order: list[int], wanted: list[int]) -> tuple[Value, Value]:
        lanes = self.code.lanes
        if order == wanted:
            return x, y
        places = [order.index(i) for i in wanted]
        return self.code.shuffle(x, y, places[:lanes]), self.code.shuffle(x, y, places[lanes:])

    def _roots(self, group: Value, span: int) -> tuple[Value, Halves]:
        """Return the roots of a level of a group: lanes / span neighbours in the table, each for `span` lanes."""
        code, count = self.code, self.code.lanes // span
        first = code.op("add", code.op("lshr", self.n, span.bit_length()), code.op("mul", group, count))
        if count == 1:
            return self.root(first)
        kind, lanes = vector("i32", count), [i // span for i in range(code.lanes)]
        root, quotient = (
            code.shuffle(code.load(kind, code.at("i32", table, first), align=4), None, lanes)
            for table in (self.roots, self.quotients)
        )
        return root, code.halves(quotient)

    def _finish(self, scale: Value, quotient: Halves) -> None:
        code = self.code
        with code.loop(0, self.n, code.lanes) as j:
            scaled = code.shoup(code.read(self.row, j), scale, quotient, self.p)
            code.write(code.less(scaled, self.p), self.row, j)


def _convert(code: _RnsKernel) -> None:
    """Mask what is loaded from the stack, so that LLVM knows factors of 32 bits: one instruction instead of ten."""
    parts = BLOCK // code.lanes
    scratch = code.stack(code.pairs, 2 * parts * 64, align=64)
    rounded = code.stack(code.pairs, 2 * parts, align=64)
    with code.blocks("%polynomials") as (polynomial, column):
        columns = code.columns(column)
        half = code.broadcast(Value(str(1 << 56), "i64"), code.lanes // 2)
        for k in range(2 * parts):
            code.store(code.pairs, half, rounded, k)
        with code.loop(0, "%sources") as s:
            numbers = code.at("[4 x i32]", "%table", s)
            c, p = (code.everywhere(code.word(numbers, k)) for k in (0, 2))
            quotient, weight = (code.same(code.word(numbers, k)) for k in (1, 3))
            row = code.sum_of(code.op("mul", polynomial, "%x_rows"), "%x_from", s)
            kept = code.sum_of(code.op("mul", polynomial, "%z_rows"), "%keep", s)
            values = [code.read("%x", code.index(row, j)) for j in columns]
            with code.when(code.compare("sge", "%keep", 0)):
                for value, j in zip(values, columns, strict=True):
                    code.write(value, "%z", code.index(kept, j))
            for k, value in enumerate(values):
                y = code.halves(code.less(code.shoup(value, c, quotient, p), p))
                fractions = code.products(y, weight)
                for h in range(2):
                    code.store(code.pairs, y[h], scratch, code.sum_of(code.op("mul", s, 2 * parts), 2 * k + h))
                    fraction = code.op("add", code.load(code.pairs, rounded, 2 * k + h), fractions[h])
                    code.store(code.pairs, fraction, rounded, 2 * k + h)
        for k in range(2 * parts):
            code.store(code.pairs, code.op("lshr", code.load(code.pairs, rounded, k), 57), rounded, k)
        table = code.at("[4 x i32]", "%table", "%sources")
        width = code.op("add", "%sources", 4)
        with code.loop(0, "%targets") as target:
            numbers = code.at("i32", table, code.op("mul", target, width))
            word = code.word(numbers, 0)
            p, wide_p = code.everywhere(word), code.same(word)
            inverse, fused, rounding = (code.same(code.word(numbers, k)) for k in (1, 2, 3))
            starts = [
                code.op("mul", code.op("and", code.load(code.pairs, rounded, k), _MASK), rounding[0])
                for k in range(2 * parts)
            ]
            totals = [code.variable(code.pairs, start) for start in starts]
            with code.when(code.compare("ne", "%fused", 0)):
                row = code.sum_of(code.op("mul", polynomial, "%a_rows"), "%a_from", target)
                for k, j in enumerate(columns):
                    code.accumulate(totals[2 * k : 2 * k + 2], code.halves(code.read("%a", code.index(row, j))), fused)
            with code.loop(0, "%sources") as s:
                factor = code.same(code.word(numbers, code.op("add", s, 4)))[0]
                base = code.op("mul", s, 2 * parts)
                for k, total in enumerate(totals):
                    share = code.op("and", code.load(code.pairs, scratch, code.op("add", base, k)), _MASK)
                    total.set(code.op("add", total.get(), code.op("mul", share, factor)))
                _keep_sometimes(code, totals, wide_p, s, 4)
            row = code.sum_of(code.op("mul", polynomial, "%z_rows"), "%z_from", target)
            for k, j in enumerate(columns):
                sums = code.kept((totals[2 * k].get(), totals[2 * k + 1].get()), wide_p)
                code.write(code.montgomery(sums, p, wide_p, inverse), "%z", code.index(row, j))


def _keep_sometimes(code: _RnsKernel, totals: Sequence[Variable], wide_p: Halves, turn: Value, every: int) -> None:
    """Append rns_kept of the sums after each `every` turns."""
    with code.when(code.compare("eq", code.op("and", turn, every - 1), every - 1)):
        for k in range(0, len(totals), 2):
            pair = code.kept((totals[k].get(), totals[k + 1].get()), wide_p)
            for total, value in zip(totals[k : k + 2], pair, strict=True):
                total.set(value)


def _dot(code: _RnsKernel) -> None:
    with code.blocks("%rows") as (row, column):
        _, numbers = code.prime(row)
        word = code.word(numbers, 0)
        p, wide_p, inverse = code.everywhere(word), code.same(word), code.same(code.word(numbers, 1))
        j, above = code.op("urem", row, "%count"), code.op("udiv", row, "%count")
        h, b = code.op("urem", above, "%parts"), code.op("udiv", above, "%parts")
        x_row = code.sum_of("%x_0", code.op("mul", b, "%x_b"), j)
        y_row = code.sum_of("%y_0", code.op("mul", b, "%y_b"), code.op("mul", h, "%y_h"), j)
        z_row = code.sum_of("%z_0", code.op("mul", b, "%z_b"), code.op("mul", h, "%z_h"), j)
        columns = code.columns(column)
        totals = [code.variable(code.pairs, 0) for _ in range(2 * len(columns))]
        with code.loop(0, "%terms") as t:
            xs, ys = (code.op("add", row, code.op("mul", t, by)) for row, by in ((x_row, "%x_t"), (y_row, "%y_t")))
            for k, at in enumerate(columns):
                x, y = code.read("%x", code.index(xs, at)), code.read("%y", code.index(ys, at))
                code.accumulate(totals[2 * k : 2 * k + 2], code.halves(x), code.halves(y))
            _keep_sometimes(code, totals, wide_p, t, 8)
        for k, at in enumerate(columns):
            sums = code.kept((totals[2 * k].get(), totals[2 * k + 1].get()), wide_p)
            code.write(code.montgomery(sums, p, wide_p, inverse), "%z", code.index(z_row, at))


def _add(code: _RnsKernel) -> None:
    with code.blocks("%rows") as (row, column):
        p = code.everywhere(code.word(code.prime(row)[1], 0))
        subtract = code.compare("ne", code.op("and", "%mode", 1), 0)
        second = code.op("and", code.op("udiv", row, "%count"), code.op("lshr", "%mode", 1))
        none = code.compare("ne", second, 0)
        for j in code.columns(column):
            at = code.index(row, j)
            y = code.select(none, Value("zeroinitializer", code.words), code.read("%y", at))
            other = code.select(subtract, code.op("sub", p, y), y)
            code.write(code.less(code.op("add", code.read("%x", at), other), p), "%z", at)


def _galois(code: _RnsKernel) -> None:
    with code.blocks("%rows") as (row, column):
        p, n = code.word(code.prime(row)[1], 0), code.i64("shl", 1, "%log_n")
        below, above = code.op("sub", n, 1), code.op("sub", code.op("shl", n, 1), 1)
        source = code.at("i32", "%x", code.op("shl", row, "%log_n"))
        with code.loop(column, code.op("add", column, BLOCK)) as i:
            from_ = code.op("and", code.op("mul", i, "%inverse"), above)
            value = code.word(source, code.op("and", from_, below))
            negative = code.op("sub", p, value)
            negative = code.select(code.compare("eq", value, 0), value, negative)
            value = code.select(code.compare("slt", from_, n), value, negative)
            code.store("i32", value, "%z", code.index(row, i), align=4)


_WRITERS: dict[str, Callable[[_RnsKernel], object]] = {
    "forward": lambda code: _RnsTransform(code, inverse=False),
    "inverse": lambda code: _RnsTransform(code, inverse=True),
    "convert": _convert,
    "dot": _dot,
    "add": _add,
    "galois": _galois,
}
