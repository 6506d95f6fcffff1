"""The layer between the network and the routes: limits, keys, request ids, logs, spans.

`Connections` bounds the open connections; `GuardedProtocol` the time and bytes of handshakes and headers. `Guard` is
ASGI middleware: it checks key and origin, bounds the requests in progress, and makes a span.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import itertools
import json
import logging
import math
import re
import secrets
import socket
import ssl
import sys
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from accelerant.service.errors import Refused, refusal_of
from accelerant.service.keys import ANONYMOUS, Key, KeyStore
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import RequestRecord, tracing

_LOG = logging.getLogger("accelerant.service")
_PROCESS, _NUMBERS = secrets.token_hex(4), itertools.count()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_HOST = re.compile(rb"[A-Za-z0-9._~%!$&'()*+,;=:\[\]-]*")
_NOT_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_PUBLIC = frozenset({"/", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs", "/prompt", "/favicon.ico"})
_ALWAYS = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics"})
"""Paths that are served under overload: a supervisor would end a server that does not answer them."""
_FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_PIPELINED_MOST = 16  # requests that may wait on a connection behind the one in progress
_TARGET_BYTES = 8192
"""Longest path and query: parameters of a query are short, and other servers and proxies take no more."""
_SETTLED_S, _UNREAD_S = 1.0, 0.2
"""Age from which a stranger's connection may be closed for a new one; that of a silent one where no room is left."""
_LOOKED_AT = 32  # how many connections, and addresses, are searched for the one to close
_LINGER_S, _LINGER_BYTES = 1.0, 1 << 20
"""Seconds and bytes for which a connection is read on after its last answer, which a reset would overtake."""
_PART_BYTES = 1 << 20
"""Longer answers are sent in parts, one at a time: uvicorn holds a whole part in memory."""
_LARGE_HEADERS = "the headers have more than {:,} bytes"
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Headers = Iterable[tuple[bytes, bytes]]
Receive = Callable[[], Any]
Send = Callable[[Any], Any]
Scope = MutableMapping[str, Any]


def _new_id() -> str:
    return f"{_PROCESS}{next(_NUMBERS):08x}"


def error_body(kind: str, message: str, request_id: str) -> bytes:
    """Return the JSON of an error: KServe's `error`, the error's class, and the id of the request."""
    return json.dumps({"error": message, "type": kind, "request_id": request_id}).encode()


_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def openai_error(refused: Refused, request_id: str) -> dict[str, Any]:
    """Return an error as OpenAI's routes have it: its class in words under `code`."""
    kind = "server_error" if refused.status >= 500 else "invalid_request_error"
    code = "_".join(word.lower() for word in re.findall("[A-Z][^A-Z]*", refused.kind))
    error = {"message": str(refused), "type": _OPENAI_TYPES.get(refused.status, kind), "param": refused.param}
    return {"error": error | {"code": code, "request_id": request_id}}


def body_of(refused: Refused, scope: Mapping[str, Any], request_id: str) -> bytes:
    """Return the body of an error in the form of the route."""
    if scope["path"].startswith("/v1/"):
        return json.dumps(openai_error(refused, request_id)).encode()
    return error_body(refused.kind, str(refused), request_id)


