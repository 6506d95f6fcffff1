"""The passes of a transform of 2^k points, as numbers that are independent of the device, and their programs.

A transform of n points, n = A B C, is three passes, or two (n = A B), or one. A pass does many transforms of A points
(its *rows*) that are small enough for a core's cache or a block's shared memory, one for each of n / A *columns*. With
input index i = (iA B + iB) C + iC and output index j = jA + A (jB + B jC), and w of order n,

    sum_i x_i w^(i j) = sum_iC v^(iC jC) [ u^(iC jB) sum_iB v'^(iB jB) [ w^((iB C + iC) jA) sum_iA v''^(iA jA) x_i ] ]

where v, v', v'' have the orders C, B, A, and u has the order B C. The factors before an inner bracket are the
*twiddles*. Every pass is in place, row j over row i, except the last one in natural order, which reads along rows and
writes along columns, so that no pass merely moves elements.

    natural                    passes A, B, C; the last one from one memory to another
    natural_to_bit_reversed    passes A, B, C; each writes row j at position bitrev(j)
    bit_reversed_to_natural    the transpose: passes C, B, A; each reads row i at position bitrev(i); twiddles first

A coset g, where x_i is g^i x_i (forward) or y_i is g^-i y_i (inverse), and the inverse's 1 / n go into the twiddles,
and into one factor for each row of the first or the last pass.

Source: Bailey 1990, Journal of Supercomputing 4, "FFTs in external or hierarchical memory", for the four steps.

In C and WGSL a program is a pass (kernel.c) for one field, variant and tile, or powers.c; the CPU's pass is LLVM IR, in
scalar or vector form. ntt_pass transforms the columns whose elements are all in [begin,
min(end, count 2^log_rows)), counted along the columns, `lanes` columns at a time (a tile): it loads them as packs on
the stack, one per row, transforms these, and stores them. If a column's rows are neighbours in memory, as many packs as
lanes are loaded along the rows and transposed.

    FIELD_each(ptr x, i64 i)      one factor of a table in all lanes: words if an element is a word or a pack one
                                  element; contiguous 52-bit limbs if a pack has a register for each limb
    FIELD_sums(ptr rows, ptr roots, i64 log_rows)
                                  transforms 2^log_rows packs in place, from natural to bit-reversed order

Tables for FIELD_each (roots, before, after, high) contain factors x L mod p, L the packs' radix. Table low contains
words; a pack of it is the factors of neighbouring columns.

FIELD_sums works by steps of up to `radix_log` levels that each load a few packs, and store them. With w of order s, a
level on blocks of s packs maps

    a_i, a_(i + s/2)  to  a_i + a_(i + s/2), (a_i - a_(i + s/2)) w^i        i < s/2

The first step does the remainder of the levels; the last has constant factors, of which 1 is omitted.
Source: Gentleman and Sande 1966, AFIPS Fall Joint Computer Conference 29, pages 563 to 578.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field import program as field_program
from accelerant.algebra.field.llvm_kernels import SOURCES, packed_field
from accelerant.algebra.field.llvm_packed import LANE_ORDER, PackedField, PackedIfma
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.algebra.field.program import BLOCK, defined, montgomery_radix
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects, LlvmProgram, bindings, constants
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, Operand, Value, constant, program

ORDERS = ("natural", "natural_to_bit_reversed", "bit_reversed_to_natural")  # of input and output
_ALL = 62  # Bits of a column's number, which are in its last digit
_LOG_NEAR = 4  # log2 of the fewest neighbouring columns whose twiddles are in one table


@dataclass(frozen=True, slots=True)
class Variant:
    """The properties of a pass that its program is compiled for."""

    along_in: bool = False  # whether the rows of a column are neighbours in memory when read; else the columns are
    along_out: bool = False  # the same when written
    reversed_in: bool = False  # row i is read at position bitrev(i)
    reversed_out: bool = False  # row i is written at position bitrev(i)
    before: bool = False  # whether there is a factor for each row before the sums
    after: bool = False  # the same after the sums
    twiddle: str = ""  # "before" or "after" the sums, or ""
    split: bool = False  # whether twiddles are products of two tables


@dataclass(frozen=True, slots=True)
class PassLayout:
    """Row r of column t is at digit_0 column[0] + digit_1 column[1] + rest column[2] + r row."""

    column: tuple[int, int, int]
    row: int


def powers(scale: int, base: int, count: int, p: int) -> list[int]:
    """Return scale, scale base, scale base^2, ... mod p."""
    values = [scale]
    for _ in range(count - 1):
        values.append(values[-1] * base % p)
    return values


def reversed_numbers(bits: int) -> npt.NDArray[np.int64]:
    """Return the numbers of so many bits, bit-reversed."""
    numbers = np.zeros(1, np.int64)
    for _ in range(bits):
        numbers = np.concatenate((2 * numbers, 2 * numbers + 1))
    return numbers


@dataclass(frozen=True, slots=True)
class RowPowers:
    """A factor scale base^r for each of 2^log_rows rows r, at position r, or bitrev(r) if by_bits is set."""

    scale: int
    base: int
    log_rows: int
    by_bits: bool = False

    def by_position(self, p: int) -> list[int]:
        """Return the factors, by position."""
        bits = self.log_rows
        values = powers(self.scale, self.base, 1 << bits, p)
        return [values[i] for i in reversed_numbers(bits)] if self.by_bits else values


@dataclass(frozen=True, slots=True)
class Twiddles:
    """The factor start base^c of a row in column c = digit_0; start and base are those of the row."""

    start: RowPowers
    base: RowPowers


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass: 2^log_rows rows, a root of that order, a factor for each row before and after, or None."""

    variant: Variant
    log_rows: int
    digits: tuple[int, int]  # bits of the two lowest digits of a column's number
    reads: PassLayout
    writes: PassLayout
    root: int
    before: RowPowers | None = None
    after: RowPowers | None = None
    twiddles: Twiddles | None = None
    log_low: int = 0  # a twiddle of column c is low[row, c mod 2^log_low] high[row, c >> log_low]

    @property
    def rows(self) -> int:
        """Return A."""
        return 1 << self.log_rows

    @property
    def in_place(self) -> bool:
        """Return whether a column is written where it was read."""
        return self.reads == self.writes


