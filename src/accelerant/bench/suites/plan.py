"""What a run of the neural suite measures, in order, and about how long it takes; known before any device is touched.

Three parts: the tables of the ops (their BENCHMARKS, in each dtype asked for), odd sizes (their LARGE samples, which
the tests run too), and a sweep of the ops that work row by row, from 2^10 to 2^28 elements. A run that is cut short has
what matters: the cases that name something to reach come first, then the rest of the tables in the first dtype, odd
sizes, the other dtypes, and the sweep. On a CPU the tables' cases have as many rows as it works through in a moment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from accelerant.bench.subjects import OPS
from accelerant.bench.suites.cases import benchmarks_of, cases_of
from accelerant.ops._cases import Benchmark, Indices, Sample

__all__ = ["Planned", "for_cpu", "plan", "sweep_sizes"]

_OTHER_DTYPE, _MANY_SIZES = 0.4, 0.1
"""Parts of the time behind each figure: in a dtype that is not the case's own; at odd sizes and in the sweep."""

_SWEEP_PEERS = ("torch", "compile")
_ODD_PEERS = ("torch",)
_WIDE_PEERS = ("torch",)
"""Of a further float32: the other libraries' numbers are of 16 bits."""

_NOT_AGAIN = ("compile",)
"""In a further dtype: what torch.compile makes is as fast in float16 as in bfloat16, and takes seconds to make."""

_FIGURE_S = 0.035
_COMPILED_S = 0.35
"""Beside the timed calls: of a figure; of one of torch.compile's from its cache."""

_COMPILE_S = {"compile": 5.0, "liger": 2.0, "quack": 10.0, "flash_attn_4": 25.0}
"""What compiling a peer takes a core."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A case to measure.

    Attributes:
        part: "", "odd" or "sweep", as Row.part.
        op: name of the op.
        benchmark: the arguments, and what to reach.
        dtype: of the arguments.
        against: the peers.
        budget_s: seconds of calls behind each figure.
        deterministic: with a row of what the setting `deterministic` costs.
        race: whether dispatch races its implementations first, or chooses as a user's first call does.
    """

    part: str
    op: str
    benchmark: Benchmark
    dtype: torch.dtype
    against: tuple[str, ...]
    budget_s: float
    deterministic: bool = False
    race: bool = False

    @property
    def key(self) -> str:
        """The same in each run that measures the same."""
        dtype = str(self.dtype).removeprefix("torch.")
        options = "".join(f" {key}={value}" for key, value in self.benchmark.sample.options.items())
        words = (self.part, self.op, f"{self.benchmark.sample.name}{options}", dtype, "+".join(self.against))
        return " ".join(filter(None, words))

    @property
    def peers(self) -> tuple[str, ...]:
        """Of `against`, those that have this op."""
        return tuple(name for name in self.against if name in ("torch", "compile", *OPS[self.op].peers))

    @property
    def figures(self) -> int:
        """About how many times are taken: two directions of ours and of each peer, and one more now and then."""
        return 2 * (1 + len(self.peers)) + (1 if self.part == "" else 0)

    @property
    def estimate_s(self) -> float:
        """About how many seconds it takes on a large GPU, once everything is compiled."""
        elements = sum(math.prod(shape) for shape in self.benchmark.sample.shapes if shape is not None)
        call_s = 4e-4 + elements * 8 / 2e12  # the flush, and a few passes over the arguments
        flops = 0.0
        if OPS[self.op].flops is not None:
            first = self.benchmark.sample.shapes[0] or ()
            flops = 2.0 * math.sqrt(max(elements, 1)) * (math.prod(first) or 1)
        call_s += flops / (2e14 if self.dtype != torch.float32 else 3e13)
        timed = max(self.budget_s, 12 * call_s) + 10 * call_s
        compiled = (0.1 if self.part == "sweep" else 2 * _COMPILED_S) if "compile" in self.peers else 0.0
        return self.figures * (_FIGURE_S + timed) + compiled + (0.25 if self.race else 0.0)

    @property
    def compile_s(self) -> float:
        """About how many seconds of one core compiling it takes."""
        return 1.0 + sum(_COMPILE_S.get(name, 0.0) for name in self.peers)


