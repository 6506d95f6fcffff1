"""The configuration of a training (`TrainConfig`), and of a language model's on text with its presets (`RunConfig`)."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import torch

from accelerant._renamed import checked_arguments, missing_arguments, renamed_arguments, understood_arguments
from accelerant.config import DTYPE_NAMES
from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import clipped
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.registry import DeviceLike, find_device, is_automatic

OptimizerName = Literal["adamw", "sgd"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["auto", "float32", "bfloat16", "float16", "fp8"]
GraphUse = Literal["auto", "on", "off"]
Log = Literal["jsonl", "tensorboard"]
ReduceDtype = Literal["float32", "bfloat16"]
TokenizerName = Literal["bytes", "bpe"]
ModelName = Literal["gpt", "llama", "rnn"]

STDLIB = "stdlib"

_WORDS = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
_POSITIVE = frozenset({
    "epochs", "steps", "batch_size", "microbatch", "accumulate", "context", "learning_rate", "eps", "max_grad_norm",
    "evaluate_every", "evaluations", "patience", "checkpoint_every", "profile", "timeout_s", "vocab_size", "layers",
    "heads", "width", "validation_tokens", "sample_tokens", "side_share", "cpu_threads",
})  # fmt: skip
_RENAMED = {"clip": "max_grad_norm", "beta1": "betas", "beta2": "betas", "micro_batch": "microbatch", "folder": "out"}
_UNDERSTOOD = {
    "lr": "learning_rate", "output_dir": "out", "gradient_accumulation_steps": "accumulate", "max_steps": "steps",
    "num_train_epochs": "epochs", "lr_scheduler_type": "schedule", "warmup_ratio": "warmup", "optim": "optimizer",
    "timeout": "timeout_s",
}  # fmt: skip
"""Names of a setting in other libraries, first those of transformers' TrainingArguments."""

_MOST = {"layers": 1 << 12, "validations": 1 << 16, "sample_tokens": 1 << 20}
"""Largest values of a RunConfig's fields, for files with values that would keep the machine busy for days."""

_MOST_STEPS = 10**9
_BATCH_SIZE = 32
T = TypeVar("T")


