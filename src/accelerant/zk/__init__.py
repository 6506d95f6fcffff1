"""Zero knowledge: prime fields, number-theoretic transforms, elliptic curves, MSM, pairings, Groth16.

>>> fr = accelerant.zk.field("bn254_fr")
>>> fr.decode(fr.mul(fr.encode([2, 3]), fr.encode([5, 7])))
[10, 21]

`formats` reads and writes the files of circom and snarkjs, `groth16` has the prover and the verifier, `inference` has
proofs of the outputs of int8 networks; they are imported on first use. The CPU needs NumPy and llvmlite only; torch is
imported only for devices.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant._renamed import missing_names
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
from accelerant.zk.multi_scalar import FixedBase, msm, ntt

if TYPE_CHECKING:
    from accelerant.zk import formats, groth16, inference

__all__ = [
    "EllipticCurve", "FieldArray", "FixedBase", "PairingValue", "PrimeField", "curve", "field", "formats", "groth16",
    "inference", "msm", "ntt", "pairing", "pairing_product_is_one", "register_curve", "register_family",
    "register_field",
]  # fmt: skip

_ELSEWHERE = {
    **dict.fromkeys(("GF", "Field"), "zk.field(name), or zk.register_field for a prime of yours"),
    **dict.fromkeys(("Curve", "Point", "G1", "G2"), "zk.curve(name), or zk.register_curve for a curve of yours"),
    **dict.fromkeys(("intt", "ifft"), "zk.ntt(x, inverse=True)"),
    "fft": "zk.ntt",
    "multiexp": "zk.msm",
}  # Names of galois and of other libraries -> what to write here

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    _of_package, __dir__ = lazy(__name__, __all__, {})
    __getattr__ = missing_names(__name__, _ELSEWHERE, _of_package, ("groth16", "formats", "inference"))
