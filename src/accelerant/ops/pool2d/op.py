"""max_pool2d, avg_pool2d: the public function, its implementations, and the registration with torch and autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import ByTorch, DifferentiableOp
from accelerant.ops._refusals import check_dtype, refuses_float64
from accelerant.ops._straight import straight
from accelerant.ops._windows import Pair, as_images, output_sizes, pair
from accelerant.ops.pool2d.launch import Window, launch_backward, launch_forward, layout_of
from accelerant.runtime.compilation.triton import interpreting, refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.rules import rules

__all__ = ["avg_pool2d", "max_pool2d"]

_aten = torch.ops.aten

_MOST_UNROLLED = 64
"""Elements of a window, and of a step from window to window, that a kernel is compiled for one by one."""
_MOST_PLACES = 2**30
_MOST_ACROSS = 2**21
"""Columns, or channels: a grid has 65535 programs across, of 64 at the most."""


def _is_batch(x: Tensor, *args: Any, **options: Any) -> bool:
    """Whether nothing is added to the shape and taken off again, which torch does in another way."""
    return x.dim() == 4


def _torchs_max(
    x: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    run = _aten.max_pool2d_with_indices if return_indices else torch.max_pool2d
    return run(x, kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode)


@straight("max_pool2d_fwd", _torchs_max, serves=_is_batch)
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
    `deterministic` the gradient is added up in a fixed order: our kernels always do, torch's needs a sort for it.
    Where our kernels serve, what is kept for the gradient is a byte for each element of the result, besides x.
    """
    check_dtype("max_pool2d", x)
    images = as_images("max_pool2d", x)
    window = _window(kernel_size, stride, padding)
    spread = pair("dilation", dilation, 1)
    output_sizes(images, *window, spread, ceil=ceil_mode)
    _refuse_empty_windows(images, *window[1:], spread)
    flat = return_indices or not _keeps_bytes(images, window, spread)
    y, places = _max_pool2d(images, *window, spread, ceil_mode, flat)
    if x.dim() == 3:
        y = y.squeeze(0)
    if not return_indices:
        found: Tensor = y
        return found
    return y, places if x.dim() == 4 else places.squeeze(0)


@straight("avg_pool2d_fwd", F.avg_pool2d, serves=_is_batch)
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


def _cost(case: Case) -> Cost:
    """Reads x, writes y; one operation for each element of each window. Backward the other way round."""
    y, kernel = case.options[0], case.options[1]
    return Cost((math.prod(case.shape) + math.prod(y)) * case.dtype.itemsize, math.prod(y) * math.prod(kernel))


