"""Multi-tensor updates: AdamW, SGD, the gradients' norm and their clipping, as Operations.

They change their arguments and have no gradient, so they are not registered with torch: the optimizers of
accelerant.nn.optim call the Operations directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from accelerant.ops._launch import triton_operation
from accelerant.ops._refusals import refuses_float64
from accelerant.ops.multi_tensor import launch
from accelerant.ops.multi_tensor.launch import AdamWGroup, SGDGroup, Update
from accelerant.ops.multi_tensor.tables import Bucket, Table, Tensors, Workspace, check
from accelerant.ops.multi_tensor.torch_steps import torch_adamw, torch_clip, torch_norm, torch_sgd
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case, Cost

__all__ = [
    "AdamWGroup", "SGDGroup", "Tensors", "Update", "Workspace", "adamw_step", "case_of", "check", "clip_step",
    "global_norm", "sgd_step",
]  # fmt: skip


def _buckets(case: Case) -> list[Bucket]:
    return [option for option in case.options if isinstance(option, Bucket)]


def _refuses(case: Case) -> str | None:
    for bucket in _buckets(case):
        if torch.float64 in (bucket.param, bucket.grad, bucket.state):
            return refuses_float64(torch.float64)
        if bucket.layout == "strided":
            return "tensors with gaps, or parameters whose layout differs from their gradients and state"
    return refuses_triton(case.device)


def _update_cost(case: Case) -> Cost:
    """Return the cost of reading and writing parameters and state, and of reading gradients, twice with the norm."""
    states = 2 if "sgd" not in case.options else 1
    reads = 2 if "clipped" in case.options else 1
    total = 0
    for bucket in _buckets(case):
        moved = reads * bucket.grad.itemsize
        if bucket.param is not None:
            moved += bucket.param.itemsize + (8 if bucket.master else bucket.param.itemsize)
        if bucket.state is not None:
            moved += 2 * states * bucket.state.itemsize
        total += bucket.elements * moved
    return Cost(total, (15 if states == 2 else 6) * case.shape[1])


def _gradients_cost(passes: int, case: Case) -> Cost:
    return Cost(passes * sum(bucket.elements * bucket.grad.itemsize for bucket in _buckets(case)), 2 * case.shape[1])


def _triton_norm(grads: Sequence[Tensor], table: Table, max_norm: float) -> Tensor:
    out = torch.empty(2, dtype=torch.float32, device=grads[0].device)
    launch.launch_norm(table, out, max_norm)
    return out


adamw_step, sgd_step = (
    triton_operation(
        f"{name}_step",
        partial(launch.launch_update, name),
        torch_step,
        cost=_update_cost,
        refuses=_refuses,
        mutates=True,
    )
    for name, torch_step in (("adamw", torch_adamw), ("sgd", torch_sgd))
)
global_norm = triton_operation(
    "global_norm",
    _triton_norm,
    lambda grads, table, max_norm: torch_norm(grads, max_norm),
    cost=partial(_gradients_cost, 1),
    refuses=_refuses,
)
clip_step = triton_operation(
    "clip_step",
    lambda grads, table, scale: launch.launch_clip(table, scale),
    lambda grads, table, scale: torch_clip(grads, scale),
    cost=partial(_gradients_cost, 2),
    refuses=_refuses,
    mutates=True,
)


def case_of(table: Table, device: torch.device, *options: str) -> Case:
    """Return the case of a table: its buckets, the largest first, and the options."""
    largest = table.buckets[0]
    return Case(device, largest.param or largest.grad, table.shape, (*table.buckets, *options))
