"""Variants and launches of the Hopper kernel for one row of x (hopper.cu), bound by reading the weight."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.ops._hopper import ELEMENTS, HopperProgram, hopper_program, load, refuses_device
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case

UNALIGNED = "unaligned"
"""Option of a case whose x or weight the kernel cannot read, see is_aligned."""

KINDS = ("*bf16", "*i8", "*f32", "*f32", "*bf16", "i32", "i32")
"""Kinds of the kernel's arguments: x, weight, scale, bias, y; N, K."""

_FILE = Path(__file__).with_name("hopper.cu")


@dataclass(frozen=True, slots=True)
class Int8RowConfig:
    """A variant of the kernel: `rows` of the weight per warp, `unroll` steps of 512 columns in flight.

    `prefetch`: bytes of each row prefetched before the preceding kernel ends (programmatic dependent launch).
    """

    rows: int
    unroll: int
    warps: int
    prefetch: int


PLANS = (Int8RowConfig(4, 2, 4, 512), Int8RowConfig(1, 4, 4, 1024))
"""The second is for weights with few rows, see plan_for."""

_MIN_BLOCKS = 3
"""Blocks per multiprocessor; with fewer, one row per warp keeps more warps busy."""


def refuses(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (M, N, K), or None."""
    M, _, K = case.shape
    if reason := refuses_device(case, tuple(ELEMENTS)):
        return reason
    if M != 1:
        return f"takes one row, not {M}"
    if "dynamic" in case.options:
        return "does not quantize x"
    if UNALIGNED in case.options:
        return "x or weight does not begin on a 16-byte boundary"
    return f"rows of {K} integers do not begin on 16-byte boundaries" if K % 16 else None


def is_aligned(x: Tensor, weight: Tensor) -> bool:
    """Return whether x and weight begin on 16-byte boundaries, or are copied before the launch."""
    return not any(tensor.data_ptr() % 16 and tensor.is_contiguous() for tensor in (x, weight))


@functools.cache
def program(plan: Int8RowConfig, dtype: torch.dtype, scale_bytes: int, bias_bytes: int) -> HopperProgram:
    """Return the program text; scale_bytes and bias_bytes are 2 for the dtype of x, 4 for float32, 0 for None."""
    constants = {
        "ROWS": plan.rows, "UNROLL": plan.unroll, "WARPS": plan.warps, "PREFETCH": plan.prefetch,
        "SCALE_BYTES": scale_bytes, "BIAS_BYTES": bias_bytes,
    }  # fmt: skip
    text = hopper_program(_FILE, ELEMENTS[dtype], (), constants)
    return HopperProgram("linear_int8_row", text, 32 * plan.warps, 0, overlaps=True)


@functools.cache
def _kernel(plan: Int8RowConfig, dtype: torch.dtype, scale_bytes: int, bias_bytes: int, device: int) -> Kernel:
    return load(program(plan, dtype, scale_bytes, bias_bytes), KINDS, device)


@functools.cache
def plan_for(N: int, device: torch.device) -> Int8RowConfig:
    """Return the variant for N rows of weight (H200, 4096 x 14336, float16: the first 18.2 us, the second 16.7)."""
    plan = PLANS[0]
    return plan if ceil_div(N, plan.rows * plan.warps) >= _MIN_BLOCKS * multiprocessors(device) else PLANS[1]


def launch_hopper(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool = False,
    plan: Int8RowConfig | None = None,
) -> Tensor:  # fmt: skip
    """Return y (1, N) of x (1, K) and weight (N, K) for a case that `refuses` does not refuse.

    LaunchError: x or weight is contiguous and does not begin on a 16-byte boundary.
    """
    N, K = weight.shape
    if not is_aligned(x, weight):
        raise LaunchError(f"x at {x.data_ptr():#x} and weight at {weight.data_ptr():#x} must be multiples of 16")
    x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
    y = torch.empty(1, N, dtype=x.dtype, device=x.device)
    if not N:
        return y
    plan = plan or plan_for(N, x.device)
    bias = None if bias is None else bias.contiguous()
    device = x.get_device()
    kernel = _kernel(plan, x.dtype, scale.element_size(), 0 if bias is None else bias.element_size(), device)
    grid = (ceil_div(N, plan.rows * plan.warps),)
    args = (x, weight, scale, scale if bias is None else bias, y, N, K)
    with torch.cuda.device(device):
        kernel.handle.start(grid, (32 * plan.warps,), args, torch._C._cuda_getCurrentRawStream(device))
    return y
