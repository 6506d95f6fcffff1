"""Sums of ChaCha20 masks against the package cryptography's cipher."""

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from accelerant.privacy.mpc.secagg.encoding import mask_sums, mask_sums_source
from accelerant.privacy.random.stream import key_words
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.ledger import ledger
from requirements import require_backend

SEEDS = [bytes([i]) * 31 + b"\x01" for i in range(5)]


def words(seed, n):
    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor().update(bytes(4 * n))
    return np.frombuffer(stream, "<u4").astype(np.uint32)


def expected(row, n):
    total = np.zeros(n, np.uint32)
    for seed, sign in row:
        total = total + words(seed, n) if sign > 0 else total - words(seed, n)
    return total


@pytest.mark.parametrize("n", [1, 16, 255, 256, 257, 1000])
def test_sums_equal_the_cipher(n):
    rows = [[(SEEDS[0], 1), (SEEDS[1], -1), (SEEDS[2], -1)], [], [(SEEDS[3], -1)]]
    found = mask_sums(rows, n).numpy().view(np.uint32)
    assert found.shape == (3, n)
    for row, sums in zip(rows, found, strict=True):
        assert np.array_equal(sums, expected(row, n))


def test_every_bit_of_a_seed_counts():
    """A known fault of another library: the seed folded to 32 bits, so that two seeds have equal masks."""
    seed = bytes(range(32))
    flipped = [bytes([*seed[:i], seed[i] ^ 1, *seed[i + 1 :]]) for i in range(32)]
    sums = mask_sums([[(each, 1)] for each in (seed, *flipped)], 4)
    assert len({tuple(row.tolist()) for row in sums}) == 33


@pytest.mark.slow
def test_portable_kernel_equals_the_cipher():
    opencl = registry.create(require_backend("opencl"))
    states = np.zeros((2, 12), np.uint32)
    states[:, :8], states[:, 10] = [key_words(seed) for seed in SEEDS[:2]], [1, 2**32 - 1]
    blocks = 16
    out = opencl.allocate(4 * 2 * blocks * 16)
    arrays = opencl.copy_to_device(states), opencl.copy_to_device(np.array([0, 2, 2], np.int64)), out
    opencl.launch(opencl.compile(mask_sums_source()), (1,), (256,), (*arrays, blocks, 2 * blocks, 1))
    found = opencl.copy_to_host(out, np.uint32, (2, blocks * 16))
    assert np.array_equal(found[0], expected([(SEEDS[0], 1), (SEEDS[1], -1)], blocks * 16))
    assert not found[1].any()


@pytest.mark.slow
@pytest.mark.parametrize("target", [CUDA_TARGETS[0], "sm_90"])
def test_the_kernel_compiles_for_nvidia(target):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    resources = compile_cuda(mask_sums_source(), target).resources["chacha20_mask_sums"]
    assert resources.spill_bytes == 0
    assert resources.registers <= 128  # two blocks of 256 threads


@pytest.mark.gpu
def test_sums_on_a_gpu_equal_the_cipher():
    rows = [[(seed, 1 - 2 * (i % 2)) for i, seed in enumerate(SEEDS)], [(SEEDS[3], -1)]]
    found = mask_sums(rows, 10_007, "cuda").cpu()
    assert torch.equal(found, mask_sums(rows, 10_007))


def test_sums_are_recorded_under_their_device():
    ledger().reset()
    mask_sums([[(bytes(32), 1)]], 5)
    assert {(row["op"], row["device"], row["case"]) for row in ledger().to_dict()["ops"]} == {
        ("mask_sums", "cpu", "1 rows")
    }
