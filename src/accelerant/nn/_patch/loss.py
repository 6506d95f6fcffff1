"""The forward methods of models with a loss over the vocabulary.

In training, only the loss reads the logits of a language model, and they are its largest tensor. The loss is therefore
computed from the hidden states, some rows at a time, and the logits are computed when they are read.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import UnsupportedCase
from accelerant.nn._patch.attention import causal_mask
from accelerant.nn._patch.plain import is_exported
from accelerant.nn._patch.record import ATTENTION_NAME, MARK, PARTS, is_bare
from accelerant.ops._library import autocast_dtype

__all__ = ["CrossEntropyLoss", "causal_lm_forward", "causal_loss", "masked_lm_forward", "masked_loss"]

_LONGEST_MASK = 4096  # tokens, for which we build a mask: its memory is quadratic, 16 MiB here
COMPILED = 2**28
"""Logits below which torch.compile has torch's own loss: our ops, which it cannot look into, cost the host more than
they save. Above, their memory counts for more.
"""

_CACHES = ("cache", "past_key_values")  # the argument's names, from transformers 5.24 and before

_BIAS_COLUMNS = 8  # appended to a weight for its bias, all but one zero: rows stay multiples of 16 bytes


def causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run GPT2LMHeadModel, or a causal language model of Llama's form."""
    options = getattr(self, MARK).options
    given = dict(zip(options["names"], args, strict=False))
    labels = given.get("labels", kwargs.get("labels"))
    twice = any(name in kwargs for name in given)
    if labels is None or len(given) < len(args) or twice or "_loss_function" in self.__dict__ or is_exported():
        return type(self).forward(self, *args, **kwargs)
    kwargs |= given
    del kwargs["labels"]
    as_dict = kwargs.pop("return_dict", None)
    as_dict = self.config.return_dict if as_dict is None else as_dict
    if options["plain"] and self.training and kwargs.get("use_cache") is None and as_dict and _needs_no_cache(kwargs):
        kwargs["use_cache"] = False  # unused in a training step, and would prevent fused blocks
        # A reentrant checkpoint passes another tensor on, without the mask's pattern.
        checkpoints = getattr(getattr(self, options["base"]), "gradient_checkpointing", False)
        if not checkpoints and not _needs_own_mask(self.config, kwargs):
            tokens = kwargs.get("input_ids")
            tokens = kwargs["inputs_embeds"] if tokens is None else tokens
            kwargs["attention_mask"] = causal_mask(tokens.shape[1], tokens.device)
    extra = {name: value for name, value in kwargs.items() if name not in options["names"]}
    keep = kwargs.get("logits_to_keep", 0)
    whole = isinstance(keep, int) and keep == 0
    head = self.lm_head
    fused = options["fused"] and self.training and whole and is_bare(head, nn.Linear) and head.bias is None
    if fused and not _is_compilers(labels.numel() * head.weight.shape[0]):
        kwargs.pop("logits_to_keep", None)
        base = getattr(self, options["base"])(**kwargs, return_dict=True)
        hidden = base.last_hidden_state
        compute: Callable[..., Tensor] = functools.partial(ops.linear_cross_entropy, hidden, head.weight)
        loss = _causal_loss(compute, hidden.dtype, hidden.device, labels, **extra)
        output = _training_output(options["output"], loss, _other_outputs(options["output"], base), head, hidden)
    else:
        output = type(self).forward(self, **kwargs, return_dict=True)
        logits = output.logits
        compute = functools.partial(_cross_entropy, logits)
        loss = _causal_loss(compute, logits.dtype, logits.device, labels, **extra)
        output = options["output"](loss=loss, logits=logits, **_other_outputs(options["output"], output))
    return output if as_dict else output.to_tuple()


def _needs_no_cache(kwargs: dict[str, Any]) -> bool:
    """Return whether a step without a cache computes the same as with one.

    Without one, transformers looks for packed sequences in position_ids (if there is no mask), and assumes that a mask
    is as long as the keys.
    """
    if any(kwargs.get(name) is not None for name in _CACHES):
        return False
    mask = kwargs.get("attention_mask")
    if mask is None:
        return kwargs.get("position_ids") is None
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    return isinstance(mask, Tensor) and tokens is not None and mask.shape[-1] == tokens.shape[1]


