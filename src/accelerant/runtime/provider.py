"""The interface that a backend implements, and the values that pass through it.

A backend author writes one class in `runtime/providers/`, names it in `registry.py`, and runs `pytest tests/conformance
--backend NAME`. The contract, beyond the signatures:

* The registry makes one provider per process, after `probe()` reported a sound driver. The constructor may start the
  driver; importing the module must not.
* Devices are numbered from 0. A device number that does not exist is a ConfigError (`check_device`).
* `allocate` returns undefined content, aligned to 256 bytes where memory has addresses. A backend whose allocator
  keeps no limit calls `check_limit` first.
* A buffer that was freed, or that another provider allocated, is a LaunchError before the device is used.
* Copies are ordered with launches on the same stream. `copy_to_host` returns when the bytes have arrived.
* `compile` uses the disk cache, under a key of everything that the code depends on, and never leaves a broken entry.
* `launch` checks its arguments before it uses the device, does not wait, and raises LaunchError where nothing ran,
  DeviceLost where the device can no longer be used.
* Grid and block are one to three numbers each. A device without blocks (the CPU) runs the flattened range grid x block
  over its cores; kernels compare their index with the length they are given.
* Methods that several threads may call hold a lock of their own. A lock that `__del__` takes must be reentrant and held
  for nothing else: the garbage collector runs in any thread, also in one that holds it.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
import os
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from accelerant import errors, runtime
from accelerant._renamed import renamed_arguments
from accelerant.errors import BackendUnavailable, ConfigError, DeviceLost, LaunchError, OutOfMemory, ShapeError
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource, Resources, bindings
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.host import fork_safe, has_gpu_node, refuse_masked, run_python

__all__ = [
    "Arguments", "Buffer", "ComputeBackend", "ComputeDevice", "ComputeProvider", "CountedMemory", "Event", "Launches",
    "MemoryCounter", "MemoryInfo", "Pointer", "compile_seconds", "lacks_host_memory", "noted", "self_test_source",
]  # fmt: skip


class ComputeBackend(StrEnum):
    """Accelerant's backends, the preferred first; each is its name, so `ComputeBackend.CUDA == "cuda"`.

    MPS and METAL are Apple's, VULKAN is WebGPU's. Backends of other packages have names alone: see registry.backends().
    """

    CUDA = "cuda"
    ROCM = "rocm"
    APPLE = "apple"
    OPENCL = "opencl"
    WEBGPU = "webgpu"
    CPU = "cpu"
    MPS = METAL = "apple"
    VULKAN = "webgpu"


Pointer = Any
"""A pointer argument: a Buffer, or anything with `data_ptr()` on the device (a torch tensor)."""

Arguments = Sequence[Pointer | int | float]
"""The arguments of a launch."""


@dataclass(frozen=True, slots=True)
class ComputeDevice(JsonRecord):
    """A device, or the absence of one, whose index is -1.

    Attributes:
        name: as its driver reports it.
        available, reason: whether it can be used, and why not.
        memory_bytes: total memory; 0 where unknown.
        architecture: target that kernels are compiled for: "sm_90", "x86_64".
        properties: further figures, as far as the driver has them; `accelerant devices --json` prints them all.
            clock_mhz, memory_clock_mhz: the highest clocks.
            memory_bus_bits, memory_bandwidth_gb_s: width of the memory's bus, and its theoretical peak.
            multiprocessors, warp_size: compute units, and threads that execute together.
            threads_per_block, threads_per_multiprocessor, registers_per_multiprocessor: limits of a launch.
            shared_bytes_per_block, shared_bytes_per_multiprocessor, l2_bytes: on-chip memory.
            dtypes, matrix_dtypes: floating dtypes of the hardware, and operand dtypes of its matrix units.
            pci_address, uuid, mig_profile: identity; the profile of a MIG slice, "1g.18gb".
            kind: "gpu", "cpu", "accelerator" or "custom", of OpenCL and WebGPU.
            driver, driver_version, minimum_driver: newest CUDA of the driver, its version, the oldest that will do.
            cuda, cudnn: versions that torch is built for, and loads.
        torch_type: type of torch device that its tensors have; empty where torch has no tensors on it.
    """

    backend: str
    index: int
    name: str
    available: bool = True
    reason: str = ""
    memory_bytes: int = 0
    architecture: str = ""
    properties: dict[str, Any] = field(default_factory=dict, compare=False)
    torch_type: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """Backend and index: "cuda:0"."""
        return f"{self.backend}:{self.index}"

    @property
    def software(self) -> bool:
        """Whether the host's CPU plays another device's part, as in PoCL and lavapipe: for tests, slower than "cpu"."""
        return self.backend != "cpu" and self.properties.get("kind") == "cpu"

    @property
    def torch_device(self) -> str:
        """The argument for `torch.device`: "cuda:0", "cpu". Empty for an absent device and where torch has none."""
        if not self.available or not self.torch_type:
            return ""
        return self.torch_type if self.torch_type == "cpu" else f"{self.torch_type}:{self.index}"


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device, and this process's part of it.

    Total and free bytes are the device's; the process has allocated bytes in live buffers and tensors, at most
    `peak_bytes` so far, and reserved bytes in its pool, in use or cached.
    """

    total_bytes: int
    free_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    peak_bytes: int


