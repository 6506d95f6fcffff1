"""The prover's own kernels on devices: device.c for a field."""

from __future__ import annotations

import functools
from pathlib import Path

from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import field_text
from accelerant.runtime.compilation.kernel import KernelSource, portable_header

__all__ = ["BLOCK", "EACH", "LONG", "kernel_source"]

BLOCK = 128
"""Threads of a block, a power of two."""

EACH = 8
"""Elements of a thread of groth16_unreduced."""

LONG = 64
"""Entries from which on a row is long: a block does one, since the others of a thread's warp would wait for it."""

_ENTRIES = {
    "groth16_gather": ("*u64", "*u32", "*u64", "i64"),
    "groth16_unreduced": ("*u64", "*u32", "i64"),
    "groth16_rows": ("*u64", "*u32", "*i64", "*u64", "*u64", "i64"),
    "groth16_long_rows": ("*u64", "*u32", "*i64", "*u32", "*u64", "*u64"),
    "groth16_products": ("*u64", "i64"),
    "groth16_quotient": ("*u64", "*u64", "i64"),
}


@functools.cache
def kernel_source(field: Field) -> KernelSource:
    """All entries, for a field of four 64-bit words: device.c says what they do."""
    sizes = {"GROTH16_BLOCK": BLOCK, "GROTH16_EACH": EACH, "GROTH16_LONG": LONG}
    own = "".join(f"#define {name} {size}\n" for name, size in sizes.items())
    own += (Path(__file__).parent / "device.c").read_text(encoding="utf-8")
    dialects = {
        "portable": field_text(field, "F", "portable") + own,
        "cuda": f"{portable_header()}\n{field_text(field, 'F', 'cuda')}{own}",
    }
    return KernelSource(name=f"groth16_{field.name}", dialects=dialects, entries=_ENTRIES)
