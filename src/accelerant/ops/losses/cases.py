"""The cases of the losses' tests and benchmarks."""

from __future__ import annotations

import torch

from accelerant.ops import registry
from accelerant.ops._launch import STREAM
from accelerant.ops.losses import KERNELS as _KERNELS
from accelerant.ops.losses import PARTS

_CALLS = (
    ((3, 5), "mean"), ((3, 5), "none"), ((1,), "sum"), ((0,), "sum"), ((4, 0, 2), "none"), ((), "mean"),
    ((2, 3, 129), "sum"), ((33, 257), "mean"), ((33, 257), "none"),
)  # fmt: skip


def _sample(shape: tuple[int, ...], reduction: str, *, fractions: int) -> registry.SampleInput:
    """Return a sample whose last tensors, 0 to 2 of them, are fractions."""
    arguments = tuple(registry.Fractions(shape) if at >= 2 - fractions else shape for at in range(2))
    return registry.SampleInput(f"{registry.size_name(shape)}-{reduction}", arguments, {"reduction": reduction})


def _cases(fractions: int) -> registry.OpCases:
    return registry.OpCases(
        SAMPLES=tuple(_sample(shape, reduction, fractions=fractions) for shape, reduction in _CALLS),
        LARGE=tuple(
            _sample(shape, reduction, fractions=fractions)
            for shape, reduction in (((4097, 4095), "mean"), ((16384, 3072), "none"), ((3, 1_000_003), "sum"))
        ),
        BENCHMARKS=(
            registry.Benchmark(_sample((16384, 4096), "mean", fractions=fractions), torch.bfloat16),
            registry.Benchmark(_sample((16384, 4096), "none", fractions=fractions), torch.bfloat16),
        ),
        # One rounding of the loss and of each gradient; sums of up to 2^26 float32 numbers.
        TOLERANCES=registry.tolerances(
            float64=(1e-11, 1e-11), float32=(1e-5, 2e-6), float16=(2e-3, 2e-3), bfloat16=(1.6e-2, 1.6e-2)
        ),
    )


FAMILY = {
    "mse_loss": _cases(0), "l1_loss": _cases(0), "binary_cross_entropy": _cases(2),
    "binary_cross_entropy_with_logits": _cases(1),
}  # fmt: skip

ELEMENT_LOADS = ("losses_total",)  # 512 numbers


def _compilation(way: str, name: str, kind: str, *, weighted: bool, **constants: bool) -> registry.Compilation:
    types = {"*": kind, "factor": "fp32", "w_ptr": kind if weighted else None, "p_ptr": kind if weighted else None}
    if constants.get("SUM"):
        types["y_ptr"] = "*fp32"
    fixed = {"KIND": name, **constants, "BLOCK": STREAM.block}
    return registry.specialized(_KERNELS[way], types, fixed, STREAM.num_warps)


KERNELS = (
    registry.Compilation(_KERNELS["total"], {"part_ptr": "*fp32", "*": "*bf16", "factor": "fp32"}, {"PARTS": PARTS}, 4),
    *(
        _compilation(way, name, kind, weighted=weighted, **{flag: reduced})
        for name in FAMILY
        for way, flag in (("fwd", "SUM"), ("bwd", "SCALAR"))
        for kind, weighted, reduced in (("*bf16", False, True), ("*fp32", "logits" in name, False))
    ),
)
