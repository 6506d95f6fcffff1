"""Paillier against Python integers, phe, and plain arithmetic; its bounds, its messages, and what they do not tell."""

import copy
import hashlib
import inspect
import io
import itertools
import math
import operator
import os
import pickle
import re
import secrets
import stat
import sys
import types

import numpy as np
import pytest
import torch

from accelerant.algebra.bigint import residues_of
from accelerant.errors import (
    AccelerantError,
    ConfigError,
    FormatError,
    RangeError,
    ShapeError,
    UnsupportedCase,
    UnsupportedDtype,
)
from accelerant.privacy import he
from accelerant.privacy.he import encoding, paillier
from accelerant.privacy.he.paillier import EncryptedTensor, PrivateKey, PublicKey, keygen
from refusals import assert_raises
from requirements import require_backend, require_module


@pytest.fixture(scope="module")
def keys():
    require_module("gmpy2", "privacy")
    return keygen(1024, insecure=True)


@pytest.fixture
def public(keys):
    return keys[0]


@pytest.fixture
def private(keys):
    return keys[1]


def assert_shows_nothing(text, private):
    """No run of twelve digits, decimal or hexadecimal, of a private number."""
    numbers = (private.p, private.q, (private.p - 1) * (private.q - 1))
    secret = "".join(f"{n} {n:x} " for n in numbers)
    for run in re.findall(r"[0-9a-fA-F]{12,}", text):
        for at in range(len(run) - 11):
            assert run[at : at + 12].lower() not in secret


# --- the scheme ------------------------------------------------------------------------------------------------------
def test_known_answer():
    private = PrivateKey(1000003, 1000033, insecure=True)
    public, m, r = private.public, 123456789, 987654321
    c = public._plain([m], residues_of([r], public.n_square).space)
    c = c.times(residues_of([r], public.n_square).power([public.n]))
    assert c.ints() == [687491236425761097824740]
    assert private.decrypt(public.from_ints(687491236425761097824740, limit=m)) == m


