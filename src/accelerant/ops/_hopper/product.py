"""What the launches of kernels with product.h share: x W^T, or x^T W of a batch, with an epilogue of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div
from accelerant.runtime.dispatch import Case

__all__ = ["HEADER", "THREADS", "readable", "refuses", "ring_bytes", "tiles", "unfit"]

HEADER = "product.h"
THREADS = 384
"""A block: the producer's warpgroup and two that multiply."""


def unfit(case: Case, dtypes: Sequence[torch.dtype]) -> str | None:
    """Why no such kernel can serve a case of this device, dtype and emptiness; None if one may."""
    if case.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(case.device) != (9, 0):
        return "is for sm_90"
    if case.dtype not in dtypes:
        names = [str(each).removeprefix("torch.") for each in (*dtypes, case.dtype)]
        return f"takes {' and '.join(names[:-1])}, not {names[-1]}"
    return None if math.prod(case.shape) else "takes no empty tensor"


def refuses(case: Case) -> str | None:
    """Why no such kernel can serve a case of shape (M, N, K); None if it can."""
    M, N, K = case.shape
    reason = unfit(case, (torch.bfloat16,))  # float16 compiles, but has not been run on a GPU yet
    if reason:
        return reason
    if N % 8 or K % 8:
        return f"rows of {K if K % 8 else N} elements do not begin on 16-byte boundaries"
    if max(M, N, K) >= 2**30 or ceil_div(M, 64) * ceil_div(N, 64) >= 2**30:
        return "counts tiles in 32 bits"
    return None


def ring_bytes(stages: int, tile_m: int, tile_n: int) -> int:
    """Shared memory of the steps in flight and their barriers, which the kernel may put anywhere."""
    return stages * (128 * (tile_m + tile_n) + 16)


def readable(x: Tensor) -> Tensor:
    """The matrix, or batch of them, where the copy engine can read it, else a copy."""
    steps = (step for size, step in zip(x.shape[:-1], x.stride(), strict=False) if size != 1)
    if x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(step > 0 and step % 8 == 0 for step in steps):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tiles(M: int, N: int, K: int, tile_m: int, tile_n: int, group: int) -> tuple[int, int, int, int, int]:
    """The values of struct Tiles; the last is how many tiles there are."""
    down, across = ceil_div(M, tile_m), ceil_div(N, tile_n)
    return ceil_div(K, 64), down, across, group, down * across
