"""Messages of secure aggregation as bytes.

    magic "AcSA" | version u8 | stage u8 | context 32 | party u32 | body                     from the server
    the same, with the client's number as party, and then                   | signature 64   from a client

Integers are little-endian. The context is the digest of settings, verification keys, round and request (protocol.py),
so messages of others are refused. The Ed25519 signature is of everything before it. Counts and lengths are compared
with the number of clients and the rest of the bytes before anything is allocated.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from accelerant.errors import FormatError, MissingDependency, ProtocolError
from accelerant.privacy import messages
from accelerant.privacy.mpc import shamir
from accelerant.privacy.mpc.secagg.encoding import SignedSeed

ADVERTISE, SHARE, MASK, CONSISTENCY, UNMASK = range(5)
STAGES: Final = ("advertise", "share", "mask", "consistency", "unmask")  # in order: messages, then answers
STATEMENT = 5  # The code of what a client of a sparse graph states of its masks: part of messages, not one of them

SECRET_BYTES = 35  # a secret of 32 in whole field elements of 7 bytes each
SHARE_BYTES = 40  # 5 field elements
SEALED_BYTES = 2 * SHARE_BYTES + 16  # the shares that a client sends to another, encrypted
_HEAD = struct.Struct("<4sBB32sI")
_MAGIC, _VERSION, _SIGNATURE = b"AcSA", 1, 64


def crypto(module: str) -> Any:
    """Return cryptography.hazmat.primitives.MODULE; MissingDependency without the package."""
    import importlib

    try:
        return importlib.import_module(f"cryptography.hazmat.primitives.{module}")
    except ImportError:
        raise MissingDependency("cryptography", "privacy", "secure aggregation") from None


class AggregationReader(messages.MessageReader):
    """Reads the parts of a body in order; FormatError where it is too short, too long, or has a number out of range."""

    def __init__(self, body: bytes, clients: int) -> None:
        super().__init__(body, "little")
        self._clients = clients

    def u32(self) -> int:
        """Return the next number."""
        return self.number(4, 2**32 - 1)

    def ids(self) -> tuple[int, ...]:
        """Return the next list of clients: ascending, none twice, at most all of them."""
        count = self.u32()
        if count > self._clients:
            raise FormatError(f"a list of {count} clients, of {self._clients}")
        found = struct.unpack(f"<{count}I", self.take(4 * count))
        if any(a >= b for a, b in itertools.pairwise(found)) or (found and found[-1] >= self._clients):
            raise FormatError(f"clients are not ascending numbers below {self._clients}")
        return found

    def pieces(self) -> dict[int, bytes]:
        """Return the next byte strings by client."""
        return {each: self.take(self.u32()) for each in self.ids()}


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return a list of clients, in ascending order."""
    ordered = sorted(ids)
    return struct.pack(f"<{len(ordered) + 1}I", len(ordered), *ordered)


def pack_pieces(pieces: Mapping[int, bytes]) -> bytes:
    """Return byte strings by client."""
    held = (len(pieces[each]).to_bytes(4, "little") + pieces[each] for each in sorted(pieces))
    return pack_ids(pieces) + b"".join(held)


def pack_message(stage: int, context: bytes, client: int, body: bytes) -> bytes:
    """Return the server's message to a client, or a client's without its signature."""
    return _HEAD.pack(_MAGIC, _VERSION, stage, context, client) + body


def pack_signed(stage: int, context: bytes, client: int, body: bytes, sign: Callable[[bytes], bytes]) -> bytes:
    """Return a client's message."""
    part = pack_message(stage, context, client, body)
    return part + sign(part)


def read_server(data: bytes, stage: int, context: bytes, client: int) -> bytes:
    """Return the body of the server's message to a client; FormatError or ProtocolError if it is another message."""
    party, body = _read(data, stage, context)
    if party != client:
        raise ProtocolError(f"the message is for client {party}, this is client {client}")
    return body


def read_client(data: bytes, stage: int, context: bytes, keys: Sequence[bytes]) -> tuple[int, bytes]:
    """Return sender and body of a client's message after checking its signature; FormatError or ProtocolError."""
    if not isinstance(data, bytes) or len(data) < _HEAD.size + _SIGNATURE:
        raise FormatError(f"a client's message has at least {_HEAD.size + _SIGNATURE} bytes, got {_size(data)}")
    sender, body = _read(data[:-_SIGNATURE], stage, context)
    check_signature(keys, sender, data[:-_SIGNATURE], data[-_SIGNATURE:])
    return sender, body


def check_signature(keys: Sequence[bytes], sender: int, signed: bytes, signature: bytes) -> None:
    """Check a client's signature; ProtocolError if it is another's or the client is unknown."""
    from cryptography.exceptions import InvalidSignature

    if sender >= len(keys):
        raise ProtocolError(f"there is no client {sender}: the verification keys are of {len(keys)}")
    try:
        crypto("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(keys[sender]).verify(signature, signed)
    except InvalidSignature:
        raise ProtocolError(f"a message's signature is not client {sender}'s") from None


def _size(data: object) -> str:
    return str(len(data)) if isinstance(data, bytes) else f"an object of {type(data).__name__}"


def _read(data: bytes, stage: int, context: bytes) -> tuple[int, bytes]:
    if not isinstance(data, bytes) or len(data) < _HEAD.size:
        raise FormatError(f"a message has at least {_HEAD.size} bytes, got {_size(data)}")
    magic, version, found, of, party = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise FormatError("the bytes are no message of secure aggregation: they do not begin with AcSA")
    if version != _VERSION:
        raise FormatError(f"the message is of version {version}, this is version {_VERSION}")
    if of != context:
        raise ProtocolError("the message is of another round or request, or of parties with other settings or keys")
    if found != stage:
        name = STAGES[found] if found < len(STAGES) else str(found)
        raise ProtocolError(f"the message is of stage {name}, this is stage {STAGES[stage]}")
    return party, data[_HEAD.size :]


# --- what both parties compute ----------------------------------------------------------------------------------------
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
    return hashlib.sha256(members + pack_ids(survivors)).digest()


def statement(context: bytes, members: bytes, client: int, missing: bytes) -> bytes:
    """Return what a client signs of those that it drew and has no mask with."""
    return pack_message(STATEMENT, context, client, members + missing)


def check_statement(
    reader: AggregationReader, context: bytes, members: bytes, client: int, verification_keys: Sequence[bytes]
) -> frozenset[int]:
    """Read with which of those that it drew a client has no mask; ProtocolError unless it signed that."""
    missing, signature = reader.ids(), reader.take(64)
    signed = statement(context, members, client, pack_ids(missing))
    check_signature(verification_keys, client, signed, signature)
    return frozenset(missing)
