"""The verifier's key of a circuit, from snarkjs's JSON or a prover's key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.encoding import decode_points, encode_points
from accelerant.algebra.curve.pairing import product
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.reference import multiply
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import FormatError
from accelerant.zk.formats.elements import why_forgeable
from accelerant.zk.groth16.snarkjs_json import (
    curve_name,
    parse_object,
    point_of_g1,
    point_of_g2,
    rows_of_g1,
    rows_of_g2,
    shown,
    written,
)

__all__ = ["VerificationKey"]

U64 = npt.NDArray[np.uint64]

_MOST_INPUTS = 1 << 24
"""Public inputs of a key that is believed: more than any circuit of 2^28 constraints in use."""

_FINITE = ("vk_alpha_1", "vk_beta_2", "vk_gamma_2", "vk_delta_2")
"""Names of the points that must not be infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class VerificationKey:
    """Points as canonical words, infinity all zeros.

    Attributes:
        family: "bn254" or "bls12_381".
        alpha: alpha1, (2, limbs).
        beta: beta2, (2, 2, limbs).
        gamma: gamma2.
        delta: delta2.
        ic: (nPublic + 1, 2, limbs).
    """

    family: str
    alpha: U64
    beta: U64
    gamma: U64
    delta: U64
    ic: U64

    @property
    def n_public(self) -> int:
        """Public inputs of the circuit."""
        return len(self.ic) - 1

    @property
    def forgeable(self) -> str | None:
        """Why anyone can make proofs that this key accepts; None where its points do not say so."""
        return why_forgeable(self.gamma, self.delta)

    @classmethod
    def from_json(cls, text: str | bytes, *, name: str = "verification key") -> VerificationKey:
        """A key in snarkjs's form. vk_alphabeta_12, which follows from the rest, is not read.

        Args:
            text: of verification_key.json.
            name: of the file, for messages.

        Raises:
            FormatError: no such JSON, a coordinate that is not reduced, a point off its curve, or infinity for another
                point than those of IC; names the element.
        """
        value, family = parse_object(text, name)
        n_public, rows = value.get("nPublic"), value.get("IC")
        if isinstance(n_public, bool) or not isinstance(n_public, int) or not 0 <= n_public <= _MOST_INPUTS:
            raise FormatError(f'{name}: "nPublic" must be a number of public inputs, got {shown(n_public)}')
        if not isinstance(rows, list) or len(rows) != n_public + 1:
            count = f"{len(rows)} of them" if isinstance(rows, list) else shown(rows)
            raise FormatError(f'{name}: "IC" must be a list of nPublic + 1 = {n_public + 1} points, got {count}')
        points = [point_of_g1(row, family, f"{name}: IC[{i}]") for i, row in enumerate(rows)]
        alpha = point_of_g1(value.get(_FINITE[0]), family, f"{name}: {_FINITE[0]}")
        of_g2 = [point_of_g2(value.get(key), family, f"{name}: {key}") for key in _FINITE[1:]]
        for key, point in zip(_FINITE, (alpha, *of_g2), strict=True):
            if point is None:
                raise FormatError(
                    f"{name}: {key} is infinity, which no honest key has: anyone could forge proofs for it"
                )
        beta, gamma, delta = encode_points(family.g2, of_g2)
        words = encode_points(family.g1, [alpha, *points])
        return cls(family.name, words[0], beta, gamma, delta, words[1:])

    @classmethod
    def from_zkey(cls, zkey: Any) -> VerificationKey:
        """The key that a prover's key carries.

        Args:
            zkey: an open zk.formats.Zkey, or its path.

        Raises:
            FormatError: the file is not what it claims to be, or a point of its header is infinity, off its curve or
                out of the subgroup.
        """
        from accelerant.zk.formats.zkey import Zkey

        if not isinstance(zkey, Zkey):
            with Zkey.open(zkey) as opened:
                return cls.from_zkey(opened)
        zkey.check_header()
        family = family_of(zkey.family)
        beta, gamma, delta = _canonical(family.g2, np.stack([zkey.beta2, zkey.gamma2, zkey.delta2]))
        alpha = _canonical(family.g1, zkey.alpha1)[0]
        return cls(family.name, alpha, beta, gamma, delta, _canonical(family.g1, zkey.ic))

    def to_json(self) -> str:
        """The text of snarkjs's verification_key.json, vk_alphabeta_12 with it."""
        family = family_of(self.family)
        (alpha,), ic = decode_points(family.g1, self.alpha[None], check=False), self._decoded_ic(family)
        of_g2 = decode_points(family.g2, np.stack([self.beta, self.gamma, self.delta]), check=False)
        value = {
            "protocol": "groth16",
            "curve": curve_name(family),
            "nPublic": self.n_public,
            _FINITE[0]: rows_of_g1(alpha),
            **dict(zip(_FINITE[1:], map(rows_of_g2, of_g2), strict=True)),
            "vk_alphabeta_12": _pairing_rows(family, alpha, self.beta),
            "IC": [rows_of_g1(point) for point in ic],
        }
        return written(value)

    def _decoded_ic(self, family: Family) -> list[Any]:
        return decode_points(family.g1, self.ic, check=False)


def _canonical(curve: Curve[Any], words: U64) -> U64:
    """Points (n, *shape) of Montgomery words as they lie in a file."""
    aligned = np.array(words, np.uint64).reshape(-1, *curve.shape)
    found: U64 = launch.from_montgomery(HOST, curve, aligned)
    return found


def _pairing_rows(family: Family, alpha: Any, beta: U64) -> list[list[list[str]]]:
    """e(alpha, beta)^k as snarkjs has it: its final power is k times the exact one.

    k = 2 x (6 x^2 + 3 x + 1) on BN curves (Fuentes-Castaneda, Knapp and Rodriguez-Henriquez, SAC 2011), 3 on BLS12
    (Hayashida, Hayasaka and Teruya, eprint 2020/875); both spare products.
    """
    x = family.parameter
    power = 2 * x * (6 * x * x + 3 * x + 1) if family.kind == "bn" else 3
    scaled = encode_points(family.g1, [multiply(family.g1, power % family.r, alpha)])
    halves = product(family, scaled, beta[None])
    return [[[str(c0), str(c1)] for c0, c1 in half] for half in halves]
