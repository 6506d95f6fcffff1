"""Prime fields, element by element."""

from accelerant.algebra.field.op import add, add_on

__all__ = ["add", "add_on"]
