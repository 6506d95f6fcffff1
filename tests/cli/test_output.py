"""Every command's output under every encoding and width, on terminals and in pipes: no traceback, nothing cut."""

import inspect
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
import typer
from rich.text import Text

from accelerant.cli import terminal
from accelerant.cli.app import build_app
from accelerant.cli.train_view import BarView, LineView
from accelerant.config import override
from accelerant.nn.train.history import StepRecord
from accelerant.runtime import registry
from accelerant.runtime.compilation.cache import KernelCache, kernel_key, watch_compilation
from accelerant.runtime.compilation.kernel import Binary
from accelerant.runtime.files import plain
from commands import status

ROOT = Path(__file__).parents[2]
VECTORS = ROOT / "tests/vectors/groth16/poseidon"
KERNEL = "a_kernel_whose_name_is_longer_than_forty_columns"

PIPE = None
ENVIRONMENTS = itertools.cycle(({}, {"NO_COLOR": "1"}, {"TERM": "dumb"}))
SETTINGS = [
    pytest.param(encoding, width, environment, id=f"{encoding}-{width or 'pipe'}-{''.join(environment) or 'plain'}")
    for (encoding, width), environment in zip(
        itertools.product(("utf-8", "ascii", "latin-1", "cp1252"), (PIPE, 40, 58, 80)), ENVIRONMENTS, strict=False
    )
]
FAST = [
    pytest.param("ascii", PIPE, {}, id="ascii-pipe"),
    pytest.param("cp1252", 40, {"NO_COLOR": "1"}, id="cp1252-40"),
    pytest.param("utf-8", 58, {"TERM": "dumb"}, id="utf-8-58-dumb"),
]


class Stream(io.TextIOWrapper):
    """A standard stream of an encoding, which is a terminal or not."""

    def __init__(self, encoding, *, is_terminal):
        super().__init__(io.BytesIO(), encoding=encoding, write_through=True)
        self.is_terminal = is_terminal

    def isatty(self):
        return self.is_terminal

    def text(self):
        self.flush()
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.buffer.getvalue().decode(self.encoding))


@pytest.fixture
def run(monkeypatch):
    """Runs a command line with streams of an encoding, on a terminal of a width or in a pipe."""

    def run(arguments, encoding="utf-8", width=PIPE, environment=()):
        streams = [Stream(encoding, is_terminal=width is not PIPE) for _ in range(2)]
        for name in ("NO_COLOR", "COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        values = {"TERM": "xterm-256color", **dict(environment), **({"COLUMNS": str(width)} if width else {})}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", streams[0])
            patched.setattr(sys, "stderr", streams[1])
            return status(*arguments), *(stream.text() for stream in streams)

    return run


def pages(names=()):
    """Yield each command's words and click's object, of the named ones or all."""

    def below(words, command, context):
        yield words, command, context
        for name in command.list_commands(context) if hasattr(command, "list_commands") else ():
            inner = command.get_command(context, name)
            if not inner.hidden:
                yield from below([*words, name], inner, typer.Context(inner, parent=context, info_name=name))

    top = typer.main.get_command(build_app(names) if names else build_app())
    return below([], top, typer.Context(top, info_name="accelerant"))


def check_help(run, encoding, width, environment, names=()):
    for words, command, context in pages(names):
        status, output, errors = run([*words, "--help"], encoding, width, environment)
        assert (status, errors) == (0, ""), words
        assert not re.search(r"<(class|function|object|[\w.]+ object)", output), words  # the repr of a default
        shown = set(output.split()) | {word.strip("[],") for word in output.split()}
        for param in command.get_params(context):
            for option in getattr(param, "opts", ()) if param.param_type_name == "option" else ():
                assert option in shown or f"[no-]{option[2:]}" in output, (words, option)
        text = " ".join(word for line in output.splitlines() for word in line.strip("│|").split())
        declarations = inspect.signature(command.callback, eval_str=True).parameters if command.callback else {}
        for name, declared in declarations.items():
            for info in get_args(declared.annotation)[1:]:  # typer's versions differ in what they make of it
                assert " ".join(info.help.split()) in text, (words, name)
        examples = output.partition("Examples:\n")[2].split("\n")
        assert all(line.startswith(("  ", "")) for line in examples)
        assert [line.strip() for line in examples if line] == (command.epilog or "").splitlines(), words
        if width is not PIPE:
            long = [line for line in output.partition("Examples:")[0].splitlines() if len(line) > width]
            assert not long, (words, long)
        assert "\\[" not in output, words  # escaped for the markup of rich


