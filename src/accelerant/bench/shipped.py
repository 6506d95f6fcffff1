"""Every kernel that the package ships, as sources that a provider compiles.

Ops list theirs in `KERNELS` of their folder's cases.py. Of algebra's kernels, which are compiled for each field and
curve, only the sum in Goldilocks is among them.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass

from accelerant.algebra.field.program import field_add_source
from accelerant.runtime.compilation.kernel import KernelSource

__all__ = ["Shipped", "shipped_kernels"]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A specialization of a shipped kernel.

    Attributes:
        folder: the op's folder, or "field".
        detail: element types and constants that distinguish the specialization.
    """

    folder: str
    name: str
    detail: str
    source: KernelSource


def shipped_kernels() -> list[Shipped]:
    """Return all kernels; imports Triton where it is installed, to read signatures of its functions."""
    modules = pkgutil.iter_modules(importlib.import_module("accelerant.ops").__path__)
    folders = sorted(entry.name for entry in modules if entry.ispkg and not entry.name.startswith("_"))
    field_add = field_add_source()
    return [
        *(kernel for folder in folders for kernel in _kernels(folder)),
        Shipped("field", field_add.name, "", field_add),
    ]


def _kernels(folder: str) -> Iterator[Shipped]:
    has_triton = importlib.util.find_spec("triton") is not None
    name = f"accelerant.ops.{folder}.cases"
    if importlib.util.find_spec(name) is None:
        return
    for kernel in getattr(importlib.import_module(name), "KERNELS", ()):
        if isinstance(kernel, KernelSource):
            yield Shipped(folder, kernel.name, "", kernel)
        elif has_triton:
            source: KernelSource = kernel.source()
            yield Shipped(folder, source.name, str(kernel.name).removeprefix(source.name).strip(), source)
