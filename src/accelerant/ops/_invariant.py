"""A linear layer whose result of a row is the same, bit for bit, whatever rows come with it and however many.

On the CPU the products are those of _rows.py. On a GPU the tile follows from the number of rows, but every sum runs
over K in the order of the columns, 16 in each instruction, and is never split.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional

from accelerant import ops
from accelerant.ops import _rows, norm
from accelerant.ops._hopper import is_hopper
from accelerant.ops._launch import next_power_of_2
from accelerant.ops._library import refuses_triton_kernel
from accelerant.ops.linear_int4 import op as linear_int4
from accelerant.ops.linear_int8 import op as linear_int8
from accelerant.ops.linear_int8.op import Int8Tile
from accelerant.ops.swiglu import launch_forward, row_plan
from accelerant.runtime.dispatch import Case
from accelerant.runtime.ledger import OpRecord, count_call, ledger

_TILE_ROWS = 16
"""Rows of each product of a GPU where only a library serves: of float64, or without Triton. Not proven to be exact."""


@functools.lru_cache(4096)
def _record(op: str, implementation: str, device: torch.device, case: tuple[object, ...]) -> OpRecord:
    sizes = ("x".join(map(str, each)) if isinstance(each, torch.Size) else str(each) for each in case)
    text = " ".join(each.removeprefix("torch.") for each in sizes)
    key = (op, implementation, device.type, str(device), f"{text}, any rows")
    return ledger().record(OpRecord(*key, implementation != "torch", reason="its rows do not change one another"))


def _count(op: str, implementation: str, x: Tensor, *case: object) -> None:
    count_call(_record(op, implementation, x.device, (x.dtype, *case)))


@functools.cache
def tile_plan(M: int, N: int, dtype: torch.dtype, device: torch.device, gated: bool = False) -> Int8Tile:
    """Return the tile for a power of two that is at least the number of rows, and N outputs."""
    if device.type != "cuda":
        return Int8Tile(16, 32, 32, 4, 2)
    if dtype == torch.float32:
        return Int8Tile(16 if M <= 16 else 64, 64, 32, 4, 2)
    if not is_hopper(device):
        return Int8Tile(16 if M <= 16 else 64, 64, 64, 4, 3)
    if M <= 16:  # few outputs in small tiles, so that there are programs enough
        return Int8Tile(16, 64, 128, 4, 4) if N > 8192 else Int8Tile(16, 32, 256, 4, 4)
    return Int8Tile(64, 64, 128, 4, 4) if M <= 64 else Int8Tile(128, 64 if gated else 128, 64, 8, 4)


@functools.cache
def planes_plan(M: int, N: int, device: torch.device, gated: bool) -> Int8Tile:
    """Return the tile of exact sums of integers; any gives the same bits. Those of one row are the fastest on an H200.

    Llama 3.1 8B's layers, one row: 72 us for a block's 218 MB and 126 us for the output layer's 525 MB.
    """
    if device.type != "cuda":
        return Int8Tile(16, 32, 32, 4, 2)
    if not is_hopper(device):
        return Int8Tile(8 if M <= 8 else 16, 32, 256, 4, 2) if M <= 16 else Int8Tile(32, 64, 128, 4, 2)
    if M <= 8:
        few = Int8Tile(8, 16, 512, 2, 4) if N <= 5120 else Int8Tile(8, 32, 256, 2, 4)
        return few if N <= 8192 else Int8Tile(8, 64, 256, 4, 3)
    if M <= 64:
        return Int8Tile(16, 32, 256, 4, 4) if M <= 16 else Int8Tile(32, 64, 128, 4, 4)
    return Int8Tile(128 if M >= 512 else 64, 64 if gated else 128, 128, 8, 3)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, zero: Tensor | None = None, *,
    norm: Tensor | None = None, eps: float = 0.0, residual: Tensor | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Return f(h weight^T + bias) + residual, with the weight's rows times `scale` where it is given; no gradient.

    x is (M, K); the weight (N, K), or (2 N, K) if gated (f is silu of the first half, times the second), in the dtype
    of x, int8 with a scale, or uint8 as linear_int4 takes it. `norm` is the gain of an RMS norm of x, which gives h.
    """
    with torch.no_grad():
        if not _on_cpu(x) and not _refuses_triton(x):
            _count("linear_invariant", "triton", x, weight.shape, weight.dtype)
            return _by_triton(x, weight, bias, scale, zero, norm, eps, residual, gated)
        h = rms_norm(x, norm, eps)
        if weight.dtype == torch.uint8 and scale is not None:
            y = ops.linear_int4(h, weight, scale, zero, bias)
        else:
            name = "llvm" if _on_cpu(x) else "torch"
            _count("linear_invariant", name, x, weight.shape, weight.dtype)
            if scale is not None and (not _on_cpu(x) or x.dtype == torch.float64):
                wide = torch.promote_types(x.dtype, torch.float32)
                weight, scale = (weight * scale[:, None].to(wide)).to(x.dtype), None
            y = _rows.products(h, weight, scale) if _on_cpu(x) else _in_tiles(h, weight, bias)
            y = (y if bias is None or not _on_cpu(x) else y.add_(bias)).to(x.dtype)
        y = swiglu(y) if gated else y
        return y if residual is None else y + residual


