"""Copies between host and device that overlap with work, and functions of arrays larger than the device.

In stream_chunks, three streams let chunk i + 1 travel to the device while chunk i is computed and chunk i - 1 travels
back. Host memory that is not pinned goes through pinned buffers: in by the caller's thread, out by another.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accelerant import runtime
from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, ShapeError, TimeLimitExceeded, UnsupportedDtype
from accelerant.runtime.host import fork_safe, refuse_masked
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import Event
from accelerant.runtime.registry import DeviceLike, find_device
from accelerant.runtime.streams.stream import WITH_STREAMS, Future, Stream

HostArray = npt.NDArray[Any] | Tensor
"""An array in host memory: NumPy's, memory-mapped files included, or torch's on the CPU."""

_STAGING_BYTES = 32 << 20
"""Size of a pinned buffer: its copy takes 0.6 ms at 55 GB/s, far more than the cost of starting it."""


class StagingPool:
    """Host buffers used in turn, pinned for CUDA. A buffer is reused once its last copy is done.

    With two, the host fills one while the other is copied.
    """

    def __init__(self, size_bytes: int, count: int = 2, *, pinned: bool = True) -> None:
        if size_bytes < 1 or count < 1:
            raise ConfigError(f"staging wants buffers of at least 1 byte, got {count} of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.lock = fork_safe(threading.Lock())
        self._buffers = [
            torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(count)
        ]
        self._events: list[Event | None] = [None] * count
        self._next = 0

    def __repr__(self) -> str:
        return f"StagingPool({len(self._buffers)} buffers of {self.size_bytes:,} bytes)"

    def copy(self, source: Tensor, target: Tensor, stream: Stream) -> None:
        """Copy flat bytes from pageable host memory to the device; returns when the last part is staged."""
        with self.lock:
            for begin in range(0, source.numel(), self.size_bytes):
                part = source[begin : begin + self.size_bytes]
                turn = self._next
                self._next = (turn + 1) % len(self._buffers)
                if (last_copy := self._events[turn]) is not None:
                    last_copy.synchronize()
                staged = self._buffers[turn][: part.numel()]
                staged.copy_(part)
                with stream:
                    target[begin : begin + part.numel()].copy_(staged, non_blocking=True)
                self._events[turn] = stream.record()


@functools.cache
def _staging_pool(device: str) -> StagingPool:
    return StagingPool(_STAGING_BYTES)


def copy_async(array: HostArray, device: DeviceLike = None, stream: Stream | None = None) -> Future[Tensor]:
    """Copy an array to the device in order with a stream's work, and return a Future of the tensor.

    Pinned memory is read by the device directly and must not change before the copy is done; other memory goes through
    pinned buffers and may change as soon as this returns. The stream is by default the device's current one. A dtype
    that torch lacks raises UnsupportedDtype.
    """
    source = as_host(array, "array")
    stream = Stream.current(device) if stream is None else stream
    task: Task[Tensor] = Task()
    if stream.torch_stream is None:
        with stream:
            task.set_result(source.clone())
        return Future(stream, task, None)
    with stream:
        target = torch.empty(source.shape, dtype=source.dtype, device=stream.device.torch_device)
        if source.is_pinned():
            target.copy_(source, non_blocking=True)
    if not source.is_pinned() and source.numel():
        _staging_pool(stream.device.torch_device).copy(_flat_bytes(source.contiguous()), _flat_bytes(target), stream)
    task.set_result(target)
    return Future(stream, task, stream.record())


def _writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Show a read-only array as writable, since torch has no read-only tensors; it is only read."""
    interface = array.__array_interface__ | {"data": (array.ctypes.data, False)}
    return np.asarray(SimpleNamespace(__array_interface__=interface, memory=array))


def as_host(array: Any, name: str, *, write: bool = False) -> Tensor:
    """Return the array as a tensor on the same memory."""
    if isinstance(array, Tensor):
        if array.device.type != "cpu":
            raise ConfigError(f"{name}: wanted an array in host memory, got a tensor on {array.device}")
        return array.detach()
    refuse_masked(array, name)
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{name}: wanted a NumPy array or a tensor, got {type(array).__name__}")
    if write and not array.flags.writeable:
        raise ConfigError(f"{name} is read-only")
    if any(stride < 0 for stride in array.strides):
        if write:
            raise ConfigError(f"{name} has negative strides, which torch's tensors cannot have")
        array = array.copy()
    try:
        return torch.from_numpy(array if array.flags.writeable else _writable(array))
    except TypeError:
        raise UnsupportedDtype(f"{name} is {array.dtype}, which torch does not have") from None
    except ValueError as error:  # another byte order
        raise UnsupportedDtype(f"{name} is {array.dtype}: {error}") from None


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


