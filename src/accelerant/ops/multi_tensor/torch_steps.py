"""The same updates by torch's own functions: for devices without our kernels, float64, and tensors of any layout.

Tensors of a group with one dtype throughout go through torch's fused update; others a tensor at a time in float32
(float64 for float64), which is also what tensor subclasses get.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from accelerant.ops.multi_tensor.launch import AdamWGroup, SGDGroup, Update
from accelerant.ops.multi_tensor.tables import Tensors, alike

__all__ = ["torch_adamw", "torch_clip", "torch_norm", "torch_sgd"]

_FUSED_DEVICES = ("cpu", "cuda", "mps")
_fused_adamw: Callable[..., None] = torch._fused_adamw_
_fused_sgd: Callable[..., None] = torch._fused_sgd_


def torch_norm(grads: Sequence[Tensor], max_norm: float = 1.0) -> Tensor:
    """The norm of all gradients and the clipping coefficient, two of float32 (float64 for float64)."""
    norm = torch.nn.utils.get_total_norm(list(grads))
    norm = norm.to(torch.float64 if norm.dtype == torch.float64 else torch.float32)
    return torch.stack([norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)])


def torch_clip(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply the gradients in place."""
    torch._foreach_mul_(list(grads), scale)


def torch_adamw(update: Update) -> None:
    """AdamW of every tensor."""
    scale = _scale(update)
    for number, (places, fused) in _by_group(update).items():
        group = cast(AdamWGroup, update.groups[number])
        if not fused:
            for place in places:
                _adamw_one(update.tensors, place, group, scale, update.found_inf)
            continue
        lists = _chosen(update.tensors, places)
        torch._foreach_add_(lists.counters, 1)
        _fused_adamw(
            lists.params, _scaled(lists.grads, scale), lists.first, lists.second, [], lists.counters,
            amsgrad=False, lr=group.lr, beta1=group.beta1, beta2=group.beta2, weight_decay=group.weight_decay,
            eps=group.eps, maximize=group.maximize, grad_scale=None, found_inf=update.found_inf,
        )  # fmt: skip
        if update.found_inf is not None:
            torch._foreach_sub_(lists.counters, [update.found_inf] * len(places))


def torch_sgd(update: Update) -> None:
    """SGD of every tensor."""
    scale = _scale(update)
    for number, (places, fused) in _by_group(update).items():
        group = cast(SGDGroup, update.groups[number])
        new = [place in update.tensors.new for place in places] if update.tensors.new else [False]
        lists = _chosen(update.tensors, places)
        # On the CPU torch 2.13's fused SGD is wrong in half precision from 16 elements on.
        half_on_cpu = lists.params[0].device.type == "cpu" and lists.params[0].dtype in (torch.float16, torch.bfloat16)
        if not fused or half_on_cpu or (any(new) and not all(new)):
            for place in places:
                _sgd_one(update.tensors, place, group, scale, update.found_inf)
            continue
        _fused_sgd(
            lists.params, _scaled(lists.grads, scale), lists.first if group.momentum else [],
            weight_decay=group.weight_decay, momentum=group.momentum, lr=group.lr, dampening=group.dampening,
            nesterov=group.nesterov, maximize=group.maximize, is_first_step=all(new) and group.momentum != 0,
            grad_scale=None, found_inf=update.found_inf,
        )  # fmt: skip


def _by_group(update: Update) -> dict[int, tuple[list[int], bool]]:
    """Number of a group -> the places of its tensors, and whether torch's fused updates take them."""
    table = update.table
    if table is not None and table.by_group is not None:
        return cast("dict[int, tuple[list[int], bool]]", table.by_group)
    places: dict[int, list[int]] = {}
    for place, number in enumerate(update.tensors.groups):
        places.setdefault(number, []).append(place)
    found = {number: (own, _one_dtype(_chosen(update.tensors, own))) for number, own in places.items()}
    if table is not None:
        table.by_group = found
    return found


