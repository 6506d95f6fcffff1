"""Whether a block of code has launched a kernel of ours: after that, what it was to change may have changed.

The launchers say so of each launch that the device took; while nobody asks, that costs them a look at an empty dict.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Launches", "launches", "noted", "watched"]


class Launches:
    """What a thread has launched inside the block.

    Attributes:
        count: launches that the device took.
    """

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __bool__(self) -> bool:
        return self.count > 0


watched: dict[int, list[Launches]] = {}
"""By thread. Launchers call `noted` after a launch while there are any."""


def noted() -> None:
    """Count a launch of this thread."""
    for each in watched.get(threading.get_ident(), ()):
        each.count += 1


@contextmanager
def launches() -> Iterator[Launches]:
    """Count this thread's launches in a block of code."""
    found, thread = Launches(), threading.get_ident()
    mine = watched.setdefault(thread, [])
    mine.append(found)
    try:
        yield found
    finally:
        mine.remove(found)
        if not mine:
            watched.pop(thread, None)
