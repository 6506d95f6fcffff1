"""The CPU's field kernels: LLVM IR of the algorithms in kernel.c.

A kernel does the indices [begin, end) that lie below n; LLVM vectorises the loop for the processor at hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.algebra.field.reference import MODULI

__all__ = ["FieldAdd"]

_FIELD_ADD = """
define void @field_add(i64 %begin, i64 %end, ptr readonly %x, ptr readonly %y, ptr noalias %z, i64 %n) {{
entry:
  %stop = call i64 @llvm.smin.i64(i64 %end, i64 %n)
  %any = icmp slt i64 %begin, %stop
  br i1 %any, label %loop, label %done
loop:
  %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
  %px = getelementptr inbounds i64, ptr %x, i64 %i
  %py = getelementptr inbounds i64, ptr %y, i64 %i
  %pz = getelementptr inbounds i64, ptr %z, i64 %i
  %a = load i64, ptr %px, align 8
  %b = load i64, ptr %py, align 8
  %sum = add i64 %a, %b
  %carry = icmp ult i64 %sum, %a
  %owed = select i1 %carry, i64 {epsilon}, i64 0
  %wrapped = add i64 %sum, %owed
  %large = icmp uge i64 %wrapped, {modulus}
  %excess = select i1 %large, i64 {modulus}, i64 0
  %canonical = sub i64 %wrapped, %excess
  store i64 %canonical, ptr %pz, align 8
  %next = add nuw nsw i64 %i, 1
  %more = icmp slt i64 %next, %stop
  br i1 %more, label %loop, label %done
done:
  ret void
}}
declare i64 @llvm.smin.i64(i64, i64)
"""


@dataclass(frozen=True, slots=True)
class FieldAdd:
    """A Builder (see runtime/kernel.py) of field_add for a field whose modulus is 2^64 - epsilon."""

    field: str

    @property
    def key(self) -> str:
        """The program itself: it does not depend on the target."""
        return self.build("")

    def build(self, target: str) -> str:
        """LLVM IR."""
        modulus = MODULI[self.field]
        return _FIELD_ADD.format(modulus=modulus, epsilon=2**64 - modulus)
