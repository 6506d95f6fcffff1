"""A provider for tests of programs that use Accelerant: in memory, with times, counts and failures that tests decide.

>>> with fake_provider() as fake:
...     fake.fail("launch", DeviceLost("the test's"), after=2)
...     acl.Accelerator("fake", fallback=False).field_add([1, 2], [3, 4])
>>> fake.counts["launch"], fake.now_ms

`pytest tests/conformance --backend fake` shows that it keeps the contract of a provider.
"""

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from accelerant.errors import AccelerantError, ConfigError, LaunchError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import (
    Arguments,
    Buffer,
    ComputeDevice,
    Event,
    MemoryCounter,
    MemoryInfo,
    check_device,
    out_of_memory,
)
from accelerant.runtime.providers.cpu import CpuProvider

__all__ = ["FakeProvider", "fake_provider"]

_COUNTED = ("allocate", "copy_to_device", "copy_to_host", "compile", "launch", "synchronize", "record_event")
_LAUNCH_MS, _INDEX_MS, _BYTE_MS, _EVENT_MS = 0.01, 1e-6, 1e-7, 0.001


class _FakeEvent(Event):
    def __init__(self, now_ms: float) -> None:
        self.now_ms = now_ms

    def done(self) -> bool:
        return True

    def elapsed_ms(self, later: Event) -> float:
        return self.same_kind(later).now_ms - self.now_ms


class FakeProvider(CpuProvider):
    """The backend "fake": kernels of the CPU's dialects run on the CPU, in the calling thread, and give real results.

    Its devices have no torch tensors, like those of OpenCL: what it does not have falls back to the CPU, as it would
    there. Time passes only by calls: 0.01 ms a launch and 1 ms for a million of its indices, 1 ms for 10 MB copied,
    0.001 ms a mark on the stream. The same calls therefore take the same time in each run and on each machine.

    Args:
        devices: number of devices.
        memory_bytes: of each device; larger allocations raise OutOfMemory.

    Attributes:
        counts: calls by method ("allocate", "copy_to_device", "copy_to_host", "compile", "launch", "synchronize",
            "record_event"), and launches by kernel ("launch field_add"). Calls that failed count, too.
        now_ms: the time that has passed.
    """

    name: ClassVar[str] = "fake"
    torch_type: ClassVar[str] = ""
    automatic: ClassVar[bool] = False

    def __init__(self, devices: int = 1, memory_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.cores = 1
        self.counts: Counter[str] = Counter()
        self.now_ms = 0.0
        self._memory_bytes = memory_bytes
        self._counters = [MemoryCounter() for _ in range(devices)]
        self._failures: dict[str, list[tuple[int, Exception]]] = {}
        self._clock = fork_safe(threading.RLock())

    def fail(self, method: str, error: Exception | None = None, *, after: int = 0, times: int = 1) -> None:
        """Let calls of a method raise an error: the next one, or after some that succeed; nothing is done by them.

        The error is a LaunchError by default. DeviceLost, CompileError and OutOfMemory are others that real devices
        raise. An unknown method raises ConfigError.
        """
        if method not in _COUNTED:
            raise ConfigError(f"fail: no method {method!r}; there are {', '.join(_COUNTED)}")
        if after < 0 or times < 1:
            raise ConfigError(f"fail: wanted after >= 0 and times >= 1, got {after} and {times}")
        raised = error or LaunchError(f"the fake provider was asked to fail in {method}")
        planned = self._failures.setdefault(method, [])
        planned += [(self.counts[method] + after + i + 1, raised) for i in range(times)]

    def _enter(self, method: str, cost_ms: float = 0.0, detail: str = "") -> float:
        """Count a call and raise its planned failure; else let time pass, and return the time."""
        with self._clock:
            self.counts[method] += 1
            if detail:
                self.counts[f"{method} {detail}"] += 1
            for planned in self._failures.get(method, ()):
                if planned[0] == self.counts[method]:
                    self._failures[method].remove(planned)
                    raise planned[1]
            self.now_ms += cost_ms
            return self.now_ms

    def devices(self) -> list[ComputeDevice]:
        return [
            ComputeDevice(
                backend=self.name, index=index, name=f"fake device {index}", memory_bytes=self._memory_bytes,
                architecture="fake",
            )
            for index in range(len(self._counters))
        ]  # fmt: skip

    def allocate(self, size_bytes: int, device: int = 0) -> Buffer:
        check_device(self.name, device, len(self._counters))
        self._enter("allocate")
        counter = self._counters[device]
        self.check_limit(size_bytes, device)
        if counter.allocated_bytes + size_bytes > self._memory_bytes:
            raise out_of_memory(size_bytes, f"{self.name}:{device}", self.memory(device))
        return self._allocated(size_bytes, device, counter)

    def copy_to_device(self, array: npt.ArrayLike, device: int = 0, *, out: Buffer | None = None) -> Buffer:
        check_device(self.name, device, len(self._counters))
        self._enter("copy_to_device", np.asarray(array).nbytes * _BYTE_MS)
        return super().copy_to_device(array, device, out=out)

    def copy_to_host(self, buffer: Buffer, dtype: npt.DTypeLike, shape: Sequence[int]) -> npt.NDArray[Any]:
        array = super().copy_to_host(buffer, dtype, shape)
        self._enter("copy_to_host", array.nbytes * _BYTE_MS)
        return array

    def compile(self, source: KernelSource, *, entry: str | None = None, device: int = 0) -> Kernel:
        check_device(self.name, device, len(self._counters))
        self._enter("compile")
        kernel = super().compile(source, entry=entry)
        kernel.device = device
        return kernel

    def launch(
        self, kernel: Kernel, grid: Sequence[int], block: Sequence[int], args: Arguments, stream: object | None = None
    ) -> None:
        indices = prod((*grid, *block))
        self._enter("launch", _LAUNCH_MS + max(0, indices) * _INDEX_MS, kernel.name)
        super().launch(kernel, grid, block, args, stream)

    def synchronize(self, device: int = 0) -> None:
        check_device(self.name, device, len(self._counters))
        self._enter("synchronize")

    def memory(self, device: int = 0) -> MemoryInfo:
        check_device(self.name, device, len(self._counters))
        held, peak = self._counters[device].allocated_bytes, self._counters[device].peak_bytes
        return MemoryInfo(self._memory_bytes, self._memory_bytes - held, held, held, peak)

    def record_event(self, device: int = 0) -> Event:
        check_device(self.name, device, len(self._counters))
        return _FakeEvent(self._enter("record_event", _EVENT_MS))

    def free_fraction(self, device: ComputeDevice) -> float:
        return 1.0

    def trim(self, device: int = 0) -> None:
        check_device(self.name, device, len(self._counters))


@contextmanager
def fake_provider(**options: int) -> Iterator[FakeProvider]:
    """Register a FakeProvider, made with these options, as the backend "fake" for a block of code.

    Raises ConfigError if "fake" is registered already.
    """
    if FakeProvider.name in registry.backends():
        raise AccelerantError("a fake provider is registered already; unregister it, or leave its block first")
    provider = registry.register(FakeProvider(**options))
    try:
        yield provider
    finally:
        registry.unregister(provider.name)
        provider.shutdown()
