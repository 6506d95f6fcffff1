"""The norms: references, public functions, implementations, registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import FLOATING, check_dtype, check_or_float32, name_of, not_a_tensor
from accelerant.ops.norm.launch import launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Operation, case_of

# --- by torch's functions --------------------------------------------------------------------------------------------


def torch_forward(
    centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, statistics: bool = True,
    residual: Tensor | None = None, dtype: torch.dtype | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Normalize as launch_forward does; statistics may be returned unasked, where torch computes them anyway.

    Without them, everything that runs on a CPU is torch's own and differentiable, as it is on a GPU for one dtype.
    """
    same = dtype in (None, x.dtype) and x.is_cuda and {x.dtype}.issuperset(_dtypes(weight, bias, residual))
    if not statistics and (x.is_cpu or (same and (centre or bias is None))):
        s = x if residual is None else x + residual
        # The gradients of weight and bias are sums over the rows, which torch computes in the dtype of x.
        learns = (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
        if not x.is_cpu:
            y = (
                torch.layer_norm(s, s.shape[-1:], weight, bias, eps)
                if centre
                else torch.rms_norm(s, s.shape[-1:], weight, eps)
            )
        elif centre and x.dtype in (torch.float16, torch.bfloat16) and not (learns and torch.is_grad_enabled()):
            _, inner, w, b = _widened(s, centre, weight, bias)
            y = torch.layer_norm(inner, x.shape[-1:], w, b, eps)
        else:
            y = torch_composite(centre, s, weight, bias, eps)
        y = y if y.is_contiguous() else y.contiguous()
        return (y,) if residual is None else (y, s.contiguous())
    dtype = x.dtype if dtype is None else dtype
    if residual is not None:
        x = x + residual
    wide, inner, weight, bias = _widened(x, centre, weight, bias)
    if centre:
        y, mean, rstd = torch.native_layer_norm(inner, x.shape[-1:], weight, bias, eps)
        kept = torch.stack((mean.reshape(-1), rstd.reshape(-1)), 1)
    else:
        y, rstd = torch.ops.aten._fused_rms_norm(inner, x.shape[-1:], weight, eps)
        kept = rstd.reshape(-1, 1)
        if bias is not None:
            y = y + bias
    y = y.to(dtype).contiguous()
    kept = kept.to(wide)
    return (y, kept) if residual is None else (y, x.contiguous(), kept)


def torch_backward(
    centre: bool, dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], ds: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Compute the gradients as launch_backward does."""
    wants_weight, wants_bias = needs[1] and weight is not None, needs[2] and bias is not None
    dtypes = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x_wide, dy_wide = x.to(wide), dy.to(wide)
    shape = (*x.shape[:-1], 1)
    columns = statistics.t().contiguous()  # torch's backward pass takes them for dense
    rstd = columns[-1].reshape(shape)
    mean = columns[0].reshape(shape) if centre else torch.zeros_like(rstd)
    # torch returns dbias only together with dweight, and neither without a weight.
    scale = torch.ones(x.shape[-1:], dtype=wide, device=x.device) if weight is None and wants_bias else weight
    scale = None if scale is None else scale.to(wide)
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy_wide, x_wide, x.shape[-1:], mean, rstd, scale, scale, [True, wants_weight or wants_bias, wants_bias]
    )
    if not centre:  # with a mean of 0 its dx lacks rstd mean(dy w), which it took for the gradient through the mean
        N = max(x.shape[-1], 1)
        g = dy_wide.mean(-1) if scale is None else torch.matmul(dy_wide, scale).div_(N)
        dx = dx.addcmul_(g.unsqueeze(-1), rstd)
    if ds is not None:
        dx = dx.add_(ds)
    return (
        dx.to(x.dtype).contiguous(),
        dweight.to(dtypes[0]) if wants_weight else None,
        dbias.to(dtypes[1]) if wants_bias else None,
    )


def _dtypes(*tensors: Tensor | None) -> set[torch.dtype]:
    return {x.dtype for x in tensors if x is not None}


def torch_composite(centre: bool, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Return y, differentiable in every way that torch supports; computed wide and rounded once."""
    dtype = x.dtype
    if _uniform(x, weight, bias):  # four calls of `to` without effect cost as much as a small layer_norm
        if centre:
            return torch.layer_norm(x, x.shape[-1:], weight, bias, eps)
        y = torch.rms_norm(x, x.shape[-1:], weight, eps)
        return y if bias is None else y + bias
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = x.to(wide)
    weight, bias = None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)
    if centre:
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps).to(dtype)
    y = torch.rms_norm(x, x.shape[-1:], weight, eps)
    return (y if bias is None else y + bias).to(dtype)


