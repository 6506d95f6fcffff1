"""The interface that a backend implements, and what passes through it.

A backend author writes one class in `runtime/providers/`, names it in `registry.py`, and runs
`pytest tests/conformance --backend NAME`. The contract, beyond the signatures:

* A provider is made once a process, by the registry, after `probe()` said that the driver is sound. Its
  constructor may start the driver; importing its module must not.
* Devices are numbered from 0, as the driver numbers them. Whatever takes a device's number refuses one that is not
  there with a ConfigError that names the range (`check_device`).
* Memory: `allocate` gives a Buffer of at least the asked size (0 is allowed), aligned to 256 bytes where memory has
  addresses, with undefined content; it lives until `Buffer.free` or until nobody refers to it. Use the pool that the
  rest of the process uses. A backend whose allocator keeps no limits asks `runtime.memory.check_allocation` first.
* A buffer that was freed, or that another provider made, is refused with a LaunchError; nothing reaches the device.
* Optional: `trim(device)` gives what the pool holds for later back to the device.
* Copies are ordered with launches on the same stream. `copy_to_host` returns when the bytes are there.
* `compile` goes through the disk cache, under a key of everything that the code depends on (fixed options too),
  raises CompileError with the compiler's log, and never leaves a broken entry. Two calls with the same source give
  kernels that compute the same.
* `launch` checks what it is given before anything reaches the device, does not wait, and raises LaunchError where
  nothing ran, DeviceLost where the device can no longer be used.
* Grid and block are in blocks and threads, one to three numbers each. A device without blocks (the CPU) runs the
  flattened range grid x block over its cores; kernels compare their index with the length that they are given.
* Whatever may be called from several threads must hold its own lock. What a `__del__` takes must be a lock that is
  held for nothing else, and reentrant: the garbage collector runs in any thread, also in one that holds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, TypeVar

import numpy as np
import numpy.typing as npt

from accelerant.errors import CompileError, ConfigError, DeviceLost, LaunchError, OutOfMemory, ShapeError
from accelerant.runtime.compilation.kernel import Kernel, KernelSource

__all__ = ["Buffer", "ComputeBackend", "ComputeDevice", "ComputeProvider", "Event", "MemoryInfo", "Pointer"]

ComputeBackend = str
"""The name of a backend: one of registry.BACKENDS."""

Pointer = Any
"""What a pointer argument may be: a Buffer, or anything with `data_ptr()` on the device (a torch tensor)."""


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """A device, or the absence of one.

    Attributes:
        backend: "cuda", "cpu", ...
        index: number on its backend; -1 for an absent backend.
        name: as its driver gives it.
        available: whether it can be used.
        reason: why not, if not; empty otherwise.
        memory_bytes: total memory, 0 where unknown.
        architecture: "sm_90", "znver4"; what kernels are compiled for.
        properties: what else its driver says: multiprocessors, clocks, versions.
    """

    backend: ComputeBackend
    index: int
    name: str
    available: bool = True
    reason: str = ""
    memory_bytes: int = 0
    architecture: str = ""
    properties: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def torch_device(self) -> str:
        """What `torch.device` takes: "cuda:0", "cpu". Empty for an absent device and where torch has none."""
        kind = {"cuda": "cuda", "rocm": "cuda", "apple": "mps", "cpu": "cpu"}.get(self.backend)
        if not self.available or kind is None:
            return ""
        return kind if kind == "cpu" else f"{kind}:{self.index}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device in bytes.

    Attributes:
        total_bytes: what the device has.
        free_bytes: what any process could still take.
        allocated_bytes: what this process's live buffers and tensors hold.
        reserved_bytes: what this process's pool holds, live or kept for later.
        peak_bytes: the most that was allocated at once.
    """

    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


