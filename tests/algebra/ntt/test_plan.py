"""The passes, run on Python integers, are the transform: no kernel is needed to be sure of a plan."""

from __future__ import annotations

import itertools

import pytest
from dft_reference import ntt_dft_reference

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.ntt.plan import ORDERS, bit_reversed, make_passes, ntt_reference
from vectors import TRANSFORM_BASE, field_elements

LOGS = [(1,), (3,), (1, 1), (2, 3), (3, 2), (1, 2, 1), (2, 1, 2), (2, 2, 2)]


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
@pytest.mark.parametrize("logs", LOGS, ids=str)
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