class Guard:
    """ASGI middleware; key and record of a request are in `scope["state"]`, `observers` get answered records."""

    def __init__(
        self, app: Any, *, settings: ServiceSettings, keys: KeyStore, observers: list[Any], inference: Any = None
    ) -> None:
        self.app, self.settings, self.keys, self.observers = app, settings, keys, observers
        self.inference = inference
        self._loopback = settings.is_loopback
        self._running = 0
        self._span = tracing()

    async def __call__(self, scope: Scope, receive: Receive, send: Callable[[Any], Any]) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = scope["headers"]
        fields = dict(headers)
        if len(fields) < len(headers):
            fields = _joined(headers)
        given = fields.get(b"x-request-id")
        request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else _new_id()
        record = RequestRecord(request_id, scope["method"], scope["path"])
        state = scope.setdefault("state", {})
        state["record"], state["fields"] = record, fields

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
                if state.get("arrived") is False and (b"transfer-encoding" in fields or b"content-length" in fields):
                    message["headers"].append((b"connection", b"close"))  # the rest of the body is not waited for
                if not any(name.lower() == b"cache-control" for name, _ in message["headers"]):
                    message["headers"].append((b"cache-control", b"no-store"))  # X-Api-Key says nothing to caches
            body = message.get("body", b"")
            record.bytes_out += len(body)
            if len(body) > _PART_BYTES:
                await self._send_parts(send, message, body)
            else:
                await send(message)

        self._running += 1
        try:
            with self._span(record, headers) as span:
                try:
                    state["key"] = self._admitted(scope, headers, fields)
                    record.key_id = state["key"].id
                    if record.key_id and "known" in state:
                        state["known"]()
                    name = _inferred(scope)
                    if name is None and scope["method"] == "HEAD":
                        await self._head(scope, receive, answer)
                    elif name is None:
                        await self.app(scope, receive, answer)
                    else:
                        record.route = "/v2/models/{name}/infer"
                        found = await self.inference.answer(name, scope, receive)
                        await _send(answer, found.status, found.headers, found.body)
                except Exception as error:
                    refused = refusal_of(error)
                    if refused.status == 500:
                        _LOG.exception("request %s failed", request_id)
                    if record.status:
                        raise  # the answer has begun: uvicorn closes the connection
                    lines = [(b"content-type", b"application/json")]
                    if refused.status == 401:
                        lines.append((b"www-authenticate", b"Bearer"))
                    if refused.retry_after_s is not None:
                        lines.append((b"retry-after", str(math.ceil(refused.retry_after_s)).encode()))
                    await _send(answer, refused.status, lines, body_of(refused, scope, request_id))
                finally:
                    record.route = record.route or getattr(scope.get("route"), "path", "")
                    if span is not None:
                        span.update_name(f"{record.method} {record.route or record.path}")
                        span.set_attribute("http.response.status_code", record.status)
        finally:
            self._running -= 1
            if record.held_bytes:
                self.inference.release(record)
            record.seconds = time.perf_counter() - start
            for observer in self.observers:
                observer(record)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as to GET, without the body, which may have no end."""

        async def start(message: MutableMapping[str, Any]) -> None:
            await send(message)
            await send({"type": "http.response.body"})
            raise _HeadIsSent

        inner = {**scope, "method": "GET"}
        with suppress(_HeadIsSent):
            await self.app(inner, receive, start)
        scope["route"] = inner.get("route")

    async def _send_parts(self, send: Send, message: Mapping[str, Any], body: bytes) -> None:
        """Send a long body at the pace at which the client reads it; Refused if that is too slow."""
        settings, whole = self.settings, memoryview(body)
        limit_s = settings.body_timeout_s + len(body) / settings.body_rate_bytes_s
        try:
            async with asyncio.timeout(limit_s):
                for start in range(0, len(body), _PART_BYTES):
                    more = start + _PART_BYTES < len(body) or message.get("more_body", False)
                    await send({**message, "body": bytes(whole[start : start + _PART_BYTES]), "more_body": more})
        except TimeoutError:
            raise Refused(408, "AnswerTooSlow", f"the answer was not read within {limit_s:.0f} s") from None

    def _admitted(self, scope: Scope, headers: Headers, fields: Mapping[bytes, bytes]) -> Key:
        """Return the key of a request; raise Refused."""
        if self._running > self.settings.concurrency and scope["path"] not in _ALWAYS:
            raise Refused(503, "Busy", f"{self.settings.concurrency} requests are in progress", retry_after_s=1)
        if sum([len(key) + len(value) for key, value in headers]) > self.settings.header_bytes:
            raise Refused(431, "HeadersTooLarge", _LARGE_HEADERS.format(self.settings.header_bytes))
        _require_one_meaning(scope, fields)
        origin, host = fields.get(b"origin"), fields.get(b"host", b"").decode("latin-1")
        if origin is not None and ((url := _split(origin.decode("latin-1"))) is None or url.netloc != host):
            raise Refused(403, "Forbidden", "pages of other sites may not call this service")
        token = token_of(fields)
        if not self.keys.exists and self._loopback and (token is None or scope["path"].startswith("/v1/")):
            # OpenAI's clients always send a key
            if fields.keys() & _FORWARDED:
                raise Refused(403, "Forbidden", "a proxy's requests may be anybody's: make API keys for them")
            if not _is_local(host):
                raise Refused(403, "Forbidden", f"host {host!r} is not this machine's: without API keys, use 127.0.0.1")
            return ANONYMOUS
        path = scope["path"]
        if token is None and (path in _PUBLIC or path.startswith("/dashboard/")) and scope["method"] in ("GET", "HEAD"):
            if path not in _ALWAYS and scope["state"].get("crowded"):
                raise Refused(503, "Busy", "the connections left are for keys and for health", retry_after_s=1)
            return Key("")
        key = self.keys.verify(token) if token is not None else None
        if key is None:
            raise Refused(401, "Unauthorized", "give a valid API key: Authorization: Bearer acl_...")
        wait_s = self.keys.wait_s(key)
        if wait_s:
            raise Refused(429, "RateLimited", f"the key allows {key.rate:g} requests a second", retry_after_s=wait_s)
        return key


class _HeadIsSent(Exception):  # noqa: N818 - no error
    """Ends the work on a request of HEAD."""


def _joined(headers: Headers) -> dict[bytes, bytes]:
    """Return headers by name; those that occur more than once as one list, which is what they mean."""
    fields: dict[bytes, bytes] = {}
    for name, value in headers:
        fields[name] = b"%s, %s" % (fields[name], value) if name in fields else value
    return fields


def _require_one_meaning(scope: Scope, fields: Mapping[bytes, bytes]) -> None:
    """Raise Refused for a request that a proxy may read otherwise than this server (RFC 9110 and 9112)."""
    host = fields.get(b"host")  # of several headers their list, which is no host
    if host is None and scope.get("http_version") == "1.1":
        raise Refused(400, "BadRequest", "a request has a Host header")
    if host is not None and not _HOST.fullmatch(host):
        raise Refused(400, "BadRequest", f"Host is not one host and port: {host[:80].decode('latin-1')!r}")
    target = scope.get("raw_path") or b""
    if b"%" in target and (wrong := _NOT_PERCENT.search(target)):
        found = target[wrong.start() : wrong.start() + 3].decode("latin-1")
        raise Refused(400, "BadRequest", f"in a path % is followed by two hexadecimal digits, got {found!r}")


@functools.lru_cache(maxsize=64)
def _split(url: str) -> SplitResult | None:
    try:
        return urlsplit(url)
    except ValueError:
        return None


def _is_local(host: str) -> bool:
    """Return whether a Host header names this machine: a page of another site cannot send one that does."""
    url = _split(f"//{host}")
    return url is not None and url.hostname in _LOCAL_NAMES


def _inferred(scope: Scope) -> str | None:
    """Return the name of the operation that a request is to run; None for other requests."""
    path: str = scope["path"]
    if scope["method"] != "POST" or not path.startswith("/v2/models/") or not path.endswith("/infer"):
        return None
    name = path[len("/v2/models/") : -len("/infer")].removesuffix("/versions/1")
    return None if "/" in name or not name else name


def token_of(fields: Mapping[bytes, bytes]) -> str | None:
    """Return the API key that headers have."""
    bearer = fields.get(b"authorization")
    if bearer is not None and bearer[:7].lower() == b"bearer ":
        return bearer[7:].strip().decode("latin-1")
    other = fields.get(b"x-api-key")
    return None if other is None else other.decode("latin-1")


def authorize(scope: Scope, needed: str) -> Key:
    """Return the key of a request; Refused if it lacks a scope of SCOPES."""
    key: Key = scope["state"]["key"]
    if not key.allows(needed):
        status, kind = (403, "Forbidden") if key.id else (401, "Unauthorized")
        raise Refused(status, kind, f"the API key does not have the scope {needed!r}")
    return key


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(scope: Scope, receive: Receive, settings: ServiceSettings, hold: Callable[[int], None]) -> bytes:
    """Return a request's body, counted by `hold`; Refused if it is too large, compressed, slow, or ends early."""
    state = scope["state"]
    fields, record = state["fields"], state["record"]
    if fields.get(b"content-encoding", b"").strip().lower() not in (b"", b"identity"):
        raise Refused(415, "UnsupportedMediaType", "compressed bodies are not read: send it as it is")
    declared = fields.get(b"content-length")
    if declared is not None and declared.isdigit():
        _require_at_most(settings.body_bytes, int(declared))
    start, more = time.monotonic(), True
    parts: list[bytes] = []
    while more:
        if state.get("arrived"):
            message = await receive()
        else:
            spent_s = time.monotonic() - start
            limit_s = settings.body_timeout_s + record.bytes_in / settings.body_rate_bytes_s
            try:
                async with asyncio.timeout(limit_s - spent_s):
                    message = await receive()
            except TimeoutError:
                came = f"{record.bytes_in:,} bytes of the body came in {spent_s:.0f} s"
                raise Refused(408, "BodyTooSlow", came) from None
        if message["type"] == "http.disconnect":
            raise Refused(400, "Disconnected", "the body ended early")
        part, more = message.get("body", b""), message.get("more_body", False)
        record.bytes_in += len(part)
        hold(len(part))
        _require_at_most(settings.body_bytes, record.bytes_in)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _require_at_most(most: int, size: int) -> None:
    if size > most:
        raise Refused(413, "BodyTooLarge", f"the body has more than {most:,} bytes")


