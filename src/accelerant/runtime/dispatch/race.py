"""Races: candidates for the same work are timed on the actual arguments, and the fastest is named.

The score is the longer of two times. The first is that of calls back to back, so that a call which keeps the host
longer than the device shows the host's time. The second, on a GPU, is of single calls that are each queued behind
writes which empty the L2 and keep the device busy meanwhile. Candidates take turns in rotating order, so that clock
drift affects all alike, and medians count. One that raises or is far behind after its first calls is out. Results are
dropped call by call, and random number generators are restored.

Launch parameters are an op's default rule, or the plan that was measured to be faster on this model of device:

    forward_plan = Tuned("layer_norm_fwd", default=_forward_plan, candidates=_candidates)
    plan = forward_plan(x.device, x.dtype, (M, N), lambda plan: launch_forward(x, ..., plan=plan))

Results are kept and shipped as those of races are, under the key "plan <name>". Measuring happens only where the
setting `tune` is "first_use", or inside `tune(...)`.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from accelerant.config import choice_overrides, override
from accelerant.errors import DeviceLost
from accelerant.runtime import registry
from accelerant.runtime.dispatch.choice_store import CandidateTimes, Sources, choices, key_of, rounded
from accelerant.runtime.dispatch.plan import Explanation, PlanCache, explain_quietly, rules, torch_wants_determinism
from accelerant.runtime.host import fork_safe
from accelerant.runtime.streams.stream import capturing

MARGIN = 0.03
"""Candidates within 3% of the fastest count as ties, so that noise does not decide against the preferred one."""

RACED_DEVICES = frozenset({"cuda", "cpu"})  # types of torch device whose calls a race can time

_TURNS = 9
_MOST_CALLS = 200
_FAR_BEHIND = 4.0
_NOTICEABLE_MS = 0.2
"""A candidate below this is not dropped after a single timing, which includes the wait for the device."""

_L2_TIMES = 4
_LEAST_FLUSH_BYTES = 2**26
_HEAD_START = 4  # writes before the first cold call of a turn: about 0.2 ms, in which the host queues it
_COLD_LEAST, _COLD_MOST = 2, 6  # bounds on the cold calls in a turn

_turn = fork_safe(threading.RLock())
_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class RaceResult:
    """The milliseconds per call of each candidate, in their order, and the errors of the others."""

    ms: dict[str, float]
    failed: dict[str, Exception]


def race(
    runs: Sequence[tuple[str, Callable[[], object]]], device: torch.device, *, budget_s: float = 0.03,
    most_s: float = math.inf, lost: Callable[[Exception], DeviceLost | None] = lambda error: None,
) -> RaceResult | None:  # fmt: skip
    """Time candidates, the preferred first; return None at once where another thread is racing.

    `budget_s` are seconds of timed calls for each candidate besides compilation; no turn begins later than `most_s`
    after the first calls. `lost` returns the DeviceLost to raise for an error after which the device cannot be used,
    else None.
    """
    if not _turn.acquire(blocking=False):
        return None
    try:
        with torch.no_grad(), _clock(device) as clock:
            return _race(runs, clock, budget_s, most_s, lost)
    finally:
        _turn.release()


def _race(
    runs: Sequence[tuple[str, Callable[[], object]]], clock: _HostClock | _DeviceClock, budget_s: float, most_s: float,
    lost: Callable[[Exception], DeviceLost | None],
) -> RaceResult:  # fmt: skip
    ms: dict[str, float] = {}
    failed: dict[str, Exception] = {}
    for name, run in runs:
        try:
            run()  # compiles, and tunes where that is enabled
            ms[name] = min(clock.stream_ms(run, 1) for _ in range(2))
        except Exception as error:  # noqa: BLE001 - a candidate that raises is out, with its reason
            failed[name] = _without_frames(error, lost)
    until = time.monotonic() + most_s
    limit = max(_FAR_BEHIND * min(ms.values(), default=0.0), _NOTICEABLE_MS)
    going = {name: run for name, run in runs if name in ms and ms[name] <= limit}
    samples: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in going}
    for turn in range(_TURNS):
        if time.monotonic() > until:
            break
        first = turn % max(len(going), 1)
        candidates = list(going.items())
        for name, run in candidates[first:] + candidates[:first]:
            calls = int(budget_s * 1e3 / _TURNS / max(ms[name], 1e-4))
            try:
                samples[name][0].append(clock.stream_ms(run, max(1, min(_MOST_CALLS, calls))))
                samples[name][1].extend(clock.cold_ms(run, max(_COLD_LEAST, min(_COLD_MOST, calls))))
            except Exception as error:  # noqa: BLE001 - as above
                failed[name] = _without_frames(error, lost)
                del going[name], samples[name], ms[name]
    ms |= {
        name: max(statistics.median(times) for times in kinds if times) for name, kinds in samples.items() if kinds[0]
    }
    return RaceResult(ms, failed)


def fastest(ms: Mapping[str, float], order: Iterable[str], margin: float = MARGIN) -> str | None:
    """Return the first name in order whose time is within the margin of the least; None if none was timed."""
    timed = [name for name in order if name in ms]
    if not timed:
        return None
    limit = min(ms[name] for name in timed) * (1.0 + margin)
    return next(name for name in timed if ms[name] <= limit)


def obstacle(device: torch.device, args: Iterable[object]) -> str | None:
    """Return why these arguments cannot be raced now, though later calls may be; None if they can."""
    if capturing(device):
        return "a CUDA graph is being captured"
    if torch.compiler.is_compiling():
        return "torch.compile is tracing"
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return "a mode or a transform of torch is active"
    if not all(type(tensor) in _PLAIN_TYPES and not tensor.is_meta for tensor in _tensors(args)):
        return "an argument is no plain tensor"
    return None


def reason_of(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' | '.join(str(error).splitlines()[:2])}"


def _tensors(args: Iterable[object]) -> Iterator[torch.Tensor]:
    for arg in args:
        if isinstance(arg, torch.Tensor):
            yield arg
        elif isinstance(arg, (list, tuple)):
            yield from _tensors(arg)


def _without_frames(error: Exception, lost: Callable[[Exception], DeviceLost | None]) -> Exception:
    """Return the error without its frames, which hold the memory of the run; raise where the device is lost."""
    gone = error if isinstance(error, DeviceLost) else lost(error)
    if gone is not None:
        raise gone from error
    traceback.clear_frames(error.__traceback__)
    error.__traceback__ = error.__context__ = error.__cause__ = None
    return error


class _HostClock:
    """Times calls that are complete when they return."""

    def stream_ms(self, run: Callable[[], object], calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls):
            run()
        return (time.perf_counter() - began) / calls * 1e3

    def cold_ms(self, run: Callable[[], object], calls: int) -> list[float]:
        """Return no times: caches of a CPU are not emptied."""
        return []


class _DeviceClock:
    """Times calls by events on the current stream."""

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
        except torch.OutOfMemoryError:  # then only calls back to back are timed
            self._flush = None

    def stream_ms(self, run: Callable[[], object], calls: int) -> float:
        """Return the time per call of calls back to back: the longer of the host's and the device's part."""
        self._start.record()
        for _ in range(calls):
            run()
        self._stop.record()
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / calls

    def cold_ms(self, run: Callable[[], object], calls: int) -> list[float]:
        """Return the times of calls whose inputs are not in the L2, queued before the device reaches them."""
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
def _clock(device: torch.device) -> Iterator[_HostClock | _DeviceClock]:
    """Yield the device's clock, with that device current; restore its and the host's generators afterwards."""
    if device.type != "cuda":
        with torch.random.fork_rng(devices=[]):
            yield _HostClock()
        return
    with torch.cuda.device(device), torch.random.fork_rng(devices=[torch.cuda.current_device()]):
        yield _DeviceClock(device)


P = TypeVar("P", bound=Hashable)


class Tuned(Generic[P]):
    """The launch plans of a kernel by device, dtype and sizes: a rule, and candidates to time for each bucket."""

    def __init__(
        self, name: str, *, default: Callable[..., P], candidates: Callable[..., Sequence[P]],
        bucket: Callable[..., tuple[Hashable, ...]] | None = None,
    ) -> None:  # fmt: skip
        self.name = name
        self.default = default
        self.candidates = candidates
        self.plans: PlanCache[P] = PlanCache()
        self._usual = self.plans.usual
        self._bucket = bucket or (lambda *sizes: rounded(sizes))
        self._sources = Sources((default, candidates))

    def __call__(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], run: Callable[[P], object] | None = None
    ) -> P:
        """Return the plan, a look-up after the first call for the sizes; `run` launches one, None: measure nothing."""
        plans = self.plans.current() if choice_overrides or torch_wants_determinism() else self._usual
        plan = plans.get((device, dtype, sizes))
        return self._choose(device, dtype, sizes, run, plans) if plan is None else plan

    def forget(self) -> None:
        """Choose anew from the next call on."""
        self.plans.forget()

    def _choose(
        self, device: torch.device, dtype: torch.dtype, sizes: tuple[int, ...], run: Callable[[P], object] | None,
        plans: dict[Any, P],
    ) -> P:  # fmt: skip
        default = self.default(*sizes)
        candidates = {repr(plan): plan for plan in (default, *self.candidates(*sizes))}
        plan, lasting = default, True
        if len(candidates) > 1 and device.type in RACED_DEVICES:
            key = key_of(f"plan {self.name}", dtype, self._bucket(*sizes))
            measured = choices().find(device, key, self._sources)
            current = rules()
            may_measure = current.tune and not current.deterministic and (measured is None or bool(measured.table))
            if may_measure and run is not None:
                runs = [(name, partial(run, candidate)) for name, candidate in candidates.items()]
                outcome = None if obstacle(device, ()) else race(runs, device, lost=registry.provider_of(device).lost)
                lasting = outcome is not None and bool(outcome.ms)  # else another races, or none was launched
                if outcome is not None and outcome.ms:
                    failed = {name: reason_of(error) for name, error in outcome.failed.items()}
                    case = "x".join(map(str, sizes))
                    measured = CandidateTimes(outcome.ms, case, failed=failed, sources=self._sources())
                    choices().keep(device, key, measured)
                    self.forget()
            name = fastest(measured.ms, candidates) if measured is not None else None
            if name is not None:
                plan = candidates[name]
        if lasting:
            self.plans.store(plans, (device, dtype, sizes), plan)
        return plan


def tune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """Call fn, and measure what is not measured yet: implementations and launch plans of each op in it.

    Results are kept on disk and used from now on. Takes the time of compiling, and of a few dozen calls of each
    candidate; backward passes that run inside fn are measured too. Returns what `explain` would print, with `.result`.
    """
    with override(race="first_use", tune="first_use"):
        return explain_quietly(fn, *args, **kwargs)