def _uniform(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether all tensors have the dtype to compute in."""
    dtype = x.dtype
    return (
        dtype in (torch.float32, torch.float64)
        and (weight is None or weight.dtype == dtype)
        and (bias is None or bias.dtype == dtype)
    )


def _widened(
    x: Tensor, centre: bool, weight: Tensor | None, bias: Tensor | None
) -> tuple[torch.dtype, Tensor, Tensor | None, Tensor | None]:
    """Return the dtype to compute in, and x and the vectors as torch computes in it.

    On a CPU, layer_norm of low precision keeps float32 statistics if the weight is float32: x need not be widened.
    """
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    mixed = centre and x.device.type == "cpu" and x.dtype in (torch.float16, torch.bfloat16)
    if mixed and weight is None:
        weight = torch.ones(x.shape[-1:], dtype=wide, device=x.device)
    inner = x if mixed else x.to(wide)
    return wide, inner, None if weight is None else weight.to(wide), None if bias is None else bias.to(wide)


# --- references for any dtype; the oracle of the tests in float64 ----------------------------------------------------


def layer_norm_reference(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Normalize rows to mean 0 and variance 1, scale by weight, shift by bias."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def rms_norm_reference(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Normalize rows to mean square 1, scale by weight."""
    y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Return layer_norm of the sum, and the sum."""
    s = x + residual
    return layer_norm_reference(s, weight, bias, eps=eps), s


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Return rms_norm of the sum, and the sum."""
    s = x + residual
    return rms_norm_reference(s, weight, eps=eps), s


# --- torch's functions, for the CPU fast path ------------------------------------------------------------------------


def _torch_layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *,
    shape: torch.Size | None = None,
) -> Tensor:  # fmt: skip
    return torch.layer_norm(x, shape or x.shape[-1:], weight, bias, eps)


def _torch_rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, *, shape: torch.Size | None = None
) -> Tensor:
    return torch.rms_norm(x, shape or x.shape[-1:], weight, eps)


def _torch_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch.layer_norm(s, s.shape[-1:], weight, bias, eps), s


def _torch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    s = x + residual
    return torch.rms_norm(s, s.shape[-1:], weight, eps), s


def _one_dtype(*args: Any, **options: Any) -> bool:
    """Return whether all tensors have one dtype: torch's kernels for a GPU compute in float32 then, as ours do."""
    return len({x.dtype for x in (*args, *options.values()) if isinstance(x, Tensor)}) == 1


def _all_wide(*args: Any, **options: Any) -> bool:
    """Return whether all tensors are float32 or all float64, so that torch computes in their dtype on a CPU."""
    wide = {torch.float32, torch.float64}
    return _one_dtype(*args, **options) and all(
        x.dtype in wide for x in (*args, *options.values()) if isinstance(x, Tensor)
    )


_layer_norm_cpu, _rms_norm_cpu, _add_layer_norm_cpu, _add_rms_norm_cpu = (
    CpuFastPath(function, bind=bind, serves=_all_wide, small=_one_dtype, args=(False,))
    for function, bind in (
        (_torch_layer_norm, lambda x, *_, **__: partial(_torch_layer_norm, shape=x.shape[-1:])),
        (_torch_rms_norm, lambda x, *_, **__: partial(_torch_rms_norm, shape=x.shape[-1:])),
        (_torch_add_layer_norm, None),
        (_torch_add_rms_norm, None),
    )
)

# --- the public functions --------------------------------------------------------------------------------------------


@_layer_norm_cpu
def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Centre each row of x, scale it to unit variance, then scale by weight and shift by bias.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias, means over the last dimension

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        weight: (N,), dtype of x or float32 (float32 master weights with bfloat16 activations); None for ones.
        bias: (N,), as weight; None for zeros.
        eps: added to the variance; dimensionless.

    Returns:
        (..., N), dtype of x, contiguous. Computed in float32 (float64 for float64), whatever x and weight are, so that
        autocast has nothing to widen: the dtype of x is kept under autocast too. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, weight or bias is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above.
        TypeError: x, weight or bias is not a tensor.
        ConfigError: eps is not a number.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """
    _check("layer_norm", x, weight, bias, eps)
    y: Tensor = _layer_norm(x, weight, bias, eps)
    return y


@_rms_norm_cpu
def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
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

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _check("rms_norm", x, weight, None, eps)
    y: Tensor = _rms_norm(x, weight, None, eps)
    return y


@_add_layer_norm_cpu
def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalize the sum as layer_norm does, in one pass over memory.

    s = x + residual        y = layer_norm(s, weight, bias)

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        residual: shape and dtype of x.
        weight, bias, eps: as for layer_norm.

    Returns:
        y and s, shape and dtype of x, contiguous. s is rounded to that dtype, and y is computed from the rounded s, as
        torch does unfused. The gradients of x and of residual are one and the same tensor, made by one kernel. Either
        result may be unused. Differentiable twice.

    Raises:
        ShapeError: x is a scalar, residual has another shape, weight or bias is not (N,), or they are on several
            devices.
        UnsupportedDtype: a dtype not listed above, or residual is not of x's.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450, equations 3 and 4.
    """
    _check("add_layer_norm", x, weight, bias, eps, residual)
    y, s = _add_layer_norm(x, residual, weight, bias, eps)
    return y, s


