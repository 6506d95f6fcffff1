"""linear_cross_entropy: reference, implementations, the public function, and the registration with torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath
from accelerant.ops._launch import add_product, ceil_div, product_cost, triton_operation
from accelerant.ops._library import autocast_dtype, check_dtype, name_of, rows_of
from accelerant.ops._per_example import Forming
from accelerant.ops.cross_entropy import (
    LossOp,
    check_loss,
    check_targets,
    cross_entropy_reference,
    launch,
    torch_composite,
    torch_rows,
)
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["linear_cross_entropy"]


CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
"""Limit of a chunk's logits by device type, or the memory of the weight's float32 gradient, accessed once per chunk."""

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
    _matmul(Case(a.device, a.dtype, (a.shape[0], b.shape[1], a.shape[1])), a, b, out, first)


def _split(V: int) -> tuple[slice, ...]:
    """Return the classes in two parts, the first a multiple of _ALIGNED, since the library is slow for odd sizes."""
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
    """Replace each chunk's logits by their gradient, by `to_gradient`; return dhidden in its dtype, and dweight.

    dweight is in float32 (float64 for float64), but in its own dtype with `narrow` and a single chunk, whose sum alone
    is rounded; None if not needed. For `forming` see _run_per_example.
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
    """Compute _run with a gradient of weight for each example, which has T = M / examples rows: (examples, V, K)."""
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


def run_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, smoothing: float, needs: Sequence[bool], *,
    own: bool, losses: Tensor | None = None, counts: Tensor | None = None, dy: Tensor | None = None,
    classes: int | None = None, narrow: bool = False, forming: Forming | None = None,
) -> _Gradients:  # fmt: skip
    """Compute the losses (M,), and the gradients of hidden (M, K) and weight (V, K) that are needed; all contiguous.

    `own`: by our kernels. Gradients are divided by the sum of `counts`. Rows of weight from `classes` on get a gradient
    of 0. For `narrow`, which our kernels ignore, see _run, for `forming` _run_per_example.
    """
    gradient = any(needs)
    classes = weight.shape[0] if classes is None else classes
    case = Case(hidden.device, hidden.dtype, (hidden.shape[0], classes), ("gradient",))
    by_hopper = own and gradient and dy is None and losses is not None and launch.refuses_shared_rows(case) is None
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
            launch.launch_shared_rows(
                logits, stride, targets[rows], ignore_index, smoothing,
                losses=row_losses, statistics=statistics, dx=logits, dx_stride=stride, counts=counts,
            )  # fmt: skip
        else:
            launch.launch_rows(
                logits, stride, targets[rows], ignore_index, smoothing, losses=row_losses, dx=dx, dx_stride=stride,
                counts=counts if gradient else None, dy=dy_rows,
            )  # fmt: skip

    return _run(hidden, weight, needs, to_gradient, narrow and not own, forming)


_WHOLE = 2**20  # up to this many logits, torch's functions are faster on a CPU than chunks: 4 MiB of float32


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the cross entropy of all logits, materialized."""
    return cross_entropy_reference(
        hidden @ weight.T, targets, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )


def _counts(targets: Tensor, ignore_index: int, own: bool) -> Tensor:
    return launch.count(targets, ignore_index) if own else (targets != ignore_index).sum()


def _chunked_forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str,
    dtype: str, wide: bool, gradient_hidden: bool, gradient_weight: bool, whole: bool = False, narrow: bool = False,
    *, own: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the loss, and for "mean" and "sum" the gradients that are asked for; empty tensors otherwise.

    In float16 the gradients are those of the sum: divided by the count they would underflow before a loss scale
    multiplies them. `whole`: only the differentiable loss by torch's functions.
    """
    if whole:
        return (_composite(hidden, weight, targets, ignore_index, smoothing, reduction, dtype, wide),)
    low = getattr(torch, dtype)
    narrow = narrow and weight.dtype == low == torch.bfloat16  # a sum over all rows may overflow float16
    needs = (gradient_hidden, gradient_weight) if reduction != "none" else (False, False)
    hidden, weight, targets = hidden.to(low).contiguous(), weight.to(low).contiguous(), targets.contiguous()
    exact = torch.float64 if low == torch.float64 else torch.float32
    losses = torch.empty(hidden.shape[0], dtype=exact, device=hidden.device)
    counts = _counts(targets, ignore_index, own) if reduction == "mean" else None
    dhidden, dweight = run_chunks(
        hidden, weight, targets, ignore_index, smoothing, needs,
        own=own, losses=losses, counts=None if low == torch.float16 else counts, narrow=narrow,
    )  # fmt: skip
    result = torch.float32 if wide else low
    if reduction == "none":
        loss = losses.to(result)
    elif own:
        loss = launch.reduce(losses, counts, result)
    else:
        loss = (losses.sum() if counts is None else losses.sum() / counts.sum()).to(result)
    return (
        loss,
        hidden.new_empty(0) if dhidden is None else dhidden,
        hidden.new_empty(0, dtype=exact) if dweight is None else dweight,
    )


