"""Proving keys in the CPU's memory: constraint matrices, sums, the choice of the device, timings of stages.

The CPU kernels' limbs differ from the file's, so points are copied once, in chunks, and the pages of the file are
released as they are read. A key and its proofs take less than twice the file's size.

With n constraints padded to a power of two, w_n of order n, g = w_2n and a, b, c the polynomials with the values
(A w)_i, (B w)_i, (A w)_i (B w)_i at w_n^i, the scalars of the section H are

    a(x) b(x) - c(x) at x = g w_n^j

There is no division by x^n - 1, which is -2 on the whole coset: the points of H are the Lagrange polynomials of the
2n-th roots of unity at odd indices, divided by it. Source: the files of snarkjs; the equations are Groth's, eprint
2016/260.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.llvm_packed import PackedLimbs
from accelerant.algebra.field.memory_space import HOST, MemorySpace, space_at, spaces_at
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.program import defined, field_text, read_files
from accelerant.algebra.field.words import not_below
from accelerant.algebra.msm.cpu import CpuBases, cpu_plan
from accelerant.algebra.ntt.launch import transform
from accelerant.config import settings
from accelerant.errors import BackendUnavailable, ConfigError, ShapeError
from accelerant.runtime.compilation.kernel import KernelSource, LlvmProgram, portable_header
from accelerant.runtime.compilation.llvm import FunctionBuilder, program
from accelerant.runtime.files import clipped
from accelerant.runtime.host import usable_cores
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, launch, sole_record
from accelerant.runtime.provider import compile_seconds
from accelerant.runtime.registry import DeviceLike, is_automatic
from accelerant.zk.formats.circuit import Witness
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.multi_scalar import Devices, run_sums

U64 = npt.NDArray[np.uint64]
Words = Any

BLOCK = 128  # Threads of a block of device.c, a power of two
ELEMENTS_PER_THREAD = 8  # Elements of a thread of groth16_unreduced
LONG_ROW = 64  # Rows of more entries are summed by a block each; one thread would hold up its warp


def snarkjs_scalar_field(family: Family) -> Field:
    """Return the scalar field with the roots of snarkjs, powers of the least non-square: 5 on both families."""
    field = FIELDS[f"{family.name}_fr"]
    p = field.modulus
    return dataclasses.replace(field, generator=next(g for g in range(2, p) if pow(g, (p - 1) // 2, p) == p - 1))


# --- CPU -------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SparseMatrix:
    """A matrix (CSR) of four-word values: row i has entries starts[i] to starts[i + 1]; equal places add up."""

    field: Field
    starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.uint32]
    values: U64
    min_columns: int

    @classmethod
    def from_entries(
        cls, field: Field, n_rows: int, rows: npt.NDArray[np.integer], columns: npt.NDArray[np.integer], values: U64
    ) -> SparseMatrix:
        """Sort entries by row, values being any words (n, 4); ShapeError for a row beyond n_rows."""
        if len(rows) and int(rows.max()) >= n_rows:
            raise ShapeError(f"an entry is in row {int(rows.max())} of {n_rows}")
        order = np.argsort(rows, kind="stable")
        starts = np.zeros(n_rows + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=n_rows), out=starts[1:])
        min_columns = 1 + int(columns.max()) if len(columns) else 0
        sorted_columns = np.ascontiguousarray(columns[order], np.uint32)
        return cls(field, starts, sorted_columns, np.ascontiguousarray(values[order], np.uint64), min_columns)

    @classmethod
    def from_coefficients(cls, field: Field, domain_size: int, coefficients: npt.NDArray[np.void]) -> SparseMatrix:
        """Stack A on B, (2 domain_size, signals), from a key's coefficients (zk.formats.COEFFICIENT, in range)."""
        rows = coefficients["matrix"].astype(np.int64) * domain_size + coefficients["row"]
        return cls.from_entries(field, 2 * domain_size, rows, coefficients["signal"], coefficients["value"])

    @property
    def n_rows(self) -> int:
        """Number of rows."""
        return len(self.starts) - 1

    @property
    def n_entries(self) -> int:
        """Number of stored entries."""
        return len(self.columns)

    def times(self, x: U64, out: U64 | None = None) -> U64:
        """Return the product, (n_rows, 4), of reduced x (n, 4), divided by R = 2^256; ShapeError for other arrays."""
        limbs, shape = self.field.limbs, (self.n_rows, self.field.limbs)
        if x.shape[1:] != (limbs,) or len(x) < self.min_columns:
            raise ShapeError(f"x must be (n, {limbs}) with n at least {self.min_columns}, got {x.shape}")
        z = np.empty(shape, np.uint64) if out is None else out
        if z.shape != shape or z.dtype != np.uint64 or not z.flags.carray:
            raise ShapeError(f"out must be {shape}, uint64, contiguous; got {z.shape}, {z.dtype}")
        size, entries = self.field.size_bytes, self.n_entries
        case = f"{self.n_rows}x{len(x)} {entries} entries {self.field.name}"
        size_bytes = entries * (size + 4) + self.n_rows * (size + 8) + len(x) * size
        record = _record(HOST, "llvm", case, size_bytes, entries)
        arrays = (self.values, self.columns, self.starts, x, z)
        with RecordedLaunch(record, HOST.provider, HOST.index):
            launch(HOST, _rows_source(self.field), "sparse_rows", self.n_rows, 1, arrays, self.n_rows)
        return z


