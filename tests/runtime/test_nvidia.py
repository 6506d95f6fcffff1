"""Facts about NVIDIA's devices: versions of drivers, compute capabilities, MIG, CUDA_VISIBLE_DEVICES, masks."""

import re

import pynvml
import pytest
import torch

from accelerant.runtime import registry
from accelerant.runtime.monitoring import readers
from accelerant.runtime.monitoring.readers import driver_version, matrix_dtypes, minimum_driver, slow_down_reasons
from accelerant.runtime.provider import room_fraction
from accelerant.runtime.providers import cuda


@pytest.mark.parametrize(("text", "version"), [
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC", "535.129.03"),
    ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs)\n", "580.95.05"),
    ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  525.60  Wed", "525.60"),
    ("", ""),
])  # fmt: skip
def test_the_version_of_the_kernel_driver(tmp_path, text, version):
    path = tmp_path / "version"
    path.write_text(text)
    assert driver_version(path) == version
    assert driver_version(tmp_path / "absent") == ""


def test_the_minimum_driver_is_that_of_the_major_version():
    assert minimum_driver("13.0") == minimum_driver("13.5") == "580.65.06"
    assert minimum_driver("12.8") == "525.60.13"
    assert minimum_driver("9.2") == minimum_driver("None") == ""


@pytest.mark.parametrize(("driver", "torch_cuda", "bindings", "said"), [
    (13000, "13.0", "13.5.0", ""),
    (13010, "12.8", "13.5.0", ""),  # a torch for CUDA 12 on a new driver
    (12040, "12.8", "12.9.10", ""),
    (12040, "13.0", "13.5.0", r"up to 12\.4; torch is built for CUDA 13\.0: install driver 580\.65\.06 or newer"),
    (12080, "12.8", "13.5.0", r"cuda-bindings compiles for CUDA 13\.5: install .* or 'accelerant\[cuda12\]'"),
    (11040, "12.6", "12.9.10", r"up to 11\.4; .*525\.60\.13"),
])  # fmt: skip
def test_a_driver_that_is_too_old_says_what_to_install(driver, torch_cuda, bindings, said):
    problem = readers.driver_problem(driver, torch_cuda, bindings)
    assert bool(problem) == bool(said)
    assert re.search(said, problem)


def test_the_probe_reports_an_old_driver_and_hidden_devices(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(cuda, "_PROBE", "import sys; sys.exit('CUDA 12040' if needed == 13 else '')")
    assert "up to 12.4; torch is built for CUDA 13.0" in cuda.CudaProvider.probe()
    monkeypatch.setattr(cuda, "_PROBE", "import sys; sys.exit('the NVIDIA driver shows no device')")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1,MIG-2")
    assert "CUDA_VISIBLE_DEVICES=MIG-1,MIG-2 a process computes on one MIG slice" in cuda.CudaProvider.probe()


def test_a_gpu_that_is_too_old_for_kernels():
    assert (
        readers.capability_problem(7, 0) == "its compute capability is 7.0, and kernels are compiled for 7.5 and newer"
    )
    assert readers.capability_problem(7, 5) == readers.capability_problem(12, 0) == ""


def test_dtypes_by_compute_capability():
    assert readers.cuda_dtypes(7, 5) == ["float64", "float32", "float16"]
    assert readers.cuda_dtypes(9, 0)[-1] == "float8_e5m2"
    assert matrix_dtypes(7, 5) == ["float16", "int8"]
    assert matrix_dtypes(8, 0)[0] == matrix_dtypes(9, 0)[0] == "float64"
    assert "float64" not in matrix_dtypes(8, 6) + matrix_dtypes(8, 9) + matrix_dtypes(12, 0)
    assert "float4_e2m1" in matrix_dtypes(12, 0)


@pytest.mark.parametrize(("value", "said"), [
    (None, ""),
    ("0", ""),
    ("1,0", ""),
    ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", ""),
    ("MIG-56c30729-347f-5dd6-8da0-c3cc59e969e0", ""),
    ("MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/0", ""),
    ("", "no device is visible"),
    ("-1", "'-1' names no device .*: it is hidden"),
    ("0,x,1,2", "'x' names no device .*: it and 2 after it are hidden"),
    ("0,0", "twice"),
    ("MIG-56c3,MIG-57c3", "one MIG slice, .* name MIG-56c3 alone"),
])  # fmt: skip
def test_what_cuda_visible_devices_hides(value, said):
    problem = readers.visible_devices_problem(value)
    assert bool(problem) == bool(said)
    assert re.search(said, problem)


@pytest.mark.parametrize(("name", "profile"), [
    ("NVIDIA H200 MIG 1g.18gb", "1g.18gb"),
    ("NVIDIA A100-SXM4-40GB MIG 1c.3g.20gb", "1c.3g.20gb"),
    ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "1g.10gb+me"),
    ("NVIDIA H200", ""),
])  # fmt: skip
def test_the_profile_of_a_slice_is_in_its_name(name, profile):
    assert readers.profile_of(name) == profile


def test_masks_of_slowed_clocks():
    idle, chosen = pynvml.nvmlClocksEventReasonGpuIdle, pynvml.nvmlClocksEventReasonApplicationsClocksSetting
    assert slow_down_reasons(idle | chosen | pynvml.nvmlClocksEventReasonSyncBoost) == ()
    hot = pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonHwThermalSlowdown
    assert slow_down_reasons(hot | pynvml.nvmlClocksEventReasonSwPowerCap) == ("power", "thermal")
    assert slow_down_reasons(pynvml.nvmlClocksEventReasonHwSlowdown) == ("hardware",)
    assert slow_down_reasons(pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown) == ("power brake",)


def test_without_nvml_no_slice_is_listed():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert readers.hidden_slices(set()) == []


def test_the_automatic_fraction_leaves_what_others_hold():
    assert room_fraction(100, 100, 0) == pytest.approx(0.95)
    assert room_fraction(100, 40, 0) == pytest.approx(0.38)
    assert room_fraction(100, 40, 20) == pytest.approx(0.57)  # this process's own 20 are no one else's
    assert room_fraction(100, 0, 0) == 0.01
    assert room_fraction(0, 0, 0) == 1.0


@pytest.mark.gpu
def test_the_specification_of_a_gpu():
    device = registry.find_device("cuda")
    facts = device.properties
    assert facts["warp_size"] == 32
    assert 1024 <= facts["threads_per_multiprocessor"] <= 2048
    assert 48 << 10 <= facts["shared_bytes_per_block"] <= facts["shared_bytes_per_multiprocessor"]
    assert 200 < facts["clock_mhz"] < 5000
    assert 100 < facts["memory_bandwidth_gb_s"] < 20_000
    assert facts["pci_address"].count(":") == 2
    assert facts["uuid"].startswith(("GPU-", "MIG-"))
    driver, least = ([int(part) for part in facts[name].split(".")] for name in ("driver_version", "minimum_driver"))
    assert driver >= least
    assert "bfloat16" in facts["dtypes"]
    assert all(not hidden.available for hidden in registry.create("cuda").hidden_devices())
    assert 0.01 <= registry.create("cuda").free_fraction(device) <= 0.95
