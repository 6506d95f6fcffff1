"""The norms: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import ByTorch, DifferentiableOp
from accelerant.ops._library import name_of
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops._straight import straight
from accelerant.ops.norm.launch import launch_backward, launch_forward
from accelerant.ops.norm.torch_ops import torch_backward, torch_composite, torch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of

__all__ = ["add_layer_norm", "add_rms_norm", "layer_norm", "rms_norm"]


# --- the public functions --------------------------------------------------------------------------------------------


def _torchs_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> Tensor:
    return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)


def _torchs_rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    return torch.rms_norm(x, x.shape[-1:], weight, eps)


def _torchs_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch.layer_norm(s, s.shape[-1:], weight, bias, eps), s


def _torchs_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch.rms_norm(s, s.shape[-1:], weight, eps), s


def _all_wide(*args: Any, **options: Any) -> bool:
    """Whether torch computes in the dtype that everything has."""
    dtypes = {x.dtype for x in (*args, *options.values()) if isinstance(x, Tensor)}
    return len(dtypes) == 1 and dtypes <= {torch.float32, torch.float64}


@straight("layer_norm_fwd", _torchs_layer_norm, serves=_all_wide)
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
    _check("layer_norm", x, weight, bias)
    y: Tensor = _layer_norm(x, weight, bias, eps)
    return y


@straight("rms_norm_fwd", _torchs_rms_norm, serves=_all_wide)
def rms_norm(x: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6) -> Tensor:
    """Scale each row of x to unit root mean square, then by weight.

    y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last dimension

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        weight: (N,), dtype of x or float32; None for ones.
        eps: added to the mean square; dimensionless.

    Returns:
        (..., N), dtype of x, contiguous. Computed in float32 as layer_norm is, rounded once. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, weight is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above.

    Transforms of torch.func run torch's own functions, as in layer_norm.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _check("rms_norm", x, weight, None)
    y: Tensor = _rms_norm(x, weight, None, eps)
    return y


@straight("add_layer_norm_fwd", _torchs_add_layer_norm, serves=_all_wide)
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, *, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalise the sum as layer_norm does: one pass over memory for both.

    s = x + residual        y = layer_norm(s, weight, bias)

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        residual: shape and dtype of x.
        weight: (N,), dtype of x or float32; None for ones.
        bias: (N,), as weight; None for zeros.
        eps: added to the variance; dimensionless.

    Returns:
        y and s, shape and dtype of x, contiguous. s is rounded to that dtype, and y is computed from the rounded s, as
        torch does unfused. The gradient of x and of residual is one and the same tensor, made by one kernel. Either
        result may go unused. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, residual has another shape, weight or bias is not (N,), or they are on several
            devices.
        UnsupportedDtype: a dtype not listed above, or residual is not of x's.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """
    _check("add_layer_norm", x, weight, bias)
    _check_residual(x, residual)
    y, s = _add_layer_norm(x, residual, weight, bias, eps)
    return y, s


@straight("add_rms_norm_fwd", _torchs_add_rms_norm, serves=_all_wide)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, *, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalise the sum as rms_norm does: one pass over memory for both.

    s = x + residual        y = rms_norm(s, weight)

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        residual: shape and dtype of x.
        weight: (N,), dtype of x or float32; None for ones.
        eps: added to the mean square; dimensionless.

    Returns:
        y and s, shape and dtype of x, contiguous; rounding and gradients as add_layer_norm's.

    Raises:
        ShapeError: x is a scalar, residual has another shape, weight is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above, or residual is not of x's.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _check("add_rms_norm", x, weight, None)
    _check_residual(x, residual)
    y, s = _add_rms_norm(x, residual, weight, None, eps)
    return y, s


