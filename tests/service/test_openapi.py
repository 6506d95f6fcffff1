"""Requests that schemathesis makes up from the OpenAPI document, and spans of OpenTelemetry."""

import asyncio

import httpx
import hypothesis
import pytest
from hypothesis import HealthCheck, Phase

from accelerant.service.guard import Guard
from accelerant.service.keys import KeyStore
from accelerant.service.settings import ServiceSettings

STREAMS = {"/events"}


def try_requests(server, examples):
    """Send requests for every operation of the document; none may fail in the server."""
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    paths = set()
    with server.client() as client:
        for found in schema.get_all_operations():
            operation = found.ok()
            if operation.path in STREAMS:
                continue
            paths.add(operation.path)

            @hypothesis.settings(
                max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )  # fmt: skip
            @hypothesis.seed(1)
            @hypothesis.given(case=operation.as_strategy())
            def run(case):
                answer = case.call(session=None, base_url=server.url, timeout=120)
                ready = "/ready" in case.path and answer.status_code == 503
                assert answer.status_code < 500 or ready, f"{case.as_curl_command()}\n{answer.text}"

            run()
        assert client.get("/v2/health/ready").status_code == 200
    assert {"/v2/models/{name}/infer", "/jobs/{id}", "/jobs"} <= paths


@pytest.mark.parametrize("examples", [5, pytest.param(300, marks=pytest.mark.soak)])
def test_no_request_fails_in_the_server(server, examples):
    try_requests(server, examples)


def test_spans_continue_the_trace_of_the_client(tmp_path):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    async def application(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    guard = Guard(application, settings=ServiceSettings(), keys=KeyStore(tmp_path / "keys.json"), observers=[])

    async def ask():
        transport = httpx.ASGITransport(guard)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
            parent = f"00-{'ab' * 16}-{'cd' * 8}-01"
            return await client.get("/v2", headers={"traceparent": parent, "x-request-id": "here"})

    assert asyncio.run(ask()).headers["x-request-id"] == "here"
    (span,) = exporter.get_finished_spans()
    assert format(span.context.trace_id, "032x") == "ab" * 16
    assert span.attributes["http.request.method"] == "GET"
    assert span.attributes["http.response.status_code"] == 200
