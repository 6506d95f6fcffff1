"""Providers over torch's own devices: AMD's with portable C through hiprtc, Apple silicon and others without kernels.

No AMD GPU has run the ROCm provider: the self-test judges it before the automatic choice. Source: HIP API reference,
"Module management" (hipModuleLoadData, hipModuleGetFunction, hipModuleLaunchKernel).
"""

import contextlib
import ctypes
import functools
import itertools
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from accelerant.config import launch_log
from accelerant.errors import BackendUnavailable, CompileError, DeviceLost, LaunchError
from accelerant.runtime import provider
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.cuda import HIP_DIALECTS, compile_hip, hip_key, hiprtc_version, library_names
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.memory.limits import predictions, predicts_here
from accelerant.runtime.provider import (
    SCALAR_CTYPES,
    Arguments,
    Buffer,
    ComputeDevice,
    ComputeProvider,
    Event,
    MemoryInfo,
    watched,
)
from accelerant.runtime.providers.cuda_launch import check_memory, cuda_error, load_error


class TorchProvider(ComputeProvider):
    """A backend whose memory is torch's; by itself without kernels of Accelerant."""

    @classmethod
    def probe(cls) -> str:
        """Ask torch whether it sees such a device."""
        module = getattr(torch, cls.torch_type, None)
        if module is None or not module.is_available():
            return f"torch {torch.__version__} sees no {cls.torch_type} device"
        return ""

    def __init__(self) -> None:
        self._module: Any = torch.get_device_module(self.torch_type)
        self._count = int(self._module.device_count())

    def devices(self) -> list[ComputeDevice]:
        name_of = getattr(self._module, "get_device_name", lambda index: self.torch_type)
        return [
            ComputeDevice(
                backend=self.name,
                index=index,
                name=str(name_of(index)),
                memory_bytes=self.memory(index).total_bytes,
                torch_type=self.torch_type,
                **self._described(index),
            )
            for index in range(self._count)
        ]

    def _described(self, index: int) -> dict[str, Any]:
        """Return the architecture and properties of a device, as ComputeDevice has them."""
        return {}

    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        provider.check_device(self.name, device, self._count)
        self.check_limit(size_bytes, device)
        try:
            storage = torch.empty(size_bytes, dtype=torch.uint8, device=f"{self.torch_type}:{device}")
        except (torch.OutOfMemoryError, MemoryError):
            raise provider.out_of_memory(size_bytes, f"{self.name}:{device}", self.memory(device)) from None
        return Buffer(storage.data_ptr(), size_bytes, device, storage)

    def _filled(self, value: int, shape: int | Sequence[int], dtype: npt.DTypeLike, device: int) -> Buffer:
        one = np.full(1, value, dtype).view(np.uint8)
        if one.size == 0 or np.min(shape, initial=0) < 0:
            return super()._filled(value, shape, dtype, device)
        size_bytes = int(np.prod(shape, dtype=object)) * one.size
        buffer = self.allocate(size_bytes, device)
        storage = provider.check_owner(buffer, torch.Tensor, self.name, "out")
        storage.view(size_bytes // one.size, one.size).copy_(torch.from_numpy(one))
        return buffer

    def _write(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        storage = provider.check_owner(buffer, torch.Tensor, self.name, "out")
        if content.nbytes:
            source = torch.from_numpy(content if content.flags.writeable else content.copy())
            storage[: content.nbytes].copy_(source)

    def _read(self, buffer: Buffer, content: npt.NDArray[np.uint8]) -> None:
        storage = provider.check_owner(buffer, torch.Tensor, self.name, "buffer")
        if content.nbytes:
            torch.from_numpy(content).copy_(storage[: content.nbytes])

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        raise CompileError(f"kernel {source.name!r}: Accelerant has no kernels for {self.name}")

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Arguments, stream: object | None = None
    ) -> None:
        raise LaunchError(f"kernel {kernel.name!r}: Accelerant has no kernels for {self.name}")

    def synchronize(self, device: int = 0) -> None:
        provider.check_device(self.name, device, self._count)
        if self.torch_type == "mps":  # takes no device
            self._module.synchronize()
        else:
            self._module.synchronize(device)

    def memory(self, device: int = 0) -> MemoryInfo:
        provider.check_device(self.name, device, self._count)
        module = self._module
        if self.torch_type == "mps":
            held, total = int(module.current_allocated_memory()), int(module.recommended_max_memory())
            reserved = int(module.driver_allocated_memory())
            return MemoryInfo(total, max(0, total - reserved), held, reserved, held)
        if not hasattr(module, "mem_get_info"):
            return MemoryInfo(0, 0, 0, 0, 0)
        free, total = module.mem_get_info(device)
        figures = (module.memory_allocated(device), module.memory_reserved(device), module.max_memory_allocated(device))
        return MemoryInfo(int(total), int(free), *map(int, figures))

    def record_event(self, device: int = 0) -> Event | None:
        """Return None: calls are counted and not timed."""
        provider.check_device(self.name, device, self._count)
        return None

    def self_test(self, device: int = 0) -> str | None:
        """Compute by torch; on CUDA once the process has a context there, which takes hundreds of megabytes."""
        provider.check_device(self.name, device, self._count)
        driver: Any = torch._C  # whose stubs depend on the build
        if self.torch_type == "cuda" and not driver._cuda_hasPrimaryContext(device):
            return None
        x = torch.arange(1000, dtype=torch.int32)
        there = x.to(f"{self.torch_type}:{device}") * 3 + 1
        wrong = int((there.cpu() != x * 3 + 1).sum())
        return f"{wrong} of {x.numel()} numbers are wrong" if wrong else ""

    def trim(self, device: int = 0) -> None:
        provider.check_device(self.name, device, self._count)
        if hasattr(self._module, "empty_cache"):
            self._module.empty_cache()


class AppleProvider(TorchProvider):
    """The GPU of Apple silicon."""

    name: ClassVar[str] = "apple"
    torch_type: ClassVar[str] = "mps"
    automatic: ClassVar[bool] = True


def torch_provider(torch_type: str) -> TorchProvider:
    """Return a provider for another accelerator of torch, by torch's name ("xpu"), or raise BackendUnavailable."""
    module = getattr(torch, torch_type, None)
    if not (hasattr(module, "device_count") and hasattr(module, "synchronize")):
        raise BackendUnavailable(torch_type, "no provider serves such tensors")
    kind: type[TorchProvider] = type("TorchProvider", (TorchProvider,), {"name": torch_type, "torch_type": torch_type})
    return kind()


# --- AMD -------------------------------------------------------------------------------------------------------------
class RocmProvider(TorchProvider):
    """AMD GPUs, as torch numbers them."""

    name: ClassVar[str] = "rocm"
    dialects: ClassVar[tuple[str, ...]] = HIP_DIALECTS
    torch_type: ClassVar[str] = "cuda"
    automatic: ClassVar[bool] = True

    @classmethod
    def probe(cls) -> str:
        """Ask torch whether it is built for ROCm and sees a device."""
        if torch.version.hip is None:
            return f"torch {torch.__version__} is built without ROCm"
        return super().probe()

    def _described(self, index: int) -> dict[str, Any]:
        return rocm_description(self._module.get_device_properties(index))

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        entry = provider.pick_entry(source, entry)
        provider.check_device(self.name, device, self._count)
        began = time.perf_counter()
        target = self._described(device)["architecture"]
        binary, from_cache = KernelCache().get_or_build(
            hip_key(source, target), lambda: compile_hip(source, target), name=source.name, target=target,
            compiler=hiprtc_version(),
        )  # fmt: skip
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # makes HIP's context
            handle = _LoadedFunction(binary.code, binary.symbols[entry], f"kernel {source.name!r} for {target}")
        return self.describe(
            source, entry, binary, target, began_s=began, from_cache=from_cache, handle=handle, device=device
        )

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Arguments, stream: object | None = None
    ) -> None:
        provider.check_launch(kernel, self.name, grid, block, args)
        check_memory(kernel, args)
        values = [
            ctypes.c_void_p(_address(kernel, position, arg))
            if kind.startswith("*")
            else SCALAR_CTYPES[kind](provider.check_scalar(kernel.name, position, kind, arg))
            for position, (kind, arg) in enumerate(zip(kernel.arguments, args, strict=True))
        ]
        axes = list(itertools.zip_longest(grid, block, range(3), fillvalue=1))
        provider.check_range(kernel, max(blocks * width for blocks, width, _ in axes), 2**32, "threads along an axis")
        raw = torch.cuda.current_stream(kernel.device) if stream is None else stream
        raw = raw if isinstance(raw, int) else getattr(raw, "cuda_stream", None)
        if not isinstance(raw, int):
            raise LaunchError(f"wanted a torch.cuda.Stream or a raw handle, got {type(stream).__name__}")
        if predictions and predicts_here():
            return
        began = time.perf_counter() if launch_log.enabled else 0.0
        with torch.cuda.device(kernel.device):
            blocks, threads, _ = zip(*axes, strict=True)
            kernel.handle.start(blocks, threads, values, raw, f"kernel {kernel.name!r}")
        if launch_log.enabled:
            provider.log_launch(kernel.name, f"rocm:{kernel.device}", grid, block, began)
        if watched:
            provider.noted()

    def synchronize(self, device: int = 0) -> None:
        try:
            super().synchronize(device)
        except RuntimeError as error:
            raise cuda_error(str(error), f"rocm:{device}", "rocm") from error

    def self_test(self, device: int = 0) -> str | None:
        """Compute by torch as the base class does, then by a kernel."""
        found = super().self_test(device)
        return ComputeProvider.self_test(self, device) if found == "" else found

    def lost(self, error: Exception) -> DeviceLost | None:
        translated = cuda_error(str(error), "the device", "rocm")
        return translated if isinstance(translated, DeviceLost) else None


