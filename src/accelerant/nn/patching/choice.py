"""Whether a kind of call of a patched model runs on our ops or as the model was, measured in the run itself.

The first calls of a kind run on both sides in turns, timed as whole steps where they have gradients, and the faster
side serves the later ones. Sides are only switched while no backward pass is to come, which might run the forward pass
again (checkpoints). On a CUDA device, calls run as the model was while child processes compile kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, is_grad_enabled, nn
from torch._C import _is_tracing
from torch.compiler import is_compiling, is_dynamo_compiling

from accelerant._version import __version__
from accelerant.config import settings
from accelerant.nn.patching import capture
from accelerant.nn.patching.graphs import EAGER_CALLS
from accelerant.nn.patching.record import RECORD, Forward, PatchRecord
from accelerant.ops._library import is_watched
from accelerant.runtime.compilation import background
from accelerant.runtime.compilation.cache import KNOWN, KernelCache
from accelerant.runtime.streams.graphs import captures_ahead

LAPS = 8  # of each side that decide; the first call of each compiles, and is not counted: 18 calls
CLEAR = {5: 1.05, 3: 1.25}  # laps of each that decide if the slowest of one side beats the fastest of the other so
EARLY_CALLS, EARLY_S = 64, 10.0  # for which, whichever ends first, such a model runs as it was
MOST_KEYS = 1024  # calls with other numbers of elements whose kind is remembered
MOST_EAGER = 12  # calls on our ops without CUDA graphs after which these are taken to be rare
TIE, CPU_TIE = 1.02, 1.05
"""Times that differ by less are equal: a GPU runs our ops, which need less memory, a CPU the model as it was.

A CPU's times vary more: after trials that found T5 3% faster on our ops, it was 2% slower.
"""

FEWEST_LOGITS = 3 * 2**19
"""Logits of a call below which a model of transformers on a CPU runs as it was from its first call.

Its loss alone may be on our ops there, which is no faster for fewer, and a trial of it takes longer than it could gain.
"""

BRIEF_S = 0.1
"""Seconds of a call on a CPU, a whole step where it has gradients, below which a model of torch.nn's runs as it was.

A trial of such calls, in which our ops are imported, takes longer than later calls could gain.
"""

_AMPLE = 8  # times what calls as they were need, of the memory that was free: it is not asked for again

WARM_UP = "eager: before the capture"  # an outcome that the report counts


def chosen_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a patched model on the side that is faster for this kind of call."""
    record: PatchRecord = self.__dict__[RECORD]
    choice = record.choice
    if is_dynamo_compiling() or _is_tracing():
        return choice.forward(self, *args, **kwargs)
    if (brief := choice.brief) is not None and len(args) == 1 and not kwargs:
        first = args[0]
        if type(first) is Tensor and first.is_cpu and first.numel() <= brief[is_grad_enabled()]:
            return type(self).forward(self, *args)
    if is_compiling():
        return choice.forward(self, *args, **kwargs)
    return choice(self, record, args, kwargs)


def is_fixed() -> bool:
    """Return whether calls run on our ops without a measurement."""
    current = settings()
    return current.deterministic or current.race == "off" or torch.are_deterministic_algorithms_enabled()


