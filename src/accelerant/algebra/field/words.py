"""Canonical words on the host: conversion from and to Python integers, random elements, and checks.

An element is a number below the modulus, in the field's unsigned words (parameters.py), the least significant first
along the last axis; a field of one limb has no such axis. Nothing here is constant-time: Python integers are not.
"""

import math
import operator
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.field.parameters import Field
from accelerant.errors import FormatError, OutOfMemory, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped

Words = npt.NDArray[Any]
Shape = tuple[int, ...]
_DTYPES: dict[int, np.dtype[Any]] = {32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}


def dtype_of(field: Field) -> np.dtype[Any]:
    """Return the dtype of a word: uint64, or uint32 where the modulus fits."""
    return _DTYPES[field.word_bits]


def tail_of(field: Field) -> Shape:
    """Return the axis of limbs that a word array has after the elements' shape, if any."""
    return (field.limbs,) if field.limbs > 1 else ()


def check_words(field: Field, dtype: str, shape: Sequence[int], name: str) -> None:
    """Check that an array of this dtype and shape can be words of the field; errors say what to do."""
    wanted = dtype_of(field)
    if dtype != wanted.name:
        if dtype == wanted.name.removeprefix("u"):
            what = f"view it as {wanted} if it holds canonical words, or encode() it if it holds integers"
        elif dtype.startswith(">"):
            what = f"astype({wanted}) brings it into this machine's byte order"
        else:
            what = "encode() makes words of integers"
        raise UnsupportedDtype(f"{name} must be {wanted}, got {dtype}: {what}")
    if field.limbs > 1 and (not shape or shape[-1] != field.limbs):
        raise ShapeError(
            f"{name} must end in an axis of the {field.limbs} limbs of {field.name}, got shape {tuple(shape)}"
        )


def element_shape(field: Field, shape: Sequence[int]) -> Shape:
    """Return the elements' shape from the shape of their words."""
    return tuple(shape[:-1] if field.limbs > 1 else shape)


def encode(field: Field, values: Any, *, reduce: bool = False, name: str = "x") -> Words:
    """Return the words of integers; arguments and errors as PrimeField.encode, `name` for messages."""
    if isinstance(values, np.ndarray) and values.dtype.kind not in "iuO":
        raise UnsupportedDtype(f"{name} must hold integers, got {values.dtype}")
    array = values.astype(object) if isinstance(values, np.ndarray) else np.array(values, dtype=object)
    size, modulus = field.size_bytes, field.modulus
    out = bytearray(size * array.size)
    for i, value in enumerate(array.reshape(-1).tolist()):
        if (number := whole(value)) is None:
            raise UnsupportedDtype(f"{name}[{i}] (flattened) is {clipped(value)}, not an integer")
        if reduce:
            number %= modulus
        elif not 0 <= number < modulus:
            raise unreduced(name, i, number, modulus)
        out[i * size : (i + 1) * size] = number.to_bytes(size, "little")
    return _from_bytes(field, out).reshape((*array.shape, *tail_of(field)))


def whole(value: Any) -> int | None:
    """Return a Python or NumPy integer as int; None for anything else, booleans too."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def index_of(value: object, name: str) -> int:
    """Return a Python or NumPy integer as int; UnsupportedDtype for anything else, booleans too."""
    if (number := whole(value)) is None:
        raise UnsupportedDtype(f"{name} must be an integer, got {type(value).__name__} {clipped(value)}")
    return number


def sizes_of(shape: Any) -> Shape:
    """Return a shape, an integer or a sequence of them; ShapeError for a negative size, or more than 2^63 elements."""
    sequence = isinstance(shape, tuple | list) or (isinstance(shape, np.ndarray) and shape.ndim > 0)
    sizes = tuple(index_of(size, "a size") for size in shape) if sequence else (index_of(shape, "shape"),)
    if min(sizes, default=0) < 0 or math.prod(sizes) >= 1 << 63:
        raise ShapeError(f"sizes must be 0 or more, of less than 2^63 elements; got ({', '.join(map(clipped, sizes))})")
    return sizes


def unreduced(name: str, index: int, value: int, modulus: int) -> FormatError:
    """Return the error of an element that is not below the modulus."""
    what = "negative" if value < 0 else f"not below the modulus {modulus}"
    return FormatError(f"{name}[{index}] (flattened) is {clipped(value)}, {what}")


def _from_bytes(field: Field, data: bytes | bytearray) -> Words:
    return np.frombuffer(data, dtype_of(field).newbyteorder("<")).astype(dtype_of(field))


def decode(field: Field, words: Words) -> Any:
    """Return a Python integer, or nested lists in the elements' shape, of words that check_words accepts."""
    shape = element_shape(field, words.shape)
    if field.limbs == 1:
        return words.tolist()
    data, size = np.ascontiguousarray(words, dtype_of(field).newbyteorder("<")).tobytes(), field.size_bytes
    numbers = np.empty(math.prod(shape), object)
    numbers[:] = [int.from_bytes(data[i : i + size], "little") for i in range(0, len(data), size)]
    return numbers.reshape(shape).tolist()


def random(field: Field, shape: Shape) -> Words:
    """Draw uniform elements from the system's entropy, by rejection: fewer than two draws an element on average."""
    n = math.prod(shape)
    try:
        words = _bits(field, n)
    except (MemoryError, OverflowError):
        size = n * field.size_bytes
        raise OutOfMemory(f"{n:,} elements of {field.name} take {size:,} bytes, which this host has not") from None
    missing = not_below(words, field.modulus)
    while missing.size:
        words[missing] = _bits(field, missing.size)
        missing = missing[not_below(words[missing], field.modulus)]
    return words.reshape((*shape, *tail_of(field)))


def _bits(field: Field, n: int) -> Words:
    """Draw n numbers of as many bits as the modulus has."""
    words = _from_bytes(field, os.urandom(n * field.size_bytes)).reshape(n, field.limbs)
    words[:, -1] &= dtype_of(field).type(2 ** (field.bits - field.word_bits * (field.limbs - 1)) - 1)
    return words


def not_below(words: Words, modulus: int) -> npt.NDArray[np.intp]:
    """Return the indices, ascending, of the rows of words (n, limbs) that are not below the modulus."""
    bits, unsigned = 8 * words.itemsize, words.dtype.type
    limbs = [unsigned(modulus >> bits * i & (1 << bits) - 1) for i in range(words.shape[1])]
    rows = np.flatnonzero(words[:, -1] >= limbs[-1])  # few, except of random words and in malicious files
    wrong = np.ones(len(rows), np.bool_)
    for column, limb in enumerate(limbs if len(rows) else ()):  # the last that differs decides
        part = words[rows, column]
        wrong = (part > limb) | ((part == limb) & wrong)
    return rows[wrong]
