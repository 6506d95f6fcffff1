"""Launches of clipping's kernels, and the same from torch's functions: norms, weighted sums, weighted factors.

Each is an Operation, so that the ledger has it. On a CPU torch's functions are called straight: an Operation's 4 us are
much beside a small layer's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.ops.transformer.ends import embed_backward
from accelerant.privacy.dp.clipping import hopper, norms
from accelerant.privacy.dp.clipping.norms import chunks
from accelerant.runtime.compilation.triton import TritonKernel, interpreting, refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["KERNELS", "add_rows_", "clear_", "cleared", "form", "ghost_squares", "scaled", "squares", "weighted_sum"]

_NAMES = ("squares", "sum", "scale", "clear", "ghost")
KERNELS = {name: TritonKernel("accelerant.privacy.dp.clipping.triton_kernels", f"clip_{name}") for name in _NAMES}

SPAN, BLOCK = 16384, 2048
"""Values of an example that a program of squares, scale and clear takes, and at a time: 16 a thread of 4 warps."""

SUM_BLOCK, SUM_WIDE = 1024, 1 << 18
"""Values that a program of sum takes of each example; an eighth of so few that the device would not be full."""


def _plain(x: Tensor) -> bool:
    return x.device.type == "cpu" and not interpreting()


def _refuses(case: Case) -> str | None:
    if case.dtype == torch.float64:
        return "computes in float32, not float64"
    return refuses_triton(case.device)


def _operation(name: str, ours: object, theirs: object, accesses: float, *, mutates: bool = False) -> Operation:
    """Bound by memory: so many accesses of each value."""
    implementations = (
        Implementation("triton", ours, refuses=_refuses, own=True, mutates=mutates),  # type: ignore[arg-type]  # both are callables
        Implementation("torch", theirs, mutates=mutates),  # type: ignore[arg-type]  # as above
    )

    def cost(case: Case) -> Cost:
        count = math.prod(case.shape)
        return Cost(int(accesses * count * case.dtype.itemsize), 2 * count)

    return Operation(name, implementations, cost=cost)


def _case(x: Tensor) -> Case:
    return Case(x.device, x.dtype, x.shape)


def _grid(x: Tensor) -> tuple[int, int]:
    """Values of an example, and into how many spans they fall."""
    P = x[0].numel()
    return P, ceil_div(P, SPAN)


# --- norms -----------------------------------------------------------------------------------------------------------


def _own_squares(x: Tensor) -> Tensor:
    B = x.shape[0]
    if not x.numel():
        return x.new_zeros(B, dtype=torch.float32)
    P, spans = _grid(x)
    parts = torch.empty(B, spans, dtype=torch.float32, device=x.device)
    KERNELS["squares"].launch((B * spans,), (x.contiguous(), parts, P, spans), {"SPAN": SPAN, "BLOCK": BLOCK})
    return parts.sum(1) if spans > 1 else parts.view(B)


_squares = _operation("clip_squares", _own_squares, norms.squares, 1)


def squares(x: Tensor) -> Tensor:
    """The sum of squares of each x[i], (B, ...) to (B,), in float32 or better."""
    if _plain(x):
        return norms.squares(x)
    found: Tensor = _squares(_case(x), x)
    return found


def _own_ghost(a: Tensor, g: Tensor) -> Tensor:
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


_ghost = Operation(
    "clip_ghost",
    (
        Implementation("triton", _own_ghost, refuses=_refuses, own=True),
        Implementation("torch", norms.ghost_squares),
    ),
    cost=lambda case: Cost(
        case.shape[0] * case.shape[1] * (case.shape[2] + case.shape[3]) * case.dtype.itemsize,
        2 * case.shape[0] * case.shape[1] ** 2 * (case.shape[2] + case.shape[3]),
    ),
)


def ghost_squares(a: Tensor, g: Tensor) -> Tensor:
    """The squared norm of each g_i^T a_i, (B,), without forming it: a (B, T, K), g (B, T, N)."""
    if _plain(a) or a.shape[1] == 1:
        return norms.ghost_squares(a, g)
    found: Tensor = _ghost(Case(a.device, a.dtype, (*a.shape, g.shape[2])), a, g)
    return found


def _own_form(a: Tensor, g: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    each, parts = hopper.launch_form(a, g, out)
    return each, parts.sum(1)


def _torch_form(a: Tensor, g: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    each = torch.bmm(g.mT, a) if out is None else torch.bmm(g.mT, a, out=out)
    return each, squares(each)


def _form_cost(case: Case) -> Cost:
    B, T, K, N = case.shape
    return Cost(B * (T * (K + N) + N * K) * case.dtype.itemsize, 2 * B * T * N * K)


_form = Operation(
    "clip_form",
    (Implementation("hopper", _own_form, refuses=hopper.refuses, own=True), Implementation("torch", _torch_form)),
    cost=_form_cost,
)


def form(a: Tensor, g: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Each g_i^T a_i, (B, N, K) in the factors' dtype, and the squared norms of these rounded values, (B,).

    All at once: to form a part and take its norm while it is in a cache of 50 MiB made a step 1% slower on an H200.

    Args:
        a: (B, T, K) inputs.
        g: (B, T, N) gradients of the outputs.
        out: contiguous memory for them; None for new.
    """
    if _plain(a):
        return _torch_form(a, g, out)
    found: tuple[Tensor, Tensor] = _form(Case(a.device, a.dtype, (*a.shape, g.shape[2])), a, g, out)
    return found


