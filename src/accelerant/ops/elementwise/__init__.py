"""The elementwise ops: references, implementations, public functions, registration with torch and autograd.

add and mul are registered in three forms: of two tensors of one shape, which other broadcasts are expanded to; of a
tensor and a row, whose gradient is a sum over the rows; and of a tensor and a number.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops import _launch
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._launch import Elementwise, accesses, ceil_div, multiprocessors, next_power_of_2, triton_operation
from accelerant.ops._library import check_dtype, name_of, refuses_triton_kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, case_of
from accelerant.runtime.dispatch.race import Tuned

__all__ = ["add", "mul", "relu", "sigmoid", "silu", "tanh"]


_MODULE = "accelerant.ops.elementwise.triton_kernels"
_OPS = ("relu", "sigmoid", "tanh", "silu", "mul")
STREAM_KERNELS = {
    name: _launch.StreamKernel(_MODULE, name, usual)
    for name, usual in {
        **{f"{op}_fwd": _launch.STREAM for op in _OPS},
        **{f"{op}_bwd": _launch.SHORT for op in _OPS},
        "add_fwd": _launch.SHORT,
        "tanh_fwd": Elementwise(block=1024, num_warps=2),  # 7% less time than with STREAM
    }.items()
}
_ROW_WIDTHS = {"add_row_fwd": (4,), "add_row_bwd": (3,), "mul_row_fwd": (4,), "mul_row_bwd": (6,)}
KERNELS: dict[str, TritonKernel] = {
    **STREAM_KERNELS,
    **{name: TritonKernel(_MODULE, name, widths=widths) for name, widths in _ROW_WIDTHS.items()},
}

TILE = 1024  # elements a program of the _row_fwd kernels
ROW_WARPS = 4
_FEW_ROWS = 256  # summed in one go: a second launch would cost more than it gains


@dataclass(frozen=True, slots=True)
class SumTile:
    """The work of a _row_bwd program, in steps of a tile, `stages` in flight; `programs` per multiprocessor, about."""

    rows: int
    block_n: int
    num_warps: int
    programs: int = 4
    stages: int = 3

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments."""
        return {"ROWS": self.rows, "BLOCK_N": self.block_n, "STAGES": self.stages}

    def parts(self, M: int, N: int, device: torch.device) -> tuple[int, int]:
        """Return the number of parts that M rows are split into, and the rows of a part."""
        if M <= _FEW_ROWS:
            return 1, max(self.rows, ceil_div(M, self.rows) * self.rows)
        wanted = max(1, self.programs * multiprocessors(device) // ceil_div(N, self.block_n))
        part_rows = max(4, ceil_div(ceil_div(M, wanted), self.rows)) * self.rows
        return ceil_div(M, part_rows), part_rows


@functools.cache
def row_tile(N: int) -> tuple[int, int]:
    """Return the rows and columns of a program of a _row_fwd kernel."""
    block_n = min(TILE, next_power_of_2(N))
    return TILE // block_n, block_n


@functools.cache
def sum_plan(N: int) -> SumTile:
    """Return the default plan of a _row_bwd kernel: 2048 elements per step, 16 per thread."""
    block_n = min(512, next_power_of_2(N))
    return SumTile(rows=2048 // block_n, block_n=block_n, num_warps=4)


_SUMS = (  # elements, columns, warps, programs, stages
    (2048, 512, 4, 4, 3), (2048, 512, 4, 8, 3), (4096, 512, 4, 4, 2), (4096, 512, 8, 4, 3), (2048, 256, 4, 4, 3),
    (2048, 256, 4, 8, 3), (2048, 1024, 4, 4, 3),
)  # fmt: skip


@functools.cache
def sum_plans(N: int) -> tuple[SumTile, ...]:
    """Return the tuning candidates of the _row_bwd kernels."""
    cut = [(elements, min(columns, next_power_of_2(N)), *rest) for elements, columns, *rest in _SUMS]
    return tuple(dict.fromkeys(SumTile(elements // block_n, block_n, *rest) for elements, block_n, *rest in cut))


TUNED: dict[str, Tuned[SumTile]] = {
    name: Tuned(name, default=lambda M, N: sum_plan(N), candidates=lambda M, N: sum_plans(N))
    for name in ("add_row_bwd", "mul_row_bwd")
}


def is_row(a: Tensor, b: Tensor) -> bool:
    """Return whether b is a row of a: its shape, without leading ones, is the end of that of a."""
    shape = b.shape
    while shape and shape[0] == 1:
        shape = shape[1:]
    return 0 < len(shape) <= b.dim() <= a.dim() and a.shape[-len(shape) :] == shape


def launch_binary(op: str, a: Tensor, b: Tensor, plan: Elementwise | None = None) -> Tensor:
    """Apply "add" or "mul": to two dense tensors of one layout, or to contiguous rows a and a contiguous row b."""
    y = torch.empty_like(a)
    if not (n := a.numel()):
        return y
    if a.shape == b.shape:
        kernel = STREAM_KERNELS[f"{op}_fwd"]
        if plan is None:
            plan = kernel.plan(a.device, a.dtype, (n,), lambda plan: launch_binary(op, a, b, plan))
        fixed = {"BLOCK": plan.block, "EVICTION": _launch.eviction(a, 3)}
        kernel.launch(plan.grid(n), (a, b, y, n), fixed, num_warps=plan.num_warps)
        return y
    N = b.numel()
    rows, block_n = row_tile(N)
    M = n // N
    grid = (ceil_div(M, rows) * ceil_div(N, block_n),)
    KERNELS[f"{op}_row_fwd"].launch(grid, (a, b, y, M, N), {"ROWS": rows, "BLOCK_N": block_n}, num_warps=ROW_WARPS)
    return y


def mul_backward(
    dy: Tensor, a: Tensor, b: Tensor, needs: Sequence[bool], plan: Elementwise | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return da and db, in the layout of a and b."""
    if dy.stride() != a.stride():
        dy = torch.empty_like(a).copy_(dy)
    if not (needs[0] and needs[1]):
        other = launch_binary("mul", dy, b if needs[0] else a)
        return (other, None) if needs[0] else (None, other)
    da, db = torch.empty_like(a), torch.empty_like(b)
    if n := a.numel():
        kernel = STREAM_KERNELS["mul_bwd"]
        if plan is None:
            plan = kernel.plan(a.device, a.dtype, (n,), lambda plan: mul_backward(dy, a, b, needs, plan))
        kernel.launch(plan.grid(n), (dy, a, b, da, db, n), {"BLOCK": plan.block}, num_warps=plan.num_warps)
    return da, db


def add_row_backward(dy: Tensor, b: Tensor, plan: SumTile | None = None) -> Tensor:
    """Return db: dy summed over the rows."""
    dy, db = dy.contiguous(), torch.empty_like(b)
    if not dy.numel():
        return db.zero_()
    if plan is None:
        sizes = (dy.numel() // b.numel(), b.numel())
        plan = TUNED["add_row_bwd"](dy.device, dy.dtype, sizes, lambda plan: add_row_backward(dy, b, plan))
    return _sum_rows(dy, db, plan)


def mul_row_backward(
    dy: Tensor, a: Tensor, b: Tensor, needs: Sequence[bool], plan: SumTile | None = None
) -> tuple[Tensor | None, Tensor | None]:
    """Return da = dy b, and db: dy a summed over the rows."""
    dy = dy.contiguous()
    if not needs[1]:
        return launch_binary("mul", dy, b), None
    da = torch.empty_like(a) if needs[0] else None
    db = torch.empty_like(b)
    if not a.numel():
        return da, db.zero_()
    N = b.numel()
    M = a.numel() // N
    if plan is None:
        plan = TUNED["mul_row_bwd"](a.device, a.dtype, (M, N), lambda plan: mul_row_backward(dy, a, b, needs, plan))
    parts, part_rows = plan.parts(M, N, a.device)
    out = db if parts == 1 else torch.empty((parts, N), dtype=torch.float32, device=a.device)
    grid = (parts * ceil_div(N, plan.block_n),)
    args = (dy, a, b, da, out, M, N, part_rows)
    KERNELS["mul_row_bwd"].launch(grid, args, plan.constants(), num_warps=plan.num_warps)
    return da, db if parts == 1 else _sum_rows(out, db, plan)


def _sum_rows(x: Tensor, y: Tensor, plan: SumTile) -> Tensor:
    """Sum contiguous rows into y, in two steps if there are many."""
    N = y.numel()
    M = x.numel() // N
    parts, part_rows = plan.parts(M, N, x.device)
    out = y if parts == 1 else torch.empty((parts, N), dtype=torch.float32, device=x.device)
    grid = (parts * ceil_div(N, plan.block_n),)
    KERNELS["add_row_bwd"].launch(grid, (x, out, M, N, part_rows), plan.constants(), num_warps=plan.num_warps)
    return y if parts == 1 else _sum_rows(out, y, plan)


_aten = torch.ops.aten
_Needs = Sequence[bool]
_Gradients = tuple[Tensor | None, Tensor | None]


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
) -> DecomposedOp:  # fmt: skip
    """Return an op of one tensor from torch's functions for it, with the kernels of its name."""
    again = again or backward
    own, own_backward = STREAM_KERNELS[f"{name}_fwd"], STREAM_KERNELS[f"{name}_bwd"]
    fwd = triton_operation(
        f"{name}_fwd",
        lambda x: _launch.launch_map(own, x, {}),
        forward,
        cost=accesses(2, flops[0]),
        differentiable=True,
    )
    bwd = triton_operation(
        f"{name}_bwd",
        lambda dy, saved: _launch.launch_map(own_backward, saved, {}, dy=dy),
        backward,
        cost=accesses(3, flops[1]),
    )

    def case(x: Tensor) -> Case:
        return case_of((x.device, x.dtype, x.shape, ()))

    return DecomposedOp(
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
        cpu=cpu,
    )


def _silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of silu from functions that torch can differentiate in either mode, at least in float32."""
    wide = x if x.dtype == torch.float64 else x.float()
    s = torch.sigmoid(wide)
    return (dy * (s * (1.0 + wide * (1.0 - s)))).to(x.dtype)


_relu_cpu, _sigmoid_cpu, _tanh_cpu, _silu_cpu = (
    CpuFastPath(function, small=lambda _: True) for function in (torch.relu, torch.sigmoid, torch.tanh, F.silu)
)
_relu: Callable[..., Tensor] = _unary(
    "relu", torch.relu, lambda dy, y: _aten.threshold_backward(dy, y, 0), saves="y", flops=(1, 1), cpu=_relu_cpu
)
_sigmoid: Callable[..., Tensor] = _unary(
    "sigmoid", torch.sigmoid, _aten.sigmoid_backward, saves="y", flops=(3, 3), cpu=_sigmoid_cpu
)
_tanh: Callable[..., Tensor] = _unary("tanh", torch.tanh, _aten.tanh_backward, saves="y", flops=(15, 3), cpu=_tanh_cpu)
_silu: Callable[..., Tensor] = _unary(
    "silu", F.silu, _aten.silu_backward, saves="x", flops=(3, 8), cpu=_silu_cpu, again=_silu_backward
)


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
"""A sum over rows of at most so many elements is torch's, which is 2.5 times as fast for 3; rows of 4095 are ours."""


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
    if a.requires_grad and not b.requires_grad:
        return _mul_constant(a, b)
    if b.requires_grad and not a.requires_grad and a.stride() == b.stride():
        return _mul_constant(b, a)
    y: Tensor = _mul(a, b)
    return y


def _mul_with_row(a: Tensor, b: Tensor) -> Tensor:
    """Multiply by a row, saving a only if the gradient of the row needs it."""
    y: Tensor = _mul_constant(a, b) if a.requires_grad and not b.requires_grad else _mul_row(a, b)
    return y


def _case(a: Tensor, b: Tensor) -> Case:
    return case_of((a.device, a.dtype, a.shape, _form(a, b)))


def _number_case(a: Tensor, b: float) -> Case:
    return case_of((a.device, a.dtype, a.shape, ("number",)))


_sum = partial(
    DecomposedOp, operation=add_fwd, composite=torch.add, fake=torch.add, keeps_layout=True,
    cpu=_add_cpu,
)  # fmt: skip
_product = partial(
    DecomposedOp, operation=mul_fwd, composite=torch.mul, fake=torch.mul, keeps_layout=True,
    cpu=_mul_cpu,
)  # fmt: skip

_add = _sum(
    "add(Tensor a, Tensor b) -> (Tensor y)",
    case=_case,
    backward=lambda dy, needs: (dy,),
    composite_backward=lambda dy, needs: (dy,),
    saves=(),
    gradients={"a": "y", "b": "a"},
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
_mul_constant: Callable[..., Tensor] = _product(
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