def _chunked_backward(
    dy: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, dhidden: Tensor | None, dweight: Tensor | None,
    ignore_index: int, smoothing: float, reduction: str, dtype: str, needs: Sequence[bool], owned: bool = False,
    *, own: bool,
) -> list[Tensor | None]:  # fmt: skip
    """Return the forward pass's gradients times dy, in place if `owned`; compute them if it made none."""
    low = getattr(torch, dtype)
    eager, inputs = (dhidden, dweight), (hidden, weight)
    targets = targets.contiguous()
    counts = _counts(targets, ignore_index, own) if reduction == "mean" else None
    available = [dx is not None and dx.shape == x.shape for dx, x in zip(eager, inputs, strict=True)]
    if not all(there for need, there in zip(needs, available, strict=True) if need):
        args = (hidden.to(low).contiguous(), weight.to(low).contiguous(), targets, ignore_index, smoothing, needs)
        gradients = run_chunks(*args, own=own, counts=counts, dy=dy.contiguous())
        return [None if dx is None else dx.to(x.dtype) for dx, x in zip(gradients, inputs, strict=True)]
    late_counts = counts if low == torch.float16 else None
    scaled: list[Tensor | None] = [None, None]
    # The gradient that needs new memory first: if that allocation fails, the other one is not scaled yet.
    for i in sorted(range(2), key=lambda i: getattr(eager[i], "dtype", None) == inputs[i].dtype):
        dx = eager[i]
        if needs[i] and dx is not None:
            scaled[i] = _scaled(dx, dy, late_counts, inputs[i].dtype, owned, own)
    return scaled


def _scaled(x: Tensor, dy: Tensor, counts: Tensor | None, dtype: torch.dtype, owned: bool, own: bool) -> Tensor:
    if owned and own:  # torch's product with another result dtype took 2.1 of 35 ms at 128256 x 4096
        y = x if x.dtype == dtype else x.new_empty(x.shape, dtype=dtype)  # before x changes: it may find no memory
        launch.scale_(x, dy, counts)
        return y if y is x else y.copy_(x)
    if owned and x.dtype == dtype and counts is None and x.device.type == "cpu" and dy.item() == 1.0:
        return x
    factor = dy if counts is None else dy.float() / counts.sum()
    return torch.mul(x, factor.to(torch.promote_types(x.dtype, torch.float32)), out=x.new_empty(x.shape, dtype=dtype))


def _cost(case: Case) -> Cost:
    M, V, K = case.shape
    products = 1 + sum(option in ("hidden", "weight") for option in case.options)
    if "scale" in case.options:
        return Cost(2 * (M + V) * K * case.dtype.itemsize, (M + V) * K)
    return Cost(products * (M + V) * K * case.dtype.itemsize, products * 2 * M * V * K)


linear_cross_entropy_fwd = triton_operation(
    "linear_cross_entropy_fwd",
    partial(_chunked_forward, own=True),
    partial(_chunked_forward, own=False),
    cost=_cost,
    differentiable=True,
)
linear_cross_entropy_bwd: Callable[..., Sequence[Tensor | None]] = triton_operation(
    "linear_cross_entropy_bwd",
    partial(_chunked_backward, own=True),
    partial(_chunked_backward, own=False),
    cost=_cost,
    mutates=True,
)


