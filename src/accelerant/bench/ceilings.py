"""The device's own limits, measured in the run that quotes them."""

from __future__ import annotations

import torch

from accelerant.bench.timer import time_ms

__all__ = ["measure_ceilings", "measure_copy", "measure_link"]


def measure_ceilings(device: torch.device, *, budget_s: float = 0.3) -> dict[str, float]:
    """Copy bandwidth and matrix rate.

    Returns:
        "copy GB/s", reading and writing counted; "matmul TFLOP/s" of an n x n x n product on random data, bfloat16 and
        n = 8192 on a GPU, float32 and n = 1024 on a CPU.
    """
    ceilings = measure_copy(device, budget_s=budget_s)
    n, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (1024, torch.float32)
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    product = time_ms(lambda: a @ b, device, budget_s=budget_s)
    return ceilings | {"matmul TFLOP/s": 2 * n**3 / product.p50_ms / 1e9}


def measure_copy(device: torch.device, *, budget_s: float = 0.3) -> dict[str, float]:
    """Only "copy GB/s"."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source), device, budget_s=budget_s)
    return {"copy GB/s": 2 * size / copy.p50_ms / 1e6}


def measure_link(device: torch.device, *, size: int | None = None, budget_s: float = 0.3) -> dict[str, float]:
    """Rates of large copies between host and device, from and to pinned memory where there is such.

    Args:
        device: where.
        size: bytes; 512 MiB for a GPU and 64 MiB for a CPU by default.
        budget_s: seconds for each direction.

    Returns:
        "host to device GB/s" and "device to host GB/s", each byte counted once.
    """
    gpu = device.type == "cuda"
    size = size or (2**29 if gpu else 2**26)
    host = torch.ones(size, dtype=torch.uint8, pin_memory=gpu)
    there = torch.ones(size, dtype=torch.uint8, device=device)
    into = time_ms(lambda: there.copy_(host, non_blocking=True), device, budget_s=budget_s)
    back = time_ms(lambda: host.copy_(there, non_blocking=True), device, budget_s=budget_s)
    return {"host to device GB/s": size / into.p50_ms / 1e6, "device to host GB/s": size / back.p50_ms / 1e6}
