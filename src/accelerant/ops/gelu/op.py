"""gelu: reference, implementations, the public function, registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._launch import SHORT, StreamKernel, accesses, launch_map, triton_operation
from accelerant.ops._library import check_dtype
from accelerant.runtime.dispatch import Case, case_of
from accelerant.runtime.files import clipped

forward_kernel = StreamKernel("accelerant.ops.gelu.triton_kernels", "gelu_fwd")
backward_kernel = StreamKernel("accelerant.ops.gelu.triton_kernels", "gelu_bwd", SHORT)


def gelu_reference(x: Tensor, approximate: str = "none") -> Tensor:
    """Return x P(x) or its approximation by tanh, in the dtype of x; the tests' oracle in float64."""
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _torch_forward(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


def _torch_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
    return dx


# Operations counted per element: the polynomial, the exponential and the division, each as one.
gelu_fwd = triton_operation(
    "gelu_fwd",
    lambda x, approximate: launch_map(forward_kernel, x, {"TANH": approximate == "tanh"}),
    _torch_forward,
    cost=accesses(2, 10),
    differentiable=True,
)
gelu_bwd = triton_operation(
    "gelu_bwd",
    lambda dy, x, approximate: launch_map(backward_kernel, x, {"TANH": approximate == "tanh"}, dy=dy),
    _torch_backward,
    cost=accesses(3, 18),
)
_cpu = CpuFastPath(
    lambda x, approximate="none": F.gelu(x, approximate=approximate),
    bind=lambda x, *options, **_: None if options else F.gelu,
    small=lambda *_, **__: True,
)


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

    Under torch.compile this is torch's own gelu, so that the compiler fuses it with its surroundings. So it is under
    forward-mode differentiation and the transforms of torch.func, and the ledger does not count it.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    check_dtype("gelu", x)
    if approximate != "none" and approximate != "tanh":
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {clipped(approximate)}")
    return _gelu(x, approximate)


def _case(x: Tensor, approximate: str) -> Case:
    return case_of((x.device, x.dtype, x.shape, (approximate,)))


_gelu: Callable[..., Tensor] = DecomposedOp(
    "gelu(Tensor x, str approximate) -> (Tensor y)",
    operation=gelu_fwd,
    case=_case,
    backward=lambda dy, x, approximate, needs: (gelu_bwd(_case(x, approximate), dy, x, approximate),),
    saves=("x",),
    gradients={"x": "x"},
    composite=_torch_forward,
    composite_backward=lambda dy, x, approximate, needs: (_torch_backward(dy, x, approximate),),
    fake=lambda x, approximate: torch.empty_like(x),
    keeps_layout=True,
    cpu=_cpu,
)
