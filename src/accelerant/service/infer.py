"""An inference request of KServe's protocol, from its bytes to the bytes of the answer.

`Guard` calls `Inference` without FastAPI's routing, which takes longer than the rest of the server's work on a small
call.
"""

import asyncio
import functools
import json
import math
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
import numpy.typing as npt
from starlette.responses import Response

from accelerant.errors import FormatError
from accelerant.service import bodies
from accelerant.service.errors import Refused
from accelerant.service.guard import authorize, read_body
from accelerant.service.jobs.service import JobService
from accelerant.service.jobs.wire import JobRequest, merge_kind
from accelerant.service.operations import OpSpec, Parameters
from accelerant.service.settings import ServiceSettings
from accelerant.service.telemetry import RequestRecord

FORMATS = (bodies.JSON, bodies.BINARY, bodies.SAFETENSORS, bodies.NPY, bodies.ARROW)
_TYPE, _LENGTH = b"content-type", b"inference-header-content-length"
_CURL = "application/x-www-form-urlencoded"  # what `curl -d` says of JSON, unless it is told otherwise
_ENVELOPE = ("priority", "timeout", "binary_data_output")
_HEAD_BYTES, _HEADS_KEPT = 2048, 256
_REFUSED = re.compile(r"(?:^|;)\s*[qQ]=0(?:\.0*)?\s*(?:;|$)")  # the weight of what a client does not accept
_IN_THREAD_BYTES = 1 << 20
"""Bodies from this size are read, and results written, in a thread: the event loop answers others meanwhile."""


@dataclass(slots=True)
class Answer:
    """The answer to a request."""

    body: bytes
    headers: list[tuple[bytes, bytes]]
    status: int = 200

    def response(self) -> Response:
        """Return it for a route of FastAPI."""
        return Response(self.body, self.status, {name.decode(): value.decode() for name, value in self.headers})


@dataclass(slots=True)
class _InferenceCall:
    """A request that has been read and checked; of the `outputs` that it asks for, `binary` ones are bytes."""

    operation: OpSpec
    parameters: Parameters
    id: str | None
    binary: bool | frozenset[str]
    format: str
    is_job: bool
    result_bytes: int
    outputs: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class _KnownHead:
    """A call whose inputs are all bytes: a request of the same head has the same arrays, parameters and answer."""

    call: _InferenceCall
    request: JobRequest
    arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...], int], ...]
    size_bytes: int

    def again(self, body: bytes, state: Mapping[str, Any]) -> JobRequest:
        """Return the request with other values; FormatError for those that the operation refuses."""
        call, earlier = self.call, self.request
        inputs: dict[str, npt.NDArray[Any]] = {
            name: np.ndarray(shape, dtype, body, start) for name, dtype, shape, start in self.arrays
        }
        call.operation.check(inputs, call.parameters)
        return JobRequest(
            earlier.operation, earlier.parameters, inputs, state["key"].id, earlier.priority, earlier.deadline_s,
            state["record"].request_id, earlier.cost_s, earlier.kind,
        )  # fmt: skip


