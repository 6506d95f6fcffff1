"""attention_paged and append_paged: attention to a cache in blocks that a table assigns to sequences.

A row of the batch is one sequence. Its result does not depend on the other rows, nor on how many of its tokens are in
one call, bit for bit: keys are summed in tiles of fixed length, counted from the sequence's beginning.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.config import launch_log
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops import _library
from accelerant.ops._hopper import starts_early
from accelerant.ops._launch import accesses, ceil_div, next_power_of_2, triton_operation
from accelerant.ops._rows import KINDS
from accelerant.ops.attention import check_heads, checked, options_of, refuses_triton_kernels, shapes_of
from accelerant.ops.attention.launch import triton_capability, with_rows
from accelerant.ops.decode.llvm_kernels import PagedKernel
from accelerant.ops.decode.op import NUM_WARPS, attention_paged_reference, constants, stages_for, token_rows
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.provider import ComputeProvider

_TOKENS = 8
"""Tokens of a prompt that share the loads of keys on a CPU."""

_SHARE_PRODUCTS = 2**19
"""Products that a further thread repays."""


@functools.cache
def _compiled(dtype: torch.dtype) -> tuple[ComputeProvider, Kernel]:
    lanes = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    kernel = PagedKernel(KINDS[dtype], lanes // 2 if dtype == torch.float64 else lanes)
    provider = registry.create("cpu")
    return provider, provider.compile(kernel.source())


def _tiles(tokens: int, lengths: np.ndarray, starts: Tensor | None) -> Tensor:
    """Return row, first token, number of tokens and first position of each tile; lengths are at most the table's."""
    if starts is None:
        found = np.ones((tokens, 4), dtype=np.int64)
        found[:, 0] = found[:, 1] = np.arange(tokens)
        found[:, 3] = lengths - 1
        return torch.from_numpy(found)
    bounds, ends = starts.tolist(), lengths.tolist()
    tiles = [
        (row, at, min(_TOKENS, end - at), length - end + at)
        for row, (begin, end, length) in enumerate(zip(bounds, bounds[1:], ends, strict=False))
        for at in range(begin, end, _TOKENS)
    ]
    return torch.tensor(tiles, dtype=torch.int64, device="cpu").view(-1, 4)