def _scale(update: Update) -> Tensor | None:
    """What every gradient is multiplied by; None for 1. Puts the norm where the kernels put it."""
    scale = None if update.grad_scale is None else update.grad_scale.double().reciprocal().float().reshape(())
    if update.max_norm is None:
        return scale
    norm = torch_norm(update.tensors.grads)[0]
    if scale is not None:
        norm = norm * scale
    update.workspace.norm.copy_(norm)
    clip = (update.max_norm / (norm + 1e-6)).clamp(max=1.0)
    return clip if scale is None else clip * scale


def _scaled(grads: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    return grads if scale is None else list(torch._foreach_mul(grads, scale.to(grads[0].dtype)))


def _chosen(tensors: Tensors, places: Sequence[int]) -> Tensors:
    if len(places) == len(tensors.groups):
        return tensors

    def pick(each: list[Any]) -> list[Any]:
        return [each[place] for place in places] if each else each

    return Tensors(
        pick(tensors.params), pick(tensors.grads), pick(tensors.first), pick(tensors.second), pick(tensors.masters),
        pick(tensors.counters), groups=[],
    )  # fmt: skip


def _one_dtype(lists: Tensors) -> bool:
    """Whether torch's fused updates take these: ordinary tensors of one floating dtype and like layout."""
    if any(master is not None for master in lists.masters) or lists.params[0].device.type not in _FUSED_DEVICES:
        return False
    kinds = {
        each.dtype
        for some in (lists.params, lists.grads, lists.first, lists.second)
        for each in some
        if each is not None
    }
    if len(kinds) != 1:
        return False
    if not all(type(param) in (torch.nn.Parameter, Tensor) for param in lists.params):
        return False
    lists_of_each = [some for some in (lists.params, lists.grads, lists.first, lists.second) if some]
    return all(alike(each) for each in zip(*lists_of_each, strict=True))


def _adamw_one(tensors: Tensors, place: int, group: AdamWGroup, scale: Tensor | None, found_inf: Tensor | None) -> None:
    first, counter, second = cast(Tensor, tensors.first[place]), tensors.counters[place], tensors.second[place]
    p, g = _wide(tensors, place, scale, group.maximize)
    step = counter + 1
    m = group.beta1 * first.to(p.dtype) + (1 - group.beta1) * g
    v = group.beta2 * second.to(p.dtype) + (1 - group.beta2) * g * g
    wide = step.double() if p.device.type != "mps" else step  # 1 - beta^step cancels in float32
    root = (1 - group.beta2**wide).sqrt().to(p.dtype)
    size = (group.lr / (1 - group.beta1**wide)).to(p.dtype)
    p = p * (1 - group.lr * group.weight_decay) - size * m / (v.sqrt() / root + group.eps)
    targets = [(first, m), (second, v), (counter, step), *_targets(tensors, place, p)]
    _store(targets, found_inf)


def _sgd_one(tensors: Tensors, place: int, group: SGDGroup, scale: Tensor | None, found_inf: Tensor | None) -> None:
    p, g = _wide(tensors, place, scale, group.maximize)
    if group.weight_decay:
        g = g + group.weight_decay * p
    targets = []
    buffer = tensors.first[place] if tensors.first else None
    if group.momentum and buffer is not None:
        new = place in tensors.new
        b = g if new else group.momentum * buffer.to(p.dtype) + (1 - group.dampening) * g
        targets.append((buffer, b))
        g = g + group.momentum * b if group.nesterov else b
    _store([*targets, *_targets(tensors, place, p - group.lr * g)], found_inf)


def _wide(tensors: Tensors, place: int, scale: Tensor | None, maximize: bool) -> tuple[Tensor, Tensor]:
    """The parameter and its gradient in the dtype of the arithmetic."""
    master = tensors.masters[place] if tensors.masters else None
    param = tensors.params[place] if master is None else master
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    g = tensors.grads[place].to(dtype)
    if scale is not None:
        g = g * scale
    return param.to(dtype), -g if maximize else g


def _targets(tensors: Tensors, place: int, p: Tensor) -> list[tuple[Tensor, Tensor]]:
    master = tensors.masters[place] if tensors.masters else None
    return [(each, p) for each in (tensors.params[place], master) if each is not None]


def _store(targets: list[tuple[Tensor, Tensor]], found_inf: Tensor | None) -> None:
    for target, value in targets:
        target.copy_(value if found_inf is None else torch.where(found_inf != 0, target.to(value.dtype), value))
