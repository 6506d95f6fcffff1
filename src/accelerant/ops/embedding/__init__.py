"""Lookup of rows of a table."""

from __future__ import annotations

from accelerant.ops.embedding.op import embedding

__all__ = ["embedding"]
