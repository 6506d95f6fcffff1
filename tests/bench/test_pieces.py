"""Runs in pieces: the time limit, going on with a journal, and what a failure leaves."""

import json
import time

import pytest
import torch

from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.errors import AccelerantError, DeviceLost, FormatError
from accelerant.runtime import registry


def new_record():
    return Record(Environment.of(registry.choose("cpu")))


def piece(key, seen, *, fails=None):
    def measure(record, progress):
        seen.append(key)
        progress(f"measuring {key}")
        record.rows.append(Row("suite", key, "case", "accelerant", "own", p20=1.0, p50=2.0, p80=3.0))
        record.notes.append(f"note of {key}")
        if fails:
            raise fails("it came out wrong\nand much more")

    return Piece("suite", key, measure)


def test_every_piece_is_measured_and_said():
    record, seen, said = new_record(), [], []
    measure_pieces(record, [piece("a", seen), piece("b", seen)], progress=said.append)
    assert seen == [row.op for row in record.rows] == ["a", "b"]
    assert said == ["[1/2] measuring a", "[2/2] measuring b"]


def test_none_is_begun_after_the_limit():
    record, seen = new_record(), []
    measure_pieces(record, [piece("a", seen), piece("b", seen)], until=time.monotonic() - 1)
    assert not seen
    assert record.notes == ["stopped by its time limit; not measured: a; b"]


def test_a_run_goes_on_where_it_was_stopped(tmp_path):
    path, seen = tmp_path / "rows.jsonl", []
    first = new_record()
    measure_pieces(first, [piece("a", seen)], journal=Journal(path, first, resume=False))
    with path.open("ab") as file:
        file.write(b'{"done": "b", "ro')  # killed while it wrote
    second = new_record()
    journal = Journal(path, second, resume=True)
    measure_pieces(second, [piece("a", seen), piece("b", seen)], journal=journal)
    assert seen == ["a", "b"]
    assert [row.op for row in second.rows] == ["a", "b"]
    assert "note of a" in second.notes
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("done") for line in lines] == [None, "a", "b"]
    path.write_bytes(b"something else\n")
    with pytest.raises(FormatError):
        Journal(path, new_record(), resume=True)


def test_a_run_goes_on_after_a_torn_first_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"journal": 1, "env')  # killed while it wrote
    for _ in range(2):
        record = new_record()
        measure_pieces(record, [piece("a", [])], journal=Journal(path, record, resume=True))
        assert [row.op for row in record.rows] == ["a"]


def test_a_piece_named_twice_is_measured_once():
    record, seen = new_record(), []
    measure_pieces(record, [piece("a", seen), piece("a", seen)])
    assert seen == ["a"]


def test_a_lost_device_leaves_the_pieces_after_it_to_a_run_that_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(type(registry.create("cpu")), "lost", lambda self, error: DeviceLost(f"gone: {error}"))
    path, seen = tmp_path / "rows.jsonl", []
    pieces = [piece("a", seen, fails=RuntimeError), piece("b", seen), piece("c", seen)]
    record = new_record()
    with pytest.raises(DeviceLost, match="gone: it came out wrong"):
        measure_pieces(record, pieces, where=torch.device("cpu"), journal=Journal(path, record, resume=False))
    assert seen == ["a"]
    assert record.notes[-1] == "stopped, since the device was lost; not measured: b; c"
    monkeypatch.undo()
    again = new_record()
    with pytest.raises(AccelerantError, match="a: RuntimeError: it came out wrong"):  # its row stays, b and c are made
        measure_pieces(again, pieces, where=torch.device("cpu"), journal=Journal(path, again, resume=True))
    assert seen == ["a", "b", "c"]


@pytest.mark.parametrize("kind", [AccelerantError, RuntimeError])
def test_a_failure_leaves_its_rows_and_the_pieces_after_it(kind, tmp_path):
    path, seen = tmp_path / "rows.jsonl", []
    pieces = [piece("a", seen, fails=kind), piece("b", seen)]
    record = new_record()
    with pytest.raises(kind, match="it came out wrong"):
        measure_pieces(record, pieces, journal=Journal(path, record, resume=False))
    assert [(row.op, row.case, row.note) for row in record.rows] == [
        ("a", "case", ""),
        ("a", "failed", f"{kind.__name__}: it came out wrong"),
        ("b", "case", ""),
    ]
    again = new_record()
    with pytest.raises(AccelerantError, match=f"a: {kind.__name__}: it came out wrong"):
        measure_pieces(again, pieces, journal=Journal(path, again, resume=True))
    assert seen == ["a", "b"]
