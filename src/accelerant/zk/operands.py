"""Conversion of arguments that are points and scalars: NumPy arrays, torch tensors and Python integers.

Points go inward (to a memory space, in Montgomery form, checked) and outward (canonical, in the caller's library).
Scalars may be secret: no error shows one.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.launch import SCALAR_WORDS
from accelerant.algebra.curve.weierstrass import Curve, decode_points, encode_points, hexadecimal
from accelerant.algebra.field import memory_space
from accelerant.algebra.field.field import FieldArray
from accelerant.algebra.field.memory_space import HOST, ArrayOperand, MemorySpace, stacked
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.field.words import whole
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.files import clipped

Shape = tuple[int, ...]
PointCheck = Literal["", "curve", "subgroup"]
"""Check of points, in addition to reduced coordinates: none, on the curve, or on the curve and in the subgroup.

Functions that users call take it as bool | str: False is "", and True is "subgroup".
"""

_TESTS: dict[PointCheck, tuple[launch.Test, ...]] = {
    "": (),
    "curve": ("off_curve",),
    "subgroup": ("off_curve", "off_subgroup"),
}


def tailed_operand(field: Field, x: Any, name: str, tail: Shape) -> ArrayOperand:
    """Return an array of a field's words whose last axes are `tail`; ShapeError for others."""
    operand = memory_space.array_operand(field, x, name, "of Python")
    shape = tuple(x.shape)
    if shape[-len(tail) :] != tail:
        raise ShapeError(f"{name} must be (..., {', '.join(map(str, tail))}), got {shape}")
    return operand._replace(leading=shape[: len(shape) - len(tail)])


def spread(space: MemorySpace, words: Any, leading: Shape, shape: Shape, tail: Shape) -> Any:
    """Broadcast elements (*leading, *tail) to (*shape, *tail) and return them as (n, *tail)."""
    full = space.broadcast(words.reshape((*leading, *tail)), (*shape, *tail))
    return full.reshape((math.prod(shape), *tail))


# --- points ----------------------------------------------------------------------------------------------------------
def point_operand(curve: Curve[Any], x: Any, name: str, *, check: bool = True) -> ArrayOperand:
    """Return points from words, a Python point or a list of them; unless `check` is False, of reduced coordinates."""
    x = stacked(x, name)
    if x is None or isinstance(x, (tuple, list)):
        words = encoded_points(curve, x, name)
        return ArrayOperand(words, HOST, words.shape[: words.ndim - len(curve.shape)], free=True)
    operand = tailed_operand(curve.coordinates.base, x, name, curve.shape)
    if check:
        launch.check_reduced(operand.space, curve, operand.words, name)
    return operand


def encoded_points(curve: Curve[Any], points: Any, name: str, single: str = "") -> npt.NDArray[np.uint64]:
    """Return the canonical words of (x, y), None, or a list of them, checked; messages call one point `single`."""
    alone = not isinstance(points, list)
    listed = [points] if alone else points
    for index, point in enumerate(listed):
        _check_python(curve, point, single or name if alone else f"{name}[{index}]")
    words = encode_points(curve, listed)
    return words.reshape(curve.shape) if alone else words


def _check_python(curve: Curve[Any], point: object, name: str) -> None:
    degree, parts = curve.coordinates.degree, []
    if isinstance(point, tuple) and len(point) == 2:
        parts = list(point)
        if degree == 2:
            parts = [part for pair in point if isinstance(pair, tuple) and len(pair) == 2 for part in pair]
    whole = len(parts) == 2 * degree and all(isinstance(part, int) and not isinstance(part, bool) for part in parts)
    if point is not None and not whole:
        expected = "(x, y) of integers" if degree == 1 else "((x0, x1), (y0, y1)) of integers"
        raise UnsupportedDtype(f"{name} must be {expected}, or None for infinity, got {_types(point)}")
    for i, value in enumerate(parts):
        if not 0 <= value < curve.coordinates.base.modulus:
            raise launch.unreduced_coordinate(curve, name, i, value)


def _types(value: object, depth: int = 2) -> str:
    """Return the type's name, and those of a short tuple's parts."""
    if isinstance(value, tuple) and depth and len(value) <= 4:
        return "(" + ", ".join(_types(part, depth - 1) for part in value) + ")"
    return type(value).__name__


def montgomery_points(curve: Curve[Any], operand: ArrayOperand, space: MemorySpace) -> Any:
    """Return points in Montgomery form in a memory space, (n, *shape)."""
    words = operand.moved(space).reshape((math.prod(operand.leading), *curve.shape))
    return launch.to_montgomery(space, curve, words)


