"""The layer between the network and the routes: limits, keys, request ids, logs, spans.

`GuardedProtocol` bounds connections, and the time and bytes of headers. `Guard` is ASGI middleware: it identifies each
request, checks its key and its origin, bounds the requests in progress, and makes a span where OpenTelemetry is set
up. `read_body` reads a body within its limits.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
import math
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from accelerant.runtime.files import escaped
from accelerant.service.errors import Refused, refusal_of
from accelerant.service.keys import ANONYMOUS, Key, KeyStore
from accelerant.service.settings import ServiceSettings

__all__ = [
    "Guard",
    "GuardedProtocol",
    "RequestRecord",
    "authorize",
    "error_body",
    "guarded_protocol",
    "log_to",
    "read_body",
    "token_of",
]

_LOG = logging.getLogger("accelerant.service")
_PROCESS, _NUMBERS = secrets.token_hex(4), itertools.count()
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_PUBLIC = frozenset({"/", "/v2/health/live", "/v2/health/ready", "/openapi.json", "/docs", "/favicon.ico"})
_ALWAYS = frozenset({"/v2/health/live", "/v2/health/ready", "/metrics"})
"""Paths that are served under overload: a supervisor would end a server that does not answer them."""
_FORWARDED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
_PIPELINED_MOST = 16
_PART_BYTES = 1 << 20
"""Longer answers are sent in parts, each after the one before: uvicorn takes all of a part into memory."""
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})

Headers = Iterable[tuple[bytes, bytes]]
Receive = Callable[[], Any]
Send = Callable[[Any], Any]
Scope = MutableMapping[str, Any]


@dataclass(slots=True)
class RequestRecord:
    """A request that has been answered.

    Attributes:
        held_bytes: what it takes in memory now of the bytes that `Inference` bounds.
        route: the path's template; "" if no route matched.
        operation: name of the operation, "" for other routes.
        backend: backend that ran it; "" where none did.
    """

    request_id: str
    method: str
    path: str
    route: str = ""
    operation: str = ""
    backend: str = ""
    key_id: str = ""
    status: int = 0
    seconds: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    held_bytes: int = 0


def error_body(kind: str, message: str, request_id: str) -> bytes:
    """Return the JSON of an error: KServe's `error`, the error's class, and the id of the request."""
    return json.dumps({"error": message, "type": kind, "request_id": request_id}).encode()


class Guard:
    """ASGI middleware. The key and the record of a request are `scope["state"]["key"]` and `["record"]`.

    Attributes:
        observers: called with the record of each answered request.
    """

    def __init__(
        self, app: Any, *, settings: ServiceSettings, keys: KeyStore, observers: list[Any], inference: Any = None
    ) -> None:
        self.app, self.settings, self.keys, self.observers = app, settings, keys, observers
        self.inference = inference
        self._loopback = settings.is_loopback
        self._running = 0
        self._span = _tracing()

    async def __call__(self, scope: Scope, receive: Receive, send: Callable[[Any], Any]) -> None:
        """Serve a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        start = time.perf_counter()
        headers = scope["headers"]
        fields = dict(headers)
        given = fields.get(b"x-request-id")
        request_id = given.decode() if given and _REQUEST_ID.fullmatch(given) else f"{_PROCESS}{next(_NUMBERS):08x}"
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
                    name = _inferred(scope)
                    if name is None:
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
                    await _send(answer, refused.status, lines, error_body(refused.kind, str(refused), request_id))
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
            raise Refused(431, "HeadersTooLarge", f"the headers have more than {self.settings.header_bytes:,} bytes")
        origin, host = fields.get(b"origin"), fields.get(b"host", b"").decode("latin-1")
        if origin is not None and _netloc(origin.decode("latin-1")) != host:
            raise Refused(403, "Forbidden", "pages of other sites may not call this service")
        token = token_of(fields)
        if token is None and not self.keys.exists and self._loopback:
            if fields.keys() & _FORWARDED:
                raise Refused(403, "Forbidden", "a proxy's requests may be anybody's: make API keys for them")
            if not _is_local(host):
                raise Refused(403, "Forbidden", f"host {host!r} is not this machine's: without API keys, use 127.0.0.1")
            return ANONYMOUS
        path = scope["path"]
        if token is None and (path in _PUBLIC or path.startswith("/dashboard/")) and scope["method"] in ("GET", "HEAD"):
            return Key("")
        key = self.keys.verify(token) if token is not None else None
        if key is None:
            raise Refused(401, "Unauthorized", "give a valid API key: Authorization: Bearer acl_...")
        wait_s = self.keys.wait_s(key)
        if wait_s:
            raise Refused(429, "RateLimited", f"the key allows {key.rate:g} requests a second", retry_after_s=wait_s)
        return key


