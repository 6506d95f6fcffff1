"""The command-line application: command groups and exit statuses of errors.

A command imports torch and the rest of the library in its body, so that `--help` is quick.

Exit status: 0 done, 1 failed, 2 wrong usage or unusable input, 128 + n ended by signal n (130 is Ctrl-C). The `zk`
commands end with 1 only if a proof is invalid, or some of many witnesses failed, and with 2 for every other failure.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from accelerant._version import __version__
from accelerant.cli.terminal import prepare_streams
from accelerant.config import settings
from accelerant.errors import AccelerantError, BackendUnavailable, ConfigError, FormatError, MissingDependency
from accelerant.runtime.files import escaped

if TYPE_CHECKING:
    import typer

_PANELS = {
    "Training": ("train", "generate", "sample", "runs", "data", "privacy"),
    "Search": ("search", "rag"),
    "Proofs": ("zk",),
    "Service": ("serve", "keys", "jobs"),
    "Devices": ("devices", "top", "doctor"),
    "Kernels": ("bench", "tune", "compile", "profile", "cache"),
}
COMMANDS = {name: panel for panel, names in _PANELS.items() for name in names}
"""Command or group of commands -> its panel on the page of help."""

_MODULES = {
    "serve": "service", "keys": "service", "jobs": "service", "top": "devices", "doctor": "devices",
    "sample": "generate", "profile": "tune", "data": "runs", "compile": "cache",
}  # fmt: skip
"""Command -> its module, where that has another name; a module has the command as the attribute of this name."""

_BAD_INPUT = (ConfigError, FormatError, BackendUnavailable, MissingDependency)
_WRONG_PATH = {errno.ENOENT, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP, errno.EINVAL}
"""Errors of a path that was given, the last of one that is no regular file."""


def _version(requested: bool) -> None:
    if requested:
        import typer

        print(f"accelerant {__version__}")
        raise typer.Exit


def build_app(names: Iterable[str] = COMMANDS) -> typer.Typer:
    """Return the typer application with these commands and groups."""
    import typer

    from accelerant.cli.help import Application, add_command

    app = Application(name="accelerant", no_args_is_help=True, add_completion=True)

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    ) -> None:
        """Accelerated computing on any available device."""

    for name in names:
        module = import_module(f"accelerant.cli.{_MODULES.get(name, name)}")
        add_command(app, name, COMMANDS[name], getattr(module, name))
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command line, by default the process's arguments without the program's name, and exit."""
    args = sys.argv[1:] if arguments is None else arguments
    with exit_status(2 if args[:1] == ["zk"] else 1), _interruptible():
        prepare_streams()
        if args[:2] == ["zk", "prove"] and (proof := import_module("accelerant.cli.zk_prove").plain(args[2:])):
            proof()
            sys.exit(0)
        known = args[:1] if args and args[0] in COMMANDS else COMMANDS  # importing the others takes up to 0.1 s
        build_app(known)(args=args, prog_name="accelerant", obj=args)  # the arguments, to start processes with


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C interrupt a block; what the process does at its exit goes on, since its status is known."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, _interrupt)
    try:
        yield
    finally:
        atexit.unregister(_ignore_interrupt)  # of an earlier command
        atexit.register(_ignore_interrupt)  # the latest is the first to be called


def _ignore_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is _interrupt:  # the interpreter, as it ends, would let the signal end it
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt; while a module is being imported, end the process.

    Libraries abort the process, or recurse, where an exception leaves their modules half imported.
    """
    for module in list(sys.modules.values()):
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            os.write(2, b"accelerant: interrupted\n")
            os._exit(130)
    signal.default_int_handler(number, frame)


class InvalidProofError(Exception):
    """The verdict of `zk verify`, and of `zk prove-many` on some witnesses, that ends the process with status 1."""


@contextmanager
def exit_status(failure: int = 1) -> Iterator[None]:
    """Turn an exception of a command into one line on the error stream and the process's exit status.

    Args:
        failure: status of failures. With 2, status 1 comes from InvalidProofError alone: a closed or full standard
            output and any unexpected exception, after its traceback, end the process with 2.
    """
    status: int | str | None = None
    try:
        try:
            settings()  # an invalid setting is wrong usage of every command
            yield
        except SystemExit as ended:
            status = failure if ended.code == 1 else ended.code or 0  # typer ends with 1 if the output is closed
        except InvalidProofError:
            status = 1
        write("", end="")
    except AccelerantError as error:
        _fail(error, 2 if isinstance(error, _BAD_INPUT) else getattr(error, "exit_status", failure))
    except BrokenPipeError:  # the reader of the output has closed it
        _end(failure)
    except OSError as error:
        if error.filename and error.errno in _WRONG_PATH:
            _fail(f"{error.filename}: {error.strerror}", 2)
        _fail(error, failure)
    except MemoryError as error:
        _fail(f"out of memory: {error}" if str(error) else "out of memory", failure)
    except KeyboardInterrupt:
        _fail("interrupted", 130)
    except Exception as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # Python 3.11 wraps what __set_name__ raises
            _fail("interrupted", 130)
        if "DefaultCPUAllocator" in str(error):  # torch's RuntimeError for the host's memory
            _fail(f"out of memory: {str(error).splitlines()[0]}", failure)
        if failure == 1:  # Python's own status of an unhandled exception
            raise
        with suppress(OSError):
            traceback.print_exc()
        _end(failure)
    if status is not None:
        sys.exit(status)


def write(line: str, end: str = "\n") -> None:
    """Print a line and flush standard output, which an OSError names, except that of a closed pipe."""
    try:
        print(line, end=end, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from None


def _fail(error: Exception | str, status: int) -> NoReturn:
    """Print an error, which may quote an untrusted file, without control characters; bad input is one line."""
    lines = [str(error)] if isinstance(error, _BAD_INPUT) else str(error).splitlines()
    rank = os.environ.get("RANK", "0") if os.environ.get("WORLD_SIZE", "1") != "1" else "0"
    if rank != "0":
        if getattr(error, "shared", False):  # rank 0 prints it
            _end(status)
        if not lines[0].startswith("rank "):
            lines[0] = f"rank {rank}: {lines[0]}"
    with suppress(OSError):  # the error stream is closed or full
        print("accelerant: " + "\n".join(map(escaped, lines)), file=sys.stderr, flush=True)
    _end(status)


def _end(status: int) -> NoReturn:
    """End the process. Output that cannot be written is dropped: the interpreter's last flush would end it with 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:  # it was closed before the start
                stream.flush()
        except OSError:
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(status)
