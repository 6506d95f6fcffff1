"""The CPU's field kernels: LLVM IR of every entry for one field, over whichever form of arithmetic the processor has.

An entry does the indices [begin, end) that lie below n; see runtime/providers/cpu.py. An element is `limbs` words,
contiguous, the least significant first. Arrays may be the same but must not overlap otherwise.

    field_add, field_sub                          (x, y, z, n)     canonical or Montgomery, as the operands are
    field_neg                                     (x, z, n)        the same
    field_mul, field_mul_montgomery               (x, y, z, n)     canonical: x y; Montgomery: x y / R
    field_square, field_square_montgomery         (x, z, n)
    field_to_montgomery, field_from_montgomery    (x, z, n)
    field_reduce                                  (x, z, n)        any words to the number mod p
    field_inv, field_inv_montgomery               (x, z, n)        0 to 0; one inversion for many
    field_pow, field_pow_montgomery               (x, z, exponent, bits, n)   x^0 = 1; time depends on the exponent only

Here an index is a chunk of `chunk` elements, the chunks at or above n left alone:

    field_sum                                     (x, partial, n, chunk)      partial[c]: the sum of chunk c
    field_dot, field_dot_montgomery               (x, y, partial, n, chunk)   of the products, as field_mul has them
    field_unreduced                               (x, first, n, chunk)        first[c]: least i with x_i >= p, else n

Operands are below p, but that field_reduce, field_unreduced, field_to_montgomery and field_from_montgomery take any
words, and so does y of a product whose x is below p. Other operands give undefined numbers, and nothing worse.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from accelerant.algebra.field.llvm_entries import ENTRIES, POINTERS
from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_lanes import Lanes
from accelerant.algebra.field.llvm_limbs import Limbs
from accelerant.algebra.field.llvm_text import NOINLINE, Body, builder_key, function
from accelerant.algebra.field.llvm_words import BabyBear, Goldilocks
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.errors import ConfigError

__all__ = ["FORMS", "FieldKernels", "form_of", "host_form"]

FORMS = ("scalar", "vector")
"""One element at a time; or several: by AVX512-IFMA, in Goldilocks and BabyBear by any vectors."""


def host_form(field: Field) -> str:
    """The faster form on this processor."""
    return "vector" if _host_has("avx512ifma" if field.limbs > 1 else "avx512dq") else "scalar"


@functools.cache
def _host_has(feature: str) -> bool:
    """Whether this processor has it; asking takes 2 ms."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get(feature, False))


def form_of(field: Field, kind: str) -> Form:
    """The arithmetic of a field; kind is one of FORMS.

    Raises:
        ConfigError: unknown kind.
    """
    if kind not in FORMS:
        raise ConfigError(f"unknown form {kind!r}; known are {', '.join(FORMS)}")
    if field.name == "goldilocks":
        return Goldilocks(field, 8 if kind == "vector" else 1)
    if field.word_bits == 32:
        return BabyBear(field, 16 if kind == "vector" else 1)
    return Lanes(field) if kind == "vector" else Limbs(field)


@dataclass(frozen=True, slots=True)
class FieldKernels:
    """A Builder (see runtime/compilation/kernel.py) of a field's entries.

    Attributes:
        field: its name.
        entry: the one entry to build, "field_mul"; all of them where it is "".
        form: one of FORMS; what this processor is best at where it is "".
    """

    field: str
    entry: str = ""
    form: str = ""

    @property
    def written_out(self) -> bool:
        """Whether LLVM has little to do: see runtime/providers/cpu.py."""
        return field_of(self.field).limbs > 1

    @property
    def key(self) -> str:
        """See builder_key; the text depends on the target in nothing else."""
        return builder_key(replace(self, form=self.form or host_form(field_of(self.field))))

    def build(self, target: str) -> str:
        """LLVM IR.

        Raises:
            ConfigError: unknown field, entry or form.
        """
        return _text(self.field, self.entry, self.form or host_form(field_of(self.field)))


@functools.cache
def _text(name: str, entry: str, kind: str) -> str:
    form = form_of(field_of(name), kind)
    wanted = [entry.removeprefix("field_")] if entry else list(ENTRIES)
    if wanted[0] not in ENTRIES:
        raise ConfigError(f"unknown entry {entry!r}; known are {', '.join(f'field_{known}' for known in ENTRIES)}")
    parts = ["declare i64 @llvm.smin.i64(i64, i64)\n", form.functions(), form.far(), _power(form), _fermat(form)]
    for known in wanted:
        arguments, write = ENTRIES[known]
        body = Body()
        write(form, body)
        typed = [f"ptr %{a}" if a in POINTERS else f"i64 %{a}" for a in arguments]
        parts.append(function(f"field_{known}", "void", ["i64 %begin", "i64 %end", *typed], body, "", "nounwind"))
    return "".join(parts)


def _power(form: Form) -> str:
    """FIELD_power(T x, ptr exponent, i64 bits): x^exponent of x in the form's Montgomery representation.

    From the top bit: a square, and a product where the bit is set. It branches on the exponent, which is public.
    """
    t, body = form.type, Body()
    one = form.constant(form.radix % form.field.modulus)
    body.do(f"br i1 {body('icmp sgt i64 %bits, 0')}, label %loop, label %done")
    body.label("loop")
    body.do("%i = phi i64 [ %bits, %0 ], [ %next, %after ]")
    body.do(f"%power = phi {t} [ {one}, %0 ], [ %power_next, %after ]")
    body.do("%next = sub nsw i64 %i, 1")
    square = form.call(body, "square_far", "%power")
    place = body(f"getelementptr inbounds i64, ptr %exponent, i64 {body('lshr i64 %next, 6')}")
    word = body(f"load i64, ptr {place}, align 8")
    shifted = body(f"lshr i64 {word}, {body('and i64 %next, 63')}")
    bit = body(f"trunc i64 {shifted} to i1")
    body.do(f"br i1 {bit}, label %multiply, label %after")
    body.label("multiply")
    product = form.call(body, "mul_far", square, "%x")
    body.do("br label %after")
    body.label("after")
    body.do(f"%power_next = phi {t} [ {square}, %loop ], [ {product}, %multiply ]")
    body.do(f"br i1 {body('icmp sgt i64 %next, 0')}, label %loop, label %done")
    body.label("done")
    body.do(f"%result = phi {t} [ {one}, %0 ], [ %power_next, %after ]")
    body.do(f"ret {t} %result")
    arguments = [f"{t} %x", "ptr %exponent", "i64 %bits"]
    return function(f"{form.field.name}_power", t, arguments, body, attributes=NOINLINE)


def _fermat(form: Form) -> str:
    """The words of p - 2, the exponent of an inversion."""
    exponent = form.field.modulus - 2
    words = [exponent >> 64 * i & (1 << 64) - 1 for i in range(-(-exponent.bit_length() // 64))]
    values = ", ".join(f"i64 {word}" for word in words)
    return f"@{form.field.name}_fermat = internal constant [{len(words)} x i64] [{values}], align 8\n"
