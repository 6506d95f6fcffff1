"""embedding: reference, launches, the public function, implementations, registration with torch and autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import ConfigError, IndexOutOfRange, ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import ceil_div, next_power_of_2, triton_operation
from accelerant.ops._library import check_dtype, is_plain, name_of, not_a_tensor, refuses_triton_kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.race import Tuned

__all__ = ["embedding"]

_FEW_ELEMENTS = 2**14
"""Up to this many elements, copying the table to float32 on a CPU is faster than an autograd function in Python."""

_MANY_ELEMENTS = 2**17
"""From this many elements of table and gradient on, sums of bags are faster than torch's gradient in float32."""


def embedding_reference(indices: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Return weight[indices]; the row padding_idx gets no gradient. The tests' oracle in float64."""
    if padding_idx is not None:
        number = torch.arange(weight.shape[0], device=weight.device)[:, None]
        weight = torch.where(number == padding_idx % weight.shape[0], weight.detach(), weight)
    return weight[indices.long()]


_WIDTHS = {"fwd": (5, 6), "bwd": (7,), "bwd_atomic": (5,), "bwd_few": (5,), "bwd_join": (5,)}
KERNELS = {
    name: TritonKernel("accelerant.ops.embedding.triton_kernels", f"embedding_{name}", widths=widths)
    for name, widths in _WIDTHS.items()
}

CHUNK = 32  # tokens per program of the sorted backward pass

AT_ONCE = 8
"""Partial sums of an index that the sorted backward pass adds per step: 64 registers per thread for 256 columns."""

FEW = 32  # up to this many tokens are not sorted; each compares itself with all
CHUNKS = (16, 32, 64, 128)  # candidates for CHUNK


@dataclass(frozen=True, slots=True)
class EmbeddingTile:
    """The work of one program: `rows` tokens of `block_d` columns, powers of two."""

    rows: int
    block_d: int
    num_warps: int


@functools.cache
def embedding_plan(D: int) -> EmbeddingTile:
    """Return the default plan: 1024 elements, 8 per thread, in blocks of at most 256 columns."""
    block_d = min(256, max(8, next_power_of_2(D)))
    return EmbeddingTile(1024 // block_d, block_d, 4)


@functools.cache
def embedding_plans(D: int) -> tuple[EmbeddingTile, ...]:
    """Return the candidates for D columns."""
    widest = max(8, next_power_of_2(D))
    tiles = ((512, 256, 2), (1024, 256, 4), (1024, 256, 2), (2048, 256, 4), (2048, 256, 8), (1024, 512, 4))
    sizes = [(elements, min(block_d, widest), warps) for elements, block_d, warps in tiles]
    return tuple(
        dict.fromkeys(EmbeddingTile(elements // block_d, block_d, warps) for elements, block_d, warps in sizes)
    )


TUNED: dict[str, Tuned[EmbeddingTile]] = {
    name: Tuned(f"embedding_{name}", default=lambda T, D: embedding_plan(D), candidates=lambda T, D: embedding_plans(D))
    for name in ("fwd", "bwd_atomic")
}
"""Tuned plans of embedding_fwd and embedding_bwd_atomic, keyed by tokens and columns."""

TUNED_CHUNK: Tuned[int] = Tuned("embedding_bwd", default=lambda T, D: CHUNK, candidates=lambda T, D: CHUNKS)
"""Tuned tokens per program of the sorted backward pass."""


def constants(plan: EmbeddingTile, D: int) -> dict[str, int | bool]:
    """Return the compile-time arguments of embedding_fwd and embedding_bwd_atomic."""
    return {"ROWS": plan.rows, "BLOCK_D": plan.block_d, "EXACT": D % plan.block_d == 0}


def launch_forward(indices: Tensor, weight: Tensor, padding_idx: int, plan: EmbeddingTile | None = None) -> Tensor:
    """Return the rows of weight, (*indices.shape, D), contiguous."""
    V, D = weight.shape
    y = torch.empty((*indices.shape, D), dtype=weight.dtype, device=weight.device)
    if y.numel():
        T = indices.numel()
        if plan is None:
            plan = TUNED["fwd"](
                weight.device, weight.dtype, (T, D), lambda plan: launch_forward(indices, weight, padding_idx, plan)
            )
        rows = weight if weight.stride(1) == 1 else weight.contiguous()
        KERNELS["fwd"].launch(
            (ceil_div(T, plan.rows), ceil_div(D, plan.block_d)),
            (indices.contiguous(), rows, y, T, V, D, rows.stride(0)),
            constants(plan, D),
            num_warps=plan.num_warps,
        )
    return y


def launch_backward_atomic(
    dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool],
    plan: EmbeddingTile | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Sum the gradients of each row by atomic additions in float32; not deterministic."""
    V, D = weight.shape
    sums = torch.zeros((V, D), dtype=torch.float32, device=weight.device)
    if dy.numel():
        T = indices.numel()
        if plan is None:
            plan = TUNED["bwd_atomic"](
                weight.device, weight.dtype, (T, D),
                lambda plan: launch_backward_atomic(dy, indices, weight, padding_idx, needs, plan),
            )  # fmt: skip
        KERNELS["bwd_atomic"].launch(
            (ceil_div(T, plan.rows), ceil_div(D, plan.block_d)),
            (dy.contiguous(), indices.contiguous(), sums, T, V, D, padding_idx),
            constants(plan, D),
            num_warps=plan.num_warps,
        )
    return (sums.to(weight.dtype),)


def launch_backward_sorted(
    dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int, needs: Sequence[bool], chunk: int | None = None,
    into: Tensor | None = None, order: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor]:  # fmt: skip
    """Sum the gradients of each row in a fixed order, after torch's sort of the indices; few tokens are not sorted.

    `into` are contiguous rows to which the sums are added, in place of zeros; `order` is that sort if it is done.
    """
    V, D = weight.shape
    dweight = torch.zeros((V, D), dtype=weight.dtype, device=weight.device) if into is None else into
    if not dy.numel():
        return (dweight,)
    T = indices.numel()
    block_d = min(256, max(32, next_power_of_2(D)))
    blocks = ceil_div(D, block_d)
    dy = dy.contiguous()
    if chunk is None and into is None and T <= FEW:
        few = (dy, indices.contiguous(), dweight, T, V, D, padding_idx)
        KERNELS["bwd_few"].launch((T, blocks), few, {"FEW": FEW, "BLOCK_D": block_d}, num_warps=4)
        return (dweight,)
    if chunk is None:
        chunk = TUNED_CHUNK(
            weight.device, weight.dtype, (T, D),
            lambda chunk: launch_backward_sorted(dy, indices, weight, padding_idx, needs, chunk),
        )  # fmt: skip
    numbers, tokens = order or torch.sort(indices.reshape(-1), stable=True)
    chunks = ceil_div(T, chunk)
    parts = torch.empty((chunks, 2, D), dtype=torch.float32, device=weight.device)
    fixed, warps = {"CHUNK": chunk, "BLOCK_D": block_d, "ADDS": into is not None}, 1  # 16 bytes per thread
    args = (dy, numbers, tokens, dweight, parts, T, V, D, padding_idx)
    KERNELS["bwd"].launch((chunks, blocks), args, fixed, num_warps=warps)
    if chunks > 1:
        join = (numbers, dweight, parts, T, V, D, padding_idx)
        KERNELS["bwd_join"].launch((chunks - 1, blocks), join, fixed | {"AT_ONCE": AT_ONCE}, num_warps=warps)
    return (dweight,)


def _is_low(dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.bfloat16)


def _torch_equivalent(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    return torch.embedding(weight, indices, -1 if padding_idx is None else padding_idx % len(weight))


_cpu = CpuFastPath(_torch_equivalent, serves=lambda indices, weight, *_, **__: not _is_low(weight.dtype))


@_cpu
def embedding(indices: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
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
        ConfigError: padding_idx is out of range.
        IndexOutOfRange: on a CPU, an index is.
        TypeError: an argument is not a tensor.

    On a GPU indices are not checked, which would synchronize: one outside [0, V) reads no memory, gives a row of NaN
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
    """Raise IndexOutOfRange for an index out of range if the check is cheap: on the CPU, not while tracing."""
    if indices.device.type != "cpu" or torch.compiler.is_compiling() or not is_plain(indices) or not indices.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(indices))
    if low < 0 or high >= V:
        raise IndexOutOfRange(f"indices must be in [0, {V}), got {low if low < 0 else high}")


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
        if dy.numel() + weight.numel() >= _MANY_ELEMENTS:
            return (_bags(dy, indices, weight, padding_idx),)
        dy = dy.float()  # on a CPU torch adds in the dtype of dy
    dense = torch.ops.aten.embedding_dense_backward
    return (dense(dy, indices, weight.shape[0], padding_idx, False).to(weight.dtype),)


def _bags(dy: Tensor, indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """Return the gradient as sums of bags, by torch.embedding_bag: one bag of rows of dy per row of the table."""
    (V, D), numbers = weight.shape, indices.reshape(-1)
    begins = torch.zeros(V, dtype=torch.int64, device=dy.device)
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


def _cost(case: Case, *, backward: bool = False) -> Cost:
    """Return the cost of reading indices and rows and writing y, or backward of reading dy and writing the table."""
    rows, (V, D) = math.prod(case.options[1]), case.shape
    moved = rows * D + (V if backward else rows) * D
    return Cost(rows * case.options[0].itemsize + moved * case.dtype.itemsize, rows * D if backward else 0)


_fwd = triton_operation("embedding_fwd", launch_forward, _torch_forward, cost=_cost, differentiable=True)
_bwd = Operation(
    "embedding_bwd",
    (
        Implementation("triton", launch_backward_sorted, refuses=refuses_triton_kernel, own=True),
        Implementation(
            "triton-atomic", launch_backward_atomic, refuses=refuses_triton_kernel, own=True, deterministic=False
        ),
        Implementation("torch", _torch_backward),
    ),
    cost=functools.partial(_cost, backward=True),
)


def _case(indices: Tensor, weight: Tensor, *_: object) -> Case:
    return Case(weight.device, weight.dtype, weight.shape, (indices.dtype, indices.shape))


@_cpu.case
def _cpu_case(indices: Tensor, weight: Tensor, padding_idx: int) -> Case | None:
    """Return None where torch's gradient does not serve: without indices, and for large tables in low precision."""
    if not indices.numel() or not weight.numel():
        return None
    if _is_low(weight.dtype) and weight.requires_grad and torch.is_grad_enabled() and weight.numel() > _FEW_ELEMENTS:
        return None
    return _case(indices, weight)


class _Embedding(DifferentiableOp):
    def forward(self, *args: Any) -> Any:
        """Check the indices first."""
        _check_range(args[0], args[1].shape[0])
        return super().forward(*args)


_embedding = _Embedding(
    "embedding(Tensor indices, Tensor weight, int padding_idx) -> (Tensor y)",
    case=_case,
    backward=lambda dy, indices, weight, padding_idx, needs: _bwd(
        _case(indices, weight), dy, indices, weight, padding_idx, needs
    ),
    saves=("indices", "weight"),
    gradients={"weight": "weight"},
    composite=_torch_forward,
    composite_backward=_composite_backward,
    fake=lambda indices, weight, padding_idx: weight.new_empty((*indices.shape, weight.shape[1])),
    operation=_fwd,
    cpu=_cpu,
)
