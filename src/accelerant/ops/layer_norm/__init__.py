"""Layer normalisation."""

from __future__ import annotations

from accelerant.ops.layer_norm.op import layer_norm

__all__ = ["layer_norm"]
