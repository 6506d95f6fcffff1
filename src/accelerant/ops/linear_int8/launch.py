"""Launches of linear_int8's Triton kernels: strips of the weight for few rows of x, tiles of the product for more."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._hopper.launch import is_hopper
from accelerant.ops._launch import ceil_div
from accelerant.runtime.compilation.triton import TritonKernel, interpreting

_NAMES = ("row", "fwd", "dynamic", "bwd", "sum")
KERNELS = {name: TritonKernel("accelerant.ops.linear_int8.triton_kernels", f"linear_int8_{name}") for name in _NAMES}

FEW_ROWS = 16
"""Up to this many rows of x, reading the weight bounds the kernel."""


@dataclass(frozen=True, slots=True)
class StripPlan:
    """The tiling of linear_int8_row.

    Attributes:
        rows: rows of the weight that a thread processes with the same part of x: 1, 2 or 4.
        block_n, block_k: rows and columns of a block; 512 elements per warp are 16 bytes per thread.
        unroll: blocks of block_k columns that are loaded before the first is used.
        stages: pipeline stages through shared memory; 1 for none.
    """

    rows: int
    block_n: int
    block_k: int
    num_warps: int
    unroll: int = 1
    stages: int = 1

    @property
    def constants(self) -> dict[str, int | bool]:
        """The compile-time arguments."""
        return {
            "ROWS": self.rows, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "UNROLL": self.unroll, "STAGES": self.stages,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Int8TilePlan:
    """The tiling of a product.

    Attributes:
        block_m, block_n, block_k: rows of x, rows of the weight and columns of both in a step.
        stages: pipeline stages of the loads.
        group: tiles taken down a column before the next column, for reuse in the L2 cache.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    group: int = 8

    @property
    def blocks(self) -> dict[str, int | bool]:
        """The compile-time arguments shared by the tiled kernels."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group,
        }  # fmt: skip


STRIP_PLANS = tuple(StripPlan(*sizes) for sizes in (
    (1, 1, 512, 1, 4), (2, 4, 512, 4, 2), (1, 4, 512, 4, 4), (1, 4, 512, 4, 2), (2, 4, 512, 4, 1),
    (4, 4, 512, 4, 1), (4, 4, 512, 4, 2), (2, 1, 2048, 4, 2), (4, 1, 2048, 4, 1), (2, 2, 1024, 4, 2),
    (4, 2, 1024, 4, 1), (1, 2, 512, 2, 4), (2, 2, 512, 2, 2), (4, 2, 512, 2, 1), (4, 1, 1024, 2, 1),
    (2, 1, 1024, 2, 2), (2, 1, 512, 1, 2), (4, 1, 512, 1, 1), (2, 8, 512, 8, 2), (1, 8, 512, 8, 4),
    (1, 4, 512, 4, 1, 4), (2, 4, 512, 4, 1, 3), (4, 2, 512, 2, 1, 3),
))  # fmt: skip
"""Candidates for linear_int8_row; the first is the default."""

FEW_PLANS = tuple(Int8TilePlan(*sizes) for sizes in (
    (16, 32, 256, 4, 4), (16, 32, 128, 4, 5), (16, 16, 256, 4, 5), (16, 64, 128, 4, 5), (16, 64, 256, 4, 3),
    (16, 32, 256, 2, 4),
))  # fmt: skip
"""Candidates for 2 to 16 rows: many programs with many bytes in flight in each."""

MATMUL_PLANS = tuple(Int8TilePlan(*sizes) for sizes in (
    (128, 128, 64, 8, 4), (128, 128, 64, 4, 4), (256, 128, 64, 8, 3), (128, 128, 128, 8, 3), (64, 128, 128, 4, 4),
    (64, 64, 128, 4, 4),
))  # fmt: skip
"""Candidates for more rows, on Hopper."""

DYNAMIC_PLANS = tuple(Int8TilePlan(*sizes) for sizes in (
    (128, 256, 128, 8, 4), (128, 256, 128, 8, 3), (256, 128, 128, 8, 3), (128, 256, 64, 8, 4),
    (128, 128, 128, 4, 4), (128, 128, 128, 8, 4), (64, 128, 128, 4, 4), (64, 256, 128, 4, 3),
))  # fmt: skip
"""Candidates for integer products, on Hopper."""

FEW_BACKWARD_PLANS = tuple(Int8TilePlan(*sizes) for sizes in (
    (16, 64, 256, 4, 3), (16, 64, 128, 4, 4), (16, 32, 256, 4, 4), (16, 128, 128, 4, 3), (16, 32, 128, 4, 5),
    (16, 64, 64, 2, 4),
))  # fmt: skip
"""Candidates for the gradient of up to 16 rows, with the sum split in parts. H200, 8192 x 8192, one row, bfloat16: the
first took 0.033 ms with 8 parts, 0.036 with 16, 0.038 with 4, 0.145 with 1; torch's product with a dequantized weight
0.044."""

SPLIT_PLAN = FEW_BACKWARD_PLANS[1]
"""The plan of float32; the first and the third spill. H200, 8192 x 8192, one row: 0.056 ms; torch's product takes 0.326
with the weight dequantized, 0.076 with a dense one. The error is 6e-6 of the gradient's norm, torch's 4e-7."""

_MAX_PROGRAMS = 256
"""Limit of tiles times parts of such a sum."""

SMALL_PLANS = {
    "fwd": Int8TilePlan(64, 128, 64, 4, 3),
    "dynamic": Int8TilePlan(128, 128, 64, 8, 3),
    "bwd": Int8TilePlan(64, 64, 64, 4, 3),
}
"""For devices with less shared memory than Hopper: at most 99 KiB in 16-bit dtypes."""


@functools.cache
def _integer_cores(device: torch.device) -> bool:
    """Return whether Triton multiplies int8 on tensor cores."""
    if device.type != "cuda":
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


@functools.cache
def strip_plan(N: int, K: int, device: torch.device) -> StripPlan:
    """Return the default plan for one row of x."""
    if device.type != "cuda":  # interpreter: several programs and steps even for small samples
        return StripPlan((1, 2, 4)[N % 3], 2, 16, 4, 1 + K % 2)
    return STRIP_PLANS[0]


@functools.cache
def tile_plan(kind: str, M: int, N: int, dtype: torch.dtype, device: torch.device) -> Int8TilePlan:
    """Return the default plan of a product; kind is "fwd", "dynamic" or "bwd"."""
    if device.type != "cuda":
        return Int8TilePlan(16, 32, 32, 4, 2)
    if kind == "fwd" and M <= FEW_ROWS:
        return FEW_PLANS[0]
    if kind == "bwd" and M <= FEW_ROWS:
        return SPLIT_PLAN if dtype == torch.float32 else FEW_BACKWARD_PLANS[0]
    if dtype == torch.float32 and kind != "dynamic":
        return Int8TilePlan(64, 64, 32, 4, 2)
    if not is_hopper(device) or kind == "bwd":
        return SMALL_PLANS[kind]
    if kind == "dynamic":
        return DYNAMIC_PLANS[0] if M > 64 else DYNAMIC_PLANS[6]
    return MATMUL_PLANS[0] if M > 64 else MATMUL_PLANS[5]


def _upcast(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type != "cuda" and interpreting()


@functools.cache
def splits(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether the gradient in float32 is that of three products in bfloat16, on tensor cores that have it."""
    if dtype != torch.float32 or device.type != "cuda":
        return dtype == torch.float32
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _dense(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def launch_forward(
    x: Tensor, weight: Tensor, scale: Tensor | None, bias: Tensor | None, *, wide: bool = False,
    plan: StripPlan | Int8TilePlan | None = None,
) -> Tensor:  # fmt: skip
    """Return y (M, N) of x (M, K), without the factor and term of a scale and bias that are None; wide: in float32."""
    (M, K), N = x.shape, weight.shape[0]
    y = torch.empty(M, N, dtype=torch.float32 if wide else x.dtype, device=x.device)
    if not M or not N:
        return y
    x, weight = x.contiguous(), weight.contiguous()
    if plan is None:
        single = M == 1 or (x.dtype == torch.float32 and M <= FEW_ROWS and x.device.type == "cuda")
        plan = strip_plan(N, K, x.device) if single else tile_plan("fwd", M, N, x.dtype, x.device)
    args = (x, weight, _dense(scale), _dense(bias), y)
    if isinstance(plan, StripPlan):
        grid = (ceil_div(N, plan.rows * plan.block_n), M)
        KERNELS["row"].launch(grid, (*args, N, K), plan.constants, num_warps=plan.num_warps)
        return y
    KERNELS["fwd"].launch(
        (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),),
        (*args, M, N, K),
        {"EVEN_K": K % plan.block_k == 0, "UPCAST": _upcast(x), **plan.blocks},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y


def launch_dynamic(
    q: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    plan: Int8TilePlan | None = None,
) -> Tensor:  # fmt: skip
    """Return y (M, N) in a dtype, of q (M, K) int8 with row scales (M,) float32, both contiguous."""
    (M, K), N = q.shape, weight.shape[0]
    y = torch.empty(M, N, dtype=dtype, device=q.device)
    if not M or not N:
        return y
    plan = plan or tile_plan("dynamic", M, N, dtype, q.device)
    KERNELS["dynamic"].launch(
        (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),),
        (q, x_scale, weight.contiguous(), _dense(scale), _dense(bias), y, M, N, K),
        {"EVEN_K": K % plan.block_k == 0, "INTEGERS": _integer_cores(q.device), **plan.blocks},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y


def launch_dx(
    dy: Tensor, weight: Tensor, scale: Tensor, plan: Int8TilePlan | None = None, parts: int | None = None
) -> Tensor:
    """Return dx (M, K) of dy (M, N); a second kernel adds the `parts` of the sum over N."""
    (M, N), K = dy.shape, weight.shape[1]
    dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
    if not M or not K:
        return dx
    split = splits(dy.dtype, dy.device)
    plan = plan or tile_plan("bwd", M, K, dy.dtype, dy.device)
    tiles = ceil_div(M, plan.block_m) * ceil_div(K, plan.block_k)
    if parts is None:
        parts = _parts(M, N, tiles, plan)
    span = plan.block_n * max(1, ceil_div(N, plan.block_n * parts))
    parts = max(1, ceil_div(N, span))
    sums = dx if parts == 1 else torch.empty(parts, M, K, dtype=torch.float32, device=dy.device)
    KERNELS["bwd"].launch(
        (tiles, parts),
        (dy.contiguous(), weight.contiguous(), _dense(scale), sums, M, N, K, span),
        {"UPCAST": _upcast(dy) or (split and dy.device.type != "cuda"), "SPLIT": split, **plan.blocks},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    if parts > 1:
        KERNELS["sum"].launch((ceil_div(M * K, 256),), (sums, dx, parts, M * K), {"BLOCK": 256}, num_warps=2)
    return dx


def _parts(M: int, N: int, tiles: int, plan: Int8TilePlan) -> int:
    """Return the parts of the sum over N: enough programs to keep the memory busy, with at least 4 steps each."""
    return 1 if M > FEW_ROWS else max(1, min(_MAX_PROGRAMS // tiles, N // (4 * plan.block_n)))
