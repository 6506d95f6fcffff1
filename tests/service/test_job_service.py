"""JobService on real worker processes: results, merging, failures, cancellation, restarts, bounds."""

import asyncio
import dataclasses
import json
import os
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa

from accelerant.errors import ConfigError, RangeError
from accelerant.service import errors
from accelerant.service.jobs.queue import WorkerProcess
from accelerant.service.jobs.service import JobService
from accelerant.service.jobs.wire import JobRequest, JobState
from accelerant.service.jobs.worker import Worker
from accelerant.service.settings import ServiceSettings

X = np.arange(100, 1124, dtype=np.uint64)


def request(operation, x=X, *, key_id="key", priority=0, deadline_s=None, **parameters):
    return JobRequest(operation, parameters, {"x": x}, key_id, priority, deadline_s)


async def ended(service, job, timeout_s=120.0):
    async with asyncio.timeout(timeout_s):
        while not (job := await service.get(job.id, None)).state.final:
            await asyncio.sleep(0.02)
    return job


async def started(service, job):
    async with asyncio.timeout(120.0):
        while (job := await service.get(job.id, None)).state is not JobState.RUNNING:
            await asyncio.sleep(0.02)
    return job


def test_a_job_is_not_sent_to_a_worker_that_is_starting():
    """It would run beside its repetition, whose end the first one's would be taken for."""
    nothing = dict.fromkeys(("started", "idle", "lost", "progressed"))
    worker = WorkerProcess("cpu", "cpu", "served:OPERATIONS", **nothing)
    sent = []
    worker._send = sent.append
    end = asyncio.run(worker.run_job({"id": "a"}, None))
    assert (end["begun"], worker.job, sent) == (False, None, [])


def test_a_message_that_follows_a_job_is_the_jobs():
    """The thread that reads may see it before the one that runs jobs has seen the job."""
    worker = Worker(None, "cpu", {})
    worker._told({"kind": "job", "id": "a", "directory": "", "deadline": None, "lease": 1.0})
    worker._told({"kind": "stop", "id": "a", "reason": "drain"})
    worker._told({"kind": "lease", "id": "a", "until": 2.0})
    _, context = worker._jobs.get_nowait()
    assert (context.stop, context.lease) == ("drain", 2.0)


async def test_a_worker_ends_when_another_server_has_its_job(running):
    async with running(lease_s=2.0) as service:
        job = await started(service, await service.submit(request("work", seconds=60.0)))
        worker = service._workers[0]
        async with asyncio.timeout(60.0):
            while worker.job is None:
                await asyncio.sleep(0.02)
            with service.store.engine.begin() as connection:
                taken = "UPDATE accelerant_jobs SET owner = 'other', attempts = attempts + 1, lease = lease + 3600"
                connection.execute(sa.text(taken))
            while worker.job is not None:
                await asyncio.sleep(0.02)
        found = await service.get(job.id, None)
        assert (found.state, found.attempts, found.error) == (JobState.RUNNING, 2, None)


def files(service, *, folders=False):
    """Return the names of files of jobs, or of all that is in their folders."""
    jobs = Path(service.settings.directory, "jobs")
    walked = [walk for walk in os.walk(jobs) if walk[0] != str(jobs)]  # not rglob, which raises for what is removed
    return {name for _, inner, names in walked for name in (*names, *(inner if folders else ()))}


async def only(service, *names):
    """Wait until nothing else of jobs is left; it is wiped after the job's end is written."""
    async with asyncio.timeout(60.0):
        while files(service, folders=True) != set(names):
            await asyncio.sleep(0.02)


async def test_calls_are_merged_and_each_gets_its_own_result(running, tmp_path):
    log, over = str(tmp_path / "log"), tmp_path / "over"

    async with running() as service:
        first = asyncio.create_task(service.call(request("double", until=str(over), log=log)))
        while not service._workers[0].launches:
            await asyncio.sleep(0)
        arrays = [np.arange(n, dtype=np.uint64) + 20 for n in (5, 0, 1, 7)]
        arrays[3][2] = 13  # this call alone fails
        others = asyncio.gather(
            *(service.call(request("double", array, log=log)) for array in arrays), return_exceptions=True
        )
        while service._queue.held < 5:
            await asyncio.sleep(0)
        over.touch()
        *good, bad = await others
        for array, result in zip(arrays, good, strict=False):
            np.testing.assert_array_equal(result["y"], 2 * array)
        assert isinstance(bad, RangeError)
        assert str(bad) == "13 cannot be doubled"
        np.testing.assert_array_equal((await first)["y"], 2 * X)
        assert service.stats().queued == service.stats().running == service.stats().bytes == 0
        with pytest.raises(ConfigError, match="no operation 'nothing'; there are double, fit, train, work"):
            await service.call(request("nothing"))
    # The first alone; the others in one launch, which fails, and so each again.
    assert Path(log).read_text().split() == ["1024", "13", "5", "0", "1", "7"]


