"""max_pool2d, avg_pool2d: validation, registration with torch, autograd; the pooling itself is torch's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import DifferentiableOp
from accelerant.ops._elementwise import check_dtype
from accelerant.ops._windows import Pair, as_images, output_sizes, pair
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = ["avg_pool2d", "max_pool2d"]

_aten = torch.ops.aten


def _cost(case: Case) -> Cost:
    """Reads x, writes y; one operation for each element of each window. Backward the other way round."""
    y, kernel = case.options[0], case.options[1]
    return Cost((math.prod(case.shape) + math.prod(y)) * case.dtype.itemsize, math.prod(y) * math.prod(kernel))


max_pool2d_fwd = Operation("max_pool2d_fwd", (Implementation("torch", _aten.max_pool2d_with_indices),), cost=_cost)
max_pool2d_bwd = Operation(
    "max_pool2d_bwd",
    (
        Implementation("torch", _aten.max_pool2d_with_indices_backward, deterministic=False),  # by atomics
        Implementation("torch-sorted", lambda *args: _sorted_max_backward(*args)),
    ),
    cost=_cost,
)
avg_pool2d_fwd = Operation("avg_pool2d_fwd", (Implementation("torch", _aten.avg_pool2d),), cost=_cost)
avg_pool2d_bwd = Operation("avg_pool2d_bwd", (Implementation("torch", _aten.avg_pool2d_backward),), cost=_cost)


def max_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Take the largest element of each window of an image.

    Args:
        x: (B, C, H, W) or (C, H, W); float16, bfloat16, float32 or float64.
        kernel_size: of the window; one number or one for each dimension, at least 1.
        stride: from window to window, at least 1; None: kernel_size.
        padding: of -inf at each side, at least 0 and at most half of kernel_size.
        dilation: from element to element of a window, at least 1.
        ceil_mode: whether a last window may reach beyond the padding.
        return_indices: whether to give each element's place in its image too.

    Returns:
        (B, C, H', W') or (C, H', W'), H' = (H + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1, or with the
        quotient rounded up; dtype of x, layout as torch gives it; a window with NaN gives NaN. And int64 of that shape,
        if asked for. Differentiable twice.

    Raises:
        ShapeError: x of other dimensions, or smaller than a window; a window in the padding alone.
        UnsupportedDtype: dtype not listed above.
        ConfigError: a setting out of range.

    Under torch.compile, forward-mode differentiation and the transforms of torch.func (grad, jvp, vmap, ...) this is
    torch's own max_pool2d; the ledger does not count those. The same holds for `avg_pool2d`. With the setting
    `deterministic` the gradient is added up in a fixed order, which costs a sort.
    """
    check_dtype("max_pool2d", x)
    images = as_images("max_pool2d", x)
    window = _window(kernel_size, stride, padding)
    spread = pair("dilation", dilation, 1)
    output_sizes(images, *window, spread, ceil=ceil_mode)
    _refuse_empty_windows(images, *window[1:], spread)
    y, indices = _max_pool2d(images, *window, spread, ceil_mode)
    if x.dim() == 3:
        y, indices = y.squeeze(0), indices.squeeze(0)
    return (y, indices) if return_indices else y


