"""`PrivacyEngine`: the interface of Opacus over `make_private`, for programs that were written for Opacus.

    engine = PrivacyEngine()
    model, optimizer, data_loader = engine.make_private(
        module=model, optimizer=optimizer, data_loader=data_loader, noise_multiplier=1.1, max_grad_norm=1.0)
    ...                                         # the loop as it was
    print(engine.get_epsilon(delta=1e-5))

What would void the guarantee is refused: batches are Poisson draws, and noise is secure. See docs/from-opacus.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.privacy.dp.ledger import PrivacyLedger
from accelerant.privacy.dp.ledger.events import DEFAULT_DELTA, check_whole
from accelerant.privacy.dp.ledger.ledger import LedgerLike
from accelerant.privacy.dp.sampling import warn_of_repeats
from accelerant.privacy.dp.training.optimizer import PrivateOptimizer
from accelerant.privacy.dp.training.private import PrivateTraining, make_private

_METHODS = {"prv": "pld", "pld": "pld", "rdp": "rdp"}
_FIXED = {
    "poisson_sampling": (True, "the accountant's epsilon is that of Poisson sampling"),
    "batch_first": (True, "an example is an entry of dimension 0"),
    "noise_generator": (None, "noise comes from the system's entropy, and is never repeated"),
    "grad_sample_mode": ("hooks", "norms are computed in the cheaper way for each layer, and any loss is taken"),
}  # Options of Opacus that have one value here, and why


class PoissonLoader:
    """Poisson draws from a DataLoader's data set: an iteration has as many draws as the DataLoader has batches.

    An empty draw is returned as a row that adds nothing, so that its step is made, too. `batch_size` is the expected
    one.
    """

    def __init__(self, loader: DataLoader[Any], private: PrivateTraining) -> None:
        self.dataset, self.batch_size, self.private = loader.dataset, loader.batch_size, private
        self._length, self._rows = len(loader), _Rows(loader.dataset, loader.collate_fn)

    def __repr__(self) -> str:
        return f"PoissonLoader({len(self._rows)} rows, {self._length} draws, {self.private!r})"

    @property
    def sample_rate(self) -> float:
        """The probability of each row to be in a draw."""
        return self.private.sample_rate

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for batch in self.private.batches(self._rows, steps=self._length):
            yield batch.tensors[0] if self._rows.bare else batch.tensors


class _Rows:
    """A data set's rows by index tensor, as a DataLoader collates them; `bare` if that is a tensor."""

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any]) -> None:
        self._dataset, self._collate, self.bare = dataset, collate, False
        warn_of_repeats(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Tensor) -> Any:
        if isinstance(self._dataset, TensorDataset) and self._collate is default_collate:
            return [tensor[index.to(tensor.device)] for tensor in self._dataset.tensors]
        read = getattr(self._dataset, "__getitems__", None)
        found = self._collate([self._dataset[i] for i in index.tolist()] if read is None else read(index.tolist()))
        self.bare = isinstance(found, Tensor)
        return found


