"""Variants and launches of the Hopper kernel (hopper.cu): long bfloat16 rows stay in shared memory for the gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from accelerant.errors import LaunchError
from accelerant.ops._hopper import ELEMENTS, HopperProgram, hopper_program, load, refuses_device
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.ops.cross_entropy.launch import COUNTS, launch_forward
from accelerant.runtime.compilation.kernel import Kernel as CompiledKernel
from accelerant.runtime.dispatch import Case

KINDS = ("*bf16", "*i64", "*f32", "*f32", "*bf16", "*i32", "i32", "i32", "i64", "i64", "i64", "f32")
"""Kinds of the kernel's arguments: logits, targets, losses, statistics, gradient, counts; M, N; row strides of the
logits and of the gradient; ignore_index; smoothing."""

_FILE = Path(__file__).with_name("hopper.cu")
_SHARED_BYTES = 228 << 10  # of a multiprocessor
_RESERVED_BYTES = 1 << 10  # reserved by the system per block

MIN_COLUMNS = 8192
"""Shorter rows stay in registers, in the Triton kernel."""


@dataclass(frozen=True, slots=True)
class SharedRowConfig:
    """A variant of the kernel: threads of a block, blocks of a multiprocessor, blocks that share a row."""

    threads: int
    blocks: int
    cluster: int = 1

    @property
    def parts(self) -> int:
        """Parts of a row, one per warp."""
        return self.cluster * self.threads // 32

    def shared_bytes(self, N: int) -> int:
        """Return a block's dynamic shared memory for rows of N columns of any alignment: 16 bytes per group of 8."""
        groups = (N + 14) // 8
        return 16 * (groups if self.cluster == 1 else ceil_div(groups, self.parts) * self.threads // 32)

    def max_columns(self) -> int:
        """Return the largest row that fits."""
        others = 2 * 16 * self.parts + 8 * (self.threads // 32 + 2)  # messages between parts, barriers
        groups = (_SHARED_BYTES // self.blocks - _RESERVED_BYTES - 1024 * ceil_div(others, 1024)) // 16
        if self.cluster > 1:
            groups = groups // (self.threads // 32) * self.parts
        return 8 * groups - 7


PLANS = (
    SharedRowConfig(256, 4),
    SharedRowConfig(512, 2),
    SharedRowConfig(1024, 1),
    SharedRowConfig(512, 3, 4),
    SharedRowConfig(256, 3, 8),
)
"""In order of preference; threads are 32 times a power of two. More blocks hide the transition between rows: 65536 rows
of 16384 columns took an H200 1.16 ms with four blocks, 1.30 ms with two."""


def plan_for(N: int) -> SharedRowConfig | None:
    """Return the variant for rows of N columns, or None if they do not fit in shared memory."""
    return next((plan for plan in PLANS if plan.max_columns() >= N), None)


def refuses(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (M, N), or None."""
    if reason := refuses_device(case, (torch.bfloat16,)):
        return reason
    if "gradient" not in case.options:
        return "computes loss and gradient together, and no gradient is needed"
    if case.shape[1] < MIN_COLUMNS or plan_for(case.shape[1]) is None:
        return f"takes rows of {MIN_COLUMNS} to {PLANS[-1].max_columns()} columns, not {case.shape[1]}"
    return None


@functools.cache
def program(plan: SharedRowConfig, N: int, mean: bool, smooth: bool, alike: bool = True) -> HopperProgram:
    """Return the program text of a variant for rows of N columns, which determine the shared memory.

    `mean`: the gradient is of the mean over the counted rows; `alike`: all rows have one offset from a 16-byte
    boundary.
    """
    constants = {
        "THREADS": plan.threads, "BLOCKS": plan.blocks, "CLUSTER": plan.cluster, "ALIKE": int(alike),
        "MEAN": int(mean), "SMOOTH": int(smooth), "COUNTS": COUNTS,
    }  # fmt: skip
    text = hopper_program(_FILE, ELEMENTS[torch.bfloat16], (), constants)
    return HopperProgram("cross_entropy_row", text, plan.threads, plan.shared_bytes(N))


@functools.cache
def _kernel(plan: SharedRowConfig, N: int, mean: bool, smooth: bool, alike: bool, device: int) -> CompiledKernel:
    return load(program(plan, N, mean, smooth, alike), KINDS, device)


@functools.cache
def _max_clusters(plan: SharedRowConfig, N: int, mean: bool, smooth: bool, alike: bool, device: int) -> int:
    """Return how many clusters fit on the device; its groups of multiprocessors need not be multiples of one."""
    from cuda.core import Kernel, LaunchConfig, Stream

    config = LaunchConfig(grid=1, cluster=plan.cluster, block=plan.threads, shmem_size=plan.shared_bytes(N))
    core = Kernel.from_handle(_kernel(plan, N, mean, smooth, alike, device).handle.function)
    with torch.cuda.device(device):
        stream = Stream.from_handle(torch._C._cuda_getCurrentRawStream(device))
        return int(core.occupancy.max_active_clusters(config, stream=stream))


def launch_rows(
    rows: Tensor, stride: int, targets: Tensor, ignore_index: int, smoothing: float, *, losses: Tensor,
    statistics: Tensor, dx: Tensor, dx_stride: int, counts: Tensor | None, plan: SharedRowConfig | None = None,
) -> None:  # fmt: skip
    """Do what launch.launch_rows does; rows of dx must have the alignment, modulo 16 bytes, of the logits' rows.

    LaunchError: the launch failed, or the device (a partition of a GPU) has no room for the plan's clusters.
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
    resident = plan.blocks * multiprocessors(rows.device) if plan.cluster == 1 else _max_clusters(*variant)
    if not resident:
        raise LaunchError(f"{rows.device} has no room for clusters of {plan.cluster} blocks, which hold {N} columns")
    grid = (plan.cluster * min(M, resident),)
    stream = torch._C._cuda_getCurrentRawStream(device)
    with torch.cuda.device(device):
        kernel.handle.start(grid, (plan.threads,), args, stream)


def _empty_gradient(rows: Tensor, stride: int) -> tuple[Tensor, int]:
    """Return memory for the gradient whose rows are aligned (modulo 16 bytes) as the logits', and its row stride."""
    M, N = rows.shape
    dx_stride = N + (stride - N) % 8
    lead = rows.data_ptr() % 16 // 2
    memory = torch.empty(lead + M * dx_stride, dtype=rows.dtype, device=rows.device)
    return memory[lead:].as_strided((M, N), (dx_stride, 1), lead), dx_stride


launch_hopper = functools.partial(launch_forward, run_rows=launch_rows, empty_gradient=_empty_gradient)
"""launch.launch_forward by this kernel."""
