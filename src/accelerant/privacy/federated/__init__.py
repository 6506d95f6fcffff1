"""Federated learning with secure aggregation: in one process (`simulate`), and on Flower (`flower`).

>>> model, report = federated.simulate(model, (images, labels), clients=100, rounds=5)

None of this code has been audited. Names load on first use.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy

if TYPE_CHECKING:
    from accelerant.privacy.federated import flower
    from accelerant.privacy.federated.simulation import simulate

__all__ = ["flower", "simulate"]

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    __getattr__, __dir__ = lazy(__name__, __all__, {"simulation": ("simulate",)})
