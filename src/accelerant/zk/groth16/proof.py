"""A Groth16 proof, and the JSON form of proofs, keys and public inputs in snarkjs's files, which is checked strictly.

A number is a decimal string. A point of G1 is [x, y, "1"], of G2 [[x0, x1], [y0, y1], ["1", "0"]] with c0 first; in
both groups infinity is [0, 1, 0] with such coordinates. In Python a point is affine, None for infinity.
"""

from __future__ import annotations

import itertools
import json
import operator
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import FAMILIES, Curve, Family, family_of
from accelerant.algebra.curve.weierstrass import decode_points, encode_points
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import known_name, letters_of
from accelerant.algebra.field.words import index_of
from accelerant.errors import ConfigError, FormatError, MissingFile, UnsupportedCase, UnsupportedDtype
from accelerant.runtime.files import clipped, decode_json, read_regular
from accelerant.zk.operands import point_operand, points_inward

U64 = npt.NDArray[np.uint64]
G1Point = tuple[int, int] | None
G2Point = tuple[tuple[int, int], tuple[int, int]] | None

SNARKJS_CURVES = {"bn254": "bn128", "bls12_381": "bls12381"}  # a registered family has its own name

JsonSource = str | bytes | os.PathLike[str] | dict[str, Any]
"""JSON text, the path of a file (a PathLike, or a str that ends in .json), or the value of a text, parsed."""

_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]{1,96}", re.ASCII)
_DECIMAL = re.compile(r"0|[1-9][0-9]{0,120}", re.ASCII)  # longer numbers are refused without parsing
MAX_JSON_BYTES = 64 << 20  # Longest other text that is read: a verification key of 300,000 public inputs has that size
_MAX_PROOF_BYTES = 1 << 16  # Longest text of a proof that is parsed; snarkjs writes about 1,000 bytes
_MAX_SHOWN = 60  # Characters of a value in an error message


