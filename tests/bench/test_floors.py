"""Floors of speed: what a file may say, which rows must reach them, and the command's exit status."""

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest

import commands
from accelerant.bench.record import BenchmarkRecord, Environment, Row
from accelerant.bench.report import Floor, check_floors, floors_text, read_floors
from accelerant.errors import FormatError
from accelerant.runtime import registry

ROOT = Path(__file__).parents[2]
OURS = Row("neural", "gelu", "8x8 float32 forward", "accelerant", "own", p20=1.9, p50=2.0, p80=2.2)
TORCH = replace(OURS, runner="torch", p20=2.3, p50=2.4, p80=2.5)


def record(*rows):
    return BenchmarkRecord(replace(Environment.of(registry.find_device("cpu")), device="Abacus 9000"), {}, list(rows))


def floors_file(tmp_path, text):
    path = tmp_path / "floors.toml"
    path.write_text(text)
    return path


status = functools.partial(commands.status, "bench", "check")


@pytest.mark.parametrize(("floor", "reached"), [
    (Floor("Abacus", "gelu", times=1.2), True),
    (Floor("Abacus", "gelu forward", times=1.21), False),
    (Floor("Abacus", "gelu 8x8 float32 forward", ms=2.0), True),
    (Floor("Abacus", "gelu", ms=1.99), False),
])  # fmt: skip
def test_a_figure_is_at_its_floor_or_below(floor, reached):
    check = check_floors([floor], [record(OURS, TORCH)])
    assert (check.held, len(check.missed)) == ((1, 0) if reached else (0, 1))
    assert ("1.2x" in check.table() or "2 ms" in check.table()) != reached


def test_a_floor_without_a_row_is_a_miss_unless_the_record_is_of_another_device():
    found = [record(OURS, TORCH)]
    for key in ("gelu backward", "relu", "gel"):
        (missed,) = check_floors([Floor("Abacus", key, times=1.0)], found).missed
        assert missed.why == "no row to compare in these records"
    assert check_floors([Floor("Slide rule", "gelu", times=9.0)], found).missed == ()
    (missed,) = check_floors([Floor("Abacus", "gelu", times=1.0, peer="liger")], found).missed
    assert missed.reached == "-"


def test_ours_without_a_time_is_a_miss_and_sizes_of_a_sweep_are_not_checked():
    failed = replace(OURS, p20=None, p50=None, p80=None, note="out of memory: 3 GiB")
    check = check_floors([Floor("Abacus", "gelu", times=1.0)], [record(failed, TORCH)])
    assert [one.why for one in check.missed] == ["out of memory: 3 GiB"]
    swept = record(OURS, TORCH, replace(OURS, part="sweep", p50=9.0), replace(TORCH, part="sweep"))
    assert check_floors([Floor("Abacus", "gelu", times=1.0)], [swept]).missed == ()


def test_a_named_case_is_not_that_of_longer_names():
    rows = [replace(OURS, op="msm", case=case, p50=p50) for case, p50 in (("g1 2^20", 5.0), ("g1 2^20 prepared", 9.0))]
    assert check_floors([Floor("Abacus", "msm g1 2^20", ms=6.0)], [record(*rows)]).held == 1
    assert len(check_floors([Floor("Abacus", "msm 2^20", ms=6.0)], [record(*rows)]).missed) == 1


@pytest.mark.parametrize(
    "text",
    ["gelu = 1.1", "[x]\ngelu = 0", "[x]\ngelu = true", "[x]\ngelu = inf", '[x]\ngelu = "fast"',
     "[x]\ngelu = {ms = 1, times = 2}", "[x]\ngelu = {peer = 'torch'}",
     "[x]\ngelu = {ms = 1, speed = 2}", "[x", "[x]\ngelu = [1]"],
)  # fmt: skip
def test_what_is_no_floor_is_refused_with_its_name(text, tmp_path):
    path = floors_file(tmp_path, text)
    with pytest.raises(FormatError, match=r"floors\.toml"):
        read_floors(path)


def test_written_floors_are_reached_by_their_records_and_not_by_slower_ones(tmp_path, capsys):
    alone = replace(OURS, suite="zk", op="ntt", case="field 2^4", p50=1.0, p80=1.8)
    fast, slow = tmp_path / "fast.json", tmp_path / "slow.json"
    record(OURS, TORCH, alone).save(fast)
    record(replace(OURS, p50=4.0), TORCH, replace(alone, p50=3.0)).save(slow)
    path = tmp_path / "floors.toml"
    assert status(path, "--write") == 2
    assert status(path, fast, "--write") == 0
    assert read_floors(path) == [
        Floor("Abacus 9000", "gelu forward", times=1.08), Floor("Abacus 9000", "ntt field 2^4", ms=2.0),
    ]  # fmt: skip
    assert status(path, fast) == 0
    capsys.readouterr()
    assert status(path, slow) == 1
    said = capsys.readouterr().out
    assert "8x8 float32 forward  1.08x torch   0.6x" in said
    assert "0 of 2 figures reach their floors" in said
    assert status(path, slow, "--json") == 1
    assert [one["key"] for one in json.loads(capsys.readouterr().out)["missed"]] == ["gelu forward", "ntt field 2^4"]
    assert status(path, slow, "--op", "relu") == 2
    assert "no floors of these ops for Abacus 9000; it has tables for Abacus 9000" in capsys.readouterr().err


def test_the_shipped_floors_are_those_of_the_committed_records():
    names = ("neural", "training", "zk", "dp", "decode")
    records = [BenchmarkRecord.load(ROOT / "benchmarks" / "results" / f"{name}-h200.json") for name in names]
    assert floors_text(records, 0.9) == (ROOT / "benchmarks" / "floors.toml").read_text()
    check = check_floors(read_floors(ROOT / "benchmarks" / "floors.toml"), records)
    assert check.held > 300
    assert check.missed == ()


@pytest.mark.slow
def test_without_records_the_ops_are_measured_now(tmp_path, capsys):
    name = registry.find_device("cpu").name
    path = floors_file(tmp_path, f'["{name}"]\ntanh = 1e-9\n"msm g1" = {{ ms = 1 }}')
    assert status(path, "--device", "cpu", "--budget-seconds", "0") == 0
    assert capsys.readouterr().out == "2 of 2 figures reach their floors\n1 floors need a record: msm g1\n"
    path = floors_file(tmp_path, f'["{name}"]\ntanh = 1e9\n')
    assert status(path, "--device", "cpu", "--budget-seconds", "0", "--max-seconds", "60") == 1
    assert status(floors_file(tmp_path, '["Abacus"]\ntanh = 1\n'), "--device", "cpu") == 2


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["gelu", "softmax", "layer_norm", "rms_norm", "swiglu", "rope", "quantize_int8"])
def test_this_gpu_reaches_the_shipped_floors(op, capsys):
    path = ROOT / "benchmarks" / "floors.toml"
    name = registry.find_device("cuda").name
    if not any(floor.device in name for floor in read_floors(path)):
        pytest.skip(f"benchmarks/floors.toml has no floors for {name}")
    code = status(path, "--op", op)
    assert code == 0, capsys.readouterr().out
