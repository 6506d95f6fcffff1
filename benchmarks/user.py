"""The cost of plain calls to a user: wall time, host included, of public names with default arguments.

Nothing is raced, captured or converted before a call; only a first call, which loads what other processes have
compiled, precedes the timed ones and has a column of its own. Results are compared with torch's, float64 references or
integers before anything is timed. The quantiles are, as the rows say, of calls from an idle device to an idle device,
or of the host alone, calls back to back. Models of Hugging Face in loops are in benchmarks.loops.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from accelerant import ops
from accelerant.bench import suites
from accelerant.bench.neural_cases import OpCase, Oracle, as_tuple, call_of, for_cpu, leaves_of
from accelerant.bench.record import OURS, Row, failure_note
from accelerant.bench.subjects import OPS
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, check_names, measure_cases, option
from accelerant.bench.suites import Task, compile_first, compiling, measure_quietly
from accelerant.bench.timer import (
    Timing,
    back_to_back_ms,
    first_ms,
    host_times_us,
    time_ms,
    wall_ms,
)
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.ops.registry import Benchmark, Indices, SampleInput
from accelerant.runtime import registry
from accelerant.runtime.host import python_child
from accelerant.runtime.provider import ComputeDevice

__all__ = ["UserSuite"]

_PEERS = {"torch": "torch", "compile": "torch.compile"}
"""Runners by their names in --against."""

_MSM_MS, _FIRST_MS, _HOST_MS, _RATE = 10.0, 10.0, 0.03, 0.8
"""Targets on an H200: of a sum and of its first call in a process; the host's part of a transform; the share of the
kernel's rate that an addition of many words reaches.
"""

_LIMIT_S, _COMPILE_S, _SHARE = 600.0, 75.0, 0.2
"""Seconds after which no case begins by default; seconds that compiling may take in other processes, and the share of
the device's memory that one of them may.
"""


@dataclass(frozen=True)
class UserSuite(Suite):
    """Measure what plain calls cost a user, host included: ops and zk. Losses first."""

    name = "user"
    examples: ClassVar[tuple[str, ...]] = ("", "--op gelu --op msm", '--case "ntt babybear"', "--out folder --resume")

    op: tuple[str, ...] = option((), "Only this op, as --list names them first; may be repeated.")
    case: tuple[str, ...] = option((), "Only cases with this text in their names; may be repeated.", metavar="TEXT")
    against: tuple[str, ...] | None = option(
        None, "torch, compile, or none; by default both, on a CPU torch.", same=True
    )
    budget_s: float = option(0.1, "Seconds of calls for a figure.", min=0.0, same=True)
    workers: int | None = option(None, "Processes that compile first; by default all cores but two, on a CPU 1.", min=1)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite with the device's peers and processes; ConfigError for an unknown peer, op or text."""
        check_names("--against", "peer", self.against or (), tuple(_PEERS))
        gpu = device.torch_device.startswith("cuda")
        names = [(op, key) for op, key, _ in _cases(gpu)]
        check_names("--op", "op", self.op, tuple(dict.fromkeys(op for op, _ in names)))
        for text in self.case:
            if not any(text.lower() in key.lower() for _, key in names):
                raise ConfigError(f"--case: no case has {text!r}; there are {', '.join(key for _, key in names)}")
        against = self.against if self.against is not None else tuple(_PEERS) if gpu else ("torch",)
        workers = self.workers or (max(1, min(14, (os.cpu_count() or 1) - 2)) if gpu else 1)
        return replace(self, against=against, workers=workers)

    def _wants(self, op: str, key: str) -> bool:
        chosen = not self.case or any(text.lower() in key.lower() for text in self.case)
        return chosen and (not self.op or op in self.op)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the chosen cases."""
        return [
            SuiteCase(key, functools.partial(_measure, self, op, measure))
            for op, key, measure in _cases(run.gpu)
            if self._wants(op, key)
        ]

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of a chosen op; texts of cases choose among all rows."""
        return row.suite == self.name and self._wants(row.op, f"{row.op} {row.case}")

    def measure(self, run: SuiteRun) -> None:
        """Measure all cases, on a GPU by default those that begin in 600 seconds.

        What they need is compiled in several processes before the first one.
        """
        run = replace(run, until=time.monotonic() + _LIMIT_S) if run.gpu and run.until is None else run
        host = registry.find_device("cpu")
        run.record.notes.append(f"host: {host.name}, {host.properties['cores']} cores")
        cases = self.cases(run)
        with compiling() if "compile" in (self.against or ()) else contextlib.nullcontext():
            if (self.workers or 1) > 1:
                self._compile(cases, run)
            measure_cases(self.name, cases, run, cpu=self.cpu and run.gpu)

    def _compile(self, cases: Sequence[SuiteCase], run: SuiteRun) -> None:
        own = tuple(name for name in self.against or () if name == "compile")
        quick = replace(self, budget_s=0.0, against=own, op=(), case=())

        def groups(keys: set[str]) -> list[list[Task]]:
            left = [case.key for case in cases if case.key in keys]
            return [
                [functools.partial(measure_quietly, quick, key)] for key in reversed(left)
            ]  # the first call needs the msm

        if run.gpu:
            torch.cuda.empty_cache()
        compile_first(groups, cases, run, self.workers or 1, limit_s=_COMPILE_S, share=_SHARE)


