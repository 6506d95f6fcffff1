"""Launches of linear_gelu's kernels: tiles of the product, strips of the backward pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._launch import as_rows, ceil_div, multiprocessors
from accelerant.runtime.compilation.triton import TritonKernel, interpreting
from accelerant.runtime.dispatch.choices import rounded
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = [
    "BACKWARD",
    "HOPPER_PLANS",
    "KERNELS",
    "PLANS",
    "SMALL_PLAN",
    "TUNED",
    "TilePlan",
    "launch_dz",
    "launch_forward",
    "tile_plan",
]

_NAMES = ("fwd", "fwd_persistent", "bwd", "bias")
KERNELS = {name: TritonKernel("accelerant.ops.linear_gelu.triton_kernels", f"linear_gelu_{name}") for name in _NAMES}


@dataclass(frozen=True, slots=True)
class TilePlan:
    """How a product is cut.

    Attributes:
        block_m, block_n: a tile of the result.
        block_k: a step of the sum.
        num_warps: warps a program.
        stages: steps whose loads are in flight.
        persistent: one program a multiprocessor, for all tiles.
        group: tiles down before one to the right.
        parts: how many parts of a tile the epilogue takes one after the other: 1, 2 or 4.
    """

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int
    persistent: bool = False
    group: int = 8
    parts: int = 1

    def constants(self, K: int, *, tanh: bool, upcast: bool) -> dict[str, int | bool]:
        """The compile-time arguments of the forward kernels."""
        return {
            "TANH": tanh, "EVEN_K": K % self.block_k == 0, "UPCAST": upcast,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group,
            "PARTS": self.parts,
        }  # fmt: skip


SMALL_PLAN = TilePlan(128, 128, 32, 8, 3)
"""48 KiB of shared memory in 16-bit dtypes: for devices with less than Hopper's."""

HOPPER_PLANS = (
    TilePlan(128, 256, 64, 8, 4, parts=2),
    TilePlan(128, 256, 64, 8, 3, parts=2),
    TilePlan(128, 256, 64, 8, 3, persistent=True, parts=4),
    TilePlan(128, 256, 64, 8, 4, persistent=True, parts=4),
    TilePlan(256, 128, 64, 8, 3, persistent=True, parts=4),
    TilePlan(128, 128, 64, 4, 3, parts=2),
    TilePlan(128, 128, 64, 8, 3),
    TilePlan(128, 128, 64, 8, 4, persistent=True),
)

BACKWARD = (16, 128)
"""Rows and columns of a step of the backward kernel: 2048 elements, lines of 256 bytes in 16-bit dtypes."""

_BACKWARD_WARPS = 4
_LEAST_SPAN = 128
_MOST_PARTS = 256
_BIAS = (32, 64)


@functools.cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9


_INTERPRETED, _FLOAT32, _SMALL, _HOPPER = range(4)  # kinds of plan

PLANS = {
    _INTERPRETED: (TilePlan(16, 16, 16, 4, 2), TilePlan(16, 16, 16, 4, 2, persistent=True), TilePlan(32, 16, 16, 4, 2)),
    _FLOAT32: (TilePlan(64, 64, 32, 4, 2), TilePlan(128, 64, 32, 4, 2), TilePlan(64, 128, 32, 4, 2)),
    _SMALL: (
        SMALL_PLAN,
        TilePlan(128, 128, 32, 4, 3),
        TilePlan(128, 128, 32, 8, 2),
        TilePlan(64, 128, 32, 4, 3),
        TilePlan(128, 64, 32, 4, 3),
        TilePlan(64, 64, 32, 4, 4),
    ),
    _HOPPER: (*HOPPER_PLANS, SMALL_PLAN),
}
"""By kind, what is worth timing; all but Hopper's need at most 64 KiB of shared memory."""


@functools.cache
def _kind(dtype: torch.dtype, device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED
    return _FLOAT32 if dtype == torch.float32 else _HOPPER if _hopper(device) else _SMALL


def _usual(M: int, N: int, K: int, kind: int) -> TilePlan:
    if kind == _INTERPRETED:  # several tiles of a small sample
        return PLANS[kind][(M + N) % 2]
    if kind == _HOPPER and (M <= 64 or N <= 64):
        return SMALL_PLAN
    return HOPPER_PLANS[5] if kind == _HOPPER and N <= 128 else PLANS[kind][0]


TUNED: Tuned[TilePlan] = Tuned(
    "linear_gelu_fwd",
    default=_usual,
    candidates=lambda M, N, K, kind: PLANS[kind],
    bucket=lambda M, N, K, kind: rounded((M, N, K)),  # the kind follows from device and dtype, which the key has
)
"""The plans of the forward kernels, by M, N, K and kind."""


def tile_plan(M: int, N: int, dtype: torch.dtype, device: torch.device) -> TilePlan:
    """How to cut a product of these sizes on a device where nothing was measured."""
    return _usual(M, N, 0, _kind(dtype, device))


def launch_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    approximate: str,
    keep: bool = True,
    plan: TilePlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Give y, (M, N); and z, (M, N) if kept, else empty."""
    (M, K), N = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if keep else y.new_empty(0)
    if not M or not N:
        return y, z
    if plan is None:
        plan = TUNED(
            x.device,
            x.dtype,
            (M, N, K, _kind(x.dtype, x.device)),
            lambda plan: launch_forward(x, weight, bias, approximate, keep, plan),
        )
    tiles = ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n)
    programs = min(tiles, multiprocessors(x.device)) if plan.persistent else tiles
    upcast = x.dtype == torch.bfloat16 and x.device.type != "cuda" and interpreting()
    KERNELS["fwd_persistent" if plan.persistent else "fwd"].launch(
        (programs,),
        (x, weight, None if bias is None else bias.contiguous(), y, z if keep else None, M, N, K),
        plan.constants(K, tanh=approximate == "tanh", upcast=upcast),
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y, z


def launch_dz(dy: Tensor, z: Tensor, approximate: str, bias_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """Give dz, (M, N), and the gradient of the bias in its dtype if there is one."""
    M, N = z.shape
    dz = torch.empty_like(z)
    if not M or not N:
        return dz, None if bias_dtype is None else z.new_zeros(N, dtype=bias_dtype)
    block_m, block_n = BACKWARD
    span = max(_LEAST_SPAN, ceil_div(ceil_div(M, _MOST_PARTS), block_m) * block_m)
    parts = ceil_div(M, span)
    sums = None if bias_dtype is None else torch.empty(parts, N, dtype=torch.float32, device=z.device)
    rows, stride = as_rows(dy, N)
    KERNELS["bwd"].launch(
        (parts * ceil_div(N, block_n),),
        (rows, z, dz, sums, M, N, stride, span),
        {"TANH": approximate == "tanh", "BLOCK_M": block_m, "BLOCK_N": block_n},
        num_warps=_BACKWARD_WARPS,
    )
    if sums is None:
        return dz, None
    dbias = torch.empty(N, dtype=bias_dtype, device=z.device)
    fixed = {"BLOCK_P": _BIAS[0], "BLOCK_N": _BIAS[1]}
    KERNELS["bias"].launch((ceil_div(N, _BIAS[1]),), (sums, dbias, parts, N), fixed, num_warps=4)
    return dz, dbias
