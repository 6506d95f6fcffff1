"""Launches of linear_gelu's Triton kernels: tiles of the product, strips of the backward pass."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.ops._hopper.launch import is_hopper
from accelerant.ops._launch import as_rows, ceil_div, multiprocessors
from accelerant.runtime.compilation.triton import TritonKernel, interpreting
from accelerant.runtime.dispatch.choices import rounded
from accelerant.runtime.dispatch.tuning import Tuned

_NAMES = ("fwd", "fwd_persistent", "bwd", "join")
KERNELS = {name: TritonKernel("accelerant.ops.linear_gelu.triton_kernels", f"linear_gelu_{name}") for name in _NAMES}


@dataclass(frozen=True, slots=True)
class GeluTilePlan:
    """The tiling of a product.

    Attributes:
        block_m, block_n: size of a tile of the result.
        block_k: columns of x and weight per step.
        num_warps: warps per program.
        stages: pipeline stages of the loads.
        persistent: whether one program per multiprocessor loops over all tiles.
        group: tiles taken down a column before the next column, for reuse in the L2 cache.
        parts: parts of a tile that the epilogue processes one after the other: 1, 2 or 4.
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
        """Return the compile-time arguments of the forward kernels."""
        return {
            "TANH": tanh, "EVEN_K": K % self.block_k == 0, "UPCAST": upcast,
            "BLOCK_M": self.block_m, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k, "GROUP": self.group,
            "PARTS": self.parts,
        }  # fmt: skip


SMALL_PLAN = GeluTilePlan(128, 128, 32, 8, 3)
"""For devices with less shared memory than Hopper: 48 KiB in 16-bit dtypes."""

HOPPER_PLANS = (
    GeluTilePlan(128, 256, 64, 8, 4, parts=2),
    GeluTilePlan(128, 256, 64, 8, 3, parts=2),
    GeluTilePlan(128, 256, 64, 8, 3, persistent=True, parts=4),
    GeluTilePlan(128, 256, 64, 8, 4, persistent=True, parts=4),
    GeluTilePlan(256, 128, 64, 8, 3, persistent=True, parts=4),
    GeluTilePlan(128, 128, 64, 4, 3, parts=2),
    GeluTilePlan(128, 128, 64, 8, 3),
    GeluTilePlan(128, 128, 64, 8, 4, persistent=True),
)

BACKWARD = (16, 128)
"""Rows and columns of a step of the backward kernel: 2048 elements, rows of 256 bytes in 16-bit dtypes."""

_BACKWARD_WARPS = 4
_MIN_SPAN = 128
_MAX_PARTS = 256
_MIN_PROGRAMS = 512
"""Programs of the backward kernel below which parts have fewer rows, at least 32, for which an H100 then takes less."""

BIAS = (32, 64)
"""Rows and columns of a step of the kernel that adds the partial sums of the bias gradient."""

JOINS = ((64, 16), (256, 16))
"""The same for other partial sums, for few rows and for more; narrow strips fill the device."""

_INTERPRETED, _FLOAT32, _SMALL, _HOPPER = range(4)  # kinds of plan

PLANS = {
    _INTERPRETED: (
        GeluTilePlan(16, 16, 16, 4, 2),
        GeluTilePlan(16, 16, 16, 4, 2, persistent=True),
        GeluTilePlan(32, 16, 16, 4, 2),
    ),
    _FLOAT32: (GeluTilePlan(64, 64, 32, 4, 2), GeluTilePlan(128, 64, 32, 4, 2), GeluTilePlan(64, 128, 32, 4, 2)),
    _SMALL: (
        SMALL_PLAN, GeluTilePlan(128, 128, 32, 4, 3), GeluTilePlan(128, 128, 32, 8, 2), GeluTilePlan(64, 128, 32, 4, 3),
        GeluTilePlan(128, 64, 32, 4, 3), GeluTilePlan(64, 64, 32, 4, 4),
    ),
    _HOPPER: (*HOPPER_PLANS, SMALL_PLAN),
}  # fmt: skip
"""Candidates of the autotuner by kind; all but Hopper's need at most 64 KiB of shared memory."""


