"""The command line: `accelerant`, also `python -m accelerant`."""

import sys

try:
    from accelerant.cli.app import main
except KeyboardInterrupt:  # Ctrl-C before main() can turn it into an exit status
    print("accelerant: interrupted", file=sys.stderr)
    raise SystemExit(130) from None

__all__ = ["main"]
