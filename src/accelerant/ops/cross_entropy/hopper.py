"""Launches of row.cu: long rows of bfloat16 logits on Hopper, held in shared memory between loss and gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.ops._hopper.program import ELEMENTS, HopperProgram, hopper_program, load
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.ops.cross_entropy.launch import COUNTS, launch_forward
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.dispatch import Case

__all__ = ["KINDS", "PLANS", "Plan", "alike", "launch_forward_row", "launch_row", "plan_for", "program", "refuses"]

KINDS = ("*bf16", "*i64", "*f32", "*f32", "*bf16", "*i32", "i32", "i32", "i64", "i64", "i64", "f32")
"""Of the kernel's arguments: logits, targets, losses, statistics, gradient, counts; M, N; distances of rows of the
logits and of the gradient; ignore_index; smoothing."""

_FILE = Path(__file__).with_name("row.cu")
_SHARED_BYTES = 228 << 10
_RESERVED_BYTES = 1 << 10
"""A multiprocessor's shared memory, and what the system has of each block's."""

LEAST = 8192
"""Rows of fewer columns stay in registers, in Triton's kernel."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A variant of the kernel.

    Attributes:
        threads: a block.
        blocks: a multiprocessor.
        cluster: blocks that hold a row together.
    """

    threads: int
    blocks: int
    cluster: int = 1

    @property
    def parts(self) -> int:
        """Of a row: one a warp."""
        return self.cluster * self.threads // 32

    def shared_bytes(self, N: int) -> int:
        """What a block keeps of a row of N columns, wherever it begins: 16 bytes a group of 8."""
        groups = (N + 14) // 8
        return 16 * (groups if self.cluster == 1 else ceil_div(groups, self.parts) * self.threads // 32)

    def room(self) -> int:
        """The most columns of a row."""
        others = 2 * 16 * self.parts + 8 * (self.threads // 32 + 2)  # what parts send each other, barriers
        groups = (_SHARED_BYTES // self.blocks - _RESERVED_BYTES - 1024 * ceil_div(others, 1024)) // 16
        if self.cluster > 1:
            groups = groups // (self.threads // 32) * self.parts
        return 8 * groups - 7


PLANS = (Plan(256, 4), Plan(512, 2), Plan(1024, 1), Plan(512, 3, 4), Plan(256, 3, 8))
"""The preferred first; threads are 32 times a power of two. More blocks hide the turn from one row to the next: 65536
rows of 16384 took 1.16 ms with four, 1.30 with two, on an H200."""


def plan_for(N: int) -> Plan | None:
    """The variant for rows of N columns; None if they do not fit in shared memory."""
    return next((plan for plan in PLANS if plan.room() >= N), None)


def refuses(case: Case) -> str | None:
    """Why the kernel cannot serve a case of shape (M, N); None if it can."""
    if case.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(case.device) != (9, 0):
        return "is for Hopper"
    if case.dtype != torch.bfloat16:
        return "takes bfloat16 logits"
    if "gradient" not in case.options:
        return "makes the gradient beside the loss; none is asked for"
    if case.shape[1] < LEAST or plan_for(case.shape[1]) is None:
        return f"takes rows of {LEAST} to {PLANS[-1].room()} columns, not {case.shape[1]}"
    return None


@functools.cache
def program(plan: Plan, N: int, mean: bool, smooth: bool, alike: bool = True) -> HopperProgram:
    """The kernel's text for a variant.

    Args:
        plan: threads, blocks and clusters.
        N: columns, which set how much shared memory it asks for.
        mean: the gradient is of the mean over the rows that count.
        smooth: with label smoothing.
        alike: all rows begin as far from a 16-byte boundary.
    """
    constants = {
        "THREADS": plan.threads,
        "BLOCKS": plan.blocks,
        "CLUSTER": plan.cluster,
        "ALIKE": int(alike),
        "MEAN": int(mean),
        "SMOOTH": int(smooth),
        "COUNTS": COUNTS,
    }
    text = hopper_program(_FILE, ELEMENTS[torch.bfloat16], (), constants)
    return HopperProgram("cross_entropy_row", text, plan.threads, plan.shared_bytes(N))


@functools.cache
def _kernel(plan: Plan, N: int, mean: bool, smooth: bool, alike: bool, device: int) -> Kernel:
    return load(program(plan, N, mean, smooth, alike), KINDS, device)


@functools.cache
def _most_clusters(plan: Plan, N: int, mean: bool, smooth: bool, alike: bool, device: int) -> int:
    """How many clusters the device runs at a time; its groups of multiprocessors need not divide by a cluster."""
    from cuda.core import LaunchConfig, Stream

    config = LaunchConfig(grid=1, cluster=plan.cluster, block=plan.threads, shmem_size=plan.shared_bytes(N))
    core = _kernel(plan, N, mean, smooth, alike, device).handle.core
    with torch.cuda.device(device):
        stream = Stream.from_handle(torch._C._cuda_getCurrentRawStream(device))
        return int(core.occupancy.max_active_clusters(config, stream=stream))


def launch_row(
    rows: Tensor,
    stride: int,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    losses: Tensor,
    statistics: Tensor,
    dx: Tensor,
    dx_stride: int,
    counts: Tensor | None,
    plan: Plan | None = None,
) -> None:
    """Each row's loss, statistics and gradient; the arguments are those of launch.launch_rows.

    The rows of dx must begin as far from a 16-byte boundary as those of the logits.

    Raises:
        LaunchError: the device refused, or is a part of one that has no room for the plan's clusters.
    """
    M, N = rows.shape
    plan = plan or plan_for(N) or PLANS[-1]
    device = rows.get_device()
    variant = plan, N, counts is not None, smoothing != 0.0, stride % 8 == 0, device
    kernel = _kernel(*variant)
    args = (
        rows, targets.long(), losses, statistics, dx, targets if counts is None else counts,
        M, N, stride, dx_stride, ignore_index, smoothing,
    )  # fmt: skip
    at_once = plan.blocks * multiprocessors(rows.device) if plan.cluster == 1 else _most_clusters(*variant)
    if not at_once:
        raise LaunchError(f"{rows.device} has no room for clusters of {plan.cluster} blocks, which hold {N} columns")
    grid = (plan.cluster * min(M, at_once),)
    stream = torch._C._cuda_getCurrentRawStream(device)
    with torch.cuda.device(device):
        kernel.handle.start(grid, (plan.threads,), args, stream)


def alike(rows: Tensor, stride: int) -> tuple[Tensor, int]:
    """Memory for the gradient of rows, and the distance of its rows; each aligned (16 bytes) as its logits."""
    M, N = rows.shape
    distance = N + (stride - N) % 8
    lead = rows.data_ptr() % 16 // 2
    memory = torch.empty(lead + M * distance, dtype=rows.dtype, device=rows.device)
    return memory[lead:].as_strided((M, N), (distance, 1), lead), distance


launch_forward_row = functools.partial(launch_forward, on_chip=True)
"""As launch.launch_forward, by this kernel."""
