"""Samples, benchmarks, tolerances and compiled kernels of attention_decode."""

from __future__ import annotations

import torch

from accelerant.ops._cases import Benchmark, Compilation, Sample, Stated, specialized, tolerances
from accelerant.ops.attention_decode.op import KERNELS as _KERNELS
from accelerant.ops.attention_decode.op import MAX_SPLITS, NUM_WARPS, constants, stages_for

KIND = "plain"


def _sample(Hq: int, Hkv: int, Sq: int, T: int, D: int, lengths: tuple[int, ...]) -> Sample:
    B = len(lengths)
    words = "+".join(map(str, lengths[:4])) or "none"
    caches = (B, Hkv, T, D)
    return Sample(f"{Hq}on{Hkv}x{Sq}x{D}-{words}of{T}", ((B, Hq, Sq, D), caches, caches, Stated(lengths)), {})


SAMPLES = (
    _sample(1, 1, 1, 1, 1, (1,)), _sample(2, 1, 1, 9, 8, (9, 4)), _sample(4, 2, 3, 70, 16, (70, 2, 33)),
    _sample(6, 2, 1, 200, 24, (187,)), _sample(2, 2, 1, 33, 64, (0, 33)), _sample(40, 1, 2, 40, 8, (40,)),
    _sample(2, 2, 1, 0, 8, (0,)), _sample(2, 2, 1, 8, 8, ()),
)  # fmt: skip
LARGE = (
    _sample(32, 8, 1, 4097, 128, (4097, 1, 1000)), _sample(8, 8, 4, 3000, 64, (2999, 5)),
    _sample(71, 1, 1, 5000, 80, (4999,)), _sample(4, 4, 2, 700, 256, (700,)),
)  # fmt: skip
# Caches of 512 MiB at 85% of the copy rate, as linear_int8 reads its weights.
BENCHMARKS = (Benchmark(_sample(32, 8, 1, 16384, 128, (16384,) * 8), torch.bfloat16, 0.147),)

TOLERANCES = tolerances(float64=(1e-11, 1e-12), float32=(2e-5, 5e-6), float16=(4e-3, 3e-3), bfloat16=(2e-2, 1e-2))


def compilation(
    kind: str, width: int, capability: tuple[int, int], rows: int = 4, *, split: bool = True
) -> Compilation:
    """Return the specialization of fwd that a device of this compute capability launches."""
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[kind]
    types = {"*": kind, "lengths_ptr": "*i32", "scale": "fp32", "o_ptr": "*fp32" if split else kind}
    optional = {"lse_ptr": "*fp32" if split else None}
    fixed = constants(rows, width, dtype, capability)
    return specialized(_KERNELS["fwd"], {**types, **optional}, fixed, NUM_WARPS, stages_for(capability))


KERNELS = (
    compilation("*fp16", 64, (7, 5)),
    compilation("*bf16", 128, (9, 0)),
    compilation("*bf16", 64, (9, 0), split=False),
    compilation("*bf16", 256, (9, 0), rows=40),
    compilation("*fp32", 128, (9, 0)),
    *(
        Compilation(
            _KERNELS["combine"], {"*": "*fp32", "o_ptr": "*bf16"}, {"BLOCK_S": splits, "BLOCK_D": width}, NUM_WARPS
        )
        for splits, width in ((16, 128), (MAX_SPLITS, 256))
    ),
)
