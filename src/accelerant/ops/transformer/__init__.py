"""The operations of a transformer block's passes: products, column sums, attention, gradients through GELU and norms.

They are neither public functions nor torch ops: the autograd functions of block.py call them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from accelerant.ops import _hopper as hopper
from accelerant.ops import linear_fp8 as float8
from accelerant.ops._hopper import HopperProgram, Mma
from accelerant.ops._images import transposed
from accelerant.ops._launch import accesses, as_rows, ceil_div, multiprocessors, product_cost, triton_operation
from accelerant.ops._library import refuses_triton_kernel
from accelerant.ops._per_example import Forming
from accelerant.ops.attention import backward_pass, forward_pass, hopper_bwd, options_of
from accelerant.ops.cross_entropy.launch import count, reduce, scale_
from accelerant.ops.embedding import KERNELS as EMBEDDING_KERNELS
from accelerant.ops.embedding import constants as embedding_constants
from accelerant.ops.embedding import embedding_plan, launch_backward_sorted
from accelerant.ops.linear_cross_entropy import run_chunks
from accelerant.ops.linear_fp8 import Float8Weight
from accelerant.ops.linear_gelu import launch_dz as launch_dgelu
from accelerant.ops.linear_gelu import launch_join, spans
from accelerant.ops.norm import WIDE_BACKWARD, launch_backward, launch_backward_each, torch_backward
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules
from accelerant.runtime.providers.cuda_launch import PackedLaunch

KERNELS = {
    name: TritonKernel("accelerant.ops.transformer.triton_kernels", f"transformer_{name}")
    for name in ("columns", "embed")
}

COLUMNS = {"BLOCK_M": 16, "BLOCK_N": 256, "STAGES": 4}
"""Step and pipeline stages of the column sums, which read one tensor: 32 KiB of bfloat16 in flight per program."""

_WARPS = 4
_MIN_SPAN = 128
_COLUMN_PROGRAMS = 6  # per multiprocessor: as many as fit with their steps in flight

_GeluGradient = tuple[Tensor, Tensor, Tensor | None]
_NormGradients = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def _run_dw(dy: Tensor, x: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    if x.is_cuda and torch.version.hip is None and dtype == torch.float32:
        return torch.mm(dy.t(), x, out_dtype=dtype, out=out)
    dw = torch.mm(dy.t(), x)
    return dw.to(dtype) if out is None else out.copy_(dw)


_linear_dw: Callable[..., Tensor] = Operation("linear_dw", (Implementation("torch", _run_dw),), cost=product_cost)


def linear(x: Tensor, weight: Tensor | Float8Weight, bias: Tensor | None) -> Tensor:
    """Multiply rows x (M, K) by weight (N, K) transposed and add the bias in the product's epilogue: (M, N)."""
    if isinstance(weight, Float8Weight):
        return float8.linear(x, weight, bias)
    return functional.linear(x, weight, bias)


def linear_dx(dy: Tensor, weight: Tensor | Float8Weight) -> Tensor:
    """Return the gradient (M, K) of linear's input from that of its result (M, N)."""
    return float8.linear_dx(dy, weight) if isinstance(weight, Float8Weight) else torch.mm(dy, weight)