def plan(
    names: Sequence[str],
    *,
    dtypes: Sequence[torch.dtype] = (),
    against: Sequence[str],
    budget_s: float,
    gpu: bool,
    tables: bool = True,
    odd: bool = False,
    sweep: Sequence[int] = (),
) -> list[Planned]:
    """The cases in order.

    Args:
        names: ops of OPS; all where empty.
        dtypes: to measure the tables in, the first one more thoroughly; none: each case's own, float32 on a CPU.
        against: the peers. In dtypes after the first all but torch.compile, in a float32 among them torch alone; in the
            sweep torch and torch.compile; at odd sizes torch.
        budget_s: seconds of calls behind each figure of the tables' first dtype; fewer behind the others.
        gpu: whether for a GPU.
        tables: with the tables.
        odd: with odd sizes.
        sweep: with the ops that work row by row at these numbers of elements, in the first dtype.
    """
    ops = list(names) or list(OPS)
    first = dtypes[0] if dtypes else None
    of_dtypes: list[list[Planned]] = []
    for i, dtype in enumerate((dtypes or (None,)) if tables else ()):
        peers = tuple(name for name in against if not i or _again(name, dtype))
        budget = budget_s * (_OTHER_DTYPE if i else 1.0)
        cases = [(op, each) for op in ops for each in benchmarks_of(op)]
        if not gpu:
            cases = [(op, for_cpu(op, each)) for op, each in cases]
        of_dtypes.append(
            [
                Planned("", op, each, _dtype(dtype, each, gpu), peers, budget, deterministic=gpu and not i, race=gpu)
                for op, each in cases
            ]
        )
    few = budget_s * _MANY_SIZES
    uneven = []
    if odd:
        peers = tuple(name for name in against if name in _ODD_PEERS)
        for op in ops:
            for benchmark in _odd(op, first or torch.bfloat16):
                uneven.append(Planned("odd", op, benchmark, _dtype(first, benchmark, gpu), peers, few))
    swept = []
    peers = tuple(name for name in against if name in _SWEEP_PEERS)
    for op in ops:  # the largest first: what is compiled for any number of rows is compiled for them
        for size in sorted(sweep, reverse=True):
            resized = _resized(benchmarks_of(op)[0], size)
            if resized is not None:
                several = (resized.sample.shapes[0] or ())[0] > 1
                there = tuple(name for name in peers if several or name != "compile")
                swept.append(Planned("sweep", op, resized, _dtype(first, resized, gpu), there, few))
    main = of_dtypes[0] if tables else []
    others = [each for table in of_dtypes[1:] for each in table]
    aimed = [each for each in (*main, *others) if _aims(each.benchmark) and each.dtype == each.benchmark.dtype]
    found = [*aimed, *main, *uneven, *others, *swept]
    return list({each.key: each for each in found}.values())


def _aims(benchmark: Benchmark) -> bool:
    """Whether a case names something to reach."""
    named = (benchmark.forward_ms, benchmark.backward_ms, benchmark.both_ms, benchmark.forward_x, benchmark.backward_x)
    return any(each is not None for each in (*named, benchmark.peak_mib))


def _again(peer: str, dtype: torch.dtype | None) -> bool:
    """Whether a peer is measured in a dtype that is not the first."""
    return peer in _WIDE_PEERS if dtype == torch.float32 else peer not in _NOT_AGAIN


def _dtype(first: torch.dtype | None, benchmark: Benchmark, gpu: bool) -> torch.dtype:
    return first or (benchmark.dtype if gpu else torch.float32)


def _odd(op: str, dtype: torch.dtype) -> list[Benchmark]:
    """The samples of a GPU's tests that torch's function takes as well."""
    keeps = OPS[op].odd
    return [Benchmark(sample, dtype) for sample in cases_of(op).LARGE if keeps(sample)]


# --- on a CPU --------------------------------------------------------------------------------------------------------

_CPU_ELEMENTS = 2**20
_CPU_FLOPS = 3 * 10**8
"""What a case has at most of each on a CPU, if it has rows to spare: some milliseconds on two cores."""

_CPU_MOST = 40 * 10**6
"""A case that holds more elements besides its rows, in a weight or a table, gives way to a size that is tested."""

_CPU_HEADS, _CPU_LENGTH = 4, 256
"""Of attention."""


