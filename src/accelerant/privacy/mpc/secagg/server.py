"""The server of secure aggregation: collects the clients' messages stage by stage, and unmasks the sum."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import AccelerantError, ProtocolError
from accelerant.privacy.dp.noise.mechanisms import client_ledger
from accelerant.privacy.mpc.secagg import messages
from accelerant.privacy.mpc.secagg.client import (
    SEALED_BYTES,
    SHARE_BYTES,
    check_statement,
    combined_shares,
    mask_seed,
    survivors_digest,
)
from accelerant.privacy.mpc.secagg.encoding import SignedSeed, mask_sums, wrapped
from accelerant.privacy.mpc.secagg.messages import STAGES, AggregationReader, crypto
from accelerant.runtime.registry import DeviceLike, find_device

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.ledger import LedgerLike
    from accelerant.privacy.mpc.secagg.setup import SecureAggregation


@dataclass(slots=True)
class StageReport:
    """Traffic and time of one stage: bytes to and from the server, seconds of the server and of all clients."""

    bytes_up: int = 0
    bytes_down: int = 0
    server_s: float = 0.0
    clients_s: float = 0.0
    clients: int = 0


@dataclass(frozen=True, slots=True)
class Aggregate:
    """The result of a round.

    Attributes:
        sum: over the survivors, weighted if there are weights, (size,) float64, or the updates' shape.
        weight: sum of the survivors' weights; without weights their number.
        survivors: clients in the sum.
        stages: by name; those of messages.STAGES.
    """

    sum: Tensor
    weight: int
    survivors: tuple[int, ...]
    stages: Mapping[str, StageReport] = field(repr=False)

    @property
    def mean(self) -> Tensor:
        """The weighted mean of the survivors' updates."""
        return self.sum / self.weight


