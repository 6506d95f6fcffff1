"""A proving key on a device, or as much of it as has room there.

A witness is copied once. Then all is launched before the host waits for anything: each sum in a lane of its own, and
the quotient with the sum of H in one, so that a sum's end, which leaves most of the device idle, lies beside another's
middle. The sum over G2 takes longest, so it comes first; the quotient's lane goes before others, since most has to be
done one after the other there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.csr import stacked_coefficients
from accelerant.zk.groth16.device_rows import DeviceRows, gathered, unreduced
from accelerant.zk.groth16.device_sections import Points, Section, Spans, budgets
from accelerant.zk.groth16.keys import SECTIONS, Stages, Summed, UnreducedError
from accelerant.zk.groth16.lanes import Lanes
from accelerant.zk.groth16.quotient import scalars_of

__all__ = ["DeviceKey"]

U64 = npt.NDArray[np.uint64]

_MEMORY_SHARE = 0.8
"""Of the free memory, what a key takes at most."""

_ORDER = ("B2", "A", "C", "B1", "H")
"""In which sums are launched. H waits for the quotient."""

_LANES = {name: (1 + number) % len(_ORDER) for number, name in enumerate(_ORDER)}
_INPUT = len(_ORDER)
"""The lane of the witness's copy, which need not wait for what other lanes do for the last one."""

_SCALAR_BYTES, _VECTORS = 32, 6
"""Vectors of the domain's and the witness's sizes, at most: the quotient's, what a transform needs, the scalars."""


class DeviceKey:
    """See keys.ProvingKey.

    Attributes:
        place: where.
        label: its name.
    """

    def __init__(
        self,
        zkey: Zkey,
        place: MemorySpace,
        stages: Stages,
        *,
        part: tuple[int, int] = (0, 1),
        free_bytes: int | None = None,
        overlap: bool = True,
    ) -> None:
        """Bring the sections of a key to a device.

        Args:
            zkey: which need not stay open.
            place: where; not the host.
            stages: told of "key: constraints" and "key: points".
            part: (i, n): of each section's points the i-th of n parts, so that n devices make a sum.
            free_bytes: memory of the device that may be taken, by default 0.8 of what is free.
            overlap: a lane for each sum, instead of one for all.

        Raises:
            FormatError: a coefficient is out of range.
            OutOfMemory: not even the constraints have room.
        """
        self.place, self.label = place, place.label
        family, field = family_of(zkey.family), scalars_of(family_of(zkey.family))
        self._field, self._n_public = field, zkey.n_public
        self._lanes, self._lock = Lanes(place, len(_ORDER) + 1), threading.Lock()
        room = int(_MEMORY_SHARE * place.provider.memory(place.index).free_bytes) if free_bytes is None else free_bytes
        with stages("key: constraints"):
            self._rows = DeviceRows(self._lanes, field, stacked_coefficients(zkey.domain_size, zkey.coefficients))
        with stages("key: points"):
            first, words = {"C": zkey.n_public + 1}, zkey.points
            points = {
                name: Points(family.g2 if name == "B2" else family.g1, words[name], first.get(name, 0), part)
                for name in SECTIONS
            }
            vectors = _SCALAR_BYTES * _VECTORS * (zkey.domain_size + zkey.n_vars)
            allowed = budgets(points, room - self._rows.size_bytes - vectors)
            overlap = overlap and allowed.scratch is None  # where memory is short, one sum after the other
            lanes, self._input = (_LANES, _INPUT) if overlap else (dict.fromkeys(SECTIONS, 0), 0)
            # By the lane that reads it: its memory is not given to others before, also where a proof is given up
            self._public = self._lanes.load(self._input, np.arange(1, 1 + zkey.n_public, dtype=np.uint32))
            self._sections = {
                name: Section(self._lanes, lanes[name], field, points.pop(name), allowed, name) for name in _ORDER
            }
            place.provider.synchronize(place.index)

    def begin(self, values: U64, stages: Stages) -> Callable[[], Summed]:
        """See keys.ProvingKey; waits for nothing but the copy."""
        lanes, place, field, spans = self._lanes, self.place, self._field, Spans()
        with self._lock:  # lanes and their scratch memory take one witness after the other
            with stages("witness"), lanes.lane(self._input):
                witness = lanes.load(self._input, values)
            with stages("launches"):
                there = lanes.mark(self._input)
                ends = {name: self._sections[name].begin(witness, there, spans) for name in _ORDER[:-1]}
                with lanes.lane(self._input):
                    wrong = lanes.fetch(self._input, unreduced(place, field, witness, len(values)))
                    inputs = gathered(place, field, witness, self._public, self._n_public)
                    public = lanes.fetch(self._input, inputs)
                lanes.wait(0, there)
                with lanes.lane(0):
                    begun = lanes.mark(0)
                    scalars = self._rows.quotient(witness)
                    spans["quotient"] = begun, lanes.mark(0)
                ends["H"] = self._sections["H"].begin(scalars, spans["quotient"][1], spans)

        def end() -> Summed:
            with stages("device"):
                sums = {name: ends[name]() for name in SECTIONS}
                if wrong().any():
                    raise UnreducedError
            held.clear()
            times = {name: lanes.span_s(*marks) for name, marks in spans.items()}
            return Summed(sums, public(), {name: seconds for name, seconds in times.items() if seconds is not None})

        held: list[Any] = [witness, scalars]  # until all lanes have read them
        return end

    def explain(self) -> str:
        """See keys.ProvingKey."""
        return "\n".join(f"{name}: {self._sections[name].explain()}" for name in SECTIONS)
