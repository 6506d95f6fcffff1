"""Sparse matrices over a field times vectors, on the CPU."""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt

from accelerant.algebra.counted import counted
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST
from accelerant.errors import ShapeError
from accelerant.runtime.kernel import Kernel
from accelerant.runtime.ledger import OpRecord, ledger
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
        if len(rows) and int(rows.max()) >= n_rows:
            raise ShapeError(f"an entry is in row {int(rows.max())} of {n_rows}")
        self.field, self.n_rows, self.n_entries = field, n_rows, len(rows)
        order = np.argsort(rows, kind="stable")
        self._starts = np.zeros(n_rows + 1, np.int64)
        np.cumsum(np.bincount(rows, minlength=n_rows), out=self._starts[1:])
        self._columns = np.ascontiguousarray(columns[order], np.uint32)
        self._least = 1 + int(self._columns.max()) if len(rows) else 0
        self._values = np.ascontiguousarray(values[order], np.uint64)

    def times(self, x: U64) -> U64:
        """The product, (n_rows, 4): its element i is the sum of values x / R over row i, R = 2^256.

        Args:
            x: (n, 4), below the modulus, contiguous; more than any column.

        Raises:
            ShapeError: fewer: the kernel would read elsewhere.
        """
        if x.shape[1:] != (self.field.limbs,) or len(x) < self._least:
            raise ShapeError(f"x must be (n, {self.field.limbs}) with n at least {self._least}, got {x.shape}")
        z = np.empty((self.n_rows, self.field.limbs), np.uint64)
        pointers = map(HOST.pointer, (self._values, self._columns, self._starts, x, z))
        with counted(HOST, _record(self.field, self.n_rows, len(x), self.n_entries)):
            HOST.provider.launch(_kernel(self.field.name), (self.n_rows,), (1,), (*pointers, self.n_rows))
        return z


@functools.cache
def _kernel(field: str) -> Kernel:
    return HOST.provider.compile(kernel_source(field))


@functools.lru_cache(maxsize=1024)
def _record(field: Field, rows: int, columns: int, entries: int) -> OpRecord:
    size = field.size_bytes
    return ledger().record(
        OpRecord(
            op="sparse_mul",
            implementation="llvm",
            backend=HOST.backend,
            device=HOST.label,
            case=f"{rows}x{columns} {entries} entries {field.name}",
            own=True,
            bytes_per_call=entries * (size + 4) + rows * (size + 8) + columns * size,
            flops_per_call=entries,
            reason=f"the only one on {HOST.backend}",
        )
    )