def test_the_smallest_key_reads_every_plaintext():
    private = PrivateKey(11, 17, insecure=True)
    n = private.public.n
    for m in range(-(n // 3) + 1, n // 3):
        for r in (1, 2, n - 1):
            c = (1 + m * n) * pow(r, n, n * n) % (n * n)
            assert private.decrypt(private.public.from_ints(c)) == m
    for m in (n // 3, n // 2, n - n // 3):
        assert_raises(RangeError, "beyond n/3", private.decrypt, private.public.from_ints((1 + m * n) % (n * n)))


DTYPES = ["int8", "int16", "int32", "int64", "uint8", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_come_back_exactly(keys, dtype):
    public, private = keys
    kind = getattr(torch, dtype)
    info = torch.finfo(kind) if kind.is_floating_point else torch.iinfo(kind)
    x = torch.tensor([[info.min, info.max, 0], [1, 2, 3]], dtype=kind)
    if dtype == "float64":
        x[0] = torch.tensor([-1e9 / 3, math.pi, -0.1])  # 2^1024 needs a key of 2048 bits
    limit = 1e10 if dtype == "float64" else None
    for c in (
        public.encrypt(x, limit=limit),
        private.encrypt(x, limit=limit),
        public.encrypt(x, limit=limit, fast=True),
    ):
        y = private.decrypt(c)
        assert y.dtype == kind
        assert torch.equal(y, x)


def test_numpy_has_no_bfloat16(keys):
    public, private = keys
    encrypted = public.encrypt(np.array([1.5], np.float32))
    assert_raises(UnsupportedDtype, "NumPy has no bfloat16", private.decrypt, encrypted, dtype="bfloat16")


def test_small_floats_are_rounded_to_the_precision(keys):
    public, private = keys
    x = np.array([2.0**-70, -(2.0**-60), 1e-300, 1 + 2**-20], np.float32)
    y = private.decrypt(public.encrypt(x))
    assert np.abs(y - x).max() <= 2.0**-65
    assert private.decrypt(public.encrypt(np.array([0.3, -0.3]), exponent=-1, limit=1)).tolist() == [0.3125, -0.3125]


def test_two_encryptions_differ_and_modes_decrypt_alike(keys):
    public, private = keys
    x = torch.zeros(4)
    ciphertexts = [
        c
        for _ in range(2)
        for t in (public.encrypt(x), private.encrypt(x), public.encrypt(x, fast=True))
        for c in t.to_ints()
    ]
    assert len(set(ciphertexts)) == 24


@pytest.fixture
def drawn(monkeypatch):
    """What Paillier asks of the operating system's randomness: bound and number, or count and bytes."""
    found = []

    def spied(draw):
        def spy(size):
            found.append((size, draw(size)))
            return found[-1][1]

        return spy

    for name in ("randbelow", "token_bytes"):
        monkeypatch.setattr(secrets, name, spied(getattr(secrets, name)))
    return found


def test_masks_are_of_the_whole_group(keys, drawn):
    """Encryptions are (1 + m n) r^n mod n^2 of r from 1 to n - 1; with the key r is given modulo p and q."""
    public, private = keys
    n, square = public.n, public.n**2
    x = [5, -6, 7]
    assert public.encrypt(x).to_ints() == [
        (1 + m * n) * pow(r + 1, n, square) % square for m, (_, r) in zip(x, drawn, strict=True)
    ]
    assert {bound for bound, _ in drawn} == {n - 1}
    drawn.clear()
    found = private.encrypt(x).to_ints()
    assert [bound for bound, _ in drawn] == [private.p - 1] * 3 + [private.q - 1] * 3
    for prime, numbers in ((private.p, drawn[:3]), (private.q, drawn[3:])):
        residues = [(1 + m * n) * pow(r + 1, prime, prime**2) % prime**2 for m, (_, r) in zip(x, numbers, strict=True)]
        assert [c % prime**2 for c in found] == residues


def test_fast_masks_are_powers_of_a_known_base(keys, drawn):
    """h is -x^2 of SHAKE-256 of n, so that its powers are residues of symbol 1; exponents have half of n's bits."""
    public, _ = keys
    n, square = public.n, public.n**2
    size = (n.bit_length() + 7) // 8
    x = int.from_bytes(hashlib.shake_256(b"accelerant Paillier h" + n.to_bytes(size, "big")).digest(size + 16), "big")
    h = pow(-(x**2) % n, n, square)
    found = public.encrypt([3, -4], fast=True).to_ints()
    ((count, data),) = drawn
    assert count == len(data) == 2 * 64  # of 1024 bits
    exponents = [int.from_bytes(data[at : at + 64], "little") for at in (0, 64)]
    assert found == [(1 + m * n) * pow(h, a, square) % square for m, a in zip((3, -4), exponents, strict=True)]


def test_strengths(monkeypatch, drawn):
    """Defaults and constants on which security rests: key sizes, the derivation of passphrases, fresh salts."""
    defaults = {name: each.default for name, each in inspect.signature(keygen).parameters.items()}
    assert defaults == {"bits": 3072, "insecure": False}
    assert (paillier.BITS_LEAST, paillier.BITS_MOST) == (2048, 8192)
    for call in (PublicKey, PrivateKey, PublicKey.from_bytes, PrivateKey.from_bytes, PrivateKey.load):
        assert inspect.signature(call).parameters["insecure"].default is False
    options = inspect.signature(PublicKey.encrypt).parameters
    assert not any(options[name].default for name in ("fast", "pack"))
    from cryptography.hazmat.primitives.kdf import scrypt

    asked, real = [], scrypt.Scrypt
    monkeypatch.setattr(scrypt, "Scrypt", lambda salt, **cost: asked.append((salt, cost)) or real(salt, **cost))
    data = encoding.sealed(b"a head--", b"secret", "a word")
    assert [size for size, _ in drawn] == [16, 12]
    assert asked == [(drawn[0][1], {"length": 32, "n": 2**16, "r": 8, "p": 1})]
    assert data[:36] == b"a head--" + drawn[0][1] + drawn[1][1]
    assert len(data) == 36 + len(b"secret") + 16


@pytest.mark.slow
def test_keygen_of_2048_bits():
    public, private = keygen(2048)
    assert public.n.bit_length() == 2048
    assert private.p % 4 == private.q % 4 == 3
    assert math.gcd(private.p - 1, private.q - 1) == 2
    assert public.blum
    x = torch.tensor([1e300, -1.5], dtype=torch.float64)
    assert torch.equal(private.decrypt(public.encrypt(x)), x)
    assert_raises(ConfigError, "even number of bits", keygen, 1024)


@pytest.mark.parametrize("bits", [0, 1024, 2047, 2049, 8194])
def test_other_sizes_of_keys_are_refused(bits):
    assert_raises(ConfigError, f"from 2048 to 8192, got {bits}", keygen, bits)


def test_primes_are_checked(private):
    p, q = private.p, private.q
    for bad, match in [
        ((p, p), "different"), ((p, 3 * q), "not a prime"), ((2, q), "different odd"), ((3, 7), "divide"),
        ((-p, q), "odd"),
    ]:  # fmt: skip
        error = assert_raises(FormatError, match, PrivateKey, *bad, insecure=True)
        assert_shows_nothing(str(error), private)
    assert_raises(FormatError, "of as many bits", PrivateKey, 3, q)
    assert_raises(FormatError, "of 1024 bits", PrivateKey, p, q)
    for n in (0, -5, 16, 2**64):
        assert_raises(FormatError, "n must be odd", PublicKey, n, insecure=True)


# --- arithmetic ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_arithmetic_equals_plain_arithmetic(private, kind):
    rng = np.random.default_rng(0)
    x, y, w = rng.integers(-99, 99, (2, 3)), rng.integers(-99, 99, 3), rng.integers(-9, 9, (3, 2))
    v = rng.integers(-9, 9, 3)
    if kind == "torch":
        x, y, w, v = map(torch.from_numpy, (x, y, w, v))
    a, b = private.encrypt(x), private.encrypt(y)
    for found, wanted in [
        (a + b, x + y), (a - b, x - y), (b - a, y - x), (-a, -x), (a + 3, x + 3), (3 - a, 3 - x), (a - y, x - y),
        (a * 5, x * 5), (-2 * a, -2 * x), (a * y, x * y), (a * 0, x * 0), (a * 0.5, x * 0.5), (a / 4, x / 4),
        (a @ w, x @ w), (a @ v, x @ v), (a.sum(), x.sum()), (a.sum(0), x.sum(0)), (a.sum(-1), x.sum(1)), (a[1], x[1]),
        (a[:, ::2], x[:, ::2]), (a.reshape(3, 2), x.reshape(3, 2)), (a.reshape(-1) * 2 + 1, x.reshape(-1) * 2 + 1),
        (a * 2.5 + b * 0.125 - 7, x * 2.5 + y * 0.125 - 7),
    ]:  # fmt: skip
        answer = private.decrypt(found)
        assert tuple(answer.shape) == tuple(wanted.shape)
        assert (answer == wanted).all(), (found, answer, wanted)
        assert not answer.shape or type(answer) is type(x)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (1,), (2, 1), ()])
def test_operands_broadcast_as_numpys(private, shape):
    """+ - * from both sides, with numbers, lists, NumPy and torch arrays, ciphertexts: NumPy's result or an error."""
    x = np.arange(1, math.prod(shape) + 1).reshape(shape)
    c = private.encrypt(x)
    for operand in (
        2, np.int64(-3), np.array(2), [2], np.array([2]), np.array([1, -2, 3]), np.array([[1], [-2]]), np.array([1, 2]),
        np.arange(6, dtype=np.uint8).reshape(2, 1, 3), np.zeros(0, int), np.ones((3, 1), int),
    ):  # fmt: skip
        plain = np.asarray(operand)
        forms = [operand, private.encrypt(plain), *([torch.from_numpy(plain)] if plain is operand else [])]
        for form, op in itertools.product(forms, (operator.add, operator.sub, operator.mul)):
            if op is operator.mul and isinstance(form, EncryptedTensor):
                continue
            try:
                wanted = op(x, plain.astype(int)), op(plain.astype(int), x)
            except ValueError:
                assert_raises(ShapeError, "do not broadcast", op, c, form)
                continue
            for found, each in zip((op(c, form), op(form, c)), wanted, strict=True):
                values = private.decrypt(found)
                assert np.shape(values) == each.shape == found.shape
                assert (np.asarray(values) == each).all(), (operand, op)


def test_exponents_are_aligned(keys):
    public, private = keys
    x, y = public.encrypt(np.array([1.5, -2.25]), exponent=-2, limit=10), public.encrypt(np.array([3, 4]))
    assert ((x + y).exponent, (y - x).exponent) == (-2, -2)
    assert private.decrypt(x + y).tolist() == [4.5, 1.75]
    z = x * 0.5
    assert z.exponent == -3
    assert private.decrypt(z + x).tolist() == [2.25, -3.375]
    assert (x * 16.0).exponent == -2  # the number's exponent is the highest that is exact


def test_empty_and_single_tensors(keys):
    public, private = keys
    empty = public.encrypt(torch.zeros(0, 3))
    assert private.decrypt(empty * 2 + empty).shape == (0, 3)
    assert private.decrypt(EncryptedTensor.from_bytes(empty.to_bytes(), public)).shape == (0, 3)
    assert_raises(ShapeError, "at least one term", empty.sum, 0)
    assert private.decrypt(public.encrypt(2.5, limit=10)) == 2.5
    assert_raises(ShapeError, "no length", lambda: len(public.encrypt(1)))
    assert len(public.encrypt([1, 2])) == 2


def test_an_overflow_is_an_error_and_never_wraps(keys):
    public, private = keys
    top = public.max_int
    c = public.from_ints(public.encrypt(1).to_ints(), limit=top)
    for operation in (
        lambda: c + 1,
        lambda: c + c,
        lambda: c * 2,
        lambda: c * 0.5 + 0.5,
        lambda: public.encrypt([1, 1]) * 2**1000,
    ):
        assert_raises(RangeError, "smaller limit", operation)
    for m in (top, -top):
        big = public._plain([m], paillier.HOST).ints()[0] % public.n**2
        assert private._signed(residues_of([big], public.n_square)) == [m]
        assert_raises(RangeError, "does not fit int64", private.decrypt, public.from_ints(big))
    hidden = public._plain([top + 1], paillier.HOST).ints()[0] % public.n**2
    assert_raises(RangeError, "overflowed elsewhere", lambda: private.decrypt(public.from_ints(hidden)))
    with pytest.raises(RangeError, match="does not fit int8"):
        private.decrypt(public.encrypt(np.array([100], np.int8)) + np.array([100], np.int8))
    with pytest.raises(RangeError, match="larger key"):
        public.encrypt(np.array([1.0]))  # any float64, at 1024 bits
    assert_raises(RangeError, "does not fit float32", private.decrypt, public.encrypt(np.array([3e38], np.float32)) * 2)


def test_values_that_cannot_be_encrypted(public):
    for x, match in [([1.0, math.nan], "index 1 is not finite"), ([[1.0], [math.inf]], "index 1 is not finite")]:
        assert_raises(RangeError, match, public.encrypt, np.array(x), limit=2)
    with pytest.raises(RangeError, match="flat index 2 is beyond the limit") as error:
        public.encrypt(np.array([1, 2, 123456789]), limit=10)
    assert "123456789" not in str(error.value)
    for x in (True, np.zeros(1, complex), torch.zeros(1, dtype=torch.bool), "text", [None], np.ma.ones(2)):
        assert_raises(UnsupportedDtype, None, public.encrypt, x)
    for x, message in [
        (torch.eye(2).to_sparse(), "a sparse_coo tensor"), (torch.ones(2, device="meta"), "a meta tensor"),
    ]:  # fmt: skip
        assert_raises(UnsupportedCase, message, public.encrypt, x)
    assert_raises(UnsupportedDtype, "nested lists of equal lengths", public.encrypt, [[1], [2, 3]])
    assert public.encrypt(torch.tensor([1 + 2j]).conj().imag).shape == (1,)  # a view with the negative bit
    for options in (
        {"exponent": 1},
        {"exponent": -2000},
        {"limit": -1},
        {"limit": math.nan},
        {"limit": "1"},
        {"exponent": 0.5},
    ):
        assert_raises(ConfigError, None, public.encrypt, [1], **options)


def test_refused_operands(private):
    other = PrivateKey(11, 17, insecure=True).public.from_ints(1)
    c = private.encrypt(torch.ones(2, 3))
    assert_raises(FormatError, "encrypted for", lambda: c + other)
    assert_raises(FormatError, "the key is of", private.decrypt, other)
    assert_raises(UnsupportedCase, "bfv multiplies ciphertexts", lambda: c * c)
    assert_raises(UnsupportedCase, r"Paillier takes plain arrays, got EncryptedTensor", c.public.encrypt, c)
    assert_raises(ConfigError, "wanted an EncryptedTensor, got ndarray", private.decrypt, np.ones(3))
    for operation in (
        lambda: c + torch.ones(2),
        lambda: c @ torch.ones(2, 2),
        lambda: c.sum(2),
        lambda: c[5],
        lambda: c.reshape(4),
    ):
        assert_raises(ShapeError, None, operation)
    assert_raises(RangeError, "not finite", lambda: c * math.nan)
    assert_raises(UnsupportedDtype, None, private.decrypt, c, dtype="complex64")


def test_no_result_is_fresh(keys):
    """A result would show its plain operand, or of which ciphertexts it is the product: so it leaves with new masks."""
    public, _ = keys
    a, b, square = public.encrypt([7, 8]), public.encrypt([1, 2]), public.n**2
    assert (a + b).to_ints()[0] != a.to_ints()[0] * b.to_ints()[0] % square
    results = [
        a + b, a - b, a + 1, 1 + a, a - 1, 1 - a, -a, a * 2, 2 * a, a * [2, 3], a * [[2], [3]], a / 2, a @ [1, 1],
        a.sum(), a + 0.5, a._at_exponent(-1), a + public.encrypt([[1], [2]]), a[[0, 0]], a.reshape(2, 1) + b,
        public.encrypt([1, 2], pack=True) + public.encrypt([1, 2], pack=True),
    ]  # fmt: skip
    for result in results:
        assert not result.fresh
        data = result.to_bytes()
        assert data != result.to_bytes(rerandomize=False)
        assert not EncryptedTensor.from_bytes(data, public).fresh
    for same in (a[::-1], a[0], a.reshape(2, 1), a.to("cpu"), (a + b).rerandomize()):
        assert same.fresh


def test_results_are_rerandomised_before_they_leave(keys):
    public, private = keys
    c = public.encrypt([7, 8])
    assert c.fresh
    assert c.to_ints() == c.to_ints()
    d = c * 1 + 0
    assert not d.fresh
    assert d.to_ints() != d.to_ints()
    assert d.to_ints(rerandomize=False) == c.to_ints()
    assert not c[[0, 0]].fresh  # one ciphertext twice
    assert c[::-1].fresh
    for one in (d.rerandomize(), d.rerandomize(fast=True), EncryptedTensor.from_bytes(d.to_bytes(), public)):
        assert private.decrypt(one).tolist() == [7, 8]
        assert not set(one.to_ints()) & set(c.to_ints())


# --- packed ----------------------------------------------------------------------------------------------------------
def test_packed(keys):
    public, private = keys
    slots = public.slots
    assert PublicKey(2**2047 + 1).slots == 66
    rng = np.random.default_rng(0)
    x = rng.integers(-(2**23), 2**23, (3, slots), endpoint=True)
    x[0, :2] = 2**23, -(2**23)
    c = public.encrypt(x, pack=True)
    assert len(c.residues) == 3
    assert (private.decrypt(c) == x).all()
    total = c
    for _ in range(126):
        total = total + c
    assert (private.decrypt(total) == 127 * x).all()
    assert_raises(RangeError, "of a slot", lambda: total + c)
    assert (private.decrypt(c * -3 + 5 - x) == -4 * x + 5).all()
    assert (private.decrypt(c.reshape(-1) - 1) == x.reshape(-1) - 1).all()
    again = EncryptedTensor.from_bytes((-c).to_bytes(), public)
    assert (private.decrypt(again) == -x).all()
    small = public.encrypt(torch.tensor([0.5, -1.25]), pack=True, exponent=-2)
    assert private.decrypt(small + 0.25).tolist() == [0.75, -1.0]


def test_what_packed_tensors_refuse(public):
    c = public.encrypt([1, 2, 3], pack=True)
    for operation in (
        lambda: c * [1, 2, 3], lambda: c * 0.5, lambda: c[0], c.sum, c.to_ints, lambda: c + public.encrypt([1, 2, 3]),
        lambda: c @ [1, 2, 3], lambda: c + 0.5, lambda: c + np.ones((2, 3), int),
    ):  # fmt: skip
        assert_raises(UnsupportedCase, r"packed", operation)
    assert_raises(RangeError, "flat index 1", public.encrypt, [1, 2**23 + 1], pack=True)
    assert_raises(ConfigError, "need an exponent", public.encrypt, [0.5], pack=True)
    assert_raises(ConfigError, "24 bits", public.encrypt, [1], pack=True, limit=2**24)


# --- phe -------------------------------------------------------------------------------------------------------------
def test_phe_reads_ours_and_the_reverse(keys):
    require_module("phe")
    import phe

    public, private = keys
    theirs = phe.PaillierPublicKey(public.n)
    reader = phe.PaillierPrivateKey(theirs, private.p, private.q)
    x = [1.5, -2.75, 1e-9]
    c = public.encrypt(np.array(x, np.float32)) + np.float32(0.5)
    for value, number in zip(c.to_ints(), x, strict=True):
        assert reader.decrypt(phe.EncryptedNumber(theirs, value, c.exponent)) == pytest.approx(number + 0.5, rel=1e-7)
    assert reader.raw_decrypt(public.encrypt(-5).to_ints()) == public.n - 5
    for value in (3, -(2**40), 0.1, -1e-20):
        number = theirs.encrypt(value)
        ours = public.from_ints(number.ciphertext(), exponent=number.exponent, limit=2**41)
        assert private.decrypt(ours) == value
    again = PrivateKey(reader.p, reader.q, insecure=True)
    assert again == private
    foreign = PublicKey(theirs.n, insecure=True)
    assert private.decrypt(foreign.encrypt(2)) == 2
    assert_raises(ConfigError, "fast=True needs a key", foreign.encrypt, 2, fast=True)


# --- other libraries -------------------------------------------------------------------------------------------------
def test_batches_answer_in_kind(keys, monkeypatch):
    public, private = keys
    array = np.array([1.5, -2.0], np.float32)
    for x in (array, torch.from_numpy(array)):
        y = he.decrypt_batch(private, he.encrypt_batch(public, x, fast=True) * 2)
        assert type(y) is type(x)
        assert y.tolist() == [3.0, -4.0]
    assert he.decrypt_batch(private, he.encrypt_batch(public, [1, 2])).tolist() == [1, 2]

    class Foreign:  # CuPy is not here: an array of its interface
        def __init__(self, values):
            self.values = values

        def get(self):
            return self.values

    Foreign.__module__ = "cupy.core"
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(asarray=Foreign))
    back = private.decrypt(public.encrypt(Foreign(array)))
    assert isinstance(back, Foreign)
    assert back.values.tolist() == array.tolist()


def test_a_message_may_name_a_library_that_is_not_here(keys, monkeypatch):
    public, private = keys
    data = public.encrypt(np.ones(2, np.float32)).to_bytes()
    for kind, name in ((2, "cupy"), (3, "jax")):
        monkeypatch.setitem(sys.modules, name, None)
        received = EncryptedTensor.from_bytes(data[:41] + bytes([kind]) + data[42:], public)
        assert_raises(UnsupportedCase, f"of {name}, which is not installed here", private.decrypt, received)
    assert_raises(ConfigError, "'torch' or 'numpy', got 'jax'", public.from_ints, 1, kind="jax")


def test_a_limit_beyond_every_float(keys):
    public, private = keys
    assert_raises(RangeError, "a smaller limit", public.encrypt, [1], limit=10**400)
    assert private.decrypt(public.encrypt([5, -6], limit=10**200)).tolist() == [5, -6]


# --- messages --------------------------------------------------------------------------------------------------------
def test_messages_come_back(keys, tmp_path):
    public, private = keys
    again = PublicKey.from_bytes(public.to_bytes(), insecure=True)
    assert (again, again.blum) == (public, True)
    assert pickle.loads(pickle.dumps(public)) == public
    c = public.encrypt(torch.tensor([[1.5, -2.5]]))
    d = EncryptedTensor.from_bytes(c.to_bytes(), again)
    assert (d.shape, d.exponent, d.bound, d.dtype, d.to_ints(rerandomize=False)) == (
        c.shape, c.exponent, c.bound, c.dtype, c.to_ints(),
    )  # fmt: skip
    assert torch.equal(private.decrypt(d), torch.tensor([[1.5, -2.5]]))
    result = 3 * c
    pickled = pickle.loads(pickle.dumps(result))
    assert pickled.residues.ints() != result.residues.ints()  # rerandomized as it leaves
    assert torch.equal(private.decrypt(pickled), torch.tensor([[4.5, -7.5]]))


@pytest.mark.slow  # scrypt, four times
def test_a_private_key_is_saved_for_its_owner_only(private, tmp_path):
    path = tmp_path / "key"
    private.save(path, "passphrase")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert PrivateKey.load(path, "passphrase", insecure=True) == private
    data = path.read_bytes()
    for secret in (private.p, private.q):
        for order in ("big", "little"):
            assert secret.to_bytes(64, order)[8:20] not in data
    for wrong, word in ((data, "other"), (data[:-1] + bytes([data[-1] ^ 1]), "passphrase")):
        with pytest.raises(FormatError, match="wrong passphrase, or damaged") as error:
            PrivateKey.from_bytes(wrong, word, insecure=True)
        assert_shows_nothing(str(error.value), private)
    assert_raises(ConfigError, "passphrase", private.to_bytes, "")
    assert_raises(FormatError, "of 1024 bits", PrivateKey.load, path, "passphrase")


def test_private_numbers_show_nowhere(private):
    for text in (repr(private), str(private), f"{private}", repr(private.public), repr(private.encrypt([1]))):
        assert_shows_nothing(text, private)
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, lambda key: torch.save(key, io.BytesIO())):
        error = assert_raises(ConfigError, "not pickled or copied", attempt, private)
        assert_shows_nothing(str(error), private)


