"""Norms, weighted sums and weighted factors of per-example gradients: torch's functions and launches of our kernels.

Each is an Operation, so that the ledger of ops records it; on a CPU torch's functions are called directly.

Norms are upper bounds of the norms of the rounded numbers that are summed: docs/privacy-guarantee.md has the proof.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from accelerant.ops import _hopper as hopper
from accelerant.ops._hopper import ELEMENTS, HopperProgram, Mma
from accelerant.ops._launch import accesses, ceil_div, multiprocessors, next_power_of_2, triton_operation
from accelerant.ops.transformer import embed_backward
from accelerant.runtime.compilation.triton import TritonKernel, interpreting
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.providers.cuda_launch import PackedLaunch

# --- the Hopper kernel that forms gradients, hopper.cu ----------------------------------------------------------------
KINDS = ("struct", "struct", "struct", "*f32", "struct")
"""Argument types: tensor maps of g, a and the result; partial sums of squares; struct Tiles."""

_TILE_M, _TILE_N = 128, 192
_STAGES, _SLOTS = 4, 4  # Pipeline stages of the sum; output buffers of a warp
_BOX = 16  # Rows of an output tile of a warp

_GROUP = 8
_SHARED_BYTES = hopper.ring_bytes(_STAGES, _TILE_M, _TILE_N) + 8 * _SLOTS * _BOX * 128  # pipeline and output

_FILE = Path(__file__).with_name("hopper.cu")


def refuses(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (B, T, K, N); None if it can."""
    B, T, K, N = case.shape
    if reason := hopper.refuses_device(case, tuple(ELEMENTS)):
        return reason
    if N % 8 or K % 8:
        return f"rows of {K if K % 8 else N} elements do not begin on 16-byte boundaries"
    if max(T, N, K, B * ceil_div(N, 64) * ceil_div(K, 64)) >= 2**27:
        return "counts tiles in 32 bits"
    return None


