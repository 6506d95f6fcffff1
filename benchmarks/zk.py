"""What proofs are made of: field products, number-theoretic transforms, sums of multiples of points, pairings.

Each answer is compared exactly before it is timed: all products and all outputs of a transform with closed forms (the
inputs are geometric sequences), sums of points with the multiple of the generator that Python's integers give, pairings
by their bilinearity. Times are of the public calls on data that is where the call runs: FieldArrays in Montgomery form
for fields; for points canonical words ("prepared": brought to the kernels' form before; "with multiples": as
`curve(...).precompute` keeps them, with their multiples by powers of two).

A case is compared with what bounds it on a GPU: the copy, where memory does; the rate of the 32-bit multiplier, where
arithmetic does (zk_multiplier.py measures it and says what is counted). On a CPU the note has nanoseconds for each
field product instead, and a product's launch is measured without the call around it too. What others take stands in
the note (zk_cases.py), what is to be reached beside the median.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from accelerant import zk
from accelerant.algebra.curve.parameters import curve_of, family_of
from accelerant.algebra.curve.reference import multiply
from accelerant.algebra.field.llvm_kernels import host_form
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import kernel_source
from accelerant.algebra.ntt.reference import bit_reversed, ntt_reference
from accelerant.bench.ceilings import measure_copy
from accelerant.bench.journal import Journal
from accelerant.bench.pieces import Piece, Progress, measure_pieces
from accelerant.bench.record import Environment, Record, Row
from accelerant.bench.timer import Timing, time_ms
from accelerant.errors import AccelerantError
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk import msm, ntt
from accelerant.zk.msm.fixed import FixedBase
from benchmarks import zk_first, zk_inputs
from benchmarks.zk_cases import CPU_CASES, GPU_CASES, Case, chosen
from benchmarks.zk_multiplier import (
    CARRY,
    measure_multiplier,
    msm_multiplies,
    msm_products,
    ntt_multiplies,
)

__all__ = ["cases_on", "measure", "run"]

_TARGETS_OF = "H200"
_SAMPLED = 16
"""Elements that Python's integers compute by themselves, besides the check of all."""

_FIRST_CALLS = 3
_COLD_MS, _WARM_MS = 3000.0, 20.0
"""First calls: with an empty cache, and in a process after it."""

_FIRST_CALL_LIMIT_S = 300
_COUNTED_BY_MEMORY = ("goldilocks", "babybear")
"""Fields whose transforms memory bounds."""


def run(device: ComputeDevice, **options: Any) -> Record:
    """A record of its own; see measure."""
    record = Record(Environment.of(device))
    measure(record, device, **options)
    record.conclude()
    return record


def cases_on(device: ComputeDevice, only: Sequence[str] = ()) -> list[Case]:
    """The cases of a device, or those of them with one of the texts in their names.

    Raises:
        ConfigError: a text that no case has.
    """
    return chosen(GPU_CASES if device.torch_device.startswith("cuda") else CPU_CASES, only)


