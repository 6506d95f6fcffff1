"""Samples, benchmarks, tolerances and compiled kernels of attention and attention_varlen."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from accelerant.ops.attention.launch import KERNELS as _KERNELS
from accelerant.ops.attention.launch import constants, plan_for
from accelerant.ops.registry import Benchmark, Compilation, OpCases, SampleInput, Stated, specialized, tolerances


def _sample(B: int, Hq: int, S: int, D: int, *, Hkv: int = 0, Skv: int = -1, **options: Any) -> SampleInput:
    Hkv, Skv = Hkv or Hq, S if Skv < 0 else Skv
    words = [f"{B}x{Hq}x{S}x{D}"]
    if (Hkv, Skv) != (Hq, S):
        words.append(f"on-{Hkv}x{Skv}")
    words += [name if value is True else f"{name}{value}" for name, value in options.items()]
    keys = (B, Hkv, Skv, D)
    return SampleInput("-".join(words), ((B, Hq, S, D), keys, keys), options)


_ATTENTION = OpCases(
    SAMPLES=(
        _sample(1, 1, 1, 1),
        _sample(1, 2, 3, 4, Hkv=1, Skv=5, causal=True),
        _sample(1, 2, 37, 16, causal=True),
        _sample(2, 2, 5, 2, causal=True, window=1),
        _sample(1, 1, 40, 33),
        _sample(1, 4, 17, 32, Hkv=2, Skv=50, causal=True),
        _sample(1, 1, 41, 8, Skv=19, causal=True),
        _sample(1, 2, 45, 24, causal=True, window=7),
        _sample(1, 1, 20, 16, Skv=70, window=3),
        _sample(1, 1, 1, 64, Skv=33),
        _sample(0, 2, 4, 8),
        _sample(2, 1, 0, 8, Skv=4),
        _sample(1, 2, 3, 8, Skv=0),
        _sample(1, 1, 13, 8, scale=0.5),
    ),
    LARGE=(
        _sample(2, 4, 1001, 64, causal=True),
        _sample(1, 8, 777, 128, Hkv=2, Skv=1234, causal=True),
        _sample(1, 2, 500, 80, Skv=300, causal=True),
        _sample(1, 4, 1500, 64, causal=True, window=200),
        _sample(1, 2, 513, 256),
        _sample(1, 3, 129, 40, Hkv=1, Skv=2049),
        _sample(1, 1, 300, 192, causal=True),
    ),
    BENCHMARKS=(
        # Relative to the fastest peer, far below the tensor cores' peak: 330/323, 393/402, 536/509, 569/573 TFLOP/s.
        Benchmark(_sample(32, 12, 1024, 64, causal=True), torch.bfloat16, forward_x=1.15, backward_x=1.15),
        Benchmark(_sample(16, 12, 2048, 64, causal=True), torch.bfloat16, forward_x=1.1, backward_x=1.0),
        Benchmark(_sample(1, 16, 16384, 64), torch.bfloat16, forward_x=1.0, backward_x=1.0),
        Benchmark(_sample(2, 16, 8192, 128, causal=True), torch.bfloat16, forward_x=1.0, backward_x=1.0),
        Benchmark(_sample(8, 12, 2048, 64), torch.float32, forward_x=1.5, backward_x=1.5, peak_mib=52.0),
        Benchmark(_sample(2, 8, 4096, 128, causal=True), torch.float32, forward_x=1.5, backward_x=1.5),
    ),
    # o is a weighted mean of unit normal values, rounded once, with weights rounded to its dtype; gradients add two
    # more products. float32: sums of up to 2000 products.
    TOLERANCES=tolerances(float64=(1e-11, 1e-12), float32=(2e-5, 5e-6), float16=(4e-3, 3e-3), bfloat16=(2.5e-2, 2e-2)),
)


def _packed(H: int, D: int, lengths: tuple[tuple[int, int], ...], *, Hkv: int = 0, **options: Any) -> SampleInput:
    """Return a sample of packed sequences with these (queries, keys) lengths."""
    cu = [tuple(itertools.accumulate((pair[i] for pair in lengths), initial=0)) for i in (0, 1)]
    words = ["+".join(f"{a}on{b}" for a, b in lengths) or "none", f"{H}x{D}"]
    words += [f"{name}{'' if value is True else value}" for name, value in options.items()]
    keys = (cu[1][-1], Hkv or H, D)
    longest = {f"max_seqlen_{x}": max((pair[i] for pair in lengths), default=0) for i, x in enumerate("qk")}
    arguments = ((cu[0][-1], H, D), keys, keys, Stated(cu[0]), Stated(cu[1]))
    return SampleInput("-".join(words), arguments, {**longest, **options})


_VARLEN = OpCases(
    SAMPLES=(
        _packed(1, 1, ((1, 1),)),
        _packed(2, 2, ((3, 2), (1, 3)), Hkv=1, causal=True),
        _packed(2, 8, ((37, 37), (5, 5), (20, 20)), causal=True),
        _packed(1, 16, ((20, 7), (0, 5), (33, 40), (4, 0))),
        _packed(2, 24, ((20, 7), (9, 50)), Hkv=1, causal=True, window=6),
        _packed(2, 8, ((0, 3),)),
        _packed(1, 8, ()),
    ),
    LARGE=(
        _packed(8, 64, ((1000, 1000), (3, 3), (517, 517), (64, 64)), causal=True),
        _packed(4, 128, ((100, 700), (300, 200), (1, 999)), Hkv=2, causal=True, window=128),
        _packed(2, 80, ((257, 129), (0, 5), (31, 600))),
    ),
    BENCHMARKS=(Benchmark(_packed(12, 64, ((1024, 1024),) * 32, causal=True), torch.bfloat16),),
    TOLERANCES=_ATTENTION.TOLERANCES,
)

FAMILY = {"attention": _ATTENTION, "attention_varlen": _VARLEN}


def compilation(
    kernel: str, kind: str, width: int, capability: tuple[int, int], *, causal: bool = True, window: int = -1,
    packed: bool = False, mask: str | None = None, split: bool = False,
) -> Compilation:  # fmt: skip
    """Return a kernel's specialization as a device of this compute capability launches it."""
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[kind]
    segments = mask == "*i32"
    plan = plan_for(kernel, width, dtype, capability, split, mask is not None and not segments)
    types = {"*": kind, "lse_ptr": "*fp32", "delta_ptr": "*fp32", "scale": "fp32"}
    cu = dict.fromkeys(("cu_q_ptr", "cu_k_ptr"), "*i32" if packed else None)
    upcast, precision = dtype == torch.bfloat16 and capability < (8, 0), "fp16x3" if split else "ieee"
    fixed = constants(plan, width, causal, window, upcast=upcast, precision=precision, segments=segments)
    return specialized(_KERNELS[kernel], {**types, **cu, "mask_ptr": mask}, fixed, plan.num_warps, plan.num_stages)


