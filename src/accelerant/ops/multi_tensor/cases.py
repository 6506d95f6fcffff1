"""Samples, benchmarks, tolerances and compiled kernels of the multi-tensor updates."""

from __future__ import annotations

import torch

from accelerant.ops._cases import Benchmark, Compilation, Sample, tolerances
from accelerant.ops.multi_tensor.launch import KERNELS as _KERNELS
from accelerant.ops.multi_tensor.launch import PLANS, SMALL

__all__ = ["BENCHMARKS", "GPT2_SHAPES", "KERNELS", "KIND", "LARGE", "SAMPLES", "TOLERANCES"]

KIND = "mutating"

_BLOCK = (
    (768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,),
)  # fmt: skip
GPT2_SHAPES: tuple[tuple[int, ...], ...] = ((50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,))
"""GPT-2 124M: 148 tensors, 124,439,808 parameters."""

SAMPLES = (
    Sample("one", ((1,),)),
    Sample("empty", ((0,), (3, 0), (5,))),
    Sample("odd", ((3, 5), (7,), (), (129,), (33, 31), (1, 1, 3))),
    Sample("many", tuple((1 + i % 23,) for i in range(80))),
)
LARGE = (Sample("gpt2-124m", GPT2_SHAPES), Sample("odd-large", ((1_000_003,), (4099, 4095), (17,))))
BENCHMARKS = (Benchmark(Sample("gpt2-124m", GPT2_SHAPES), torch.float32, 0.9),)

# One rounding of the parameter per step; in low precision the interpreter truncates where hardware rounds. The absolute
# part is for moments and updates near 0.
TOLERANCES = tolerances(float64=(1e-12, 1e-14), float32=(2e-6, 2e-7), float16=(2e-3, 1e-5), bfloat16=(1.6e-2, 1e-5))


def _sizes(name: str) -> tuple[dict[str, int | bool], int]:
    plan = PLANS[name]
    return {"CHUNK": plan.chunk, "BLOCK": plan.block, "ALIGNED": True}, plan.num_warps


def _over_gradients(name: str, kind: str) -> Compilation:
    fixed, num_warps = _sizes(name)
    last = {"partial_ptr": "*fp32", "first": "i32"} if name == "norm" else {"scale_ptr": "*fp32"}
    types = {"map_ptr": "*i64", "table_ptr": "*i64", **last}
    return Compilation(_KERNELS[name], types, {"GRAD": kind, **fixed}, num_warps)


def _update(name: str, param: str, grad: str, state: str, **flags: bool) -> Compilation:
    fixed, num_warps = _sizes(name)
    types = {"map_ptr": "*i64", "table_ptr": "*i64", "coefficient_ptr": "*fp32"}
    constants = {"PARAM": param, "GRAD": grad, "STATE": state, **flags, **fixed}
    return Compilation(_KERNELS[name], types, constants, num_warps)


def _prepare(name: str) -> Compilation:
    types = {
        "table_ptr": "*i64", "group_ptr": "*i64", "coefficient_ptr": "*fp32", "tensors": "i32", "partial_ptr": "*fp32",
        "partials": "i32", "norm_ptr": "*fp32", "max_norm": "fp32",
    }  # fmt: skip
    absent = {"grad_scale_ptr": None, "found_inf_ptr": None}
    return Compilation(_KERNELS[f"{name}_prepare"], types, {**SMALL, "CLIP": True, **absent}, 16)


_TOTAL = {"partial_ptr": "*fp32", "partials": "i32", "out_ptr": "*fp32", "max_norm": "fp32"}
KERNELS = (
    _over_gradients("norm", "fp32"),
    _over_gradients("norm", "bf16"),
    _over_gradients("scale", "fp32"),
    _over_gradients("scale", "fp16"),
    Compilation(_KERNELS["total"], _TOTAL, {"BLOCK_P": SMALL["BLOCK_P"]}, 16),
    _prepare("adamw"),
    _prepare("sgd"),
    _update("adamw", "fp32", "fp32", "fp32", MASTER=False),
    _update("adamw", "bf16", "bf16", "fp32", MASTER=False),
    _update("adamw", "bf16", "bf16", "fp32", MASTER=True),
    _update("adamw", "fp16", "fp16", "fp16", MASTER=False),
    _update("sgd", "fp32", "fp32", "fp32", BUFFER=True, MASTER=False),
    _update("sgd", "fp32", "fp32", "fp32", BUFFER=False, MASTER=False),
    _update("sgd", "bf16", "bf16", "fp32", BUFFER=True, MASTER=True),
)