def measure(
    record: Record,
    device: ComputeDevice,
    *,
    only: Sequence[str] = (),
    budget_s: float = 0.3,
    journal: Journal | None = None,
    until: float | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Measure into a record.

    Args:
        record: gets ceilings and rows.
        device: where.
        only: as cases_on.
        budget_s: seconds of calls behind each figure.
        journal: gets the rows of a case as soon as they are there; those that it has are left out.
        until: the time of time.monotonic() after which no further case is begun.
        progress: told what is measured next.

    Raises:
        ConfigError: a text that no case has.
        AccelerantError: a case gave a wrong answer; the others were measured.
    """
    cases, where = cases_on(device, only), torch.device(device.torch_device)
    progress("zk: ceilings")
    if "copy GB/s" not in record.ceilings:
        record.ceilings |= measure_copy(where, budget_s=budget_s)
    if device.backend == "cuda" and CARRY not in record.ceilings:
        record.ceilings |= measure_multiplier(device, budget_s=budget_s)
    pieces = [
        Piece("zk", case.key, functools.partial(_MEASURES[case.op], _Run(case, device, where, budget_s)))
        for case in cases
    ]
    measure_pieces(record, pieces, where=where, journal=journal, until=until, progress=progress)


@dataclass(frozen=True, slots=True)
class _Run:
    """A case on a device."""

    case: Case
    device: ComputeDevice
    where: torch.device
    budget_s: float

    @property
    def gpu(self) -> bool:
        return self.where.type == "cuda"

    @property
    def place(self) -> str:
        """As the functions of fields and curves name the device."""
        return str(self.where) if self.gpu else "cpu"

    @property
    def target_ms(self) -> float | None:
        """On this device; None where nothing is to be reached."""
        if self.gpu:
            return self.case.target_ms if _TARGETS_OF in self.device.name else None
        return self.case.target_ms if host_form(field_of("bn254_fr")) == "vector" else self.case.plain_ms

    @property
    def multiples_ms(self) -> float | None:
        """The same of a sum over points whose multiples are kept."""
        return self.case.fixed_ms if self.gpu and self.target_ms is not None else self.target_ms

    def row(self, **values: Any) -> Row:
        """One of ours, without its times."""
        base = Row("zk", self.case.op, self.case.name, "accelerant", "own kernels", target=self.target_ms)
        return replace(base, **values)

    def timed(self, row: Row, call: Callable[[], object]) -> Row:
        """The row with the times of a call."""
        return _with(row, time_ms(call, self.where, budget_s=self.budget_s))

    def noted(self, row: Row, record: Record, multiplies: int, products: int) -> Row:
        """The row with the share of the multiplier's rate, or on a CPU with the time of a product; and the peers'."""
        p50, rate = row.p50 or 0.0, record.ceilings.get(CARRY)
        if not self.gpu:
            share = f"{p50 * 1e6 / products:.3g} ns a field product"
        elif multiplies and rate:
            share = f"{100 * multiplies / p50 / 1e9 / rate:.0f}% of the carry-chain multiply rate"
        else:
            share = ""
        apart = f"measured apart: {self.case.peers}" if self.case.peers else ""
        return replace(row, note="; ".join(filter(None, (row.note, share, apart))))


def _with(row: Row, timing: Timing) -> Row:
    return replace(row, p20=timing.p20_ms, p50=timing.p50_ms, p80=timing.p80_ms, samples=timing.samples)


def _wrong(case: Case, what: str) -> AccelerantError:
    return AccelerantError(f"{case.key}: {what}")


# --- products in a field ---------------------------------------------------------------------------------------------


def _field_mul(this: _Run, record: Record, progress: Progress) -> None:
    """Products of two geometric sequences, which are a third one."""
    case, field = this.case, zk.field(this.case.of)
    p, n = field.modulus, 1 << case.log_n
    a, b, g, h = p - 2, p // 3, field.generator, pow(field.generator, p // 5, p)
    progress(f"zk: {case.key}, checked")
    x, y = (zk_inputs.geometric(field, *each, case.log_n, this.place) for each in ((a, g), (b, h)))
    z = x * y
    for i in _sampled(n):
        exact = a * b * pow(g * h, i, p) % p
        if z[i].ints() != exact:
            raise _wrong(case, f"product {i} is {z[i].ints():#x}, not {exact:#x}")
    if not bool((z == zk_inputs.geometric(field, a * b % p, g * h % p, case.log_n, this.place)).all()):
        raise _wrong(case, "a product is not the one of the closed form")
    progress(f"zk: {case.key}")
    size = 3 * n * field.parameters.size_bytes
    target = this.target_ms if this.gpu else None
    row = this.timed(this.row(bytes=size, ceiling="copy" if this.gpu else "", target=target), lambda: x * y)
    record.rows.append(this.noted(row, record, 0, n))
    if not this.gpu:
        alone = this.row(case=f"{case.name}, kernel alone", bytes=size)
        record.rows.append(this.noted(this.timed(alone, _kernel_alone(x, y, z)), record, 0, n))
        left, right = x.ints(), y.ints()
        peer = replace(row, runner="python", implementation="integers", target=None, note="")
        record.rows.append(this.timed(peer, lambda: [u * v % p for u, v in zip(left, right, strict=True)]))


def _kernel_alone(x: zk.FieldArray, y: zk.FieldArray, z: zk.FieldArray) -> Callable[[], object]:
    """A launch on the CPU without the call around it: what one core takes, which is to be reached.

    Raises:
        AccelerantError: its answer is not z.
    """
    field, out = x.field.parameters, HOST.empty(tuple(x.words.shape), x.words.dtype)
    kernel = HOST.provider.compile(kernel_source(field, "field_mul_montgomery"))
    arguments = (*map(HOST.pointer, (x.words, y.words, out)), x.size)

    def launch() -> None:
        HOST.provider.launch(kernel, (x.size,), (1,), arguments)

    launch()
    if not bool((out == z.words).all()):
        raise AccelerantError(f"field_mul {field.name}: the kernel alone gives another product")
    return launch


def _sampled(n: int) -> list[int]:
    """Places: both ends, and some between."""
    between = zk_inputs.splitmix64(n, _SAMPLED).tolist()
    return sorted({0, 1, n // 2, n - 1, *(int(each) % n for each in between)})


# --- transforms ------------------------------------------------------------------------------------------------------

_ORDERS = ("natural_to_bit_reversed", "bit_reversed_to_natural")


def _ntt(this: _Run, record: Record, progress: Progress) -> None:
    """Of a geometric sequence a g^i: output j is a (g^n - 1) / (g w^j - 1)."""
    case, field = this.case, zk.field(this.case.of)
    p, n = field.modulus, 1 << case.log_n
    a, g = p - 2, field.generator
    progress(f"zk: {case.key}, checked")
    x = zk_inputs.geometric(field, a, g, case.log_n, this.place)
    y = ntt(x, order=_ORDERS[0])
    w, sum_of_all = field.parameters.root_of_unity(n), a * (pow(g, n, p) - 1) % p
    for i in _sampled(n):
        exact = sum_of_all * pow(g * pow(w, bit_reversed(i, case.log_n), p) - 1, -1, p) % p
        if y[i].ints() != exact:
            raise _wrong(case, f"output {i} is {y[i].ints():#x}, not {exact:#x}")
    if not bool((y * (zk_inputs.power_table(field, case.log_n, this.place) * g - 1) == sum_of_all).all()):
        raise _wrong(case, "an output is not the one of the closed form")
    if not bool((ntt(y, inverse=True, order=_ORDERS[1]) == x).all()):
        raise _wrong(case, "the inverse transform does not lead back")
    progress(f"zk: {case.key}")
    size = 2 * n * field.parameters.size_bytes
    memory = case.of in _COUNTED_BY_MEMORY
    row = this.row(bytes=size, ceiling="copy" if this.gpu and memory else "")
    row = this.timed(row, lambda: ntt(x, order=_ORDERS[0]))
    multiplies = 0 if memory else ntt_multiplies(field.parameters, case.log_n)
    record.rows.append(this.noted(row, record, multiplies, (case.log_n << case.log_n) // 2))
    if not this.gpu:
        values = x.ints()
        peer = replace(row, runner="python", implementation="integers", target=None, note="")
        record.rows.append(this.timed(peer, lambda: ntt_reference(values, field=case.of, order=_ORDERS[0])))


# --- sums of multiples of points -------------------------------------------------------------------------------------


_PREPARED, _WITH_MULTIPLES = ", points prepared", ", with multiples"


def _msm(this: _Run, record: Record, progress: Progress) -> None:
    """Plainly, over points in the kernels' form, and over points whose multiples are kept."""
    case, curve = this.case, zk.curve(this.case.of)
    n = 1 << case.log_n
    progress(f"zk: {case.key}, inputs")
    words = zk_inputs.msm_scalars(curve.scalar_field.parameters, n)
    exact = zk_inputs.msm_answer(curve, words)
    points = zk_inputs.msm_points(curve, n, this.where if this.gpu else None)
    scalars = torch.from_numpy(words).to(this.where) if this.gpu else words

    def measured(what: str, call: Callable[[], Any], **values: Any) -> None:
        progress(f"zk: {case.key}{what}")
        found = curve.decode(call())
        if found != exact:
            raise _wrong(case, f"the sum{what} is {found}, not {exact}")
        size = n * (32 + 2 * curve.field.parameters.size_bytes)
        row = this.timed(this.row(case=case.name + what, bytes=size, **values), call)
        counted = {"precomputed": what == _WITH_MULTIPLES}
        multiplies = msm_multiplies(curve.parameters, n, **counted)
        record.rows.append(this.noted(row, record, multiplies, sum(msm_products(curve.parameters, n, **counted))))

    measured("", lambda: msm(scalars, points, case.of, check=False))
    for what, multiples in ((_PREPARED, False), (_WITH_MULTIPLES, True)):
        progress(f"zk: {case.key}{what}")
        base = FixedBase(case.of, points, check=False, multiples=multiples)
        if multiples and "multiples" not in base.explain():
            return  # they had no room, or are not worth their time
        target = this.multiples_ms if multiples else this.target_ms
        measured(what, functools.partial(base.msm, scalars), reason=base.explain(), target=target)


# --- pairings --------------------------------------------------------------------------------------------------------


def _pairing(this: _Run, record: Record, progress: Progress) -> None:
    """e(a P, Q) e(-P, a Q) e(b P, Q) e(-b P, Q), which is 1."""
    case, family = this.case, family_of(this.case.of)
    g1, g2 = curve_of(f"{case.of}_g1"), curve_of(f"{case.of}_g2")
    a, b = family.r // 3, family.r // 7

    def first(factor: int) -> Any:
        return multiply(g1, factor % family.r, g1.generator)

    second = multiply(g2, a, g2.generator)
    left = zk.curve(g1.name).encode([first(a), first(-1), first(b), first(-b)])
    other = zk.curve(g1.name).encode([first(a), first(-1), first(b), first(1 - b)])
    right = zk.curve(g2.name).encode([g2.generator, second, g2.generator, g2.generator])
    progress(f"zk: {case.key}")
    if not zk.pairing_product_is_one(left, right, case.of):
        raise _wrong(case, "a product that is 1 is said not to be")
    if zk.pairing_product_is_one(other, right, case.of):
        raise _wrong(case, "a product that is not 1 is said to be")
    row = this.row(case=f"{case.name}, product of 4", note="points checked")
    record.rows.append(this.timed(row, lambda: zk.pairing_product_is_one(left, right, case.of)))


# --- first calls -----------------------------------------------------------------------------------------------------


def _first_call(this: _Run, record: Record, progress: Progress) -> None:
    """In new processes: with an empty cache, and with what that one left."""
    op, found = this.case.of, {"cold cache": list[_First](), "second process, warm cache": list[_First]()}
    for i in range(_FIRST_CALLS):
        progress(f"zk: {this.case.key}, {i + 1} of {_FIRST_CALLS}")
        with tempfile.TemporaryDirectory() as folder:
            for each in found.values():
                each.append(_in_new_process(op, this.place, folder))
    for (name, calls), target in zip(found.items(), (_COLD_MS, _WARM_MS), strict=True):
        times = sorted(call.ms for call in calls)
        ready = statistics.median(call.ready_ms for call in calls)
        row = this.row(case=f"{op}, {name}", target=target, p20=times[0], p50=statistics.median(times), p80=times[-1])
        timing = f"each in a process of its own, {ready:.0f} ms after it turned to the device"
        record.rows.append(replace(row, samples=tuple(times), timing=timing))


@dataclass(frozen=True, slots=True)
class _First:
    """What zk_first.py prints."""

    ms: float
    ready_ms: float
    right: bool


def _in_new_process(op: str, place: str, folder: str) -> _First:
    """Make the first call of an op.

    Raises:
        AccelerantError: the process failed, or its answer was wrong.
    """
    program = [sys.executable, "-P", str(Path(zk_first.__file__)), op, place]
    environment = os.environ | {"ACCELERANT_CACHE_DIR": folder, "CUDA_CACHE_PATH": folder}
    try:
        done = subprocess.run(
            program, env=environment, capture_output=True, text=True, timeout=_FIRST_CALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise AccelerantError(f"first call {op}: took longer than {_FIRST_CALL_LIMIT_S} s") from None
    if done.returncode:
        raise AccelerantError(f"first call {op}: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}")
    found = _First(**json.loads(done.stdout))
    if not found.right:
        raise AccelerantError(f"first call {op}: the answer is wrong")
    return found


_MEASURES: dict[str, Callable[[_Run, Record, Progress], None]] = {
    "field_mul": _field_mul,
    "ntt": _ntt,
    "msm": _msm,
    "pairing": _pairing,
    "first call": _first_call,
}
