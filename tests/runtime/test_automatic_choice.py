"""Which device "auto" means: the order of backends, hardware alone, and only what passes its self-test."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import accelerant
from accelerant.errors import BackendUnavailable, DeviceLost
from accelerant.runtime import registry
from accelerant.runtime.providers.torch_devices import TorchProvider
from accelerant.testing import FakeProvider
from requirements import require_backend


class Gpu(FakeProvider):
    """Two devices of a backend, of which `software` says whether a CPU plays their part."""

    automatic = True
    software = False

    def __init__(self):
        super().__init__(devices=2)

    @classmethod
    def probe(cls):
        return ""

    def devices(self):
        kind = {"kind": "cpu" if self.software else "gpu"}
        return [replace(device, backend=self.name, properties=kind) for device in super().devices()]


CLASSES = {name: type(name.title(), (Gpu,), {"name": name}) for name in registry.BACKENDS[:-1]}
HERE = SimpleNamespace(**{name.title(): kind for name, kind in CLASSES.items()})


@pytest.fixture
def present(monkeypatch):
    """Every backend of the design, present; `present(name)` has those alone, and the CPU."""
    monkeypatch.setitem(sys.modules, "devices_of_this_test", HERE)

    def only(*names):
        for name in ("_reasons", "_created", "_registered", "_tested"):
            monkeypatch.setattr(registry, name, {})
        providers = {name: ("devices_of_this_test", name.title()) for name in names}
        monkeypatch.setattr(registry, "PROVIDERS", providers | {"cpu": CPU})

    only(*CLASSES)
    return only


CPU = registry.PROVIDERS["cpu"]


def test_the_order_is_that_of_the_backends(present):
    names = list(CLASSES)
    for i in range(len(names) + 1):
        present(*names[i:])
        assert registry.choose().backend == [*names, "cpu"][i]
        assert registry.find_device("auto").backend == [*names, "cpu"][i]


def test_software_is_used_by_name_alone(present, monkeypatch):
    present("opencl", "webgpu")
    monkeypatch.setattr(CLASSES["opencl"], "software", True)
    assert registry.choose().backend == "webgpu"
    monkeypatch.setattr(CLASSES["webgpu"], "software", True)
    assert registry.choose().backend == "cpu"
    assert registry.choose("opencl").software
    assert not registry.choose("cpu").software
    assert registry.create("opencl").counts["launch"] == 0  # not even tested


@pytest.mark.parametrize("name", ["opencl", "webgpu"])
def test_pocl_and_lavapipe_are_software(name):
    require_backend(name)
    kinds = {device.properties["kind"]: device.software for device in registry.create(name).devices()}
    assert kinds == {kind: kind == "cpu" for kind in kinds}
    assert registry.choose("auto").backend not in ("opencl", "webgpu")


def wrong_on(device, monkeypatch, kind):
    """Make copies from one device wrong in one word."""
    right = FakeProvider.copy_to_host

    def copy_to_host(self, buffer, dtype, shape):
        array = right(self, buffer, dtype, shape)
        if buffer.device == device:
            array.reshape(-1)[7] ^= 1
        return array

    monkeypatch.setattr(kind, "copy_to_host", copy_to_host)


def test_a_device_that_computes_wrong_numbers_is_set_aside_with_the_reason(present, monkeypatch, caplog):
    present("opencl")
    wrong_on(0, monkeypatch, CLASSES["opencl"])
    assert registry.choose().label == "opencl:1"
    reason = "1 of 1000 numbers are wrong"
    assert f"opencl:0 (fake device 0) is set aside: {reason}" in caplog.text
    listed = {device.label: device for device in registry.devices() if device.index >= 0}
    assert not listed["opencl:0"].available
    assert listed["opencl:0"].reason == f"set aside: {reason}"
    assert listed["opencl:1"].available
    assert registry.choose("opencl:0").index == 0  # by name it is the user's choice
    assert accelerant.Accelerator(fallback=False).device.label == "opencl:1"


@pytest.mark.parametrize("method", ["allocate", "compile", "launch", "synchronize"])
def test_a_device_that_fails_is_set_aside_and_the_next_backend_serves(present, method, caplog):
    present("cuda", "webgpu")
    provider = registry.create("cuda")
    provider.fail(method, DeviceLost("gone"), times=2)  # of either device
    assert registry.choose().backend == "webgpu"
    reasons = [device.reason for device in registry.devices() if device.backend == "cuda"]
    assert reasons == ["set aside: the self-test does not run: DeviceLost: gone"] * 2
    assert registry.choose().backend == "webgpu"
    assert provider.counts[method] == 2  # tested once
    with pytest.raises(BackendUnavailable):
        registry.choose("apple")


def test_a_test_that_is_postponed_is_made_at_a_later_choice(present, monkeypatch):
    """As on CUDA before the process has a context."""
    present("cuda")
    answers = [None, None, "1 of 1000 numbers are wrong", ""]
    monkeypatch.setattr(CLASSES["cuda"], "self_test", lambda self, device=0: answers.pop(0))
    assert [registry.choose().label for _ in range(4)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert not answers


@pytest.mark.gpu
def test_a_choice_makes_no_context_on_a_gpu_and_one_in_use_is_tested():
    program = (
        "import torch; from accelerant.runtime import registry; chosen = registry.choose(); "
        "print(chosen.label, torch._C._cuda_hasPrimaryContext(0), registry._tested); "
        "torch.zeros(1, device='cuda:0'); registry.choose(); print(list(registry._tested.values()))"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert ran.stdout.splitlines() == ["cuda:0 False {}", "['']"]


def test_the_self_test_of_torchs_devices_computes_on_them(monkeypatch):
    host = type("Host", (TorchProvider,), {"name": "host", "torch_type": "cpu"})()
    assert host.self_test() == ""
    to = torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *args: to(x, *args).index_fill(0, torch.tensor([3, 5]), 9))
    assert host.self_test() == "2 of 1000 numbers are wrong"


def test_every_provider_here_passes_its_self_test():
    for name in ("cpu", "opencl", "webgpu"):
        provider = registry.create(require_backend(name))
        for device in provider.devices():
            assert provider.self_test(device.index) == ""


def test_the_self_test_sees_a_kernel_that_does_nothing(monkeypatch):
    provider = FakeProvider()
    assert provider.self_test() == ""
    monkeypatch.setattr(FakeProvider, "launch", lambda *args, **options: None)
    assert provider.self_test() == "999 of 1000 numbers are wrong"
    assert np.uint32(2654435761) % 2
