"""What the loop needs of data, whatever they are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import Literal

from accelerant.nn.train.batches import Batch

__all__ = ["Source"]


class Source(ABC):
    """Batches by step.

    Attributes:
        unit: what `per_step` counts.
        per_step: samples or tokens in a step.
        micro_batch: rows at once: the parts of a step are split to it; None: they are as they should be.
        fixed: whether each step's parts have the same shapes.
    """

    unit: Literal["samples", "tokens"] = "samples"
    per_step: int
    micro_batch: int | None
    fixed: bool = True

    @abstractmethod
    def steps(self, epochs: float) -> int:
        """How many steps so many passes take."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Tells data from other data, well enough to refuse resuming with others."""

    @abstractmethod
    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        """The parts of each step in turn; closing the generator ends what it started.

        Args:
            steps: which.
            position: as `position` gave it after the step before; empty at the beginning.
            pin: whether to make them ahead, and give them in pinned memory.
        """

    def position(self) -> dict[str, int]:
        """What a resumed run needs beside the step."""
        return {}

    @abstractmethod
    def in_order(self, rows: int) -> Generator[Batch]:
        """All data once, for evaluation, so many rows at once; the last may be fewer. Close it: it may hold workers."""

    @abstractmethod
    def rows(self) -> int | None:
        """How many rows `in_order` gives; None where that is not known before."""

    @abstractmethod
    def example(self) -> Batch:
        """One part of a step, to read shapes from."""
