"""The cases of the elementwise ops' tests and benchmarks."""

from __future__ import annotations

import math

import torch

from accelerant.ops.elementwise import KERNELS as _KERNELS
from accelerant.ops.elementwise import ROW_WARPS, STREAM_KERNELS, row_tile, sum_plan
from accelerant.ops.registry import Benchmark, Compilation, OpCases, SampleInput, size_name, tolerances

_SHAPES = ((1,), (7,), (3, 5), (), (0,), (4, 0, 2), (2, 3, 129), (33, 257))


def _sample(*shapes: tuple[int, ...]) -> SampleInput:
    return SampleInput("+".join(map(size_name, shapes)), shapes)


# Rounding of the result, one unit in the last place (the interpreter cuts bfloat16 instead of rounding it); in float32
# exp is good to a few units. Gradients start from the rounded y, at most 1, and dy is at most about 4.
_TOLERANCES = tolerances(float64=(1e-13, 1e-13), float32=(2e-6, 1e-6), float16=(2e-3, 4e-3), bfloat16=(1.6e-2, 4e-2))
# Sums over rows of normal numbers, which may cancel.
_PAIR_TOLERANCES = tolerances(float64=(1e-13, 1e-13), float32=(2e-6, 2e-6), float16=(1e-3, 1e-3), bfloat16=(8e-3, 8e-3))

_UNARY = OpCases(
    SAMPLES=tuple(_sample(shape) for shape in _SHAPES),
    LARGE=(_sample((4097, 4095)), _sample((16384, 3072))),
    BENCHMARKS=(Benchmark(_sample((16384, 4096)), torch.bfloat16, 0.068, 0.098),),
    TOLERANCES=_TOLERANCES,
)
_PAIR_SHAPES = (
    ((1,), (1,)), ((3, 5), (5,)), ((3, 5), (3, 5)), ((7,), (7,)), ((), ()), ((0,), (0,)), ((4, 0, 2), (4, 0, 2)),
    ((0, 3), (3,)), ((2, 3, 129), (2, 3, 129)), ((2, 3, 129), (3, 129)), ((2, 3, 130), (1, 1, 130)), ((300, 3), (3,)),
    ((257,), (33, 257)), ((33, 257), (33, 257)),
)  # fmt: skip
_PAIR = OpCases(
    SAMPLES=tuple(_sample(a, b) for a, b in _PAIR_SHAPES),
    LARGE=(
        _sample((4097, 4095), (4097, 4095)),
        _sample((4097, 4095), (4095,)),
        _sample((1_000_003, 3), (3,)),
        _sample((3, 1_000_003), (1_000_003,)),
    ),
    BENCHMARKS=(
        Benchmark(_sample((16384, 4096), (4096,)), torch.bfloat16),
        Benchmark(_sample((16384, 4096), (16384, 4096)), torch.bfloat16),
    ),
    TOLERANCES=_PAIR_TOLERANCES,
)
FAMILY = {"add": _PAIR, "mul": _PAIR, **dict.fromkeys(("relu", "sigmoid", "silu", "tanh"), _UNARY)}


def _compilations(kind: str, N: int) -> tuple[Compilation, ...]:
    """Return each kernel for a dtype and a row length; both eviction policies are compiled for bfloat16."""
    rows, columns = row_tile(N)
    summing = sum_plan(N)
    found = []
    for name, kernel in _KERNELS.items():
        types = {"*": kind}
        if name.endswith("_row_fwd"):
            fixed = {"ROWS": rows, "BLOCK_N": columns}
            found.append(Compilation(kernel, types, fixed, ROW_WARPS, multiple=math.gcd(N, 16)))
        elif name.endswith("_row_bwd"):
            types["db_ptr"] = "*fp32"
            fixed = summing.constants()
            found.append(Compilation(kernel, types, fixed, summing.num_warps, multiple=math.gcd(N, 16)))
        else:
            usual = STREAM_KERNELS[name].usual
            policies = [{}] if name == "mul_bwd" else [{"EVICTION": ""}, {"EVICTION": "evict_last"}]
            for policy in policies if kind == "*bf16" else policies[:1]:
                found.append(Compilation(kernel, types, {"BLOCK": usual.block, **policy}, usual.num_warps))
    return tuple(found)


_WITHOUT_DA = Compilation(
    _KERNELS["mul_row_bwd"],
    {"*": "*bf16", "db_ptr": "*fp32"},
    {**sum_plan(4096).constants(), "da_ptr": None},
    sum_plan(4096).num_warps,
)
KERNELS = (*_compilations("*bf16", 4096), *_compilations("*fp32", 768), *_compilations("*fp16", 1000), _WITHOUT_DA)