def test_messages_of_another_key_version_or_size(keys):
    public, private = keys
    data = public.encrypt([1, 2]).to_bytes()
    head = 8 + 32 + 3
    other = PublicKey(public.n + 4, insecure=True)
    assert_raises(FormatError, "of another key", EncryptedTensor.from_bytes, data, other)
    for changed, match in [
        (data[:7] + b"\x02" + data[8:], "version 2"), (b"x" + data[1:], "begins with other bytes"), (b"", "cut off"),
        (public.to_bytes(), "begins with other bytes"), (data[:-1], "bytes of ciphertexts"),
        (data + b"\0", "bytes of ciphertexts"), (data[:head] + b"\x7f" + data[head + 1 :], "an exponent is from"),
        (data[:-256] + bytes(256), "ciphertext 1 is not from 1"),
        (data[:-256] + b"\xff" * 256, "ciphertext 1 is not from 1"),
        (data[:-256] + public.n.to_bytes(256, "big"), "not coprime"),
        (data[:41] + b"\x09" + data[42:], "larger than allowed"),
    ]:  # fmt: skip
        assert_raises(FormatError, match, EncryptedTensor.from_bytes, changed, public)
    size = data.index((2).to_bytes(8, "big"), head + 4 + public.n_bytes)
    for claimed in (2**47, 2**63, 2**64 - 1, 3, 0):  # a negative size is a huge one
        with pytest.raises(FormatError, match=r"bytes of ciphertexts|larger than allowed"):
            EncryptedTensor.from_bytes(data[:size] + claimed.to_bytes(8, "big") + data[size + 8 :], public)
    for value, match in [(0, "not from 1"), (public.n**2, "not from 1"), (-1, "not from 1"), (private.p, "coprime")]:
        error = assert_raises(FormatError, match, public.from_ints, [1, value])
        assert_shows_nothing(str(error), private)
    assert_raises(UnsupportedDtype, "integer", public.from_ints, ["1"])
    for data in (b"ACLPAIn\x01", public.to_bytes()[:9], public.to_bytes() + b"1", b"ACLPAIn\x01\x00" + b"\xff" * 2000):
        assert_raises(FormatError, None, PublicKey.from_bytes, data)


