"""Multi-tensor updates: what may be asked, and who serves it.

These change their arguments and have no gradient, so torch is not told of them: the optimisers of accelerant.nn.optim
call the Operations directly.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.ops._refusals import refuses_float64
from accelerant.ops.multi_tensor.launch import (
    AdamWGroup,
    SGDGroup,
    Update,
    launch_adamw,
    launch_clip,
    launch_norm,
    launch_sgd,
)
from accelerant.ops.multi_tensor.tables import Share, Table, Tensors, Workspace, check
from accelerant.ops.multi_tensor.torch_steps import torch_adamw, torch_clip, torch_norm, torch_sgd
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = [
    "AdamWGroup",
    "SGDGroup",
    "Tensors",
    "Update",
    "Workspace",
    "adamw_step",
    "case_of",
    "check",
    "clip_step",
    "global_norm",
    "sgd_step",
]


def _shares(case: Case) -> list[Share]:
    return [option for option in case.options if isinstance(option, Share)]


def _refuses(case: Case) -> str | None:
    for share in _shares(case):
        if torch.float64 in (share.param, share.grad, share.state):
            return refuses_float64(torch.float64)
        if share.layout == "strided":
            return "tensors with gaps, or parameters that lie otherwise than their gradients and state"
    return refuses_triton(case.device)


def _update_cost(case: Case) -> Cost:
    """Parameter and state read and written, gradient read; once more for the norm."""
    both = 2 if "sgd" not in case.options else 1
    reads = 2 if "clipped" in case.options else 1
    total = 0
    for share in _shares(case):
        param = 0 if share.param is None else (share.param.itemsize + 8 if share.master else 2 * share.param.itemsize)
        state = 0 if share.state is None else 2 * both * share.state.itemsize
        total += share.elements * (param + state + reads * share.grad.itemsize)
    return Cost(total, (15 if both == 2 else 6) * case.shape[1])


def _gradients_cost(case: Case, passes: int) -> Cost:
    return Cost(passes * sum(share.elements * share.grad.itemsize for share in _shares(case)), 2 * case.shape[1])


def _triton_norm(grads: Sequence[Tensor], table: Table, max_norm: float) -> Tensor:
    out = torch.empty(2, dtype=torch.float32, device=grads[0].device)
    launch_norm(table, out, max_norm)
    return out


def _torch_norm(grads: Sequence[Tensor], table: Table, max_norm: float) -> Tensor:
    return torch_norm(grads, max_norm)


def _triton_clip(grads: Sequence[Tensor], table: Table, scale: Tensor) -> None:
    launch_clip(table, scale)


def _torch_clip(grads: Sequence[Tensor], table: Table, scale: Tensor) -> None:
    torch_clip(grads, scale)


adamw_step = Operation(
    "adamw_step",
    (
        Implementation("triton", launch_adamw, refuses=_refuses, own=True, mutates=True),
        Implementation("torch", torch_adamw, mutates=True),
    ),
    cost=_update_cost,
)
sgd_step = Operation(
    "sgd_step",
    (
        Implementation("triton", launch_sgd, refuses=_refuses, own=True, mutates=True),
        Implementation("torch", torch_sgd, mutates=True),
    ),
    cost=_update_cost,
)
global_norm = Operation(
    "global_norm",
    (Implementation("triton", _triton_norm, refuses=_refuses, own=True), Implementation("torch", _torch_norm)),
    cost=lambda case: _gradients_cost(case, 1),
)
clip_step = Operation(
    "clip_step",
    (
        Implementation("triton", _triton_clip, refuses=_refuses, own=True, mutates=True),
        Implementation("torch", _torch_clip, mutates=True),
    ),
    cost=lambda case: _gradients_cost(case, 2),
)


def case_of(table: Table, device: torch.device, *options: str) -> Case:
    """What a choice depends on: the combinations of dtypes and layouts, the largest first, and the options."""
    largest = table.shares[0]
    return Case(device, largest.param or largest.grad, table.shape, (*table.shares, *options))
