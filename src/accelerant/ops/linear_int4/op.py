"""linear_int4: the packing of weights, reference, implementations, and the public function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops import _library, _rows
from accelerant.ops._hopper import is_hopper
from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.ops.linear_int8.op import (
    Int8Tile,
    launch_planes_row,
    launch_row,
    takes_planes,
    takes_planes_row,
    takes_row,
    to_planes,
)
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

GROUP = _rows.GROUP
KERNEL = TritonKernel("accelerant.ops.linear_int4.triton_kernels", "linear_int4_fwd")
DEQUANTIZE = TritonKernel("accelerant.ops.linear_int4.triton_kernels", "linear_int4_dequantize")
PLANES = TritonKernel(
    "accelerant.ops.linear_int4.triton_kernels", "linear_int4_planes", contracts=False, targets=CUDA_TARGETS[1:]
)

FEW = Int8Tile(16, 32, 4, 4, 4)
"""Rows and outputs of a tile, groups loaded at a time, warps and stages; for up to 16 rows."""

MANY = Int8Tile(64, 32, 1, 4, 3)
"""For more rows. With as many outputs as FEW it runs the same tensor core instructions, and so has the same bits."""


def quantize_int4(weight: Tensor, *, symmetric: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round a weight to 4-bit integers, with a scale for each 128 columns of a row.

    Args:
        weight: (N, K), floating point; K is a multiple of 128.
        symmetric: True represents (q - 8) scale; False also a zero for each group, (q - zero) scale, the closest where
            a group's weights are not around 0.

    Returns:
        the integers, (N, K / 2) uint8, as linear_int4 takes them; scales and zeros, (N, K / 128) float32; zeros are
        None if symmetric. A group whose weights are not finite has a scale that is not.

    Raises:
        ShapeError: weight is not (N, K), or K is no multiple of 128.
    """
    if weight.dim() != 2 or weight.shape[1] % GROUP:
        raise ShapeError(f"weight must be (N, K) with K a multiple of {GROUP}, got {tuple(weight.shape)}")
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        scale, zero = torch.maximum(high / 7, low / -8), torch.full_like(low, 8.0)
    else:
        scale = (high - low) / 15
        zero = (-low / torch.where(scale > 0, scale, 1)).round_().clamp_(0, 15)
    steps = torch.where(scale > 0, scale, 1)[..., None]
    numbers = (groups / steps + zero[..., None]).round_().nan_to_num_(0, 0, 0).clamp_(0, 15).to(torch.uint8)
    halves = numbers.unflatten(-1, (2, GROUP // 2))
    packed = halves[..., 0, :] | (halves[..., 1, :] << 4)
    return packed.flatten(1), scale, None if symmetric else zero


def dequantize_int4(weight: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Return the weight (N, K) that integers represent, in the dtype of the scales."""
    halves = weight.unflatten(1, (-1, 1, GROUP // 2))
    numbers = torch.cat((halves & 15, halves >> 4), 2).flatten(2).to(scale.dtype)
    return ((numbers - (8 if zero is None else zero[..., None])) * scale[..., None]).flatten(1)


def linear_int4_reference(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return x times the represented weight, plus bias."""
    y = x @ dequantize_int4(weight, scale, zero).to(x.dtype).T
    return y if bias is None else y + bias


# --- implementations -------------------------------------------------------------------------------------------------
@functools.cache
def tile_plan(M: int, dtype: torch.dtype, device: torch.device) -> Int8Tile:
    """Return the tile for M rows; a large one spills in float32."""
    if device.type != "cuda":
        return Int8Tile(16, 32, 2, 4, 2)
    return FEW if FEW.block_m >= M or dtype == torch.float32 else MANY


def constants(plan: Int8Tile, dtype: torch.dtype, device: torch.device | None) -> dict[str, int | bool]:
    """Return the compile-time arguments; device None: those of Hopper."""
    on_gpu = device is None or device.type == "cuda"
    return {
        "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "UNROLL": plan.block_k, "GROUP": plan.group,
        "UPCAST": not on_gpu and dtype == torch.bfloat16,
        "BITS": dtype == torch.bfloat16 and (device is None or (on_gpu and is_hopper(device))),
    }  # fmt: skip


def launch_triton(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return y (M, N) of x (M, K)."""
    if zero is None and takes_row(x, None, weight):
        return launch_row(x, None, 0.0, weight, scale, bias, None, False)
    if takes_planes(x):
        return launch_planes(*to_planes(x, None, 0.0), weight, scale, zero, bias, None, x.dtype)
    (M, K), N = x.shape, weight.shape[0]
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    plan = tile_plan(M, x.dtype, x.device)
    dense = (None if each is None else each.contiguous() for each in (x, weight, scale, zero, bias))
    grid = (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),)
    fixed = constants(plan, x.dtype, x.device)
    KERNEL.launch(grid, (*dense, y, M, N, K), fixed, num_warps=plan.num_warps, num_stages=plan.stages)
    return y


@functools.cache
def planes_plan(M: int, N: int, device: torch.device) -> Int8Tile:
    """Return the tile of launch_planes for M rows and N outputs; any gives the same bits."""
    if device.type != "cuda":
        return Int8Tile(16, 32, 2, 4, 2)
    if M <= 8 and N <= 8192:
        return Int8Tile(8, 32, 8, 2, 2)
    if M <= 16:
        return Int8Tile(8 if M <= 8 else 16, 64, 4, 4, 3 if is_hopper(device) else 2)
    return Int8Tile(32 if M <= 64 else 64, 64, 1, 4, 3 if is_hopper(device) else 2)


def launch_planes(
    planes: Tensor, units: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None,
    residual: Tensor | None, dtype: torch.dtype, plan: Int8Tile | None = None, *, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Return y (M, N) in a dtype, of x in planes (M, 3, K) int8 with units (M,) float32."""
    if zero is None and takes_planes_row(planes, weight, dtype):
        return launch_planes_row(planes, units, weight, scale, bias, residual, dtype, gated)
    (M, _, K), N = planes.shape, weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=dtype, device=planes.device)
    if not y.numel():
        return y
    plan = plan or planes_plan(M, N, planes.device)
    dense = (None if each is None else each.contiguous() for each in (weight, scale, zero, bias, residual))
    PLANES.launch(
        (ceil_div(M, plan.block_m) * ceil_div(N, plan.block_n),),
        (planes, units, *dense, y, M, N, K),
        {**planes_constants(plan, planes.device), "GATED": gated},
        num_warps=plan.num_warps,
        num_stages=plan.stages,
    )
    return y


def planes_constants(plan: Int8Tile, device: torch.device | None) -> dict[str, int | bool]:
    """Return the compile-time arguments; device None: those of an NVIDIA GPU."""
    bits = device is None or (device.type == "cuda" and torch.version.hip is None)
    sizes = {"BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "UNROLL": plan.block_k, "GROUP": plan.group}
    return {**sizes, "BITS": bits}


def _llvm_forward(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    zeros = torch.full_like(scale, 8.0) if zero is None else zero
    y = _rows.products(x, weight, scale, zeros)
    return (y if bias is None else y.add_(bias.detach())).to(x.dtype)


def _refuses_llvm(case: Case) -> str | None:
    if case.device.type != "cpu":
        return f"is for a CPU, not {case.device.type}"
    return "multiplies in float32" if case.dtype == torch.float64 else None


def _torch_forward(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    with torch.no_grad():
        if _library.refuses_triton_kernel(Case(x.device, x.dtype, tuple(x.shape))) or not weight.numel():
            return _composite(x, weight, scale, zero, bias)
        low_bias = None if bias is None else bias.to(x.dtype)
        return functional.linear(x, _dequantized(weight, scale, zero, x.dtype), low_bias)


def _dequantized(weight: Tensor, scale: Tensor, zero: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return dequantize_int4's weight in a dtype, by one kernel."""
    N, K = weight.shape[0], 2 * weight.shape[1]
    y = torch.empty(N, K, dtype=dtype, device=weight.device)
    dense = (None if each is None else each.contiguous() for each in (weight, scale, zero))
    DEQUANTIZE.launch((N,), (*dense, y, K), {"BLOCK": min(32, next_power_of_2(K // GROUP))}, num_warps=4)
    return y


_MAX_ROWS = 512


def _refuses_triton(case: Case) -> str | None:
    if case.device.type == "cuda" and case.shape[0] > _MAX_ROWS and case.dtype != torch.float32:
        return f"products of more than {_MAX_ROWS} rows are left to the library, with a dequantized weight"
    return _library.refuses_triton_kernel(case)


def _composite(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    dense = dequantize_int4(weight, scale, zero).to(x.dtype)
    return functional.linear(x, dense, None if bias is None else bias.to(x.dtype))


def _cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost(N * K // 2 + M * (N + K) * case.dtype.itemsize, 2 * M * N * K)


_fwd: Callable[..., Tensor] = Operation(
    "linear_int4_fwd",
    (
        Implementation("triton", launch_triton, refuses=_refuses_triton, own=True),
        Implementation("llvm", _llvm_forward, refuses=_refuses_llvm, own=True),
        Implementation("torch", _torch_forward),
    ),
    cost=_cost,
)


def _forward(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> Tensor:
    return _fwd(Case(x.device, x.dtype, (x.shape[0], weight.shape[0], x.shape[1])), x, weight, scale, zero, bias)


_op: Callable[..., Any] = _library.define(
    "linear_int4(Tensor x, Tensor weight, Tensor scale, Tensor? zero, Tensor? bias) -> Tensor",
    kernel=_forward,
    fake=lambda x, weight, *_: x.new_empty(x.shape[0], weight.shape[0]),
    differentiable=_composite,
    composite=_composite,
)


# --- the public function ---------------------------------------------------------------------------------------------
@_library.with_torch_keywords
def linear_int4(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Apply a linear layer whose weight is 4-bit integers in groups of 128 columns.

    y = x W^T + b,  W = (q - zero) scale of each group

    Args:
        x: (..., K), float16, bfloat16, float32 or float64.
        weight: (N, K / 2) uint8, of quantize_int4; K is a multiple of 128.
        scale, zero: (N, K / 128), float32 or the dtype of x; zero None for 8.
        bias: (N,), float32 or the dtype of x; or None.

    Returns:
        (..., N), dtype of x, contiguous; sums in float32 at least. On a CPU and by our kernels a row does not depend on
        the others. Where x, scale, zero or bias require a gradient, torch's linear of the represented weight runs.

    Raises:
        ShapeError: shapes that do not go together, or several devices.
        UnsupportedDtype: a dtype not listed above.

    Source: Frantar et al. 2022, arXiv:2210.17323, section 4, for the groups.
    """
    _library.check_dtype("linear_int4", x)
    low = _library.autocast_dtype(x.device.type)
    if low is not None and x.dtype != torch.float64:
        x = x.to(low)
    _check(x, weight, scale, zero, bias)
    rows = x if x.dim() == 2 else x.flatten(0, -2)
    learns = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, scale, zero, bias))
    run = _forward if not learns and not torch.compiler.is_compiling() and _library.is_plain(x) else _op
    y: Tensor = run(rows, weight, scale, zero, bias)
    return y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])


def _check(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> None:
    if x.dim() < 2:
        raise ShapeError(f"x must be (..., K) with rows, got {tuple(x.shape)}")
    K = x.shape[-1]
    for name, tensor in (("weight", weight), ("scale", scale), ("zero", zero), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name in ("weight", "scale")):
            raise _library.not_a_tensor("linear_int4", name, tensor)
        if tensor is not None and tensor.device != x.device:
            raise ShapeError(f"x and {name} must be on one device, got {x.device} and {tensor.device}")
    if weight.dtype != torch.uint8:
        raise UnsupportedDtype(f"weight must be uint8, of quantize_int4, got {_library.name_of(weight.dtype)}")
    if K % GROUP or weight.dim() != 2 or weight.shape[1] != K // 2:
        raise ShapeError(f"weight must be (N, {K} / 2), and {K} a multiple of {GROUP}, got {tuple(weight.shape)}")
    N, groups = weight.shape[0], (weight.shape[0], K // GROUP)
    for name, numbers, shape in (("scale", scale, groups), ("zero", zero, groups), ("bias", bias, (N,))):
        if numbers is None:
            continue
        if numbers.shape != shape:
            raise ShapeError(f"{name} must be {shape}, got {tuple(numbers.shape)}")
        if numbers.dtype not in (torch.float32, x.dtype):
            dtypes = " or ".join(dict.fromkeys(("float32", _library.name_of(x.dtype))))
            raise UnsupportedDtype(f"{name} must be {dtypes}, got {_library.name_of(numbers.dtype)}")
