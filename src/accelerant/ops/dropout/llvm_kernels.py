"""dropout on the CPU: the mask of triton_kernels.py, as LLVM IR for the processor at hand.

    y = x / (1 - p) where the place's word, without its lowest bit, is at least p 2^31, else 0 x; dx from dy likewise

The words are most of the work where the tensors lie in cache. So a forward pass with a backward pass to come writes the
mask, a bit an element, and the backward pass (llvm_mask.py) reads it: 1/32 of what torch keeps of float32.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 5.2.2 (Philox).
Layout: as triton_kernels.py: element i of run j of group t has word j of the counter (512 t + i, 0, 0). An index of the
        launch stands for 8 neighbouring counters, so for 4 vectors of 8 elements, 512 elements apart. In the last
        group loads and stores are masked. Byte i of the mask is of elements 8 i to 8 i + 7, the first in its lowest
        bit; it has bytes for whole groups.
Words:  32 bits in lanes of 64. What a product leaves in the upper halves is cleared only at the end: the next product
        reads the lower halves alone, and LLVM knows it. So a round of 8 counters is 2 products, 2 shifts and 4
        exclusive ors (2 instructions with AVX-512).
Bound:  AVX-512: arithmetic, by little, against a copy in cache; memory beyond it. 16 or 32 counters at a time were no
        faster in float32, and do not fit the registers of AVX2 and NEON.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

__all__ = ["COUNTERS", "DropoutKernel", "product", "refuses_half", "types", "vector"]

COUNTERS = 8
"""Counters of one index, which lie in the lanes of a vector."""

_RUN = 512
_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF

_IN_MEMORY = {torch.float32: "float", torch.float64: "double", torch.float16: "half", torch.bfloat16: "i16"}
"""How an element lies in memory; LLVM's bfloat takes a run-time library where the processor does not convert it."""

_SUFFIX = {"float": "f32", "double": "f64", "half": "f16", "i16": "i16"}
"""Of the element's type in the names of LLVM's functions."""


@functools.cache
def refuses_half() -> str | None:
    """Why float16 cannot be served: without an instruction LLVM calls a function that is not linked here."""
    import llvmlite.binding as llvm

    if llvm.get_process_triple().startswith(("aarch64", "arm64")) or llvm.get_host_cpu_features().get("f16c"):
        return None
    return "this processor has no instruction that converts float16"


