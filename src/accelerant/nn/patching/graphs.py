"""Which calls of a patched model run from CUDA graphs, for loops that call the model themselves.

The first calls of a key (of shapes, dtypes, values and settings) run eagerly; the next one is captured, and those that
follow replay it while modules, attributes, parameters and buffers are those of the capture.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn

from accelerant.config import settings
from accelerant.errors import FallbackWarning, LaunchError
from accelerant.nn.patching import capture
from accelerant.nn.patching.buckets import ALIGNED, Buckets, Call, Lengths, NotYet, Untrue, covers, rehearse, tried
from accelerant.nn.patching.capture import PLAIN_TENSORS, Captured, HostWork, Padding, Reason, State, versions
from accelerant.nn.patching.record import Forward, PatchReport
from accelerant.ops._library import is_watched
from accelerant.runtime.compilation import background
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.streams.graphs import ahead_of_capture

EAGER_CALLS = 3  # of a key before its capture: they compile kernels, and show what a replay would not do
MOST_GRAPHS = 32  # at one time
_IDLE_CALLS = 64  # calls without a replay after which another key may take the place of a captured one
_SOME_KEYS, _MOST_KEYS = 3, 64  # keys after which a new one is not watched at once; keys whose calls are counted
_CREDIT = 32  # eager calls that are watched by default; a capture counts as four, and a replay takes one back
_LAG = 3.0  # device time of an eager forward pass by its host time, above which the device does not wait for the host
_MEETINGS = 2  # of calls of two lengths, after which each length has memory of its own
_REST = 3  # times a capture took, that pass by default before the next one that only saves padding
SHARE = 4  # by default a model's graphs hold at most 1 / 4 of the memory that was free without them
_KNOWN = ("torch.nn.", "transformers.", "peft.", "accelerate.", "accelerant.")  # a forward pass only does operations


_CACHES = ("past_key_values", "cache")  # arguments of which calls of generate() have one

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


# --- what a captured call depends on ---------------------------------------------------------------------------------


def key_of(values: Sequence[Any], names: tuple[str, ...]) -> tuple[Any, ...]:
    """Return the key of a call's arguments; raise Reason for one that no graph can take."""
    parts: list[Any] = []
    for place, value in enumerate(values):
        if isinstance(value, Tensor):
            plain = type(value) in PLAIN_TENSORS and value.layout == torch.strided
            if not plain or value.device.type != capture.DEVICE:
                raise Reason(f"an argument is a {type(value).__name__} on {value.device}")
            parts.append((value.shape, value.dtype, value.requires_grad))
        elif isinstance(value, _PLAIN):
            parts.append((type(value), value))
        else:
            name = names[place - len(values)] if place >= len(values) - len(names) else f"number {place}"
            raise Reason(f"argument {name} is a {type(value).__name__}")
    low = torch.get_autocast_dtype(capture.DEVICE) if torch.is_autocast_enabled(capture.DEVICE) else None
    chosen = settings().deterministic, settings().implementation, torch.are_deterministic_algorithms_enabled()
    numerics = torch.backends.cuda.matmul.fp32_precision, *chosen
    stream = (
        torch.cuda.current_stream() if capture.DEVICE == "cuda" else None
    )  # memory is only reused in a stream's order
    return names, tuple(parts), low, numerics, stream, threading.get_ident()


def _in_capture() -> bool:
    return capture.DEVICE == "cuda" and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _random_states() -> tuple[Any, Tensor, Any]:
    """Return the states of the generators of Python and NumPy, of torch's on the host, and of that on the device."""
    _, keys, place, *_ = np.random.get_state(legacy=True)
    others = random.getstate(), np.asarray(keys).tolist(), place
    return others, torch.get_rng_state(), torch.cuda.get_rng_state().tolist() if capture.DEVICE == "cuda" else None


def _bytes_of(x: Tensor) -> Tensor:
    return x.detach().flatten().view(torch.uint8)


