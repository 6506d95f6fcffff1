"""Secure aggregation on Flower (flwr 1.41 or newer, the Message API): a client mod and a round of the ServerApp.

    app = ClientApp(mods=[flower.secure_aggregation_mod(make_client)])        # train() as without the mod
    arrays, report = flower.secure_round(grid, setup.server(number, keys), number, arrays)      # in the ServerApp

The five stages are messages of type "train" with a ConfigRecord "secagg". Only that of the mask stage reaches the app's
train function: the difference between its arrays and those it got is the update. A SuperNode runs each message in a
process of its own, so the client waits in a file between them (`Client.suspend`).

The first message of a round has the digest of everything that the server will send in the mask stage, so a server
cannot give some clients another model and read the others' updates in the sum (Pasquini et al. 2022, CCS 2022, "Eluding
secure aggregation in federated learning via model inconsistency").
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from accelerant._renamed import renamed_arguments
from accelerant.errors import ConfigError, FormatError, MissingDependency, ProtocolError, ShapeError, UnsupportedDtype
from accelerant.privacy.mpc.secagg.messages import STAGES
from accelerant.runtime.files import clipped

if TYPE_CHECKING:
    from accelerant.privacy.mpc.secagg.protocol import Aggregate, AggregationClient, AggregationServer

__all__ = ["secure_aggregation_mod", "secure_round"]

_log = logging.getLogger(__name__)

_NAMED = 5  # nodes in the error of a round


def secure_aggregation_mod(make_client: Callable[[Any], AggregationClient], *, weights: str | None = None) -> Any:
    """Return a mod that sends the update of the app's train function masked.

    A train function that returns other arrays than it got, or integers, raises ShapeError or UnsupportedDtype on the
    node, which then leaves the round.

    Args:
        make_client: returns the client of a flwr Context: SecureAggregation.client(..., state_path=...). Identity and
            keys come from the node's own configuration, never from the server's message.
        weights: name of a whole number in the reply's MetricRecord, such as "num-examples"; None: each weighs 1.
    """
    flwr = _flwr()

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        asked = message.content.config_records.get("secagg")
        if asked is None:
            raise ProtocolError("the message is not of secure aggregation: this client sends nothing else")
        stage, answer, stated = asked["stage"], asked["answer"], {}
        client = make_client(context)
        if stage == STAGES[0]:
            sent = client.advertise(asked["round"], asked["about"])
        else:
            client.resume()
            if stage == "share":
                sent = client.share_keys(answer)
            elif stage == "mask":
                about, given = _digest(message), _arrays(message, "the server's message")
                reply = call_next(message, context)
                returned = _arrays(reply, "the train function's reply")
                stated["arrays"] = _form(given)
                _check_form(_form(returned), stated["arrays"])
                weight = 1 if weights is None else _weight(reply, weights)
                sent = client.masked_input(answer, _flat(returned) - _flat(given), weight, about)
            elif stage in STAGES[3:]:
                sent = client.consistency(answer) if stage == STAGES[3] else client.unmask(answer)
            else:
                raise ProtocolError("there is no such stage of secure aggregation")
        if stage != STAGES[-1]:
            client.suspend()
        record = flwr.ConfigRecord({"message": sent, **stated})
        return flwr.Message(flwr.RecordDict({"secagg": record}), reply_to=message)

    return mod


@renamed_arguments(timeout_s="timeout")
def secure_round(
    grid: Any, server: AggregationServer, round_number: int, arrays: Any, *, config: Any = None, timeout: float = 600.0
) -> tuple[Any, Aggregate]:
    """Run a round on all nodes of a flwr Grid; return the arrays with the mean update added, and the round's report.

    Args:
        server: of SecureAggregation, for this round number.
        arrays: ArrayRecord of floating-point arrays that the clients train from; size of the setup in all.
        config: ConfigRecord for the app's train function.
        timeout: for the replies of each stage; nodes that are later, or whose app raises, have left the round.

    Returns:
        ArrayRecord with the names, shapes and dtypes of `arrays`, and the report.

    Raises:
        ConfigError: the arrays do not have the setup's size.
        UnsupportedDtype: an array is not of floating-point numbers, such as a counter of batches: leave it out.
        ProtocolError: fewer nodes than the threshold are connected or stayed; it names those that left, with their
            errors. The arrays are unchanged.
    """
    flwr = _flwr()
    old = _floats(arrays, "the ArrayRecord")
    form, size = _form(old), sum(each.size for each in old.values())
    if size != server.setup.size:
        raise ConfigError(f"the arrays have {size} elements, the setup {server.setup.size}")
    answers, setup = dict.fromkeys(grid.get_node_ids(), b""), server.setup
    if len(answers) < setup.threshold:
        raise ProtocolError(
            f"{len(answers)} nodes are connected, and the threshold is {setup.threshold} of {setup.clients} clients: "
            "start SuperNodes, and wait until grid.get_node_ids() has them"
        )
    left: list[str] = []
    asked = {"arrays": arrays} if config is None else {"arrays": arrays, "config": config}
    about = _digest(flwr.Message(flwr.RecordDict(asked), 0, "train"))
    server.bind(about)
    for stage in STAGES:
        requests = []
        for node, answer in answers.items():
            values = {"stage": stage, "round": round_number, "answer": answer, "about": about}
            content = flwr.RecordDict({"secagg": flwr.ConfigRecord(values), **(asked if stage == "mask" else {})})
            requests.append(flwr.Message(content, node, "train", group_id=str(round_number)))
        node_of: dict[int, int] = {}
        silent = set(answers)
        for reply in grid.send_and_receive(requests, timeout=timeout):
            node = reply.metadata.src_node_id
            silent.discard(node)
            try:
                if reply.has_error():
                    raise ProtocolError(f"its app failed: {reply.error.reason}")
                record = reply.content["secagg"]
                if stage == "mask":
                    stated = record["arrays"]
                    _check_form(list(map(str, stated)) if isinstance(stated, list) else [], form)
                node_of[server.receive(record["message"])] = node
            except (ProtocolError, FormatError, ShapeError, UnsupportedDtype, KeyError) as error:
                left.append(f"node {node} in stage {stage}: {clipped(str(error), 300)}")
                _log.warning("round %s without %s", round_number, left[-1])
        left += [f"node {node} in stage {stage}: no reply in {timeout:g} s" for node in sorted(silent)]
        try:
            answers = {node_of[client]: answer for client, answer in server.advance().items()}
        except ProtocolError as error:
            more = f", and {len(left) - _NAMED} more" * (len(left) > _NAMED)
            raise ProtocolError(f"{error}; {'; '.join(left[:_NAMED])}{more}" if left else str(error)) from None
    result = server.finish()
    mean, new = result.mean.numpy(), {}
    for name, each in old.items():
        new[name] = flwr.Array(np.asarray(each + mean[: each.size].reshape(each.shape), each.dtype))
        mean = mean[each.size :]
    return flwr.ArrayRecord(new), result


def _flwr() -> Any:
    try:
        import flwr.app
    except ImportError:
        raise MissingDependency("flwr", "federated", "federated learning on Flower") from None
    return flwr.app


def _digest(message: Any) -> bytes:
    """Return the digest of what a message asks a client for: its type and its records but for "secagg"."""
    content, digest = message.content, hashlib.sha256(repr(message.metadata.message_type).encode())
    for name, arrays in sorted(content.array_records.items()):
        for key, array in arrays.items():
            data = hashlib.sha256(array.data).digest()
            digest.update(repr((name, key, array.dtype, tuple(array.shape), array.stype, data)).encode())
    for records in (content.config_records, content.metric_records):
        others = [(name, sorted(record.items())) for name, record in sorted(records.items()) if name != "secagg"]
        digest.update(repr(others).encode())
    return digest.digest()


def _arrays(message: Any, what: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of a message's one ArrayRecord by name, or raise ShapeError or UnsupportedDtype."""
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ShapeError(f"{what} must have one ArrayRecord, got {len(records)}")
    return _floats(records[0], what)