class Inference:
    """The calls of a server, equal heads read once; `held_bytes` is the size of bodies and results not yet answered."""

    def __init__(self, settings: ServiceSettings, operations: Mapping[str, OpSpec], jobs: JobService) -> None:
        self.settings, self.operations, self.jobs = settings, operations, jobs
        self.held_bytes = 0
        self._known: dict[tuple[Any, ...], _KnownHead] = {}

    async def answer(self, name: str, scope: MutableMapping[str, Any], receive: Callable[[], Any]) -> Answer:
        """Run an operation, or make it a job; raise what is wrong with the request."""
        operation = operation_named(self.operations, name)
        record: RequestRecord = scope["state"]["record"]
        record.operation = name
        authorize(scope, operation.scope)
        body = await read_body(scope, receive, self.settings, functools.partial(self.hold, record))
        if len(body) < _IN_THREAD_BYTES:
            call, request = self._read(operation, scope, body)
        else:
            call, request = await asyncio.to_thread(self._read, operation, scope, body)
        if call.is_job:
            job = asdict(await self.jobs.submit(request))
            place = f"/jobs/{job['id']}".encode()
            return Answer(json.dumps({"job": job}).encode(), [(_TYPE, bodies.JSON.encode()), (b"location", place)], 202)
        self.hold(record, call.result_bytes)
        results, device = await self.jobs.call_on(request)
        if call.outputs is not None:
            results = {name: results[name] for name in call.outputs if name in results}
        record.backend = device.partition(":")[0]
        answer = await written(operation, results, call.format, self.settings.json_bytes, call)
        answer.headers.append((b"accelerant-device", device.encode()))
        return answer

    def _read(
        self, operation: OpSpec, scope: MutableMapping[str, Any], body: bytes
    ) -> tuple[_InferenceCall, JobRequest]:
        """Return the call that a request asks for; FormatError, ValidationError or another error of its inputs."""
        headers: dict[bytes, bytes] = scope["state"]["fields"]
        length = headers.get(_LENGTH)
        if length is not None and not (length.isdigit() and len(length) < 20):
            raise FormatError(f"Inference-Header-Content-Length must be a whole number, got {length[:80]!r}")
        size = None if length is None else int(length)
        kind = headers.get(b"content-type"), headers.get(b"accept"), headers.get(b"prefer"), scope["query_string"]
        key = operation.name, body[:size] if size is not None and size <= _HEAD_BYTES else None, *kind
        known = self._known.get(key)
        if known is not None and known.size_bytes == len(body):
            return known.call, known.again(body, scope["state"])
        call, request, values = self._parsed(operation, scope, headers, body, size)
        starts: dict[str, int] = {}
        start = size or 0
        for name, value in values.items():
            if isinstance(value, bytes) or value.dtype == np.bool_:
                return call, request
            starts[name], start = start, start + value.nbytes
        if key[1] is not None and start == len(body) and call.id is None:
            if len(self._known) >= _HEADS_KEPT:
                self._known.clear()
            again = replace(request, inputs={}, kind=merge_kind(request) if operation.elementwise else None)
            # in the operation's order, whatever the body's: calls of a kind are joined by position
            arrays = tuple((name, x.dtype, x.shape, starts[name]) for name, x in request.inputs.items())
            self._known[key] = _KnownHead(call, again, arrays, start)
        return call, request

    def _parsed(
        self, operation: OpSpec, scope: MutableMapping[str, Any], headers: Mapping[bytes, bytes], body: bytes,
        size: int | None,
    ) -> tuple[_InferenceCall, JobRequest, bodies.Values]:  # fmt: skip
        """Return the call, its request, and the tensors in the body's order."""
        settings, accept = self.settings, headers.get(b"accept", b"*/*").decode("latin-1")
        media = headers.get(b"content-type", bodies.JSON.encode()).decode("latin-1").partition(";")[0].strip().lower()
        identity, usual = None, media
        binary: bool | frozenset[str] = False
        outputs: tuple[str, ...] | None = None
        if size is not None or media in (bodies.JSON, bodies.BINARY, _CURL):
            if scope["query_string"]:
                raise FormatError("parameters belong into the body's JSON; the query is for other formats")
            head, values = bodies.read_kserve(body, size, "inputs", most_json=settings.json_bytes)
            identity, parameters = head.get("id"), head.get("parameters", {})
            if not isinstance(parameters, dict) or not isinstance(identity, str | None):
                raise FormatError("parameters must be an object, and id a string")
            binary, outputs = _asked_outputs(operation, head, parameters)
            usual = bodies.BINARY if binary else bodies.JSON
        elif media in FORMATS:
            names = [spec.name for spec in operation.inputs]
            values = bodies.read_tensors(media, body, names, most_json=settings.json_bytes)
            parameters = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
        else:
            raise Refused(415, "UnsupportedMediaType", f"bodies are {', '.join(FORMATS)}; got {media[:80]!r}")
        given = {name: value for name, value in parameters.items() if name not in _ENVELOPE}
        known = operation.parameters.names()
        if unknown := [name for name in given if name not in known]:
            taken = ", ".join((*dict.fromkeys(known.values()), *_ENVELOPE))
            reason = f"{operation.name} has no parameter {unknown[0][:80]!r}; it has {taken}"
            raise Refused(400, "ParameterError", reason)
        model = operation.parameters.model_validate(given)
        inputs = _inputs(operation, values)
        operation.check(inputs, model)
        needed, most = operation.result_bytes(inputs, model), settings.result_bytes
        if needed > most:
            raise Refused(413, "ResultTooLarge", f"the result takes {needed:,} bytes; the limit is {most:,}")
        cost_s, state = operation.cost(inputs, model), scope["state"]
        request = JobRequest(
            operation.name,
            model.model_dump(mode="json") | operation.place(model, settings),
            inputs,
            key_id=state["key"].id,
            priority=_number(parameters, "priority", -100, 100) or 0,
            deadline_s=_deadline_s(parameters, settings, operation),
            request_id=state["record"].request_id,
            cost_s=cost_s,
        )
        asked = b"respond-async" in headers.get(b"prefer", b"").lower()
        is_job = operation.resumable or cost_s > settings.short_s or asked
        call = _InferenceCall(operation, model, identity, binary, answer_format(accept, usual), is_job, needed, outputs)
        return call, request, values

    def hold(self, record: RequestRecord, size: int) -> None:
        """Count bytes of a body or result until it is answered; Refused if all hold too many, unless it is alone."""
        self.held_bytes += size
        record.held_bytes += size
        if self.held_bytes > self.settings.bodies_bytes and self.held_bytes > record.held_bytes:
            raise Refused(503, "Busy", "the bodies and results of others fill the memory for them", retry_after_s=1)

    def release(self, record: RequestRecord) -> None:
        """Forget the bytes of a request."""
        self.held_bytes -= record.held_bytes
        record.held_bytes = 0


