"""Copies between host and device that overlap with work, through pinned staging.

    future = copy_async(array, "cuda:0", stream)           # the host is free once the last piece is staged
    x = future.value_on(other_stream)                      # the device waits, not the host

Arrays larger than the device: chunks.py.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future as Task
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accelerant.errors import ConfigError, UnsupportedDtype
from accelerant.runtime.monitoring.topology import DeviceLike
from accelerant.runtime.streams.stream import Event, Future, Stream

__all__ = ["HostArray", "StagingPool", "as_host", "copy_async", "release_staging"]

HostArray = npt.NDArray[Any] | Tensor
"""An array in host memory: NumPy's, mapped files included, or torch's on the CPU."""

_STAGING_BYTES = 32 << 20
"""A pinned buffer; a copy of this size takes 0.6 ms at 55 GB/s, far above the cost of starting it."""


# --- pinned staging --------------------------------------------------------------------------------------------------


class StagingPool:
    """Host buffers used in turn, pinned for CUDA. A buffer is taken again once the copy that last used it is done.

    Args:
        size_bytes: of each buffer.
        count: how many; two let the host fill one while the other travels.
        pinned: whether the device may read them directly.
    """

    def __init__(self, size_bytes: int, count: int = 2, *, pinned: bool = True) -> None:
        if size_bytes < 1 or count < 1:
            raise ConfigError(f"staging wants buffers of at least 1 byte, got {count} of {size_bytes} bytes")
        self.size_bytes = size_bytes
        self.lock = threading.Lock()
        self._buffers = [torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        self._events: list[Event | None] = [None] * count
        self._next = 0

    def copy(self, source: Tensor, target: Tensor, stream: Stream) -> None:
        """Copy flat bytes from pageable host memory to the device; returns when the last piece is staged."""
        with self.lock:
            for begin in range(0, source.numel(), self.size_bytes):
                piece = source[begin : begin + self.size_bytes]
                turn = self._next
                self._next = (turn + 1) % len(self._buffers)
                before = self._events[turn]
                if before is not None:
                    before.synchronize()
                staged = self._buffers[turn][: piece.numel()]
                staged.copy_(piece)
                with stream:
                    target[begin : begin + piece.numel()].copy_(staged, non_blocking=True)
                self._events[turn] = stream.record()


_pools: dict[str, StagingPool] = {}
_pools_lock = threading.Lock()


def _pool_of(stream: Stream) -> StagingPool:
    with _pools_lock:
        name = stream.device.torch_device
        if name not in _pools:
            _pools[name] = StagingPool(_STAGING_BYTES, pinned=stream.device.backend == "cuda")
        return _pools[name]


def release_staging() -> None:
    """Give up the pinned buffers that copy_async keeps; the next copy makes new ones."""
    with _pools_lock:
        _pools.clear()


def copy_async(array: HostArray, device: DeviceLike = "auto", stream: Stream | None = None) -> Future[Tensor]:
    """Copy an array to the device, in order with the stream's work.

    Pinned memory is read by the device directly and must not be changed before the copy is done; other memory goes
    through the pool's pinned buffers, and may be changed as soon as this returns.

    Args:
        array: of any dtype that torch has.
        device: where to; ignored if a stream is given.
        stream: by default the device's current one.

    Returns:
        a future of the tensor on the device.

    Raises:
        UnsupportedDtype: a dtype that torch has not.
        ConfigError: not an array in host memory.
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
        _pool_of(stream).copy(_flat_bytes(source.contiguous()), _flat_bytes(target), stream)
    task.set_result(target)
    return Future(stream, task, stream.record())


# --- host memory -----------------------------------------------------------------------------------------------------


class _Writable:
    """A read-only array to torch, which knows no such thing; it is only read."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array  # lives as long as what is made of this
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def as_host(array: Any, name: str, *, write: bool = False) -> Tensor:
    """The array as a tensor on the same memory."""
    if isinstance(array, Tensor):
        if array.device.type != "cpu":
            raise ConfigError(f"{name}: wanted an array in host memory, got a tensor on {array.device}")
        return array.detach()
    if not isinstance(array, np.ndarray):
        raise ConfigError(f"{name}: wanted a NumPy array or a tensor, got {type(array).__name__}")
    if write and not array.flags.writeable:
        raise ConfigError(f"{name} is read-only")
    if any(stride < 0 for stride in array.strides):
        if write:
            raise ConfigError(f"{name} runs backwards in memory, which torch's tensors cannot")
        array = array.copy()
    try:
        return torch.from_numpy(array if array.flags.writeable else np.asarray(_Writable(array)))
    except TypeError:
        raise UnsupportedDtype(f"{name} is {array.dtype}, which torch has not") from None
    except ValueError as error:  # another byte order
        raise UnsupportedDtype(f"{name} is {array.dtype}: {error}") from None


def _flat_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
