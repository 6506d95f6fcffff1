"""The HTTP application: KServe v2's protocol, jobs, and the bodies of both.

POST /v2/models/NAME/infer runs an operation. Calls that are estimated to be short are answered with their result;
others, and those with the header `Prefer: respond-async`, with 202 and a job. `run` serves it by uvicorn.
"""

import asyncio
import gc
import json
import logging
import math
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.routing import Match

from accelerant._version import __version__
from accelerant.errors import ConfigError
from accelerant.service import dashboard
from accelerant.service.bodies import ARROW, BINARY, JSON, NPY, SAFETENSORS
from accelerant.service.errors import Refused, refusal_of
from accelerant.service.guard import Guard, body_of, guarded_protocol, reserve_of
from accelerant.service.infer import Answer, Inference, answer_format, operation_named, written
from accelerant.service.jobs.service import JobService
from accelerant.service.jobs.wire import JobState
from accelerant.service.keys import Key, KeyStore
from accelerant.service.served_models import routes as served_models
from accelerant.service.served_models.process import ServedModels
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import RequestRecord, Telemetry, log_to

# --- routes ----------------------------------------------------------------------------------------------------------
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in (
        (400, "The request is malformed"), (401, "No valid API key"), (403, "The key lacks a scope"),
        (404, "There is no such thing"), (406, "No format that is accepted"), (408, "Too slow"),
        (409, "The job is not in a state for this"), (413, "Too large"), (415, "A format that is not read"),
        (422, "Inputs or parameters that the operation refuses"), (429, "The queue is full, or the rate is exceeded"),
        (503, "Not ready, or a device failed"), (504, "Past the deadline"),
    )
}  # fmt: skip

_TENSOR_SCHEMA = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": {"type": "string"},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        "datatype": {"type": "string"},
        "parameters": {"type": "object"},
        "data": {"type": "array"},
    },
}
_INFER_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "parameters": {"type": "object"},
        "inputs": {"type": "array", "items": _TENSOR_SCHEMA},
        "outputs": {"type": "array", "items": {"type": "object"}},
    },
}
_INFER_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            JSON: {"schema": _INFER_SCHEMA},
            **{
                format: {"schema": {"type": "string", "format": "binary"}}
                for format in (BINARY, SAFETENSORS, NPY, ARROW)
            },
        },
    }
}

_router = APIRouter(responses=_ERRORS)


@_router.get("/v2/health/live", tags=["health"])
async def live() -> dict[str, bool]:
    """Answer that the server runs."""
    return {"live": True}


@_router.get("/v2/health/ready", tags=["health"])
async def ready(request: Request) -> Response:
    """Say if the server takes work: a worker is alive, so are the served models, and the server is not stopping."""
    alive = any(worker.alive for worker in request.app.state.jobs.stats().workers)
    alive &= all(process.ready.is_set() for process in request.app.state.served.processes.values())
    taken = alive and not request.app.state.draining
    return JSONResponse({"ready": taken}, 200 if taken else 503)


@_router.get("/v2", tags=["models"])
async def server() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    return {"name": "accelerant", "version": __version__, "extensions": ["binary_tensor_data"]}


@_router.get("/v2/models", tags=["models"])
async def models(request: Request) -> dict[str, Any]:
    """The operations, one model each."""
    operations = request.app.state.operations.values()
    return {"models": [{"name": one.name, "summary": one.summary, "scope": one.scope} for one in operations]}


@_router.get("/v2/models/{name}/versions/1", include_in_schema=False)
@_router.get("/v2/models/{name}", tags=["models"])
async def model(name: str, request: Request) -> dict[str, Any]:
    """Inputs, outputs and parameters (a JSON schema) of an operation."""
    operation = operation_named(request.app.state.operations, name)
    tensors = {
        key: [
            {"name": spec.name, "datatype": spec.datatypes[0], "datatypes": spec.datatypes, "shape": spec.shape}
            for spec in specs
        ]
        for key, specs in (("inputs", operation.inputs), ("outputs", operation.outputs))
    }
    return {
        "name": name, "versions": ["1"], "platform": "accelerant", "summary": operation.summary, **tensors,
        "parameters": operation.parameters.model_json_schema(),
    }  # fmt: skip


@_router.get("/v2/models/{name}/versions/1/ready", include_in_schema=False)
@_router.get("/v2/models/{name}/ready", tags=["models"])
async def model_ready(name: str, request: Request) -> Response:
    """Say if an operation takes calls."""
    operation_named(request.app.state.operations, name)
    return await ready(request)


@_router.post("/v2/models/{name}/infer", tags=["models"], openapi_extra=_INFER_BODY)
async def infer(name: str, request: Request) -> Response:
    """Run an operation: the result, or 202 with a job if it takes long or `Prefer: respond-async` is given.

    The guard calls `Inference` itself; this route describes it.
    """
    answer: Answer = await request.app.state.inference.answer(name, request.scope, request.receive)
    return answer.response()


@_router.get("/jobs", tags=["jobs"], response_model=dict[str, Any])
async def list_jobs(
    request: Request, state: JobState | None = None, limit: int = Query(100, ge=1, le=1000), before: str | None = None
) -> Response:
    """Jobs of the key, the newest first."""
    jobs = await request.app.state.jobs.list(_owner(request).key_id, state, limit, before)
    return Response(json.dumps({"jobs": [vars(job) for job in jobs]}), media_type=JSON)


def _owner(request: Request) -> Key:
    key: Key = request.scope["state"]["key"]
    if not key.id:
        raise Refused(401, "Unauthorized", "give a valid API key: Authorization: Bearer acl_...")
    return key


