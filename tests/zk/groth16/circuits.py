"""Circuits of any size, made up: an .r1cs and a witness that satisfies it."""

import random
from pathlib import Path

import numpy as np

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.words import encode
from accelerant.zk.formats import TERM, write_r1cs, write_wtns

BITS_OF_FOUR = 2
"""Of four constraints, how many say that a wire is 0 or 1; the others are products of sums."""


def write_circuit(folder, family, n_constraints, n_public, seed=1):
    """Write circuit.r1cs and witness.wtns into the folder."""
    rng, field = random.Random(seed), FIELDS[f"{family}_fr"]
    p = field.modulus
    wires = [1, *(rng.randrange(p) for _ in range(n_public)), rng.randrange(2, p)]
    entries = {"a": [], "b": [], "c": []}
    for row in range(n_constraints):
        new, known = len(wires), rng.randrange(1 + n_public, len(wires))
        if row % 4 < BITS_OF_FOUR and row >= n_public:
            wires.append(rng.randrange(2))
            entries["a"].append((row, new, 1))
            entries["b"] += [(row, 0, p - 1), (row, new, 1)]
            continue
        factor = rng.choice((1, p - 1, rng.randrange(p)))
        entries["a"] += [(row, known, 1), (row, 0, factor)]
        entries["b"].append((row, new - 1, 1))
        product = (wires[known] + factor) * wires[new - 1] % p
        wires.append(product)
        if row < n_public:  # the public wire is what makes the sum right
            entries["c"] += [(row, 1 + row, 1), (row, new, 1)]
            wires[new] = (product - wires[1 + row]) % p
        else:
            entries["c"].append((row, new, 1))
    write_r1cs(
        Path(folder) / "circuit.r1cs",
        family,
        n_wires=len(wires),
        n_pub_out=n_public // 2,
        n_pub_in=n_public - n_public // 2,
        n_prv_in=1,
        n_constraints=n_constraints,
        **{name: _terms(field, rows) for name, rows in entries.items()},
    )
    write_wtns(Path(folder) / "witness.wtns", family, encode(field, wires))
    return wires


def _terms(field, rows):
    found = np.zeros(len(rows), TERM)
    for i, name in enumerate(("row", "wire")):
        found[name] = [row[i] for row in rows]
    if rows:
        found["value"] = encode(field, [row[2] for row in rows])
    return found