_CHUNK_BYTES = 64 << 20
_DEPTH = 4  # chunks in flight: one in each of the three stages, and one whose buffers the host fills


@dataclass(slots=True)
class ChunkedRun:
    """The result and times of stream_chunks.

    Attributes:
        result: one array, or a tuple of them, as the function returns; NumPy's if the first input was.
        bytes_in, bytes_out: copied to the device and back.
        elapsed_s: of the whole call.
        device_s: from the start of the first copy to the end of the last, by the device's events.
        copy_in_s, compute_s, copy_out_s: the stages, by the device's events; they overlap.
    """

    result: Any = field(default=None, repr=False)
    rows: int = 0
    chunks: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    elapsed_s: float = 0.0
    device_s: float = 0.0
    copy_in_s: float = 0.0
    compute_s: float = 0.0
    copy_out_s: float = 0.0

    @property
    def overlap(self) -> float:
        """The sum of the stages over device_s: 1 without overlap, at most 3."""
        parts = self.copy_in_s + self.compute_s + self.copy_out_s
        return parts / self.device_s if self.device_s else 1.0

    def __str__(self) -> str:
        return (
            f"{self.rows:,} rows in {self.chunks} chunks, {self.elapsed_s:.3f} s: in {self.copy_in_s:.3f} s, "
            f"compute {self.compute_s:.3f} s, out {self.copy_out_s:.3f} s, overlap {self.overlap:.2f}"
        )


