"""The passes of linear_cross_entropy: a chunk of rows at a time from logits to gradients, in one buffer.

    logits = hidden W^T     dlogits over the logits     dhidden = dlogits W     dW += dlogits^T hidden, in float32

Source: the chunking is that of Hsu et al. 2024, arXiv:2410.10989, section 3.2; the products are the vendor's library's.
Bound:  the products, 6 M V K operations with gradients and 2 M V K without; beside them dW is read and written once a
        chunk, which is why chunks are large.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div
from accelerant.ops._per_example import Forming
from accelerant.ops.cross_entropy import launch, row
from accelerant.ops.cross_entropy.torch_ops import torch_rows
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["chunk_rows", "run_torch", "run_triton"]

CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
"""The most logits at a time, by type of device; or as many as the weight's gradient in float32 takes, which is read and
written once a chunk (4 of 38 ms at 8192 rows, 4096 columns and 128256 classes on an H200)."""

_ALIGNED = 64  # elements: rows of the buffer begin on 128-byte boundaries
_TILE = 256  # rows, of the largest tiles of products

_Gradients = tuple[Tensor | None, Tensor | None]
_Rows = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], None]


def chunk_rows(M: int, V: int, itemsize: int, limit: int) -> int:
    """How many rows to take at a time: chunks of about one size, whole tiles if there are several."""
    chunks = max(1, ceil_div(M * V * itemsize, limit))
    rows = max(1, ceil_div(M, chunks))
    if chunks == 1 or limit < V * itemsize * _TILE:
        return rows
    return min(M, ceil_div(rows, _TILE) * _TILE)


# --- products, each in the ledger ------------------------------------------------------------------------------------


def _accumulate(a: Tensor, b: Tensor, out: Tensor, first: bool) -> None:
    """Add a b to out, of a wider dtype maybe; the first time out has no meaning yet."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif a.is_cuda:
        if first:
            torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
        else:
            torch.ops.aten.addmm.dtype_out(out, a, b, out.dtype, out=out)
    elif (
        a.dtype == torch.bfloat16
    ):  # each chunk's sum is rounded; a product in float32 takes two to three times as long on a CPU with bfloat16
        out.copy_(torch.mm(a, b)) if first else out.add_(torch.mm(a, b))
    else:
        wide = a.to(out.dtype), b.to(out.dtype)
        torch.mm(*wide, out=out) if first else out.addmm_(*wide)


_matmul = Operation(
    "linear_cross_entropy_matmul",
    (Implementation("torch", _accumulate, mutates=True),),
    cost=lambda case: Cost(
        sum(a * b for a, b in zip(case.shape, (*case.shape[1:], case.shape[0]), strict=True)) * case.dtype.itemsize,
        2 * math.prod(case.shape),
    ),
)


def _product(a: Tensor, b: Tensor, out: Tensor, first: bool = True) -> None:
    """Write a b to out, or add it."""
    _matmul(Case(a.device, a.dtype, (a.shape[0], b.shape[1], a.shape[1])), a, b, out, first)


def _split(V: int) -> tuple[slice, ...]:
    """The classes in two parts, of which the first is a multiple of _ALIGNED and the second short.

    The library is slow for an odd size: with 50257 classes the three products of a chunk ran at 94, 132 and 432 TFLOP/s
    on an H200, with 50304 at 650 to 700.
    """
    even = V // _ALIGNED * _ALIGNED
    return tuple(part for part in (slice(0, even), slice(even, V)) if part.stop > part.start)


# --- chunks ----------------------------------------------------------------------------------------------------------


def _rows_at_once(hidden: Tensor, weight: Tensor) -> int:
    limit = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"])
    return chunk_rows(hidden.shape[0], weight.shape[0], hidden.element_size(), max(limit, 4 * weight.numel()))


def _chunks(hidden: Tensor, weight: Tensor, R: int) -> Iterator[tuple[slice, Tensor]]:
    """Each R rows and their logits, all in one buffer whose rows are aligned whatever V is."""
    (M, _), V = hidden.shape, weight.shape[0]
    buffer = torch.empty(R, ceil_div(V, _ALIGNED) * _ALIGNED, dtype=hidden.dtype, device=hidden.device)
    if hidden.device.type == "cpu":  # oneDNN's products of bfloat16 read one column past an odd V: NaN times 0 is NaN
        buffer[:, V:].zero_()
    for start in range(0, M, R):
        rows = slice(start, min(start + R, M))
        logits = buffer[: rows.stop - start, :V]
        for part in _split(V):
            _product(hidden[rows], weight[part].t(), logits[:, part])
        yield rows, logits


def _classes(logits: Tensor, classes: int | None) -> Tensor:
    """The logits of the classes; those of rows that are none become 0, which is their gradient."""
    if classes is None or classes == logits.shape[1]:
        return logits
    logits[:, classes:].zero_()
    return logits[:, :classes]


