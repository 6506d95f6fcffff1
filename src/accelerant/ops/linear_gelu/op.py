"""linear_gelu: reference, implementations, the public function, and the registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._hopper.launch import refuses_product
from accelerant.ops._launch import product_cost, triton_operation
from accelerant.ops._library import autocast_dtype, cast_for_autocast, name_of
from accelerant.ops._refusals import check_dtype, check_matches, refuses_triton_kernel
from accelerant.ops.gelu.op import gelu_reference
from accelerant.ops.linear_gelu.hopper import launch_hopper
from accelerant.ops.linear_gelu.launch import launch_dz, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of
from accelerant.runtime.files import clipped

_APPROXIMATIONS = ("none", "tanh")


def linear_gelu_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Return gelu(x weight^T + bias)."""
    z = x @ weight.T
    return gelu_reference(z if bias is None else z + bias, approximate)


# --- implementations -------------------------------------------------------------------------------------------------


def _one_row(case: Case) -> str | None:
    """Return why torch is preferred for one row, or None.

    H200, bfloat16, weight 4096x4096: 0.0316 ms, torch 0.0195 ms. With 128 rows (and a weight of 4096x1024) this kernel
    is faster; sizes in between were not measured.
    """
    one = case.device.type == "cuda" and case.shape[0] == 1
    return "one row leaves most of a tile idle: the library's matrix-vector product is faster" if one else None


def _refuses(case: Case) -> str | None:
    if reason := _one_row(case):
        return reason
    if case.device.type == "cuda":
        if case.dtype == torch.float32:
            return "float32 products are left to the library"
        if case.shape[-1] % 8:
            return f"rows of {case.shape[-1]} elements do not begin on 16-byte boundaries"
    return refuses_triton_kernel(case)


def _refuses_backward(case: Case) -> str | None:
    """Return why the kernel of dz is not used, or None.

    Where N is no multiple of 16, Triton reads one element at a time: dz and the bias's gradient of 100003x72, 4099x1001
    and 257x999 elements in bfloat16 take 0.100, 0.045 and 0.018 ms on an H100, torch's two kernels 0.076, 0.027, 0.011.
    """
    if case.device.type == "cuda" and case.dtype != torch.float32 and case.shape[1] % 16:
        return f"is slow for rows of {case.shape[1]} elements, no multiple of 16"
    return refuses_triton_kernel(case)


def _refuses_epilogue(case: Case) -> str | None:
    if case.device.type != "cuda" or torch.version.hip is not None:
        return "cuBLASLt is NVIDIA's"
    if case.dtype not in (torch.float16, torch.bfloat16):
        return f"its gelu epilogue does not take {name_of(case.dtype)}"
    if "none" in case.options:
        return "its gelu is the tanh approximation"
    if "bias" not in case.options:
        return "torch uses this epilogue only with a bias"
    if "keep" in case.options:
        return "torch does not use the epilogue that keeps the pre-activation"
    if not math.prod(case.shape):
        return "no elements"
    if case.shape[-1] % 8:  # 257x1111 by 999x1111, bfloat16, H200: 0.114 ms, torch's product and gelu 0.031
        return f"is slow for rows of {case.shape[-1]} elements, which do not begin on 16-byte boundaries"
    return None


def _epilogue_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True
) -> tuple[Tensor, Tensor]:
    y: Tensor = torch.ops.aten._addmm_activation(bias, x, weight.t(), use_gelu=True)
    return y, y.new_empty(0)


def _torch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: bool = True
) -> tuple[Tensor, Tensor]:
    z = functional.linear(x, weight, bias)
    return (functional.gelu(z, approximate=approximate) if keep else _gelu(z, approximate)), z


def _gelu(z: Tensor, approximate: str) -> Tensor:
    """Apply gelu, in place unless autograd keeps z: without a gradient a call needs no memory besides its result."""
    if z.requires_grad:
        return functional.gelu(z, approximate=approximate)
    return torch.ops.aten.gelu_(z, approximate=approximate)


def _product(a: Tensor, b: Tensor) -> Tensor:
    return _matmul(Case(a.device, a.dtype, (a.shape[0], b.shape[1], a.shape[1])), a, b)


def _products(
    dz: Tensor, x: Tensor, weight: Tensor, dbias: Tensor | None, needs: Sequence[bool]
) -> list[Tensor | None]:
    return [_product(dz, weight) if needs[0] else None, _product(dz.t(), x) if needs[1] else None, dbias]


def _triton_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, approximate: str, needs: Sequence[bool]
) -> list[Tensor | None]:
    dz, _, dbias = launch_dz(dy, z, approximate, bias.dtype if bias is not None and needs[2] else None)
    return _products(dz, x, weight, dbias, needs)


def _torch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, approximate: str, needs: Sequence[bool]
) -> list[Tensor | None]:
    dz = torch.ops.aten.gelu_backward(dy, z, approximate=approximate)
    return _products(dz, x, weight, dz.sum(0) if bias is not None and needs[2] else None, needs)


