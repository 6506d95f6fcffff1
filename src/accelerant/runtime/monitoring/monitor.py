"""State of devices (load, memory, power, temperature, ...), energy used by a block of code, and events of devices.

Every figure may be None; `.reasons` then says why. No driver is started that choosing the device did not start.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from accelerant.errors import BackendUnavailable, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.files import JsonRecord, plain
from accelerant.runtime.host import fork_safe, read_meminfo
from accelerant.runtime.html_page import text_table
from accelerant.runtime.ledger import OpRecord, ledger, metric_family
from accelerant.runtime.monitoring import readers
from accelerant.runtime.monitoring.readers import FIGURES, ProcessMemory, TableReader
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.registry import DeviceLike


@dataclass(frozen=True, slots=True)
class Sample(JsonRecord):
    """A device at one moment, in seconds since 1970. An absent figure is None, and `reasons` says why.

    Attributes:
        utilisation_percent: share of the recent past (NVML: up to a second; CPU: since the previous sample, at least
            0.1 s) in which anything ran on the device.
        core_percents: the same for each core; CPU only.
        memory_used_bytes: by all processes (on Apple silicon, by this one).
        clock_mhz: of multiprocessors or cores.
        slow_down: why the clocks are lowered now: "thermal", "power", "hardware", "power brake"; on a CPU "thermal" if
            it slowed down since the previous sample.
        ecc_corrected, ecc_uncorrected: errors of the device's memory since the driver, or the system, was started.
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
    slow_down: tuple[str, ...] | None = None
    ecc_corrected: int | None = None
    ecc_uncorrected: int | None = None
    processes: tuple[ProcessMemory, ...] | None = None
    reasons: dict[str, str] = field(default_factory=dict, compare=False)


_readers: dict[tuple[str, int], TableReader] = {}
_readers_lock = fork_safe(threading.Lock())


def _new_reader(device: ComputeDevice) -> TableReader:
    """Return the reader for a device's backend; other backends report only the total of memory."""
    if not device.available:
        raise BackendUnavailable(device.backend, device.reason)
    match device.backend:
        case "cuda":
            return readers.cuda_reader(device)
        case "rocm":
            return readers.amdsmi_reader(device)
        case "apple":
            return readers.apple_reader()
        case "cpu":
            return readers.CpuReader(device.memory_bytes)
        case _:
            figures = {"memory_total_bytes": lambda: device.memory_bytes} if device.memory_bytes else {}
            return readers.TableReader(figures, f"{device.backend} has no query for it")


def sample(device: DeviceLike = None, *, processes: bool = True) -> Sample:
    """Return the present figures of a device.

    The list of its processes, which may be left out, takes most of the time on a CPU. Raises BackendUnavailable for the
    entry of an absent backend.
    """
    device = registry.find_device(device)
    key = (device.backend, device.index)
    with _readers_lock:
        if (reader := _readers.get(key)) is None:
            reader = _readers[key] = _new_reader(device)
    figures, reasons = reader.read(FIGURES if processes else FIGURES[:-1])
    return Sample(device.label, device.name, time.time(), **figures, reasons=reasons)


def free_memory(device: DeviceLike = None) -> tuple[int, int]:
    """Return the total and free bytes of a device.

    On CUDA the driver's tools are used if present: CUDA itself would create a context, about 0.5 GB, on each device.
    """
    device = registry.find_device(device)
    if device.backend == "cuda":
        figures, _ = readers.cuda_reader(device).read(("memory_total_bytes", "memory_used_bytes"))
        if len(figures) == 2:
            return figures["memory_total_bytes"], figures["memory_total_bytes"] - figures["memory_used_bytes"]
    info = registry.create(device.backend).memory(device.index)
    return info.total_bytes, info.free_bytes


def peer_access(backend: str = "cuda") -> tuple[tuple[bool, ...], ...]:
    """Return, for each pair [i][j] of a backend's devices, whether i reads j's memory directly; True for i = j."""
    import torch

    indices = range(len(registry.create(backend).devices()))
    return tuple(
        tuple(i == j or (backend == "cuda" and torch.cuda.can_device_access_peer(i, j)) for j in indices)
        for i in indices
    )


