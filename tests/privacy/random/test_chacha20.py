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

KEY = bytes(range(32))
ZEROS = bytes(32)
FIRST = 2**32 - 5  # so that the counter's upper word changes on the way
NONCE = 0x0123456789ABCDEF

# RFC 8439: section 2.3.2; appendix A.1, test vectors 1 to 5. Key, counter, nonce, block.
VECTORS = [
    (
        KEY,
        1,
        "000000090000004a00000000",
        (
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
        ),
    ),
    (
        ZEROS,
        0,
        "000000000000000000000000",
        (
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        ),
    ),
    (
        ZEROS,
        1,
        "000000000000000000000000",
        (
            "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
            "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
        ),
    ),
    (
        ZEROS[:31] + b"\x01",
        1,
        "000000000000000000000000",
        (
            "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
            "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"
        ),
    ),
    (
        b"\x00\xff" + bytes(30),
        2,
        "000000000000000000000000",
        (
            "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
            "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"
        ),
    ),
    (
        ZEROS,
        0,
        "000000000000000000000002",
        (
            "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
            "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"
        ),
    ),
]


@pytest.mark.parametrize(("key", "counter", "nonce", "block"), VECTORS)
def test_vectors_of_the_rfc(key, counter, nonce, block):
    inputs = np.concatenate([np.array([counter], np.uint32), np.frombuffer(bytes.fromhex(nonce), "<u4")])
    found = chacha20_blocks(key_words(key), inputs.astype(np.uint32)[:, None])
    assert found.astype("<u4").tobytes().hex() == block


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
