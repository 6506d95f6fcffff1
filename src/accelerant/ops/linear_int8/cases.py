"""What linear_int8 is tested and measured on."""

from __future__ import annotations

import torch

from accelerant.ops._cases import Benchmark, Compilation, Indices, Sample, Tolerance
from accelerant.ops.linear_int8.launch import (
    DYNAMIC_PLANS,
    FEW_BACKWARD_PLANS,
    FEW_PLANS,
    MATMUL_PLANS,
    SMALL_PLANS,
    STRIP_PLANS,
    StripPlan,
    TilePlan,
)
from accelerant.ops.linear_int8.launch import KERNELS as _KERNELS

__all__ = ["BENCHMARKS", "KERNELS", "LARGE", "SAMPLES", "TOLERANCES"]


def _sample(*shape: int, bias: bool = True, dynamic: bool = False) -> Sample:
    """Of (..., K, N). The derivatives of a dynamic call are not those of its steps: it is tested apart."""
    *rows, K, N = shape
    name = "x".join(map(str, shape)) + ("" if bias else "-no bias") + ("-dynamic" if dynamic else "")
    weight = Indices((N, K), 128, -127, torch.int8)
    return Sample(name, ((*rows, K), weight, (N,), (N,) if bias else None), {"dynamic": dynamic})


SAMPLES = (
    _sample(3, 4, 5),
    _sample(1, 1, 1),
    _sample(2, 3, 6, bias=False),
    _sample(1, 37, 9),
    _sample(0, 4, 5),
    _sample(3, 0, 4),
    _sample(4, 3, 0),
    _sample(5, 6),
    _sample(2, 3, 4, 5, bias=False),
    _sample(1, 64, 48),
    _sample(33, 20, 18),
    _sample(40, 64, 48),
    _sample(70, 16, 90, bias=False),
)
LARGE = (
    _sample(1, 8192, 8192),
    _sample(1, 4096, 14336, bias=False),
    _sample(1, 14336, 4096),
    _sample(1, 4112, 1001),
    _sample(16, 4096, 4096),
    _sample(5, 1040, 999),
    _sample(100, 2048, 1111),
    _sample(600, 512, 768),
    _sample(17, 1111, 999),
)
# Few rows are what decoding has: one layer's product after another's.
BENCHMARKS = (
    Benchmark(_sample(1, 8192, 8192, bias=False), torch.bfloat16, 0.0184, rotated=True),
    Benchmark(_sample(1, 4096, 14336, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(1, 14336, 4096, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(16, 8192, 8192, bias=False), torch.bfloat16, rotated=True),
    Benchmark(_sample(8192, 8192, 8192, bias=False, dynamic=True), torch.bfloat16),
)

# Relative to the largest element: float32 sums of products; the 16-bit dtypes round the result, in the backward pass dy
# times the scale before the sum, and a library the scaled weight.
TOLERANCES = {
    torch.float64: Tolerance(1e-11, 1e-12),
    torch.float32: Tolerance(1e-5, 1e-5),
    torch.float16: Tolerance(4e-3, 4e-3),
    torch.bfloat16: Tolerance(3e-2, 3e-2),
}

_SIZES = dict.fromkeys("MNK", "i32")


def _row(plan: StripPlan, kind: str = "*bf16", *, bias: bool = False) -> Compilation:
    types = {"x_ptr": kind, "weight_ptr": "*i8", "scale_ptr": "*fp32", "y_ptr": kind, "N": "i32", "K": "i32"}
    constants = plan.constants
    if bias:
        types["bias_ptr"] = kind
    return Compilation(_KERNELS["row"], types, constants if bias else {**constants, "bias_ptr": None}, plan.num_warps)


def _fwd(plan: TilePlan, kind: str = "*bf16", *, scaled: bool = True) -> Compilation:
    types = {"x_ptr": kind, "weight_ptr": "*i8", "y_ptr": kind if scaled else "*fp32", **_SIZES}
    constants: dict[str, int | bool | None] = {"EVEN_K": True, "UPCAST": False, **plan.blocks}
    if scaled:
        types |= {"scale_ptr": "*fp32", "bias_ptr": kind}
    else:
        constants |= {"scale_ptr": None, "bias_ptr": None}
    return Compilation(_KERNELS["fwd"], types, constants, plan.num_warps, plan.stages)


def _dynamic(plan: TilePlan, *, integers: bool = True) -> Compilation:
    types = {
        **dict.fromkeys(("q_ptr", "weight_ptr"), "*i8"),
        **dict.fromkeys(("x_scale_ptr", "scale_ptr"), "*fp32"),
        **dict.fromkeys(("bias_ptr", "y_ptr"), "*bf16"),
        **_SIZES,
    }
    constants = {"EVEN_K": True, "INTEGERS": integers, **plan.blocks}
    return Compilation(_KERNELS["dynamic"], types, constants, plan.num_warps, plan.stages)


def _bwd(plan: TilePlan) -> Compilation:
    types = {"dy_ptr": "*bf16", "weight_ptr": "*i8", "scale_ptr": "*fp32", "dx_ptr": "*bf16", **_SIZES, "part": "i32"}
    return Compilation(_KERNELS["bwd"], types, {"UPCAST": False, **plan.blocks}, plan.num_warps, plan.stages)


KERNELS = (
    *map(_row, STRIP_PLANS[:3]),
    _row(STRIP_PLANS[0], "*fp16", bias=True),
    _row(STRIP_PLANS[0], "*fp32"),
    _fwd(SMALL_PLANS["fwd"]),
    *map(_fwd, FEW_PLANS[:2]),
    *map(_fwd, MATMUL_PLANS[:2]),
    _fwd(MATMUL_PLANS[0], "*fp16"),
    _fwd(SMALL_PLANS["fwd"], scaled=False),
    _dynamic(SMALL_PLANS["dynamic"], integers=False),  # the first: the one that is compiled for every target
    *map(_dynamic, (SMALL_PLANS["dynamic"], *DYNAMIC_PLANS[:2])),
    _bwd(SMALL_PLANS["bwd"]),
    _bwd(FEW_BACKWARD_PLANS[0]),
    Compilation(
        _KERNELS["sum"],
        {"parts_ptr": "*fp32", "dx_ptr": "*bf16", "count": "i32", "n": "i32"},
        {"BLOCK": 256},
        2,
    ),
)
