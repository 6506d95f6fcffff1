"""dropout: launches, implementations, the public function, registration with torch and autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._differentiable import CpuFastPath, DecomposedOp
from accelerant.ops._launch import accesses, ceil_div
from accelerant.ops._library import check_dtype, is_plain, name_of, refuses_triton_kernel
from accelerant.ops.dropout.llvm_kernels import COUNTERS, LANES, DropoutKernel, MaskKernel, refuses_half
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.compilation.triton import TritonKernel
from accelerant.runtime.dispatch import Case, Implementation, Operation
from accelerant.runtime.dispatch.plan import rules
from accelerant.runtime.files import clipped
from accelerant.runtime.provider import ComputeProvider

__all__ = ["dropout"]


_Words = npt.NDArray[np.uint64]
_LOW_WORD = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


def philox_reference(counter: list[_Words], key: tuple[int, int], rounds: int = 10) -> list[_Words]:
    """Return Philox 4x32's four 32-bit words for each counter of four words and a key of two.

    Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 5.2.2.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        first, second = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c2 = (second >> _32) ^ c1 ^ np.uint64(k0), (first >> _32) ^ c3 ^ np.uint64(k1)
        c1, c3 = second & _LOW_WORD, first & _LOW_WORD
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return [c0, c1, c2, c3]


