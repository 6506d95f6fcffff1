"""The passes on the CPU's kernels: how points are divided, which form of arithmetic, what a launch takes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from accelerant.algebra.field.llvm_kernels import form_of, host_form
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST
from accelerant.algebra.ntt.llvm_kernels import POINTERS, SCALARS, PassKernel
from accelerant.algebra.ntt.llvm_packs import by_limbs
from accelerant.algebra.ntt.plan import Pass, Variant, make_passes
from accelerant.algebra.ntt.tables import limbs_of_52_bits, pass_tables
from accelerant.runtime.compilation.kernel import Kernel, KernelSource

__all__ = ["HostPasses", "scalars"]

_LOG_ROWS = 10
"""Of a pass, at most: 320 KiB on the stack where eight elements are five registers; a core's cache has more."""

_LOG_TABLE = 20
"""Of a table of twiddles, at most: above, a second product is quicker than reading the table from memory."""


def _logs(log_n: int, lanes: int, batch: int) -> tuple[int, ...]:
    """Log2 of the rows of each pass: one pass where its columns fill the lanes, or where there are too few points."""
    log_lanes = lanes.bit_length() - 1
    if log_n < 2 * log_lanes or (log_n <= _LOG_ROWS and batch % lanes == 0):
        return (log_n,)
    passes = max(2, -(-log_n // _LOG_ROWS))
    return tuple((log_n + m) // passes for m in reversed(range(passes)))


@functools.cache
def _kernel(field: Field, variant: Variant, kind: str) -> Kernel:
    name = f"ntt_{field.name}_{kind}"
    e = f"*u{field.word_bits}"
    entries = {"ntt_pass": (e,) * len(POINTERS) + ("i64",) * len(SCALARS)}
    source = KernelSource(name=name, dialects={"llvm": PassKernel(field.name, variant, kind)}, entries=entries)
    return HOST.provider.compile(source)


@functools.cache
def _best(field: Field) -> str:
    return host_form(field)


class HostPasses:
    """The passes of transforms of one kind on the CPU.

    Attributes:
        field: of the elements.
        passes: in order.
        size_bytes: of the tables.
        given_up: whether it is kept no more.
    """

    def __init__(
        self, field: Field, log_n: int, batch: int, *, inverse: bool, coset: int, order: str, kind: str = ""
    ) -> None:
        self.field = field
        self.given_up = False
        kind = kind or _best(field)
        if not self._fills(field, kind, log_n, batch):
            kind = "scalar"
        form = form_of(field, kind)
        logs = _logs(log_n, form.lanes, batch)
        self.passes = make_passes(field, logs, inverse=inverse, coset=coset, order=order, log_table=_LOG_TABLE)
        self._kernels = [_kernel(field, step.variant, kind) for step in self.passes]
        self._tables: list[list[Any]] = []
        self.size_bytes = 0
        for step in self.passes:
            tables = pass_tables(field, step, form.radix)
            single = [tables.roots, tables.before, tables.after, tables.high]
            if by_limbs(form):
                single = [table if table is None else limbs_of_52_bits(field, table) for table in single]
            self.size_bytes += sum(table.nbytes for table in (*single, tables.low) if table is not None)
            roots, before, after, high = (single[0] if table is None else table for table in single)
            low = roots if tables.low is None else tables.low
            self._tables.append([roots, before, after, low, high])

    @staticmethod
    def _fills(field: Field, kind: str, log_n: int, batch: int) -> bool:
        """Whether all passes have as many columns, and rows where those are neighbours, as a pack has lanes."""
        lanes = form_of(field, kind).lanes
        return lanes**2 <= 1 << log_n or (batch % lanes == 0 and lanes <= 1 << log_n)

    def launch(self, number: int, x: Any, z: Any, elements: int) -> None:
        """One pass of so many elements, from x to z."""
        step, kernel = self.passes[number], self._kernels[number]
        pointers = map(HOST.pointer, (x, z, *self._tables[number]))
        HOST.provider.launch(kernel, (elements,), (1,), (*pointers, *scalars(step, elements)))

    def give_up(self) -> None:
        """Nothing reads the tables when a launch has returned, and memory lives as long as who holds the plan."""
        self.given_up = True


def scalars(step: Pass, elements: int) -> Sequence[int]:
    """What llvm_kernels.SCALARS names."""
    reads, writes = step.reads, step.writes
    return (
        elements >> step.log_rows,
        step.log_rows,
        step.log_low,
        *step.digits,
        *reads.column,
        reads.row,
        *writes.column,
        writes.row,
    )