@pytest.mark.search(1)
def test_damaged_messages_are_format_errors(keys, rng, record_property, monkeypatch):
    """Cut, extended, flipped and spliced: a message is read as something valid, or is a FormatError."""
    public, private = keys
    monkeypatch.setattr(encoding, "_cipher", lambda word, salt: real(word, b"s" * 16))  # scrypt once
    real_cipher, made = encoding._cipher, {}

    def real(word, salt):
        from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

        return made.setdefault(word, ChaCha20Poly1305(b"k" * 32))

    assert real_cipher
    samples = [
        (public.to_bytes(), lambda data: PublicKey.from_bytes(data, insecure=True)),
        (private.to_bytes("word"), lambda data: PrivateKey.from_bytes(data, "word", insecure=True)),
        (public.encrypt([[1, 2]]).to_bytes(), lambda data: EncryptedTensor.from_bytes(data, public)),
        (public.encrypt([1, 2], pack=True).to_bytes(), lambda data: EncryptedTensor.from_bytes(data, public)),
    ]
    for data, read in samples:
        assert read(data) is not None
    for _ in range(200):
        data, read = rng.choice(samples)
        damaged = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(min(len(damaged), rng.choice((60, len(damaged)))) or 1) if damaged else 0
            damage = rng.choice(("cut", "extend", "flip", "splice"))
            if damage == "cut":
                del damaged[at:]
            elif damage == "extend":
                damaged += rng.randbytes(rng.randrange(300))
            elif damage == "flip" and damaged:
                damaged[at] = rng.randrange(256)
            else:
                other = rng.choice(samples)[0]
                damaged[at : at + 8] = other[at : at + 8]
        try:
            found = read(bytes(damaged))
            if isinstance(found, EncryptedTensor):
                assert found.to_bytes(rerandomize=False) == bytes(damaged)
            else:  # the primes are authentic
                assert found.to_bytes() == bytes(damaged) if isinstance(found, PublicKey) else found == private
            record_property("read", 1)
        except FormatError as error:
            assert damaged != data
            assert_shows_nothing(str(error), private)
            record_property("refused", 1)


