"""Verification keys, and verification of one proof by four pairings or of n proofs of a circuit by n + 3.

    e(pi_A, pi_B) = e(alpha1, beta2) e(L, gamma2) e(pi_C, delta2),  L = IC_0 + sum x_i IC_i

A batch multiplies the equations, each raised to a random power of 128 bits (Bellare, Garay and Rabin, EUROCRYPT 1998).
Source: Groth 2016, eprint 2016/260, section 3.2. Not constant-time: proofs and public inputs are public.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant._version import __version__
from accelerant.algebra.curve import launch
from accelerant.algebra.curve.pairing import loops, product, product_is_one
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.weierstrass import Curve, decode_points, encode_points, multiply
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.words import encode
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.runtime.files import clipped
from accelerant.runtime.host import refuse_masked
from accelerant.zk.elliptic_curve import EllipticCurve
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.formats.zkey import Zkey, why_forgeable
from accelerant.zk.groth16.proof import (
    MAX_JSON_BYTES,
    SNARKJS_CURVES,
    JsonSource,
    Proof,
    abbreviated,
    check_inputs,
    dump_json,
    encoded_points,
    inputs_from,
    named,
    of_json,
    parse_groth16,
    point_from_json,
    point_to_json,
    read_json,
)
from accelerant.zk.multi_scalar import msm
from accelerant.zk.operands import point_operand, points_inward

U64 = npt.NDArray[np.uint64]

_MAX_INPUTS = 1 << 24  # Largest accepted number of public inputs, more than any circuit of 2^28 constraints in use has

_KEY_POINTS = ("beta", "gamma", "delta")
_POINTS = ("alpha", *_KEY_POINTS)
_FINITE = ("vk_alpha_1", "vk_beta_2", "vk_gamma_2", "vk_delta_2")  # names in JSON: must not be infinity
_FEW_INPUTS = 64  # With more public inputs a multi-scalar multiplication is faster than separate multiples

_COEFFICIENT_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class VerificationKey:
    """The verification key of a circuit: points as canonical words, infinity all zeros. Equal keys are ==.

    Every key is checked when it is made, wherever it comes from: all points are on their curves and in the subgroups of
    order r, and only IC may have infinity. Its arrays are read-only copies.

    Attributes:
        family: "bn254", "bls12_381", or a registered one.
        alpha: alpha1, (2, limbs).
        beta, gamma, delta: beta2, gamma2, delta2, (2, 2, limbs).
        ic: (nPublic + 1, 2, limbs).

    Raises:
        ConfigError: unknown family.
        UnsupportedDtype, ShapeError: words that are not those of points.
        FormatError: a coordinate that is not reduced, a point off its curve or outside the subgroup, or infinity where
            no honest key has it; names the point.
    """

    family: str
    alpha: U64
    beta: U64
    gamma: U64
    delta: U64
    ic: U64

    def __post_init__(self) -> None:
        """Check and copy the points."""
        family = family_of(self.family)
        object.__setattr__(self, "family", family.name)
        for curve, names in ((family.g1, ("alpha",)), (family.g2, _KEY_POINTS), (family.g1, ("ic",))):
            several = names == ("ic",)
            shape = ("nPublic + 1",) * several + curve.shape
            arrays = [_copied(getattr(self, name), name) for name in names]
            for name, words in zip(names, arrays, strict=True):
                if words.shape[several:] != curve.shape or not words.size:
                    raise ShapeError(f"{name} must be ({', '.join(map(str, shape))}), got {words.shape}")
                if not several and not words.any():
                    raise FormatError(f"{name} is infinity, which no honest key has: anyone could forge proofs for it")
            stacked = arrays[0] if several else np.stack(arrays)
            shown = [f"ic[{i}]" for i in range(len(stacked))] if several else names
            with named({"points": shown}):
                operand = point_operand(curve, stacked, "points")
                points_inward(curve, operand, HOST, "points", "subgroup")
            for name, words in zip(names, arrays, strict=True):
                fixed = np.frombuffer(words.tobytes(), words.dtype).reshape(words.shape)  # setflags cannot unlock it
                object.__setattr__(self, name, fixed)

    def __repr__(self) -> str:
        return f"VerificationKey({self.family}, {self.n_public} public inputs)"

    def __eq__(self, other: object) -> bool:
        return self._bytes() == other._bytes() if isinstance(other, VerificationKey) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._bytes())

    def _bytes(self) -> tuple[object, ...]:
        points = (self.alpha, self.beta, self.gamma, self.delta, self.ic)
        return self.family, *(words.tobytes() for words in points)

    def __reduce__(self) -> tuple[type[VerificationKey], tuple[str, U64, U64, U64, U64, U64]]:
        """Return the arguments for copies and pickles, which are checked, too."""
        return type(self), (self.family, self.alpha, self.beta, self.gamma, self.delta, self.ic)

    @property
    def n_public(self) -> int:
        """Number of public inputs."""
        return len(self.ic) - 1

    @property
    def forgeable(self) -> str | None:
        """Why anyone can forge proofs for this key; None where its points do not reveal that."""
        return why_forgeable(
            family_of(self.family), self.ic,
            alpha=self.alpha, beta=self.beta, gamma=self.gamma, delta=self.delta,
        )  # fmt: skip

    @classmethod
    def from_json(cls, text: JsonSource, *, name: str = "verification key") -> VerificationKey:
        """Read snarkjs's verification_key.json; vk_alphabeta_12, which follows from the rest, is ignored.

        `text` is its text, its path (a PathLike, or a str that ends in .json), or its value, parsed.

        Raises:
            FormatError: malformed JSON, a name given twice, a coordinate that is not reduced, a point off its curve or
                outside the subgroup, or a point at infinity other than in IC; names the element.
        """
        value, family = parse_groth16(read_json(text, name, MAX_JSON_BYTES, "a verification key"), name)
        n_public, rows = value.get("nPublic"), value.get("IC")
        if isinstance(n_public, bool) or not isinstance(n_public, int) or not 0 <= n_public <= _MAX_INPUTS:
            raise FormatError(f'{name}: "nPublic" must be a number of public inputs, got {abbreviated(n_public)}')
        if not isinstance(rows, list) or len(rows) != n_public + 1:
            count = f"{len(rows)} of them" if isinstance(rows, list) else abbreviated(rows)
            raise FormatError(f'{name}: "IC" must be a list of nPublic + 1 = {n_public + 1} points, got {count}')
        ic = [point_from_json(row, family.g1, f"{name}: IC[{i}]") for i, row in enumerate(rows)]
        alpha = point_from_json(value.get(_FINITE[0]), family.g1, f"{name}: {_FINITE[0]}")
        g2_points = [point_from_json(value.get(key), family.g2, f"{name}: {key}") for key in _FINITE[1:]]
        beta, gamma, delta = encode_points(family.g2, g2_points)
        words = encode_points(family.g1, [alpha, *ic])
        with _prefixed(name, {**dict(zip(_POINTS, _FINITE, strict=True)), "ic": "IC"}):
            return cls(family.name, words[0], beta, gamma, delta, words[1:])

    @classmethod
    def from_zkey(cls, zkey: Any) -> VerificationKey:
        """Return the verification key contained in a proving key, an open zk.formats.Zkey or the path of one.

        Raises:
            FormatError: the file is malformed, a point of its header is infinity, or one of the header or IC is off its
                curve or outside the subgroup.
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
        (alpha,) = decode_points(family.g1, self.alpha[None])
        ic = decode_points(family.g1, self.ic)
        g2_points = decode_points(family.g2, np.stack([self.beta, self.gamma, self.delta]))
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
                "curve": SNARKJS_CURVES.get(family.name, family.name),
                "nPublic": self.n_public,
                _FINITE[0]: point_to_json(family.g1, alpha),
                **{key: point_to_json(family.g2, point) for key, point in zip(_FINITE[1:], g2_points, strict=True)},
                "vk_alphabeta_12": [[[str(c0), str(c1)] for c0, c1 in half] for half in pairing],
                "IC": [point_to_json(family.g1, point) for point in ic],
            }
        )

    def to_solidity(self, name: str = "Groth16Verifier") -> str:
        """Return a Solidity contract that verifies proofs for this key, on BN254.

        Its verifyProof(uint256[2], uint256[2][2], uint256[2], uint256[nPublic]) is that of snarkjs's contract; the last
        argument is absent for a circuit without public inputs, since Solidity has no arrays of length 0. It answers as
        `verify`, but False where that raises: it checks that public inputs are below r and coordinates below q; the
        pairing's contract checks that points are on their curves and B in the subgroup. Source: EIP-196 (addition 0x06
        and multiplication 0x07 in G1) and EIP-197 (product of pairings 0x08, c1 before c0).

        Raises:
            UnsupportedCase: the key is on BLS12-381.
            ConfigError: the name is not an identifier of Solidity.
        """
        family = family_of(self.family)
        if self.family != "bn254":
            raise UnsupportedCase(
                f"contracts of Solidity verify proofs on BN254 (EIP-197); this key is on {self.family}"
            )
        taken = isinstance(name, str) and (name in _RESERVED | _OWN or _NUMBERED.fullmatch(name))
        if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or taken:
            wanted = "a contract's name must be an identifier of Solidity that is not taken"
            raise ConfigError(f"{wanted}, got {clipped(name)}")
        (alpha,) = decode_points(family.g1, self.alpha[None])
        beta, gamma, delta = decode_points(family.g2, np.stack([self.beta, self.gamma, self.delta]))
        ic = [point or (0, 0) for point in decode_points(family.g1, self.ic)]
        terms = [f"        if (!addTerm(sum, {x}, {y}, input[{i}])) return false;\n" for i, (x, y) in enumerate(ic[1:])]

        def assigned(at: int, values: Any) -> str:
            return "\n".join(f"        pairs[{at + i}] = {value};" for i, value in enumerate(values))

        def second(at: int, point: Any) -> str:
            return assigned(at, [part for coordinate in point for part in reversed(coordinate)])

        text = Path(__file__).with_suffix(".sol").read_text(encoding="utf-8")
        if not self.n_public:  # nothing calls its last function
            text = text[: text.index("\n    /// @dev Adds scalar")] + "}\n"
        return Template(text).substitute(
            version=__version__, count=self.n_public, name=name, q=family.q, r=family.r, ic00=ic[0][0], ic01=ic[0][1],
            terms="".join(terms),
            parameter=f",\n        uint256[{self.n_public}] calldata input" if self.n_public else "",
            alpha_beta=f"{assigned(6, alpha)}\n{second(8, beta)}", gamma=second(14, gamma), delta=second(20, delta),
        )  # fmt: skip


