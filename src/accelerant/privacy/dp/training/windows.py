"""Disjoint windows of tokens, and their Poisson draws as batches by step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.nn.train.batches import Batch, Tokens, gather, halves
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.sources import TokenSource
from accelerant.privacy.dp.sampling.batches import DrawnBatch
from accelerant.privacy.dp.training.private import PrivateTraining

__all__ = ["WindowSource", "split_draw"]


class _Windows:
    """Disjoint windows of tokens, by number."""

    def __init__(self, tokens: Tokens, context: int) -> None:
        self._tokens = tokens
        self._context = context

    def __len__(self) -> int:
        return len(self._tokens) // (self._context + 1)

    def __getitem__(self, index: Tensor) -> Batch:
        return halves(gather(self._tokens, index.numpy() * (self._context + 1), self._context))


class WindowSource(TokenSource):
    """Poisson draws of disjoint windows, in parts of at most the config's micro-batch.

    Attributes:
        windows: how many there are.
        rate: of the sampling: batch_size over windows.
        private: draws them.
        drawn: the parts of the step that was given last.
    """

    fixed = False

    def __init__(self, tokens: Tokens, config: TrainConfig, fingerprint: str) -> None:
        super().__init__(tokens, config, fingerprint=fingerprint)
        self.micro_batch = None  # the parts are as they should be
        self._data = _Windows(tokens, config.context)
        self._rows = config.micro_batch
        self.windows = len(self._data)
        self.rate = config.batch_size / max(1, self.windows)
        self.private: PrivateTraining | None = None
        self.drawn: list[DrawnBatch] = []
        if self.rate > 1:
            raise ConfigError(
                f"not enough data: the training part has {self.windows} windows of {config.context + 1} tokens, a "
                f"batch draws {config.batch_size} of them; give --data more text, or a smaller --batch-size"
            )

    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        """The parts of each step. Draws are never repeated, after a resumption either."""
        assert self.private is not None  # for the type checker: set when it was attached
        self.drawn = []
        for part in self.private.draws(self._data, steps=len(steps), microbatch=self._rows if pin else None):
            self.drawn += [part] if pin else split_draw(part, self._rows)
            if part.last:
                yield [tuple(each.pin_memory() if pin else each for each in one.tensors) for one in self.drawn]
                self.drawn = []


def split_draw(draw: DrawnBatch, rows: int) -> list[DrawnBatch]:
    """A draw in parts of at most so many rows, without padding: where shapes may vary it would only cost time."""
    if draw.rows <= rows:
        return [draw]
    parts = list(zip(*(each.split(rows) for each in draw.tensors), strict=True))
    sizes = [len(part[0]) for part in parts]
    numbered = enumerate(zip(parts, sizes, strict=True), 1)
    return [
        replace(draw, tensors=part, mask=None, last=number == len(parts), examples=size, rows=size)
        for number, (part, size) in numbered
    ]
