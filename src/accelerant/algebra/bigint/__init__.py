"""Integers of thousands of bits modulo an odd number: products and powers."""

from accelerant.algebra.bigint.residues import FixedBasePowers, Residues, gmp, residues_of

__all__ = ["FixedBasePowers", "Residues", "gmp", "residues_of"]
