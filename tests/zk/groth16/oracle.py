"""Groth16's prover on Python integers, from the definition: sums over powers for the polynomials, the group law."""

import numpy as np

from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import add, encode_points, multiply
from accelerant.zk.groth16 import Proof, VerificationKey

GENERATOR = 5
"""Of the roots of unity of snarkjs's domains."""


def prove(zkey, witness, r, s):
    """pi_A, pi_B, pi_C, affine."""
    family = family_of(zkey.family)
    g1, g2, p = family.g1, family.g2, family.r
    points = {name: points_of(g1, getattr(zkey, name)) for name in ("alpha1", "beta1", "delta1", "a", "b1", "c", "h")}
    points |= {name: points_of(g2, getattr(zkey, name)) for name in ("beta2", "delta2", "b2")}
    (alpha1,), (beta1,), (delta1,), (beta2,), (delta2,) = (
        points[name] for name in ("alpha1", "beta1", "delta1", "beta2", "delta2")
    )
    private = witness[zkey.n_public + 1 :]
    a = total(g1, [alpha1, *terms(g1, witness, points["a"]), multiply(g1, r, delta1)])
    b1 = total(g1, [beta1, *terms(g1, witness, points["b1"]), multiply(g1, s, delta1)])
    b2 = total(g2, [beta2, *terms(g2, witness, points["b2"]), multiply(g2, s, delta2)])
    sums = [*terms(g1, private, points["c"]), *terms(g1, quotient(zkey, witness), points["h"])]
    c = total(g1, [*sums, multiply(g1, s, a), multiply(g1, r, b1), multiply(g1, -r * s % p, delta1)])
    return a, b2, c


def quotient(zkey, witness):
    """Values of a b - c at the odd 2n-th roots of unity."""
    p, n = family_of(zkey.family).r, zkey.domain_size
    radix = pow(2, -512, p)
    rows = [[0] * n, [0] * n]
    for matrix, row, signal, value in zkey.coefficients:
        rows[matrix][row] += int.from_bytes(value.tobytes(), "little") * radix * witness[signal]
    values = [*rows, [a * b for a, b in zip(*rows, strict=True)]]
    w2 = pow(GENERATOR, (p - 1) // (2 * n), p)
    over = pow(w2, -2, p)
    inverse = pow(n, -1, p)
    coefficients = [
        [sum(x * pow(over, i * j, p) for j, x in enumerate(each)) * inverse % p for i in range(n)] for each in values
    ]
    found = []
    for j in range(n):
        x = pow(w2, 2 * j + 1, p)
        a, b, c = (sum(y * pow(x, i, p) for i, y in enumerate(each)) for each in coefficients)
        found.append((a * b - c) % p)
    return found


def multiples(curve, factors):
    """Affine multiples of the generator."""
    return [multiply(curve, factor % curve.order, curve.generator) for factor in factors]


def key_of_logarithms(family, alpha, beta, gamma, delta, ic):
    pairing = family_of(family)
    first = encode_points(pairing.g1, multiples(pairing.g1, [alpha, *ic]))
    second = encode_points(pairing.g2, multiples(pairing.g2, [beta, gamma, delta]))
    return VerificationKey(family, first[0], *np.array(second), first[1:])


def proof_of_logarithms(family, a, b, c):
    pairing = family_of(family)
    (pi_a, pi_c), (pi_b,) = multiples(pairing.g1, [a, c]), multiples(pairing.g2, [b])
    return Proof(family, pi_a, pi_b, pi_c)


def terms(curve, scalars, points):
    return [multiply(curve, scalar, point) for scalar, point in zip(scalars, points, strict=True)]


def total(curve, points):
    found = None
    for point in points:
        found = add(curve, found, point)
    return found


def points_of(curve, words):
    """Affine points of a file's words, taken out of Montgomery form."""
    base, degree = curve.coordinates.base, curve.coordinates.degree
    size, q = base.size_bytes, base.modulus
    out = pow(2, -8 * size, q)
    data, found = words.tobytes(), []
    for start in range(0, len(data), 2 * degree * size):
        at = range(start, start + 2 * degree * size, size)
        numbers = [int.from_bytes(data[i : i + size], "little") * out % q for i in at]
        point = tuple(numbers) if degree == 1 else (tuple(numbers[:2]), tuple(numbers[2:]))
        found.append(point if any(numbers) else None)
    return found
