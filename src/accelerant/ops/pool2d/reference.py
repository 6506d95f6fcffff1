"""Reference of pooling in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

_Pair = int | Sequence[int]


def _two(value: _Pair) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def _windows(
    x: Tensor, kernel: _Pair, stride: _Pair | None, padding: _Pair, dilation: _Pair, ceil: bool, fill: float
) -> Tensor:
    """Return the windows of x padded with `fill`, (..., H', K, W', L)."""
    edges, settings = _two(padding), (_two(kernel), _two(kernel if stride is None else stride), _two(dilation))
    positions, extra = [], []
    for n, p, k, s, d in zip(x.shape[-2:], edges, *settings, strict=True):
        free = n + 2 * p - d * (k - 1) - 1
        count = (math.ceil(free / s) if ceil else free // s) + 1
        if ceil and (count - 1) * s >= n + p:
            count -= 1
        positions.append(torch.arange(count, device=x.device)[:, None] * s + torch.arange(k, device=x.device) * d)
        extra.append(max(0, (count - 1) * s + d * (k - 1) + 1 - n - p))
    x = F.pad(x, (edges[1], extra[1], edges[0], extra[0]), value=fill)
    return x[..., positions[0], :][..., positions[1]]


def max_pool2d_reference(
    x: Tensor, kernel_size: _Pair, stride: _Pair | None = None, padding: _Pair = 0, dilation: _Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Return the largest element of each window, the first of them in its rows, which gets the gradient."""
    windows = _windows(x, kernel_size, stride, padding, dilation, ceil_mode, -math.inf).transpose(-3, -2).flatten(-2)
    return windows.take_along_dim(windows.argmax(-1, keepdim=True), -1).squeeze(-1)


def avg_pool2d_reference(
    x: Tensor, kernel_size: _Pair, stride: _Pair | None = None, padding: _Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of each window over the number of its elements."""
    total = _windows(x, kernel_size, stride, padding, 1, ceil_mode, 0.0).sum((-1, -3))
    if divisor_override is not None:
        return total / divisor_override
    counted = torch.ones(x.shape[-2:], device=x.device, dtype=x.dtype)
    if not count_include_pad:
        return total / _windows(counted, kernel_size, stride, padding, 1, ceil_mode, 0.0).sum((-1, -3))
    vertical, horizontal = _two(padding)
    counted = F.pad(counted, (horizontal, horizontal, vertical, vertical), value=1.0)
    beyond = F.pad(counted, (0, _two(kernel_size)[1], 0, _two(kernel_size)[0]))  # beyond the padding nothing counts
    count = _windows(beyond, kernel_size, stride, 0, 1, False, 0.0).sum((-1, -3))
    return total / count[: total.shape[-2], : total.shape[-1]]
