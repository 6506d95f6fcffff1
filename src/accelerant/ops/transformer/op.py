"""The pieces of a block's two passes as Operations: products, sums of columns, the gradients through gelu and a norm.

None is a public function or an op of torch's: the autograd functions of block.py call them. Attention is in packed.py,
embeddings and loss are in ends.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops._refusals import refuses_triton_kernel
from accelerant.ops.linear_fp8 import op as float8
from accelerant.ops.linear_fp8.op import Float8Weight
from accelerant.ops.norm.launch import WIDE_BACKWARD, launch_backward, launch_backward_each
from accelerant.ops.norm.torch_ops import torch_backward
from accelerant.ops.transformer import hopper
from accelerant.ops.transformer.launch import (
    launch_columns,
    launch_columns_each,
    launch_dgelu,
    launch_join,
    launch_turn,
)
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = [
    "column_sums",
    "column_sums_each",
    "dgelu",
    "linear",
    "linear_dw",
    "linear_dx",
    "linear_dz",
    "norm_backward",
    "norm_backward_each",
    "refuses_triton_kernel",
]

_WithSums = tuple[Tensor, Tensor, Tensor | None]


# --- products --------------------------------------------------------------------------------------------------------


def _run_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def _run_dw(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == x.dtype:
        return torch.mm(dy.t(), x)
    if x.is_cuda and torch.version.hip is None and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype)
    return torch.mm(dy.t(), x).to(dtype)


def _product_cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost((M * K + K * N + M * N) * case.dtype.itemsize, 2 * M * N * K)


_linear_fwd = Operation("linear_fwd", (Implementation("torch", _run_linear),), cost=_product_cost)
_linear_dx = Operation("linear_dx", (Implementation("torch", torch.mm),), cost=_product_cost)
_linear_dw = Operation("linear_dw", (Implementation("torch", _run_dw),), cost=_product_cost)


def linear(x: Tensor, weight: Tensor | Float8Weight, bias: Tensor | None) -> Tensor:
    """The rows x (M, K) times weight (N, K) transposed, plus bias in the product's epilogue: (M, N)."""
    if isinstance(weight, Float8Weight):
        return float8.linear(x, weight, bias)
    y: Tensor = _linear_fwd(Case(x.device, x.dtype, (x.shape[0], *weight.shape)), x, weight, bias)
    return y


def linear_dx(dy: Tensor, weight: Tensor | Float8Weight) -> Tensor:
    """The gradient (M, K) of linear's rows, from that of its result (M, N)."""
    if isinstance(weight, Float8Weight):
        return float8.linear_dx(dy, weight)
    dx: Tensor = _linear_dx(Case(dy.device, dy.dtype, (dy.shape[0], weight.shape[1], weight.shape[0])), dy, weight)
    return dx


def linear_dw(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient (N, K) of linear's weight, in a dtype: the sum over the rows is not rounded before."""
    case = Case(dy.device, dy.dtype, (dy.shape[1], x.shape[1], dy.shape[0]))
    dw: Tensor = _linear_dw(case, dy, x, dtype)
    return dw


# --- sums of columns -------------------------------------------------------------------------------------------------


def _torch_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)


_columns = Operation(
    "column_sums",
    (
        Implementation("triton", launch_columns, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_columns),
    ),
    cost=lambda case: Cost(math.prod(case.shape) * case.dtype.itemsize, math.prod(case.shape)),
)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of each column of x (M, N), in a dtype; added in float32 or better."""
    sums: Tensor = _columns(Case(x.device, x.dtype, x.shape), x, dtype)
    return sums


def _torch_columns_each(x: Tensor, examples: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.view(examples, -1, x.shape[1]).sum(1, dtype=wide) if examples else x.new_zeros(0, x.shape[1], dtype=wide)


_columns_each = Operation(
    "column_sums_each",
    (
        Implementation("triton", launch_columns_each, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_columns_each),
    ),
    cost=lambda case: Cost(math.prod(case.shape) * case.dtype.itemsize, math.prod(case.shape)),
)


def column_sums_each(x: Tensor, examples: int) -> Tensor:
    """The sums of x's columns over each example's rows, (M, N) to (examples, N), in float32 or better.

    The rows of an example stand together, M / examples of them.
    """
    sums: Tensor = _columns_each(Case(x.device, x.dtype, x.shape, (f"examples {examples}",)), x, examples)
    return sums


# --- gelu's gradient, and gelu anew ----------------------------------------------------------------------------------


def _torch_dgelu(dy: Tensor, z: Tensor, approximate: str, sums: torch.dtype | None) -> _WithSums:
    dz = torch.ops.aten.gelu_backward(dy, z, approximate=approximate)
    return dz, functional.gelu(z, approximate=approximate), None if sums is None else _torch_columns(dz, sums)


_dgelu = Operation(
    "dgelu",
    (
        Implementation("triton", launch_dgelu, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_dgelu),
    ),
    cost=lambda case: Cost(4 * math.prod(case.shape) * case.dtype.itemsize, 30 * math.prod(case.shape)),
)


def dgelu(dy: Tensor, z: Tensor, approximate: str, sums: torch.dtype | None) -> _WithSums:
    """The gradient of z (M, N) through gelu, gelu(z), and the sums of the gradient's columns where a dtype is given."""
    case = Case(z.device, z.dtype, z.shape, (approximate, "" if sums is None else "sums"))
    found: _WithSums = _dgelu(case, dy, z, approximate, sums)
    return found


# --- the product before it, too --------------------------------------------------------------------------------------


_PARTIAL_ROWS = 32
"""Of dz to a partial sum of its columns, as the Hopper kernel leaves them."""


