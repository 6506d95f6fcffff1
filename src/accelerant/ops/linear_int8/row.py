"""Launches of row.cu: one row of x on Hopper, which waits for nothing but the weight's bytes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.ops._hopper.program import ELEMENTS, HopperProgram, hopper_program, load
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case

__all__ = ["KINDS", "PLANS", "UNALIGNED", "Plan", "aligned", "launch_row", "program", "refuses"]

UNALIGNED = "unaligned"
"""The option of a case whose x or weight the kernel cannot read, see aligned."""

KINDS = ("*bf16", "*i8", "*f32", "*f32", "*bf16", "i32", "i32")
"""Of the kernel's arguments: x, weight, scale, bias, y; N, K."""

_FILE = Path(__file__).with_name("row.cu")


@dataclass(frozen=True, slots=True)
class Plan:
    """A variant of the kernel.

    Attributes:
        rows: of the weight, that a warp takes.
        unroll: times 512 columns are on their way while as many are multiplied.
        warps: a block.
        ahead: bytes of each row that are asked for before the kernel ahead in the stream has ended.
    """

    rows: int
    unroll: int
    warps: int
    ahead: int


PLANS = (Plan(4, 2, 4, 512), Plan(1, 4, 4, 1024))
"""What is worth timing; the second is for weights of few rows, see usual_plan."""

_LEAST_BLOCKS = 3
"""A multiprocessor: with fewer, a row a warp keeps more warps busy."""


def refuses(case: Case) -> str | None:
    """Why the kernel cannot serve a case of shape (M, N, K); None if it can."""
    if case.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(case.device) != (9, 0):
        return "is for Hopper"
    M, _, K = case.shape
    if M != 1:
        return f"takes one row, not {M}"
    if case.dtype not in ELEMENTS:
        return "takes bfloat16 and float16"
    if "dynamic" in case.options:
        return "takes x as it is"
    if UNALIGNED in case.options:
        return "x or weight does not begin on a 16-byte boundary"
    return f"rows of {K} integers do not begin on 16-byte boundaries" if K % 16 or not K else None


def aligned(x: Tensor, weight: Tensor) -> bool:
    """Whether both begin on 16-byte boundaries, as a view into the middle of something may not; copies always do."""
    return not any(each.data_ptr() % 16 and each.is_contiguous() for each in (x, weight))


@functools.cache
def program(plan: Plan, dtype: torch.dtype, scale_bytes: int, bias_bytes: int) -> HopperProgram:
    """The kernel's text for a variant; scale_bytes and bias_bytes: 2 for the dtype of x, 4 for float32, 0 for none."""
    constants = {
        "ROWS": plan.rows, "UNROLL": plan.unroll, "WARPS": plan.warps, "AHEAD": plan.ahead,
        "SCALE_BYTES": scale_bytes, "BIAS_BYTES": bias_bytes,
    }  # fmt: skip
    text = hopper_program(_FILE, ELEMENTS[dtype], (), constants)
    return HopperProgram("linear_int8_row", text, 32 * plan.warps, 0, overlaps=True)


@functools.cache
def _kernel(plan: Plan, dtype: torch.dtype, scale_bytes: int, bias_bytes: int, device: int) -> Kernel:
    return load(program(plan, dtype, scale_bytes, bias_bytes), KINDS, device)


@functools.cache
def usual_plan(N: int, device: torch.device) -> Plan:
    """For a weight of N rows: of 4096 x 14336 in float16 the second took 16.7 us on an H200, the first 18.2."""
    plan = PLANS[0]
    return plan if ceil_div(N, plan.rows * plan.warps) >= _LEAST_BLOCKS * multiprocessors(device) else PLANS[1]


def launch_row(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, plan: Plan | None = None) -> Tensor:
    """Find y (1, N) of x (1, K); the arguments are those of launch.launch_forward, where refuses finds no reason.

    Raises:
        LaunchError: x or weight is contiguous and does not begin on a 16-byte boundary.
    """
    N, K = weight.shape
    if not aligned(x, weight):
        raise LaunchError(f"x at {x.data_ptr():#x} and weight at {weight.data_ptr():#x} must be multiples of 16")
    x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
    y = torch.empty(1, N, dtype=x.dtype, device=x.device)
    if not N:
        return y
    plan = plan or usual_plan(N, x.device)
    bias = None if bias is None else bias.contiguous()
    device = x.get_device()
    kernel = _kernel(plan, x.dtype, scale.element_size(), 0 if bias is None else bias.element_size(), device)
    grid = (ceil_div(N, plan.rows * plan.warps),)
    args = (x, weight, scale, scale if bias is None else bias, y, N, K)
    with torch.cuda.device(device):
        kernel.handle.start(grid, (32 * plan.warps,), args, torch._C._cuda_getCurrentRawStream(device))
    return y
