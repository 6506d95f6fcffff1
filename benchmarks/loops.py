"""Models of transformers in ordinary loops: as they were, patched, and under torch.compile, in turns.

    python -m benchmarks.loops --family gpt2 --loop varying --loop padded-right

A cell is a family of models in a loop (benchmarks/loop_cells.py has the tables). First come the results: the largest
difference of what the steps computed (losses, embeddings or tokens), and of the gradients of a parameter, each from the
model as it was. Beside them is that of two runs of the model as it was, from weights that are rounded differently; a
runner of ours may differ by 1.5 times as much, or have 1.5 times the error under autocast that the model as it was has.
Each of these steps begins with the same weights in all runs, since training enlarges any difference: after some steps
two runs of one model may be as far apart as those of two models. All of them run on our ops, which a patched model
takes later. Then comes the ratio of the times of the first steps of another patched model, compilation, captures and
comparisons included, to those of the first run as it was ("first steps"). Once that model changes nothing more, there
follow the ratio of the times and the times: of blocks of steps, in which the runners take turns; with the peak of the
memory that each reserves, and its first step in this process. The loop "trainer" measures whole runs of transformers'
Trainer instead, each in a process of its own: with empty caches of compiled kernels ("cold"), and with all kernels of
the run before ("warm").

On a CPU the models are tiny: a test of results, not of speed.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from accelerant.bench.record import COMPILED, EAGER, OURS, Row, failure_note
from accelerant.bench.suite import CaseFailedError, Suite, SuiteCase, SuiteRun, check_names, measure_cases, option
from accelerant.bench.suites import Task, compile_first, measure_quietly
from accelerant.bench.timer import Timing, first_ms
from accelerant.cli.bench import run_command
from accelerant.config import override
from accelerant.errors import AccelerantError, MissingDependency
from accelerant.nn import PatchReport, patch
from accelerant.nn.patching.choice import LAPS, WARM_UP, remember
from accelerant.runtime.compilation import background
from accelerant.runtime.provider import ComputeDevice
from benchmarks.loop_cells import DYNAMIC, FAMILIES, LOOPS, RUNNERS, TORCH, Cell, Running, move, running

__all__ = ["LoopsSuite", "train"]

TRAINER, _OVER, _FIRST = "trainer", "over torch", "first steps"
_PLAIN, _TIMES = (OURS, EAGER), ("ms", "s")
_OURS, _COMPILED = (*_PLAIN, COMPILED), (COMPILED, DYNAMIC)

_ALLOWED, _LEVEL = 1.5, 0.98
"""A runner of ours may differ from the model as it was by so many times the difference of two runs of that, and must
reach this share of its speed.
"""

_MOVED = (1, 2)
"""Seeds of other roundings of the weights, for further runs of the model as it was."""

_SUM = 4 * torch.finfo(torch.float32).eps
"""Relative difference of a mean of some hundred terms in another order, in float32."""

_AS_IT_WAS, _FROM_EXACT = "of two runs as it was", "from float32; as it was"

_MILLION, _LEAST = 1e6, 1e-3
"""Differences are in millionths; equal results have the least one, as the figures of a record are above 0."""

_BLOCKS, _BLOCK = 5, 4
"""Blocks of steps that each runner is timed in, and the steps of one."""

_QUIET, _QUIET_S, _SETTLE_S, _KERNELS_S = _BLOCKS, 2.0, 15.0, 60.0
"""Blocks (of the batches that are timed), and seconds, in which a patched model changes nothing before it is timed; the
most seconds until then after its kernels are compiled, and until these are.
"""

_CELL_S, _RUNS_S = 4.0, 60.0
"""Expected seconds of a cell and of a family's runs of the Trainer on a large GPU, as it was and patched."""

_COMPILE_S, _SHARE, _COMPILING = 240.0, 0.06, 6
"""Seconds that compiling in other processes may take before the first cell; one's share of the device's memory, and its
steps.
"""

_TINY = (
    "on a CPU the models are tiny: ratios are no measure of speed; in up to the first "
    f"{2 * (LAPS + 1)} calls of a kind nn.patch compares both sides: --steps 160 ends that before the times"
)