def _measure(suite: UserSuite, op: str, measure: Callable[[_UserRun], None], run: SuiteRun) -> None:
    measure(_UserRun(suite, op, run))


@dataclass(frozen=True, slots=True)
class _UserRun:
    """A case being measured."""

    suite: UserSuite
    op: str
    run: SuiteRun

    @property
    def where(self) -> torch.device:
        return self.run.torch_device

    def row(self, case: str, runner: str = OURS, **values: Any) -> Row:
        """Return a row without times; its target in milliseconds holds on an H200 alone."""
        if not self.run.is_model("H200"):
            values.pop("target", None)
        self.run.progress(f"{self.op} {case}: {runner}")
        return Row("user", self.op, case, runner, runner, **values)

    def add_exact(
        self, row: Row, call: Callable[[], Any], wrong: Callable[[Any], str], *, host_ms: float = 0.0
    ) -> None:
        """Make a first call, check its result, which raises AccelerantError, and add the call's row."""
        row = replace(row, cold_ms=first_ms(call, self.where))
        if text := wrong(call()):
            raise AccelerantError(f"{row.op} {row.case}: {text}")
        self.add_call(row, call, host_ms)

    def add_call(self, row: Row, call: Callable[[], Any], host_ms: float = 0.0) -> None:
        """Time a call from an idle device to an idle one; on a GPU also by the device's events.

        With `host_ms` the target is the device's time and so many milliseconds more.
        """
        budget_s = self.suite.budget_s
        row = row.timed(wall_ms(call, self.where, budget_s=budget_s))
        if self.run.gpu:
            kernel = time_ms(call, self.where, budget_s=budget_s)
            row = replace(row, device_ms=kernel.p50_ms, back_to_back_ms=kernel.back_to_back_ms)
            if host_ms and self.run.is_model("H200"):
                row = replace(row, target=kernel.p50_ms + host_ms)
        self.run.add(replace(row, timing="wall"))

    def peers(self, *names: str) -> list[str]:
        """Return the runners of those named that were requested."""
        return [_PEERS[name] for name in names if name in (self.suite.against or ())]


def _cases(gpu: bool) -> Iterator[tuple[str, str, Callable[[_UserRun], None]]]:
    """Yield op, key and measurement of each case."""
    for op, sample, host in _OP_CASES:
        shape, kind = "x".join(map(str, sample.shapes[0] or ())), "forward + backward, host time" if host else "float32"
        yield op, f"{op} {shape} {kind}", functools.partial(_measure_op, op, sample, host)
    log_n = 20 if gpu else 10
    yield "msm", f"msm bls12_381_g1 2^{log_n}", functools.partial(_measure_msm, log_n)
    for name in ("goldilocks", "bn254_fr", "babybear"):
        yield "ntt", f"ntt {name} 2^{log_n}", functools.partial(_measure_ntt, name, log_n)
    for n in (1 << 20, 1 << 25) if gpu else (1 << 14,):
        yield "field_add", f"field_add goldilocks {n:,}", functools.partial(_measure_add, n)
    yield "first call", "first call msm", _measure_first


# --- ops -------------------------------------------------------------------------------------------------------------


def _case(op: str, *arguments: Any, host: bool = True, **options: Any) -> tuple[str, SampleInput, bool]:
    """Return a case of an op; `host` for the host's time of forward and backward in bfloat16, else in float32."""
    return op, SampleInput("plain", arguments, options), host


_X, _W = (64, 1024), (1024,)

