"""max_pool2d and avg_pool2d: public functions, implementations, registration with torch and autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._images import Pair, as_images, both, output_sizes, pair
from accelerant.ops._launch import ceil_div, next_power_of_2, triton_operation
from accelerant.ops._library import check_dtype, refuses_float64
from accelerant.runtime.compilation.triton import TritonKernel, interpreting, refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules

__all__ = ["avg_pool2d", "max_pool2d"]


def _windows(
    x: Tensor, kernel: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil: bool, fill: float
) -> Tensor:
    """Return the windows of x padded with `fill`, (..., H', K, W', L)."""
    edges, settings = both(padding), (both(kernel), both(kernel if stride is None else stride), both(dilation))
    positions, extra = [], []
    for n, p, k, s, d in zip(x.shape[-2:], edges, *settings, strict=True):
        free = n + 2 * p - d * (k - 1) - 1
        count = (math.ceil(free / s) if ceil else free // s) + 1
        if ceil and (count - 1) * s >= n + p:
            count -= 1
        positions.append(torch.arange(count, device=x.device)[:, None] * s + torch.arange(k, device=x.device) * d)
        extra.append(max(0, (count - 1) * s + d * (k - 1) + 1 - n - p))
    x = F.pad(x, (edges[1], extra[1], edges[0], extra[0]), value=fill)
    return x[..., positions[0], :][..., positions[1]]


def max_pool2d_reference(
    x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """Return the largest element of each window, the first of them in its rows, which gets the gradient."""
    windows = _windows(x, kernel_size, stride, padding, dilation, ceil_mode, -math.inf).transpose(-3, -2).flatten(-2)
    return windows.take_along_dim(windows.argmax(-1, keepdim=True), -1).squeeze(-1)


def avg_pool2d_reference(
    x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Return the sum of each window over the number of its elements."""
    total = _windows(x, kernel_size, stride, padding, 1, ceil_mode, 0.0).sum((-1, -3))
    if divisor_override is not None:
        return total / divisor_override
    counted = torch.ones(x.shape[-2:], device=x.device, dtype=x.dtype)
    if not count_include_pad:
        return total / _windows(counted, kernel_size, stride, padding, 1, ceil_mode, 0.0).sum((-1, -3))
    vertical, horizontal = both(padding)
    counted = F.pad(counted, (horizontal, horizontal, vertical, vertical), value=1.0)
    beyond = F.pad(counted, (0, both(kernel_size)[1], 0, both(kernel_size)[0]))  # beyond the padding nothing counts
    count = _windows(beyond, kernel_size, stride, 0, 1, False, 0.0).sum((-1, -3))
    return total / count[: total.shape[-2], : total.shape[-1]]


KERNELS = {name: TritonKernel("accelerant.ops.pool2d.triton_kernels", f"pool2d_{name}") for name in ("fwd", "bwd")}

_SMALL_WINDOW = 16  # up to this many elements of a window, a thread computes several windows of a column


