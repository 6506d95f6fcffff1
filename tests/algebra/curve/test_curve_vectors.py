"""The answers of Ethereum's precompiles: EIP-196, EIP-197, EIP-2537."""

import json
from pathlib import Path

import pytest
from pairing_reference import product_is_one

from accelerant.algebra.curve import curve_of, family_of
from accelerant.algebra.curve.encoding import point_bytes, points_from_bytes, points_to_bytes
from accelerant.algebra.curve.weierstrass import add, multiply
from accelerant.errors import FormatError

FOLDER = Path(__file__).parents[2] / "vectors"


def cases(file, kind, *names):
    rows = json.loads((FOLDER / f"{file}.json").read_text())[kind]
    return [pytest.param(*names, row, id=f"{file}-{row['Name']}") for row in rows]


@pytest.mark.parametrize(
    ("name", "row"), [*cases("eip196", "add", "bn254_g1"), *cases("eip2537", "add_g1", "bls12_381_g1")]
)
def test_add(name, row):
    curve = curve_of(name)
    p, q = points_from_bytes(curve, bytes.fromhex(row["Input"]), "evm", subgroup=False)
    assert points_to_bytes(curve, [add(curve, p, q)], "evm").hex() == row["Expected"]


@pytest.mark.parametrize(
    ("name", "row"),
    [
        *cases("eip196", "mul", "bn254_g1"),
        *cases("eip2537", "mul_g1", "bls12_381_g1"),
        *cases("eip2537", "mul_g2", "bls12_381_g2"),
    ],
)
def test_multiply(name, row):
    curve, data = curve_of(name), bytes.fromhex(row["Input"])
    (p,) = points_from_bytes(curve, data[:-32], "evm")
    assert (
        points_to_bytes(curve, [multiply(curve, int.from_bytes(data[-32:], "big"), p)], "evm").hex() == row["Expected"]
    )


@pytest.mark.parametrize(
    ("name", "row"), [*cases("eip197", "pairing", "bn254"), *cases("eip2537", "pairing", "bls12_381")]
)
def test_pairing(name, row):
    family, data = family_of(name), bytes.fromhex(row["Input"])
    first, second = (point_bytes(curve, "evm") for curve in (family.g1, family.g2))
    pairs = []
    for start in range(0, len(data), first + second):
        (p,) = points_from_bytes(family.g1, data[start : start + first], "evm")
        (q,) = points_from_bytes(family.g2, data[start + first : start + first + second], "evm")
        pairs.append((p, q))
    assert product_is_one(family, pairs) == (int(row["Expected"], 16) == 1)


@pytest.mark.parametrize(
    ("name", "row"),
    [*cases("eip2537", "fail_mul_g1", "bls12_381_g1"), *cases("eip2537", "fail_mul_g2", "bls12_381_g2")],
)
def test_refused(name, row):
    reason = {
        "invalid input length": "is no multiple of",
        "invalid fp.Element encoding": "not reduced",
        "invalid field element top bytes": "not reduced",
        "invalid point: not on curve": "which is not on",
        "g1 point is not in the correct subgroup": "not in its subgroup",
        "g2 point is not on correct subgroup": "not in its subgroup",
    }[row["ExpectedError"]]
    with pytest.raises(FormatError, match=reason):
        points_from_bytes(curve_of(name), bytes.fromhex(row["Input"])[:-32], "evm")
