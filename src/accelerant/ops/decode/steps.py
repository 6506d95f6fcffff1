"""Decoding steps: linear layers of one row, and the rotation and cache update of a new token, as Operations.

They are for inference and have no gradient, and `append` changes the caches, so they are not registered with torch: the
models of accelerant.nn call the functions below.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant import ops
from accelerant.config import launch_log
from accelerant.errors import ShapeError, UnsupportedDtype
from accelerant.ops import _rows
from accelerant.ops._hopper import starts_early
from accelerant.ops._launch import ceil_div, next_power_of_2
from accelerant.ops._library import FLOATING, name_of, refuses_triton_kernel
from accelerant.ops.decode.llvm_kernels import RopeKernel
from accelerant.ops.linear_int8.op import to_planes
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.race import Tuned
from accelerant.runtime.provider import ComputeProvider

# --- launches --------------------------------------------------------------------------------------------------------
KERNELS = {  # of rope each operation is rounded, as torch does: a choice between them changes no bits
    name: TritonKernel("accelerant.ops.decode.triton_kernels", f"decode_{name}", contracts=name != "rope")
    for name in ("linear", "words", "rope")
}


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """The tiling of decode_linear and decode_words: blocks of `block_n` rows and `block_k` columns of the weight.

    A thread processes `sets` rows (1, 2 or 4; at least 2 if gated) with the same part of x; `unroll` blocks are loaded
    before the first is used. 512 bytes per warp are 16 bytes per thread.
    """

    sets: int
    block_n: int
    block_k: int
    num_warps: int
    unroll: int

    def constants(self, gated: bool, by_bits: bool, early: bool) -> dict[str, int | bool]:
        """Return the compile-time arguments; by_bits: 8-bit integers are converted or multiplied by PTX."""
        return {
            "GATED": gated, "BYTES": by_bits, "SETS": self.sets, "BLOCK_N": self.block_n, "BLOCK_K": self.block_k,
            "UNROLL": self.unroll, "EARLY": early,
        }  # fmt: skip


def _plans(columns: int) -> tuple[DecodeTile, ...]:
    """Return the candidates for weights of which 16 bytes per thread of a warp are this many columns."""
    shapes = [
        (sets, 1, warps, warps, unroll)
        for warps in (1, 2, 4, 8)
        for sets, unroll in ((1, 4), (1, 2), (2, 2), (2, 1), (4, 1), (4, 2))
        if columns * warps * unroll <= 4096
    ]
    shapes += [(sets, 4, 1, 4, unroll) for sets, unroll in ((1, 4), (2, 2), (4, 1))]
    return tuple(DecodeTile(sets, rows, columns * wide, warps, unroll) for sets, rows, wide, warps, unroll in shapes)


PLANS = {1: _plans(512), 2: _plans(256), 4: _plans(128)}
"""Candidates of decode_linear by bytes of a weight's element."""


WORDS_PLANS = tuple(DecodeTile(*sizes) for sizes in (
    (4, 1, 1024, 2, 2), (4, 1, 512, 1, 2), (4, 1, 512, 1, 1), (4, 1, 1024, 2, 1), (4, 1, 2048, 4, 1),
    (2, 1, 512, 1, 2), (2, 1, 512, 1, 4), (2, 1, 1024, 2, 2), (4, 2, 512, 2, 2), (2, 4, 512, 4, 4),
))  # fmt: skip
"""Candidates of decode_words; the first is the fastest measured on an H200 for Llama 3.1 8B."""

WORDS_MIN_BYTES = 2**26  # bytes of a weight from which on decode_words pays for converting x first, measured on an H200


@functools.cache
def usual_plan(N: int, K: int, itemsize: int, gated: bool) -> DecodeTile:
    """Return the fastest plan on an H200 for the layers of Llama 3.1 8B; N outputs (2 N rows if gated), K columns."""
    columns = 512 // itemsize  # per warp, 16 bytes per thread
    if N <= 4608 and not gated:  # few rows: one warp each
        return DecodeTile(1, 1, columns, 1, 4)
    return DecodeTile(4, 1, columns, 1, 2) if itemsize == 1 else DecodeTile(4, 1, 2 * columns, 2, 1)


