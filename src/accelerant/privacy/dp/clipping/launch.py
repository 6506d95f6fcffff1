"""Norms, weighted sums and weighted factors of per-example gradients: torch's functions and launches of our kernels.

Each is an Operation, so that the ledger of ops records it. On a CPU torch's functions are called directly: an
Operation takes 4 us, much next to a small layer's time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from accelerant.ops._launch import accesses, ceil_div, next_power_of_2, triton_operation
from accelerant.ops.transformer.ends import embed_backward
from accelerant.privacy.dp.clipping import hopper
from accelerant.runtime.compilation.triton import TritonKernel, interpreting
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = [
    "KERNELS", "add_rows_", "chunks", "clear_", "cleared", "form", "ghost_squares", "scaled", "squares",
    "torch_squares", "weighted_sum", "wide",
]  # fmt: skip

_NAMES = ("squares", "sum", "scale", "clear", "ghost")
KERNELS = {name: TritonKernel("accelerant.privacy.dp.clipping.triton_kernels", f"clip_{name}") for name in _NAMES}

SPAN, BLOCK = 16384, 2048
"""Values of an example per program of squares, scale and clear, and per iteration: 16 a thread of 4 warps."""

SUM_BLOCK, SUM_WIDE = 1024, 1 << 18
"""Columns per program of sum; an eighth of that where there are too few columns to fill the device."""

_CHUNK_BYTES = 64 << 20
"""Memory limit for temporaries of shape (B, T, T)."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms and sums accumulate in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(B: int, elements: int) -> Iterator[slice]:
    """Split B examples of `elements` float32 values each into slices of at most 64 MiB."""
    count = max(1, _CHUNK_BYTES // max(1, 4 * elements))
    for start in range(0, B, count):
        yield slice(start, min(B, start + count))


def _direct(x: Tensor) -> bool:
    return x.device.type == "cpu" and not interpreting()


def _run(operation: Operation, x: Tensor, *args: Any) -> Tensor:
    y: Tensor = operation(Case(x.device, x.dtype, x.shape), x, *args)
    return y


def _spans(x: Tensor) -> tuple[int, int]:
    """Return the number of values of an example, and of spans that hold them."""
    P = x[0].numel()
    return P, ceil_div(P, SPAN)


# --- norms -----------------------------------------------------------------------------------------------------------


def torch_squares(x: Tensor) -> Tensor:
    """Compute `squares` by torch's functions.

    By the last dimension first: on a CPU one running sum over 65536 values was wrong by 1e-5, a product with itself
    took eight times as long.
    """
    if x.dim() == 1:
        return x.to(wide(x.dtype)).square()
    sums: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=wide(x.dtype)).square_()
    return sums.flatten(1).sum(1) if sums.dim() > 1 else sums


def _triton_squares(x: Tensor) -> Tensor:
    B = x.shape[0]
    if not x.numel():
        return x.new_zeros(B, dtype=torch.float32)
    P, spans = _spans(x)
    parts = torch.empty(B, spans, dtype=torch.float32, device=x.device)
    KERNELS["squares"].launch((B * spans,), (x.contiguous(), parts, P, spans), {"SPAN": SPAN, "BLOCK": BLOCK})
    return parts.sum(1) if spans > 1 else parts.view(B)


_squares = triton_operation("clip_squares", _triton_squares, torch_squares, cost=accesses(1, 2))


def squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each x[i], (B, ...) to (B,), in float32 or better."""
    return torch_squares(x) if _direct(x) else _run(_squares, x)


def _row_products(a: Tensor) -> Tensor:
    """Return each a[i] a[i]^T, (B, T, K) to (B, T, T), in float32 or better."""
    if a.dtype == wide(a.dtype):
        return torch.bmm(a, a.mT)
    if a.is_cuda and torch.version.hip is None:
        return torch.bmm(a, a.mT, out_dtype=torch.float32)
    return torch.bmm(a.float(), a.float().mT)


def _torch_ghost(a: Tensor, g: Tensor) -> Tensor:
    B, T, _ = a.shape
    if T == 1:
        return torch_squares(a) * torch_squares(g)
    sums = torch.empty(B, dtype=wide(a.dtype), device=a.device)
    for part in chunks(B, 2 * T * T):
        torch.sum(_row_products(a[part]).mul_(_row_products(g[part])), (1, 2), out=sums[part])
    return sums.clamp_(min=0)  # rounding can take a value near 0 below it


def _triton_ghost(a: Tensor, g: Tensor) -> Tensor:
    (B, T, K), N = a.shape, g.shape[2]
    if not (a.numel() and g.numel()):
        return a.new_zeros(B, dtype=torch.float32)
    low = a.dtype != torch.float32
    block = min(128 if low else 64, max(16, next_power_of_2(T)))
    tiles = ceil_div(T, block)
    parts = torch.empty(B, tiles * tiles, dtype=torch.float32, device=a.device)
    constants = {"BLOCK_T": block, "BLOCK_K": 64 if low else 32, "WIDEN": not a.is_cuda}
    args = (a.contiguous(), g.contiguous(), parts, T, K, N, tiles)
    KERNELS["ghost"].launch((B, tiles * tiles), args, constants, num_warps=8 if block == 128 else 4)
    return parts.sum(1).clamp_(min=0)


def _ghost_cost(case: Case) -> Cost:
    B, T, K, N = case.shape
    return Cost(B * T * (K + N) * case.dtype.itemsize, 2 * B * T**2 * (K + N))


_ghost = triton_operation("clip_ghost", _triton_ghost, _torch_ghost, cost=_ghost_cost)


def ghost_squares(a: Tensor, g: Tensor) -> Tensor:
    """Return the squared norm of each g_i^T a_i, (B,), without forming it: a (B, T, K), g (B, T, N)."""
    if _direct(a) or a.shape[1] == 1:
        return _torch_ghost(a, g)
    sums: Tensor = _ghost(Case(a.device, a.dtype, (*a.shape, g.shape[2])), a, g)
    return sums


def _hopper_form(a: Tensor, g: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    products, parts = hopper.launch_form(a, g, out)
    return products, parts.sum(1)


def _torch_form(a: Tensor, g: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    products = torch.bmm(g.mT, a) if out is None else torch.bmm(g.mT, a, out=out)
    return products, squares(products)


def _form_cost(case: Case) -> Cost:
    B, T, K, N = case.shape
    return Cost(B * (T * (K + N) + N * K) * case.dtype.itemsize, 2 * B * T * N * K)


_form = Operation(
    "clip_form",
    (Implementation("hopper", _hopper_form, refuses=hopper.refuses, own=True), Implementation("torch", _torch_form)),
    cost=_form_cost,
)


def form(a: Tensor, g: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each g_i^T a_i, (B, N, K) in the factors' dtype, and the squared norms of these rounded values, (B,).

    All at once: to form a part and take its norm while it is in a cache of 50 MiB made a step 1% slower on an H200.

    Args:
        a: (B, T, K) inputs.
        g: (B, T, N) gradients of the outputs.
        out: contiguous memory for the products; None for new.
    """
    if _direct(a):
        return _torch_form(a, g, out)
    formed: tuple[Tensor, Tensor] = _form(Case(a.device, a.dtype, (*a.shape, g.shape[2])), a, g, out)
    return formed


# --- sums ------------------------------------------------------------------------------------------------------------


def _triton_sum(x: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None) -> Tensor:
    if not x.numel():
        return torch.zeros(x.shape[1:], dtype=torch.float32, device=x.device) if into is None else into
    y = torch.empty(x.shape[1:], dtype=torch.float32, device=x.device) if into is None else into
    B, P = x.shape[0], y.numel()
    block = SUM_BLOCK if P >= SUM_WIDE else SUM_BLOCK // 8
    args = (x.contiguous(), weights.float(), y, B, P)
    KERNELS["sum"].launch((ceil_div(P, block),), args, {"ADDS": into is not None, "BLOCK_P": block, "UNROLL": 8})
    return y