def _netloc(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


@functools.lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    """Return whether a Host header names this machine: a page of another site cannot send one that does."""
    try:
        return urlsplit(f"//{host}").hostname in _LOCAL_NAMES
    except ValueError:
        return False


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


def allow(scope: Scope, needed: str) -> Key:
    """Return the key of a request; Refused if it lacks a scope of SCOPES."""
    key: Key = scope["state"]["key"]
    if not key.allows(needed):
        status, kind = (403, "Forbidden") if key.id else (401, "Unauthorized")
        raise Refused(status, kind, f"the API key does not have the scope {needed!r}")
    return key


def authorize(request: HTTPConnection, scope: str) -> Key:
    """Return the key of a request; Refused if it lacks a scope of SCOPES."""
    return allow(request.scope, scope)


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(scope: Scope, receive: Receive, settings: ServiceSettings, hold: Callable[[int], None]) -> bytes:
    """Return a request's body; Refused if it is too large, compressed, slow, or ends early.

    Args:
        hold: called with the size of each part.
    """
    state = scope["state"]
    fields, record = state["fields"], state["record"]
    if fields.get(b"content-encoding") not in (None, b"identity"):
        raise Refused(415, "UnsupportedMediaType", "compressed bodies are not read: send it as it is")
    most = settings.body_bytes
    declared = fields.get(b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > most:
        raise _too_large(most)
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
                raise Refused(
                    408, "BodyTooSlow", f"{record.bytes_in:,} bytes of the body came in {spent_s:.0f} s"
                ) from None
        if message["type"] == "http.disconnect":
            raise Refused(400, "Disconnected", "the body ended early")
        part, more = message.get("body", b""), message.get("more_body", False)
        record.bytes_in += len(part)
        hold(len(part))
        if record.bytes_in > most:
            raise _too_large(most)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(most: int) -> Refused:
    return Refused(413, "BodyTooLarge", f"the body has more than {most:,} bytes")


# --- connections -----------------------------------------------------------------------------------------------------


class GuardedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits of connections, and of the bytes and time of a request's headers."""

    limits: ServiceSettings

    def connection_made(self, transport: Any) -> None:
        """Refuse a connection beyond the limit; expect headers soon."""
        super().connection_made(transport)
        self._header_bytes, self._in_headers, self._awaits_headers = 0, False, True
        self._header_timer: asyncio.TimerHandle | None = None
        connection = transport.get_extra_info("socket")
        over_tcp = connection is not None and (not hasattr(socket, "AF_UNIX") or connection.family != socket.AF_UNIX)
        if over_tcp and hasattr(socket, "TCP_USER_TIMEOUT"):
            # closes connections whose peer does not read its answer
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * self.limits.body_timeout_s))
        if len(self.connections) > self.limits.connections:
            transport.close()
            return
        self._time_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._headers_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count bytes until the headers are complete, also those of a request that follows one in progress.

        The part of the data in which a request begins is not counted: the one before it may end there.
        """
        if not self._awaits_headers and (self.cycle is None or self.cycle.response_complete):
            self._awaits_headers, self._header_bytes = True, 0
        if self._in_headers or self._awaits_headers:
            self._header_bytes += len(data)
        super().data_received(data)
        if not (self._in_headers or self._awaits_headers):
            return
        if self._awaits_headers and self._header_timer is None:
            self._time_headers()
        if self._header_bytes > self.limits.header_bytes:
            self._headers_came()
            if self.cycle is not None and not self.cycle.response_complete:
                self.transport.abort()  # an answer is being written
                return
            body = b"the headers are too large"
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-type: text/plain\r\n"
                b"content-length: %d\r\n\r\n%s" % (len(body), body)
            )
            self.transport.close()

    def on_message_begin(self) -> None:
        """Count from here."""
        super().on_message_begin()
        self._in_headers, self._header_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header; forget those that follow a chunked body, which nobody reads and no limit bounds."""
        if self._in_headers:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the timer; bound the requests that wait on this connection."""
        self._in_headers = False
        self._headers_came()
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # whose body is not written
            self.cycle.transport = _OneWrite(self.transport)  # type: ignore[assignment]  # all that a cycle uses
        if len(self.pipeline) > _PIPELINED_MOST:
            self.transport.abort()
            raise ValueError(f"more than {_PIPELINED_MOST} requests wait on a connection")  # ends the parsing

    def on_message_complete(self) -> None:
        """Tell `read_body` that the body is here."""
        super().on_message_complete()
        self.scope["state"]["arrived"] = True

    def _time_headers(self) -> None:
        self._header_timer = self.loop.call_later(self.limits.header_timeout_s, self.transport.close)

    def _headers_came(self) -> None:
        self._awaits_headers = False
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class _OneWrite:
    """The transport of one answer: it sends the head with the first part of the body, since a write costs 30 us."""

    __slots__ = ("_head", "_transport", "is_closing")

    def __init__(self, transport: Any) -> None:
        self._transport, self.is_closing = transport, transport.is_closing
        self._head: bytes | None = b""  # None once it is sent

    def write(self, data: bytes) -> None:
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
        self._transport.close()


def guarded_protocol(settings: ServiceSettings) -> type[GuardedProtocol]:
    """Return the protocol class with the limits of the settings."""
    return type("GuardedProtocol", (GuardedProtocol,), {"limits": settings})


# --- logs and spans --------------------------------------------------------------------------------------------------


class _Formatter(logging.Formatter):
    """One line a record: JSON, or text."""

    def __init__(self, style: str) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")
        self._json = style == "json"

    def format(self, entry: logging.LogRecord) -> str:
        if entry.exc_info and isinstance(error := entry.exc_info[1], Refused):  # uvicorn's, of an answer that had begun
            message = f"{entry.getMessage().strip()}: {error}"
            entry = logging.makeLogRecord({**vars(entry), "msg": message, "args": (), "exc_info": None})
        if not self._json:
            return super().format(entry).replace("\n", "\n  ")
        line: dict[str, Any] = {"time": round(entry.created, 6), "level": entry.levelname.lower()}
        line |= {"logger": entry.name, "message": entry.getMessage()}
        if entry.exc_info:
            line["exception"] = self.formatException(entry.exc_info)
        return json.dumps(line)


_quoted = json.encoder.encode_basestring_ascii
_LOGGED_TEXTS = ("request_id", "method", "path", "route", "operation", "backend", "key_id")


class RequestLog:
    """An observer that writes a line for each request, those of a twentieth of a second together."""

    def __init__(self, stream: Any, style: str) -> None:
        self._stream, self._json = stream, style == "json"
        self._lines: list[str] = []

    def __call__(self, record: RequestRecord) -> None:
        """Write a line soon."""
        if not self._lines:
            asyncio.get_running_loop().call_later(0.05, self.flush)
        if self._json:
            fields = [f'"{name}": {_quoted(getattr(record, name))}' for name in _LOGGED_TEXTS]  # json.dumps: 1 us each
            start = f'{{"time": {time.time():.6f}, "level": "info", "seconds": {record.seconds:.6f}, '
            numbers = f'"status": {record.status}, "bytes_in": {record.bytes_in}, "bytes_out": {record.bytes_out}'
            self._lines.append(f"{start}{', '.join(fields)}, {numbers}}}\n")
        else:
            now, path = time.strftime("%Y-%m-%d %H:%M:%S"), escaped(record.path)
            took = f"{record.seconds * 1e3:.1f} ms"
            self._lines.append(f"{now} {record.status} {record.method} {path} {took} {record.request_id}\n")

    def flush(self) -> None:
        """Write the lines now; what cannot be written, to a full disk or a closed pipe, is lost."""
        text = "".join(self._lines)
        self._lines.clear()  # first: lines that stayed would be collected for ever
        with suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def log_to(stream: Any, style: str) -> RequestLog:
    """Write the logs of the service and of uvicorn to a stream; return the observer that logs requests there."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Formatter(style))
    for name in ("accelerant.service", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
    return RequestLog(stream, style)


_NO_SPAN = nullcontext()


def _tracing() -> Callable[[RequestRecord, Headers], AbstractContextManager[Any]]:
    """Return a maker of spans, or of nothing where OpenTelemetry is not installed and set up."""
    try:
        from opentelemetry import propagate, trace
    except ImportError:
        return lambda record, headers: _NO_SPAN
    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # no exporter has been set
        return lambda record, headers: _NO_SPAN
    tracer = trace.get_tracer("accelerant.service")

    def span(record: RequestRecord, headers: Headers) -> AbstractContextManager[Any]:
        carrier = {key.decode("latin-1"): value.decode("latin-1") for key, value in headers}
        attributes = {"http.request.method": record.method, "url.path": record.path, "request_id": record.request_id}
        found: AbstractContextManager[Any] = tracer.start_as_current_span(
            f"{record.method} {record.path}", propagate.extract(carrier), trace.SpanKind.SERVER, attributes
        )
        return found

    return span
