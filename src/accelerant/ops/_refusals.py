"""Checks shared by the ops: dtypes that a public function takes, and cases that a kernel does not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.ops._library import name_of
from accelerant.runtime.compilation.triton import refuses_triton
from accelerant.runtime.dispatch import Case
from accelerant.runtime.files import clipped

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Dtypes that the ops take; kernels compute in float32, and torch's functions serve float64."""


def check_dtype(op: str, x: Tensor, name: str = "x") -> None:
    """Raise UnsupportedDtype unless the dtype of x is one of FLOATING, TypeError unless x is a tensor."""
    try:
        supported = x.dtype in FLOATING
    except (AttributeError, TypeError):
        raise not_a_tensor(op, name, x) from None
    if not supported:
        if not isinstance(x, Tensor):
            raise not_a_tensor(op, name, x)
        raise UnsupportedDtype(f"{op} takes {', '.join(map(name_of, FLOATING))}; {name} is {name_of(x.dtype)}")


def check_matches(op: str, x: Tensor, name: str = "x", **others: Tensor | None) -> None:
    """Raise UnsupportedDtype, ShapeError or TypeError for another dtype or device than x's, or no tensor; skip None."""
    for other_name, other in others.items():
        if other is None:
            continue
        try:
            if other.dtype is x.dtype and other.device == x.device:
                continue
        except AttributeError:
            raise not_a_tensor(op, other_name, other) from None
        if not isinstance(other, Tensor):
            raise not_a_tensor(op, other_name, other)
        if other.dtype != x.dtype:
            names = f"{name_of(x.dtype)} and {name_of(other.dtype)}"
            raise UnsupportedDtype(f"{name} and {other_name} must have one dtype, got {names}")
        raise ShapeError(f"{name} and {other_name} must be on one device, got {x.device} and {other.device}")


def check_or_float32(name: str, other: Tensor, x: Tensor) -> None:
    """Raise UnsupportedDtype unless a tensor has x's dtype, or float32 with a narrower x; ShapeError off its device."""
    if other.dtype != x.dtype and (other.dtype != torch.float32 or x.dtype == torch.float64):
        allowed = name_of(x.dtype) + ("" if x.dtype in (torch.float32, torch.float64) else " or float32")
        raise UnsupportedDtype(f"{name} must be {allowed} for x of {name_of(x.dtype)}, got {name_of(other.dtype)}")
    if other.device != x.device:
        raise ShapeError(f"{name} must be on {x.device}, where x is; it is on {other.device}")


def checked_dim(op: str, x: Tensor, dim: int, axis: int | None) -> int:
    """Check x and return the dimension counted from 0, `axis` where it is given in place of `dim`."""
    check_dtype(op, x)
    if axis is not None:
        if dim not in (-1, axis):
            raise ConfigError(f"{op}: axis is another name of dim; got dim={dim} and axis={axis}")
        dim = axis
    dims = x.dim() or 1  # a scalar counts as one element along dimension 0, as in torch
    try:
        inside = -dims <= dim < dims
    except TypeError:
        raise ConfigError(f"{op}: dim must be an integer, got {type(dim).__name__}") from None
    if not inside:
        raise ShapeError(f"dim must be in [{-dims}, {dims - 1}] for x of shape {tuple(x.shape)}, got {clipped(dim)}")
    return dim % dims


def not_a_tensor(op: str, name: str, x: object) -> TypeError:
    """Return the error for an argument that is not a tensor."""
    kind = f"{type(x).__module__}.{type(x).__qualname__}".removeprefix("builtins.")
    return TypeError(
        f"{op} takes torch tensors; {name} is a {kind}: convert it with torch.as_tensor, or call {op} of an "
        "accelerant.Accelerator, which takes arrays of other libraries and numbers"
    )


def refuses_float64(dtype: torch.dtype) -> str | None:
    """Return why a kernel that computes in float32 does not serve a dtype; None if it does."""
    return "computes in float32, not float64" if dtype == torch.float64 else None


def refuses_triton_kernel(case: Case) -> str | None:
    """Return why a Triton kernel that computes in float32 does not serve a case; None if it does."""
    return refuses_float64(case.dtype) or refuses_triton(case.device)
