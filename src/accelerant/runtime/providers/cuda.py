"""NVIDIA: torch's allocator and streams; CUDA C++ through NVRTC, Triton; both loaded through cuda-bindings.

Launches go to torch's current stream, in order with torch's own work (cuda_launch.py).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from accelerant.errors import CompileError, DeviceLost, LaunchError
from accelerant.runtime import provider
from accelerant.runtime.compilation import background
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.cuda import DIALECTS, compiler_version, cuda_key
from accelerant.runtime.compilation.kernel import Binary, Kernel, KernelSource, Resources
from accelerant.runtime.monitoring import readers
from accelerant.runtime.monitoring.readers import cuda_reader
from accelerant.runtime.provider import Arguments, ComputeDevice, Event, MemoryInfo, Pointer
from accelerant.runtime.providers.cuda_launch import Library, LoadedKernel, check_memory, cuda_error, load_error
from accelerant.runtime.providers.torch_devices import TorchProvider
from accelerant.runtime.streams.stream import capturing, cuda_event

_PROBE = """
import ctypes, sys
try:
    driver = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    sys.exit("no NVIDIA driver: " + str(error))
code = driver.cuInit(0)
if code:
    name = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(name))
    sys.exit("the NVIDIA driver does not start: " + (name.value or str(code).encode()).decode())
version, count = ctypes.c_int(), ctypes.c_int()
driver.cuDriverGetVersion(ctypes.byref(version))
if version.value // 1000 < needed:
    sys.exit(f"CUDA {version.value}")
driver.cuDeviceGetCount(ctypes.byref(count))
if not count.value:
    sys.exit("the NVIDIA driver shows no device")
