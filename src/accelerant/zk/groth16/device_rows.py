"""From a witness to the quotient's values on a device, and the small kernels around it: device.c."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.ntt.launch import transform
from accelerant.errors import ShapeError
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.recorded_launch import RecordedLaunch, launch, sole_record
from accelerant.zk.groth16.csr import Csr
from accelerant.zk.groth16.lanes import Lanes
from accelerant.zk.groth16.program import BLOCK, EACH, LONG, kernel_source

__all__ = ["DeviceRows", "gathered", "unreduced"]

Words = Any
_U32, _U64 = np.dtype(np.uint32), np.dtype(np.uint64)


class DeviceRows:
    """The constraints' A above B at a place.

    Attributes:
        size_bytes: memory that they hold.
    """

    def __init__(self, lanes: Lanes, field: Field, rows: Csr) -> None:
        """Bring them there.

        Args:
            lanes: of the place; lane 0 has them.
            field: scalars_of the family, of four words.
            rows: csr.stacked_coefficients.
        """
        self._place, self._field, self._n, self._n_entries = lanes.place, field, rows.n_rows // 2, len(rows.columns)
        self._least = rows.least_columns
        long = np.flatnonzero(np.diff(rows.starts) > LONG).astype(np.uint32)
        arrays = (rows.values, rows.columns, rows.starts, long)
        self._values, self._columns, self._starts, self._long = (lanes.load(0, array) for array in arrays)
        self._n_long = len(long)
        self.size_bytes = sum(array.nbytes for array in arrays)

    def quotient(self, witness: Words) -> Words:
        """Launch what quotient.quotient does; of a canonical witness, with a value for each column.

        Raises:
            ShapeError: fewer values: the kernel would read elsewhere.
        """
        if witness.shape[0] < self._least:
            raise ShapeError(f"the witness must have at least {self._least} values, got {witness.shape[0]}")
        place, field, n = self._place, self._field, self._n
        values = place.empty((3, n, field.limbs), _U64)
        record = _record(place, field, n, self._n_entries)
        with RecordedLaunch(record, place.provider, place.index):
            lists = (self._values, self._columns, self._starts)
            _run(place, field, "groth16_rows", 2 * n, (*lists, witness, values), 2 * n)
            if self._n_long:
                _run(place, field, "groth16_long_rows", self._n_long * BLOCK, (*lists, self._long, witness, values))
            _run(place, field, "groth16_products", n, (values,), n)
        transform(place, field, values, inverse=True, coset=1, order="natural_to_bit_reversed", out=values)
        g = field.root_of_unity(2 * n)
        transform(place, field, values, inverse=False, coset=g, order="bit_reversed_to_natural", out=values)
        scalars = place.empty((n, field.limbs), _U64)
        _run(place, field, "groth16_quotient", n, (values, scalars), n)
        return scalars


def gathered(place: MemorySpace, field: Field, x: Words, which: Words, n: int) -> Words:
    """Elements x[which[i]], (n, 4)."""
    z = place.empty((n, field.limbs), _U64)
    if n:
        _run(place, field, "groth16_gather", n, (x, which, z), n)
    return z


def unreduced(place: MemorySpace, field: Field, x: Words, n: int) -> Words:
    """Numbers of which one is not 0 where an element of x, (n, 4), is not below the modulus."""
    z = place.empty((-(-n // (BLOCK * EACH)),), _U32)
    _run(place, field, "groth16_unreduced", -(-n // EACH), (x, z), n)
    return z


def _run(place: MemorySpace, field: Field, entry: str, threads: int, arrays: tuple[Words, ...], *scalars: int) -> None:
    launch(place, kernel_source(field), entry, -(-threads // BLOCK), BLOCK, arrays, *scalars)


@functools.lru_cache(maxsize=1024)
def _record(place: MemorySpace, field: Field, n: int, entries: int) -> OpRecord:
    size = field.size_bytes
    dialect, _ = kernel_source(field).pick(place.provider.dialects)
    return sole_record(
        "sparse_mul",
        dialect,
        place.backend,
        place.label,
        f"{2 * n} rows, {entries} entries {field.name}",
        size_bytes=entries * (2 * size + 4) + n * (5 * size + 16),
        operations=entries + n,
    )
