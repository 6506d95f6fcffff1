"""Results of races and tuning by device model: local files of this user, and tables shipped with the package.

`<cache_dir>/choices/<model>.json` holds measurements by the versions of torch, Triton and the driver they were made
with; those of other versions, or of other sources of the op, are not used. Files are replaced atomically under a lock;
a damaged one costs a warning. Shipped tables, `tables/*.json`, serve the models that they name where there is no local
result. A measurement stands for a bucket of cases: sizes are rounded up to a power of two unless the op says otherwise.
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
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from accelerant.config import settings
from accelerant.runtime import registry
from accelerant.runtime.files import decode_json, open_regular, read_regular, write_atomic
from accelerant.runtime.host import fork_safe

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
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        base = _ROOT.joinpath(*module.split(".")[1:])
        path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not path.is_file():
            loaded = getattr(sys.modules.get(module), "__file__", None)
            if loaded is None:
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
        model = model_of(device)
        if model in self._local:
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
        """Return the file's measurements by stamp, and why some are left out."""
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
