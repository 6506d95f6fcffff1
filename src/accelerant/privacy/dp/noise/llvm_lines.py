"""LLVM IR of a basic block of vector instructions, line by line."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from accelerant.privacy.random.llvm_kernels import splat

__all__ = ["Lines"]


@dataclass(slots=True)
class Lines:
    """Lines of a basic block, with new names."""

    count: int
    lines: list[str] = field(default_factory=list)
    prefix: str = "v"
    _made: int = 0

    def new(self, instruction: str) -> str:
        """The name of a new value."""
        self._made += 1
        name = f"%{self.prefix}{self._made}"
        self.lines.append(f"{name} = {instruction}")
        return name

    def add(self, line: str) -> None:
        """An instruction without a value, or a label."""
        self.lines.append(line)

    def vector(self, kind: str) -> str:
        """The type."""
        return f"<{self.count} x {kind}>"

    def number(self, value: float) -> str:
        """A constant vector of floats: LLVM reads those exactly as the bits of a double."""
        return splat("float", f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016x}", self.count)

    def word(self, value: int) -> str:
        """A constant vector of words."""
        return splat("i32", value, self.count)

    def operation(self, name: str, x: str, y: str, kind: str = "i32") -> str:
        """Of two vectors."""
        return self.new(f"{name} {self.vector(kind)} {x}, {y}")

    def fma(self, x: str, y: str, z: str) -> str:
        """Of floats, x y + z, rounded once where the processor does."""
        F = self.vector("float")
        return self.new(f"call {F} @llvm.fmuladd.v{self.count}f32({F} {x}, {F} {y}, {F} {z})")

    def select(self, which: str, x: str, y: str, kind: str = "i32") -> str:
        """Of x where it is set, y elsewhere."""
        V = self.vector(kind)
        return self.new(f"select {self.vector('i1')} {which}, {V} {x}, {V} {y}")

    def broadcast(self, kind: str, scalar: str) -> str:
        """A scalar in each lane."""
        V = self.vector(kind)
        one = self.new(f"insertelement {V} poison, {kind} {scalar}, i64 0")
        return self.new(f"shufflevector {V} {one}, {V} poison, {self.vector('i32')} zeroinitializer")

    def load_word(self, pointer: str, at: int, align: int = 0) -> str:
        """Vector `at` of words behind a pointer, aligned to itself or as said."""
        V = self.vector("i32")
        place = self.new(f"getelementptr inbounds {V}, ptr {pointer}, i64 {at}")
        return self.new(f"load {V}, ptr {place}, align {align or 4 * self.count}")

    def text(self) -> str:
        """The lines, indented."""
        return "\n".join(f"  {line}" if not line.endswith(":") else line for line in self.lines)
