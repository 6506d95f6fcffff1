"""Loss curves of a training, compared with plain PyTorch's: the same initial weights, the same batches in order.

    python -m benchmarks.loss_curve --batch 4 --out runs/curve

Each run is a model trained for all steps. The reference is plain PyTorch: PlainGPT and torch's AdamW. Two more runs of
plain PyTorch show how far curves differ without a reason that matters:

    rounded    the same initial weights, rounded to bfloat16: the effect of rounding alone
    reseeded   other initial weights: the effect of the draw

Batches are drawn from (seed, step) alone, so all runs see the same ones. The folder keeps finished runs, which are not
made again, and the checkpoint of an interrupted one, which continues. Its curve.json and curve.csv have every loss,
report.html and curve.svg the curves (loss_curve_page.py).
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
import typer
from torch import Tensor, nn

from accelerant.bench.record import SAME, Environment
from accelerant.cli.app import exit_status
from accelerant.errors import ConfigError, DivergenceError, FormatError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.layers import require_float8
from accelerant.nn.optim import AdamW
from accelerant.nn.train.checkpoint import Checkpoints, gathered, restored
from accelerant.nn.train.config import RunConfig, TrainConfig, preset
from accelerant.nn.train.corpus import TokenizedText, Watcher, tokenize
from accelerant.nn.train.data import halves, prefetched, random_windows
from accelerant.nn.train.environment import StopRequest, numerics
from accelerant.nn.train.history import RunLock
from accelerant.nn.train.objective import learning_rate
from accelerant.nn.train.step import TrainStep
from accelerant.runtime import registry
from accelerant.runtime.files import decode_json, write_atomic
from accelerant.runtime.provider import ComputeDevice
from benchmarks.gpt_steps import PlainGPT, parameter_groups

__all__ = [
    "NOISES",
    "OURS",
    "PRECISIONS",
    "REFERENCE",
    "CurveRecord",
    "CurveSettings",
    "LossCurve",
    "curve",
    "main",
    "run",
]

PRECISIONS = ("fp32", "bf16", "fp8")
NOISES = ("rounded", "reseeded")
REFERENCE = "torch"
OURS = "accelerant"

_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
_FORMAT = "accelerant-curve-1"
_READ_EVERY = 50
"""Steps between two reads of the losses, which wait for the device."""

_SAVE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class CurveSettings:
    """The settings of a comparison.

    Attributes:
        preset: of accelerant.nn.train.config: the model's shape, the optimizer's numbers, the tokenizer.
        steps: optimizer steps of each run; warm-up and cosine are spread over them.
        batch: windows in a step; 0 for the preset's.
        context: tokens in a window, at most the preset's; 0 for the preset's.
        data: "stdlib", or paths, as `accelerant train` takes them.
        seed: seed of initial weights and batches.
        precisions: precisions of our runs. The reference computes in float32 if that is the only one, else in bfloat16
            under autocast.
        noises: kinds of further runs of plain PyTorch.
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
        most = preset(self.preset).training.context
        for name, chosen, known in (
            ("precision", self.precisions, PRECISIONS),
            ("noise", self.noises, NOISES),
        ):
            for kind in chosen:
                if kind not in known:
                    raise ConfigError(f"{name}: no {kind!r}; there are {', '.join(known)}")
            if len(set(chosen)) != len(chosen):
                raise ConfigError(f"{name}: {', '.join(chosen)} names one twice")
        if not self.precisions:
            raise ConfigError("precision must name one of " + ", ".join(PRECISIONS))
        if self.steps < 2 or self.batch < 0:
            raise ConfigError(f"steps must be 2 or more and batch 0 or more, got {self.steps} and {self.batch}")
        if not 0 <= self.context <= most:
            raise ConfigError(f"context must be 0 to {most} for {self.preset}, got {self.context}")

    @property
    def run(self) -> RunConfig:
        """The preset."""
        return preset(self.preset)

    @property
    def shape(self) -> tuple[int, int]:
        """Windows in a step, and tokens in a window."""
        training = self.run.training
        return self.batch or training.batch_size, self.context or training.context

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
        """Return the settings of a dictionary read from JSON."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


@dataclass(slots=True)
class LossCurve:
    """The losses of a run.

    Attributes:
        name: one of CurveSettings.names.
        losses: loss of each step, nats a token.
        step_ms: wall time of a step, median over stretches of steps, reading the losses included.
        peak_bytes: peak memory on a GPU; None elsewhere.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    peak_bytes: int | None = None