# --- whether a graph helps ------------------------------------------------------------------------------------------


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Trial:
    """An eager call: its time on the host and on the device, and the memory that it keeps for its backward pass."""

    def __init__(self, work: HostWork) -> None:
        self.work, self.tokens = work, 0

    def __enter__(self) -> _Trial:
        self.kept_bytes = -_allocated_bytes()
        self._began, self._host_ms = _event(), -1e3 * time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self._host_ms += 1e3 * time.perf_counter()
        self._ended = _event()
        self.kept_bytes += _allocated_bytes()

    def lags(self) -> bool:
        """Return whether the device was far behind the host, without waiting for it."""
        return not self._ended.query() or self._began.elapsed_time(self._ended) > _LAG * self._host_ms


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated()


def _free_bytes() -> int:
    return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def _objection(trials: Sequence[_Trial], needed: int, held: int) -> str | None:
    """Return why no graph of `needed` bytes beside those held is captured by default after these calls, or None."""
    if any(trial.lags() for trial in trials[1:]):  # the first one compiles
        return "the device does not wait for the host"
    total, free = needed + held, held + _free_bytes()
    if total * SHARE > free:
        return f"its graphs would hold {total / 2**30:.2g} GiB, more than 1 / {SHARE} of the {free / 2**30:.2g} free"
    return None


def unknown_code(model: nn.Module) -> str | None:
    """Return what of a model's code may do more than its operations, which replays would leave out; None if known."""
    attention: Any = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    for module in model.modules():
        own = vars(module)
        attends = attention.get(getattr(own.get("config"), "_attn_implementation", None))
        replaced = own.get("forward"), own.get("_loss_function"), attends
        for each in (type(module), type(module).forward, *replaced):
            function = getattr(each, "__func__", each)
            if function is not None and not f"{getattr(function, '__module__', None)}.".startswith(_KNOWN):
                return f"the code of {getattr(function, '__qualname__', type(module).__name__)}"
    return None


def may_capture() -> bool:
    """Return whether this process can capture graphs; it can be forked afterwards, unlike after is_available()."""
    return capture.DEVICE != "cuda" or (torch.version.cuda is not None and torch.cuda.device_count() > 0)


# --- all calls of a model --------------------------------------------------------------------------------------------


class _Line:
    """Calls of one key, or that differ in their lengths alone: their graphs by these, () of those with one key."""

    def __init__(self, limits: tuple[int | None, ...]) -> None:
        self.graphs: dict[tuple[int, ...], Captured] = {}
        self.trials: list[_Trial] = []
        self.lengths, self.pool = Lengths(limits), capture.Pool()
        self.padding: Padding | None = None  # known since it was tried
        self.rehearsed = False  # whether a call of an aligned length ran as in a capture: others load the same kernels
        self.met = False  # whether a call ran that was not watched
        self.meetings = 0  # calls that could not run because one of another length was not over

    def held_bytes(self) -> int:
        """Return the memory of its graphs, which is that of the largest."""
        return max((each.held_bytes for each in self.graphs.values()), default=0)


def _free_cached(line: _Line, needed: int) -> None:
    """Free what eager calls have left, which a pool of graphs does not take: for the first graph, or where it lacks."""
    if capture.DEVICE == "cuda" and (not line.graphs or torch.cuda.mem_get_info()[0] < 2 * needed):
        torch.cuda.empty_cache()


@dataclass(slots=True)
class _Request:
    """A call: its key, its arguments, and the call as one that may be padded."""

    key: Any
    values: list[Any]
    call: Call | None

    @property
    def kind(self) -> Any:
        """The key of its line."""
        return self.key if self.call is None else self.call.family


