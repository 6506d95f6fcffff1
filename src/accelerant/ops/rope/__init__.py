"""rope: reference, launch, the public function, its implementations, registration with torch and autograd."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError
from accelerant.ops._differentiable import CpuFastPath, DifferentiableOp
from accelerant.ops._launch import ceil_div, next_power_of_2, triton_operation
from accelerant.ops._library import check_dtype, check_or_float32, not_a_tensor
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost
from accelerant.runtime.dispatch.race import Tuned

__all__ = ["rope"]


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """The scaling of low frequencies by which Llama 3.1 and later extend the context they were trained on.

    Wavelengths below original_context / high_freq_factor are kept, those above original_context / low_freq_factor are
    multiplied by `factor`, and those in between are interpolated.

    Attributes:
        factor: ratio of the extended to the original context.
        low_freq_factor, high_freq_factor: bounds, in wavelengths per original context.
        original_context: positions that the model was trained on.

    Source: Meta, llama-models, models/llama3 (apply_scaling); the numbers are those of Llama 3.1.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def __post_init__(self) -> None:
        if self.factor <= 0:
            raise ConfigError(f"factor must be above 0, got {self.factor}")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ConfigError(
                "low_freq_factor must be above 0 and below high_freq_factor, got "
                f"{self.low_freq_factor} and {self.high_freq_factor}"
            )
        if not 1 <= self.original_context < 2**63:
            raise ConfigError(f"original_context must be at least 1 and below 2**63, got {self.original_context}")

    def apply(self, frequencies: Tensor) -> Tensor:
        """Return the scaled frequencies, in radians per position."""
        waves = self.original_context * frequencies / (2 * math.pi)  # per original context
        kept = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = kept.clamp(0, 1)
        return frequencies * (kept + (1 - kept) / self.factor)


