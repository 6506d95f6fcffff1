"""Recorded launches: counted, failed, lost, and seen by observers."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from accelerant.errors import DeviceLost
from accelerant.runtime.ledger import RecordedLaunch, launch, ledger, observers, sole_record


@pytest.fixture
def record():
    ledger().reset()
    yield sole_record("test_op", "own", "cpu", "cpu", "a case", size_bytes=8, operations=2)
    ledger().reset()


def provider(lost=None):
    return SimpleNamespace(lost=lambda error: lost, record_event=lambda index: None)


def test_a_block_is_one_call(record):
    seen = []
    observers.append(seen.append)
    try:
        with RecordedLaunch(record, provider(), 0):
            pass
    finally:
        observers.pop()
    (decision,) = seen
    assert (decision.op, decision.case, decision.reason) == ("test_op", "a case", "the only one on cpu")
    assert (record.calls, record.failures) == (1, 0)
    assert (record.bytes_per_call, record.flops_per_call) == (8, 2)


def test_failures_are_counted_and_pass_through(record):
    with pytest.raises(ValueError, match="wrong"), RecordedLaunch(record, provider(), 0):
        raise ValueError("wrong")
    with pytest.raises(DeviceLost, match="gone"), RecordedLaunch(record, provider(DeviceLost("gone")), 0):
        raise ValueError("sticky")
    assert (record.calls, record.failures) == (2, 2)


def test_a_program_is_compiled_once():
    compiled, launched = [], []
    device = SimpleNamespace(
        compile=lambda source, entry, device: compiled.append((source.name, entry, device)) or entry,
        launch=lambda kernel, grid, block, args: launched.append((grid, block, args)),
    )
    space = SimpleNamespace(provider=device, backend="test", index=3, pointer=lambda array: f"*{array}")
    for n in (5, 6):
        launch(space, SimpleNamespace(name="test_program"), "entry", 2, 64, ("x", "y"), n)
    assert compiled == [("test_program", "entry", 3)]
    assert launched == [((2,), (64,), ("*x", "*y", n)) for n in (5, 6)]


def test_it_needs_no_torch():
    code = "import sys, accelerant.runtime.ledger; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