# --- one kind of call ------------------------------------------------------------------------------------------------
class _Trial:
    """The laps of one kind of call on both sides: as it was (0) and on our ops (1)."""

    def __init__(self, key: Any, settled: bool, body: bool) -> None:
        self.key = key  # training, with gradients, device, dtype, bits of the first tensor's elements and of all, names
        self.on_host = key[2].type == "cpu" != capture.DEVICE
        self.ours: bool | None = None  # the decision
        self.settled = settled  # whether a call on our ops runs as all later ones will, after captures of CUDA graphs
        self.rare = False  # whether few calls run from graphs, as where lengths vary and cannot be padded
        self.body = body  # whether our ops replace more than losses
        self.cramped = False  # whether memory ran out in a call as it was
        self.calls = [0, 0]
        self.laps: tuple[list[_Lap], list[_Lap]] = ([], [])
        self.early: list[_Lap] = []  # as it was while kernels were compiled: they may have taken longer for that
        self.first, self.elements = 0, 0  # of the first argument of the last call, and of all
        self.replays, self._replayed, self._eager = 0, False, 0
        self.reopened = False  # whether graphs decided before, which may be held still
        self._lost, self._lost_since = 0, 0  # calls without a graph since the decision, and all replays before them
        self.kept_bytes = 0  # the most that a call on our ops kept for its backward pass on a GPU
        self.ample_bytes = 0  # a small part of the memory that was free: the driver takes long to say how much is

    def side(self, current: bool) -> bool:
        """Return on which side the next call runs: in turns, A B B A A B B, so that a drift is shared.

        On a CPU the first calls run as it was, until the time of one is known.
        """
        before, ours = self.calls
        if self.on_host and not self.laps[0]:
            return False
        if not ours or not (self.settled or ours > EAGER_CALLS):
            return True
        return current if before == ours else ours < before

    def places(self, ours: bool | None) -> tuple[bool | None, bool | None]:
        """Return whether losses are on our ops on a side, and whether all else is."""
        return ours, ours and self.body

    def note(self, graphs: Counter[str], before: Counter[str]) -> bool:
        """Note how CUDA graphs ran a call, by the report's counts after and before it; return whether it is a lap."""
        replayed, first = graphs["replayed"] > before["replayed"], graphs["captured"] > before["captured"]
        warm = graphs[WARM_UP] > before[WARM_UP]
        self.replays += replayed
        self._eager += warm
        self.rare |= self._eager > MOST_EAGER
        self.settled |= self.rare or not warm
        if replayed is not self._replayed and not warm:
            self._replayed = replayed
            self.laps[1].clear()
        return not first and (not warm or self.settled)

    def now(self) -> Any:
        """Return a time of the device: that of this thread if it works alone, which others do not change."""
        if self.key[2].type == "cpu":
            return _CLOCK() if torch.get_num_threads() == 1 else time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def loses(self, replays: int) -> bool:
        """Note a call without a graph after as many replays; return whether graphs decided that have become rare."""
        if replays - self._lost_since > MOST_EAGER:
            self._lost, self._lost_since = 0, replays
        self._lost += 1
        return bool(self.ours and self.replays) and self._lost > MOST_EAGER

    def is_brief(self) -> bool:
        """Return whether calls are too short for a trial, by the first lap as it was."""
        laps = self.laps[0] if self.on_host and self.body and not self.calls[1] else []
        return any(end - start < BRIEF_S for start, end, _ in laps)

    def reopen(self) -> None:
        """Let the next calls decide again."""
        self.ours, self.settled, self.calls, self.replays, self._lost = None, True, [0, 0], 0, 0
        self.reopened = True

    def add(self, to: list[_Lap], start: Any, elements: int) -> None:
        """Add a lap that ends now, if it is needed and the clock (see now) is still the same."""
        end = self.now()
        if len(to) < LAPS and not (isinstance(end, float) and end <= start):
            to.append((start, end, elements))

    def gain(self) -> float | None:
        """Return the time of a call as it was by that of one on our ops; None if it is not known yet."""
        laps = self.laps[0] or self.early, self.laps[1]
        fewest = min(map(len, laps))
        if fewest < min(CLEAR) or not all(_is_over(lap) for each in laps for lap in each):
            return None
        before, ours = _per_call(laps)
        apart = max(min(before) / max(ours), min(ours) / max(before))
        needed = max(CLEAR.values()) if not self.laps[0] else 0.0 if fewest >= LAPS else min(
            apart for count, apart in CLEAR.items() if count <= fewest
        )  # fmt: skip
        return min(before) / min(ours) if apart > needed else None

    def kind(self) -> str:
        """Return the kind of call in words."""
        training, graded, device, dtype, first, total, *names = self.key
        mode = "training" if training else "evaluation"
        if training is not graded:
            mode += " with gradients" if graded else " mode without gradients"
        sizes = f"up to {2**total:,} elements" + (f" in all, {2**first:,} in the first tensor" if first < total else "")
        labels = ", with labels" if "labels" in names else ""
        return f"{mode}, {str(dtype).removeprefix('torch.')}, {sizes}{labels} ({device})"


