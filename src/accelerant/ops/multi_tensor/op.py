"""Multi-tensor updates: AdamW, SGD, the gradients' norm and their clipping; launches of their kernels, and Operations.

They change their arguments and have no gradient, so they are not registered with torch: the optimizers of
accelerant.nn.optim call the Operations directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor

from accelerant.errors import AccelerantError, CompileError, LaunchError
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import composed, refuses_float64
from accelerant.ops.multi_tensor import tables
from accelerant.ops.multi_tensor.tables import AdamWGroup, Bucket, SGDGroup, Table, Tensors, Update, Workspace, check
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case, Cost

# --- references ------------------------------------------------------------------------------------------------------


def adamw_reference(
    p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int, *, lr: float, beta1: float, beta2: float, eps: float,
    weight_decay: float, maximize: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the parameter and its two moments after a step; `step` counts from 1.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2, in the form of torch.optim.AdamW.
    """
    g = -g if maximize else g
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    m_hat = m / (1 - beta1**step)
    v_hat = v / (1 - beta2**step)
    return p - lr * weight_decay * p - lr * m_hat / (v_hat.sqrt() + eps), m, v


# --- by torch's functions --------------------------------------------------------------------------------------------

_FUSED_DEVICES = ("cpu", "cuda", "mps")
_fused_adamw: Callable[..., None] = torch._fused_adamw_
_fused_sgd: Callable[..., None] = torch._fused_sgd_


def torch_norm(grads: Sequence[Tensor], max_norm: float = 1.0) -> Tensor:
    """Return the norm of all gradients and the clipping coefficient, two float32 (float64 for float64)."""
    norm = _total_norm(grads)
    return torch.stack([norm, (max_norm / (norm + 1e-6)).clamp(max=1.0)])