class _LoadedFunction:
    """An entry point of a code object on the current device; it stays loaded as long as the process runs."""

    def __init__(self, code: bytes, symbol: str, what: str) -> None:
        self._hip = _load_hip()
        self._code = code  # HIP may read it later
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        status = self._hip.hipModuleLoadData(ctypes.byref(module), code)
        status = status or self._hip.hipModuleGetFunction(ctypes.byref(self._function), module, symbol.encode())
        if status:
            raise load_error(self._text(status), what, "rocm")

    def start(self, grid: Sequence[int], block: Sequence[int], values: Sequence[Any], stream: int, what: str) -> None:
        """Launch on a raw stream of the current device; HIP copies the arguments before it returns."""
        addresses = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        sizes = map(ctypes.c_uint, (*grid, *block, 0))
        status = self._hip.hipModuleLaunchKernel(self._function, *sizes, ctypes.c_void_p(stream), addresses, None)
        if status:
            raise cuda_error(f"{self._text(status)}, grid {tuple(grid)}, block {tuple(block)}", what, "rocm")

    def _text(self, status: int) -> str:
        return f"{self._hip.hipGetErrorString(status).decode()} (hipError {status})"


@functools.cache
def _load_hip() -> Any:
    """Load HIP, which is torch's own in a ROCm build; raise CompileError if it is not installed."""
    for name in library_names("amdhip64"):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(name)
            library.hipGetErrorString.restype = ctypes.c_char_p
            return library
    raise CompileError(f"HIP is not installed: there is none of {', '.join(library_names('amdhip64'))}")


