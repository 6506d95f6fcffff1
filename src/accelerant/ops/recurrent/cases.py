"""The compiled kernels of recurrent layers."""

from __future__ import annotations

import torch

from accelerant.ops.recurrent import KERNELS as _KERNELS
from accelerant.ops.recurrent import constants, num_warps
from accelerant.ops.registry import Compilation

KIND = "mutating"  # no public function: the layers are tested in tests/ops/test_recurrent.py and tests/nn


def _compilation(name: str, cell: str, hidden: int, kind: str, capability: tuple[int, int]) -> Compilation:
    dtype = {"*bf16": torch.bfloat16, "*fp16": torch.float16, "*fp32": torch.float32}[kind]
    fixed = constants(cell, hidden, dtype, capability)
    return Compilation(_KERNELS[name], {"*": kind}, fixed, num_warps(hidden, dtype), 1)


KERNELS = tuple(
    _compilation(name, *rest)
    for name in ("fwd", "bwd")
    for rest in (
        ("lstm", 64, "*fp16", (7, 5)), ("lstm", 128, "*bf16", (9, 0)), ("lstm", 64, "*fp32", (9, 0)),
        ("gru", 128, "*bf16", (9, 0)), ("tanh", 256, "*bf16", (9, 0)), ("relu", 64, "*bf16", (9, 0)),
    )
)  # fmt: skip