@functools.cache
def _kind(dtype: torch.dtype, device: torch.device) -> int:
    if device.type != "cuda":
        return _INTERPRETED
    return _FLOAT32 if dtype == torch.float32 else _HOPPER if is_hopper(device) else _SMALL


def _usual(M: int, N: int, K: int, kind: int) -> GeluTilePlan:
    if kind == _INTERPRETED:  # several tiles even for small samples
        return PLANS[kind][(M + N) % 2]
    if kind == _HOPPER and (M <= 64 or N <= 64):
        return SMALL_PLAN
    return HOPPER_PLANS[5] if kind == _HOPPER and N <= 128 else PLANS[kind][0]


TUNED: Tuned[GeluTilePlan] = Tuned(
    "linear_gelu_fwd",
    default=_usual,
    candidates=lambda M, N, K, kind: PLANS[kind],
    bucket=lambda M, N, K, kind: rounded((M, N, K)),  # the key has device and dtype, which imply the kind
)
"""Tuned plans of the forward kernels, keyed by M, N, K and kind."""


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True,
    plan: GeluTilePlan | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return y (M, N), and the pre-activation z (M, N) if kept, else an empty tensor."""
    (M, K), N = x.shape, weight.shape[0]
    x, weight = x.contiguous(), weight.contiguous()
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    z = torch.empty_like(y) if keep else y.new_empty(0)
    if not M or not N:
        return y, z
    if plan is None:
        sizes = (M, N, K, _kind(x.dtype, x.device))
        plan = TUNED(x.device, x.dtype, sizes, lambda plan: launch_forward(x, weight, bias, approximate, keep, plan))
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


def spans(M: int, max_parts: int) -> tuple[int, int]:
    """Return the rows of each part of M rows whose columns are summed apart, and the number of parts."""
    span = max(_MIN_SPAN, ceil_div(ceil_div(M, max_parts), BACKWARD[0]) * BACKWARD[0])
    return span, ceil_div(M, span)


def launch_dz(
    dy: Tensor, z: Tensor, approximate: str, sums: torch.dtype | None, *, activation: bool = False,
    join: tuple[int, int] | None = BIAS,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return dz (M, N), gelu(z) if `activation`, and the sums of dz's columns in a dtype unless None."""
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z) if activation else None
    if not M or not N:
        return dz, a, None if sums is None else z.new_zeros(N, dtype=sums)
    rows, stride = as_rows(dy, N)
    span, parts = spans(M, _MAX_PARTS)
    strips = ceil_div(N, BACKWARD[1])
    if parts * strips < _MIN_PROGRAMS:
        span = max(2, ceil_div(ceil_div(M, ceil_div(_MIN_PROGRAMS, strips)), BACKWARD[0])) * BACKWARD[0]
        parts = ceil_div(M, span)
        join = None if parts > _MAX_PARTS else join
    partial = None if sums is None else torch.empty(parts, N, dtype=torch.float32, device=z.device)
    KERNELS["bwd"].launch(
        (parts * strips,),
        (rows, z, dz, a, partial, M, N, stride, span),
        {"TANH": approximate == "tanh", "BLOCK_M": BACKWARD[0], "BLOCK_N": BACKWARD[1]},
        num_warps=_BACKWARD_WARPS,
    )
    return dz, a, None if partial is None or sums is None else launch_join(partial, sums, join)


def launch_join(partial: Tensor, dtype: torch.dtype, block: tuple[int, int] | None = None) -> Tensor:
    """Return the sum of each column of partial sums, added in a fixed order; block None for one of JOINS."""
    parts, N = partial.shape
    block_p, block_n = block or JOINS[parts > JOINS[0][0]]
    sums = torch.empty(N, dtype=dtype, device=partial.device)
    fixed = {"BLOCK_P": block_p, "BLOCK_N": block_n}
    KERNELS["join"].launch((ceil_div(N, block_n),), (partial, sums, parts, N), fixed, num_warps=4)
    return sums
