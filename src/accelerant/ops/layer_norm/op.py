"""layer_norm: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._library import below_autograd, define, is_ordinary, is_plain, name_of
from accelerant.ops.layer_norm.launch import launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.triton import refuses_triton

__all__ = ["layer_norm", "layer_norm_bwd", "layer_norm_fwd"]

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_Gradients = tuple[Tensor, Tensor | None, Tensor | None]


# --- implementations -------------------------------------------------------------------------------------------------


def _refuses(case: Case) -> str | None:
    if case.dtype == torch.float64:
        return "computes in float32, not float64"
    if "create_graph" in case.options:
        return "its backward pass has no gradient of its own (create_graph=True)"
    return refuses_triton(case.device)


def _torch_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> torch.dtype:
    """What torch's own layer_norm shall compute in, so that statistics and mixed weights keep float32."""
    mixed = any(other is not None and other.dtype != x.dtype for other in (weight, bias))
    low = x.dtype in (torch.float16, torch.bfloat16) and x.device.type == "cpu"
    return torch.float32 if mixed or low else x.dtype


def _to(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype)


def _torch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = _torch_dtype(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(x.to(dtype), x.shape[-1:], _to(weight, dtype), _to(bias, dtype), eps)
    return y.to(x.dtype), mean.reshape(-1), rstd.reshape(-1)


def _torch_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> _Gradients:
    dtype = _torch_dtype(x, weight, None)
    statistics = (*x.shape[:-1], 1)
    weight = _to(weight, dtype)
    # torch gives dbias only beside a dweight, and either only for a weight that is there.
    scale = torch.ones(x.shape[-1:], dtype=dtype, device=x.device) if weight is None and dbias_dtype else weight
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(dtype), x.to(dtype), x.shape[-1:], mean.reshape(statistics), rstd.reshape(statistics), scale, scale,
        [True, dweight_dtype is not None or dbias_dtype is not None, dbias_dtype is not None],
    )  # fmt: skip
    return (
        dx.to(x.dtype),
        None if dweight_dtype is None else dweight.to(dweight_dtype),
        None if dbias_dtype is None else dbias.to(dbias_dtype),
    )