def _address(kernel: Kernel, position: int, arg: Any) -> int:
    if not hasattr(arg, "data_ptr"):
        where = f"kernel {kernel.name!r}, argument {position}"
        raise LaunchError(f"{where}: wanted a buffer, got {type(arg).__name__}")
    return int(arg.data_ptr())


_ROCM_PROPERTIES = {
    "multi_processor_count": ("multiprocessors", 1), "warp_size": ("warp_size", 1), "clock_rate": ("clock_mhz", 1000),
    "memory_clock_rate": ("memory_clock_mhz", 1000), "memory_bus_width": ("memory_bus_bits", 1),
    "max_threads_per_multi_processor": ("threads_per_multiprocessor", 1), "L2_cache_size": ("l2_bytes", 1),
    "shared_memory_per_block": ("shared_bytes_per_block", 1),
}  # fmt: skip
"""Attribute of torch's properties of a device -> ours, and the divisor to our unit."""


def rocm_description(info: Any) -> dict[str, Any]:
    """Return the architecture and properties from torch's for an AMD device, as far as this torch has them."""
    found: dict[str, Any] = {
        ours: int(getattr(info, theirs)) // divisor
        for theirs, (ours, divisor) in _ROCM_PROPERTIES.items()
        if hasattr(info, theirs)
    }
    if hasattr(info, "uuid"):
        found["uuid"] = str(info.uuid)
    if hasattr(info, "pci_bus_id") and hasattr(info, "pci_domain_id"):
        found["pci_address"] = f"{info.pci_domain_id:04x}:{info.pci_bus_id:02x}:{info.pci_device_id:02x}.0"
    found["rocm"] = torch.version.hip
    return {"architecture": str(getattr(info, "gcnArchName", "")).partition(":")[0], "properties": found}
