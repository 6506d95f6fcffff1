"""Shamir's sharing against polynomials on Python integers, its errors, and what too few shares tell."""

import itertools
import random
import re

import numpy as np
import pytest
import torch

import accelerant
from accelerant.algebra.field import prime_field
from accelerant.errors import AccelerantError, ConfigError, ProtocolError, ShapeError, UnsupportedDtype
from accelerant.privacy.mpc import shamir
from accelerant.privacy.random import SecureStream

SECRET = 3_141_592_653_589_793
"""A number whose digits no message may contain."""


@pytest.fixture
def fixed_shares(fixed_entropy, monkeypatch):
    monkeypatch.setattr(shamir, "_stream", SecureStream())


def changed(share, by=1):
    """The share with its first element changed."""
    field = prime_field(share.sharing.field)
    words = share.words.clone().reshape(-1, *share.words.shape[len(share.sharing.elements) :])
    words[:1] = field.add(words[:1], field.encode([by]), device="cpu")
    return shamir.Share(share.sharing, share.index, words.reshape(share.words.shape))


# --- values ----------------------------------------------------------------------------------------------------------


def test_the_published_example():
    """p = 1613, f = 1234 + 166 x + 94 x^2: Wikipedia, "Shamir's secret sharing"."""
    values = shamir.polynomial_values([1234, 166, 94], range(1, 7), 1613)
    assert values == [1494, 329, 965, 176, 1188, 775]
    for points in itertools.combinations(range(1, 7), 3):
        weights = shamir.lagrange_weights(points, 0, 1613)
        assert sum(w * values[x - 1] for w, x in zip(weights, points, strict=True)) % 1613 == 1234


@pytest.mark.parametrize("field", shamir.FIELDS)
def test_shares_are_values_of_one_polynomial(field):
    """Interpolation on Python integers gives the secret and every other share."""
    chosen, secret = prime_field(field), torch.tensor([[5, -7, 2**59], [0, 1, -1]])
    shares = shamir.split(secret, threshold=3, count=5, field=field)
    values = np.array([chosen.decode(share.words) for share in shares], object)
    for points in ((1, 2, 3), (5, 1, 4)):
        for at, wanted in [(0, secret.numpy().astype(object) % chosen.modulus), *enumerate(values, 1)]:
            weights = shamir.lagrange_weights(points, at, chosen.modulus)
            assert (
                sum(w * values[x - 1] for w, x in zip(weights, points, strict=True)) % chosen.modulus == wanted
            ).all()
    for chosen_shares in itertools.permutations(shares, 3):
        assert torch.equal(shamir.combine(chosen_shares), secret)
    assert torch.equal(shamir.combine(shares), secret)


@pytest.mark.parametrize("field", shamir.FIELDS)
def test_integers_of_every_dtype_come_back(field):
    for dtype in (torch.int8, torch.int16, torch.int32, torch.uint8):
        info = torch.iinfo(dtype)
        secret = torch.tensor([info.min, info.max, 0, 1], dtype=dtype)
        back = shamir.combine(shamir.split(secret, threshold=2, count=2, field=field))
        assert back.dtype == dtype
        assert torch.equal(back, secret)
    limit = shamir._limit(prime_field(field).parameters)
    for values in ([limit, -limit], -limit, limit, np.array([[limit]])):
        assert shamir.combine(shamir.split(values, 2, 3, field=field)[1:]).tolist() == np.array(values).tolist()
    if limit == 2**63 - 1:
        assert int(shamir.combine(shamir.split(-(2**63), 2, 2, field=field))) == -(2**63)
    else:
        for value in (limit + 1, -limit - 1, -(2**63), 2**63 - 1):
            with pytest.raises(ConfigError, match=f"values must be from -{limit} to {limit} in {field}$"):
                shamir.split([0, value], 2, 2, field=field)


def test_floats_are_rounded_to_the_stated_precision():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        secret = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
        back = shamir.combine(shamir.split(secret, threshold=2, count=3)[:2])
        assert back.dtype == dtype
        assert torch.equal(back, (secret.double() * 2**24).round().div(2**24).to(dtype))
    exact = torch.tensor([0.5, -(2.0**38), 0.0, -0.25])
    assert torch.equal(shamir.combine(shamir.split(exact, 2, 2)), exact)
    assert shamir.combine(shamir.split(0.3, 2, 2, fraction_bits=2)) == 0.25
    bound = (2**63 - 2**31) / 2**24
    for wrong in (float("nan"), float("inf"), -float("inf"), 1e300, 2.0**39):
        with pytest.raises(
            ConfigError, match=re.escape(f"finite and from -{bound:g} to {bound:g} in goldilocks with 24")
        ):
            shamir.split(torch.tensor([0.0, wrong], dtype=torch.float64), 2, 2)
    assert shamir.combine(shamir.split(np.float64(bound), 2, 2)) == bound


