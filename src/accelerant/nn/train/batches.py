"""Windows of tokens for each step, drawn anew from (seed, step): resuming needs no position but the step.

Batches are gathered by a thread some steps ahead, in pinned memory where the device is a GPU, so that the
copy to the device overlaps with the computation.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import ConfigError

__all__ = ["Prefetcher", "even_windows", "random_windows", "require_windows"]

Tokens = NDArray[np.uint16 | np.uint32]


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


def random_windows(tokens: Tokens, *, seed: int, step: int, count: int, context: int) -> NDArray[np.int64]:
    """The windows of one step, each from a position drawn by the counter-based generator Philox.

    Args:
        tokens: at least context + 1.
        seed, step: the generator's key and the high word of its counter.
        count: number of windows.

    Returns:
        (count, context + 1): inputs are all columns but the last, targets all but the first.
    """
    # The high word: the low one counts draws, and neighbouring steps would share them.
    generator = np.random.Philox(key=seed, counter=np.array([0, 0, 0, step], np.uint64))
    starts = generator.random_raw(count) % np.uint64(len(tokens) - context)
    return _gather(tokens, starts.astype(np.int64), context)


def even_windows(tokens: Tokens, *, count: int, context: int) -> NDArray[np.int64]:
    """Up to count windows without overlap, spread evenly over the tokens; (n, context + 1)."""
    fitting = (len(tokens) - 1) // context
    chosen = np.unique(np.linspace(0, fitting - 1, min(count, fitting)).round().astype(np.int64))
    return _gather(tokens, chosen * context, context)


def _gather(tokens: Tokens, starts: NDArray[np.int64], context: int) -> NDArray[np.int64]:
    windows: NDArray[np.int64] = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int64)
    return windows


class Prefetcher:
    """Steps' windows as pinned tensors, gathered ahead by a thread; a context manager that ends the thread."""

    def __init__(self, tokens: Tokens, *, seed: int, steps: range, count: int, context: int, pin: bool) -> None:
        self._tokens = tokens
        self._seed = seed
        self._steps = steps
        self._count = count
        self._context = context
        self._pin = pin
        self._ready: queue.Queue[Tensor | BaseException] = queue.Queue(maxsize=4)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="accelerant-batches", daemon=True)

    def __enter__(self) -> Prefetcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[Tensor]:
        """(count, context + 1) int64 for each step in turn."""
        for _ in self._steps:
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def _fill(self) -> None:
        try:
            for step in self._steps:
                rows = random_windows(
                    self._tokens, seed=self._seed, step=step, count=self._count, context=self._context
                )
                tensor = torch.from_numpy(rows)
                if not self._put(tensor.pin_memory() if self._pin else tensor):
                    return
        except BaseException as error:  # noqa: BLE001  handed to the reader, who raises it
            self._put(error)

    def _put(self, item: Tensor | BaseException) -> bool:
        while not self._stop.is_set():
            try:
                self._ready.put(item, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
