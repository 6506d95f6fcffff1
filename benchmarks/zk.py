"""Field products, number-theoretic transforms, multi-scalar multiplications and pairings: the parts of proofs.

    python -m benchmarks.zk --only msm --only "ntt bn254"

Each answer is compared exactly before it is timed: all products and all outputs of a transform with closed forms (the
inputs are geometric sequences), multi-scalar multiplications with the multiple of the generator that Python's integers
give, pairings by their bilinearity. Times are of the public calls on data on the device: FieldArrays in Montgomery
form for fields, canonical words for points ("points prepared": brought to the kernels' form before; "with multiples":
as `curve(...).precompute` keeps them, with their multiples by powers of two).

On a GPU a case is compared with its bound: the copy rate where memory bounds it, the rate of the 32-bit multiplier
where arithmetic does (zk_multiplier.py). On a CPU the note has nanoseconds for each field product, and a product's
launch is measured without the call around it too. Other libraries need builds of their own and are not run here: the
notes have their times as measured apart, on a GPU on one H200 (driver 580, CUDA 13.0), medians, data on the device; on
a CPU on two cores.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from accelerant import zk
from accelerant.algebra.curve.parameters import curve_of, family_of
from accelerant.algebra.curve.weierstrass import multiply
from accelerant.algebra.field.llvm_kernels import host_form
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import field_of
from accelerant.algebra.field.program import grid_and_block, kernel_source
from accelerant.algebra.field.words import dtype_of
from accelerant.algebra.ntt.plan import bit_reversed, ntt_reference
from accelerant.bench.neural_cases import parse_sizes
from accelerant.bench.record import NAIVE, Row
from accelerant.bench.suite import CpuColumn, Suite, SuiteCase, SuiteRun, option
from accelerant.bench.timer import Timing, back_to_back_ms, back_to_back_times_ms, threads_text, time_ms
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError, ConfigError
from accelerant.runtime.provider import ComputeDevice
from accelerant.zk import msm, ntt
from accelerant.zk.multi_scalar import FixedBase
from benchmarks import zk_first_call, zk_inputs
from benchmarks.zk_multiplier import CARRY, measure_multiplier, msm_multiplies, msm_products, ntt_multiplies

__all__ = ["CPU_CASES", "GPU_CASES", "ZkCase", "ZkSuite"]

_SAMPLED = 16
"""Elements that Python's integers compute by themselves, besides the check of all."""

_ARRAY_SHARE = 0.95
"""The share of bare launches' speed that products of arrays in a loop are asked for."""

_FIRST_CALLS = 3
_COLD_MS, _WARM_MS = 3000.0, 20.0
"""Targets of first calls: with an empty cache, and in a process after it."""

_FIRST_CALL_LIMIT_S = 300
_COLUMN_LOG_N = 18
"""Most elements or points of the CPU column, as a power of two; more are scaled from these."""

_BOUND_BY_MEMORY = ("goldilocks", "babybear")
"""Fields whose transforms memory bounds."""


# --- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ZkCase:
    """A case of the suite.

    Attributes:
        op: "field_mul", "field_array" (products of arrays in a loop beside bare launches), "ntt", "msm", "pairing" or
            "first call".
        of: name of the field, the curve or the pairing; for a first call the op.
        log_n: log2 of the elements or points.
        target_ms: to reach on an H200, or on a CPU with AVX512-IFMA.
        plain_ms: to reach on a CPU without AVX512-IFMA.
        fixed_ms: to reach with precomputed multiples of the points.
        peers: other libraries' times.
    """

    op: str
    of: str
    log_n: int = 0
    target_ms: float | None = None
    plain_ms: float | None = None
    fixed_ms: float | None = None
    peers: str = ""

    @property
    def name(self) -> str:
        """The case, as rows have it."""
        return f"{self.of} 2^{self.log_n}" if self.log_n else self.of

    @property
    def key(self) -> str:
        """Op and case."""
        return f"{self.op} {self.name}"


_FIRST_CALL_CASES = tuple(ZkCase("first call", op) for op in ("field_mul", "ntt", "msm"))

