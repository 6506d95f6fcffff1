"""The CPU: torch's tensors, integer kernels that llvmlite builds at run time, portable kernels by the C compiler.

An entry point in the "llvm" dialect is a function

    void name(i64 begin, i64 end, <arguments>)

for the indices [begin, end) of the flattened range grid x block. A launch splits that range over the cores, which run
in parallel since ctypes releases the GIL. It returns when the work is done: this backend has no streams.
"""

import contextlib
import ctypes
import functools
import itertools
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accelerant.config import launch_log
from accelerant.errors import CompileError, LaunchError
from accelerant.runtime import host, provider
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.host_c import c_compiler, c_key, compile_c, load_c
from accelerant.runtime.compilation.kernel import Binary, Builder, Kernel, KernelSource
from accelerant.runtime.host import control_group_room, host_memory, usable_cores
from accelerant.runtime.provider import Buffer, ComputeDevice, CountedMemory, Event, MemoryCounter, MemoryInfo

_ALIGNMENT = 256
_LEVEL = 3
_PASSES = ("loop_vectorization", "slp_vectorization", "loop_unrolling")
"""LLVM's options for a kernel whose vectorization and unrolling are left to it; part of the cache's key."""

_FEW_PASSES = (
    "always_inliner", "global_dead_code_eliminate", "sroa", "simplify_cfg", "new_gvn", "aggressive_dce", "simplify_cfg",
)  # fmt: skip
"""The passes for straight-line arithmetic, whose text already says what is inlined, a vector or unrolled. They take an
eighth of the time of LLVM's level 3, whose code for large numbers is no faster, and for 64-bit limbs a tenth slower."""

_LEAST_SHARE = 16384
"""The fewest indices worth another thread (a task switch is about 10 us) if an index costs about one addition. Builders
of heavier kernels have an attribute `least_share`, at least 1. Those with a true `written_out` get _FEW_PASSES."""


class _HostTime(Event):
    """A clock reading: work is done when a call returns."""

    __slots__ = ("seconds",)

    def __init__(self) -> None:
        self.seconds = time.perf_counter()

    def done(self) -> bool:
        return True

    def elapsed_ms(self, later: Event) -> float:
        return (self.same_kind(later).seconds - self.seconds) * 1e3


