"""Races of implementations, and of launch parameters (Tuned), on the actual arguments, with their results on disk.

The score is the longer of two medians: calls back to back, and on a GPU calls that are queued behind writes which empty
the L2. `<cache_dir>/choices/<model>.json` holds measurements by the versions of torch, Triton and the driver; shipped
tables, `tables/*.json`, serve where there is no local one. Sizes are rounded up to a power of two.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import logging
import math
import operator
import os
import re
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from accelerant.config import choice_overrides, override, settings
from accelerant.errors import DeviceLost
from accelerant.runtime import registry
from accelerant.runtime.dispatch.plan import Explanation, PlanCache, explain_quietly, rules, torch_wants_determinism
from accelerant.runtime.files import decode_json, open_regular, read_regular, write_atomic
from accelerant.runtime.host import fork_safe
from accelerant.runtime.streams.stream import capturing

_FORMAT = 1
_VERSIONS_KEPT = 4
_LOCK_WAIT_S = 2.0
_ANY = "any model"
TABLES = Path(__file__).parent / "tables"

_log = logging.getLogger("accelerant.choices")


@dataclass(frozen=True, slots=True)
class CandidateTimes:
    """Milliseconds of the candidates for a bucket, or why they `failed`; `table` is the shipped one, or ""."""

    ms: Mapping[str, float]
    case: str = ""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    failed: Mapping[str, str] = field(default_factory=dict)
    sources: str = ""
    table: str = ""

    def covers(self, name: str) -> bool:
        """Return whether a candidate was timed or failed."""
        return name in self.ms or name in self.failed

    def to_dict(self) -> dict[str, Any]:
        """Return the measurement for JSON."""
        body = {"ms": {name: float(f"{ms:.4g}") for name, ms in self.ms.items()}, "case": self.case, "date": self.date}
        body |= {"failed": dict(self.failed)} if self.failed else {}
        return body | ({"sources": self.sources} if self.sources else {})

    @classmethod
    def read(cls, body: Any, table: str = "") -> CandidateTimes:
        """Read a measurement from JSON; raise ValueError, TypeError, KeyError or AttributeError for anything else."""
        ms = {str(name): float(value) for name, value in body["ms"].items()}
        if not all(value > 0 for value in ms.values()):
            raise ValueError("times must be above 0")
        failed = {str(name): str(reason) for name, reason in body.get("failed", {}).items()}
        case, date, sources = (str(body.get(name, "")) for name in ("case", "date", "sources"))
        return cls(ms, case, date, failed, sources, table)


def rounded(sizes: Iterable[int], *, exact_to: int = 0) -> tuple[int, ...]:
    """Return each size rounded up to a power of two; those up to exact_to, and 0, as they are."""
    return tuple(n if n <= max(exact_to, 0) else 1 << (n - 1).bit_length() for n in sizes)


def key_of(op: str, dtype: torch.dtype, bucket: Iterable[object]) -> str:
    """Return the key of a measurement: "gelu_fwd bfloat16 8192 4096 none"."""
    return " ".join([op, str(dtype).removeprefix("torch."), *map(str, bucket)])


@functools.cache
def model_of(device: torch.device) -> str:
    """Return a device's model as its driver names it: "NVIDIA H200"."""
    return _described(device)[0]


@functools.cache
def _described(device: torch.device) -> tuple[str, str]:
    described = registry.provider_of(device).devices()[device.index or 0]
    return described.name, str(described.properties.get("driver", ""))


@functools.cache
def versions(device: torch.device) -> dict[str, str]:
    """Return the versions that a measurement depends on besides its key and sources."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    return {"torch": torch.__version__, "triton": triton, "driver": _described(device)[1]}


# --- sources of an op ------------------------------------------------------------------------------------------------
_PACKAGE = "accelerant"
_ROOT = Path(__file__).parents[2]
_FOLLOWED = re.compile(rf"{_PACKAGE}\.(ops|algebra|privacy)\.")
_KERNEL_SUFFIXES = frozenset({".c", ".cl", ".cu", ".cuh", ".h", ".wgsl"})
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


class Sources:
    """The digest of an op's modules, their imports and kernels, computed once; comments and layout do not count."""

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions
        self._digest: str | None = None

    def __call__(self) -> str:
        """Return the digest; "" for functions from outside the package."""
        if self._digest is None:
            modules = {module for module in map(_module_of, self._functions) if module.startswith(f"{_PACKAGE}.")}
            digest = hashlib.sha256()
            for path in sorted(_closure(modules)):
                digest.update(_stripped(path).encode())
            self._digest = digest.hexdigest()[:16] if modules else ""
        return self._digest