def _copied(value: Any, name: str) -> U64:
    refuse_masked(value, name)
    try:
        return np.array(value)
    except (TypeError, ValueError):  # nested lists of several lengths, a tensor on a device
        raise UnsupportedDtype(f"{name} must be an array of uint64 on the host, got {type(value).__name__}") from None


def _canonical(curve: Curve[Any], words: U64) -> U64:
    """Return canonical points (n, *shape) of Montgomery words in a file, which may be unaligned."""
    points: U64 = launch.from_montgomery(HOST, curve, np.array(words, np.uint64).reshape(-1, *curve.shape))
    return points


# --- verification ----------------------------------------------------------------------------------------------------
def verify(
    verification_key: VerificationKey | JsonSource, public: Any, proof: Proof | JsonSource | None = None
) -> bool:
    """Return whether a proof verifies.

    >>> verify("verification_key.json", "public.json", "proof.json")
    True

    `verify(verification_key, proof)` takes the public inputs that the proof carries: it says that the proof is right
    for them, and the caller still has to look at `proof.public`.

    Args:
        verification_key: the circuit's, from a trusted source; or JSON of it, as for VerificationKey.from_json.
        public: public inputs w[1] to w[nPublic], from 0 to below r: Python integers or text ("33", "0x21"), or JSON of
            them, as for Proof.from_json.
        proof: untrusted; or JSON of it: bytes from strangers, since a str that ends in .json is the path of a file.

    Raises:
        ConfigError: key and proof are of two curves; or the proof carries no public inputs, and none are given.
        UnsupportedDtype: a public input or a coordinate of the proof is not an integer; or another order of arguments.
        FormatError: the wrong number of public inputs, or one not below r; a point of the proof or the key off its
            curve or outside the subgroup. Such input is not a proof at all; a proof of another statement gives False.
    """
    key = of_json(VerificationKey, verification_key)
    family = _common_family(key, ())
    if proof is None:
        carried: Any = of_json(Proof, public)
        _common_family(key, (carried,))
        proof, public = carried, carried.public if carried.public is not None or key.n_public else ()
        if public is None:
            raise ConfigError("the proof carries no public inputs: verify(verification_key, public, proof) takes them")
    elif isinstance(public, Proof) or (isinstance(public, Mapping) and "pi_a" in public):
        raise UnsupportedDtype("public is a proof: the order is verification_key, public, proof")
    if isinstance(public, str | bytes | os.PathLike):
        try:
            public = inputs_from(public, family, key.n_public, "public")
        except FormatError as error:
            error.add_note("verify takes verification_key, public, proof, in this order")
            raise
    return Statement(key, public).proved_by(of_json(Proof, proof))


