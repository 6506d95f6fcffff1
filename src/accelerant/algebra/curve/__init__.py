"""The curves of pairings: parameters, group law, encodings, pairings; oracles on Python integers, and kernels."""

from accelerant.algebra.curve.parameters import CURVES, FAMILIES, Curve, Family, curve_of, family_of

__all__ = ["CURVES", "FAMILIES", "Curve", "Family", "curve_of", "family_of"]
