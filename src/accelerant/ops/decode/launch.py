"""Launches of the Triton kernels of decoding steps."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.tuning import Tuned

KERNELS = {
    name: TritonKernel("accelerant.ops.decode.triton_kernels", f"decode_{name}")
    for name in ("linear", "planes", "words", "rope")
}


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """The tiling of decode_linear and decode_words.

    Attributes:
        sets: rows of the weight that a thread processes with the same part of x: 1, 2 or 4; 2 or 4 for a gated layer.
        block_n, block_k: rows and columns of a block; 512 bytes per warp are 16 bytes per thread.
        unroll: blocks of block_k columns that are loaded before the first is used.
    """

    sets: int
    block_n: int
    block_k: int
    num_warps: int
    unroll: int

    def constants(self, gated: bool, by_bits: bool) -> dict[str, int | bool]:
        """Return the compile-time arguments; by_bits: 8-bit integers are converted or multiplied by PTX."""
        return {
            "GATED": gated, "BYTES": by_bits, "SETS": self.sets, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "UNROLL": self.unroll,
        }  # fmt: skip


def _plans(columns: int) -> tuple[DecodePlan, ...]:
    """Return the candidates for weights of which 16 bytes per thread of a warp are this many columns."""
    shapes = [
        (sets, 1, warps, warps, unroll)
        for warps in (1, 2, 4, 8)
        for sets, unroll in ((1, 4), (1, 2), (2, 2), (2, 1), (4, 1), (4, 2))
        if columns * warps * unroll <= 4096
    ]
    shapes += [(sets, 4, 1, 4, unroll) for sets, unroll in ((1, 4), (2, 2), (4, 1))]
    return tuple(DecodePlan(sets, rows, columns * wide, warps, unroll) for sets, rows, wide, warps, unroll in shapes)


PLANS = {1: _plans(512), 2: _plans(256), 4: _plans(128)}
"""Candidates of decode_linear by bytes of a weight's element."""


WORDS_PLANS = tuple(DecodePlan(*sizes) for sizes in (
    (4, 1, 1024, 2, 2), (4, 1, 512, 1, 2), (4, 1, 512, 1, 1), (4, 1, 1024, 2, 1), (4, 1, 2048, 4, 1),
    (2, 1, 512, 1, 2), (2, 1, 512, 1, 4), (2, 1, 1024, 2, 2), (4, 2, 512, 2, 2), (2, 4, 512, 4, 4),
))  # fmt: skip
"""Candidates of decode_words; the first is the fastest measured on an H200 for Llama 3.1 8B."""

WORDS_MIN_BYTES = 2**26
"""Bytes of a weight from which on decode_words pays for converting x first, measured on an H200."""


@functools.cache
def usual_plan(N: int, K: int, itemsize: int, gated: bool) -> DecodePlan:
    """Return the fastest plan on an H200 for the layers of Llama 3.1 8B; N outputs (2 N rows if gated), K columns."""
    columns = 512 // itemsize  # per warp, 16 bytes per thread
    if N <= 4608 and not gated:  # few rows: one warp each
        return DecodePlan(1, 1, columns, 1, 4)
    return DecodePlan(4, 1, columns, 1, 2) if itemsize == 1 else DecodePlan(4, 1, 2 * columns, 2, 1)


TUNED: Tuned[DecodePlan] = Tuned(
    "decode_linear",
    default=lambda N, K, itemsize, gated: usual_plan(N, K, itemsize, bool(gated)),
    candidates=lambda N, K, itemsize, gated: tuple(p for p in PLANS[itemsize] if p.sets > 1 or not gated),
)
"""Tuned plans of decode_linear, keyed by outputs, columns, bytes of a weight's element and gated."""

TUNED_WORDS: Tuned[DecodePlan] = Tuned(
    "decode_words", default=lambda N, K, gated: WORDS_PLANS[0], candidates=lambda N, K, gated: WORDS_PLANS
)
"""Tuned plans of decode_words, keyed by outputs, columns and gated."""


@functools.cache
def _interpreted_plan(gated: bool, K: int) -> DecodePlan:
    """Return a plan that gives small samples several programs, steps and a partial last step."""
    return DecodePlan(4 if gated and K % 3 == 0 else 2, 2, 16, 4, 1 + K % 2)


def launch_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
    gated: bool, plan: DecodePlan | None = None,
) -> Tensor:  # fmt: skip
    """Return y (M, N) of x (M, K); all arguments contiguous."""
    M, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if x.device.type != "cuda":
        plan = plan or _interpreted_plan(gated, K)
    elif plan is None:
        plan = TUNED(
            x.device, x.dtype, (N, K, weight.element_size(), int(gated)),
            lambda plan: launch_linear(x, weight, scale, norm, eps, residual, gated, plan),
        )  # fmt: skip
    outputs = plan.sets // 2 if gated else plan.sets
    KERNELS["linear"].launch(
        (ceil_div(N, outputs * plan.block_n), M),
        (x, norm, weight, scale, residual, y, N, K, eps),
        plan.constants(gated, weight.dtype == torch.int8 and x.device.type == "cuda"),
        num_warps=plan.num_warps,
    )
    return y


def launch_words(
    x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: bool,
    plan: DecodePlan | None = None,
) -> Tensor:  # fmt: skip
    """Return launch_linear's y, computed from x as 24-bit integers and an int8 weight; K is a multiple of 16."""
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
        plan = plan or DecodePlan(2 + 2 * (K % 32 == 0), 2, 32, 4, 1 + K % 3 // 2)
    elif plan is None:
        plan = TUNED_WORDS(
            x.device, x.dtype, (N, K, int(gated)),
            lambda plan: launch_words(x, weight, scale, norm, eps, residual, gated, plan),
        )  # fmt: skip
    outputs = plan.sets // 2 if gated else plan.sets
    KERNELS["words"].launch(
        (ceil_div(N, outputs * plan.block_n), M),
        (planes.view(torch.int32), units, weight.view(torch.int32), scale, residual, y, N, K // 4),
        plan.constants(gated, x.device.type == "cuda"),
        num_warps=plan.num_warps,
    )
    return y


def launch_rope(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Rotate, write keys and values to the caches, and return the queries (B, heads, 1, D); arguments contiguous."""
    B, kv_heads, T, D = k_cache.shape
    heads = qkv.shape[1] // D - 2 * kv_heads
    q = torch.empty(B, heads, 1, D, dtype=qkv.dtype, device=qkv.device)
    if B:
        half = D // 2
        block = next_power_of_2(half)
        heads_per_program = max(1, 256 // block)  # one warp, 8 pairs per thread
        KERNELS["rope"].launch(
            (ceil_div(heads + 2 * kv_heads, heads_per_program), B),
            (qkv, cos, sin, positions, q, k_cache, v_cache, heads, kv_heads, T, half),
            {"HEADS": heads_per_program, "BLOCK": block},
            num_warps=1,
        )
    return q
