"""add and mul: validation, registration with torch, autograd, implementations.

Each is registered in three forms: of two tensors of one shape, of a tensor and a row (a bias, a scale), whose gradient
is a sum over the rows, and of a tensor and a number. Any other broadcast is the first form, of expanded tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import accesses
from accelerant.ops._library import name_of
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops.elementwise.launch import add_row_backward, is_row, launch_binary, mul_backward, mul_row_backward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, case_of

__all__ = ["add", "mul"]

_Needs = Sequence[bool]
_Gradients = tuple[Tensor | None, Tensor | None]

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


def _operation(
    name: str,
    own: Callable[..., object],
    other: Callable[..., object],
    cost: Callable[[Case], Cost],
    refuses: Callable[[Case], str | None] = _refuses,
) -> Operation:
    return Operation(
        name,
        (
            Implementation("triton", own, refuses=refuses, own=True),
            Implementation("torch", other, differentiable=other in (torch.add, torch.mul)),
        ),
        cost=cost,
    )


def _torch_add_row_backward(dy: Tensor, b: Tensor) -> Tensor:
    return dy.sum_to_size(b.shape)


def _torch_mul_backward(dy: Tensor, a: Tensor | None, b: Tensor, needs: _Needs) -> _Gradients:
    """Return the gradients for tensors of one shape, and for a row b; without a, b is a constant."""
    return dy * b if needs[0] else None, None if a is None or not needs[1] else (dy * a).sum_to_size(b.shape)


def _own_mul_backward(dy: Tensor, a: Tensor | None, b: Tensor, needs: _Needs) -> _Gradients:
    if a is None:
        return launch_binary("mul", dy, b), None
    return (mul_backward if a.shape == b.shape else mul_row_backward)(dy, a, b, needs)


add_fwd = _operation("add_fwd", lambda a, b: launch_binary("add", a, b), torch.add, _cost(3, 1))
add_bwd = _operation("add_bwd", add_row_backward, _torch_add_row_backward, accesses(1, 1), _refuses_sum)
mul_fwd = _operation("mul_fwd", lambda a, b: launch_binary("mul", a, b), torch.mul, _cost(3, 1))
mul_bwd = _operation("mul_bwd", _own_mul_backward, _torch_mul_backward, _cost(5, 2))
mul_constant_bwd = _operation("mul_constant_bwd", _own_mul_backward, _torch_mul_backward, _cost(3, 1))


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
    Under torch.compile this is torch's own add, so that the compiler fuses it with its surroundings. Under
    forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is torch's own add, which
    the ledger does not count.
    """
    y: Tensor = _call("add", a, b, _add, _add_row, _add_number)
    return y


_mul_cpu = CpuFastPath(torch.mul)


@_mul_cpu
def mul(a: Tensor, b: Tensor | float) -> Tensor:
    """Multiply two tensors elementwise, or a tensor by a number.

    y = a b, shapes broadcast as in PyTorch

    Args:
        a: any shape and layout; float16, bfloat16, float32 or float64. Under autocast its own dtype is kept.
        b: a number, or a tensor whose shape broadcasts with that of a; dtype and device of a. Fastest with the shape
            of a, or a row of it (the end of that shape: a scale).

    Returns:
        the broadcast shape, dtype of a, layout as PyTorch gives it. Differentiable any number of times.

    Raises:
        ShapeError: the shapes do not broadcast, or different devices.
        UnsupportedDtype: dtype not listed above, dtypes that differ (none is converted), or b no number.

    Under torch.compile, forward-mode differentiation and torch.func as `add`.
    """
    y: Tensor = _call("mul", a, b, _mul_same, _mul_with_row, _mul_number)
    return y


def _call(
    name: str,
    a: Tensor,
    b: Tensor | float,
    same: Callable[..., Tensor],
    row: Callable[..., Tensor],
    number: Callable[..., Tensor],
) -> Tensor:
    """Check the arguments and call the form of the op that serves them."""
    check_dtype(name, a, "a")
    y: Tensor
    if not isinstance(b, Tensor):
        if not isinstance(b, (int, float)):
            raise UnsupportedDtype(f"b must be a tensor or a real number, got {type(b).__name__}")
        y = number(a, float(b))
        return y
    if b.dtype != a.dtype:
        raise UnsupportedDtype(f"a and b must have one dtype, got {name_of(a.dtype)} and {name_of(b.dtype)}")
    if b.device != a.device:
        raise ShapeError(f"a and b must be on one device, got {a.device} and {b.device}")
    if a.shape == b.shape:
        y = same(a, b)
    elif is_row(a, b):
        y = row(a, b)
    elif is_row(b, a):
        y = row(b, a)
    else:
        try:
            wide = torch.broadcast_tensors(a, b)
        except RuntimeError:
            raise ShapeError(f"shapes {tuple(a.shape)} and {tuple(b.shape)} do not broadcast") from None
        y = same(*wide)
    return y


