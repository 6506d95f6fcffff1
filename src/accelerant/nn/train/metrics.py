"""What each step measured: a line of JSON a step, and the device times that belong to it.

A loss on a GPU is read back some steps later, many at once: reading it at each step would make the host wait
for the device.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import FormatError
from accelerant.nn.train.checkpoint import write_atomic

__all__ = ["MetricsFile", "StepRecord", "StepTimer", "peak_memory_bytes", "read_metrics"]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One line of metrics.jsonl.

    Attributes:
        step: 1 for the first.
        loss: training loss of the step's batch before its update, nats a token.
        tokens_per_s: tokens of the step over its time.
        ms: device time of the step (on the CPU: wall time).
        peak_memory_bytes: the most held so far: allocated on a GPU, resident on the CPU.
        learning_rate: of the step.
        grad_norm: before clipping.
        validation_loss: after the step, where it was taken, nats a token.
    """

    step: int
    loss: float
    tokens_per_s: float
    ms: float
    peak_memory_bytes: int
    learning_rate: float
    grad_norm: float
    validation_loss: float | None = None

    def to_json(self) -> str:
        """One line; validation_loss only where there is one."""
        values = {name: getattr(self, name) for name in self.__slots__}
        if self.validation_loss is None:
            del values["validation_loss"]
        return json.dumps(values)


class MetricsFile:
    """Appends records to metrics.jsonl; a resumed run first drops the lines past its checkpoint."""

    def __init__(self, path: Path, *, keep_steps: int = 0) -> None:
        self._path = path
        self.records = [record for record in read_metrics(path) if record.step <= keep_steps] if keep_steps else []
        write_atomic(path, "".join(record.to_json() + "\n" for record in self.records).encode())

    def append(self, records: Sequence[StepRecord]) -> None:
        """Write some lines and hand them to the operating system."""
        self.records += records
        with self._path.open("a", encoding="utf-8") as file:
            file.write("".join(record.to_json() + "\n" for record in records))


def read_metrics(path: Path) -> list[StepRecord]:
    """The records of a metrics.jsonl; a last line cut off by a crash is left out.

    Raises:
        FormatError: the file is not there, or a line before the last is no record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"cannot read {path}: {error}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            values: dict[str, Any] = json.loads(line)
            records.append(StepRecord(**values))
        except (ValueError, TypeError):
            if number == len(lines):
                break
            raise FormatError(f"{path}, line {number}: not a step's record") from None
    return records


class StepTimer:
    """Times between marks: events on a GPU, which cost the host nothing; the clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._last: float | torch.cuda.Event = 0.0
        self.mark()

    def mark(self) -> None:
        """Start anew, leaving out what came before."""
        self._last = self._now()

    def lap(self) -> Lap:
        """End a span and start the next."""
        start, self._last = self._last, self._now()
        return Lap(start, self._last)

    def _now(self) -> float | torch.cuda.Event:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


@dataclass(frozen=True, slots=True)
class Lap:
    """A span of time that may still be running on the device."""

    start: float | torch.cuda.Event
    end: float | torch.cuda.Event

    def ms(self) -> float:
        """Its length in milliseconds; waits for the device."""
        if isinstance(self.start, float):
            assert isinstance(self.end, float)  # for the type checker: both ends are of one kind
            return (self.end - self.start) * 1e3
        assert not isinstance(self.end, float)  # as above
        self.end.synchronize()
        return float(self.start.elapsed_time(self.end))


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step whose numbers are still on the device."""

    step: int
    loss: Tensor
    grad_norm: Tensor
    learning_rate: float
    lap: Lap


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: torch's allocations on a GPU, the process's resident set on the CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):  # of this program; what getrusage says begins with the parent's
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass  # not Linux, or a file of another form: the next best
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)
