"""Windows of tokens for each step, drawn anew from (seed, step): resuming needs no position but the step.

Batches are gathered by a thread some steps ahead. Where the device is a GPU the reader pins them, so that the copy to
the device overlaps with the computation. The thread itself never calls CUDA: a call from another thread would break the
capture of a graph.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import ConfigError

__all__ = [
    "Batch",
    "Prefetcher",
    "Tokens",
    "epoch_seed",
    "even_starts",
    "gather",
    "halves",
    "permutation",
    "random_windows",
    "require_windows",
]

Tokens = NDArray[np.uint16 | np.uint32]
Batch = tuple[Tensor, ...]
"""Tensors whose first dimension is the rows of a batch."""


def require_windows(tokens: Tokens, context: int, part: str) -> None:
    """Check that tokens hold at least one window of context tokens and the token after it.

    Raises:
        ConfigError: they do not.
    """
    if len(tokens) < context + 1:
        raise ConfigError(
            f"not enough data: the {part} part has {len(tokens)} tokens, one window needs {context + 1}; "
            f"give --data more text"
        )


def _philox(seed: int, number: int) -> np.random.Philox:
    # The high word: the low one counts draws, and neighbouring numbers would share them.
    return np.random.Philox(key=seed, counter=np.array([0, 0, 0, number], np.uint64))


def random_windows(tokens: Tokens, *, seed: int, step: int, count: int, context: int) -> NDArray[np.int64]:
    """The windows of one step, each from a position drawn by the counter-based generator Philox.

    Args:
        tokens: at least context + 1.
        seed, step: the generator's key and the high word of its counter.
        count: number of windows.

    Returns:
        (count, context + 1): inputs are all columns but the last, targets all but the first.
    """
    starts = _philox(seed, step).random_raw(count) % np.uint64(len(tokens) - context)
    return gather(tokens, starts.astype(np.int64), context)


def even_starts(tokens: Tokens, *, count: int, context: int) -> NDArray[np.int64]:
    """Where up to count windows without overlap begin, spread evenly over the tokens."""
    fitting = (len(tokens) - 1) // context
    starts: NDArray[np.int64] = np.linspace(0, fitting - 1, min(count, fitting)).round().astype(np.int64)
    return np.unique(starts) * context


def permutation(seed: int, epoch: int, count: int) -> NDArray[np.int64]:
    """The order of an epoch: the numbers below count, by the rank of raw draws of Philox, the same in each NumPy."""
    return np.argsort(_philox(seed, epoch).random_raw(count), kind="stable").astype(np.int64, copy=False)


def epoch_seed(seed: int, epoch: int) -> int:
    """A seed for what draws by itself in an epoch; below 2**63."""
    return int(_philox(seed, epoch).random_raw()) >> 1


def gather(tokens: Tokens, starts: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    """The windows that begin at starts; (n, context + 1)."""
    windows: NDArray[np.int64] = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows


class Prefetcher:
    """Steps' batches, made ahead by a thread; a context manager that ends the thread.

    Args:
        make: the batch of a step, on the CPU.
        steps: which.
        pin: whether the reader gets them in pinned memory.
    """

    def __init__(self, make: Callable[[int], Batch], steps: range, *, pin: bool) -> None:
        self._make = make
        self._steps = steps
        self._pin = pin
        self._ready: queue.Queue[Batch | BaseException] = queue.Queue(maxsize=4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="accelerant-batches", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Batch]:
        """The batch of each step in turn."""
        for _ in self._steps:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            yield tuple(tensor.pin_memory() for tensor in item) if self._pin else item

    def _fill(self) -> None:
        try:
            for step in self._steps:
                if not self._put(self._make(step)):
                    return
        except BaseException as error:  # noqa: BLE001  handed to the reader, who raises it
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False


def halves(windows: NDArray[np.int64]) -> Batch:
    """Inputs and targets of windows: (count, context) each, contiguous."""
    rows = torch.from_numpy(windows)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
