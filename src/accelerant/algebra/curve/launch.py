"""Launches of the curve kernels (program.py) on points at a place, counted in the ledger.

Points here are words that places.py keeps, (n, *curve.shape), contiguous, affine, in Montgomery form, infinity all
zeros; on the curve, but for what asks whether they are. Scalars are (n, 4), any number below 2^256.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, Literal

import numpy as np

from accelerant.algebra.counted import counted
from accelerant.algebra.curve.program import kernel_source
from accelerant.algebra.curve.program import launch as grid_and_block
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.places import Place
from accelerant.algebra.field.words import dtype_of, modulus_words
from accelerant.errors import FormatError, ShapeError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.ledger import OpRecord, ledger

__all__ = [
    "SCALAR_WORDS",
    "Test",
    "add",
    "check_reduced",
    "first_off",
    "first_unreduced",
    "from_montgomery",
    "multiply",
    "neg",
    "off",
    "to_montgomery",
    "unreduced_coordinate",
]

Words = Any
Test = Literal["off_curve", "off_subgroup"]

SCALAR_WORDS = 4
"""Of a scalar, in every curve."""

_CHUNKS = {"cpu": 64, "": 128}
"""Points that become one answer: on the CPU an index does a chunk, elsewhere a block (or, of one point, a thread)."""

_ADDITION, _DOUBLING, _BITS = 12, 8, 256
"""Multiplications of coordinates that the ledger counts for a step, and steps of a multiplication."""


def to_montgomery(place: Place, curve: Curve[Any], points: Words) -> Words:
    """Of canonical ones."""
    return field_launch.unary(place, curve.coordinates.base, "to_montgomery", points, "canonical")


def from_montgomery(place: Place, curve: Curve[Any], points: Words) -> Words:
    """Canonical ones."""
    return field_launch.unary(place, curve.coordinates.base, "from_montgomery", points, "montgomery")


def add(place: Place, curve: Curve[Any], x: Words, y: Words) -> Words:
    """The sums of points of one shape.

    Raises:
        ShapeError: not as many of one as of the other.
    """
    if _count(x) != _count(y):
        raise ShapeError(f"curve addition: wanted as many points on both sides, got {_count(x)} and {_count(y)}")
    n, z = _count(x), _like(place, curve, x)
    with _counted(place, curve, "add", n, arrays=3, operations=_ADDITION * n):
        _launch(place, curve, "curve_add", (x, y, z), (n,), n)
    return z


def neg(place: Place, curve: Curve[Any], x: Words) -> Words:
    """The opposites."""
    n, z = _count(x), _like(place, curve, x)
    with _counted(place, curve, "neg", n, arrays=2, operations=0):
        _launch(place, curve, "curve_neg", (x, z), (n,), n)
    return z


def multiply(place: Place, curve: Curve[Any], x: Words, scalars: Words) -> Words:
    """The multiples; one point or one scalar stands for as many as there are of the other.

    Raises:
        ShapeError: neither is one, and there are not as many of one as of the other.
    """
    points, count = _count(x), _count(scalars)
    if points != count and 1 not in (points, count):
        raise ShapeError(f"curve multiplication: {points} points and {count} scalars; wanted as many, or one of either")
    n = points if count == 1 else count
    z = place.empty((n, *curve.shape), dtype_of(curve.coordinates.base))
    steps = int(points > 1), int(count > 1)
    with _counted(place, curve, "mul", n, arrays=2, operations=(_DOUBLING * _BITS + _ADDITION * _BITS // 4) * n):
        _launch(place, curve, "curve_mul", (x, scalars, z), (n, *steps), n)
    return z


def first_off(place: Place, curve: Curve[Any], test: Test, x: Words) -> int | None:
    """The least index of a point off the curve, or of one (all on the curve) out of the subgroup; None: there is none.

    Needs no kernel for the subgroup of a curve all of whose points are in it.
    """
    n, chunk = _count(x), _CHUNKS.get(place.backend, _CHUNKS[""])
    found = place.least(_firsts(place, curve, test, x, chunk)) if n and _asks(curve, test) else n
    return found if found < n else None


def off(place: Place, curve: Curve[Any], test: Test, x: Words) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which points are off, (n,) on the host."""
    n = _count(x)
    if first_off(place, curve, test, x) is None:  # one quick question for all, which mostly is answered so
        return np.zeros(n, np.bool_)
    return np.asarray(place.store(_firsts(place, curve, test, x, 1)).view(np.int64) < n)


