"""Launches of the field kernels on words in a memory space, recorded in the ledger (runtime/ledger.py).

Words are contiguous arrays of a memory space with the field's dtype and shape, every element below the modulus, either
canonical or in Montgomery form, x R mod p. All functions return new words in the form of their arguments.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from accelerant.algebra.field.memory_space import HOST, DeviceVerdict, MemorySpace, is_tensor, space_of
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.program import grid_and_block, kernel_source
from accelerant.algebra.field.words import decode, dtype_of, element_shape, index_of, tail_of, unreduced
from accelerant.errors import FormatError, ShapeError
from accelerant.runtime.files import clipped
from accelerant.runtime.ledger import OpRecord, RecordedLaunch, compiled, launch, sole_record

Representation = Literal["canonical", "montgomery"]
Words = Any

_CHUNKS = {"cpu": 16, "": 4096}  # elements reduced to one: an index of the CPU's kernel, else a block
_SHORT = 4  # elements of the longest rows that the CPU reduces by columns
_BY_FORM = ("mul", "square", "inv", "pow", "dot")  # operations with a kernel for each form


def elementwise(space: MemorySpace, field: Field, op: str, form: Representation, *inputs: Words) -> Words:
    """Apply an operation to words of one shape: add, sub, mul; neg, square, reduce, to_montgomery, from_montgomery."""
    x = inputs[0]
    z = space.like(x)
    if space.backend == "cuda" and x.numel():  # a kept launch costs the host less
        record, start = _prepared(space, field, op, x.shape, len(inputs), form, checked=False)
        with RecordedLaunch(record, space.provider, space.index):
            start(*(each.data_ptr() for each in (*inputs, z)))
        return z
    n = _count(field, x)
    with _recorded(space, field, op, x.shape, form, len(inputs) + 1, n):
        _launch(space, field, _entry(op, form), (*inputs, z), (n,), n)
    return z


def cuda_space(field: Field, *arrays: Any) -> MemorySpace | None:
    """Return the space of a CUDA device's contiguous, aligned words of one shape, reduced or not; else None."""
    first = arrays[0]
    for x in arrays:
        if not (is_tensor(x) and x.is_cuda and x.is_contiguous() and x.data_ptr() % 16 == 0):
            return None
        if x is not first and (x.shape != first.shape or x.dtype != first.dtype or x.device != first.device):
            return None
    return space_of(first) if _are_words(field, first.dtype, first.shape[-1:]) else None


@functools.lru_cache(maxsize=256)
def _are_words(field: Field, dtype: Any, last: tuple[int, ...]) -> bool:
    return str(dtype) == f"torch.{dtype_of(field)}" and (field.limbs == 1 or last == (field.limbs,))


def checked_at_once(field: Field, op: str, *arrays: Any) -> Any:
    """Apply an operation by a kernel that also checks its words; None where the caller has to check before."""
    if (space := cuda_space(field, *arrays)) is None or not arrays[0].numel():
        return None
    record, start = _prepared(space, field, op, arrays[0].shape, len(arrays), "canonical", checked=True)
    z, verdict = space.empty(arrays[0].shape, dtype_of(field)), DeviceVerdict.of(space)
    with RecordedLaunch(record, space.provider, space.index):
        start(*(each.data_ptr() for each in (*arrays, z, verdict)))
    z = space.unsigned(z)
    return None if verdict.is_set() else z


@functools.lru_cache(maxsize=256)
def _prepared(
    space: MemorySpace, field: Field, op: str, shape: Sequence[int], arrays: int, form: Representation, *, checked: bool
) -> tuple[OpRecord, Callable[..., None]]:
    """Return the record of a call, and a launch by the addresses of its arrays, its result and its verdict."""
    entry, n = _entry(op, form), math.prod(element_shape(field, shape))
    kernel = compiled(space, kernel_source(field, entry, checked=checked), entry)
    blocks, threads = grid_and_block(entry, n)
    pointers = (HOST.pointer(np.empty(1)),) * (arrays + 1 + checked)  # replaced in each call
    launched = kernel.handle.point((blocks, 1, 1), (*pointers, n), space.index, threads)
    return _record(space, field, op, shape, form, arrays + 1, n), launched.start


