"""Kernel launches with little host time: what does not change between launches is prepared once, by cuda-bindings."""

from __future__ import annotations

import ctypes
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Any

import torch

from accelerant.config import launch_log
from accelerant.errors import AccelerantError, CompileError, DeviceLost, LaunchError, OutOfMemory
from accelerant.runtime.compilation.background import is_missing, missing
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource
from accelerant.runtime.memory.limits import predictions, predicts_here
from accelerant.runtime.monitoring.monitor import publish
from accelerant.runtime.provider import SCALAR_CTYPES, Buffer, check_owner, check_scalar, log_launch, noted, watched

_SHAPES_LIMIT = 1024

_STICKY = re.compile(
    r"illegal.(memory.access|address|instruction)|launch.(failed|failure|timeout)|unspecified launch|"
    r"misaligned.address|invalid.(address.space|program.counter|pc)|hardware.stack|device-side assert|error_assert|"
    r"uncorrectable",
    re.IGNORECASE,
)
"""Errors after which this process cannot use the device."""

_OUT_OF_MEMORY = re.compile(r"out.of.memory", re.IGNORECASE)

_thread = threading.local()
"""`ready` is set in threads that have a CUDA context; libraries make one on first use, a launch must not assume it."""


def cuda_error(text: str, what: str, backend: str = "cuda") -> AccelerantError:
    """Return the error for a message of the driver or torch, also of HIP, whose messages are CUDA's."""
    first = text.splitlines()[0] if text else "unknown error"
    if _STICKY.search(text):
        publish(backend, "lost", f"{what}: {first}")
        return DeviceLost(f"{what}: {first}. This process can no longer use the device; start a new one")
    return (OutOfMemory if _OUT_OF_MEMORY.search(text) else LaunchError)(f"{what}: {first}")


def load_error(text: str, what: str, backend: str = "cuda") -> AccelerantError:
    """Return the error for code that does not load: a CompileError unless the device is at fault."""
    error = cuda_error(text, what, backend)
    return error if isinstance(error, (DeviceLost, OutOfMemory)) else CompileError(f"{what} does not load", text)


def check_memory(kernel: Kernel, args: Sequence[object]) -> None:
    """Refuse memory of other backends, whose access by the kernel would lose the device for this process."""
    for position, arg in enumerate(args):
        if isinstance(arg, Buffer):
            if not isinstance(arg.owner, torch.Tensor):
                check_owner(arg, torch.Tensor, kernel.backend, f"kernel {kernel.name!r}, argument {position}")
        elif isinstance(arg, torch.Tensor) and not arg.is_cuda:
            where = f"kernel {kernel.name!r}, argument {position}"
            raise LaunchError(f"{where}: the tensor is on {arg.device}, not on cuda")


def driver_value(results: tuple[Any, ...]) -> Any:
    """Return the value that a driver call gave, None if it gives none; raise RuntimeError with the driver's message."""
    from cuda.bindings import driver

    status, *values = results
    if status != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(status)
        raise RuntimeError(f"{status.name}: {(text or b'').decode()}")
    return values[0] if values else None


class Library:
    """Machine code that the driver has loaded, with its source and the cache's folder; unloaded with this object."""

    def __init__(self, binary: Binary, source: KernelSource, root: Path) -> None:
        from cuda.bindings import driver

        self.binary, self.source, self.root = binary, source, root
        self.entries: set[str] = set()
        self._library = driver_value(driver.cuLibraryLoadData(binary.code, [], [], 0, [], [], 0))
        # At the end of the process the driver is gone first.
        weakref.finalize(self, driver.cuLibraryUnload, self._library).atexit = False

    def has(self, entry: str, root: Path) -> bool:
        """Return whether an entry point is still to be used, and the cache's folder is the same."""
        return entry not in self.entries and root == self.root

    def kernel(self, symbol: str) -> int:
        """Return the driver's handle of an entry point."""
        from cuda.bindings import driver

        return int(driver_value(driver.cuLibraryGetKernel(self._library, symbol.encode())))


