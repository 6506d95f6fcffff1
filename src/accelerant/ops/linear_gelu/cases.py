"""Samples, benchmarks, tolerances and compiled kernels of linear_gelu."""

from __future__ import annotations

import torch

from accelerant.ops.linear_gelu import BACKWARD, BIAS, HOPPER_PLANS, JOINS, SMALL_PLAN, GeluTile
from accelerant.ops.linear_gelu import KERNELS as _KERNELS
from accelerant.ops.registry import Benchmark, Compilation, SampleInput, specialized, tolerances

RUNS = ("torch",)  # the products of the backward pass


def _sample(*shape: int, approximate: str = "none", bias: bool = True) -> SampleInput:
    """Return the sample of x (..., K) and N outputs; shape is (..., K, N)."""
    *rows, K, N = shape
    name = "x".join(map(str, shape)) + ("" if bias else "-no bias") + ("-tanh" if approximate == "tanh" else "")
    return SampleInput(name, ((*rows, K), (N, K), (N,) if bias else None), {"approximate": approximate})


SAMPLES = (
    _sample(3, 4, 5), _sample(1, 1, 1), _sample(7, 3, 6, approximate="tanh"), _sample(0, 4, 5), _sample(3, 0, 4),
    _sample(4, 3, 0), _sample(5, 6, bias=False), _sample(2, 3, 4, 5, bias=False, approximate="tanh"),
    _sample(33, 20, 18), _sample(40, 64, 48, approximate="tanh"), _sample(150, 16, 130),
    _sample(300, 8, 20, bias=False),
)  # fmt: skip
LARGE = (
    _sample(1000, 768, 3072, approximate="tanh"), _sample(4099, 512, 1001), _sample(257, 1111, 999, approximate="tanh"),
    _sample(1, 4096, 4096), _sample(100_003, 64, 72, bias=False),
)  # fmt: skip
BENCHMARKS = (
    Benchmark(_sample(8192, 1024, 4096, approximate="tanh"), torch.bfloat16, 0.104),
    Benchmark(_sample(16384, 768, 3072, approximate="tanh"), torch.bfloat16, 0.122),
    Benchmark(_sample(16384, 768, 3072), torch.bfloat16),
)

# Relative to the largest element: float32 sums of products of normal numbers, one rounding each of the pre-activation
# and the result, and the error of the products of the backward pass.
TOLERANCES = tolerances(float64=(1e-11, 1e-12), float32=(1e-5, 1e-5), float16=(4e-3, 4e-3), bfloat16=(3e-2, 3e-2))


def _forward(plan: GeluTile, kind: str = "*bf16", *, tanh: bool = True, keep: bool = False) -> Compilation:
    types = {"*": kind, "z_ptr": kind if keep else None}
    kernel = _KERNELS["fwd_persistent" if plan.persistent else "fwd"]
    fixed = plan.constants(plan.block_k, tanh=tanh, upcast=False)
    return specialized(kernel, types, fixed, plan.num_warps, plan.stages)


def _backward(*, tanh: bool, kind: str = "*bf16", activation: bool = False) -> Compilation:
    types = {"*": kind, "partial_ptr": "*fp32", "a_ptr": kind if activation else None}
    return specialized(_KERNELS["bwd"], types, {"TANH": tanh, "BLOCK_M": BACKWARD[0], "BLOCK_N": BACKWARD[1]}, 4)


def _join(rows: int, columns: int, kind: str = "*fp32") -> Compilation:
    types = {"partial_ptr": "*fp32", "sums_ptr": kind}
    return Compilation(_KERNELS["join"], types, {"BLOCK_P": rows, "BLOCK_N": columns}, 4)


KERNELS = (
    _forward(SMALL_PLAN),
    _forward(GeluTile(128, 128, 32, 8, 3, persistent=True)),
    *(_forward(plan, keep=keep) for plan in HOPPER_PLANS for keep in (False, True)),
    _forward(HOPPER_PLANS[0], "*fp16", tanh=False, keep=True),
    _backward(tanh=True),
    _backward(tanh=False),
    _backward(tanh=True, activation=True),
    _backward(tanh=False, kind="*fp32", activation=True),
    _join(*BIAS, kind="*bf16"),
    *(_join(*block) for block in JOINS),
)
