"""The HTTP application: KServe v2's protocol, jobs, and the bodies of both.

POST /v2/models/NAME/infer runs an operation. Calls that are estimated to be short are answered with their result;
others, and those with the header `Prefer: respond-async`, with 202 and a job.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from accelerant._version import __version__
from accelerant.errors import (
    AccelerantError,
    BackendUnavailable,
    CompileError,
    DeviceLost,
    FormatError,
    LaunchError,
    MissingDependency,
    OutOfMemory,
    TimeLimitExceeded,
)
from accelerant.service import dashboard
from accelerant.service.bodies import (
    ARROW,
    BINARY,
    JSON,
    NPY,
    SAFETENSORS,
    Values,
    datatype_of,
    read_kserve,
    read_tensors,
    write_kserve,
    write_tensors,
)
from accelerant.service.errors import Refused, ServiceError
from accelerant.service.guard import Guard, RequestRecord, authorize, error_body, read_body
from accelerant.service.jobs.model import Job, JobRequest, JobState
from accelerant.service.jobs.service import JobService
from accelerant.service.keys import Key, KeyStore
from accelerant.service.operations import ServedOperation, served
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import Telemetry

__all__ = ["create_app"]

_LENGTH = "inference-header-content-length"
_IN_THREAD_BYTES = 1 << 20
"""Bodies from this size are read, and results written, in a thread: the event loop answers others meanwhile."""

_ENVELOPE = ("priority", "timeout", "binary_data_output")
_UNAVAILABLE = (BackendUnavailable, CompileError, DeviceLost, LaunchError, OutOfMemory)


# --- the call --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Call:
    """A request that has been read and checked.

    Attributes:
        id: KServe's id, which the answer repeats.
        binary: which outputs are bytes in a KServe answer.
        format: of the answer.
    """

    request: JobRequest
    id: str | None
    binary: bool | frozenset[str]
    format: str
    is_job: bool


def _media_type(request: Request) -> str:
    return request.headers.get("content-type", JSON).partition(";")[0].strip().lower()


def _answer_format(accept: str, usual: str) -> str:
    """Return the first format that the client accepts; Refused if none is."""
    for part in accept.split(","):
        wanted = part.partition(";")[0].strip().lower()
        if wanted in (JSON, BINARY, SAFETENSORS, NPY, ARROW):
            return wanted
        if wanted in ("", "*/*", "application/*"):
            return usual
    raise Refused(406, "NotAcceptable", f"answers are {JSON}, {BINARY}, {SAFETENSORS}, {NPY} or {ARROW}")


def _read(request: Request, operation: ServedOperation, key: Key, body: bytes) -> _Call:
    """Return the call that a body asks for; FormatError, ValidationError or another error of the inputs."""
    settings: ServiceSettings = request.app.state.settings
    media, length = _media_type(request), request.headers.get(_LENGTH)
    identity, usual = None, media
    binary: bool | frozenset[str] = False
    names = [spec.name for spec in operation.inputs]
    if length is not None or media in (JSON, BINARY):
        if length is not None and not length.isdigit():
            raise FormatError(f"Inference-Header-Content-Length must be a whole number, got {length[:80]!r}")
        head, values = read_kserve(
            body, int(length) if length is not None else None, "inputs", most_json=settings.json_bytes
        )
        identity, parameters = head.get("id"), head.get("parameters", {})
        if not isinstance(parameters, dict) or not isinstance(identity, str | None):
            raise FormatError("parameters must be an object, and id a string")
        binary = _binary_outputs(head, parameters)
        usual = BINARY if binary else JSON
    elif media in (SAFETENSORS, NPY, ARROW):
        values, parameters = read_tensors(media, body, names), dict(request.query_params)
    else:
        raise Refused(415, "UnsupportedMediaType", f"bodies are {JSON}, {BINARY}, {SAFETENSORS}, {NPY} or {ARROW}")
    given = {name: value for name, value in parameters.items() if name not in _ENVELOPE}
    model = operation.parameters.model_validate(given)
    inputs = _inputs(operation, values)
    operation.check(inputs, model)
    size = operation.result_bytes(inputs, model)
    if size > settings.result_bytes:
        raise Refused(413, "ResultTooLarge", f"the result takes {size:,} bytes; the limit is {settings.result_bytes:,}")
    cost_s = operation.cost(inputs, model)
    asked = JobRequest(
        operation.name,
        operation.place(model),
        inputs,
        key_id=key.id,
        priority=_number(parameters, "priority", -100, 100) or 0,
        deadline_s=_deadline_s(parameters, settings, operation),
        request_id=request.scope["state"]["record"].request_id,
        cost_s=cost_s,
    )
    is_job = operation.resumable or cost_s > settings.short_s or "respond-async" in request.headers.get("prefer", "")
    answer = _answer_format(request.headers.get("accept", "*/*"), usual)
    return _Call(asked, identity, binary, answer, is_job)


def _number(parameters: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    try:
        number = int(value) if isinstance(value, (int, str)) and not isinstance(value, bool) else least - 1
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise FormatError(f"{name} must be a whole number from {least} to {most}, got {str(value)[:80]!r}")
    return number


def _deadline_s(parameters: Mapping[str, Any], settings: ServiceSettings, operation: ServedOperation) -> float:
    """Return the seconds that a call may take: the parameter `timeout` in microseconds, or the limit."""
    most = settings.train_deadline_s if operation.resumable else settings.deadline_s
    timeout = _number(parameters, "timeout", 1, 2**63)
    return most if timeout is None else min(most, timeout / 1e6)


def _binary_outputs(head: Mapping[str, Any], parameters: Mapping[str, Any]) -> bool | frozenset[str]:
    outputs = head.get("outputs")
    if outputs is None:
        return parameters.get("binary_data_output") is True
    if not isinstance(outputs, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("name"), str) and isinstance(entry.get("parameters", {}), dict)
        for entry in outputs
    ):
        raise FormatError('"outputs" must be a list of objects with a name')
    return frozenset(entry["name"] for entry in outputs if entry.get("parameters", {}).get("binary_data") is True)


def _inputs(operation: ServedOperation, values: Values) -> dict[str, np.ndarray[Any, Any]]:
    """Return the operation's inputs, in its order; FormatError for a missing, unknown or ill-typed one."""
    specs = {spec.name: spec for spec in operation.inputs}
    unknown = values.keys() - specs.keys()
    if unknown:
        raise FormatError(f"{operation.name} has no input {min(unknown)[:80]!r}; it has {', '.join(specs) or 'none'}")
    inputs = {}
    for name, spec in specs.items():
        if name not in values:
            if spec.optional:
                continue
            raise FormatError(f"input {name!r} of {operation.name} is missing; it takes {', '.join(specs)}")
        value = values[name]
        datatype = datatype_of(value)
        if spec.datatypes == ("BYTES",):
            if datatype not in ("BYTES", "UINT8"):
                raise FormatError(f"input {name!r} must be BYTES, got {datatype}")
            value = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value.reshape(-1)
        elif datatype not in spec.datatypes or isinstance(value, bytes):
            raise FormatError(f"input {name!r} must be {' or '.join(spec.datatypes)}, got {datatype}")
        inputs[name] = value
    return inputs


