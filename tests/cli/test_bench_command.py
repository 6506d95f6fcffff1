"""`accelerant bench`: what is left behind, and the exit statuses."""

import functools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import commands
from accelerant.bench import BenchmarkRecord, suites
from accelerant.bench.neural import NeuralSuite
from accelerant.bench.suites import AlgebraSuite, BandwidthSuite, RuntimeSuite
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice

SUITES = (NeuralSuite, AlgebraSuite, RuntimeSuite, BandwidthSuite)
QUICK = ["--device", "cpu", "--budget-seconds", "0"]


status = functools.partial(commands.status, "bench")


@pytest.fixture
def small(monkeypatch):
    """Suites of few and small cases."""
    monkeypatch.setattr(suites, "_CPU_SIZES", (4096,))
    monkeypatch.setattr(suites, "default_sizes", lambda gpu: (4096, 65536))
    monkeypatch.setattr(suites, "_compiles", lambda device: [])


def edited(path, change):
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


@pytest.mark.slow
def test_all_runs_every_suite_and_leaves_record_page_and_progress(tmp_path, small, capsys):
    out, page = tmp_path / "now.json", tmp_path / "report.html"
    code = status("all", *QUICK, "--op", "gelu", "--against", "torch", "--out", str(out), "--report", str(page))
    said = capsys.readouterr()
    assert code == 0, said.err
    rows = BenchmarkRecord.load(out).rows
    assert {row.suite for row in rows} == {"neural", "algebra", "runtime", "bandwidth"}
    assert {"gelu", "field_add", "launch", "stream overlap", "batch gain", "device copy"} <= {row.op for row in rows}
    assert all(row.p50 for row in rows)
    assert page.read_text().startswith("<!doctype html>")
    names = ["neural", "algebra", "runtime", "bandwidth"]  # a suite that takes longer has more lines
    assert list(dict.fromkeys(word for word in said.err.split() if word in names)) == names


@pytest.mark.slow
@pytest.mark.parametrize("suite", ["algebra", "all"])
def test_compare_exits_0_beside_itself_and_1_on_a_regression_past_the_noise(suite, tmp_path, small, capsys):
    arguments = [suite, *QUICK]
    arguments += ["--suite", "bandwidth"] if suite == "all" else ["--no-compiled"] if suite == "algebra" else []
    path = tmp_path / "before.json"
    assert status(*arguments, "--out", str(path)) == 0

    def scaled(factor):
        def change(table):
            for row in table["rows"]:
                row.update({name: row[name] * factor for name in ("p20", "p50", "p80")})

        return change

    edited(path, scaled(1000.0))
    assert status(*arguments, "--compare", str(path)) == 0
    assert "faster" in capsys.readouterr().err
    edited(path, scaled(1e-6))
    assert status(*arguments, "--compare", str(path)) == 1
    assert f"slower than {path}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_missing_row_is_a_regression_and_one_not_asked_for_is_not(tmp_path, small, capsys):
    path = tmp_path / "before.json"
    arguments = ["bandwidth", *QUICK, "--size", "4KiB"]
    assert status(*arguments, "--out", str(path)) == 0

    def change(table):
        gone = table["rows"][0] | {"op": "warp", "case": "4 KiB", "runner": "device"}
        other = gone | {"case": "8 GiB pinned"}
        for row in table["rows"]:
            row.update(p20=1e6, p50=1e6, p80=1e6)
        table["rows"] += [gone, other]

    edited(path, change)
    assert status(*arguments, "--compare", str(path)) == 1
    said = capsys.readouterr().err
    assert "missing  bandwidth  warp" in said
    assert "1 of the baseline not asked for" in said


