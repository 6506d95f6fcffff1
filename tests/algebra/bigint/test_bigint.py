"""Residues of large moduli on the host and on devices, against Python's integers; what the kernels take on NVIDIA."""

import random
import sys
from dataclasses import replace

import numpy as np
import pytest
from ptx_emulator import execute, parsed

from accelerant.algebra import bigint
from accelerant.algebra.bigint import (
    _PUBLIC_WINDOW,
    DevicePairs,
    FixedBasePowers,
    gmp,
    kernel_source,
    lanes_of,
    limbs_of,
    residues_of,
)
from accelerant.algebra.field.memory_space import space_at
from accelerant.errors import ConfigError, MissingDependency, ShapeError
from accelerant.runtime.compilation.cuda import compile_cuda
from accelerant.runtime.compilation.kernel import CUDA_TARGETS
from accelerant.runtime.ledger import ledger
from refusals import assert_raises
from requirements import require_backend, require_module

SIZES = (64, 96, 128, 192)
"""Limbs of p^2 and n^2 for keys of 2048 and 3072 bits."""


@pytest.fixture(
    params=["cpu", pytest.param("opencl", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def space(request):
    require_module("gmpy2", "privacy")
    return space_at(require_backend(request.param))


def moduli(bits):
    """Edges of carries: all words full, all empty but the ends, and a random one."""
    return 2**bits - 1, 2 ** (bits - 1) + 1, random.Random(0).getrandbits(bits) | 1 | 1 << bits - 1


def check(space, n, exponents=(0, 1, 2, 65537)):
    rng = random.Random(1)
    x = [0, 1, n - 1, n - 2, n >> 1, rng.randrange(n), rng.randrange(n)]
    y = [n - 1, n - 1, n - 1, 2, n >> 1, rng.randrange(n), rng.randrange(n)]
    a, b = residues_of(x, n, space), residues_of(y, n, space)
    assert (a.ints(), len(a), a.modulus) == (x, 7, n)
    assert a.times(b).ints() == [u * v % n for u, v in zip(x, y, strict=True)]
    for e in exponents:
        assert a.power([e]).ints() == [pow(u, e, n) for u in x]
    each = [0, 1, 2, 15, 16, 2**64 - 1, 2**64]
    assert a.power(each).ints() == [pow(u, e, n) for u, e in zip(x, each, strict=True)]
    assert a.take(np.array([6, 0, 6])).joined(b.take(np.array([1]))).ints() == [x[6], x[0], x[6], y[1]]


@pytest.mark.parametrize("bits", [8, 1023, 1024, 1025])
def test_products_and_powers(space, bits):
    for n in moduli(bits):
        check(space, n)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [2048, 3072, 4500])
def test_sizes_of_keys_on_a_gpu(bits):
    """Among them one of 9 limbs a thread, an odd number, for which there are no carry chains."""
    require_module("gmpy2", "privacy")
    space = space_at(require_backend("cuda"))
    for n in moduli(bits):
        check(space, n, (65537,))
    check_pairs(space, bits)


def test_secret_exponents_give_the_same(space):
    n = moduli(1024)[2]
    x, e = [1, 2, n - 1], random.Random(2).getrandbits(512)
    assert residues_of(x, n, space).power([e], secret=True).ints() == [pow(u, e, n) for u in x]
    with pytest.raises(ShapeError, match="take one exponent or as many, got 3"):
        residues_of(x, n, space).power([1, 2, 3], secret=True)
    assert_raises(ShapeError, "got 2", lambda: residues_of(x, n, space).power([1, 2]))


@pytest.mark.parametrize("terms", [1, 2, 3, 5, 8, 23])
def test_products_of_rows_and_inverses(space, terms):
    n = 2**64 - 59
    x = [random.Random(3).randrange(1, n) for _ in range(3 * terms)]
    wanted = [1, 1, 1]
    for i, value in enumerate(x):
        wanted[i % 3] = wanted[i % 3] * value % n
    found = residues_of(x, n, space)
    assert found.product(terms).ints() == wanted
    assert found.inverse().ints() == [pow(value, -1, n) for value in x]
    assert_raises(ZeroDivisionError, None, lambda: residues_of([1, 0], n, space).inverse())


def unpaired(pairs, n):
    """Return the numbers of pairs, which are in Montgomery form."""
    space, plain = pairs.space, pairs.times(1, plain=True)
    low, high = (bigint.ints_of(space.store(plain.half(i))) for i in range(2))
    assert max(low + high) < n
    return [a + b * n for a, b in zip(low, high, strict=True)]


def test_pairs_modulo_a_square(space):
    if space.backend == "cpu":
        pytest.skip("pairs are of devices; the host has GMP")
    check_pairs(space, 500)


def check_pairs(space, bits, powers=True):
    rng, odd = random.Random(5), 2 ** (bits + 500) + 277
    for n in moduli(bits):
        square, most = n * n, bigint.limbs_of(n)
        edges = [0, 1, n - 1, n, n + 1, square - 1, square - n, 2 ** (96 * most) - 1]
        x = [*edges, *(rng.randrange(square) for _ in range(3))]
        pairs = DevicePairs.of_words(space.load(bigint.words_of(map(gmp().mpz, x), 3 * most)), n, space)
        assert unpaired(pairs, n) == [u % square for u in x]
        y = rng.randrange(square)
        assert unpaired(pairs.times(y), n) == [u * y % square for u in x]
        for e in (0, 1, 31, 32, 65537, rng.getrandbits(70)) if powers else ():
            assert (
                unpaired(pairs.power(e), n)
                == unpaired(pairs.power(e, secret=True), n)
                == [pow(u, e, square) for u in x]
            )
        assert pairs.times(1, plain=True).into(odd, 7).ints() == [u % square * 7 % odd for u in x]


def test_sums_and_words(space):
    if space.backend == "cpu":
        pytest.skip("words are of devices; the host has GMP")
    for n in moduli(1024):
        x, y = [0, 1, n - 1, n - 1, n >> 1], [0, n - 1, n - 1, 1, (n >> 1) + 1]
        a, b = residues_of(x, n, space), residues_of(y, n, space)
        assert a.plus_words(b.words, 1).ints() == [(u + v) % n for u, v in zip(x, y, strict=True)]
        assert a.plus(n - 1).ints() == [(u - 1) % n for u in x]
        assert bigint.ints_of(space.store(a.plain())) == x


def test_powers_of_a_fixed_base(space):
    n, exponents = moduli(100)[2], [0, 1, 255, 256, 2**24 - 1, 2**20, 0xABCDE]
    words = space.load(np.array(exponents, np.uint32).reshape(-1, 1))
    assert FixedBasePowers(7, n, 32, space).power_vartime(words).ints() == [pow(7, e, n) for e in exponents]


def test_no_numbers(space):
    empty = residues_of([], 15, space)
    assert empty.ints() == empty.times(empty).ints() == empty.power([3]).ints() == empty.inverse().ints() == []


def test_moduli_that_kernels_do_not_take():
    assert (limbs_of(3), limbs_of(2**1024 - 1), limbs_of(2**1024 + 1), limbs_of(2**16384 - 1)) == (16, 32, 48, 512)
    for n in (16, 2**16384 + 1):
        assert_raises(ConfigError, "odd and has at most 16384 bits", limbs_of, n)


def test_every_key_size_has_lanes_that_divide_a_warp():
    for bits in range(512, 16385, 512):
        limbs = limbs_of(2**bits - 1)
        lanes = lanes_of(limbs, "cuda")
        assert 32 % lanes == 0 == limbs % lanes
        assert 8 <= limbs // lanes <= 16
        assert lanes_of(limbs, "opencl") == 1


def test_without_gmpy2(monkeypatch):
    monkeypatch.setitem(sys.modules, "gmpy2", None)
    from accelerant.algebra.bigint import gmp

    gmp.cache_clear()
    assert_raises(MissingDependency, r"accelerant\[privacy\]", residues_of, [1], 15)
    gmp.cache_clear()


@pytest.mark.slow
def test_launches_are_in_the_ledger_and_large_batches_in_parts(monkeypatch):
    require_module("gmpy2", "privacy")
    space, n = space_at(require_backend("opencl")), 2**61 - 1
    monkeypatch.setattr(bigint, "TABLE_BYTES", 4 * 16 * 32 * 3)  # three numbers a launch
    x = list(range(1, 9))
    assert residues_of(x, n, space).power([12345]).ints() == [pow(u, 12345, n) for u in x]
    assert residues_of(x, n, space).power(x).ints() == [pow(u, u, n) for u in x]
    assert any(record.op == "bigint_pow" for record in ledger().records())
    monkeypatch.setattr("accelerant.algebra.bigint.TABLE_BYTES", (8 * 16 << _PUBLIC_WINDOW) * 3)
    numbers = DevicePairs.of_words(space.load(bigint.words_of(map(gmp().mpz, x), 48)), n, space)
    assert unpaired(numbers.power(12345), n) == [pow(u, 12345, n * n) for u in x]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lanes", "bits", "powers"), [(2, 512, False), pytest.param(4, 1000, True, marks=pytest.mark.soak)]
)
def test_several_threads_a_number(monkeypatch, lanes, bits, powers):
    """NVIDIA's form of the kernels, its shuffles through local memory."""
    require_module("gmpy2", "privacy")

    def source_of(*sizes):
        source = kernel_source(*sizes)
        text = source.dialects["portable"].partition("/* z = x^e of `count` pairs")[0]
        return source if powers else replace(source, dialects={"portable": text})

    monkeypatch.setattr(bigint, "lanes_of", lambda limbs, backend: lanes)
    monkeypatch.setattr(bigint, "kernel_source", source_of)
    bigint.modulus_at.cache_clear()
    for n in moduli(bits):
        check(space_at(require_backend("opencl")), n, (65537,))
    check_pairs(space_at(require_backend("opencl")), bits, powers)
    bigint.modulus_at.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "limbs"),
    [
        pytest.param(target, limbs, marks=[] if (target, limbs) == ("sm_90", 64) else [pytest.mark.soak])
        for target in CUDA_TARGETS
        for limbs in SIZES
    ],
)
def test_kernels_compile_for_nvidia_in_registers(target, limbs):
    for file, size, most, spilled in (("kernel.c", limbs, 128, 8), ("pair.c", limbs // 2, 192, 32)):
        binary = compile_cuda(kernel_source(size, lanes_of(size, "cuda"), file), target)
        for resources in binary.resources.values():
            assert resources.spill_bytes <= spilled  # two or eight registers around a call, not in the loops
            assert resources.registers <= most


@pytest.mark.parametrize("width", [8, 12, 16])
def test_the_carry_chains_of_nvidia_add_a_row(width):
    """The instructions of BIGINT_PTX_ROW, one after the other: no carry is lost."""
    rng, words = random.Random(width), 3 * width + 3
    instructions = parsed(bigint._ptx_row(width).split('"')[1])
    for kind in range(6):
        before = [2**32 - 1 if kind == 0 else rng.getrandbits(32) for _ in range(words)]
        before[2 * width] = kind % 3  # top
        found = {f"%{i}": word for i, word in enumerate(before)}
        assert not execute(instructions, found)
        registers = list(found.values())

        def value(found, low):
            even, odd = (sum(w << 32 * i for i, w in enumerate(found[at : at + width])) for at in (0, width))
            return even + (odd << 32) + (found[2 * width] << 32 * (width + 1)) + low

        row = before[2 * width + 2] * sum(w << 32 * i for i, w in enumerate(before[2 * width + 3 :]))
        assert value(registers, 0) == value(before, before[2 * width + 1]) + row
    assert bigint._ptx_row(9) == ""
