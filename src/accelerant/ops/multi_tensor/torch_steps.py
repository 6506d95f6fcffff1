"""The multi-tensor updates by torch's functions: for devices without Triton kernels, float64, and any layout.

Tensors of a group with a single dtype use torch's fused update; others, and tensor subclasses except those of `acl.to`,
are updated one by one in float32 (float64 for float64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from accelerant.ops._library import composed
from accelerant.ops.multi_tensor.tables import AdamWGroup, SGDGroup, Tensors, Update, same_layout

_FUSED_DEVICES = ("cpu", "cuda", "mps")
_fused_adamw: Callable[..., None] = torch._fused_adamw_
_fused_sgd: Callable[..., None] = torch._fused_sgd_


def torch_norm(grads: Sequence[Tensor], max_norm: float = 1.0) -> Tensor:
    """Return the norm of all gradients and the clipping coefficient, two float32 (float64 for float64)."""
    norm = torch.nn.utils.get_total_norm(list(grads))
    norm = norm.to(torch.float64 if norm.dtype == torch.float64 else torch.float32)
    return torch.stack([norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)])


def torch_clip(grads: Sequence[Tensor], scale: Tensor) -> None:
    """Multiply the gradients in place."""
    torch._foreach_mul_(list(grads), scale)


def torch_adamw(update: Update) -> None:
    """Apply AdamW to every tensor."""
    scale = _scale(update)
    for number, (indices, fused) in _by_group(update).items():
        group = cast(AdamWGroup, update.groups[number])
        if not fused:
            for i in indices:
                _adamw_one(update.tensors, i, group, scale, update.found_inf)
            continue
        lists = _select(update.tensors, indices)
        torch._foreach_add_(lists.counters, 1)
        grads, grad_scale = lists.grads, None
        # torch on the CPU, which runs where found_inf is given, would write the gradients
        if scale is not None and update.found_inf is None and type(grads[0]) in composed:
            grad_scale = scale.reciprocal()
        else:
            grads = _scaled(grads, scale)
        _fused_adamw(
            lists.params, grads, lists.first, lists.second, [], lists.counters,
            amsgrad=False, lr=group.lr, beta1=group.beta1, beta2=group.beta2, weight_decay=group.weight_decay,
            eps=group.eps, maximize=group.maximize, grad_scale=grad_scale,
            found_inf=update.found_inf,
        )  # fmt: skip
        if update.found_inf is not None:
            torch._foreach_sub_(lists.counters, [update.found_inf] * len(indices))


def torch_sgd(update: Update) -> None:
    """Apply SGD to every tensor."""
    scale = _scale(update)
    for number, (indices, fused) in _by_group(update).items():
        group = cast(SGDGroup, update.groups[number])
        new = [i in update.tensors.new for i in indices] if update.tensors.new else [False]
        lists = _select(update.tensors, indices)
        # torch 2.13's fused SGD on the CPU is wrong in half precision from 16 elements on.
        half_on_cpu = lists.params[0].device.type == "cpu" and lists.params[0].dtype in (torch.float16, torch.bfloat16)
        one_by_one = half_on_cpu or type(lists.params[0]) in composed  # which have no fused SGD
        if not fused or one_by_one or (any(new) and not all(new)):
            for i in indices:
                _sgd_one(update.tensors, i, group, scale, update.found_inf)
            continue
        _fused_sgd(
            lists.params, _scaled(lists.grads, scale), lists.first if group.momentum else [],
            weight_decay=group.weight_decay, momentum=group.momentum, lr=group.lr, dampening=group.dampening,
            nesterov=group.nesterov, maximize=group.maximize, is_first_step=all(new) and group.momentum != 0,
            grad_scale=None, found_inf=update.found_inf,
        )  # fmt: skip


def _by_group(update: Update) -> dict[int, tuple[list[int], bool]]:
    """Return for each group the indices of its tensors, and whether torch's fused update can take them."""
    table = update.table
    if table is not None and table.by_group is not None:
        return cast("dict[int, tuple[list[int], bool]]", table.by_group)
    members: dict[int, list[int]] = {}
    for i, number in enumerate(update.tensors.groups):
        members.setdefault(number, []).append(i)
    groups = {number: (indices, _can_fuse(_select(update.tensors, indices))) for number, indices in members.items()}
    if table is not None:
        table.by_group = groups
    return groups


