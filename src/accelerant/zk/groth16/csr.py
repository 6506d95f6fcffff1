"""The constraints' matrices by rows, as kernels take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from accelerant.errors import ShapeError

__all__ = ["Csr", "sorted_by_row", "stacked_coefficients"]

U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Csr:
    """A sparse matrix by rows; several entries at one place add up.

    Attributes:
        starts: (n_rows + 1,): entries of row i are starts[i] to starts[i + 1].
        columns: (n,), of the entries.
        values: (n, 4), theirs.
    """

    starts: npt.NDArray[np.int64]
    columns: npt.NDArray[np.uint32]
    values: U64

    @property
    def n_rows(self) -> int:
        """Rows."""
        return len(self.starts) - 1

    @property
    def least_columns(self) -> int:
        """Columns there are at least: a vector must have as many elements."""
        return 1 + int(self.columns.max()) if len(self.columns) else 0


def sorted_by_row(n_rows: int, rows: npt.NDArray[np.integer], columns: npt.NDArray[np.integer], values: U64) -> Csr:
    """Entries sorted by row.

    Args:
        n_rows: of the matrix.
        rows: (n,), below n_rows.
        columns: (n,), below 2^32.
        values: (n, 4), any words.

    Raises:
        ShapeError: a row is not there: kernels would write elsewhere.
    """
    if len(rows) and int(rows.max()) >= n_rows:
        raise ShapeError(f"an entry is in row {int(rows.max())} of {n_rows}")
    order = np.argsort(rows, kind="stable")
    starts = np.zeros(n_rows + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=n_rows), out=starts[1:])
    return Csr(starts, np.ascontiguousarray(columns[order], np.uint32), np.ascontiguousarray(values[order], np.uint64))


def stacked_coefficients(domain_size: int, coefficients: npt.NDArray[np.void]) -> Csr:
    """A above B, (2 domain_size, signals), of a key's coefficients (zk.formats.COEFFICIENT, in range)."""
    rows = coefficients["matrix"].astype(np.int64) * domain_size + coefficients["row"]
    return sorted_by_row(2 * domain_size, rows, coefficients["signal"], coefficients["value"])
