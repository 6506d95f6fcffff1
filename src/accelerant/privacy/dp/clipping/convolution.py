"""Convolutions: their windows are rows, as of a linear map, for norms; the weighted sum is a convolution's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from accelerant import nn as our
from accelerant.nn.layers import compute_dtype
from accelerant.ops._per_example import PerExampleSink
from accelerant.privacy.dp.clipping import launch
from accelerant.privacy.dp.clipping.contributions import Dense, Piece
from accelerant.privacy.dp.clipping.functions import once, to_autocast
from accelerant.privacy.dp.clipping.layers import KINDS, Forward, Kind, batch_of
from accelerant.privacy.dp.clipping.norms import chunks, prefers_ghost, wide

__all__ = ["Convolution", "Windows", "register"]


class Windows(NamedTuple):
    """Of a convolution: stride, padding and dilation in each dimension of the image, and groups."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(slots=True)
class Convolution:
    """A kernel's gradient: x (B, C, ...), g (B, O, ...), weight (O, C / groups, ...). Kept: both, but no windows."""

    x: Tensor
    g: Tensor
    weight: Tensor
    windows: Windows
    formed: ClassVar[bool] = False

    def sizes(self) -> tuple[int, int, int, int, int, str]:
        """As Rows.sizes, of a group."""
        T, O = self.g[0, 0].numel() if self.g.shape[0] else 1, self.g.shape[1] // self.windows.groups  # noqa: E741
        return self.x.shape[0], T, O, self.weight[0].numel(), self.x.element_size(), self.x.device.type

    def squares(self) -> Tensor:
        """By the ghost norm of each group."""
        B, groups = self.x.shape[0], self.windows.groups
        found = torch.empty(B, dtype=wide(self.x.dtype), device=self.x.device)
        for part in self._parts():
            a, g = self._rows(part)
            found[part] = launch.ghost_squares(a.flatten(0, 1), g.flatten(0, 1)).view(-1, groups).sum(1)
        return found

    def dense(self) -> Dense:
        """(B, *shape of the kernel)."""
        each = self.x.new_empty((self.x.shape[0], *self.weight.shape))
        for part in self._parts():
            a, g = self._rows(part)
            each[part] = torch.matmul(g.mT, a).view(-1, *self.weight.shape)
        return Dense(each)

    def preferred(self) -> Piece:
        """By the rule."""
        return self if prefers_ghost(*self.sizes()) else self.dense()

    def total(self, weights: Tensor, drop: Tensor | None, shape: torch.Size) -> Tensor:
        """The kernel's gradient of weighted g."""
        g = launch.scaled(self.g, weights, drop, self.g.dtype)
        x = launch.cleared(self.x, drop)
        _, found, _ = torch.ops.aten.convolution_backward(
            g, x, self.weight.to(g.dtype), None, *self.windows[:3], False,
            [0] * len(self.windows.stride), self.windows.groups, [False, True, False],
        )  # fmt: skip
        return found.view(shape)  # type: ignore[no-any-return]  # torch's own

    def add_to(self, grad: Tensor, weights: Tensor, drop: Tensor | None) -> None:
        """The sum, added."""
        grad.add_(self.total(weights, drop, grad.shape))

    def _parts(self) -> Any:
        return chunks(self.x.shape[0], self.weight[0].numel() * self.windows.groups * self.sizes()[1])

    def _rows(self, part: slice) -> tuple[Tensor, Tensor]:
        """Windows (b, groups, T, K) and gradients (b, groups, T, N)."""
        groups = self.windows.groups
        x, kernel = self.x[part], tuple(self.weight.shape[2:])
        stride, padding, dilation = self.windows[:3]
        if x.dim() == 3:
            x, kernel = x.unsqueeze(2), (1, *kernel)
            stride, padding, dilation = (1, *stride), (0, *padding), (1, *dilation)
        a = F.unfold(x, kernel, dilation, padding, stride)
        a = a.view(x.shape[0], groups, -1, a.shape[2])
        return a.mT, self.g[part].reshape(x.shape[0], groups, -1, a.shape[3]).mT


class _Convolve(torch.autograd.Function):
    """x (B, C, ...), weight, bias -> (B, O, ...)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, windows: Windows, sink: Any, examples: int
    ) -> Tensor:
        low = weight.to(x.dtype)
        low_bias = None if bias is None else bias.to(x.dtype)
        y = torch.ops.aten.convolution(
            x, low, low_bias, *windows[:3], False, [0] * len(windows.stride), windows.groups
        )  # fmt: skip
        ctx.save_for_backward(x, low)
        ctx.windows, ctx.sink, ctx.parameters, ctx.examples = windows, sink, (weight, bias), examples
        sink.expect(weight, bias)
        return y  # type: ignore[no-any-return]  # torch's own

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        once(ctx)
        x, low = ctx.saved_tensors
        (weight, bias), sink, windows = ctx.parameters, ctx.sink, ctx.windows
        if sink.wants(weight):
            sink.piece(weight, Convolution(x, dy, low, windows), ctx.examples)
        if sink.wants(bias):
            sink.gradients(bias, dy.flatten(2).sum(2, dtype=wide(dy.dtype)))
        dx = None
        if ctx.needs_input_grad[0]:
            dx, _, _ = torch.ops.aten.convolution_backward(
                dy, x, low, None, *windows[:3], False, [0] * len(windows.stride), windows.groups, [True, False, False]
            )
        return dx, None, None, None, None, None


_convolve: Callable[..., Tensor] = _Convolve.apply


def _convolution(dimensions: int) -> Callable[[Any, Any, Forward], Forward]:
    def make(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
        def forward(input: Tensor) -> Tensor:
            x, examples = batch_of(input, sink, module, 2 + dimensions)
            padding = module.padding
            if module.padding_mode != "zeros" or isinstance(padding, str):
                mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
                x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
                padding = (0,) * dimensions
            windows = Windows(module.stride, padding, module.dilation, module.groups)
            return _convolve(to_autocast(x), module.weight, module.bias, windows, sink, examples)

        return forward

    return make


def _our_convolution(module: Any, sink: PerExampleSink, plain: Forward) -> Forward:
    def forward(x: Tensor) -> Tensor:
        x, examples = batch_of(x, sink, module, 4)
        padding = module.padding
        if padding == "same":
            totals = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
            edges = [edge for total in reversed(totals) for edge in (total // 2, total - total // 2)]
            x = F.pad(x, edges)
        windows = Windows(
            tuple(module.stride),
            (0, 0) if isinstance(padding, str) else tuple(padding),
            tuple(module.dilation),
            module.groups,
        )
        return _convolve(x.to(compute_dtype(x)), module.weight, module.bias, windows, sink, examples)

    return forward


def register() -> None:
    """Make them known."""
    KINDS[nn.Conv1d.forward] = Kind(_convolution(1))
    KINDS[nn.Conv2d.forward] = Kind(_convolution(2))
    KINDS[our.Conv2d.forward] = Kind(_our_convolution)
