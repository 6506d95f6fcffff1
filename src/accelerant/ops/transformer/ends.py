"""The first and the last operation of a language model: the sum of embeddings, and the output layer's loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops._launch import ceil_div, triton_operation
from accelerant.ops._per_example import Forming
from accelerant.ops._refusals import refuses_triton_kernel
from accelerant.ops.cross_entropy.launch import count, reduce, scale_
from accelerant.ops.embedding import op as embedding
from accelerant.ops.linear_cross_entropy import chunks
from accelerant.ops.transformer.op import KERNELS
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

# --- embeddings ------------------------------------------------------------------------------------------------------


def _launch_embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of table (V, D) by tokens (B, T) plus rows of positions by index in the sequence: (B, T, D)."""
    (V, D), (B, T) = table.shape, tokens.shape
    y = torch.empty(B, T, D, dtype=dtype, device=table.device)
    if y.numel():
        plan = embedding.embedding_plan(D)
        KERNELS["embed"].launch(
            (ceil_div(B * T, plan.rows), ceil_div(D, plan.block_d)),
            (tokens.contiguous(), table.contiguous(), positions.contiguous(), y, B * T, V, D, T),
            embedding.constants(plan, D),
            num_warps=plan.num_warps,
        )
    return y


def _torch_embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    return (functional.embedding(tokens, table) + positions[: tokens.shape[1]]).to(dtype)


def _add_atomic(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    (V, D), T = dtable.shape, tokens.numel()
    if not T or not D:
        return
    plan = embedding.embedding_plan(D)
    grid = (ceil_div(T, plan.rows), ceil_div(D, plan.block_d))
    args = (dy.contiguous(), tokens.contiguous(), dtable, T, V, D, -1)
    embedding.KERNELS["bwd_atomic"].launch(grid, args, embedding.constants(plan, D), num_warps=plan.num_warps)


def _add_sorted(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    dtable += embedding.launch_backward_sorted(dy, tokens, dtable, -1, (True,))[0]


def _add_torch(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    dtable.index_add_(0, tokens.reshape(-1), dy.reshape(-1, dtable.shape[1]).to(dtable.dtype))


def _refuses_atomic(case: Case) -> str | None:
    return refuses_triton_kernel(case) or (None if "float32" in case.options else "adds to float32")


def _embed_case(tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Case:
    return Case(table.device, dtype, (tokens.numel(), *table.shape), (str(table.dtype).removeprefix("torch."),))


def _embed_cost(case: Case) -> Cost:
    elements = case.shape[0] * case.shape[2]
    return Cost(elements * (8 + case.dtype.itemsize), elements)


_embed_fwd = triton_operation("embed_fwd", _launch_embed, _torch_embed, cost=_embed_cost)
_embed_bwd = Operation(
    "embed_bwd",
    (
        Implementation(
            "triton-atomic", _add_atomic, refuses=_refuses_atomic, own=True, deterministic=False, mutates=True
        ),
        Implementation("triton", _add_sorted, refuses=refuses_triton_kernel, own=True, mutates=True),
        Implementation("torch", _add_torch, mutates=True),
    ),
    cost=_embed_cost,
)


def embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the first T rows of positions to the rows of table (V, D) that tokens (B, T) select, rounded once."""
    return _embed_fwd(_embed_case(tokens, table, dtype), tokens, table, positions, dtype)


def embed_backward(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    """Add the rows of dy (B, T, D) to the rows of dtable (V, D) that tokens select."""
    _embed_bwd(_embed_case(tokens, dtable, dy.dtype), dy, tokens, dtable)


# --- the output layer's loss -----------------------------------------------------------------------------------------


def _tied_loss(
    hidden: Tensor, table: Tensor, targets: Tensor, classes: int, ignore_index: int, needs: Sequence[bool],
    forming: Forming | None, own: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    losses = torch.empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    counts = count(targets, ignore_index) if own else (targets != ignore_index).sum()
    dhidden, dtable = chunks.run(
        hidden, table, targets, ignore_index, 0.0, needs,
        own=own, losses=losses, counts=counts, classes=classes, forming=forming,
    )  # fmt: skip
    loss = reduce(losses, counts, losses.dtype) if own else losses.sum() / counts.sum()
    return loss, dhidden, dtable


_tied_loss_fwd = triton_operation(
    "tied_loss_fwd",
    partial(_tied_loss, own=True),
    partial(_tied_loss, own=False),
    cost=lambda case: Cost(3 * sum(case.shape[:2]) * case.shape[2] * case.dtype.itemsize, 6 * math.prod(case.shape)),
)


def tied_loss(
    hidden: Tensor, table: Tensor, targets: Tensor, classes: int, ignore_index: int, needs: Sequence[bool],
    forming: Forming | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the mean cross entropy of hidden (M, K) times table (V, K) transposed, and its gradients.

    Args:
        hidden, table: of one dtype, contiguous.
        targets: (M,), contiguous.
        classes: number of rows of table that are classes, the first ones; the others get a gradient of 0.
        ignore_index: rows with this target are excluded.
        needs: whether the gradients of hidden and of table are required.
        forming: forms per-example gradients of the table; an example has M / examples rows.

    Returns:
        the loss, in float32 or better; dhidden in the dtype of hidden and dtable in float32, None if not required.
        With `forming`, as in accelerant.ops.linear_cross_entropy.chunks.
    """
    required = tuple(name for name, need in zip(("hidden", "table"), needs, strict=True) if need)
    case = Case(hidden.device, hidden.dtype, (hidden.shape[0], *table.shape), required)
    return _tied_loss_fwd(case, hidden, table, targets, classes, ignore_index, needs, forming)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x by a scalar in place; on a GPU, a factor of 1 costs nothing."""
    if x.dtype == torch.float64 or refuses_triton(x.device) is not None:
        return x.mul_(factor)
    return scale_(x, factor)
