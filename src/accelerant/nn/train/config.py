"""The configuration of a training, and the presets of `accelerant train`."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from accelerant.errors import ConfigError, FormatError

__all__ = [
    "PRESETS",
    "GraphUse",
    "Log",
    "OptimizerName",
    "Precision",
    "Recipe",
    "RunConfig",
    "Schedule",
    "TrainConfig",
    "preset",
    "require_type",
]

OptimizerName = Literal["adamw", "sgd"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "fp8"]
GraphUse = Literal["auto", "on", "off"]
Log = Literal["jsonl", "tensorboard"]


@dataclass(frozen=True, slots=True)
class TrainConfig:
    """The numbers and choices of a training.

    A step updates the parameters once, from `batch_size` rows. Rows are samples of tensors and datasets, windows of
    `context` tokens of a token file.

    Attributes:
        epochs: passes over the data; steps = ceil(epochs * rows / batch_size). Ignored where `steps` is given.
        steps: optimiser steps; 0: from epochs.
        batch_size: rows of a step; a DataLoader has its own.
        accumulate: parts in which a step's rows are computed; their gradients add up, activations of one part are in
            memory at a time. Divides batch_size; of a DataLoader, so many of its batches make a step. In
            "cross_entropy" a part counts by its targets other than -100; in a loss of your own, or of the model, parts
            count alike.
        context: tokens in a window of a token file.
        optimizer: "adamw" or "sgd", those of accelerant.nn.optim.
        learning_rate: the peak.
        schedule: what follows the warm-up: half a "cosine", a "linear" fall, or "constant".
        warmup: part of the steps over which the rate rises linearly.
        final_lr_ratio: last rate over the peak.
        weight_decay: of parameters of two dimensions and more; biases, norms and what `no_decay` matches have none.
        no_decay: patterns of parameter names ("*embedding*").
        beta1, beta2, eps: of AdamW.
        momentum: of SGD.
        clip: largest norm of all gradients together; 0: no clipping.
        precision: "float32"; "bfloat16", under autocast, the parameters as they are; "fp8": that, with products of the
            linear layers in accelerant.nn's blocks in 8-bit floating-point numbers, on a GPU that has them (compute
            capability 8.9); evaluations are in bfloat16 then. "auto": bfloat16 on a GPU that computes in it natively,
            else float32.
        recompute: patterns of module names ("blocks.*") whose activations are computed again in the backward pass
            instead of kept (gradient checkpointing).
        graph: replay steps as a CUDA graph: "on", or "auto" where it can be. Python code of the model runs in the
            first steps only then, so a model that does something else in each step wants "off".
        device: "auto", "cpu", "cuda", or a device of torch ("cuda:1"). The model is moved there.
        seed: of the order of the data; 0 to 2**63 - 1.
        deterministic: the same bits for the same input, at some cost in speed on a GPU.
        evaluate_every: steps between evaluations; 0: `evaluations` of them, evenly.
        evaluations: how many, the one after the last step included.
        patience: stop after so many evaluations without a better loss; 0: never.
        min_delta: a loss is better if it is lower by more than this.
        keep_best: give the model the parameters of its best evaluation at the end.
        folder: for checkpoints and logs; "" writes nothing.
        checkpoint_every: steps between checkpoints; 0: by time alone.
        checkpoint_every_s: seconds between checkpoints; 0: after each step.
        log: "jsonl" (metrics.jsonl), or "tensorboard" beside it.
        profile: steps to profile, after a few to warm up; 0: none. Writes trace.json and kernels.txt into the folder.
        predict_memory: predict the peak of memory before the first step.
    """

    epochs: float = 1.0
    steps: int = 0
    batch_size: int = 32
    accumulate: int = 1
    context: int = 1024
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    final_lr_ratio: float = 0.0
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = ()
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    momentum: float = 0.9
    clip: float = 1.0
    precision: Precision = "auto"
    recompute: tuple[str, ...] = ()
    graph: GraphUse = "off"
    device: str = "auto"
    seed: int = 0
    deterministic: bool = False
    evaluate_every: int = 0
    evaluations: int = 5
    patience: int = 0
    min_delta: float = 0.0
    keep_best: bool = False
    folder: str = ""
    checkpoint_every: int = 0
    checkpoint_every_s: float = 300.0
    log: Log = "jsonl"
    profile: int = 0
    predict_memory: bool = True

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _require(field.name, getattr(self, field.name), str(field.type))
        for name in ("warmup", "final_lr_ratio"):
            if getattr(self, name) > 1:
                raise ConfigError(f"{name} must be a part, 0 to 1, got {getattr(self, name)}")
        for name in ("beta1", "beta2", "momentum"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be below 1, got {getattr(self, name)}")
        if self.seed >= 2**63:
            raise ConfigError(f"seed must be 0 to 2**63 - 1, got {self.seed}")
        if not self.device:
            raise ConfigError("device must not be empty: give auto, cpu or cuda")
        for name in ("profile", "log"):
            if not self.folder and getattr(self, name) not in (0, "jsonl"):
                raise ConfigError(f"{name}={getattr(self, name)!r} writes files: give a folder")

    @property
    def micro_batch(self) -> int:
        """Rows on the device at once; of a DataLoader they are those of its batches."""
        return max(1, self.batch_size // self.accumulate)

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is its inverse."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Read what `to_dict` wrote.

        Raises:
            FormatError: a field is unknown, of another type or out of range.
        """
        try:
            read: dict[str, Any] = {}
            for name, value in values.items():
                read[name] = tuple(value) if isinstance(value, list) else value
            return cls(**read)
        except (TypeError, ConfigError) as error:
            raise FormatError(f"not the settings of a training: {error}") from None


