"""What the row-wise ops (norm, softmax) share: a tensor seen as rows, and what a program takes of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowPlan", "as_rows", "ceil_div", "multiprocessors", "next_power_of_2", "split_rows", "whole_rows"]

_INTERPRETED_MULTIPROCESSORS = 2  # so that the interpreter, too, runs persistent loops more than once


@dataclass(frozen=True, slots=True)
class RowPlan:
    """What one program takes of an (M, N) problem.

    Attributes:
        rows: rows at a time.
        block_n: columns at a time, a power of two; at least N unless the kernel loops over columns.
        num_warps: warps a program.
        programs: programs a multiprocessor, each looping over rows; 0 for as many programs as there are groups of rows.
        stages: loads of this many loop steps in flight.
        chunks: pieces of block_n columns side by side, where a kernel takes a row so.
    """

    rows: int
    block_n: int
    num_warps: int
    programs: int = 0
    stages: int = 1
    chunks: int = 1

    def grid(self, M: int, device: torch.device) -> int:
        """How many programs to start for M rows, M at least 1."""
        groups = ceil_div(M, self.rows)
        return min(groups, self.programs * multiprocessors(device)) if self.programs else groups


@functools.cache
def whole_rows(block_n: int) -> tuple[RowPlan, ...]:
    """What is worth timing for a kernel that takes whole rows: 1024 to 8192 elements, 8 to 32 a thread."""
    tiles = [(max(1, elements // block_n), each) for elements in (1024, 2048, 4096, 8192) for each in (8, 16, 32)]
    most = 16 if block_n <= 8192 else 32
    plans = [RowPlan(rows, block_n, min(most, max(1, rows * block_n // (32 * each)))) for rows, each in tiles]
    return tuple(dict.fromkeys(plans))


def as_rows(x: Tensor, N: int) -> tuple[Tensor, int]:
    """Memory with rows of N contiguous elements, and their distance; copied only if x is not that already."""
    if x.is_contiguous():
        return x, N
    rows = x.reshape(-1, N)
    if N > 1 and rows.stride(1) != 1:
        rows = rows.contiguous()
    return rows, rows.stride(0)


_SPLIT = 4
"""Programs a multiprocessor, about, that few long rows are shared among."""


def split_rows(M: int, N: int, block_n: int, device: torch.device) -> tuple[int, int]:
    """Into how many parts each of M rows is cut, and how many columns a part has: whole blocks, the last one's fewer.

    One part where a row a program keeps every multiprocessor busy.
    """
    blocks, processors = ceil_div(N, block_n), multiprocessors(device)
    if processors <= M:
        return 1, blocks * block_n
    span = ceil_div(blocks, min(blocks, ceil_div(_SPLIT * processors, M)))
    return ceil_div(blocks, span), span * block_n


def ceil_div(a: int, b: int) -> int:
    """The least integer that is at least a / b."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is at least n, n at least 1."""
    return 1 << (n - 1).bit_length()


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a device has."""
    if device.type != "cuda":
        return _INTERPRETED_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
