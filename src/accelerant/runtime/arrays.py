"""Arrays of other libraries as torch tensors and back, in kind: NumPy, torch, CuPy, JAX.

Memory is shared through DLPack where the array is already on the device, with the producer's and the consumer's
streams ordered by the protocol (each side passes its current stream); NumPy shares memory with CPU tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack

from accelerant.errors import UnsupportedDtype

__all__ = ["Foreign", "to_torch"]

_X64_NAMES = ("int64", "uint64", "float64")


@dataclass(frozen=True, slots=True)
class Foreign:
    """Where an array came from, and so what the answer shall be.

    Attributes:
        kind: "numpy", "torch", "cupy" or "jax".
        device: the device that the array was on, as torch names it.
        context: the library's own device, where it has one.
    """

    kind: str
    device: torch.device
    context: Any = None

    def wrap(self, tensor: torch.Tensor) -> Any:
        """The tensor as an array of this kind, on the device where the input was."""
        return _WRAP[self.kind](tensor.detach(), self) if self.kind != "torch" else tensor.to(self.device)


def kind_of(x: object) -> str:
    """The library that an array is of; "numpy" for numbers and sequences of them.

    Raises:
        UnsupportedDtype: nothing that is known here.
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


def to_torch(x: Any, device: torch.device, dtype: np.dtype[Any] | None = None) -> tuple[torch.Tensor, Foreign]:
    """The array as a tensor on the device, sharing memory where it is there already.

    Args:
        x: an array of a known kind, or numbers.
        device: where to.
        dtype: what plain Python numbers become; NumPy's own choice by default.

    Returns:
        the tensor and where it came from.

    Raises:
        UnsupportedDtype: not an array, or of a dtype that torch does not have.
    """
    kind = kind_of(x)
    try:
        if kind == "torch":
            return x.to(device, non_blocking=False), Foreign(kind, x.device)
        if kind == "numpy":
            array = x if isinstance(x, np.ndarray) else np.asarray(x, dtype)
            array = np.ascontiguousarray(array)
            tensor = torch.from_numpy(array if array.flags.writeable else array.copy())
            return tensor.to(device), Foreign(kind, torch.device("cpu"))
        tensor = torch.utils.dlpack.from_dlpack(x)
        context = next(iter(x.devices())) if kind == "jax" else None
        return tensor.to(device), Foreign(kind, tensor.device, context)
    except (TypeError, ValueError, BufferError, OverflowError) as error:
        raise UnsupportedDtype(f"cannot take this {kind} array: {error}") from None


def _to_numpy(tensor: torch.Tensor, _: Foreign) -> Any:
    return tensor.cpu().numpy()


def _to_cupy(tensor: torch.Tensor, origin: Foreign) -> Any:
    return sys.modules["cupy"].from_dlpack(tensor.to(origin.device))


def _to_jax(tensor: torch.Tensor, origin: Foreign) -> Any:
    jax = sys.modules["jax"]
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _X64_NAMES and not jax.config.jax_enable_x64:
        raise UnsupportedDtype(f"JAX holds {name} only after jax.config.update('jax_enable_x64', True)")
    return jax.dlpack.from_dlpack(tensor.to(origin.device).contiguous())


_WRAP: dict[str, Callable[[torch.Tensor, Foreign], Any]] = {"numpy": _to_numpy, "cupy": _to_cupy, "jax": _to_jax}
