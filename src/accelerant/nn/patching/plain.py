"""The rules and forward methods of torch.nn's own layers, outside of transformers' models; transformers is not needed.

A layer is recognized by its class, exactly. A container whose layers are fused looks at each when it runs, and calls
those with hooks, adapters or another class. Each forward falls back to its class's own.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn.layers import multihead_forward, refuses_multihead, rms_eps
from accelerant.nn.patching.forms import PLAIN_RULES, Options, Replacement, Rule, why_left
from accelerant.nn.patching.record import MARK, Forward, has_hooks, is_bare
from accelerant.ops._library import autocast_dtype
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.streams.graphs import captures_ahead


def plan_module(module: nn.Module, options: Options) -> Replacement | str | None:
    """Return the changes to a module, the reason against any, or None for a container without a rule of its own."""
    kind = type(module)
    if MARK in module.__dict__:
        return "is patched already"
    rule = PLAIN_RULES.get(kind)
    if kind is nn.Sequential and not _pairs(module):
        return None
    if rule is None:
        if hasattr(module, "parametrizations"):
            return "has parametrizations"
        if kind.__module__ == "accelerant.nn.layers" and next(module.children(), None) is None:
            return "is a layer of Accelerant"
        base = next((base for base in kind.__mro__[1:] if base in PLAIN_RULES and base is not nn.Sequential), None)
        return why_left(module) if base is None else f"is a subclass of {base.__name__}, whose forward may be another"
    if "forward" in module.__dict__:
        return "its forward was replaced by another library"
    if has_hooks(module):
        return "has hooks, which may need what torch's forward gives"
    return rule(module, options)


# --- what torch does better ------------------------------------------------------------------------------------------
SMALL = 2**22
"""Elements of a layer's input on a GPU below which torch's function serves it.

A training step of fewer elements waits for the host, of which our ops need twice torch's; beyond, the device is busy
anyway. Under a capture the host does not count. A block of GPT-2's or Llama's form that runs as one function needs less
of it than its modules, and is not left; one of BERT's, which joins three weights, needs more.
"""

SMALL_REASON = f"fewer than {SMALL} elements, for which torch's function costs the host less"

EXPORT_REASON = "recorded by torch.export or torch.jit.trace, to run without Accelerant"


def is_exported() -> bool:
    """Return whether torch.export or torch.jit.trace records the call: by torch's functions, to run anywhere."""
    exports = torch.compiler._is_exporting_flag  # is_exporting() is True under torch 2.11's torch.compile, too
    return exports or (not torch.compiler.is_compiling() and torch._C._is_tracing())


def is_small(x: Tensor, width: int = 1) -> bool:
    """Return whether torch's functions serve x, rows of `width` elements each, in less time, which is the host's."""
    return x.is_cuda and x.numel() * width < SMALL and not captures_ahead()


def leaves(x: Tensor, width: int = 1, *, composed: bool = False) -> bool:
    """Return whether a module leaves its input to its class: a small one, or torch.compile's, which fuses the layer.

    A `composed` forward, of several functions of torch, is slower than our op where none is differentiated.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing() or not isinstance(x, Tensor):
        return True
    return is_small(x, width) and not (composed and not torch.is_grad_enabled())


# --- forward methods -------------------------------------------------------------------------------------------------
def else_class(forward: Forward) -> Forward:
    """Return a forward that runs its class's own where the given one returns None or our op refuses the arguments.

    The class's own may refuse them too, with torch's error; otherwise the ledger counts a fallback with our reason.
    """

    @functools.wraps(forward)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = forward(self, *args, **kwargs)
        except (ConfigError, ShapeError, UnsupportedDtype) as error:
            refused = error
        else:
            return type(self).forward(self, *args, **kwargs) if result is None else result
        result = type(self).forward(self, *args, **kwargs)
        if isinstance(refused, ConfigError):  # an implementation was forced that does not serve the case
            raise refused
        ledger().fallback(FallbackRecord("patch", type(self).__name__, "accelerant", "torch", str(refused)))
        return result

    return run


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor | None:
    """Return ops.linear_gelu; None for arguments that it refuses, or that torch's functions serve."""
    if not isinstance(x, Tensor) or is_exported() or is_small(x):  # a Proxy of torch.fx, or several inputs
        return None
    try:
        return ops.linear_gelu(x, weight, bias, approximate)
    except (ShapeError, UnsupportedDtype) as error:
        ledger().fallback(FallbackRecord("patch", "linear_gelu", "accelerant", "torch", str(error)))
        return None


