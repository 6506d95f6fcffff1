"""The steps that the suite dp times: ours with and without privacy, and Opacus's; its cases, and how a step is run.

A case is a batch of rows of tokens and a model. Opacus trains the same architecture, GPT-2 with an output layer of its
own (ghost clipping does not take a tied one), with float32 parameters under autocast and torch's AdamW.
"""

from __future__ import annotations

import functools
import gc
import importlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.bench.timer import Timing, time_in_turns
from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.config import PRESETS
from benchmarks.gpt_steps import (
    BETAS,
    RATE,
    WARM_UP,
    WEIGHT_DECAY,
    PlainGPT,
    Step,
    TokenBatches,
    own_step,
    parameter_groups,
    plain_step,
    step_times,
)

__all__ = [
    "GPT2_UNTIED",
    "PEERS",
    "PreparedStep",
    "PrivateCase",
    "PrivateKind",
    "StepMaker",
    "StepResult",
    "opacus_step",
    "parse_case",
    "peer_step",
    "precision_on",
    "private_loop_step",
    "private_step",
    "run_alone",
    "run_in_turns",
    "step_without_privacy",
]

PEERS = ("torch", "opacus ghost", "opacus fast", "opacus hooks")
"""Plain PyTorch without privacy; Opacus with ghost norms, with instantiated norms, and with per-example gradients."""

_NOISE_MULTIPLIER, _MAX_GRAD_NORM = 1.0, 1.0
_DATASET_ROWS = 2**20
"""Rows of the nominal data set that a batch is drawn from."""

GPT2_UNTIED = GPTConfig(vocab_size=50304, tied=False)
_TINY = PRESETS["tiny"]

PreparedStep = tuple[Step, Callable[[], str]]
"""A step, and a function that describes how it ran."""

StepMaker = Callable[[], AbstractContextManager[PreparedStep]]


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PrivateCase:
    """A batch and a model.

    Attributes:
        batch: rows of tokens in a step.
        config: the model; its context is a row's length.
        part: rows of a virtual batch, measured in addition; None for no virtual steps.
        preset: the model is that of the preset tiny.
        loop: a user's own: plain modules and torch's AdamW in an ordinary loop, beside the same without privacy.
    """

    batch: int
    config: GPTConfig
    part: int | None = None
    preset: bool = False
    loop: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or (self.part is not None and (self.part < 1 or self.batch % self.part)):
            raise ConfigError(f"a batch of {self.batch} in parts of {self.part}: give parts that divide it")

    @property
    def name(self) -> str:
        """Batch and length."""
        return f"{self.batch}x{self.config.context}"

    def text(self, variant: str, precision: torch.dtype | None) -> str:
        """Return the case as rows have it."""
        config = self.config
        shape = f"{config.layers} layers of {config.width}, {'tied' if config.tied else 'untied'}"
        loop = ", plain modules in a loop" * self.loop
        return f"{self.name} {shape}, {'bf16 autocast' if precision else 'float32'}{loop}, {variant}"


@dataclass(frozen=True, slots=True)
class PrivateKind:
    """A private step: whether its noise is secure, and the rows of a virtual batch."""

    secure: bool
    part: int | None = None

    @property
    def noise(self) -> str:
        """The noise, as rows name it."""
        return "secure" if self.secure else "Philox"

    @property
    def target_key(self) -> str:
        """The key of its target: its noise, or "parts" for virtual steps."""
        return self.noise if self.part is None else "parts"


def parse_case(text: str, model: GPTConfig = GPT2_UNTIED) -> PrivateCase:
    """Parse "64x1024", "64x1024/16" with virtual batches of 16 rows, "64x256 loop", or "tiny".

    Raises:
        ConfigError: the text is none of these.
    """
    if text == "tiny":
        config = GPTConfig(_TINY.vocab_size, _TINY.training.context, _TINY.layers, _TINY.heads, _TINY.width)
        return PrivateCase(_TINY.training.batch_size, config, preset=True)
    text, loop, _ = text.partition(" loop")
    sizes, divided, part = text.partition("/")
    batch, _, context = sizes.partition("x")
    if not all(number.isdecimal() and int(number) > 0 for number in (batch, context, part if divided else "1")):
        known = '"BATCHxLENGTH", "BATCHxLENGTH/PART", "BATCHxLENGTH loop" or "tiny"'
        raise ConfigError(f"a case is {known}, got {text + loop!r}")
    config = replace(model, context=int(context))
    return PrivateCase(int(batch), config, int(part) if part else None, loop=bool(loop))