GPU_CASES = (
    ZkCase("field_mul", "bn254_fr", 24, 0.41),
    ZkCase("ntt", "bn254_fr", 20, 0.22, peers="era-bellman-cuda 0.245, sppark 0.266, ICICLE 0.477 ms"),
    ZkCase("ntt", "bn254_fr", 24, 3.8, peers="era-bellman-cuda 4.19, sppark 4.40, ICICLE 6.2 ms"),
    ZkCase("ntt", "goldilocks", 20, 0.038, peers="era-boojum 0.043, sppark 0.057 ms"),
    ZkCase("ntt", "goldilocks", 24, 0.45, peers="era-boojum 0.544, sppark 0.61 ms"),
    ZkCase("ntt", "babybear", 20, 0.030, peers="ICICLE 0.036, sppark 0.038 ms"),
    ZkCase("ntt", "babybear", 23, 0.11, peers="sppark 0.129, ICICLE 0.145 ms"),
    ZkCase("msm", "bn254_g1", 16, 1.4, peers="era-bellman-cuda 1.68, sppark 4.1, ICICLE v2 4.80 ms"),
    ZkCase("msm", "bn254_g1", 18, 1.9, peers="era-bellman-cuda 2.22, ICICLE v2 6.35, sppark 12.6 ms"),
    ZkCase("msm", "bn254_g1", 20, 4.1, peers="era-bellman-cuda 4.54, ICICLE v2 11.0, sppark 11.9 ms"),
    ZkCase("msm", "bn254_g1", 22, 12.6, peers="era-bellman-cuda 14.0, sppark 26, ICICLE 30 ms"),
    ZkCase("msm", "bn254_g1", 23, 22.9, peers="era-bellman-cuda 25.4, sppark 47, ICICLE 52 ms"),
    ZkCase(
        "msm", "bls12_381_g1", 20, 10.0, fixed_ms=8.0,
        peers="sppark 20.1, ICICLE v2 20.5 ms; yrrid, precomputed, 9.4 ms",
    ),
    ZkCase(
        "msm", "bls12_381_g1", 22, 30.0, fixed_ms=23.0,
        peers="ICICLE v2 51, sppark 52 ms; yrrid, precomputed, 25.8 ms",
    ),
    ZkCase("field_array", "goldilocks", 20),
    ZkCase("field_array", "goldilocks", 25),
    *_FIRST_CALL_CASES,
)  # fmt: skip

CPU_CASES = (
    ZkCase(
        "field_mul", "bn254_fr", 14, 7e-6 * 2**14, 25e-6 * 2**14,
        peers="C: 25.8 ns each, with AVX512-IFMA 5.5; galois 1151",
    ),
    ZkCase("ntt", "bn254_fr", 16),
    ZkCase("ntt", "goldilocks", 16),
    ZkCase("ntt", "babybear", 16),
    ZkCase("msm", "bn254_g1", 14),
    ZkCase("msm", "bn254_g1", 16, 135.0, 270.0, peers="snarkjs 2700 ms"),
    ZkCase("pairing", "bn254", 0, 10.0, 10.0),
    ZkCase("pairing", "bls12_381", 0, 10.0, 10.0),
    *_FIRST_CALL_CASES,
)  # fmt: skip
"""The field product has few enough elements for one core: a launch is split from 32768 on."""


