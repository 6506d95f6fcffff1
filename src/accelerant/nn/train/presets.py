"""What a training run is made of: the recipe (numbers) and the run (recipe, data, seed, device).

`PRESETS` holds three recipes. tiny is for any machine; small and gpt2 want a GPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from accelerant.errors import ConfigError, FormatError

__all__ = ["PRESETS", "Recipe", "RunConfig", "preset"]

STDLIB = "stdlib"


@dataclass(frozen=True, slots=True)
class Recipe:
    """The numbers of a run: model, batch, optimiser, schedule.

    Attributes:
        name: how the command line calls it.
        tokenizer: "bytes" (256 tokens) or "bpe" (trained on the corpus).
        vocab_size: tokens the tokenizer may have.
        context: tokens in a training window.
        layers, heads, width: the transformer's shape.
        batch_size: windows in a step.
        micro_batch: windows on the device at once; gradients of a step add up over them.
        steps: optimiser steps, unless the run says otherwise.
        learning_rate: the peak, after a linear warm-up over `warmup` of the steps; falls along a cosine to
            `final_lr_ratio` of it.
        weight_decay: of matrices; vectors have none.
        beta1, beta2: AdamW's decay of its averages.
        clip: largest norm of the gradient.
        validations: how often the held-out loss is taken on the way (once more at the end).
        validation_tokens: tokens read for the last one; a quarter of them on the way.
        sample_tokens: length of the text written at the end.
        checkpoint_every_s: seconds between checkpoints.
        cpu_threads: on the CPU, the most threads to compute with; 0 for one a core.
    """

    name: str
    tokenizer: Literal["bytes", "bpe"]
    vocab_size: int
    context: int
    layers: int
    heads: int
    width: int
    batch_size: int
    micro_batch: int
    steps: int
    learning_rate: float
    warmup: float = 0.05
    final_lr_ratio: float = 0.02
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    validations: int = 4
    validation_tokens: int = 1 << 18
    sample_tokens: int = 400
    checkpoint_every_s: float = 300.0
    cpu_threads: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = "0 or more" if field.name in _MAY_BE_ZERO else "above 0"
            if isinstance(value, int | float) and (value < 0 or (value == 0 and least == "above 0")):
                raise ConfigError(f"{field.name} must be {least}, got {value}")
        if self.tokenizer not in ("bytes", "bpe"):
            raise ConfigError(f"tokenizer must be bytes or bpe, got {self.tokenizer!r}")
        if self.batch_size % self.micro_batch:
            raise ConfigError(f"micro_batch must divide the batch of {self.batch_size}, got {self.micro_batch}")

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step learns from."""
        return self.batch_size * self.context


_MAY_BE_ZERO = (
    "warmup",
    "final_lr_ratio",
    "weight_decay",
    "beta1",
    "beta2",
    "validations",
    "checkpoint_every_s",
    "cpu_threads",
)

PRESETS: dict[str, Recipe] = {
    "tiny": Recipe(
        name="tiny",
        tokenizer="bytes",
        vocab_size=256,
        context=64,
        layers=2,  # wide and shallow learns most in two minutes on a CPU
        heads=4,
        width=128,
        batch_size=16,
        micro_batch=16,
        steps=1200,
        learning_rate=4e-3,
        validation_tokens=1 << 16,
        # A second thread gives 1.4x on an idle machine, but one that must wait for its core a few ms at each of
        # some hundred joins makes a step 20 times longer on a busy one. And one thread gives the same bits on
        # machines with few cores and with many.
        cpu_threads=1,
    ),
    "small": Recipe(
        name="small",
        tokenizer="bpe",
        vocab_size=8192,
        context=256,
        layers=6,
        heads=6,
        width=384,
        batch_size=64,
        micro_batch=64,
        steps=2000,
        learning_rate=1e-3,
    ),
    "gpt2": Recipe(
        name="gpt2",
        tokenizer="bpe",
        vocab_size=50257,
        context=1024,
        layers=12,
        heads=12,
        width=768,
        batch_size=32,
        micro_batch=32,
        steps=2000,
        learning_rate=6e-4,
        validation_tokens=1 << 19,
        sample_tokens=300,
    ),
}


def preset(name: str) -> Recipe:
    """The recipe called name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A whole run, as config.json keeps it: what is needed to do it again.

    Attributes:
        recipe: the numbers; `steps` is the run's own.
        data: ("stdlib",), or absolute paths of files and folders.
        seed: of initial weights, batches and sample; 0 to 2**63 - 1.
        deterministic: same seed and device give the same bits, at some cost in speed on a GPU.
    """

    recipe: Recipe
    data: tuple[str, ...] = (STDLIB,)
    seed: int = 0
    deterministic: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be 0 to 2**63 - 1, got {self.seed}")
        if not self.data:
            raise ConfigError("data must name stdlib or at least one path")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is its inverse."""
        return {**dataclasses.asdict(self), "data": list(self.data)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Read what `to_dict` wrote.

        Raises:
            FormatError: a field is missing, unknown or out of range.
        """
        try:
            rest = {**values, "recipe": Recipe(**values["recipe"]), "data": tuple(values["data"])}
            return cls(**rest)
        except (KeyError, TypeError, ConfigError) as error:
            raise FormatError(f"not the settings of a run: {error}") from None
