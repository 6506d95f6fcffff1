"""Multi-party computation: secrets divided among parties, and sums of what parties keep to themselves.

>>> shares = mpc.shamir.split(torch.tensor([3, -4]), threshold=2, count=3)
>>> mpc.shamir.combine(shares[1:])
tensor([ 3, -4])
>>> total, report = mpc.secure_aggregate(client_updates, threshold=7)

None of this code has been audited. Names load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerant.privacy.mpc import beaver, shamir
    from accelerant.privacy.mpc.secagg.aggregate import secure_aggregate
    from accelerant.privacy.mpc.secagg.setup import SecureAggregation

__all__ = ["SecureAggregation", "beaver", "secure_aggregate", "shamir"]

_MODULES = {"SecureAggregation": "secagg.setup", "secure_aggregate": "secagg.aggregate"}


if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
