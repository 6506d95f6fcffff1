"""Launch of rope's kernel, forward and inverse."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = ["KERNELS", "TUNED", "RopePlan", "constants", "launch", "rope_plan", "rope_plans", "usual_plan"]

KERNELS = {"fwd": TritonKernel("accelerant.ops.rope.triton_kernels", "rope_fwd", widths=range(7, 15))}

_PAIRS = 1024  # per program: 8 per thread of 4 warps, 16 bytes of each half
_MAX_WARPS = 8


@dataclass(frozen=True, slots=True)
class RopePlan:
    """The work of one program: tokens, heads, and pairs of a head (`block`, at least D / 2), each a power of two."""

    tokens: int
    heads: int
    block: int
    num_warps: int


@functools.cache
def rope_plan(H: int, half: int, pairs: int = _PAIRS, max_warps: int = _MAX_WARPS) -> RopePlan:
    """Return a plan for all heads of a token if they are few, and several tokens if they are very few."""
    block = next_power_of_2(half)
    heads = min(next_power_of_2(H), max(1, pairs // block))
    tokens = max(1, pairs // 4 // (heads * block))
    return RopePlan(tokens, heads, block, max(1, min(max_warps, tokens * heads * block // 256)))


def usual_plan(H: int, half: int, adjacent: bool) -> RopePlan:
    """Return the fastest plan measured on an H200; adjacent: the heads of a token are adjacent in memory."""
    if next_power_of_2(H) * next_power_of_2(half) <= 512:
        return rope_plan(H, half)
    return rope_plan(H, half, 2048, 4) if adjacent else rope_plan(H, half, 512)


@functools.cache
def rope_plans(H: int, half: int) -> tuple[RopePlan, ...]:
    """Return the candidates of rope_fwd."""
    plans = [rope_plan(H, half, pairs) for pairs in (512, 1024, 2048, 4096)]
    plans += [replace(plan, num_warps=max(1, plan.num_warps // 2)) for plan in plans]
    plans += [replace(plan, tokens=2 * plan.tokens, num_warps=min(8, 2 * plan.num_warps)) for plan in plans[:2]]
    return tuple(dict.fromkeys(plans))


TUNED: Tuned[RopePlan] = Tuned(
    "rope_fwd",
    default=lambda tokens, H, half, adjacent: usual_plan(H, half, bool(adjacent)),
    candidates=lambda tokens, H, half, adjacent: rope_plans(H, half),
)
"""Tuned plans of rope_fwd, forward and inverse, keyed by tokens, heads, pairs of a head and adjacent."""


def constants(plan: RopePlan, half: int, *, interleaved: bool, inverse: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of rope_fwd."""
    return {
        "INVERSE": inverse, "INTERLEAVED": interleaved, "TOKENS": plan.tokens, "HEADS": plan.heads,
        "BLOCK": plan.block, "EXACT": plan.block == half,
    }  # fmt: skip


def launch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False, plan: RopePlan | None = None
) -> Tensor:
    """Rotate x by the angles of the tables, or by their negatives; strides of torch.empty_like(x)."""
    y = torch.empty_like(x)
    if not x.numel():
        return y
    B, H, S, D = x.shape
    source = x if x.stride(3) == 1 else x.contiguous()
    out = y if y.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = D // 2
    tokens = B * S
    x_b, x_h, x_s, _ = source.stride()
    if plan is None:
        sizes = (tokens, H, half, int(x_h < x_s))
        plan = TUNED(x.device, x.dtype, sizes, lambda plan: launch(x, cos, sin, interleaved, inverse, plan))
    y_b, y_h, y_s, _ = out.stride()
    KERNELS["fwd"].launch(
        (ceil_div(tokens, plan.tokens), ceil_div(H, plan.heads)),
        (
            source, cos.contiguous(), sin.contiguous(), out,
            tokens, S, H, half, x_b, x_h, x_s, y_b, y_h, y_s, S * half if cos.dim() == 3 else 0,
        ),
        constants(plan, half, interleaved=interleaved, inverse=inverse),
        num_warps=plan.num_warps,
    )  # fmt: skip
    return y if out is y else y.copy_(out)