@pytest.mark.sample(5)
@pytest.mark.parametrize("suite", ["neural", "algebra", "runtime", "bandwidth", "all"])
@pytest.mark.parametrize("damage", ["text", "device", "figure", "absent"])
def test_a_bad_baseline_ends_with_2_before_anything_is_measured(suite, damage, tmp_path, monkeypatch, capsys):
    for suite_ in SUITES:
        monkeypatch.setattr(suite_, "measure", Mock(side_effect=AssertionError("something was measured")))
    path = tmp_path / "before.json"
    table = {
        "environment": dict.fromkeys(
            ("device", "backend", "architecture", "driver", "system", "python", "accelerant", "time"), "abacus"
        ) | {"packages": {}},
        "ceilings": {},
        "rows": [
            {"suite": "neural", "op": "gelu", "case": "x", "runner": "accelerant", "implementation": "own",
             "p20": 1.0, "p50": 1.0 if damage != "figure" else "1", "p80": 1.0}
        ],
    }  # fmt: skip
    if damage != "absent":
        path.write_text('{"rows": [' if damage == "text" else json.dumps(table))
    assert status(suite, "--device", "cpu", "--compare", str(path)) == 2
    said = capsys.readouterr().err
    assert str(path) in said
    assert ("the baseline is of abacus, this run of" in said) == (damage == "device")


def test_a_suite_that_fails_leaves_the_others_and_exits_1(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(AlgebraSuite, "measure", Mock(side_effect=RuntimeError("the abacus broke")))
    out, page = tmp_path / "now.json", tmp_path / "report.html"
    suites = ["--suite", "algebra", "--suite", "bandwidth"]
    assert status("all", *QUICK, *suites, "--out", str(out), "--report", str(page)) == 1
    assert "the algebra suite failed: RuntimeError: the abacus broke" in capsys.readouterr().err
    record = BenchmarkRecord.load(out)
    assert any(row.suite == "bandwidth" and row.p50 for row in record.rows)
    assert next(row for row in record.rows if row.suite == "algebra").note == "RuntimeError: the abacus broke"
    assert "the abacus broke" in page.read_text()


def test_an_interrupt_keeps_what_was_measured_and_exits_130(tmp_path, small, monkeypatch, capsys):
    monkeypatch.setattr(BandwidthSuite, "measure", Mock(side_effect=KeyboardInterrupt))
    out = tmp_path / "now.json"
    suites = ["--suite", "algebra", "--suite", "bandwidth", "--against", "torch"]
    assert status("all", *QUICK, *suites, "--out", str(out)) == 130
    said = capsys.readouterr()
    assert "interrupted; what was measured is kept" in said.err
    record = BenchmarkRecord.load(out)
    assert {row.suite for row in record.rows} == {"algebra"}
    assert record.notes == ["interrupted: these suites are not complete: bandwidth"]


@pytest.mark.slow
def test_neural_leaves_a_folder_and_goes_on_with_it(tmp_path, capsys):
    folder = tmp_path / "record"
    arguments = ["neural", *QUICK, "--op", "gelu", "--against", "torch", "--sweep", "--sweep-to", "10"]
    assert status(*arguments, "--out", str(folder), "--max-seconds", "0") == 0
    assert "3 of 3 cases not measured" in capsys.readouterr().out
    assert status(*arguments, "--out", str(folder)) == 2
    assert "--resume goes on with it" in capsys.readouterr().err
    assert status(*arguments, "--out", str(folder), "--resume") == 0
    names = {"record.json", "record.csv", "report.html", "rows.jsonl"}
    assert {path.name for path in folder.iterdir()} == names
    rows = BenchmarkRecord.load(folder / "record.json").rows
    assert {row.part for row in rows} == {"", "sweep"}
    assert all(row.p50 and row.error < 1e-4 for row in rows)
    assert len((folder / "rows.jsonl").read_text().splitlines()) == 4
    assert status(*arguments, "--out", str(folder), "--resume") == 0
    again = BenchmarkRecord.load(folder / "record.json").rows  # nothing was measured anew
    assert {row.key: row.samples for row in again} == {row.key: row.samples for row in rows}


@pytest.mark.slow
def test_a_run_goes_on_only_as_it_was_begun(tmp_path, capsys):
    arguments = ["neural", *QUICK, "--op", "relu", "--against", "none", "--max-seconds", "0", "--out", str(tmp_path)]
    assert status(*arguments) == 0
    before = (tmp_path / "rows.jsonl").read_bytes()
    for *other, message in (
        ("--against", "torch", "is of a run with --against none; this one has --against torch"),
        ("--dtype", "bf16", "is of a run with --dtype default; this one has --dtype bfloat16"),
        ("--budget-seconds", "0.5", "is of a run with --budget-seconds 0; this one has --budget-seconds 0.5"),
    ):
        capsys.readouterr()
        assert status(*arguments, "--resume", *other) == 2
        assert message in capsys.readouterr().err
        assert (tmp_path / "rows.jsonl").read_bytes() == before
    assert status(*arguments, "--resume", "--odd") == 0  # more cases are no other rows


def test_an_unknown_peer_is_refused_before_a_folder_is_made(tmp_path, capsys):
    folder = tmp_path / "record"
    assert status("neural", *QUICK, "--against", "torhc", "--out", str(folder)) == 2
    assert "--against: no peer 'torhc'" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.slow
def test_a_folder_of_another_commit_is_refused_and_keeps_its_record(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "of 0.1"  # a folder that is there may have any name
    folder.mkdir()
    arguments = ["neural", *QUICK, "--op", "gelu", "--against", "none", "--out", str(folder)]
    assert status(*arguments) == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(before) == {"record.json", "record.csv", "report.html", "rows.jsonl"}
    capsys.readouterr()
    monkeypatch.setenv("ACCELERANT_COMMIT", "another")
    assert status(*arguments, "--resume") == 2
    assert "here it is 'another'; name another folder to start over" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path, capsys):
    path = tmp_path / "file"
    path.write_text("in the way")
    assert status("neural", *QUICK, "--out", str(path)) == 2
    assert capsys.readouterr().err == f"accelerant: --out: folder {path} cannot be made: File exists\n"


@pytest.mark.parametrize(("index", "wanted"), [(0, []), (1, [1])])
def test_the_device_that_is_measured_is_the_current_one(index, wanted, monkeypatch, capsys):
    """Else events and flushes would be another device's: calls on cuda:1 would seem to take no time."""
    device = ComputeDevice("cuda", index, "abacus", architecture="sm_90", torch_type="cuda")
    made_current = []
    monkeypatch.setattr(registry, "find_device", lambda name, **options: device)
    monkeypatch.setattr(torch.cuda, "set_device", made_current.append)
    assert status("neural", "--device", f"cuda:{index}", "--op", "gelu", "--list") == 0
    assert made_current == wanted


def test_neural_lists_its_cases_without_measuring(monkeypatch, capsys):
    monkeypatch.setattr(NeuralSuite, "measure", lambda *args: pytest.fail("something was measured"))
    arguments = ["neural", "--device", "cpu", "--op", "softmax", "--dtype", "bf16", "--dtype", "fp32"]
    arguments += ["--sweep", "--odd", "--list"]
    assert status(*arguments) == 0
    *cases, total = capsys.readouterr().out.splitlines()
    assert sum(" s  softmax 16384x4096" in case for case in cases) == 2
    assert {"float32", "bfloat16"} <= {word for case in cases for word in case.split()}
    assert total.startswith(f"{len(cases)} cases, about ")
    assert status(*arguments, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)) == len(cases)
    assert status(*arguments, "--no-tables") == 0
    *rest, _ = capsys.readouterr().out.splitlines()
    assert rest == [case for case in cases if " s  softmax 16384x4096" not in case]


