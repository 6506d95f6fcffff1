"""Memory spaces of field elements: NumPy arrays, torch tensors of a device, buffers of a backend without tensors.

A memory space creates, copies, indexes and compares arrays of words: a field's unsigned words, the limbs last where an
element has several. Arithmetic is the kernels'. On the host only NumPy is needed: torch is looked up, never imported.
"""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.words import check_words, dtype_of
from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.runtime import registry
from accelerant.runtime.files import clipped
from accelerant.runtime.host import refuse_masked
from accelerant.runtime.provider import Buffer, ComputeProvider, Pointer, out_of_memory
from accelerant.runtime.registry import DeviceLike

Shape = tuple[int, ...]
_ALIGNMENT = 16  # Bytes of the kernels' widest access; elements of several limbs are a multiple of it

_WITH_TENSORS = ("cuda",)


class MemorySpace(ABC):
    """The memory of a backend's device number `index`, and its provider; by default methods go through the host."""

    backend: str
    index: int

    @property
    def provider(self) -> ComputeProvider:
        """The provider, created on first use."""
        return registry.create(self.backend)

    @property
    def label(self) -> str:
        """The device's name in the ledger."""
        return f"{self.backend}:{self.index}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.label})"

    def __reduce__(self) -> Any:
        return space_at, (self.label,)  # an object for each device, HOST among them

    @abstractmethod
    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        """Return words with undefined content; OutOfMemory names the requested and the free size."""

    def like(self, words: Any) -> Any:
        """Return `empty` words of the shape and dtype of others."""
        return self.empty(tuple(words.shape), words.dtype)

    @abstractmethod
    def load(self, words: npt.NDArray[Any]) -> Any:
        """Copy words from the host."""

    @abstractmethod
    def store(self, words: Any) -> npt.NDArray[Any]:
        """Copy words to the host."""

    @abstractmethod
    def pointer(self, words: Any) -> Pointer:
        """Return a launch's argument for contiguous words."""

    def unsigned(self, words: Any) -> Any:
        """Return words as an unsigned array of the library that holds them."""
        return self.store(words)

    def contiguous(self, words: Any) -> Any:
        """Return words in C order, copied if they are not."""
        return words

    def broadcast(self, words: Any, shape: Shape) -> Any:
        """Broadcast words to a shape, contiguous."""
        return words if words.shape == shape else self.load(np.broadcast_to(self.store(words), shape))

    def getitem(self, words: Any, key: tuple[Any, ...]) -> Any:
        """Return words[key], contiguous."""
        return self.load(np.asarray(self.store(words)[key], order="C"))  # keeps scalars

    def pad(self, words: Any, axis: int, size: int) -> Any:
        """Extend an axis to a size with zeros."""
        return self.load(HOST.pad(self.store(words), axis, size))

    def joined(self, x: Any, y: Any) -> Any:
        """Append words along the first axis."""
        return self.load(np.concatenate([self.store(x), self.store(y)]))

    def move_axis(self, words: Any, axis: int, before: int) -> Any:
        """Move an axis in front of the last `before` ones, contiguous."""
        return self.load(np.moveaxis(self.store(words), axis, -1 - before))

    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        """Compare words element by element, with broadcasting; limbs is 0 if elements have no axis of limbs."""
        return HOST.equal(self.store(x), self.store(y), limbs)

    def minimum(self, numbers: Any) -> int:
        """Return the least of some int64 numbers."""
        return int(self.store(numbers).min())

    def first_zero(self, words: Any, limbs: int) -> int | None:
        """Return the flattened index of the first element whose limbs, at least 1, are all 0; or None."""
        return HOST.first_zero(self.store(words), limbs)


@dataclass(slots=True)
class _Address:
    """Address of a NumPy array, for a launch that has finished when it returns."""

    array: npt.NDArray[Any]

    def data_ptr(self) -> int:
        return self.array.ctypes.data