def quotient(rows: SparseMatrix, witness: U64) -> U64:
    """Return the scalars of H, (domain_size, 4), of a witness (n, 4), canonical, by SparseMatrix.from_coefficients."""
    field, n = rows.field, rows.n_rows // 2
    values = np.empty((3, n, field.limbs), np.uint64)
    rows.times(witness, out=values[:2].reshape(2 * n, field.limbs))
    values[2] = field_launch.elementwise(HOST, field, "mul", "montgomery", values[0], values[1])
    _to_coset(HOST, field, values, n)
    product = field_launch.elementwise(HOST, field, "mul", "montgomery", values[0], values[1])
    difference = field_launch.elementwise(HOST, field, "sub", "montgomery", product, values[2])
    scalars: U64 = field_launch.elementwise(HOST, field, "from_montgomery", "montgomery", difference)
    return scalars


def _to_coset(space: MemorySpace, field: Field, values: Words, n: int) -> None:
    """Interpolate on the domain and evaluate on its coset by w_2n, in place."""
    transform(space, field, values, inverse=True, coset=1, order="natural_to_bit_reversed", out=values)
    g = field.root_of_unity(2 * n)
    transform(space, field, values, inverse=False, coset=g, order="bit_reversed_to_natural", out=values)


@functools.lru_cache(maxsize=1024)
def _record(space: MemorySpace, dialect: str, shapes: str, size_bytes: int, operations: int) -> OpRecord:
    return sole_record(
        "sparse_mul", dialect, space.backend, space.label, shapes, size_bytes=size_bytes, operations=operations
    )


_ROWS_ARGUMENTS = {"values": "*u64", "columns": "*u32", "starts": "*i64", "x": "*u64", "z": "*u64"}


@functools.cache
def _rows_source(field: Field) -> KernelSource:
    """Return sparse_rows for the CPU: z[i] = sum of values[k] x[columns[k]] / R over row i, one element at a time."""
    sources, types = ("algebra/field", "zk/groth16/keys.py"), (*_ROWS_ARGUMENTS.values(), "i64")
    builder = LlvmProgram(("rows", field), sources, functools.partial(_rows_text, field), least_share=512)
    return KernelSource(f"sparse_rows_{field.name}", {"llvm": builder}, {"sparse_rows": types}, targets=())