def keeps_dtype(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch's norm returns the dtype of x, as ours does: equal dtypes, no low-precision autocast."""
    return x.dtype is weight.dtype and _is_wide(x)


def _is_wide(x: Tensor) -> bool:
    """Return whether autocast would not widen x, as it does for norms and softmax."""
    return x.dtype in (torch.float32, torch.float64) or autocast_dtype(x.device.type) is None


@else_class
def layer_norm_forward(self: Any, input: Tensor) -> Any:
    """Run nn.LayerNorm."""
    if not leaves(input) and keeps_dtype(input, self.weight):
        return ops.layer_norm(input, self.weight, self.bias, eps=self.eps)


@else_class
def _rms_norm_forward(self: Any, x: Tensor) -> Any:
    if not leaves(x) and keeps_dtype(x, self.weight):
        return ops.rms_norm(x, self.weight, rms_eps(self, x))


@else_class
def _softmax_forward(self: Any, input: Tensor) -> Any:
    if not leaves(input) and input.is_floating_point() and _is_wide(input):
        return (ops.softmax if type(self) is nn.Softmax else ops.log_softmax)(input, self.dim)


@else_class
def gelu_forward(self: Any, input: Tensor) -> Any:
    """Run a GELU module; the mark holds its approximation."""
    return None if leaves(input) else ops.gelu(input, approximate=getattr(self, MARK).options["approximate"])


@else_class
def silu_forward(self: Any, input: Tensor) -> Any:
    """Run nn.SiLU or the SiLU module of transformers."""
    return None if leaves(input) else ops.silu(input)


@else_class
def embedding_forward(self: Any, input: Tensor) -> Any:
    """Run nn.Embedding."""
    if not leaves(input, self.embedding_dim):
        return ops.embedding(input, self.weight, padding_idx=self.padding_idx)


@else_class
def _dropout_forward(self: Any, input: Tensor) -> Any:
    return None if leaves(input) else ops.dropout(input, self.p, self.training)


@else_class
def _cross_entropy_forward(self: Any, input: Tensor, target: Tensor) -> Any:
    if not leaves(input) and target.dtype == torch.int64 and input.dim() < 3 and target.shape == input.shape[:-1]:
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing}
        return ops.cross_entropy(input, target, reduction=self.reduction, **options)


@else_class
def _pair_loss_forward(self: Any, input: Tensor, target: Tensor) -> Any:
    """Run MSELoss, L1Loss, BCELoss or BCEWithLogitsLoss."""
    weights = {name: getattr(self, name) for name in ("weight", "pos_weight") if getattr(self, name, None) is not None}
    alike = all(each.dtype is input.dtype for each in (target, *weights.values()))
    if alike and input.shape == target.shape and input.is_floating_point() and not leaves(input):
        return getattr(ops, _PAIR_LOSSES[type(self)])(input, target, reduction=self.reduction, **weights)


def _is_gelu(module: Any) -> bool:
    return is_bare(module, nn.GELU) or is_bare(module, nn.GELU, gelu_forward)


def _pairs(module: nn.Module) -> bool:
    """Return whether a Sequential has a linear layer that a GELU follows."""
    children = list(module.children())
    return any(type(a) is nn.Linear and type(b) is nn.GELU for a, b in itertools.pairwise(children))


def _sequential_forward(self: Any, input: Any) -> Any:
    layers = list(self)
    at = 0
    while at < len(layers):
        layer, after = layers[at], layers[at + 1] if at + 1 < len(layers) else None
        y = None
        if after is not None and is_bare(layer, nn.Linear) and _is_gelu(after):
            y = linear_gelu(input, layer.weight, layer.bias, after.approximate)
        input = layer(input) if y is None else y
        at += 1 if y is None else 2
    return input