_CHOICES = {
    "OptimizerName": OptimizerName,
    "Schedule": Schedule,
    "Precision": Precision,
    "Log": Log,
    "GraphUse": GraphUse,
}
_ABOVE_ZERO = ("epochs", "batch_size", "accumulate", "context", "learning_rate", "eps", "evaluations")


def _require(name: str, value: object, wanted: str) -> None:
    """Check one value; wanted is its annotation."""
    if wanted in _CHOICES:
        allowed = get_args(_CHOICES[wanted])
        if value not in allowed:
            raise ConfigError(f"{name} must be {' or '.join(allowed)}, got {value!r}")
        return
    if wanted.startswith("tuple"):
        if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
            raise ConfigError(f"{name} must be a tuple of texts, got {value!r}")
        return
    require_type(name, value, wanted)
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = "above 0" if name in _ABOVE_ZERO else "0 or more"
        if value < 0 or (value == 0 and least == "above 0"):
            raise ConfigError(f"{name} must be {least}, got {value}")


def require_type(name: str, value: object, wanted: str) -> None:
    """Check a value that may come from a file.

    Args:
        wanted: an annotation: int, float, bool or str.

    Raises:
        ConfigError: it is of another type, or no finite number.
    """
    if wanted == "int":
        ok, words = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif wanted == "float":
        ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        words = "a finite number"
    elif wanted == "bool":
        ok, words = isinstance(value, bool), "true or false"
    else:
        ok, words = isinstance(value, str), "text"
    if not ok:
        raise ConfigError(f"{name} must be {words}, got {value!r}")


