"""Launches of gelu's kernels: what a program takes."""

from __future__ import annotations

from torch import Tensor

from accelerant.ops._elementwise import STREAM, Elementwise, launch_map, launch_map_backward
from accelerant.runtime.triton import TritonKernel

__all__ = ["BACKWARD", "FORWARD", "backward_kernel", "forward_kernel", "launch_backward", "launch_forward"]

_MODULE = "accelerant.ops.gelu.triton_kernels"
forward_kernel = TritonKernel(_MODULE, "gelu_fwd")
backward_kernel = TritonKernel(_MODULE, "gelu_bwd")

FORWARD = STREAM
BACKWARD = STREAM


def launch_forward(x: Tensor, approximate: str, plan: Elementwise = FORWARD) -> Tensor:
    """Apply gelu, the result in the layout of x."""
    return launch_map(forward_kernel, x, {"TANH": approximate == "tanh"}, plan)


def launch_backward(dy: Tensor, x: Tensor, approximate: str, plan: Elementwise = BACKWARD) -> Tensor:
    """Apply its gradient, the result in the layout of x."""
    return launch_map_backward(backward_kernel, dy, x, {"TANH": approximate == "tanh"}, plan)
