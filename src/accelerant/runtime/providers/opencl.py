"""OpenCL 1.2 and newer through pyopencl: the portable C kernels on any vendor's device, and on the CPU with PoCL."""

from __future__ import annotations

import atexit
import itertools
import os
import re
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accelerant.config import launch_log
from accelerant.errors import CompileError, DeviceLost, LaunchError
from accelerant.runtime import provider
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import (
    Binary,
    Kernel,
    KernelSource,
    Resources,
    header_hashes,
    portable_header,
)
from accelerant.runtime.files import remove_folder_of
from accelerant.runtime.host import fork_safe
from accelerant.runtime.monitoring.monitor import publish
from accelerant.runtime.provider import Buffer, ComputeDevice, CountedMemory, DriverProvider, Event

_PROBE = """
import os, sys, tempfile
private = tempfile.TemporaryDirectory()  # PoCL shows no device where it cannot write its cache, in the user's folder
os.environ.setdefault("POCL_CACHE_DIR", private.name)
try:
    import pyopencl
    devices = [device for platform in pyopencl.get_platforms() for device in platform.get_devices()]
except Exception as error:
    sys.exit("no OpenCL driver answers: " + str(error))
if not devices:
    sys.exit("no OpenCL driver shows a device")
"""
_OPTIONS = ("-cl-std=CL1.2",)
_SCALARS = {kind: np.dtype(ctype).type for kind, ctype in provider.SCALAR_CTYPES.items()}


class _ClEvent(Event):
    __slots__ = ("mark",)

    def __init__(self, mark: Any) -> None:
        self.mark = mark

    def done(self) -> bool:
        import pyopencl as cl

        return bool(self.mark.command_execution_status == cl.command_execution_status.COMPLETE)

    def elapsed_ms(self, later: Event) -> float:
        return float(self.same_kind(later).mark.profile.end - self.mark.profile.end) / 1e6