def _check_field(name: str, value: object, hint: Any) -> None:
    if isinstance(hint, types.UnionType):  # of a type and None
        if value is None:
            return
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise ConfigError(f"{name} must be {' or '.join(get_args(hint))}, got {clipped(value)}")
        return
    if hint == tuple[float, float]:
        if not isinstance(value, tuple) or len(value) != 2:
            raise ConfigError(f"{name} must be two numbers, got {clipped(value)}")
        for number in value:
            _require_type(name, number, float)
            if not 0 <= number < 1:
                raise ConfigError(f"{name} must be 0 or more and below 1, got {clipped(value)}")
        return
    if get_origin(hint) is tuple:
        if not isinstance(value, tuple) or not all(isinstance(text, str) for text in value):
            raise ConfigError(f"{name} must be a tuple of strings, got {clipped(value)}")
        return
    _require_type(name, value, hint)
    if name == "seed" and not 0 <= value < 2**63:  # type: ignore[operator]  # an int, as required above
        raise ConfigError(f"seed must be 0 to 2**63 - 1, got {value}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        least = "above 0" if name in _POSITIVE else "0 or more"
        if value < 0 or (value == 0 and least == "above 0"):
            raise ConfigError(f"{name} must be {least}, got {clipped(value)}")


def _require_type(name: str, value: object, kind: type) -> None:
    """Raise ConfigError unless a value is of a type; whole numbers are valid as floats, booleans are no numbers."""
    fits = isinstance(value, (int, float) if kind is float else kind) and isinstance(value, bool) == (kind is bool)
    if not fits or (isinstance(value, float) and not math.isfinite(value)):
        raise ConfigError(f"{name} must be {_WORDS[kind]}, got {clipped(value)}")


def _path(value: str | os.PathLike[str] | None) -> str | None:
    return os.fspath(value) if isinstance(value, os.PathLike) else value or None


_MISSING = {
    "bf16": 'precision="bfloat16"',
    "fp16": 'precision="float16"',
    "dtype": "precision=",
    "per_device_train_batch_size": "batch_size=, the rows of a step on all devices together",
    "resume": "fit(..., resume=True)",
    "resume_from_checkpoint": "fit(..., resume=True)",
}
"""Names of transformers and others -> what to write here."""


def _divided(values: dict[str, Any], batch: int) -> None:
    """Replace `microbatch`, if it is among settings, by accumulate; ConfigError unless it divides the batch."""
    if "microbatch" not in values:
        return
    rows = values.pop("microbatch")
    _check_field("batch_size", batch, int)
    _check_field("microbatch", rows, int)
    if "accumulate" in values:
        raise ConfigError(f"accumulate={values['accumulate']} and microbatch={rows} say the same: give one")
    if batch % rows:
        raise ConfigError(f"microbatch must divide the batch of {batch}, got {rows}")
    values["accumulate"] = batch // rows


def _takes_microbatch(kind: type[T]) -> type[T]:
    """Let the constructor of a configuration take `microbatch`."""
    return checked_arguments(kind, lambda _, values: _divided(values, values.get("batch_size", _BATCH_SIZE)))


@understood_arguments(**_UNDERSTOOD)
@missing_arguments(**_MISSING)
@renamed_arguments(**_RENAMED)
@_takes_microbatch
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The hyperparameters and options of a training.

    A step updates the parameters once, from `batch_size` rows, which several processes share equally. A row is a sample
    of a tensor or dataset, or a window of `context` tokens of a token file. None means that something is not set.

    Attributes:
        epochs: passes over the data; steps = ceil(epochs * rows / batch_size). Ignored if `steps` is given.
        steps: optimizer steps; None to derive them from epochs.
        batch_size: rows in a step; ignored for a DataLoader, which has its own.
        accumulate: number of micro-batches in a step; divides batch_size. `microbatch`, the rows of each, is taken in
            its place. Their gradients are accumulated, and only one micro-batch's activations are in memory at a time.
            For a DataLoader, the number of its batches in a step. Of several processes each has as many micro-batches
            as its rows need, of at most batch_size / accumulate. With "cross_entropy" a micro-batch is weighted by its
            targets other than -100; with a custom loss or the model's own, all are weighted equally.
        context: tokens in a window of a token file.
        optimizer: "adamw" or "sgd" of accelerant.nn.optim.
        learning_rate: the peak; `lr` is understood.
        schedule: what follows the warm-up: half a "cosine", a "linear" decay, or "constant".
        warmup: fraction of the steps over which the learning rate rises linearly.
        warmup_steps: their number, in place of the fraction.
        final_lr_ratio: final learning rate over the peak.
        weight_decay: of parameters with two dimensions or more; biases, norms and matches of `no_decay` have none.
        no_decay: patterns of parameter names ("*embedding*").
        betas, eps: of AdamW.
        momentum: of SGD.
        max_grad_norm: maximum norm of all gradients together; None for no clipping.
        precision: "float32"; "bfloat16" for autocast with unchanged parameters; "float16" for the same with a loss
            scale that adapts on the device (see LossScale in step.py); "fp8" for bfloat16 with the linear
            products of accelerant.nn's blocks in 8-bit floating point, on a GPU of compute capability 8.9 or later
            (evaluations use bfloat16); "auto" for bfloat16 on a GPU with native support, else float32. "fp32", "bf16",
            "fp16" and torch's dtypes are understood.
        recompute: patterns of module names ("blocks.*") whose activations are recomputed in the backward pass instead
            of saved (gradient checkpointing).
        graph: whether to replay steps as a CUDA graph: "off", "on", or "auto" for where it is possible. The model's
            Python code runs in the first steps only, so a model whose steps differ needs "off".
        device: what accelerant.Accelerator takes: "auto" or None, "cpu", "cuda:1", a torch.device. The model is moved
            there.
        seed: of the data's order; 0 to 2**63 - 1.
        deterministic: whether the same input gives the same bits, at some cost in speed on a GPU.
        evaluate_every: steps between evaluations; None for `evaluations` evenly spaced ones.
        evaluations: their number, including the one after the last step.
        patience: evaluations without a better loss after which training stops; None for never.
        min_delta: decrease of the loss that counts as better.
        keep_best: whether the model gets the parameters of its best evaluation at the end.
        out: folder for checkpoints and logs; None to write nothing. `output_dir` is understood.
        checkpoint_every: steps between checkpoints; None for time alone.
        checkpoint_every_s: seconds between checkpoints; 0 for one after each step.
        log: "jsonl" (metrics.jsonl), or "tensorboard" in addition.
        profile: number of steps to profile after a few warm-up steps, into trace.json and kernels.txt; None for none.
        predict_memory: whether to predict the peak memory before the first step.
        reduce_dtype: in which several processes add up their gradients: "float32", or "bfloat16" for half the traffic.
        timeout_s: seconds after which training ends with TimeLimitExceeded, after its step; None for no limit.
    """

    epochs: float = 1.0
    steps: int | None = None
    batch_size: int = _BATCH_SIZE
    accumulate: int = 1
    context: int = 1024
    optimizer: OptimizerName = "adamw"
    learning_rate: float = 1e-3
    schedule: Schedule = "cosine"
    warmup: float = 0.05
    warmup_steps: int | None = None
    final_lr_ratio: float = 0.0
    weight_decay: float = 0.01
    no_decay: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    momentum: float = 0.9
    max_grad_norm: float | None = 1.0
    precision: Precision = "auto"
    recompute: tuple[str, ...] = ()
    graph: GraphUse = "off"
    device: DeviceLike = "auto"
    seed: int = 0
    deterministic: bool = False
    evaluate_every: int | None = None
    evaluations: int = 5
    patience: int | None = None
    min_delta: float = 0.0
    keep_best: bool = False
    out: str | os.PathLike[str] | None = None
    checkpoint_every: int | None = None
    checkpoint_every_s: float = 300.0
    log: Log = "jsonl"
    profile: int | None = None
    predict_memory: bool = True
    reduce_dtype: ReduceDtype = "float32"
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("precision", "reduce_dtype"):
            given = str(getattr(self, name)).removeprefix("torch.")
            object.__setattr__(self, name, DTYPE_NAMES.get(given, given))
        object.__setattr__(self, "device", _device_name(self.device))
        object.__setattr__(self, "out", _path(self.out))
        for name in ("betas", "no_decay", "recompute"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, hint in get_type_hints(type(self)).items():
            _check_field(name, getattr(self, name), str if name == "device" else hint)
        for name, advice in (("warmup", ": give a number of steps as warmup_steps"), ("final_lr_ratio", "")):
            if (value := getattr(self, name)) > 1:
                raise ConfigError(f"{name} must be a fraction, 0 to 1, got {value}{advice}")
        if self.momentum >= 1:
            raise ConfigError(f"momentum must be below 1, got {self.momentum}")
        for name in ("profile", "log"):
            if self.out is None and getattr(self, name) not in (None, "jsonl"):
                raise ConfigError(f"{name}={getattr(self, name)!r} writes files: give a folder as out")

    @property
    def microbatch(self) -> int:
        """Rows on the device at a time; for a DataLoader, those of its batches."""
        return max(1, self.batch_size // self.accumulate)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values; `from_dict` is the inverse."""
        values = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        """Read the result of `to_dict`; FormatError for a field unknown or out of range."""
        try:
            return cls(**values)
        except (TypeError, ConfigError) as error:
            raise FormatError(f"not the settings of a training: {error}") from None


def _device_name(device: Any) -> str:
    """Return the name of what a `device` argument means, which stays automatic if it is."""
    if is_automatic(device):
        return "auto"
    if isinstance(device, ComputeDevice):
        return device.torch_device or device.label
    if not isinstance(device, str | torch.device):
        find_device(device)  # raises
    if not (name := str(device).strip()):
        raise ConfigError("device must not be empty: give auto, cpu or cuda")
    return name


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def paths_of(data: Paths) -> tuple[str, ...]:
    """Return one name of a file or folder, or several, as strings; raise ConfigError for anything else."""
    names = [data] if isinstance(data, str | os.PathLike) else data
    if not isinstance(names, Sequence) or not all(isinstance(name, str | os.PathLike) for name in names):
        raise ConfigError(f"data must be a path or several, got {clipped(data)}")
    return tuple(os.fspath(name) for name in names)


@dataclass(frozen=True, slots=True)
class RunConfig:
    """A run of `accelerant train`: the training of a language model on text. The presets are instances.

    Attributes:
        name: of the preset.
        training: the hyperparameters. Its accumulate says how many windows the device computes at a time; the run sets
            its device, and its folder if another is given.
        tokenizer: "bytes" (256 tokens) or "bpe" (trained on the corpus).
        vocab_size: maximum number of tokens of the tokenizer.
        layers, heads, width: the model's shape; "rnn" has no heads.
        model: "gpt", "llama" for a Llama tied to its embedding, or "rnn" for a CharRNN with LSTM layers.
        validations: number of evaluations before the final one.
        validation_tokens: tokens read by the final evaluation; the others read a quarter of them.
        sample_tokens: length of the text generated at the end.
        side_share: bound for short runs: all evaluations together read at most this fraction of the tokens that the
            steps read, and so does the sample; None for no bound.
        cpu_threads: number of threads on the CPU, at most one per usable core; None for torch's, which follows
            OMP_NUM_THREADS.
        data: "stdlib", or the path of a file or folder, or several; kept as a tuple of strings.
        init_from: folder of the model and tokenizer that the training begins with, which give layers, heads, width,
            vocab_size, tokenizer and model; None for random weights.
    """

    name: str
    training: TrainConfig
    tokenizer: TokenizerName
    vocab_size: int
    layers: int
    heads: int
    width: int
    validations: int = 4
    validation_tokens: int = 1 << 18
    sample_tokens: int = 400
    side_share: float | None = None
    cpu_threads: int | None = None
    model: ModelName = "gpt"
    data: Paths = (STDLIB,)
    init_from: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", paths_of(self.data))
        object.__setattr__(self, "init_from", _path(self.init_from))
        for name, hint in get_type_hints(type(self)).items():
            if name not in ("training", "data"):
                _check_field(name, getattr(self, name), hint)
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name} must be at most {most}, got {getattr(self, name)}")
        if self.model != "rnn" and self.width % self.heads:
            raise ConfigError(f"width must be a multiple of heads, got width {self.width} and {self.heads} heads")
        if self.model == "llama" and self.width // self.heads % 2:
            raise ConfigError(f"heads of a Llama must have an even width, got {self.width // self.heads}")
        if self.training.steps is None:
            raise ConfigError("a run needs its number of steps: give the training steps")
        if self.training.steps > _MOST_STEPS:
            raise ConfigError(f"steps must be at most {_MOST_STEPS:,}, got {self.training.steps}")
        if not self.data:
            raise ConfigError("data must name stdlib or at least one path")
        if "" in paths_of(self.data):
            raise ConfigError("data names an empty path: give stdlib, files or folders")

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        assert self.training.steps is not None  # for the type checker: checked above
        return self.training.steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens that an optimizer step reads."""
        return self.training.batch_size * self.training.context

    def parameter_count(self, vocab_size: int) -> int:
        """Return the number of weights with a vocabulary of this size, without biases and norms."""
        if self.model == "rnn":  # four gates of inputs and states; tables of inputs and outputs
            return (8 * self.layers * self.width + 2 * vocab_size) * self.width
        positions = self.training.context if self.model == "gpt" else 0
        return (12 * self.layers * self.width + vocab_size + positions) * self.width

    def epoch_steps(self, epochs: float, tokens: int) -> int:
        """Return the steps of so many passes over the training tokens; ConfigError for no positive finite number."""
        _check_field("epochs", epochs, float)
        if (steps := epochs * tokens / self.tokens_per_step) >= 2**53:
            raise ConfigError(f"epochs must be fewer: {epochs:g} are {steps:g} steps")
        return max(1, math.ceil(steps))

    def step_flops(self, vocab_size: int) -> float:
        """Return the operations of a step, forward and backward, with a vocabulary of this size.

        Six for each weight and token, and those of the attention's products over half the context.
        """
        attention = 0 if self.model == "rnn" else 6 * self.layers * self.training.context * self.width
        return float((6 * self.parameter_count(vocab_size) + attention) * self.tokens_per_step)

    @property
    def validation_sizes(self) -> tuple[int, int]:
        """Tokens that an evaluation reads during training, and at the end."""
        last = self.validation_tokens
        if self.side_share:
            bound = self.side_share * self.steps * self.tokens_per_step
            last = min(last, int(bound / (1 + self.validations / 4)))
        return last // 4, last

    @property
    def sample_size(self) -> int:
        """Tokens to generate for the sample; each reads up to a whole context."""
        if not self.side_share:
            return self.sample_tokens
        return min(self.sample_tokens, max(1, int(self.side_share * self.steps * self.training.batch_size)))

    @understood_arguments(**_UNDERSTOOD)
    @renamed_arguments(**_RENAMED)
    def replaced(self, **changes: Any) -> RunConfig:
        """Return a copy with other values of fields, of this class or of its training.

        `microbatch`, the windows on the device at a time, sets accumulate; it stays as it is if only `batch_size`
        changes. Raises ConfigError for a value of another type or range, and unless microbatch divides batch_size.
        """
        own = {field.name for field in dataclasses.fields(self)}
        training = {name: changes.pop(name) for name in list(changes) if name not in own}
        if "batch_size" in training or "microbatch" in training:
            batch = training.setdefault("batch_size", self.training.batch_size)
            if "accumulate" not in training:
                training.setdefault("microbatch", self.training.microbatch)
            _divided(training, batch)
        if training:
            changes["training"] = dataclasses.replace(self.training, **training)
        return dataclasses.replace(self, **changes)

    def resized(self, batch_size: int | None, microbatch: int | None) -> RunConfig:
        """Return a copy with other sizes of a step; raise ConfigError if one is below 1 or microbatch does not divide.

        `batch_size` None keeps it; `microbatch` None takes the largest divisor of the batch up to the present one.
        """
        batch = self.training.batch_size if batch_size is None else batch_size
        if batch < 1:
            raise ConfigError(f"batch_size must be above 0, got {batch}")
        if microbatch is None:
            most = min(batch, self.training.microbatch)
            microbatch = next(count for count in range(most, 0, -1) if batch % count == 0)
        return self.replaced(batch_size=batch, microbatch=microbatch)

    def command(self, out: str, backend: str, more: Sequence[str] = ()) -> str:
        """Return the command line that starts this run in `out` anew; empty if its name is no preset's."""
        if self.name not in PRESETS:
            return ""
        training, known = self.training, PRESETS[self.name]
        words = ["accelerant", "train", "--preset", self.name, "--data", *paths_of(self.data), "--device", backend]
        if self.init_from:
            words += ["--init-from", str(self.init_from)]
        recipe = ("steps", "batch_size", "microbatch", "learning_rate", "max_grad_norm", "context")
        options = [(name, getattr(training, name), getattr(known.training, name)) for name in recipe]
        shape = () if self.init_from else ("layers", "width", "heads")
        options += [(name, getattr(self, name), getattr(known, name)) for name in shape]
        options += [("threads", self.cpu_threads, known.cpu_threads), ("seed", training.seed, 0)]
        options += [("log", training.log, "jsonl"), ("precision", training.precision, "auto")]
        for name, value, usual in (*options, ("reduce_dtype", training.reduce_dtype, "float32")):
            if value != usual:
                words += [f"--{name.replace('_', '-')}", str(value)]
        if training.deterministic != (backend == "cpu"):
            words.append("--deterministic" if training.deterministic else "--no-deterministic")
        if training.recompute:
            words.append("--recompute")
        return shlex.join([*words, *more, *(() if "--out" in more else ("--out", out))])

    def to_dict(self) -> dict[str, Any]:
        """Return the "run" entry of config.json; `from_dict` is the inverse."""
        training = self.training
        recipe = {name: getattr(self if hasattr(self, name) else training, name) for name in _RECIPE}
        recipe["betas"] = list(training.betas)
        options = {name: getattr(training, name) for name in _OPTIONS}
        return {"recipe": recipe, "data": list(paths_of(self.data)), **options, "recompute": bool(training.recompute)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Read the result of `to_dict`; FormatError if a field is missing, unknown, of another type or out of range."""
        try:
            options = dict(values)
            recipe, data = dict(options.pop("recipe")), options.pop("data")
            if not isinstance(data, list):
                raise ConfigError(f"data must be a list of strings, got {clipped(data)}")
            recompute = options.pop("recompute", False)
            _require_type("recompute", recompute, bool)
            if unknown := [*(recipe.keys() - _RECIPE), *(options.keys() - _OPTIONS)]:
                raise ConfigError(f"unknown field {clipped(min(unknown))}")
            if missing := set(_RECIPE[:_REQUIRED]) - recipe.keys():
                raise ConfigError(f"{min(missing)} is missing")
            own = {field.name for field in dataclasses.fields(cls)} & recipe.keys()
            training: dict[str, Any] = {"steps": 1, "recompute": ("blocks.*",) if recompute else ()}
            run = _run(training=training, data=tuple(data), **{name: recipe.pop(name) for name in own})
            return run.replaced(**recipe, **options)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise FormatError(f"not the settings of a run: {error}") from None


_RECIPE = (
    "name", "tokenizer", "vocab_size", "context", "layers", "heads", "width", "batch_size", "microbatch", "steps",
    "learning_rate", "warmup", "warmup_steps", "final_lr_ratio", "weight_decay", "betas", "max_grad_norm",
    "validations", "validation_tokens", "sample_tokens", "side_share", "checkpoint_every_s", "cpu_threads",
    "model", "init_from",
)  # fmt: skip
_REQUIRED = 11
_OPTIONS = ("seed", "deterministic", "log", "profile", "precision", "reduce_dtype")
"""Fields of a run's "recipe" in config.json (the first _REQUIRED without a default), and those next to it."""

_GPT = TrainConfig(final_lr_ratio=0.02, weight_decay=0.1, betas=(0.9, 0.95), graph="auto", deterministic=True)


def _run(name: str, training: dict[str, Any], **fields: Any) -> RunConfig:
    """Return the run of a model in the folder runs/NAME, with some values of its training."""
    return RunConfig(name, dataclasses.replace(_GPT, out=f"runs/{name}", **training), **fields)


_TINY = _run(
    "tiny",
    # In the same time, batches of 16 learn less, and so do half and twice the learning rate.
    {"context": 64, "batch_size": 8, "steps": 2400, "learning_rate": 2e-3, "checkpoint_every_s": 30.0},
    tokenizer="bytes", vocab_size=256, layers=2, heads=4, width=128,  # wide and shallow learns most in two minutes
    validation_tokens=1 << 16,
    # On a busy machine a second thread waits for its core at many joins of a step. One thread also gives the same
    # bits for any number of cores.
    cpu_threads=1,
)  # fmt: skip
_SMALL = _run(
    "small", {"context": 256, "batch_size": 64, "steps": 2000, "learning_rate": 1e-3},
    tokenizer="bpe", vocab_size=8192, layers=6, heads=6, width=384, side_share=0.25,
)  # fmt: skip
_GPT2 = _run(
    "gpt2", {"context": 1024, "batch_size": 32, "steps": 2000, "learning_rate": 6e-4},
    tokenizer="bpe", vocab_size=50257, layers=12, heads=12, width=768, side_share=0.25,
    validation_tokens=1 << 19, sample_tokens=300,
)  # fmt: skip
_RNN = _run(
    "rnn",
    {"context": 64, "batch_size": 16, "steps": 600, "learning_rate": 4e-3, "weight_decay": 0.0,
     "checkpoint_every_s": 30.0},
    tokenizer="bytes", vocab_size=256, layers=1, heads=1, width=256, validation_tokens=1 << 16, cpu_threads=1,
    model="rnn",
)  # fmt: skip
_LLAMA = _run(
    "llama",
    {"context": 256, "batch_size": 8, "steps": 300, "learning_rate": 4e-3, "checkpoint_every_s": 30.0},
    tokenizer="bpe", vocab_size=2048, layers=3, heads=6, width=192, validation_tokens=1 << 15, sample_tokens=100,
    model="llama",
)  # fmt: skip
PRESETS: dict[str, RunConfig] = {run.name: run for run in (_TINY, _SMALL, _GPT2, _RNN, _LLAMA)}


def preset(name: str) -> RunConfig:
    """Return the preset of a name; raise ConfigError if there is none."""
    if name not in PRESETS:
        raise ConfigError(f"unknown preset {name!r}; known are {', '.join(PRESETS)}")
    return PRESETS[name]


# --- how long a run takes ---------------------------------------------------------------------------------------------
_CPU_TOKENS = 4096  # at a time: logits of more leave the caches and take gigabytes (small: 64 windows, 4.5 GB)


def windows_at_once(microbatch: int, context: int, device: torch.device) -> int:
    """Return the micro-batch to compute with: on the CPU its largest divisor of at most _CPU_TOKENS tokens."""
    if device.type != "cpu":
        return microbatch
    most = max(1, _CPU_TOKENS // context)
    return next(count for count in range(min(microbatch, most), 0, -1) if microbatch % count == 0)


_PROBE_S = 0.1
_SHORT_FLOPS = 2e11  # seconds on any CPU: not worth the probe
_NOTED_S, _LONG_S = 20.0, 3600.0  # a shorter run needs no estimate; a longer one may not be what the user wants


def cpu_flops_per_s(run: RunConfig) -> float:
    """Return about how many operations a second a step of a run does on the CPU, from a product of its shape.

    The rest of a step, whose operations are not counted, takes about as long as its products.
    """
    rows = windows_at_once(run.training.microbatch, run.training.context, torch.device("cpu"))
    rows *= 1 if run.model == "rnn" else run.training.context  # a recurrent layer computes one step after the other
    x, weight = torch.ones(min(rows, 512), run.width), torch.ones(run.width, 4 * run.width)
    x @ weight  # starts the threads
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < _PROBE_S:
        x @ weight
        count += 1
    return count * x.numel() * weight.shape[1] / (time.perf_counter() - began)


def duration_note(run: RunConfig, flops_per_s: Callable[[RunConfig], float]) -> str | None:
    """Return a note on how long a run takes on the CPU, None for a short one; of a long one it says what to do."""
    steps, threads = run.steps, torch.get_num_threads()
    flops = steps * run.step_flops(run.vocab_size)
    if flops < _SHORT_FLOPS or (total := flops / (speed := flops_per_s(run))) < _NOTED_S:
        return None
    note = f"{steps:,} steps take about {_duration(total)} on the CPU with {threads} thread{'s' * (threads != 1)}"
    if total < _LONG_S:
        return note
    tiny = preset("tiny")
    less = [f"--steps {max(1, int(steps * _LONG_S / total))} an hour"]
    if run.name != tiny.name:
        seconds = tiny.steps * tiny.step_flops(tiny.vocab_size) / speed
        less.insert(0, f"--preset {tiny.name} about {_duration(seconds)}")
    return f"{note}; {', '.join(less)}; Ctrl-C keeps a checkpoint"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 1.95 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"