@functools.cache
def program(dtype: torch.dtype) -> HopperProgram:
    """Return the kernel's program for bfloat16 or float16."""
    return hopper.product_program(
        "clip_form", _FILE, dtype, Mma(_TILE_N, a_across=True, b_across=True), _TILE_M // 64, _STAGES, _SHARED_BYTES,
        SLOTS=_SLOTS, ACROSS=1, IS_BF16=int(dtype == torch.bfloat16), GIVE=40, TAKE=232,
    )  # fmt: skip


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def launch_form(a: Tensor, g: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Form each g_i^T a_i on the current stream, in `out` if it is given; and terms of their squared norms, (B, P)."""
    a, g = hopper.readable(a), hopper.readable(g)
    (B, _, K), N = a.shape, g.shape[2]
    each = torch.empty(B, N, K, dtype=a.dtype, device=a.device) if out is None else out
    count = 4 * ceil_div(N, _TILE_M) * ceil_div(K, _TILE_N)
    partial = torch.empty(B, count, dtype=torch.float32, device=a.device)
    key = (
        a.data_ptr(), g.data_ptr(), each.data_ptr(), partial.data_ptr(), a.dtype, a.shape, a.stride(), N, g.stride(),
        a.get_device(),
    )  # fmt: skip
    launch = _launches.get(key)
    if launch is None:
        launch = _launches.keep(key, _prepare(a, g, each, partial))
    launch.start()
    return each, partial


def _prepare(a: Tensor, g: Tensor, each: Tensor, partial: Tensor) -> PackedLaunch:
    B, N, K = each.shape
    *shape, count = hopper.product_tiles(N, K, a.shape[1], _TILE_M, _TILE_N, _GROUP)
    work = (ctypes.c_int32 * 5)(*shape, B * count)
    maps = [hopper.tensor_map(tensor[:, None], rows) for tensor, rows in ((g, 64), (a, 64), (each, _BOX))]
    grid = min(B * count, multiprocessors(a.device))
    return hopper.pack(program(a.dtype), KINDS, grid, (*maps, partial, bytes(work)), a.get_device())


# --- norms, sums and factors ------------------------------------------------------------------------------------------
_NAMES = ("squares", "sum", "scale", "ghost")
KERNELS = {name: TritonKernel("accelerant.privacy.dp.clipping.triton_kernels", f"clip_{name}") for name in _NAMES}

SPAN, BLOCK = 16384, 2048  # values of an example per program of squares and scale, and per iteration
SUM_BLOCK, SUM_WIDE = 1024, 1 << 18  # columns per program of sum; an eighth where they do not fill the device
_CHUNK_BYTES = 64 << 20  # Memory limit for temporaries of shape (B, T, T)
FLOOR = 2.0**-6  # The smallest ratio of a bound to the mass. The norm of T uncorrelated rows is the mass / sqrt(T).
_EXACT = 1 << 17  # most T T (K + N) for Gram products in float64 on a CPU, which take twice as long
_TINY = 2.0**-100  # Added to the squares of each value in masses: smaller ones may be lost in float32
_FEW, _SEGMENT = 1 << 16, 64  # values in one float32 sum of squares on a CPU, where there are more than _FEW


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that norms and sums accumulate in: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(B: int, elements: int) -> Iterator[slice]:
    """Split B examples of `elements` float32 values each into slices of at most 64 MiB."""
    count = max(1, _CHUNK_BYTES // max(1, 4 * elements))
    for start in range(0, B, count):
        yield slice(start, min(B, start + count))


def margin(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative errors of norms, factors and weights: half a sum of squares', and three roundings."""
    eps = torch.finfo(dtype).eps
    return 6 * eps + factor_roundoff(dtype, device) if device.type == "cpu" else 32 * eps


def unresolved(dtype: torch.dtype, size: int) -> float:
    """Return what a squared norm of `size` values may lack since smaller squares and products are 0 in that dtype."""
    return (size + 2.0**40) * torch.finfo(dtype).tiny


def factor_roundoff(dtype: torch.dtype, device: torch.device) -> float:
    """Return the relative rounding error of the factors in `Rows.total`: weighted inputs, and the output gradients."""
    if dtype == torch.float64:
        return 2.0**-53
    if low_product(dtype, device):
        return 2.0**-8 if dtype == torch.bfloat16 else 2.0**-7  # float16 is converted, both factors
    library: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return FLOAT32_ROUNDOFF[library.matmul.fp32_precision]


FLOAT32_ROUNDOFF = {"none": 2.0**-24, "ieee": 2.0**-24, "tf32": 2.0**-9, "bf16": 2.0**-7}
"""By torch's setting for float32 products: of both factors; TF32 keeps 10 bits, truncated."""


def weighted_dtype(dtype: torch.dtype, other: Tensor) -> torch.dtype:
    """Return the dtype of weighted factors: `dtype`, or float64 on a CPU, where small weights round by 2^-150."""
    if dtype != torch.float32 or other.device.type != "cpu" or not other.numel():
        return dtype
    least, most = other.aminmax()
    return dtype if max(-float(least), float(most)) <= 2.0**80 else torch.float64  # NaN is no number below


def low_product(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether 16-bit factors can be multiplied as they are, with a sum in float32."""
    return dtype in (torch.bfloat16, torch.float16) and device.type == "cuda" and torch.version.hip is None


def _direct(x: Tensor) -> bool:
    return x.device.type == "cpu" and not interpreting()


def _run(operation: Operation, x: Tensor, *args: Any) -> Tensor:
    y: Tensor = operation(Case(x.device, x.dtype, x.shape), x, *args)
    return y


def _spans(x: Tensor) -> tuple[int, int]:
    """Return the number of values of an example, and of spans that hold them."""
    P = x[0].numel()
    return P, ceil_div(P, SPAN)


# --- norms -----------------------------------------------------------------------------------------------------------
def torch_squares(x: Tensor) -> Tensor:
    """Compute `squares` by torch's functions: in float64 if they are few, else in float32 by segments."""
    flat = x.reshape(x.shape[0], x.shape[1:].numel())
    if flat.numel() <= _FEW or x.device.type != "cpu" or x.dtype == torch.float64:
        return _lengths(flat).square_()
    whole = flat.shape[1] // _SEGMENT * _SEGMENT
    segments = flat[:, :whole].unflatten(1, (whole // _SEGMENT, _SEGMENT))
    total: Tensor = torch.linalg.vector_norm(segments, dim=2, dtype=torch.float32).double().square_().sum(1)
    return total if whole == flat.shape[1] else total.add_(_lengths(flat[:, whole:]).square_())


def _lengths(x: Tensor) -> Tensor:
    """Return norms over the last dimension, in float64."""
    rows = x.double() if x.device.type == "cpu" else x  # the conversion within the sum is slow on a CPU
    lengths: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=torch.float64)
    return lengths


def _triton_squares(x: Tensor) -> Tensor:
    B = x.shape[0]
    if not x.numel():
        return x.new_zeros(B, dtype=torch.float32)
    P, spans = _spans(x)
    parts = torch.empty(B, spans, dtype=torch.float32, device=x.device)
    KERNELS["squares"].launch((B * spans,), (x.contiguous(), parts, P, spans), {"SPAN": SPAN, "BLOCK": BLOCK})
    return parts.sum(1) if spans > 1 else parts.view(B)


_squares = triton_operation("clip_squares", _triton_squares, torch_squares, cost=accesses(1, 2))


def squares(x: Tensor) -> Tensor:
    """Return the sum of squares of each x[i], (B, ...) to (B,), in float32 or better."""
    return torch_squares(x) if _direct(x) else _run(_squares, x)


def _torch_ghost(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    (B, T, K), N = a.shape, g.shape[2]
    if T == 1:
        mass = _lengths(a).mul_(_lengths(g))
        return mass.square(), mass
    float32_is_exact = a.device.type == "cpu" and factor_roundoff(torch.float32, a.device) == 2.0**-24
    exact = T * T * (K + N) <= _EXACT or a.dtype == torch.float64 or not float32_is_exact
    dtype = torch.float64 if exact else torch.float32
    squares, masses = torch.empty(2, B, 1, dtype=dtype, device=a.device)
    for part in chunks(B, 4 * T * T + 2 * T * (K + N)):
        x, y = a[part].to(dtype), g[part].to(dtype)
        of_x, of_y = torch.bmm(x, x.mT), torch.bmm(y, y.mT)
        lengths = (of_x.diagonal(0, 1, 2) + K * _TINY).sqrt_().mul_((of_y.diagonal(0, 1, 2) + N * _TINY).sqrt_())
        torch.sum(lengths, 1, keepdim=True, out=masses[part])
        torch.sum(of_x.mul_(of_y).flatten(1), 1, keepdim=True, out=squares[part])
    return squares, masses


def _triton_ghost(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    (B, T, K), N = a.shape, g.shape[2]
    if not (a.numel() and g.numel()):
        return a.new_zeros(B, 1, dtype=torch.float32), a.new_zeros(B, 1, dtype=torch.float32)
    low = a.dtype != torch.float32
    block = min(128 if low else 64, max(16, next_power_of_2(T)))
    tiles = ceil_div(T, block)
    parts = torch.empty(B, tiles * tiles, dtype=torch.float32, device=a.device)
    masses = torch.empty(B, tiles, dtype=torch.float32, device=a.device)
    constants = {"BLOCK_T": block, "BLOCK_K": 64 if low else 32, "WIDEN": not a.is_cuda}
    args = (a.contiguous(), g.contiguous(), parts, masses, T, K, N, tiles)
    KERNELS["ghost"].launch((B, tiles * tiles), args, constants, num_warps=8 if block == 128 else 4)
    return parts, masses


def _ghost_cost(case: Case) -> Cost:
    B, T, K, N = case.shape
    return Cost(B * T * (K + N) * case.dtype.itemsize, 2 * B * T**2 * (K + N))


_ghost = triton_operation("clip_ghost", _triton_ghost, _torch_ghost, cost=_ghost_cost)


def ghost_terms(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Return terms of the squared norm of each g_i^T a_i, (B, ...), and of its mass; a (B, T, K), g (B, T, N)."""
    if _direct(a) or a.shape[1] == 1:
        return _torch_ghost(a, g)
    terms: tuple[Tensor, Tensor] = _ghost(Case(a.device, a.dtype, (*a.shape, g.shape[2])), a, g)
    return terms


class Gram(NamedTuple):
    """Terms of squared norms of products that are not formed, (B, n) and (B, m), and what covers their rounding.

    `gram` and `product` are errors of the squares, by the squared mass, and of the weighted sum, by the mass. If
    `alone`, each product is of one position: its norm is the mass.
    """

    squares: Tensor
    masses: Tensor
    gram: float
    product: float
    alone: bool

    @classmethod
    def of(cls, squares: Tensor, masses: Tensor, shape: tuple[int, int, int], roundoff: float) -> Gram:
        """Return those of products of T positions, K and N wide; `roundoff`: of the factors in the weighted sum."""
        T, K, N = shape
        gram = (K + N + 64) * torch.finfo(squares.dtype).eps / 2
        return cls(squares, masses, gram, roundoff + T * min(roundoff, 2.0**-24), T == 1 and masses.shape[1] == 1)


def bounded(terms: Sequence[Gram]) -> Tensor:
    """Return squares of upper bounds of norms, (B, len(terms)), in any order; those of one shape in the same calls."""
    alike: dict[tuple[int, int, torch.dtype, bool], list[Gram]] = {}
    for each in terms:
        key = (each.squares.shape[1], each.masses.shape[1], each.squares.dtype, each.alone)
        alike.setdefault(key, []).append(each)
    found = []
    for (*_, dtype, alone), members in alike.items():
        masses = torch.stack([each.masses for each in members], 1).sum(2)
        gram = _row(tuple(each.gram for each in members), dtype, masses.device)
        product = _row(tuple(each.product for each in members), dtype, masses.device)
        if alone:
            found.append(masses.mul_(gram + product + 1.0).square_())
            continue
        squares = torch.stack([each.squares for each in members], 1).sum(2)
        norms = torch.addcmul(squares, masses.square(), gram).clamp_(min=0).sqrt_().addcmul_(masses, product)
        found.append(torch.maximum(norms, masses.mul_(FLOOR)).square_())  # NaN stays: the example is left out
    return found[0] if len(found) == 1 else torch.cat(found, 1)


@functools.lru_cache(maxsize=256)
def _row(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers on a device: a CUDA graph cannot copy them there."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def _torch_form(a: Tensor, g: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
    products = torch.bmm(g.mT, a) if out is None else torch.bmm(g.mT, a, out=out)
    return products, squares(products)[:, None]


def _form_cost(case: Case) -> Cost:
    B, T, K, N = case.shape
    return Cost(B * (T * (K + N) + N * K) * case.dtype.itemsize, 2 * B * T * N * K)


_form = Operation(
    "clip_form",
    (Implementation("hopper", launch_form, refuses=refuses, own=True), Implementation("torch", _torch_form)),
    cost=_form_cost,
)


def form(a: Tensor, g: Tensor, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return each g_i^T a_i, (B, N, K) in the factors' dtype, and terms of their squared norms, (B, n)."""
    if _direct(a):
        return _torch_form(a, g, out)
    formed: tuple[Tensor, Tensor] = _form(Case(a.device, a.dtype, (*a.shape, g.shape[2])), a, g, out)
    return formed


# --- sums ------------------------------------------------------------------------------------------------------------
def _triton_sum(x: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None) -> Tensor:
    if not x.numel():
        return torch.zeros(x.shape[1:], dtype=torch.float32, device=x.device) if into is None else into
    y = torch.empty(x.shape[1:], dtype=torch.float32, device=x.device) if into is None else into
    B, P = x.shape[0], y.numel()
    block = SUM_BLOCK if P >= SUM_WIDE else SUM_BLOCK // 8
    args = (x.contiguous(), weights.float(), y, B, P)
    KERNELS["sum"].launch((ceil_div(P, block),), args, {"ADDS": into is not None, "BLOCK_P": block, "UNROLL": 8})
    return y


def _torch_sum(x: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None = None) -> Tensor:
    if into is not None:
        return into.add_(_torch_sum(x, weights, drop))
    B, P = x.shape[0], x.shape[1:].numel()
    rows = cleared(x, drop).reshape(B, P)
    if rows.dtype == weights.dtype:
        return torch.mv(rows.t(), weights).view(x.shape[1:])
    total = torch.zeros(P, dtype=weights.dtype, device=rows.device)
    for part in chunks(B, P):
        total.addmv_(rows[part].to(weights.dtype).t(), weights[part])
    return total.view(x.shape[1:])


_sum = triton_operation("clip_sum", _triton_sum, _torch_sum, cost=accesses(1, 2))


def weighted_sum(x: Tensor, weights: Tensor, drop: Tensor | None, into: Tensor | None = None) -> Tensor:
    """Return the sum of weights[i] x[i], or add it to `into`, float32; where drop[i], exactly 0, NaN or not."""
    return _torch_sum(x, weights, drop, into) if _direct(x) else _run(_sum, x, weights, drop, into)


def add_rows_(table: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
    """Add rows (..., D) to the rows of table (V, D) with the indices tokens (...), in place."""
    if _direct(table) or table.dtype == torch.float64:
        return table.index_add_(0, tokens.reshape(-1), rows.reshape(-1, table.shape[1]).to(table.dtype))
    embed_backward(rows, tokens, table)
    return table


def _broadcast(each: Tensor, x: Tensor) -> Tensor:
    """View one value per example as a tensor that broadcasts over x (B, ...)."""
    return each.view(-1, *([1] * (x.dim() - 1)))


def _triton_scale(
    x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype, g: Tensor | None = None
) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        P, spans = _spans(x)
        flags, Q = (None, 0) if drop is None or g is None else (drop.view(torch.uint8), g[0].numel())
        args = (x.contiguous(), weights.float(), y, None if flags is None else g, flags, P, Q, spans)
        KERNELS["scale"].launch((x.shape[0] * spans,), args, {"SPAN": SPAN, "BLOCK": BLOCK})
    return y


def _torch_scale(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    y = x * _broadcast(weights, x)
    if drop is not None:
        y.masked_fill_(_broadcast(drop, x), 0)
    return y.to(dtype)


_scale = triton_operation("clip_scale", _triton_scale, _torch_scale, cost=accesses(2, 2))


def scaled(x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return x (B, ...) times weights (B,) in a dtype; exactly 0 where drop is true, also where x is not finite."""
    return _torch_scale(x, weights, drop, dtype) if _direct(x) else _run(_scale, x, weights, drop, dtype)


def cleared(x: Tensor, drop: Tensor | None) -> Tensor:
    """Return x (B, ...) with 0 where drop is true: 0 times a value that is not finite would not be 0."""
    return x if drop is None else x.masked_fill(_broadcast(drop, x), 0)


def _torch_factors(
    x: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype, g: Tensor | None = None
) -> Tensor:
    if g is not None and drop is not None:
        g.masked_fill_(_broadcast(drop, g), 0)
    return _torch_scale(x, weights, drop, dtype)


_factors = triton_operation("clip_factors", _triton_scale, _torch_factors, cost=accesses(2, 2), mutates=True)


def factors(
    a: Tensor, g: Tensor, weights: Tensor, drop: Tensor | None, dtype: torch.dtype, *, consumed: bool
) -> tuple[Tensor, Tensor]:
    """Return `scaled` a and `cleared` g in a dtype; g is cleared in place if it is consumed and a kernel runs."""
    if _direct(a) or drop is None or not (consumed and g.is_contiguous()):
        return scaled(a, weights, drop, dtype), cleared(g, drop).to(dtype)
    return _run(_factors, a, weights, drop, dtype, g), g.to(dtype)
