from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from accelerant.bench import Environment, Record, Row, compare, host_time_us, time_ms
from accelerant.errors import FormatError
from accelerant.runtime import registry

ROW = Row("neural", "gelu", "4x4 float32 forward", "accelerant", "triton (own)", p20=0.9, p50=1.0, p80=1.2, speedup=2.0)


def record(*rows):
    return Record(Environment.of(registry.choose("cpu")), {"copy GB/s": 10.0}, list(rows))


def test_a_record_survives_the_disk_and_is_written_whole(tmp_path):
    path = tmp_path / "deep" / "record.json"
    record(ROW).save(path)
    assert [entry.name for entry in path.parent.iterdir()] == ["record.json"]
    loaded = Record.load(path)
    assert loaded.rows == [ROW]
    assert loaded.environment.packages["torch"] == torch.__version__
    assert json.loads(path.read_text())["environment"]["device"]


def test_losses_come_first():
    lost = replace(ROW, op="softmax", speedup=0.8)
    worse = replace(ROW, op="layer_norm", speedup=0.5)
    peer = replace(ROW, op="layer_norm", runner="torch", speedup=None)
    ordered = record(ROW, lost, worse, peer).ordered()
    assert [(row.op, row.runner) for row in ordered] == [
        ("layer_norm", "accelerant"),
        ("layer_norm", "torch"),
        ("softmax", "accelerant"),
        ("gelu", "accelerant"),
    ]


def test_the_table_shows_peers_that_did_not_run():
    table = record(ROW, Row("neural", "gelu", ROW.case, "torch.compile", "", note="no C++ compiler")).table()
    assert "did not run" in table
    assert "no C++ compiler" in table
    assert "2.00x" in table


def test_compare_names_what_became_slower_or_is_gone():
    before = record(ROW, replace(ROW, op="softmax"), replace(ROW, op="torch_only", runner="torch"))
    assert compare(before, record(replace(ROW, p50=1.04), replace(ROW, op="softmax", p50=0.5))) == []
    lines = compare(before, record(replace(ROW, p50=1.5)))
    assert lines == [
        "gelu 4x4 float32 forward: 1 -> 1.5 ms (1.50x)",
        "softmax 4x4 float32 forward: was 1 ms, did not run now",
    ]


def test_records_of_different_devices_are_not_compared():
    other = record(ROW)
    other.environment = replace(other.environment, device="abacus")
    with pytest.raises(FormatError, match="abacus"):
        compare(record(ROW), other)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"environment": {}, "ceilings": {}, "rows": []}'])
def test_what_is_no_record_is_refused(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"x\.json is not a benchmark record"):
        Record.load(path)


def test_timers_order_quick_and_slow():
    small, large = torch.randn(8, 8), torch.randn(600, 600)
    quick = time_ms(lambda: small @ small, torch.device("cpu"), budget_s=0.02)
    slow = time_ms(lambda: large @ large, torch.device("cpu"), budget_s=0.02)
    assert quick.p20_ms <= quick.p50_ms <= quick.p80_ms
    assert quick.p50_ms < slow.p50_ms
    assert 0 < host_time_us(lambda: None, calls=100, rounds=3).p50_ms < 100