@functools.cache
def _rows_text(field: Field) -> str:
    packed = PackedLimbs(field)
    arguments = ["i64 %begin", "i64 %end", *(f"ptr %{name}" for name in _ROWS_ARGUMENTS), "i64 %n"]
    code = FunctionBuilder("sparse_rows", arguments, linkage="", attributes="nounwind")
    with code.loop("%begin", code.smin("%end", "%n")) as row:
        first = code.load("i64", "%starts", row)
        stop = code.load("i64", "%starts", code.i64("add nsw", row, 1))
        total = code.variable(packed.type, packed.constant(0))
        with code.loop(first, stop) as k:
            column = code.convert("zext", code.load("i32", "%columns", k), "i64")
            x = packed.load(code, "%x", column, "0")
            product = packed.call(code, "mul", x, packed.load(code, "%values", k, "0"))
            total.set(packed.call(code, "add", total.get(), product))
        packed.store(code, "%z", row, "0", total.get())
    code.ret()
    return program([*packed.functions(), code])


# --- devices ---------------------------------------------------------------------------------------------------------
class DeviceMatrix:
    """The stacked matrices A and B, of `n` rows each and `size_bytes` together, in the memory of a device."""

    def __init__(self, space: MemorySpace, rows: SparseMatrix, load: Callable[[npt.NDArray[Any]], Words]) -> None:
        """Copy SparseMatrix.from_coefficients, over snarkjs_scalar_field, to a device by `load`."""
        self._space, self._field = space, rows.field
        self.n, self._min_columns = rows.n_rows // 2, rows.min_columns
        long = np.flatnonzero(np.diff(rows.starts) > LONG_ROW).astype(np.uint32)
        arrays: tuple[npt.NDArray[Any], ...] = (rows.values, rows.columns, rows.starts, long)
        self._values, self._columns, self._starts, self._long = map(load, arrays)
        self._n_long, self._n_entries = len(long), rows.n_entries
        self.size_bytes = sum(array.nbytes for array in arrays)

    def quotient(self, witness: Words) -> Words:
        """Launch `quotient` of a canonical witness; return (n, 4) words without waiting for them."""
        # With too few values the kernel would read out of bounds
        if witness.shape[0] < self._min_columns:
            raise ShapeError(f"the witness must have at least {self._min_columns} values, got {witness.shape[0]}")
        space, field, n, entries = self._space, self._field, self.n, self._n_entries
        values = space.empty((3, n, field.limbs), _U64)
        size = field.size_bytes
        dialect, _ = _device_source(field).pick(space.provider.dialects)
        case = f"{2 * n} rows, {entries} entries {field.name}"
        record = _record(space, dialect, case, entries * (2 * size + 4) + n * (5 * size + 16), entries + n)
        with RecordedLaunch(record, space.provider, space.index):
            csr = (self._values, self._columns, self._starts)
            _run(space, field, "groth16_rows", 2 * n, (*csr, witness, values), 2 * n)
            if self._n_long:
                _run(space, field, "groth16_long_rows", self._n_long * BLOCK, (*csr, self._long, witness, values))
            _run(space, field, "groth16_products", n, (values,), n)
        _to_coset(space, field, values, n)
        scalars = space.empty((n, field.limbs), _U64)
        _run(space, field, "groth16_quotient", n, (values, scalars), n)
        return scalars


def gather(space: MemorySpace, field: Field, x: Words, indices: Words, n: int) -> Words:
    """Return x[indices], (n, 4)."""
    z = space.empty((n, field.limbs), _U64)
    if n:
        _run(space, field, "groth16_gather", n, (x, indices, z), n)
    return z


