"""The cases of the norms' tests and benchmarks."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from accelerant.ops import norm
from accelerant.ops.norm import KERNELS as _KERNELS
from accelerant.ops.registry import Benchmark, Compilation, OpCases, SampleInput, Tolerance, size_name, tolerances

# One rounding of a result of magnitude about 1 (the interpreter cuts bfloat16 instead of rounding it), and float32 sums
# over as many terms as the cases have, relative to the largest element of the result.
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(2e-6, 4e-6), float16=(1e-3, 1e-3), bfloat16=(8e-3, 8e-3))
# torch subtracts mean * rstd from x * rstd on a CPU. Where a row is constant, as one of one element is, rstd is
# 1 / sqrt(eps) = 316, and what the two round to does not cancel (rms_norm's backward pass takes the same way).
TORCH_TOLERANCES = {**TOLERANCES, torch.float32: Tolerance(2e-6, 1e-5)}
# With a residual: y and the gradients start from the rounded s.
ADD_TOLERANCES = {**TOLERANCES, torch.float16: Tolerance(2e-3, 2e-3), torch.bfloat16: Tolerance(1.6e-2, 1.6e-2)}
# The sum of two is larger than x, and so is what does not cancel in its row of one element.
ADD_TORCH_TOLERANCES = {**ADD_TOLERANCES, torch.float32: Tolerance(2e-6, 4e-5)}


def _family(bias: bool, residual: bool, times: Sequence[tuple[float | None, float | None]]) -> OpCases:
    words = ("weight", "bias") if bias else ("weight",)

    def sample(*shape: int, absent: Sequence[str] = ()) -> SampleInput:
        vectors = [None if word in absent else shape[-1:] for word in words]
        name = "-no-".join((size_name(shape), *absent))
        return SampleInput(name, (shape, *((shape,) if residual else ()), *vectors))

    wide = ((4099, 4096), (65536, 768), (1000, 8191), (257, 50257), (3, 1_000_003), (1_000_003, 7))
    few = (("bias",), ("weight",), words) if bias else (words,)
    return OpCases(
        SAMPLES=(
            *(sample(*shape) for shape in ((1, 1), (7,), (3, 5), (2, 3, 129), (67, 16), (9, 768))),
            *(sample(4, 96, absent=absent) for absent in few),
            sample(3, 4096),
            sample(3, 8200),  # forward in registers, backward not
            *(sample(*shape) for shape in ((0, 8), (2, 0, 8), (3, 0))),
        ),
        LARGE=tuple(sample(*shape) for shape in wide),
        BENCHMARKS=tuple(
            Benchmark(sample(*shape), torch.bfloat16, *goal)
            for shape, goal in zip(((16384, 4096), (65536, 768)), times, strict=True)
        ),
        TOLERANCES=ADD_TOLERANCES if residual else TOLERANCES,
        TORCH_TOLERANCES=ADD_TORCH_TOLERANCES if residual else TORCH_TOLERANCES,
    )


FAMILY = {
    "layer_norm": _family(True, False, ((0.068, 0.112), (0.050, 0.085))),
    "rms_norm": _family(False, False, ((None, None), (None, 0.085))),
    "add_layer_norm": _family(True, True, ((None, None), (None, None))),
    "add_rms_norm": _family(False, True, ((None, None), (None, None))),
}

_FLOATS = {**dict.fromkeys(("weight_ptr", "bias_ptr", "statistics_ptr", "parts_ptr"), "*fp32"), "eps": "fp32"}


def _forward(
    kind: str, N: int, *, centre: bool, residual: bool = False, vectors: bool = True, eviction: str = ""
) -> Compilation:
    plan = norm.forward_plan(N, centre, residual)
    absent = [] if residual else ["residual_ptr", "s_ptr"]
    absent += ([] if centre else ["bias_ptr"]) if vectors else ["weight_ptr", "bias_ptr"]
    constants = {**dict.fromkeys(absent), **norm.forward_constants(plan, N, centre, eviction)}
    return Compilation(_KERNELS["fwd"], {"*": kind, **_FLOATS}, constants, plan.num_warps, multiple=math.gcd(N, 16))


def _backward(
    kind: str, N: int, *, centre: bool, residual: bool = False, dxsum: bool = False, apart: bool = False
) -> Compilation:
    plan = norm.backward_plan(N, residual, centre)
    absent = {} if residual else {"ds_ptr": None}
    constants = {**absent, **norm.backward_constants(plan, N, centre, True, centre, dxsum, apart)}
    return Compilation(_KERNELS["bwd"], {"*": kind, **_FLOATS}, constants, plan.num_warps, multiple=math.gcd(N, 16))


_WIDE = {"CENTRE": True, "BLOCK_N": norm.WIDE.block_n}
_BF16 = {"*": "*bf16", **_FLOATS}
KERNELS = (
    *(_forward("*bf16", N, centre=centre) for N in (768, 4096) for centre in (True, False)),
    *(_forward("*bf16", N, centre=centre, residual=True) for N, centre in ((768, True), (4096, False))),
    *(_forward("*bf16", N, centre=True, eviction="evict_last") for N in (768, 4096)),
    _forward("*fp32", 8192, centre=True),
    _forward("*fp16", 16000, centre=True, vectors=False),
    _forward("*fp16", 1000, centre=True),
    _forward("*bf16", 520, centre=False, residual=True),
    *(_backward("*bf16", N, centre=centre) for N in (768, 4096) for centre in (True, False)),
    *(_backward("*bf16", N, centre=centre, residual=True) for N, centre in ((768, True), (4096, False))),
    _backward("*bf16", 768, centre=True, residual=True, dxsum=True),
    _backward("*bf16", 768, centre=True, residual=True, dxsum=True, apart=True),
    _backward("*fp32", 4096, centre=True, residual=True),
    _backward("*fp32", 8192, centre=True),
    _backward("*fp16", 1000, centre=True),
    _backward("*bf16", 520, centre=False, residual=True),
    Compilation(
        _KERNELS["bwd_reduce"],
        {"*": "*fp32"},
        {"BLOCK_P": norm.reduce_plan(4096).rows, "BLOCK_N": norm.reduce_plan(4096).block_n},
        norm.reduce_plan(4096).num_warps,
    ),
    Compilation(_KERNELS["fwd_wide"], _BF16, _WIDE, norm.WIDE.num_warps),
    Compilation(_KERNELS["bwd_wide"], _BF16, _WIDE, norm.WIDE.num_warps),
    Compilation(
        _KERNELS["bwd_columns"],
        _BF16,
        {"CENTRE": True, "DWEIGHT": True, "DBIAS": True, "ROWS": norm.COLUMNS.rows, "BLOCK_N": norm.COLUMNS.block_n},
        norm.COLUMNS.num_warps,
    ),
)