def launch_llvm(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor | None,
    window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Compute on a CPU, on as many threads as torch uses."""
    (T, Hq, D), (N, size, Hkv, _), columns = q.shape, k_blocks.shape, block_table.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    o = torch.zeros(q.shape, dtype=wide, device="cpu")
    if not o.numel() or not N or not columns:
        return o.to(q.dtype)
    tiles = _tiles(T, np.minimum(lengths.numpy(), columns * size), starts)
    sums = torch.zeros(T, Hq, 2, dtype=wide, device="cpu")
    sums[..., 0].fill_(-math.inf)
    provider, kernel = _compiled(q.dtype)
    if k_blocks.stride() != v_blocks.stride() or k_blocks.stride(3) != 1:
        k_blocks, v_blocks = k_blocks.contiguous(), v_blocks.contiguous()
    tensors = q.detach().to(wide).contiguous(), k_blocks, v_blocks, block_table, tiles, sums, o
    numbers = columns, N, size, Hkv, Hq // Hkv, D, window, *k_blocks.stride()[:3], scale, softcap
    total = len(tiles) * Hkv
    if launch_log.enabled or T * Hq * columns * size * D >= 2 * _SHARE_PRODUCTS:
        provider.launch(kernel, (total,), (1,), (*tensors, *numbers))
    else:
        kernel.handle(0, total, *(x.data_ptr() for x in tensors), *numbers)
    return o.to(q.dtype)


def _refuses_llvm(case: Case) -> str | None:
    return None if case.device.type == "cpu" else f"is for a CPU, not {case.device.type}"


KERNELS = {  # compiled for several kinds of call, in which contractions could be others
    name: TritonKernel("accelerant.ops.decode.triton_kernels", f"attention_paged_{name}", contracts=False)
    for name in ("fwd", "combine", "append")
}
SPLIT = 128
"""Keys of a part: a row's parts depend on its length alone. One row of 1,152 keys takes 8 us, with 256 13 us (H200)."""

AHEAD = 8
"""Parts that are loaded before the first of them is merged."""

_TILE_LINES = 32
"""Lines of a tile, of tokens and query heads, in calls with starts; without, the query heads of a key head."""

_MAX_GROUP = 128


@functools.cache
def paged_constants(
    group: int, ragged: bool, page: int, width: int, windowed: bool, capped: bool, dtype: torch.dtype,
    capability: tuple[int, int] | None,
) -> dict[str, int | bool]:  # fmt: skip
    """Return the compile-time arguments of fwd; capability None: the interpreter."""
    fixed = constants(_TILE_LINES // (2 if width > 128 else 1) if ragged else group, width, dtype, capability)
    lines = max(int(fixed["BLOCK_M"]), next_power_of_2(group))
    options = {"TOKENS": lines // group if ragged else 1, "CAPPED": capped, "WINDOW": windowed}
    return {**options, "SPLIT": SPLIT, "PAGE": page, **fixed, "BLOCK_M": lines}


def paged_stages(ragged: bool, capability: tuple[int, int] | None) -> int:
    """Return the pipeline depth: more programs on a multiprocessor hide more than a deeper one; 2 spill in prompts."""
    return min(3 if ragged else 2, stages_for(capability))


def launch_triton(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor | None,
    window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Return o, contiguous; the host reads no number of the device."""
    (T, Hq, D), (N, page, Hkv, _), (R, columns) = q.shape, k_blocks.shape, block_table.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not o.numel():
        return o
    if not N or not columns:
        return o.zero_()
    q, k_blocks, v_blocks = with_rows(q), with_rows(k_blocks), with_rows(v_blocks)
    capability, windowed = triton_capability(q.device), window > 0
    fixed = paged_constants(Hq // Hkv, starts is not None, page, D, windowed, softcap > 0, q.dtype, capability)
    splits = ceil_div(columns * page, SPLIT)
    parts = stats = None
    if splits > 1:
        parts = torch.empty(splits, R, Hq, D, dtype=torch.float32, device=q.device)
        stats = torch.empty(splits, R, Hq, 2, dtype=torch.float32, device=q.device)
    tiles = R if starts is None else T // int(fixed["TOKENS"]) + R
    KERNELS["fwd"].launch(
        (tiles * Hkv * splits,),
        (
            q, k_blocks, v_blocks, block_table, lengths, starts, o, parts, stats, R, N, columns, Hkv, Hq // Hkv, splits,
            D, window, scale, softcap, *q.stride()[:2], *k_blocks.stride()[:3], *v_blocks.stride()[:3],
        ),
        {**fixed, "EARLY": starts_early(q.device)},
        num_warps=NUM_WARPS,
        num_stages=paged_stages(starts is not None, capability),
    )  # fmt: skip
    if splits > 1:
        joined = {
            "WINDOW": windowed, "SPLIT": SPLIT, "PAGE": page, "AHEAD": AHEAD, "BLOCK_D": fixed["BLOCK_D"],
            "EARLY": starts_early(q.device),
        }  # fmt: skip
        args = (parts, stats, lengths, starts, o, R, columns, Hq, D, window)
        KERNELS["combine"].launch((R * Hq,), args, joined, num_warps=1)
    return o


def _refuses_triton(case: Case) -> str | None:
    group = case.shape[1] // max(case.shape[2], 1)
    if group > _MAX_GROUP:
        return f"takes at most {_MAX_GROUP} query heads for a key head, not {group}"
    return refuses_triton_kernels(case)


def _torch_forward(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor | None,
    window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    """Compute a few tokens at a time; a row's bits follow from the library's products."""
    settings: dict[str, Any] = {"window": window if window > 0 else None, "scale": scale, "softcap": softcap or None}
    row, left = token_rows(q.shape[0], lengths, starts)
    ends = (lengths.clamp(max=block_table.shape[1] * k_blocks.shape[1])[row] - left).to(torch.int32)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    with torch.no_grad():
        for at in range(0, q.shape[0], _TOKENS):
            some = slice(at, at + _TOKENS)
            tables = block_table[row[some]]
            o[some] = attention_paged_reference(q[some], k_blocks, v_blocks, tables, ends[some], **settings)
    return o


def _cost(case: Case) -> Cost:
    """Return the cost for rows that use all of their blocks."""
    tokens, Hq, Hkv, rows, length, D = case.shape
    return Cost((2 * rows * Hkv * length + 2 * tokens * Hq) * D * case.dtype.itemsize, 4 * tokens * Hq * length * D)


attention_paged_fwd: Callable[..., Tensor] = Operation(
    "attention_paged_fwd",
    (
        Implementation("triton", launch_triton, refuses=_refuses_triton, own=True),
        Implementation("llvm", launch_llvm, refuses=_refuses_llvm, own=True),
        Implementation("torch", _torch_forward),
    ),
    cost=_cost,
)


# --- the public functions --------------------------------------------------------------------------------------------
@_library.with_torch_keywords
def attention_paged(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor,
    starts: Tensor | None = None, *, window: int | None = None, scale: float | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Compute causal attention of each row's newest tokens to keys and values in blocks.

    The blocks already hold the keys and values of these tokens. Rows with one token (decoding) and with several (a
    prompt, or a part of it) may be in one call. Query i of the n new tokens of a row is at position length - n + i and
    sees the keys up to itself. Key j of row r is in block block_table[r, j // block], at j % block.

    Args:
        q: (T, Hq, D), float16, bfloat16, float32 or float64: the new tokens of R rows, one row after the other.
        k_blocks, v_blocks: (N, block, Hkv, D), dtype of q, fastest with D contiguous; Hkv divides Hq. What no query
            sees is not read.
        block_table: (R, M) int32, contiguous: the blocks of each row; those that its length does not reach may be any
            number.
        lengths: (R,) int32: keys of each row, its new tokens included; more than M * block counts as that many.
        starts: (R + 1,) int32: row r has the tokens starts[r] to starts[r + 1], non-decreasing from 0 to T; None: each
            row has one token, T == R.
        window: keys that a query sees at most, itself included; None for all.
        scale: factor of the scores; None for 1 / sqrt(D).
        softcap: scores become softcap * tanh(scores / softcap); None: they stay.

    The numbers of block_table, lengths and starts stay on their device and are not checked.

    Returns:
        (T, Hq, D), dtype of q, contiguous, without a gradient. A query that sees no key gives zeros. A row's result is
        the same, bit for bit, whatever other rows are in the call and however its tokens are cut into calls.

    Raises:
        ShapeError: incompatible shapes, tensors on several devices.
        UnsupportedDtype: a dtype not listed above, or several.
        ConfigError: a window below 1, or a softcap that is not positive.

    Source: Kwon et al. 2023, arXiv:2309.06180 for blocks and table; Dao, Haziza, Massa and Sizov 2023, "Flash-Decoding
    for long-context inference".
    """
    q, k_blocks, v_blocks = checked(q, k_blocks, v_blocks, "attention_paged")
    if q.dim() != 3 or k_blocks.dim() != 4:
        shapes = shapes_of(q, k_blocks)
        raise ShapeError(f"attention_paged takes q (T, Hq, D) and blocks (N, block, Hkv, D), got {shapes}")
    Hq, D = q.shape[1:]
    if k_blocks.shape[3] != D or D < 1 or k_blocks.shape[1] < 1:
        raise ShapeError(f"q and k_blocks must have the same D, and blocks a key, got {shapes_of(q, k_blocks)}")
    check_heads(Hq, k_blocks.shape[2])
    _check_numbers(q, block_table, lengths, starts)
    if window is not None and window < 1:
        raise ConfigError(f"window must be at least 1, got {window}")
    if softcap is not None and not 0 < softcap < math.inf:
        raise ConfigError(f"softcap must be positive, got {softcap}")
    run = _forward if not torch.compiler.is_compiling() and _library.is_plain(q) else _op
    settings = -1 if window is None else window, D**-0.5 if scale is None else float(scale), float(softcap or 0.0)
    return run(q, k_blocks, v_blocks, block_table, lengths, starts, *settings)


def _check_numbers(q: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor | None) -> None:
    for name, x, dims in (("block_table", block_table, 2), ("lengths", lengths, 1), ("starts", starts, 1)):
        if x is None and name == "starts":
            continue
        if not isinstance(x, Tensor):
            raise _library.not_a_tensor("attention_paged", name, x)
        if x.dtype != torch.int32:
            raise UnsupportedDtype(f"{name} must be int32, got {_library.name_of(x.dtype)}")
        if x.device != q.device:
            raise ShapeError(f"{name} must be on {q.device}, where q is; it is on {x.device}")
        if x.dim() != dims or not x.is_contiguous():
            raise ShapeError(f"{name} must have {dims} dimension(s) and be contiguous, got {tuple(x.shape)}")
    rows = block_table.shape[0]
    if lengths.shape[0] != rows:
        raise ShapeError(f"lengths must be ({rows},), one for each row of block_table, got {tuple(lengths.shape)}")
    if starts is None and q.shape[0] != rows:
        raise ShapeError(f"without starts q has one token for each of {rows} rows, got {q.shape[0]}")
    if starts is not None and starts.shape[0] != rows + 1:
        raise ShapeError(f"starts must be ({rows + 1},), got {tuple(starts.shape)}")


def _forward(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor | None,
    window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    (T, Hq, D), (rows, columns) = q.shape, block_table.shape
    size, Hkv = k_blocks.shape[1:3]
    options = options_of(starts is not None, window) + (("softcap",) if softcap else ())
    case = Case(q.device, q.dtype, (T, Hq, Hkv, rows, columns * size, D), options)
    return attention_paged_fwd(case, q, k_blocks, v_blocks, block_table, lengths, starts, window, scale, softcap)


def _composite(
    q: Tensor, k_blocks: Tensor, v_blocks: Tensor, block_table: Tensor, lengths: Tensor, starts: Tensor | None,
    window: int, scale: float, softcap: float,
) -> Tensor:  # fmt: skip
    return attention_paged_reference(
        q, k_blocks, v_blocks, block_table, lengths, starts, window=window if window > 0 else None, scale=scale,
        softcap=softcap or None,
    ).detach()  # fmt: skip


_op = _library.define(
    "attention_paged(Tensor q, Tensor k_blocks, Tensor v_blocks, Tensor block_table, Tensor lengths, Tensor? starts, "
    "int window, float scale, float softcap) -> Tensor",
    kernel=_forward,
    fake=lambda q, *_: q.new_empty(q.shape),
    composite=_composite,
)


# --- writing to the blocks -------------------------------------------------------------------------------------------
_APPEND_BLOCK = 1024


def _triton_append(k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor, slots: Tensor) -> None:
    T, Hkv, D = k.shape
    k, v = (x if x.stride(2) == 1 and (Hkv == 1 or x.stride(1) == D) else x.contiguous() for x in (k, v))
    block = min(_APPEND_BLOCK, next_power_of_2(Hkv * D))
    KERNELS["append"].launch(
        (T, ceil_div(Hkv * D, block)),
        (
            k, v, k_blocks, v_blocks, slots, Hkv * D, k_blocks.shape[1], D, k.stride(0), v.stride(0),
            *k_blocks.stride()[:3], *v_blocks.stride()[:3],
        ),
        {"BLOCK": block},
        num_warps=max(1, block // 256),
    )  # fmt: skip


def _torch_append(k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor, slots: Tensor) -> None:
    kept = (slots >= 0).nonzero().squeeze(1)
    at, page = slots.index_select(0, kept), k_blocks.shape[1]
    for new, blocks in ((k, k_blocks), (v, v_blocks)):
        if blocks.is_contiguous():
            blocks.view(-1, *blocks.shape[2:]).index_copy_(0, at, new.index_select(0, kept))
        else:
            blocks[at // page, at % page] = new.index_select(0, kept)


append_paged_fwd: Callable[..., None] = triton_operation(
    "append_paged_fwd", _triton_append, _torch_append, cost=accesses(4, 0), mutates=True
)


def append_paged(k: Tensor, v: Tensor, k_blocks: Tensor, v_blocks: Tensor, slots: Tensor) -> None:
    """Write keys and values of new tokens to blocks, in place.

    Args:
        k, v: (T, Hkv, D), of the new tokens.
        k_blocks, v_blocks: (N, block, Hkv, D), dtype of k, D contiguous; changed.
        slots: (T,) int64 on the device of k, contiguous: block * block_size + offset of each token, all different; -1
            leaves a token out. The numbers stay on the device and are not checked.

    Raises:
        ShapeError: incompatible shapes, blocks whose D is not contiguous, tensors on several devices.
        UnsupportedDtype: several dtypes, or slots that are not int64.
    """
    _library.check_matches("append_paged", k, "k", v=v, k_blocks=k_blocks, v_blocks=v_blocks)
    if k.dim() != 3 or k_blocks.dim() != 4 or k_blocks.shape[2:] != k.shape[1:]:
        shapes = shapes_of(k, k_blocks)
        raise ShapeError(f"append_paged takes k (T, Hkv, D) and blocks (N, block, Hkv, D), got {shapes}")
    if v.shape != k.shape or v_blocks.shape != k_blocks.shape:
        raise ShapeError(f"v must be {tuple(k.shape)} and v_blocks {tuple(k_blocks.shape)}, as k and k_blocks are")
    if k_blocks.stride(3) != 1 or v_blocks.stride(3) != 1:
        raise ShapeError("the last dimension of k_blocks and v_blocks must be contiguous: they are written in place")
    if slots.dtype != torch.int64:
        raise UnsupportedDtype(f"slots must be int64, got {_library.name_of(slots.dtype)}")
    if slots.shape != k.shape[:1] or slots.device != k.device or not slots.is_contiguous():
        raise ShapeError(f"slots must be ({k.shape[0]},) and contiguous on {k.device}, got {tuple(slots.shape)}")
    if k.numel():
        append_paged_fwd(Case(k.device, k.dtype, tuple(k.shape)), k, v, k_blocks, v_blocks, slots)
