"""Readers on simulated /proc and /sys trees, the real machine, and, marked gpu, NVML."""

import json
import math
import os
import re
import threading
import time

import numpy as np
import pytest
import torch

import accelerant as acl
from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.ledger import ledger
from accelerant.runtime.monitoring import monitor
from accelerant.runtime.monitoring.monitor import measure, sample
from accelerant.runtime.monitoring.readers import FIGURES, Absent, CpuReader, ProcessMemory, TableReader
from accelerant.runtime.provider import ComputeDevice
from clock import Clock

STAT = "cpu  {0} 0 0 {1} 0 0 0 0 0 0\ncpu0 {0} 0 0 {1} 0 0 0 0 0 0\ncpu1 0 0 0 {1} 0 0 0 0 0 0\nintr 5\n"


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """A two-core machine with a sensor and two packages, one of which has parts of its own."""
    write(tmp_path / "proc/stat", STAT.format(100, 900))
    write(tmp_path / "proc/meminfo", "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 600 kB\nHugePages_Total: 0\n")
    write(tmp_path / "proc/cpuinfo", "processor : 0\ncpu MHz : 2000.000\nprocessor : 1\ncpu MHz : 3000.000\n")
    for pid, name, pages in ((7, "small one", 1), (8, "large", 50), (9, "kernel thread", 0)):
        write(tmp_path / f"proc/{pid}/comm", f"{name}\n")
        write(tmp_path / f"proc/{pid}/statm", f"999 {pages} 0 0 0 0 0\n")
    (tmp_path / "proc/8/comm").write_bytes(b"\xffarge\n")  # a name need not be UTF-8
    for core in (0, 1):
        write(tmp_path / f"sys/devices/system/cpu/cpu{core}/thermal_throttle/core_throttle_count", "3\n")
    for controller, kind, count in ((0, "ce", 4), (0, "ue", 0), (1, "ce", 1), (1, "ue", 0)):
        write(tmp_path / f"sys/devices/system/edac/mc/mc{controller}/{kind}_count", f"{count}\n")
    sys = tmp_path / "sys/class"
    for zone, name, count in (
        ("intel-rapl:0", "package-0", 5e6),
        ("intel-rapl:1", "package-1", 9e6),
        ("intel-rapl:0:0", "core", 1e6),
    ):
        write(sys / f"powercap/{zone}/name", f"{name}\n")
        write(sys / f"powercap/{zone}/energy_uj", f"{count:.0f}\n")
        write(sys / f"powercap/{zone}/max_energy_range_uj", "10000000\n")
    write(sys / "hwmon/hwmon0/name", "nvme\n")
    write(sys / "hwmon/hwmon0/temp1_input", "90000\n")
    write(sys / "hwmon/hwmon1/name", "coretemp\n")
    write(sys / "hwmon/hwmon1/temp1_input", "41000\n")
    write(sys / "hwmon/hwmon1/temp2_input", "43500\n")
    return tmp_path


def test_a_machine_that_tells_everything(machine):
    reader = CpuReader(root=machine)
    found, reasons = reader.read(FIGURES)
    assert reasons.keys() == {"memory_clock_mhz"}
    assert found["memory_used_bytes"] == 400 * 1024
    assert found["memory_total_bytes"] == 1000 * 1024
    assert found["temperature_c"] == 43.5  # the disk's sensor is hotter and is none of the CPU's
    assert found["clock_mhz"] == 2500.0
    assert (found["slow_down"], found["ecc_corrected"], found["ecc_uncorrected"]) == ((), 5, 0)
    assert [each.pid for each in found["processes"]] == [8, 7]
    assert found["processes"][0].name == r"\xffarge"
    assert found["processes"][1] == ProcessMemory(7, "small one", os.sysconf("SC_PAGE_SIZE"))


def test_load_is_what_passed_between_two_readings(machine):
    reader = CpuReader(root=machine)
    assert reader.read(["utilisation_percent"])[0] == {"utilisation_percent": 0.0}  # nothing passed
    write(machine / "proc/stat", STAT.format(130, 910))
    found, _ = reader.read(["utilisation_percent", "core_percents"])
    assert found["utilisation_percent"] == 75.0
    assert found["core_percents"] == (75.0, 0.0)