_RUNS, _TRAINER_STEPS, _WARM_STEPS, _CHILD_S = ("cold", "warm"), 60, 12, 300.0
_CACHES = ("ACCELERANT_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


@dataclass(frozen=True)
class LoopsSuite(Suite):
    """Measure families of models in loops as users write them, patched and not: results first, then times."""

    name = "loops"
    examples: ClassVar[tuple[str, ...]] = (
        "", "--family gpt2 --loop varying --runner torch --runner patched", "--out folder --max-seconds 600 --resume",
    )  # fmt: skip

    family: tuple[str, ...] = option((), f"Only this family of {', '.join(FAMILIES)}; may be repeated.")
    loop: tuple[str, ...] = option((), f"Only this loop of {', '.join([*LOOPS, TRAINER])}; may be repeated.")
    runner: tuple[str, ...] = option(
        (), f"Only this runner of {', '.join(RUNNERS)}; may be repeated. torch, the model as it was, always runs; "
        "eager is patched without CUDA graphs. By default the first four, on a CPU the first two.", same=True,
    )  # fmt: skip
    steps: int = option(40, "Steps whose results are compared, before the timed ones.", min=2, same=True)
    workers: int | None = option(None, "Processes that compile first; by default all cores but two, on a CPU 1.", min=1)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's runners and processes.

        Raises:
            ConfigError: an unknown family, loop or runner.
            MissingDependency: transformers is not installed.
        """
        check_names("--family", "family", self.family, tuple(FAMILIES))
        check_names("--loop", "loop", self.loop, (*LOOPS, TRAINER))
        check_names("--runner", "runner", self.runner, tuple(RUNNERS))
        if find_spec("transformers") is None:
            raise MissingDependency("transformers", "huggingface", "benchmarks.loops")
        gpu = device.torch_device.startswith("cuda")
        chosen = self.runner or tuple(RUNNERS)[: 4 if gpu else 2]
        runner = tuple(name for name in RUNNERS if name in chosen or RUNNERS[name] == TORCH)
        workers = self.workers or (max(1, min(14, (os.cpu_count() or 1) - 2)) if gpu else 1)
        return replace(self, runner=runner, workers=workers)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the chosen cells, loop by loop; the runs of the Trainer come last."""
        chosen = [(family, loop) for loop in self.loop or (*LOOPS, TRAINER) for family in self.family or FAMILIES]
        cells = [Cell(family, loop, run.gpu) for family, loop in chosen if loop != TRAINER]
        cases = [
            SuiteCase(cell.key, partial(self._measure_cell, cell), _CELL_S)
            for cell in cells if not cell.left_out
        ]  # fmt: skip
        trained = [
            family for family, loop in chosen
            if loop == TRAINER and not FAMILIES[family].only and FAMILIES[family].task != "pairs"
        ]  # fmt: skip
        return cases + [SuiteCase(f"{name} {TRAINER}", partial(self._measure_runs, name), _RUNS_S) for name in trained]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is a time of a chosen cell; results have their bounds."""
        loop = row.case.replace(" ", ",").partition(",")[0]
        chosen = (not self.family or row.op in self.family) and (not self.loop or loop in self.loop)
        return row.suite == self.name and row.unit in _TIMES and chosen

    def measure(self, run: SuiteRun) -> None:
        """Measure the cells, after compiling for them, and note what was left out, and which cells are slower."""
        cases = self.cases(run)
        out = [Cell(family, loop, run.gpu) for loop in self.loop or LOOPS if loop in LOOPS for family in self.family]
        run.record.notes += [
            f"{cell.family} {cell.loop}: left out, it {cell.left_out}" for cell in out if cell.left_out
        ]
        if (self.workers or 1) > 1:
            self._compile(cases, run)
        try:
            measure_cases(self.name, cases, run)
        finally:
            notes = _summary(run.record.rows)
            run.record.notes += ([] if run.gpu or not notes else [_TINY]) + notes

    @property
    def _compiled(self) -> list[str]:
        return [name for name in self.runner if RUNNERS[name] in _COMPILED]

    def _compile(self, cases: Sequence[SuiteCase], run: SuiteRun) -> None:
        quick = replace(self, runner=("torch", *self._compiled), steps=2, workers=1)

        def groups(keys: set[str]) -> list[list[Task]]:
            left = [case.key for case in cases if case.key in keys and not case.key.endswith(TRAINER)]
            tasks = [partial(measure_quietly, quick, key) for key in left] if self._compiled else []
            cells = [(family, loop) for family in FAMILIES for loop in LOOPS if Cell(family, loop, run.gpu).key in left]
            return [[each] for each in (*tasks, *[partial(_compile_ours, *each) for each in cells])]

        compile_first(groups, cases, run, self.workers or 1, limit_s=_COMPILE_S, share=_SHARE)

    def _measure_cell(self, cell: Cell, run: SuiteRun) -> None:
        """Measure a cell: the results of each runner, which warm it up, and then the times of all in turns.

        Raises:
            CaseFailedError: a runner of ours computes something else than the model as it was.
        """
        steps = max(2, int(self.steps * cell.how.share))
        base = Row(self.name, cell.family, cell.label, "", "")
        ready: dict[str, _Ready] = {}
        batches = cell.batches(steps + _BLOCKS * _BLOCK)
        if self._compiled:
            torch.compiler.reset()
        for runner in (RUNNERS[name] for name in self.runner):
            run.progress(f"{cell.family} {cell.label}: {runner}")
            try:
                ready[runner] = one = _Ready.of(cell, runner, batches, steps, run)
            except Exception as error:
                if runner in (TORCH, OURS):
                    raise
                run.add(replace(base, runner=runner, implementation=runner, note=failure_note(error)))
                continue
            if run.gpu and one.running.report is not None:
                one.settle(run.torch_device)
        run.progress(f"{cell.family} {cell.label}: from equal weights")
        wrong = self._check(cell, ready, base, batches, steps, run)
        run.add(*_timed(ready, base, run))
        _fail(wrong)

    def _check(
        self, cell: Cell, ready: dict[str, _Ready], base: Row, batches: Sequence[dict[str, Any]], steps: int,
        run: SuiteRun,
    ) -> list[Row]:  # fmt: skip
        """Add rows of what runners of ours compute from equal weights, and of their first steps; return wrong ones."""

        def made(runner: str, moved: int = 0, exact: bool = False) -> _Run:
            compiled = runner in _COMPILED  # once
            this = ready[runner].running if compiled else running(cell, runner, run.torch_device, batches, moved=moved)
            this.at = 0
            return _Run(cell, this, moved=moved, exact=exact)

        def checked(exact: bool) -> dict[str, list[Row]]:
            runs = [made(TORCH, moved=seed) for seed in (0, *_MOVED)]
            theirs, truth = range(len(runs)), len(runs) if exact else None
            runs += [made(TORCH, exact=True)] * exact
            with override(race="off"):  # all on our ops, whatever was chosen
                runs += [made(runner) for runner in others]
                gradients = _in_step(cell, runs, steps)
            rows: dict[str, list[Row]] = {}
            for mine, runner in enumerate(others, len(runs) - len(others)):
                row, true = replace(base, runner=runner), None if truth is None else runs[truth].results
                rows[runner] = [_compared(row, runs[mine].results, [runs[i].results for i in theirs], true)]
                if gradients is not None:
                    rows[runner].append(gradients.compared(row, mine, theirs, truth))
            return rows

        others = [runner for runner in ready if runner != TORCH]
        found = checked(exact=cell.low is not None)
        if cell.bfloat16 and cell.how.trains and any(row.wrong for name in found for row in found[name]):
            found = checked(exact=True)
        for runner, rows in found.items():
            if runner in _OURS:
                first = _ratio(replace(base, runner=runner), [ready[TORCH].all_s], [ready[runner].all_s], run, _FIRST)
                run.add(*rows, first)
            else:
                ready[runner].note = f"results differ by {rows[0].error:.1e}"
        return [row for name in found if name in _OURS for row in found[name] if row.wrong]

    def _measure_runs(self, family: str, run: SuiteRun) -> None:
        """Measure runs of the Trainer in processes of their own, with empty caches and with those of the run before.

        Raises:
            CaseFailedError: the losses of a patched model are others.
            AccelerantError: a process failed.
        """
        cell = Cell(family, "fixed", run.gpu)
        steps = _TRAINER_STEPS if run.gpu else self.steps
        found: dict[tuple[str, str], dict[str, Any]] = {}
        runners = [RUNNERS[name] for name in self.runner if RUNNERS[name] in (TORCH, *_PLAIN)]
        exact: list[Tensor] | None = None

        def start(runner: str, moved: int, folder: str, exact: bool = False) -> dict[str, Any]:
            return _run_child(family, runner, str(run.torch_device), steps, moved, folder, exact)

        for runner in runners:
            with tempfile.TemporaryDirectory() as folder:
                for cache in _RUNS:  # the second run as it was is from other weights
                    run.progress(f"{family} {TRAINER}: {runner}, {cache}")
                    moved = _MOVED[0] if runner == TORCH and cache == "warm" else 0
                    found[runner, cache] = start(runner, moved, folder)
                if runner == TORCH:
                    other = _losses(start(TORCH, _MOVED[1], folder))
        results = {key: _losses(one) for key, one in found.items()}
        runs = [*(results[TORCH, cache] for cache in _RUNS), other]
        wrong: list[Row] = []
        for (runner, cache), one in found.items():
            row = Row(
                self.name, family, f"{TRAINER} {cache}, {steps} x {cell.label.partition(', ')[2]}", runner, runner
            )
            if runner != TORCH:
                checked = _compared(row, results[runner, cache], runs)
                if run.gpu and checked.wrong:
                    with tempfile.TemporaryDirectory() as folder:
                        exact = exact or _losses(start(TORCH, 0, folder, True))
                    checked = _compared(row, results[runner, cache], runs, exact)
                wrong += [checked] if checked.wrong else []
                run.add(checked, _ratio(row, [found[TORCH, cache]["all_s"]], [one["all_s"]], run))
            memory = one["peak_bytes"] or None
            row = replace(row, unit="s", cold_ms=1e3 * one["first_s"], peak_bytes=memory, note=one["note"])
            run.add(row.timed(Timing.of([one["all_s"]])))
        _fail(wrong)


def _losses(one: dict[str, Any]) -> list[Tensor]:
    return [torch.tensor(loss) for loss in one["losses"]]


def _compile_ours(family: str, loop: str, device: ComputeDevice) -> None:
    """Compile the kernels of a patched model's steps, for other processes."""
    cell = Cell(family, loop, device.torch_device.startswith("cuda"))
    with override(race="off"), background.awaited():
        this = running(cell, OURS, torch.device(device.torch_device), cell.batches(_COMPILING))
        for _ in itertools.islice(cell.how.steps(this), _COMPILING):
            pass
    remember(this.model)


def _fail(wrong: Sequence[Row]) -> None:
    if wrong:
        raise CaseFailedError("; ".join(f"{row.op} {row.case}, {row.runner}: {row.note}" for row in wrong))


# --- results ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Ready:
    """A runner after its first steps: the first one's milliseconds, the seconds of all, and the peak of memory."""

    running: Running
    steps: Iterator[Tensor]
    block: int
    first_ms: float
    all_s: float
    peak_bytes: int | None
    note: str = ""

    @classmethod
    def of(cls, cell: Cell, runner: str, batches: Sequence[dict[str, Any]], steps: int, run: SuiteRun) -> Self:
        """Build a runner's model, and make its first steps."""
        where = run.torch_device
        if run.gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(where)
        held = torch.cuda.memory_reserved(where) if run.gpu else 0
        this = running(cell, runner, where, batches)
        iterator = cell.how.steps(this)
        first = first_ms(lambda: next(iterator), where)
        rest = first_ms(lambda: list(itertools.islice(iterator, steps - 1)), where)
        peak = torch.cuda.max_memory_reserved(where) - held if run.gpu else None
        return cls(this, iterator, max(1, int(_BLOCK * cell.how.share)), first, 1e-3 * (first + rest), peak)

    def settle(self, where: torch.device) -> None:
        """Make steps until all kernels are compiled, sides are chosen and graphs captured, or no more than usual."""
        assert self.running.report is not None  # for the type checker: the caller has looked
        report, at, same, before = self.running.report, self.running.at, 0, None
        changed = began = time.perf_counter()
        until = began + _SETTLE_S
        while min(same / _QUIET, (time.perf_counter() - changed) / _QUIET_S) < 1 and changed < until:
            first_ms(self.advance, where)
            now = background.is_ready(), dict(report.choices), report.graphs["captured"], report.graphs[WARM_UP]
            same = same + 1 if now == before and now[0] and now[1] else 0
            before, changed = now, changed if same else time.perf_counter()
            if not now[0]:
                until = min(began + _KERNELS_S, changed) + _SETTLE_S
        self.running.at = at

    def advance(self) -> None:
        """Make a block of steps."""
        for _ in itertools.islice(self.steps, self.block):
            pass


def _difference(mine: Tensor, theirs: Tensor) -> float:
    """Return ||mine - theirs|| / ||theirs||, or of tokens the share of other ones; infinity for other shapes."""
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        return math.inf
    if not theirs.is_floating_point():
        return float((mine != theirs).double().mean())
    found = float((mine.double() - theirs.double()).norm() / theirs.double().norm())
    return math.inf if math.isnan(found) else found


class _Run:
    """A run of a loop in step with others: what its steps computed, and the gradients of the last one."""

    def __init__(self, cell: Cell, running: Running, *, moved: int = 0, exact: bool = False) -> None:
        self._cell, self.running, self._moved = cell, running, moved
        self._bounds = exact or moved > 0  # whether its gradients alone matter
        running.graded = self._keep
        if exact:
            running.low = None
            running.model.float()
        self._steps, self.results, self.grads = cell.how.steps(running), list[Tensor](), list[Tensor | None]()

    def _keep(self) -> None:
        for x in self.running.model.parameters():
            self.grads.append(x.grad if self._bounds or x.grad is None else x.grad.detach().clone())
            if self._bounds:
                x.grad = None  # makes no step

    def step(self, weights: Sequence[Tensor]) -> None:
        """Make a step from given weights, with the random numbers of this step in all runs that are rounded alike."""
        self.grads = []
        model = self.running.model
        if self._cell.how.trains:
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), list(weights))
            if self._moved:
                move(model, self._cell.low or next(model.parameters()).dtype, self._moved)
        torch.manual_seed((1 + len(_MOVED)) * len(self.results) + self._moved)
        self.results.append(next(self._steps))


