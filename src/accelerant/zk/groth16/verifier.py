"""Verification keys, and verification of one proof by four pairings or of n proofs of a circuit by n + 3.

    e(pi_A, pi_B) = e(alpha1, beta2) e(L, gamma2) e(pi_C, delta2),  L = IC_0 + sum x_i IC_i

Source: Groth 2016, eprint 2016/260, section 3.2. A batch multiplies the equations, each raised to a random power of 128
bits from the system's entropy: if one of them does not hold, the product is 1 with probability 2^-128 at most (Bellare,
Garay and Rabin, EUROCRYPT 1998).

Not constant-time: proofs and public inputs are public.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.encoding import decode_points, encode_points
from accelerant.algebra.curve.pairing import loops, product, product_is_one
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.reference import multiply
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError, UnsupportedDtype
from accelerant.zk.elliptic_curve import EllipticCurve
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.formats.elements import why_forgeable
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.proof import (
    SNARKJS_CURVES,
    Proof,
    abbreviated,
    check_inputs,
    dump_json,
    parse_groth16,
    point_from_json,
    point_to_json,
)
from accelerant.zk.multi_scalar.op import msm

__all__ = ["Statement", "VerificationKey", "verify", "verify_many"]

U64 = npt.NDArray[np.uint64]

_MAX_INPUTS = 1 << 24
"""Largest accepted number of public inputs, more than any circuit of 2^28 constraints in use has."""

_FINITE = ("vk_alpha_1", "vk_beta_2", "vk_gamma_2", "vk_delta_2")
"""Points of a verification key that must not be infinity."""

_FEW_INPUTS = 64
"""With more public inputs a multi-scalar multiplication is faster than separate multiples."""

_COEFFICIENT_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class VerificationKey:
    """The verification key of a circuit: points as canonical words, infinity all zeros.

    Attributes:
        family: "bn254" or "bls12_381".
        alpha: alpha1, (2, limbs).
        beta, gamma, delta: beta2, gamma2, delta2, (2, 2, limbs).
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
        """Number of public inputs."""
        return len(self.ic) - 1

    @property
    def forgeable(self) -> str | None:
        """Why anyone can forge proofs for this key; None where its points do not reveal that."""
        return why_forgeable(self.gamma, self.delta)

    @classmethod
    def from_json(cls, text: str | bytes, *, name: str = "verification key") -> VerificationKey:
        """Read snarkjs's verification_key.json; vk_alphabeta_12, which follows from the rest, is ignored.

        Raises:
            FormatError: malformed JSON, a coordinate that is not reduced, a point off its curve, or a point at infinity
                other than in IC; names the element.
        """
        value, family = parse_groth16(text, name)
        n_public, rows = value.get("nPublic"), value.get("IC")
        if isinstance(n_public, bool) or not isinstance(n_public, int) or not 0 <= n_public <= _MAX_INPUTS:
            raise FormatError(f'{name}: "nPublic" must be a number of public inputs, got {abbreviated(n_public)}')
        if not isinstance(rows, list) or len(rows) != n_public + 1:
            count = f"{len(rows)} of them" if isinstance(rows, list) else abbreviated(rows)
            raise FormatError(f'{name}: "IC" must be a list of nPublic + 1 = {n_public + 1} points, got {count}')
        ic = [point_from_json(row, family.g1, f"{name}: IC[{i}]") for i, row in enumerate(rows)]
        alpha = point_from_json(value.get(_FINITE[0]), family.g1, f"{name}: {_FINITE[0]}")
        g2_points = [point_from_json(value.get(key), family.g2, f"{name}: {key}") for key in _FINITE[1:]]
        for key, point in zip(_FINITE, (alpha, *g2_points), strict=True):
            if point is None:
                raise FormatError(
                    f"{name}: {key} is infinity, which no honest key has: anyone could forge proofs for it"
                )
        beta, gamma, delta = encode_points(family.g2, g2_points)
        words = encode_points(family.g1, [alpha, *ic])
        return cls(family.name, words[0], beta, gamma, delta, words[1:])

    @classmethod
    def from_zkey(cls, zkey: Any) -> VerificationKey:
        """Return the verification key contained in a proving key, an open zk.formats.Zkey or the path of one.

        Raises:
            FormatError: the file is malformed, or a point of its header is infinity, off its curve or outside the
                subgroup.
        """
        if not isinstance(zkey, Zkey):
            with Zkey.open(zkey) as opened:
                return cls.from_zkey(opened)
        zkey.check_header()
        family = family_of(zkey.family)
        beta, gamma, delta = _canonical(family.g2, np.stack([zkey.beta2, zkey.gamma2, zkey.delta2]))
        alpha = _canonical(family.g1, zkey.alpha1)[0]
        return cls(family.name, alpha, beta, gamma, delta, _canonical(family.g1, zkey.ic))

    def to_json(self) -> str:
        """Return the contents of snarkjs's verification_key.json, including vk_alphabeta_12."""
        family = family_of(self.family)
        (alpha,) = decode_points(family.g1, self.alpha[None], check=False)
        ic = decode_points(family.g1, self.ic, check=False)
        g2_points = decode_points(family.g2, np.stack([self.beta, self.gamma, self.delta]), check=False)
        # The exponent of snarkjs's final exponentiation is k times the exact one, which saves products:
        # k = 2 x (6 x^2 + 3 x + 1) on BN curves (Fuentes-Castaneda, Knapp and Rodriguez-Henriquez, SAC 2011), 3 on
        # BLS12 (Hayashida, Hayasaka and Teruya, eprint 2020/875).
        x = family.parameter
        k = 2 * x * (6 * x * x + 3 * x + 1) if family.kind == "bn" else 3
        scaled = encode_points(family.g1, [multiply(family.g1, k % family.r, alpha)])
        pairing = product(family, scaled, self.beta[None])
        return dump_json(
            {
                "protocol": "groth16",
                "curve": SNARKJS_CURVES[family.name],
                "nPublic": self.n_public,
                _FINITE[0]: point_to_json(family.g1, alpha),
                **{key: point_to_json(family.g2, point) for key, point in zip(_FINITE[1:], g2_points, strict=True)},
                "vk_alphabeta_12": [[[str(c0), str(c1)] for c0, c1 in half] for half in pairing],
                "IC": [point_to_json(family.g1, point) for point in ic],
            }
        )