@dataclass(frozen=True)
class ZkSuite(Suite):
    """Measure field products, number-theoretic transforms, multi-scalar multiplications, pairings, and first calls."""

    name = "zk"
    examples = (
        "", "--only msm --only ntt", '--only "bn254_g1 2^20" --json', "--only msm --size 2^10..2^16",
        "--device cpu --list",
    )  # fmt: skip

    only: tuple[str, ...] = option((), "Only cases with this text in their names; may be repeated.", metavar="TEXT")
    size: tuple[str, ...] = option(
        (), "Elements or points instead of the cases' own, powers of two: 2^16, or 2^10..2^16; may be repeated.",
        metavar="SIZE",
    )  # fmt: skip
    budget_s: float = option(0.3, "Seconds of calls behind each figure.", min=0.0, same=True)

    def resolve(self, device: ComputeDevice) -> Self:
        """Return the suite.

        Raises:
            ConfigError: no case has one of the texts, which lists the cases; or a size is no power of two.
        """
        for size in parse_sizes(self.size):
            if len(size) != 1 or size[0] & (size[0] - 1) or size[0] < 2:
                raise ConfigError(f"--size: wanted powers of two from 2^1 on, got {'x'.join(map(str, size))}")
        cases = _cases_on(device.torch_device.startswith("cuda"))
        for text in self.only:
            if not any(text.lower() in case.key.lower() for case in cases):
                raise ConfigError(
                    f"--only: no case has {text!r} in its name; there are {', '.join(case.key for case in cases)}"
                )
        return self

    def chosen(self, gpu: bool) -> list[ZkCase]:
        """Return the cases of a device that have one of the texts in their keys, in any letter case."""
        texts = [text.lower() for text in self.only]
        cases = [case for case in _cases_on(gpu) if not texts or any(text in case.key.lower() for text in texts)]
        if not self.size:
            return cases
        kinds = dict.fromkeys((case.op, case.of) for case in cases if case.log_n)
        return [ZkCase(*kind, size.bit_length() - 1) for kind in kinds for (size,) in parse_sizes(self.size)]

    def prepare(self, run: SuiteRun) -> None:
        """Measure the copy rate and, on an NVIDIA GPU, the multiplier's rates."""
        run.require_ceiling("copy", self.budget_s)
        if run.device.backend == "cuda" and CARRY not in run.record.ceilings:
            run.record.ceilings |= measure_multiplier(run.device, budget_s=self.budget_s)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the chosen cases."""
        return [
            SuiteCase(
                case.key, functools.partial(self._measure, case),
                on_cpu=None if case.op == "first call" else functools.partial(_on_cpu, case),
            )
            for case in self.chosen(run.gpu)
        ]  # fmt: skip

    def _measure(self, case: ZkCase, run: SuiteRun) -> None:
        _MEASURES[case.op](_ZkRun(case, run, self.budget_s))

    def covers(self, row: Row) -> bool:
        """Return whether a baseline's row is of a chosen case of either device."""
        cases = {case.key for gpu in (True, False) for case in self.chosen(gpu)}
        return row.suite == self.name and any(f"{row.op} {row.case}".startswith(key) for key in cases)


def _cases_on(gpu: bool) -> tuple[ZkCase, ...]:
    return GPU_CASES if gpu else CPU_CASES


def _on_cpu(case: ZkCase, run: SuiteRun) -> CpuColumn:
    """Return the CPU's times for the rows of a case, scaled from fewer elements or points where it has many."""
    few = replace(case, log_n=min(case.log_n, _COLUMN_LOG_N))
    _MEASURES[case.op](_ZkRun(few, run, 0.0, column=True))
    note = threads_text() + (f", scaled from 2^{few.log_n}" if few.log_n < case.log_n else "")
    return {
        (row.op, row.case.replace(few.name, case.name, 1)): ((row.p50 or 0.0) * 2 ** (case.log_n - few.log_n), note)
        for row in run.record.rows
    }


@dataclass(frozen=True, slots=True)
class _ZkRun:
    """A case being measured; `column` leaves out what only the CPU's own rows have."""

    case: ZkCase
    run: SuiteRun
    budget_s: float
    column: bool = False

    @property
    def device_name(self) -> str:
        """The device as the functions of fields and curves name it."""
        return str(self.run.torch_device) if self.run.gpu else "cpu"

    @property
    def target_ms(self) -> float | None:
        if self.run.gpu:
            return self.case.target_ms if self.run.is_model("H200") else None
        return self.case.target_ms if host_form(field_of("bn254_fr")) == "vector" else self.case.plain_ms

    def row(self, **values: Any) -> Row:
        """Return a row of ours without its times."""
        base = Row("zk", self.case.op, self.case.name, "accelerant", "own kernels", target=self.target_ms)
        return replace(base, **values)

    def timed(self, row: Row, call: Callable[[], object], plain: Timing | None = None) -> Row:
        """Return the row with the times of a call, and the wall times of a user's plain one, if that is another."""
        timing = time_ms(call, self.run.torch_device, budget_s=self.budget_s)
        return row.timed(timing if plain is None else timing.beside(plain))

    def plain(self, call: Callable[[], object]) -> Timing | None:
        """Return the wall times of a user's plain call: default arguments, canonical words, nothing prepared."""
        return None if self.column else back_to_back_ms(call, self.run.torch_device, budget_s=self.budget_s / 2)

    def words(self, x: zk.FieldArray) -> Any:
        """Return canonical words: an array, on a GPU a tensor there."""
        words = x.canonical()
        return torch.from_numpy(words).to(self.run.torch_device) if self.run.gpu else words

    def noted(self, row: Row, multiplies: int, products: int) -> Row:
        """Return the row with a note on its bound and on the peers.

        Args:
            multiplies: wide multiply-adds of the call; 0 where memory bounds it.
            products: field products of the call.
        """
        p50, rate = row.p50 or 0.0, self.run.record.ceilings.get(CARRY)
        if not self.run.gpu:
            share = f"{p50 * 1e6 / products:.3g} ns a field product"
        elif multiplies and rate:
            share = f"{100 * multiplies / p50 / 1e9 / rate:.0f}% of the carry-chain multiply rate"
        else:
            share = ""
        apart = f"measured apart: {self.case.peers}" if self.case.peers else ""
        return replace(row, operations=products, note="; ".join(filter(None, (row.note, share, apart))))

    def progress(self, text: str = "") -> None:
        self.run.progress(f"zk: {self.case.key}{text}")

    def wrong(self, text: str) -> AccelerantError:
        return AccelerantError(f"{self.case.key}: {text}")


