"""Calls whose lengths vary, padded to a few lengths (buckets) that have graphs.

Positions are padded on the right. Whether a model allows that is known from its class and config (`obstacle`), and
tried once with the first arguments whose length varies (`tried`): what a caller gets must not depend on the
padding, and must be what the model computes without it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.nn.patching import capture
from accelerant.nn.patching.capture import POSITIONS, Padding, Reason, flattened
from accelerant.nn.patching.host import HostWork

_PARTS = 7  # buckets between 0 and the longest call, of one width in its upper half: about 12% more tokens
_MOST_PADDING = 0.12  # of tokens, in the mean, above which a length gets graphs of its own
_MOST_BUCKETS = 16
_MULTIPLE, ALIGNED = 4, 16  # of which lengths of buckets are, long ones of the second: they have the same kernels
_MOST_PLANS = 1024  # keys of calls that are remembered
_RECENT = 64  # calls whose lengths are remembered

_FILLS = {
    "input_ids": None, "inputs_embeds": 0.0, "attention_mask": 0, "labels": -100, "shift_labels": -100,
    "position_ids": POSITIONS, "token_type_ids": 0,
}  # fmt: skip
"""Values that pad arguments; None: the token for padding."""

_LOSSES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
"""Classes whose losses are means over labels that count, or over sequences."""

_LOSS_FUNCTIONS = {
    "ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss", "causal_loss",
    "masked_loss",
}  # fmt: skip

_LOW = (torch.bfloat16, torch.float16)


# --- which lengths ---------------------------------------------------------------------------------------------------


class Lengths:
    """The lengths of calls that differ in nothing else, and those of their graphs."""

    def __init__(self, limit: int | None) -> None:
        self._limit, self._width, self.longest = limit, 0, 0
        self._seen: deque[int] = deque(maxlen=_RECENT)
        self._padded: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # tokens added, and those that there were
        self._others = 0  # calls of other lengths than the first

    def see(self, length: int) -> int:
        """Count a call; return how many of those remembered had its length."""
        self._others += bool(self._seen) and length != self._seen[0]
        self._seen.append(length)
        return self._seen.count(length)

    def vary(self) -> bool:
        """Return whether several calls had other lengths than the first; a last batch alone does not count."""
        return self._others > 1

    def choose(self, length: int, captured: Sequence[int]) -> int:
        """Return the length whose graphs serve a call: one of those captured, or that of the next capture."""
        if length > self.longest:  # all are captured again: the largest comes first
            longest, shortest = max(self._seen), min(self._seen)
            multiple = self._multiple(longest)
            self._width = max(multiple, multiple * round(longest / multiple / _PARTS))
            margin = self._width if longest - shortest > 2 * self._width else multiple  # longer ones are to be expected
            found = -(-longest // margin) * margin
            self.longest = found if self._limit is None or found <= self._limit else max(longest, self._limit)
        chosen = min((each for each in captured if each >= length), default=self.longest)
        added = chosen - length + sum(each for each, _ in self._padded)
        tokens = length + sum(each for _, each in self._padded)
        if added > _MOST_PADDING * tokens and 0 < len(captured) < _MOST_BUCKETS:
            bucket = min(chosen, self._bucket(length))
            if (chosen - bucket) * (1 + len(self._padded)) > _MOST_PADDING * tokens:  # else others save more
                chosen = bucket
        self._padded.append((chosen - length, length))
        return chosen

    def _bucket(self, length: int) -> int:
        """Return the smallest bucket for a length: half as wide from each half of the longest one down."""
        bucket, width, half = self.longest, self._width, self.longest // 2
        multiple = self._multiple(self.longest)
        while bucket - width >= length:
            bucket -= width
            if bucket <= half:
                half //= 2
                width = max(multiple, width // 2 // multiple * multiple)
        return bucket

    @staticmethod
    def _multiple(longest: int) -> int:
        return ALIGNED if longest >= 2 * _PARTS * ALIGNED else _MULTIPLE


# --- which calls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """A call whose length may be padded.

    Attributes:
        family: its key without the length.
        length: in tokens.
        names: of all arguments, given by position or added.
        values: those arguments.
        fills: the value that pads each tensor among them.
    """

    family: Any
    length: int
    names: tuple[str, ...]
    values: list[Any]
    fills: tuple[Any, ...]


_Plan = tuple[Any, tuple[int, int], tuple[str, ...], tuple[Any, ...], int | None]


class Buckets:
    """Calls of a model that may be padded."""

    def __init__(self, model: nn.Module) -> None:
        self.reason = obstacle(model)
        self.limit: int | None = None
        self._plans: dict[Any, _Plan | None] = {}  # by key
        if self.reason is not None:
            return
        inner = _inner(model)
        config: Any = inner.config
        parameters = inspect.signature(model.forward).parameters.values()
        self._parameters = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        self.causal = _is_causal(inner)
        token = getattr(config, "pad_token_id", None)
        self._classifies = type(inner).__name__.endswith("ForSequenceClassification")
        token = token if isinstance(token, int) and 0 <= token < config.vocab_size else 0
        self._token = token if self._classifies else _Token(token)  # which tells where a sequence ends
        found = [getattr(config, name, None) for name in ("max_position_embeddings", "n_positions", "max_seq_len")]
        for name, module in inner.named_modules():
            if name.endswith("position_embeddings") and getattr(module, "padding_idx", None) is not None:
                found.append(module.num_embeddings - module.padding_idx - 1)  # its positions begin after that
        self.limit = min((each for each in found if isinstance(each, int) and each > 0), default=None)

    def call(self, key: tuple[Any, ...], values: list[Any]) -> Call | None:
        """Return the call with this key and these arguments; None if it cannot be padded."""
        if self.reason is not None:
            return None
        if key not in self._plans:
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = self._plan(key, values)
        plan = self._plans[key]
        if plan is None:
            return None
        family, shape, names, fills, mask = plan
        if mask is not None:
            device = next(x.device for x in values if isinstance(x, Tensor))
            values = values.copy()
            values[mask : mask + 1] = [torch.ones(shape, dtype=torch.int64, device=device)]
        return Call(family, shape[1], names, values, fills)

    def _plan(self, key: tuple[Any, ...], values: Sequence[Any]) -> _Plan | None:
        """Return a call's family, rows and length, names, padding values, and the place of a mask that is to be added.

        Models that attend in both directions need one.
        """
        first = len(values) - len(key[0])
        names = (*self._parameters[:first], *key[0])
        given = dict(zip(names, values, strict=False))
        if len(given) < len(values):
            return None  # an argument given twice, or too many: the model raises
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        if not isinstance(tokens, Tensor) or tokens.dim() < 2 or not self._allows(given, tokens.shape):
            return None
        rows, length = tokens.shape[:2]
        mask = None
        if not self.causal and given.get("attention_mask") is None:
            if "attention_mask" not in self._parameters:
                return None
            given["attention_mask"] = torch.ones((rows, length), dtype=torch.int64)
            mask = list(given).index("attention_mask")
        fills, parts = list[Any](), list[Any]()
        for name, value in given.items():
            if not isinstance(value, Tensor):
                parts.append(value)
                continue
            long = name in _FILLS and not (name == "labels" and self._classifies)
            fill = _FILLS.get(name) if long else None
            fills.append(self._token if long and fill is None else fill)
            shape = (value.shape[0], *value.shape[2:]) if long else value.shape
            parts.append((name, shape, value.dtype, value.requires_grad))
        return (key[0], tuple(parts), *key[2:]), (rows, length), tuple(given), tuple(fills), mask

    def _allows(self, given: dict[str, Any], shape: torch.Size) -> bool:
        """Return whether each argument is one that can be padded, or that no position has a part in."""
        for name, value in given.items():
            if name == "labels" and self._classifies:
                continue
            if isinstance(value, Tensor):
                dims = 3 if name == "inputs_embeds" else 2
                if value.dim() and (name not in _FILLS or value.dim() != dims or value.shape[1] != shape[1]):
                    return False
            elif not isinstance(value, bool | None) and (name, value) != ("logits_to_keep", 0):
                return False
        return True


def _inner(model: nn.Module) -> Any:
    """Return the model of transformers inside of an adapter's."""
    find = getattr(model, "get_base_model", None)
    return model if find is None else find()


