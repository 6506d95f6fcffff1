"""Samples, benchmarks, tolerances and compiled kernels of attention_decode, and of the other steps of decoding."""

from __future__ import annotations

import itertools

import torch

from accelerant.ops.decode.op import KERNELS as _KERNELS
from accelerant.ops.decode.op import MAX_SPLITS, NUM_WARPS, constants, stages_for
from accelerant.ops.decode.paged import AHEAD, SPLIT, paged_constants, paged_stages
from accelerant.ops.decode.paged import KERNELS as _PAGED_KERNELS
from accelerant.ops.decode.steps import KERNELS as _STEPS
from accelerant.ops.decode.steps import WORDS_PLANS, DecodeTile, usual_plan
from accelerant.ops.linear_int8.op import TO_PLANES
from accelerant.ops.registry import (
    Benchmark,
    Compilation,
    Indices,
    OpCases,
    SampleInput,
    Stated,
    specialized,
    tolerances,
)

KIND = "plain"


def _sample(Hq: int, Hkv: int, Sq: int, T: int, D: int, lengths: tuple[int, ...]) -> SampleInput:
    B = len(lengths)
    words = "+".join(map(str, lengths[:4])) or "none"
    caches = (B, Hkv, T, D)
    return SampleInput(f"{Hq}on{Hkv}x{Sq}x{D}-{words}of{T}", ((B, Hq, Sq, D), caches, caches, Stated(lengths)), {})


_SAMPLES = (
    _sample(1, 1, 1, 1, 1, (1,)), _sample(2, 1, 1, 9, 8, (9, 4)), _sample(4, 2, 3, 70, 16, (70, 2, 33)),
    _sample(6, 2, 1, 200, 24, (187,)), _sample(2, 2, 1, 33, 64, (0, 33)), _sample(40, 1, 2, 40, 8, (40,)),
    _sample(2, 2, 1, 0, 8, (0,)), _sample(2, 2, 1, 8, 8, ()),
)  # fmt: skip
_LARGE = (
    _sample(32, 8, 1, 4097, 128, (4097, 1, 1000)), _sample(8, 8, 4, 3000, 64, (2999, 5)),
    _sample(71, 1, 1, 5000, 80, (4999,)), _sample(4, 4, 2, 700, 256, (700,)),
)  # fmt: skip
# Caches of 512 MiB at 85% of the copy rate, as linear_int8 reads its weights.
_BENCHMARKS = (Benchmark(_sample(32, 8, 1, 16384, 128, (16384,) * 8), torch.bfloat16, 0.147),)


