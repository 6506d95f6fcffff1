"""The CPU's kernel of a sparse matrix times a vector, LLVM IR.

    sparse_rows    (values, columns, starts, x, z, n)    z[i] = sum over k in [starts[i], starts[i + 1]) of
                                                          values[k] x[columns[k]] / R

An index is a row. Elements are words as everywhere, R = 2^256. With values x R^2 mod p, as a .zkey has them, and a
canonical x the answer is in Montgomery packed. x is below p, values are any words. One element at a time: rows have few
entries, and each reads x anywhere. Time depends on the matrix alone, which is public.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from accelerant.algebra.field.llvm_packed import PackedLimbs
from accelerant.algebra.field.parameters import field_of
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.llvm import FunctionBuilder, program

__all__ = ["RowsKernel", "kernel_source"]

_ARGUMENTS = {"values": "*u64", "columns": "*u32", "starts": "*i64", "x": "*u64", "z": "*u64"}


@dataclass(frozen=True, slots=True)
class RowsKernel:
    """A Builder (see runtime/compilation/kernel.py).

    Attributes:
        field: its name; of 64-bit words.
    """

    field: str

    written_out = True
    """LLVM has little to do: see runtime/providers/cpu.py."""

    least_share = 512
    """Rows that are worth another thread."""

    @property
    def key(self) -> str:
        """The program itself."""
        return self.build("")

    def build(self, target: str) -> str:
        """LLVM IR."""
        return _text(self.field)


@functools.cache
def kernel_source(field: str) -> KernelSource:
    """The entry, for the CPU."""
    types = (*_ARGUMENTS.values(), "i64")
    return KernelSource(f"sparse_rows_{field}", {"llvm": RowsKernel(field)}, {"sparse_rows": types}, targets=())


@functools.cache
def _text(name: str) -> str:
    packed = PackedLimbs(field_of(name))
    arguments = ["i64 %begin", "i64 %end", *(f"ptr %{name}" for name in _ARGUMENTS), "i64 %n"]
    code = FunctionBuilder("sparse_rows", arguments, linkage="", attributes="nounwind")
    with code.loop("%begin", code.smin("%end", "%n")) as row:
        first = code.load("i64", "%starts", row)
        stop = code.load("i64", "%starts", code.i64("add nsw", row, 1))
        total = code.variable(packed.type, packed.constant(0))
        with code.loop(first, stop) as k:
            column = code.convert("zext", code.load("i32", "%columns", k), "i64")
            x = packed.load(code, "%x", column, "0")
            product = packed.call(code, "mul", x, packed.load(code, "%values", k, "0"))
            total.set(packed.call(code, "add", total.get(), product))
        packed.store(code, "%z", row, "0", total.get())
    code.ret()
    return program([*packed.functions(), code])
