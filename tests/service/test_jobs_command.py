"""`accelerant jobs` on a running service."""

import json
from functools import partial

import numpy as np
import pytest

import commands
from accelerant.service import Client


@pytest.fixture
def run(server, monkeypatch, capsys):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("ACCELERANT_URL", server.url)
    return partial(commands.run, "jobs", capsys)


@pytest.fixture
def job(server):
    with Client(server.url, trust_env=False) as client:
        job = client.submit("field_add", {"x": np.arange(4, dtype=np.uint64), "y": np.uint64([1])})
        client.result(job.id)
        return job


def test_list_and_show(run, job):
    status, out, _ = run("list")
    assert status == 0
    assert out.splitlines()[0].split()[:4] == ["job", "operation", "state", "done"]
    assert out.splitlines()[1].split()[:4] == [job.id[:12], "field_add", "succeeded", "100%"]
    rows = json.loads(run("list", "--json", "--max-rows", "1")[1])
    assert [(row["id"], row["state"]) for row in rows] == [(job.id, "succeeded")]
    assert job.id not in run("list", "--state", "failed")[1]
    status, out, _ = run("show", job.id[:8])
    assert status == 0
    shown = dict(line.split(None, 1) for line in out.splitlines())
    assert (shown["id"], shown["operation"], shown["state"]) == (job.id, "field_add", "succeeded")
    assert json.loads(run("show", job.id, "--json")[1])["id"] == job.id


def test_cancel_leaves_what_has_ended(run, job):
    assert json.loads(run("cancel", job.id[:8], "--json")[1])["state"] == "succeeded"


def test_errors_are_one_line(run, job, tmp_path, monkeypatch):
    status, _, err = run("show", "f" * 32)
    assert (status, err.count("\n")) == (1, 1)
    assert "no job" in err
    status, _, err = run("list", "--state", "done")
    assert (status, err.count("\n")) == (2, 1)
    assert "--state must be one of queued" in err
    for command in ("show", "cancel"):
        assert run(command, "../x")[::2] == (2, "accelerant: '../x' is not the name of an operation or a job\n")
    (tmp_path / "key").write_bytes(b"\xff")
    assert run("list", "--key-file", str(tmp_path / "key"))[::2] == (
        2, f"accelerant: --key-file {tmp_path / 'key'} is not text\n",
    )  # fmt: skip
    (tmp_path / "key").write_text("\n")
    assert run("list", "--key-file", "/dev/zero")[::2] == (2, "accelerant: --key-file /dev/zero is not text\n")
    status, _, err = run("list", "--key-file", str(tmp_path / "key"))
    assert (status, err.count("\n")) == (2, 1)
    assert "is empty" in err
    monkeypatch.setenv("ACCELERANT_URL", "http://127.0.0.1:9")
    status, _, err = run("list")
    assert (status, err.count("\n")) == (1, 1)
    assert "is `accelerant serve` running there?" in err