_GAUGES = {
    "utilisation_percent": ("utilisation_ratio", "gauge", 0.01, "Share of the recent past in which anything ran."),
    "memory_used_bytes": ("memory_used_bytes", "gauge", 1, "Memory used by all processes."),
    "memory_total_bytes": ("memory_total_bytes", "gauge", 1, "Size of the memory."),
    "power_w": ("power_watts", "gauge", 1, "Power draw."),
    "temperature_c": ("temperature_celsius", "gauge", 1, "Temperature."),
    "clock_mhz": ("clock_hertz", "gauge", 1e6, "Clock of the multiprocessors or cores."),
    "ecc_corrected": ("ecc_corrected_total", "counter", 1, "Corrected errors of the memory."),
    "ecc_uncorrected": ("ecc_uncorrected_total", "counter", 1, "Errors of the memory that could not be corrected."),
}
"""Figure of a sample -> name, type, factor and help of its metric."""


def to_prometheus(devices: Iterable[DeviceLike | Sample] | None = None) -> str:
    """Return the present figures of devices, and the events so far, in Prometheus' text format 0.0.4.

    Samples the devices, by default every available one; figures that a device does not report are left out.
    """
    chosen = [device for device in registry.devices() if device.available] if devices is None else devices
    samples = [item if isinstance(item, Sample) else sample(item, processes=False) for item in chosen]
    lines: list[str] = []

    def family(name: str, kind: str, text: str, rows: Iterable[tuple[Mapping[str, object], object]]) -> None:
        lines.extend(metric_family(f"accelerant_device_{name}", kind, text, rows))

    def identity(item: Sample) -> dict[str, object]:
        return {"device": item.device, "name": item.name}

    for figure, (name, kind, factor, text) in _GAUGES.items():
        values = [(identity(item), getattr(item, figure)) for item in samples]
        family(name, kind, text, [(labels, value * factor) for labels, value in values if value is not None])
    slowed = [({**identity(item), "reason": reason}, 1) for item in samples for reason in item.slow_down or ()]
    family("slow_down", "gauge", "1 for each reason for which the clocks are lowered now.", slowed)
    events = [({"device": device, "kind": kind}, count) for (device, kind), count in event_counts().items()]
    family("events_total", "counter", "Events seen by this process.", events)
    return "\n".join(lines) + "\n"


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


@dataclass(frozen=True, slots=True)
class KernelTime:
    """A kernel of a region: calls, and time on the device of all of them. On a CPU one of torch's operators."""

    name: str
    calls: int
    time_ms: float


@dataclass(slots=True)
class Measurement(JsonRecord):
    """The result of `measure`; complete when its block has ended, and printed as a table.

    Attributes:
        seconds: wall time of the region.
        peak_bytes: most memory that this process held at once: on a GPU in torch's allocator, on a CPU resident.
        peak_growth_bytes: the same beyond what it held at the region's start.
        energy_j: joules used by the whole device.
        energy_source: "counter" (the device's own), "power" (integrated over the readings) or "".
        power_mean_w, power_peak_w: energy over time, and the highest reading.
        shared_by: weights of the ops' shares, "time" or "calls"; "" without ops.
        busy: the ops' time over the wall time; None if no op has a time. Above 1 with several streams.
        ops: of Accelerant, by falling energy.
        kernels: every kernel that ran, torch's too, by falling time; if measure(kernels=True) asked for them.
        reasons: absent figure -> reason.
    """

    device: str
    seconds: float = 0.0
    peak_bytes: int | None = None
    peak_growth_bytes: int | None = None
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
    kernels: tuple[KernelTime, ...] = ()
    reasons: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        def figure(value: float | None, unit: str, name: str) -> str:
            return f"- ({self.reasons.get(name, 'unknown')})" if value is None else f"{value:.4g} {unit}"

        mib = [None if size is None else size / 2**20 for size in (self.peak_bytes, self.peak_growth_bytes)]
        lines = [
            f"device       {self.device}",
            f"time         {figure(self.seconds, 's', 'seconds')}",
            f"peak memory  {figure(mib[0], 'MiB', 'peak_bytes')}",
            f"  growth     {figure(mib[1], 'MiB', 'peak_bytes')}",
            f"energy       {figure(self.energy_j, 'J', 'energy_j')}",
            f"power        {figure(self.power_mean_w, 'W', 'power_mean_w')}",
            f"temperature  {figure(self.temperature_peak_c, '°C', 'temperature_c')}",
        ]
        if self.ops:
            rows = [
                (op.op, op.implementation, op.case, f"{op.calls:,}", plain(op.time_ms), plain(op.energy_j))
                for op in self.ops
            ]
            lines += ["", *text_table([("op", "implementation", "case", *_OP_NUMBERS), *rows], numbers=_OP_NUMBERS)]
        if self.kernels:
            rows_ = [(kernel.name[:72], f"{kernel.calls:,}", plain(kernel.time_ms)) for kernel in self.kernels]
            lines += ["", *text_table([("kernel", "calls", "ms"), *rows_], numbers=("calls", "ms"))]
        return "\n".join(lines)

    __repr__ = __str__


