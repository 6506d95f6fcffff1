"""Verification of Groth16: one product of four pairings a proof, or of n + 3 for n proofs together.

    e(pi_A, pi_B) = e(alpha1, beta2) e(L, gamma2) e(pi_C, delta2),  L = IC_0 + sum x_i IC_i

Source: Groth 2016, eprint 2016/260, section 3.2. Many at once: eq. i to the power rho_i, multiplied together, with
rho_i of 128 bits from the system's entropy: where one of them does not hold the product is 1 with probability 2^-128
at most (Bellare, Garay and Rabin, EUROCRYPT 1998).

Not constant-time: proofs and public inputs are public.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.encoding import encode_points
from accelerant.algebra.curve.pairing import product_is_one
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError, UnsupportedDtype
from accelerant.zk.elliptic_curve import EllipticCurve, curve
from accelerant.zk.groth16.proof import Proof, checked_inputs
from accelerant.zk.groth16.verification_key import VerificationKey
from accelerant.zk.msm.op import msm

__all__ = ["verify", "verify_many"]

U64 = npt.NDArray[np.uint64]

_FEW = 64
"""Public inputs from which on a sum of multiples by buckets is quicker than multiples one by one."""

_COEFFICIENT_BYTES = 16


def verify(verification_key: VerificationKey, public: Sequence[int], proof: Proof) -> bool:
    """Whether a proof verifies.

    >>> key = VerificationKey.from_json(Path("verification_key.json").read_text())
    >>> verify(key, public, Proof.from_json(Path("proof.json").read_text()))
    True

    Args:
        verification_key: of the circuit, from a source that is trusted.
        public: inputs, Python integers from 0 to below r, as many as the key has: w[1] to w[nPublic].
        proof: from anyone.

    Raises:
        ConfigError: key and proof are of two curves.
        UnsupportedDtype: a public input or a coordinate of the proof is no Python integer.
        FormatError: public inputs that are too many or few or not below r; a point of the proof or the key off its
            curve or out of the subgroup. Such a thing is no proof at all; what is one, but of something else, gives
            False.
    """
    family = _family(verification_key, (proof,))
    inputs = _inputs(verification_key, family, public, "public")
    key, g1 = verification_key, family.g1
    group = curve(g1.name)
    a, c = _encoded(g1, [proof.a, proof.c], ("pi_a", "pi_c"))
    b = _encoded(family.g2, [proof.b], ("pi_b",))[0]
    first = np.stack([a, *_opposite(group, [key.alpha, _inputs_point(group, key, inputs), c])])
    second = np.stack([b, key.beta, key.gamma, key.delta])
    return _is_one(family, first, second, ("pi_a", "alpha", "the sum of IC", "pi_c"), ("pi_b", *_KEYS))


def verify_many(verification_key: VerificationKey, public: Sequence[Sequence[int]], proofs: Sequence[Proof]) -> bool:
    """Whether all proofs of one circuit verify, by one check; True for none. To find a wrong one, verify each.

    Args:
        verification_key: as verify.
        public: the inputs of each proof.
        proofs: as many.

    Raises:
        ConfigError: not as many lists of inputs as proofs, or two curves.
        UnsupportedDtype, FormatError: as verify; names the proof's index.
    """
    if len(public) != len(proofs):
        raise ConfigError(f"wanted as many lists of public inputs as proofs, got {len(public)} and {len(proofs)}")
    if not proofs:
        return True
    key, family = verification_key, _family(verification_key, proofs)
    group, r = curve(family.g1.name), family.r
    rho = [int.from_bytes(os.urandom(_COEFFICIENT_BYTES), "little") for _ in proofs]
    rows = [_inputs(key, family, each, f"public[{i}]") for i, each in enumerate(public)]
    inputs = [sum(c * row[j] for c, row in zip(rho, rows, strict=True)) % r for j in range(key.n_public)]
    total = sum(rho) % r
    of_a, of_b, of_c = ([f"proofs[{i}].{name}" for i in range(len(proofs))] for name in "abc")
    a, c = (
        _encoded(family.g1, points, names)
        for points, names in (([proof.a for proof in proofs], of_a), ([proof.c for proof in proofs], of_c))
    )
    b = _encoded(family.g2, [proof.b for proof in proofs], of_b)
    with _named({"points": of_a}):
        a = group.mul(a, rho)
    with _named({"points": of_c}):
        c = msm(rho, c, family.g1.name)
    ends = [group.mul(key.alpha, total), _inputs_point(group, key, inputs, total), c]
    first = np.concatenate([a, _opposite(group, ends)])
    second = np.concatenate([b, np.stack([key.beta, key.gamma, key.delta])])
    return _is_one(family, first, second, (*of_a, "alpha", "the sum of IC", "the sum of pi_c"), (*of_b, *_KEYS))


_KEYS = ("beta", "gamma", "delta")


def _family(key: VerificationKey, proofs: Sequence[Proof]) -> Family:
    for proof in proofs:
        if proof.family != key.family:
            raise ConfigError(f"the verification key is on {key.family}, the proof on {proof.family}")
    return family_of(key.family)


def _inputs(key: VerificationKey, family: Family, public: Sequence[int], name: str) -> list[int]:
    """Python integers below r, as many as the key has."""
    inputs = checked_inputs(public, family, name)
    if len(inputs) != key.n_public:
        raise FormatError(f"{name} has {len(inputs)} inputs; the verification key is for {key.n_public}")
    return inputs


def _encoded(curve: Curve[Any], points: Sequence[Any], names: Sequence[str]) -> U64:
    """A proof's points as canonical words; what Python code made may be anything."""
    degree = curve.coordinates.degree
    for point, name in zip(points, names, strict=True):
        if point is not None and not _is_nested_pair(point, degree):
            wanted = "a pair of Python integers" if degree == 1 else "a pair of pairs of Python integers"
            raise UnsupportedDtype(f"{name} must be {wanted}, or None for infinity; got {_form(point)}")
    with _named({"points": names}):
        return encode_points(curve, points)


