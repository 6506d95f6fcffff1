"""Products of shares and truncation, against integers."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from accelerant.algebra.field.field import prime_field
from accelerant.errors import ConfigError, ProtocolError, ShapeError
from accelerant.privacy.mpc import beaver, shamir
from accelerant.privacy.mpc.secagg.encoding import mask_sums, mask_sums_source
from accelerant.privacy.random import SecureStream, key_words
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.ledger import ledger
from refusals import assert_raises
from requirements import require_backend


def product(x, y, matrix=False):
    triples = beaver.deal_triples(x[0].sharing, y[0].sharing, matrix=matrix)
    sent = [beaver.mask(*held) for held in zip(x, y, triples, strict=True)]
    return [beaver.multiply(triple, sent) for triple in triples]


def truncated(shares, bits):
    masks = beaver.deal_truncations(shares[0].sharing, bits)
    sent = [beaver.mask_truncation(*held) for held in zip(shares, masks, strict=True)]
    return [beaver.truncate(*held, sent) for held in zip(shares, masks, strict=True)]


@pytest.mark.parametrize(
    ("field", "threshold", "count"),
    [("goldilocks", 2, 3), *(pytest.param("bn254_fr", *each, marks=pytest.mark.slow) for each in ((2, 2), (3, 3)))],
)
def test_products_are_exact(field, threshold, count):
    a, b = torch.tensor([[3, -5, 0], [2**20, 7, -1]]), torch.tensor([[-4, 5, 9], [2**20, 0, -1]])
    x, y, z = (shamir.split(each, threshold, count, field=field) for each in (a, b, b.T.contiguous()))
    assert torch.equal(shamir.combine(product(x, y)[-threshold:]), a * b)
    assert torch.equal(shamir.combine(product(x, z, matrix=True)), a @ b.T)
    twice = product(x, product(x, y))
    assert torch.equal(shamir.combine([share + 1 for share in twice]), a * a * b + 1)


@pytest.mark.parametrize("field", ["goldilocks", "bn254_fr"])
def test_matrix_products_of_no_rows(field):
    """The words of an element are one or four, in an axis of their own."""
    x, y = (shamir.split(torch.ones(size, dtype=torch.int64), 2, 2, field=field) for size in ((0, 2), (2, 3)))
    assert shamir.combine(product(x, y, matrix=True)).shape == (0, 3)


def test_truncation_is_within_one_unit():
    """floor(v / 2^bits) or 1 more, which comes as often as the fraction that is cut off."""
    v = torch.tensor([0, 1, -1, 2**16, -(2**16), 2**62, -(2**62), 2**63 - 1, -(2**63), 3 << 14]).repeat(60)
    sharing = shamir.split(v, 2, 3, field="bn254_fr")
    shares = [shamir.Share(replace(s.sharing, dtype="float64", fraction_bits=16), s.index, s.words) for s in sharing]
    found = shamir.combine(truncated(shares, 16)).to(torch.int64)
    ones = (found - (v >> 16)).reshape(60, 10)
    assert ((ones == 0) | (ones == 1)).all()
    assert not ones[:, [0, 3, 4, 5, 6, 8]].any()  # exact multiples
    assert 30 <= int(ones[:, 9].sum()) <= 58  # 3/4 of 60: 4.5 standard deviations
    assert int(ones[:, 2].sum()) >= 58


def test_masks_of_truncation_have_192_bits():
    """Uniform below 2^192, each fresh, so that the opened sum hides a number of 64 bits up to 2^-128."""
    sharing = shamir.split(torch.zeros(256), 2, 3, field="bn254_fr")[0].sharing
    dealt = [beaver.deal_truncations(sharing, 16) for _ in "ab"]
    words, low = (shamir.opened([getattr(each, name) for each in dealt[0][:2]])[0] for name in ("r", "low"))
    limbs = words.numpy()
    assert not limbs[:, 3].any()
    ones = np.unpackbits(limbs[:, :3].astype("<u8").view(np.uint8), axis=1).mean(0)
    assert np.abs(ones - 0.5).max() < 6 * 0.5 / 16  # of 192 bits, in 256 masks: six standard deviations
    assert len({tuple(row) for row in limbs.tolist()}) == 256
    assert (low.numpy()[:, 0] == limbs[:, 0] & np.uint64(0xFFFF)).all()
    assert not low.numpy()[:, 1:].any()
    other, _ = shamir.opened([each.r for each in dealt[1][:2]])
    assert not (other.numpy()[:, 0] == limbs[:, 0]).any()
    split_ids = {share.sharing.split_id for each in dealt for share in (each[0].r, each[0].low)}
    triples = [beaver.deal_triples(sharing, sharing) for _ in "ab"]
    split_ids |= {share.sharing.split_id for each in triples for share in (each[0].a, each[0].b, each[0].c)}
    assert len(split_ids) == 4 + 6
    assert {len(each) for each in split_ids} == {16}


def test_what_is_opened_is_masked(fixed_entropy, monkeypatch):
    """The opened differences of two pairs of factors look alike: chi-square in 64 cells at level 1e-6."""
    monkeypatch.setattr(shamir, "_stream", SecureStream())
    n, p = 4000, prime_field("goldilocks").modulus
    for value in (0, 2**59):
        x = shamir.split(torch.full((n,), value), 2, 2)
        sent = [beaver.mask(s, s, t) for s, t in zip(x, beaver.deal_triples(x[0].sharing, x[0].sharing), strict=True)]
        d, e = (shamir.opened(shares)[0].tolist() for shares in zip(*sent, strict=True))
        counts = np.bincount([8 * (8 * u // p) + 8 * v // p for u, v in zip(d, e, strict=True)], minlength=64)
        assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 133.6  # scipy.stats.chi2.isf(1e-6, 63)


def test_dealt_shares_serve_one_operation():
    x = shamir.split(torch.tensor([1.5]), 2, 2, field="bn254_fr")
    triple = beaver.deal_triples(x[0].sharing, x[0].sharing)[0]
    truncation = beaver.deal_truncations(x[0].sharing, 8)[0]
    beaver.mask(x[0], x[0], triple)
    beaver.mask_truncation(x[0], truncation)
    with pytest.raises(ProtocolError, match="this Triple was used: the dealer deals one for each operation"):
        beaver.mask(x[0], x[0], triple)
    assert_raises(ProtocolError, "this Truncation was used", beaver.mask_truncation, x[0], truncation)


def test_operands_that_do_not_fit_are_refused():
    x = shamir.split(torch.ones(2, 3), 2, 3)[0].sharing
    for other in ({"threshold": 3}, {"count": 4}, {"field": "mersenne61"}, {"fraction_bits": 40}):
        y = shamir.split(torch.ones(2, 3), **{"threshold": 2, "count": 3} | other)[0].sharing
        with pytest.raises(
            ConfigError, match="factors must be plain shares of numbers, alike in field, threshold, count"
        ):
            beaver.deal_triples(x, y)
    text = shamir.split(b"abc", 2, 3)[0].sharing
    assert_raises(ConfigError, "got bytes, goldilocks and bytes", beaver.deal_triples, text, text)
    with pytest.raises(ShapeError, match=r"no matrix product of shapes \(2, 3\) and \(2, 3\)"):
        beaver.deal_triples(x, x, matrix=True)
    with pytest.raises(ShapeError, match=r"no product of shapes \(2, 3\) and \(3,\)"):
        beaver.deal_triples(x, shamir.split(torch.ones(3), 2, 3)[0].sharing)
    with pytest.raises(
        ConfigError, match=r"truncation by 8 bits: .* plain shares in bn254_fr or bls12_381_fr, got gold"
    ):
        beaver.deal_truncations(x, 8)
    large = shamir.split(torch.ones(2), 2, 3, field="bls12_381_fr")[0].sharing
    for bits in (0, 25, 8.0):
        with pytest.raises(ConfigError, match=f"truncation by {bits} bits: wanted 1 to the shares' 24 fraction bits"):
            beaver.deal_truncations(large, bits)
    x, y = (shamir.split(torch.ones(2), 2, 3) for _ in range(2))
    triples = beaver.deal_triples(x[0].sharing, y[0].sharing)
    sent = [beaver.mask(*held) for held in zip(x, y, triples, strict=True)]
    assert_raises(ProtocolError, "combining needs 2 shares, got 1", lambda: beaver.multiply(triples[0], sent[:1]))
    with pytest.raises(ProtocolError, match="share 3 is not on the polynomial of shares 1, 2"):
        beaver.multiply(triples[0], [*sent[:2], (replace(sent[2][0], words=sent[1][0].words), sent[2][1])])


# --- sums of ChaCha20 masks against the package cryptography's cipher -------------------------------------------------
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