_Lap = tuple[Any, Any, int]  # start, end, elements

_CLOCK = time.thread_time if time.get_clock_info("thread_time").resolution <= 1e-6 else time.perf_counter


@dataclass(slots=True)
class _Open:
    """A lap that the next call will end."""

    trial: _Trial
    laps: list[_Lap]
    start: Any
    elements: int = 0
    thread: int = field(default_factory=threading.get_ident)


def _is_over(lap: _Lap) -> bool:
    return isinstance(lap[0], float) or bool(lap[0].query() and lap[1].query())


def _per_call(laps: tuple[list[_Lap], list[_Lap]]) -> list[list[float]]:
    """Return the times of laps, those of calls of other sizes scaled to one size.

    The power of the size by which time grows is fitted to both sides: 0 where the host counts, 1 where elements do.
    """
    times = [[ended - began if isinstance(began, float) else began.elapsed_time(ended) for began, ended, _ in each]
             for each in laps]  # fmt: skip
    sizes = [[math.log(max(1, size)) for *_, size in each] for each in laps]
    products = squares = 0.0
    for side, logs in zip(times, sizes, strict=True):
        middle, middle_time = sum(logs) / len(logs), sum(map(math.log, side)) / len(side)
        squares += sum((x - middle) ** 2 for x in logs)
        products += sum((x - middle) * (math.log(t) - middle_time) for x, t in zip(logs, side, strict=True))
    power = min(1.0, max(0.0, products / squares)) if squares > 1e-6 else 0.0
    return [
        [t * math.exp(-power * x) for t, x in zip(side, logs, strict=True)]
        for side, logs in zip(times, sizes, strict=True)
    ]


class _Waiting:
    """A call whose backward pass is to come: a hook of its outputs' nodes, which keep it alive."""

    def __init__(self, calls: set[int]) -> None:
        self._calls = calls
        calls.add(id(self))

    def __call__(self, grads: Any) -> None:
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            self._calls.discard(id(self))

    def __del__(self) -> None:
        self._calls.discard(id(self))


def _nodes(result: Any, depth: int = 2) -> set[Any]:
    """Return the nodes of autograd of the tensors in a model's output."""
    if isinstance(result, Tensor):
        return set() if result.grad_fn is None else {result.grad_fn}
    if not depth or result is None:
        return set()
    parts = result if isinstance(result, tuple | list) else (
        result.values() if isinstance(result, dict) else getattr(result, "__dict__", {}).values()
    )  # fmt: skip
    return set().union(*[_nodes(each, depth - 1) for each in parts])


