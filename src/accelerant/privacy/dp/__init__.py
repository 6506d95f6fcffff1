"""Differential privacy: private training, mechanisms, and the ledger of privacy loss.

>>> private = dp.make_private(model, optimizer, target_epsilon=8, steps=2000, delta=1e-5, max_grad_norm=1.0,
...                           sample_rate=256 / 60000)
>>> for batch in private.batches((images, labels), microbatch=64):
...     loss = cross_entropy(private.model(batch.tensors[0]), batch.tensors[1])
...     loss.backward()
...     private.optimizer.step()
...     private.optimizer.zero_grad()
>>> print(private.ledger.statement())

Trust: the party that trains sees the data and is trusted; the drawn batches and the noise are secret. One record is one
entry of a batch's first dimension, and neighbouring data sets differ by one record added or removed. None of this code
has been audited. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from accelerant._lazy import lazy
from accelerant._renamed import missing_names, renamed_names

if TYPE_CHECKING:
    from accelerant.privacy.dp.clipping import PerExampleClipper
    from accelerant.privacy.dp.ledger import Budget, Ledger, PrivacyEvent, PrivacyLedger, PrivacyStatement
    from accelerant.privacy.dp.ledger.accounting import calibrate
    from accelerant.privacy.dp.noise.mechanisms import (
        LocalGaussian,
        LocalLaplace,
        RandomizedResponse,
        gaussian_noise_,
        laplace_noise_,
        private_count,
        private_histogram,
        release,
    )
    from accelerant.privacy.dp.sampling import DrawnBatch, GroupedSampler, PoissonBatches, PoissonSampler
    from accelerant.privacy.dp.training.gradients import Privatizer
    from accelerant.privacy.dp.training.optimizer import AdaptiveClipping
    from accelerant.privacy.dp.training.private import PrivacyEngine, PrivateTraining, make_private
    from accelerant.privacy.dp.training.step import PrivateStep

__all__ = [
    "AdaptiveClipping", "Budget", "DrawnBatch", "GroupedSampler", "Ledger", "LocalGaussian", "LocalLaplace",
    "PerExampleClipper", "PoissonBatches", "PoissonSampler", "PrivacyEngine", "PrivacyEvent", "PrivacyLedger",
    "PrivacyStatement", "PrivateStep", "PrivateTraining", "Privatizer", "RandomizedResponse", "calibrate",
    "gaussian_noise_", "laplace_noise_", "make_private", "private_count", "private_histogram", "release",
]  # fmt: skip

_NAMES = {
    "clipping": ("PerExampleClipper",),
    "ledger": ("Budget", "Ledger", "PrivacyEvent", "PrivacyLedger", "PrivacyStatement"),
    "ledger.accounting": ("calibrate",),
    "noise.mechanisms": (
        "LocalGaussian", "LocalLaplace", "RandomizedResponse", "gaussian_noise_", "laplace_noise_",
        "private_count", "private_histogram", "release",
    ),
    "sampling": ("DrawnBatch", "GroupedSampler", "PoissonBatches", "PoissonSampler"),
    "training.gradients": ("Privatizer",),
    "training.optimizer": ("AdaptiveClipping",),
    "training.private": ("PrivacyEngine", "PrivateTraining", "make_private"),
    "training.step": ("PrivateStep",),
}  # fmt: skip
"""The public names that each module of this package defines."""

_RENAMED = {"Event": "PrivacyEvent", "GradientPrivatizer": "Privatizer", "Statement": "PrivacyStatement"}

_ACCOUNTANT = 'dp.PrivacyLedger().epsilon(delta, method="pld" or "rdp")'
_OPACUS = {
    "GradSampleModule": "dp.make_private, which does not wrap the model",
    "ModuleValidator": "dp.make_private, whose error names each layer that it refuses, and a replacement",
    "BatchMemoryManager": "microbatch= of dp.make_private",
    "DPOptimizer": "dp.make_private(...).optimizer",
    "DPDataLoader": "dp.make_private(...).batches(data)",
    "UniformWithReplacementSampler": "dp.PoissonSampler",
    "get_noise_multiplier": "dp.calibrate(target_epsilon=, delta=, sample_rate=, steps=)",
    **dict.fromkeys(("RDPAccountant", "PRVAccountant", "create_accountant", "get_epsilon", "epsilon"), _ACCOUNTANT),
}  # Names of Opacus -> what to write here

if not TYPE_CHECKING:  # a type checker has the imports above, and reports a name that is in none
    _get, __dir__ = lazy(__name__, __all__, _NAMES)
    __getattr__ = missing_names(__name__, _OPACUS, renamed_names(__name__, _RENAMED, _get))
