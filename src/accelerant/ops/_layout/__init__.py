"""Images from channels first to channels last and back, for libraries that compute in the other layout."""

from __future__ import annotations

from accelerant.ops._layout.launch import KERNEL, to_channels_first, to_channels_last

__all__ = ["KERNEL", "to_channels_first", "to_channels_last"]
