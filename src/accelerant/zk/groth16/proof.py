"""A proof of Groth16: three points, and the public inputs that it was made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.errors import ConfigError, FormatError, UnsupportedCase, UnsupportedDtype
from accelerant.zk.groth16.snarkjs_json import (
    G1Point,
    G2Point,
    curve_name,
    parse_object,
    point_of_g1,
    point_of_g2,
    public_from_json,
    public_to_json,
    rows_of_g1,
    rows_of_g2,
    written,
)

__all__ = ["Proof", "checked_inputs"]


@dataclass(frozen=True, slots=True)
class Proof:
    """Points as affine integers, None for infinity; of those read from JSON it is known that they are on their curves.

    Attributes:
        family: "bn254" or "bls12_381".
        a: pi_A, of G1.
        b: pi_B, of G2; coordinates are pairs (c0, c1).
        c: pi_C, of G1.
        public: inputs w[1] to w[nPublic] that a prover made it for; None where that is not known.
    """

    family: str
    a: G1Point
    b: G2Point
    c: G1Point
    public: tuple[int, ...] | None = field(default=None, compare=False)

    @classmethod
    def from_json(
        cls,
        text: str | bytes,
        public: str | bytes | None = None,
        *,
        name: str = "proof",
        public_name: str = "public",
    ) -> Proof:
        """A proof in snarkjs's form.

        Args:
            text: of proof.json.
            public: of public.json, if it is to be part of the object.
            name: of the file, for messages.
            public_name: of the file of public inputs.

        Raises:
            FormatError: no such JSON, a coordinate that is not reduced, or a point off its curve; names the element.
        """
        value, family = parse_object(text, name)
        for key in ("pi_a", "pi_b", "pi_c"):
            if key not in value:
                raise FormatError(f'{name} has no "{key}"')
        return cls(
            family=family.name,
            a=point_of_g1(value["pi_a"], family, f"{name}: pi_a"),
            b=point_of_g2(value["pi_b"], family, f"{name}: pi_b"),
            c=point_of_g1(value["pi_c"], family, f"{name}: pi_c"),
            public=None if public is None else public_from_json(public, family.r, public_name),
        )

    def to_json(self) -> str:
        """The text of snarkjs's proof.json."""
        return written(
            {
                "pi_a": rows_of_g1(self.a),
                "pi_b": rows_of_g2(self.b),
                "pi_c": rows_of_g1(self.c),
                "protocol": "groth16",
                "curve": curve_name(self._family),
            }
        )

    def public_json(self) -> str:
        """The text of snarkjs's public.json.

        Raises:
            ConfigError: the public inputs are not known.
        """
        return public_to_json(self._known_public())

    def to_calldata(self, public: Sequence[int] | None = None) -> str:
        """Arguments of verifyProof in snarkjs's Solidity contract, as its `zkey export soliditycalldata` prints them.

        Each number is a string of 64 hexadecimal digits; pairs have c1 first, as EIP-197 does.

        Args:
            public: inputs; those that the proof was made for, if not given.

        Raises:
            ConfigError: the public inputs are not known.
            FormatError, UnsupportedDtype: one is not below the order r, or no Python integer.
            UnsupportedCase: a curve that the contract is not for, or a point at infinity.
        """
        known = self._known_public() if public is None else public
        inputs = checked_inputs(known, self._family, "public")
        if self.family != "bn254":
            raise UnsupportedCase(f"call data is for contracts on BN254; this proof is on {self.family}")
        if self.a is None or self.b is None or self.c is None:
            raise UnsupportedCase("snarkjs's call data has no form for a point at infinity, which no honest proof has")
        pairs = ",".join(f"[{', '.join(map(_word, reversed(pair)))}]" for pair in self.b)
        a, c = (", ".join(map(_word, point)) for point in (self.a, self.c))
        return f"[{a}],[{pairs}],[{c}],[{','.join(map(_word, inputs))}]"

    @property
    def _family(self) -> Family:
        return family_of(self.family)

    def _known_public(self) -> tuple[int, ...]:
        if self.public is None:
            raise ConfigError("the proof's public inputs are not known here: give them")
        return self.public


def checked_inputs(public: Sequence[int], family: Family, name: str) -> list[int]:
    """Public inputs as Python integers below r.

    Raises:
        UnsupportedDtype: no sequence, or one is no Python integer; names the index.
        FormatError: one is not from 0 to below r; names the index.
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
