"""Launches of attention's Triton kernels: tiles by device, dtype and head width, for dense and packed sequences."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.race import Tuned

_NAMES = ("fwd", "bwd_q", "bwd_kv")
KERNELS = {
    name: TritonKernel("accelerant.ops.attention.triton_kernels", f"attention_{name}") for name in (*_NAMES, "segments")
}

MAX_WIDTH = 256  # widest head that the kernels support


class AttentionTile(NamedTuple):
    """Tile sizes of a kernel: block_m queries and block_n keys; warps and pipeline stages of a launch."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Widest head -> plans of (fwd, bwd_q, bwd_kv). The tests check that each fits in shared memory: 227 KiB on sm_90,
# 99 KiB from sm_80 on, 64 KiB on sm_75.
_HOPPER = {
    64: (AttentionTile(128, 128, 8, 3), AttentionTile(128, 64, 8, 3), AttentionTile(32, 128, 8, 3)),
    128: (AttentionTile(128, 64, 8, 3), AttentionTile(128, 64, 8, 2), AttentionTile(16, 64, 8, 2)),
    256: (AttentionTile(128, 32, 8, 2), AttentionTile(64, 32, 8, 2), AttentionTile(32, 32, 8, 2)),
}
_AMPERE = {
    64: (AttentionTile(128, 64, 4, 2), AttentionTile(64, 32, 4, 2), AttentionTile(32, 64, 4, 2)),
    128: (AttentionTile(64, 64, 4, 2), AttentionTile(64, 32, 4, 2), AttentionTile(32, 32, 4, 2)),
    256: (AttentionTile(64, 32, 8, 2), AttentionTile(32, 32, 8, 1), AttentionTile(16, 32, 8, 1)),
}
_WIDE_TYPE = {  # float32, and every dtype on devices whose tensor cores Triton does not support
    64: (AttentionTile(64, 32, 8, 1), AttentionTile(32, 32, 8, 1), AttentionTile(32, 32, 8, 1)),
    128: (AttentionTile(32, 32, 8, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 32, 8, 1)),
    256: (AttentionTile(16, 16, 4, 1), AttentionTile(16, 16, 8, 1), AttentionTile(16, 16, 8, 1)),
}
_SPLIT = {  # float32 as two numbers of float16, on sm_90
    64: (AttentionTile(128, 64, 8, 2), AttentionTile(64, 64, 4, 1), AttentionTile(64, 64, 4, 1)),
    128: (AttentionTile(128, 64, 8, 1), AttentionTile(128, 64, 8, 1), AttentionTile(32, 64, 4, 1)),
}
_INTERPRETED = {256: (AttentionTile(32, 16, 4, 1), AttentionTile(16, 32, 4, 1), AttentionTile(16, 32, 4, 1))}

_TILES = {
    "fwd": ((2, 3, 4), ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 64, 8), (128, 128, 8), (128, 32, 4))),
    "bwd_q": ((1, 2, 3), ((64, 64, 4), (128, 32, 4), (128, 64, 8), (128, 128, 8), (64, 128, 4))),
    "bwd_kv": ((1, 2, 3), ((64, 64, 4), (32, 128, 4), (64, 128, 8), (128, 128, 8), (128, 64, 4))),
}
CANDIDATES = {
    kernel: tuple(AttentionTile(*tile, count) for tile in tiles for count in stages)
    for kernel, (stages, tiles) in _TILES.items()
}
"""Candidates of the autotuner."""


_TABLES = (_INTERPRETED, _WIDE_TYPE, _AMPERE, _HOPPER, _SPLIT)
_SHARED_KIB = (64, 64, 96, 227, 227)


@functools.cache
def plan_for(
    kernel: str, width: int, dtype: torch.dtype, capability: tuple[int, int] | None, split: bool = False,
    masked: bool = False,
) -> AttentionTile:  # fmt: skip
    """Return the default plan of kernel "fwd", "bwd_q" or "bwd_kv"; capability None is the interpreter."""
    return _usual(kernel, width, _family(dtype, capability, split), masked)