def _is_causal(model: nn.Module) -> bool:
    """Return whether no position attends to a later one, so that padding needs no mask."""
    found = [vars(module)["is_causal"] for module in model.modules() if "is_causal" in vars(module)]
    return bool(found) and all(found)


def obstacle(model: nn.Module) -> str | None:
    """Return why calls of a model keep their lengths; None if they may be padded."""
    inner = _inner(model)
    kind, config = type(inner), getattr(inner, "config", None)
    if config is None or not kind.__module__.startswith("transformers."):
        return f"it is not known whether positions of a {kind.__name__} are independent but for attention"
    if not (kind.__name__.endswith("Model") or kind.__name__.endswith(_LOSSES)):
        return f"the loss of a {kind.__name__} may count positions"
    loss = getattr(inner.__dict__.get("_loss_function"), "__name__", None)
    if loss is not None and loss not in _LOSS_FUNCTIONS:
        return f"the loss {loss} may count positions"
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder and a decoder have a length each"
    if not getattr(kind, "_supports_sdpa", False):
        return f"a {kind.__name__} has an attention of its own"
    if any(word in name for name in config.to_dict() for word in ("expert", "router", "moe")):
        return "experts count the tokens that reach them"
    for module in inner.modules():
        if isinstance(module, nn.modules.conv._ConvNd | nn.modules.batchnorm._NormBase | nn.RNNBase):
            return f"a {type(module).__name__} sees other positions"
    if (reason := rotates_by_length(inner)) is not None:
        return reason
    if any(getattr(each, "is_prompt_learning", False) for each in getattr(model, "peft_config", {}).values()):
        return "an adapter adds tokens"
    if kind.__name__.endswith("ForSequenceClassification") and getattr(config, "pad_token_id", None) is None:
        return "without a pad_token_id the last token is the one that is classified"
    return None


