"""The passes on devices with kernels in C: how points are divided among passes and threads."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import Place
from accelerant.algebra.ntt.device_tables import device_tables
from accelerant.algebra.ntt.host import scalars
from accelerant.algebra.ntt.plan import Pass, Variant, make_passes
from accelerant.algebra.ntt.program import Tile, kernel_source
from accelerant.runtime.compilation.kernel import Kernel

__all__ = ["DevicePasses", "Division", "division_of"]

_THREADS = 8
"""Log2 of the threads of a block, at most: what every device has."""


_SIZES_LIMIT = 256
"""Numbers of elements, times passes, whose launches a plan keeps."""


@dataclass(frozen=True, slots=True)
class Division:
    """How work is divided; all but `resident` are log2.

    Attributes:
        rows: of a pass, at most, where three passes are enough; else of a third of the points.
        tile: elements of a block, and of a transform of one pass.
        radix: elements of a thread; at most 4.
        table: elements of a table of twiddles, at most; above, a twiddle is the product of two.
        resident: see Tile.
        resident_along: the same of passes along the rows on both sides, if it differs.
    """

    rows: int
    tile: int
    radix: int
    table: int
    resident: int = 0
    resident_along: int | None = None

    def logs(self, log_n: int) -> tuple[int, ...]:
        """Rows of each pass, the larger first: one pass of points that fit in a block, else two or three."""
        if log_n <= self.tile:
            return (log_n,)
        passes = min(3, max(2, -(-log_n // self.rows)))
        return tuple((log_n + m) // passes for m in reversed(range(passes)))

    def shape(self, step: Pass) -> Tile:
        """A block's: columns that differ in their lowest digit alone."""
        rows, radix = step.log_rows, min(self.radix, step.log_rows)
        columns = max(0, min(self.tile - rows, _THREADS + radix - rows, step.digits[0]))
        along = step.variant.along_in and step.variant.along_out and self.resident_along is not None
        return Tile(rows, columns, radix, (self.resident_along or 0) if along else self.resident)


def division_of(field: Field) -> Division:
    """What is used for a field: the best of benchmarks/tune_zk.py on an H200.

    Milliseconds of 2^20 and 2^24 points there, the memory cold: bn254_fr 0.195 and 3.16. Goldilocks, radix 16 with
    shifts as inner factors, all twiddles in tables, registers for two blocks of 256 threads, 0.034 and 0.380; for three
    0.037 and 0.36. BabyBear 0.021, and 0.094 of 2^23.
    """
    if field.limbs > 1:
        return Division(rows=8, tile=9, radix=2, table=24)
    if field.word_bits == 64:
        return Division(rows=8, tile=12, radix=4, table=24, resident=2, resident_along=2)
    return Division(rows=8, tile=12, radix=4, table=16, resident=4)  # left alone it takes 32 registers, and spills


@functools.cache
def _kernel(field: Field, variant: Variant, tile: Tile, inverse: bool, place: Place) -> Kernel:
    return place.provider.compile(kernel_source(field, variant, tile, inverse), device=place.index)


def _overlaps(target: str) -> bool:
    """Whether the target's programs wait themselves for what is ahead in the stream: from NVIDIA's Hopper on."""
    return target.startswith("sm_") and int(target[3:].rstrip("af")) >= 90


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
            _kernel(field, step.variant, tile, inverse and field.name == "goldilocks", place)
            for step, tile in zip(self.passes, self._tiles, strict=True)
        ]
        self._tables: list[list[Any]] = []  # launches read their memory
        self._pointers: list[tuple[Any, ...]] = []
        self._starts: dict[tuple[int, int], Callable[[Any, Any], None]] = {}
        self.size_bytes = 0
        for step, tile in zip(self.passes, self._tiles, strict=True):
            made = device_tables(place, field, step, tile)
            rest = (made.before, made.after, made.low, made.high)
            words = sum(math.prod(table.shape) for table in (made.roots, *rest) if table is not None)
            self.size_bytes += words * field.word_bits // 8
            self._tables.append([made.roots, *(made.roots if table is None else table for table in rest)])
            self._pointers.append(tuple(map(place.pointer, self._tables[-1])))
        place.provider.synchronize(place.index)  # launches on other streams read the tables too

    def launch(self, number: int, x: Any, z: Any, elements: int) -> None:
        """One pass of so many elements, from x to z."""
        start = self._starts.get((number, elements)) or self._prepare(number, x, z, elements)
        start(x, z)

    def _prepare(self, number: int, x: Any, z: Any, elements: int) -> Callable[[Any, Any], None]:
        """A launch of all but the elements, kept: a call of small transforms is mostly what the host does.

        On CUDA the driver reads what stands ready, and a pass begins while the one before it ends: see kernel.c.
        """
        kernel, tile, place, tables = self._kernels[number], self._tiles[number], self._place, self._pointers[number]
        count, _, *rest = scalars(self.passes[number], elements)
        blocks, values = -(-count // (1 << tile.columns)), (count, *rest)
        if (point := getattr(kernel.handle, "point", None)) is not None:
            args = (x, z, *tables, *values)
            ready = point((blocks, 1, 1), args, place.index, tile.threads, _overlaps(kernel.target))

            def start(x: Any, z: Any) -> None:
                ready.start(x.data_ptr(), z.data_ptr())

        else:

            def start(x: Any, z: Any) -> None:
                args = (place.pointer(x), place.pointer(z), *tables, *values)
                place.provider.launch(kernel, (blocks,), (tile.threads,), args)

        if len(self._starts) >= _SIZES_LIMIT:
            self._starts.clear()
        self._starts[number, elements] = start
        return start

    def give_up(self) -> None:
        """Wait for what reads the tables on any stream, before their memory is given to others.

        Who launches with the plan from now on sees given_up, and waits too.
        """
        self.given_up = True
        self._place.provider.synchronize(self._place.index)
