"""Some steps of a training under torch's profiler: a Chrome trace, and a table of the time by kernel.

On a GPU the times are the device's, by kernel (CUPTI); on the CPU they are those of torch's operators.
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
"""Steps before: kernels compile in the first, and a CUDA graph is captured in the fourth."""

_NAME_WIDTH = 90


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One row of the table.

    Attributes:
        name: of the kernel; on the CPU of the operator.
        calls: in a step, mean.
        ms: in a step, mean.
        share: of the time of all.
    """

    name: str
    calls: float
    ms: float
    share: float


class StepProfiler:
    """Profiles some steps of a run and writes trace.json, kernels.txt and kernels.json.

    Args:
        folder: where to.
        steps: how many to profile.
        run: the steps of the run, 0 the first; a short one is profiled at its end.
        device: what to look at.
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
        """A step comes: begin or end the profile here, if it is the one."""
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
        """End the profile, if it is on, and write what it found."""
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
    rows = [
        KernelTime(name, len(each) / steps, sum(each) / steps / 1e3, sum(each) / total) for name, each in times.items()
    ]
    return sorted(rows, key=lambda row: -row.ms)


def kernel_table(rows: list[KernelTime], limit: int = 40) -> str:
    """The rows as text, the longest first; those past the limit together."""
    lines = [f"{'ms a step':>10} {'share':>7} {'calls':>8}  kernel"]
    shown, rest = rows[:limit], rows[limit:]
    lines += [f"{row.ms:10.3f} {row.share:7.1%} {row.calls:8.1f}  {row.name[:_NAME_WIDTH]}" for row in shown]
    if rest:
        ms, share, calls = (sum(getattr(row, name) for row in rest) for name in ("ms", "share", "calls"))
        lines.append(f"{ms:10.3f} {share:7.1%} {calls:8.1f}  {len(rest)} others")
    total = sum(row.ms for row in rows)
    return "\n".join([*lines, f"{total:10.3f} {1:7.0%} {'':8}  in all"]) + "\n"
