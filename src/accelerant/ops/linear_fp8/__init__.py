"""Linear layers in 8-bit floating point (e4m3): their result and the gradient of their input.

    y  = q(x) q(W)^T + b          rows of x and of W scaled to the range of e4m3
    dx = q(dy diag(s)) q(W)       s the scales of W's rows, which are inside this product's sum

Products are torch._scaled_mm (cuBLASLt), accumulate in float32 and return the dtype of the layer's input. The caller
computes the weight's gradient in the higher precision: its sum runs over the rows, which have different scales.

Scales come from the tensor itself, one per row, so that it is read once and nothing is remembered between steps.
Gradients are e4m3 too: with a scale per row the range of e5m2 is unnecessary, and e4m3 has one bit more.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.errors import ShapeError
from accelerant.ops import _launch
from accelerant.ops._launch import RowTile, as_rows, ceil_div, multiprocessors, quantizing_plan, row_constants
from accelerant.ops._library import refuses_triton_kernel
from accelerant.ops.linear_gelu import launch_join
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.memory.limits import ordinary_tensors

_MAX_E4M3 = 448.0
_TINY = 2.0**-100


def rows_reference(x: Tensor, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return q (M, N) = e4m3(x f / s), and s (M,) float32, the least powers of two that fit the rows of x (M, N).

    Source: Micikevicius et al. 2022, arXiv:2209.05433, section 3.
    """
    x = x.float() if factor is None else x.float() * factor
    peak = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    mantissa, exponent = torch.frexp(peak.clamp(min=_TINY))  # peak = mantissa 2^exponent, 448 = 0.875 * 2^9
    scale = torch.ldexp(torch.ones_like(peak), exponent - 9 + (mantissa > _MAX_E4M3 / 512).int())
    scale = torch.where(peak.isfinite(), scale, torch.nan)
    return (x / scale[:, None]).to(torch.float8_e4m3fn), scale


