"""linear_int8: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._library import autocast_dtype, name_of
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops.linear_int8 import row
from accelerant.ops.linear_int8.launch import FEW_ROWS, launch_dx, launch_dynamic, launch_forward
from accelerant.ops.quantize_int8.op import by_torch, quantize_rows
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["linear_int8"]

_MOST_PRODUCTS = (2**31 - 1) // (128 * 127)
"""What a sum in int32 holds, of an element of the weight, -128 at least, times one of q, 127 at most."""
_MOST_ROWS = 512
"""Above this many rows of x a library multiplies faster, by more than a dequantised weight costs to write and read."""


def linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """A linear layer whose weight is 8-bit integers with a scale for each output.

    y = (x W^T) scale + b

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K) int8, as quantize_int8 makes it of a linear layer's weight.
        scale: (N,), float32 or the dtype of x.
        bias: (N,), float32 or the dtype of x; None for none.
        dynamic: whether x is rounded to 8-bit integers too, each row by quantize_int8, and the sums are of integers:
            faster for many rows, and exact but for that rounding. False: x is taken as it is.

    Returns:
        (..., N), dtype of x, contiguous. Products accumulate in float32 (float64 for float64), of integers in int32.
        Differentiable twice in x, scale and bias. The weight gets no gradient; the rounding of x counts as the
        identity. x is kept for the backward pass only where scale wants a gradient.

    Raises:
        ShapeError: weight is not (N, K), scale or bias is not (N,), a tensor is on another device than x; or dynamic,
            and K is above 132104, where a sum may not fit in int32.
        UnsupportedDtype: a dtype not listed above.

    Under autocast x is taken in autocast's dtype. Under forward-mode differentiation and the transforms of torch.func
    this is torch's linear of the dequantised weight, which the ledger does not count.

    Source: Dettmers, Lewis, Belkada and Zettlemoyer 2022, arXiv:2208.07339, section 2; the gradient past the rounding:
    Bengio, Leonard and Courville 2013, arXiv:1308.3432, section 3.
    """
    low = autocast_dtype(x.device.type)
    if low is not None and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(low)
    _check(x, weight, scale, bias, dynamic)
    if x.dim() == 2:
        y: Tensor = _linear_int8(x, weight, scale, bias, dynamic)
        return y
    rows: Tensor = _linear_int8(x.reshape(-1, x.shape[-1]), weight, scale, bias, dynamic)
    return rows.view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> None:
    check_dtype("linear_int8", x)
    if weight.dtype != torch.int8:
        raise UnsupportedDtype(f"weight must be int8, got {name_of(weight.dtype)}: see quantize_int8")
    if x.dim() == 0:
        raise ShapeError("x must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(f"weight must be (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    if dynamic and weight.shape[1] > _MOST_PRODUCTS:
        raise ShapeError(f"dynamic=True sums at most {_MOST_PRODUCTS} products in int32, got {weight.shape[1]}")
    if weight.device != x.device:
        raise ShapeError(f"weight must be on {x.device}, where x is; it is on {weight.device}")
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is None:
            continue
        if vector.dim() != 1 or vector.shape[0] != weight.shape[0]:
            raise ShapeError(f"{name} must be ({weight.shape[0]},), got {tuple(vector.shape)}")
        if vector.dtype not in (torch.float32, x.dtype):
            wanted = " or ".join(dict.fromkeys(("float32", name_of(x.dtype))))
            raise UnsupportedDtype(f"{name} must be {wanted}; got {name_of(vector.dtype)}")
        if vector.device != x.device:
            raise ShapeError(f"{name} must be on {x.device}, where x is; it is on {vector.device}")


# --- implementations -------------------------------------------------------------------------------------------------


def _refuses(case: Case) -> str | None:
    if case.device.type == "cuda":
        M, _, K = case.shape
        if K % 16:
            return f"rows of {K} integers do not begin on 16-byte boundaries"
        if "dynamic" not in case.options:
            if M > FEW_ROWS and case.dtype == torch.float32:
                return "float32 products of many rows are left to the library"
            if M > _MOST_ROWS:
                return f"products of more than {_MOST_ROWS} rows are left to the library, with a dequantised weight"
    return refuses_triton_kernel(case)


def _refuses_backward(case: Case) -> str | None:
    if case.device.type == "cuda":
        if case.dtype == torch.float32:
            return "float32 products are left to the library"
        if case.shape[0] > _MOST_ROWS:
            return f"products of more than {_MOST_ROWS} rows are left to the library, with a dequantised weight"
    return refuses_triton_kernel(case)


def _triton_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    if not dynamic:
        return launch_forward(x, weight, scale, bias)
    q, x_scale = quantize_rows(x, 1)
    return launch_dynamic(q, x_scale, weight, scale, bias, x.dtype)


def _hopper_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    return row.launch_row(x, weight, scale, bias)


def _torch_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    with torch.no_grad():
        if not dynamic and (x.dtype == torch.float16 or x.device.type != "cpu"):
            whole = _dequantised(weight, scale, x.dtype)
            return functional.linear(x, whole, None if bias is None else bias.to(x.dtype))
        wide = torch.promote_types(x.dtype, torch.float32)
        if dynamic:
            q, x_scale = quantize_rows(x, 1)
            y = _integer_product(q, weight).to(wide) * x_scale[:, None] * scale
        else:  # a CPU converts faster than it multiplies; float16 could overflow before the scale
            y = functional.linear(x, weight.to(x.dtype)).to(wide) * scale
        return (y if bias is None else y + bias).to(x.dtype)


def _dequantised(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight times its scales, rounded once; in one pass, where `weight * scale` would write float32 first."""
    whole = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    return torch.mul(weight, scale[:, None], out=whole)


