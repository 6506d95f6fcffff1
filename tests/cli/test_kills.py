"""Commands that are killed (SIGKILL) at random moments, and started again until they finish, as a person would."""

import json
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch

import soak
from accelerant.nn.train.checkpoint import load_checkpoint
from accelerant.nn.train.config import PRESETS
from accelerant.privacy import dp
from processes import Command

RANGE = Path(__file__).parents[1] / "vectors" / "groth16" / "range"
STEPS = 24
KILLS = 8 if soak.MINUTES else 1

pytestmark = pytest.mark.slow


def quick():
    """Trainings write a checkpoint every second step."""
    PRESETS["tiny"] = PRESETS["tiny"].replaced(checkpoint_every=2, validation_tokens=1024, sample_tokens=8)


def start(*arguments, cwd):
    return Command(*arguments, cwd=cwd, environment={"ACCELERANT_BACKEND": "cpu"}, before=quick)


def finished(process):
    """Return the status and errors of a process that ends by itself."""
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def kill(process, seconds):
    """Kill a process after a time, unless it ends before; return whether it was killed."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def train_through_kills(arguments, out, rng):
    """Run `train` to its end through KILLS kills; return how many of them met a running process."""
    again, met = ("train", *arguments, "--out", out.name), 0
    begun = time.monotonic()
    for _ in range(KILLS):
        process = start(*again, cwd=out.parent)
        # Half of the kills come at any time from the start on, the others, or the only one, while steps are made.
        if KILLS == 1 or rng.random() < 0.5:
            lines = len((out / "metrics.jsonl").read_bytes().splitlines()) if (out / "metrics.jsonl").exists() else 0
            while process.poll() is None and time.monotonic() - begun < 600:
                if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_bytes().splitlines()) != lines:
                    break
                time.sleep(0.01)
            met += kill(process, 0.5 * rng.random())
        else:
            met += kill(process, 2 * rng.random())
        again = ("train", "--resume", out.name)
        if not (out / "checkpoint.safetensors").exists():  # as its message says, there is nothing to go on with
            again = ("train", *arguments, "--out", out.name)
    status, errors = finished(start(*again, cwd=out.parent))
    assert status == 0, errors
    return met


def settings(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"the {n}th line of some text, for learning\n" for n in range(200)))
    return ("--data", text.name, "--steps", STEPS, "--device", "cpu", "--batch-size", 4)


@pytest.mark.search(150)
def test_training_ends_with_the_weights_of_a_run_that_was_not_killed(tmp_path_factory, rng, record_property):
    tmp_path = tmp_path_factory.mktemp("killed")
    arguments = settings(tmp_path)
    assert finished(start("train", *arguments, "--out", "straight", cwd=tmp_path))[0] == 0
    met = train_through_kills(arguments, tmp_path / "out", rng)
    record_property("kills", met)
    found, straight = (load_checkpoint(tmp_path / name / "checkpoint.safetensors")[0] for name in ("out", "straight"))
    assert found.keys() == straight.keys()
    # A process's own random state, which training does not use, is all that may differ.
    assert all(torch.equal(found[name], straight[name]) for name in found if not name.startswith("random."))
    assert any(name.startswith("optimizer") for name in found), list(found)[:9]
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    assert not [path.name for path in (tmp_path / "out").iterdir() if ".tmp" in path.name]


@pytest.mark.search(150)
def test_private_training_counts_every_step_that_was_made(tmp_path_factory, rng, record_property):
    tmp_path = tmp_path_factory.mktemp("killed")
    arguments = (*settings(tmp_path), "--private", "--noise-multiplier", 1, "--delta", "1e-5")
    out = tmp_path / "out"
    met = train_through_kills(arguments, out, rng)
    record_property("kills", met)
    # The ledger of a run that was killed before its first checkpoint, of which nothing is left, has another name.
    path = out / "privacy-ledger.jsonl"
    counted = sum(event.count for event in dp.PrivacyLedger.read(path).events)
    # A kill loses at most the steps since the last checkpoint, which are made, and counted, again.
    assert STEPS <= counted <= STEPS * (met + 1)
    private = json.loads((out / "summary.json").read_text())["private"]
    assert private["epsilon"] >= dp.PrivacyLedger.read(path).statement().epsilon - 1e-9


@pytest.mark.search(100)
def test_a_proof_is_there_whole_or_not_at_all(tmp_path_factory, rng, record_property):
    tmp_path = tmp_path_factory.mktemp("killed")
    files = [tmp_path / name for name in ("circuit.zkey", "witness.wtns")]
    for file in files:
        shutil.copy(RANGE / file.name, file)
    command, met = ("zk", "prove", *(file.name for file in files), "proof.json", "public.json"), 0
    assert finished(start(*command, cwd=tmp_path))[0] == 0  # compiles
    began = time.monotonic()
    assert finished(start(*command, cwd=tmp_path))[0] == 0
    took = time.monotonic() - began
    for _ in range(KILLS):
        for name in ("proof.json", "public.json"):
            (tmp_path / name).unlink(missing_ok=True)
        met += kill(start(*command, cwd=tmp_path), took * (0.2 + 0.7 * rng.random()))
        for name in ("proof.json", "public.json"):
            if (tmp_path / name).exists():
                json.loads((tmp_path / name).read_text())
    record_property("kills", met)
    assert finished(start(*command, cwd=tmp_path))[0] == 0
    assert re.fullmatch(r"\[.*\]\s*", (tmp_path / "public.json").read_text(), re.DOTALL)
    assert json.loads((tmp_path / "proof.json").read_text())["protocol"] == "groth16"
    assert {path.name for path in tmp_path.iterdir()} == {
        "circuit.zkey", "witness.wtns", "proof.json", "public.json",
    }  # fmt: skip