def _composite(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, dtype: str,
    wide: bool, *_: object,
) -> Tensor:  # fmt: skip
    low = getattr(torch, dtype)
    logits = functional.linear(hidden.to(low), weight.to(low))
    return torch_composite(logits, targets, ignore_index, smoothing, reduction, wide)


def _torch_equivalent(hidden: Tensor, weight: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets, **options)


def _torch_serves(hidden: Tensor, weight: Tensor, targets: Tensor, **_: object) -> bool:
    """Return whether torch's functions give the same: with rows, in a dtype that the loss is computed in."""
    plain = hidden.dim() == 2 and hidden.numel() > 0 and targets.dtype == torch.int64
    return plain and hidden.dtype in (torch.float32, torch.float64)


_cpu = CpuFastPath(_torch_equivalent, serves=_torch_serves, args=(True,))


@_cpu
def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> Tensor:  # fmt: skip
    """Return the cross entropy of the logits hidden W^T without materializing all logits.

    loss = (1 - s) (L - x_t) + s (L - mean x), with x = W h, L = log sum exp x, t the class, s the label smoothing

    Args:
        hidden: (..., K), float16, bfloat16, float32 or float64.
        weight: (V, K), V at least 1; dtype of hidden (under autocast any of the first three).
        targets: (...), int64 or int32, classes in [0, V) or ignore_index.
        ignore_index: rows of this class have loss and gradient 0 and are not counted in the mean.
        label_smoothing: s, in [0, 1].
        reduction: "mean" over the counted rows, "sum", or "none".

    Returns:
        a scalar, or (...) for "none"; the dtype of hidden, or float32 under torch.autocast. Logits are rounded to the
        dtype of hidden (of autocast); their loss is computed in float32, and the weight's gradient is summed over all
        rows in float32 (bfloat16 on a CPU: each chunk's sum is rounded); float64 stays float64. Differentiable twice.

    Raises:
        ShapeError: weight is not (V, K), targets are not (...), or several devices.
        UnsupportedDtype: a dtype not listed above.
        ConfigError: label_smoothing or reduction is out of range.
        IndexOutOfRange: on the CPU, a target out of [0, V).
        TypeError: an argument is not a tensor.

    Memory besides the inputs: 512 MiB of logits (or as much as the weight takes in float32, if that is more), and the
    gradients of hidden, and of weight in float32, if needed. They are computed with the loss ("none": in the backward
    pass, from recomputed logits). On devices other than the CPU a target out of range makes the loss NaN. Under
    forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) torch's own linear and
    cross_entropy run, with all logits materialized, which the ledger does not count.

    Source: Hsu et al. 2024, arXiv:2410.10989, section 3.2.
    """
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        check_dtype("linear_cross_entropy", tensor, name)
    low = autocast_dtype(hidden.device.type)
    wide = low is not None and hidden.dtype != torch.float64
    _check(hidden, weight, mixed=wide)
    check_loss("linear_cross_entropy", targets, hidden.shape[:-1], label_smoothing, reduction)
    for name, tensor in (("weight", weight), ("targets", targets)):
        if tensor.device != hidden.device:
            raise ShapeError(f"{name} must be on {hidden.device}, where hidden is; got {tensor.device}")
    dtype = low if wide and low is not None else hidden.dtype
    shape = targets.shape
    if hidden.dim() != 2:
        hidden, targets = rows_of(hidden), targets.reshape(-1)
    needs_grad = torch.is_grad_enabled()
    try:
        loss: Tensor = _linear_cross_entropy(
            hidden, weight, targets, ignore_index, float(label_smoothing), reduction, name_of(dtype), wide,
            needs_grad and hidden.requires_grad, needs_grad and weight.requires_grad,
        )  # fmt: skip
    except IndexError:  # raised by torch's function on a CPU, as in cross_entropy
        check_targets(targets, weight.shape[0], ignore_index)
        raise
    return loss.reshape(shape) if reduction == "none" and len(shape) != 1 else loss


