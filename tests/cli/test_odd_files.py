"""Names and kinds of files that a folder of downloads may have: each is used, or refused in one line, at once."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from accelerant._version import __version__
from accelerant.cli.app import exit_status
from accelerant.errors import FormatError
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.train.config import PRESETS
from commands import status

SOURCE = Path(__file__).parents[2] / "src"
TEXT = "".join(f"the {n}th line of some text, for learning\n" for n in range(200))
ODD = os.fsdecode(b"odd-\xff\xfe\x1b[31m\n.txt")


@pytest.fixture
def accelerant(capfd, tmp_path, monkeypatch):
    """Runs a command line in a folder of its own; returns status, output, errors and the processor's seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(PRESETS, "tiny", PRESETS["tiny"].replaced(validation_tokens=1024, sample_tokens=8))

    def run(*arguments):
        began = time.process_time()
        return status(*arguments), *capfd.readouterr(), time.process_time() - began

    return run


@pytest.fixture
def pipe(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def commands(path):
    return [
        ("train", "--data", path, "--steps", 1, "--device", "cpu", "--json"),
        ("data", "prepare", path, "--out", "out.tokens"),
        ("data", "prepare", "text.txt", "--out", "out.tokens", "--tokenizer", path),
        ("data", "info", path, "--check"),
        ("train", "--resume", path),
    ]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "path", ["pipe", "/dev/zero", "/dev/full", "/proc", "/proc/self/mem", "/proc/self/environ", "/sys/kernel", "absent"]
)
def test_what_is_no_stored_file_is_refused_in_one_line(accelerant, pipe, path):
    Path("text.txt").write_text(TEXT)
    for command in commands(path):
        status, output, errors, took_s = accelerant(*command)
        assert (status, output) == (2, ""), command
        assert errors.count("\n") == 1, (command, errors)
        assert errors.startswith("accelerant: ")
        assert took_s < 60  # about 0.1 s on an idle machine; what is read to its end has none


@pytest.mark.parametrize("path", [".", "/dev/null", "x" * 300, "loop", "text.txt/below"])
def test_a_path_of_another_kind_is_wrong_usage(accelerant, path):
    Path("text.txt").write_text(TEXT)
    Path("loop").symlink_to("loop")
    for command in (("doctor", "--check"), ("runs",), ("bench", "compare", path), ("data", "info")):
        status, output, errors, _ = accelerant(*command, path)
        assert (status, output, errors.count("\n")) == (2, "", 1), (command, errors)
        assert "Errno" not in errors, command


def test_a_folder_with_pipes_and_links_to_devices_is_read_without_them(accelerant, pipe, tmp_path):
    Path("text.txt").write_text(TEXT)
    for name, target in (("a.txt", "/dev/zero"), ("b.txt", "/proc/self/environ"), ("c.txt", pipe), ("d.txt", "gone")):
        (tmp_path / name).symlink_to(target)
    status, output, _, _ = accelerant("data", "prepare", ".", "--out", "o.tokens", "--tokenizer", "bytes", "--json")
    assert status == 0
    assert json.loads(output)["documents"] == 1


@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "folder"])
def test_shards_configs_and_checkpoints_of_another_kind_are_refused(accelerant, tmp_path, kind):
    def put(path):
        path.unlink()
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(kind)

    GPT(GPTConfig(vocab_size=64, context=16, layers=1, heads=2, width=16)).save_pretrained("good", max_shard_bytes=4000)
    shard = next(Path("good").glob("model-*.safetensors")).name
    for name in (shard, "config.json", "model.safetensors.index.json"):
        shutil.copytree("good", name)
        put(tmp_path / name / name)
        began = time.monotonic()
        with pytest.raises(FormatError, match=name.split("-of")[0]):
            GPT.from_pretrained(name)
        assert time.monotonic() - began < 60


