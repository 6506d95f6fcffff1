"""`python -m accelerant` is the command line."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # the current folder, whose files need not be the user's

    from accelerant.cli import main

    main()
