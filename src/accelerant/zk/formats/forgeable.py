"""Verification keys whose points reveal that anyone can forge proofs for them.

A verifier accepts A, B, C with e(A, B) = e(alpha, beta) e(L, gamma) e(C, delta), L = IC_0 + sum x_i IC_i. Let points
stand for their discrete logarithms. k is any known number, and the powers of tau of the ceremony are public. Then
without a witness, for any x:

    gamma = k delta     A = alpha, B = beta, C = -k L
    beta = k gamma      A = k alpha + L, B = gamma, C = 0
    beta = k delta      A = L, B = gamma, C = -k alpha
    delta = k           A = alpha, B = beta, C = -(gamma L) / k; gamma L = sum x_i (beta u_i + alpha v_i + w_i)(tau)
                        with x_0 = 1 follows from the powers of tau
    beta = k            A = k alpha + gamma L, B = 1, C = 0
    alpha = k           A = (k + u)(tau), B = beta + (v + d)(tau), where d is the polynomial (w - u v) / (k + u) on the
                        domain, and C as an honest prover's, which takes no part of the witness

and for some x only:

    IC_0 = 0, -x_i IC_i         L = 0: A = alpha, B = beta, C = 0
    IC_0 = k alpha              A = alpha, B = beta + k gamma, C = 0, for x = 0
    IC_i = 0, k IC_j            a valid proof is one of other x, too

An honest ceremony makes each with negligible probability, but for the first, since snarkjs leaves gamma = delta = 1
until someone contributes, and for the last if its circuit ignores an input. The factors that are tested are 1 to 16
over 1 to 16, of either sign, times the eigenvalues of endomorphisms: the cube roots of 1 in G1, psi of
algebra/curve/parameters.py in G2. Source: Groth 2016, eprint 2016/260, section 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from accelerant.algebra.curve.parameters import Curve, Family, endomorphism
from accelerant.algebra.curve.weierstrass import add, decode_points
from accelerant.algebra.field.program import montgomery_radix
from accelerant.zk.formats.container import U64

_MOST = 16  # Largest numerator and denominator of a factor
_ORBIT = 6  # Images of a point of G2 that differ by more than their sign: psi has order 12 and psi^6 = -1

_MOST_COMPARED = 1 << 8
"""With more points in IC only equal and opposite ones are looked for: multiples take 0.3 ms a point."""

_ANYONE = "anyone can forge proofs for it"


def why_forgeable(
    family: Family, ic: U64, *, alpha: U64, beta: U64, gamma: U64, delta: U64, montgomery: bool = False
) -> str | None:
    """Explain why proofs for a key with these points can be forged, or return None; all are reduced, of one form."""
    if np.array_equal(gamma, delta):
        return "gamma2 equals delta2: nobody has contributed to this key, so anyone can forge proofs for it"
    words = {"alpha1": alpha, "beta2": beta, "gamma2": gamma, "delta2": delta}
    for name, each in words.items():
        if not each.any():
            return f"{name} of this key is infinity, so {_ANYONE}"
    g1, g2 = family.g1, family.g2
    points = {name: _point(g1 if name == "alpha1" else g2, each, montgomery) for name, each in words.items()}
    second = {"gamma2": points["gamma2"], "delta2": points["delta2"], "beta2": points["beta2"]}
    found = _related(g2, second | {"the generator of G2": g2.generator}, {frozenset(("gamma2", "the generator of G2"))})
    found = found or _related(g1, {"alpha1": points["alpha1"], "the generator of G1": g1.generator})
    if found:
        return f"{' and '.join(found)} of this key are related by a small factor, so {_ANYONE}"
    return _related_inputs(family, ic, points["alpha1"], montgomery)


def _related_inputs(family: Family, ic: U64, alpha: Any, montgomery: bool) -> str | None:
    rows = np.ascontiguousarray(ic).reshape(len(ic), -1)
    infinite = np.flatnonzero(~rows.any(axis=1))
    if infinite.size and infinite[0] == 0:
        return f"IC[0] of this key is infinity, so {_ANYONE} with all public inputs 0"
    if infinite.size:
        index = int(infinite[0])
        return (
            f"IC[{index}] of this key is infinity, so its proofs are valid with any public[{index - 1}]: the circuit "
            "ignores that input, or the key is not of an honest ceremony"
        )
    first = _point(family.g1, rows[0], montgomery)
    if _related(family.g1, {"IC[0]": first, "alpha1": alpha}):
        return f"IC[0] and alpha1 of this key are related by a small factor, so {_ANYONE} with all public inputs 0"
    found = _same_row(rows[:, : rows.shape[1] // 2])  # x, of a point and its opposite
    if found is None and len(rows) <= _MOST_COMPARED:
        points = {str(i): _point(family.g1, row, montgomery) for i, row in enumerate(rows)}
        related = _related(family.g1, points)
        found = None if related is None else (int(related[0]), int(related[1]))
    if found is None:
        return None
    if found[0] == 0:
        what = f"{_ANYONE} with some public inputs"
    else:
        what = (
            "its proofs are valid with other public inputs, too: the circuit takes only a combination of the two, or "
            "the key is not of an honest ceremony"
        )
    return f"IC[{found[0]}] and IC[{found[1]}] of this key are related by a small factor, so {what}"


def _same_row(rows: U64) -> tuple[int, int] | None:
    """Return the indices of two equal rows, ascending, or None."""
    order = np.lexsort(rows.T)
    same = np.flatnonzero((rows[order[1:]] == rows[order[:-1]]).all(axis=1))
    if not same.size:
        return None
    one, other = sorted((int(order[same[0]]), int(order[same[0] + 1])))
    return one, other


def _point(curve: Curve[Any], words: U64, montgomery: bool) -> Any:
    (point,) = decode_points(curve, np.array(words, np.uint64).reshape(1, *curve.shape))
    if point is None or not montgomery:
        return point
    base = curve.coordinates.base
    inverse = pow(montgomery_radix(base), -1, base.modulus)
    return tuple(curve.coordinates.times(coordinate, inverse) for coordinate in point)


def _related(
    curve: Curve[Any], points: dict[str, Any], harmless: set[frozenset[str]] | None = None
) -> tuple[str, str] | None:
    """Return the names of two points of which known multiples are equal or opposite, or None."""
    seen: dict[Any, set[str]] = {}
    for name, point in points.items():
        for x in _multiples(curve, point):
            for other in seen.setdefault(x, set()):
                if other != name and frozenset((name, other)) not in (harmless or ()):
                    return other, name
            seen[x].add(name)
    return None


def _multiples(curve: Curve[Any], point: Any) -> set[Any]:
    """Return what k P, k = 1 to 16, share with their images under phi (x^3 in G1) or powers of psi (all x in G2)."""
    found: set[Any] = set()
    multiple, k = point, curve.coordinates
    test = endomorphism(curve) if k.degree == 2 else None
    for _ in range(_MOST):
        if multiple is None:
            break
        x = multiple[0]
        if test is None:
            found.add(k.mul(k.square(x), x))
        else:
            for _ in range(_ORBIT):
                found.add(x)
                x = k.mul(test.x_factor, k.join((x[0], -x[1] % k.base.modulus)))
        multiple = add(curve, multiple, point)
    return found
