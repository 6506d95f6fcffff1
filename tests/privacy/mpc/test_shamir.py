"""Shamir's sharing against polynomials on Python integers, its errors, and what too few shares tell."""

import hashlib
import inspect
import itertools
import os
import random
import re

import numpy as np
import pytest
import torch

import accelerant
from accelerant.algebra.curve import curve_of, weierstrass
from accelerant.algebra.curve.weierstrass import decode_points
from accelerant.algebra.field.field import prime_field
from accelerant.errors import (
    AccelerantError,
    ConfigError,
    FormatError,
    ProtocolError,
    ShapeError,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.privacy.mpc import pedersen, shamir
from accelerant.privacy.random import SecureStream
from refusals import assert_raises
from requirements import require_backend

SECRET = 3_141_592_653_589_793
"""A number whose digits no message may contain."""


EACH_FIELD = pytest.mark.parametrize(
    "field", [pytest.param(name, marks=[pytest.mark.slow] * (name != "goldilocks")) for name in shamir.FIELDS]
)


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
    values = [(1234 + 166 * x + 94 * x**2) % 1613 for x in range(1, 7)]
    assert values == [1494, 329, 965, 176, 1188, 775]
    assert [sum(w * values[x] for x, w in enumerate(shamir.lagrange_weights((1, 2, 3), 4, 1613))) % 1613] == values[3:4]
    for points in itertools.combinations(range(1, 7), 3):
        weights = shamir.lagrange_weights(points, 0, 1613)
        assert sum(w * values[x - 1] for w, x in zip(weights, points, strict=True)) % 1613 == 1234


@EACH_FIELD
def test_shares_are_values_of_one_polynomial(field):
    """Interpolation on Python integers gives the secret and every other share."""
    chosen, secret = prime_field(field), torch.tensor([[5, -(2**59)], [0, 1]])
    shares = shamir.split(secret, threshold=3, count=5, field=field)
    values = np.array([chosen.decode(share.words) for share in shares], object)
    for points in ((1, 2, 3), (5, 1, 4)):
        for at, wanted in [(0, secret.numpy().astype(object) % chosen.modulus), *enumerate(values, 1)]:
            weights = shamir.lagrange_weights(points, at, chosen.modulus)
            found = sum(w * values[x - 1] for w, x in zip(weights, points, strict=True)) % chosen.modulus
            assert (found == wanted).all()
    for chosen_shares in itertools.combinations(reversed(shares), 3):
        assert torch.equal(shamir.combine(chosen_shares), secret)
    assert torch.equal(shamir.combine(shares), secret)


@EACH_FIELD
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


@EACH_FIELD
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
@pytest.mark.parametrize(("arguments", "message"), [
    ({"threshold": 4}, "threshold must be an integer from 1 to 3, got 4"),
    ({"threshold": 0}, "threshold must be an integer from 1 to 3, got 0"),
    ({"threshold": True}, "threshold must be an integer from 1 to 3, got True"),
    ({"count": 2.0}, "count must be an integer from 1 to 65535, got 2.0"),
    ({"count": 0}, "count must be an integer from 1 to 65535, got 0"),
    ({"count": 2**16}, "count must be an integer from 1 to 65535, got 65536"),
    ({"field": "babybear"}, "unknown field 'babybear' for shares; known are goldilocks, "),
    ({"verifiable": True, "curve": "bn254_g2"}, "unknown curve 'bn254_g2' for shares; known are bn254_g1, "),
    ({"verifiable": True, "field": "goldilocks"}, "'goldilocks' for verifiable shares; known are bls12_381_fr"),
    ({"fraction_bits": 63}, "fraction_bits must be an integer from 0 to 62, got 63"),
])  # fmt: skip
def test_wrong_arguments_are_refused(arguments, message):
    assert_raises(ConfigError, message, lambda: shamir.split(1.5, **{"threshold": 2, "count": 3} | arguments))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_secrets_of_other_kinds_are_refused():
    with pytest.raises(UnsupportedDtype, match="the secret must be a tensor, array, number or bytes, got str"):
        shamir.split("secret", 2, 3)
    for wrong in (torch.ones(2, dtype=torch.complex64), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(UnsupportedDtype, match=f"the secret must be bytes, int8, .*, got {wrong.dtype}"):
            shamir.split(wrong, 2, 3)
    assert_raises(ShapeError, "at most 16 axes, got 17", lambda: shamir.split(torch.ones((1,) * 17), 2, 3))
    share = shamir.split(torch.tensor([1, 2]), 2, 3)[0]
    for wrong, error, message in [
        (np.ma.array([1, 2], mask=[0, 1]), UnsupportedDtype, "masked array"),
        (torch.eye(2).to_sparse(), UnsupportedCase, "a sparse_coo tensor; .*to_dense"),
        (torch.ones(2, device="meta"), UnsupportedCase, "a meta tensor"),
        (torch.nested.nested_tensor([torch.ones(2)]), UnsupportedCase, "a nested tensor"),
        (2**63, ConfigError, "an integer beyond 64 bits"),
        ([[1], [1, 2]], UnsupportedDtype, "got list"),
    ]:
        for call in (lambda: shamir.split(wrong, 2, 3), lambda: share + wrong, lambda: share * wrong):  # noqa: B023
            assert_raises(error, message, call)


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
        ({"field": "bn254_fr"}, "field", "'bn254_fr', not 'goldilocks'"),
        ({"secret": [SECRET]}, "shape", r"\(1,\), not \(\)"),
        ({"secret": 1.5}, "dtype", "'float32', not 'int64'"),
    ):
        other = shamir.split(**{"secret": SECRET, "threshold": 3, "count": 5} | argument)
        refused.append(([*shares[:2], other[2]], f"share 3 does not belong to share 1: it has {name} {value}"))
    for wrong, message in refused:
        caught = assert_raises(ProtocolError, message, shamir.combine, wrong)
        assert str(SECRET)[:8] not in str(caught)
    for index, words in ((0, shares[0].words), (6, shares[0].words), (3, shares[2].words[None])):
        with pytest.raises(ProtocolError, match=rf"share {index} of 5 with words "):
            shamir.combine([*shares[:2], shamir.Share(shares[0].sharing, index, words)])
    assert_raises(ConfigError, "wanted shares, got int", lambda: shamir.combine([*shares[:2], 3]))


@pytest.mark.parametrize("secret", [SECRET, b"0123456789", torch.arange(12.0).reshape(3, 4)])
def test_a_changed_share_is_seen_with_a_surplus(secret):
    shares = shamir.split(secret, threshold=3, count=5)
    for which in range(5):
        tampered = [changed(share) if i == which else share for i, share in enumerate(shares)]
        with pytest.raises(
            ProtocolError, match=r"share [45] is not on the polynomial of shares 1, 2, 3: one was changed"
        ):
            shamir.combine(tampered)
    wrong = shamir.Share(shares[0].sharing, 4, shares[4].words)  # another holder's share
    assert_raises(ProtocolError, "share 4 is not on the polynomial", lambda: shamir.combine([*shares[:3], wrong]))


def test_a_changed_share_is_not_seen_without_a_surplus():
    shares = shamir.split(1000, threshold=2, count=3)
    assert int(shamir.combine([changed(shares[0]), shares[1]])) == 1002  # weight 2 of share 1
    text = shamir.split(b"x", threshold=2, count=2)
    with pytest.raises(ProtocolError, match="do not combine to bytes: a share was changed"):
        shamir.combine([changed(text[0], 2**60), text[1]])
    small = shamir.split(torch.tensor([100], dtype=torch.int8), threshold=2, count=3)
    with pytest.raises(ProtocolError, match="shares of values that int8 cannot hold"):
        shamir.combine([changed(small[0], 40), small[1]])


def test_neither_repr_nor_errors_show_a_secret():
    shares = shamir.split(SECRET, threshold=2, count=3)
    digits = [str(share.words.tolist())[:6] for share in shares] + [str(SECRET)[:6]]
    texts = [repr(shares), str(shares[0]), f"{shares[0]}", repr(shares[0].sharing)]
    caught = assert_raises(AccelerantError, None, lambda: shamir.combine([changed(shares[0]), *shares[1:]]))
    texts.append(str(caught))
    with pytest.raises(ConfigError) as refused:
        shamir.split(2**63 - 1 - SECRET, threshold=2, count=2, field="goldilocks", fraction_bits=-1)
    texts.append(str(refused.value))
    assert repr(shares[1]) == "Share(2 of 3, threshold 2, int64 (), goldilocks)"
    assert not [text for text in texts for each in digits if each in text]


# --- arithmetic and refresh ------------------------------------------------------------------------------------------
@EACH_FIELD
def test_sums_and_public_factors(field):
    a, b = torch.tensor([[3, -5, 1000], [0, 2**20, -7]]), torch.tensor([[1, 2, 3], [-4, -5, -6]])
    x, y = (shamir.split(each, threshold=2, count=3, field=field) for each in (a, b))
    row = torch.tensor([1, -2, 3])
    for result, wanted in (
        ([s + t for s, t in zip(x, y, strict=True)], a + b),
        ([t - s for s, t in zip(x, y, strict=True)], b - a),
        ([-s for s in x], -a),
        ([s + 5 for s in x], a + 5),
        ([row - s for s in x], row - a),
        ([s - row.numpy() for s in x], a - row),
        ([row.numpy() * s for s in x], row * a),
        ([3 * (s * row) + t for s, t in zip(x, y, strict=True)], 3 * a * row + b),
    ):
        assert torch.equal(shamir.combine(result[1:]), wanted)
        assert torch.equal(shamir.combine(result), wanted)


def test_fractions_of_products():
    a = torch.tensor([0.5, -1.25, 3.0])
    shares = shamir.split(a, threshold=2, count=3)
    assert torch.equal(shamir.combine([share * -3 for share in shares]), -3 * a)
    halves = [share * 0.25 for share in shares]
    assert halves[0].sharing.fraction_bits == 48
    assert torch.equal(shamir.combine(halves), a / 4)
    assert torch.equal(shamir.combine([share + 0.5 for share in halves]), a / 4 + 0.5)
    for result, wanted in (
        ([2 * share + 1 for share in shares], 2 * a + 1),
        ([1 - share for share in halves], 1 - a / 4),
        ([share - torch.tensor([1, 2, -3]) for share in shares], a - torch.tensor([1, 2, -3])),
        ([np.array([0.5, 2.0, -1.0]) * share for share in shares], a * torch.tensor([0.5, 2.0, -1.0])),
        ([share * [0.5, 2.0, -1.0] for share in shares], a * torch.tensor([0.5, 2.0, -1.0])),
    ):
        assert torch.equal(shamir.combine(result), wanted)
    with pytest.raises(ConfigError, match="values must be from -32767 to 32767 in goldilocks with 48 fraction bits"):
        halves[0] + 2**15
    assert_raises(ConfigError, "a product has 48 \\+ 48 fraction bits; 62 are possible", lambda: halves[0] * 0.5)
    with pytest.raises(ConfigError, match="values must be finite and from -32768 to 32768 in goldilocks with 48"):
        halves[0] + 1e5


def test_arithmetic_that_is_not_possible():
    x, y = (shamir.split(torch.arange(3), threshold=2, count=3) for _ in range(2))
    wrong = shamir.split(torch.arange(4), threshold=2, count=3)[0]
    for other in (y[1], wrong):
        with pytest.raises(
            ProtocolError, match=r"Share\(1 of 3.* and Share.* cannot be added: wanted one holder's, alike"
        ):
            x[0] + other
    with pytest.raises(ShapeError, match=r"a public operand of shape \(2,\) for shares of shape \(3,\)"):
        x[0] * torch.tensor([1, 2])
    for share, operand in ((x[0], 1.5), (shamir.split(b"abc", 2, 2)[0], 1)):
        for operate in (lambda s, c: s + c, lambda s, c: s * c):
            with pytest.raises(ConfigError, match=f"shares of {share.sharing.dtype} take no public operand of torch"):
                operate(share, operand)


def test_shares_of_different_computations_do_not_combine():
    x, y = (shamir.split(5, threshold=2, count=2) for _ in range(2))
    for first, second in (
        (x[0] * 2, x[1] * 3), (x[0] + 2, x[1] + 3), (x[0] + y[0], x[1]), (x[0] + y[0], x[1] - y[1]), (x[0] * 1, x[1]),
    ):  # fmt: skip
        with pytest.raises(ProtocolError, match="share 2 does not belong to share 1: it has another split"):
            shamir.combine([first, second])
    assert int(shamir.combine([x[0] + y[0], y[1] + x[1]])) == 10


@pytest.mark.parametrize("secret", [torch.tensor([[1, -2], [3, 4]]), torch.tensor(0.5), b"a key of some bytes"])
def test_refreshed_shares_replace_old_ones(secret):
    old = shamir.split(secret, threshold=3, count=4)
    new = shamir.refresh(old)
    wanted = shamir.combine(old)
    again = shamir.combine(shamir.refresh(new[:3]))
    assert again == wanted if isinstance(secret, bytes) else torch.equal(again, wanted)
    assert all(not torch.equal(s.words, t.words) for s, t in zip(old, new, strict=True))
    for mixed in ([*old[:2], new[2]], [old[0], *new[1:]]):
        assert_raises(ProtocolError, "it has another split", shamir.combine, mixed)
    assert_raises(ProtocolError, "refreshing needs 3 shares, got 2", lambda: shamir.refresh(old[:2]))


def test_every_split_and_refresh_is_another():
    """Shares of two of them are never taken together."""
    sharing = shamir.split(7, 2, 3)[0].sharing
    splits = [shamir.split(7, 2, 3)[0], *(shamir.zero_shares(sharing)[0] for _ in "abc")]
    ids = {sharing.split_id, *(share.sharing.split_id for share in splits)}
    assert len(ids) == 5
    assert {len(each) for each in ids} == {16}


@pytest.mark.slow
def test_holders_refresh_without_a_dealer():
    """Each deals shares of zero; what one of them misses makes its share foreign."""
    old = shamir.split(12345, threshold=2, count=3, verifiable=True, curve="bn254_g1")
    dealt = [shamir.zero_shares(old[0].sharing) for _ in old]
    for updates in dealt:
        assert all(update.verify(update.commitments) for update in updates)
        assert not updates[0].commitments[0].any()
    new = [share + sum((updates[i] for updates in dealt[1:]), dealt[0][i]) for i, share in enumerate(old)]
    assert int(shamir.combine(new[1:])) == 12345
    assert_raises(ProtocolError, "another split", lambda: shamir.combine([new[0], old[1] + dealt[0][1]]))


# --- verifiable shares -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["bn254_g1", pytest.param("bls12_381_g1", marks=pytest.mark.slow)])
def test_commitments_are_pedersens(name):
    """C_k = f_k g + f'_k h on Python integers, with f and f' interpolated from the shares."""
    curve, secret = curve_of(name), torch.tensor([7, -9])
    field = prime_field(curve.scalars.name)
    shares = shamir.split(secret, threshold=2, count=3, verifiable=True, curve=name)
    points = decode_points(curve, shares[0].commitments.numpy().reshape(-1, *curve.shape))
    h, p = pedersen.second_generator(name), field.modulus
    assert curve.is_on_curve(h)
    assert weierstrass.in_subgroup(curve, h)
    values = np.array([field.decode(share.words) for share in shares[:2]], object)  # of f and f' at 1 and 2
    slope = values[1] - values[0]
    for k, coefficients in enumerate(((values[0] - slope) % p, slope % p)):
        for i in range(2):
            pairs = zip(coefficients[:, i], (curve.generator, h), strict=True)
            terms = [weierstrass.multiply(curve, int(scalar), point) for scalar, point in pairs]
            assert points[2 * k + i] == weierstrass.add(curve, *terms)
    assert all(share.verify(shares[1].commitments) for share in shares)
    assert torch.equal(shamir.combine(shares[1:]), secret)


def test_commitments_hide_a_secret_of_few_bits(monkeypatch):
    """They are blinded, freshly, by uniform b h: of a PIN of 4 digits no commitment is that of Feldman, s g."""
    assert inspect.signature(shamir.split).parameters["curve"].default == "bls12_381_g1"  # of about 120 bits
    curve = curve_of("bn254_g1")
    splits = [shamir.split(7, 2, 2, verifiable=True, curve="bn254_g1") for _ in "ab"]
    points = [decode_points(curve, s[0].commitments.numpy().reshape(-1, *curve.shape)) for s in splits]
    assert len({*points[0], *points[1]}) == 4
    assert weierstrass.multiply(curve, 7, curve.generator) not in (points[0][0], points[1][0])
    blindings = [prime_field("bn254_fr").decode(shamir.opened(shares)[0])[1] for shares in splits]
    assert len({*blindings}) == 2
    assert min(blindings) > 2**190
    asked, real = [], pedersen.launch.first_off
    monkeypatch.setattr(pedersen.launch, "first_off", lambda *args: asked.append(args[2]) or real(*args))
    shamir.Share.from_bytes(splits[0][0].to_bytes())
    assert asked == ["off_curve", "off_subgroup"]


@pytest.mark.parametrize("name", ["bn254_g1", "bls12_381_g1"])
def test_nobody_knows_the_logarithm_of_h(name):
    """h is what the docstring says: the first point of SHA-512 of a text that names the curve, times the cofactor."""
    curve = curve_of(name)
    q = curve.coordinates.base.modulus
    for counter in range(64):
        x = int.from_bytes(hashlib.sha512(f"accelerant pedersen h {name} {counter}".encode()).digest(), "big") % q
        square = (x**3 + {"bn254_g1": 3, "bls12_381_g1": 4}[name]) % q
        y = pow(square, (q + 1) // 4, q)
        if y * y % q == square:
            break
    assert pedersen.second_generator(name) == weierstrass.multiply(curve, curve.cofactor, (x, min(y, q - y)))


def test_a_changed_verifiable_share_is_named():
    shares = shamir.split(b"a seed of 32 bytes and no more..", threshold=2, count=3, verifiable=True, curve="bn254_g1")
    bad = shamir.Share(shares[1].sharing, 2, changed(shares[1]).words, shares[1].commitments)
    blinded = shares[1].words.clone()
    blinded[1] = blinded[0]
    commitments = shares[0].commitments
    assert not bad.verify(commitments)
    for wrong in (
        bad,
        shamir.Share(bad.sharing, 2, blinded, commitments),
        shamir.Share(bad.sharing, 2, shares[2].words),
    ):
        with pytest.raises(ProtocolError, match="share 2 does not match the commitments: it was changed"):
            shamir.combine([shares[0], wrong])
        with pytest.raises(ProtocolError, match="share 2 does not match the commitments: it was changed"):
            shamir.combine([wrong, shares[0]], commitments)
    foreign = shamir.split(b"a seed of 32 bytes and no more..", 2, 3, verifiable=True, curve="bn254_g1")[0].commitments
    assert not shares[0].verify(foreign)
    assert not shares[0].verify(commitments[:1])
    assert_raises(ProtocolError, "share 1 does not match the commitments", shamir.combine, shares, foreign)
    with pytest.raises(ConfigError, match="a plain share cannot be verified: split with verifiable=True"):
        shamir.split(1, 2, 3)[0].verify(commitments)


def test_results_of_verifiable_shares_are_verifiable():
    a, b = torch.tensor([3.5, -4.0]), torch.tensor([1.0, 2.0])
    x, y = (shamir.split(each, threshold=2, count=3, verifiable=True, curve="bn254_g1") for each in (a, b))
    result = [torch.tensor([2, -3]) * (s - t) + 0.5 for s, t in zip(x, y, strict=True)]
    assert all(share.verify(result[0].commitments) for share in result)
    assert torch.equal(shamir.combine(result), torch.tensor([2, -3]) * (a - b) + 0.5)
    assert shamir.combine(shamir.split(torch.zeros(0), 2, 2, verifiable=True, curve="bn254_g1")).shape == (0,)


# --- bytes -----------------------------------------------------------------------------------------------------------
def serialized():
    yield from shamir.split(torch.tensor([[1.5, -2.0, 3.0]]), threshold=2, count=3, field="mersenne61")
    yield shamir.split(b"some bytes", threshold=3, count=300)[299]
    yield shamir.split(torch.zeros(0, 4), threshold=1, count=1, field="bn254_fr")[0]
    yield shamir.split(-5, threshold=2, count=2, verifiable=True, curve="bn254_g1")[1]


def test_shares_come_back_from_bytes():
    for share in serialized():
        back = shamir.Share.from_bytes(share.to_bytes())
        assert back.sharing == share.sharing
        assert back.index == share.index
        assert torch.equal(back.words, share.words)
        assert (back.commitments is None) == (share.commitments is None)
        assert back.to_bytes() == share.to_bytes()
    shares = [shamir.Share.from_bytes(share.to_bytes()) for share in shamir.split(b"abc", 2, 3)]
    assert shamir.combine(shares) == b"abc"


def test_the_layout_of_a_share():
    """Version 1: magic, nine 16-bit numbers, the split's id, axes, words; little-endian."""
    share = next(serialized())
    data = share.to_bytes()
    assert data[:8] == b"ACSHARE\0"
    assert np.frombuffer(data[8:26], "<u2").tolist() == [1, 1, 8, 0, 2, 3, 1, 24, 2]
    assert data[26:42] == share.sharing.split_id
    assert np.frombuffer(data[42:], "<u8").tolist() == [1, 3, *share.words.reshape(-1).tolist()]


def test_bytes_that_are_no_share_are_refused():
    data, verifiable = next(serialized()).to_bytes(), [*serialized()][-1].to_bytes()

    def patched(at, value, size=2, of=data):
        return of[:at] + value.to_bytes(size, "little") + of[at + size :]

    for wrong, message in (
        (b"", "not a share: wanted .* got 0 bytes"),
        (b"x" * 100, "not a share: wanted"),
        (data[:41], "not a share: .* 42 bytes of header, got 41 bytes"),
        (patched(8, 2), "a share of version 2; this program reads version 1"),
        (patched(10, 4), r"unknown codes of field, dtype and curve: \[4, 8, 0\]"),
        (patched(12, 10), "unknown codes"),
        (patched(14, 3), "unknown codes"),
        (patched(14, 1), "a share of float32, .* mersenne61, bn254_g1"),
        (patched(16, 4), "index 1, threshold 4, count 3 and 2 axes"),
        (patched(16, 0), "index 1, threshold 0"),
        (patched(20, 0), "index 0, threshold 2"),
        (patched(20, 4), "index 4, threshold 2"),
        (patched(22, 63), "63 fraction bits"),
        (patched(12, 4), "a share of int64, 2 axes, 24 fraction bits"),
        (patched(24, 17), "and 17 axes"),
        (patched(24, 16), "and 16 axes"),
        (patched(12, 0), "a share of bytes, 2 axes"),
        (patched(42, 2**62, 8), "a share of float32, 2 axes"),
        (patched(42, 2**40, 8), "whose 24 bytes are not the elements of its shape"),
        (data + b"0", "whose 25 bytes"),
        (data[:-1], "whose 23 bytes"),
        (patched(66, 2**61 - 1, 8), r"element 1 \(flattened\) of a share is not below the modulus of mersenne61"),
        (
            patched(len(verifiable) - 8, 5, 8, verifiable),
            r"commitments\[1\] \(flattened\) is not in the subgroup of bn254_g1",
        ),
        (
            patched(len(verifiable) - 8, 2**64 - 1, 8, verifiable),
            "coordinate 3 of the commitments is not below the modulus",
        ),
    ):
        assert_raises(FormatError, message, shamir.Share.from_bytes, wrong)


@pytest.mark.search(1)
def test_shares_of_strangers(rng, record_property):
    """A damaged share is FormatError, or a share that serializes to the same bytes; no element is in the message."""
    seeds = [share.to_bytes() for share in serialized()]
    refused = 0
    for _ in range(60):
        data = rng.choice(seeds)
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 4)):
            kind, at = rng.randrange(5), rng.randrange(len(damaged) + 1)
            at = min(at, 58) if rng.random() < 0.7 else at  # the header more often
            if kind == 0:
                del damaged[at:]
            elif kind == 1:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
            elif kind == 2:
                del damaged[at : at + rng.randrange(1, 9)]
            elif at < len(damaged):
                damaged[at] = rng.choice((0, 1, 127, 255, rng.randrange(256)))
        try:
            assert shamir.Share.from_bytes(bytes(damaged)).to_bytes() == damaged
        except FormatError as error:
            refused += 1
            message = str(error)
            assert not re.search("[0-9a-f]{12}", message), message
    record_property("shares", 60)
    record_property("refused", refused)


