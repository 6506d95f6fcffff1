"""A case of the neural suite with its tensors: the calls to time, the least work they are, and their results.

A case is an op on the arguments of a Benchmark; it is measured forward, backward, or both together where a program
never has one without the other.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from accelerant import ops
from accelerant.bench.subjects import OPS, attention_flops, varlen_flops
from accelerant.ops._cases import Benchmark
from accelerant.runtime.provider import ComputeDevice

__all__ = [
    "Case",
    "Work",
    "as_tuple",
    "benchmarks_of",
    "call_of",
    "cases_of",
    "first_rows",
    "leaves_of",
    "shrunk",
    "work_of",
]

_TARGETS_OF = "H200"
"""The device for which the cases name what to reach."""

_CPU_SHRINK, _CPU_MANY = 32, 4096
"""A CPU gets the cases of more than so many rows with so many times fewer."""

_WHOLE = frozenset({"attention_varlen", "attention_decode"})
"""Ops with arguments that say where others' rows are: fewer rows would be elsewhere."""

Inputs = tuple[Tensor | None, ...]


def cases_of(name: str) -> Any:
    """What an op's cases.py says of it: SAMPLES, LARGE, BENCHMARKS, ..."""
    function = getattr(ops, name)
    cases = importlib.import_module(f"{function.__module__.rpartition('.')[0]}.cases")
    return cases.FAMILY[name] if hasattr(cases, "FAMILY") else cases


def benchmarks_of(name: str) -> list[Benchmark]:
    """The rows that an op's cases.py asks for."""
    return list(cases_of(name).BENCHMARKS)


@dataclass(frozen=True, slots=True)
class Case:
    """A benchmark with its tensors.

    Attributes:
        name: of the op.
        label: sizes, dtype and options in words.
        inputs: its arguments.
        options: its keyword arguments.
        benchmark: what it was made from.
        aims: whether the speeds that the benchmark names are to be reached here.
    """

    name: str
    label: str
    inputs: Inputs
    options: dict[str, Any]
    benchmark: Benchmark
    aims: bool

    @classmethod
    def of(cls, name: str, benchmark: Benchmark, device: ComputeDevice, dtype: torch.dtype) -> Case:
        """On a device, in a dtype; on a CPU with fewer rows."""
        sample, where = benchmark.sample, torch.device(device.torch_device)
        inputs = tuple(sample.tensors(dtype, where))
        if where.type == "cpu":
            inputs = shrunk(name, inputs, _cpu_rows(inputs))
        shapes = "@".join("x".join(map(str, x.shape)) for x in inputs if x is not None and x.ndim > 1)
        shapes = shapes or "@".join("x".join(map(str, x.shape)) for x in inputs if x is not None)
        options = "".join(f" {_option(key, value)}" for key, value in sample.options.items())
        aims = _TARGETS_OF in device.name and dtype == benchmark.dtype
        label = f"{shapes} {str(dtype).removeprefix('torch.')}{options}"
        return cls(name, label, inputs, dict(sample.options), benchmark, aims)

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return next(x for x in self.inputs if x is not None).device

    @property
    def dtype(self) -> torch.dtype:
        """Of its first argument that is not of integers."""
        return next(x.dtype for x in self.inputs if x is not None and x.is_floating_point())

    @property
    def together(self) -> bool:
        """Whether forward and backward are measured as one: of a loss, nobody has one without the other."""
        return self.benchmark.both_ms is not None or self.name.endswith("cross_entropy")


def _option(key: str, value: object) -> str:
    return key if value is True else f"not {key}" if value is False else f"{key} {value}"


def _cpu_rows(inputs: Sequence[Tensor | None]) -> int:
    rows = len(inputs[0]) if inputs[0] is not None and inputs[0].ndim else 1
    return rows if rows <= _CPU_MANY else math.ceil(rows / _CPU_SHRINK)


def shrunk(name: str, inputs: Sequence[Tensor | None], rows: int) -> Inputs:
    """An op's arguments with so many rows at most, where it works row by row; else as they are."""
    return tuple(inputs) if name in _WHOLE else first_rows(inputs, rows, OPS[name].shared)


