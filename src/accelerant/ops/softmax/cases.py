"""The cases of the tests and benchmarks of softmax and log_softmax."""

from __future__ import annotations

import math

import torch

from accelerant.ops._cases import Benchmark, Compilation, OpCases, Sample, Tolerance
from accelerant.ops.softmax.launch import INNER_COLUMNS, WIDE, constants, inner_plan, row_plan
from accelerant.ops.softmax.launch import KERNELS as _KERNELS

__all__ = ["FAMILY", "KERNELS"]


def _sample(*shape: int, dim: int = -1) -> Sample:
    name = "x".join(map(str, shape)) or "scalar"
    return Sample(name if dim == -1 else f"{name}-dim{dim}", (shape,), {"dim": dim})


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
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-14),
    torch.float32: Tolerance(4e-6, 1e-6),
    torch.float16: Tolerance(2e-3, 1e-3),
    torch.bfloat16: Tolerance(1.6e-2, 8e-3),
}
# exp(y) of a rounded y is off by |y| times the rounding, times the sum of dy; |y| exp(y) is at most 0.37.
LOG_TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(4e-6, 4e-6),
    torch.float16: Tolerance(2e-3, 2e-3),
    torch.bfloat16: Tolerance(1.6e-2, 1.6e-2),
}

FAMILY = {
    "softmax": OpCases(SAMPLES, LARGE, (Benchmark(_MEASURED, torch.bfloat16, 0.067, 0.097),), TOLERANCES),
    "log_softmax": OpCases(SAMPLES, LARGE, (Benchmark(_MEASURED, torch.bfloat16),), LOG_TOLERANCES),
}

_SIZES = {"M": "i32", "N": "i32"}


def _compilations(kind: str, N: int, log: bool = False, eviction: str = "") -> tuple[Compilation, ...]:
    plan, back = row_plan(N), row_plan(N, backward=True)
    return (
        Compilation(
            _KERNELS["fwd"],
            {"x_ptr": kind, "y_ptr": kind, **_SIZES, "x_stride": "i32"},
            constants(plan, N, log, eviction),
            plan.num_warps,
            multiple=math.gcd(N, 16),
        ),
        Compilation(
            _KERNELS["bwd"],
            {"dy_ptr": kind, "y_ptr": kind, "dx_ptr": kind, **_SIZES, "dy_stride": "i32"},
            constants(back, N, log, eviction),
            back.num_warps,
            multiple=math.gcd(N, 16),
        ),
    )


_WIDE = {"LOG": False, "BLOCK_N": WIDE.block_n}
_INNER = {"LOG": False, "BLOCK_N": inner_plan(64).block_n, "BLOCK_I": INNER_COLUMNS}
_FORWARD = {"x_ptr": "*bf16", "y_ptr": "*bf16", "N": "i32"}
_BACKWARD = {"dy_ptr": "*bf16", "y_ptr": "*bf16", "dx_ptr": "*bf16", "N": "i32"}


def _shared(types: dict[str, str], first: str, without: str = "") -> dict[str, str]:
    """Return the types of a kernel for rows that several programs share."""
    kept = {name: kind for name, kind in types.items() if name != without}
    return {**kept, "sums_ptr": "*fp32", f"{first}_stride": "i32", "span": "i32"}


KERNELS = (
    *_compilations("*bf16", 4096),
    *_compilations("*bf16", 4096, eviction="evict_last"),
    *_compilations("*bf16", 4096, log=True),
    *_compilations("*bf16", 768),
    *_compilations("*fp32", 16000),
    *_compilations("*fp16", 1000),
    Compilation(_KERNELS["fwd_wide"], {**_FORWARD, "x_stride": "i32"}, _WIDE, WIDE.num_warps),
    Compilation(_KERNELS["bwd_wide"], {**_BACKWARD, "dy_stride": "i32"}, _WIDE, WIDE.num_warps),
    Compilation(_KERNELS["fwd_part"], _shared(_FORWARD, "x", "y_ptr"), {"BLOCK_N": WIDE.block_n}, WIDE.num_warps),
    Compilation(_KERNELS["fwd_join"], _shared(_FORWARD, "x"), {**_WIDE, "PARTS": 128}, WIDE.num_warps),
    Compilation(_KERNELS["bwd_part"], _shared(_BACKWARD, "dy", "dx_ptr"), _WIDE, WIDE.num_warps),
    Compilation(_KERNELS["bwd_join"], _shared(_BACKWARD, "dy"), {**_WIDE, "PARTS": 128}, WIDE.num_warps),
    Compilation(_KERNELS["fwd_inner"], {**_FORWARD, "inner": "i32"}, _INNER, inner_plan(64).num_warps),
    Compilation(_KERNELS["bwd_inner"], {**_BACKWARD, "inner": "i32"}, _INNER, inner_plan(64).num_warps),
)
