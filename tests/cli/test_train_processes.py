"""`accelerant train` in several processes: under torchrun, and started by --gpus."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from train_workers import commands, small

from accelerant.cli import launch, main
from accelerant.cli.train import _restarted
from accelerant.errors import ConfigError
from accelerant.nn.train.config import PRESETS
from accelerant.nn.train.folder import RunFolder
from accelerant.privacy import dp

gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

SOURCE = Path(__file__).parents[2] / "src"
WINDOWS = 114
"""Of the training part of the text below, of 65 bytes each."""


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(200)))
    return path


@pytest.fixture
def accelerant(capsys, tmp_path, monkeypatch):
    """Runs a command line in this process; returns status, output and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"])
    small()

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        return ended.value.code or 0, *capsys.readouterr()

    return run


def losses(out):
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@gloo
@pytest.mark.slow
def test_two_processes_write_the_losses_of_one(accelerant, text, tmp_path):
    line = ["train", text, "--steps", 5, "--micro-batch", 2, "--device", "cpu", "--out"]
    assert accelerant(*line, tmp_path / "one")[0] == 0
    (first, output, errors), (second, *silent) = commands([[*line, tmp_path / "two"]] * 2)
    assert (first, second) == (0, 0), errors
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "two")), torch.tensor(losses(tmp_path / "one")), rtol=0, atol=1e-6
    )
    assert silent == ["", ""]  # rank 0 alone shows anything
    assert re.search(r"throughput +[\d,]+ tokens/s on 2 processes on cpu \(1 thread\)", output)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two")]
    assert [summary["processes"] for summary in summaries] == [1, 2]
    assert summaries[0]["validation_loss"] == pytest.approx(
        summaries[1]["validation_loss"], abs=2e-4
    )  # rounded to 1e-4
    assert "of 2 processes" in (tmp_path / "two" / "report.html").read_text()
    names = {path.name for path in (tmp_path / "two").iterdir()}
    assert names - {"checkpoint-shards-5"} == {path.name for path in (tmp_path / "one").iterdir()}


@gloo
@pytest.mark.slow
def test_private_steps_of_two_processes_are_those_of_one(accelerant, text, tmp_path):
    """Without noise, at rate 1: all windows are in each step, half of them in each process."""
    private = ["--private", "--noise-multiplier", 0, "--batch-size", WINDOWS, "--micro-batch", 19]
    line = ["train", text, "--steps", 3, *private, "--device", "cpu", "--out"]
    assert accelerant(*line, tmp_path / "one")[0] == 0
    (first, _, errors), (second, *silent) = commands([[*line, tmp_path / "two"]] * 2)
    assert (first, second, silent) == (0, 0, ["", ""]), errors
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "two")), torch.tensor(losses(tmp_path / "one")), rtol=0, atol=1e-5
    )
    ledger = dp.Ledger.read(tmp_path / "two" / "privacy-ledger.jsonl")
    assert sum(event.count for event in ledger.events) == 3  # not six
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["private"]["sample_rate"] == 1.0


@gloo
@pytest.mark.slow
def test_a_spent_budget_ends_both_processes_at_the_same_step(accelerant, text, tmp_path):
    line = [
        "train",
        text,
        "--steps",
        40,
        "--private",
        "--noise-multiplier",
        1,
        "--target-epsilon",
        1.8,
        "--delta",
        1e-5,
    ]
    (first, output, errors), (second, *_) = commands([[*line, "--device", "cpu", "--out", tmp_path / "two"]] * 2)
    assert (first, second) == (0, 0), errors
    assert 0 < len(losses(tmp_path / "two")) < 40
    assert "the privacy budget is spent" in output
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["private"]["epsilon"] <= 1.8


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a GPU for each of two processes")
def test_two_gpus_write_the_losses_of_one(text, tmp_path):
    """By the launcher; the step is a graph that contains the sums of gradients."""
    for name, gpus in (("one", []), ("two", ["--gpus", "2"])):
        line = ["train", text, "--preset", "tiny", "--steps", "12", "--device", "cuda", *gpus, "--out", tmp_path / name]
        path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(
            [sys.executable, "-m", "accelerant", *map(str, line)], capture_output=True, text=True, timeout=300,
            env={**os.environ, "PYTHONPATH": path}, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert "tokens/s on 2 processes" in done.stdout
    # bfloat16 products of half of the rows each
    torch.testing.assert_close(*(torch.tensor(losses(tmp_path / name)) for name in ("two", "one")), rtol=5e-3, atol=0)


def another_version():
    import accelerant.nn.train.job

    accelerant.nn.train.job.__version__ = "0.0.1"


@gloo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "change", "message"),
    [
        (["--seed", 4], None, r"seed must be the same in each process: 3 in rank 0, 4 in rank 1 \(here 3\)"),
        ([], another_version, r"accelerant must be the same in each process: \S+ in rank 0, 0.0.1 in rank 1"),
        (["--data", "other.txt"], None, "the text must be the same in each process: give each the same --data"),
        (["--data", "absent"], None, r"rank 1: .*absent"),
        (["--batch-size", 9], None, r"rank 1: batch_size must be a multiple of the 2 processes, got 9"),
    ],
)
def test_a_disagreement_is_one_line_and_ends_all(text, tmp_path, monkeypatch, others, change, message):
    other = tmp_path / "other.txt"
    other.write_text(text.read_text().replace("some", "other"))
    others = [other if each == "other.txt" else tmp_path / each if each == "absent" else each for each in others]
    line = ["train", "--steps", 3, "--seed", 3, "--device", "cpu", "--json", "--out", tmp_path / "run"]
    given = [] if "--data" in others else ["--data", text]
    again = [value for value in line if value not in ("--seed", 3)] + ["--steps", 3] if "--seed" in others else line
    (first, *shown), (second, *silent) = commands([[*line, "--data", text], [*again, *given, *others]], change)
    assert (first, second) == (2, 2)
    assert re.fullmatch(rf"accelerant: {message}.*\n", shown[1]), shown
    assert (shown[0], *silent) == ("", "", "")
    assert not (tmp_path / "run").exists()


