"""Proving keys for tests and benchmarks: the setup of Groth16 by one who knows tau, alpha, beta and delta.

With u_s = sum over constraints i of A_is L_i(tau), v_s and w_s the same of B and C, L_i Lagrange's polynomials at the
n-th roots of unity, gamma = 1, and k_s = beta u_s + alpha v_s + w_s,

    A_s = u_s G1, B1_s = v_s G1, B2_s = v_s G2, IC_s = k_s G1 (public), C_s = k_s / delta G1 (private)
    H_j = L'_(2j+1)(tau) / delta G1, L' at the 2n-th roots

A has n_public + 1 rows more than there are constraints, 1 at signal s, so that no public input can be traded for
another. Source: Groth 2016, eprint 2016/260, section 3.2; the files of snarkjs.

Whoever sees the secrets can prove false statements. They are dropped here, and nobody has reason to believe that.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import PrimeField, prime_field
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import UnsupportedCase
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.formats import COEFFICIENT, TERM, Contribution, Label, R1cs, write_zkey
from accelerant.zk.formats.container import writable_target
from accelerant.zk.groth16.multiples import Multiples
from accelerant.zk.groth16.quotient import scalars_of
from accelerant.zk.groth16.sparse import SparseMatrix

__all__ = ["LABEL", "Constraints", "setup_with_known_tau"]

U64 = npt.NDArray[np.uint64]
Terms = npt.NDArray[np.void]

LABEL = "INSECURE: accelerant zk setup, tau known; tests only"
"""Name of the one contribution that such a key has."""


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """A circuit in memory: (A w)_i (B w)_i = (C w)_i for each row i.

    Attributes:
        family: "bn254" or "bls12_381".
        n_wires: of a witness w; w_0 = 1, then the public ones.
        n_public: public inputs and outputs.
        n_constraints: rows.
        matrices: entries of A, B and C, (n,) of zk.formats.TERM each, values canonical; believed to be in range.
    """

    family: str
    n_wires: int
    n_public: int
    n_constraints: int
    matrices: tuple[Terms, Terms, Terms]

    @property
    def domain(self) -> int:
        """Points of the transforms: a power of two above the rows, those of public inputs among them."""
        return 1 << (self.n_constraints + self.n_public).bit_length()

    @classmethod
    def of(cls, r1cs: R1cs) -> Constraints:
        """Those of a file, read.

        Raises:
            FormatError: the file is not what it claims to be.
            UnsupportedCase: it has custom gates.
        """
        if r1cs.n_custom_gate_uses:
            raise UnsupportedCase(f"{r1cs.path} uses custom gates, which Groth16 cannot prove")
        return cls(r1cs.family, r1cs.n_wires, r1cs.n_public, r1cs.n_constraints, r1cs.matrices())


def setup_with_known_tau(
    r1cs: R1cs | Constraints | str | Path, zkey: str | Path, *, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Make a proving key without a ceremony: for tests and benchmarks, never to be relied on.

    Args:
        r1cs: of the circuit: a file, one that is open, or constraints in memory.
        zkey: file to write, whole or not at all.
        progress: called with the name of each stage before it begins.

    Returns:
        "curve", "constraints", "signals", "public_inputs", "domain".

    Raises:
        FormatError: the .r1cs is not what it claims to be.
        UnsupportedCase: it has custom gates, or more constraints than the field has roots of unity for.
        ConfigError: zkey names no regular file; before anything is computed.
        OSError: the file cannot be written.
    """
    if isinstance(r1cs, str | Path):
        with R1cs.open(r1cs) as opened:
            return setup_with_known_tau(opened, zkey, progress=progress)
    writable_target(zkey)
    say = progress or (lambda _: None)
    say("constraints")
    circuit = r1cs if isinstance(r1cs, Constraints) else Constraints.of(r1cs)
    family, size = family_of(circuit.family), circuit.domain
    most = scalars_of(family).two_adicity - 1
    if size > 1 << most or size < 2:
        raise UnsupportedCase(
            f"{circuit.n_constraints} constraints take a domain of {size} points; {family.name} has 2 to 2^{most}"
        )
    a, b, c = circuit.matrices
    matrices = (np.concatenate([a, _public_rows(circuit)]), b, c)
    arrays = _key(family, circuit.n_wires, circuit.n_public, size, matrices, say)
    say("writing")
    coefficients = _coefficients(family, *matrices[:2])
    write_zkey(zkey, family.name, n_public=circuit.n_public, coefficients=coefficients, **arrays)
    return {
        "curve": family.name,
        "constraints": circuit.n_constraints,
        "signals": circuit.n_wires,
        "public_inputs": circuit.n_public,
        "domain": size,
    }


