"""Field addition on arrays: validation, the kernel's source, and its launch through a provider."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch

from accelerant.algebra.field.llvm_kernels import FieldAdd
from accelerant.algebra.field.reference import MODULI
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime import registry
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation
from accelerant.runtime.kernel import Kernel, KernelSource
from accelerant.runtime.provider import ComputeDevice, ComputeProvider, Pointer

__all__ = ["add", "add_on", "source"]

_BLOCK = 256
_SIGN = -(2**63)
U64 = npt.NDArray[np.uint64]


@functools.cache
def source() -> KernelSource:
    """The kernel in every dialect that it has."""
    return KernelSource(
        name="field_add",
        dialects={
            "portable": (Path(__file__).parent / "kernel.c").read_text(encoding="utf-8"),
            "llvm": FieldAdd("goldilocks"),
        },
        entries={"field_add": ("*u64", "*u64", "*u64", "i64")},
    )


@functools.cache
def _kernel(backend: str, device: int) -> Kernel:
    return registry.create(backend).compile(source(), device=device)


def _run(provider: ComputeProvider, device: int, x: Pointer, y: Pointer, z: Pointer, n: int) -> None:
    if n:
        provider.launch(_kernel(provider.name, device), (-(-n // _BLOCK),), (_BLOCK,), (x, y, z, n))


def _cost(case: Case) -> Cost:
    n = int(np.prod(case.shape, dtype=object))
    return Cost(bytes=24 * n, flops=n)


_field_add = Operation("field_add", (Implementation("kernel", _run, own=True),), cost=_cost)


@overload
def add(x: torch.Tensor, y: torch.Tensor, *, field: str = "goldilocks") -> torch.Tensor: ...
@overload
def add(x: U64, y: U64, *, field: str = "goldilocks") -> U64: ...
def add(x: Any, y: Any, *, field: str = "goldilocks") -> Any:
    """Add two arrays of field elements.

    z = (x + y) mod p

    Args:
        x: any shape, uint64, canonical (below p); NumPy array or torch tensor.
        y: shape, kind and device of x.
        field: "goldilocks", p = 2^64 - 2^32 + 1.

    Returns:
        shape and kind of x, canonical.

    Raises:
        ConfigError: unknown field.
        ShapeError: shapes or devices differ.
        UnsupportedDtype: not uint64.
        FormatError: an element is not below p; names the first one's index.
    """
    first, second = _checked(x, y, field)
    z = torch.empty_like(first)
    case = Case(first.device, first.dtype, tuple(first.shape), (field,))
    _field_add(case, registry.provider_of(first.device), first.device.index or 0, first, second, z, first.numel())
    return z if isinstance(x, torch.Tensor) else z.numpy()


def add_on(device: ComputeDevice, x: U64, y: U64, *, field: str = "goldilocks") -> U64:
    """As add, for NumPy arrays, on any backend that has the kernel; copies there and back.

    Args:
        device: where.
        x, y, field: as for add.

    Raises:
        As add.
    """
    first, second = (tensor.numpy() for tensor in _checked(x, y, field))
    provider = registry.create(device.backend)
    a, b = (provider.copy_to_device(array, device.index) for array in (first, second))
    z = provider.allocate(first.nbytes, device.index)
    case = Case(torch.device(device.backend, device.index), torch.uint64, first.shape, (field,))
    _field_add(case, provider, device.index, a, b, z, first.size)
    return provider.copy_to_host(z, np.uint64, first.shape)


def _checked(x: object, y: object, field: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Both as contiguous tensors, or the error that add documents."""
    if field not in MODULI:
        raise ConfigError(f"unknown field {field!r}; known are {', '.join(MODULI)}")
    first, second = _tensor(x, "x"), _tensor(y, "y")
    if first.shape != second.shape:
        raise ShapeError(f"x and y must have one shape, got {tuple(first.shape)} and {tuple(second.shape)}")
    if first.device != second.device:
        raise ShapeError(f"x and y must be on one device, got {first.device} and {second.device}")
    for name, tensor in (("x", first), ("y", second)):
        _check_canonical(name, tensor, MODULI[field])
    return first, second


def _tensor(x: object, name: str) -> torch.Tensor:
    tensor = x if isinstance(x, torch.Tensor) else torch.from_numpy(_writeable(np.asarray(x)))
    if tensor.dtype != torch.uint64:
        raise UnsupportedDtype(f"{name} must be uint64, got {str(tensor.dtype).removeprefix('torch.')}")
    return tensor.contiguous()


def _writeable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array if array.flags.writeable else array.copy()


def _check_canonical(name: str, x: torch.Tensor, modulus: int) -> None:
    """Compare as signed numbers with the sign bit turned, since torch orders no uint64 on every device."""
    signed = x.view(torch.int64).reshape(-1)
    large = (signed ^ _SIGN) >= (modulus + _SIGN)
    if bool(large.any()):
        index = int(large.nonzero()[0, 0])
        value = int(signed[index]) % 2**64
        raise FormatError(f"{name}[{index}] (flattened) is {value}, not below the modulus {modulus}")