def test_an_op_is_a_command_with_sizes_of_its_own(capsys):
    arguments = [
        "matmul", "--device", "cpu", "--size", "8..16", "--size", "4x8", "--dtype", "float32", "--dtype", "bfloat16",
        "--list", "--json",
    ]  # fmt: skip
    assert status(*arguments) == 0
    cases = [case["case"] for case in json.loads(capsys.readouterr().out)]
    assert [case.rpartition(" ")[0] for case in cases] == [
        f"size matmul {shape} {dtype}"
        for shape in ("8x8@8x8", "16x16@16x16", "4x8@8x8")
        for dtype in ("float32", "bfloat16")
    ]
    assert all(case.endswith(" torch+unfused+numpy+naive") for case in cases)


@pytest.mark.parametrize(("arguments", "message"), [
    (["matmul", "--device", "cpu", "--size", "4x"], "--size: wanted sizes like 4096x4096"),
    (["check", "/nowhere.toml", "--device", "cpu"], "/nowhere.toml is not a file of floors"),
    (["neural", "--device", "cpu", "--resume"], "--resume: --out must name the folder"),
    (["neural", "--device", "cpu", "--dtype", "bf16", "--dtype", "int4"],
     "--dtype: no dtype 'int4'; there are bfloat16, float16, float32"),
    (["neural", "--device", "cpu", "--no-tables"], "--no-tables: nothing is left to measure; add --odd or --sweep"),
    (["all", "--suite", "abacus"], "no suite 'abacus'; there are neural, algebra"),
    (["all", "--op", "abacus"], "no op 'abacus'"),
    (["bandwidth", "--size", "1MB"], "got '1MB'"),
    (["bandwidth", "--size", "1048576GiB", "--device", "cpu"], "needs 6 buffers"),
    (["bandwidth", "--device", "cpu:x"], "cpu:x"),
    (["algebra", "--device", "cpu", "--report", "."], "--report: . is a folder"),
    (["gelu", "--device", "cpu", "--out", "n.txt"], "--out: n.txt must be a .json file, or a folder"),
])  # fmt: skip
def test_wrong_usage_is_one_clear_line_and_exit_2(arguments, message, capsys):
    assert status(*arguments) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("option", ["--out", "--report"])
