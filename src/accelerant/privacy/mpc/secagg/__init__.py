"""Secure aggregation behind one call, with all parties in this process.

>>> total, report = mpc.secure_aggregate(client_updates, threshold=7)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, DivergenceError, ShapeError
from accelerant.privacy.mpc.secagg.encoding import real_tensor
from accelerant.privacy.mpc.secagg.messages import STAGES
from accelerant.privacy.mpc.secagg.protocol import (
    Aggregate,
    AggregationClient,
    AggregationServer,
    SecureAggregation,
    make_identities,
)
from accelerant.runtime.files import clipped
from accelerant.runtime.registry import DeviceLike, find_device

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger import LedgerLike

Leaving = Mapping[str, Collection[int]]  # Clients that send nothing from a stage of STAGES on


class AggregationResult(NamedTuple):
    """The sum over the survivors, in the form of an update, and the round's report."""

    total: Any
    report: Aggregate


@renamed_arguments(clip="max_abs")
def secure_aggregate(
    client_updates: Sequence[Any], threshold: int, *, max_abs: float | None = None,
    weights: Sequence[int] | None = None, max_norm: float | None = None, noise_multiplier: float = 0.0,
    colluders: int = 0, neighbours: Any = None, ledger: LedgerLike = None, leaving: Leaving | None = None,
    device: DeviceLike = "cpu",
) -> AggregationResult:  # fmt: skip
    """Return the sum of updates by the whole protocol, with fresh keys, one client for each update.

    This shows what a deployment costs and returns. It hides nothing from this process, which has all the secrets.

    Args:
        client_updates: an update for each client: a tensor, array or list of numbers; or a model's parameters as a
            module, or as a dict, list or tuple of these. All have the same names and shapes. Integers and booleans are
            summed exactly; floats in steps that follow from `max_abs`, one for all tensors.
        threshold: t, more than half of the clients and colluders together.
        max_abs: as for SecureAggregation; by default the largest magnitude of all updates, which clients that do
            not trust each other would have to agree on.
        weights: whole numbers from 1; the sum is then that of weight times update.
        max_norm, noise_multiplier, colluders, neighbours: as for SecureAggregation.
        ledger: a PrivacyLedger, whose unit is a client, or its file: records the release.
        leaving: clients that send nothing from a stage on, by its name ("advertise", "share", "mask", "consistency",
            "unmask"): {"mask": [3]}.
        device: of masks and sum.

    Returns:
        total, as an update: tensors of float64, of integers int64 unless there is noise, in dicts by name (also of a
        module), lists and tuples; and the report: survivors, weight, and bytes and seconds by stage.

    Raises:
        ConfigError: an invalid setting; one update, not a list of them.
        ShapeError: updates of different names or shapes, or some of integers and others of floats.
        UnsupportedDtype: an update is not of real numbers (complex, quantized, strings).
        UnsupportedCase: a sparse tensor, or one without values.
        ProtocolError: fewer clients than the threshold stayed.
        BudgetExceeded: the ledger's budget does not allow the noisy sum.
        DivergenceError: an update is not finite.
    """
    if isinstance(client_updates, (nn.Module, Mapping)) or not isinstance(client_updates, Iterable):
        raise ConfigError(f"updates must be a list of one update per client, got a {type(client_updates).__name__}")
    if getattr(client_updates, "ndim", 1) == 0:
        raise ConfigError("updates must be a list of one update per client, got an array of no dimension")
    listed = list(client_updates)
    if len(listed) < 2:
        raise ConfigError(f"secure aggregation needs at least 2 updates, got {len(listed)}")
    parts, forms = zip(*(_tensors(update, f"update {i}") for i, update in enumerate(listed)), strict=True)
    _check_alike(parts)
    first, place = parts[0], torch.device(find_device(device, torch_tensors=True).torch_device)
    updates = [
        torch.cat([part[path].reshape(-1).to(place, torch.float64) for path in first] or [torch.zeros(0, device=place)])
        for part in parts
    ]
    given = [1] * len(updates) if weights is None else np.asarray(weights).tolist()
    if len(given) != len(updates):
        raise ShapeError(f"{len(given)} weights for {len(updates)} updates")
    for i, update in enumerate(updates):
        if not bool(update.isfinite().all()):
            raise DivergenceError(f"update {i} has elements that are NaN or infinite")
    if max_abs is None and max_norm is None:
        max_abs = max(float(update.abs().max()) if update.numel() else 1.0 for update in updates) or 1.0
    whole = {path: not part.is_floating_point() and not noise_multiplier for path, part in first.items()}
    step = 1.0 if all(whole.values()) else None
    setup = SecureAggregation(
        clients=len(updates), threshold=threshold, size=updates[0].numel(), max_abs=max_abs, max_norm=max_norm,
        noise_multiplier=noise_multiplier, step=step, colluders=colluders, neighbours=neighbours,
        max_weight=1 if weights is None else max(2, *given),
    )  # fmt: skip
    if any(whole.values()) and setup.encoding.step > 1:
        raise ConfigError(
            f"integers among floats are not summed exactly in steps of {setup.encoding.step:g}, which max_abs "
            f"{max_abs} needs: aggregate them in a call of their own, or as floats"
        )
    check_leaving(leaving or {}, setup.clients)
    signing, keys = make_identities(setup.clients)
    clients = [setup.client(i, key, keys, device=device) for i, key in enumerate(signing)]
    server = setup.server(0, keys, ledger=ledger, device=device)
    report = run_round(server, clients, lambda i: (updates[i], given[i]), 0, leaving or {})
    sums = iter(report.sum.split([part.numel() for part in first.values()]))
    totals = [next(sums).reshape(part.shape) for part in first.values()]
    exact = [x.round().to(torch.int64) if whole[path] else x for path, x in zip(first, totals, strict=True)]
    return AggregationResult(pytree.tree_unflatten(exact, forms[0]), report)


