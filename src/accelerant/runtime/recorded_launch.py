"""Kernel launches that record themselves in the ledger, for ops with one implementation on each backend.

record = sole_record("curve_neg", "llvm", "cpu", "cpu", "8 bn254_g1", size_bytes=1024)      kept by the caller
with RecordedLaunch(record, space.provider, space.index):
launch(space, source, "curve_neg", blocks, threads, (x, z), n)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from accelerant.errors import OutOfMemory
from accelerant.runtime.compilation.kernel import Kernel, KernelSource
from accelerant.runtime.ledger import Decision, OpRecord, ledger, observers
from accelerant.runtime.provider import ComputeProvider, Pointer, lacks_host_memory

_ledger = ledger()
_kernels: dict[tuple[str, str, str, int], Kernel] = {}  # compiled kernels, by program, entry point, backend and device


on_forget: list[Callable[[], object]] = []
"""Functions that clear caches of what holds compiled kernels, called when a backend's provider is replaced."""


class LaunchMemory(Protocol):
    """The memory of one device: its provider, the device's index, and the addresses of arrays in it."""

    backend: str
    index: int

    @property
    def provider(self) -> ComputeProvider:
        """Return the provider that computes there."""

    def pointer(self, words: Any, /) -> Pointer:
        """Return what a launch takes for an array."""


def sole_record(
    op: str, implementation: str, backend: str, device: str, case: str, *, size_bytes: int, operations: int = 0
) -> OpRecord:
    """Return the ledger's record of an op's only implementation on a backend; callers cache it."""
    key, reason = (op, implementation, backend, device, case), f"the only one on {backend}"
    return _ledger.record(OpRecord(*key, True, (), size_bytes, operations, reason=reason))


class RecordedLaunch:
    """Context manager that counts its block as one call, times a sample of the calls, and notifies `explain`.

    An error after which the device is unusable becomes DeviceLost, and exhausted memory of the host OutOfMemory.
    """

    __slots__ = ("_index", "_provider", "_record", "_start")

    def __init__(self, record: OpRecord, provider: ComputeProvider, index: int) -> None:
        self._record, self._provider, self._index = record, provider, index

    def __enter__(self) -> None:
        self._start = _ledger.begin(self._record, self._provider, self._index)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        record = self._record
        if error is not None:
            _ledger.failed(record)
            lost = self._provider.lost(error) if isinstance(error, Exception) else None
            if lost is not None:
                raise lost from error
            if lacks_host_memory(error):
                raise OutOfMemory(f"{record.op} ({record.case}): the host's memory is exhausted: {error}") from error
            return
        if self._start is not None:
            _ledger.end(record, self._start, self._provider, self._index)
        if observers:
            names = (record.op, record.case, record.device, record.implementation)
            decision = Decision(*names, own=True, reason=record.reason)
            for observer in list(observers):
                observer(decision)


def compiled(space: LaunchMemory, source: KernelSource, entry: str) -> Kernel:
    """Return the kernel of an entry point, compiled on first use; the name of a source determines its text."""
    key = (source.name, entry, space.backend, space.index)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = space.provider.compile(source, entry=entry, device=space.index)
    return kernel


def forget(backend: str) -> None:
    """Forget the compiled kernels of a backend, whose provider is replaced by another."""
    for key in [key for key in _kernels if key[2] == backend]:
        del _kernels[key]
    for clear in on_forget:
        clear()


def launch(
    space: LaunchMemory, source: KernelSource, entry: str, blocks: int, threads: int, arrays: Sequence[Any],
    *scalars: int,
) -> None:  # fmt: skip
    """Launch an entry point of a program on contiguous arrays of the space, then scalars; compiled on first use.

    The source's name must name everything that its text depends on. On the CPU `blocks` is the number of indices.
    """
    kernel = compiled(space, source, entry)
    space.provider.launch(kernel, (blocks,), (threads,), (*map(space.pointer, arrays), *scalars))
