"""Convolution algorithms besides torch's own call: a product of patches, and cuDNN with the channels last.

Patches. If windows neither overlap nor leave gaps (stride = kernel, no padding, as in the patch embedding of a vision
transformer), the convolution is the product of the patches (B P, C K L) with the weight (O, C K L). For 256 x 3 x 224 x
224 and a weight of 768 x 3 x 16 x 16 in bfloat16 an H200 took 0.28 ms for the copies and the product, cuDNN 2.2 ms.

Channels last. cuDNN's kernels for 16-bit dtypes require the channels last, and convert other layouts at about a third
of the memory's rate. With the copies of ops/_images, 64 x 256 x 56 x 56 by 256 x 256 x 3 x 3 took 0.40 ms instead of
0.48, its gradients 0.76 instead of 0.94.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from accelerant.ops._images import to_channels_first, to_channels_last
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

_MIN_ELEMENTS = 2**20
"""Elements of x or y per case; below, the launches of the extra kernels cost more than they save."""

_MIN_WIDTH = 8
"""Columns of a patch; below, the copy reads less than 16 contiguous bytes."""


def _refuses(case: Case) -> str | None:
    if case.device.type != "cuda":
        return "is for NVIDIA GPUs"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "takes bfloat16 and float16"
    if "contiguous" not in case.options:
        return "takes contiguous x and weight"
    elements = min(math.prod(case.shape), math.prod(case.options[1]))
    return "is for larger images" if elements < _MIN_ELEMENTS else refuses_triton(case.device)


def refuses_patches(case: Case) -> str | None:
    """Return why a case (options as in op.py) is not a product of patches, or is slower as one, or None."""
    weight, _, stride, padding, dilation, groups = case.options[:6]
    if groups != 1 or tuple(dilation) != (1, 1) or tuple(padding) != (0, 0) or tuple(stride) != tuple(weight[2:]):
        return "windows overlap, leave gaps or are padded, or there are groups"
    if weight[3] < _MIN_WIDTH:
        return f"patches of less than {_MIN_WIDTH} columns are left to the library"
    return _refuses(case)


def refuses_channels_last(case: Case) -> str | None:
    """Return why a case (options as in op.py) is slower, or not supported, with the channels last, or None."""
    weight, _, _, _, _, groups = case.options[:6]
    if groups != 1:
        return "groups are left to the library"
    if weight[0] % 8 or weight[1] % 8:
        return "channels are not multiples of 8"
    return _refuses(case)


# --- patches ---------------------------------------------------------------------------------------------------------


def _patches_of(x: Tensor, kernel: Sequence[int]) -> Tensor:
    """Return the patches of x, (B, P, C K L), without partial ones at the end of rows and columns."""
    (B, C, H, W), (K, L) = x.shape, kernel
    rows, columns = H // K, W // L
    whole = x[:, :, : rows * K, : columns * L].reshape(B, C, rows, K, columns, L)
    return whole.permute(0, 2, 4, 1, 3, 5).reshape(B, rows * columns, C * K * L)


def patches(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int], dilation: list[int],
    groups: int,
) -> Tensor:  # fmt: skip
    """Convolve by a product of patches, for cases that refuses_patches does not refuse."""
    B, (O, _, K, L) = x.shape[0], weight.shape  # noqa: E741 - channels of y, as in op.py
    with torch.no_grad():
        y = torch.nn.functional.linear(_patches_of(x, (K, L)), weight.reshape(O, -1), bias)
        permuted = y.view(B, x.shape[2] // K, x.shape[3] // L, O).permute(0, 3, 1, 2)
    return to_channels_first(permuted)


def patches_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of `patches`."""
    (B, C, H, W), (O, _, K, L) = x.shape, weight.shape  # noqa: E741
    rows, columns = H // K, W // L
    dx = dweight = dbias = None
    with torch.no_grad():
        permuted = to_channels_last(dy.contiguous()).permute(0, 2, 3, 1).reshape(-1, O)
        if needs[0]:
            tiles = (permuted @ weight.reshape(O, -1)).view(B, rows, columns, C, K, L).permute(0, 3, 1, 4, 2, 5)
            if (rows * K, columns * L) == (H, W):
                dx = tiles.reshape(x.shape)
            else:
                dx = torch.zeros_like(x)
                dx[:, :, : rows * K, : columns * L] = tiles.reshape(B, C, rows * K, columns * L)
        if needs[1]:
            dweight = (permuted.t() @ _patches_of(x, (K, L)).view(-1, C * K * L)).view(weight.shape)
        if needs[2]:
            dbias = permuted.sum(0)
    return dx, dweight, dbias


# --- channels last ---------------------------------------------------------------------------------------------------


def channels_last(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    """Convolve by cuDNN with the channels last; y is contiguous, as x is."""
    weight = weight.to(memory_format=torch.channels_last)
    return to_channels_first(torch.conv2d(to_channels_last(x), weight, bias, *settings))


def channels_last_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], groups: int, needs: Sequence[bool],
) -> Gradients:  # fmt: skip
    """Return the gradients of `channels_last`, contiguous."""
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
