"""Child processes import what their parent imports, and nothing from the current folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import llvmlite
import numpy
import pytest

import accelerant
from accelerant.runtime import host
from accelerant.runtime.host import python_child
from accelerant.runtime.providers.opencl import OpenclProvider

SOURCE = Path(accelerant.__file__).parents[1]
RUNS = "open({mark!r}, 'a').write(__name__)"
SHADOWED = ("pyopencl", "numpy", "ctypes", "json", "sitecustomize", "usercustomize", "accelerant", "llvmlite", "typer")


@pytest.fixture
def downloads(tmp_path, monkeypatch):
    """A current folder whose modules leave a mark where they are imported; returns the mark."""
    mark, folder = tmp_path / "mark", tmp_path / "downloads"
    (folder / "accelerant").mkdir(parents=True)
    for name in SHADOWED:
        (folder / f"{name}.py").write_text(RUNS.format(mark=str(mark)))
    (folder / "accelerant" / "__init__.py").write_text(RUNS.format(mark=str(mark)))
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return mark


def answer(program, *arguments):
    with python_child(program, *arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as child:
        return child.communicate()[0].strip()


@pytest.mark.parametrize("path", ["", ".", "downloads"])
def test_a_child_imports_the_parents_modules_and_none_of_the_current_folder(downloads, monkeypatch, path):
    monkeypatch.syspath_prepend(str(Path.cwd()) if path == "downloads" else path)
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    names = "accelerant, numpy, pyopencl, llvmlite, json"
    found = answer(f"import sys, {names}; print(*(m.__file__ for m in ({names})), sys.argv[1:], sep='\\n')", "a", "b c")
    *files, arguments = found.splitlines()
    assert files[:2] == [accelerant.__file__, numpy.__file__]
    assert files[3] == llvmlite.__file__
    assert arguments == "['a', 'b c']"
    assert not downloads.exists()


def test_the_package_is_found_where_it_is_itself_the_current_folder(monkeypatch):
    monkeypatch.chdir(SOURCE)
    assert answer("import accelerant; print(accelerant.__file__)") == accelerant.__file__


def test_the_opencl_probe_runs_nothing_of_the_current_folder(downloads, monkeypatch):
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    OpenclProvider.probe()
    assert not downloads.exists()


@pytest.mark.slow
def test_the_command_runs_no_opencl_module_of_the_current_folder(tmp_path):
    mark = tmp_path / "mark"
    (tmp_path / "pyopencl.py").write_text(RUNS.format(mark=str(mark)))
    command = [sys.executable, "-m", "accelerant", "devices"]  # -m puts the current folder in front of the path
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "opencl" in done.stdout
    assert not mark.exists()


def test_one_function_starts_python():
    starts = re.compile(r"(Popen|run|call|check_output)\(\s*\[\s*sys\.executable")
    for path in SOURCE.rglob("accelerant/**/*.py"):
        assert bool(starts.search(path.read_text())) == path.samefile(host.__file__), path
    assert '"-I"' in Path(host.__file__).read_text()