def test_energy_is_the_sum_of_the_packages_and_survives_a_counter_that_begins_again(machine):
    reader = CpuReader(root=machine)
    assert reader.read(["energy_j"])[0] == {"energy_j": 0.0}
    write(machine / "sys/class/powercap/intel-rapl:0/energy_uj", "7500000")
    write(machine / "sys/class/powercap/intel-rapl:1/energy_uj", "1000000")  # from 9 to 10, then on to 1
    write(machine / "sys/class/powercap/intel-rapl:0:0/energy_uj", "4000000")  # inside package 0
    assert reader.read(["energy_j"])[0]["energy_j"] == pytest.approx(2.5 + 2.0)


def test_power_is_energy_over_time(machine, monkeypatch):
    monkeypatch.setattr("accelerant.runtime.monitoring.readers.time", clock := Clock())
    reader = CpuReader(root=machine)
    _, reasons = reader.read(["power_w"])
    assert "second reading" in reasons["power_w"]
    clock.sleep(0.05)
    write(machine / "sys/class/powercap/intel-rapl:0/energy_uj", "6000000")
    assert reader.read(["power_w"])[0]["power_w"] == pytest.approx(1.0 / 0.05, rel=1e-3)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read every file")
def test_an_energy_counter_that_may_not_be_read(machine):
    (machine / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    _, reasons = CpuReader(root=machine).read(["energy_j"])
    assert "only root may read" in reasons["energy_j"]


def test_an_empty_machine_has_reasons_and_no_figures(tmp_path):
    found, reasons = CpuReader(root=tmp_path).read(FIGURES)
    assert found == {}
    assert reasons.keys() == set(FIGURES)
    assert all(reasons.values())
    assert CpuReader(4096, root=tmp_path).read(["memory_total_bytes"])[0] == {"memory_total_bytes": 4096}


def test_a_processor_slows_down_when_its_counters_rise(machine):
    reader = CpuReader(root=machine)
    assert [reader.read(["slow_down"])[0]["slow_down"] for _ in range(2)] == [(), ()]
    write(machine / "sys/devices/system/cpu/cpu1/thermal_throttle/core_throttle_count", "4")
    assert [reader.read(["slow_down"])[0]["slow_down"] for _ in range(2)] == [("thermal",), ()]


# --- the devices that are here ---------------------------------------------------------------------------------------
@pytest.fixture
def cpu():
    return registry.find_device("cpu")


def test_a_sample_has_every_figure_or_its_reason(cpu):
    for device in (device for device in registry.devices() if device.available):
        now = sample(device)
        assert now.device == f"{device.backend}:{device.index}"
        for name in FIGURES:
            assert (getattr(now, name) is None) == (name in now.reasons), name
        assert json.loads(json.dumps(now.to_dict()))["reasons"] == now.reasons
    assert sample(cpu).memory_total_bytes == cpu.memory_bytes


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="the load is read from /proc")
def test_the_cpu_is_busy_while_it_works(cpu):
    stop = threading.Event()
    x = torch.randn(400, 400)

    def work():
        while not stop.is_set():
            x @ x

    thread = threading.Thread(target=work)
    thread.start()
    try:
        sample(cpu)
        time.sleep(0.2)
        busy = sample(cpu).utilisation_percent
    finally:
        stop.set()
        thread.join()
    assert busy > 10.0


def test_an_absent_backend_has_no_sample():
    absent = ComputeDevice("webgpu", -1, "", available=False, reason="no adapter")
    with pytest.raises(BackendUnavailable, match="no adapter"):
        sample(absent)


