"""The elementwise ops: references, implementations, public functions, registration with torch and autograd.

add and mul are registered in three forms: of two tensors of one shape, of a tensor and a row (a bias, a scale), whose
gradient is a sum over the rows, and of a tensor and a number. Any other broadcast is the first form, of expanded
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import accesses, launch_map, triton_operation
from accelerant.ops._library import name_of
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops.elementwise.launch import (
    STREAM_KERNELS,
    add_row_backward,
    is_row,
    launch_binary,
    mul_backward,
    mul_row_backward,
)
from accelerant.runtime.dispatch import Case, Cost, case_of

_aten = torch.ops.aten
_Needs = Sequence[bool]
_Gradients = tuple[Tensor | None, Tensor | None]

# --- references for any dtype; the oracle of the tests in float64 ----------------------------------------------------


def add_reference(a: Tensor, b: Tensor | float) -> Tensor:
    """Return the sum of a and b, broadcast as in PyTorch."""
    return a + b


def mul_reference(a: Tensor, b: Tensor | float) -> Tensor:
    """Return the product of a and b, broadcast as in PyTorch."""
    return a * b


def relu_reference(x: Tensor) -> Tensor:
    """Return x where it is positive, 0 elsewhere; NaN stays."""
    return torch.where(x <= 0, torch.zeros_like(x), x)


def sigmoid_reference(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + torch.exp(-x))


def tanh_reference(x: Tensor) -> Tensor:
    """Return (exp(2x) - 1) / (exp(2x) + 1), by expm1, which keeps small results exact."""
    below = x < 0  # neither abs nor sign has the slope 1 that is wanted at 0
    e = torch.expm1(-2.0 * torch.where(below, -x, x))
    return torch.where(below, e, -e) / (e + 2.0)


def silu_reference(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


# --- functions of one tensor -----------------------------------------------------------------------------------------


def _unary(
    name: str, forward: Callable[[Tensor], Tensor], backward: Callable[[Tensor, Tensor], Tensor], *, saves: str,
    flops: tuple[int, int], cpu: CpuFastPath, again: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> DifferentiableOp:  # fmt: skip
    """Return an op of one tensor from torch's functions for it, with the kernels of its name.

    `backward` takes dy and the saved tensor, x or y; `again` is the same from functions that torch can differentiate,
    if `backward` is not differentiable; `flops` are operations per element, forward and backward.
    """
    again = again or backward
    own, own_backward = STREAM_KERNELS[f"{name}_fwd"], STREAM_KERNELS[f"{name}_bwd"]
    fwd = triton_operation(
        f"{name}_fwd", lambda x: launch_map(own, x, {}), forward, cost=accesses(2, flops[0]), differentiable=True
    )
    bwd = triton_operation(
        f"{name}_bwd",
        lambda dy, saved: launch_map(own_backward, saved, {}, dy=dy),
        backward,
        cost=accesses(3, flops[1]),
    )

    def case(x: Tensor) -> Case:
        return case_of((x.device, x.dtype, x.shape, ()))

    return DifferentiableOp(
        f"{name}(Tensor x) -> (Tensor y)",
        operation=fwd,
        case=case,
        backward=lambda dy, saved, needs: (bwd(case(saved), dy, saved),),
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
    """Return the gradient of silu from functions that torch can differentiate in either mode, at least in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    s = torch.sigmoid(wide)
    return (dy * (s * (1.0 + wide * (1.0 - s)))).to(x.dtype)


_relu_cpu, _sigmoid_cpu, _tanh_cpu, _silu_cpu = (
    CpuFastPath(function, few=lambda _: True) for function in (torch.relu, torch.sigmoid, torch.tanh, F.silu)
)
_relu = _unary(
    "relu", torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0), saves="y", flops=(1, 1), cpu=_relu_cpu
)
_sigmoid = _unary("sigmoid", torch.sigmoid, _aten.sigmoid_backward, saves="y", flops=(3, 3), cpu=_sigmoid_cpu)
_tanh = _unary("tanh", torch.tanh, _aten.tanh_backward, saves="y", flops=(15, 3), cpu=_tanh_cpu)
_silu = _unary("silu", F.silu, _aten.silu_backward, saves="x", flops=(3, 8), cpu=_silu_cpu, again=_silu_backward)


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

    Under torch.compile this is torch's own relu, so that the compiler fuses it with its surroundings. So it is under
    forward-mode differentiation and the transforms of torch.func, and the ledger does not count it. The same holds for
    the other functions of this module.
    """
    check_dtype("relu", x)
    return _relu(x)


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
    """
    check_dtype("sigmoid", x)
    return _sigmoid(x)


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
    """
    check_dtype("tanh", x)
    return _tanh(x)


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

    Source: Elfwing, Uchibe and Doya 2017, arXiv:1702.03118, equation 5.
    """
    check_dtype("silu", x)
    return _silu(x)