# --- all calls of a model --------------------------------------------------------------------------------------------
class Choice:
    """Runs each call on the faster side; if `fixed`, all on our ops by `forward`, whose first argument is the model."""

    def __init__(self, forward: Forward, fixed: bool) -> None:
        self.forward, self.fixed = forward, fixed
        self._running: list[None] = []  # one for each call, of any thread: the first one chooses the side
        self._kinds: dict[Any, _Trial] = {}
        self._trials: dict[Any, _Trial] = {}  # the same by the elements of each argument
        self._waiting: set[int] = set()
        self._open: _Open | None = None  # the lap that the next call ends
        self._sides: set[tuple[bool | None, bool | None]] = set()  # decisions of all kinds
        self._agreed = False  # whether all kinds are decided for the present side: backward passes are not watched
        # Elements of the only argument up to which calls without and with gradients are too short for a trial on a
        # CPU: these run as it was without a further look while `brief` has them, as all kinds agree on that side.
        self._brief = [-1, -1]
        self.brief: list[int] | None = None
        self._compiling: set[_Trial] = set()  # kinds of calls whose kernels are being compiled
        self._misses = background.misses()
        # Calls before the first on our ops, -1 while unknown; and the time that ends them.
        self._early, self._early_until_s = -1, 0.0
        self._last: Any = None  # the key of the last call
        self._device_type = ""
        self._param: Any = lambda: None

    def __getstate__(self) -> Any:
        return self.forward, self.fixed  # a copy of the model is measured again

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, model: Any, record: PatchRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model."""
        graded, running, trial = torch.is_grad_enabled(), self._running, None
        running.append(None)
        try:
            key, last = self._key(model, graded, args, kwargs), self._last
            self._last = key
            compiled = self._misses == background.misses()
            try:
                decided = self._agreed and compiled and key in self._trials and not captures_ahead()
            except TypeError:  # symbols in place of sizes, in a trace
                decided, self._last = True, None
            if decided:
                return self._run(model, record, args, kwargs)
            if len(running) > 1:
                self._open = None  # another thread's call, or one inside of this one: the time is shared
            elif torch._C._current_graph_task_id() == -1:  # else a checkpoint runs a call again
                if not compiled:
                    self._see_misses(last)
                trial = self._begin(model, record, key, kwargs)
            if trial is None:
                result = self._run(model, record, args, kwargs)
            else:
                result = self._timed(model, record, args, kwargs, trial)
            if graded and (nodes := _nodes(result)):
                waiting = _Waiting(self._waiting)
                for node in nodes:
                    node.register_prehook(waiting)
            return result
        finally:
            running.pop()

    def _begin(self, model: Any, record: PatchRecord, key: Any, kwargs: dict[str, Any]) -> _Trial | None:
        """Choose the side of a call; return the trial that it is part of, if it is."""
        free, self._agreed, self.brief = not self._waiting and not self._agreed, False, None  # were not watched
        if (watched := is_watched()) or self.fixed or is_fixed() or captures_ahead() or _is_captured():
            self._open = None
            if watched:
                self._last = None  # its sizes may be symbols
            if free and not (record.ours and record.body):
                record.switch(ours=True)
            return None
        if self._open is not None and free:
            self._end_lap()
        trial = self._trials.get(key) or self._trial(key, model, record, kwargs)
        if self._compiling and background.is_ready():
            self._compiling.clear()
        compiling = trial in self._compiling
        trial.first, trial.elements = _sizes(key)
        if compiling or self._is_early(model, trial):
            ours = trial.cramped or not _has_room(model, trial, kwargs)
        else:
            ours = self._side(trial, key, model, record, kwargs)
        if free and trial.places(ours) != (record.ours, record.body):
            record.switch(ours=ours, body=ours and trial.body)
        self._agreed = not self._compiling and self._sides == {(record.ours, record.body)}
        self.brief = self._brief if self._agreed and not record.ours else None
        return trial if trial.ours is None or compiling else None

    def _side(self, trial: _Trial, key: Any, model: Any, record: PatchRecord, kwargs: dict[str, Any]) -> bool:
        """Return the side that was chosen for a kind of call, or the one whose turn it is."""
        if trial.ours is None:
            self._decide(trial, model, record)
        if trial.ours is None:
            ours = trial.side(record.ours)
            if ours or trial.calls[0] or _has_room(model, trial, kwargs):
                return ours
            self._settle(trial, True, record, "for which alone the memory may suffice")
        assert trial.ours is not None  # for the type checker
        return trial.ours

    def _is_early(self, model: Any, trial: _Trial) -> bool:
        """Return whether a call comes too early to be the first on our ops."""
        if trial.ours is not None or trial.key[2].type != "cuda" or not background.is_started():
            return False
        if self._early < 0:
            self._early = 0 if _known(model).exists() else EARLY_CALLS
            self._early_until_s = time.monotonic() + EARLY_S
        self._early = max(0, self._early - 1) if time.monotonic() < self._early_until_s else 0
        return self._early > 0

    def _see_misses(self, last: Any) -> None:
        """Note that kernels of the last call were not compiled."""
        self._misses, self._open = background.misses(), None
        if (trial := self._trials.get(last)) is not None:
            self._compiling.add(trial)

    def _key(self, model: Any, graded: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Return what tells calls apart: mode, device, dtype, and the elements of each argument."""
        param = self._param()
        if param is None:
            param = next(model.parameters(), _NONE)
            self._param, self._device_type = weakref.ref(param), param.device.type
        device, dtype, kind = param.device, param.dtype, self._device_type
        if kind != "meta" and torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        key = [model.training, graded, device, dtype]
        for x in args:
            if isinstance(x, Tensor):
                key.append(x.numel())
        for name, x in kwargs.items():
            if isinstance(x, Tensor) and not name.endswith("mask"):  # which grows with each token that is generated
                key += name, x.numel()
            elif x is not None:
                key.append(name)
        return tuple(key)

    def _trial(self, key: Any, model: Any, record: PatchRecord, kwargs: dict[str, Any]) -> _Trial:
        """Return the trial of a call's kind, which is that of calls whose arguments have about as many elements."""
        (training, graded, device, *_), (first, total) = key, _sizes(key)
        names = [each for each in key if isinstance(each, str)]
        kind = *key[:4], _class(first), _class(total), *names
        trial = self._kinds.get(kind)
        if trial is None:
            body = record.plain or device.type == capture.DEVICE or device.type != "cpu"
            rare = any(each.rare and _but_sizes(each.key) == _but_sizes(kind) for each in self._kinds.values())
            trial = self._kinds[kind] = _Trial(kind, record.graphs is None or training is not graded or rare, body)
            if device.type not in ("cpu", "cuda"):  # no clock is known
                trial.ours = True
            elif not body and not (record.has_loss and _logits(model, kwargs) >= FEWEST_LOGITS):
                self._settle(trial, False, record, "which is faster on a CPU")
            if device.type == "cuda":
                background.start()
        if len(self._trials) >= MOST_KEYS:
            del self._trials[next(iter(self._trials))]
        self._trials[key] = trial
        self._sides.add(trial.places(trial.ours))
        return trial

    def _run(self, model: Any, record: PatchRecord, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not record.ours:
            return type(model).forward(model, *args, **kwargs)
        if record.graphs is None:
            return self.forward(model, *args, **kwargs)
        counts = record.report.graphs
        replays = counts["replayed"]
        result = record.graphs(model, args, kwargs)
        if counts["replayed"] == replays and (trial := self._trials.get(self._last)) and trial.loses(replays):
            trial.reopen()
            self._agreed, self._sides = False, {each.places(each.ours) for each in self._kinds.values()}
        return result

    def _timed(
        self, model: Any, record: PatchRecord, args: tuple[Any, ...], kwargs: dict[str, Any], trial: _Trial
    ) -> Any:  # fmt: skip
        """Run a call and add it to the laps of its side, or let the next call do so."""
        ours, whole, graphs = record.ours, not self._waiting, record.report.graphs
        counts, held = Counter(graphs), _allocated_bytes(trial) if ours else 0
        start = trial.now()
        try:
            result = self._run(model, record, args, kwargs)
        except torch.OutOfMemoryError:
            if ours:
                raise
            trial.cramped = True
            self._settle(trial, True, record, "for which alone the memory suffices")
            record.switch(ours=True, body=trial.body)
            return self._run(model, record, args, kwargs)
        if not ours and record.graphs is not None:
            record.graphs.see(args, kwargs)
        if ours:
            trial.kept_bytes = max(trial.kept_bytes, _allocated_bytes(trial) - held)
        compiling = trial in self._compiling
        if self._misses != background.misses() or (compiling and ours):
            return result
        if compiling:
            laps, counts_as_lap = trial.early, True
        else:
            trial.calls[ours] += 1
            laps, counts_as_lap = trial.laps[ours], trial.calls[ours] > 1  # the first one loads kernels
        if ours:
            counts_as_lap &= trial.note(graphs, counts)
        if torch.is_grad_enabled():
            if whole:
                self._open = _Open(trial, laps, start) if counts_as_lap else None
            if self._open is not None:
                self._open.elements += trial.elements
        elif counts_as_lap:
            trial.add(laps, start, trial.elements)
        return result

    def _end_lap(self) -> None:
        assert self._open is not None  # for the type checker: the caller has looked
        lap, self._open = self._open, None
        if lap.thread == threading.get_ident():
            lap.trial.add(lap.laps, lap.start, lap.elements)

    def _decide(self, trial: _Trial, model: Any, record: PatchRecord) -> None:
        """Choose a side if its gain is known."""
        if trial.is_brief():
            graded = trial.key[1]
            self._brief[graded] = max(self._brief[graded], trial.first)
            self._settle(trial, False, record, "too short for a trial")
            return
        gain = trial.gain()
        if gain is None:
            return
        on_cpu = trial.key[2].type == "cpu"
        tie = CPU_TIE if on_cpu else TIE
        ours = gain > tie if on_cpu else gain >= 1 / tie
        if not ours and (trial.replays or trial.reopened):
            record.graphs.release()
        faster = max(gain, 1 / gain)
        gained = faster > TIE and ours is (gain > 1)
        why = f"{faster - 1:.0%} faster here" if gained else f"equal within {tie - 1:.0%}"
        self._settle(trial, ours, record, why)
        if trial.key[2].type == "cuda":
            remember(model)

    def _settle(self, trial: _Trial, ours: bool, record: PatchRecord, why: str) -> None:
        """Run all calls of a kind on one side from now on."""
        trial.ours, trial.laps = ours, ([], [])
        self._sides = {each.places(each.ours) for each in self._kinds.values()}
        record.report.choices[trial.kind()] = f"{'on our ops' if ours else 'as it was'}, {why}"


def remember(model: nn.Module) -> None:
    """Note, beside the kernels on disk, that those of a model are there."""
    with contextlib.suppress(OSError):
        KernelCache().prepare()
        _known(model).touch()


def _known(model: nn.Module) -> Path:
    """Return the file that says so."""
    sizes = sorted({(tuple(x.shape), str(x.dtype)) for x in model.parameters()})
    text = f"{type(model).__qualname__} {sizes} {torch.cuda.get_device_capability()} {__version__}"
    return KernelCache().root / f"{KNOWN}{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def _allocated_bytes(trial: _Trial) -> int:
    return torch.cuda.memory_allocated() if trial.key[2].type == "cuda" else 0


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _has_room(model: Any, trial: _Trial, kwargs: dict[str, Any]) -> bool:
    """Return whether a call as it was, which keeps logits in two dtypes with a gradient, will fit into memory."""
    if trial.key[2].type != "cuda":
        return True
    needed = 2 * trial.kept_bytes + 12 * _logits(model, kwargs)
    if needed >= trial.ample_bytes:
        free = _free_bytes()
        trial.ample_bytes = free // _AMPLE
        return needed < free
    return True


def _logits(model: Any, kwargs: dict[str, Any]) -> int:
    """Return the number of logits that a call with labels computes; 0 without labels or a vocabulary."""
    labels, vocabulary = kwargs.get("labels"), getattr(getattr(model, "config", None), "vocab_size", None)
    return labels.numel() * vocabulary if isinstance(labels, Tensor) and isinstance(vocabulary, int) else 0


def _sizes(key: tuple[Any, ...]) -> tuple[int, int]:
    """Return the elements of the first tensor of a call's key, and of all."""
    sizes = [each for each in key[4:] if isinstance(each, int)]
    return (sizes[0], sum(sizes)) if sizes else (0, 0)


def _but_sizes(kind: Any) -> tuple[Any, ...]:
    """Return what tells kinds of calls apart but for their sizes."""
    return *kind[:4], *kind[6:]


def _class(elements: int) -> int:
    """Return the logarithm of the power of two up to which numbers of elements are of one class."""
    return max(0, elements - 1).bit_length()


_NONE = torch.empty(0)  # of a model without parameters


def _is_captured() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