class _Transform:
    """The parameters that all passes of a transform share."""

    def __init__(
        self, field: Field, logs: tuple[int, ...], inverse: bool, coset: int, order: str, log_table: int
    ) -> None:
        self.field, self.p, self.n = field, field.modulus, 1 << sum(logs)
        self.logs, self.inverse, self.coset, self.order, self.log_table = logs, inverse, coset, order, log_table

    def unit(self, m: int) -> int:
        """Return the weight of jm in j."""
        return 1 << sum(self.logs[:m])

    def inner(self, m: int) -> int:
        """Return the weight of im in i."""
        return 1 << sum(self.logs[m + 1 :])

    def root(self, order: int) -> int:
        return pow(self.field.root_of_unity(order), -1 if self.inverse else 1, self.p)

    def powers(self, factors: tuple[int, int], m: int, by_bits: bool) -> RowPowers | None:
        """Return the powers scale base^r for the rows of pass m; None if all are 1."""
        scale, base = factors
        return None if factors == (1, 1) else RowPowers(scale, base, self.logs[m], by_bits)

    def twiddles(self, start: tuple[int, int], step: int, m: int, by_bits: bool) -> Twiddles:
        """Return the twiddles between pass m and those within: (scale base^r) (step w^r)^c for row r and column c."""
        w = self.root(self.inner(m) << self.logs[m])
        return Twiddles(RowPowers(*start, self.logs[m], by_bits), RowPowers(step, w, self.logs[m], by_bits))


def make_passes(
    field: Field, logs: Sequence[int], *, inverse: bool, coset: int, order: str, log_table: int
) -> tuple[Pass, ...]:
    """Return the passes of transforms of A B C points, by log2 of each; larger tables of twiddles are split."""
    transform = _Transform(field, tuple(logs), inverse, coset % field.modulus, order, log_table)
    numbers = range(len(transform.logs))
    if order == "bit_reversed_to_natural":
        return tuple(_reversed_input(transform, m) for m in reversed(numbers))
    return tuple(_natural_input(transform, m) for m in numbers)


def _natural_input(transform: _Transform, m: int) -> Pass:
    """Return pass m for input in natural order: twiddles after the sums, output row j at j or bitrev(j)."""
    p, g, last = transform.p, transform.coset, len(transform.logs) - 1
    by_bits = transform.order == "natural_to_bit_reversed"
    before, step, after = (1, 1), 1, (1, 1)  # before and after: a scale and a base of powers of the row
    if transform.inverse:
        scale = pow(transform.n, -1, p) if m == (0 if g == 1 else last) else 1
        after = (scale, pow(g, -transform.unit(m), p))
    elif m == 0:
        before, step = (1, pow(g, transform.inner(m), p)), g
    twiddles = None
    if m != last:
        twiddles, after = transform.twiddles(after, step, m, by_bits), (1, 1)
    return _pass(transform, m, transform.powers(before, m, False), transform.powers(after, m, by_bits), twiddles)