def _check(hidden: Tensor, weight: Tensor, *, mixed: bool) -> None:
    if hidden.dim() == 0:
        raise ShapeError("hidden must be (..., K), got a scalar")
    if weight.dim() != 2 or weight.shape[0] == 0 or weight.shape[1] != hidden.shape[-1]:
        raise ShapeError(f"weight must be (V, {hidden.shape[-1]}), V at least 1, got {tuple(weight.shape)}")
    if weight.dtype != hidden.dtype and (not mixed or weight.dtype == torch.float64):
        raise UnsupportedDtype(
            f"hidden and weight must have one dtype, got {name_of(hidden.dtype)} and {name_of(weight.dtype)}"
        )


def _case(hidden: Tensor, weight: Tensor, dtype: str, needs: Sequence[bool], *options: str) -> Case:
    needed = tuple(name for name, need in zip(("hidden", "weight"), needs, strict=True) if need)
    shape = (hidden.shape[0], *weight.shape)
    return Case(hidden.device, getattr(torch, dtype), shape, (*needed, *options))


@_cpu.case
def _cpu_case(hidden: Tensor, weight: Tensor, *args: Any) -> Case | None:
    """Return None for more logits than should be materialized."""
    few = hidden.shape[0] * weight.shape[0] <= _WHOLE
    return _case(hidden, weight, args[4], args[-2:]) if few else None


def _forward(hidden: Tensor, weight: Tensor, *args: Any, narrow: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    check_targets(args[0], weight.shape[0], args[1])
    case = _case(hidden, weight, args[4], args[-2:])
    results: tuple[Tensor, Tensor, Tensor] = linear_cross_entropy_fwd(case, hidden, weight, *args, False, narrow)
    return results


def _infer(hidden: Tensor, weight: Tensor, *args: Any) -> Tensor:
    return _forward(hidden, weight, *args[:-2], False, False)[0]


def _eager_gradient(needs: Sequence[bool], hidden: Tensor, weight: Tensor, *args: Any) -> Any:
    loss, dhidden, dweight = _forward(hidden, weight, *args[:-2], *needs, narrow=True)
    reduction = args[3]
    targets = args[0].clone() if args[4] == "float16" else args[0]  # the backward pass counts them
    ahead = None if reduction == "none" else (hidden, weight, targets, dhidden, dweight)
    return (loss, None, None), ahead, False


def _finish_gradient(dy: Tensor, ahead: tuple[Tensor, ...], *options: Any) -> Sequence[Tensor | None]:
    return _backward(dy, *ahead, *options, owned=True)


def _backward(
    dy: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, dhidden: Tensor | None, dweight: Tensor | None,
    *options: Any, owned: bool = False,
) -> Sequence[Tensor | None]:  # fmt: skip
    ignore_index, smoothing, reduction, dtype, *_, needs = options
    case = _case(hidden, weight, dtype, needs, "scale" if owned else "backward")
    args = (dy, hidden, weight, targets, dhidden, dweight, ignore_index, smoothing, reduction, dtype, needs, owned)
    return linear_cross_entropy_bwd(case, *args)


def _fake(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, dtype: str,
    wide: bool, gradient_hidden: bool, gradient_weight: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    low = getattr(torch, dtype)
    exact = torch.float64 if low == torch.float64 else torch.float32
    eager = reduction != "none"
    return (
        hidden.new_empty(targets.shape if reduction == "none" else (), dtype=torch.float32 if wide else low),
        hidden.new_empty(hidden.shape if eager and gradient_hidden else (0,), dtype=low),
        hidden.new_empty(weight.shape if eager and gradient_weight else (0,), dtype=exact),
    )


class _LinearCrossEntropy(LossOp):
    def forward(self, *args: Any) -> Any:
        """Check the targets first."""
        return _forward(*args)

    infer = staticmethod(_infer)
    eager_gradient = staticmethod(_eager_gradient)
    finish_gradient = staticmethod(_finish_gradient)


_linear_cross_entropy = _LinearCrossEntropy(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, int ignore_index, float smoothing, "
    "str reduction, str dtype, bool wide, bool gradient_hidden, bool gradient_weight) "
    "-> (Tensor loss, Tensor dhidden, Tensor dweight)",
    case=_cpu_case,
    backward=_backward,
    saves=("hidden", "weight", "targets", "dhidden", "dweight"),
    gradients={"hidden": "hidden", "weight": "weight"},
    composite=_composite,
    fake=_fake,
    operation=linear_cross_entropy_fwd,
    cpu=_cpu,
)