async def test_inputs_and_results_keep_dtype_and_shape(running):
    arrays = [
        np.array(3.5), np.zeros((0, 4), np.float32), np.ones((2, 3, 4), np.int8), np.array([True, False]),
        np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)), np.arange(10)[::2],
    ]  # fmt: skip

    async with running() as service:
        for array in arrays:
            for result in (
                await service.call(request("work", array)),
                await service.result((await ended(service, await service.submit(request("work", array)))).id, "key"),
            ):
                np.testing.assert_array_equal(result["y"], array + 1)
                assert result["y"].dtype.newbyteorder("=") == (array + 1).dtype


async def test_a_job_is_private_and_its_inputs_are_wiped(running, settings, tmp_path):
    over = tmp_path / "over"

    async with running() as service:
        job = await service.submit(request("work", until=str(over)))
        assert job.state is JobState.QUEUED
        assert "inputs" in files(service)
        with pytest.raises(errors.JobNotFinished, match=f"job {job.id} is"):
            await service.result(job.id, "key")
        assert (await started(service, job)).device == "cpu"
        for key in ("another", ""):
            with pytest.raises(errors.JobNotFound):
                await service.get(job.id, key)
            with pytest.raises(errors.JobNotFound):
                await service.cancel(job.id, key)
        assert await service.list("another") == []
        over.touch()
        job = await ended(service, job)
        assert (job.state, job.progress, job.error, job.attempts) == (JobState.SUCCEEDED, 1.0, None, 1)
        np.testing.assert_array_equal((await service.result(job.id, "key"))["y"], X + 1)
        await only(service, "result.1")
        async with asyncio.timeout(60.0):
            while (service._folder(job.id) / "work").exists():
                await asyncio.sleep(0.02)
        folders = [settings.directory, *settings.directory.rglob("*")]
        assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in folders if path.name != "volume")


async def test_a_directory_that_others_read_is_refused(running, settings):
    settings.directory.mkdir(mode=0o755)

    with pytest.raises(ConfigError, match=r"must be this user's alone \(mode 700\).*; its mode is 755"):
        async with running():
            pass


async def test_a_worker_that_does_not_start_is_an_error(running):
    with pytest.raises(errors.ServiceError, match="no worker starts: the worker of cpu:9 ended with status 1"):
        async with running(devices=("cpu:9",)):
            pass


async def test_failures_are_stated(running):
    async with running() as service:
        job = await ended(service, await service.submit(request("work", how="refuse")))
        assert (job.state, job.error) == (JobState.FAILED, "RangeError: 7 is out of range")
        with pytest.raises(errors.JobFailed, match="RangeError: 7 is out of range"):
            await service.result(job.id, "key")
        job = await ended(service, await service.submit(request("work", how="raise")))
        assert job.error == "JobFailed: work failed with ZeroDivisionError; the server's log has the details"
        with pytest.raises(errors.JobFailed, match="work failed with ZeroDivisionError"):
            await service.call(request("work", how="raise"))
        assert service.stats().workers[0].restarts == 0
        await only(service)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "lost"])
async def test_a_lost_worker_is_restarted_and_its_work_repeated_once(running, tmp_path, how):
    reason = {"kill": "the worker of cpu was ended by SIGKILL", "lost": "cpu was lost: illegal memory access"}[how]

    async with running() as service:
        # Once: the repetition gives the result, also to an innocent call that was in the worker.
        innocent = asyncio.create_task(service.call(request("double", seconds=0.3)))
        job = await service.submit(request("work", how=how, once=str(tmp_path / "once"), steps=4, seconds=0.2))
        job = await ended(service, job)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 2)
        np.testing.assert_array_equal((await innocent)["y"], 2 * X)
        np.testing.assert_array_equal((await service.result(job.id, "key"))["y"], X + 1)
        # Always: the second loss is the last, and the service goes on.
        job = await ended(service, await service.submit(request("work", how=how)))
        assert (job.state, job.attempts) == (JobState.FAILED, 2)
        assert job.error == f"WorkerLost: {reason}, for the second time"
        with pytest.raises(errors.WorkerLost, match=f"{reason}, for the second time"):
            await service.call(request("work", how=how))
        np.testing.assert_array_equal((await service.call(request("double")))["y"], 2 * X)
        assert service.stats().workers[0].restarts == 5


