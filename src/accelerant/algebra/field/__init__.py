"""Prime fields, element by element."""

from accelerant.algebra.field.op import add

__all__ = ["add"]