def inverse(space: MemorySpace, field: Field, x: Words, form: Representation, name: str) -> Words:
    """Invert each element; a 0 raises FormatError, which names its index."""
    zero = space.first_zero(x, field.limbs) if _count(field, x) else None
    if zero is not None:
        raise FormatError(f"{name}[{zero}] (flattened) is 0, which has no inverse")
    return elementwise(space, field, "inv", form, x)


def power(space: MemorySpace, field: Field, x: Words, exponent: int, form: Representation, name: str) -> Words:
    """Raise elements to an exponent, x^0 = 1, in a time that depends on it; FormatError names a 0 to invert."""
    if exponent < 0:
        x, exponent = inverse(space, field, x, form, name), -exponent
    z, n, bits = space.empty(tuple(x.shape), dtype_of(field)), _count(field, x), exponent.bit_length()
    words = space.load(np.array([exponent >> at & 2**64 - 1 for at in range(0, max(1, bits), 64)], np.uint64))
    with _recorded(space, field, "pow", x.shape, form, 2, n * max(0, bits + exponent.bit_count() - 2)):
        _launch(space, field, _entry("pow", form), (x, z, words), (bits, n), n)
    return z


def summed(space: MemorySpace, field: Field, x: Words, axis: int | None, form: Representation) -> Words:
    """Sum all elements, or along one axis of their shape; ShapeError if there is no such axis."""
    shape, tail = element_shape(field, x.shape), tail_of(field)
    left: tuple[int, ...] = ()
    if axis is not None:
        axis = index_of(axis, "axis")
        if not -len(shape) <= axis < len(shape):
            raise ShapeError(f"x has {len(shape)} axes of elements, shape {shape}; there is no axis {clipped(axis)}")
        axis %= len(shape)
        left = (*shape[:axis], *shape[axis + 1 :])
        x = space.move_axis(x, axis, len(tail))
    with _recorded(space, field, "sum", x.shape, form, 1, _count(field, x)):
        return _folded(space, field, "field_sum", (x,), math.prod(left)).reshape((*left, *tail))


def dotted(space: MemorySpace, field: Field, x: Words, y: Words, form: Representation) -> Words:
    """Sum the products of words of one shape along the elements' last axis; ShapeError for single elements."""
    if not (shape := element_shape(field, x.shape)):
        raise ShapeError("dot sums along the last axis; x and y are single elements")
    with _recorded(space, field, "dot", x.shape, form, 2, _count(field, x)):
        sums = _folded(space, field, _entry("dot", form), (x, y), math.prod(shape[:-1]))
        return sums.reshape((*shape[:-1], *tail_of(field)))


