"""OpenAI's routes: /v1/models, /v1/completions, /v1/chat/completions and /v1/embeddings, streamed or whole.

Answers and errors have OpenAI's form. A request whose client disconnects is cancelled, and its blocks are free after
the engine's current step. A stream waits for its client alone: what the engine gives meanwhile is kept for it.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from accelerant.service.errors import Cancelled, DeadlineExceeded, Refused, refusal_of
from accelerant.service.guard import authorize, openai_error, read_body
from accelerant.service.served_models import bodies
from accelerant.service.served_models.process import ModelProcess, ServedModels, Stream

_LOG = logging.getLogger("accelerant.service")
_IN_THREAD_BYTES = 1 << 16
_PART = re.compile(r"bytes:(\\x[0-9a-f]{2})+")
"""A token that is a part of a character."""
_JSON = "application/json"
T = TypeVar("T")

router = APIRouter(prefix="/v1", tags=["served models"])


def _models(request: Request) -> ServedModels:
    models: ServedModels = request.app.state.served
    return models


def _described(process: ModelProcess) -> dict[str, Any]:
    info = {name: process.info.get(name) for name in ("task", "context")}
    info |= {"chat": process.info["chat"]} if "chat" in process.info else {}
    return {"id": process.model, "object": "model", "created": process.created, "owned_by": "accelerant", **info}


@router.get("/models", summary="The served models")
async def list_models(request: Request) -> dict[str, Any]:
    """Return the models that `--model` names: task, tokens of the context, and whether there is a chat template."""
    return {"object": "list", "data": [_described(process) for process in _models(request).processes.values()]}


@router.get("/models/{name:path}", summary="One served model")
async def show_model(name: str, request: Request) -> dict[str, Any]:
    """Return a model."""
    processes = _models(request).processes
    if name not in processes:
        raise Refused(404, "ModelNotFound", f"there is no model {name[:80]!r}", param="model")
    return _described(processes[name])


def _schema(kind: type[Any]) -> dict[str, Any]:
    schema = kind.model_json_schema(ref_template=f"#/components/schemas/{kind.__name__}/$defs/{{model}}")
    schema.pop("$defs", None)
    return {"requestBody": {"required": True, "content": {_JSON: {"schema": {"type": "object", "title": schema["title"],
            "properties": {name: {} for name in schema["properties"]}, "required": schema["required"]}}}}}  # fmt: skip


@router.post("/completions", summary="Text that continues a prompt", openapi_extra=_schema(bodies.Completion))
async def completions(request: Request) -> Response:
    """Continue prompts, texts or tokens; `stream` sends the text as it is made."""
    body = await _read(request, bodies.Completion)
    prompts = body.prompts()
    sent = {"prompts": prompts, "param": "prompt"}
    most = 16 if body.max_tokens is None else body.max_tokens
    options = body.options() | {"max_tokens": most, "logprobs": body.logprobs, "echo": bool(body.echo)}
    answer = _Answer("cmpl-", "text_completion", "text_completion", body.model, is_chat=False, n=body.n or 1)
    answer.with_logprobs = body.logprobs is not None
    return await _generate(request, body, answer, len(prompts), sent, options)


@router.post("/chat/completions", summary="The next message of a conversation", openapi_extra=_schema(bodies.Chat))
async def chat_completions(request: Request) -> Response:
    """Answer a conversation by the model's chat template; `stream` sends the text as it is made."""
    body = await _read(request, bodies.Chat)
    sent = {"messages": [message.plain() for message in body.messages], "param": "messages"}
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    options = body.options() | {"max_tokens": most, "logprobs": logprobs, "echo": False}
    answer = _Answer("chatcmpl-", "chat.completion", "chat.completion.chunk", body.model, is_chat=True, n=body.n or 1)
    answer.with_logprobs = bool(body.logprobs)
    return await _generate(request, body, answer, 1, sent, options)


@router.post("/embeddings", summary="The vectors of texts", openapi_extra=_schema(bodies.Embeddings))
async def embeddings(request: Request) -> Response:
    """Return a vector of unit length for each text."""
    body = await _read(request, bodies.Embeddings)
    process = _models(request).named(body.model, "embed")
    dim = process.info.get("dim")
    if body.dimensions not in (None, dim):
        reason = f"'dimensions' other than the model's {dim} is not supported"
        raise Refused(400, "UnsupportedParameter", reason, param="dimensions")
    state = request.scope["state"]
    stream = await process.submit(1, inputs=body.inputs(), key=state["key"].id, param="input")
    state["record"].backend = str(process.info.get("label", "")).partition(":")[0]
    try:
        (found,) = await _while_connected(request, _all(stream, request.app.state.settings.deadline_s))
    finally:
        process.end(stream)
    vectors, tokens = found["vectors"].astype("<f4"), found["tokens"]

    def written() -> bytes:
        as_text = body.encoding_format == "base64"
        rows: Iterable[Any] = (base64.b64encode(row).decode() for row in vectors) if as_text else vectors.tolist()
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return json.dumps({"object": "list", "data": data, "model": body.model, "usage": usage}).encode()

    return Response(await asyncio.to_thread(written), media_type=_JSON)


