"""What races found, kept by device model: on disk for this user, and shipped with the package.

A local file for each model, `<cache_dir>/choices/<model>.json`, holds entries by what produced them: the versions of
torch, Triton, the driver and Accelerant's own sources. Entries of other versions are not used, since any of these may
change who wins, and `ignored` says so. Files are written under a lock, by renaming a complete one; a torn or foreign
one costs a warning and is replaced. Shipped tables, `tables/*.json` beside this module, are used where no local result
is: they say which models they serve, and were measured with the release, so they carry versions for people only.

An entry stands for a bucket of cases: sizes are rounded up to a power of two unless the op says otherwise.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from accelerant.config import settings
from accelerant.runtime import registry
from accelerant.runtime.files import decode_json, write_atomic

__all__ = ["Choices", "Entry", "choices", "key_of", "model_of", "rounded", "versions"]

_FORMAT = 1
_STAMPS_KEPT = 4
_LOCK_WAIT_S = 2.0
TABLES = Path(__file__).parent / "tables"

_log = logging.getLogger("accelerant.choices")


@dataclass(frozen=True, slots=True)
class Entry:
    """Times of one bucket.

    Attributes:
        ms: name -> milliseconds of a call.
        case: what was timed.
        date: of the race, "2026-11-21".
        failed: name -> why it has no time.
        table: the shipped table that it is from; "" for a local one.
    """

    ms: Mapping[str, float]
    case: str = ""
    date: str = field(default_factory=lambda: time.strftime("%Y-%m-%d"))
    failed: Mapping[str, str] = field(default_factory=dict)
    table: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        body = {"ms": {name: float(f"{ms:.4g}") for name, ms in self.ms.items()}, "case": self.case, "date": self.date}
        return body | ({"failed": dict(self.failed)} if self.failed else {})

    @classmethod
    def read(cls, body: Any, table: str = "") -> Entry:
        """From JSON; ValueError, TypeError, KeyError or AttributeError where it is something else."""
        ms = {str(name): float(each) for name, each in body["ms"].items()}
        if not all(each > 0 for each in ms.values()):
            raise ValueError("times must be above 0")
        failed = {str(name): str(reason) for name, reason in body.get("failed", {}).items()}
        return cls(ms, str(body.get("case", "")), str(body.get("date", "")), failed, table)


def rounded(sizes: Iterable[int], *, exact_to: int = 0) -> tuple[int, ...]:
    """Each size rounded up to a power of two; those up to exact_to, and 0, as they are."""
    return tuple(n if n <= max(exact_to, 0) else 1 << (n - 1).bit_length() for n in sizes)


def key_of(op: str, dtype: torch.dtype, bucket: Iterable[object]) -> str:
    """The key of an entry: "gelu_fwd bfloat16 8192 4096 none"."""
    return " ".join([op, str(dtype).removeprefix("torch."), *map(str, bucket)])


@functools.cache
def model_of(device: torch.device) -> str:
    """The model's name as its driver gives it: "NVIDIA H200"."""
    return _described(device)[0]


@functools.cache
def _described(device: torch.device) -> tuple[str, str]:
    found = registry.provider_of(device).devices()[device.index or 0]
    return found.name, str(found.properties.get("driver", ""))


