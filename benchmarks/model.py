"""Training steps of GPTs, by number of parameters.

    python -m benchmarks.model --parameters 124M --parameters 1.3B --batch 8

Tokens are random with Zipf's distribution of words, weights are random, and AdamW updates. The suite predicts the
peak memory of a step from shapes before a model is allocated, and refuses one that does not fit. It measures forward
pass, backward pass and update one after the other, then the whole step as `accelerant train` runs it, which a GPU
replays as a graph.
"""

from __future__ import annotations

import functools
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from accelerant.bench.record import OURS, OUT_OF_MEMORY, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, option
from accelerant.bench.timer import Timing, back_to_back_ms, first_ms, wall_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.step import TrainStep
from accelerant.runtime.memory.limits import available_bytes, size_text
from accelerant.runtime.memory.peak import ModelStep, PeakPrediction, measure_step, predict_step
from accelerant.runtime.provider import ComputeDevice

__all__ = ["MODELS", "ModelSuite", "Steps", "TokenBatches", "predict_model", "step_flops", "step_times"]

MODELS = {
    "0.5M": GPTConfig(256, 64, 2, 4, 128),
    "14M": GPTConfig(8192, 256, 6, 6, 384),
    "124M": GPTConfig(50304),
    "355M": GPTConfig(50304, layers=24, heads=16, width=1024),
    "774M": GPTConfig(50304, layers=36, heads=20, width=1280),
    "1.3B": GPTConfig(50304, layers=24, heads=16, width=2048),
}
"""Shapes by their number of parameters: the presets tiny and small; GPT-2 (Radford et al. 2019, table 2); GPT-3 XL with
16 heads of 128 (Brown et al. 2020, arXiv:2005.14165, table 2.1).
"""

_RATE, _CLIP = 1e-4, 1.0
_WARM_UP, _LEAST, _MOST = 3, 3, 100


