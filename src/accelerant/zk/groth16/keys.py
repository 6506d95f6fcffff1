"""What a prover asks of a proving key, wherever it is kept: five sums of multiples for a witness."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["SECTIONS", "Progress", "ProvingKey", "Stages", "Summed", "UnreducedError"]

U64 = npt.NDArray[np.uint64]
Progress = Callable[[str], None]

SECTIONS = ("A", "B1", "B2", "C", "H")
"""Of points in a key. Those of A, B1, B2 are multiplied by the witness, of C by its private values, of H by the
quotient's."""


class UnreducedError(Exception):
    """A value of the witness is not below r."""


class Summed(NamedTuple):
    """What a proof is made of.

    Attributes:
        sums: section -> words of one affine point in Montgomery form, of any shape.
        public: (n_public, 4), the witness's public inputs, of the very copy that was summed.
        spans: part -> seconds that a device spent on it; parts overlap. Empty on the CPU.
    """

    sums: dict[str, U64]
    public: U64
    spans: dict[str, float]


class Stages:
    """Times of what is done in turn.

    Attributes:
        timings: stage -> seconds, in the order in which stages began.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        """Progress: called with the name of each stage before it begins."""
        self.timings: dict[str, float] = {}
        self._progress = progress

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time what the block does."""
        if self._progress is not None:
            self._progress(name)
        start = time.perf_counter()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start


class ProvingKey(Protocol):
    """The large sections of a key, ready for many witnesses.

    Attributes:
        label: where, as the ledger names it.
    """

    label: str

    def begin(self, values: U64, stages: Stages) -> Callable[[], Summed]:
        """Copy a witness, and begin with it; what is returned ends it, and raises UnreducedError.

        Args:
            values: (n_vars, 4) words, as they lie in the file, which may change at any time.
            stages: told of each part of the work, also at the end.
        """
        ...

    def explain(self) -> str:
        """Where each section is, and how it is summed; a line each."""
        ...
