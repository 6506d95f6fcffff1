"""The command line of the comparisons: `python -m benchmarks zk --help`."""

from __future__ import annotations

import sys

import typer

from accelerant.cli.app import exit_status
from benchmarks import cli_curve, cli_decode, cli_dp, cli_groth16, cli_patch, cli_train, cli_zk

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> None:
    """Run a comparison and exit."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    for module, command in (
        (cli_curve, cli_curve.curve), (cli_decode, cli_decode.decode), (cli_dp, cli_dp.dp),
        (cli_groth16, cli_groth16.groth16), (cli_patch, cli_patch.patch), (cli_train, cli_train.train),
        (cli_zk, cli_zk.zk),
    ):  # fmt: skip
        app.command(command.__name__, epilog=module.EPILOG)(command)
    with exit_status():
        app(args=sys.argv[1:] if arguments is None else arguments, prog_name="python -m benchmarks")


if __name__ == "__main__":
    main()
