"""The cases of gelu's tests and benchmark."""

from __future__ import annotations

import torch

from accelerant.ops._cases import Benchmark, Compilation, Sample, Tolerance
from accelerant.ops.gelu.launch import backward_kernel, forward_kernel

__all__ = ["BENCHMARKS", "KERNELS", "LARGE", "SAMPLES", "TOLERANCES"]

_SHAPES = ((1,), (7,), (3, 5), (), (0,), (4, 0, 2), (2, 3, 129), (33, 257))
SAMPLES = tuple(
    Sample(f"{'x'.join(map(str, shape)) or 'scalar'}-{approximate}", (shape,), {"approximate": approximate})
    for approximate in ("none", "tanh")
    for shape in _SHAPES
)
LARGE = (
    Sample("4097x4095-tanh", ((4097, 4095),), {"approximate": "tanh"}),
    Sample("16384x3072-none", ((16384, 3072),), {"approximate": "none"}),
)
BENCHMARKS = (
    Benchmark(Sample("16384x4096-tanh", ((16384, 4096),), {"approximate": "tanh"}), torch.bfloat16, 0.068, 0.098),
)

# Rounding of the result, one unit in the last place (the interpreter cuts bfloat16 instead of rounding it); in float32
# exp and erf are good to a few units. The absolute part is for negative x, where erf cancels.
TOLERANCES = {
    torch.float64: Tolerance(1e-13, 1e-13),
    torch.float32: Tolerance(2e-6, 1e-6),
    torch.float16: Tolerance(1e-3, 1e-6),
    torch.bfloat16: Tolerance(8e-3, 1e-6),
}


def _compilations(kind: str, tanh: bool, eviction: str = "") -> tuple[Compilation, ...]:
    return (
        Compilation(
            forward_kernel,
            {"x_ptr": kind, "y_ptr": kind, "n": "i32"},
            {"TANH": tanh, "BLOCK": forward_kernel.usual.block, "EVICTION": eviction},
            forward_kernel.usual.num_warps,
        ),
        Compilation(
            backward_kernel,
            {"dy_ptr": kind, "x_ptr": kind, "dx_ptr": kind, "n": "i32"},
            {"TANH": tanh, "BLOCK": backward_kernel.usual.block, "EVICTION": eviction},
            backward_kernel.usual.num_warps,
        ),
    )


KERNELS = (
    *_compilations("*bf16", True),
    *_compilations("*bf16", True, "evict_last"),
    *_compilations("*fp32", False),
    *_compilations("*fp16", False),
)