def _asks(curve: Curve[Any], test: Test) -> bool:
    return test == "off_curve" or curve.cofactor != 1


def _firsts(place: Place, curve: Curve[Any], test: Test, x: Words, chunk: int) -> Words:
    """For each chunk the least index of a point that is off, else n."""
    n = _count(x)
    firsts = place.empty((-(-n // chunk),), np.dtype(np.int64))
    with _counted(place, curve, test, n, arrays=1, operations=0):
        _launch(place, curve, f"curve_{test}", (x, firsts), (n, chunk), n, chunk)
    return firsts


# --- reduction -------------------------------------------------------------------------------------------------------


def first_unreduced(place: Place, field: Field, words: Words) -> int | None:
    """The least index of an element, (..., limbs) of 64 bits, that is not below the modulus; None: there is none."""
    try:
        field_launch.check_reduced(place, field, words, "")
    except FormatError:  # it tells the value too, which may be a secret; the index is looked for again on the host
        data, bound = (_big_endian(each) for each in (place.store(words), np.array(modulus_words(field), np.uint64)))
        size = len(bound)
        return next(i for i in range(len(data) // size) if data[i * size : (i + 1) * size] >= bound)
    return None


def _big_endian(words: np.ndarray[Any, Any]) -> bytes:
    """Elements' bytes, the most significant first: they compare as the numbers do."""
    return words[..., ::-1].astype(">u8").tobytes()


def check_reduced(place: Place, curve: Curve[Any], points: Words, name: str) -> None:
    """Refuse canonical words of points, (..., *shape), of which a coefficient is not below the modulus.

    Raises:
        FormatError: names the first one's point, by its flattened index, its coordinate and its value.
    """
    field = curve.coordinates.base
    index = first_unreduced(place, field, points)
    if index is not None:
        words = np.asarray(place.store(points)).reshape(-1, field.limbs)[index]
        point, part = divmod(index, 2 * curve.coordinates.degree)
        value = int.from_bytes(_big_endian(words), "big")
        raise unreduced_coordinate(curve, f"{name}[{point}] (flattened)", part, value)


def unreduced_coordinate(curve: Curve[Any], point: str, part: int, value: int) -> FormatError:
    """The error of a point's coefficient, of number `part`: x before y, c0 before c1."""
    degree, modulus = curve.coordinates.degree, curve.coordinates.base.modulus
    coordinate = "xy"[part // degree] + (f".c{part % degree}" if degree > 1 else "")
    what = "negative" if value < 0 else f"not below the modulus {modulus:#x}"
    return FormatError(f"{point} {coordinate} is {value:#x}, {what}")


# --- one launch ------------------------------------------------------------------------------------------------------


def _count(words: Words) -> int:
    """How many points or scalars."""
    return int(words.shape[0])


def _like(place: Place, curve: Curve[Any], x: Words) -> Words:
    return place.empty(tuple(x.shape), dtype_of(curve.coordinates.base))


@functools.cache
def _kernel(curve: Curve[Any], entry: str, backend: str, device: int) -> Kernel:
    return registry.create(backend).compile(kernel_source(curve, entry), device=device)


def _launch(
    place: Place, curve: Curve[Any], entry: str, words: Sequence[Words], sizes: Sequence[int], n: int, chunk: int = 1
) -> None:
    if n:
        kernel = _kernel(curve, entry, place.backend, place.index)
        grid, block = ((-(-n // chunk),), (1,)) if place.backend == "cpu" else grid_and_block(entry, n, chunk)
        place.provider.launch(kernel, grid, block, (*map(place.pointer, words), *sizes))


def _counted(
    place: Place, curve: Curve[Any], op: str, n: int, *, arrays: int, operations: int
) -> AbstractContextManager[None]:
    return counted(place, _record(curve, f"curve_{op}", place, n, arrays, operations))


@functools.lru_cache(maxsize=4096)
def _record(curve: Curve[Any], op: str, place: Place, n: int, arrays: int, operations: int) -> OpRecord:
    dialect, _ = kernel_source(curve).pick(place.provider.dialects)
    return ledger().record(
        OpRecord(
            op=op,
            implementation=dialect,
            backend=place.backend,
            device=place.label,
            case=f"{n} {curve.name}",
            own=True,
            bytes_per_call=arrays * n * prod(curve.shape) * dtype_of(curve.coordinates.base).itemsize,
            flops_per_call=operations,
            reason=f"the only one on {place.backend}",
        )
    )
