"""Accelerator: a device, its operations on arrays of any library, limits, metrics and fallback.

What fails on the device before it wrote anything runs on the CPU from the same inputs, with a warning and a line in
the ledger, unless fallback is off. A device that is lost (DeviceLost) is never worked around inside the process.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import torch

from accelerant.accelerator.batch import Batch
from accelerant.accelerator.figures import Figures, quantile
from accelerant.accelerator.methods import METHODS, Operations, result_bytes
from accelerant.algebra.field import prime_field
from accelerant.config import FallbackPolicy, override, settings
from accelerant.errors import (
    AccelerantError,
    BackendUnavailable,
    ConfigError,
    FallbackWarning,
    OutOfMemory,
    TimeLimitExceeded,
    UnsupportedCase,
)
from accelerant.ops.gelu.portable import gelu_on
from accelerant.runtime import registry
from accelerant.runtime.arrays import Foreign, to_torch
from accelerant.runtime.dispatch.operation import RECOVERABLE
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.provider import ComputeDevice, MemoryInfo
from accelerant.runtime.streams.stream import Future, Stream, submit
from accelerant.zk.msm.fixed import FixedBase
from accelerant.zk.transform import ntt

__all__ = ["Accelerator", "AcceleratorConfig"]

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class AcceleratorConfig:
    """What an Accelerator may take.

    Attributes:
        batch_size: rows (of the first dimension) that a row-wise operation works on at once; all by default.
        timeout_s: seconds after which a call ends with TimeLimitExceeded; looked at between batches, so a call of one
            batch is never cut short. No limit by default.
        memory_limit_bytes: the most that a call's inputs and outputs may take on the device; a call that needs more
            raises OutOfMemory before anything is allocated. No limit by default.
        fallback: "allow", "warn" or "forbid"; the Accelerator's argument by default.
    """

    batch_size: int | None = None
    timeout_s: float | None = None
    memory_limit_bytes: int | None = None
    fallback: FallbackPolicy | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "timeout_s", "memory_limit_bytes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not value > 0):
                raise ConfigError(f"{name} must be above 0, got {value!r}")
        if self.fallback not in (None, "allow", "warn", "forbid"):
            raise ConfigError(f"fallback must be allow, warn or forbid, got {self.fallback!r}")


class Accelerator(Operations):
    """A device and its operations; see the module's docstring. May be called from several threads.

    Args:
        backend: "auto", or one of accelerant.runtime.registry.BACKENDS; the setting's (ACCELERANT_BACKEND) for "auto".
        device: its number on the backend.
        fallback: whether another device may be used where this one is absent or fails before it wrote anything.
        config: limits.

    Raises:
        ConfigError: unknown backend, no device of that number, a limit without meaning.
        BackendUnavailable: an explicit backend is absent and fallback is off; says why.
    """

    def __init__(
        self,
        backend: str = "auto",
        device: int = 0,
        fallback: bool = True,
        config: AcceleratorConfig | None = None,
    ) -> None:
        self.config = config or AcceleratorConfig()
        self._policy: FallbackPolicy = self.config.fallback or (settings().fallback if fallback else "forbid")
        self._figures = Figures(METHODS)
        self._closed = False
        self.device = self._choose(backend, device)
        self._provider = registry.create(self.device.backend)
        self._where = torch.device(self.device.torch_device or "cpu")

    def _choose(self, backend: str, index: int) -> ComputeDevice:
        try:
            return registry.choose(backend, index)
        except BackendUnavailable as error:
            if self._policy == "forbid":
                raise
            with override(backend="auto"):
                chosen = registry.choose()
            self._announce("Accelerator", error.backend, chosen.backend, error.reason)
            return chosen

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Accelerator:
        self._check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the device and end; later calls raise. May be called twice."""
        if not self._closed:
            self._closed = True
            self._provider.synchronize(self.device.index)

    def _check_open(self) -> None:
        if self._closed:
            raise AccelerantError("this Accelerator was closed; make a new one")

    @property
    def backend(self) -> str:
        """The name of the backend that is used."""
        return self.device.backend

    def __repr__(self) -> str:
        return f"Accelerator({self.device.backend}:{self.device.index}, {self.device.name}{', closed' * self._closed})"

    # --- what happened -------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, dict[str, Any]]:
        """For each operation that was called: calls, errors, fallbacks, bytes, flops, p50_ms, p95_ms, p99_ms.

        Times are the device's, from inputs on the device to the result there; None while the device is not done.
        """
        return self._figures.to_dict()

    def memory(self) -> MemoryInfo:
        """What the device's memory holds now."""
        self._check_open()
        return self._provider.memory(self.device.index)

    def synchronize(self) -> None:
        """Wait until the device has done everything asked of it."""
        self._check_open()
        self._provider.synchronize(self.device.index)

    def benchmark(self, iterations: int = 20, size: int = 256) -> dict[str, dict[str, float]]:
        """Time every operation on random data; does not count in metrics().

        Args:
            iterations: timed calls of each, at least 1.
            size: rows of 1024.

        Returns:
            for each operation that this device has: p50_ms, p95_ms, p99_ms, gb_per_s, gflop_per_s.
        """
        self._check_open()
        for name, value in (("iterations", iterations), ("size", size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name} must be a whole number of at least 1, got {value!r}")
        results: dict[str, dict[str, float]] = {}
        for name, method in METHODS.items():
            args = method.example(self._where, size)
            try:
                out, samples = self._benchmark_one(name, args, iterations)
            except UnsupportedCase:
                continue
            moved = sum(arg.nbytes for arg in args) + out.nbytes
            middle = quantile(samples, 0.5) or math.nan
            results[name] = {f"p{q}_ms": quantile(samples, q / 100) or math.nan for q in (50, 95, 99)}
            results[name] |= {"gb_per_s": moved / middle / 1e6, "gflop_per_s": method.flops(args, out) / middle / 1e6}
        return results

    def _benchmark_one(self, name: str, args: Tensors, iterations: int) -> tuple[torch.Tensor, list[float]]:
        samples = []
        for i in range(iterations + 2):
            self._provider.synchronize(self.device.index)
            began = time.perf_counter()
            out = self._run(name, args, {})
            self._provider.synchronize(self.device.index)
            if i >= 2:
                samples.append((time.perf_counter() - began) * 1e3)
        return out, samples

    # --- many calls ----------------------------------------------------------------------------------------------

    def batch(self) -> Batch:
        """A block whose calls become as few launches as possible; see accelerant.accelerator.batch.

        >>> with acc.batch() as batch:
        ...     answers = [batch.gelu(x) for x in xs]
        >>> ys = [answer.result() for answer in answers]
        """
        self._check_open()

        def run(name: str, tensors: Tensors, options: dict[str, Any], calls: int) -> torch.Tensor:
            self._check_open()
            self._figures.called(name, calls)
            try:
                with override(fallback=self._policy):
                    return self._timed(name, tensors, options)
            except Exception:
                self._figures.failed(name, calls)
                raise

        def move(name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensors, Foreign]:
            return self._move(name, self._prepared(name, arrays, options))

        return Batch(move, run)

    def submit(self, fn: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Call an operation without waiting for the device.

        >>> answer = acc.submit(acc.gelu, x)
        >>> answer.result(timeout_s=1)             # or, in asyncio: y = await answer

        Args:
            fn: a method of this Accelerator, or any function of arrays.
            args, kwargs: its own.

        Returns:
            a Future with done(), result(timeout_s) and await.
        """
        self._check_open()
        stream = Stream.current(self._where)
        return submit(functools.partial(fn, **kwargs), *args, stream=stream)

    # --- one call ------------------------------------------------------------------------------------------------

    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> Any:
        """Bring the arrays to the device, run, answer in kind."""
        self._check_open()
        self._figures.called(name)
        try:
            with override(fallback=self._policy):
                tensor, origin = self._with_fallback(name, arrays, options)
        except Exception:
            self._figures.failed(name)
            raise
        return origin.wrap(tensor)

    def _with_fallback(
        self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[torch.Tensor, Foreign]:
        arrays = self._prepared(name, arrays, options)
        self._check_memory(name, arrays)
        try:
            tensors, origin = self._move(name, arrays)
            return self._timed(name, tensors, options), origin
        except RECOVERABLE as error:
            if self._policy == "forbid" or self.device.backend == "cpu":
                raise
            wanted = f"{self.device.backend}:{self.device.index}"
            self._announce(name, wanted, "cpu", f"{type(error).__name__}: {error}")
            self._figures.fell_back(name)
            tensors, origin = self._move(name, arrays, torch.device("cpu"))
            return self._in_batches(name, tensors, options), origin

    def _prepared(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
        """What is moved to the device in place of the arguments."""
        prepare = METHODS[name].prepare
        if prepare is None:
            return arrays
        return tuple(prepare(x, argument, options) for x, argument in zip(arrays, ("x", "y"), strict=False))

    def _move(self, name: str, arrays: tuple[Any, ...], to: torch.device | None = None) -> tuple[Tensors, Foreign]:
        """The arrays as tensors on the device, and where the first came from."""
        dtype = np.dtype(METHODS[name].dtype)
        plain = (int, float, list, tuple)
        moved = [to_torch(x, to or self._where, dtype if isinstance(x, plain) else None) for x in arrays]
        return tuple(tensor for tensor, _ in moved), moved[0][1]

    def _timed(self, name: str, tensors: Tensors, options: dict[str, Any]) -> torch.Tensor:
        start = self._provider.record_event(self.device.index)
        result = self._run(name, tensors, options)
        stop = self._provider.record_event(self.device.index) if start is not None else None
        moved = sum(tensor.nbytes for tensor in tensors) + result.nbytes
        self._figures.done(name, moved, METHODS[name].flops(tensors, result, **options), start, stop)
        return result

    def _run(self, name: str, tensors: Tensors, options: dict[str, Any]) -> torch.Tensor:
        if self.device.torch_device:
            return self._in_batches(name, tensors, options)
        if name not in _WITHOUT_TENSORS:
            raise UnsupportedCase(f"{self.device.backend} has no {name}")
        arrays = (tensor.numpy() for tensor in tensors)
        return torch.from_numpy(_WITHOUT_TENSORS[name](self.device, *arrays, **options))

    def _in_batches(self, name: str, tensors: Tensors, options: dict[str, Any]) -> torch.Tensor:
        """Run on at most batch_size rows at a time, looking at the clock between them."""
        method, size = METHODS[name], self.config.batch_size
        rows = tensors[0].shape[0] if tensors[0].ndim else 0
        cut = _cut_along_rows(name, tensors, options)
        with torch.no_grad():
            if size is None or rows <= size or cut is None:
                return method.run(*tensors, **options)
            began = time.monotonic()
            parts = []
            for low in range(0, rows, size):
                spent = time.monotonic() - began
                if self.config.timeout_s is not None and spent > self.config.timeout_s:
                    limit = f"{self.config.timeout_s:g} s"
                    raise TimeLimitExceeded(f"{name}: {spent:.3g} s of at most {limit} after {low} of {rows} rows")
                batch = (x[low : low + size] if along else x for x, along in zip(tensors, cut, strict=True))
                parts.append(method.run(*batch, **options))
                if self.config.timeout_s is not None:
                    self._provider.synchronize(self.device.index)
            return torch.cat(parts)

    def _check_memory(self, name: str, arrays: tuple[Any, ...]) -> None:
        """Refuse what would pass the limit, before anything is allocated."""
        limit = self.config.memory_limit_bytes
        needed = result_bytes(name, arrays) if limit is not None else 0
        if limit is not None and needed > limit:
            raise OutOfMemory(f"{name}: inputs and result take {needed:,} bytes; the limit is {limit:,}")

    def _announce(self, op: str, wanted: str, ran: str, reason: str) -> None:
        first = ledger().fallback(FallbackRecord(op, "", wanted, ran, reason))
        if first or self._policy == "warn":
            warnings.warn(f"{op}: {wanted} is not used, {ran} is. {reason}", FallbackWarning, stacklevel=4)


def _cut_along_rows(name: str, tensors: Tensors, options: dict[str, Any]) -> tuple[bool, ...] | None:
    """Which arguments are cut when rows of the first dimension are done in batches; None where they cannot be."""
    first, rest = tensors[0], tensors[1:]
    whole = METHODS[name].whole
    if whole is not None and whole(tensors, options):
        return None
    if METHODS[name].merge == "elements":
        return (True,) * len(tensors) if all(x.shape == first.shape for x in rest) else None
    if METHODS[name].merge == "rows" and first.ndim > 1 and options.get("dim", -1) in (-1, first.ndim - 1):
        return True, *(False for _ in rest)
    return None


def _field_on(name: str) -> Callable[..., Any]:
    def run(device: ComputeDevice, *arrays: Any, field: str) -> Any:
        return getattr(prime_field(field), name)(*arrays, device=device)

    return run


def _multiples_on(device: ComputeDevice, scalars: Any, points: Any, *, curve: str, check: bool) -> Any:
    return FixedBase(curve, points, device, check=check, multiples=False).msm(scalars)


_WITHOUT_TENSORS: dict[str, Callable[..., Any]] = {
    **{f"field_{name}": _field_on(name) for name in ("add", "sub", "mul", "inv")},
    "ntt": lambda device, x, **options: ntt(x, device=device, **options),
    "msm": _multiples_on,
    "gelu": gelu_on,
}
"""What backends without tensors can do, on NumPy arrays."""
