"""The CPU's field kernels: LLVM IR of every entry for one field.

An entry computes the indices in [begin, end) that are below n; see runtime/providers/cpu.py. An element is `limbs`
words, contiguous, the least significant first. Arrays may be the same but must not overlap otherwise.

    field_add, field_sub                          (x, y, z, n)     canonical or Montgomery, as the operands are
    field_neg                                     (x, z, n)        canonical or Montgomery, as x is
    field_mul, field_mul_montgomery               (x, y, z, n)     canonical: x y; Montgomery: x y / R
    field_square, field_square_montgomery         (x, z, n)
    field_to_montgomery, field_from_montgomery    (x, z, n)
    field_reduce                                  (x, z, n)        z = x mod p for any words
    field_inv, field_inv_montgomery               (x, z, n)        0 for 0; many share one inversion
    field_pow, field_pow_montgomery               (x, z, exponent, bits, n)   x^0 = 1; time depends on the exponent only

In the following entries an index is a chunk of `chunk` elements; chunks at or above n are skipped:

    field_sum                                     (x, partial, n, chunk)      partial[c]: the sum of chunk c
    field_dot, field_dot_montgomery               (x, y, partial, n, chunk)   the sum of the chunk's products
    field_unreduced                               (x, first, n, chunk)        first[c]: least i with x_i >= p, else n

Operands are below p, except that field_reduce, field_unreduced, field_to_montgomery and field_from_montgomery take any
words, and so does y of a product whose x is below p. Other operands give undefined numbers, but no error.
"""

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from accelerant.algebra.field import llvm_packed
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.algebra.field.parameters import Field, field_of
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import LlvmProgram
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, program

FORMS = ("scalar", "vector")  # One element at a time; or several, which needs AVX512-IFMA for fields of several limbs
SOURCES = ("algebra",)  # folders with code that writes kernels, the same for all: hashed once
_PACKS = 128  # packs that share an inversion; their prefix products take 64 KiB of stack


def host_form(field: Field) -> str:
    """Return the faster form on this processor."""
    return "vector" if host_has("avx512ifma" if field.limbs > 1 else "avx512dq") else "scalar"


@functools.cache
def host_has(feature: str) -> bool:
    """Return whether this processor has a feature; asking takes 2 ms."""
    import llvmlite.binding as llvm

    return bool(llvm.get_host_cpu_features().get(feature, False))


def packed_field(field: Field, form: str) -> PackedField:
    """Return a field's arithmetic in one of FORMS; ConfigError for another form."""
    if form not in FORMS:
        raise ConfigError(f"unknown form {form!r}; known are {', '.join(FORMS)}")
    if field.name == "goldilocks":
        return llvm_packed.PackedGoldilocks(field, 8 if form == "vector" else 1)
    if field.name == "mersenne61":
        return llvm_packed.PackedMersenne61(field, 8 if form == "vector" else 1)
    if field.word_bits == 32:
        return llvm_packed.PackedBabyBear(field, 16 if form == "vector" else 1)
    return llvm_packed.PackedIfma(field) if form == "vector" else llvm_packed.PackedLimbs(field)


def field_kernels(name: str, entry: str = "", form: str = "") -> LlvmProgram:
    """Return the program of a field's entries, or of one of them, in one of FORMS, by default the faster one here."""
    field = field_of(name)
    form = form or host_form(field)
    write = functools.partial(_text, field, entry, form)
    return LlvmProgram(("field", entry, form, field), SOURCES, write, written_out=field.limbs > 1)


@functools.cache
def _text(field: Field, entry: str, form: str) -> str:
    packed = packed_field(field, form)
    entries = entry_functions("field", ENTRIES, entry, _POINTERS, packed)
    return program([*packed.functions(), *packed.called_functions(), _power(packed), *entries])


def entry_functions(
    prefix: str, entries: Mapping[str, tuple[tuple[str, ...], Callable[..., None]]], entry: str,
    pointers: Container[str], *parameters: Any,
) -> list[FunctionBuilder]:  # fmt: skip
    """Return the entry points PREFIX_name, or only `entry`; `entries` has the arguments and the writer of the body."""
    if entry and entry.removeprefix(f"{prefix}_") not in entries:
        raise ConfigError(f"unknown entry {entry!r}; known are {', '.join(f'{prefix}_{known}' for known in entries)}")
    functions = []
    for name in [entry.removeprefix(f"{prefix}_")] if entry else entries:
        arguments, write = entries[name]
        typed = [f"ptr %{a}" if a in pointers else f"i64 %{a}" for a in ("begin", "end", *arguments)]
        code = FunctionBuilder(f"{prefix}_{name}", typed, linkage="", attributes="nounwind")
        write(*parameters, code)
        code.ret()
        functions.append(code)
    return functions


