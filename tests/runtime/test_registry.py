import contextlib
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import accelerant
from accelerant.config import override
from accelerant.errors import BackendUnavailable, CompileError, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.dispatch import Case, Cost, Implementation, Operation, explain_quietly, operations
from accelerant.runtime.provider import ComputeDevice, ComputeProvider
from accelerant.runtime.providers import cuda
from accelerant.runtime.providers.torch_devices import TorchProvider, rocm_description, torch_provider
from accelerant.runtime.registry import find_device
from accelerant.testing import FakeProvider
from refusals import assert_raises


def test_every_backend_is_named_and_an_absent_one_says_why():
    devices = accelerant.devices()
    assert list(dict.fromkeys(device.backend for device in devices)) == list(registry.BACKENDS)
    for device in devices:
        assert device.available == (not device.reason)
        assert (device.index == -1) == (not device.available)
        assert bool(device.torch_device) == (device.available and device.backend not in ("opencl", "webgpu"))
    assert devices[-1].backend == "cpu"
    assert devices[-1].available


def test_an_explicit_absent_backend_raises_with_the_reason():
    absent = next(device for device in accelerant.devices() if not device.available)
    caught = assert_raises(BackendUnavailable, absent.backend, registry.find_device, absent.backend)
    assert caught.reason == absent.reason


def test_choice_by_setting_argument_and_index():
    assert registry.find_device("cpu").torch_device == "cpu"
    with override(backend="cpu"):
        assert registry.find_device().backend == "cpu"
    hardware = [device for device in accelerant.devices() if device.available and not device.software]
    assert registry.find_device("auto") == hardware[0]
    assert_raises(ConfigError, "unknown backend 'abacus'", registry.find_device, "abacus")
    assert_raises(ConfigError, "there is no number 7", registry.find_device, "cpu:7")


def test_tensors_find_their_provider():
    assert registry.provider_of(torch.device("cpu")).name == "cpu"
    assert_raises(BackendUnavailable, "meta", registry.provider_of, torch.device("meta"))


@pytest.mark.parametrize(("script", "reason"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "crashed its process with signal 11"),
    ("import sys; sys.exit('no such card')", "no such card"),
    ("import time; time.sleep(60)", "did not answer within"),
    ("", ""),
])  # fmt: skip
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
    assert_raises(ConfigError, None, provider.trim, 2)


def test_a_backend_of_the_settings_that_is_absent_is_an_error():
    """tests/test_config.py reads the settings from the environment."""
    with override(backend="rocm"), pytest.raises(BackendUnavailable, match="backend 'rocm' is not available"):
        registry.find_device()


@pytest.mark.slow
def test_a_provider_that_does_not_start_is_a_reason_and_takes_nothing_down(monkeypatch):
    """As with a driver that is too old for torch's CUDA, which only torch.cuda.init() finds."""

    def refuses(self):
        raise RuntimeError("The NVIDIA driver on your system is too old\nmore")

    monkeypatch.setattr(cuda.CudaProvider, "probe", classmethod(lambda cls: ""))
    monkeypatch.setattr(cuda.CudaProvider, "__init__", refuses)
    for first in (registry.devices, registry.find_device, lambda: registry.find_device("cuda")):
        monkeypatch.setattr(registry, "_reasons", {"opencl": "not asked here"})
        monkeypatch.setattr(registry, "_created", {})
        with contextlib.suppress(BackendUnavailable):
            first()
        absent = next(device for device in registry.devices() if device.backend == "cuda")
        assert not absent.available
        assert absent.reason == "it does not start: RuntimeError: The NVIDIA driver on your system is too old"
        assert registry.find_device("auto").backend == "cpu"
        assert registry.reason_absent("cuda")
        assert_raises(BackendUnavailable, "driver on your system is too old", registry.find_device, "cuda")


# --- backends of other packages --------------------------------------------------------------------------------------
PLUGIN = """
from accelerant.testing import FakeProvider

class Sound(FakeProvider):
    name = "sound"

class Silent(FakeProvider):
    name = "silent"

    def devices(self):
        if self.counts["allocate"]:
            raise OSError("the bus is gone")
        return super().devices()

class Started(FakeProvider):
    name = "started"

    def __init__(self):
        raise OSError("no such bus")

class Probed(FakeProvider):
    name = "probed"

    @classmethod
    def probe(cls):
        return "no card in its slot"

class Exits(FakeProvider):
    name = "exits"

    @classmethod
    def probe(cls):
        raise SystemExit(3)

class Misnamed(FakeProvider):
    name = "other"

number = 5
"""