# --- answers ---------------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Answer:
    """The form of an answer, and what has come of it."""

    prefix: str
    whole_kind: str
    chunk_kind: str
    model: str
    is_chat: bool
    n: int
    with_logprobs: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    id: str = ""
    offsets: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, list[int]] = field(default_factory=dict)  # usage by prompt
    generated: int = 0
    ledger: dict[str, Any] = field(default_factory=dict)  # of the answer that ended last, if it is asked for

    def __post_init__(self) -> None:
        self.id = self.prefix + secrets.token_hex(12)

    def head(self, kind: str) -> dict[str, Any]:
        """Return what all parts of an answer have in common."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def choices(self, events: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """Return the text, log-probabilities and reason to end that events add to each choice."""
        found: dict[int, dict[str, Any]] = {}
        for event in events:
            one = found.setdefault(event["index"], {"text": "", "tokens": [], "reason": None})
            one["text"] += event.get("echo", "") + event.get("text", "")
            one["tokens"] += event.get("prompt", ())
            if "token" in event:
                one["tokens"].append(event)
            if "reason" in event:
                one["reason"] = self._ended(event)
        return found

    def _ended(self, event: Mapping[str, Any]) -> str:
        reason: str = event["reason"]
        if reason == "error":
            raise Refused(500, "ModelError", f"the model failed: {event['error']}")
        if reason == "cancelled":
            raise Cancelled("the request was cancelled")
        prompt, generated, cached = event["usage"]
        self.prompts.setdefault(event["index"] // self.n, [prompt, cached])
        self.generated += generated
        self.ledger = {"ledger": event["ledger"]} if "ledger" in event else {}
        return reason

    def usage(self) -> dict[str, Any]:
        """Return the tokens so far."""
        prompt, cached = (sum(one[i] for one in self.prompts.values()) for i in range(2))
        return {
            "prompt_tokens": prompt, "completion_tokens": self.generated, "total_tokens": prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }  # fmt: skip

    def logprobs(self, index: int, tokens: list[Mapping[str, Any]]) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens of a choice; None if they are not asked for."""
        if not self.with_logprobs:
            return None
        if self.is_chat:
            entries = [
                _entry(one["token"], one["logprob"]) | {"top_logprobs": [_entry(*each) for each in one["top"]]}
                for one in tokens
            ]
            return {"content": entries, "refusal": None}
        offsets = []
        for one in tokens:
            offsets.append(self.offsets.get(index, 0))
            self.offsets[index] = offsets[-1] + len(one["token"])
        return {
            "tokens": [one["token"] for one in tokens], "token_logprobs": [one["logprob"] for one in tokens],
            "top_logprobs": [None if one["top"] is None else dict(one["top"]) for one in tokens],
            "text_offset": offsets,
        }  # fmt: skip

    def chunk(self, index: int, one: Mapping[str, Any], *, first: bool) -> dict[str, Any]:
        """Return a part of a stream."""
        logprobs = self.logprobs(index, one["tokens"])
        choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": one["reason"]}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": one["text"]}
        else:
            choice["text"] = one["text"]
        return self.head(self.chunk_kind) | {"choices": [choice]}

    def whole(self, events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the answer to a request that is not streamed."""
        choices = []
        for index, one in sorted(self.choices(events).items()):
            logprobs = self.logprobs(index, one["tokens"])
            choice: dict[str, Any] = {"index": index, "logprobs": logprobs, "finish_reason": one["reason"]}
            if self.is_chat:
                choice["message"] = {"role": "assistant", "content": one["text"], "refusal": None}
            else:
                choice["text"] = one["text"]
            choices.append(choice)
        return self.head(self.whole_kind) | {"choices": choices, "usage": self.usage()} | self.ledger


def _entry(token: str, logprob: float) -> dict[str, Any]:
    part = bytes.fromhex(token[6:].replace("\\x", "")) if _PART.fullmatch(token) else token.encode()
    return {"token": token, "logprob": logprob, "bytes": list(part)}


# --- requests --------------------------------------------------------------------------------------------------------
async def _read(request: Request, kind: type[bodies.B]) -> bodies.B:
    """Return the body of a request, whose key must have the scope "generate"."""
    authorize(request.scope, "generate")
    state, settings = request.scope["state"], request.app.state.settings
    hold = functools.partial(request.app.state.inference.hold, state["record"])
    content = await read_body(request.scope, request.receive, settings, hold)
    if len(content) > settings.json_bytes:
        raise Refused(413, "BodyTooLarge", f"the body has more than {settings.json_bytes:,} bytes")
    state["record"].operation = request.scope["path"].removeprefix("/v1/").replace("/", "_")
    if len(content) > _IN_THREAD_BYTES:
        return await asyncio.to_thread(bodies.read_body_as, kind, content)
    return bodies.read_body_as(kind, content)


async def _generate(
    request: Request, body: bodies.Completion | bodies.Chat, answer: _Answer, prompts: int, sent: dict[str, Any],
    options: dict[str, Any],
) -> Response:  # fmt: skip
    """Return the answer to a request for text, or its stream once it has begun."""
    process = _models(request).named(body.model, "generate")
    state, deadline_s = request.scope["state"], request.app.state.settings.deadline_s
    options["salt"] = state["key"].id  # prompts of other keys are not found in the cache
    stream = await process.submit(prompts * answer.n, key=state["key"].id, options=options, **sent)
    state["record"].backend = str(process.info.get("label", "")).partition(":")[0]
    try:
        if not body.stream:
            events = await _while_connected(request, _all(stream, deadline_s))
            return Response(json.dumps(answer.whole(events)), media_type=_JSON)
        events_left = _within(stream, deadline_s)
        first: list[dict[str, Any]] = await _while_connected(request, anext(events_left))
        chunks = _chunks(answer, first, events_left, body.includes_usage, state["record"].request_id)
    except BaseException:
        process.end(stream)
        raise
    finally:
        if not body.stream:
            process.end(stream)
    return _Streamed(chunks, functools.partial(process.end, stream))


class _Streamed(StreamingResponse):
    """A stream, whose request is forgotten at its end, or when its client is gone, even before the first part."""

    def __init__(self, chunks: AsyncIterator[str], end: Callable[[], None]) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(chunks, media_type="text/event-stream", headers=headers)
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the parts."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


async def _chunks(
    answer: _Answer, first: list[dict[str, Any]], later: AsyncIterator[list[dict[str, Any]]], with_usage: bool,
    request_id: str,
) -> AsyncIterator[str]:  # fmt: skip
    """Yield the server-sent events of an answer; the last one is [DONE], or an error."""
    begun: set[int] = set()
    usage: dict[str, Any] = {"usage": None} if with_usage else {}

    def written(events: list[dict[str, Any]]) -> str:
        parts = []
        for index, one in answer.choices(events).items():
            if one["text"] or one["reason"] or one["tokens"] or index not in begun:
                parts.append(answer.chunk(index, one, first=index not in begun) | usage)
                begun.add(index)
        return "".join(f"data: {json.dumps(part)}\n\n" for part in parts)

    try:
        yield written(first)
        async for events in later:
            if text := written(events):
                yield text
        if with_usage or answer.ledger:
            last = {"usage": answer.usage()} if with_usage else {}
            last = answer.head(answer.chunk_kind) | {"choices": []} | last | answer.ledger
            yield f"data: {json.dumps(last)}\n\n"
        yield "data: [DONE]\n\n"
    except Exception as error:  # noqa: BLE001 - it is sent, and logged if it was not foreseen
        refused = refusal_of(error)
        if refused.kind == "InternalError":
            _LOG.exception("request %s failed", request_id)
        yield f"data: {json.dumps(openai_error(refused, request_id))}\n\n"


async def _within(stream: Stream, deadline_s: float) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield a stream's events; DeadlineExceeded if they take too long in all."""
    end = asyncio.get_running_loop().time() + deadline_s
    async with aclosing(stream.events()) as events:
        while True:
            try:
                async with asyncio.timeout_at(end):  # Python 3.11's wait_for loses a cancellation as an event comes
                    found = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise DeadlineExceeded(f"the answer was not there within {deadline_s:g} s") from None
            yield found


async def _all(stream: Stream, deadline_s: float) -> list[dict[str, Any]]:
    return [event async for events in _within(stream, deadline_s) for event in events]


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of work, which is cancelled if the client disconnects."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(400, "Disconnected", "the client is gone")
        return task.result()
    finally:
        for one in (task, gone):
            one.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await one
