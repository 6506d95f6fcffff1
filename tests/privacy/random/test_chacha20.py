"""ChaCha20 against RFC 8439, and every backend's keystream against NumPy's."""

import numpy as np
import pytest
import torch

from accelerant.privacy.random import (
    KEYSTREAM_BLOCK,
    chacha20_blocks,
    chacha20_words,
    key_words,
    keystream_source,
    lanes,
)
from accelerant.runtime import registry
from requirements import require_module

KEY = bytes(range(32))
FIRST = 2**32 - 5  # so that the counter's upper word changes on the way
NONCE = 0x0123456789ABCDEF


def test_a_block_of_the_rfc():
    """RFC 8439, section 2.3.2."""
    inputs = np.array([1, 0x09000000, 0x4A000000, 0], np.uint32)[:, None]
    assert chacha20_blocks(key_words(KEY), inputs).astype("<u4").tobytes().hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )


@pytest.mark.parametrize(("key", "counter", "nonce"), [
    (bytes(32), 0, bytes(12)), (bytes(32), 1, bytes(12)), (bytes(31) + b"\x01", 1, bytes(12)),
    (b"\x00\xff" + bytes(30), 2, bytes(12)), (bytes(32), 0, bytes(11) + b"\x02"), (KEY, 2**32 - 1, KEY[:12]),
])  # fmt: skip
def test_blocks_are_openssls(key, counter, nonce):
    """The first five are the keys, counters and nonces of RFC 8439, appendix A.1."""
    require_module("cryptography", "privacy")
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    start = counter.to_bytes(4, "little") + nonce
    wanted = Cipher(algorithms.ChaCha20(key, start), None).encryptor().update(bytes(64))
    inputs = np.frombuffer(start, "<u4").astype(np.uint32)[:, None]
    assert chacha20_blocks(key_words(key), inputs).astype("<u4").tobytes() == wanted


def test_counters_have_64_bits():
    found = chacha20_words(key_words(KEY), 2**32 - 1, 2)
    inputs = np.array([[2**32 - 1, 0], [0, 1], [0, 0], [0, 0]], np.uint32)
    assert np.array_equal(found, chacha20_blocks(key_words(KEY), inputs))
    assert np.array_equal(
        chacha20_words(key_words(KEY), 2**64 - 1, 2)[:, 1], chacha20_words(key_words(KEY), 0, 1)[:, 0]
    )


def _state():
    nonce = [NONCE & 0xFFFFFFFF, NONCE >> 32, 0, 0]
    return np.concatenate([key_words(KEY), np.array(nonce, np.uint32)]).view(np.int32)


def _expected(n):
    return chacha20_words(key_words(KEY), FIRST, -(-n // 16), NONCE).T.reshape(-1)[:n]


def test_llvm_keystream_equals_numpy():
    indices = 7
    words = torch.empty(indices * lanes() * 16, dtype=torch.int32)
    provider = registry.create("cpu")
    kernel = provider.compile(keystream_source())
    args = (torch.from_numpy(_state()), torch.tensor([FIRST]), words, words.numel(), 1)
    provider.launch(kernel, (indices,), (1,), args)
    assert np.array_equal(words.numpy().view(np.uint32), _expected(words.numel()))


@pytest.mark.parametrize("n", [1, 16, 1001])
def test_portable_keystream_equals_numpy(opencl, n):
    kernel = opencl.compile(keystream_source())
    out = opencl.allocate(4 * n)
    args = (opencl.copy_to_device(_state()), opencl.copy_to_device(np.array([FIRST], np.int64)), out, n, 1)
    opencl.launch(kernel, (-(-n // 16 // KEYSTREAM_BLOCK) or 1,), (KEYSTREAM_BLOCK,), args)
    assert np.array_equal(opencl.copy_to_host(out, np.uint32, (n,)), _expected(n))
