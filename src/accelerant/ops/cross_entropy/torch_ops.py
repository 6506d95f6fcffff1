"""cross_entropy from torch's functions, on any device.

Where torch differentiates, its own function serves. A gradient that is made here comes of one softmax over a chunk of
rows in float32, of which both the loss (-log p of the class) and the gradient are read while the chunk lies in cache:
torch takes an exponential of each element twice, and keeps the logarithms in memory in between. On one core of an EPYC
with AVX-512, loss and gradient of 2M logits took 0.6 to 0.8 of its time.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops.cross_entropy.launch import COUNTS
from accelerant.runtime.compilation.triton import refuses_triton

__all__ = ["CHUNK", "is_low", "torch_backward", "torch_composite", "torch_forward", "torch_rows"]

CHUNK = 2**19
"""Logits at a time on a CPU: 2 MiB of float32; half as many cost a sixth more, in calls of torch's functions."""

_TINY = 1e-30  # a probability below has lost digits in float32: there the logarithm comes from the logits


def is_low(dtype: torch.dtype) -> bool:
    """Whether a dtype computes in float32."""
    return dtype in (torch.float16, torch.bfloat16)


def torch_composite(
    logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, reduction: str, wide: bool, *_: object
) -> Tensor:
    """The loss from torch's own functions; low precision computes in float32."""
    dtype = torch.float32 if wide else logits.dtype
    if logits.numel() == 0:
        empty = logits.sum() if reduction != "none" else logits.sum(1)
        return (empty / 0 if reduction == "mean" else empty).to(dtype)
    low = is_low(logits.dtype)
    return functional.cross_entropy(
        logits.float() if low else logits,
        targets.long(),
        ignore_index=ignore_index,
        label_smoothing=smoothing,
        reduction=reduction,
    ).to(dtype)


def _coefficients(
    dy: Tensor | None, targets: Tensor, counts: Tensor | None, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """(M, 1): what the gradient of each row's loss is multiplied by; 0 where a row does not count."""
    c = (targets != ignore_index).to(dtype)
    if counts is not None:
        c = c / counts.sum().clamp_min(1)
    return (c if dy is None else c * dy.to(dtype))[:, None]


def torch_rows(
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    dx: Tensor | None,
    counts: Tensor | None = None,
    dy: Tensor | None = None,
) -> Tensor:
    """Each row's loss, in float32 or float64; its gradient over the sum of counts and times dy is written to dx.

    Args:
        logits: (M, V), rows of any distance.
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
    straight = dx is not None and dx.dtype == exact and dx.is_contiguous() and dx.data_ptr() != logits.data_ptr()
    buffer = None if straight else torch.empty(min(R, M), V, dtype=exact, device=logits.device)
    for start in range(0, M, R):
        rows = slice(start, min(start + R, M))
        x = logits[rows]
        out = dx[rows] if buffer is None and dx is not None else x.new_empty(0) if buffer is None else buffer[: len(x)]
        losses[rows] = _chunk(x, at[rows], smoothing, out, None if c is None else c[rows])
        if dx is not None and buffer is not None:
            dx[rows] = out
    return losses.masked_fill_(~counted, 0.0)


def _chunk(x: Tensor, at: Tensor, smoothing: float, out: Tensor, c: Tensor | None) -> Tensor:
    """The rows' losses, and their gradients times c to out, which is of the dtype to compute in."""
    wide = x if x.dtype == out.dtype else out.copy_(x)  # torch's functions of whole rows may write over what they read
    if c is None:
        return _from_logarithms(torch.log_softmax(wide, 1, out=out), at, smoothing)
    more = smoothing * (wide.gather(1, at)[:, 0] - wide.mean(1)) if smoothing else 0.0
    on_cpu = x.device.type == "cpu"
    if on_cpu:
        torch.softmax(wide, 1, out=out)
        p = out.gather(1, at)[:, 0]
        losses = more - p.log()
        if not bool((p >= _TINY).all()):  # or NaN
            losses = _from_logarithms(torch.log_softmax(x.to(out.dtype), 1), at, smoothing)
    else:  # where looking at p would wait for the device
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
    logits: Tensor,
    targets: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    wide: bool,
    inplace: bool = False,
    ahead: bool = False,
    statistics: bool = True,
) -> tuple[Tensor, ...]:
    """All results, and the gradient if `ahead`; without statistics the loss alone, with torch's own gradient."""
    if not statistics:
        return (torch_composite(logits, targets, ignore_index, smoothing, reduction, wide),)
    mean = reduction == "mean"
    counts = torch.zeros(COUNTS if mean else 0, dtype=torch.int32, device=logits.device)
    if mean:
        counts[0] = (targets != ignore_index).sum()
    kept = torch.zeros(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    if refuses_triton(logits.device) is None:  # only our backward kernel reads them
        kept[0] = logits.amax(1)
        kept[1] = 1.0 / torch.exp(logits.float() - kept[0][:, None]).sum(1)
    dx = None if not ahead else logits if inplace else torch.empty_like(logits, memory_format=torch.contiguous_format)
    losses = torch_rows(logits, targets, ignore_index, smoothing, dx, counts if mean else None)
    loss = losses if reduction == "none" else losses.sum() / counts[0] if mean else losses.sum()
    loss = loss.to(torch.float32 if wide else logits.dtype)
    return (loss, kept, counts) if dx is None else (loss, kept, counts, dx)


def torch_backward(
    dy: Tensor,
    logits: Tensor,
    targets: Tensor,
    statistics: Tensor,
    counts: Tensor,
    ignore_index: int,
    smoothing: float,
    reduction: str,
    ahead: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits: made here, or what was made ahead, times dy."""
    if ahead is not None:
        if dy.device.type == "cpu" and dy.item() == 1.0:
            return ahead
        return ahead.mul_(dy)
    dx = torch.empty_like(logits, memory_format=torch.contiguous_format)
    torch_rows(logits, targets, ignore_index, smoothing, dx, counts if reduction == "mean" else None, dy)
    return dx
