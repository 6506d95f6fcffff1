"""The forward methods of models with a loss over the vocabulary.

In training the logits of a language model are read by nobody but its loss, and they are its largest tensor. So the loss
is made from the hidden states, some rows at a time, and the logits are made when somebody reads them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import UnsupportedCase
from accelerant.nn._patch.attention import causal_mask
from accelerant.nn._patch.swaps import MARK, NAME, Forward, is_bare
from accelerant.ops._library import autocast_dtype

__all__ = ["causal_lm_forward", "masked_lm_forward", "signed"]


_MASKED_MOST = 4096
"""Tokens of the longest sequence that gets a mask of ours: its memory is their square, 16 MiB here."""


@functools.cache
def signed(forward: Forward, kind: Any) -> Forward:
    """A copy of `forward` with the signature of the class `kind`'s own, which generate() and Trainer read."""
    assert isinstance(forward, types.FunctionType)  # for the type checker: one of this package's own
    copied = types.FunctionType(
        forward.__code__, forward.__globals__, forward.__name__, forward.__defaults__, forward.__closure__
    )
    copied.__doc__ = forward.__doc__
    copied.__signature__ = inspect.signature(kind.forward)  # type: ignore[attr-defined]
    return copied


def causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """That of GPT2LMHeadModel, LlamaForCausalLM and its kin."""
    options = getattr(self, MARK).options
    labels = kwargs.get("labels")
    if labels is None or len(args) > options["positional"] or "_loss_function" in self.__dict__:
        return type(self).forward(self, *args, **kwargs)
    del kwargs["labels"]
    wants = kwargs.pop("return_dict", None)
    wants = self.config.return_dict if wants is None else wants
    if self.training and wants and kwargs.get("use_cache") is None and _needs_no_cache(args, kwargs):
        kwargs["use_cache"] = False  # of a training step nobody reads it, and it keeps blocks from being one function
        # A reentrant checkpoint passes on another tensor, without what we know of it.
        checkpoints = getattr(getattr(self, options["base"]), "gradient_checkpointing", False)
        if not checkpoints and not _masked(self.config, args, kwargs):
            tokens = args[0] if args else kwargs.get("input_ids")
            tokens = kwargs["inputs_embeds"] if tokens is None else tokens
            kwargs["attention_mask"] = causal_mask(tokens.shape[1], tokens.device)
    extra = {name: value for name, value in kwargs.items() if name not in options["named"]}
    keep = kwargs.get("logits_to_keep", 0)
    whole = isinstance(keep, int) and keep == 0
    head = self.lm_head
    if options["fused"] and self.training and whole and is_bare(head, nn.Linear) and head.bias is None:
        kwargs.pop("logits_to_keep", None)
        found = getattr(self, options["base"])(*args, **kwargs, return_dict=True)
        hidden = found.last_hidden_state
        make: Callable[..., Tensor] = functools.partial(ops.linear_cross_entropy, hidden, head.weight)
        loss = _loss(make, hidden.dtype, hidden.device, labels, **extra)
        if torch.compiler.is_compiling():
            output = options["output"](loss=loss, **_others(found))
        else:
            output = _lazy(options["output"])(loss=loss, **_others(found))
            output.keep(_later(head, hidden), autocast_dtype(hidden.device.type) is not None)
    else:
        output = type(self).forward(self, *args, **kwargs, return_dict=True)
        logits = output.logits
        make = functools.partial(ops.cross_entropy, logits)
        loss = _loss(make, logits.dtype, logits.device, labels, **extra)
        output = options["output"](loss=loss, logits=logits, **_others(output))
    return output if wants else output.to_tuple()