def for_cpu(op: str, benchmark: Benchmark) -> Benchmark:
    """A table's case with fewer rows, or of a size that is tested, where what is the same for every row is too much."""
    sample = benchmark.sample
    if op == "attention":
        (_, heads, length, width), (_, key_heads, keys, _) = (sample.shapes[i] or () for i in (0, 1))
        kept = min(key_heads, max(1, _CPU_HEADS * key_heads // heads))
        q = (1, kept * heads // key_heads, min(length, _CPU_LENGTH), width)
        k = (1, kept, min(keys, _CPU_LENGTH), width)
        return replace(benchmark, sample=Sample("x".join(map(str, q)), (q, k, k), sample.options))
    tested = min((each for each in cases_of(op).LARGE if OPS[op].odd(each)), key=_elements)
    if op.startswith("attention_"):  # their rows are other arguments' places
        return replace(benchmark, sample=tested)
    found = [_with_fewer_rows(op, each) for each in (sample, tested)]
    return replace(benchmark, sample=next((each for each in found if _elements(each) <= _CPU_MOST), found[1]))


def _with_fewer_rows(op: str, sample: Sample) -> Sample:
    """As many rows as a CPU has time for."""
    first = sample.shapes[0] or (1,)
    most = max(1, _CPU_ELEMENTS // max(1, math.prod(first[1:]))), max(1, _CPU_FLOPS // _flops_of_row(op, sample))
    return _with_rows(sample, min(first[0], *most), OPS[op].shared)


def _elements(sample: Sample) -> int:
    return sum(math.prod(shape) for shape in sample.shapes if shape is not None)


def _flops_of_row(op: str, sample: Sample) -> int:
    """Of a row of the first argument, where an op multiplies it by the second; 1 for other ops."""
    if OPS[op].flops is None:
        return 1
    first, second = (sample.shapes[i] or (1,) for i in (0, 1))
    if op == "conv2d":
        step = int(sample.options.get("stride", 1))
        return 2 * math.prod(second) * max(1, math.prod(first[2:]) // (step * step))
    return 2 * math.prod(second)


def _with_rows(sample: Sample, rows: int, shared: Sequence[int]) -> Sample:
    """A sample with so many rows in its first argument and in those that have one for each of its rows."""
    first = sample.shapes[0] or (1,)
    arguments: list[Any] = []
    for i, (argument, shape) in enumerate(zip(sample.arguments, sample.shapes, strict=True)):
        along = shape is not None and i not in shared and shape[:1] == first[:1] and shape[1:] in ((), first[1:])
        if argument is None or shape is None or not along:
            arguments.append(argument)
        elif isinstance(argument, Indices):
            arguments.append(replace(argument, shape=(rows, *shape[1:])))
        else:
            arguments.append((rows, *shape[1:]))
    name = sample.name if rows == first[0] else f"{sample.name}, {rows} rows"
    return Sample(name, tuple(arguments), sample.options)


# --- sizes -----------------------------------------------------------------------------------------------------------


def sweep_sizes(largest: int = 28) -> list[int]:
    """2^10 to 2^largest elements by powers of four, and beside every other one an odd number, which makes one row."""
    both = ((1 << power, (1 << power) - power % 4 // 2) for power in range(10, largest + 1, 2))
    return [size for pair in both for size in dict.fromkeys(pair)]


def _is_round(size: int) -> bool:
    return size & (size - 1) == 0


def _resized(benchmark: Benchmark, size: int) -> Benchmark | None:
    """The same op with so many elements in its first argument, or as many rows of the same length as that has.

    An odd number of elements, or fewer than a row, make one row. None where another argument depends on the first in a
    way that is not row by row.
    """
    first = benchmark.sample.arguments[0]
    if not isinstance(first, tuple) or len(first) != 2:
        return None
    columns = first[1]
    shape = (size // columns, columns) if _is_round(size) and size >= columns else (1, size)
    arguments: list[Any] = []
    for argument in benchmark.sample.arguments:
        if isinstance(argument, Indices):
            high = min(argument.high, shape[1])  # classes, of which there are as many as columns
            arguments.append(replace(argument, shape=(shape[0], *argument.shape[1:]), high=high))
        elif argument == first:
            arguments.append(shape)
        elif argument is not None and argument == (columns,):
            arguments.append((shape[1],))
        else:
            return None
    name = "x".join(map(str, shape))
    options: Mapping[str, Any] = benchmark.sample.options
    return Benchmark(Sample(name, tuple(arguments), options), benchmark.dtype)