def _hopper_dz(dy: Tensor, weight: Tensor, z: Tensor, sums: torch.dtype | None, examples: int | None) -> _WithSums:
    dz, a, partial = hopper.launch_dz(dy, launch_turn(weight), z)
    if sums is None:
        return dz, a, None
    if examples is None:
        return dz, a, launch_join(partial, sums)
    M, N = z.shape
    if M % (examples * _PARTIAL_ROWS):
        return dz, a, launch_columns_each(dz, examples)
    return dz, a, partial[: M // _PARTIAL_ROWS].view(examples, -1, N).sum(1)


def _apart(dy: Tensor, weight: Tensor, z: Tensor, sums: torch.dtype | None, examples: int | None) -> _WithSums:
    dx = linear_dx(dy, weight)
    if sums is None or examples is None:
        return dgelu(dx, z, "tanh", sums)
    dz, a, _ = dgelu(dx, z, "tanh", None)
    return dz, a, column_sums_each(dz, examples)


def _dz_cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost((M * K + K * N + 3 * M * N) * case.dtype.itemsize, 2 * M * N * K + 30 * M * N)


_linear_dz = Operation(
    "linear_dz",
    (Implementation("hopper", _hopper_dz, refuses=hopper.refuses, own=True), Implementation("apart", _apart)),
    cost=_dz_cost,
)


def linear_dz(
    dy: Tensor, weight: Tensor, z: Tensor, sums: torch.dtype | None, examples: int | None = None
) -> _WithSums:
    """For linear(gelu(z)) by the tanh approximation: the gradient of z (M, N), gelu(z), sums of the former's columns.

    Args:
        dy: (M, K), the gradient of the result.
        weight: (K, N).
        z: contiguous.
        sums: their dtype; None for none.
        examples: where the sums are wanted for each of so many, (examples, N) and float32 or better.
    """
    case = Case(dy.device, dy.dtype, (*z.shape, weight.shape[0]), ("tanh", "" if sums is None else "sums"))
    found: _WithSums = _linear_dz(case, dy, weight, z, sums, examples)
    return found


# --- the gradient through a norm, with the sums of its columns --------------------------------------------------------


def _own_norm(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], sums: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    summed = None if sums is None else torch.empty(s.shape[-1], dtype=sums, device=s.device)
    found = launch_backward(True, dy, s, weight, bias, statistics, eps, needs, ds, dxsum=summed)
    return *found, summed


def _torch_norm(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], sums: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    dx, dweight, dbias = torch_backward(True, dy, s, weight, bias, statistics, eps, needs, ds)
    return dx, dweight, dbias, None if sums is None else _torch_columns(dx.reshape(-1, dx.shape[-1]), sums)


_norm_bwd = Operation(
    "block_norm_bwd",
    (
        Implementation("triton", _own_norm, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_norm),
    ),
    cost=lambda case: Cost(4 * math.prod(case.shape) * case.dtype.itemsize, 19 * math.prod(case.shape)),
)


def norm_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], sums: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The gradient of what a layer_norm normalised, s (..., N), plus ds; of weight and bias; the first one's sums.

    The sums over its rows, in a dtype where one is given, are the gradient of a bias that the sum s ended with.
    """
    case = Case(s.device, s.dtype, s.shape, ("" if ds is None else "residual", "" if sums is None else "sums"))
    found: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None] = _norm_bwd(
        case, dy, ds, s, weight, bias, statistics, eps, needs, sums
    )
    return found


# --- the same, the sums over the rows apart for each example ---------------------------------------------------------

_Each = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _torch_norm_each(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, statistics: Tensor, eps: float, examples: int,
    wanted: tuple[bool, bool, bool],
) -> _Each:  # fmt: skip
    dx, _, _ = torch_backward(True, dy, s, weight, None, statistics, eps, (True, False, False), ds)
    N = s.shape[-1]
    rows, h = dy.reshape(-1, N), s.reshape(-1, N).to(statistics.dtype)
    dweight = None
    if wanted[0]:
        h = (h - statistics[:, :1]) * statistics[:, 1:]
        dweight = _torch_columns_each(h * rows, examples)
    dbias = _torch_columns_each(rows, examples) if wanted[1] else None
    return dx, dweight, dbias, _torch_columns_each(dx.view(-1, N), examples) if wanted[2] else None


def _own_norm_each(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, statistics: Tensor, eps: float, examples: int,
    wanted: tuple[bool, bool, bool],
) -> _Each:  # fmt: skip
    return launch_backward_each(dy, s, weight, statistics, examples, wanted, ds)


def _refuses_each(case: Case) -> str | None:
    if case.shape[-1] > WIDE_BACKWARD:
        return f"takes at most {WIDE_BACKWARD} columns"
    if not math.prod(case.shape):
        return "has nothing to sum"
    return refuses_triton_kernel(case)


_norm_bwd_each = Operation(
    "block_norm_bwd_each",
    (
        Implementation("triton", _own_norm_each, refuses=_refuses_each, own=True),
        Implementation("torch", _torch_norm_each),
    ),
    cost=lambda case: Cost(4 * math.prod(case.shape) * case.dtype.itemsize, 19 * math.prod(case.shape)),
)


def norm_backward_each(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, statistics: Tensor, eps: float, examples: int,
    wanted: tuple[bool, bool, bool],
) -> _Each:  # fmt: skip
    """The gradient of what a layer_norm normalised, s (..., N), plus ds; and sums over each example's rows.

    Args:
        wanted: which of the sums: those that make up the gradients of weight, of bias, and of a bias that s ended with.

    Returns:
        the gradient; (examples, N) of each sum that is wanted, in float32 or better.
    """
    options = ("" if ds is None else "residual", f"examples {examples}")
    case = Case(s.device, s.dtype, s.shape, options)
    found: _Each = _norm_bwd_each(case, dy, ds, s, weight, statistics, eps, examples, wanted)
    return found
