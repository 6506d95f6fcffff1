"""Where words of field elements are: NumPy's arrays, torch's on a device, buffers of a backend that has no tensors.

A place keeps words: an array of a field's unsigned words, the limbs last where an element has several. It copies, cuts
and compares them; arithmetic is the kernels'. On the host that needs NumPy alone: torch is looked up, never imported.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.provider import Buffer, ComputeDevice, ComputeProvider, Pointer, out_of_memory

__all__ = ["HOST", "Place", "in_kind", "inward", "is_tensor", "place_at", "place_of"]

Shape = tuple[int, ...]
_ALIGNMENT = 16
"""Bytes: the widest access of the kernels; elements of several limbs are a multiple of it."""


class Place(ABC):
    """Memory of one device, and the provider that computes there.

    Attributes:
        backend: the provider's name.
        index: of the device.
    """

    backend: str
    index: int

    @property
    def provider(self) -> ComputeProvider:
        """Made on first use."""
        return registry.create(self.backend)

    @property
    def label(self) -> str:
        """The device, as the ledger names it."""
        return f"{self.backend}:{self.index}"

    # --- moving --------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        """Words with undefined content.

        Raises:
            OutOfMemory: with what was asked and what is free.
        """

    @abstractmethod
    def load(self, words: npt.NDArray[Any]) -> Any:
        """The host's words, here."""

    @abstractmethod
    def store(self, words: Any) -> npt.NDArray[Any]:
        """Words of here, on the host."""

    @abstractmethod
    def outward(self, words: Any) -> Any:
        """As the user sees them: an unsigned array of the library that has them."""

    @abstractmethod
    def pointer(self, words: Any) -> Pointer:
        """What a launch takes; the words must be contiguous."""

    @abstractmethod
    def contiguous(self, words: Any) -> Any:
        """In C order, copied where they are not."""

    @abstractmethod
    def spread(self, words: Any, shape: Shape) -> Any:
        """Broadcast to a shape, contiguous."""

    @abstractmethod
    def cut(self, words: Any, key: tuple[Any, ...]) -> Any:
        """words[key], contiguous."""

    @abstractmethod
    def padded(self, words: Any, axis: int, size: int) -> Any:
        """An axis lengthened by zeros."""

    @abstractmethod
    def last(self, words: Any, axis: int, before: int) -> Any:
        """An axis moved to stand before the last `before` ones, contiguous."""

    def shaped(self, words: Any, shape: Shape) -> Any:
        """The same words in another shape."""
        return words.reshape(shape)

    # --- comparing -----------------------------------------------------------------------------------------------

    @abstractmethod
    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        """Which elements are the same, as booleans, with the elements' shape broadcast; y may have another shape.

        Args:
            x, y: words.
            limbs: of an element; 0 where elements have no axis of limbs.
        """

    @abstractmethod
    def least(self, numbers: Any) -> int:
        """The least of some int64 numbers."""

    @abstractmethod
    def first_zero(self, words: Any, limbs: int) -> int | None:
        """The flattened index of the first element whose limbs are all 0, or None; limbs at least 1."""


