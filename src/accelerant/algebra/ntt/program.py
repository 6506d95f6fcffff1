"""The pass of a transform in the C dialects: kernel.c for one field, variant and division of work."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import field_text
from accelerant.algebra.ntt.llvm_kernels import POINTERS, SCALARS
from accelerant.algebra.ntt.plan import Variant
from accelerant.runtime.kernel import KernelSource
from accelerant.runtime.portable import portable_header

__all__ = ["Tile", "kernel_source"]


@dataclass(frozen=True, slots=True)
class Tile:
    """How a block divides its work; the first three are log2.

    Attributes:
        rows: of a column.
        columns: of a block.
        radix: elements of a thread, in registers; at most rows.
        resident: blocks of an NVIDIA multiprocessor that registers shall suffice for; 0: as the compiler likes.
    """

    rows: int
    columns: int
    radix: int
    resident: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return 1 << self.rows + self.columns - self.radix


@functools.cache
def kernel_source(field: Field, variant: Variant, tile: Tile) -> KernelSource:
    """Entry ntt_pass: the arguments of llvm_kernels.py without log_rows, tables all words of x R mod p."""
    e = f"*u{field.word_bits}"
    special = ["goldilocks_cuda.h"] if field.name == "goldilocks" else []
    dialects = {
        "portable": _text(field, variant, tile, "portable", ["device_c.h"]),
        "cuda": f"{portable_header()}\n{_text(field, variant, tile, 'cuda', [*special, 'device_cuda.h'])}",
    }
    return KernelSource(
        name=f"ntt_{field.name}_{tile.rows}",
        dialects=dialects,
        entries={"ntt_pass": (e,) * len(POINTERS) + ("i64",) * (len(SCALARS) - 1)},
    )


def _text(field: Field, variant: Variant, tile: Tile, dialect: str, device: Sequence[str]) -> str:
    values = {
        "LOG_ROWS": tile.rows,
        "LOG_COLUMNS": tile.columns,
        "LOG_RADIX": tile.radix,
        "THREADS": tile.threads,
        "RESIDENT": tile.resident,
        "WORDS": field.limbs,
        "WORD_BITS": field.word_bits,
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
    defined = "".join(f"#define NTT_{name} {int(value)}\n" for name, value in values.items())
    texts = ((Path(__file__).parent / name).read_text(encoding="utf-8") for name in (*device, "kernel.c"))
    return field_text(field, "F", dialect) + defined + "".join(texts)