@pytest.mark.slow
def test_names_that_are_not_utf8_train_to_a_report(accelerant, tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / ODD).write_text(TEXT)
    options = ("--steps", 1, "--device", "cpu")
    for data, out in (("texts", "one"), (f"texts/{ODD}", ODD)):
        status, output, errors, _ = accelerant("train", "--data", data, *options, "--out", out)
        assert status == 0, errors
        assert not [char for char in output + errors if not char.isprintable() and char != "\n"]
        assert (tmp_path / out / "report.html").read_bytes().decode()
    status, output, _, _ = accelerant("train", "--resume", ODD)
    assert status == 0
    assert r"odd-\udcff\udcfe\x1b[31m\n.txt/report.html" in output
    status, output, errors, _ = accelerant("data", "prepare", f"texts/{ODD}", "--out", "t", "--tokenizer", "bytes")
    assert (status, errors) == (0, "")
    assert r"odd-\udcff\udcfe\x1b[31m\n.txt" in accelerant("data", "info", "t")[1]
    status, output, errors, _ = accelerant("data", "info", f"texts/{ODD}")
    assert (status, output) == (2, "")
    assert errors.count("\n") == 1
    assert r"odd-\udcff\udcfe\x1b[31m\n.txt is no token file" in errors


def test_a_sparse_file_of_a_terabyte_is_one_line(accelerant):
    for name in ("text.txt", "tokenizer.json", "config.json"):
        with open(name, "wb") as file:
            file.truncate(1 << 43)
    prepare = ("data", "prepare", __file__, "--out", "o", "--tokenizer", "tokenizer.json")
    for command in (commands("text.txt")[0], prepare):
        status, _, errors, took_s = accelerant(*command)
        assert status in (1, 2)
        assert errors.count("\n") == 1
        assert took_s < 5
    assert accelerant("train", "--resume", ".")[0] == 2


def test_ctrl_c_while_a_class_is_made_is_an_interrupt():
    """Python 3.11 raises a RuntimeError from what __set_name__ raises, as where a module is being imported."""

    class Interrupted:
        def __set_name__(self, owner, name):
            raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended, exit_status():
        type("Owner", (), {"name": Interrupted()})
    assert ended.value.code == 130


STARTED = """
import sys

class Started:
    def find_spec(self, name, *_):
        if name == "accelerant.cli.app":
            sys.meta_path.remove(self)
            print("up", end="", flush=True)

sys.meta_path.insert(0, Started())
from accelerant.cli import main
main()
"""


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("command", ["devices", "train --data t --out o", "data prepare t --out p"])
def test_ctrl_c_while_a_command_starts_ends_it_without_a_traceback(tmp_path, command):
    """At moments from the command line's first import on; before, the signal is Python's own."""
    (tmp_path / "t").write_text(TEXT * 200)
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    for delay_s in (0.1, 0.4, 1.6):
        process = subprocess.Popen(
            [sys.executable, "-c", STARTED, *command.split()], cwd=tmp_path, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # ignored in a background job
        )  # fmt: skip
        assert process.stdout.read(2) == "up"
        time.sleep(delay_s)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
        assert process.returncode in (130, 0), errors
        assert "Traceback" not in errors
        if process.returncode == 0:  # it was done before the signal
            assert delay_s > 0.1
            break


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    name = {name!r}

    def find_spec(self, name, *_):
        if name == self.name:
            self.name = ""
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupt())
from accelerant.cli import main
main(["devices"])
"""


@pytest.mark.parametrize(
    "name",
    ["numpy._core.multiarray", *(pytest.param(n, marks=pytest.mark.slow) for n in ("torch._tensor", "pyopencl.tools"))],
)
def test_ctrl_c_while_a_module_is_imported_ends_the_process_at_once(name):
    """Half-imported modules of libraries would recurse, or abort the process, with an exception under way."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(name=name)], env=environment, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "accelerant: interrupted\n")


ENDING = """
import atexit, os, signal

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Last:
    def __del__(self, interrupt=interrupt):
        interrupt()

signal.signal(signal.SIGINT, signal.default_int_handler)
atexit.register(interrupt)
last = Last()  # which goes with its module
from accelerant.cli import main
main(["--version"])
"""


def test_ctrl_c_after_a_command_leaves_its_status():
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    ended = subprocess.run([sys.executable, "-c", ENDING], env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"accelerant {__version__}\n", "")
