"""relu, sigmoid, tanh, silu: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import accesses, launch_map, launch_map_backward
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops.elementwise.launch import STREAM_KERNELS
from accelerant.runtime.dispatch import Case, Implementation, Operation, case_of

__all__ = ["relu", "sigmoid", "silu", "tanh"]

_aten = torch.ops.aten


def _unary(
    name: str,
    forward: Callable[[Tensor], Tensor],
    backward: Callable[[Tensor, Tensor], Tensor],
    *,
    saves: str,
    flops: tuple[int, int],
    cpu: CpuFastPath,
    again: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> DifferentiableOp:
    """Return an op of one tensor from torch's functions for it, with the kernels of its name.

    `backward` takes dy and the saved tensor, x or y; `again` is the same from functions that torch can differentiate,
    if `backward` is not differentiable; `flops` are operations per element, forward and backward.
    """
    again = again or backward
    own, own_backward = STREAM_KERNELS[f"{name}_fwd"], STREAM_KERNELS[f"{name}_bwd"]
    fwd = Operation(
        f"{name}_fwd",
        (
            Implementation("triton", lambda x: launch_map(own, x), refuses=refuses_triton_kernel, own=True),
            Implementation("torch", forward, differentiable=True),
        ),
        cost=accesses(2, flops[0]),
    )
    bwd = Operation(
        f"{name}_bwd",
        (
            Implementation(
                "triton",
                lambda dy, saved: launch_map_backward(own_backward, dy, saved),
                refuses=refuses_triton_kernel,
                own=True,
            ),
            Implementation("torch", backward),
        ),
        cost=accesses(3, flops[1]),
    )

    def case(x: Tensor) -> Case:
        return case_of((x.device, x.dtype, x.shape, ()))

    def run_backward(dy: Tensor, saved: Tensor, needs: Sequence[bool]) -> tuple[Tensor]:
        return (bwd(case(saved), dy, saved),)

    return DifferentiableOp(
        f"{name}(Tensor x) -> (Tensor y)",
        operation=fwd,
        case=case,
        backward=run_backward,
        saves=(saves,),
        gradients={"x": saves},
        composite=forward,
        composite_backward=lambda dy, saved, needs: (again(dy, saved),),
        fake=torch.empty_like,
        keeps_layout=True,
        decomposes=True,
        cpu=cpu,
    )


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of silu in functions that torch can differentiate, in either mode, in float32 for less."""
    wide = x if x.dtype == torch.float64 else x.float()
    s = torch.sigmoid(wide)
    return (dy * (s * (1.0 + wide * (1.0 - s)))).to(x.dtype)


_relu_cpu, _sigmoid_cpu = CpuFastPath(torch.relu), CpuFastPath(torch.sigmoid)
_tanh_cpu, _silu_cpu = CpuFastPath(torch.tanh), CpuFastPath(functional.silu)
_relu = _unary(
    "relu", torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0), saves="y", flops=(1, 1), cpu=_relu_cpu
)
_sigmoid = _unary("sigmoid", torch.sigmoid, _aten.sigmoid_backward, saves="y", flops=(3, 3), cpu=_sigmoid_cpu)
_tanh = _unary("tanh", torch.tanh, _aten.tanh_backward, saves="y", flops=(15, 3), cpu=_tanh_cpu)
_silu = _unary(
    "silu", functional.silu, _aten.silu_backward, saves="x", flops=(3, 8), cpu=_silu_cpu, again=_silu_backward
)


@_relu_cpu
def relu(x: Tensor) -> Tensor:
    """Set negative elements to zero.

    y = max(x, 0)

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.

    Returns:
        shape, dtype and layout of x; NaN stays NaN. The gradient at 0 is 0. Differentiable twice.

    Raises:
        UnsupportedDtype: dtype not listed above.

    Under torch.compile this is torch's own relu, so that the compiler fuses it with its surroundings. Under
    forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own relu,
    which the ledger does not count. The same holds for the other functions of this module.
    """
    check_dtype("relu", x)
    y: Tensor = _relu(x)
    return y


@_sigmoid_cpu
def sigmoid(x: Tensor) -> Tensor:
    """Apply the logistic function.

    y = 1 / (1 + exp(-x))

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.

    Returns:
        shape, dtype and layout of x. Computed in float32 (float64 for float64). Differentiable twice.

    Raises:
        UnsupportedDtype: dtype not listed above.

    Under torch.compile, forward-mode differentiation and torch.func as `relu`.
    """
    check_dtype("sigmoid", x)
    y: Tensor = _sigmoid(x)
    return y


@_tanh_cpu
def tanh(x: Tensor) -> Tensor:
    """Apply the hyperbolic tangent.

    y = (exp(2x) - 1) / (exp(2x) + 1)

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.

    Returns:
        shape, dtype and layout of x. Computed in float32 (float64 for float64), small results as exact as large ones.
        Differentiable twice.

    Raises:
        UnsupportedDtype: dtype not listed above.

    Under torch.compile, forward-mode differentiation and torch.func as `relu`.
    """
    check_dtype("tanh", x)
    y: Tensor = _tanh(x)
    return y


@_silu_cpu
def silu(x: Tensor) -> Tensor:
    """Multiply each element of x by the logistic function of it.

    y = x / (1 + exp(-x))

    Args:
        x: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.

    Returns:
        shape, dtype and layout of x. Computed in float32 (float64 for float64); NaN for -inf, as in PyTorch.
        Differentiable twice.

    Raises:
        UnsupportedDtype: dtype not listed above.

    Under torch.compile, forward-mode differentiation and torch.func as `relu`.

    Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118, equation 5.
    """
    check_dtype("silu", x)
    y: Tensor = _silu(x)
    return y
