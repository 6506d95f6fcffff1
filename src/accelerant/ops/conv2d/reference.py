"""Reference of conv2d in plain PyTorch, in the dtype of its inputs; the tests' oracle in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["conv2d_reference"]


def _two(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value, value) if isinstance(value, int) else tuple(value)


def conv2d_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0, dilation: int | Sequence[int] = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    """Return for each output channel the sum of products of the weight and each window of x."""
    if x.dim() == 3:
        whole = conv2d_reference(
            x.unsqueeze(0), weight, bias, stride=stride, padding=padding, dilation=dilation, groups=groups
        )
        return whole.squeeze(0)
    kernel, step, spread = weight.shape[2:], _two(stride), _two(dilation)
    totals = [0, 0]
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(spread, kernel, strict=True)]
    elif not isinstance(padding, str):
        totals = [2 * p for p in _two(padding)]
    (top, left), (height, width) = (total // 2 for total in totals), totals
    x = F.pad(x, (left, width - left, top, height - top))
    sizes = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(x.shape[2:], kernel, step, spread, strict=True)]
    rows, columns = (
        torch.arange(n, device=x.device)[:, None] * s + torch.arange(k, device=x.device) * d
        for n, k, s, d in zip(sizes, kernel, step, spread, strict=True)
    )
    windows = x[:, :, rows][..., columns].unflatten(1, (groups, -1))  # b g c h i w j
    y = torch.einsum("bgchiwj,gocij->bgohw", windows, weight.unflatten(0, (groups, -1))).flatten(1, 2)
    return y if bias is None else y + bias[:, None, None]
