"""Processes of the suite groth16: their times, and the peer snarkjs.

snarkjs is run, never vendored: `npm install snarkjs`, or the one that the tests of a checkout pin.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerant.errors import AccelerantError

__all__ = ["FinishedProcess", "Snarkjs", "accelerant", "environment", "find_snarkjs", "run"]

_CHECKOUT = Path("tests/interop/snarkjs/node_modules/snarkjs/build/cli.cjs")
_SCRIPTS = (".js", ".cjs", ".mjs")


@dataclass(frozen=True, slots=True)
class FinishedProcess:
    """A process that has ended.

    Attributes:
        cpu_ms: user and system time, children included.
        status: exit status; the negative signal number for a signal.
        output: standard output and error.
    """

    wall_ms: float
    cpu_ms: float
    status: int
    output: str

    def checked(self, what: str) -> FinishedProcess:
        """Return the process.

        Raises:
            AccelerantError: it failed; with the last line that it printed.
        """
        if self.status:
            last = (self.output.strip().splitlines() or ["it printed nothing"])[-1]
            raise AccelerantError(f"{what} ended with status {self.status}: {last}")
        return self


def run(command: Sequence[str], limit_s: float, env: Mapping[str, str] | None = None) -> FinishedProcess:
    """Run a program to its end.

    Args:
        limit_s: seconds after which it is killed.
        env: its environment; this process's by default.

    Raises:
        AccelerantError: it took too long, or this system does not report the CPU time of a child.
    """
    wait = getattr(os, "wait4", None)
    if wait is None:
        raise AccelerantError("this system does not say what CPU time a process took")
    with tempfile.TemporaryFile() as output:
        began = time.perf_counter()
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env) as child:
            alarm = threading.Timer(limit_s, child.kill)
            alarm.start()
            try:
                _, status, usage = wait(child.pid, 0)
            finally:
                in_time = alarm.is_alive()
                alarm.cancel()
            child.returncode = os.waitstatus_to_exitcode(status)  # Popen must not wait for it, too
            wall_ms = (time.perf_counter() - began) * 1e3
        output.seek(0)
        text = output.read().decode(errors="replace")
    if not in_time:
        raise AccelerantError(f"{Path(command[0]).name} {' '.join(command[1:3])} took longer than {limit_s:g} s")
    return FinishedProcess(wall_ms, (usage.ru_utime + usage.ru_stime) * 1e3, child.returncode, text)


def accelerant(*arguments: object) -> list[str]:
    """Return our command line as a user starts it."""
    return [sys.executable, "-P", "-m", "accelerant", *map(str, arguments)]


def environment(backend: str, folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of our processes, which prove on a backend.

    Bytecode is kept in the folder where this process writes none, since an installation has it.
    """
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if sys.dont_write_bytecode:
        variables["PYTHONPYCACHEPREFIX"] = str(folder / "bytecode")
    return variables | {"ACCELERANT_BACKEND": backend} | more


@dataclass(frozen=True, slots=True)
class Snarkjs:
    """An installed snarkjs.

    Attributes:
        command: program and first arguments.
        version: versions of snarkjs and Node.
        missing: why it cannot run; "" if it can.
    """

    command: tuple[str, ...] = ()
    version: str = ""
    missing: str = ""


def find_snarkjs(named: Path | None = None) -> Snarkjs:
    """Find snarkjs: the named file, the one that the tests of a checkout pin, or the one on PATH."""
    node = shutil.which("node")
    if node is None:
        return Snarkjs(missing="Node is not here")
    if named is not None and not named.is_file():
        return Snarkjs(missing=f"there is no {named}")
    on_path = shutil.which("snarkjs")
    path = named or (_CHECKOUT if _CHECKOUT.is_file() else on_path and Path(on_path))
    if not path:
        return Snarkjs(missing="snarkjs is not here: npm install snarkjs, then --snarkjs .../snarkjs/build/cli.cjs")
    command = (node, str(path)) if path.suffix in _SCRIPTS else (str(path),)
    said = run([*command, "--version"], 60).output.split()
    name = next((word for word in said if word.startswith("snarkjs@")), "")
    if not name:
        return Snarkjs(missing=f"{path} does not say that it is snarkjs")
    return Snarkjs(command, f"{name.replace('@', ' ')}, node {run([node, '--version'], 60).output.strip()}")
