"""Streams, events, and futures of device work.

On CUDA these are torch's streams and events. The CPU has none: there, work in a `with` block runs at once in the
caller's thread, and submitted functions run in order on a thread of the stream. What such a function gives to its own
stream runs at once, within the function.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for_tasks
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from accelerant._renamed import renamed_arguments
from accelerant.config import carried
from accelerant.errors import AccelerantError, ConfigError, TimeLimitExceeded, UnsupportedCase
from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import ComputeDevice, Event, check_timeout, poll_pause_s
from accelerant.runtime.providers.cuda_launch import cuda_error
from accelerant.runtime.registry import DeviceLike, find_device, is_automatic

WITH_STREAMS = ("cuda", "cpu")
"""Backends with streams; the others work through the one queue of their provider."""

T = TypeVar("T")


class _CudaEvent(Event):
    __slots__ = ("event",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def done(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError as error:
            raise cuda_error(str(error), "waiting for the device") from error

    def _wait(self, timeout: float | None) -> None:
        if timeout is not None:
            super()._wait(timeout)
            return
        try:
            self.event.synchronize()
        except RuntimeError as error:
            raise cuda_error(str(error), "waiting for the device") from error

    def elapsed_ms(self, later: Event) -> float:
        return float(self.event.elapsed_time(self.same_kind(later).event))


cuda_event = _CudaEvent  # records an event that times on a stream of CUDA


class _TaskEvent(Event):
    """The time at which the stream's thread reached the mark; the present time if the thread is idle."""

    __slots__ = ("task",)

    def __init__(self, task: Task[float] | None) -> None:
        if task is None:
            task = Task()
            task.set_result(time.perf_counter())
        self.task = task

    def done(self) -> bool:
        return self.task.done()

    def _wait(self, timeout: float | None) -> None:
        try:
            self.task.result(timeout)
        except TimeoutError:
            raise TimeLimitExceeded(f"the stream's work was not done within {timeout} s") from None

    def elapsed_ms(self, later: Event) -> float:
        return float(self.same_kind(later).task.result() - self.task.result()) * 1e3


class Stream:
    """A queue of work on a device; work on different streams may overlap.

    On CUDA, priority -1 takes precedence over 0, and a `torch_stream` is represented instead of a new one. Backends
    whose provider has one queue raise UnsupportedCase.
    """

    def __init__(
        self, device: DeviceLike = None, *, priority: int = 0, torch_stream: torch.cuda.Stream | None = None
    ) -> None:
        self.device = _with_streams(device)
        self._cuda = torch_stream
        if self.device.backend == "cuda" and torch_stream is None:
            self._cuda = torch.cuda.Stream(torch.device(self.device.torch_device), priority=priority)
        self._lock = fork_safe(threading.Lock())
        self._thread: ThreadPoolExecutor | None = None
        self._thread_pid = 0
        self._last: Task[Any] | None = None
        self._awaited: Stream | None = None
        self._entered = threading.local()

    @classmethod
    def current(cls, device: DeviceLike = None) -> Stream:
        """Return torch's current stream on the device; on the CPU, one that all callers share."""
        target = _with_streams(device)
        if target.backend == "cpu":
            with _shared_lock:
                if not _shared:
                    _shared.append(Stream(target))
                return _shared[0]
        return cls(target, torch_stream=torch.cuda.current_stream(target.index))

    @property
    def cuda_stream(self) -> int:
        """The driver's handle, for a provider's launch; 0 on the CPU."""
        return 0 if self._cuda is None else int(self._cuda.cuda_stream)

    @property
    def torch_stream(self) -> torch.cuda.Stream | None:
        """Torch's stream; None on the CPU."""
        return self._cuda

    def record(self) -> Event:
        """Mark the end of what the stream was given so far."""
        if self._cuda is not None:
            return _CudaEvent(self._cuda)
        return _TaskEvent(None if self._idle() else self.run(time.perf_counter))

    def wait(self, event: Event) -> None:
        """Make later work on this stream wait for the event; the host does not wait."""
        if self._cuda is not None and isinstance(event, _CudaEvent):
            self._cuda.wait_event(event.event)
        elif self._cuda is not None:
            event.synchronize()  # no device can wait for the host
        elif not event.done():
            self.run(event.synchronize)

    def wait_stream(self, other: Stream) -> None:
        """Make later work on this stream wait for the work given to another so far."""
        self.wait(other.record())

    def done(self) -> bool:
        """Return whether all work given to the stream is done; does not wait."""
        return self._idle() if self._cuda is None else bool(self._cuda.query())

    @renamed_arguments(timeout_s="timeout")
    def synchronize(self, timeout: float | None = None) -> None:
        """Wait on the host for all work given to the stream; raise as Event.synchronize does."""
        self.record().synchronize(timeout)

    def run(self, fn: Callable[..., T], *args: Any) -> Task[T]:
        """Run fn on the thread of a CPU stream, after the work given before; at once if this is that thread.

        Other devices raise UnsupportedCase.
        """
        if self._cuda is not None:
            raise UnsupportedCase(f"{self!r} has no thread; use submit()")
        if _stream_of_thread() is self:
            return _ran(fn, *args)
        with self._lock:
            if self._thread is None or self._thread_pid != os.getpid():  # threads do not survive a fork
                started = (_of_thread.__setattr__, ("stream", weakref.ref(self)))
                self._thread = ThreadPoolExecutor(1, "accelerant-stream", *started)
                self._thread_pid = os.getpid()
            task = self._last = self._thread.submit(fn, *args)
        return task

    def __enter__(self) -> Stream:
        if self._cuda is not None:
            context = torch.cuda.stream(self._cuda)
            context.__enter__()
            self._entered.__dict__.setdefault("contexts", []).append(context)
        else:
            self.synchronize()
        return self

    def __exit__(self, *raised: Any) -> None:
        if self._cuda is not None:
            self._entered.contexts.pop().__exit__(*raised)

    def __repr__(self) -> str:
        return f"Stream({self.device.backend}:{self.device.index})"

    def _idle(self) -> bool:
        return self._last is None or self._last.done() or self._thread_pid != os.getpid()


