"""linear_cross_entropy in chunks of rows: logits, loss and gradients of a chunk share one buffer.

    logits = hidden W^T     dlogits over the logits     dhidden = dlogits W     dW += dlogits^T hidden, in float32

Source: chunking as in Hsu et al. 2024, arXiv:2410.10989, section 3.2; the products are the vendor library's.
Bound:  the products, 6 M V K flops with gradients and 2 M V K without. dW is read and written once per chunk, which is
        why chunks are large.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from accelerant.ops._launch import add_product, ceil_div, product_cost
from accelerant.ops._per_example import Forming
from accelerant.ops.cross_entropy import hopper, launch
from accelerant.ops.cross_entropy.torch_ops import torch_rows
from accelerant.runtime.dispatch import Case, Implementation, Operation

CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
"""Limit of a chunk's logits by device type. A chunk may also take as much memory as the weight's float32 gradient,
which is read and written once per chunk (4 of 38 ms at 8192 rows, 4096 columns, 128256 classes on an H200)."""

_ALIGNED = 64  # elements: rows of the buffer begin on 128-byte boundaries
_TILE = 256  # rows of the largest tiles of the products

_Gradients = tuple[Tensor | None, Tensor | None]


def chunk_rows(M: int, V: int, itemsize: int, limit: int) -> int:
    """Return the rows per chunk: chunks of about equal size, of whole tiles if there are several."""
    chunks = max(1, ceil_div(M * V * itemsize, limit))
    rows = max(1, ceil_div(M, chunks))
    if chunks == 1 or limit < V * itemsize * _TILE:
        return rows
    return min(M, ceil_div(rows, _TILE) * _TILE)


# --- products, counted in the ledger ---------------------------------------------------------------------------------


def _accumulate(a: Tensor, b: Tensor, out: Tensor, first: bool) -> None:
    """Add a b to out, which may have a wider dtype; `first` overwrites out."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out) if first else out.addmm_(a, b)
    elif a.is_cuda:
        if first:
            torch.ops.aten.mm.dtype_out(a, b, out.dtype, out=out)
        else:
            add_product(out, a, b)
    elif a.dtype == torch.bfloat16:  # on a CPU a float32 product takes 2 to 3 times as long; each chunk is rounded
        out.copy_(torch.mm(a, b)) if first else out.add_(torch.mm(a, b))
    else:
        wide = a.to(out.dtype), b.to(out.dtype)
        torch.mm(*wide, out=out) if first else out.addmm_(*wide)


_matmul = Operation(
    "linear_cross_entropy_matmul", (Implementation("torch", _accumulate, mutates=True),), cost=product_cost
)


def _product(a: Tensor, b: Tensor, out: Tensor, first: bool = True) -> None:
    """Write a b to out, or add it."""
    _matmul(Case(a.device, a.dtype, (a.shape[0], b.shape[1], a.shape[1])), a, b, out, first)


def _split(V: int) -> tuple[slice, ...]:
    """Return the classes in two parts, the first a multiple of _ALIGNED and the second short.

    The library is slow for odd sizes: on an H200 the three products of a chunk ran at 94, 132 and 432 TFLOP/s with
    50257 classes, at 650 to 700 with 50304.
    """
    even = V // _ALIGNED * _ALIGNED
    return tuple(part for part in (slice(0, even), slice(even, V)) if part.stop > part.start)


# --- chunks ----------------------------------------------------------------------------------------------------------


def _chunk_size(hidden: Tensor, weight: Tensor) -> int:
    limit = CHUNK_BYTES.get(hidden.device.type, CHUNK_BYTES["cpu"])
    return chunk_rows(hidden.shape[0], weight.shape[0], hidden.element_size(), max(limit, 4 * weight.numel()))