_OP_CASES = (
    _case("attention", *[(8, 12, 2048, 64)] * 3, host=False),
    _case("attention", *[(2, 8, 4096, 128)] * 3, host=False, causal=True),
    _case("gelu", _X),
    _case("layer_norm", _X, _W, _W),
    _case("rms_norm", _X, _W),
    _case("attention", *[(2, 4, 128, 64)] * 3, causal=True),
    _case("cross_entropy", _X, Indices((64,), 1024)),
    _case("linear_gelu", _X, (1024, 1024), _W),
)


def _measure_op(op: str, sample: SampleInput, host: bool, this: _UserRun) -> None:
    """Measure our op and torch's function, eager and compiled, checked against the float64 reference."""
    dtype = torch.bfloat16 if this.run.gpu and host else torch.float32
    benchmark = Benchmark(sample, dtype) if this.run.gpu else for_cpu(op, Benchmark(sample, dtype))
    case = OpCase.of(op, benchmark, this.run.device, dtype, whole=True)
    oracle, theirs = Oracle(case), OPS[op].theirs
    makers: dict[str, Callable[[], Callable[..., Any]]] = {OURS: lambda: getattr(ops, op)}
    makers |= dict.fromkeys(this.peers("torch"), lambda: theirs)
    makers |= dict.fromkeys(this.peers("compile"), lambda: torch.compile(theirs, dynamic=False))
    in_turns: list[tuple[Row, Callable[[], object], Timing]] = []
    failed: list[Row] = []
    for runner, make in makers.items():
        for direction in ("forward + backward, host time",) if host else ("forward", "backward"):
            label = f"{case.label} {direction}"
            row = this.row(label, runner, target_x=1.0 if runner == OURS else None, unit="us" if host else "ms")
            try:
                fn = make()
                call = _both(fn, case) if host else call_of(fn, case, direction)
                row = replace(row, cold_ms=first_ms(call, this.where))
                checks = [oracle.wrong(fn, part) for part in (("forward", "backward") if host else (direction,))]
                row = replace(row, error=max(error or 0.0 for error, _ in checks))
                if wrong := next((text for _, text in checks if text), ""):
                    raise AccelerantError(f"{row.op} {row.case}: {wrong}")
                if host:
                    plain = back_to_back_ms(call, this.where, budget_s=this.suite.budget_s)
                    in_turns.append((row, call, plain))
                else:
                    this.add_call(row, call)
            except Exception as error:
                if runner == OURS:
                    raise
                failed.append(replace(row, note=failure_note(error)))
    times = host_times_us([call for _, call, _ in in_turns])
    for (row, _, plain), timing in zip(in_turns, times, strict=True):
        this.run.add(replace(row.timed(timing.beside(plain)), timing="host, back to back in turns"))
    for row in failed:
        this.run.add(row)


def _both(fn: Callable[..., Any], case: OpCase) -> Callable[[], object]:
    """Return a forward and a backward pass, as a training step makes them."""
    args = leaves_of(case.name, case.inputs)
    leaves = [x for x in args if x is not None and x.requires_grad]
    dy = torch.ones_like(as_tuple(fn(*args, **case.options))[0])
    return lambda: torch.autograd.grad(as_tuple(fn(*args, **case.options))[0], leaves, dy)


# --- exact arithmetic ------------------------------------------------------------------------------------------------


def _words(modulus: int, zero: Any, n: int) -> Any:
    """Return n random elements below a modulus as canonical words, of the shape and dtype of an encoded zero."""
    bits, limbs = 8 * zero.dtype.itemsize, zero.shape[-1] if zero.ndim > 1 else 1
    rng = np.random.default_rng(5)
    words = rng.integers(0, 1 << bits, (n, limbs), dtype=zero.dtype)
    words[:, -1] = rng.integers(0, modulus >> bits * (limbs - 1), n, dtype=zero.dtype)
    return words if limbs > 1 else words[:, 0]


