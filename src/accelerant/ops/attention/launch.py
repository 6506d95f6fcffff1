"""Launches of attention's kernels: tiles by device, dtype and head width; dense and packed sequences alike."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from accelerant.ops._launch import next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = [
    "CANDIDATES",
    "KERNELS",
    "MAX_WIDTH",
    "TUNED",
    "Plan",
    "Problem",
    "capability_of",
    "constants",
    "launch_backward",
    "launch_forward",
    "launch_varlen_backward",
    "launch_varlen_forward",
    "like",
    "plan_for",
    "plans_for",
    "with_rows",
]

_NAMES = ("fwd", "bwd_q", "bwd_kv")
KERNELS = {name: TritonKernel("accelerant.ops.attention.triton_kernels", f"attention_{name}") for name in _NAMES}

MAX_WIDTH = 256
"""The widest head that the kernels take."""


class Plan(NamedTuple):
    """Tiles of a kernel.

    Attributes:
        block_m: queries a tile.
        block_n: keys a tile.
        num_warps, num_stages: as launched.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Widest head -> plans of (fwd, bwd_q, bwd_kv). What a kernel needs of shared memory is checked by its test: 227 KiB on
# sm_90, 99 KiB from sm_80 on, 64 KiB on sm_75.
_HOPPER = {
    64: (Plan(128, 128, 8, 3), Plan(128, 64, 8, 3), Plan(32, 128, 8, 3)),
    128: (Plan(128, 64, 8, 3), Plan(128, 64, 8, 2), Plan(16, 64, 8, 2)),
    256: (Plan(128, 32, 8, 2), Plan(64, 32, 8, 2), Plan(32, 32, 8, 2)),
}
_AMPERE = {
    64: (Plan(128, 64, 4, 2), Plan(64, 32, 4, 2), Plan(32, 64, 4, 2)),
    128: (Plan(64, 64, 4, 2), Plan(64, 32, 4, 2), Plan(32, 32, 4, 2)),
    256: (Plan(64, 32, 8, 2), Plan(32, 32, 8, 1), Plan(16, 32, 8, 1)),
}
_WIDE_TYPE = {  # float32; and, without tensor cores that Triton knows, all types
    64: (Plan(64, 32, 8, 1), Plan(32, 32, 8, 1), Plan(32, 32, 8, 1)),
    128: (Plan(32, 32, 8, 1), Plan(16, 16, 8, 1), Plan(16, 32, 8, 1)),
    256: (Plan(16, 16, 4, 1), Plan(16, 16, 8, 1), Plan(16, 16, 8, 1)),
}
_INTERPRETED = {256: (Plan(32, 16, 4, 1), Plan(16, 32, 4, 1), Plan(16, 32, 4, 1))}

CANDIDATES = {
    "fwd": tuple(
        Plan(m, n, warps, stages)
        for m, n, warps in ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 32, 4))
        for stages in (2, 3, 4)
    ),
    "bwd_q": tuple(
        Plan(m, n, warps, stages)
        for m, n, warps in ((64, 64, 4), (128, 32, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4))
        for stages in (1, 2, 3)
    ),
    "bwd_kv": tuple(
        Plan(m, n, warps, stages)
        for m, n, warps in ((64, 64, 4), (32, 128, 4), (64, 128, 8), (128, 128, 8), (128, 64, 4))
        for stages in (1, 2, 3)
    ),
}
"""Plans to time against each other on a device."""