def _chunks(hidden: Tensor, weight: Tensor, R: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of R rows and their logits, all in one buffer whose rows are aligned for any V."""
    (M, _), V = hidden.shape, weight.shape[0]
    buffer = torch.empty(R, ceil_div(V, _ALIGNED) * _ALIGNED, dtype=hidden.dtype, device=hidden.device)
    if hidden.device.type == "cpu":  # oneDNN's bfloat16 products read one column past an odd V, and NaN times 0 is NaN
        buffer[:, V:].zero_()
    for start in range(0, M, R):
        rows = slice(start, min(start + R, M))
        logits = buffer[: rows.stop - start, :V]
        for part in _split(V):
            _product(hidden[rows], weight[part].t(), logits[:, part])
        yield rows, logits


def _classes(logits: Tensor, classes: int) -> Tensor:
    """Return the first `classes` columns of the logits, and zero the others, which is their gradient."""
    if classes == logits.shape[1]:
        return logits
    logits[:, classes:].zero_()
    return logits[:, :classes]


def _run(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool], to_gradient: Callable[[slice, Tensor], None],
    narrow: bool = False, forming: Forming | None = None,
) -> _Gradients:  # fmt: skip
    """Replace each chunk's logits by their gradient, by `to_gradient`, and compute dhidden and dweight.

    Returns:
        dhidden in the dtype of hidden, dweight in float32 (float64 for float64); None if not needed. With `narrow` and
        a single chunk dweight has its own dtype, since only the whole sum is rounded. For `forming` see
        _run_per_example.
    """
    if forming is not None and needs[1]:
        return _run_per_example(hidden, weight, needs, to_gradient, forming)
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if narrow and _chunk_size(hidden, weight) >= hidden.shape[0]:
        wide = weight.dtype
    dhidden = torch.empty_like(hidden) if needs[0] else None
    dweight = torch.empty(weight.shape, dtype=wide, device=weight.device) if needs[1] else None
    for rows, logits in _chunks(hidden, weight, _chunk_size(hidden, weight)):
        to_gradient(rows, logits)
        parts = _split(weight.shape[0])
        for part in reversed(parts):  # the short part first, so that the rounded partial result is small
            if dhidden is not None:
                _product(logits[:, part], weight[part], dhidden[rows], first=part == parts[-1])
            if dweight is not None:
                _product(logits[:, part].t(), hidden[rows], dweight[part], first=rows.start == 0)
    if dweight is not None and not hidden.shape[0]:
        dweight.zero_()
    return dhidden, dweight


def _run_per_example(
    hidden: Tensor, weight: Tensor, needs: Sequence[bool], to_gradient: Callable[[slice, Tensor], None],
    forming: Forming,
) -> _Gradients:  # fmt: skip
    """Compute _run with a gradient of weight for each example, which has T = M / examples rows.

    Returns:
        dhidden; and the (examples, V, K) gradients in the dtype of weight, or if T < K, where those are larger, the
        gradient (M, V) of all logits, which with hidden determines them.
    """
    (M, K), V, examples = hidden.shape, weight.shape[0], forming.examples
    T = M // examples if examples else 0
    dhidden = torch.empty_like(hidden) if needs[0] else None
    formed = hidden.new_empty(examples, V, K) if T >= K else None
    R = M if formed is None else max(1, _chunk_size(hidden, weight) // T) * T
    logits = hidden.new_empty(0, V)
    for rows, logits in _chunks(hidden, weight, R):
        to_gradient(rows, logits)
        if dhidden is not None:
            _product(logits, weight, dhidden[rows])
        if formed is not None:
            part = slice(rows.start // T, rows.stop // T)
            forming(part, hidden[rows].view(-1, T, K), logits.view(-1, T, V), formed[part])
    return dhidden, logits if formed is None else formed


def run(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, smoothing: float, needs: Sequence[bool], *,
    own: bool, losses: Tensor | None = None, counts: Tensor | None = None, dy: Tensor | None = None,
    classes: int | None = None, narrow: bool = False, forming: Forming | None = None,
) -> _Gradients:  # fmt: skip
    """Compute the losses, and the gradients of hidden and weight that are needed.

    Args:
        hidden, weight: (M, K), (V, K), of one dtype; contiguous.
        targets: (M,), contiguous.
        ignore_index, smoothing: as the op's.
        needs: whether the gradients of hidden and of weight are needed.
        own: compute losses and gradients of the logits by our kernels instead of torch's functions.
        losses: (M,), written.
        counts: from cross_entropy's `count`: gradients are divided by their sum.
        dy: the upstream gradient, a scalar or (M,).
        classes: the first rows of weight that are classes; None for all. The others get a gradient of 0.
        narrow: allow a gradient of weight in its dtype, see _run; our kernels ignore it.
        forming: computes per-example gradients of weight, see _run_per_example.
    """
    gradient = any(needs)
    classes = weight.shape[0] if classes is None else classes
    case = Case(hidden.device, hidden.dtype, (hidden.shape[0], classes), ("gradient",))
    by_hopper = own and gradient and dy is None and losses is not None and hopper.refuses(case) is None
    statistics = torch.empty(2, hidden.shape[0] if by_hopper else 0, dtype=torch.float32, device=hidden.device)

    def to_gradient(rows: slice, logits: Tensor) -> None:
        stride, logits = logits.stride(0), _classes(logits, classes)
        dx = logits if gradient else None
        dy_rows = dy[rows] if dy is not None and dy.dim() else dy
        row_losses = None if losses is None else losses[rows]
        if not own:
            chunk_losses = torch_rows(logits, targets[rows], ignore_index, smoothing, dx, counts, dy_rows)
            if row_losses is not None:
                row_losses.copy_(chunk_losses)
        elif by_hopper and row_losses is not None:  # the latter for the type checker
            hopper.launch_rows(
                logits, stride, targets[rows], ignore_index, smoothing,
                losses=row_losses, statistics=statistics, dx=logits, dx_stride=stride, counts=counts,
            )  # fmt: skip
        else:
            launch.launch_rows(
                logits, stride, targets[rows], ignore_index, smoothing, losses=row_losses, dx=dx, dx_stride=stride,
                counts=counts if gradient else None, dy=dy_rows,
            )  # fmt: skip

    return _run(hidden, weight, needs, to_gradient, narrow and not own, forming)
