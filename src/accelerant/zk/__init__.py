"""Zero knowledge: prime fields, transforms, elliptic curves, sums of multiples, pairings, Groth16.

>>> fr = accelerant.zk.field("bn254_fr")
>>> fr.decode(fr.mul(fr.encode([2, 3]), fr.encode([5, 7])))
[10, 21]

`formats` has the files of circom and snarkjs, `groth16` the prover and the verifier; imported on first use. On the
CPU all this needs NumPy and llvmlite alone; torch is imported only where it is asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from accelerant.algebra.field import FieldArray, PrimeField, register_field
from accelerant.algebra.field import prime_field as field
from accelerant.zk.elliptic_curve import EllipticCurve, curve, register_curve
from accelerant.zk.msm.op import msm
from accelerant.zk.pairing import pairing_product_is_one
from accelerant.zk.transform import ntt

if TYPE_CHECKING:
    from accelerant.zk import formats, groth16

__all__ = [
    "EllipticCurve",
    "FieldArray",
    "PrimeField",
    "curve",
    "field",
    "formats",
    "groth16",
    "msm",
    "ntt",
    "pairing_product_is_one",
    "register_curve",
    "register_field",
]


def __getattr__(name: str) -> Any:
    if name in ("formats", "groth16"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