@_add_rms_norm_cpu
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream, and normalize the sum as rms_norm does, in one pass over memory.

    s = x + residual        y = rms_norm(s, weight)

    Args:
        x: (..., N), float16, bfloat16, float32 or float64.
        residual: shape and dtype of x.
        weight, eps: as for rms_norm.

    Returns:
        y and s, shape and dtype of x, contiguous; rounding and gradients as add_layer_norm's.

    Raises:
        ShapeError: x is a scalar, residual has another shape, weight is not (N,), or they are on several devices.
        UnsupportedDtype: a dtype not listed above, or residual is not of x's.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467, equation 4.
    """
    _check("add_rms_norm", x, weight, None, eps, residual)
    y, s = _add_rms_norm(x, residual, weight, None, eps)
    return y, s


def _check(
    op: str, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, residual: Tensor | None = None
) -> None:
    try:
        if x.dtype not in FLOATING:
            check_dtype(op, x)
        if x.dim() == 0:
            raise ShapeError(f"{op} takes (..., N), got a scalar")
        for name, vector in (("weight", weight), ("bias", bias)):
            if vector is None:
                continue
            if vector.dim() != 1 or vector.shape[0] != x.shape[-1]:
                raise ShapeError(f"{name} must be ({x.shape[-1]},), got {tuple(vector.shape)}")
            if vector.dtype is not x.dtype or vector.device != x.device:
                check_or_float32(name, vector, x)
        if residual is not None:
            if residual.dim() != x.dim() or residual.shape != x.shape:
                raise ShapeError(f"residual must be {tuple(x.shape)} as x is, got {tuple(residual.shape)}")
            if residual.dtype != x.dtype:
                raise UnsupportedDtype(f"residual must be {name_of(x.dtype)} as x is, got {name_of(residual.dtype)}")
            if residual.device != x.device:
                raise ShapeError(f"residual must be on {x.device}, where x is; it is on {residual.device}")
    except AttributeError:
        for name, tensor in (("x", x), ("residual", residual), ("weight", weight), ("bias", bias)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise not_a_tensor(op, name, tensor) from None
        raise
    if type(eps) is not float and not isinstance(cast(object, eps), Real):
        raise ConfigError(f"{op}: eps must be a number, got {type(eps).__name__}")


# --- implementations -------------------------------------------------------------------------------------------------


def _cost(accesses: int, flops: int, case: Case) -> Cost:
    n = math.prod(case.shape)
    width = case.shape[-1]
    vectors = sum(width * 4 for option in case.options if str(option).startswith(("weight", "bias")))
    statistics = 8 * (n // width if width else 0)
    return Cost(accesses * n * case.dtype.itemsize + vectors + statistics, flops * n)


_OPTIONS: dict[tuple[torch.dtype | None, torch.dtype | None], tuple[str, ...]] = {}


def _case(x: Tensor, weight: Tensor | None, bias: Tensor | None, *_: object) -> Case:
    """Return the case of x; its options are the dtypes of the vectors: ("weight float32", "bias float32")."""
    key = (None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    options = _OPTIONS.get(key)
    if options is None:
        pairs = zip(("weight", "bias"), key, strict=True)
        options = _OPTIONS[key] = tuple(f"{name} {name_of(dtype)}" for name, dtype in pairs if dtype is not None)
    return case_of((x.device, x.dtype, x.shape, options))


def _operations(
    name: str, accesses: tuple[int, int], forward: Sequence[Callable[..., Any]], backward: Sequence[Callable[..., Any]]
) -> tuple[Operation, Operation]:
    """Return the forward and the backward Operation, each from our kernel and torch's function."""
    fwd_cost, bwd_cost = partial(_cost, accesses[0], 9), partial(_cost, accesses[1], 18)
    return (
        triton_operation(f"{name}_fwd", *forward, cost=fwd_cost, differentiable=True),
        triton_operation(f"{name}_bwd", *backward, cost=bwd_cost),
    )