# --- a region --------------------------------------------------------------------------------------------------------
def test_a_region_has_its_time_and_memory_and_prints_as_a_table():
    held = []
    with acl.measure("cpu") as found:
        held.append(np.ones(64 << 20, np.uint8))  # so much is new pages, never those that were freed before
        acl.ops.softmax(torch.randn(3, 5))
    assert found.seconds > 0
    if "peak_bytes" not in found.reasons:
        assert 48 << 20 < found.peak_growth_bytes <= found.peak_bytes
    text = str(found)
    assert re.search(r"^time +[\d.e-]+ s$", text, re.MULTILINE)
    assert re.search(r"^softmax_fwd +torch +3x5 float32 +1 ", text, re.MULTILINE)
    assert found.kernels == ()
    json.dumps(found.to_dict())


@pytest.mark.slow
def test_a_region_traces_its_kernels_and_leaves_another_profiler_alone():
    with acl.measure("cpu", kernels=True) as found:
        torch.ones(30, 40) @ torch.ones(40, 50)
    assert {kernel.name: kernel.calls for kernel in found.kernels}["aten::mm"] == 1
    assert "aten::mm" in str(found)
    with torch.profiler.profile(), acl.measure("cpu", kernels=True) as found:
        pass
    assert found.reasons["kernels"] == "another profiler is running"


@pytest.mark.gpu
def test_a_region_on_a_gpu_has_its_memory_and_kernels():
    with acl.measure("cuda", kernels=True) as found:
        acl.ops.gelu(torch.ones(1 << 20, device="cuda"))
    assert 8 << 20 <= found.peak_growth_bytes <= found.peak_bytes
    assert any("gelu" in kernel.name and kernel.time_ms > 0 for kernel in found.kernels)


class Reader:
    """A device whose counter goes up by `watts` joules a second, in steps of `step_j`."""

    def __init__(self, watts, *, counter=True, step_j=1e-6, clock=time):
        began = clock.perf_counter()
        self.readings = 0

        def energy():
            if not counter:
                raise Absent("no counter here")
            return math.floor((clock.perf_counter() - began) * watts / step_j) * step_j

        figures = {"energy_j": energy, "power_w": lambda: watts, "temperature_c": lambda: 50.0}
        self._table = TableReader(figures, "")

    def read(self, names):
        found = self._table.read(names)
        self.readings += 1
        return found


@pytest.fixture
def measured(monkeypatch, cpu):
    """Measures a function on the CPU device, its figures those of the reader above."""

    def run(fn, reader):
        monkeypatch.setattr(monitor, "_new_reader", lambda device: reader)
        with measure(cpu, interval_s=0.01) as found:
            fn()
        return found

    return run


@pytest.fixture
def read_often(measured, monkeypatch):
    """Measures 0.1 s of a clock of the test's own, with readings all along."""

    def run(**reader):
        monkeypatch.setattr(monitor, "time", clock := Clock())
        reader = Reader(200.0, clock=clock, **reader)

        def work():
            for _ in range(4):
                clock.sleep(0.025)
                seen = reader.readings
                while reader.readings == seen:
                    time.sleep(1e-3)

        return measured(work, reader)

    return run


def test_energy_from_the_counter(read_often):
    found = read_often()
    assert found.energy_source == "counter"
    assert found.seconds == pytest.approx(0.1, rel=1e-3)
    assert found.power_mean_w == pytest.approx(200.0, rel=1e-3)
    assert found.energy_j == pytest.approx(200.0 * 0.1, rel=1e-3)
    assert found.readings >= 6
    assert found.temperature_start_c == found.temperature_end_c == found.temperature_peak_c == 50.0
    assert found.reasons == {}


@pytest.mark.parametrize("reader", [{"counter": False}, {"step_j": 1e9}])
def test_energy_from_power_where_no_counter_is_or_moves(read_often, reader):
    found = read_often(**reader)
    assert found.energy_source == "power"
    assert found.energy_j == pytest.approx(200.0 * 0.1, rel=1e-3)
    assert found.power_peak_w == 200.0


def test_a_device_that_tells_nothing_gives_reasons(measured):
    found = measured(lambda: None, TableReader({}, "it tells nothing"))
    assert found.energy_j is found.power_mean_w is found.temperature_peak_c is None
    assert set(found.reasons.values()) == {"it tells nothing"}
    json.dumps(found.to_dict())


