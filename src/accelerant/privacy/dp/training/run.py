# ruff: noqa: D102  Extension documents the methods of its subclasses
"""`accelerant train --private`: the training job with private steps.

The unit of privacy is one window: context + 1 tokens in a row, cut from the training part at multiples of context + 1.
A document that fills several windows has several times the epsilon. The number of windows in two digits, the corpus's
other sizes, the held-out part, and the losses of the training are not covered. No file has a digest of the text, which
would confirm a guess of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant.errors import BudgetExceeded, ConfigError
from accelerant.nn.train.callbacks import Extension, ReportChart, Step
from accelerant.nn.train.config import RunConfig, TrainConfig, paths_of
from accelerant.nn.train.data import Batch, Source, TokenSource, gather
from accelerant.nn.train.history import RunFolder
from accelerant.nn.train.step import StepResult
from accelerant.nn.train.tokens import Tokens, is_token_file
from accelerant.nn.train.trainer import Trainer
from accelerant.privacy.dp.ledger import Budget, PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, about, check_number, spent
from accelerant.privacy.dp.sampling import DrawnBatch
from accelerant.privacy.dp.training.private import PrivateTraining, make_private
from accelerant.privacy.dp.training.step import PrivateStep
from accelerant.runtime.files import exact, plain, typed, write_atomic
from accelerant.runtime.processes import Processes

_CURVE_POINTS = 12
_NO_TARGET = -100  # ignored by the loss
_SPENT = "the privacy budget is spent"
_NOT_COVERED = (
    "Private are the parameters, and what was made from them: model and sample. Not covered are metrics.jsonl, "
    "summary.json, checkpoints, logs and this page: the losses of training and held-out text, n-gram models and speeds "
    "are measured on the text without noise; nor is config.json, which names its files. Keep them to yourself."
)


@dataclass(frozen=True, slots=True)
class PrivateSettings:
    """Options of a private run, by the command's names; the target is for all that the ledger holds."""

    ledger: str
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    insecure_noise: bool = False

    def __post_init__(self) -> None:
        if self.target_epsilon is None and self.noise_multiplier is None:
            raise ConfigError("--private needs --target-epsilon or --noise-multiplier")
        if self.target_epsilon is not None:
            check_number("target_epsilon", self.target_epsilon)
        if self.noise_multiplier is not None:
            check_number("noise_multiplier", self.noise_multiplier, open_below=False)
        check_number("delta", self.delta, most=0.5)
        check_number("max_grad_norm", self.max_grad_norm)