@functools.cache
def _family(dtype: torch.dtype, capability: tuple[int, int] | None, split: bool) -> int:
    if capability is None:
        return 0
    if split:
        return 4
    if dtype == torch.float32 or capability < (8, 0):
        return 1
    return 3 if capability == (9, 0) else 2


def _usual(kernel: str, width: int, family: int, masked: bool) -> AttentionTile:
    """Return the plan of a table; with a mask that of wider heads, since the mask's tile takes registers too."""
    table = _TABLES[family]
    wider = masked and kernel != "bwd_kv"  # which spills a few loop constants only
    widest = next(limit for limit in table if min(width << wider, max(table)) <= limit)
    return table[widest][_NAMES.index(kernel)]


@functools.cache
def plans_for(kernel: str, width: int, family: int) -> tuple[AttentionTile, ...]:
    """Return the candidates that fit in shared memory, by an estimate: resident tiles plus the tiles of each stage."""
    if family == 0:
        return AttentionTile(16, 16, 4, 1), AttentionTile(32, 32, 4, 1)
    if family == 1:
        plans = [AttentionTile(m, n, warps, 1) for m, n, warps in ((64, 32, 8), (32, 32, 8), (32, 32, 4), (16, 32, 4))]
    elif family == 4:
        tiles = ((128, 64, 8), (128, 32, 8), (64, 64, 4), (64, 32, 4), (32, 64, 4))
        plans = [AttentionTile(m, n, warps, stages) for m, n, warps in tiles for stages in (1, 2)]
    else:
        plans = [plan for plan in CANDIDATES[kernel] if plan.num_stages in (2, 3)]
    row_bytes = max(16, next_power_of_2(width)) * (4 if family in (1, 4) else 2)

    def shared_bytes(plan: AttentionTile) -> int:
        resident, streamed = (plan.block_n, plan.block_m) if kernel == "bwd_kv" else (plan.block_m, plan.block_n)
        return row_bytes * (resident * (1 if kernel == "fwd" else 2) + 2 * streamed * plan.num_stages)

    return tuple(plan for plan in plans if shared_bytes(plan) <= _SHARED_KIB[family] * 1024)


def _tuned(kernel: str) -> Tuned[AttentionTile]:
    def bucket(family: int, programs: int, queries: int, keys: int, width: int, *masks: int) -> tuple[int, ...]:
        return (programs, queries, keys, max(16, next_power_of_2(width)), *masks)

    return Tuned(
        f"attention_{kernel}",
        default=lambda family, programs, queries, keys, width, *masks: _usual(kernel, width, family, masks[3:] == (1,)),
        candidates=lambda family, programs, queries, keys, width, *masks: plans_for(kernel, width, family),
        bucket=bucket,
    )


TUNED = {kernel: _tuned(kernel) for kernel in _NAMES}
"""Tuned plans, keyed by device family; heads of all sequences, queries and keys, each rounded up to a power of two;
width; whether causal, windowed and packed; 1 for a mask, 2 for segments."""


def constants(
    plan: AttentionTile, width: int, causal: bool, window: int, *, precision: str = "ieee", upcast: bool = False,
    segments: bool = False,
) -> dict[str, int | bool | str]:  # fmt: skip
    """Return the compile-time arguments of all three kernels."""
    block_d = max(16, next_power_of_2(width))
    return {
        "CAUSAL": causal, "WINDOW": window >= 0, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_D": block_d,
        "EXACT": block_d == width, "PRECISION": precision, "UPCAST": upcast, "SEGMENTS": segments,
    }  # fmt: skip


@functools.cache
def triton_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability whose plans fit a GPU; None for the interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


@functools.cache
def _constants(
    plan: AttentionTile, width: int, dtype: torch.dtype, capability: tuple[int, int] | None, causal: bool,
    windowed: bool, precision: str, segments: bool,
) -> dict[str, int | bool | str]:  # fmt: skip
    """Return `constants` of a launch; cached, since building them is part of a call's host time."""
    # Products in float32 where the device has none in bfloat16 (the interpreter's are wrong).
    upcast = dtype == torch.bfloat16 and (capability is None or capability < (8, 0))
    return constants(plan, width, causal, 0 if windowed else -1, precision=precision, upcast=upcast, segments=segments)


