"""Kernel launches with little host time: everything that does not change between launches is prepared once.

cuda.core's `launch` takes 4 us with a ready-made stream and configuration, and 6 us or more when it has to make them.
Both are therefore kept, by stream and by grid and block, and each argument's conversion is chosen once, from its
declared type. (Packing the arguments into one struct and calling cuLaunchKernel through ctypes took 6.4 us.)
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from accelerant.config import launch_log
from accelerant.errors import AccelerantError, CompileError, DeviceLost, LaunchError, OutOfMemory
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.memory.live_set import predictions, predicts_here
from accelerant.runtime.monitoring.events import publish
from accelerant.runtime.provider import SCALAR_CTYPES, Buffer, check_owner, check_scalar, log_launch, noted, watched

__all__ = [
    "LoadedKernel", "PackedLaunch", "PointedLaunch", "PreparedLaunch", "check_memory", "cuda_error", "load_error",
    "make_ready",
]  # fmt: skip

_CONFIGS_LIMIT = 1024

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

_streams: dict[int, Any] = {}


def cuda_error(text: str, what: str, backend: str = "cuda") -> AccelerantError:
    """Return the error for a message of the driver or torch, also of HIP, whose messages are CUDA's.

    Out of memory is an error of its own: with lazy loading, the first launch also loads the code.
    """
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
            raise LaunchError(
                f"kernel {kernel.name!r}, argument {position}: the tensor is on {arg.device}, not on cuda"
            )


class LoadedKernel:
    """An entry point on a device, ready to launch.

    `core` is cuda.core's Kernel, from the ObjectCode `code`, which must live as long. Argument types (`kinds`) are as
    in KernelSource.entries. The compiled code takes `extra` further pointers, all null. `threads` a block are those
    that the compiler fixed, else 0. With `overlaps`, its blocks may begin before the preceding kernel of the stream has
    ended; the kernel then waits (griddepcontrol.wait) before it touches memory that others may use.
    """

    def __init__(
        self, name: str, core: Any, kinds: Sequence[str], *, code: object = None, extra: int = 0, shared_bytes: int = 0,
        threads: int = 0, overlaps: bool = False,
    ) -> None:  # fmt: skip
        from cuda.core import LaunchConfig, Stream, launch

        self.name = name
        self.core = core
        self.code = code
        self.kinds = tuple(kinds)
        self.threads = threads
        self._shared_bytes = shared_bytes
        self._overlaps = overlaps
        self._converters = tuple(_converter(name, i, kind) for i, kind in enumerate(kinds))
        self._extra = (0,) * extra
        self._configs: dict[tuple[Sequence[int], Sequence[int]], Any] = {}
        self._make_config, self._wrap_stream, self._launch = LaunchConfig, Stream.from_handle, launch

    def start(self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], stream: int) -> None:
        """Launch on a raw stream of the current device.

        Raises LaunchError or OutOfMemory where nothing ran, DeviceLost where an earlier kernel broke the device.
        """
        config = self._configs.get((grid, block)) or self._configure(grid, block)
        self._enqueue(config, self._converted(args), stream)

    def prepare(self, grid: tuple[int, ...], args: Sequence[Any], device: int, threads: int = 0) -> PreparedLaunch:
        """Return a launch that lacks only its pointers, by default of the threads a block that the compiler fixed.

        Raises LaunchError if an argument or the grid does not fit.
        """
        values = self._converted(args)
        positions = [i for i, convert in enumerate(self._converters) if convert is None]
        return PreparedLaunch(self, self._configure(grid, (threads or self.threads,)), values, positions, device)

    def pack(
        self, grid: tuple[int, int, int], args: Sequence[Any], device: int, together: bool = False
    ) -> PackedLaunch:
        """Return a complete launch of `threads` threads a block; arguments may be structs, as bytes.

        `together`: all blocks must be resident at once since they wait for each other (cooperative launch).
        """
        values = [_in_memory(a) for a in self._converted(args)]
        return PackedLaunch(self, (*grid, self.threads), values, self._shared_bytes, device, "cooperative" * together)

    def point(
        self, grid: tuple[int, int, int], args: Sequence[Any], device: int, threads: int, overlaps: bool = False
    ) -> PointedLaunch:
        """Return a launch that lacks its first few pointers, which change from call to call.

        `overlaps`: as for the class, for this launch.
        """
        values = [_in_memory(a) for a in self._converted(args)]
        shape, how = (*grid, threads), "programmaticStreamSerializationAllowed" * (overlaps or self._overlaps)
        return PointedLaunch(self, shape, values, self._shared_bytes, device, how)

    def _converted(self, args: Sequence[Any]) -> list[Any]:
        try:
            return [
                arg.data_ptr() if convert is None else convert(arg)
                for convert, arg in zip(self._converters, args, strict=True)
            ]
        except (AttributeError, ValueError) as error:
            for position, (kind, arg) in enumerate(zip(self.kinds, args, strict=False)):
                if kind.startswith("*") and not hasattr(arg, "data_ptr"):
                    where = f"kernel {self.name!r}, argument {position}"
                    raise LaunchError(f"{where}: wanted a buffer, got {type(arg).__name__}") from error
            text = f"kernel {self.name!r} takes {len(self.kinds)} arguments, got {len(args)}"
            raise LaunchError(text) from error

    def _enqueue(self, config: Any, values: Sequence[Any], stream: int) -> None:
        if predictions and predicts_here():
            return
        wrapped = _streams.get(stream)
        if wrapped is None:
            wrapped = _streams[stream] = self._wrap_stream(stream)
        if not hasattr(_thread, "ready"):
            make_ready()
        began = time.perf_counter() if launch_log.enabled else 0.0
        try:
            self._launch(wrapped, config, self.core, *values, *self._extra)
        except Exception as error:
            raise cuda_error(str(error), f"kernel {self.name!r}, {config}") from error
        if launch_log.enabled:
            log_launch(self.name, f"cuda:{torch.cuda.current_device()}", config.grid, config.block, began)
        if watched:
            noted()

    def _configure(self, grid: tuple[int, ...], block: tuple[int, ...]) -> Any:
        if any(not 1 <= size <= most for size, most in zip(grid, _LARGEST_GRID, strict=False)):
            raise LaunchError(
                f"kernel {self.name!r}: a grid has 1 to {_LARGEST_GRID} blocks along its axes, got {grid}"
            )
        if len(self._configs) >= _CONFIGS_LIMIT:
            self._configs.clear()
        try:
            config = self._make_config(
                grid=grid, block=block, shmem_size=self._shared_bytes, programmatic_stream_serialization=self._overlaps
            )
        except (TypeError, ValueError, OverflowError) as error:
            raise LaunchError(f"kernel {self.name!r}, grid {grid}, block {block}: {error}") from None
        self._configs[grid, block] = config
        return config


class PreparedLaunch:
    """A launch that lacks only its pointers; see LoadedKernel.prepare."""

    __slots__ = ("_config", "_device", "_kernel", "_positions", "_values")

    def __init__(self, kernel: LoadedKernel, config: Any, values: list[Any], positions: list[int], device: int) -> None:
        self._kernel = kernel
        self._config = config
        self._values = values
        self._positions = positions
        self._device = device

    def start(self, pointers: Sequence[int]) -> None:
        """Launch on the current stream of the kernel's device; errors are those of LoadedKernel.start."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.start(pointers)
            return
        values = self._values.copy()
        for position, pointer in zip(self._positions, pointers, strict=True):
            values[position] = pointer
        self._kernel._enqueue(self._config, values, torch._C._cuda_getCurrentRawStream(self._device))


