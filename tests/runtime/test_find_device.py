"""Naming devices, free memory, peer access."""

import re

import numpy as np
import pytest
import torch

import accelerant
from accelerant.config import override
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.dispatch import choices, operations
from accelerant.runtime.memory import limits
from accelerant.runtime.monitoring import monitor
from accelerant.runtime.monitoring.readers import TableReader
from accelerant.runtime.provider import ComputeBackend, ComputeDevice, MemoryInfo
from accelerant.runtime.streams.stream import Stream
from accelerant.runtime.streams.transfer import StagingPool, copy_async, stream_chunks
from refusals import assert_raises


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
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) == (0, 1))
    return provider


UNLIKE = {3: "3", True: "True", 0.5: "0.5", b"cpu": "b'cpu'", ("cpu",): r"\('cpu',\)", torch.float32: "torch.float32"}
"""Values that name no device, and how messages show them."""


@pytest.mark.parametrize(
    "name", ["cpu", "cpu:0", " CPU ", ComputeBackend.CPU, torch.device("cpu"), ComputeDevice("cpu", 0, "")]
)
def test_a_device_is_found_however_it_is_named(name):
    assert registry.find_device(name).backend == "cpu"
    assert registry.find_device(name).memory_bytes > 0


@pytest.mark.parametrize(("name", "text"), [
    ("abacus", "unknown backend 'abacus'"),
    ("cpu:x", "got 'cpu:x'"),
    ("cpu:", "got 'cpu:'"),
    ("cpu:-1", "got 'cpu:-1'"),
    ("cpu:9", "there is no number 9"),
    (torch.device("meta"), "unknown backend 'meta'"),
    ("", "unknown backend ''"),
    *((bad, f"or an entry of accelerant.devices\\(\\); got {shown}") for bad, shown in UNLIKE.items()),
])  # fmt: skip
def test_names_without_a_device_are_refused(name, text):
    assert_raises(ConfigError, text, registry.find_device, name)


def test_an_absent_backend_says_why():
    absent = next(device for device in registry.devices() if not device.available)
    for name in (absent, absent.backend, f"{absent.backend}:0"):
        assert_raises(BackendUnavailable, absent.backend, registry.find_device, name)


def test_the_default_device_is_that_of_the_settings():
    with override(backend="cpu"):
        assert {registry.find_device(name).label for name in (None, "auto", " Auto ")} == {"cpu:0"}


def test_devices_are_one_or_several(two):
    one, other = accelerant.runtime.find_devices(["cuda:1", torch.device("cuda:0")])
    assert (one.label, other.label) == ("cuda:1", "cuda:0")
    for alone in ("cuda:1", torch.device("cuda:1"), one, iter([one])):
        assert accelerant.runtime.find_devices(alone) == [one]
    with override(backend="cuda"):
        assert accelerant.runtime.find_devices(None) == [other]
    assert_raises(ConfigError, r"devices must be at least one of them; .*; got \[\]", registry.find_devices, [])
    for bad, shown in ((3, "3"), ([one, 0.5], "0.5"), (b"cpu", "99")):
        assert_raises(ConfigError, f"got {shown}", registry.find_devices, bad)


SOURCE = "ACL_KERNEL void k(ACL_GLOBAL float* x) {}"


def _entered(context):
    with context:
        pass


DEVICE_FUNCTIONS = {
    "kernel": lambda device: accelerant.kernel(SOURCE, device=device).compile(device),
    "measure": lambda device: _entered(accelerant.measure(device)),
    "to": lambda device: accelerant.to(torch.ones(1), device),
    "sample": monitor.sample,
    "free_memory": monitor.free_memory,
    "to_prometheus": lambda device: monitor.to_prometheus([device]),
    "watch_devices": lambda device: _entered(accelerant.watch_devices(devices=[device])),
    "Stream": Stream,
    "Stream.current": Stream.current,
    "copy_async": lambda device: copy_async(np.ones(1), device),
    "stream_chunks": lambda device: stream_chunks(torch.neg, np.ones(1), device=device),
    **{name: getattr(limits, name) for name in ("statistics", "available_bytes", "trim", "largest_owners")},
    "apply_limit": lambda device: limits.apply_limit(1.0, device),
    "allocate": lambda device: limits.allocate(1, device),
    "limit": lambda device: _entered(limits.limit(1 << 40, device)),
}
"""Name of a function -> a call of it with a `device`."""


@pytest.mark.parametrize("name", DEVICE_FUNCTIONS)
def test_device_arguments_are_understood_alike(name):
    call = DEVICE_FUNCTIONS[name]
    with override(backend="cpu"):
        for device in (None, "auto", "cpu", "CPU:0", torch.device("cpu"), registry.find_device("cpu")):
            call(device)
    for bad, shown in UNLIKE.items():
        assert_raises(ConfigError, f"device must be a name such as .*; got {shown}", call, bad)
    assert_raises(ConfigError, r"unknown backend 'cudda' \(did you mean 'cuda'\?\)", call, "cudda")


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


def test_objects_say_what_they_are():
    accelerant.ops.gelu(torch.ones(3))
    cpu = registry.create("cpu")
    shown = {
        r"Operation\('gelu_fwd': triton, torch\)": operations()["gelu_fwd"],
        r"CpuProvider\('cpu', running\)": cpu,
        r"Buffer\(8 bytes on device 0\)": cpu.allocate(8),
        r"HostTime\(done\)": cpu.record_event(),
        r"TaskEvent\(done\)": Stream("cpu").record(),
        r"StagingPool\(2 buffers of 1,000 bytes\)": StagingPool(1000, pinned=False),
        r"KernelSource\('k' in portable: k\)": KernelSource("k", {"portable": SOURCE}, {"k": ("*f32",)}),
        r"Choices\('.*choices'\)": choices(),
    }
    for text, value in shown.items():
        assert re.fullmatch(text, repr(value))


def test_events_of_two_kinds_have_no_time_between_them():
    with pytest.raises(TypeError, match=r"HostTime\(done\) cannot be compared with TaskEvent\(done\)"):
        registry.create("cpu").record_event().elapsed_ms(Stream("cpu").record())
    with pytest.raises(TypeError, match="no argument timeout_s= any more: it is timeout= now"):
        Stream("cpu").record().synchronize(timeout_s=1)
