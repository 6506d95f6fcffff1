"""Exact arithmetic that privacy and zero-knowledge share."""

from accelerant.algebra import field

__all__ = ["field"]