# --- connections -----------------------------------------------------------------------------------------------------
class Connections:
    """The open connections of a server, at most `most`, and `most_of_one` of the strangers of one address.

    A stranger has shown no valid key. When there are too many, the stranger ends that has been silent for longest, of
    the address that has most; then one with a key and no request in progress. A `reserve` remains for health alone.
    """

    def __init__(self, most: int, most_of_one: int) -> None:
        self.most, self.most_of_one = most, most_of_one
        self.reserve = reserve_of(most)
        self._open: dict[GuardedProtocol, str] = {}
        self._strangers: dict[str, dict[GuardedProtocol, float]] = {}
        self._idle: dict[GuardedProtocol, float] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, connection: GuardedProtocol, address: str) -> bool:
        """Take a connection, and end another one if there are too many; return False if there is no room."""
        now = time.monotonic()
        strangers = self._strangers.get(address, {})
        if len(strangers) >= self.most_of_one:
            self._end_oldest(strangers, now - _SETTLED_S)
        if len(self._open) >= self.most:
            self._make_room(now - _SETTLED_S)
        if len(self._open) >= self.most + self.reserve and not self._make_room(now - _UNREAD_S, must=True):
            return False
        self._open[connection] = address
        self._strangers.setdefault(address, {})[connection] = now
        return True

    def remove(self, connection: GuardedProtocol) -> None:
        """Forget a connection that has ended."""
        if (address := self._open.pop(connection, None)) is not None:
            self._idle.pop(connection, None)
            self._forget_stranger(connection, address)

    def know(self, connection: GuardedProtocol) -> None:
        """Count a connection as one with a valid key, with a request in progress."""
        if (address := self._open.get(connection)) is not None:
            self._forget_stranger(connection, address)

    def heard(self, connection: GuardedProtocol, *, is_busy: bool) -> None:
        """Record the start or the end of a request."""
        strangers = self._strangers.get(self._open.get(connection, ""), {})
        if connection in strangers:
            del strangers[connection]  # to the end
            strangers[connection] = time.monotonic()
        elif is_busy:
            self._idle.pop(connection, None)
        elif connection in self._open:
            self._idle[connection] = time.monotonic()

    def _forget_stranger(self, connection: GuardedProtocol, address: str) -> None:
        strangers = self._strangers.get(address, {})
        strangers.pop(connection, None)
        if not strangers:
            self._strangers.pop(address, None)

    def _make_room(self, before: float, *, must: bool = False) -> bool:
        groups = self._strangers.values()
        largest: dict[GuardedProtocol, float] = max(groups, key=len, default={})
        others = itertools.islice(groups, _LOOKED_AT)
        return any(self._end_oldest(group, before, must=must) for group in (largest, *others, self._idle))

    def _end_oldest(self, group: Mapping[GuardedProtocol, float], before: float, *, must: bool = False) -> bool:
        """End the least recently active connection of a group, if it was active before a time, or has had its turn."""
        for connection, heard in itertools.islice(group.items(), _LOOKED_AT):
            if heard <= before or (must and connection.had_its_turn):
                self.remove(connection)
                connection.raw.abort()
                return True
        return False


