"""`accelerant train` in several processes: under torchrun, and started by --gpus."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from train_workers import commands, losses

from accelerant.cli import train
from accelerant.cli.train import _Processes, _restarted
from accelerant.errors import ConfigError
from accelerant.nn.train.checkpoint import Checkpoints, save_checkpoint
from accelerant.nn.train.config import PRESETS
from accelerant.nn.train.history import RunFolder
from accelerant.privacy import dp
from accelerant.runtime.processes import OWN_LAUNCH, attempt, launch_id

gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch was built without gloo")

SOURCE = Path(__file__).parents[2] / "src"
WINDOWS = 114
"""Of the training part of the text below, of 65 bytes each."""


@gloo
@pytest.mark.slow
def test_two_processes_write_the_losses_of_one(accelerant, text, tmp_path):
    line = ["train", text, "--steps", 5, "--microbatch", 2, "--device", "cpu", "--out"]
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
    private = ["--private", "--noise-multiplier", 0, "--batch-size", WINDOWS, "--microbatch", 19]
    line = ["train", text, "--steps", 3, *private, "--device", "cpu", "--out"]
    assert accelerant(*line, tmp_path / "one")[0] == 0
    (first, _, errors), (second, *silent) = commands([[*line, tmp_path / "two"]] * 2)
    assert (first, second, silent) == (0, 0, ["", ""]), errors
    torch.testing.assert_close(
        torch.tensor(losses(tmp_path / "two")), torch.tensor(losses(tmp_path / "one")), rtol=0, atol=1e-5
    )
    ledger = dp.PrivacyLedger.read(tmp_path / "two" / "privacy-ledger.jsonl")
    assert sum(event.count for event in ledger.events) == 3  # not six
    assert json.loads((tmp_path / "two" / "summary.json").read_text())["private"]["sample_rate"] == 1.0


@gloo
@pytest.mark.slow
def test_a_spent_budget_ends_both_processes_at_the_same_step(accelerant, text, tmp_path):
    line = [
        "train", text, "--steps", 40, "--private", "--noise-multiplier", 1, "--target-epsilon", 1.8, "--delta", 1e-5,
    ]  # fmt: skip
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
@pytest.mark.parametrize(("others", "change", "message"), [
    (["--seed", 4], None, r"seed must be the same in each process: 3 in rank 0, 4 in rank 1 \(here 3\)"),
    ([], another_version, r"accelerant must be the same in each process: \S+ in rank 0, 0.0.1 in rank 1"),
    (["--data", "other.txt"], None, "the text must be the same in each process: give each the same --data"),
    (["--data", "absent"], None, r"rank 1: .*absent"),
    (["--batch-size", 9], None, r"rank 1: batch_size must be a multiple of the 2 processes, got 9"),
])  # fmt: skip
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
        monkeypatch.setattr(train, "_MEETING_S", 0.5)
        message = rf"^rank {rank} cannot meet the other processes at 127\.0\.0\.1:{port}: .+$"
        with pytest.raises(ConfigError, match=message), train.joined(torch.device("cpu")):
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
    assert train.own_device(torch.device("cpu")) == torch.device("cpu")
    with pytest.raises(ConfigError, match="rank 3 is process 1 of this machine, counted from 0, which has 1 GPU"):
        train.own_device(torch.device("cuda", 0))


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


def test_a_restart_by_a_launcher_with_a_name_continues_what_the_same_one_began(monkeypatch, tmp_path):
    """Settings may differ: --epochs and --init-from set some of them while the run begins."""
    run, folder = PRESETS["tiny"], RunFolder(tmp_path)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OWN_LAUNCH}12-ab.0")
    folder.write_config({"run": {}, "launch": launch_id()})
    folder.checkpoint.touch()
    assert (attempt(), _restarted(tmp_path, run)) == (0, False)  # an earlier start's: this is the first attempt
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OWN_LAUNCH}12-ab.2")
    assert (attempt(), _restarted(tmp_path, run)) == (2, True)
    folder.checkpoint.unlink()
    assert not _restarted(tmp_path, run)
    folder.summary.touch()  # killed after the end: it is not begun again
    assert _restarted(tmp_path, run)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", f"{OWN_LAUNCH}12-cd.2")
    assert not _restarted(tmp_path, run)


@pytest.mark.parametrize(("codes", "cause"), [
    ({1: -9}, (137, "rank 1 was ended by signal 9 (SIGKILL)")),
    ({0: -11, 1: 1}, (139, "rank 0 was ended by signal 11 (SIGSEGV)")),
    ({0: 1, 1: -9}, (137, "rank 1 was ended by signal 9 (SIGKILL)")),  # it hung: 0 found out, the launcher killed
    ({0: 1, 1: 75}, (1, "rank 1 has lost its device")),
    ({1: -15}, (143, "")),  # somebody asked it to end
    ({1: 2, 0: -15}, (2, "")),
    ({0: 1, 1: 1}, (1, "")),
    ({0: 130, 1: 130}, (130, "")),
])  # fmt: skip
def test_which_ends_are_final(codes, cause):
    failures = {rank: ProcessFailure(rank, 100 + rank, code, "none") for rank, code in codes.items()}
    assert train._cause(ChildFailedError("train", failures)) == cause


def broken_device():
    """Step 3 meets an error of the device, in a process of our launcher."""
    from accelerant.nn.train.trainer import Trainer

    os.environ["TORCHELASTIC_RUN_ID"] = f"{OWN_LAUNCH}{os.getppid()}-ab.0"
    notify = Trainer.notify

    def broken(trainer, event, *given):
        if (event, *given) == ("before_step", 2):
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nCompile with ...")
        notify(trainer, event, *given)

    Trainer.notify = broken


@gloo
@pytest.mark.slow
def test_a_process_whose_device_is_lost_tells_our_launcher_by_its_status(text, tmp_path):
    line = ["train", text, "--steps", 5, "--device", "cpu", "--out", tmp_path / "run"]
    (first, _, errors), (second, output, error) = commands([line, line], broken_device)
    assert (first, second, output) == (1, 75, "")
    message = "rank 1: {}CUDA error: an illegal memory access was encountered\n"
    assert error == f"accelerant: {message.format('')}"
    assert f"accelerant: {message.format('AcceleratorError: ')}" in errors


@pytest.fixture
def of_two(tmp_path):
    """The folder of an unfinished run, whose checkpoint of step 7 two processes wrote."""
    folder = RunFolder(tmp_path / "a run")
    (folder.path / "checkpoint-shards-7").mkdir(parents=True)
    for rank in range(2):
        (folder.path / "checkpoint-shards-7" / f"{rank:05}.safetensors").touch()
    folder.write_config({"run": PRESETS["tiny"].to_dict(), "backend": "cuda"})
    save_checkpoint(folder.checkpoint, {}, {"step": 7, "shards": {"folder": "checkpoint-shards-7"}})
    return folder


def test_a_run_goes_on_in_as_many_processes_as_before(accelerant, monkeypatch, of_two, capsys):
    assert Checkpoints(of_two.path).written == (7, 2)
    assert of_two.resume_command == f"accelerant train --resume '{of_two.path}' --gpus 2"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    status, _, errors = accelerant("train", "--resume", of_two.path)
    assert status == 2
    assert re.search(
        "a run trained in 2 processes, and this machine has 1 GPU: give --gpus to go on in another", errors
    )
    started = []
    monkeypatch.setattr("accelerant.cli.train.spawn", lambda count, *_, **__: started.append(count))
    accelerant("train", "--resume", of_two.path, "--device", "cpu")
    accelerant("train", "--resume", of_two.path, "--device", "cpu", "--gpus", 3)
    of_two.summary.write_text('{"steps": 7}')
    accelerant("train", "--resume", of_two.path, "--device", "cpu")  # finished: nothing to start
    assert started == [2, 3]


def test_a_private_run_does_not_begin_again_by_itself(monkeypatch, tmp_path):
    """Its new ledger would lack the steps that were made before the kill; from a checkpoint it goes on."""
    asked = []
    monkeypatch.setattr("accelerant.cli.train.spawn", lambda *_, kept, advice, **__: asked.append((kept, advice)))
    processes = _Processes(2, None, ["train", "a text", "--gpus", "2"])
    for private in (True, False):
        processes.start(tmp_path, "cpu", None, private=private)
    (kept, advice), (plainly, again) = asked
    assert kept() == plainly() == "from the beginning: there is no checkpoint yet"  # nothing was spent
    (tmp_path / RunFolder.LEDGER).touch()
    assert (kept(), bool(plainly())) == ("", True)
    assert f"give it --ledger {tmp_path / RunFolder.LEDGER} and another --out" in advice()
    assert again() == "there is no checkpoint yet; start again with:  accelerant train 'a text' --gpus 2"
    save_checkpoint(tmp_path / "checkpoint.safetensors", {}, {"step": 7})
    assert kept() == plainly() == "from the checkpoint of step 7"
    assert advice() == f"continue with:  accelerant train --resume {tmp_path}"


def test_restarts_are_those_of_several_processes(accelerant, text):
    for given, message in (
        (["--max-restarts", -1, "--gpus", 2], "--max-restarts must be 0 or more, got -1"),
        (["--max-restarts", 2], "--max-restarts 2 goes with --gpus, of 2 or more"),
    ):
        status, _, errors = accelerant("train", text, "--device", "cpu", *given)
        assert (status, bool(re.search(message, errors))) == (2, True), errors


def check_interrupted(out, output, steps=2400):
    stopped = re.fullmatch(
        rf"Stopped after step (\d+) of {steps}; a checkpoint is written\.\n"
        rf"Continue with:  accelerant train --resume {out} --gpus 2\n",
        output,
    )
    assert stopped, output
    assert len(losses(out)) == int(stopped[1])
    assert (out / "checkpoint.safetensors").is_file()


@gloo
@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_ctrl_c_writes_one_checkpoint_and_ends_with_130(text, tmp_path):
    out = tmp_path / "run"
    line = ["train", text, "--device", "cpu", "--out", out]
    (first, output, errors), (second, *silent) = commands([line, line], interrupt=out / "metrics.jsonl")
    assert (first, second, *silent) == (130, 130, "", ""), errors
    check_interrupted(out, output)
    assert not (out / "checkpoint-previous.safetensors").exists()


class Launched:
    """`accelerant train ARGUMENTS` in a process of its own, which starts others."""

    def __init__(self, out, *arguments):
        path = os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])
        self.out, self.attempts = out, set()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "accelerant", "train", *map(str, arguments)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def wait_for(self, lines):
        """Wait until the metrics have more lines."""
        until, metrics = time.monotonic() + 200, self.out / "metrics.jsonl"  # on a loaded machine
        while self.process.poll() is None and time.monotonic() < until:
            if metrics.exists() and metrics.read_bytes().count(b"\n") > lines:
                return
            time.sleep(0.01)

    def kill(self, rank):
        """Kill the process of a rank that no earlier call has met; return its number of restarts."""
        until = time.monotonic() + 200
        while self.process.poll() is None and time.monotonic() < until:
            for pid in subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True).stdout.split():
                with contextlib.suppress(OSError):
                    names = Path(f"/proc/{pid.decode()}/environ").read_text().split("\0")
                    own = dict(each.partition("=")[::2] for each in names)
                    again = int(own.get("TORCHELASTIC_RUN_ID", ".-1").rpartition(".")[2])
                    if own.get("RANK") == str(rank) and again not in self.attempts:
                        os.kill(int(pid), signal.SIGKILL)
                        self.attempts.add(again)
                        return again
            time.sleep(0.01)
        return None

    def end(self):
        """Return status, output and errors."""
        try:
            output, errors = self.process.communicate(timeout=400)
        finally:
            self.process.kill()
        return self.process.returncode, output, errors


def interrupted(text, out, steps=40):
    """A small run of two processes that has a checkpoint, and writes one after each step when it goes on."""
    line = ["train", text, "--steps", steps, "--device", "cpu", "--out", out]
    (first, output, errors), (second, *silent) = commands([line, line], interrupt=out / "metrics.jsonl")
    assert (first, second, *silent) == (130, 130, "", ""), errors
    config = RunFolder(out).read_config()
    config["run"]["recipe"]["checkpoint_every_s"] = 0.0
    RunFolder(out).write_config(config)
    return output


linux = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


@gloo
@linux
@pytest.mark.slow
def test_killed_processes_are_started_again_with_the_losses_of_an_undisturbed_run(text, tmp_path):
    """In the number that wrote the checkpoint; before and after steps were made, rank 0 and another one."""
    out, straight = tmp_path / "run", tmp_path / "straight"
    check_interrupted(out, interrupted(text, out), 40)
    shutil.copytree(out, straight)
    assert [status for status, *_ in commands([["train", "--resume", straight]] * 2)] == [0, 0]
    done = len(losses(out))
    run = Launched(out, "--resume", out)
    kills = [run.kill(0)]
    run.wait_for(done)
    kills.append(run.kill(1))
    status, output, errors = run.end()
    assert (status, kills) == (0, [0, 1]), errors
    assert losses(out) == losses(straight)
    again = (
        r"rank {} was ended by signal 9 \(SIGKILL\): starting all 2 processes again \(restart {} of at most 3\), from"
    )
    assert re.search(again.format(0, 1) + rf" the checkpoint of step {done}\n", errors), errors
    assert re.search(again.format(1, 2) + r" the checkpoint of step \d+\n", errors), errors
    assert "Traceback" not in errors
    assert "restarts         2: a process had died" in output
    assert json.loads((out / "summary.json").read_text())["restarts"] == 2
    assert "Restarts" in (out / "report.html").read_text()


@gloo
@linux
@pytest.mark.soak  # twice the time of the one above
def test_a_final_end_and_a_killed_launcher_say_how_to_go_on(text, tmp_path):
    out = tmp_path / "run"
    run = Launched(out, text, "--device", "cpu", "--gpus", 2, "--out", out)
    run.wait_for(0)
    run.process.kill()
    status, output, _ = run.end()  # when the last process has closed its output
    assert status == -9
    check_interrupted(out, output)
    run = Launched(out, "--resume", out, "--max-restarts", 0)
    run.wait_for(len(losses(out)))
    run.kill(1)
    status, _, errors = run.end()
    ended = rf"accelerant: rank 1 was ended by signal 9 \(SIGKILL\)\n{GO_ON.format(out)}"
    assert (status, bool(re.search(ended, errors))) == (137, True), errors


@gloo
@linux
@pytest.mark.slow
def test_an_error_of_the_process_that_holds_the_store_is_said_once(text, tmp_path):
    """Rank 0 ends at once, at a limit of files, while the other one still asks it why."""
    resource = pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
    try:
        run = Launched(tmp_path / "run", text, "--device", "cpu", "--gpus", 2, "--out", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    status, _, errors = run.end()
    assert status == 1
    assert errors.count("[Errno 27] File too large") == 1
    assert "holds the store" not in errors


GO_ON = "accelerant: continue with:  accelerant train --resume {} --gpus 2\n"


@gloo
@pytest.mark.soak  # four times the CPU time of the one above
@pytest.mark.skipif(os.name != "posix", reason="signals of a launcher")
def test_the_launcher_passes_ctrl_c_on(text, tmp_path):
    out = tmp_path / "run"
    run = Launched(out, text, "--device", "cpu", "--gpus", 2, "--out", out)
    run.wait_for(0)
    run.process.send_signal(signal.SIGINT)
    status, output, errors = run.end()
    assert status == 130, errors
    check_interrupted(out, output)
    assert not (out / "checkpoint-previous.safetensors").exists()
    assert "Traceback" not in errors