def gelu_reference(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows_reference of gelu(z), by the tanh approximation."""
    return rows_reference(functional.gelu(z.float(), approximate="tanh"))


def dgelu_reference(da: Tensor, z: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dz and gelu(z) in z's dtype, q and s of dz f, and the sums of dz's columns as (1, N) float32."""
    dz = torch.ops.aten.gelu_backward(da.float(), z.float(), approximate="tanh")
    a = functional.gelu(z.float(), approximate="tanh")
    q, scale = rows_reference(dz, factor)
    return dz.to(z.dtype), a.to(z.dtype), q, scale, dz.sum(0, keepdim=True)


def product_reference(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return the product of x (M, K) and weight (N, K), e4m3 with row scales, plus bias: (M, N) in a dtype."""
    y = (x.float() * x_scale[:, None]) @ weight.float().t()
    y = y if weight_scale is None else y * weight_scale
    return (y if bias is None else y + bias.float()).to(dtype)


E4M3 = torch.float8_e4m3fn

TARGETS = ("sm_89", "sm_90", "sm_100", "sm_120")  # architectures with e4m3 conversions and products

KERNELS = {
    name: TritonKernel("accelerant.ops.linear_fp8.triton_kernels", f"linear_fp8_{name}", targets=TARGETS)
    for name in ("rows", "gelu", "dgelu")
}

LONGEST, LONGEST_DGELU = 16384, 8192
"""Longest rows that stay in registers; shorter for dgelu, which also keeps the sums of columns."""

_PROGRAMS = 2  # of dgelu, per multiprocessor


@functools.cache
def gelu_plan(N: int) -> RowTile:
    """Return the plan of kernel gelu, with twice the elements per thread (32768 x 3072, H200: 0.089 ms, was 0.099)."""
    plan = quantizing_plan(N)
    return plan if plan.rows > 1 else replace(plan, num_warps=max(4, plan.num_warps // 2))


@functools.cache
def dgelu_plan(N: int) -> RowTile:
    """Return the plan of kernel dgelu, which also keeps the sums of all columns."""
    block_n = max(16, _launch.next_power_of_2(N))
    rows = max(1, min(16, 2048 // block_n))
    elements = rows * block_n
    stages = 3 if elements <= 4096 else 2  # fits in 99 KiB of shared memory for any width
    return RowTile(rows=rows, block_n=block_n, num_warps=min(16, max(4, elements // 512)), stages=stages)


def _empty_rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    q = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return q, torch.empty(x.shape[0], dtype=torch.float32, device=x.device)


def launch_rows(x: Tensor, factor: Tensor | None, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Return q (M, N) and s (M,) of x (M, N) with columns multiplied by factor (N,); `out` is memory for both."""
    M, N = x.shape
    rows, stride = as_rows(x, N)
    q, scale = _empty_rounded(x) if out is None else (out[0].view(torch.uint8), out[1])
    if q.numel():
        plan = quantizing_plan(N)
        args = (rows, factor, q, scale, M, N, stride)
        KERNELS["rows"].launch((ceil_div(M, plan.rows),), args, row_constants(plan, N), num_warps=plan.num_warps)
    return q.view(E4M3), scale


def launch_gelu(z: Tensor) -> tuple[Tensor, Tensor]:
    """Return launch_rows of gelu(z), z (M, N) contiguous, by the tanh approximation."""
    M, N = z.shape
    q, scale = _empty_rounded(z)
    if q.numel():
        plan = gelu_plan(N)
        args = (z, q, scale, M, N)
        KERNELS["gelu"].launch((ceil_div(M, plan.rows),), args, row_constants(plan, N), num_warps=plan.num_warps)
    return q.view(E4M3), scale


def launch_dgelu(da: Tensor, z: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dz, gelu(z), q and s of dz times factor (N,), and partial column sums of dz; da and z are (M, N)."""
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z)
    q, scale = _empty_rounded(z)
    if not q.numel():
        return dz, a, q.view(E4M3), scale, torch.zeros(1, N, dtype=torch.float32, device=z.device)
    rows, stride = as_rows(da, N)
    plan = dgelu_plan(N)
    span = ceil_div(ceil_div(M, _PROGRAMS * multiprocessors(z.device)), plan.rows) * plan.rows
    parts = ceil_div(M, span)
    partial = torch.empty(parts, N, dtype=torch.float32, device=z.device)
    args = (rows, z, factor, dz, a, q, scale, partial, M, N, stride, span)
    fixed = {**row_constants(plan, N), "STAGES": plan.stages}
    KERNELS["dgelu"].launch((parts,), args, fixed, num_warps=plan.num_warps)
    return dz, a, q.view(E4M3), scale, partial


MULTIPLE = 16  # both sizes of a weight must be multiples of this: rows of 16 bytes

_MIN_CAPABILITY = (8, 9)


class Float8Weight(NamedTuple):
    """A weight in e4m3: q (N, K), its transpose, since products read rows along the sum, and float32 scales of rows."""

    q: Tensor
    transposed: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, weight: Tensor) -> Float8Weight:
        """Allocate the tensors for a weight; raise ShapeError for a size that is not a multiple of 16."""
        N, K = weight.shape
        if N % MULTIPLE or K % MULTIPLE:
            raise ShapeError(f"products in fp8 take weights whose sizes are multiples of {MULTIPLE}, got {(N, K)}")
        device = weight.device
        q, transposed = (torch.empty(shape, dtype=E4M3, device=device) for shape in ((N, K), (K, N)))
        return cls(q, transposed, torch.empty(N, dtype=torch.float32, device=device))


class Float8Weights:
    """Several weights of one device in e4m3: `each`, in their order, filled from them by `fill`."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self.each = [Float8Weight.empty(weight) for weight in weights]

    def fill(self) -> None:
        """Quantize the weights again."""
        for weight, each in zip(self._weights, self.each, strict=True):
            _weight(Case(weight.device, weight.dtype, weight.shape), weight.detach(), each)
        torch.autograd.graph.increment_version(flattened(self.each))  # autograd does not see the kernels' writes


def flattened(weights: Sequence[Tensor | Float8Weight]) -> list[Tensor]:
    """Return the tensors of weights, for autograd to save."""
    return [part for weight in weights for part in (weight if isinstance(weight, Float8Weight) else (weight,))]


def unflattened(parts: Sequence[Tensor]) -> tuple[Tensor | Float8Weight, ...]:
    """Return the weights whose tensors `flattened` returned; all of one kind."""
    if parts[0].dtype != E4M3:
        return tuple(parts)
    return tuple(Float8Weight(*parts[i : i + 3]) for i in range(0, len(parts), 3))


def refuses_device(device: torch.device) -> str | None:
    """Return why a device cannot multiply 8-bit floating point, or None."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} is no NVIDIA GPU"
    if (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}"
    return None


def _refuses_kernels(case: Case) -> str | None:
    if case.device.type == "cuda" and (why := refuses_device(case.device)):
        return why
    longest = LONGEST_DGELU if "dgelu" in case.options else LONGEST
    if case.shape[-1] > longest:
        return f"rows of {case.shape[-1]} elements do not stay in registers"
    return refuses_triton_kernel(case)


def _refuses_scaled_mm(case: Case) -> str | None:
    if why := refuses_device(case.device):
        return why
    if case.dtype != torch.bfloat16:
        return f"gives bfloat16, not {str(case.dtype).removeprefix('torch.')}"
    return None if math.prod(case.shape) else "no elements"


def _scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if weight_scale is None:
        weight_scale = _ones(weight.shape[0], weight.device)
    return torch._scaled_mm(
        x, weight.t(), scale_a=x_scale[:, None], scale_b=weight_scale[None, :], bias=bias, out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip


_kept_ones: dict[torch.device, Tensor] = {}


def _ones(count: int, device: torch.device) -> Tensor:
    """Return `count` ones, a view of a cached tensor that grows."""
    kept = _kept_ones.get(device)
    if kept is None or kept.numel() < count:
        with ordinary_tensors():
            kept = _kept_ones[device] = torch.ones(max(count, LONGEST), dtype=torch.float32, device=device)
    return kept[:count]


def _fill(weight: Tensor, out: Float8Weight) -> None:
    launch_rows(weight, None, out=(out.q, out.scale))
    out.transposed.view(torch.uint8).copy_(out.q.view(torch.uint8).t())


def _fill_reference(weight: Tensor, out: Float8Weight) -> None:
    q, scale = rows_reference(weight)
    out.q.copy_(q)
    out.transposed.copy_(q.t())
    out.scale.copy_(scale)


def _access_cost(accesses: int) -> Callable[[Case], Cost]:
    """Return the cost function of `accesses` accesses in the case's dtype and one of a byte, per element."""

    def cost(case: Case) -> Cost:
        elements = math.prod(case.shape)
        return Cost(elements * (accesses * case.dtype.itemsize + 1), 30 * elements)

    return cost


def _product_cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost(M * K + K * N + M * N * case.dtype.itemsize, 2 * M * N * K)


_operation = partial(_launch.triton_operation, refuses=_refuses_kernels)
_rows: Callable[..., tuple[Tensor, Tensor]] = _operation("fp8_rows", launch_rows, rows_reference, cost=_access_cost(1))
_gelu = _operation("fp8_gelu", launch_gelu, gelu_reference, cost=_access_cost(1))
_dgelu = _operation("fp8_dgelu", launch_dgelu, dgelu_reference, cost=_access_cost(4))
_weight = _operation("fp8_weight", _fill, _fill_reference, cost=_access_cost(1), mutates=True)
_product: Callable[..., Tensor] = Operation(
    "linear_fp8",
    (
        Implementation("cublaslt", _scaled_mm, refuses=_refuses_scaled_mm),
        Implementation("torch", product_reference),
    ),
    cost=_product_cost,
)


Rounded = tuple[Tensor, Tensor]  # rows in e4m3, and their scales


def _rounded(x: Tensor, factor: Tensor | None) -> Rounded:
    options = () if factor is None else ("factor",)
    return _rows(Case(x.device, x.dtype, x.shape, options), x, factor)


def _multiplied(x: Rounded, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    case = Case(weight.device, dtype, (x[0].shape[0], *weight.shape))
    return _product(case, *x, weight, scale, bias, dtype)


def linear(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return x (M, K) times the transposed weight (N, K), plus bias: (M, N) in x's dtype, as is bias."""
    return _multiplied(_rounded(x, None), weight.q, weight.scale, bias, x.dtype)


def linear_dx(dy: Tensor, weight: Float8Weight) -> Tensor:
    """Return the gradient (M, K) of linear's x, from that of its result (M, N)."""
    return rounded_dx(_rounded(dy, weight.scale), weight, dy.dtype)


def rounded_dx(dy: Rounded, weight: Float8Weight, dtype: torch.dtype) -> Tensor:
    """Return linear_dx of dy in e4m3, quantized after multiplying its columns by the weight's scales."""
    return _multiplied(dy, weight.transposed, None, None, dtype)


def gelu_linear(z: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """Return linear of gelu(z), z (M, K) contiguous; gelu by the tanh approximation, rounded once, to e4m3."""
    rounded: Rounded = _gelu(Case(z.device, z.dtype, z.shape), z)
    return _multiplied(rounded, weight.q, weight.scale, bias, z.dtype)


def linear_dz(
    dy: Tensor, weight: Float8Weight, z: Tensor, before: Float8Weight, sums: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Rounded]:
    """Return dz, gelu(z), dz's column sums in dtype `sums` unless None, and dz quantized for `rounded_dx`."""
    da = linear_dx(dy, weight)
    dz, a, q, scale, partial = _dgelu(Case(z.device, z.dtype, z.shape, ("dgelu",)), da, z, before.scale)
    return dz, a, None if sums is None else _joined(partial, sums), (q, scale)


def _joined(partial: Tensor, dtype: torch.dtype) -> Tensor:
    if partial.shape[0] == 1 or refuses_triton(partial.device) is not None:
        return partial.sum(0).to(dtype)
    return launch_join(partial, dtype)