class PrivacyEngine:
    """Makes a model, its optimizer and its DataLoader private by the functions that Opacus' class of the name has.

    Args:
        accountant: "prv" or "pld", privacy loss distributions, or "rdp". "gdp", which may underestimate epsilon, is
            refused.
        secure_mode: accepted as Opacus has it; the noise is always cryptographic.
        ledger: a PrivacyLedger or its file, of all trainings of this engine; None: in memory.

    Attributes:
        ledger: what was spent.
        accountant: the engine itself, which has `get_epsilon`.

    Raises:
        ConfigError: an unknown accountant, or an error of PrivacyLedger.
    """

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = True, ledger: LedgerLike = None) -> None:
        if accountant not in _METHODS:
            raise ConfigError(f"accountant must be one of {', '.join(_METHODS)}, got {accountant!r}")
        self._method, self.secure_mode = _METHODS[accountant], secure_mode
        self.ledger = ledger if isinstance(ledger, PrivacyLedger) else PrivacyLedger(ledger)

    def __repr__(self) -> str:
        return f"PrivacyEngine(accountant={self._method!r}, {self.ledger!r})"

    @property
    def accountant(self) -> PrivacyEngine:
        """The engine itself, which has `get_epsilon`."""
        return self

    def get_epsilon(self, delta: float) -> float:
        """Return epsilon at delta of all steps so far."""
        return self.ledger.epsilon(delta, method=self._method)

    def make_private(
        self, *, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any], noise_multiplier: float,
        max_grad_norm: float, delta: float = DEFAULT_DELTA, **options: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:  # fmt: skip
        """Return the module, which is not wrapped, its private optimizer, and Poisson draws of the loader's data set.

        Args:
            module, optimizer, noise_multiplier, max_grad_norm: of `make_private`.
            data_loader: its data set, length and collate_fn are used; the sampling rate is one over its length.
            delta: of the ledger's statement.
            options: others of Opacus or of `make_private`: loss_reduction, clipping, microbatch, groups.

        Raises:
            UnsupportedCase: an option that would void the guarantee, a sampler or batch_sampler of other rows than
                the data set's or with weights, a data set that has no length.
            ConfigError, ShapeError, UnsupportedCase: of `make_private`.
        """
        return self._private(
            module, optimizer, data_loader, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm, delta=delta,
            **options,
        )  # fmt: skip

    def make_private_with_epsilon(
        self, *, module: nn.Module, optimizer: Optimizer, data_loader: DataLoader[Any], target_epsilon: float,
        target_delta: float, epochs: int, max_grad_norm: float, **options: Any,
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:  # fmt: skip
        """Do as `make_private` does, with the least noise for an epsilon after so many epochs.

        The step that would pass the target raises BudgetExceeded.

        Raises:
            ConfigError: the accountant is "rdp", by which the same noise has a larger epsilon.
            BudgetExceeded, UnsupportedCase, ConfigError, ShapeError: of `make_private`.
        """
        if self._method != "pld":
            raise ConfigError("the noise for a target is found by privacy loss distributions: PrivacyEngine() has them")
        return self._private(
            module, optimizer, data_loader, target_epsilon=target_epsilon, delta=target_delta,
            steps=check_whole("epochs", epochs, 1) * len(data_loader), max_grad_norm=max_grad_norm, **options,
        )  # fmt: skip

    def _private(
        self, module: nn.Module, optimizer: Optimizer, loader: DataLoader[Any], **options: Any
    ) -> tuple[nn.Module, PrivateOptimizer, PoissonLoader]:
        for name, (value, reason) in _FIXED.items():
            if (given := options.pop(name, value)) != value:
                raise UnsupportedCase(f"{name}={given!r}: {reason}. Leave it out")
        options.pop("criterion", None)  # of Opacus' ghost clipping
        _require_loader(loader)
        private = make_private(module, optimizer, sample_rate=1 / len(loader), ledger=self.ledger, **options)
        return private.model, private.optimizer, PoissonLoader(loader, private)


def _require_loader(loader: Any) -> None:
    """Check that Poisson draws of the data set are what a loader is meant to give: any row, each equally likely."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(f"data_loader must be a torch DataLoader, got {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset) or not len(loader):
        raise UnsupportedCase("the data set must have a length, above 0: each draw is from all of its rows")
    batches = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", loader.sampler)  # not the loader's, which a batch_sampler= leaves unused
    plain = type(sampler) in (RandomSampler, SequentialSampler) and type(batches) is BatchSampler
    if not plain or sampler.data_source is not loader.dataset or len(sampler) != len(loader.dataset):
        of = f" of {len(sampler)} rows" if plain else ""
        raise UnsupportedCase(
            f"the loader draws by a {type(sampler).__name__}{of} in a {type(batches).__name__}, and "
            "Poisson draws of all rows would take its place: give a DataLoader with batch_size= and shuffle=, of a "
            "torch.utils.data.Subset for some of the rows"
        )