def _module_of(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    owner = getattr(function, "__self__", None)
    if owner is not None and not hasattr(owner, "__path__") and type(owner).__module__.startswith(f"{_PACKAGE}."):
        return type(owner).__module__
    return getattr(function, "__module__", None) or type(function).__module__


def _closure(modules: Iterable[str]) -> set[Path]:
    """Return the files of modules, of what they import within the package, and of the kernels in their folders."""
    waiting, seen, files = list(modules), set[str](), set[Path]()
    while waiting:
        if (module := waiting.pop()) in seen:
            continue
        seen.add(module)
        base = _ROOT.joinpath(*module.split(".")[1:])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not path.is_file():
            if (loaded := getattr(sys.modules.get(module), "__file__", None)) is None:
                continue
            path = Path(loaded)
        files.add(path)
        files.update(
            other
            for other in path.parent.iterdir()
            if other.suffix in _KERNEL_SUFFIXES or other.stem in ("triton_kernels", "llvm_kernels")
        )
        waiting += _imports(path)
    return files


@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    names: list[str] = []
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module and _FOLLOWED.match(f"{node.module}."):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return tuple(name for name in names if _FOLLOWED.match(name))


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


@functools.cache
def _stripped(path: Path) -> str:
    """Return a source without comments, docstrings and layout."""
    if path.suffix != ".py":
        return " ".join(_COMMENT.sub(" ", path.read_text(encoding="utf-8")).split())
    tree = _tree(path)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):  # a string on its own is a docstring, or one of a constant
            body[:] = [
                line for line in body if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ]
    return ast.dump(tree)


