"""Cryptographically secure random words: ChaCha20 under a key of the system's entropy.

chacha20_blocks, in NumPy integers, is the reference of every kernel's keystream. A block is 16 words of 32 bits,
computed from 8 words of key and 4 of input. In Bernstein's layout the input is a counter and a nonce of 64 bits each,
in RFC 8439 a counter of 32 bits and a nonce of 96. The function is the same.

A stream is a key and a 64-bit counter of blocks that only grows. A fork, copy or pickle would repeat the stream, so
each of them gets a fresh key: a child process draws other words than its parent, and a checkpoint holds no key. Streams
are not reproducible.

Source: Nir and Langley 2018, RFC 8439, section 2.3; Bernstein 2008, "ChaCha, a variant of Salsa20".
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
from accelerant.runtime.host import fork_safe

BLOCK_WORDS = 16
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # the characters "expand 32-byte k", little-endian
DOUBLE_ROUNDS = 10
QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip

Words = npt.NDArray[np.uint32]


def key_words(key: bytes) -> Words:
    """Return a key of 32 bytes as 8 words."""
    return np.frombuffer(key, "<u4").astype(np.uint32)


def chacha20_blocks(key: Words, inputs: Words) -> Words:
    """Return the blocks of n inputs, (16, n), from a key (8,) and words 12 to 15 of each block's state (4, n)."""
    start = np.empty((BLOCK_WORDS, inputs.shape[1]), np.uint32)
    start[:4] = np.array(CONSTANTS, np.uint32)[:, None]
    start[4:12] = key[:, None]
    start[12:] = inputs
    state = list(start.copy())
    for _ in range(DOUBLE_ROUNDS):
        for a, b, c, d in QUARTERS:
            for left, right, into, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                state[left] += state[right]
                state[into] ^= state[left]
                state[into] = (state[into] << np.uint32(bits)) | (state[into] >> np.uint32(32 - bits))
    return np.stack(state) + start


def chacha20_words(key: Words, first: int, count: int, nonce: int = 0) -> Words:
    """Return (16, count), the blocks of the 64-bit counters from `first`, wrapping at 2^64, under a 64-bit nonce."""
    counters = np.arange(count, dtype=np.uint64) + np.uint64(first)
    inputs = np.empty((4, count), np.uint32)
    inputs[0], inputs[1] = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    inputs[2], inputs[3] = nonce & 0xFFFFFFFF, nonce >> 32
    return chacha20_blocks(key, inputs)


_KEY_BYTES = 32
_LAST = 2**64

renewed_after_fork: weakref.WeakSet[Any] = weakref.WeakSet()
"""Generators to which a forked process gives another key, by `_renew()`."""


class SecureStream:
    """A keystream of ChaCha20, with Bernstein's counter of 64 bits, whose blocks are used once.

    Copying, pickling and forking give a stream with a fresh key. May be used from several threads.

    Args:
        key: 32 bytes, for tests; by default from os.urandom. Two streams of one key repeat one another.

    Attributes:
        states: keys and counters in the memory of CUDA devices, by device index (device.py).

    Trust: the key is in this process's memory, and in the memory of each device that draws; a reader of either knows
    the stream. Neither repr nor errors show it.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != _KEY_BYTES:
            raise ConfigError(f"a key has {_KEY_BYTES} bytes, got {len(key)}")
        self._lock = fork_safe(threading.Lock())
        self._counter = 0
        self._renew(key)
        renewed_after_fork.add(self)

    def reserve(self, blocks: int) -> tuple[Words, int]:
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
    for generator in list(renewed_after_fork):
        generator._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
