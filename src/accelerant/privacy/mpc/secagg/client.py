"""The client of secure aggregation: five messages of a round, and the checks that keep its update secret.

Source: Bonawitz et al. 2017, eprint 2017/281, figure 4, with the parts for a malicious server; see setup.py for the
graph. Deviations: every message is signed, not only keys and survivors; each of a pair's four keys (two directions of
shares, the mask) is derived by HKDF-SHA256 with the round's context and both numbers, and used once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import numpy as np
import torch

from accelerant.errors import ConfigError, ProtocolError
from accelerant.privacy.dp.noise.mechanisms import client_ledger
from accelerant.privacy.mpc import shamir
from accelerant.privacy.mpc.secagg import messages
from accelerant.privacy.mpc.secagg.encoding import SignedSeed, mask_sums, wrapped
from accelerant.privacy.mpc.secagg.messages import AggregationReader, crypto
from accelerant.privacy.random.stream import renewed_after_fork
from accelerant.runtime.files import read_regular, temporary_path, write_atomic
from accelerant.runtime.registry import DeviceLike, find_device

if TYPE_CHECKING:
    from accelerant.privacy.dp.ledger.ledger import LedgerLike
    from accelerant.privacy.mpc.secagg.setup import SecureAggregation

SECRET_BYTES = 35  # a secret of 32 in whole field elements of 7 bytes each
SHARE_BYTES = 40  # 5 field elements
SEALED_BYTES = 2 * SHARE_BYTES + 16  # the shares that a client sends to another, encrypted
_P = ParamSpec("_P")


def derived(private: Any, public: bytes, context: bytes, purpose: bytes, first: int, second: int) -> bytes:
    """Return 32 bytes that the owners of two X25519 keys have in common, for one purpose and one round."""
    try:
        shared = private.exchange(crypto("asymmetric.x25519").X25519PublicKey.from_public_bytes(public))
    except ValueError:  # a point of small order
        raise ProtocolError("a client's public key is no valid X25519 key") from None
    info = b"accelerant secure aggregation " + purpose + first.to_bytes(4, "little") + second.to_bytes(4, "little")
    hkdf = crypto("kdf.hkdf").HKDF(crypto("hashes").SHA256(), 32, salt=context, info=info)
    result: bytes = hkdf.derive(shared)
    return result


def mask_seed(private: Any, public: bytes, context: bytes, own: int, other: int) -> SignedSeed:
    """Return the seed of a pair's mask, and the sign with which client `own` adds it."""
    return derived(private, public, context, b"mask", *sorted((own, other))), 1 if own < other else -1


class _Round:
    """A client's state in a round; most of it is secret."""

    def __init__(self, context: bytes) -> None:
        x25519 = crypto("asymmetric.x25519").X25519PrivateKey
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
        key = derived(self.share_key, self.keys[other][0], self.context, b"shares", sender, receiver)
        return crypto("ciphers.aead").ChaCha20Poly1305(key)


