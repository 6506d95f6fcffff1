"""Polynomials in a residue number system against Python integers, on the CPU and on devices."""

import math
import random

import numpy as np
import pytest

from accelerant.algebra.field.memory_space import HOST, space_at
from accelerant.algebra.ntt import rns as rns_llvm
from accelerant.algebra.ntt.rns import ENTRIES, RnsPrimes, is_prime, primes_below, rns_source
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.ledger import forget
from refusals import assert_raises
from requirements import require_backend

PLACES = ["cpu", "other lanes", "opencl", "cuda"]
MARKS = {"other lanes": [pytest.mark.slow], "opencl": [pytest.mark.slow], "cuda": [pytest.mark.gpu]}


@pytest.fixture(params=[pytest.param(place, marks=MARKS.get(place, [])) for place in PLACES])
def space(request, monkeypatch):
    if request.param != "other lanes":
        yield HOST if request.param == "cpu" else space_at(require_backend(request.param))
        return
    widest = rns_llvm.host_has("avx512dq")  # the vectors of the other processors: LLVM divides or joins them
    monkeypatch.setattr(rns_llvm, "host_has", lambda feature: not widest)
    rns_source.cache_clear()
    forget("cpu")
    yield HOST
    rns_source.cache_clear()
    forget("cpu")


def negacyclic(x, y, p):
    n, product = len(x), [0] * len(x)
    for i, a in enumerate(x):
        for j, b in enumerate(y):
            product[(i + j) % n] += a * b if i + j < n else -a * b
    return [value % p for value in product]


def test_primes():
    found = primes_below(27, 4096, 5)
    assert all(is_prime(p) and p % 8192 == 1 and p.bit_length() == 27 for p in found)
    assert [p for p in range(200) if is_prime(p)] == [p for p in range(2, 200) if all(p % d for d in range(2, p))]
    assert not is_prime(25326001)  # passes the test to the bases 2, 3 and 5
    assert_raises(ConfigError, "primes of 27 bits that are 1 mod 33554432", primes_below, 27, 1 << 24, 50)
    assert_raises(ConfigError, "primes below 2\\^30 that are 1 mod 128", RnsPrimes, HOST, 64, (2**30 + 128 * 9 + 1,))