def _listed(update: Any) -> Any:
    """Return an update with modules as dicts of their parameters, and iterators as lists."""
    if isinstance(update, nn.Module):
        return dict(update.named_parameters())
    if isinstance(update, Mapping):
        return {name: _listed(part) for name, part in update.items()}
    if isinstance(update, Iterator):
        update = list(update)
    if isinstance(update, (list, tuple)) and any(_holds_arrays(part) for part in update):
        parts = [_listed(part) for part in update]
        return tuple(parts) if isinstance(update, tuple) else parts
    return update  # an array, or a nested list of numbers


def _holds_arrays(part: Any) -> bool:
    if isinstance(part, (list, tuple)):
        return any(map(_holds_arrays, part))
    return isinstance(part, (Tensor, np.ndarray, Mapping, nn.Module, Iterator))


def _tensors(update: Any, name: str) -> tuple[dict[str, Tensor], pytree.TreeSpec]:
    """Return the tensors of an update by their places, such as "['layers'][0]", and its form."""
    leaves, form = pytree.tree_flatten_with_path(_listed(update), is_leaf=lambda part: not _holds_arrays(part))
    places = {pytree.keystr(path): leaf for path, leaf in leaves}
    return {place: real_tensor(leaf, name + place) for place, leaf in places.items()}, form


def _check_alike(parts: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise ShapeError unless all updates have the names, shapes and kinds (integers or floats) of the first."""
    first = parts[0]
    for i, part in enumerate(parts):
        if part.keys() != first.keys():
            place, *_ = [place for place in (*part, *first) if (place in part) != (place in first)]
            has, lacks = (i, 0) if place in part else (0, i)
            raise ShapeError(f"update {has} has {place or 'one array'}, which update {lacks} does not have")
        for at, x in part.items():
            y = first[at]
            if x.shape != y.shape or x.is_floating_point() != y.is_floating_point():
                raise ShapeError(
                    f"updates must have one shape and kind: update {i}{at} is {x.dtype} {tuple(x.shape)}, update 0{at} "
                    f"{y.dtype} {tuple(y.shape)}"
                )


def check_leaving(leaving: Leaving, clients: int) -> None:
    """Raise ConfigError unless `leaving` has stages, and of each the numbers of some clients."""
    if not isinstance(leaving, Mapping):
        raise ConfigError(f'leaving must be {{stage: clients}}, such as {{"mask": [3]}}, got {clipped(leaving)}')
    if unknown := set(leaving) - set(STAGES):
        raise ConfigError(f"leaving has stages {', '.join(STAGES)}, got {', '.join(map(str, unknown))}")
    for stage, given in leaving.items():
        gone: Any = given
        if isinstance(gone, str) or not isinstance(gone, Collection):
            raise ConfigError(f"leaving[{stage!r}] must be a list of clients, got {clipped(gone)}")
        for each in gone:
            if type(each) is bool or not isinstance(each, (int, np.integer)) or not 0 <= each < clients:
                raise ConfigError(f"leaving[{stage!r}]: clients are 0 to {clients - 1}, got {clipped(each)}")


_METHODS = {"share": "share_keys", "mask": "masked_input"}  # of a client, by stage; others are called as the stage


def run_round(
    server: AggregationServer, clients: Sequence[AggregationClient], update_of: Callable[[int], tuple[Any, int]],
    round_number: int, leaving: Leaving,
) -> Aggregate:  # fmt: skip
    """Run a round with all parties in this process; update_of returns a client's update and weight when it masks it."""
    answers: dict[int, bytes] = dict.fromkeys(range(len(clients)), b"")
    for stage in STAGES:
        for i in leaving.get(stage, ()):
            answers.pop(i, None)
        for i, answer in answers.items():
            given = (round_number,) if stage == "advertise" else (answer, *(update_of(i) if stage == "mask" else ()))
            began = time.perf_counter()
            try:
                message = getattr(clients[i], _METHODS.get(stage, stage))(*given)
            except DivergenceError as error:
                raise DivergenceError(f"client {i}: {error}") from None
            server.stages[stage].clients_s += time.perf_counter() - began
            server.receive(message)
        answers = server.advance()
    return server.finish()
