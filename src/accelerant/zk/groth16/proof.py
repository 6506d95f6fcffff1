"""A Groth16 proof, and the JSON form of proofs, keys and public inputs in snarkjs's files, which is checked strictly.

A number is a decimal string. A point of G1 is [x, y, "1"], of G2 [[x0, x1], [y0, y1], ["1", "0"]] with c0 first; in
both groups infinity is [0, 1, 0] with such coordinates. In Python a point is affine, None for infinity.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from accelerant.algebra.curve.parameters import FAMILIES, Family, family_of
from accelerant.errors import ConfigError, FormatError, UnsupportedCase, UnsupportedDtype
from accelerant.runtime.files import decode_json

__all__ = [
    "SNARKJS_CURVES",
    "G1Point",
    "G2Point",
    "Proof",
    "abbreviated",
    "check_inputs",
    "dump_json",
    "g1_from_json",
    "g1_to_json",
    "g2_from_json",
    "g2_to_json",
    "parse_groth16",
]

G1Point = tuple[int, int] | None
G2Point = tuple[tuple[int, int], tuple[int, int]] | None

SNARKJS_CURVES = {"bn254": "bn128", "bls12_381": "bls12381"}
"""Family -> snarkjs's name of the curve."""

_DECIMAL = re.compile(r"0|[1-9][0-9]{0,120}", re.ASCII)
"""BLS12-381's modulus has 115 digits: longer numbers are not reduced, and are refused without parsing them."""

_MAX_SHOWN = 60
"""Characters of a value in an error message."""


@dataclass(frozen=True, slots=True)
class Proof:
    """A proof: affine points of integers, None for infinity; those read from JSON are on their curves.

    Attributes:
        family: "bn254" or "bls12_381".
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

    @classmethod
    def from_json(
        cls, text: str | bytes, public: str | bytes | None = None, *, name: str = "proof", public_name: str = "public"
    ) -> Proof:
        """Read a proof in snarkjs's form.

        Args:
            text: contents of proof.json.
            public: contents of public.json, if the inputs are to be kept with the proof.
            name: file name for messages.
            public_name: file name of the public inputs.

        Raises:
            FormatError: malformed JSON, a coordinate that is not reduced, or a point off its curve; names the element.
        """
        value, family = parse_groth16(text, name)
        for key in ("pi_a", "pi_b", "pi_c"):
            if key not in value:
                raise FormatError(f'{name} has no "{key}"')
        return cls(
            family=family.name,
            a=g1_from_json(value["pi_a"], family, f"{name}: pi_a"),
            b=g2_from_json(value["pi_b"], family, f"{name}: pi_b"),
            c=g1_from_json(value["pi_c"], family, f"{name}: pi_c"),
            public=None if public is None else _inputs_from_json(public, family.r, public_name),
        )

    def to_json(self) -> str:
        """Return the contents of snarkjs's proof.json."""
        return dump_json(
            {
                "pi_a": g1_to_json(self.a),
                "pi_b": g2_to_json(self.b),
                "pi_c": g1_to_json(self.c),
                "protocol": "groth16",
                "curve": SNARKJS_CURVES[family_of(self.family).name],
            }
        )

    def public_json(self) -> str:
        """Return the contents of snarkjs's public.json.

        Raises:
            ConfigError: the public inputs are unknown.
        """
        return dump_json([str(value) for value in self._known_public()])

    def to_calldata(self, public: Sequence[int] | None = None) -> str:
        """Return the arguments of verifyProof in snarkjs's Solidity contract, as `zkey export soliditycalldata` does.

        Each number is a string of 64 hexadecimal digits; pairs have c1 first, as in EIP-197.

        Args:
            public: public inputs; by default those of the prover.

        Raises:
            ConfigError: the public inputs are unknown.
            FormatError, UnsupportedDtype: an input is not below the order r, or not a Python integer.
            UnsupportedCase: another curve than BN254, or a point at infinity.
        """
        known = self._known_public() if public is None else public
        inputs = check_inputs(known, family_of(self.family), "public")
        if self.family != "bn254":
            raise UnsupportedCase(f"call data is for contracts on BN254; this proof is on {self.family}")
        if self.a is None or self.b is None or self.c is None:
            raise UnsupportedCase("snarkjs's call data has no form for a point at infinity, which no honest proof has")
        pairs = ",".join(f"[{', '.join(map(_word, reversed(pair)))}]" for pair in self.b)
        a, c = (", ".join(map(_word, point)) for point in (self.a, self.c))
        return f"[{a}],[{pairs}],[{c}],[{','.join(map(_word, inputs))}]"

    def _known_public(self) -> tuple[int, ...]:
        if self.public is None:
            raise ConfigError("the proof's public inputs are not known here: give them")
        return self.public


