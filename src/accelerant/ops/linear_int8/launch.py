"""Launches of linear_int8's kernels: strips of the weight for few rows, tiles of the product for more."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div
from accelerant.runtime.compilation.triton import TritonKernel, interpreting

__all__ = [
    "DYNAMIC_PLANS",
    "FEW_BACKWARD_PLANS",
    "FEW_PLANS",
    "FEW_ROWS",
    "KERNELS",
    "MATMUL_PLANS",
    "SMALL_PLANS",
    "STRIP_PLANS",
    "StripPlan",
    "TilePlan",
    "launch_dx",
    "launch_dynamic",
    "launch_forward",
    "strip_plan",
    "tile_plan",
]

_NAMES = ("row", "fwd", "dynamic", "bwd", "sum")
KERNELS = {name: TritonKernel("accelerant.ops.linear_int8.triton_kernels", f"linear_int8_{name}") for name in _NAMES}

FEW_ROWS = 16
"""Up to this many rows of x the weight's bytes are what counts."""


@dataclass(frozen=True, slots=True)
class StripPlan:
    """How a program of linear_int8_row goes through its rows of the weight.

    Attributes:
        rows: rows of the weight that a thread takes one after another, for the same part of x: 1, 2 or 4.
        block_n, block_k: rows and columns side by side; 512 a warp in all are 16 bytes a thread.
        num_warps: warps a program.
        unroll: steps of block_k columns whose weights are loaded before the first is used.
        stages: iterations of so many steps that are in flight through shared memory; 1 for none.
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
class TilePlan:
    """How a product is cut.

    Attributes:
        block_m, block_n, block_k: rows of x, of the weight, and columns of both, of a step.
        num_warps: warps a program.
        stages: steps whose loads are in flight.
        group: tiles down before one to the right.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    group: int = 8

    @property
    def blocks(self) -> dict[str, int | bool]:
        """The compile-time arguments of every kernel of tiles."""
        return {
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group,
        }  # fmt: skip


STRIP_PLANS = (
    StripPlan(1, 1, 512, 1, 4),
    StripPlan(2, 4, 512, 4, 2),
    StripPlan(1, 4, 512, 4, 4),
    StripPlan(1, 4, 512, 4, 2),
    StripPlan(2, 4, 512, 4, 1),
    StripPlan(4, 4, 512, 4, 1),
    StripPlan(4, 4, 512, 4, 2),
    StripPlan(2, 1, 2048, 4, 2),
    StripPlan(4, 1, 2048, 4, 1),
    StripPlan(2, 2, 1024, 4, 2),
    StripPlan(4, 2, 1024, 4, 1),
    StripPlan(1, 2, 512, 2, 4),
    StripPlan(2, 2, 512, 2, 2),
    StripPlan(4, 2, 512, 2, 1),
    StripPlan(4, 1, 1024, 2, 1),
    StripPlan(2, 1, 1024, 2, 2),
    StripPlan(2, 1, 512, 1, 2),
    StripPlan(4, 1, 512, 1, 1),
    StripPlan(2, 8, 512, 8, 2),
    StripPlan(1, 8, 512, 8, 4),
    StripPlan(1, 4, 512, 4, 1, 4),
    StripPlan(2, 4, 512, 4, 1, 3),
    StripPlan(4, 2, 512, 2, 1, 3),
)
"""What is worth timing for linear_int8_row; the first is the usual one."""

FEW_PLANS = (
    TilePlan(16, 32, 256, 4, 4),
    TilePlan(16, 32, 128, 4, 5),
    TilePlan(16, 16, 256, 4, 5),
    TilePlan(16, 64, 128, 4, 5),
    TilePlan(16, 64, 256, 4, 3),
    TilePlan(16, 32, 256, 2, 4),
)
"""For 2 to 16 rows: many programs, many bytes in flight in each."""

MATMUL_PLANS = (
    TilePlan(128, 128, 64, 8, 4),
    TilePlan(128, 128, 64, 4, 4),
    TilePlan(256, 128, 64, 8, 3),
    TilePlan(128, 128, 128, 8, 3),
    TilePlan(64, 128, 128, 4, 4),
    TilePlan(64, 64, 128, 4, 4),
)
"""For more rows, on Hopper."""

DYNAMIC_PLANS = (
    TilePlan(128, 256, 128, 8, 4),
    TilePlan(128, 256, 128, 8, 3),
    TilePlan(256, 128, 128, 8, 3),
    TilePlan(128, 256, 64, 8, 4),
    TilePlan(128, 128, 128, 4, 4),
    TilePlan(128, 128, 128, 8, 4),
    TilePlan(64, 128, 128, 4, 4),
    TilePlan(64, 256, 128, 4, 3),
)
"""For products of integers, on Hopper."""

