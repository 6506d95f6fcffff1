"""The dashboard, and what it and Prometheus read: /devices, /ledger, /metrics, and /events as server-sent events.

The page is static: HTML, CSS and JavaScript of this folder, which load nothing from elsewhere. They are public; the
data needs the scope "monitor" where the service demands keys.
"""

import json
from collections.abc import AsyncIterator, Callable
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from accelerant.service.guard import authorize, token_of
from accelerant.service.telemetry import Telemetry

__all__ = ["router"]

router = APIRouter(tags=["monitoring"])

_TYPES = {
    "style.css": "text/css; charset=utf-8",
    **dict.fromkeys(
        ("common.js", "dashboard.js", "docs.js", "examples.js", "prompt.js"), "text/javascript; charset=utf-8"
    ),
    "icon.svg": "image/svg+xml",
}
"""The files that are served, and nothing else of the folder."""

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@cache
def _file(name: str) -> bytes:
    return files(__name__).joinpath(name).read_bytes()


def _page(name: str, title: str, script: str) -> Response:
    """Return a page: the head of all pages, then its own file."""
    head = _file("head.html").decode().format(title=title, script=script)
    return Response(head.encode() + _file(name), headers=_HEADERS, media_type="text/html; charset=utf-8")


@router.get("/", include_in_schema=False)
def index() -> Response:
    """Return the dashboard."""
    return _page("index.html", "Accelerant", "dashboard.js")


@router.get("/docs", include_in_schema=False)
def docs() -> Response:
    """Return the API's documentation; FastAPI's page would load its scripts from another host."""
    return _page("docs.html", "Accelerant: the API", "docs.js")


@router.get("/prompt", include_in_schema=False)
def prompt() -> Response:
    """Return the page that tries a served model."""
    return _page("prompt.html", "Accelerant: try a model", "prompt.js")


@router.get("/dashboard/{name}", include_in_schema=False)
def static(name: str) -> Response:
    """Return a file of the dashboard."""
    if name not in _TYPES:
        return Response(status_code=404)
    return Response(_file(name), headers=_HEADERS, media_type=_TYPES[name])


def _telemetry(request: Request) -> Telemetry:
    telemetry: Telemetry = request.app.state.telemetry
    return telemetry


@router.get("/devices", summary="Devices of the service, with their latest figures")
async def devices(request: Request) -> dict[str, Any]:
    """Return utilization, memory, power, temperature and clocks of each device; an absent figure has a reason."""
    authorize(request.scope, "monitor")
    return {"devices": _telemetry(request).devices()}


@router.get("/ledger", summary="What the workers computed, by op, implementation, device and case")
async def ledger(request: Request) -> dict[str, Any]:
    """Return counts, times and fallbacks of every op of the library that ran in the workers."""
    authorize(request.scope, "monitor")
    return _telemetry(request).ledger()


@router.get("/metrics", summary="Metrics in Prometheus' text format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Return requests, queue, workers, devices and ledger in Prometheus' text format 0.0.4."""
    authorize(request.scope, "monitor")
    return Response(_telemetry(request).metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/events", summary="Server-sent events: state of devices and queue, jobs, ledger", response_class=Response)
async def events(request: Request) -> StreamingResponse:
    """Stream "start", then "state" once a second, and "job" and "ledger" when they change."""
    caller = authorize(request.scope, "monitor")
    stream = _telemetry(request).events(caller.key_id)
    token, keys = token_of(request.scope["state"]["fields"]), request.app.state.keys
    valid = lambda: not keys.exists if token is None else keys.verify(token) is not None  # noqa: E731
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # nginx would collect them
    return StreamingResponse(_encoded(stream, valid), media_type="text/event-stream", headers=headers)


async def _encoded(stream: AsyncIterator[tuple[str, dict[str, Any]]], valid: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield events as text, until the caller's key is not valid any more."""
    async for name, data in stream:
        if not valid():
            return
        yield f"event: {name}\ndata: {json.dumps(data)}\n\n"