@pytest.mark.parametrize("field", shamir.FIELDS)
def test_bytes_come_back(field):
    for length in (0, 1, 6, 7, 8, 31, 32, 64):
        secret = random.Random(length).randbytes(length)
        shares = shamir.split(secret, threshold=3, count=4, field=field)
        assert shamir.combine(shares[1:]) == secret
    assert shamir.combine(shamir.split(bytearray(b"\xff" * 40), 2, 2, field=field)) == b"\xff" * 40
    assert shamir.combine(shamir.split(memoryview(b"\0\0"), 2, 2, field=field)) == b"\0\0"


def test_shapes_and_counts_at_their_edges():
    for shape in ((), (0,), (3, 0, 2), (1,), (2, 3, 4)):
        secret = torch.ones(shape)
        back = shamir.combine(shamir.split(secret, 2, 3)[:2])
        assert back.shape == shape
        assert torch.equal(back, secret)
    assert int(shamir.combine(shamir.split(5, 1, 3)[2:])) == 5
    assert shamir.combine(shamir.split(b"key", threshold=67, count=100)[33:]) == b"key"
    transposed = torch.arange(6).reshape(2, 3).T
    assert torch.equal(shamir.combine(shamir.split(transposed, 2, 2)), transposed)
    assert accelerant.privacy.mpc.shamir is shamir