@_router.get("/jobs/{id}", tags=["jobs"])
async def show_job(id: str, request: Request) -> dict[str, Any]:
    """State and progress of a job."""
    return asdict(await request.app.state.jobs.get(id, _owner(request).key_id))


@_router.get("/jobs/{id}/result", tags=["jobs"])
async def job_result(id: str, request: Request) -> Response:
    """The outputs of a job, in the format of Accept."""
    owner, jobs, inference = _owner(request).key_id, request.app.state.jobs, request.app.state.inference
    state = request.scope["state"]
    format = answer_format(state["fields"].get(b"accept", b"*/*").decode("latin-1"), JSON)
    job = await jobs.get(id, owner)
    operation = operation_named(request.app.state.operations, job.operation)
    inference.hold(state["record"], job.result_bytes or 0)
    return (await written(operation, await jobs.result(id, owner), format, inference.settings.json_bytes)).response()


@_router.delete("/jobs/{id}", tags=["jobs"])
async def cancel_job(id: str, request: Request) -> dict[str, Any]:
    """Cancel a job: at once if it waits, else between its parts."""
    return asdict(await request.app.state.jobs.cancel(id, _owner(request).key_id))


# --- the application -------------------------------------------------------------------------------------------------
async def _on_error(request: Request, error: Exception) -> Response:
    """Answer an error of FastAPI; the guard answers others."""
    refused = refusal_of(error)
    if isinstance(error, HTTPException):
        refused = Refused(error.status_code, "HttpError", str(error.detail))
        if error.status_code == 405:
            known = (error.headers or {}).get("Allow", "GET")  # of one route of the path
            allowed = {"Allow": ", ".join(_methods_of(request, known.split(", ")))}
            if request.method == "OPTIONS":
                return Response(None, 204, allowed)
            error.headers = allowed
    body = body_of(refused, request.scope, request.scope["state"]["record"].request_id)
    return Response(body, refused.status, getattr(error, "headers", None), JSON)


def _methods_of(request: Request, known: list[str]) -> list[str]:
    """Return the methods of all routes of a path."""
    found, asked = {*known, "OPTIONS"}, {**request.scope, "method": ""}
    for route in (*_router.routes, *served_models.router.routes, *dashboard.router.routes):
        if isinstance(route, APIRoute) and route.matches(asked)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found | ({"HEAD"} if "GET" in found else set()))


def create_app(settings: ServiceSettings) -> FastAPI:
    """Return the application of a service; its lifespan starts and drains the workers."""
    observers: list[Callable[[RequestRecord], None]] = []
    keys = KeyStore(settings.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            await app.state.jobs.start()
            await app.state.served.start()
        except Exception as error:
            app.state.failure = error
            await app.state.jobs.drain(0.0)
            raise
        try:
            with Telemetry(app.state.jobs, settings) as telemetry:
                telemetry.register(app.state.served)
                app.state.telemetry = telemetry
                observers.append(telemetry.observe)
                loop = asyncio.get_running_loop()
                app.state.on_stop += [
                    telemetry.end_events,
                    partial(loop.call_soon_threadsafe, app.state.jobs.stop_claiming),
                ]
                gc.collect()
                gc.freeze()  # a later collection would stop all requests while it looks at every module
                yield
        finally:
            app.state.draining = True
            await app.state.served.close()
            await app.state.jobs.drain(settings.drain_s)

    app = FastAPI(
        title="Accelerant", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None,
        summary="Field operations, transforms, proofs, neural operations and private computing over HTTP",
    )  # fmt: skip
    app.state.settings, app.state.keys, app.state.observers = settings, keys, observers
    app.state.on_stop, app.state.failure = [], None
    app.state.jobs, app.state.draining = JobService(settings), False
    app.state.served = ServedModels(settings)
    app.state.operations = dict(app.state.jobs.operations)
    app.state.inference = Inference(settings, app.state.operations, app.state.jobs)
    for error in (RequestValidationError, HTTPException):
        app.add_exception_handler(error, _on_error)
    app.include_router(_router)
    app.include_router(served_models.router, responses=_ERRORS)
    app.include_router(dashboard.router, responses=_ERRORS)
    _describe_errors(app)
    app.add_middleware(Guard, settings=settings, keys=keys, observers=observers, inference=app.state.inference)
    outer = app.build_middleware_stack()
    app.middleware_stack = outer.app  # type: ignore[attr-defined]  # the guard answers errors, as Starlette's outer one would
    return app


def _describe_errors(app: FastAPI) -> None:
    inner = app.openapi

    def openapi() -> dict[str, Any]:
        document, names = inner(), ["error", "type", "request_id"]
        properties = {name: {"type": "string"} for name in names}
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas["Error"] = {"type": "object", "required": names, "properties": properties}
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does it


# --- uvicorn with the application and its limits ----------------------------------------------------------------------
_LOG = logging.getLogger("accelerant.service")
_FILES = 512  # files beside connections: of jobs, the store and the workers
_FETCH_S = 3.0
"""Time after the last job of a drain in which its client, which looks every two seconds, finds that it has ended."""


class _Server(uvicorn.Server):
    """uvicorn's server; the first signal ends new work, and the rest within `drain_s`, the second ends that wait."""

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
        state = self.config.app.state  # type: ignore[union-attr]
        settings: ServiceSettings = state.settings
        served: ServedModels = state.served
        served.draining = True
        left_s = partial(jobs.drain_left_s, settings.drain_s)
        await asyncio.gather(jobs.settle(settings.drain_s, _FETCH_S), served.settle(left_s))
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
    """Raise the limit of open files to what the connections and the service's own files need, if the system permits."""
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
