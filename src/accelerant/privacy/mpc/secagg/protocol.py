"""The parties of secure aggregation: settings of which thresholds and graphs are safe, client, and server.

Protocol. Bonawitz et al. 2017, figure 4, with the parts for a malicious server. Deviations: every message is signed,
not only keys and survivors; each of a pair's four keys (two directions of shares, the mask) is derived by HKDF-SHA256
with the round's context and both numbers, and used once.

docs/secure-computation.md says why thresholds and sparse graphs that the settings accept are safe.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from accelerant._renamed import renamed_arguments
from accelerant.errors import AccelerantError, ConfigError, ProtocolError, ShapeError
from accelerant.privacy.dp.ledger import LedgerLike, absolute_ledger
from accelerant.privacy.dp.ledger.accounting import check_number, check_whole
from accelerant.privacy.dp.noise.mechanisms import client_ledger
from accelerant.privacy.mpc import shamir
from accelerant.privacy.mpc.secagg import messages
from accelerant.privacy.mpc.secagg.encoding import Encoding, SignedSeed, make_encoding, mask_sums, wrapped
from accelerant.privacy.random import renewed_after_fork
from accelerant.runtime.files import read_regular, temporary_path, write_atomic
from accelerant.runtime.registry import DeviceLike, find_device

SECURITY: Final = -40.0  # log2 of the probability that a sparse graph fails
_MOST_CLIENTS = 65_535
_MOST_SIZE = 1 << 31
_Step = TypeVar("_Step", bound=Callable[..., bytes])


@renamed_arguments(clip="max_abs")
@dataclass(frozen=True)
class SecureAggregation:
    """The settings that all parties of secure aggregation share, and the constructor of each party.

        setup = mpc.SecureAggregation(clients=10, threshold=7, size=len(update), max_abs=1.0)
        client = setup.client(3, signing_key, verification_keys)         # in each client's process
        server = setup.server(round_number, verification_keys)           # once per round

    Five times a message goes from each client to the server, `server.receive` takes it, and `server.advance` returns
    the answers, by client; `client.advertise`, `share_keys`, `masked_input`, `consistency` and `unmask` take an answer
    and return the next message. `server.finish` then returns the sum over the clients whose masked input arrived.

    Args:
        clients: n, at most 65,535.
        threshold: t, the least number of clients that must stay to the end.
        size: elements of an update.
        max_abs: largest magnitude of an element; larger ones are clipped to it. Given max_norm, that norm by default.
        max_norm: L2 norm to which an update is scaled down; required with noise.
        noise_multiplier: standard deviation of the noise in the sum over its sensitivity, where only the fewest honest
            clients stay that the settings allow (Encoding.least); more add more. 0: none.
        step: a power of two of which values are rounded to multiples; by default the finest that the sum has room for.
        max_weight: clients may have whole weights from 1 to this; 1 for plain sums, and with noise.
        colluders: c, the largest number of clients that work together with the server, or leave out their noise.
        neighbours: k of the sparse graph; "auto" for about the least safe one; None: every pair of clients has a mask.
            Each client needs t_k of k + 1 holders to stay, so larger k let rounds succeed with more dropouts.

    Raises:
        ConfigError: a number out of range; 2 threshold <= clients + colluders; a graph that is not safe; sums that
            may exceed 2^31 steps.

    Trust: the server may be malicious, with up to `colluders` clients. Verification keys are authentic (a PKI). The
    server learns the sum over the survivors of the mask stage, who takes part, and when they leave. Colluders may send
    any values: nothing here stops poisoning, or hides what the sum itself tells (noise_multiplier does). A server that
    asks clients for different things, such as updates of different models, can make all but one of them send zeros:
    `about` of AggregationClient.advertise binds a round to one request (Pasquini et al. 2022, CCS 2022, "Eluding secure
    aggregation in federated learning via model inconsistency"). Who reads a noisy sum and is a client knows its own
    noise: count it as a colluder. Sums are mod 2^32. Not audited.
    """

    clients: int
    threshold: int
    size: int
    _: KW_ONLY
    max_abs: float | None = None
    max_norm: float | None = None
    noise_multiplier: float = 0.0
    step: float | None = None
    max_weight: int = 1
    colluders: int = 0
    neighbours: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        for name, least, most in (
            ("clients", 2, _MOST_CLIENTS), ("threshold", 1, self.clients), ("size", 1, _MOST_SIZE),
            ("max_weight", 1, 2**20), ("colluders", 0, self.clients - 1),
        ):  # fmt: skip
            if check_whole(name, getattr(self, name), least) > most:
                raise ConfigError(f"{name} must be {least} to {most}, got {getattr(self, name)}")
        if 2 * self.threshold <= self.clients + self.colluders:
            raise ConfigError(
                f"threshold must be above (clients + colluders) / 2 = {(self.clients + self.colluders) / 2:g}, got "
                f"{self.threshold}: a malicious server could unmask with two lists of survivors"
            )
        if self.neighbours == "auto":
            object.__setattr__(self, "neighbours", least_neighbours(self.clients, self.threshold, self.colluders))
        elif self.neighbours is not None:
            k = check_whole("neighbours", self.neighbours, 1)
            failure = failure_log2(self.clients, self.clients, self.threshold, self.colluders, k)
            if failure > SECURITY:
                raise ConfigError(
                    f"neighbours must be at least {least_neighbours(self.clients, self.threshold, self.colluders)} for "
                    f"{self.clients} clients, threshold {self.threshold} and {self.colluders} colluders, got {k}: the "
                    f"server may isolate clients with probability 2^{failure:.0f}"
                )
        for name in ("max_abs", "max_norm", "step"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, check_number(name, getattr(self, name)))
        check_number("noise_multiplier", self.noise_multiplier, open_below=False)
        _ = self.encoding

    @functools.cached_property
    def encoding(self) -> Encoding:
        """The map between updates and integers modulo 2^32."""
        honest = self.threshold - self.colluders
        fails = 0.0 if self.neighbours is None else 2.0**SECURITY
        return make_encoding(
            self.clients, honest // 2 + 1 if fails else honest, fails, self.size, self.max_abs, self.max_norm,
            self.noise_multiplier, self.step, self.max_weight,
        )  # fmt: skip

    def degree(self, members: int) -> int:
        """Return the number of others among which each of so many clients splits its secrets."""
        return members - 1 if self.neighbours is None else min(int(self.neighbours), members - 1)

    def shares_needed(self, degree: int) -> int:
        """Return how many shares reconstruct a secret that is split among so many others and its owner."""
        return local_threshold(self.clients, self.threshold, degree) if self.neighbours else self.threshold

    def is_safe(self, members: int) -> bool:
        """Return whether the graph is safe for so many members of a round."""
        found = failure_log2(self.clients, members, self.threshold, self.colluders, self.degree(members))
        return found <= SECURITY

    def client(
        self, identity: int, signing_key: Any, verification_keys: Sequence[bytes], *,
        state_path: str | Path | None = None, ledger: LedgerLike = None, device: DeviceLike = "cpu",
    ) -> AggregationClient:  # fmt: skip
        """Return a client, which takes part in one round after another.

        Args:
            identity: its number, from 0.
            signing_key: Ed25519PrivateKey of the package cryptography.
            verification_keys: of all clients by number, 32 bytes each; authentic.
            state_path: file that keeps the last round's number, so that no round is repeated after a restart.
            ledger: a PrivacyLedger, or its file, of this client's own data: records each round before the masked
                update is sent, so that its budget ends the rounds whatever a server does. Those that fail later
                count as well.
            device: of the masks.
        """
        return AggregationClient(
            self, identity, signing_key, verification_keys, state_path=state_path, ledger=ledger, device=device
        )

    def server(
        self, round_number: int, verification_keys: Sequence[bytes], *, ledger: LedgerLike = None,
        device: DeviceLike = "cpu",
    ) -> AggregationServer:  # fmt: skip
        """Return the server of one round.

        Args:
            round_number: above those of all earlier rounds, below 2^63.
            verification_keys: as for `client`.
            ledger: a PrivacyLedger or its file: records the release before clients unmask it; its unit is what one
                client contributes.
            device: of the sum.
        """
        return AggregationServer(self, round_number, verification_keys, ledger=ledger, device=device)

    def context(self, round_number: int, verification_keys: Sequence[bytes], about: bytes = b"") -> bytes:
        """Return the digest of settings, round, keys and `about`, 32 bytes, that each message carries.

        Raises ShapeError unless there is a key of 32 bytes for each client, and ConfigError for a round out of range.
        """
        check_whole("round_number", round_number, 0)
        if len(verification_keys) != self.clients or any(len(key) != 32 for key in verification_keys):
            raise ShapeError(f"wanted {self.clients} verification keys of 32 bytes, got {len(verification_keys)}")
        text = json.dumps([round_number, asdict(self), hashlib.sha256(about).hexdigest()], sort_keys=True).encode()
        return hashlib.sha256(b"".join((b"AcSA1", *map(bytes, verification_keys), text))).digest()


def make_identities(clients: int) -> tuple[list[Any], list[bytes]]:
    """Return fresh signing keys and verification keys, where one process simulates all clients."""
    signing = [messages.crypto("asymmetric.ed25519").Ed25519PrivateKey.generate() for _ in range(clients)]
    return signing, [key.public_key().public_bytes_raw() for key in signing]


def local_threshold(clients: int, threshold: int, degree: int) -> int:
    """Return t_k, the shares of degree + 1 that reconstruct a secret; the threshold itself where every pair masks."""
    return min(degree + 1, max(1, -(-(degree + 1) * threshold // clients)))


@functools.lru_cache(maxsize=256)
def failure_log2(clients: int, members: int, threshold: int, colluders: int, k: int) -> float:
    """Return log2 of the bound in docs/secure-computation.md, for a round's members; minus infinity where it is 0."""
    k = min(k, members - 1)
    if k == members - 1:
        return -math.inf if 2 * threshold > members + colluders else 0.0
    logs = np.append(0.0, np.cumsum(np.log(np.arange(1.0, members + 1))))  # of factorials

    def choose(n: int, r: NDArray[Any] | int) -> Any:
        return logs[n] - logs[r] - logs[n - r]

    total, needed = members - 1, local_threshold(clients, threshold, k) - 1
    terms = []
    for s in range(1, (members - colluders) // 2 + 1):
        marked = s - 1 + colluders
        counted = np.arange(max(needed, k - (total - marked), 0), min(k, marked) + 1)
        if counted.size:
            tail = np.logaddexp.reduce(choose(marked, counted) + choose(total - marked, k - counted)) - choose(total, k)
            terms.append(choose(members - colluders, s) + s * min(0.0, float(tail)))
    return float(np.logaddexp.reduce(terms)) / math.log(2) if terms else -math.inf


@functools.lru_cache(maxsize=64)
def least_neighbours(clients: int, threshold: int, colluders: int) -> int:
    """Return a safe k, found by bisection: one less is not safe, or is safe only by the rounding of t_k."""
    unsafe, safe = 0, clients - 1
    while safe - unsafe > 1:
        middle = (unsafe + safe) // 2
        if failure_log2(clients, clients, threshold, colluders, middle) <= SECURITY:
            safe = middle
        else:
            unsafe = middle
    return safe


# --- the client ------------------------------------------------------------------------------------------------------
class _Round:
    """A client's state in a round; most of it is secret."""

    def __init__(self, context: bytes) -> None:
        x25519 = messages.crypto("asymmetric.x25519").X25519PrivateKey
        self.context, self.stage = context, messages.ADVERTISE
        self.members = bytes(32)  # digest of the members' keys
        self.share_key, self.mask_key = x25519.generate(), x25519.generate()
        self.seed = os.urandom(32)
        self.keys: dict[int, tuple[bytes, bytes]] = {}  # of the members: share and mask key
        self.drawn: tuple[int, ...] = ()  # those that hold this client's shares, without itself
        self.held: dict[int, tuple[bytes, bytes]] = {}  # shares of seed and mask key, by their owner
        self.masked: frozenset[int] = frozenset()
        self.survivors: tuple[int, ...] = ()

    def aead(self, other: int, sender: int, receiver: int) -> Any:
        key = messages.derived(self.share_key, self.keys[other][0], self.context, b"shares", sender, receiver)
        return messages.crypto("ciphers.aead").ChaCha20Poly1305(key)


def _step(method: _Step) -> _Step:
    """Abort the client if a step fails: its secrets of the round are forgotten, and the round is not resumed."""

    @functools.wraps(method)
    def step(self: AggregationClient, *args: Any, **kwargs: Any) -> bytes:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._round = None
            raise

    return cast("_Step", step)


class AggregationClient:
    """A participant of secure aggregation; `SecureAggregation.client` makes it and documents the arguments.

    Each method takes the server's answer to the message before, and returns the next message. Any error, a
    ProtocolError or FormatError for a message that is not as it must be, aborts the round: the round's secrets are
    dropped (Python may leave copies in freed memory), and the client waits for a round of a higher number. It reveals
    either its shares of a client's seed or those of its key, once, for survivors that `threshold` clients signed.

    Keys are in memory only; neither repr nor errors show them. Not audited.
    """

    def __init__(
        self, setup: SecureAggregation, identity: int, signing_key: Any, verification_keys: Sequence[bytes], *,
        state_path: str | Path | None = None, ledger: LedgerLike = None, device: DeviceLike = "cpu",
    ) -> None:  # fmt: skip
        setup.context(0, verification_keys)
        if not 0 <= identity < setup.clients:
            raise ConfigError(f"identity must be 0 to {setup.clients - 1}, got {identity}")
        if not hasattr(signing_key, "public_key"):  # never shown: it may be the secret in another form
            raise ConfigError(
                f"signing_key must be an Ed25519PrivateKey, got {type(signing_key).__name__}: "
                "Ed25519PrivateKey.from_private_bytes reads 32 bytes"
            )
        if signing_key.public_key().public_bytes_raw() != verification_keys[identity]:
            raise ConfigError(f"the signing key is not that of client {identity}'s verification key")
        self.setup, self.identity = setup, identity
        self.device = torch.device(find_device(device, torch_tensors=True).torch_device)
        self._sign, self._verification_keys = signing_key.sign, tuple(map(bytes, verification_keys))
        self._path = None if state_path is None else Path(state_path)
        self._ledger = absolute_ledger(ledger)
        with client_ledger(ledger):
            pass
        self._round: _Round | None = None
        self.last_round = -1
        if self._path is not None and self._path.exists():
            text = read_regular(self._path, 32)
            if not text.strip().isdigit():
                raise ConfigError(f"{self._path} does not hold the number of the last round")
            self.last_round = int(text)
        renewed_after_fork.add(self)

    def _renew(self) -> None:
        """Drop the round in a fork of the process: with its parent it would reveal both secrets of a client."""
        self._round = None

    def __repr__(self) -> str:
        stage = "no round" if self._round is None else messages.STAGES[self._round.stage]
        return f"AggregationClient({self.identity} of {self.setup.clients}, round {self.last_round}, {stage})"

    def __reduce__(self) -> Any:
        raise ConfigError("a client of secure aggregation is not copied: two of them would reveal both of its secrets")

    @_step
    def advertise(self, round_number: int, about: bytes = b"") -> bytes:
        """Begin a round and return the first message; ProtocolError if its number is not above the last one's.

        Args:
            about: what the server asks for, or a digest of it, such as of the model to train. Clients that were told
                something else do not take part in the same round. The server's is `AggregationServer.bind`.
        """
        self._round = None
        context = self.setup.context(round_number, self._verification_keys, about)
        if round_number <= self.last_round:
            raise ProtocolError(f"round {round_number} is not above the last one, {self.last_round}: none is repeated")
        if self._path is not None:
            write_atomic(self._path, str(round_number).encode())
            self._suspended.unlink(missing_ok=True)  # secrets of a round that was abandoned
        self.last_round, self._round = round_number, _Round(context)
        keys = self._round.share_key, self._round.mask_key
        return self._message(b"".join(key.public_key().public_bytes_raw() for key in keys))

    @_step
    def share_keys(self, answer: bytes) -> bytes:
        """Split this client's secrets among those that it draws from the members."""
        state, body = self._next(answer, messages.SHARE)
        members = body.pieces()
        body.end()
        self._check_enough(members, "members")
        for each, message in members.items():
            sender, own = messages.read_client(message, messages.ADVERTISE, state.context, self._verification_keys)
            if sender != each or len(own) != 64:
                raise ProtocolError(f"the keys of client {each} are not its own")
            state.keys[each] = own[:32], own[32:]
        mine = tuple(key.public_key().public_bytes_raw() for key in (state.share_key, state.mask_key))
        if state.keys.get(self.identity) != mine:
            raise ProtocolError("the members' keys do not have this client's own")
        if len({key for pair in state.keys.values() for key in pair}) < 2 * len(members):
            raise ProtocolError("two clients, or one twice, have the same key")
        state.members = hashlib.sha256(messages.pack_pieces(members)).digest()
        setup = self.setup
        others = sorted(set(members) - {self.identity})
        degree = setup.degree(len(members))
        if not setup.is_safe(len(members)):
            raise ProtocolError(f"a graph of {degree} neighbours is not safe with {len(members)} members only")
        state.drawn = tuple(sorted(random.SystemRandom().sample(others, degree)))
        holders = sorted((*state.drawn, self.identity))
        threshold = setup.shares_needed(degree)
        padding = bytes(messages.SECRET_BYTES - 32)  # elements of seed and of key: one split, shares of each
        both = b"".join((state.seed, padding, state.mask_key.private_bytes_raw(), padding))
        sealed = {}
        for holder, share in zip(holders, shamir.split(both, threshold=threshold, count=len(holders)), strict=True):
            words = share.words.numpy().astype("<u8", copy=False).tobytes()
            if holder == self.identity:
                state.held[holder] = words[: messages.SHARE_BYTES], words[messages.SHARE_BYTES :]
            else:
                sealed[holder] = state.aead(holder, self.identity, holder).encrypt(bytes(12), words, None)
        return self._message(messages.pack_pieces(sealed))

    @_step
    def masked_input(self, answer: bytes, update: Any, weight: int = 1, about: bytes = b"") -> bytes:
        """Return the message with the update, clipped, rounded, with noise and masked.

        Args:
            answer: of the server to `share_keys`.
            update: tensor or array of setup.size real numbers, in any shape.
            weight: of the update in the sum, 1 to setup.max_weight.
            about: the request that the update answers, as it was given to `advertise`.

        Raises:
            ProtocolError, FormatError: as for every step; another request than that of `advertise`.
            ShapeError, UnsupportedDtype, UnsupportedCase, ConfigError, DivergenceError: update or weight is not valid;
                the round is aborted as well.
            BudgetExceeded: this client's ledger allows no further round; nothing is sent, and the round is aborted.
        """
        state, body = self._next(answer, messages.MASK)
        if self.setup.context(self.last_round, self._verification_keys, about) != state.context:
            raise ProtocolError("the request is not the one that this round was begun for")
        listed, received = body.ids(), body.pieces()
        body.end()
        if not set(listed) <= set(state.drawn) or not set(received) <= set(state.keys) - {self.identity}:
            raise ProtocolError("the server lists clients that this client did not draw, or that are no members")
        if self.setup.neighbours is None:
            listed = tuple(received)
            self._check_enough({*received, self.identity}, "members that shared their keys")
        for sender, ciphertext in received.items():
            state.held[sender] = self._opened(sender, ciphertext)
        state.masked = frozenset((*listed, *received))
        seeds = [
            messages.mask_seed(state.mask_key, state.keys[other][1], state.context, self.identity, other)
            for other in state.masked
        ]
        encoding = self.setup.encoding
        value = encoding.encode(update, weight, self.device)
        with client_ledger(self._ledger) as book:
            if book is not None:
                book.record(encoding.event())
        mask = mask_sums([[(state.seed, 1), *seeds]], encoding.words, self.device)[0]
        masked = wrapped(value.to(torch.int64) + mask).cpu().numpy().astype("<i4", copy=False)
        stated = b""
        if self.setup.neighbours is not None:
            stated = messages.pack_ids(set(state.drawn) - state.masked)
            stated += self._sign(messages.statement(state.context, state.members, self.identity, stated))
        return self._message(stated + np.ascontiguousarray(masked).tobytes())

    @_step
    def consistency(self, answer: bytes) -> bytes:
        """Sign the survivors that the server states."""
        state, body = self._next(answer, messages.CONSISTENCY)
        survivors = body.ids()
        statements = {} if self.setup.neighbours is None else body.pieces()
        body.end()
        self._check_enough(survivors, "survivors")
        if self.identity not in survivors or not set(survivors) <= set(state.keys):
            raise ProtocolError("the survivors lack this client, or have one that is no member")
        near = {each for each in state.drawn if each in survivors}
        if not near <= state.masked:
            raise ProtocolError("the server said of a survivor that it had left, so no mask with it was added")
        if len(near) + 1 < self.setup.shares_needed(len(state.drawn)):
            raise ProtocolError("too few of those that hold this client's shares are survivors")
        if self.setup.neighbours is not None:
            if set(statements) != (set(state.held) & set(survivors)) - {self.identity}:
                raise ProtocolError("the server has not passed on what survivors state of their masks")
            for owner, statement in statements.items():
                reader = messages.AggregationReader(statement, self.setup.clients)
                missing = messages.check_statement(reader, state.context, state.members, owner, self._verification_keys)
                reader.end()
                if not missing.isdisjoint(survivors):
                    raise ProtocolError(f"client {owner} was told of a survivor that it had left, so masks are missing")
        state.survivors = survivors
        return self._message(messages.survivors_digest(survivors, state.members))

    @_step
    def unmask(self, answer: bytes) -> bytes:
        """End the round with this client's shares: of survivors' seeds, of the keys of those that left; never both."""
        state, body = self._next(answer, messages.UNMASK)
        signatures = body.pieces()
        body.end()
        self._check_enough(signatures, "signatures of the survivors")
        if not set(signatures) <= set(state.survivors):
            raise ProtocolError("a signature of one that is no survivor")
        digest = messages.survivors_digest(state.survivors, state.members)
        for each, signature in signatures.items():
            signed = messages.pack_message(messages.CONSISTENCY, state.context, each, digest)
            messages.check_signature(self._verification_keys, each, signed, signature)
        alive = set(state.survivors)
        seeds = {owner: shares[0] for owner, shares in state.held.items() if owner in alive}
        keys = {owner: shares[1] for owner, shares in state.held.items() if owner not in alive}
        message = self._message(messages.pack_pieces(seeds) + messages.pack_pieces(keys))
        self._round = None
        return message

    def suspend(self) -> None:
        """Write the round's secrets to a file beside state_path, mode 0600, for `resume` in another process."""
        state = self._round
        if state is None or self._path is None:
            raise ConfigError("suspending needs a round and a state_path")
        keys = state.share_key.private_bytes_raw() + state.mask_key.private_bytes_raw()
        parts = [state.context, state.members, bytes([state.stage]), keys, state.seed]
        parts += [messages.pack_ids(ids) for ids in (state.drawn, state.masked, state.survivors)]
        parts += [messages.pack_pieces({i: b"".join(pair) for i, pair in d.items()}) for d in (state.keys, state.held)]
        path = temporary_path(self._path)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(b"".join(parts))
        os.replace(path, self._suspended)
        self._round = None

    @_step
    def resume(self) -> bytes:
        """Take the round that was suspended, and remove the file: of two processes one gets it, the other an error."""
        if self._path is None:
            raise ConfigError("resuming needs a state_path")
        path = temporary_path(self._path)
        try:
            os.rename(self._suspended, path)
        except FileNotFoundError:
            raise ProtocolError(f"client {self.identity} has no suspended round, or another process took it") from None
        try:
            body = messages.AggregationReader(read_regular(path), self.setup.clients)
        finally:
            path.unlink()
        self._round = state = _Round(body.take(32))
        state.members = body.take(32)
        state.stage = body.take(1)[0]
        x25519 = messages.crypto("asymmetric.x25519").X25519PrivateKey
        state.share_key, state.mask_key = (x25519.from_private_bytes(body.take(32)) for _ in range(2))
        state.seed, state.drawn = body.take(32), body.ids()
        state.masked, state.survivors = frozenset(body.ids()), body.ids()
        state.keys, state.held = (
            {i: (pair[: len(pair) // 2], pair[len(pair) // 2 :]) for i, pair in body.pieces().items()} for _ in range(2)
        )
        return b""

    @property
    def _suspended(self) -> Path:
        assert self._path is not None  # for the type checker: asked where a state_path was given
        return self._path.with_name(self._path.name + ".round")

    def _next(self, answer: bytes, stage: int) -> tuple[_Round, messages.AggregationReader]:
        state = self._round
        if state is None:
            raise ProtocolError(f"client {self.identity} is in no round: it was aborted, has ended, or not begun")
        if state.stage != stage - 1:
            raise ProtocolError(f"after stage {messages.STAGES[state.stage]} comes not {messages.STAGES[stage]}")
        body = messages.read_server(answer, stage, state.context, self.identity)
        state.stage = stage
        return state, messages.AggregationReader(body, self.setup.clients)

    def _message(self, body: bytes) -> bytes:
        assert self._round is not None  # for the type checker: every stage begins or resumes a round first
        return messages.pack_signed(self._round.stage, self._round.context, self.identity, body, self._sign)

    def _check_enough(self, found: Sequence[int] | Mapping[int, Any] | set[int], what: str) -> None:
        if len(found) < self.setup.threshold:
            raise ProtocolError(f"{len(found)} {what}, the threshold is {self.setup.threshold}")

    def _opened(self, sender: int, ciphertext: bytes) -> tuple[bytes, bytes]:
        """Return the shares that a client sent. Each key encrypts one message, so the nonce is 0."""
        from cryptography.exceptions import InvalidTag

        assert self._round is not None  # for the type checker: every stage begins or resumes a round first
        try:
            text = self._round.aead(sender, sender, self.identity).decrypt(bytes(12), ciphertext, None)
        except InvalidTag:
            raise ProtocolError(f"the shares of client {sender} were changed, or are not for this client") from None
        if len(text) != 2 * messages.SHARE_BYTES:
            raise ProtocolError(f"the shares of client {sender} have {len(text)} bytes, not {2 * messages.SHARE_BYTES}")
        return text[: messages.SHARE_BYTES], text[messages.SHARE_BYTES :]


# --- the server ------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class StageReport:
    """Traffic and time of one stage: bytes to and from the server, seconds of the server and of all clients."""

    bytes_up: int = 0
    bytes_down: int = 0
    server_s: float = 0.0
    clients_s: float = 0.0
    clients: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Aggregate:
    """The result of a round."""

    sum: Tensor  # over the survivors, weighted if there are weights, (size,) float64, or the updates' shape
    weight: int  # sum of the survivors' weights; without weights their number
    survivors: tuple[int, ...]  # clients in the sum
    stages: Mapping[str, StageReport] = field(repr=False)  # by name; those of messages.STAGES

    def __eq__(self, other: object) -> bool:
        """Return whether sum, weight and survivors are the same; times are not compared."""
        if not isinstance(other, Aggregate) or (self.weight, self.survivors) != (other.weight, other.survivors):
            return False
        return torch.equal(self.sum, other.sum)

    def __hash__(self) -> int:
        return hash((self.weight, self.survivors))

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
        self._ledger = absolute_ledger(ledger)
        with client_ledger(ledger):
            pass
        self._number, self._keys = round_number, tuple(map(bytes, verification_keys))
        self._context = setup.context(round_number, self._keys)
        self._stage = messages.ADVERTISE
        self._failed = False
        self.alive: tuple[int, ...] = tuple(range(setup.clients))  # whose message of the last finished stage arrived
        self.stages = {name: StageReport() for name in messages.STAGES}  # traffic and time so far
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
        """The current stage, a name of messages.STAGES, "done" or "failed"."""
        return "failed" if self._failed else (*messages.STAGES, "done")[self._stage]

    def bind(self, about: bytes) -> None:
        """Bind the round to a request, as its clients do by `advertise`; ProtocolError after their first message."""
        if self._stage != messages.ADVERTISE or self._received:
            raise ProtocolError("a round is bound to a request before its first message")
        self._context = self.setup.context(self._number, self._keys, about)

    def receive(self, message: bytes) -> int:
        """Take a client's message and return the client; any error changes nothing."""
        began = time.perf_counter()
        if self.stage not in messages.STAGES:
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
        if self.stage not in messages.STAGES:
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
        if self._stage < len(messages.STAGES):
            self._received = {}
        packed = {each: messages.pack_message(self._stage, self._context, each, body) for each, body in answers.items()}
        report = self.stages[name]
        report.bytes_down += sum(map(len, packed.values()))
        report.server_s += time.perf_counter() - began
        return packed

    def finish(self) -> Aggregate:
        """Return the sum over the survivors, after the last `advance`; ProtocolError for shares missing or changed."""
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
        self.stages[messages.STAGES[-1]].server_s += time.perf_counter() - began
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
                reader = messages.AggregationReader(body, self.setup.clients)
                missing = messages.check_statement(reader, self._context, self._members, sender, self._keys)
                if missing != set(self._sealed[sender]) - set(self.alive):
                    raise ProtocolError(f"client {sender} has not masked its input with those that it was told")
                stated, body = body[: 4 * (len(missing) + 1) + 64], reader.rest()
            if len(body) != 4 * words:
                raise ProtocolError(f"the masked input of client {sender} has {len(body)} bytes, not {4 * words}")
            masked = torch.from_numpy(np.frombuffer(body, "<i4").astype(np.int32)).to(self.device, torch.int64)
            self._total = masked if self._total is None else self._total.add_(masked)
            return stated
        if self._stage == messages.CONSISTENCY:
            if body != messages.survivors_digest(self._survivors, self._members):
                raise ProtocolError(f"client {sender} signed other survivors")
            return message[-64:]
        reader = messages.AggregationReader(body, self.setup.clients)
        if self._stage == messages.SHARE:
            sealed = reader.pieces()
            reader.end()
            if not set(sealed) <= set(self.alive) - {sender} or len(sealed) != self.setup.degree(len(self.alive)):
                raise ProtocolError(f"client {sender} did not draw {self.setup.degree(len(self.alive))} other members")
            if any(len(each) != messages.SEALED_BYTES for each in sealed.values()):
                raise ProtocolError(f"encrypted shares of client {sender} do not have {messages.SEALED_BYTES} bytes")
            return sealed
        seeds, keys = reader.pieces(), reader.pieces()
        reader.end()
        own = {owner for owner, to in self._sealed.items() if sender in to} | {sender}
        alive = set(self._survivors)
        if set(seeds) != own & alive or set(keys) != own - alive:
            raise ProtocolError(f"client {sender} did not reveal the shares that it holds")
        if any(len(share) != messages.SHARE_BYTES for share in (*seeds.values(), *keys.values())):
            raise ProtocolError(f"a share of client {sender} does not have {messages.SHARE_BYTES} bytes")
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
            key = messages.crypto("asymmetric.x25519").X25519PrivateKey.from_private_bytes(secret)
            if key.public_key().public_bytes_raw() != self._public[left]:
                raise ProtocolError(f"the shares of client {left}'s key were changed: they do not give its public key")
            for each in near[left]:
                seed, sign = messages.mask_seed(key, self._public[each], self._context, left, each)
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
                found = messages.combined_shares(columns, indices, self.setup.shares_needed(count - 1), count)
            except AccelerantError as error:
                listed = ", ".join(map(str, names[:5])) + ", ..." * (len(names) > 5)
                raise ProtocolError(f"shares of the secrets of clients {listed} do not fit together: {error}") from None
            secrets.update(zip(names, found, strict=True))
        return secrets