def _unserved(
    dtype: torch.dtype, shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> str | None:
    """Why our kernels leave images (B, C, H, W) to the library."""
    if (why := refuses_float64(dtype)) is not None:
        return why
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    for what, (height, width) in (("windows", spans), ("strides", stride)):
        if height * width > _MOST_UNROLLED:
            return f"{what} of {height} x {width} are left to the library"
    B, C, H, W = shape
    most = H * max(B * C, B * W)  # rows, or pixels, that programs count in 32 bits
    if most >= _MOST_PLACES:
        return f"{most} rows or pixels are left to the library"
    if max(C, W) > _MOST_ACROSS:
        return f"{max(C, W)} columns or channels are left to the library"
    reach = (spans[0] + stride[0]) * W * C  # with the channels last a thread takes two windows, counting in 32 bits
    return f"windows over {reach} elements are left to the library" if reach >= _MOST_PLACES else None


def _refuses_max(case: Case) -> str | None:
    kernel, stride, _, dilation = case.options[1:5]
    return _unserved(case.dtype, case.shape, kernel, stride, dilation) or refuses_triton(case.device)


def _refuses_avg(case: Case) -> str | None:
    kernel, stride = case.options[1:3]
    return _unserved(case.dtype, case.shape, kernel, stride, (1, 1)) or refuses_triton(case.device)


# --- max -------------------------------------------------------------------------------------------------------------


def _keeps_bytes(x: Tensor, window: tuple[list[int], list[int], list[int]], dilation: list[int]) -> bool:
    """Whether places are kept as bytes, which our kernels write and read; else as torch has them."""
    if not (x.is_cuda or (interpreting() and x.device.type == "cpu")) or torch.compiler.is_compiling():
        return False
    return _unserved(x.dtype, x.shape, *window[:2], dilation) is None


class _Places(NamedTuple):
    """Where the windows of images are, to turn a window's elements into indices and back."""

    width: int
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    def _starts(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Row and column where each window begins."""
        rows, columns = (torch.arange(n, device=like.device) for n in like.shape[2:])
        return (rows * self.stride[0] - self.padding[0])[:, None], columns * self.stride[1] - self.padding[1]

    def bytes_of(self, indices: Tensor) -> Tensor:
        """Which of its window's elements each index is."""
        top, left = self._starts(indices)
        i = (indices // self.width - top) // self.dilation[0]
        return (i * self.kernel[1] + (indices % self.width - left) // self.dilation[1]).to(torch.uint8)

    def indices_of(self, places: Tensor) -> Tensor:
        """The other way round; indices as they are."""
        if places.dtype == torch.int64:
            return places
        top, left = self._starts(places)
        i, j = places.long() // self.kernel[1], places.long() % self.kernel[1]
        return (top + i * self.dilation[0]) * self.width + left + j * self.dilation[1]


def _torch_max(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    flat: bool | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    y, indices = _aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
    if flat is None:
        return y, None
    return y, indices if flat else _Places(x.shape[3], kernel, stride, padding, dilation).bytes_of(indices)


def _triton_max(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    flat: bool | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    height, width = output_sizes(x, kernel, stride, padding, dilation, ceil=ceil)
    places = None if flat is None else torch.int64 if flat else torch.uint8
    return launch_forward(x, (height, width), _largest(kernel, stride, padding, dilation), places=places)


def _largest(kernel: list[int], stride: list[int], padding: list[int], dilation: list[int]) -> Window:
    shape = (kernel[0], kernel[1]), (stride[0], stride[1]), (padding[0], padding[1])
    return Window(*shape, largest=True, dilation=(dilation[0], dilation[1]))


def _torch_max_backward(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    places: Tensor,
) -> Tensor:  # fmt: skip
    indices = _Places(x.shape[3], kernel, stride, padding, dilation).indices_of(places)
    dx: Tensor = _aten.max_pool2d_with_indices_backward(dy, x, kernel, stride, padding, dilation, ceil, indices)
    return dx


def _sorted_max_backward(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    places: Tensor,
) -> Tensor:  # fmt: skip
    """The gradient of max_pool2d with the same bits each time: what falls on one place is sorted, then added up."""
    indices = _Places(x.shape[3], kernel, stride, padding, dilation).indices_of(places).flatten(2)
    size = x.shape[2] * x.shape[3]
    start = torch.arange(0, x.shape[0] * x.shape[1] * size, size, device=x.device).view(*x.shape[:2], 1)
    flat = torch.zeros(x.numel(), dtype=dy.dtype, device=x.device)
    flat.index_put_(((start + indices).flatten(),), dy.flatten(), accumulate=True)
    return torch.empty_like(x).copy_(flat.view(x.shape))


def _triton_max_backward(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    places: Tensor,
) -> Tensor:  # fmt: skip
    return launch_backward(dy, x, _largest(kernel, stride, padding, dilation), places)


max_pool2d_fwd = Operation(
    "max_pool2d_fwd",
    (
        Implementation("triton", _triton_max, refuses=_refuses_max, own=True),
        Implementation("torch", _torch_max, differentiable=True),
    ),
    cost=_cost,
)
max_pool2d_bwd = Operation(
    "max_pool2d_bwd",
    (
        Implementation("triton", _triton_max_backward, refuses=_refuses_max, own=True),
        Implementation("torch", _torch_max_backward, deterministic=False),  # by atomics
        Implementation("torch-sorted", _sorted_max_backward),
    ),
    cost=_cost,
)


def _case(x: Tensor, y: Sequence[int], *settings: list[int] | bool | int | str | None) -> Case:
    options = tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in settings)
    return Case(x.device, x.dtype, x.shape, (tuple(y), *options))


def _layout(x: Tensor) -> str:
    """Of a case: kernels differ by it, and others copy."""
    if x.is_contiguous():
        return ""
    return "channels last" if x.is_contiguous(memory_format=torch.channels_last) else "strided"


def _max_forward(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    flat: bool | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    case = _max_case(x, kernel, stride, padding, dilation, ceil, flat)
    found: tuple[Tensor, Tensor] = max_pool2d_fwd(case, x, kernel, stride, padding, dilation, ceil, flat)
    return found


def _max_case(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool,
    flat: bool | None,
) -> Case:  # fmt: skip
    y = (*x.shape[:2], *output_sizes(x, kernel, stride, padding, dilation, ceil=ceil))
    kept = "" if flat is None else "indices" if flat else "places"
    return _case(x, y, kernel, stride, padding, dilation, ceil, kept, _layout(x))


def _max_case_by_torch(x: Tensor, *settings: Any) -> Case | None:
    """None where places are kept in our form, or sums in a fixed order are asked for."""
    return _max_case(x, *settings) if settings[-1] and not rules().deterministic else None


def _max_infer(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool, flat: bool
) -> tuple[Tensor, Tensor]:
    """Without places, None in their stead, where nobody asks for them."""
    return _max_forward(x, kernel, stride, padding, dilation, ceil, flat or None)


def _max_backward(
    dy: Tensor, x: Tensor, places: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], ceil: bool, flat: bool, needs: Sequence[bool],
) -> tuple[Tensor]:  # fmt: skip
    settings = (kernel, stride, padding, dilation, ceil)
    case = _case(x, dy.shape, *settings, "indices" if flat else "places", _layout(x))
    return (max_pool2d_bwd(case, dy, x, *settings, places),)


def _max_again(
    dy: Tensor, x: Tensor, places: Tensor, kernel: list[int], stride: list[int], padding: list[int],
    dilation: list[int], ceil: bool, flat: bool, needs: Sequence[bool],
) -> tuple[Tensor]:  # fmt: skip
    return (_torch_max_backward(dy, x, kernel, stride, padding, dilation, ceil, places),)


_max_pool2d = DifferentiableOp(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil, bool flat)"
    " -> (Tensor y, Tensor places)",
    forward=_max_forward,
    infer=_max_infer,
    backward=_max_backward,
    composite_backward=_max_again,
    saves=("x", "places"),
    gradients={"x": "x"},
    composite=_torch_max,
    fake=_torch_max,
    public=2,
    keeps_layout=True,
    decomposes=True,
    by_torch=ByTorch(max_pool2d_fwd, _max_case_by_torch),
)


# --- average ---------------------------------------------------------------------------------------------------------


def _average(kernel: list[int], stride: list[int], padding: list[int], count_include_pad: bool) -> Window:
    shape = (kernel[0], kernel[1]), (stride[0], stride[1]), (padding[0], padding[1])
    return Window(*shape, largest=False, with_padding=count_include_pad)


def _triton_avg(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, count_include_pad: bool,
    divisor: int | None,
) -> Tensor:  # fmt: skip
    height, width = output_sizes(x, kernel, stride, padding, [1, 1], ceil=ceil)
    return launch_forward(x, (height, width), _average(kernel, stride, padding, count_include_pad), divisor)[0]


def _triton_avg_backward(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool,
    count_include_pad: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    return launch_backward(dy, x, _average(kernel, stride, padding, count_include_pad), divisor=divisor)


def _torch_avg_backward(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool,
    count_include_pad: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    """By torch, on a GPU with the channels first whatever the layout.

    With the channels last, torch 2.11's CUDA kernel and its own kernel for channels first differed by 0.9 of the
    largest element: 64 x 64 x 112 x 112, windows of 3 x 3, stride 2, padding 1.
    """
    settings = (kernel, stride, padding, ceil, count_include_pad, divisor)
    if not x.is_cuda:
        dx: Tensor = _aten.avg_pool2d_backward(dy, x, *settings)
        return dx
    dx = _aten.avg_pool2d_backward(dy.contiguous(), x.contiguous(), *settings)
    return dx.contiguous(memory_format=layout_of(x))


avg_pool2d_fwd = Operation(
    "avg_pool2d_fwd",
    (
        Implementation("triton", _triton_avg, refuses=_refuses_avg, own=True),
        Implementation("torch", _aten.avg_pool2d, differentiable=True),
    ),
    cost=_cost,
)
avg_pool2d_bwd = Operation(
    "avg_pool2d_bwd",
    (
        Implementation("triton", _triton_avg_backward, refuses=_refuses_avg, own=True),
        Implementation("torch", _torch_avg_backward),
    ),
    cost=_cost,
)


def _avg_forward(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, count_include_pad: bool,
    divisor: int | None,
) -> Tensor:  # fmt: skip
    settings = (kernel, stride, padding, ceil, count_include_pad, divisor)
    y: Tensor = avg_pool2d_fwd(_avg_case(x, *settings), x, *settings)
    return y


def _avg_case(
    x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool, count_include_pad: bool,
    divisor: int | None,
) -> Case:  # fmt: skip
    sizes = (*x.shape[:2], *output_sizes(x, kernel, stride, padding, [1, 1], ceil=ceil))
    return _case(x, sizes, kernel, stride, padding, ceil, count_include_pad, divisor, _layout(x))


def _avg_backward(
    dy: Tensor, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], ceil: bool,
    count_include_pad: bool, divisor: int | None, needs: Sequence[bool],
) -> tuple[Tensor]:  # fmt: skip
    settings = (kernel, stride, padding, ceil, count_include_pad, divisor)
    return (avg_pool2d_bwd(_case(x, dy.shape, *settings, _layout(x)), dy, x, *settings),)


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
    by_torch=ByTorch(avg_pool2d_fwd, _avg_case),
)