@pytest.mark.search(1)
def test_random_programs_equal_plain_arithmetic(private, rng, record_property):
    """Chains of operations on integers equal NumPy's on Python integers, or end in RangeError."""
    for _ in range(8):
        shape = rng.choice([(3,), (2, 2), (1, 3)])
        plain = np.array([rng.randrange(-(2**40), 2**40) for _ in range(math.prod(shape))], object).reshape(shape)
        cipher = private.encrypt(plain.astype(np.int64))
        for _ in range(rng.randrange(1, 6)):
            op = rng.choice((operator.add, operator.sub, operator.mul))
            other = rng.choice((rng.randrange(-(2**60), 2**60), np.array(rng.choices(range(-9, 9), k=shape[-1]))))
            cipher, plain = (
                op(cipher, other),
                op(plain, other.astype(object) if isinstance(other, np.ndarray) else other),
            )
            record_property("operations", 1)
        assert private._signed(cipher.residues) == plain.reshape(-1).tolist()
        assert max(map(abs, plain.reshape(-1))) <= cipher.bound


def test_errors_are_in_the_tree():
    assert issubclass(RangeError, AccelerantError)
    assert issubclass(RangeError, OverflowError)


# --- devices ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "backend", [pytest.param("opencl", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_ciphertexts_on_a_device(backend):
    require_module("gmpy2", "privacy")
    device = require_backend(backend)
    private = PrivateKey(2**127 + 123, 2**127 + 251, insecure=True)
    public = private.public
    x = torch.tensor([[1.5, -2.0], [0.25, 3.0]], device="cuda" if backend == "cuda" else "cpu")
    for c in (public.encrypt(x, device=device), private.encrypt(x, device=device), public.encrypt(x).to(device)):
        assert c.residues.space.backend == backend
        assert torch.equal(private.decrypt(c), x)
        assert torch.equal(private.decrypt(c + c), 2 * x)
    for found, wanted in [
        (c - 1, x - 1), (3 * c, 3 * x), (c.sum(0), x.sum(0)), (c[1], x[1]), (-c, -x), (c @ x.T, x @ x.T),
        (c * x, x * x), (c.rerandomize(), x),
        (EncryptedTensor.from_bytes(c.to_bytes(), public, device=device), x.cpu()),
    ]:  # fmt: skip
        assert torch.equal(private.decrypt(found), wanted)
    assert private.decrypt(c.to("cpu")[0, 0]) == 1.5
    numbers = torch.tensor([5, -7, 2**62, -(2**63)], device=x.device)
    c = public.encrypt(numbers, device=device)
    assert torch.equal(private.decrypt(c), numbers)
    assert private.decrypt(c + c, dtype="float64").tolist() == [10.0, -14.0, 2.0**63, -(2.0**64)]
    assert_raises(RangeError, "a decrypted value does not fit int8", lambda: private.decrypt(c, dtype="int8"))
    assert torch.equal(private.decrypt(public.encrypt(numbers[:2], device=device, limit=7)), numbers[:2])
    with pytest.raises(RangeError, match="flat index 2 is beyond the limit"):
        public.encrypt(numbers, device=device, limit=7)
    packed = public.encrypt(numbers[:2], device=device, pack=True)
    assert torch.equal(private.decrypt(packed + packed), 2 * numbers[:2])
    for public_call, dtype in ((public.encrypt, np.uint64), (private.encrypt, np.int16)):
        edges = np.array([0, 1, np.iinfo(dtype).max], dtype)
        assert private.decrypt(public_call(edges, device=device)).tolist() == edges.tolist()
    assert private.decrypt(public.encrypt(np.zeros((0, 3), np.int64), device=device)).shape == (0, 3)
    overflown = public.from_ints((1 + public.max_int * public.n) % int(public.n_square), device=device, limit=2) + 6
    assert_raises(RangeError, "decrypted number 0 is beyond n/3", lambda: private.decrypt(overflown))
    fast = public.encrypt(x[0], device=device, fast=True)
    assert torch.equal(private.decrypt(fast), x[0])


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "int64", "uint8", "uint64"])
@pytest.mark.parametrize("exponent", [None, 0, -3, -40, 5])
def test_words_are_the_encoded_numbers(dtype, exponent):
    rng = np.random.default_rng(0)
    if "int" in dtype:
        limits, exponent = np.iinfo(dtype), exponent and min(exponent, 0)
        x = np.concatenate(
            [
                rng.integers(limits.min, limits.max, 50, dtype, endpoint=True),
                np.array([limits.min, limits.max, 0], dtype),
            ]
        )
    else:
        limits = np.finfo(dtype)
        edges = [limits.max, -limits.max, 0, -0.0, limits.tiny, -limits.smallest_subnormal, 0.5, -0.5, 1.5, -1.5]
        x = np.concatenate([rng.standard_normal(50) * 2.0 ** rng.integers(-12, 12, 50), edges])
    x = x.astype(dtype)
    exponent, bound = encoding.scale_of(dtype, exponent, None, False)
    words, offset = encoding.encode_words(x, exponent, bound)
    numbers = [int.from_bytes(row.astype("<u4").tobytes(), "little") - offset for row in words]
    assert numbers == encoding.encode(x, exponent, bound)


