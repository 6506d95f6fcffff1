"""The same case on this machine's CPU, with fewer rows where all of them would take too long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from accelerant.bench.timer import time_ms

__all__ = ["cpu_column"]

_ENOUGH_S = 0.2
_TOO_LONG_S = 2.0
_SHARES = (1, 32, 256, 1024)
_CALLS = 12
"""What a figure takes at least: warm-up and ten timed calls."""


def cpu_column(
    make: Callable[[int], Callable[[], object]], rows: int, *, budget_s: float = 0.3
) -> tuple[float | None, str]:
    """Time a case whose work grows with its rows.

    The smallest share of the rows is tried first; the largest of which a call should stay below 0.2 s is measured.

    Args:
        make: the call on that many rows.
        rows: of the whole case.
        budget_s: seconds to spend on it.

    Returns:
        milliseconds for all rows, scaled from those measured, with the note that says so; None with the reason where
        even the smallest share would take more than 2 s.
    """
    least = math.ceil(rows / _SHARES[-1])
    call = make(least)
    call()
    began = time.perf_counter()
    call()
    once_s = time.perf_counter() - began
    if once_s * _CALLS > _TOO_LONG_S:
        return None, f"skipped: {once_s * _CALLS:.1f} s for 1/{_SHARES[-1]} of the rows"
    for share in _SHARES:
        some = math.ceil(rows / share)
        if some == least or once_s * some / least < _ENOUGH_S:
            break
    timing = time_ms(make(some), torch.device("cpu"), budget_s=budget_s)
    threads = torch.get_num_threads()
    used = f"{threads} thread{'s' * (threads != 1)}"
    if some == rows:
        return timing.p50_ms, used
    return timing.p50_ms * rows / some, f"scaled from 1/{rows / some:.0f} of the rows, {used}"