@functools.cache
def plan_for(kernel: str, width: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> Plan:
    """The tiles of a kernel.

    Args:
        kernel: "fwd", "bwd_q" or "bwd_kv".
        width: of a head.
        dtype: of the tensors.
        capability: of the device; None for the interpreter.
    """
    return _usual(kernel, width, _family(dtype, capability))


_TABLES = (_INTERPRETED, _WIDE_TYPE, _AMPERE, _HOPPER)
_SHARED_KIB = (64, 64, 96, 227)


@functools.cache
def _family(dtype: torch.dtype, capability: tuple[int, int] | None) -> int:
    """Which of the tables."""
    if capability is None:
        return 0
    if dtype == torch.float32 or capability < (8, 0):
        return 1
    return 3 if capability == (9, 0) else 2


def _usual(kernel: str, width: int, family: int) -> Plan:
    table = _TABLES[family]
    widest = next(limit for limit in table if width <= limit)
    return table[widest][_NAMES.index(kernel)]


@functools.cache
def plans_for(kernel: str, width: int, family: int) -> tuple[Plan, ...]:
    """What is worth timing and fits in shared memory, by an estimate: the tiles that stay, and those of each stage."""
    if family == 0:
        return Plan(16, 16, 4, 1), Plan(32, 32, 4, 1)
    if family == 1:
        plans = [Plan(m, n, warps, 1) for m, n, warps in ((64, 32, 8), (32, 32, 8), (32, 32, 4), (16, 32, 4))]
    else:
        plans = [plan for plan in CANDIDATES[kernel] if plan.num_stages in (2, 3)]
    row_bytes = max(16, next_power_of_2(width)) * (4 if family == 1 else 2)

    def shared_bytes(plan: Plan) -> int:
        stay, pass_by = (plan.block_n, plan.block_m) if kernel == "bwd_kv" else (plan.block_m, plan.block_n)
        return row_bytes * (stay * (1 if kernel == "fwd" else 2) + 2 * pass_by * plan.num_stages)

    return tuple(plan for plan in plans if shared_bytes(plan) <= _SHARED_KIB[family] * 1024)


def _tuned(kernel: str) -> Tuned[Plan]:
    def bucket(family: int, programs: int, queries: int, keys: int, width: int, *masks: int) -> tuple[int, ...]:
        return (programs, queries, keys, max(16, next_power_of_2(width)), *masks)

    return Tuned(
        f"attention_{kernel}",
        default=lambda family, programs, queries, keys, width, *masks: _usual(kernel, width, family),
        candidates=lambda family, programs, queries, keys, width, *masks: plans_for(kernel, width, family),
        bucket=bucket,
    )


TUNED = {kernel: _tuned(kernel) for kernel in _NAMES}
"""The plans of the kernels, by family of devices, heads of all sequences, queries and keys (these three as powers of
two), width, whether causal, whether windowed, whether packed."""


def constants(
    plan: Plan, width: int, causal: bool, window: int, *, precision: str = "ieee", upcast: bool = False
) -> dict[str, int | bool | str]:
    """The compile-time arguments of all three kernels."""
    block_d = max(16, next_power_of_2(width))
    return {
        "CAUSAL": causal,
        "WINDOW": window >= 0,
        "BLOCK_M": plan.block_m,
        "BLOCK_N": plan.block_n,
        "BLOCK_D": block_d,
        "EXACT": block_d == width,
        "PRECISION": precision,
        "UPCAST": upcast,
    }


def _upcasts(dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    """Whether products are in float32 since the device has none of the dtype (the interpreter's bfloat16 is wrong)."""
    return dtype == torch.bfloat16 and (capability is None or capability < (8, 0))


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Of a GPU; None for what only the interpreter serves."""
    if device.type != "cuda":
        return None
    if torch.version.hip:
        return (8, 0)  # 64 KiB of shared memory, bfloat16 in the matrix units
    return torch.cuda.get_device_capability(device)


@functools.cache
def _constants(
    plan: Plan,
    width: int,
    dtype: torch.dtype,
    capability: tuple[int, int] | None,
    causal: bool,
    windowed: bool,
    tf32: bool,
) -> dict[str, int | bool | str]:
    """Found once, for the time of a call counts."""
    precision, window = "tf32" if tf32 else "ieee", 0 if windowed else -1
    return constants(plan, width, causal, window, precision=precision, upcast=_upcasts(dtype, capability))


class Problem(NamedTuple):
    """What the launches of a forward or backward pass share.

    Attributes:
        cu: where the packed sequences begin, of queries and of keys; None twice for dense ones.
        queries, keys: how many in a sequence, or in the longest.
        batch: how many sequences.
        width, dtype, device: of a head, of its elements, where they are.
        causal, scale, window: as the op's, window -1 for none.
    """

    cu: tuple[Tensor, Tensor] | tuple[None, None]
    queries: int
    keys: int
    batch: int
    width: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    window: int

    def launch(
        self,
        kernel: str,
        tensors: tuple[Tensor, ...],
        strides: tuple[int, ...],
        heads: int,
        group: int,
        plan: Plan | None = None,
    ) -> None:
        """Start a kernel: one program for a tile of each head; of keys if it is bwd_kv."""
        cu, queries, keys, batch, width, dtype, device, causal, scale, window = self
        if not batch or not (keys if kernel == "bwd_kv" else queries):
            return
        capability = capability_of(device)
        if plan is None:
            lengths = next_power_of_2(heads * batch), next_power_of_2(max(1, queries)), next_power_of_2(max(1, keys))
            plan = TUNED[kernel](
                device,
                dtype,
                (_family(dtype, capability), *lengths, width, int(causal), int(window >= 0), int(cu[0] is not None)),
                lambda plan: self.launch(kernel, tensors, strides, heads, group, plan),
            )
        tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        fixed = _constants(plan, width, dtype, capability, causal, window >= 0, tf32)
        blocks = -(-keys // plan.block_n) if kernel == "bwd_kv" else -(-queries // plan.block_m)
        KERNELS[kernel].launch(
            (blocks * heads * batch,),
            (*tensors, *cu, queries, keys, heads, group, blocks, width, scale, window, *strides),
            fixed,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )


# --- layouts ---------------------------------------------------------------------------------------------------------


def with_rows(x: Tensor) -> Tensor:
    """x, copied only if its last dimension is not contiguous."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()


def like(x: Tensor) -> Tensor:
    """Empty, in the layout of x if its last dimension is contiguous, else contiguous."""
    y = torch.empty_like(x)
    return y if y.stride()[-1] == 1 or x.shape[-1] == 1 else x.new_empty(x.shape)


def as_laid(x: Tensor, y: Tensor) -> Tensor:
    """The gradient y in the strides that torch.empty_like(x) has."""
    return y if x.stride(-1) == 1 or x.shape[-1] == 1 else torch.empty_like(x).copy_(y)


def _dense(x: Tensor) -> tuple[int, int, int]:
    """The distances of batches, heads and rows."""
    return x.stride()[:3]  # type: ignore[return-value]  # of four dimensions


def _packed(x: Tensor) -> tuple[int, int, int]:
    row, head, _ = x.stride()
    return 0, head, row


# --- dense and packed sequences --------------------------------------------------------------------------------------


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Attend: o in q's layout, lse (B, Hq, S) float32 contiguous."""
    B, Hq, S, D = q.shape
    _, Hkv, Skv, _ = k.shape
    lse = torch.empty((B, Hq, S), dtype=torch.float32, device=q.device)
    problem = Problem((None, None), S, Skv, B, D, q.dtype, q.device, causal, scale, window)
    return _forward(problem, q, k, v, lse, _dense, (Hq * S, S), Hq, Hkv, plan)


def launch_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor]:
    """Attend within each sequence: o in q's layout, lse (Hq, total) float32 contiguous."""
    total, Hq, D = q.shape
    lse = torch.empty((Hq, total), dtype=torch.float32, device=q.device)
    problem = Problem((cu_q, cu_k), max_q, max_k, cu_q.shape[0] - 1, D, q.dtype, q.device, causal, scale, window)
    return _forward(problem, q, k, v, lse, _packed, (0, total), Hq, k.shape[1], None)


def _forward(
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    strides: Callable[[Tensor], tuple[int, int, int]],
    of_lse: tuple[int, int],
    Hq: int,
    Hkv: int,
    plan: Plan | None,
) -> tuple[Tensor, Tensor]:
    o = like(q)
    if not o.numel():
        return o, lse
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    distances = (*strides(q), *strides(k), *strides(v), *strides(o), *of_lse)
    problem.launch("fwd", (q, k, v, o, lse), distances, Hq, Hq // Hkv, plan)
    return o, lse


def launch_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int,
    plans: tuple[Plan | None, Plan | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:
    """Find dq, dk and dv, in the layouts of q, k and v; the same bits each time."""
    B, Hq, S, D = q.shape
    _, Hkv, Skv, _ = k.shape
    problem = Problem((None, None), S, Skv, B, D, q.dtype, q.device, causal, scale, window)
    return _backward(problem, do, q, k, v, o, lse, _dense, (Hq * S, S), Hq, Hkv, plans)


def launch_varlen_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Find dq, dk and dv, in the layouts of q, k and v; the same bits each time."""
    total, Hq, D = q.shape
    problem = Problem((cu_q, cu_k), max_q, max_k, cu_q.shape[0] - 1, D, q.dtype, q.device, causal, scale, window)
    return _backward(problem, do, q, k, v, o, lse, _packed, (0, total), Hq, k.shape[1], (None, None))


def _backward(
    problem: Problem,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    strides: Callable[[Tensor], tuple[int, int, int]],
    of_lse: tuple[int, int],
    Hq: int,
    Hkv: int,
    plans: tuple[Plan | None, Plan | None],
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = like(q), like(k), like(v)
    if not q.numel() or not k.numel():
        return as_laid(q, dq.zero_()), as_laid(k, dk.zero_()), as_laid(v, dv.zero_())
    rows_q, rows_k, rows_v, do, o = with_rows(q), with_rows(k), with_rows(v), with_rows(do), with_rows(o)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    inputs, of_do = (*strides(rows_q), *strides(rows_k), *strides(rows_v)), strides(do)
    distances = (*inputs, *strides(o), *of_do, *strides(dq), *of_lse)
    tensors: tuple[Tensor, ...] = (rows_q, rows_k, rows_v, o, do, lse, delta, dq)
    problem.launch("bwd_q", tensors, distances, Hq, Hq // Hkv, plans[0])
    distances = (*inputs, *of_do, *strides(dk), *strides(dv), *of_lse)
    tensors = (rows_q, rows_k, rows_v, do, lse, delta, dk, dv)
    problem.launch("bwd_kv", tensors, distances, Hkv, Hq // Hkv, plans[1])
    return as_laid(q, dq), as_laid(k, dk), as_laid(v, dv)
