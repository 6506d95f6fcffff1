"""Lookup of rows of a table."""

from accelerant.ops.embedding.op import embedding

__all__ = ["embedding"]
