"""Launches of pool2d's Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.runtime.compilation.triton import TritonKernel

KERNELS = {name: TritonKernel("accelerant.ops.pool2d.triton_kernels", f"pool2d_{name}") for name in ("fwd", "bwd")}

_SMALL_WINDOW = 16
"""Up to this many elements of a window, a thread computes several windows of a column."""


class Window(NamedTuple):
    """The windows that a kernel is compiled for.

    Attributes:
        kernel, stride, padding: of height and width.
        largest: whether to compute the maximum instead of the average.
        with_padding: whether averages count padding.
        dilation: of windows of a maximum.
    """

    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    largest: bool
    with_padding: bool = False
    dilation: Sequence[int] = (1, 1)

    def constants(self, *, last: bool) -> dict[str, int | bool]:
        """Return the compile-time arguments of both kernels; last: channels last."""
        (kh, kw), (sh, sw), (ph, pw) = self.kernel, self.stride, self.padding
        return {
            "MAX": self.largest, "LAST": last, "WITH_PAD": self.with_padding,
            "KH": kh, "KW": kw, "SH": sh, "SW": sw, "PH": ph, "PW": pw,
            "DH": self.dilation[0], "DW": self.dilation[1],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The work of one program.

    Attributes:
        block_p: rows (pixels with the channels last) of y, or in the backward pass of cells of x.
        block_q: columns (channels with the channels last).
        num_warps: warps per program.
        rows: windows of a column per thread of the forward pass, which reads their rows of x once.
    """

    block_p: int
    block_q: int
    num_warps: int
    rows: int = 1


@functools.cache
def plan_of(name: str, count_q: int, itemsize: int, device_type: str, *, last: bool, few: bool = True) -> PoolPlan:
    """Return the plan of kernel "fwd" or "bwd".

    H200, 64 x 64 x 112 x 112 in bfloat16, windows of 3 x 3, stride 2: max pooling took 0.057 ms (torch 0.210,
    torch.compile 0.059), with the channels last 0.039; its gradient 0.094 (torch 0.591, torch.compile 0.523) and 0.044.
    More columns per thread make its reads narrow: 16 rows by 64 in a block of 4 warps took 0.18 ms.

    Args:
        name, itemsize: of the kernel; bytes of an element.
        count_q: columns, or channels with the channels last.
        device_type: "cuda", or "cpu" for the interpreter.
        last: whether the channels are last.
        few: whether windows have few elements.
    """
    if device_type != "cuda":  # several programs even for small samples
        return PoolPlan(8, 8, 4, 1 + count_q % 2)
    block_q = min(next_power_of_2(count_q), 64)
    rows = (2 if last else 4) if name == "fwd" and few else 1
    if last:  # a thread reads 16 bytes of channels
        return PoolPlan(64 * (16 // itemsize) // block_q, block_q, 2, rows)
    return PoolPlan(128 // block_q, block_q, 2, rows)  # a thread reads single columns


def layout_of(x: Tensor) -> torch.memory_format:
    """Return the memory format of torch's result of an op over images."""
    if x.stride(1) != 1 and x.is_contiguous():
        return torch.contiguous_format
    return torch._prims_common.suggest_memory_format(x)


def _grid(plan: PoolPlan, images: int, channels: int, height: int, width: int, *, last: bool) -> tuple[int, int]:
    p, q = (images * height * width, channels) if last else (images * channels * height, width)
    return ceil_div(p, plan.block_p), ceil_div(q, plan.block_q)


def launch_forward(
    x: Tensor, size: Sequence[int], window: Window, divisor: int | None = None,
    positions: torch.dtype | None = None, plan: PoolPlan | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Return y and the positions of the maxima, both (B, C, *size) in torch's memory format.

    Args:
        divisor: of sums; None: their number of elements.
        positions: uint8 or int64, see triton_kernels.py; None: no positions.
    """
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
    plan: PoolPlan | None = None, pairs: bool | None = None,
) -> Tensor:  # fmt: skip
    """Return dx, in torch's memory format.

    Args:
        x: only its shape and layout are used.
        positions: of the maxima, from launch_forward; None for averages.
        pairs: whether a thread computes two neighbouring columns; None: for stride 2 with the channels first.
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