def reserve_of(connections: int) -> int:
    """Return the number of connections beyond the setting `connections`."""
    return max(512, connections // 4)


def _network(transport: Any) -> str:
    """Return the address of a peer; for IPv6 its /64 network, all of which one host may have."""
    peer = transport.get_extra_info("peername")
    try:
        address = ipaddress.ip_address(peer[0].partition("%")[0])
    except (TypeError, IndexError, AttributeError, ValueError):  # of a Unix socket, or gone already
        return ""
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is None:
            return str(ipaddress.ip_network((address, 64), strict=False))
        address = address.ipv4_mapped
    return str(address)


class _Secured(SSLProtocol):
    """TLS that also reports the end of a connection during its handshake, of which asyncio tells no protocol."""

    lost: Callable[[], None]

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.lost()


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of connections, of handshakes, and of the bytes and time of a request's headers.

    The handshake of `tls` is made here, since asyncio's server would let unfinished ones pile up unseen.
    """

    limits: ServiceSettings
    open: Connections
    tls: ssl.SSLContext | None = None
    _in_headers = False

    @property
    def had_its_turn(self) -> bool:
        """Whether data of the connection were read, and no request is in progress."""
        return (self._in_headers or self.cycle is not None) and not self._answers

    def connection_made(self, transport: Any) -> None:
        """Take a connection, or close it where there are too many; after the handshake of TLS, expect requests."""
        if transport.get_extra_info("sslcontext") is not None:
            self._begin(transport)
            return
        self.raw = transport
        if not self.open.add(self, _network(transport)):
            transport.abort()
        elif self.tls is None:
            self._begin(transport)
        else:
            options: dict[str, Any] = {"waiter": None, "ssl_handshake_timeout": self.limits.header_timeout_s}
            secured = _Secured(self.loop, self, self.tls, server_side=True, **options)
            secured.lost = functools.partial(self.open.remove, self)
            transport.set_protocol(secured)
            secured.connection_made(transport)

    def _begin(self, transport: Any) -> None:
        super().connection_made(transport)
        self._header_bytes, self._in_headers, self._awaits_headers = 0, False, True
        self._header_timer: asyncio.TimerHandle | None = None
        self._last: bytes | None = None
        self._left_bytes = 0  # that came after the last answer
        self._upgrade_body: bytes | None = None  # the header that frames the body of a request to upgrade
        self._repeats_head = False
        connection = transport.get_extra_info("socket")
        over_tcp = connection is not None and (not hasattr(socket, "AF_UNIX") or connection.family != socket.AF_UNIX)
        if over_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
            # closes connections whose peer does not read its answer
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.limits.body_timeout_s))
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection and its timer."""
        self.open.remove(self)
        if self.transport is not None:  # else there was no room
            self._headers_came()
            super().connection_lost(exc)

    def eof_received(self) -> bool | None:  # type: ignore[override]  # as asyncio has it
        """Answer a peer that has sent all of its requests, and waits; one that asked a model is taken to be gone.

        Only a write would tell the two apart, and the answer of a model may be minutes of work.
        """
        if not self._answers or self.cycle.more_body or self.tls is not None:
            return None
        if self.cycle.scope["path"].startswith("/v1/"):
            return None
        if not self._last:  # else that is the end
            self.cycle.keep_alive = False
        return True

    @property
    def _answers(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Count bytes until the headers are complete, also those of a request that follows one in progress.

        The part of the data in which a request begins is not counted: the one before it may end there.
        """
        if self._last is not None:
            self._left_bytes += len(data)
            if self._left_bytes > _LINGER_BYTES:
                self.transport.abort()
            return
        if not self._awaits_headers and not self._answers:
            self._awaits_headers, self._header_bytes = True, 0
        if self._in_headers or self._awaits_headers:
            self._header_bytes += len(data)
        self._data = data
        super().data_received(data)
        self._data = b""
        if self._last is not None or not (self._in_headers or self._awaits_headers):
            return
        if self._awaits_headers and self._header_timer is None:
            self._time_headers()
        if self._header_bytes > self.limits.header_bytes:
            self._refuse(Refused(431, "HeadersTooLarge", _LARGE_HEADERS.format(self.limits.header_bytes)))

    def on_message_begin(self) -> None:
        """Start counting the bytes of a request's headers."""
        if self._repeats_head:
            return
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """Take a part of the request's target."""
        if self._repeats_head:
            return
        super().on_url(url)
        if len(self.url) > _TARGET_BYTES:
            reason = f"path and query have more than {_TARGET_BYTES:,} bytes: send parameters in the body"
            raise Refused(414, "TargetTooLong", reason)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; forget those that follow a chunked body, which nobody reads and no limit bounds."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer; bound the requests that wait on this connection."""
        if self._repeats_head:
            self._repeats_head = False
            return
        self._in_headers, self._upgrade_body = False, None
        self._headers_came()
        if len(self.pipeline) >= _PIPELINED_MOST:
            raise Refused(503, "Busy", f"more than {_PIPELINED_MOST} requests wait on this connection")
        for i, (name, value) in enumerate(self.headers):
            if name in (b"transfer-encoding", b"content-length"):
                if name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                    raise Refused(501, "NotImplemented", "of transfer encodings there is chunked alone")
                if self.parser.should_upgrade():
                    self._upgrade_body = b"%s: %s" % (name, value)
            elif name == b"connection" and not self.parser.should_keep_alive():
                self.headers[i] = (name, b"close")  # which uvicorn looks for, whatever the case, and in no list
        if self.url[:1] != b"/":
            self._use_origin_form()
        self.open.heard(self, is_busy=True)
        super().on_headers_complete()
        state = self.scope["state"]
        state["arrived"], state["known"] = False, functools.partial(self.open.know, self)
        state["crowded"] = len(self.open) > self.open.most
        if self.scope["http_version"] == "1.0":  # which knows no interim answers
            self.cycle.waiting_for_100_continue = False
        one = _OneWrite(self.transport, self._close)
        if self.scope["method"] == "HEAD":  # whose body is not written
            one._head = None
        self.cycle.transport = one  # type: ignore[assignment]  # all that a cycle uses

    def _use_origin_form(self) -> None:
        """Take the host of a target such as http://host/path, which counts more than the header (RFC 9112, 3.2.2)."""
        if self.url == b"*" and self.parser.get_method() == b"OPTIONS":
            self.url = b"/"
            return
        target = httptools.parse_url(self.url)  # raises for other forms
        netloc = self.url.partition(b"//")[2].split(b"/")[0].split(b"?")[0]
        if (target.schema or b"").lower() not in (b"http", b"https") or not target.host or b"@" in netloc:
            raise Refused(400, "BadRequest", "the target is no path")
        if (hosts := [i for i, (name, _) in enumerate(self.headers) if name == b"host"])[1:] == [] and hosts:
            self.headers[hosts[0]] = (b"host", netloc)
        self.url = (target.path or b"/") + (b"?" + target.query if target.query else b"")

    def on_message_complete(self) -> None:
        """Tell `read_body` that the body is here."""
        if self._upgrade_body is not None:
            return  # it follows
        super().on_message_complete()
        self.scope["state"]["arrived"] = True

    def _unsupported_upgrade_warning(self) -> None:
        """Go on in HTTP/1.1 after an offer of another protocol, as Java makes it, which the parser takes for an end."""
        upgrade = sys.exc_info()[1]
        rest = self._data[upgrade.args[0] :] if upgrade is not None else b""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        if self._upgrade_body is not None:
            rest = b"POST / HTTP/1.1\r\n%s\r\n\r\n%s" % (self._upgrade_body, rest)
            self._repeats_head, self._upgrade_body = True, None
        if rest:
            self._data = rest
            super().data_received(rest)

    def on_response_complete(self) -> None:
        """Go on with the next request, or end after the last one."""
        waits = bool(self.pipeline)
        super().on_response_complete()
        if waits:
            return
        self.open.heard(self, is_busy=False)
        if self._last:
            self._end()

    def send_400_response(self, msg: str) -> None:
        """Refuse what a callback of the parser has refused, or the parser itself does not take."""
        raised = sys.exc_info()[1]
        refused = raised.__context__ if raised is not None else None
        broken = Refused(400, "BadRequest", "this is not a request of HTTP/1.1")
        self._refuse(refused if isinstance(refused, Refused) else broken)

    def _refuse(self, refused: Refused) -> None:
        """Answer what cannot be read, after the requests before it, and end the connection."""
        self._headers_came()
        body = error_body(refused.kind, str(refused), _new_id())
        self._last = (
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (refused.status, HTTPStatus(refused.status).phrase.encode(), len(body), body)
        )
        if self._answers and self.cycle.more_body:  # of this request the body is wrong
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.pipeline:
                self.pipeline.popleft()
            elif self.cycle.response_started:
                self.transport.close()
            else:
                self._end()
                return
        elif not self._answers:
            self._end()
            return
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.abort)

    def _end(self) -> None:
        last, self._last = self._last or b"", b""
        if not self.transport.is_closing():
            self.transport.write(last)
            self._close()

    def _close(self) -> None:
        """Close the connection once the peer has had time to read, if it may still be sending."""
        self._headers_came()
        arrived = self.scope is None or self.scope["state"].get("arrived", False)
        if (self._last is None and arrived) or not self.transport.can_write_eof() or self.transport.is_closing():
            self.transport.close()
            return
        self._last = self._last or b""
        self.transport.write_eof()
        self.flow.resume_reading()
        self._header_timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _time_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self._headers_are_late)

    def _headers_are_late(self) -> None:
        if self._in_headers:
            reason = f"the headers took more than {self.limits.header_timeout_s:g} s"
            self._refuse(Refused(408, "HeadersTooSlow", reason))
        else:
            self.transport.close()

    def _headers_came(self) -> None:
        self._awaits_headers = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _OneWrite:
    """The transport of one answer: it sends the head with the first part of the body, since a write costs 30 us."""

    __slots__ = ("_close", "_head", "_transport", "is_closing")

    def __init__(self, transport: Any, close: Callable[[], None] | None = None) -> None:
        self._transport, self.is_closing, self._close = transport, transport.is_closing, close or transport.close
        self._head: bytes | None = b""  # None once it is sent

    def write(self, data: bytes) -> None:
        if self.is_closing():  # a request behind this one made uvicorn forget it; TLS of asyncio raises
            return
        if self._head is None or (not self._head and data == b"HTTP/1.1 100 Continue\r\n\r\n"):
            self._transport.write(data)
        elif not self._head:
            self._head = data
        else:
            head, self._head = self._head, None
            # asyncio's writelines of Python 3.12 and 3.13 may neither pause its writer nor stop after a disconnection
            self._transport.write(b"".join((head, data)))

    def close(self) -> None:
        if self._head:
            self.write(b"")
        self._close()


def guarded_protocol(settings: ServiceSettings) -> type[GuardedProtocol]:
    """Return the protocol class with the limits of the settings."""
    each = min(settings.connections, settings.connections_per_address)
    return type(
        "GuardedProtocol", (GuardedProtocol,), {"limits": settings, "open": Connections(settings.connections, each)}
    )