def first_rows(inputs: Sequence[Tensor | None], rows: int, shared: Sequence[int] = ()) -> Inputs:
    """The first rows of the first argument, which ops work on row by row, and of those that go along with it.

    Args:
        inputs: an op's arguments.
        rows: how many to keep.
        shared: places of arguments that are the same for every row, whatever their sizes: weights.
    """
    first = inputs[0]
    if first is None or not first.ndim or len(first) <= rows:
        return tuple(inputs)
    others = [
        x[:rows].contiguous() if x is not None and i not in shared and _goes_along(x, first) else x
        for i, x in enumerate(inputs[1:], 1)
    ]
    return (first[:rows].contiguous(), *others)


def _goes_along(x: Tensor, first: Tensor) -> bool:
    """Whether an argument has a row, or a number, for each row of the first."""
    return x.ndim > 0 and len(x) == len(first) and (x.ndim == 1 or x.shape[1:] == first.shape[1:])


# --- calls -----------------------------------------------------------------------------------------------------------


def as_tuple(results: Any) -> tuple[Tensor, ...]:
    """An op's results."""
    return results if isinstance(results, tuple) else (results,)


def leaves_of(name: str, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """An op's arguments, those that a model learns or passes on asking for a gradient; tables and scales do not."""
    constants = OPS[name].constants
    return [
        x.detach().requires_grad_() if x is not None and x.is_floating_point() and i not in constants else x
        for i, x in enumerate(inputs)
    ]


def call_of(fn: Callable[..., Any], case: Case, direction: str) -> Callable[[], Any]:
    """The call to time.

    Args:
        fn: an op, ours or a peer's.
        case: its arguments.
        direction: "forward", "backward", or "both" together.
    """
    if direction == "forward":

        def forward() -> Any:
            with torch.no_grad():
                return fn(*case.inputs, **case.options)

        return forward
    args = leaves_of(case.name, case.inputs)
    leaves = [x for x in args if x is not None and x.requires_grad]
    if direction == "both":

        def both() -> Any:
            return torch.autograd.grad(as_tuple(fn(*args, **case.options))[0], leaves)

        return both
    outs = [y for y in as_tuple(fn(*args, **case.options)) if y.requires_grad]
    dys = [torch.randn_like(y) for y in outs]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, leaves, dys, retain_graph=True)

    return backward


# --- work ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Work:
    """A direction of a case.

    Attributes:
        direction: "forward", "backward" or "both".
        bytes, flops: the least that it takes.
        only_reads: whether what it writes is next to nothing beside what it reads.
    """

    direction: str
    bytes: int
    flops: int
    only_reads: bool = False


def work_of(case: Case) -> list[Work]:
    """The directions of a case. Runs it forward, once for its sizes and once to see whether it has a gradient."""
    subject, fn = OPS[case.name], getattr(ops, case.name)
    with torch.no_grad():
        outs = as_tuple(fn(*case.inputs, **case.options))
    made = sum(y.nbytes for y in outs)
    given = [x for x in case.inputs if x is not None]
    size = sum(x.nbytes for x in given)
    args = leaves_of(case.name, case.inputs)
    learned = sum(x.nbytes for x in args if x is not None and x.requires_grad)
    flops = _flops(case, given, outs[0])
    if case.together:
        return [Work("both", size + learned, int(flops * (1 + subject.backward_flops)))]
    forward = Work("forward", size + made, flops, only_reads=32 * made < size)
    if not any(y.requires_grad for y in as_tuple(fn(*args, **case.options))):
        return [forward]
    return [forward, Work("backward", size + learned + made, int(flops * subject.backward_flops))]


def _flops(case: Case, given: Sequence[Tensor], out: Tensor) -> int:
    subject = OPS[case.name]
    causal = bool(case.options.get("causal"))
    if case.name == "attention":
        return attention_flops(given[0], given[1], causal=causal)
    if case.name == "attention_varlen":
        return varlen_flops(given[0], given[3], given[4], causal=causal)
    return subject.flops(given, out) if subject.flops else 0
