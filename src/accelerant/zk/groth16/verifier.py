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

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.encoding import encode_points
from accelerant.algebra.curve.pairing import product_is_one
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError, UnsupportedDtype
from accelerant.zk.elliptic_curve import EllipticCurve, curve
from accelerant.zk.groth16.proof import Proof
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
        UnsupportedDtype: a public input is no integer.
        FormatError: public inputs that are too many or few or not below r; a point of the proof or the key off its
            curve or out of the subgroup. Such a thing is no proof at all; what is one, but of something else, gives
            False.
    """
    family = _family(verification_key, (proof,))
    inputs = _inputs(verification_key, family, public, "public")
    key, g1 = verification_key, family.g1
    group = curve(g1.name)
    a, c = encode_points(g1, [proof.a, proof.c])
    b = encode_points(family.g2, [proof.b])[0]
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
    indices = range(len(proofs))
    with _named({"points": [f"proofs[{i}].a" for i in indices]}):
        a = group.mul(encode_points(family.g1, [proof.a for proof in proofs]), rho)
    with _named({"points": [f"proofs[{i}].c" for i in indices]}):
        c = msm(rho, encode_points(family.g1, [proof.c for proof in proofs]), family.g1.name)
    b = encode_points(family.g2, [proof.b for proof in proofs])
    ends = [group.mul(key.alpha, total), _inputs_point(group, key, inputs, total), c]
    first = np.concatenate([a, _opposite(group, ends)])
    second = np.concatenate([b, np.stack([key.beta, key.gamma, key.delta])])
    names = (*(f"proofs[{i}].a" for i in indices), "alpha", "the sum of IC", "the sum of pi_c")
    return _is_one(family, first, second, names, (*(f"proofs[{i}].b" for i in indices), *_KEYS))


_KEYS = ("beta", "gamma", "delta")


def _family(key: VerificationKey, proofs: Sequence[Proof]) -> Family:
    for proof in proofs:
        if proof.family != key.family:
            raise ConfigError(f"the verification key is on {key.family}, the proof on {proof.family}")
    return family_of(key.family)


def _inputs(key: VerificationKey, family: Family, public: Sequence[int], name: str) -> list[int]:
    """Python integers below r, as many as the key has."""
    if len(public) != key.n_public:
        raise FormatError(f"{name} has {len(public)} inputs; the verification key is for {key.n_public}")
    for i, value in enumerate(public):
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnsupportedDtype(f"{name}[{i}] must be a Python integer, got {type(value).__name__} {value!r}")
        if not 0 <= value < family.r:
            raise FormatError(f"{name}[{i}] is {value}, not from 0 to below the order {family.r}")
    return list(public)


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