# --- field products --------------------------------------------------------------------------------------------------


def _field_mul(this: _ZkRun) -> None:
    """Measure products of two geometric sequences, which are a third one."""
    case, run, field = this.case, this.run, zk.field(this.case.of)
    p, n = field.modulus, 1 << case.log_n
    a, b, g, h = p - 2, p // 3, field.generator, pow(field.generator, p // 5, p)
    this.progress(", checked")
    x, y = (zk_inputs.geometric(field, *start, case.log_n, this.device_name) for start in ((a, g), (b, h)))
    z = x * y
    for i in _sampled(n):
        exact = a * b * pow(g * h, i, p) % p
        if z[i].ints() != exact:
            raise this.wrong(f"product {i} is {z[i].ints():#x}, not {exact:#x}")
    if not bool((z == zk_inputs.geometric(field, a * b % p, g * h % p, case.log_n, this.device_name)).all()):
        raise this.wrong("a product is not the one of the closed form")
    this.progress()
    size = 3 * n * field.parameters.size_bytes
    target = this.target_ms if run.gpu else None
    left, right = this.words(x), this.words(y)
    row = this.row(bytes=size, ceiling="copy" if run.gpu else "", target=target)
    row = this.timed(row, lambda: x * y, this.plain(lambda: field.mul(left, right)))
    run.add(this.noted(row, 0, n))
    if not run.gpu and not this.column:
        alone = this.row(case=f"{case.name}, kernel alone", bytes=size)
        run.add(this.noted(this.timed(alone, _kernel_alone(x, y, z)), 0, n))
        ints = list(zip(x.ints(), y.ints(), strict=True))
        peer = this.row(case=case.name, runner=NAIVE, implementation="integers", bytes=size, target=None)
        run.add(this.timed(peer, lambda: [u * v % p for u, v in ints]))


def _field_array(this: _ZkRun) -> None:
    """Measure x * y in a loop, in turns with the same kernel launched on memory that is there."""
    case, run, field = this.case, this.run, zk.field(this.case.of)
    x, y = (
        zk_inputs.geometric(field, start, field.generator, case.log_n, this.device_name)
        for start in (3, field.modulus - 2)
    )
    alone = _kernel_alone(x, y, x * y)
    this.progress()
    array, bare = back_to_back_times_ms([lambda: x * y, alone], run.torch_device, budget_s=3 * this.budget_s)
    share, size = bare.p50_ms / array.p50_ms, 3 * (1 << case.log_n) * field.parameters.size_bytes
    note = f"{share:.3f} of the speed of bare launches (asked: {_ARRAY_SHARE:.2f})"
    run.add(this.row(bytes=size, ceiling="copy", target=bare.p50_ms / _ARRAY_SHARE, note=note).timed(array))
    run.add(this.row(case=f"{case.name}, bare launches", bytes=size, ceiling="copy", target=None).timed(bare))


