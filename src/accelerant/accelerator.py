"""Accelerator: one device behind one object, for arrays of any library.

>>> with Accelerator() as acc:                       # the best device there is
...     acc.field_add([1, 2, 3, 4], [5, 6, 7, 8])    # array([ 6,  8, 10, 12], dtype=uint64)
...     y = acc.gelu(x)                              # NumPy, torch, CuPy or JAX in; the same kind out
...     acc.metrics()["gelu"]["p95_ms"]

What fails on the device runs on the CPU from the same inputs, with a warning and a line in the ledger, unless fallback
is off. A device that is lost (DeviceLost) is never worked around inside the process.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import torch

from accelerant import ops
from accelerant.algebra.field import op as field_op
from accelerant.config import FallbackPolicy, override, settings
from accelerant.errors import (
    AccelerantError,
    BackendUnavailable,
    ConfigError,
    FallbackWarning,
    OutOfMemory,
    ShapeError,
    TimeLimitExceeded,
    UnsupportedCase,
)
from accelerant.runtime import registry
from accelerant.runtime.arrays import Foreign, to_torch
from accelerant.runtime.dispatch import RECOVERABLE
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.provider import ComputeDevice, Event, MemoryInfo

__all__ = ["Accelerator", "AcceleratorConfig"]

_SAMPLES_KEPT = 4096


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


@dataclass(frozen=True, slots=True)
class _Method:
    """An operation of the facade.

    Attributes:
        run: on tensors of one device.
        rowwise: rows of the first dimension do not depend on one another, so that it can be done in batches.
        example: arguments for benchmark(), on a device.
        flops: operations of a call, from the tensors and the result.
    """

    run: Callable[..., torch.Tensor]
    rowwise: bool
    example: Callable[[torch.device, int], tuple[torch.Tensor, ...]]
    flops: Callable[[tuple[torch.Tensor, ...], torch.Tensor], int]


def _floats(*shapes: tuple[int, ...]) -> Callable[[torch.device, int], tuple[torch.Tensor, ...]]:
    """Random float32 tensors; a dimension of -1 is the size that benchmark() is asked for."""

    def make(device: torch.device, size: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn([size if n < 0 else n for n in shape], device=device) for shape in shapes)

    return make


def _elements(device: torch.device, size: int) -> tuple[torch.Tensor, ...]:
    x = torch.randint(0, 2**62, (size * 1024,), device=device).view(torch.uint64)
    return x, x.clone()


_METHODS: dict[str, _Method] = {
    "gelu": _Method(ops.gelu, True, _floats((-1, 1024)), lambda args, y: 10 * y.numel()),
    "softmax": _Method(ops.softmax, False, _floats((-1, 1024)), lambda args, y: 5 * y.numel()),
    "layer_norm": _Method(
        lambda x, *rest, **kw: ops.layer_norm(x, *rest, **kw),
        True,
        _floats((-1, 1024), (1024,), (1024,)),
        lambda args, y: 8 * y.numel(),
    ),
    "matmul": _Method(
        ops.matmul, False, _floats((-1, 1024), (1024, 1024)), lambda args, y: 2 * y.numel() * args[0].shape[-1]
    ),
    "field_add": _Method(field_op.add, True, _elements, lambda args, y: y.numel()),
}


@dataclass(slots=True)
class _Figures:
    """Calls of one operation."""

    calls: int = 0
    errors: int = 0
    fallbacks: int = 0
    bytes: int = 0
    flops: int = 0
    samples_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES_KEPT))
    pending: deque[tuple[Event, Event]] = field(default_factory=deque)


class Accelerator:
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
        self._lock = threading.Lock()
        self._figures = {name: _Figures() for name in _METHODS}
        self._closed = False
        self.device = self._choose(backend, device)
        self._provider = registry.create(self.device.backend)

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

    # --- operations ----------------------------------------------------------------------------------------------

    def gelu(self, x: Any, approximate: str = "none") -> Any:
        """Multiply x by the normal distribution function at x; see accelerant.ops.gelu."""
        return self._call("gelu", (x,), approximate=approximate)

    def softmax(self, x: Any, dim: int = -1) -> Any:
        """Exponentials of x over their sum along dim; see accelerant.ops.softmax."""
        return self._call("softmax", (x,), dim=dim)

    def layer_norm(self, x: Any, weight: Any, bias: Any = None, *, eps: float = 1e-5) -> Any:
        """Rows of x at mean 0 and variance 1, times weight, plus bias; see accelerant.ops.layer_norm."""
        return self._call("layer_norm", (x, weight) if bias is None else (x, weight, bias), eps=eps)

    def matmul(self, a: Any, b: Any) -> Any:
        """The matrix product; see accelerant.ops.matmul."""
        return self._call("matmul", (a, b))

    def field_add(self, x: Any, y: Any, *, field: str = "goldilocks") -> Any:
        """The sum of field elements; see accelerant.algebra.field.add."""
        return self._call("field_add", (x, y), field=field)

    # --- what happened -------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, dict[str, Any]]:
        """For each operation that was called: calls, errors, fallbacks, bytes, flops, p50_ms, p95_ms, p99_ms.

        Times are the device's, from inputs on the device to the result there; None while the device is not done.
        """
        found: dict[str, dict[str, Any]] = {}
        with self._lock:
            for name, figures in self._figures.items():
                if not figures.calls:
                    continue
                _collect(figures)
                ordered = sorted(figures.samples_ms)
                found[name] = {
                    "calls": figures.calls,
                    "errors": figures.errors,
                    "fallbacks": figures.fallbacks,
                    "bytes": figures.bytes,
                    "flops": figures.flops,
                    **{f"p{q}_ms": _quantile(ordered, q / 100) for q in (50, 95, 99)},
                }
        return found

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
        where = torch.device(self.device.torch_device or "cpu")
        results: dict[str, dict[str, float]] = {}
        for name, method in _METHODS.items():
            args = method.example(where, size)
            try:
                out, samples = self._benchmark_one(name, method, args, iterations)
            except UnsupportedCase:
                continue
            moved = sum(arg.nbytes for arg in args) + out.nbytes
            samples.sort()
            middle = _quantile(samples, 0.5) or math.nan
            results[name] = {f"p{q}_ms": _quantile(samples, q / 100) or math.nan for q in (50, 95, 99)}
            results[name] |= {"gb_per_s": moved / middle / 1e6, "gflop_per_s": method.flops(args, out) / middle / 1e6}
        return results

    def _benchmark_one(
        self, name: str, method: _Method, args: tuple[torch.Tensor, ...], iterations: int
    ) -> tuple[torch.Tensor, list[float]]:
        samples = []
        for i in range(iterations + 2):
            self._provider.synchronize(self.device.index)
            began = time.perf_counter()
            out = self._run(name, method, args, {})
            self._provider.synchronize(self.device.index)
            if i >= 2:
                samples.append((time.perf_counter() - began) * 1e3)
        return out, samples

    # --- one call ------------------------------------------------------------------------------------------------

    def _call(self, name: str, arrays: tuple[Any, ...], **options: Any) -> Any:
        """Bring the arrays to the device, run, answer in kind."""
        self._check_open()
        method, figures = _METHODS[name], self._figures[name]
        with self._lock:
            figures.calls += 1
        try:
            with override(fallback=self._policy):
                tensor, origin = self._on_device(name, method, arrays, options)
        except Exception:
            with self._lock:
                figures.errors += 1
            raise
        return origin.wrap(tensor)

    def _on_device(
        self, name: str, method: _Method, arrays: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[torch.Tensor, Foreign]:
        where = torch.device(self.device.torch_device or "cpu")
        self._check_memory(name, arrays)
        dtype = np.dtype(np.uint64) if name.startswith("field") else np.dtype(np.float32)
        try:
            moved = [to_torch(array, where, dtype if _is_plain(array) else None) for array in arrays]
            tensors = tuple(tensor for tensor, _ in moved)
            start = self._provider.record_event(self.device.index)
            result = self._run(name, method, tensors, options)
            self._count(name, method, tensors, result, start)
            return result, moved[0][1]
        except RECOVERABLE as error:
            if self._policy == "forbid" or self.device.backend == "cpu":
                raise
            self._announce(
                name, f"{self.device.backend}:{self.device.index}", "cpu", f"{type(error).__name__}: {error}"
            )
            with self._lock:
                self._figures[name].fallbacks += 1
            host = torch.device("cpu")
            moved = [to_torch(array, host, dtype if _is_plain(array) else None) for array in arrays]
            tensors = tuple(tensor for tensor, _ in moved)
            return self._in_batches(name, method, tensors, options), moved[0][1]

    def _run(
        self, name: str, method: _Method, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]
    ) -> torch.Tensor:
        if self.device.torch_device:
            return self._in_batches(name, method, tensors, options)
        if name != "field_add":
            raise UnsupportedCase(f"{self.device.backend} has no {name}")
        x, y = (tensor.numpy() for tensor in tensors)
        return torch.from_numpy(field_op.add_on(self.device, x, y, **options))

    def _in_batches(
        self, name: str, method: _Method, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]
    ) -> torch.Tensor:
        """Run on at most batch_size rows at a time, looking at the clock between them."""
        rows = tensors[0].shape[0] if tensors[0].ndim else 0
        size = self.config.batch_size
        with torch.no_grad():
            if size is None or not method.rowwise or rows <= size:
                return method.run(*tensors, **options)
            began = time.monotonic()
            parts = []
            for low in range(0, rows, size):
                spent = time.monotonic() - began
                if self.config.timeout_s is not None and spent > self.config.timeout_s:
                    raise TimeLimitExceeded(
                        f"{name}: {spent:.3g} s of at most {self.config.timeout_s:g} s after {low} of {rows} rows"
                    )
                batch = (
                    x[low : low + size] if x.shape[:1] == (rows,) and x.ndim == tensors[0].ndim else x for x in tensors
                )
                parts.append(method.run(*batch, **options))
                if self.config.timeout_s is not None:
                    self._provider.synchronize(self.device.index)
            return torch.cat(parts)

    def _check_memory(self, name: str, arrays: tuple[Any, ...]) -> None:
        """Refuse what would pass the limit: inputs, and a result as large as the largest that the operation gives."""
        limit = self.config.memory_limit_bytes
        if limit is None:
            return
        sizes = [_nbytes(array) for array in arrays]
        needed = sum(sizes) + (_product_bytes(*arrays) if name == "matmul" else sizes[0])
        if needed > limit:
            raise OutOfMemory(f"{name}: inputs and result take {needed:,} bytes; the limit is {limit:,}")

    # --- bookkeeping ---------------------------------------------------------------------------------------------

    def _count(
        self, name: str, method: _Method, tensors: tuple[torch.Tensor, ...], result: torch.Tensor, start: Event | None
    ) -> None:
        stop = self._provider.record_event(self.device.index) if start is not None else None
        figures = self._figures[name]
        with self._lock:
            figures.bytes += sum(tensor.nbytes for tensor in tensors) + result.nbytes
            figures.flops += method.flops(tensors, result)
            if start is not None and stop is not None:
                figures.pending.append((start, stop))
                if len(figures.pending) >= 64:
                    _collect(figures)

    def _announce(self, op: str, wanted: str, ran: str, reason: str) -> None:
        first = ledger().fallback(FallbackRecord(op, "", wanted, ran, reason))
        if first or self._policy == "warn":
            warnings.warn(f"{op}: {wanted} is not used, {ran} is. {reason}", FallbackWarning, stacklevel=4)


def _collect(figures: _Figures) -> None:
    for _ in range(len(figures.pending)):
        start, stop = figures.pending.popleft()
        if stop.done():
            figures.samples_ms.append(start.elapsed_ms(stop))
        else:
            figures.pending.append((start, stop))


def _quantile(ordered: list[float], q: float) -> float | None:
    return float(np.quantile(ordered, q)) if ordered else None


def _is_plain(x: object) -> bool:
    return isinstance(x, (int, float, list, tuple))


def _nbytes(x: Any) -> int:
    return int(x.nbytes) if hasattr(x, "nbytes") else int(np.asarray(x).nbytes)


def _product_bytes(a: Any, b: Any) -> int:
    """Bytes of a matrix product, from its factors."""
    a, b = (x if hasattr(x, "shape") else np.asarray(x) for x in (a, b))
    if a.ndim < 1 or b.ndim < 1:
        raise ShapeError(f"matmul wants at least one dimension, got shapes {tuple(a.shape)} and {tuple(b.shape)}")
    rows = math.prod(a.shape[:-1])
    columns = b.shape[-1] if b.ndim > 1 else 1
    return int(rows * columns * _nbytes(a) // max(1, math.prod(a.shape)))