@renamed_arguments(timeout_s="timeout")
def stream_chunks(
    fn: Callable[..., Tensor | tuple[Tensor, ...]],
    arrays: HostArray | Sequence[HostArray],
    *,
    device: DeviceLike = None,
    chunk_bytes: int | None = None,
    out: HostArray | Sequence[HostArray] | None = None,
    atomic: bool = True,
    timeout: float | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> ChunkedRun:
    """Apply a function of rows to arrays that need not fit the device, overlapping copies and work.

    fn is called under no_grad with one tensor for each array, the same rows of each, and returns one tensor or several
    with as many rows. If it computes each row by itself, the result equals that of one call: exactly for elementwise
    functions, and for others as far as their kernels do not depend on the number of rows. On OpenCL and WebGPU, whose
    providers have one queue, a chunk is copied, computed and copied back before the next; compute_s has all of it.

    Args:
        arrays: one or several, in host memory, with the same first dimension.
        chunk_bytes: input bytes a chunk, at least one row; by default up to 64 MiB, as the device has room.
        out: arrays to write the result to, instead of new ones.
        atomic: whether to write `out` only at the end, at the cost of a second array of its size; if not, an error
            leaves the rows before it written.
        timeout: checked between chunks; rows in flight are waited for.
        progress: called with the rows done and the number of rows, in order, in the caller's thread.

    Raises:
        TimeLimitExceeded: timeout has passed; with atomic, `out` is unchanged.
        ShapeError: the arrays differ in their rows, fn returns another number of rows, or out does not fit.
        UnsupportedDtype: a dtype that torch, or for the result NumPy, lacks.
        ConfigError: an invalid argument.
    """
    where = find_device(device)
    if where.backend not in WITH_STREAMS:
        if chunk_bytes is None:
            chunk_bytes = max(1, min(_CHUNK_BYTES, available_bytes(where) // (8 * _DEPTH)))
        compute, there, where = fn, where, find_device("cpu")

        def fn(*tensors: Tensor) -> Any:
            return runtime.tensors_to(compute(*runtime.tensors_to(tensors, there)), "cpu")

    inputs = [arrays] if isinstance(arrays, (np.ndarray, Tensor)) else list(arrays)
    if not (sources := [as_host(array, f"array {i}") for i, array in enumerate(inputs)]):
        raise ConfigError("stream_chunks wants at least one array, got none")
    shapes = [tuple(source.shape) for source in sources]
    if not all(shapes) or len({shape[0] for shape in shapes}) != 1:
        raise ShapeError(f"the arrays must have the same first dimension; got {', '.join(map(str, shapes))}")
    if chunk_bytes is not None and chunk_bytes < 1:
        raise ConfigError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout must be above 0, or None for no limit; got {timeout}")
    outputs = None if out is None else [out] if isinstance(out, (np.ndarray, Tensor)) else list(out)
    targets = None if outputs is None else [as_host(array, f"out {i}", write=True) for i, array in enumerate(outputs)]
    as_numpy = isinstance(inputs[0], np.ndarray)
    pipeline = _Pipeline(fn, sources, where, chunk_bytes, None if atomic else targets, targets, as_numpy)
    run = pipeline.run(timeout, progress)
    if targets is not None and atomic:
        for target, value in zip(targets, pipeline.results, strict=True):
            target.copy_(value)
    results = outputs or [value.numpy() if as_numpy else value for value in pipeline.results]
    run.result = results[0] if pipeline.single else tuple(results)
    return run


@dataclass(slots=True)
class _ChunkBuffers:
    """The memory of a chunk in flight."""

    inputs: list[Tensor]
    staged: list[Tensor]
    staged_out: list[Tensor] = field(default_factory=list)


@dataclass(slots=True)
class _Flight:
    """A chunk in flight: its rows, its events, and the task that copies its rows from pinned memory to the result."""

    buffers: _ChunkBuffers
    rows: range
    marks: list[Event]
    unstaging: Task[None] | None = None
    values: tuple[Tensor, ...] = ()


class _Pipeline:
    """The chunks of one call of stream_chunks."""

    def __init__(
        self, fn: Callable[..., Any], sources: list[Tensor], device: DeviceLike, chunk_bytes: int | None,
        results: list[Tensor] | None, expected: list[Tensor] | None = None, as_numpy: bool = False,
    ) -> None:  # fmt: skip
        self.fn = fn
        self.sources = sources
        self.results: list[Tensor] = results or []
        self.expected = expected
        self.as_numpy = as_numpy
        self.single = True
        self.work = Stream(device)
        self.into, self.outof = Stream(self.work.device), Stream(self.work.device)
        self.cuda = self.work.device.backend == "cuda"
        self.torch_device = torch.device(self.work.device.torch_device)
        self.rows = sources[0].shape[0]
        self.step = self._rows_per_chunk(chunk_bytes)
        self.record = ChunkedRun(rows=self.rows)
        self.first: Event | None = None
        self.flights: deque[_Flight] = deque()
        self.unstager = ThreadPoolExecutor(1, thread_name_prefix="accelerant-unstage")

    def run(self, timeout: float | None, progress: Callable[[int, int], object] | None) -> ChunkedRun:
        """Run all chunks; nothing is in flight afterwards, even after an error."""
        began = time.perf_counter()
        guard = torch.cuda.device(self.torch_device) if self.cuda else nullcontext()
        try:
            with torch.no_grad(), guard:
                self.work.wait_stream(Stream.current(self.work.device))
                spare = [self._new_buffers() for _ in range(min(_DEPTH, max(1, -(-self.rows // self.step))))]
                for begin in range(0, max(1, self.rows), self.step):
                    while not spare or (
                        self.flights and (self.flights[0].unstaging or self.flights[0].marks[-1]).done()
                    ):
                        spare.append(self._land(progress))
                    self._check_time(began, timeout)
                    self.flights.append(self._start(spare.pop(), range(begin, min(begin + self.step, self.rows))))
                while self.flights:
                    self._land(progress)
                self._check_time(began, timeout)
        finally:
            self._settle()
        self.record.elapsed_s = time.perf_counter() - began
        return self.record

    def _start(self, buffers: _ChunkBuffers, rows: range) -> _Flight:
        inputs = [tensor[: len(rows)] for tensor in buffers.inputs]
        parts = [source[rows.start : rows.stop] for source in self.sources]
        for i, staged in enumerate(buffers.staged):  # memory that is not pinned
            if staged.numel():
                parts[i] = staged[: len(rows)].copy_(parts[i])
        begun = self.into.record()
        with self.into:
            for tensor, part in zip(inputs, parts, strict=True):
                tensor.copy_(part, non_blocking=True)
        arrived = self.into.record()
        self.work.wait(arrived)
        with self.work:
            ready = self.work.record()
            values = self._checked(self.fn(*inputs), len(rows))
            computed = self.work.record()
        self.outof.wait(computed)
        leaving = self.outof.record()
        targets = self._copy_out(buffers, values, rows)
        left = self.outof.record()
        flight = _Flight(buffers, rows, [begun, arrived, ready, computed, leaving, left], values=values)
        if targets:

            def unstage() -> None:
                left.synchronize()
                for staged, target in targets:
                    target.copy_(staged)

            flight.unstaging = self.unstager.submit(unstage)
        self.first = self.first or begun
        self.record.chunks += 1
        self.record.bytes_in += sum(tensor.nbytes for tensor in inputs)
        self.record.bytes_out += sum(value.nbytes for value in values)
        return flight

    def _copy_out(self, buffers: _ChunkBuffers, values: tuple[Tensor, ...], rows: range) -> list[tuple[Tensor, Tensor]]:
        """Start the copies to the host, and return the pairs of pinned buffers and targets still to be copied."""
        pending: list[tuple[Tensor, Tensor]] = []
        if self.cuda and not buffers.staged_out:
            buffers.staged_out = [
                _pinned((0 if result.is_pinned() else self.step, *result.shape[1:]), result.dtype)
                for result in self.results
            ]
        with self.outof:
            for i, (result, value) in enumerate(zip(self.results, values, strict=True)):
                target = result[rows.start : rows.stop]
                if self.cuda and buffers.staged_out[i].numel():
                    staged = buffers.staged_out[i][: len(rows)]
                    pending.append((staged, target))
                    target = staged
                target.copy_(value, non_blocking=True)
        return pending

    def _land(self, progress: Callable[[int, int], object] | None) -> _ChunkBuffers:
        """Wait for the oldest chunk, add its times, and return its buffers."""
        flight = self.flights.popleft()
        flight.marks[-1].synchronize()
        if flight.unstaging is not None:
            flight.unstaging.result()
        begun, arrived, ready, computed, leaving, left = flight.marks
        self.record.copy_in_s += begun.elapsed_ms(arrived) / 1e3
        self.record.compute_s += ready.elapsed_ms(computed) / 1e3
        self.record.copy_out_s += leaving.elapsed_ms(left) / 1e3
        if self.first is not None:
            self.record.device_s = self.first.elapsed_ms(left) / 1e3
        if progress is not None:
            progress(flight.rows.stop, self.rows)
        return flight.buffers

    def _settle(self) -> None:
        """Wait for all chunks in flight, so that no memory is freed while the device uses it."""
        try:
            for stream in (self.into, self.work, self.outof):
                stream.synchronize()
        finally:
            self.unstager.shutdown(wait=True)
            self.flights.clear()

    def _rows_per_chunk(self, chunk_bytes: int | None) -> int:
        row = sum(source[0].nbytes for source in self.sources) if self.rows else 0
        if not row:
            return max(1, self.rows)
        if chunk_bytes is None:
            room = available_bytes(self.work.device) // (8 * _DEPTH)  # the function has results and temporaries too
            chunk_bytes = max(1 << 20, min(_CHUNK_BYTES, room, row * self.rows // 16))
        return min(self.rows, max(1, chunk_bytes // row))

    def _new_buffers(self) -> _ChunkBuffers:
        inputs, staged = [], []
        for source in self.sources:
            shape = (self.step, *source.shape[1:])
            with self.into:
                inputs.append(torch.empty(shape, dtype=source.dtype, device=self.torch_device))
            direct = not self.cuda or (source.is_pinned() and source.is_contiguous())
            staged.append(_pinned((0,) if direct else shape, source.dtype))
        return _ChunkBuffers(inputs, staged)

    def _checked(self, values: Any, rows: int) -> tuple[Tensor, ...]:
        """Check and return the values of fn; the first call determines the result's arrays."""
        single = isinstance(values, Tensor)
        checked: tuple[Tensor, ...] = (values,) if single else tuple(values)
        for i, value in enumerate(checked):
            if not isinstance(value, Tensor) or value.dim() == 0 or value.shape[0] != rows:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ShapeError(f"fn was given {rows} rows and must return as many; result {i} is {got}")
            if self.as_numpy and value.dtype == torch.bfloat16:
                raise UnsupportedDtype(f"result {i} is bfloat16, which NumPy lacks; return float32 or pass tensors")
        if not self.record.chunks:
            self.single = single
            kinds = [((self.rows, *value.shape[1:]), value.dtype) for value in checked]
            out_kinds = kinds if self.expected is None else [(tuple(out.shape), out.dtype) for out in self.expected]
            if out_kinds != kinds:
                raise ShapeError(f"out must be {_listed(kinds)}, got {_listed(out_kinds)}")
            self.results = self.results or [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in kinds]
        for i, (value, result) in enumerate(zip(checked, self.results, strict=True)):
            if value.shape[1:] != result.shape[1:] or value.dtype != result.dtype:
                raise ShapeError(
                    f"fn's result {i} was {tuple(result.shape[1:])} {result.dtype} a row and now is "
                    f"{tuple(value.shape[1:])} {value.dtype}"
                )
        return checked

    def _check_time(self, began: float, timeout: float | None) -> None:
        passed = time.perf_counter() - began
        if timeout is not None and passed > timeout:
            done = self.flights[0].rows.start if self.flights else self.record.chunks * self.step
            raise TimeLimitExceeded(
                f"stream_chunks: {timeout} s are over after {min(done, self.rows):,} of {self.rows:,} rows"
            )


def _pinned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=0 not in shape)


def _listed(kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{shape} {str(dtype).removeprefix('torch.')}" for shape, dtype in kinds)
