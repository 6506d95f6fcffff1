"""Metrics of a running service, and its events."""

import asyncio
import contextlib
import json
import re
import time
from pathlib import Path

import numpy as np
import promql_parser
import pytest
from prometheus_client.parser import text_string_to_metric_families

from accelerant.runtime.monitoring import monitor
from accelerant.service import Client
from accelerant.service import telemetry as module
from accelerant.service.jobs.service import JobService
from accelerant.service.telemetry import BUCKETS_S, RequestRecord, Telemetry

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "service.md").read_text(encoding="utf-8")


def samples(text):
    """Values by name and labels; an error if the text is malformed or a series occurs twice."""
    found = {}
    for family in text_string_to_metric_families(text):
        for line in family.samples:
            key = line.name, frozenset(line.labels.items())
            assert key not in found, key
            found[key] = line.value
    return found


def named(found, name, **labels):
    return [value for (one, given), value in found.items() if one == name and labels.items() <= dict(given).items()]


@pytest.fixture(scope="module")
def scraped(server):
    with Client(server.url, trust_env=False) as client, server.client() as http:
        before = samples(http.get("/metrics").text)
        for _ in range(3):
            client.field_mul([1], [2])
        http.post("/v2/models/field_mul/infer", content=b"{")
        http.post(f"/v2/models/{'x' * 50}/infer", content=b"{}")
        client.result(client.submit("field_mul", {"x": np.arange(9, dtype=np.uint64), "y": np.uint64([7])}).id)
        until = asyncio.run(
            changes(server, lambda seen: any(row["calls"] for row in seen.get("ledger", {}).get("rows", ())))
        )
        assert until["ledger"]["rows"]
        end = time.monotonic() + 60.0
        while True:
            answer = http.get("/metrics")
            assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            after = samples(answer.text)
            if named(after, "accelerant_jobs", state="succeeded")[0]:  # counted about once a second
                return before, after
            assert time.monotonic() < end
            time.sleep(0.1)


async def changes(server, enough):
    """Read /events until the latest data by name are enough."""
    import httpx

    seen = {}
    async with (
        httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=60) as http,
        http.stream("GET", "/events") as answer,
    ):
        assert answer.headers["content-type"].startswith("text/event-stream")
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                seen[name] = json.loads(line.removeprefix("data: "))
                if enough(seen):
                    return seen
    raise AssertionError("the stream ended")


def test_requests_are_counted_by_operation_backend_and_status(scraped):
    before, after = scraped

    def count(found, **labels):
        return sum(named(found, "accelerant_request_seconds_count", **labels))

    done = {"operation": "field_mul", "backend": "cpu", "status": "200"}
    assert count(after, **done) - count(before, **done) == 3
    assert count(after, operation="field_mul", status="400") - count(before, operation="field_mul", status="400") == 1
    assert count(after, operation="field_mul", status="202") - count(before, operation="field_mul", status="202") == 1
    assert not [labels for _, labels in after if "x" * 50 in dict(labels).values()]  # names of strangers make no series


def test_queue_workers_devices_and_ledger_are_there(scraped):
    _, found = scraped
    assert named(found, "accelerant_queue_jobs_limit") == [1000]
    assert named(found, "accelerant_queue_jobs") == [0]
    assert named(found, "accelerant_worker_up", device="cpu:0") == [1]
    assert named(found, "accelerant_device_lost", device="cpu:0") == [0]
    assert named(found, "accelerant_jobs", state="succeeded")[0] >= 1
    assert named(found, "accelerant_device_memory_used_bytes", device="cpu:0")[0] > 0
    assert sum(named(found, "accelerant_op_calls_total", op="field_mul")) >= 2


def test_every_metric_and_alert_of_the_page_is_served(scraped):
    _, found = scraped
    names = {name for name, _ in found}
    table = PAGE.partition("## Metrics and alerts")[2].partition("\n## ")[0]
    metrics, alerts = table.split("| alert on |")
    for name in re.findall(r"`(accelerant_\w+)`", metrics):
        assert names & {name, f"{name}_count"}, name
    expressions = re.findall(r"\| `(.*)` \|$", alerts, re.MULTILINE)
    assert len(expressions) >= 5
    for expression in expressions:
        promql_parser.parse(expression)
        for name in re.findall(r"accelerant_\w+", expression):
            assert name in names or name == "accelerant_fallbacks_total", name


def test_events_show_devices_queue_requests_and_jobs(server):
    with Client(server.url, trust_env=False) as client:

        async def both():
            begun = asyncio.Event()

            def enough(seen):
                if "state" in seen:  # which comes every second to those who are subscribed
                    begun.set()
                return seen.get("job", {}).get("state") == "succeeded"

            reading = asyncio.create_task(changes(server, enough))
            await begun.wait()
            await asyncio.to_thread(
                client.submit, "field_add", {"x": np.arange(3, dtype=np.uint64), "y": np.uint64([1])}
            )
            return await reading

        seen = asyncio.run(both())
    assert seen["start"]["buckets_s"] == list(BUCKETS_S)
    assert seen["job"]["operation"] == "field_add"
    state = seen["state"]
    assert [device["device"] for device in state["devices"]] == ["cpu:0"]
    assert state["queue"]["jobs_limit"] == 1000
    assert [worker["label"] for worker in state["workers"]] == ["cpu:0"]
    assert all(len(row["counts"]) == len(BUCKETS_S) + 1 for row in state["requests"].values())


@pytest.fixture
def telemetry(settings, monkeypatch):
    monkeypatch.setattr(monitor, "_counts", type(monitor._counts)())
    return Telemetry(JobService(settings, operations="served:OPERATIONS"), settings)


def test_a_lost_device_is_a_metric_for_an_alert(telemetry):
    monitor.publish("cuda:1", "lost", "an illegal access")
    found = samples(telemetry.metrics().decode())
    assert named(found, "accelerant_device_lost", device="cuda:1") == [1]
    assert named(found, "accelerant_device_events_total", device="cuda:1", kind="lost") == [1]


def test_devices_are_read_again_after_a_failure(telemetry, monkeypatch):
    watches = []

    @contextlib.contextmanager
    def watch(devices, samples):
        watches.append(devices)
        if len(watches) == 1:
            raise RuntimeError("the driver is being replaced")
        telemetry.close()
        yield

    monkeypatch.setattr(module, "watch_devices", watch)
    monkeypatch.setattr(module, "_RETRY_S", 0.01)
    telemetry._watch()
    assert len(watches) == 2


def test_latencies_are_counted_in_their_bucket(telemetry):
    for seconds, status in ((0.0001, 200), (0.001, 200), (0.0011, 500), (1e9, 200)):
        telemetry.observe(
            RequestRecord("r", "POST", "/", operation="ntt", backend="cpu", status=status, seconds=seconds)
        )
    telemetry.observe(RequestRecord("r", "GET", "/devices", status=200, seconds=1.0))  # of no operation
    (row,) = telemetry._latencies().values()
    assert row["counts"] == [2, 1, *[0] * (len(BUCKETS_S) - 2), 1]
    assert row["errors"] == 1


def test_events_end_when_the_service_stops(telemetry):
    class Jobs:
        async def list(self, key_id, limit):
            return []

    async def main():
        telemetry._jobs.list = Jobs().list
        names = []
        async for name, _ in telemetry.events():
            names.append(name)
            telemetry.close()
        return names

    assert asyncio.run(asyncio.wait_for(main(), 10)) == ["start"]