_OP_NUMBERS = ("calls", "ms", "J")


_MEASURED = ("energy_j", "power_w", "temperature_c")
_Readings = list[tuple[float, dict[str, float]]]
"""Times of time.perf_counter(), and the figures then."""


@contextmanager
def measure(device: DeviceLike = None, interval_s: float = 0.05, *, kernels: bool = False) -> Iterator[Measurement]:
    """Record time, memory, energy, temperature and ops of a block of code; optionally each kernel.

    >>> with acl.measure() as measured:
    ...     step()
    >>> print(measured)

    The device is synchronized at both ends. Energy is the difference of the device's own counter (NVML: since Volta;
    CPU: powercap, if readable), which includes other processes. NVML's counter is updated about ten times a second, so
    a region should last a second or more; if it did not change, or there is none, power is integrated over the readings
    by the trapezoidal rule.

    An op's share of the energy is energy * (its calls * its median time) / (the same summed over the region's ops); an
    op that was never timed has none. If no op was timed, calls replace times. The shares are estimates: they assume the
    same power in every op, although a matrix product draws more than a copy, and they spread idle time and work outside
    Accelerant over the ops, so that a share is too high by about 1 / busy. To compare two kernels, measure each in its
    own region.

    Args:
        device: to measure; by default the automatic choice.
        interval_s: seconds between readings of power and temperature, above 0 to 60.
        kernels: also trace each kernel by torch.profiler. Its first start takes seconds, and it keeps about 1 KB a
            launch until the block ends.

    Raises:
        ConfigError: the interval is not in that range, or there is no such device.
        BackendUnavailable: the device is the entry of an absent backend.
        DeviceLost: a kernel of the region broke the device.
    """
    if not (math.isfinite(interval_s) and 0.0 < interval_s <= 60.0):
        raise ConfigError(f"interval_s must be above 0 to 60 seconds, got {interval_s}")
    target = registry.find_device(device)
    reader, provider = _new_reader(target), registry.create(target.backend)
    readings: _Readings = []
    reasons: dict[str, str] = {}

    def read() -> None:
        figures, absent = reader.read(_MEASURED)
        readings.append((time.perf_counter(), figures))
        reasons.update(absent)

    measurement = Measurement(target.label)
    provider.synchronize(target.index)
    before = {id(record): record.calls for record in ledger().records()}
    with _kernels_of(measurement, target, kernels), _peak_of(measurement, target):
        read()
        try:
            with every(interval_s, read, "accelerant-monitor"):
                began = time.perf_counter()
                try:
                    yield measurement
                    provider.synchronize(target.index)
                finally:
                    measurement.seconds = time.perf_counter() - began
        finally:
            read()
            _add_readings(measurement, readings, reasons)
            _share(measurement, target, before)


