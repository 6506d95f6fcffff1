"""Launches of the field kernels on words at a place, counted in the ledger.

Words here are what memory_space.pykeeps: contiguous, dtype and shape right, every element below the modulus, either
canonical (form "canonical") or in Montgomery form ("montgomery", x R mod p). All functions give new words in the form
they got.

An op has one implementation for each backend, so nothing is chosen: see runtime/recorded_launch.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from accelerant.algebra.field.memory_space import MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import grid_and_block, kernel_source
from accelerant.algebra.field.words import dtype_of, element_shape, tail_of, unreduced
from accelerant.errors import FormatError, ShapeError
from accelerant.runtime.ledger import OpRecord
from accelerant.runtime.recorded_launch import RecordedLaunch, launch, sole_record

__all__ = ["Form", "binary", "check_reduced", "dotted", "inverse", "power", "reduced", "summed", "unary"]

Form = Literal["canonical", "montgomery"]
Words = Any

_CHUNKS = {"cpu": 16, "": 4096}
"""Elements that become one in sum, dot and the search for what is not reduced. On the CPU one index does a chunk, and a
launch is split over the cores only from some ten thousand indices on; elsewhere a block does one."""

_BY_FORM = ("mul", "square", "inv", "pow", "dot")
"""Those that have a kernel for each form; the others are the same for both."""

_RECORDS_LIMIT = 4096


def binary(place: MemorySpace, field: Field, op: str, x: Words, y: Words, form: Form) -> Words:
    """Add, sub or mul of words of one shape."""
    z = place.empty(tuple(x.shape), dtype_of(field))
    n = _count(field, x)
    with _recorded(place, field, op, x.shape, form, arrays=3, operations=n):
        _launch(place, field, _entry(op, form), (x, y, z), (n,), n)
    return z


def unary(place: MemorySpace, field: Field, op: str, x: Words, form: Form) -> Words:
    """Neg or square; to_montgomery and from_montgomery, which change the form."""
    z = place.empty(tuple(x.shape), dtype_of(field))
    n = _count(field, x)
    with _recorded(place, field, op, x.shape, form, arrays=2, operations=n):
        _launch(place, field, _entry(op, form), (x, z), (n,), n)
    return z


def inverse(place: MemorySpace, field: Field, x: Words, form: Form, name: str) -> Words:
    """x^-1 of each.

    Raises:
        FormatError: an element is 0; names its index.
    """
    zero = place.first_zero(x, field.limbs) if _count(field, x) else None
    if zero is not None:
        raise FormatError(f"{name}[{zero}] (flattened) is 0, which has no inverse")
    return unary(place, field, "inv", x, form)


def power(place: MemorySpace, field: Field, x: Words, exponent: int, form: Form, name: str) -> Words:
    """x^exponent of each, x^0 = 1 also of 0; below 0 the power of the inverse. The time depends on the exponent.

    Raises:
        FormatError: the exponent is below 0 and an element is 0; names its index.
    """
    if exponent < 0:
        x, exponent = inverse(place, field, x, form, name), -exponent
    z = place.empty(tuple(x.shape), dtype_of(field))
    n, bits = _count(field, x), exponent.bit_length()
    words = place.load(np.array(_exponent_words(exponent), np.uint64))
    multiplies = n * max(0, bits + exponent.bit_count() - 2)
    with _recorded(place, field, "pow", x.shape, form, arrays=2, operations=multiplies):
        _launch(place, field, _entry("pow", form), (x, z, words), (bits, n), n)
    return z


def _exponent_words(exponent: int) -> list[int]:
    """Its 64-bit words, the least significant first, one at least."""
    return [exponent >> at & 2**64 - 1 for at in range(0, max(1, exponent.bit_length()), 64)]


def summed(place: MemorySpace, field: Field, x: Words, axis: int | None, form: Form) -> Words:
    """The sum of all elements, or along one axis of their shape.

    Raises:
        ShapeError: there is no such axis.
    """
    shape, tail = element_shape(field, x.shape), tail_of(field)
    left: tuple[int, ...] = ()
    if axis is not None:
        if not -len(shape) <= axis < len(shape):
            raise ShapeError(f"x has {len(shape)} axes of elements, shape {shape}; there is no axis {axis}")
        axis %= len(shape)
        left = (*shape[:axis], *shape[axis + 1 :])
        x = place.move_axis(x, axis, len(tail))
    with _recorded(place, field, "sum", x.shape, form, arrays=1, operations=_count(field, x)):
        return _folded(place, field, "field_sum", (x,), math.prod(left)).reshape((*left, *tail))


def dotted(place: MemorySpace, field: Field, x: Words, y: Words, form: Form) -> Words:
    """The sum of the products along the last axis of the elements' shape, of words of one shape.

    Raises:
        ShapeError: single elements, which have no axis.
    """
    shape = element_shape(field, x.shape)
    if not shape:
        raise ShapeError("dot sums along the last axis; x and y are single elements")
    left = shape[:-1]
    with _recorded(place, field, "dot", x.shape, form, arrays=2, operations=_count(field, x)):
        sums = _folded(place, field, _entry("dot", form), (x, y), math.prod(left))
        return sums.reshape((*left, *tail_of(field)))


def _folded(place: MemorySpace, field: Field, entry: str, inputs: Sequence[Words], rows: int) -> Words:
    """Chunks of each row to one element each, until a row is one."""
    n, tail, dtype = _count(field, inputs[0]), tail_of(field), dtype_of(field)
    if not n:
        return place.load(np.zeros((rows, *tail), dtype))
    size = n // rows
    while True:
        chunk = min(size, _chunk(place))
        parts = -(-size // chunk)
        if rows > 1 and size % chunk:  # or a chunk would reach into the next row
            inputs = [place.pad(x.reshape((rows, size, *tail)), 1, parts * chunk) for x in inputs]
            size = parts * chunk
        sums = place.empty((rows * parts, *tail), dtype)
        _launch(place, field, entry, (*inputs, sums), (rows * size, chunk), rows * size, chunk)
        if parts == 1:
            return sums
        entry, inputs, size = "field_sum", [sums], parts


# --- reduction -------------------------------------------------------------------------------------------------------


def check_reduced(place: MemorySpace, field: Field, x: Words, name: str) -> None:
    """Refuse words of which an element is not below the modulus.

    Raises:
        FormatError: names the first one's index and value.
    """
    n = _count(field, x)
    if not n:
        return
    chunk = _chunk(place)
    firsts = place.empty((-(-n // chunk),), np.dtype(np.int64))
    _launch(place, field, "field_unreduced", (x, firsts), (n, chunk), n, chunk)
    index = place.minimum(firsts)
    if index < n:
        words = place.store(place.getitem(x.reshape((n, *tail_of(field))), (index,)))
        value = int.from_bytes(np.ascontiguousarray(words, words.dtype.newbyteorder("<")).tobytes(), "little")
        raise unreduced(name, index, value, field.modulus)


def reduced(place: MemorySpace, field: Field, x: Words) -> Words:
    """Any words modulo the modulus."""
    return unary(place, field, "reduce", x, "canonical")


# --- one launch ------------------------------------------------------------------------------------------------------


def _count(field: Field, words: Words) -> int:
    return math.prod(element_shape(field, words.shape))


def _entry(op: str, form: Form) -> str:
    return f"field_{op}_montgomery" if form == "montgomery" and op in _BY_FORM else f"field_{op}"


def _chunk(place: MemorySpace) -> int:
    return _CHUNKS.get(place.backend, _CHUNKS[""])


def _launch(
    place: MemorySpace,
    field: Field,
    entry: str,
    words: Sequence[Words],
    scalars: Sequence[int],
    n: int,
    chunk: int = 1,
) -> None:
    """Launch an entry of the field's program on n elements, `chunk` of them per index or block."""
    if n:
        blocks, threads = (-(-n // chunk), 1) if place.backend == "cpu" else grid_and_block(entry, n, chunk)
        launch(place, kernel_source(field, entry), entry, blocks, threads, words, *scalars)


def _recorded(
    place: MemorySpace, field: Field, op: str, shape: Sequence[int], form: Form, *, arrays: int, operations: int
) -> RecordedLaunch:
    """Record the block as one call that reads and writes so many arrays of that shape."""
    record = _record(field, f"field_{op}", place, tuple(shape), form, arrays, operations)
    return RecordedLaunch(record, place.provider, place.index)


@functools.lru_cache(maxsize=_RECORDS_LIMIT)
def _record(
    field: Field, op: str, place: MemorySpace, shape: tuple[int, ...], form: Form, arrays: int, operations: int
) -> OpRecord:
    dialect, _ = kernel_source(field).pick(place.provider.dialects)
    sizes = "x".join(map(str, element_shape(field, shape))) or "scalar"
    case = f"{sizes} {field.name}" + " montgomery" * (form == "montgomery")
    size_bytes = arrays * math.prod(shape) * dtype_of(field).itemsize
    return sole_record(op, dialect, place.backend, place.label, case, size_bytes=size_bytes, operations=operations)
