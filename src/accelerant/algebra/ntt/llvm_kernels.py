"""The CPU's pass of a transform: LLVM IR for one field and variant, over a form of arithmetic.

ntt_pass does the columns of which all elements lie in [begin, min(end, count 2^log_rows)), counted along the columns,
`lanes` columns at a time (a tile): from memory to packs on the stack, one a row; the sums there (llvm_core.py); back.
Where a column's rows are neighbours, as many packs as lanes are loaded along the rows and turned.

Tables for FIELD_each (llvm_packs.py), as factors x L mod p of the form's L: roots, before, after, high. low: words, a
pack of which is factors of neighbouring columns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from accelerant.algebra.field.llvm_kernels import SOURCES, packed_field
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.ntt.llvm_core import sums
from accelerant.algebra.ntt.llvm_packs import each, each_function, lane_order, reversed_bits, transposed
from accelerant.algebra.ntt.plan import Variant
from accelerant.runtime.compilation.llvm import FunctionBuilder, Value, program
from accelerant.runtime.compilation.sources import builder_key

__all__ = ["POINTERS", "SCALARS", "PassKernel"]

POINTERS = ("x", "z", "roots", "before", "after", "low", "high")
SCALARS = (
    "count",
    "log_rows",
    "log_low",
    "digit_0",
    "digit_1",
    "read_0",
    "read_1",
    "read_2",
    "read_row",
    "write_0",
    "write_1",
    "write_2",
    "write_row",
)
"""Arguments of ntt_pass, in every dialect: pointers, then i64. See plan.py's Pass; count: of columns."""


@dataclass(frozen=True, slots=True)
class PassKernel:
    """A Builder (see runtime/compilation/kernel.py) of ntt_pass.

    Attributes:
        field: its name.
        variant: of the pass.
        form: one of algebra.field.llvm_kernels.FORMS. A vector's lanes must divide the count of columns, and rows
            where they are neighbours, and the lowest digit of columns where those are.
    """

    field: str
    variant: Variant
    form: str

    @property
    def key(self) -> str:
        """See builder_key; the text depends on the target in nothing else."""
        return builder_key((self, field_of(self.field)), *SOURCES)

    @property
    def written_out(self) -> bool:
        """Whether LLVM has little to do: see runtime/providers/cpu.py."""
        return field_of(self.field).limbs > 1

    @property
    def least_share(self) -> int:
        """Elements below which another thread costs more than it gives."""
        return 2048 if field_of(self.field).limbs > 1 else 16384

    def build(self, target: str) -> str:
        """LLVM IR.

        Raises:
            ConfigError: unknown field or form.
        """
        return _text(self.field, self.variant, self.form)


@functools.lru_cache(maxsize=64)
def _text(name: str, variant: Variant, kind: str) -> str:
    form = packed_field(field_of(name), kind)
    return program([*form.functions(), each_function(form), *sums(form), _Pass(form, variant).function()])


