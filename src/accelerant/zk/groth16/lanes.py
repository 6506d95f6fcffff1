"""Queues of one device: CUDA's streams, so that sums which leave the device half idle overlap; elsewhere there is one.

Work in `with lanes.lane(i)` is ordered within the lane; lanes wait for each other where they are told to, and the host
for what it fetches alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import MemorySpace

if TYPE_CHECKING:
    from accelerant.runtime.streams.stream import Event, Stream  # which import torch

__all__ = ["Lanes", "Mark"]

Words = Any
Array = npt.NDArray[Any]
Mark = Any
"""A point in a lane's work; None where there is one queue."""

_AHEAD = 2
"""Pieces that are copied before the device has used them, at most."""


class Lanes:
    """Some lanes of a place, numbered from 0, which goes before the others where the device can choose.

    Attributes:
        place: whose.
    """

    def __init__(self, place: MemorySpace, count: int) -> None:
        self.place = place
        self._streams: Sequence[Stream] = ()
        if place.backend == "cuda":
            from accelerant.runtime.streams.stream import Stream

            # One more than asked for: for copies, which are not to wait for what a lane does
            self._streams = [Stream(place.label, priority=-1 if number == 0 else 0) for number in range(count + 1)]
        self._copied: deque[Event] = deque()

    @contextmanager
    def lane(self, number: int) -> Iterator[None]:
        """What the block launches, loads and fetches goes to that lane."""
        if not self._streams:
            yield
            return
        with self._streams[number]:
            yield

    def mark(self, number: int) -> Mark:
        """Mark the end of what a lane was given so far."""
        return self._streams[number].record() if self._streams else None

    def wait(self, number: int, mark: Mark) -> None:
        """Let what comes later in a lane wait for a mark of another; the host does not."""
        if self._streams:
            self._streams[number].wait(mark)

    def load(self, number: int, words: Array) -> Words:
        """The host's words at the place; they may be changed once this returns.

        On CUDA through pinned memory, and beside what the lane does: it waits before what comes later in it. The host
        stays few pieces ahead of the lane, so that many of them need no more memory than these.
        """
        if not self._streams or not words.size:
            return self.place.load(np.ascontiguousarray(words))
        from accelerant.runtime.streams.transfer import copy_async

        if len(self._copied) >= _AHEAD:
            self._copied.popleft().synchronize()
        self._copied.append(self._streams[number].record())
        raw = words.view(np.uint8)  # what lies in a file need not be aligned, as torch wants it
        copied = copy_async(raw, stream=self._streams[-1]).value_on(self._streams[number])
        return copied.view(_torch_type(words.itemsize))

    def fetch(self, number: int, words: Words) -> Callable[[], Array]:
        """Words of the place on the host, as unsigned numbers: what is returned waits for them, and for no more."""
        if not self._streams:
            return lambda: self.place.store(words)
        import torch

        target = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
        with self.lane(number):
            target.copy_(words, non_blocking=True)
        done = self._streams[number].record()

        def fetched() -> Array:
            done.synchronize()
            found: Array = target.numpy()
            return found.view(f"u{found.itemsize}")

        return fetched

    def span_s(self, first: Mark, last: Mark) -> float | None:
        """Seconds between two marks, once the device has passed them; None where there are none."""
        if last is None:
            return None
        last.synchronize()
        return float(first.elapsed_ms(last)) / 1e3


def _torch_type(size_bytes: int) -> Any:
    import torch

    return {8: torch.int64, 4: torch.int32}[size_bytes]
