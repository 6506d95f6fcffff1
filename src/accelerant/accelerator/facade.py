"""Accelerator: a device, its operations on arrays of any library, limits, metrics and fallback.

A call that fails on the device before anything was written runs on the CPU from the same inputs, with a warning and an
entry in the ledger, unless fallback is off. A lost device (DeviceLost) is never worked around inside the process.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import torch

from accelerant import errors
from accelerant.accelerator import methods
from accelerant.accelerator.batch import Batch, Split, devices_worth_using, run_on_devices, split_along_rows, work_s
from accelerant.accelerator.methods import (
    METHODS,
    ArrayOrigin,
    OpBenchmark,
    Results,
    Tensors,
    named_call,
    sample_ms,
    scratch_of,
    tensors_of,
    time_implementations,
    to_tensors,
)
from accelerant.algebra.field.field import prime_field
from accelerant.config import FallbackPolicy, override, policy_named, settings
from accelerant.errors import ConfigError, OutOfMemory, UnsupportedCase
from accelerant.ops.gelu import gelu_on
from accelerant.runtime import registry
from accelerant.runtime.dispatch.operation import recoverable
from accelerant.runtime.files import clipped
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import FallbackRecord, ledger, quantile
from accelerant.runtime.provider import ComputeDevice, ComputeProvider, Event, MemoryInfo, lacks_host_memory
from accelerant.runtime.streams.stream import Future, Stream, submit
from accelerant.runtime.time_limit import check_time, is_limited, time_limit
from accelerant.tensors import tensor_device
from accelerant.zk.multi_scalar import FixedBase, ntt

T = TypeVar("T")


_WORK_BETWEEN_CHECKS = {"cpu": 1e9}
"""Operations of a call between two checks of its time limit, 1e12 elsewhere: a tenth of a second, or less."""

_SAMPLES_KEPT = 4096
_PENDING_LIMIT = 64


@dataclass(frozen=True, slots=True)
class AcceleratorConfig:
    """Limits of an Accelerator's calls.

    Attributes:
        batch_size: rows (of the first dimension) that a row-wise operation processes at once; all by default.
        timeout_s: seconds after which a call ends with TimeLimitExceeded. Checked after the inputs are on the device,
            between batches of rows (small enough for a check each tenth of a second, unless batch_size says
            otherwise), passes of a transform and tasks of a sum of multiples, and at the end of the call: running work
            is not interrupted, and its result is discarded. No limit by default.
        memory_limit_bytes: the most that a call's inputs, result and scratch may take on the device, as predicted from
            shapes. A call whose scratch is too large runs in parts, where it can be divided; one that needs more all
            the same raises OutOfMemory before anything is allocated. Also the most that the calls of a batch take
            together: it runs in parts. No limit by default.
        fallback: "allow" (True), "warn" or "forbid" (False); the Accelerator's argument by default.
        use_gpu: True asks for a GPU where the backend is "auto", False for the CPU; either outranks ACCELERANT_BACKEND.
            An Accelerator whose backend contradicts it raises ConfigError. None by default: as the backend says.
        devices: GPUs of this host that may share one large call: their number, the Accelerator's included, or "all" of
            its backend, or a sequence of devices as `device` takes them. One by default. A call is divided where that
            is estimated to be faster; the ledger has a row for each GPU.
    """

    batch_size: int | None = None
    timeout_s: float | None = None
    memory_limit_bytes: int | None = None
    fallback: FallbackPolicy | bool | None = None
    use_gpu: bool | None = None
    devices: int | Literal["all"] | Sequence[registry.DeviceLike] | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "timeout_s", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(f"{name} must be above 0, got {clipped(value)}")
        if self.use_gpu is not None and not isinstance(self.use_gpu, bool):
            raise ConfigError(f"use_gpu must be True, False or None, got {clipped(self.use_gpu)}")
        if isinstance(self.devices, list):
            object.__setattr__(self, "devices", tuple(self.devices))
        number = type(self.devices) is int and self.devices >= 1
        if not (number or self.devices in ("all", None) or (isinstance(self.devices, tuple) and self.devices)):
            raise ConfigError(
                "devices must be a whole number of at least 1, or 'all', or a sequence of devices such as "
                f"('cuda:0', 'cuda:1'); got {clipped(self.devices)}"
            )
        if self.fallback is not None:
            object.__setattr__(self, "fallback", _policy(self.fallback))


def _policy(value: object) -> FallbackPolicy:
    if (policy := policy_named(value)) not in ("allow", "warn", "forbid"):
        raise ConfigError(f"fallback must be allow, warn or forbid, or true or false; got {clipped(value)}")
    return policy  # type: ignore[no-any-return]  # one of the three


@dataclass(slots=True)
class _OperationRow:
    counts: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    samples_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))
    pending: deque[tuple[Event, Event]] = field(default_factory=deque)

    def collect(self) -> None:
        """Move the times of finished calls to the samples."""
        for _ in range(len(self.pending)):
            start, stop = self.pending.popleft()
            if stop.done():
                self.samples_ms.append(start.elapsed_ms(stop))
            else:
                self.pending.append((start, stop))


class OperationMetrics:
    """Calls, times and bytes of operations; may be used from several threads."""

    def __init__(self) -> None:
        self._lock = fork_safe(threading.Lock())
        self._rows: defaultdict[str, _OperationRow] = defaultdict(_OperationRow)

    def add(self, name: str, **counts: int) -> None:
        """Add to an operation's calls, errors (calls that raised), fallbacks (to another device), bytes and flops."""
        with self._lock:
            row = self._rows[name].counts
            for key, count in counts.items():
                row[key] += count

    def add_time(self, name: str, start: Event, stop: Event | None) -> None:
        """Add the events around a call."""
        if stop is None:
            return
        with self._lock:
            row = self._rows[name]
            row.pending.append((start, stop))
            if len(row.pending) >= _PENDING_LIMIT:
                row.collect()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Return the figures of the operations that were called, with quantiles of their times."""
        figures = {}
        with self._lock:
            for name, row in self._rows.items():
                if row.counts["calls"]:
                    row.collect()
                    ordered = sorted(row.samples_ms)
                    counts = {key: row.counts[key] for key in ("calls", "errors", "fallbacks", "bytes", "flops")}
                    figures[name] = counts | {f"p{q}_ms": quantile(ordered, q / 100) for q in (50, 95, 99)}
        return figures


class Accelerator(methods.Operations):
    """A device and its operations. May be called from several threads.

    >>> acc = acl.Accelerator(device="cuda:1")

    Args:
        backend: another place for `device`; or the name of a backend, whose device then is a number, 0 by default.
        device: a name in any case ("cpu", "cuda", "cuda:1", "opencl"), a torch.device, or an entry of acl.devices();
            None and "auto" are the setting's (ACCELERANT_BACKEND), and without one the best that is there. "mps",
            "nvidia", "vulkan" and others are understood, too. "cuda" is torch's current device.
        fallback: whether another device may be used if this one is absent, or fails before anything was written; or
            "allow", "warn" or "forbid". True and None are the setting's policy, ACCELERANT_FALLBACK.
        config: limits.

    Raises:
        ConfigError: unknown backend, no device of that number, an invalid limit.
        BackendUnavailable: an explicit backend is absent and fallback is off; says why.
    """

    def __init__(
        self, backend: registry.DeviceLike = None, device: int | registry.DeviceLike = None,
        fallback: bool | FallbackPolicy | None = True, config: AcceleratorConfig | None = None,
    ) -> None:  # fmt: skip
        self.config = config or AcceleratorConfig()
        chosen = fallback if self.config.fallback is None else self.config.fallback
        self._policy = settings().fallback if chosen is None or chosen is True else _policy(chosen)
        self._metrics = OperationMetrics()
        self._closed = False
        self._submitted: set[Future[Any]] = set()
        self._submitting = fork_safe(threading.Lock())  # the CPU's work may call close() before it is in the set
        self.device = self._choose(backend, device)
        self._provider = registry.create(self.device.backend)
        self._torch_device = torch.device(self.device.torch_device or "cpu")
        self._devices = self._shared_devices()

    def _shared_devices(self) -> list[torch.device]:
        """Return the devices that may share a call, the Accelerator's first."""
        if (wanted := self.config.devices) in (1, None):
            return [self._torch_device]
        own = self.device.label
        others = [x for x in registry.devices() if x.available and x.backend == self.device.backend == "cuda"]
        if isinstance(wanted, tuple):
            named = {x.label: x for x in registry.find_devices(wanted)}
            if not {own} <= named.keys() <= {own, *(x.label for x in others)}:
                raise ConfigError(f"devices must be {own} and other GPUs of its kind, got {clipped(wanted)}")
            others = list(named.values())
        others = [x for x in others if x.label != own]
        if isinstance(wanted, int):
            if wanted > 1 + len(others):
                raise ConfigError(f"devices must be at most {1 + len(others)} here, got {wanted}")
            others = others[: wanted - 1]
        return [self._torch_device, *(torch.device(x.torch_device) for x in others)]

    def _wanted(self, device: registry.DeviceLike) -> registry.DeviceLike:
        """Return the device that is asked for, under the configuration's `use_gpu`."""
        if (use_gpu := self.config.use_gpu) is None:
            return device
        if registry.is_automatic(device):
            if not use_gpu:
                return "cpu"
            setting = settings().backend
            return "gpu" if registry.backend_named(setting) in ("auto", "cpu") else setting
        given = device.label if isinstance(device, ComputeDevice) else str(device)
        if use_gpu == (registry.backend_named(given.partition(":")[0]) == "cpu"):
            raise ConfigError(f"use_gpu={use_gpu} and backend {given!r} contradict each other: give one of them")
        return device

    def _choose(self, backend: registry.DeviceLike, device: int | registry.DeviceLike) -> ComputeDevice:
        numbered = isinstance(device, int | list | tuple) or not (device is None or registry.is_automatic(backend))
        given: Any = self._wanted(backend if numbered or device is None else device)  # type: ignore[arg-type]
        try:
            if not numbered:
                return registry.find_device(given)
            return registry.find_device(given, index=device)  # type: ignore[arg-type]  # it refuses what is no number
        except errors.BackendUnavailable as error:
            if self._policy == "forbid":
                raise
            with override(backend="auto"):
                chosen = registry.find_device()
            self._announce("Accelerator", error.backend, chosen.backend, error.reason)
            return chosen

    def __enter__(self) -> Accelerator:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for submitted calls and for the device; later calls raise. May be called twice."""
        if self._closed:
            return
        while True:
            with self._submitting:
                calls = [call for call in list(self._submitted) if call.of_this_process]
            if not calls:
                break
            for call in calls:
                call.wait()
                self._submitted.discard(call)
        self._closed = True
        if self._provider.running:  # its shutdown has waited
            self._provider.synchronize(self.device.index)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.AccelerantError("this Accelerator was closed; make a new one")
        self._provider.check_running()  # prepared launches do not pass through the provider

    @property
    def backend(self) -> str:
        """Name of the backend in use."""
        return self.device.backend

    @property
    def provider(self) -> ComputeProvider:
        """Provider of the backend in use."""
        return self._provider

    @property
    def operations(self) -> tuple[str, ...]:
        """Names of the operations; each is a method."""
        return tuple(METHODS)

    if not TYPE_CHECKING:  # a type checker reports a name that is missing

        def __getattr__(self, name: str) -> Any:
            lacking = f"{type(self).__name__!r} object has no attribute {name!r}"
            numpys = not name.startswith("_") and callable(getattr(np, name, None))
            words = f": write accelerant.fuse of a function that calls numpy.{name}" * numpys
            raise AttributeError(lacking + words, name=name, obj=self)

    def __repr__(self) -> str:
        return f"Accelerator({self.device.label}, {self.device.name}{', closed' * self._closed})"

    def metrics(self) -> dict[str, dict[str, Any]]:
        """Return calls, errors, fallbacks, bytes, flops, p50_ms, p95_ms and p99_ms of each operation that was called.

        Times are the device's, without transfers of inputs and result; None while no timed call is done.
        """
        return self._metrics.to_dict()

    def memory(self) -> MemoryInfo:
        """Return the state of the device's memory."""
        self._check_open()
        return self._provider.memory(self.device.index)

    def synchronize(self) -> None:
        """Wait until the device has finished all work."""
        self._check_open()
        self._provider.synchronize(self.device.index)

    @overload
    def benchmark(self, /, *, iterations: int | None = None, size: int = 256) -> dict[str, dict[str, float]]: ...

    @overload
    def benchmark(
        self, op: str | Callable[..., Any], /, *arrays: Any, iterations: int | None = None, **options: Any
    ) -> OpBenchmark: ...

    def benchmark(
        self, op: str | Callable[..., Any] | None = None, /, *arrays: Any, iterations: int | None = None,
        size: int = 256, **options: Any,
    ) -> dict[str, dict[str, float]] | OpBenchmark:  # fmt: skip
        """Time an operation on the user's own arrays by every implementation, or every operation on random data.

        metrics() does not count these calls.

        >>> print(acc.benchmark("gelu", x, approximate="tanh"))
        >>> print(acc.benchmark(accelerant.ops.layer_norm, x, weight, bias))

        Args:
            op: name of an operation, or a function of accelerant.ops; None for every operation.
            arrays, options: of the call.
            iterations: timed calls; by default 100 of an operation on arrays, else 20. Calls that take long are
                repeated for 2 seconds, at least 3 times.
            size: rows of 1024 of the random data.

        Returns:
            for `op` an OpBenchmark, which prints as a table and marks the implementation that calls run; else, for each
            operation that this device supports: p50_ms, p95_ms, p99_ms, gb_per_s, gflop_per_s.

        Raises:
            ConfigError: no such operation, or a number below 1.
            OutOfMemory: the call needs more than the configuration's memory_limit_bytes.
        """
        self._check_open()
        many = iterations if iterations is not None else 20 if op is None else 100
        for name, value in (("iterations", many), ("size", size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {clipped(value)}")
        return self._benchmark_all(many, size) if op is None else self._benchmark_one(op, arrays, options, many)

    def _benchmark_one(
        self, op: str | Callable[..., Any], arrays: tuple[Any, ...], options: dict[str, Any], iterations: int
    ) -> OpBenchmark:
        name, arrays, options = named_call(op, arrays, options)
        with override(fallback="forbid"):
            arrays, _, _ = self._checked(name, arrays, options)
            tensors, origin = to_tensors(name, arrays, self._torch_device)

            def run() -> Results:
                return self._run(name, tensors, options)

            def whole() -> Any:
                return origin.wrap(self._run(name, to_tensors(name, arrays, self._torch_device)[0], options))

            timings = time_implementations(name, run, whole, self.synchronize, iterations, self.backend)
            work = _work(name, tensors, run(), options)
        shapes = ", ".join(f"{'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}" for x in tensors)
        device = f"{self.device.label} ({self.device.name})"
        return OpBenchmark(name, shapes, device, timings, work["bytes"], work["flops"])

    def _benchmark_all(self, iterations: int, size: int) -> dict[str, dict[str, float]]:
        results: dict[str, dict[str, float]] = {}
        for name, method in METHODS.items():
            args, options = method.example(self._torch_device, size)
            call = functools.partial(self._run, name, args, options)
            try:
                sample_ms(call, self.synchronize, 2)  # the warm-up
                samples = sample_ms(call, self.synchronize, iterations)
            except UnsupportedCase:
                continue
            work = _work(name, args, call(), options)
            per_ns = 1e6 * (quantile(samples, 0.5) or math.nan)
            results[name] = {f"p{q}_ms": quantile(samples, q / 100) or math.nan for q in (50, 95, 99)}
            results[name] |= {"gb_per_s": work["bytes"] / per_ns, "gflop_per_s": work["flops"] / per_ns}
        return results

    # --- many calls ----------------------------------------------------------------------------------------------
    def batch(self) -> Batch:
        """Return a block whose calls are merged into as few launches as possible; see accelerant.accelerator.batch.

        Each call keeps the limits, and each launch falls back to the CPU, as single calls do.

        >>> with acc.batch() as batch:
        ...     answers = [batch.gelu(x) for x in xs]
        >>> ys = [answer.result() for answer in answers]
        """
        self._check_open()
        kind = self._torch_device.type if self.device.torch_device else self.device.backend
        return Batch(self._checked, self._batched_run, kind, self.config.memory_limit_bytes)

    def _checked(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], int, int]:
        """Return the arrays of a call as they are to be moved, and the bytes of inputs, and of result and scratch."""
        if (prepare := METHODS[name].prepare) is not None:
            arrays = tuple(prepare(x, argument, options) for x, argument in zip(arrays, ("x", "y"), strict=False))
        inputs, made, _ = self._fit(name, arrays, options)
        return arrays, inputs, made

    def _batched_run(self, name: str, tensors: Tensors, options: dict[str, Any], calls: int, in_turn: bool) -> Results:
        self._check_open()
        self._metrics.add(name, calls=calls)
        try:
            with self._own_policy(), self._own_limit(name):
                moved, _ = self._move_or_fall_back(name, tensors)
                return self._run_or_fall_back(name, moved, options, calls, in_turn)
        except BaseException:
            self._metrics.add(name, errors=calls)
            raise

    def submit(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Call an operation without waiting for the device, and return a Future of its result.

        >>> answer = acc.submit(acc.gelu, x)
        >>> answer.result(timeout=1)               # or, in asyncio: y = await answer

        fn is a method of this Accelerator, or any function of arrays.
        """
        self._check_open()
        stream = Stream.current(self._torch_device)
        with self._submitting if self.device.backend == "cpu" else nullcontext():  # elsewhere fn runs in this thread
            future = submit(functools.partial(fn, **kwargs), *args, stream=stream)
            self._submitted.add(future)
        future.when_done(self._submitted.discard)
        return future

    def map(
        self, fn: Callable[[Any], T], items: Iterable[Any], *, engine: str | None = None, address: str | None = None,
        workers: int | None = None,
    ) -> list[T]:  # fmt: skip
        """Call a function of each item in worker processes, and return the results in order.

        >>> losses = acc.map(train_with, [0.5, 1.0, 2.0])

        Workers are processes of this host, or actors on the nodes of a Ray cluster. Items are handed out as workers
        become free. What a worker that dies had not answered is handed out again; an item that ends three is given up.

        Args:
            fn: a function of one item. It is pickled, as are items and results; functions of the main program and
                lambdas need cloudpickle, which Ray includes. In a worker, "auto" and `Accelerator()` are this
                Accelerator's backend; on a GPU a worker has one GPU, its device 0.
            engine: "local", or "ray"; by default Ray where this process is connected to a cluster, else local.
            address: of the Ray cluster; by default the one of RAY_ADDRESS, or the one on this host, or a new one of it.
            workers: their number; by default one a GPU, or one a core, each with its share of the cores.

        Raises:
            Exception: what fn raised, with a note of the item's index, which is also its attribute `item_index`; items
                that were not begun are left out.
            AccelerantError: workers died with an item, or before they were ready.
            ConfigError: something cannot be pickled; no cluster at the address; no such engine.
            MissingDependency: Ray is not installed.
        """
        self._check_open()
        from accelerant.runtime.jobs import engine_of, run_jobs

        listed = list(items)
        devices = sum(device.available and device.backend == self.device.backend for device in registry.devices())
        results: list[Any] = [None] * len(listed)
        jobs = run_jobs(
            functools.partial(functools.partial, fn), listed, engine=engine_of(engine, address), address=address,
            backend=self.device.backend, devices=devices, workers=workers,
        )  # fmt: skip
        with contextlib.closing(jobs):
            for outcome in jobs:
                if outcome.error is not None:
                    outcome.error.add_note(f"of items[{outcome.index}]")
                    outcome.error.item_index = outcome.index  # type: ignore[attr-defined]
                    raise outcome.error
                results[outcome.index] = outcome.value
        return results

    # --- one call ------------------------------------------------------------------------------------------------
    def _call(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Move the arrays to the device, run, and return the result in kind."""
        self._check_open()
        self._metrics.add(name, calls=1)
        try:
            with self._own_policy(), self._own_limit(name):
                arrays, _, _ = self._checked(name, arrays, options)
                shared = self._run_shared(name, arrays, options) if len(self._devices) > 1 else None
                if shared is not None:
                    tensor, origin = shared
                else:
                    tensors, origin = self._move_or_fall_back(name, arrays)
                    tensor = self._run_or_fall_back(name, tensors, options)
        except BaseException:
            self._metrics.add(name, errors=1)
            raise
        return origin.wrap(tensor)

    def _run_shared(
        self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[Results, ArrayOrigin] | None:
        """Run one call on several devices; None where one is as fast, or another one failed before."""
        tensors, origin = to_tensors(name, arrays, None)
        if (cut := split_along_rows(name, tensors, options)) is None:
            return None
        copied, seconds = 2 * sum(x.nbytes for x in tensors), work_s(name, cut.tensors, options)
        on_host = tensors[0].device.type != self._torch_device.type
        count = devices_worth_using(seconds, copied, cut.rows, len(self._devices), on_host=on_host)
        if count < 2:
            return None
        try:
            result = run_on_devices(name, cut, options, self._devices[:count])
        except Exception as error:
            if self._policy == "forbid" or not recoverable(error):
                raise
            self._announce(name, f"{count} devices", self.device.label, f"{type(error).__name__}: {error}")
            return None
        self._metrics.add(name, **_work(name, tensors, result, options))
        check_time("at its end", self._wait)
        return result, origin

    def _own_policy(self) -> AbstractContextManager[object]:
        """Return a context with this Accelerator's fallback policy; changing settings takes a third of a small call."""
        return nullcontext() if settings().fallback == self._policy else override(fallback=self._policy)

    def _own_limit(self, name: str) -> AbstractContextManager[object]:
        """Return a context with this Accelerator's time limit for a call."""
        return nullcontext() if self.config.timeout_s is None else time_limit(self.config.timeout_s, name)

    def _move_or_fall_back(self, name: str, arrays: tuple[Any, ...]) -> tuple[Tensors, ArrayOrigin]:
        """Move arrays to the device; to the CPU if they do not fit."""
        try:
            return to_tensors(name, arrays, self._torch_device)
        except Exception as error:  # noqa: BLE001 - sorted by _fall_back_or_raise
            self._fall_back_or_raise(name, error)
            return to_tensors(name, arrays, torch.device("cpu"))

    def _run_or_fall_back(
        self, name: str, tensors: Tensors, options: dict[str, Any], calls: int = 1, in_turn: bool = False
    ) -> Results:
        """Run one call, or several of joined tensors, on their device; on the CPU after a failure without writes."""
        each = calls if in_turn else 0
        if tensors[0].device == self._torch_device:
            try:
                start = self._provider.record_event(self.device.index)
                result = self._run(name, tensors, options, each)
                if start is not None:
                    self._metrics.add_time(name, start, self._provider.record_event(self.device.index))
                self._metrics.add(name, **_work(name, tensors, result, options, each))
                check_time("at its end", self._wait)
                return result
            except Exception as error:  # noqa: BLE001 - as above
                self._fall_back_or_raise(name, error, calls)
        result = self._in_batches(name, tuple(tensor.cpu() for tensor in tensors), options, each)
        check_time("at its end")
        return result

    def _fall_back_or_raise(self, name: str, error: Exception, calls: int = 1) -> None:
        """Count and announce a fallback to the CPU; raise the error where there is none."""
        if self._policy == "forbid" or self.device.backend == "cpu" or not recoverable(error):
            if lacks_host_memory(error):
                raise OutOfMemory(f"{name}: the host's memory is exhausted: {error}") from error
            raise error
        self._announce(name, self.device.label, "cpu", f"{type(error).__name__}: {error}")
        self._metrics.add(name, fallbacks=calls)

    def _run(self, name: str, tensors: Tensors, options: dict[str, Any], each: int = 0) -> Results:
        if self.device.torch_device:
            return self._in_batches(name, tensors, options, each)
        if name in _WITHOUT_TENSORS and (name != "gelu" or "portable" in self._provider.dialects):
            arrays = (tensor.numpy() for tensor in tensors)
            return torch.from_numpy(_WITHOUT_TENSORS[name](self.device, *arrays, **options))
        place = tensor_device(self.device) if METHODS[name].is_op else None
        if place is None:
            raise UnsupportedCase(f"{self.device.backend} has no {name}")
        results = self._in_batches(name, tuple(map(place.upload, tensors)), options, each)
        return tuple(y.cpu() for y in results) if isinstance(results, tuple) else results.cpu()

    def _wait(self) -> None:
        self._provider.synchronize(self.device.index)

    def _in_batches(self, name: str, tensors: Tensors, options: dict[str, Any], each: int = 0) -> Results:
        """Run on a batch of rows at a time, checking the time limit between them; or `each` calls in turn."""
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext():
            if each:
                return tuple(self._each(name, tensors, options, each))
            cut, size = self._division(name, tensors, options)
            if cut is None or cut.rows <= size:
                check_time("with its inputs on the device", self._wait)
                return METHODS[name].run(*tensors, **options)
            return cut.joined(self._parts(name, cut, size, options))

    def _parts(self, name: str, cut: Split, size: int, options: dict[str, Any]) -> Iterator[Tensors]:
        """Yield the results of parts of a call, checking the time limit between them."""
        for low in range(0, cut.rows, size):
            check_time(f"after {low} of {cut.rows} rows", self._wait)
            yield tensors_of(METHODS[name].run(*cut.part(low, low + size), **options))

    def _division(self, name: str, tensors: Tensors, options: dict[str, Any]) -> tuple[Split | None, int]:
        """Return how a call is divided, None if it is not, and the rows of a part: for the three limits."""
        size = self.config.batch_size
        sums = name in ("msm", "ntt")  # which keep time limits themselves
        if METHODS[name].scratch and (fitting := self._fit(name, tensors, options)[2]) is not None:
            return split_along_rows(name, tensors, options), min(size or fitting, fitting)
        if size is not None and not sums:
            return split_along_rows(name, tensors, options, heads=False), size
        if is_limited() and not sums:
            cut = split_along_rows(name, tensors, options)
            return cut, 0 if cut is None else _rows_between_checks(name, cut, options)
        return None, 0

    def _each(self, name: str, tensors: Tensors, options: dict[str, Any], calls: int) -> Iterable[torch.Tensor]:
        """Yield the results of calls on equal parts of the tensors, checking the time limit between them."""
        width = len(tensors) // calls
        for i in range(calls):
            check_time(f"after {i} of {calls} calls")
            yield from tensors_of(METHODS[name].run(*tensors[i * width : (i + 1) * width], **options))

    def _fit(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int, int | None]:
        """Return the bytes of inputs, those of result and scratch, and the rows of a part that keeps the limit.

        The rows, images or heads are None for a call that keeps it whole, and the bytes 0 without a limit. OutOfMemory
        where no part keeps it.
        """
        if (limit := self.config.memory_limit_bytes) is None:
            return 0, 0, None
        inputs, result = methods.sizes_of(name, arrays, options)
        if not METHODS[name].scratch and inputs + result <= limit:
            return inputs, result, None
        try:
            metas = methods.metas_of(name, arrays)
        except Exception:  # noqa: BLE001 - a call that the operation refuses, with its own words, when it runs
            metas = ()
        scratch = scratch_of(name, metas, options, self.device) if metas else 0
        if inputs + result + scratch <= limit:
            return inputs, result + scratch, None
        cut = split_along_rows(name, metas, options) if scratch else None  # without scratch parts need as much
        rows, least = (0, scratch) if cut is None else (cut.rows, scratch)
        while cut is not None and rows > 1:
            rows = (rows + 1) // 2
            least = scratch_of(name, cut.part(0, rows), options, self.device)
            least += result if cut.curve else result * rows // cut.rows  # results of parts are copied
            if inputs + result + least <= limit:
                return inputs, result, rows
        sizes = {"inputs": inputs, "result": result, "scratch": min(least, scratch)}
        largest = max(sizes, key=lambda part: sizes[part])
        named = "inputs, result and scratch" if scratch else "inputs and result"
        raise OutOfMemory(
            f"{name}: {named} take {sum(sizes.values()):,} bytes; the limit is {limit:,}; the largest part is the "
            f"{largest}, {sizes[largest]:,} bytes"
        )

    def _announce(self, op: str, unused: str, ran: str, reason: str) -> None:
        first = ledger().fallback(FallbackRecord(op, "", unused, ran, reason))
        if first or self._policy == "warn" or op == "Accelerator":  # each says which device it is on
            warnings.warn(f"{op}: {unused} is not used, {ran} is. {reason}", errors.FallbackWarning, stacklevel=4)


def _work(name: str, tensors: Tensors, result: Results, options: dict[str, Any], each: int = 0) -> dict[str, int]:
    """Return the bytes that a call reads and writes, and its operations; `each` is the number of calls in turn."""
    made = tensors_of(result)
    flops = sum([METHODS[name].flops(tensors, y, **options) for y in (made if each else made[:1])])
    return {"bytes": sum([x.nbytes for x in (*tensors, *made)]), "flops": flops}


def _rows_between_checks(name: str, cut: Split, options: dict[str, Any]) -> int:
    """Return the rows that take about a tenth of a second."""
    first = cut.tensors[0]
    work = METHODS[name].flops(cut.tensors, first, **options) / max(1, cut.rows)
    return max(1, int(_WORK_BETWEEN_CHECKS.get(first.device.type, 1e12) / max(1, work)))


_WITHOUT_TENSORS: dict[str, Callable[..., Any]] = {
    **{
        f"field_{name}": lambda device, *arrays, field, name=name: getattr(prime_field(field), name)(
            *arrays, device=device
        )
        for name in ("add", "sub", "mul", "inv")
    },
    "ntt": lambda device, x, **options: ntt(x, device=device, **options),
    "msm": lambda device, scalars, points, *, curve, check: FixedBase(
        curve, points, device, check=check, multiples=False
    ).msm(scalars),
    "gelu": gelu_on,
}
"""Operations of backends without torch tensors, on NumPy arrays; tensor ops run on their DeviceTensors, if any."""
