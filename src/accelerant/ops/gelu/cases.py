"""The cases of gelu's tests and benchmark."""

from __future__ import annotations

import torch

from accelerant.ops.gelu import backward_kernel, forward_kernel
from accelerant.ops.registry import Benchmark, Compilation, SampleInput, size_name, tolerances


def _sample(approximate: str, *shape: int) -> SampleInput:
    return SampleInput(f"{size_name(shape)}-{approximate}", (shape,), {"approximate": approximate})


_SHAPES = ((1,), (7,), (3, 5), (), (0,), (4, 0, 2), (2, 3, 129), (33, 257))
SAMPLES = tuple(_sample(approximate, *shape) for approximate in ("none", "tanh") for shape in _SHAPES)
LARGE = (_sample("tanh", 4097, 4095), _sample("none", 16384, 3072))
BENCHMARKS = (Benchmark(_sample("tanh", 16384, 4096), torch.bfloat16, 0.068, 0.098),)

# Rounding of the result, one unit in the last place (the interpreter cuts bfloat16 instead of rounding it); in float32
# exp and erf are good to a few units. The absolute part is for negative x, where erf cancels.
TOLERANCES = tolerances(float64=(1e-13, 1e-13), float32=(2e-6, 1e-6), float16=(1e-3, 1e-6), bfloat16=(8e-3, 1e-6))

KERNELS = tuple(
    Compilation(
        kernel, {"*": kind}, {"TANH": tanh, "BLOCK": kernel.usual.block, "EVICTION": eviction}, kernel.usual.num_warps
    )
    for kind, tanh, eviction in (
        ("*bf16", True, ""),
        ("*bf16", True, "evict_last"),
        ("*fp32", False, ""),
        ("*fp16", False, ""),
    )
    for kernel in (forward_kernel, backward_kernel)
)