# --- sums and products of two ----------------------------------------------------------------------------------------

_REFUSALS = {
    "broadcast": "has a kernel for a row of the other tensor; torch reads any other small operand from cache",
    "layouts": "takes dense tensors of one layout; torch reads any two in place",
    "number": "takes two tensors; with a number torch is as fast",
}


def _refuses(case: Case) -> str | None:
    if case.options and case.options[0] in _REFUSALS:
        return _REFUSALS[case.options[0]]
    return refuses_triton_kernel(case)


_SHORT = 8
"""A sum over rows of at most so many elements is torch's: 1000003 rows of 3 in bfloat16 took an H200 0.033 ms, torch's
0.013. Rows of 4095 are ours; between the two nothing was measured."""


def _refuses_sum(case: Case) -> str | None:
    N = math.prod(case.options[0])
    if case.device.type == "cuda" and 0 < N <= _SHORT:
        return f"rows of {N} elements: torch sums them faster"
    return refuses_triton_kernel(case)


def _cost(count: int, flops: int) -> Callable[[Case], Cost]:
    """Return the cost function of an op of two tensors; a row or a number costs nothing to read."""
    whole, less = accesses(count, flops), accesses(count - 1, flops)
    return lambda case: less(case) if case.options else whole(case)


def _form(a: Tensor, b: Tensor) -> tuple[str, ...]:
    """Return the options of the case of two tensors: none for contiguous tensors of one shape."""
    if a.shape == b.shape:
        if a.is_contiguous() and b.is_contiguous():
            return ()
        if 0 in a.stride() or 0 in b.stride():
            return ("broadcast",)
        dense = a.stride() == b.stride() and torch.ops.aten.is_non_overlapping_and_dense(a)
        return () if dense else ("layouts",)
    return ("row",) if a.is_contiguous() and b.is_contiguous() else ("layouts",)


def _torch_mul_backward(dy: Tensor, a: Tensor | None, b: Tensor, needs: _Needs) -> _Gradients:
    """Return the gradients for tensors of one shape, and for a row b; without a, b is a constant."""
    return dy * b if needs[0] else None, None if a is None or not needs[1] else (dy * a).sum_to_size(b.shape)


def _own_mul_backward(dy: Tensor, a: Tensor | None, b: Tensor, needs: _Needs) -> _Gradients:
    if a is None:
        return launch_binary("mul", dy, b), None
    return (mul_backward if a.shape == b.shape else mul_row_backward)(dy, a, b, needs)


add_fwd = triton_operation(
    "add_fwd", partial(launch_binary, "add"), torch.add, cost=_cost(3, 1), refuses=_refuses, differentiable=True
)
add_bwd = triton_operation(
    "add_bwd", add_row_backward, lambda dy, b: dy.sum_to_size(b.shape), cost=accesses(1, 1), refuses=_refuses_sum
)
mul_fwd = triton_operation(
    "mul_fwd", partial(launch_binary, "mul"), torch.mul, cost=_cost(3, 1), refuses=_refuses, differentiable=True
)
mul_bwd, mul_constant_bwd = (
    triton_operation(name, _own_mul_backward, _torch_mul_backward, cost=cost, refuses=_refuses)
    for name, cost in (("mul_bwd", _cost(5, 2)), ("mul_constant_bwd", _cost(3, 1)))
)


_add_cpu = CpuFastPath(torch.add)


@_add_cpu
def add(a: Tensor, b: Tensor | float) -> Tensor:
    """Add two tensors, or a tensor and a number.

    y = a + b, shapes broadcast as in PyTorch

    Args:
        a: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.
        b: a number, or a tensor whose shape broadcasts with that of a; dtype and device of a. Fastest with the shape
            of a, or a row of it (the end of that shape: a bias).

    Returns:
        the broadcast shape, dtype of a, layout as PyTorch gives it. Differentiable any number of times.

    Raises:
        ShapeError: the shapes do not broadcast, or different devices.
        UnsupportedDtype: dtype not listed above, dtypes that differ (none is converted), or b no number.

    The gradient of a is that of y itself: nothing runs and nothing is kept for it.
    Under torch.compile, forward-mode differentiation and torch.func this is torch's own add, as with `relu`.
    """
    return _call("add", a, b, _add, _add_row, _add_number)


_mul_cpu = CpuFastPath(torch.mul)


@_mul_cpu
def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """Multiply two tensors elementwise, or a tensor by a number.

    y = a b, shapes broadcast as in PyTorch

    Args:
        a, b: as for `add`; a row is a scale.

    Returns:
        the broadcast shape, dtype of a, layout as PyTorch gives it. Differentiable any number of times.

    Raises:
        ShapeError, UnsupportedDtype: as `add`.
    """
    return _call("mul", a, b, _mul_same, _mul_with_row, _mul_number)


