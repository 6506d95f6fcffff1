"""The inputs of a step, in one buffer: filled on the host, copied once, read as views on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.nn.serving.cache import PagedBatch
from accelerant.nn.serving.scheduler import Row


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step: its rows and new tokens, columns of the block table, and the tokens that are scored.

    single: each row has one token, which is scored; rows beyond those of the step are padding, which has no key.
    """

    rows: int
    tokens: int
    columns: int
    scored: int
    single: bool

    @classmethod
    def of(cls, rows: Sequence[Row], *, padded: bool) -> StepShape:
        """Return the sizes of rows. padded: few different ones for steps of single tokens, so that they come again."""
        tokens, columns = sum(row.count for row in rows), max(len(row.sequence.blocks) for row in rows)
        scored = sum(row.known + row.samples for row in rows)
        single = len(rows) == tokens == scored
        if single and padded:
            step = 1 << max(0, (len(rows) - 1).bit_length() - 2)  # at most a quarter more
            count = -(-len(rows) // step) * step
            return cls(count, count, 1 << (columns - 1).bit_length(), count, True)
        return cls(len(rows), tokens, columns, scored, single)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Numbers of 64 and of 32 bits."""
        return 3 * self.tokens + self.scored, self.rows * (self.columns + 2) + 1

    @property
    def words(self) -> int:
        """The size of the buffer in 32-bit words."""
        wide, narrow = self._sizes
        return 2 * wide + narrow

    def fill(self, buffer: np.ndarray, rows: Sequence[Row], block_size: int) -> None:
        """Write the rows to a buffer of int32; a token that only the device knows as -1 - its place there."""
        split = 2 * self._sizes[0]
        wide, narrow = buffer[:split].view(np.int64), buffer[split:]
        narrow.fill(0)
        ids, positions, slots = wide[: 3 * self.tokens].reshape(3, self.tokens)
        scored = wide[3 * self.tokens :]
        starts, lengths, table = self._narrow(narrow)
        if len(rows) < self.rows:
            wide.fill(0)
            slots.fill(-1)
            starts[len(rows) + 1 :] = np.arange(len(rows) + 1, self.rows + 1)
        at = last = 0
        for r, row in enumerate(rows):
            sequence, begin, end = row.sequence, row.begin, row.begin + row.count
            table[r, : len(sequence.blocks)] = sequence.blocks
            starts[r + 1], lengths[r] = at + row.count, end
            ids[at : at + row.count] = sequence.tokens[begin:end]
            if sequence.drawn is not None and end == sequence.length:
                ids[at + row.count - 1] = -1 - sequence.drawn
            if row.count == 1:
                positions[at] = begin
                slots[at] = sequence.blocks[begin // block_size] * block_size + begin % block_size
            else:
                positions[at : at + row.count] = where = np.arange(begin, end)
                slots[at : at + row.count] = table[r, where // block_size].astype(np.int64) * block_size
                slots[at : at + row.count] += where % block_size
            at += row.count
            count = row.known + row.samples
            scored[last : last + count] = np.arange(at - count, at)
            last += count

    def views(self, buffer: Tensor, *, invariant: bool) -> tuple[Tensor, Tensor, PagedBatch, Tensor]:
        """Return tokens, positions, batch and the indices of the scored tokens in a buffer of int32 on the device."""
        split = 2 * self._sizes[0]
        wide, narrow = buffer[:split].view(torch.int64), buffer[split:]
        ids, positions, slots = wide[: 3 * self.tokens].view(3, self.tokens)
        starts, lengths, table = self._narrow(narrow)
        batch = PagedBatch(None if self.single else starts, table, lengths, slots, invariant)
        return ids, positions, batch, wide[3 * self.tokens :]

    def _narrow(self, numbers: Any) -> tuple[Any, Any, Any]:
        """Return starts, lengths and block table as views of an array or tensor."""
        n = self.rows
        return numbers[: n + 1], numbers[n + 1 : 2 * n + 1], numbers[2 * n + 1 :].reshape(n, self.columns)
