"""Witnesses: what is read, refused and written."""

import struct

import numpy as np
import pytest
from parts import VECTORS, edited, offset_of, refused, resized

from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.zk.formats import Witness, write_wtns

KIND, FILE = Witness, "product.wtns"
HEADER, VALUES = 1, 2


def test_a_witness_is_the_circuits_values(family):
    """Of product.circom at a = 3, b = 4, c = 5: 1, o = x (c + 3) + 5 a, a, b, c, x = a b."""
    with Witness.open(VECTORS / family.name / "product.wtns") as witness:
        assert (witness.family, witness.n_values) == (family.name, 6)
        assert witness.values.tolist() == [[value, 0, 0, 0] for value in (1, 12 * 8 + 15, 3, 4, 5, 12)]
        assert "111" not in repr(witness)  # values are secret


def test_written_again_it_is_the_same_file(family, data, tmp_path):
    with Witness.open(VECTORS / family.name / "product.wtns") as witness:
        write_wtns(tmp_path / "again.wtns", family.name, witness.values)
    assert (tmp_path / "again.wtns").read_bytes() == data


@pytest.mark.parametrize("value", ["r - 1", "r", "r + 1", "2^256 - 1", "r + 2^64", "r - 2^64"])
def test_values_not_below_r_are_found_and_not_told(altered, data, family, value):
    number = eval(value.replace("^", "**"), {"r": family.r})
    with altered(edited(data, VALUES, 4 * 32, number.to_bytes(32, "little"))) as witness:
        if number < family.r:
            witness.check()
            return
        place = offset_of(data, VALUES) + 4 * 32
        with refused(VALUES, place, "an element is not below") as error:
            witness.check()
        assert f"{number:x}" not in str(error.value)
        assert str(number) not in str(error.value)


def test_many_values_are_checked_to_the_last(tmp_path, family):
    """More than a chunk of the check."""
    values = np.zeros((1 << 17 | 3, 4), np.uint64)
    values[:, 0] = 1
    write_wtns(tmp_path / "many.wtns", family.name, values)
    with Witness.open(tmp_path / "many.wtns") as witness:
        witness.check()
    values[-1] = np.frombuffer(family.r.to_bytes(32, "little"), "<u8")
    write_wtns(tmp_path / "many.wtns", family.name, values)
    place = (tmp_path / "many.wtns").stat().st_size - 32
    with (
        Witness.open(tmp_path / "many.wtns") as witness,
        pytest.raises(FormatError, match=rf"byte {place}: an element"),
    ):
        witness.check()


def test_what_no_witness_has(altered, data, family):
    for at, new, message in (
        (0, struct.pack("<I", 48), "r has 48 bytes; supported sizes are 32"),
        (4, (family.r - 2).to_bytes(32, "little"), "not the prime of a supported curve"),
        (4, family.q.to_bytes(48, "little")[:32], "not the prime of a supported curve"),
    ):
        place = offset_of(data, HEADER) + at
        with refused(HEADER, place, message):
            altered(edited(data, HEADER, at, new))
    for count in (0, 5, 7, 2**32 - 1):
        with pytest.raises(
            FormatError, match=rf"section 2 \(values\), byte {offset_of(data, VALUES)}: 192 bytes, {count}"
        ):
            altered(edited(data, HEADER, 36, struct.pack("<I", count)))
    with refused(VALUES, None, r"w\[0\] is not 1"):
        altered(edited(data, VALUES, 0, b"\x02"))
    with refused(HEADER, None, "no values"):
        altered(resized(edited(data, HEADER, 36, bytes(4)), VALUES, -192))


def test_arguments_that_make_no_witness(tmp_path):
    for values, error, message in (
        (np.zeros((3, 6), np.uint64), ShapeError, r"values must be \(3, 4\), got \(3, 6\)"),
        (np.zeros((3, 4), np.int64), UnsupportedDtype, "values must be uint64, got int64"),
        (np.zeros((3, 4), np.uint64), ConfigError, r"values\[0\] must be 1"),
    ):
        with pytest.raises(error, match=message):
            write_wtns(tmp_path / "wrong.wtns", "bn254", values)
    assert not list(tmp_path.iterdir())