# The first of each kernel is compiled for every target, so it fits in the smallest shared memory.
_ATTENTION_KERNELS = tuple(
    compiled
    for kernel in ("fwd", "bwd_q", "bwd_kv")
    for compiled in (
        compilation(kernel, "*fp16", 64, (7, 5)),
        compilation(kernel, "*bf16", 64, (9, 0)),
        compilation(kernel, "*bf16", 128, (9, 0), causal=False, window=64, packed=True),
        compilation(kernel, "*bf16", 256, (9, 0)),
        compilation(kernel, "*fp32", 64, (9, 0)),
        compilation(kernel, "*bf16", 64, (9, 0), mask="*i32"),
        compilation(kernel, "*bf16", 128, (9, 0), mask="*i32"),
    )
    # Split or with a mask, bwd_kv spills loop constants and is left out; smaller tiles were not measured.
    + (
        ()
        if kernel == "bwd_kv"
        else (
            compilation(kernel, "*fp32", 64, (9, 0), causal=False, split=True),
            compilation(kernel, "*bf16", 64, (9, 0), causal=False, mask="*u8"),
            compilation(kernel, "*bf16", 128, (9, 0), mask="*bf16"),
        )
    )
)
ELEMENT_LOADS = ("attention_segments",)
KERNELS = (*_ATTENTION_KERNELS, specialized(_KERNELS["segments"], {"*": "*i32"}, {"BLOCK": 64}, 4))
