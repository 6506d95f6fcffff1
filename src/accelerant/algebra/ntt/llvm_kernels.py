"""The CPU's pass of a transform: LLVM IR for one field and variant, in scalar or vector form.

ntt_pass transforms the columns whose elements are all in [begin, min(end, count 2^log_rows)), counted along the
columns, `lanes` columns at a time (a tile): it loads them as packs on the stack, one per row, transforms these, and
stores them. If a column's rows are neighbours in memory, as many packs as lanes are loaded along the rows and
transposed.

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

from __future__ import annotations

import functools
from collections.abc import Sequence

from accelerant.algebra.field.llvm_kernels import SOURCES, packed_field
from accelerant.algebra.field.llvm_packed import LANE_ORDER, PackedField, PackedIfma
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.ntt.plan import Variant
from accelerant.runtime.compilation.kernel import LlvmProgram
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, Operand, Value, constant, program


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