# --- randomness ------------------------------------------------------------------------------------------------------
@EACH_FIELD
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
    values = prime_field(field).decode(shamir.uniform(parameters, 5, torch.device("cpu")))
    assert values[0] == p - 1
    assert values[3] == 0
    assert calls[1] == 3 * 2 * limbs
    assert all(0 <= value < p for value in values)
    assert len(set(values)) == 5


@pytest.mark.parametrize("field", ["goldilocks", pytest.param("bn254_fr", marks=pytest.mark.slow)])
def test_fewer_shares_than_the_threshold_look_uniform(field, fixed_shares):
    """Chi-square of 4,000 splits of each of two secrets in 8 x 8 cells of two shares, at level 1e-6, 63 degrees."""
    p, n = prime_field(field).modulus, 4000
    for secret in (0, 2**59):
        shares = shamir.split(torch.full((n,), secret), threshold=3, count=4, field=field)
        for pair in itertools.combinations(shares, 2):
            cells = [np.array([8 * x // p for x in prime_field(field).decode(share.words)]) for share in pair]
            counts = np.bincount(8 * cells[0] + cells[1], minlength=64)
            assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 133.6  # scipy.stats.chi2.isf(1e-6, 63)


@pytest.mark.slow  # drivers compile kernels
@pytest.mark.sample(5)  # the arithmetic of each field and device is tested in algebra/field
@pytest.mark.parametrize("field", shamir.FIELDS)
@pytest.mark.parametrize("device", ["opencl", "webgpu"])
def test_shares_computed_on_opencl_and_webgpu_are_the_cpus_bit_for_bit(device, field, monkeypatch):
    require_backend(device)
    secret, dealt = torch.arange(-500, 500).reshape(10, 100), {}
    for where in (device, "cpu"):
        monkeypatch.setattr(os, "urandom", random.Random(0).randbytes)
        monkeypatch.setattr(shamir, "_stream", SecureStream())
        accelerant.ledger().reset()
        shares = shamir.split(secret, threshold=3, count=5, field=field, device=where)
        shares += [
            share + zero for share, zero in zip(shares, shamir.zero_shares(shares[0].sharing, where), strict=True)
        ]
        dealt[where] = [share.to_bytes() for share in shares]
        on_device = {row.op for row in accelerant.ledger().records() if row.device.startswith(device)}
        assert on_device == ({"field_add", "field_mul", "field_from_montgomery"} if where == device else set())
    assert dealt[device] == dealt["cpu"]
    for several in (shares[:5], shares[5:]):
        assert torch.equal(shamir.combine(several, device=device), secret)
    bad = [changed(shares[0]), *shares[1:4]]
    assert_raises(ProtocolError, "one was changed", lambda: shamir.combine(bad, device=device))


@pytest.mark.slow
def test_a_tensor_of_opencl_is_shared_there():
    require_backend("opencl")
    secret = accelerant.to(torch.tensor([0.5, -3.0]), "opencl")
    accelerant.ledger().reset()
    shares = shamir.split(secret, threshold=2, count=3)
    assert any(row.op == "field_mul" and row.device == "opencl:0" for row in accelerant.ledger().records())
    assert torch.equal(shamir.combine([2 * share + secret for share in shares[1:]]), torch.tensor([1.5, -9.0]))
    assert shamir.combine(shamir.split(b"a key", 2, 3, device="opencl")[1:], device="opencl:0") == b"a key"
    signed = shamir.split(secret, 2, 3, verifiable=True, curve="bn254_g1")
    assert all(share.verify(signed[0].commitments) for share in signed)
    assert_raises(ConfigError, "unknown backend 'opncl'", shamir.split, 3, 2, 3, device="opncl")


@pytest.mark.gpu
@pytest.mark.parametrize("field", shamir.FIELDS)
def test_shares_stay_on_the_gpu(field):
    secret = torch.arange(-500, 500, device="cuda").reshape(10, 100)
    shares = shamir.split(secret, threshold=3, count=5, field=field)
    assert all(share.words.is_cuda for share in shares)
    assert torch.equal(shamir.combine(shares), secret)
    assert torch.equal(shamir.combine(shamir.refresh([3 * share + secret - share for share in shares])), 3 * secret)
    moved = [shamir.Share.from_bytes(share.to_bytes()) for share in shares[1:4]]
    assert torch.equal(shamir.combine(moved), secret.cpu())
    with pytest.raises(ShapeError, match="shares must be on one device, got cuda:0 and cpu"):
        shamir.combine([shares[0], *moved])


@pytest.mark.gpu
def test_verifiable_shares_on_the_gpu():
    secret = torch.tensor([0.5, -3.0], device="cuda")
    shares = [2 * share + 1 for share in shamir.split(secret, 2, 3, verifiable=True, curve="bn254_g1")]
    assert all(share.verify(shares[0].commitments) for share in shares)
    assert torch.equal(shamir.combine(shares[1:]), 2 * secret + 1)
    bad = shamir.Share(shares[0].sharing, 1, shares[1].words, shares[0].commitments)
    assert_raises(ProtocolError, "share 1 does not match the commitments", lambda: shamir.combine([bad, *shares[1:]]))
