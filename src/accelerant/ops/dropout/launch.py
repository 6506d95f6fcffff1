"""Launches of dropout's kernels, and the same function in torch's integer operations."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from accelerant.ops._launch import ceil_div
from accelerant.ops.dropout.llvm_kernels import COUNTERS, LANES, DropoutKernel, MaskKernel, refuses_half
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch.case import Case
from accelerant.runtime.provider import ComputeProvider

__all__ = [
    "GROUP", "NUM_WARPS", "empty_mask", "kernel", "launch", "launch_llvm", "launch_llvm_backward",
    "launch_llvm_masked", "refuses_llvm", "threshold", "torch_dropout", "torch_masked",
]  # fmt: skip

kernel = TritonKernel("accelerant.ops.dropout.triton_kernels", "dropout_fwd")

GROUP = 512
"""Part of the mask's definition: elements are numbered in groups of four runs of this length."""

NUM_WARPS = 2  # 8 elements of each run per thread, one 16-byte load of bfloat16
_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Return the least 31-bit word for which an element is kept."""
    return min(round(p * 2**31), 2**31 - 1)


def launch(x: Tensor, seed: Tensor, p: float, num_warps: int = NUM_WARPS) -> Tensor:
    """Apply the mask of a seed to x, or to dy in the backward pass; the result is contiguous."""
    y = x.new_empty(x.shape)
    n = x.numel()
    if n:
        args = (x.contiguous(), seed, y, n, threshold(p), 1.0 / (1.0 - p))
        kernel.launch((ceil_div(n, 4 * GROUP),), args, {"GROUP": GROUP}, num_warps=num_warps)
    return y


def launch_llvm(x: Tensor, seed: Tensor, p: float, *mask: Tensor) -> Tensor:
    """Compute `launch` on a CPU, on all its cores, and write the mask if memory for it is given."""
    y = x.new_empty(x.shape)
    n = x.numel()
    if n:
        provider, compiled = _compiled(DropoutKernel(x.dtype, bool(mask)))
        whole, left = divmod(n, 4 * GROUP)
        indices = whole * GROUP // COUNTERS + ceil_div(min(left, GROUP), COUNTERS)
        args = (x.contiguous(), seed, y, n, threshold(p), 1.0 / (1.0 - p), *mask)
        provider.launch(compiled, (indices,), (1,), args)
    return y


def launch_llvm_masked(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute launch_llvm, and return the mask too."""
    mask = empty_mask(x)
    return launch_llvm(x, seed, p, mask), mask


def launch_llvm_backward(dy: Tensor, seed: Tensor, mask: Tensor, p: float) -> Tensor:
    """Compute launch_llvm from a stored mask; the seed is not used."""
    dx = dy.new_empty(dy.shape)
    n = dy.numel()
    if n:
        provider, compiled = _compiled(MaskKernel(dy.dtype))
        provider.launch(compiled, (ceil_div(n, LANES),), (1,), (dy.contiguous(), mask, dx, n, 1.0 / (1.0 - p)))
    return dx


def empty_mask(x: Tensor) -> Tensor:
    """Return memory for the mask of x, one bit per element; llvm_kernels.py describes its layout."""
    return x.new_empty(ceil_div(x.numel(), 4 * GROUP) * GROUP // 2, dtype=torch.uint8)


@functools.cache
def _compiled(program: DropoutKernel | MaskKernel) -> tuple[ComputeProvider, Kernel]:
    source = KernelSource(program.entry, {"llvm": program}, {program.entry: program.arguments})
    provider = registry.create("cpu")
    return provider, provider.compile(source)


def refuses_llvm(case: Case) -> str | None:
    """Return why the CPU's kernel cannot serve a case, or None."""
    if case.device.type != "cpu":
        return f"is for a CPU, not {case.device.type}"
    return refuses_half() if case.dtype == torch.float16 else None


def torch_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Compute `launch` by torch's functions on any device; differentiable in x."""
    keep = _keep(x.shape, seed, p).to(x.dtype)
    return x.contiguous() * keep * (1.0 / (1.0 - p))


def torch_masked(x: Tensor, seed: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Compute launch_llvm_masked by torch's functions."""
    mask = empty_mask(x)
    keep = torch.zeros(8 * mask.numel(), dtype=torch.uint8, device=x.device)
    keep[: x.numel()] = _keep(x.shape, seed, p).flatten()
    torch.sum(keep.view(-1, 8) << torch.arange(8, dtype=torch.uint8, device=x.device), 1, out=mask)
    return torch_dropout(x, seed, p), mask


def _keep(shape: torch.Size, seed: Tensor, p: float) -> Tensor:
    """Return the mask, bool."""
    n = shape.numel()
    groups = (n + 4 * GROUP - 1) // (4 * GROUP)
    counter = torch.arange(groups * GROUP, dtype=torch.int64, device=seed.device)
    words = _philox(counter & _LOW, counter >> 32, seed & _LOW, (seed >> 32) & _LOW)
    ordered = torch.stack([word.view(groups, GROUP) for word in words], 1)
    return ((ordered.flatten()[:n] >> 1) >= threshold(p)).view(shape)


def _philox(c0: Tensor, c1: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute Philox 4x32-10 in int64: products wrap modulo 2^64, which keeps the bits of both halves."""
    c2 = c3 = torch.zeros_like(c0)
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c2 = ((second >> 32) & _LOW) ^ c1 ^ k0, ((first >> 32) & _LOW) ^ c3 ^ k1
        c1, c3 = second & _LOW, first & _LOW
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3
