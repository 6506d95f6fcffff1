"""API keys: a file of hashes, scopes, rate limits, rotation.

A key is `acl_ID_SECRET` with 256 random bits, so that one SHA-256 of it is a sufficient hash. The file holds hashes
only. Each change replaces the file, and a running service reads it again within a second. Rotation keeps the id, which
owns the jobs: it adds a secret, and the old one stays valid for a time.
"""

import hashlib
import json
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from accelerant.errors import ConfigError, FormatError
from accelerant.runtime.files import AtomicFile, decode_json, read_regular, typed
from accelerant.service.operations import SCOPES

_LOG = logging.getLogger("accelerant.service")
_TOKEN = re.compile(r"acl_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_RATE_MOST = 1e9  # largest rate and burst: the file holds integers of 63 bits


@dataclass(frozen=True, slots=True)
class Secret:
    """The hash of a key's secret, and the time after which it is not valid (None: none)."""

    sha256: str = field(repr=False)
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Key:
    """A key without its secrets, the newest last: its id owns jobs; `rate` requests a second, `burst` at once."""

    id: str
    name: str = ""
    scopes: tuple[str, ...] = ()
    rate: float | None = None
    burst: int = 1
    created: float = 0.0
    secrets: tuple[Secret, ...] = ()

    @property
    def key_id(self) -> str | None:
        """The owner whose jobs this key sees; None: all."""
        return None if "admin" in self.scopes else self.id

    def allows(self, scope: str) -> bool:
        """Return whether the key has a scope."""
        return scope in self.scopes or "admin" in self.scopes

    def public(self) -> dict[str, Any]:
        """Return what may be shown: everything but the hashes."""
        shown = asdict(self)
        until = [secret.until for secret in self.secrets]
        del shown["secrets"]
        return shown | {
            "secrets": len(until),
            "until": max((u for u in until if u), default=None) if all(until) else None,
        }


ANONYMOUS = Key("anonymous", "requests of this machine without a key", ("admin",))
"""Who calls where no keys exist and the service listens on loopback only."""


class KeyStore:
    """The keys of a file, which need not exist."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._keys: dict[str, Key] = {}
        self._present = self._failing = False
        self._stamp: tuple[int, int, int] | None = None
        self._looked = -1.0
        self._buckets: dict[str, tuple[float, float]] = {}

    def read(self) -> list[Key]:
        """Return the keys of the file as it is now; FormatError if it cannot be understood."""
        self._read()
        return list(self._keys.values())

    def verify(self, token: str) -> Key | None:
        """Return the key of a token that is valid now. Its secret is compared in constant time."""
        self._refresh()
        match = _TOKEN.fullmatch(token)
        key = self._keys.get(match[1]) if match else None
        digest, now, valid = _digest(token), time.time(), False
        for secret in key.secrets if key else (Secret("0" * 64),):
            same = secrets.compare_digest(digest, secret.sha256)
            valid |= same and (secret.until is None or now < secret.until)
        return key if valid else None

    @property
    def exists(self) -> bool:
        """Whether there is a file of keys, even one without any or that cannot be read: then each request needs one."""
        self._refresh()
        return self._present

    def wait_s(self, key: Key) -> float:
        """Count a request against a key's rate; return 0, or the seconds until the next one is allowed."""
        if key.rate is None:
            return 0.0
        now = time.monotonic()
        tokens, then = self._buckets.get(key.id, (float(key.burst), now))
        tokens = min(float(key.burst), tokens + (now - then) * key.rate)
        if tokens < 1:
            self._buckets[key.id] = tokens, now
            return (1 - tokens) / key.rate
        self._buckets[key.id] = tokens - 1, now
        return 0.0

    def create(
        self, name: str, scopes: Sequence[str], *, rate: float | None = None, burst: int | None = None,
        lifetime_s: float | None = None,
    ) -> tuple[Key, str]:  # fmt: skip
        """Add a key; return it and its token, which is not stored."""
        unknown = [scope for scope in scopes if scope not in SCOPES]
        if unknown or not scopes:
            raise ConfigError(f"scopes are some of {', '.join(SCOPES)}; got {', '.join(unknown) or 'none'}")
        if not name or len(name) > 80 or not name.isprintable():
            raise ConfigError(f"a key's name has 1 to 80 printable characters, got {name!r}")
        for what, value in (("rate", rate), ("burst", burst)):
            if value is not None and not value > 0:
                raise ConfigError(f"{what} must be above 0, got {value}")
            if (value or 0) > _RATE_MOST:
                raise ConfigError(f"{what} must be at most {_RATE_MOST:,.0f}, got {value}")
        identity = secrets.token_hex(6)
        token, secret = _new_secret(identity, lifetime_s)
        largest = burst or max(1, round(2 * (rate or 1)))
        key = Key(identity, name, tuple(dict.fromkeys(scopes)), rate, largest, time.time(), (secret,))
        with self._changing():
            self._keys[identity] = key
        return key, token

    def revoke(self, identity: str) -> None:
        """Remove a key."""
        with self._changing():
            del self._keys[self._known(identity)]

    def rotate(self, identity: str, *, grace_s: float = 86400.0, lifetime_s: float | None = None) -> tuple[Key, str]:
        """Give a key a new secret; earlier ones stay valid for `grace_s`. Return the key and the new token."""
        if not grace_s >= 0:
            raise ConfigError(f"the time of the old secret must be 0 or more, got {grace_s}")
        with self._changing():
            key, now = self._keys[self._known(identity)], time.time()
            token, secret = _new_secret(identity, lifetime_s)
            until = now + grace_s
            kept = (replace(old, until=min(until, old.until or until)) for old in key.secrets)
            living = tuple(old for old in kept if old.until is not None and old.until > now)
            key = self._keys[identity] = replace(key, secrets=(*living, secret))
        return key, token

    def _known(self, identity: str) -> str:
        if identity not in self._keys:
            raise ConfigError(f"no key {identity!r} in {self.path}; known are {', '.join(self._keys) or 'none'}")
        return identity

    def _refresh(self) -> None:
        """Look at the file once a second. If it cannot be read, the earlier keys stay, and the reason is logged."""
        if time.monotonic() > self._looked + 1:
            try:
                self._read()
            except (FormatError, OSError) as error:
                if not self._failing:  # it is looked at each second
                    _LOG.error("API keys are not read again: %s", error)
                self._failing = True
            else:
                if self._failing:
                    _LOG.info("API keys are read again from %s", self.path)
                self._failing = False

    def _read(self) -> None:
        """Read the file if it has changed; FormatError or OSError if that fails."""
        self._looked = time.monotonic()
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            self._keys, self._stamp, self._present = {}, None, False
            return
        except OSError:
            self._present = True  # it may be there: the service does not open
            raise
        self._present = True
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if stamp == self._stamp:
            return
        try:
            entries = typed(list[Key], decode_json(read_regular(self.path)).get("keys"), "keys")
        except (ValueError, AttributeError) as error:
            raise FormatError(f"{self.path} is no file of API keys: {error}") from None
        self._keys, self._stamp = {key.id: key for key in entries}, stamp

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the file, read it, and write it back after the block."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _keep_owner(descriptor, self.path)
            try:
                import fcntl

                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except ImportError:  # Windows: of two changes at the same time one may be lost
                pass
            self._read()
            yield
            text = json.dumps({"format": 1, "keys": [asdict(key) for key in self._keys.values()]}, indent=1)
            with AtomicFile(self.path, mode=0o600) as file:
                _keep_owner(file.fileno(), self.path)
                file.write(text.encode())
        finally:
            os.close(descriptor)


def _keep_owner(descriptor: int, path: Path) -> None:
    """Give a file that root writes to the owner of the one at `path`, or of its folder, who runs the service."""
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        owner = os.stat(path if path.exists() else path.parent)
        os.fchown(descriptor, owner.st_uid, owner.st_gid)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _new_secret(identity: str, lifetime_s: float | None) -> tuple[str, Secret]:
    if lifetime_s is not None and not 0 < lifetime_s < math.inf:
        raise ConfigError(f"lifetime must be above 0, got {lifetime_s}")
    token = f"acl_{identity}_{secrets.token_urlsafe(32)}"
    return token, Secret(_digest(token), None if lifetime_s is None else time.time() + lifetime_s)
