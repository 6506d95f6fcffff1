"""Ways to a convolution besides handing torch what came: other layouts, or one product of matrices.

Patches. Where windows neither overlap nor leave gaps (stride = kernel, no padding: what cuts images into patches for a
transformer) each element of x is in one window, and the convolution is the product of the patches (B P, C K L) with the
weight (O, C K L). cuDNN took 2.2 ms for 256 x 3 x 224 x 224 and a weight of 768 x 3 x 16 x 16 in bfloat16 on an H200;
copying the patches, the product and the turn of its result take 0.28.

Channels last. cuDNN's kernels for 16-bit dtypes want the channels last; given them first, it turns what comes and what
goes itself, at about a third of the memory's rate. With our own copies 64 x 256 x 56 x 56 by 256 x 256 x 3 x 3 took
0.40 ms in place of 0.48, its gradients 0.76 in place of 0.94.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerant.ops._layout import to_channels_first, to_channels_last
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case

__all__ = [
    "channels_last",
    "channels_last_backward",
    "patches",
    "patches_backward",
    "refuses_channels_last",
    "refuses_patches",
]

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_LOW = (torch.bfloat16, torch.float16)
_LEAST_ELEMENTS = 2**20
"""Of x or y: below, the launches of more kernels cost more than they gain."""

_LEAST_WIDTH = 8
"""Columns of a patch: narrower, the copy reads less than 16 bytes side by side."""


def _refuses(case: Case) -> str | None:
    if case.device.type != "cuda" or torch.version.hip:
        return "is for NVIDIA GPUs"
    if case.dtype not in _LOW:
        return "takes bfloat16 and float16"
    if "contiguous" not in case.options:
        return "takes contiguous x and weight"
    count = case.shape[0] * min(case.shape[1] * case.shape[2] * case.shape[3], case.options[1][1] * _pixels(case))
    return "is for larger images" if count < _LEAST_ELEMENTS else refuses_triton(case.device)


def _pixels(case: Case) -> int:
    height, width = case.options[1][2:]
    return int(height * width)


def refuses_patches(case: Case) -> str | None:
    """Why a convolution is not a product of patches that pays; options as in op.py."""
    weight, _, stride, padding, dilation, groups = case.options[:6]
    if groups != 1 or tuple(dilation) != (1, 1) or tuple(padding) != (0, 0) or tuple(stride) != tuple(weight[2:]):
        return "windows overlap, leave gaps or are padded, or there are groups"
    if weight[3] < _LEAST_WIDTH:
        return f"patches of less than {_LEAST_WIDTH} columns are left to the library"
    return _refuses(case)


def refuses_channels_last(case: Case) -> str | None:
    """Why turning the layout does not pay, or is not done; options as in op.py."""
    weight, _, _, _, _, groups = case.options[:6]
    if groups != 1:
        return "groups are left to the library"
    if weight[0] % 8 or weight[1] % 8:
        return "channels are no multiples of 8"
    return _refuses(case)


# --- patches ---------------------------------------------------------------------------------------------------------


def _cut(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """(B, P, C K L): the patches of x, rows and columns beyond the last whole one left out."""
    (B, C, H, W), (K, L) = x.shape, kernel
    rows, columns = H // K, W // L
    whole = x[:, :, : rows * K, : columns * L].reshape(B, C, rows, K, columns, L)
    return whole.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * K * L)


def patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int,
) -> Tensor:  # fmt: skip
    """The convolution, where refuses_patches finds no reason."""
    B, (O, _, K, L) = x.shape[0], weight.shape  # noqa: E741 - channels of y, as in op.py
    with torch.no_grad():
        y = torch.nn.functional.linear(_cut(x, (K, L)), weight.reshape(O, -1), bias)
        turned = y.view(B, x.shape[2] // K, x.shape[3] // L, O).permute(0, 3, 1, 2)
    return to_channels_first(turned)


def patches_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Its gradients."""
    (B, C, H, W), (O, _, K, L) = x.shape, weight.shape  # noqa: E741
    rows, columns = H // K, W // L
    dx = dweight = dbias = None
    with torch.no_grad():
        turned = to_channels_last(dy.contiguous()).permute(0, 2, 3, 1).reshape(-1, O)
        if needs[0]:
            cut = (turned @ weight.reshape(O, -1)).view(B, rows, columns, C, K, L).permute(0, 3, 1, 4, 2, 5)
            if (rows * K, columns * L) == (H, W):
                dx = cut.reshape(x.shape)
            else:
                dx = torch.zeros_like(x)
                dx[:, :, : rows * K, : columns * L] = cut.reshape(B, C, rows * K, columns * L)
        if needs[1]:
            dweight = (turned.t() @ _cut(x, (K, L)).view(-1, C * K * L)).view(weight.shape)
        if needs[2]:
            dbias = turned.sum(0)
    return dx, dweight, dbias


# --- channels last ---------------------------------------------------------------------------------------------------


def channels_last(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """The convolution by cuDNN with the channels last; y is contiguous, as x is."""
    turned = weight.to(memory_format=torch.channels_last)
    return to_channels_first(torch.conv2d(to_channels_last(x), turned, bias, *settings))


def channels_last_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Its gradients, contiguous."""
    last = torch.channels_last
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        to_channels_last(dy.contiguous()), to_channels_last(x), weight.to(memory_format=last),
        None if bias is None else [weight.shape[0]], stride, padding, dilation, False, [0, 0], groups, list(needs),
    )  # fmt: skip
    return (
        to_channels_first(dx) if needs[0] else None,
        dweight.contiguous() if needs[1] else None,
        dbias if needs[2] else None,
    )
