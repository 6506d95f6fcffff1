from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import accelerant
from accelerant.config import override
from accelerant.errors import BackendUnavailable, CompileError, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, explain_quietly, operations
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.providers import cuda
from accelerant.runtime.providers.torch_devices import TorchProvider, torch_provider


def test_every_backend_is_named_and_an_absent_one_says_why():
    devices = accelerant.devices()
    assert list(dict.fromkeys(device.backend for device in devices)) == list(registry.BACKENDS)
    for device in devices:
        assert device.available == (not device.reason)
        assert (device.index == -1) == (not device.available)
        assert bool(device.torch_device) == (device.available and device.backend in registry.automatic_backends())
    assert devices[-1].backend == "cpu"
    assert devices[-1].available


def test_an_explicit_absent_backend_raises_with_the_reason():
    absent = next(device for device in accelerant.devices() if not device.available)
    with pytest.raises(BackendUnavailable, match=absent.backend) as caught:
        registry.choose(absent.backend)
    assert caught.value.reason == absent.reason


def test_choice_by_setting_argument_and_index():
    assert registry.choose("cpu").torch_device == "cpu"
    with override(backend="cpu"):
        assert registry.choose().backend == "cpu"
    assert registry.choose("auto").backend == next(
        name for name in registry.automatic_backends() if not registry.reason_absent(name)
    )
    with pytest.raises(ConfigError, match="unknown backend 'abacus'"):
        registry.choose("abacus")
    with pytest.raises(ConfigError, match="there is no number 7"):
        registry.choose("cpu", 7)


def test_tensors_find_their_provider():
    assert registry.provider_of(torch.device("cpu")).name == "cpu"
    with pytest.raises(BackendUnavailable, match="meta"):
        registry.provider_of(torch.device("meta"))


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed its process with signal 11"),
        ("import sys; sys.exit('no such card')", "no such card"),
        ("import time; time.sleep(60)", "did not answer within"),
        ("", ""),
    ],
)
def test_a_broken_driver_is_a_reason_and_takes_nothing_down(monkeypatch, script, reason):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(cuda, "_PROBE", script)
    monkeypatch.setattr(cuda, "_PROBE_TIMEOUT_S", 2 if "sleep" in script else 30)
    found = cuda.CudaProvider.probe()
    assert reason in found
    assert bool(found) == bool(reason)


def test_the_cuda_provider_returns_unused_memory_through_torch(monkeypatch):
    emptied = []
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    provider = cuda.CudaProvider()
    provider.trim(1)
    assert emptied == [True]
    with pytest.raises(ConfigError):
        provider.trim(2)


def test_backend_setting_from_the_environment():
    code = "from accelerant.runtime import registry; print(registry.choose().backend)"
    ran = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"ACCELERANT_BACKEND": "webgpu"}, capture_output=True, text=True
    )
    assert ran.returncode == 1
    assert "BackendUnavailable: backend 'webgpu' is not available" in ran.stderr


def test_a_provider_that_does_not_start_is_a_reason_and_takes_nothing_down(monkeypatch):
    """As with a driver that is too old for torch's CUDA, which only torch.cuda.init() finds."""

    def refuses(self):
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(cuda.CudaProvider, "probe", classmethod(lambda cls: ""))
    monkeypatch.setattr(cuda.CudaProvider, "__init__", refuses)
    for first in (registry.devices, registry.choose, lambda: registry.choose("cuda")):
        monkeypatch.setattr(registry, "_reasons", {"opencl": "not asked here"})
        monkeypatch.setattr(registry, "_created", {})
        with contextlib.suppress(BackendUnavailable):
            first()
        absent = next(device for device in registry.devices() if device.backend == "cuda")
        assert not absent.available
        assert absent.reason == "it does not start: RuntimeError: The NVIDIA driver on your system is too old"
        assert registry.choose("auto").backend == "cpu"
        assert registry.reason_absent("cuda")
        with pytest.raises(BackendUnavailable, match="driver on your system is too old"):
            registry.choose("cuda")


# --- devices without kernels of ours ---------------------------------------------------------------------------------


class HostAsAnother(TorchProvider):
    """torch's CPU tensors in the part of an accelerator that Accelerant has no kernels for."""

    name = "another"
    torch_type = "cpu"


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_tensors_without_kernels_of_ours_run_torchs_operations(kind):
    case = Case(torch.device(kind), torch.float32, (4, 8))
    reasons = {each.name: reason for each, reason in operations()["softmax_fwd"].refusals(case)}
    name = {"mps": "apple"}.get(kind, kind)
    assert reasons == {"triton": f"Accelerant has no kernels for {name}: torch's operations run", "torch": None}


def test_a_rocm_build_of_torch_runs_torchs_operations(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert registry.reason_without_kernels(torch.device("cuda")).startswith("Accelerant has no kernels for rocm")
    assert registry.reason_absent("cuda").startswith("torch")
    monkeypatch.setattr(torch.version, "hip", None)
    assert registry.reason_without_kernels(torch.device("cuda")) == ""


def test_an_op_on_such_a_device_is_in_the_ledger_with_the_reason(monkeypatch):
    monkeypatch.setitem(registry.PROVIDERS, "cpu", ("tests", "HostAsAnother"))
    monkeypatch.setattr(registry, "_provider_class", lambda name: HostAsAnother if name == "cpu" else cuda.CudaProvider)
    monkeypatch.setattr(registry, "_created", {"cpu": HostAsAnother()})
    own = Implementation("own", lambda x: 1 / 0, own=True)
    double = Operation("double", (own, Implementation("torch", lambda x: 2 * x)), cost=lambda case: Cost(8, 1))
    x = torch.ones(3)
    explained = explain_quietly(lambda: double(Case(x.device, x.dtype, (3,)), x))
    assert torch.equal(explained.result, 2 * x)
    (decision,) = explained.decisions
    assert decision.implementation == "torch"
    assert dict(decision.refused)["own"].startswith("Accelerant has no kernels for cpu")


def test_such_a_provider_holds_memory_and_refuses_kernels():
    provider = HostAsAnother()
    assert [device.torch_device for device in provider.devices()] == ["cpu"]
    buffer = provider.copy_to_device(np.arange(5))
    assert provider.copy_to_host(buffer, np.int64, (5,)).tolist() == [0, 1, 2, 3, 4]
    provider.synchronize()
    assert provider.record_event() is None
    with pytest.raises(CompileError, match="'k': Accelerant has no kernels for another"):
        provider.compile(KernelSource("k", {"cuda": ""}, {"k": ()}))
    with pytest.raises(BackendUnavailable, match="no provider serves such tensors"):
        torch_provider("vulkan")


def test_devices_print_as_a_table():
    listed = registry.Devices(
        [
            ComputeDevice(backend="cpu", index=0, name="<b>Fast</b>", memory_bytes=3 << 30, architecture="x86_64"),
            ComputeDevice(backend="cuda", index=-1, name="", available=False, reason="no driver"),
        ]
    )
    head, first, second = repr(listed).splitlines()
    assert head.split()[:3] == ["device", "name", "memory"]
    assert first.split() == ["cpu:0", "<b>Fast</b>", "3.0", "GiB", "x86_64"]
    assert second.split() == ["cuda", "no", "driver"]
    assert "&lt;b&gt;Fast" in listed._repr_html_()
    assert isinstance(registry.devices(), list)