async def test_a_repetition_goes_to_another_device(running, monkeypatch, tmp_path):
    log = tmp_path / "log"

    async def all_ready(service):  # the only one that takes work also gets the repetition
        async with asyncio.timeout(60.0):
            while not all(worker.alive for worker in service.stats().workers):
                await asyncio.sleep(0.01)

    async with running(devices=("cpu", "cpu")) as service:
        await all_ready(service)
        claim, names = service.store.claim, []

        def noted(device, *arguments, **named):
            if (claimed := claim(device, *arguments, **named)) is not None:
                names.append(device)
            return claimed

        monkeypatch.setattr(service.store, "claim", noted)
        job = await service.submit(request("work", how="kill", once=str(tmp_path / "once"), seconds=0.1))
        assert (await ended(service, job)).state is JobState.SUCCEEDED
        assert sorted(names) == ["cpu#0", "cpu#1"]
        await all_ready(service)
        restarts = [worker.restarts for worker in service.stats().workers]
        with pytest.raises(errors.WorkerLost):
            await service.call(request("work", how="kill", log=str(log)))
        assert [worker.restarts for worker in service.stats().workers] == [count + 1 for count in restarts]


async def test_cancel(running):
    async with running() as service:
        job = await service.submit(request("work", steps=500, seconds=50))
        waiting = await service.submit(request("work"))
        assert (await service.cancel(waiting.id, "key")).state is JobState.CANCELLED
        await started(service, job)
        await service.cancel(job.id, "key")
        job = await ended(service, job, 30.0)
        assert (job.state, job.error) == (JobState.CANCELLED, None)
        with pytest.raises(errors.Cancelled):
            await service.result(job.id, "key")
        assert (await service.cancel(job.id, "key")) == job
        await only(service)


@pytest.mark.slow
async def test_deadlines(running, monkeypatch):
    monkeypatch.setattr("accelerant.service.jobs.queue._GRACE_S", 1.0)
    monkeypatch.setattr("accelerant.service.jobs.queue._STUCK_S", 0.5)

    async with running() as service:
        with monkeypatch.context() as patch:
            patch.setattr(service.store, "expire", list)  # a slow machine may begin the job late
            job = await ended(service, await service.submit(request("work", steps=500, seconds=50, deadline_s=1.0)))
        assert job.state is JobState.FAILED
        assert job.error.startswith("DeadlineExceeded: the deadline passed when ")
        job = await ended(service, await service.submit(request("work", how="hang", deadline_s=3.0)))
        assert (job.error, job.attempts) == ("DeadlineExceeded: the deadline passed; the operation was ended", 1)
        # A call that hangs costs the worker, and nobody else's call.
        np.testing.assert_array_equal((await service.call(request("double")))["y"], 2 * X)
        hangs = asyncio.create_task(service.call(request("work", how="hang", deadline_s=1.0)))
        while not service._workers[0].launches:
            await asyncio.sleep(0)
        other = asyncio.create_task(service.call(request("double")))
        with pytest.raises(errors.DeadlineExceeded, match=r"work did not end within 1 s"):
            await hangs
        np.testing.assert_array_equal((await other)["y"], 2 * X)
        assert service.stats().workers[0].restarts == 2
        # Jobs and calls that never began.
        long = await started(service, await service.submit(request("work", steps=500, seconds=50)))
        late = await ended(service, await service.submit(request("work", deadline_s=0.2)), 30.0)
        assert late.error == "DeadlineExceeded: the deadline passed while the job was queued"
        assert (await service.get(long.id, None)).state is JobState.RUNNING


def test_deadlines_of_many_calls_are_looked_at_together(tmp_path, monkeypatch):
    service = JobService(ServiceSettings(directory=tmp_path), operations="served:OPERATIONS")
    service._accepting, looks, end_late = True, [], service._end_late
    monkeypatch.setattr(service, "_feed", lambda: None)
    monkeypatch.setattr(service, "_end_late", lambda: (looks.append(0), end_late()))

    async def main():
        calls = (service.call(request("double", deadline_s=0.1 + 0.001 * i)) for i in range(300))
        return await asyncio.gather(*calls, return_exceptions=True)

    assert {type(result) for result in asyncio.run(main())} == {errors.DeadlineExceeded}
    assert len(looks) < 30