def check_of(check: bool | str) -> PointCheck:
    """Return the check that a user's argument requests; ConfigError for another value."""
    if isinstance(check, bool):
        return "subgroup" if check else ""
    if not isinstance(check, str) or check not in ("curve", "subgroup"):
        shown = clipped(check)
        raise ConfigError(f'check must be "curve", "subgroup", True (which is "subgroup") or False, got {shown}')
    return check  # type: ignore[return-value]  # mypy does not narrow a str to these


def points_inward(curve: Curve[Any], operand: ArrayOperand, space: MemorySpace, name: str, check: PointCheck) -> Any:
    """Return points in Montgomery form in a memory space, (n, *shape), checked.

    On a curve of even order the kernels add points of the subgroup only, so "curve" also checks the subgroup.
    FormatError names the flattened index of the first point that fails.
    """
    words = montgomery_points(curve, operand, space)
    if check == "curve" and curve.cofactor % 2 == 0:
        check = "subgroup"
    for test in _TESTS[check]:
        if (index := launch.first_off(space, curve, test, words)) is not None:
            one = launch.from_montgomery(space, curve, space.getitem(words, (slice(index, index + 1),)))
            (point,) = decode_points(curve, space.store(one))
            what = "is not on" if test == "off_curve" else "is out of the subgroup of"
            raise FormatError(f"{name}[{index}] (flattened) is {hexadecimal(point)}, which {what} {curve.name}")
    return words


def points_outward(curve: Curve[Any], words: Any, space: MemorySpace, leading: Shape, *operands: ArrayOperand) -> Any:
    """Return canonical words of points in Montgomery form, (*leading, *shape), in the first array's library."""
    canonical = launch.from_montgomery(space, curve, words)
    tensor = next((operand.tensor for operand in operands if not operand.free), None)
    device = None if tensor is None else tensor.device
    return memory_space.in_kind(canonical.reshape((*leading, *curve.shape)), space, device)


# --- points and scalars in either order ------------------------------------------------------------------------------
F = TypeVar("F", bound=Callable[..., Any])


def either_order(
    first: str, second: str, curve_of_call: Callable[..., Curve[Any]], *, own: int = 0, rows: bool = True
) -> Callable[[F], F]:
    """Decorate a function of points and scalars, `first` and `second` after `own` others, to tell them apart."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*given: Any, **options: Any) -> Any:
            if len(given) > own + 1:
                pair = {first: given[own], second: given[own + 1]}
                if swapped(curve_of_call(*given, **options), **pair, rows=rows):
                    given = (*given[:own], given[own + 1], given[own], *given[own + 2 :])
            elif len(given) > own and first in options:
                given, options = given[:own], options | {second: given[own]}
            return function(*given, **options)

        return call  # type: ignore[return-value]  # its signature is the function's

    return decorate


def swapped(curve: Curve[Any], scalars: Any, points: Any, *, rows: bool = True) -> bool:
    """Return whether `scalars` are the points and `points` the scalars: by types and shapes, else by the curve.

    Points are (n, ...) with scalars (n, ...) or (b, n, ...), or unless `rows` both of any dimensions that broadcast.
    ConfigError where either could be the points, and FormatError where neither can be: a message that shows the point
    that is off the curve could show scalars.
    """
    if (as_points := leading_dimensions(curve, scalars)[0]) is None:
        return False
    other_points, other_scalars = leading_dimensions(curve, points)
    if not _fit(as_points, other_scalars, rows):
        return False
    if other_points is None:
        return True
    first, second = _may_be_points(curve, scalars), _may_be_points(curve, points)
    if first and second:
        raise ConfigError("either argument could be the points: give both by name, scalars= and points=")
    if not first and second is False:
        raise FormatError(
            f"neither argument has points of {curve.name} alone: give both by name, scalars= and points=, to see which "
            "are not on it"
        )
    return bool(first)


def leading_dimensions(curve: Curve[Any], x: Any) -> tuple[Shape | None, Shape | None]:
    """Return the leading dimensions of x as points and as scalars; None for what it cannot be."""
    outer, part = Shape(), int if curve.coordinates.degree == 1 else tuple
    while isinstance(x, list | tuple) and x:
        if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], part) and isinstance(x[1], part):
            return outer, (*outer, 2, 2)[: len(outer) + curve.coordinates.degree]
        outer, x = (*outer, len(x)), x[0]
    if x is None:
        return outer, None
    if isinstance(x, int | np.integer):
        return None, outer
    if isinstance(x, FieldArray):
        return None, x.shape
    shape, tail = (*outer, *getattr(x, "shape", ())), len(curve.shape)
    points = shape[:-tail] if shape[-tail:] == curve.shape else None
    return points, shape[:-1] if shape[-1:] == (SCALAR_WORDS,) else None


def _fit(points: Shape, scalars: Shape | None, rows: bool) -> bool:
    if scalars is None:
        return False
    if rows:
        return len(points) == 1 and len(scalars) in (1, 2) and scalars[-1] == points[0]
    return all(i == j or 1 in (i, j) for i, j in zip(reversed(points), reversed(scalars), strict=False))


def _may_be_points(curve: Curve[Any], x: Any) -> bool | None:
    """Return whether x are points of the curve; None if all are infinity."""
    try:
        operand = point_operand(curve, x, "points")
    except (FormatError, ShapeError, UnsupportedDtype):
        return False
    words = montgomery_points(curve, operand, operand.space)
    if not operand.space.store(words).any():
        return None
    return not launch.off(operand.space, curve, "off_curve", words).any()


# --- scalars ---------------------------------------------------------------------------------------------------------
def scalar_operand(field: Field, scalars: Any) -> ArrayOperand:
    """Return scalars: words (..., 4) with any value, a FieldArray, or Python integers from 0 to below 2^256."""
    scalars = stacked(scalars, "scalars")
    if isinstance(scalars, (int, np.integer, list, tuple)):
        words = scalar_words(scalars, 1 << 64 * SCALAR_WORDS, "2^256")
        return ArrayOperand(words, HOST, words.shape[:-1], free=True)
    return tailed_operand(field, plain_scalars(field, scalars), "scalars", (SCALAR_WORDS,))


def plain_scalars(field: Field, scalars: Any) -> Any:
    """Return the canonical words of a FieldArray, and other arguments unchanged; ConfigError for another field's."""
    return _of_field(field, scalars).canonical() if isinstance(scalars, FieldArray) else scalars