@pytest.fixture
def own_registry(monkeypatch):
    for name in ("PROVIDERS", "_reasons", "_created", "_registered", "_searched"):
        monkeypatch.setattr(registry, name, type(getattr(registry, name))(getattr(registry, name)))


@pytest.fixture
def plugins(own_registry, monkeypatch, tmp_path):
    """An installed package with entry points, of which one is sound."""
    (tmp_path / "plugin_of_tests.py").write_text(PLUGIN)
    points = {name.lower(): f"plugin_of_tests:{name}" for name in ("Sound", "Silent", "Started", "Probed", "Exits")}
    points |= {
        "misnamed": "plugin_of_tests:Misnamed",
        "number": "plugin_of_tests:number",
        "cpu": "plugin_of_tests:Sound",
    }
    points |= {"missing": "no_such_module:Provider", "attribute": "plugin_of_tests:Nothing"}
    info = tmp_path / "plugin_of_tests-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-tests\nVersion: 1.0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[accelerant.providers]", *lines]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "plugin_of_tests", raising=False)
    registry._searched.clear()


@pytest.mark.usefixtures("plugins")
def test_a_package_adds_a_backend_by_an_entry_point_and_a_broken_one_is_a_reason(caplog):
    listed = {device.backend: device for device in registry.devices()}
    assert list(listed)[-1] == "cpu"
    assert listed["cpu"].name != "fake device 0"
    assert "entry point 'cpu' (plugin_of_tests:Sound)" in caplog.text
    assert listed["sound"].available
    assert registry.find_device("Sound").label == "sound:0"
    assert accelerant.Accelerator("sound", fallback=False).field_add([1], [2]).tolist() == [3]
    reasons = {
        "started": "it does not start: OSError: no such bus",
        "probed": "no card in its slot",
        "exits": "its provider does not load: SystemExit: 3",
        "misnamed": "its provider Misnamed lacks the name 'misnamed'",
        "number": "its provider is no class of ComputeProvider: 5",
        "missing": "its provider does not load: ModuleNotFoundError: No module named 'no_such_module'",
        "attribute": "its provider does not load: AttributeError: module 'plugin_of_tests' has no attribute 'Nothing'",
    }
    assert {name: listed[name].reason for name in reasons} == reasons
    assert_raises(BackendUnavailable, "no such bus", accelerant.Accelerator, "started", fallback=False)
    registry.create("silent").allocate(8)
    assert {d.backend: d.reason for d in registry.devices()}["silent"].endswith("OSError: the bus is gone")
    assert registry.find_device("auto").backend in registry.BACKENDS


class Registered(FakeProvider):
    name = "registered"


@pytest.mark.usefixtures("own_registry")
def test_a_class_or_a_provider_is_registered_and_removed():
    assert registry.register(Registered) is Registered
    assert registry.find_device("registered").name == "fake device 0"
    first = registry.create("registered")
    second = registry.register(Registered(devices=3))
    assert registry.create("registered") is second is not first
    assert registry.find_device("registered:2").index == 2
    registry.unregister("registered")
    registry.unregister("registered")
    assert_raises(ConfigError, "unknown backend 'registered'", registry.find_device, "registered")
    with pytest.raises(ConfigError, match=r"not the registry's for 'registered': registry.register\(it\) first"):
        registry.register(Registered) and second.execute_kernel("field_add", [1], [2])


@pytest.mark.parametrize(("provider", "message"), [
    (5, "wanted a ComputeProvider"),
    (ComputeDevice, "wanted a ComputeProvider"),
    (ComputeProvider, "lacks .*allocate"),
    (type("A", (FakeProvider,), {"name": "cuda"}), "A.name is 'cuda'"),
    (type("A", (FakeProvider,), {"name": "vulkan"}), "A.name is 'vulkan'"),
    (type("A", (FakeProvider,), {"name": "Mine"}), "A.name is 'Mine'; wanted a lower-case name"),
])  # fmt: skip
def test_what_is_no_provider_is_not_registered(provider, message):
    assert_raises(ConfigError, message, registry.register, provider)


def test_vulkan_is_a_name_of_webgpu():
    assert registry.backend_named("Vulkan") == "webgpu"
    reason = registry.reason_absent("webgpu")
    with override(backend="vulkan"):
        for use in (lambda: registry.create("vulkan"), lambda: find_device("vulkan:0"), registry.find_device):
            with (
                pytest.raises(BackendUnavailable, match="'webgpu' is not available")
                if reason
                else contextlib.nullcontext()
            ):
                use()


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


