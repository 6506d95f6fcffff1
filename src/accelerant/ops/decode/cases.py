"""Compiled kernels of the decoding steps."""

from __future__ import annotations

from accelerant.ops._cases import Compilation, specialized
from accelerant.ops.decode.op import KERNELS as _KERNELS
from accelerant.ops.decode.op import WORDS_PLANS, DecodePlan, usual_plan

KIND = "mutating"


def _linear(
    plan: DecodePlan, kind: str = "*bf16", *, integers: bool = False, norm: bool = False, gated: bool = False,
    residual: bool = False, by_bits: bool = True,
) -> Compilation:  # fmt: skip
    types = {
        "*": kind, "weight_ptr": "*i8" if integers else kind, "scale_ptr": "*fp32" if integers else None, "eps": "fp32",
        "norm_ptr": kind if norm else None, "residual_ptr": kind if residual else None,
    }  # fmt: skip
    return specialized(_KERNELS["linear"], types, plan.constants(gated, integers and by_bits), plan.num_warps)


def _words(plan: DecodePlan, *, gated: bool = False, residual: bool = False, by_bits: bool = True) -> Compilation:
    types = {"*": "*fp32", "planes_ptr": "*i32", "weight_ptr": "*i32", "y_ptr": "*bf16"}
    optional = {"residual_ptr": "*bf16" if residual else None}
    return specialized(_KERNELS["words"], {**types, **optional}, plan.constants(gated, by_bits), plan.num_warps)


def _planes(block: int, *, norm: bool) -> Compilation:
    types = {"*": "*bf16", "planes_ptr": "*i8", "units_ptr": "*fp32", "eps": "fp32"}
    optional = {"norm_ptr": "*bf16" if norm else None}
    return specialized(_KERNELS["planes"], {**types, **optional}, {"BLOCK": block}, min(32, block // 256))


def _rope(kind: str, *, turned: bool = True) -> Compilation:
    tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32" if turned else None)
    types = {"*": kind, "positions_ptr": "*i32", **tables}
    return specialized(_KERNELS["rope"], types, {"HEADS": 4, "BLOCK": 64}, 1)


_GATED = usual_plan(14336, 4096, 2, True)
KERNELS = (
    # The first is compiled for every target, AMD's included.
    _linear(usual_plan(4096, 4096, 1, False), integers=True, norm=True, by_bits=False),
    _linear(usual_plan(6144, 4096, 2, False), norm=True),
    _linear(usual_plan(4096, 4096, 2, False), residual=True),
    _linear(_GATED, norm=True, gated=True),
    _linear(usual_plan(4096, 14336, 1, False), integers=True, residual=True),
    _linear(usual_plan(14336, 4096, 1, True), integers=True, norm=True, gated=True),
    _linear(usual_plan(4096, 4096, 2, False), "*fp16", norm=True),
    _linear(usual_plan(4096, 4096, 4, False), "*fp32", norm=True),
    _words(WORDS_PLANS[0], gated=True, by_bits=False),
    _words(WORDS_PLANS[0], gated=True),
    _words(WORDS_PLANS[0], residual=True),
    _planes(4096, norm=True),
    _planes(16384, norm=False),
    _rope("*bf16"),
    _rope("*fp32"),
    _rope("*fp16", turned=False),
)