def _public_rows(circuit: Constraints) -> Terms:
    """The rows of A beyond the constraints."""
    found = np.zeros(circuit.n_public + 1, TERM)
    found["wire"] = np.arange(len(found))
    found["row"] = circuit.n_constraints + found["wire"]
    found["value"][:, 0] = 1
    return found


def _key(
    family: Family,
    n_wires: int,
    n_public: int,
    size: int,
    matrices: tuple[Terms, Terms, Terms],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Points by the names of write_zkey."""
    fr, roots = prime_field(f"{family.name}_fr"), scalars_of(family)
    tau, alpha, beta, delta = (1 + secrets.randbelow(fr.modulus - 1) for _ in range(4))
    lagrange = _lagrange(fr, roots.root_of_unity(size), size, tau)
    u, v, w = (_at_tau(fr, terms, n_wires, lagrange) for terms in matrices)
    k = fr.add(fr.add(fr.mul(u, beta), fr.mul(v, alpha)), w)
    over_delta = pow(delta, -1, fr.modulus)
    h = _lagrange(fr, roots.root_of_unity(2 * size), 2 * size, tau)[1::2]
    secret, one = fr.encode([alpha, beta, delta]), fr.encode([1])
    of_g1 = {
        "a": u,
        "b1": v,
        "ic": k[: n_public + 1],
        "c": fr.mul(k[n_public + 1 :], over_delta),
        "h": fr.mul(np.ascontiguousarray(h), over_delta),
        "fixed": np.concatenate([secret, one]),
    }
    found = _multiples(family.g1, of_g1, say)
    found |= _multiples(family.g2, {"b2": v, "fixed2": np.concatenate([secret[1:], one])}, say)
    found["alpha1"], found["beta1"], found["delta1"], g1 = found.pop("fixed")
    found["beta2"], found["delta2"], found["gamma2"] = found.pop("fixed2")
    found["contributions"] = (
        Contribution(Label(name=LABEL), found["delta1"], g1, found["delta1"], found["delta2"], bytes(64)),
    )
    return found


def _lagrange(fr: PrimeField, root: int, size: int, tau: int) -> U64:
    """L_i(tau) = (tau^n - 1) / n root^i / (tau - root^i), (n, 4)."""
    p, powers = fr.modulus, fr.encode([1])
    while len(powers) < size:
        powers = np.concatenate([powers, fr.mul(powers, pow(root, len(powers), p))])
    scale = (pow(tau, size, p) - 1) * pow(size, -1, p) % p
    found: U64 = fr.mul(fr.mul(powers, scale), fr.inv(fr.sub(tau, powers)))
    return found


def _at_tau(fr: PrimeField, terms: Terms, n_wires: int, lagrange: U64) -> U64:
    """For each wire the sum of its column's entries times L_i(tau), (n_wires, 4)."""
    values = _montgomery(fr, terms["value"])
    columns = SparseMatrix(fr.parameters, n_wires, terms["wire"].astype(np.int64), terms["row"], values)
    return columns.times(lagrange)


def _montgomery(fr: PrimeField, values: U64) -> U64:
    found: U64 = field_launch.unary(
        HOST, fr.parameters, "to_montgomery", np.ascontiguousarray(values, np.uint64), "canonical"
    )
    return found


def _multiples(curve: Curve[Any], scalars: Mapping[str, U64], say: Callable[[str], None]) -> dict[str, Any]:
    """The generator times each scalar, by name: (n, words of a point), Montgomery form."""
    group = curve_named(curve.name)
    say(f"multiples of {curve.name}'s generator")
    base = launch.to_montgomery(HOST, curve, group.generator[None])
    multiples = Multiples(curve, base, sum(map(len, scalars.values())))
    found = {}
    for name, each in scalars.items():
        say(f"points {name}")
        found[name] = multiples.of(each).reshape(len(each), math.prod(curve.shape))
    return found


def _coefficients(family: Family, a: Terms, b: Terms) -> npt.NDArray[np.void]:
    """Entries as a .zkey has them: values x R^2."""
    fr = prime_field(f"{family.name}_fr")
    found = np.zeros(len(a) + len(b), COEFFICIENT)
    for matrix, (start, terms) in enumerate(((0, a), (len(a), b))):
        part = found[start : start + len(terms)]
        part["matrix"], part["row"], part["signal"] = matrix, terms["row"], terms["wire"]
        part["value"] = _montgomery(fr, _montgomery(fr, terms["value"]))
    return found
