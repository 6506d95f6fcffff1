"""`python -m accelerant` is the command line."""

from accelerant.cli import main

if __name__ == "__main__":
    main()
