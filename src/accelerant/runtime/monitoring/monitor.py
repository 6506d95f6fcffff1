"""State of devices (load, memory, power, temperature, clocks, processes, peers), and energy used by a block of code.

>>> sample(choose()).power_w                                 # now
>>> with measure(choose()) as measured:                      # over a region
...     train()
>>> measured.energy_j, measured.temperature_peak_c, measured.ops[0].energy_per_call_j

Every figure may be None; `.reasons` then says why. No driver is started that choosing the device did not start.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.files import JsonRecord
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import OpRecord, ledger
from accelerant.runtime.monitoring.readers import (
    FIGURES,
    CpuReader,
    ProcessMemory,
    Reader,
    TableReader,
    amdsmi_reader,
    apple_reader,
    cuda_reader,
)
from accelerant.runtime.provider import ComputeDevice

__all__ = ["Measurement", "OpEnergy", "ProcessMemory", "Sample", "free_memory", "measure", "peer_access", "sample"]


@dataclass(frozen=True, slots=True)
class Sample(JsonRecord):
    """A device at one moment, in seconds since 1970. An absent figure is None, and `reasons` says why.

    Attributes:
        utilisation_percent: share of the recent past (NVML: up to a second; CPU: since the previous sample, at least
            0.1 s) in which anything ran on the device.
        core_percents: the same for each core; CPU only.
        memory_used_bytes: by all processes (on Apple silicon, by this one).
        clock_mhz: of multiprocessors or cores.
        processes: on the device, the largest first; on a CPU the ten largest.
    """

    device: str
    name: str
    time_s: float
    utilisation_percent: float | None = None
    core_percents: tuple[float, ...] | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    processes: tuple[ProcessMemory, ...] | None = None
    reasons: dict[str, str] = field(default_factory=dict, compare=False)


_readers: dict[tuple[str, int], Reader] = {}
_readers_lock = fork_safe(threading.Lock())


def _new_reader(device: ComputeDevice) -> Reader:
    """Return the reader for a device's backend; other backends report only the total of memory."""
    if not device.available:
        raise BackendUnavailable(device.backend, device.reason)
    match device.backend:
        case "cuda":
            return cuda_reader(device)
        case "rocm":
            return amdsmi_reader(device)
        case "apple":
            return apple_reader()
        case "cpu":
            return CpuReader(device.memory_bytes)
        case _:
            figures = {"memory_total_bytes": lambda: device.memory_bytes} if device.memory_bytes else {}
            return TableReader(figures, f"{device.backend} has no query for it")


def sample(device: ComputeDevice) -> Sample:
    """Return the present figures of a device from registry.devices() or registry.choose().

    Raises BackendUnavailable for the entry of an absent backend.
    """
    key = (device.backend, device.index)
    with _readers_lock:
        reader = _readers.get(key)
        if reader is None:
            reader = _readers[key] = _new_reader(device)
    figures, reasons = reader.read(FIGURES)
    return Sample(device.label, device.name, time.time(), **figures, reasons=reasons)


def free_memory(device: ComputeDevice) -> tuple[int, int]:
    """Return the total and free bytes of a device.

    On CUDA the driver's tools are used if present: CUDA itself would create a context, about 0.5 GB, on each device.
    """
    if device.backend == "cuda":
        figures, _ = cuda_reader(device).read(("memory_total_bytes", "memory_used_bytes"))
        if len(figures) == 2:
            return figures["memory_total_bytes"], figures["memory_total_bytes"] - figures["memory_used_bytes"]
    info = registry.create(device.backend).memory(device.index)
    return info.total_bytes, info.free_bytes


def peer_access(backend: str = "cuda") -> tuple[tuple[bool, ...], ...]:
    """Return, for each pair [i][j] of a backend's devices, whether i reads j's memory directly; True for i = j."""
    indices = range(len(registry.create(backend).devices()))
    return tuple(
        tuple(i == j or (backend == "cuda" and torch.cuda.can_device_access_peer(i, j)) for j in indices)
        for i in indices
    )


# --- a region --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpEnergy:
    """An op's share of a region's energy; `measure` explains how it is estimated.

    Op, implementation and case are as in the ledger. `time_ms` is that of all calls in the region, from the ledger's
    median; None if no call was ever timed. The energy is None if the op has no share.
    """

    op: str
    implementation: str
    case: str
    calls: int
    time_ms: float | None
    energy_j: float | None
    energy_per_call_j: float | None


@dataclass(slots=True)
class Measurement(JsonRecord):
    """The result of `measure`; complete when its block has ended.

    Attributes:
        seconds: wall time of the region.
        energy_j: joules used by the whole device.
        energy_source: "counter" (the device's own), "power" (integrated over the readings) or "".
        power_mean_w, power_peak_w: energy over time, and the highest reading.
        shared_by: weights of the ops' shares, "time" or "calls"; "" without ops.
        busy: the ops' time over the wall time; None if no op has a time. Above 1 with several streams.
        ops: by falling energy.
        reasons: absent figure -> reason.
    """

    device: str
    seconds: float = 0.0
    energy_j: float | None = None
    energy_source: str = ""
    power_mean_w: float | None = None
    power_peak_w: float | None = None
    temperature_start_c: float | None = None
    temperature_end_c: float | None = None
    temperature_peak_c: float | None = None
    readings: int = 0
    shared_by: str = ""
    busy: float | None = None
    ops: tuple[OpEnergy, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)


_MEASURED = ("energy_j", "power_w", "temperature_c")


