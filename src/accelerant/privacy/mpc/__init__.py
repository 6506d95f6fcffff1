"""Multi-party computation: secrets divided among parties, none of which sees them.

>>> shares = mpc.shamir.split(torch.tensor([3, -4]), threshold=2, count=3)
>>> mpc.shamir.combine(shares[1:])
tensor([ 3, -4])

None of this code has been audited. Names load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerant.privacy.mpc import shamir

__all__ = ["shamir"]


if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none

    def __getattr__(name: str) -> Any:
        if name in __all__:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