class LoadedKernel:
    """An entry point on a device, ready to launch: the handle from the Library `code`, which must live as long.

    The compiled code takes `extra` further null pointers; `threads` a block are the compiler's, else 0. With `overlaps`
    its blocks may begin before the preceding kernel has ended, for which it waits itself.
    """

    def __init__(
        self, name: str, function: int, kinds: Sequence[str], *, code: object = None, extra: int = 0,
        shared_bytes: int = 0, threads: int = 0, overlaps: bool = False,
    ) -> None:  # fmt: skip
        self.name = name
        self.function = function
        self.code = code
        self.kinds = tuple(kinds)
        self.threads = threads
        self._shared_bytes = shared_bytes
        self._overlaps = overlaps
        self._converters = tuple(_converter(name, i, kind) for i, kind in enumerate(kinds))
        self._extra = (0,) * extra
        self._shapes: dict[tuple[Sequence[int], Sequence[int]], PointedLaunch] = {}

    def start(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], stream: int) -> None:
        """Launch on a raw stream of the current device."""
        if (shaped := self._shapes.get((grid, block))) is None:
            if len(self._shapes) >= _SHAPES_LIMIT:
                self._shapes.clear()
            values = self._in_memory(args)
            shaped = PointedLaunch(self, self._shape(grid, block), values, -1, self._attribute())
            self._shapes[grid, block] = shaped
        own = shaped.own.arguments
        try:
            for cell, convert, arg in zip(own.values, self._converters, args, strict=False):
                cell.value = arg.data_ptr() if convert is None else convert(arg).value
            if len(args) != len(self._converters):
                raise ValueError("another number of arguments")
        except (AttributeError, ValueError) as error:
            raise self._misfit(args) from error
        shaped.enqueue(own.address, stream)

    def prepare(self, grid: tuple[int, ...], args: Sequence[Any], device: int, threads: int = 0) -> PreparedLaunch:
        """Return a launch that lacks only its pointers, by default of the threads a block that the compiler fixed."""
        positions = tuple(i for i, convert in enumerate(self._converters) if convert is None)
        shape = self._shape(grid, (threads or self.threads,))
        return PreparedLaunch(self, shape, self._in_memory(args), device, self._attribute(), positions)

    def pack(
        self, grid: tuple[int, int, int], args: Sequence[Any], device: int, together: bool = False
    ) -> PackedLaunch:
        """Return a complete launch of `threads` a block; structs are bytes. `together`: a cooperative launch."""
        shape = self._shape(grid, (self.threads,))
        return PackedLaunch(self, shape, self._in_memory(args), device, "cooperative" * together)

    def point(
        self, grid: tuple[int, int, int], args: Sequence[Any], device: int, threads: int, overlaps: bool = False
    ) -> PointedLaunch:
        """Return a launch that lacks its first few pointers, which change from call to call."""
        shape, values = self._shape(grid, (threads,)), self._in_memory(args)
        return PointedLaunch(self, shape, values, device, self._attribute(overlaps))

    def _attribute(self, overlaps: bool = False) -> str:
        return "programmaticStreamSerializationAllowed" * (overlaps or self._overlaps)

    def _in_memory(self, args: Sequence[Any]) -> list[Any]:
        try:
            values = [
                ctypes.c_void_p(arg.data_ptr()) if convert is None else convert(arg)
                for convert, arg in zip(self._converters, args, strict=True)
            ]
        except (AttributeError, ValueError) as error:
            raise self._misfit(args) from error
        return [*values, *map(ctypes.c_void_p, self._extra)]

    def _misfit(self, args: Sequence[Any]) -> LaunchError:
        """Return the error for arguments that are not those of the kernel."""
        for position, (kind, arg) in enumerate(zip(self.kinds, args, strict=False)):
            where = f"kernel {self.name!r}, argument {position}"
            if kind == "struct":
                return LaunchError(f"{where}: structs are launched by LoadedKernel.pack")
            if kind.startswith("*") and not hasattr(arg, "data_ptr"):
                return LaunchError(f"{where}: wanted a buffer, got {type(arg).__name__}")
        return LaunchError(f"kernel {self.name!r} takes {len(self.kinds)} arguments, got {len(args)}")

    def _shape(self, grid: tuple[int, ...], block: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 1 <= size <= most for size, most in zip(grid, _LARGEST_GRID, strict=False)):
            bounds = f"a grid has 1 to {_LARGEST_GRID} blocks along its axes"
            raise LaunchError(f"kernel {self.name!r}: {bounds}, got {grid}")
        try:
            sizes = [index(size) for axes in (grid, block) for size in (*axes, 1, 1)[:3]]
        except TypeError as error:
            raise LaunchError(f"kernel {self.name!r}, grid {grid}, block {block}: {error}") from None
        return (*sizes, self._shared_bytes)


