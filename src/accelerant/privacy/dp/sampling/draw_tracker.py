"""Which examples went through backward since the last step, and whether they are a whole draw of our sampler.

The claim of a step rests on each example adding at most one clipped gradient to the sum. The tally holds a loop to
that: one backward pass for each row of a drawn batch, one step for each draw.
"""

from __future__ import annotations

from accelerant.errors import ConfigError

__all__ = ["Tally"]


class Tally:
    """Counts rows through backward passes, beside those of the batch that is being used.

    Attributes:
        passes: backward passes since the last step.
        examples: rows of them.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.examples = 0
        self._rows = 0
        self._seen = 0
        self._last = True
        self._open = False
        self._drawn = 0
        self._origin: object = None
        self._number = 0
        self._used: set[int] = set()

    @property
    def sampled(self) -> bool:
        """Whether what is summed is of a draw of our sampler."""
        return self._open

    @property
    def complete(self) -> bool:
        """Whether a step may follow: the last part of the draw is here, or the batches are the user's own."""
        return self._last or not self._open

    @property
    def awaited(self) -> bool:
        """Whether a part was handed out and has not been through backward."""
        return self._open and not self._seen

    @property
    def held(self) -> bool:
        """Whether parts of an unfinished draw are in the gradients: they must not be cleared."""
        return self.passes > 0 and self._open and not (self._last and self._seen)

    def begin(self, *, rows: int, examples: int, last: bool, origin: object = None, number: int = 0) -> None:
        """A part of a draw is handed to the loop.

        Args:
            rows: of its tensors, padding included.
            examples: that were drawn, in this part.
            last: whether the draw ends with it.
            origin: what hands the parts out; a draw of another begins, even if the last one is not complete.

            number: of the draw, 0 where it is not known: each makes one step.

        Raises:
            ConfigError: the draw before it was summed and not stepped, or gradients of other batches are there; the
                part before it was left out, or is still to be used; the draw made a step before.
        """
        if number in self._used:
            raise ConfigError(
                "this draw has made a step already: amplification by sampling is for a draw of its own in each step. "
                "Iterate batches(data) or draws(data) anew, and keep no list of them"
            )
        if self.awaited and origin is not None and origin is self._origin:
            raise ConfigError(
                f"the batch before this one ({self._rows} rows) has not been through backward: take batches one at a "
                "time, without list() or fetching ahead, and leave none out; an empty draw makes a step, too"
            )
        new = self._last or not self._open or origin is not self._origin or number != self._number
        if new and self.passes:
            self._open = False  # so that zero_grad clears them
            raise ConfigError(
                f"{self.passes} backward pass(es) without optimizer.step() before the next draw: one step belongs to "
                "each draw. zero_grad() gives these up. For larger batches raise sample_rate; for less memory give "
                "microbatch"
            )
        if not new:
            self._require_all()
        if new:
            self._drawn = 0
        self._rows, self._seen, self._last, self._open, self._origin = rows, 0, last, True, origin
        self._number = number
        self._drawn += examples

    def add(self, rows: int) -> None:
        """A backward pass over so many rows has ended."""
        self.passes += 1
        self.examples += rows
        self._seen += rows

    def require_step(self) -> None:
        """Check that what is summed may be released.

        Raises:
            ConfigError: no backward pass since the last step, unless an empty batch was drawn; or not each row once.
        """
        if self.passes and not (self.awaited and self._drawn == 0):
            self._require_all()
        if not self.passes and not (self._open and self._drawn == 0):
            raise ConfigError(
                "optimizer.step() without a backward pass since the last step: only an empty batch that our sampler "
                "drew "
                "makes a step of noise alone"
            )

    def forget(self) -> None:
        """The sums were cleared without a step."""
        self.passes = self.examples = self._seen = 0

    def released(self) -> None:
        """The sums were released: the draw is used up."""
        self.forget()
        if self._open and self._number:
            self._used.add(self._number)
        self._open = False

    def _require_all(self) -> None:
        """Check that each row of the part went through backward once."""
        if not self._open or self._seen == self._rows:
            return
        if self._seen < self._rows:
            raise ConfigError(
                f"{self._seen} rows went through backward passes, the batch has {self._rows}: the model's input must "
                "have the examples in its first dimension, and each of them; rows to leave out are for clipper.mask"
            )
        raise ConfigError(
            f"{self._seen} rows went through backward passes, the batch has {self._rows}: an example would count "
            "more than once. Add the losses up and call backward once for each batch"
        )
