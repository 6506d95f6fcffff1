"""Samples, benchmarks, tolerances and compiled kernels of max_pool2d and avg_pool2d."""

from __future__ import annotations

from typing import Any

import torch

from accelerant.ops.pool2d import KERNELS as _KERNELS
from accelerant.ops.pool2d import Window, plan_of
from accelerant.ops.registry import Benchmark, Compilation, OpCases, SampleInput, size_name, tolerances


def _sample(*shape: int, **options: Any) -> SampleInput:
    settings = "".join(f"-{key[:3]}{value}".replace(" ", "") for key, value in options.items())
    return SampleInput(size_name(shape) + settings, (shape,), options)


_BOTH = (
    _sample(1, 1, 1, 1, kernel_size=1),
    _sample(2, 2, 4, 4, kernel_size=2),
    _sample(1, 2, 5, 4, kernel_size=3, stride=1, padding=1),
    _sample(3, 4, 3, kernel_size=(2, 3)),
    _sample(1, 1, 5, 5, kernel_size=2, ceil_mode=True),
    _sample(1, 2, 5, 4, kernel_size=(3, 2), stride=(2, 3), padding=(1, 0), ceil_mode=True),
    _sample(0, 2, 4, 4, kernel_size=2),
    _sample(2, 3, 17, 19, kernel_size=3, stride=2, padding=1),
)
_LARGE = (_sample(8, 65, 113, 111, kernel_size=3, stride=2, padding=1),)
_BENCHMARKS = (Benchmark(_sample(64, 64, 112, 112, kernel_size=3, stride=2, padding=1), torch.bfloat16),)

# An average is rounded once; torch's kernels round each addition of gradients of overlapping windows.
_TOLERANCES = tolerances(float64=(1e-13, 1e-13), float32=(2e-6, 2e-6), float16=(2e-3, 2e-3), bfloat16=(1.6e-2, 1.6e-2))
FAMILY = {
    "avg_pool2d": OpCases(
        (
            *_BOTH,
            _sample(1, 2, 5, 4, kernel_size=3, padding=1, ceil_mode=True, count_include_pad=False),
            _sample(1, 1, 4, 4, kernel_size=2, stride=1, divisor_override=3),
        ),
        _LARGE,
        _BENCHMARKS,
        _TOLERANCES,
    ),
    "max_pool2d": OpCases((*_BOTH, _sample(1, 1, 6, 6, kernel_size=2, dilation=2)), _LARGE, _BENCHMARKS, _TOLERANCES),
}


def _compiled(
    name: str, window: Window, kind: str, positions: str = "", *, last: bool = False, divided: bool = False
) -> Compilation:
    plan = plan_of(name, 64, 4 if kind == "*fp32" else 2, "cuda", last=last)
    absent = [name for name, given in (("divisor", divided), ("positions_ptr", positions)) if not given]
    own: dict[str, int | bool] = {"PAIRS": not last} if name == "bwd" else {"ROWS": plan.rows}
    blocks = {"BLOCK_P": plan.block_p, "BLOCK_Q": plan.block_q}
    fixed = {**window.constants(last=last), **own, **blocks, **dict.fromkeys(absent)}
    return Compilation(_KERNELS[name], {"*": kind, "positions_ptr": positions}, fixed, plan.num_warps)


_MAX, _AVG = (Window((3, 3), (2, 2), (1, 1), largest=largest, with_padding=not largest) for largest in (True, False))
KERNELS = (
    _compiled("fwd", _MAX, "*bf16", "*u8"),
    _compiled("fwd", _MAX, "*bf16"),
    _compiled("fwd", _MAX, "*fp16", "*i64"),
    _compiled("fwd", _MAX, "*bf16", "*u8", last=True),
    _compiled("fwd", _AVG, "*fp32"),
    _compiled("fwd", _AVG, "*bf16", last=True),
    _compiled("fwd", _AVG, "*bf16", divided=True),
    _compiled("bwd", _AVG, "*bf16", divided=True),
    _compiled("bwd", _MAX, "*bf16", "*u8"),
    _compiled("bwd", _MAX, "*fp32", "*i64"),
    _compiled("bwd", _MAX, "*bf16", "*u8", last=True),
    _compiled("bwd", _AVG, "*bf16"),
    _compiled("bwd", _AVG, "*fp32", last=True),
)
ELEMENT_LOADS = ("LAST=False",)
"""Kernels that read element by element, since rows of windows have any alignment; neighbouring threads coalesce."""