class OpenclProvider(DriverProvider):
    """Devices of every OpenCL driver."""

    name: ClassVar[str] = "opencl"
    dialects: ClassVar[tuple[str, ...]] = ("opencl", "portable")
    torch_type: ClassVar[str] = "opencl"
    library: ClassVar[str] = "pyopencl"
    probing: ClassVar[str] = _PROBE
    driver: ClassVar[str] = "an OpenCL driver"
    standard: ClassVar[str] = "OpenCL"

    def __init__(self) -> None:
        os.environ.setdefault("PYOPENCL_NO_CACHE", "1")  # the kernel cache keeps the programs
        # else PoCL compiles a kernel again in its first launch, by a thread that may still run when the process ends
        os.environ.setdefault("POCL_WORK_GROUP_SPECIALIZATION", "0")
        if "POCL_CACHE_DIR" not in os.environ:  # processes that share PoCL's cache can disturb one another
            private = tempfile.mkdtemp(prefix="accelerant-pocl-")
            os.environ["POCL_CACHE_DIR"] = private
            atexit.register(remove_folder_of, os.getpid(), private)
        import pyopencl as cl

        warnings.filterwarnings("ignore", category=cl.CompilerWarning)  # the log is in the kernel's report
        self._cl = cl
        devices = (device for platform in cl.get_platforms() for device in platform.get_devices())
        super().__init__([_OpenclDevice(cl, device) for device in devices])
        self._lock = fork_safe(threading.Lock())

    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        opened = self._device(device)
        self.check_limit(size_bytes, device)
        try:
            if size_bytes > opened.device.max_mem_alloc_size:
                raise self._cl.MemoryError
            pooled = CountedMemory(self.name, opened.counter, opened.pool.allocate(max(1, size_bytes)), size_bytes)
        except (self._cl.Error, MemoryError, OverflowError):
            raise provider.out_of_memory(size_bytes, f"opencl:{device}", self.memory(device)) from None
        return Buffer(pooled.memory.int_ptr, size_bytes, device, pooled)

    def _write(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        memory = _memory(buffer, "out")
        if content.nbytes:
            self._cl.enqueue_copy(self._device(buffer.device).queue, memory, content, is_blocking=True)

    def _read(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        memory = _memory(buffer, "buffer")
        if content.nbytes:
            self._cl.enqueue_copy(self._device(buffer.device).queue, content, memory, is_blocking=True)

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        opened = self._device(device)
        entry = provider.pick_entry(source, entry)
        began = time.perf_counter()
        dialect, program = source.pick(self.dialects)[0], source.text(self.dialects, "OpenCL")
        text, options = self._prepare(opened, source, program, portable_header() if dialect == "portable" else "")
        key = kernel_key(
            program=text, entries=sorted(source.entries), options=options, target=opened.identity,
            headers=header_hashes(program, source.compile_options.folders),
        )  # fmt: skip
        report = {"name": source.name, "target": opened.device.name.strip(), "compiler": opened.identity}
        cache = KernelCache()
        binary, from_cache = cache.get_or_build(key, lambda: self._build(opened, source, text, options), **report)
        try:
            loaded = self._load(opened, binary, entry)
        except self._cl.Error as error:
            if not from_cache:
                text = f"kernel {entry!r} does not load; is it a function of OpenCL itself, or absent?"
                raise CompileError(text, str(error)) from None
            cache.remove(key)  # the driver no longer accepts its own binary
            binary, from_cache = cache.get_or_build(key, lambda: self._build(opened, source, text, options), **report)
            loaded = self._load(opened, binary, entry)
        info = self._cl.kernel_work_group_info
        resources = Resources(
            shared_bytes=loaded.get_work_group_info(info.LOCAL_MEM_SIZE, opened.device),
            stack_bytes=loaded.get_work_group_info(info.PRIVATE_MEM_SIZE, opened.device),
        )
        return self.describe(
            source, entry, binary, report["target"], began_s=began, from_cache=from_cache, handle=loaded, device=device,
            resources=resources,
        )  # fmt: skip

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        block: Sequence[int],
        args: provider.Arguments,
        stream: object | None = None,
    ) -> None:
        provider.check_launch(kernel, self.name, grid, block, args)
        values = [
            _memory(arg, f"kernel {kernel.name!r}, argument {i}")
            if kind.startswith("*")
            else _SCALARS[kind](provider.check_scalar(kernel.name, i, kind, arg))
            for i, (kind, arg) in enumerate(zip(kernel.arguments, args, strict=True))
        ]
        axes = list(itertools.zip_longest(grid, block, fillvalue=1))
        sizes, threads = [blocks * width for blocks, width in axes], [width for _, width in axes]
        provider.check_range(kernel, max(sizes), 2**31, "threads along an axis")
        opened = self._device(kernel.device)
        queue = stream if stream is not None else opened.queue
        began = time.perf_counter() if launch_log.enabled else 0.0
        try:
            with self._lock:  # a kernel object holds its arguments until it is enqueued
                kernel.handle.set_args(*values)
                self._cl.enqueue_nd_range_kernel(queue, kernel.handle, sizes, threads)
            opened.queue.flush()
        except self._cl.Error as error:
            raise _as_error(error, f"kernel {kernel.name!r}, grid {tuple(grid)}, block {tuple(block)}") from error
        if launch_log.enabled:
            provider.log_launch(kernel.name, f"opencl:{kernel.device}", grid, block, began)

    def synchronize(self, device: int = 0) -> None:
        queue = self._device(device).queue
        try:
            queue.finish()
        except self._cl.Error as error:
            raise _as_error(error, f"opencl:{device}") from error

    def record_event(self, device: int = 0) -> Event:
        queue = self._device(device).queue
        mark = self._cl.enqueue_marker(queue)
        queue.flush()  # or it stays in the queue until another call flushes
        return _ClEvent(mark)

    def _prepare(self, opened: _OpenclDevice, source: KernelSource, program: str, header: str) -> tuple[str, list[str]]:
        lines, chosen = source.compile_options.for_opencl()
        if source.shared_bytes:
            raise CompileError(f"kernel {source.name!r}: OpenCL has no dynamic shared memory; declare it in the kernel")
        precise = self._cl.device_fp_config.CORRECTLY_ROUNDED_DIVIDE_SQRT
        if any("correctly-rounded" in option for option in chosen) and not opened.device.single_fp_config & precise:
            raise CompileError(f"prec_div, prec_sqrt: {opened.device.name.strip()} has no correctly rounded division")
        head = f"{lines}{header}\n#line 1\n" if lines or header else ""
        return head + program, [*_OPTIONS, *chosen, *source.raw_options]

    def _build(self, opened: _OpenclDevice, source: KernelSource, text: str, options: list[str]) -> Binary:
        program = self._cl.Program(opened.context, text)
        try:
            built = program.build(options=options, devices=[opened.device])
        except self._cl.Error as error:
            name = opened.device.name.strip()
            raise CompileError(f"kernel {source.name!r} does not compile for {name}", str(error)) from None
        (code,) = built.get_info(self._cl.program_info.BINARIES)
        log = built.get_build_info(opened.device, self._cl.program_build_info.LOG) or ""
        return Binary.of(code, source.entries, log)

    def _load(self, opened: _OpenclDevice, binary: Binary, entry: str) -> Any:
        program = self._cl.Program(opened.context, [opened.device], [binary.code]).build()
        return self._cl.Kernel(program, binary.symbols[entry])


class _OpenclDevice:
    """A device with its context, queue and pool."""

    def __init__(self, cl: Any, device: Any) -> None:
        from pyopencl.tools import ImmediateAllocator, MemoryPool

        self.device = device
        self.context = cl.Context([device])
        self.queue = cl.CommandQueue(self.context, properties=cl.command_queue_properties.PROFILING_ENABLE)
        self.pool = MemoryPool(ImmediateAllocator(self.queue))
        self.identity = " ".join((device.platform.version, device.name, device.driver_version))
        self.counter = provider.MemoryCounter()
        self.memory_bytes = int(device.global_mem_size)
        self._types = cl.device_type

    def described(self, index: int) -> ComputeDevice:
        device, types = self.device, self._types
        kinds = {"gpu": types.GPU, "cpu": types.CPU, "accelerator": types.ACCELERATOR}
        names = device.extensions.split()
        return ComputeDevice(
            backend="opencl",
            index=index,
            name=device.name.strip(),
            memory_bytes=self.memory_bytes,
            architecture=device.version.strip(),
            properties={
                "kind": next((name for name, bit in kinds.items() if device.type & bit), "custom"),
                "platform": device.platform.version.strip(),
                "driver": device.driver_version.strip(),
                "multiprocessors": device.max_compute_units,
                "clock_mhz": device.max_clock_frequency,
                "threads_per_block": device.max_work_group_size,
                "shared_bytes_per_block": device.local_mem_size,
                "dtypes": [*["float64"] * ("cl_khr_fp64" in names), "float32", *["float16"] * ("cl_khr_fp16" in names)],
            },
        )

    def reserved_bytes(self) -> int:
        return int(self.pool.managed_bytes)

    def trim(self) -> None:
        self.pool.free_held()


def _memory(buffer: provider.Pointer, where: str) -> Any:
    if not isinstance(buffer, Buffer):
        raise LaunchError(f"{where}: wanted a buffer, got {type(buffer).__name__}")
    return provider.check_owner(buffer, CountedMemory, "opencl", where).memory


_LOST = re.compile(r"DEVICE_NOT_AVAILABLE|OUT_OF_HOST_MEMORY|INVALID_COMMAND_QUEUE", re.IGNORECASE)


def _as_error(error: Exception, what: str) -> Exception:
    kind = DeviceLost if _LOST.search(str(error)) else LaunchError
    if kind is DeviceLost:
        publish("opencl", "lost", f"{what}: {error}")
    return kind(f"{what}: {error}")
