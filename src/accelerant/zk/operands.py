"""Arguments of functions of points: arrays of words of NumPy and torch, and what Python's integers become."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from accelerant.algebra.curve.launch import SCALAR_WORDS
from accelerant.algebra.field import words as host
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import HOST, Place, inward, is_tensor, place_of
from accelerant.errors import FormatError, ShapeError, UnsupportedDtype

__all__ = ["Operand", "array_operand", "moved", "scalar_operand", "spread"]

Shape = tuple[int, ...]

_SCALAR_LIMIT = 1 << 64 * SCALAR_WORDS


@dataclass(frozen=True, slots=True)
class Operand:
    """An argument.

    Attributes:
        words: of it, contiguous.
        leading: dimensions before a point's or a scalar's own.
        place: where they are.
        tensor: that it came from, if it was one.
        free: made of Python's integers, which go where the other argument is.
    """

    words: Any
    leading: Shape
    place: Place
    tensor: Any = None
    free: bool = False


def array_operand(x: Any, field: Field, name: str, tail: Shape) -> Operand:
    """An array of a field's words whose last axes are `tail`, those of a point.

    Raises:
        UnsupportedDtype, ShapeError: something else.
        ConfigError: a tensor on a device that no kernel of ours reaches.
    """
    tensor = x if is_tensor(x) else None
    if tensor is None and not isinstance(x, np.ndarray):
        raise UnsupportedDtype(f"{name} must be a NumPy array, a torch tensor or of Python, got {type(x).__name__}")
    if tensor is not None:
        dtype, place = str(x.dtype).removeprefix("torch."), place_of(x)
    else:
        dtype, place = x.dtype.name if x.dtype.isnative else x.dtype.str, HOST
    host.check_words(field, dtype, x.shape, name)
    shape = tuple(x.shape)
    if shape[-len(tail) :] != tail:
        raise ShapeError(f"{name} must be (..., {', '.join(map(str, tail))}), got {shape}")
    words = x
    if tensor is not None:
        words = x.detach().numpy() if place is HOST else inward(x)
    return Operand(place.contiguous(words), shape[: len(shape) - len(tail)], place, tensor)


def scalar_operand(field: Field, scalars: Any) -> Operand:
    """Scalars: words (..., 4) of any content, or Python's integers from 0 to below 2^256.

    Raises:
        UnsupportedDtype, ShapeError, FormatError: something else; names the flattened index of an integer.
    """
    if not isinstance(scalars, (int, np.integer, list, tuple)):
        return array_operand(scalars, field, "scalars", (SCALAR_WORDS,))
    array = np.array(scalars, dtype=object)
    data = bytearray()
    for index, value in enumerate(array.reshape(-1).tolist()):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise UnsupportedDtype(f"scalars[{index}] (flattened) is {value!r}, not an integer")
        if not 0 <= value < _SCALAR_LIMIT:
            raise FormatError(f"scalars[{index}] (flattened) is not from 0 to below 2^256")
        data += int(value).to_bytes(8 * SCALAR_WORDS, "little")
    words = np.frombuffer(bytes(data), "<u8").astype(np.uint64).reshape(*array.shape, SCALAR_WORDS)
    return Operand(words, array.shape, HOST, free=True)


def moved(operand: Operand, place: Place) -> Any:
    """The words at a place."""
    return operand.words if operand.place == place else place.load(operand.place.store(operand.words))


def spread(place: Place, words: Any, leading: Shape, shape: Shape, tail: Shape) -> Any:
    """Words of elements with these leading dimensions and tail broadcast to a shape, (n, *tail)."""
    full = place.spread(place.shaped(words, (*leading, *tail)), (*shape, *tail))
    return place.shaped(full, (math.prod(shape), *tail))
