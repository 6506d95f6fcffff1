"""Compiled kernels and test shapes of linear_fp8."""

from __future__ import annotations

from accelerant.ops._launch import quantizing_plan, row_constants
from accelerant.ops.linear_fp8 import KERNELS as _KERNELS
from accelerant.ops.linear_fp8 import dgelu_plan, gelu_plan
from accelerant.ops.registry import Compilation, specialized

KIND = "mutating"  # no public function

MATRICES = ((0, 16), (1, 1), (3, 7), (16, 128), (129, 130), (5, 768), (40, 48), (2, 3072))
"""Rows and columns of activations."""

WEIGHTS = ((16, 16), (48, 32), (96, 160), (32, 2304))  # rows and columns of weights: multiples of 16


def _rows(kind: str, N: int, *, factor: bool) -> Compilation:
    plan = quantizing_plan(N)
    types = {"x_ptr": kind, "q_ptr": "*u8", "scale_ptr": "*fp32", "factor_ptr": "*fp32" if factor else None}
    return specialized(_KERNELS["rows"], types, row_constants(plan, N), plan.num_warps)


def _gelu(N: int) -> Compilation:
    plan = gelu_plan(N)
    types = {"z_ptr": "*bf16", "q_ptr": "*u8", "scale_ptr": "*fp32"}
    return Compilation(_KERNELS["gelu"], types, row_constants(plan, N), plan.num_warps)


def _dgelu(N: int) -> Compilation:
    plan = dgelu_plan(N)
    types = {"*": "*bf16", "q_ptr": "*u8", **dict.fromkeys(("factor_ptr", "scale_ptr", "partial_ptr"), "*fp32")}
    return Compilation(_KERNELS["dgelu"], types, {**row_constants(plan, N), "STAGES": plan.stages}, plan.num_warps)


KERNELS = (
    _rows("*bf16", 768, factor=False),
    _rows("*bf16", 2304, factor=True),
    _rows("*bf16", 4096, factor=True),
    _rows("*fp32", 16384, factor=False),
    _gelu(3072),
    _gelu(4096),
    _dgelu(3072),
    _dgelu(8192),
)