def _total_norm(grads: Sequence[Tensor]) -> Tensor:
    if type(grads[0]) in composed:
        norm = torch.nn.utils.get_total_norm(list(grads))
    else:  # the same without its sorting by device and dtype
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(grads))))
    return norm if norm.dtype == torch.float64 else norm.float()


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
        # torch on the CPU, which runs where found_inf is given, would write the gradients
        divided = scale is not None and update.found_inf is None and type(lists.grads[0]) in composed
        grad_scale = scale.reciprocal() if scale is not None and divided else None
        for part in (lists,) if scale is None or divided else _scaled(lists, scale):
            _fused_adamw(
                part.params, part.grads, part.first, part.second, [], part.counters,
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
        lists = lists if group.momentum else lists._replace(first=[])
        for part in (lists,) if scale is None else _scaled(lists, scale):
            _fused_sgd(
                part.params, part.grads, part.first,
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
    norm = _total_norm(update.tensors.grads)
    if scale is not None:
        norm = norm * scale
        if update.found_inf is None:
            update.found_inf = norm.isfinite().logical_not().float().reshape(())
    update.workspace.norm.copy_(norm)
    clip = (update.max_norm / (norm + 1e-6)).clamp(max=1.0)
    return clip if scale is None else clip * scale


_SCALED_AT_ONCE = 2**18  # elements of the gradients that are scaled at a time on a CPU: they stay in its cache


def _scaled(lists: Tensors, scale: Tensor) -> Iterator[Tensors]:
    """Yield parts of an update with scaled gradients; on a CPU small ones, since writing all takes longer than AdamW.

    A tensor of more elements than a part comes in views of a part each, with one counter.
    """
    factor = scale.to(lists.grads[0].dtype)
    if not lists.grads[0].is_cpu:
        yield lists._replace(grads=list(torch._foreach_mul(lists.grads, factor)))
        return
    if bool(factor == 1):
        yield lists
        return
    columns = [column for column in (lists.params, lists.grads, lists.first, lists.second, lists.counters) if column]
    rows: list[tuple[Any, ...]] = []
    elements = 0
    for row in zip(*columns, strict=True):
        size = row[1].numel()
        if size > _SCALED_AT_ONCE and all(x.is_contiguous() for x in row):
            pieces = [x.view(-1).split(_SCALED_AT_ONCE) if x.dim() else repeat(x) for x in row]
            for piece in zip(*pieces, strict=False):  # the counter is repeated without end
                yield _part(lists, [piece], factor)
            continue
        if rows and elements + size > _SCALED_AT_ONCE:
            yield _part(lists, rows, factor)
            rows, elements = [], 0
        rows.append(row)
        elements += size
    if rows:
        yield _part(lists, rows, factor)


def _part(lists: Tensors, rows: Sequence[tuple[Any, ...]], factor: Tensor) -> Tensors:
    """Return an update of some rows of another, of the columns that it has, with gradients times a factor."""
    columns = [list(column) for column in zip(*rows, strict=True)]
    columns[1] = list(torch._foreach_mul(columns[1], factor))
    taken = iter(columns)
    params, grads, first, second, counters = (
        next(taken) if column else []
        for column in (lists.params, lists.grads, lists.first, lists.second, lists.counters)
    )
    return Tensors(params, grads, first, second, [], counters, groups=[])


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
    return all(tables.same_layout(row) for row in zip(*columns, strict=True))


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


__all__ = [
    "KERNELS", "KINDS", "PLANS", "SMALL", "AdamWGroup", "ChunkTile", "SGDGroup", "Tensors", "Update", "Workspace",
    "adamw_step", "case_of", "check", "clip_step", "global_norm", "launch_clip", "launch_norm", "launch_update",
    "sgd_step",
]  # fmt: skip

_NAMES = ("norm", "total", "scale", "adamw_prepare", "adamw", "sgd_prepare", "sgd")
KERNELS = {name: TritonKernel("accelerant.ops.multi_tensor.triton_kernels", f"multi_tensor_{name}") for name in _NAMES}
KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True)
class ChunkTile:
    """The work of a program: `chunk` elements in steps of `block`, powers of two of at least 16, by num_warps warps."""

    chunk: int
    block: int
    num_warps: int


PLANS = {
    "norm": ChunkTile(16384, 4096, 8), "scale": ChunkTile(4096, 4096, 8),
    "adamw": ChunkTile(1024, 1024, 4), "sgd": ChunkTile(1024, 1024, 4),
}  # fmt: skip
"""By kernel; tests and measurements replace entries."""

SMALL = {"BLOCK_T": 256, "BLOCK_P": 8192}
_SMALL_WARPS = 16


def launch_norm(grads: Sequence[Tensor], table: Table, max_norm: float) -> Tensor:
    """Return the norm of the gradients and the clipping coefficient, two float32."""
    out = torch.empty(2, dtype=torch.float32, device=grads[0].device)
    partials = _launch_partials(table)
    args = (partials, partials.numel(), out, max_norm)
    KERNELS["total"].launch((1,), args, {"BLOCK_P": SMALL["BLOCK_P"]}, num_warps=_SMALL_WARPS)
    return out


def launch_clip(grads: Sequence[Tensor], table: Table, scale: Tensor) -> None:
    """Multiply the gradients in place; a scale of 1 costs a launch and no traffic."""
    _launch_buckets("scale", table, [{"GRAD": KINDS[bucket.grad]} for bucket in table.buckets], scale)


def launch_update(name: str, update: Update) -> None:
    """Launch the norm if max_norm is set, the coefficients, and the update of "adamw" or "sgd"."""
    table = update.table
    if table is None:
        raise AccelerantError(f"{name}: a launch without a table")
    values = update.workspace.values.refresh(tuple([group.row() for group in update.groups]))
    partials = None if update.max_norm is None else _launch_partials(table)
    norm = (None, 0, None) if partials is None else (partials, partials.numel(), update.workspace.norm)
    KERNELS[f"{name}_prepare"].launch(
        (1,),
        (
            table.rows(), values, table.coefficients(), len(table.numels), *norm, update.max_norm or 0.0,
            update.grad_scale, update.found_inf,
        ),
        {**SMALL, "CLIP": partials is not None},
        num_warps=_SMALL_WARPS,
    )  # fmt: skip
    constants: list[dict[str, object]] = []
    for bucket in table.buckets:
        param, state = KINDS[bucket.param or torch.float32], KINDS[bucket.state or torch.float32]
        buffer = {"BUFFER": bucket.state is not None} if name == "sgd" else {}
        constants.append(
            {"PARAM": param, "GRAD": KINDS[bucket.grad], "STATE": state, **buffer, "MASTER": bucket.master}
        )
    _launch_buckets(name, table, constants, table.coefficients())


def _launch_buckets(name: str, table: Table, constants: Sequence[Mapping[str, object]], last: Tensor) -> None:
    """Launch a kernel for each bucket of tensors; CompileError and LaunchError only before a change."""
    plan = PLANS[name]
    maps = [table.chunks(i, plan.chunk) for i in range(len(table.buckets))]  # all allocations before the first launch
    for i, (bucket, chunks) in enumerate(zip(table.buckets, maps, strict=True)):
        try:
            fixed = {**constants[i], **_sizes(plan, bucket.layout)}
            args = (chunks, table.rows(), last)
            KERNELS[name].launch((chunks.numel(),), args, fixed, num_warps=plan.num_warps)
        except (CompileError, LaunchError) as error:
            if not i:
                raise
            raise AccelerantError(f"{name}: {i} of {len(maps)} launches ran, then: {error}") from error


def _launch_partials(table: Table) -> Tensor:
    """Return the sums of squares, one per chunk."""
    plan = PLANS["norm"]
    maps = [table.chunks(i, plan.chunk) for i in range(len(table.buckets))]
    partials = table.partials(sum(chunks.numel() for chunks in maps), SMALL["BLOCK_P"])
    first = 0
    for bucket, chunks in zip(table.buckets, maps, strict=True):
        fixed = {"GRAD": KINDS[bucket.grad], **_sizes(plan, bucket.layout)}
        args = (chunks, table.rows(), partials, first)
        KERNELS["norm"].launch((chunks.numel(),), args, fixed, num_warps=plan.num_warps)
        first += chunks.numel()
    return partials


def _sizes(plan: ChunkTile, layout: str) -> dict[str, int | bool]:
    return {"CHUNK": plan.chunk, "BLOCK": plan.block, "ALIGNED": layout == "aligned"}


# --- operations ------------------------------------------------------------------------------------------------------


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


adamw_step, sgd_step = (
    triton_operation(
        f"{name}_step", partial(launch_update, name), torch_step, cost=_update_cost, refuses=_refuses, mutates=True
    )
    for name, torch_step in (("adamw", torch_adamw), ("sgd", torch_sgd))
)
global_norm = triton_operation(
    "global_norm",
    launch_norm,
    lambda grads, table, max_norm: torch_norm(grads, max_norm),
    cost=partial(_gradients_cost, 1),
    refuses=_refuses,
)
clip_step = triton_operation(
    "clip_step",
    launch_clip,
    lambda grads, table, scale: torch_clip(grads, scale),
    cost=partial(_gradients_cost, 2),
    refuses=_refuses,
    mutates=True,
)


def case_of(table: Table, device: torch.device, *options: str) -> Case:
    """Return the case of a table: its buckets, the largest first, and the options."""
    largest = table.buckets[0]
    return Case(device, largest.param or largest.grad, table.shape, (*table.buckets, *options))