class _Problem(NamedTuple):
    """The parameters shared by the launches of a forward or backward pass.

    `cu` are the packed sequences' offsets, (None, None) for dense tensors; `mask` broadcasts to (batch, heads, queries,
    keys), or is a table of segments; `split`: products of float32 as two numbers of float16.
    """

    cu: tuple[Tensor, Tensor] | tuple[None, None]
    queries: int
    keys: int
    batch: int
    heads: int
    kv_heads: int
    lse_strides: tuple[int, int]
    width: int
    dtype: torch.dtype
    device: torch.device
    causal: bool
    scale: float
    window: int
    mask: Tensor | None = None
    split: bool = False

    def strides(self, *tensors: Tensor) -> tuple[int, ...]:
        """Return the strides of batch, head and row of each tensor."""
        if self.cu[0] is None:
            return tuple([stride for x in tensors for stride in x.stride()[:3]])
        return tuple([stride for x in tensors for stride in (0, x.stride(1), x.stride(0))])

    def launch(
        self, kernel: str, tensors: tuple[Tensor, ...], strides: tuple[int, ...], plan: AttentionTile | None = None
    ) -> None:
        """Launch a kernel with a program for each tile of queries of a head, or of keys for "bwd_kv"."""
        queries, keys, dtype, device, window = self.queries, self.keys, self.dtype, self.device, self.window
        by_keys, mask = kernel == "bwd_kv", self.mask
        mask_strides: tuple[int, ...] = (0, 0, 0, 0)
        segments = False
        if mask is not None and mask.dtype == torch.int32:
            segments, mask_strides = True, (mask.stride(0), 0, mask.stride(1), 0)
        elif mask is not None:
            mask_strides = tuple([0 if n == 1 else step for n, step in zip(mask.shape, mask.stride(), strict=True)])
            mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
        heads = self.kv_heads if by_keys else self.heads
        if not self.batch or not (keys if by_keys else queries):
            return
        capability = triton_capability(device)
        if plan is None:
            sizes = [next_power_of_2(max(1, size)) for size in (heads * self.batch, queries, keys)]
            kind = () if mask is None else (1 + segments,)
            masks = int(self.causal), int(window >= 0), int(self.cu[0] is not None), *kind
            plan = TUNED[kernel](
                device, dtype, (_family(dtype, capability, self.split), *sizes, self.width, *masks),
                lambda plan: self.launch(kernel, tensors, strides, plan),
            )  # fmt: skip
        tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
        precision = "fp16x3" if self.split else "tf32" if tf32 else "ieee"
        fixed = _constants(plan, self.width, dtype, capability, self.causal, window >= 0, precision, segments)
        blocks = ceil_div(keys, plan.block_n) if by_keys else ceil_div(queries, plan.block_m)
        group = self.heads // self.kv_heads
        KERNELS[kernel].launch(
            (blocks * heads * self.batch,),
            (
                *tensors, *self.cu, mask, queries, keys, heads, group, blocks, self.width, self.scale, window, *strides,
                *mask_strides,
            ),
            fixed,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )  # fmt: skip


def _dense_problem(
    q: Tensor, k: Tensor, causal: bool, scale: float, window: int, mask: Tensor | None, split: bool
) -> _Problem:
    (B, Hq, S, D), (_, Hkv, Skv, _) = q.shape, k.shape
    lse_strides = (Hq * S, S)
    return _Problem(
        (None, None), S, Skv, B, Hq, Hkv, lse_strides, D, q.dtype, q.device, causal, scale, window, mask, split
    )


def _packed_problem(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float, window: int,
    split: bool,
) -> _Problem:  # fmt: skip
    total, Hq, D = q.shape
    batch, lse_strides = cu_q.shape[0] - 1, (0, total)
    return _Problem(
        (cu_q, cu_k), max_q, max_k, batch, Hq, k.shape[1], lse_strides, D, q.dtype, q.device, causal, scale, window,
        None, split,
    )  # fmt: skip


def with_rows(x: Tensor) -> Tensor:
    """Return x, copied only if its last dimension is not contiguous."""
    return x if x.stride()[-1] == 1 or x.shape[-1] == 1 else x.contiguous()