@dataclass(frozen=True, slots=True, repr=False)
class Proof:
    """A proof: affine points of integers, None for infinity; those read from JSON are on their curves.

    Attributes:
        family: "bn254", "bls12_381", or a registered one.
        a: pi_A, of G1.
        b: pi_B, of G2; coordinates are pairs (c0, c1).
        c: pi_C, of G1.
        public: public inputs w[1] to w[nPublic] of the prover; None if unknown.
    """

    family: str
    a: G1Point
    b: G2Point
    c: G1Point
    public: tuple[int, ...] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        """Replace another name of the family, such as bn128."""
        if isinstance(self.family, str):
            object.__setattr__(self, "family", known_name(self.family))

    def __repr__(self) -> str:
        inputs = "public inputs unknown" if self.public is None else f"{len(self.public)} public inputs"
        return f"Proof({self.family}, {inputs})"

    @classmethod
    def from_json(
        cls, text: JsonSource, public: JsonSource | Sequence[Any] | None = None, *, n_public: int | None = None,
        name: str = "proof", public_name: str = "public",
    ) -> Proof:  # fmt: skip
        """Read snarkjs's proof.json, and public.json if the inputs are to be kept with the proof.

        Args:
            text: proof.json, at most 64 KiB: its text, its path (a PathLike, or a str that ends in .json), or its
                value, parsed. Bytes are never a path. Without a "curve" it is on BN254, as rapidsnark writes it.
            public: public.json, in the same forms.
            n_public: number of public inputs that the verification key takes; more text than so many need is refused
                before it is parsed, another number of them before their values are.
            name, public_name: of the texts, for messages.

        Raises:
            FormatError: malformed JSON, a name given twice, a coordinate or input that is not reduced, a point off its
                curve, another number of inputs, or too much text; names the element. MissingFile: no such file.
            UnsupportedDtype: neither text nor bytes, a path or a value of JSON.
        """
        n_public = None if n_public is None else index_of(n_public, "n_public")
        text = read_json(text, name, _MAX_PROOF_BYTES, "a proof")
        value, family = parse_groth16(text, name, curve=SNARKJS_CURVES["bn254"])
        for key in ("pi_a", "pi_b", "pi_c"):
            if key not in value:
                raise FormatError(f'{name} has no "{key}"')
        curves: dict[str, Curve[Any]] = {"pi_a": family.g1, "pi_b": family.g2, "pi_c": family.g1}
        a, b, c = (point_from_json(value[key], curve, f"{name}: {key}") for key, curve in curves.items())
        inputs = None if public is None else tuple(inputs_from(public, family, n_public, public_name))
        return cls(family.name, a, b, c, inputs)

    def to_json(self) -> str:
        """Return the contents of snarkjs's proof.json.

        Raises:
            FormatError, UnsupportedDtype: a point that `verify` refuses, too.
        """
        family, (a, b, c) = family_of(self.family), self._checked_points()
        return dump_json(
            {
                "pi_a": point_to_json(family.g1, a),
                "pi_b": point_to_json(family.g2, b),
                "pi_c": point_to_json(family.g1, c),
                "protocol": "groth16",
                "curve": SNARKJS_CURVES.get(family.name, family.name),
            }
        )

    def public_json(self) -> str:
        """Return the contents of snarkjs's public.json.

        Raises:
            ConfigError: the public inputs are unknown.
            FormatError, UnsupportedDtype: an input that `verify` refuses, too.
        """
        inputs = check_inputs(self._known_public(), family_of(self.family), "public")
        return dump_json([str(value) for value in inputs])

    def to_calldata(self, public: Sequence[int] | None = None) -> str:
        """Return the arguments of verifyProof in snarkjs's Solidity contract, as `zkey export soliditycalldata` does.

        Each number is a string of 64 hexadecimal digits; pairs have c1 first, as in EIP-197.

        Args:
            public: public inputs; by default those of the prover.

        Raises:
            ConfigError: the public inputs are unknown.
            FormatError, UnsupportedDtype: an input or a point that `verify` refuses, too.
            UnsupportedCase: another curve than BN254, or a point at infinity.
        """
        known = self._known_public() if public is None else public
        inputs = check_inputs(known, family_of(self.family), "public")
        if self.family != "bn254":
            raise UnsupportedCase(f"call data is for contracts on BN254; this proof is on {self.family}")
        points = self._checked_points()
        if None in points:
            raise UnsupportedCase("snarkjs's call data has no form for a point at infinity, which no honest proof has")
        pairs = ",".join(f"[{', '.join(map(_word, reversed(pair)))}]" for pair in points[1])
        a, c = (", ".join(map(_word, points[i])) for i in (0, 2))
        return f"[{a}],[{pairs}],[{c}],[{','.join(map(_word, inputs))}]"

    def _checked_points(self) -> list[Any]:
        """Return a, b and c after the checks of `verify`: types, reduced, on the curve, in the subgroup."""
        family, found = family_of(self.family), list[Any]()
        points: dict[str, tuple[Curve[Any], Any]] = {
            "pi_a": (family.g1, self.a),
            "pi_b": (family.g2, self.b),
            "pi_c": (family.g1, self.c),
        }
        for name, (curve, point) in points.items():
            words = encoded_points(curve, [point], [name])
            with named({"points": [name]}):
                points_inward(curve, point_operand(curve, words, "points"), HOST, "points", "subgroup")
            found += decode_points(curve, words)
        return found

    def _known_public(self) -> tuple[int, ...]:
        if self.public is None:
            raise ConfigError("the proof's public inputs are not known here: give them")
        return self.public


def check_inputs(public: Iterable[Any], family: Family, name: str, n_public: int | None = None) -> list[int]:
    """Return public inputs, integers or text such as "0x21", as exact ints, counted first; errors name the index."""
    if isinstance(public, str | bytes | bytearray | Mapping | Set) or not isinstance(public, Iterable):
        raise UnsupportedDtype(f"{name} must be a sequence of Python integers, got {type(public).__name__}")
    values = list(public if n_public is None else itertools.islice(public, n_public + 1))
    if n_public is not None and len(values) != n_public:
        found = len(public) if isinstance(public, Sized) else len(values)
        more = "" if isinstance(public, Sized) or found < n_public else "or more "
        raise FormatError(f"{name} has {found} {more}inputs; the verification key is for {n_public}")
    for i, value in enumerate(values):
        if isinstance(value, str):
            if not _DECIMAL.fullmatch(value) and not _HEXADECIMAL.fullmatch(value):
                wanted = f'{name}[{i}] must be an integer, or text such as "33" or "0x21"'
                raise FormatError(f"{wanted}, got {abbreviated(value)}")
            values[i] = value = int(value, 0)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedDtype(f"{name}[{i}] must be a Python integer, got {type(value).__name__} {clipped(value)}")
        values[i] = value = operator.index(value)
        if not 0 <= value < family.r:
            raise FormatError(f"{name}[{i}] is {clipped(value)}, not from 0 to below the order {family.r}")
    return values