# --- sums ------------------------------------------------------------------------------------------------------------


def _own_sum(each: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None) -> Tensor:
    B, y = each.shape[0], into
    if not each.numel():
        return torch.zeros(each.shape[1:], dtype=torch.float32, device=each.device) if y is None else y
    if y is None:
        y = torch.empty(each.shape[1:], dtype=torch.float32, device=each.device)
    P = y.numel()
    constants = {"ADDS": into is not None, "BLOCK_P": SUM_BLOCK if P >= SUM_WIDE else SUM_BLOCK // 8, "UNROLL": 8}
    KERNELS["sum"].launch(
        (ceil_div(P, constants["BLOCK_P"]),), (each.contiguous(), weights.float(), y, B, P), constants
    )
    return y


def _torch_sum(each: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None = None) -> Tensor:
    if into is not None:
        return into.add_(_torch_sum(each, weights, drop))
    B, P = each.shape[0], each.shape[1:].numel()
    rows = cleared(each, drop).reshape(B, P)
    if rows.dtype == weights.dtype:
        return torch.mv(rows.t(), weights).view(each.shape[1:])
    found = torch.zeros(P, dtype=weights.dtype, device=rows.device)
    for part in chunks(B, P):
        found.addmv_(rows[part].to(weights.dtype).t(), weights[part])
    return found.view(each.shape[1:])


_sum = _operation("clip_sum", _own_sum, _torch_sum, 1)


def weighted_sum(each: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None = None) -> Tensor:
    """The sum over i of weights[i] each[i], (B, ...) to (...), in the dtype of weights.

    Args:
        each: per-example gradients.
        weights: (B,), float32 or better; 0 where drop is.
        drop: (B,) bool, examples that add exactly 0 whatever they hold; None for none.
        into: dense, float32, of as many elements as each example: the sum is added there, and it is returned.
    """
    if _plain(each):
        return _torch_sum(each, weights, drop, into)
    found: Tensor = _sum(_case(each), each, weights, drop, into)
    return found


def add_rows_(table: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Add rows (..., D) to those of table (V, D) that tokens (...) name, in place."""
    if _plain(table) or table.dtype == torch.float64:
        wide_rows = rows.reshape(-1, table.shape[1]).to(table.dtype)
        return table.index_add_(0, tokens.reshape(-1), wide_rows)
    embed_backward(rows, tokens, table)
    return table


def _own_scale(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        P, spans = _grid(x)
        args = (x.contiguous(), weights.float(), y, P, spans)
        KERNELS["scale"].launch((x.shape[0] * spans,), args, {"SPAN": SPAN, "BLOCK": BLOCK})
    return y


def _torch_scale(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    shape = (-1, *([1] * (x.dim() - 1)))
    y = x * weights.view(shape)
    if drop is not None:
        y.masked_fill_(drop.view(shape), 0)
    return y.to(dtype)


_scale = _operation("clip_scale", _own_scale, _torch_scale, 2)


def scaled(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Multiply x (B, ...) by weights (B,), in a dtype; exactly 0 where drop is, also where x is not finite."""
    if _plain(x):
        return _torch_scale(x, weights, drop, dtype)
    found: Tensor = _scale(_case(x), x, weights, drop, dtype)
    return found


def cleared(x: Tensor, drop: Tensor | None) -> Tensor:
    """A copy of x (B, ...), but 0 where drop is: 0 times what is not finite would not be."""
    return x if drop is None else x.masked_fill(drop.view(-1, *([1] * (x.dim() - 1))), 0)


def _own_clear(x: Tensor, drop: Tensor) -> Tensor:
    if not x.is_contiguous():
        return cleared(x, drop)
    if x.numel():
        P, spans = _grid(x)
        args = (x, drop.view(torch.uint8), P, spans)
        KERNELS["clear"].launch((x.shape[0] * spans,), args, {"SPAN": SPAN, "BLOCK": BLOCK})
    return x


_clear = _operation("clip_clear", _own_clear, cleared, 0, mutates=True)


def clear_(x: Tensor, drop: Tensor | None) -> Tensor:
    """The same, in place where a kernel serves: nothing is moved where nothing is dropped."""
    if drop is None or _plain(x):
        return cleared(x, drop)
    found: Tensor = _clear(_case(x), x, drop)
    return found