def _call(
    name: str, a: Tensor, b: Tensor | float, same: Callable[..., Tensor], row: Callable[..., Tensor],
    number: Callable[..., Tensor],
) -> Tensor:  # fmt: skip
    """Check the arguments and call the form of the op that serves them."""
    check_dtype(name, a, "a")
    if not isinstance(b, Tensor):
        if not isinstance(b, (int, float)):
            raise UnsupportedDtype(f"b must be a tensor or a real number, got {type(b).__name__}")
        return number(a, float(b))
    if b.dtype != a.dtype:
        raise UnsupportedDtype(f"a and b must have one dtype, got {name_of(a.dtype)} and {name_of(b.dtype)}")
    if b.device != a.device:
        raise ShapeError(f"a and b must be on one device, got {a.device} and {b.device}")
    if a.shape == b.shape:
        return same(a, b)
    if is_row(a, b):
        return row(a, b)
    if is_row(b, a):
        return row(b, a)
    try:
        wide = torch.broadcast_tensors(a, b)
    except RuntimeError:
        raise ShapeError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not broadcast") from None
    return same(*wide)


def _mul_same(a: Tensor, b: Tensor) -> Tensor:
    """Multiply tensors of one shape, saving only what a gradient needs."""
    y: Tensor
    if a.requires_grad and not b.requires_grad:
        y = _mul_constant(a, b)
    elif b.requires_grad and not a.requires_grad and a.stride() == b.stride():
        y = _mul_constant(b, a)
    else:
        y = _mul(a, b)
    return y


def _mul_with_row(a: Tensor, b: Tensor) -> Tensor:
    """Multiply by a row, saving a only if the gradient of the row needs it."""
    return _mul_constant(a, b) if a.requires_grad and not b.requires_grad else _mul_row(a, b)


def _case(a: Tensor, b: Tensor) -> Case:
    return case_of((a.device, a.dtype, a.shape, _form(a, b)))


def _number_case(a: Tensor, b: float) -> Case:
    return case_of((a.device, a.dtype, a.shape, ("number",)))


_sum = partial(
    DifferentiableOp, operation=add_fwd, composite=torch.add, fake=torch.add, keeps_layout=True, decomposes=True,
    cpu=_add_cpu,
)  # fmt: skip
_product = partial(
    DifferentiableOp, operation=mul_fwd, composite=torch.mul, fake=torch.mul, keeps_layout=True, decomposes=True,
    cpu=_mul_cpu,
)  # fmt: skip

_add = _sum(
    "add(Tensor a, Tensor b) -> (Tensor y)",
    case=_case,
    backward=lambda dy, needs: (dy,),
    composite_backward=lambda dy, needs: (dy,),
    saves=(),
    gradients={"a": "y"},
    shares={"b": "a"},
)
_add_row = _sum(
    "add_row(Tensor a, Tensor b) -> (Tensor y)",
    case=_case,
    backward=lambda dy, b, needs: (
        dy,
        add_bwd(Case(dy.device, dy.dtype, dy.shape, (tuple(b.shape),)), dy, b) if needs[1] else None,
    ),
    composite_backward=lambda dy, b, needs: (dy, dy.sum_to_size(b.shape) if needs[1] else None),
    saves=("b",),
    gradients={"a": "y", "b": "b"},
)
_add_number = _sum(
    "add_number(Tensor a, float b) -> (Tensor y)",
    case=_number_case,
    backward=lambda dy, b, needs: (dy,),
    composite_backward=lambda dy, b, needs: (dy,),
    saves=(),
    gradients={"a": "y"},
)
_mul, _mul_row = (
    _product(
        f"{name}(Tensor a, Tensor b) -> (Tensor y)",
        case=_case,
        backward=lambda dy, a, b, needs: mul_bwd(_case(a, b), dy, a, b, needs),
        composite_backward=_torch_mul_backward,
        saves=("a", "b"),
        gradients={"a": "a", "b": "b"},
    )
    for name in ("mul", "mul_row")
)
_mul_constant = _product(
    "mul_constant(Tensor a, Tensor b) -> (Tensor y)",
    case=_case,
    backward=lambda dy, b, needs: mul_constant_bwd(_case(dy, b), dy, None, b, needs)[:1],
    composite_backward=lambda dy, b, needs: (dy * b,),
    saves=("b",),
    gradients={"a": "y"},
)
_mul_number = _product(
    "mul_number(Tensor a, float b) -> (Tensor y)",
    case=_number_case,
    backward=lambda dy, b, needs: (mul_fwd(_number_case(dy, b), dy, b),),
    composite_backward=lambda dy, b, needs: (dy * b,),
    saves=(),
    gradients={"a": "y"},
)
