"""Zero knowledge: prime fields, number-theoretic transforms, elliptic curves, MSM, pairings, Groth16.

>>> fr = accelerant.zk.field("bn254_fr")
>>> fr.decode(fr.mul(fr.encode([2, 3]), fr.encode([5, 7])))
[10, 21]

`formats` reads and writes the files of circom and snarkjs, `groth16` has the prover and the verifier; both are imported
on first use. The CPU needs NumPy and llvmlite only; torch is imported only for devices.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant.algebra.field.field import FieldArray, PrimeField, register_field
from accelerant.algebra.field.field import prime_field as field
from accelerant.zk.elliptic_curve import (
    EllipticCurve,
    PairingValue,
    curve,
    pairing,
    pairing_product_is_one,
    register_curve,
    register_family,
)
from accelerant.zk.multi_scalar import FixedBase, msm
from accelerant.zk.transform import ntt

if TYPE_CHECKING:
    from accelerant.zk import formats, groth16

__all__ = [
    "EllipticCurve", "FieldArray", "FixedBase", "PairingValue", "PrimeField", "curve", "field", "formats", "groth16",
    "msm", "ntt", "pairing", "pairing_product_is_one", "register_curve", "register_family", "register_field",
]  # fmt: skip

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    __getattr__, __dir__ = lazy(__name__, __all__, {})
