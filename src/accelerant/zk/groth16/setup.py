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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import Family, family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field import PrimeField, prime_field
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.places import HOST
from accelerant.errors import UnsupportedCase
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.formats import COEFFICIENT, TERM, Contribution, Label, R1cs, write_zkey
from accelerant.zk.formats.writing import writable_target
from accelerant.zk.groth16.quotient import scalars_of
from accelerant.zk.groth16.sparse import SparseMatrix

__all__ = ["LABEL", "setup_with_known_tau"]

U64 = npt.NDArray[np.uint64]
Terms = npt.NDArray[np.void]

LABEL = "INSECURE: accelerant zk setup, tau known; tests only"
"""Name of the one contribution that such a key has."""


def setup_with_known_tau(
    r1cs: R1cs | str | Path, zkey: str | Path, *, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Make a proving key without a ceremony: for tests and benchmarks, never to be relied on.

    Args:
        r1cs: of the circuit.
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
    if not isinstance(r1cs, R1cs):
        with R1cs.open(r1cs) as opened:
            return setup_with_known_tau(opened, zkey, progress=progress)
    writable_target(zkey)
    if r1cs.n_custom_gate_uses:
        raise UnsupportedCase(f"{r1cs.path} uses custom gates, which Groth16 cannot prove")
    family = family_of(r1cs.family)
    size = 1 << (r1cs.n_constraints + r1cs.n_public).bit_length()
    most = scalars_of(family).two_adicity - 1
    if size > 1 << most or size < 2:
        raise UnsupportedCase(f"{r1cs.path}: a domain of {size} points; {family.name} has 2 to 2^{most}")
    say = progress or (lambda _: None)
    say("constraints")
    a, b, c = r1cs.matrices()
    public = np.zeros(r1cs.n_public + 1, TERM)
    public["wire"] = np.arange(len(public))
    public["row"] = r1cs.n_constraints + public["wire"]
    public["value"][:, 0] = 1
    matrices = (np.concatenate([a, public]), b, c)
    arrays = _key(family, r1cs.n_wires, r1cs.n_public, size, matrices, say)
    say("writing")
    write_zkey(zkey, family.name, n_public=r1cs.n_public, coefficients=_coefficients(family, *matrices[:2]), **arrays)
    return {
        "curve": family.name,
        "constraints": r1cs.n_constraints,
        "signals": r1cs.n_wires,
        "public_inputs": r1cs.n_public,
        "domain": size,
    }


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
    of_g1 = {
        "a": u,
        "b1": v,
        "ic": k[: n_public + 1],
        "c": fr.mul(k[n_public + 1 :], over_delta),
        "h": fr.mul(np.ascontiguousarray(h), over_delta),
    }
    found: dict[str, Any] = {}
    for name, scalars in of_g1.items():
        say(f"points {name}")
        found[name] = _multiples(family.g1, scalars)
    say("points b2")
    found["b2"] = _multiples(family.g2, v)
    secret = fr.encode([alpha, beta, delta])
    one = fr.encode([1])
    found["alpha1"], found["beta1"], found["delta1"] = _multiples(family.g1, secret)
    found["beta2"], found["delta2"] = _multiples(family.g2, secret[1:])
    (g1,), (found["gamma2"],) = _multiples(family.g1, one), _multiples(family.g2, one)
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


def _multiples(curve: Curve[Any], scalars: U64) -> U64:
    """The generator times each scalar, (n, words of a point), Montgomery form."""
    group = curve_named(curve.name)
    base = launch.to_montgomery(HOST, curve, group.generator[None])
    points = launch.multiply(HOST, curve, base, HOST.contiguous(scalars))
    return np.asarray(points).reshape(len(scalars), math.prod(curve.shape))


def _coefficients(family: Family, a: Terms, b: Terms) -> npt.NDArray[np.void]:
    """Entries as a .zkey has them: values x R^2."""
    fr = prime_field(f"{family.name}_fr")
    found = np.zeros(len(a) + len(b), COEFFICIENT)
    for matrix, (start, terms) in enumerate(((0, a), (len(a), b))):
        part = found[start : start + len(terms)]
        part["matrix"], part["row"], part["signal"] = matrix, terms["row"], terms["wire"]
        part["value"] = _montgomery(fr, _montgomery(fr, terms["value"]))
    return found