def _needs_own_mask(config: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether the model has to build its attention mask itself."""
    if config._attn_implementation != ATTENTION_NAME:
        return True
    if not getattr(config, "is_causal", True) or getattr(config, "sliding_window", None) is not None:
        return True
    if any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", *_CACHES)):
        return True
    inputs = [x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if x is not None]
    return len(inputs) != 1 or inputs[0].dim() < 2 or not 1 < inputs[0].shape[1] <= _LONGEST_MASK


def masked_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run BertForMaskedLM."""
    options = getattr(self, MARK).options
    labels = kwargs.get("labels")
    if labels is None or len(args) > options["positional"] or is_exported():
        return type(self).forward(self, *args, **kwargs)
    del kwargs["labels"]
    as_dict = kwargs.pop("return_dict", None)
    as_dict = self.config.return_dict if as_dict is None else as_dict
    fused = options["fused"] and self.training and len(args) <= 1 and _is_bare_head(self.cls, options["head"])
    if fused and not _is_compilers(labels.numel() * self.config.vocab_size):
        base = self.bert(*args, **kwargs, return_dict=True)
        hidden, decoder = self.cls.predictions.transform(base.last_hidden_state), self.cls.predictions.decoder
        # A one appended to hidden and the bias to the weight make their product the layer's result.
        ones = F.pad(hidden.new_ones(*hidden.shape[:-1], 1), (0, _BIAS_COLUMNS - 1))
        bias = F.pad(decoder.bias[:, None], (0, _BIAS_COLUMNS - 1))
        loss = ops.linear_cross_entropy(torch.cat((hidden, ones), -1), torch.cat((decoder.weight, bias), 1), labels)
        output = _training_output(options["output"], loss, _other_outputs(options["output"], base), decoder, hidden)
    else:
        output = type(self).forward(self, *args, **kwargs, return_dict=True)
        loss = _cross_entropy(output.logits.reshape(-1, self.config.vocab_size), labels.reshape(-1))
        others = _other_outputs(options["output"], output)
        output = options["output"](loss=loss, logits=output.logits, **others)
    return output if as_dict else output.to_tuple()


def _is_bare_head(cls: Any, kinds: tuple[type[nn.Module], type[nn.Module]]) -> bool:
    """Return whether BERT's head consists of its transform and a linear layer with a bias, unmodified."""
    bare = is_bare(cls, kinds[0]) and is_bare(cls.predictions, kinds[1]) and is_bare(cls.predictions.decoder, nn.Linear)
    return bare and cls.predictions.decoder.bias is not None


def _is_compilers(logits: int) -> bool:
    """Return whether the loss of so many logits is torch.compile's; see COMPILED."""
    return is_exported() or (torch.compiler.is_compiling() and logits < COMPILED)


def _cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return ops.cross_entropy of logits; by torch's function, in float32 too, where that is torch.compile's."""
    if not _is_compilers(logits.numel()):
        return ops.cross_entropy(logits, targets, **options)
    loss = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), **options)
    return loss if autocast_dtype(logits.device.type) is not None else loss.to(logits.dtype)


def _causal_loss(
    compute: Callable[..., Tensor], dtype: torch.dtype, device: torch.device, labels: Tensor,
    num_items_in_batch: Any = None, ignore_index: int = -100, shift_labels: Tensor | None = None, **_: Any,
) -> Tensor:  # fmt: skip
    """Compute transformers' ForCausalLMLoss: in float32, over the labels shifted by one."""
    targets = F.pad(labels, (0, 1), value=ignore_index)[..., 1:] if shift_labels is None else shift_labels
    targets = targets.to(device).contiguous()
    reduction = "mean" if num_items_in_batch is None else "sum"
    low = dtype in (torch.bfloat16, torch.float16) and device.type != "meta"  # meta has no autocast
    # Under autocast our losses are float32, as transformers' are, which casts logits to float32.
    with torch.autocast(device.type, dtype=dtype) if low else contextlib.nullcontext():
        loss = compute(targets, ignore_index=ignore_index, reduction=reduction)
    loss = loss.float()  # for a float64 model too, as in transformers
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    scaled: Tensor = loss / num_items_in_batch
    return scaled


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Compute transformers' ForCausalLMLoss of given logits."""

    def compute(targets: Tensor, **options: Any) -> Tensor:
        return _cross_entropy(logits.reshape(-1, vocab_size), targets.view(-1), **options)

    return _causal_loss(compute, logits.dtype, logits.device, labels, **options)


def masked_loss(logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
    """Compute transformers' ForMaskedLMLoss of given logits: that of labels which are not shifted."""
    return causal_loss(logits, labels, vocab_size, **options | {"shift_labels": labels})


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch's CrossEntropyLoss, by our op for class indices of rows without weights."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Return the loss."""
        classes = self.weight is None and input.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
        if classes and not _is_compilers(input.numel()):
            return ops.cross_entropy(
                input, target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
                reduction=self.reduction,
            )  # fmt: skip
        return super().forward(input, target)


def _other_outputs(kind: Any, output: Any) -> dict[str, Any]:
    names = kind.__dataclass_fields__.keys() - {"loss", "logits"}
    return {name: value for name, value in output.items() if name in names}


# --- logits computed when they are read ------------------------------------------------------------------------------


def _training_output(kind: Any, loss: Tensor, others: dict[str, Any], head: Any, hidden: Tensor) -> Any:
    """Return an output of class `kind` whose logits are computed when they are read; None under torch.compile.

    They are computed under the present gradient mode and autocast.
    """
    if torch.compiler.is_compiling():
        return kind(loss=loss, **others)
    device = hidden.device.type
    grad_enabled, low_dtype = torch.is_grad_enabled(), autocast_dtype(device)
    weight, bias = head.weight, head.bias  # those of now, which functional_call replaces

    def compute() -> Tensor:
        # The caller may have turned autocast on since. "meta" has none.
        off = contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
        low = off if low_dtype is None else torch.autocast(device, dtype=low_dtype)
        with torch.set_grad_enabled(grad_enabled), low:
            logits: Tensor = F.linear(hidden, weight, bias)
            return logits

    output = _lazy_class(kind)(loss=loss, **others)
    output.set_source(compute, low_dtype is not None)
    output.__dict__[PARTS] = functools.partial(_remade, kind, head), {"loss": loss, "others": others, "hidden": hidden}
    return output


def _remade(kind: Any, head: Any, parts: dict[str, Any]) -> Any:
    return _training_output(kind, parts["loss"], parts["others"], head, parts["hidden"])


_OUTPUTS: dict[int, weakref.ref[Any]] = {}
"""Identity of a loss -> the output that can compute its logits, while that is alive."""


class _LazyLogits:
    """A model output whose logits are computed from the hidden states on first access.

    Iterating over its items (hooks of DDP and FSDP, accelerate) does not compute them. Accelerate's mixed precision
    passes a copy of the items on: the copy has the same loss, by which it finds the original. A copy with another loss
    cannot, and raises on access.
    """

    def set_source(self, compute: Callable[[], Tensor], lowered: bool) -> None:
        """Set the function that computes the logits; `lowered`: under autocast, where accelerate's copy is float32."""
        self.__dict__.update(_compute=compute, _lowered=lowered)
        key = id(self.loss)  # type: ignore[attr-defined]

        def forget(reference: object) -> None:
            if _OUTPUTS.get(key) is reference:
                del _OUTPUTS[key]

        _OUTPUTS[key] = weakref.ref(self, forget)

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]
        fields = self.__dict__
        if fields.get("_logits") is None:
            fields.pop("_logits", None)  # the default, not an explicit None
        reference = _OUTPUTS.get(id(fields.get("loss")))
        original = None if reference is None else reference()
        if original is not None and original.loss is fields["loss"]:
            fields["_compute"] = functools.partial(_logits_for_copy, original)

    def _get_logits(self) -> Tensor | None:
        fields = self.__dict__
        if "_logits" not in fields:
            if "_compute" not in fields:
                raise UnsupportedCase(
                    "this copy of a training step's output has no logits, and another loss than the step's: read them "
                    "from the output itself, or patch with loss=False, which computes them always"
                )
            fields["_logits"] = fields["_compute"]()
            del fields["_compute"]
        return cast("Tensor | None", fields["_logits"])

    def _set_logits(self, value: Tensor | None) -> None:
        self.__dict__["_logits"] = value

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            return self._get_logits()
        if key == 0 and self.__dict__.get("loss") is not None:
            return self.__dict__["loss"]
        return self.to_tuple()[key] if not isinstance(key, str) else super().__getitem__(key)  # type: ignore[misc]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a field, the logits computed, or the default."""
        if key == "logits":
            logits = self._get_logits()
            return default if logits is None else logits
        return super().get(key, default)  # type: ignore[misc]

    def __reduce__(self) -> Any:
        """Copy or pickle as the model's usual output, with the logits computed now."""
        return type(self).__mro__[2], tuple(getattr(self, name) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        fields = [f"{name}={value!r}" for name, value in self.items()]  # type: ignore[attr-defined]
        return f"{type(self).__name__}({', '.join([*fields, 'logits=...'])})"

    def to_tuple(self) -> tuple[Any, ...]:
        """Return all fields that are present, the logits computed."""
        names = [name for name in self.__dataclass_fields__ if name == "logits" or name in self]  # type: ignore[attr-defined,operator]
        values = [getattr(self, name) for name in names]
        return tuple(value for value in values if value is not None)


def _logits_for_copy(original: _LazyLogits) -> Tensor | None:
    logits = original._get_logits()
    low = logits is not None and logits.dtype in (torch.bfloat16, torch.float16)
    return logits.float() if logits is not None and low and original.__dict__["_lowered"] else logits


@functools.cache
def _lazy_class(kind: type) -> Any:
    lazy = type(kind.__name__, (_LazyLogits, kind), {"__module__": __name__})
    lazy.logits = property(_LazyLogits._get_logits, _LazyLogits._set_logits)  # type: ignore[attr-defined]
    return lazy
