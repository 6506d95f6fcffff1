"""What workers run in test_jobs.py; a worker imports this module, which imports little."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from accelerant.errors import ConfigError


def square(x):
    return x * x


class UnpicklableError(Exception):
    def __init__(self, message, more):
        super().__init__(message)


def odd(x):
    """Return the argument, or go wrong in one of several ways."""
    if x == 2:
        raise ValueError("two")
    if x == 3:
        raise UnpicklableError("of a process", "alone")
    if x == 4:
        return (value for value in "abc")
    if x == 5:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def dies_once(folder, x):
    """End the first worker that has item 3."""
    (Path(folder) / f"{x}.{os.getpid()}.{time.monotonic_ns()}").touch()
    if x == 3 and len(list(Path(folder).glob("3.*"))) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def refuse():
    raise ConfigError("no such key")


def end():
    os._exit(7)


@dataclass(frozen=True)
class FrozenError(Exception):
    code: int


class TextlessError(Exception):
    def __init__(self, *arguments):
        super().__init__()
        self.lock = threading.Lock()

    def __str__(self):
        raise ValueError("no text")


def answer(item):
    """Leave in other ways than by returning or raising."""
    if item == "exit":
        sys.exit(3)
    if item == "read":
        return subprocess.run(["cat"], capture_output=True, check=True).stdout
    if item == "frozen":
        raise FrozenError(7)
    if item == "textless":
        raise TextlessError
    if item == "child":  # outlives its parent, and has its files
        if not os.fork():
            time.sleep(60)
        os.kill(os.getpid(), signal.SIGKILL)
    return item