def _run(
    hidden: Tensor,
    weight: Tensor,
    needs: Sequence[bool],
    each: Callable[[slice, Tensor], None],
    narrow: bool = False,
    forming: Forming | None = None,
) -> _Gradients:
    """Let `each` turn every chunk's logits into their gradient, and make the gradients of hidden and weight of that.

    Returns:
        dhidden in the dtype of hidden, dweight in float32 (float64 for float64); None where not needed. If `narrow`,
        dweight in its own dtype where there is one chunk, so that nothing is rounded but the whole sum. With `forming`
        see _run_apart.
    """
    if forming is not None and needs[1]:
        return _run_apart(hidden, weight, needs, each, forming)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if narrow and _rows_at_once(hidden, weight) >= hidden.shape[0]:
        wide = weight.dtype
    dhidden = torch.empty_like(hidden) if needs[0] else None
    dweight = torch.empty(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
    for rows, logits in _chunks(hidden, weight, _rows_at_once(hidden, weight)):
        each(rows, logits)
        parts = _split(weight.shape[0])
        for part in reversed(parts):  # the short one first: what is rounded before the sum is then small
            if dhidden is not None:
                _product(logits[:, part], weight[part], dhidden[rows], first=part == parts[-1])
            if dweight is not None:
                _product(logits[:, part].t(), hidden[rows], dweight[part], first=rows.start == 0)
    if dweight is not None and not hidden.shape[0]:
        dweight.zero_()
    return dhidden, dweight


def _run_apart(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool], each: Callable[[slice, Tensor], None], forming: Forming
) -> _Gradients:
    """As _run, but the gradient of weight example by example; M / examples = T rows are one's.

    Returns:
        dhidden; and (examples, V, K) gradients in the dtype of weight, or where those are larger, T < K, the gradient
        of all logits, (M, V), which with hidden makes them up.
    """
    (M, K), V, examples = hidden.shape, weight.shape[0], forming.examples
    T = M // examples if examples else 0
    dhidden = torch.empty_like(hidden) if needs[0] else None
    formed = hidden.new_empty(examples, V, K) if T >= K else None
    at_once = M if formed is None else max(1, _rows_at_once(hidden, weight) // T) * T
    logits = hidden.new_empty(0, V)
    for rows, logits in _chunks(hidden, weight, at_once):
        each(rows, logits)
        if dhidden is not None:
            _product(logits, weight, dhidden[rows])
        if formed is not None:
            part = slice(rows.start // T, rows.stop // T)
            forming(part, hidden[rows].view(-1, T, K), logits.view(-1, T, V), formed[part])
    return dhidden, logits if formed is None else formed


def run_triton(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    needs: Sequence[bool],
    *,
    losses: Tensor | None = None,
    counts: Tensor | None = None,
    dy: Tensor | None = None,
    classes: int | None = None,
    narrow: bool = False,
    forming: Forming | None = None,
) -> _Gradients:
    """Losses, and the gradients of hidden and weight that are needed; on Hopper by row.cu where that serves.

    Args:
        hidden, weight: (M, K), (V, K), of one dtype; contiguous.
        targets: (M,), contiguous.
        needs: whether the gradients of hidden and of weight are.
        losses: (M,), written.
        counts: from cross_entropy's `count`: gradients are divided by their sum.
        dy: gradients are multiplied by it; a scalar or (M,).
        classes: how many rows of weight are classes, the first ones; None for all. The others get a gradient of 0.
        narrow: the gradient of weight may be of its dtype, as _run has it; of no effect here.
        forming: makes the gradient of weight, which is then as _run_apart has it.
    """
    gradient = any(needs)
    classes = weight.shape[0] if classes is None else classes
    on_chip = (
        gradient
        and dy is None
        and losses is not None
        and row.refuses(Case(hidden.device, hidden.dtype, (hidden.shape[0], classes), ("gradient",))) is None
    )

    def each(rows: slice, logits: Tensor) -> None:
        stride, logits = logits.stride(0), _classes(logits, classes)
        if on_chip and losses is not None:  # the latter for the type checker
            own = targets[rows], ignore_index, smoothing, losses[rows], statistics
            row.launch_row(logits, stride, *own, logits, stride, counts)
            return
        launch.launch_rows(
            logits, stride, targets[rows], ignore_index, smoothing,
            losses=None if losses is None else losses[rows], dx=logits if gradient else None,
            dx_stride=stride, counts=counts if gradient else None, dy=dy[rows] if dy is not None and dy.dim() else dy,
        )  # fmt: skip

    statistics = torch.empty(2, hidden.shape[0] if on_chip else 0, dtype=torch.float32, device=hidden.device)
    return _run(hidden, weight, needs, each, forming=forming)


def run_torch(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    needs: Sequence[bool],
    *,
    losses: Tensor | None = None,
    counts: Tensor | None = None,
    dy: Tensor | None = None,
    classes: int | None = None,
    narrow: bool = False,
    forming: Forming | None = None,
) -> _Gradients:
    """As run_triton, from torch's functions; with an effect of `narrow`."""
    gradient = any(needs)

    def each(rows: slice, logits: Tensor) -> None:
        logits = _classes(logits, classes)
        c = dy[rows] if dy is not None and dy.dim() else dy
        found = torch_rows(logits, targets[rows], ignore_index, smoothing, logits if gradient else None, counts, c)
        if losses is not None:
            losses[rows] = found

    return _run(hidden, weight, needs, each, narrow, forming)
