"""uvicorn with the application and its limits, in this process."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn

from accelerant.errors import ConfigError
from accelerant.service.app import create_app
from accelerant.service.guard import guarded_protocol, reserve_of
from accelerant.service.jobs.service import JobService
from accelerant.service.keys import KeyStore
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import log_to

_LOG = logging.getLogger("accelerant.service")
_FILES = 512
"""Files beside connections: of jobs, the store and the workers."""
_FETCH_S = 3.0
"""Time after the last job of a drain in which its client, which looks every two seconds, finds that it has ended."""


class _Server(uvicorn.Server):
    """uvicorn's server, which says where it listens.

    From the first signal on it is not ready and takes no new work, but answers everything else until its jobs have
    ended, or for `drain_s`. A second signal ends that wait: jobs go back to the queue.
    """

    _drain: asyncio.Task[None]

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start as uvicorn does, but for the traceback of a failed start, which `run` raises."""
        log = logging.getLogger("uvicorn.error")
        log.addFilter(self._is_not_failure)
        try:
            await super().startup(sockets)
        except SystemExit:  # of uvicorn from 0.50 on; `run` raises the reason
            self.should_exit = True
        finally:
            log.removeFilter(self._is_not_failure)

    def _is_not_failure(self, record: logging.LogRecord) -> bool:
        return self.config.app.state.failure is None  # type: ignore[union-attr]  # a FastAPI application

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Take no new work, and end what would not end by itself."""
        state = self.config.app.state  # type: ignore[union-attr]  # a FastAPI application
        # not here: the signal may have come while the log was being written, which is not reentrant
        later = asyncio.get_running_loop().call_soon_threadsafe
        if not state.draining:
            state.draining = True
            for close in state.on_stop:
                close()
            later(_LOG.info, "stopping on signal %d", sig)
            if self.started:
                later(self._begin_drain, state.jobs, sig)
                return
        elif not self.should_exit:
            later(_LOG.info, "signal %d: the jobs that run go back to the queue", sig)
            later(state.jobs.hurry)
            return
        super().handle_exit(sig, frame)
        if self.force_exit:  # a second Ctrl-C cancels the application, which is no error to log
            logging.getLogger("uvicorn.error").addFilter(lambda record: "CancelledError" not in record.getMessage())

    def _begin_drain(self, jobs: JobService, sig: int) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drained(jobs, sig))

    async def _drained(self, jobs: JobService, sig: int) -> None:
        """Serve until the jobs have ended, then let uvicorn stop listening."""
        jobs.stop_accepting()
        settings: ServiceSettings = self.config.app.state.settings  # type: ignore[union-attr]
        await jobs.settle(settings.drain_s, _FETCH_S)
        jobs.end_calls()
        self.config.timeout_graceful_shutdown = max(1, math.ceil(jobs.drain_left_s(settings.drain_s)))
        super().handle_exit(sig, None)

    def _log_started_message(self, listeners: Any) -> None:
        scheme = "https" if self.config.ssl_certfile else "http"
        for server in self.servers:
            for connection in server.sockets:
                host, port = connection.getsockname()[:2]
                _LOG.info("listening on %s://%s:%d", scheme, f"[{host}]" if ":" in host else host, port)


def require_keys(settings: ServiceSettings) -> None:
    """Raise ConfigError if others than this machine's programs would reach the service, and there are no API keys."""
    if not settings.is_loopback and not KeyStore(settings.keys_file).read():
        raise ConfigError(
            f"host {settings.host} is reachable from other machines, and {settings.keys_file} has no API keys: make "
            "one with `accelerant keys create --name NAME --scope admin`, or listen on 127.0.0.1"
        )


def _require_address(settings: ServiceSettings) -> None:
    """Raise ConfigError if the service cannot listen on its address, before workers start."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        socket.create_server((settings.host, settings.port), family=family).close()
    except OSError as error:
        address = f"host {settings.host}, port {settings.port}"
        raise ConfigError(f"cannot listen on {address}: {error.strerror or error}") from None


def _allow_files(settings: ServiceSettings) -> None:
    """Let this process open as many files as its connections are, and those of its work, where the system does."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.connections + reserve_of(settings.connections) + _FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            _LOG.warning("%d open files are allowed, %d are needed for `connections`", allowed, wanted)


def run(settings: ServiceSettings) -> None:
    """Serve until a signal ends it; raise ConfigError or ServiceError, with the reason, if it cannot start."""
    require_keys(settings)
    _require_address(settings)
    requests = log_to(sys.stderr, settings.log)
    _allow_files(settings)
    if not settings.is_loopback and not settings.tls_certificate:
        _LOG.warning("without TLS, keys and data travel in the clear: set tls_certificate, or let a proxy do it")
    app = create_app(settings)
    app.state.observers.append(requests)
    protocol = guarded_protocol(settings)
    config = uvicorn.Config(
        app, host=settings.host, port=settings.port, http=protocol, ws="none",
        log_config=None, access_log=False, server_header=False, proxy_headers=False, lifespan="on",
        timeout_keep_alive=30,
        ssl_certfile=settings.tls_certificate or None, ssl_keyfile=settings.tls_key or None,
    )  # fmt: skip
    try:
        config.load()
    except OSError as error:  # an error of TLS is one, and names no file
        raise ConfigError(
            f"tls_certificate {settings.tls_certificate} and tls_key {settings.tls_key} must be the PEM files of a "
            f"certificate and its key: {error.strerror or error}"
        ) from None
    protocol.tls, config.ssl = config.ssl, None  # the protocol makes the handshakes
    server = _Server(config)
    signal.signal(signal.SIGTERM, lambda number, frame: None)  # uvicorn raises it again after the drain: status 0
    try:
        server.run()
    finally:
        requests.flush()
    if not server.started:
        raise app.state.failure or SystemExit(1)
