"""A run's folder: its files, when it may be used, what happens to an earlier run in it, and its lock.

One run at a time writes to a folder. Where fcntl is available, the kernel holds the lock (flock) and releases it with
the process. Elsewhere the lock is the existence of a file that names its process; the file of a dead process is
replaced.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.nn.train.checkpoint import Checkpoints
from accelerant.runtime.files import decode_json, open_regular, read_regular, write_atomic

_FORMAT = "accelerant-train-1"
_ADD_UP = "this run begins a new ledger. Trainings on the same data add up: give --ledger {} to continue that one"


class RunFolder:
    """A run's folder: config.json is written first and names the format, summary.json last, when it is finished."""

    FILES = (
        "config.json", "metrics.jsonl", "checkpoint.safetensors", "tokenizer.json",
        "model.safetensors", "sample.txt", "report.html", "summary.json",
        "checkpoint-previous.safetensors", "trace.json", "kernels.txt", "kernels.json", "privacy.json",
        "tokenizer_config.json",
    )  # fmt: skip

    LEDGER = "privacy-ledger.jsonl"
    """Of a private run. It is never removed: the privacy budget stays spent when the model is deleted."""

    EVENT_LOGS = "tensorboard"

    _MOVING = ".accelerant-moving"
    """Subfolder of an earlier run while its files are moved."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config, self.metrics, self.checkpoint, self.tokenizer = (path / name for name in self.FILES[:4])
        self.model, self.sample, self.report, self.summary = (path / name for name in self.FILES[4:8])

    @property
    def finished(self) -> bool:
        """True if the run in the folder is finished."""
        return self.summary.is_file()

    @property
    def resume_command(self) -> str:
        """The command that continues the run, in as many processes as wrote its last checkpoint."""
        count = Checkpoints(self.path).written[1]
        return f"accelerant train --resume {shlex.quote(str(self.path))}{f' --gpus {count}' * (count > 1)}"

    def require_usable(self) -> None:
        """Raise ConfigError unless a run may write here: existing files of those names are a run's."""
        nearest = self.path
        while not nearest.exists() and nearest != nearest.parent:
            nearest = nearest.parent
        if not nearest.is_dir():
            raise ConfigError(f"cannot write to {self.path}: {nearest} is not a folder")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(f"cannot write to {self.path}: no permission in {nearest}")
        foreign = [name for name in (*self.FILES, self.EVENT_LOGS) if (self.path / name).exists()]
        try:
            if foreign:
                self.read_config()
        except FormatError:
            what = f"{foreign[0]} of something else"
            raise ConfigError(f"{self.path} holds {what}: give --out another folder") from None

    def start(self, *, overwrite: bool = False) -> str | None:
        """Prepare the folder for a new run, and return a note: an earlier one is moved, or removed (`overwrite`)."""
        note = None
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path / ".accelerant-write-test", b"")
            (self.path / ".accelerant-write-test").unlink()
            old = [self.path / name for name in self.FILES if (self.path / name).is_file()]
            shards = list(self.path.glob(Checkpoints.SHARDS))
            logs = [log] if (log := self.path / self.EVENT_LOGS).is_dir() else []
            holds = Checkpoints(self.path).exist or self.finished or self.model.is_file()
            if (holds and not overwrite) or (self.path / self._MOVING).is_dir():
                note = self._move_aside([*old, *shards, *self.path.glob(f"{self.LEDGER}*"), *logs])
            else:
                self.summary.unlink(missing_ok=True)  # first: a partly removed run is not a finished one
                for folder in (*shards, *logs):
                    shutil.rmtree(folder)
                for file in sorted(old, key=lambda file: file == self.config):  # last: it says whose the others are
                    file.unlink(missing_ok=True)
                note = self._keep_ledger()
        except OSError as error:
            raise ConfigError(f"cannot write to {self.path}: {error.strerror or error}") from None
        return note

    def _move_aside(self, files: Sequence[Path]) -> str:
        """Move a run's files into a subfolder, together also if the process is killed; return a note for the user."""
        moving = self.path / self._MOVING
        moving.mkdir(exist_ok=True)
        here = {file.name for folder in (self.path, moving) for file in folder.iterdir() if file.is_file()}
        finished, private = self.summary.name in here, self.LEDGER in here
        kept = self._free_name("finished" if finished else "unfinished")
        for file in sorted(files, key=lambda file: file == self.config):
            file.rename(moving / file.name)
        moving.rename(kept)
        if not finished:
            return f"kept the unfinished run that was here: {RunFolder(kept).resume_command}"
        note = f"kept the finished run that was here in {kept} (--overwrite replaces it)"
        return f"{note}; {_ADD_UP.format(kept / self.LEDGER)}" if private else note

    def write_config(self, values: Mapping[str, Any]) -> None:
        """Write config.json."""
        self.write_json(self.config, {"format": _FORMAT, **values})

    def reopen(self, config: Mapping[str, Any]) -> None:
        """Replace config.json by that of a run with another number of steps, which is no longer finished."""
        self.summary.unlink(missing_ok=True)  # first: with it the run would still be a finished one
        self.write_config(config)

    def read_config(self) -> dict[str, Any]:
        """Read config.json; raise FormatError if it does not exist, or is not a run's."""
        values = self._read_json(self.config)
        if values.get("format") != _FORMAT:
            raise FormatError(f"{self.config} is not a run's of this program")
        return values

    def read_summary(self) -> dict[str, Any]:
        """Read summary.json, with this folder's paths: it may have moved. Raise FormatError if it is no run's."""
        return self._read_json(self.summary) | {"out": str(self.path), "report": str(self.report)}

    def _read_json(self, path: Path) -> dict[str, Any]:
        try:
            values = decode_json(read_regular(path))
        except FileNotFoundError:
            raise MissingFile(f"{self.path} holds no run: there is no {path.name}") from None
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot read {path}: {error}") from None
        if not isinstance(values, dict):
            raise FormatError(f"{path} is not a run's of this program")
        return values

    @staticmethod
    def write_json(path: Path, values: Mapping[str, Any]) -> None:
        """Write a JSON document atomically, indented."""
        write_atomic(path, (json.dumps(values, indent=2) + "\n").encode())

    def _keep_ledger(self) -> str | None:
        """Rename the privacy ledger of the previous run; return a note for the user."""
        ledger = self.path / self.LEDGER
        if not ledger.is_file():
            return None
        kept = self._free_name(ledger.stem, ledger.suffix)
        for file in self.path.glob(f"{self.LEDGER}*"):  # and the files of its writer
            file.rename(kept.with_name(kept.name + file.name.removeprefix(self.LEDGER)))
        return f"kept the privacy ledger of the run that was here as {kept.name}; {_ADD_UP.format(kept)}"

    def _free_name(self, stem: str, suffix: str = "") -> Path:
        number = 1
        while (self.path / f"{stem}-{number}{suffix}").exists():
            number += 1
        return self.path / f"{stem}-{number}{suffix}"


