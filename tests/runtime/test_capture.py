"""Whether a graph is being captured is asked of the device that work goes to, not of the current one."""

import gc
from contextlib import ExitStack, contextmanager

import pytest
import torch

from accelerant.runtime.dispatch.race import obstacle
from accelerant.runtime.streams.graphs import without_collection
from accelerant.runtime.streams.stream import capturing


@pytest.fixture
def two_devices(monkeypatch):
    """Two CUDA devices of which the second captures."""
    state = {"current": 0}

    @contextmanager
    def device(index):
        before, state["current"] = state["current"], index
        yield
        state["current"] = before

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state["current"])
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: state["current"], raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["current"] == 1)
    return state


def test_the_device_of_the_tensors_is_asked(two_devices):
    assert not capturing(torch.device("cuda:0"))
    assert capturing(torch.device("cuda:1"))
    assert capturing(1)
    assert not capturing(torch.device("cuda"))
    assert two_devices["current"] == 0
    two_devices["current"] = 1
    assert capturing(torch.device("cuda"))
    assert not capturing(0)


def test_other_devices_capture_nothing(two_devices):
    two_devices["current"] = 1
    assert not capturing(torch.device("cpu"))


def test_a_race_is_put_off_where_its_own_device_captures(two_devices):
    assert obstacle(torch.device("cuda:1"), ()) == "a CUDA graph is being captured"
    assert obstacle(torch.device("cuda:0"), ()) is None


def test_garbage_waits_for_the_captures_of_all_threads():
    one, other = ExitStack(), ExitStack()
    one.enter_context(without_collection())
    other.enter_context(without_collection())
    one.close()
    assert not gc.isenabled()
    other.close()
    assert gc.isenabled()
