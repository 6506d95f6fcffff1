import json
import re

import pytest
from typer.testing import CliRunner

from accelerant.bench import BenchmarkRecord
from accelerant.cli.app import build_app
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice
from accelerant.testing import FakeProvider
from commands import status


def run(*arguments):
    return CliRunner().invoke(build_app(), list(arguments))


def test_devices_for_people_and_programs():
    assert "automatic choice" in run("devices").output
    found = json.loads(run("devices", "--json").output)
    assert {entry["backend"] for entry in found} >= {"cuda", "cpu"}
    assert all(entry["available"] or entry["reason"] for entry in found)


class Hidden(FakeProvider):
    """A backend that has a device which this process does not see, and whose memory cannot be asked for."""

    name = "hidden"

    def hidden_devices(self):
        return [
            ComputeDevice("hidden", -1, "H200 MIG 1g.18gb", available=False, reason="another's", memory_bytes=18 << 30)
        ]

    def memory(self, device=0):
        raise OSError("the bus is gone")


def test_devices_of_another_package_take_no_rows_away():
    registry.register(Hidden)
    try:
        text = run("devices").output
        found = [entry for entry in json.loads(run("devices", "--json").output) if entry["backend"] == "hidden"]
    finally:
        registry.unregister("hidden")
    assert re.search(r"hidden:0 +fake device 0 +- \(OSError\)", text)
    assert re.search(r"hidden +H200 MIG 1g.18gb +18 GiB +absent: another's", text)
    assert [entry["available"] for entry in found] == [True, False]
    assert "automatic choice" in text


def test_devices_have_their_specification():
    (cpu,) = [entry for entry in json.loads(run("devices", "--json").output) if entry["backend"] == "cpu"]
    assert cpu["properties"]["cores"] >= 1
    if "dtypes" in cpu["properties"]:  # Linux
        assert cpu["properties"]["dtypes"][:2] == ["float64", "float32"]


@pytest.mark.parametrize("name", ["vulkan", "Vulkan", "webgpu"])
def test_bench_has_no_suites_for_webgpu(name, capsys):
    assert status("bench", "runtime", "--device", name) == 2
    present = f"bench measures devices that torch has tensors on; {name} is not one"  # no "unknown backend"
    assert re.search(f"{present}|backend 'webgpu' is not available", capsys.readouterr().err)


@pytest.mark.slow
def test_bench_measures_ours_beside_torch_and_writes_the_record(tmp_path):
    path = tmp_path / "now.json"
    result = run(
        "bench",
        "neural",
        "--op",
        "gelu",
        "--budget-seconds",
        "0",
        "--against",
        "torch",
        "--device",
        "cpu",
        "--out",
        str(path),
    )
    assert result.exit_code == 0, result.output
    rows = BenchmarkRecord.load(path).rows
    assert {(row.runner, row.case.split()[-1]) for row in rows} == {
        (runner, direction) for runner in ("accelerant", "torch") for direction in ("forward", "backward")
    }
    ours = [row for row in rows if row.runner == "accelerant"]
    assert all(row.implementation and row.speedup and row.percent_of_ceiling for row in ours)
    assert "speedup" in result.output


@pytest.mark.slow
def test_bench_compare_exits_1_on_a_regression(tmp_path, capsys):
    path = tmp_path / "before.json"
    arguments = ["bench", "neural", "--op", "softmax", "--budget-seconds", "0", "--against", "torch", "--device", "cpu"]
    run(*arguments, "--out", str(path))
    baseline = json.loads(path.read_text())
    for row in baseline["rows"]:
        row["p50"] /= 1000
    path.write_text(json.dumps(baseline))
    assert status(*arguments, "--compare", path) == 1
    assert "slower than" in capsys.readouterr().err


@pytest.mark.parametrize(("arguments", "message"), [
    (["bench", "neural", "--op", "abacus"], "no op 'abacus'; there are"),
    (["bench", "neural", "--dtype", "float8"], "no dtype 'float8'"),
    (["bench", "neural", "--device", "abacus"], "unknown backend 'abacus'"),
    (["bench", "runtime", "--device", "rocm"], "backend 'rocm' is not available"),
    (
        [
            "bench", "neural", "--op", "gelu", "--device", "cpu", "--against", "torch", "--budget-seconds", "0",
            "--compare", "/nowhere.json",
        ],
        "/nowhere.json",
    ),
    (["nonsense"], "nonsense"),
])  # fmt: skip
def test_wrong_usage_is_one_clear_line_and_exit_2(arguments, message, capsys):
    assert status(*arguments) == 2
    assert message in capsys.readouterr().err
