"""Integers of thousands of bits modulo an odd number: products and powers.

residues.py     vectors of residues, with gmpy2 on the host; powers of a fixed base
launch.py       the same in a device's memory: recorded launches
pairs.py        numbers modulo a square in a device's memory: powers at half the cost
product.h       Montgomery products in portable C, several threads a number on NVIDIA GPUs; kernel.c and pair.c use them
"""

from accelerant.algebra.bigint.residues import FixedBasePowers, Residues, gmp, residues_of

__all__ = ["FixedBasePowers", "Residues", "gmp", "residues_of"]
