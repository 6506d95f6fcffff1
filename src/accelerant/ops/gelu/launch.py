"""Launches of gelu's kernels: what a program takes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.runtime.triton import TritonKernel

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Elementwise",
    "backward_kernel",
    "forward_kernel",
    "launch_backward",
    "launch_forward",
]

_MODULE = "accelerant.ops.gelu.triton_kernels"
forward_kernel = TritonKernel(_MODULE, "gelu_fwd")
backward_kernel = TritonKernel(_MODULE, "gelu_bwd")


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Elements and warps a program."""

    block: int
    num_warps: int


# 8 elements a thread, one 16-byte load of bfloat16 for each tensor: the fastest measured on an H200, by 5% over 16.
FORWARD = Elementwise(block=1024, num_warps=4)
BACKWARD = Elementwise(block=1024, num_warps=4)


def launch_forward(x: Tensor, approximate: str) -> Tensor:
    """Apply gelu, the result in the layout of x."""
    x, y = dense_pair(x)
    n = x.numel()
    if n:
        plan = FORWARD
        constants = {"TANH": approximate == "tanh", "BLOCK": plan.block}
        forward_kernel.launch((-(-n // plan.block),), (x, y, n), constants, num_warps=plan.num_warps)
    return y


def launch_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Apply its gradient, the result in the layout of x."""
    x, dx = dense_pair(x)
    n = x.numel()
    if n:
        if dy.stride() != x.stride():
            dy = torch.empty_like(x).copy_(dy)
        plan = BACKWARD
        constants = {"TANH": approximate == "tanh", "BLOCK": plan.block}
        backward_kernel.launch((-(-n // plan.block),), (dy, x, dx, n), constants, num_warps=plan.num_warps)
    return dx


def dense_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """The input, copied if its memory has holes or overlaps, and an empty tensor of the same layout."""
    y = torch.empty_like(x)
    if y.stride() != x.stride():  # empty_like keeps the strides of dense memory, permuted or not, and only those
        x = torch.empty_like(y).copy_(x)
    return x, y