def linear_dw(dy: Tensor, x: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Return the gradient (N, K) of linear's weight in a `dtype` other than x's, rounded once; in `out` if given."""
    case = Case(dy.device, dy.dtype, (dy.shape[1], x.shape[1], dy.shape[0]))
    return _linear_dw(case, dy, x, dtype, out)


def _launch_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    M, N = x.shape
    if not M or not N:
        return torch.zeros(N, dtype=dtype, device=x.device)
    rows, stride = as_rows(x, N)
    strips = ceil_div(N, COLUMNS["BLOCK_N"])
    span, parts = spans(M, max(1, _COLUMN_PROGRAMS * multiprocessors(x.device) // strips))
    sums = torch.empty(parts, N, dtype=torch.float32, device=x.device)
    KERNELS["columns"].launch((parts * strips,), (rows, sums, M, N, stride, span), COLUMNS, num_warps=_WARPS)
    return sums[0].to(dtype) if parts == 1 else launch_join(sums, dtype)


def _launch_columns_each(x: Tensor, examples: int) -> Tensor:
    M, N = x.shape
    if not M or not N:
        return torch.zeros(examples, N, dtype=torch.float32, device=x.device)
    rows, stride = as_rows(x, N)
    strips = ceil_div(N, COLUMNS["BLOCK_N"])
    span, splits = M // examples, 1
    while span % 2 == 0 and span > _MIN_SPAN and examples * splits * strips < 2 * multiprocessors(x.device):
        span, splits = span // 2, splits * 2
    sums = torch.empty(examples, splits, N, dtype=torch.float32, device=x.device)
    grid = (examples * splits * strips,)
    KERNELS["columns"].launch(grid, (rows, sums, M, N, stride, span), COLUMNS, num_warps=_WARPS)
    return sums[:, 0] if splits == 1 else sums.sum(1)


def _torch_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.sum(0, dtype=torch.promote_types(x.dtype, torch.float32)).to(dtype)


def _torch_columns_each(x: Tensor, examples: int) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.view(examples, -1, x.shape[1]).sum(1, dtype=wide) if examples else x.new_zeros(0, x.shape[1], dtype=wide)


_columns: Callable[..., Tensor] = triton_operation("column_sums", _launch_columns, _torch_columns, cost=accesses(1, 1))
_columns_each: Callable[..., Tensor] = triton_operation(
    "column_sums_each", _launch_columns_each, _torch_columns_each, cost=accesses(1, 1)
)


def column_sums(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each column of x (M, N) in float32 or better; the result has `dtype`."""
    return _columns(Case(x.device, x.dtype, x.shape), x, dtype)


def column_sums_each(x: Tensor, examples: int) -> Tensor:
    """Sum the columns over each example's M / examples consecutive rows: (examples, N), float32 or better."""
    return _columns_each(Case(x.device, x.dtype, x.shape, (f"examples {examples}",)), x, examples)


# --- self-attention of packed q, k and v -----------------------------------------------------------------------------
def _heads(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return views of a packed (B, T, 3, H, D): q, k and v, (B, H, T, D) each."""
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def _attention_case(qkv: Tensor, causal: bool, window: int) -> Case:
    B, T, _, H, D = qkv.shape
    return Case(qkv.device, qkv.dtype, (B, H, H, T, T, D), options_of(causal and T > 1, window))


def attend(
    qkv: Tensor, causal: bool = True, window: int = -1, scale: float | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return self-attention of a packed (B, T, 3, H, D): o (B, H, T, D) whose memory is (B, T, H, D), and lse."""
    q, k, v = _heads(qkv)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return forward_pass(q, k, v, causal and q.shape[2] > 1, scale, window, mask)


def _hopper_packed(do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, causal: bool) -> Tensor:
    dqkv = torch.empty_like(qkv)
    scale, deterministic = qkv.shape[-1] ** -0.5, rules().deterministic
    hopper_bwd.launch_hopper(do, *_heads(qkv), o, lse, causal, scale, deterministic, out=_heads(dqkv))
    return dqkv


def _copied(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, causal: bool, window: int = -1, scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    q, k, v = _heads(qkv)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    gradients = backward_pass(do, q, k, v, o, lse, causal, scale, window, mask)
    dqkv = torch.empty_like(qkv)
    for out, gradient in zip(_heads(dqkv), gradients, strict=True):
        out.copy_(gradient)
    return dqkv


def _attention_cost(case: Case) -> Cost:
    B, H, _, T, _, D = case.shape
    elements = B * H * T * D
    flops = 10 * elements * (T + 1) // 2 if "causal" in case.options else 10 * elements * T
    return Cost(8 * elements * case.dtype.itemsize + 4 * B * H * T, flops)


_attend_backward: Callable[..., Tensor] = Operation(
    "attention_packed_bwd",
    (Implementation("hopper", _hopper_packed, refuses=hopper_bwd.refuses, own=True), Implementation("copied", _copied)),
    cost=_attention_cost,
)


def attend_backward(
    do: Tensor, qkv: Tensor, o: Tensor, lse: Tensor, causal: bool = True, window: int = -1, scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the gradient of a packed (B, T, 3, H, D), packed the same way; the Hopper kernel writes it directly."""
    case = _attention_case(qkv, causal, window)
    if window >= 0 or mask is not None or (scale is not None and scale != qkv.shape[-1] ** -0.5):
        return _copied(do, qkv, o, lse, "causal" in case.options, window, scale, mask)
    return _attend_backward(case, do, qkv, o, lse, "causal" in case.options)


# --- the gradient through GELU, and through a product and GELU -------------------------------------------------------
def _torch_dgelu(dy: Tensor, z: Tensor, approximate: str, sums: torch.dtype | None) -> _GeluGradient:
    dz = torch.ops.aten.gelu_backward(dy, z, approximate=approximate)
    return dz, functional.gelu(z, approximate=approximate), None if sums is None else _torch_columns(dz, sums)


_launch_dgelu = partial(launch_dgelu, activation=True, join=None)
_dgelu: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = triton_operation(
    "dgelu", _launch_dgelu, _torch_dgelu, cost=accesses(4, 30)
)


def dgelu(dy: Tensor, z: Tensor, approximate: str, sums: torch.dtype | None) -> _GeluGradient:
    """Return the gradient of z (M, N) through GELU, gelu(z), and the gradient's column sums unless `sums` is None."""
    case = Case(z.device, z.dtype, z.shape, (approximate, "" if sums is None else "sums"))
    return _dgelu(case, dy, z, approximate, sums)


_PARTIAL_ROWS = 32  # rows of dz in each partial column sum of the Hopper kernel


DZ_KINDS = ("struct", "struct", "struct", "struct", "struct", "*f32", "struct")
"""Kinds of the kernel's arguments: tensor maps of x, weight, z, dz and a; partial sums; struct Shape."""

_TILE_M, _TILE_N = 128, 128
_STAGES = 4  # steps of K in flight
_HELD = 4  # boxes of z that a warp holds
_BOX = 16  # rows of a box of z, dz or a
_GROUP = 8
_SHARED_BYTES = hopper.ring_bytes(_STAGES, _TILE_M, _TILE_N) + 8 * ((_HELD + 2) * _BOX * 128 + 8)
"""Operand tiles in flight; for each warp its boxes of z, two boxes of a and a barrier."""

_FILE = Path(__file__).with_name("hopper.cu")


def refuses_dz(case: Case) -> str | None:
    """Return why the kernel cannot serve a case of shape (M, N, K), or None."""
    return hopper.refuses_product(case) or (
        None if "tanh" in case.options else "computes gelu by the tanh approximation only"
    )


@functools.cache
def dz_program() -> HopperProgram:
    """Return the program text."""
    return hopper.product_program(
        "transformer_dz", _FILE, torch.bfloat16, Mma(_TILE_N), _TILE_M // 64, _STAGES, _SHARED_BYTES, GIVE=24, TAKE=240
    )


_launches: hopper.LaunchCache[PackedLaunch] = hopper.LaunchCache()


def launch_dz(x: Tensor, weight: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute dz = (x weight^T) gelu'(z), a = gelu(z) (M, N), and float32 sums of dz's columns, a row per 32 rows of M.

    x is (M, K) bfloat16, weight (N, K) the transpose of the linear map's weight, z (M, N) contiguous.
    """
    x, weight = hopper.readable(x), hopper.readable(weight)
    M, N = z.shape
    dz, a = torch.empty_like(z), torch.empty_like(z)
    partial = torch.empty(4 * ceil_div(M, _TILE_M), N, dtype=torch.float32, device=z.device)
    if M % _TILE_M:
        partial[-4:].zero_()  # warps whose rows are all past the end write nothing
    key = (
        x.data_ptr(), weight.data_ptr(), z.data_ptr(), dz.data_ptr(), a.data_ptr(), partial.data_ptr(),
        x.shape, x.stride(), N, weight.stride(), x.get_device(),
    )  # fmt: skip
    if (launch := _launches.get(key)) is None:
        launch = _launches.keep(key, _prepare_dz(x, weight, z, dz, a, partial))
    launch.start()
    return dz, a, partial


def _prepare_dz(x: Tensor, weight: Tensor, z: Tensor, dz: Tensor, a: Tensor, partial: Tensor) -> PackedLaunch:
    (M, N), K = z.shape, x.shape[1]
    tiles = hopper.product_tiles(M, N, K, _TILE_M, _TILE_N, _GROUP)
    shape = (ctypes.c_int32 * 7)(N, M, *tiles)
    boxes = ((x, _TILE_M), (weight, _TILE_N), (z, _BOX), (dz, _BOX), (a, _BOX))
    args = (*(hopper.tensor_map(*box) for box in boxes), partial, bytes(shape))
    return hopper.pack(dz_program(), DZ_KINDS, min(tiles[-1], multiprocessors(x.device)), args, x.get_device())


def _hopper_dz(
    dy: Tensor, weight: Tensor, z: Tensor, sums: torch.dtype | None, examples: int | None, approximate: str
) -> _GeluGradient:
    dz, a, partial_sums = launch_dz(dy, transposed(weight), z)
    if sums is None:
        return dz, a, None
    if examples is None:
        return dz, a, launch_join(partial_sums, sums)
    M, N = z.shape
    if M % (examples * _PARTIAL_ROWS):
        return dz, a, _launch_columns_each(dz, examples)
    return dz, a, partial_sums[: M // _PARTIAL_ROWS].view(examples, -1, N).sum(1)


def _separate_dz(
    dy: Tensor, weight: Tensor, z: Tensor, sums: torch.dtype | None, examples: int | None, approximate: str
) -> _GeluGradient:
    dx = torch.mm(dy, weight)
    if sums is None or examples is None:
        return dgelu(dx, z, approximate, sums)
    dz, a, _ = dgelu(dx, z, approximate, None)
    return dz, a, column_sums_each(dz, examples)


_linear_dz: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = Operation(
    "linear_dz",
    (Implementation("hopper", _hopper_dz, refuses=refuses_dz, own=True), Implementation("separate", _separate_dz)),
    cost=partial(product_cost, results=3, operations=30),
)


def linear_dz(
    dy: Tensor, weight: Tensor, z: Tensor, sums: torch.dtype | None, examples: int | None = None,
    approximate: str = "tanh",
) -> _GeluGradient:  # fmt: skip
    """Return the gradient of z (M, N) through linear(gelu(z)), gelu(z), and the gradient's column sums in dtype `sums`.

    dy is (M, K), weight (K, N); z is contiguous. `sums` None: none; `examples`: summed for each, in float32 or better.
    """
    case = Case(dy.device, dy.dtype, (*z.shape, weight.shape[0]), (approximate, "" if sums is None else "sums"))
    return _linear_dz(case, dy, weight, z, sums, examples, approximate)


# --- the gradient through a norm, with its column sums ---------------------------------------------------------------
def _triton_norm(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], sums: torch.dtype | None,
) -> _NormGradients:  # fmt: skip
    column_sums = None if sums is None else torch.empty(s.shape[-1], dtype=sums, device=s.device)
    gradients = launch_backward(True, dy, s, weight, bias, statistics, eps, needs, ds, dxsum=column_sums)
    return *gradients, column_sums


def _torch_norm(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], sums: torch.dtype | None,
) -> _NormGradients:  # fmt: skip
    dx, dweight, dbias = torch_backward(True, dy, s, weight, bias, statistics, eps, needs, ds)
    return dx, dweight, dbias, None if sums is None else _torch_columns(dx.reshape(-1, dx.shape[-1]), sums)


_norm_bwd: Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = triton_operation(
    "block_norm_bwd", _triton_norm, _torch_norm, cost=accesses(4, 19)
)


def norm_backward(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, bias: Tensor | None, statistics: Tensor, eps: float,
    needs: Sequence[bool], sums: torch.dtype | None,
) -> _NormGradients:  # fmt: skip
    """Return the gradients of a layer norm's input s (..., N), plus ds, of weight and bias, and its column sums."""
    case = Case(s.device, s.dtype, s.shape, ("" if ds is None else "residual", "" if sums is None else "sums"))
    return _norm_bwd(case, dy, ds, s, weight, bias, statistics, eps, needs, sums)


def _torch_norm_each(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, statistics: Tensor, eps: float, examples: int,
    required: tuple[bool, bool, bool],
) -> _NormGradients:  # fmt: skip
    dx, _, _ = torch_backward(True, dy, s, weight, None, statistics, eps, (True, False, False), ds)
    N = s.shape[-1]
    rows, h = dy.reshape(-1, N), s.reshape(-1, N).to(statistics.dtype)
    dweight = None
    if required[0]:
        h = (h - statistics[:, :1]) * statistics[:, 1:]
        dweight = _torch_columns_each(h * rows, examples)
    dbias = _torch_columns_each(rows, examples) if required[1] else None
    return dx, dweight, dbias, _torch_columns_each(dx.view(-1, N), examples) if required[2] else None


def _triton_norm_each(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, statistics: Tensor, eps: float, examples: int,
    required: tuple[bool, bool, bool],
) -> _NormGradients:  # fmt: skip
    return launch_backward_each(dy, s, weight, statistics, examples, required, ds)


def _refuses_each(case: Case) -> str | None:
    if case.shape[-1] > WIDE_BACKWARD:
        return f"takes at most {WIDE_BACKWARD} columns"
    return refuses_triton_kernel(case) if math.prod(case.shape) else "takes no empty tensor"


_norm_bwd_each: Callable[..., tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]] = triton_operation(
    "block_norm_bwd_each", _triton_norm_each, _torch_norm_each, cost=accesses(4, 19), refuses=_refuses_each
)


def norm_backward_each(
    dy: Tensor, ds: Tensor | None, s: Tensor, weight: Tensor, statistics: Tensor, eps: float, examples: int,
    required: tuple[bool, bool, bool],
) -> _NormGradients:  # fmt: skip
    """Return the gradient of a layer norm's input s (..., N), plus ds, and sums over the rows of each example."""
    case = Case(s.device, s.dtype, s.shape, ("" if ds is None else "residual", f"examples {examples}"))
    return _norm_bwd_each(case, dy, ds, s, weight, statistics, eps, examples, required)


def _launch_embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of table (V, D) by tokens (B, T) plus rows of positions by index in the sequence: (B, T, D)."""
    (V, D), (B, T) = table.shape, tokens.shape
    y = torch.empty(B, T, D, dtype=dtype, device=table.device)
    if y.numel():
        plan = embedding_plan(D)
        KERNELS["embed"].launch(
            (ceil_div(B * T, plan.rows), ceil_div(D, plan.block_d)),
            (tokens.contiguous(), table.contiguous(), positions.contiguous(), y, B * T, V, D, T),
            embedding_constants(plan, D),
            num_warps=plan.num_warps,
        )
    return y


def _torch_embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    return (functional.embedding(tokens, table) + positions[: tokens.shape[1]]).to(dtype)


def _add_atomic(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    (V, D), T = dtable.shape, tokens.numel()
    if not T or not D:
        return
    plan = embedding_plan(D)
    grid = (ceil_div(T, plan.rows), ceil_div(D, plan.block_d))
    args = (dy.contiguous(), tokens.contiguous(), dtable, T, V, D, -1)
    EMBEDDING_KERNELS["bwd_atomic"].launch(grid, args, embedding_constants(plan, D), num_warps=plan.num_warps)


def _add_sorted(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    dtable += launch_backward_sorted(dy, tokens, dtable, -1, (True,))[0]


def _add_torch(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    dtable.index_add_(0, tokens.reshape(-1), dy.reshape(-1, dtable.shape[1]).to(dtable.dtype))


def _refuses_atomic(case: Case) -> str | None:
    return refuses_triton_kernel(case) or (None if "float32" in case.options else "adds to float32")


def _embed_case(tokens: Tensor, table: Tensor, dtype: torch.dtype) -> Case:
    return Case(table.device, dtype, (tokens.numel(), *table.shape), (str(table.dtype).removeprefix("torch."),))


def _embed_cost(case: Case) -> Cost:
    elements = case.shape[0] * case.shape[2]
    return Cost(elements * (8 + case.dtype.itemsize), elements)


_embed_fwd: Callable[..., Tensor] = triton_operation("embed_fwd", _launch_embed, _torch_embed, cost=_embed_cost)
_embed_bwd = Operation(
    "embed_bwd",
    (
        Implementation(
            "triton-atomic", _add_atomic, refuses=_refuses_atomic, own=True, deterministic=False, mutates=True
        ),
        Implementation("triton", _add_sorted, refuses=refuses_triton_kernel, own=True, mutates=True),
        Implementation("torch", _add_torch, mutates=True),
    ),
    cost=_embed_cost,
)


def embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Add the first T rows of positions to the rows of table (V, D) that tokens (B, T) select, rounded once."""
    return _embed_fwd(_embed_case(tokens, table, dtype), tokens, table, positions, dtype)


def embed_backward(dy: Tensor, tokens: Tensor, dtable: Tensor) -> None:
    """Add the rows of dy (B, T, D) to the rows of dtable (V, D) that tokens select."""
    _embed_bwd(_embed_case(tokens, dtable, dy.dtype), dy, tokens, dtable)


def _tied_loss(
    hidden: Tensor, table: Tensor, targets: Tensor, classes: int, ignore_index: int, needs: Sequence[bool],
    forming: Forming | None, own: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    losses = torch.empty(hidden.shape[0], dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    counts = count(targets, ignore_index) if own else (targets != ignore_index).sum()
    dhidden, dtable = run_chunks(
        hidden, table, targets, ignore_index, 0.0, needs,
        own=own, losses=losses, counts=counts, classes=classes, forming=forming,
    )  # fmt: skip
    loss = reduce(losses, counts, losses.dtype) if own else losses.sum() / counts.sum()
    return loss, dhidden, dtable


_tied_loss_fwd: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = triton_operation(
    "tied_loss_fwd",
    partial(_tied_loss, own=True),
    partial(_tied_loss, own=False),
    cost=lambda case: Cost(3 * sum(case.shape[:2]) * case.shape[2] * case.dtype.itemsize, 6 * math.prod(case.shape)),
)


def tied_loss(
    hidden: Tensor, table: Tensor, targets: Tensor, classes: int, ignore_index: int, needs: Sequence[bool],
    forming: Forming | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Return the mean cross entropy of hidden (M, K) times table (V, K) transposed, and the gradients that are needed.

    Rows of the table from `classes` on get a gradient of 0. With `forming` dtable is per example, see run_chunks.
    """
    required = tuple(name for name, need in zip(("hidden", "table"), needs, strict=True) if need)
    case = Case(hidden.device, hidden.dtype, (hidden.shape[0], *table.shape), required)
    return _tied_loss_fwd(case, hidden, table, targets, classes, ignore_index, needs, forming)


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply x by a scalar in place; on a GPU, a factor of 1 costs nothing."""
    if x.dtype == torch.float64 or refuses_triton(x.device) is not None:
        return x.mul_(factor)
    return scale_(x, factor)