def _torch_sum(x: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None = None) -> Tensor:
    if into is not None:
        return into.add_(_torch_sum(x, weights, drop))
    B, P = x.shape[0], x.shape[1:].numel()
    rows = cleared(x, drop).reshape(B, P)
    if rows.dtype == weights.dtype:
        return torch.mv(rows.t(), weights).view(x.shape[1:])
    total = torch.zeros(P, dtype=weights.dtype, device=rows.device)
    for part in chunks(B, P):
        total.addmv_(rows[part].to(weights.dtype).t(), weights[part])
    return total.view(x.shape[1:])


_sum = triton_operation("clip_sum", _triton_sum, _torch_sum, cost=accesses(1, 2))


def weighted_sum(x: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Return the sum over i of weights[i] x[i], (B, ...) to (...), in the dtype of weights.

    Args:
        x: per-example gradients.
        weights: (B,), float32 or better; 0 where drop is true.
        drop: (B,) bool: examples that add exactly 0, even if they hold NaN; None for none.
        into: dense, float32, of as many elements as each example: the sum is added to it, and it is returned.
    """
    return _torch_sum(x, weights, drop, into) if _direct(x) else _run(_sum, x, weights, drop, into)


def add_rows_(table: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Add rows (..., D) to the rows of table (V, D) with the indices tokens (...), in place."""
    if _direct(table) or table.dtype == torch.float64:
        return table.index_add_(0, tokens.reshape(-1), rows.reshape(-1, table.shape[1]).to(table.dtype))
    embed_backward(rows, tokens, table)
    return table


def _broadcast(each: Tensor, x: Tensor) -> Tensor:
    """View one value per example as a tensor that broadcasts over x (B, ...)."""
    return each.view(-1, *([1] * (x.dim() - 1)))


def _triton_scale(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        P, spans = _spans(x)
        args = (x.contiguous(), weights.float(), y, P, spans)
        KERNELS["scale"].launch((x.shape[0] * spans,), args, {"SPAN": SPAN, "BLOCK": BLOCK})
    return y


def _torch_scale(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = x * _broadcast(weights, x)
    if drop is not None:
        y.masked_fill_(_broadcast(drop, x), 0)
    return y.to(dtype)


_scale = triton_operation("clip_scale", _triton_scale, _torch_scale, cost=accesses(2, 2))


def scaled(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x (B, ...) times weights (B,) in a dtype; exactly 0 where drop is true, also where x is not finite."""
    return _torch_scale(x, weights, drop, dtype) if _direct(x) else _run(_scale, x, weights, drop, dtype)


def cleared(x: Tensor, drop: Tensor | None) -> Tensor:
    """Return x (B, ...) with 0 where drop is true: 0 times a value that is not finite would not be 0."""
    return x if drop is None else x.masked_fill(_broadcast(drop, x), 0)


def _triton_clear(x: Tensor, drop: Tensor) -> Tensor:
    if not x.is_contiguous():
        return cleared(x, drop)
    if x.numel():
        P, spans = _spans(x)
        args = (x, drop.view(torch.uint8), P, spans)
        KERNELS["clear"].launch((x.shape[0] * spans,), args, {"SPAN": SPAN, "BLOCK": BLOCK})
    return x


_clear = triton_operation("clip_clear", _triton_clear, cleared, cost=accesses(0, 2), mutates=True)


def clear_(x: Tensor, drop: Tensor | None) -> Tensor:
    """Apply `cleared`, in place where a kernel runs: examples that are kept are neither read nor written."""
    return cleared(x, drop) if drop is None or _direct(x) else _run(_clear, x, drop)