def _check(op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    check_dtype(op, x)
    if x.dim() == 0:
        raise ShapeError(f"{op} takes (..., N), got a scalar")
    if weight is not None:
        _check_vector("weight", weight, x)
    if bias is not None:
        _check_vector("bias", bias, x)


def _check_vector(name: str, vector: Tensor, x: Tensor) -> None:
    N = x.shape[-1]
    if vector.dim() != 1 or vector.shape[0] != N:
        raise ShapeError(f"{name} must be ({N},), got {tuple(vector.shape)}")
    if vector.dtype != x.dtype and (vector.dtype != torch.float32 or x.dtype == torch.float64):
        allowed = " or ".join(dict.fromkeys((name_of(x.dtype), "float32" if x.dtype != torch.float64 else "float64")))
        raise UnsupportedDtype(f"{name} must be {allowed} for x of {name_of(x.dtype)}, got {name_of(vector.dtype)}")
    if vector.device != x.device:
        raise ShapeError(f"{name} must be on {x.device}, where x is; it is on {vector.device}")


def _check_residual(x: Tensor, residual: Tensor) -> None:
    if residual.shape != x.shape:
        raise ShapeError(f"residual must be {tuple(x.shape)} as x is, got {tuple(residual.shape)}")
    if residual.dtype != x.dtype:
        raise UnsupportedDtype(f"residual must be {name_of(x.dtype)} as x is, got {name_of(residual.dtype)}")
    if residual.device != x.device:
        raise ShapeError(f"residual must be on {x.device}, where x is; it is on {residual.device}")


# --- implementations -------------------------------------------------------------------------------------------------


def _cost(accesses: int, flops: int, case: Case) -> Cost:
    n = math.prod(case.shape)
    width = case.shape[-1]
    vectors = sum(width * 4 for option in case.options if str(option).startswith(("weight", "bias")))
    statistics = 8 * (n // width if width else 0)
    return Cost(accesses * n * case.dtype.itemsize + vectors + statistics, flops * n)


_NAMES: dict[tuple[torch.dtype | None, torch.dtype | None], tuple[str, ...]] = {}


def _case(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Case:
    """With what matters beside x: ("weight float32", "bias float32"), made once for each combination."""
    key = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    names = _NAMES.get(key)
    if names is None:
        pairs = zip(("weight", "bias"), key, strict=True)
        names = _NAMES[key] = tuple(f"{name} {name_of(dtype)}" for name, dtype in pairs if dtype is not None)
    return case_of((x.device, x.dtype, x.shape, names))


def _operations(
    name: str, accesses: tuple[int, int], forward: Sequence[Callable[..., Any]], backward: Sequence[Callable[..., Any]]
) -> tuple[Operation, Operation]:
    """Forward and backward, each from our kernels and from torch's."""
    flops = (9, 18)
    fwd, bwd = (
        Operation(
            f"{name}_{suffix}",
            (
                Implementation("triton", ours, refuses=refuses_triton_kernel, own=True),
                Implementation("torch", theirs, differentiable=suffix == "fwd"),
            ),
            cost=partial(_cost, count, work),
        )
        for suffix, count, work, (ours, theirs) in zip(
            ("fwd", "bwd"), accesses, flops, (forward, backward), strict=True
        )
    )
    return fwd, bwd


def _shared_fake(centre: bool, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((x.shape[:-1].numel(), 1 + centre), dtype=wide)


def _norm(name: str, centre: bool) -> DifferentiableOp:
    """An op on x alone; rms_norm's bias is always None."""
    fwd, bwd = _operations(
        name,
        (2, 3),
        (partial(launch_forward, centre), partial(torch_forward, centre)),
        (partial(launch_backward, centre), partial(torch_backward, centre)),
    )

    def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        return fwd(_case(x, weight, bias), x, weight, bias, eps)

    def infer(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        return fwd(_case(x, weight, bias), x, weight, bias, eps, False)[0]

    def backward(dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any) -> Any:
        return bwd(_case(x, weight, bias), dy, x, weight, bias, *rest)

    return DifferentiableOp(
        f"{name}(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor statistics)",
        forward=forward,
        infer=infer,
        backward=backward,
        saves=("x", "weight", "bias", "statistics"),
        gradients={"x": "x", "weight": "weight", "bias": "bias"},
        composite=partial(torch_composite, centre),
        fake=lambda x, weight, bias, eps: _shared_fake(centre, x),
        by_torch=ByTorch(fwd, lambda x, weight, bias, eps: _case(x, weight, bias), more=(False,), cut=True),
    )


def _add_norm(name: str, centre: bool, norm: DifferentiableOp) -> DifferentiableOp:
    """An op on x + residual; `norm` is the same without the residual."""

    def run(kernel: Callable[..., Any], x: Tensor, residual: Tensor, *args: Any) -> Any:
        weight, bias, eps, statistics = (*args, True)[:4]
        return kernel(centre, x, weight, bias, eps, statistics, residual)

    def run_backward(kernel: Callable[..., Any], dy: Tensor | None, ds: Tensor | None, s: Tensor, *args: Any) -> Any:
        if dy is not None:
            return kernel(centre, dy, s, *args, ds)
        assert ds is not None  # autograd asks for no gradients where there is none to start from
        return ds.contiguous(), *_zeros(args[0], args[1], args[-1])

    fwd, bwd = _operations(
        name,
        (4, 4),
        (partial(run, launch_forward), partial(run, torch_forward)),
        (partial(run_backward, launch_backward), partial(run_backward, torch_backward)),
    )

    def forward(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        return fwd(_case(x, weight, bias), x, residual, weight, bias, eps)

    def infer(x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Any:
        return fwd(_case(x, weight, bias), x, residual, weight, bias, eps, False)[:2]

    def backward(
        dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor | None, bias: Tensor | None, *rest: Any
    ) -> Any:
        return bwd(_case(s, weight, bias), dy, ds, s, weight, bias, *rest)

    def composite(x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        s = x + residual
        return torch_composite(centre, s, *args), s

    def composite_backward(dy: Tensor | None, ds: Tensor | None, s: Tensor, *args: Any) -> Any:
        if dy is None:
            assert ds is not None
            return ds.clone(), *_zeros(args[0], args[1], args[-1])
        dx, dweight, dbias = norm.composite_backward(dy, s, *args)
        return dx if ds is None or dx is None else dx + ds, dweight, dbias

    def fake(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
        y, statistics = _shared_fake(centre, x)
        return y, torch.empty_like(y), statistics

    return DifferentiableOp(
        f"{name}(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
        "-> (Tensor y, Tensor s, Tensor statistics)",
        forward=forward,
        infer=infer,
        backward=backward,
        saves=("s", "weight", "bias", "statistics"),
        gradients={"x": "s", "weight": "weight", "bias": "bias"},
        shares={"residual": "x"},
        composite=composite,
        composite_backward=composite_backward,
        fake=fake,
        public=2,
        differentiable=2,
        by_torch=ByTorch(fwd, lambda x, s, weight, bias, eps: _case(x, weight, bias), more=(False,), cut=True),
    )


def _zeros(weight: Tensor | None, bias: Tensor | None, needs: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias where nothing depends on y."""
    return (
        torch.zeros_like(weight) if needs[1] and weight is not None else None,
        torch.zeros_like(bias) if needs[2] and bias is not None else None,
    )


_layer_norm = _norm("layer_norm", True)
_rms_norm = _norm("rms_norm", False)
_add_layer_norm = _add_norm("add_layer_norm", True, _layer_norm)
_add_rms_norm = _add_norm("add_rms_norm", False, _rms_norm)
