"""Launches of swiglu's kernels."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._launch import SHORT, STREAM, STREAMS, Elementwise, StreamKernel, as_rows, ceil_div, next_power_of_2
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = ["KERNELS", "PACKED", "launch_backward", "launch_forward", "packed_backward", "packed_forward", "row_plan"]

KERNELS = {
    name: StreamKernel("accelerant.ops.swiglu.triton_kernels", f"swiglu_{name}", usual, widths)
    for name, usual, widths in (("fwd", STREAM, (3, 4, 5)), ("bwd", SHORT, (5, 6, 7, 8)))
}


@functools.cache
def row_plan(N: int, usual: Elementwise = STREAM) -> Elementwise:
    """Return the plan for rows of N elements: the usual one, or a short row per program."""
    block = min(usual.block, max(128, next_power_of_2(N)))
    return Elementwise(block, max(1, block * usual.num_warps // usual.block))


def _tuned(name: str) -> Tuned[Elementwise]:
    return Tuned(
        f"swiglu_packed_{name}",
        default=lambda M, N: row_plan(N, KERNELS[name].usual),
        candidates=lambda M, N: tuple(dict.fromkeys(row_plan(N, stream) for stream in STREAMS)),
    )


PACKED = {name: _tuned(name) for name in KERNELS}
"""Tuned plans for halves of rows, keyed by rows and columns."""


def launch_forward(gate: Tensor, up: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Return swiglu of two tensors, contiguous."""
    y = gate.new_empty(gate.shape)
    n = y.numel()
    if n:
        if plan is None:
            plan = KERNELS["fwd"].plan(gate.device, gate.dtype, (n,), lambda plan: launch_forward(gate, up, plan))
        args = (gate.contiguous(), up.contiguous(), y, n, n, n)
        KERNELS["fwd"].launch(plan.grid(n), args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return y


def launch_backward(dy: Tensor, gate: Tensor, up: Tensor, plan: Elementwise | None = None) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up, contiguous."""
    dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
    n = dgate.numel()
    if n:
        if plan is None:
            plan = KERNELS["bwd"].plan(gate.device, gate.dtype, (n,), lambda plan: launch_backward(dy, gate, up, plan))
        args = (dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup, n, n, n, n)
        KERNELS["bwd"].launch(plan.grid(n), args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return dgate, dup


def packed_forward(x: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Return swiglu of the halves of each row, contiguous."""
    N = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], N))
    if y.numel():
        M = y.numel() // N
        if plan is None:
            plan = PACKED["fwd"](x.device, x.dtype, (M, N), lambda plan: packed_forward(x, plan))
        rows, stride = as_rows(x, 2 * N)
        rows = rows.view(-1, 2 * N)
        grid = (M * ceil_div(N, plan.block),)
        args = (rows, rows[:, N:], y, N, stride, stride)
        KERNELS["fwd"].launch(grid, args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return y


def packed_backward(dy: Tensor, x: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Return the gradient of x, contiguous, both halves in one pass."""
    N = x.shape[-1] // 2
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        M = dx.numel() // (2 * N)
        if plan is None:
            plan = PACKED["bwd"](x.device, x.dtype, (M, N), lambda plan: packed_backward(dy, x, plan))
        rows, stride = as_rows(x, 2 * N)
        rows, flat = rows.view(-1, 2 * N), dx.view(-1, 2 * N)
        grid = (M * ceil_div(N, plan.block),)
        args = (dy.contiguous(), rows, rows[:, N:], flat, flat[:, N:], N, stride, stride, 2 * N)
        KERNELS["bwd"].launch(grid, args, {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return dx