def precision_on(where: torch.device) -> torch.dtype | None:
    """Return the dtype of autocast on a device; None for float32."""
    return torch.bfloat16 if where.type == "cuda" else None


# --- ours ------------------------------------------------------------------------------------------------------------


@contextmanager
def step_without_privacy(case: PrivateCase, where: torch.device) -> Iterator[PreparedStep]:
    """Yield a step of ours without privacy."""
    torch.manual_seed(0)
    yield own_step(GPT(case.config).to(where), precision=precision_on(where)), lambda: "TrainStep"


@contextmanager
def private_step(case: PrivateCase, kind: PrivateKind, where: torch.device) -> Iterator[PreparedStep]:
    """Yield a private step of ours, with full masks and its ledger in a file."""
    from accelerant.privacy.dp.sampling import Draw, DrawnBatch
    from accelerant.privacy.dp.training.private import make_private
    from accelerant.privacy.dp.training.step import PrivateStep

    torch.manual_seed(0)
    model = GPT(case.config).to(where)
    optimizer = AdamW(parameter_groups(model), lr=RATE, betas=BETAS)
    rows = kind.part or case.batch
    mask = torch.ones(rows, dtype=torch.bool)
    with tempfile.TemporaryDirectory() as folder, make_private(
        model, optimizer, noise_multiplier=_NOISE_MULTIPLIER, delta=1 / (10 * _DATASET_ROWS),
        max_grad_norm=_MAX_GRAD_NORM, sample_rate=case.batch / _DATASET_ROWS, expected_batch_size=case.batch,
        secure=kind.secure, ledger=Path(folder) / "privacy.jsonl",
    ) as private:  # fmt: skip
        step = PrivateStep(private, model.loss, precision=precision_on(where))

        def call(tokens: Tensor, targets: Tensor) -> Tensor:
            draw = Draw(case.batch)
            for at in range(0, case.batch, rows):
                part = (tokens[at : at + rows], targets[at : at + rows])
                result = step(DrawnBatch(part, mask, at + rows == case.batch, rows, rows, draw), RATE)
            assert result is not None  # for the type checker: the last part makes the step
            return result.loss

        yield call, lambda: f"PrivateStep, {'graphs' if step.captured else 'eager'}"


@contextmanager
def private_loop_step(case: PrivateCase, kind: PrivateKind, where: torch.device) -> Iterator[PreparedStep]:
    """Yield a step of an ordinary private loop over plain modules, with torch's AdamW."""
    from accelerant.privacy.dp.sampling import Draw, DrawnBatch
    from accelerant.privacy.dp.training.private import make_private

    torch.manual_seed(0)
    model = PlainGPT.like(GPT(case.config).to(where))
    fused = where.type == "cuda"
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=RATE, betas=BETAS, fused=fused)
    precision, mask = precision_on(where), torch.ones(case.batch, dtype=torch.bool)
    with make_private(
        model, optimizer, noise_multiplier=_NOISE_MULTIPLIER, delta=1 / (10 * _DATASET_ROWS),
        max_grad_norm=_MAX_GRAD_NORM, sample_rate=case.batch / _DATASET_ROWS, expected_batch_size=case.batch,
        secure=kind.secure,
    ) as private:  # fmt: skip

        def call(tokens: Tensor, targets: Tensor) -> Tensor:
            private.use(DrawnBatch((tokens, targets), mask, True, case.batch, case.batch, Draw(case.batch)))
            with torch.autocast(where.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
                loss: Tensor = model(tokens, targets)
            loss.backward()
            private.optimizer.step()
            private.optimizer.zero_grad()
            return loss.detach()

        yield call, lambda: "make_private"


# --- peers -----------------------------------------------------------------------------------------------------------


@contextmanager
def peer_step(peer: str, case: PrivateCase, where: torch.device) -> Iterator[PreparedStep]:
    """Yield a step of a peer that starts from the weights of ours.

    Raises:
        UnsupportedCase: Opacus cannot be imported, or the model's output layer is tied.
    """
    if case.config.tied:
        raise UnsupportedCase("the peers' model has an output layer of its own: give a config with tied=False")
    torch.manual_seed(0)
    plain = PlainGPT.like(GPT(case.config).to(where), per_example=peer != "torch")
    precision = precision_on(where)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of Opacus's hooks in each step
        if peer == "torch":
            step = plain_step(plain, precision=precision)
        else:
            step, _ = opacus_step(plain, peer.removeprefix("opacus "), precision=precision, batch=case.batch)
        yield step, lambda: peer


def opacus_step(
    model: nn.Module, mode: str, *, precision: torch.dtype | None, batch: int, noise: float = _NOISE_MULTIPLIER,
    bound: float = _MAX_GRAD_NORM,
) -> tuple[Step, Any]:  # fmt: skip
    """Return a private step of Opacus, and its wrapped model.

    Args:
        model: returns logits (B, T, V) of tokens.
        mode: "ghost" or "fast" (two backward passes, gradients of examples never kept), or "hooks".
        noise, bound: noise multiplier and clipping norm.

    Raises:
        UnsupportedCase: Opacus cannot be imported.
    """
    opacus, utils = _opacus("opacus"), _opacus("opacus.utils.fast_gradient_clipping_utils")
    optimizers = _opacus("opacus.optimizers")
    device = next(model.parameters()).device
    inner = torch.optim.AdamW(model.parameters(), RATE, BETAS, weight_decay=WEIGHT_DECAY, fused=device.type == "cuda")
    options = {"noise_multiplier": noise, "max_grad_norm": bound, "expected_batch_size": batch}
    criterion: Any = nn.CrossEntropyLoss()
    if mode == "hooks":
        module = opacus.GradSampleModule(model)
        optimizer = optimizers.DPOptimizer(inner, **options)
    else:
        ghost = mode == "ghost"
        module = opacus.GradSampleModuleFastGradientClipping(model, max_grad_norm=bound, use_ghost_clipping=ghost)
        optimizer = optimizers.DPOptimizerFastGradientClipping(inner, **options)
        criterion = utils.DPLossFastGradientClipping(module, optimizer, criterion)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=precision or torch.bfloat16, enabled=precision is not None):
            logits = module(tokens)
        shape = {} if mode == "hooks" else {"shape": logits.shape}
        loss = criterion(logits.flatten(0, 1).float(), targets.flatten(), **shape)
        loss.backward()
        optimizer.step()
        result: Tensor = loss.detach()
        return result

    return step, module


