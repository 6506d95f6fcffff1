"""Sparse matrices over a field times vectors, on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import Field
from accelerant.errors import ShapeError
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.recorded_launch import RecordedLaunch, launch, sole_record
from accelerant.zk.groth16.csr import Csr, sorted_by_row
from accelerant.zk.groth16.llvm_rows import kernel_source

__all__ = ["SparseMatrix"]

U64 = npt.NDArray[np.uint64]


class SparseMatrix:
    """A matrix by rows, as the kernel takes it.

    Attributes:
        field: of the entries; of four 64-bit words.
        n_rows: of them.
        n_entries: that are kept; several at one place add up.
    """

    def __init__(
        self, field: Field, n_rows: int, rows: npt.NDArray[np.integer], columns: npt.NDArray[np.integer], values: U64
    ) -> None:
        """Sort entries by row.

        Args:
            field: of the entries.
            n_rows: of the matrix.
            rows: (n,), below n_rows.
            columns: (n,), below 2^32.
            values: (n, 4), any words.

        Raises:
            ShapeError: a row is not there: the kernel would write elsewhere.
        """
        self._take(field, sorted_by_row(n_rows, rows, columns, values))

    @classmethod
    def of(cls, field: Field, rows: Csr) -> SparseMatrix:
        """A matrix whose entries are sorted."""
        made = cls.__new__(cls)
        made._take(field, rows)
        return made

    def _take(self, field: Field, rows: Csr) -> None:
        self.field, self.n_rows, self.n_entries = field, rows.n_rows, len(rows.columns)
        self._rows, self._least = rows, rows.least_columns

    def times(self, x: U64, out: U64 | None = None) -> U64:
        """The product, (n_rows, 4): its element i is the sum of values x / R over row i, R = 2^256.

        Args:
            x: (n, 4), below the modulus, contiguous; more than any column.
            out: (n_rows, 4) for the product, contiguous and apart from x; new by default.

        Raises:
            ShapeError: fewer, or another shape of `out`: the kernel would read or write elsewhere.
        """
        if x.shape[1:] != (self.field.limbs,) or len(x) < self._least:
            raise ShapeError(f"x must be (n, {self.field.limbs}) with n at least {self._least}, got {x.shape}")
        shape = (self.n_rows, self.field.limbs)
        z = np.empty(shape, np.uint64) if out is None else out
        if z.shape != shape or z.dtype != np.uint64 or not z.flags.carray:
            raise ShapeError(f"out must be {shape}, uint64, contiguous; got {z.shape}, {z.dtype}")
        rows = self._rows
        arrays = (rows.values, rows.columns, rows.starts, x, z)
        record = _record(self.field, self.n_rows, len(x), self.n_entries)
        with RecordedLaunch(record, HOST.provider, HOST.index):
            launch(HOST, kernel_source(self.field.name), "sparse_rows", self.n_rows, 1, arrays, self.n_rows)
        return z


@functools.lru_cache(maxsize=1024)
def _record(field: Field, rows: int, columns: int, entries: int) -> OpRecord:
    size = field.size_bytes
    return sole_record(
        "sparse_mul",
        "llvm",
        HOST.backend,
        HOST.label,
        f"{rows}x{columns} {entries} entries {field.name}",
        size_bytes=entries * (size + 4) + rows * (size + 8) + columns * size,
        operations=entries,
    )