class _Pass:
    """Writes ntt_pass."""

    def __init__(self, form: PackedField, variant: Variant) -> None:
        self.form, self.variant = form, variant
        typed = [
            "i64 %begin",
            "i64 %end",
            *(f"ptr %{name}" for name in POINTERS),
            *(f"i64 %{name}" for name in SCALARS),
        ]
        self.code = FunctionBuilder("ntt_pass", typed, linkage="", attributes="nounwind")

    def function(self) -> FunctionBuilder:
        form, code = self.form, self.code
        log_lanes = form.lanes.bit_length() - 1
        self.rows = code.i64("shl", 1, "%log_rows")
        self.scratch = code(f"alloca {form.type}, i64 {self.rows}, align 64", "ptr")
        log_tile = code.op("add", "%log_rows", log_lanes)
        above = code.op("sub", code.i64("shl", 1, log_tile), 1)
        limit = code.smin("%end", code.op("shl", "%count", "%log_rows"))
        first, stop = (code.op("lshr", code.op("add", bound, above), log_tile) for bound in ("%begin", limit))
        with code.loop(first, stop) as tile:
            reads, writes = self._digits(code.op("shl", tile, log_lanes))
            self._load(reads)
            code.do(f"call void @{form.field.name}_sums(ptr {self.scratch}, ptr %roots, i64 %log_rows)")
            self._store(writes)
        code.ret()
        return code

    def _digits(self, column: Value) -> tuple[Value, Value]:
        """Return where a column is read and written; its lowest digit is kept, for the twiddles."""
        code = self.code

        def low_bits(value: Value, bits: str) -> Value:
            return code.op("and", value, code.op("sub", code.i64("shl", 1, bits), 1))

        rest = code.op("lshr", column, "%digit_0")
        self.low_digit = low_bits(column, "%digit_0")
        digits = (self.low_digit, low_bits(rest, "%digit_1"), code.op("lshr", rest, "%digit_1"))
        found = []
        for side in ("read", "write"):
            parts = [code.op("mul", digit, f"%{side}_{i}") for i, digit in enumerate(digits)]
            found.append(code.op("add", parts[0], code.op("add", parts[1], parts[2])))
        return found[0], found[1]

    # --- memory ------------------------------------------------------------------------------------------------------

    def _row(self, place: Value, in_bits: bool) -> Value:
        """Return the address of the pack on the stack that belongs to a place of memory."""
        index = reversed_bits(self.code, place, "%log_rows") if in_bits else place
        return self.code.at(self.form.type, self.scratch, index)

    def _load(self, start: Value) -> None:
        form, code, order = self.form, self.code, lane_order(self.form)

        def read(index: Value) -> Value:
            return form.load(code, "%x", index, code.op("add", index, form.lanes))

        def keep(place: Value, pack: Value) -> None:
            code.store(form.type, self._scaled(pack, place, "before"), self._row(place, self.variant.reversed_in))

        if self._transposes(self.variant.along_in):
            with code.loop(0, self.rows, form.lanes) as place:
                packs = [read(self._sum(start, place, code.i64("mul", column, "%read_0"))) for column in order]
                for r, pack in zip(order, transposed(form, code, packs), strict=True):
                    keep(code.op("add", place, r), pack)
        else:
            with code.loop(0, self.rows) as place:
                keep(place, read(self._sum(start, code.op("mul", place, "%read_row"))))

    def _store(self, start: Value) -> None:
        form, code, order = self.form, self.code, lane_order(self.form)

        def kept(place: Value) -> Value:
            pack = code.load(form.type, self._row(place, not self.variant.reversed_out))
            return self._scaled(pack, place, "after")

        def write(index: Value, pack: Value) -> None:
            form.store(code, "%z", index, code.op("add", index, form.lanes), pack)

        if self._transposes(self.variant.along_out):
            with code.loop(0, self.rows, form.lanes) as place:
                packs = [kept(code.op("add", place, r)) for r in order]
                for column, pack in zip(order, transposed(form, code, packs), strict=True):
                    write(self._sum(start, place, code.i64("mul", column, "%write_0")), pack)
        else:
            with code.loop(0, self.rows) as place:
                write(self._sum(start, code.op("mul", place, "%write_row")), kept(place))

    def _transposes(self, along: bool) -> bool:
        return along and self.form.lanes > 1

    def _sum(self, *terms: Value) -> Value:
        total = terms[0]
        for term in terms[1:]:
            total = self.code.op("add", total, term)
        return total

    # --- factors -----------------------------------------------------------------------------------------------------

    def _scaled(self, pack: Value, place: Value, when: str) -> Value:
        """Return a pack of a row times the factors that are due before the sums, or after them."""
        form, code, variant = self.form, self.code, self.variant
        if getattr(variant, when):
            pack = form.call(code, "mul", each(form, code, f"%{when}", place), pack)
        if variant.twiddle == when:
            mask = code.op("sub", code.i64("shl", 1, "%log_low"), 1)
            column = code.op("and", self.low_digit, mask)
            index = code.op("add", code.op("shl", place, "%log_low"), column)
            low = form.load(code, "%low", index, code.op("add", index, form.lanes))
            pack = form.call(code, "mul", low, pack)
            if variant.split:
                bits = code.op("sub", "%digit_0", "%log_low")
                index = code.op("add", code.op("shl", place, bits), code.op("lshr", self.low_digit, "%log_low"))
                pack = form.call(code, "mul", each(form, code, "%high", index), pack)
        return pack
