"""The CPU's sums of a pass: many columns at once, one a lane, in a core's cache.

FIELD_sums(ptr rows, ptr roots, i64 log_rows) transforms 2^log_rows packs in place, from natural to bit-reversed order,
by steps of up to `radix_log` levels that each load a few packs, and store them. With w of order s, a level on blocks of
s packs takes

    a_i, a_(i + s/2)  to  a_i + a_(i + s/2), (a_i - a_(i + s/2)) w^i        i < s/2

The first step takes what is left over of the levels, the last has constant factors, of which 1 is left out.
Source: Gentleman and Sande 1966, AFIPS Fall Joint Computer Conference 29, pages 563 to 578.
"""

from __future__ import annotations

from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.algebra.ntt.llvm_packs import each
from accelerant.runtime.compilation.llvm import NOINLINE, FunctionBuilder, Value

__all__ = ["radix_log", "sums"]


def radix_log(form: PackedField) -> int:
    """Return the levels of a step: about as many as leave its packs in registers; of words, as LLVM vectorises."""
    return 3 if form.field.limbs == 1 else 2


def sums(form: PackedField) -> list[FunctionBuilder]:
    """Return FIELD_sums and its steps."""
    levels = range(1, radix_log(form) + 1)
    return [*(_step(form, count) for count in levels), *(_last(form, count) for count in levels), _driver(form)]


def _levels(
    form: PackedField, code: FunctionBuilder, levels: int, places: list[Value], factors: list[list[Value | None]]
) -> None:
    """Load 2^levels packs, transform, store; factors[level][k], None for 1."""
    values: list[Value] = [code.load(form.type, place) for place in places]
    for level in range(levels):
        half = 1 << levels - level - 1
        for first in range(0, 1 << levels, 2 * half):
            for k in range(half):
                a, b = values[first + k], values[first + k + half]
                values[first + k] = form.call(code, "add", a, b)
                difference = form.call(code, "sub", a, b)
                factor = factors[level][k]
                values[first + k + half] = difference if factor is None else form.call(code, "mul", factor, difference)
    for place, value in zip(places, values, strict=True):
        code.store(form.type, value, place)


def _step(form: PackedField, levels: int) -> FunctionBuilder:
    """Return FIELD_step<levels>: those levels of all blocks of 2^log_size packs."""
    arguments = ["ptr noalias %rows", "ptr noalias %roots", "i64 %log_rows", "i64 %log_size"]
    code = FunctionBuilder(f"{form.field.name}_step{levels}", arguments, attributes=NOINLINE)
    rows, size = (code.i64("shl", 1, log) for log in ("%log_rows", "%log_size"))
    quarter = code.op("lshr", size, levels)
    scale = code.op("sub", "%log_rows", "%log_size")
    with code.loop(0, rows, size) as first, code.loop(0, quarter) as j:
        offsets = [j]
        for _ in range(1, 1 << levels):
            offsets.append(code.op("add nsw", offsets[-1], quarter))
        places = [code.at(form.type, "%rows", code.op("add nsw", first, offset)) for offset in offsets]
        factors: list[list[Value | None]] = []
        for level in range(levels):
            shift = code.op("add", scale, level)
            half = offsets[: 1 << levels - level - 1]
            factors.append([each(form, code, "%roots", code.op("shl", offset, shift)) for offset in half])
        _levels(form, code, levels, places, factors)
    code.ret()
    return code


def _last(form: PackedField, levels: int) -> FunctionBuilder:
    """Return FIELD_last<levels>: the last levels, of blocks of 2^levels packs."""
    arguments = ["ptr noalias %rows", "ptr noalias %roots", "i64 %log_rows"]
    code = FunctionBuilder(f"{form.field.name}_last{levels}", arguments, attributes=NOINLINE)
    rows = code.i64("shl", 1, "%log_rows")
    factors: list[list[Value | None]] = []
    for level in range(levels):
        shift = code.op("add", code.op("sub", "%log_rows", levels), level)
        half = range(1 << levels - level - 1)
        factors.append([each(form, code, "%roots", code.i64("shl", k, shift)) if k else None for k in half])
    with code.loop(0, rows, 1 << levels) as first:
        places = [code.at(form.type, "%rows", code.op("add nsw", first, k)) for k in range(1 << levels)]
        _levels(form, code, levels, places, factors)
    code.ret()
    return code


def _driver(form: PackedField) -> FunctionBuilder:
    """Return FIELD_sums: a first step of 1 to `most` levels, so that those left are a multiple of `most`."""
    name, most = form.field.name, radix_log(form)
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