def like(x: Tensor) -> Tensor:
    """Return an empty tensor in the layout of x if its last dimension is contiguous, else a contiguous one."""
    y = torch.empty_like(x)
    return y if y.stride()[-1] == 1 or x.shape[-1] == 1 else x.new_empty(x.shape)


def as_laid(x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient y in the strides of torch.empty_like(x)."""
    return y if x.stride(-1) == 1 or x.shape[-1] == 1 else torch.empty_like(x).copy_(y)


_SEGMENT_BLOCK = 64


def new_table(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return a table of segments (B, 4, S + Skv) int32 that has row 0; see the kernel `attention_segments`."""
    (B, S), Skv = of_queries.shape, of_keys.shape[1]
    table = torch.empty(B, 4, S + Skv, dtype=torch.int32, device=of_queries.device)
    table[:, 0, :S] = of_queries
    table[:, 0, S:] = of_keys
    return table


def launch_segments(of_queries: Tensor, of_keys: Tensor) -> Tensor:
    """Return the table of segments (B, S) and (B, Skv)."""
    (B, queries), keys, table = of_queries.shape, of_keys.shape[1], new_table(of_queries, of_keys)
    blocks = ceil_div(queries, _SEGMENT_BLOCK) + ceil_div(keys, _SEGMENT_BLOCK)
    if B and blocks:
        args = table, queries, keys, blocks, table.stride(0), table.stride(1)
        KERNELS["segments"].launch((blocks * B,), args, {"BLOCK": _SEGMENT_BLOCK}, num_warps=4)
    return table


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int, plan: AttentionTile | None = None,
    mask: Tensor | None = None, split: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o in q's layout, and lse (B, Hq, S) float32, contiguous."""
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    return _forward(_dense_problem(q, k, causal, scale, window, mask, split), q, k, v, lse, plan)


def launch_varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool, scale: float,
    window: int, *, split: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return o in q's layout, and lse (Hq, total) float32, contiguous."""
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    problem = _packed_problem(q, k, cu_q, cu_k, max_q, max_k, causal, scale, window, split)
    return _forward(problem, q, k, v, lse)


def _forward(
    problem: _Problem, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, plan: AttentionTile | None = None
) -> tuple[Tensor, Tensor]:
    o = like(q)
    if o.numel():
        q, k, v = with_rows(q), with_rows(k), with_rows(v)
        strides = (*problem.strides(q, k, v, o), *problem.lse_strides)
        problem.launch("fwd", (q, k, v, o, lse), strides, plan)
    return o, lse


def launch_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, causal: bool, scale: float, window: int,
    plans: tuple[AttentionTile | None, AttentionTile | None] = (None, None), mask: Tensor | None = None,
    split: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv, in the layouts of q, k and v; deterministic."""
    return _backward(_dense_problem(q, k, causal, scale, window, mask, split), do, q, k, v, o, lse, plans)


def launch_varlen_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, causal: bool, scale: float, window: int, *, split: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return dq, dk and dv, in the layouts of q, k and v; deterministic."""
    problem = _packed_problem(q, k, cu_q, cu_k, max_q, max_k, causal, scale, window, split)
    return _backward(problem, do, q, k, v, o, lse)


def _backward(
    problem: _Problem, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor,
    plans: tuple[AttentionTile | None, AttentionTile | None] = (None, None),
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = like(q), like(k), like(v)
    if not q.numel() or not k.numel():
        return as_laid(q, dq.zero_()), as_laid(k, dk.zero_()), as_laid(v, dv.zero_())
    inputs = with_rows(q), with_rows(k), with_rows(v)
    do, o, lse = with_rows(do), with_rows(o), lse.contiguous()
    delta = torch.empty_like(lse)
    strides = (*problem.strides(*inputs, o, do, dq), *problem.lse_strides)
    problem.launch("bwd_q", (*inputs, o, do, lse, delta, dq), strides, plans[0])
    strides = (*problem.strides(*inputs, do, dk, dv), *problem.lse_strides)
    problem.launch("bwd_kv", (*inputs, do, lse, delta, dk, dv), strides, plans[1])
    return as_laid(q, dq), as_laid(k, dk), as_laid(v, dv)
