"""Launches of cross_entropy's Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import AccelerantError, LaunchError
from accelerant.ops import _launch
from accelerant.ops._hopper import ELEMENTS, HopperProgram, hopper_program, load, refuses_device
from accelerant.ops._launch import Repeats, RowTile, are_repeatable, as_rows, ceil_div, multiprocessors, next_power_of_2
from accelerant.runtime.compilation.kernel import Kernel as CompiledKernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case
from accelerant.runtime.dispatch.operation import recoverable
from accelerant.runtime.dispatch.race import Tuned, rounded
from accelerant.runtime.memory.limits import ordinary_tensors

_WIDTHS = {
    "count": (),
    "reduce": (),
    "scale": (),
    "few": (5, 6, 7),
    "fwd": (8, 9, 10),
    "fwd_wide": (),
    "bwd": (7, 8, 9),
}
"""Positions of row widths and strides among the arguments; fwd_wide aligns its rows itself."""
KERNELS = {
    name: TritonKernel("accelerant.ops.cross_entropy.triton_kernels", f"cross_entropy_{name}", widths=widths)
    for name, widths in _WIDTHS.items()
}

COUNTS = 64  # programs that count the rows; each row's program adds up their counts
WIDE_FROM = 8192  # longer rows are processed in blocks of columns

_BLOCK = 4096  # elements of the one-dimensional kernels

FEW = 2**16
"""Logits whose loss and gradient are one launch of one program, which a multiprocessor takes about 10 us for: with more
rows at a time there would be three launches, and three results that a second backward pass alone reads.
"""

FEW_ROWS, FEW_WARPS = 2**14, 16  # elements at a time, and warps, of that program

_FEW_PRODUCTS = 2**18
"""Elements below which torch's product costs the host half as much as our kernel, which leaves out a factor of 1."""


@dataclass(frozen=True, slots=True)
class WideTile:
    """The tiling of cross_entropy_fwd_wide; `held` bfloat16 blocks stay in registers for the gradient."""

    block: int
    num_warps: int
    held: int = 0

    def fits(self, N: int) -> bool:
        """Return whether a row has the held blocks, and one that begins before it."""
        return (self.held + 1) * self.block <= N


WIDE_PLANS = (WideTile(4096, 8), WideTile(4096, 16), WideTile(8192, 32))
HELD_PLANS = (WideTile(8192, 32, held=3), WideTile(8192, 32, held=2), WideTile(4096, 16, held=6))