# --- add -------------------------------------------------------------------------------------------------------------


def _case(a: Tensor, b: Tensor) -> Case:
    return case_of((a.device, a.dtype, a.shape, _form(a, b)))


def _number_case(a: Tensor, b: float) -> Case:
    return case_of((a.device, a.dtype, a.shape, ("number",)))


def _add_row_backward(dy: Tensor, b: Tensor, needs: _Needs) -> _Gradients:
    db = add_bwd(Case(dy.device, dy.dtype, dy.shape, (tuple(b.shape),)), dy, b) if needs[1] else None
    return dy, db


def _add_row_composite_backward(dy: Tensor, b: Tensor, needs: _Needs) -> _Gradients:
    return dy, _torch_add_row_backward(dy, b) if needs[1] else None


_add = DifferentiableOp(
    "add(Tensor a, Tensor b) -> (Tensor y)",
    operation=add_fwd,
    case=_case,
    backward=lambda dy, needs: (dy,),
    composite_backward=lambda dy, needs: (dy,),
    saves=(),
    gradients={"a": "y"},
    shares={"b": "a"},
    composite=torch.add,
    fake=torch.add,
    keeps_layout=True,
    decomposes=True,
    cpu=_add_cpu,
)
_add_row = DifferentiableOp(
    "add_row(Tensor a, Tensor b) -> (Tensor y)",
    operation=add_fwd,
    case=_case,
    backward=_add_row_backward,
    composite_backward=_add_row_composite_backward,
    saves=("b",),
    gradients={"a": "y", "b": "b"},
    composite=torch.add,
    fake=torch.add,
    keeps_layout=True,
    decomposes=True,
    cpu=_add_cpu,
)
_add_number = DifferentiableOp(
    "add_number(Tensor a, float b) -> (Tensor y)",
    operation=add_fwd,
    case=_number_case,
    backward=lambda dy, b, needs: (dy,),
    composite_backward=lambda dy, b, needs: (dy,),
    saves=(),
    gradients={"a": "y"},
    composite=torch.add,
    fake=torch.add,
    keeps_layout=True,
    decomposes=True,
    cpu=_add_cpu,
)


# --- mul -------------------------------------------------------------------------------------------------------------


def _mul_backward(dy: Tensor, a: Tensor, b: Tensor, needs: _Needs) -> _Gradients:
    found: _Gradients = mul_bwd(_case(a, b), dy, a, b, needs)
    return found


def _mul_constant_backward(dy: Tensor, b: Tensor, needs: _Needs) -> tuple[Tensor | None]:
    found: _Gradients = mul_constant_bwd(_case(dy, b), dy, None, b, needs)
    return found[:1]


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
    y: Tensor = _mul_constant(a, b) if a.requires_grad and not b.requires_grad else _mul_row(a, b)
    return y


def _mul_number_backward(dy: Tensor, b: float, needs: _Needs) -> tuple[Tensor]:
    return (mul_fwd(_number_case(dy, b), dy, b),)


def _mul_form(name: str) -> DifferentiableOp:
    return DifferentiableOp(
        f"{name}(Tensor a, Tensor b) -> (Tensor y)",
        operation=mul_fwd,
        case=_case,
        backward=_mul_backward,
        composite_backward=_torch_mul_backward,
        saves=("a", "b"),
        gradients={"a": "a", "b": "b"},
        composite=torch.mul,
        fake=torch.mul,
        keeps_layout=True,
        decomposes=True,
        cpu=_mul_cpu,
    )


_mul, _mul_row = _mul_form("mul"), _mul_form("mul_row")
_mul_constant = DifferentiableOp(
    "mul_constant(Tensor a, Tensor b) -> (Tensor y)",
    operation=mul_fwd,
    case=_case,
    backward=_mul_constant_backward,
    composite_backward=lambda dy, b, needs: (dy * b,),
    saves=("b",),
    gradients={"a": "y"},
    composite=torch.mul,
    fake=torch.mul,
    keeps_layout=True,
    decomposes=True,
    cpu=_mul_cpu,
)
_mul_number = DifferentiableOp(
    "mul_number(Tensor a, float b) -> (Tensor y)",
    operation=mul_fwd,
    case=_number_case,
    backward=_mul_number_backward,
    composite_backward=lambda dy, b, needs: (dy * b,),
    saves=(),
    gradients={"a": "y"},
    composite=torch.mul,
    fake=torch.mul,
    keeps_layout=True,
    decomposes=True,
    cpu=_mul_cpu,
)
