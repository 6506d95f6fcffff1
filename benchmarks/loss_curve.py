"""Loss curves of one training, beside plain PyTorch's: the same initial weights, the same batches in the same order.

Each run is a model trained for all steps. The reference is plain PyTorch: PlainGPT and torch's AdamW. Two more runs of
plain PyTorch say how far curves lie apart for no reason that matters:

    rounded    the same initial weights, rounded to bfloat16: what rounding alone does to a curve
    reseeded   other initial weights: what the luck of the draw does

Batches are drawn from (seed, step) alone, so all runs see the same ones. A folder keeps what was done: finished runs
are not made again, an interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import copy
import functools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from accelerant.bench.journal import SAME
from accelerant.bench.record import Environment
from accelerant.errors import ConfigError, DivergenceError, FormatError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.layers import require_float8
from accelerant.nn.train.batches import Prefetcher, halves, random_windows
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.nn.train.config import TrainConfig
from accelerant.nn.train.environment import StopRequest, numerics
from accelerant.nn.train.lock import RunLock
from accelerant.nn.train.material import Material, Watcher, prepare_material
from accelerant.nn.train.optim import learning_rate
from accelerant.nn.train.presets import Recipe, RunConfig, preset
from accelerant.nn.train.state import gathered, restored
from accelerant.runtime.files import decode_json, write_atomic
from accelerant.runtime.provider import ComputeDevice
from benchmarks.loss_curve_steps import Made, own_run, plain_run
from benchmarks.training import PlainGPT

__all__ = ["NOISES", "OURS", "PRECISIONS", "REFERENCE", "Curve", "CurveRecord", "CurveSettings", "run"]

PRECISIONS = ("fp32", "bf16", "fp8")
NOISES = ("rounded", "reseeded")
REFERENCE = "torch"
OURS = "accelerant"

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_FORMAT = "accelerant-curve-1"
_READ_EVERY = 50
"""Steps between two looks at the losses: each waits for the device."""

_SAVE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class CurveSettings:
    """What is trained.

    Attributes:
        preset: of accelerant.nn.train.presets: the model's shape, the optimiser's numbers, the tokenizer.
        steps: optimiser steps of each run; warm-up and cosine are spread over them.
        batch: windows in a step; 0: the preset's.
        context: tokens in a window, at most the preset's; 0: the preset's.
        data: "stdlib", or paths, as `accelerant train` takes them.
        seed: of initial weights and batches.
        precisions: of ours, of PRECISIONS. The reference computes in float32 where ours does in nothing else, in
            bfloat16 under autocast otherwise.
        noises: of NOISES.
    """

    preset: str = "gpt2"
    steps: int = 2000
    batch: int = 0
    context: int = 0
    data: tuple[str, ...] = ("stdlib",)
    seed: int = 0
    precisions: tuple[str, ...] = ("bf16", "fp8")
    noises: tuple[str, ...] = NOISES

    def __post_init__(self) -> None:
        recipe = preset(self.preset)
        for name, given, known in (
            ("precision", self.precisions, PRECISIONS),
            ("noise", self.noises, NOISES),
        ):
            for each in given:
                if each not in known:
                    raise ConfigError(f"{name}: no {each!r}; there are {', '.join(known)}")
            if len(set(given)) != len(given):
                raise ConfigError(f"{name}: {', '.join(given)} names one twice")
        if not self.precisions:
            raise ConfigError("precision must name one of " + ", ".join(PRECISIONS))
        if self.steps < 2 or self.batch < 0:
            raise ConfigError(f"steps must be 2 or more and batch 0 or more, got {self.steps} and {self.batch}")
        if not 0 <= self.context <= recipe.context:
            raise ConfigError(f"context must be 0 to {recipe.context} for {self.preset}, got {self.context}")

    @property
    def recipe(self) -> Recipe:
        """The preset's numbers."""
        return preset(self.preset)

    @property
    def shape(self) -> tuple[int, int]:
        """Windows in a step, and tokens in a window."""
        return self.batch or self.recipe.batch_size, self.context or self.recipe.context

    @property
    def reference(self) -> str:
        """The precision of the reference."""
        return "fp32" if self.precisions == ("fp32",) else "bf16"

    @property
    def names(self) -> tuple[str, ...]:
        """The runs, the reference first."""
        noises = (f"{REFERENCE}, {noise}" for noise in self.noises)
        return (REFERENCE, *(f"{OURS}, {precision}" for precision in self.precisions), *noises)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> CurveSettings:
        """Read what asdict wrote and JSON made lists of."""
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        return cls(**given)


