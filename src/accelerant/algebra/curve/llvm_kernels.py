"""The CPU's curve kernels: LLVM IR of every entry for one curve, over whichever form of arithmetic the processor has.

An entry does the indices [begin, end) that lie below n; see runtime/providers/cpu.py. A point is affine, x then y (over
Fq2 c0 then c1), its coordinates in Montgomery form x R mod q with R = 2^(64 limbs), infinity all zeros.

    curve_add            (x, y, z, n)                                  any points of the curve; z may be x or y
    curve_neg            (x, z, n)                                     z may be x
    curve_mul            (x, scalars, z, n, x_step, scalar_step)       z_i = s_i x_i, of any 256-bit numbers s_i of four
                                                                       words; steps 0 (one for all) or 1

Here an index is a chunk of `chunk` points, the chunks at or above n left alone:

    curve_off_curve      (x, first, n, chunk)     first[c]: the least index of a point not on the curve, else n
    curve_off_subgroup   (x, first, n, chunk)     the same of a point, on the curve, out of the subgroup

Coordinates are reduced. curve_neg and curve_mul have no branch and no address that depends on points or scalars;
curve_add branches on special cases, and its time depends on the points.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from accelerant.algebra.curve.llvm_entries import ENTRIES, POINTERS
from accelerant.algebra.curve.llvm_points import functions
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.field.llvm_kernels import SOURCES, host_form, packed_field
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.llvm import FunctionBuilder, program
from accelerant.runtime.compilation.sources import builder_key

__all__ = ["CurveKernels"]

_LEAST_SHARES = {"add": 1024, "neg": 8192, "mul": 8, "off_curve": 64, "off_subgroup": 2}
"""Indices that are worth another thread, points or chunks of points: 50 us of work, more where chunks are large."""


@dataclass(frozen=True, slots=True)
class CurveKernels:
    """A Builder (see runtime/compilation/kernel.py) of a curve's entries.

    Attributes:
        curve: its name.
        entry: the one entry to build, "curve_add"; all of them where it is "".
        form: "scalar" or "vector"; what this processor is best at where it is "".
    """

    curve: str
    entry: str = ""
    form: str = ""

    written_out = True
    """LLVM has little to do: see runtime/providers/cpu.py."""

    @property
    def key(self) -> str:
        """See builder_key; the text depends on the target in nothing else."""
        curve = curve_of(self.curve)
        parameters = (curve.coordinates.base, curve.coordinates.degree, curve.scalars, curve.b, curve.generator)
        return builder_key((replace(self, form=self.kind), *parameters), *SOURCES)

    @property
    def kind(self) -> str:
        """The form that is built."""
        return self.form or host_form(curve_of(self.curve).coordinates.base)

    @property
    def least_share(self) -> int:
        """Indices that are worth another thread."""
        return _LEAST_SHARES[self.entry.removeprefix("curve_")] if self.entry else min(_LEAST_SHARES.values())

    def build(self, target: str) -> str:
        """LLVM IR.

        Raises:
            ConfigError: unknown curve, entry or form.
        """
        return _text(self.curve, self.entry, self.kind)


@functools.cache
def _text(name: str, entry: str, kind: str) -> str:
    curve = curve_of(name)
    wanted = [entry.removeprefix("curve_")] if entry else list(ENTRIES)
    if wanted[0] not in ENTRIES:
        raise ConfigError(f"unknown entry {entry!r}; known are {', '.join(f'curve_{known}' for known in ENTRIES)}")
    form = packed_field(curve.coordinates.base, kind)
    parts = list(functions(name, kind))
    for known in wanted:
        arguments, write = ENTRIES[known]
        typed = [f"ptr %{a}" if a in POINTERS else f"i64 %{a}" for a in ("begin", "end", *arguments)]
        code = FunctionBuilder(f"curve_{known}", typed, linkage="", attributes="nounwind")
        write(curve, form, code)
        code.ret()
        parts.append(code)
    return program(parts)
