"""The device's own limits, measured in the run that quotes them."""

from __future__ import annotations

import torch

from accelerant.bench.timer import time_ms

__all__ = ["measure_ceilings"]


def measure_ceilings(device: torch.device) -> dict[str, float]:
    """Copy bandwidth and matrix rate.

    Returns:
        "copy GB/s", reading and writing counted; "matmul TFLOP/s" of an n x n x n product on random data, bfloat16 and
        n = 8192 on a GPU, float32 and n = 1024 on a CPU.
    """
    gpu = device.type == "cuda"
    size = 2**30 if gpu else 2**26
    source = torch.empty(size, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    copy = time_ms(lambda: target.copy_(source), device)
    n, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    a = torch.randn(n, n, device=device).to(dtype)
    b = torch.randn(n, n, device=device).to(dtype)
    product = time_ms(lambda: a @ b, device)
    return {"copy GB/s": 2 * size / copy.p50_ms / 1e6, "matmul TFLOP/s": 2 * n**3 / product.p50_ms / 1e9}