@dataclass(slots=True)
class Curve:
    """One run.

    Attributes:
        name: of CurveSettings.names.
        losses: of each step, nats a token.
        step_ms: wall time of a step, median over stretches of steps, reading the losses included.
        peak_bytes: most memory allocated on a GPU; None elsewhere.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    peak_bytes: int | None = None


@dataclass(slots=True)
class CurveRecord:
    """All runs of some settings, and where they were made."""

    settings: CurveSettings
    environment: Environment
    corpus: dict[str, Any]
    parameters: int = 0
    curves: list[Curve] = field(default_factory=list)

    def curve(self, name: str) -> Curve | None:
        """A finished run by its name."""
        return next((each for each in self.curves if each.name == name), None)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        body = {"format": _FORMAT, **asdict(self)}
        curves = body.pop("curves")
        lines = ",\n".join(json.dumps({**each, "losses": [round(x, 6) for x in each["losses"]]}) for each in curves)
        head = json.dumps(body, indent=1)
        write_atomic(path, f'{head[:-2]},\n "curves": [\n{lines}\n ]\n}}\n'.encode())

    @classmethod
    def load(cls, path: Path) -> CurveRecord:
        """Read what `save` wrote.

        Raises:
            FormatError: it is not there, or something else.
        """
        try:
            body = decode_json(path.read_text(encoding="utf-8"))
            if body.pop("format") != _FORMAT:
                raise ValueError("another format")
            return cls(
                settings=CurveSettings.from_dict(body["settings"]),
                environment=Environment(**body["environment"]),
                corpus=body["corpus"],
                parameters=body["parameters"],
                curves=[Curve(**each) for each in body["curves"]],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} is no record of loss curves: {error}") from None


class Progress(Watcher, Protocol):
    """Who watches."""

    def note(self, text: str) -> None:
        """Something the user should know."""


def run(settings: CurveSettings, device: ComputeDevice, folder: Path, progress: Progress) -> CurveRecord:
    """Make all runs, or those that the folder lacks.

    Args:
        settings: what to train.
        device: where.
        folder: gets curve.json after each run, and a checkpoint of one that is interrupted.
        progress: is told how far it is.

    Raises:
        ConfigError: the folder has curves of other settings or another device; the data cannot be read; the device does
            not compute in a precision.
        DivergenceError: a loss is not finite.
        KeyboardInterrupt: Ctrl-C, with a checkpoint written.
    """
    where = torch.device(device.torch_device)
    if "fp8" in settings.precisions:
        require_float8(where)
    path = folder / "curve.json"
    with RunLock(folder) as lock:
        lock.take()
        record = CurveRecord(settings, Environment.of(device), {})
        if path.is_file():
            record = _continued(path, record)
        if all(record.curve(name) for name in settings.names):
            return record
        _require_same(path, record.environment, Environment.of(device))
        data = RunConfig(settings.recipe, data=settings.data, seed=settings.seed)
        with numerics(deterministic=False, cpu_threads=settings.recipe.cpu_threads):
            material = prepare_material(data, progress, tokenizer_from=None)
            if record.corpus and record.corpus != material.description:
                raise ConfigError(f"the data of {path} changed since its first run: take another folder")
            record.corpus = material.description
            session = _Session(settings, material, where, folder, progress)
            record.parameters = session.begun(settings.seed).parameter_count()
            for name in settings.names:
                if record.curve(name) is None:
                    record.curves.append(session.train(name))
                    record.save(path)
                    if session.stopped:
                        raise KeyboardInterrupt
        order = record.settings.names
        record.curves.sort(key=lambda each: order.index(each.name))
        record.save(path)
    return record


def _continued(path: Path, fresh: CurveRecord) -> CurveRecord:
    """The record in a folder, if it is one of these settings on this device; it keeps runs that nobody asks for now."""
    found = CurveRecord.load(path)
    asked = fresh.settings
    for name in ("preset", "steps", "shape", "data", "seed", "reference"):
        was, now = getattr(found.settings, name), getattr(asked, name)
        if was != now:
            raise ConfigError(f"{path} has curves with {name} {was}, got {now}: take another folder")
    done = {each.name.partition(", ")[2] for each in found.curves}
    found.settings = replace(
        asked,
        precisions=tuple(each for each in PRECISIONS if each in asked.precisions or each in done),
        noises=tuple(each for each in NOISES if each in asked.noises or each in done),
    )
    return found


def _require_same(path: Path, found: Environment, here: Environment) -> None:
    """Refuse to put runs of other code, or of another machine, beside those that are there."""
    for name in SAME:
        was, now = getattr(found, name), getattr(here, name)
        if was != now:
            raise ConfigError(f"{path} has curves made with {name} {was}, this run has {now}: take another folder")


class _Session:
    """What all runs share."""

    def __init__(
        self, settings: CurveSettings, material: Material, where: torch.device, folder: Path, progress: Progress
    ) -> None:
        self._settings, self._material, self._where, self._progress = settings, material, where, progress
        self._checkpoints = Checkpoints(folder)
        recipe, context = settings.recipe, settings.shape[1]
        self._model = GPTConfig(material.tokenizer.vocab_size, context, recipe.layers, recipe.heads, recipe.width)
        self._train = TrainConfig(
            steps=settings.steps, learning_rate=recipe.learning_rate, warmup=recipe.warmup,
            final_lr_ratio=recipe.final_lr_ratio, weight_decay=recipe.weight_decay, beta1=recipe.beta1,
            beta2=recipe.beta2, clip=recipe.clip,
        )  # fmt: skip
        self._drawn: dict[int, GPT] = {}
        self.stopped = False

    def begun(self, seed: int) -> GPT:
        """The model with the initial weights of a seed, on the host; drawn once."""
        if seed not in self._drawn:
            torch.manual_seed(seed)
            self._drawn[seed] = GPT(self._model)
        return self._drawn[seed]

    def train(self, name: str) -> Curve:
        """One run, all of it."""
        curve, steps = Curve(name), self._settings.steps
        self._progress.phase(f"training {steps:,} steps: {name}")
        gpu = self._where.type == "cuda"
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._where)
        model, optimizer, step = self._made(name)
        self._restore(curve, model, optimizer)
        rate = functools.partial(learning_rate, self._train, steps)
        first, times, pending = len(curve.losses), list[float](), list[Tensor]()
        last, saved = time.perf_counter(), time.monotonic()
        with Prefetcher(self._batch, range(first, steps), pin=gpu) as batches, StopRequest() as stop:
            for number, (tokens, targets) in enumerate(self._moved(batches), first):
                pending.append(step(tokens, targets, rate(number)))
                if len(pending) < _READ_EVERY and number + 1 < steps and not stop:
                    continue
                curve.losses += torch.stack(pending).tolist()
                now = time.perf_counter()
                times.append((now - last) / len(pending))
                last, pending = now, []
                _require_finite(curve)
                self._progress.advance((number + 1) / steps, f"{name}, loss {curve.losses[-1]:.3f}")
                if number + 1 < steps and (stop or time.monotonic() - saved > _SAVE_EVERY_S):
                    self._save(curve, model, optimizer)
                    saved = time.monotonic()
                if stop and number + 1 < steps:
                    raise KeyboardInterrupt
                self.stopped = bool(stop)
        curve.step_ms = round(1e3 * statistics.median(times[1:] or times), 3)
        curve.peak_bytes = torch.cuda.max_memory_allocated(self._where) if gpu else None
        self._forget()
        return curve

    def _made(self, name: str) -> Made:
        """A run's model, optimiser and step."""
        runner, _, kind = name.partition(", ")
        seed = self._settings.seed + (kind == "reseeded")
        model = copy.deepcopy(self.begun(seed)).to(self._where)
        if kind == "rounded":
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param.bfloat16())
        low = None if self._settings.reference == "fp32" else torch.bfloat16
        if runner == REFERENCE:
            with self._where:  # drawn there, which is quick on a GPU, and overwritten
                plain = PlainGPT.like(model)
            return plain_run(plain, self._settings.recipe, low)
        return own_run(model, self._settings.recipe, _DTYPES[kind])

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        count, context = self._settings.shape
        seed = self._settings.seed
        return halves(random_windows(self._material.train, seed=seed, step=step, count=count, context=context))

    def _moved(self, batches: Prefetcher) -> Iterator[tuple[Tensor, Tensor]]:
        for tokens, targets in batches:
            yield tokens.to(self._where, non_blocking=True), targets.to(self._where, non_blocking=True)

    # --- what an interruption leaves ---------------------------------------------------------------------------------

    def _save(self, curve: Curve, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors, values = gathered(model, optimizer, self._where)
        self._checkpoints.save(tensors, {**values, "run": curve.name, "losses": curve.losses})

    def _restore(self, curve: Curve, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Go on with an interrupted run, if it is this one; what another left is of no use."""
        if not self._checkpoints.exist:
            return
        tensors, document, note = self._checkpoints.load()
        if document.get("run") != curve.name:
            return
        restored(self._checkpoints.path, tensors, document, model, optimizer, self._where)
        curve.losses = [float(each) for each in document["losses"]]
        self._progress.note(note or f"{curve.name}: going on after {len(curve.losses):,} steps")

    def _forget(self) -> None:
        for path in (self._checkpoints.path, self._checkpoints.previous):
            path.unlink(missing_ok=True)


def _require_finite(curve: Curve) -> None:
    """Raises DivergenceError for a loss that is not finite."""
    for step, loss in enumerate(curve.losses[-_READ_EVERY:], max(0, len(curve.losses) - _READ_EVERY)):
        if not abs(loss) < float("inf"):
            raise DivergenceError(f"{curve.name} diverged at step {step}: loss {loss}")