def rotates_by_length(model: nn.Module) -> str | None:
    """Return that a model's rotary embedding depends on the length; None if it does not."""
    for module in model.modules():
        rotary = getattr(module, "rope_type", None)  # by the kind of layer, in some models
        if {"dynamic", "longrope"} & set(rotary.values() if isinstance(rotary, dict) else (rotary,)):
            return "its rotary embedding depends on the length"
    return None


# --- whether it is true ----------------------------------------------------------------------------------------------


class Untrue(Reason):
    """Why calls keep their lengths, found by a trial."""


class NotYet(Reason):
    """Why a call runs eagerly that a later one of its kind need not."""


def tried(run: Callable[..., Any], call: Call, length: int, model: nn.Module, draws: bool) -> Padding:
    """Return how calls are padded to a length, tried with one; raise Reason if what a caller gets depends on it.

    `draws` says that the forward pass draws random numbers: outputs are then compared in evaluation.
    """
    shorter = call.length if call.length < length else call.length - 1
    fills = iter(call.fills)
    values = [
        x[:, :shorter].contiguous() if isinstance(x, Tensor) and next(fills) is not None else x for x in call.values
    ]
    if shorter < 1:
        raise Untrue("a call of one token cannot be tried with fewer")

    def outputs(fills: Sequence[Any] | None, parts: Callable[[Any], list[Tensor]]) -> list[Tensor]:
        given = values if fills is None else Padding(length, tuple(fills), ()).padded(values)
        with torch.no_grad():
            return parts(run(**dict(zip(call.names, given, strict=True))))

    with _without_traces(model):
        exact, long = outputs(None, _flat), outputs(call.fills, _flat)
        dims = _dims(exact, long, shorter, length)
        if draws:
            model.eval()
            exact, long = outputs(None, _direct), outputs(call.fills, _direct)
        other = outputs([_other(fill) for fill in call.fills], _direct if draws else _flat)
        seen = Padding(length, call.fills, _dims(exact, long, shorter, length))
    for place, (one, two, three) in enumerate(zip(exact, long, other, strict=True)):
        two, three = (seen.cut(x, place, shorter).nan_to_num() for x in (two, three))
        if not near(two, three, 1e-5, 2e-3):  # sums in any order leave the last bits open
            raise Untrue("its results depend on the tokens that pad a call")
        if not near(one.nan_to_num(), two, 1e-2, 5e-2):
            raise Untrue("its results depend on the length that a call is padded to")
    return Padding(length, call.fills, dims)


