"""The container of sections, through the formats that are in it."""

import errno
import json
import mmap
import os
import stat
import struct
from unittest.mock import Mock

import numpy as np
import pytest
from parts import EXTENSIONS, FAMILIES, FILES, VECTORS, offset_of, put_together, refused, resized, take_apart, without

from accelerant.errors import ConfigError, FormatError, MissingFile
from accelerant.zk.formats import Ptau, R1cs, Witness, Zkey, describe, open_file, write_r1cs, write_wtns
from refusals import assert_raises

ONE = np.array([[1, 0, 0, 0]], np.uint64)
CLASSES = {"zkey": Zkey, "wtns": Witness, "r1cs": R1cs, "ptau": Ptau}
every_kind = pytest.mark.parametrize("kind", CLASSES)


@pytest.fixture
def opened(tmp_path):
    """Opens bytes as a file of a kind."""

    def call(kind, data):
        path = tmp_path / f"file.{kind}"
        path.write_bytes(data)
        return CLASSES[kind].open(path)

    return call


def real(kind):
    return (VECTORS / "bn254" / EXTENSIONS[kind]).read_bytes()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FILES)
def test_files_of_circom_and_snarkjs_are_read_and_hold_points_of_their_curves(family, name):
    with open_file(VECTORS / family / name) as file:
        assert file.family == family
        assert file.size_bytes == (VECTORS / family / name).stat().st_size
        assert isinstance(file, CLASSES[name.rpartition(".")[2]])
        file.check()
        assert name in repr(file)


@every_kind
def test_sections_come_in_any_order_and_unknown_ones_are_left_alone(kind, opened):
    magic, version, sections = take_apart(real(kind))
    with opened(kind, put_together(magic, version, [(77, b"anything"), *sections[::-1], (0, b"")])) as file:
        file.check()
        assert file.family == "bn254"


@every_kind
def test_damaged_containers_are_refused(kind, opened):
    """Cut, too long, with other sizes, counts, magic and version, or a section twice; sections cannot overlap."""
    data = real(kind)
    magic, version, sections = take_apart(data)
    number, (size,) = sections[0][0], struct.unpack_from("<Q", data, 16)
    twice = put_together(magic, version, [*sections, sections[0]])
    at, first = len(twice) - 12 - len(sections[0][1]), offset_of(twice, number)
    named = rf"section {number} \(.*\), byte"
    wrong = [
        (data + b"\0", rf"byte {len(data)}: 1 trailing bytes after the last section"),
        (data[:16] + struct.pack("<Q", size + 12) + data[24:], f"file.{kind}"),
        (twice, rf"{named} {at}: duplicate section; .* byte {first}"),
        (b"zkex" + data[4:], rf"is not a \.{kind} file: it begins with b'zkex'"),
        (data[:4] + struct.pack("<I", 99) + data[8:], rf"byte 4: \.{kind} version 99; only version"),
    ]
    cuts = [*range(0, 80, 3), *range(80, len(data), 61), len(data) - 1]
    wrong += [(data[:cut], f"file.{kind}") for cut in cuts]
    for claimed in (2**64 - 1, 2**63, 2**40):
        message = f"{named} 12: the section has {claimed} bytes, but the file"
        wrong.append((data[:16] + struct.pack("<Q", claimed) + data[24:], message))
    for count in (257, 2**32 - 1):
        wrong.append((data[:8] + struct.pack("<I", count) + data[12:], f"byte 8: {count} sections"))
    for damaged, message in wrong:
        assert_raises(FormatError, message, opened, kind, damaged)


LENGTHS = {"zkey": range(1, 11), "wtns": (1, 2), "r1cs": (1, 2, 3), "ptau": (*range(1, 8), *range(12, 16))}


@pytest.mark.sample(10)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("kind", "number"), [(kind, number) for kind, numbers in LENGTHS.items() for number in numbers]
)
@pytest.mark.parametrize("change", [-8, -4, -1, 1, 4, 8, 32, 64, -32, -64])
def test_sections_longer_or_shorter_than_their_counts_say(kind, number, change, family, opened):
    data = (VECTORS / family / EXTENSIONS[kind]).read_bytes()
    if -change > len(dict(take_apart(data)[2])[number]):
        return  # nothing would be left
    with refused(number, None, ""), opened(kind, resized(data, number, change)) as file:
        file.check()


@every_kind
def test_missing_sections_are_refused(kind, opened):
    data = real(kind)
    optional = {"zkey": {10}}.get(kind, set())
    for number, _ in take_apart(data)[2]:
        if number not in optional:
            assert_raises(FormatError, rf"section {number} \(.*\) is missing", opened, kind, without(data, number))


