"""Launches of attention_decode's kernels: the split of the keys among programs."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div, multiprocessors, next_power_of_2
from accelerant.ops.attention.launch import triton_capability, with_rows
from accelerant.runtime.compilation.triton import TritonKernel

__all__ = ["KERNELS", "MAX_SPLITS", "NUM_WARPS", "constants", "launch_forward", "splits_for", "stages_for"]

KERNELS = {
    name: TritonKernel("accelerant.ops.attention_decode.triton_kernels", f"attention_decode_{name}")
    for name in ("fwd", "combine")
}

MAX_SPLITS = 64
NUM_WARPS = 4
_PROGRAMS = 2  # per multiprocessor, if each has at least _ENOUGH_KEYS keys
_ENOUGH_KEYS = 512


@functools.cache
def constants(rows: int, width: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> dict[str, int | bool]:
    """Return the compile-time arguments of fwd for `rows` rows per key head; capability None: the interpreter."""
    block_d = max(16, next_power_of_2(width))
    upcast = dtype == torch.bfloat16 and (capability is None or capability < (8, 0))
    slow = dtype == torch.float32 or upcast or (capability is not None and capability < (8, 0))
    block_m = min(16 if slow else 64, max(16, next_power_of_2(rows)))
    block_n = 16 if capability is None or (slow and block_d > 64) else 32 if slow or block_d > 128 else 64
    return {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_D": block_d, "UPCAST": upcast}


@functools.cache
def stages_for(capability: tuple[int, int] | None) -> int:
    """Return the pipeline depth: as many loads as fit in 227, 99 or 64 KiB of shared memory."""
    return 4 if capability == (9, 0) else 2 if capability is not None and capability >= (8, 0) else 1


def splits_for(programs: int, T: int, block_n: int, device: torch.device) -> int:
    """Return the number of parts of T keys, with `programs` programs for each part.

    The parts fill the device in one wave: with 16,384 keys and 64 programs per part an H200 took 0.132 ms for four
    parts, 0.158 ms for five, which need a second wave.
    """
    processors = multiprocessors(device)
    most = min(ceil_div(T, block_n), MAX_SPLITS)
    if ceil_div(_PROGRAMS * processors, programs) * _ENOUGH_KEYS > T:
        return max(1, min(processors // programs, most))  # a second program per multiprocessor costs more than it hides
    return max(1, min(_PROGRAMS * processors // programs, most))


def launch_forward(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, splits: int | None = None) -> Tensor:
    """Return o, contiguous; splits None for splits_for's."""
    B, Hq, Sq, D = q.shape
    Hkv, T = k.shape[1], k.shape[2]
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not o.numel():
        return o
    if not T:
        return o.zero_()
    q, k, v = with_rows(q), with_rows(k), with_rows(v)
    group = Hq // Hkv
    capability = triton_capability(q.device)
    fixed = constants(group * Sq, D, q.dtype, capability)
    row_blocks = ceil_div(group * Sq, int(fixed["BLOCK_M"]))
    programs = B * Hkv * row_blocks
    splits = splits or splits_for(programs, T, int(fixed["BLOCK_N"]), q.device)
    parts, lse = o, None
    if splits > 1:
        parts = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
        lse = torch.empty((splits, B, Hq, Sq), dtype=torch.float32, device=q.device)
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    KERNELS["fwd"].launch(
        (programs * splits,),
        (q, k, v, lengths, parts, lse, T, Sq, Hkv, group, row_blocks, splits, D, scale, *strides),
        fixed,
        num_warps=NUM_WARPS,
        num_stages=stages_for(capability),
    )
    if lse is not None:
        rows = B * Hq * Sq
        joined = {"BLOCK_S": next_power_of_2(splits), "BLOCK_D": fixed["BLOCK_D"]}
        KERNELS["combine"].launch((rows,), (parts, lse, o, rows, splits, D), joined, num_warps=NUM_WARPS)
    return o
