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
from accelerant.cli.train import choose_device
from accelerant.config import override
from accelerant.errors import BackendUnavailable, ConfigError, DeviceLost, UnsupportedCase
from accelerant.nn.train import TrainConfig, Trainer
from accelerant.runtime import host, registry
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.providers.opencl import OpenclProvider
from accelerant.runtime.providers.torch_devices import TorchProvider
from accelerant.runtime.streams.stream import Stream, submit
from accelerant.runtime.streams.transfer import copy_async, stream_chunks
from accelerant.tensors import DeviceTensor
from accelerant.testing import FakeProvider
from refusals import assert_raises
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
        assert registry.find_device().backend == [*names, "cpu"][i]
        assert registry.find_device("auto").backend == [*names, "cpu"][i]


def test_software_is_used_by_name_alone(present, monkeypatch):
    present("opencl", "webgpu")
    monkeypatch.setattr(CLASSES["opencl"], "software", True)
    assert registry.find_device().backend == "webgpu"
    monkeypatch.setattr(CLASSES["webgpu"], "software", True)
    assert registry.find_device().backend == "cpu"
    assert registry.find_device("opencl").software
    assert not registry.find_device("cpu").software
    assert registry.create("opencl").counts["launch"] == 0  # not even tested


@pytest.mark.gpu
def test_a_gpu_of_nvidia_is_chosen_by_cuda_and_without_it_by_opencl(monkeypatch):
    assert registry.find_device().label == "cuda:0"
    require_backend("opencl")
    kinds = {device.properties["kind"] for device in registry.create("opencl").devices()}
    if "gpu" not in kinds:
        pytest.skip("no OpenCL driver shows a GPU; set OCL_ICD_VENDORS to a file that names its library")
    monkeypatch.setattr(registry, "PROVIDERS", {name: registry.PROVIDERS[name] for name in ("opencl", "cpu")})
    chosen = registry.find_device()
    assert (chosen.backend, chosen.properties["kind"]) == ("opencl", "gpu")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opencl", "webgpu"])
def test_pocl_and_lavapipe_are_software(name, monkeypatch):
    require_backend(name)
    monkeypatch.setattr(host, "_GPU_NODES", ("/dev/null",))  # as on a machine with a GPU that they do not drive
    kinds = {device.properties["kind"]: device.software for device in registry.create(name).devices()}
    assert kinds == {kind: kind == "cpu" for kind in kinds}
    assert not registry.find_device("auto").software


def test_an_index_of_the_automatic_choice_is_of_hardware_that_passes_its_self_test(present, monkeypatch):
    present("opencl")
    assert registry.find_device("auto:1").label == "opencl:1"
    present("opencl")
    wrong_on(1, monkeypatch, CLASSES["opencl"])
    with pytest.raises(BackendUnavailable, match="opencl:1 is not chosen automatically, 1 of 1000 numbers are wrong"):
        registry.find_device("auto:1")
    assert registry.find_device("opencl:1").index == 1


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
    assert registry.find_device().label == "opencl:1"
    reason = "1 of 1000 numbers are wrong"
    assert f"opencl:0 (fake device 0) is set aside: {reason}" in caplog.text
    listed = {device.label: device for device in registry.devices() if device.index >= 0}
    assert not listed["opencl:0"].available
    assert listed["opencl:0"].reason == f"set aside: {reason}"
    assert listed["opencl:1"].available
    assert registry.find_device("opencl:0").index == 0  # by name it is the user's choice
    assert accelerant.Accelerator(fallback=False).device.label == "opencl:1"


@pytest.mark.parametrize("method", ["allocate", "compile", "launch", "synchronize"])
def test_a_device_that_fails_is_set_aside_and_the_next_backend_serves(present, method, caplog):
    present("cuda", "webgpu")
    provider = registry.create("cuda")
    provider.fail(method, DeviceLost("gone"), times=2)  # of either device
    assert registry.find_device().backend == "webgpu"
    reasons = [device.reason for device in registry.devices() if device.backend == "cuda"]
    assert reasons == ["set aside: the self-test does not run: DeviceLost: gone"] * 2
    assert registry.find_device().backend == "webgpu"
    assert provider.counts[method] == 2  # tested once
    assert_raises(BackendUnavailable, None, registry.find_device, "apple")


def test_a_test_that_is_postponed_is_made_at_a_later_choice(present, monkeypatch):
    """As on CUDA before the process has a context."""
    present("cuda")
    answers = [None, None, "1 of 1000 numbers are wrong", ""]
    monkeypatch.setattr(CLASSES["cuda"], "self_test", lambda self, device=0: answers.pop(0))
    assert [registry.find_device().label for _ in range(4)] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]
    assert not answers