def _power(packed: PackedField) -> FunctionBuilder:
    """Return FIELD_power(T x, ptr exponent, i64 bits), x^exponent from the top bit; it branches on the exponent."""
    arguments = [f"{packed.type} %x", "ptr %exponent", "i64 %bits"]
    code = FunctionBuilder(f"{packed.field.name}_power", arguments, packed.type, attributes=NOINLINE)
    power = code.variable(packed.type, packed.constant(packed.radix % packed.field.modulus))
    with code.countdown("%bits") as i:
        power.set(packed.call(code, "square_call", power.get()))
        word = code.load("i64", "%exponent", code.i64("lshr", i, 6), align=8)
        with code.when(code.convert("trunc", code.op("lshr", word, code.i64("and", i, 63)), "i1")):
            power.set(packed.call(code, "mul_call", power.get(), "%x"))
    code.ret(power.get())
    return code


Writer = Callable[[PackedField, FunctionBuilder], None]


@contextmanager
def _each_pack(packed: PackedField, code: FunctionBuilder) -> Iterator[tuple[str, str]]:
    """Append a loop over the packs of [begin, min(end, n)); yields a pack's first index, and the last one's end."""
    stop = code.smin("%end", "%n")
    with code.loop("%begin", stop, packed.lanes) as i:
        yield i, stop


@contextmanager
def _each_chunk(code: FunctionBuilder) -> Iterator[tuple[str, str, str]]:
    """Append a loop over the chunks [begin, end) that begin below n; yields a chunk, its first index and its end."""
    with code.loop("%begin", "%end") as chunk:
        first = code.op("mul", chunk, "%chunk")
        with code.when(code.compare("slt", first, "%n")):
            yield chunk, first, code.smin("%n", code.op("add", first, "%chunk"))


def _elementwise(name: str, pointers: tuple[str, ...]) -> Writer:
    """Return the writer of z = name(*pointers), name a function of PackedField."""

    def write(packed: PackedField, code: FunctionBuilder) -> None:
        with _each_pack(packed, code) as (i, stop):
            operands = [packed.load(code, pointer, i, stop) for pointer in pointers]
            packed.store(code, "%z", i, stop, packed.call(code, name, *operands))

    return write


def _product(packed: PackedField, code: FunctionBuilder, name: str, montgomery: bool, i: str, stop: str) -> str:
    """Append x y ("mul") or x x ("square"), divided by R for the Montgomery entries, else by L."""
    shifted = {"mul": "_left", "square": "_half"}[name] if montgomery and packed.shift else ""
    operands = [packed.load(code, "%x", i, stop, shifted)]
    if name == "mul":
        operands.append(packed.load(code, "%y", i, stop))
    return packed.call(code, name if montgomery else f"{name}_call", *operands)


def _products(name: str, montgomery: bool) -> Writer:
    def write(packed: PackedField, code: FunctionBuilder) -> None:
        with _each_pack(packed, code) as (i, stop):
            product = _product(packed, code, name, montgomery, i, stop)
            packed.store(code, "%z", i, stop, product if montgomery else packed.times(code, product, packed.radix**2))

    return write


def _scale(exponent: int) -> Writer:
    """Return the writer of z = x R^exponent for any words x, which the product reduces even if the exponent is 0."""

    def write(packed: PackedField, code: FunctionBuilder) -> None:
        p = packed.field.modulus
        constant = packed.constant(packed.radix * pow(packed.memory_radix, exponent, p) % p)
        with _each_pack(packed, code) as (i, stop):
            product = packed.call(code, "mul_call", constant, packed.load(code, "%x", i, stop))
            packed.store(code, "%z", i, stop, product)

    return write


def _pow(montgomery: bool) -> Writer:
    """Return the writer of powers: x is converted to the pack's own representation x L, and the power back."""

    def write(packed: PackedField, code: FunctionBuilder) -> None:
        unit = packed.memory_radix if montgomery else 1
        enter = packed.radix**2 * pow(unit, -1, packed.field.modulus)
        with _each_pack(packed, code) as (i, stop):
            x = packed.times(code, packed.load(code, "%x", i, stop), enter)
            arguments = f"({packed.type} {x}, ptr %exponent, i64 %bits)"
            power = code(f"call {packed.type} @{packed.field.name}_power{arguments}", packed.type)
            packed.store(code, "%z", i, stop, packed.times(code, power, unit))

    return write


