"""WebGPU through wgpu-py: kernels in WGSL on Vulkan, Metal and Direct3D 12.

The dialect "wgsl" is a WGSL module as a browser takes it, with these conventions, which compilation/kernel.py writes:

* The pointers of an entry point are storage buffers in group 0 at binding 0, 1, ... in the order of the arguments. Its
  scalars are 4 bytes each in a uniform struct at the next binding; 64-bit values that do not fit are refused.
* The threads of a block are `@workgroup_size(BLOCK_X)`, an override, or numbers, which a launch must repeat.
* A one-dimensional grid beyond the device's limit is folded into two dimensions for a module that finds its block by
  `linear_group`; others are refused.
* `//! elementwise 8 8 4` in a module says that element i of the result depends on element i of each array alone, with
  the bytes of an element of each; the last argument is the number of elements. Arrays larger than a binding may be are
  then split over several dispatches, or bound in several windows where the module uses the functions of `words`.

Dispatches are encoded into one command buffer, which is submitted when it has _BATCH of them, and before anything waits
or copies. There is no machine code to keep: the disk cache notes modules that the driver has accepted.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from accelerant.config import launch_log
from accelerant.errors import CompileError, DeviceLost, LaunchError
from accelerant.runtime import provider
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource, windowed
from accelerant.runtime.host import fork_safe, host_memory
from accelerant.runtime.monitoring.monitor import publish
from accelerant.runtime.provider import (
    Arguments,
    Buffer,
    ComputeDevice,
    CountedMemory,
    DriverProvider,
    Event,
    MemoryCounter,
)

_PROBE = """
import sys
try:
    from accelerant.runtime.providers.webgpu import adapters
    found = adapters()
    for adapter in found:
        adapter.request_device_sync().queue.submit([])
except Exception as error:
    sys.exit("no driver of Vulkan, Metal or Direct3D 12 answers: " + str(error).splitlines()[0])
if not found:
    sys.exit("no driver of Vulkan, Metal or Direct3D 12 shows a device")
