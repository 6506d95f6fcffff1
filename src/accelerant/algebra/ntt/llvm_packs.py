"""What transforms ask of a form of arithmetic besides field/llvm_form.py: packs of equal factors, packs turned, loops.

T    FIELD_each(ptr x, i64 i)      all lanes one factor of a table: words where an element is a word or a pack one
                                   element; 52-bit limbs, contiguous, where a pack has a register for each limb
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerant.algebra.field.llvm_form import Form
from accelerant.algebra.field.llvm_lanes import Lanes
from accelerant.algebra.field.llvm_text import Body

__all__ = ["Loops", "by_limbs", "each", "each_function", "lane_order", "reversed_bits", "turned"]


class Loops:
    """Counted loops. Counters lie on the stack until LLVM makes registers of them, so that no loop names its blocks.

    The function's first instructions are `counters`, one for each loop that it will write.
    """

    def __init__(self, body: Body, counters: int) -> None:
        self._body = body
        self._used = 0
        self._counters = [body("alloca i64") for _ in range(counters)]

    def __call__(self, first: str, stop: str, step: str, inside: Callable[[str], None]) -> None:
        """For i from first to below stop by step (values or numbers of i64): inside(i) writes what is done."""
        body, counter = self._body, self._counters[self._used]
        self._used += 1
        name = f"loop{self._used}"
        body.do(f"store i64 {first}, ptr {counter}")
        body.do(f"br label %{name}_head")
        body.label(f"{name}_head")
        i = body(f"load i64, ptr {counter}")
        body.do(f"br i1 {body(f'icmp slt i64 {i}, {stop}')}, label %{name}_body, label %{name}_end")
        body.label(f"{name}_body")
        inside(i)
        body.do(f"store i64 {body(f'add nsw i64 {i}, {step}')}, ptr {counter}")
        body.do(f"br label %{name}_head")
        body.label(f"{name}_end")


def by_limbs(form: Form) -> bool:
    """Whether tables for FIELD_each hold 52-bit limbs."""
    return isinstance(form, Lanes)


def _element(form: Form) -> str:
    return "i64" if by_limbs(form) else f"i{form.field.word_bits}"


def _vectors(form: Form, body: Body, pack: str) -> list[str]:
    """The registers of a pack that has lanes."""
    if not by_limbs(form):
        return [pack]
    count = int(form.type.partition(" ")[0].removeprefix("["))
    return [body(f"extractvalue {form.type} {pack}, {k}") for k in range(count)]


def _joined(form: Form, body: Body, vectors: Sequence[str]) -> str:
    if not by_limbs(form):
        return vectors[0]
    pack, vector = "poison", f"<{form.lanes} x {_element(form)}>"
    for k, each_ in enumerate(vectors):
        pack = body(f"insertvalue {form.type} {pack}, {vector} {each_}, {k}")
    return pack


def each_function(form: Form) -> str:
    """The definition of FIELD_each."""
    body = Body()
    if form.lanes == 1:
        body.do(f"ret {form.type} {form.load(body, '%x', '%i', body('add i64 %i, 1'))}")
    else:
        element = _element(form)
        vector = f"<{form.lanes} x {element}>"
        count = len(_vectors(form, Body(), "%x"))
        vectors = []
        for k in range(count):
            place = body(f"getelementptr inbounds [{count} x {element}], ptr %x, i64 %i, i64 {k}")
            single = body(f"load {element}, ptr {place}, align {form.field.word_bits // 8}")
            first = body(f"insertelement {vector} poison, {element} {single}, i64 0")
            vectors.append(
                body(f"shufflevector {vector} {first}, {vector} poison, <{form.lanes} x i32> zeroinitializer")
            )
        body.do(f"ret {form.type} {_joined(form, body, vectors)}")
    return form.define("each", ["ptr %x", "i64 %i"], body)


def each(form: Form, body: Body, pointer: str, i: str) -> str:
    """Call FIELD_each."""
    return body(f"call {form.type} @{form.field.name}_each(ptr {pointer}, i64 {i})")


def lane_order(form: Form) -> Sequence[int]:
    """Which of a pack's elements in memory each lane holds: llvm_lanes.py's shuffles leave them interleaved."""
    return (0, 4, 1, 5, 2, 6, 3, 7) if by_limbs(form) else range(form.lanes)


def turned(form: Form, body: Body, packs: Sequence[str]) -> list[str]:
    """As many packs as lanes, transposed: lane r of pack c is what lane c of pack r was.

    log2(lanes) shuffles for each register of a pack.
    """
    lanes = form.lanes
    rows = [_vectors(form, body, pack) for pack in packs]
    vector = f"<{lanes} x {_element(form)}>"
    step = 1
    while step < lanes:
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for r in range(lanes):
            if r & step:
                continue
            for k, (a, b) in enumerate(zip(rows[r], rows[r + step], strict=True)):
                rows[r][k], rows[r + step][k] = (
                    body(f"shufflevector {vector} {a}, {vector} {b}, <{lanes} x i32> {_lanes(order)}")
                    for order in (low, high)
                )
        step *= 2
    return [_joined(form, body, row) for row in rows]


def _lanes(order: Sequence[int]) -> str:
    return "<" + ", ".join(f"i32 {lane}" for lane in order) + ">"


def reversed_bits(body: Body, index: str, bits: str) -> str:
    """The lowest bits of an index in the opposite order; bits is a value of at least 1."""
    turned_ = body(f"call i64 @llvm.bitreverse.i64(i64 {index})")
    return body(f"lshr i64 {turned_}, {body(f'sub i64 64, {bits}')}")
