"""Times that can be trusted: warm-up, a cold cache, many repeats, quantiles.

On a GPU a call stands between two events, after a write of many times what the L2 holds: the write empties the cache
and keeps the device busy (about 0.2 ms on an H200; it is repeated for a slow host) while the host queues the call, so
that host time does not stand in the figure; `host_time_us` measures that. What the write leaves in the L2 goes to
memory during the call, as what the call itself writes does after it: for a call that reads and writes the two are
even. A call that writes next to nothing would pay for the flush (50 MB, 11 us on an H200), so for it the cache is
emptied by reading (`reads=True`). On the CPU the clock is read around the call.

`rotated_ms` is for calls that a program makes one after the other on other memory each time, as the layers of a model
do: alone, a call of some 20 us also shows what it costs to start one. `wall_ms` is what somebody waits for: from an
idle device to an idle device, the host's part included. `time_in_turns` is for a comparison on a CPU, whose speed is
another from one second to the next: what is compared is called in turns.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Timing", "covers", "host_time_us", "rotated_ms", "synchronize", "time_in_turns", "time_ms", "wall_ms"]

_FLUSH_BYTES = 2**30
_MIN_REPEATS = 10
_MAX_REPEATS = 200
_SLOW_S = 0.05
_SLOW_REPEATS = 3
"""Calls of more seconds than that are made at least so many times: their medians hardly move."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Quantiles of repeated calls, in milliseconds, and the single times to four digits."""

    p20_ms: float
    p50_ms: float
    p80_ms: float
    repeats: int
    samples: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        """Of two samples or more."""
        cuts = statistics.quantiles(samples, n=10, method="inclusive")
        kept = tuple(float(f"{sample:.4g}") for sample in samples)
        return cls(cuts[1], statistics.median(samples), cuts[7], len(samples), kept)


def time_ms(fn: Callable[[], object], device: torch.device, *, budget_s: float = 0.3, reads: bool = False) -> Timing:
    """Device time of a call.

    Args:
        fn: the call; its result is dropped.
        device: where it works.
        budget_s: seconds to spend on the timed calls; at least 10 are made, or 3 of those that take above 50 ms.
        reads: whether it writes next to nothing.
    """
    return Timing.of(_device_samples(fn, budget_s, reads) if device.type == "cuda" else _host_samples(fn, budget_s))


_TURN_S = 2e-4
"""Shorter calls are made several at a time, so that reading the clock is no part of the figure."""


def time_in_turns(calls: Sequence[Callable[[], object]], *, budget_s: float = 0.3) -> list[Timing]:
    """Host times of calls that are done when they return, each round one after the other, the next round another first.

    Args:
        calls: what is compared; results are dropped.
        budget_s: seconds to spend on each; at least 10 rounds are made, or 3 where a call takes above 50 ms.

    Returns:
        the times of each.
    """
    once_s = []
    for call in calls:
        call()
        began = time.perf_counter()
        call()
        once_s.append(time.perf_counter() - began)
    together = [max(1, int(_TURN_S / max(s, 1e-7))) for s in once_s]
    rounds = _repeats(max((s * n for s, n in zip(once_s, together, strict=True)), default=0.0), budget_s)
    samples: list[list[float]] = [[] for _ in calls]
    for i in range(rounds):
        for place in range(len(calls)):
            at = (place + i) % len(calls)
            call, count = calls[at], together[at]
            began = time.perf_counter()
            for _ in range(count):
                call()
            samples[at].append((time.perf_counter() - began) / count * 1e3)
    return [Timing.of(each) for each in samples]


_ROTATED_CALLS = 64
"""Between two events, at the least: what starting the first and ending the last take is then shared by so many."""