def _scale(update: Update) -> Tensor | None:
    """Return the factor of all gradients, None for 1, and store the norm in workspace.norm as the kernels do."""
    scale = None if update.grad_scale is None else update.grad_scale.double().reciprocal().float().reshape(())
    if update.max_norm is None:
        return scale
    norm = torch_norm(update.tensors.grads)[0]
    if scale is not None:
        norm = norm * scale
        if update.found_inf is None:
            update.found_inf = norm.isfinite().logical_not().float().reshape(())
    update.workspace.norm.copy_(norm)
    clip = (update.max_norm / (norm + 1e-6)).clamp(max=1.0)
    return clip if scale is None else clip * scale


def _scaled(grads: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    return grads if scale is None else list(torch._foreach_mul(grads, scale.to(grads[0].dtype)))


def _select(tensors: Tensors, indices: Sequence[int]) -> Tensors:
    if len(indices) == len(tensors.groups):
        return tensors

    def pick(column: list[Any]) -> list[Any]:
        return [column[i] for i in indices] if column else column

    return Tensors(
        pick(tensors.params), pick(tensors.grads), pick(tensors.first), pick(tensors.second), pick(tensors.masters),
        pick(tensors.counters), groups=[],
    )  # fmt: skip


def _can_fuse(tensors: Tensors) -> bool:
    """Return whether torch's fused updates can take these: plain or composed ones of one floating dtype and layout."""
    if any(master is not None for master in tensors.masters) or tensors.params[0].device.type not in _FUSED_DEVICES:
        return False
    columns = [column for column in (tensors.params, tensors.grads, tensors.first, tensors.second) if column]
    if len({x.dtype for column in columns for x in column if x is not None}) != 1:
        return False
    if not all(type(param) in (torch.nn.Parameter, Tensor, *composed) for param in tensors.params):
        return False
    return all(same_layout(row) for row in zip(*columns, strict=True))


def _adamw_one(tensors: Tensors, i: int, group: AdamWGroup, scale: Tensor | None, found_inf: Tensor | None) -> None:
    first, counter, second = cast(Tensor, tensors.first[i]), tensors.counters[i], tensors.second[i]
    p, g = _wide(tensors, i, scale, group.maximize)
    step = counter + 1
    m = group.beta1 * first.to(p.dtype) + (1 - group.beta1) * g
    v = group.beta2 * second.to(p.dtype) + (1 - group.beta2) * g * g
    wide = step.double() if p.device.type != "mps" else step  # 1 - beta^step cancels in float32
    root = (1 - group.beta2**wide).sqrt().to(p.dtype)
    size = (group.lr / (1 - group.beta1**wide)).to(p.dtype)
    p = p * (1 - group.lr * group.weight_decay) - size * m / (v.sqrt() / root + group.eps)
    targets = [(first, m), (second, v), (counter, step), *_targets(tensors, i, p)]
    _store(targets, found_inf)


def _sgd_one(tensors: Tensors, i: int, group: SGDGroup, scale: Tensor | None, found_inf: Tensor | None) -> None:
    p, g = _wide(tensors, i, scale, group.maximize)
    if group.weight_decay:
        g = g + group.weight_decay * p
    targets = []
    buffer = tensors.first[i] if tensors.first else None
    if group.momentum and buffer is not None:
        new = i in tensors.new
        b = g if new else group.momentum * buffer.to(p.dtype) + (1 - group.dampening) * g
        targets.append((buffer, b))
        g = g + group.momentum * b if group.nesterov else b
    _store([*targets, *_targets(tensors, i, p - group.lr * g)], found_inf)


def _wide(tensors: Tensors, i: int, scale: Tensor | None, maximize: bool) -> tuple[Tensor, Tensor]:
    """Return the parameter and its scaled gradient in the dtype to compute in."""
    master = tensors.masters[i] if tensors.masters else None
    param = tensors.params[i] if master is None else master
    dtype = torch.float64 if param.dtype == torch.float64 else torch.float32
    g = tensors.grads[i].to(dtype)
    if scale is not None:
        g = g * scale
    return param.to(dtype), -g if maximize else g


def _targets(tensors: Tensors, i: int, p: Tensor) -> list[tuple[Tensor, Tensor]]:
    master = tensors.masters[i] if tensors.masters else None
    return [(x, p) for x in (tensors.params[i], master) if x is not None]


def _store(targets: list[tuple[Tensor, Tensor]], found_inf: Tensor | None) -> None:
    for target, value in targets:
        target.copy_(value if found_inf is None else torch.where(found_inf != 0, target.to(value.dtype), value))