class PackedLaunch:
    """A complete launch, which threads may share; see LoadedKernel.pack."""

    __slots__ = ("_attribute", "_code", "_configs", "_device", "_driver", "_launch", "_name", "_shape", "_where")

    def __init__(
        self, kernel: LoadedKernel, shape: tuple[int, ...], values: Sequence[Any], device: int, attribute: str
    ) -> None:
        from cuda.bindings import driver

        self._driver = driver
        self._attribute = attribute
        self._configs: dict[int, Any] = {}
        self._where = _Arguments(values)
        self._shape = (driver.CUfunction(kernel.function), *shape)
        self._name, self._code = kernel.name, kernel.code  # not the kernel, which has launches of its own
        self._launch = driver.cuLaunchKernelEx if attribute else driver.cuLaunchKernel
        self._device = device

    def start(self) -> None:
        """Launch on the current stream of the kernel's device; errors are those of LoadedKernel.start."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.start()
            return
        self.enqueue(self._where.address, torch._C._cuda_getCurrentRawStream(self._device))

    def enqueue(self, arguments: int, stream: int) -> None:
        """Launch on a raw stream, with the arguments whose addresses are in an array at address `arguments`."""
        if (predictions and predicts_here()) or (missing and is_missing()):
            return
        if not hasattr(_thread, "ready"):
            make_ready()
        began = time.perf_counter() if launch_log.enabled else 0.0
        if self._attribute:
            config = self._configs.get(stream) or self._configure(stream)
            (code,) = self._launch(config, self._shape[0], arguments, 0)
        else:
            (code,) = self._launch(*self._shape, stream, arguments, 0)
        if code:
            shape = f"grid {self._shape[1:4]}, block {self._shape[4:7]}"
            raise cuda_error(f"{code.name}".replace("_", " ").lower(), f"kernel {self._name!r}, {shape}")
        if launch_log.enabled:
            where = f"cuda:{torch.cuda.current_device()}"
            log_launch(self._name, where, self._shape[1:4], self._shape[4:7], began)
        if watched:
            noted()

    def _configure(self, stream: int) -> Any:
        """Return the configuration of launches with the attribute on a stream."""
        config, attribute = self._driver.CUlaunchConfig(), self._driver.CUlaunchAttribute()
        attribute.id = getattr(self._driver.CUlaunchAttributeID, _ATTRIBUTES[self._attribute])
        setattr(attribute.value, self._attribute, 1)
        config.gridDimX, config.gridDimY, config.gridDimZ = self._shape[1:4]
        config.blockDimX, config.blockDimY, config.blockDimZ = self._shape[4:7]
        config.sharedMemBytes = self._shape[7]
        config.hStream = self._driver.CUstream(stream)
        config.attrs, config.numAttrs = [attribute], 1
        self._configs[stream] = config
        return config


_LARGEST_GRID = (2**31 - 1, 65535, 65535)

_ATTRIBUTES = {
    "cooperative": "CU_LAUNCH_ATTRIBUTE_COOPERATIVE",
    "programmaticStreamSerializationAllowed": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
}
"""Field of a CUlaunchAttribute's value -> the attribute's id."""


class PreparedLaunch(PackedLaunch):
    """A launch that lacks its pointers, those at `positions`; each thread has its own memory for the arguments."""

    __slots__ = ("_own", "_positions")

    def __init__(
        self, kernel: LoadedKernel, shape: tuple[int, ...], values: Sequence[Any], device: int, attribute: str,
        positions: Sequence[int],
    ) -> None:  # fmt: skip
        super().__init__(kernel, shape, values, device, attribute)
        self._own = _ThreadArguments(values)
        self._positions = positions

    def start(self, pointers: Sequence[int]) -> None:  # type: ignore[override]  # lacks them
        """Launch with these as the pointers; stream and errors as for PackedLaunch.start."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.start(pointers)
            return
        own = self._own.arguments
        values = own.values
        for position, pointer in zip(self._positions, pointers, strict=True):
            values[position].value = pointer
        self.enqueue(own.address, torch._C._cuda_getCurrentRawStream(self._device))


class PointedLaunch(PackedLaunch):
    """A launch that lacks its first few pointers; see LoadedKernel.point. Threads as for PreparedLaunch."""

    __slots__ = ("own",)

    def __init__(
        self, kernel: LoadedKernel, shape: tuple[int, ...], values: Sequence[Any], device: int, attribute: str
    ) -> None:
        super().__init__(kernel, shape, values, device, attribute)
        self.own = _ThreadArguments(values)

    def start(self, *pointers: int) -> None:
        """Launch with these as the first arguments; stream and errors as for PackedLaunch.start."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.start(*pointers)
            return
        own = self.own.arguments
        for cell, pointer in zip(own.values, pointers, strict=False):
            cell.value = pointer
        self.enqueue(own.address, torch._C._cuda_getCurrentRawStream(self._device))


class _Arguments:
    """Arguments as the driver reads them: objects of ctypes, and the address of an array of their addresses."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values = list(values)
        self._array = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        self.address = ctypes.addressof(self._array)


class _ThreadArguments(threading.local):
    """A copy of the arguments for each thread."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.arguments = _Arguments([type(value).from_buffer_copy(value) for value in values])


def make_ready() -> None:
    """Give the calling thread a CUDA context: a thread of autograd has none before its first work."""
    if not hasattr(_thread, "ready"):
        torch.cuda.set_device(torch.cuda.current_device())
        _thread.ready = True


def _converter(name: str, position: int, kind: str) -> Callable[[Any], Any] | None:
    """Return the function that converts a number or struct to an object of ctypes; None for a pointer."""
    if kind.startswith("*"):
        return None
    if kind == "struct":
        return lambda arg: (ctypes.c_ubyte * len(arg)).from_buffer_copy(arg)
    if (ctype := SCALAR_CTYPES.get(kind)) is None:
        raise CompileError(f"kernel {name!r}, argument {position}: unknown argument type {kind!r}")

    def convert(arg: Any) -> Any:
        return ctype(check_scalar(name, position, kind, arg))

    return convert
