"""The cases of the tests and benchmarks of softmax and log_softmax."""

from __future__ import annotations

import math

import torch

from accelerant.ops.registry import Benchmark, Compilation, OpCases, SampleInput, size_name, tolerances
from accelerant.ops.softmax import INNER_COLUMNS, WIDE, constants, inner_plan, row_plan
from accelerant.ops.softmax import KERNELS as _KERNELS


def _sample(*shape: int, dim: int = -1) -> SampleInput:
    return SampleInput(size_name(shape) + ("" if dim == -1 else f"-dim{dim}"), (shape,), {"dim": dim})


SAMPLES = (
    _sample(), _sample(1), _sample(7), _sample(3, 5), _sample(2, 3, 129), _sample(67, 16), _sample(5, 1000),
    _sample(5, 4096), _sample(3, 16400), _sample(0, 8), _sample(3, 0), _sample(3, 5, dim=0), _sample(3, 70, 5, dim=1),
    _sample(2, 1, 66, dim=1), _sample(130, 3, 2, dim=-3), _sample(0, 3, 2, dim=1),
)  # fmt: skip
LARGE = (
    _sample(4099, 4096), _sample(65536, 768), _sample(257, 50257), _sample(3, 1_000_003), _sample(1_000_003, 3),
    _sample(129, 1025, 130, dim=1), _sample(1, 70001, 3, dim=1),
)  # fmt: skip
_MEASURED = _sample(16384, 4096)

# One rounding of y, at most 1 (the interpreter cuts bfloat16 instead of rounding it). The gradient starts from the
# rounded y, which the absolute part covers; exp in float32 is good to a few units for arguments up to about 10.
TOLERANCES = tolerances(float64=(1e-12, 1e-14), float32=(4e-6, 1e-6), float16=(2e-3, 1e-3), bfloat16=(1.6e-2, 8e-3))
# exp(y) of a rounded y is off by |y| times the rounding, times the sum of dy; |y| exp(y) is at most 0.37.
LOG_TOLERANCES = tolerances(
    float64=(1e-12, 1e-12), float32=(4e-6, 4e-6), float16=(2e-3, 2e-3), bfloat16=(1.6e-2, 1.6e-2)
)

FAMILY = {
    "softmax": OpCases(SAMPLES, LARGE, (Benchmark(_MEASURED, torch.bfloat16, 0.067, 0.097),), TOLERANCES),
    "log_softmax": OpCases(SAMPLES, LARGE, (Benchmark(_MEASURED, torch.bfloat16),), LOG_TOLERANCES),
}


def _compilations(kind: str, N: int, log: bool = False, eviction: str = "") -> tuple[Compilation, ...]:
    plans = {"fwd": row_plan(N), "bwd": row_plan(N, backward=True)}
    return tuple(
        Compilation(
            _KERNELS[way], {"*": kind}, constants(plan, N, log, eviction), plan.num_warps, multiple=math.gcd(N, 16)
        )
        for way, plan in plans.items()
    )


_BF16 = {"*": "*bf16", "sums_ptr": "*fp32"}
_WIDE = {"LOG": False, "BLOCK_N": WIDE.block_n}
_JOIN = {**_WIDE, "PARTS": 128}
_INNER = {"LOG": False, "BLOCK_N": inner_plan(64).block_n, "BLOCK_I": INNER_COLUMNS}
KERNELS = (
    *_compilations("*bf16", 4096),
    *_compilations("*bf16", 4096, eviction="evict_last"),
    *_compilations("*bf16", 4096, log=True),
    *_compilations("*bf16", 768),
    *_compilations("*fp32", 16000),
    *_compilations("*fp16", 1000),
    Compilation(_KERNELS["fwd_wide"], {"*": "*bf16"}, _WIDE, WIDE.num_warps),
    Compilation(_KERNELS["bwd_wide"], {"*": "*bf16"}, _WIDE, WIDE.num_warps),
    Compilation(_KERNELS["fwd_part"], _BF16, {"BLOCK_N": WIDE.block_n}, WIDE.num_warps),
    Compilation(_KERNELS["fwd_join"], _BF16, _JOIN, WIDE.num_warps),
    Compilation(_KERNELS["bwd_part"], _BF16, _WIDE, WIDE.num_warps),
    Compilation(_KERNELS["bwd_join"], _BF16, _JOIN, WIDE.num_warps),
    Compilation(_KERNELS["fwd_inner"], {"*": "*bf16"}, _INNER, inner_plan(64).num_warps),
    Compilation(_KERNELS["bwd_inner"], {"*": "*bf16"}, _INNER, inner_plan(64).num_warps),
)
