"""The forward methods of models with a loss over the vocabulary.

In training it is computed from the hidden states, some rows at a time, and the logits, the model's largest tensor, when
they are read.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.nn.patching.attention import LazyTensor, assumed_packing, causal_mask
from accelerant.nn.patching.plain import is_exported
from accelerant.nn.patching.record import ATTENTION_NAME, MARK, PARTS, is_bare
from accelerant.ops._library import autocast_dtype

COMPILED = 2**28
"""Logits below which torch.compile has torch's own loss: ours, which it cannot look into, costs the host more."""

_NOTHING = contextlib.nullcontext()

_CACHES = ("cache", "past_key_values", "cache_params")
"""The argument's names: from transformers 5.24, before, and in models with a state of another form."""

_BIAS_COLUMNS = 8  # appended to a weight for its bias, all but one zero: rows stay multiples of 16 bytes


def causal_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run GPT2LMHeadModel, or a causal language model of Llama's form."""
    options = getattr(self, MARK).options
    given = dict(zip(options["names"], args, strict=False))
    labels = given.get("labels", kwargs.get("labels"))
    twice = any(name in kwargs for name in given)
    own = len(given) < len(args) or twice or "_loss_function" in self.__dict__ or is_exported()
    if own or not _are_indices(labels):
        return type(self).forward(self, *args, **kwargs)
    kwargs |= given
    del kwargs["labels"]
    as_dict = kwargs.pop("return_dict", None)
    as_dict = self.config.return_dict if as_dict is None else as_dict
    spared = as_dict and _is_spared(self, kwargs)
    if spared:
        kwargs["use_cache"] = False  # would prevent fused blocks
        tokens = _causal_tokens(self.config, kwargs) if options["plain"] else None
        if tokens is not None:
            B, S = tokens.shape[:2]
            kwargs["attention_mask"] = causal_mask(B, S, tokens.device)
    extra = {name: value for name, value in kwargs.items() if name not in options["names"]}
    keep = kwargs.get("logits_to_keep", 0)
    whole = isinstance(keep, int) and keep == 0
    head = self.lm_head
    fused = options["fused"] and self.training and whole and is_bare(head, nn.Linear) and head.bias is None
    if fused and not _is_compilers(labels.numel() * head.weight.shape[0]):
        kwargs.pop("logits_to_keep", None)
        with _packing(kwargs, spared):
            base = getattr(self, options["base"])(**kwargs, return_dict=True)
        hidden = base.last_hidden_state
        compute: Callable[..., Tensor] = functools.partial(_linear_cross_entropy, hidden, head.weight)
        loss = _causal_loss(compute, hidden.dtype, hidden.device, labels, **extra)
        output = _training_output(options["output"], head, loss, _other_outputs(options["output"], base), hidden)
    else:
        with _packing(kwargs, spared):
            output = type(self).forward(self, **kwargs, return_dict=True)
        logits = output.logits
        compute = functools.partial(_cross_entropy, logits)
        loss = _causal_loss(compute, logits.dtype, logits.device, labels, **extra)
        output = options["output"](loss=loss, logits=logits, **_other_outputs(options["output"], output))
    return output if as_dict else tuple(output[name] for name in output)


def cacheless_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a model without a cache where a training step has no use for one."""
    options = getattr(self, MARK).options
    given = dict(zip(options["names"], args, strict=False))
    as_dict = (kwargs | given).get("return_dict")
    as_dict = self.config.return_dict if as_dict is None else as_dict  # a tuple's places would change
    labelled = kwargs.get("labels", given.get("labels")) is not None
    spared = labelled and as_dict and "use_cache" not in given and _is_spared(self, kwargs | given)
    if spared:
        kwargs["use_cache"] = False
    head: Any = getattr(self, options.get("deferred") or "", None) if spared else None
    if not is_bare(head, nn.Linear) or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        head = None
    with _packing(kwargs | given, spared), _NOTHING if head is None else _deferring(head) as deferred:
        output = (options["inner"] or type(self).forward)(self, *args, **kwargs)
    logits = output.logits if head is not None else None
    if not isinstance(logits, Logits) or deferred != [logits.source] or logits.source.is_computed:
        return output
    others = _other_outputs(type(output), output)
    return _training_output(type(output), head, output.loss, others, logits.source.inputs[0])


@contextlib.contextmanager
def _deferring(head: nn.Linear) -> Iterator[list[_Source]]:
    """Let a model's head give logits that are computed when they are read, inside the block; yield their sources."""
    found: list[_Source] = []

    def forward(hidden: Tensor) -> Tensor:
        found.append(_Source(hidden, head.weight, None))
        logits: Tensor = _LazyLinear.apply(hidden, head.weight, None, found[-1])  # type: ignore[no-untyped-call]
        return logits

    head.__dict__["forward"] = forward
    try:
        yield found
    finally:
        head.__dict__.pop("forward", None)


