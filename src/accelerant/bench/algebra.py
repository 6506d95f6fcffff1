"""Field addition compared with integer code of NumPy and torch; every sum is checked exactly first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from accelerant.algebra.field.field import prime_field
from accelerant.algebra.field.program import field_add_source
from accelerant.bench.record import Row, failure_note
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option
from accelerant.bench.timer import cpu_time_ms, time_ms
from accelerant.errors import AccelerantError
from accelerant.runtime import registry
from accelerant.runtime.provider import ComputeDevice

_P = prime_field("goldilocks").modulus
_SIGN = -(2**63)
_EPSILON = 2**32 - 1
_GPU_SIZES, _CPU_SIZES = (2**20, 2**25), (2**14, 2**20)
_CHECKED = 2**16  # sums that are also compared with Python's integers


@dataclass(frozen=True)
class AlgebraSuite(Suite):
    """Measure field arithmetic and integer code of NumPy and torch, checked exactly first."""

    name = "algebra"
    examples = ("--no-compiled",)

    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0)
    compiled: bool = option(True, "With torch.compile among the peers.")

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy ceiling."""
        run.require_ceiling("copy", self.budget_s)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return a case for each number of elements."""
        sizes = _GPU_SIZES if run.gpu else _CPU_SIZES
        return [SuiteCase(f"field_add {n:,} elements", functools.partial(self._measure, n)) for n in sizes]

    def _measure(self, n: int, run: SuiteRun) -> None:
        x, y = operands(n)
        for row, call in self._calls(run, x, y):
            run.progress(f"{row.op} {row.case}: {row.runner}")
            try:
                if wrong := first_wrong(x, y, call()):
                    raise AccelerantError(f"{row.op} by {row.runner}: {wrong}")
                row = row.timed(time_ms(call, run.torch_device, budget_s=self.budget_s))
            except Exception as error:
                if row.runner == "accelerant":
                    raise
                run.add(replace(row, implementation="", note=failure_note(error)))
                continue
            if self.cpu and run.gpu and row.runner == "accelerant" and row.op == "field_add":
                taken, note = cpu_time_ms(
                    lambda rows: functools.partial(_add, x[:rows], y[:rows]), n, budget_s=self.budget_s
                )
                row = replace(row, cpu_ms=taken, cpu_note=note)
            run.add(row)

    def _calls(self, run: SuiteRun, x: Any, y: Any) -> Iterator[tuple[Row, Callable[[], Any]]]:
        """Yield the runners of the checked call, then the kernel launch alone."""
        n, device = x.size, run.device
        a, b = (torch.from_numpy(values).to(run.torch_device) for values in (x, y))
        signed, other = a.view(torch.int64), b.view(torch.int64)
        base = Row(
            "algebra", "field_add", f"goldilocks {n:,} elements", "", "", bytes=24 * n, ceiling="copy", operations=n
        )
        ours = replace(base, runner="accelerant", implementation="kernel (own), operands checked")
        yield ours, lambda: _add(a, b)
        yield replace(base, runner="torch", implementation="int64 ops"), lambda: _torch_add(signed, other)
        if self.compiled:
            fused = torch.compile(_torch_add, dynamic=False)
            yield replace(base, runner="torch.compile", implementation="int64 ops"), lambda: fused(signed, other)
        if not run.gpu:
            yield replace(base, runner="numpy", implementation="uint64 ops"), lambda: _numpy_add(x, y)
        yield replace(ours, op="field_add kernel", implementation="kernel (own)"), kernel_launch(device, a, b)


def kernel_launch(device: ComputeDevice, a: Tensor, b: Tensor) -> Callable[[], Tensor]:
    """Return the launch alone of the addition of two tensors of elements."""
    provider, z, n = registry.create(device.backend), torch.empty_like(a), a.numel()
    kernel = provider.compile(field_add_source(), device=device.index)

    def launch() -> Tensor:
        provider.launch(kernel, (-(-n // 256),), (256,), (a, b, z, n))
        return z

    return launch


def operands(n: int) -> tuple[Any, Any]:
    """Return two arrays of n elements of Goldilocks: all pairs of edge values, then random ones."""
    rng = np.random.default_rng(11)
    x, y = (rng.integers(0, _P, n, dtype=np.uint64) for _ in range(2))
    edges = [0, 1, _EPSILON, 2**32, 2**63, _P - 2, _P - 1]
    pairs = [(a, b) for a in edges for b in edges]
    x[: len(pairs)], y[: len(pairs)] = [a for a, _ in pairs], [b for _, b in pairs]
    return x, y


def _add(x: Any, y: Any) -> Any:
    return prime_field("goldilocks").add(x, y)


def _torch_add(x: Tensor, y: Tensor) -> Tensor:
    """Add in signed 64-bit words; flipping the sign bit orders them as unsigned ones."""
    total = x + y
    total = torch.where((total ^ _SIGN) < (x ^ _SIGN), total + _EPSILON, total)
    return torch.where((total ^ _SIGN) >= _P + _SIGN, total - (_P - 2**64), total)


def _numpy_add(x: Any, y: Any) -> Any:
    total = x + y
    total += np.where(total < x, np.uint64(_EPSILON), np.uint64(0))
    return np.where(total >= np.uint64(_P), total - np.uint64(_P), total)


def first_wrong(x: Any, y: Any, got: Any) -> str:
    """Compare sums in Goldilocks with the host's arithmetic; return how many are wrong, with the first one, or ""."""
    host = (got.cpu().numpy() if isinstance(got, Tensor) else got).view(np.uint64)
    room = np.uint64(_P) - y  # x + y reaches the modulus where x >= room
    expected = np.where(x >= room, x - room, x + y)
    exact = [(a + b) % _P for a, b in zip(x[:_CHECKED].tolist(), y[:_CHECKED].tolist(), strict=True)]
    if expected[:_CHECKED].tolist() != exact:
        return "the host's own integer arithmetic is wrong"
    wrong = np.flatnonzero(host != expected)
    if not wrong.size:
        return ""
    at = int(wrong[0])
    first = f"{x[at]} + {y[at]} gave {host[at]}, not {expected[at]}"
    return f"{wrong.size:,} of {host.size:,} sums are wrong, the first: {first}"