def _reversed_input(transform: _Transform, m: int) -> Pass:
    """Return pass m for input in bit-reversed order: twiddles before the sums, row i of the input at bitrev(i)."""
    p, g, last = transform.p, transform.coset, m == len(transform.logs) - 1
    before, step, after = (1, 1), 1, (1, 1)  # before and after: a scale and a base of powers of the row
    if not transform.inverse:
        before = (1, pow(g, transform.unit(m), p))
    elif m == 0:
        share = pow(transform.n, -1, p)
        before, step = (1 if last else share, 1), pow(g, -1, p)
        after = (share if last else 1, pow(g, -transform.inner(m), p))
    twiddles = None
    if not last:
        twiddles, before = transform.twiddles(before, step, m, True), (1, 1)
    return _pass(transform, m, transform.powers(before, m, True), transform.powers(after, m, False), twiddles)


def _pass(
    transform: _Transform, m: int, before: RowPowers | None, after: RowPowers | None, twiddles: Twiddles | None
) -> Pass:
    digits, reads, writes = _layouts(transform, m)
    log_rows, log_inner = transform.logs[m], digits[0]
    log_low = min(log_inner, max(transform.log_table - log_rows, -(-log_inner // 2), _LOG_NEAR)) if twiddles else 0
    reversed_in = transform.order == "bit_reversed_to_natural"
    variant = Variant(
        along_in=reads.row == 1,
        along_out=writes.row == 1,
        reversed_in=reversed_in,
        reversed_out=transform.order == "natural_to_bit_reversed",
        before=before is not None,
        after=after is not None,
        twiddle="" if twiddles is None else "before" if reversed_in else "after",
        split=twiddles is not None and log_low < log_inner,
    )
    root = transform.root(1 << log_rows)
    return Pass(variant, log_rows, digits, reads, writes, root, before, after, twiddles, log_low)


def _layouts(transform: _Transform, m: int) -> tuple[tuple[int, int], PassLayout, PassLayout]:
    rows, inner, n = 1 << transform.logs[m], transform.inner(m), transform.n
    if inner > 1:
        same = PassLayout((1, rows * inner, 0), inner)
        bits = inner.bit_length() - 1
        return (bits, _ALL - bits), same, same
    if transform.order != "natural" or m == 0:
        same = PassLayout((rows, 0, 0), 1)
        return (_ALL, 0), same, same
    logs = (*transform.logs[:m], 0)
    first, second = 1 << logs[0], 1 << logs[1]
    reads = PassLayout((n // first, n // (first * second), n), 1)
    return (logs[0], logs[1]), reads, PassLayout((1, first, n), first * second)


# --- reference --------------------------------------------------------------------------------------------------------
def bit_reversed(index: int, bits: int) -> int:
    """Return the number whose lowest `bits` bits are those of the index in the opposite order."""
    return int(f"{index:0{bits}b}"[::-1], 2) if bits else 0


def permuted(x: Sequence[int]) -> list[int]:
    """Return 2^k numbers in bit-reversed order."""
    return [x[i] for i in reversed_numbers(len(x).bit_length() - 1)]


def ntt_reference(
    x: Sequence[int], *, field: str, inverse: bool = False, coset: int = 1, order: str = "natural"
) -> list[int]:
    """Transform by halves (Cooley and Tukey 1965), in any order of the module; ConfigError without such a root."""
    row, n = field_of(field), len(x)
    p, w = row.modulus, row.root_of_unity(n)
    if order == "bit_reversed_to_natural":
        x = permuted(x)
    if inverse:
        y, unscaled, scale = _halves(x, pow(w, -1, p), p), pow(coset, -1, p), pow(n, -1, p)
        y = [value * scale % p for value in _scaled(y, unscaled, p)]
    else:
        y = _halves(_scaled(x, coset, p), w, p)
    return permuted(y) if order == "natural_to_bit_reversed" else y


def _scaled(x: Sequence[int], base: int, p: int) -> list[int]:
    """Return x_i base^i."""
    power, scaled = 1, []
    for value in x:
        scaled.append(value * power % p)
        power = power * base % p
    return scaled


def _halves(x: Sequence[int], w: int, p: int) -> list[int]:
    if len(x) == 1:
        return list(x)
    even, odd = (_halves(x[first::2], w * w % p, p) for first in (0, 1))
    odd = _scaled(odd, w, p)
    return [(a + b) % p for a, b in zip(even, odd, strict=True)] + [(a - b) % p for a, b in zip(even, odd, strict=True)]


# --- programs in C and WGSL ------------------------------------------------------------------------------------------
LADDER = 28  # Squares of each number in powers.c: exponents are below 2^28, since transforms have at most 2^27 points
_LOG_TURN = 4  # Log2 of the order of Goldilocks's roots that are powers of two, which have order 192


@dataclass(frozen=True, slots=True)
class Tile:
    """The division of a block's work.

    Log2 of the rows of a column, the columns of a block, and the elements of a thread (at most rows, and 4); blocks per
    NVIDIA multiprocessor for which registers must suffice, or 0.
    """

    rows: int
    columns: int
    radix: int
    resident: int = 0

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return 1 << self.rows + self.columns - self.radix


def has_quotients(field: Field) -> bool:
    """Return whether roots come with quotients: see limbs.h, whose bounds need p < 2^(32 n - 2) with some margin."""
    return field.limbs > 1 and 5 * field.modulus < montgomery_radix(field)


@functools.cache
def kernel_source(
    field: Field, variant: Variant, tile: Tile, inverse: bool = False, checked: bool = False
) -> KernelSource:
    """Return ntt_pass in C: the arguments are the CPU's without log_rows, with tables.device_tables.

    `inverse` matters only to Goldilocks, whose program contains roots. `checked`: a word follows x and z, which is set
    to 1 where an element of x is not below the modulus. ConfigError if the radix is above 4.
    """
    if tile.radix > _LOG_TURN:
        raise ConfigError(f"a pass takes a radix of at most {_LOG_TURN} (log2), got {tile.radix}")
    words = (f"*u{field.word_bits}",) * len(POINTERS)
    types = (*words[:2], *("*u32",) * checked, *words[2:], *("i64",) * (len(SCALARS) - 1))
    text = functools.partial(_pass_text, field, variant, tile, inverse, checked)
    wgsl = None if checked else functools.partial(_pass_wgsl, field, variant, tile)
    dialects = _dialects(field, f"{variant} {tile} {inverse} {checked}", text, wgsl)
    return KernelSource(f"ntt_{field.name}_{tile.rows}", dialects, {"ntt_pass": types})


@functools.cache
def powers_source(field: Field) -> KernelSource:
    """Return ntt_powers, see powers.c: pointers z and ladder, then seven numbers."""
    sizes = defined({"POWERS_LADDER": LADDER, "POWERS_BLOCK": BLOCK, "NTT_RESIDENT": 0})

    def wgsl() -> str:
        return _wgsl(field, ("z", "ladder"), _POWERS, {"LADDER": LADDER}) + _files("powers.wgsl")

    dialects = _dialects(field, "powers", lambda dialect: sizes + _files(_DEVICE[dialect], "powers.c"), wgsl)
    types = (f"*u{field.word_bits}",) * 2 + ("i64",) * 7
    return KernelSource(f"ntt_powers_{field.name}", dialects, {"ntt_powers": types})


def _dialects(
    field: Field, arguments: str, write: Callable[[str], str], wgsl: Callable[[], str] | None
) -> LazyDialects:
    """Return a program's dialects; beyond field and sources, the text of `write` depends on `arguments` only."""

    def text(dialect: str) -> str:
        return _field_text(field, dialect) + write(dialect)

    folders = ("algebra/field", "algebra/ntt")
    cuda = field_program.CudaProgram(f"{field} {arguments}", folders, functools.partial(text, "cuda"))
    others = {} if wgsl is None else {"wgsl": wgsl}
    return LazyDialects(portable=functools.partial(text, "portable"), cuda=lambda: cuda, **others)


@functools.cache
def _field_text(field: Field, dialect: str) -> str:
    """Return the field with the prefix F, the same for all programs of a plan."""
    return field_program.field_text(field, "F", dialect)


_DEVICE = {"portable": "device_c.h", "cuda": "device_cuda.h"}


def _files(*names: str) -> str:
    return field_program.read_files("algebra/ntt", *names)


_POWERS = ("log_rows", "log_count", "log_steps", "log_unit", "by_bits", "by_row", "by_column")


def _pass_wgsl(field: Field, variant: Variant, tile: Tile) -> str:
    values: dict[str, int | bool] = {
        "LOG_ROWS": tile.rows, "LOG_COLUMNS": tile.columns, "THREADS": tile.threads,
        "ALONG_IN": variant.along_in, "ALONG_OUT": variant.along_out,
        "REVERSED_IN": variant.reversed_in, "REVERSED_OUT": variant.reversed_out,
        "BEFORE": variant.before, "AFTER": variant.after,
        "TWIDDLE_BEFORE": variant.twiddle == "before", "TWIDDLE_AFTER": variant.twiddle == "after",
        "SPLIT": variant.split,
    }  # fmt: skip
    text = _files("kernel.wgsl").replace("@workgroup_size(THREADS)", f"@workgroup_size({tile.threads})")
    scalars = tuple(name for name in SCALARS if name != "log_rows")
    return _wgsl(field, POINTERS, scalars, values) + text


def _wgsl(field: Field, arrays: Sequence[str], scalars: Sequence[str], values: Mapping[str, int | bool]) -> str:
    """Return declarations, the field, and functions on the elements of each array."""
    declared = bindings(dict.fromkeys(arrays, "u32"), dict.fromkeys(scalars, "i64")) + constants(values)
    return (
        declared
        + field_program.field_wgsl(field, montgomery_radix(field) == 1)
        + "".join(map(field_program.accessors, arrays))
    )


def _pass_text(field: Field, variant: Variant, tile: Tile, inverse: bool, checked: bool, dialect: str) -> str:
    # All of a thread's levels come before the first exchange, since half of their products are by 1: BN254 saves 5%
    # of them at 2^20. Goldilocks multiplies between groups, so it has nothing to save, and fields of one word
    # are bound by memory: a number that leaves whole groups saves them a branch.
    all_first = field.limbs > 1 and tile.rows >= 2 * tile.radix
    values = {
        "LOG_ROWS": tile.rows,
        "LOG_COLUMNS": tile.columns,
        "LOG_RADIX": tile.radix,
        "RADIX": 1 << tile.radix,
        "FIRST": tile.radix if all_first else (tile.rows - 1) % tile.radix + 1,
        "THREADS": tile.threads,
        "RESIDENT": tile.resident,
        "WORDS": field.limbs,
        "ALONG_IN": variant.along_in,
        "ALONG_OUT": variant.along_out,
        "REVERSED_IN": variant.reversed_in,
        "REVERSED_OUT": variant.reversed_out,
        "BEFORE": variant.before,
        "AFTER": variant.after,
        "TWIDDLE_BEFORE": variant.twiddle == "before",
        "TWIDDLE_AFTER": variant.twiddle == "after",
        "SPLIT": variant.split,
        "CHECKED": checked,
    }
    constants = {f"NTT_{name}": int(value) for name, value in values.items()}
    levels = ["limbs.h" if has_quotients(field) else "levels.h"]
    if field.name == "goldilocks":
        levels = ["goldilocks_cuda.h"] * (dialect == "cuda") + ["goldilocks.h"]
        order = 1 << _LOG_TURN
        root = pow(field.root_of_unity(order), -1 if inverse else 1, field.modulus)
        shifts = (k for k in range(0, 192, 192 // order) if pow(2, k, field.modulus) == root)
        constants["NTT_SHIFT"] = next(shifts)  # the base-2 logarithm of the root
    return defined(constants) + _files(_DEVICE[dialect], *levels, "kernel.c")


# --- the CPU's pass --------------------------------------------------------------------------------------------------
def by_limbs(packed: PackedField) -> bool:
    """Return whether tables for FIELD_each hold 52-bit limbs."""
    return isinstance(packed, PackedIfma)


def _registers(packed: PackedField, code: FunctionBuilder, pack: Value) -> list[Value]:
    """Return the registers of a pack that has lanes."""
    return code.parts(pack) if by_limbs(packed) else [pack]


def _joined(packed: PackedField, code: FunctionBuilder, registers: Sequence[Value]) -> Value:
    return code.array(packed.type, registers) if by_limbs(packed) else registers[0]


def each_function(packed: PackedField) -> FunctionBuilder:
    """Return FIELD_each."""
    code = FunctionBuilder(f"{packed.field.name}_each", ["ptr %x", "i64 %i"], packed.type)
    if packed.lanes == 1:
        code.ret(packed.load(code, "%x", "%i", code.op("add", "%i", 1)))
        return code
    element, size = f"i{packed.field.word_bits}", packed.field.word_bits // 8
    count = packed.limbs if isinstance(packed, PackedIfma) else 1
    first = code.at(f"[{count} x {element}]", "%x", "%i")
    limbs = (code.load(element, first, k, align=size) for k in range(count))
    code.ret(_joined(packed, code, [code.broadcast(limb, packed.lanes) for limb in limbs]))
    return code


def each(packed: PackedField, code: FunctionBuilder, pointer: str, i: Operand) -> Value:
    """Append a call of FIELD_each."""
    return code(f"call {packed.type} @{packed.field.name}_each(ptr {pointer}, i64 {i})", packed.type)


def lane_order(packed: PackedField) -> Sequence[int]:
    """Return the element of a pack in memory that each lane holds."""
    return LANE_ORDER if by_limbs(packed) else range(packed.lanes)


def transposed(packed: PackedField, code: FunctionBuilder, packs: Sequence[Value]) -> list[Value]:
    """Return as many packs as lanes, transposed by log2(lanes) shuffles of each register."""
    lanes = packed.lanes
    rows = [_registers(packed, code, pack) for pack in packs]
    for step in (1 << level for level in range(lanes.bit_length() - 1)):
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for r in (r for r in range(lanes) if not r & step):
            for k, (a, b) in enumerate(zip(rows[r], rows[r + step], strict=True)):
                rows[r][k], rows[r + step][k] = (code.shuffle(a, b, order) for order in (low, high))
    return [_joined(packed, code, row) for row in rows]


def reversed_bits(code: FunctionBuilder, index: Value, bits: str) -> Value:
    """Return the lowest bits of an index in the opposite order; bits is a value of at least 1."""
    reverse = code.intrinsic("i64", "llvm.bitreverse.i64", index)
    return code.op("lshr", reverse, code.op("sub", constant("i64", 64), bits))


def radix_log(packed: PackedField) -> int:
    """Return the levels of a step: so many that its packs stay in registers; for words, as many as LLVM vectorizes."""
    return 3 if packed.field.limbs == 1 else 2


def sums(packed: PackedField) -> list[FunctionBuilder]:
    """Return FIELD_sums and its steps."""
    levels = range(1, radix_log(packed) + 1)
    return [*(_step(packed, count) for count in levels), *(_last(packed, count) for count in levels), _driver(packed)]


def _levels(
    packed: PackedField, code: FunctionBuilder, addresses: list[Value], factors: Sequence[Sequence[Value | None]]
) -> None:
    """Load 2^levels packs, transform them with factors[level][k] (None for 1), store them."""
    values = [code.load(packed.type, position) for position in addresses]
    for level in factors:
        half = len(level)
        for first in range(0, len(values), 2 * half):
            for k, factor in enumerate(level, start=first):
                a, b = values[k], values[k + half]
                values[k] = packed.call(code, "add", a, b)
                difference = packed.call(code, "sub", a, b)
                values[k + half] = difference if factor is None else packed.call(code, "mul", factor, difference)
    for position, value in zip(addresses, values, strict=True):
        code.store(packed.type, value, position)


def _step(packed: PackedField, levels: int) -> FunctionBuilder:
    """Return FIELD_step<levels>: those levels of all blocks of 2^log_size packs."""
    arguments = ["ptr noalias %rows", "ptr noalias %roots", "i64 %log_rows", "i64 %log_size"]
    code = FunctionBuilder(f"{packed.field.name}_step{levels}", arguments, attributes=NOINLINE)
    rows, size = (code.i64("shl", 1, log) for log in ("%log_rows", "%log_size"))
    quarter = code.op("lshr", size, levels)
    scale = code.op("sub", "%log_rows", "%log_size")
    with code.loop(0, rows, size) as first, code.loop(0, quarter) as j:
        offsets = [j]
        for _ in range(1, 1 << levels):
            offsets.append(code.op("add nsw", offsets[-1], quarter))
        addresses = [code.at(packed.type, "%rows", code.op("add nsw", first, offset)) for offset in offsets]
        factors = []
        for level in range(levels):
            shift = code.op("add", scale, level)
            half = offsets[: 1 << levels - level - 1]
            factors.append([each(packed, code, "%roots", code.op("shl", offset, shift)) for offset in half])
        _levels(packed, code, addresses, factors)
    code.ret()
    return code


def _last(packed: PackedField, levels: int) -> FunctionBuilder:
    """Return FIELD_last<levels>: the last levels, of blocks of 2^levels packs."""
    arguments = ["ptr noalias %rows", "ptr noalias %roots", "i64 %log_rows"]
    code = FunctionBuilder(f"{packed.field.name}_last{levels}", arguments, attributes=NOINLINE)
    rows = code.i64("shl", 1, "%log_rows")
    factors = []
    for level in range(levels):
        shift = code.op("add", code.op("sub", "%log_rows", levels), level)
        half = range(1 << levels - level - 1)
        factors.append([each(packed, code, "%roots", code.i64("shl", k, shift)) if k else None for k in half])
    with code.loop(0, rows, 1 << levels) as first:
        addresses = [code.at(packed.type, "%rows", code.op("add nsw", first, k)) for k in range(1 << levels)]
        _levels(packed, code, addresses, factors)
    code.ret()
    return code


def _driver(packed: PackedField) -> FunctionBuilder:
    """Return FIELD_sums: a first step of 1 to `most` levels, so that those left are a multiple of `most`."""
    name, most = packed.field.name, radix_log(packed)
    code = FunctionBuilder(f"{name}_sums", ["ptr %rows", "ptr %roots", "i64 %log_rows"], attributes=NOINLINE)
    rows = "ptr %rows, ptr %roots, i64 %log_rows"
    first = code.op("add", code.op("urem", code.op("sub", "%log_rows", 1), most), 1)
    single = code.compare("eq", first, "%log_rows")
    for levels in code.switch(first, range(1, most + 1)):
        for alone in code.branches(single):
            step = f"last{levels}({rows})" if alone else f"step{levels}({rows}, i64 %log_rows)"
            code.do(f"call void @{name}_{step}")
    for alone in code.branches(single):
        if alone:
            continue
        left = code.variable("i64", code.op("sub", "%log_rows", first))
        with code.loop(code.op("add", first, most), "%log_rows", most):
            size = left.get()
            code.do(f"call void @{name}_step{most}({rows}, i64 {size})")
            left.set(code.op("sub", size, most))
        code.do(f"call void @{name}_last{most}({rows})")
    code.ret()
    return code


POINTERS = ("x", "z", "roots", "before", "after", "low", "high")
SCALARS: tuple[str, ...] = ("count", "log_rows", "log_low", "digit_0", "digit_1")
SCALARS += ("read_0", "read_1", "read_2", "read_row", "write_0", "write_1", "write_2", "write_row")
"""Arguments of ntt_pass, in every dialect: pointers, then i64. count is the number of columns; for the others see
plan.Pass."""


def pass_kernel(field: Field, variant: Variant, form: str) -> LlvmProgram:
    """Return the program of ntt_pass in one of FORMS; a vector's lanes divide the adjacent columns and rows."""
    several, write = field.limbs > 1, functools.partial(_text, field, variant, form)
    share = 2048 if several else 16384
    return LlvmProgram(("ntt", field, variant, form), SOURCES, write, written_out=several, least_share=share)


@functools.lru_cache(maxsize=64)
def _text(field: Field, variant: Variant, form: str) -> str:
    packed = packed_field(field, form)
    return program([*packed.functions(), each_function(packed), *sums(packed), _Pass(packed, variant).function()])


class _Pass:
    """The writer of ntt_pass."""

    def __init__(self, packed: PackedField, variant: Variant) -> None:
        self.packed, self.variant = packed, variant
        typed = [f"ptr %{a}" if a in POINTERS else f"i64 %{a}" for a in ("begin", "end", *POINTERS, *SCALARS)]
        self.code = FunctionBuilder("ntt_pass", typed, linkage="", attributes="nounwind")

    def function(self) -> FunctionBuilder:
        packed, code = self.packed, self.code
        log_lanes = packed.lanes.bit_length() - 1
        self.rows = code.i64("shl", 1, "%log_rows")
        self.scratch = code(f"alloca {packed.type}, i64 {self.rows}, align 64", "ptr")
        log_tile = code.op("add", "%log_rows", log_lanes)
        above = code.op("sub", code.i64("shl", 1, log_tile), 1)
        limit = code.smin("%end", code.op("shl", "%count", "%log_rows"))
        first, stop = (code.op("lshr", code.op("add", bound, above), log_tile) for bound in ("%begin", limit))
        with code.loop(first, stop) as tile:
            reads, writes = self._digits(code.op("shl", tile, log_lanes))
            self._load(reads)
            code.do(f"call void @{packed.field.name}_sums(ptr {self.scratch}, ptr %roots, i64 %log_rows)")
            self._store(writes)
        code.ret()
        return code

    def _digits(self, column: Value) -> tuple[Value, Value]:
        """Return the indices at which a column is read and written; set low_digit, which the twiddles need."""
        code = self.code

        def low_bits(value: Value, bits: str) -> Value:
            return code.op("and", value, code.op("sub", code.i64("shl", 1, bits), 1))

        rest = code.op("lshr", column, "%digit_0")
        self.low_digit = low_bits(column, "%digit_0")
        digits = (self.low_digit, low_bits(rest, "%digit_1"), code.op("lshr", rest, "%digit_1"))
        starts = []
        for side in ("read", "write"):
            parts = [code.op("mul", digit, f"%{side}_{i}") for i, digit in enumerate(digits)]
            starts.append(code.op("add", parts[0], code.op("add", parts[1], parts[2])))
        return starts[0], starts[1]

    def _row(self, position: Value, in_bits: bool) -> Value:
        """Return the address on the stack of the pack for a position in memory."""
        index = reversed_bits(self.code, position, "%log_rows") if in_bits else position
        return self.code.at(self.packed.type, self.scratch, index)

    def _load(self, start: Value) -> None:
        packed, code, order = self.packed, self.code, lane_order(self.packed)

        def read(index: Value) -> Value:
            return packed.load(code, "%x", index, code.op("add", index, packed.lanes))

        def keep(position: Value, pack: Value) -> None:
            scaled = self._scaled(pack, position, "before")
            code.store(packed.type, scaled, self._row(position, self.variant.reversed_in))

        if self.variant.along_in and packed.lanes > 1:
            with code.loop(0, self.rows, packed.lanes) as position:
                packs = [read(self._sum(start, position, code.i64("mul", column, "%read_0"))) for column in order]
                for r, pack in zip(order, transposed(packed, code, packs), strict=True):
                    keep(code.op("add", position, r), pack)
        else:
            with code.loop(0, self.rows) as position:
                keep(position, read(self._sum(start, code.op("mul", position, "%read_row"))))

    def _store(self, start: Value) -> None:
        packed, code, order = self.packed, self.code, lane_order(self.packed)

        def kept(position: Value) -> Value:
            pack = code.load(packed.type, self._row(position, not self.variant.reversed_out))
            return self._scaled(pack, position, "after")

        def write(index: Value, pack: Value) -> None:
            packed.store(code, "%z", index, code.op("add", index, packed.lanes), pack)

        if self.variant.along_out and packed.lanes > 1:
            with code.loop(0, self.rows, packed.lanes) as position:
                packs = [kept(code.op("add", position, r)) for r in order]
                for column, pack in zip(order, transposed(packed, code, packs), strict=True):
                    write(self._sum(start, position, code.i64("mul", column, "%write_0")), pack)
        else:
            with code.loop(0, self.rows) as position:
                write(self._sum(start, code.op("mul", position, "%write_row")), kept(position))

    def _sum(self, *terms: Value) -> Value:
        return functools.reduce(lambda total, term: self.code.op("add", total, term), terms)

    def _scaled(self, pack: Value, position: Value, when: str) -> Value:
        """Return a pack of a row times its factors "before" or "after" the sums."""
        packed, code, variant = self.packed, self.code, self.variant
        if getattr(variant, when):
            pack = packed.call(code, "mul", each(packed, code, f"%{when}", position), pack)
        if variant.twiddle == when:
            mask = code.op("sub", code.i64("shl", 1, "%log_low"), 1)
            column = code.op("and", self.low_digit, mask)
            index = code.op("add", code.op("shl", position, "%log_low"), column)
            low = packed.load(code, "%low", index, code.op("add", index, packed.lanes))
            pack = packed.call(code, "mul", low, pack)
            if variant.split:
                bits = code.op("sub", "%digit_0", "%log_low")
                index = code.op("add", code.op("shl", position, bits), code.op("lshr", self.low_digit, "%log_low"))
                pack = packed.call(code, "mul", each(packed, code, "%high", index), pack)
        return pack
