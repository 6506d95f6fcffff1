"""Convolution and pooling of images (B, C, H, W), or of a single one (C, H, W)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn.layers import compute_dtype
from accelerant.ops._images import Pair, pair


class Conv2d(nn.Module):
    """A convolution; see accelerant.ops.conv2d.

    Attributes:
        weight: (out_channels, in_channels / groups, K, L), uniform within 1 / sqrt(fan-in), as in torch.
        bias: (out_channels,), with the same distribution, or None.
    """

    bias: nn.Parameter | None

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Pair, *, stride: Pair = 1, padding: Pair | str = 0,
        dilation: Pair = 1, groups: int = 1, bias: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        if in_channels < 1 or out_channels < 1 or groups < 1:
            got = f"{in_channels}, {out_channels} and {groups}"
            raise ConfigError(f"Conv2d needs channels and groups of at least 1, got {got}")
        if in_channels % groups or out_channels % groups:
            raise ConfigError(f"groups must divide the channels, got {groups} for {in_channels} and {out_channels}")
        if isinstance(padding, str) and padding not in ("valid", "same"):
            raise ConfigError(f"padding must be numbers, 'valid' or 'same', got {padding!r}")
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size = pair("kernel_size", kernel_size, 1)
        self.stride, self.dilation = pair("stride", stride, 1), pair("dilation", dilation, 1)
        self.padding = padding if isinstance(padding, str) else pair("padding", padding, 0)
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels // groups, *self.kernel_size))
        self.bias = nn.Parameter(torch.empty(out_channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias with torch's global generator."""
        bound = 1 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x, (B, in_channels, H, W) or (in_channels, H, W), in its dtype or the autocast dtype.

        Raises:
            ShapeError: a different number of channels, or an image smaller than the kernel.
        """
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            raise ShapeError(f"Conv2d takes (B, {self.in_channels}, H, W), got {tuple(x.shape)}")
        dtype = compute_dtype(x)
        bias = None if self.bias is None else self.bias.to(dtype)
        padding: Pair | str = self.padding
        return ops.conv2d(
            x.to(dtype), self.weight.to(dtype), bias, self.stride, padding, self.dilation, self.groups  # type: ignore[arg-type]  # checked above
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}, bias={self.bias is not None}"
        )


class _Pool2d(nn.Module):
    """A pooling layer's window: kernel size, stride (by default the kernel size) and padding."""

    def __init__(self, kernel_size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> None:
        super().__init__()
        self.kernel_size = pair("kernel_size", kernel_size, 1)
        self.stride = self.kernel_size if stride is None else pair("stride", stride, 1)
        self.padding = pair("padding", padding, 0)

    def extra_repr(self) -> str:
        """Describe the module for `print(model)`."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class MaxPool2d(_Pool2d):
    """The largest element of each window; see accelerant.ops.max_pool2d."""

    def forward(self, x: Tensor) -> Tensor:
        """Pool x, (B, C, H, W) or (C, H, W)."""
        y = ops.max_pool2d(x, self.kernel_size, self.stride, self.padding)
        assert isinstance(y, Tensor)  # for the type checker: no indices were requested
        return y


class AvgPool2d(_Pool2d):
    """The mean of each window; see accelerant.ops.avg_pool2d."""

    def forward(self, x: Tensor) -> Tensor:
        """Pool x, (B, C, H, W) or (C, H, W)."""
        return ops.avg_pool2d(x, self.kernel_size, self.stride, self.padding)
