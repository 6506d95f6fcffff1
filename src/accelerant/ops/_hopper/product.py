"""What the launches of kernels with product.h share: x W^T of x (M, K) and W (N, K) with an epilogue of their own."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from accelerant.ops._rows import ceil_div
from accelerant.runtime.dispatch import Case

__all__ = ["HEADER", "THREADS", "readable", "refuses", "ring_bytes", "tiles"]

HEADER = "product.h"
THREADS = 384
"""A block: the producer's warpgroup and two that multiply."""


def refuses(case: Case) -> str | None:
    """Why no such kernel can serve a case of shape (M, N, K); None if it can."""
    M, N, K = case.shape
    if case.device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(case.device) != (9, 0):
        return "is for sm_90"
    if case.dtype != torch.bfloat16:  # float16 compiles, but has not been run on a GPU yet
        return f"takes bfloat16, not {str(case.dtype).removeprefix('torch.')}"
    if not math.prod(case.shape):
        return "takes no empty tensor"
    if N % 8 or K % 8:
        return f"rows of {K if K % 8 else N} elements do not begin on 16-byte boundaries"
    if max(M, N, K) >= 2**30 or ceil_div(M, 64) * ceil_div(N, 64) >= 2**30:
        return "counts tiles in 32 bits"
    return None


def ring_bytes(stages: int, tile_m: int, tile_n: int) -> int:
    """Shared memory of the steps in flight and their barriers, which the kernel may put anywhere."""
    return stages * (128 * (tile_m + tile_n) + 16)


def readable(x: Tensor) -> Tensor:
    """The matrix where the copy engine can read it, else a copy."""
    if x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (x.shape[0] == 1 or (x.stride(0) > 0 and x.stride(0) % 8 == 0)):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def tiles(M: int, N: int, K: int, tile_m: int, tile_n: int, group: int) -> tuple[int, int, int, int, int]:
    """The values of struct Tiles; the last is how many tiles there are."""
    down, across = ceil_div(M, tile_m), ceil_div(N, tile_n)
    return ceil_div(K, 64), down, across, group, down * across