_of_thread = threading.local()  # .stream: a reference to the CPU stream whose thread this is


def _stream_of_thread() -> Stream | None:
    return None if (reference := getattr(_of_thread, "stream", None)) is None else reference()


def _ran(fn: Callable[..., T], *args: Any) -> Task[T]:
    """Return the outcome of a call in this thread."""
    task: Task[T] = Task()
    try:
        task.set_result(fn(*args))
    except Exception as error:  # noqa: BLE001  # raised where the result is requested
        task.set_exception(error)
    return task


_waits_lock = fork_safe(threading.Lock())


@contextlib.contextmanager
def _waiting_for(stream: Stream) -> Iterator[None]:
    """Enclose a wait for work of a CPU stream; AccelerantError where that would wait, in the end, for itself."""
    if (own := _stream_of_thread()) is None:
        yield
        return
    with _waits_lock:
        last: Stream | None = stream
        while last is not None:
            if last is own:
                raise AccelerantError(f"work on {own!r} waits for itself, or for work that is queued behind it")
            last = last._awaited
        own._awaited = stream
    try:
        yield
    finally:
        own._awaited = None


_shared: list[Stream] = []  # the CPU's stream that Stream.current returns, once it is made
_shared_lock = fork_safe(threading.Lock())


def _with_streams(device: DeviceLike) -> ComputeDevice:
    """Return a device that has streams: the CPU, where the automatic choice has none."""
    found = find_device(device)
    if found.backend in WITH_STREAMS:
        return found
    if is_automatic(device):
        return find_device("cpu")
    raise UnsupportedCase(f"streams are for cuda and cpu; {found.backend} works through its provider's one queue")


