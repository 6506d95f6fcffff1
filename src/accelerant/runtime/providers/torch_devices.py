"""Providers over torch's own devices, by themselves without kernels: Apple silicon, others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from accelerant.errors import BackendUnavailable, CompileError, LaunchError
from accelerant.runtime import provider
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.provider import Arguments, Buffer, ComputeDevice, ComputeProvider, Event, MemoryInfo


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
