"""The prover of Groth16 on the CPU, with a key kept ready for many proofs.

    pi_A = alpha1 + sum w_i A_i + r delta1
    pi_B = beta2 + sum w_i B2_i + s delta2              pi_B1 the same of beta1, B1, delta1
    pi_C = sum_private w_i C_i + sum_j p_j H_j + s pi_A + r pi_B1 - r s delta1

with p_j of quotient.py and r, s fresh from the system's entropy. Source: Groth 2016, eprint 2016/260, section 3.2.

r and s, their product and multiples are computed in constant time. The sums over the witness and the sums of H are not:
their time and memory accesses depend on the witness.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.encoding import decode_points
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field import words as host
from accelerant.algebra.field.places import HOST
from accelerant.algebra.ntt import LOG_MOST
from accelerant.errors import ConfigError, FormatError, UnsupportedCase
from accelerant.runtime.cores import usable_cores
from accelerant.zk.formats.elements import first_not_below
from accelerant.zk.formats.wtns import Witness
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16.proof import Proof
from accelerant.zk.groth16.quotient import constraint_rows, quotient, scalars_of
from accelerant.zk.groth16.verification_key import VerificationKey
from accelerant.zk.groth16.verifier import verify
from accelerant.zk.msm.cpu import Bases, plan
from accelerant.zk.msm.op import summed

__all__ = ["Prover", "prove"]

U64 = npt.NDArray[np.uint64]
Progress = Callable[[str], None]

_SMALL_BITS = 32
"""Scalars below 2^32 have few digits: they are not counted where digits are chosen."""


class Prover:
    """A proving key, ready for proofs of many witnesses.

    >>> prover = Prover("circuit.zkey")
    >>> proof = prover.prove("witness.wtns")
    >>> verify(prover.verification_key, proof.public, proof)
    True

    The header's points, which hide the witness, are found to be finite, on their curves and in their subgroups. Those
    of the sections are believed (zk.formats.Zkey.check asks). A proof that a wrong key gives does not verify, and is
    not handed out; that it was not may tell a bit of the witness to who made the key.

    Attributes:
        family: "bn254" or "bls12_381".
        n_vars: values of a witness.
        n_public: public inputs.
        domain_size: points of the transforms.
        verification_key: that of the circuit.
        timings: stage -> seconds, of reading the key and of the last proof.
    """

    def __init__(self, zkey: Zkey | str | Path, *, progress: Progress | None = None) -> None:
        """Read a key.

        Args:
            zkey: a Groth16 .zkey file, or one that is open, which need not stay so.
            progress: called with the name of each stage before it begins.

        Raises:
            FormatError: the file is not what it claims to be, or a point of its header is infinity, off its curve or
                out of the subgroup; names section and offset.
            UnsupportedCase: a domain of one point, which snarkjs does not make, or of more than 2^27.
        """
        if not isinstance(zkey, Zkey):
            with Zkey.open(zkey) as opened:
                self._read(opened, progress)
        else:
            self._read(zkey, progress)

    def _read(self, zkey: Zkey, progress: Progress | None) -> None:
        if not 2 <= zkey.domain_size <= 1 << LOG_MOST:
            raise UnsupportedCase(f"{zkey.path}: a domain of {zkey.domain_size} points; it may have 2 to 2^{LOG_MOST}")
        self._progress = progress
        self._path = zkey.path
        self._pairing = family_of(zkey.family)
        self.family, self.n_vars, self.n_public = zkey.family, zkey.n_vars, zkey.n_public
        self.domain_size = zkey.domain_size
        self.timings: dict[str, float] = {}
        with self._stage("key: header"):
            # Checks the header's points: with delta1 = beta1 = 0 proofs verify under the genuine key and hide nothing
            self.verification_key = VerificationKey.from_zkey(zkey)
        with self._stage("key: constraints"):
            self._field = scalars_of(self._pairing)
            self._rows = constraint_rows(self._field, zkey.domain_size, zkey.coefficients)
        with self._stage("key: points"):
            g1, g2 = self._pairing.g1, self._pairing.g2
            of_g1 = {"A": zkey.a, "B1": zkey.b1, "C": zkey.c, "H": zkey.h}
            self._bases = {name: _Section(g1, words) for name, words in of_g1.items()}
            self._bases["B2"] = _Section(g2, zkey.b2)
            self._g1 = {name: _one(g1, getattr(zkey, name)) for name in ("alpha1", "beta1", "delta1")}
            self._g2 = {name: _one(g2, getattr(zkey, name)) for name in ("beta2", "delta2")}
        self._key_timings = self.timings

    def __repr__(self) -> str:
        return f"Prover({str(self._path)!r}, {self.family}, {self.n_vars} signals, domain {self.domain_size})"

    def prove(
        self,
        witness: Witness | str | Path,
        *,
        verified: bool = True,
        insecure_randomness_for_tests: tuple[int, int] | None = None,
    ) -> Proof:
        """A proof, different each time.

        Args:
            witness: a .wtns file, or one that is open.
            verified: verify the proof before it is handed out: about 3 ms.
            insecure_randomness_for_tests: (r, s), integers from 0 to below the order, instead of fresh ones. A proof
                with r and s that are known, or used for another proof, gives the witness away.

        Raises:
            ConfigError: randomness that is no two such integers.
            FormatError: the file is not what it claims to be, of another curve or circuit; or the proof does not
                verify, since the witness does not satisfy the constraints.
        """
        randomness = self._randomness(insecure_randomness_for_tests)
        self.timings = dict(self._key_timings)
        with self._stage("witness"):
            words = self._witness(witness)
            public = tuple(host.decode(self._field, words[1 : self.n_public + 1]))
        with self._stage("quotient"):
            scalars = quotient(self._field, self._rows, words)
        sums = {}
        for name, factors in (
            *((name, words) for name in ("A", "B1", "B2")),
            ("C", words[self.n_public + 1 :]),
            ("H", scalars),
        ):
            with self._stage(f"sum {name}"):
                sums[name] = self._bases[name].msm(factors)
        with self._stage("proof"):
            proof = self._assembled(sums, randomness, public)
        if verified:
            with self._stage("verification"):
                self._verify(proof, public)
        return proof

    # --- parts ---------------------------------------------------------------------------------------------------

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        if self._progress is not None:
            self._progress(name)
        start = time.perf_counter()
        yield
        self.timings[name] = time.perf_counter() - start

    def _witness(self, witness: Witness | str | Path) -> U64:
        """(n_vars, 4) canonical words below r, aligned."""
        if not isinstance(witness, Witness):
            with Witness.open(witness) as opened:
                return self._witness(opened)
        if witness.family != self.family:
            raise FormatError(f"{witness.path} is a witness on {witness.family}; {self._path} is on {self.family}")
        if witness.n_values != self.n_vars:
            raise FormatError(
                f"{witness.path} has {witness.n_values} values, {self._path} has {self.n_vars} signals: "
                "the witness is of another circuit"
            )
        words = np.array(witness.values, np.uint64)
        if first_not_below(words, self._field.modulus) is not None:  # of the copy: the file may change meanwhile
            witness.check()
            raise FormatError(f"{witness.path} has changed while it was read")
        return words

    def _randomness(self, given: tuple[int, int] | None) -> U64:
        """R, s: (2, 4) canonical words."""
        field = self._field
        if given is None:
            return host.random(field, (2,))
        if not isinstance(given, tuple | list) or len(given) != 2 or not all(_below(x, field.modulus) for x in given):
            raise ConfigError("insecure_randomness_for_tests must be two Python integers from 0 to below the order r")
        return host.encode(field, list(given))

    def _assembled(self, sums: dict[str, U64], randomness: U64, public: tuple[int, ...]) -> Proof:
        g1, g2, field = self._pairing.g1, self._pairing.g2, self._field
        r, s = randomness[:1], randomness[1:]
        rs = field_launch.binary(HOST, field, "mul", r, s, "canonical")
        minus_rs = field_launch.unary(HOST, field, "neg", rs, "canonical")
        blinds = launch.multiply(HOST, g1, self._g1["delta1"], np.concatenate([r, s, minus_rs]))
        a = _added(g1, self._g1["alpha1"], sums["A"], blinds[:1])
        b1 = _added(g1, self._g1["beta1"], sums["B1"], blinds[1:2])
        b2 = _added(g2, self._g2["beta2"], sums["B2"], launch.multiply(HOST, g2, self._g2["delta2"], s))
        mixed = launch.multiply(HOST, g1, np.concatenate([a, b1]), np.concatenate([s, r]))
        c = _added(g1, sums["C"], sums["H"], mixed[:1], mixed[1:], blinds[2:])
        (pi_a, pi_c), (pi_b,) = _affine(g1, np.concatenate([a, c])), _affine(g2, b2)
        return Proof(self.family, pi_a, pi_b, pi_c, public)

    def _verify(self, proof: Proof, public: tuple[int, ...]) -> None:
        try:
            valid = verify(self.verification_key, public, proof)
        except FormatError:  # points off their curves come of points in the key that are
            valid = False
        if not valid:
            raise FormatError(
                "the proof does not verify and is not handed out: the witness does not satisfy the constraints of "
                f"{self._path}, or that key is damaged"
            )


def prove(zkey: Zkey | str | Path, witness: Witness | str | Path) -> Proof:
    """One proof; a Prover is for many.

    >>> proof = prove("circuit.zkey", "witness.wtns")

    Args:
        zkey: a Groth16 .zkey file.
        witness: a .wtns file.

    Raises:
        FormatError: as Prover and Prover.prove.
    """
    return Prover(zkey).prove(witness)


class _Section:
    """Points of a section of the key without those at infinity, as kernels take them."""

    def __init__(self, curve: Curve[Any], words: U64) -> None:
        """Montgomery words (n, words of a point) as they lie in the file."""
        aligned = np.array(words, np.uint64)
        finite = aligned.any(axis=1)
        self._kept = None if finite.all() else np.flatnonzero(finite)
        self._curve = curve
        self._bases = Bases(curve, aligned if self._kept is None else aligned[self._kept])

    def msm(self, scalars: U64) -> U64:
        """The sum, (1, *shape), Montgomery form, of scalars (n, 4) below the order."""
        rows = scalars if self._kept is None else scalars[self._kept]
        large = rows[:, 1:].any(axis=1) | (rows[:, 0] >> np.uint64(_SMALL_BITS) != 0)
        chosen = plan(self._curve.order, max(1, int(np.count_nonzero(large))), usable_cores())
        words = HOST.contiguous(rows)
        found: U64 = summed(HOST, self._curve, [words], lambda row: self._bases.msm(row, chosen))
        return found


def _below(value: object, modulus: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < modulus


def _one(curve: Curve[Any], words: U64) -> U64:
    return np.array(words, np.uint64).reshape(1, *curve.shape)


def _added(curve: Curve[Any], *points: U64) -> U64:
    """The sum of points (1, *shape)."""
    total, *rest = points
    for point in rest:
        total = launch.add(HOST, curve, total, HOST.contiguous(point))
    return total


def _affine(curve: Curve[Any], points: U64) -> list[Any]:
    """Python points of words in Montgomery form."""
    canonical = launch.from_montgomery(HOST, curve, points)
    return decode_points(curve, canonical, check=False)