def rotated_ms(
    calls: Sequence[Callable[[], object]], device: torch.device, *, budget_s: float = 0.3
) -> tuple[Timing, str]:
    """Device time of a call among calls that follow one another, each on memory of its own.

    On a GPU they are captured in one CUDA graph, and a replay's time is divided by their number. Calls that cannot be
    captured stand between two events as they are, after work that gives the host a head start.

    Args:
        calls: the same on copies of its arguments, which together are many times what the L2 holds.
        device: where they work.
        budget_s: seconds to spend on timed replays.

    Returns:
        the times, with how they were taken in words.
    """
    count = f"{len(calls)} copies in turn"
    if device.type != "cuda":
        samples = [sample / len(calls) for sample in _host_samples(lambda: [call() for call in calls], budget_s)]
        return Timing.of(samples), count
    for call in calls[:3]:
        call()
    calls = [*calls] * -(-_ROTATED_CALLS // len(calls))
    run, how = _captured(calls)
    run()
    torch.cuda.synchronize(device)
    memory = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device=device)
    began = time.perf_counter()
    run()
    torch.cuda.synchronize(device)
    repeats = _repeats(time.perf_counter() - began, budget_s)
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in marks:
        memory.sum()  # reads: what a write leaves in the L2 would go to memory in the calls' time
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize(device)
    return Timing.of([start.elapsed_time(stop) / len(calls) for start, stop in marks]), f"{count}, {len(calls)} {how}"


def _captured(calls: Sequence[Callable[[], object]]) -> tuple[Callable[[], object], str]:
    """What makes all calls, and how."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except Exception:  # noqa: BLE001 - whatever cannot be captured is called instead, and the row says so
        torch.cuda.synchronize()
        return lambda: [call() for call in calls], "calls back to back"
    return graph.replay, "calls in a CUDA graph"


def wall_ms(
    fn: Callable[[], object], device: torch.device, *, budget_s: float = 0.3, least: int = _MIN_REPEATS
) -> Timing:
    """Time on the host's clock of a call and all that it starts on the device.

    Args:
        fn: the call; its result is dropped.
        device: waited for before and after each call.
        budget_s: seconds to spend on the timed calls.
        least: calls to make at least, two or more.
    """

    def timed() -> float:
        synchronize(device)
        began = time.perf_counter()
        fn()
        synchronize(device)
        return time.perf_counter() - began

    timed()
    once_s = timed()
    repeats = max(least, min(_MAX_REPEATS, int(budget_s / max(once_s, 1e-7))))
    return Timing.of([timed() * 1e3 for _ in range(repeats)])


def synchronize(device: torch.device) -> None:
    """Wait for a device that torch has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_time_us(fn: Callable[[], object], *, calls: int = 200, rounds: int = 15) -> Timing:
    """Host time of a call that does not wait for the device, in microseconds (the fields' unit is then us).

    Each round synchronises, then makes the calls back to back; too few for the launch queue to fill up. Cyclic garbage
    collection stays on, as in a user's program.
    """
    samples = []
    for _ in range(rounds + 2):
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            fn()
        samples.append((time.perf_counter() - began) / calls * 1e6)
    timing = Timing.of(samples[2:])
    return Timing(timing.p20_ms, timing.p50_ms, timing.p80_ms, rounds * calls)


def _repeats(once_s: float, budget_s: float) -> int:
    least = _MIN_REPEATS if once_s < _SLOW_S else _SLOW_REPEATS
    return max(least, min(_MAX_REPEATS, int(budget_s / max(once_s, 1e-7))))


def _device_samples(fn: Callable[[], object], budget_s: float, reads: bool) -> list[float]:
    memory = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    flush: Callable[[], object] = memory.sum if reads else memory.zero_

    def took(call: Callable[[], object], calls: int) -> tuple[float, float]:
        """Seconds of one of several calls, each after a flush: of the host, and of both."""
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
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, stop in marks:
        for _ in range(flushes):
            flush()
        start.record()
        fn()
        stop.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(stop) for start, stop in marks]


_MOST_FLUSHES = 8
"""Of a call that waits for the device itself, no number would hide the host's part."""


def covers(host_s: float, flush_s: float) -> int:
    """How many flushes keep the device busy while the host queues a call: twice its time, for hosts are uneven."""
    return max(1, min(_MOST_FLUSHES, math.ceil(2 * host_s / flush_s)))


def _host_samples(fn: Callable[[], object], budget_s: float) -> list[float]:
    fn()
    began = time.perf_counter()
    fn()
    repeats = _repeats(time.perf_counter() - began, budget_s)
    samples = []
    for _ in range(repeats):
        began = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - began) * 1e3)
    return samples