@pytest.mark.parametrize(("n", "bits"), [(64, 30), (128, 27)])
def test_transforms_and_products(space, n, bits):
    primes = primes_below(bits, n, 3)
    rns = RnsPrimes(space, n, primes)
    rng = np.random.default_rng(n)
    x = np.stack([rng.integers(0, p, (2, n), np.uint32) for p in primes[1:]], axis=1)
    x[0, :, :2] = 0, 1
    x[1, 0] = primes[1] - 1  # the largest sums of lazy butterflies
    words = space.load(x.copy())
    rns.transform(words, 1, 2)
    for j, p in enumerate(primes[1:]):
        psi = next(pow(g, (p - 1) // (2 * n), p) for g in range(2, p) if pow(g, (p - 1) // 2, p) == p - 1)
        at = [int(f"{i:0{n.bit_length() - 1}b}"[::-1], 2) for i in range(n)]
        wanted = [sum(int(a) * pow(psi, (2 * r + 1) * i, p) for i, a in enumerate(x[0, j])) % p for r in at]
        assert space.store(words)[0, j].tolist() == wanted
    product = rns.empty(1, 1, 2)
    for terms in (1, 2):  # x[0]^2; x[0]^2 + x[0] x[1]
        at = {"x_at": (0, 0, 0), "y_at": (0, 0, 0, 2), "z_at": (0, 0, 0)}
        rns.dot(words, words, product, 1, 2, batch=1, terms=terms, **at)
        rns.transform(product, 1, 2, inverse=True, products=True)
        for j, p in enumerate(primes[1:]):
            x0, x1 = x[0, j].tolist(), x[1, j].tolist()
            both = [a + b * (terms - 1) for a, b in zip(x0, x1, strict=True)]
            assert space.store(product)[0, 0, j].tolist() == negacyclic(x0, both, p)
    rns.transform(words, 1, 2, inverse=True)
    assert (space.store(words) == x).all()


@pytest.mark.slow
@pytest.mark.parametrize("log_n", [12, 13, 14, 15])
def test_large_transforms(space, log_n):
    """A monomial's transform times a polynomial's is the polynomial shifted."""
    n = 1 << log_n
    (p,) = primes_below(30, n, 1)
    rns = RnsPrimes(space, n, (p,))
    x = np.random.default_rng(1).integers(0, p, (1, n), np.uint32)
    shift = np.zeros((1, n), np.uint32)
    shift[0, 5] = 1
    a, b = space.load(x.copy()), space.load(shift)
    rns.transform(a, 0, 1)
    rns.transform(b, 0, 1)
    z = rns.empty(1)
    rns.dot(a, b, z, 0, 1, batch=1)
    rns.transform(z, 0, 1, inverse=True, products=True)
    wanted = np.roll(x, 5, axis=1)
    wanted[:, :5] = (p - wanted[:, :5]) % p
    assert (space.store(z) == wanted).all()


@pytest.mark.parametrize("count", [1, 5, 20])
def test_conversions_are_exact(space, count):
    n = 64
    primes = primes_below(30, n, count + 3)
    rns, base, targets = RnsPrimes(space, n, primes), primes[:count], primes[count:]
    product = math.prod(base)
    rng = random.Random(count)
    values = [rng.randrange(-(product // 2), product // 2) for _ in range(n)]
    values[:6] = 0, 1, -1, product * 499 // 1000, -product * 499 // 1000, 7
    x = np.array([[[value % q for value in values] for q in base]] * 2, np.uint32)
    far = {i for i, value in enumerate(values) if abs(value) > product * 0.4999}
    wide = rns.convert(rns.conversion(base, targets), space.load(x), rns.empty(2, 3 + count), x_at=(count, 0),
                       z_at=(3 + count, count), keep=0)  # fmt: skip
    found = space.store(wide)
    assert (found[:, :count] == x).all()
    for j, p in enumerate(targets):
        assert all(found[1, count + j, i] == value % p for i, value in enumerate(values) if i not in far)
    # round(5 v / product) for v from the base and what is left, as a multiplication scales: fused
    scaled = rns.convert(
        rns.conversion(base, targets, scale=5, divide=product, out=-1, fused=5), space.load(x), rns.empty(2, 3),
        x_at=(count, 0), z_at=(3, 0), a=wide, a_at=(3 + count, count),
    )  # fmt: skip
    for j, p in enumerate(targets):
        close = [
            round(5 * value / product) if count < 9 else (10 * value + product) // (2 * product) for value in values
        ]
        off = [(int(w) - c) % p for w, c in zip(space.store(scaled)[1, j], close, strict=True)]
        assert all(d in (0, 1, p - 1) for i, d in enumerate(off) if i not in far)
        assert sum(d == 0 for d in off) > n - 4


def test_sums_and_automorphisms(space):
    n, count = 64, 2
    primes = primes_below(28, n, count)
    rns = RnsPrimes(space, n, primes)
    moduli = np.array(primes, np.int64)[:, None]
    x, y = (np.random.default_rng(s).integers(0, moduli, (4, count, n), np.int64) for s in (1, 2))
    x[0, :, 0] = y[0, :, 0] = 0
    a, b = (space.load(v.astype(np.uint32)) for v in (x, y))
    assert (space.store(rns.add(a, b, 0, count)) == (x + y) % moduli).all()
    assert (space.store(rns.add(a, b, 0, count, subtract=True)) == (x - y) % moduli).all()
    y[1::2] = 0
    assert (space.store(rns.add(a, b, 0, count, alternate=True)) == (x + y) % moduli).all()
    moved, wanted = space.store(rns.galois(a, 2 * n - 1, 0, count)), np.zeros_like(x)
    for i in range(n):
        wanted[..., -i % n] = x[..., i] if not i else -x[..., i] % moduli[:, 0]
    assert (moved == wanted).all()


@pytest.mark.slow
@pytest.mark.parametrize("entry", [*ENTRIES, "level"])
def test_kernels_compile_for_nvidia(entry):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    for target in CUDA_TARGETS[:: len(CUDA_TARGETS) - 1]:
        resources = compile_cuda(rns_source(entry), target).resources[f"rns_{entry}"]
        assert resources.spill_bytes == 0
        assert resources.shared_bytes <= 48 * 1024
