"""A proving key in the memory of the CPU.

Kernels want points as other limbs than the file has, so they are copied once, a chunk at a time; the file's pages are
given back as they are read. So a key and its proofs take less than twice the file's size.
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
from accelerant.zk.groth16.keys import SECTIONS, Stages, Summed, UnreducedError
from accelerant.zk.groth16.quotient import constraint_rows, quotient, scalars_of
from accelerant.zk.msm.cpu import Bases, plan
from accelerant.zk.msm.op import summed

__all__ = ["HostKey"]

U64 = npt.NDArray[np.uint64]

_CHUNK_POINTS = 1 << 14
"""Of a section, that are brought to the kernels' form at a time: 1 or 2 MB of BN254."""

_SMALL_BITS = 32
"""Scalars below 2^32 have few digits: they are not counted where digits are chosen."""


class HostKey:
    """See keys.ProvingKey."""

    label = HOST.label

    def __init__(self, zkey: Zkey, stages: Stages) -> None:
        """Read the sections of a key.

        Args:
            zkey: which need not stay open.
            stages: told of "key: constraints" and "key: points".

        Raises:
            FormatError: a coefficient is out of range.
        """
        family = family_of(zkey.family)
        with stages("key: constraints"):
            self._field = scalars_of(family)
            self._rows = constraint_rows(self._field, zkey.domain_size, zkey.coefficients)
            zkey.forget()
        with stages("key: points"):
            curves = {name: family.g2 if name == "B2" else family.g1 for name in SECTIONS}
            self._sections = {name: _Section(curve, zkey, name) for name, curve in curves.items()}
        self._n_public = zkey.n_public

    def begin(self, values: U64, stages: Stages) -> Callable[[], Summed]:
        """See keys.ProvingKey; sums are made at the end."""
        with stages("witness"):
            witness = np.array(values, np.uint64)
            if first_not_below(witness, self._field.modulus) is not None:
                raise UnreducedError

        def end() -> Summed:
            private, factors, found = self._n_public + 1, witness, {}
            for name in SECTIONS:
                if name == "C":
                    factors = witness[private:]
                elif name == "H":  # after the sums of B2, which take most memory
                    with stages("quotient"):
                        factors = self.quotient(witness)
                with stages(f"sum {name}"):
                    found[name] = self.sum(name, factors)
            return Summed(found, witness[1:private], {})

        return end

    def explain(self) -> str:
        """See keys.ProvingKey."""
        return "\n".join(f"{name}: {section.explain()}" for name, section in self._sections.items())

    def quotient(self, witness: U64) -> U64:
        """The scalars of H, (domain_size, 4) canonical words."""
        return quotient(self._field, self._rows, witness)

    def sum(self, name: str, scalars: U64) -> U64:
        """The sum of a section's points times scalars (n, 4) below the order: (1, *shape), Montgomery form."""
        return self._sections[name].msm(scalars)


class _Section:
    """Points of a section of the key without those at infinity, as kernels take them."""

    def __init__(self, curve: Curve[Any], zkey: Zkey, name: str) -> None:
        """Copy a section of the file."""
        self._curve = curve
        finite = np.zeros(len(zkey.points[name]), np.bool_)
        self._bases = Bases.of_chunks(curve, _finite(zkey.chunks(name, _CHUNK_POINTS), finite), len(finite))
        self._kept = None if self._bases.n == len(finite) else np.flatnonzero(finite)

    def msm(self, scalars: U64) -> U64:
        """The sum, (1, *shape), Montgomery form, of scalars (n, 4) below the order."""
        rows = scalars if self._kept is None else scalars[self._kept]
        large = rows[:, 1:].any(axis=1) | (rows[:, 0] >> np.uint64(_SMALL_BITS) != 0)
        chosen = plan(self._curve.order, max(1, int(np.count_nonzero(large))), usable_cores())
        words = HOST.contiguous(rows)
        found: U64 = summed(HOST, self._curve, [words], lambda row: self._bases.msm(row, chosen))
        return found

    def explain(self) -> str:
        """In words."""
        return f"{self._bases.n} points on the CPU; {self._bases.explain()}"


def _finite(chunks: Iterator[U64], finite: npt.NDArray[np.bool_]) -> Iterator[U64]:
    """Of each chunk the points that are not infinity; notes which they are."""
    start = 0
    for chunk in chunks:
        kept = finite[start : start + len(chunk)]
        np.any(chunk, axis=1, out=kept)
        start += len(chunk)
        yield chunk if kept.all() else chunk[kept]
