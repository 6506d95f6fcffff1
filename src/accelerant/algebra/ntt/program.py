"""The C programs of transforms: a pass (kernel.c) for one field, variant and tile, and powers.c."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import BLOCK, CudaProgram, defined, field_text, montgomery_radix
from accelerant.algebra.ntt.llvm_kernels import POINTERS, SCALARS
from accelerant.algebra.ntt.plan import Variant
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects

__all__ = ["LADDER", "Tile", "has_quotients", "kernel_source", "powers_source"]

LADDER = 28
"""Squares of each number in powers.c: exponents are below 2^28, since transforms have at most 2^27 points."""

_FOLDERS = ("algebra/field", "algebra/ntt")
"""Folders with the sources of all programs here."""

_LOG_TURN = 4
"""Log2 of the order of Goldilocks's roots that are powers of two, which have order 192."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The division of a block's work; the first three are log2.

    Attributes:
        rows: rows of a column.
        columns: columns of a block.
        radix: elements of a thread, in registers; at most rows, and 4.
        resident: blocks per NVIDIA multiprocessor that registers must suffice for; 0 leaves it to the compiler.
    """

    rows: int
    columns: int
    radix: int
    resident: int = 0

    @property
    def threads(self) -> int:
        """Return the threads of a block."""
        return 1 << self.rows + self.columns - self.radix


def has_quotients(field: Field) -> bool:
    """Return whether roots come with quotients: see limbs.h, whose bounds need p < 2^(32 n - 2) with some margin."""
    return field.limbs > 1 and 5 * field.modulus < montgomery_radix(field)


@functools.cache
def kernel_source(field: Field, variant: Variant, tile: Tile, inverse: bool = False) -> KernelSource:
    """Return ntt_pass in C, with the arguments of llvm_kernels.py but log_rows, and tables of tables.device_tables.

    Args:
        tile: division of the work.
        inverse: of the transform; matters only to Goldilocks, whose program contains roots.

    Raises:
        ConfigError: the radix is above 4.
    """
    if tile.radix > _LOG_TURN:
        raise ConfigError(f"a pass takes a radix of at most {_LOG_TURN} (log2), got {tile.radix}")
    e = f"*u{field.word_bits}"
    dialects = LazyDialects(
        portable=lambda: _text(field, variant, tile, inverse, "portable"),
        cuda=lambda: CudaProgram(
            f"{field} {variant} {tile} {inverse}", _FOLDERS, lambda: _text(field, variant, tile, inverse, "cuda")
        ),
    )
    return KernelSource(
        name=f"ntt_{field.name}_{tile.rows}",
        dialects=dialects,
        entries={"ntt_pass": (e,) * len(POINTERS) + ("i64",) * (len(SCALARS) - 1)},
    )


@functools.cache
def powers_source(field: Field) -> KernelSource:
    """Return ntt_powers, see powers.c: pointers z and ladder, then seven numbers."""

    def text(dialect: str) -> str:
        sizes = {"POWERS_LADDER": str(LADDER), "POWERS_BLOCK": str(BLOCK), "NTT_RESIDENT": "0"}
        return _field_text(field, dialect) + defined(sizes) + _texts(_DEVICE[dialect], "powers.c")

    return KernelSource(
        name=f"ntt_powers_{field.name}",
        dialects=LazyDialects(
            portable=lambda: text("portable"),
            cuda=lambda: CudaProgram(f"{field} powers", _FOLDERS, lambda: text("cuda")),
        ),
        entries={"ntt_powers": (f"*u{field.word_bits}",) * 2 + ("i64",) * 7},
    )


@functools.cache
def _field_text(field: Field, dialect: str) -> str:
    """Return the field with the prefix F, the same for all programs of a plan."""
    return field_text(field, "F", dialect)


_DEVICE = {"portable": "device_c.h", "cuda": "device_cuda.h"}


def _texts(*names: str) -> str:
    return "".join((Path(__file__).parent / name).read_text(encoding="utf-8") for name in names)


def _text(field: Field, variant: Variant, tile: Tile, inverse: bool, dialect: str) -> str:
    values = {
        "LOG_ROWS": tile.rows,
        "LOG_COLUMNS": tile.columns,
        "LOG_RADIX": tile.radix,
        "RADIX": 1 << tile.radix,
        "FIRST": _first_levels(field, tile),
        "THREADS": tile.threads,
        "RESIDENT": tile.resident,
        "WORDS": field.limbs,
        "ALONG_IN": variant.along_in,
        "ALONG_OUT": variant.along_out,
        "REVERSED_IN": variant.reversed_in,
        "REVERSED_OUT": variant.reversed_out,
        "BEFORE": variant.before,
        "AFTER": variant.after,
        "TWIDDLE_BEFORE": variant.twiddle == "before",
        "TWIDDLE_AFTER": variant.twiddle == "after",
        "SPLIT": variant.split,
    }
    constants = {f"NTT_{name}": str(int(value)) for name, value in values.items()}
    levels = ["limbs.h" if has_quotients(field) else "levels.h"]
    if field.name == "goldilocks":
        levels = ["goldilocks_cuda.h"] * (dialect == "cuda") + ["goldilocks.h"]
        constants["NTT_SHIFT"] = str(_shift(field, inverse))
    return _field_text(field, dialect) + defined(constants) + _texts(_DEVICE[dialect], *levels, "kernel.c")


def _first_levels(field: Field, tile: Tile) -> int:
    """Return the levels before the first exchange: all of a thread's elements, since half of those products are by 1.

    That saves BN254 5% of the products at 2^20. Goldilocks multiplies between groups, so there is nothing to save, and
    fields of one word are bound by memory: with a number that leaves whole groups, they need no branch.
    """
    return tile.radix if field.limbs > 1 and tile.rows >= 2 * tile.radix else (tile.rows - 1) % tile.radix + 1


def _shift(field: Field, inverse: bool) -> int:
    """Return the base-2 logarithm of the root of order 2^_LOG_TURN, which is a power of two."""
    order = 1 << _LOG_TURN
    root = pow(field.root_of_unity(order), -1 if inverse else 1, field.modulus)
    return next(k for k in range(0, 192, 192 // order) if pow(2, k, field.modulus) == root)