class _Sampler:
    """Reads a device at the start, at intervals in a thread, and at the end."""

    def __init__(self, reader: Reader, interval_s: float) -> None:
        self._reader = reader
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="accelerant-monitor", daemon=True)
        self.readings: list[tuple[float, dict[str, float]]] = []  # time.perf_counter(), figures
        self.reasons: dict[str, str] = {}

    def start(self) -> None:
        self._read()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()
        self._read()

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            self._read()

    def _read(self) -> None:
        figures, reasons = self._reader.read(_MEASURED)
        self.readings.append((time.perf_counter(), figures))
        self.reasons.update(reasons)

    def series(self, name: str) -> list[tuple[float, float]]:
        return [(seconds, figures[name]) for seconds, figures in self.readings if name in figures]


@contextmanager
def measure(device: ComputeDevice, interval_s: float = 0.05) -> Iterator[Measurement]:
    """Record energy and temperature over a block of code, and divide the energy among the ops that the ledger counted.

    The device is synchronised at both ends. Energy is the difference of the device's own counter (NVML: since Volta;
    CPU: powercap, if readable), which includes other processes. NVML's counter is updated about ten times a second, so
    a region should last a second or more; if it did not change, or there is none, power is integrated over the readings
    by the trapezoidal rule.

    An op's share is energy * (its calls * its median time) / (the same summed over the region's ops); an op that was
    never timed has none. If no op was timed, calls replace times. The shares are estimates: they assume the same power
    in every op, although a matrix product draws more than a copy, and they spread idle time and work outside Accelerant
    over the ops, so that a share is too high by about 1 / busy. To compare two kernels, measure each in its own region.

    Raises:
        ConfigError: the interval between readings is not above 0 to 60 seconds.
        BackendUnavailable: the device is the entry of an absent backend.
        DeviceLost: a kernel of the region broke the device.
    """
    if not (math.isfinite(interval_s) and 0.0 < interval_s <= 60.0):
        raise ConfigError(f"interval_s must be above 0 to 60 seconds, got {interval_s}")
    sampler = _Sampler(_new_reader(device), interval_s)
    provider = registry.create(device.backend)
    measurement = Measurement(device.label)
    provider.synchronize(device.index)
    before = {id(record): record.calls for record in ledger().records()}
    sampler.start()
    began = time.perf_counter()
    try:
        yield measurement
        provider.synchronize(device.index)
    finally:
        measurement.seconds = time.perf_counter() - began
        sampler.stop()
        _add_readings(measurement, sampler)
        _share(measurement, device, before)


def _add_readings(measurement: Measurement, sampler: _Sampler) -> None:
    counts, powers = sampler.series("energy_j"), sampler.series("power_w")
    measurement.readings = len(sampler.readings)
    measurement.power_peak_w = max((watts for _, watts in powers), default=None)
    if len(counts) > 1 and counts[-1][1] > counts[0][1]:
        measurement.energy_j, measurement.energy_source = counts[-1][1] - counts[0][1], "counter"
    elif len(powers) > 1:
        joules = sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in itertools.pairwise(powers))  # trapezoidal rule
        measurement.energy_j, measurement.energy_source = joules, "power"
    else:
        measurement.reasons["energy_j"] = sampler.reasons.get("energy_j", "the counter did not move")
        measurement.reasons["power_mean_w"] = measurement.reasons["energy_j"]
    if measurement.power_peak_w is None:
        measurement.reasons["power_peak_w"] = sampler.reasons.get("power_w", "")
    if measurement.energy_j is not None:
        measurement.power_mean_w = measurement.energy_j / (sampler.readings[-1][0] - sampler.readings[0][0])
    series = [celsius for _, celsius in sampler.series("temperature_c")]
    if series:
        measurement.temperature_start_c, measurement.temperature_end_c = series[0], series[-1]
        measurement.temperature_peak_c = max(series)
    else:
        measurement.reasons["temperature_c"] = sampler.reasons.get("temperature_c", "")


def _share(measurement: Measurement, device: ComputeDevice, before: dict[int, int]) -> None:
    """Divide the energy among the device's ops; see measure."""
    counted: list[tuple[OpRecord, int, float | None]] = []
    for record in ledger().records():
        calls = record.calls - before.get(id(record), 0)
        calls = record.calls if calls < 0 else calls  # the ledger was reset inside the region
        _, _, index = record.device.partition(":")  # torch's name of the device, which may lack the index
        if calls and (record.backend, int(index or 0)) == (device.backend, device.index):
            median = record.to_dict()["ms_p50"]
            counted.append((record, calls, None if median is None else calls * median))
    times = [time_ms for _, _, time_ms in counted if time_ms is not None]
    weights = [time_ms for _, _, time_ms in counted] if times else [float(calls) for _, calls, _ in counted]
    total = sum(weight for weight in weights if weight is not None)
    if counted:
        measurement.shared_by = "time" if times else "calls"
    if times and measurement.seconds > 0:
        measurement.busy = sum(times) / 1e3 / measurement.seconds
    ops = []
    for (record, calls, time_ms), weight in zip(counted, weights, strict=True):
        energy = None
        if measurement.energy_j is not None and weight is not None and total > 0:
            energy = measurement.energy_j * weight / total
        per_call = None if energy is None else energy / calls
        ops.append(OpEnergy(record.op, record.implementation, record.case, calls, time_ms, energy, per_call))
    measurement.ops = tuple(sorted(ops, key=lambda op: -(op.energy_j or op.time_ms or 0.0)))
