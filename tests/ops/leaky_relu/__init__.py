"""leaky_relu: validation, reference, launches, implementations, registration with torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._launch import SHORT, STREAM, StreamKernel, accesses, launch_map, triton_operation
from accelerant.ops._library import check_dtype
from accelerant.runtime.dispatch import case_of

__all__ = ["leaky_relu"]

forward_kernel = StreamKernel("leaky_relu.triton_kernels", "leaky_relu_fwd", STREAM)
backward_kernel = StreamKernel("leaky_relu.triton_kernels", "leaky_relu_bwd", SHORT)


def leaky_relu_reference(x, slope=0.01):
    """Return x where it is positive, slope x elsewhere."""
    return torch.where(x > 0, x, slope * x)


def _torch_backward(dy, x, slope):
    return torch.where(x > 0, dy, slope * dy)


leaky_relu_fwd = triton_operation(
    "leaky_relu_fwd",
    lambda x, slope: launch_map(forward_kernel, x, {"SLOPE": slope}),
    F.leaky_relu,
    cost=accesses(2, 2),
    differentiable=True,
)
leaky_relu_bwd = triton_operation(
    "leaky_relu_bwd",
    lambda dy, x, slope: launch_map(backward_kernel, x, {"SLOPE": slope}, dy=dy),
    _torch_backward,
    cost=accesses(3, 2),
)
_cpu = CpuFastPath(lambda x, slope=0.01: F.leaky_relu(x, slope))


@_cpu
def leaky_relu(x: Tensor, slope: float = 0.01) -> Tensor:
    """Scale negative elements by a slope.

    y = max(x, 0) + slope min(x, 0)

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64.
        slope: of the negative part; dimensionless.

    Returns:
        shape, dtype and layout of x.

    Raises:
        UnsupportedDtype: dtype not listed above.
    """
    check_dtype("leaky_relu", x)
    return _leaky_relu(x, float(slope))


def _case(x, slope):
    return case_of((x.device, x.dtype, x.shape, (slope,)))


_leaky_relu = DecomposedOp(
    "leaky_relu(Tensor x, float slope) -> (Tensor y)",
    operation=leaky_relu_fwd,
    case=_case,
    backward=lambda dy, x, slope, needs: (leaky_relu_bwd(_case(x, slope), dy, x, slope),),
    saves=("x",),
    gradients={"x": "x"},
    composite=F.leaky_relu,
    composite_backward=lambda dy, x, slope, needs: (_torch_backward(dy, x, slope),),
    fake=lambda x, slope: torch.empty_like(x),
    keeps_layout=True,
    cpu=_cpu,
)
