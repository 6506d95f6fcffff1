"""`accelerant profile`: the tables, the trace, the script's exit status."""

import json
import signal
import sys
import time

import pytest

import commands
from accelerant.cli import tune as profile_module
from processes import Command

SCRIPT = """
import sys, torch, accelerant as acl
print("arguments", sys.argv[1:], __name__)
x = torch.randn(512, 512)
for _ in range(3):
    acl.ops.gelu(x @ x)
"""


@pytest.fixture
def profiled(capsys, tmp_path, monkeypatch):
    """Profiles a script's text in this process; returns status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(text, *arguments, options=("--no-ceilings",)):
        (tmp_path / "script.py").write_text(text)
        return commands.run("profile", capsys, *options, "script.py", *arguments)

    return run


def test_the_tables_follow_the_scripts_output(profiled):
    status, output, _ = profiled(SCRIPT, "--limit", "5", "-x", options=("--no-ceilings", "--max-rows", "2"))
    assert status == 0
    lines = output.splitlines()
    assert lines[0] == "arguments ['--limit', '5', '-x'] __main__"
    assert lines[1].split()[:4] == ["operation", "on", "the", "CPU"]
    assert any(line.startswith("aten::mm ") and line.split()[1] == "3" for line in lines)
    assert any(" others " in line for line in lines)
    assert any(line.startswith("gelu_fwd torch cpu") and line.split()[3] == "3" for line in lines)
    assert lines[-1].endswith(" s in all")


@pytest.mark.slow
def test_json_is_alone_on_the_output(profiled):
    status, output, errors = profiled(SCRIPT, options=("--json",))
    found = json.loads(output)
    assert "arguments [] __main__" in errors
    assert (status, found["exit_status"], found["device"]) == (0, 0, "cpu")
    product = next(row for row in found["operations"] if row["name"] == "aten::mm")
    assert product["calls"] == 3
    assert product["ceiling"] == pytest.approx(product["gflop_per_s"] / 1e3 / found["ceilings"]["matmul TFLOP/s"])
    (op,) = found["ops"]
    assert (op["name"], op["calls"]) == ("gelu_fwd torch cpu", 3)
    assert op["gb_per_s"] > 0


@pytest.mark.parametrize(("text", "status", "message"), [
    ("import sys; sys.exit(7)", 7, ""),
    ("import sys; sys.exit('enough')", 1, "enough"),
    ("raise ValueError('broken')", 1, "ValueError: broken"),
    ("raise KeyboardInterrupt", 130, "interrupted"),
    ("x = (", 1, "SyntaxError"),
])  # fmt: skip
def test_the_status_is_the_scripts(profiled, text, status, message):
    found, output, errors = profiled(text)
    assert found == status
    assert message in errors
    assert output.endswith(" s in all\n")


def test_a_trace_is_written(profiled, tmp_path):
    status, _, errors = profiled(f"import os; os.chdir('/')\n{SCRIPT}", options=("--no-ceilings", "--trace", "t.json"))
    assert status == 0
    assert f"wrote {tmp_path / 't.json'}" in errors
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}


def test_bad_usage_is_refused_before_the_script_runs(profiled, tmp_path, capsys):
    status, _, errors = profiled("raise SystemExit(5)", options=("--trace", str(tmp_path)))
    assert status == 2
    assert "is a folder; name a file" in errors
    status, _, errors = profiled("raise SystemExit(5)", options=("--trace", "script.py"))
    assert (status, errors) == (
        2,
        "accelerant: --trace: script.py is another file of this command: give another name\n",
    )
    assert commands.status("profile", "absent.py") == 2
    assert "no file absent.py" in capsys.readouterr().err


def test_kernels_have_their_resources_and_the_ledgers_bytes(tmp_path):
    """From a trace as CUPTI's events are written; test_a_gpu has a real one."""
    args = {"registers per thread": 32, "shared memory": 1024, "est. achieved occupancy %": 50}
    kernels = [
        {"cat": "kernel", "name": name, "dur": 500.0, "args": args} for name in ("gelu_fwd", "gelu_fwd", "other")
    ]
    events = [*kernels, {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "dur": 500.0}, {"cat": "cpu_op", "name": "x"}]

    class Recorded:
        def export_chrome_trace(self, path):
            with open(path, "w") as file:
                json.dump({"traceEvents": events}, file)

    op = {"op": "gelu_fwd", "case": "8 float32", "own": True, "bytes": 4e6, "flops": 8e6}
    limits = {"copy GB/s": 8.0, "matmul TFLOP/s": 1.0}
    gelu, *others = profile_module._kernels(Recorded(), tmp_path / "t.json", [op], limits)
    assert (gelu.name, gelu.calls, gelu.total_ms, gelu.share) == ("gelu_fwd", 2, 1.0, 0.5)
    assert (gelu.registers, gelu.shared_bytes, gelu.occupancy) == (32, 1024, 50)
    assert (gelu.gb_per_s, gelu.gflop_per_s, gelu.ceiling) == (4.0, 8.0, 0.5)
    assert [(row.name, row.gb_per_s) for row in others] == [("other", None), ("Memcpy HtoD", None)]


@pytest.mark.slow
def test_the_table_follows_ctrl_c(tmp_path):
    script, runs = tmp_path / "script.py", tmp_path / "runs"
    script.write_text(f"import pathlib, time\npathlib.Path({str(runs)!r}).touch()\ntime.sleep(60)\n")
    process = Command("profile", "--no-ceilings", script)
    while not runs.exists():
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert output.endswith(" s in all\n")
    assert "Traceback" not in errors


@pytest.mark.gpu
def test_a_gpu(profiled):
    text = """
import torch, accelerant as acl
from accelerant.runtime.dispatch import force
x = torch.randn(4096, 4096, device="cuda")
scale = acl.fuse(lambda x: torch.softmax(x, -1) * 2)
with force(gelu_fwd="triton"):
    for _ in range(3):
        scale(acl.ops.gelu(x))
"""
    status, output, _ = profiled(text, options=("--json",))
    found = json.loads(output)
    assert (status, found["device"]) == (0, "cuda")
    kernels = {row["name"]: row for row in found["kernels"]}
    own = [kernels["gelu_fwd"], next(row for name, row in kernels.items() if name.startswith("fused_"))]
    for row in own:
        assert row["calls"] == 3
        assert row["registers"] > 0
        assert 0 < row["ceiling"] < 1.5
