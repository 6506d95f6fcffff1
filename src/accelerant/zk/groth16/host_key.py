"""A proving key in the memory of the CPU.

The kernels' limbs differ from the file's, so points are copied once, in chunks, and the pages of the file are released
as they are read. A key and its proofs take less than twice the file's size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.runtime.host import usable_cores
from accelerant.zk.formats.elements import first_not_below
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.keys import SECTIONS, KeySums, Stages, UnreducedError
from accelerant.zk.groth16.matrices import SparseMatrix, quotient, snarkjs_scalar_field
from accelerant.zk.multi_scalar.cpu import CpuBases, cpu_plan
from accelerant.zk.multi_scalar.op import run_sums

__all__ = ["HostKey"]

U64 = npt.NDArray[np.uint64]

_CHUNK_POINTS = 1 << 14
"""Points converted at a time: 1 or 2 MB of BN254."""

_SMALL_BITS = 32
"""Scalars below 2^32 have few digits and do not count when the window is chosen."""


class HostKey:
    """A ProvingKey on the CPU."""

    label = HOST.label

    def __init__(self, zkey: Zkey, stages: Stages) -> None:
        """Read the sections of a key, which may be closed afterwards.

        Raises:
            FormatError: a coefficient is out of range.
        """
        family = family_of(zkey.family)
        with stages("key: constraints"):
            field = snarkjs_scalar_field(family)
            self._rows = SparseMatrix.from_coefficients(field, zkey.domain_size, zkey.coefficients)
            zkey.forget()
        with stages("key: points"):
            curves = {name: family.g2 if name == "B2" else family.g1 for name in SECTIONS}
            self._sections = {name: _HostSection(curve, zkey, name) for name, curve in curves.items()}
        self._n_public = zkey.n_public

    def begin(self, values: U64, stages: Stages) -> Callable[[], KeySums]:
        """See ProvingKey; all sums are computed by the returned function."""
        with stages("witness"):
            witness = np.array(values, np.uint64)
            if first_not_below(witness, self._rows.field.modulus) is not None:
                raise UnreducedError

        def finish() -> KeySums:
            private, scalars, sums = self._n_public + 1, witness, {}
            for name in SECTIONS:
                if name == "C":
                    scalars = witness[private:]
                elif name == "H":  # after the sum of B2, which takes the most memory
                    with stages("quotient"):
                        scalars = self.quotient(witness)
                with stages(f"sum {name}"):
                    sums[name] = self.sum(name, scalars)
            return KeySums(sums, witness[1:private], {})

        return finish

    def explain(self) -> str:
        """See ProvingKey."""
        return "\n".join(f"{name}: {section.explain()}" for name, section in self._sections.items())

    def quotient(self, witness: U64) -> U64:
        """Return the scalars of H, (domain_size, 4) canonical words."""
        return quotient(self._rows, witness)

    def sum(self, name: str, scalars: U64) -> U64:
        """Return the sum of scalars, (n, 4) below the order, times a section's points: (1, *shape), Montgomery form."""
        return self._sections[name].msm(scalars)


class _HostSection:
    """The finite points of a section, in the form of the kernels."""

    def __init__(self, curve: Curve[Any], zkey: Zkey, name: str) -> None:
        self._curve = curve
        finite = np.zeros(len(zkey.points[name]), np.bool_)
        self._bases = CpuBases.of_chunks(curve, _finite(zkey.chunks(name, _CHUNK_POINTS), finite), len(finite))
        self._indices = None if self._bases.n == len(finite) else np.flatnonzero(finite)

    def msm(self, scalars: U64) -> U64:
        rows = scalars if self._indices is None else scalars[self._indices]
        large = rows[:, 1:].any(axis=1) | (rows[:, 0] >> np.uint64(_SMALL_BITS) != 0)
        plan = cpu_plan(self._curve.order, max(1, int(np.count_nonzero(large))), usable_cores())
        words = HOST.contiguous(rows)
        total: U64 = run_sums(HOST, self._curve, [words], lambda row: self._bases.msm(row, plan))
        return total

    def explain(self) -> str:
        return f"{self._bases.n} points on the CPU; {self._bases.explain()}"


def _finite(chunks: Iterator[U64], finite: npt.NDArray[np.bool_]) -> Iterator[U64]:
    """Yield the finite points of each chunk, and mark them in `finite`."""
    start = 0
    for chunk in chunks:
        mask = finite[start : start + len(chunk)]
        np.any(chunk, axis=1, out=mask)
        start += len(chunk)
        yield chunk if mask.all() else chunk[mask]
