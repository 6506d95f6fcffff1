"""Samples, benchmarks, tolerances and compiled kernels of quantize_int8."""

from __future__ import annotations

import math

import torch

from accelerant.ops._launch import quantizing_plan, row_constants
from accelerant.ops.quantize_int8 import KERNELS as _KERNELS
from accelerant.ops.quantize_int8 import WIDE
from accelerant.ops.registry import Benchmark, Compilation, SampleInput, Tolerance, size_name

KIND = "plain"


def _sample(*shape: int, dim: int = -1) -> SampleInput:
    return SampleInput(size_name(shape) + ("" if dim == -1 else f"-dim{dim}"), (shape,), {"dim": dim})


SAMPLES = (
    _sample(), _sample(1), _sample(3, 5), _sample(7), _sample(2, 3, 129), _sample(67, 16), _sample(5, 1000),
    _sample(3, 4096), _sample(2, 16400), _sample(0, 8), _sample(3, 0), _sample(3, 5, dim=0), _sample(3, 70, 5, dim=1),
    _sample(0, 3, 2, dim=1), _sample(2, 0, 3, dim=1),
)  # fmt: skip
LARGE = (
    _sample(4099, 4096), _sample(65536, 768), _sample(257, 50257), _sample(3, 1_000_003),
    _sample(129, 1025, 130, dim=1),
)  # fmt: skip
BENCHMARKS = (Benchmark(_sample(16384, 4096), torch.bfloat16), Benchmark(_sample(8192, 8192), torch.bfloat16))

# Integers, and a scale that is one float32 division: exact.
TOLERANCES = dict.fromkeys((torch.float64, torch.float32, torch.float16, torch.bfloat16), Tolerance(0.0, 0.0))


_POINTERS = {"q_ptr": "*i8", "scale_ptr": "*fp32", "peaks_ptr": "*i32"}


def _compilation(kind: str, N: int) -> Compilation:
    plan = quantizing_plan(N)
    types = {"*": kind, **_POINTERS}
    return Compilation(_KERNELS["fwd"], types, row_constants(plan, N), plan.num_warps, multiple=math.gcd(N, 16))


_BF16 = {"*": "*bf16", **_POINTERS}
KERNELS = (
    _compilation("*bf16", 4096),
    _compilation("*bf16", 768),
    _compilation("*fp16", 1000),
    _compilation("*fp32", 16000),
    Compilation(_KERNELS["wide"], _BF16, {"BLOCK_N": WIDE.block_n}, WIDE.num_warps),
    Compilation(_KERNELS["part"], _BF16, {"BLOCK_N": WIDE.block_n}, WIDE.num_warps),
    Compilation(_KERNELS["join"], _BF16, {"BLOCK_N": WIDE.block_n, "PARTS": 128}, WIDE.num_warps),
)
