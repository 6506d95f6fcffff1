"""A linear layer whose result of a row is the same, bit for bit, whatever rows come with it and however many.

Libraries choose the order of a sum by the number of rows. On the CPU the products are those of _rows.py. On a GPU the
tile of the output follows from the number of rows, but every sum runs over K in steps of one size by one kind of
instruction, and is never split.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops import _rows
from accelerant.ops._hopper import is_hopper
from accelerant.ops._launch import next_power_of_2
from accelerant.ops._library import refuses_triton_kernel
from accelerant.ops.linear_int8.op import Int8Tile, launch_forward
from accelerant.runtime.dispatch import Case

_TILE_ROWS = 16
"""Rows of each product of a GPU where only a library serves: of float64, or without Triton. Not proven to be exact."""


@functools.cache
def tile_plan(M: int, dtype: torch.dtype, device: torch.device) -> Int8Tile:
    """Return the tile for a power of two that is at least the number of rows."""
    if device.type != "cuda":
        return Int8Tile(16, 32, 32, 4, 2)
    if dtype == torch.float32:
        return Int8Tile(16 if M <= 16 else 64, 64, 32, 4, 2)
    if not is_hopper(device):
        return Int8Tile(16 if M <= 16 else 64, 64, 64, 4, 3)
    return (
        Int8Tile(16, 64, 64, 4, 6)
        if M <= 16
        else Int8Tile(64, 64, 64, 4, 5)
        if M <= 64
        else Int8Tile(128, 128, 64, 8, 4)
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
    """Return x weight^T + bias, with the weight's rows times `scale` where it is given; without a gradient.

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K), dtype of x; or int8, with a scale.
        bias, scale: (N,), dtype of x or float32; or None.

    Returns:
        (..., N), dtype of x, sums in float32 at least. The rows of a call do not change one another's bits.
    """
    rows, N = x.detach().flatten(0, -2), weight.shape[0]
    with torch.no_grad():
        if scale is not None and x.dtype == torch.float64:
            weight, scale = weight * scale[:, None].double(), None
        if not _on_cpu(x) and _refuses_triton(x):
            y = _in_tiles(rows, weight if scale is None else (weight * scale[:, None]).to(x.dtype), bias)
        elif _on_cpu(x):
            y = _rows.products(rows, weight, scale)
            y = (y if bias is None else y.add_(bias)).to(x.dtype)
        else:
            plan = tile_plan(next_power_of_2(max(len(rows), 1)), x.dtype, x.device)
            y = launch_forward(rows, weight, scale, bias, plan=plan)
    return y.view(*x.shape[:-1], N)


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _refuses_triton(x: Tensor) -> str | None:
    return refuses_triton_kernel(Case(x.device, x.dtype, tuple(x.shape)))


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in tiles of one height, the last of them padded."""
    padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
    tiles = [functional.linear(part, weight, bias) for part in padded.split(_TILE_ROWS)]
    return torch.cat(tiles)[: len(x)] if tiles else x.new_empty(0, len(weight))
