"""Linear layers in 8-bit floating-point numbers: their result and the gradient of their input.

    y  = q(x) q(W)^T + b          rows of x and of W scaled into e4m3
    dx = q(dy diag(s)) q(W)       s the scales of W's rows, which stand in the middle of this product

Products are torch._scaled_mm (cuBLASLt), add in float32 and give the dtype of the layer's input. The gradient of the
weight is left to the caller, in the higher precision: its sum runs over the rows, which have a scale each.

Scales come from the numbers themselves, one a row, so that a tensor is read once and nothing is remembered from step to
step. Gradients are e4m3 too: a row's own scale makes the range of e5m2 unnecessary, and it has a bit more.

Source: Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.errors import ShapeError
from accelerant.ops._refusals import refuses_triton_kernel
from accelerant.ops.linear_fp8 import launch, reference
from accelerant.ops.transformer.launch import launch_join
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation

__all__ = [
    "MULTIPLE", "Float8Weight", "Float8Weights", "flattened", "gelu_linear", "linear", "linear_dx", "linear_dz",
    "refuses_device", "rounded_dx", "unflattened",
]  # fmt: skip

MULTIPLE = 16
"""Both sizes of a weight must be multiples of it: rows of 16 bytes."""

_E4M3 = torch.float8_e4m3fn
_LEAST = (8, 9)


class Float8Weight(NamedTuple):
    """A weight (N, K) as 8-bit numbers, twice: a product reads rows of what it sums over.

    Attributes:
        q: (N, K) e4m3.
        turned: (K, N), its transpose.
        scale: (N,) float32, of q's rows.
    """

    q: Tensor
    turned: Tensor
    scale: Tensor

    @classmethod
    def empty(cls, weight: Tensor) -> Float8Weight:
        """Room for a weight.

        Raises:
            ShapeError: a size is no multiple of 16.
        """
        N, K = weight.shape
        if N % MULTIPLE or K % MULTIPLE:
            raise ShapeError(f"products in fp8 take weights whose sizes are multiples of {MULTIPLE}, got {(N, K)}")
        device = weight.device
        q, turned = torch.empty(N, K, dtype=_E4M3, device=device), torch.empty(K, N, dtype=_E4M3, device=device)
        return cls(q, turned, torch.empty(N, dtype=torch.float32, device=device))


class Float8Weights:
    """Some weights as 8-bit numbers.

    Args:
        weights: of one device.

    Attributes:
        each: in their order.

    Raises:
        ShapeError: a size is no multiple of 16.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = list(weights)
        self.each = [Float8Weight.empty(weight) for weight in weights]

    def fill(self) -> None:
        """Make them anew."""
        for weight, each in zip(self._weights, self.each, strict=True):
            _weight(Case(weight.device, weight.dtype, weight.shape), weight.detach(), each)
        torch.autograd.graph.increment_version(flattened(self.each))  # kernels do not say that they write


def flattened(weights: Sequence[Tensor | Float8Weight]) -> list[Tensor]:
    """The tensors of some weights, for autograd to keep."""
    return [part for weight in weights for part in (weight if isinstance(weight, Float8Weight) else (weight,))]


def unflattened(parts: Sequence[Tensor]) -> tuple[Tensor | Float8Weight, ...]:
    """The weights that `flattened` took apart; all of one kind."""
    if parts[0].dtype != _E4M3:
        return tuple(parts)
    return tuple(Float8Weight(*parts[i : i + 3]) for i in range(0, len(parts), 3))


# --- implementations -------------------------------------------------------------------------------------------------


def refuses_device(device: torch.device) -> str | None:
    """Why products of 8-bit floating-point numbers cannot run on a device; None if they can."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{device} is no NVIDIA GPU"
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST:
        return f"{device} has compute capability {found[0]}.{found[1]}"
    return None


def _refuses_kernels(case: Case) -> str | None:
    if case.device.type == "cuda" and (why := refuses_device(case.device)) is not None:
        return why
    longest = launch.LONGEST_DGELU if "dgelu" in case.options else launch.LONGEST
    if case.shape[-1] > longest:
        return f"rows of {case.shape[-1]} elements do not stay in registers"
    return refuses_triton_kernel(case)


def _refuses_scaled_mm(case: Case) -> str | None:
    if (why := refuses_device(case.device)) is not None:
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
        x,
        weight.t(),
        scale_a=x_scale[:, None],
        scale_b=weight_scale[None, :],
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )


_kept_ones: dict[torch.device, Tensor] = {}


def _ones(count: int, device: torch.device) -> Tensor:
    """So many ones, of a tensor that is made once and grows."""
    kept = _kept_ones.get(device)
    if kept is None or kept.numel() < count:
        kept = _kept_ones[device] = torch.ones(max(count, launch.LONGEST), dtype=torch.float32, device=device)
    return kept[:count]


def _fill(weight: Tensor, into: Float8Weight) -> None:
    launch.launch_rows(weight, None, into=(into.q, into.scale))
    into.turned.view(torch.uint8).copy_(into.q.view(torch.uint8).t())


def _fill_reference(weight: Tensor, into: Float8Weight) -> None:
    q, scale = reference.rows_reference(weight)
    into.q.copy_(q)
    into.turned.copy_(q.t())
    into.scale.copy_(scale)


def _moved(accesses: int) -> Callable[[Case], Cost]:
    """The cost of so many accesses in the case's dtype, and one of a byte."""

    def cost(case: Case) -> Cost:
        numbers = math.prod(case.shape)
        return Cost(numbers * (accesses * case.dtype.itemsize + 1), 30 * numbers)

    return cost