def _canonical(curve: Curve[Any], words: U64) -> U64:
    """Return canonical points (n, *shape) of Montgomery words in a file, which may be unaligned."""
    points: U64 = launch.from_montgomery(HOST, curve, np.array(words, np.uint64).reshape(-1, *curve.shape))
    return points


# --- verification ----------------------------------------------------------------------------------------------------


def verify(verification_key: VerificationKey, public: Sequence[int], proof: Proof) -> bool:
    """Return whether a proof verifies.

    >>> key = VerificationKey.from_json(Path("verification_key.json").read_text())
    >>> verify(key, public, Proof.from_json(Path("proof.json").read_text()))
    True

    Args:
        verification_key: the circuit's, from a trusted source.
        public: public inputs w[1] to w[nPublic], Python integers from 0 to below r.
        proof: untrusted.

    Raises:
        ConfigError: key and proof are of two curves.
        UnsupportedDtype: a public input or a coordinate of the proof is not a Python integer.
        FormatError: the wrong number of public inputs, or one not below r; a point of the proof or the key off its
            curve or outside the subgroup. Such input is not a proof at all; a proof of another statement gives False.
    """
    _common_family(verification_key, (proof,))
    return Statement(verification_key, public).proved_by(proof)


class Statement:
    """A circuit's verification key with public inputs, whose part of a verification is done before there is a proof.

    Arguments and errors are those of `verify`.
    """

    def __init__(self, verification_key: VerificationKey, public: Sequence[int]) -> None:
        self._key, self._family = verification_key, family_of(verification_key.family)
        inputs = _checked_inputs(verification_key, self._family, public, "public")
        self._inputs = _inputs_point(curve_named(self._family.g1.name), verification_key, inputs)
        self._first = np.stack([verification_key.alpha, self._inputs])
        self._second = np.stack([verification_key.beta, verification_key.gamma])
        self._values: U64 | None = None

    def prepare(self) -> None:
        """Run the Miller loops of the key and the inputs now. All four together take less time."""
        with _named({"g1_points": ("alpha", "the sum of IC"), "g2_points": _KEY_POINTS}):
            self._values = loops(self._family, self._first, self._second)

    def proved_by(self, proof: Proof) -> bool:
        """Return whether a proof on the key's curve verifies."""
        key, family = self._key, self._family
        a, c = _encoded(family.g1, [proof.a, proof.c], ("pi_a", "pi_c"))
        (b,) = _encoded(family.g2, [proof.b], ("pi_b",))
        first, second = np.stack([*_negated(curve_named(family.g1.name), [a]), c]), np.stack([b, key.delta])
        if self._values is None:
            first, second = np.concatenate([first, self._first]), np.concatenate([second, self._second])
        first_names, second_names = ("pi_a", "pi_c", "alpha", "the sum of IC"), ("pi_b", "delta", *_KEY_POINTS)
        return _is_one(family, first, second, first_names, second_names, self._values)