class Buffer:
    """A range of device memory; freed by `free`, or when nobody refers to it.

    Args:
        pointer: address on the device, or the driver's handle where its memory has no addresses.
        size_bytes: length.
        device: index of the device.
        owner: whatever must live as long as the memory does.
    """

    __slots__ = ("_pointer", "device", "owner", "size_bytes")

    def __init__(self, pointer: int, size_bytes: int, device: int, owner: object) -> None:
        self._pointer: int | None = pointer
        self.size_bytes = size_bytes
        self.device = device
        self.owner = owner

    def data_ptr(self) -> int:
        """The address on the device, or the driver's handle.

        Raises:
            LaunchError: it was freed.
        """
        if self._pointer is None:
            raise LaunchError(f"{self!r} was freed; it cannot be used any more")
        return self._pointer

    def free(self) -> None:
        """Give the memory back now; freeing twice does nothing. Launches that are under way still finish."""
        self._pointer = self.owner = None

    def __repr__(self) -> str:
        return f"Buffer({self.size_bytes} bytes on device {self.device})"


class Event(ABC):
    """A mark on a stream that times what lies between two of its kind."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the device has passed it; does not wait."""

    @abstractmethod
    def elapsed_ms(self, later: Event) -> float:
        """Milliseconds from this mark to a later one; both must be done."""


class ComputeProvider(ABC):
    """One backend. The module's docstring is the contract.

    Attributes:
        name: the backend's name.
        dialects: kernel dialects it compiles, the preferred first.
    """

    name: ClassVar[ComputeBackend]
    dialects: ClassVar[tuple[str, ...]]

    @classmethod
    @abstractmethod
    def probe(cls) -> str:
        """Why this backend cannot be used here; empty if it can. Must not start a driver in this process."""

    @abstractmethod
    def devices(self) -> list[ComputeDevice]:
        """The devices that are there, by index."""

    @abstractmethod
    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        """Device memory with undefined content.

        Raises:
            ShapeError: a negative size.
            ConfigError: no device has that number.
            OutOfMemory: with what was asked and what is free.
        """

    @abstractmethod
    def copy_to_device(self, array: npt.ArrayLike, device: int = 0, *, out: Buffer | None = None) -> Buffer:
        """The array's bytes, in C order, on the device.

        Args:
            array: anything NumPy reads.
            device: where to.
            out: a buffer to write into; a new one by default.

        Raises:
            ShapeError: `out` is smaller than the array.
            LaunchError: `out` was freed, or another provider made it.
        """

    @abstractmethod
    def copy_to_host(self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        """The buffer's first elements as a new NumPy array; waits for them.

        Raises:
            ShapeError: the buffer is smaller than that.
            LaunchError: it was freed, or another provider made it.
        """

    @abstractmethod
    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        """Compile, or load from the disk cache.

        Args:
            source: what to compile.
            entry: which entry point; may be left out where there is one.
            device: compiled for its architecture.

        Raises:
            CompileError: with the compiler's log.
        """

    @abstractmethod
    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Pointer | int | float],
        stream: object | None = None,
    ) -> None:
        """Start a kernel; does not wait for it.

        Args:
            kernel: from `compile` of this provider.
            grid: blocks, one to three numbers of at least 1.
            block: threads a block, one to three numbers of at least 1.
            args: as kernel.arguments says.
            stream: of this backend; the current one by default.

        Raises:
            LaunchError: nothing ran.
            DeviceLost: an earlier kernel broke the device for this process.
        """

    @abstractmethod
    def synchronize(self, device: int = 0) -> None:
        """Wait until everything launched on the device is done.

        Raises:
            DeviceLost: a kernel broke it.
        """

    @abstractmethod
    def memory(self, device: int = 0) -> MemoryInfo:
        """What the device's memory holds now."""

    @abstractmethod
    def record_event(self, device: int = 0) -> Event | None:
        """Mark the current stream; None where no mark may be made now (a graph is being captured)."""

    def lost(self, error: Exception) -> DeviceLost | None:
        """The error as DeviceLost, if it is one after which this process can no longer use the device."""
        return None


def pick_entry(source: KernelSource, entry: str | None) -> str:
    """The entry point meant, its argument types checked; for providers.

    Raises:
        LaunchError: no such entry, or several to choose from.
        CompileError: an argument type that KernelSource does not know.
    """
    if entry is None and len(source.entries) == 1:
        entry = next(iter(source.entries))
    if entry is None or entry not in source.entries:
        raise LaunchError(f"kernel source {source.name!r} has the entries {', '.join(source.entries)}; got {entry!r}")
    for position, kind in enumerate(source.entries[entry]):
        if not kind.startswith("*") and kind not in (*_SCALARS, "struct"):
            raise CompileError(f"kernel {entry!r}, argument {position}: unknown argument type {kind!r}")
    return entry