def _packing(kwargs: dict[str, Any], spared: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context of a call in which transformers reads no positions: with a cache it would not do so either."""
    positions = kwargs.get("position_ids")
    packed = not spared and isinstance(positions, Tensor) and positions.device.type != "cpu"
    return assumed_packing(packed) if (spared or packed) and not torch.compiler.is_compiling() else _NOTHING


def _is_spared(model: Any, kwargs: dict[str, Any]) -> bool:
    """Return whether nobody uses the cache of keys and values that a call with labels makes."""
    decodes = getattr(model.config, "is_encoder_decoder", False)
    usual = model.training and kwargs.get("use_cache") is None
    return usual and _needs_no_cache(model, kwargs, "decoder_" if decodes else "")


def _needs_no_cache(model: Any, kwargs: dict[str, Any], prefix: str) -> bool:
    """Return whether a step without a cache computes the same as with one; `prefix` is of the decoder's arguments.

    Without one, as with gradient checkpointing, transformers looks for packed sequences in position_ids if there is no
    mask (`_packing` prevents that, but for torch.compile), and assumes that a mask is as long as the keys. Models with
    a text model inside may make its mask before its cache, and look for them in any case.
    """
    if any(kwargs.get(name) is not None for name in _CACHES):
        return False
    mask = kwargs.get(f"{prefix}attention_mask")
    if mask is None:
        positions = kwargs.get(f"{prefix}position_ids")
        looks = torch.compiler.is_compiling() or model.is_gradient_checkpointing
        return positions is None or not (looks or model.config.get_text_config() is not model.config)
    found = (kwargs.get(f"{prefix}input_ids"), kwargs.get(f"{prefix}inputs_embeds"), kwargs.get("labels"))
    tokens = next((x for x in found[: 3 if prefix else 2] if x is not None), None)  # labels become a decoder's tokens
    return isinstance(mask, Tensor) and isinstance(tokens, Tensor) and mask.shape[-1] == tokens.shape[1]


def _causal_tokens(config: Any, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the tokens, or their embeddings, if the model makes them a mask that is only causal; None for others."""
    if config._attn_implementation != ATTENTION_NAME or not getattr(config, "is_causal", True):
        return None
    if kwargs.get("attention_mask") is not None or getattr(config, "sliding_window", None) is not None:
        return None
    inputs = [x for x in (kwargs.get("input_ids"), kwargs.get("inputs_embeds")) if isinstance(x, Tensor)]
    return inputs[0] if len(inputs) == 1 and inputs[0].dim() > 1 and inputs[0].shape[1] > 1 else None


def masked_lm_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run BertForMaskedLM."""
    options = getattr(self, MARK).options
    labels = kwargs.get("labels")
    if len(args) > options["positional"] or is_exported() or not _are_indices(labels):
        return type(self).forward(self, *args, **kwargs)
    del kwargs["labels"]
    as_dict = kwargs.pop("return_dict", None)
    as_dict = self.config.return_dict if as_dict is None else as_dict
    fused = options["fused"] and self.training and len(args) <= 1 and _is_bare_head(self.cls, *options["head"])
    if fused and not _is_compilers(labels.numel() * self.config.vocab_size):
        base = self.bert(*args, **kwargs, return_dict=True)
        hidden, decoder = self.cls.predictions.transform(base.last_hidden_state), self.cls.predictions.decoder
        # A one appended to hidden and the bias to the weight make their product the layer's result.
        ones = F.pad(hidden.new_ones(*hidden.shape[:-1], 1), (0, _BIAS_COLUMNS - 1))
        bias = F.pad(decoder.bias[:, None], (0, _BIAS_COLUMNS - 1))
        loss = _linear_cross_entropy(torch.cat((hidden, ones), -1), torch.cat((decoder.weight, bias), 1), labels)
        output = _training_output(options["output"], decoder, loss, _other_outputs(options["output"], base), hidden)
    else:
        output = type(self).forward(self, *args, **kwargs, return_dict=True)
        loss = _cross_entropy(output.logits.reshape(-1, self.config.vocab_size), labels.reshape(-1))
        others = _other_outputs(options["output"], output)
        output = options["output"](loss=loss, logits=output.logits, **others)
    return output if as_dict else tuple(output[name] for name in output)


def _is_bare_head(cls: Any, head: type[nn.Module], predictions: type[nn.Module]) -> bool:
    """Return whether BERT's head consists of its transform and a linear layer with a bias, unmodified."""
    bare = is_bare(cls, head) and is_bare(cls.predictions, predictions) and is_bare(cls.predictions.decoder, nn.Linear)
    return bare and cls.predictions.decoder.bias is not None


def _are_indices(labels: Any) -> TypeGuard[Tensor]:
    """Return whether labels are of the dtype that torch's loss takes; our ops take all integers."""
    return isinstance(labels, Tensor) and labels.dtype is torch.int64


def _is_compilers(logits: int) -> bool:
    """Return whether the loss of so many logits is torch.compile's; see COMPILED."""
    return is_exported() or (torch.compiler.is_compiling() and logits < COMPILED)


def _aligned(targets: Tensor, x: Tensor) -> Tensor:
    """Return targets with a dimension for each of the rows of x: transformers' losses flatten labels of any shape."""
    return targets.reshape(x.shape[:-1]) if targets.numel() == x.shape[:-1].numel() else targets


def _linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return ops.linear_cross_entropy(hidden, weight, _aligned(targets, hidden), **options)


def _cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    """Return ops.cross_entropy of logits; by torch's function, in float32 too, where that is torch.compile's."""
    if _are_indices(targets) and not _is_compilers(logits.numel()):
        return ops.cross_entropy(logits, _aligned(targets, logits), **options)
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
        classes = self.weight is None and input.dim() == 2 and target.dim() == 1 and _are_indices(target)
        if classes and not _is_compilers(input.numel()):
            compute: Callable[..., Tensor] = functools.partial(ops.cross_entropy, input)
            detached = torch.is_grad_enabled() and not input.requires_grad
            if isinstance(input, Logits) and not input.source.is_computed and not detached:
                hidden, weight, _ = input.source.inputs
                compute = functools.partial(ops.linear_cross_entropy, hidden.flatten(0, -2), weight)
            return compute(
                target, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing, reduction=self.reduction
            )
        return super().forward(input, target)


def _other_outputs(kind: Any, output: Any) -> dict[str, Any]:
    names = kind.__dataclass_fields__.keys() - {"loss", "logits"}
    return {name: value for name, value in output.items() if name in names}


# --- logits computed when they are read ------------------------------------------------------------------------------
def _training_output(kind: Any, head: Any, loss: Tensor, others: dict[str, Any], hidden: Tensor) -> Any:
    """Return an output of class `kind` whose logits are computed when they are read; None under torch.compile.

    They are computed under the present gradient mode and autocast.
    """
    if torch.compiler.is_compiling():
        return kind(loss=loss, **others)
    source = _Source(hidden, head.weight, head.bias)  # those of now, which functional_call replaces
    if torch._C._are_functorch_transforms_active():
        return kind(loss=loss, logits=F.linear(*source.inputs), **others)
    logits: Tensor = _LazyLinear.apply(hidden, head.weight, head.bias, source)  # type: ignore[no-untyped-call]
    output = _lazy_class(kind)(loss=loss, logits=logits, **others)
    parts = {"loss": loss, "others": others, "hidden": hidden}
    output.__dict__[PARTS] = lambda parts: _training_output(kind, head, **parts), parts
    return output


class _Source:
    """The layer whose result logits of a dtype are, with the autocast of the forward pass."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.inputs = hidden, weight, bias
        self._low = None if hidden.dtype is torch.float64 else autocast_dtype(hidden.device.type)
        self.dtype = self._low or hidden.dtype
        self._value: Tensor | None = None

    @property
    def is_computed(self) -> bool:
        """Whether something has read the logits."""
        return self._value is not None

    def logits(self) -> Tensor:
        """Return the logits without a gradient, computed once."""
        if self._value is None:
            device = self.inputs[0].device.type
            # The caller may have turned autocast on since. "meta" has none.
            off = contextlib.nullcontext() if device == "meta" else torch.autocast(device, enabled=False)
            low = off if self._low is None else torch.autocast(device, dtype=self._low)
            with torch.no_grad(), low:
                self._value = F.linear(*self.inputs)
        return self._value


class Logits(LazyTensor):
    """Logits that are computed when something reads them."""

    source: _Source

    @staticmethod
    def of(source: _Source, dtype: torch.dtype, flat: bool = False) -> Logits:
        """Return the logits of a source in a dtype; `flat`, of which each row is one of a matrix."""
        hidden, weight, _ = source.inputs
        shape = (hidden.shape[:-1].numel(),) if flat else hidden.shape[:-1]
        shape = (*shape, weight.shape[0])
        lazy: Logits = Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=hidden.device)
        lazy.source = source
        return lazy

    def value(self) -> Tensor:
        """Return the logits without a gradient, computed once."""
        return self.source.logits().to(self.dtype).view(self.shape)

    def whole(self) -> Tensor:
        """Return the logits as a plain tensor, with gradients if this one has them."""
        with torch.set_grad_enabled(self.requires_grad):
            logits: Tensor = _Whole.apply(self)  # type: ignore[no-untyped-call]
            return logits

    def alias(self, dtype: torch.dtype) -> Logits:
        """Return the same logits in a dtype."""
        return Logits.of(self.source, dtype, self.dim() == 2)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Leave logits uncomputed whose rows become those of a matrix; otherwise as the base class."""
        if func is torch.ops.aten.view.default:
            *rows, V = args[0].shape
            if list(args[1]) in ([-1, V], [math.prod(rows), V]):
                return Logits.of(args[0].source, args[0].dtype, flat=True)
        return super().__torch_dispatch__(func, types, args, kwargs)


class _LazyLinear(torch.autograd.Function):
    """F.linear whose result is computed later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, source: _Source) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return Logits.of(source, source.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        hidden, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        dx = (dy @ weight.to(dy.dtype)).to(hidden.dtype) if ctx.needs_input_grad[0] else None
        dw = (rows.t() @ hidden.to(dy.dtype).flatten(0, -2)).to(weight.dtype) if ctx.needs_input_grad[1] else None
        db = rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, dw, db, None


class _Whole(torch.autograd.Function):
    """Logits as a plain tensor. Its gradient passes through the lazy one, on which DDP and FSDP may have put hooks."""

    @staticmethod
    def forward(ctx: Any, lazy: Logits) -> Tensor:
        return lazy.value().detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


class _LazyLogits:
    """A model output whose logits are computed on first access; what walks over it (DDP) gets a LazyTensor."""

    def _get_logits(self) -> Tensor | None:
        logits = self.__dict__["_logits"]
        if isinstance(logits, Logits):
            logits = self.__dict__["_logits"] = logits.whole()
            OrderedDict.__setitem__(cast("OrderedDict[str, Tensor]", self), "logits", logits)
        return cast("Tensor | None", logits)

    def _set_logits(self, value: Tensor | None) -> None:
        self.__dict__["_logits"] = value

    def __getitem__(self, key: Any) -> Any:
        if key == "logits":
            return self._get_logits()
        if isinstance(key, str):
            return super().__getitem__(key)  # type: ignore[misc]
        value = self.to_tuple()[key]
        return self._get_logits() if isinstance(value, Logits) else value

    def get(self, key: Any, default: Any = None) -> Any:
        """Return a field, the logits computed, or the default."""
        value = self._get_logits() if key == "logits" else super().get(key)  # type: ignore[misc]
        return default if value is None else value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"  # type: ignore[attr-defined]

    def to_tuple(self) -> tuple[Any, ...]:
        """Return all fields that are present."""
        return tuple(self.values())  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        """Copy or pickle as the model's usual output, with the logits computed now."""
        return type(self).__mro__[2], tuple(getattr(self, name) for name in self.__dataclass_fields__)  # type: ignore[attr-defined]


@functools.cache
def _lazy_class(kind: type) -> Any:
    lazy = type(kind.__name__, (_LazyLogits, kind), {"__module__": __name__})
    lazy.logits = property(_LazyLogits._get_logits, _LazyLogits._set_logits)  # type: ignore[attr-defined]
    return lazy