class PrivateRun(Extension):
    """Makes the steps of a run private; a resumed run has the settings of `description`, with the noise found then."""

    name = "private"

    def __init__(self, settings: PrivateSettings) -> None:
        self.settings = self._requested = settings
        self._private: PrivateTraining | None = None
        self._source: WindowSource | None = None
        self._shared_ledger: PrivacyLedger | None = None
        self._delta_remark = self._unit = ""
        self._folder = Path()
        self._step = 0
        self._processes = Processes()
        self._marked: frozenset[int] = frozenset()
        self._marks: list[tuple[int, int]] = []

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> PrivateRun:
        """Return the run that config.json describes; ConfigError if a setting is missing, unknown or invalid."""
        try:
            settings = dict(description["settings"])
            if "secure" in settings and "insecure_noise" not in settings:  # an earlier version's
                settings["insecure_noise"] = not typed(bool, settings.pop("secure"), "secure")
            return cls(typed(PrivateSettings, settings, "settings"))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"config.json does not say how the run is private: {error}") from None

    # --- before the run ----------------------------------------------------------------------------------------------
    def require(self, run: RunConfig) -> None:
        """Raise ConfigError for fp8, float16, recomputation, and what the text would choose: a tokenizer, the end."""
        if run.training.precision == "fp8":
            raise ConfigError("--private does not go with --precision fp8: per-example gradients are taken in bfloat16")
        if run.training.precision == "float16":
            raise ConfigError(
                "--private does not go with --precision float16: an overflow that skips a step would reveal more than "
                "epsilon covers; use bfloat16 or float32"
            )
        if run.training.patience or run.training.keep_best:
            raise ConfigError(
                "--private does not go with patience and keep_best: held-out losses, which have no noise, would choose "
                "the model. Give the number of steps in advance"
            )
        if run.training.recompute:
            raise ConfigError("--private does not go with --recompute: lower --microbatch to save memory")
        if (
            run.tokenizer == "bpe"
            and not run.init_from
            and not any(is_token_file(Path(name)) for name in paths_of(run.data))
        ):
            raise ConfigError(
                "a tokenizer trained on the text reveals some of it, and epsilon would not cover that: make a token "
                "file with a tokenizer from elsewhere (accelerant data prepare --tokenizer PATH) and give it as --data"
            )

    def named(self, sha256: str, description: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return "", {"source": "a private text"}

    def require_extensible(self) -> None:
        """Raise ConfigError for a run with a target, whose noise is for its number of steps."""
        if (target := self.settings.target_epsilon) is not None:
            raise ConfigError(
                f"the noise of this run is such that its steps spend epsilon {target:g}: for more steps start a new "
                "run into another --out; with --ledger the two add up"
            )

    def configured(self, config: TrainConfig) -> TrainConfig:
        """Turn off clipping of the mean, graphs, and the memory prediction, which is of an ordinary step."""
        return replace(config, max_grad_norm=None, graph="off", predict_memory=False)

    def source(self, tokens: Tokens, config: TrainConfig, fingerprint: str) -> Source:
        """Return the source of Poisson draws of windows; ConfigError or BudgetExceeded where there can be none."""
        folder = Path(config.out or "")
        path = self._ledger_path(folder)
        self._source = WindowSource(tokens, config, fingerprint)
        self._unit = f"window of {config.context + 1} tokens"
        self.settings = replace(self.settings, ledger=str(path))
        spent([PrivacyEvent("gaussian", 1.0)], self.settings.delta, method="rdp")  # raises where there is no accountant
        self._processes = Processes()
        if self._processes.first and not self._is_own_ledger(folder):
            self._check_ledger()
            if path.exists() or path.parent.resolve() != folder.resolve():  # otherwise created with the run's folder
                self._shared_ledger = self._open_ledger()
        return self._source

    def attach(self, trainer: Trainer) -> Step:
        """Clip the model's backward passes, open the ledger (rank 0 has it, others a copy), find the noise."""
        config, source, settings = trainer.config, self._source, self.settings
        assert source is not None  # for the type checker: source was called before
        first = self._processes.first
        with self._processes.agreed({}):  # else the others would enter make_private's exchanges alone
            ledger = (self._shared_ledger or self._open_ledger()) if first else PrivacyLedger(unit=self._unit)
        noise, self._folder = settings.noise_multiplier, Path(config.out or "")
        try:
            self._private = make_private(
                trainer.model, trainer.optimizer, ledger=ledger, insecure=settings.insecure_noise, loss_reduction="sum",
                noise_multiplier=noise, target_epsilon=settings.target_epsilon if noise is None else None,
                steps=config.steps, delta=settings.delta, max_grad_norm=settings.max_grad_norm,
                sample_rate=source.rate, expected_batch_size=float(config.batch_size),
            )  # fmt: skip
        except BaseException:
            ledger.close()
            raise
        source.private = self._private
        self.settings = replace(settings, noise_multiplier=self._private.noise_multiplier)
        self._marked = frozenset(round((config.steps or 0) * k / _CURVE_POINTS) for k in range(1, _CURVE_POINTS + 1))
        self._delta_remark = self._private.remark_on_delta(source.windows)
        if self._delta_remark:
            trainer.notify("note", self._delta_remark)
        trainer.optimizer.defaults["max_grad_norm"] = math.inf  # so that the step computes the norm of the noisy mean
        return _TrainerStep(trainer, self._private, source, self._affordable, self._stepped)

    def description(self) -> dict[str, Any]:
        """Return the settings, with the noise that was found, and the unit."""
        if self._source is None:
            return {}
        more = {"sample_rate": self._source.rate, "unit": self._training.ledger.unit}
        kept = replace(self.settings, ledger="") if self._is_own_ledger(self._folder) else self.settings
        return {"settings": asdict(kept), **more}

    def words(self, folder: Path) -> list[str]:
        requested = self._requested
        words = ["--private", "--delta", str(requested.delta), "--max-grad-norm", str(requested.max_grad_norm)]
        if requested.target_epsilon is not None:
            words += ["--target-epsilon", str(requested.target_epsilon)]
        else:
            words += ["--noise-multiplier", str(requested.noise_multiplier)]
        if not self._is_own_ledger(folder):
            words += ["--ledger", requested.ledger]
        elif (spent := folder / RunFolder.LEDGER).is_file():  # counted on, by a run in another folder
            words += ["--ledger", str(spent), "--out", f"{folder}-again"]
        return [*words, "--insecure-noise"] if requested.insecure_noise else words

    def _is_own_ledger(self, folder: Path) -> bool:
        """Return whether the ledger is the one that is created, or moved, with the run's folder."""
        return self._ledger_path(folder).resolve() == (folder / RunFolder.LEDGER).resolve()

    def _ledger_path(self, folder: Path) -> Path:
        return Path(self.settings.ledger or folder.absolute() / RunFolder.LEDGER)

    def _open_ledger(self) -> PrivacyLedger:
        settings = self.settings
        budget = (
            None if settings.target_epsilon is None else Budget(epsilon=settings.target_epsilon, delta=settings.delta)
        )
        return PrivacyLedger(settings.ledger, unit=self._unit, budget=budget)

    def _check_ledger(self) -> None:
        """Check a ledger of other runs, before anything is written."""
        settings = self.settings
        path = Path(settings.ledger)
        if not path.is_file() or not path.stat().st_size:
            return
        ledger = PrivacyLedger.read(path)
        if ledger.unit != self._unit:
            raise ConfigError(f"the ledger {settings.ledger} has the unit {ledger.unit!r}, the run {self._unit!r}")
        if settings.target_epsilon is not None and settings.noise_multiplier is None:
            known = ledger.epsilon(settings.delta)
            if known >= settings.target_epsilon:
                raise BudgetExceeded(
                    f"the ledger {settings.ledger} holds epsilon {plain(known, up=True)} at delta {settings.delta:g}: "
                    f"the target is {settings.target_epsilon:g}"
                )

    # --- during the run ----------------------------------------------------------------------------------------------
    def before_step(self, trainer: Trainer, step: int) -> None:
        self._step = step + 1

    def saved(self, trainer: Trainer, path: Path, step: int) -> None:
        """Settle the ledger where a resumed run begins."""
        self._training.ledger.settle()

    def state(self) -> Mapping[str, Any]:
        """Return the ledger's events, and how many steps it held at marked steps, for a checkpoint."""
        if self._private is None:
            return {}
        return {"marks": [list(mark) for mark in self._marks], "spent": self._training.ledger.by_run()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, and record its events that the ledger lacks; BudgetExceeded if they pass the budget."""
        self._marks = [(int(step), int(count)) for step, count in state["marks"]]
        with self._processes.agreed({}):  # rank 0 alone has a budget
            self._training.ledger.merge(state.get("spent", {}))

    def _affordable(self) -> bool:
        """Return whether the ledger, which rank 0 has, allows another step."""
        return self._processes.on_first(self._training.optimizer.affordable)

    def _stepped(self, trainer: Trainer) -> None:
        """Mark a step, and end the training where the budget allows no other (after the over-count of a crash)."""
        if self._step in self._marked:
            ours = self._event()
            same = [event.count for event in self._training.ledger.events if event.times(1) == ours]
            self._marks.append((self._step, sum(same)))
        if self._step < trainer.history.total_steps and not self._affordable():
            trainer.stop(_SPENT)

    # --- after the run -----------------------------------------------------------------------------------------------
    def results(self) -> dict[str, Any]:
        """Return epsilon and its terms for summary.json; write the statement to privacy.json."""
        private, settings = self._training, self.settings
        path = self._folder / "privacy.json"
        statement = private.ledger.statement(settings.delta)
        write_atomic(path, (json.dumps(json.loads(statement.to_json()), indent=2) + "\n").encode())
        return {
            "epsilon": "inf" if math.isinf(statement.epsilon) else statement.epsilon,
            "target_epsilon": settings.target_epsilon,
            "delta": settings.delta,
            "noise_multiplier": private.noise_multiplier,
            "max_grad_norm": settings.max_grad_norm,
            "sample_rate": private.sample_rate,
            "unit": private.ledger.unit,
            "windows": 0 if self._source is None else about(self._source.windows),
            "secure": not settings.insecure_noise,
            "ledger": settings.ledger,
            "statement": str(path),
        }

    def curves(self) -> Sequence[ReportChart]:
        """Return epsilon by step; none where it is infinite."""
        ours = self._event()
        if ours is None:
            return ()
        rest = [event for event in self._training.ledger.events if event.times(1) != ours]
        curve = [(step, spent([*rest, ours.times(count)], self.settings.delta).epsilon) for step, count in self._marks]
        points = [(float(step), epsilon) for step, epsilon in curve if math.isfinite(epsilon)]
        if not points:
            return ()
        return [ReportChart("Privacy spent", f"epsilon at delta {exact(self.settings.delta)}", points, "epsilon")]

    def remarks(self) -> Sequence[str]:
        """Return sentences on what is private, and what is not."""
        settings, ledger = self.settings, self._training.ledger
        noise = "noise that is NOT secure (Philox): for research alone" if settings.insecure_noise else "secure noise"
        epsilon = plain(ledger.epsilon(settings.delta), up=True)
        first = (
            f"Private training: epsilon {epsilon} at delta {exact(settings.delta)} for each "
            f"{ledger.unit}, added or removed; noise multiplier {settings.noise_multiplier:.4g}, clipping norm "
            f"{settings.max_grad_norm:g}, {noise}."
        )
        return [first, *([f"{self._delta_remark}."] if self._delta_remark else []), _NOT_COVERED]

    def close(self) -> None:
        """Detach the clipper and close the ledger."""
        if self._private is not None:
            self._private.close()
            self._private.ledger.close()
        elif self._shared_ledger is not None:
            self._shared_ledger.close()

    @property
    def _training(self) -> PrivateTraining:
        assert self._private is not None  # for the type checker: the run was attached
        return self._private

    def _event(self) -> PrivacyEvent | None:
        """Return this run's event, of which there is one kind."""
        noise, events = self._training.noise_multiplier, self._training.ledger.events
        ours = [event for event in events if event.noise_multiplier == noise and event.amplified]
        return ours[-1].times(1) if ours else None


class _TrainerStep:
    """The trainer's step: each part forward and backward, then noise and update; on a GPU from CUDA graphs."""

    def __init__(
        self, trainer: Trainer, private: PrivateTraining, source: WindowSource, affordable: Callable[[], bool],
        stepped: Callable[[Trainer], None],
    ) -> None:  # fmt: skip
        self._trainer, self._source, self._stepped, self._optimizer = trainer, source, stepped, private.optimizer
        self._affordable, self._processes = affordable, Processes()
        self._loss = torch.zeros((), device=trainer.device)
        self._total = torch.zeros((), device=trainer.device)
        graph = None if trainer.device.type == "cuda" else False
        self._step = PrivateStep(private, self._summed, precision=trainer.precision, graph=graph)

    def __call__(self, batches: Sequence[tuple[Tensor, ...]], learning_rate: float) -> StepResult:
        """Make a step; its loss is the mean over the windows that all processes drew, the previous one if none."""
        if not self._affordable():
            self._trainer.stop(_SPENT)
            return StepResult(self._loss.clone(), torch.zeros_like(self._loss))
        self._total.zero_()
        drawn = self._source.drawn
        for part, tensors in zip(drawn, batches, strict=True):
            if part.mask is not None and part.examples:  # without targets, padding adds nothing to the loss
                tensors[1][part.examples :].fill_(_NO_TARGET)
            self._step(replace(part, tensors=tensors), learning_rate)
        examples = float(sum(part.examples for part in drawn))
        if not examples:
            self._total.zero_()  # an empty draw is padding alone
        if self._processes.size > 1:
            total, count = self._processes.sum_(torch.stack((self._total, self._total.new_tensor(examples))))
            self._loss = torch.where(count > 0, total / count, self._loss)
        elif examples:
            self._loss = self._total / examples
        self._stepped(self._trainer)
        return StepResult(self._loss.clone(), self._optimizer.grad_norm.float().clone())

    def _summed(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the windows' losses, and add it to the total."""
        windows = (targets[:, 0] != _NO_TARGET).sum()
        loss = self._trainer.objective(self._trainer.model, inputs, targets) * windows
        self._total.add_(loss.detach())
        return loss


# --- windows of tokens -----------------------------------------------------------------------------------------------
class _TokenWindows:
    """Disjoint windows of tokens, by number; `halved` makes them inputs and targets."""

    def __init__(self, tokens: Tokens, context: int, halved: Callable[[NDArray[np.int64]], Batch]) -> None:
        self._tokens, self._context, self._halved = tokens, context, halved

    def __len__(self) -> int:
        return len(self._tokens) // (self._context + 1)

    def __getitem__(self, index: Tensor) -> Batch:
        return self._halved(gather(self._tokens, index.numpy() * (self._context + 1), self._context))


class WindowSource(TokenSource):
    """Poisson draws of disjoint windows, in parts of at most the config's micro-batch; `drawn` are the current ones."""

    fixed = False

    def __init__(self, tokens: Tokens, config: TrainConfig, fingerprint: str) -> None:
        super().__init__(tokens, config, fingerprint=fingerprint)
        self.microbatch = None  # the draws are split here
        self._data = _TokenWindows(tokens, config.context, self._windows)
        self._rows = config.microbatch
        self.windows = len(self._data)
        self.rate = min(1.0, config.batch_size / max(1, about(self.windows)))
        self.private: PrivateTraining | None = None
        self.drawn: list[DrawnBatch] = []
        if config.batch_size > self.windows:
            raise ConfigError(
                f"not enough data: the training part has {self.windows} windows of {config.context + 1} tokens, a "
                f"batch draws {config.batch_size} of them; give --data more text, or a smaller --batch-size"
            )

    def batches(self, steps: range, position: dict[str, int], *, pin: bool) -> Generator[Sequence[Batch]]:
        """Iterate the parts of each step. Draws are never repeated, not even after a resumption."""
        assert self.private is not None  # for the type checker: set when it was attached
        self.drawn = []
        for part in self.private._draws(self._data, steps=len(steps), microbatch=self._rows if pin else None):
            self.drawn += [part] if pin else split_draw(part, self._rows)
            if part.last:
                yield [tuple(x.pin_memory() if pin else x for x in batch.tensors) for batch in self.drawn]
                self.drawn = []


def split_draw(draw: DrawnBatch, rows: int) -> list[DrawnBatch]:
    """Split a draw into parts of at most `rows` rows, without padding, which only CUDA graphs need."""
    if draw.rows <= rows:
        return [draw]
    parts = list(zip(*(x.split(rows) for x in draw.tensors), strict=True))
    return [
        replace(draw, tensors=part, mask=None, last=number == len(parts), examples=len(part[0]), rows=len(part[0]))
        for number, part in enumerate(parts, 1)
    ]
