"""The application: command groups, errors to exit statuses.

A group's file is imported for its `register(app)` only; its commands import torch and the rest of the library
in their bodies, so that `--help` answers at once.

Exit status: 0 done, 1 failed, 2 wrong usage or unusable input, 128 + n ended by signal n (130 is Ctrl-C).
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

from accelerant._version import __version__
from accelerant.config import settings
from accelerant.errors import AccelerantError, BackendUnavailable, ConfigError, FormatError, MissingDependency

__all__ = ["GROUPS", "build_app", "main"]

GROUPS = ("devices", "train", "data", "bench", "tune", "doctor", "top", "compile", "cache", "zk")
"""Modules of this package with a `register(app)`; a new command group is a file and a name here."""

_BAD_INPUT = (ConfigError, FormatError, BackendUnavailable, MissingDependency)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"accelerant {__version__}")
        raise typer.Exit


def build_app() -> typer.Typer:
    """The typer application with every group."""
    app = typer.Typer(
        name="accelerant",
        help="Accelerated computing on whatever device is there.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root(
        version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
    ) -> None:
        """Accelerated computing on whatever device is there."""

    for group in GROUPS:
        import_module(f"accelerant.cli.{group}").register(app)
    return app


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; the process's by default.
    """
    try:
        settings()  # a setting without meaning is wrong usage of every command
        build_app()(args=arguments, prog_name="accelerant")
    except AccelerantError as error:
        _fail(error, 2 if isinstance(error, _BAD_INPUT) else 1)
    except OSError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        print("accelerant: interrupted", file=sys.stderr)
        sys.exit(130)


def _fail(error: Exception, status: int) -> None:
    print(f"accelerant: {error}", file=sys.stderr)
    sys.exit(status)
