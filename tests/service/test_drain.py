"""The end of a service: what it answers from the signal on, until its last job has ended."""

import asyncio
import contextlib
import signal
import time
from dataclasses import replace

import httpx
import numpy as np
import pytest
import uvicorn
from test_job_service import X, request, started

from accelerant.service import AsyncClient
from accelerant.service.app import _Server, create_app
from accelerant.service.errors import Draining
from accelerant.service.guard import guarded_protocol
from accelerant.service.jobs.service import JobService
from accelerant.service.jobs.wire import JobState

pytestmark = pytest.mark.slow


@pytest.fixture
def serving(running, settings):
    """Serve jobs of the operations of served.py over HTTP in this process; `running` sets the workers' path."""

    @contextlib.asynccontextmanager
    async def start(**changes):
        changed = replace(settings, **changes)
        app = create_app(changed)
        jobs = app.state.jobs = app.state.inference.jobs = JobService(changed, operations="served:OPERATIONS")
        app.state.operations["work"] = app.state.operations["field_inv"]  # which describes results of numbers
        http = guarded_protocol(changed)
        server = _Server(uvicorn.Config(app, port=0, http=http, ws="none", lifespan="on", log_config=None))
        task = asyncio.create_task(server._serve())
        while not server.started:
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        try:
            yield server, task, jobs, f"http://127.0.0.1:{port}"
        finally:
            server.handle_exit(signal.SIGTERM, None)
            jobs.hurry()
            await task

    return start


async def test_a_server_that_drains_answers_until_its_last_job_has_ended(serving, tmp_path):
    over = tmp_path / "over"
    async with serving() as (server, task, jobs, url), httpx.AsyncClient(base_url=url, trust_env=False) as http:
        job = await started(jobs, await jobs.submit(request("work", until=str(over))))
        call = asyncio.create_task(jobs.call(request("double", until=str(over))))
        while not jobs._workers[0].launches:
            await asyncio.sleep(0)
        server.handle_exit(signal.SIGTERM, None)
        await asyncio.sleep(0.7)  # uvicorn stopped listening by then
        paths = ("/v2/health/live", "/metrics", f"/jobs/{job.id}", "/v2/health/ready", f"/jobs/{job.id}/result")
        assert [(await http.get(path)).status_code for path in paths] == [200, 200, 200, 503, 409]
        body = {"inputs": [{"name": n, "shape": [1], "datatype": "UINT64", "data": [3]} for n in "xy"]}
        assert server.config.app.state.telemetry._thread.is_alive()  # it still reads the devices
        for headers in ({}, {"prefer": "respond-async"}):
            refused = await http.post("/v2/models/field_mul/infer", json=body, headers=headers)
            assert (refused.status_code, refused.json()["type"]) == (503, "Draining")
            assert refused.headers["retry-after"] == "5"
        over.touch()
        async with AsyncClient(url, trust_env=False) as client:
            np.testing.assert_array_equal((await client.result(job.id))["y"], X + 1)
        np.testing.assert_array_equal((await call)["y"], 2 * X)
        await task
        with pytest.raises(httpx.ConnectError):
            await http.get("/v2/health/live")


@pytest.mark.parametrize("how", ["time", "signal"])
async def test_a_drain_ends_at_its_limit_and_at_a_second_signal(serving, running, settings, how):
    """Calls that wait are answered, and jobs go back to the queue; so they do with several workers."""

    limits = {"drain_s": 1.0 if how == "time" else 600.0, "devices": ("cpu", "cpu")}
    async with serving(**limits) as (server, task, jobs, _):
        work = [await started(jobs, await jobs.submit(request("work", seconds=600.0))) for _ in range(2)]
        train = await jobs.submit(request("train", steps=10, seconds=600.0))
        call = asyncio.create_task(jobs.call(request("double", seconds=600.0)))
        while not any(worker.launches for worker in jobs._workers):
            await asyncio.sleep(0)
        begun = time.monotonic()
        server.handle_exit(signal.SIGTERM, None)
        if how == "signal":
            await asyncio.sleep(0.1)
            server.handle_exit(signal.SIGINT, None)
        await task
        assert time.monotonic() - begun < 60.0  # of the 600 s that each would take
        with pytest.raises(Draining):
            await call
    async with running(devices=("cpu",), state_url=settings.state_url) as after:
        states = {(await after.get(job.id, None)).state for job in (*work, train)}
        assert states <= {JobState.QUEUED, JobState.RUNNING}
