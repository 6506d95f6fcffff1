"""Zero knowledge: prime fields, transforms, elliptic curves, sums of multiples, pairings.

>>> fr = accelerant.zk.field("bn254_fr")
>>> fr.decode(fr.mul(fr.encode([2, 3]), fr.encode([5, 7])))
[10, 21]

On the CPU this needs NumPy and llvmlite alone; torch is imported only where it is asked for.
"""

from accelerant.algebra.field import FieldArray, PrimeField
from accelerant.algebra.field import prime_field as field
from accelerant.zk.elliptic_curve import EllipticCurve, curve
from accelerant.zk.msm.op import msm
from accelerant.zk.pairing import pairing_product_is_one
from accelerant.zk.transform import ntt

__all__ = ["EllipticCurve", "FieldArray", "PrimeField", "curve", "field", "msm", "ntt", "pairing_product_is_one"]