def _step(
    method: Callable[Concatenate[AggregationClient, _P], bytes],
) -> Callable[Concatenate[AggregationClient, _P], bytes]:
    """Abort the client if a step fails: its secrets of the round are forgotten, and the round is not resumed."""

    @functools.wraps(method)
    def step(self: AggregationClient, /, *args: _P.args, **kwargs: _P.kwargs) -> bytes:
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._round = None
            raise

    return step


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
        self._ledger = ledger
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
        padding = bytes(SECRET_BYTES - 32)  # elements of the seed and elements of the key: one split, shares of each
        both = b"".join((state.seed, padding, state.mask_key.private_bytes_raw(), padding))
        sealed = {}
        for holder, share in zip(holders, shamir.split(both, threshold=threshold, count=len(holders)), strict=True):
            words = share.words.numpy().astype("<u8", copy=False).tobytes()
            if holder == self.identity:
                state.held[holder] = words[:SHARE_BYTES], words[SHARE_BYTES:]
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
            mask_seed(state.mask_key, state.keys[other][1], state.context, self.identity, other)
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
            stated += self._sign(_statement(state.context, state.members, self.identity, stated))
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
                reader = AggregationReader(statement, self.setup.clients)
                missing = check_statement(reader, state.context, state.members, owner, self._verification_keys)
                reader.end()
                if not missing.isdisjoint(survivors):
                    raise ProtocolError(f"client {owner} was told of a survivor that it had left, so masks are missing")
        state.survivors = survivors
        return self._message(survivors_digest(survivors, state.members))

    @_step
    def unmask(self, answer: bytes) -> bytes:
        """End the round with this client's shares: of survivors' seeds, of the keys of those that left; never both."""
        state, body = self._next(answer, messages.UNMASK)
        signatures = body.pieces()
        body.end()
        self._check_enough(signatures, "signatures of the survivors")
        if not set(signatures) <= set(state.survivors):
            raise ProtocolError("a signature of one that is no survivor")
        digest = survivors_digest(state.survivors, state.members)
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
            body = AggregationReader(read_regular(path), self.setup.clients)
        finally:
            path.unlink()
        self._round = state = _Round(body.take(32))
        state.members = body.take(32)
        state.stage = body.take(1)[0]
        x25519 = crypto("asymmetric.x25519").X25519PrivateKey
        state.share_key, state.mask_key = (x25519.from_private_bytes(body.take(32)) for _ in range(2))
        state.seed, state.drawn, state.masked, state.survivors = (
            body.take(32),
            body.ids(),
            frozenset(body.ids()),
            body.ids(),
        )
        state.keys, state.held = (
            {i: (pair[: len(pair) // 2], pair[len(pair) // 2 :]) for i, pair in body.pieces().items()} for _ in range(2)
        )
        return b""

    @property
    def _suspended(self) -> Path:
        assert self._path is not None
        return self._path.with_name(self._path.name + ".round")

    def _next(self, answer: bytes, stage: int) -> tuple[_Round, AggregationReader]:
        state = self._round
        if state is None:
            raise ProtocolError(f"client {self.identity} is in no round: it was aborted, has ended, or not begun")
        if state.stage != stage - 1:
            raise ProtocolError(f"after stage {messages.STAGES[state.stage]} comes not {messages.STAGES[stage]}")
        body = messages.read_server(answer, stage, state.context, self.identity)
        state.stage = stage
        return state, AggregationReader(body, self.setup.clients)

    def _message(self, body: bytes) -> bytes:
        assert self._round is not None
        return messages.pack_signed(self._round.stage, self._round.context, self.identity, body, self._sign)

    def _check_enough(self, found: Sequence[int] | Mapping[int, Any] | set[int], what: str) -> None:
        if len(found) < self.setup.threshold:
            raise ProtocolError(f"{len(found)} {what}, the threshold is {self.setup.threshold}")

    def _opened(self, sender: int, ciphertext: bytes) -> tuple[bytes, bytes]:
        """Return the shares that a client sent. Each key encrypts one message, so the nonce is 0."""
        from cryptography.exceptions import InvalidTag

        assert self._round is not None
        try:
            text = self._round.aead(sender, sender, self.identity).decrypt(bytes(12), ciphertext, None)
        except InvalidTag:
            raise ProtocolError(f"the shares of client {sender} were changed, or are not for this client") from None
        if len(text) != 2 * SHARE_BYTES:
            raise ProtocolError(f"the shares of client {sender} have {len(text)} bytes, not {2 * SHARE_BYTES}")
        return text[:SHARE_BYTES], text[SHARE_BYTES:]


def combined_shares(
    shares: Sequence[Sequence[bytes]], indices: Sequence[int], threshold: int, count: int
) -> list[bytes]:
    """Return secrets of 32 bytes; shares[i] are of all secrets at index indices[i]. Errors of shamir.combine."""
    secrets = len(shares[0])
    sharing = shamir.Sharing("goldilocks", threshold, count, "bytes", (secrets * SECRET_BYTES,), 0, bytes(16))
    words = (np.frombuffer(b"".join(each), "<u8").astype(np.uint64) for each in shares)
    held = [shamir.Share(sharing, i, torch.from_numpy(each)) for i, each in zip(indices, words, strict=True)]
    data = shamir.combine(held)
    parts = [data[at : at + SECRET_BYTES] for at in range(0, len(data), SECRET_BYTES)]
    if any(part[32:].strip(b"\0") for part in parts):
        raise ProtocolError("the shares are not of secrets of 32 bytes")
    return [part[:32] for part in parts]


def survivors_digest(survivors: Sequence[int], members: bytes) -> bytes:
    """Return what clients sign of the survivors and of the digest of the members' keys, 32 bytes."""
    return hashlib.sha256(members + messages.pack_ids(survivors)).digest()


def _statement(context: bytes, members: bytes, client: int, missing: bytes) -> bytes:
    return messages.pack_message(messages.STATEMENT, context, client, members + missing)


def check_statement(
    reader: AggregationReader, context: bytes, members: bytes, client: int, verification_keys: Sequence[bytes]
) -> frozenset[int]:
    """Read with which of those that it drew a client has no mask; ProtocolError unless it signed that."""
    missing, signature = reader.ids(), reader.take(64)
    signed = _statement(context, members, client, messages.pack_ids(missing))
    messages.check_signature(verification_keys, client, signed, signature)
    return frozenset(missing)