class PackedLaunch:
    """A complete launch through the driver; see LoadedKernel.pack.

    For kernels that take structs by value, such as tensor maps, which cuda.core's launch does not pass. Threads may
    share it: only its configurations by stream change after construction.
    """

    __slots__ = ("_attribute", "_configs", "_device", "_driver", "_kernel", "_launch", "_shape", "_where")

    def __init__(
        self, kernel: LoadedKernel, shape: tuple[int, int, int, int], values: list[Any], shared_bytes: int, device: int,
        attribute: str,
    ) -> None:  # fmt: skip
        from cuda.bindings import driver

        self._driver = driver
        self._attribute = attribute
        self._configs: dict[int, Any] = {}
        self._where = _Arguments(values)
        self._shape = (driver.CUfunction(int(kernel.core.handle)), *shape, 1, 1, shared_bytes)
        self._kernel = kernel
        self._launch = driver.cuLaunchKernelEx if attribute else driver.cuLaunchKernel
        self._device = device

    def start(self) -> None:
        """Launch on the current stream of the kernel's device; errors are those of LoadedKernel.start."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.start()
            return
        self._enqueue(self._where.address)

    def _enqueue(self, arguments: int) -> None:
        """Launch with the arguments whose addresses are in an array at address `arguments`."""
        if predictions and predicts_here():
            return
        make_ready()
        began = time.perf_counter() if launch_log.enabled else 0.0
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._attribute:
            config = self._configs.get(stream) or self._configure(stream)
            (code,) = self._launch(config, self._shape[0], arguments, 0)
        else:
            (code,) = self._launch(*self._shape, stream, arguments, 0)
        if code:
            raise cuda_error(f"{code.name}".replace("_", " ").lower(), f"kernel {self._kernel.name!r}")
        if launch_log.enabled:
            log_launch(self._kernel.name, f"cuda:{self._device}", self._shape[1:4], self._shape[4:7], began)
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


class PointedLaunch(PackedLaunch):
    """A launch through the driver that lacks its first few pointers; see LoadedKernel.point.

    The driver reads the arguments during the call; each thread has its own memory for them.
    """

    __slots__ = ("_own",)

    def __init__(
        self, kernel: LoadedKernel, shape: tuple[int, int, int, int], values: list[Any], shared_bytes: int, device: int,
        attribute: str,
    ) -> None:  # fmt: skip
        super().__init__(kernel, shape, values, shared_bytes, device, attribute)
        self._own = _ThreadArguments(values)

    def start(self, *pointers: int) -> None:
        """Launch with these as the first arguments; stream and errors as for PackedLaunch.start."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                self.start(*pointers)
            return
        own = self._own.arguments
        for cell, pointer in zip(own.values, pointers, strict=False):
            cell.value = pointer
        self._enqueue(own.address)


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


def _in_memory(value: Any) -> Any:
    return ctypes.c_void_p(value) if isinstance(value, int) else value


def _converter(name: str, position: int, kind: str) -> Callable[[Any], Any] | None:
    """Return the function that converts a number for cuda.core; None for a pointer."""
    if kind.startswith("*"):
        return None
    if kind == "struct":
        return lambda arg: ctypes.create_string_buffer(arg, len(arg))
    ctype = SCALAR_CTYPES.get(kind)
    if ctype is None:
        raise CompileError(f"kernel {name!r}, argument {position}: unknown argument type {kind!r}")

    def convert(arg: Any) -> Any:
        return ctype(check_scalar(name, position, kind, arg))

    return convert
