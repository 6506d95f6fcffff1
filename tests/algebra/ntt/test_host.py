"""The CPU's passes, exactly: both forms of arithmetic, every order, direction, coset, batch and division of points."""

import itertools

import numpy as np
import pytest
from dft_reference import ntt_dft_reference

from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import decode, encode
from accelerant.algebra.ntt import launch as ntt_launch
from accelerant.algebra.ntt.launch import CpuNttPlan, limbs_of_52_bits, run
from accelerant.algebra.ntt.plan import ORDERS, bit_reversed, make_passes, ntt_reference
from requirements import require_form
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
    require_form(form, FIELDS[name].limbs)
    return FIELDS[name], form


def transformed(field, form, x, log_n, batch, in_place=False, **options):
    plan = CpuNttPlan(field, log_n, batch, form=form, **options)
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
    log_rows = 4 if field.word_bits == 32 and form == "vector" else 3  # as many rows as lanes
    monkeypatch.setattr(ntt_launch, "_LOG_ROWS", log_rows)
    monkeypatch.setattr(ntt_launch, "_LOG_TABLE", log_rows + 1)
    log_n = 3 * log_rows
    x = field_elements(field, 1 << log_n, TRANSFORM_BASE)
    for inverse, coset in ((False, 3), (True, 1)):
        options = {"inverse": inverse, "coset": coset, "order": order}
        found = transformed(field, form, x, log_n, 1, **options)
        assert found == expected(field, x, log_n, **options)
    passes = CpuNttPlan(field, log_n, 1, form=form, **options).passes
    assert [step.log_rows for step in passes] == [log_rows] * 3
    assert sum(step.variant.split for step in passes) == 1


def test_split_twiddles(monkeypatch):
    """Two passes over the few points with which the low table is shorter than a row of twiddles."""
    monkeypatch.setattr(ntt_launch, "_LOG_ROWS", 5)
    monkeypatch.setattr(ntt_launch, "_LOG_TABLE", 4)
    field, options = FIELDS["babybear"], {"inverse": False, "coset": 1, "order": "natural"}
    x = field_elements(field, 1 << 10, TRANSFORM_BASE)
    assert [step.variant.split for step in CpuNttPlan(field, 10, 1, form="scalar", **options).passes] == [True, False]
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
    forward, inverse = (CpuNttPlan(field, log_n, 1, inverse=inverse, **options) for inverse in (False, True))
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


# The passes, run on Python integers, are the transform: no kernel is needed to be sure of a plan.


def column(places, digits, t):
    low, rest = t & (1 << digits[0]) - 1, t >> digits[0]
    return sum(
        digit * stride
        for digit, stride in zip((low, rest & (1 << digits[1]) - 1, rest >> digits[1]), places.column, strict=True)
    )


