"""The passes on devices with kernels in C: how points are divided among passes and threads."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import Place
from accelerant.algebra.field.program import montgomery_radix
from accelerant.algebra.ntt.host import scalars
from accelerant.algebra.ntt.plan import Pass, Variant, make_passes
from accelerant.algebra.ntt.program import Tile, kernel_source
from accelerant.algebra.ntt.tables import pass_tables
from accelerant.runtime.kernel import Kernel

__all__ = ["DevicePasses", "Division", "division_of"]

_THREADS = 8
"""Log2 of the threads of a block, at most: what every device has."""


@dataclass(frozen=True, slots=True)
class Division:
    """How work is divided; all but `resident` are log2.

    Attributes:
        rows: of a pass, at most, where three passes are enough; else of a third of the points.
        tile: elements of a block, and of a transform of one pass.
        radix: elements of a thread.
        table: elements of a table of twiddles, at most; above, a twiddle is the product of two.
        resident: see Tile.
    """

    rows: int
    tile: int
    radix: int
    table: int
    resident: int = 0

    def logs(self, log_n: int) -> tuple[int, ...]:
        """Rows of each pass, the larger first: one pass of points that fit in a block, else two or three."""
        if log_n <= self.tile:
            return (log_n,)
        passes = min(3, max(2, -(-log_n // self.rows)))
        return tuple((log_n + m) // passes for m in reversed(range(passes)))

    def shape(self, step: Pass) -> Tile:
        """A block's: columns that differ in their lowest digit alone."""
        rows, radix = step.log_rows, min(self.radix, step.log_rows)
        return Tile(rows, max(0, min(self.tile - rows, _THREADS + radix - rows, step.digits[0])), radix, self.resident)


def division_of(field: Field) -> Division:
    """What is used for a field.

    Chosen by what NVIDIA's compiler takes, for five blocks of 128 threads, four of 256 and four of 256 to a
    multiprocessor, without spills; not yet by times.
    """
    if field.limbs > 1:
        return Division(rows=8, tile=9, radix=2, table=24)
    if field.word_bits == 64:
        return Division(rows=8, tile=11, radix=3, table=16)
    return Division(rows=8, tile=12, radix=4, table=16, resident=4)  # left alone it takes 32 registers, and spills


@functools.cache
def _kernel(field: Field, variant: Variant, tile: Tile, place: Place) -> Kernel:
    return place.provider.compile(kernel_source(field, variant, tile), device=place.index)


class DevicePasses:
    """The passes of transforms of one kind on a device.

    Attributes:
        field: of the elements.
        passes: in order.
        size_bytes: of the tables.
        given_up: whether it is kept no more: the tables go with the last who holds it.
    """

    def __init__(
        self,
        place: Place,
        field: Field,
        log_n: int,
        *,
        inverse: bool,
        coset: int,
        order: str,
        division: Division | None = None,
    ) -> None:
        division = division or division_of(field)
        self.field = field
        self.given_up = False
        self._place = place
        self.passes = make_passes(
            field, division.logs(log_n), inverse=inverse, coset=coset, order=order, log_table=division.table
        )
        self._tiles = [division.shape(step) for step in self.passes]
        self._kernels = [
            _kernel(field, step.variant, tile, place) for step, tile in zip(self.passes, self._tiles, strict=True)
        ]
        self._tables: list[list[Any]] = []
        self.size_bytes = 0
        for step in self.passes:
            tables = pass_tables(field, step, montgomery_radix(field))
            roots = place.load(tables.roots)
            rest = (tables.before, tables.after, tables.low, tables.high)
            self.size_bytes += sum(table.nbytes for table in (tables.roots, *rest) if table is not None)
            self._tables.append([roots, *(roots if table is None else place.load(table) for table in rest)])

    def launch(self, number: int, x: Any, z: Any, elements: int) -> None:
        """One pass of so many elements, from x to z."""
        step, tile = self.passes[number], self._tiles[number]
        count, _, *rest = scalars(step, elements)
        pointers = map(self._place.pointer, (x, z, *self._tables[number]))
        blocks = -(-count // (1 << tile.columns))
        self._place.provider.launch(self._kernels[number], (blocks,), (tile.threads,), (*pointers, count, *rest))

    def give_up(self) -> None:
        """Wait for what reads the tables on any stream, before their memory is given to others.

        Who launches with the plan from now on sees given_up, and waits too.
        """
        self.given_up = True
        self._place.provider.synchronize(self._place.index)
