"""The bodies of the CPU's field entries, over any form of arithmetic: loops, memory, Montgomery's factors.

ENTRIES has them by name; llvm_kernels.py says what each computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_text import Body

__all__ = ["ENTRIES", "POINTERS", "Writer"]

Writer = Callable[[Form, Body], None]

_PACKS = 128
"""Packs that share an inversion (some 380 products for 254 bits; three more for each pack). Their prefix products
lie on the stack: 64 KiB where a pack is eight 512-bit registers."""


# --- loops -----------------------------------------------------------------------------------------------------------


def _least(body: Body, x: str, y: str) -> str:
    return body(_smin(x, y))


def _each_pack(form: Form, body: Body, step: Callable[[str, str], None]) -> None:
    """Write a loop over the packs of [begin, min(end, n)); step(i, stop) writes its inside."""
    stop = _least(body, "%end", "%n")
    body.do(f"br i1 {body(f'icmp slt i64 %begin, {stop}')}, label %loop, label %done")
    body.label("loop")
    body.do("%i = phi i64 [ %begin, %0 ], [ %next, %loop ]")
    step("%i", stop)
    body.do(f"%next = add nsw i64 %i, {form.lanes}")
    body.do(f"br i1 {body(f'icmp slt i64 %next, {stop}')}, label %loop, label %done")
    body.label("done")
    body.do("ret void")


def _each_chunk(body: Body, write: Callable[[str, str], None]) -> None:
    """Write a loop over the chunks [begin, end) that begin below n; write(first, stop) writes its inside, to %more."""
    body.do("br label %head")
    body.label("head")
    body.do("%c = phi i64 [ %begin, %0 ], [ %next_c, %more ]")
    first = body("mul i64 %c, %chunk")
    inside = body(f"and i1 {body('icmp slt i64 %c, %end')}, {body(f'icmp slt i64 {first}, %n')}")
    body.do(f"br i1 {inside}, label %chunk_begin, label %done")
    body.label("chunk_begin")
    stop = _least(body, "%n", body(f"add i64 {first}, %chunk"))
    write(first, stop)
    body.label("more")
    body.do("%next_c = add nsw i64 %c, 1")
    body.do("br label %head")
    body.label("done")
    body.do("ret void")


# --- entries ---------------------------------------------------------------------------------------------------------


def _pairwise(name: str) -> Writer:
    """The entry z = name(x, y), name a function of the form."""

    def write(form: Form, body: Body) -> None:
        def step(i: str, stop: str) -> None:
            x, y = (form.load(body, pointer, i, stop) for pointer in ("%x", "%y"))
            form.store(body, "%z", i, stop, form.call(body, name, x, y))

        _each_pack(form, body, step)

    return write


def _neg(form: Form, body: Body) -> None:
    def step(i: str, stop: str) -> None:
        form.store(body, "%z", i, stop, form.call(body, "neg", form.load(body, "%x", i, stop)))

    _each_pack(form, body, step)


def _product(form: Form, body: Body, montgomery: bool, pointers: tuple[str, str], i: str, stop: str) -> str:
    """X y / R for the Montgomery entries, else x y / L."""
    left = "_left" if montgomery and form.shift else ""
    x, y = form.load(body, pointers[0], i, stop, left), form.load(body, pointers[1], i, stop)
    return form.call(body, "mul" if montgomery else "mul_far", x, y)


def _mul(montgomery: bool) -> Writer:
    def write(form: Form, body: Body) -> None:
        def step(i: str, stop: str) -> None:
            product = _product(form, body, montgomery, ("%x", "%y"), i, stop)
            if not montgomery:
                product = form.times(body, product, form.radix**2)
            form.store(body, "%z", i, stop, product)

        _each_pack(form, body, step)

    return write


def _square(montgomery: bool) -> Writer:
    def write(form: Form, body: Body) -> None:
        def step(i: str, stop: str) -> None:
            half = "_half" if montgomery and form.shift else ""
            name = "square" if montgomery else "square_far"
            square = form.call(body, name, form.load(body, "%x", i, stop, half))
            if not montgomery:
                square = form.times(body, square, form.radix**2)
            form.store(body, "%z", i, stop, square)

        _each_pack(form, body, step)

    return write


def _scale(factor: Callable[[Form], int]) -> Writer:
    """The entry z = x factor / L; also of x not below p, and so not left out where the factor is L."""

    def write(form: Form, body: Body) -> None:
        constant = form.constant(factor(form) % form.field.modulus)

        def step(i: str, stop: str) -> None:
            product = form.call(body, "mul_far", constant, form.load(body, "%x", i, stop))
            form.store(body, "%z", i, stop, product)

        _each_pack(form, body, step)

    return write


def _over_memory_radix(form: Form) -> int:
    """L / R mod p."""
    return form.radix * pow(form.memory_radix, -1, form.field.modulus)


def _pow(montgomery: bool) -> Writer:
    """Into the form's own Montgomery representation x L, the power there, and back."""

    def write(form: Form, body: Body) -> None:
        kept = form.memory_radix if montgomery else 1
        enter = form.radix**2 * pow(kept, -1, form.field.modulus)

        def step(i: str, stop: str) -> None:
            x = form.times(body, form.load(body, "%x", i, stop), enter)
            name = f"{form.field.name}_power"
            power = body(f"call {form.type} @{name}({form.type} {x}, ptr %exponent, i64 %bits)")
            form.store(body, "%z", i, stop, form.times(body, power, kept))

        _each_pack(form, body, step)

    return write


