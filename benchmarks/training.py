"""A training step of GPT-2 124M: ours, plain PyTorch eagerly, and plain PyTorch under torch.compile, in one run.

    python -m benchmarks.training --batch 32

All three take the same tokens, start from the same weights, compute under bfloat16 autocast with float32 parameters,
clip the gradient and update with AdamW. A row has the time of a step, the most memory that was allocated and, in its
note, tokens a second, the memory reserved, and the losses of the first steps. Where the device has fp8, ours is
measured in it too, as a case without peers. On a CPU the model is small.
"""

from __future__ import annotations

import functools
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from accelerant.bench.record import Row, failure_note
from accelerant.bench.suite import CpuColumn, Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.nn import GPT, GPTConfig
from accelerant.ops.linear_fp8 import refuses_device
from accelerant.runtime.provider import ComputeDevice
from benchmarks.gpt_steps import (
    WARM_UP,
    PlainGPT,
    TokenBatches,
    cpu_step_ms,
    own_step,
    plain_step,
    step_flops,
    step_times,
)

__all__ = ["GPT2", "PEERS", "TrainingSuite"]

PEERS = ("torch", "compile")
"""Plain PyTorch, eagerly and under torch.compile."""

GPT2 = GPTConfig(vocab_size=50304)
"""GPT-2 124M with its vocabulary rounded up: ours pads it inside, plain PyTorch is fastest with it."""

_SMALL = GPTConfig(512, 64, 2, 4, 128)
_OURS = "accelerant"
_TOKENS_PER_S, _PEAK_BYTES = 640_000, {32: 10 << 30}
"""Targets on an H200: the speed, and by batch size the memory."""


@dataclass(frozen=True)
class TrainingSuite(Suite):
    """Measure a training step of GPT-2 124M: time, tokens a second, memory. On a CPU, of a small model."""

    name = "training"
    examples = ("", "--batch 32 --against none", "--out folder --max-seconds 120", "--out folder --resume")

    batch: tuple[int, ...] = option(
        (), "Sequences in a step; may be repeated. By default 32 and 64, 8 on a CPU.", min=1
    )
    against: tuple[str, ...] = option(PEERS, "Peers: torch (plain, eager), compile, or none.", same=True)
    budget_s: float = option(2.0, "Seconds of steps behind each figure.", min=0.0, same=True)
    config: GPTConfig | None = None

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's model and batch sizes; raises ConfigError for an unknown peer."""
        check_names("--against", "peer", self.against, PEERS)
        gpu = device.torch_device.startswith("cuda")
        batch = self.batch or ((32, 64) if gpu else (8,))
        return replace(self, batch=batch, config=self.config or (GPT2 if gpu else _SMALL))

    def prepare(self, run: SuiteRun) -> None:
        """Measure the ceilings."""
        run.require_ceiling("matmul")

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each batch size."""
        runners = ", ".join((_OURS, *self.against))
        cases = {n: functools.partial(self._measure, n) for n in self.batch}
        return [
            SuiteCase(f"batch of {n}, {runners}", measure, on_cpu=functools.partial(self._on_cpu, n))
            for n, measure in cases.items()
        ]

    def _on_cpu(self, batch: int, run: SuiteRun) -> CpuColumn:
        assert self.config is not None  # for the type checker: a resolved suite has one
        row = _row(_OURS, self.config, batch, run)
        return {(row.op, row.case): cpu_step_ms(lambda small: own_step(GPT(small), precision=None), self.config, batch)}

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the batch sizes."""
        return row.suite == self.name and row.case.split("x")[0] in map(str, self.batch)

    def _measure(self, batch: int, run: SuiteRun) -> None:
        assert self.config is not None  # for the type checker: a resolved suite has one
        config, text = self.config, f"training step, {batch} x {self.config.context}"
        losses: dict[str, list[float]] = {}
        for runner in (_OURS, *self.against):
            run.progress(f"{text}: {runner}")
            try:
                row, losses[runner] = _measure_step(runner, config, batch, run, self.budget_s)
            except Exception as error:  # whatever a peer raises, its row says so
                if runner == _OURS:
                    raise
                row = replace(_row(runner, config, batch, run), note=failure_note(error))
            run.add(row)
        if refuses_device(run.torch_device) is None:
            run.progress(f"{text}: {_OURS}, fp8")
            row, float8 = _measure_step(_OURS, config, batch, run, self.budget_s, float8=True)
            run.add(row)
            _check_losses(float8, {"bf16": losses[_OURS]}, first=0.03, last=0.3)
        _check_losses(losses.pop(_OURS), losses)


def _measure_step(
    runner: str, config: GPTConfig, batch: int, run: SuiteRun, budget_s: float, *, float8: bool = False
) -> tuple[Row, list[float]]:
    """Return a runner's row and the losses of its warm-up."""
    where = run.torch_device
    gc.collect()
    if run.gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(where)
    torch.manual_seed(0)
    model = GPT(config).to(where)
    if runner == _OURS:
        step = own_step(model, precision=torch.float8_e4m3fn if float8 else torch.bfloat16)
    else:
        step = plain_step(PlainGPT.like(model), compiled=runner == "compile")
    del model
    data = TokenBatches.drawn(config, batch, where)
    warm_up = [step(*data.batch(i)) for i in range(WARM_UP)]
    timing = step_times(step, data, where, budget_s)
    row = _row(runner, config, batch, run, float8=float8).timed(timing)
    note = f"{1e3 * batch * config.context / timing.p50_ms:,.0f} tokens/s"
    if run.gpu:
        note += f", {torch.cuda.max_memory_reserved(where) / 2**30:.2f} GiB reserved"
    losses = [float(loss) for loss in warm_up]
    note += f", first losses {' '.join(f'{loss:.4f}' for loss in losses)}"
    peak = torch.cuda.max_memory_allocated(where) if run.gpu else None
    return replace(row, peak_bytes=peak, note=note), losses


def _row(runner: str, config: GPTConfig, batch: int, run: SuiteRun, *, float8: bool = False) -> Row:
    """Return a runner's row without its figures."""
    tokens = batch * config.context
    aimed = run.is_model("H200") and config == GPT2 and runner == _OURS and not float8
    case = f"{batch}x{config.context} {config.layers} layers of {config.width} {'fp8' if float8 else 'bf16 autocast'}"
    return Row(
        "training", "gpt step", case, runner, "TrainStep" if runner == _OURS else runner,
        flops=step_flops(config, tokens), ceiling="" if float8 else "matmul",
        target=1e3 * tokens / _TOKENS_PER_S if aimed else None,
        target_bytes=_PEAK_BYTES.get(batch) if aimed else None,
    )  # fmt: skip


def _check_losses(
    ours: Sequence[float], others: dict[str, list[float]], *, first: float = 0.01, last: float = 0.1
) -> None:
    """Compare our losses with those of other runners.

    Args:
        first, last: allowed distances in the first step, and in the last.

    Raises:
        AccelerantError: a loss of ours is not finite, or too far from another's.
    """
    if not all(map(math.isfinite, ours)):
        raise AccelerantError(f"training step: the losses are {ours}")
    for runner, losses in others.items():
        if abs(ours[0] - losses[0]) > first or abs(ours[-1] - losses[-1]) > last:
            raise AccelerantError(f"training step: losses {ours}, {runner} has {losses}")


if __name__ == "__main__":
    run_command(TrainingSuite)