def operation_named(operations: Mapping[str, OpSpec], name: str) -> OpSpec:
    """Return an operation; Refused if there is none."""
    if name not in operations:
        raise Refused(404, "UnknownModel", f"there is no model {name[:80]!r}; there are {', '.join(operations)}")
    return operations[name]


def answer_format(accept: str, usual: str) -> str:
    """Return the first format that the client accepts; Refused if none is."""
    if accept == "*/*":
        return usual
    for part in accept.split(","):
        kind, _, options = part.partition(";")
        wanted = kind.strip().lower()
        if _REFUSED.search(options):
            continue
        if wanted in FORMATS:
            return wanted
        if wanted in ("", "*/*", "application/*"):
            return usual
    raise Refused(406, "NotAcceptable", f"answers are {', '.join(FORMATS)}")


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


def _deadline_s(parameters: Mapping[str, Any], settings: ServiceSettings, operation: OpSpec) -> float:
    """Return the seconds that a call may take: the parameter `timeout` in microseconds, or the limit."""
    most = settings.train_deadline_s if operation.resumable else settings.deadline_s
    timeout = _number(parameters, "timeout", 1, 2**63)
    return most if timeout is None else min(most, timeout / 1e6)


def _asked_outputs(
    operation: OpSpec, head: Mapping[str, Any], parameters: Mapping[str, Any]
) -> tuple[bool | frozenset[str], tuple[str, ...] | None]:
    """Return which outputs are to be bytes, and which are asked for; None for all."""
    entries = head.get("outputs")
    if not entries:
        if entries not in (None, []):
            raise FormatError('"outputs" must be a list of objects with a name')
        return parameters.get("binary_data_output") is True, None
    known, binary = [spec.name for spec in operation.outputs], parameters.get("binary_data_output") is True
    asked: dict[str, bool] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        options = entry.get("parameters", {}) if isinstance(entry, dict) else None
        if not isinstance(options, dict) or not isinstance(name := entry.get("name"), str):
            raise FormatError('"outputs" must be a list of objects with a name')
        if name not in known or name in asked:
            which = "asks twice for" if name in asked else "has no"
            raise FormatError(f"{operation.name} {which} output {name[:80]!r}; it has {', '.join(known)}")
        if unknown := options.keys() - {"binary_data"}:
            raise FormatError(f"output {name!r} has no parameter {min(unknown)[:80]!r}; it has binary_data")
        asked[name] = options.get("binary_data", binary) is True
    return frozenset(name for name in asked if asked[name]), tuple(asked)