def _integer_product(q: Tensor, weight: Tensor) -> Tensor:
    """Multiply q by the transposed weight in int32; on CUDA torch takes multiples of 8, and at least 17 rows."""
    if q.device.type != "cuda":
        return torch._int_mm(q, weight.t())
    (M, K), N = q.shape, weight.shape[0]
    if not (M and N and K):
        return q.new_zeros((M, N), dtype=torch.int32)
    beyond = max(0, 17 - M), -N % 8, -K % 8
    if any(beyond):
        q = functional.pad(q, (0, beyond[2], 0, beyond[0]))
        weight = functional.pad(weight, (0, beyond[2], 0, beyond[1]))
    return torch._int_mm(q, weight.t())[:M, :N]


def _triton_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    dscale: Tensor | None = None
    if needs[1] and x is not None:
        bare = launch_forward(x, weight, None, None, wide=True)
        dscale = bare.mul_(dy).sum(0).to(scale.dtype)
    return [launch_dx(dy, weight, scale) if needs[0] else None, dscale, _bias_gradient(dy, bias, needs[2])]


def _torch_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """From torch's differentiable functions, so that it may be differentiated itself."""
    dx: Tensor | None = None
    dscale: Tensor | None = None
    if needs[0]:
        dx = dy @ (weight * scale[:, None]).to(dy.dtype)
    if needs[1] and x is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        dscale = (functional.linear(x.to(wide), weight.to(wide)) * dy).sum(0).to(scale.dtype)
    return [dx, dscale, _bias_gradient(dy, bias, needs[2])]


def _library_backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """The same, with the weight dequantised in one pass, which cannot be differentiated."""
    with torch.no_grad():
        found = _torch_backward(dy, x, weight, scale, bias, dynamic, (False, *needs[1:]))
        if needs[0]:
            found[0] = dy @ _dequantised(weight, scale, dy.dtype)
    return found


def _bias_gradient(dy: Tensor, bias: Tensor | None, needed: bool) -> Tensor | None:
    if bias is None or not needed:
        return None
    return dy.sum(0, dtype=torch.promote_types(dy.dtype, torch.float32)).to(bias.dtype)


def _forward_cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost(N * K + M * (N + K) * case.dtype.itemsize, 2 * M * N * K)


def _backward_cost(case: Case) -> Cost:
    M, N, K = case.shape
    products = sum(option in ("x", "scale") for option in case.options)
    return Cost(products * (N * K + M * (N + K) * case.dtype.itemsize), products * 2 * M * N * K)


_fwd = Operation(
    "linear_int8_fwd",
    (
        Implementation("hopper", _hopper_forward, refuses=row.refuses, own=True),
        Implementation("triton", _triton_forward, refuses=_refuses, own=True),
        Implementation("torch", _torch_forward),
    ),
    cost=_forward_cost,
)
_bwd = Operation(
    "linear_int8_bwd",
    (
        Implementation("triton", _triton_backward, refuses=_refuses_backward, own=True),
        Implementation("torch", _library_backward),
    ),
    cost=_backward_cost,
)


def _case(rows: int, x: Tensor, weight: Tensor, *options: str) -> Case:
    return Case(x.device, x.dtype, (rows, *weight.shape), options)


def _forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    options: tuple[str, ...] = ("dynamic" if dynamic else "", "" if bias is None else "bias")
    if x.shape[0] == 1 and not row.aligned(x, weight):
        options += (row.UNALIGNED,)
    case = _case(x.shape[0], x, weight, *options)
    y: Tensor = _fwd(case, x, weight, scale, bias, dynamic)
    return y


def _backward(
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    dynamic: bool,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:
    wanted = [name for name, need in zip(("x", "scale", "bias"), needs, strict=True) if need]
    args = (dy, x, weight, scale, bias, dynamic, needs)
    found: Sequence[Tensor | None] = _bwd(_case(dy.shape[0], dy, weight, *wanted), *args)
    return found


def _composite(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    if dynamic:
        q, x_scale = by_torch(x.detach(), x.dim() - 1)
        x = x + (q * x_scale.unsqueeze(-1) - x).detach().to(x.dtype)
    whole = (weight * scale[:, None]).to(x.dtype)
    return functional.linear(x, whole, None if bias is None else bias.to(x.dtype))


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


class _LinearInt8(DifferentiableOp):
    """The shape of dx is not that of a saved tensor, where x is not saved."""

    def _fake_backward(self, *args: Any) -> Any:
        dy, _, weight, scale, bias, _, needs = args
        dx = dy.new_empty((dy.shape[0], weight.shape[1]) if needs[0] else 0)
        dscale = scale.new_empty(scale.shape if needs[1] else 0)
        like = dy if bias is None else bias
        return dx, dscale, like.new_empty(like.shape if needs[2] else 0)


_linear_int8 = _LinearInt8(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, bool dynamic) -> (Tensor y)",
    forward=_forward,
    backward=_backward,
    saves=("x", "weight", "scale", "bias"),
    only_for={"x": ("scale",)},
    gradients={"x": "x", "scale": "scale", "bias": "bias"},
    composite=_composite,
    composite_backward=_torch_backward,
    fake=_fake,
)