def _inv(montgomery: bool) -> Writer:
    """Montgomery's trick on blocks of _PACKS packs.

    The products x * y = x y / L of what is in memory make a group with unit L, in which 1/u is L^2 / u; what is wanted
    is R^2 / u (canonical: 1 / u), so the block's inverse is multiplied by R^2 / L once and all that follow are too.
    Source: Montgomery 1987, Mathematics of Computation 48(177), section 10.3.1.
    """

    def write(form: Form, body: Body) -> None:
        field, t = form.field, form.type
        p = field.modulus
        one = form.constant(form.radix % p)
        kept = form.memory_radix if montgomery else 1
        size = _PACKS * form.lanes

        def factor(i: str) -> tuple[str, str]:
            x = form.load(body, "%x", i, "%stop")
            return x, form.call(body, "one_for_zero", x, one)

        body.do(f"%prefix = alloca [{_PACKS} x {t}]")
        body.do(f"%bound = {_smin('%end', '%n')}")
        body.do("br label %block")
        body.label("block")
        body.do("%base = phi i64 [ %begin, %0 ], [ %stop, %block_done ]")
        body.do(f"br i1 {body('icmp slt i64 %base, %bound')}, label %begin_block, label %done")
        body.label("begin_block")
        body.do(f"%stop = {_smin(body(f'add i64 %base, {size}'), '%bound')}")
        body.do("br label %forward")
        body.label("forward")
        body.do("%i = phi i64 [ %base, %begin_block ], [ %i_next, %forward ]")
        body.do("%k = phi i64 [ 0, %begin_block ], [ %k_next, %forward ]")
        body.do(f"%product = phi {t} [ {one}, %begin_block ], [ %product_next, %forward ]")
        body.do(f"%place = getelementptr inbounds {t}, ptr %prefix, i64 %k")
        body.do(f"store {t} %product, ptr %place")
        _, x = factor("%i")
        body.do(f"%product_next = {form.called('mul_far', '%product', x)}")
        body.do(f"%i_next = add nsw i64 %i, {form.lanes}")
        body.do("%k_next = add nsw i64 %k, 1")
        body.do(f"br i1 {body('icmp slt i64 %i_next, %stop')}, label %forward, label %invert")
        body.label("invert")
        name = field.name
        bits = (p - 2).bit_length()
        power = body(f"call {t} @{name}_power({t} %product_next, ptr @{name}_fermat, i64 {bits})")
        scaled = form.times(body, power, kept**2 * pow(form.radix, -1, p))
        body.do("br label %backward")
        body.label("backward")
        body.do("%j = phi i64 [ %i, %invert ], [ %j_next, %backward ]")
        body.do("%m = phi i64 [ %k, %invert ], [ %m_next, %backward ]")
        body.do(f"%inverse = phi {t} [ {scaled}, %invert ], [ %inverse_next, %backward ]")
        body.do(f"%at = getelementptr inbounds {t}, ptr %prefix, i64 %m")
        before = body(f"load {t}, ptr %at")
        raw, x = factor("%j")
        result = form.call(body, "keep_zero", raw, form.call(body, "mul_far", "%inverse", before))
        form.store(body, "%z", "%j", "%stop", result)
        body.do(f"%inverse_next = {form.called('mul_far', '%inverse', x)}")
        body.do(f"%j_next = sub nsw i64 %j, {form.lanes}")
        body.do("%m_next = sub nsw i64 %m, 1")
        body.do(f"br i1 {body('icmp sge i64 %m_next, 0')}, label %backward, label %block_done")
        body.label("block_done")
        body.do("br label %block")
        body.label("done")
        body.do("ret void")

    return write