@functools.cache
def _sources_hash() -> str:
    """Of what may change who wins: the ops' and the runtime's sources."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[2]
    for folder in ("ops", "runtime", "algebra"):
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cl", ".h", ".wgsl"):
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@functools.cache
def versions(device: torch.device) -> dict[str, str]:
    """What an entry depends on besides its key."""
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = ""
    driver = _described(device)[1]
    return {"accelerant": _sources_hash(), "torch": torch.__version__, "triton": triton, "driver": driver}


class Choices:
    """The local results and the shipped ones.

    Args:
        root: folder of the local files; `choices` in the settings' cache folder by default.
        tables: folder of the shipped ones.
    """

    def __init__(self, root: Path | None = None, tables: Path = TABLES) -> None:
        self.root = root if root is not None else settings().cache_dir / "choices"
        self._tables = tables
        self._lock = threading.RLock()
        self._local: dict[str, dict[str, Entry]] = {}
        self._shipped: dict[str, dict[str, Entry]] = {}
        self._ignored: dict[str, tuple[str, ...]] = {}

    def find(self, device: torch.device, key: str) -> Entry | None:
        """The local entry, or the shipped one, or None."""
        with self._lock:
            self._load(device)
            model = model_of(device)
            return self._local[model].get(key) or self._shipped[model].get(key)

    def keep(self, device: torch.device, key: str, entry: Entry) -> None:
        """Remember an entry, also on disk if that can be written; times of other names in the same bucket stay."""
        with self._lock:
            self._load(device)
            model = model_of(device)
            now = versions(device)
            with _locked(self._path(model)):
                stamps, _ = self._read(model)
                mine = stamps.pop(_stamp(now), {"versions": now, "entries": {}})
                known = _entries(mine["entries"]).get(key)
                if known is not None:
                    failed = {
                        name: why for name, why in {**known.failed, **entry.failed}.items() if name not in entry.ms
                    }
                    ms = {name: each for name, each in known.ms.items() if name not in entry.failed}
                    entry = replace(entry, ms={**ms, **entry.ms}, failed=failed)
                mine["entries"][key] = entry.to_dict()
                recent = dict(list(stamps.items())[1 - _STAMPS_KEPT :])
                self._write(model, {**recent, _stamp(now): mine})
            self._local[model] = _entries(mine["entries"])

    def entries(self, device: torch.device) -> dict[str, Entry]:
        """Everything known of a device's model: the shipped entries, then the local ones over them."""
        with self._lock:
            self._load(device)
            return {**self._shipped[model_of(device)], **self._local[model_of(device)]}

    def ignored(self, device: torch.device) -> tuple[str, ...]:
        """Which local entries are not used, and why."""
        with self._lock:
            self._load(device)
            return self._ignored[model_of(device)]

    def table(self, device: torch.device, serves: Iterable[str] = ()) -> dict[str, Any]:
        """The local entries in the form of a shipped table.

        Args:
            device: one of the model.
            serves: further models that it is good for, as their names begin.
        """
        model = model_of(device)
        local = {key: each.to_dict() for key, each in self.entries(device).items() if not each.table}
        head = {"format": _FORMAT, "device": model, "serves": [model, *serves], "versions": versions(device)}
        return {**head, "entries": dict(sorted(local.items()))}

    # --- files -------------------------------------------------------------------------------------------------------

    def _path(self, model: str) -> Path:
        return self.root / f"{re.sub(r'[^A-Za-z0-9_.() -]', '_', model) or 'unnamed'}.json"

    def _load(self, device: torch.device) -> None:
        """Read a model's files, once."""
        model = model_of(device)
        if model in self._local:
            return
        stamps, reasons = self._read(model)
        now = versions(device) if stamps else {}
        mine = stamps.pop(_stamp(now), {"entries": {}})
        for other in stamps.values():
            differing = [f"{name} {was}" for name, was in other["versions"].items() if was != now.get(name)]
            reasons.append(f"{len(other['entries'])} entries of {', '.join(differing)}: other versions are here now")
        self._shipped[model] = self._read_tables(model)
        self._ignored[model] = tuple(reasons)
        self._local[model] = _entries(mine["entries"])

    def _read(self, model: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
        """The file's entries by stamp, and why some are left out."""
        path = self._path(model)
        try:
            body = decode_json(path.read_bytes())
            if body["format"] != _FORMAT:
                return {}, [f"{path}: format {body['format']!r}, not {_FORMAT}"]
            stamps = body["stamps"]
            for each in stamps.values():
                if not isinstance(each["versions"], dict) or not isinstance(each["entries"], dict):
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

    def _read_tables(self, model: str) -> dict[str, Entry]:
        """The shipped table that serves a model. A slice of a device is another device."""
        for path in sorted(self._tables.glob("*.json")):
            try:
                body = decode_json(path.read_bytes())
                if body["format"] == _FORMAT and any(_serves(name, model) for name in body["serves"]):
                    return _entries(body["entries"], str(body["device"]))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                _log.warning("shipped table %s cannot be read: %s", path, error)
        return {}


def _serves(name: str, model: str) -> bool:
    return model == name or (model.startswith(f"{name} ") and " MIG " not in model)


def _stamp(of: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:16]


def _entries(body: Mapping[str, Any], table: str = "") -> dict[str, Entry]:
    """Those that can be read; a damaged one is as good as none."""
    found = {}
    for key, each in body.items():
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            found[key] = Entry.read(each, table)
    return found


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Alone among processes that write the file, where the system can; after a wait, or where it cannot, not.

    Then the worst is that of two results written at once one is lost, and raced again by a later process.
    """
    with contextlib.ExitStack() as stack:
        try:
            import fcntl

            path.parent.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open(path.with_suffix(".lock"), "w", encoding="utf-8"))
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
    """The store of the settings' cache folder."""
    root = settings().cache_dir / "choices"
    found = _stores.get(root)
    return found if found is not None else _stores.setdefault(root, Choices(root))
