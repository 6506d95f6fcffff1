"""embedding: the public function, its implementations, and the registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import ByTorch, DifferentiableOp
from accelerant.ops._library import is_plain, name_of
from accelerant.ops._refusals import check_dtype, refuses_triton_kernel
from accelerant.ops._straight import straight
from accelerant.ops.embedding.launch import launch_backward_atomic, launch_backward_sorted, launch_forward
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["embedding"]

_FEW = 2**14
"""Elements of a table that is quicker copied to float32 on a CPU than served by an autograd function in Python."""

_MANY = 2**17
"""Elements of table and gradient from which on the sums of bags are quicker than torch's gradient in float32."""


def _torchs(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    return torch.embedding(weight, indices, -1 if padding_idx is None else padding_idx % len(weight))


@straight("embedding_fwd", _torchs, serves=lambda indices, weight, **_: not _is_low(weight.dtype))
def embedding(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Rows of a table by their numbers.

    y = weight[indices]

    Args:
        indices: any shape, int64 or int32, each in [0, V).
        weight: the table (V, D), float16, bfloat16, float32 or float64.
        padding_idx: a row that gets no gradient; negative counts from the end. Its value is looked up as any other's.

    Returns:
        (*indices.shape, D), dtype of weight, contiguous. The gradient of the table is dense, its sums in float32
        (float64 for float64) and rounded once to the dtype of weight. Differentiable twice.

    Raises:
        ShapeError: weight is not (V, D), or the two are on different devices.
        UnsupportedDtype: a dtype not listed above.
        ConfigError: padding_idx is not a row; or, on a CPU, a number in indices is not.

    A GPU is not waited for, so numbers are not checked there: one outside [0, V) reads no memory, gives a row of NaN
    and has no part in the gradient. (Where dispatch chooses torch's own function, that asserts on the device.)

    The backward pass adds in a fixed order, after a sort; with races switched on, atomic additions may be chosen, which
    the setting `deterministic` refuses. Under forward-mode differentiation and the transforms of torch.func this is
    torch's own embedding, which the ledger does not count.

    Source: Bengio, Ducharme, Vincent and Jauvin 2003, "A neural probabilistic language model", section 2.
    """
    if indices.dtype not in (torch.int64, torch.int32):
        raise UnsupportedDtype(f"indices must be int64 or int32, got {name_of(indices.dtype)}")
    check_dtype("embedding", weight, "weight")
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
    except IndexError:  # torch's word for it; where its function is not the one that runs, the op looks before
        _check_range(indices, V)
        raise
    return y


def _check_range(indices: Tensor, V: int) -> None:
    """Raise for a number of no row, where looking costs nothing: on the CPU, outside of tracing."""
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
    if not dy.numel():  # for rows of no columns torch's CUDA kernel writes to memory that is not there
        return (torch.zeros(weight.shape, dtype=weight.dtype, device=weight.device),)
    if dy.device.type == "cpu" and _is_low(dy.dtype):
        if dy.numel() + weight.numel() >= _MANY:
            return (_bags(dy, indices, weight, padding_idx),)
        dy = dy.float()  # on a CPU torch adds in the dtype that comes
    dense = torch.ops.aten.embedding_dense_backward
    return (dense(dy, indices, weight.shape[0], padding_idx, False).to(weight.dtype),)


def _bags(dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """The gradient as one bag of rows of dy for each row of the table, by torch's function for the sums of bags.

    On a CPU torch's own gradient adds in low precision, and its bags in float32. They are quicker, too: at 32768 tokens
    of 768 columns 1.4 times in bfloat16 on one core.
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
    """By a sum that is differentiable for no tokens too, which torch's own gradient of embedding is not."""
    V, D = weight.shape
    numbers = indices.reshape(-1)
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    rows = dy.reshape(numbers.numel(), D).to(wide)
    if padding_idx >= 0:
        rows = rows.masked_fill((numbers == padding_idx).unsqueeze(1), 0)
    return (rows.new_zeros((V, D)).index_add(0, numbers, rows).to(weight.dtype),)


def _tokens(case: Case) -> tuple[int, int, int]:
    """Bytes of the indices; elements of y; elements of the table."""
    rows = math.prod(case.options[1])
    V, D = case.shape
    return rows * case.options[0].itemsize, rows * D, V * D


def _forward_cost(case: Case) -> Cost:
    indices, elements, _ = _tokens(case)
    return Cost(indices + 2 * elements * case.dtype.itemsize, 0)


def _backward_cost(case: Case) -> Cost:
    indices, elements, table = _tokens(case)
    return Cost(indices + (elements + table) * case.dtype.itemsize, elements)


_fwd = Operation(
    "embedding_fwd",
    (
        Implementation("triton", launch_forward, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_forward, differentiable=True),
    ),
    cost=_forward_cost,
)
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


def _case_by_torch(indices: Tensor, weight: Tensor, padding_idx: int) -> Case | None:
    """None where torch's own gradient falls short: of no numbers, and in low precision of a table worth its time."""
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
    by_torch=ByTorch(_fwd, _case_by_torch),
)
