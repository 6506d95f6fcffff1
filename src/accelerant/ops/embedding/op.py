"""embedding: the public function, its implementations, and the registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import triton_operation
from accelerant.ops._library import is_plain, name_of
from accelerant.ops._refusals import check_dtype, not_a_tensor, refuses_triton_kernel
from accelerant.ops.embedding.launch import launch_backward_atomic, launch_backward_sorted, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["embedding"]

_FEW = 2**14
"""Up to this many elements, copying the table to float32 on a CPU is faster than an autograd function in Python."""

_MANY = 2**17
"""From this many elements of table and gradient on, sums of bags are faster than torch's gradient in float32."""


def _torch_equivalent(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    return torch.embedding(weight, indices, -1 if padding_idx is None else padding_idx % len(weight))


_cpu = CpuFastPath(_torch_equivalent, serves=lambda indices, weight, **_: not _is_low(weight.dtype))


@_cpu
def embedding(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Look up rows of a table.

    y = weight[indices]

    Args:
        indices: any shape, int64 or int32, each in [0, V).
        weight: the table (V, D), float16, bfloat16, float32 or float64.
        padding_idx: a row that gets no gradient; negative counts from the end.

    Returns:
        (*indices.shape, D), dtype of weight, contiguous. The gradient of the table is dense, summed in float32
        (float64 for float64) and rounded once to the dtype of weight. Differentiable twice.

    Raises:
        ShapeError: weight is not (V, D), or several devices.
        UnsupportedDtype: a dtype not listed above.
        ConfigError: padding_idx is out of range; or, on a CPU, an index is.
        TypeError: an argument is not a tensor.

    On a GPU indices are not checked, which would synchronise: one outside [0, V) reads no memory, gives a row of NaN
    and contributes no gradient. (torch's own function, if dispatch chooses it, asserts on the device.)

    The backward pass sorts the indices and adds in a fixed order. With races enabled atomic additions may be chosen,
    unless the setting `deterministic` is on. Under forward-mode differentiation and the transforms of torch.func
    torch's own embedding runs, which the ledger does not count.

    Source: Bengio, Ducharme, Vincent and Jauvin 2003, "A neural probabilistic language model", section 2.
    """
    check_dtype("embedding", weight, "weight")
    if not isinstance(indices, Tensor):
        raise not_a_tensor("embedding", "indices", indices)
    if indices.dtype not in (torch.int64, torch.int32):
        raise UnsupportedDtype(f"indices must be int64 or int32, got {name_of(indices.dtype)}")
    if weight.dim() != 2:
        raise ShapeError(f"weight must be (V, D), got {tuple(weight.shape)}")
    if indices.device != weight.device:
        raise ShapeError(f"indices must be on {weight.device}, where weight is; they are on {indices.device}")
    V = weight.shape[0]
    row = -1
    if padding_idx is not None:
        if not -V <= padding_idx < V:
            raise ConfigError(f"padding_idx must be in [{-V}, {V}), got {padding_idx}")
        row = padding_idx % V
    try:
        y: Tensor = _embedding(indices, weight, row)
    except IndexError:  # raised by torch's function on a CPU; other implementations check the indices first
        _check_range(indices, V)
        raise
    return y


def _check_range(indices: Tensor, V: int) -> None:
    """Raise ConfigError for an index out of range if the check is cheap: on the CPU, not while tracing."""
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or not is_plain(indices) or not indices.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= V:
        raise ConfigError(f"indices must be in [0, {V}), got {low if low < 0 else high}")


# --- implementations -------------------------------------------------------------------------------------------------


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _torch_forward(indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    if weight.device.type == "cpu" and _is_low(weight.dtype) and weight.requires_grad and torch.is_grad_enabled():
        return torch.embedding(weight.float(), indices, padding_idx).to(weight.dtype)  # torch's gradient, in float32
    return torch.embedding(weight, indices, padding_idx)


def _torch_backward(
    dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool]
) -> tuple[Tensor]:
    if not dy.numel():  # without columns torch's CUDA kernel writes out of bounds
        return (torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device),)
    if dy.device.type == "cpu" and _is_low(dy.dtype):
        if dy.numel() + weight.numel() >= _MANY:
            return (_bags(dy, indices, weight, padding_idx),)
        dy = dy.float()  # on a CPU torch adds in the dtype of dy
    dense = torch.ops.aten.embedding_dense_backward
    return (dense(dy, indices, weight.shape[0], padding_idx, False).to(weight.dtype),)


def _bags(dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """Return the gradient as sums of bags, by torch.embedding_bag: one bag of rows of dy per row of the table.

    On a CPU torch's own gradient adds in low precision, bags in float32. They are also faster: 1.4 times for 32768
    tokens of 768 columns in bfloat16 on one core.
    """
    (V, D), numbers = weight.shape, indices.reshape(-1)
    begins = torch.zeros(V, dtype=torch.int64)
    torch.cumsum(torch.bincount(numbers, minlength=V)[:-1], 0, out=begins[1:])
    order = torch.argsort(numbers, stable=True)  # a fixed order of the sums
    dx: Tensor = torch.embedding_bag(dy.reshape(-1, D).contiguous(), order, begins, False, 0, False, None, False)[0]
    if padding_idx >= 0:
        dx[padding_idx].zero_()
    return dx


def _composite_backward(
    dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool]
) -> tuple[Tensor]:
    """Return the gradient by index_add, which is differentiable even without tokens, unlike torch's own gradient."""
    V, D = weight.shape
    numbers = indices.reshape(-1)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    rows = dy.reshape(numbers.numel(), D).to(wide)
    if padding_idx >= 0:
        rows = rows.masked_fill((numbers == padding_idx).unsqueeze(1), 0)
    return (rows.new_zeros((V, D)).index_add(0, numbers, rows).to(weight.dtype),)


def _sizes(case: Case) -> tuple[int, int, int]:
    """Return the bytes of the indices, the elements of y, and the elements of the table."""
    rows = math.prod(case.options[1])
    V, D = case.shape
    return rows * case.options[0].itemsize, rows * D, V * D


def _forward_cost(case: Case) -> Cost:
    indices, elements, _ = _sizes(case)
    return Cost(indices + 2 * elements * case.dtype.itemsize, 0)


def _backward_cost(case: Case) -> Cost:
    indices, elements, table = _sizes(case)
    return Cost(indices + (elements + table) * case.dtype.itemsize, elements)


_fwd = triton_operation("embedding_fwd", launch_forward, _torch_forward, cost=_forward_cost, differentiable=True)
_bwd = Operation(
    "embedding_bwd",
    (
        Implementation("triton", launch_backward_sorted, refuses=refuses_triton_kernel, own=True),
        Implementation(
            "triton-atomic", launch_backward_atomic, refuses=refuses_triton_kernel, own=True, deterministic=False
        ),
        Implementation("torch", _torch_backward),
    ),
    cost=_backward_cost,
)


def _case(indices: Tensor, weight: Tensor) -> Case:
    return Case(weight.device, weight.dtype, weight.shape, (indices.dtype, indices.shape))


def _cpu_case(indices: Tensor, weight: Tensor, padding_idx: int) -> Case | None:
    """Return None where torch's gradient does not serve: without indices, and for large tables in low precision."""
    if not indices.numel() or not weight.numel():
        return None
    if _is_low(weight.dtype) and weight.requires_grad and torch.is_grad_enabled() and weight.numel() > _FEW:
        return None
    return _case(indices, weight)


def _forward(indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    _check_range(indices, weight.shape[0])
    y: Tensor = _fwd(_case(indices, weight), indices, weight, padding_idx)
    return y


def _backward(dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool]) -> tuple[Tensor]:
    result: tuple[Tensor] = _bwd(_case(indices, weight), dy, indices, weight, padding_idx, needs)
    return result


_embedding = DifferentiableOp(
    "embedding(Tensor indices, Tensor weight, int padding_idx) -> (Tensor y)",
    forward=_forward,
    backward=_backward,
    saves=("indices", "weight"),
    gradients={"weight": "weight"},
    composite=_torch_forward,
    composite_backward=_composite_backward,
    fake=lambda indices, weight, padding_idx: weight.new_empty((*indices.shape, weight.shape[1])),
    operation=_fwd,
    cpu=_cpu,
    cpu_case=_cpu_case,
)