class Statement:
    """A verification key with public inputs, whose part of a verification is done before there is a proof."""

    def __init__(self, verification_key: VerificationKey, public: Sequence[int]) -> None:
        self._key, self._family = verification_key, _common_family(verification_key, ())
        inputs = check_inputs(public, self._family, "public", verification_key.n_public)
        self._inputs = _inputs_point(curve_named(self._family.g1.name), verification_key, inputs)
        self._first = np.stack([verification_key.alpha, self._inputs])
        self._second = np.stack([verification_key.beta, verification_key.gamma])
        self._values: U64 | None = None

    def prepare(self) -> None:
        """Run the Miller loops of the key and the inputs now. All four together take less time."""
        with named({"g1_points": ("alpha", "the sum of IC"), "g2_points": _KEY_POINTS}):
            self._values = loops(self._family, self._first, self._second)

    def proved_by(self, proof: Proof) -> bool:
        """Return whether a proof verifies."""
        key, family = self._key, _common_family(self._key, (proof,))
        a, c = encoded_points(family.g1, [proof.a, proof.c], ("pi_a", "pi_c"))
        (b,) = encoded_points(family.g2, [proof.b], ("pi_b",))
        first, second = np.stack([*_negated(curve_named(family.g1.name), [a]), c]), np.stack([b, key.delta])
        if self._values is None:
            first, second = np.concatenate([first, self._first]), np.concatenate([second, self._second])
        first_names, second_names = ("pi_a", "pi_c", "alpha", "the sum of IC"), ("pi_b", "delta", *_KEY_POINTS)
        return _is_one(family, first, second, first_names, second_names, self._values)


