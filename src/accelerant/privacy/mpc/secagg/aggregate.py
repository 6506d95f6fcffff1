"""Secure aggregation behind one call, with all parties in this process.

>>> total, report = mpc.secure_aggregate(client_updates, threshold=7)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from accelerant.errors import ConfigError, DivergenceError, ShapeError
from accelerant.privacy.mpc.secagg.client import Client
from accelerant.privacy.mpc.secagg.messages import STAGES
from accelerant.privacy.mpc.secagg.server import Aggregate, Server
from accelerant.privacy.mpc.secagg.setup import SecureAggregation, make_identities

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger import Ledger

__all__ = ["Result", "run_round", "secure_aggregate"]

Leaving = Mapping[str, Collection[int]]
"""Clients that send nothing from a stage of STAGES on."""


class Result(NamedTuple):
    """The sum over the survivors, and the round's report."""

    total: Tensor
    report: Aggregate


def secure_aggregate(
    client_updates: Sequence[Any], threshold: int, *, clip: float | None = None, weights: Sequence[int] | None = None,
    max_norm: float | None = None, noise_multiplier: float = 0.0, colluders: int = 0,
    neighbours: Any = None, ledger: Ledger | None = None, leaving: Leaving | None = None,
    device: torch.device | str = "cpu",
) -> Result:  # fmt: skip
    """Return the sum of updates by the whole protocol, with fresh keys, one client for each update.

    This shows what a deployment costs and returns. It hides nothing from this process, which has all the secrets.

    Args:
        client_updates: tensors or arrays of one shape and dtype. Integers are summed exactly.
        threshold: t, more than half of the clients and colluders together.
        clip: as for SecureAggregation; by default the largest magnitude of all updates, which clients that do not trust
            each other would have to agree on.
        weights: whole numbers from 1; the sum is then that of weight times update.
        max_norm, noise_multiplier, colluders, neighbours: as for SecureAggregation.
        ledger: records the release.
        leaving: clients that send nothing from a stage on, by its name ("advertise", "share", "mask", "consistency",
            "unmask"): {"mask": [3]}.
        device: of masks and sum.

    Returns:
        total, in the updates' shape: float64, or int64 of integers; and the report: survivors, weight, and bytes and
        seconds by stage.

    Raises:
        ConfigError: an invalid setting; no updates. ShapeError: updates of different shapes.
        ProtocolError: fewer clients than the threshold stayed.
        BudgetExceeded: the ledger's budget does not allow the noisy sum.
        DivergenceError: an update is not finite.
    """
    updates = [torch.as_tensor(update).detach() for update in client_updates]
    if len(updates) < 2:
        raise ConfigError(f"secure aggregation needs at least 2 updates, got {len(updates)}")
    first = updates[0]
    for i, update in enumerate(updates):
        if update.shape != first.shape or update.is_floating_point() != first.is_floating_point():
            raise ShapeError(
                f"updates must have one shape and kind: update {i} is {update.dtype} {tuple(update.shape)}, update 0 "
                f"{first.dtype} {tuple(first.shape)}"
            )
    if weights is not None and len(weights) != len(updates):
        raise ShapeError(f"{len(weights)} weights for {len(updates)} updates")
    if clip is None and max_norm is None:
        largest = [float(update.double().abs().max()) if update.numel() else 1.0 for update in updates]
        if wrong := [i for i, size in enumerate(largest) if not math.isfinite(size)]:
            raise DivergenceError(f"update {wrong[0]} has elements that are NaN or infinite")
        clip = max(largest) or 1.0
    whole = not first.is_floating_point() and not noise_multiplier
    setup = SecureAggregation(
        clients=len(updates), threshold=threshold, size=first.numel(), clip=clip, max_norm=max_norm,
        noise_multiplier=noise_multiplier, step=1.0 if whole else None, colluders=colluders, neighbours=neighbours,
        max_weight=1 if weights is None else max(2, *weights),
    )  # fmt: skip
    signing, keys = make_identities(setup.clients)
    clients = [setup.client(i, key, keys, device=device) for i, key in enumerate(signing)]
    server = setup.server(0, keys, ledger=ledger, device=device)
    given = [1] * len(updates) if weights is None else list(weights)
    report = run_round(server, clients, lambda i: (updates[i], given[i]), 0, leaving or {})
    total = report.sum.reshape(first.shape)
    return Result(total.round().to(torch.int64) if whole else total, report)


def run_round(
    server: Server, clients: Sequence[Client], update_of: Callable[[int], tuple[Any, int]], round_number: int,
    leaving: Leaving,
) -> Aggregate:  # fmt: skip
    """Run a round with all parties in this process; update_of returns a client's update and weight when it masks it."""
    if unknown := set(leaving) - set(STAGES):
        raise ConfigError(f"leaving has stages {', '.join(STAGES)}, got {', '.join(map(str, unknown))}")
    answers: dict[int, bytes] = dict.fromkeys(range(len(clients)), b"")
    for stage in STAGES:
        for i in leaving.get(stage, ()):
            answers.pop(i, None)
        for i, answer in answers.items():
            client = clients[i]
            given = update_of(i) if stage == "mask" else None
            began = time.perf_counter()
            if stage == "advertise":
                message = client.advertise(round_number)
            elif given is not None:
                message = client.masked_input(answer, *given)
            else:
                message = {"share": client.share_keys, "consistency": client.consistency, "unmask": client.unmask}[
                    stage
                ](answer)
            server.stages[stage].clients_s += time.perf_counter() - began
            server.receive(message)
        answers = server.advance()
    return server.finish()