def rope_tables(
    S: int, D: int, base: float = 10000.0, scaling: Llama3Scaling | None = None, dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return cosines and sines, (S, D / 2) each, of the angles s base^(-2 i / D) of position s and pair i.

    ShapeError: S is negative, or D is odd or not positive. ConfigError: base is not above 0. Source: Su et al. 2021,
    arXiv:2104.09864, equation 15.
    """
    if S < 0:
        raise ShapeError(f"S must be at least 0, got {S}")
    if D < 2 or D % 2:
        raise ShapeError(f"D must be even and at least 2, got {D}")
    if base <= 0:
        raise ConfigError(f"base must be above 0, got {base}")
    frequencies = base ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    if scaling is not None:
        frequencies = scaling.apply(frequencies)
    angles = torch.outer(torch.arange(S, dtype=torch.float64), frequencies)
    return angles.cos().to(dtype).to(device), angles.sin().to(dtype).to(device)


_CHUNK = 2**18  # elements per chunk on a CPU: 1 MiB of float32
_FEW, _FEW_INTERLEAVED = 2**15, 2**11
"""Up to this many elements on a CPU, torch's functions with torch's autograd are faster than fewer passes over memory
with an autograd function in Python."""

_Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Return x with each pair of features, as a complex number, rotated by its position's angle; in its own dtype."""
    shape = (*x.shape[:-1], x.shape[-1] // 2, 2) if interleaved else (*x.shape[:-1], 2, x.shape[-1] // 2)
    real, imaginary = x.reshape(shape).unbind(-1 if interleaved else -2)
    if cos.dim() == 3:  # tables per sequence, shared by its heads
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotated = (real * cos - imaginary * sin, real * sin + imaginary * cos)
    return torch.stack(rotated, -1 if interleaved else -2).reshape(x.shape)


# --- launch ----------------------------------------------------------------------------------------------------------
KERNELS = {"fwd": TritonKernel("accelerant.ops.rope.triton_kernels", "rope_fwd", widths=range(7, 15))}

_PAIRS = 1024  # per program: 8 per thread of 4 warps, 16 bytes of each half
_MAX_WARPS = 8


@dataclass(frozen=True, slots=True)
class RopeTile:
    """The work of one program: tokens, heads, and pairs of a head (`block`, at least D / 2), each a power of two."""

    tokens: int
    heads: int
    block: int
    num_warps: int


@functools.cache
def rope_plan(H: int, half: int, pairs: int = _PAIRS, max_warps: int = _MAX_WARPS) -> RopeTile:
    """Return a plan for all heads of a token if they are few, and several tokens if they are very few."""
    block = next_power_of_2(half)
    heads = min(next_power_of_2(H), max(1, pairs // block))
    tokens = max(1, pairs // 4 // (heads * block))
    return RopeTile(tokens, heads, block, max(1, min(max_warps, tokens * heads * block // 256)))


def usual_plan(H: int, half: int, adjacent: bool) -> RopeTile:
    """Return the fastest plan measured on an H200; adjacent: the heads of a token are adjacent in memory."""
    if next_power_of_2(H) * next_power_of_2(half) <= 512:
        return rope_plan(H, half)
    return rope_plan(H, half, 2048, 4) if adjacent else rope_plan(H, half, 512)


@functools.cache
def rope_plans(H: int, half: int) -> tuple[RopeTile, ...]:
    """Return the candidates of rope_fwd."""
    plans = [rope_plan(H, half, pairs) for pairs in (512, 1024, 2048, 4096)]
    plans += [replace(plan, num_warps=max(1, plan.num_warps // 2)) for plan in plans]
    plans += [replace(plan, tokens=2 * plan.tokens, num_warps=min(8, 2 * plan.num_warps)) for plan in plans[:2]]
    return tuple(dict.fromkeys(plans))


TUNED: Tuned[RopeTile] = Tuned(
    "rope_fwd",
    default=lambda tokens, H, half, adjacent: usual_plan(H, half, bool(adjacent)),
    candidates=lambda tokens, H, half, adjacent: rope_plans(H, half),
)
"""Tuned plans of rope_fwd, forward and inverse, keyed by tokens, heads, pairs of a head and adjacent."""


def constants(plan: RopeTile, half: int, *, interleaved: bool, inverse: bool) -> dict[str, int | bool]:
    """Return the compile-time arguments of rope_fwd."""
    return {
        "INVERSE": inverse, "INTERLEAVED": interleaved, "TOKENS": plan.tokens, "HEADS": plan.heads,
        "BLOCK": plan.block, "EXACT": plan.block == half,
    }  # fmt: skip


def launch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False, plan: RopeTile | None = None
) -> Tensor:
    """Rotate x by the angles of the tables, or by their negatives; strides of torch.empty_like(x)."""
    y = torch.empty_like(x)
    if not x.numel():
        return y
    B, H, S, D = x.shape
    source = x if x.stride(3) == 1 else x.contiguous()
    out = y if y.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = D // 2
    tokens = B * S
    x_b, x_h, x_s, _ = source.stride()
    if plan is None:
        sizes = (tokens, H, half, int(x_h < x_s))
        plan = TUNED(x.device, x.dtype, sizes, lambda plan: launch(x, cos, sin, interleaved, inverse, plan))
    y_b, y_h, y_s, _ = out.stride()
    KERNELS["fwd"].launch(
        (ceil_div(tokens, plan.tokens), ceil_div(H, plan.heads)),
        (
            source, cos.contiguous(), sin.contiguous(), out,
            tokens, S, H, half, x_b, x_h, x_s, y_b, y_h, y_s, S * half if cos.dim() == 3 else 0,
        ),
        constants(plan, half, interleaved=interleaved, inverse=inverse),
        num_warps=plan.num_warps,
    )  # fmt: skip
    return y if out is y else y.copy_(out)


_cpu = CpuFastPath(lambda x, cos, sin, *, interleaved=False: _composite(x, cos, sin, interleaved))


@_cpu
def rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate each pair of a head's features by the angle of its position (rotary position embedding).

    (y1, y2) = (x1 cos - x2 sin, x2 cos + x1 sin)

    Args:
        x: queries or keys (B, H, S, D), D even, float16, bfloat16, float32 or float64; fastest with a contiguous last
            dimension. Other strides are supported: (B, S, H, D) transposed is not copied.
        cos: (S, D / 2), or (B, S, D / 2) for positions that differ between sequences; dtype of x or float32. See
            accelerant.ops.rope.rope_tables.
        sin: as cos.
        interleaved: pair neighbouring features (0, 1), (2, 3), ... as in the paper; otherwise pair the first half of
            the features with the second, (0, D / 2), (1, D / 2 + 1), ... as in GPT-NeoX and Hugging Face's Llama.

    Returns:
        shape, dtype and strides of x (as torch.empty_like gives them). Computed in float32 (float64 for float64) and
        rounded once. The backward pass rotates by the opposite angle and saves the tables only; x is saved if a table
        requires a gradient. Differentiable twice.

    Raises:
        ShapeError: x is not (B, H, S, D) with an even D, the tables are not as above, or several devices.
        UnsupportedDtype: a dtype not listed above.
        TypeError: an argument is not a tensor.

    Source: Su et al. 2021, arXiv:2104.09864, equation 34.
    """
    check_dtype("rope", x)
    if x.dim() != 4 or x.shape[3] % 2 or not x.shape[3]:
        raise ShapeError(f"x must be (B, H, S, D) with an even D of at least 2, got {tuple(x.shape)}")
    B, _, S, D = x.shape
    flat = (S, D // 2)
    for name, table in (("cos", cos), ("sin", sin)):
        if not isinstance(table, Tensor):
            raise not_a_tensor("rope", name, table)
        if table.shape != flat and table.shape != (B, *flat):
            raise ShapeError(f"{name} must be {flat} or {(B, *flat)} for x {tuple(x.shape)}, got {tuple(table.shape)}")
        check_or_float32(name, table, x)
    if cos.shape != sin.shape:
        raise ShapeError(f"cos and sin must have one shape, got {tuple(cos.shape)} and {tuple(sin.shape)}")
    y: Tensor = _rope(x, cos, sin, interleaved)
    return y


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return views of the first and the second feature of each pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


def _is_few(x: Tensor, interleaved: bool) -> bool:
    return x.is_cpu and x.numel() <= (_FEW_INTERLEAVED if interleaved else _FEW)


def _torch_forward(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool = False) -> Tensor:
    """Rotate in at least float32; differentiable for few elements."""
    wide = _wide(x.dtype)
    if not inverse and _is_few(x, interleaved):
        y = _composite(x, cos, sin, interleaved)
        return y if x.is_contiguous() else torch.empty_like(x).copy_(y)
    y = torch.empty_like(x)
    cos, sin = cos.to(wide), sin.to(wide)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    if inverse:
        sin = -sin
    if x.device.type != "cpu" or x.numel() <= _CHUNK:
        _rotate(x, cos, sin, interleaved, y)
        return y
    if not interleaved:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    B, H, S, D = x.shape
    batches = max(1, _CHUNK // (H * S * D))
    positions = S if batches > 1 else max(1, _CHUNK // (H * D))
    for b in range(0, B, batches):
        tables = [table[b : b + batches] if table.dim() == 4 else table for table in (cos, sin)]
        for s in range(0, S, positions):
            x_part, y_part = (tensor[b : b + batches, :, s : s + positions] for tensor in (x, y))
            c, d = (table[..., s : s + positions, :] for table in tables)
            if interleaved:
                _rotate(x_part, c, d, True, y_part)
            else:
                _rotate_halves(x_part, c, d, y_part)
    return y


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, y: Tensor) -> None:
    """Write y in four passes over memory, and two more if x does not have the dtype of the tables."""
    out = y if x.dtype == cos.dtype else torch.empty_like(x, dtype=cos.dtype)
    (x1, x2), (y1, y2) = _halves(x.to(cos.dtype), interleaved), _halves(out, interleaved)
    torch.mul(x1, cos, out=y1)
    y1.addcmul_(x2, sin, value=-1)
    torch.mul(x2, cos, out=y2)
    y2.addcmul_(x1, sin)
    if out is not y:
        y.copy_(out)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor, y: Tensor) -> None:
    """Write y from tables (cos, cos) and (-sin, sin): torch's functions are slow for rows as short as half a head."""
    half, wide = x.shape[-1] // 2, x.to(cos.dtype)
    swapped = torch.cat((wide[..., half:], wide[..., :half]), -1)
    if (out := torch.mul(wide, cos, out=y if wide is x else wide).addcmul_(swapped, sin)) is not y:
        y.copy_(out)


def _composite(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    dtype, wide = x.dtype, _wide(x.dtype)
    if dtype != wide or cos.dtype != wide:
        x, cos, sin = x.to(wide), cos.to(wide), sin.to(wide)
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, -1)
    rotated = (x1 * cos - x2 * sin, x2 * cos + x1 * sin)
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return y if dtype == wide else y.to(dtype)


def _table_gradients(
    dy: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the tables, by torch's functions: they are rarely needed."""
    if x is None or not (needs[1] or needs[2]):
        return None, None
    wide = _wide(x.dtype)
    (x1, x2), (dy1, dy2) = _halves(x.to(wide), interleaved), _halves(dy.to(wide), interleaved)
    dims = (1,) if cos.dim() == 3 else (0, 1)
    return (
        (dy1 * x1 + dy2 * x2).sum(dims).to(cos.dtype) if needs[1] else None,
        (dy2 * x1 - dy1 * x2).sum(dims).to(sin.dtype) if needs[2] else None,
    )


def _gradients(
    rotate: Callable[..., Tensor], dy: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool,
    needs: Sequence[bool],
) -> _Gradients:  # fmt: skip
    dx = rotate(dy, cos, sin, interleaved, True) if needs[0] else None
    return dx, *_table_gradients(dy, x, cos, sin, interleaved, needs)


def _composite_backward(
    dy: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, needs: Sequence[bool]
) -> _Gradients:
    return _composite(dy, cos, -sin, interleaved), *_table_gradients(dy, x, cos, sin, interleaved, needs)


def _cost(case: Case) -> Cost:
    B, _, S, D = case.shape
    n = math.prod(case.shape)
    itemsize, batches = case.options[1].itemsize, B if case.options[2] == 3 else 1
    return Cost(2 * n * case.dtype.itemsize + batches * S * D * itemsize, 3 * n)


_fwd = triton_operation("rope_fwd", launch, _torch_forward, cost=_cost, differentiable=True)
_bwd = triton_operation(
    "rope_bwd", functools.partial(_gradients, launch), functools.partial(_gradients, _torch_forward), cost=_cost
)


def _case(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Case:
    pairs = "interleaved" if interleaved else "halves"
    return Case(x.device, x.dtype, x.shape, (pairs, cos.dtype, cos.dim()))


@_cpu.case
def _cpu_case(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Case | None:
    """Return None for many elements, for which fewer passes over memory are faster."""
    return _case(x, cos, sin, interleaved) if _is_few(x, interleaved) else None


def _backward(
    dy: Tensor, x: Tensor | None, cos: Tensor, sin: Tensor, interleaved: bool, needs: Sequence[bool]
) -> _Gradients:
    """Return the gradients, those of the tables with the strides of torch.empty_like, as registered."""
    dx, *tables = _bwd(_case(dy, cos, sin, interleaved), dy, x, cos, sin, interleaved, needs)
    dcos, dsin = (
        found if found is None or table.is_contiguous() else torch.empty_like(table).copy_(found)
        for found, table in zip(tables, (cos, sin), strict=True)
    )
    return dx, dcos, dsin


class _Rope(DifferentiableOp):
    needed_by: ClassVar = {"x": ("cos", "sin")}


_rope = _Rope(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved) -> (Tensor y)",
    operation=_fwd,
    case=_case,
    backward=_backward,
    saves=("x", "cos", "sin"),
    gradients={"x": "y", "cos": "cos", "sin": "sin"},
    composite=_composite,
    composite_backward=_composite_backward,
    fake=lambda x, cos, sin, interleaved: torch.empty_like(x),
    keeps_layout=True,
    cpu=_cpu,
)
