"""Samples, benchmarks, tolerances and compiled kernels of embedding."""

from __future__ import annotations

import math

import torch

from accelerant.ops.embedding import AT_ONCE, CHUNK, FEW, constants, embedding_plan
from accelerant.ops.embedding import KERNELS as _KERNELS
from accelerant.ops.registry import Benchmark, Compilation, Indices, SampleInput, size_name, tolerances


def _sample(
    shape: tuple[int, ...], V: int, D: int, *, used: int | None = None, padding_idx: int | None = None
) -> SampleInput:
    """Return a sample with indices below `used`, default V; few distinct indices make long runs."""
    name = f"{size_name(shape)}-of-{V}x{D}"
    name += (f"-used{used}" if used else "") + ("" if padding_idx is None else f"-padding{padding_idx}")
    return SampleInput(name, (Indices(shape, used or V), (V, D)), {"padding_idx": padding_idx})


SAMPLES = (
    _sample((), 1, 1),
    _sample((1,), 5, 3),
    _sample((7,), 4, 3),
    _sample((2, 3), 5, 4),
    _sample((2, 5), 4, 3, used=3, padding_idx=3),  # not hit, since finite differences would change the padding row
    _sample((3, 4), 6, 2, used=5, padding_idx=-1),
    _sample((4, 33), 50, 64),
    _sample((3, 67), 9, 300, padding_idx=2),
    _sample((201,), 40, 5, used=3),
    _sample((130,), 6, 40, used=1),
    _sample((0,), 5, 3),
    _sample((3, 0), 5, 3),
    _sample((4,), 5, 0),
)
LARGE = (
    _sample((8, 4099), 50257, 768), _sample((4099,), 7, 4096), _sample((65537,), 1001, 129, used=2, padding_idx=0),
    _sample((3,), 1_000_003, 65),
)  # fmt: skip
BENCHMARKS = (
    Benchmark(_sample((32, 1024), 50257, 768), torch.bfloat16),
    Benchmark(_sample((8, 4096), 128256, 4096), torch.bfloat16),
)

# The forward pass rounds nothing; a gradient is a sum of normal numbers, rounded once (truncated by the interpreter).
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(2e-6, 4e-6), float16=(1e-3, 1e-3), bfloat16=(8e-3, 8e-3))


def _gathers(kind: str, index: str, D: int) -> tuple[Compilation, ...]:
    plan = embedding_plan(D)
    types = {"*": kind, "indices_ptr": index, "sums_ptr": "*fp32"}
    return tuple(
        Compilation(_KERNELS[name], types, constants(plan, D), plan.num_warps, multiple=math.gcd(D, 16))
        for name in ("fwd", "bwd_atomic")
    )


_TYPES = {"*": "*bf16", **dict.fromkeys(("sorted_ptr", "order_ptr", "indices_ptr"), "*i64"), "parts_ptr": "*fp32"}
_SORTED = {"CHUNK": CHUNK, "BLOCK_D": 256}
KERNELS = (
    *_gathers("*bf16", "*i64", 768),
    *_gathers("*fp32", "*i32", 1000),
    Compilation(_KERNELS["bwd"], _TYPES, _SORTED, 1),
    Compilation(_KERNELS["bwd_join"], _TYPES, {**_SORTED, "AT_ONCE": AT_ONCE}, 1),
    Compilation(_KERNELS["bwd_few"], _TYPES, {"FEW": FEW, "BLOCK_D": 256}, 4),
)
