from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from accelerant.bench import Record
from accelerant.cli.app import build_app, main


def run(*arguments):
    return CliRunner().invoke(build_app(), list(arguments))


def test_devices_for_people_and_programs():
    assert "automatic choice" in run("devices").output
    found = json.loads(run("devices", "--json").output)
    assert {entry["backend"] for entry in found} >= {"cuda", "cpu"}
    assert all(entry["available"] or entry["reason"] for entry in found)


@pytest.mark.slow
def test_bench_measures_ours_beside_torch_and_writes_the_record(tmp_path):
    path = tmp_path / "now.json"
    result = run(
        "bench",
        "neural",
        "--op",
        "gelu",
        "--budget-s",
        "0",
        "--against",
        "torch",
        "--device",
        "cpu",
        "--out",
        str(path),
    )
    assert result.exit_code == 0, result.output
    rows = Record.load(path).rows
    assert {(row.runner, row.case.split()[-1]) for row in rows} == {
        (runner, direction) for runner in ("accelerant", "torch") for direction in ("forward", "backward")
    }
    ours = [row for row in rows if row.runner == "accelerant"]
    assert all(row.implementation and row.speedup and row.percent_of_ceiling for row in ours)
    assert "speedup" in result.output


@pytest.mark.slow
def test_bench_compare_exits_1_on_a_regression(tmp_path, capsys):
    path = tmp_path / "before.json"
    arguments = ["bench", "neural", "--op", "softmax", "--budget-s", "0", "--against", "torch", "--device", "cpu"]
    run(*arguments, "--out", str(path))
    baseline = json.loads(path.read_text())
    for row in baseline["rows"]:
        row["p50"] /= 1000
    path.write_text(json.dumps(baseline))
    with pytest.raises(SystemExit) as exit_:
        main([*arguments, "--compare", str(path)])
    assert exit_.value.code == 1
    assert "slower than" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "neural", "--op", "abacus"], "no op 'abacus'; there are"),
        (["bench", "neural", "--dtype", "float8"], "no dtype 'float8'"),
        (["bench", "neural", "--device", "abacus"], "unknown backend 'abacus'"),
        (["bench", "runtime", "--device", "webgpu"], "backend 'webgpu' is not available"),
        (
            [
                "bench",
                "neural",
                "--op",
                "gelu",
                "--device",
                "cpu",
                "--against",
                "torch",
                "--budget-s",
                "0",
                "--compare",
                "/nowhere.json",
            ],
            "/nowhere.json",
        ),
        (["nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_one_clear_line_and_exit_2(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err
