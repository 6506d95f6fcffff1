"""ChaCha20 in NumPy integers: the reference of every kernel's keystream.

A block is 16 words of 32 bits, computed from 8 words of key and 4 of input. In Bernstein's layout the input is a
counter and a nonce of 64 bits each, in RFC 8439 a counter of 32 bits and a nonce of 96. The function is the same.

Source: Nir and Langley 2018, RFC 8439, section 2.3; Bernstein 2008, "ChaCha, a variant of Salsa20".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["BLOCK_WORDS", "CONSTANTS", "DOUBLE_ROUNDS", "QUARTERS", "chacha20_blocks", "chacha20_words", "key_words"]

BLOCK_WORDS = 16
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)
"""The characters "expand 32-byte k", little-endian."""

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
