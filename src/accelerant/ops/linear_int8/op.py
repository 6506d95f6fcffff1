"""linear_int8: reference, implementations, the public function, and the registration with torch and autograd."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import autocast_dtype, name_of
from accelerant.ops._refusals import check_dtype, not_a_tensor, refuses_triton_kernel
from accelerant.ops.linear_int8 import hopper
from accelerant.ops.linear_int8.launch import FEW_ROWS, launch_dx, launch_dynamic, launch_forward, splits
from accelerant.ops.quantize_int8.op import quantize_int8_reference, quantize_rows, torch_quantize
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

_MAX_PRODUCTS = (2**31 - 1) // (128 * 127)
"""Products of an int8 weight and q, at most 127 in magnitude, whose sum cannot overflow int32."""
_MAX_ROWS = 512
"""Above this many rows of x the library's product is faster, including the time to dequantize the weight."""
_MANY_ROWS = f"products of more than {_MAX_ROWS} rows are left to the library, with a dequantized weight"


def linear_int8_reference(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """Return x times the scaled weight, plus bias; dynamic rounds x to integers with row scales first."""
    if dynamic:
        q, x_scale = quantize_int8_reference(x.detach())
        rounded = q * x_scale.unsqueeze(-1)
        x = x + (rounded - x).detach() if x.requires_grad else rounded
    y = x @ (weight.to(scale.dtype) * scale[:, None]).to(x.dtype).T
    return y if bias is None else y + bias


def linear_int8(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None, *, dynamic: bool = False
) -> Tensor:
    """Apply a linear layer whose weight is 8-bit integers with a scale for each output.

    y = (x W^T) scale + b

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K) int8, a linear layer's weight quantized by quantize_int8.
        scale: (N,), float32 or the dtype of x.
        bias: (N,), float32 or the dtype of x; or None.
        dynamic: also round each row of x to 8-bit integers, by quantize_int8, and sum integers: faster for many rows,
            and exact apart from that rounding.

    Returns:
        (..., N), dtype of x, contiguous. Products accumulate in float32 (float64 for float64), integers in int32.
        Differentiable twice in x, scale and bias. The weight gets no gradient; the gradient of the rounding is the
        identity (straight-through). x is saved for the backward pass only if scale requires a gradient.

    Raises:
        ShapeError: weight is not (N, K), scale or bias is not (N,), or several devices; or dynamic with K above 132104,
            where a sum could overflow int32.
        UnsupportedDtype: a dtype not listed above.
        TypeError: an argument is not a tensor.

    Under torch.autocast x is cast to the autocast dtype. Under forward-mode differentiation and the transforms of
    torch.func torch's linear of the dequantized weight runs, which the ledger does not count.

    Source: Dettmers, Lewis, Belkada and Zettlemoyer 2022, arXiv:2208.07339, section 2; the gradient past the rounding:
    Bengio, Leonard and Courville 2013, arXiv:1308.3432, section 3.
    """
    check_dtype("linear_int8", x)
    low = autocast_dtype(x.device.type)
    if low is not None and x.dtype != torch.float64:
        x = x.to(low)
    _check(x, weight, scale, bias, dynamic)
    y: Tensor = _linear_int8(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight, scale, bias, dynamic)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> None:
    for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
        if tensor is not None and not isinstance(tensor, Tensor):
            raise not_a_tensor("linear_int8", name, tensor)
    if weight.dtype != torch.int8:
        raise UnsupportedDtype(f"weight must be int8, got {name_of(weight.dtype)}: see quantize_int8")
    if x.dim() == 0:
        raise ShapeError("x must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(f"weight must be (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    if dynamic and weight.shape[1] > _MAX_PRODUCTS:
        raise ShapeError(f"dynamic=True sums at most {_MAX_PRODUCTS} products in int32, got {weight.shape[1]}")
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is None:
            continue
        if vector.shape != weight.shape[:1]:
            raise ShapeError(f"{name} must be ({weight.shape[0]},), got {tuple(vector.shape)}")
        if vector.dtype not in (torch.float32, x.dtype):
            dtypes = " or ".join(dict.fromkeys(("float32", name_of(x.dtype))))
            raise UnsupportedDtype(f"{name} must be {dtypes}; got {name_of(vector.dtype)}")
    for name, tensor in (("weight", weight), ("scale", scale), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise ShapeError(f"x and {name} must be on one device, got {x.device} and {tensor.device}")


# --- implementations -------------------------------------------------------------------------------------------------


def _refuses(case: Case) -> str | None:
    if case.device.type == "cuda":
        M, _, K = case.shape
        if K % 16:
            return f"rows of {K} integers do not begin on 16-byte boundaries"
        if "dynamic" not in case.options:
            if M > FEW_ROWS and case.dtype == torch.float32:
                return "float32 products of many rows are left to the library"
            if M > _MAX_ROWS:
                return _MANY_ROWS
    return refuses_triton_kernel(case)


def _refuses_backward(case: Case) -> str | None:
    if case.device.type == "cuda":
        if case.dtype == torch.float32 and case.shape[0] > FEW_ROWS:
            return "float32 products of many rows are left to the library"
        if case.dtype == torch.float32 and not splits(case.dtype, case.device):
            return "splits float32 for tensor cores that take bfloat16: NVIDIA, from sm_80 on"
        if case.shape[0] > _MAX_ROWS:
            return _MANY_ROWS
    return refuses_triton_kernel(case)


def _triton_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    if not dynamic:
        return launch_forward(x, weight, scale, bias)
    q, x_scale = quantize_rows(x, 1)
    return launch_dynamic(q, x_scale, weight, scale, bias, x.dtype)


def _torch_forward(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    with torch.no_grad():
        if not dynamic and (x.dtype == torch.float16 or x.device.type != "cpu"):
            low_bias = None if bias is None else bias.to(x.dtype)
            return functional.linear(x, _dequantized(weight, scale, x.dtype), low_bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        if dynamic:
            q, x_scale = quantize_rows(x, 1)
            y = _integer_product(q, weight).to(wide) * x_scale[:, None] * scale
        else:  # scaling y is cheaper than scaling the weight; not in float16, which could overflow before the scale
            y = functional.linear(x, weight.to(x.dtype)).to(wide) * scale
        return (y if bias is None else y + bias).to(x.dtype)


def _dequantized(weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight times its scales in one pass, rounded once; `weight * scale` would write float32 first."""
    return torch.mul(weight, scale[:, None], out=torch.empty(weight.shape, dtype=dtype, device=weight.device))


def _integer_product(q: Tensor, weight: Tensor) -> Tensor:
    """Return q times the transposed weight in int32, padded on CUDA to multiples of 8 and at least 17 rows."""
    if q.device.type != "cuda":
        return torch._int_mm(q, weight.t())
    (M, K), N = q.shape, weight.shape[0]
    if not (M and N and K):
        return q.new_zeros((M, N), dtype=torch.int32)
    pad_m, pad_n, pad_k = max(0, 17 - M), -N % 8, -K % 8
    if pad_m or pad_n or pad_k:
        q, weight = functional.pad(q, (0, pad_k, 0, pad_m)), functional.pad(weight, (0, pad_k, 0, pad_n))
    return torch._int_mm(q, weight.t())[:M, :N]


def _triton_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    dscale = None
    if needs[1] and x is not None:
        dscale = launch_forward(x, weight, None, None, wide=True).mul_(dy).sum(0).to(scale.dtype)
    return [launch_dx(dy, weight, scale) if needs[0] else None, dscale, _bias_gradient(dy, bias, needs[2])]


def _torch_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Compute the gradients by torch's differentiable functions, so that they can be differentiated again."""
    dx = dy @ (weight * scale[:, None]).to(dy.dtype) if needs[0] else None
    dscale = None
    if needs[1] and x is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        dscale = (functional.linear(x.to(wide), weight.to(wide)) * dy).sum(0).to(scale.dtype)
    return [dx, dscale, _bias_gradient(dy, bias, needs[2])]


def _library_backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Compute _torch_backward with the weight dequantized in one pass; not differentiable."""
    with torch.no_grad():
        gradients = _torch_backward(dy, x, weight, scale, bias, dynamic, (False, *needs[1:]))
        if needs[0]:
            gradients[0] = dy @ _dequantized(weight, scale, dy.dtype)
    return gradients


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
        Implementation("hopper", hopper.launch_hopper, refuses=hopper.refuses, own=True),
        Implementation("triton", _triton_forward, refuses=_refuses, own=True),
        Implementation("torch", _torch_forward),
    ),
    cost=_forward_cost,
)
_bwd = triton_operation(
    "linear_int8_bwd", _triton_backward, _library_backward, cost=_backward_cost, refuses=_refuses_backward
)


def _case(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Case:
    options: tuple[str, ...] = ("dynamic" if dynamic else "", "" if bias is None else "bias")
    if x.shape[0] == 1 and not hopper.is_aligned(x, weight):
        options += (hopper.UNALIGNED,)
    return Case(x.device, x.dtype, (x.shape[0], *weight.shape), options)


def _backward(
    dy: Tensor, x: Tensor | None, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool,
    needs: Sequence[bool],
) -> Sequence[Tensor | None]:  # fmt: skip
    names = tuple(name for name, need in zip(("x", "scale", "bias"), needs, strict=True) if need)
    case = Case(dy.device, dy.dtype, (dy.shape[0], *weight.shape), names)
    return _bwd(case, dy, x, weight, scale, bias, dynamic, needs)


def _composite(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    if dynamic:
        q, x_scale = torch_quantize(x.detach(), x.dim() - 1)
        x = x + (q * x_scale.unsqueeze(-1) - x).detach().to(x.dtype)
    return functional.linear(x, (weight * scale[:, None]).to(x.dtype), None if bias is None else bias.to(x.dtype))


def _fake(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dynamic: bool) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


class _LinearInt8(DifferentiableOp):
    """A DifferentiableOp whose dx may have the shape of no saved tensor, since x is saved only for scale's gradient."""

    def _fake_backward(self, *args: Any) -> Any:
        dy, _, weight, scale, bias, _, needs = args
        dx = dy.new_empty((dy.shape[0], weight.shape[1]) if needs[0] else 0)
        dscale = scale.new_empty(scale.shape if needs[1] else 0)
        like = dy if bias is None else bias
        return dx, dscale, like.new_empty(like.shape if needs[2] else 0)


_linear_int8 = _LinearInt8(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias, bool dynamic) -> (Tensor y)",
    operation=_fwd,
    case=_case,
    backward=_backward,
    saves=("x", "weight", "scale", "bias"),
    only_for={"x": ("scale",)},
    gradients={"x": "x", "scale": "scale", "bias": "bias"},
    composite=_composite,
    composite_backward=_torch_backward,
    fake=_fake,
)
