"""Proving keys for tests and benchmarks: the setup of Groth16 with known tau, alpha, beta and delta.

With u_s = sum over constraints i of A_is L_i(tau), v_s and w_s the same of B and C, L_i the Lagrange polynomials at the
n-th roots of unity, gamma = 1, and k_s = beta u_s + alpha v_s + w_s,

    A_s = u_s G1, B1_s = v_s G1, B2_s = v_s G2, IC_s = k_s G1 (public), C_s = k_s / delta G1 (private)
    H_j = L'_(2j+1)(tau) / delta G1, L' at the 2n-th roots

A has n_public + 1 rows more than there are constraints, 1 at signal s. Source: Groth 2016, eprint 2016/260, section
3.2. Whoever knows the secrets can prove false statements.
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
from accelerant.algebra.field import launch as field_launch
from accelerant.algebra.field.field import PrimeField, prime_field
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import UnsupportedCase
from accelerant.zk.elliptic_curve import curve as curve_named
from accelerant.zk.formats import COEFFICIENT, TERM, Label, R1cs, ZkeyContribution, write_zkey
from accelerant.zk.formats.container import writable_target
from accelerant.zk.groth16.keys import SparseMatrix, snarkjs_scalar_field

U64 = npt.NDArray[np.uint64]
Terms = npt.NDArray[np.void]

LABEL = "INSECURE: accelerant zk setup, tau known; tests only"  # Name of the single contribution of such a key


@dataclass(frozen=True, slots=True, eq=False)
class Constraints:
    """A circuit in memory, (A w)_i (B w)_i = (C w)_i, w_0 = 1; `matrices` of zk.formats.TERM are not checked."""

    family: str
    n_wires: int
    n_public: int
    n_constraints: int
    matrices: tuple[Terms, Terms, Terms]

    @property
    def domain(self) -> int:
        """Size of the transforms: a power of two above the number of rows with those of public inputs; at least 2."""
        return 1 << max(1, (self.n_constraints + self.n_public).bit_length())

    @classmethod
    def of(cls, r1cs: R1cs) -> Constraints:
        """Read the constraints of a file; UnsupportedCase for custom gates."""
        if r1cs.n_custom_gate_uses:
            raise UnsupportedCase(f"{r1cs.path} uses custom gates, which Groth16 cannot prove")
        return cls(r1cs.family, r1cs.n_wires, r1cs.n_public, r1cs.n_constraints, r1cs.matrices())


def setup_with_known_tau(
    r1cs: R1cs | Constraints | str | Path, zkey: str | Path, *, progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Make a proving key without a ceremony: for tests and benchmarks, never to be relied on.

    Args:
        r1cs: a file, an open one, or constraints in memory.
        zkey: file to write, atomically.
        progress: called with the name of each stage before it begins.

    Returns:
        "curve", "constraints", "signals", "public_inputs", "domain".

    Raises:
        FormatError: the .r1cs is malformed.
        UnsupportedCase: it has custom gates, or more constraints than the field has roots of unity.
        ConfigError: zkey is not a regular file; raised before anything is computed.
        OSError: the file cannot be written.
    """
    if isinstance(r1cs, str | Path):
        with R1cs.open(r1cs) as opened:
            return setup_with_known_tau(opened, zkey, progress=progress)
    writable_target(zkey)
    report = progress or (lambda _: None)
    report("constraints")
    circuit = r1cs if isinstance(r1cs, Constraints) else Constraints.of(r1cs)
    family, size = family_of(circuit.family), circuit.domain
    log_max = snarkjs_scalar_field(family).two_adicity - 1
    if size > 1 << log_max:
        raise UnsupportedCase(
            f"{circuit.n_constraints} constraints take a domain of {size} points; {family.name} has at most 2^{log_max}"
        )
    a, b, c = circuit.matrices
    public_rows = np.zeros(circuit.n_public + 1, TERM)
    public_rows["wire"] = np.arange(len(public_rows))
    public_rows["row"] = circuit.n_constraints + public_rows["wire"]
    public_rows["value"][:, 0] = 1
    matrices = (np.concatenate([a, public_rows]), b, c)
    arrays = _key_points(family, circuit.n_wires, circuit.n_public, size, matrices, report)
    report("writing")
    coefficients = _coefficients(family, *matrices[:2])
    write_zkey(zkey, family.name, n_public=circuit.n_public, coefficients=coefficients, **arrays)
    return {
        "curve": family.name, "constraints": circuit.n_constraints, "signals": circuit.n_wires,
        "public_inputs": circuit.n_public, "domain": size,
    }  # fmt: skip


