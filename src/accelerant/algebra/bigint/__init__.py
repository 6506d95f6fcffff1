"""Integers of thousands of bits modulo an odd number: products and powers.

residues.py     vectors of residues, with gmpy2 on the host; powers of a fixed base
launch.py       the same in a device's memory: recorded launches
kernel.c        Montgomery products and powers in portable C, several threads a number on NVIDIA GPUs
"""

from accelerant.algebra.bigint.residues import FixedBase, Residues, gmp, residues_of

__all__ = ["FixedBase", "Residues", "gmp", "residues_of"]