def _cost(accesses: int, flops: int, case: Case) -> Cost:
    n = math.prod(case.shape)
    width = case.shape[-1]
    vectors = sum(width * 4 for option in case.options if str(option).startswith(("weight", "bias")))
    statistics = 8 * (n // width if width else 0)
    return Cost(accesses * n * case.dtype.itemsize + vectors + statistics, flops * n)


layer_norm_fwd = Operation(
    "layer_norm_fwd",
    (Implementation("triton", launch_forward, refuses=_refuses, own=True), Implementation("torch", _torch_forward)),
    cost=lambda case: _cost(2, 9, case),
)
layer_norm_bwd = Operation(
    "layer_norm_bwd",
    (Implementation("triton", launch_backward, refuses=_refuses, own=True), Implementation("torch", _torch_backward)),
    cost=lambda case: _cost(3, 18, case),
)


# --- the public function ---------------------------------------------------------------------------------------------


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """Centre each row of x, scale it to unit variance, then scale by weight and shift by bias.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, means over the last dimension

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        weight: (N,), dtype of x or float32 (float32 master weights beside bfloat16 activations); None for ones.
        bias: (N,), as weight; None for zeros.
        eps: added to the variance; dimensionless.

    Returns:
        (..., N), dtype of x, contiguous. Computed in float32 (float64 for float64), whatever x and weight are, so that
        autocast has nothing to widen: the dtype of x is kept under autocast too. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, weight or bias is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above.

    Under forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own
    layer_norm, which the ledger does not count.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """
    _check(x, weight, bias)
    plain = not torch.compiler.is_compiling() and is_plain(x)
    if not plain or not (weight is None or is_ordinary(weight)) or not (bias is None or is_ordinary(bias)):
        y: Tensor = _op(x, weight, bias, eps)[0]
    elif torch.is_grad_enabled() and _wants_grad(x, weight, bias):
        y = _apply_eager(x, weight, bias, eps)
    else:
        y = _forward(x, weight, bias, eps, statistics=False)[0]
    return y


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if x.dtype not in _DTYPES:
        raise UnsupportedDtype(f"layer_norm takes {', '.join(map(name_of, _DTYPES))}; x is {name_of(x.dtype)}")
    if x.dim() == 0:
        raise ShapeError("layer_norm takes (..., N), got a scalar")
    N = x.shape[-1]
    for name, vector in (("weight", weight), ("bias", bias)):
        if vector is None:
            continue
        if vector.dim() != 1 or vector.shape[0] != N:
            raise ShapeError(f"{name} must be ({N},), got {tuple(vector.shape)}")
        if vector.dtype != x.dtype and (vector.dtype != torch.float32 or x.dtype == torch.float64):
            allowed = " or ".join(
                dict.fromkeys((name_of(x.dtype), "float32" if x.dtype != torch.float64 else "float64"))
            )
            raise UnsupportedDtype(f"{name} must be {allowed} for x of {name_of(x.dtype)}, got {name_of(vector.dtype)}")
        if vector.device != x.device:
            raise ShapeError(f"{name} must be on {x.device}, where x is; it is on {vector.device}")


def _wants_grad(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    return x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)


# --- autograd --------------------------------------------------------------------------------------------------------


class LayerNorm(torch.autograd.Function):
    """Autograd of layer_norm; named for the profiler."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keeps x, weight and the statistics."""
        with below_autograd():
            y, mean, rstd = _op(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, rstd)
        ctx.set_materialize_grads(False)
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and bias; themselves differentiable where the caller asked for that."""
        return (None, None, None, None) if dy is None else _gradients(ctx, dy)


class LayerNormEager(torch.autograd.Function):
    """The same for plain tensors, which nothing traces: one result, and so less host time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        """Keeps x, weight and the statistics."""
        y, mean, rstd = _forward(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """As LayerNorm's."""
        return _gradients(ctx, dy)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    dweight_dtype = weight.dtype if ctx.needs_input_grad[1] else None
    dbias_dtype = ctx.bias_dtype if ctx.needs_input_grad[2] else None
    if torch.is_grad_enabled():
        return (*_differentiable_backward(dy, x, weight, mean, rstd, dweight_dtype, dbias_dtype), None)
    if is_plain(dy):
        return (*_backward(dy, x, weight, mean, rstd, dweight_dtype, dbias_dtype), None)
    dx, dweight, dbias = _op_backward(dy, x, weight, mean, rstd, dweight_dtype, dbias_dtype)
    return dx, None if dweight_dtype is None else dweight, None if dbias_dtype is None else dbias, None


_NAMES: dict[tuple[torch.dtype | None, torch.dtype | None], tuple[str, ...]] = {}


def _options(weight: Tensor | None, bias_dtype: torch.dtype | None) -> tuple[str, ...]:
    """What matters to a choice beside x: ("weight float32", "bias float32"). Made once for each combination."""
    key = (None if weight is None else weight.dtype, bias_dtype)
    names = _NAMES.get(key)
    if names is None:
        pairs = zip(("weight", "bias"), key, strict=True)
        names = _NAMES[key] = tuple(f"{name} {name_of(dtype)}" for name, dtype in pairs if dtype is not None)
    return names


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Y with the mean and 1 / standard deviation of each row, which may be absent where they are not asked for."""
    case = Case(x.device, x.dtype, x.shape, _options(weight, None if bias is None else bias.dtype))
    result: tuple[Tensor, Tensor, Tensor] = layer_norm_fwd(case, x, weight, bias, eps, statistics)
    return result


def _backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> _Gradients:
    case = Case(x.device, x.dtype, x.shape, _options(weight, dbias_dtype))
    result: _Gradients = layer_norm_bwd(case, dy, x, weight, mean, rstd, dweight_dtype, dbias_dtype)
    return result


def _differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> _Gradients:
    if not is_plain(dy):  # being traced: shapes may be symbols, and nothing runs
        return _torch_backward(dy, x, weight, mean, rstd, dweight_dtype, dbias_dtype)
    case = Case(x.device, x.dtype, x.shape, (*_options(weight, dbias_dtype), "create_graph"))
    result: _Gradients = layer_norm_bwd(case, dy, x, weight, mean, rstd, dweight_dtype, dbias_dtype)
    return result


def _fake(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    M = x.shape[:-1].numel()
    return x.new_empty(x.shape), x.new_empty(M, dtype=wide), x.new_empty(M, dtype=wide)


def _all_tensors(backward: Callable[..., _Gradients]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """The same backward pass as an op may give it: results are tensors, so what is not wanted is an empty one."""

    def run(dy: Tensor, x: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        dx, dweight, dbias = backward(dy, x, *args)
        return dx, x.new_empty(0) if dweight is None else dweight, x.new_empty(0) if dbias is None else dbias

    return run


def _fake_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dweight_dtype: torch.dtype | None,
    dbias_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    def vector(dtype: torch.dtype | None) -> Tensor:
        return x.new_empty(0) if dtype is None else x.new_empty(x.shape[-1], dtype=dtype)

    return x.new_empty(x.shape), vector(dweight_dtype), vector(dbias_dtype)


_apply: Callable[..., Any] = LayerNorm.apply
_apply_eager: Callable[..., Any] = LayerNormEager.apply
_op = define(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor, Tensor)",
    kernel=_forward,
    fake=_fake,
    differentiable=_apply,
    composite=_torch_forward,
)
_op_backward = define(
    "layer_norm_backward(Tensor dy, Tensor x, Tensor? weight, Tensor mean, Tensor rstd, "
    "ScalarType? dweight_dtype, ScalarType? dbias_dtype) -> (Tensor, Tensor, Tensor)",
    kernel=_all_tensors(_backward),
    fake=_fake_backward,
    differentiable=_all_tensors(_differentiable_backward),
    composite=_all_tensors(_torch_backward),
)