"""
_BATCH = 256  # dispatches in a command buffer
_SCALAR_BYTES = 256  # bytes for the scalars of a dispatch: a uniform binding starts at a multiple of 256
_SCALARS = {"f32": "f", "bool": "I", **dict.fromkeys(("i8", "i16", "i32", "i64"), "i")}
_SCALARS |= dict.fromkeys(("u8", "u16", "u32", "u64"), "I")
_LIMITS = (
    "max-buffer-size", "max-storage-buffer-binding-size", "max-compute-workgroup-storage-size",
    "max-compute-invocations-per-workgroup", "max-compute-workgroup-size-x", "max-compute-workgroup-size-y",
    "max-storage-buffers-per-shader-stage",
)  # fmt: skip
"""Limits that are raised from WebGPU's defaults to the device's own."""

_BLOCK = re.compile(r"override BLOCK_([XYZ])\s*:\s*u32\s*=\s*(\d+)")
_ELEMENTWISE = re.compile(r"^//! elementwise((?: \d+)+)$", re.MULTILINE)
_DEFINE = re.compile(r"-D(\w+)=([\w.+-]+)")


_ORDER = {"DiscreteGPU": 0, "IntegratedGPU": 1, "CPU": 3}


def adapters() -> list[Any]:
    """Return wgpu's adapters that are not OpenGL's, hardware before software."""
    os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # or Mesa complains
    import wgpu

    found = [each for each in wgpu.gpu.enumerate_adapters_sync() if each.info["backend_type"] != "OpenGL"]
    return sorted(found, key=lambda each: _ORDER.get(each.info["adapter_type"], 2))


class WebgpuProvider(DriverProvider):
    """Devices of wgpu. A software device (lavapipe, SwiftShader) says so in its properties."""

    name: ClassVar[str] = "webgpu"
    dialects: ClassVar[tuple[str, ...]] = ("wgsl",)
    torch_type: ClassVar[str] = "webgpu"
    library: ClassVar[str] = "wgpu"
    probing: ClassVar[str] = _PROBE
    driver: ClassVar[str] = "a Vulkan, Metal or Direct3D driver"
    standard: ClassVar[str] = "WebGPU"

    def __init__(self) -> None:
        # Load Triton's library before Mesa's LLVM: after it, the import of Triton ends the process
        spec = importlib.util.find_spec("triton")
        for folder in (spec and spec.submodule_search_locations) or ():
            for library in Path(folder).glob("_C/libtriton*.so"):
                with contextlib.suppress(OSError):  # a library that does not load does not clash either
                    ctypes.CDLL(str(library))
        super().__init__([_WebgpuDevice(adapter) for adapter in adapters()])

    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        opened = self._device(device)
        self.check_limit(size_bytes, device)
        if (rounded := max(256, -(-size_bytes // 256) * 256)) > opened.limits["max-buffer-size"]:
            raise provider.out_of_memory(size_bytes, f"webgpu:{device}", self.memory(device))
        try:
            pooled = _PoolBuffer(opened, rounded, size_bytes)
        except opened.errors:
            opened.trim()  # buffers of the pool may take what is missing
            try:
                pooled = _PoolBuffer(opened, rounded, size_bytes)
            except opened.errors as error:
                raise provider.out_of_memory(size_bytes, f"webgpu:{device}", self.memory(device)) from error
        return Buffer(id(pooled.memory), size_bytes, device, pooled)

    def _write(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        memory = provider.check_owner(buffer, _PoolBuffer, self.name, "out").memory
        if content.nbytes:
            tail = content.nbytes % 4  # a copy has whole words
            self._device(buffer.device).write(memory, np.pad(content, (0, 4 - tail)) if tail else content)

    def _read(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        memory = provider.check_owner(buffer, _PoolBuffer, self.name, "buffer").memory
        if content.nbytes:
            self._device(buffer.device).read(memory, content)

    def part(self, buffer: Buffer, first: int, size_bytes: int) -> Buffer:
        """Return a range of a buffer as a buffer that a launch can bind; it begins at a multiple of 256 bytes."""
        whole = provider.check_owner(buffer, _PoolBuffer, self.name, "buffer")
        if first % 256 or not 0 <= first < first + size_bytes <= whole.size:
            raise LaunchError(f"bytes {first:,} to {first + size_bytes:,} are no part of {buffer!r}")
        return Buffer(buffer.data_ptr(), size_bytes, buffer.device, _Part(whole, first, -(-size_bytes // 4) * 4))

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        opened = self._device(device)
        entry = provider.pick_entry(source, entry)
        for position, kind in enumerate(source.entries[entry]):
            if not kind.startswith("*") and kind not in _SCALARS:
                raise CompileError(f"kernel {entry!r}, argument {position}: WGSL has no scalar of type {kind}")
        began = time.perf_counter()
        text = _defines(source) + source.text(self.dialects, "WebGPU")
        key = kernel_key(program=text, entries=sorted(source.entries), target=opened.identity)
        report = {"name": source.name, "target": opened.info["device"], "compiler": opened.identity}
        with opened.lock:
            binary, from_cache = KernelCache().get_or_build(key, lambda: opened.build(source, text), **report)
            handle = opened.load(source, binary.code.decode(), entry)
        return self.describe(
            source, entry, binary, report["target"], began_s=began, from_cache=from_cache, handle=handle, device=device
        )

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Arguments, stream: object | None = None
    ) -> None:
        provider.check_launch(kernel, self.name, grid, block, args)
        opened, program = self._device(kernel.device), kernel.handle
        began = time.perf_counter() if launch_log.enabled else 0.0
        buffers: list[_PoolBuffer | _Part] = []
        values: list[int | float] = []
        for position, (kind, arg) in enumerate(zip(kernel.arguments, args, strict=True)):
            where = f"kernel {kernel.name!r}, argument {position}"
            if not kind.startswith("*"):
                values.append(_scalar(kernel, position, kind, arg))
            elif isinstance(arg, Buffer):
                part = arg.owner if isinstance(arg.owner, _Part) else None
                buffers.append(part or provider.check_owner(arg, _PoolBuffer, self.name, where))
            else:
                raise LaunchError(f"{where}: wanted a buffer, got {type(arg).__name__}")
        shape = opened.checked_block(program, kernel.name, block)
        for variant, groups, parts, numbers in _split(opened, program, kernel.name, grid, shape, buffers, values):
            opened.dispatch(variant, shape, groups, parts, numbers)
        if launch_log.enabled:
            provider.log_launch(kernel.name, f"webgpu:{kernel.device}", grid, block, began)

    def synchronize(self, device: int = 0) -> None:
        self._device(device).wait()

    def record_event(self, device: int = 0) -> Event:
        return self._device(device).mark()

    def _device(self, device: int) -> _WebgpuDevice:
        opened: _WebgpuDevice = super()._device(device)
        if opened.lost:
            raise DeviceLost(f"webgpu:{device}: {opened.lost}")
        return opened


class _WebgpuDevice:
    """A device with its queue, its pool of buffers, and the command buffer that is being encoded."""

    def __init__(self, adapter: Any) -> None:
        import wgpu

        self.info, features = dict(adapter.info), {"timestamp-query"} & set(adapter.features)
        self.device = adapter.request_device_sync(
            required_features=sorted(features), required_limits={name: adapter.limits[name] for name in _LIMITS}
        )
        self.errors = (wgpu.GPUError, RuntimeError, MemoryError)
        self.limits = dict(self.device.limits)
        self.binding_bytes = self.limits["max-storage-buffer-binding-size"] // 256 * 256
        kinds = {"DiscreteGPU": "gpu", "IntegratedGPU": "gpu", "CPU": "cpu"}
        self.kind = kinds.get(self.info["adapter_type"], "unknown")
        shares = self.info["adapter_type"] in ("IntegratedGPU", "CPU")
        # WebGPU does not tell the memory of a device: the host's where it is the same, else the largest buffer
        self.memory_bytes = (host_memory().get("MemTotal", 0) if shares else 0) or self.limits["max-buffer-size"]
        facts = (wgpu.__version__, self.info["backend_type"], self.info["device"], self.info["description"])
        self.identity = " ".join(map(str, facts))
        self.counter = MemoryCounter()
        self.free: dict[int, list[Any]] = {}
        self.used: dict[int, Any] = {}  # or the garbage collector ends buffers of a cycle before they are given back
        self.lock = fork_safe(threading.RLock())
        self.lost = ""
        self.submitted = self.passed = 0
        """Events in the queue so far, and how many of them the device is known to have passed."""
        self._timed = bool(features)
        usage = wgpu.BufferUsage
        self._storage = usage.STORAGE | usage.COPY_SRC | usage.COPY_DST
        self._scalars = self.device.create_buffer(size=_BATCH * _SCALAR_BYTES, usage=usage.UNIFORM | usage.COPY_DST)
        self._fence = self.device.create_buffer(size=4, usage=usage.COPY_SRC)
        self._values = bytearray(_BATCH * _SCALAR_BYTES)
        self._encoder: Any = None
        self._pass: Any = None
        self._count = 0
        self._groups: dict[tuple[Any, ...], Any] = {}
        self._layouts: dict[int, tuple[Any, Any]] = {}
        self._modules: dict[str, Any] = {}

    def described(self, index: int) -> ComputeDevice:
        info, limits = self.info, self.limits
        return ComputeDevice(
            backend="webgpu",
            index=index,
            name=info["device"],
            memory_bytes=self.memory_bytes,
            architecture=info["architecture"] or info["backend_type"],
            properties={
                "kind": self.kind,
                "software": self.kind == "cpu",
                "platform": info["backend_type"],
                "driver": info["description"],
                "threads_per_block": limits["max-compute-invocations-per-workgroup"],
                "shared_bytes_per_block": limits["max-compute-workgroup-storage-size"],
                "binding_bytes": self.binding_bytes,
                "buffer_bytes": limits["max-buffer-size"],
                "dtypes": ["float32"],
            },
        )

    # --- memory ------------------------------------------------------------------------------------------------------
    def take(self, size_bytes: int) -> Any:
        """Return a buffer of the pool, or a new one; a pool of a quarter of the memory is emptied before."""
        try:
            buffer = self.free[size_bytes].pop()
        except LookupError:
            if self.kept_bytes() > self.memory_bytes // 4:
                self.trim()
            buffer = self.device.create_buffer(size=size_bytes, usage=self._storage)
        self.used[id(buffer)] = buffer
        return buffer

    def give(self, buffer: Any, size_bytes: int) -> None:
        """Put a buffer into the pool."""
        self.free.setdefault(size_bytes, []).append(self.used.pop(id(buffer)))

    def kept_bytes(self) -> int:
        """Return the bytes of the pool's buffers that are not in use."""
        return sum(size * len(buffers) for size, buffers in list(self.free.items()))

    def reserved_bytes(self) -> int:
        """Return the bytes of buffers in use and in the pool."""
        return self.counter.allocated_bytes + self.kept_bytes()

    def trim(self) -> None:
        with self.lock:
            self.flush()
            self._groups.clear()
            for buffers in list(self.free.values()):
                while buffers:
                    buffers.pop().destroy()  # the driver waits until the queue has passed its uses

    def write(self, memory: Any, content: npt.NDArray[np.uint8]) -> None:
        with self.lock:
            self.flush()  # a write takes its place in the queue at once, before what is only encoded
            self._checked(lambda: self.device.queue.write_buffer(memory, 0, content), "a copy to the device")

    def read(self, memory: Any, content: npt.NDArray[np.uint8]) -> None:
        size = -(-content.nbytes // 4) * 4
        with self.lock:
            self.flush()
            found = self._checked(lambda: self.device.queue.read_buffer(memory, 0, size), "a copy to the host")
        content[:] = np.frombuffer(found, np.uint8)[: content.nbytes]

    # --- programs ----------------------------------------------------------------------------------------------------
    def build(self, source: KernelSource, text: str) -> Binary:
        """Let the driver check a module, and return its text as the "code"."""
        self._module(source.name, text)
        return Binary.of(text.encode(), source.entries)

    def _module(self, name: str, text: str) -> Any:
        if text not in self._modules:
            try:
                self._modules[text] = self.device.create_shader_module(code=text)
            except self.errors as error:
                where = f"kernel {name!r} does not compile for {self.info['device']}"
                raise CompileError(where, str(error)) from None
        return self._modules[text]

    def load(self, source: KernelSource, text: str, entry: str) -> _Program:
        """Return an entry point, with its pipeline for the module's own block."""
        kinds = source.entries[entry]
        pointers = sum(kind.startswith("*") for kind in kinds)
        if 4 * (len(kinds) - pointers) > _SCALAR_BYTES:
            raise CompileError(f"kernel {entry!r}: a launch has at most {_SCALAR_BYTES // 4} scalars here")
        if pointers > self.limits["max-storage-buffers-per-shader-stage"]:
            raise CompileError(f"kernel {entry!r}: {pointers} arrays; this device binds fewer")
        program = _Program(self._module(source.name, text), text, entry, kinds)
        try:
            self._pipeline(program, program.block)
        except LaunchError as error:
            raise CompileError(f"kernel {source.name!r}: no pipeline of {entry!r}", str(error)) from None
        return program

    def windowed(self, program: _Program, counts: Sequence[int], log_words: int) -> _Program | None:
        """Return a program that binds each array in so many windows; None if its text has no `words` of one."""
        key, entry = (*counts, log_words), program.entry
        with self.lock:
            if key not in program.windowed:
                text = windowed(program.text, counts, log_words)
                kinds = ("*u32",) * sum(counts) + tuple(kind for kind in program.kinds if not kind.startswith("*"))
                made = None if text is None else _Program(self._module(entry, text), text, entry, kinds)
                program.windowed[key] = made
            return program.windowed[key]

    def _layout(self, pointers: int) -> tuple[Any, Any]:
        if pointers not in self._layouts:
            entries = [{"binding": i, "visibility": 4, "buffer": {"type": "storage"}} for i in range(pointers)]
            uniform = {"type": "uniform", "has_dynamic_offset": True}
            entries.append({"binding": pointers, "visibility": 4, "buffer": uniform})
            group = self.device.create_bind_group_layout(entries=entries)
            self._layouts[pointers] = (group, self.device.create_pipeline_layout(bind_group_layouts=[group]))
        return self._layouts[pointers]

    def checked_block(self, program: _Program, name: str, block: Sequence[int]) -> tuple[int, int, int]:
        """Return the threads of a block in three dimensions; LaunchError for what the program does not take."""
        x, y, z = (*block, 1, 1)[:3]
        for wanted, own, free in zip((x, y, z), program.block, program.free, strict=True):
            if wanted != own and not free:
                raise LaunchError(f"kernel {name!r} is written for blocks of {program.block} threads, got {(x, y, z)}")
        most = self.limits["max-compute-invocations-per-workgroup"]
        if x * y * z > most:
            raise LaunchError(f"kernel {name!r}: a block has at most {most} threads on this device, got {(x, y, z)}")
        return x, y, z

    def _pipeline(self, program: _Program, block: tuple[int, int, int]) -> Any:
        if block not in program.pipelines:
            names = zip("XYZ", block, program.free, strict=True)
            constants = {f"BLOCK_{axis}": float(size) for axis, size, free in names if free}
            stage = {"module": program.module, "entry_point": program.entry, "constants": constants}
            _, layout = self._layout(program.pointers)
            made = self._checked(
                lambda: self.device.create_compute_pipeline(layout=layout, compute=stage), f"kernel {program.entry!r}"
            )
            program.pipelines[block] = made
        return program.pipelines[block]

    # --- the queue ---------------------------------------------------------------------------------------------------
    def dispatch(
        self, program: _Program, block: tuple[int, int, int], groups: tuple[int, int, int],
        parts: Sequence[_Binding], values: Sequence[int | float],
    ) -> None:  # fmt: skip
        """Encode one dispatch; parts are memory, its first byte and the number of bytes."""
        with self.lock:
            pipeline = self._pipeline(program, block)
            group = self._group(program, parts)
            if self._pass is None:
                self._encoder = self.device.create_command_encoder()
                self._pass = self._encoder.begin_compute_pass()
            at = _SCALAR_BYTES * self._count
            struct.pack_into(program.format, self._values, at, *values)
            self._pass.set_pipeline(pipeline)
            self._pass.set_bind_group(0, group, [at])
            self._pass.dispatch_workgroups(*groups)
            self._count += 1
            if self._count == _BATCH:
                self.flush()

    def _group(self, program: _Program, parts: Sequence[_Binding]) -> Any:
        key = (*(part for memory, *part in parts for part in (memory.memory, *part)),)
        if (found := self._groups.get(key)) is None:
            if len(self._groups) >= 2048:  # groups keep their buffers alive
                self._groups.clear()
            bound = [
                {"binding": i, "resource": {"buffer": memory.memory, "offset": first, "size": size}}
                for i, (memory, first, size) in enumerate(parts)
            ]
            bound.append(
                {"binding": len(parts), "resource": {"buffer": self._scalars, "offset": 0, "size": _SCALAR_BYTES}}
            )
            layout, _ = self._layout(program.pointers)
            found = self._groups[key] = self._checked(
                lambda: self.device.create_bind_group(layout=layout, entries=bound), f"kernel {program.entry!r}"
            )
        return found

    def flush(self) -> None:
        """Submit what is encoded."""
        with self.lock:
            if self._pass is None:
                return
            encoder, last, count = self._encoder, self._pass, self._count
            self._encoder, self._pass, self._count = None, None, 0
            queue = self.device.queue

            def submit() -> None:
                last.end()
                queue.write_buffer(self._scalars, 0, self._values, 0, _SCALAR_BYTES * count)
                queue.submit([encoder.finish()])

            self._checked(submit, f"a batch of {count} dispatches")

    def wait(self) -> None:
        with self.lock:
            self.flush()
            # a copy behind all that is submitted: wgpu 0.32's on_submitted_work_done_async fails
            submitted = self.submitted
            self._checked(lambda: self.device.queue.read_buffer(self._fence), "synchronize")
            self.passed = submitted

    def mark(self) -> Event:
        """Return a timestamp in the queue; where the device has none, the host's time when the queue is empty."""
        import wgpu

        with self.lock:
            self.flush()
            if not self._timed:
                self.wait()
                return _WebgpuEvent(self, 0, None, time.perf_counter_ns())
            usage, queries = wgpu.BufferUsage, self.device.create_query_set(type="timestamp", count=1)
            resolved = self.device.create_buffer(size=8, usage=usage.QUERY_RESOLVE | usage.COPY_SRC)
            read = self.device.create_buffer(size=8, usage=usage.COPY_DST | usage.MAP_READ)
            encoder = self.device.create_command_encoder()
            encoder.begin_compute_pass(
                timestamp_writes={"query_set": queries, "beginning_of_pass_write_index": 0}
            ).end()
            encoder.resolve_query_set(queries, 0, 1, resolved, 0)
            encoder.copy_buffer_to_buffer(resolved, 0, read, 0, 8)
            self.device.queue.submit([encoder.finish()])
            self.submitted += 1
            return _WebgpuEvent(self, self.submitted, read)

    def _checked(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except self.errors as error:
            text = " ".join(str(error).split())
            if "lost" in text.lower():
                self.lost = f"{what}: {text}"
                publish("webgpu", "lost", self.lost)
                raise DeviceLost(self.lost) from error
            raise LaunchError(f"{what}: {text}") from error


class _Program:
    """An entry point of a module, with its pipelines by block."""

    def __init__(self, module: Any, text: str, entry: str, kinds: Sequence[str]) -> None:
        self.module, self.text, self.entry, self.kinds = module, text, entry, kinds
        self.pointers = sum(kind.startswith("*") for kind in kinds)
        formats = [_SCALARS[kind] for kind in kinds if not kind.startswith("*")]
        self.format = "<" + "".join(formats)
        self.folds = "linear_group(" in text
        found = _ELEMENTWISE.search(text)
        self.element_bytes = tuple(map(int, found[1].split())) if found else ()
        defaults = {axis: int(size) for axis, size in _BLOCK.findall(text)}
        head = re.search(r"@workgroup_size\(([^)]*)\)\s*fn " + re.escape(entry) + r"\b", text)
        if head is None:
            raise CompileError(f"WGSL has no entry point {entry!r} with a @workgroup_size before its fn", text)
        sizes = [part.strip().rstrip("u") for part in head[1].split(",") if part.strip()]
        named = [part.startswith("BLOCK_") for part in sizes]
        block = [defaults[part[-1]] if name else int(part) for part, name in zip(sizes, named, strict=True)]
        self.block: tuple[int, int, int] = (*block, 1, 1)[:3]  # type: ignore[assignment]
        self.free = (*named, False, False)[:3]
        self.pipelines: dict[tuple[int, int, int], Any] = {}
        self.windowed: dict[tuple[int, ...], _Program | None] = {}


class _PoolBuffer(CountedMemory):
    """A buffer of the device's pool."""

    __slots__ = ("_device", "_rounded")
    first: ClassVar[int] = 0

    @property
    def size(self) -> int:
        return self._rounded

    def __init__(self, device: _WebgpuDevice, rounded: int, size_bytes: int) -> None:
        self._device, self._rounded = device, rounded
        super().__init__("webgpu", device.counter, device.take(rounded), size_bytes)

    def __del__(self) -> None:
        if hasattr(self, "memory"):  # else there was no memory for it
            self._device.give(self.memory, self._rounded)
            super().__del__()


class _Part:
    """A range of a buffer, which it keeps alive."""

    __slots__ = ("first", "memory", "size", "whole")

    def __init__(self, whole: _PoolBuffer, first: int, size: int) -> None:
        self.whole, self.memory, self.first, self.size = whole, whole.memory, first, size


class _WebgpuEvent(Event):
    __slots__ = ("_at_ns", "_device", "_number", "_promise", "_read")

    def __init__(self, device: _WebgpuDevice, number: int, read: Any, at_ns: int = 0) -> None:
        self._device, self._number, self._read, self._at_ns = device, number, read, at_ns
        self._promise: Any = read.map_async("READ_NOSYNC") if read is not None else None

    def done(self) -> bool:
        if self._read is not None and (self._read.map_state == "mapped" or self._number <= self._device.passed):
            self._promise.sync_wait()
            self._at_ns = int(np.frombuffer(self._read.read_mapped(), np.uint64)[0])
            self._read.unmap()
            self._read = None
        return self._read is None

    def elapsed_ms(self, later: Event) -> float:
        later = self.same_kind(later)
        if not (self.done() and later.done()):
            raise LaunchError("an event of WebGPU has no time before it is done")
        return (later._at_ns - self._at_ns) / 1e6


_Binding: TypeAlias = tuple[_PoolBuffer | _Part, int, int]  # memory, its first byte and the number of bytes


def _defines(source: KernelSource) -> str:
    """Return a constant for each option -DNAME=VALUE; CompileError for other options."""
    lines = []
    for option in source.raw_options:
        if (match := _DEFINE.fullmatch(option)) is None:
            raise CompileError(f"kernel {source.name!r}: WGSL takes options of the form -DNAME=VALUE, got {option!r}")
        lines.append(f"const {match[1]} = {match[2]};\n")
    if source.options and not source.raw_options:
        source.refuse_options("WGSL")
    if source.shared_bytes:
        raise CompileError(f"kernel {source.name!r}: WGSL has no dynamic shared memory; declare var<workgroup>")
    return "".join(lines)


def _scalar(kernel: Kernel, position: int, kind: str, arg: object) -> int | float:
    value = provider.check_scalar(kernel.name, position, kind, arg)
    low, high = (-(2**31), 2**31) if kind == "i64" else (0, 2**32)
    if kind in ("i64", "u64") and not low <= value < high:
        text = f"WGSL has no 64-bit integers; wanted an {kind} of 32 bits, got {value}"
        raise LaunchError(f"kernel {kernel.name!r}, argument {position}: {text}")
    return value


def _split(
    opened: _WebgpuDevice, program: _Program, name: str, grid: Sequence[int], block: tuple[int, int, int],
    buffers: Sequence[_PoolBuffer | _Part], values: Sequence[int | float],
) -> Iterator[tuple[_Program, tuple[int, int, int], list[_Binding], Sequence[int | float]]]:  # fmt: skip
    """Yield program, grid, parts of the buffers and scalars of each dispatch of a launch."""
    limit = opened.binding_bytes
    sizes = [memory.size for memory in buffers]
    if max(sizes, default=0) <= limit:
        parts = [(memory, memory.first, memory.size) for memory in buffers]
        yield program, _grid(opened, program, name, grid), parts, values
        return
    if len(program.element_bytes) != len(buffers) or any(size != 1 for size in (*grid[1:], *block[1:])):
        parts = [part for memory in buffers for part in _windows(memory, limit)]
        most = opened.limits["max-storage-buffers-per-shader-stage"]
        variant = None
        if len(parts) <= most:
            counts = [len(_windows(memory, limit)) for memory in buffers]
            variant = opened.windowed(program, counts, limit.bit_length() - 3)
        if variant is None:
            why = f"its arrays would be {len(parts)} bindings of at most {most}"
            if len(parts) <= most:
                why = "its module is neither elementwise nor reads arrays by the functions of `words`"
            bounds = f"an array of {max(sizes):,} bytes; a binding of this device has at most {limit:,}"
            raise LaunchError(f"kernel {name!r}: {bounds}, and {why}")
        yield variant, _grid(opened, program, name, grid), parts, values
        return
    count, wide = int(values[-1]), max(program.element_bytes)
    step = max(256, limit // wide // 256 * 256)  # every part begins at a multiple of 256 bytes
    for first in range(0, count, step):
        here = min(step, count - first)
        parts = [
            (memory, first * width, -(-here * width // 4) * 4)
            for memory, width in zip(buffers, program.element_bytes, strict=True)
        ]
        yield program, _grid(opened, program, name, (-(-here // block[0]),)), parts, (*values[:-1], here)


def _windows(memory: _PoolBuffer | _Part, limit: int) -> list[_Binding]:
    """Return a buffer as one binding, or in windows of the largest power of two of bytes that may be bound."""
    size = memory.size if memory.size <= limit else 1 << limit.bit_length() - 1
    starts = range(0, memory.size, size)
    return [(memory, memory.first + start, min(size, memory.size - start)) for start in starts]


def _grid(opened: _WebgpuDevice, program: _Program, name: str, grid: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*grid, 1, 1)[:3]
    most: int = opened.limits["max-compute-workgroups-per-dimension"]
    if x > most and y == z == 1 and program.folds and x <= most**2:
        return most, -(-x // most), 1
    if max(x, y, z) > most:
        raise LaunchError(f"kernel {name!r}: a grid has at most {most:,} blocks along an axis, got {(x, y, z)}")
    return x, y, z
