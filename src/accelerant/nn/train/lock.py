"""One run at a time in a folder: a lock file that a dead process cannot leave behind.

With fcntl the kernel holds the lock (flock) and drops it with the process. Elsewhere the file's existence is the
lock, and its content the process that made it: the file of a dead process is taken over.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from pathlib import Path
from types import TracebackType

from accelerant.errors import ConfigError

__all__ = ["RunLock"]

_UNWRITTEN_S = 10.0  # a lock file without a number that is older was left by a crash
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}  # of a file system


class RunLock:
    """The right to write to a run's folder; a context manager that gives it back.

    Entering takes it where the folder is there; `take` takes it, and makes the folder, where that is still to do.
    """

    NAME = ".accelerant-train.lock"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / self.NAME
        self._file: int | None = None

    def __enter__(self) -> RunLock:
        if self._folder.is_dir():
            self.take()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _: TracebackType | None
    ) -> None:
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
        """Take the lock, unless it is taken already.

        Raises:
            ConfigError: another run has it, or the folder cannot be made or written.
        """
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
        """The file with the kernel's lock on it; None where there are no such locks."""
        try:
            import fcntl
        except ImportError:  # Windows
            return None
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = os.stat(self._path)
                if os.path.samestat(os.fstat(file), found):
                    return file
            except FileNotFoundError:
                pass  # the last holder removed it between our opening and locking it
            except BlockingIOError:
                os.close(file)
                raise self._in_use() from None
            except OSError as error:
                os.close(file)
                if error.errno not in _NO_LOCKS:
                    raise
                if self._holder() is None:
                    self._path.unlink(missing_ok=True)
                return None
            os.close(file)

    def _create(self) -> int:
        """The file, made by this process; that of a dead one is replaced."""
        while True:
            try:
                return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                holder = self._holder()
                if holder is None and self._age_s() < _UNWRITTEN_S:
                    raise self._in_use() from None
                if holder is not None and _alive(holder):
                    raise self._in_use() from None
                try:
                    self._path.unlink(missing_ok=True)
                except PermissionError:  # Windows: someone has it open
                    raise self._in_use() from None

    def _holder(self) -> int | None:
        try:
            return int(self._path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def _age_s(self) -> float:
        try:
            return time.time() - self._path.stat().st_mtime
        except FileNotFoundError:
            return _UNWRITTEN_S

    def _in_use(self) -> ConfigError:
        holder = self._holder()
        who = "another process" if holder is None else f"process {holder}"
        return ConfigError(f"{self._folder} is in use by {who}: wait for its end, or give --out another folder")


def _alive(process: int) -> bool:
    """Whether a process of that number runs."""
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