# --- attention and transformer layers --------------------------------------------------------------------------------
@else_class
def _attention_forward(
    self: Any, query: Tensor, key: Tensor, value: Tensor, key_padding_mask: Tensor | None = None,
    need_weights: bool = True, attn_mask: Tensor | None = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    reason = "need_weights=True: torch's alone returns the weights" if need_weights else None
    if reason is None:
        reason = refuses_multihead(self, (query, key, value), (attn_mask, key_padding_mask), is_causal)
    if reason is None and is_exported():
        reason = EXPORT_REASON
    if reason is None and is_small(query) and not torch.compiler.is_compiling():  # torch's cannot trace some masks
        reason = SMALL_REASON
    if reason is None:
        return multihead_forward(self, query, key, value, key_padding_mask, attn_mask, is_causal)
    if not torch.compiler.is_compiling():
        getattr(self, MARK).report.fallbacks[reason] += 1
    return type(self).forward(
        self, query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
    )


def _feed_forward(self: Any, x: Tensor) -> Tensor:
    """Run linear2(activation(linear1(x))) of a transformer layer, without its last dropout."""
    act: Any = self.activation
    exact, h = act is F.gelu, None
    if is_bare(self.linear1, nn.Linear) and (exact or (isinstance(act, nn.Module) and _is_gelu(act))):
        h = linear_gelu(x, self.linear1.weight, self.linear1.bias, "none" if exact else act.approximate)
    if h is None:
        h = act(self.linear1(x))
    y: Tensor = self.linear2(self.dropout(h))
    return y


ADD_NORMS: dict[Forward, Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]]] = {
    layer_norm_forward: lambda x, y, norm: ops.add_layer_norm(x, y, norm.weight, norm.bias, eps=norm.eps),
}
"""Forward of a norm -> the op of x, a residual and the norm that also adds; blocks.py adds those of transformers."""