# --- the lock --------------------------------------------------------------------------------------------------------

_UNWRITTEN_S = 10.0  # an older lock file without a process ID was left by a crash
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # from file systems without locks


class RunLock:
    """The lock of a run's folder. Entering acquires it if the folder exists; `take` makes the folder, too."""

    NAME = ".accelerant-train.lock"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / self.NAME
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        if self._folder.is_dir():
            self.take()
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is None:
            return
        file, self._file = self._file, None
        if sys.platform == "win32":  # an open file cannot be removed there
            os.close(file)
            self._path.unlink(missing_ok=True)
        else:
            self._path.unlink(missing_ok=True)  # before others can take the lock of a file that is then gone
            os.close(file)

    def take(self) -> None:
        """Acquire the lock if it is not held; raise ConfigError if another run has it, or the folder is unusable."""
        if self._file is not None:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._file = self._flock()
            if self._file is None:
                self._file = self._create()
            os.truncate(self._file, 0)
            os.write(self._file, str(os.getpid()).encode())
        except OSError as error:
            raise ConfigError(f"cannot write to {self._folder}: {error.strerror or error}") from None

    def _flock(self) -> int | None:
        """Return the file with the kernel's lock on it; None if the system has no such locks."""
        try:
            import fcntl
        except ImportError:  # Windows
            return None
        while True:
            file = open_regular(self._path, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.stat(self._path)
                if os.path.samestat(os.fstat(file), found):
                    return file
            except FileNotFoundError:
                pass  # its last owner removed it between open and flock
            except BlockingIOError:
                os.close(file)
                raise self._in_use() from None
            except OSError as error:
                os.close(file)
                if error.errno not in _NO_LOCKS:
                    raise
                if self._owner() is None:
                    self._path.unlink(missing_ok=True)
                return None
            os.close(file)

    def _create(self) -> int:
        """Return the file, created by this process; that of a dead process is replaced."""
        while True:
            try:
                return open_regular(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                owner = self._owner()
                if self._age_s() < _UNWRITTEN_S if owner is None else _alive(owner):
                    raise self._in_use() from None
                try:
                    self._path.unlink(missing_ok=True)
                except PermissionError:  # Windows: a process has it open
                    raise self._in_use() from None

    def _owner(self) -> int | None:
        try:
            return int(read_regular(self._path, 32))
        except (OSError, ValueError):
            return None

    def _age_s(self) -> float:
        try:
            return time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return _UNWRITTEN_S

    def _in_use(self) -> ConfigError:
        owner = self._owner()
        who = "another process" if owner is None else f"process {owner}"
        return ConfigError(f"{self._folder} is in use by {who}: wait for its end, or give --out another folder")


def _alive(process: int) -> bool:
    if sys.platform == "win32":  # os.kill would end it
        import ctypes

        handle = ctypes.windll.kernel32.OpenProcess(0x1000, False, process)  # PROCESS_QUERY_LIMITED_INFORMATION
        if not handle:
            return False
        code = ctypes.c_ulong()
        known = ctypes.windll.kernel32.GetExitCodeProcess(handle, ctypes.byref(code))
        ctypes.windll.kernel32.CloseHandle(handle)
        return bool(known) and code.value == 259  # STILL_ACTIVE
    try:
        os.kill(process, 0)
    except PermissionError:
        return True  # another user's
    except (OSError, OverflowError):
        return False
    return process > 0
