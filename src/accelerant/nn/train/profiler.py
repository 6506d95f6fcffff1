"""Profiling of some steps of a training: a Chrome trace, and a table of the time by kernel.

On a GPU the times are those of kernels on the device (CUPTI), on the CPU those of torch's operators.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from accelerant.runtime.files import write_atomic

__all__ = ["KernelTime", "StepProfiler", "kernel_table"]

_WARM_UP = 6
"""Unprofiled steps at the start: kernels compile in the first, and a CUDA graph is captured in the fourth."""

_NAME_WIDTH = 90


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, or operator on the CPU: its mean calls and time per step, and its share of the total time."""

    name: str
    calls: float
    ms: float
    share: float


class StepProfiler:
    """Profiles some steps of a run and writes trace.json, kernels.txt and kernels.json.

    Args:
        folder: for the files.
        steps: number of steps to profile.
        run: the steps of the run; a short run is profiled at its end.
    """

    def __init__(self, folder: Path, steps: int, run: range, device: torch.device) -> None:
        self._folder = folder
        self._steps = steps
        self._begin = max(run.start, min(run.start + _WARM_UP, run.stop - steps))
        self._device = device
        self._last = run.start
        self._profile: Any = None
        self.table: list[KernelTime] = []

    def before(self, step: int) -> None:
        """Start or stop the profile at the beginning of a step."""
        if step == self._begin + self._steps:
            self.finish()
        self._last = step
        if step == self._begin:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(torch.profiler.ProfilerActivity.CUDA)
                torch.cuda.synchronize(self._device)
            self._profile = torch.profiler.profile(activities=activities)
            self._profile.start()

    def finish(self) -> None:
        """Stop the profile, if it is running, and write the files."""
        if self._profile is None:
            return
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        profile, self._profile = self._profile, None
        profile.stop()
        write_atomic(self._folder / "trace.json", lambda path: profile.export_chrome_trace(str(path)))
        self.table = _by_kernel(profile, self._device.type == "cuda", self._last + 1 - self._begin)
        write_atomic(self._folder / "kernels.txt", kernel_table(self.table).encode())
        rows = [asdict(row) for row in self.table]
        write_atomic(self._folder / "kernels.json", (json.dumps(rows, indent=1) + "\n").encode())


def _by_kernel(profile: Any, cuda: bool, steps: int) -> list[KernelTime]:
    times: dict[str, list[float]] = {}
    for event in profile.events():
        on_device = event.device_type.name == "CUDA"
        if cuda != on_device or getattr(event, "is_user_annotation", False):
            continue
        us = event.time_range.elapsed_us() if cuda else event.self_cpu_time_total
        times.setdefault(event.name, []).append(us)
    total = sum(map(sum, times.values())) or 1.0
    rows = [KernelTime(name, len(us) / steps, sum(us) / steps / 1e3, sum(us) / total) for name, us in times.items()]
    return sorted(rows, key=lambda row: -row.ms)


def kernel_table(rows: list[KernelTime], limit: int = 40) -> str:
    """Return the rows as text, in their order; those after the limit as one."""
    lines = [f"{'ms a step':>10} {'share':>7} {'calls':>8}  kernel"]
    shown, rest = rows[:limit], rows[limit:]
    lines += [f"{row.ms:10.3f} {row.share:7.1%} {row.calls:8.1f}  {row.name[:_NAME_WIDTH]}" for row in shown]
    if rest:
        ms, share, calls = (sum(getattr(row, name) for row in rest) for name in ("ms", "share", "calls"))
        lines.append(f"{ms:10.3f} {share:7.1%} {calls:8.1f}  {len(rest)} others")
    total = sum(row.ms for row in rows)
    return "\n".join([*lines, f"{total:10.3f} {1:7.0%} {'':8}  in all"]) + "\n"
