"""Conversion of NumPy, torch, CuPy and JAX arrays to torch tensors and back to the same kind.

Memory is shared through DLPack if the array is already on the device; the protocol orders the producer's and the
consumer's streams (each side passes its current one). NumPy shares memory with CPU tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from accelerant.errors import UnsupportedDtype

__all__ = ["ArrayOrigin", "to_torch"]


@dataclass(frozen=True, slots=True)
class ArrayOrigin:
    """The library and device of an array, to which results are converted back.

    Attributes:
        kind: "numpy", "torch", "cupy" or "jax".
        device: torch's name of the array's device.
        context: the library's own device object, if it has one.
    """

    kind: str
    device: torch.device
    context: Any = None

    def wrap(self, tensor: torch.Tensor) -> Any:
        """Return the tensor as an array of this kind, on the input's device."""
        if self.kind == "torch":
            return tensor.to(self.device)
        tensor = tensor.detach()
        if self.kind == "numpy":
            return tensor.cpu().numpy()
        if self.kind == "cupy":
            return sys.modules["cupy"].from_dlpack(tensor.to(self.device))
        jax = sys.modules["jax"]
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype in ("int64", "uint64", "float64") and not jax.config.jax_enable_x64:
            raise UnsupportedDtype(f"JAX holds {dtype} only after jax.config.update('jax_enable_x64', True)")
        return jax.dlpack.from_dlpack(tensor.to(self.device).contiguous())


def kind_of(x: object) -> str:
    """Return the library of an array; "numpy" for numbers and sequences of them.

    Raises:
        UnsupportedDtype: another type.
    """
    if isinstance(x, torch.Tensor):
        return "torch"
    if isinstance(x, (np.ndarray, np.generic, int, float, Sequence)) and not isinstance(x, (str, bytes)):
        return "numpy"
    root = type(x).__module__.partition(".")[0]
    if root == "cupy":
        return "cupy"
    if root in ("jax", "jaxlib"):
        return "jax"
    raise UnsupportedDtype(f"wanted an array of NumPy, torch, CuPy or JAX, got {type(x).__module__}.{type(x).__name__}")


def to_torch(x: Any, device: torch.device, dtype: np.dtype[Any] | None = None) -> tuple[torch.Tensor, ArrayOrigin]:
    """Return an array as a tensor on the device, and its origin; memory on the device is shared.

    Args:
        x: an array of a known kind, or numbers.
        device: target.
        dtype: dtype of plain Python numbers; NumPy's own choice by default.

    Raises:
        UnsupportedDtype: not an array, or a dtype that torch lacks.
    """
    kind = kind_of(x)
    try:
        if kind == "torch":
            return x.to(device, non_blocking=False), ArrayOrigin(kind, x.device)
        if kind == "numpy":
            array = x if isinstance(x, np.ndarray) else np.asarray(x, dtype)
            array = np.ascontiguousarray(array)
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            return tensor.to(device), ArrayOrigin(kind, torch.device("cpu"))
        tensor = torch.utils.dlpack.from_dlpack(x)
        context = next(iter(x.devices())) if kind == "jax" else None
        return tensor.to(device), ArrayOrigin(kind, tensor.device, context)
    except (TypeError, ValueError, BufferError, OverflowError) as error:
        raise UnsupportedDtype(f"cannot take this {kind} array: {error}") from None
