"""gelu: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.ops._library import below_autograd, define, is_plain, name_of
from accelerant.ops.gelu.launch import launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.triton import refuses_triton

__all__ = ["gelu", "gelu_bwd", "gelu_fwd"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _refuses(case: Case) -> str | None:
    if case.dtype == torch.float64:
        return "computes in float32, not float64"
    if case.options[-1] == "create_graph":
        return "its backward pass has no gradient of its own (create_graph=True)"
    return refuses_triton(case.device)


def _torch_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx: Tensor = torch.ops.aten.gelu_backward(dy, x, approximate=approximate)
    return dx


def _torch_forward(x: Tensor, approximate: str) -> Tensor:
    return F.gelu(x, approximate=approximate)


# Operations counted an element: the polynomial, the exponential and the division, each as one.
gelu_fwd = Operation(
    "gelu_fwd",
    (Implementation("triton", launch_forward, refuses=_refuses, own=True), Implementation("torch", _torch_forward)),
    cost=lambda case: Cost(2 * math.prod(case.shape) * case.dtype.itemsize, 10 * math.prod(case.shape)),
)
gelu_bwd = Operation(
    "gelu_bwd",
    (Implementation("triton", launch_backward, refuses=_refuses, own=True), Implementation("torch", _torch_backward)),
    cost=lambda case: Cost(3 * math.prod(case.shape) * case.dtype.itemsize, 18 * math.prod(case.shape)),
)


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

    Under torch.compile this is torch's own gelu, so that the compiler fuses it with what stands around it.
    Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own
    gelu, which the ledger does not count.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    if x.dtype not in _DTYPES:
        raise UnsupportedDtype(f"gelu takes {', '.join(map(name_of, _DTYPES))}; x is {name_of(x.dtype)}")
    if approximate != "none" and approximate != "tanh":
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {approximate!r}")
    if torch.compiler.is_compiling():
        return F.gelu(x, approximate=approximate)
    if not is_plain(x):
        y: Tensor = _op(x, approximate)
    elif x.requires_grad and torch.is_grad_enabled():
        y = _apply(x, approximate)
    else:
        y = _forward(x, approximate)
    return y


class Gelu(torch.autograd.Function):
    """Autograd of gelu; named for the profiler."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """Keeps x."""
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        if is_plain(x):
            return _forward(x, approximate)
        with below_autograd():
            y: Tensor = _op(x, approximate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        """dx; itself differentiable where the caller asked for that."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _differentiable_backward(dy, x, ctx.approximate), None
        if is_plain(dy):
            return _backward(dy, x, ctx.approximate), None
        return _op_backward(dy, x, ctx.approximate), None


def _forward(x: Tensor, approximate: str) -> Tensor:
    y: Tensor = gelu_fwd(Case(x.device, x.dtype, x.shape, (approximate,)), x, approximate)
    return y


def _backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx: Tensor = gelu_bwd(Case(x.device, x.dtype, x.shape, (approximate,)), dy, x, approximate)
    return dx


def _differentiable_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    if not is_plain(dy):  # being traced: shapes may be symbols, and nothing runs
        return _torch_backward(dy, x, approximate)
    dx: Tensor = gelu_bwd(Case(x.device, x.dtype, x.shape, (approximate, "create_graph")), dy, x, approximate)
    return dx


_apply: Callable[..., Any] = Gelu.apply
_op = define(
    "gelu(Tensor x, str approximate) -> Tensor",
    kernel=_forward,
    fake=lambda x, approximate: torch.empty_like(x),
    differentiable=_apply,
    composite=_torch_forward,
)
_op_backward = define(
    "gelu_backward(Tensor dy, Tensor x, str approximate) -> Tensor",
    kernel=_backward,
    fake=lambda dy, x, approximate: torch.empty_like(x),
    differentiable=_differentiable_backward,
    composite=_torch_backward,
)