def _by_triton(
    x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, zero: Tensor | None, norm: Tensor | None,
    eps: float, residual: Tensor | None, gated: bool,
) -> Tensor:  # fmt: skip
    rows, N = next_power_of_2(max(len(x), 1)), len(weight) // (2 if gated else 1)
    if scale is not None and zero is None and linear_int8.takes_row(x, norm, weight):
        return linear_int8.launch_row(x, norm, eps, weight, scale, bias, residual, gated)
    if weight.dtype == torch.uint8 and scale is not None:
        if linear_int8.takes_planes(x):
            planes, units = linear_int8.to_planes(x, norm, eps)
            return linear_int4.launch_planes(planes, units, weight, scale, zero, bias, residual, x.dtype, gated=gated)
        y = linear_int4.launch_triton(rms_norm(x, norm, eps), weight, scale, zero, bias)
        y = swiglu(y) if gated else y
        return y if residual is None else y + residual
    if scale is not None and linear_int8.takes_planes(x):
        planes, units = linear_int8.to_planes(x, norm, eps)
        plan = planes_plan(rows, N, x.device, gated)
        return linear_int8.launch_planes(planes, units, weight, scale, bias, residual, x.dtype, plan, gated=gated)
    h, plan = rms_norm(x, norm, eps), tile_plan(rows, N, x.dtype, x.device, gated)
    return linear_int8.launch_forward(h, weight, scale, bias, residual=residual, gated=gated, plan=plan)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Return ops.rms_norm of rows (M, N), on a GPU by a kernel and a plan that M does not choose; x without a gain."""
    if weight is None:
        return x
    N = x.shape[-1]
    if _on_cpu(x):
        _count("rms_norm_fwd", "torch", x, N)
        return torch.rms_norm(x, (N,), weight, eps)
    if _refuses_triton(x):
        return ops.rms_norm(x, weight, eps=eps)
    _count("rms_norm_fwd", "triton", x, N)
    plan = None if N > norm.WIDE_FORWARD else norm.forward_plan(N, centre=False)
    y = norm.launch_forward(False, x, weight, None, eps, statistics=False, plan=plan)[0]
    assert y is not None  # for the type checker
    return y


def swiglu(x: Tensor) -> Tensor:
    """Return ops.swiglu of x, on a CPU by torch's exp: its silu has another function where threads' shares end."""
    if _on_cpu(x):
        _count("swiglu_fwd", "torch", x, x.shape[-1])
        gate, up = x.chunk(2, -1)
        total = torch.exp(-gate).add_(1)
        return torch.div(gate, total, out=total).mul_(up)
    if _refuses_triton(x):
        return ops.swiglu(x)
    _count("swiglu_fwd", "triton", x, x.shape[-1])
    return launch_forward(x, None, row_plan(x.shape[-1] // 2))


def _on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu"


def _refuses_triton(x: Tensor) -> str | None:
    return refuses_triton_kernel(Case(x.device, x.dtype, tuple(x.shape)))


def _in_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the product in tiles of one height, the last of them padded."""
    padded = functional.pad(x, (0, 0, 0, -len(x) % _TILE_ROWS))
    tiles = [functional.linear(part, weight, bias) for part in padded.split(_TILE_ROWS)]
    return torch.cat(tiles)[: len(x)] if tiles else x.new_empty(0, len(weight))