def _inputs(operation: OpSpec, values: bodies.Values) -> dict[str, npt.NDArray[Any]]:
    """Return the operation's inputs, in its order; FormatError for a missing, unknown or ill-typed one."""
    inputs: dict[str, npt.NDArray[Any]] = {}
    names = [spec.name for spec in operation.inputs]
    for name in values:
        if name not in names:
            raise FormatError(f"{operation.name} has no input {name[:80]!r}; it has {', '.join(names) or 'none'}")
    for spec in operation.inputs:
        name, value = spec.name, values.get(spec.name)
        if value is None:
            if spec.optional:
                continue
            raise FormatError(f"input {name!r} of {operation.name} is missing; it takes {', '.join(names)}")
        datatype = bodies.datatype_of(value)
        if spec.datatypes == ("BYTES",):
            if datatype not in ("BYTES", "UINT8"):
                raise FormatError(f"input {name!r} must be BYTES, got {datatype}")
            value = np.frombuffer(value, np.uint8) if isinstance(value, bytes) else value.reshape(-1)
        elif datatype not in spec.datatypes or isinstance(value, bytes):
            raise FormatError(f"input {name!r} must be {' or '.join(spec.datatypes)}, got {datatype}")
        inputs[name] = value
    return inputs


async def written(
    operation: OpSpec, results: Mapping[str, npt.NDArray[Any]], format: str, json_bytes: int,
    call: _InferenceCall | None = None,
) -> Answer:  # fmt: skip
    """Return the answer with an operation's outputs, to a call or in a format; Refused if too much would be JSON."""
    size = sum(x.nbytes for x in results.values())
    binary: bool | frozenset[str] = call.binary if call is not None and call.binary else format == bodies.BINARY
    if size > json_bytes and format in (bodies.JSON, bodies.BINARY) and binary is not True:
        listed = sum(x.nbytes for name, x in results.items() if not binary or name not in binary)
        if listed > json_bytes:  # its text would be several times as long, and hold up other requests
            raise Refused(
                413, "ResultTooLarge",
                f"{listed:,} bytes of results are too many for JSON; the limit is {json_bytes:,}: ask for bytes "
                f"(Accept: {bodies.BINARY})",
            )  # fmt: skip
    write: Callable[[], Answer] = lambda: _write(operation, results, format, binary, call)  # noqa: E731
    return write() if size < _IN_THREAD_BYTES else await asyncio.to_thread(write)


def _write(
    operation: OpSpec, results: Mapping[str, npt.NDArray[Any]], format: str,
    binary: bool | frozenset[str], call: _InferenceCall | None,
) -> Answer:  # fmt: skip
    values: bodies.Values = dict(results)
    for spec in operation.outputs:
        if spec.datatypes == ("BYTES",) and spec.name in values:
            values[spec.name] = results[spec.name].tobytes()
    if format not in (bodies.JSON, bodies.BINARY):
        return Answer(bodies.write_tensors(format, values), [(_TYPE, format.encode())])
    head: dict[str, Any] = {"model_name": operation.name, "model_version": "1"}
    if call is not None and call.id is not None:
        head["id"] = call.id
    if binary is True and "id" not in head and not any(isinstance(x, bytes) for x in values.values()):
        text = _binary_head(operation.name, tuple((name, x.dtype, x.shape) for name, x in results.items()))
        body = b"".join([text, *(np.ascontiguousarray(x).data for x in results.values())])
        return _binary(body, len(text))
    content, length = bodies.write_kserve(head, "outputs", values, binary)
    return Answer(content, [(_TYPE, bodies.JSON.encode())]) if length is None else _binary(content, length)


def _binary(body: bytes, length: int) -> Answer:
    return Answer(body, [(_TYPE, bodies.BINARY.encode()), (_LENGTH, b"%d" % length)])


@functools.lru_cache(maxsize=_HEADS_KEPT)
def _binary_head(name: str, arrays: tuple[tuple[str, np.dtype[Any], tuple[int, ...]], ...]) -> bytes:
    """Return the JSON of an answer whose arrays follow as bytes."""
    outputs = [
        {
            "name": each,
            "datatype": bodies.datatype_of(np.empty(0, dtype)),
            "shape": shape,
            "parameters": {"binary_data_size": math.prod(shape) * dtype.itemsize},
        }
        for each, dtype, shape in arrays
    ]
    return json.dumps({"model_name": name, "model_version": "1", "outputs": outputs}).encode()