class CpuProvider(provider.ComputeProvider):
    """The CPU as one device, whose `cores` share each launch; `wait_for` waits for other processes' compiler."""

    name: ClassVar[str] = "cpu"
    dialects: ClassVar[tuple[str, ...]] = ("llvm", "portable")
    torch_type: ClassVar[str] = "cpu"
    automatic: ClassVar[bool] = True

    @classmethod
    def probe(cls) -> str:
        """Return an empty reason: the CPU is always available."""
        return ""

    def __init__(self) -> None:
        self.cores = usable_cores()
        self._lock = host.fork_safe(threading.Lock())
        self._counter = MemoryCounter()
        self._pool: ThreadPoolExecutor | None = None
        self._pool_pid = 0
        self._target: Any = None
        self.wait_for: Callable[[str], None] | None = None
        self._linker: Any = None
        self._libraries = 0

    def devices(self) -> list[ComputeDevice]:
        return [self._described]

    @functools.cached_property
    def _described(self) -> ComputeDevice:
        return ComputeDevice(
            backend=self.name,
            index=0,
            name=host.processor_name(),
            memory_bytes=host_memory().get("MemTotal", 0),
            architecture=platform.machine(),
            properties={"cores": self.cores, "system": platform.platform(terse=True), **host.processor_facts()},
            torch_type=self.torch_type,
        )

    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        provider.check_device(self.name, device, 1)
        self.check_limit(size_bytes)
        return self._allocated(size_bytes, device, self._counter)

    def _allocated(self, size_bytes: int, device: int, counter: MemoryCounter) -> Buffer:
        try:
            storage = np.empty(size_bytes + _ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):
            raise provider.out_of_memory(size_bytes, self.name, self.memory(device)) from None
        start = -storage.ctypes.data % _ALIGNMENT
        owner = CountedMemory(self.name, counter, storage, size_bytes)
        return Buffer(storage.ctypes.data + start, size_bytes, device, owner)

    def _write(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        provider.check_owner(buffer, CountedMemory, self.name, "out")
        ctypes.memmove(buffer.data_ptr(), content.ctypes.data, content.nbytes)

    def _read(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        provider.check_owner(buffer, CountedMemory, self.name, "buffer")
        ctypes.memmove(content.ctypes.data, buffer.data_ptr(), content.nbytes)

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        provider.check_device(self.name, device, 1)
        entry = provider.pick_entry(source, entry)
        dialect, program = source.pick(self.dialects)
        began = time.perf_counter()
        if source.shared_bytes:
            text = "the CPU has no dynamic shared memory; declare it in the kernel"
            raise CompileError(f"kernel {source.name!r}: {text}")
        key = self.key_of(source)
        if self.wait_for is not None:
            self.wait_for(key)
        binary, from_cache = KernelCache().get_or_build(
            key, lambda: self._build(source, program), name=source.name, target=self._cpu,
            compiler=_llvm_version() if dialect == "llvm" else c_compiler()[1],
        )  # fmt: skip
        types = [
            ctypes.c_void_p if kind.startswith("*") else provider.SCALAR_CTYPES[kind] for kind in source.entries[entry]
        ]
        if dialect == "portable":
            handle, least_share = load_c(binary, entry, types), _LEAST_SHARE // 4
        else:
            address, library = self._load(binary, entry)
            handle = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, *types)(address)
            handle.library = library  # type: ignore[attr-defined]  # the code is in its memory
            least_share = getattr(program, "least_share", _LEAST_SHARE)
        return self.describe(
            source, entry, binary, self._cpu, began_s=began, from_cache=from_cache, handle=handle,
            least_share=least_share,
        )  # fmt: skip

    def key_of(self, source: KernelSource) -> str:
        """Return a kernel's key in the cache."""
        self._machine()
        dialect, program = source.pick(self.dialects)
        if dialect == "portable":
            return kernel_key(**c_key(source, source.text(("portable",), "C")), target=[self._cpu, self._features])
        return kernel_key(
            program=program if isinstance(program, str) else program.key, entries=sorted(source.entries),
            options=source.options, fixed=[_LEVEL, *(_FEW_PASSES if _has_few(program) else _PASSES)],
            target=[self._target.triple, self._cpu, self._features], compiler=_llvm_version(),
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
        values = [_value(kernel, i, arg) for i, arg in enumerate(args)]
        began = time.perf_counter() if launch_log.enabled else 0.0
        total, threads = prod(grid) * prod(block), prod(block)
        provider.check_range(kernel, total, 2**63, "indices")
        parts = max(1, min(self.cores, total // kernel.metadata["least_share"]))
        if "blocks" in kernel.metadata:  # portable C, whose blocks are not divided
            provider.check_range(kernel, threads, 1025, "threads a block")
            rows, height = (sizes[1] if len(sizes) > 1 else 1 for sizes in (grid, block))
            total, values = prod(grid), [grid[0], rows, block[0], height, threads, *values]
            parts = min(parts, total)
        if parts == 1:
            kernel.handle(0, total, *values)
        else:
            bounds = [total * i // parts for i in range(parts + 1)]
            pool, futures = self._threads(), list[Future[None]]()
            try:
                for begin, end in itertools.pairwise(bounds[1:]):
                    futures.append(pool.submit(kernel.handle, begin, end, *values))
                kernel.handle(0, bounds[1], *values)
            finally:
                _join(futures)
        if launch_log.enabled:
            provider.log_launch(kernel.name, f"{self.name}:0", grid, block, began)

    def shutdown(self) -> None:
        super().shutdown()
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None and self._pool_pid == os.getpid():
            pool.shutdown()

    def synchronize(self, device: int = 0) -> None:
        """Return at once: launches return when they are done."""
        provider.check_device(self.name, device, 1)

    def memory(self, device: int = 0) -> MemoryInfo:
        provider.check_device(self.name, device, 1)
        info = host_memory()
        total = info.get("MemTotal", 0)
        return MemoryInfo(
            total_bytes=total, free_bytes=info.get("MemAvailable", max(0, total - self._counter.allocated_bytes)),
            allocated_bytes=self._counter.allocated_bytes, reserved_bytes=self._counter.allocated_bytes,
            peak_bytes=self._counter.peak_bytes,
        )  # fmt: skip

    def free_fraction(self, device: ComputeDevice) -> float:
        info = self.memory()
        return provider.room_fraction(info.total_bytes, min(info.free_bytes, control_group_room()), info.reserved_bytes)

    def trim(self, device: int = 0) -> None:
        provider.check_device(self.name, device, 1)

    def record_event(self, device: int = 0) -> Event:
        provider.check_device(self.name, device, 1)
        return _HostTime()

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None or self._pool_pid != os.getpid():  # threads do not survive a fork
                self._pool = ThreadPoolExecutor(max(1, self.cores - 1), thread_name_prefix="accelerant-cpu")
                self._pool_pid = os.getpid()
            return self._pool

    def _machine(self) -> Any:
        with self._lock:
            if self._target is None:
                import llvmlite.binding as llvm

                llvm.initialize_native_target()
                llvm.initialize_native_asmprinter()
                self._cpu = llvm.get_host_cpu_name()
                self._features = llvm.get_host_cpu_features().flatten()
                self._target = llvm.Target.from_default_triple().create_target_machine(
                    cpu=self._cpu, features=self._features, opt=_LEVEL, reloc="pic", codemodel="default"
                )
            return self._target

    def _build(self, source: KernelSource, program: str | Builder) -> Binary:
        import llvmlite.binding as llvm

        if "llvm" not in source.dialects:
            return compile_c(source, source.text(("portable",), "C"))
        source.refuse_options("LLVM IR")
        text = program if isinstance(program, str) else program.build(self._cpu)
        if isinstance(text, Binary):
            return text
        with self._lock:
            try:
                module = llvm.parse_assembly(text)
                module.triple = self._target.triple
                module.data_layout = str(self._target.target_data)
                module.verify()
                options = llvm.create_pipeline_tuning_options(speed_level=_LEVEL)
                for name in _PASSES:
                    setattr(options, name, True)
                passes = llvm.create_pass_builder(self._target, options).getModulePassManager()
                if _has_few(program):
                    passes = llvm.create_new_module_pass_manager()
                    for name in _FEW_PASSES:
                        getattr(passes, f"add_{name}_pass")()
                passes.run(module, llvm.create_pass_builder(self._target, options))
                code: bytes = self._target.emit_object(module)
            except RuntimeError as error:
                raise CompileError(f"kernel {source.name!r} does not compile for {self._cpu}", str(error)) from None
        return Binary.of(code, source.entries)

    def _load(self, binary: Binary, entry: str) -> tuple[int, Any]:
        """Return the entry's address, and the library of the code, which must live as long as the entry is called."""
        import llvmlite.binding as llvm

        with self._lock:
            if self._linker is None:
                # JITLink keeps a library's parts together. The older linker maps each anywhere, and ends the process
                # if that is more than 2 GB from the code, as happens with a CUDA context in the process.
                machine = llvm.Target.from_default_triple().create_target_machine(
                    cpu=self._cpu, features=self._features, opt=_LEVEL
                )
                self._linker = llvm.create_lljit_compiler(machine, use_jit_link=True)
            library = llvm.JITLibraryBuilder().add_object_img(binary.code).add_current_process()
            for symbol in binary.symbols.values():
                library.export_symbol(symbol)
            self._libraries += 1
            try:
                linked = library.link(self._linker, f"kernel {self._libraries}")
            except RuntimeError as error:
                raise CompileError(f"compiled code has no entry {entry!r}, or cannot be linked", str(error)) from None
        address: int = linked[binary.symbols[entry]]
        return address, linked


_locks_of_forks: list[Any] = []


def _before_fork() -> None:
    """Wait until LLVM has finished what other threads compile: the child has its tables as they are then."""
    library = getattr(sys.modules.get("llvmlite.binding.ffi"), "lib", None)
    lock = getattr(library, "_lock", None) or contextlib.nullcontext()
    lock.__enter__()
    _locks_of_forks.append(lock)


def _after_fork() -> None:
    _locks_of_forks.pop().__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _join(futures: Sequence[Future[None]]) -> None:
    """Wait for all futures, even if a signal handler raises: they write to memory that is freed afterwards."""
    raised: BaseException | None = None
    for future in futures:
        while not future.done():
            try:
                wait((future,))
            except BaseException as error:  # noqa: BLE001  raised below
                raised = error
        future.result()
    if raised is not None:
        raise raised


def _value(kernel: Kernel, position: int, arg: Any) -> Any:
    if not kernel.arguments[position].startswith("*"):
        return provider.check_scalar(kernel.name, position, kernel.arguments[position], arg)
    where = f"kernel {kernel.name!r}, argument {position}"
    if isinstance(arg, Buffer):
        provider.check_owner(arg, CountedMemory, kernel.backend, where)
    elif not hasattr(arg, "data_ptr"):
        raise LaunchError(f"{where}: wanted a buffer, got {type(arg).__name__}")
    elif getattr(arg, "is_cpu", True) is False:
        raise LaunchError(f"{where}: the tensor is on {getattr(arg, 'device', 'a device')}, not on the cpu")
    return arg.data_ptr()


def _has_few(program: str | Builder) -> bool:
    """Return whether a program gets _FEW_PASSES; llvmlite before 0.45 lacks some of them."""
    from llvmlite.binding import ModulePassManager

    return bool(getattr(program, "written_out", False)) and all(
        hasattr(ModulePassManager, f"add_{name}_pass") for name in _FEW_PASSES
    )


def _llvm_version() -> str:
    import llvmlite
    import llvmlite.binding as llvm

    return f"llvmlite {llvmlite.__version__} LLVM {'.'.join(map(str, llvm.llvm_version_info))}"
