"""The device's own limits, measured in the run that quotes them, and the same cases on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from accelerant.bench.timer import Timing, second_call_s, time_ms


def measure_matmul(device: torch.device, *, budget_s: float = 0.3) -> dict[str, float]:
    """Return "copy GB/s" as measure_copy, and "matmul TFLOP/s" of an n x n x n product of random data.

    bfloat16 and n = 8192 on a GPU, float32 and n = 1024 on a CPU.
    """
    ceilings = measure_copy(device, budget_s=budget_s)
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    product = time_ms(lambda: a @ b, device, budget_s=budget_s)
    return ceilings | {"matmul TFLOP/s": 2 * n**3 / product.p50_ms / 1e9}


def measure_copy(device: torch.device, *, budget_s: float = 0.3) -> dict[str, float]:
    """Return "copy GB/s" of a large copy on the device; bytes read and bytes written both count."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source), device, budget_s=budget_s)
    return {"copy GB/s": 2 * size / copy.p50_ms / 1e6}


def measure_link(device: torch.device, *, size: int | None = None, budget_s: float = 0.3) -> dict[str, float]:
    """Return "host to device GB/s" and "device to host GB/s" of large copies, each byte counted once.

    Host memory is pinned for a GPU. `size` is in bytes, by default 512 MiB for a GPU and 64 MiB for a CPU.
    """
    gpu = device.type == "cuda"
    size = size or (2**29 if gpu else 2**26)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=gpu)
    there = torch.ones(size, dtype=torch.uint8, device=device)
    into = time_ms(lambda: there.copy_(host, non_blocking=True), device, budget_s=budget_s)
    back = time_ms(lambda: host.copy_(there, non_blocking=True), device, budget_s=budget_s)
    return {"host to device GB/s": size / into.p50_ms / 1e6, "device to host GB/s": size / back.p50_ms / 1e6}


_ENOUGH_S, _TOO_LONG_S = 0.2, 2.0
_SHARES = (1, 32, 256, 1024)
_CALLS = 12
"""Calls behind a figure at least: warm-up and ten timed ones."""


def threads_text() -> str:
    """Return the number of torch's threads, as "2 threads"."""
    threads = torch.get_num_threads()
    return f"{threads} thread{'s' * (threads != 1)}"


def cpu_time_ms(
    make: Callable[[int], Callable[[], object]], rows: int, *, budget_s: float = 0.3
) -> tuple[float | None, str]:
    """Return the median of cpu_timing, and its note with the number of torch's threads."""
    timing, note = cpu_timing(make, rows, budget_s=budget_s)
    if timing is None:
        return None, note
    return timing.p50_ms, ", ".join(filter(None, (note, threads_text())))


def cpu_timing(
    make: Callable[[int], Callable[[], object]], rows: int, *, budget_s: float = 0.3, most_s: float = _TOO_LONG_S
) -> tuple[Timing | None, str]:
    """Time a case on this machine's CPU, with fewer rows where all of them would take too long.

    The smallest share of the rows is tried first; the largest share whose call should stay below 0.2 s is measured.
    `make` returns the call for a number of rows; its work grows linearly with them.

    Returns:
        The times for all rows, scaled from those measured, and a note that says so, "" where all rows were measured;
        None and the reason where even the smallest share would take more than `most_s`.
    """
    least = math.ceil(rows / _SHARES[-1])
    once_s = second_call_s(make(least))
    if once_s * _CALLS > most_s:
        part = "all" if least == rows else f"1/{_SHARES[-1]} of the"
        return None, f"skipped: {once_s * _CALLS:.1f} s for {part} rows"
    for share in _SHARES:
        some = math.ceil(rows / share)
        if some == least or once_s * some / least < _ENOUGH_S:
            break
    timing = time_ms(make(some), torch.device("cpu"), budget_s=budget_s)
    if some == rows:
        return timing, ""
    scaled = Timing.of([sample * rows / some for sample in timing.samples])
    return scaled, f"scaled from 1/{rows / some:.0f} of the rows"