def _smin(x: str, y: str) -> str:
    return f"call i64 @llvm.smin.i64(i64 {x}, i64 {y})"


def _total(term: Callable[[Form, Body, str, str], str], montgomery: bool | None) -> Writer:
    """The sum of a chunk's terms; canonical products are freed of their 1 / L once, at the end."""

    def write(form: Form, body: Body) -> None:
        def chunk(first: str, stop: str) -> None:
            t = form.type
            body.do("br label %loop")
            body.label("loop")
            body.do(f"%i = phi i64 [ {first}, %chunk_begin ], [ %next, %loop ]")
            body.do(f"%sum = phi {t} [ {form.constant(0)}, %chunk_begin ], [ %sum_next, %loop ]")
            body.do(f"%sum_next = {form.called('add', '%sum', term(form, body, '%i', stop))}")
            body.do(f"%next = add nsw i64 %i, {form.lanes}")
            body.do(f"br i1 {body(f'icmp slt i64 %next, {stop}')}, label %loop, label %total")
            body.label("total")
            total = form.call(body, "fold", "%sum_next")
            if montgomery is False:
                total = form.times(body, total, form.radix**2)
            form.store(body, "%partial", "%c", body("add i64 %c, 1"), total)
            body.do("br label %more")

        _each_chunk(body, chunk)

    return write


def _element(form: Form, body: Body, i: str, stop: str) -> str:
    return form.load(body, "%x", i, stop)


def _dot(montgomery: bool) -> Writer:
    return _total(lambda form, body, i, stop: _product(form, body, montgomery, ("%x", "%y"), i, stop), montgomery)


def _unreduced(form: Form, body: Body) -> None:
    """One element at a time, in any form: bound by memory."""
    bits = form.field.limbs * form.field.word_bits

    def chunk(first: str, stop: str) -> None:
        body.do("br label %loop")
        body.label("loop")
        body.do(f"%i = phi i64 [ {first}, %chunk_begin ], [ %next, %loop ]")
        body.do("%least = phi i64 [ %n, %chunk_begin ], [ %least_next, %loop ]")
        at = body(f"getelementptr inbounds [{bits // 32} x i32], ptr %x, i64 %i")
        value = body(f"load i{bits}, ptr {at}, align {form.field.word_bits // 8}")
        large = body(f"icmp uge i{bits} {value}, {form.field.modulus}")
        seen = body(f"select i1 {large}, i64 %i, i64 %n")
        body.do(f"%least_next = {_smin('%least', seen)}")
        body.do("%next = add nsw i64 %i, 1")
        body.do(f"br i1 {body(f'icmp slt i64 %next, {stop}')}, label %loop, label %total")
        body.label("total")
        place = body("getelementptr inbounds i64, ptr %first, i64 %c")
        body.do(f"store i64 %least_next, ptr {place}, align 8")
        body.do("br label %more")

    _each_chunk(body, chunk)


POINTERS = ("x", "y", "z", "partial", "first", "exponent")
_TWO, _ONE, _POWER = ("x", "y", "z", "n"), ("x", "z", "n"), ("x", "z", "exponent", "bits", "n")
ENTRIES: Mapping[str, tuple[tuple[str, ...], Writer]] = {
    "add": (_TWO, _pairwise("add")),
    "sub": (_TWO, _pairwise("sub")),
    "neg": (_ONE, _neg),
    "mul": (_TWO, _mul(False)),
    "mul_montgomery": (_TWO, _mul(True)),
    "square": (_ONE, _square(False)),
    "square_montgomery": (_ONE, _square(True)),
    "to_montgomery": (_ONE, _scale(lambda form: form.memory_radix * form.radix)),
    "from_montgomery": (_ONE, _scale(_over_memory_radix)),
    "reduce": (_ONE, _scale(lambda form: form.radix)),
    "pow": (_POWER, _pow(False)),
    "pow_montgomery": (_POWER, _pow(True)),
    "inv": (_ONE, _inv(False)),
    "inv_montgomery": (_ONE, _inv(True)),
    "sum": (("x", "partial", "n", "chunk"), _total(_element, None)),
    "dot": (("x", "y", "partial", "n", "chunk"), _dot(False)),
    "dot_montgomery": (("x", "y", "partial", "n", "chunk"), _dot(True)),
    "unreduced": (("x", "first", "n", "chunk"), _unreduced),
}
