"""How a model is trained: one frozen dataclass, checked when it is made, that can be written as JSON."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from accelerant.errors import ConfigError, FormatError

__all__ = ["GraphUse", "Log", "OptimizerName", "Precision", "Schedule", "TrainConfig", "require_type"]

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