def _operation(
    name: str, kernel: Callable[..., Any], plain: Callable[..., Any], accesses: int, *, mutates: bool = False
) -> Operation:
    return Operation(
        name,
        (
            Implementation("triton", kernel, refuses=_refuses_kernels, own=True, mutates=mutates),
            Implementation("torch", plain, mutates=mutates),
        ),
        cost=_moved(accesses),
    )


def _product_cost(case: Case) -> Cost:
    M, N, K = case.shape
    return Cost(M * K + K * N + M * N * case.dtype.itemsize, 2 * M * N * K)


_rows = _operation("fp8_rows", launch.launch_rows, reference.rows_reference, 1)
_gelu = _operation("fp8_gelu", launch.launch_gelu, reference.gelu_reference, 1)
_dgelu = _operation("fp8_dgelu", launch.launch_dgelu, reference.dgelu_reference, 4)
_weight = _operation("fp8_weight", _fill, _fill_reference, 1, mutates=True)
_product = Operation(
    "linear_fp8",
    (
        Implementation("cublaslt", _scaled_mm, refuses=_refuses_scaled_mm),
        Implementation("torch", reference.product_reference),
    ),
    cost=_product_cost,
)


# --- the layer -------------------------------------------------------------------------------------------------------

Rounded = tuple[Tensor, Tensor]
"""Rows in e4m3, and their scales."""


def _rounded(x: Tensor, factor: Tensor | None) -> Rounded:
    options = () if factor is None else ("factor",)
    found: Rounded = _rows(Case(x.device, x.dtype, x.shape, options), x, factor)
    return found


def _multiplied(x: Rounded, weight: Tensor, scale: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    case = Case(weight.device, dtype, (x[0].shape[0], *weight.shape))
    y: Tensor = _product(case, *x, weight, scale, bias, dtype)
    return y


def linear(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """The rows x (M, K) times a weight (N, K) transposed, plus bias, both in x's dtype: (M, N)."""
    return _multiplied(_rounded(x, None), weight.q, weight.scale, bias, x.dtype)


def linear_dx(dy: Tensor, weight: Float8Weight) -> Tensor:
    """The gradient (M, K) of linear's rows, from that of its result (M, N)."""
    return rounded_dx(_rounded(dy, weight.scale), weight, dy.dtype)


def rounded_dx(dy: Rounded, weight: Float8Weight, dtype: torch.dtype) -> Tensor:
    """The same of dy in e4m3, its columns multiplied by the weight's scales before."""
    return _multiplied(dy, weight.turned, None, None, dtype)


def gelu_linear(z: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    """The layer on gelu(z), z (M, K) contiguous; gelu by the tanh approximation, rounded once, to e4m3."""
    rounded: Rounded = _gelu(Case(z.device, z.dtype, z.shape), z)
    return _multiplied(rounded, weight.q, weight.scale, bias, z.dtype)


def linear_dz(
    dy: Tensor, weight: Float8Weight, z: Tensor, before: Float8Weight, sums: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None, Rounded]:
    """Back through linear(gelu(z)): the gradient of z (M, N), gelu(z), and the sums of the former's columns.

    Args:
        dy: (M, K), the gradient of the result.
        weight: (K, N).
        z: contiguous.
        before: the weight whose product z is.
        sums: their dtype; None for none.

    Returns:
        besides these dz as `rounded_dx` takes it, for `before`.
    """
    da = linear_dx(dy, weight)
    dz, a, q, scale, partial = _dgelu(Case(z.device, z.dtype, z.shape, ("dgelu",)), da, z, before.scale)
    return dz, a, None if sums is None else _joined(partial, sums), (q, scale)


def _joined(partial: Tensor, dtype: torch.dtype) -> Tensor:
    if partial.shape[0] == 1 or refuses_triton(partial.device) is not None:
        return partial.sum(0).to(dtype)
    return launch_join(partial, dtype)