def test_energy_is_shared_over_the_ops_by_time(measured):
    small, large = torch.randn(8, 8), torch.randn(1024, 1024)
    acl.ops.gelu(small)  # before the region: not counted

    def work():
        for _ in range(8):
            acl.ops.gelu(small)
            acl.ops.gelu(large)

    found = measured(work, Reader(100.0))
    assert found.shared_by == "time"
    first, second = found.ops[:2]
    assert (first.op, first.calls, second.calls) == ("gelu_fwd", 8, 8)
    assert first.case.startswith("1024x1024")
    assert first.energy_per_call_j > second.energy_per_call_j > 0
    assert sum(op.energy_j for op in found.ops) == pytest.approx(found.energy_j)
    assert first.energy_j / second.energy_j == pytest.approx(first.time_ms / second.time_ms)
    assert found.busy == pytest.approx(sum(op.time_ms for op in found.ops) / 1e3 / found.seconds)


def test_energy_is_shared_by_calls_where_no_call_was_timed(measured):
    ledger().reset()
    found = measured(lambda: acl.ops.gelu(torch.randn(5, 5)), Reader(100.0))  # a first call is not timed
    assert found.shared_by == "calls"
    assert found.busy is None
    assert [(op.calls, op.time_ms) for op in found.ops] == [(1, None)]
    assert found.ops[0].energy_j == found.energy_j


def test_an_error_in_the_region_passes_and_the_measurement_is_there(cpu):
    with pytest.raises(ZeroDivisionError), measure(cpu) as found:
        raise ZeroDivisionError
    assert found.seconds > 0
    assert found.readings >= 2
    assert not [thread for thread in threading.enumerate() if thread.name == "accelerant-monitor"]


@pytest.mark.parametrize("interval", [0, -1, 61, math.nan, math.inf])
def test_a_senseless_interval_is_refused(cpu, interval):
    with (
        pytest.raises(ConfigError, match=f"interval_s must be above 0 to 60 seconds, got {interval}"),
        measure(cpu, interval),
    ):
        pass


# --- on a GPU --------------------------------------------------------------------------------------------------------
@pytest.fixture
def gpu():
    pytest.importorskip("pynvml")
    return registry.find_device("cuda")


def matmuls(seconds):
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(50):
            x @ x
        torch.cuda.synchronize()


@pytest.mark.gpu
def test_nvml_sees_the_device_at_work(gpu):
    matmuls(1.5)
    now = sample(gpu)
    assert now.utilisation_percent > 50
    assert now.memory_used_bytes > 128 * 2**20
    assert now.memory_total_bytes == pytest.approx(gpu.memory_bytes, rel=0.05)
    assert now.power_w > 20
    assert 10 < now.temperature_c < 110
    assert now.clock_mhz > 100
    assert now.memory_clock_mhz > 100


@pytest.mark.gpu
def test_the_gpu_spends_more_at_work_than_asleep(gpu):
    torch.cuda.synchronize()
    with measure(gpu) as idle:
        time.sleep(1.5)
    with measure(gpu) as busy:
        matmuls(1.5)
    assert busy.energy_source == "counter"
    assert busy.power_mean_w > 1.5 * idle.power_mean_w
    assert busy.temperature_peak_c >= busy.temperature_start_c
    assert busy.energy_j == pytest.approx(busy.power_mean_w * busy.seconds, rel=0.3)


@pytest.mark.gpu
def test_joules_of_an_op_on_the_gpu(gpu):
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16)
    with measure(gpu) as found:
        until = time.perf_counter() + 1.5
        while time.perf_counter() < until:
            for _ in range(200):
                acl.ops.gelu(x)
            torch.cuda.synchronize()
    op = next(op for op in found.ops if op.op == "gelu_fwd")
    assert op.energy_per_call_j > 0
    assert op.energy_j <= found.energy_j * (1 + 1e-9)
    assert found.busy > 0.5
