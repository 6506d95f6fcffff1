"""Launches of linear_fp8's Triton kernels."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from accelerant.ops._launch import RowPlan, as_rows, ceil_div, multiprocessors, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel

E4M3 = torch.float8_e4m3fn

TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures with e4m3 conversions and products."""

KERNELS = {
    name: TritonKernel("accelerant.ops.linear_fp8.triton_kernels", f"linear_fp8_{name}", targets=TARGETS)
    for name in ("rows", "gelu", "dgelu")
}

LONGEST, LONGEST_DGELU = 16384, 8192
"""Longest rows that stay in registers; shorter for dgelu, which also keeps the sums of columns."""

_PROGRAMS = 2  # of dgelu, per multiprocessor


@functools.cache
def row_plan(N: int) -> RowPlan:
    """Return the plan of kernel rows: about 4096 elements per program, 16 or 32 per thread."""
    block_n = max(16, next_power_of_2(N))
    if block_n <= 2048:
        return RowPlan(rows=min(64, 4096 // block_n), block_n=block_n, num_warps=4)
    return RowPlan(rows=1, block_n=block_n, num_warps=8 if block_n <= 8192 else 16)


@functools.cache
def gelu_plan(N: int) -> RowPlan:
    """Return the plan of kernel gelu, with twice the elements per thread (32768 x 3072, H200: 0.089 ms, was 0.099)."""
    plan = row_plan(N)
    return plan if plan.rows > 1 else replace(plan, num_warps=max(4, plan.num_warps // 2))


@functools.cache
def dgelu_plan(N: int) -> RowPlan:
    """Return the plan of kernel dgelu, which also keeps the sums of all columns.

    H200, 32768 x 3072: 8 warps took 0.276 ms with 3 stages, 0.346 with 2; 16 warps 0.298 with none.
    """
    block_n = max(16, next_power_of_2(N))
    rows = max(1, min(16, 2048 // block_n))
    elements = rows * block_n
    stages = 3 if elements <= 4096 else 2  # fits in 99 KiB of shared memory for any width
    return RowPlan(rows=rows, block_n=block_n, num_warps=min(16, max(4, elements // 512)), stages=stages)


def constants(plan: RowPlan, N: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of rows and gelu; dgelu also has its stages."""
    return {"EXACT": plan.block_n == N, "ROWS": plan.rows, "BLOCK_N": plan.block_n}


def _empty_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for q and the row scales of x (M, N)."""
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return q, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def launch_rows(x: Tensor, factor: Tensor | None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return q (M, N) and s (M,) of x (M, N) with columns multiplied by factor (N,); `out` is memory for both."""
    M, N = x.shape
    rows, stride = as_rows(x, N)
    q, scale = _empty_rounded(x) if out is None else (out[0].view(torch.uint8), out[1])
    if q.numel():
        plan = row_plan(N)
        args = (rows, factor, q, scale, M, N, stride)
        KERNELS["rows"].launch((ceil_div(M, plan.rows),), args, constants(plan, N), num_warps=plan.num_warps)
    return q.view(E4M3), scale


def launch_gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return launch_rows of gelu(z), z (M, N) contiguous, by the tanh approximation."""
    M, N = z.shape
    q, scale = _empty_rounded(z)
    if q.numel():
        plan = gelu_plan(N)
        args = (z, q, scale, M, N)
        KERNELS["gelu"].launch((ceil_div(M, plan.rows),), args, constants(plan, N), num_warps=plan.num_warps)
    return q.view(E4M3), scale


def launch_dgelu(da: Tensor, z: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dz, gelu(z), q and s of dz with columns multiplied by factor, and partial column sums of dz in float32.

    da is (M, N), z (M, N) contiguous, factor (N,) float32.
    """
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z)
    q, scale = _empty_rounded(z)
    if not q.numel():
        return dz, a, q.view(E4M3), scale, torch.zeros(1, N, dtype=torch.float32, device=z.device)
    rows, stride = as_rows(da, N)
    plan = dgelu_plan(N)
    span = ceil_div(ceil_div(M, _PROGRAMS * multiprocessors(z.device)), plan.rows) * plan.rows
    parts = ceil_div(M, span)
    partial = torch.empty(parts, N, dtype=torch.float32, device=z.device)
    args = (rows, z, factor, dz, a, q, scale, partial, M, N, stride, span)
    fixed = {**constants(plan, N), "STAGES": plan.stages}
    KERNELS["dgelu"].launch((parts,), args, fixed, num_warps=plan.num_warps)
    return dz, a, q.view(E4M3), scale, partial
