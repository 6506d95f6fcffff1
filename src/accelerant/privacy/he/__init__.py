"""Homomorphic encryption: `paillier` adds encrypted tensors, `bfv` also multiplies encrypted integers.

`search` scores vectors for an encrypted query, by BFV.

>>> public, private = he.paillier.keygen()
>>> encrypted = he.encrypt_batch(public, np.array([1.5, 2.5]))
>>> he.decrypt_batch(private, encrypted * 2)
array([3., 5.])

None of this code has been audited.
"""

from typing import TYPE_CHECKING, Any

from accelerant._lazy import lazy
from accelerant._renamed import missing_names

if TYPE_CHECKING:
    from accelerant.privacy.he import bfv, paillier, search

__all__ = ["bfv", "decrypt_batch", "encrypt_batch", "paillier", "search"]


def encrypt_batch(public: Any, array: Any, **options: Any) -> Any:
    """Encrypt a NumPy, torch, CuPy or JAX array under a public key; options are those of the key's `encrypt`."""
    return public.encrypt(array, **options)


def decrypt_batch(private: Any, encrypted: Any, **options: Any) -> Any:
    """Decrypt to an array of the library that was encrypted; options are those of the key's `decrypt`."""
    return private.decrypt(encrypted, **options)


_PHE = dict.fromkeys(("generate_keypair", "generate_paillier_keypair"), "he.paillier.keygen()")
"""Names of phe and others -> what to write here."""

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    _of_package, __dir__ = lazy(__name__, __all__, {})
    __getattr__ = missing_names(__name__, _PHE, _of_package, ("paillier", "bfv"))