@pytest.mark.parametrize("suite", ["neural", "algebra", "runtime", "bandwidth", "all"])
def test_a_path_that_cannot_be_written_ends_with_2_before_anything_is_measured(
    suite, option, tmp_path, monkeypatch, capsys
):
    for suite_ in SUITES:
        monkeypatch.setattr(suite_, "measure", Mock(side_effect=AssertionError("something was measured")))
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "now.json"
    assert status(suite, "--device", "cpu", option, str(path)) == 2
    said = capsys.readouterr()
    assert f"{option}: {path} cannot be written" in said.err
    assert not said.out
    if option != "--out":
        assert status(suite, "--device", "cpu", "--out", "now.json", option, "./now.json") == 2
        assert f"{option}: now.json is another file of this command" in capsys.readouterr().err


def test_what_was_measured_is_printed_where_it_cannot_be_written_afterwards(tmp_path, small, monkeypatch, capsys):
    folder, page = tmp_path / "folder", tmp_path / "report.html"
    measure = BandwidthSuite.measure

    def disturbed(self, run):
        measure(self, run)
        shutil.rmtree(folder)
        folder.write_text("in the way")

    monkeypatch.setattr(BandwidthSuite, "measure", disturbed)
    path = folder / "now.json"
    assert status("bandwidth", *QUICK, "--out", str(path), "--report", str(page)) == 1
    said = capsys.readouterr()
    assert "device copy" in said.out
    assert f"--out: {path} cannot be written" in said.err
    assert page.read_text().startswith("<!doctype html>")
    assert {entry.name for entry in tmp_path.iterdir()} == {"folder", "report.html"}


@pytest.mark.parametrize("command", ["all", "neural", "algebra", "runtime", "bandwidth", "check", "gelu"])
def test_help_has_an_example(command, capsys):
    assert status(command, "--help") == 0
    assert "Example" in capsys.readouterr().out


RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))


@pytest.mark.parametrize("path", [path for path in RECORDS if not path.name.startswith("curve")], ids=lambda p: p.stem)
@pytest.mark.sample(4)
def test_committed_records_compare_with_themselves_and_with_a_slower_run(path, tmp_path, capsys):
    assert status("compare", str(path), str(path)) == 0
    assert "0 slower" not in capsys.readouterr().out
    record = BenchmarkRecord.load(path)
    record.rows = [
        replace(row, p20=row.p20 * factor, p50=row.p50 * factor, p80=row.p80 * factor) if row.p50 and row.p20 else row
        for row in record.rows
        for factor in [0.01 if row.better == "higher" else 100]
    ]
    record.save(tmp_path / "slow.json")
    assert status("compare", str(path), str(tmp_path / "slow.json")) == 1


def test_the_cases_of_all_suites_are_listed(capsys):
    assert status("all", *QUICK, "--op", "gelu", "--list", "--json") == 0
    cases = [case["case"] for case in json.loads(capsys.readouterr().out)]
    assert {"field_add 16,384 elements", "launch", "256 KiB"} <= set(cases)
    assert any(case.startswith("gelu ") for case in cases)