@dataclass(frozen=True, slots=True)
class DropoutKernel:
    """A Builder (see runtime/compilation/kernel.py) of dropout_<dtype>(begin, end, x, seed, y, n, threshold, scale).

    Attributes:
        dtype: of x and y.
        masks: write the mask to one more argument.
    """

    dtype: torch.dtype
    masks: bool = False

    @property
    def key(self) -> str:
        """The program itself: it does not depend on the target."""
        return self.build("")

    @property
    def entry(self) -> str:
        """The function's name."""
        return f"dropout_{str(self.dtype).removeprefix('torch.')}{'_masked' if self.masks else ''}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the arguments, as KernelSource.entries has them."""
        real = "f64" if self.dtype == torch.float64 else "f32"
        return ("*", "*i64", "*", "i64", "i64", real, *(("*",) if self.masks else ()))

    def build(self, target: str) -> str:
        """LLVM IR."""
        element, real, suffix = types(self.dtype)
        return _PROGRAM.format(
            entry=self.entry,
            real=real,
            V=vector(real),
            Q=vector("i64"),
            B=vector("i1"),
            T=vector(element),
            name=f"v{COUNTERS}{suffix}.p0",
            keys=_keys(),
            rounds=_rounds(),
            bits=", ptr noalias %bits" if self.masks else "",
            zeros=_all("i32", 0),
            lanes=f"<{', '.join(f'i64 {i}' for i in range(COUNTERS))}>",
            upper=_all("i64", 32),
            counters=COUNTERS,
            run=_RUN,
            group=4 * _RUN,
            last=_RUN // COUNTERS - 1,
            shift=(_RUN // COUNTERS).bit_length() - 1,
            whole="\n".join(self._apply(run, masked=False) for run in range(4)),
            rest="\n".join(self._apply(run, masked=True) for run in range(4)),
        )

    def _apply(self, run: int, *, masked: bool) -> str:
        """Load, multiply and store the elements of a run; those below n alone if masked."""
        element, real, suffix = types(self.dtype)
        size, v = self.dtype.itemsize, f"%{'m' if masked else 'w'}{run}"
        T, V, Q, B = map(vector, (element, real, "i64", "i1"))
        load = f"{v}x = load {T}, ptr {v}px, align {size}"
        store = f"store {T} {v}y, ptr {v}py, align {size}"
        if masked:
            inside = f"i32 {size}, {B} {v}in"
            load = f"{v}x = call {T} @llvm.masked.load.v{COUNTERS}{suffix}.p0(ptr {v}px, {inside}, {T} zeroinitializer)"
            store = f"call void @llvm.masked.store.v{COUNTERS}{suffix}.p0({T} {v}y, ptr {v}py, {inside})"
        below = [
            *_broadcast(f"{v}b", "i64", f"{v}at"),
            f"{v}c = add {Q} {v}b, %lanes",
            f"{v}in = icmp slt {Q} {v}c, %ns",
        ]
        kept = [
            f"{v}byte = lshr i64 {v}at, 3",
            f"{v}pb = getelementptr inbounds i8, ptr %bits, i64 {v}byte",
            f"{v}mask = bitcast {B} %keep{run} to i8",
            f"store i8 {v}mask, ptr {v}pb, align 1",
        ]
        return _lines(
            f"{v}at = add i64 %first, {run * _RUN}",
            f"{v}px = getelementptr inbounds {element}, ptr %x, i64 {v}at",
            f"{v}py = getelementptr inbounds {element}, ptr %y, i64 {v}at",
            *(below if masked else ()),
            *(kept if self.masks else ()),
            load,
            f"{v}f = select {B} %keep{run}, {V} %scales, {V} zeroinitializer",
            *product(self.dtype, v),
            store,
        )


def product(dtype: torch.dtype, v: str, lanes: int = COUNTERS) -> list[str]:
    """The product {v}y of {v}x, as it lies in memory, and {v}f, rounded once to the dtype."""
    F, W, H = (vector(kind, lanes) for kind in ("float", "i32", "i16"))
    if dtype in (torch.float32, torch.float64):
        return [f"{v}y = fmul {vector(types(dtype)[1], lanes)} {v}x, {v}f"]
    if dtype == torch.float16:
        half = vector("half", lanes)
        return [
            f"{v}wide = fpext {half} {v}x to {F}",
            f"{v}product = fmul {F} {v}wide, {v}f",
            f"{v}y = fptrunc {F} {v}product to {half}",
        ]
    sixteen = _all("i32", 16, lanes)
    return [  # bfloat16 is the upper half of float32; to the nearest, ties to even; NaN stays NaN
        f"{v}z = zext {H} {v}x to {W}",
        f"{v}s = shl {W} {v}z, {sixteen}",
        f"{v}wide = bitcast {W} {v}s to {F}",
        f"{v}product = fmul {F} {v}wide, {v}f",
        f"{v}bits = bitcast {F} {v}product to {W}",
        f"{v}half = lshr {W} {v}bits, {sixteen}",
        f"{v}odd = and {W} {v}half, {_all('i32', 1, lanes)}",
        f"{v}bias = add {W} {v}odd, {_all('i32', 0x7FFF, lanes)}",
        f"{v}sum = add {W} {v}bits, {v}bias",
        f"{v}up = lshr {W} {v}sum, {sixteen}",
        f"{v}nan = fcmp uno {F} {v}product, zeroinitializer",
        f"{v}r = select {vector('i1', lanes)} {v}nan, {W} {_all('i32', 0x7FC0, lanes)}, {W} {v}up",
        f"{v}y = trunc {W} {v}r to {H}",
    ]


def types(dtype: torch.dtype) -> tuple[str, str, str]:
    """Of an element in memory, of what is computed in, and the first in the names of LLVM's functions."""
    memory = _IN_MEMORY[dtype]
    return memory, "double" if dtype == torch.float64 else "float", _SUFFIX[memory]


def vector(kind: str, lanes: int = COUNTERS) -> str:
    """The type of so many lanes."""
    return f"<{lanes} x {kind}>"


def _all(kind: str, value: int, lanes: int = COUNTERS) -> str:
    """A constant in every lane."""
    return f"<{', '.join([f'{kind} {value}'] * lanes)}>"


def _broadcast(name: str, kind: str, value: str) -> list[str]:
    """A value in every lane, as `name`."""
    V = vector(kind)
    return [
        f"{name}_0 = insertelement {V} poison, {kind} {value}, i64 0",
        f"{name} = shufflevector {V} {name}_0, {V} poison, {vector('i32')} zeroinitializer",
    ]


def _lines(*lines: str) -> str:
    return "\n".join(f"  {line}" for line in lines)


def _keys() -> str:
    """The key of each round, in every lane: %k0_0 to %k1_9 from %seed."""
    lines = [f"%half0 = and i64 %seed, {_LOW}", "%half1 = lshr i64 %seed, 32"]
    for side in (0, 1):
        for r in range(_ROUNDS):
            key = f"%k{side}_{r}"
            lines += [
                f"{key}_sum = add i64 %half{side}, {r * _WEYL[side] & _LOW}",
                f"{key}_low = and i64 {key}_sum, {_LOW}",
                *_broadcast(key, "i64", f"{key}_low"),
            ]
    return _lines(*lines)


def _rounds() -> str:
    """Which elements stay, %keep0 to %keep3, from the counters %c0 and %c1 (the other two are 0) and the keys."""
    Q, low, upper = vector("i64"), _all("i64", _LOW), _all("i64", 32)
    c0, c1, c2, c3 = "%c0", "%c1", "zeroinitializer", "zeroinitializer"
    lines = []
    for r in range(_ROUNDS):
        for side, c in ((0, c0), (1, c2)):
            lines += [
                f"%l{side}_{r} = and {Q} {c}, {low}",
                f"%p{side}_{r} = mul {Q} %l{side}_{r}, {_all('i64', _MULTIPLIERS[side])}",
                f"%u{side}_{r} = lshr {Q} %p{side}_{r}, {upper}",
            ]
        for side, c in ((0, c1), (1, c3)):
            lines += [
                f"%x{side}_{r} = xor {Q} %u{1 - side}_{r}, {c}",
                f"%n{side}_{r} = xor {Q} %x{side}_{r}, %k{side}_{r}",
            ]
        c0, c1, c2, c3 = f"%n0_{r}", f"%p1_{r}", f"%n1_{r}", f"%p0_{r}"
    for run, c in enumerate((c0, c1, c2, c3)):
        lines += [f"%word{run} = and {Q} {c}, {low}", f"%keep{run} = icmp uge {Q} %word{run}, %thresholds"]
    return _lines(*lines)


_PROGRAM = """
define void @{entry}(i64 %begin, i64 %end, ptr noalias readonly %x, ptr noalias readonly %seed_at, ptr noalias %y,
                     i64 %n, i64 %threshold, {real} %scale{bits}) {{
entry:
  %seed = load i64, ptr %seed_at, align 8
{keys}
  %lanes = add {Q} zeroinitializer, {lanes}
  %doubled = shl i64 %threshold, 1
  %thresholds_0 = insertelement {Q} poison, i64 %doubled, i64 0
  %thresholds = shufflevector {Q} %thresholds_0, {Q} poison, <{counters} x i32> {zeros}
  %ns_0 = insertelement {Q} poison, i64 %n, i64 0
  %ns = shufflevector {Q} %ns_0, {Q} poison, <{counters} x i32> {zeros}
  %scales_0 = insertelement {V} poison, {real} %scale, i64 0
  %scales = shufflevector {V} %scales_0, {V} poison, <{counters} x i32> {zeros}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %index = phi i64 [ %begin, %entry ], [ %next, %more ]
  %group = lshr i64 %index, {shift}
  %column = and i64 %index, {last}
  %place = mul i64 %column, {counters}
  %base = mul i64 %group, {run}
  %counter = add i64 %base, %place
  %elements = mul i64 %group, {group}
  %first = add i64 %elements, %place
  %cs_0 = insertelement {Q} poison, i64 %counter, i64 0
  %cs = shufflevector {Q} %cs_0, {Q} poison, <{counters} x i32> {zeros}
  %c0 = add {Q} %cs, %lanes
  %c1 = lshr {Q} %c0, {upper}
{rounds}
  %after = add i64 %elements, {group}
  %inside = icmp sle i64 %after, %n
  br i1 %inside, label %whole, label %rest
whole:
{whole}
  br label %more
rest:
{rest}
  br label %more
more:
  %next = add nuw nsw i64 %index, 1
  %again = icmp slt i64 %next, %end
  br i1 %again, label %loop, label %done
done:
  ret void
}}
declare {T} @llvm.masked.load.{name}(ptr, i32, {B}, {T})
declare void @llvm.masked.store.{name}({T}, ptr, i32, {B})
"""
