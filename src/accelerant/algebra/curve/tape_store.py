"""Tapes (tape.py) in the disk cache of kernels: recording those of a pairing takes 60 ms, reading them 1.

An entry's code is the tape's code, then its schedule, as they lie in memory; the rest is in the report. What is said of
machine code in runtime/cache.py holds for them: an altered entry is made again, and a key is of all that a tape depends
on, which is the code below algebra.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import numpy as np

from accelerant.algebra.curve.tape import Tape
from accelerant.algebra.field.llvm_text import builder_key
from accelerant.algebra.field.parameters import Field
from accelerant.runtime.cache import KernelCache, kernel_key
from accelerant.runtime.kernel import Binary

__all__ = ["kept"]


class _Taped(Protocol):
    """A dataclass with a tape; its other fields are places of registers: integers, or tuples of them."""

    @property
    def tape(self) -> Tape: ...


_T = TypeVar("_T", bound=_Taped)


def kept(kind: Callable[..., _T], name: str, field: Field, make: Callable[[], _T]) -> _T:
    """What `make` gives, from the disk if it is there.

    Args:
        kind: a dataclass as _Taped says.
        name: of the tape; with the code below algebra all that it depends on.
        field: of its values.
        make: records it.
    """
    key = kernel_key(tape=builder_key(name), byteorder=sys.byteorder)
    found, _ = KernelCache().get_or_build(key, lambda: _binary(make()), name=f"tape_{name}", target="any CPU")
    return _taped(kind, field, found)


def _binary(taped: _Taped) -> Binary:
    tape = taped.tape
    metadata = {
        "schedule": len(tape.schedule),
        "registers": tape.registers,
        "constants": [f"{value:x}" for value in tape.constants],
        "products": tape.products,
        "places": {name: getattr(taped, name) for name in _places(type(taped))},
    }
    return Binary(code=tape.code.tobytes() + tape.schedule.tobytes(), symbols={}, resources={}, metadata=metadata)


def _taped(kind: Callable[..., _T], field: Field, binary: Binary) -> _T:
    metadata = binary.metadata
    size = len(binary.code) - 16 * metadata["schedule"]
    tape = Tape(
        field=field,
        code=np.frombuffer(binary.code[:size], np.int32),
        schedule=np.frombuffer(binary.code[size:], np.int64).reshape(-1, 2),
        registers=metadata["registers"],
        constants=tuple(int(value, 16) for value in metadata["constants"]),
        products=metadata["products"],
    )
    places = {name: _plain(metadata["places"][name]) for name in _places(kind)}
    return kind(tape=tape, **places)


def _places(kind: Any) -> list[str]:
    return [each.name for each in fields(kind) if each.name != "tape"]


def _plain(value: Any) -> Any:
    """JSON's lists are tuples here."""
    return tuple(value) if isinstance(value, list) else value