def unreduced_blocks(space: MemorySpace, field: Field, x: Words, n: int) -> Words:
    """Return one number for each BLOCK ELEMENTS_PER_THREAD elements of x, (n, 4): 0 where all are below the modulus."""
    z = space.empty((-(-n // (BLOCK * ELEMENTS_PER_THREAD)),), np.dtype(np.uint32))
    _run(space, field, "groth16_unreduced", -(-n // ELEMENTS_PER_THREAD), (x, z), n)
    return z


_U64 = np.dtype(np.uint64)
_DEVICE_ENTRIES = {
    "groth16_gather": ("*u64", "*u32", "*u64", "i64"),
    "groth16_unreduced": ("*u64", "*u32", "i64"),
    "groth16_rows": ("*u64", "*u32", "*i64", "*u64", "*u64", "i64"),
    "groth16_long_rows": ("*u64", "*u32", "*i64", "*u32", "*u64", "*u64"),
    "groth16_products": ("*u64", "i64"),
    "groth16_quotient": ("*u64", "*u64", "i64"),
}


def _run(space: MemorySpace, field: Field, entry: str, threads: int, arrays: tuple[Words, ...], *scalars: int) -> None:
    launch(space, _device_source(field), entry, -(-threads // BLOCK), BLOCK, arrays, *scalars)


@functools.cache
def _device_source(field: Field) -> KernelSource:
    """Return the kernels of device.c for a field of four 64-bit words."""
    sizes = {"GROTH16_BLOCK": BLOCK, "GROTH16_EACH": ELEMENTS_PER_THREAD, "GROTH16_LONG": LONG_ROW}
    text = defined(sizes) + read_files("zk/groth16", "device.c")
    dialects = {
        "portable": field_text(field, "F", "portable") + text,
        "cuda": f"{portable_header()}\n{field_text(field, 'F', 'cuda')}{text}",
    }
    return KernelSource(name=f"groth16_{field.name}", dialects=dialects, entries=_DEVICE_ENTRIES)


# --- proving keys ----------------------------------------------------------------------------------------------------
ProgressCallback = Callable[[str], None]

SECTIONS = ("A", "B1", "B2", "C", "H")  # scalars: the witness, of C its private values, of H the quotient
_MIN_DOMAIN = 1 << 16  # smallest domain for which torch is imported to look for a GPU: it takes seconds
_NVIDIA_NODES = ("/dev/nvidiactl", "/dev/dxg")  # NVIDIA's driver on Linux, and in Windows's subsystem for it
_CHUNK_POINTS = 1 << 14  # Points converted at a time: 1 or 2 MB of BN254
_SMALL_BITS = 32  # Scalars below 2^32 have few digits and do not count when the window is chosen


class UnreducedError(Exception):
    """A value of the witness is not below r."""


class KeySums(NamedTuple):
    """The multi-scalar multiplications of a proof, which a device computes meanwhile."""

    public: Callable[[], U64]  # waits for the public inputs, (n_public, 4); or UnreducedError; called before `sum`
    sum: Callable[[str], U64]  # waits for the sum of a section: words of an affine point, Montgomery form
    spans: Callable[[], dict[str, float]]  # part -> device seconds, after all sums; they overlap


class Stages:
    """Timings of stages in seconds, without the compilation of kernels; `progress` gets each name before it begins."""

    def __init__(self, progress: ProgressCallback | None = None, compilation: str = "compile") -> None:
        self.timings: dict[str, float] = {compilation: 0.0}
        self._progress, self._compilation = progress, compilation

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as the stage `name`."""
        if self._progress is not None and name not in self.timings:
            self._progress(name)
        start, compiled = time.perf_counter(), compile_seconds()
        yield
        self.timings[name] = self.timings.get(name, 0.0) + time.perf_counter() - start
        self.compiled(name, compile_seconds() - compiled)

    def compiled(self, name: str, seconds: float) -> None:
        """Move time of a stage to the compilation."""
        self.timings[name] -= seconds
        self.timings[self._compilation] += seconds

    @property
    def compile_s(self) -> float:
        """Seconds of compilation."""
        return self.timings[self._compilation]


def spaces_of(device: DeviceLike, domain_size: int, devices: Devices = None) -> tuple[MemorySpace, ...]:
    """Return the memory spaces of one device, or of several that share the work; ConfigError as for Prover."""
    if isinstance(device, list | tuple):
        raise ConfigError(f"several devices are devices={clipped(device)}, not device=")
    if devices is None:
        return (_automatic(domain_size) if is_automatic(device) else space_at(device),)
    spaces = tuple(spaces_at(device, devices))
    if len(spaces) > 1 and HOST in spaces:
        raise ConfigError(f"devices must be one, or several of which none is the CPU; got {clipped(devices)}")
    return spaces


def _automatic(domain_size: int) -> MemorySpace:
    if settings().backend != "auto":
        return space_at(settings().backend)
    has_gpu = any(Path(node).exists() for node in _NVIDIA_NODES) and importlib.util.find_spec("torch") is not None
    if not has_gpu or ("torch" not in sys.modules and domain_size < _MIN_DOMAIN):
        return HOST
    try:
        return space_at("cuda")
    except BackendUnavailable:
        return HOST


# --- the CPU ---------------------------------------------------------------------------------------------------------
class HostKey:
    """The sections and constraints of a key on the CPU, prepared for many witnesses."""

    label = HOST.label  # in the ledger

    def __init__(self, zkey: Zkey, stages: Stages) -> None:
        """Read the sections of a key, which may be closed afterwards; raises FormatError as Zkey.coefficients."""
        family = family_of(zkey.family)
        with stages("key: constraints"):
            field = snarkjs_scalar_field(family)
            self._rows = SparseMatrix.from_coefficients(field, zkey.domain_size, zkey.coefficients)
            zkey.forget()
        with stages("key: points"):
            curves = {name: family.g2 if name == "B2" else family.g1 for name in SECTIONS}
            self._sections = {name: _HostSection(curve, zkey, name) for name, curve in curves.items()}
        self._n_public = zkey.n_public

    def begin(self, witness: Witness, stages: Stages) -> KeySums:
        """Copy a witness, whose file may change at any time, and start its sums; `stages` also times the waits."""
        with stages("witness"):
            values = np.array(witness.values, np.uint64)
            if not_below(values, self._rows.field.modulus).size:
                raise UnreducedError

        private = self._n_public + 1

        def sum_(name: str) -> U64:
            scalars = values[private:] if name == "C" else values
            if name == "H":
                with stages("quotient"):
                    scalars = quotient(self._rows, values)
            with stages(f"sum {name}"):
                return self._sections[name].msm(scalars)

        return KeySums(lambda: values[1:private], sum_, dict)

    def explain(self) -> str:
        """Describe where each section is stored and how it is summed, one line per section."""
        return "\n".join(f"{name}: {section.explain()}" for name, section in self._sections.items())


class _HostSection:
    """The finite points of a section, in the form of the kernels."""

    def __init__(self, curve: Curve[Any], zkey: Zkey, name: str) -> None:
        self._curve = curve
        finite = np.zeros(len(zkey.points[name]), np.bool_)
        self._bases = CpuBases.of_chunks(curve, _finite(zkey.chunks(name, _CHUNK_POINTS), finite), len(finite))
        self._indices = None if self._bases.n == len(finite) else np.flatnonzero(finite)

    def msm(self, scalars: U64) -> U64:
        """Return the sum of scalars, (n, 4) below the order, times the points: (1, *shape), Montgomery form."""
        rows = scalars if self._indices is None else scalars[self._indices]
        large = rows[:, 1:].any(axis=1) | (rows[:, 0] >> np.uint64(_SMALL_BITS) != 0)
        plan = cpu_plan(self._curve.order, max(1, int(np.count_nonzero(large))), usable_cores())
        words = HOST.contiguous(rows)
        total: U64 = run_sums(HOST, self._curve, [words], lambda row: self._bases.msm(row, plan))
        return total

    def explain(self) -> str:
        return f"{self._bases.n} points on the CPU; {self._bases.explain()}"


def _finite(chunks: Iterator[U64], finite: npt.NDArray[np.bool_]) -> Iterator[U64]:
    """Yield the finite points of each chunk, and mark them in `finite`."""
    start = 0
    for chunk in chunks:
        mask = finite[start : start + len(chunk)]
        np.any(chunk, axis=1, out=mask)
        start += len(chunk)
        yield chunk if mask.all() else chunk[mask]
