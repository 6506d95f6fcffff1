"""Quick scores on a GPU without their matrix: maxima of blocks of rows, then the scores of the blocks that matter."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div
from accelerant.runtime.compilation.triton import TritonKernel, interpreting, refuses_triton

BLOCK = 64
"""Rows of a block, as triton_kernels.py has it."""

KERNELS = {
    name: TritonKernel("accelerant.search.triton_kernels", f"search_{name}", widths=widths)
    for name, widths in {"maxima": (7, 8, 9, 10), "maxima_one": (6, 7), "scores": (8, 9, 10, 11)}.items()
}

_HALVES = (torch.bfloat16, torch.float16)


def serves(device: torch.device) -> bool:
    """Return whether the kernels run on tensors of a device."""
    return refuses_triton(device) is None


def kind_of(q: torch.dtype, x: torch.dtype) -> str:
    """Return what the tensor cores multiply: "int8", "half" as given, or "bfloat16", to which others are rounded."""
    return "int8" if q == x == torch.int8 else "half" if q == x and x in _HALVES else "bfloat16"


def tile_of(
    queries: int, q: torch.dtype, x: torch.dtype, *, has_tensor_cores: bool
) -> tuple[dict[str, int | str], int, int]:
    """Return the constants of `maxima`, its warps and its stages, at most 96 KiB of shared memory.

    Without the tensor cores of sm_80, and in the interpreter, products are float32's.
    """
    if not has_tensor_cores:
        return {"KIND": "upcast", "BLOCK_Q": 32, "BLOCK_N": 64, "BLOCK_D": 32}, 4, 2
    kind: dict[str, int | str] = {"KIND": kind_of(q, x)}
    if queries <= 32:
        return {**kind, "BLOCK_Q": 16 if queries <= 16 else 32, "BLOCK_N": 128, "BLOCK_D": 64}, 4, 3
    return {**kind, "BLOCK_Q": 128, "BLOCK_N": 128, "BLOCK_D": 64}, 8, 2 if x == torch.float32 else 3


def maxima(q: Tensor, x: Tensor, extra: Tensor | None, hidden: Tensor | None, metric: str) -> Tensor:
    """Return the largest quick score of each block of rows, (queries, blocks) float32."""
    (Q, D), N = q.shape, len(x)
    blocks = ceil_div(N, BLOCK)
    found = torch.empty(Q, blocks, dtype=torch.float32, device=x.device)
    if Q == 1:
        one = (q, x, extra, hidden, found, N, D, x.stride(0))
        KERNELS["maxima_one"].launch((blocks,), one, {"METRIC": metric, "BLOCK_D": 128})
        return found
    cores = not interpreting() and torch.cuda.get_device_capability(x.device) >= (8, 0)
    tile, warps, stages = tile_of(Q, q.dtype, x.dtype, has_tensor_cores=cores)
    constants = {"METRIC": metric, **tile}
    grid = (ceil_div(Q, int(tile["BLOCK_Q"])) * ceil_div(N, int(tile["BLOCK_N"])),)
    args = (q, x, extra, hidden, found, Q, N, D, q.stride(0), x.stride(0), _step(hidden), blocks)
    KERNELS["maxima"].launch(grid, args, constants, num_warps=warps, num_stages=stages)
    return found


def scores(
    q: Tensor, x: Tensor, extra: Tensor | None, hidden: Tensor | None, metric: str, query: Tensor, block: Tensor
) -> Tensor:
    """Return the quick scores of pairs of a query and a block, (pairs, 64) float32."""
    found = torch.empty(len(query), BLOCK, dtype=torch.float32, device=x.device)
    if len(query):
        args = (
            q, x, extra, hidden, query, block, found, len(x), q.shape[1], q.stride(0), x.stride(0), _step(hidden),
        )  # fmt: skip
        constants = {"METRIC": metric, "BLOCK_D": 128}
        KERNELS["scores"].launch((len(query),), args, constants)
    return found


def _step(hidden: Tensor | None) -> int:
    """Return the distance of the masks of two queries, 0 where they share one."""
    return 0 if hidden is None or len(hidden) == 1 else hidden.stride(0)