def avg_pool2d(
    x: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Average the elements of each window of an image.

    Args:
        x: (B, C, H, W) or (C, H, W); float16, bfloat16, float32 or float64.
        kernel_size: of the window; one number or one for each dimension, at least 1.
        stride: from window to window, at least 1; None: kernel_size.
        padding: of zeros at each side, at least 0 and at most half of kernel_size.
        ceil_mode: whether a last window may reach beyond the padding.
        count_include_pad: whether padding counts as elements.
        divisor_override: what to divide sums by instead of the number of elements; not 0.

    Returns:
        (B, C, H', W') or (C, H', W'), H' = (H + 2 padding - kernel_size) // stride + 1, or with the quotient rounded
        up; dtype of x, layout as torch gives it. Differentiable any number of times.

    Raises:
        ShapeError: x of other dimensions, or smaller than a window.
        UnsupportedDtype: dtype not listed above.
        ConfigError: a setting out of range.
    """
    check_dtype("avg_pool2d", x)
    images = as_images("avg_pool2d", x)
    window = _window(kernel_size, stride, padding)
    if divisor_override == 0:
        raise ConfigError("divisor_override must not be 0, got 0")
    output_sizes(images, *window, [1, 1], ceil=ceil_mode)
    y: Tensor = _avg_pool2d(images, *window, ceil_mode, count_include_pad, divisor_override)
    return y if x.dim() == 4 else y.squeeze(0)


def _window(kernel_size: Pair, stride: Pair | None, padding: Pair) -> tuple[list[int], list[int], list[int]]:
    """Kernel, stride and padding for each dimension."""
    kernel, edges = pair("kernel_size", kernel_size, 1), pair("padding", padding, 0)
    if any(2 * p > k for p, k in zip(edges, kernel, strict=True)):
        raise ConfigError(f"padding must be at most half of kernel_size {kernel_size!r}, got {padding!r}")
    return kernel, kernel if stride is None else pair("stride", stride, 1), edges


def _refuse_empty_windows(x: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> None:
    """Raise ShapeError for a window whose elements all lie in the padding: torch gives it an index out of the image.

    In its backward pass that index would write outside the gradient. Only steps larger than the image do so.
    """
    for size, s, p, d, which in zip(x.shape[2:], stride, padding, dilation, ("height", "width"), strict=True):
        if size < d and any(start % d >= size for start in range(-p, 0, s)):
            raise ShapeError(
                f"with dilation {d} and padding {p} a window has no element of {which} {size}; x is {tuple(x.shape)}"
            )


def _case(x: Tensor, y: Sequence[int], *settings: list[int] | bool | int | None) -> Case:
    options = tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in settings)
    return Case(x.device, x.dtype, x.shape, (tuple(y), *options))


# --- max -------------------------------------------------------------------------------------------------------------


def _max_forward(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool
) -> tuple[Tensor, Tensor]:
    settings = (kernel, stride, padding, dilation, ceil)
    y = (*x.shape[:2], *output_sizes(x, kernel, stride, padding, dilation, ceil=ceil))
    found: tuple[Tensor, Tensor] = max_pool2d_fwd(_case(x, y, *settings), x, *settings)
    return found


def _max_backward(
    dy: Tensor,
    x: Tensor,
    indices: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil: bool,
    needs: Sequence[bool],
) -> tuple[Tensor]:
    settings = (kernel, stride, padding, dilation, ceil)
    return (max_pool2d_bwd(_case(x, dy.shape, *settings), dy, x, *settings, indices),)


def _sorted_max_backward(dy: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """The gradient of max_pool2d with the same bits each time: what falls on one place is sorted, then added up."""
    indices = settings[-1].flatten(2)
    size = x.shape[2] * x.shape[3]
    start = torch.arange(0, x.shape[0] * x.shape[1] * size, size, device=x.device).view(*x.shape[:2], 1)
    flat = torch.zeros(x.numel(), dtype=dy.dtype, device=x.device)
    flat.index_put_(((start + indices).flatten(),), dy.flatten(), accumulate=True)
    return torch.empty_like(x).copy_(flat.view(x.shape))


def _max_again(dy: Tensor, x: Tensor, indices: Tensor, *settings: Any) -> tuple[Tensor]:
    return (_aten.max_pool2d_with_indices_backward(dy, x, *settings[:-1], indices),)


_max_pool2d = DifferentiableOp(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil)"
    " -> (Tensor y, Tensor indices)",
    forward=_max_forward,
    backward=_max_backward,
    composite_backward=_max_again,
    saves=("x", "indices"),
    gradients={"x": "x"},
    composite=_aten.max_pool2d_with_indices,
    fake=_aten.max_pool2d_with_indices,
    public=2,
    keeps_layout=True,
    decomposes=True,
)


# --- average ---------------------------------------------------------------------------------------------------------


def _avg_forward(
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    settings = (kernel, stride, padding, ceil, count_include_pad, divisor)
    sizes = (*x.shape[:2], *output_sizes(x, kernel, stride, padding, [1, 1], ceil=ceil))
    y: Tensor = avg_pool2d_fwd(_case(x, sizes, *settings), x, *settings)
    return y


def _avg_backward(
    dy: Tensor,
    x: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    ceil: bool,
    count_include_pad: bool,
    divisor: int | None,
    needs: Sequence[bool],
) -> tuple[Tensor]:
    settings = (kernel, stride, padding, ceil, count_include_pad, divisor)
    return (avg_pool2d_bwd(_case(x, dy.shape, *settings), dy, x, *settings),)


_avg_pool2d = DifferentiableOp(
    "avg_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil, bool count_include_pad, int? divisor)"
    " -> (Tensor y)",
    forward=_avg_forward,
    backward=_avg_backward,
    composite_backward=lambda dy, x, *settings: (_aten.avg_pool2d_backward(dy, x, *settings[:-1]),),
    saves=("x",),
    gradients={"x": "x"},
    composite=F.avg_pool2d,
    fake=F.avg_pool2d,
    keeps_layout=True,
    decomposes=True,
)
