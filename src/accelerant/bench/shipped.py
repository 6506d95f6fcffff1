"""Every kernel that the package ships, as sources that a provider compiles.

Ops list theirs in `KERNELS` of their folder's cases.py; algebra folders give theirs by `source()` in op.py, or list
them in cases.py as ops do.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from accelerant.runtime.compilation.kernel import KernelSource

__all__ = ["Shipped", "shipped_kernels"]


@dataclass(frozen=True, slots=True)
class Shipped:
    """A kernel with everything fixed that its code depends on besides the target.

    Attributes:
        folder: the op's or algebra's folder.
        name: of the kernel.
        detail: what sets this specialisation apart: element types, constants.
        source: what a provider compiles.
    """

    folder: str
    name: str
    detail: str
    source: KernelSource


def shipped_kernels() -> list[Shipped]:
    """All of them; imports Triton where it is installed, since the signatures are read from its functions."""
    return [
        each for package in ("ops", "algebra") for folder in _folders(package) for each in _kernels(package, folder)
    ]


def _folders(package: str) -> list[str]:
    module = importlib.import_module(f"accelerant.{package}")
    return sorted(
        entry.name for entry in pkgutil.iter_modules(module.__path__) if entry.ispkg and not entry.name.startswith("_")
    )


def _kernels(package: str, folder: str) -> Iterator[Shipped]:
    has_triton = importlib.util.find_spec("triton") is not None
    cases = _module(f"accelerant.{package}.{folder}.cases")
    listed = getattr(cases, "KERNELS", ())
    for each in listed:
        if isinstance(each, KernelSource):
            yield Shipped(folder, each.name, "", each)
        elif has_triton:
            source: KernelSource = each.source()
            yield Shipped(folder, source.name, str(each.name).removeprefix(source.name).strip(), source)
    source_of = getattr(_module(f"accelerant.{package}.{folder}.op"), "source", None)
    if not listed and callable(source_of):
        found = source_of()
        yield Shipped(folder, found.name, "", found)


def _module(name: str) -> Any:
    """The module, or None where the folder has none of that name."""
    return importlib.import_module(name) if importlib.util.find_spec(name) is not None else None
