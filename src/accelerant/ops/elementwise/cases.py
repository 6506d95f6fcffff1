"""The cases of the elementwise ops' tests and benchmarks."""

from __future__ import annotations

import math

import torch

from accelerant.ops._cases import Benchmark, Compilation, OpCases, Sample, Tolerance
from accelerant.ops.elementwise.launch import KERNELS as _KERNELS
from accelerant.ops.elementwise.launch import ROW_WARPS, STREAM_KERNELS, row_tile, sum_plan

__all__ = ["FAMILY", "KERNELS"]

_SHAPES = ((1,), (7,), (3, 5), (), (0,), (4, 0, 2), (2, 3, 129), (33, 257))


def _sample(*shapes: tuple[int, ...]) -> Sample:
    return Sample("+".join("x".join(map(str, shape)) or "scalar" for shape in shapes), shapes)


# Rounding of the result, one unit in the last place (the interpreter cuts bfloat16 instead of rounding it); in float32
# exp is good to a few units. Gradients start from the rounded y, at most 1, and dy is at most about 4.
_TOLERANCES = {
    torch.float64: Tolerance(1e-13, 1e-13),
    torch.float32: Tolerance(2e-6, 1e-6),
    torch.float16: Tolerance(2e-3, 4e-3),
    torch.bfloat16: Tolerance(1.6e-2, 4e-2),
}
# Sums over rows of normal numbers, which may cancel.
_PAIR_TOLERANCES = {
    torch.float64: Tolerance(1e-13, 1e-13),
    torch.float32: Tolerance(2e-6, 2e-6),
    torch.float16: Tolerance(1e-3, 1e-3),
    torch.bfloat16: Tolerance(8e-3, 8e-3),
}

_UNARY = OpCases(
    SAMPLES=tuple(_sample(shape) for shape in _SHAPES),
    LARGE=(_sample((4097, 4095)), _sample((16384, 3072))),
    BENCHMARKS=(Benchmark(_sample((16384, 4096)), torch.bfloat16, 0.068, 0.098),),
    TOLERANCES=_TOLERANCES,
)
_PAIR = OpCases(
    SAMPLES=(
        _sample((1,), (1,)),
        _sample((3, 5), (5,)),
        _sample((3, 5), (3, 5)),
        _sample((7,), (7,)),
        _sample((), ()),
        _sample((0,), (0,)),
        _sample((4, 0, 2), (4, 0, 2)),
        _sample((0, 3), (3,)),
        _sample((2, 3, 129), (2, 3, 129)),
        _sample((2, 3, 129), (3, 129)),
        _sample((2, 3, 130), (1, 1, 130)),
        _sample((300, 3), (3,)),
        _sample((257,), (33, 257)),
        _sample((33, 257), (33, 257)),
    ),
    LARGE=(
        _sample((4097, 4095), (4097, 4095)),
        _sample((4097, 4095), (4095,)),
        _sample((1_000_003, 3), (3,)),
        _sample((3, 1_000_003), (1_000_003,)),
    ),
    BENCHMARKS=(
        Benchmark(_sample((16384, 4096), (4096,)), torch.bfloat16),
        Benchmark(_sample((16384, 4096), (16384, 4096)), torch.bfloat16),
    ),
    TOLERANCES=_PAIR_TOLERANCES,
)
FAMILY = {"add": _PAIR, "mul": _PAIR, **dict.fromkeys(("relu", "sigmoid", "silu", "tanh"), _UNARY)}

_POINTERS = {
    "fwd": ("x_ptr", "y_ptr"),
    "bwd": ("dy_ptr", "y_ptr", "dx_ptr"),
    "silu bwd": ("dy_ptr", "x_ptr", "dx_ptr"),
    "add fwd": ("a_ptr", "b_ptr", "y_ptr"),
    "mul fwd": ("a_ptr", "b_ptr", "y_ptr"),
    "mul bwd": ("dy_ptr", "a_ptr", "b_ptr", "da_ptr", "db_ptr"),
    "row_fwd": ("a_ptr", "b_ptr", "y_ptr"),
    "add row_bwd": ("dy_ptr",),
    "mul row_bwd": ("dy_ptr", "a_ptr", "b_ptr", "da_ptr"),
}


def _compilations(kind: str, N: int) -> tuple[Compilation, ...]:
    rows, columns = row_tile(N)
    summing = sum_plan(N)
    found = []
    for name, kernel in _KERNELS.items():
        op, way = name.split("_", 1)
        types = dict.fromkeys(_POINTERS.get(f"{op} {way}") or _POINTERS[way], kind)
        if way == "row_fwd":
            types |= {"M": "i32", "N": "i32"}
            found.append(
                Compilation(kernel, types, {"ROWS": rows, "BLOCK_N": columns}, ROW_WARPS, multiple=math.gcd(N, 16))
            )
        elif way == "row_bwd":
            types |= {"db_ptr": "*fp32", "M": "i32", "N": "i32", "part_rows": "i32"}
            found.append(Compilation(kernel, types, summing.constants(), summing.num_warps, multiple=math.gcd(N, 16)))
        else:
            usual = STREAM_KERNELS[name].usual
            found += [
                Compilation(kernel, {**types, "n": "i32"}, fixed, usual.num_warps) for fixed in _fixed(name, kind)
            ]
    return tuple(found)


def _fixed(name: str, kind: str) -> list[dict[str, int | str]]:
    """Return the compile-time arguments of an elementwise kernel; both eviction policies are compiled for bfloat16."""
    block = STREAM_KERNELS[name].usual.block
    if name == "mul_bwd":
        return [{"BLOCK": block}]
    return [{"BLOCK": block, "EVICTION": way} for way in (("", "evict_last") if kind == "*bf16" else ("",))]


_WITHOUT_DA = Compilation(
    _KERNELS["mul_row_bwd"],
    {
        **dict.fromkeys(("dy_ptr", "a_ptr", "b_ptr"), "*bf16"),
        "db_ptr": "*fp32",
        "M": "i32",
        "N": "i32",
        "part_rows": "i32",
    },
    {**sum_plan(4096).constants(), "da_ptr": None},
    sum_plan(4096).num_warps,
)
KERNELS = (*_compilations("*bf16", 4096), *_compilations("*fp32", 768), *_compilations("*fp16", 1000), _WITHOUT_DA)
