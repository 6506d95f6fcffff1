"""What the runtime itself costs and gains: launches, eager op calls, compiles, streaming in chunks, batches."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from accelerant import ops
from accelerant.algebra.field.program import field_add_source
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.suites import batches, streaming
from accelerant.bench.timer import host_time_us
from accelerant.config import override
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice

__all__ = ["measure", "run"]


_LAUNCH_US, _CALL_US, _WARM_MS = 8.0, 25.0, 5.0
"""Host times to reach on an H200: of a launch through the provider, of an op called eagerly, of a compile from disk."""

_TARGETS_OF = "H200"


def run(
    device: ComputeDevice,
    *,
    accelerator: Callable[[], Any] | None = None,
    budget_s: float = 0.3,
    progress: Callable[[str], None] = lambda _: None,
) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, accelerator=accelerator, budget_s=budget_s, progress=progress)
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    accelerator: Callable[[], Any] | None = None,
    budget_s: float = 0.3,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets ceilings and rows.
        device: where.
        accelerator: makes an Accelerator on the device, whose batch() is then measured (the layers let no benchmark
            import it).
        budget_s: seconds for each figure of streaming and batches.
        progress: told what is measured next.
    """
    where = torch.device(device.torch_device)
    parts: list[tuple[str, Callable[[], list[Row]]]] = [
        ("launch", lambda: _launches(device, where)),
        ("eager op calls", lambda: _calls(where)),
        ("compile", lambda: _compiles(device)),
        ("streaming", lambda: streaming.rows(record, device, where, budget_s)),
    ]
    if accelerator is not None:
        parts.append(("batches", lambda: batches.rows(accelerator, where, budget_s)))
    known = _TARGETS_OF in device.name
    for name, part in parts:
        progress(f"runtime: {name}")
        record.rows += [replace(row, target=_target(row) if known else None) for row in part()]


def _target(row: Row) -> float | None:
    if row.runner != "accelerant":
        return None
    if row.op == "launch":
        return _LAUNCH_US
    if row.op == "compile":
        return _WARM_MS if "warm" in row.case else None
    return _CALL_US if row.case.startswith("eager call") else None


def _host_row(op: str, case: str, runner: str, implementation: str, fn: Callable[[], Any]) -> Row:
    timing = host_time_us(fn)
    return Row("runtime", op, case, runner, implementation, "us", timing.p20_ms, timing.p50_ms, timing.p80_ms)


def _launches(device: ComputeDevice, where: torch.device) -> list[Row]:
    provider = registry.create(device.backend)
    kernel = provider.compile(field_add_source(), device=device.index)
    x = torch.zeros(256, dtype=torch.uint64, device=where)
    args = (x, x, x, 256)
    rows = [
        _host_row(
            "launch", "host time", "accelerant", "provider.launch", lambda: provider.launch(kernel, (1,), (256,), args)
        )
    ]
    if device.backend == "cuda":
        from cuda.core import LaunchConfig, launch

        stream, config, core = torch.cuda.current_stream(), LaunchConfig(grid=(1,), block=(256,)), kernel.handle.core
        rows.append(
            _host_row(
                "launch",
                "host time",
                "cuda.core",
                "launch",
                lambda: launch(stream, config, core, x.data_ptr(), x.data_ptr(), x.data_ptr(), np.int64(256)),
            )
        )
    y = torch.zeros(256, device=where)
    rows.append(_host_row("launch", "host time", "torch", "add_", lambda: y.add_(1.0)))
    return rows


def _calls(where: torch.device) -> list[Row]:
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    x = torch.randn(16, 64, device=where, dtype=dtype)
    w = torch.ones(64, device=where, dtype=dtype)
    xg, wg = x.clone().requires_grad_(), w.clone().requires_grad_()
    cases: list[tuple[str, str, Callable[[], Any], Callable[[], Any]]] = []
    cases.append(("gelu", "no gradient", lambda: ops.gelu(x, "tanh"), lambda: F.gelu(x, approximate="tanh")))
    cases.append(("gelu", "recording", lambda: ops.gelu(xg, "tanh"), lambda: F.gelu(xg, approximate="tanh")))
    cases.append(("softmax", "no gradient", lambda: ops.softmax(x), lambda: F.softmax(x, -1)))
    cases.append(("softmax", "recording", lambda: ops.softmax(xg), lambda: F.softmax(xg, -1)))
    cases.append(("layer_norm", "no gradient", lambda: ops.layer_norm(x, w, w), lambda: F.layer_norm(x, (64,), w, w)))
    cases.append(
        ("layer_norm", "recording", lambda: ops.layer_norm(xg, wg, wg), lambda: F.layer_norm(xg, (64,), wg, wg))
    )
    cases.append(("matmul", "no gradient", lambda: ops.matmul(x, x.T), lambda: torch.matmul(x, x.T)))
    rows = []
    for op, case, ours, theirs in cases:
        rows.append(_host_row(op, f"eager call, host time, {case}", "accelerant", "eager", ours))
        rows.append(_host_row(op, f"eager call, host time, {case}", "torch", "eager", theirs))
    return rows


@contextmanager
def _triton_cache(folder: str) -> Iterator[None]:
    """Triton keeps a cache of its own, which would make a cold compile warm."""
    before = os.environ.get("TRITON_CACHE_DIR")
    os.environ["TRITON_CACHE_DIR"] = folder
    try:
        yield
    finally:
        os.environ.pop("TRITON_CACHE_DIR")
        if before is not None:
            os.environ["TRITON_CACHE_DIR"] = before


def _compiles(device: ComputeDevice) -> list[Row]:
    """Compile times with an empty and with a filled disk cache, of the C kernel and of a Triton kernel."""
    provider = registry.create(device.backend)
    sources = {"field_add": field_add_source()}
    if device.backend == "cuda":
        from accelerant.ops.gelu.cases import KERNELS

        sources["gelu_fwd (Triton)"] = KERNELS[0].source()
    rows = []
    for name, source in sources.items():
        for case in ("cold", "warm"):
            samples = []
            for _ in range(3):
                with tempfile.TemporaryDirectory() as folder, override(cache_dir=Path(folder)), _triton_cache(folder):
                    if case == "warm":
                        provider.compile(source, device=device.index)
                    began = time.perf_counter()
                    provider.compile(source, device=device.index)
                    samples.append((time.perf_counter() - began) * 1e3)
            low, middle, high = sorted(samples)
            rows.append(
                Row("runtime", "compile", f"{name}, {case} cache", "accelerant", provider.name, "ms", low, middle, high)
            )
    return rows
