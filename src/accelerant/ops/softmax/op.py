"""softmax and log_softmax: validation, registration with torch, autograd, implementations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from accelerant.errors import ShapeError
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import ceil_div, multiprocessors
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops.softmax.launch import INNER_COLUMNS, NARROW, WIDE_FROM, inner_plan, launch_backward, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of

__all__ = ["log_softmax", "softmax"]


# Cases in which torch is faster. Measured on an H200 in bfloat16, ms of ours against torch's: softmax, its
# gradient, log_softmax, its gradient. No other dtype and no sizes in between were measured.
_SHORT = 8
"""Rows of at most 8 elements are left to torch: ours uses 16 lanes a row. 1000003 rows of 3: 0.048 against 0.014, 0.039
against 0.021, 0.069 against 0.015, 0.045 against 0.014. Of 768 ours is ahead, 0.052 against 0.091."""

_FEW_WIDE = 2
"""Wide rows, of which a program takes one where a multiprocessor has one or more, are torch's up to so many a
multiprocessor, but for the gradient of softmax. 257 rows of 50257: 0.041 against 0.033, 0.047 against 0.050, 0.039
against 0.026, 0.056 against 0.034; more were not measured. Fewer are shared among programs, which was not measured
either: taken one by a program, 3 rows of 1000003 were twice as slow as torch's 0.241, 0.142, 0.161 and 0.258."""

_STEPS = 4
"""A dimension before at most NARROW columns, with fewer programs than multiprocessors, is torch's where a program takes
more steps than these along it: below, a launch is what takes the time. 1x70001x3 over 70001, which is turned now: 2.864
against 0.224, 2.056 against 0.118, 2.274 against 0.210, 2.742 against 0.226, all in proportion to the steps.
129x1025x130 over 1025 is ours, 0.084 against 0.936."""


def _refuses(few_wide: int, case: Case) -> str | None:
    return refuses_triton_kernel(case) or _slower(few_wide, case)


def _slower(few_wide: int, case: Case) -> str | None:
    """Return why torch is preferred; few_wide is _FEW_WIDE, or 0 where it does not hold."""
    n = math.prod(case.shape)
    if case.device.type != "cuda" or not n:
        return None
    dim = int(case.options[0].removeprefix("dim ")) if case.options else len(case.shape) - 1
    N, inner = case.shape[dim], math.prod(case.shape[dim + 1 :])
    M = n // (N * inner)
    if dim < len(case.shape) - 1:
        programs, steps = M * ceil_div(inner, INNER_COLUMNS), ceil_div(N, inner_plan(N).block_n)
        if inner <= NARROW and N <= WIDE_FROM and steps > _STEPS and programs < multiprocessors(case.device):
            return f"{programs} programs for {inner} columns {N} long: torch shares each among threads, faster"
        return None
    if N <= _SHORT:
        return f"rows of {N} elements: torch packs more of them into a warp, faster"
    if N > WIDE_FROM and (processors := multiprocessors(case.device)) <= M <= few_wide * processors:
        return f"{M} rows of {N} elements, one a program, are few to hide each other's waiting: torch is faster"
    return None


def _cost(accesses: int, flops: int, case: Case) -> Cost:
    n = math.prod(case.shape)
    return Cost(accesses * n * case.dtype.itemsize, flops * n)


_softmax_cpu = CpuFastPath(lambda x, dim=-1: torch.softmax(x, dim), serves=lambda x, dim=-1: x.dim() > 0)


@_softmax_cpu
def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """Divide the exponentials of x by their sum along a dimension.

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
    axis = _check("softmax", x, dim)
    if x.dim() == 0:
        return softmax(x.reshape(1), 0).reshape(())
    y: Tensor = _softmax(x, axis)
    return y


_log_softmax_cpu = CpuFastPath(lambda x, dim=-1: torch.log_softmax(x, dim), serves=lambda x, dim=-1: x.dim() > 0)


@_log_softmax_cpu
def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of softmax, exact where softmax would underflow.

    y = x - max(x) - log(sum(exp(x - max(x)))), maximum and sum over `dim`

    Args:
        x: any shape, float16, bfloat16, float32 or float64; fastest along a contiguous last dimension.
        dim: the dimension to sum over; negative counts from the end.

    Returns:
        shape and dtype of x, contiguous; computed in float32 (float64 for float64) and rounded once, under autocast
        too. An element of -inf stays -inf, a row of -inf alone gives NaN. The backward pass starts from y as it was
        rounded. Differentiable twice.

    Raises:
        ShapeError: x has no such dimension.
        UnsupportedDtype: dtype not listed above.

    Transforms of torch.func run torch's own functions, as in softmax.

    Source: Bridle 1990, "Training stochastic model recognition algorithms as networks", section 3.
    """
    axis = _check("log_softmax", x, dim)
    if x.dim() == 0:
        return log_softmax(x.reshape(1), 0).reshape(())
    y: Tensor = _log_softmax(x, axis)
    return y


def _check(op: str, x: Tensor, dim: int) -> int:
    """Check x and return the dimension counted from 0."""
    check_dtype(op, x)
    dims = x.dim() or 1  # a scalar counts as one element along dimension 0, as in torch
    if not -dims <= dim < dims:
        raise ShapeError(f"dim must be in [{-dims}, {dims - 1}] for x of shape {tuple(x.shape)}, got {dim}")
    return dim % dims


def _case(x: Tensor, dim: int) -> Case:
    """Return the case of x; its option is the dimension, unless it is the last."""
    return case_of((x.device, x.dtype, x.shape, () if dim == x.dim() - 1 else (f"dim {dim}",)))


def _op(
    name: str, log: bool, torch_forward: Callable[..., Tensor], torch_gradient: Callable[..., Tensor], cpu: CpuFastPath
) -> DifferentiableOp:
    """Return softmax or log_softmax, from our kernels and from torch's functions."""

    def composite(x: Tensor, dim: int) -> Tensor:
        return torch_forward(x.contiguous(), dim)

    def torch_backward(dy: Tensor, y: Tensor, dim: int) -> Tensor:
        return torch_gradient(dy, y, dim, y.dtype)

    fwd, bwd = (
        Operation(
            f"{name}_{suffix}",
            (
                Implementation("triton", partial(ours, log), refuses=partial(_refuses, few_wide), own=True),
                Implementation("torch", theirs, differentiable=theirs is composite),
            ),
            cost=partial(_cost, *work),
        )
        for suffix, ours, theirs, work, few_wide in (
            ("fwd", launch_forward, composite, (2, 5), _FEW_WIDE),
            ("bwd", launch_backward, torch_backward, (3, 4), _FEW_WIDE if log else 0),
        )
    )

    def backward(dy: Tensor, y: Tensor, dim: int, needs: Sequence[bool]) -> tuple[Tensor]:
        return (bwd(_case(y, dim), dy, y, dim),)

    return DifferentiableOp(
        f"{name}(Tensor x, int dim) -> (Tensor y)",
        operation=fwd,
        case=_case,
        backward=backward,
        saves=("y",),
        gradients={"x": "y"},
        composite=composite,
        composite_backward=lambda dy, y, dim, needs: (torch_backward(dy, y, dim),),
        fake=lambda x, dim: x.new_empty(x.shape),
        cpu=cpu,
    )


_softmax = _op("softmax", False, torch.softmax, torch._softmax_backward_data, _softmax_cpu)
_log_softmax = _op("log_softmax", True, torch.log_softmax, torch._log_softmax_backward_data, _log_softmax_cpu)