def _needs_no_cache(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a step without a cache computes what it does with one.

    Without one, transformers looks for packed sequences in position_ids (where there is no mask), and takes the length
    of a mask for that of the keys.
    """
    if len(args) > 1 or kwargs.get("past_key_values") is not None:
        return False
    mask = kwargs.get("attention_mask")
    if mask is None:
        return kwargs.get("position_ids") is None
    tokens = args[0] if args else kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    return isinstance(mask, Tensor) and tokens is not None and mask.shape[-1] == tokens.shape[1]


def _masked(config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the model has to find out for itself what its tokens see."""
    if torch.compiler.is_compiling() or config._attn_implementation != NAME or not getattr(config, "is_causal", True):
        return True
    if getattr(config, "sliding_window", None) is not None or len(args) > 1:
        return True
    if any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", "past_key_values")):
        return True
    inputs = [x for x in (*args, kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None]
    return len(inputs) != 1 or inputs[0].dim() < 2 or not 1 < inputs[0].shape[1] <= _MASKED_MOST


def masked_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """BertForMaskedLM's."""
    options = getattr(self, MARK).options
    labels = kwargs.get("labels")
    if labels is None or len(args) > options["positional"]:
        return type(self).forward(self, *args, **kwargs)
    del kwargs["labels"]
    wants = kwargs.pop("return_dict", None)
    wants = self.config.return_dict if wants is None else wants
    if options["fused"] and self.training and len(args) <= 1 and _is_bare_head(self.cls, options["head"]):
        found = self.bert(*args, **kwargs, return_dict=True)
        hidden, decoder = self.cls.predictions.transform(found.last_hidden_state), self.cls.predictions.decoder
        loss = ops.linear_cross_entropy(*_with_bias(hidden, decoder), labels)
        parts = {name: found[name] for name in ("hidden_states", "attentions") if name in found}
        if torch.compiler.is_compiling():
            output = options["output"](loss=loss, **parts)
        else:
            output = _lazy(options["output"])(loss=loss, **parts)
            output.keep(_later(decoder, hidden), autocast_dtype(hidden.device.type) is not None)
    else:
        found = type(self).forward(self, *args, **kwargs, return_dict=True)
        loss = ops.cross_entropy(found.logits.reshape(-1, self.config.vocab_size), labels.reshape(-1))
        output = options["output"](loss=loss, logits=found.logits, **_others(found))
    return output if wants else output.to_tuple()


def _is_bare_head(cls: Any, kinds: tuple[type[nn.Module], type[nn.Module]]) -> bool:
    """Whether BERT's head is its transform and a linear layer with a bias, and no more."""
    if not is_bare(cls, kinds[0]) or not is_bare(cls.predictions, kinds[1]):
        return False
    decoder = cls.predictions.decoder
    return is_bare(decoder, nn.Linear) and decoder.bias is not None


_BESIDE = 8
"""Columns beside a weight for its bias, all but one of them zeros: rows stay multiples of 16 bytes."""


def _with_bias(hidden: Tensor, layer: nn.Linear) -> tuple[Tensor, Tensor]:
    """Tensors whose product is the layer's result with its bias: a one beside hidden, the bias beside the weight."""
    ones = F.pad(hidden.new_ones(*hidden.shape[:-1], 1), (0, _BESIDE - 1))
    bias = F.pad(layer.bias[:, None], (0, _BESIDE - 1))
    return torch.cat((hidden, ones), -1), torch.cat((layer.weight, bias), 1)


def _loss(
    make: Callable[..., Tensor],
    dtype: torch.dtype,
    device: torch.device,
    labels: Tensor,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """Transformers' ForCausalLMLoss: float32 from whatever the logits are, over the labels one place further on."""
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    targets = targets.to(device).contiguous()
    reduction = "mean" if num_items_in_batch is None else "sum"
    low = dtype in (torch.bfloat16, torch.float16) and device.type != "meta"  # which has no autocast
    # Under autocast our losses are float32, as transformers' are: it computes them from logits cast to float32.
    with torch.autocast(device.type, dtype=dtype) if low else contextlib.nullcontext():
        loss = make(targets, ignore_index=ignore_index, reduction=reduction)
    loss = loss.float()  # of a float64 model too, as transformers has it
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    scaled: Tensor = loss / num_items_in_batch
    return scaled


def _others(output: Any) -> dict[str, Any]:
    """What a model's output holds beside loss and logits."""
    names = ("past_key_values", "hidden_states", "attentions", "cross_attentions")
    return {name: output[name] for name in names if name in output}


# --- logits that are made when they are read -------------------------------------------------------------------------


def _later(head: nn.Module, hidden: Tensor) -> Callable[[], Tensor]:
    """What makes the logits, whenever it is called, as they would have been made now: gradient mode and autocast."""
    kind = hidden.device.type
    learns, lower = torch.is_grad_enabled(), autocast_dtype(kind)

    def make() -> Tensor:
        # Off where it was off: the caller may have turned it on since. "meta" has none.
        off = contextlib.nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)
        with torch.set_grad_enabled(learns), off if lower is None else torch.autocast(kind, dtype=lower):
            logits: Tensor = head(hidden)
            return logits

    return make


_KEPT: dict[int, weakref.ref[Any]] = {}
"""By the address of a loss: the output that can make its logits, as long as somebody holds it."""


class _Lazy:
    """An output whose logits are made from the hidden states when somebody asks for them, once.

    Whoever walks over its items (hooks of DDP and FSDP, accelerate) does not ask. Accelerate's mixed precision hands on
    a copy of the items: it has the same loss, and finds by that what makes the logits. A copy whose loss is another
    tensor cannot, and says so.
    """

    def keep(self, make: Callable[[], Tensor], lowered: bool) -> None:
        """Take what makes the logits; lowered: under autocast, so that copies, as accelerate has them, are float32."""
        self.__dict__.update(_make=make, _lowered=lowered)
        key = id(self.loss)  # type: ignore[attr-defined]

        def forget(gone: object) -> None:
            if _KEPT.get(key) is gone:
                del _KEPT[key]

        _KEPT[key] = weakref.ref(self, forget)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        held = self.__dict__
        if held.get("_logits") is None:
            held.pop("_logits", None)  # nobody has said that there are none
        kept = _KEPT.get(id(held.get("loss")))
        original = None if kept is None else kept()
        if original is not None and original.loss is held["loss"]:
            held["_make"] = functools.partial(_handed_on, original)

    def _get_logits(self) -> Tensor | None:
        held = self.__dict__
        if "_logits" not in held:
            if "_make" not in held:
                raise UnsupportedCase(
                    "this copy of a training step's output has no logits, and another loss than the step's: read them "
                    "from the output itself, or patch with loss=False, which makes them always"
                )
            held["_logits"] = held["_make"]()
            del held["_make"]
        return cast("Tensor | None", held["_logits"])

    def _set_logits(self, value: Tensor | None) -> None:
        self.__dict__["_logits"] = value

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            return self._get_logits()
        if key == 0 and self.__dict__.get("loss") is not None:
            return self.__dict__["loss"]
        return self.to_tuple()[key] if not isinstance(key, str) else super().__getitem__(key)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """A copy, or what is pickled, is the model's usual output; its logits are made now."""
        return type(self).__mro__[2], tuple(getattr(self, name) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        shown = [f"{name}={value!r}" for name, value in self.items()]  # type: ignore[attr-defined]
        return f"{type(self).__name__}({', '.join([*shown, 'logits=...'])})"

    def to_tuple(self) -> tuple[Any, ...]:
        """All that is there, the logits in their place."""
        names = [name for name in self.__dataclass_fields__ if name == "logits" or name in self]  # type: ignore[attr-defined,operator]
        found = [getattr(self, name) for name in names]
        return tuple(value for value in found if value is not None)


def _handed_on(original: _Lazy) -> Tensor | None:
    """The logits for a copy of an output."""
    logits = original._get_logits()
    low = logits is not None and logits.dtype in (torch.bfloat16, torch.float16)
    return logits.float() if logits is not None and low and original.__dict__["_lowered"] else logits


@functools.cache
def _lazy(kind: type) -> Any:
    """The class of an output, with lazy logits."""
    made = type(kind.__name__, (_Lazy, kind), {"__module__": __name__})
    made.logits = property(_Lazy._get_logits, _Lazy._set_logits)  # type: ignore[attr-defined]
    return made
