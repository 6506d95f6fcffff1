"""Launches of C kernels at a place, each compiled once a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerant.algebra.field.places import Place
from accelerant.runtime.compilation.kernel import Kernel, KernelSource

__all__ = ["launch"]

_kernels: dict[tuple[str, str, str, int], Kernel] = {}
"""(program, entry, backend, device) -> compiled."""


def launch(
    place: Place, source: KernelSource, entry: str, grid: int, block: int, arrays: Sequence[Any], *scalars: int
) -> None:
    """Start an entry of a program whose name says all that it depends on.

    Args:
        place: not the host.
        source: with C dialects.
        entry: its arguments are pointers first, then scalars.
        grid, block: blocks, at least 1, and threads of one.
        arrays: words at the place.
        scalars: the arguments after them.
    """
    key = (source.name, entry, place.backend, place.index)
    kernel = _kernels.get(key)
    if kernel is None:
        kernel = _kernels[key] = place.provider.compile(source, entry=entry, device=place.index)
    place.provider.launch(kernel, (grid,), (block,), (*map(place.pointer, arrays), *scalars))
