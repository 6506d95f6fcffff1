# ruff: noqa: D102  Contribution documents the methods of its subclasses
"""Convolutions: unfolded windows are the rows of a linear map for norms; the weighted sum is a convolution's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import nn as our
from accelerant.nn.layers import compute_dtype
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.contributions import Contribution, Dense, prefers_ghost
from accelerant.privacy.dp.clipping.launch import chunks, wide
from accelerant.privacy.dp.clipping.layers import require_first_visit, to_autocast
from accelerant.privacy.dp.clipping.rules import LayerRule, register


class Windows(NamedTuple):
    """A convolution's stride, padding and dilation in each dimension of the image, and its groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(slots=True)
class Convolution(Contribution):
    """A kernel's gradient from x (B, C, ...), g (B, O, ...) and weight (O, C / groups, ...); windows are not kept."""

    x: Tensor
    g: Tensor
    weight: Tensor
    windows: Windows

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    def bound(self) -> Tensor:
        B, groups, dtype = self.x.shape[0], self.windows.groups, self.x.dtype
        total = torch.empty(B, dtype=torch.float64, device=self.x.device)
        for part in self._chunks():
            a, g = self._rows(part)
            terms = launch.ghost_terms(a.flatten(0, 1), g.flatten(0, 1))
            gram = launch.Gram.of(*terms, (*a.shape[2:], g.shape[3]), _factor_roundoff(dtype, self.x.device))
            total[part] = launch.bounded([gram]).view(-1, groups).sum(1)
        return total

    def dense(self) -> Dense:
        gradients = self.x.new_empty((self.x.shape[0], *self.weight.shape))
        for part in self._chunks():
            a, g = self._rows(part)
            gradients[part] = torch.matmul(g.mT, a).view(-1, *self.weight.shape)
        return Dense(gradients)

    def prefers_ghost(self) -> bool:
        """Apply the rule to one group."""
        x, N = self.x, self.g.shape[1] // self.windows.groups
        sizes = (x.shape[0], self._positions(), N, self.weight[0].numel(), x.element_size())
        return prefers_ghost(*sizes, x.device.type)

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """Return the kernel's gradient of weighted g, in float32 or better.

        A sum over examples in 16 bits would be rounded by more than an example adds.
        """
        dtype = launch.weighted_dtype(wide(self.g.dtype), self.x)
        g = launch.scaled(self.g, weights.to(dtype), drop, dtype)
        x = launch.cleared(self.x, drop).to(dtype)
        _, total, _ = _backward(g, x, self.weight.to(g.dtype), self.windows, [False, True, False])
        return total.view(shape)  # type: ignore[no-any-return]  # torch's own

    def _positions(self) -> int:
        return self.g[0, 0].numel() if self.g.shape[0] else 1

    def _chunks(self) -> Iterator[slice]:
        return chunks(self.x.shape[0], self.weight[0].numel() * self.windows.groups * self._positions())

    def _rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return windows (b, groups, T, K) and gradients (b, groups, T, N)."""
        groups = self.windows.groups
        x, kernel = self.x[part], tuple(self.weight.shape[2:])
        stride, padding, dilation = self.windows[:3]
        if x.dim() == 3:
            x, kernel = x.unsqueeze(2), (1, *kernel)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        a = F.unfold(x, kernel, dilation, padding, stride)
        a = a.view(x.shape[0], groups, -1, a.shape[2])
        return a.mT, self.g[part].reshape(x.shape[0], groups, -1, a.shape[3]).mT


def _factor_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative rounding error of the factors in the gradient of a kernel, as `launch.factor_roundoff` does.

    On a GPU cuDNN multiplies in TF32 unless that is switched off, or transforms the images (Winograd).
    """
    if dtype == torch.float64:
        return 2.0**-53
    if device.type == "cpu":
        library: Any = torch.backends.mkldnn
        return launch.FLOAT32_ROUNDOFF[library.conv.fp32_precision]
    return launch.FLOAT32_ROUNDOFF["tf32"]


def _backward(dy: Tensor, x: Tensor, weight: Tensor, windows: Windows, mask: list[bool]) -> Any:
    unpadded = [0] * len(windows.stride)
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, *windows[:3], False, unpadded, windows.groups, mask
    )  # fmt: skip


class _Convolve(torch.autograd.Function):
    """x (B, C, ...), weight, bias -> (B, O, ...)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, sink: Any, examples: int
    ) -> Tensor:
        low = weight.to(x.dtype)
        low_bias = None if bias is None else bias.to(x.dtype)
        y = torch.ops.aten.convolution(x, low, low_bias, *windows[:3], False, [0] * len(windows.stride), windows.groups)
        ctx.save_for_backward(x, low)
        ctx.windows, ctx.sink, ctx.parameters, ctx.examples = windows, sink, (weight, bias), examples
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        require_first_visit(ctx)
        x, low = ctx.saved_tensors
        (weight, bias), sink, windows = ctx.parameters, ctx.sink, ctx.windows
        if sink.wants(weight):
            sink.contribute(weight, Convolution(x, dy, low, windows), ctx.examples)
        if sink.wants(bias):
            sink.gradients(bias, dy.flatten(2).sum(2, dtype=wide(dy.dtype)))
        dx = _backward(dy, x, low, windows, [True, False, False])[0] if ctx.needs_input_grad[0] else None
        return dx, None, None, None, None, None


_convolve: Callable[..., Tensor] = _Convolve.apply


@register
class _ConvRule(LayerRule):
    layers = (nn.Conv1d, nn.Conv2d)

    def forward(self, input: Tensor) -> Tensor:
        module, dimensions = self.module, len(self.module.kernel_size)
        x, examples = self.examples_first(input, 2 + dimensions)
        padding = module.padding
        if module.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
            padding = (0,) * dimensions
        windows = Windows(module.stride, padding, module.dilation, module.groups)
        return _convolve(to_autocast(x), module.weight, module.bias, windows, self.sink, examples)


@register
class _OurConvRule(LayerRule):
    layers = (our.Conv2d,)

    def forward(self, x: Tensor) -> Tensor:
        module = self.module
        x, examples = self.examples_first(x, 4)
        padding = (0, 0) if isinstance(module.padding, str) else tuple(module.padding)
        if module.padding == "same":
            totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            x = F.pad(x, [edge for total in reversed(totals) for edge in (total // 2, total - total // 2)])
        windows = Windows(tuple(module.stride), padding, tuple(module.dilation), module.groups)
        return _convolve(x.to(compute_dtype(x)), module.weight, module.bias, windows, self.sink, examples)
