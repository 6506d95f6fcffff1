"""cross_entropy by torch's functions, on any device.

If torch differentiates, its own function runs. A gradient computed here uses one softmax over a chunk of rows in
float32, from which both the loss (-log p of the class) and the gradient are read while the chunk is in cache; torch
computes two exponentials per element and stores the logarithms in between. On one core of an EPYC with AVX-512, loss
and gradient of 2M logits took 0.6 to 0.8 of torch's time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops.cross_entropy.launch import COUNTS
from accelerant.runtime.compilation.triton import refuses_triton

CHUNK = 2**19
"""Logits per chunk on a CPU: 2 MiB of float32; chunks of half that size take a sixth longer."""

_TINY = 1e-30  # smaller probabilities have lost digits in float32: their logarithm comes from the logits


def is_low(dtype: torch.dtype) -> bool:
    """Return whether a dtype is a 16-bit one, computed in float32."""
    return dtype in (torch.float16, torch.bfloat16)


def torch_composite(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool, *_: object
) -> Tensor:
    """Return the loss by torch's own functions; 16-bit dtypes compute in float32."""
    dtype = torch.float32 if wide else logits.dtype
    if logits.numel() == 0:
        empty = logits.sum() if reduction != "none" else logits.sum(1)
        return (empty / 0 if reduction == "mean" else empty).to(dtype)
    logits = logits.float() if is_low(logits.dtype) else logits
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": smoothing, "reduction": reduction}
    return functional.cross_entropy(logits, targets.long(), **options).to(dtype)


def _coefficients(
    dy: Tensor | None, targets: Tensor, counts: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """Return the factor of each row's gradient, (M, 1); 0 for rows that are not counted."""
    c = (targets != ignore_index).to(dtype)
    if counts is not None:
        c = c / counts.sum().clamp_min(1)
    return (c if dy is None else c * dy.to(dtype))[:, None]


def torch_rows(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, dx: Tensor | None,
    counts: Tensor | None = None, dy: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return each row's loss, in float32 or float64, and write its gradient times dy / sum(counts) to dx.

    Args:
        logits: (M, V), with any row stride.
        targets, ignore_index, smoothing: as the op's.
        dx: (M, V), any dtype; may be the logits themselves; None for no gradient.
        counts: None for 1.
        dy: a scalar or (M,); None for 1.
    """
    exact = torch.float32 if is_low(logits.dtype) else logits.dtype
    (M, V), counted = logits.shape, targets != ignore_index
    at = targets.long().where(counted, 0)[:, None]
    losses = torch.empty(M, dtype=exact, device=logits.device)
    c = None if dx is None else _coefficients(dy, targets, counts, ignore_index, exact)
    R = max(1, CHUNK // V) if logits.device.type == "cpu" else max(1, M)
    direct = dx is not None and dx.dtype == exact and dx.is_contiguous() and dx.data_ptr() != logits.data_ptr()
    buffer = None if direct else torch.empty(min(R, M), V, dtype=exact, device=logits.device)
    for start in range(0, M, R):
        rows = slice(start, min(start + R, M))
        x = logits[rows]
        out = dx[rows] if buffer is None and dx is not None else x.new_empty(0) if buffer is None else buffer[: len(x)]
        losses[rows] = _chunk(x, at[rows], smoothing, out, None if c is None else c[rows])
        if dx is not None and buffer is not None:
            dx[rows] = out
    return losses.masked_fill_(~counted, 0.0)


def _chunk(x: Tensor, at: Tensor, smoothing: float, out: Tensor, c: Tensor | None) -> Tensor:
    """Return the rows' losses, and write their gradients times c to out, which has the dtype to compute in."""
    wide = x if x.dtype == out.dtype else out.copy_(x)  # torch's row-wise functions may overwrite their input
    if c is None:
        return _from_logarithms(torch.log_softmax(wide, 1, out=out), at, smoothing)
    more = smoothing * (wide.gather(1, at)[:, 0] - wide.mean(1)) if smoothing else 0.0
    if x.device.type == "cpu":
        torch.softmax(wide, 1, out=out)
        p = out.gather(1, at)[:, 0]
        losses = more - p.log()
        if not bool((p >= _TINY).all()):  # or NaN
            losses = _from_logarithms(torch.log_softmax(x.to(out.dtype), 1), at, smoothing)
    else:  # without the check of p, which would synchronize with the device
        losses = _from_logarithms(torch.log_softmax(wide, 1, out=out), at, smoothing)
        out.exp_()
    out.mul_(c)
    if smoothing:
        out.sub_(c * (smoothing / out.shape[1]))
    out.scatter_add_(1, at, c * (smoothing - 1.0))
    return losses


def _from_logarithms(log_p: Tensor, at: Tensor, smoothing: float) -> Tensor:
    chosen = log_p.gather(1, at)[:, 0]
    return -((1.0 - smoothing) * chosen + smoothing * log_p.mean(1) if smoothing else chosen)


def torch_forward(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool,
    inplace: bool = False, gradient: bool = False, statistics: bool = True,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return loss, statistics, counts, and the gradient if asked; without statistics the differentiable loss only."""
    if not statistics:
        return (torch_composite(logits, targets, ignore_index, smoothing, reduction, wide),)
    mean = reduction == "mean"
    counts = torch.zeros(COUNTS if mean else 0, dtype=torch.int32, device=logits.device)
    if mean:
        counts[0] = (targets != ignore_index).sum()
    kept = torch.zeros(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    if refuses_triton(logits.device) is None:  # only the Triton backward kernel reads them
        kept[0] = logits.amax(1)
        kept[1] = 1.0 / torch.exp(logits.float() - kept[0][:, None]).sum(1)
    dx = None
    if gradient:
        over = inplace and logits.is_contiguous()
        dx = logits if over else torch.empty_like(logits, memory_format=torch.contiguous_format)
    losses = torch_rows(logits, targets, ignore_index, smoothing, dx, counts if mean else None)
    loss = losses if reduction == "none" else losses.sum() / counts[0] if mean else losses.sum()
    loss = loss.to(torch.float32 if wide else logits.dtype)
    return (loss, kept, counts) if dx is None else (loss, kept, counts, dx)


def torch_backward(
    dy: Tensor, logits: Tensor, targets: Tensor, statistics: Tensor, counts: Tensor, ignore_index: int,
    smoothing: float, reduction: str, unscaled: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of the logits; `unscaled` is that gradient for dy = 1, scaled in place."""
    if unscaled is not None:
        return unscaled if dy.device.type == "cpu" and dy.item() == 1.0 else unscaled.mul_(dy)
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch_rows(logits, targets, ignore_index, smoothing, dx, counts if reduction == "mean" else None, dy)
    return dx
