"""Naming devices, free memory, peer access."""

from __future__ import annotations

import pytest
import torch

from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.monitoring import monitor
from accelerant.runtime.monitoring.readers import TableReader
from accelerant.runtime.provider import ComputeDevice, MemoryInfo


class Two:
    """A backend with two devices, the second the freer."""

    free = (3 << 30, 5 << 30)

    def devices(self):
        return [ComputeDevice("cuda", i, f"card {i}", memory_bytes=8 << 30) for i in range(2)]

    def memory(self, device=0):
        return MemoryInfo(8 << 30, self.free[device], 0, 0, 0)


@pytest.fixture
def two(monkeypatch):
    provider = Two()
    monkeypatch.setattr(registry, "create", lambda name: provider)
    monkeypatch.setattr(registry, "reason_absent", lambda name: "")
    monkeypatch.setattr(monitor.readers, "cuda_reader", lambda device: TableReader({}, "not here"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (0, 1))
    return provider


@pytest.mark.parametrize("name", ["cpu", "cpu:0", torch.device("cpu"), ComputeDevice("cpu", 0, "")])
def test_a_device_is_found_however_it_is_named(name):
    assert registry.find_device(name).backend == "cpu"
    assert registry.find_device(name).memory_bytes > 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("abacus", "unknown backend 'abacus'"),
        ("cpu:x", "got 'cpu:x'"),
        ("cpu:", "got 'cpu:'"),
        ("cpu:-1", "got 'cpu:-1'"),
        ("cpu:9", "there is no number 9"),
        (torch.device("meta"), "unknown backend 'meta'"),
        (3, "got 3"),
    ],
)
def test_names_without_a_device_are_refused(name, text):
    with pytest.raises(ConfigError, match=text):
        registry.find_device(name)


def test_an_absent_backend_says_why():
    absent = next(name for name in registry.BACKENDS if registry.reason_absent(name))
    with pytest.raises(BackendUnavailable, match=absent):
        registry.find_device(f"{absent}:0")


def test_peers_and_free_memory(two):
    assert monitor.peer_access("cuda") == ((True, True), (False, True))
    assert [monitor.free_memory(device) for device in two.devices()] == [(8 << 30, 3 << 30), (8 << 30, 5 << 30)]


def test_the_cpu_is_its_own_and_only_peer():
    assert monitor.peer_access("cpu") == ((True,),)
    total, free = monitor.free_memory(registry.find_device("cpu"))
    assert 0 < free <= total


def test_the_drivers_tools_are_asked_before_cuda(two, monkeypatch):
    """Asking CUDA would make a context on every device."""

    def reader(device):
        return TableReader({"memory_total_bytes": lambda: 100, "memory_used_bytes": lambda: 30 + device.index}, "")

    monkeypatch.setattr(monitor.readers, "cuda_reader", reader)
    monkeypatch.setattr(two, "memory", None)
    assert [monitor.free_memory(device) for device in two.devices()] == [(100, 70), (100, 69)]


@pytest.mark.gpu
def test_the_gpus_of_this_machine():
    peers = monitor.peer_access("cuda")
    assert len(peers) == torch.cuda.device_count()
    assert all(row[i] for i, row in enumerate(peers))
    assert registry.find_device("cuda").index == torch.cuda.current_device()
    for device in registry.create("cuda").devices():
        total, free = monitor.free_memory(device)
        assert 0 < free <= total
