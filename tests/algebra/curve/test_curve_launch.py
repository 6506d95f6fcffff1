"""Launches of the curve kernels: counts that do not fit one another."""

from __future__ import annotations

import numpy as np
import pytest

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import ShapeError

G1 = curve_of("bn254_g1")


def infinities(n):
    return np.zeros((n, *G1.shape), np.uint64)


@pytest.mark.parametrize(("x", "y"), [(1, 0), (0, 1), (2, 1), (1, 2), (3, 2)])
def test_sums_of_other_counts(x, y):
    """The kernel would read past the shorter array."""
    with pytest.raises(ShapeError, match=f"as many points on both sides, got {x} and {y}"):
        launch.add(HOST, G1, infinities(x), infinities(y))


@pytest.mark.parametrize(("points", "scalars"), [(2, 3), (3, 2), (0, 2), (2, 0)])
def test_multiples_of_other_counts(points, scalars):
    with pytest.raises(ShapeError, match=f"{points} points and {scalars} scalars; wanted as many, or one of either"):
        launch.multiply(HOST, G1, infinities(points), np.zeros((scalars, launch.SCALAR_WORDS), np.uint64))


@pytest.mark.parametrize(("points", "scalars", "n"), [(1, 0, 0), (0, 1, 0), (1, 1, 1), (1, 3, 3), (3, 1, 3), (2, 2, 2)])
def test_one_stands_for_all(points, scalars, n):
    found = launch.multiply(HOST, G1, infinities(points), np.ones((scalars, launch.SCALAR_WORDS), np.uint64))
    assert found.shape == (n, *G1.shape)
    assert not found.any()
