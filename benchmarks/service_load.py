"""Load for a server: the processes that are measured, and a client that costs little itself.

The server runs as users run it, `accelerant serve`, in a process of its own; the peer is a FastAPI application that
returns the bodies it gets, under the same HTTP server. The client keeps connections open and writes bytes that were
made before, so that on two cores it leaves one to the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from accelerant.errors import AccelerantError, MissingDependency

__all__ = ["Answer", "Connection", "Endpoint", "connections", "infer", "outputs_of", "run_loop", "started"]

_START_S = 120.0
_HEAD_LENGTH = b"inference-header-content-length"

_ECHO = """
import socket, sys
import uvicorn
from fastapi import FastAPI, Request, Response

app = FastAPI()

@app.post("/echo")
async def echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/octet-stream")

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen(1024)
print("listening on http://127.0.0.1:%d" % listener.getsockname()[1], file=sys.stderr, flush=True)
uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=600)).run(sockets=[listener])
"""


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Endpoint:
    """A server process that is measured."""

    process: subprocess.Popen[bytes]
    port: int

    def workers(self) -> list[int]:
        """Return the ids of its worker processes."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = []
        for child in children:
            with contextlib.suppress(OSError):
                if b"service.jobs.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
        return found

    def memory_mib(self) -> float:
        """Return the resident memory of the server and its workers."""
        pages = 0
        for pid in (self.process.pid, *self.workers()):
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * (os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096) / 2**20


@contextlib.contextmanager
def started(kind: str, device: str = "cpu", **settings: object) -> Iterator[Endpoint]:
    """Start "accelerant" with settings of the service, or "echo"; end it with SIGTERM.

    Raises MissingDependency without the extra `service`, and AccelerantError for a server that does not start, or
    ends with another status than 0.
    """
    for package in ("fastapi", "uvicorn", "sqlalchemy", "alembic"):
        if importlib.util.find_spec(package) is None:
            raise MissingDependency(package, "service", "the benchmark of the service")
    with tempfile.TemporaryDirectory(prefix="accelerant-bench-") as folder:
        log = Path(folder, "log")
        serve = ["-m", "accelerant", "serve", "--port", "0", "--directory", f"{folder}/state", "--device", device]
        variables = {f"ACCELERANT_SERVE_{name.upper()}": str(value) for name, value in settings.items()}
        with open(log, "wb") as file:
            command = [sys.executable, "-P", *(serve if kind == "accelerant" else ["-c", _ECHO])]
            process = subprocess.Popen(command, stderr=file, env={**os.environ, **variables})
        try:
            yield Endpoint(process, _port(process, log))
            process.send_signal(signal.SIGTERM)
            if (status := process.wait(60.0)) not in (0, -signal.SIGTERM):
                raise AccelerantError(f"the server ended with status {status}: {_end_of(log)}")
        finally:
            process.kill()
            process.wait()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        if found := re.search(r"listening on http://[^\"\s]+:(\d+)", log.read_text(errors="replace")):
            return int(found[1])
        time.sleep(0.02)
    raise AccelerantError(f"the server does not start: {_end_of(log)}")


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]


# --- the client ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """An HTTP answer; names of headers are in lower case."""

    status: int
    headers: Mapping[bytes, bytes]
    body: bytes

    def json(self) -> Any:
        """Return the body, read as JSON."""
        return json.loads(self.body)


class Connection(asyncio.Protocol):
    """A connection that is kept open, with one request at a time."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._length = -1  # of the answer's head and body, once known
        self._waiting: asyncio.Future[Answer] | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = transport  # type: ignore[assignment]  # a stream's

    def data_received(self, data: bytes) -> None:
        """Collect an answer."""
        self._buffer += data
        if self._length < 0 and (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            found = re.search(rb"\r\ncontent-length: *(\d+)", self._buffer[:end], re.IGNORECASE)
            self._length = end + 4 + (int(found[1]) if found else 0)
        if 0 <= self._length <= len(self._buffer) and self._waiting is not None and not self._waiting.done():
            head, _, body = bytes(self._buffer[: self._length]).partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            pairs = (line.partition(b":") for line in lines)
            headers = {name.lower(): value.strip() for name, _, value in pairs}
            del self._buffer[: self._length]
            self._length = -1
            self._waiting.set_result(Answer(int(first.split()[1]), headers, body))

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the request that waits."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(ConnectionError(f"the server closed the connection: {error}"))

    async def send(self, request: bytes) -> Answer:
        """Send a request and return its answer."""
        assert self._transport is not None  # for the type checker: the connection was made
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._waiting

    async def get(self, path: str) -> Answer:
        """Send a GET request."""
        return await self.send(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n".encode())


@contextlib.asynccontextmanager
async def connections(endpoint: Endpoint, count: int) -> AsyncIterator[list[Connection]]:
    """Open connections."""
    loop = asyncio.get_running_loop()
    opened = [await loop.create_connection(Connection, "127.0.0.1", endpoint.port) for _ in range(count)]
    try:
        yield [protocol for _, protocol in opened]
    finally:
        for transport, _ in opened:
            transport.close()


def infer(path: str, arrays: Mapping[str, np.ndarray], *, headers: str = "", **parameters: Any) -> bytes:
    """Return a request in KServe's binary format."""
    tensors = [
        {
            "name": name,
            "datatype": x.dtype.name.upper(),
            "shape": list(x.shape),
            "parameters": {"binary_data_size": x.nbytes},
        }
        for name, x in arrays.items()
    ]
    text = json.dumps({"parameters": {"binary_data_output": True, **parameters}, "inputs": tensors}).encode()
    body = text + b"".join(np.ascontiguousarray(x).tobytes() for x in arrays.values())
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/octet-stream\r\n{headers}"
        f"Inference-Header-Content-Length: {len(text)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def outputs_of(answer: Answer) -> bytes:
    """Return the bytes of the output tensors of an answer in KServe's binary format."""
    return answer.body[int(answer.headers.get(_HEAD_LENGTH, b"0")) :]


def run_loop(main: Callable[[], Any]) -> Any:
    """Run a coroutine function on uvloop where it is installed, as the servers do."""
    factory = None
    if importlib.util.find_spec("uvloop") is not None:
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main())
