"""LLVM IR as text, one instruction after the other."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from accelerant.runtime.compilation.sources import sources_hash

__all__ = ["INLINE", "NOINLINE", "REGISTERS", "Body", "builder_key", "function", "splat"]

INLINE = "alwaysinline nounwind"
NOINLINE = "noinline nounwind"

REGISTERS = "x86_regcallcc" if platform.machine().lower() in ("x86_64", "amd64") else "fastcc"
"""Calls that pass and return elements in registers; C's on x86 would return them in memory, and what is stored there as
words and loaded at once as a vector stalls: a product of six words took twice as long."""


class Body:
    """The instructions of a function; values are the names that LLVM knows them by."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._values = 0

    def __call__(self, instruction: str) -> str:
        """Append an instruction that has a value; return the value's name."""
        self._values += 1
        self.lines.append(f"  %v{self._values} = {instruction}")
        return f"%v{self._values}"

    def do(self, instruction: str) -> None:
        """Append an instruction without a value."""
        self.lines.append(f"  {instruction}")

    def label(self, name: str) -> None:
        """Begin a block."""
        self.lines.append(f"{name}:")


def function(
    name: str, result: str, arguments: Sequence[str], body: Body, linkage: str = "internal", attributes: str = INLINE
) -> str:
    """A definition.

    Args:
        name: without the @.
        result: type.
        arguments: type and name of each, "i64 %n".
        body: its instructions; their first block has no label.
        linkage: "internal", or "" for an entry point.
        attributes: of the function.
    """
    lines = "\n".join(body.lines)
    return f"define {linkage} {result} @{name}({', '.join(arguments)}) {attributes} {{\n{lines}\n}}\n"


def splat(element: str, lanes: int, value: int) -> str:
    """A constant of `lanes` equal elements, without its type; the plain number where lanes is 1."""
    return str(value) if lanes == 1 else "<" + ", ".join([f"{element} {value}"] * lanes) + ">"


def builder_key(builder: object) -> str:
    """The key of a builder (see kernel.py) of LLVM IR: its fields, and the code that writes the text.

    Writing the text takes up to 60 ms, which a process that finds machine code on disk need not spend.

    Args:
        builder: a dataclass whose fields, with the code below algebra and zk/msm, are all that its text depends on.
    """
    return f"{builder!r} {sources_hash('algebra', 'zk/msm')}"
