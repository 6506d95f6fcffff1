"""Packs of equal factors, and transposed packs, for transforms: what they need besides algebra/field/llvm_packed.py.

T    FIELD_each(ptr x, i64 i)      all lanes one factor of a table: words where an element is a word or a pack one
                                   element; 52-bit limbs, contiguous, where a pack has a register for each limb
"""

from __future__ import annotations

from collections.abc import Sequence

from accelerant.algebra.field.llvm_ifma import LANE_ORDER, PackedIfma
from accelerant.algebra.field.llvm_packed import PackedField
from accelerant.runtime.compilation.llvm import FunctionBuilder, Operand, Value, constant

__all__ = ["by_limbs", "each", "each_function", "lane_order", "reversed_bits", "transposed"]


def by_limbs(form: PackedField) -> bool:
    """Return whether tables for FIELD_each hold 52-bit limbs."""
    return isinstance(form, PackedIfma)


def _registers(form: PackedField, code: FunctionBuilder, pack: Value) -> list[Value]:
    """Return the registers of a pack that has lanes."""
    return code.parts(pack) if by_limbs(form) else [pack]


def _joined(form: PackedField, code: FunctionBuilder, registers: Sequence[Value]) -> Value:
    return code.array(form.type, registers) if by_limbs(form) else registers[0]


def each_function(form: PackedField) -> FunctionBuilder:
    """Return FIELD_each."""
    code = FunctionBuilder(f"{form.field.name}_each", ["ptr %x", "i64 %i"], form.type)
    if form.lanes == 1:
        code.ret(form.load(code, "%x", "%i", code.op("add", "%i", 1)))
        return code
    element = f"i{form.field.word_bits}"
    count = int(form.type[1:].split(" ")[0]) if by_limbs(form) else 1
    first = code.at(f"[{count} x {element}]", "%x", "%i")
    registers = []
    for k in range(count):
        limb = code.load(element, first, k, align=form.field.word_bits // 8)
        registers.append(code.broadcast(limb, form.lanes))
    code.ret(_joined(form, code, registers))
    return code


def each(form: PackedField, code: FunctionBuilder, pointer: str, i: Operand) -> Value:
    """Append a call of FIELD_each."""
    return code(f"call {form.type} @{form.field.name}_each(ptr {pointer}, i64 {i})", form.type)


def lane_order(form: PackedField) -> Sequence[int]:
    """Return the element of a pack in memory that each lane holds."""
    return LANE_ORDER if by_limbs(form) else range(form.lanes)


def transposed(form: PackedField, code: FunctionBuilder, packs: Sequence[Value]) -> list[Value]:
    """Return as many packs as lanes, transposed: lane r of pack c is what lane c of pack r was.

    log2(lanes) shuffles for each register of a pack.
    """
    lanes = form.lanes
    rows = [_registers(form, code, pack) for pack in packs]
    step = 1
    while step < lanes:
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for r in range(lanes):
            if r & step:
                continue
            for k, (a, b) in enumerate(zip(rows[r], rows[r + step], strict=True)):
                rows[r][k], rows[r + step][k] = (code.shuffle(a, b, order) for order in (low, high))
        step *= 2
    return [_joined(form, code, row) for row in rows]


def reversed_bits(code: FunctionBuilder, index: Value, bits: str) -> Value:
    """Return the lowest bits of an index in the opposite order; bits is a value of at least 1."""
    reverse = code.intrinsic("i64", "llvm.bitreverse.i64", index)
    return code.op("lshr", reverse, code.op("sub", constant("i64", 64), bits))
