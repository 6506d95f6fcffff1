"""Recurrent layers: torch's (cuDNN on a GPU) and each kernel of ours that serves, forward, and forward with backward.

    python -m benchmarks.recurrent --cell lstm --dtype bf16

A layer has as many inputs as states. Rows of the runner "torch" are torch's function, those of "accelerant" our kernels
by name, also where dispatch leaves the case to torch: its rules in accelerant/ops/recurrent come from this suite.
Results and gradients are compared with torch's in float64 before anything is timed. The runners take turns on a CPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from accelerant.bench.record import Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import time_in_turns, time_ms
from accelerant.cli.bench import run_command
from accelerant.config import DTYPE_NAMES
from accelerant.errors import ConfigError
from accelerant.ops.recurrent import gru_fwd, lstm_fwd, rnn_fwd
from accelerant.runtime.dispatch import Case, force
from accelerant.runtime.provider import ComputeDevice

__all__ = ["RecurrentSuite"]

_LAYERS = {"lstm": torch.nn.LSTM, "gru": torch.nn.GRU, "tanh": torch.nn.RNN}
_OPERATIONS = {"lstm": lstm_fwd, "gru": gru_fwd, "tanh": rnn_fwd}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = {whole: short for short, whole in DTYPE_NAMES.items() if short in _DTYPES}
_ERROR = {torch.float32: 5e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Allowed ||x - reference|| / ||reference||; in float32 products may be TF32's."""


@dataclass(frozen=True)
class RecurrentSuite(Suite):
    """Measure recurrent layers by torch and by our kernels, forward, and forward with backward."""

    name = "recurrent"
    examples = ("", "--cell gru --hidden 64 --batch 16 --steps 512 --dtype fp16", "--device cpu --dtype fp32")

    cell: tuple[str, ...] = option(tuple(_LAYERS), "Cells: lstm, gru, tanh.")
    dtype: tuple[str, ...] | None = option(
        None, "fp32, bf16, fp16; by default bf16 and fp32 on a GPU, fp32 on a CPU.",
    )  # fmt: skip
    hidden: tuple[str, ...] = option(("64", "128", "256"), "Sizes of the state.")
    batch: tuple[str, ...] = option(("16", "64"), "Sequences.")
    steps: tuple[str, ...] = option(("128", "512"), "Steps.")
    budget_s: float = option(0.2, "Seconds of calls behind each figure.", min=0.0)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite; raises ConfigError for an unknown cell or dtype, or a size below 1."""
        check_names("--cell", "cell", self.cell, tuple(_LAYERS))
        dtype = None if self.dtype is None else tuple(_SHORT.get(name, name) for name in self.dtype)
        check_names("--dtype", "dtype", dtype or (), tuple(_DTYPES))
        for flag, sizes in (("--hidden", self.hidden), ("--batch", self.batch), ("--steps", self.steps)):
            if not sizes or not all(size.isdecimal() and int(size) for size in sizes):
                raise ConfigError(f"{flag}: wanted numbers of at least 1, got {','.join(sizes) or 'none'}")
        return replace(self, dtype=dtype)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each cell, dtype and size."""
        dtypes = self.dtype or (("bf16", "fp32") if run.gpu else ("fp32",))
        hidden, batch, steps = (tuple(map(int, given)) for given in (self.hidden, self.batch, self.steps))
        return [
            SuiteCase(
                f"{cell} {B}x{T}x{H} {dtype}", functools.partial(_measure, self.budget_s, cell, _DTYPES[dtype], B, T, H)
            )
            for cell, dtype, H, B, T in itertools.product(self.cell, dtypes, hidden, batch, steps)
        ]


def _measure(budget_s: float, cell: str, dtype: torch.dtype, B: int, T: int, H: int, run: SuiteRun) -> None:
    """Append the rows of one size; a wrong result leaves a row without a time."""
    where, operation = run.torch_device, _OPERATIONS[cell]
    torch.manual_seed(0)
    layer = _LAYERS[cell](H, H, batch_first=True).to(where, dtype)
    x = torch.randn(B, T, H, device=where).to(dtype).requires_grad_()
    states = [torch.zeros(1, B, H, device=where, dtype=dtype) for _ in range(2 if cell == "lstm" else 1)]
    weights = layer._flat_weights
    size = sum(weight.numel() for weight in weights)
    case = Case(where, dtype, x.shape, (size, H, cell, H, False, True, torch.get_num_threads()))
    inputs = [x, *weights]
    wide = [one.detach().double().cpu().requires_grad_() for one in inputs]
    reference = _both(operation.named("torch").run, cell, wide, [state.double().cpu() for state in states])
    name = f"{B}x{T}x{H} {str(dtype).removeprefix('torch.')}"
    rows: list[Row] = []
    calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = []
    for candidate in operation.implementations:
        with force(**{operation.name: candidate.name}):  # also where dispatch would leave the case to torch
            reason = dict(operation.refusals(case))[candidate]
        runner = "accelerant" if candidate.own else "torch"
        base = Row("recurrent", operation.name, name, runner, candidate.name, flops=4 * B * T * size)
        if reason is not None:
            run.add(replace(base, note=reason))
            continue
        results = _both(candidate.run, cell, inputs, states)
        error = max(
            float((one.double().cpu() - other).norm() / other.norm())
            for one, other in zip(results, reference, strict=True)
        )
        if error > _ERROR[dtype]:
            run.add(replace(base, note=f"wrong: error {error:.2g}"))
            continue
        rows.append(base)
        calls.append(
            (
                torch.no_grad()(functools.partial(_forward, candidate.run, cell, inputs, states)),
                functools.partial(_both, candidate.run, cell, inputs, states),
            )
        )
    for direction, suffix, factor in ((0, "", 1), (1, " and backward", 3)):
        fns = [pair[direction] for pair in calls]
        if where.type == "cpu":
            timings = time_in_turns(fns, budget_s=budget_s)
        else:
            timings = [time_ms(fn, where, budget_s=budget_s) for fn in fns]
        peer = min((t.p50_ms for row, t in zip(rows, timings, strict=True) if row.runner == "torch"), default=None)
        for row, timing in zip(rows, timings, strict=True):
            speed = peer / timing.p50_ms if peer and row.runner == "accelerant" else None
            found = replace(row, case=f"{row.case}{suffix}", flops=factor * row.flops, speedup=speed)
            run.add(found.timed(timing))


def _forward(function: Callable[..., Any], cell: str, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> Any:
    return function(cell, inputs[0], states, list(inputs[1:]), True, 1, 0.0, True, False)


def _both(function: Callable[..., Any], cell: str, inputs: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """Return y and the gradients of its sum with weights."""
    y = _forward(function, cell, inputs, states)[0]
    return [y.detach(), *torch.autograd.grad(y, inputs, torch.ones_like(y))]


if __name__ == "__main__":
    run_command(RecurrentSuite)
