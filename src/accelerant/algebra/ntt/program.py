"""The programs of transforms in C and WGSL: a pass (kernel.c) for one field, variant and tile, and powers.c."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from accelerant.algebra.field import program
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import BLOCK, defined, montgomery_radix
from accelerant.algebra.ntt.llvm_kernels import POINTERS, SCALARS
from accelerant.algebra.ntt.plan import Variant
from accelerant.errors import ConfigError
from accelerant.runtime.compilation.kernel import KernelSource, LazyDialects
from accelerant.runtime.compilation.wgsl import bindings, constants

LADDER = 28
"""Squares of each number in powers.c: exponents are below 2^28, since transforms have at most 2^27 points."""

_LOG_TURN = 4
"""Log2 of the order of Goldilocks's roots that are powers of two, which have order 192."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The division of a block's work.

    Log2 of the rows of a column, the columns of a block, and the elements of a thread (at most rows, and 4); blocks per
    NVIDIA multiprocessor for which registers must suffice, or 0.
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
def kernel_source(
    field: Field, variant: Variant, tile: Tile, inverse: bool = False, checked: bool = False
) -> KernelSource:
    """Return ntt_pass in C: the arguments are those of llvm_kernels.py without log_rows, with tables.device_tables.

    `inverse` matters only to Goldilocks, whose program contains roots. `checked`: a word follows x and z, which is set
    to 1 where an element of x is not below the modulus. ConfigError if the radix is above 4.
    """
    if tile.radix > _LOG_TURN:
        raise ConfigError(f"a pass takes a radix of at most {_LOG_TURN} (log2), got {tile.radix}")
    words = (f"*u{field.word_bits}",) * len(POINTERS)
    types = (*words[:2], *("*u32",) * checked, *words[2:], *("i64",) * (len(SCALARS) - 1))
    text = functools.partial(_pass_text, field, variant, tile, inverse, checked)
    wgsl = None if checked else functools.partial(_pass_wgsl, field, variant, tile)
    dialects = _dialects(field, f"{variant} {tile} {inverse} {checked}", text, wgsl)
    return KernelSource(f"ntt_{field.name}_{tile.rows}", dialects, {"ntt_pass": types})


@functools.cache
def powers_source(field: Field) -> KernelSource:
    """Return ntt_powers, see powers.c: pointers z and ladder, then seven numbers."""
    sizes = defined({"POWERS_LADDER": LADDER, "POWERS_BLOCK": BLOCK, "NTT_RESIDENT": 0})

    def wgsl() -> str:
        return _wgsl(field, ("z", "ladder"), _POWERS, {"LADDER": LADDER}) + _files("powers.wgsl")

    dialects = _dialects(field, "powers", lambda dialect: sizes + _files(_DEVICE[dialect], "powers.c"), wgsl)
    types = (f"*u{field.word_bits}",) * 2 + ("i64",) * 7
    return KernelSource(f"ntt_powers_{field.name}", dialects, {"ntt_powers": types})


def _dialects(
    field: Field, arguments: str, write: Callable[[str], str], wgsl: Callable[[], str] | None
) -> LazyDialects:
    """Return a program's dialects; beyond field and sources, the text of `write` depends on `arguments` only."""

    def text(dialect: str) -> str:
        return _field_text(field, dialect) + write(dialect)

    folders = ("algebra/field", "algebra/ntt")
    cuda = program.CudaProgram(f"{field} {arguments}", folders, functools.partial(text, "cuda"))
    others = {} if wgsl is None else {"wgsl": wgsl}
    return LazyDialects(portable=functools.partial(text, "portable"), cuda=lambda: cuda, **others)


@functools.cache
def _field_text(field: Field, dialect: str) -> str:
    """Return the field with the prefix F, the same for all programs of a plan."""
    return program.field_text(field, "F", dialect)


_DEVICE = {"portable": "device_c.h", "cuda": "device_cuda.h"}


def _files(*names: str) -> str:
    return program.read_files("algebra/ntt", *names)


_POWERS = ("log_rows", "log_count", "log_steps", "log_unit", "by_bits", "by_row", "by_column")


def _pass_wgsl(field: Field, variant: Variant, tile: Tile) -> str:
    values: dict[str, int | bool] = {
        "LOG_ROWS": tile.rows, "LOG_COLUMNS": tile.columns, "THREADS": tile.threads,
        "ALONG_IN": variant.along_in, "ALONG_OUT": variant.along_out,
        "REVERSED_IN": variant.reversed_in, "REVERSED_OUT": variant.reversed_out,
        "BEFORE": variant.before, "AFTER": variant.after,
        "TWIDDLE_BEFORE": variant.twiddle == "before", "TWIDDLE_AFTER": variant.twiddle == "after",
        "SPLIT": variant.split,
    }  # fmt: skip
    text = _files("kernel.wgsl").replace("@workgroup_size(THREADS)", f"@workgroup_size({tile.threads})")
    scalars = tuple(name for name in SCALARS if name != "log_rows")
    return _wgsl(field, POINTERS, scalars, values) + text


def _wgsl(field: Field, arrays: Sequence[str], scalars: Sequence[str], values: Mapping[str, int | bool]) -> str:
    """Return declarations, the field, and functions on the elements of each array."""
    declared = bindings(dict.fromkeys(arrays, "u32"), dict.fromkeys(scalars, "i64")) + constants(values)
    return declared + program.field_wgsl(field, montgomery_radix(field) == 1) + "".join(map(program.accessors, arrays))


def _pass_text(field: Field, variant: Variant, tile: Tile, inverse: bool, checked: bool, dialect: str) -> str:
    # All of a thread's levels come before the first exchange, since half of their products are by 1: BN254 saves 5%
    # of them at 2^20. Goldilocks multiplies between groups, so it has nothing to save, and fields of one word
    # are bound by memory: a number that leaves whole groups saves them a branch.
    all_first = field.limbs > 1 and tile.rows >= 2 * tile.radix
    values = {
        "LOG_ROWS": tile.rows,
        "LOG_COLUMNS": tile.columns,
        "LOG_RADIX": tile.radix,
        "RADIX": 1 << tile.radix,
        "FIRST": tile.radix if all_first else (tile.rows - 1) % tile.radix + 1,
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
        "CHECKED": checked,
    }
    constants = {f"NTT_{name}": int(value) for name, value in values.items()}
    levels = ["limbs.h" if has_quotients(field) else "levels.h"]
    if field.name == "goldilocks":
        levels = ["goldilocks_cuda.h"] * (dialect == "cuda") + ["goldilocks.h"]
        order = 1 << _LOG_TURN
        root = pow(field.root_of_unity(order), -1 if inverse else 1, field.modulus)
        shifts = (k for k in range(0, 192, 192 // order) if pow(2, k, field.modulus) == root)
        constants["NTT_SHIFT"] = next(shifts)  # the base-2 logarithm of the root
    return defined(constants) + _files(_DEVICE[dialect], *levels, "kernel.c")
