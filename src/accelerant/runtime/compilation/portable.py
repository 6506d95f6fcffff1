"""The header that stands before every kernel in the portable dialect."""

from __future__ import annotations

import functools
from pathlib import Path

__all__ = ["portable_header"]


@functools.cache
def portable_header() -> str:
    """The text of portable.h."""
    return (Path(__file__).parent / "portable.h").read_text(encoding="utf-8")
