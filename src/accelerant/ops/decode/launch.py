"""Launches of the decoder's steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = [
    "KERNELS",
    "PLANS",
    "TUNED",
    "TUNED_WORDS",
    "WORDS_LEAST",
    "WORDS_PLANS",
    "LinePlan",
    "launch_linear",
    "launch_rope",
    "launch_words",
    "usual_plan",
]

KERNELS = {
    name: TritonKernel("accelerant.ops.decode.triton_kernels", f"decode_{name}")
    for name in ("linear", "planes", "words", "rope")
}


@dataclass(frozen=True, slots=True)
class LinePlan:
    """How a program of decode_linear goes through its lines of the weight.

    Attributes:
        sets: lines that a thread takes one after another, for the same part of x: 1, 2 or 4; 2 or 4 for a gated layer.
        block_n, block_k: lines and columns side by side; 512 bytes a warp in all are 16 bytes a thread.
        num_warps: warps a program.
        unroll: steps of block_k columns whose weights are loaded before the first is used.
    """

    sets: int
    block_n: int
    block_k: int
    num_warps: int
    unroll: int


def _plans(columns: int) -> tuple[LinePlan, ...]:
    """What is worth timing where 16 bytes a thread of a warp are so many columns."""
    shapes = [
        (sets, 1, warps, warps, unroll)
        for warps in (1, 2, 4, 8)
        for sets, unroll in ((1, 4), (1, 2), (2, 2), (2, 1), (4, 1), (4, 2))
        if columns * warps * unroll <= 4096
    ]
    shapes += [(sets, 4, 1, 4, unroll) for sets, unroll in ((1, 4), (2, 2), (4, 1))]
    return tuple(LinePlan(sets, lines, columns * wide, warps, unroll) for sets, lines, wide, warps, unroll in shapes)


PLANS = {1: _plans(512), 2: _plans(256), 4: _plans(128)}
"""Bytes of a weight -> what is worth timing."""


WORDS_PLANS = (
    LinePlan(4, 1, 1024, 2, 2),
    LinePlan(4, 1, 512, 1, 2),
    LinePlan(4, 1, 512, 1, 1),
    LinePlan(4, 1, 1024, 2, 1),
    LinePlan(4, 1, 2048, 4, 1),
    LinePlan(2, 1, 512, 1, 2),
    LinePlan(2, 1, 512, 1, 4),
    LinePlan(2, 1, 1024, 2, 2),
    LinePlan(4, 2, 512, 2, 2),
    LinePlan(2, 4, 512, 4, 4),
)
"""What is worth timing for decode_words; the first is the fastest measured on an H200 for Llama 3.1 8B."""

WORDS_LEAST = 2**26
"""Bytes of a weight from which decode_words pays for making the numbers of x first: measured on an H200."""


@functools.cache
def usual_plan(N: int, K: int, itemsize: int, gated: bool) -> LinePlan:
    """The fastest measured on an H200 for the layers of Llama 3.1 8B; N outputs (2 N lines if gated), K columns."""
    columns = 512 // itemsize  # of one warp, 16 bytes a thread
    if N <= 4608 and not gated:  # few lines: a warp for each
        return LinePlan(1, 1, columns, 1, 4)
    return LinePlan(4, 1, columns, 1, 2) if itemsize == 1 else LinePlan(4, 1, 2 * columns, 2, 1)


TUNED: Tuned[LinePlan] = Tuned(
    "decode_linear",
    default=lambda N, K, itemsize, gated: usual_plan(N, K, itemsize, bool(gated)),
    candidates=lambda N, K, itemsize, gated: tuple(p for p in PLANS[itemsize] if p.sets > 1 or not gated),
)
"""The plans of decode_linear, by outputs, columns, bytes of a weight and whether gated."""

TUNED_WORDS: Tuned[LinePlan] = Tuned(
    "decode_words", default=lambda N, K, gated: WORDS_PLANS[0], candidates=lambda N, K, gated: WORDS_PLANS
)
"""The plans of decode_words, by outputs, columns and whether gated."""


@functools.cache
def _interpreted_plan(gated: bool, K: int) -> LinePlan:
    """Several programs, steps and an end of small samples."""
    return LinePlan(4 if gated and K % 3 == 0 else 2, 2, 16, 4, 1 + K % 2)


def launch_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    plan: LinePlan | None = None,
) -> Tensor:
    """Find y (M, N) of x (M, K); arguments contiguous."""
    M, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if x.device.type != "cuda":
        plan = plan or _interpreted_plan(gated, K)
    elif plan is None:
        plan = TUNED(
            x.device,
            x.dtype,
            (N, K, weight.element_size(), int(gated)),
            lambda plan: launch_linear(x, weight, scale, norm, eps, residual, gated, plan),
        )
    outputs = plan.sets // 2 if gated else plan.sets
    KERNELS["linear"].launch(
        (ceil_div(N, outputs * plan.block_n), M),
        (x, norm, weight, scale, residual, y, N, K, eps),
        {
            "GATED": gated,
            "BYTES": weight.dtype == torch.int8 and x.device.type == "cuda" and torch.version.hip is None,
            "SETS": plan.sets,
            "BLOCK_N": plan.block_n,
            "BLOCK_K": plan.block_k,
            "UNROLL": plan.unroll,
        },
        num_warps=plan.num_warps,
    )
    return y


def launch_words(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    norm: Tensor | None,
    eps: float,
    residual: Tensor | None,
    gated: bool,
    plan: LinePlan | None = None,
) -> Tensor:
    """Find y as launch_linear does, of x as 24-bit numbers and a weight of bytes, K a multiple of 16."""
    M, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    planes = torch.empty(M, 3, K, dtype=torch.int8, device=x.device)
    units = torch.empty(M, dtype=torch.float32, device=x.device)
    block = next_power_of_2(K)
    KERNELS["planes"].launch(
        (M,), (x, norm, planes, units, K, eps), {"BLOCK": block}, num_warps=max(1, min(32, block // 256))
    )
    if x.device.type != "cuda":
        plan = plan or LinePlan(2 + 2 * (K % 32 == 0), 2, 32, 4, 1 + K % 3 // 2)
    elif plan is None:
        plan = TUNED_WORDS(
            x.device,
            x.dtype,
            (N, K, int(gated)),
            lambda plan: launch_words(x, weight, scale, norm, eps, residual, gated, plan),
        )
    outputs = plan.sets // 2 if gated else plan.sets
    KERNELS["words"].launch(
        (ceil_div(N, outputs * plan.block_n), M),
        (planes.view(torch.int32), units, weight.view(torch.int32), scale, residual, y, N, K // 4),
        {
            "GATED": gated,
            "BYTES": x.device.type == "cuda" and torch.version.hip is None,
            "SETS": plan.sets,
            "BLOCK_N": plan.block_n,
            "BLOCK_W": plan.block_k // 4,
            "UNROLL": plan.unroll,
        },
        num_warps=plan.num_warps,
    )
    return y


def launch_rope(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Turn, write into the caches, and give the queries (B, heads, 1, D); arguments contiguous."""
    B, kv_heads, T, D = k_cache.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    q = torch.empty(B, heads, 1, D, dtype=qkv.dtype, device=qkv.device)
    if B:
        half = D // 2
        block = next_power_of_2(half)
        together = max(1, 256 // block)  # of a warp, 8 pairs a thread
        KERNELS["rope"].launch(
            (ceil_div(heads + 2 * kv_heads, together), B),
            (qkv, cos, sin, positions, q, k_cache, v_cache, heads, kv_heads, T, half),
            {"HEADS": together, "BLOCK": block},
            num_warps=1,
        )
    return q
