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

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_kernels import form_of
from accelerant.algebra.field.llvm_text import Body, builder_key, function
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.ntt.llvm_core import sums
from accelerant.algebra.ntt.llvm_packs import Loops, each, each_function, lane_order, reversed_bits, turned
from accelerant.algebra.ntt.plan import Variant

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
        return builder_key(self)

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
    form = form_of(field_of(name), kind)
    declarations = "declare i64 @llvm.smin.i64(i64, i64)\ndeclare i64 @llvm.bitreverse.i64(i64)\n"
    return declarations + form.functions() + each_function(form) + sums(form) + _Pass(form, variant).text()


class _Pass:
    """Writes ntt_pass."""

    def __init__(self, form: Form, variant: Variant) -> None:
        self.form, self.variant = form, variant
        self.body = Body()

    def text(self) -> str:
        form, body = self.form, self.body
        log_lanes = form.lanes.bit_length() - 1
        loops = Loops(body, 3)
        self.rows = body("shl i64 1, %log_rows")
        self.scratch = body(f"alloca {form.type}, i64 {self.rows}, align 64")
        log_tile = body(f"add i64 %log_rows, {log_lanes}")
        above = body(f"sub i64 {body(f'shl i64 1, {log_tile}')}, 1")
        limit = body(f"call i64 @llvm.smin.i64(i64 %end, i64 {body('shl i64 %count, %log_rows')})")
        first, stop = (body(f"lshr i64 {body(f'add i64 {bound}, {above}')}, {log_tile}") for bound in ("%begin", limit))

        def tile(number: str) -> None:
            column = body(f"shl i64 {number}, {log_lanes}")
            reads, writes = self._digits(column)
            self._load(loops, reads)
            body.do(f"call void @{form.field.name}_sums(ptr {self.scratch}, ptr %roots, i64 %log_rows)")
            self._store(loops, writes)

        loops(first, stop, "1", tile)
        body.do("ret void")
        typed = [
            "i64 %begin",
            "i64 %end",
            *(f"ptr %{name}" for name in POINTERS),
            *(f"i64 %{name}" for name in SCALARS),
        ]
        return function("ntt_pass", "void", typed, body, "", "nounwind")

    def _digits(self, column: str) -> tuple[str, str]:
        """Where a column is read and written; its lowest digit is kept, for the twiddles."""
        body = self.body

        def cut(value: str, bits: str) -> str:
            size = body(f"shl i64 1, {bits}")
            return body(f"and i64 {value}, {body(f'sub i64 {size}, 1')}")

        rest = body(f"lshr i64 {column}, %digit_0")
        self.low_digit = cut(column, "%digit_0")
        digits = (self.low_digit, cut(rest, "%digit_1"), body(f"lshr i64 {rest}, %digit_1"))
        found = []
        for side in ("read", "write"):
            parts = [body(f"mul i64 {digit}, %{side}_{i}") for i, digit in enumerate(digits)]
            found.append(body(f"add i64 {parts[0]}, {body(f'add i64 {parts[1]}, {parts[2]}')}"))
        return found[0], found[1]

    # --- memory ------------------------------------------------------------------------------------------------------

    def _row(self, place: str, in_bits: bool) -> str:
        """The pack on the stack that belongs to a place of memory."""
        body = self.body
        index = reversed_bits(body, place, "%log_rows") if in_bits else place
        return body(f"getelementptr inbounds {self.form.type}, ptr {self.scratch}, i64 {index}")

    def _load(self, loops: Loops, start: str) -> None:
        form, body, order = self.form, self.body, lane_order(self.form)

        def keep(place: str, pack: str) -> None:
            scaled = self._scaled(pack, place, "before")
            body.do(f"store {form.type} {scaled}, ptr {self._row(place, self.variant.reversed_in)}")

        if self._turns(self.variant.along_in):

            def block(place: str) -> None:
                packs = []
                for column in order:
                    at = self._plus(start, place, body(f"mul i64 {column}, %read_0"))
                    packs.append(form.load(body, "%x", at, body(f"add i64 {at}, {form.lanes}")))
                for r, pack in zip(order, turned(form, body, packs), strict=True):
                    keep(body(f"add i64 {place}, {r}"), pack)

            loops("0", self.rows, str(form.lanes), block)
        else:

            def row(place: str) -> None:
                at = self._plus(start, body(f"mul i64 {place}, %read_row"))
                keep(place, form.load(body, "%x", at, body(f"add i64 {at}, {form.lanes}")))

            loops("0", self.rows, "1", row)

    def _store(self, loops: Loops, start: str) -> None:
        form, body, order = self.form, self.body, lane_order(self.form)

        def kept(place: str) -> str:
            pack = body(f"load {form.type}, ptr {self._row(place, not self.variant.reversed_out)}")
            return self._scaled(pack, place, "after")

        def put(at: str, pack: str) -> None:
            form.store(body, "%z", at, body(f"add i64 {at}, {form.lanes}"), pack)

        if self._turns(self.variant.along_out):

            def block(place: str) -> None:
                packs = [kept(body(f"add i64 {place}, {r}")) for r in order]
                for column, pack in zip(order, turned(form, body, packs), strict=True):
                    put(self._plus(start, place, body(f"mul i64 {column}, %write_0")), pack)

            loops("0", self.rows, str(form.lanes), block)
        else:

            def row(place: str) -> None:
                put(self._plus(start, body(f"mul i64 {place}, %write_row")), kept(place))

            loops("0", self.rows, "1", row)

    def _turns(self, along: bool) -> bool:
        return along and self.form.lanes > 1

    def _plus(self, *terms: str) -> str:
        total = terms[0]
        for term in terms[1:]:
            total = self.body(f"add i64 {total}, {term}")
        return total

    # --- factors -----------------------------------------------------------------------------------------------------

    def _scaled(self, pack: str, place: str, when: str) -> str:
        """A pack of a row's place times the factors that stand before the sums, or after them."""
        form, body, variant = self.form, self.body, self.variant
        if getattr(variant, when):
            pack = form.call(body, "mul", each(form, body, f"%{when}", place), pack)
        if variant.twiddle == when:
            mask = body(f"sub i64 {body('shl i64 1, %log_low')}, 1")
            column = body(f"and i64 {self.low_digit}, {mask}")
            at = self._plus(body(f"shl i64 {place}, %log_low"), column)
            pack = form.call(body, "mul", form.load(body, "%low", at, body(f"add i64 {at}, {form.lanes}")), pack)
            if variant.split:
                bits = body("sub i64 %digit_0, %log_low")
                at = self._plus(body(f"shl i64 {place}, {bits}"), body(f"lshr i64 {self.low_digit}, %log_low"))
                pack = form.call(body, "mul", each(form, body, "%high", at), pack)
        return pack
