"""Cryptographically secure random words: ChaCha20 under a key of the system's entropy.

A stream is a key and a 64-bit counter of blocks that only grows. A fork, copy or pickle would repeat the stream, so
each of them gets a fresh key: a child process draws other words than its parent, and a checkpoint holds no key. Streams
are not reproducible.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.privacy.random.chacha20 import key_words

__all__ = ["SecureStream"]

_KEY_BYTES = 32
_LAST = 2**64
_live: weakref.WeakSet[SecureStream] = weakref.WeakSet()


class SecureStream:
    """A keystream of ChaCha20 whose blocks are used once.

    Copying, pickling and forking give a stream with a fresh key. May be used from several threads.

    Args:
        key: 32 bytes, for tests; by default from os.urandom. Two streams of one key repeat one another.

    Attributes:
        states: keys and counters in the memory of CUDA devices, by device index (device.py).

    Trust: the key is in this process's memory, and in the memory of each device that draws; a reader of either knows
    the stream. Neither repr nor errors show it.

    Source: RFC 8439 (ChaCha20), with Bernstein's counter of 64 bits.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != _KEY_BYTES:
            raise ConfigError(f"a key has {_KEY_BYTES} bytes, got {len(key)}")
        self._lock = threading.Lock()
        self._counter = 0
        self._renew(key)
        _live.add(self)

    def reserve(self, blocks: int) -> tuple[npt.NDArray[np.uint32], int]:
        """Reserve counters of blocks, and return the key and the first; ConfigError past a counter of 2^64."""
        with self._lock:
            first = self._counter
            if blocks < 0 or first + blocks > _LAST:
                raise ConfigError(f"a stream has 2^64 blocks: {first} are used, {blocks} more were requested")
            self._counter = first + blocks
            return self._key, first

    def words(self, n: int, device: Any = None) -> Tensor:
        """Return (n,) int32 words of the keystream, with the bits of uint32, on the CPU or a CUDA device."""
        from accelerant.privacy.random.device import keystream

        return keystream(self, n, torch.device(device or "cpu"))

    def uniform(self, n: int) -> Tensor:
        """Return (n,) float64 in [0, 1) on the CPU: multiples of 2^-53, all equally likely."""
        wide = self.words(2 * n).numpy().view(np.uint64)
        return torch.from_numpy((wide >> np.uint64(11)) * 2.0**-53)

    def _renew(self, key: bytes | None = None) -> None:
        self._key = key_words(os.urandom(_KEY_BYTES) if key is None else key)
        self._counter = 0
        self.states: dict[int, Tensor] = {}

    def __reduce__(self) -> tuple[Any, tuple[()]]:  # of copies, too
        return SecureStream, ()

    def __repr__(self) -> str:
        return "SecureStream()"


def _after_fork() -> None:
    for stream in list(_live):
        stream._lock = threading.Lock()  # another thread of the parent may have held it
        stream._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
