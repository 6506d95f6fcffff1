"""Compiled kernels of the decoding steps."""

from __future__ import annotations

from typing import Any

from accelerant.ops._cases import Compilation
from accelerant.ops.decode.launch import KERNELS as _KERNELS
from accelerant.ops.decode.launch import WORDS_PLANS, DecodePlan, usual_plan

__all__ = ["KERNELS", "KIND"]

KIND = "mutating"


def _linear(
    plan: DecodePlan, kind: str = "*bf16", *, integers: bool = False, norm: bool = False, gated: bool = False,
    residual: bool = False, by_bits: bool = True,
) -> Compilation:  # fmt: skip
    types = {"x_ptr": kind, "weight_ptr": "*i8" if integers else kind, "y_ptr": kind, "N": "i32", "K": "i32"}
    types["eps"] = "fp32"
    constants: dict[str, Any] = {
        "GATED": gated, "BYTES": integers and by_bits, "SETS": plan.sets, "BLOCK_N": plan.block_n,
        "BLOCK_K": plan.block_k, "UNROLL": plan.unroll,
    }  # fmt: skip
    pointers = ("norm_ptr", kind, norm), ("scale_ptr", "*fp32", integers), ("residual_ptr", kind, residual)
    types |= {name: pointer for name, pointer, present in pointers if present}
    constants |= {name: None for name, _, present in pointers if not present}
    return Compilation(_KERNELS["linear"], types, constants, plan.num_warps)


def _words(plan: DecodePlan, *, gated: bool = False, residual: bool = False, by_bits: bool = True) -> Compilation:
    types = {"planes_ptr": "*i32", "units_ptr": "*fp32", "weight_ptr": "*i32", "scale_ptr": "*fp32", "y_ptr": "*bf16"}
    types |= {"N": "i32", "W": "i32"}
    constants: dict[str, Any] = {
        "GATED": gated, "BYTES": by_bits, "SETS": plan.sets, "BLOCK_N": plan.block_n, "BLOCK_W": plan.block_k // 4,
        "UNROLL": plan.unroll,
    }  # fmt: skip
    if residual:
        types["residual_ptr"] = "*bf16"
    else:
        constants["residual_ptr"] = None
    return Compilation(_KERNELS["words"], types, constants, plan.num_warps)


def _planes(block: int, *, norm: bool) -> Compilation:
    types = {"x_ptr": "*bf16", "planes_ptr": "*i8", "units_ptr": "*fp32", "K": "i32", "eps": "fp32"}
    constants: dict[str, Any] = {"BLOCK": block}
    if norm:
        types["norm_ptr"] = "*bf16"
    else:
        constants["norm_ptr"] = None
    return Compilation(_KERNELS["planes"], types, constants, min(32, block // 256))


def _rope(kind: str, *, turned: bool = True) -> Compilation:
    types = {"positions_ptr": "*i32", **dict.fromkeys(("qkv_ptr", "q_ptr", "k_cache_ptr", "v_cache_ptr"), kind)}
    types |= dict.fromkeys(("heads", "kv_heads", "T", "HALF"), "i32")
    tables = ("cos_ptr", "sin_ptr")
    constants: dict[str, Any] = {"HEADS": 4, "BLOCK": 64}
    if turned:
        types |= dict.fromkeys(tables, "*fp32")
    else:
        constants |= dict.fromkeys(tables)
    return Compilation(_KERNELS["rope"], types, constants, 1)


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