def _paged(
    Hq: int, Hkv: int, D: int, block: int, lengths: tuple[int, ...], news: tuple[int, ...] | None = None,
    **options: object,
) -> SampleInput:  # fmt: skip
    rows, most = len(lengths), -(-max((*lengths, 0)) // block)
    blocks, table = (rows * most + 1, block, Hkv, D), Indices((rows, most), rows * most + 1, 0, torch.int32)
    starts = None if news is None else Stated(tuple(itertools.accumulate((0, *news))))
    tokens = rows if news is None else sum(news)
    words = "+".join(map(str, lengths[:4])) or "none"
    name = f"{Hq}on{Hkv}x{D}-{words} by {block}" + ("" if news is None else f"-{'+'.join(map(str, news))} new")
    arguments = ((tokens, Hq, D), blocks, blocks, table, Stated(lengths), starts)
    return SampleInput(" ".join([name, *map(str, options)]), arguments, options)


_PAGED = (
    _paged(1, 1, 1, 1, (1,)), _paged(4, 2, 16, 4, (9, 30, 1)), _paged(6, 2, 24, 16, (40, 17), (7, 17)),
    _paged(4, 1, 8, 16, (300, 2), (1, 2)), _paged(2, 2, 64, 16, (33, 0), window=7),
    _paged(3, 1, 8, 8, (20,), (9,), softcap=3.0), _paged(2, 2, 8, 4, ()),
)  # fmt: skip
_PAGED_LARGE = (
    _paged(32, 8, 128, 16, (4097, 1, 1000)), _paged(8, 8, 64, 32, (2999, 700), (1, 650)),
    _paged(71, 1, 80, 16, (4999,), window=1024), _paged(16, 2, 256, 64, (700, 90), (300, 90), softcap=20.0),
)  # fmt: skip
_PAGED_BENCHMARKS = (
    Benchmark(_paged(32, 8, 128, 16, (16384,) * 8), torch.bfloat16),
    Benchmark(_paged(32, 8, 128, 16, (1024,) * 64), torch.bfloat16),
    Benchmark(_paged(32, 8, 128, 16, (4096,) * 4, (512,) * 4), torch.bfloat16),
)

_TOLERANCES = tolerances(float64=(1e-11, 1e-12), float32=(2e-5, 5e-6), float16=(4e-3, 3e-3), bfloat16=(2e-2, 1e-2))
FAMILY = {
    "attention_decode": OpCases(_SAMPLES, _LARGE, _BENCHMARKS, _TOLERANCES),
    "attention_paged": OpCases(_PAGED, _PAGED_LARGE, _PAGED_BENCHMARKS, _TOLERANCES, ON_CPU="llvm"),
}


def compilation(
    kind: str, width: int, capability: tuple[int, int], rows: int = 4, *, split: bool = True
) -> Compilation:
    """Return the specialization of fwd that a device of this compute capability launches."""
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[kind]
    types = {"*": kind, "lengths_ptr": "*i32", "scale": "fp32", "o_ptr": "*fp32" if split else kind}
    optional = {"lse_ptr": "*fp32" if split else None}
    fixed = {**constants(rows, width, dtype, capability), "EARLY": capability == (9, 0)}
    return specialized(_KERNELS["fwd"], {**types, **optional}, fixed, NUM_WARPS, stages_for(capability))


def _paged_kernel(
    kind: str, width: int, capability: tuple[int, int], *, group: int = 4, ragged: bool = True, windowed: bool = False,
    capped: bool = False, split: bool = True,
) -> Compilation:  # fmt: skip
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[kind]
    types: dict[str, str | None] = {"*": kind, "scale": "fp32", "softcap": "fp32"}
    types |= dict.fromkeys(("table_ptr", "lengths_ptr"), "*i32")
    types |= dict.fromkeys(("parts_ptr", "stats_ptr"), "*fp32" if split else None)
    types["starts_ptr"] = "*i32" if ragged else None
    sizes = paged_constants(group, ragged, 16, width, windowed, capped, dtype, capability)
    fixed = {**sizes, "EARLY": capability == (9, 0)}
    return specialized(_PAGED_KERNELS["fwd"], types, fixed, NUM_WARPS, paged_stages(ragged, capability))


def _paged_combine(width: int, *, ragged: bool) -> Compilation:
    types = {"*": "*fp32", "lengths_ptr": "*i32", "starts_ptr": "*i32" if ragged else None, "o_ptr": "*bf16"}
    fixed = {
        "WINDOW": ragged,
        "SPLIT": SPLIT,
        "PAGE": 16,
        "AHEAD": AHEAD,
        "BLOCK_D": width,
        "EARLY": not ragged,
    }
    return specialized(_PAGED_KERNELS["combine"], types, fixed, 1)


def _linear(
    plan: DecodeTile, kind: str = "*bf16", *, integers: bool = False, norm: bool = False, gated: bool = False,
    residual: bool = False, by_bits: bool = True,
) -> Compilation:  # fmt: skip
    types = {
        "*": kind, "weight_ptr": "*i8" if integers else kind, "scale_ptr": "*fp32" if integers else None, "eps": "fp32",
        "norm_ptr": kind if norm else None, "residual_ptr": kind if residual else None,
    }  # fmt: skip
    return specialized(_STEPS["linear"], types, plan.constants(gated, integers and by_bits, by_bits), plan.num_warps)


def _words(plan: DecodeTile, *, gated: bool = False, residual: bool = False, by_bits: bool = True) -> Compilation:
    types = {"*": "*fp32", "planes_ptr": "*i32", "weight_ptr": "*i32", "y_ptr": "*bf16"}
    optional = {"residual_ptr": "*bf16" if residual else None}
    return specialized(
        _STEPS["words"],
        {**types, **optional},
        plan.constants(gated, by_bits, by_bits),
        plan.num_warps,
    )


def _planes(block: int, *, norm: bool) -> Compilation:
    types = {"*": "*bf16", "planes_ptr": "*i8", "units_ptr": "*fp32", "eps": "fp32"}
    optional = {"norm_ptr": "*bf16" if norm else None}
    return specialized(TO_PLANES, {**types, **optional}, {"BLOCK": block, "EARLY": not norm}, min(32, block // 256))


def _rope(kind: str, *, turned: bool = True, paged: bool = False) -> Compilation:
    tables = dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32" if turned else None)
    types = {"*": kind, "positions_ptr": "*i32", "slots_ptr": "*i64" if paged else None, **tables}
    return specialized(_STEPS["rope"], types, {"HEADS": 4, "BLOCK": 64, "EARLY": paged}, 1)


_GATED = usual_plan(14336, 4096, 2, True)
_STEP_KERNELS = (
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
    _rope("*bf16", paged=True),
)

KERNELS = (
    compilation("*fp16", 64, (7, 5)),
    compilation("*bf16", 128, (9, 0)),
    compilation("*bf16", 64, (9, 0), split=False),
    compilation("*bf16", 256, (9, 0), rows=40),
    compilation("*fp32", 128, (9, 0)),
    *(
        Compilation(
            _KERNELS["combine"],
            {"*": "*fp32", "o_ptr": "*bf16"},
            {"BLOCK_S": splits, "BLOCK_D": width, "EARLY": width == 256},
            NUM_WARPS,
        )
        for splits, width in ((16, 128), (MAX_SPLITS, 256))
    ),
    _paged_kernel("*fp16", 64, (7, 5)),
    _paged_kernel("*bf16", 128, (9, 0)),
    _paged_kernel("*bf16", 128, (9, 0), ragged=False),
    _paged_kernel("*bf16", 256, (9, 0), windowed=True, capped=True),
    _paged_kernel("*fp32", 128, (9, 0), group=7),
    _paged_kernel("*fp32", 64, (9, 0), split=False),
    _paged_kernel("*bf16", 64, (9, 0), ragged=False, split=False),
    _paged_combine(128, ragged=True),
    _paged_combine(256, ragged=False),
    specialized(_PAGED_KERNELS["append"], {"*": "*bf16", "slots_ptr": "*i64"}, {"BLOCK": 1024}, 4),
    *_STEP_KERNELS,
)
