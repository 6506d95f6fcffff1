"""Rows of a table by their numbers."""

from __future__ import annotations

from accelerant.ops.embedding.op import embedding

__all__ = ["embedding"]