@functools.cache
def row_plan(N: int) -> RowTile:
    """Return the default plan of cross_entropy_fwd: about 4096 elements per program."""
    if (block_n := max(16, next_power_of_2(N))) <= 2048:
        return RowTile(rows=4096 // block_n, block_n=block_n, num_warps=4)
    return RowTile(rows=1, block_n=block_n, num_warps=8)


@functools.cache
def wide_plan(N: int, holds: bool) -> WideTile:
    """Return the default plan of a row above WIDE_FROM columns; holds: a bfloat16 gradient follows."""
    return HELD_PLANS[0] if holds and HELD_PLANS[0].fits(N) else WIDE_PLANS[1]


@functools.cache
def wide_plans(N: int, holds: bool) -> tuple[WideTile, ...]:
    """Return the candidates of cross_entropy_fwd_wide."""
    return (*WIDE_PLANS, *(plan for plan in HELD_PLANS if holds and plan.fits(N)))


@functools.cache
def backward_plan(N: int) -> RowTile:
    """Return the default plan of cross_entropy_bwd: 2048 elements per program."""
    block_n = min(2048, max(16, next_power_of_2(N)))
    return RowTile(rows=2048 // block_n, block_n=block_n, num_warps=4)


@functools.cache
def backward_plans(N: int) -> tuple[RowTile, ...]:
    """Return the candidates of cross_entropy_bwd."""
    tiles = ((1024, 1024, 4), (2048, 2048, 4), (2048, 2048, 8), (2048, 1024, 4), (4096, 4096, 8))
    sizes = [(elements, min(columns, max(16, next_power_of_2(N))), warps) for elements, columns, warps in tiles]
    return tuple(dict.fromkeys(RowTile(elements // block_n, block_n, warps) for elements, block_n, warps in sizes))


TUNED_ROWS: Tuned[RowTile] = Tuned(
    "cross_entropy_fwd",
    default=lambda M, N, gradient: row_plan(N),
    candidates=lambda M, N, gradient: _launch.whole_rows(max(16, next_power_of_2(N))),
)
"""Tuned plans of cross_entropy_fwd, keyed by M, N and whether a gradient is written."""

TUNED_WIDE: Tuned[WideTile] = Tuned(
    "cross_entropy_fwd_wide",
    default=lambda M, N, gradient, holds: wide_plan(N, bool(holds)),
    candidates=lambda M, N, gradient, holds: wide_plans(N, bool(holds)),
    # Rows of one bucket may differ in which plans fit.
    bucket=lambda M, N, gradient, holds: (*rounded((M, N)), gradient, holds, len(wide_plans(N, bool(holds)))),
)
"""Tuned plans of cross_entropy_fwd_wide, keyed by M, N, gradient, and whether blocks can be held (bfloat16)."""

TUNED_BACKWARD: Tuned[RowTile] = Tuned(
    "cross_entropy_bwd", default=lambda M, N: backward_plan(N), candidates=lambda M, N: backward_plans(N)
)
"""Tuned plans of cross_entropy_bwd, keyed by M and N."""


_FORWARD, _SCALES = Repeats(TUNED_ROWS, TUNED_WIDE), Repeats()


def count(targets: Tensor, ignore_index: int, counts: Tensor | None = None) -> Tensor:
    """Return (COUNTS,) int32 partial counts of the targets (M,) that are not ignore_index, in `counts` if given."""
    if counts is None:
        counts = torch.empty(COUNTS, dtype=torch.int32, device=targets.device)
    args = (targets, counts, targets.shape[0], ignore_index)
    KERNELS["count"].launch((COUNTS,), args, {"BLOCK": 1024}, num_warps=4)
    return counts


def reduce(losses: Tensor, counts: Tensor | None, dtype: torch.dtype, y: Tensor | None = None) -> Tensor:
    """Return the sum of losses, divided by the sum of counts unless None; a scalar, y if given."""
    y, n = torch.empty((), dtype=dtype, device=losses.device) if y is None else y, losses.shape[0]
    fixed = {"COUNTS": COUNTS, "BLOCK": _BLOCK}
    if n > 16 * _BLOCK:
        parts = torch.empty(256, dtype=torch.float32, device=losses.device)
        KERNELS["reduce"].launch((256,), (losses, None, parts, n), fixed, num_warps=8)
        losses, n = parts, 256
    KERNELS["reduce"].launch((1,), (losses, counts, y, n), fixed, num_warps=8)
    return y


def scale_(dx: Tensor, dy: Tensor, counts: Tensor | None = None) -> Tensor:
    """Multiply dx, and the padding of its rows, by the scalar dy over the sum of counts, in place."""
    if not dx.is_contiguous():
        M, N = dx.shape
        scale_(dx.as_strided(((M - 1) * dx.stride(0) + N,), (1,)), dy, counts)
        return dx
    if (n := dx.numel()) < _FEW_PRODUCTS and counts is None and dy.dtype is dx.dtype:
        return dx.mul_(dy)
    if n:
        key: tuple[object, ...] | None = None
        pointers: list[int] = []
        if are_repeatable():
            pointers = [x.data_ptr() for x in (dx, dy, counts) if x is not None]
            key = (n, dx.dtype, dy.dtype, dx.get_device(), *[pointer & 15 for pointer in pointers])
            if _SCALES.start(key, pointers):
                return dx
        grid = (min(ceil_div(n, _BLOCK), 8 * multiprocessors(dx.device)),)
        fixed = {"COUNTS": COUNTS, "BLOCK": _BLOCK}
        with _SCALES.recorded(key, pointers):
            KERNELS["scale"].launch(grid, (dx, dy, counts, n), fixed, num_warps=8)
    return dx


def launch_rows(
    rows: Tensor, stride: int, targets: Tensor, ignore_index: int, smoothing: float, *,
    losses: Tensor | None = None, statistics: Tensor | None = None, dx: Tensor | None = None, dx_stride: int = 0,
    counts: Tensor | None = None, dy: Tensor | None = None, plan: WideTile | RowTile | None = None,
) -> None:  # fmt: skip
    """Compute each row's loss, statistics and gradient; those without memory to write to are skipped.

    `statistics` (2, M) float32: the maximum, and 1 / sum of exp(x - maximum); `dx` may be the memory of rows, and is
    divided by the sum of `counts`; `dy`, the upstream gradient, is a scalar or (M,). `plan` None: the tuned one.
    """
    M, N = rows.shape
    if plan is None:

        def run(plan: WideTile | RowTile) -> None:
            launch_rows(
                rows, stride, targets, ignore_index, smoothing, losses=losses, statistics=statistics, dx=dx,
                dx_stride=dx_stride, counts=counts, dy=dy, plan=plan,
            )  # fmt: skip

        gradient = int(dx is not None)
        repeatable = run if dx is None or dx.data_ptr() != rows.data_ptr() else None
        if N <= WIDE_FROM:
            plan = TUNED_ROWS(rows.device, rows.dtype, (M, N, gradient), repeatable)
        else:
            holds = int(dx is not None and rows.dtype == torch.bfloat16)
            plan = TUNED_WIDE(rows.device, rows.dtype, (M, N, gradient, holds), repeatable)
    dy_stride = 1 if dy is not None and dy.dim() else 0
    args = (
        rows, targets, losses, statistics, dx, counts, dy,
        M, N, stride, dx_stride, dy_stride, ignore_index, smoothing,
    )  # fmt: skip
    fixed: dict[str, int | bool] = {"SMOOTH": smoothing != 0.0, "COUNTS": COUNTS}
    if isinstance(plan, RowTile):
        fixed |= {"ROWS": plan.rows, "BLOCK_N": plan.block_n}
        KERNELS["fwd"].launch((ceil_div(M, plan.rows),), args, fixed, num_warps=plan.num_warps)
        return
    wide = 16 // rows.element_size()
    vec = 1 if stride % wide == 0 else wide
    whole = N // plan.block - (vec > 1)  # blocks after the one that begins before the row
    held = max(0, min(plan.held, whole)) if rows.dtype == torch.bfloat16 and dx is not None else 0
    fixed |= {"VEC": vec, "SAME": dx is not None and dx_stride == stride, "BLOCK": plan.block, "HELD": held}
    KERNELS["fwd_wide"].launch((M,), args, fixed, num_warps=plan.num_warps)


def _empty_gradient(rows: Tensor, stride: int) -> tuple[Tensor, int]:
    return torch.empty(rows.shape, dtype=rows.dtype, device=rows.device), rows.shape[1]


def launch_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool,
    inplace: bool = False, gradient: bool = False, *, run_rows: Callable[..., None] = launch_rows,
    empty_gradient: Callable[[Tensor, int], tuple[Tensor, int]] = _empty_gradient,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return loss, statistics, counts (empty for FEW logits with their gradient), and the `gradient` of the loss."""
    M, N = logits.shape
    device, dtype = logits.device, torch.float32 if wide else logits.dtype
    rows, stride = as_rows(logits, N)
    targets = targets.contiguous()
    mean, alone = reduction == "mean", reduction == "none"
    if gradient and not alone and not inplace and 0 < M * N <= FEW and N <= WIDE_FROM and run_rows is launch_rows:
        return _launch_few(rows, stride, targets, ignore_index, smoothing, mean, dtype)
    counts = torch.empty(COUNTS if mean else 0, dtype=torch.int32, device=device)
    statistics = torch.empty(2, M, dtype=torch.float32, device=device)
    losses = torch.empty(M, dtype=dtype if alone else torch.float32, device=device)
    loss = losses if alone else torch.empty((), dtype=dtype, device=device)
    dx, dx_stride = None, 0
    if gradient:
        over = inplace and stride == N and rows.data_ptr() == logits.data_ptr()
        dx, dx_stride = (rows, stride) if over else empty_gradient(rows, stride)
    used_counts = counts if mean else None
    results = (loss, statistics, counts) if dx is None else (loss, statistics, counts, dx)
    key: tuple[object, ...] | None = None
    pointers: list[int] = []
    if M and run_rows is launch_rows and dx is not rows and are_repeatable():
        tensors = (rows, targets, losses, statistics, used_counts, dx, loss)
        pointers = [x.data_ptr() for x in tensors if x is not None]
        key = (
            M, N, stride, dx_stride, rows.dtype, targets.dtype, dtype, rows.get_device(), ignore_index, smoothing,
            reduction, *[pointer & 15 for pointer in pointers],
        )  # fmt: skip
        if _FORWARD.start(key, pointers):
            return results
    written = False
    try:
        with _FORWARD.recorded(key, pointers):
            if mean:
                count(targets, ignore_index, counts)
            if M:
                run_rows(
                    rows, stride, targets, ignore_index, smoothing,
                    losses=losses, statistics=statistics, dx=dx, dx_stride=dx_stride, counts=used_counts,
                )  # fmt: skip
                written = dx is rows
            if not alone:
                reduce(losses, used_counts, dtype, loss)
    except Exception as error:
        if not written or not (isinstance(error, AccelerantError) or recoverable(error)):
            raise
        # An error after which dispatch does not try the next implementation: the logits are overwritten.
        raise AccelerantError(f"cross_entropy had written its gradient over the logits, then: {error}") from error
    return results


def _launch_few(
    rows: Tensor, stride: int, targets: Tensor, ignore_index: int, smoothing: float, mean: bool, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Return the sum or mean of the losses in `dtype`, no statistics and counts, and the gradient."""
    (M, N), device = rows.shape, rows.device
    loss = torch.empty((), dtype=dtype, device=device)
    dx = torch.empty((M, N), dtype=rows.dtype, device=device)
    statistics, counts = _nothing(device)
    key: tuple[object, ...] | None = None
    pointers: list[int] = []
    if are_repeatable():
        pointers = [rows.data_ptr(), targets.data_ptr(), loss.data_ptr(), dx.data_ptr()]
        key = _few_key(rows, stride, targets, ignore_index, smoothing, mean, dtype, pointers)
        if _FORWARD.start(key, pointers):
            return loss, statistics, counts, dx
    block_n = max(16, next_power_of_2(N))
    fixed = {"MEAN": mean, "SMOOTH": smoothing != 0.0, "ROWS": FEW_ROWS // block_n, "BLOCK_N": block_n, "BLOCK": 1024}
    args = (rows, targets, loss, dx, M, N, stride, N, ignore_index, smoothing)
    with _FORWARD.recorded(key, pointers):
        KERNELS["few"].launch((1,), args, fixed, num_warps=FEW_WARPS)
    return loss, statistics, counts, dx


def _few_key(
    rows: Tensor, stride: int, targets: Tensor, ignore_index: int, smoothing: float, mean: bool, dtype: torch.dtype,
    pointers: Sequence[int],
) -> tuple[object, ...]:  # fmt: skip
    return (
        *rows.shape, stride, rows.dtype, targets.dtype, dtype, rows.get_device(), ignore_index, smoothing, mean,
        *[pointer & 15 for pointer in pointers],
    )  # fmt: skip


def bind_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool,
    inplace: bool = False, gradient: bool = False,
) -> Callable[..., Any] | None:  # fmt: skip
    """Return launch_forward for few tensors that differ from these in their memory alone; None for others."""
    if inplace or not (gradient and logits.is_contiguous() and targets.is_contiguous()):
        return None
    dtype, device, mean = torch.float32 if wide else logits.dtype, logits.device, reduction == "mean"
    key = _few_key(logits, logits.shape[1], targets, ignore_index, smoothing, mean, dtype, (0,) * 4)
    if (start := _FORWARD.bound(key)) is None:
        return None
    nothing, empty, empty_like = _nothing(device), torch.empty, torch.empty_like

    def launch(logits: Tensor, targets: Tensor, *settings: Any) -> tuple[Tensor, ...]:
        loss, dx = empty((), dtype=dtype, device=device), empty_like(logits)
        pointers = logits.data_ptr(), targets.data_ptr(), loss.data_ptr(), dx.data_ptr()
        if (pointers[0] | pointers[1] | pointers[2] | pointers[3]) & 15:
            return launch_forward(logits, targets, *settings)
        start(pointers)
        return loss, *nothing, dx

    return launch


@functools.cache
def _nothing(device: torch.device) -> tuple[Tensor, Tensor]:
    with ordinary_tensors():
        return torch.empty(2, 0, device=device), torch.empty(0, dtype=torch.int32, device=device)


def launch_backward(
    dy: Tensor, logits: Tensor, targets: Tensor, statistics: Tensor, counts: Tensor, ignore_index: int,
    smoothing: float, reduction: str, unscaled: Tensor | None = None, plan: RowTile | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits, contiguous; `unscaled` is that gradient for dy = 1, scaled in place."""
    if unscaled is not None:
        return scale_(unscaled, dy)
    M, N = logits.shape
    dx = torch.empty(M, N, dtype=logits.dtype, device=logits.device)
    if not M:
        return dx
    rows, stride = as_rows(logits, N)
    if plan is None:
        args = (dy, logits, targets, statistics, counts, ignore_index, smoothing, reduction, None)
        plan = TUNED_BACKWARD(logits.device, logits.dtype, (M, N), lambda plan: launch_backward(*args, plan))
    launch_args = (
        rows, targets.contiguous(), statistics, dx, counts if reduction == "mean" else None, dy.contiguous(),
        M, N, stride, N, int(dy.dim() > 0), ignore_index, smoothing,
    )  # fmt: skip
    fixed = {"SMOOTH": smoothing != 0.0, "COUNTS": COUNTS, "ROWS": plan.rows, "BLOCK_N": plan.block_n}
    grid = (ceil_div(M, plan.rows) * ceil_div(N, plan.block_n),)
    KERNELS["bwd"].launch(grid, launch_args, fixed, num_warps=plan.num_warps)
    return dx


# --- the kernel for Hopper (hopper.cu): long bfloat16 rows stay in shared memory for the gradient ---------------------
SHARED_ROW_KINDS = ("*bf16", "*i64", "*f32", "*f32", "*bf16", "*i32", "i32", "i32", "i64", "i64", "i64", "f32")
"""Kinds of the kernel's arguments: logits, targets, losses, statistics, gradient, counts; M, N; row strides of the
logits and of the gradient; ignore_index; smoothing."""

_FILE = Path(__file__).with_name("hopper.cu")
_SHARED_BYTES = 228 << 10  # of a multiprocessor
_RESERVED_BYTES = 1 << 10  # reserved by the system per block

MIN_SHARED_COLUMNS = 8192  # shorter rows stay in registers, in the Triton kernel


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


SHARED_ROW_CONFIGS = (
    SharedRowConfig(256, 4),
    SharedRowConfig(512, 2),
    SharedRowConfig(1024, 1),
    SharedRowConfig(512, 3, 4),
    SharedRowConfig(256, 3, 8),
)
"""In order of preference; threads are 32 times a power of two. More blocks hide the transition between rows: 65536 rows
of 16384 columns took an H200 1.16 ms with four blocks, 1.30 ms with two."""


def shared_row_config(N: int) -> SharedRowConfig | None:
    """Return the variant for rows of N columns, or None if they do not fit in shared memory."""
    return next((plan for plan in SHARED_ROW_CONFIGS if plan.max_columns() >= N), None)


def refuses_shared_rows(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (M, N), or None."""
    if reason := refuses_device(case, (torch.bfloat16,)):
        return reason
    if "gradient" not in case.options:
        return "computes loss and gradient together, and no gradient is needed"
    if case.shape[1] < MIN_SHARED_COLUMNS or shared_row_config(case.shape[1]) is None:
        return (
            f"takes rows of {MIN_SHARED_COLUMNS} to {SHARED_ROW_CONFIGS[-1].max_columns()} columns, not {case.shape[1]}"
        )
    return None


@functools.cache
def shared_row_program(plan: SharedRowConfig, N: int, mean: bool, smooth: bool, alike: bool = True) -> HopperProgram:
    """Return a variant's text for rows of N columns; `alike`: all rows have one offset from a 16-byte boundary."""
    constants = {
        "THREADS": plan.threads, "BLOCKS": plan.blocks, "CLUSTER": plan.cluster, "ALIKE": int(alike),
        "MEAN": int(mean), "SMOOTH": int(smooth), "COUNTS": COUNTS,
    }  # fmt: skip
    text = hopper_program(_FILE, ELEMENTS[torch.bfloat16], (), constants)
    return HopperProgram("cross_entropy_row", text, plan.threads, plan.shared_bytes(N))


@functools.cache
def _shared_row_kernel(
    plan: SharedRowConfig, N: int, mean: bool, smooth: bool, alike: bool, device: int
) -> CompiledKernel:
    return load(shared_row_program(plan, N, mean, smooth, alike), SHARED_ROW_KINDS, device)


@functools.cache
def _max_clusters(plan: SharedRowConfig, N: int, mean: bool, smooth: bool, alike: bool, device: int) -> int:
    """Return how many clusters fit on the device; its groups of multiprocessors need not be multiples of one."""
    from cuda.core import Kernel, LaunchConfig, Stream

    config = LaunchConfig(grid=1, cluster=plan.cluster, block=plan.threads, shmem_size=plan.shared_bytes(N))
    core = Kernel.from_handle(_shared_row_kernel(plan, N, mean, smooth, alike, device).handle.function)
    with torch.cuda.device(device):
        stream = Stream.from_handle(torch._C._cuda_getCurrentRawStream(device))
        return int(core.occupancy.max_active_clusters(config, stream=stream))


def launch_shared_rows(
    rows: Tensor, stride: int, targets: Tensor, ignore_index: int, smoothing: float, *, losses: Tensor,
    statistics: Tensor, dx: Tensor, dx_stride: int, counts: Tensor | None, plan: SharedRowConfig | None = None,
) -> None:  # fmt: skip
    """Do what launch_rows does; rows of dx must have the alignment, modulo 16 bytes, of the logits' rows.

    LaunchError: the launch failed, or the device (a partition of a GPU) has no room for the plan's clusters.
    """
    M, N = rows.shape
    plan = plan or shared_row_config(N) or SHARED_ROW_CONFIGS[-1]
    device = rows.get_device()
    variant = plan, N, counts is not None, smoothing != 0.0, stride % 8 == 0, device
    kernel = _shared_row_kernel(*variant)
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


def _aligned_gradient(rows: Tensor, stride: int) -> tuple[Tensor, int]:
    """Return memory for the gradient whose rows are aligned (modulo 16 bytes) as the logits', and its row stride."""
    M, N = rows.shape
    dx_stride = N + (stride - N) % 8
    lead = rows.data_ptr() % 16 // 2
    memory = torch.empty(lead + M * dx_stride, dtype=rows.dtype, device=rows.device)
    return memory[lead:].as_strided((M, N), (dx_stride, 1), lead), dx_stride


launch_hopper = functools.partial(launch_forward, run_rows=launch_shared_rows, empty_gradient=_aligned_gradient)
"""launch_forward by this kernel."""
