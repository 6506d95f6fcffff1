"""Timers of calls: warm-up, a cold cache, many repeats, quantiles; and beside them the wall time of the plain call.

On a GPU a call is timed by two events, after a write much larger than the L2 cache, which empties the cache and keeps
the device busy while the host queues the call. What the write leaves in the L2 goes to memory during the call, as what
the call writes does after it; for a call that writes next to nothing the cache is emptied by reading (`reads=True`).
`wall_ms` is from an idle device to an idle device, `back_to_back_ms` of one of several calls without a pause.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

_FLUSH_BYTES = 2**30
_MIN_REPEATS, _MAX_REPEATS = 10, 200
_SLOW_S, _SLOW_REPEATS = 0.05, 3
"""Least repeats of calls that take more than _SLOW_S seconds; their medians hardly move."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Quantiles of repeated calls, in milliseconds, the single times to four digits, and medians of wall times."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    repeats: int
    samples: tuple[float, ...] = ()
    wall_ms: float | None = None
    back_to_back_ms: float | None = None

    @classmethod
    def of(cls, samples: Sequence[float], *, wall: bool = False) -> Timing:
        """Return the quantiles of samples in milliseconds; `wall` if they are wall times. One sample is all of them."""
        several = samples if len(samples) > 1 else [*samples] * 2
        cuts, middle = statistics.quantiles(several, n=10, method="inclusive"), statistics.median(samples)
        kept = tuple(float(f"{sample:.4g}") for sample in samples)
        low, high = min(cuts[1], middle), max(cuts[7], middle)  # interpolation rounds
        return cls(low, middle, high, len(samples), kept, middle if wall else None)

    def over(self, other: Timing) -> Timing:
        """Return the ratio of this timing to another one, its spread from the extremes of both."""
        return Timing(self.p20_ms / other.p80_ms, self.p50_ms / other.p50_ms, self.p80_ms / other.p20_ms, 1)

    def beside(self, plain: Timing) -> Timing:
        """Return the timing with the wall times of another one, which is of the plain call."""
        return replace(self, wall_ms=plain.wall_ms, back_to_back_ms=plain.back_to_back_ms)


def time_ms(fn: Callable[[], object], device: torch.device, *, budget_s: float = 0.3, reads: bool = False) -> Timing:
    """Return the device time of a call, and beside it its wall times; `reads` if it writes next to nothing.

    The timed calls take `budget_s` seconds; at least 10 are made, or 3 of those that take above 50 ms.
    """
    if device.type != "cuda":
        return wall_ms(fn, device, budget_s=budget_s)
    plain = back_to_back_ms(fn, device, budget_s=budget_s / 2)
    return Timing.of(_device_samples(fn, budget_s, reads)).beside(plain)


_TURN_S = 2e-4  # shorter calls are timed several at a time, so that reading the clock does not count


def time_in_turns(
    calls: Sequence[Callable[[], object]], *, budget_s: float = 0.3, least: int | None = None
) -> list[Timing]:
    """Return the host times of synchronous calls that take turns; each round begins with another call.

    Each takes `budget_s` seconds; at least `least` rounds are made, by default 10, or 3 where a call takes above 50 ms.
    """
    once_s = [second_call_s(call) for call in calls]
    together = [max(1, int(_TURN_S / max(s, 1e-7))) for s in once_s]
    rounds = _repeats(max((s * n for s, n in zip(once_s, together, strict=True)), default=0.0), budget_s, least)
    samples: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        for turn in range(len(calls)):
            at = (turn + i) % len(calls)
            call, count = calls[at], together[at]
            began = time.perf_counter()
            for _ in range(count):
                call()
            samples[at].append((time.perf_counter() - began) / count * 1e3)
    return [Timing.of(times, wall=True) for times in samples]


_ROTATED_CALLS = 64  # least calls between two events: they share the cost of starting the first and ending the last


