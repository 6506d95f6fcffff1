"""Calls, times and bytes of an Accelerator's operations."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from accelerant.runtime.provider import Event

__all__ = ["Figures", "quantile"]

_SAMPLES_KEPT = 4096
_PENDING_LIMIT = 64


@dataclass(slots=True)
class _Row:
    calls: int = 0
    errors: int = 0
    fallbacks: int = 0
    bytes: int = 0
    flops: int = 0
    samples_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))
    pending: deque[tuple[Event, Event]] = field(default_factory=deque)

    def collect(self) -> None:
        """Read the events that the device has passed."""
        for _ in range(len(self.pending)):
            start, stop = self.pending.popleft()
            if stop.done():
                self.samples_ms.append(start.elapsed_ms(stop))
            else:
                self.pending.append((start, stop))


class Figures:
    """A row for each operation; may be used from several threads.

    Args:
        names: the operations.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._rows = {name: _Row() for name in names}

    def called(self, name: str, calls: int = 1) -> None:
        """Count calls that begin."""
        with self._lock:
            self._rows[name].calls += calls

    def failed(self, name: str, calls: int = 1) -> None:
        """Count calls that raised."""
        with self._lock:
            self._rows[name].errors += calls

    def fell_back(self, name: str) -> None:
        """Count a call that another device did."""
        with self._lock:
            self._rows[name].fallbacks += 1

    def done(self, name: str, moved_bytes: int, flops: int, start: Event | None, stop: Event | None) -> None:
        """Add what a call moved and did, and the events around it."""
        with self._lock:
            row = self._rows[name]
            row.bytes += moved_bytes
            row.flops += flops
            if start is not None and stop is not None:
                row.pending.append((start, stop))
                if len(row.pending) >= _PENDING_LIMIT:
                    row.collect()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """The rows of the operations that were called."""
        with self._lock:
            return {name: _shown(row) for name, row in self._rows.items() if row.calls}


def _shown(row: _Row) -> dict[str, Any]:
    row.collect()
    ordered = sorted(row.samples_ms)
    return {
        "calls": row.calls,
        "errors": row.errors,
        "fallbacks": row.fallbacks,
        "bytes": row.bytes,
        "flops": row.flops,
        **{f"p{q}_ms": quantile(ordered, q / 100) for q in (50, 95, 99)},
    }


def quantile(samples: list[float], q: float) -> float | None:
    """With linear interpolation; None of nothing."""
    return float(np.quantile(samples, q)) if samples else None
