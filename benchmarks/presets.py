"""Training steps of the presets of `accelerant train` on the device, and the same steps on this machine's CPU.

python -m benchmarks.presets --preset tiny --against cpu
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch

from accelerant.bench.record import OURS, Row
from accelerant.bench.suite import CpuColumn, Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import threads_text
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.nn import GPTConfig
from accelerant.nn.train.config import PRESETS, preset
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice
from benchmarks.model import Steps, step_flops

__all__ = ["PresetsSuite"]

_NEAR = 0.05
"""Allowed distance of the first losses of two devices, whose precisions may differ."""


@dataclass(frozen=True)
class PresetsSuite(Suite):
    """Measure training steps of a preset on the device, and the same steps on this machine's CPU."""

    name = "presets"
    examples: ClassVar[tuple[str, ...]] = ("--preset tiny --against cpu", "--preset small --against none --json")

    preset: str = option("tiny", f"Of {', '.join(PRESETS)}.", same=True)
    against: tuple[str, ...] = option(("cpu",), "cpu, or none.", same=True)
    budget_s: float = option(2.0, "Seconds of steps behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite; ConfigError for an unknown preset or opponent."""
        check_names("--preset", "preset", (self.preset,), tuple(PRESETS))
        check_names("--against", "opponent", self.against, ("cpu",))
        return self

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the one case."""
        return [SuiteCase(f"train {self.preset}", self._measure, on_cpu=self._on_cpu)]

    def _on_cpu(self, run: SuiteRun) -> CpuColumn:
        row, _ = self._row(run)
        return {(row.op, row.case): (row.p50 or 0.0, threads_text())}

    def _row(self, run: SuiteRun) -> tuple[Row, list[float]]:
        """Return the row of the preset's steps on a device, and the first losses."""
        known = preset(self.preset)
        config = GPTConfig(known.vocab_size, known.training.context, known.layers, known.heads, known.width)
        batch = known.training.batch_size
        tokens = batch * config.context
        shape = f"{batch}x{config.context} {config.layers} layers of {config.width} step"
        before = torch.get_num_threads()
        torch.set_num_threads((not run.gpu and known.cpu_threads) or before)
        try:
            threads = "" if run.gpu else f", {threads_text()}"
            timing, losses = Steps(config, batch, run.torch_device).whole(self.budget_s)
        finally:
            torch.set_num_threads(before)
        name = f"{'bf16 autocast' if run.gpu else 'float32'} on {run.device.name}{threads}"
        row = Row("presets", f"train {self.preset}", shape, OURS, name, flops=step_flops(config, tokens))
        note = f"{1e3 * tokens / timing.p50_ms:,.0f} tokens/s, losses {losses[0]:.4f} to {losses[-1]:.4f}"
        return replace(row.timed(timing), note=note), losses

    def _measure(self, run: SuiteRun) -> None:
        run.progress(f"train {self.preset}: {run.device.name}")
        row, losses = self._row(run)
        run.add(row)
        if "cpu" not in self.against:
            return
        if not run.gpu:
            run.record.notes.append("this run has no GPU that torch sees: the CPU alone was measured")
            return
        run.progress(f"train {self.preset}: the CPU")
        there, other = self._row(replace(run, device=registry.find_device("cpu")))
        if abs(losses[0] - other[0]) > _NEAR:
            raise AccelerantError(f"train {self.preset}: losses {losses}, on the CPU {other}")
        run.add(replace(there, runner="cpu"))


if __name__ == "__main__":
    run_command(PresetsSuite)