class Buffer:
    """A range of device memory; released by `free`, or when its last reference goes.

    The pointer is an address, or the driver's handle where memory has no addresses. The owner keeps the memory alive.
    """

    __slots__ = ("_pointer", "device", "owner", "size_bytes")

    def __init__(self, pointer: int, size_bytes: int, device: int, owner: object) -> None:
        self._pointer: int | None = pointer
        self.size_bytes = size_bytes
        self.device = device
        self.owner = owner

    def data_ptr(self) -> int:
        """Return the address on the device, or the driver's handle; raise LaunchError if the buffer was freed."""
        if self._pointer is None:
            raise LaunchError(f"{self!r} was freed; it cannot be used any more")
        return self._pointer

    def free(self) -> None:
        """Release the memory now; freeing twice does nothing. Launches under way still finish."""
        self._pointer = self.owner = None

    def __repr__(self) -> str:
        return f"Buffer({self.size_bytes} bytes on device {self.device})"


class MemoryCounter:
    """Bytes that the live buffers of a device take, for allocators that do not count them."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.RLock())  # CountedMemory.__del__ takes it, also in a thread that holds it
        self.allocated_bytes = 0
        self.peak_bytes = 0

    def add(self, size_bytes: int) -> None:
        """Add the bytes of an allocation; negative for a release."""
        with self._lock:
            self.allocated_bytes += size_bytes
            self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)


class CountedMemory:
    """The object that keeps a Buffer's memory alive, counted while it lives; `backend` is its provider's name."""

    __slots__ = ("_counter", "_size_bytes", "backend", "memory")

    def __init__(self, backend: str, counter: MemoryCounter, memory: Any, size_bytes: int) -> None:
        self.backend, self._counter, self.memory, self._size_bytes = backend, counter, memory, size_bytes
        counter.add(size_bytes)

    def __del__(self) -> None:
        self._counter.add(-self._size_bytes)


class Event(ABC):
    """A mark on a stream, made by `Stream.record` and `ComputeProvider.record_event`; two time the work between."""

    __slots__ = ()

    @abstractmethod
    def done(self) -> bool:
        """Return whether the device has passed the mark; does not wait."""

    @abstractmethod
    def elapsed_ms(self, later: Event) -> float:
        """Return the milliseconds from this mark to a later one of its kind; both must be done."""

    @renamed_arguments(timeout_s="timeout")
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait on the host until the device has passed the mark, at most `timeout` seconds.

        Raises TimeLimitExceeded, or DeviceLost.
        """
        check_timeout(timeout)
        self._wait(timeout)

    def _wait(self, timeout: float | None) -> None:
        began = time.perf_counter()
        while not self.done():
            waited = time.perf_counter() - began
            if timeout is not None and waited > timeout:
                raise errors.TimeLimitExceeded(f"the device's work was not done within {timeout} s")
            time.sleep(poll_pause_s(waited))

    def same_kind(self, later: Event) -> Self:
        """Return the other event of a comparison; TypeError for that of another backend."""
        if not isinstance(later, type(self)):
            raise TypeError(f"{self!r} cannot be compared with {later!r}")
        return later

    def __repr__(self) -> str:
        return f"{type(self).__name__.strip('_')}({'done' if self.done() else 'pending'})"