def _measure_msm(log_n: int, this: _UserRun) -> None:
    """Measure msm with default arguments on the points (n + i) G, whose sum Python's integers know."""
    from accelerant import zk
    from accelerant.algebra.curve.weierstrass import multiply

    curve, n, width = zk.curve("bls12_381_g1"), 1 << log_n, 1 << log_n // 2
    index = torch.arange(n, device=this.where)
    rows, columns = (
        torch.from_numpy(curve.mul(curve.generator, factors, check=False)).to(this.where).view(torch.int64)
        for factors in ([n + i for i in range(0, n, width)], list(range(width)))
    )
    halves = (words[at].view(torch.uint64) for words, at in ((rows, index // width), (columns, index % width)))
    points = curve.add(*halves, check=False)
    words = _words(curve.parameters.order, np.zeros((1, 4), np.uint64), n)
    factors = np.arange(n, 2 * n, dtype=np.uint64)[:, None]
    sums = (words.view("<u2").astype(np.uint64) * factors).sum(0)  # below 2^(16 + 21 + 20)
    total = sum(int(s) << 16 * j for j, s in enumerate(sums)) % curve.parameters.order
    exact = multiply(curve.parameters, total, curve.parameters.generator)
    scalars = torch.from_numpy(words).to(this.where)
    this.add_exact(
        this.row(f"bls12_381_g1 2^{log_n}, default arguments", target=_MSM_MS),
        lambda: zk.msm(scalars, points, "bls12_381_g1"),
        lambda found: "" if curve.decode(found) == exact else "another sum than Python's integers",
    )


def _measure_ntt(name: str, log_n: int, this: _UserRun) -> None:
    """Measure ntt of a plain tensor of canonical words in natural order."""
    from accelerant import zk

    field = zk.field(name)
    x = torch.from_numpy(_words(field.modulus, field.encode([0]), 1 << log_n)).to(this.where)

    def wrong(y: Any) -> str:
        right = field.decode(y[:1])[0] == sum(field.decode(x)) % field.modulus
        back = zk.ntt(y, field=name, inverse=True)
        return "" if right and torch.equal(back.cpu(), x.cpu()) else "the first output is no sum, or no way leads back"

    row = this.row(f"{name} 2^{log_n}, plain tensor")
    this.add_exact(row, lambda: zk.ntt(x, field=name), wrong, host_ms=_HOST_MS)


def _measure_add(n: int, this: _UserRun) -> None:
    """Measure field_add of plain tensors; the target is a share of its kernel's rate."""
    from accelerant import zk

    x, y = suites.operands(n)
    a, b = (torch.from_numpy(words).to(this.where) for words in (x, y))
    kernel = suites.kernel_launch(this.run.device, a, b)
    alone = time_ms(kernel, this.where, budget_s=this.suite.budget_s).p50_ms
    target = alone / _RATE if n > 1 << 20 else None
    row = this.row(f"goldilocks {n:,} words", target=target, bytes=24 * n, note=f"its kernel alone {alone:.4g} ms")
    add = zk.field("goldilocks").add
    this.add_exact(row, lambda: add(a, b), lambda z: suites.first_wrong(x, y, z))


_FIRST_CALL = """
import json, sys, time, numpy as np, torch
from accelerant import zk
curve, n, device = zk.curve("bn254_g1"), 1 << 12, sys.argv[1]
points = np.tile(curve.mul(curve.generator, list(range(1, 65)), check=False), (n // 64, 1, 1))
scalars = np.arange(4 * n, dtype=np.uint64).reshape(n, 4)
points, scalars = (torch.from_numpy(words).to(device) for words in (points, scalars))
wait = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
x = torch.from_numpy(np.ones(n, np.uint64)).to(device)
found = []
for call in (lambda: zk.field("goldilocks").add(x, x), lambda: zk.msm(scalars, points)):
    wait()
    began = time.perf_counter()
    call()
    wait()
    found.append((time.perf_counter() - began) * 1e3)
print(json.dumps(found))
"""
"""A process that has used torch on the device: prints the milliseconds of its first op of ours and of its first sum."""

_PROCESSES, _PROCESS_S = 2, 300.0


def _measure_first(this: _UserRun) -> None:
    """Measure the first op of a process, which starts the backend, and then the first sum, with a filled kernel cache.

    Raises:
        AccelerantError: a process failed.
    """
    labels = ("field_add goldilocks 2^12, starts the backend", "msm bn254_g1 2^12, warm cache")
    times: list[list[float]] = []
    for _ in range(1 + _PROCESSES):
        with python_child(_FIRST_CALL, str(this.where), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            try:
                output, errors = child.communicate(timeout=_PROCESS_S)
            except subprocess.TimeoutExpired:
                child.kill()
                raise AccelerantError(f"first call: its process took longer than {_PROCESS_S:.0f} s") from None
        if child.returncode:
            raise AccelerantError(f"first call: {(errors.strip().splitlines() or ['its process ended'])[-1]}")
        times.append(json.loads(output))
    timing = f"each in a process of its own, {_PROCESSES} times"
    for label, samples in zip(labels, zip(*times[1:], strict=True), strict=True):
        row = this.row(label, target=_FIRST_MS).timed(Timing.of(list(samples), wall=True))
        this.run.add(replace(row, timing=timing))


if __name__ == "__main__":
    run_command(UserSuite)
