"""The command line: `accelerant`, also `python -m accelerant`."""

from accelerant.cli.app import main

__all__ = ["main"]