# --- the store -------------------------------------------------------------------------------------------------------
class Choices:
    """Shipped measurements, and local ones in `root`, by default the folder `choices` of the settings' cache."""

    def __init__(self, root: Path | None = None, tables: Path = TABLES) -> None:
        self.root = root if root is not None else settings().cache_dir / "choices"
        self._tables = tables
        self._lock = fork_safe(threading.RLock())
        self._local: dict[str, dict[str, CandidateTimes]] = {}
        self._shipped: dict[str, dict[str, CandidateTimes]] = {}
        self._ignored: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"Choices({str(self.root)!r})"

    def find(self, device: torch.device, key: str, sources: Callable[[], str] | None = None) -> CandidateTimes | None:
        """Return the local measurement of a key whose digest is that of `sources`, or the shipped one, or None."""
        with self._lock:
            self._load(device)
            model = model_of(device)
            local = self._local[model].get(key)
            if local is not None and (sources is None or local.sources == sources()):
                return local
            return self._shipped[model].get(key)

    def serves(self, device: torch.device) -> bool:
        """Return whether a shipped table serves a device's model."""
        with self._lock:
            self._load(device)
            return bool(self._shipped[model_of(device)])

    def nearest(self, key: str) -> CandidateTimes | None:
        """Return the shipped measurement of the same op, dtype and options with the most similar sizes, or None."""
        words, found = key.split(), []
        with self._lock:
            table = self._shipped.get(_ANY) or self._shipped.setdefault(_ANY, self._read_tables())
        for other, measured in table.items():
            pairs = [pair for pair in zip(words, other.split(), strict=False) if pair[0] != pair[1]]
            if len(other.split()) == len(words) and all(a.isdecimal() and b.isdecimal() for a, b in pairs):
                found.append((sum(abs(math.log2(max(int(a), 1) / max(int(b), 1))) for a, b in pairs), other, measured))
        return min(found)[2] if found else None

    def keep(self, device: torch.device, key: str, measured: CandidateTimes) -> None:
        """Store a measurement, also on disk; other candidates' times of the same sources stay."""
        with self._lock:
            self._load(device)
            model = model_of(device)
            current = versions(device)
            with _locked(self._path(model)):
                stamps, _ = self._read(model)
                own = stamps.pop(_stamp(current), {"versions": current, "entries": {}})
                known = _measurements(own["entries"]).get(key)
                if known is not None and known.sources == measured.sources:
                    failed = {**known.failed, **measured.failed}
                    ms = {name: value for name, value in known.ms.items() if name not in measured.failed}
                    measured = replace(
                        measured,
                        ms={**ms, **measured.ms},
                        failed={name: reason for name, reason in failed.items() if name not in measured.ms},
                    )
                own["entries"][key] = measured.to_dict()
                recent = dict(list(stamps.items())[1 - _VERSIONS_KEPT :])
                self._write(model, {**recent, _stamp(current): own})
            self._local[model] = _measurements(own["entries"])

    def entries(self, device: torch.device) -> dict[str, CandidateTimes]:
        """Return every measurement of a device's model: the shipped ones, with the local ones over them."""
        with self._lock:
            self._load(device)
            return {**self._shipped[model_of(device)], **self._local[model_of(device)]}

    def ignored(self, device: torch.device) -> tuple[str, ...]:
        """Return which local measurements are not used, and why."""
        with self._lock:
            self._load(device)
            return self._ignored[model_of(device)]

    def table(self, device: torch.device, serves: Iterable[str] = ()) -> dict[str, Any]:
        """Return the local measurements in the form of a shipped table; `serves` has the names of further models."""
        model = model_of(device)
        local = {
            key: replace(measured, sources="").to_dict()
            for key, measured in self.entries(device).items()
            if not measured.table
        }
        head = {"format": _FORMAT, "device": model, "serves": [model, *serves], "versions": versions(device)}
        return {**head, "entries": dict(sorted(local.items()))}

    # --- files -------------------------------------------------------------------------------------------------------
    def _path(self, model: str) -> Path:
        return self.root / f"{re.sub(r'[^A-Za-z0-9_.() -]', '_', model) or 'unnamed'}.json"

    def _load(self, device: torch.device) -> None:
        if (model := model_of(device)) in self._local:
            return
        stamps, reasons = self._read(model)
        current = versions(device) if stamps else {}
        own = stamps.pop(_stamp(current), {"entries": {}})
        for other in stamps.values():
            differing = [f"{name} {was}" for name, was in other["versions"].items() if was != current.get(name)]
            reasons.append(f"{len(other['entries'])} entries of {', '.join(differing)}: other versions are here now")
        self._shipped[model] = self._read_tables(model)
        self._ignored[model] = tuple(reasons)
        self._local[model] = _measurements(own["entries"])

    def _read(self, model: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        path = self._path(model)
        try:
            body = decode_json(read_regular(path))
            if body["format"] != _FORMAT:
                return {}, [f"{path}: format {body['format']!r}, not {_FORMAT}"]
            stamps = body["stamps"]
            for stamp in stamps.values():
                if not isinstance(stamp["versions"], dict) or not isinstance(stamp["entries"], dict):
                    raise TypeError("no table of entries")
            return stamps, []
        except FileNotFoundError:
            return {}, []
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            _log.warning("choices in %s cannot be read, so they are not used: %s", path, error)
            return {}, [f"{path} cannot be read: {error}"]

    def _write(self, model: str, stamps: Mapping[str, object]) -> None:
        path = self._path(model)
        body = {"format": _FORMAT, "device": model, "stamps": stamps}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(body, indent=1).encode())
        except OSError as error:  # a full or read-only disk costs the next process a race, not this one
            _log.warning("choices cannot be kept in %s: %s", path, error)

    def _read_tables(self, model: str | None = None) -> dict[str, CandidateTimes]:
        """Return the shipped measurements that serve a model, by default all, of the most similar device name first."""
        found = []
        for path in sorted(self._tables.glob("*.json")):
            try:
                body = decode_json(path.read_bytes())
                if body["format"] == _FORMAT and (not model or any(_serves(name, model) for name in body["serves"])):
                    device = str(body["device"])
                    alike = sum(itertools.takewhile(bool, map(operator.eq, device, model or "")))
                    found.append((alike, _measurements(body["entries"], device)))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                _log.warning("shipped table %s cannot be read: %s", path, error)
        found.sort(key=operator.itemgetter(0))  # the last one of a key stays
        return {key: measured for _, entries in found for key, measured in entries.items()}


def _serves(name: str, model: str) -> bool:
    return model == name or (model.startswith(f"{name} ") and " MIG " not in model)


def _stamp(of: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def _measurements(body: Mapping[str, Any], table: str = "") -> dict[str, CandidateTimes]:
    """Return the measurements that can be read; a damaged one counts as absent."""
    readable = {}
    for key, entry in body.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            readable[key] = CandidateTimes.read(entry, table)
    return readable


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file against other processes; without it, one of two results written at once is lost."""
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(open_regular(path.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT), "wb"))
            until = time.monotonic() + _LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        break
                    time.sleep(0.01)
        except (ImportError, OSError):
            pass
        yield


_stores: dict[Path, Choices] = {}


def choices() -> Choices:
    """Return the store of the settings' cache folder."""
    root = settings().cache_dir / "choices"
    store = _stores.get(root)
    return store if store is not None else _stores.setdefault(root, Choices(root))


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

    `budget_s` are seconds of timed calls for each; no turn begins later than `most_s` after the first calls.
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
    if not (timed := [name for name in order if name in ms]):
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
