"""Field arithmetic beside integer paths of NumPy and torch, checked exactly first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.algebra.field import prime_field
from accelerant.algebra.field.program import field_add_source
from accelerant.algebra.field.reference import MODULI, field_add_reference
from accelerant.bench.ceilings import measure_copy
from accelerant.bench.cpu_column import cpu_column
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import time_ms
from accelerant.errors import AccelerantError
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice

__all__ = ["measure", "run"]

_P = MODULI["goldilocks"]
_SIGN = -(2**63)
_EPSILON = 2**32 - 1
_GPU_SIZES, _CPU_SIZES = (2**20, 2**25), (2**14, 2**20)
_CHECKED = 2**12


def run(
    device: ComputeDevice,
    *,
    budget_s: float = 0.3,
    compiled: bool = True,
    cpu: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, budget_s=budget_s, compiled=compiled, cpu=cpu, progress=progress)
    record.conclude()
    return record


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    budget_s: float = 0.3,
    compiled: bool = True,
    cpu: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets ceilings and rows.
        device: where.
        budget_s: seconds for each figure.
        compiled: with torch.compile among the peers.
        cpu: with a CPU column, where the device is another.
        progress: told what is measured next.

    Raises:
        AccelerantError: a sum is wrong: no time of a wrong result is worth anything.
    """
    where = torch.device(device.torch_device)
    if "copy GB/s" not in record.ceilings:
        progress("algebra: ceilings")
        record.ceilings |= measure_copy(where, budget_s=budget_s)
    for n in _GPU_SIZES if where.type == "cuda" else _CPU_SIZES:
        x, y = _operands(n)
        for row, call in _calls(device, where, x, y, compiled):
            progress(f"{row.op} {row.case}: {row.runner}")
            try:
                _check(row, x, y, call())
                timing = time_ms(call, where, budget_s=budget_s)
            except Exception as error:
                if row.runner == "accelerant":
                    raise
                note = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}"
                record.rows.append(replace(row, implementation="", note=note))
                continue
            row = replace(row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms)
            if cpu and where.type != "cpu" and row.runner == "accelerant" and row.op == "field_add":
                taken, note = cpu_column(functools.partial(_on_cpu, x, y), n, budget_s=budget_s)
                row = replace(row, cpu_ms=taken, cpu_note=note)
            record.rows.append(row)


def _operands(n: int) -> tuple[Any, Any]:
    """Random elements after the pairs of edge values."""
    rng = np.random.default_rng(11)
    x, y = (rng.integers(0, _P, n, dtype=np.uint64) for _ in range(2))
    edges = [0, 1, _EPSILON, 2**32, 2**63, _P - 2, _P - 1]
    pairs = [(a, b) for a in edges for b in edges]
    x[: len(pairs)], y[: len(pairs)] = [a for a, _ in pairs], [b for _, b in pairs]
    return x, y


def _calls(
    device: ComputeDevice, where: torch.device, x: Any, y: Any, compiled: bool
) -> Iterator[tuple[Row, Callable[[], Any]]]:
    """The runners of two cases: the checked call, and the kernel alone."""
    n = x.size
    a, b = (torch.from_numpy(each).to(where) for each in (x, y))
    signed, other = a.view(torch.int64), b.view(torch.int64)
    base = Row("algebra", "field_add", f"goldilocks {n:,} elements", "", "", bytes=24 * n, ceiling="copy")
    yield (
        replace(base, runner="accelerant", implementation="kernel (own), operands checked"),
        lambda: _add(a, b),
    )
    yield replace(base, runner="torch", implementation="int64 ops"), lambda: _torch_add(signed, other)
    if compiled:
        fused = torch.compile(_torch_add, dynamic=False)
        yield replace(base, runner="torch.compile", implementation="int64 ops"), lambda: fused(signed, other)
    if where.type == "cpu":
        yield replace(base, runner="numpy", implementation="uint64 ops"), lambda: _numpy_add(x, y)
    provider = registry.create(device.backend)
    kernel = provider.compile(field_add_source(), device=device.index)
    z = torch.empty_like(a)

    def launch() -> Tensor:
        provider.launch(kernel, (-(-n // 256),), (256,), (a, b, z, n))
        return z

    yield replace(base, op="field_add kernel", runner="accelerant", implementation="kernel (own)"), launch


def _add(x: Any, y: Any) -> Any:
    return prime_field("goldilocks").add(x, y)


def _on_cpu(x: Any, y: Any, n: int) -> Callable[[], Any]:
    return lambda: _add(x[:n], y[:n])


def _torch_add(x: Tensor, y: Tensor) -> Tensor:
    """The sum in 64-bit words that torch takes for signed ones: their order is turned by the sign bit."""
    total = x + y
    total = torch.where((total ^ _SIGN) < (x ^ _SIGN), total + _EPSILON, total)
    return torch.where((total ^ _SIGN) >= _P + _SIGN, total - (_P - 2**64), total)


def _numpy_add(x: Any, y: Any) -> Any:
    total = x + y
    total += np.where(total < x, np.uint64(_EPSILON), np.uint64(0))
    return np.where(total >= np.uint64(_P), total - np.uint64(_P), total)


def _check(row: Row, x: Any, y: Any, got: Any) -> None:
    """All elements with the host's own 64-bit arithmetic, the first of them with Python's integers."""
    host = got.cpu().numpy() if isinstance(got, Tensor) else got
    host = host.view(np.uint64)
    room = np.uint64(_P) - y
    expected = np.where(x >= room, x - room, x + y)
    exact = field_add_reference(x[:_CHECKED].tolist(), y[:_CHECKED].tolist(), field="goldilocks")
    wrong = np.flatnonzero(host != expected)
    if expected[:_CHECKED].tolist() != exact:
        raise AccelerantError("the host's own integer arithmetic is wrong")
    if wrong.size:
        at = int(wrong[0])
        raise AccelerantError(f"{row.op} by {row.runner}: {x[at]} + {y[at]} gave {host[at]}, not {expected[at]}")