def test_no_file_a_folder_a_pipe_an_empty_file(tmp_path):
    assert_raises(MissingFile, r"missing.zkey does not exist", Zkey.open, tmp_path / "missing.zkey")
    assert_raises(FormatError, "not a regular file", Zkey.open, tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert_raises(FormatError, "not a regular file", Zkey.open, tmp_path / "pipe")
    assert_raises(FormatError, "cannot read", Zkey.open, "a\0b")
    (tmp_path / "empty").write_bytes(b"")
    assert_raises(FormatError, "shorter than the file header", Zkey.open, tmp_path / "empty")
    assert_raises(FormatError, r"begins with b''", open_file, tmp_path / "empty")


def test_arrays_outlive_the_file_and_cannot_be_written():
    with Witness.open(VECTORS / "bn254" / "product.wtns") as witness:
        values = witness.values
    assert values[:, 0].tolist() == [1, 111, 3, 4, 5, 12]
    with pytest.raises(ValueError, match="read-only"):
        values[0] = 0


def test_a_closed_file_gives_no_arrays():
    witness = Witness.open(VECTORS / "bn254" / "product.wtns")
    witness.close()
    witness.close()
    with pytest.raises(ValueError, match="closed"):
        _ = witness.values
    path = VECTORS / "bn254" / "product.wtns"
    with path.open("rb"), path.open("rb"), path.open("rb"), pytest.raises(OSError, match="Bad file"):  # of no other
        witness.copy_values(0, np.empty((1, 4), np.uint64))


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, failing):
    path = tmp_path / "w.wtns"
    path.write_bytes(b"before")

    monkeypatch.setattr(os, failing, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device", "another name")))
    with pytest.raises(OSError, match=r"No space left on device: '.*/w.wtns'"):
        write_wtns(path, "bn254", np.array([[1, 0, 0, 0]], np.uint64))
    assert [each.name for each in tmp_path.iterdir()] == ["w.wtns"]
    assert path.read_bytes() == b"before"


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(MissingFile, match=r"none/w.wtns: the directory .*/none does not exist$"):
        write_wtns(tmp_path / "none" / "w.wtns", "bn254", ONE)


def test_only_files_are_replaced(tmp_path):
    """What is renamed onto a device would take its place."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "to the pipe").symlink_to("pipe")
    for path, match in (
        (tmp_path / "pipe", "is a device, a pipe or a socket"),
        (tmp_path / "to the pipe", "is a device, a pipe or a socket"),
        (tmp_path / "a", "is a loop of symlinks"),
        (tmp_path, "is a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        ("a\0b", "null byte"),
    ):
        assert_raises(ConfigError, match, write_wtns, path, "bn254", ONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "pipe", "to the pipe"]
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode)


def test_of_a_symlink_the_file_is_replaced(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "w.wtns").symlink_to("kept/w.wtns")
    for _ in range(2):  # the file is not there, then it is
        write_wtns(tmp_path / "w.wtns", "bn254", ONE)
        assert (tmp_path / "w.wtns").is_symlink()
        assert [path.name for path in (tmp_path / "kept").iterdir()] == ["w.wtns"]
    with Witness.open(tmp_path / "w.wtns") as witness:
        assert witness.n_values == 1


def test_nobody_else_may_read_a_witness(tmp_path):
    before = os.umask(0o022)
    try:
        write_wtns(tmp_path / "w.wtns", "bn254", ONE)
        with R1cs.open(VECTORS / "bn254" / "product.r1cs") as circuit:
            a, b, c = circuit.matrices()
        sizes = {"n_wires": 6, "n_pub_out": 1, "n_pub_in": 1, "n_prv_in": 1, "n_constraints": 2}
        write_r1cs(tmp_path / "c.r1cs", "bn254", **sizes, a=a, b=b, c=c)
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"w.wtns": 0o600, "c.r1cs": 0o644}


@pytest.mark.parametrize("left", [0, 1, 11])
def test_a_file_that_is_cut_while_it_is_opened(tmp_path, monkeypatch, left):
    """Between the question how long it is and the mapping."""
    path = tmp_path / "w.wtns"
    write_wtns(path, "bn254", ONE)
    real_map = mmap.mmap

    def cut_first(*arguments, **options):
        os.truncate(path, left)
        return real_map(*arguments, **options)

    monkeypatch.setattr(mmap, "mmap", cut_first)
    assert_raises(FormatError, "while it was being opened", Witness.open, path)


# What files hold, as JSON values.

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
    assert_raises(FormatError, message, describe, tmp_path / "a.zkey")
    assert_raises(FormatError, "not a regular file", open_file, tmp_path)