"""
_PROBE_TIMEOUT_S = 60

_libraries: weakref.WeakValueDictionary[tuple[int, str], Library] = weakref.WeakValueDictionary()
"""The code of a source by its identity, which the library keeps, and target: entry points that are compiled one after
the other share what is read and loaded, 0.5 ms each on the host of an H200.
"""


class CudaProvider(TorchProvider):
    """NVIDIA's devices, as torch numbers them."""

    name: ClassVar[str] = "cuda"
    dialects: ClassVar[tuple[str, ...]] = DIALECTS
    torch_type: ClassVar[str] = "cuda"
    automatic: ClassVar[bool] = True

    @classmethod
    def probe(cls) -> str:
        """Check torch's build, and start the driver in a child process."""
        if torch.version.cuda is None:
            built = "for ROCm" if torch.version.hip else "without CUDA"
            return f"torch {torch.__version__} is built {built}"
        if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
            return "the package cuda-bindings is not installed"
        if torch.cuda.is_initialized():
            return ""
        installed = (str(torch.version.cuda), importlib.metadata.version("cuda-bindings"))
        needed = max(int(version.partition(".")[0]) for version in installed)
        reason = provider.probe_in_child(f"needed = {needed}\n{_PROBE}", "the NVIDIA driver", _PROBE_TIMEOUT_S)
        if old := re.fullmatch(r"CUDA (\d+)", reason):
            return readers.driver_problem(int(old[1]), *installed)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if reason.endswith("shows no device") and visible is not None:
            return f"{reason} with CUDA_VISIBLE_DEVICES={visible} {readers.visible_devices_problem(visible)}".strip()
        return reason

    def __init__(self) -> None:
        torch.cuda.init()
        super().__init__()

    def devices(self) -> list[ComputeDevice]:
        return [
            ComputeDevice(
                backend="cuda",
                index=index,
                name=info.name,
                memory_bytes=info.total_memory,
                architecture=f"sm_{info.major}{info.minor}",
                properties=_specification(index) | {"dtypes": readers.cuda_dtypes(info.major, info.minor)},
                torch_type=self.torch_type,
            )
            for index, info in enumerate(map(torch.cuda.get_device_properties, range(self._count)))
        ]

    def hidden_devices(self) -> list[ComputeDevice]:
        """Return the MIG slices that this process does not see; needs nvidia-ml-py."""
        return readers.hidden_slices({_specification(index)["uuid"].partition("-")[2] for index in range(self._count)})

    def self_test(self, device: int = 0) -> str | None:
        """As the base class, unless the GPU is too old for any kernel."""
        info = torch.cuda.get_device_properties(device)
        return readers.capability_problem(info.major, info.minor) or super().self_test(device)

    def free_fraction(self, device: ComputeDevice) -> float:
        """As the base class; reads NVML if it can, since CUDA itself would make a context on each device."""
        figures, _ = cuda_reader(device).read(("memory_total_bytes", "memory_used_bytes"))
        if len(figures) < 2:
            return super().free_fraction(device)
        total = figures["memory_total_bytes"]
        return provider.room_fraction(
            total, total - figures["memory_used_bytes"], torch.cuda.memory_reserved(device.index)
        )

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        entry = provider.pick_entry(source, entry)
        began = time.perf_counter()
        target = self._target(source, device)
        cache = KernelCache()
        library = _libraries.get((id(source), target))
        if library is not None and library.has(entry, cache.root):
            return self._load(source, entry, library.binary, target, device, True, began)
        key = cuda_key(source, target)
        binary, from_cache = cache.get_or_build(
            key, lambda: background.binary_of(key, source, target), name=source.name, target=target,
            compiler=compiler_version(source),
        )  # fmt: skip
        return self._load(source, entry, binary, target, device, from_cache, began)

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Arguments, stream: object | None = None
    ) -> None:
        provider.check_launch(kernel, self.name, grid, block, args)
        check_memory(kernel, args)
        self._start(kernel, tuple(grid), tuple(block), args, stream)

    def synchronize(self, device: int = 0) -> None:
        provider.check_device(self.name, device, self._count)
        try:
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise cuda_error(str(error), f"cuda:{device}") from error

    def memory(self, device: int = 0) -> MemoryInfo:
        provider.check_device(self.name, device, self._count)
        free, total = torch.cuda.mem_get_info(device)
        # One call: each of torch's getters computes the whole dict.
        pool = torch.cuda.memory_stats_as_nested_dict(device)
        return MemoryInfo(
            total_bytes=total, free_bytes=free, allocated_bytes=pool["allocated_bytes"]["all"]["current"],
            reserved_bytes=pool["reserved_bytes"]["all"]["current"], peak_bytes=pool["allocated_bytes"]["all"]["peak"],
        )  # fmt: skip

    def _in_use(self) -> Iterable[int]:
        return (index for index in range(self._count) if torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined]  # it is there

    def limit_fraction(self, fraction: float, device: ComputeDevice) -> None:
        """Limit torch's allocator, which serves tensors as well as buffers."""
        torch.cuda.set_per_process_memory_fraction(fraction, device.index)

    def lost(self, error: Exception) -> DeviceLost | None:
        translated = cuda_error(str(error), "the device")
        return translated if isinstance(translated, DeviceLost) else None

    def record_event(self, device: int = 0) -> Event | None:
        provider.check_device(self.name, device, self._count)
        return None if capturing(device) else cuda_event(torch.cuda.current_stream(device))

    def _target(self, source: KernelSource, device: int) -> str:
        """Return the device's architecture, with the suffix for its special instructions if the source asks for it."""
        provider.check_device(self.name, device, self._count)
        major, minor = torch.cuda.get_device_capability(device)
        plain = f"sm_{major}{minor}"
        if source.targets and plain not in source.targets:
            if f"{plain}a" in source.targets:
                return f"{plain}a"
            # A target with a suffix ("sm_90a") is for that architecture alone, another one for newer ones as well.
            numbers = [target.removeprefix("sm_") for target in source.targets]
            if not any(number.isdigit() and int(number) <= 10 * major + minor for number in numbers):
                raise CompileError(f"kernel {source.name!r} is for {', '.join(source.targets)}; this device is {plain}")
        return plain

    def _load(
        self, source: KernelSource, entry: str, binary: Binary, target: str, device: int, from_cache: bool, began: float
    ) -> Kernel:
        from cuda.bindings import driver

        kinds = source.entries[entry]
        try:
            with torch.cuda.device(device):
                torch.cuda.current_stream()
                code = _libraries.get((id(source), target))
                if code is None or code.binary is not binary:
                    code = _libraries[id(source), target] = Library(binary, source, KernelCache().root)
                code.entries.add(entry)
                function = code.kernel(binary.symbols[entry])
                shared = int(binary.metadata.get("shared_bytes", 0))
                if shared > 48 * 1024:  # the limit of dynamic shared memory, unless it is raised
                    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                    (status,) = driver.cuKernelSetAttribute(attribute, shared, function, device)
                    if status != driver.CUresult.CUDA_SUCCESS:
                        raise LaunchError(f"{shared} bytes of shared memory a block: {status.name}")
                resources = _complete(binary.resources.get(entry, Resources()), function, shared, device)
        except Exception as error:
            raise load_error(str(error), f"kernel {source.name!r} for {target}") from error
        handle = LoadedKernel(
            entry, function, kinds, code=code,
            extra=max(0, int(binary.metadata.get("parameters", len(kinds))) - len(kinds)), shared_bytes=shared,
            threads=int(binary.metadata.get("threads", 0)), overlaps=bool(binary.metadata.get("overlaps", False)),
        )  # fmt: skip
        return self.describe(
            source, entry, binary, target, began_s=began, from_cache=from_cache, handle=handle, device=device,
            resources=resources,
        )  # fmt: skip

    def _start(
        self, kernel: Kernel, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Pointer | int | float],
        stream: object | None,
    ) -> None:  # fmt: skip
        if torch._C._cuda_getDevice() != kernel.device:
            with torch.cuda.device(kernel.device):
                self._start(kernel, grid, block, args, stream)
            return
        raw = torch._C._cuda_getCurrentRawStream(kernel.device) if stream is None else stream
        if not isinstance(raw, int):
            raw = getattr(stream, "cuda_stream", None)
            if not isinstance(raw, int):
                raise LaunchError(f"wanted a torch.cuda.Stream or a raw handle, got {type(stream).__name__}")
        kernel.handle.start(grid, block, args, raw)