def _fake(centre: bool, x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((x.shape[:-1].numel(), 1 + centre), dtype=wide)


class _Norm(DifferentiableOp):
    def infer(self, *args: Any) -> Any:
        """Compute no statistics."""
        return self._cut(self._operation(self._case(*args), *args, False))


class _AddNorm(_Norm):
    public = 2
    differentiable = 2


def _norm(name: str, centre: bool, cpu: CpuFastPath) -> DifferentiableOp:
    """Return an op on x alone; rms_norm's bias is always None."""
    fwd, bwd = _operations(
        name,
        (2, 3),
        (partial(launch_forward, centre), partial(torch_forward, centre)),
        (partial(launch_backward, centre), partial(torch_backward, centre)),
    )
    return _Norm(
        f"{name}(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor y, Tensor statistics)",
        operation=fwd,
        case=_case,
        backward=lambda dy, x, weight, bias, *rest: bwd(_case(x, weight, bias), dy, x, weight, bias, *rest),
        saves=("x", "weight", "bias", "statistics"),
        gradients={"x": "x", "weight": "weight", "bias": "bias"},
        composite=partial(torch_composite, centre),
        fake=partial(_fake, centre),
        cpu=cpu,
    )


def _add_norm(name: str, centre: bool, norm: DifferentiableOp, cpu: CpuFastPath) -> DifferentiableOp:
    """Return an op on x + residual; `norm` is the same without the residual."""

    def with_residual(
        kernel: Callable[..., Any], x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
        statistics: bool = True, dtype: torch.dtype | None = None,
    ) -> Any:  # fmt: skip
        return kernel(centre, x, weight, bias, eps, statistics, residual, dtype)

    def with_ds(kernel: Callable[..., Any], dy: Tensor | None, ds: Tensor | None, s: Tensor, *args: Any) -> Any:
        if dy is not None:
            return kernel(centre, dy, s, *args, ds)
        assert ds is not None  # for the type checker: autograd calls with at least one gradient to start from
        return ds.contiguous(), *_zeros(args[0], args[1], args[-1])

    fwd, bwd = _operations(
        name,
        (4, 4),
        (partial(with_residual, launch_forward), partial(with_residual, torch_forward)),
        (partial(with_ds, launch_backward), partial(with_ds, torch_backward)),
    )

    def composite(x: Tensor, residual: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
        s = x + residual
        return torch_composite(centre, s, *args), s

    def composite_backward(dy: Tensor | None, ds: Tensor | None, s: Tensor, *args: Any) -> Any:
        if dy is None:
            assert ds is not None  # for the type checker: as in with_ds
            return ds.clone(), *_zeros(args[0], args[1], args[-1])
        dx, dweight, dbias = norm.composite_backward(dy, s, *args)
        return dx if ds is None or dx is None else dx + ds, dweight, dbias

    def fake(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
        y, statistics = _fake(centre, x)
        return y, torch.empty_like(y), statistics

    return _AddNorm(
        f"{name}(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps) "
        "-> (Tensor y, Tensor s, Tensor statistics)",
        operation=fwd,
        case=lambda x, residual, weight, bias, *_: _case(x, weight, bias),
        backward=lambda dy, ds, s, weight, bias, *rest: bwd(_case(s, weight, bias), dy, ds, s, weight, bias, *rest),
        saves=("s", "weight", "bias", "statistics"),
        gradients={"x": "s", "residual": "x", "weight": "weight", "bias": "bias"},
        composite=composite,
        composite_backward=composite_backward,
        fake=fake,
        cpu=cpu,
    )


def _zeros(weight: Tensor | None, bias: Tensor | None, needs: Sequence[bool]) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of weight and bias where nothing depends on y."""
    return (
        torch.zeros_like(weight) if needs[1] and weight is not None else None,
        torch.zeros_like(bias) if needs[2] and bias is not None else None,
    )


_layer_norm = _norm("layer_norm", True, _layer_norm_cpu)
_rms_norm = _norm("rms_norm", False, _rms_norm_cpu)
_add_layer_norm = _add_norm("add_layer_norm", True, _layer_norm, _add_layer_norm_cpu)
_add_rms_norm = _add_norm("add_rms_norm", False, _rms_norm, _add_rms_norm_cpu)