TUNED: Tuned[DecodeTile] = Tuned(
    "decode_linear",
    default=lambda N, K, itemsize, gated: usual_plan(N, K, itemsize, bool(gated)),
    candidates=lambda N, K, itemsize, gated: tuple(p for p in PLANS[itemsize] if p.sets > 1 or not gated),
)
"""Tuned plans of decode_linear, keyed by outputs, columns, bytes of a weight's element and gated."""

TUNED_WORDS: Tuned[DecodeTile] = Tuned(
    "decode_words", default=lambda N, K, gated: WORDS_PLANS[0], candidates=lambda N, K, gated: WORDS_PLANS
)
"""Tuned plans of decode_words, keyed by outputs, columns and gated."""


@functools.cache
def _interpreted_plan(gated: bool, K: int) -> DecodeTile:
    """Return a plan that gives small samples several programs, steps and a partial last step."""
    return DecodeTile(4 if gated and K % 3 == 0 else 2, 2, 16, 4, 1 + K % 2)


def launch_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
    gated: bool, plan: DecodeTile | None = None,
) -> Tensor:  # fmt: skip
    """Return y (M, N) of x (M, K); all arguments contiguous."""
    M, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    if x.device.type != "cuda":
        plan = plan or _interpreted_plan(gated, K)
    elif plan is None:
        plan = TUNED(
            x.device, x.dtype, (N, K, weight.element_size(), int(gated)),
            lambda plan: launch_linear(x, weight, scale, norm, eps, residual, gated, plan),
        )  # fmt: skip
    outputs = plan.sets // 2 if gated else plan.sets
    KERNELS["linear"].launch(
        (ceil_div(N, outputs * plan.block_n), M),
        (x, norm, weight, scale, residual, y, N, K, eps),
        plan.constants(gated, weight.dtype == torch.int8 and x.device.type == "cuda", starts_early(x.device)),
        num_warps=plan.num_warps,
    )
    return y