def _inv(montgomery: bool) -> Writer:
    """Return the writer of inverses by Montgomery's trick on blocks of _PACKS packs.

    Under the product x y / L the inverse of u is L^2 / u. The result is to be R^2 / u (canonical: 1 / u), so the
    block's inverse is multiplied by R^2 / L once, and that factor carries over to the inverse of each element.
    Source: Montgomery 1987, Mathematics of Computation 48(177), section 10.3.1.
    """

    def write(packed: PackedField, code: FunctionBuilder) -> None:
        field, t, lanes = packed.field, packed.type, packed.lanes
        p = field.modulus
        one = packed.constant(packed.radix % p)
        unit = packed.memory_radix if montgomery else 1
        exponent = [p - 2 >> 64 * i & (1 << 64) - 1 for i in range(-(-(p - 2).bit_length() // 64))]
        fermat = code.table(f"{field.name}_fermat", "i64", exponent, align=8)
        prefixes = code.stack(t, _PACKS)
        bound = code.smin("%end", "%n")
        with code.loop("%begin", bound, _PACKS * lanes) as base:
            stop = code.smin(code.op("add", base, _PACKS * lanes), bound)
            packs = code.op("sdiv", code.op("add", code.op("sub nsw", stop, base), lanes - 1), lanes)
            product = code.variable(t, one)

            def load(k: str, base: str = base, stop: str = stop) -> tuple[str, str, str]:
                """Append loads of pack k; return its index, the pack, and the pack with 1 for 0."""
                i = code.i64("add nsw", base, code.i64("mul nsw", k, lanes))
                x = packed.load(code, "%x", i, stop)
                return i, x, packed.call(code, "one_for_zero", x, one)

            with code.loop(0, packs) as k:
                code.store(t, product.get(), prefixes, k)
                product.set(packed.call(code, "mul_call", product.get(), load(k)[2]))
            arguments = f"({t} {product.get()}, ptr {fermat}, i64 {(p - 2).bit_length()})"
            power = code(f"call {t} @{field.name}_power{arguments}", t)
            inverse = code.variable(t, packed.times(code, power, unit**2 * pow(packed.radix, -1, p)))
            with code.countdown(packs) as k:
                prefix = code.load(t, prefixes, k)
                i, x, factor = load(k)
                result = packed.call(code, "mul_call", inverse.get(), prefix)
                packed.store(code, "%z", i, stop, packed.call(code, "keep_zero", x, result))
                inverse.set(packed.call(code, "mul_call", inverse.get(), factor))

    return write


def _total(term: Callable[[PackedField, FunctionBuilder, str, str], str], canonical_products: bool = False) -> Writer:
    """Return the writer of the sum of a chunk's terms; canonical products are multiplied by L once, at the end."""

    def write(packed: PackedField, code: FunctionBuilder) -> None:
        with _each_chunk(code) as (chunk, first, stop):
            total = code.variable(packed.type, packed.constant(0))
            with code.loop(first, stop, packed.lanes) as i:
                total.set(packed.call(code, "add", total.get(), term(packed, code, i, stop)))
            whole: str = packed.call(code, "fold", total.get())
            if canonical_products:
                whole = packed.times(code, whole, packed.radix**2)
            packed.store(code, "%partial", chunk, code.i64("add", chunk, 1), whole)

    return write


def _dot(montgomery: bool) -> Writer:
    return _total(lambda packed, code, i, stop: _product(packed, code, "mul", montgomery, i, stop), not montgomery)


def _unreduced(packed: PackedField, code: FunctionBuilder) -> None:
    """Search one element at a time in either form: bound by memory."""
    word = f"i{packed.field.limbs * packed.field.word_bits}"
    with _each_chunk(code) as (chunk, first, stop):
        least = code.variable("i64", "%n")
        with code.loop(first, stop) as i:
            address = code.at(f"[{packed.field.limbs} x i{packed.field.word_bits}]", "%x", i)
            value = code.load(word, address, align=packed.field.word_bits // 8)
            index = code.select(code.compare("uge", value, packed.field.modulus), i, "%n")
            least.set(code.smin(least.get(), index))
        code.store("i64", least.get(), "%first", chunk, align=8)


_POINTERS = ("x", "y", "z", "partial", "first", "exponent")
_BINARY, _UNARY, _POWER = ("x", "y", "z", "n"), ("x", "z", "n"), ("x", "z", "exponent", "bits", "n")
_DOT = ("x", "y", "partial", "n", "chunk")
ENTRIES: Mapping[str, tuple[tuple[str, ...], Writer]] = {
    "add": (_BINARY, _elementwise("add", ("%x", "%y"))),
    "sub": (_BINARY, _elementwise("sub", ("%x", "%y"))),
    "neg": (_UNARY, _elementwise("neg", ("%x",))),
    "mul": (_BINARY, _products("mul", False)),
    "mul_montgomery": (_BINARY, _products("mul", True)),
    "square": (_UNARY, _products("square", False)),
    "square_montgomery": (_UNARY, _products("square", True)),
    "to_montgomery": (_UNARY, _scale(1)),
    "from_montgomery": (_UNARY, _scale(-1)),
    "reduce": (_UNARY, _scale(0)),
    "pow": (_POWER, _pow(False)),
    "pow_montgomery": (_POWER, _pow(True)),
    "inv": (_UNARY, _inv(False)),
    "inv_montgomery": (_UNARY, _inv(True)),
    "sum": (("x", "partial", "n", "chunk"), _total(lambda packed, code, i, stop: packed.load(code, "%x", i, stop))),
    "dot": (_DOT, _dot(False)),
    "dot_montgomery": (_DOT, _dot(True)),
    "unreduced": (("x", "first", "n", "chunk"), _unreduced),
}