def verify_many(
    verification_key: VerificationKey | JsonSource, public: Sequence[Any], proofs: Sequence[Proof | JsonSource]
) -> bool:
    """Return whether all proofs of one circuit verify, by one check; True for none.

    To find the proof that does not verify, verify each.

    Args:
        verification_key, proofs: as for verify.
        public: the public inputs of each proof.

    Raises:
        ConfigError: the numbers of input lists and proofs differ, or two curves.
        UnsupportedDtype, FormatError: as verify; names the proof's index.
    """
    read = [of_json(Proof, proof, name=f"proofs[{i}]") for i, proof in enumerate(_listed(proofs, "proofs", "proofs"))]
    rows = _listed(public, "public", "lists of public inputs", len(read) + 1)
    key = of_json(VerificationKey, verification_key)
    family = _common_family(key, read)
    if len(rows) != len(read):
        found = len(public) if isinstance(public, Sized) else f"{'at least ' * (len(rows) > len(read))}{len(rows)}"
        raise ConfigError(f"wanted as many lists of public inputs as proofs, got {found} and {len(read)}")
    if not read:
        return True
    group, r = curve_named(family.g1.name), family.r
    rho = [int.from_bytes(os.urandom(_COEFFICIENT_BYTES), "little") for _ in read]
    checked = [check_inputs(row, family, f"public[{i}]", key.n_public) for i, row in enumerate(rows)]
    inputs = [sum(c * row[j] for c, row in zip(rho, checked, strict=True)) % r for j in range(key.n_public)]
    total = sum(rho) % r
    a_names, b_names, c_names = ([f"proofs[{i}].{name}" for i in range(len(read))] for name in "abc")
    a = encoded_points(family.g1, [proof.a for proof in read], a_names)
    c = encoded_points(family.g1, [proof.c for proof in read], c_names)
    b = encoded_points(family.g2, [proof.b for proof in read], b_names)
    with named({"points": a_names}):
        a = group.mul(a, rho)
    with named({"points": c_names}):
        c = msm(rho, c, family.g1.name, check="subgroup")
    ends = [group.mul(key.alpha, total), _inputs_point(group, key, inputs, total), c]
    first = np.concatenate([a, _negated(group, ends)])
    second = np.concatenate([b, np.stack([key.beta, key.gamma, key.delta])])
    g1_names = (*a_names, "alpha", "the sum of IC", "the sum of pi_c")
    return _is_one(family, first, second, g1_names, (*b_names, *_KEY_POINTS))


