"""Federated averaging with secure aggregation, all parties in one process.

>>> model, report = federated.simulate(model, (images, labels), clients=100, rounds=5, test=(test_images, test_labels))
>>> model, report = federated.simulate(model, data, clients=100, max_norm=1.0, noise_multiplier=1.0)     # private

Source: McMahan et al. 2017, arXiv:1602.05629, algorithm 1, with every client in each round.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from accelerant._renamed import renamed_arguments, understood_arguments
from accelerant.errors import ConfigError, DivergenceError, MissingDependency, ShapeError
from accelerant.privacy.dp.ledger import LedgerLike, PrivacyLedger
from accelerant.privacy.dp.ledger.accounting import DEFAULT_DELTA, check_delta, check_number, check_whole
from accelerant.privacy.dp.noise.mechanisms import client_ledger
from accelerant.privacy.mpc.secagg import Leaving, check_leaving, run_round
from accelerant.privacy.mpc.secagg.protocol import Aggregate, SecureAggregation, StageReport, make_identities
from accelerant.runtime.files import clipped

Data = tuple[Tensor, Tensor]


@dataclass(slots=True)
class FederatedReport:
    """The course of a simulation."""

    epsilon: float = math.inf  # at delta, of the ledger after all rounds; infinite without noise
    delta: float = DEFAULT_DELTA
    losses: list[float] = field(default_factory=list)  # mean loss after each round; of the test data if there are any
    accuracies: list[float] = field(default_factory=list)  # share of correct predictions after each round
    survivors: list[tuple[int, ...]] = field(default_factory=list)  # clients in each round's mean
    stages: dict[str, StageReport] = field(default_factory=dict)  # bytes and seconds by stage, over all rounds

    def add(self, result: Aggregate, model: nn.Module, tested: Sequence[Tensor], loss: Any) -> None:
        """Take a round's result, and measure the model that it gave."""
        with torch.no_grad():  # a copy: forward may write to parameters (max_norm), and the data may be private
            outputs, wanted = copy.deepcopy(model)(tested[0]), tested[1]
            self.losses.append(float(loss(outputs, wanted)))
            self.accuracies.append(float((outputs.argmax(-1) == wanted).double().mean()))
        self.survivors.append(result.survivors)
        for name, stage in result.stages.items():
            total = self.stages.setdefault(name, StageReport())
            for each, value in asdict(stage).items():
                setattr(total, each, getattr(total, each) + value)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; an infinite epsilon is None."""
        return {**asdict(self), "epsilon": self.epsilon if math.isfinite(self.epsilon) else None}


class Simulation(NamedTuple):
    """The trained model, and the report."""

    model: nn.Module
    report: FederatedReport


@understood_arguments(lr="learning_rate")
@renamed_arguments(clip="max_abs")
def simulate(
    model: nn.Module, data: Data, *, clients: int = 100, rounds: int = 3, threshold: int | None = None,
    test: Data | None = None, local_epochs: int = 1, batch_size: int = 32, learning_rate: float = 0.1,
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy, max_abs: float = 1.0, max_norm: float | None = None,
    noise_multiplier: float = 0.0, colluders: int = 0, neighbours: Any = None,
    leaving: Mapping[int, Leaving] | None = None, ledger: LedgerLike = None, delta: float | None = None,
    seed: int = 0, progress: Callable[[int, FederatedReport], None] | None = None,
) -> Simulation:  # fmt: skip
    """Train a copy of a model by federated averaging, with the whole protocol of secure aggregation in each round.

    Args:
        model: its parameters are floating point; buffers are neither trained nor aggregated: the result, on the
            data's device, has the model's own.
        data: inputs and targets, tensors or arrays of n rows each, shuffled and divided evenly among the clients.
        threshold: as for SecureAggregation; by default two thirds of the clients, or what colluders ask for.
        test: for losses and accuracies; by default the training data, which epsilon then does not cover in the report.
        local_epochs, batch_size, learning_rate: of plain SGD at each client.
        loss: of outputs and targets.
        max_abs, max_norm, noise_multiplier, colluders, neighbours: as for SecureAggregation, of a client's update.
        leaving: by round, from 0, the clients that leave from a stage on: {1: {"consistency": [3]}}.
        ledger: a PrivacyLedger of the data, or its file; by default a new one. The unit of privacy is a client with
            all its rows.
        delta: of epsilon in the report; by default the ledger's, or 1e-5.
        seed: of shuffles. Keys and noise are the system's randomness.
        progress: called after each round.

    Raises:
        ConfigError, ShapeError: an invalid argument, before training.
        DivergenceError: a row of the data, or a client's update, is NaN or infinite; names it.
        ProtocolError: fewer clients than the threshold stayed in a round.
        BudgetExceeded: the ledger allows no further round.
    """
    place = next((parameter.device for parameter in model.parameters()), None)  # as_tensor moves to torch's default
    inputs, targets, *tested = (
        each if isinstance(each, Tensor) else torch.as_tensor(each, device=place) for each in (*data, *(test or data))
    )
    for name, value in (("rounds", rounds), ("local_epochs", local_epochs), ("batch_size", batch_size)):
        check_whole(name, value, 1)
    check_number("learning_rate", learning_rate)
    _require_valid(inputs, targets, clients, rounds, leaving or {})
    if threshold is None:
        threshold = max(-(-2 * clients // 3), (clients + colluders) // 2 + 1)
    if delta is not None:
        check_delta(delta)
    model, report = copy.deepcopy(model), FederatedReport()
    vector = parameters_to_vector(model.parameters()).detach().clone()
    if not vector.is_floating_point():
        raise ConfigError("a model without floating-point parameters cannot be averaged")
    setup = SecureAggregation(
        clients=clients, threshold=threshold, size=vector.numel(), max_abs=max_abs, max_norm=max_norm,
        colluders=colluders, noise_multiplier=noise_multiplier, neighbours=neighbours,
    )  # fmt: skip
    signing, keys = make_identities(clients)
    parties = [setup.client(i, key, keys, device=vector.device) for i, key in enumerate(signing)]
    generator = torch.Generator().manual_seed(seed)
    shards = torch.randperm(len(inputs), generator=generator, device="cpu").to(inputs.device).tensor_split(clients)

    def update_of(i: int) -> tuple[Tensor, int]:
        orders = (torch.randperm(len(shards[i]), generator=generator, device="cpu") for _ in range(local_epochs))
        batches = (rows for order in orders for rows in shards[i][order.to(inputs.device)].split(batch_size))
        return _trained(model, (inputs, targets), batches, learning_rate, loss) - vector, 1

    with client_ledger(PrivacyLedger(unit="client") if ledger is None and noise_multiplier else ledger) as book:
        if book is not None:
            book.describe(delta=delta, units=clients)
        report.delta = delta or (None if book is None else book.delta) or DEFAULT_DELTA
        for number in range(rounds):
            server = setup.server(number, keys, ledger=book, device=vector.device)
            result = run_round(server, parties, update_of, number, (leaving or {}).get(number, {}))
            vector += result.mean.to(vector)
            vector_to_parameters(vector.clone(), model.parameters())
            report.add(result, model.eval(), tested, loss)
            if noise_multiplier and book is not None:
                report.epsilon = book.epsilon(report.delta)
            if progress is not None:
                progress(number, report)
    return Simulation(model, report)


def _trained(
    model: nn.Module, data: Data, batches: Iterable[Tensor], learning_rate: float, loss: Callable[..., Tensor]
) -> Tensor:
    """Return the parameters of a copy of a model after plain SGD on batches of rows."""
    local, (inputs, targets) = copy.deepcopy(model).train(), data  # what forward writes to buffers stays here
    optimizer = torch.optim.SGD(local.parameters(), lr=learning_rate)
    for rows in batches:
        optimizer.zero_grad()
        loss(local(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    return parameters_to_vector(local.parameters()).detach()


def _require_valid(inputs: Tensor, targets: Tensor, clients: int, rounds: int, leaving: Mapping[int, Leaving]) -> None:
    """Raise ShapeError or DivergenceError for rows that cannot be divided or learned, ConfigError for `leaving`."""
    if len(inputs) != len(targets) or len(inputs) < clients:
        raise ShapeError(f"{len(inputs)} inputs and {len(targets)} targets for {clients} clients: a row for each")
    for name, rows in (("inputs", inputs), ("targets", targets)):
        if rows.is_floating_point() or rows.is_complex():
            bad = (~rows.reshape(len(rows), -1).isfinite().all(1)).nonzero()
            if len(bad):
                raise DivergenceError(
                    f"row {int(bad[0])} of the {name} has elements that are NaN or infinite ({len(bad)} such rows): "
                    "leave them out"
                )
    for number, gone in leaving.items():
        if type(number) is bool or not isinstance(number, int) or not 0 <= number < rounds:
            raise ConfigError(f"leaving: rounds are 0 to {rounds - 1}, got {clipped(number)}")
        check_leaving(gone, clients)


def digits_demonstration(
    *, steps: int = 10, noise_multiplier: float = 1.0, delta: float = 1e-3, seed: int = 0
) -> dict[str, FederatedReport]:
    """Return reports of ten clients that learn scikit-learn's digits, without and with noise, by name."""
    try:
        load_digits = importlib.import_module("sklearn.datasets").load_digits
    except ImportError:
        raise MissingDependency("scikit-learn", "dev", "the digits") from None
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    images, split = images.float() / 16, torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    learn, test = split[:1440], split[1440:]
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))
    noise: dict[str, Any] = {"max_norm": 2.0, "noise_multiplier": noise_multiplier}
    kinds = {"without noise": dict[str, Any](), f"noise {noise_multiplier:g}": noise}
    return {
        name: simulate(
            model, (images[learn], labels[learn]), test=(images[test], labels[test]), clients=10, rounds=steps,
            local_epochs=5, batch_size=16, learning_rate=0.2, leaving={1: {"mask": [3]}}, delta=delta, seed=seed,
            **settings,
        ).report
        for name, settings in kinds.items()
    }  # fmt: skip