def _opacus(name: str) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a library that does not load counts as absent; the row says why
        raise UnsupportedCase(f"Opacus cannot be used here: {type(error).__name__}: {error}") from None


# --- running steps ---------------------------------------------------------------------------------------------------

_TOGETHER = 5
"""Steps between two synchronizations with a GPU: the host runs ahead, as in a loop that seldom reads a loss."""


@dataclass(slots=True)
class StepResult:
    """The figures of a step.

    Attributes:
        timing, samples: times of a step, in ms.
        peak: the most bytes allocated, model and optimizer included; None on a CPU.
        losses: losses of the warm-up.
        implementation: how the step ran.
    """

    timing: Timing
    samples: tuple[float, ...]
    peak: int | None
    losses: list[float]
    implementation: str


def run_alone(make: StepMaker, case: PrivateCase, where: torch.device, budget_s: float) -> StepResult:
    """Run a step on a GPU that holds nothing else."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    with make() as (step, describe):
        data = TokenBatches.drawn(case.config, case.batch, where, contiguous=True)
        losses = [step(*data.batch(i)) for i in range(WARM_UP)]
        timing = step_times(step, data, where, budget_s)
        peak = torch.cuda.max_memory_allocated(where)
        return StepResult(timing, timing.samples, peak, [float(loss) for loss in losses], describe())


def run_in_turns(
    makers: Sequence[StepMaker], case: PrivateCase, where: torch.device, budget_s: float
) -> list[StepResult]:
    """Run steps in turns, since a host's speed changes from one second to the next; on a GPU several to a turn."""
    data = TokenBatches.drawn(case.config, case.batch, where, contiguous=True)
    together = _TOGETHER if where.type == "cuda" else 1

    def turn(step: Step) -> None:
        for i in range(together):
            step(*data.batch(i if together > 1 else 0))
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    with ExitStack() as stack:
        steps = [stack.enter_context(make()) for make in makers]
        losses = [[float(step(*data.batch(i))) for i in range(WARM_UP)] for step, _ in steps]
        turns = time_in_turns([functools.partial(turn, step) for step, _ in steps], budget_s=budget_s)
        timings = [Timing.of([each / together for each in timing.samples], wall=True) for timing in turns]
        return [
            StepResult(timing, timing.samples, None, first, describe())
            for timing, first, (_, describe) in zip(timings, losses, steps, strict=True)
        ]
