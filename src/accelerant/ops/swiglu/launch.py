"""Launches of swiglu's kernels: what a program takes."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._elementwise import STREAM, Elementwise
from accelerant.ops._rows import as_rows, ceil_div, next_power_of_2
from accelerant.runtime.triton import TritonKernel

__all__ = ["KERNELS", "launch_backward", "launch_forward", "packed_backward", "packed_forward", "row_plan"]

KERNELS = {way: TritonKernel("accelerant.ops.swiglu.triton_kernels", f"swiglu_{way}") for way in ("fwd", "bwd")}


@functools.cache
def row_plan(N: int) -> Elementwise:
    """What a program takes of rows of N elements: as elsewhere, or a short row whole."""
    block = min(STREAM.block, max(128, next_power_of_2(N)))
    return Elementwise(block, max(1, block * STREAM.num_warps // STREAM.block))


def launch_forward(gate: Tensor, up: Tensor, plan: Elementwise = STREAM) -> Tensor:
    """Apply swiglu to two tensors: y, contiguous."""
    y = gate.new_empty(gate.shape)
    n = y.numel()
    if n:
        args = (gate.contiguous(), up.contiguous(), y, n, n, n)
        KERNELS["fwd"].launch(plan.grid(n), args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return y


def launch_backward(dy: Tensor, gate: Tensor, up: Tensor, plan: Elementwise = STREAM) -> tuple[Tensor, Tensor]:
    """Find the gradients of gate and up, contiguous."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    n = dgate.numel()
    if n:
        args = (dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, n, n, n, n)
        KERNELS["bwd"].launch(plan.grid(n), args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return dgate, dup


def packed_forward(x: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Apply swiglu to the halves of each row: y, contiguous."""
    N = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], N))
    if y.numel():
        plan = plan or row_plan(N)
        rows, stride = as_rows(x, 2 * N)
        rows = rows.view(-1, 2 * N)
        grid = (y.numel() // N * ceil_div(N, plan.block),)
        args = (rows, rows[:, N:], y, N, stride, stride)
        KERNELS["fwd"].launch(grid, args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return y


def packed_backward(dy: Tensor, x: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Find the gradient of x, contiguous, both halves in one pass."""
    N = x.shape[-1] // 2
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        plan = plan or row_plan(N)
        rows, stride = as_rows(x, 2 * N)
        rows, flat = rows.view(-1, 2 * N), dx.view(-1, 2 * N)
        grid = (dx.numel() // (2 * N) * ceil_div(N, plan.block),)
        args = (dy.contiguous(), rows, rows[:, N:], flat, flat[:, N:], N, stride, stride, 2 * N)
        KERNELS["bwd"].launch(grid, args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return dx