@gloo
@pytest.mark.parametrize("rank", [0, 1])
def test_a_port_that_is_used_or_closed_is_one_line(monkeypatch, rank):
    """Rank 0 listens on it, the others connect to it."""
    with socket.socket() as used:
        used.bind(("127.0.0.1", 0))
        if rank == 0:
            used.listen()
        port = used.getsockname()[1]
        values = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(launch, "_MEETING_S", 0.5)
        message = rf"^rank {rank} cannot meet the other processes at 127\.0\.0\.1:{port}: .+$"
        with pytest.raises(ConfigError, match=message), launch.joined(torch.device("cpu")):
            pass
    assert not torch.distributed.is_initialized()


def test_what_processes_cannot_do_is_refused_before_anything_is_written(accelerant, monkeypatch, text):
    def error(*arguments):
        status, _, errors = accelerant("train", text, "--out", "out", *arguments)
        assert status == 2
        assert not Path("out").exists()
        return errors

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "--gpus 2 is more than this machine has, 1 GPU: with --device cpu" in error("--gpus", 2)
    assert "--gpus must be above 0, got 0" in error("--gpus", 0)
    assert "reduce_dtype must be float32 or bfloat16, got" in error("--reduce-dtype", "float16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--gpus 3 starts processes itself" in error("--gpus", 3)
    assert "WORLD_SIZE is 2 and RANK is not set: start with --gpus, or torchrun" in error("--device", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "two")
    assert "WORLD_SIZE in the environment must be a whole number, got 'two'" in error("--device", "cpu")


def test_a_gpu_for_each_process_of_the_machine(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert launch.own_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="rank 3 is process 1 of this machine, counted from 0, which has 1 GPU"):
        launch.own_device(torch.device("cuda", 0))


def test_a_restart_continues_the_same_run_alone(monkeypatch, tmp_path):
    run, folder = PRESETS["tiny"], RunFolder(tmp_path)
    folder.write_config({"run": run.to_dict()})
    assert not _restarted(tmp_path, run)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert not _restarted(tmp_path, run)  # no checkpoint yet
    folder.checkpoint.touch()
    assert _restarted(tmp_path, run)
    assert not _restarted(tmp_path, run.replaced(seed=5))
    folder.summary.touch()
    assert not _restarted(tmp_path, run)


def check_interrupted(out, output):
    stopped = re.fullmatch(
        r"Stopped after step (\d+) of 2400; a checkpoint is written\.\n"
        rf"Continue with:  accelerant train --resume {out}\n",
        output,
    )
    assert stopped, output
    assert len(losses(out)) == int(stopped[1])
    assert (out / "checkpoint.safetensors").is_file()
    assert not (out / "checkpoint-previous.safetensors").exists()


@gloo
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_writes_one_checkpoint_and_ends_with_130(text, tmp_path):
    out = tmp_path / "run"
    line = ["train", text, "--device", "cpu", "--out", out]
    (first, output, errors), (second, *silent) = commands([line, line], interrupt=out / "metrics.jsonl")
    assert (first, second, *silent) == (130, 130, "", ""), errors
    check_interrupted(out, output)


@gloo
@pytest.mark.soak  # four times the CPU time of the one above
@pytest.mark.skipif(os.name != "posix", reason="signals of a launcher")
def test_the_launcher_passes_ctrl_c_on(text, tmp_path):
    out = tmp_path / "run"
    path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-m", "accelerant", "train", str(text), "--device", "cpu", "--gpus", "2", "--out", str(out)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        until = time.monotonic() + 200  # on a loaded machine
        metrics = out / "metrics.jsonl"
        while process.poll() is None and time.monotonic() < until and not (metrics.exists() and metrics.stat().st_size):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    check_interrupted(out, output)
    assert "Traceback" not in errors
