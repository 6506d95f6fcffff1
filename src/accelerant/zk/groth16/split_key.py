"""A proving key on several devices: each has a part of every section's points, and adds up that part of each sum.

Each device gets the whole witness and makes the whole quotient, which takes less time than one device's and a copy to
the others: a twentieth of a proof's work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.device_key import DeviceKey
from accelerant.zk.groth16.keys import SECTIONS, Stages, Summed

__all__ = ["SplitKey"]

U64 = npt.NDArray[np.uint64]


class SplitKey:
    """See keys.ProvingKey."""

    def __init__(self, zkey: Zkey, places: Sequence[MemorySpace], stages: Stages) -> None:
        """Bring a part of the key to each place; arguments and errors as DeviceKey."""
        self._family = family_of(zkey.family)
        parts = [(index, len(places)) for index in range(len(places))]
        self._keys = [DeviceKey(zkey, place, stages, part=part) for place, part in zip(places, parts, strict=True)]
        self.label = "+".join(place.label for place in places)
        self._threads = ThreadPoolExecutor(len(places), thread_name_prefix="accelerant-groth16")

    def begin(self, values: U64, stages: Stages) -> Callable[[], Summed]:
        """See keys.ProvingKey; a thread for each device copies and launches.

        All sums are of one copy: where the file changes, parts of two witnesses are those of none, and r and s do not
        hide them.
        """
        with stages("witness"):
            copied = np.array(values, np.uint64)
        with stages("launches"):
            ends = list(self._threads.map(lambda key: key.begin(copied, Stages()), self._keys))

        def end() -> Summed:
            with stages("device"):
                found = [each() for each in ends]
                sums = {name: self._added(name, [each.sums[name] for each in found]) for name in SECTIONS}
            spans = {
                f"{key.label} {name}": seconds
                for key, each in zip(self._keys, found, strict=True)
                for name, seconds in each.spans.items()
            }
            return Summed(sums, found[0].public, spans)

        return end

    def explain(self) -> str:
        """See keys.ProvingKey; a line for each section of each device."""
        return "\n".join(key.explain() for key in self._keys)

    def _added(self, name: str, points: Sequence[U64]) -> U64:
        curve: Curve[Any] = self._family.g2 if name == "B2" else self._family.g1
        found: U64 = reduce(
            lambda x, y: launch.add(HOST, curve, x, y), (point.reshape(1, *curve.shape) for point in points)
        )
        return found