@pytest.mark.parametrize(("encoding", "width", "environment"), FAST)
def test_help(run, encoding, width, environment):
    check_help(run, encoding, width, environment, names=("train", "zk"))


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "width", "environment"), SETTINGS)
def test_every_page_of_help(run, encoding, width, environment):
    check_help(run, encoding, width, environment)


@pytest.fixture
def cache(tmp_path):
    with override(cache_dir=tmp_path):
        for target in ("sm_90", "sm_80"):
            key = kernel_key(target=target)
            build = lambda: Binary(b"code", {KERNEL: KERNEL}, {})  # noqa: E731
            KernelCache().get_or_build(key, build, name=KERNEL, target=target, compiler="nvcc 13 of some longer name")
        yield


@pytest.mark.parametrize(("encoding", "width", "environment"), [*FAST, *(
    pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) for one in SETTINGS
)])  # fmt: skip
def test_tables(run, cache, encoding, width, environment):
    status, output, errors = run(["cache", "list"], encoding, width, environment)
    assert (status, errors) == (0, "")
    assert output.count(KERNEL) == 2
    if width is PIPE:
        assert len(output.splitlines()) == 4  # head, two kernels, sum
    status, output, errors = run(["devices"], encoding, width, environment)
    assert (status, errors) == (0, "")
    listed = registry.devices()
    for device in listed:
        assert (device.label if device.available else device.backend) in output.split()
        assert all(word in output for word in device.name.split()) or not device.available
    if width is PIPE:
        assert len(output.splitlines()) == 1 + len(listed)
    if width is PIPE or "TERM" in environment:  # a terminal shows the live view
        status, output, errors = run(["top"], encoding, width, environment)
        assert (status, errors) == (0, "")
        assert "cpu:0" in output


def commands(folder):
    """Return a command line of each command that ends soon, and its exit status."""
    record = folder / "record.json"
    zkey, public, proof, key = (
        VECTORS / name for name in ("circuit.zkey", "public.json", "proof.json", "verification_key.json")
    )
    return [
        (["tune", "--list"], 0), (["bench", "algebra", "--list"], 0),
        (["bench", "compare", record, record], 2), (["compile", "--template", "relu"], 0),
        (["compile", folder / "kérnel.cu"], 2),
        (["privacy", "epsilon", "--sigma", "1.1", "--q", "0.01", "--steps", "10", "--delta", "1e-5"], 0),
        (["privacy", "statement", folder / "ledger.jsonl"], 2), (["zk", "inspect", zkey], 0),
        (["zk", "verify", key, public, proof], 0), (["data", "info", folder / "kérnel.cu"], 2),
        (["sample", folder / "no run"], 2), (["train", folder / "nothing"], 2), (["nonsense"], 2),
        (["train", "--x"], 2), (["--version"], 0),
    ]  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "width", "environment"), SETTINGS)
def test_every_command(run, cache, tmp_path, monkeypatch, encoding, width, environment):
    monkeypatch.chdir(tmp_path)
    for arguments, expected in commands(tmp_path):
        status, output, errors = run(arguments, encoding, width, environment)
        assert status == expected, (arguments, errors)
        assert "Traceback" not in output + errors
        assert "\N{HORIZONTAL ELLIPSIS}" not in output + errors, arguments


@pytest.mark.slow
@pytest.mark.sample(3)
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_a_child_of_an_encoding(tmp_path, encoding):
    """PYTHONIOENCODING holds for the input, the prompt and the summary of a run, too."""
    text = tmp_path / "tëxt.txt"
    text.write_text("".join(f"the {n}th line — of some text\n" for n in range(300)), encoding="utf-8")
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests", ROOT / "tests" / "cli")))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONIOENCODING": encoding, "OMP_NUM_THREADS": "1"}

    program = (
        "import json, sys, train_workers\nfrom accelerant.cli import main\ntrain_workers.small()\n"
        "for line in json.loads(sys.argv[1]):\n    try:\n        main(line)\n"
        "    except SystemExit as ended:\n        print(ended.code or 0, end='\\0')"
    )
    run, dash = tmp_path / "rün", "\N{EM DASH}"
    lines = [
        ["train", text, "--steps", 2, "--device", "cpu", "--out", run],
        ["sample", run, "--prompt", f"the {dash}", "--tokens", 2],
        *[["sample", run, "--prompt", "-"]] * (encoding == "ascii"),
    ]
    command = [sys.executable, "-c", program, json.dumps([list(map(str, line)) for line in lines])]
    done = subprocess.run(command, input=dash.encode(), capture_output=True, env=env, timeout=300, check=True)
    assert b"Traceback" not in done.stderr
    trained, sampled, *refused = done.stdout.decode(encoding).split("\0")[:-1]
    assert "validation loss" in trained
    assert trained.endswith("0")
    assert sampled.startswith(f"the {dash}" if encoding == "cp1252" else "the -")
    assert sampled.endswith("0")
    assert refused == ["2"] * (encoding == "ascii")


