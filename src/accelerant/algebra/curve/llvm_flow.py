"""LLVM IR with variables, loops and conditions, for kernels too long to be written by basic blocks.

A variable is memory on the stack, allotted in the function's first block; LLVM's optimiser turns it into registers
("scalar replacement of aggregates"), also where it is a pack of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from accelerant.algebra.field.llvm_text import Body

__all__ = ["Flow", "Variable"]


@dataclass(frozen=True, slots=True)
class Variable:
    """Memory of one value of an LLVM type."""

    flow: Flow
    type: str
    pointer: str

    def get(self) -> str:
        """The value now."""
        return self.flow(f"load {self.type}, ptr {self.pointer}")

    def set(self, value: str) -> None:
        """Overwrite it."""
        self.flow.do(f"store {self.type} {value}, ptr {self.pointer}")


class Flow(Body):
    """The instructions of a function; blocks are named, so that the first block may be followed by any."""

    def __init__(self) -> None:
        super().__init__()
        self._blocks = 0
        self._cells = 0
        self.constants = ""
        """Definitions that must stand before the function's."""

    # --- memory ------------------------------------------------------------------------------------------------------

    def space(self, element: str, count: int = 1) -> str:
        """A pointer to `count` elements on the stack, for the whole call."""
        self._cells += 1
        self.lines.insert(0, f"  %cell{self._cells} = alloca {element}, i64 {count}")
        return f"%cell{self._cells}"

    def listed(self, name: str, values: Sequence[int]) -> str:
        """A pointer to constant i8 numbers; the name must be the program's only one."""
        text = ", ".join(f"i8 {value}" for value in values)
        self.constants += f"@{name} = internal constant [{len(values)} x i8] [{text}]\n"
        return f"@{name}"

    def variable(self, kind: str, value: str) -> Variable:
        """A new variable with its first value."""
        found = Variable(self, kind, self.space(kind))
        found.set(value)
        return found

    def at(self, element: str, pointer: str, index: str | int) -> str:
        """The address of an array's element."""
        return self(f"getelementptr {element}, ptr {pointer}, i64 {index}")

    def load(self, kind: str, pointer: str, index: str | int, align: int = 0) -> str:
        """An array's element."""
        suffix = f", align {align}" if align else ""
        return self(f"load {kind}, ptr {self.at(kind, pointer, index)}{suffix}")

    def store(self, kind: str, value: str, pointer: str, index: str | int, align: int = 0) -> None:
        """Overwrite an array's element."""
        suffix = f", align {align}" if align else ""
        self.do(f"store {kind} {value}, ptr {self.at(kind, pointer, index)}{suffix}")

    # --- numbers -----------------------------------------------------------------------------------------------------

    def i64(self, operation: str, x: str | int, y: str | int) -> str:
        """One operation on 64-bit numbers."""
        return self(f"{operation} i64 {x}, {y}")

    def least(self, x: str | int, y: str | int) -> str:
        """The smaller, signed."""
        return self(f"call i64 @llvm.smin.i64(i64 {x}, i64 {y})")

    # --- control -----------------------------------------------------------------------------------------------------

    @contextmanager
    def loop(self, first: str | int, stop: str | int, step: str | int = 1) -> Iterator[str]:
        """For i from first to below stop; yields i."""
        i = self.variable("i64", str(first))
        with self.repeat(lambda: self(f"icmp slt i64 {i.get()}, {stop}")):
            value = i.get()
            yield value
            i.set(self.i64("add nsw", value, step))

    @contextmanager
    def countdown(self, count: str | int) -> Iterator[str]:
        """For i from count - 1 down to 0; yields i."""
        with self.loop(0, count) as done:
            yield self.i64("sub nsw", self.i64("sub nsw", count, 1), done)

    @contextmanager
    def repeat(self, condition: Callable[[], str]) -> Iterator[None]:
        """While the i1 that `condition` writes is set, which is asked before each turn."""
        head, inside, after = self._names("head", "inside", "after")
        self.do(f"br label %{head}")
        self.label(head)
        self.do(f"br i1 {condition()}, label %{inside}, label %{after}")
        self.label(inside)
        yield
        self.do(f"br label %{head}")
        self.label(after)

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """If an i1 is set."""
        inside, after = self._names("inside", "after")
        self.do(f"br i1 {condition}, label %{inside}, label %{after}")
        self.label(inside)
        yield
        self.do(f"br label %{after}")
        self.label(after)

    def _names(self, *kinds: str) -> list[str]:
        self._blocks += 1
        return [f"{kind}{self._blocks}" for kind in kinds]
