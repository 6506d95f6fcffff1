"""Checks of the settings and sizes of ops over windows of images (conv2d, max_pool2d, avg_pool2d)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from accelerant.errors import ConfigError, ShapeError

__all__ = ["Pair", "as_images", "output_sizes", "pair"]

Pair = int | Sequence[int]


def pair(name: str, value: Pair, least: int) -> list[int]:
    """Return a setting for height and width, passed as one number or two; ConfigError if one is below `least`."""
    if isinstance(value, int):
        sizes = [value, value]
    else:
        sizes = list(value) if isinstance(value, Sequence) else []
        sizes = sizes * 2 if len(sizes) == 1 else sizes
    if len(sizes) != 2 or not all(isinstance(size, int) for size in sizes):
        raise ConfigError(f"{name} must be one or two integers, got {value!r}")
    if min(sizes) < least:
        raise ConfigError(f"{name} must be at least {least}, got {value!r}")
    return sizes


def as_images(op: str, x: Tensor) -> Tensor:
    """Return x (B, C, H, W), or (C, H, W) as a batch of one; ShapeError for anything else."""
    if x.dim() not in (3, 4):
        raise ShapeError(f"{op} takes x of shape (B, C, H, W) or (C, H, W), got {tuple(x.shape)}")
    return x if x.dim() == 4 else x.unsqueeze(0)


def output_sizes(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], *, ceil: bool = False
) -> list[int]:
    """Return height and width of the result; ShapeError if no window fits."""
    sizes = []
    for i, which in ((0, "height"), (1, "width")):
        size = x.shape[2 + i]
        free = size + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1
        count = (free + (stride[i] - 1 if ceil else 0)) // stride[i] + 1
        if count < 1 or not size:
            raise ShapeError(
                f"a kernel of {kernel[i]} with dilation {dilation[i]} does not fit into {which} {size} with padding "
                f"{padding[i]}; x is {tuple(x.shape)}"
            )
        if ceil and (count - 1) * stride[i] >= size + padding[i]:  # the last window would start in the padding
            count -= 1
        sizes.append(count)
    return sizes
