"""Field elements and points as snarkjs writes them in JSON, read strictly: what comes from strangers is checked here.

A number is a decimal string. A point of G1 is [x, y, "1"], of G2 [[x0, x1], [y0, y1], ["1", "0"]] with c0 first, in
both groups infinity [0, 1, 0] with those coordinates. In Python a point is affine, None for infinity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from accelerant.algebra.curve.parameters import FAMILIES, Family
from accelerant.errors import FormatError, UnsupportedDtype
from accelerant.runtime.files import decode_json

__all__ = [
    "G1Point",
    "G2Point",
    "curve_name",
    "family_named",
    "number",
    "parse_object",
    "parse_text",
    "point_of_g1",
    "point_of_g2",
    "public_from_json",
    "public_to_json",
    "rows_of_g1",
    "rows_of_g2",
    "shown",
    "written",
]

G1Point = tuple[int, int] | None
G2Point = tuple[tuple[int, int], tuple[int, int]] | None

_NAMES = {"bn254": "bn128", "bls12_381": "bls12381"}
"""Family -> what snarkjs calls it in "curve"."""

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,120}", re.ASCII)
"""BLS12-381's modulus has 115 digits: what has more is not reduced, and no work is done on it."""

_SHOWN = 60


def parse_text(text: str | bytes, what: str) -> Any:
    """The value of a JSON text.

    Raises:
        FormatError: it is no JSON; names `what`.
        UnsupportedDtype: it is no text.
    """
    if not isinstance(text, str | bytes):
        raise UnsupportedDtype(f"{what} must be JSON text or its bytes, got {type(text).__name__}")
    try:
        return decode_json(text)
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from None


def parse_object(text: str | bytes, what: str) -> tuple[Mapping[str, Any], Family]:
    """A JSON object of Groth16, and its curve's family.

    Raises:
        FormatError: no object, another protocol, or a curve that is not known; names `what`.
    """
    value = parse_text(text, what)
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, got {shown(value)}")
    if value.get("protocol") != "groth16":
        raise FormatError(f'{what}: "protocol" must be "groth16", got {shown(value.get("protocol"))}')
    return value, family_named(value.get("curve"), what)


def family_named(name: object, what: str) -> Family:
    """The family that snarkjs calls `name`.

    Raises:
        FormatError: it is not known; names `what`.
    """
    for family, known in _NAMES.items():
        if name == known:
            return FAMILIES[family]
    raise FormatError(f'{what}: "curve" must be one of {", ".join(_NAMES.values())}, got {shown(name)}')


def curve_name(family: Family) -> str:
    """As snarkjs has it."""
    return _NAMES[family.name]


def written(value: Any) -> str:
    """JSON text as snarkjs lays it out: an indent of one, and no newline at the end."""
    return json.dumps(value, indent=1)


# --- reading ---------------------------------------------------------------------------------------------------------


def number(value: object, below: int, what: str) -> int:
    """A decimal string of a number from 0 to below `below`.

    Raises:
        FormatError: it is something else; names `what`.
    """
    if not isinstance(value, str) or not value.isascii() or not value.isdecimal():
        raise FormatError(f"{what} must be a decimal string, got {shown(value)}")
    if not _DECIMAL.fullmatch(value):
        raise FormatError(f"{what} must be a decimal string without leading zeros and reduced, got {shown(value)}")
    found = int(value)
    if found >= below:
        raise FormatError(f"{what} is {found}, not below the modulus {below}")
    return found


def point_of_g1(value: object, family: Family, what: str) -> G1Point:
    """A point of G1's curve.

    Raises:
        FormatError: not three numbers, not reduced, or off the curve; names `what`.
    """
    x, y, z = (number(part, family.q, f"{what}[{i}]") for i, part in enumerate(_list(value, 3, what)))
    if (x, y, z) == (0, 1, 0):
        return None
    if z != 1:
        raise FormatError(f'{what}[2] must be "1" (or the point 0, 1, 0 for infinity), got "{z}"')
    if not family.g1.is_on_curve((x, y)):
        raise FormatError(f"{what}, ({x:#x}, {y:#x}), is not on {family.g1.name}")
    return x, y


def point_of_g2(value: object, family: Family, what: str) -> G2Point:
    """A point of G2's curve; whether it is in the subgroup is not asked.

    Raises:
        FormatError: not three pairs of numbers, not reduced, or off the curve; names `what`.
    """
    x, y, z = (_pair(part, family.q, f"{what}[{i}]") for i, part in enumerate(_list(value, 3, what)))
    if (x, y, z) == ((0, 0), (1, 0), (0, 0)):
        return None
    if z != (1, 0):
        raise FormatError(f'{what}[2] must be ["1", "0"] (or the point 0, 1, 0 for infinity), got {z}')
    if not family.g2.is_on_curve((x, y)):
        raise FormatError(f"{what}, {(x, y)}, is not on {family.g2.name}")
    return x, y


def _pair(value: object, below: int, what: str) -> tuple[int, int]:
    c0, c1 = (number(part, below, f"{what}[{i}]") for i, part in enumerate(_list(value, 2, what)))
    return c0, c1


def _list(value: object, length: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise FormatError(f"{what} must be a list of {length}, got {shown(value)}")
    return value


def public_from_json(text: str | bytes, modulus: int, what: str) -> tuple[int, ...]:
    """Public inputs: a list of decimal strings, each below the modulus of the scalars.

    Raises:
        FormatError: something else; names the index.
    """
    value = parse_text(text, what)
    if not isinstance(value, list):
        raise FormatError(f"{what} must be a list of decimal strings, got {shown(value)}")
    return tuple(number(part, modulus, f"{what}[{i}]") for i, part in enumerate(value))


def shown(value: object) -> str:
    """A value in a message, cut where it is long."""
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


# --- writing ---------------------------------------------------------------------------------------------------------


def public_to_json(public: tuple[int, ...]) -> str:
    """Public inputs as snarkjs's public.json."""
    return written([str(value) for value in public])


def rows_of_g1(point: G1Point) -> list[str]:
    """As point_of_g1 reads it."""
    return ["0", "1", "0"] if point is None else [str(point[0]), str(point[1]), "1"]


def rows_of_g2(point: G2Point) -> list[list[str]]:
    """As point_of_g2 reads it."""
    if point is None:
        return [["0", "0"], ["1", "0"], ["0", "0"]]
    return [*([str(c0), str(c1)] for c0, c1 in point), ["1", "0"]]
