"""Settings: defaults, configuration file, environment and arguments, in rising order of precedence.

The file is `$ACCELERANT_CONFIG`, or `config.toml` in the user's configuration folder:

    backend = "auto"          # ACCELERANT_BACKEND     auto, or the one backend to use: cpu, cuda, ...
    fallback = "allow"        # ACCELERANT_FALLBACK    a failing device or implementation is replaced by another: allow
                              #                        or true (warn once, count), warn (each time), forbid or false
                              #                        (raise)
    cache_dir = "/path"       # ACCELERANT_CACHE_DIR   compiled kernels, choices, tokenizers
    memory_fraction = 1.0     # ACCELERANT_MEMORY_FRACTION   share of each device's memory for this process; "auto":
                              #                        95 % of what other processes leave when the backend starts
    log = "warning"           # ACCELERANT_LOG         debug, info, warning, error
    race = "auto"             # ACCELERANT_RACE        first_use: time implementations, choose the fastest; off; auto:
                              #                        first_use on models of GPU that no shipped table serves
    tune = "off"              # ACCELERANT_TUNE        off, first_use: the same for launch parameters
    deterministic = false     # ACCELERANT_DETERMINISTIC   refuse implementations whose results may vary between runs
    debug = false             # ACCELERANT_DEBUG       check results for NaN, and accesses of user kernels

    [implementation]          # ACCELERANT_IMPLEMENTATION="gelu_fwd=torch, ..."   force an op's implementation
    gelu_fwd = "torch"

An unknown name is an error, in the file and among the variables that begin with ACCELERANT_ (except those of a
Kubernetes service, and ACCELERANT_SERVE_..., see accelerant.service.settings). An unknown op is an error when any op
first chooses an implementation.

`settings()` is read once a process; `override(...)` changes it for a block of code, in its thread or asyncio task and
in the threads in which autograd runs a backward pass started there. At the log level "debug", each kernel launch is
logged with grid, block and host time. Messages go to Python's logger "accelerant", which prints to stderr unless the
program has set up logging itself.
"""

import difflib
import errno
import logging
import os
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, get_args

from accelerant.errors import ConfigError, MissingFile

__all__ = [
    "DTYPE_NAMES", "FallbackPolicy", "Settings", "When", "carried", "flag_of", "override", "policy_named", "settings",
    "similar",
]  # fmt: skip

DTYPE_NAMES = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}
"""Other names of dtypes, understood where one is taken by name -> torch's."""

FallbackPolicy = Literal["allow", "warn", "forbid"]
When = Literal["off", "first_use"]
Race = Literal["auto", "off", "first_use"]
LogLevel = Literal["debug", "info", "warning", "error"]


def _user_folder(kind: Literal["cache", "config"]) -> Path:
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and no entry of this user in the system's list
        home = Path("/")  # as containers set it
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "accelerant" / kind
    if sys.platform == "darwin":
        return home / "Library" / {"cache": "Caches", "config": "Application Support"}[kind] / "accelerant"
    return Path(os.environ.get(f"XDG_{kind.upper()}_HOME") or home / f".{kind}") / "accelerant"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings and their defaults, which the module's docstring explains; pairs of `implementation` are sorted."""

    backend: str = "auto"
    fallback: FallbackPolicy = "allow"
    cache_dir: Path = field(default_factory=lambda: _user_folder("cache"))
    memory_fraction: float | Literal["auto"] = 1.0
    log: LogLevel = "warning"
    race: Race = "auto"
    tune: When = "off"
    deterministic: bool = False
    implementation: tuple[tuple[str, str], ...] = ()
    debug: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("fallback", FallbackPolicy), ("log", LogLevel), ("race", Race), ("tune", When)):
            self._require(name, getattr(self, name) in get_args(allowed), " | ".join(get_args(allowed)))
        share = self.memory_fraction
        self._require("memory_fraction", share == "auto" or 0.0 < share <= 1.0, "auto, or a number in (0, 1]")
        self._require("backend", bool(self.backend), "auto, or a backend's name")

    def _require(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise ConfigError(f"setting {name}: wanted {wanted}, got {getattr(self, name)!r}")


def _converted(name: str, value: object, origin: str) -> Any:
    """Return a value, text or already of the setting's type, as that type."""
    try:
        if name == "memory_fraction":
            return "auto" if str(value).lower() == "auto" else float(str(value))
        if name == "cache_dir":
            if not value or not isinstance(value, (str, Path)) or "\0" in str(value):
                raise ValueError
            return Path(value).expanduser()
        if name in ("deterministic", "debug"):
            return _SWITCH[str(value).lower()]
        if name == "implementation":
            return _pairs(value)
        if name == "fallback":
            return policy_named(value)
        return str(value).lower() if name != "backend" else str(value)
    except (ValueError, KeyError, TypeError, RuntimeError):  # RuntimeError: "~" of a user without a home
        raise ConfigError(f"{origin}: {name} cannot be {value!r}") from None


_SWITCH = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}