def _flat(output: Any) -> list[Tensor]:
    return flattened(output)[0]


def _direct(output: Any) -> list[Tensor]:
    """Return the tensors of an output itself: it has a cache in evaluation."""
    return [x for x in (output.values() if hasattr(output, "values") else output) if isinstance(x, Tensor)]


def _other(fill: Any) -> Any:
    """Return another value that may pad: another token, other embeddings."""
    return _Token(fill - 1 if fill else 1) if isinstance(fill, _Token) else 1.0 if isinstance(fill, float) else fill


class _Token(int):
    """The token that pads, where any would do."""


def _dims(exact: Sequence[Tensor], long: Sequence[Tensor], shorter: int, longer: int) -> tuple[int | None, ...]:
    """Return the dimension of each output that has the call's length."""
    dims: list[int | None] = []
    if len(exact) != len(long):
        raise Untrue("the number of its outputs depends on the length")
    for one, two in zip(exact, long, strict=True):
        changed = [dim for dim, (a, b) in enumerate(zip(one.shape, two.shape, strict=True)) if a != b]
        if len(changed) > 1 or any((one.shape[dim], two.shape[dim]) != (shorter, longer) for dim in changed):
            raise Untrue(f"an output of {tuple(one.shape)} for {shorter} tokens is {tuple(two.shape)} for {longer}")
        dims.append(changed[0] if changed else None)
    return tuple(dims)


def near(one: Tensor, two: Tensor, tolerance: float, low_tolerance: float) -> bool:
    """Return whether tensors are equal within a tolerance of their norm, which is another in 16 bits."""
    if not one.is_floating_point():
        return torch.equal(one, two)
    low = one.dtype in _LOW or torch.is_autocast_enabled(one.device.type)
    difference, norm = (one.double() - two.double()).norm(), one.double().norm()
    return bool(difference <= (low_tolerance if low else tolerance) * norm + 1e-6)


@contextmanager
def _without_traces(model: nn.Module) -> Iterator[None]:
    """Leave the random number generators, and which modules train, as they were."""
    training = [(module, module.training) for module in model.modules()]
    devices = [torch.cuda.current_device()] if capture.DEVICE == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        for module, was in training:
            module.training = was


def rehearse(
    run: Callable[..., Any], model: nn.Module, names: Sequence[str], values: Sequence[Any], work: HostWork
) -> None:  # fmt: skip
    """Run a call that is to be captured once, with its backward pass: its kernels are compiled and chosen.

    `work` notes what it does on the host.
    """
    with _without_traces(model):
        with work.noted():
            found = _flat(run(**dict(zip(names, values, strict=True))))
        outputs = [x for x in found if x.requires_grad]
        wanted = [x for x in (*values, *model.parameters()) if isinstance(x, Tensor) and x.requires_grad]
        if outputs:
            torch.autograd.grad(outputs, wanted, [torch.zeros_like(x) for x in outputs], allow_unused=True)
