"""Multi-party computation: secrets divided among parties, and sums of what parties keep to themselves.

>>> shares = mpc.shamir.split(torch.tensor([3, -4]), threshold=2, count=3)
>>> mpc.shamir.combine(shares[1:])
tensor([ 3, -4])
>>> total, report = mpc.secure_aggregate(client_updates, threshold=7)

None of this code has been audited. Names load on first use.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant._renamed import missing_names

if TYPE_CHECKING:
    from accelerant.privacy.mpc import beaver, shamir
    from accelerant.privacy.mpc.secagg import secure_aggregate
    from accelerant.privacy.mpc.secagg.protocol import SecureAggregation, make_identities

__all__ = ["SecureAggregation", "beaver", "make_identities", "secure_aggregate", "shamir"]

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    _NAMES = {"secagg.protocol": ("SecureAggregation", "make_identities"), "secagg": ("secure_aggregate",)}
    _of_package, __dir__ = lazy(__name__, __all__, _NAMES)
    __getattr__ = missing_names(__name__, {}, _of_package, ("shamir", "beaver"))