def keep_reference(n: int, p: float, seed: int) -> npt.NDArray[np.bool_]:
    """Return which of n elements are kept.

    Elements are numbered in groups of 2048, four runs of 512 each: element i of run j of group t uses word j of counter
    (512 t + i, 0, 0, 0), whose first two words are 64 bits; the key is the seed. It is kept if the word's upper 31 bits
    are at least p 2^31.
    """
    group, run, i = np.unravel_index(np.arange(n), (-(-n // (4 * GROUP)), 4, GROUP)) if n else (np.zeros(0, int),) * 3
    counter = (group * GROUP + i).astype(np.uint64)
    zero = np.zeros_like(counter)
    words = philox_reference([counter & _LOW_WORD, counter >> _32, zero, zero], (seed & 0xFFFFFFFF, seed >> 32))
    word = np.choose(run, words)
    return (word >> np.uint64(1)) >= np.uint64(min(round(p * 2**31), 2**31 - 1))


def dropout_reference(x: Tensor, p: float = 0.5, *, training: bool = True, seed: int) -> Tensor:
    """Return x / (1 - p) for kept elements and 0 for dropped ones."""
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0
    keep = torch.from_numpy(keep_reference(x.numel(), p, seed)).reshape(x.shape)
    return x * keep.to(device=x.device, dtype=x.dtype) / (1 - p)


_FEW = 8192
"""Up to this many elements torch's dropout is faster on a CPU with a gradient; without one it is up to 2,048.

A reentrant checkpoint runs once without and once with one, and must draw the same mask.
"""

kernel = TritonKernel("accelerant.ops.dropout.triton_kernels", "dropout_fwd")

GROUP = 512  # part of the mask's definition: elements are numbered in groups of four runs of this length

NUM_WARPS = 2  # 8 elements of each run per thread, one 16-byte load of bfloat16
_LOW = 0xFFFFFFFF


def threshold(p: float) -> int:
    """Return the least 31-bit word for which an element is kept."""
    return min(round(p * 2**31), 2**31 - 1)


def launch(x: Tensor, seed: Tensor, p: float, num_warps: int = NUM_WARPS) -> Tensor:
    """Apply the mask of a seed to x, or to dy in the backward pass; the result is contiguous."""
    y = x.new_empty(x.shape)
    if n := x.numel():
        args = (x.contiguous(), seed, y, n, threshold(p), 1.0 / (1.0 - p))
        kernel.launch((ceil_div(n, 4 * GROUP),), args, {"GROUP": GROUP}, num_warps=num_warps)
    return y


def launch_llvm(x: Tensor, seed: Tensor, p: float, *mask: Tensor) -> Tensor:
    """Compute `launch` on a CPU, on all its cores, and write the mask if memory for it is given."""
    y = x.new_empty(x.shape)
    if n := x.numel():
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
    if n := dy.numel():
        provider, compiled = _compiled(MaskKernel(dy.dtype))
        provider.launch(compiled, (ceil_div(n, LANES),), (1,), (dy.contiguous(), mask, dx, n, 1.0 / (1.0 - p)))
    return dx


def empty_mask(x: Tensor) -> Tensor:
    """Return memory for the mask of x, one bit per element; llvm_kernels.py describes its layout."""
    return x.new_empty(ceil_div(x.numel(), 4 * GROUP) * GROUP // 2, dtype=torch.uint8)


@functools.cache
def _compiled(program: DropoutKernel | MaskKernel) -> tuple[ComputeProvider, Kernel]:
    provider = registry.create("cpu")
    return provider, provider.compile(program.source())


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


# --- implementations and the public function -------------------------------------------------------------------------
_triton = Implementation("triton", launch, refuses=refuses_triton_kernel, own=True)


def _llvm(run: Callable[..., Any]) -> Implementation:
    return Implementation("llvm", run, refuses=refuses_llvm, own=True)


dropout_fwd, dropout_bwd = (
    Operation(name, (_triton, _llvm(launch_llvm), Implementation("torch", torch_dropout)), cost=accesses(2, 15))
    for name in ("dropout_fwd", "dropout_bwd")
)

# On a CPU, where the forward pass stores the mask for the backward pass, one bit per element.
_masked_fwd = Operation(
    "dropout_masked_fwd", (_llvm(launch_llvm_masked), Implementation("torch", torch_masked)), cost=accesses(2, 15)
)
_masked_bwd = Operation(
    "dropout_masked_bwd",
    (_llvm(launch_llvm_backward), Implementation("torch", lambda dy, seed, mask, p: torch_dropout(dy, seed, p))),
    cost=accesses(2, 1),
)


def _torch_native(x: Tensor, p: float, keep: bool = True) -> tuple[Tensor, ...]:
    """Return the result and the mask; if not `keep` only the result, faster and with torch's own gradient."""
    return torch.native_dropout(x.contiguous(), p, True) if keep else (F.dropout(x, p),)


# torch's own dropout, which stores its mask: for calls without a seed that no kernel serves, or serves faster.
_native_fwd = Operation(
    "dropout_native_fwd", (Implementation("torch", _torch_native, differentiable=True),), cost=accesses(2, 1)
)
_native_bwd = Operation(
    "dropout_native_bwd", (Implementation("torch", torch.ops.aten.native_dropout_backward),), cost=accesses(2, 1)
)


_cpu = CpuFastPath(lambda x, p=0.5, *_, **__: torch.dropout(x, p, True), args=(False,))


@_cpu
def dropout(x: Tensor, p: float = 0.5, training: bool = True, *, seed: int | Tensor | None = None) -> Tensor:
    """Set each element to zero with probability p, and scale the others so that the expectation is unchanged.

    y = x / (1 - p) for kept elements, 0 x for dropped ones

    Args:
        x: any shape; float16, bfloat16, float32 or float64; fastest if contiguous. Autocast does not change its dtype.
        p: probability of zero, in [0, 1]; rounded to a multiple of 2^-31.
        training: False returns x itself.
        seed: determines the mask, together with an element's row-major index in x: the same seed gives the same mask on
            every device and in every dtype and layout. An integer in [0, 2^64), or a tensor of one int64 on the device
            of x, which is read when the kernel runs. None: drawn from torch's generator for that device, so that
            torch.manual_seed makes a run reproducible.

    Returns:
        shape and dtype of x, contiguous; x itself for p = 0 or without training, 0 x for p = 1.
        Differentiable any number of times. NaN stays NaN, and a dropped infinity becomes NaN, as in PyTorch.

    Raises:
        ConfigError: p or the seed out of range.
        ShapeError: the seed's tensor has more than one element, or is on another device.
        UnsupportedDtype: a dtype not listed above, or the seed's is not int64.
        TypeError: x is not a tensor.

    No mask is stored: the backward pass recomputes it from the seed. On a CPU, where that is faster, it is stored with
    one bit per element. In a captured CUDA graph seed=None draws again at each replay, an integer gives each replay the
    same mask, and a tensor is read at each replay.
    Without a seed, torch's own dropout with torch's own mask runs where no kernel serves (float64 on a GPU), for a few
    thousand elements on a CPU, and under torch.compile, forward-mode differentiation and the transforms of torch.func.
    With a seed the function is the same everywhere; where no kernel serves it uses torch's integer operations, which
    are slower.

    Source: Srivastava et al. 2014, "Dropout: a simple way to prevent neural networks from overfitting", section 10;
    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3" (Philox 4x32-10).
    """
    check_dtype("dropout", x)
    if not 0 <= p <= 1:
        raise ConfigError(f"p must be in [0, 1], got {clipped(p)}")
    if seed is not None:
        seed = _checked(seed, x)
    if not training or p == 0:
        return x
    if p == 1:
        return x * 0.0
    y: Tensor
    if seed is None:
        if torch.compiler.is_compiling() or not is_plain(x):
            return F.dropout(x, p)
        if _prefers_torch(x):
            y = _native(x, p)
            return y
        seed = torch.empty((), dtype=torch.int64, device=x.device).random_()
    elif not isinstance(seed, Tensor):
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    y = (_masked if _keeps_mask(x) else _dropout)(x, seed, p)
    return y


def _prefers_torch(x: Tensor) -> bool:
    """Return whether no kernel serves x, or the CPU's, which is called from Python, is slower than torch's dropout."""
    case = Case(x.device, x.dtype, ())
    if refuses_triton_kernel(case) is None:
        return False
    if refuses_llvm(case) is not None:
        return True
    return x.numel() <= _FEW and not rules().forced


def _keeps_mask(x: Tensor) -> bool:
    """Return whether the CPU's kernels run a call with a gradient: no other serves, and none is forced."""
    if not (x.is_cpu and x.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return False
    case = Case(x.device, x.dtype, ())
    return refuses_triton_kernel(case) is not None and refuses_llvm(case) is None and not rules().forced


def _checked(seed: int | Tensor, x: Tensor) -> int | Tensor:
    """Return the seed as a scalar tensor, or as the int64 with its bits."""
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64:
            raise UnsupportedDtype(f"the seed must be int64, got {name_of(seed.dtype)}")
        if seed.numel() != 1:
            raise ShapeError(f"the seed must be one number, got shape {tuple(seed.shape)}")
        if seed.device != x.device:
            raise ShapeError(f"x and the seed must be on one device, got {x.device} and {seed.device}")
        return seed.reshape(())
    if not 0 <= seed < 2**64:
        raise ConfigError(f"seed must be in [0, 2^64), got {clipped(seed)}")
    return seed - 2**64 if seed >= 2**63 else seed


def _case(x: Tensor, *_: object) -> Case:
    return Case(x.device, x.dtype, x.shape)


_cpu.case(lambda x, p: _case(x) if x.is_contiguous() else None)
_dropout = DecomposedOp(
    "dropout(Tensor x, Tensor seed, float p) -> (Tensor y)",
    operation=dropout_fwd,
    case=_case,
    backward=lambda dy, seed, p, needs: (dropout_bwd(_case(dy), dy, seed, p),),
    composite_backward=lambda dy, seed, p, needs: (torch_dropout(dy, seed, p),),
    saves=("seed",),
    gradients={"x": "y"},
    composite=torch_dropout,
    fake=lambda x, seed, p: x.new_empty(x.shape),
)
_masked = DecomposedOp(
    "dropout_masked(Tensor x, Tensor seed, float p) -> (Tensor y, Tensor mask)",
    operation=_masked_fwd,
    case=_case,
    backward=lambda dy, seed, mask, p, needs: (_masked_bwd(_case(dy), dy, seed, mask, p),),
    composite_backward=lambda dy, seed, mask, p, needs: (torch_dropout(dy, seed, p),),
    saves=("seed", "mask"),
    gradients={"x": "y"},
    composite=torch_dropout,
    fake=lambda x, seed, p: (x.new_empty(x.shape), empty_mask(x)),
)
_native = DecomposedOp(
    "dropout_native(Tensor x, float p) -> (Tensor y, Tensor mask)",
    operation=_native_fwd,
    case=_case,
    backward=lambda dy, mask, p, needs: (_native_bwd(_case(dy), dy.contiguous(), mask, 1.0 / (1.0 - p)),),
    composite_backward=lambda dy, mask, p, needs: (dy * mask.to(dy.dtype) * (1.0 / (1.0 - p)),),
    saves=("mask",),
    gradients={"x": "y"},
    composite=F.dropout,
    cpu=_cpu,
    fake=lambda x, p: (x.new_empty(x.shape), x.new_empty(x.shape, dtype=torch.bool)),
)
