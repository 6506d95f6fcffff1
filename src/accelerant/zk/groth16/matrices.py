"""Sparse constraint matrices, their products with a witness, and the quotient's values on the CPU and on devices.

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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.llvm_packed import PackedLimbs
from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.program import defined, field_text, read_files
from accelerant.algebra.ntt.launch import transform
from accelerant.errors import ShapeError
from accelerant.runtime.compilation.kernel import KernelSource, LlvmProgram, portable_header
from accelerant.runtime.compilation.llvm import FunctionBuilder, program
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, launch, sole_record

U64 = npt.NDArray[np.uint64]
Words = Any

BLOCK = 128  # Threads of a block of device.c, a power of two
ELEMENTS_PER_THREAD = 8  # Elements of a thread of groth16_unreduced
LONG_ROW = 64  # Rows of more entries are summed by a block each; one thread would hold up its warp


def snarkjs_scalar_field(family: Family) -> Field:
    """Return the scalar field of a family, with the roots of unity of snarkjs's domains.

    They are powers of the least non-square: 5 on both curves of the table, where bls12_381_fr has the generator 7.
    """
    field = FIELDS[f"{family.name}_fr"]
    p = field.modulus
    return dataclasses.replace(field, generator=next(g for g in range(2, p) if pow(g, (p - 1) // 2, p) == p - 1))


# --- CPU -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SparseMatrix:
    """A matrix of four-word values in compressed sparse row format; entries of one row and column add up.

    Row i has the entries starts[i] to starts[i + 1]. `min_columns` is the smallest number of columns with all entries.
    """

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
    sources, types = ("algebra/field", "zk/groth16/matrices.py"), (*_ROWS_ARGUMENTS.values(), "i64")
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