def test_a_share_keeps_no_memory_of_the_others():
    for share in shamir.split(torch.arange(10), 2, 3):
        assert share.words.untyped_storage().nbytes() == 80


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 4}, "threshold must be 1 to count = 3, got 4"),
        ({"threshold": 0}, "threshold must be 1 to count = 3, got 0"),
        ({"threshold": True}, "threshold must be an integer, got bool"),
        ({"count": 2.0}, "count must be an integer, got float"),
        ({"count": 0}, "count must be 1 to 65535, got 0"),
        ({"count": 2**16}, "count must be 1 to 65535, got 65536"),
        ({"field": "babybear"}, "unknown field 'babybear' for shares; known are goldilocks, "),
        ({"fraction_bits": 63}, "fraction_bits must be 0 to 62, got 63"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        shamir.split(1.5, **{"threshold": 2, "count": 3} | arguments)


def test_secrets_of_other_kinds_are_refused():
    with pytest.raises(UnsupportedDtype, match="the secret must be a tensor, an array, a number or bytes, got str"):
        shamir.split("secret", 2, 3)
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(UnsupportedDtype, match=f"the secret must be bytes, int8, .*, got {wrong.dtype}"):
            shamir.split(wrong, 2, 3)
    with pytest.raises(ShapeError, match="at most 16 axes, got 17"):
        shamir.split(torch.ones((1,) * 17), 2, 3)


def test_shares_that_do_not_belong_together_are_refused():
    shares, again = (shamir.split(SECRET, threshold=3, count=5) for _ in range(2))
    refused = [
        ([], "no shares"),
        (shares[:2], "needs 3 shares, got 2"),
        ([*shares[:2], shares[1]], "share 2 is there twice"),
        ([*shares[:2], again[2]], "share 3 does not belong to share 1: it has another split"),
        ([*shares, again[4]], "share 5 does not belong to share 1: it has another split"),
    ]
    for argument, name, value in (
        ({"threshold": 2}, "threshold", "2, not 3"),
        ({"count": 6}, "count", "6, not 5"),
        ({"field": "bn254_fr"}, "field", "bn254_fr, not goldilocks"),
        ({"secret": [SECRET]}, "shape", r"\(1,\), not \(\)"),
        ({"secret": 1.5}, "dtype", "float32, not int64"),
    ):
        other = shamir.split(**{"secret": SECRET, "threshold": 3, "count": 5} | argument)
        refused.append(([*shares[:2], other[2]], f"share 3 does not belong to share 1: it has {name} {value}"))
    for wrong, message in refused:
        with pytest.raises(ProtocolError, match=message) as caught:
            shamir.combine(wrong)
        assert str(SECRET)[:8] not in str(caught.value)
    with pytest.raises(ConfigError, match="wanted shares, got int"):
        shamir.combine([*shares[:2], 3])


@pytest.mark.parametrize("secret", [SECRET, b"0123456789", torch.arange(12.0).reshape(3, 4)])
def test_a_changed_share_is_seen_with_a_surplus(secret):
    shares = shamir.split(secret, threshold=3, count=5)
    for which in range(5):
        tampered = [changed(share) if i == which else share for i, share in enumerate(shares)]
        with pytest.raises(ProtocolError, match=r"share [45] is not on the polynomial of shares 1, 2, 3: one of them"):
            shamir.combine(tampered)
    wrong = shamir.Share(shares[0].sharing, 4, shares[4].words)  # another holder's share
    with pytest.raises(ProtocolError, match="share 4 is not on the polynomial"):
        shamir.combine([*shares[:3], wrong])


def test_a_changed_share_is_not_seen_without_a_surplus():
    shares = shamir.split(1000, threshold=2, count=3)
    assert int(shamir.combine([changed(shares[0]), shares[1]])) == 1002  # weight 2 of share 1
    text = shamir.split(b"x", threshold=2, count=2)
    with pytest.raises(ProtocolError, match="do not combine to bytes: a share was changed"):
        shamir.combine([changed(text[0], 2**60), text[1]])
    small = shamir.split(torch.tensor([100], dtype=torch.int8), threshold=2, count=3)
    with pytest.raises(ProtocolError, match="combine to values that int8 cannot hold"):
        shamir.combine([changed(small[0], 40), small[1]])


def test_neither_repr_nor_errors_show_a_secret():
    shares = shamir.split(SECRET, threshold=2, count=3)
    digits = [str(share.words.tolist())[:6] for share in shares] + [str(SECRET)[:6]]
    texts = [repr(shares), str(shares[0]), f"{shares[0]}", repr(shares[0].sharing)]
    with pytest.raises(AccelerantError) as caught:
        shamir.combine([changed(shares[0]), *shares[1:]])
    texts.append(str(caught.value))
    with pytest.raises(ConfigError) as refused:
        shamir.split(2**63 - 1 - SECRET, threshold=2, count=2, field="goldilocks", fraction_bits=-1)
    texts.append(str(refused.value))
    assert repr(shares[1]) == "Share(2 of 3, threshold 2, int64 (), goldilocks)"
    assert not [text for text in texts for each in digits if each in text]


# --- randomness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", shamir.FIELDS)
def test_coefficients_are_uniform_by_rejection(field, fixed_shares, monkeypatch):
    """Numbers at and above p are drawn again: a stream that begins with p - 1, p and the largest number."""
    parameters = prime_field(field).parameters
    p, limbs, top = parameters.modulus, parameters.limbs, 2 ** (64 * parameters.limbs) - 1
    drawn = [p - 1, p, top, 0, p + 1 if p + 1 < 2**parameters.bits else top]
    words = [number >> 64 * i & 2**64 - 1 for number in drawn for i in range(limbs)]
    first = np.array(words, np.uint64).view(np.int32)
    source, calls = SecureStream(), []

    class Stream:
        def words(self, n, device=None):
            calls.append(n)
            return torch.from_numpy(first.copy()) if len(calls) == 1 else source.words(n, device)

    monkeypatch.setattr(shamir, "_stream", Stream())
    values = prime_field(field).decode(shamir._uniform(parameters, 5, torch.device("cpu")))
    assert values[0] == p - 1
    assert values[3] == 0
    assert calls[1] == 3 * 2 * limbs
    assert all(0 <= value < p for value in values)
    assert len(set(values)) == 5


@pytest.mark.parametrize("field", ["goldilocks", "bn254_fr"])
def test_fewer_shares_than_the_threshold_look_uniform(field, fixed_shares):
    """Chi-square of 4,000 splits of each of two secrets in 8 x 8 cells of two shares, at level 1e-6, 63 degrees."""
    p, n = prime_field(field).modulus, 4000
    for secret in (0, 2**59):
        shares = shamir.split(torch.full((n,), secret), threshold=3, count=4, field=field)
        for pair in itertools.combinations(shares, 2):
            cells = [np.array([8 * x // p for x in prime_field(field).decode(share.words)]) for share in pair]
            counts = np.bincount(8 * cells[0] + cells[1], minlength=64)
            assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 133.6  # scipy.stats.chi2.isf(1e-6, 63)


def test_two_splits_of_one_secret_differ():
    first, second = (shamir.split(7, threshold=2, count=2) for _ in range(2))
    assert first[0].sharing.split_id != second[0].sharing.split_id
    assert first[0].words.tolist() != second[0].words.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("field", shamir.FIELDS)
def test_shares_stay_on_the_gpu(field):
    secret = torch.arange(-500, 500, device="cuda").reshape(10, 100)
    shares = shamir.split(secret, threshold=3, count=5, field=field)
    assert all(share.words.is_cuda for share in shares)
    assert torch.equal(shamir.combine(shares), secret)
    moved = [shamir.Share(share.sharing, share.index, share.words.cpu()) for share in shares[1:4]]
    assert torch.equal(shamir.combine(moved), secret.cpu())
    with pytest.raises(ShapeError, match="shares must be on one device, got cuda:0 and cpu"):
        shamir.combine([shares[0], *moved])