def check_inputs(public: Sequence[int], family: Family, name: str) -> list[int]:
    """Return public inputs as a list after checking that they are Python integers below r.

    Raises:
        UnsupportedDtype: not a sequence, or not of Python integers; names the index.
        FormatError: an input is not from 0 to below r; names the index.
    """
    try:
        values = list(public)
    except TypeError:
        raise UnsupportedDtype(f"{name} must be a sequence of Python integers, got {type(public).__name__}") from None
    for i, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedDtype(f"{name}[{i}] must be a Python integer, got {type(value).__name__} {value!r}")
        if not 0 <= value < family.r:
            raise FormatError(f"{name}[{i}] is {value}, not from 0 to below the order {family.r}")
    return values


def _word(value: int) -> str:
    return f'"0x{value:064x}"'


# --- JSON ------------------------------------------------------------------------------------------------------------


def parse_groth16(text: str | bytes, what: str) -> tuple[Mapping[str, Any], Family]:
    """Parse a JSON object of Groth16 and return it with its curve's family.

    Raises:
        FormatError: not JSON, not an object, another protocol, or an unknown curve; names `what`.
        UnsupportedDtype: not text.
    """
    value = _parse(text, what)
    if not isinstance(value, dict):
        raise FormatError(f"{what} must be a JSON object, got {abbreviated(value)}")
    if value.get("protocol") != "groth16":
        raise FormatError(f'{what}: "protocol" must be "groth16", got {abbreviated(value.get("protocol"))}')
    for family, name in SNARKJS_CURVES.items():
        if value.get("curve") == name:
            return value, FAMILIES[family]
    names = ", ".join(SNARKJS_CURVES.values())
    raise FormatError(f'{what}: "curve" must be one of {names}, got {abbreviated(value.get("curve"))}')


def _parse(text: str | bytes, what: str) -> Any:
    if not isinstance(text, str | bytes):
        raise UnsupportedDtype(f"{what} must be JSON text or its bytes, got {type(text).__name__}")
    try:
        return decode_json(text)
    except ValueError as error:
        raise FormatError(f"{what} is not JSON: {error}") from None


def _inputs_from_json(text: str | bytes, modulus: int, what: str) -> tuple[int, ...]:
    value = _parse(text, what)
    if not isinstance(value, list):
        raise FormatError(f"{what} must be a list of decimal strings, got {abbreviated(value)}")
    return tuple(_number(part, modulus, f"{what}[{i}]") for i, part in enumerate(value))


def _number(value: object, below: int, what: str) -> int:
    if not isinstance(value, str) or not value.isascii() or not value.isdecimal():
        raise FormatError(f"{what} must be a decimal string, got {abbreviated(value)}")
    if not _DECIMAL.fullmatch(value):
        raise FormatError(
            f"{what} must be a decimal string without leading zeros and reduced, got {abbreviated(value)}"
        )
    number = int(value)
    if number >= below:
        raise FormatError(f"{what} is {number}, not below the modulus {below}")
    return number


def g1_from_json(value: object, family: Family, what: str) -> G1Point:
    """Read a point of G1.

    Raises:
        FormatError: not three numbers, not reduced, or off the curve; names `what`.
    """
    x, y, z = (_number(part, family.q, f"{what}[{i}]") for i, part in enumerate(_list(value, 3, what)))
    if (x, y, z) == (0, 1, 0):
        return None
    if z != 1:
        raise FormatError(f'{what}[2] must be "1" (or the point 0, 1, 0 for infinity), got "{z}"')
    if not family.g1.is_on_curve((x, y)):
        raise FormatError(f"{what}, ({x:#x}, {y:#x}), is not on {family.g1.name}")
    return x, y


def g2_from_json(value: object, family: Family, what: str) -> G2Point:
    """Read a point of G2's curve; it may be outside the subgroup.

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
    c0, c1 = (_number(part, below, f"{what}[{i}]") for i, part in enumerate(_list(value, 2, what)))
    return c0, c1


def _list(value: object, length: int, what: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise FormatError(f"{what} must be a list of {length}, got {abbreviated(value)}")
    return value


def abbreviated(value: object) -> str:
    """Return a value's JSON for a message, truncated if it is long."""
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def dump_json(value: Any) -> str:
    """Return JSON in snarkjs's layout: indented by one, without a final newline."""
    return json.dumps(value, indent=1)


def g1_to_json(point: G1Point) -> list[str]:
    """Return the rows that g1_from_json reads."""
    return ["0", "1", "0"] if point is None else [str(point[0]), str(point[1]), "1"]


def g2_to_json(point: G2Point) -> list[list[str]]:
    """Return the rows that g2_from_json reads."""
    if point is None:
        return [["0", "0"], ["1", "0"], ["0", "0"]]
    return [*([str(c0), str(c1)] for c0, c1 in point), ["1", "0"]]