def field_operand(field: Field, scalars: FieldArray) -> ArrayOperand:
    """Return the canonical words of a FieldArray, on its device; ConfigError for another field's."""
    return ArrayOperand(_of_field(field, scalars).plain_words(), scalars.space, scalars.shape)


def _of_field(field: Field, scalars: FieldArray) -> FieldArray:
    if scalars.field.parameters != field:
        raise ConfigError(f"scalars must be of {field.name}, got a FieldArray of {scalars.field.name}")
    return scalars


def scalar_words(scalars: Any, bound: int, shown: str) -> npt.NDArray[np.uint64]:
    """Return the words (..., 4) of integers from 0 to below `bound`, called `shown`; no error shows a value."""
    level, shape = [scalars], Shape()
    while True:
        lists = [value for value in level if isinstance(value, (list, tuple))]
        numbers = [
            value if type(value) is int else _integer(value, _label(index, shape))
            for index, value in enumerate(level)
            if not isinstance(value, (list, tuple))
        ]
        if not lists:
            break
        if numbers:
            raise ShapeError("scalars must be nested evenly, got lists and integers side by side")
        lengths = sorted({len(values) for values in lists})
        if len(lengths) > 1:
            raise ShapeError(
                f"scalars must be nested evenly, got lists of {lengths[0]} and of {lengths[-1]} side by side"
            )
        shape = (*shape, lengths[0])
        level = [value for values in lists for value in values]
    for index, number in enumerate(numbers):
        if not 0 <= number < bound:
            raise FormatError(f"{_label(index, shape)} is not from 0 to below {shown}")
    data = b"".join(number.to_bytes(8 * SCALAR_WORDS, "little") for number in numbers)
    return np.frombuffer(data, "<u8").astype(np.uint64).reshape(*shape, SCALAR_WORDS)


def _integer(value: Any, label: str) -> int:
    """Convert an integer scalar. Arrays are refused: four words would pass for four integers."""
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        raise UnsupportedDtype(f"{label} is an array: stack words into one (n, {SCALAR_WORDS}) array")
    if (number := whole(value)) is None:
        raise UnsupportedDtype(f"{label} must be an integer, got {type(value).__name__}")
    return number


def _label(index: int, shape: Shape) -> str:
    return f"scalars[{index}]{' (flattened)' * (len(shape) > 1)}" if shape else "scalars"
