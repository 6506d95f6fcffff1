"""Compiled kernels, test shapes and tolerances of the transformer's kernels."""

from __future__ import annotations

from accelerant.ops._cases import Compilation, tolerances
from accelerant.ops.embedding.launch import constants as _constants
from accelerant.ops.embedding.launch import embedding_plan as _plan
from accelerant.ops.transformer.launch import COLUMNS, JOINS, SQUARE, STRIP
from accelerant.ops.transformer.launch import KERNELS as _KERNELS

__all__ = ["KERNELS", "KIND", "MATRICES", "TOLERANCES"]

KIND = "mutating"  # no public function

MATRICES = ((0, 5), (4, 0), (1, 1), (3, 7), (16, 128), (129, 130), (300, 48))
"""Rows and columns of test matrices."""

# Relative to the largest element of a sum of 300 numbers, each rounded once.
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(1e-5, 1e-5), float16=(4e-3, 4e-3), bfloat16=(3e-2, 3e-2))


def _columns(kind: str) -> Compilation:
    types = {"x_ptr": kind, "partial_ptr": "*fp32", **dict.fromkeys(("M", "N", "stride", "span"), "i32")}
    return Compilation(_KERNELS["columns"], types, COLUMNS, 4)


def _dgelu(kind: str, *, tanh: bool) -> Compilation:
    types = dict.fromkeys(("dy_ptr", "z_ptr", "dz_ptr", "a_ptr"), kind)
    types |= {"partial_ptr": "*fp32", **dict.fromkeys(("M", "N", "stride", "span"), "i32")}
    return Compilation(_KERNELS["dgelu"], types, {"TANH": tanh, "BLOCK_M": STRIP[0], "BLOCK_N": STRIP[1]}, 4)


def _embed(kind: str) -> Compilation:
    types = {"tokens_ptr": "*i64", "table_ptr": "*fp32", "places_ptr": "*fp32", "y_ptr": kind}
    types |= dict.fromkeys(("T", "V", "D", "time"), "i32")
    plan = _plan(768)
    return Compilation(_KERNELS["embed"], types, _constants(plan, 768), plan.num_warps)


_JOIN = {"partial_ptr": "*fp32", "sums_ptr": "*fp32", "P": "i32", "N": "i32"}
KERNELS = (
    _columns("*bf16"),
    _columns("*fp32"),
    _dgelu("*bf16", tanh=True),
    _dgelu("*fp32", tanh=False),
    *(Compilation(_KERNELS["join"], _JOIN, {"BLOCK_P": rows, "BLOCK_N": columns}, 4) for rows, columns in JOINS),
    Compilation(_KERNELS["turn"], {"x_ptr": "*bf16", "y_ptr": "*bf16", "M": "i32", "N": "i32"}, {"BLOCK": SQUARE}, 4),
    _embed("*bf16"),
    _embed("*fp32"),
)