def _is_nested_pair(value: object, degree: int) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    if degree == 1:
        return all(isinstance(part, int) and not isinstance(part, bool) for part in value)
    return all(_is_nested_pair(part, 1) for part in value)


def _form(value: object) -> str:
    """Types in a point, without its values."""
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_form, value))})"
    return type(value).__name__


def _inputs_point(group: EllipticCurve, key: VerificationKey, inputs: Sequence[int], first: int = 1) -> U64:
    """The sum first IC_0 + sum x_i IC_i, canonical; whether the points are in the subgroup is asked of the sum."""
    scalars = [first, *inputs]
    if len(scalars) > _FEW:
        words = encode(group.parameters.scalars, scalars)
        return np.asarray(msm(words, key.ic, group.name, check=False))
    return np.asarray(group.sum(group.mul(key.ic, scalars, check=False), check=False))


def _opposite(group: EllipticCurve, points: Sequence[U64]) -> U64:
    return np.asarray(group.neg(np.stack(list(points)), check=False))


def _is_one(family: Family, first: U64, second: U64, first_names: Sequence[str], second_names: Sequence[str]) -> bool:
    with _named({"g1_points": first_names, "g2_points": second_names}):
        return product_is_one(family, first, second)


_OFFENDER = re.compile(r"^(\w+)\[(\d+)\](?: \(flattened\))?")


@contextmanager
def _named(names: Mapping[str, Sequence[str]]) -> Iterator[None]:
    """Errors that begin with an argument and an index get the name of that point."""
    try:
        yield
    except FormatError as error:
        told = _OFFENDER.sub(
            lambda found: names[found[1]][int(found[2])] if found[1] in names else found[0], str(error)
        )
        raise FormatError(told) from None