def _write(
    operation: ServedOperation, results: Mapping[str, np.ndarray[Any, Any]], call: _Call | None, format: str
) -> Response:
    """Return the answer with an operation's outputs."""
    texts = {spec.name for spec in operation.outputs if spec.datatypes == ("BYTES",)}
    values: Values = {name: x.tobytes() if name in texts else x for name, x in results.items()}
    if format not in (JSON, BINARY):
        return Response(write_tensors(format, values), media_type=format)
    head: dict[str, Any] = {"model_name": operation.name, "model_version": "1"}
    if call is not None and call.id is not None:
        head["id"] = call.id
    binary: bool | frozenset[str] = call.binary if call is not None and call.binary else format == BINARY
    content, length = write_kserve(head, "outputs", values, binary)
    if length is None:
        return Response(content, media_type=JSON)
    return Response(content, media_type=BINARY, headers={_LENGTH: str(length)})


async def _maybe_in_thread(size: int, call: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(call) if size >= _IN_THREAD_BYTES else call()


# --- routes ----------------------------------------------------------------------------------------------------------

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": text, "content": {JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}}
    for status, text in (
        (400, "The request is malformed"), (401, "No valid API key"), (403, "The key lacks a scope"),
        (404, "There is no such thing"), (406, "No format that is accepted"), (408, "Too slow, or past the deadline"),
        (409, "The job is not in a state for this"), (413, "Too large"), (415, "A format that is not read"),
        (422, "Inputs or parameters that the operation refuses"), (429, "The queue is full, or the rate is exceeded"),
        (503, "Not ready, or a device failed"),
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
    """Whether the server runs."""
    return {"live": True}


@_router.get("/v2/health/ready", tags=["health"])
async def ready(request: Request) -> Response:
    """Whether the server takes work: a worker is alive, and the server is not stopping."""
    alive = any(worker.alive for worker in request.app.state.jobs.stats().workers)
    taken = alive and not request.app.state.draining
    return JSONResponse({"ready": taken}, 200 if taken else 503)


@_router.get("/v2", tags=["models"])
async def server() -> dict[str, Any]:
    """Name, version and extensions of the server."""
    return {"name": "accelerant", "version": __version__, "extensions": ["binary_tensor_data"]}


def _operation(request: Request, name: str) -> ServedOperation:
    operations: dict[str, ServedOperation] = request.app.state.operations
    if name not in operations:
        raise Refused(404, "UnknownModel", f"there is no model {name[:80]!r}; there are {', '.join(operations)}")
    return operations[name]


@_router.get("/v2/models", tags=["models"])
async def models(request: Request) -> dict[str, Any]:
    """The operations, one model each."""
    return {
        "models": [
            {"name": one.name, "summary": one.summary, "scope": one.scope}
            for one in request.app.state.operations.values()
        ]
    }


@_router.get("/v2/models/{name}", tags=["models"])
async def model(name: str, request: Request) -> dict[str, Any]:
    """Inputs, outputs and parameters (a JSON schema) of an operation."""
    operation = _operation(request, name)
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


@_router.get("/v2/models/{name}/ready", tags=["models"])
async def model_ready(name: str, request: Request) -> Response:
    """Whether an operation takes calls."""
    _operation(request, name)
    return await ready(request)


@_router.post("/v2/models/{name}/infer", tags=["models"], openapi_extra=_INFER_BODY)
async def infer(name: str, request: Request) -> Response:
    """Run an operation: the result, or 202 with a job if it takes long or `Prefer: respond-async` is given."""
    operation = _operation(request, name)
    state, record = request.app.state, request.scope["state"]["record"]
    record.operation = name
    key = authorize(request, operation.scope)
    body = await read_body(request.scope, request.receive, state.settings)
    call: _Call = await _maybe_in_thread(len(body), lambda: _read(request, operation, key, body))
    jobs: JobService = state.jobs
    if call.is_job:
        job = await jobs.submit(call.request)
        return JSONResponse({"job": _shown(job)}, 202, {"location": f"/jobs/{job.id}"})
    results = await jobs.call(call.request)
    size = sum(x.nbytes for x in results.values())
    response: Response = await _maybe_in_thread(size, lambda: _write(operation, results, call, call.format))
    return response


def _shown(job: Job) -> dict[str, Any]:
    return asdict(job)


@_router.get("/jobs", tags=["jobs"])
async def list_jobs(
    request: Request, state: JobState | None = None, limit: int = Query(100, ge=1, le=1000), before: str | None = None
) -> dict[str, Any]:
    """Jobs of the key, the newest first."""
    key = _owner(request)
    jobs = await request.app.state.jobs.list(key.key_id, state, limit, before)
    return {"jobs": [_shown(job) for job in jobs]}


def _owner(request: Request) -> Key:
    key: Key = request.scope["state"]["key"]
    if not key.id:
        raise Refused(401, "Unauthorized", "give a valid API key: Authorization: Bearer acl_...")
    return key


@_router.get("/jobs/{id}", tags=["jobs"])
async def show_job(id: str, request: Request) -> dict[str, Any]:
    """State and progress of a job."""
    return _shown(await request.app.state.jobs.get(id, _owner(request).key_id))


@_router.get("/jobs/{id}/result", tags=["jobs"])
async def job_result(id: str, request: Request) -> Response:
    """The outputs of a job, in the format of Accept."""
    owner, jobs = _owner(request).key_id, request.app.state.jobs
    format = _answer_format(request.headers.get("accept", "*/*"), JSON)
    job = await jobs.get(id, owner)
    results = await jobs.result(id, owner)
    operation = _operation(request, job.operation)
    size = sum(x.nbytes for x in results.values())
    response: Response = await _maybe_in_thread(size, lambda: _write(operation, results, None, format))
    return response


@_router.delete("/jobs/{id}", tags=["jobs"])
async def cancel_job(id: str, request: Request) -> dict[str, Any]:
    """Cancel a job: at once if it waits, else between its parts."""
    return _shown(await request.app.state.jobs.cancel(id, _owner(request).key_id))


# --- the application -------------------------------------------------------------------------------------------------


def _status_of(error: Exception) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, ServiceError):
        return error.status
    if isinstance(error, TimeLimitExceeded):
        return 408
    if isinstance(error, _UNAVAILABLE):
        return 503
    if isinstance(error, MissingDependency):
        return 501
    return 400 if isinstance(error, FormatError) else 422


async def _on_error(request: Request, error: Exception) -> Response:
    """Answer an error of the inputs, the library or the service."""
    record: RequestRecord = request.scope["state"]["record"]
    kind, message, headers = type(error).__name__, str(error), {}
    status = _status_of(error)
    if isinstance(error, Refused):
        kind = error.kind
    if isinstance(error, (ValidationError, RequestValidationError)):
        kind = "ParameterError"
        wrong = [f"{'.'.join(map(str, one['loc']))[:80]}: {one['msg']}" for one in error.errors()[:5]]
        message = f"parameters: {'; '.join(wrong)}"
    elif isinstance(error, HTTPException):
        status, kind, message = error.status_code, "HttpError", str(error.detail)
        headers = dict(error.headers or {})
    retry_after_s = error.retry_after_s if isinstance(error, ServiceError) else None
    if retry_after_s is not None:
        headers["retry-after"] = str(math.ceil(retry_after_s))
    return Response(error_body(kind, message, record.request_id), status, headers, JSON)


def create_app(settings: ServiceSettings) -> FastAPI:
    """Return the application of a service; its lifespan starts and drains the workers."""
    observers: list[Callable[[RequestRecord], None]] = []
    keys = KeyStore(settings.keys_file)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await app.state.jobs.start()
        try:
            with Telemetry(app.state.jobs, settings) as telemetry:
                app.state.telemetry = telemetry
                observers.append(telemetry.observe)
                app.state.on_stop.append(telemetry.close)
                yield
        finally:
            app.state.draining = True
            await app.state.jobs.drain(settings.drain_s)

    app = FastAPI(
        title="Accelerant", version=__version__, lifespan=lifespan, redoc_url=None,
        summary="Field operations, transforms, proofs, neural operations and private computing over HTTP",
    )  # fmt: skip
    app.state.settings, app.state.keys, app.state.observers = settings, keys, observers
    app.state.on_stop = []
    app.state.operations, app.state.jobs, app.state.draining = served(settings), JobService(settings), False
    errors: Sequence[type[Exception]] = (
        AccelerantError, ServiceError, ValidationError, RequestValidationError, HTTPException,
    )  # fmt: skip
    for error in errors:
        app.add_exception_handler(error, _on_error)
    app.include_router(_router)
    app.include_router(dashboard.router, responses=_ERRORS)
    _describe_errors(app)
    app.add_middleware(Guard, settings=settings, keys=keys, observers=observers)
    return app


def _describe_errors(app: FastAPI) -> None:
    """Add the schema of errors to the OpenAPI document."""
    inner = app.openapi

    def openapi() -> dict[str, Any]:
        document = inner()
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        names = ("error", "type", "request_id")
        schemas["Error"] = {
            "type": "object",
            "required": list(names),
            "properties": {name: {"type": "string"} for name in names},
        }
        return document

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation does it