def run_pass(step, x, p):
    """A pass by its definition, on transforms one after the other."""
    y, rows, bits, variant = list(x), step.rows, step.log_rows, step.variant
    for t in range(len(x) // rows):
        reads, writes, c = (
            column(step.reads, step.digits, t),
            column(step.writes, step.digits, t),
            t % (1 << step.digits[0]),
        )

        def factor(place, when, tables, c=c):
            value = tables.by_position(p)[place] if tables else 1
            if variant.twiddle == when:
                start, base = (each.by_position(p)[place] for each in (step.twiddles.start, step.twiddles.base))
                value = value * start * pow(base, c, p)
            return value

        column_in = [
            x[reads + place * step.reads.row] * factor(place, "before", step.before) % p for place in range(rows)
        ]
        if variant.reversed_in:
            column_in = [column_in[bit_reversed(i, bits)] for i in range(rows)]
        sums = [sum(value * pow(step.root, i * j, p) for i, value in enumerate(column_in)) % p for j in range(rows)]
        if variant.reversed_out:
            sums = [sums[bit_reversed(i, bits)] for i in range(rows)]
        for place in range(rows):
            y[writes + place * step.writes.row] = sums[place] * factor(place, "after", step.after) % p
    return y


@pytest.mark.sample(5)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("coset", [1, 31])
@pytest.mark.parametrize("logs", [(1,), (3,), (1, 1), (2, 3), (3, 2), (1, 2, 1), (2, 1, 2), (2, 2, 2)], ids=str)
def test_the_passes_are_the_transform(logs, coset, inverse, order):
    field = FIELDS["babybear"]
    n = 1 << sum(logs)
    x = field_elements(field, 2 * n, TRANSFORM_BASE)
    passes = make_passes(field, logs, inverse=inverse, coset=coset, order=order, log_table=20)
    y = x
    for step in passes:
        y = run_pass(step, y, field.modulus)
    for b in range(2):
        expected = ntt_reference(x[b * n :][:n], field=field.name, inverse=inverse, coset=coset, order=order)
        assert y[b * n :][:n] == expected
    assert all(step.in_place for step in passes[: None if order != "natural" or len(logs) == 1 else -1])


@pytest.mark.parametrize("name", ["goldilocks", "babybear", "bn254_fr", "bls12_381_fr"])
def test_halves_are_the_sums(name):
    field = FIELDS[name]
    for log, inverse, coset in itertools.product(range(5), (False, True), (1, field.generator)):
        x = field_elements(field, 1 << log, TRANSFORM_BASE)
        y = ntt_dft_reference(x, field=name, inverse=inverse, coset=coset)
        assert y == ntt_reference(x, field=name, inverse=inverse, coset=coset)
        back = ntt_dft_reference(y, field=name, inverse=not inverse, coset=coset)
        assert back == x


def test_orders_are_permutations_of_the_natural_one():
    field, n, bits = FIELDS["goldilocks"], 16, 4
    x = field_elements(field, n, TRANSFORM_BASE)
    y = ntt_reference(x, field=field.name)
    turned = [bit_reversed(i, bits) for i in range(n)]
    assert turned[:5] == [0, 8, 4, 12, 2]
    assert ntt_reference(x, field=field.name, order="natural_to_bit_reversed") == [y[i] for i in turned]
    assert ntt_reference([x[i] for i in turned], field=field.name, order="bit_reversed_to_natural") == y


def test_twiddles_are_split_where_their_table_would_be_too_large():
    field = FIELDS["goldilocks"]
    for log_table, low in ((20, 10), (17, 7), (10, 5), (0, 5)):
        first, last = make_passes(field, (10, 10), inverse=False, coset=1, order="natural", log_table=log_table)
        assert (first.log_low, first.variant.split) == (low, low < 10)
        assert last.twiddles is None


def bits_of(places, step, log_n):
    """Which bits of an element's place the digits of a column and the row's number give, for one transform."""
    left, found = log_n - step.log_rows, []
    for digit, stride in zip((*step.digits, log_n), places.column, strict=True):
        size, left = min(digit, left), left - min(digit, left)
        found += [stride.bit_length() - 1 + k for k in range(size)]
        assert not size or stride == 1 << stride.bit_length() - 1
    assert places.row == 1 << places.row.bit_length() - 1
    return found + [places.row.bit_length() - 1 + k for k in range(step.log_rows)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("most", [8, 9, 10])
def test_each_element_is_read_and_written_once_at_every_size(most, order):
    """Without running 2^27 points: strides are powers of two, and all bits of a place are there once."""
    field = FIELDS["goldilocks"]
    for log_n in range(1, 28):
        passes = min(3, -(-log_n // most))
        logs = [(log_n + m) // passes for m in range(passes)]
        for step in make_passes(field, logs, inverse=False, coset=1, order=order, log_table=0):
            assert sorted(bits_of(step.reads, step, log_n)) == list(range(log_n))
            assert sorted(bits_of(step.writes, step, log_n)) == list(range(log_n))
