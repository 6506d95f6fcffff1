"""Checks shared by the ops: dtypes that a public function takes, and cases that a kernel does not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerant.errors import UnsupportedDtype
from accelerant.ops._library import name_of
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case

__all__ = ["FLOATING", "check_dtype", "refuses_float64", "refuses_triton_kernel"]

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that the ops take; kernels compute in float32, and torch's functions serve float64."""


def check_dtype(op: str, x: Tensor, name: str = "x") -> None:
    """Raise UnsupportedDtype unless the dtype of x is one of FLOATING."""
    if x.dtype not in FLOATING:
        raise UnsupportedDtype(f"{op} takes {', '.join(map(name_of, FLOATING))}; {name} is {name_of(x.dtype)}")


def refuses_float64(dtype: torch.dtype) -> str | None:
    """Return why a kernel that computes in float32 does not serve a dtype; None if it does."""
    return "computes in float32, not float64" if dtype == torch.float64 else None


def refuses_triton_kernel(case: Case) -> str | None:
    """Return why a Triton kernel that computes in float32 does not serve a case; None if it does."""
    return refuses_float64(case.dtype) or refuses_triton(case.device)