def check_launch(
    kernel: Kernel, provider: str, grid: Sequence[int], block: Sequence[int], args: Sequence[object]
) -> None:
    """What every provider checks before a launch.

    Raises:
        LaunchError: names what does not fit.
    """
    if kernel.backend != provider:
        raise LaunchError(f"kernel {kernel.name!r} was compiled for {kernel.backend}, launched on {provider}")
    for name, sizes in (("grid", grid), ("block", block)):
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise LaunchError(f"{name} must be one to three numbers of at least 1, got {tuple(sizes)}")
    if len(args) != len(kernel.arguments):
        raise LaunchError(f"kernel {kernel.name!r} takes {len(kernel.arguments)} arguments, got {len(args)}")


_SCALARS = ("i32", "u32", "i64", "u64", "f32", "f64")
_INTEGER_RANGES = {"i32": (-(2**31), 2**31), "u32": (0, 2**32), "i64": (-(2**63), 2**63), "u64": (0, 2**64)}


def check_scalar(name: str, position: int, kind: str, arg: object) -> int | float:
    """A scalar argument as a plain number of the declared type; for providers.

    Raises:
        LaunchError: not a number, or one that the type cannot hold.
    """
    if kind in _INTEGER_RANGES:
        low, high = _INTEGER_RANGES[kind]
        if isinstance(arg, (int, np.integer)) and low <= arg < high:
            return int(arg)
    elif isinstance(arg, (int, float, np.number)):
        return float(arg)
    raise LaunchError(f"kernel {name!r}, argument {position}: wanted {kind}, got {arg!r}")


def host_bytes(array: npt.ArrayLike, out: Buffer | None) -> npt.NDArray[np.uint8]:
    """The array as a flat array of bytes, checked against the buffer it shall go to; for providers."""
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if out is not None and out.size_bytes < flat.nbytes:
        raise ShapeError(f"a buffer of {out.size_bytes} bytes cannot take an array of {flat.nbytes}")
    return flat


def host_size(buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> int:
    """Bytes of an array of that kind, checked against the buffer it shall come from; for providers."""
    if min(shape, default=0) < 0:
        raise ShapeError(f"a buffer cannot be read as {tuple(shape)}: sizes must be 0 or more")
    size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=object))
    if size > buffer.size_bytes:
        raise ShapeError(f"{tuple(shape)} of {np.dtype(dtype)} is {size} bytes; the buffer has {buffer.size_bytes}")
    return size


def check_device(backend: str, index: int, count: int) -> None:
    """Refuse the number of a device that is not there; for providers.

    Raises:
        ConfigError: names the range.
    """
    if not 0 <= index < count:
        there = {0: "no device", 1: "one device, number 0"}.get(count, f"devices 0 to {count - 1}")
        raise ConfigError(f"backend {backend!r} has {there}; got device {index}")


_Owner = TypeVar("_Owner")


def check_owner(buffer: Buffer, owner: type[_Owner], backend: str, where: str) -> _Owner:
    """What holds a buffer's memory, which tells a provider's own buffers from others; for providers.

    Raises:
        LaunchError: it was freed, or another provider made it.
    """
    buffer.data_ptr()  # a freed one raises
    if not isinstance(buffer.owner, owner):
        raise LaunchError(f"{where}: {buffer!r} was not allocated by the {backend} backend")
    return buffer.owner


def check_size(size_bytes: int) -> None:
    """Refuse a negative size; for providers."""
    if size_bytes < 0:
        raise ShapeError(f"cannot allocate {size_bytes} bytes")


def out_of_memory(size_bytes: int, device: str, memory: MemoryInfo) -> OutOfMemory:
    """The error to raise; for providers."""
    return OutOfMemory(
        f"{size_bytes:,} bytes asked on {device}; {memory.free_bytes:,} of {memory.total_bytes:,} free, "
        f"{memory.allocated_bytes:,} held by this process"
    )