def _kernel_alone(x: zk.FieldArray, y: zk.FieldArray, z: zk.FieldArray) -> Callable[[], object]:
    """Return a launch without the call around it, on the CPU of one core, that writes memory of its own.

    Raises:
        AccelerantError: its answer is not z.
    """
    field, space, entry = x.field.parameters, x.space, "field_mul_montgomery"
    out = space.empty(tuple(x.words.shape), dtype_of(field))
    kernel = space.provider.compile(kernel_source(field, entry))
    arguments = (*map(space.pointer, (x.words, y.words, out)), x.size)
    blocks, threads = (x.size, 1) if space is HOST else grid_and_block(entry, x.size)

    def launch() -> None:
        space.provider.launch(kernel, (blocks,), (threads,), arguments)

    launch()
    if not bool((out == z.words).all()):
        raise AccelerantError(f"field_mul {field.name}: the kernel alone gives another product")
    return launch


def _sampled(n: int) -> list[int]:
    """Return indices at both ends, in the middle, and random ones."""
    between = zk_inputs.splitmix64(n, _SAMPLED).tolist()
    return sorted({0, 1, n // 2, n - 1, *(int(index) % n for index in between)})


# --- transforms ------------------------------------------------------------------------------------------------------

_ORDERS = ("natural_to_bit_reversed", "bit_reversed_to_natural")


def _ntt(this: _ZkRun) -> None:
    """Measure the transform of a geometric sequence a g^i: output j is a (g^n - 1) / (g w^j - 1)."""
    case, run, field = this.case, this.run, zk.field(this.case.of)
    p, n = field.modulus, 1 << case.log_n
    a, g = p - 2, field.generator
    this.progress(", checked")
    x = zk_inputs.geometric(field, a, g, case.log_n, this.device_name)
    y = ntt(x, order=_ORDERS[0])
    w, numerator = field.parameters.root_of_unity(n), a * (pow(g, n, p) - 1) % p
    for i in _sampled(n):
        exact = numerator * pow(g * pow(w, bit_reversed(i, case.log_n), p) - 1, -1, p) % p
        if y[i].ints() != exact:
            raise this.wrong(f"output {i} is {y[i].ints():#x}, not {exact:#x}")
    if not bool((y * (zk_inputs.power_table(field, case.log_n, this.device_name) * g - 1) == numerator).all()):
        raise this.wrong("an output is not the one of the closed form")
    if not bool((ntt(y, inverse=True, order=_ORDERS[1]) == x).all()):
        raise this.wrong("the inverse transform does not lead back")
    this.progress()
    memory = case.of in _BOUND_BY_MEMORY
    row = this.row(bytes=2 * n * field.parameters.size_bytes, ceiling="copy" if run.gpu and memory else "")
    words = this.words(x)
    row = this.timed(row, lambda: ntt(x, order=_ORDERS[0]), this.plain(lambda: ntt(words, field=case.of)))
    multiplies = 0 if memory else ntt_multiplies(field.parameters, case.log_n)
    run.add(this.noted(row, multiplies, (case.log_n << case.log_n) // 2))
    if not run.gpu and not this.column:
        values = x.ints()
        peer = this.row(runner=NAIVE, implementation="integers", bytes=row.bytes, target=None)
        run.add(this.timed(peer, lambda: ntt_reference(values, field=case.of, order=_ORDERS[0])))


# --- multi-scalar multiplications ------------------------------------------------------------------------------------

_PREPARED, _WITH_MULTIPLES = ", points prepared", ", with multiples"


def _msm(this: _ZkRun) -> None:
    """Measure sums over canonical points, over points in the kernels' form, and over points with their multiples."""
    case, run, curve = this.case, this.run, zk.curve(this.case.of)
    n = 1 << case.log_n
    this.progress(", inputs")
    words = zk_inputs.msm_scalars(curve.scalar_field.parameters, n)
    exact = zk_inputs.msm_answer(curve, words)
    points = zk_inputs.msm_points(curve, n, run.torch_device if run.gpu else None)
    scalars = torch.from_numpy(words).to(run.torch_device) if run.gpu else words

    def measure(variant: str, call: Callable[[], Any], **values: Any) -> None:
        this.progress(variant)
        result = curve.decode(call())
        if result != exact:
            raise this.wrong(f"the sum{variant} is {result}, not {exact}")
        size = n * (32 + 2 * curve.field.parameters.size_bytes)
        row = this.timed(this.row(case=case.name + variant, bytes=size, **values), call, plain)
        counted = {"precomputed": variant == _WITH_MULTIPLES}
        multiplies = msm_multiplies(curve.parameters, n, **counted)
        run.add(this.noted(row, multiplies, sum(msm_products(curve.parameters, n, **counted))))

    plain = this.plain(lambda: msm(scalars, points, case.of))
    measure("", lambda: msm(scalars, points, case.of, check=False))
    for variant, multiples in ((_PREPARED, False), (_WITH_MULTIPLES, True)):
        this.progress(variant)
        base = FixedBase(case.of, points, check=False, multiples=multiples)
        if multiples and "multiples" not in base.explain():
            return  # they do not fit, or are not worth their time
        target = case.fixed_ms if multiples and run.gpu and this.target_ms is not None else this.target_ms
        measure(variant, functools.partial(base.msm, scalars), reason=base.explain(), target=target)


# --- pairings --------------------------------------------------------------------------------------------------------


def _pairing(this: _ZkRun) -> None:
    """Measure e(a P, Q) e(-P, a Q) e(b P, Q) e(-b P, Q), which is 1."""
    case, family = this.case, family_of(this.case.of)
    g1, g2 = curve_of(f"{case.of}_g1"), curve_of(f"{case.of}_g2")
    a, b = family.r // 3, family.r // 7

    def first(factor: int) -> Any:
        return multiply(g1, factor % family.r, g1.generator)

    second = multiply(g2, a, g2.generator)
    left = zk.curve(g1.name).encode([first(a), first(-1), first(b), first(-b)])
    other = zk.curve(g1.name).encode([first(a), first(-1), first(b), first(1 - b)])
    right = zk.curve(g2.name).encode([g2.generator, second, g2.generator, g2.generator])
    this.progress()
    if not zk.pairing_product_is_one(left, right, case.of):
        raise this.wrong("a product that is 1 is said not to be")
    if zk.pairing_product_is_one(other, right, case.of):
        raise this.wrong("a product that is not 1 is said to be")
    row = this.row(case=f"{case.name}, product of 4", note="points checked")
    this.run.add(this.timed(row, lambda: zk.pairing_product_is_one(left, right, case.of)))


# --- first calls -----------------------------------------------------------------------------------------------------


def _first_call(this: _ZkRun) -> None:
    """Measure first calls in new processes: with an empty cache, and with what that process left in it."""
    op, calls = this.case.of, {"cold cache": list[_FirstCall](), "second process, warm cache": list[_FirstCall]()}
    for i in range(_FIRST_CALLS):
        this.progress(f", {i + 1} of {_FIRST_CALLS}")
        with tempfile.TemporaryDirectory() as folder:
            for results in calls.values():
                results.append(_in_new_process(op, this.device_name, folder))
    for (name, results), target in zip(calls.items(), (_COLD_MS, _WARM_MS), strict=True):
        times = Timing.of(sorted(call.ms for call in results), wall=True)
        ready = statistics.median(call.ready_ms for call in results)
        timing = f"each in a process of its own, {ready:.0f} ms after it turned to the device"
        this.run.add(this.row(case=f"{op}, {name}", target=target, timing=timing).timed(times))


@dataclass(frozen=True, slots=True)
class _FirstCall:
    """The output of zk_first_call.py."""

    ms: float
    ready_ms: float
    right: bool


def _in_new_process(op: str, device: str, folder: str) -> _FirstCall:
    """Make the first call of an op with a cache folder.

    Raises:
        AccelerantError: the process failed, or its answer was wrong.
    """
    program = [sys.executable, "-P", str(Path(zk_first_call.__file__)), op, device]
    environment = os.environ | {"ACCELERANT_CACHE_DIR": folder, "CUDA_CACHE_PATH": folder}
    try:
        done = subprocess.run(
            program, env=environment, capture_output=True, text=True, timeout=_FIRST_CALL_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise AccelerantError(f"first call {op}: took longer than {_FIRST_CALL_LIMIT_S} s") from None
    if done.returncode:
        raise AccelerantError(f"first call {op}: {(done.stderr.strip().splitlines() or ['it ended'])[-1]}")
    result = _FirstCall(**json.loads(done.stdout))
    if not result.right:
        raise AccelerantError(f"first call {op}: the answer is wrong")
    return result


_MEASURES: dict[str, Callable[[_ZkRun], None]] = {
    "field_mul": _field_mul,
    "field_array": _field_array,
    "ntt": _ntt,
    "msm": _msm,
    "pairing": _pairing,
    "first call": _first_call,
}


if __name__ == "__main__":
    run_command(ZkSuite)
