"""Proof that a device computes, not only that its driver answers.

The field_add kernel is compiled and launched through the device's provider, its result compared with integer
arithmetic, and its time taken between the device's own events; on an NVIDIA device utilisation and memory are read
from NVML meanwhile, by somebody else than torch.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import field_add_source
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.monitoring.monitor import Sample, sample
from accelerant.runtime.monitoring.readers import nvml_missing
from accelerant.runtime.provider import Buffer, ComputeDevice, ComputeProvider

__all__ = ["Check", "Status", "prove"]

Status = Literal["ok", "warning", "failed"]

_P = field_of("goldilocks").modulus
_CHECKED = 1 << 16
_BUSY_S = 2.5
_MANY, _FEW = 1 << 25, 1 << 20
_NEEDED_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report.

    Attributes:
        name: what was looked at.
        status: "ok", "warning" (works, but not as well as it could) or "failed".
        found: what is there.
        advice: what to do; empty where there is nothing to do.
    """

    name: str
    status: Status
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """The fields by name, for JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Launch:
    """field_add on a device, ready to be launched again and again."""

    provider: ComputeProvider
    device: ComputeDevice
    kernel: Kernel
    buffers: tuple[Buffer, Buffer, Buffer]
    n: int

    def start(self) -> None:
        self.provider.launch(self.kernel, (-(-self.n // 256),), (256,), (*self.buffers, self.n))


def prove(device: ComputeDevice) -> Iterator[Check]:
    """Compile, launch, compare, time; on NVIDIA look at it from outside meanwhile."""
    label = f"compute {device.backend}:{device.index}"
    provider = registry.create(device.backend)
    before = sample(device) if device.backend == "cuda" else None
    launch, x, y = _prepare(provider, device)
    launch.start()
    provider.synchronize(device.index)
    wrong = _first_wrong(launch, x, y)
    if wrong:
        yield Check(label, "failed", wrong, "do not trust this device: check memory and driver, then run this again")
        return
    times = _event_times_ms(launch)
    best = min(times, default=0.0)
    if best <= 0.0:
        yield Check(label, "failed", f"the result is right, but the device's events say {best} ms", "update the driver")
        return
    rate = 24 * launch.n / best / 1e6
    yield Check(
        label, "ok", f"field_add of {launch.n:,} elements: {best:.3f} ms by events ({rate:,.0f} GB/s), result exact"
    )
    if before is not None:
        yield _observed(launch, before, best)


def _prepare(provider: ComputeProvider, device: ComputeDevice) -> tuple[_Launch, Any, Any]:
    """Operands, edge values first; the output holds a value that no sum has."""
    roomy = device.backend == "cuda" and provider.memory(device.index).free_bytes > _NEEDED_BYTES
    n = _MANY if roomy else _FEW
    modulus = _P
    rng = np.random.default_rng(7)
    x = rng.integers(0, modulus, n, dtype=np.uint64)
    y = rng.integers(0, modulus, n, dtype=np.uint64)
    edges = [0, 1, 2**32 - 1, 2**63, modulus - 2, modulus - 1]
    pairs = [(a, b) for a in edges for b in edges]
    x[: len(pairs)], y[: len(pairs)] = [a for a, _ in pairs], [b for _, b in pairs]
    kernel = provider.compile(field_add_source(), device=device.index)
    z = provider.copy_to_device(np.full(n, 2**64 - 1, np.uint64), device.index)
    buffers = (provider.copy_to_device(x, device.index), provider.copy_to_device(y, device.index), z)
    return _Launch(provider, device, kernel, buffers, n), x, y


def _first_wrong(launch: _Launch, x: Any, y: Any) -> str:
    """Compare every element with 64-bit arithmetic on the host, and a part with Python's integers; "" if all agree."""
    modulus = np.uint64(_P)
    got = launch.provider.copy_to_host(launch.buffers[2], np.uint64, (launch.n,))
    room = modulus - y  # x + y reaches the modulus where x >= room
    expected = np.where(x >= room, x - room, x + y)
    part = slice(0, _CHECKED)
    exact = np.array([(a + b) % _P for a, b in zip(x[part].tolist(), y[part].tolist(), strict=True)], np.uint64)
    if not np.array_equal(expected[part], exact):
        return "the host's own integer arithmetic is wrong"
    differs = np.flatnonzero(got != expected)
    if not differs.size:
        return ""
    at = int(differs[0])
    return f"{differs.size:,} of {launch.n:,} sums are wrong, the first: {x[at]} + {y[at]} gave {got[at]}"


def _event_times_ms(launch: _Launch, repeats: int = 10) -> list[float]:
    provider, index = launch.provider, launch.device.index
    marks = []
    for _ in range(repeats):
        start = provider.record_event(index)
        launch.start()
        marks.append((start, provider.record_event(index)))
    provider.synchronize(index)
    return [start.elapsed_ms(stop) for start, stop in marks if start is not None and stop is not None]


def _observed(launch: _Launch, before: Sample, one_ms: float) -> Check:
    """Keep the device busy and read NVML until it has noticed."""
    label = f"seen by NVML {before.device}"
    if nvml_missing():
        return Check(
            label, "warning", nvml_missing(), "pip install 'accelerant[monitor]' to see the device from outside"
        )
    held = sum(buffer.size_bytes for buffer in launch.buffers)
    seen, peak = before, 0.0
    until = time.perf_counter() + _BUSY_S
    while time.perf_counter() < until:
        for _ in range(max(1, int(200 / one_ms))):  # 0.2 s of work, so that reading takes little of the time
            launch.start()
        launch.provider.synchronize(launch.device.index)
        seen = sample(launch.device)
        peak = max(peak, seen.utilisation_percent or 0.0)
        if peak >= 50.0:
            break
    memory = _memory_seen(before, seen, held)
    if seen.utilisation_percent is None:
        return Check(label, "warning", f"{memory}; utilisation: {seen.reasons['utilisation_percent']}")
    found = f"{peak:.0f} % busy, {memory}"
    if seen.power_w is not None and seen.temperature_c is not None:
        found += f", {seen.power_w:.0f} W, {seen.temperature_c:.0f} C"
    if peak == 0.0:
        advice = "NVML looks at another device than torch, or counts nothing (MIG, virtual GPU)"
        return Check(label, "failed", f"0 % busy during {_BUSY_S} s of launches; {memory}", advice)
    if memory.startswith("no"):
        return Check(label, "failed", found, "NVML looks at another device than torch")
    return Check(label, "ok", found)


def _memory_seen(before: Sample, seen: Sample, held: int) -> str:
    """This process's memory as NVML lists it, or the device's rise where the process has another number there."""
    mine = [each for each in seen.processes or () if each.pid == os.getpid() and each.memory_bytes]
    if mine:
        return f"{(mine[0].memory_bytes or 0) / 2**20:,.0f} MiB held by this process"
    rise = (seen.memory_used_bytes or 0) - (before.memory_used_bytes or 0)
    if rise >= held:
        return f"{rise / 2**20:,.0f} MiB more in use (NVML does not list this process: it runs in a container)"
    return f"no rise of the device's memory in use ({rise / 2**20:,.0f} MiB, {held / 2**20:,.0f} are held)"
