"""Times of one operation on the user's own arrays, by each implementation that serves them: `Accelerator.benchmark`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from accelerant.accelerator.methods import METHODS, Operations
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.dispatch import force, operations
from accelerant.runtime.dispatch.plan import explain_quietly
from accelerant.runtime.files import JsonRecord, clipped, plain
from accelerant.runtime.html_page import text_table
from accelerant.runtime.ledger import Decision, quantile

_MOST_S, _LEAST = 2.0, 3  # seconds after which a slow call is not repeated, once it has run a few times
_LEAST_SAMPLES = {95: 20, 99: 100}  # samples without which a percentile would be the slowest call, whatever its share


@dataclass(frozen=True, slots=True)
class OpTiming:
    """One implementation on the given arrays.

    Attributes:
        name: of the implementation; "whole call" includes the copies of arrays to the device and back.
        own: whether it is a kernel of Accelerant.
        chosen: whether a call of the operation runs it.
        p50_ms, p95_ms, p99_ms: percentiles of the calls in milliseconds; None where it did not run, or for p95 of fewer
            than 20 calls, for p99 of fewer than 100.
        first_ms: the first call in this process, with what it compiles and loads.
        note: why it is chosen, or why it did not run.
    """

    name: str
    own: bool = False
    chosen: bool = False
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    first_ms: float | None = None
    calls: int = 0
    note: str = ""


@dataclass(frozen=True, slots=True)
class OpBenchmark(JsonRecord):
    """The times of an operation on the user's arrays. It prints as a table.

    Attributes:
        case: shapes and dtypes of the arrays.
        timings: the chosen implementation, the others that serve the arrays or refuse them, and the whole call.
        size_bytes: of arrays and result.
        flops: floating-point, field or curve operations of the call; 0 where it only moves bytes.
    """

    op: str
    case: str
    device: str
    timings: tuple[OpTiming, ...]
    size_bytes: int
    flops: int

    def __str__(self) -> str:
        unit = "GFLOP/s" if METHODS[self.op].is_op else "GOp/s"
        rows: list[tuple[str, ...]] = [
            ("", "implementation", "p50 ms", "p95 ms", "p99 ms", "first call ms", "GB/s", unit, "note")
        ]
        for one in self.timings:
            kind = "" if one.name == "whole call" else " (own)" if one.own else " (library)"
            rate = 1e6 * one.p50_ms if one.p50_ms else None
            rates = [plain(amount / rate) if amount and rate else "-" for amount in (self.size_bytes, self.flops)]
            times = map(plain, (one.p50_ms, one.p95_ms, one.p99_ms, one.first_ms))
            rows.append(("*" if one.chosen else "", one.name + kind, *times, *rates, one.note))
        return "\n".join([f"{self.op}  {self.case}  on {self.device}", *text_table(rows, numbers=rows[0][2:8])])

    __repr__ = __str__


class _Recorder(Operations):
    """Takes the call of a method apart, without running it."""

    def _call(self, name: str, arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return name, arrays, options


def named_call(
    op: object, arrays: Sequence[Any], options: dict[str, Any]
) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Return name, arrays and options of a call; ConfigError for an unknown operation, TypeError for arguments."""
    name = op if isinstance(op, str) else getattr(op, "__name__", "")
    if name not in METHODS:
        raise ConfigError(f"benchmark: no operation {clipped(op)}; there are {', '.join(METHODS)}")
    found: tuple[str, tuple[Any, ...], dict[str, Any]] = getattr(_Recorder(), name)(*arrays, **options)
    return found


def sample_ms(call: Callable[[], object], wait: Callable[[], object], iterations: int) -> list[float]:
    """Return the sorted milliseconds of calls, each from an idle device to an idle device."""
    samples: list[float] = []
    until = time.perf_counter() + _MOST_S
    while len(samples) < iterations and (len(samples) < _LEAST or time.perf_counter() < until):
        wait()
        began = time.perf_counter()
        call()
        wait()
        samples.append((time.perf_counter() - began) * 1e3)
    return sorted(samples)


def _timing(
    name: str, call: Callable[[], object], wait: Callable[[], object], iterations: int, **more: Any
) -> OpTiming:
    first = more.pop("first_ms", None)
    if first is None:
        (first,) = sample_ms(call, wait, 1)
    samples = sample_ms(call, wait, iterations)
    p95, p99 = (quantile(samples, q / 100) if len(samples) >= least else None for q, least in _LEAST_SAMPLES.items())
    return OpTiming(
        name, p50_ms=quantile(samples, 0.5), p95_ms=p95, p99_ms=p99, first_ms=first, calls=len(samples), **more
    )


def time_implementations(
    name: str, run: Callable[[], object], whole: Callable[[], object], wait: Callable[[], object], iterations: int,
    backend: str,
) -> tuple[OpTiming, ...]:  # fmt: skip
    """Time a call by the chosen implementation, by each other one that takes it, and with its arrays' copies."""
    with torch.no_grad():
        explained = explain_quietly(run)
        decision = next((one for one in explained.decisions if one.op.startswith(name)), None)
        chosen = decision.implementation if decision is not None else backend
        own, why = (decision.own, decision.reason) if decision is not None else (True, "the only one")
        settled = {"own": own, "chosen": True, "first_ms": explained.total_ms, "note": why}
        timings = [_timing(chosen, run, wait, iterations, **settled)]
        if decision is not None and decision.op in operations():
            timings += _others(decision, run, wait, iterations)
        return (*timings, _timing("whole call", whole, wait, iterations, note="with copies to and from the device"))


def _others(
    decision: Decision, run: Callable[[], object], wait: Callable[[], object], iterations: int
) -> list[OpTiming]:
    refused, timings = dict(decision.refused), []
    for other in operations()[decision.op].implementations:
        if other.name == decision.implementation:
            continue
        try:
            with force(**{decision.op: other.name}):
                timings.append(_timing(other.name, run, wait, iterations, own=other.own))
        except AccelerantError as error:  # it serves other calls
            reason = refused.get(other.name) or str(error).rpartition(": ")[2]
            timings.append(OpTiming(other.name, other.own, note=reason.splitlines()[0]))
    return timings