def add_norm(x: Tensor, residual: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """Return norm(x + residual) and the sum, in one pass if the norm runs on our op."""
    kind, weight = type(norm), getattr(norm, "weight", None)
    if (
        x.dtype is residual.dtype and x.shape == residual.shape and weight is not None
        and not leaves(x, composed=kind is not nn.LayerNorm) and keeps_dtype(x, weight)
    ):  # fmt: skip
        for forward, op in ADD_NORMS.items():
            if is_bare(norm, kind, forward):
                return op(x, residual, norm)
    total = x + residual
    return norm(total), total


def _branches(self: Any, x: Tensor, branches: Sequence[tuple[Any, Callable[[Tensor], Tensor]]]) -> Tensor:
    """Add each branch to x, with its norm before it or after the sum."""
    if not self.norm_first:
        for norm, branch in branches:
            x = add_norm(branch(x), x, norm)[0]
        return x
    norms, functions = zip(*branches, strict=True)
    h: Tensor = norms[0](x)
    for branch, norm in zip(functions, norms[1:], strict=False):
        h, x = add_norm(branch(h), x, norm)
    y: Tensor = functions[-1](h)
    return x + y


def _encoder_layer_forward(
    self: Any, src: Tensor, src_mask: Tensor | None = None, src_key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    if src.is_nested or src.dim() != 3:
        return type(self).forward(self, src, src_mask, src_key_padding_mask, is_causal)

    def attend(x: Tensor) -> Tensor:
        y = self.self_attn(
            x, x, x, attn_mask=src_mask, key_padding_mask=src_key_padding_mask, need_weights=False, is_causal=is_causal
        )[0]
        dropped: Tensor = self.dropout1(y)
        return dropped

    return _branches(self, src, [(self.norm1, attend), (self.norm2, lambda x: self.dropout2(_feed_forward(self, x)))])


def _decoder_layer_forward(
    self: Any, tgt: Tensor, memory: Tensor, tgt_mask: Tensor | None = None, memory_mask: Tensor | None = None,
    tgt_key_padding_mask: Tensor | None = None, memory_key_padding_mask: Tensor | None = None,
    tgt_is_causal: bool = False, memory_is_causal: bool = False,
) -> Any:  # fmt: skip
    def attend(x: Tensor) -> Tensor:
        options = {"attn_mask": tgt_mask, "key_padding_mask": tgt_key_padding_mask, "is_causal": tgt_is_causal}
        y: Tensor = self.dropout1(self.self_attn(x, x, x, need_weights=False, **options)[0])
        return y

    def attend_memory(x: Tensor) -> Tensor:
        options = {"attn_mask": memory_mask, "key_padding_mask": memory_key_padding_mask, "is_causal": memory_is_causal}
        y: Tensor = self.dropout2(self.multihead_attn(x, memory, memory, need_weights=False, **options)[0])
        return y

    rest = (self.norm3, lambda x: self.dropout3(_feed_forward(self, x)))
    return _branches(self, tgt, [(self.norm1, attend), (self.norm2, attend_memory), rest])


# --- rules -----------------------------------------------------------------------------------------------------------
def _norm(op: str, forward: Forward) -> Rule:
    """Return the rule of a norm of torch.nn's."""

    def plan(module: Any, options: Options) -> Replacement | str:
        if len(module.normalized_shape) != 1 or module.weight is None:
            return f"normalizes over {tuple(module.normalized_shape)}{' without weights' * (module.weight is None)}"
        return Replacement([("norm", op)], forward)

    return plan


plan_layer_norm = _norm("ops.layer_norm", layer_norm_forward)


def _softmax(module: Any, options: Options) -> Replacement | str:
    if module.dim is None:
        return "has no dim"
    name = "softmax" if type(module) is nn.Softmax else "log_softmax"
    return Replacement([("softmax", f"ops.{name}")], _softmax_forward)


def _gelu(module: Any, options: Options) -> Replacement | str:
    changes = [("activation", f"ops.gelu({module.approximate!r})")]
    return Replacement(changes, gelu_forward, options={"approximate": str(module.approximate)})


def plan_silu(module: Any, options: Options) -> Replacement | str:
    """Return the plan of a SiLU."""
    if getattr(module, "inplace", False):
        return "writes over its input"
    return Replacement([("activation", "ops.silu")], silu_forward)


def plan_embedding(module: Any, options: Options) -> Replacement | str:
    """Return the plan of an nn.Embedding."""
    if not options.embedding:
        return "patch(model, embedding=False)"
    for name in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, name):
            return f"has {name}={getattr(module, name)}"
    return Replacement([("embedding", "ops.embedding")], embedding_forward)


def _dropout(module: Any, options: Options) -> Replacement | str:
    if module.inplace:
        return "writes over its input"
    notes = ("dropout draws other random numbers than torch's, and keeps no mask on a GPU",) if module.p else ()
    return Replacement([("dropout", "ops.dropout")], _dropout_forward, notes=notes)


_PAIR_LOSSES: dict[type[nn.Module], str] = {
    nn.MSELoss: "mse_loss", nn.L1Loss: "l1_loss", nn.BCELoss: "binary_cross_entropy",
    nn.BCEWithLogitsLoss: "binary_cross_entropy_with_logits",
}  # fmt: skip


def _loss(module: Any, options: Options) -> Replacement | str:
    if not options.loss:
        return "patch(model, loss=False)"
    if type(module) is nn.CrossEntropyLoss:
        if module.weight is not None:
            return "has weights of classes"
        return Replacement([("loss", "ops.cross_entropy")], _cross_entropy_forward)
    return Replacement([("loss", f"ops.{_PAIR_LOSSES[type(module)]}")], _pair_loss_forward)


def _attention(module: Any, options: Options) -> Replacement | str:
    if not module._qkv_same_embed_dim or module.bias_k is not None or module.add_zero_attn:
        return "has keys or values of another width, bias_kv or add_zero_attn"
    if hasattr(module.out_proj, "parametrizations") or has_hooks(module.out_proj):
        return "its out_proj has hooks or parametrizations"
    return Replacement([("attention", "ops.attention")], _attention_forward)


def _transformer_layer(forward: Forward, norms: tuple[str, ...]) -> Rule:
    def plan(module: Any, options: Options) -> Replacement | str:
        for name in norms:
            if type(getattr(module, name)) is not nn.LayerNorm:
                return f"its {name} is a {type(getattr(module, name)).__name__}"
        act = module.activation
        changes = [("residual", "ops.add_layer_norm")]
        if act is F.gelu or type(act) is nn.GELU:
            changes.append(("mlp", "ops.linear_gelu"))
        return Replacement(changes, forward)

    return plan


PLAIN_RULES |= {
    nn.LayerNorm: plan_layer_norm,
    nn.RMSNorm: _norm("ops.rms_norm", _rms_norm_forward),
    nn.Softmax: _softmax,
    nn.LogSoftmax: _softmax,
    nn.GELU: _gelu,
    nn.SiLU: plan_silu,
    nn.Embedding: plan_embedding,
    nn.Dropout: _dropout,
    nn.CrossEntropyLoss: _loss,
    **dict.fromkeys(_PAIR_LOSSES, _loss),
    nn.Sequential: lambda module, options: Replacement([("mlp", "ops.linear_gelu")], _sequential_forward),
    nn.MultiheadAttention: _attention,
    nn.TransformerEncoderLayer: _transformer_layer(_encoder_layer_forward, ("norm1", "norm2")),
    nn.TransformerDecoderLayer: _transformer_layer(_decoder_layer_forward, ("norm1", "norm2", "norm3")),
}