# --- tokens and steps ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TokenBatches:
    """Four batches of random tokens with Zipf's distribution of words, used in turns."""

    pairs: list[tuple[Tensor, Tensor]]

    @classmethod
    def drawn(cls, config: GPTConfig, batch: int, where: torch.device, *, contiguous: bool = False) -> TokenBatches:
        """Draw the batches, the same in every run; Opacus needs contiguous ones."""
        generator = torch.Generator().manual_seed(0)
        weights = 1.0 / torch.arange(1, config.vocab_size + 1, dtype=torch.float32)
        size = batch * (config.context + 1)
        pairs = []
        for _ in range(4):
            rows = torch.multinomial(weights, size, True, generator=generator).view(batch, -1).to(where)
            tokens, targets = rows[:, :-1], rows[:, 1:]
            pairs.append((tokens.contiguous(), targets.contiguous()) if contiguous else (tokens, targets))
        return cls(pairs)

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the tokens and targets of a step, (B, T) each."""
        return self.pairs[step % len(self.pairs)]


def step_times(
    step: Callable[[Tensor, Tensor], object], data: TokenBatches, where: torch.device, budget_s: float
) -> Timing:
    """Return the times of consecutive steps, on a GPU by events, and their wall times."""
    turns = itertools.cycle(data.pairs)

    def call() -> object:
        return step(*next(turns))

    if where.type != "cuda":
        return wall_ms(call, where, budget_s=budget_s, least=_LEAST)
    wall = back_to_back_ms(call, where, budget_s=budget_s / 4)
    count = max(10, min(500, math.ceil(1e3 * budget_s / first_ms(call, where))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize(where)
    return Timing.of([before.elapsed_time(after) for before, after in itertools.pairwise(events)]).beside(wall)


def step_flops(config: GPTConfig, tokens: int) -> int:
    """Return the operations of products and causal attention (half the pairs), forward and twice that backward."""
    matrices = 12 * config.layers * config.width**2 + config.vocab_size * config.width
    attention = config.layers * 2 * config.width * config.context
    return tokens * 6 * (matrices + attention // 2)


def _optimizer(parameters: Sequence[nn.Parameter]) -> AdamW:
    return AdamW(list(parameters), lr=_RATE)


class Steps:
    """A model of a shape on a device, with its optimizer and batches."""

    def __init__(self, config: GPTConfig, batch: int, where: torch.device) -> None:
        torch.manual_seed(0)
        self.where, self.precision = where, torch.bfloat16 if where.type == "cuda" else None
        self.model = GPT(config).to(where)
        self.data = TokenBatches.drawn(config, batch, where)

    def phases(self, budget_s: float) -> dict[str, Timing]:
        """Return the wall times of forward passes, backward passes and updates, with the device idle between them."""
        optimizer, loss, turns = _optimizer(list(self.model.parameters())), Tensor(), itertools.cycle(self.data.pairs)

        def forward() -> None:
            nonlocal loss
            with torch.autocast(self.where.type, torch.bfloat16, enabled=self.precision is not None):
                loss = self.model.loss(*next(turns))

        def update() -> None:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        phases = {"forward": forward, "backward": lambda: loss.backward(), "update": update}
        rounds: list[list[float]] = []
        began = time.perf_counter()
        while len(rounds) < _WARM_UP + _LEAST or (time.perf_counter() - began < budget_s and len(rounds) < _MOST):
            rounds.append([first_ms(phase, self.where) for phase in phases.values()])
        columns = zip(*rounds[_WARM_UP:], strict=True)
        return {name: Timing.of(times, wall=True) for name, times in zip(phases, columns, strict=True)}

    def whole(self, budget_s: float) -> tuple[Timing, list[float]]:
        """Return the times of whole steps, and the losses of those before them."""
        own = TrainStep(
            self.model, _optimizer(list(self.model.parameters())), self.model.loss, max_grad_norm=_CLIP,
            precision=self.precision,
        )  # fmt: skip

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            return own([(tokens, targets)], _RATE).loss

        losses = [float(step(*self.data.batch(i))) for i in range(2 * _WARM_UP)]
        if not all(map(math.isfinite, losses)):
            raise AccelerantError(f"training step: the losses are {losses}")
        return step_times(step, self.data, self.where, budget_s), losses


# --- the suite --------------------------------------------------------------------------------------------------------


def predict_model(config: GPTConfig, batch: int, where: torch.device) -> PeakPrediction:
    """Predict the peak memory of a training step with AdamW, from shapes: no weight is allocated."""
    with torch.device("meta"):
        model = GPT(config)

    def call(model: GPT, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(where.type, torch.bfloat16, enabled=where.type == "cuda"):
            return model.loss(tokens, targets)

    def inputs(_: object) -> tuple[Tensor, Tensor]:
        tokens = torch.zeros(batch, config.context, dtype=torch.int64, device=where)
        return tokens, tokens.clone()

    return predict_step(ModelStep(model, call, True), inputs, where, _optimizer)


@dataclass(frozen=True)
class ModelSuite(Suite):
    """Measure forward pass, backward pass, update and whole step of GPTs, and their memory, predicted first."""

    name = "model"
    examples: ClassVar[tuple[str, ...]] = (
        "",
        "--parameters 124M --parameters 1.3B --batch 8",
        "--parameters 0.5M --device cpu",
    )

    parameters: tuple[str, ...] | None = option(
        None, f"Of {', '.join(MODELS)}. By default on a GPU 124M, 355M, 1.3B; on a CPU 0.5M, 14M.",
    )  # fmt: skip
    batch: int | None = option(None, "Sequences in a step. By default 8; on a CPU 4.", min=1, same=True)
    context: int | None = option(None, "Tokens of a sequence; by default the model's.", min=1, same=True)
    budget_s: float = option(1.0, "Seconds of steps behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's defaults; ConfigError for an unknown size."""
        check_names("--parameters", "size", self.parameters or (), tuple(MODELS))
        gpu = device.torch_device.startswith("cuda")
        default = ("124M", "355M", "1.3B") if gpu else ("0.5M", "14M")
        return replace(self, parameters=self.parameters or default, batch=self.batch or (8 if gpu else 4))

    def prepare(self, run: SuiteRun) -> None:
        """Measure the ceilings."""
        run.require_ceiling("matmul", min(self.budget_s, 0.3))

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each size."""
        return [
            SuiteCase(f"gpt {name}, {self.batch} sequences", functools.partial(self._measure, name))
            for name in self.parameters or ()
        ]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the sizes."""
        names = {f"gpt {name}" for name in self.parameters or ()}
        return row.suite == self.name and row.op in names and row.case.startswith(f"{self.batch}x")

    def _measure(self, name: str, run: SuiteRun) -> None:
        config, batch, where = MODELS[name], self.batch or 1, run.torch_device
        config = replace(config, context=self.context or config.context)
        tokens, flops = batch * config.context, step_flops(config, batch * config.context)
        precision = "bf16 autocast" if run.gpu else "float32"
        shape = f"{batch}x{config.context} {config.layers} layers of {config.width} {precision}"
        row = Row("model", f"gpt {name}", f"{shape} step", OURS, "TrainStep", flops=flops, ceiling="matmul")
        run.progress(f"gpt {name}: predicting its memory")
        predicted, room = predict_model(config, batch, where), available_bytes(run.device)
        if predicted.total > room:
            note = f"{OUT_OF_MEMORY}needs {size_text(predicted.total)} by prediction, {size_text(room)} are free"
            run.add(replace(row, note=note))
            return
        gc.collect()
        if run.gpu:
            torch.cuda.empty_cache()
        run.progress(f"gpt {name}: forward, backward, update")
        steps = Steps(config, batch, where)
        for phase, timing in steps.phases(self.budget_s).items():
            share = {"forward": flops // 3, "backward": flops - flops // 3}.get(phase, 0)
            part = replace(row, case=f"{shape} {phase}", implementation="eager", flops=share)
            run.add(replace(part.timed(timing), ceiling="matmul" if share else ""))
        run.progress(f"gpt {name}: its memory")
        step = ModelStep(steps.model, GPT.loss, True)
        peak = measure_step(step, steps.data.batch(0), where, _optimizer) if not run.gpu else None
        if run.gpu:
            torch.cuda.reset_peak_memory_stats(where)
        run.progress(f"gpt {name}: whole steps")
        timing, losses = steps.whole(self.budget_s)
        if run.gpu:
            peak = torch.cuda.max_memory_allocated(where)
        note = f"{steps.model.parameter_count():,} parameters, {1e3 * tokens / timing.p50_ms:,.0f} tokens/s"
        note += f", predicted {size_text(predicted.total)}"
        note += f", first losses {' '.join(f'{loss:.4f}' for loss in losses)}"
        run.add(replace(row.timed(timing), peak_bytes=peak, note=note))


if __name__ == "__main__":
    run_command(ModelSuite)
