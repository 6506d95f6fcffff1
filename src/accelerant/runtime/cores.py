"""How many cores this process may keep busy."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["usable_cores"]

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores this process may keep busy: its affinity, and the quota of its control group where there is one.

    Python and torch see the machine's cores; in a container with a quota, a thread for each would only wait.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no quota ("max"), or not Linux
    return cores
