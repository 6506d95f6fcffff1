"""Compiled kernels, test shapes and tolerances of the transformer's kernels."""

from __future__ import annotations

from accelerant.ops.embedding import constants, embedding_plan
from accelerant.ops.registry import Compilation, tolerances
from accelerant.ops.transformer import COLUMNS
from accelerant.ops.transformer import KERNELS as _KERNELS

KIND = "mutating"  # no public function

MATRICES = ((0, 5), (4, 0), (1, 1), (3, 7), (16, 128), (129, 130), (300, 48))  # rows and columns of test matrices

# Relative to the largest element of a sum of 300 numbers, each rounded once.
TOLERANCES = tolerances(float64=(1e-12, 1e-12), float32=(1e-5, 1e-5), float16=(4e-3, 4e-3), bfloat16=(3e-2, 3e-2))


def _columns(kind: str) -> Compilation:
    return Compilation(_KERNELS["columns"], {"*": kind, "partial_ptr": "*fp32"}, COLUMNS, 4)


def _embed(kind: str) -> Compilation:
    plan = embedding_plan(768)
    types = {"*": "*fp32", "tokens_ptr": "*i64", "y_ptr": kind}
    return Compilation(_KERNELS["embed"], types, constants(plan, 768), plan.num_warps)


KERNELS = (
    _columns("*bf16"),
    _columns("*fp32"),
    _embed("*bf16"),
    _embed("*fp32"),
)
