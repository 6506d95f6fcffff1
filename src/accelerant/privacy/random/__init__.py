"""Cryptographically secure random words."""

from __future__ import annotations

from accelerant.privacy.random.stream import SecureStream

__all__ = ["SecureStream"]
