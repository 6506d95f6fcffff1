"""softmax: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._library import name_of
from accelerant.ops.softmax.launch import launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.triton import refuses_triton

__all__ = ["softmax", "softmax_bwd", "softmax_fwd"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _refuses(case: Case) -> str | None:
    if case.dtype == torch.float64:
        return "computes in float32, not float64"
    return refuses_triton(case.device)


def _torch_forward(x: Tensor, dim: int) -> Tensor:
    return torch.softmax(x.contiguous(), dim)


def _torch_backward(dy: Tensor, y: Tensor, dim: int) -> Tensor:
    return torch._softmax_backward_data(dy, y, dim, y.dtype)


softmax_fwd = Operation(
    "softmax_fwd",
    (Implementation("triton", launch_forward, refuses=_refuses, own=True), Implementation("torch", _torch_forward)),
    cost=lambda case: Cost(2 * math.prod(case.shape) * case.dtype.itemsize, 5 * math.prod(case.shape)),
)
softmax_bwd = Operation(
    "softmax_bwd",
    (Implementation("triton", launch_backward, refuses=_refuses, own=True), Implementation("torch", _torch_backward)),
    cost=lambda case: Cost(3 * math.prod(case.shape) * case.dtype.itemsize, 4 * math.prod(case.shape)),
)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Exponentials of x, divided by their sum along a dimension.

    y = exp(x - max(x)) / sum(exp(x - max(x))), maximum and sum over `dim`

    Args:
        x: any shape, float16, bfloat16, float32 or float64; fastest along a contiguous last dimension.
        dim: the dimension to sum over; negative counts from the end.

    Returns:
        shape and dtype of x, contiguous. Computed in float32 (float64 for float64) whatever x is, so that autocast has
        nothing to widen: the dtype of x is kept under autocast too. A row of -inf alone gives NaN.
        Differentiable twice.

    Raises:
        ShapeError: x has no such dimension.
        UnsupportedDtype: dtype not listed above.

    Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own
    softmax, which the ledger does not count.

    Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", section 3.
    """
    if x.dtype not in _DTYPES:
        raise UnsupportedDtype(f"softmax takes {', '.join(map(name_of, _DTYPES))}; x is {name_of(x.dtype)}")
    dims = x.dim() or 1  # a scalar counts as one element along dimension 0, as in torch
    if not -dims <= dim < dims:
        raise ShapeError(f"dim must be in [{-dims}, {dims - 1}] for x of shape {tuple(x.shape)}, got {dim}")
    dim %= dims
    if x.dim() == 0:
        return softmax(x.reshape(1), 0).reshape(())
    y: Tensor = _softmax(x, dim)
    return y


def _options(x: Tensor, dim: int) -> tuple[str, ...]:
    """What matters to a choice beside x; nothing for the last dimension."""
    return () if dim == x.dim() - 1 else (f"dim {dim}",)


def _forward(x: Tensor, dim: int) -> Tensor:
    y: Tensor = softmax_fwd(Case(x.device, x.dtype, x.shape, _options(x, dim)), x, dim)
    return y


def _backward(dy: Tensor, y: Tensor, dim: int, needs: Sequence[bool]) -> tuple[Tensor]:
    return (softmax_bwd(Case(y.device, y.dtype, y.shape, _options(y, dim)), dy, y, dim),)


_softmax = DifferentiableOp(
    "softmax(Tensor x, int dim) -> (Tensor y)",
    forward=_forward,
    backward=_backward,
    saves=("y",),
    gradients={"x": "y"},
    composite=_torch_forward,
    composite_backward=lambda dy, y, dim, needs: (_torch_backward(dy, y, dim),),
    fake=lambda x, dim: x.new_empty(x.shape),
)
