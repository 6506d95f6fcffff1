"""Drawn batches, and the check that each drawn row goes through backward once and each draw makes one step.

The privacy claim of a step requires that each example adds at most one clipped gradient to the sum.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import Tensor

from accelerant.errors import ConfigError

__all__ = ["Draw", "DrawTracker", "DrawnBatch"]


class Draw:
    """The identity of one draw, shared by its parts and their copies."""

    __slots__ = ("__weakref__",)

    def __copy__(self) -> Draw:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Draw:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError("a drawn batch is not pickled: a copy could make a second step. Send its tensors")


@dataclass(frozen=True, slots=True)
class DrawnBatch:
    """A draw, or a part of one.

    Attributes:
        tensors: a tuple of tensors, or a mapping if the data are one; dimension 0 is the row.
        mask: (rows,) bool, the rows that were drawn; None if all were. The others are padding, which must not count.
        last: whether it is the draw's last part, after which optimizer.step() follows.
        examples: number of rows that were drawn.
        rows: rows of the tensors, including padding.
        draw: the same for all parts of one draw; None if unknown.
        sampler: that drew it; None if unknown.
    """

    tensors: Any
    mask: Tensor | None
    last: bool
    examples: int
    rows: int
    draw: Draw | None = field(default=None, repr=False)
    sampler: Any = field(default=None, repr=False, compare=False)


class DrawTracker:
    """Compares the rows that went through backward with those of the batch in use.

    Attributes:
        passes: backward passes since the last step.
        examples: rows of these passes.
    """

    def __init__(self) -> None:
        self.passes = self.examples = 0
        self._rows = self._seen = 0  # of the part in use, and those of them that went through backward
        self._last, self._open = True, False
        self._drawn = 0  # examples of the draw so far
        self._origin: object = None
        self._draw: Draw | None = None
        self._stepped: weakref.WeakSet[Draw] = weakref.WeakSet()

    @property
    def sampled(self) -> bool:
        """Whether the gradients are of a draw of our sampler."""
        return self._open

    @property
    def complete(self) -> bool:
        """Whether a step may follow: the part is the draw's last, or the batches are the user's own."""
        return self._last or not self._open

    @property
    def awaited(self) -> bool:
        """Whether a part was returned to the user and has not been through backward."""
        return self._open and not self._seen

    @property
    def held(self) -> bool:
        """Whether the gradients have parts of an unfinished draw and must not be cleared."""
        return self.passes > 0 and self._open and not (self._last and self._seen)

    def begin(self, batch: DrawnBatch, origin: object = None) -> None:
        """Start a part of a draw.

        Args:
            batch: the part.
            origin: the iterator of the parts; with another one a draw begins even if the last one is not complete.

        Raises:
            ConfigError: no step followed the previous draw or other batches; the previous part was left out, or is
                still to be used; the draw made a step already.
        """
        if batch.draw in self._stepped:
            raise ConfigError(
                "this draw has made a step already: amplification by sampling requires a new draw for each step. "
                "Iterate batches(data) or draws(data) again, and keep no list of them"
            )
        if self.awaited and origin is not None and origin is self._origin:
            raise ConfigError(
                f"the batch before this one ({self._rows} rows) has not been through backward: take batches one at a "
                "time, without list() or prefetching, and leave none out; an empty draw makes a step, too"
            )
        new = self._last or not self._open or origin is not self._origin or batch.draw is not self._draw
        if new and self.passes:
            self._open = False  # so that zero_grad clears them
            raise ConfigError(
                f"{self.passes} backward pass(es) without optimizer.step() before the next draw: one step belongs to "
                "each draw. zero_grad() gives these up. For larger batches raise sample_rate; for less memory give "
                "microbatch"
            )
        if new:
            self._drawn = 0
        else:
            self._require_all()
        self._rows, self._seen, self._last, self._open = batch.rows, 0, batch.last, True
        self._origin, self._draw = origin, batch.draw
        self._drawn += batch.examples

    def add(self, rows: int) -> None:
        """Count the rows of a finished backward pass."""
        self.passes += 1
        self.examples += rows
        self._seen += rows

    def require_step(self) -> None:
        """Check that the sum may be released.

        Raises ConfigError without a backward pass for each row since the last step, unless the draw was empty.
        """
        empty = self._open and self._drawn == 0
        if not self.passes and not empty:
            raise ConfigError(
                "optimizer.step() without a backward pass since the last step: only an empty batch that our sampler "
                "drew makes a step of noise only"
            )
        if self.passes and not (empty and self.awaited):
            self._require_all()

    def forget(self) -> None:
        """Reset the counts after gradients were cleared without a step."""
        self.passes = self.examples = self._seen = 0

    def released(self) -> None:
        """Mark the draw as used up by a step."""
        self.forget()
        if self._open and self._draw is not None:
            self._stepped.add(self._draw)
        self._open = False

    def _require_all(self) -> None:
        """Check that each row of the part went through backward once."""
        if not self._open or self._seen == self._rows:
            return
        remedy = (
            "the model's input must have the examples in its first dimension, and each of them; rows to leave out are "
            "for clipper.mask"
            if self._seen < self._rows
            else "an example would count more than once. Add the losses up and call backward once for each batch"
        )
        raise ConfigError(f"{self._seen} rows went through backward passes, the batch has {self._rows}: {remedy}")
