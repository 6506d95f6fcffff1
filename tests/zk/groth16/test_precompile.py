"""Kernels compiled by a second process."""

import signal
import subprocess
import threading
from unittest.mock import Mock

import pytest

from accelerant.algebra.curve.launch import kernel_source
from accelerant.algebra.curve.parameters import family_of
from accelerant.config import override
from accelerant.runtime.compilation.cache import KernelCache
from accelerant.runtime.providers.cpu import CpuProvider
from accelerant.zk.groth16 import prover


@pytest.fixture
def provider(monkeypatch):
    """A CPU provider of the test, returned by the registry."""
    made = CpuProvider()
    monkeypatch.setattr(prover.registry, "create", lambda _: made)
    monkeypatch.setattr(prover, "usable_cores", lambda: 2)
    return made


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERANT_CACHE_DIR", str(tmp_path))  # for the other process
    with override(cache_dir=tmp_path):
        yield tmp_path


AT_WORK = """
import os, time
print('a', flush=True)
while not os.path.exists({!r}):
    time.sleep(0.01)
print('b', flush=True)
"""


def compiler_process(monkeypatch, program):
    monkeypatch.setattr(prover, "_PROGRAM", program)
    return prover._CompilerProcess("bn254", 8)


@pytest.mark.slow
def test_a_kernel_at_work_is_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(KernelCache, "has", lambda *_: True)
    process = compiler_process(monkeypatch, AT_WORK.format(str(tmp_path / "done")))
    with process._changed:
        assert process._changed.wait_for(lambda: process._at == "a", 120)
    process.wait("another")
    assert process._at == "a"
    threading.Timer(0.3, (tmp_path / "done").touch).start()
    process.wait("a")
    assert process._at != "a"
    process.wait("b")  # until the process has ended
    assert process._at == ""


@pytest.mark.parametrize("program", ["raise SystemExit(3)", "no program", "print('a')"])
def test_a_process_that_fails_is_not_waited_for(monkeypatch, program):
    process = compiler_process(monkeypatch, program)
    ended = threading.Thread(target=process.wait, args=("a",), daemon=True)
    ended.start()
    ended.join(120)
    assert not ended.is_alive()


@pytest.mark.slow
def test_a_process_whose_kernels_are_not_found_is_ended(monkeypatch, empty, tmp_path):
    """Where the cache cannot be written each kernel would be compiled twice, one time after the other."""
    process = compiler_process(monkeypatch, AT_WORK.format(str(tmp_path / "done")) + "time.sleep(600)")
    with process._changed:
        assert process._changed.wait_for(lambda: process._at == "a", 120)
    threading.Timer(0.3, (tmp_path / "done").touch).start()
    process.wait("a")
    assert process._process.wait(120) == -signal.SIGKILL
    process.wait("b")


def test_a_process_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(prover, "_PATIENCE_S", 0.2)
    process = compiler_process(
        monkeypatch, "import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    with process._changed:
        assert process._changed.wait_for(lambda: process._at == "a", 120)
    process.wait("a")
    assert process._process.wait(120) == -signal.SIGKILL
    assert process._at == ""


@pytest.mark.parametrize("executable", ["", None, "/nowhere/python"])
def test_where_no_process_can_start_all_is_compiled_here(provider, empty, monkeypatch, executable):
    monkeypatch.setattr(prover.sys, "executable", executable)
    prover.precompile_kernels("bn254", 8)
    assert provider.wait_for is None


def test_where_no_more_processes_are_allowed(provider, empty, monkeypatch):
    monkeypatch.setattr(subprocess, "Popen", Mock(side_effect=BlockingIOError(11, "Resource temporarily unavailable")))
    prover.precompile_kernels("bn254", 8)
    assert provider.wait_for is None


def test_nothing_is_started_where_there_is_nothing_to_gain(provider, empty, monkeypatch):
    monkeypatch.setattr(prover, "_CompilerProcess", None)
    monkeypatch.setattr(prover, "usable_cores", lambda: 1)
    prover.precompile_kernels("bn254", 8)
    monkeypatch.setattr(prover, "usable_cores", lambda: 2)
    monkeypatch.setattr(KernelCache, "has", lambda *_: True)
    prover.precompile_kernels("bn254", 8)
    assert provider.wait_for is None


@pytest.mark.slow
def test_what_it_compiles_is_found(provider, empty):
    prover.precompile_kernels("bn254", 1024)
    provider.wait_for.__self__._process.wait()
    curve = family_of("bn254").g2
    for entry in ("curve_mul", "curve_add"):
        assert provider.compile(kernel_source(curve, entry)).from_cache
    assert sum(path.is_dir() for path in (empty / "kernels").iterdir()) >= 12
