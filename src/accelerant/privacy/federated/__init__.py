"""Federated learning with secure aggregation: in one process (`simulate`), and on Flower (`flower`).

>>> model, report = federated.simulate(model, (images, labels), clients=100, rounds=5)

None of this code has been audited. Names load on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from accelerant.privacy.federated import flower
    from accelerant.privacy.federated.simulation import simulate

__all__ = ["flower", "simulate"]


if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"{__name__}.{'simulation' if name == 'simulate' else name}")
        return module.simulate if name == "simulate" else module


def __dir__() -> list[str]:
    return sorted(__all__)