def _key_points(
    family: Family, n_wires: int, n_public: int, size: int, matrices: tuple[Terms, Terms, Terms],
    report: Callable[[str], None],
) -> dict[str, Any]:  # fmt: skip
    """Draw the secrets and return the points of the key, by the argument names of write_zkey."""
    fr, roots = prime_field(f"{family.name}_fr"), snarkjs_scalar_field(family)
    tau, alpha, beta, delta = (1 + secrets.randbelow(fr.modulus - 1) for _ in range(4))
    lagrange = _lagrange(fr, roots.root_of_unity(size), size, tau)
    u, v, w = (_at_tau(fr, terms, n_wires, lagrange) for terms in matrices)
    k = fr.add(fr.add(fr.mul(u, beta), fr.mul(v, alpha)), w)
    over_delta = pow(delta, -1, fr.modulus)
    h = _lagrange(fr, roots.root_of_unity(2 * size), 2 * size, tau)[1::2]
    secret, one = fr.encode([alpha, beta, delta]), fr.encode([1])
    g1_scalars = {
        "a": u, "b1": v, "ic": k[: n_public + 1], "c": fr.mul(k[n_public + 1 :], over_delta),
        "h": fr.mul(np.ascontiguousarray(h), over_delta), "fixed": np.concatenate([secret, one]),
    }  # fmt: skip
    points = _multiples(family.g1, g1_scalars, report)
    points |= _multiples(family.g2, {"b2": v, "fixed2": np.concatenate([secret[1:], one])}, report)
    points["alpha1"], points["beta1"], points["delta1"], g1 = points.pop("fixed")
    points["beta2"], points["delta2"], points["gamma2"] = points.pop("fixed2")
    points["contributions"] = (
        ZkeyContribution(Label(name=LABEL), points["delta1"], g1, points["delta1"], points["delta2"], bytes(64)),
    )
    return points


def _lagrange(fr: PrimeField, root: int, size: int, tau: int) -> U64:
    """Return L_i(tau) = (tau^n - 1) / n root^i / (tau - root^i), (n, 4)."""
    p, powers = fr.modulus, fr.encode([1])
    while len(powers) < size:
        powers = np.concatenate([powers, fr.mul(powers, pow(root, len(powers), p))])
    scale = (pow(tau, size, p) - 1) * pow(size, -1, p) % p
    values: U64 = fr.mul(fr.mul(powers, scale), fr.inv(fr.sub(tau, powers)))
    return values


def _at_tau(fr: PrimeField, terms: Terms, n_wires: int, lagrange: U64) -> U64:
    """Return for each wire the sum of its column's entries times L_i(tau), (n_wires, 4)."""
    values = _montgomery(fr, terms["value"])
    columns = SparseMatrix.from_entries(fr.parameters, n_wires, terms["wire"].astype(np.int64), terms["row"], values)
    return columns.times(lagrange)


def _montgomery(fr: PrimeField, values: U64) -> U64:
    words: U64 = field_launch.elementwise(
        HOST, fr.parameters, "to_montgomery", "canonical", np.ascontiguousarray(values, np.uint64)
    )
    return words