def encoded_points(curve: Curve[Any], points: Sequence[Any], names: Sequence[str]) -> U64:
    """Return a proof's points as canonical words, checking their types: a Proof made in Python may hold anything."""
    degree = curve.coordinates.degree
    for point, name in zip(points, names, strict=True):
        if point is not None and not _is_nested_pair(point, degree):
            expected = "a pair of Python integers" if degree == 1 else "a pair of pairs of Python integers"
            raise UnsupportedDtype(f"{name} must be {expected}, or None for infinity; got {_types(point)}")
    with named({"points": names}):
        return encode_points(curve, points)


def _is_nested_pair(value: object, degree: int) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if degree == 1:
        return all(isinstance(part, int) and not isinstance(part, bool) for part in value)
    return all(_is_nested_pair(part, 1) for part in value)


def _types(value: object) -> str:
    """Return the types in a point, without its values."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_types, value))})"
    return type(value).__name__


_INDEXED = re.compile(r"^(\w+)\[(\d+)\](?: \(flattened\))?")


@contextmanager
def named(names: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Replace an argument and index at the start of an error's text by the name of that point."""
    try:
        yield
    except FormatError as error:
        text = _INDEXED.sub(lambda match: names[match[1]][int(match[2])] if match[1] in names else match[0], str(error))
        raise FormatError(text) from None


def _word(value: int) -> str:
    return f'"0x{value:064x}"'


# --- JSON ------------------------------------------------------------------------------------------------------------
def most_public_bytes(n_public: int) -> int:
    """Return the most bytes of public.json that are read for so many inputs: 79 each, and room for spaces."""
    return 1024 + 256 * n_public


def of_json(kind: Any, value: Any, **options: str) -> Any:
    """Return a value of a class, or what its from_json reads of one of JSON; others unchanged."""
    return kind.from_json(value, **options) if isinstance(value, str | bytes | os.PathLike | dict) else value


def read_json(source: Any, name: str, most_bytes: int, what: str) -> Any:
    """Return the text of a JsonSource, or its value if that is given; FormatError for more bytes."""
    if isinstance(source, os.PathLike) or (isinstance(source, str) and source.endswith(".json")):
        try:
            source = read_regular(Path(source), most_bytes)
        except FileNotFoundError:
            raise MissingFile(f"{name}: {source} does not exist") from None
        except OSError as error:
            raise FormatError(f"{name}: {source} cannot be read: {error.strerror}") from None
    if isinstance(source, str | bytes) and len(source) > most_bytes:
        raise FormatError(f"{name}: {what} has at most {most_bytes:,} bytes, got {len(source):,}")
    return source


def inputs_from(source: Any, family: Family, n_public: int | None, name: str) -> Sequence[int]:
    """Return public inputs, of public.json or in Python, checked; errors as those of `verify`."""
    if not isinstance(source, str | bytes | os.PathLike):
        return check_inputs(source, family, name, n_public)
    most = MAX_JSON_BYTES if n_public is None else most_public_bytes(n_public)
    text: Any = read_json(source, name, most, f"a list of {n_public} public inputs")
    open_list, open_object = ("[", "{") if isinstance(text, str) else (b"[", b"{")
    if isinstance(text, str | bytes) and (text.count(open_list) != 1 or open_object in text):  # type: ignore[arg-type, operator]  # of one type
        raise FormatError(f"{name} must be a list of decimal strings, without other lists and objects")
    rows = _parse(text, name)
    if not isinstance(rows, list):
        raise FormatError(f"{name} must be a list of decimal strings, got {abbreviated(rows)}")
    if n_public is not None and len(rows) != n_public:
        raise FormatError(f"{name} has {len(rows)} inputs; the verification key is for {n_public}")
    return tuple(_number(row, family.r, f"{name}[{i}]") for i, row in enumerate(rows))


