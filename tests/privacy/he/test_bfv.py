"""BFV against integers mod t, against polynomials of Python integers, and against TenSEAL (Microsoft SEAL)."""

import copy
import hashlib
import inspect
import itertools
import math
import operator
import pickle
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch

from accelerant.algebra.field.parameters import is_prime
from accelerant.errors import BudgetExceeded, ConfigError, FormatError, RangeError, ShapeError, UnsupportedDtype
from accelerant.privacy import he
from accelerant.privacy.he import bfv, bfv_scheme, encoding
from accelerant.privacy.random import SecureStream
from accelerant.runtime.ledger import ledger
from refusals import assert_raises
from requirements import require_backend

T = 65537


@pytest.fixture(scope="module")
def small():
    """Keys of 64 slots, which the table does not have: for tests that need speed and no security."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bfv_scheme.MAX_LOG_Q[128], 64, 218)
        yield bfv.keygen(64, rotations=True)


def centered(x, t=T):
    x = np.asarray(x, object) % t
    return np.where(x > t // 2, x - t, x)


def test_plain_products_where_t_is_above_the_data_primes(monkeypatch):
    """At n = 4096 data primes have 27 bits, t up to 30: coefficients of plain operands are reduced, not shifted."""
    monkeypatch.setitem(bfv_scheme.MAX_LOG_Q[128], 64, bfv_scheme.MAX_LOG_Q[128][4096])
    t = 2**30 - 127
    while t % 128 != 1 or not is_prime(t):
        t -= 128
    public, private = bfv.keygen(64, t)
    assert max(public.parameters.primes[0]) < t // 4
    x, y = (np.random.default_rng(i).integers(-(t // 2), t // 2, 64) for i in (0, 1))
    assert (private.decrypt(public.encrypt(x) * y) == centered(x.astype(object) * y, t)).all()


def rows(rng, *shape):
    x = rng.integers(-(T // 2), T // 2 + 1, shape)
    x.reshape(-1)[:4] = 0, 1, T // 2, -(T // 2)
    return x


def test_operations(small):
    public, private = small
    rng = np.random.default_rng(0)
    x, y = rows(rng, 2, 3, 64), rows(rng, 2, 3, 64)
    a, b = public.encrypt(x), public.encrypt(y)
    half = 32
    cases = {
        "fresh": (a, x), "sum": (a + b, x + y), "difference": (a - b, x - y), "negative": (-a, -x),
        "plus plain": (a + y[0, 0], x + y[0, 0]), "from plain": (y - a, y - x), "product": (a * b, x * y),
        "square": (a * a, x * x), "times plain": (a * y, x * y), "times number": (-3 * a, -3 * x),
        "rotation": (a.rotate(5), np.concatenate([np.roll(h, -5, -1) for h in np.split(x, 2, -1)], -1)),
        "rotation to the right": (a.rotate(-1), np.concatenate([np.roll(h, 1, -1) for h in np.split(x, 2, -1)], -1)),
        "exchange": (a.swap_halves(), np.concatenate((x[..., half:], x[..., :half]), -1)),
        "total": ((a * b).sum(), (x * y).sum(-1, keepdims=True)),
        "polynomial": (a * b * a + b * 7 - a, x.astype(object) * y * x + y * 7 - x),
    }  # fmt: skip
    for name, (found, wanted) in cases.items():
        assert (private.decrypt(found) == centered(wanted)).all(), name
        # the estimate is no promise, but near
        assert private.noise_budget(found) - 20 < found.budget_bits < private.noise_budget(found) + 3, name


def test_shapes(small):
    public, private = small
    short = public.encrypt([5, -6])
    assert private.decrypt(short).tolist() == [5, -6]
    assert private.decrypt(short * [[1, 2], [3, 4]]).tolist() == [[5, -12], [15, -24]]
    assert private.decrypt(short + public.encrypt([[1, 0], [2, 0]])).tolist() == [[6, -6], [7, -6]]
    total = public.encrypt([[1, 2], [3, 4]]).sum()
    assert private.decrypt(total.sum() * 2).tolist() == private.decrypt(total * [[2]]).tolist() == [[6], [14]]
    assert private.decrypt(short.rotate(1))[:2].tolist() == [-6, 0]
    assert private.decrypt(public.encrypt(np.zeros((0, 3), int))).shape == (0, 3)
    assert repr(short).startswith("Ciphertext((2,), about 15")


OPERANDS = (
    2, np.int64(-3), np.array(2), [2], (3,), [1, -2, 3], np.array([2]), np.array([[2]]), np.array([[1], [-2]]),
    np.array([[1, 2, 3], [4, 5, 6]]), np.array([[[2]], [[3]]]), np.arange(6, dtype=np.uint8).reshape(2, 1, 3),
    np.array([1, 2]), np.array([[1, 2]]), np.arange(4), np.zeros(0, int), np.zeros((2, 0), int), np.ones((3, 1), int),
)  # fmt: skip
"""Integers by which encrypted vectors are added, subtracted and multiplied, some of shapes that do not broadcast."""


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (2, 3), (2, 1, 3), (1,), (2, 1)])
def test_operands_broadcast_as_numpys_or_are_refused(small, shape):
    """+ - *, from both sides, with numbers, lists, NumPy and torch arrays and ciphertexts: never another result."""
    public, private = small
    x = np.arange(1, math.prod(shape) + 1).reshape(shape)
    c = public.encrypt(x)
    for operand in OPERANDS:
        plain = np.asarray(operand)
        forms = [operand, *([torch.from_numpy(plain)] if isinstance(operand, np.ndarray) else [])]
        if plain.ndim and plain.shape[-1]:
            forms.append(public.encrypt(plain))
        for form, op in itertools.product(forms, (operator.add, operator.sub, operator.mul)):
            encrypted = isinstance(form, bfv.Ciphertext)
            try:
                wanted = op(x, plain.astype(int)), op(plain.astype(int), x)
            except ValueError:
                wanted = None
            repeated = shape[-1] == 1 != plain.shape[-1] if plain.ndim else False
            if wanted is None or repeated or (encrypted and plain.shape[-1] != shape[-1]) or plain.shape[-1:] == (0,):
                for call in (lambda: op(c, form), lambda: op(form, c)):  # noqa: B023  called here
                    assert_raises(ShapeError, r"do not broadcast|from 1 to 64", call)
                continue
            for found, each in zip((op(c, form), op(form, c)), wanted, strict=True):
                values = private.decrypt(found)
                assert values.shape == each.shape == found.shape
                assert (values == each).all(), (operand, op)


def test_two_encryptions_differ(small):
    public, _ = small
    x, y = public.encrypt([1]), public.encrypt([1])
    assert (x.data != y.data).mean() > 0.99


def test_depth_ends_with_an_error(small):
    """Squares are right as long as the budget lasts, and then an error, never a wrong number."""
    public, private = small
    x, c = np.arange(64), public.encrypt(np.arange(64))
    scheme = public._scheme
    for _ in range(12):
        x, c = centered(x * x), c * c
        phase = scheme.phase(c.data, private._rows)
        assert scheme.noise_fraction(phase)[0] == pytest.approx(scheme.noise(phase)[0] / scheme.q, abs=2**-28)
        if private.noise_budget(c) < 1:
            break
        assert (private.decrypt(c) == x).all()
    else:
        pytest.fail("the budget never ended")
    assert_raises(BudgetExceeded, "noise budget of a ciphertext is spent", private.decrypt, c)


@pytest.mark.parametrize("signs", [None, (1, 1, 1, 1), (1, -1, -1, 1), (1, 0, 0, -1)])
def test_products_as_integers(small, signs):
    """Each product is what integers give: t (c d) / Q rounded, before relinearization, by Python's polynomials."""
    public, private = small
    scheme, n = public._scheme, 64
    a, b = public.encrypt(np.arange(64)), public.encrypt(-np.arange(64))
    q, t = scheme.q, scheme.t
    if signs:
        most = q // 2 - (q >> 20)  # beyond that a conversion may take x - Q for x
        parts = [[[sign * most % p for _ in range(n)] for p in scheme.data] for sign in signs]
        a, b = (replace(x, data=np.array([pair], np.uint32)) for x, pair in ((a, parts[:2]), (b, parts[2:])))

    def lifted(data):
        shares = [q // p * pow(q // p, -1, p) for p in scheme.data]
        return [[centered([sum(int(v) * s for v, s in zip(column, shares, strict=True))], q)[0] for column in part.T]
                for part in data[0]]  # fmt: skip

    def product(x, y):
        out = [0] * n
        for i, u in enumerate(x):
            for j, v in enumerate(y):
                out[(i + j) % n] += u * v if i + j < n else -u * v
        return out

    s = private._secret.tolist()
    (a0, a1), (b0, b1) = lifted(a.data), lifted(b.data)
    parts = [product(a0, b0), [u + v for u, v in zip(product(a0, b1), product(a1, b0), strict=True)], product(a1, b1)]
    rounded = [[(2 * t * v + q) // (2 * q) for v in part] for part in parts]
    square = product(s, s)
    phase = [u + v + w for u, v, w in zip(rounded[0], product(rounded[1], s), product(rounded[2], square), strict=True)]
    (c0, c1) = lifted((a * b).data)
    found = [u + v for u, v in zip(c0, product(c1, s), strict=True)]
    # roundings off by one in each part, and the errors of key switching
    assert max(abs(v) for v in centered([u - v for u, v in zip(found, phase, strict=True)], q)) < 2**20


@pytest.mark.parametrize("security", [128, 192, 256])
def test_parameters_keep_to_the_table(security):
    # 33710081 is a plain modulus for which half of the room that products need takes one auxiliary prime less
    cases = [(4096, 33710081), *((n, 786433 if n < 32768 else T) for n in (4096, 8192, 16384, 32768))]
    for n, plain_modulus in cases[2 * (security > 128) :]:
        parameters = bfv.EncryptionParameters(n, plain_modulus, security)
        data, special, auxiliary = parameters.primes
        product = special
        for p in data:
            product *= p
        assert product.bit_length() <= bfv_scheme.MAX_LOG_Q[security][n]
        # products of n terms, times t, of coefficients up to Q / 2 in both signs, and room to convert them back
        assert math.prod(auxiliary) > 4 * parameters.plain_modulus * n * math.prod(data)
        assert len({special, *data, *auxiliary, parameters.plain_modulus}) == len(data) + len(auxiliary) + 2


def test_plaintexts_are_scaled_to_the_nearest(small):
    """round(Q m / t) mod each prime, exactly, of every m at an edge: a floor adds t / 2 to all noise."""
    scheme = small[0]._scheme
    m = np.array([0, 1, 2, T // 2, T // 2 + 1, T - 2, T - 1, *range(1000, 1057)], np.uint32)
    wanted = [[(2 * scheme.q * int(each) + T) // (2 * T) % p for each in m] for p in scheme.data]
    assert scheme.scaled(m).tolist() == wanted


def test_strengths():
    """Defaults, the published table's secret and error, and seeds of 256 bits."""
    defaults = [each.default for each in inspect.signature(bfv.keygen).parameters.values()]
    assert defaults == [8192, 65537, 128, False, "cpu"]
    assert inspect.signature(bfv.EncryptionParameters).parameters["security"].default == 128
    table = {
        128: {1024: 27, 2048: 54, 4096: 109, 8192: 218, 16384: 438, 32768: 881},
        192: {1024: 19, 2048: 37, 4096: 75, 8192: 152, 16384: 305, 32768: 611},
        256: {1024: 14, 2048: 29, 4096: 58, 8192: 118, 16384: 237, 32768: 476},
    }
    assert table == {s: {n: b for n, b in row.items() if n != 64} for s, row in bfv_scheme.MAX_LOG_Q.items()}
    assert bfv._SEED_BYTES == len(bfv._seed(SecureStream())) == 32
    stream = SecureStream(bytes(range(32)))
    bits = np.unpackbits(stream.words(2 * 1000).numpy().view(np.uint8).reshape(-1, 4), axis=-1, bitorder="little")
    heads = bits[:, 11:].astype(int).sum(-1)  # the upper 21 bits
    errors = bfv_scheme.error_polynomials(SecureStream(bytes(range(32))), 1000)
    assert errors.tolist() == (heads[:1000] - heads[1000:]).tolist()


@pytest.mark.parametrize(("arguments", "message"), [
    ((8192, T, 80), "security must be 128, 192, 256 bits, got 80"),
    ((8000,), "n must be in the standard's table, 1024, 2048, .*; got 8000"),
    ((8192, 65539), "prime below 2\\^30 that is 1 mod 16384, got 65539"),
    ((8192, 16385), "prime below 2\\^30"),
    ((1024, 12289), "at most 27 bits for n = 1024 and 128 bits"),
    ((4096, T, 256), "at most 58 bits for n = 4096 and 256 bits of security"),
])  # fmt: skip
def test_other_parameters_are_refused(arguments, message):
    assert_raises(ConfigError, message, bfv.keygen, *arguments)


def test_refusals(small):
    public, private = small
    assert_raises(UnsupportedDtype, r"BFV encrypts int8, .*; got float64", public.encrypt, [1.5])
    for operand in (1.5, torch.tensor(2.0), "2"):
        with pytest.raises(UnsupportedDtype, match="BFV encrypts int8"):
            public.encrypt([1, 2]) * operand
    assert_raises(ConfigError, "wanted ciphertexts of BFV, got int", private.decrypt, 5)
    assert_raises(RangeError, "integers that are not between -32768 and 32768", public.encrypt, [0, 32769])
    assert_raises(ShapeError, "m from 1 to 64, got shape \\(65,\\)", public.encrypt, np.zeros(65, int))
    with pytest.raises(ShapeError, match="do not broadcast"):
        public.encrypt(np.zeros((2, 4), int)) + public.encrypt(np.zeros((3, 4), int))
    other, _ = bfv.keygen(4096)
    assert_raises(ConfigError, "of two keys or on two devices", lambda: public.encrypt([1]) + other.encrypt([1]))
    assert_raises(ConfigError, "of two keys", lambda: private.decrypt(other.encrypt([1])))
    assert_raises(ConfigError, "no key for this rotation", lambda: other.encrypt([1]).rotate(1))
    assert_raises(ConfigError, "not pickled", pickle.dumps, private)
    assert repr(private) == "PrivateKey(n=64, plain_modulus=65537, security=128)"


def test_errors_and_secrets():
    stream = SecureStream(bytes(32))
    secret, errors = bfv_scheme.ternary(stream, 30000), bfv_scheme.error_polynomials(stream, 30000)
    assert [abs((secret == v).mean() - 1 / 3) < 0.01 for v in (-1, 0, 1)] == [True] * 3
    assert abs(errors.std() - 10.5**0.5) < 0.05
    assert abs(errors.mean()) < 0.07
    assert abs(errors).max() <= 21

    class Words:  # of 2^32, one is no multiple of 3: it is drawn again
        left = 2**32 - 1, 0, 1, 2**32 - 2, 2**32 - 1, 5

        def words(self, count):
            taken, self.left = self.left[:count], self.left[count:]
            return torch.from_numpy(np.array(taken, np.uint32).view(np.int32))

    assert bfv_scheme.ternary(Words(), 4).tolist() == [-1, 0, 1, 1]
    rows = bfv_scheme.uniform_rows(bytes(32), 1, (1032193, 12289), 4096)
    assert (rows[0].max(-1) < [1032193, 12289]).all()
    assert (abs(rows[0].mean(-1) / [1032193, 12289] - 0.5) < 0.02).all()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_devices(device):
    require_backend(device)
    public, private = bfv.keygen(8192, rotations=[3], device=device)
    x = rows(np.random.default_rng(1), 2, 8192)
    a, b = public.encrypt(x), public.encrypt(x[:, ::-1])
    wanted = np.concatenate([np.roll(h, -3, -1) for h in np.split(x * x[:, ::-1], 2, -1)], -1)
    assert (private.decrypt((a * b).rotate(3) * 2 - 1) == centered(2 * wanted - 1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("n", [4096, 8192])
def test_same_results_as_tenseal(n):
    tenseal = pytest.importorskip("tenseal", reason="TenSEAL is a dependency of development")
    context = tenseal.context(tenseal.SCHEME_TYPE.BFV, poly_modulus_degree=n, plain_modulus=786433)
    public, private = bfv.keygen(n, 786433)
    rng = np.random.default_rng(2)
    x, y = (rng.integers(-400, 400, 64) for _ in "xy")
    theirs = [tenseal.bfv_vector(context, v.tolist()) for v in (x, y)]
    ours = [public.encrypt(v) for v in (x, y)]
    circuits = [
        lambda a, b, plain: a + b, lambda a, b, plain: a - b, lambda a, b, plain: a * b, lambda a, b, plain: a * plain,
        lambda a, b, plain: a * b + a, lambda a, b, plain: (a + plain) * b - plain,
    ]  # fmt: skip
    for circuit in circuits:
        assert private.decrypt(circuit(*ours, y)).tolist() == circuit(*theirs, y.tolist()).decrypt()


# --- messages --------------------------------------------------------------------------------------------------------
@pytest.fixture
def quick_cipher(monkeypatch):
    """Passphrases without scrypt, which test_paillier.py tests."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    monkeypatch.setattr(
        encoding, "_cipher", lambda word, salt: ChaCha20Poly1305(hashlib.sha256(word.encode() + salt).digest())
    )


def test_messages_come_back(small, tmp_path, quick_cipher):
    public, private = small
    x = np.arange(-6, 6).reshape(2, 6)
    loaded = bfv.PublicKey.from_bytes(public.to_bytes())
    own = bfv.PrivateKey.from_bytes(private.to_bytes("a word"), "a word", loaded)
    private.save(tmp_path / "key", "a word")
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert (bfv.PrivateKey.load(tmp_path / "key", "a word", public)._secret == private._secret).all()
    c = bfv.Ciphertext.from_bytes(public.encrypt(x).to_bytes(), loaded)
    assert own.decrypt((c * c).rotate(1) + c).tolist() == private.decrypt((c * c).rotate(1) + c).tolist()
    seeded = private.encrypt(x)
    assert len(seeded.to_bytes()) < 0.6 * len(c.to_bytes())
    assert len((seeded * 1).to_bytes()) == len((-seeded).to_bytes()) == len(c.to_bytes())
    assert (own.decrypt(bfv.Ciphertext.from_bytes(seeded.to_bytes(), loaded)) == x).all()
    assert private.noise_budget(seeded) > private.noise_budget(c)
    sender = bfv.PublicKey.from_bytes(public.to_bytes(computing=False))
    assert (private.decrypt(bfv.Ciphertext.from_bytes(sender.encrypt(x).to_bytes(), public)) == x).all()
    assert_raises(ConfigError, "no key for products", lambda: sender.encrypt(x) * sender.encrypt(x))


def test_messages_of_another_key_version_or_size(small, quick_cipher):
    public, private = small
    message, other = public.encrypt([[1, 2], [3, 4]]).to_bytes(), bfv.keygen(4096)[0]
    assert struct.unpack_from(">QQ", message, 45) == (2, 2)  # what the changes below change
    for change, error in [
        (lambda m: b"ACLPAI" + m[6:], "not a message of BFV's ciphertexts"),
        (lambda m: m[:7] + b"\x02" + m[8:], "has version 2, this program reads version 1"),
        (lambda m: m[:-1], "needs .* bytes"),
        (lambda m: m + b"0", "needs .* bytes"),
        (lambda m: m[:50], "cut off"),
        (lambda m: m[:45] + struct.pack(">QQ", 2**40, 2) + m[61:], "needs .* bytes"),
        (lambda m: m[:45] + struct.pack(">QQ", 2, 65) + m[61:], "m from 1 to 64"),
        (lambda m: m[:45] + struct.pack(">QQ", 2**63, 2) + m[61:], "larger than allowed"),
        (lambda m: m[:-4] + b"\xff" * 4, "not below its prime"),
    ]:
        assert_raises(FormatError, error, bfv.Ciphertext.from_bytes, change(message), public)
    assert_raises(FormatError, "of another key", bfv.Ciphertext.from_bytes, message, other)
    key = private.to_bytes("word")
    for data, word, owner, error in [
        (key, "other", public, "wrong passphrase"), (key[:-1], "word", public, "wrong passphrase"),
        (key, "word", other, "is not that of PublicKey\\(n=4096"), (key[:60], "word", public, "cut off"),
    ]:  # fmt: skip
        assert_raises(FormatError, error, bfv.PrivateKey.from_bytes, data, word, owner)
    for parameters, error in [
        ((100, T, 128), "refused: n must be in the standard's table"),
        ((32768, T, 128), "cut off: 3670016 bytes wanted"),
    ]:
        with pytest.raises(FormatError, match=error):
            bfv.PublicKey.from_bytes(public.to_bytes()[:8] + struct.pack(">IIH", *parameters) + bytes(2000))


@pytest.mark.search(1)
def test_damaged_messages_are_format_errors(small, rng, record_property, quick_cipher):
    """Cut, extended, flipped and spliced: a message is read as something valid, or is a FormatError."""
    public, private = small
    samples = [
        (public.to_bytes(computing=False), bfv.PublicKey.from_bytes),
        (private.to_bytes("word"), lambda data: bfv.PrivateKey.from_bytes(data, "word", public)),
        (public.encrypt([[1, 2]]).to_bytes(), lambda data: bfv.Ciphertext.from_bytes(data, public)),
        (private.encrypt([1, 2]).to_bytes(), lambda data: bfv.Ciphertext.from_bytes(data, public)),
    ]
    for data, read in samples:
        assert read(data) is not None
    for _ in range(200):
        data, read = rng.choice(samples)
        damaged, at = bytearray(data), rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(70)
        match rng.randrange(4):
            case 0:
                del damaged[at:]
            case 1:
                damaged[at] ^= 1 << rng.randrange(8)
            case 2:
                damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                damaged[at : at + 40] = rng.choice(samples)[0][at : at + 40]
        try:
            found = read(bytes(damaged))
        except FormatError:
            assert damaged != data
            record_property("refused", 1)
        else:  # another message of the same meaning: no byte is ignored
            again = found.to_bytes() if not isinstance(found, bfv.PrivateKey) else data
            assert again == bytes(damaged)
            record_property("read", 1)


@pytest.mark.search(1)
def test_random_circuits_equal_integers(small, rng, record_property):
    public, private = small
    for _ in range(10):
        x = [centered([rng.randrange(T) for _ in range(64)]) for _ in range(3)]
        encrypted = [(public if rng.random() < 0.5 else private).encrypt(v.astype(int)) for v in x]
        for _ in range(8):
            i, j = rng.randrange(3), rng.randrange(3)
            number = rng.randrange(-(T // 2), T // 2)
            match rng.randrange(6):
                case 0:
                    x[i], encrypted[i] = x[i] + x[j], encrypted[i] + encrypted[j]
                case 1:
                    x[i], encrypted[i] = x[i] - x[j], encrypted[i] - encrypted[j]
                case 2 if encrypted[i].budget_bits > 50 and encrypted[j].budget_bits > 50:
                    x[i], encrypted[i] = x[i] * x[j], encrypted[i] * encrypted[j]
                case 3 if encrypted[j].budget_bits > 50:
                    x[i], encrypted[i] = number * x[j], number * encrypted[j]
                case 4:
                    steps = rng.randrange(-40, 40)
                    rotated = np.concatenate([np.roll(half, -steps) for half in np.split(x[j], 2)])
                    x[i], encrypted[i] = rotated, encrypted[j].rotate(steps)
                case _:
                    x[i], encrypted[i] = np.roll(x[i], 32) - number, encrypted[i].swap_halves() - number
            x[i] = centered(x[i])
            record_property("operations", 1)
        for v, c in zip(x, encrypted, strict=True):
            assert (private.decrypt(c) == v).all()


def test_secrets_are_not_shown(small):
    public, private = small
    values = [12345, -23456, 31999]
    c = public.encrypt(values)
    texts = [repr(public), repr(private), repr(c), repr(c * c), str(private)]
    for call in (
        lambda: public.encrypt([*values, 40000]),
        lambda: c.rotate(1) + np.array([40001]),
        lambda: c + np.zeros((2, 65), int),
    ):
        error = assert_raises((RangeError, ShapeError), None, call)
        texts.append(str(error))
    assert not any(
        word in text for text in texts for word in ("12345", "23456", "31999", "4000", "array(", "[-1", "[0,")
    )
    assert_raises(ConfigError, None, copy.deepcopy, private)


def test_operations_are_in_the_ledger(small):
    public, _ = small
    c = public.encrypt(np.ones((5, 1), int))
    (c * c).rotate(1)
    for op in ("bfv_multiply", "bfv_rotate"):
        (record,) = [record for record in ledger().records() if record.op == op and record.case == "5x2x6x64"]
        assert (record.implementation, record.calls) == ("llvm", 1)


def test_arrays_of_torch_come_back(small):
    public, private = small
    x = torch.tensor([[1, -2], [3, 4]], dtype=torch.int16)
    c = he.encrypt_batch(public, x)
    assert torch.equal(he.decrypt_batch(private, c * torch.tensor([2, 3])), x.long() * torch.tensor([2, 3]))
