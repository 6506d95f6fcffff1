"""Copies between host and device and on the device, by size, from pinned and from pageable memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.bench.ceilings import measure_copy, measure_link
from accelerant.bench.record import DEVICE, Environment, Record, Row
from accelerant.bench.timer import Timing, time_ms, wall_ms
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime import registry
from accelerant.runtime.memory.limits import available_bytes
from accelerant.runtime.provider import ComputeDevice
from accelerant.runtime.streams.transfer import copy_async

__all__ = ["default_sizes", "measure", "parse_sizes", "run", "size_name"]

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_PERIOD = 251
"""Of the bytes that are sent; a prime, so that a piece in a wrong place shows."""

_COPIES = 6
"""Buffers of one size that are there at once, at most."""

_INTO, _BACK, _COPY = "host to device", "device to host", "device copy"


def default_sizes(device: ComputeDevice) -> tuple[int, ...]:
    """Powers from 1 MiB to 1 GiB on a GPU, from 256 KiB to 64 MiB on a CPU."""
    gpu = torch.device(device.torch_device).type == "cuda"
    return tuple(2**power for power in ((20, 22, 24, 26, 28, 30) if gpu else (18, 22, 26)))


def parse_sizes(text: str) -> tuple[int, ...]:
    """Bytes of "1MiB,64MiB,1GiB", in rising order.

    Raises:
        ConfigError: not a size, or not at least 1 byte; names it.
    """
    sizes = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)\s*([a-zA-Z]*)\s*", part)
        if found is None or found[2].upper() not in _UNITS or not int(found[1]):
            raise ConfigError(f"--sizes: wanted sizes like 64KiB,1MiB,1GiB; got {part.strip()!r}")
        sizes.add(int(found[1]) * _UNITS[found[2].upper()])
    return tuple(sorted(sizes))


def size_name(size: int) -> str:
    """1048576 as "1 MiB"; what is no whole number of a unit in the next smaller one."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def run(
    device: ComputeDevice,
    *,
    sizes: Sequence[int] = (),
    budget_s: float = 0.3,
    progress: Callable[[str], None] = lambda _: None,
) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, sizes=sizes, budget_s=budget_s, progress=progress)
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    sizes: Sequence[int] = (),
    budget_s: float = 0.3,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    "device" rows are the device's own rates, by torch's copy; "accelerant" rows are our way of the same copy. A copy
    that pinned memory takes part in is timed by the device's events, others by the host's clock, from call to end.

    Args:
        record: gets ceilings and rows.
        device: where.
        sizes: bytes of the copies; default_sizes by default.
        budget_s: seconds for each figure.
        progress: told what is measured next.

    Raises:
        ConfigError: a size that does not fit the memory of host or device.
    """
    where = torch.device(device.torch_device)
    sizes = tuple(sizes) or tuple(size for size in default_sizes(device) if _COPIES * size <= _room(device))
    if _COPIES * max(sizes, default=0) > _room(device):
        raise ConfigError(
            f"--sizes: {size_name(max(sizes))} needs {_COPIES} buffers of it; {_room(device):,} bytes are free"
        )
    progress("bandwidth: ceilings")
    if "copy GB/s" not in record.ceilings:
        record.ceilings |= measure_copy(where, budget_s=budget_s)
    record.ceilings |= measure_link(where, size=max(sizes), budget_s=budget_s)
    for size in sizes:
        progress(f"bandwidth: {size_name(size)}")
        bench = _Copies(device, where, size, budget_s)
        for rows in (bench.into, bench.back, bench.on_device):
            record.rows += rows()
    if where.type != "cuda":
        record.notes.append("bandwidth: no pinned memory without a GPU; host and device are one memory here")


def _room(device: ComputeDevice) -> int:
    return min(available_bytes(device), available_bytes("cpu"))


class _Copies:
    """The copies of one size."""

    def __init__(self, device: ComputeDevice, where: torch.device, size: int, budget_s: float) -> None:
        self.device, self.where, self.size, self.budget_s = device, where, size, budget_s
        self.gpu = where.type == "cuda"
        self.pageable = torch.arange(_PERIOD, dtype=torch.uint8).repeat(size // _PERIOD + 1)[:size]
        self.there = self.pageable.to(where)
        self.other = torch.zeros_like(self.there)

    def into(self) -> list[Row]:
        """Host to device, rows of all kinds of host memory."""
        base = Row("bandwidth", _INTO, "", DEVICE, "torch copy_", bytes=self.size, ceiling=_INTO)
        rows = []
        for kind, host in self._hosts():
            pinned = kind == "pinned"
            base = replace(base, case=f"{size_name(self.size)} {kind}")
            self.other.zero_()
            rows.append(self._row(base, pinned, self._sending(host)))
            self._check(self.other, base)
            ours = replace(base, runner="accelerant", implementation="copy_async")
            rows.append(self._row(ours, pinned, self._ours(host)))
            self._check(copy_async(host, self.device).result(), ours)
        return rows

    def back(self) -> list[Row]:
        """Device to host."""
        base = Row("bandwidth", _BACK, "", DEVICE, "torch copy_", bytes=self.size, ceiling=_BACK)
        rows = []
        for kind, host in self._hosts():
            base = replace(base, case=f"{size_name(self.size)} {kind}")
            target = torch.empty_like(host, pin_memory=kind == "pinned")
            rows.append(self._row(base, kind == "pinned", self._copying(target)))
            self._check(target, base)
        provider = registry.create(self.device.backend)
        buffer = provider.copy_to_device(self.pageable.numpy(), self.device.index)
        ours = replace(
            base, case=f"{size_name(self.size)} pageable", runner="accelerant", implementation="provider.copy_to_host"
        )
        rows.append(self._row(ours, False, lambda: provider.copy_to_host(buffer, np.uint8, (self.size,))))
        self._check(torch.from_numpy(provider.copy_to_host(buffer, np.uint8, (self.size,))), ours)
        return rows

    def on_device(self) -> list[Row]:
        """One buffer of the device to another; reading and writing counted."""
        base = Row(
            "bandwidth", _COPY, size_name(self.size), DEVICE, "torch copy_", bytes=2 * self.size, ceiling="copy"
        )  # fmt: skip
        return [self._row(base, True, lambda: self.other.copy_(self.there))]

    def _hosts(self) -> list[tuple[str, Tensor]]:
        kinds = [("pageable", self.pageable)]
        return [("pinned", self.pageable.pin_memory()), *kinds] if self.gpu else kinds

    def _sending(self, host: Tensor) -> Callable[[], Any]:
        return lambda: self.other.copy_(host, non_blocking=True)

    def _ours(self, host: Tensor) -> Callable[[], Any]:
        return lambda: copy_async(host, self.device)

    def _copying(self, target: Tensor) -> Callable[[], Any]:
        return lambda: target.copy_(self.there, non_blocking=target.is_pinned())

    def _row(self, base: Row, by_events: bool, call: Callable[[], Any]) -> Row:
        timing: Timing = (time_ms if by_events else wall_ms)(call, self.where, budget_s=self.budget_s)
        return replace(base, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms)

    def _check(self, got: Tensor, row: Row) -> None:
        if not torch.equal(got.to("cpu"), self.pageable):
            raise AccelerantError(f"{row.op} {row.case} by {row.implementation}: other bytes came than were sent")
