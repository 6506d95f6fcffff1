"""Launches of gelu's kernels."""

from __future__ import annotations

from torch import Tensor

from accelerant.ops._launch import SHORT, STREAM, Elementwise, StreamKernel, launch_map, launch_map_backward

__all__ = ["backward_kernel", "forward_kernel", "launch_backward", "launch_forward"]

_MODULE = "accelerant.ops.gelu.triton_kernels"
forward_kernel = StreamKernel(_MODULE, "gelu_fwd", STREAM)
backward_kernel = StreamKernel(_MODULE, "gelu_bwd", SHORT)


def launch_forward(x: Tensor, approximate: str, plan: Elementwise | None = None) -> Tensor:
    """Apply gelu, the result in the layout of x."""
    return launch_map(forward_kernel, x, {"TANH": approximate == "tanh"}, plan)


def launch_backward(dy: Tensor, x: Tensor, approximate: str, plan: Elementwise | None = None) -> Tensor:
    """Apply its gradient, the result in the layout of x."""
    return launch_map_backward(backward_kernel, dy, x, {"TANH": approximate == "tanh"}, plan)
