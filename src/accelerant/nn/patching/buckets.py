"""Calls whose lengths vary, padded on the right to a few lengths (buckets) that have graphs.

Whether a model allows that is known from its class and config (`obstacle`), and tried once (`tried`): what a caller
gets must not depend on the padding, and must be what the model computes without it.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from accelerant.nn.patching import capture
from accelerant.nn.patching.capture import POSITIONS, HostWork, Padding, Reason, flattened

_PARTS = 7  # buckets between 0 and the longest call, of one width in its upper half: about 12% more tokens
_MOST_PADDING = 0.12, 0.2  # of tokens of one length, of two: in the mean, above which lengths get graphs of their own
_MOST_BUCKETS = 16
_MULTIPLE, ALIGNED = 4, 16  # of which lengths of buckets are, long ones of the second: they have the same kernels
_MOST_PLANS = 1024  # keys of calls that are remembered
_RECENT = 64  # calls whose lengths are remembered

_FILLS = {
    "input_ids": None, "inputs_embeds": 0.0, "attention_mask": 0, "labels": -100, "shift_labels": -100,
    "position_ids": POSITIONS, "token_type_ids": 0, "decoder_input_ids": None, "decoder_inputs_embeds": 0.0,
    "decoder_attention_mask": 0,
}  # fmt: skip
"""Values that pad arguments; None: the token for padding."""

_ENCODER = ("input_ids", "inputs_embeds", "attention_mask")
_DECODER = ("labels", "decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask")
_INPUTS = ("input_features", "input_values", "pixel_values", "attention_mask")
"""Arguments of models with an encoder and a decoder: those of each, and those of encoders that take no tokens."""

_LOSSES = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForTokenClassification", "ForSequenceClassification")
_GENERATION = ("ForConditionalGeneration", "MTModel", "LMHeadModel")
"""Classes whose losses are means over labels that count, or over sequences; those with an encoder and a decoder."""

_LOSS_FUNCTIONS = {
    "ForCausalLMLoss", "ForMaskedLMLoss", "ForTokenClassification", "ForSequenceClassificationLoss", "causal_loss",
    "masked_loss",
}  # fmt: skip

_LOW = (torch.bfloat16, torch.float16)


# --- which lengths ---------------------------------------------------------------------------------------------------
class Lengths:
    """The lengths of calls that differ in nothing else, and those of their graphs.

    A call has one length, that of its tokens, or two: an encoder's and a decoder's.
    """

    def __init__(self, limits: tuple[int | None, ...]) -> None:
        self._limits, self._widths, self.longest = limits, [0] * len(limits), (0,) * len(limits)
        self._seen: deque[tuple[int, ...]] = deque(maxlen=_RECENT)
        self._padded: deque[tuple[int, int]] = deque(maxlen=_RECENT)  # tokens added, and those that there were
        self._others = 0  # calls of other lengths than the first

    def see(self, lengths: tuple[int, ...]) -> int:
        """Count a call; return how many of those remembered had its lengths."""
        self._others += bool(self._seen) and lengths != self._seen[0]
        self._seen.append(lengths)
        return self._seen.count(lengths)

    def vary(self) -> bool:
        """Return whether several calls had other lengths than the first; a last batch alone does not count."""
        return self._others > 1

    def choose(
        self, lengths: tuple[int, ...], captured: Sequence[tuple[int, ...]], more: bool = True
    ) -> tuple[int, ...]:  # fmt: skip
        """Return the lengths whose graphs serve a call: some that are captured, or those of the next capture.

        Without `more` that is one which nothing captured covers.
        """
        if not covers(self.longest, lengths):  # all are captured again: the largest comes first
            self.longest = tuple(map(self._most, range(len(lengths))))
        chosen = min((each for each in captured if covers(each, lengths)), key=sum, default=self.longest)
        added = sum(chosen) - sum(lengths) + sum(each for each, _ in self._padded)
        tokens = sum(lengths) + sum(each for _, each in self._padded)
        most = _MOST_PADDING[len(lengths) - 1]
        if more and added > most * tokens and 0 < len(captured) < _MOST_BUCKETS:
            bucket = tuple(map(min, chosen, map(self._bucket, range(len(lengths)), lengths)))
            if (sum(chosen) - sum(bucket)) * (1 + len(self._padded)) > most * tokens:  # else others save more
                chosen = bucket
        self._padded.append((sum(chosen) - sum(lengths), sum(lengths)))
        return chosen

    def _most(self, which: int) -> int:
        """Return the longest bucket of one of the lengths, and set the width of those below it."""
        seen, limit = [each[which] for each in self._seen], self._limits[which]
        longest, shortest = max(*seen, self.longest[which]), min(seen)
        multiple = self._multiple(longest)
        width = self._widths[which] = max(multiple, multiple * round(longest / multiple / _PARTS))
        if longest == shortest and len(self._limits) > 1:
            return longest  # the other one varies
        margin = width if longest - shortest > 2 * width else multiple  # longer ones are to be expected
        found = -(-longest // margin) * margin
        return found if limit is None or found <= limit else max(longest, limit)

    def _bucket(self, which: int, length: int) -> int:
        """Return the smallest bucket for a length: half as wide from each half of the longest one down."""
        bucket, width = self.longest[which], self._widths[which]
        half, multiple = bucket // 2, self._multiple(bucket)
        while bucket - width >= length:
            bucket -= width
            if bucket <= half:
                half //= 2
                width = max(multiple, width // 2 // multiple * multiple)
        return bucket

    @staticmethod
    def _multiple(longest: int) -> int:
        return ALIGNED if longest >= 2 * _PARTS * ALIGNED else _MULTIPLE


def covers(longer: tuple[int, ...], lengths: tuple[int, ...]) -> bool:
    """Return whether no length is longer than its counterpart."""
    return all(map(int.__ge__, longer, lengths))


# --- which calls -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Call:
    """A call whose lengths may be padded."""

    family: Any  # its key without the lengths
    lengths: tuple[int, ...]  # in tokens: of all arguments, or of an encoder's and a decoder's
    limits: tuple[int | None, ...]  # the longest that the model allows; None for any
    names: tuple[str, ...]  # of all arguments, given by position or added
    values: list[Any]
    fills: tuple[tuple[int, Any] | None, ...]  # which length each tensor has, and what pads it; None without


_Plan = tuple[Call, tuple[int, ...], int | None]


class Buckets:
    """Calls of a model that may be padded."""

    def __init__(self, model: nn.Module) -> None:
        self.reason = obstacle(model)
        self._plans: dict[Any, _Plan | None] = {}  # by key
        if self.reason is not None:
            return
        inner = _inner(model)
        config: Any = inner.config
        parameters = inspect.signature(model.forward).parameters.values()
        self._parameters = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
        self.causal = _is_causal(inner)
        self._classifies = type(inner).__name__.endswith("ForSequenceClassification")
        self._groups: list[tuple[str, ...]] = [tuple(_FILLS)]  # arguments of one length
        if getattr(config, "is_encoder_decoder", False):
            self._groups = [_ENCODER, _DECODER] if _takes_tokens(inner) else [_DECODER]
        elif self._classifies:
            self._groups = [tuple(name for name in _FILLS if name != "labels")]
        token = getattr(config, "pad_token_id", None)
        token = token if isinstance(token, int) and 0 <= token < getattr(config, "vocab_size", 0) else 0
        self._token = token if self._classifies else _Token(token)  # which tells where a sequence ends
        names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
        found = [getattr(config, name, None) for name in names]
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
        call, shape, mask = plan
        if mask is not None:
            device = next(x.device for x in values if isinstance(x, Tensor))
            values = values.copy()
            values[mask : mask + 1] = [torch.ones(shape, dtype=torch.int64, device=device)]
        return replace(call, values=values)

    def _plan(self, key: tuple[Any, ...], values: Sequence[Any]) -> _Plan | None:
        """Return a call without its arguments, and the shape and place of a mask that is to be added.

        Models that attend in both directions need one.
        """
        first = len(values) - len(key[0])
        names = (*self._parameters[:first], *key[0])
        given = dict(zip(names, values, strict=False))
        if len(given) < len(values) or not self._allows(given):
            return None  # an argument given twice, or too many: the model raises
        tensors = {name: x for name, x in given.items() if isinstance(x, Tensor) and x.dim() > 1}
        groups = [[name for name in group if name in tensors] for group in self._groups]
        groups = [group for group in groups if group]
        lengths = [{tensors[name].shape[1] for name in group} for group in groups]
        if not groups or any(len(each) > 1 for each in lengths):
            return None
        if self._groups != [_DECODER] and groups[0][0] not in ("input_ids", "inputs_embeds"):
            return None
        mask, shape = None, tuple(tensors[groups[0][0]].shape[:2])
        if "attention_mask" in self._groups[0] and not self.causal and given.get("attention_mask") is None:
            if "attention_mask" not in self._parameters:
                return None
            given["attention_mask"] = torch.ones(shape, dtype=torch.int64)
            mask = list(given).index("attention_mask")
            groups[0].append("attention_mask")
        fills, parts = list[tuple[int, Any] | None](), list[Any]()
        for name, value in given.items():
            if not isinstance(value, Tensor):
                parts.append(value)
                continue
            which = next((number for number, group in enumerate(groups) if name in group), None)
            fill = self._token if _FILLS.get(name, 0) is None else _FILLS.get(name)
            fills.append(None if which is None else (which, fill))
            parts.append((name, value.shape if which is None else (value.shape[0], *value.shape[2:]), value.dtype,
                          value.requires_grad))  # fmt: skip
        family = key[0], tuple(parts), *key[2:]
        limits = (self.limit,) * len(groups)
        return Call(family, tuple(each.pop() for each in lengths), limits, tuple(given), [], tuple(fills)), shape, mask

    def _allows(self, given: dict[str, Any]) -> bool:
        """Return whether each argument is one that can be padded, or that no position has a part in."""
        for name, value in given.items():
            if isinstance(value, Tensor):
                dims = 3 if name.endswith("inputs_embeds") else 2
                padded = any(name in group for group in self._groups)
                whole = (name == "labels" and self._classifies) or (self._groups == [_DECODER] and name in _INPUTS)
                if value.dim() and not whole and (not padded or value.dim() != dims):
                    return False
            elif not isinstance(value, bool | None) and (name, value) != ("logits_to_keep", 0):
                return False
        return True


def _takes_tokens(model: Any) -> bool:
    """Return whether the encoder of a model takes tokens: not images or speech."""
    return getattr(model, "main_input_name", "input_ids") == "input_ids"


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
    pairs = bool(getattr(config, "is_encoder_decoder", False))
    if not (kind.__name__.endswith("Model") or kind.__name__.endswith(_GENERATION if pairs else _LOSSES)):
        return f"the loss of a {kind.__name__} may count positions"
    loss = getattr(inner.__dict__.get("_loss_function"), "__name__", None)
    if loss is not None and loss not in _LOSS_FUNCTIONS:
        return f"the loss {loss} may count positions"
    if not getattr(kind, "_supports_sdpa", False):
        return f"a {kind.__name__} has an attention of its own"
    if any(word in name for name in config.to_dict() for word in ("expert", "router", "moe")):
        return "experts count the tokens that reach them"
    padded = inner if not pairs or _takes_tokens(inner) else inner.get_decoder()
    for module in padded.modules():
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


def tried(
    run: Callable[..., Any], call: Call, lengths: tuple[int, ...], model: nn.Module, draws: bool
) -> Padding:  # fmt: skip
    """Return how calls are padded to lengths, tried with one; raise Reason if what a caller gets depends on that.

    `draws` says that the forward pass draws random numbers: outputs are then compared in evaluation.
    """
    shorter = list(map(min, call.lengths, [each - 1 for each in lengths]))
    if len(set(zip(shorter, lengths, strict=True))) < len(lengths):
        shorter[-1] -= 1  # outputs tell by their lengths which of the two they have
    fills = iter(call.fills)
    values = [
        x[:, : shorter[fill[0]]].contiguous() if isinstance(x, Tensor) and (fill := next(fills)) is not None else x
        for x in call.values
    ]
    if min(shorter) < 1:
        raise Untrue("a call of one token cannot be tried with fewer")

    def outputs(fills: Sequence[Any] | None, parts: Callable[[Any], list[Tensor]]) -> list[Tensor]:
        given = values if fills is None else Padding(lengths, tuple(fills), ()).padded(values)
        with torch.no_grad():
            return parts(run(**dict(zip(call.names, given, strict=True))))

    with _without_traces(model):
        exact, long = outputs(None, _flat), outputs(call.fills, _flat)
        dims = _dims(exact, long, shorter, lengths)
        if draws:
            model.eval()
            exact, long = outputs(None, _direct), outputs(call.fills, _direct)
        other = outputs([fill and (fill[0], _other(fill[1])) for fill in call.fills], _direct if draws else _flat)
        seen = Padding(lengths, call.fills, _dims(exact, long, shorter, lengths))
    for place, (one, two, three) in enumerate(zip(exact, long, other, strict=True)):
        two, three = (seen.cut(x, place, tuple(shorter)).nan_to_num() for x in (two, three))
        if not near(two, three, 1e-5, 2e-3):  # sums in any order leave the last bits open
            raise Untrue("its results depend on the tokens that pad a call")
        if not near(one.nan_to_num(), two, 1e-2, 5e-2):
            raise Untrue("its results depend on the length that a call is padded to")
    return Padding(lengths, call.fills, dims)


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


def _dims(
    exact: Sequence[Tensor], long: Sequence[Tensor], shorter: Sequence[int], longer: Sequence[int]
) -> tuple[tuple[int, int] | None, ...]:  # fmt: skip
    """Return the dimension of each output that has a length of the call, and which one."""
    dims, pairs = list[tuple[int, int] | None](), list(zip(shorter, longer, strict=True))
    if len(exact) != len(long):
        raise Untrue("the number of its outputs depends on the length")
    for one, two in zip(exact, long, strict=True):
        changed = [(dim, pair) for dim, pair in enumerate(zip(one.shape, two.shape, strict=True)) if pair[0] != pair[1]]
        if len(changed) > 1 or any(pair not in pairs for _, pair in changed):
            tokens = [" and ".join(map(str, each)) for each in (shorter, longer)]
            raise Untrue(
                f"an output of {tuple(one.shape)} for {tokens[0]} tokens is {tuple(two.shape)} for {tokens[1]}"
            )
        dims.append((changed[0][0], pairs.index(changed[0][1])) if changed else None)
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