@contextmanager
def _peak_of(measurement: Measurement, device: ComputeDevice) -> Iterator[None]:
    """Add the peak of a device's memory in a block, or the reason why it is unknown."""
    if device.backend == "cpu":
        before = _resident_bytes(restart=True)
        yield
        after = _resident_bytes()
        if before is None or after is None:
            measurement.reasons["peak_bytes"] = "the system keeps no peak of a process's memory that can be restarted"
        else:
            measurement.peak_bytes, measurement.peak_growth_bytes = after[1], max(0, after[1] - before[0])
    elif device.torch_type == "cuda":
        from accelerant.runtime.memory.limits import peak_recorded

        with peak_recorded(device) as record:
            yield
        measurement.peak_bytes, measurement.peak_growth_bytes = record.peak_bytes, record.growth_bytes
    else:
        measurement.reasons["peak_bytes"] = f"{device.backend} keeps no peak of a block"
        yield


def _resident_bytes(*, restart: bool = False) -> tuple[int, int] | None:
    """Return this process's resident memory, and its peak since the last restart; None where Linux does not say."""
    try:
        if restart:
            with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
                file.write("5")
        figures = read_meminfo(Path("/proc/self/status"))
        return figures["VmRSS"], figures["VmHWM"]
    except (OSError, KeyError):
        return None


@contextmanager
def _kernels_of(measurement: Measurement, device: ComputeDevice, wanted: bool) -> Iterator[None]:
    """Add the kernels of a block, by torch.profiler, or the reason why they are unknown."""
    import torch

    traced = device.torch_type in ("cpu", "cuda")
    if not wanted or not traced or torch._C._autograd._profiler_enabled():
        if wanted:
            unknown = "another profiler is running" if traced else f"torch.profiler does not trace {device.backend}"
            measurement.reasons["kernels"] = unknown
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    on_cpu = device.torch_type == "cpu"
    with profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA], acc_events=True) as profiled:
        yield
    found = []
    for event in profiled.key_averages():
        time_us = event.self_cpu_time_total if on_cpu else event.self_device_time_total
        if on_cpu or (time_us and "CUDA" in str(event.device_type)):
            found.append(KernelTime(str(event.key), int(event.count), time_us / 1e3))
    measurement.kernels = tuple(sorted(found, key=lambda kernel: -kernel.time_ms))


def _add_readings(measurement: Measurement, readings: _Readings, reasons: Mapping[str, str]) -> None:
    counts, powers, celsius = ([(s, found[name]) for s, found in readings if name in found] for name in _MEASURED)
    measurement.readings = len(readings)
    if len(counts) > 1 and counts[-1][1] > counts[0][1]:
        measurement.energy_j, measurement.energy_source = counts[-1][1] - counts[0][1], "counter"
    elif len(powers) > 1:
        joules = sum((t1 - t0) * (w0 + w1) / 2 for (t0, w0), (t1, w1) in itertools.pairwise(powers))  # trapezoidal rule
        measurement.energy_j, measurement.energy_source = joules, "power"
    else:
        reason = reasons.get("energy_j", "the counter did not move")
        measurement.reasons |= {"energy_j": reason, "power_mean_w": reason}
    if measurement.energy_j is not None:
        measurement.power_mean_w = measurement.energy_j / (readings[-1][0] - readings[0][0])
    if powers:
        measurement.power_peak_w = max(watts for _, watts in powers)
    else:
        measurement.reasons["power_peak_w"] = reasons.get("power_w", "")
    if celsius:
        measurement.temperature_start_c, measurement.temperature_end_c = celsius[0][1], celsius[-1][1]
        measurement.temperature_peak_c = max(degrees for _, degrees in celsius)
    else:
        measurement.reasons["temperature_c"] = reasons.get("temperature_c", "")


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


EventKind = Literal["slow_down", "ecc_corrected", "ecc_uncorrected", "lost"]


