"""dropout on the CPU from a mask that the forward pass wrote, as LLVM IR for the processor at hand.

    dx = dy / (1 - p) where the element's bit is set, else 0 dy

Layout: as memory lies. An index of the launch stands for 32 elements and 4 bytes of the mask (llvm_kernels.py says what
        is in them); after the last whole ones loads and stores are masked.
Bound:  memory: 2 accesses an element and a bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from accelerant.ops.dropout.llvm_kernels import product, types, vector

__all__ = ["LANES", "MaskKernel"]

LANES = 32
"""Elements of an index."""


@dataclass(frozen=True, slots=True)
class MaskKernel:
    """A Builder (see runtime/compilation/kernel.py) of dropout_<dtype>_unmasked(begin, end, dy, bits, dx, n, scale)."""

    dtype: torch.dtype

    @property
    def key(self) -> str:
        """The program itself: it does not depend on the target."""
        return self.build("")

    @property
    def entry(self) -> str:
        """The function's name."""
        return f"dropout_{str(self.dtype).removeprefix('torch.')}_unmasked"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Types of the arguments, as KernelSource.entries has them."""
        return ("*", "*", "*", "i64", "f64" if self.dtype == torch.float64 else "f32")

    def build(self, target: str) -> str:
        """LLVM IR."""
        element, real, suffix = types(self.dtype)
        return _PROGRAM.format(
            entry=self.entry,
            real=real,
            element=element,
            size=self.dtype.itemsize,
            lanes=LANES,
            V=vector(real, LANES),
            Q=vector("i64", LANES),
            B=vector("i1", LANES),
            T=vector(element, LANES),
            zeros=f"{vector('i32', LANES)} zeroinitializer",
            places=f"<{', '.join(f'i64 {i}' for i in range(LANES))}>",
            name=f"v{LANES}{suffix}.p0",
            whole="\n".join(f"  {line}" for line in product(self.dtype, "%w", LANES)),
            rest="\n".join(f"  {line}" for line in product(self.dtype, "%m", LANES)),
        )


_PROGRAM = """
define void @{entry}(i64 %begin, i64 %end, ptr noalias readonly %x, ptr noalias readonly %bits, ptr noalias %y,
                     i64 %n, {real} %scale) {{
entry:
  %scales_0 = insertelement {V} poison, {real} %scale, i64 0
  %scales = shufflevector {V} %scales_0, {V} poison, {zeros}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %index = phi i64 [ %begin, %entry ], [ %next, %more ]
  %at = mul i64 %index, {lanes}
  %px = getelementptr inbounds {element}, ptr %x, i64 %at
  %py = getelementptr inbounds {element}, ptr %y, i64 %at
  %pb = getelementptr inbounds i{lanes}, ptr %bits, i64 %index
  %word = load i{lanes}, ptr %pb, align 1
  %keep = bitcast i{lanes} %word to {B}
  %after = add i64 %at, {lanes}
  %inside = icmp sle i64 %after, %n
  br i1 %inside, label %whole, label %rest
whole:
  %wf = select {B} %keep, {V} %scales, {V} zeroinitializer
  %wx = load {T}, ptr %px, align {size}
{whole}
  store {T} %wy, ptr %py, align {size}
  br label %more
rest:
  %left = sub i64 %n, %at
  %lefts_0 = insertelement {Q} poison, i64 %left, i64 0
  %lefts = shufflevector {Q} %lefts_0, {Q} poison, {zeros}
  %in = icmp slt {Q} {places}, %lefts
  %mf = select {B} %keep, {V} %scales, {V} zeroinitializer
  %mx = call {T} @llvm.masked.load.{name}(ptr %px, i32 {size}, {B} %in, {T} zeroinitializer)
{rest}
  call void @llvm.masked.store.{name}({T} %my, ptr %py, i32 {size}, {B} %in)
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