def launch_words(
    x: Tensor, weight: Tensor, scale: Tensor, norm: Tensor | None, eps: float, residual: Tensor | None, gated: bool,
    plan: DecodeTile | None = None,
) -> Tensor:  # fmt: skip
    """Return launch_linear's y, computed from x as 24-bit integers and an int8 weight; K is a multiple of 16."""
    M, K = x.shape
    N = weight.shape[0] // (2 if gated else 1)
    y = torch.empty(M, N, dtype=x.dtype, device=x.device)
    if not y.numel():
        return y
    planes, units = to_planes(x, norm, eps)
    if x.device.type != "cuda":
        plan = plan or DecodeTile(2 + 2 * (K % 32 == 0), 2, 32, 4, 1 + K % 3 // 2)
    elif plan is None:
        plan = TUNED_WORDS(
            x.device, x.dtype, (N, K, int(gated)),
            lambda plan: launch_words(x, weight, scale, norm, eps, residual, gated, plan),
        )  # fmt: skip
    outputs = plan.sets // 2 if gated else plan.sets
    KERNELS["words"].launch(
        (ceil_div(N, outputs * plan.block_n), M),
        (planes.view(torch.int32), units, weight.view(torch.int32), scale, residual, y, N, K // 4),
        plan.constants(gated, x.device.type == "cuda", starts_early(x.device)),
        num_warps=plan.num_warps,
    )
    return y


def launch_rope(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor, slots: Tensor | None, k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:  # fmt: skip
    """Rotate, write keys and values to the caches, and return the queries (B, heads, 1, D); arguments contiguous."""
    T, kv_heads, D = _cache_sizes(k_cache, cos, slots)
    B, heads = qkv.shape[0], qkv.shape[1] // D - 2 * kv_heads
    q = torch.empty(B, heads, 1, D, dtype=qkv.dtype, device=qkv.device)
    if B:
        half = D // 2
        block = next_power_of_2(half)
        heads_per_program = max(1, 256 // block)  # one warp, 8 pairs per thread
        KERNELS["rope"].launch(
            (ceil_div(heads + 2 * kv_heads, heads_per_program), B),
            (qkv, cos, sin, positions, slots, q, k_cache, v_cache, heads, kv_heads, T, half),
            {"HEADS": heads_per_program, "BLOCK": block, "EARLY": starts_early(qkv.device)},
            num_warps=1,
        )
    return q


_SHARE_NUMBERS = 2**17  # of qkv, which repay a further thread


@functools.cache
def _compiled_rope(dtype: torch.dtype) -> tuple[ComputeProvider, Kernel]:
    provider = registry.create("cpu")
    return provider, provider.compile(RopeKernel(_rows.KINDS[dtype], 8 if dtype == torch.float32 else 4).source())


def launch_rope_llvm(
    qkv: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor
) -> Tensor:
    """Do the same on a CPU, for a cache in blocks."""
    if slots.dtype != torch.int64 or {k_cache.dtype, v_cache.dtype} != {qkv.dtype}:
        return _torch_rope(qkv, cos, sin, positions, slots, k_cache, v_cache)  # which names it
    T, kv_heads, D = _cache_sizes(k_cache, cos, slots)
    B, heads = qkv.shape[0], qkv.shape[1] // D - 2 * kv_heads
    q = torch.empty(B, heads, 1, D, dtype=qkv.dtype, device="cpu")
    cos, sin = cos.to(qkv.dtype).contiguous(), sin.to(qkv.dtype).contiguous()
    tensors = qkv.contiguous(), cos, sin, positions.long().contiguous(), slots.contiguous(), q, k_cache, v_cache
    provider, kernel = _compiled_rope(qkv.dtype)
    total, sizes = B * (heads + 2 * kv_heads), (heads, kv_heads, T, D)
    if launch_log.enabled or total * D >= 2 * _SHARE_NUMBERS:
        provider.launch(kernel, (total,), (1,), (*tensors, *sizes))
    else:
        kernel.handle(0, total, *(x.data_ptr() for x in tensors), *sizes)
    return q


def _cache_sizes(k_cache: Tensor, cos: Tensor | None, slots: Tensor | None) -> tuple[int, int, int]:
    """Return the positions that there are, the heads of keys, and the width of a head."""
    if slots is None:
        return k_cache.shape[2], k_cache.shape[1], k_cache.shape[3]
    return 0 if cos is None else cos.shape[0], k_cache.shape[2], k_cache.shape[3]


# --- implementations -------------------------------------------------------------------------------------------------
def _refuses_words(case: Case) -> str | None:
    _, lines, K = case.shape
    if case.options[0] != torch.int8:
        return "takes an int8 weight"
    if case.dtype not in (torch.bfloat16, torch.float16):
        return "converts x to 24-bit integers, which represent 16-bit dtypes but not float32"
    if lines * K < WORDS_MIN_BYTES or K % 16 or K > 2**15:
        return f"is for weights of at least {WORDS_MIN_BYTES} bytes, with at most {2**15} columns, a multiple of 16"
    return refuses_triton_kernel(case)


def _refuses_rope(case: Case) -> str | None:
    return "takes heads of even width" if case.shape[-1] % 2 else refuses_triton_kernel(case)


def _refuses_rope_llvm(case: Case) -> str | None:
    if case.device.type != "cpu" or case.dtype not in (torch.float32, torch.float64):
        return f"is for float32 and float64 on a CPU, not {name_of(case.dtype)} on {case.device.type}"
    if case.options != ("turned", "paged"):
        return "takes a rotation, and a cache in blocks"
    return None if case.shape[0] and case.shape[3] else "takes at least one token and one row of angles"


def _torch_linear(
    x: Tensor, weight: Tensor, scale: Tensor | None, norm: Tensor | None, eps: float, residual: Tensor | None,
    gated: bool,
) -> Tensor:  # fmt: skip
    h = x if norm is None else F.rms_norm(x, norm.shape, norm.to(x.dtype), eps)
    if scale is not None and h.is_cpu and h.dtype != torch.float64:
        z = _rows.products(h, weight, scale).to(h.dtype)
    else:
        z = F.linear(h, weight.to(h.dtype))
        if scale is not None:
            z = (z.to(torch.promote_types(z.dtype, torch.float32)) * scale).to(h.dtype)
    if gated:
        gate, up = z.chunk(2, -1)
        z = F.silu(gate) * up
    return z if residual is None else z + residual


def _torch_rope(
    qkv: Tensor, cos: Tensor | None, sin: Tensor | None, positions: Tensor, slots: Tensor | None, k_cache: Tensor,
    v_cache: Tensor,
) -> Tensor:  # fmt: skip
    T, kv_heads, D = _cache_sizes(k_cache, cos, slots)
    B = qkv.shape[0]
    x = qkv.view(B, -1, D)
    heads = x.shape[1] - 2 * kv_heads
    inside = positions.long().clamp(max=T - 1)
    rotated = x[:, : heads + kv_heads]
    if cos is not None and sin is not None:
        wide = torch.promote_types(x.dtype, torch.float32)
        c, s = (table.index_select(0, inside).to(wide)[:, None] for table in (cos, sin))
        x1, x2 = rotated.to(wide).chunk(2, -1)
        rotated = torch.cat((x1 * c - x2 * s, x2 * c + x1 * s), -1).to(x.dtype)
    keys, values = rotated[:, heads:], x[:, heads + kv_heads :]
    if slots is not None:
        ops.append_paged(keys, values, k_cache, v_cache, slots)
        return rotated[:, :heads, None].contiguous()
    fits = (positions < T)[:, None, None]
    at = inside[:, None, None, None].expand(B, kv_heads, 1, D)
    for cache, new in ((k_cache, keys), (v_cache, values)):
        kept = cache.gather(2, at)[:, :, 0]
        cache.scatter_(2, at, torch.where(fits, new, kept)[:, :, None])
    return rotated[:, :heads, None].contiguous()


def _linear_cost(case: Case) -> Cost:
    """Return the cost of reading the weight once, which bounds the step."""
    M, lines, K = case.shape
    return Cost(lines * K * case.options[0].itemsize, 2 * M * lines * K)


def _rope_cost(case: Case) -> Cost:
    B, heads, kv_heads, _, D = case.shape
    return Cost(2 * B * (heads + 2 * kv_heads) * D * case.dtype.itemsize, 3 * B * (heads + kv_heads) * D)


decode_linear: Callable[..., Tensor] = Operation(
    "decode_linear",
    (
        Implementation("triton-words", launch_words, refuses=_refuses_words, own=True),
        Implementation("triton", launch_linear, refuses=refuses_triton_kernel, own=True),
        Implementation("torch", _torch_linear),
    ),
    cost=_linear_cost,
)
decode_rope: Callable[..., Tensor] = Operation(
    "decode_rope",
    (
        Implementation("triton", launch_rope, refuses=_refuses_rope, own=True, mutates=True),
        Implementation("llvm", launch_rope_llvm, refuses=_refuses_rope_llvm, own=True, mutates=True),
        Implementation("torch", _torch_rope, mutates=True),
    ),
    cost=_rope_cost,
)


# --- decoding steps --------------------------------------------------------------------------------------------------
def linear(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, *, norm: Tensor | None = None, eps: float = 1e-6,
    residual: Tensor | None = None, gated: bool = False,
) -> Tensor:  # fmt: skip
    """Apply a linear layer to few rows, with an optional norm before and gate or residual after it; without a gradient.

    y = f(z) + residual,  z = scale (h W^T),  h = rms_norm(x, norm) or x,  f(z) = z, or silu(z[:N]) z[N:] if gated

    x is (M, K) in a floating dtype; weight (N, K), or (2 N, K) if gated, in that dtype, or int8 with `scale`, float32,
    of its rows; norm (K,); residual and y (M, N). One row runs in one kernel, or for a large int8 weight in two, the
    first of which converts x to integers (within 1 / 16710000 of its largest magnitude), and is rounded once, at the
    end.
    """
    _check(x, weight, scale, norm, residual, gated)
    if x.shape[0] == 1:
        case = Case(x.device, x.dtype, (1, *weight.shape), (weight.dtype, *(("gated",) if gated else ())))
        return decode_linear(case, x, weight, scale, norm, eps, residual, gated)
    with torch.no_grad():
        h = x if norm is None else ops.rms_norm(x, norm, eps=eps)
        z = ops.matmul(h, weight.t()) if scale is None else ops.linear_int8(h, weight, scale)
        if gated:
            z = ops.swiglu(z)
        return z if residual is None else z + residual


def append(
    qkv: Tensor, positions: Tensor, k_cache: Tensor, v_cache: Tensor, cos: Tensor | None = None,
    sin: Tensor | None = None, slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Write a new token's key and value to the caches, and return the queries (B, heads, 1, D), both rotated.

    qkv is (B, (heads + 2 kv_heads) D): queries, keys, values. The caches (B, kv_heads, T, D) change at `positions`
    (B,), which stay on the device, unchecked: T or more writes nothing. cos and sin are (at least T, D / 2), None: no
    rotation. With slots (B,), block * block_size + offset or -1 for nowhere, the caches are (N, block, kv_heads, D).
    """
    T, kv_heads, D = _cache_sizes(k_cache, cos, slots)
    B = k_cache.shape[0] if slots is None else slots.shape[0]
    heads = qkv.shape[-1] // D - 2 * kv_heads
    if qkv.shape != (B, (heads + 2 * kv_heads) * D) or heads < 1:
        raise ShapeError(f"qkv must be ({B}, (heads + {2 * kv_heads}) * {D}), got {tuple(qkv.shape)}")
    if v_cache.shape != k_cache.shape or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ShapeError(f"v_cache must be contiguous and {tuple(k_cache.shape)}, got {tuple(v_cache.shape)}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (D % 2 or table.dim() != 2 or table.shape[0] < T or table.shape[1] != D // 2):
            raise ShapeError(f"{name} must be (at least {T}, {D} / 2), got {tuple(table.shape)}")
    kinds = (*(() if cos is None else ("turned",)), *(() if slots is None else ("paged",)))
    case = Case(qkv.device, qkv.dtype, (B, heads, kv_heads, T, D), kinds)
    return decode_rope(case, qkv, cos, sin, positions, slots, k_cache, v_cache)


def _check(
    x: Tensor, weight: Tensor, scale: Tensor | None, norm: Tensor | None, residual: Tensor | None, gated: bool
) -> None:
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ShapeError(f"x must be (M, K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dtype not in FLOATING or weight.dtype not in (x.dtype, torch.int8):
        names = f"{name_of(weight.dtype)} for x of {name_of(x.dtype)}"
        raise UnsupportedDtype(f"weight must be of x's dtype or int8, got {names}")
    if (scale is None) != (weight.dtype != torch.int8):
        raise ShapeError(f"int8 weights take a scale, others none; the weight is {name_of(weight.dtype)}")
    if gated and weight.shape[0] % 2:
        raise ShapeError(f"a gated weight has an even number of rows, got {weight.shape[0]}")
    N = weight.shape[0] // (2 if gated else 1)
    expected = (
        ("scale", scale, weight.shape[:1]),
        ("norm", norm, x.shape[1:]),
        ("residual", residual, (x.shape[0], N)),
    )
    for name, tensor, shape in expected:
        if tensor is not None and tensor.shape != shape:
            raise ShapeError(f"{name} must be {tuple(shape)}, got {tuple(tensor.shape)}")