@dataclass(slots=True)
class CurveRecord:
    """All runs of some settings, and their environment."""

    settings: CurveSettings
    environment: Environment
    corpus: dict[str, Any]
    parameters: int = 0
    curves: list[LossCurve] = field(default_factory=list)

    def curve(self, name: str) -> LossCurve | None:
        """Return a finished run by its name."""
        return next((curve for curve in self.curves if curve.name == name), None)

    def save(self, path: Path) -> None:
        """Write as JSON, whole or not at all."""
        body = {"format": _FORMAT, **asdict(self)}
        curves = body.pop("curves")
        lines = ",\n".join(json.dumps({**curve, "losses": [round(x, 6) for x in curve["losses"]]}) for curve in curves)
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
                curves=[LossCurve(**curve) for curve in body["curves"]],
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(f"{path} is no record of loss curves: {error}") from None


class CurveProgress(Watcher, Protocol):
    """Receives progress and notes."""

    def note(self, text: str) -> None:
        """Show a note."""


def run(settings: CurveSettings, device: ComputeDevice, folder: Path, progress: CurveProgress) -> CurveRecord:
    """Make the runs that the folder lacks.

    Args:
        folder: gets curve.json after each run, and a checkpoint of an interrupted one.

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
        data = settings.run.replaced(data=settings.data, seed=settings.seed)
        with numerics(deterministic=False, cpu_threads=settings.run.cpu_threads):
            text = tokenize(data, progress, tokenizer_from=None)
            if record.corpus and record.corpus != text.description:
                raise ConfigError(f"the data of {path} changed since its first run: take another folder")
            record.corpus = text.description
            session = _CurveRuns(settings, text, where, folder, progress)
            record.parameters = session.begun(settings.seed).parameter_count()
            for name in settings.names:
                if record.curve(name) is None:
                    record.curves.append(session.train(name))
                    record.save(path)
                    if session.stopped:
                        raise KeyboardInterrupt
        order = record.settings.names
        record.curves.sort(key=lambda curve: order.index(curve.name))
        record.save(path)
    return record


def _continued(path: Path, fresh: CurveRecord) -> CurveRecord:
    """Return a folder's record, with its runs that are not requested now; raises ConfigError for other settings."""
    record = CurveRecord.load(path)
    settings = fresh.settings
    for name in ("preset", "steps", "shape", "data", "seed", "reference"):
        was, now = getattr(record.settings, name), getattr(settings, name)
        if was != now:
            raise ConfigError(f"{path} has curves with {name} {was}, got {now}: take another folder")
    done = {curve.name.partition(", ")[2] for curve in record.curves}
    record.settings = replace(
        settings,
        precisions=tuple(kind for kind in PRECISIONS if kind in settings.precisions or kind in done),
        noises=tuple(kind for kind in NOISES if kind in settings.noises or kind in done),
    )
    return record


def _require_same(path: Path, recorded: Environment, here: Environment) -> None:
    """Raise ConfigError if the runs in a folder are of other code or another machine."""
    for name in SAME:
        was, now = getattr(recorded, name), getattr(here, name)
        if was != now:
            raise ConfigError(f"{path} has curves made with {name} {was}, this run has {now}: take another folder")