class Future(Generic[T]):
    """The result of work on a stream; made by submit(). Await it, or call result()."""

    def __init__(self, stream: Stream, task: Task[T], event: Event | None) -> None:
        self._stream = stream
        self._task = task
        self._event = event
        self._pid = os.getpid()

    @property
    def of_this_process(self) -> bool:
        """Whether the work is this process's; a forked child has not the thread that does its parent's."""
        return self._pid == os.getpid()

    def done(self) -> bool:
        """Return whether the result or the error is available; does not wait."""
        return self._task.done() and (self._event is None or self._event.done())

    def when_done(self, call: Callable[[Future[T]], object]) -> None:
        """Call a function with this future once the result or the error is available, in any thread."""
        self._task.add_done_callback(lambda _: call(self))

    @renamed_arguments(timeout_s="timeout")
    def wait(self, timeout: float | None = None) -> None:
        """Wait until the function has returned or raised, or for `timeout` seconds."""
        if not self._task.done():
            with self._waiting():
                wait_for_tasks([self._task], timeout)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a wait; raise AccelerantError for a wait that would have no end."""
        if not self.of_this_process:
            raise AccelerantError(f"{self!r} was submitted before this process was forked; its work is the parent's")
        return _waiting_for(self._stream)

    @renamed_arguments(timeout_s="timeout")
    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, or raise the function's error. Its tensors may be used on torch's current stream.

        Args:
            timeout: seconds, as of Python's own futures; no limit by default.

        Raises:
            TimeLimitExceeded: it is not available yet; the work continues, and result() may be called again.
        """
        check_timeout(timeout)
        self.wait(timeout)
        if not self._task.done():
            raise TimeLimitExceeded(f"the result on {self._stream!r} was not there within {timeout} s")
        value = self._task.result()
        if self._event is not None:
            self._event.synchronize(timeout)
            _used_on(value, torch.cuda.current_stream(self._stream.device.index))
        return value

    def value_on(self, stream: Stream) -> T:
        """Return the result for use on another stream, which waits for it; on CUDA the host does not wait."""
        value = self._task.result()
        if self._event is not None:
            stream.wait(self._event)
            if stream.torch_stream is not None:
                _used_on(value, stream.torch_stream)
        return value

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        """Wait without blocking the event loop; cancelling the wait does not cancel the work."""
        if self._event is None:
            with contextlib.nullcontext() if self._task.done() else self._waiting():
                return await asyncio.shield(asyncio.wrap_future(self._task))
        began = time.perf_counter()
        while not self.done():
            await asyncio.sleep(poll_pause_s(time.perf_counter() - began))
        return self.result()

    def __repr__(self) -> str:
        return f"Future({'done' if self.done() else 'pending'} on {self._stream!r})"


def submit(fn: Callable[..., T], *args: Any, stream: Stream | None = None) -> Future[T]:
    """Run fn(*args) on a stream, and return a Future of its result or exception.

    CUDA: fn is called at once, in the caller's thread, and its launches go to the stream, after the work given to
    torch's current stream so far; so fn must not wait for the device. CPU: fn runs on the stream's thread, under the
    caller's settings, context variables, autocast, grad mode and inference mode. The default stream is the current one
    of the first tensor's device, or of the default device.
    """
    if not callable(fn):
        raise ConfigError(f"submit: wanted a function, got {type(fn).__name__}")
    tensors = [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, Tensor)]
    if stream is None:
        stream = Stream.current(tensors[0].device if tensors else None)
    if stream.torch_stream is None:
        modes, context = _modes(), contextvars.copy_context()

        def run() -> T:
            with contextlib.ExitStack() as stack:
                for mode in modes:
                    stack.enter_context(mode())
                return fn(*args)

        return Future(stream, stream.run(context.run, run), None)
    with torch.cuda.device(stream.device.index):
        stream.torch_stream.wait_stream(torch.cuda.current_stream())
        with stream:
            task = _ran(fn, *args)
        _used_on(tensors, stream.torch_stream)
        return Future(stream, task, stream.record())


def _modes() -> list[Callable[[], contextlib.AbstractContextManager[object]]]:
    """Return makers of contexts with this thread's settings and modes, for another thread."""
    kinds = [kind for kind in _AUTOCAST_KINDS if torch.is_autocast_enabled(kind)]
    caches = torch.is_autocast_cache_enabled()
    return [
        carried(),
        *(partial(torch.autocast, kind, torch.get_autocast_dtype(kind), cache_enabled=caches) for kind in kinds),
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
    ]


_AUTOCAST_KINDS = [kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)]


def _used_on(tree: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that a stream uses the tensors, so that it does not reuse their memory too early."""
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(stream)


def capturing(device: torch.device | int) -> bool:
    """Return whether the current stream of a device is being captured into a CUDA graph.

    torch.cuda.is_current_stream_capturing asks the current device. Work goes to the current stream of its tensors'
    device, which may be another. Devices other than CUDA's capture nothing.
    """
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return False
        device = torch.cuda.current_device() if device.index is None else device.index
    if device == torch._C._cuda_getDevice():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