def parse_groth16(text: Any, what: str, *, curve: str | None = None) -> tuple[Mapping[str, Any], Family]:
    """Parse a JSON object of Groth16 and return it with its curve's family; `curve` is that of one which names none."""
    value = _parse(text, what)
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, got {abbreviated(value)}")
    if value.get("protocol") != "groth16":
        raise FormatError(f'{what}: "protocol" must be "groth16", got {abbreviated(value.get("protocol"))}')
    name = value.get("curve", curve)
    families = {letters_of(family): family for family in FAMILIES}
    letters = letters_of(known_name(name)) if isinstance(name, str) else ""
    if letters not in families:
        names = ", ".join(SNARKJS_CURVES.get(family, family) for family in FAMILIES)
        raise FormatError(f'{what}: "curve" must be one of {names}, got {abbreviated(name)}')
    return value, FAMILIES[families[letters]]


def _parse(text: Any, what: str) -> Any:
    if isinstance(text, dict):
        return text
    if not isinstance(text, str | bytes):
        raise UnsupportedDtype(
            f"{what} must be JSON text or its bytes, got {type(text).__name__}: a path and a dict are read, too"
        )
    try:
        return decode_json(text, unique=True)
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from None


def _number(value: object, below: int, what: str) -> int:
    if not isinstance(value, str) or not value.isascii() or not value.isdecimal():
        raise FormatError(f"{what} must be a decimal string, got {abbreviated(value)}")
    if not _DECIMAL.fullmatch(value):
        raise FormatError(
            f"{what} must be a decimal string without leading zeros and reduced, got {abbreviated(value)}"
        )
    if (number := int(value)) >= below:
        raise FormatError(f"{what} is {number}, not below the modulus {below}")
    return number


def point_from_json(value: object, curve: Curve[Any], what: str) -> Any:
    """Read an affine point of the curve, in the subgroup or not, None for infinity; FormatError names `what`."""
    k = curve.coordinates
    x, y, z = (_coordinate(row, curve, f"{what}[{i}]") for i, row in enumerate(_list(value, 3, what)))
    if (x, y, z) == (k.zero, k.one, k.zero):
        return None
    if z != k.one:
        one, got = (json.dumps(_rows(curve, coordinate)) for coordinate in (k.one, z))
        raise FormatError(f"{what}[2] must be {one} (or the point 0, 1, 0 for infinity), got {got}")
    if not curve.is_on_curve((x, y)):
        raise FormatError(f"{what}, {(x, y)}, is not on {curve.name}")
    return x, y


def _coordinate(value: object, curve: Curve[Any], what: str) -> Any:
    k = curve.coordinates
    if k.degree == 1:
        return _number(value, k.base.modulus, what)
    rows = enumerate(_list(value, k.degree, what))
    return k.join([_number(row, k.base.modulus, f"{what}[{i}]") for i, row in rows])


def _list(value: object, length: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise FormatError(f"{what} must be a list of {length}, got {abbreviated(value)}")
    return value


def point_to_json(curve: Curve[Any], point: Any) -> list[Any]:
    """Return the rows that point_from_json reads."""
    k = curve.coordinates
    return [_rows(curve, x) for x in ((k.zero, k.one, k.zero) if point is None else (*point, k.one))]


def _rows(curve: Curve[Any], coordinate: Any) -> str | list[str]:
    parts = [str(part) for part in curve.coordinates.parts(coordinate)]
    return parts if len(parts) > 1 else parts[0]


def abbreviated(value: object) -> str:
    """Return a value's JSON for a message, truncated if it is long."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError):  # a value that is not of JSON, of a dict made in Python
        return clipped(value, _MAX_SHOWN)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def dump_json(value: Any) -> str:
    """Return JSON in snarkjs's layout: indented by one, without a final newline."""
    return json.dumps(value, indent=1)
