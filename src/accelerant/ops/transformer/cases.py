"""Compiled kernels, test shapes and tolerances of the transformer's kernels."""

from __future__ import annotations

from accelerant.ops._cases import Compilation, tolerances
from accelerant.ops.embedding.op import constants, embedding_plan
from accelerant.ops.transformer.op import COLUMNS, SQUARE
from accelerant.ops.transformer.op import KERNELS as _KERNELS

__all__ = ["KERNELS", "KIND", "MATRICES", "TOLERANCES"]

KIND = "mutating"  # no public function

MATRICES = ((0, 5), (4, 0), (1, 1), (3, 7), (16, 128), (129, 130), (300, 48))
"""Rows and columns of test matrices."""

# Relative to the largest element of a sum of 300 numbers, each rounded once.
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(1e-5, 1e-5), float16=(4e-3, 4e-3), bfloat16=(3e-2, 3e-2))


def _columns(kind: str) -> Compilation:
    types = {"x_ptr": kind, "partial_ptr": "*fp32", **dict.fromkeys(("M", "N", "stride", "span"), "i32")}
    return Compilation(_KERNELS["columns"], types, COLUMNS, 4)


def _embed(kind: str) -> Compilation:
    types = {"tokens_ptr": "*i64", "table_ptr": "*fp32", "places_ptr": "*fp32", "y_ptr": kind}
    types |= dict.fromkeys(("T", "V", "D", "time"), "i32")
    plan = embedding_plan(768)
    return Compilation(_KERNELS["embed"], types, constants(plan, 768), plan.num_warps)


KERNELS = (
    _columns("*bf16"),
    _columns("*fp32"),
    Compilation(_KERNELS["turn"], {"x_ptr": "*bf16", "y_ptr": "*bf16", "M": "i32", "N": "i32"}, {"BLOCK": SQUARE}, 4),
    _embed("*bf16"),
    _embed("*fp32"),
)
