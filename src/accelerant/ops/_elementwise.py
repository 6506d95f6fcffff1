"""What the elementwise ops (elementwise, gelu, swiglu, dropout) share: layouts, and what a program takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from accelerant.errors import UnsupportedDtype
from accelerant.ops._l2 import eviction
from accelerant.ops._library import name_of
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case, Cost
from accelerant.runtime.dispatch.tuning import Tuned

__all__ = [
    "DTYPES",
    "SHORT",
    "STREAM",
    "STREAMS",
    "Elementwise",
    "StreamKernel",
    "accesses",
    "check_dtype",
    "dense_pair",
    "launch_map",
    "launch_map_backward",
    "refuses_float64",
]

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Elements and warps a program."""

    block: int
    num_warps: int

    def grid(self, n: int) -> tuple[int]:
        """How many programs n elements take."""
        return (-(-n // self.block),)


# 8 elements a thread, one 16-byte load of bfloat16 for each tensor: the fastest measured on an H200, by 5% over 16.
STREAM = Elementwise(block=1024, num_warps=4)

SHORT = Elementwise(block=512, num_warps=2)
"""The fastest there, by half a per cent, where a kernel passes over three tensors or more; over two it loses 20%."""

STREAMS = (SHORT, Elementwise(1024, 2), STREAM, Elementwise(2048, 4), Elementwise(2048, 8))
"""What is worth timing for an elementwise kernel."""


class StreamKernel(TritonKernel):
    """A kernel over n elements.

    Args:
        module, name: as TritonKernel.
        usual: what a program takes where nothing was measured.
        widths: as TritonKernel.
    """

    def __init__(self, module: str, name: str, usual: Elementwise = STREAM, widths: Sequence[int] = ()) -> None:
        super().__init__(module, name, widths=widths)
        self.usual = usual
        self.plan: Tuned[Elementwise] = Tuned(name, default=lambda n: usual, candidates=lambda n: STREAMS)


def check_dtype(op: str, x: Tensor, name: str = "x") -> None:
    """Raise UnsupportedDtype unless x is of a floating dtype that the elementwise ops take."""
    if x.dtype not in DTYPES:
        raise UnsupportedDtype(f"{op} takes {', '.join(map(name_of, DTYPES))}; {name} is {name_of(x.dtype)}")


def refuses_float64(case: Case) -> str | None:
    """Why a kernel that computes in float32 does not serve a case."""
    if case.dtype == torch.float64:
        return "computes in float32, not float64"
    return refuses_triton(case.device)


def accesses(count: int, flops: int) -> Callable[[Case], Cost]:
    """The cost of an op that reads and writes `count` elements and does `flops` operations for each of its result."""

    def cost(case: Case) -> Cost:
        n = math.prod(case.shape)
        return Cost(count * n * case.dtype.itemsize, flops * n)

    return cost


def dense_pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """The input, copied if its memory has holes or overlaps, and an empty tensor of the same layout."""
    y = torch.empty_like(x)
    if y.stride() != x.stride():  # empty_like keeps the strides of dense memory, permuted or not, and only those
        x = torch.empty_like(y).copy_(x)
    return x, y


def launch_map(
    kernel: StreamKernel, x: Tensor, constants: Mapping[str, object] | None = None, plan: Elementwise | None = None
) -> Tensor:
    """Run kernel(x_ptr, y_ptr, n, ..., BLOCK, EVICTION) over all elements: y, in the layout of x."""
    x, y = dense_pair(x)
    n = x.numel()
    if n:
        if plan is None:
            plan = kernel.plan(x.device, x.dtype, (n,), lambda plan: launch_map(kernel, x, constants, plan))
        fixed = {**(constants or {}), "BLOCK": plan.block, "EVICTION": eviction(x, 2)}
        kernel.launch(plan.grid(n), (x, y, n), fixed, num_warps=plan.num_warps)
    return y


def launch_map_backward(
    kernel: StreamKernel,
    dy: Tensor,
    saved: Tensor,
    constants: Mapping[str, object] | None = None,
    plan: Elementwise | None = None,
) -> Tensor:
    """Run kernel(dy_ptr, saved_ptr, dx_ptr, n, ..., BLOCK, EVICTION): dx, in the layout of what was saved."""
    saved, dx = dense_pair(saved)
    n = saved.numel()
    if n:
        if dy.stride() != saved.stride():
            dy = torch.empty_like(saved).copy_(dy)
        if plan is None:
            plan = kernel.plan(
                dy.device, saved.dtype, (n,), lambda plan: launch_map_backward(kernel, dy, saved, constants, plan)
            )
        fixed = {**(constants or {}), "BLOCK": plan.block, "EVICTION": eviction(saved, 3)}
        kernel.launch(plan.grid(n), (dy, saved, dx, n), fixed, num_warps=plan.num_warps)
    return dx
