"""The CPU's passes, exactly: both forms of arithmetic, every order, direction, coset, batch and division of points."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from accelerant.algebra.field.llvm_kernels import host_form
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import decode, encode
from accelerant.algebra.ntt import launch as ntt_launch
from accelerant.algebra.ntt.launch import HostNttPlan, limbs_of_52_bits, run
from accelerant.algebra.ntt.plan import ORDERS, ntt_reference
from vectors import TRANSFORM_BASE, field_elements

NAMES = ("goldilocks", "babybear", "bn254_fr", "bls12_381_fr")
KINDS = list(itertools.product(NAMES, ("scalar", "vector")))
QUICK = {
    ("bn254_fr", "vector", "natural"),
    ("goldilocks", "scalar", "bit_reversed_to_natural"),
}
"""A variant of a pass takes LLVM some 0.4 s: the others differ in the field's functions or in the order."""


def marks_of(name, form, order):
    """None for one case of large elements and one of words; bls12_381_fr repeats bn254_fr's."""
    if (name, form, order) in QUICK:
        return []
    return [pytest.mark.slow, *([pytest.mark.soak] if name == "bls12_381_fr" else [])]


def cases(orders):
    """Fields, forms and orders, with marks."""
    return [
        pytest.param((name, form), order, id=f"{name}-{form}-{order}", marks=marks_of(name, form, order))
        for (name, form), order in itertools.product(KINDS, orders)
    ]


@pytest.fixture
def arithmetic(request):
    name, form = request.param
    if form == "vector" and FIELDS[name].limbs > 1 and host_form(FIELDS[name]) != "vector":
        pytest.skip("this processor has no AVX512-IFMA")
    return FIELDS[name], form


def transformed(field, form, x, log_n, batch, in_place=False, **options):
    plan = HostNttPlan(field, log_n, batch, form=form, **options)
    words = encode(field, x)
    guard = np.full((len(x) + 4, *words.shape[1:]), 7, words.dtype)
    out = words if in_place else guard[: len(x)]
    run(plan, HOST, words, out, len(x))
    assert (guard[len(x) :] == 7).all()
    assert in_place or decode(field, words) == x
    return decode(field, out)


def expected(field, x, log_n, **options):
    n = 1 << log_n
    parts = (x[at : at + n] for at in range(0, len(x), n))
    return [value for part in parts for value in ntt_reference(part, field=field.name, **options)]


# a pass with fewer columns than lanes; one whose batch fills them, also sixteen; two passes, of equal and other rows
SIZES = [(1, 1), (2, 3), (3, 8), (4, 16), (5, 16), (6, 1), (7, 2), (8, 1)]


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize(("arithmetic", "order"), cases(ORDERS), indirect=["arithmetic"])
def test_every_direction_coset_and_size(arithmetic, order):
    field, form = arithmetic
    for (log_n, batch), inverse, coset in itertools.product(SIZES, (False, True), (1, field.modulus - 2)):
        x = field_elements(field, batch << log_n, TRANSFORM_BASE)
        options = {"inverse": inverse, "coset": coset, "order": order}
        found = transformed(field, form, x, log_n, batch, in_place=log_n % 2 == 0, **options)
        assert found == expected(field, x, log_n, **options), (log_n, batch, inverse, coset)


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize(("arithmetic", "order"), cases(ORDERS), indirect=["arithmetic"])
def test_three_passes_and_split_twiddles(arithmetic, order, monkeypatch):
    """As from 2^21 points on, with few rows to a pass."""
    field, form = arithmetic
    monkeypatch.setattr(ntt_launch, "_LOG_ROWS", 3)
    monkeypatch.setattr(ntt_launch, "_LOG_TABLE", 4)
    x = field_elements(field, 1 << 9, TRANSFORM_BASE)
    for inverse, coset in ((False, 3), (True, 1)):
        options = {"inverse": inverse, "coset": coset, "order": order}
        found = transformed(field, form, x, 9, 1, **options)
        assert found == expected(field, x, 9, **options)
    passes = HostNttPlan(field, 9, 1, form=form, **options).passes
    assert [step.log_rows for step in passes] == [3, 3, 3]
    assert sum(step.variant.split for step in passes) == 1


def test_split_twiddles(monkeypatch):
    """Two passes over the few points with which the low table is shorter than a row of twiddles."""
    monkeypatch.setattr(ntt_launch, "_LOG_ROWS", 5)
    monkeypatch.setattr(ntt_launch, "_LOG_TABLE", 4)
    field, options = FIELDS["babybear"], {"inverse": False, "coset": 1, "order": "natural"}
    x = field_elements(field, 1 << 10, TRANSFORM_BASE)
    assert [step.variant.split for step in HostNttPlan(field, 10, 1, form="scalar", **options).passes] == [True, False]
    assert transformed(field, "scalar", x, 10, 1, **options) == expected(field, x, 10, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goldilocks", "babybear"])
def test_three_passes_as_they_are_used(name):
    """2^21 points, the fewest of three passes: a few coefficients, whose values are sums of few powers; and back."""
    field, log_n, g = FIELDS[name], 21, 3
    n, p = 1 << log_n, field.modulus
    w, options = field.root_of_unity(n), {"coset": g, "order": "natural"}
    places = (0, 1, 2, 1023, 1024, n // 2, n - 1, 1234567)
    x = np.zeros(n, encode(field, [0]).dtype)
    x[list(places)] = encode(field, field_elements(field, len(places), TRANSFORM_BASE))
    y, back = np.empty_like(x), np.empty_like(x)
    forward, inverse = (HostNttPlan(field, log_n, 1, inverse=inverse, **options) for inverse in (False, True))
    assert len(forward.passes) == len(inverse.passes) == 3
    run(forward, HOST, x, y, n)
    for j in (0, 1, 2, 127, 128, 1 << 14, n // 2 + 1, n - 1, 7654321 % n):
        assert y[j] == sum(int(x[i]) * pow(g * pow(w, j, p), i, p) for i in places) % p
    run(inverse, HOST, y, back, n)
    assert (back == x).all()


@pytest.mark.parametrize(("arithmetic", "order"), cases(ORDERS), indirect=["arithmetic"])
@pytest.mark.sample(3)
def test_extreme_elements(arithmetic, order):
    """0, 1, p - 1 and all limbs set, in all places: carries and reductions of the butterflies."""
    field, form = arithmetic
    p, options = field.modulus, {"inverse": False, "coset": 1, "order": order}
    values = [0, 1, p - 1, p - 2, p // 2, p // 2 + 1, (1 << field.bits - 1) - 1, 1 << field.bits - 1]
    x = [values[(i * i + i // 8) % len(values)] for i in range(256)] + [p - 1] * 256
    assert transformed(field, form, x, 8, 2, **options) == expected(field, x, 8, **options)


def test_limbs_of_52_bits_are_the_same_numbers():
    for name in ("bn254_fr", "bls12_381_fr", "bls12_381_fq"):
        field = FIELDS[name]
        values = [0, 1, field.modulus - 1, *(1 << k for k in range(0, field.bits - 1, 17))]
        limbs = limbs_of_52_bits(field, encode(field, values))
        assert [sum(int(limb) << 52 * k for k, limb in enumerate(row)) for row in limbs] == values
        assert (limbs < 1 << 52).all()
