"""Races: several ways to do the same are timed on the actual arguments, and the fastest is named.

What counts is what a program waits for when it makes the call in a stream of calls: the longer of the host's part and
the device's. So calls are made back to back, and the time between two device events around them is divided by their
number: a call that keeps the host longer than the device shows the host's time. On a GPU that leaves small inputs in
the L2, where a way that reads them twice looks as good as one that reads them once; so calls are also timed one by
one, each after a write that empties the L2, and the score is the longer of both. Those calls are queued behind writes
that keep the device busy meanwhile: host time, which the first figure has, is not in the second. Ways take turns, the
first to begin a turn is another each time, so that a clock that drifts does so for all, and the median of all turns
counts: a few that were disturbed do not show.

A way that raises is out, with its reason. One that is far behind after its first call is not timed further. Results are
dropped call by call, and random number generators are put back.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from accelerant.errors import DeviceLost
from accelerant.runtime.streams.stream import capturing

__all__ = ["MARGIN", "Outcome", "fastest", "obstacle", "race"]

MARGIN = 0.03
"""Who is within this part of the fastest is as fast, so that noise does not decide against the preferred one."""

_TURNS = 9
_MOST_CALLS = 200
_FAR_BEHIND = 4.0
_NOTICEABLE_MS = 0.2
"""A call below this is not judged by a single timing, which holds the wait for the device too."""

_L2_TIMES = 4
_LEAST_FLUSH_BYTES = 2**26
_HEAD_START = 4
"""Writes before the first cold call of a turn: some 0.2 ms, in which the host queues it."""

_COLD_LEAST, _COLD_MOST = 2, 6
"""Cold calls in a turn."""

_turn = threading.RLock()
_plain = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a race found.

    Attributes:
        ms: name -> milliseconds of a call, in the order given.
        failed: name -> what it raised, without the frames that held memory.
    """

    ms: dict[str, float]
    failed: dict[str, Exception]


def race(
    runs: Sequence[tuple[str, Callable[[], object]]],
    device: torch.device,
    *,
    budget_s: float = 0.03,
    lost: Callable[[Exception], DeviceLost | None] = lambda error: None,
) -> Outcome | None:
    """Time each run; None at once where another thread is racing, since the two would disturb each other.

    Args:
        runs: names and functions that change nothing and whose results are dropped; the preferred first.
        device: where they work, "cuda" or "cpu"; only its current stream is waited for.
        budget_s: seconds of timed calls for each; compiling comes on top.
        lost: tells an error after which the device cannot be used, which is raised.
    """
    if not _turn.acquire(blocking=False):
        return None
    try:
        with torch.no_grad(), _watch(device) as watch:
            return _race(runs, watch, budget_s, lost)
    finally:
        _turn.release()


def _race(
    runs: Sequence[tuple[str, Callable[[], object]]],
    watch: _HostWatch | _DeviceWatch,
    budget_s: float,
    lost: Callable[[Exception], DeviceLost | None],
) -> Outcome:
    ms: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, run in runs:
        try:
            run()  # compiles, and tunes where that is asked for
            ms[name] = min(watch.stream_ms(run, 1) for _ in range(2))
        except Exception as error:  # noqa: BLE001 - whatever a way raises, it is out with its reason
            failed[name] = _kept(error, lost)
    limit = max(_FAR_BEHIND * min(ms.values(), default=0.0), _NOTICEABLE_MS)
    going = {name: run for name, run in runs if name in ms and ms[name] <= limit}
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in going}
    for turn in range(_TURNS):
        for name, run in _from(turn, list(going.items())):
            calls = int(budget_s * 1e3 / _TURNS / max(ms[name], 1e-4))
            try:
                samples[name][0].append(watch.stream_ms(run, max(1, min(_MOST_CALLS, calls))))
                samples[name][1].extend(watch.cold_ms(run, max(_COLD_LEAST, min(_COLD_MOST, calls))))
            except Exception as error:  # noqa: BLE001 - as above
                failed[name] = _kept(error, lost)
                del going[name], samples[name], ms[name]
    ms |= {name: max(statistics.median(each) for each in kinds if each) for name, kinds in samples.items() if kinds[0]}
    return Outcome(ms, failed)


def _from(turn: int, runs: list[tuple[str, Callable[[], object]]]) -> list[tuple[str, Callable[[], object]]]:
    """The runs, begun with another each turn."""
    first = turn % max(len(runs), 1)
    return runs[first:] + runs[:first]


def fastest(ms: Mapping[str, float], order: Iterable[str], margin: float = MARGIN) -> str | None:
    """The first in order whose time is within the margin of the least; None if none in the order was timed."""
    timed = [name for name in order if name in ms]
    if not timed:
        return None
    limit = min(ms[name] for name in timed) * (1.0 + margin)
    return next(name for name in timed if ms[name] <= limit)


def obstacle(device: torch.device, args: Iterable[object]) -> str | None:
    """Why these arguments cannot be raced now, though they may be at another call; None if they can."""
    if capturing(device):
        return "a CUDA graph is being captured"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return "a mode or a transform of torch is active"
    if not all(type(tensor) in _plain and not tensor.is_meta for tensor in _tensors(args)):
        return "an argument is no plain tensor"
    return None


def _tensors(args: Iterable[object]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _kept(error: Exception, lost: Callable[[Exception], DeviceLost | None]) -> Exception:
    """The error without its frames, which hold what the run had allocated."""
    gone = lost(error)
    if gone is not None:
        raise gone from error
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


# --- clocks ----------------------------------------------------------------------------------------------------------


class _HostWatch:
    """The clock around calls that are done when they return."""

    def stream_ms(self, run: Callable[[], object], calls: int) -> float:
        """Of a call among calls back to back."""
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls * 1e3

    def cold_ms(self, run: Callable[[], object], calls: int) -> list[float]:
        """None: caches of a CPU are not emptied."""
        return []


class _DeviceWatch:
    """Events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._stop = torch.cuda.Event(enable_timing=True)
        self._marks = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_COLD_MOST)
        ]
        l2 = int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0))
        try:
            size = max(_LEAST_FLUSH_BYTES, _L2_TIMES * l2)
            self._flush: torch.Tensor | None = torch.empty(size, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError:  # then what is back to back must do
            self._flush = None

    def stream_ms(self, run: Callable[[], object], calls: int) -> float:
        """Of a call among calls back to back; the longer of the host's and the device's part."""
        self._start.record()
        for _ in range(calls):
            run()
        self._stop.record()
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / calls

    def cold_ms(self, run: Callable[[], object], calls: int) -> list[float]:
        """Of calls whose inputs are not in the L2, the host ahead of the device."""
        if self._flush is None:
            return []
        for _ in range(_HEAD_START):
            self._flush.zero_()
        marks = self._marks[:calls]
        for start, stop in marks:
            self._flush.zero_()
            start.record()
            run()
            stop.record()
        marks[-1][1].synchronize()
        return [float(start.elapsed_time(stop)) for start, stop in marks]


@contextlib.contextmanager
def _watch(device: torch.device) -> Iterator[_HostWatch | _DeviceWatch]:
    """The device's clock, with that device current, and its and the host's generators put back afterwards."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield _HostWatch()
        return
    with torch.cuda.device(device), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        yield _DeviceWatch(device)