def _in_step(cell: Cell, runs: Sequence[_Run], steps: int) -> _Gradients | None:
    """Make steps of all runs, each from the weights of the first one; return their gradients, None without any."""
    first = runs[0].running.model
    gradients, seen = _Gradients([name for name, _ in first.named_parameters()], next(first.parameters()).dtype), False
    for _ in range(steps):
        weights = [x.detach().clone() for x in first.parameters()] if cell.how.trains else []
        for each in runs:
            each.step(weights)
        if any(each.grads for each in runs):
            gradients.add([each.grads for each in runs])
            seen = True
    return gradients if seen else None


class _Gradients:
    """The differences of the gradients of each parameter between runs, and their norms in the first, over all steps."""

    def __init__(self, names: Sequence[str], dtype: torch.dtype) -> None:
        self._names, self._dtype, self._steps = names, dtype, 0
        self._squares: dict[tuple[int, int], Tensor] = {}

    def add(self, grads: Sequence[Sequence[Tensor | None]]) -> None:
        """Add the gradients of a step of each run."""
        self._steps += 1
        for i, one in enumerate(grads):
            nothing = [None if x is None else torch.zeros_like(x) for x in one] if i == 0 else one
            for j, other in [(0, nothing)] * (i == 0) + list(enumerate(grads))[i + 1 :]:
                found = _squares(one, other, len(self._names))
                self._squares[i, j] = self._squares.get((i, j), 0) + found

    def _apart(self, i: int, j: int) -> Tensor:
        return self._squares[min(i, j), max(i, j)].sqrt()

    def compared(self, row: Row, mine: int, theirs: Sequence[int], exact: int | None) -> Row:
        """Return the row of the parameter whose gradients in a run differ most by what they may: see _compared."""
        norm, rounding = self._apart(0, 0), torch.finfo(self._dtype).eps + _SUM
        apart = torch.stack([self._apart(*pair) for pair in itertools.combinations(theirs, 2)]).amax(0)
        sides = [(self._apart(mine, theirs[0]), apart, _AS_IT_WAS)]
        if exact is not None:
            sides.append((self._apart(mine, exact), self._apart(theirs[0], exact), _FROM_EXACT))
        excess = [
            torch.where(found > 0, found / (_ALLOWED * usual + rounding * norm), 0.0).nan_to_num(math.inf)
            for found, usual, _ in sides
        ]
        least, which = torch.stack(excess).min(0)
        worst = int(least.argmax())
        found, usual, against = sides[int(which[worst])]
        scale = float(norm[worst]) or 1.0
        what = f"{self._names[worst]}, {self._steps} steps"
        return _row(row, "gradients", float(found[worst]) / scale, float(usual[worst]) / scale, rounding, what, against)


