"""`accelerant zk inspect`."""

import functools
import json
from pathlib import Path

import pytest

from accelerant.zk.formats import Zkey, write_zkey

VECTORS = Path(__file__).parents[1] / "vectors" / "formats"


@pytest.fixture
def inspect(command_line):
    return functools.partial(command_line, "zk", "inspect")


def test_a_key_is_shown(inspect):
    status, out, err = inspect(VECTORS / "bn254" / "product.zkey")
    assert (status, err) == (0, "")
    shown = {" ".join(line.split()) for line in out.splitlines()}
    assert {
        "kind zkey", "size 4,481 bytes", "curve bn254", "constraints 2", "signals 6", "public inputs 2",
        "domain size 8", "A 6, 2 infinite", "B2 6, 4 infinite", "H 8", "contributions 1 one", "checked no",
        f"2 two beacon {bytes(range(1, 32)).hex()}, hashed 2^10 times",
    } <= shown  # fmt: skip


@pytest.mark.parametrize("name", ["product.r1cs", "product.wtns", "prepared.ptau", "product.zkey"])
def test_as_json(inspect, name):
    status, out, err = inspect(VECTORS / "bls12_381" / name, "--json", "--check")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["curve"], found["checked"], found["kind"]) == ("bls12_381", True, name.rpartition(".")[2])


def test_other_kinds_are_shown(inspect):
    assert "custom gates       G\n" in inspect(VECTORS / "bn254" / "gates.r1cs")[1]
    assert "contributions      1  first é\n" in inspect(VECTORS / "bn254" / "prepared.ptau")[1]
    assert "values             6\n" in inspect(VECTORS / "bn254" / "product.wtns")[1]


def test_what_is_no_file_exits_with_2(inspect, tmp_path):
    path = tmp_path / "cut.zkey"
    path.write_bytes((VECTORS / "bn254" / "product.zkey").read_bytes()[:1000])
    status, out, err = inspect(path)
    assert (status, out) == (2, "")
    where = f"accelerant: {path}: section 4 (coefficients), byte 904"
    assert err == f"{where}: the section has 356 bytes, but the file has only 84 more\n"
    assert inspect(tmp_path / "none.zkey") == (2, "", f"accelerant: {tmp_path / 'none.zkey'} does not exist\n")


def test_names_of_strangers_do_not_reach_the_terminal(inspect, tmp_path):
    with Zkey.open(VECTORS / "bn254" / "product.zkey") as key:
        names = ("n_public", "alpha1", "beta1", "beta2", "gamma2", "delta1", "delta2", "ic", "a", "b1", "b2", "c", "h")
        values = {name: getattr(key, name) for name in (*names, "coefficients")}
        last = key.contributions[-1]
        label = type(last.label)(0, "\x1b[2Jclear\nthe screen\u202e")
        odd = type(last)(label, last.delta_after, last.g1_s, last.g1_sx, last.g2_spx, last.transcript)
        write_zkey(tmp_path / "odd.zkey", "bn254", **values, contributions=[odd])
    status, out, _ = inspect(tmp_path / "odd.zkey")
    assert status == 0
    assert r"1  \x1b[2Jclear\nthe screen\u202e" in out
    assert "\x1b" not in out