async def test_the_queue_is_bounded_by_count_and_bytes(running, tmp_path):
    over = tmp_path / "over"

    async with running(queue_jobs=3, queue_bytes=5 * X.nbytes) as service:
        blocker = asyncio.create_task(service.call(request("double", until=str(over))))
        two = [asyncio.create_task(service.call(request("double"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(errors.QueueFull, match="the queue holds 3 requests, as many as it may") as caught:
            await service.call(request("double"))
        assert 1.0 <= caught.value.retry_after_s <= 60.0
        over.touch()
        await asyncio.gather(blocker, *two)
        with pytest.raises(errors.QueueFull, match="holds 0 bytes and may hold 40,960; the request has 65,536"):
            await service.call(request("double", np.tile(X, 8)))
        await service.call(request("double"))

        running_job = await service.submit(request("work", until=str(tmp_path / "never")))
        await started(service, running_job)
        queued = [await service.submit(request("work")) for _ in range(3)]
        with pytest.raises(errors.QueueFull):
            await service.submit(request("work"))
        assert len(list(Path(service.settings.directory, "jobs").iterdir())) == 4  # nothing is left of the refused
        await service.cancel(queued[0].id, "key")
        with pytest.raises(errors.QueueFull, match="may hold 40,960"):
            await service.submit(request("work", np.tile(X, 4)))


async def test_retention_and_the_limit_of_results(running, monkeypatch):
    async with running(stored_bytes=3 * 8300) as service:
        jobs = [await service.submit(request("work", key_id="many")) for _ in range(3)]
        jobs.append(await service.submit(request("work", key_id="few")))
        for job in jobs:
            await ended(service, job)
        await asyncio.to_thread(service._prune)
        with pytest.raises(errors.ResultGone, match="stored results reached their limit"):
            await service.result(jobs[0].id, "many")  # the oldest of the key that has most
        for job in jobs[1:]:
            np.testing.assert_array_equal((await service.result(job.id, None))["y"], X + 1)
        monkeypatch.setattr(service, "settings", dataclasses.replace(service.settings, retention_s=1e-3))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(service._prune)
        assert await service.list(None) == []
        await only(service)


async def test_pages_of_jobs(running):
    async with running() as service:
        ids = [(await service.submit(request("work", key_id=key))).id for key in "abab"]
        assert [job.id for job in await service.list(None)] == ids[::-1]
        assert [job.id for job in await service.list("a")] == [ids[2], ids[0]]
        assert [job.id for job in await service.list(None, limit=2, before=ids[2])] == [ids[1], ids[0]]
        for id in ids:
            await ended(service, await service.get(id, None))
        assert [job.id for job in await service.list("b", JobState.SUCCEEDED)] == [ids[3], ids[1]]
        assert await service.list("b", JobState.FAILED) == []


async def test_events(running):
    async with running() as service:
        seen = []

        async def watch():
            async for changed in service.subscribe():
                seen.append(changed)

        watcher = asyncio.create_task(watch())
        await asyncio.sleep(0)
        job = await service.submit(request("work", steps=4, seconds=1.2))
        async with asyncio.timeout(60.0):
            while not seen or seen[-1]["state"] != "succeeded":
                await asyncio.sleep(0.02)
    async with asyncio.timeout(60.0):
        await watcher  # the end of the service ends it
    states = [changed["state"] for changed in seen if changed["id"] == job.id]
    assert states[0] == "queued"
    assert states[-1] == "succeeded"
    assert any(0 < changed["progress"] < 1 for changed in seen)


@pytest.mark.slow
async def test_drain_ends_work_and_keeps_the_rest(running, tmp_path):
    over = tmp_path / "over"

    async with running() as service:
        short = await started(service, await service.submit(request("work", until=str(over))))
        call = asyncio.create_task(service.call(request("double", until=str(over))))
        queued = await service.submit(request("work"))
        stop = asyncio.create_task(service.drain(60.0))
        while service._accepting:
            await asyncio.sleep(0)
        for refused in (service.call, service.submit):
            with pytest.raises(errors.Draining):
                await refused(request("double"))
        over.touch()
        np.testing.assert_array_equal((await call)["y"], 2 * X)
        await stop
    async with running() as service:  # with a new worker and the same store
        assert (await service.get(short.id, None)).state is JobState.SUCCEEDED
        assert (await ended(service, queued)).attempts == 1
        # A resumable job saves its state; another that takes too long begins again. Neither is a loss.
        over.unlink()
        train = await service.submit(request("train", steps=40, seconds=0.4, until=str(over)))
        async with asyncio.timeout(60.0):
            while (await service.get(train.id, None)).progress < 0.5:
                await asyncio.sleep(0.02)
        await service.drain(60.0)
        over.touch()
    async with running() as service:
        train = await ended(service, train)
        assert (train.state, train.attempts) == (JobState.SUCCEEDED, 2)
        result = await service.result(train.id, None)
        assert result["count"] == 40
        assert result["first"] == 20


@pytest.mark.slow
async def test_training_resumes_after_more_losses_than_one(running):
    async with running() as service:
        job = await service.submit(request("train", steps=300, seconds=3.0))
        for share in (0.2, 0.5):
            async with asyncio.timeout(120.0):
                while (await service.get(job.id, None)).progress < share:
                    await asyncio.sleep(0.02)
            os.kill(service.stats().workers[0].pid, signal.SIGKILL)
        job = await ended(service, job)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 3)
        result = await service.result(job.id, None)
        assert result["count"] == 300
        assert result["first"] >= 0.5 * 300
        # Progress of others is lost with their worker: it does not count.
        job = await ended(service, await service.submit(request("work", steps=4, seconds=1.0, how="kill")))
        assert (job.state, job.attempts) == (JobState.FAILED, 2)


@pytest.mark.slow
async def test_a_real_training_goes_on_from_its_checkpoint(running, settings):
    """The model of a run that lost its worker, and then its server, is bit for bit that of an undisturbed one."""
    text = (Path(__file__).read_bytes() * 2)[:30_000]
    fit = JobRequest("fit", {"steps": 120}, {"text": np.frombuffer(text, np.uint8)})

    async def reached(service, job, steps):
        async with asyncio.timeout(180.0):
            while True:
                job = await service.get(job.id, None)
                assert not job.state.final, job
                if job.message.startswith("step ") and job.progress > 0.99 * steps / 120:
                    return
                await asyncio.sleep(0.02)

    async with running(lease_s=5.0) as service:
        job = await service.submit(fit)
        await reached(service, job, 10)
        os.kill(service.stats().workers[0].pid, signal.SIGKILL)
        await reached(service, job, 30)
        await service.drain(30.0)
    async with running(lease_s=5.0) as service:
        job = await ended(service, job)
        assert (job.state, job.attempts, job.error) == (JobState.SUCCEEDED, 3, None)
        result = await service.result(job.id, None)
        undisturbed = await ended(service, await service.submit(fit))
        wanted = await service.result(undisturbed.id, None)
        assert json.loads(result["summary"].tobytes())["steps"] == 120
        np.testing.assert_array_equal(result["model"], wanted["model"])
        await only(service, "result.3", "result.1")


async def test_what_a_killed_server_left_is_removed(running, monkeypatch, tmp_path):
    monkeypatch.setattr("accelerant.service.jobs.service._ORPHAN_S", 0.1)

    async with running() as service:
        done = await ended(service, await service.submit(request("work")))
        await only(service, "result.1")
        waits = await started(service, await service.submit(request("work", until=str(tmp_path / "never"))))
        for id in (done.id, "f" * 32):
            service._folder(id).mkdir(exist_ok=True)
            service._folder(id).joinpath("inputs").write_bytes(b"secret")
        await asyncio.sleep(0.2)
        service._wiped.clear()  # the periodic pass may have come between the job's end and these files
        await asyncio.to_thread(service._remove_orphans)
        assert {path.name for path in Path(service.settings.directory, "jobs").iterdir()} == {done.id, waits.id}
        assert files(service) == {"result.1", "inputs"}
        assert not service._folder(done.id).joinpath("inputs").exists()
        monkeypatch.setattr(service, "_wipe_inputs", None)  # nothing is left to wipe
        await asyncio.to_thread(service._remove_orphans)


def test_workers_end_with_their_server(running, settings):
    async def main():
        async with running() as service:
            await started(service, await service.submit(request("work", how="hang")))
            pid = service.stats().workers[0].pid
        for _ in range(3000):
            if not Path(f"/proc/{pid}").exists():
                return
            time.sleep(0.02)
        pytest.fail(f"process {pid} is still there")

    asyncio.run(main())