def check_timeout(seconds: float | None) -> None:
    """Raise ConfigError for a `timeout` that is no time."""
    if seconds is not None and not seconds >= 0:
        raise ConfigError(f"timeout must be 0 or more, or None for no limit; got {seconds}")


def poll_pause_s(waited_s: float) -> float:
    """Return the pause before the next poll: 5% of the wait so far, from 50 us to 10 ms."""
    return min(10e-3, max(50e-6, 0.05 * waited_s))


_REFUSED = (
    "devices", "allocate", "copy_to_device", "copy_to_host", "compile", "launch", "synchronize", "memory", "trim",
)  # fmt: skip
"""Methods of a provider that raise after shutdown(). Marks do not: torch's own work on tensors goes on."""

_ProviderT = TypeVar("_ProviderT", bound="ComputeProvider")


class ComputeProvider(ABC):
    """One backend. The module's docstring is the contract.

    Every operation of Accelerator is a method, on arrays of any library, without fallback to another device:
    `provider.field_add(x, y, field="goldilocks")`, `provider.msm(scalars, points)`, `provider.gelu(x)`.

    Attributes:
        dialects: kernel dialects it compiles, the preferred first. Empty for a backend without kernels of Accelerant,
            where torch's own operations run.
        torch_type: type of `torch.device` whose calls this provider serves; empty for none.
        automatic: whether the automatic choice of a backend considers it: every op must run on its tensors.
        automatic_kinds: values of a device's property "kind" that the automatic choice takes; empty for any.
    """

    name: ClassVar[str]
    dialects: ClassVar[tuple[str, ...]] = ()
    torch_type: ClassVar[str] = ""
    automatic: ClassVar[bool] = False
    automatic_kinds: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def probe(cls) -> str:
        """Return why this backend cannot be used here; empty if it can. Starts no driver in this process."""

    @classmethod
    def may_have_hardware(cls) -> bool:
        """Return, in microseconds, whether the automatic choice is to probe this backend."""
        return True

    # --- from start to shutdown --------------------------------------------------------------------------------------
    @property
    def running(self) -> bool:
        """Whether the provider may be used: from its construction or start() to shutdown()."""
        return "launch" not in vars(self)

    def start(self: _ProviderT) -> _ProviderT:
        """Make the provider usable again after shutdown(), and return it; does nothing while it is running."""
        for name in _REFUSED:
            vars(self).pop(name, None)
        return self

    def shutdown(self) -> None:
        """Wait for the devices, return unused memory to them, and refuse every use until start(); idempotent.

        Buffers and kernels stay valid for the time after start(). Torch's own operations on tensors go on. Raises
        DeviceLost, and is shut down all the same, if a kernel broke a device.
        """
        if not self.running:
            return
        try:
            for device in self._in_use():
                self.synchronize(device)
                self.trim(device)
        finally:
            # Methods of the object hide those of its class, so that a running provider checks nothing.
            vars(self).update(dict.fromkeys(_REFUSED, self._refuse))

    def __enter__(self: _ProviderT) -> _ProviderT:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {'running' if self.running else 'shut down'})"

    def check_running(self) -> None:
        """Raise BackendUnavailable after shutdown()."""
        if not self.running:
            self._refuse()

    def _in_use(self) -> Iterable[int]:
        return range(len(self.devices()))

    def _refuse(self, *args: object, **options: object) -> Any:
        raise BackendUnavailable(self.name, "its provider was shut down; provider.start() starts it again")

    # --- devices and memory ------------------------------------------------------------------------------------------
    @abstractmethod
    def devices(self) -> list[ComputeDevice]:
        """Return the devices, by index."""

    @abstractmethod
    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        """Allocate device memory with undefined content.

        Raises:
            ShapeError: a negative size.
            ConfigError: no device has that number.
            OutOfMemory: with the size asked for and the size free.
        """

    def copy_to_device(self, array: npt.ArrayLike, device: int = 0, *, out: Buffer | None = None) -> Buffer:
        """Copy the bytes of anything NumPy reads, in C order, to `out` or to a new buffer on the device.

        Raises:
            ShapeError: `out` is smaller than the array.
            LaunchError: `out` was freed, or another provider allocated it.
        """
        refuse_masked(array, "array")
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if out is not None and out.size_bytes < flat.nbytes:
            raise ShapeError(f"a buffer of {out.size_bytes} bytes cannot take an array of {flat.nbytes}")
        buffer = self.allocate(flat.nbytes, device) if out is None else out
        self._write(buffer, flat)
        return buffer

    def copy_to_host(self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        """Copy the buffer's first elements to a new NumPy array; waits for them.

        Raises:
            ShapeError: the buffer is smaller than that.
            LaunchError: it was freed, or another provider allocated it.
        """
        if min(shape, default=0) < 0:
            raise ShapeError(f"a buffer cannot be read as {tuple(shape)}: sizes must be 0 or more")
        size = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=object))
        if size > buffer.size_bytes:
            raise ShapeError(f"{tuple(shape)} of {np.dtype(dtype)} is {size} bytes; the buffer has {buffer.size_bytes}")
        array = np.empty(tuple(shape), dtype)  # NumPy asks for huge pages: the first touch is ten times quicker
        self._read(buffer, array.reshape(-1).view(np.uint8))
        return array

    def zeros(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32, device: int = 0) -> Buffer:
        """Return a new buffer with the bytes of np.zeros(shape, dtype); raises as copy_to_device does."""
        return self._filled(0, shape, dtype, device)

    def ones(self, shape: int | Sequence[int], dtype: npt.DTypeLike = np.float32, device: int = 0) -> Buffer:
        """Return a new buffer with the bytes of np.ones(shape, dtype); raises as copy_to_device does."""
        return self._filled(1, shape, dtype, device)

    def _filled(self, value: int, shape: int | Sequence[int], dtype: npt.DTypeLike, device: int) -> Buffer:
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if min(sizes, default=0) < 0:
            raise ShapeError(f"a buffer cannot have the shape {sizes}: sizes must be 0 or more")
        return self.copy_to_device(np.full(sizes, value, dtype), device)

    @abstractmethod
    def _write(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        """Copy bytes to the beginning of a buffer, which is large enough, once its owner is checked."""

    @abstractmethod
    def _read(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        """Copy bytes from the beginning of a buffer, which is large enough, once its owner is checked."""

    @abstractmethod
    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        """Compile a kernel for a device's architecture, or load it from the disk cache.

        `entry`, the entry point, is optional if there is only one. Raises CompileError with the compiler's log.
        """

    @abstractmethod
    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Arguments, stream: object | None = None
    ) -> None:
        """Start a kernel from `compile` of this provider; does not wait for it.

        Grid and block, blocks and threads a block, are one to three numbers of at least 1 each. The arguments are of
        the types in kernel.arguments. The stream is the backend's current one by default.

        Raises:
            LaunchError: nothing ran.
            DeviceLost: an earlier kernel broke the device for this process.
        """

    def has_custom_kernels(self) -> bool:
        """Return whether Accelerant's and users' kernels run here; without them, torch's operations do."""
        return bool(self.dialects)

    def execute_kernel(
        self, kernel: str | KernelSource | Kernel, *args: Any, grid: Sequence[int] = (), block: Sequence[int] = (),
        entry: str | None = None, device: int = 0, **options: Any,
    ) -> Any:  # fmt: skip
        """Run an operation of Accelerator by its name, or a kernel of the caller's, on a device of this provider.

        >>> provider.execute_kernel("field_add", x, y, field="goldilocks")              # arrays in, the sum out
        >>> provider.execute_kernel(source, a, b, out, n, grid=(4,), block=(256,))      # buffers; None

        An operation takes and returns arrays of any library, waits for what the library waits for, and has `options`
        of its own. A KernelSource is compiled by compile(), which keeps it on disk; `entry` is its entry point. Like a
        compiled Kernel it is launched with launch(), and its arguments are those of launch().

        Raises:
            ConfigError: no operation has that name, or options that the kernel does not take.
            UnsupportedCase: this backend does not have the operation.
        """
        if isinstance(kernel, str):
            if grid or block or entry is not None:
                raise ConfigError(f"operation {kernel!r} chooses its grid, block and entry point itself")
            return self._operation(kernel, device)(*args, **options)
        if options:
            raise ConfigError(f"kernel {kernel.name!r} takes no option {', '.join(options)}")
        if isinstance(kernel, KernelSource):
            kernel = self.compile(kernel, entry=entry, device=device)
        self.launch(kernel, grid, block, args)
        return None

    def _operation(self, name: str, device: int) -> Any:
        """Return an operation as a function of arrays, on a device of this provider."""
        made: dict[int, Any] = vars(self).setdefault("_accelerators", {})
        if device not in made:
            made[device] = runtime.accelerator_on(self.name, device)
        if made[device].provider is not self:
            del made[device]
            raise ConfigError(f"this provider is not the registry's for {self.name!r}: registry.register(it) first")
        if name not in made[device].operations:
            known = ", ".join(sorted(made[device].operations))
            raise ConfigError(f"there is no operation {name!r}; there are {known}")
        return getattr(made[device], name)

    if not TYPE_CHECKING:  # a type checker reports what is no method

        def __getattr__(self, name: str) -> Any:
            """Return an operation, which becomes an attribute of this provider."""
            if name.startswith("_"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            try:
                on_first_device = self._operation(name, 0)
            except ConfigError as error:
                raise AttributeError(str(error)) from None

            @wraps(on_first_device)
            def run(*args: Any, **options: Any) -> Any:
                return self.execute_kernel(name, *args, **options) if options else on_first_device(*args)

            vars(self)[name] = run
            return run

    @abstractmethod
    def synchronize(self, device: int = 0) -> None:
        """Wait until everything launched on the device is done; raise DeviceLost if a kernel broke it."""

    @abstractmethod
    def memory(self, device: int = 0) -> MemoryInfo:
        """Return the current state of the device's memory."""

    @abstractmethod
    def record_event(self, device: int = 0) -> Event | None:
        """Mark the current stream; None where no mark may be made now (a graph is being captured)."""

    def describe(
        self, source: KernelSource, entry: str, binary: Binary, target: str, *, began_s: float, from_cache: bool,
        handle: Any, device: int = 0, resources: Resources | None = None, **metadata: Any,
    ) -> Kernel:  # fmt: skip
        """Return a Kernel for `compile`, which began at time.perf_counter() `began_s`."""
        took_s = time.perf_counter() - began_s
        _compiled.seconds = compile_seconds() + took_s
        return Kernel(
            name=entry, backend=self.name, device=device, target=target, arguments=source.entries[entry],
            resources=resources or binary.resources.get(entry, Resources()),
            compile_ms=took_s * 1e3, from_cache=from_cache,
            metadata={**binary.metadata, **metadata}, handle=handle,
        )  # fmt: skip

    def self_test(self, device: int = 0) -> str | None:
        """Return what is wrong with a device; empty if copies and a small kernel give the right numbers.

        The automatic choice asks once a process, and sets a device aside for what this returns or raises. None
        postpones it.
        """
        x = np.arange(_SELF_TEST_SIZE, dtype=np.uint32)
        buffer = self.copy_to_device(x, device)
        source, expected = self_test_source(), x * np.uint32(_SELF_TEST_FACTOR)
        if set(self.dialects).isdisjoint(source.dialects):
            expected = x
        else:
            kernel = self.compile(source, device=device)
            self.launch(kernel, (-(-x.size // 64),), (64,), (buffer, x.size))
            self.synchronize(device)
        wrong = np.flatnonzero(self.copy_to_host(buffer, np.uint32, x.shape) != expected)
        return f"{wrong.size} of {x.size} numbers are wrong" if wrong.size else ""

    def lost(self, error: Exception) -> DeviceLost | None:
        """Return the error as DeviceLost if this process can no longer use the device after it."""
        return None

    def trim(self, device: int = 0) -> None:
        """Return the pool's unused memory to the device; does nothing where there is no pool."""
        return

    def limit_fraction(self, fraction: float, device: ComputeDevice) -> None:
        """Let this process allocate at most a fraction of a device's memory; 1 lifts the limit."""
        key = (device.backend, device.index)
        with _limits_lock:
            limits = allocation_limits.setdefault(key, [])
            limits[:1] = [int(device.memory_bytes * fraction) if fraction < 1.0 else device.memory_bytes]
            _drop_unlimited(device)

    def free_fraction(self, device: ComputeDevice) -> float:
        """Return the share of a device's memory that memory_fraction="auto" allows this process; see room_fraction."""
        info = self.memory(device.index)
        return room_fraction(info.total_bytes, info.free_bytes, info.reserved_bytes)

    def hidden_devices(self) -> list[ComputeDevice]:
        """Return devices of the machine that this process does not see, as absent ones with the reason."""
        return []

    def check_limit(self, size_bytes: int, device: int = 0) -> None:
        """Raise OutOfMemory for an allocation that would pass a limit, ShapeError for a negative size."""
        if size_bytes < 0:
            raise ShapeError(f"cannot allocate {size_bytes} bytes")
        if not (limits := allocation_limits.get((self.name, device))):
            return
        held = self.memory(device).allocated_bytes
        if held + size_bytes > min(limits):
            with _limits_lock:
                allocation_failures.setdefault((self.name, device), [0, 0])[0] += 1
            bounds = f"{held:,} are held and the limit is {min(limits):,}"
            raise OutOfMemory(f"{size_bytes:,} bytes asked on {self.name}:{device}; {bounds}")


_LEFT_FREE = 0.05
"""Share of the free memory that the automatic fraction leaves to others, which grow, and to contexts and libraries."""


def room_fraction(total_bytes: int, free_bytes: int, own_bytes: int) -> float:
    """Return a process's share of a device's memory: 95 % of what others leave, at least 1 %."""
    if total_bytes <= 0:
        return 1.0
    return min(1.0, max(0.01, (1 - _LEFT_FREE) * (free_bytes + own_bytes) / total_bytes))


_limits_lock = fork_safe(threading.Lock())

allocation_limits: dict[tuple[str, int], list[int]] = {}
"""Backend and index -> limits on the bytes that its provider may have allocated: the process's, then those of blocks of
code. Torch's CUDA allocator keeps its own."""

allocation_failures: dict[tuple[str, int], list[int]] = {}
"""Backend and index -> failed and repeated allocations, where the allocator does not count them."""


@contextmanager
def allocation_limit(device: ComputeDevice, limit_bytes: int) -> Iterator[None]:
    """Limit what a device's provider may have allocated inside a block of code."""
    key = (device.backend, device.index)
    with _limits_lock:
        allocation_limits.setdefault(key, [device.memory_bytes]).append(limit_bytes)
    try:
        yield
    finally:
        with _limits_lock:
            allocation_limits[key].remove(limit_bytes)
            _drop_unlimited(device)


def _drop_unlimited(device: ComputeDevice) -> None:
    key = (device.backend, device.index)
    if allocation_limits[key] == [device.memory_bytes]:
        del allocation_limits[key]


_SELF_TEST_SIZE, _SELF_TEST_FACTOR = 1000, 2654435761


def self_test_source() -> KernelSource:
    """Return the kernel of ComputeProvider.self_test: x[i] *= 2654435761 for i < n, modulo 2^32."""
    portable = (
        "ACL_KERNEL void self_test(ACL_GLOBAL u32 *x, i64 n) {\n"
        "    i64 i = acl_global_id();\n"
        f"    if (i < n) x[i] *= {_SELF_TEST_FACTOR}u;\n}}\n"
    )
    wgsl = (
        bindings({"x": "u32"}, {"n": "i64"}) + "@compute @workgroup_size(BLOCK_X)\n"
        "fn self_test(@builtin(global_invocation_id) id: vec3<u32>) {\n"
        f"    if (i32(id.x) < scalars.n) {{ x[id.x] *= {_SELF_TEST_FACTOR}u; }}\n}}\n"
    )
    return KernelSource("self_test", {"portable": portable, "wgsl": wgsl}, {"self_test": ("*u32", "i64")})


# --- launches: the log, and counts ----------------------------------------------------------------------------------
_launch_logger = logging.getLogger("accelerant.launch")


def log_launch(kernel: str, device: str, grid: Sequence[int], block: Sequence[int], began_s: float) -> None:
    """Log a launch, begun at time.perf_counter(), at the level "debug"; called where config.launch_log is enabled."""
    host_us = (time.perf_counter() - began_s) * 1e6
    _launch_logger.debug("%s on %s: grid %s, block %s, %.1f us on the host", kernel, device, grid, block, host_us)


_compiled = threading.local()


def compile_seconds() -> float:
    """Return how long this thread has compiled kernels, or loaded them from the disk cache, since its start."""
    seconds: float = getattr(_compiled, "seconds", 0.0)
    return seconds


class Launches:
    """The kernels of ours that a thread launches inside a `with` block; `count` has those that the device accepted."""

    def __init__(self) -> None:
        self.count, self._thread = 0, threading.get_ident()

    def __bool__(self) -> bool:
        return self.count > 0

    def __enter__(self) -> Self:
        watched.setdefault(self._thread, []).append(self)
        return self

    def __exit__(self, *_: object) -> None:
        watchers = watched[self._thread]
        watchers.remove(self)
        if not watchers:
            del watched[self._thread]


watched: dict[int, list[Launches]] = {}
"""Watchers by thread. While there are any, launchers call `noted` after each launch that the device accepted."""


def noted() -> None:
    """Count a launch of this thread."""
    for counter in watched.get(threading.get_ident(), ()):
        counter.count += 1


# --- checks shared by the providers ----------------------------------------------------------------------------------
SCALAR_CTYPES: dict[str, Any] = {
    "i8": ctypes.c_int8, "u8": ctypes.c_uint8, "i16": ctypes.c_int16, "u16": ctypes.c_uint16, "bool": ctypes.c_bool,
    "i32": ctypes.c_int32, "u32": ctypes.c_uint32, "i64": ctypes.c_int64, "u64": ctypes.c_uint64, "f32": ctypes.c_float,
    "f64": ctypes.c_double,
}  # fmt: skip
"""Scalar type of KernelSource.entries -> its C type."""

_INTEGER_RANGES = {"bool": (0, 2), **{f"u{bits}": (0, 2**bits) for bits in (8, 16, 32, 64)}}
_INTEGER_RANGES |= {f"i{bits}": (-(2 ** (bits - 1)), 2 ** (bits - 1)) for bits in (8, 16, 32, 64)}


def probe_in_child(program: str, driver: str, timeout_s: float) -> str:
    """Run a Python program that tests a driver in a child process; return why it fails, else ""."""
    try:
        done = run_python(program, timeout_s=timeout_s)
    except subprocess.TimeoutExpired:
        return f"{driver} did not answer within {timeout_s} s"
    if done.returncode < 0:
        return f"{driver} crashed its process with signal {-done.returncode}"
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"{driver} does not start"])[-1]
    return ""


def pick_entry(source: KernelSource, entry: str | None) -> str:
    """Return the entry point to compile, its argument types checked; raise LaunchError or CompileError."""
    if entry is None and len(source.entries) == 1:
        entry = next(iter(source.entries))
    if entry is None or entry not in source.entries:
        raise LaunchError(f"kernel source {source.name!r} has the entries {', '.join(source.entries)}; got {entry!r}")
    for position, kind in enumerate(source.entries[entry]):
        if not kind.startswith("*") and kind not in (*SCALAR_CTYPES, "struct"):
            raise errors.CompileError(f"kernel {entry!r}, argument {position}: unknown argument type {kind!r}")
    return entry


def check_launch(
    kernel: Kernel, provider: str, grid: Sequence[int], block: Sequence[int], args: Sequence[object]
) -> None:
    """Check the backend, grid, block and number of arguments of a launch; raise LaunchError."""
    if kernel.backend != provider:
        raise LaunchError(f"kernel {kernel.name!r} was compiled for {kernel.backend}, launched on {provider}")
    for name, sizes in (("grid", grid), ("block", block)):
        if not 1 <= len(sizes) <= 3 or min(sizes) < 1:
            raise LaunchError(f"{name} must be one to three numbers of at least 1, got {tuple(sizes)}")
    if len(args) != len(kernel.arguments):
        raise LaunchError(f"kernel {kernel.name!r} takes {len(kernel.arguments)} arguments, got {len(args)}")


def check_range(kernel: Kernel, asked: int, limit: int, what: str) -> None:
    """Raise LaunchError where a launch has as many indices as its numbers cannot hold: they would wrap around."""
    if asked >= limit:
        raise LaunchError(f"kernel {kernel.name!r}: a launch has fewer than {limit:,} {what}, got {asked:,}")


def check_scalar(name: str, position: int, kind: str, arg: object) -> int | float:
    """Return a scalar argument as a plain number of the declared type; raise LaunchError if it does not fit."""
    if kind in _INTEGER_RANGES:
        low, high = _INTEGER_RANGES[kind]
        if isinstance(arg, (int, np.integer)) and low <= arg < high:
            return int(arg)
    elif isinstance(arg, (int, float, np.number)):
        return float(arg)
    raise LaunchError(f"kernel {name!r}, argument {position}: wanted {kind}, got {arg!r}")


def check_device(backend: str, index: int, count: int) -> None:
    """Raise ConfigError, which names the range, for a device number that does not exist."""
    if not 0 <= index < count:
        present = {0: "no device", 1: "one device, number 0"}.get(count, f"devices 0 to {count - 1}")
        raise ConfigError(f"backend {backend!r} has {present}; got device {index}")


def refuse_forked(pid: int, device: str, backend: str) -> None:
    """Raise DeviceLost in a forked child of the process that opened a device: it has none of the driver's threads."""
    if os.getpid() != pid:
        raise DeviceLost(
            f"{device}: this process was forked after {backend} had started, and its drivers do not work in a forked "
            "child; start the process by spawn (multiprocessing.get_context('spawn'))"
        )


_Owner = TypeVar("_Owner")


def check_owner(buffer: Buffer, owner: type[_Owner], backend: str, where: str) -> _Owner:
    """Return the owner of a buffer's memory; raise LaunchError if it was freed, or another provider allocated it."""
    buffer.data_ptr()  # raises if it was freed
    if not isinstance(buffer.owner, owner) or getattr(buffer.owner, "backend", backend) != backend:
        raise LaunchError(f"{where}: {buffer!r} was not allocated by the {backend} backend")
    return buffer.owner


def lacks_host_memory(error: BaseException) -> bool:
    """Return whether an error of Python, NumPy or torch reports that the host's memory is exhausted, not a device's."""
    if isinstance(error, MemoryError):
        return not isinstance(error, OutOfMemory)
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def out_of_memory(size_bytes: int, device: str, memory: MemoryInfo) -> OutOfMemory:
    """Return the error for a failed allocation."""
    return OutOfMemory(
        f"{size_bytes:,} bytes asked on {device}; {memory.free_bytes:,} of {memory.total_bytes:,} free, "
        f"{memory.allocated_bytes:,} held by this process"
    )


class DriverProvider(ComputeProvider):
    """Devices of every driver of a library; `probing` opens each in a child, since a broken driver ends its process."""

    automatic: ClassVar[bool] = True
    automatic_kinds: ClassVar[tuple[str, ...]] = ("gpu",)
    library: ClassVar[str]
    probing: ClassVar[str]
    driver: ClassVar[str]
    standard: ClassVar[str]

    @classmethod
    def probe(cls) -> str:
        if importlib.util.find_spec(cls.library) is None:
            return f"{cls.library} is not installed: pip install 'accelerant[{cls.name}]'"
        return probe_in_child(cls.probing, cls.driver, timeout_s=60)

    @classmethod
    def may_have_hardware(cls) -> bool:
        return has_gpu_node()

    def __init__(self, opened: Sequence[Any]) -> None:
        """Keep the opened devices: each has a `counter`, `memory_bytes`, `reserved_bytes`, `described` and `trim`."""
        self._devices = opened
        self._pid = os.getpid()

    def devices(self) -> list[ComputeDevice]:
        return [opened.described(index) for index, opened in enumerate(self._devices)]

    def memory(self, device: int = 0) -> MemoryInfo:
        opened = self._device(device)
        total, reserved = opened.memory_bytes, opened.reserved_bytes()
        held, peak = opened.counter.allocated_bytes, opened.counter.peak_bytes
        return MemoryInfo(total, max(0, total - reserved), held, reserved, peak)

    def trim(self, device: int = 0) -> None:
        self._device(device).trim()

    def _device(self, device: int) -> Any:
        """Return a device, in the process that opened it: a forked child has none of its driver's threads."""
        refuse_forked(self._pid, f"{self.name}:{device}", self.standard)
        check_device(self.name, device, len(self._devices))
        return self._devices[device]