def _forward_cost(case: Case) -> Cost:
    return product_cost(case, results=2 if "keep" in case.options else 1, operations=15)


def _backward_cost(case: Case) -> Cost:
    M, N, K = case.shape
    products = sum(option in ("x", "weight") for option in case.options)
    inner = products * (M * K + K * N + M * N)
    return Cost((3 * M * N + inner) * case.dtype.itemsize, products * 2 * M * N * K + 25 * M * N)


_matmul = Operation("linear_gelu_matmul", (Implementation("torch", torch.mm),), cost=product_cost)
linear_gelu_fwd = Operation(
    "linear_gelu_fwd",
    (
        Implementation("hopper", launch_hopper, refuses=lambda case: _one_row(case) or refuses_product(case), own=True),
        Implementation("triton", launch_forward, refuses=_refuses, own=True),
        Implementation("cublaslt", _epilogue_forward, refuses=_refuses_epilogue),
        Implementation("torch", _torch_forward, differentiable=True),
    ),
    cost=_forward_cost,
)
linear_gelu_bwd = triton_operation(
    "linear_gelu_bwd", _triton_backward, _torch_backward, cost=_backward_cost, refuses=_refuses_backward
)


# --- the public function ---------------------------------------------------------------------------------------------


def _torch_equivalent(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    if x.dim() == 2:
        return _gelu(functional.linear(x, weight, bias), approximate)
    return _torch_equivalent(x.reshape(-1, x.shape[-1]), weight, bias, approximate).view(*x.shape[:-1], weight.shape[0])


_cpu = CpuFastPath(_torch_equivalent, few=lambda *_, **__: True)


@_cpu
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Apply a linear layer, then gelu.

    y = gelu(x W^T + b)

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K), as in torch.nn.functional.linear; dtype of x.
        bias: (N,), dtype of x, or None.
        approximate: "none", x times the distribution function of the standard normal; "tanh", its approximation.

    Returns:
        (..., N), dtype of x, contiguous. Products accumulate in float32; the kernel applies gelu to the sum before it
        is rounded. If a gradient is needed, the pre-activation is stored in the dtype of x. Under torch.autocast all
        tensors are cast to the autocast dtype. Differentiable twice.

    Raises:
        ShapeError: weight is not (N, K), bias not (N,), x is a scalar, or several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: approximate is neither "none" nor "tanh".
        TypeError: an argument is not a tensor.

    Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) torch's own linear and
    gelu run, which the ledger does not count.

    Source: Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2.
    """
    check_dtype("linear_gelu", x)
    low = autocast_dtype(x.device.type)
    if low is not None:
        x, weight = cast_for_autocast(x, low), cast_for_autocast(weight, low)
        bias = None if bias is None else cast_for_autocast(bias, low)
    _check(x, weight, bias, approximate)
    y: Tensor = _linear_gelu(x if x.dim() == 2 else x.reshape(-1, x.shape[-1]), weight, bias, approximate)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> None:
    check_matches("linear_gelu", x, weight=weight, bias=bias)
    if x.dim() == 0:
        raise ShapeError("x must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ShapeError(f"weight must be (N, {x.shape[-1]}), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ShapeError(f"bias must be ({weight.shape[0]},), got {tuple(bias.shape)}")
    if approximate not in _APPROXIMATIONS:
        raise ConfigError(f"approximate must be 'none' or 'tanh', got {clipped(approximate)}")


def _case(x: Tensor, weight: Tensor, *options: str) -> Case:
    return case_of((x.device, x.dtype, (x.shape[0], *weight.shape), options))


def _forward_case(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, keep: str = "keep") -> Case:
    return _case(x, weight, approximate, "" if bias is None else "bias", keep)


def _infer_case(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Case:
    return _forward_case(x, weight, bias, approximate, "")


def _infer(*args: Any) -> Tensor:
    return linear_gelu_fwd(_infer_case(*args), *args, False)[0]


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, z: Tensor, approximate: str, needs: Sequence[bool]
) -> Sequence[Tensor | None]:
    names = [name for name, need in zip(("x", "weight", "bias"), needs, strict=True) if need]
    args = (dy, x, weight, bias, z, approximate, needs)
    return linear_gelu_bwd(_case(x, weight, approximate, *names), *args)


def _composite(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    return functional.gelu(functional.linear(x, weight, bias), approximate=approximate)


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape)


_linear_gelu = DifferentiableOp(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str approximate) -> (Tensor y, Tensor z)",
    operation=linear_gelu_fwd,
    case=_forward_case,
    infer=_infer,
    backward=_backward,
    saves=("x", "weight", "bias", "z"),
    gradients={"x": "x", "weight": "weight", "bias": "bias"},
    composite=_composite,
    fake=_fake,
    cpu=_cpu,
    cpu_case=_infer_case,
    cpu_args=(False,),
)
