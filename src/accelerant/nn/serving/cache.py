"""Keys and values in blocks: the device's arrays, what a step needs of them, and the pool that owns the blocks.

A sequence's keys and values lie in blocks of `block_size` tokens, listed in its row of a block table. A full block is
named by a hash of its tokens and of the blocks before it, so that sequences with the same beginning share blocks.
Block 0 belongs to nobody: padding is written there.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerant.nn.models.language_model import LanguageModel


@dataclass(frozen=True, slots=True)
class PagedCache:
    """The keys and values of all sequences.

    Attributes:
        k, v: for each layer (blocks, block_size, kv_heads, width), contiguous.
    """

    k: list[Tensor]
    v: list[Tensor]

    @classmethod
    def empty(cls, model: LanguageModel, blocks: int, block_size: int) -> PagedCache:
        """Allocate blocks of zeros for a model, on its device and in the dtype of its activations."""
        layers, kv_heads, width = model.cache_shape()
        size, device = (layers, blocks, block_size, kv_heads, width), next(model.parameters()).device
        k, v = (torch.zeros(size, dtype=model.activation_dtype(), device=device).unbind(0) for _ in range(2))
        return cls(list(k), list(v))


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The rows of one step, each some new tokens of a sequence, packed one after another; on the device.

    Attributes:
        starts: (R + 1,) int32, where each row's new tokens begin; None if each row has one.
        block_table: (R, M) int32, the blocks of each row's keys.
        lengths: (R,) int32, each row's keys, those of its new tokens included.
        slots: (T,) int64, where the keys and values of the new tokens go: block * block_size + offset; -1: nowhere.
        invariant: whether a row's results must have the same bits in any batch.
    """

    starts: Tensor | None
    block_table: Tensor
    lengths: Tensor
    slots: Tensor
    invariant: bool


def chain(before: bytes, tokens: np.ndarray) -> bytes:
    """Return the name of a full block: a hash of its tokens and of the name of the block before it."""
    return blake2b(tokens.tobytes(), key=before, digest_size=16).digest()


class BlockPool:
    """The blocks of a cache: who holds them, and which hold the beginning of a text that may come again.

    A block that nobody holds but that has a name keeps its content until it is the oldest one and another is needed.

    Attributes:
        total: blocks that sequences can hold.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._free = list(range(total, 0, -1))  # of which the last is taken; block 0 is for padding
        self._holders = [0] * (total + 1)
        self._names: dict[int, bytes] = {}
        self._named: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()  # named and held by nobody, the oldest first

    @property
    def available(self) -> int:
        """The number of blocks that `take` can give."""
        return len(self._free) + len(self._kept)

    def take(self, count: int) -> list[int] | None:
        """Return so many blocks, held once; None, and nothing is taken, if there are too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._kept.popitem(last=False)
                self._forget(block)
            self._holders[block] = 1
            blocks.append(block)
        return blocks

    def find(self, names: list[bytes]) -> list[int]:
        """Return the blocks with the longest run of these names from the first on, held once more each."""
        found = []
        for name in names:
            block = self._named.get(name)
            if block is None:
                break
            self._kept.pop(block, None)
            self._holders[block] += 1
            found.append(block)
        return found

    def name(self, block: int, name: bytes) -> None:
        """Let others find a full block by its name, unless another has it already."""
        if name not in self._named and block not in self._names:
            self._names[block], self._named[name] = name, block

    def release(self, blocks: list[int], *, forget: bool = False) -> None:
        """Give blocks back, the last ones to be replaced first. forget: nobody is to find them any more."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if forget:
                self._forget(block)
            if self._holders[block]:
                continue
            if block in self._names:
                self._kept[block] = None
            else:
                self._free.append(block)

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self._named[name]