@pytest.mark.parametrize("columns", [2, 3, 7])
def test_words_are_the_signed_numbers(columns):
    most = 2 ** (32 * columns - 1)
    for numbers, kind in (([0, -1, 5, 2**63 - 1, -(2**63)], np.ndarray), ([most - 1, -most, -1], (list, np.ndarray))):
        data = b"".join((number + most).to_bytes(4 * columns, "little") for number in numbers)
        found = encoding.signed_numbers(np.frombuffer(data, "<u4").reshape(-1, columns))
        assert isinstance(found, kind)
        assert list(found) == numbers


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2048, 3072])
def test_real_keys_on_a_gpu_and_the_host_agree(bits):
    require_module("gmpy2", "privacy")
    require_module("cryptography", "privacy")
    public, private = keygen(bits)
    x = torch.arange(-50, 50, device="cuda").reshape(10, 10)
    seen = set()
    for c in (public.encrypt(x), public.encrypt(x), public.encrypt(x, fast=True), private.encrypt(x)):
        assert torch.equal(private.decrypt(c), x)
        assert torch.equal(private.decrypt(c.to("cpu")), x)
        assert torch.equal(private.decrypt(public.encrypt(x, device="cpu").to("cuda") - 3 * c), -2 * x)
        seen.update(map(int, c.residues.ints()))
    assert len(seen) == 4 * x.numel()
    y = torch.linspace(-2, 2, 33, device="cuda", dtype=torch.float64)
    assert torch.equal(private.decrypt(public.encrypt(y) + public.encrypt(y.float())), y + y.float())