class _Address:
    """A NumPy array's memory, for a launch that is done when it returns."""

    __slots__ = ("array",)

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _Host(Place):
    """NumPy's arrays."""

    backend = "cpu"
    index = 0

    @property
    def label(self) -> str:
        return "cpu"

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def load(self, words: npt.NDArray[Any]) -> Any:
        return words

    def store(self, words: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = words
        return found

    def outward(self, words: Any) -> Any:
        return words

    def pointer(self, words: Any) -> Pointer:
        return _Address(words)

    def contiguous(self, words: Any) -> Any:
        return words if words.flags.c_contiguous and words.flags.aligned else words.copy()

    def spread(self, words: Any, shape: Shape) -> Any:
        return self.contiguous(np.broadcast_to(words, shape))

    def cut(self, words: Any, key: tuple[Any, ...]) -> Any:
        return self.contiguous(np.asarray(words[key]))

    def padded(self, words: Any, axis: int, size: int) -> Any:
        return np.pad(words, [(0, (size - have) * (i == axis)) for i, have in enumerate(words.shape)])

    def last(self, words: Any, axis: int, before: int) -> Any:
        return self.contiguous(np.moveaxis(words, axis, -1 - before))

    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        return (x == y).all(axis=-1) if limbs else np.asarray(x == y)

    def least(self, numbers: Any) -> int:
        return int(numbers.min())

    def first_zero(self, words: Any, limbs: int) -> int | None:
        zero = ~words.reshape(-1, limbs).any(axis=-1)
        return int(zero.argmax()) if zero.any() else None


@dataclass(frozen=True)
class _Tensors(Place):
    """torch's tensors on a device, as signed words: torch copies and orders unsigned ones on few devices."""

    backend: str
    index: int = 0

    @property
    def _device(self) -> Any:
        return f"{self.backend}:{self.index}"

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        torch = sys.modules["torch"]
        try:
            return torch.empty(shape, dtype=_signed(torch, dtype.itemsize), device=self._device)
        except torch.OutOfMemoryError:
            size = int(np.prod(shape, dtype=object)) * dtype.itemsize
            raise out_of_memory(size, self.label, self.provider.memory(self.index)) from None

    def load(self, words: npt.NDArray[Any]) -> Any:
        torch = sys.modules["torch"]
        source = words if words.flags.writeable and words.flags.c_contiguous else words.copy()
        return inward(torch.from_numpy(source).to(self._device))

    def store(self, words: Any) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self.outward(words).cpu().numpy()
        return found

    def outward(self, words: Any) -> Any:
        torch = sys.modules["torch"]
        return words.view({8: torch.uint64, 4: torch.uint32}[words.element_size()])

    def pointer(self, words: Any) -> Pointer:
        return words

    def contiguous(self, words: Any) -> Any:
        """Aligned, too: a view may begin at any word, and kernels read several at once."""
        words = words.contiguous()
        return words if words.data_ptr() % _ALIGNMENT == 0 else words.clone()

    def spread(self, words: Any, shape: Shape) -> Any:
        return self.contiguous(words.expand(shape))

    def cut(self, words: Any, key: tuple[Any, ...]) -> Any:
        return self.contiguous(words[key])

    def padded(self, words: Any, axis: int, size: int) -> Any:
        shape = (*words.shape[:axis], size - words.shape[axis], *words.shape[axis + 1 :])
        return sys.modules["torch"].cat([words, words.new_zeros(shape)], dim=axis)

    def last(self, words: Any, axis: int, before: int) -> Any:
        return words.movedim(axis, -1 - before).contiguous()

    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        return (x == y).all(dim=-1) if limbs else x == y

    def least(self, numbers: Any) -> int:
        return int(numbers.min())

    def first_zero(self, words: Any, limbs: int) -> int | None:
        found = (words.reshape(-1, limbs) == 0).all(dim=-1).nonzero()
        return int(found[0, 0]) if len(found) else None


@dataclass(frozen=True, slots=True)
class _Block:
    """A buffer with the shape and dtype of what is in it."""

    buffer: Buffer
    shape: Shape
    dtype: np.dtype[Any]

    def reshape(self, shape: Shape) -> _Block:
        return _Block(self.buffer, shape, self.dtype)


@dataclass(frozen=True)
class _Buffers(Place):
    """Buffers of a provider: kernels run on them, everything else goes through the host."""

    backend: str
    index: int = 0

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        return _Block(self.provider.allocate(size, self.index), shape, dtype)

    def load(self, words: npt.NDArray[Any]) -> Any:
        return _Block(self.provider.copy_to_device(words, self.index), words.shape, words.dtype)

    def store(self, words: Any) -> npt.NDArray[Any]:
        return self.provider.copy_to_host(words.buffer, words.dtype, words.shape)

    def outward(self, words: Any) -> Any:
        return self.store(words)

    def pointer(self, words: Any) -> Pointer:
        return words.buffer

    def contiguous(self, words: Any) -> Any:
        return words

    def spread(self, words: Any, shape: Shape) -> Any:
        return words if words.shape == shape else self.load(np.broadcast_to(self.store(words), shape))

    def cut(self, words: Any, key: tuple[Any, ...]) -> Any:
        return self.load(self.store(words)[key])

    def padded(self, words: Any, axis: int, size: int) -> Any:
        return self.load(HOST.padded(self.store(words), axis, size))

    def last(self, words: Any, axis: int, before: int) -> Any:
        return self.load(np.moveaxis(self.store(words), axis, -1 - before))

    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        return HOST.equal(self.store(x), self.store(y), limbs)

    def least(self, numbers: Any) -> int:
        return int(self.store(numbers).min())

    def first_zero(self, words: Any, limbs: int) -> int | None:
        return HOST.first_zero(self.store(words), limbs)


HOST: Place = _Host()
"""The CPU's memory."""

_WITH_TENSORS = ("cuda",)


def is_tensor(x: object) -> bool:
    """Whether x is a torch tensor; imports nothing."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def inward(tensor: Any) -> Any:
    """A tensor of unsigned words as a place keeps it."""
    return tensor.view(_signed(sys.modules["torch"], tensor.element_size()))


def _signed(torch: Any, size_bytes: int) -> Any:
    return {8: torch.int64, 4: torch.int32}[size_bytes]


def place_of(tensor: Any) -> Place:
    """Where a torch tensor's words are.

    Raises:
        ConfigError: on a device that no kernel of ours reaches.
    """
    kind = tensor.device.type
    if kind == "cpu":
        return HOST
    if kind not in _WITH_TENSORS:
        raise ConfigError(f"field elements may be on cpu or {', '.join(_WITH_TENSORS)}; the tensor is on {kind}")
    return _Tensors(kind, tensor.device.index or 0)


def place_at(device: str | ComputeDevice) -> Place:
    """The place of a device: "cpu", "cuda", "cuda:1", "opencl", or what accelerant.devices() lists.

    Raises:
        ConfigError: no backend has that name, or no device that number.
        BackendUnavailable: the backend is not there; says why.
    """
    if isinstance(device, ComputeDevice):
        backend, index = device.backend, device.index
    else:
        backend, _, number = str(device).partition(":")
        if number and not number.isdecimal():
            raise ConfigError(f"device {device!r}: wanted a backend's name, or a name and a number as in 'cuda:1'")
        index = int(number or 0)
    found = registry.choose(backend, index)
    if found.backend == "cpu":
        return HOST
    return (_Tensors if found.backend in _WITH_TENSORS else _Buffers)(found.backend, found.index)


def in_kind(words: Any, place: Place, device: Any) -> Any:
    """Words as their user has them: NumPy's on the host, or, of a torch device, a tensor there."""
    if device is None:
        return place.store(words)
    if place is not HOST and str(device) == place.label:
        return place.outward(words)
    return sys.modules["torch"].from_numpy(place.store(words)).to(device)
