from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest
import torch

import accelerant
from accelerant.config import override
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.providers import cuda


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
        name for name in registry.available() if name in registry.automatic_backends()
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
        assert "cuda" not in registry.available()
        with pytest.raises(BackendUnavailable, match="driver on your system is too old"):
            registry.choose("cuda")
