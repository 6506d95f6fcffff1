"""Naming devices, choosing by free memory, peer access."""

from __future__ import annotations

import json

import pytest
import torch

from accelerant.errors import BackendUnavailable, ConfigError, OutOfMemory
from accelerant.runtime import registry
from accelerant.runtime.monitoring import topology
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
    monkeypatch.setattr(topology, "cuda_reader", lambda device: TableReader({}, "not here"))
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


def test_the_freest_device_is_chosen(two):
    assert topology.select_by_free_memory("cuda").index == 1
    two.free = (6 << 30, 6 << 30)
    assert topology.select_by_free_memory("cuda", least_bytes=6 << 30).index == 0
    with pytest.raises(OutOfMemory, match=r"7,516,192,768 bytes wanted .* cuda:0, has 6,442,450,944 of 8,589,934,592"):
        topology.select_by_free_memory("cuda", least_bytes=7 << 30)
    with pytest.raises(ConfigError, match="-1"):
        topology.select_by_free_memory("cuda", least_bytes=-1)


def test_peers_are_data(two):
    assert topology.peer_access("cuda") == ((True, True), (False, True))
    found = topology.topology("cuda")
    text = json.loads(json.dumps(found.to_dict()))
    assert text["peers"] == [[True, True], [False, True]]
    assert [device["free_bytes"] for device in text["devices"]] == list(two.free)
    assert "card 1" in str(found)
    assert "0  x x\n1  - x" in str(found)


def test_the_cpu_is_its_own_and_only_peer():
    found = topology.topology("cpu")
    assert found.peers == ((True,),)
    assert 0 < found.devices[0].free_bytes <= found.devices[0].total_bytes
    assert topology.select_by_free_memory("cpu").backend == "cpu"


def test_the_drivers_tools_are_asked_before_cuda(two, monkeypatch):
    """Asking CUDA would make a context on every device."""

    def reader(device):
        return TableReader({"memory_total_bytes": lambda: 100, "memory_used_bytes": lambda: 30 + device.index}, "")

    monkeypatch.setattr(topology, "cuda_reader", reader)
    monkeypatch.setattr(two, "memory", None)
    assert topology.select_by_free_memory("cuda").index == 0
    assert [state.free_bytes for state in topology.topology("cuda").devices] == [70, 69]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_gpus_of_this_machine():
    found = topology.topology("cuda")
    count = torch.cuda.device_count()
    assert len(found.devices) == len(found.peers) == count
    assert all(found.peers[i][i] for i in range(count))
    assert topology.select_by_free_memory("cuda").backend == "cuda"
    assert registry.find_device("cuda").index == torch.cuda.current_device()
    for state in found.devices:
        assert 0 < state.free_bytes <= state.total_bytes