class Graphs:
    """The captured calls of a patched model; calls that cannot be captured run eagerly.

    `automatic` captures only where a graph helps, and runs other calls eagerly without a warning.
    """

    def __init__(
        self, forward: Forward, report: PatchReport, automatic: bool, training: bool = True, decoding: Any = None
    ) -> None:  # fmt: skip
        self._forward, self._report, self._automatic, self._training = forward, report, automatic, training
        self._evaluation: Graphs | None = None  # of calls in evaluation without gradients
        self._decoding = decoding  # of those with a cache
        self._credit, self._off = _CREDIT, ""
        self._lock = fork_safe(threading.RLock())
        self._running = 0  # eager calls, which a capture would give other parameters
        self._forget()

    def _forget(self) -> None:
        """Discard all graphs, and what is known of calls."""
        self._lines: dict[Any, _Line] = {}
        self._buckets: Buckets | None = None
        self._kept: dict[Any, str] = {}  # why calls that differ in their length alone keep it
        self._refused: dict[Any, str] = {}
        self._state: State | None = None
        self._draws = False
        self._written: set[Tensor] = set()
        self._count = 0
        self._rested_s = -math.inf
        self._misses = background.misses()

    def release(self) -> None:
        """Discard all graphs; a later call is as the first one."""
        with self._lock:
            self._forget()
            self._evaluation = None
            if self._decoding is not None:
                self._decoding.release()

    def see(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note a call that runs as the model was: its length may come again."""
        if self._buckets is None or self._off:
            return
        with self._lock, suppress(Reason):
            values = [*args, *kwargs.values()]
            call = self._call(key_of(values, tuple(kwargs)), values)
            if call is not None and call.family in self._lines:
                self._lines[call.family].lengths.see(call.lengths)

    @property
    def _captured(self) -> dict[Any, Captured]:
        return {(name, length): x for name, line in self._lines.items() for length, x in line.graphs.items()}

    def __getstate__(self) -> Any:
        # A copy of the model has other parameters.
        return self._forward, self._report, self._automatic, self._training, self._decoding

    def __setstate__(self, state: Any) -> None:
        self.__init__(*state)  # type: ignore[misc]

    def __call__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model: from its graphs, or eagerly."""
        traced = torch.compiler.is_compiling() or torch._C._is_tracing()
        if traced or torch.is_grad_enabled() is not model.training or _in_capture():
            return self._forward(model, *args, **kwargs)  # TrainStep, and calls of few kinds: not a fallback
        if model.training:
            return self._run(model, args, kwargs)
        if any(kwargs.get(name) is not None for name in _CACHES):
            if self._decoding is None or args:
                return self._forward(model, *args, **kwargs)
            return self._decoding(model, kwargs)
        if self._evaluation is None:
            self._evaluation = Graphs(self._forward, self._report, automatic=True, training=False)
            if (unknown := unknown_code(model)) is not None:
                self._evaluation._off = f"{unknown} may do more than its operations"
        return self._evaluation._run(model, args, kwargs)

    def _run(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call of this kind."""
        try:
            with self._lock:
                if self._off:
                    raise Reason(self._off)
                if isinstance(kwargs.get("num_items_in_batch"), int) and hasattr(model, "loss_function"):
                    device = next(model.parameters()).device
                    count = torch.full((), kwargs["num_items_in_batch"], device=device)  # another in each call
                    kwargs = kwargs | {"num_items_in_batch": count}
                values = [*args, *kwargs.values()]
                if not self._automatic:
                    self._check(model)
                key = key_of(values, tuple(kwargs))
                buckets = self._buckets
                request = _Request(key, values, self._call(key, values))
                if self._automatic:
                    if request.kind in self._refused:  # for good: nothing else is looked at
                        raise Reason(self._refused[request.kind])
                    self._check(model)
                if self._misses != background.misses():  # the calls before ran libraries' functions: they count no more
                    self._misses = background.misses()
                    for line in self._lines.values():
                        line.trials.clear()
                    if not background.is_ready():
                        self._credit = _CREDIT
                if self._buckets is not buckets:
                    request.call = self._call(key, values)
                captured = self._ready(model, request)
        except Reason as reason:
            self._refuse(model, str(reason))
            return self._run_eagerly(model, args, kwargs)
        if captured is None:
            line, waiting = self._line(request), sum(not each.graphs for each in self._lines.values())
            if request.call is None and not line.trials and not line.met and waiting > _SOME_KEYS:
                line.met = True  # where sizes keep changing, one is watched once it comes again
                self._report.graphs["eager: before the capture"] += 1
                return self._run_eagerly(model, args, kwargs)
            return self._warm_up(model, args, kwargs, request)
        self._report.graphs["replayed"] += 1
        self._credit = min(self._credit + 2, _CREDIT)
        captured.last = self._count
        if captured.padding is None or request.call is None:
            return captured(values)
        return captured(request.call.values, request.call.lengths)

    def _call(self, key: Any, values: list[Any]) -> Call | None:
        """Return the call as one that may be padded; None if it keeps its length."""
        call = None if self._buckets is None or self._written else self._buckets.call(key, values)
        return None if call is None or call.family in self._kept else call

    def _run_eagerly(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self._lock:
            self._running += 1
            written = [(x, x.clone()) for x in self._written] if self._captured else []
        try:
            return self._forward(model, *args, **kwargs)
        except torch.OutOfMemoryError:
            if not self._automatic or not self._captured:
                raise
        finally:
            with self._lock:
                self._running -= 1
        self._forget()  # nobody asked for graphs that take this memory
        self._off = "memory ran out beside the graphs"
        for x, value in written:  # as if the call had not begun
            x.data.copy_(value)
        return self._forward(model, *args, **kwargs)

    def _check(self, model: nn.Module) -> None:
        """Raise Reason if no call can be captured at present; discard captured calls of a model that has changed."""
        if self._automatic and (settings().deterministic or torch.are_deterministic_algorithms_enabled()):
            raise Reason("results may not depend on measured times (deterministic)")
        self._count += 1
        self._credit -= 1
        if self._automatic and self._credit < 0:
            self._forget()
            self._off = "few calls could run from graphs"
            raise Reason(self._off)
        if is_watched():
            raise Reason("a mode or a transform of torch is active, which has to see each operation")
        if self._state is not None and not self._state.holds():
            recent = self._count < _IDLE_CALLS
            self._forget()
            if recent:
                raise Reason("modules, parameters or attributes of the model keep changing")
        if self._state is None and self._automatic and (unknown := unknown_code(model)) is not None:
            raise Reason(f"{unknown} may do more than its operations")
        state = self._state = State(model) if self._state is None else self._state
        self._buckets = Buckets(model) if self._buckets is None else self._buckets
        if reason := state.obstacle():
            raise Reason(reason)

    def _ready(self, model: nn.Module, request: _Request) -> Captured | None:
        """Return the graphs of a call, captured now if it is time; None before that."""
        kind, call, line = request.kind, request.call, self._line(request)
        lengths: tuple[int, ...] = () if call is None else call.lengths
        captured, ready = line.graphs.get(lengths), len(line.trials) >= EAGER_CALLS
        if call is not None:
            ready = line.lengths.see(lengths) > EAGER_CALLS and ready
            if line.lengths.vary() and (captured is None or captured.padding is not None):
                ready = len(line.trials) >= EAGER_CALLS
                if ready:
                    padded = [at for at, each in line.graphs.items() if each.padding is not None]
                    more = not self._automatic or time.monotonic() >= self._rested_s
                    lengths = line.lengths.choose(lengths, padded, more)
                    captured = line.graphs.get(lengths) if lengths in padded else None
        if captured is not None or ready:
            self._examine(request, line, captured, lengths)
        elif kind in self._refused:
            raise Reason(self._refused[kind])
        return self._capture(model, request, line, lengths) if captured is None and ready else captured

    def _line(self, request: _Request) -> _Line:
        kind, call = request.kind, request.call
        line = self._lines.get(kind)
        if line is None:
            waiting = [name for name, each in self._lines.items() if not each.graphs]
            if len(waiting) >= _MOST_KEYS:
                del self._lines[waiting[0]]
                raise Reason(f"more than {_MOST_KEYS} shapes and values of arguments")
            assert self._buckets is not None  # for the type checker: made with the state
            if self._lines and self._buckets.reason is not None:
                self._note(self._buckets.reason)
            line = self._lines[kind] = _Line(() if call is None else call.limits)
        return line

    def _examine(
        self, request: _Request, line: _Line, captured: Captured | None, lengths: tuple[int, ...]
    ) -> None:  # fmt: skip
        """Raise Reason if a call cannot run from its graphs, or those of its line, at present."""
        kind = request.kind
        reason = self._refused.get(kind)
        if captured is not None and captured.retired:
            del line.graphs[lengths]
            reason = self._refused[kind] = "a backward pass ran twice, was differentiated, or came after a change"
        if line.pool.is_busy():
            reason = "the backward pass of an earlier call is still to come"
            if request.call is not None and line.pool.pending().captured is not captured:
                line.meetings += 1
                if line.meetings > _MEETINGS:  # two lengths a step, as of questions and answers
                    self._kept[request.call.family] = "steps have calls of several lengths"
        elif line.graphs and not line.pool.take_back():
            reason = "gradients of an earlier call are kept"
        if reason is not None:
            raise Reason(reason)

    def _keep(self, call: Call, reason: str) -> None:
        """Let calls have graphs of their own lengths only."""
        self._kept[call.family] = reason
        self._note(reason)
        raise Reason(reason)

    def _note(self, reason: str) -> None:
        note = f"calls of varying lengths are not padded to share CUDA graphs: {reason}"
        if note not in self._report.notes:
            self._report.notes.append(note)

    def _warm_up(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], request: _Request
    ) -> Any:  # fmt: skip
        """Run a call eagerly; note what a replay would not do."""
        self._report.graphs["eager: before the capture"] += 1
        trials, kind = self._line(request).trials, request.kind
        work = trials[0].work if trials else HostWork(capture.DEVICE)
        state, (others, host, device), then = State(model), _random_states(), versions(request.values)
        buffers = [] if trials else [(x, x.clone()) for x in model.buffers() if x.layout is torch.strided]
        with ahead_of_capture(), _Trial(work) as trial, nullcontext() if trials else work.noted():
            result = self._run_eagerly(model, args, kwargs)
        trial.tokens = 0 if request.call is None else sum(request.call.lengths)
        trials.append(trial)
        others_after, host_after, device_after = _random_states()
        self._draws |= device_after != device
        self._written |= {x for x, then in buffers if not torch.equal(_bytes_of(x), _bytes_of(then))}  # waits
        if others_after != others or not work.explains(host, host_after):
            self._refused[kind] = "its forward draws random numbers on the host (layers left out at random)"
        elif versions(request.values) != then:
            self._refused[kind] = "its forward writes into its arguments"
        elif len(trials) == EAGER_CALLS and not state.holds():  # the first calls may create buffers and attributes
            self._refused[kind] = "its forward changes modules or their attributes"
        if not self._training:  # a cache, as causal models return in evaluation, is found before the capture
            try:
                capture.flattened(result)
            except Reason as reason:
                self._refused[kind] = str(reason)
        if not self._captured and not self._off:  # else the next call finds the change
            self._state = State(model)
        return result

    def _capture(self, model: nn.Module, request: _Request, line: _Line, lengths: tuple[int, ...]) -> Captured:
        """Capture a call: as it is, or padded to lengths if those of its line vary."""
        if self._running:
            raise Reason("another thread runs the model")
        kind, call, key, values = request.kind, request.call, request.key, request.values
        needed = self._needed_bytes(model, line, sum(lengths), kind)
        self._make_room()
        if not any(covers(each, lengths) for each in line.graphs):
            for each in line.graphs.values():  # the largest comes first: smaller ones find room in its memory
                each.release()
            line.graphs.clear()
            line.pool = capture.Pool()  # the memory of one without graphs is gone
        if not line.graphs:
            self._credit -= 4
        _free_cached(line, needed)
        assert self._state is not None  # for the type checker: _check sets it, under the lock that is held since
        run, work = partial(self._forward, model), line.trials[0].work
        padding, rehearsed, aligned = None, True, not any(each % ALIGNED for each in lengths)
        began_s = time.monotonic()
        try:
            with ahead_of_capture():
                if call is not None and line.lengths.vary():
                    if line.padding is None:
                        line.padding = tried(run, call, lengths, model, self._draws)
                    padding = replace(line.padding, lengths=lengths)
                    values, key = padding.padded(call.values), (call.names, None, key[2])
                    work, rehearsed = HostWork(capture.DEVICE), not line.rehearsed or not aligned
                    if rehearsed:
                        rehearse(run, model, key[0], values, work)
                        self._await_kernels()
                        line.rehearsed = aligned and not work.is_noted()
                        _free_cached(line, needed)
                captured = Captured(
                    run, values, key, self._state, self._draws, [*self._written], work, line.pool, padding
                )
                if padding is not None and not padding.fits(captured.outputs):
                    raise Untrue("its outputs have the last tokens of long calls alone")
            self._await_kernels()
        except Exception as raised:  # noqa: BLE001  whatever it is, the eager call that follows decides
            line.rehearsed = False
            again = not rehearsed and not isinstance(raised, torch.OutOfMemoryError)
            self._fail(model, request, NotYet("its next length is rehearsed") if again else raised)
        finally:
            ended_s = time.monotonic()
            self._rested_s = ended_s + _REST * (ended_s - began_s)
        captured.held_bytes = needed
        line.graphs[lengths] = captured
        self._report.graphs["captured"] += 1
        return captured

    def _await_kernels(self) -> None:
        """Raise Reason if kernels were not compiled yet, for which libraries' functions ran."""
        if self._misses != background.misses():
            raise NotYet("kernels for its length are compiled")

    def _needed_bytes(self, model: nn.Module, line: _Line, tokens: int, kind: Any) -> int:
        """Return the memory that graphs of so many tokens need; raise Reason if they are not worth it by default."""
        last = line.trials[-1]
        kept = last.kept_bytes * tokens // last.tokens if last.tokens else last.kept_bytes
        grads = (x.numel() * x.element_size() for x in model.parameters() if x.requires_grad and self._training)
        needed = kept + sum(grads)
        held = sum(each.held_bytes() for each in self._lines.values())
        more = max(0, needed - line.held_bytes())
        if self._automatic and (reason := _objection(line.trials, more, held)) is not None:
            self._refused[kind] = reason
            raise Reason(reason)
        return needed

    def _make_room(self) -> None:
        """Discard the graphs that were not used for longest if there are too many."""
        found = [(each.last, line, at) for line in self._lines.values() for at, each in line.graphs.items()]
        if len(found) >= MOST_GRAPHS:
            last, line, at = min(found, key=lambda each: each[0])
            if self._count - last < _IDLE_CALLS:
                raise Reason(f"{MOST_GRAPHS} other shapes or values of arguments have graphs")
            del line.graphs[at]

    def _fail(self, model: nn.Module, request: _Request, raised: Exception) -> NoReturn:
        """Raise Reason for a capture that raised; without memory the model runs as it did before."""
        error: BaseException = raised
        while error.__context__ is not None:  # the capture's end raises another
            error = error.__context__
        if isinstance(error, torch.OutOfMemoryError):
            error = raised = None  # type: ignore[assignment]  # whose frames hold tensors
            self._forget()
            self._off = "memory ran out while its graphs were captured"
            if capture.DEVICE == "cuda":
                torch.cuda.empty_cache()
            if self._automatic:  # who asked for graphs is warned of each reason
                warnings.warn(
                    f"{type(model).__name__}: no CUDA graphs, runs as without them: {self._off}", FallbackWarning,
                    stacklevel=12,
                )  # fmt: skip
            raise Reason(self._off) from None
        failed = f"the capture failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        reason = str(error) if isinstance(error, Reason) else failed
        if isinstance(error, NotYet):
            raise Reason(reason) from None
        if isinstance(error, Untrue) and request.call is not None:
            self._keep(request.call, reason)
        self._refused[request.kind] = reason
        raise Reason(reason) from None

    def _refuse(self, model: nn.Module, reason: str) -> None:
        """Count a call that runs eagerly, with its reason; warn or raise as the policy says if graphs were wanted."""
        if not self._training:
            return
        self._report.graphs[f"eager: {reason}"] += 1
        if self._automatic:
            if self._report.graphs[f"eager: {reason}"] == 1:
                ledger().fallback(FallbackRecord("patch", type(model).__name__, "graph", "eager", reason))
            return
        if settings().fallback == "forbid":
            raise LaunchError(f"a call of {type(model).__name__} cannot be a CUDA graph: {reason}")
        new = ledger().fallback(FallbackRecord("patch", type(model).__name__, "graph", "eager", reason))
        if new or settings().fallback == "warn":
            warnings.warn(
                f"{type(model).__name__}: no CUDA graph, runs eagerly: {reason}", FallbackWarning, stacklevel=9
            )