class Window(NamedTuple):
    """The windows that a kernel is compiled for; averages count padding `with_padding`, dilation is for maxima."""

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int] = (1, 1)
    largest: bool = True
    with_padding: bool = False

    def constants(self, *, last: bool) -> dict[str, int | bool]:
        """Return the compile-time arguments of both kernels; last: channels last."""
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        return {
            "MAX": self.largest, "LAST": last, "WITH_PAD": self.with_padding,
            "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw,
            "DH": self.dilation[0], "DW": self.dilation[1],
        }  # fmt: skip

    def _starts(self, like: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = (torch.arange(n, device=like.device) for n in like.shape[2:])
        return (rows * self.stride[0] - self.padding[0])[:, None], columns * self.stride[1] - self.padding[1]

    def to_bytes(self, indices: Tensor, width: int) -> Tensor:
        """Return the position within its window of each index in an image of this width."""
        top, left = self._starts(indices)
        i = (indices // width - top) // self.dilation[0]
        return (i * self.kernel[1] + (indices % width - left) // self.dilation[1]).to(torch.uint8)

    def to_indices(self, positions: Tensor, width: int) -> Tensor:
        """Return the index of each position; int64 arguments are indices already."""
        if positions.dtype == torch.int64:
            return positions
        top, left = self._starts(positions)
        i, j = positions.long() // self.kernel[1], positions.long() % self.kernel[1]
        return (top + i * self.dilation[0]) * width + left + j * self.dilation[1]


@dataclass(frozen=True, slots=True)
class PoolTile:
    """The work of a program: `block_p` pixels or rows by `block_q` channels or columns; `rows` windows a thread."""

    block_p: int
    block_q: int
    num_warps: int
    rows: int = 1


@functools.cache
def plan_of(name: str, count_q: int, itemsize: int, device_type: str, *, last: bool, few: bool = True) -> PoolTile:
    """Return the plan of kernel "fwd" or "bwd" for count_q columns, or channels with the channels `last`.

    `few`: windows have few elements. More columns per thread make its reads narrow, three times as slow on an H200.
    """
    if device_type != "cuda":  # several programs even for small samples
        return PoolTile(8, 8, 4, 1 + count_q % 2)
    block_q = min(next_power_of_2(count_q), 64)
    rows = (2 if last else 4) if name == "fwd" and few else 1
    if last:  # a thread reads 16 bytes of channels
        return PoolTile(64 * (16 // itemsize) // block_q, block_q, 2, rows)
    return PoolTile(128 // block_q, block_q, 2, rows)  # a thread reads single columns


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of torch's result of an op over images."""
    if x.stride(1) != 1 and x.is_contiguous():
        return torch.contiguous_format
    return torch._prims_common.suggest_memory_format(x)


def _grid(plan: PoolTile, images: int, channels: int, height: int, width: int, *, last: bool) -> tuple[int, int]:
    p, q = (images * height * width, channels) if last else (images * channels * height, width)
    return ceil_div(p, plan.block_p), ceil_div(q, plan.block_q)


def launch_forward(
    x: Tensor, size: Sequence[int], window: Window, divisor: int | None = None,
    positions: torch.dtype | None = None, plan: PoolTile | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y and the positions of the maxima (uint8, int64; None: none), (B, C, *size) in torch's memory format."""
    layout = layout_of(x)
    last = layout == torch.channels_last
    x = x.contiguous(memory_format=layout)
    (B, C, H, W), (height, width) = x.shape, size
    y = torch.empty((B, C, *size), dtype=x.dtype, device=x.device, memory_format=layout)
    saved = None if positions is None else torch.empty_like(y, dtype=positions)
    if y.numel():
        few = window.kernel[0] * window.kernel[1] <= _SMALL_WINDOW
        plan = plan or plan_of("fwd", C if last else width, x.element_size(), x.device.type, last=last, few=few)
        KERNELS["fwd"].launch(
            _grid(plan, B, C, ceil_div(height, plan.rows), width, last=last),
            (x, y, saved, divisor, B, C, H, W, height, width),
            {**window.constants(last=last), "ROWS": plan.rows, "BLOCK_P": plan.block_p, "BLOCK_Q": plan.block_q},
            num_warps=plan.num_warps,
        )
    return y, saved


def launch_backward(
    dy: Tensor, x: Tensor, window: Window, positions: Tensor | None = None, divisor: int | None = None,
    plan: PoolTile | None = None, pairs: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return dx, in torch's memory format; of x only shape and layout are used.

    `positions` are launch_forward's, None for averages. `pairs`: a thread computes two neighbouring columns; None: for
    stride 2 with the channels first.
    """
    layout = layout_of(x)
    last = layout == torch.channels_last
    (B, C, H, W), (height, width) = x.shape, dy.shape[2:]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=layout)
    if not dx.numel():
        return dx
    dy = dy.contiguous(memory_format=layout)
    positions = None if positions is None else positions.contiguous(memory_format=layout)
    cells = ceil_div(H, window.stride[0]), ceil_div(W, window.stride[1])
    plan = plan or plan_of("bwd", C if last else cells[1], x.element_size(), x.device.type, last=last)
    pairs = (not last and window.stride[1] == 2) if pairs is None else pairs
    KERNELS["bwd"].launch(
        _grid(plan, B, C, *cells, last=last),
        (dy, positions, dx, divisor, B, C, H, W, height, width),
        {**window.constants(last=last), "PAIRS": pairs, "BLOCK_P": plan.block_p, "BLOCK_Q": plan.block_q},
        num_warps=plan.num_warps,
    )
    return dx


_aten = torch.ops.aten

_MAX_UNROLLED = 64  # elements of a window, and of a stride, up to which the kernels are unrolled
_MAX_ELEMENTS = 2**30
_MAX_COLUMNS = 2**21  # columns, or channels: the grid's second dimension has at most 65535 programs of at most 64


def _torch_max_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:  # fmt: skip
    run = _aten.max_pool2d_with_indices if return_indices else torch.max_pool2d
    return run(x, kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode)


# Without a batch dimension torch adds one in another way.
_max_pool2d_cpu = CpuFastPath(_torch_max_pool2d, serves=lambda x, *_, **__: x.dim() == 4)


@_max_pool2d_cpu
def max_pool2d(
    x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Take the largest element of each window of an image.

    Args:
        x: (B, C, H, W) or (C, H, W); float16, bfloat16, float32 or float64.
        kernel_size: of the window; one number or one per dimension, at least 1.
        stride: distance of windows, at least 1; None: kernel_size.
        padding: of -inf on each side, at least 0 and at most half of kernel_size.
        dilation: distance of a window's elements, at least 1.
        ceil_mode: whether the last window may reach beyond the padding.
        return_indices: also return each maximum's index in its image.

    Returns:
        (B, C, H', W') or (C, H', W'), H' = (H + 2 padding - dilation (kernel_size - 1) - 1) // stride + 1, or with the
        quotient rounded up; dtype of x, torch's memory format; a window with NaN gives NaN. With return_indices also
        int64 of that shape. Differentiable twice.

    Raises:
        ShapeError: x has other dimensions, or is smaller than a window; or a window lies in the padding only.
        UnsupportedDtype: a dtype not listed above.
        ConfigError: a setting out of range.
        TypeError: x is not a tensor.

    Under torch.compile, forward-mode differentiation and the transforms of torch.func, torch's own max_pool2d runs, and
    the ledger does not count it; likewise `avg_pool2d`. With the setting `deterministic` gradients are added in a fixed
    order, which the Triton kernels always do and torch does after a sort. The Triton kernels save a byte per element of
    the result for the gradient, besides x.
    """
    check_dtype("max_pool2d", x)
    images = as_images("max_pool2d", x)
    window = _window(kernel_size, stride, padding)
    spread = pair("dilation", dilation, 1)
    output_sizes(images, *window, spread, ceil=ceil_mode)
    _refuse_empty_windows(images, *window[1:], spread)
    flat = return_indices or not _saves_bytes(images, window, spread)
    y: Tensor
    y, indices = _max_pool2d(images, *window, spread, ceil_mode, flat)
    if x.dim() == 3:
        y = y.squeeze(0)
    if not return_indices:
        return y
    return y, indices if x.dim() == 4 else indices.squeeze(0)


_avg_pool2d_cpu = CpuFastPath(F.avg_pool2d, serves=lambda x, *_, **__: x.dim() == 4)


@_avg_pool2d_cpu
def avg_pool2d(
    x: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Tensor:  # fmt: skip
    """Average the elements of each window of an image.

    Args:
        x, kernel_size, stride, padding, ceil_mode: as for `max_pool2d`, with padding of zeros.
        count_include_pad: whether padding counts as elements.
        divisor_override: divisor of the sums instead of the number of elements; not 0.

    Returns:
        (B, C, H', W') or (C, H', W'), H' = (H + 2 padding - kernel_size) // stride + 1, or with the quotient rounded
        up; dtype of x, torch's memory format. Differentiable any number of times.

    Raises:
        ShapeError: x has other dimensions, or is smaller than a window.
        UnsupportedDtype, ConfigError, TypeError: as `max_pool2d`.
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
    kernel, edges = pair("kernel_size", kernel_size, 1), pair("padding", padding, 0)
    if any(2 * p > k for p, k in zip(edges, kernel, strict=True)):
        raise ConfigError(f"padding must be at most half of kernel_size {kernel_size!r}, got {padding!r}")
    return kernel, kernel if stride is None else pair("stride", stride, 1), edges


def _refuse_empty_windows(x: Tensor, stride: list[int], padding: list[int], dilation: list[int]) -> None:
    """Raise ShapeError for a window that lies in the padding only, as with a dilation larger than the image.

    torch returns an index outside the image for it, by which its backward pass would write out of bounds.
    """
    for size, s, p, d, which in zip(x.shape[2:], stride, padding, dilation, ("height", "width"), strict=True):
        if size < d and any(start % d >= size for start in range(-p, 0, s)):
            raise ShapeError(
                f"with dilation {d} and padding {p} a window has no element of {which} {size}; x is {tuple(x.shape)}"
            )


def _cost(case: Case) -> Cost:
    y, kernel = case.options[0], case.options[1]
    return Cost((math.prod(case.shape) + math.prod(y)) * case.dtype.itemsize, math.prod(y) * math.prod(kernel))


def _refuses_sizes(
    dtype: torch.dtype, shape: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> str | None:
    """Return why the Triton kernels cannot serve images (B, C, H, W), or None."""
    if (why := refuses_float64(dtype)) is not None:
        return why
    spans = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    for what, (height, width) in (("windows", spans), ("strides", stride)):
        if height * width > _MAX_UNROLLED:
            return f"{what} of {height} x {width} are left to the library"
    B, C, H, W = shape
    rows = H * max(B * C, B * W)  # rows, or pixels, counted in 32 bits
    if rows >= _MAX_ELEMENTS:
        return f"{rows} rows or pixels are left to the library"
    if max(C, W) > _MAX_COLUMNS:
        return f"{max(C, W)} columns or channels are left to the library"
    reach = (spans[0] + stride[0]) * W * C  # of two windows with the channels last, counted in 32 bits
    return f"windows over {reach} elements are left to the library" if reach >= _MAX_ELEMENTS else None


def _refuses(case: Case) -> str | None:
    kernel, stride, _, dilation = case.options[1:5]  # an average has none
    spread = dilation if isinstance(dilation, tuple) else (1, 1)
    return _refuses_sizes(case.dtype, case.shape, kernel, stride, spread) or refuses_triton(case.device)


# --- max -------------------------------------------------------------------------------------------------------------
def _saves_bytes(x: Tensor, window: tuple[list[int], list[int], list[int]], dilation: list[int]) -> bool:
    """Return whether positions are saved as bytes, which only the Triton kernels do, instead of torch's indices."""
    if not (x.is_cuda or (interpreting() and x.device.type == "cpu")) or torch.compiler.is_compiling():
        return False
    return _refuses_sizes(x.dtype, x.shape, *window[:2], dilation) is None


# Settings of max pooling: kernel, stride, padding, dilation, ceil; `flat` saves indices in the image rather than bytes,
# None saves neither. Those of averages have count_include_pad and the divisor in place of dilation and flat.


def _torch_max(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor | None]:
    *window, ceil, flat = settings
    y, indices = _aten.max_pool2d_with_indices(x, *window, ceil)
    if flat is None:
        return y, None
    return y, indices if flat else Window(*window).to_bytes(indices, x.shape[3])


def _triton_max(x: Tensor, *settings: Any) -> tuple[Tensor, Tensor | None]:
    *window, ceil, flat = settings
    saved = None if flat is None else torch.int64 if flat else torch.uint8
    return launch_forward(x, output_sizes(x, *window, ceil=ceil), Window(*window), positions=saved)


def _torch_max_backward(dy: Tensor, x: Tensor, *settings: Any) -> Tensor:
    *window, ceil, positions = settings
    indices = Window(*window).to_indices(positions, x.shape[3])
    dx: Tensor = _aten.max_pool2d_with_indices_backward(dy, x, *window, ceil, indices)
    return dx


def _sorted_max_backward(dy: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """Return the gradient of max_pool2d deterministically: contributions are sorted by index, then added."""
    *window, _, positions = settings
    indices = Window(*window).to_indices(positions, x.shape[3]).flatten(2)
    size = x.shape[2] * x.shape[3]
    start = torch.arange(0, x.shape[0] * x.shape[1] * size, size, device=x.device).view(*x.shape[:2], 1)
    flat = torch.zeros(x.numel(), dtype=dy.dtype, device=x.device)
    flat.index_put_(((start + indices).flatten(),), dy.flatten(), accumulate=True)
    return torch.empty_like(x).copy_(flat.view(x.shape))


def _triton_max_backward(dy: Tensor, x: Tensor, *settings: Any) -> Tensor:
    *window, _, positions = settings
    return launch_backward(dy, x, Window(*window), positions)


max_pool2d_fwd = triton_operation(
    "max_pool2d_fwd", _triton_max, _torch_max, cost=_cost, refuses=_refuses, differentiable=True
)
max_pool2d_bwd = Operation(
    "max_pool2d_bwd",
    (
        Implementation("triton", _triton_max_backward, refuses=_refuses, own=True),
        Implementation("torch", _torch_max_backward, deterministic=False),  # atomics
        Implementation("torch-sorted", _sorted_max_backward),
    ),
    cost=_cost,
)


def _case(x: Tensor, y: Sequence[int], *settings: list[int] | bool | int | str | None) -> Case:
    """Return a case whose last option is the layout: kernels differ by it, and other layouts are copied."""
    options = tuple(tuple(value) if isinstance(value, (list, tuple)) else value for value in settings)
    last = "channels last" if x.is_contiguous(memory_format=torch.channels_last) else "strided"
    return Case(x.device, x.dtype, x.shape, (tuple(y), *options, "" if x.is_contiguous() else last))


def _max_case(x: Tensor, *settings: Any) -> Case:
    *window, ceil, flat = settings
    y = (*x.shape[:2], *output_sizes(x, *window, ceil=ceil))
    return _case(x, y, *window, ceil, "" if flat is None else "indices" if flat else "bytes")


def _max_backward(dy: Tensor, x: Tensor, positions: Tensor, *settings: Any) -> tuple[Tensor]:
    *window, flat, _ = settings
    case = _case(x, dy.shape, *window, "indices" if flat else "bytes")
    return (max_pool2d_bwd(case, dy, x, *window, positions),)


# torch saves indices, and its gradient is not deterministic.
_max_pool2d_cpu.case(
    lambda x, *settings: _max_case(x, *settings) if settings[-1] and not rules().deterministic else None
)


class _MaxPool2d(DecomposedOp):
    public = 2

    def infer(self, *args: Any) -> Any:
        """Compute without positions, returning None for them, unless the call returns indices."""
        x, *settings, flat = args
        return self.forward(x, *settings, flat or None)


_max_pool2d = _MaxPool2d(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil, bool flat)"
    " -> (Tensor y, Tensor positions)",
    operation=max_pool2d_fwd,
    case=_max_case,
    backward=_max_backward,
    composite_backward=lambda dy, x, positions, *settings: (_torch_max_backward(dy, x, *settings[:-2], positions),),
    saves=("x", "positions"),
    gradients={"x": "x"},
    composite=_torch_max,
    fake=_torch_max,
    keeps_layout=True,
    cpu=_max_pool2d_cpu,
)


# --- average ---------------------------------------------------------------------------------------------------------
def _triton_avg(x: Tensor, *settings: Any) -> Tensor:
    kernel, stride, padding, ceil, with_padding, divisor = settings
    sizes = output_sizes(x, kernel, stride, padding, [1, 1], ceil=ceil)
    return launch_forward(x, sizes, Window(kernel, stride, padding, (1, 1), False, with_padding), divisor)[0]


def _triton_avg_backward(dy: Tensor, x: Tensor, *settings: Any) -> Tensor:
    kernel, stride, padding, _, with_padding, divisor = settings
    return launch_backward(dy, x, Window(kernel, stride, padding, (1, 1), False, with_padding), divisor=divisor)


def _torch_avg_backward(dy: Tensor, x: Tensor, *settings: Any) -> Tensor:
    """Return torch's gradient, on a GPU with the channels first: with them last torch 2.11's CUDA kernel was wrong."""
    dx: Tensor
    if not x.is_cuda:
        dx = _aten.avg_pool2d_backward(dy, x, *settings)
        return dx
    dx = _aten.avg_pool2d_backward(dy.contiguous(), x.contiguous(), *settings)
    return dx.contiguous(memory_format=layout_of(x))


avg_pool2d_fwd = triton_operation(
    "avg_pool2d_fwd", _triton_avg, _aten.avg_pool2d, cost=_cost, refuses=_refuses, differentiable=True
)
avg_pool2d_bwd = triton_operation(
    "avg_pool2d_bwd", _triton_avg_backward, _torch_avg_backward, cost=_cost, refuses=_refuses
)


def _avg_case(x: Tensor, *settings: Any) -> Case:
    kernel, stride, padding, ceil, _, _ = settings
    return _case(x, (*x.shape[:2], *output_sizes(x, kernel, stride, padding, [1, 1], ceil=ceil)), *settings)


_avg_pool2d = DecomposedOp(
    "avg_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, bool ceil, bool count_include_pad, int? divisor)"
    " -> (Tensor y)",
    operation=avg_pool2d_fwd,
    case=_avg_case,
    backward=lambda dy, x, *settings: (avg_pool2d_bwd(_case(x, dy.shape, *settings[:-1]), dy, x, *settings[:-1]),),
    composite_backward=lambda dy, x, *settings: (_aten.avg_pool2d_backward(dy, x, *settings[:-1]),),
    saves=("x",),
    gradients={"x": "x"},
    composite=F.avg_pool2d,
    fake=F.avg_pool2d,
    keeps_layout=True,
    cpu=_avg_pool2d_cpu,
)