def verify_many(verification_key: VerificationKey, public: Sequence[Sequence[int]], proofs: Sequence[Proof]) -> bool:
    """Return whether all proofs of one circuit verify, by one check; True for none.

    To find the proof that does not verify, verify each.

    Args:
        verification_key, proofs: as for verify.
        public: the public inputs of each proof.

    Raises:
        ConfigError: the numbers of input lists and proofs differ, or two curves.
        UnsupportedDtype, FormatError: as verify; names the proof's index.
    """
    if len(public) != len(proofs):
        raise ConfigError(f"wanted as many lists of public inputs as proofs, got {len(public)} and {len(proofs)}")
    if not proofs:
        return True
    key, family = verification_key, _common_family(verification_key, proofs)
    group, r = curve_named(family.g1.name), family.r
    rho = [int.from_bytes(os.urandom(_COEFFICIENT_BYTES), "little") for _ in proofs]
    rows = [_checked_inputs(key, family, row, f"public[{i}]") for i, row in enumerate(public)]
    inputs = [sum(c * row[j] for c, row in zip(rho, rows, strict=True)) % r for j in range(key.n_public)]
    total = sum(rho) % r
    a_names, b_names, c_names = ([f"proofs[{i}].{name}" for i in range(len(proofs))] for name in "abc")
    a = _encoded(family.g1, [proof.a for proof in proofs], a_names)
    c = _encoded(family.g1, [proof.c for proof in proofs], c_names)
    b = _encoded(family.g2, [proof.b for proof in proofs], b_names)
    with _named({"points": a_names}):
        a = group.mul(a, rho)
    with _named({"points": c_names}):
        c = msm(rho, c, family.g1.name, check="subgroup")
    ends = [group.mul(key.alpha, total), _inputs_point(group, key, inputs, total), c]
    first = np.concatenate([a, _negated(group, ends)])
    second = np.concatenate([b, np.stack([key.beta, key.gamma, key.delta])])
    g1_names = (*a_names, "alpha", "the sum of IC", "the sum of pi_c")
    return _is_one(family, first, second, g1_names, (*b_names, *_KEY_POINTS))


_KEY_POINTS = ("beta", "gamma", "delta")


def _common_family(key: VerificationKey, proofs: Sequence[Proof]) -> Family:
    for proof in proofs:
        if proof.family != key.family:
            raise ConfigError(f"the verification key is on {key.family}, the proof on {proof.family}")
    return family_of(key.family)


def _checked_inputs(key: VerificationKey, family: Family, public: Sequence[int], name: str) -> list[int]:
    inputs = check_inputs(public, family, name)
    if len(inputs) != key.n_public:
        raise FormatError(f"{name} has {len(inputs)} inputs; the verification key is for {key.n_public}")
    return inputs


def _encoded(curve: Curve[Any], points: Sequence[Any], names: Sequence[str]) -> U64:
    """Return a proof's points as canonical words, checking their types: a Proof made in Python may hold anything."""
    degree = curve.coordinates.degree
    for point, name in zip(points, names, strict=True):
        if point is not None and not _is_nested_pair(point, degree):
            expected = "a pair of Python integers" if degree == 1 else "a pair of pairs of Python integers"
            raise UnsupportedDtype(f"{name} must be {expected}, or None for infinity; got {_types(point)}")
    with _named({"points": names}):
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


def _inputs_point(group: EllipticCurve, key: VerificationKey, inputs: Sequence[int], first: int = 1) -> U64:
    """Return first IC_0 + sum x_i IC_i, canonical. Only the sum is checked to be in the subgroup, by the pairing."""
    scalars = [first, *inputs]
    if len(scalars) > _FEW_INPUTS:
        words = encode(group.parameters.scalars, scalars)
        return np.asarray(msm(words, key.ic, group.name, check=False))
    return np.asarray(group.sum(group.mul(key.ic, scalars, check=False), check=False))


def _negated(group: EllipticCurve, points: Sequence[U64]) -> U64:
    return np.asarray(group.neg(np.stack(list(points)), check=False))


def _is_one(
    family: Family, first: U64, second: U64, first_names: Sequence[str], second_names: Sequence[str],
    values: U64 | None = None,
) -> bool:  # fmt: skip
    with _named({"g1_points": first_names, "g2_points": second_names}):
        return product_is_one(family, first, second, values=values)


_INDEXED = re.compile(r"^(\w+)\[(\d+)\](?: \(flattened\))?")


@contextmanager
def _named(names: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Replace an argument and index at the start of an error's text by the name of that point."""
    try:
        yield
    except FormatError as error:
        text = _INDEXED.sub(lambda match: names[match[1]][int(match[2])] if match[1] in names else match[0], str(error))
        raise FormatError(text) from None