@dataclass(frozen=True, slots=True)
class DeviceEvent(JsonRecord):
    """Something that happened to a device.

    Attributes:
        device: "cuda:0", or the backend ("cuda") where an error names no device.
        kind: "slow_down" when a device begins to lower its clocks; "ecc_corrected" and "ecc_uncorrected" for new errors
            of its memory; "lost" when it can no longer be used, once for each device.
        detail: the reasons ("power", "thermal"), the number of new errors, or the error's text.
        time_s: seconds since 1970.
    """

    device: str
    kind: EventKind
    detail: str
    time_s: float

    def __str__(self) -> str:
        return f"{self.device} {self.kind}: {self.detail}"


_lock = fork_safe(threading.RLock())
_counts: Counter[tuple[str, str]] = Counter()
_listeners: list[Callable[[DeviceEvent], None]] = []


def publish(device: str, kind: EventKind, detail: str) -> None:
    """Count an event and call the listeners, in this thread; their errors are logged. A device is lost only once."""
    with _lock:
        if kind == "lost" and _counts[device, kind]:
            return
        _counts[device, kind] += 1
        listeners = list(_listeners)
    event = DeviceEvent(device, kind, detail, time.time())
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            logging.getLogger("accelerant").exception("a listener failed for the event %s", event)


def event_counts() -> dict[tuple[str, str], int]:
    """Return the events of this process so far, by device and kind."""
    with _lock:
        return {key: count for key, count in _counts.items() if count}


@contextmanager
def subscribe(listener: Callable[[DeviceEvent], None]) -> Iterator[None]:
    """Call a function with each event of a block of code, in the thread that finds it."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def events_between(before: Sample, now: Sample) -> list[tuple[EventKind, str]]:
    """Return the kinds and details of what happened to a device between two samples."""
    found: list[tuple[EventKind, str]] = []
    if began := sorted(set(now.slow_down or ()) - set(before.slow_down or ())):
        found.append(("slow_down", ", ".join(began)))
    for kind in ("ecc_corrected", "ecc_uncorrected"):
        new = (getattr(now, kind) or 0) - (getattr(before, kind) or 0)
        if new > 0 and getattr(before, kind) is not None:
            found.append((kind, f"{new} new"))
    lost = next((reason for reason in now.reasons.values() if _is_loss(reason)), "")
    if lost and not any(map(_is_loss, before.reasons.values())):
        found.append(("lost", lost))
    return found


def _is_loss(reason: str) -> bool:
    """Return whether a reason is NVML's for a device that fell off the bus, or needs a reset."""
    return "GPU is lost" in reason or "GPU requires re" in reason  # reset or restart, by version


@contextmanager
def watch_devices(
    listener: Callable[[DeviceEvent], None] | None = None, devices: DeviceLike | Iterable[DeviceLike] = None,
    interval_s: float = 1.0, samples: Callable[[Sample], None] | None = None,
) -> Iterator[None]:  # fmt: skip
    """Read devices at intervals during a block of code, and count their events; call a function with each.

    Args:
        listener: called in the watching thread, or in the one that loses a device. Without one, events are counted.
        devices: to read; by default the available ones.
        interval_s: seconds between two readings, above 0 to 3600. A slow-down that ends sooner may pass unseen.
        samples: called with each reading, which has no processes, in the watching thread and before the block.

    Raises:
        ConfigError: the interval is not in that range.
        BackendUnavailable: a device is the entry of an absent backend.
    """
    if not (math.isfinite(interval_s) and 0.0 < interval_s <= 3600.0):
        raise ConfigError(f"interval_s must be above 0 to 3600 seconds, got {interval_s}")
    available = [device for device in registry.devices() if device.available] if devices is None else devices
    watched = registry.find_devices(available)
    latest: dict[str, Sample] = {}

    def read() -> None:
        for device in watched:
            now = sample(device, processes=False)
            for kind, detail in events_between(latest.get(device.label, now), now):
                publish(device.label, kind, detail)
            latest[device.label] = now
            if samples is not None:
                samples(now)

    read()
    with subscribe(listener or (lambda event: None)):
        try:
            with every(interval_s, read, "accelerant-events"):
                yield
        finally:
            read()


@contextmanager
def every(interval_s: float, call: Callable[[], object], name: str) -> Iterator[None]:
    """Call a function at intervals during a block of code, in a thread of a name."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(interval_s):
            call()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