def _multiples(curve: Curve[Any], scalars: Mapping[str, U64], report: Callable[[str], None]) -> dict[str, Any]:
    """Return the generator times each scalar, by name: (n, words of a point), Montgomery form."""
    report(f"multiples of {curve.name}'s generator")
    base = launch.to_montgomery(HOST, curve, curve_named(curve.name).generator[None])
    table = FixedBaseTable(curve, base, sum(map(len, scalars.values())))
    points = {}
    for name, values in scalars.items():
        report(f"points {name}")
        points[name] = table.multiples(values).reshape(len(values), math.prod(curve.shape))
    return points


def _coefficients(family: Family, a: Terms, b: Terms) -> npt.NDArray[np.void]:
    """Return the entries of A and B as a .zkey stores them: values x R^2."""
    fr = prime_field(f"{family.name}_fr")
    entries = np.zeros(len(a) + len(b), COEFFICIENT)
    for matrix, (start, terms) in enumerate(((0, a), (len(a), b))):
        part = entries[start : start + len(terms)]
        part["matrix"], part["row"], part["signal"] = matrix, terms["row"], terms["wire"]
        part["value"] = _montgomery(fr, _montgomery(fr, terms["value"]))
    return entries


# --- multiples of one point ------------------------------------------------------------------------------------------
_WIDTHS = range(2, 15)  # Bits of a digit. At 14 the table is 20 MB for BN254 G1.
_CHUNK_POINTS = 1 << 16  # Points added at a time: enough for all cores, and they fit the second-level cache


class FixedBaseTable:
    """The multiples d 2^(w j) P for all digits d of `bits` bits and windows j (Yao's method, Knuth volume 2, 4.6.3)."""

    def __init__(self, curve: Curve[Any], point: U64, n: int) -> None:
        """Compute the table of a point (1, *shape), in Montgomery form, of the size that is best for n multiples."""
        order_bits = curve.order.bit_length()
        self.curve = curve
        self.bits = min(_WIDTHS, key=lambda bits: -(-order_bits // bits) * (n + (1 << bits)))
        self.windows = -(-order_bits // self.bits)
        firsts = [point]
        for _ in range(self.windows - 1):
            for _ in range(self.bits):
                point = self._sum(point, point)
            firsts.append(point)
        top = np.concatenate(firsts)  # 2^k 2^(w j) P for each window j
        table = np.zeros((self.windows, 1, *curve.shape), np.uint64)
        for _ in range(self.bits):
            upper = self._sum(table, np.broadcast_to(top[:, None], table.shape))
            table = np.concatenate([table, upper], axis=1)
            top = self._sum(top, top)
        self._table = table

    def multiples(self, scalars: U64) -> U64:
        """Return the multiples by scalars, (n, 4) canonical words below the order: (n, *shape), Montgomery form."""
        points = np.empty((len(scalars), *self.curve.shape), np.uint64)
        for start in range(0, len(scalars), _CHUNK_POINTS):
            chunk = scalars[start : start + _CHUNK_POINTS]
            total: U64 = self._table[0].take(self._digit(chunk, 0), axis=0)
            for window in range(1, self.windows):
                total = self._sum(total, self._table[window].take(self._digit(chunk, window), axis=0))
            points[start : start + _CHUNK_POINTS] = total
        return points

    def _digit(self, scalars: U64, window: int) -> npt.NDArray[np.intp]:
        word, shift = divmod(window * self.bits, 64)
        digit: U64 = scalars[:, word] >> np.uint64(shift)
        if shift + self.bits > 64 and word + 1 < scalars.shape[1]:
            digit = np.bitwise_or(digit, scalars[:, word + 1] << np.uint64(64 - shift))
        return np.asarray(digit & np.uint64((1 << self.bits) - 1), np.intp)

    def _sum(self, x: U64, y: U64) -> U64:
        shape = (-1, *self.curve.shape)
        total: U64 = launch.add(HOST, self.curve, x.reshape(shape), np.ascontiguousarray(y).reshape(shape))
        return total.reshape(x.shape)
