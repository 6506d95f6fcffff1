"""Kernels that child processes compile while libraries' functions run in their place."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from probes import CASE, operation, ran

from accelerant.config import override
from accelerant.errors import CompileError, FallbackWarning
from accelerant.runtime.compilation import background
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.compilation.cuda import cuda_key
from accelerant.runtime.compilation.kernel import Binary, KernelSource
from accelerant.runtime.dispatch import Implementation
from accelerant.runtime.host import usable_cores
from accelerant.runtime.ledger import ledger
from accelerant.runtime.provider import noted


class Kernels:
    """In place of children and launchers: kernels by name, of which only some are compiled."""

    def __init__(self):
        self.asked, self.compiled, self.launched, self.waited = [], set(), [], []
        self.misses = 0

    def ask(self, key, source, target):
        self.asked.append(key)
        return True

    def result(self, key):
        return Binary.of(b"", ()) if key in self.compiled else None

    def is_ready(self):
        return self.compiled >= set(self.asked)

    def launch(self, name):
        try:
            background.binary_of(name, SimpleNamespace(name=name), "sm_90")
        except background.NotCompiledError as error:
            if not error.skips:
                raise
        if not background.is_missing():
            self.launched.append(name)
            noted()


@pytest.fixture
def kernels(monkeypatch):
    stand_in = Kernels()
    monkeypatch.setattr(background, "_compilers", stand_in)
    monkeypatch.setattr(background, "compile_cuda", lambda source, target: stand_in.waited.append(source.name))
    return stand_in


def two_kernels(kernels, name="probe", **options):
    def run(x):
        kernels.launch("first")
        kernels.launch("second")
        return "own"

    library = Implementation("library", lambda x: "library")
    return operation(Implementation("own", run, own=True, **options), library, name=name)


def test_a_library_runs_until_the_kernels_are_compiled(book, kernels):
    op = two_kernels(kernels)
    assert [op(CASE, 1), op(CASE, 1)] == ["library"] * 2
    assert len(kernels.asked) == 2, "nothing is attempted while they are compiled"
    assert set(kernels.asked) == {"first", "second"}, "both are known after one call"
    assert (kernels.launched, kernels.waited) == ([], [])
    assert background.misses() == 2
    kernels.compiled = {"first"}
    assert op(CASE, 1) == "library"
    kernels.compiled = {"first", "second"}
    assert [op(CASE, 1), op(CASE, 1)] == ["own"] * 2
    assert ran(book) == {("probe", "library"): 3, ("probe", "own"): 2}
    assert not any(row["failures"] for row in book.to_dict()["ops"])
    assert background.misses() == 3
    assert not background.attempts
    assert not book.fallback_count()


def test_another_kernel_of_a_case_that_has_run_is_not_waited_for_either(book, kernels):
    names = ["first"]
    op = operation(
        Implementation("own", lambda x: [kernels.launch(name) for name in names] and "own", own=True),
        Implementation("library", lambda x: "library"),
    )
    kernels.compiled = {"first"}
    assert op(CASE, 1) == "own"
    names.append("second")  # as for an evaluation, which saves less
    assert op(CASE, 1) == "library"
    kernels.compiled.add("second")
    assert op(CASE, 1) == "own"
    assert not kernels.waited


def test_an_operation_within_another(book, kernels):
    inner = two_kernels(kernels)
    outer = operation(
        Implementation("own", lambda x: (kernels.launch("outer"), inner(CASE, x), kernels.launch("last"))[1], own=True),
        Implementation("library", lambda x: "outer library"),
        name="outer",
    )
    assert outer(CASE, 1) == "outer library"
    assert set(kernels.asked) == {"outer", "first", "second", "last"}
    kernels.compiled = {"outer", "last", "first"}
    outer.forget()
    assert outer(CASE, 1) == "library"
    kernels.compiled.add("second")
    assert outer(CASE, 1) == "own"
    assert not kernels.waited
    assert not background.missing


def test_arguments_that_change_are_changed_once(book, kernels):
    def run(x):
        kernels.launch("first")
        x += 1  # as what follows a kernel may do
        kernels.launch("second")

    x = torch.zeros(3)
    op = operation(
        Implementation("own", run, own=True, mutates=True),
        Implementation("library", lambda x: x.add_(1), mutates=True),
    )
    op(CASE, x)
    assert (x.tolist(), kernels.launched) == ([1.0] * 3, [])
    assert set(kernels.asked) == {"first", "second"}
    kernels.compiled = {"first", "second"}
    op(CASE, x)
    assert (x.tolist(), kernels.launched, kernels.waited) == ([2.0] * 3, ["first", "second"], [])


def test_after_a_launch_that_may_have_changed_something_a_kernel_is_waited_for(book, kernels):
    op = two_kernels(kernels, mutates=True)
    kernels.compiled = {"first"}
    assert op(CASE, 1) == "own"
    assert (kernels.launched, kernels.waited) == (["first", "second"], ["second"]), (
        "after a launch it must be waited for"
    )


@pytest.mark.parametrize(
    "wanted",
    [{"implementation": {"probe": "own"}}, {"deterministic": True}, {"debug": True}, {"tune": "first_use"}],
)
def test_what_must_run_is_waited_for(book, kernels, wanted):
    with override(**wanted):
        assert two_kernels(kernels)(CASE, 1) == "own"
    assert (kernels.waited, kernels.asked) == (["first", "second"], [])


def test_what_is_timed_is_waited_for(book, kernels):
    with override(race="first_use"):
        two_kernels(kernels, "timed")(CASE, 1)  # what is measured is kept
    assert set(kernels.waited) == {"first", "second"}
    assert not kernels.asked


def test_before_a_capture_kernels_that_were_asked_for_are_waited_for(book, kernels):
    op = two_kernels(kernels)
    assert op(CASE, 1) == "library"
    with background.awaited():
        assert op(CASE, 1) == "own"
    assert kernels.waited == ["first", "second"]


def test_where_a_fallback_is_forbidden_or_missing_it_is_waited_for(book, kernels):
    op = two_kernels(kernels)
    with override(fallback="forbid"):
        assert op(CASE, 1) == "own"
    alone = operation(Implementation("own", lambda x: kernels.launch("first"), own=True))
    alone(CASE, 1)
    assert (kernels.waited, kernels.asked) == (["first", "second", "first"], [])


def test_an_error_after_a_skipped_kernel_is_none(book, kernels):
    def run(x):
        kernels.launch("first")
        raise ValueError("of memory that no kernel has written")

    op = operation(Implementation("own", run, own=True), Implementation("library", lambda x: "library"))
    assert op(CASE, 1) == "library"
    kernels.compiled = {"first"}
    with pytest.raises(ValueError, match="no kernel has written"):
        op(CASE, 1)


def test_a_bound_call_binds_kernels_that_are_compiled(book, kernels):
    bound = []
    op = operation(
        Implementation("own", lambda x: kernels.launch("first"), own=True, bind=lambda x: bound.append(x) or print),
        Implementation("library", lambda x: "library"),
    )
    call = op.bound(CASE)
    call(1)
    assert not bound
    kernels.compiled = {"first"}
    call(2)
    assert bound == [2]


def test_without_a_start_nothing_changes(book, monkeypatch):
    monkeypatch.setattr(background, "_compilers", None)
    waited = []
    monkeypatch.setattr(background, "compile_cuda", lambda source, target: waited.append(source.name))
    op = operation(
        Implementation("own", lambda x: background.binary_of("k", SimpleNamespace(name="k"), "sm_90"), own=True),
        Implementation("library", lambda x: "library"),
    )
    assert op(CASE, 1) is None
    assert waited == ["k"]
    assert background.is_ready()


# --- child processes -------------------------------------------------------------------------------------------------
SOURCES = [
    KernelSource(f"k{i}", {"cuda": f'extern "C" __global__ void k{i}(int *x) {{ *x = {i}; }}'}, {f"k{i}": ("*i32",)})
    for i in range(3)
]
BROKEN = KernelSource("broken", {"cuda": 'extern "C" __global__ void broken() { nothing; }'}, {"broken": ()})


@pytest.fixture
def compilers(monkeypatch, tmp_path):
    """Children that keep what they compile in a folder of the test."""
    pytest.importorskip("cuda.bindings.nvrtc")
    with override(cache_dir=tmp_path / "cache"):
        own = background._Compilers()
        monkeypatch.setattr(background, "_compilers", own)
        yield own
    own.close()


def ask(*sources):
    for source in sources:
        with pytest.raises(background.NotCompiledError):
            background.attempt(background.binary_of, (cuda_key(source, "sm_90"), source, "sm_90"), True)


def wait(until, timeout_s=60.0):
    end = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.01)


def test_children_fill_the_cache_and_report_errors(compilers):
    ask(*SOURCES, BROKEN)
    assert not background.is_ready()
    wait(background.is_ready)
    assert all(KernelCache().has(cuda_key(source, "sm_90")) for source in SOURCES)
    with pytest.raises(CompileError, match="does not compile") as caught:
        background.binary_of(cuda_key(BROKEN, "sm_90"), BROKEN, "sm_90")
    assert "nothing" in caught.value.log
    assert len(compilers._children) == max(1, min(background.MOST_CHILDREN, usable_cores() - 1))


@pytest.mark.slow
def test_without_a_cache_the_code_comes_through_a_pipe(compilers, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    ask(SOURCES[0])
    assert len(compilers._children) == 1
    wait(background.is_ready)
    assert background.binary_of(cuda_key(SOURCES[0], "sm_90"), SOURCES[0], "sm_90").code[1:4] == b"ELF"


@pytest.mark.slow
def test_two_processes_share_the_work(compilers, monkeypatch):
    monkeypatch.setattr(background, "_count", lambda: 2)
    ask(*SOURCES)
    assert len(compilers._children) == 2
    wait(background.is_ready)
    assert {entry.name for entry in KernelCache().entries()} == {source.name for source in SOURCES}


def test_a_killed_child_leaves_libraries_running(compilers, monkeypatch):
    before = ledger().fallback_count()
    monkeypatch.setattr(background, "_PROGRAM", "import time; time.sleep(600)")  # it would be done before it is killed
    ask(SOURCES[0])
    for child in compilers._children:
        os.kill(child.process.pid, signal.SIGKILL)
    wait(lambda: not compilers._children)
    with pytest.warns(FallbackWarning, match="ended with status -9; not compiled: k0"):
        assert not background.is_ready()
    ask(SOURCES[1])  # nothing is started again, and nothing waits
    assert not background.is_ready()
    assert not compilers._children
    assert ledger().fallback_count() == before + 1


def test_a_hung_child_is_killed(compilers, monkeypatch):
    ask(SOURCES[0])
    children = list(compilers._children)
    for child in children:
        os.kill(child.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(background, "PATIENCE_S", 0.0)
    with pytest.warns(FallbackWarning, match="no kernel was compiled within"):
        assert not background.is_ready()
    wait(lambda: all(child.process.poll() is not None for child in children))


@pytest.mark.slow
def test_an_idle_child_is_followed_by_another(compilers, monkeypatch):
    monkeypatch.setattr(background, "_PROGRAM", "import time; time.sleep(0.2)")
    ask(SOURCES[0])
    monkeypatch.undo()
    monkeypatch.setattr(background, "_compilers", compilers)
    wait(background.is_ready)
    assert not compilers._failure


_PARENT = """
import os, sys, time
from accelerant.runtime.compilation import background
from accelerant.runtime.compilation.kernel import KernelSource
background.start()
text = 'extern "C" __global__ void k(int *x) { *x = 1; }'
source = KernelSource("k", {"cuda": text}, {"k": ("*i32",)})
try:
    background.attempt(background.binary_of, ("0" * 64, source, "sm_90"), True)
except background.NotCompiledError:
    print(*[child.process.pid for child in background._compilers._children], flush=True)
if sys.argv[1] == "fork" and os.fork() == 0:
    time.sleep(30)  # holds the pipes to the children open
if sys.argv[1] != "exit":
    time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("end", "delay_s"), [("exit", 0), ("kill", 0.2), ("kill", 4.0), ("fork", 4.0)])
def test_no_child_outlives_its_parent(tmp_path, end, delay_s):  # while it imports, and later
    pytest.importorskip("cuda.bindings.nvrtc")
    environment = os.environ | {"ACCELERANT_CACHE_DIR": str(tmp_path)}
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, end], stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    children = [int(pid) for pid in parent.stdout.readline().split()]
    assert children
    group = os.getpgid(parent.pid)
    if end == "exit":
        assert parent.wait(30) == 0
    else:
        time.sleep(delay_s)
        parent.kill()
        parent.wait()
    wait(lambda: not any(map(_is_alive, children)), 10.0)
    if end == "fork":
        os.killpg(group, signal.SIGKILL)
    parent.stdout.close()


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