def _floats(record: Any, what: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an ArrayRecord by name; UnsupportedDtype unless they are floating-point numbers."""
    found = {}
    for name, array in record.items():
        if array.stype != "numpy.ndarray":
            raise UnsupportedDtype(f"array {name!r} of {what} must be of NumPy, got {array.stype}")
        found[name] = array.numpy()
        if found[name].dtype.kind != "f":
            raise UnsupportedDtype(
                f"array {name!r} of {what} is {found[name].dtype}: means are of floating-point arrays. Leave it "
                "out, or convert it to float32"
            )
    return found


def _form(arrays: Mapping[str, NDArray[Any]]) -> list[str]:
    return [f"{name!r} {each.shape} {each.dtype}" for name, each in arrays.items()]


def _check_form(returned: list[str], given: list[str]) -> None:
    """Raise ShapeError or UnsupportedDtype unless arrays have the number, order, names, shapes and dtypes of others."""
    if len(returned) != len(given):
        raise ShapeError(f"the train function must return the {len(given)} arrays that it got, got {len(returned)}")
    for i, (found, wanted) in enumerate(zip(returned, given, strict=True)):
        if found != wanted:
            error = UnsupportedDtype if found.rpartition(" ")[0] == wanted.rpartition(" ")[0] else ShapeError
            raise error(f"the train function must return array {i} as it got it, {wanted}, got {found}")


def _weight(reply: Any, name: str) -> int:
    """Return a whole number of a reply's metrics, or raise ConfigError."""
    metrics = [record[name] for record in reply.content.metric_records.values() if name in record]
    if len(metrics) != 1 or int(metrics[0]) != metrics[0]:
        raise ConfigError(
            f"the train function's reply must have one whole number {name!r} in its metrics, got {metrics}"
        )
    return int(metrics[0])


def _flat(arrays: Mapping[str, NDArray[Any]]) -> torch.Tensor:
    parts = [each.astype(np.float64).reshape(-1) for each in arrays.values()]
    return torch.from_numpy(np.concatenate(parts or [np.zeros(0)]))