def test_characters_that_an_encoding_lacks_stay_in_their_columns():
    stream = Stream("ascii", is_terminal=False)
    terminal.prepare_streams()
    stream.reconfigure(errors="accelerant")
    stream.write("█·° 61 °C é \udcff ⠋")
    assert stream.text() == "#.  61  C \\xe9 \\udcff *"


@pytest.mark.parametrize(("closed", "lines"), [(">&-", 1), ("2>&-", 0)])
def test_streams_that_were_closed_at_the_start_take_what_is_written(closed, lines, tmp_path):
    """Python's print writes to standard output what is meant for an error stream that is None."""
    for words, expected in ((["--help"], 0), (["zk", "verify", "a", "b", "c"], 2)):
        command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-m", "accelerant", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path, check=False)
        assert done.returncode == expected
        assert "accelerant:" not in done.stdout
    assert done.stderr.count("\n") == lines


@pytest.mark.parametrize("width", [20, 40, 58, 100])
def test_a_table_that_is_too_wide_is_a_block_for_each_row(width):
    titles = ("name", "size", "note")
    rows = [(KERNEL, "3 KiB", "a sentence of a few words"), ("b", "12 KiB", Text("-"))]
    lines = [line.plain for line in terminal.table_lines(titles, rows, width, right=("size",), prose=True)]
    assert any(line.startswith(KERNEL) for line in lines)
    assert all(len(line) <= width or KERNEL in line for line in lines)
    assert ("size" in lines[0]) == (width == 100)
    assert "sentence" in " ".join(lines)


def test_the_shell_completes_options(run):
    words = {"_ACCELERANT_COMPLETE": "complete_bash", "COMP_WORDS": "accelerant train --pre", "COMP_CWORD": "2"}
    status, output, _ = run([], environment=words)
    assert (status, output.split()) == (0, ["--preset", "--precision"])


def test_json_is_ascii_whatever_the_encoding(run):
    for arguments in (["devices", "--json"], ["top", "--json"]):
        status, output, _ = run(arguments, "ascii", 40)
        assert status == 0
        assert json.loads(output)


def test_compiling_is_named_once_and_is_no_stage(tmp_path, capsys):
    seen = []
    view = LineView()
    with override(cache_dir=tmp_path), watch_compilation(seen.append), watch_compilation(view.compiling):
        for number in (1, 2, 1):
            KernelCache().get_or_build(kernel_key(number=number), lambda: Binary(b"code", {}, {}), name="kernel")
    assert seen == [True, False] * 2  # the third one is in the cache
    assert capsys.readouterr().err == "compiling kernels (once) ...\n"


@pytest.mark.parametrize("width", [40, 58, 80, 120])
def test_the_bar_of_a_training_fits_the_terminal(monkeypatch, width):
    stream = Stream("utf-8", is_terminal=True)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    view = BarView(terminal.console(stderr=True))
    record = StepRecord(1000, 5.545, 13324.0, 1.0, 1 << 28, 1e-3, 1.0)
    view.begin(done=0, total=1200, device="cpu (1 thread)", predicted_bytes=None)
    view.records([record])
    view.compiling(begins=True)
    view.records([record])
    view.close()
    shown = stream.text()
    assert re.search(r"1000/1200 +loss 5\.545", shown)
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert all(len(line) <= width for line in re.split(r"[\r\n]+", shown))
    assert ("13,324 tokens/s" in shown) == (width > 40)
    assert ("cpu (1 thread)" in shown) == (width > 80)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.25, "0.25"), (1234.5, "1234"), (12345.6, "12,350"), (5.5e11, "550,000,000,000"), (1.23e-5, "0.0000123")],
)
def test_numbers_have_no_exponent(value, text):
    assert plain(value) == text
