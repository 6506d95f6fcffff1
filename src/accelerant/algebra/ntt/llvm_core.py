"""The CPU's sums of a pass: many columns at once, one a lane, in a core's cache.

FIELD_sums(ptr rows, ptr roots, i64 log_rows) transforms 2^log_rows packs in place, from natural to bit-reversed order,
by steps of up to `radix_log` levels that each load a few packs, and store them. With w of order s, a level on blocks of
s packs takes

    a_i, a_(i + s/2)  to  a_i + a_(i + s/2), (a_i - a_(i + s/2)) w^i        i < s/2

The first step takes what is left over of the levels, the last has constant factors, of which 1 is left out.
Source: Gentleman and Sande 1966, AFIPS Fall Joint Computer Conference 29, pages 563 to 578.
"""

from __future__ import annotations

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_text import NOINLINE, Body, function
from accelerant.algebra.ntt.llvm_packs import Loops, each

__all__ = ["radix_log", "sums"]


def radix_log(form: Form) -> int:
    """Levels of a step: about as many as leave its packs in registers; of single words, as many as LLVM vectorises."""
    return 3 if form.field.limbs == 1 else 2


def sums(form: Form) -> str:
    """The definition of FIELD_sums and of its steps."""
    most = radix_log(form)
    parts = [_step(form, levels) for levels in range(1, most + 1)]
    parts += [_last(form, levels) for levels in range(1, most + 1)]
    return "".join(parts) + _driver(form, most)


def _place(form: Form, body: Body, index: str) -> str:
    return body(f"getelementptr inbounds {form.type}, ptr %rows, i64 {index}")


def _levels(form: Form, body: Body, levels: int, places: list[str], factors: list[list[str]]) -> None:
    """Load 2^levels packs, transform, store; factors[level][k], "" for 1."""
    values = [body(f"load {form.type}, ptr {place}") for place in places]
    for level in range(levels):
        half = 1 << levels - level - 1
        for first in range(0, 1 << levels, 2 * half):
            for k in range(half):
                a, b = values[first + k], values[first + k + half]
                values[first + k] = form.call(body, "add", a, b)
                difference = form.call(body, "sub", a, b)
                factor = factors[level][k]
                values[first + k + half] = form.call(body, "mul", factor, difference) if factor else difference
    for place, value in zip(places, values, strict=True):
        body.do(f"store {form.type} {value}, ptr {place}")


def _step(form: Form, levels: int) -> str:
    """FIELD_step<levels>: those levels of all blocks of 2^log_size packs."""
    body = Body()
    loops = Loops(body, 2)
    rows, size = (body(f"shl i64 1, {log}") for log in ("%log_rows", "%log_size"))
    quarter = body(f"lshr i64 {size}, {levels}")
    scale = body("sub i64 %log_rows, %log_size")

    def block(first: str) -> None:
        def inside(j: str) -> None:
            offsets = [j]
            for _ in range(1, 1 << levels):
                offsets.append(body(f"add nsw i64 {offsets[-1]}, {quarter}"))
            places = [_place(form, body, body(f"add nsw i64 {first}, {offset}")) for offset in offsets]
            factors = []
            for level in range(levels):
                shift = body(f"add i64 {scale}, {level}")
                half = offsets[: 1 << levels - level - 1]
                factors.append([each(form, body, "%roots", body(f"shl i64 {offset}, {shift}")) for offset in half])
            _levels(form, body, levels, places, factors)

        loops("0", quarter, "1", inside)

    loops("0", rows, size, block)
    body.do("ret void")
    arguments = ["ptr noalias %rows", "ptr noalias %roots", "i64 %log_rows", "i64 %log_size"]
    return function(f"{form.field.name}_step{levels}", "void", arguments, body, attributes=NOINLINE)


def _last(form: Form, levels: int) -> str:
    """FIELD_last<levels>: the last levels, of blocks of 2^levels packs."""
    body = Body()
    loops = Loops(body, 1)
    rows = body("shl i64 1, %log_rows")
    factors = []
    for level in range(levels):
        shift = body(f"add i64 {body(f'sub i64 %log_rows, {levels}')}, {level}")
        half = range(1 << levels - level - 1)
        factors.append([each(form, body, "%roots", body(f"shl i64 {k}, {shift}")) if k else "" for k in half])

    def block(first: str) -> None:
        places = [_place(form, body, body(f"add nsw i64 {first}, {k}")) for k in range(1 << levels)]
        _levels(form, body, levels, places, factors)

    loops("0", rows, str(1 << levels), block)
    body.do("ret void")
    arguments = ["ptr noalias %rows", "ptr noalias %roots", "i64 %log_rows"]
    return function(f"{form.field.name}_last{levels}", "void", arguments, body, attributes=NOINLINE)


def _driver(form: Form, most: int) -> str:
    """FIELD_sums: a first step of 1 to `most` levels, so that those left are a multiple of `most`."""
    body, name = Body(), form.field.name
    loops = Loops(body, 1)
    left = body("alloca i64")
    below = body("sub i64 %log_rows, 1")
    first = body(f"add i64 {body(f'urem i64 {below}, {most}')}, 1")
    single = body(f"icmp eq i64 {first}, %log_rows")
    cases = " ".join(f"i64 {levels}, label %first{levels}" for levels in range(1, most + 1))
    body.do(f"switch i64 {first}, label %done [ {cases} ]")
    for levels in range(1, most + 1):
        body.label(f"first{levels}")
        body.do(f"br i1 {single}, label %only{levels}, label %begin{levels}")
        body.label(f"only{levels}")
        body.do(f"call void @{name}_last{levels}(ptr %rows, ptr %roots, i64 %log_rows)")
        body.do("br label %done")
        body.label(f"begin{levels}")
        body.do(f"call void @{name}_step{levels}(ptr %rows, ptr %roots, i64 %log_rows, i64 %log_rows)")
        body.do("br label %more")
    body.label("more")
    body.do(f"store i64 {body(f'sub i64 %log_rows, {first}')}, ptr {left}")

    def inside(_: str) -> None:
        size = body(f"load i64, ptr {left}")
        body.do(f"call void @{name}_step{most}(ptr %rows, ptr %roots, i64 %log_rows, i64 {size})")
        body.do(f"store i64 {body(f'sub i64 {size}, {most}')}, ptr {left}")

    loops(body(f"add i64 {first}, {most}"), "%log_rows", str(most), inside)
    body.do(f"call void @{name}_last{most}(ptr %rows, ptr %roots, i64 %log_rows)")
    body.do("br label %done")
    body.label("done")
    body.do("ret void")
    return function(f"{name}_sums", "void", ["ptr %rows", "ptr %roots", "i64 %log_rows"], body, attributes=NOINLINE)
