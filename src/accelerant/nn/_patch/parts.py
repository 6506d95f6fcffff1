"""What the functions of whole blocks share: what they need to know, when they serve, and the pieces of their passes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops._library import autocast_dtype, is_ordinary, is_plain
from accelerant.ops.attention.op import attention_bwd, options_of
from accelerant.ops.transformer.op import column_sums
from accelerant.ops.transformer.packed import attend_backward
from accelerant.runtime.dispatch import Case

__all__ = [
    "Gradients",
    "Spec",
    "Weights",
    "attention_case",
    "is_serviceable",
    "linear",
    "linears_backward",
    "packed_gradient",
    "rows_of",
    "run_again",
]

Weights = tuple[Tensor | None, ...]
Gradients = tuple[Tensor | None, ...]


class Spec(NamedTuple):
    """What a block's function needs to know beside its tensors.

    Attributes:
        eps: of the first norm and of the second.
        heads: of queries, and of keys and values.
        causal, window, scale: as attention takes them.
        approximate: of the GELU; "" where there is none.
        again: the block by its modules, (x) -> its result.
    """

    eps: tuple[float, float]
    heads: tuple[int, int]
    causal: bool
    window: int
    scale: float
    approximate: str
    again: Callable[[Tensor], Tensor]


def is_serviceable(x: Tensor, weights: Weights) -> bool:
    """Whether a block's function may take these: gradients wanted, one dtype, nobody who wants to see the parts."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or autocast_dtype(x.device.type) is not None:
        return False
    if not is_plain(x) or x.dim() != 3:
        return False
    dtype, learns = x.dtype, x.requires_grad
    for weight in weights:
        if weight is not None:
            if weight.dtype is not dtype or not is_ordinary(weight):
                return False
            learns = learns or weight.requires_grad
    return learns


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def linears_backward(
    dys: Sequence[Tensor], x: Tensor, weights: Sequence[Any], needs: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """The gradient of what several layers share, summed by their products; and those of (weight, bias), ...."""
    dx = torch.mm(dys[0], weights[0])
    gradients: list[Tensor | None] = []
    for i, dy in enumerate(dys):
        if i:
            dx.addmm_(dy, weights[2 * i])
        gradients.append(torch.mm(dy.t(), x) if needs[2 * i] else None)
        gradients.append(column_sums(dy, dy.dtype) if needs[2 * i + 1] else None)
    return dx, gradients


def rows_of(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B S, H D)."""
    B, H, S, D = x.shape
    return x.transpose(1, 2).reshape(B * S, H * D)


def attention_case(q: Tensor, k: Tensor, spec: Spec) -> Case:
    B, Hq, S, D = q.shape
    return Case(q.device, q.dtype, (B, Hq, k.shape[1], S, k.shape[2], D), options_of(spec.causal, spec.window))


def run_again(ctx: Any, dy: Tensor, x: Tensor, weights: Sequence[Tensor | None], first: int) -> Gradients:
    """The gradients with a graph of their own, from the block's modules."""
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    places = [i for i, need in enumerate(ctx.needs_input_grad) if need]
    inputs = [x, *weights]
    at = [0 if i == 1 else i - first + 1 for i in places]  # x is argument 1, the weights begin at `first`
    y = ctx.spec.again(x)
    wanted: list[Any] = [inputs[i] for i in at]
    gradients = torch.autograd.grad(y, wanted, dy, create_graph=True, allow_unused=True, materialize_grads=True)
    for place, gradient in zip(places, gradients, strict=True):
        found[place] = gradient
    return tuple(found)


def packed_gradient(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, spec: Spec) -> Tensor:
    """The gradient of q, k and v as they left their product, (B, S, 3, H, D)."""
    if spec.window < 0 and spec.scale == qkv.shape[-1] ** -0.5:
        return attend_backward(do, qkv, o, lse, causal=spec.causal)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
    parts = attention_bwd(attention_case(q, k, spec), do, q, k, v, o, lse, spec.causal, spec.scale, spec.window)
    return torch.stack([part.transpose(1, 2) for part in parts], 2)