FEW_BACKWARD_PLANS = (
    TilePlan(16, 64, 256, 4, 3),
    TilePlan(16, 64, 128, 4, 4),
    TilePlan(16, 32, 256, 4, 4),
    TilePlan(16, 128, 128, 4, 3),
    TilePlan(16, 32, 128, 4, 5),
    TilePlan(16, 64, 64, 2, 4),
)
"""For the gradient of up to 16 rows, the sum in parts. Of 8192 x 8192 and one row in bfloat16 the first took 0.033 ms
on an H200 with 8 parts, 0.036 with 16, 0.038 with 4, and a program for a whole sum 0.145; torch's product with a weight
dequantised before 0.044."""

_MANY_PROGRAMS = 256
"""Tiles times parts of such a sum."""

SMALL_PLANS = {
    "fwd": TilePlan(64, 128, 64, 4, 3),
    "dynamic": TilePlan(128, 128, 64, 8, 3),
    "bwd": TilePlan(64, 64, 64, 4, 3),
}
"""At most 99 KiB of shared memory in 16-bit dtypes: for devices with less than Hopper's."""


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _integer_cores(device: torch.device) -> bool:
    """Whether Triton multiplies integers by tensor cores."""
    if device.type != "cuda" or torch.version.hip is not None:
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


@functools.cache
def strip_plan(N: int, K: int, device: torch.device) -> StripPlan:
    """How to take one row of x on a device."""
    if device.type != "cuda":  # the interpreter: several programs and steps of a small sample
        return StripPlan((1, 2, 4)[N % 3], 2, 16, 4, 1 + K % 2)
    return STRIP_PLANS[0]


@functools.cache
def tile_plan(kind: str, M: int, N: int, dtype: torch.dtype, device: torch.device) -> TilePlan:
    """How to cut a product of these sizes on a device; kind: "fwd", "dynamic" or "bwd"."""
    if device.type != "cuda":  # the interpreter, as above
        return TilePlan(16, 32, 32, 4, 2)
    if kind == "fwd" and M <= FEW_ROWS:
        return FEW_PLANS[0]
    if dtype == torch.float32 and kind != "dynamic":
        return TilePlan(64, 64, 32, 4, 2)
    if kind == "bwd" and M <= FEW_ROWS:
        return FEW_BACKWARD_PLANS[0]
    if not _hopper(device) or kind == "bwd":
        return SMALL_PLANS[kind]
    if kind == "dynamic":
        return DYNAMIC_PLANS[0] if M > 64 else DYNAMIC_PLANS[6]
    return MATMUL_PLANS[0] if M > 64 else MATMUL_PLANS[5]


def _upcast(x: Tensor) -> bool:
    return x.dtype == torch.bfloat16 and x.device.type != "cuda" and interpreting()


def _dense(vector: Tensor | None) -> Tensor | None:
    return vector if vector is None or vector.is_contiguous() else vector.contiguous()


def launch_forward(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    bias: Tensor | None,
    *,
    wide: bool = False,
    plan: StripPlan | TilePlan | None = None,
) -> Tensor:
    """Find y (M, N) of x (M, K); without scale and bias the bare product, in float32 if it is to be wide."""
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
    q: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    plan: TilePlan | None = None,
) -> Tensor:
    """Multiply q (M, K) int8 with scales (M,) float32, both contiguous: y (M, N) in a dtype."""
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
    dy: Tensor, weight: Tensor, scale: Tensor, plan: TilePlan | None = None, parts: int | None = None
) -> Tensor:
    """Find dx (M, K) of dy (M, N); parts: of the sum, which are added up by a kernel of their own."""
    (M, N), K = dy.shape, weight.shape[1]
    dx = torch.empty(M, K, dtype=dy.dtype, device=dy.device)
    if not M or not K:
        return dx
    plan = plan or tile_plan("bwd", M, K, dy.dtype, dy.device)
    tiles = ceil_div(M, plan.block_m) * ceil_div(K, plan.block_k)
    if parts is None:
        parts = _parts(M, N, tiles, plan)
    part = plan.block_n * max(1, ceil_div(N, plan.block_n * parts))
    parts = max(1, ceil_div(N, part))
    found = dx if parts == 1 else torch.empty(parts, M, K, dtype=torch.float32, device=dy.device)
    KERNELS["bwd"].launch(
        (tiles, parts),
        (dy.contiguous(), weight.contiguous(), _dense(scale), found, M, N, K, part),
        {"UPCAST": _upcast(dy), **plan.blocks},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    if parts > 1:
        KERNELS["sum"].launch((ceil_div(M * K, 256),), (found, dx, parts, M * K), {"BLOCK": 256}, num_warps=2)
    return dx


def _parts(M: int, N: int, tiles: int, plan: TilePlan) -> int:
    """Of the sum over N: so many that there are enough programs to keep the memory busy, 4 steps each at the least."""
    if M > FEW_ROWS:
        return 1
    return max(1, min(_MANY_PROGRAMS // tiles, N // (4 * plan.block_n)))