def _folded(space: MemorySpace, field: Field, entry: str, inputs: Sequence[Words], rows: int) -> Words:
    """Reduce chunks of each row to one element each, until a row is one."""
    n, tail, dtype = _count(field, inputs[0]), tail_of(field), dtype_of(field)
    if not n:
        return space.load(np.zeros((rows, *tail), dtype))
    size = n // rows
    while True:
        chunk = min(size, _chunk(space))
        if space is HOST and rows > 1 and size <= _SHORT:
            return _short_rows(field, entry, inputs, rows, size)
        parts = -(-size // chunk)
        if rows > 1 and size % chunk:  # else a chunk would extend into the next row
            inputs = [space.pad(x.reshape((rows, size, *tail)), 1, parts * chunk) for x in inputs]
            size = parts * chunk
        sums = space.empty((rows * parts, *tail), dtype)
        _launch(space, field, entry, (*inputs, sums), (rows * size, chunk), rows * size, chunk)
        if parts == 1:
            return sums
        entry, inputs, size = "field_sum", [sums], parts


def _short_rows(field: Field, entry: str, inputs: Sequence[Words], rows: int, size: int) -> Words:
    """Reduce rows on the CPU by their columns: an index of field_sum would cost as much as for a whole chunk."""
    x, tail = inputs[0], tail_of(field)
    if len(inputs) > 1:
        x = np.empty((rows * size, *tail), dtype_of(field))
        _launch(HOST, field, entry.replace("dot", "mul"), (*inputs, x), (rows * size,), rows * size)
    x = np.array(np.moveaxis(x.reshape((rows, size, *tail)), 1, 0), order="C")  # a copy, which is written to
    while size > 1:  # the last half of the columns is added to the first
        half = size // 2
        first, last = x[:half], x[size - half : size]
        _launch(HOST, field, "field_add", (first, last, first), (half * rows,), half * rows)
        size -= half
    return x[0]


def first_unreduced(space: MemorySpace, field: Field, x: Words) -> int | None:
    """Return the flattened index of the first element that is not below the modulus, or None."""
    n, chunk = _count(field, x), _chunk(space)
    if not n:
        return None
    firsts = space.empty((-(-n // chunk),), np.dtype(np.int64))
    _launch(space, field, "field_unreduced", (x, firsts), (n, chunk), n, chunk)
    return index if (index := space.minimum(firsts)) < n else None


def element(space: MemorySpace, field: Field, x: Words, index: int) -> int:
    """Return the number in the words of one element, by its flattened index."""
    value: int = decode(field, space.store(space.getitem(x.reshape((_count(field, x), *tail_of(field))), (index,))))
    return value


def check_reduced(space: MemorySpace, field: Field, x: Words, name: str) -> None:
    """Raise FormatError if an element is not below the modulus; names the first one's index and value."""
    if (index := first_unreduced(space, field, x)) is not None:
        raise unreduced(name, index, element(space, field, x, index), field.modulus)


def _count(field: Field, words: Words) -> int:
    return math.prod(element_shape(field, words.shape))


def _entry(op: str, form: Representation) -> str:
    return f"field_{op}_montgomery" if form == "montgomery" and op in _BY_FORM else f"field_{op}"


def _chunk(space: MemorySpace) -> int:
    return _CHUNKS.get(space.backend, _CHUNKS[""])


def _launch(
    space: MemorySpace, field: Field, entry: str, words: Sequence[Words], scalars: Sequence[int], n: int, chunk: int = 1
) -> None:
    """Launch an entry of the field's program on n elements, `chunk` of them per index or block."""
    if n:
        blocks, threads = (-(-n // chunk), 1) if space.backend == "cpu" else grid_and_block(entry, n, chunk)
        launch(space, kernel_source(field, entry), entry, blocks, threads, words, *scalars)


def _recorded(
    space: MemorySpace, field: Field, op: str, shape: Sequence[int], form: Representation, arrays: int, operations: int
) -> RecordedLaunch:
    """Record the block as one call that reads and writes so many arrays of that shape."""
    record = _record(space, field, op, tuple(shape), form, arrays, operations)
    return RecordedLaunch(record, space.provider, space.index)


@functools.lru_cache(maxsize=4096)
def _record(
    space: MemorySpace, field: Field, op: str, shape: Sequence[int], form: Representation, arrays: int, operations: int
) -> OpRecord:
    dialect, _ = kernel_source(field, "field_add").pick(space.provider.dialects)
    sizes = "x".join(map(str, element_shape(field, shape))) or "scalar"
    case = f"{sizes} {field.name}" + " montgomery" * (form == "montgomery")
    moved = arrays * math.prod(shape) * dtype_of(field).itemsize
    return sole_record(
        f"field_{op}", dialect, space.backend, space.label, case, size_bytes=moved, operations=operations
    )
