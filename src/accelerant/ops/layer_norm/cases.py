"""What layer_norm is tested and measured on."""

from __future__ import annotations

import torch

from accelerant.ops._cases import Benchmark, Compilation, Sample, Tolerance
from accelerant.ops.layer_norm.launch import (
    COLUMNS,
    WIDE,
    backward_constants,
    backward_plan,
    forward_constants,
    forward_plan,
    reduce_plan,
)
from accelerant.ops.layer_norm.launch import KERNELS as _KERNELS

__all__ = ["BENCHMARKS", "KERNELS", "LARGE", "SAMPLES", "TOLERANCES", "TORCH_TOLERANCES"]


def _sample(*shape: int, weight: bool = True, bias: bool = True) -> Sample:
    absent = "" if weight and bias else "-no-bias" if weight else "-no-weight" if bias else "-plain"
    vector = shape[-1:]
    name = "x".join(map(str, shape)) + absent
    return Sample(name, (shape, vector if weight else None, vector if bias else None))


SAMPLES = (
    _sample(1, 1),
    _sample(7),
    _sample(3, 5),
    _sample(2, 3, 129),
    _sample(67, 16),
    _sample(9, 768),
    _sample(5, 1000, bias=False),
    _sample(4, 96, weight=False),
    _sample(4, 96, weight=False, bias=False),
    _sample(5, 4096),
    _sample(17, 8200),  # forward in registers, backward not
    _sample(0, 8),
    _sample(2, 0, 8),
    _sample(3, 0),
)
LARGE = (
    _sample(4099, 4096),
    _sample(65536, 768),
    _sample(1000, 8191),
    _sample(257, 50257),
    _sample(3, 1_000_003),
    _sample(1_000_003, 7),
)
BENCHMARKS = (
    Benchmark(_sample(16384, 4096), torch.bfloat16, 0.068, 0.112),
    Benchmark(_sample(65536, 768), torch.bfloat16, 0.050, 0.085),
)

# One rounding of a result of magnitude about 1 (the interpreter cuts bfloat16 instead of rounding it), and float32 sums
# over as many terms as the cases have, relative to the largest element of the result.
TOLERANCES = {
    torch.float64: Tolerance(1e-12, 1e-12),
    torch.float32: Tolerance(2e-6, 4e-6),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(8e-3, 8e-3),
}
# torch subtracts mean * rstd from x * rstd on a CPU. Where a row is constant, as one of one element is, rstd is
# 1 / sqrt(eps) = 316, and what the two round to does not cancel.
TORCH_TOLERANCES = {**TOLERANCES, torch.float32: Tolerance(2e-6, 1e-5)}

_VECTORS = {"weight_ptr": "*fp32", "bias_ptr": "*fp32"}
_STATISTICS = {"mean_ptr": "*fp32", "rstd_ptr": "*fp32"}
_SUMS = {"dweight_ptr": "*fp32", "dbias_ptr": "*fp32"}
_SIZES = {"M": "i32", "N": "i32"}


def _compilations(kind: str, N: int) -> tuple[Compilation, ...]:
    forward, backward = forward_plan(N), backward_plan(N)
    rows = {"x_ptr": kind, "y_ptr": kind, "x_stride": "i32"}
    gradients = {"dy_ptr": kind, "x_ptr": kind, "dx_ptr": kind, "dy_stride": "i32", "x_stride": "i32"}
    return (
        Compilation(
            _KERNELS["fwd"],
            {**rows, **_VECTORS, **_STATISTICS, **_SIZES, "eps": "fp32"},
            forward_constants(forward, N),
            forward.num_warps,
        ),
        Compilation(
            _KERNELS["bwd"],
            {**gradients, **_STATISTICS, **_SUMS, **_SIZES, "weight_ptr": "*fp32"},
            backward_constants(backward, N),
            backward.num_warps,
        ),
    )


KERNELS = (
    *_compilations("*bf16", 768),
    *_compilations("*bf16", 4096),
    *_compilations("*fp32", 8192),
    Compilation(
        _KERNELS["fwd"],
        {"x_ptr": "*fp16", "y_ptr": "*fp16", "x_stride": "i32", **_STATISTICS, **_SIZES, "eps": "fp32"},
        {"weight_ptr": None, "bias_ptr": None, **forward_constants(forward_plan(16000), 16000)},
        forward_plan(16000).num_warps,
    ),
    Compilation(
        _KERNELS["bwd_reduce"],
        {"dweight_parts_ptr": "*fp32", "dbias_parts_ptr": "*fp32", **_SUMS, "P": "i32", "N": "i32"},
        {"BLOCK_P": reduce_plan(4096).rows, "BLOCK_N": reduce_plan(4096).block_n},
        reduce_plan(4096).num_warps,
    ),
    Compilation(
        _KERNELS["fwd_wide"],
        {"x_ptr": "*bf16", **_VECTORS, "y_ptr": "*bf16", **_STATISTICS, "N": "i32", "x_stride": "i32", "eps": "fp32"},
        {"BLOCK_N": WIDE.block_n},
        WIDE.num_warps,
    ),
    Compilation(
        _KERNELS["bwd_wide"],
        {
            "dy_ptr": "*bf16",
            "x_ptr": "*bf16",
            "weight_ptr": "*fp32",
            **_STATISTICS,
            "dx_ptr": "*bf16",
            "N": "i32",
            "dy_stride": "i32",
            "x_stride": "i32",
        },
        {"BLOCK_N": WIDE.block_n},
        WIDE.num_warps,
    ),
    Compilation(
        _KERNELS["bwd_columns"],
        {
            "dy_ptr": "*bf16",
            "x_ptr": "*bf16",
            **_STATISTICS,
            **_SUMS,
            **_SIZES,
            "dy_stride": "i32",
            "x_stride": "i32",
        },
        {"ROWS": COLUMNS.rows, "BLOCK_N": COLUMNS.block_n},
        COLUMNS.num_warps,
    ),
)