class _CurveRuns:
    """The data, model and folder that all runs share."""

    def __init__(
        self, settings: CurveSettings, text: TokenizedText, where: torch.device, folder: Path, progress: CurveProgress
    ) -> None:
        self._settings, self._text, self._where, self._progress = settings, text, where, progress
        self._checkpoints = Checkpoints(folder)
        run, recipe, context = settings.run, settings.run.training, settings.shape[1]
        self._model = GPTConfig(text.tokenizer.vocab_size, context, run.layers, run.heads, run.width)
        self._train = TrainConfig(
            steps=settings.steps, learning_rate=recipe.learning_rate, warmup=recipe.warmup,
            final_lr_ratio=recipe.final_lr_ratio, weight_decay=recipe.weight_decay, betas=recipe.betas,
            max_grad_norm=recipe.max_grad_norm,
        )  # fmt: skip
        self._drawn: dict[int, GPT] = {}
        self.stopped = False

    def begun(self, seed: int) -> GPT:
        """Return the model with the initial weights of a seed, on the host; drawn once."""
        if seed not in self._drawn:
            torch.manual_seed(seed)
            self._drawn[seed] = GPT(self._model)
        return self._drawn[seed]

    def train(self, name: str) -> LossCurve:
        """Train a run to its end."""
        curve, steps = LossCurve(name), self._settings.steps
        self._progress.phase(f"training {steps:,} steps: {name}")
        gpu = self._where.type == "cuda"
        if gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._where)
        model, optimizer, step = self._prepared(name)
        self._restore(curve, model, optimizer)
        rate = functools.partial(learning_rate, self._train, steps)
        first, times, pending = len(curve.losses), list[float](), list[Tensor]()
        last, saved = time.perf_counter(), time.monotonic()
        with closing(prefetched(self._batch, range(first, steps), pin=gpu)) as batches, StopRequest() as stop:
            for number, [batch] in enumerate(batches, first):
                tokens, targets = (tensor.to(self._where, non_blocking=True) for tensor in batch)
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

    def _prepared(self, name: str) -> RatedStep:
        """Return a run's model, optimizer and step."""
        runner, _, kind = name.partition(", ")
        seed = self._settings.seed + (kind == "reseeded")
        model = copy.deepcopy(self.begun(seed)).to(self._where)
        if kind == "rounded":
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(param.bfloat16())
        low = None if self._settings.reference == "fp32" else torch.bfloat16
        if runner == REFERENCE:
            with self._where:  # drawn on the device, which is quick on a GPU, and overwritten
                plain = PlainGPT.like(model)
            return plain_run(plain, self._settings.run.training, low)
        return own_run(model, self._settings.run.training, _DTYPES[kind])

    def _batch(self, step: int) -> tuple[Tensor, ...]:
        count, context = self._settings.shape
        seed = self._settings.seed
        return halves(random_windows(self._text.train, seed=seed, step=step, count=count, context=context))

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def _save(self, curve: LossCurve, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        tensors, values = gathered(model, optimizer, self._where)
        self._checkpoints.save(
            tensors, {**values, "step": len(curve.losses), "run": curve.name, "losses": curve.losses}
        )

    def _restore(self, curve: LossCurve, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Continue from the checkpoint, if it is of this run."""
        if not self._checkpoints.exist:
            return
        tensors, document, note = self._checkpoints.load()
        if document.get("run") != curve.name:
            return
        restored(self._checkpoints.path, tensors, document, model, optimizer, self._where)
        curve.losses = [float(loss) for loss in document["losses"]]
        self._progress.note(note or f"{curve.name}: going on after {len(curve.losses):,} steps")

    def _forget(self) -> None:
        for path in (self._checkpoints.path, self._checkpoints.previous):
            path.unlink(missing_ok=True)


def _require_finite(curve: LossCurve) -> None:
    """Raise DivergenceError for a loss that is not finite."""
    for step, loss in enumerate(curve.losses[-_READ_EVERY:], max(0, len(curve.losses) - _READ_EVERY)):
        if not abs(loss) < float("inf"):
            raise DivergenceError(f"{curve.name} diverged at step {step}: loss {loss}")


# --- steps -----------------------------------------------------------------------------------------------------------

RatedStep = tuple[nn.Module, torch.optim.Optimizer, Callable[[Tensor, Tensor, float], Tensor]]
"""A model, its optimizer, and the step: a function of tokens, targets and learning rate that returns the loss."""


def plain_run(model: PlainGPT, recipe: TrainConfig, low: torch.dtype | None) -> RatedStep:
    """Return a training with torch's optimizer, clipping and autocast.

    On a GPU the step is captured as a CUDA graph, the same kernels in the same order: eager steps of few tokens wait
    for the host.

    Args:
        low: the dtype of autocast; None for none.
    """
    where = model.wte.weight.device
    gpu = where.type == "cuda"
    optimizer = torch.optim.AdamW(
        parameter_groups(model, recipe.weight_decay),
        lr=torch.tensor(recipe.learning_rate, device=where) if gpu else recipe.learning_rate,
        betas=recipe.betas,
        fused=gpu,
        capturable=gpu,
    )

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(where.type, dtype=low or torch.bfloat16, enabled=low is not None):
            loss: Tensor = model(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm or math.inf)
        optimizer.step()
        return loss.detach()

    run = _CapturedStep(step) if gpu else step

    def rated(tokens: Tensor, targets: Tensor, rate: float) -> Tensor:
        for group in optimizer.param_groups:
            if gpu:
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        return run(tokens, targets)

    return model, optimizer, rated


def own_run(model: GPT, recipe: TrainConfig, precision: torch.dtype | None) -> RatedStep:
    """Return the same training by ours; `precision` is float8_e4m3fn for fp8."""
    groups = parameter_groups(model, recipe.weight_decay)
    optimizer = AdamW(groups, lr=recipe.learning_rate, betas=recipe.betas)
    step = TrainStep(model, optimizer, model.loss, max_grad_norm=recipe.max_grad_norm, precision=precision)
    return model, optimizer, lambda tokens, targets, rate: step([(tokens, targets)], rate).loss


class _CapturedStep:
    """A step of plain PyTorch, replayed as a CUDA graph after a few eager calls."""

    _EAGER = 3

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor]) -> None:
        self._step = step
        self._done = 0
        self._stream = torch.cuda.Stream()
        self._graph = torch.cuda.CUDAGraph()
        self._inputs: tuple[Tensor, ...] = ()
        self._loss = torch.empty(0)

    def __call__(self, tokens: Tensor, targets: Tensor) -> Tensor:
        self._done += 1
        if self._done <= self._EAGER:
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                loss = self._step(tokens, targets)
            torch.cuda.current_stream().wait_stream(self._stream)
            return loss
        if not self._inputs:
            self._inputs = tokens.clone(), targets.clone()
            with torch.cuda.graph(self._graph):
                self._loss = self._step(*self._inputs)
        for to, tensor in zip(self._inputs, (tokens, targets), strict=True):
            to.copy_(tensor)
        self._graph.replay()
        return self._loss.clone()


# --- the command -----------------------------------------------------------------------------------------------------


def curve(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the record; what is there is not made again.")],
    preset: Annotated[
        str | None, typer.Option(help="tiny, small or gpt2. Default: gpt2 on a GPU, tiny on a CPU.", show_default=False)
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Optimizer steps of each run.")] = 2000,
    batch: Annotated[int, typer.Option(min=0, help="Windows in a step; 0: the preset's.")] = 0,
    context: Annotated[int, typer.Option(min=0, help="Tokens in a window; 0: the preset's.")] = 0,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="Of our runs: fp32, bf16, fp8. Default: bf16 and fp8 on a GPU, fp32 on a CPU."),
    ] = None,
    noise: Annotated[
        list[str] | None, typer.Option(help="Further runs of plain PyTorch: rounded, reseeded, or none. Default: both.")
    ] = None,
    data: Annotated[list[str] | None, typer.Option(metavar="stdlib|PATH...", help="Text. Default: stdlib.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of initial weights and batches.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cuda or cpu.")] = "auto",
    page: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Train nothing: put the figures of --out into this page, between its marks."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the record as JSON instead of a table.")] = False,
) -> None:
    """Train with plain PyTorch and with ours, from the same weights and batches, and compare the losses.

    Writes curve.json, curve.csv, curve.svg and report.html into a folder. Interrupted, the same command continues.
    """
    from accelerant.cli.train_view import make_view
    from benchmarks import loss_curve_page

    if page is not None:
        record = CurveRecord.load(out / "curve.json")
        loss_curve_page.write_curve(out, record)
        image, source = (
            Path(os.path.relpath(out / name, page.parent)).as_posix() for name in ("curve.svg", "curve.json")
        )
        loss_curve_page.update_page(page, loss_curve_page.markdown(record, image, source))
        return
    chosen = registry.find_device(device)
    if not chosen.torch_device:
        raise ConfigError(f"--device: training needs cuda or cpu; {device} is not one")
    gpu = chosen.torch_device.startswith("cuda")
    noises = tuple(name for name in noise or ("rounded", "reseeded") if name != "none")
    settings = CurveSettings(
        preset or ("gpt2" if gpu else "tiny"), steps, batch, context,
        data=tuple(data or ("stdlib",)), seed=seed,
        precisions=tuple(precision or (("bf16", "fp8") if gpu else ("fp32",))), noises=noises,
    )  # fmt: skip
    view = make_view(quiet=json_output)
    try:
        record = run(settings, chosen, out, view)
    finally:
        view.close()
    loss_curve_page.write_curve(out, record)
    print((out / "curve.json").read_text() if json_output else loss_curve_page.table(record))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(epilog="Example:  python -m benchmarks.loss_curve --batch 4 --out runs/curve")(curve)
    with exit_status():
        app(args=sys.argv[1:] if arguments is None else arguments, prog_name="python -m benchmarks.loss_curve")


if __name__ == "__main__":
    from benchmarks.loss_curve import main as imported_main  # loss_curve_page imports this module by its name

    imported_main()