def _listed(values: Any, name: str, what: str, most: int | None = None) -> list[Any]:
    """Return a sequence or iterator as a list, of the first `most` values: itertools.repeat has no end."""
    if isinstance(values, str | bytes | Mapping | Set | Proof | VerificationKey) or not isinstance(values, Iterable):
        raise UnsupportedDtype(f"{name} must be a sequence of {what}, got {type(values).__name__}")
    return list(itertools.islice(values, most))


def _common_family(key: VerificationKey, proofs: Sequence[Proof]) -> Family:
    if not isinstance(key, VerificationKey):
        raise UnsupportedDtype(
            f"verification_key must be a VerificationKey, got {type(key).__name__}: VerificationKey.from_json reads one"
        )
    for i, proof in enumerate(proofs):
        if not isinstance(proof, Proof):
            raise UnsupportedDtype(f"proof {i} must be a Proof, got {type(proof).__name__}: Proof.from_json reads one")
        if proof.family != key.family:
            raise ConfigError(f"the verification key is on {key.family}, the proof on {proof.family}")
    return family_of(key.family)


def _inputs_point(group: EllipticCurve, key: VerificationKey, inputs: Sequence[int], first: int = 1) -> U64:
    """Return first IC_0 + sum x_i IC_i, canonical."""
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
    with named({"g1_points": first_names, "g2_points": second_names}):
        return product_is_one(family, first, second, values=values)


@contextmanager
def _prefixed(prefix: str, names: Mapping[str, str]) -> Iterator[None]:
    """Prepend a name to an error's text, whose first word is renamed."""
    try:
        yield
    except FormatError as error:
        text = re.sub(r"^\w+", lambda match: names.get(match[0], match[0]), str(error))
        raise FormatError(f"{prefix}: {text}") from None


# --- a contract in Solidity -------------------------------------------------------------------------------------------
_IDENTIFIER = re.compile(r"[A-Za-z_$][A-Za-z0-9_$]{0,79}", re.ASCII)

_KEYWORDS = """
abstract address after alias anonymous apply as assembly assert auto bool break byte bytes calldata case catch constant
constructor continue contract copyof days default define delete do else emit enum ether event external fallback false
final fixed for function gwei hex hours if immutable implements import in indexed inline int interface internal is
layout let library macro mapping match memory minutes modifier mutable new null of override partial payable pragma
private promise public pure receive reference relocatable return returns sealed seconds sizeof static storage string
struct super supports switch this throw transient true try type typedef typeof ufixed uint unchecked unicode using var
view virtual weeks wei while years
"""
_RESERVED = frozenset(_KEYWORDS.split())
_OWN = frozenset(("_", "verifyProof", "addTerm"))  # names that this contract has, or that are reserved

_NUMBERED = re.compile(r"(u?int|bytes)\d+|u?fixed\d+x\d+", re.ASCII)
