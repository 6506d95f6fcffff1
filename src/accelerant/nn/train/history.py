"""What a training did: a record a step, the evaluations, and how it ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from accelerant.nn.train.metrics import StepRecord
from accelerant.nn.train.objective import Evaluation
from accelerant.runtime.memory.limits import size_text

__all__ = ["History", "Status"]

Status = Literal["done", "stopped", "interrupted"]


@dataclass(slots=True)
class History:
    """How a training went.

    Attributes:
        records: one a step, those before a resumption too where they were kept in a folder.
        evaluations: on held-out data, in order.
        steps: steps done, and `total_steps` wanted.
        status: "done"; "stopped", early; "interrupted", by a signal.
        reason: why it was stopped.
        signal: what interrupted it, or None.
        best: the evaluation of the lowest loss, or None.
        seconds: of this process's part.
        predicted_peak_bytes: the peak of memory as it was predicted; None where it was not.
        peak_memory_bytes: the peak as it was: allocated on a GPU; resident, the whole process, on the CPU.
        reserved_memory_bytes: held by torch's pool at most; 0 on the CPU.
        resumed_from: the step of the checkpoint that this process began with; 0 at the beginning.
        notes: what the user should know.
    """

    total_steps: int = 0
    records: list[StepRecord] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    steps: int = 0
    status: Status = "done"
    reason: str = ""
    signal: int | None = None
    seconds: float = 0.0
    predicted_peak_bytes: int | None = None
    peak_memory_bytes: int = 0
    reserved_memory_bytes: int = 0
    resumed_from: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        """The training loss of each step."""
        return [record.loss for record in self.records]

    @property
    def best(self) -> Evaluation | None:
        """The evaluation of the lowest loss, the earliest of several; None where each is NaN."""
        finite = [each for each in self.evaluations if not math.isnan(each.loss)]  # NaN is below and above nothing
        return min(finite, key=lambda each: each.loss, default=None)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The loss and the metrics of the last evaluation; empty where there was none."""
        if not self.evaluations:
            return {}
        last = self.evaluations[-1]
        return {"loss": last.loss, **last.metrics}

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, without the records."""
        values = asdict(self)
        del values["records"]
        return {**values, "best": None if self.best is None else asdict(self.best)}

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        lines = [f"{self.status}{why}: {self.steps:,} of {self.total_steps:,} steps in {self.seconds:.1f} s"]
        if self.records:
            lines.append(f"training loss  {self.records[0].loss:.4f} -> {self.records[-1].loss:.4f}")
        if self.best is not None:
            parts = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
            lines.append(f"held out       {parts}; best loss {self.best.loss:.4f} at step {self.best.step:,}")
        predicted = "not predicted" if self.predicted_peak_bytes is None else size_text(self.predicted_peak_bytes)
        lines.append(f"peak memory    {size_text(self.peak_memory_bytes)} (predicted for the step: {predicted})")
        return "\n".join(lines)
