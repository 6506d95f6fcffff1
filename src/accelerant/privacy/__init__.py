"""Private computing: differential privacy (dp), encryption (he), secret sharing (mpc), federated learning.

>>> private = accelerant.privacy.dp.make_private(model, optimizer, noise_multiplier=1.1, delta=1e-5, max_grad_norm=1.0,
...                                              sample_rate=256 / 60000)

None of this code has been audited.
"""

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant._renamed import missing_names

if TYPE_CHECKING:
    from accelerant.privacy import dp, federated, he, mpc

__all__ = ["dp", "federated", "he", "mpc"]

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    _of_package, __dir__ = lazy(__name__, __all__, {})
    __getattr__ = missing_names(__name__, {}, _of_package, ("dp", "mpc", "he", "federated"))