def rotated_ms(
    calls: Sequence[Callable[[], object]], device: torch.device, *, budget_s: float = 0.3
) -> tuple[Timing, str]:
    """Return the device time of one of several consecutive calls, each on memory of its own, and how it was taken.

    The copies of the arguments exceed the L2. On a GPU the calls are captured in one CUDA graph, or timed after work
    that gives the host a head start.
    """
    count = f"{len(calls)} copies in turn"
    if device.type != "cuda":
        together = wall_ms(lambda: [call() for call in calls], device, budget_s=budget_s)
        return Timing.of([sample / len(calls) for sample in together.samples], wall=True), count
    for call in calls[:3]:
        call()
    calls = [*calls] * -(-_ROTATED_CALLS // len(calls))
    run, how = _captured(calls)
    run()
    memory = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    repeats = _repeats(first_ms(run, device) / 1e3, budget_s)
    # memory.sum reads: what a write leaves in the L2 would go to memory in the calls' time
    samples = _event_samples(run, memory.sum, repeats)
    timing = Timing.of([sample / len(calls) for sample in samples])
    return timing.beside(back_to_back_ms(calls[0], device, budget_s=budget_s / 2)), f"{count}, {len(calls)} {how}"


def _captured(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # noqa: BLE001 - what cannot be captured is called instead, and the row says so
        torch.cuda.synchronize()
        return lambda: [call() for call in calls], "calls back to back"
    return graph.replay, "calls in a CUDA graph"


def wall_ms(
    fn: Callable[[], object], device: torch.device, *, budget_s: float = 0.3, least: int | None = None
) -> Timing:
    """Return the host's time of a call and of all that it starts on the device, which is idle before and after.

    The timed calls take `budget_s` seconds; at least `least` are made, by default as by time_ms.
    """
    fn()
    repeats = _repeats(first_ms(fn, device) / 1e3, budget_s, least)
    return Timing.of([first_ms(fn, device) for _ in range(repeats)], wall=True)


_IN_A_ROW = 20  # calls back to back: too few to fill the launch queue


def back_to_back_ms(
    fn: Callable[[], object], device: torch.device, *, calls: int = _IN_A_ROW, budget_s: float = 0.3
) -> Timing:
    """Return the wall time of one of several calls without a pause; `wall_ms` is of one from idle to idle device."""
    return back_to_back_times_ms([fn], device, calls=calls, budget_s=budget_s)[0]


def back_to_back_times_ms(
    fns: Sequence[Callable[[], object]], device: torch.device, *, calls: int = _IN_A_ROW, budget_s: float = 0.3
) -> list[Timing]:
    """Return back_to_back_ms of functions in turns, each with the budget, so that what slows the host slows all."""
    for fn in fns:
        fn()
    rounds = _repeats(max(first_ms(fn, device) for fn in fns) / 1e3, budget_s / 3, _SLOW_REPEATS)
    singles = [[first_ms(fn, device) for fn in fns] for _ in range(rounds)]
    alone = [statistics.median(times) for times in zip(*singles, strict=True)]
    counts = [max(2, min(calls, int(1e3 * budget_s / 6 / ms))) for ms in alone]

    def several(fn: Callable[[], object], count: int) -> None:
        for _ in range(count):
            fn()
        synchronize(device)

    rows = [functools.partial(several, fn, count) for fn, count in zip(fns, counts, strict=True)]
    timings = time_in_turns(rows, budget_s=budget_s * 2 / 3, least=_SLOW_REPEATS)
    ones = [Timing.of([x / count for x in row.samples]) for row, count in zip(timings, counts, strict=True)]
    return [replace(one, wall_ms=ms, back_to_back_ms=one.p50_ms) for one, ms in zip(ones, alone, strict=True)]


def first_ms(call: Callable[[], object], device: torch.device) -> float:
    """Return the milliseconds of one call and of what it starts on the device, which is idle before."""
    synchronize(device)
    began = time.perf_counter()
    call()
    synchronize(device)
    return (time.perf_counter() - began) * 1e3


def second_call_s(fn: Callable[[], object]) -> float:
    """Call twice on the CPU and return the seconds of the second call."""
    fn()
    return first_ms(fn, torch.device("cpu")) / 1e3


def synchronize(device: torch.device) -> None:
    """Wait for a torch device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_time_us(fn: Callable[[], object], *, calls: int = 200, rounds: int = 15) -> Timing:
    """Return the host time of a call that does not wait for the device, with the fields in microseconds.

    Each round synchronizes, then makes the calls back to back, too few for the launch queue to fill up. Cyclic garbage
    collection stays on, as in a user's program.
    """
    return host_times_us([fn], calls=calls, rounds=rounds)[0]


def host_times_us(fns: Sequence[Callable[[], object]], *, calls: int = 200, rounds: int = 15) -> list[Timing]:
    """Return host_time_us of functions that take turns in each round, so that what slows the host slows all."""
    samples: list[list[float]] = [[] for _ in fns]
    for _ in range(rounds + 2):
        for fn, times in zip(fns, samples, strict=True):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(calls):
                fn()
            times.append((time.perf_counter() - began) / calls * 1e6)
    timings = [Timing.of(times[2:]) for times in samples]
    return [Timing(timing.p20_ms, timing.p50_ms, timing.p80_ms, rounds * calls) for timing in timings]


def _repeats(once_s: float, budget_s: float, least: int | None = None) -> int:
    least = least or (_MIN_REPEATS if once_s < _SLOW_S else _SLOW_REPEATS)
    return max(least, min(_MAX_REPEATS, int(budget_s / max(once_s, 1e-7))))


def _device_samples(fn: Callable[[], object], budget_s: float, reads: bool) -> list[float]:
    memory = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    flush: Callable[[], object] = memory.sum if reads else memory.zero_

    def took(call: Callable[[], object], calls: int) -> tuple[float, float]:
        """Return the seconds of one of several calls after a flush: of the host, and of host and device."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            flush()
            call()
        queued = time.perf_counter()
        torch.cuda.synchronize()
        return (queued - began) / calls, (time.perf_counter() - began) / calls

    fn()
    host_s, once_s = took(fn, 1)
    if once_s < _SLOW_S:
        host_s, once_s = took(fn, 3)
    flush_s = took(lambda: None, 3)[1]
    flushes = covers(host_s, flush_s)
    repeats = _repeats(once_s + (flushes - 1) * flush_s, budget_s)
    return _event_samples(fn, flush, repeats, flushes)


def _event_samples(
    fn: Callable[[], object], flush: Callable[[], object], repeats: int, flushes: int = 1
) -> list[float]:
    """Return the milliseconds of calls between two events on the current device, each after so many flushes."""
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in marks:
        for _ in range(flushes):
            flush()
        start.record()
        fn()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


_MOST_FLUSHES = 8  # limit for calls that wait for the device themselves, whose host time no number of flushes hides


def covers(host_s: float, flush_s: float) -> int:
    """Return how many flushes keep the device busy for twice the time that the host takes to queue a call."""
    return max(1, min(_MOST_FLUSHES, math.ceil(2 * host_s / flush_s)))


# --- the device's own limits, and the same cases on the CPU -----------------------------------------------------------
def measure_matmul(device: torch.device, *, budget_s: float = 0.3) -> dict[str, float]:
    """Return "copy GB/s" as measure_copy, and "matmul TFLOP/s" of a product in bfloat16, on a CPU in float32."""
    ceilings = measure_copy(device, budget_s=budget_s)
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = time_ms(lambda: a @ b, device, budget_s=budget_s)
    return ceilings | {"matmul TFLOP/s": 2 * n**3 / product.p50_ms / 1e9}


def measure_copy(device: torch.device, *, budget_s: float = 0.3) -> dict[str, float]:
    """Return "copy GB/s" of a large copy on the device; bytes read and bytes written both count."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source), device, budget_s=budget_s)
    return {"copy GB/s": 2 * size / copy.p50_ms / 1e6}


def measure_link(device: torch.device, *, size: int | None = None, budget_s: float = 0.3) -> dict[str, float]:
    """Return "host to device GB/s" and "device to host GB/s" of copies of `size` bytes, pinned for a GPU."""
    gpu = device.type == "cuda"
    size = size or (2**29 if gpu else 2**26)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=gpu)
    there = torch.ones(size, dtype=torch.uint8, device=device)
    into = time_ms(lambda: there.copy_(host, non_blocking=True), device, budget_s=budget_s)
    back = time_ms(lambda: host.copy_(there, non_blocking=True), device, budget_s=budget_s)
    return {"host to device GB/s": size / into.p50_ms / 1e6, "device to host GB/s": size / back.p50_ms / 1e6}


_ENOUGH_S, _TOO_LONG_S = 0.2, 2.0
_SHARES = (1, 32, 256, 1024)
_CALLS = 12  # calls behind a figure at least: warm-up and ten timed ones


def threads_text() -> str:
    """Return the number of torch's threads, as "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads != 1)}"


def cpu_time_ms(
    make: Callable[[int], Callable[[], object]], rows: int, *, budget_s: float = 0.3
) -> tuple[float | None, str]:
    """Return the median of cpu_timing, and its note with the number of torch's threads."""
    timing, note = cpu_timing(make, rows, budget_s=budget_s)
    if timing is None:
        return None, note
    return timing.p50_ms, ", ".join(filter(None, (note, threads_text())))


def cpu_timing(
    make: Callable[[int], Callable[[], object]], rows: int, *, budget_s: float = 0.3, most_s: float = _TOO_LONG_S
) -> tuple[Timing | None, str]:
    """Time a case on this CPU, by default of all rows, else of the most whose call stays below 0.2 s, scaled.

    `make` returns the call for a number of rows, in which its work is linear. Returns the times and a note that says
    what was scaled; None and the reason where even the smallest share would take more than `most_s`.
    """
    least = math.ceil(rows / _SHARES[-1])
    once_s = second_call_s(make(least))
    if once_s * _CALLS > most_s:
        part = "all" if least == rows else f"1/{_SHARES[-1]} of the"
        return None, f"skipped: {once_s * _CALLS:.1f} s for {part} rows"
    for share in _SHARES:
        some = math.ceil(rows / share)
        if some == least or once_s * some / least < _ENOUGH_S:
            break
    timing = time_ms(make(some), torch.device("cpu"), budget_s=budget_s)
    if some == rows:
        return timing, ""
    scaled = Timing.of([sample * rows / some for sample in timing.samples])
    return scaled, f"scaled from 1/{rows / some:.0f} of the rows"
