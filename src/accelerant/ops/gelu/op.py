"""gelu: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import accesses
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops.gelu.launch import launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, Implementation, Operation, case_of

__all__ = ["gelu", "gelu_bwd", "gelu_fwd"]


def _torch_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
    return dx


def _torch_forward(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


# Operations counted an element: the polynomial, the exponential and the division, each as one.
gelu_fwd = Operation(
    "gelu_fwd",
    (
        Implementation("triton", launch_forward, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_forward, differentiable=True),
    ),
    cost=accesses(2, 10),
)
gelu_bwd = Operation(
    "gelu_bwd",
    (
        Implementation("triton", launch_backward, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_backward),
    ),
    cost=accesses(3, 18),
)


_cpu = CpuFastPath(lambda x, approximate="none": F.gelu(x, approximate=approximate))


@_cpu
def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Multiply each element of x by the standard normal distribution function at it.

    none  y = x P(x), P the distribution function of N(0, 1)
    tanh  y = 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.
        approximate: "none" or "tanh", as above.

    Returns:
        shape, dtype and layout of x. Computed in float32 (float64 for float64). Differentiable twice.

    Raises:
        UnsupportedDtype: dtype not listed above.
        ConfigError: approximate is neither.

    Under torch.compile this is torch's own gelu, so that the compiler fuses it with its surroundings.
    Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own
    gelu, which the ledger does not count.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    check_dtype("gelu", x)
    if approximate != "none" and approximate != "tanh":
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    y: Tensor = _gelu(x, approximate)
    return y


def _case(x: Tensor, approximate: str) -> Case:
    return case_of((x.device, x.dtype, x.shape, (approximate,)))


def _backward(dy: Tensor, x: Tensor, approximate: str, needs: Sequence[bool]) -> tuple[Tensor]:
    return (gelu_bwd(_case(x, approximate), dy, x, approximate),)


_gelu = DifferentiableOp(
    "gelu(Tensor x, str approximate) -> (Tensor y)",
    operation=gelu_fwd,
    case=_case,
    backward=_backward,
    saves=("x",),
    gradients={"x": "x"},
    composite=_torch_forward,
    composite_backward=lambda dy, x, approximate, needs: (_torch_backward(dy, x, approximate),),
    fake=lambda x, approximate: torch.empty_like(x),
    keeps_layout=True,
    decomposes=True,
    cpu=_cpu,
)
