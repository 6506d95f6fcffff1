"""Samples, benchmarks, tolerances and compiled kernels of the multi-tensor updates."""

from __future__ import annotations

import torch

from accelerant.ops.multi_tensor import KERNELS as _KERNELS
from accelerant.ops.multi_tensor import PLANS, SMALL
from accelerant.ops.registry import Benchmark, Compilation, SampleInput, tolerances

KIND = "mutating"

_BLOCK = (
    (768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,), (3072, 768), (3072,), (768, 3072), (768,),
)  # fmt: skip
GPT2_SHAPES: tuple[tuple[int, ...], ...] = ((50257, 768), (1024, 768), *_BLOCK * 12, (768,), (768,))
"""GPT-2 124M: 148 tensors, 124,439,808 parameters."""

SAMPLES = (
    SampleInput("one", ((1,),)),
    SampleInput("empty", ((0,), (3, 0), (5,))),
    SampleInput("odd", ((3, 5), (7,), (), (129,), (33, 31), (1, 1, 3))),
    SampleInput("many", tuple((1 + i % 23,) for i in range(80))),
)
LARGE = (SampleInput("gpt2-124m", GPT2_SHAPES), SampleInput("odd-large", ((1_000_003,), (4099, 4095), (17,))))
BENCHMARKS = (Benchmark(SampleInput("gpt2-124m", GPT2_SHAPES), torch.float32, 0.9),)

# One rounding of the parameter per step; in low precision the interpreter truncates where hardware rounds. The absolute
# part is for moments and updates near 0.
TOLERANCES = tolerances(float64=(1e-12, 1e-14), float32=(2e-6, 2e-7), float16=(2e-3, 1e-5), bfloat16=(1.6e-2, 1e-5))


_TYPES = {"*": "*fp32", "map_ptr": "*i64", "table_ptr": "*i64", "group_ptr": "*i64", "max_norm": "fp32"}


def _chunks(name: str, **constants: str | bool) -> Compilation:
    plan = PLANS[name]
    fixed = {**constants, "CHUNK": plan.chunk, "BLOCK": plan.block, "ALIGNED": True}
    return Compilation(_KERNELS[name], _TYPES, fixed, plan.num_warps)


def _update(name: str, param: str, grad: str, state: str, **flags: bool) -> Compilation:
    return _chunks(name, PARAM=param, GRAD=grad, STATE=state, **flags)


def _prepare(name: str, *, scaled: bool = False) -> Compilation:
    absent = dict.fromkeys(("grad_scale_ptr", "found_inf_ptr")[scaled:])
    return Compilation(_KERNELS[f"{name}_prepare"], _TYPES, {**SMALL, "CLIP": True, **absent}, 16)


KERNELS = (
    _chunks("norm", GRAD="fp32"),
    _chunks("norm", GRAD="bf16"),
    _chunks("scale", GRAD="fp32"),
    _chunks("scale", GRAD="fp16"),
    Compilation(_KERNELS["total"], _TYPES, {"BLOCK_P": SMALL["BLOCK_P"]}, 16),
    _prepare("adamw"),
    _prepare("adamw", scaled=True),
    _prepare("sgd"),
    _update("adamw", "fp32", "fp32", "fp32", MASTER=False),
    _update("adamw", "bf16", "bf16", "fp32", MASTER=False),
    _update("adamw", "bf16", "bf16", "fp32", MASTER=True),
    _update("adamw", "fp16", "fp16", "fp16", MASTER=False),
    _update("sgd", "fp32", "fp32", "fp32", BUFFER=True, MASTER=False),
    _update("sgd", "fp32", "fp32", "fp32", BUFFER=False, MASTER=False),
    _update("sgd", "bf16", "bf16", "fp32", BUFFER=True, MASTER=True),
)
