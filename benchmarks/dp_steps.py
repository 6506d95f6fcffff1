"""What the suite dp times: its cases, our steps with and without privacy, and how a step is run.

A case is a batch of rows of tokens and a model. A step is called with tokens and targets and gives the loss.
"""

from __future__ import annotations

import functools
import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from accelerant.bench.timer import Timing, time_in_turns
from accelerant.errors import ConfigError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import AdamW
from accelerant.nn.train.presets import PRESETS
from benchmarks.dp_peers import Step
from benchmarks.training import _BETAS, _RATE, _Data, _groups, _times, own_step

__all__ = [
    "BOUND",
    "MODEL",
    "NOISE",
    "WARM_UP",
    "Batches",
    "Case",
    "Found",
    "Kind",
    "Make",
    "Prepared",
    "alone",
    "in_turns",
    "parse_case",
    "precision_on",
    "private_step",
    "without",
]

WARM_UP = 6
NOISE, BOUND = 1.0, 1.0
"""Noise multiplier and clipping norm."""

_ROWS = 2**20
"""Of the data set that a batch is said to be drawn from."""

MODEL = GPTConfig(vocab_size=50304, tied=False)
_TINY = PRESETS["tiny"]

Prepared = tuple[Step, Callable[[], str]]
"""A step, and what says how it ran."""

Make = Callable[[], AbstractContextManager[Prepared]]


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured together.

    Attributes:
        batch: rows of tokens in a step.
        config: of the model; its context is a row's length.
        part: rows of a virtual batch, measured besides; None for no such steps.
        preset: whether it is the model of the preset tiny.
    """

    batch: int
    config: GPTConfig
    part: int | None = None
    preset: bool = False

    def __post_init__(self) -> None:
        if self.batch < 1 or (self.part is not None and (self.part < 1 or self.batch % self.part)):
            raise ConfigError(f"a batch of {self.batch} in parts of {self.part}: give parts that divide it")

    @property
    def name(self) -> str:
        """Batch and length."""
        return f"{self.batch}x{self.config.context}"

    def text(self, how: str, precision: torch.dtype | None) -> str:
        """As rows have it."""
        config = self.config
        shape = f"{config.layers} layers of {config.width}, {'tied' if config.tied else 'untied'}"
        return f"{self.name} {shape}, {'bf16 autocast' if precision else 'float32'}, {how}"


@dataclass(frozen=True, slots=True)
class Kind:
    """A private step: its noise, and the rows of a part."""

    secure: bool
    part: int | None = None

    @property
    def noise(self) -> str:
        """As rows call it."""
        return "secure" if self.secure else "Philox"

    @property
    def asked(self) -> str:
        """What is asked of it: of its noise, or of virtual steps."""
        return self.noise if self.part is None else "parts"


def parse_case(text: str, model: GPTConfig = MODEL) -> Case:
    """A case as the command line names it: "64x1024", "64x1024/16" with virtual batches of 16, or "tiny".

    Raises:
        ConfigError: it is none of these.
    """
    if text == "tiny":
        config = GPTConfig(_TINY.vocab_size, _TINY.context, _TINY.layers, _TINY.heads, _TINY.width)
        return Case(_TINY.batch_size, config, preset=True)
    sizes, divided, part = text.partition("/")
    batch, _, context = sizes.partition("x")
    if not all(each.isdecimal() and int(each) > 0 for each in (batch, context, part if divided else "1")):
        raise ConfigError(f'a case is "BATCHxLENGTH", "BATCHxLENGTH/PART" or "tiny", got {text!r}')
    return Case(int(batch), replace(model, context=int(context)), int(part) if part else None)


def precision_on(where: torch.device) -> torch.dtype | None:
    """Of autocast on a device; None for float32."""
    return torch.bfloat16 if where.type == "cuda" else None


@dataclass(slots=True)
class Found:
    """What running a step gave.

    Attributes:
        timing, samples: of a step, in ms.
        peak: the most bytes allocated, model and optimiser included; None on a CPU.
        losses: of the warm-up.
        implementation: what ran.
    """

    timing: Timing
    samples: tuple[float, ...]
    peak: int | None
    losses: list[float]
    implementation: str


@dataclass(slots=True)
class Batches(_Data):
    """Tokens and targets without gaps, which Opacus needs."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def of(cls, case: Case, where: torch.device) -> Batches:
        """Those of a case."""
        drawn = _Data.drawn(case.config, case.batch, where)
        pairs = [drawn.batch(i) for i in range(len(drawn.rows))]
        return cls(drawn.rows, [(tokens.contiguous(), targets.contiguous()) for tokens, targets in pairs])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets of a step, (B, T) each."""
        return self.pairs[step % len(self.pairs)]


@contextmanager
def without(case: Case, where: torch.device) -> Iterator[Prepared]:
    """A step of ours without privacy."""
    torch.manual_seed(0)
    yield own_step(GPT(case.config).to(where), precision=precision_on(where)), lambda: "TrainStep"


@contextmanager
def private_step(case: Case, kind: Kind, where: torch.device) -> Iterator[Prepared]:
    """A private step of ours. Full masks; its ledger is a file."""
    from accelerant.privacy.dp.sampling import DrawnBatch
    from accelerant.privacy.dp.training.private import make_private
    from accelerant.privacy.dp.training.step import PrivateStep

    torch.manual_seed(0)
    model = GPT(case.config).to(where)
    optimizer = AdamW(_groups(model), lr=_RATE, betas=_BETAS)
    rows = kind.part or case.batch
    mask = torch.ones(rows, dtype=torch.bool)
    with tempfile.TemporaryDirectory() as folder, make_private(
        model, optimizer, noise_multiplier=NOISE, delta=1 / (10 * _ROWS), max_grad_norm=BOUND,
        sample_rate=case.batch / _ROWS, expected_batch_size=case.batch, secure=kind.secure,
        ledger=Path(folder) / "privacy.jsonl",
    ) as private:  # fmt: skip
        step = PrivateStep(private, model.loss, precision=precision_on(where))

        def call(tokens: Tensor, targets: Tensor) -> Tensor:
            for at in range(0, case.batch, rows):
                part = (tokens[at : at + rows], targets[at : at + rows])
                result = step(DrawnBatch(part, mask, at + rows == case.batch, rows, rows), _RATE)
            assert result is not None  # for the type checker: the last part makes the step
            return result.loss

        yield call, lambda: f"PrivateStep, {'graphs' if step.captured else 'eager'}"


def alone(make: Make, case: Case, where: torch.device, budget_s: float) -> Found:
    """A step on a GPU that holds nothing else."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(where)
    with make() as (step, how):
        data = Batches.of(case, where)
        losses = [step(*data.batch(i)) for i in range(WARM_UP)]
        times = _times(step, data, where, budget_s)
        peak = torch.cuda.max_memory_allocated(where)
        return Found(Timing.of(times), tuple(times), peak, [float(loss) for loss in losses], how())


def in_turns(makes: Sequence[Make], case: Case, where: torch.device, budget_s: float) -> list[Found]:
    """Steps on a CPU, whose speed is another from one second to the next: called in turns."""
    data = Batches.of(case, where)
    with ExitStack() as stack:
        steps = [stack.enter_context(make()) for make in makes]
        losses = [[float(step(*data.batch(i))) for i in range(WARM_UP)] for step, _ in steps]
        timings = time_in_turns([functools.partial(step, *data.batch(0)) for step, _ in steps], budget_s=budget_s)
        return [
            Found(timing, timing.samples, None, first, how())
            for timing, first, (_, how) in zip(timings, losses, steps, strict=True)
        ]