@pytest.mark.gpu
def test_a_choice_makes_no_context_on_a_gpu_and_one_in_use_is_tested():
    program = (
        "import torch; from accelerant.runtime import registry; chosen = registry.find_device(); "
        "print(chosen.label, torch._C._cuda_hasPrimaryContext(0), registry._tested); "
        "torch.zeros(1, device='cuda:0'); registry.find_device(); print(list(registry._tested.values()))"
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


# --- OpenCL, on real devices that say they are GPUs -------------------------------------------------------------------
@pytest.fixture
def opencl_gpu(monkeypatch):
    """The OpenCL devices of this machine, beside the CPU; all is real but that they say they are GPUs."""
    require_backend("opencl")
    described = OpenclProvider.devices

    def as_gpus(self: OpenclProvider):
        return [replace(found, properties=found.properties | {"kind": "gpu"}) for found in described(self)]

    monkeypatch.setattr(registry, "PROVIDERS", {name: registry.PROVIDERS[name] for name in ("opencl", "cpu")})
    monkeypatch.setattr(OpenclProvider, "devices", as_gpus)
    monkeypatch.setattr(OpenclProvider, "may_have_hardware", classmethod(lambda cls: True))


@pytest.mark.parametrize("node", [False, True])
def test_drivers_are_probed_only_where_the_system_shows_a_gpu(monkeypatch, tmp_path, node):
    require_backend("opencl")
    monkeypatch.setattr(registry, "_reasons", {})
    monkeypatch.setattr(registry, "_created", {})
    monkeypatch.setattr(registry, "PROVIDERS", {name: registry.PROVIDERS[name] for name in ("opencl", "cpu")})
    monkeypatch.setattr(host, "_GPU_NODES", (str(tmp_path / "renderD*"),))
    if node:
        (tmp_path / "renderD128").touch()
    kinds = {device.properties["kind"] for device in OpenclProvider().devices()}
    assert registry.find_device().backend == ("opencl" if node and "gpu" in kinds else "cpu")
    assert ("opencl" in registry._reasons) == node


def test_an_opencl_gpu_is_chosen_and_another_kind_is_not(opencl_gpu, monkeypatch):
    assert registry.find_device().label == registry.find_device("gpu").label == "opencl:0"
    assert registry.find_device().label == "opencl:0"
    assert registry.find_device(torch_tensors=True).label == "cpu:0"
    monkeypatch.setattr(OpenclProvider, "automatic_kinds", ("accelerator",))
    assert registry.find_device().label == "cpu:0"
    assert_raises(BackendUnavailable, None, registry.find_device, "gpu")


def test_the_library_runs_on_the_opencl_gpu_that_auto_means(opencl_gpu):
    acc = accelerant.Accelerator(fallback=False)
    assert acc.device.label == "opencl:0"
    assert acc.field_mul([3, 4], [5, 6]).tolist() == [15, 24]
    x = torch.randn(7, 5)
    torch.testing.assert_close(acc.gelu(x), torch.nn.functional.gelu(x))
    assert acc.submit(acc.field_add, [1], [2]).result().tolist() == [3]
    assert available_bytes() > 0
    doubled = stream_chunks(lambda chunk: chunk * 2, x.numpy(), chunk_bytes=40).result
    np.testing.assert_array_equal(doubled, 2 * x.numpy())
    assert isinstance(accelerant.to(x, "auto"), DeviceTensor)


def test_streams_of_auto_are_the_cpus_where_the_device_has_none(opencl_gpu):
    assert submit(lambda: 3).result() == 3
    x = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(copy_async(x).result().numpy(), x)
    assert Stream().device.label == Stream.current().device.label == "cpu:0"
    assert_raises(UnsupportedCase, "opencl works through its provider's one queue", Stream, "opencl")


def test_training_on_auto_takes_the_opencl_gpu_where_it_can(opencl_gpu):
    placed = {}
    layers = {"gru": torch.nn.GRU(3, 2), "convolution": torch.nn.Conv1d(3, 2, 1)}
    for case in ("float32", "bfloat16", "complex64", *layers):
        model = layers.get(case, torch.nn.Linear(3, 2))
        if case == "complex64":  # which the device has not
            model.register_buffer("phases", torch.zeros(1, dtype=torch.complex64))
        precision = "bfloat16" if case == "bfloat16" else "float32"
        trainer = Trainer(model, TrainConfig(precision=precision, device="auto"), loss=torch.nn.functional.mse_loss)
        placed[case] = isinstance(next(trainer.model.parameters()), DeviceTensor)
    assert placed == {"float32": True, "bfloat16": False, "complex64": False, "gru": False, "convolution": False}
    with override(backend="opencl"), pytest.raises(ConfigError, match="opencl:0, the setting's backend"):
        Trainer(torch.nn.Linear(3, 2), TrainConfig(precision="bfloat16", device="auto"))


def test_the_command_lines_auto_is_a_device_that_can_do_the_work(opencl_gpu):
    assert str(choose_device("auto", "--device", tensor_devices=True)) == "opencl:0"
    assert str(choose_device("auto", "--device", tensor_devices=True, torch_tensors=True)) == "cpu"
    assert str(choose_device("auto", "--device")) == "cpu"