def _squares(one: Sequence[Tensor | None], two: Sequence[Tensor | None], count: int) -> Tensor:
    """Return the squared norms of differences; infinity where only one of two is there, or a number is none."""
    pairs = list(zip(one, two, strict=True)) if one and two else []
    both = {i: (x, y) for i, (x, y) in enumerate(pairs) if x is not None and y is not None}
    found = torch.tensor([0.0 if x is y else math.inf for x, y in pairs] or [math.inf] * count, dtype=torch.float64)
    if both:
        norms = torch.stack([(x.float() - y.float()).norm() for x, y in both.values()]).double().cpu()
        found[list(both)] = norms.square().nan_to_num(math.inf, math.inf)
    return found


def _compared(
    row: Row, mine: Sequence[Tensor], theirs: Sequence[Sequence[Tensor]], exact: Sequence[Tensor] | None = None
) -> Row:  # fmt: skip
    """Return the row of the largest difference of the steps' results from the model as it was.

    `theirs` are the results of that model, the first from the same weights, others from weights that are rounded
    differently. Beside 1.5 times the largest difference of two of them a unit in the last place is allowed, as results
    themselves are rounded, and what another order of a sum changes. With `exact`, a run in float32, results that differ
    by more are compared with it: they may have 1.5 times the difference that the model as it was has from it.
    """
    found, against = _largest(mine, theirs[0]), _AS_IT_WAS
    usual = max(_largest(one, two) for one, two in itertools.combinations(theirs, 2))
    if exact is not None and found > _ALLOWED * usual:
        found, usual, against = _largest(mine, exact), _largest(theirs[0], exact), _FROM_EXACT
    dtype = mine[0].dtype
    rounding = torch.finfo(dtype).eps + _SUM if dtype.is_floating_point else 0.0
    return _row(row, "results", found, usual, rounding, f"{len(mine)} steps", against)


