"""Multiples of a generator by tables, against Python's integers."""

from __future__ import annotations

import random

import numpy as np
import oracle
import pytest

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.reference import multiply
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.words import encode
from accelerant.zk import curve as curve_named
from accelerant.zk.groth16 import setup
from accelerant.zk.groth16.setup import FixedBaseTable

CURVES = ["bn254_g1", "bn254_g2", *(pytest.param(f"bls12_381_g{i}", marks=pytest.mark.slow) for i in (1, 2))]


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("n", [1, 1 << 16])
def test_multiples(name, n, monkeypatch):
    monkeypatch.setattr(setup, "_CHUNK_POINTS", 16)
    curve, group = curve_of(name), curve_named(name)
    order = curve.order
    draw = random.Random(n)
    scalars = [0, 1, 2, order - 1, order // 2, *(1 << i for i in (7, 63, 64, 65, 127, 128, 192, 253))]
    scalars += [draw.randrange(order) for _ in range(20)]
    table = FixedBaseTable(curve, launch.to_montgomery(HOST, curve, group.generator[None]), n)
    assert table.bits * table.windows >= order.bit_length()
    found = table.multiples(encode(curve.scalars, scalars))
    assert oracle.points_of(curve, found) == [multiply(curve, s, curve.generator) if s else None for s in scalars]


def test_the_table_grows_with_what_is_asked():
    curve = curve_of("bn254_g1")
    base = launch.to_montgomery(HOST, curve, curve_named("bn254_g1").generator[None])
    few, many = (FixedBaseTable(curve, base, n) for n in (1, 4096))
    assert few.bits < many.bits
    assert few.multiples(np.zeros((0, 4), np.uint64)).shape == (0, 2, 4)
