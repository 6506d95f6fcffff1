"""What files hold, as JSON values."""

from __future__ import annotations

import json

import pytest
from parts import FAMILIES, VECTORS

from accelerant.errors import FormatError
from accelerant.zk.formats import describe, open_file

BEACON = bytes(range(1, 32)).hex()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_key(family):
    path = VECTORS / family / "product.zkey"
    found = describe(path)
    assert json.loads(json.dumps(found)) == found
    assert len(bytes.fromhex(found.pop("circuit_hash"))) == 64
    points = {"IC": (3, 0), "A": (6, 2), "B1": (6, 4), "B2": (6, 4), "C": (3, 0), "H": (8, 0)}
    assert found == {
        "file": str(path), "kind": "zkey", "size_bytes": path.stat().st_size, "curve": family, "protocol": "groth16",
        "constraints": 2, "signals": 6, "public_inputs": 2, "domain_size": 8, "coefficients": 8,
        "points": {name: {"points": n, "infinite": infinite} for name, (n, infinite) in points.items()},
        "contributions": [
            {"kind": "contribution", "name": "one"},
            {"kind": "beacon", "name": "two", "beacon": BEACON, "iterations_exp": 10},
        ],
        "forgeable": None,
        "checked": False,
    }  # fmt: skip


def test_a_circuit():
    found = describe(VECTORS / "bn254" / "gates.r1cs", check=True)
    wanted = {
        "kind": "r1cs", "constraints": 1, "wires": 4, "public_inputs": 1, "public_outputs": 1, "private_inputs": 1,
        "labels": 6, "terms": {"A": 1, "B": 1, "C": 1}, "custom_gates": ["G"], "custom_gate_uses": 1, "checked": True,
    }  # fmt: skip
    assert wanted.items() <= found.items()


def test_powers_of_tau():
    found = describe(VECTORS / "bls12_381" / "prepared.ptau")
    assert (found["power"], found["most_constraints"], found["prepared"]) == (3, 8, True)
    assert found["points"]["Lagrange tau_g1"] == {"points": 31, "infinite": 0}
    assert [each["name"] for each in found["contributions"]] == ["first é", "Final"]


def test_a_witness_without_its_values():
    path = VECTORS / "bn254" / "product.wtns"
    assert describe(path) == {
        "file": str(path), "kind": "wtns", "size_bytes": 268, "curve": "bn254", "values": 6, "checked": False
    }  # fmt: skip


def test_files_of_no_format(tmp_path):
    (tmp_path / "a.zkey").write_bytes(b"\x7fELF and so on")
    message = r"a.zkey begins with b'\\x7fELF', which is the magic number of none of .zkey, .wtns, .r1cs, .ptau"
    with pytest.raises(FormatError, match=message):
        describe(tmp_path / "a.zkey")
    with pytest.raises(FormatError, match="not a regular file"):
        open_file(tmp_path)