class _HostSpace(MemorySpace):
    """NumPy arrays."""

    backend, index, label = "cpu", 0, "cpu"

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        return np.empty(shape, dtype)

    def load(self, words: npt.NDArray[Any]) -> Any:
        return words

    def store(self, words: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return words

    def pointer(self, words: Any) -> Pointer:
        return _Address(words)

    def contiguous(self, words: Any) -> Any:
        return words if words.flags.c_contiguous and words.flags.aligned else words.copy()

    def broadcast(self, words: Any, shape: Shape) -> Any:
        return self.contiguous(np.broadcast_to(words, shape))

    def getitem(self, words: Any, key: tuple[Any, ...]) -> Any:
        return self.contiguous(np.asarray(words[key]))

    def pad(self, words: Any, axis: int, size: int) -> Any:
        return np.pad(words, [(0, (size - have) * (i == axis)) for i, have in enumerate(words.shape)])

    def move_axis(self, words: Any, axis: int, before: int) -> Any:
        return self.contiguous(np.moveaxis(words, axis, -1 - before))

    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        return (x == y).all(axis=-1) if limbs else np.asarray(x == y)

    def first_zero(self, words: Any, limbs: int) -> int | None:
        zero = ~words.reshape(-1, limbs).any(axis=-1)
        return int(zero.argmax()) if zero.any() else None


HOST: MemorySpace = _HostSpace()  # The CPU's memory


class DeviceVerdict:
    """A word of the host's memory that kernels of a CUDA device set to 1 where they find an invalid argument.

    It belongs to one call, from `of` to is_set(). The memory is pinned and never freed: kernels of an interrupted call,
    whose verdict is not used again, may write late.
    """

    _made: ClassVar[list[DeviceVerdict]] = []
    _free: ClassVar[dict[MemorySpace, list[DeviceVerdict]]] = {}

    def __init__(self, space: MemorySpace) -> None:
        torch = sys.modules["torch"]
        self._space, self._memory = space, torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._word, self._stream = self._memory.numpy(), torch.cuda.current_stream
        self.data_ptr = self._memory.data_ptr  # the same address on the device
        self._made.append(self)

    @classmethod
    def of(cls, space: MemorySpace) -> DeviceVerdict:
        """Return one that no call uses, not set."""
        try:
            return cls._free[space].pop()
        except LookupError:
            return cls(space)

    def is_set(self) -> bool:
        """Wait for the current stream and return whether a kernel set it. DeviceLost: the device failed."""
        try:
            self._stream(self._space.index).synchronize()
        except RuntimeError as error:
            raise self._space.provider.lost(error) or error from None
        found, self._word[0] = bool(self._word[0]), 0
        self._free.setdefault(self._space, []).append(self)
        return found


@dataclass(frozen=True)
class _TensorSpace(MemorySpace):
    """torch tensors of a device, as signed words: torch copies and orders unsigned ones on few devices."""

    backend: str
    index: int = 0

    @functools.cached_property
    def _device(self) -> Any:
        return sys.modules["torch"].device(self.label)

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        torch = sys.modules["torch"]
        try:
            return torch.empty(shape, dtype=_signed(dtype.itemsize), device=self._device)
        except torch.OutOfMemoryError:
            size = int(np.prod(shape, dtype=object)) * dtype.itemsize
            raise out_of_memory(size, self.label, self.provider.memory(self.index)) from None

    def like(self, words: Any) -> Any:
        """Return `empty` words; torch.empty_like costs the host less than torch.empty."""
        torch = sys.modules["torch"]
        try:
            return torch.empty_like(words)
        except torch.OutOfMemoryError:
            return self.empty(tuple(words.shape), np.dtype(f"i{words.element_size()}"))

    def load(self, words: npt.NDArray[Any]) -> Any:
        source = words if words.flags.writeable and words.flags.c_contiguous else words.copy()
        return signed_view(sys.modules["torch"].from_numpy(source).to(self.label))

    def store(self, words: Any) -> npt.NDArray[Any]:
        stored: npt.NDArray[Any] = self.unsigned(words).cpu().numpy()
        return stored

    def unsigned(self, words: Any) -> Any:
        torch = sys.modules["torch"]
        return words.view(torch.uint64 if words.element_size() == 8 else torch.uint32)

    def pointer(self, words: Any) -> Pointer:
        return words

    def contiguous(self, words: Any) -> Any:
        """Also align them: a view may begin at any word, and kernels load several words per access."""
        words = words.contiguous()
        return words if words.data_ptr() % _ALIGNMENT == 0 else words.clone()

    def broadcast(self, words: Any, shape: Shape) -> Any:
        return self.contiguous(words.expand(shape))

    def getitem(self, words: Any, key: tuple[Any, ...]) -> Any:
        return self.contiguous(words[key])

    def pad(self, words: Any, axis: int, size: int) -> Any:
        shape = (*words.shape[:axis], size - words.shape[axis], *words.shape[axis + 1 :])
        return sys.modules["torch"].cat([words, words.new_zeros(shape)], dim=axis)

    def joined(self, x: Any, y: Any) -> Any:
        return sys.modules["torch"].cat([x, y])

    def move_axis(self, words: Any, axis: int, before: int) -> Any:
        return words.movedim(axis, -1 - before).contiguous()

    def equal(self, x: Any, y: Any, limbs: int) -> Any:
        return (x == y).all(dim=-1) if limbs else x == y

    def first_zero(self, words: Any, limbs: int) -> int | None:
        zeros = (words.reshape(-1, limbs) == 0).all(dim=-1).nonzero()
        return int(zeros[0, 0]) if len(zeros) else None


@dataclass(frozen=True, slots=True)
class _BufferArray:
    """A buffer with a shape and a dtype."""

    buffer: Buffer
    shape: Shape
    dtype: np.dtype[Any]

    def reshape(self, shape: Shape) -> _BufferArray:
        return _BufferArray(self.buffer, shape, self.dtype)


@dataclass(frozen=True)
class _BufferSpace(MemorySpace):
    """Buffers of a provider: kernels run on them, everything else goes through the host."""

    backend: str
    index: int = 0

    def empty(self, shape: Shape, dtype: np.dtype[Any]) -> Any:
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        return _BufferArray(self.provider.allocate(size, self.index), shape, dtype)

    def load(self, words: npt.NDArray[Any]) -> Any:
        return _BufferArray(self.provider.copy_to_device(words, self.index), words.shape, words.dtype)

    def store(self, words: Any) -> npt.NDArray[Any]:
        return self.provider.copy_to_host(words.buffer, words.dtype, words.shape)

    def pointer(self, words: Any) -> Pointer:
        return words.buffer


def is_tensor(x: object) -> bool:
    """Return whether x is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def signed_view(tensor: Any) -> Any:
    """Return a tensor of unsigned words as the signed ones of a memory space."""
    return tensor.view(_signed(tensor.element_size()))


def _signed(size_bytes: int) -> Any:
    torch = sys.modules["torch"]
    return torch.int64 if size_bytes == 8 else torch.int32


def space_of(tensor: Any) -> MemorySpace:
    """Return the memory space of a torch tensor; ConfigError if it is neither on the CPU nor on a CUDA device."""
    return _space_on(tensor.device)


@functools.cache
def _space_on(device: Any) -> MemorySpace:
    if device.type == "cpu":
        return HOST
    if device.type not in _WITH_TENSORS:
        raise ConfigError(f"field elements may be on cpu or {', '.join(_WITH_TENSORS)}; the tensor is on {device.type}")
    return _TensorSpace(device.type, device.index or 0)


def stacked(x: Any, name: str) -> Any:
    """Return nested lists of like arrays or tensors as one array, other arguments unchanged."""
    leaf = x
    while isinstance(leaf, list | tuple) and leaf:
        leaf = leaf[0]
    if leaf is x or not (isinstance(leaf, np.ndarray) or is_tensor(leaf)):
        return x
    parts = [stacked(part, f"{name}[{i}]") for i, part in enumerate(x)]
    first = parts[0]
    for i, part in enumerate(parts):
        if type(part) is not type(first) or part.dtype != first.dtype:
            kinds = [f"{type(each).__name__} of {getattr(each, 'dtype', 'Python')}" for each in (first, part)]
            raise UnsupportedDtype(
                f"{name} must be arrays of one library and dtype; [0] is {kinds[0]}, [{i}] {kinds[1]}"
            )
        if part.shape != first.shape or getattr(part, "device", None) != getattr(first, "device", None):
            raise ShapeError(f"{name} must be arrays of one shape and device, got {first.shape} and {part.shape}")
    if not is_tensor(first):
        return np.stack(parts)
    if first.dtype.is_signed:
        return sys.modules["torch"].stack(parts)
    return sys.modules["torch"].stack([signed_view(part) for part in parts]).view(first.dtype)


class ArrayOperand(NamedTuple):
    """Contiguous words in a space, their `leading` dimensions, and the tensor they were; integers are `free`."""

    words: Any
    space: MemorySpace
    leading: Shape = ()
    tensor: Any = None
    free: bool = False

    def moved(self, space: MemorySpace) -> Any:
        """Return the words in a memory space."""
        return self.words if self.space == space else space.load(self.space.store(self.words))


def array_operand(field: Field, x: Any, name: str, others: str) -> ArrayOperand:
    """Return an array of a field's words, not compared with the modulus; for messages, `others` are taken elsewhere."""
    if is_tensor(x):
        check_words(field, str(x.dtype).removeprefix("torch."), x.shape, name)
        space = space_of(x)
        return ArrayOperand(space.contiguous(x.detach().numpy() if space is HOST else signed_view(x)), space, tensor=x)
    refuse_masked(x, name)
    if not isinstance(x, np.ndarray):
        raise UnsupportedDtype(f"{name} must be a NumPy array, a torch tensor or {others}, got {type(x).__name__}")
    if x.dtype != dtype_of(field) or field.limbs > 1:  # a dtype's name takes longer than a small sum
        check_words(field, x.dtype.name if x.dtype.isnative else x.dtype.str, x.shape, name)
    return ArrayOperand(HOST.contiguous(x), HOST)


def space_at(device: DeviceLike) -> MemorySpace:
    """Return the memory space of a device; arguments and errors as find_device."""
    chosen = registry.find_device(device)
    if chosen.backend == "cpu":
        return HOST
    return (_TensorSpace if chosen.backend in _WITH_TENSORS else _BufferSpace)(chosen.backend, chosen.index)


def spaces_at(device: DeviceLike, devices: Sequence[DeviceLike] | None) -> list[MemorySpace]:
    """Return the memory spaces of `devices`, or of one `device`; ConfigError for both, or for no sequence of them."""
    if devices is None:
        return [space_at(device)]
    if device is not None or isinstance(devices, str) or not isinstance(devices, Sequence) or not devices:
        raise ConfigError(
            f"devices must be a list of devices, and device not be given; got {clipped(devices)}, {clipped(device)}"
        )
    return [space_at(each) for each in devices]


def common_space(device: DeviceLike, names: tuple[str, str], operands: Sequence[ArrayOperand]) -> MemorySpace:
    """Return the memory space of a device, by default the operands'; ShapeError where they are on two."""
    located = [operand.space for operand in operands if not operand.free]
    home = located[0] if located else HOST
    for space in located:
        if space != home:
            raise ShapeError(f"{names[0]} and {names[1]} must be on one device, got {home.label} and {space.label}")
    return home if device is None else space_at(device)


def in_kind(words: Any, space: MemorySpace, device: Any) -> Any:
    """Return words in the user's library: a tensor on a torch device, or a NumPy array if the device is None."""
    if device is None:
        return space.store(words)
    if space is not HOST and str(device) == space.label:
        return space.unsigned(words)
    return sys.modules["torch"].from_numpy(space.store(words)).to(device)
