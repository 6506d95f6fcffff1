"""What the prover does with a witness before any curve: A w and B w, and the quotient's values that H multiplies.

With n points, w_n of order n, g = w_2n and a, b the polynomials that have the values (A w)_i, (B w)_i at w_n^i, and c
that with the values (A w)_i (B w)_i, the scalars of H are

    a(x) b(x) - c(x) at x = g w_n^j

No division by x^n - 1, which is -2 on the whole coset: H's points are the Lagrange polynomials of the 2n-th roots at
odd places, and the even ones' values are 0. Source: the files of snarkjs; the equations are Groth's, eprint 2016/260.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve.parameters import Family
from accelerant.algebra.field import launch
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.ntt.launch import transform
from accelerant.zk.groth16.csr import stacked_coefficients
from accelerant.zk.groth16.sparse import SparseMatrix

__all__ = ["constraint_rows", "quotient", "scalars_of"]

U64 = npt.NDArray[np.uint64]

_SNARKJS_GENERATOR = 5
"""snarkjs's roots of unity are 5^((r - 1) / n): on bls12_381_fr too, where the table's generator is 7."""


def scalars_of(family: Family) -> Field:
    """The field of witnesses, with the roots of unity of snarkjs's domains."""
    return dataclasses.replace(FIELDS[f"{family.name}_fr"], generator=_SNARKJS_GENERATOR)


def constraint_rows(field: Field, domain_size: int, coefficients: npt.NDArray[np.void]) -> SparseMatrix:
    """A above B, (2 domain_size, signals); times a canonical witness it is in Montgomery form.

    Args:
        field: of the entries.
        domain_size: rows of each.
        coefficients: (n,) of zk.formats.COEFFICIENT, in range; values are x R^2.
    """
    return SparseMatrix.of(field, stacked_coefficients(domain_size, coefficients))


def quotient(field: Field, rows: SparseMatrix, witness: U64) -> U64:
    """The scalars of H, (domain_size, 4) canonical words.

    Args:
        field: scalars_of the family.
        rows: constraint_rows of the circuit.
        witness: (n, 4), canonical words below r.
    """
    n = rows.n_rows // 2
    values = np.empty((3, n, field.limbs), np.uint64)
    rows.times(witness, out=values[:2].reshape(2 * n, field.limbs))
    values[2] = launch.binary(HOST, field, "mul", values[0], values[1], "montgomery")
    transform(HOST, field, values, inverse=True, coset=1, order="natural_to_bit_reversed", out=values)
    g = field.root_of_unity(2 * n)
    transform(HOST, field, values, inverse=False, coset=g, order="bit_reversed_to_natural", out=values)
    product = launch.binary(HOST, field, "mul", values[0], values[1], "montgomery")
    difference = launch.binary(HOST, field, "sub", product, values[2], "montgomery")
    found: U64 = launch.unary(HOST, field, "from_montgomery", difference, "montgomery")
    return found