class AggregationServer:
    """The server of one round; `SecureAggregation.server` makes it and documents the arguments.

    `receive` takes the clients' messages of a stage in any order. A message that is not as it must be raises and
    changes nothing: the caller drops it, and the client if it wants. `advance` ends the stage. With fewer clients than
    the threshold it raises ProtocolError, and the round is lost. The server holds no secrets of its own.

    Attributes:
        stage: the current one, a name of messages.STAGES, or "done".
        alive: clients whose message of the last finished stage arrived.
        stages: traffic and time so far.
    """

    def __init__(
        self, setup: SecureAggregation, round_number: int, verification_keys: Sequence[bytes], *,
        ledger: LedgerLike = None, device: DeviceLike = "cpu",
    ) -> None:  # fmt: skip
        self.setup, self.device = setup, torch.device(find_device(device, torch_tensors=True).torch_device)
        self._ledger = ledger
        with client_ledger(ledger):
            pass
        self._number, self._keys = round_number, tuple(map(bytes, verification_keys))
        self._context = setup.context(round_number, self._keys)
        self._stage = messages.ADVERTISE
        self._failed = False
        self.alive: tuple[int, ...] = tuple(range(setup.clients))
        self.stages = {name: StageReport() for name in STAGES}
        self._received: dict[int, Any] = {}
        self._public: dict[int, bytes] = {}  # mask keys of the members
        self._sealed: dict[int, dict[int, bytes]] = {}  # by sender, then receiver, of those that shared
        self._total: Tensor | None = None
        self._survivors: tuple[int, ...] = ()
        self._members = b""  # digest of the members' keys

    def __repr__(self) -> str:
        return f"AggregationServer({self.stage}, {len(self._received)} of {len(self.alive)} messages)"

    @property
    def stage(self) -> str:
        """The current stage."""
        return "failed" if self._failed else STAGES[self._stage] if self._stage < len(STAGES) else "done"

    def bind(self, about: bytes) -> None:
        """Bind the round to a request, as its clients do by `advertise`; ProtocolError after their first message."""
        if self._stage != messages.ADVERTISE or self._received:
            raise ProtocolError("a round is bound to a request before its first message")
        self._context = self.setup.context(self._number, self._keys, about)

    def receive(self, message: bytes) -> int:
        """Take a client's message and return the client.

        Raises FormatError or ProtocolError, and changes nothing, for a message that is malformed, of another stage,
        round or sender, a second one, or one of a client that had left.
        """
        began = time.perf_counter()
        if self.stage not in STAGES:
            raise ProtocolError(f"the round takes no messages: it is {self.stage}")
        sender, body = messages.read_client(message, self._stage, self._context, self._keys)
        if sender not in self.alive or sender in self._received:
            reason = "has sent its message" if sender in self._received else "has left the round"
            raise ProtocolError(f"client {sender} {reason} of stage {self.stage}")
        self._received[sender] = self._taken(sender, body, message)
        report = self.stages[self.stage]
        report.bytes_up += len(message)
        report.clients += 1
        report.server_s += time.perf_counter() - began
        return sender

    def advance(self) -> dict[int, bytes]:
        """End the stage; return the answer for each client whose message arrived, none after the last stage.

        Raises:
            ProtocolError: fewer than threshold messages arrived; the round is lost.
            BudgetExceeded: the ledger's budget does not allow the release; no client was asked to unmask it.
        """
        began = time.perf_counter()
        if self.stage not in STAGES:
            raise ProtocolError(f"no stage to end: the round is {self.stage}")
        name, arrived = self.stage, tuple(sorted(self._received))
        if len(arrived) < self.setup.threshold:
            self._failed = True
            raise ProtocolError(
                f"{len(arrived)} clients sent their message of stage {name}, the threshold is {self.setup.threshold}"
            )
        if self._stage == messages.CONSISTENCY:
            try:
                with client_ledger(self._ledger) as book:
                    if book is not None:
                        book.record(self.setup.encoding.event())
            except BaseException:
                self._failed = True
                raise
        answers = self._answers(arrived)
        self.alive = arrived
        self._stage += 1
        if self._stage < len(STAGES):
            self._received = {}
        packed = {each: messages.pack_message(self._stage, self._context, each, body) for each, body in answers.items()}
        report = self.stages[name]
        report.bytes_down += sum(map(len, packed.values()))
        report.server_s += time.perf_counter() - began
        return packed

    def finish(self) -> Aggregate:
        """Return the sum over the survivors, after the last `advance`.

        Raises ProtocolError if shares are missing or were changed; with exactly as many shares of a seed as needed a
        change by a client that holds one is not seen, and the sum is wrong, as if that client had sent another update.
        """
        began = time.perf_counter()
        if self.stage != "done" or self._total is None:
            raise ProtocolError(f"the sum is known after all stages, this is {self.stage}")
        try:
            seeds = self._revealed()
        except AccelerantError:
            self._failed = True
            raise
        encoding = self.setup.encoding
        mask = mask_sums([seeds], encoding.words, self.device)[0]
        values, weight = encoding.decode(wrapped(self._total - mask))
        self._received, self._sealed, self._total, self._failed = {}, {}, None, True
        self.stages[STAGES[-1]].server_s += time.perf_counter() - began
        survivors = self._survivors
        return Aggregate(values.cpu(), len(survivors) if weight is None else weight, survivors, self.stages)

    def _taken(self, sender: int, body: bytes, message: bytes) -> Any:
        """Return what is kept of a message of the current stage; FormatError or ProtocolError if it is not valid."""
        if self._stage == messages.ADVERTISE:
            if len(body) != 64:
                raise ProtocolError(f"the keys of client {sender} have {len(body)} bytes, not 64")
            return message
        if self._stage == messages.MASK:
            words, stated = self.setup.encoding.words, b""
            if self.setup.neighbours is not None:
                reader = AggregationReader(body, self.setup.clients)
                missing = check_statement(reader, self._context, self._members, sender, self._keys)
                if missing != set(self._sealed[sender]) - set(self.alive):
                    raise ProtocolError(f"client {sender} has not masked its input with those that it was told")
                stated, body = body[: 4 * (len(missing) + 1) + 64], reader.rest()
            if len(body) != 4 * words:
                raise ProtocolError(f"the masked input of client {sender} has {len(body)} bytes, not {4 * words}")
            masked = torch.from_numpy(np.frombuffer(body, "<i4").astype(np.int32)).to(self.device, torch.int64)
            self._total = masked if self._total is None else self._total.add_(masked)
            return stated
        if self._stage == messages.CONSISTENCY:
            if body != survivors_digest(self._survivors, self._members):
                raise ProtocolError(f"client {sender} signed other survivors")
            return message[-64:]
        reader = AggregationReader(body, self.setup.clients)
        if self._stage == messages.SHARE:
            sealed = reader.pieces()
            reader.end()
            if not set(sealed) <= set(self.alive) - {sender} or len(sealed) != self.setup.degree(len(self.alive)):
                raise ProtocolError(f"client {sender} did not draw {self.setup.degree(len(self.alive))} other members")
            if any(len(each) != SEALED_BYTES for each in sealed.values()):
                raise ProtocolError(f"encrypted shares of client {sender} do not have {SEALED_BYTES} bytes")
            return sealed
        seeds, keys = reader.pieces(), reader.pieces()
        reader.end()
        own = {owner for owner, to in self._sealed.items() if sender in to} | {sender}
        alive = set(self._survivors)
        if set(seeds) != own & alive or set(keys) != own - alive:
            raise ProtocolError(f"client {sender} did not reveal the shares that it holds")
        if any(len(share) != SHARE_BYTES for share in (*seeds.values(), *keys.values())):
            raise ProtocolError(f"a share of client {sender} does not have {SHARE_BYTES} bytes")
        return {**seeds, **keys}

    def _answers(self, arrived: tuple[int, ...]) -> dict[int, bytes]:
        """Return the bodies of the answers of the current stage."""
        if self._stage == messages.ADVERTISE:
            self._public = {each: message[-96:-64] for each, message in self._received.items()}
            body = messages.pack_pieces(self._received)
            self._members = hashlib.sha256(body).digest()
        elif self._stage == messages.SHARE:
            self._sealed, answers = self._received, {}
            for each in arrived:
                to = {sender: sealed[each] for sender, sealed in self._sealed.items() if each in sealed}
                drawn = messages.pack_ids(set(self._sealed[each]) & set(arrived))
                answers[each] = drawn + messages.pack_pieces(to)
            return answers
        elif self._stage == messages.MASK:
            self._survivors = arrived
            body = messages.pack_ids(arrived)
            if self.setup.neighbours is not None:
                stated = self._received
                return {
                    each: body + messages.pack_pieces({i: stated[i] for i in arrived if each in self._sealed[i]})
                    for each in arrived
                }
        elif self._stage == messages.CONSISTENCY:
            body = messages.pack_pieces(self._received)
        else:
            return {}
        return dict.fromkeys(arrived, body)

    def _revealed(self) -> list[SignedSeed]:
        """Return the masks in the sum: the survivors' own, and those they have in common with clients that left."""
        survivors = set(self._survivors)
        near = {
            left: [each for each in survivors if each in self._sealed[left] or left in self._sealed[each]]
            for left in sorted(set(self._sealed) - survivors)
        }
        seeds = self._combined(self._survivors)
        keys = self._combined([left for left, others in near.items() if others])
        masks: list[SignedSeed] = [(seed, 1) for seed in seeds.values()]
        for left, secret in keys.items():
            key = crypto("asymmetric.x25519").X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != self._public[left]:
                raise ProtocolError(f"the shares of client {left}'s key were changed: they do not give its public key")
            for each in near[left]:
                seed, sign = mask_seed(key, self._public[each], self._context, left, each)
                masks.append((seed, -sign))
        return masks

    def _combined(self, owners: Sequence[int]) -> dict[int, bytes]:
        """Return the secrets of clients, those with shares at the same indices together."""
        groups: dict[tuple[tuple[int, ...], int], list[tuple[int, list[bytes]]]] = {}
        for owner in owners:
            holders = sorted((*self._sealed[owner], owner))
            present = [i for i, holder in enumerate(holders) if owner in self._received.get(holder, ())]
            needed = self.setup.shares_needed(len(holders) - 1)
            if len(present) < needed:
                raise ProtocolError(f"{len(present)} of {needed} shares of client {owner}'s secret arrived")
            shares = [self._received[holders[i]][owner] for i in present]
            groups.setdefault((tuple(i + 1 for i in present), len(holders)), []).append((owner, shares))
        secrets: dict[int, bytes] = {}
        for (indices, count), members in groups.items():
            names = [owner for owner, _ in members]
            columns = list(zip(*(shares for _, shares in members), strict=True))
            try:
                found = combined_shares(columns, indices, self.setup.shares_needed(count - 1), count)
            except AccelerantError as error:
                listed = ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5)
                raise ProtocolError(f"shares of the secrets of clients {listed} do not fit together: {error}") from None
            secrets.update(zip(names, found, strict=True))
        return secrets
