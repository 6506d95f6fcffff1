"""Command lines that run in this process."""

import pytest

from accelerant.cli.app import main


def status(*arguments):
    """The exit status of a command line."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code or 0


def run(command, capsys, *arguments):
    """Exit status, output and errors of a command with arguments."""
    return status(*command.split(), *arguments), *capsys.readouterr()
