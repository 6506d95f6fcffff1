import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerant.errors import ConfigError
from accelerant.nn.train.history import RunFolder, RunLock
from refusals import assert_raises


@pytest.fixture(params=["flock", "file"])
def kind(request, monkeypatch):
    """Both ways: with fcntl, and where it is missing."""
    if request.param == "file":
        monkeypatch.setitem(sys.modules, "fcntl", None)
    else:
        pytest.importorskip("fcntl")


@pytest.fixture
def dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.mark.usefixtures("kind")
def test_one_holder_at_a_time(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.take()  # again: nothing
        assert (tmp_path / RunLock.NAME).read_text() == str(os.getpid())
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"), RunLock(tmp_path):
            pass
        assert (tmp_path / RunLock.NAME).exists()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):
        pass


@pytest.mark.usefixtures("kind")
def test_an_absent_folder_is_made_when_the_lock_is_taken(tmp_path):
    with RunLock(tmp_path / "a" / "b") as lock:
        assert not (tmp_path / "a").exists()
        lock.take()
        assert (tmp_path / "a" / "b" / RunLock.NAME).is_file()


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("content", ["dead", ""])
def test_what_a_dead_process_left_does_not_block(tmp_path, dead, content):
    path = tmp_path / RunLock.NAME
    path.write_text(str(dead) if content else "")
    os.utime(path, (time.time() - 60,) * 2)
    with RunLock(tmp_path):
        assert path.read_text() == str(os.getpid())


def test_a_lock_file_without_a_number_is_another_process_for_a_while(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    (tmp_path / RunLock.NAME).touch()
    with pytest.raises(ConfigError, match="in use by another process"), RunLock(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    assert_raises(ConfigError, "cannot write to", lambda: RunLock(tmp_path / "file" / "run").take())


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moved", range(4))
def test_a_run_that_is_killed_while_another_is_moved_aside_loses_nothing(tmp_path, monkeypatch, moved):
    folder = RunFolder(tmp_path)
    files = {"config.json": "{}", "metrics.jsonl": "1", "checkpoint.safetensors": "2"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    rename, done = Path.rename, []

    def killed(path, to):
        if len(done) == moved:
            raise Killed
        done.append(path)
        return rename(path, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        assert_raises(Killed, None, folder.start)
    assert folder.config.is_file() or moved == 3
    assert "unfinished-1" in folder.start()
    kept = tmp_path / "unfinished-1"
    assert {path.name: path.read_text() for path in kept.iterdir()} == files
    assert not (tmp_path / ".accelerant-moving").exists()
