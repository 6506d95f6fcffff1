"""Where a run's time goes: seconds by what they were spent on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping

__all__ = ["Clock", "described"]


class Clock:
    """Seconds by part; a part within another counts as itself only."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._within: list[float] = []

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Whatever the block takes, but for the parts in it."""
        began = time.perf_counter()
        self._within.append(0.0)
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self.seconds[part] = self.seconds.get(part, 0.0) + took - self._within.pop()
            if self._within:
                self._within[-1] += took


def described(all_of_them: Iterable[Mapping[str, float]]) -> str:
    """The sums in words, the longest first: "12.3 s: 7.1 s timed calls, 5.2 s checks"; "" for none."""
    total: dict[str, float] = {}
    for seconds in all_of_them:
        for part, s in seconds.items():
            total[part] = total.get(part, 0.0) + s
    parts = [f"{s:.1f} s {part}" for part, s in sorted(total.items(), key=lambda pair: -pair[1])]
    return f"{sum(total.values()):.1f} s: {', '.join(parts)}" if parts else ""