def test_a_backend_without_a_provider_has_its_own_reason_once_it_has_one(monkeypatch):
    monkeypatch.setattr(registry, "_reasons", {})
    with monkeypatch.context() as without:
        without.setattr(registry, "PROVIDERS", {k: v for k, v in registry.PROVIDERS.items() if k != "cuda"})
        assert registry.reason_absent("cuda") == "this version has no provider for it"
    assert registry.reason_absent("cuda") != "this version has no provider for it"


def test_a_rocm_build_of_torch_runs_torchs_operations(monkeypatch):
    monkeypatch.setattr(registry, "_reasons", {})
    monkeypatch.setattr(torch.version, "hip", "6.2")
    monkeypatch.setattr(torch.version, "cuda", None)  # the tests also run with a build for CUDA, without a driver
    assert registry.reason_without_kernels(torch.device("cuda")).startswith("Accelerant has no kernels for rocm")
    assert registry.reason_absent("cuda") == f"torch {torch.__version__} is built for ROCm"
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


def lines_about_the_gpu(setting):
    with override(backend=setting):
        return str(explain_quietly(accelerant.ops.gelu, torch.ones(3))).splitlines()[1:-1]


def test_explain_says_why_no_gpu_computed():
    reason = registry.reason_absent("cuda")
    assert lines_about_the_gpu("auto")[-1].startswith(f"no GPU: {reason}" if reason else "not on cuda:0 (")
    assert "GPU" not in "".join(lines_about_the_gpu("cpu"))
    warning, why = lines_about_the_gpu("cuda")[-2:]
    assert warning.startswith("warning: the setting backend (ACCELERANT_BACKEND) is 'cuda', which moves no arrays")
    assert "nothing was copied" in warning
    assert why.startswith(f"no GPU: backend 'cuda' is not available: {reason}" if reason else "not on cuda:0 (")
    assert "unknown backend 'rtx'" in lines_about_the_gpu("rtx")[-1]


@pytest.mark.usefixtures("own_registry")
def test_explain_says_how_arrays_reach_a_device_that_is_there():
    registry.register(Registered)
    warning, why = lines_about_the_gpu("registered")[-2:]
    assert "'registered', which moves no arrays" in warning
    assert why.startswith("not on registered:0 (fake device 0), since the arrays are on the CPU: accelerant.to(x, ")
    with override(backend="registered"), accelerant.Accelerator(fallback=False) as acc:
        acc.field_add([1], [2])  # which copies
        assert acc.provider.counts["copy_to_device"] == 2


def test_such_a_provider_holds_memory_and_refuses_kernels():
    provider = HostAsAnother()
    assert [device.torch_device for device in provider.devices()] == ["cpu"]
    buffer = provider.copy_to_device(np.arange(5))
    assert provider.copy_to_host(buffer, np.int64, (5,)).tolist() == [0, 1, 2, 3, 4]
    for shape in ((2, 3), 6, (4, 0), ()):
        for made, expected in ((provider.zeros, np.zeros(shape)), (provider.ones, np.ones(shape))):
            found = provider.copy_to_host(made(shape, np.float64), np.float64, expected.shape)
            np.testing.assert_array_equal(found, expected)
    assert not provider.has_custom_kernels()
    provider.synchronize()
    assert provider.record_event() is None
    with pytest.raises(CompileError, match="'k': Accelerant has no kernels for another"):
        provider.compile(KernelSource("k", {"cuda": ""}, {"k": ()}))
    assert_raises(BackendUnavailable, "no provider serves such tensors", torch_provider, "vulkan")


def test_an_amd_device_is_described_from_torchs_properties():
    """The attributes that torch 2.13 declares, with figures of an MI300X."""
    info = SimpleNamespace(
        multi_processor_count=304, warp_size=64, clock_rate=2_100_000, memory_clock_rate=1_300_000,
        memory_bus_width=8192, L2_cache_size=4 << 20, max_threads_per_multi_processor=2048,
        shared_memory_per_block=64 << 10,
        gcnArchName="gfx942:sramecc+:xnack-", pci_bus_id=0x1B, pci_device_id=0, pci_domain_id=0, uuid="ab-cd",
    )  # fmt: skip
    found = rocm_description(info)
    assert found["architecture"] == "gfx942"
    facts = found["properties"]
    assert (facts["clock_mhz"], facts["memory_bus_bits"], facts["warp_size"]) == (2100, 8192, 64)
    assert (facts["pci_address"], facts["uuid"]) == ("0000:1b:00.0", "ab-cd")
    assert rocm_description(object())["architecture"] == ""


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
