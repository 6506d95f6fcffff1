"""The application as a whole: which groups there are, and that one of them is imported alone."""

import shlex
import subprocess
import sys

import pytest
import typer

from accelerant.cli.app import _MODULES, COMMANDS, build_app
from commands import status


@pytest.mark.parametrize("group", COMMANDS)
def test_a_group_registers_the_command_of_its_name(group):
    command = typer.main.get_command(build_app((group,)))
    assert list(command.commands) == [group]


def test_a_named_group_is_imported_alone():
    code = (
        "import sys\nfrom accelerant.cli.app import main\n"
        "try:\n    main(['cache', '--help'])\nexcept SystemExit as end:\n    status = end.code\n"
        "print([name for name in sys.modules if name in sys.argv[1:]], status)"
    )
    modules = [f"accelerant.cli.{_MODULES.get(name, name)}" for name in COMMANDS]
    done = subprocess.run([sys.executable, "-c", code, *modules], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "['accelerant.cli.cache'] 0"


def test_an_unknown_command_is_wrong_usage():
    done = subprocess.run(
        [sys.executable, "-m", "accelerant", "prove"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 2
    assert "No such command 'prove'" in done.stderr


@pytest.mark.parametrize(("line", "why"), [
    ("doctor --check absent.json", "accelerant: absent.json: No such file or directory\n"),
    ("jobs list --key-file absent.key", "accelerant: absent.key: No such file or directory\n"),
    ("tune --max-seconds nan", "Invalid value for '--max-seconds': nan is no number"),
    ("bench gelu --budget-seconds nan", "Invalid value for '--budget-seconds': nan is no number"),
])  # fmt: skip
def test_a_wrong_path_or_nan_is_bad_input(line, why, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert status(*line.split()) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("line", "name"), [
    ("bench gelu --device cpu --out ''", "--out"), ("bench gelu --device cpu --size ''", "--size"),
    ("bench all --suite neural --suite ''", "--suite"), ("bench compare '' x", "BASELINE"),
    ("bench check x ''", "RECORD"), ("compile x -I ''", "--include"), ("data info ''", "FILE"),
    ("doctor --certify --quick --op ''", "--op"), ("doctor --check ''", "--check"), ("jobs show ''", "ID"),
    ("jobs list --key-file ''", "--key-file"), ("keys list --config ''", "--config"),
    ("privacy statement ''", "LEDGER"), ("profile ''", "SCRIPT"), ("serve --directory ''", "--directory"),
    ("serve --state-url=", "--state-url"), ("serve --device cpu --device ''", "--device"),
    ("tune --dtype ''", "--dtype"), ("tune --out ''", "--out"), ("zk prove '' x", "CIRCUIT.ZKEY"),
    ("zk prove-many x y '' --out z", "WITNESS.WTNS"), ("zk prove-many x y --ray ''", "--ray"),
    ("zk verify x '' y", "PUBLIC.JSON"),
])  # fmt: skip
def test_an_empty_argument_is_refused_by_name(line, name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert status(*shlex.split(line)) == 2
    assert capsys.readouterr().err == f"accelerant: {name} must not be empty\n"
    assert not list(tmp_path.iterdir())


def test_the_arguments_of_a_profiled_script_may_be_empty(tmp_path, capsys):
    (tmp_path / "show.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert status("profile", "--no-ceilings", tmp_path / "show.py", "", "x") == 0
    assert capsys.readouterr().out.startswith("['', 'x']\n")
