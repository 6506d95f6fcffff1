"""Zero knowledge: prime fields.

>>> fr = accelerant.zk.field("bn254_fr")
>>> fr.decode(fr.mul(fr.encode([2, 3]), fr.encode([5, 7])))
[10, 21]

On the CPU this needs NumPy and llvmlite alone; torch is imported only where it is asked for.
"""

from accelerant.algebra.field import FieldArray, PrimeField
from accelerant.algebra.field import prime_field as field

__all__ = ["FieldArray", "PrimeField", "field"]