def policy_named(value: object) -> Any:
    """Return the policy that true, false or text in any case means; other values unchanged, for the check of them."""
    if isinstance(value, list | tuple | dict) or (isinstance(value, int) and value not in (0, 1)):
        return value  # Python refuses to print integers of more than 4,300 digits
    if (text := str(value).lower()) in _SWITCH:
        return "allow" if _SWITCH[text] else "forbid"
    return text if text in get_args(FallbackPolicy) else value


def _pairs(value: object) -> tuple[tuple[str, str], ...]:
    """Return sorted pairs from a mapping, pairs, or text "a=b, c=d"; the last value of a name counts."""
    if isinstance(value, str):
        value = [part.split("=") for part in value.split(",") if part.strip()]
    if not isinstance(value, (Mapping, list, tuple)):
        raise ValueError
    pairs = value.items() if isinstance(value, Mapping) else value
    if not all(len(pair) == 2 and all(isinstance(text, str) and text.strip() for text in pair) for pair in pairs):
        raise ValueError
    return tuple(sorted({name.strip(): text.strip() for name, text in pairs}.items()))


def read_toml(path: Path) -> dict[str, Any]:
    """Return the table of a file of settings; raise ConfigError if it cannot be read, or is not TOML."""
    try:
        if path.is_char_device() or path.is_fifo():
            raise OSError(errno.EINVAL, "it is not a regular file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _from_file(path: Path, *, must_exist: bool) -> dict[str, Any]:
    if not os.path.isfile(path):  # nor where the home folder is another user's and closed, as in some containers
        if must_exist:
            raise MissingFile(f"ACCELERANT_CONFIG names {path}, which is not a file")
        return {}
    table = read_toml(path)
    _require_known(table, {setting.name for setting in fields(Settings)}, f"{path}: unknown setting")
    return {name: _converted(name, value, str(path)) for name, value in table.items()}


_OTHERS = {"ACCELERANT_CONFIG", "ACCELERANT_COMMIT", "ACCELERANT_URL", "ACCELERANT_API_KEY"}
"""The file; the commit in records of benchmarks; what service.Client reads."""

_FOREIGN = re.compile(r"ACCELERANT_(.*_)?(SERVICE_HOST|(SERVICE_)?PORT(_.*)?)")
"""Variables that Kubernetes sets in each container for a service of a similar name."""


def _require_known(names: Iterable[str], known: Collection[str], what: str) -> None:
    """Raise ConfigError for the first name that is not known, with the most similar one that is."""
    for name in sorted(names):
        if name not in known:
            raise ConfigError(f"{what} {name!r}{similar(name, known)}; known are {', '.join(sorted(known))}")


def similar(name: str, known: Iterable[str]) -> str:
    """Return a question for an error: whether the most similar of the known names was meant; empty if none is."""
    shorter = {one.removeprefix("ACCELERANT_"): one for one in known}  # a long common prefix makes all names similar
    matches = difflib.get_close_matches(name.removeprefix("ACCELERANT_"), shorter, 1)
    return "".join(f" (did you mean {shorter[match]!r}?)" for match in matches)


def flag_of(name: str) -> str:
    """Return the option of the command line for a field: `--budget-seconds` for `budget_s`."""
    return "--" + (f"{name[:-2]}_seconds" if name.endswith("_s") else name).replace("_", "-")


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings from the file and the environment (the process's by default), which takes precedence.

    Raises ConfigError for an unknown name or an invalid value.
    """
    environ = os.environ if environ is None else environ
    ours = [name for name, value in environ.items() if name.startswith("ACCELERANT_") and value]
    variables = {f"ACCELERANT_{setting.name.upper()}" for setting in fields(Settings)}
    _require_known(
        [name for name in ours if not _FOREIGN.fullmatch(name) and not name.startswith("ACCELERANT_SERVE_")],
        variables | _OTHERS,
        "unknown environment variable",
    )
    named = environ.get("ACCELERANT_CONFIG")
    default = _user_folder("config") / "config.toml"
    values = _from_file(Path(named) if named else default, must_exist=bool(named))
    for setting in fields(Settings):
        variable = f"ACCELERANT_{setting.name.upper()}"
        if environ.get(variable):
            values[setting.name] = _converted(setting.name, environ[variable], variable)
    return Settings(**values)


_loaded: Settings | None = None
_overridden: ContextVar[Settings | None] = ContextVar("accelerant_settings", default=None)
_published: list[Settings] = []
"""Overrides for threads that Python did not start; the last one is in force (see override)."""

choice_overrides: list[Settings] = []
"""The overrides in force, in any thread, of a setting that a choice of implementation depends on. While it is empty,
the hot path of dispatch need not read the settings."""

CHOICE_SETTINGS = frozenset({"race", "tune", "deterministic", "debug", "implementation", "cache_dir"})


launch_log = SimpleNamespace(enabled=False)
"""Whether kernel launches are logged, which they read as a plain attribute."""


def _set_log_level(level: str) -> None:
    logger = logging.getLogger("accelerant")
    logger.setLevel(level.upper())
    launch_log.enabled = level == "debug"
    if level in ("debug", "info") and not logger.hasHandlers():  # Python's last resort prints warnings only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


def settings() -> Settings:
    """Return the settings in force in this thread or task."""
    global _loaded
    if (inner := _overridden.get()) is not None:
        return inner
    latest = _published[-1:]
    if latest and isinstance(threading.current_thread(), threading._DummyThread):
        return latest[0]
    if _loaded is None:
        _loaded = load()
        _set_log_level(_loaded.log)
    return _loaded


def carried() -> Callable[[], AbstractContextManager[object]]:
    """Return a maker of contexts with the settings in force here, for another thread and after override's block.

    The log level, which is that of the whole process, is not carried.
    """
    here = settings()
    changes = {
        setting.name: getattr(here, setting.name)
        for setting in fields(Settings)
        if setting.name != "log" and getattr(here, setting.name) != getattr(_loaded, setting.name, None)
    }
    return partial(override, **changes) if changes else nullcontext


@lru_cache(64, typed=True)  # an Accelerator with a policy of its own changes the settings in each call
def _changed(before: Settings, **changes: Any) -> Settings:
    _require_known(changes, {setting.name for setting in fields(Settings)}, "unknown setting")
    return replace(before, **{name: _converted(name, value, "override") for name, value in changes.items()})


@contextmanager
def override(**changes: Any) -> Iterator[Settings]:
    """Change settings for a block of code, in this thread or asyncio task and in its backward passes.

    Python's other threads keep theirs, also those that the block starts. Autograd's threads, which torch starts and a
    ContextVar does not reach, follow the override entered last, whichever thread entered it. The log level is that of
    the whole process. Text is read as from the environment; an unknown name or an invalid value raises ConfigError.

    >>> with override(fallback="forbid"):
    ...     train()
    """
    before = settings()
    change = _changed if all(type(value) in (str, bool) for value in changes.values()) else _changed.__wrapped__
    changed, level = change(before, **changes), before.log
    chooses = not CHOICE_SETTINGS.isdisjoint(changes)
    token = _overridden.set(changed)
    try:
        _published.append(changed)
        if chooses:
            choice_overrides.append(changed)
        if "log" in changes:
            _set_log_level(changed.log)
        yield changed
    finally:
        _overridden.reset(token)
        _published.remove(changed)
        if chooses:
            choice_overrides.remove(changed)
        if "log" in changes:
            _set_log_level(level)