def _row(row: Row, what: str, found: float, usual: float, rounding: float, of: str, against: str) -> Row:
    """Return the row of a difference: it may be 1.5 times the usual one, and what rounding makes."""
    bound = _ALLOWED * usual + rounding
    note = f"largest difference {found:.2e} of {of}; {against} {usual:.2e}"
    done = replace(
        row, op=f"{row.op} {what}", implementation="patched - as it was", unit="ppm", error=found,
        target=max(_MILLION * bound, _LEAST), note=note if found <= bound else f"wrong: {note}",
    )  # fmt: skip
    return done.timed(Timing.of([max(_MILLION * found, _LEAST)])) if found < math.inf else done


def _largest(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return max(_difference(one, two) for one, two in zip(mine, theirs, strict=True))


# --- times -----------------------------------------------------------------------------------------------------------


def _timed(ready: dict[str, _Ready], base: Row, run: SuiteRun) -> list[Row]:
    """Return the ratios of the times of the model as it was to ours, and the times, from blocks in turns."""
    runners = list(ready)
    samples: dict[str, list[float]] = {runner: [] for runner in runners}
    for at in range(_BLOCKS):
        for runner in runners[at % len(runners) :] + runners[: at % len(runners)]:
            one = ready[runner]
            samples[runner].append(first_ms(one.advance, run.torch_device) / one.block)
    rows = [
        _ratio(replace(base, runner=name), samples[TORCH], times, run)
        for name, times in samples.items()
        if name in _OURS
    ]
    for runner, one in ready.items():
        row = replace(
            base, runner=runner, implementation=runner, cold_ms=one.first_ms, peak_bytes=one.peak_bytes,
            timing=f"blocks of {one.block} in turns", note=_graphs(one.running.report) or one.note,
        )  # fmt: skip
        rows.append(row.timed(Timing.of(samples[runner], wall=True)))
    return rows


def _graphs(report: PatchReport | None) -> str:
    """Return how many calls ran from graphs, and why others did not."""
    counts = [] if report is None else report.graphs.most_common()
    return "CUDA graphs: " + ", ".join(f"{outcome} {calls}" for outcome, calls in counts) if counts else ""


def _ratio(
    row: Row, before: Sequence[float], after: Sequence[float], run: SuiteRun, what: str = _OVER
) -> Row:  # fmt: skip
    """Return the row of a runner's speed over the model as it was, of which a GPU has a target."""
    row = replace(row, op=f"{row.op} {what}", implementation="as it was / patched", unit="x", better="higher")
    row = replace(row, target=_LEVEL if run.gpu and row.runner == OURS else None)
    return row.timed(Timing.of([old / new for old, new in zip(before, after, strict=True)]))


def _summary(rows: Sequence[Row]) -> list[str]:
    """Return a note on the cells in which a patched model is slower than it was, and one on torch.compile."""
    notes = []
    for what, said in ((_OVER, f"below {_LEVEL} of the speed as it was"), (_FIRST, f"{_FIRST} below {_LEVEL} of it")):
        ratios = {
            f"{row.op.removesuffix(f' {what}')} {row.case}": row.p50
            for row in rows if row.op.endswith(f" {what}") and row.runner == OURS and row.p50
        }  # fmt: skip
        slow = [f"{name} {speed:.2f}" for name, speed in ratios.items() if speed < _LEVEL]
        if ratios:
            notes.append(f"{said}: {len(slow)} of {len(ratios)} cells" + ": " * bool(slow) + "; ".join(slow))
    times = {(row.op, row.case, row.runner): row.p50 for row in rows if row.unit in _TIMES and row.p50}
    pairs = [(ms, times.get((op, case, DYNAMIC))) for (op, case, runner), ms in times.items() if runner == OURS]
    both = [(ours, theirs) for ours, theirs in pairs if theirs is not None]
    if both:
        faster = sum(ours < theirs for ours, theirs in both)
        notes.append(f"faster than {DYNAMIC}: {faster} of {len(both)} cells ({faster / len(both):.0%})")
    return notes


# --- the Trainer -----------------------------------------------------------------------------------------------------


def _run_child(
    family: str, runner: str, device: str, steps: int, moved: int, folder: str, exact: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Run `train` in a process whose caches are in a folder; AccelerantError if it fails."""
    arguments = family, runner, device, steps, moved, exact
    program = f"from benchmarks.loops import train; train(*{arguments!r})"
    caches = {name: os.path.join(folder, name) for name in _CACHES}
    environment = os.environ | caches | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=_CHILD_S, cwd=folder
    )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["its process ended"])[-1]
        raise AccelerantError(f"{family} {TRAINER}, {runner}: {last}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def train(family: str, runner: str, device: str, steps: int, moved: int, exact: bool = False) -> None:
    """Patch a model if the runner does, train it by the Trainer, and print losses, seconds and memory as JSON.

    Kernels that it lacked are compiled after that. `exact` trains without autocast.
    """
    import transformers

    where = torch.device(device)
    cell, losses, ends = Cell(family, "fixed", where.type == "cuda"), list[Tensor](), list[float]()

    class Recorded(transformers.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
            losses.append(super().training_step(*args, **kwargs).detach())
            return losses[-1]

    class Ends(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if not ends:
                first_ms(lambda: None, where)  # waits for the device
                ends.append(time.perf_counter())

    batches = cell.batches(steps)
    data = [{name: x[i] for name, x in batch.items()} for batch in batches for i in range(cell.sizes[0])]
    model = running(cell, TORCH, where, batches, moved=moved).model

    def trainer(folder: str, steps: int, *callbacks: Any) -> Any:
        arguments = transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=cell.sizes[0], max_steps=steps, learning_rate=1e-3, seed=0,
            bf16=where.type == "cuda" and not exact, use_cpu=where.type == "cpu", save_strategy="no", report_to="none",
            disable_tqdm=True, logging_steps=steps,
        )  # fmt: skip
        return Recorded(model, arguments, train_dataset=data, callbacks=[*callbacks])

    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        report = patch(model, graph=False if runner == EAGER else None) if runner in _PLAIN else None
        trainer(folder, steps, Ends()).train()
        first_ms(lambda: None, where)
        all_s = time.perf_counter() - began
        peak = torch.cuda.max_memory_reserved(where) if where.type == "cuda" else 0
        found: dict[str, Any] = {
            "losses": [float(x) for x in losses],
            "first_s": ends[0] - began,
            "all_s": all_s,
            "peak_bytes": peak,
        }
        found["note"] = _graphs(report)
        until, misses = time.monotonic() + _CHILD_S / 2, -1
        while background.is_started() and misses != background.misses() and time.monotonic() < until:
            misses = background.misses()
            with override(race="off"):  # all on our ops, for the warm run
                trainer(folder, _WARM_STEPS).train()
            while not background.is_ready() and time.monotonic() < until:
                time.sleep(0.1)
        if background.is_started():
            remember(model)
    print(json.dumps(found))


if __name__ == "__main__":
    run_command(LoopsSuite)
