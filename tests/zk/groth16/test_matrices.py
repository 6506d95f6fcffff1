from __future__ import annotations

import random

import numpy as np
import pytest

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import decode, encode
from accelerant.errors import ShapeError
from accelerant.zk.groth16.matrices import SparseMatrix

FR = FIELDS["bn254_fr"]
P = FR.modulus


@pytest.mark.parametrize(("n_rows", "n_columns", "n_entries"), [(1, 1, 0), (1, 1, 1), (7, 3, 20), (1500, 40, 4000)])
def test_products_of_matrices(n_rows, n_columns, n_entries):
    """Rows without entries, several entries at one place, entries in any order; more rows than one thread takes."""
    rng = random.Random(n_entries)
    special = (0, 1, P - 1, P - 2)

    def some():
        return rng.choice(special) if rng.random() < 0.5 else rng.randrange(P)

    rows = np.array([rng.randrange(n_rows) for _ in range(n_entries)], np.int64)
    columns = np.array([rng.randrange(n_columns) for _ in range(n_entries)], np.uint32)
    values, x = [some() for _ in range(n_entries)], [some() for _ in range(n_columns)]
    expected = [0] * n_rows
    for row, column, value in zip(rows, columns, values, strict=True):
        expected[row] += value * x[column]
    matrix = SparseMatrix.from_entries(
        FR, n_rows, rows, columns, encode(FR, [value << 256 for value in values], reduce=True)
    )
    assert matrix.n_entries == n_entries
    assert decode(FR, matrix.times(encode(FR, x).reshape(-1, 4))) == [value % P for value in expected]


def test_values_need_not_be_reduced():
    """A key's values are not looked at: any words, taken modulo p."""
    largest = np.full((1, 4), 2**64 - 1, np.uint64)
    at = np.zeros(1, np.int64)
    for x in (0, 1, P - 1):
        product = decode(FR, SparseMatrix.from_entries(FR, 1, at, at, largest).times(encode(FR, [x])))
        assert product == [(2**256 - 1) * x * pow(2, -256, P) % P]


def test_what_the_kernel_would_not_find_is_refused():
    rows, columns, values = np.array([0, 3]), np.array([1, 5]), np.zeros((2, 4), np.uint64)
    with pytest.raises(ShapeError, match="row 3 of 3"):
        SparseMatrix.from_entries(FR, 3, rows, columns, values)
    matrix = SparseMatrix.from_entries(FR, 4, rows, columns, values)
    with pytest.raises(ShapeError, match="n at least 6, got"):
        matrix.times(np.zeros((5, 4), np.uint64))
    assert not matrix.times(np.zeros((6, 4), np.uint64)).any()


def test_the_product_may_go_to_memory_that_is_there():
    at, values = np.arange(3), encode(FR, [value << 256 for value in (1, 2, 3)], reduce=True)
    matrix = SparseMatrix.from_entries(FR, 3, at, at, values)
    x, storage = encode(FR, [5, 6, 7]), np.full((2, 3, 4), 9, np.uint64)
    assert matrix.times(x, out=storage[1]) is not None
    assert decode(FR, storage[1]) == [5, 12, 21]
    assert (storage[0] == 9).all()
    for wrong in (storage[1, :2], storage[:, 0], np.empty((3, 4)), np.empty((4, 3), np.uint64).T):
        with pytest.raises(ShapeError, match=r"out must be \(3, 4\), uint64, contiguous"):
            matrix.times(x, out=wrong)