# --- runs on text ----------------------------------------------------------------------------------------------------


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
        side_share: in a run of few steps, validations together read at most that part of the tokens that the steps
            learn from, and so does the sample; 0 for no such bound.
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
    side_share: float = 0.0
    checkpoint_every_s: float = 300.0
    cpu_threads: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require_type(field.name, value, str(field.type))
            least = "0 or more" if field.name in _MAY_BE_ZERO else "above 0"
            if isinstance(value, int | float) and (value < 0 or (value == 0 and least == "above 0")):
                raise ConfigError(f"{field.name} must be {least}, got {value}")
        for name in ("beta1", "beta2"):
            if getattr(self, name) >= 1:
                raise ConfigError(f"{name} must be below 1, got {getattr(self, name)}")
        if self.tokenizer not in ("bytes", "bpe"):
            raise ConfigError(f"tokenizer must be bytes or bpe, got {self.tokenizer!r}")
        if self.batch_size % self.micro_batch:
            raise ConfigError(f"micro_batch must divide the batch of {self.batch_size}, got {self.micro_batch}")

    def resized(self, batch_size: int | None, micro_batch: int | None) -> Recipe:
        """The recipe with other sizes of a step.

        Args:
            batch_size: None: as it is.
            micro_batch: None: as it is, or as much of that as divides another batch.

        Raises:
            ConfigError: a size below 1; a micro-batch that does not divide the batch.
        """
        batch = self.batch_size if batch_size is None else batch_size
        if batch < 1:
            raise ConfigError(f"batch_size must be above 0, got {batch}")
        rows = micro_batch
        if rows is None:
            rows = next(count for count in range(min(batch, self.micro_batch), 0, -1) if batch % count == 0)
        return dataclasses.replace(self, batch_size=batch, micro_batch=rows)

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimiser step learns from."""
        return self.batch_size * self.context

    @property
    def validation_sizes(self) -> tuple[int, int]:
        """Tokens to read for a validation on the way, and for the last one."""
        last = self.validation_tokens
        if self.side_share:
            all_of_them = self.side_share * self.steps * self.tokens_per_step
            last = min(last, int(all_of_them / (1 + self.validations / 4)))
        return last // 4, last

    @property
    def sample_size(self) -> int:
        """Tokens to write for the sample; each reads up to a whole context."""
        if not self.side_share:
            return self.sample_tokens
        return min(self.sample_tokens, max(1, int(self.side_share * self.steps * self.batch_size)))


_MAY_BE_ZERO = (
    "warmup",
    "final_lr_ratio",
    "weight_decay",
    "beta1",
    "beta2",
    "validations",
    "side_share",
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
        checkpoint_every_s=30.0,  # the run takes minutes, and its checkpoint a few milliseconds
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
        side_share=0.25,
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
        side_share=0.25,
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
        recompute: compute the blocks' activations again in the backward pass instead of keeping them.
        log: "jsonl", or "tensorboard" beside it.
        profile: steps to profile; 0: none.
        precision: as in TrainConfig.
    """

    recipe: Recipe
    data: tuple[str, ...] = (STDLIB,)
    seed: int = 0
    deterministic: bool = True
    recompute: bool = False
    log: Log = "jsonl"
    profile: int = 0
    precision: Precision = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, Recipe):
            raise ConfigError(f"recipe must be a Recipe, got {self.recipe!r}")
        require_type("seed", self.seed, "int")
        require_type("deterministic", self.deterministic, "bool")
        require_type("recompute", self.recompute, "bool")
        require_type("profile", self.profile, "int")
        if self.profile < 0:
            raise ConfigError(f"profile must be 0 or more, got {self.profile}")
        if self.log not in ("jsonl", "tensorboard"):
            raise ConfigError(f"log must be jsonl or tensorboard, got {self.log!r}")
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision must be {' or '.join(get_args(Precision))}, got {self.precision!r}")
        if not isinstance(self.data, tuple) or not all(isinstance(name, str) for name in self.data):
            raise ConfigError(f"data must be a row of texts, got {self.data!r}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be 0 to 2**63 - 1, got {self.seed}")
        if not self.data:
            raise ConfigError("data must name stdlib or at least one path")
        if "" in self.data:
            raise ConfigError("data names an empty path: give stdlib, files or folders")

    def command(self, out: str, backend: str, more: Sequence[str] = ()) -> str:
        """The command line that starts this run from the beginning; empty where none does.

        Args:
            out: the run's folder.
            backend: where it runs.
            more: options of an extension.
        """
        known = PRESETS.get(self.recipe.name)
        if known is None:
            return ""
        words = ["accelerant", "train", "--preset", known.name, "--data", *self.data, "--device", backend]
        for name in ("steps", "batch_size", "micro_batch"):
            if getattr(self.recipe, name) != getattr(known, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(self.recipe, name))]
        if self.seed:
            words += ["--seed", str(self.seed)]
        if self.deterministic != (backend == "cpu"):
            words.append("--deterministic" if self.deterministic else "--no-deterministic")
        if self.recompute:
            words.append("--recompute")
        if self.log != "jsonl":
            words += ["--log", self.log]
        if self.precision != "auto":
            words += ["--precision", self.precision]
        return shlex.join([*words, *more, "--out", out])

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is its inverse."""
        return {**dataclasses.asdict(self), "data": list(self.data)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Read what `to_dict` wrote.

        Raises:
            FormatError: a field is missing, unknown, of another type or out of range.
        """
        try:
            data = values["data"]
            if not isinstance(data, list):
                raise ConfigError(f"data must be a row of texts, got {data!r}")
            rest = {**values, "recipe": Recipe(**values["recipe"]), "data": tuple(data)}
            return cls(**rest)
        except (KeyError, TypeError, ConfigError) as error:
            raise FormatError(f"not the settings of a run: {error}") from None
