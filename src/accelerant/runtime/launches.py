"""Count the kernels of ours that a block of code launches: after a launch, the arguments of an op may have changed.

Launchers call `noted` after each launch that the device accepted, while there are watchers; otherwise a launch costs a
look at an empty dict.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Launches", "launches", "noted", "watched"]


class Launches:
    """The launches of a thread inside a block.

    Attributes:
        count: launches that the device accepted.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0


watched: dict[int, list[Launches]] = {}
"""Watchers by thread. Launchers call `noted` after a launch while there are any."""


def noted() -> None:
    """Count a launch of this thread."""
    for counter in watched.get(threading.get_ident(), ()):
        counter.count += 1


@contextmanager
def launches() -> Iterator[Launches]:
    """Count this thread's launches in a block of code."""
    counter, thread = Launches(), threading.get_ident()
    mine = watched.setdefault(thread, [])
    mine.append(counter)
    try:
        yield counter
    finally:
        mine.remove(counter)
        if not mine:
            watched.pop(thread, None)
