"""Copies between host and device and on the device, by size, from pinned and from pageable memory.

Rows of the runner "device" are torch's copies, rows of "accelerant" are ours of the same bytes. Copies that involve
pinned memory are timed by the device's events, others by the host's clock from call to end.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from accelerant.bench.ceilings import measure_link
from accelerant.bench.record import DEVICE, OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option, same_on_cpu
from accelerant.bench.timer import time_ms, wall_ms
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams.transfer import copy_async

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PERIOD = 251
"""Period of the bytes that are sent; a prime, so that misplaced bytes show."""

_BUFFERS = 6
"""Buffers of one size that exist at the same time, at most."""

_INTO, _BACK, _COPY = "host to device", "device to host", "device copy"


def default_sizes(gpu: bool) -> tuple[int, ...]:
    """Return 1 MiB to 1 GiB for a GPU, 256 KiB to 64 MiB for a CPU."""
    return tuple(2**power for power in ((20, 22, 24, 26, 28, 30) if gpu else (18, 22, 26)))


def parse_sizes(sizes: Sequence[str]) -> tuple[int, ...]:
    """Return the bytes of sizes like "1MiB", in rising order; ConfigError for anything but a size above 0."""
    parsed = set()
    for text in sizes:
        match = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", text)
        if match is None or match[2].upper() not in _UNITS or not int(match[1]):
            raise ConfigError(f"--size: wanted sizes like 64KiB, 1MiB or 1GiB; got {text!r}")
        parsed.add(int(match[1]) * _UNITS[match[2].upper()])
    return tuple(sorted(parsed))


def size_name(size: int) -> str:
    """Return 1048576 as "1 MiB", in the largest unit of which it is a whole number."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


@dataclass(frozen=True)
class BandwidthSuite(Suite):
    """Measure copies to the device, back, and on it: by size, from pinned and from pageable memory."""

    name = "bandwidth"
    examples = ("--size 1MiB --size 64MiB --size 1GiB",)

    size: tuple[str, ...] | None = option(None, "Bytes of a copy, like 64MiB; may be repeated.", metavar="SIZE")
    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with sizes that fit the memory of host and device; ConfigError if given ones do not."""
        room = min(available_bytes(device), available_bytes("cpu"))
        if self.size is None:
            gpu = device.torch_device.startswith("cuda")
            return replace(self, size=tuple(f"{size}B" for size in default_sizes(gpu) if _BUFFERS * size <= room))
        largest = max(parse_sizes(self.size), default=0)
        if _BUFFERS * largest > room:
            raise ConfigError(f"--size: {size_name(largest)} needs {_BUFFERS} buffers of it; {room:,} bytes are free")
        return self

    def prepare(self, run: SuiteRun) -> None:
        """Measure the ceilings of the device and of the link, the latter with the largest size."""
        run.require_ceiling("copy", self.budget_s)
        run.progress("ceiling: link")
        largest = max(parse_sizes(self.size or ()), default=None)
        run.record.ceilings |= measure_link(run.torch_device, size=largest, budget_s=self.budget_s)
        if not run.gpu:
            run.record.notes.append("bandwidth: no pinned memory without a GPU; host and device are one memory here")

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each size."""
        cases = {size: functools.partial(_measure, size, self.budget_s) for size in parse_sizes(self.size or ())}
        return [SuiteCase(size_name(size), case, on_cpu=same_on_cpu(case)) for size, case in cases.items()]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of one of the sizes."""
        names = {size_name(size) for size in parse_sizes(self.size or ())}
        return row.suite == self.name and " ".join(row.case.split()[:2]) in names


def _measure(size: int, budget_s: float, run: SuiteRun) -> None:
    """Add the rows of one size; AccelerantError for a copy that brings other bytes."""
    where, name, index = run.torch_device, size_name(size), run.device.index
    run.progress(f"bandwidth: {name}")
    pageable = torch.arange(_PERIOD, dtype=torch.uint8).repeat(size // _PERIOD + 1)[:size]
    there = pageable.to(where)
    other, provider = torch.zeros_like(there), registry.create(run.device.backend)

    def add(row: Row, by_events: bool, call: Callable[[], Any], result: Callable[[], Tensor] | None = None) -> None:
        """Add a row of a copy, whose bytes are those of `result`."""
        row = row.timed((time_ms if by_events else wall_ms)(call, where, budget_s=budget_s))
        if result is not None and not torch.equal(result().to("cpu"), pageable):
            raise AccelerantError(f"{row.op} {row.case} by {row.implementation}: other bytes came than were sent")
        run.add(row)

    base = Row("bandwidth", "", name, DEVICE, "torch copy_", bytes=size)
    hosts = [("pageable", pageable)]
    if run.gpu:
        hosts.insert(0, ("pinned", pageable.pin_memory()))
    for kind, host in hosts:
        row = replace(base, op=_INTO, ceiling=_INTO, case=f"{name} {kind}")
        other.zero_()
        add(row, kind == "pinned", functools.partial(other.copy_, host, non_blocking=True), lambda: other)
        send = functools.partial(copy_async, host, run.device)
        row = replace(row, runner=OURS, implementation="copy_async")
        add(row, kind == "pinned", send, functools.partial(_sent, send))
    for kind, host in hosts:
        row = replace(base, op=_BACK, ceiling=_BACK, case=f"{name} {kind}")
        target = torch.empty_like(host, pin_memory=kind == "pinned")
        receive = functools.partial(target.copy_, there, non_blocking=target.is_pinned())
        add(row, kind == "pinned", receive, target.clone)
    row = replace(row, case=f"{name} to a new array", implementation="torch to")
    new = functools.partial(there.to, "cpu", copy=True)
    add(row, False, new, new)
    buffer = provider.copy_to_device(pageable.numpy(), index)
    back = functools.partial(provider.copy_to_host, buffer, np.uint8, (size,))
    row = replace(row, runner=OURS, implementation="provider.copy_to_host")
    add(row, False, back, lambda: torch.from_numpy(back()))
    # bytes read and bytes written both count
    add(replace(base, op=_COPY, bytes=2 * size, ceiling="copy"), True, lambda: other.copy_(there))


def _sent(send: Callable[[], Any]) -> Any:
    return send().result()