def _complete(reported: Resources, function: int, shared_bytes: int, device: int) -> Resources:
    """Fill in from the driver what the compiler's log does not have."""
    from cuda.bindings import driver

    def attribute(name: str) -> int | None:
        kind = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
        code, value = driver.cuKernelGetAttribute(kind, function, device)
        return int(value) if code == driver.CUresult.CUDA_SUCCESS else None

    return Resources(
        registers=attribute("NUM_REGS") if reported.registers is None else reported.registers,
        spill_bytes=reported.spill_bytes,
        stack_bytes=attribute("LOCAL_SIZE_BYTES") if reported.stack_bytes is None else reported.stack_bytes,
        shared_bytes=shared_bytes or attribute("SHARED_SIZE_BYTES"),
    )


_ATTRIBUTES = {
    "multiprocessors": "MULTIPROCESSOR_COUNT", "warp_size": "WARP_SIZE", "threads_per_block": "MAX_THREADS_PER_BLOCK",
    "threads_per_multiprocessor": "MAX_THREADS_PER_MULTIPROCESSOR",
    "registers_per_multiprocessor": "MAX_REGISTERS_PER_MULTIPROCESSOR",
    "shared_bytes_per_block": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_bytes_per_multiprocessor": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR", "l2_bytes": "L2_CACHE_SIZE",
    "memory_bus_bits": "GLOBAL_MEMORY_BUS_WIDTH",
}  # fmt: skip


@functools.cache
def _specification(index: int) -> dict[str, Any]:
    """Return the properties of a device, which ComputeDevice explains, from the driver; makes no context."""
    from cuda.bindings import driver

    driver.cuInit(0)
    _, handle = driver.cuDeviceGet(index)

    def attribute(name: str) -> int:
        kind = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        code, value = driver.cuDeviceGetAttribute(kind, handle)
        return int(value) if code == driver.CUresult.CUDA_SUCCESS else 0  # as on a slice or a virtual GPU

    info = torch.cuda.get_device_properties(index)
    found: dict[str, Any] = {key: attribute(name) for key, name in _ATTRIBUTES.items()}
    clock_khz, memory_khz = attribute("CLOCK_RATE"), attribute("MEMORY_CLOCK_RATE")
    profile = readers.profile_of(info.name)
    _, address = driver.cuDeviceGetPCIBusId(16, handle)
    _, version = driver.cuDriverGetVersion()
    cudnn = None
    with contextlib.suppress(RuntimeError):  # another cuDNN is loaded than torch was built for
        cudnn = torch.backends.cudnn.version()
    return found | {
        "clock_mhz": clock_khz // 1000,
        "memory_clock_mhz": memory_khz // 1000,
        "memory_bandwidth_gb_s": round(2e-6 * memory_khz * found["memory_bus_bits"] / 8, 1),  # two words a clock
        "matrix_dtypes": readers.matrix_dtypes(info.major, info.minor),
        "pci_address": bytes(address).split(b"\0")[0].decode(),
        "uuid": f"{'MIG' if profile else 'GPU'}-{info.uuid}",
        "mig_profile": profile,
        "cuda": torch.version.cuda,
        "cudnn": f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}" if cudnn else "",
        "driver": f"{version // 1000}.{version % 1000 // 10}",
        "driver_version": readers.driver_version(),
        "minimum_driver": readers.minimum_driver(str(torch.version.cuda)),
    }


class OfflineCudaProvider(CudaProvider):
    """The CUDA provider without a device: `compile` fills the disk cache for an architecture, "sm_90"."""

    def __init__(self, target: str) -> None:
        self.target = target

    def serves(self, source: KernelSource) -> bool:
        """Return whether a source is written for the architecture."""
        return not source.targets or bool({self.target, f"{self.target}a"} & set(source.targets))

    def _target(self, source: KernelSource, device: int) -> str:
        if not self.serves(source):
            raise CompileError(f"kernel {source.name!r} is for {', '.join(source.targets)}; asked for {self.target}")
        return self.target if not source.targets or self.target in source.targets else f"{self.target}a"

    def _load(
        self, source: KernelSource, entry: str, binary: Binary, target: str, device: int, from_cache: bool, began: float
    ) -> Kernel:
        return self.describe(
            source, entry, binary, target, began_s=began, from_cache=from_cache, handle=None, device=-1
        )
