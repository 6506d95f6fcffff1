"""Tapes (tape.py) in the disk cache of kernels: recording those of a pairing takes 60 ms, reading them 1.

An entry's code is a line of JSON, then the tape's code and its schedule as they lie in memory. Nothing of it is in the
report: the cache's checksum is the code's, and with another constant a verifier would accept other proofs. So what is
said of machine code in cache.py holds for tapes: an altered entry is made again, and a key is of all that a
tape depends on, which is the code below algebra.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Any, Protocol, TypeVar

import numpy as np

from accelerant.algebra.curve.tape import Tape
from accelerant.algebra.field.llvm_text import builder_key
from accelerant.algebra.field.parameters import Field
from accelerant.runtime.compilation.cache import KernelCache, kernel_key
from accelerant.runtime.compilation.kernel import Binary

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
    rest = {
        "schedule": len(tape.schedule),
        "registers": tape.registers,
        "constants": [f"{value:x}" for value in tape.constants],
        "products": tape.products,
        "places": {name: getattr(taped, name) for name in _places(type(taped))},
    }
    code = json.dumps(rest).encode() + b"\n" + tape.code.tobytes() + tape.schedule.tobytes()
    return Binary(code=code, symbols={}, resources={})


def _taped(kind: Callable[..., _T], field: Field, binary: Binary) -> _T:
    line, _, words = binary.code.partition(b"\n")
    rest = json.loads(line)
    size = len(words) - 16 * rest["schedule"]
    tape = Tape(
        field=field,
        code=np.frombuffer(words[:size], np.int32),
        schedule=np.frombuffer(words[size:], np.int64).reshape(-1, 2),
        registers=rest["registers"],
        constants=tuple(int(value, 16) for value in rest["constants"]),
        products=rest["products"],
    )
    places = {name: _plain(rest["places"][name]) for name in _places(kind)}
    return kind(tape=tape, **places)


def _places(kind: Any) -> list[str]:
    return [each.name for each in fields(kind) if each.name != "tape"]


def _plain(value: Any) -> Any:
    """JSON's lists are tuples here."""
    return tuple(value) if isinstance(value, list) else value
