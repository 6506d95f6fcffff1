"""Launches of the transformer's Triton kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerant.ops._launch import as_rows, ceil_div, multiprocessors
from accelerant.ops.embedding.op import constants, embedding_plan
from accelerant.ops.linear_gelu.launch import launch_join, spans
from accelerant.runtime.compilation.triton import TritonKernel

__all__ = ["COLUMNS", "KERNELS", "SQUARE", "launch_columns", "launch_columns_each", "launch_embed", "launch_turn"]

_NAMES = ("columns", "turn", "embed")
KERNELS = {name: TritonKernel("accelerant.ops.transformer.triton_kernels", f"transformer_{name}") for name in _NAMES}

COLUMNS = {"BLOCK_M": 16, "BLOCK_N": 256, "STAGES": 4}
"""Step and pipeline stages of the column sums, which read one tensor: 32 KiB of bfloat16 in flight per program."""

SQUARE = 64
"""Rows and columns of a transposed tile."""

_WARPS = 4
_MIN_SPAN = 128
_COLUMN_PROGRAMS = 6  # per multiprocessor: as many as fit with their steps in flight


def launch_columns(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of each column of x (M, N) in a dtype, accumulated in float32."""
    M, N = x.shape
    if not M or not N:
        return torch.zeros(N, dtype=dtype, device=x.device)
    rows, stride = as_rows(x, N)
    strips = ceil_div(N, COLUMNS["BLOCK_N"])
    span, parts = spans(M, max(1, _COLUMN_PROGRAMS * multiprocessors(x.device) // strips))
    partial = torch.empty(parts, N, dtype=torch.float32, device=x.device)
    KERNELS["columns"].launch((parts * strips,), (rows, partial, M, N, stride, span), COLUMNS, num_warps=_WARPS)
    return partial[0].to(dtype) if parts == 1 else launch_join(partial, dtype)


def launch_columns_each(x: Tensor, examples: int) -> Tensor:
    """Return the sum of each column over each example's rows, which are consecutive: (examples, N) in float32."""
    M, N = x.shape
    if not M or not N:
        return torch.zeros(examples, N, dtype=torch.float32, device=x.device)
    rows, stride = as_rows(x, N)
    strips = ceil_div(N, COLUMNS["BLOCK_N"])
    span, splits = M // examples, 1
    while span % 2 == 0 and span > _MIN_SPAN and examples * splits * strips < 2 * multiprocessors(x.device):
        span, splits = span // 2, splits * 2
    partial = torch.empty(examples, splits, N, dtype=torch.float32, device=x.device)
    grid = (examples * splits * strips,)
    KERNELS["columns"].launch(grid, (rows, partial, M, N, stride, span), COLUMNS, num_warps=_WARPS)
    return partial[:, 0] if splits == 1 else partial.sum(1)


def launch_turn(x: Tensor) -> Tensor:
    """Return the transpose of x (M, N), contiguous."""
    M, N = x.shape
    x = x.contiguous()
    y = torch.empty(N, M, dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (ceil_div(M, SQUARE) * ceil_div(N, SQUARE),)
        KERNELS["turn"].launch(grid, (x, y, M, N), {"BLOCK": SQUARE}, num_warps=_WARPS)
    return y


def launch_embed(tokens: Tensor, table: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of table (V, D) by tokens (B, T) plus rows of positions by index in the sequence: (B, T, D)."""
    (V, D), (B, T) = table.shape, tokens.shape
    y = torch.empty(B, T, D, dtype=dtype, device=table.device)
    if y.numel():
        plan = embedding_plan(D)
        KERNELS["embed"].launch(
            (ceil_div(B * T, plan.rows), ceil_div(D, plan.block_d)),
            (tokens.contiguous(), table.contiguous(), positions.contiguous(), y, B * T, V, D, T),
            constants(plan, D),
            num_warps=plan.num_warps,
        )
    return y
