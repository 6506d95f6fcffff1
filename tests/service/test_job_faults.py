"""Faults at random times: killed workers, killed servers, lost connections. Every accepted request has a true end."""

import asyncio
import contextlib
import errno
import itertools
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from test_job_service import X, ended, files, request, started

from accelerant.errors import RangeError, TimeLimitExceeded
from accelerant.service.app import create_app
from accelerant.service.errors import DeadlineExceeded, StoreUnavailable, WorkerLost, refusal_of
from accelerant.service.jobs import wire
from accelerant.service.jobs.wire import JobState
from processes import in_threads

pytestmark = pytest.mark.slow

SERVER = """
import asyncio, pathlib, sys
from accelerant.service.jobs.service import JobService
from accelerant.service.settings import ServiceSettings
url, directory = sys.argv[1:]
async def main():
    settings = ServiceSettings(state_url=url, directory=pathlib.Path(directory), devices=("cpu",), lease_s=4.0)
    service = JobService(settings, operations="served:OPERATIONS")
    await service.start()
    print("ready", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


@contextlib.asynccontextmanager
async def another_server(service):
    """Run a second server process on the store and the directory of a service."""
    command = [sys.executable, "-c", SERVER, service.settings.state_url, str(service.settings.directory)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_jobs_of_a_killed_server_are_taken_over(running, tmp_path):
    over = tmp_path / "over"

    async with running() as service, another_server(service) as other:
        jobs = [await service.submit(request("work", np.arange(n), until=str(over))) for n in range(4)]
        train = await service.submit(request("train", steps=30, seconds=1.2))
        async with asyncio.timeout(60.0):
            while len(await service.list(None, JobState.RUNNING)) < 2:
                await asyncio.sleep(0.02)
        other.send_signal(signal.SIGKILL)
        over.touch()
        for n, job in enumerate(jobs):
            assert (await ended(service, job)).state is JobState.SUCCEEDED
            np.testing.assert_array_equal((await service.result(job.id, None))["y"], np.arange(n) + 1)
        assert (await ended(service, train)).state is JobState.SUCCEEDED
        attempts = [job.attempts for job in await service.list(None)]
        assert sorted(attempts) == [1] * 4 + [2]  # the killed server had one


async def test_a_job_is_cancelled_through_another_server(running, postgres_url):
    async with running(state_url=postgres_url) as service:
        job = await started(service, await service.submit(request("work", steps=1000, seconds=30.0)))
        async with running(state_url=postgres_url) as other:
            await other.cancel(job.id, "key")
            assert (await ended(other, job, 20.0)).state is JobState.CANCELLED


@pytest.mark.parametrize("kills", [6, pytest.param(60, marks=pytest.mark.soak)])
async def test_every_request_has_a_true_end_while_workers_are_killed(running, settings, kills):
    """Two workers, one of which is killed at random times: results are right, or the second loss is stated."""
    generator, numbers, over = random.Random(kills), itertools.count(), asyncio.Event()
    tally = {"right": 0, "lost": 0, "refused": 0}
    clients = 8

    async def calls(service):
        while not over.is_set():
            array = np.array(generator.choices(range(100, 10_000), k=generator.randrange(200)), dtype=np.uint64)
            bad = next(numbers) % 20 == 7
            try:
                result = await service.call(request("double", np.append(array, 13 if bad else 14), seconds=0.002))
                np.testing.assert_array_equal(result["y"], 2 * np.append(array, 14))
                tally["right"] += 1
            except WorkerLost:
                tally["lost"] += 1
            except RangeError:
                assert bad
                tally["refused"] += 1

    async def submits(service, jobs):
        while not over.is_set():
            number = generator.randrange(1000)
            if len(jobs) % 5 == 4:
                new = request("train", steps=20, seconds=0.5)
            else:
                new = request("work", np.array([number]), steps=5, seconds=0.2)
            jobs.append((await service.submit(new), number))
            await asyncio.sleep(0.2)

    async def kill(service):
        for number in range(kills):
            while not (alive := [worker.pid for worker in service.stats().workers if worker.pid is not None]):
                await asyncio.sleep(0.01)
            with contextlib.suppress(ProcessLookupError):
                os.kill(generator.choice(alive), signal.SIGKILL)
            await asyncio.sleep(generator.uniform(0.0, 0.5))
            wanted = tally["right"] + 40 * (number % 2)  # after every second kill the service computes again
            while tally["right"] < wanted:
                await asyncio.sleep(0.01)
        over.set()

    async with asyncio.timeout(60.0 + 10.0 * kills), running(devices=("cpu", "cpu")) as service:
        jobs = []
        await asyncio.gather(*(calls(service) for _ in range(clients)), submits(service, jobs), kill(service))
        for job, number in jobs:
            job = await ended(service, job)
            if job.state is JobState.FAILED:
                assert job.attempts >= 2  # the first losses beside calls, which may be the cause, do not count
                assert job.error.endswith("was ended by SIGKILL, for the second time")
            else:
                result = await service.result(job.id, None)
                assert result.get("count", result.get("y")) == (20 if job.operation == "train" else number + 1)
        assert sum(worker.restarts for worker in service.stats().workers) > 0
        async with asyncio.timeout(60.0):  # a job's files are wiped when the store knows its end
            while files(service, folders=True) & {"inputs", "work"}:
                await asyncio.sleep(0.05)
    assert tally["right"] >= 40 * (kills // 2)
    assert 2 * tally["lost"] <= clients * kills  # each was in the workers of two kills, with at most all the others
    assert tally["refused"] > 0


async def test_lost_connections_to_the_store_lose_no_job(running, postgres_url):
    engine = sa.create_engine(postgres_url.replace("://", "+pg8000://"), isolation_level="AUTOCOMMIT")
    end_all = sa.text("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()")

    async with running(state_url=postgres_url) as service:
        jobs = []
        for _ in range(10):
            with contextlib.suppress(StoreUnavailable):
                jobs.append(await service.submit(request("work", steps=4, seconds=0.1)))
            with engine.connect() as connection:
                connection.execute(end_all)
            await asyncio.sleep(0.1)
        assert jobs
        for job in jobs:
            job = await ended(service, job)
            assert job.state is JobState.SUCCEEDED
            np.testing.assert_array_equal((await service.result(job.id, None))["y"], X + 1)
    engine.dispose()


async def test_errors_of_the_socket_and_the_disk_end_no_task_of_a_server(running, monkeypatch):
    """pg8000 lets ConnectionResetError through; a folder may vanish while it is looked at."""

    async with running() as service:
        tasks = {task.get_coro().__qualname__ for task in service._tasks}
        for name in ("claim", "renew", "counts"):
            broken = getattr(service.store, name)
            reset = iter(range(2))

            def fail(*arguments, broken=broken, reset=reset, **named):
                if next(reset, None) is not None:
                    raise ConnectionResetError(104, "Connection reset by peer")
                return broken(*arguments, **named)

            monkeypatch.setattr(service.store, name, fail)
        job = await ended(service, await service.submit(request("work", steps=4, seconds=1.0)))
        assert job.state is JobState.SUCCEEDED
        assert {task.get_coro().__qualname__ for task in service._tasks} >= tasks


def test_an_outage_of_the_store_is_a_line_and_its_end_another(running, monkeypatch, caplog):
    async def main():
        async with running() as service:
            await ended(service, await service.submit(request("work")))
            caplog.clear()
            away = asyncio.Event()
            away.set()
            calls = []
            for name in ("claim", "renew", "counts", "get", "prune", "states"):
                whole = getattr(service.store, name)

                def fail(*arguments, whole=whole, **named):
                    calls.append(whole)
                    if away.is_set():
                        raise ConnectionRefusedError(111, "Connection refused")
                    return whole(*arguments, **named)

                monkeypatch.setattr(service.store, name, fail)
            while len(calls) < 8:
                with pytest.raises(StoreUnavailable):
                    await service.get("a", None)
                await asyncio.sleep(0.2)
            away.clear()
            await ended(service, await service.submit(request("work")))

    with caplog.at_level("INFO", "accelerant.service"):
        asyncio.run(main())
    lines = [record.getMessage() for record in caplog.records if "the job store" in record.getMessage()]
    assert len(lines) == 2, lines
    assert "Connection refused" in lines[0]
    assert "works again, after" in lines[1]


async def test_a_full_disk_refuses_a_job_and_leaves_nothing(running, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    async with running() as service:
        with monkeypatch.context() as patch:
            patch.setattr(wire.os, "fsync", full)
            with pytest.raises(StoreUnavailable, match="kept: No space left on device"):
                await service.submit(request("work"))
        assert not list(Path(service.settings.directory, "jobs").iterdir())
        assert (await ended(service, await service.submit(request("work")))).state is JobState.SUCCEEDED


def test_two_servers_may_wipe_the_same_folder(tmp_path):
    def one(barrier, folder, errors):
        barrier.wait()
        try:
            wire.wipe(folder)
        except OSError as error:
            errors.append(error)

    errors = []
    for number in range(50):
        folder = tmp_path / str(number)
        (folder / "work").mkdir(parents=True)
        for name in "abc":
            (folder / "work" / name).write_bytes(b"secret")
        barrier = threading.Barrier(2)
        in_threads(partial(one, barrier, folder, errors) for _ in range(2))
        assert not folder.exists()
    assert not errors


async def test_a_call_that_ends_workers_takes_no_other_call_and_no_job_with_it(running, tmp_path):
    over = tmp_path / "over"

    async with running() as service:
        job = await started(service, await service.submit(request("work", until=str(over))))
        first = asyncio.create_task(service.call(request("double", seconds=0.2)))  # the others wait meanwhile
        while not service._workers[0].launches:
            await asyncio.sleep(0)
        good = [service.call(request("double", seconds=0.001 * n)) for n in range(4)]
        calls = [*good[:2], service.call(request("work", how="kill")), *good[2:]]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers.pop(2), WorkerLost)
        for answer in [*answers, await first]:
            np.testing.assert_array_equal(answer["y"], 2 * X)
        over.touch()
        assert (await ended(service, job)).state is JobState.SUCCEEDED


async def test_a_call_longer_than_the_lease_repeats_no_job(running):
    async with running() as service:
        job = await started(service, await service.submit(request("work", steps=5, seconds=2.5)))
        await service.call(request("double", seconds=1.5 * service.settings.lease_s))
        job = await ended(service, job)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_leases_do_not_wait_for_lists(running, monkeypatch):
    async with running() as service:
        lease_s = service.settings.lease_s
        job = await started(service, await service.submit(request("work", steps=5, seconds=1.5 * lease_s)))
        monkeypatch.setattr(service.store, "jobs", lambda *arguments: time.sleep(2 * lease_s))
        await asyncio.gather(*(service.list(None) for _ in range(4)))
        job = await ended(service, job)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


@pytest.mark.parametrize("how", ["slow", "away"])
async def test_a_job_that_has_ended_is_not_repeated_while_its_end_is_written(running, monkeypatch, how):
    async with running(lease_s=2.0) as service:
        finish, first = service.store.finish, []

        def late(*arguments, **named):
            first.append(time.monotonic())
            if how == "slow":
                time.sleep(3.0)
            elif time.monotonic() < first[0] + 3.0:
                raise ConnectionResetError(104, "Connection reset by peer")
            return finish(*arguments, **named)

        monkeypatch.setattr(service.store, "finish", late)
        job = await ended(service, await service.submit(request("work", deadline_s=2.0)))
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_stalls_of_the_store_fail_no_job(running):
    """The server ends the work, as another may have taken it over; that is not the job's doing."""

    async with running(lease_s=1.0) as service:
        job = await service.submit(request("work", steps=5, seconds=5.0))
        for _ in range(2):
            async with asyncio.timeout(60.0):
                while service._workers[0].job is None:
                    await asyncio.sleep(0.02)
            await asyncio.sleep(0.5)
            other = sqlite3.connect(service.settings.state_url.removeprefix("sqlite:///"), isolation_level=None)
            other.execute("BEGIN IMMEDIATE")
            await asyncio.sleep(2.0)
            other.close()
        job = await ended(service, job)
        assert job.state is JobState.SUCCEEDED
        assert job.attempts >= 3  # each stall ended one; a busy machine may stall once more


async def test_renewals_that_take_most_of_a_lease_fail_no_job(running, monkeypatch):
    async with running(lease_s=5.0) as service:
        renew = service.store.renew
        monkeypatch.setattr(service.store, "renew", lambda *given: (renew(*given), time.sleep(2.8))[0])
        await asyncio.sleep(6.0)
        job = await ended(service, await service.submit(request("work", seconds=4.9)))
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_a_clock_that_is_set_forward_repeats_no_job(running, monkeypatch):
    async with running(devices=("cpu", "cpu"), lease_s=4.0) as service:
        job = await started(service, await service.submit(request("work", seconds=5.0)))
        clock = types.SimpleNamespace(time=lambda: time.time() + 60.0, monotonic=time.monotonic)
        renew = service.store.renew
        for module in ("store", "service"):
            monkeypatch.setattr(f"accelerant.service.jobs.{module}.time", clock)
        service.store.renew = lambda *given: (time.sleep(1.0), renew(*given))[1]  # after others have looked
        job = await ended(service, job)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_a_server_that_stood_still_keeps_what_its_worker_did(running):
    async with running(lease_s=2.0) as service:
        job = await started(service, await service.submit(request("work", seconds=2.5)))
        time.sleep(4.0)
        job = await ended(service, job)
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_bad_calls_fail_no_job_beside_them(running, tmp_path):
    over = tmp_path / "over"

    async with running() as service:
        job = await service.submit(request("work", until=str(over)))
        for _ in range(2):
            async with asyncio.timeout(60.0):
                while service._workers[0].job is None:
                    await asyncio.sleep(0.02)
            with pytest.raises(WorkerLost):
                await service.call(request("work", how="kill"))
        over.touch()
        assert (await ended(service, job)).state is JobState.SUCCEEDED


async def test_a_claim_whose_answer_was_lost_is_no_loss_of_the_job(running, monkeypatch):
    async with running(lease_s=1.0) as service:
        claim, cut = service.store.claim, []

        def lossy(*arguments, **named):
            claimed = claim(*arguments, **named)
            if claimed is not None and len(cut) < 2:
                cut.append(claimed)
                raise ConnectionResetError(104, "Connection reset by peer")
            return claimed

        monkeypatch.setattr(service.store, "claim", lossy)
        job = await ended(service, await service.submit(request("work")))
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 3)


async def test_a_job_is_not_charged_for_a_worker_that_had_ended(running, monkeypatch):
    async with running() as service:
        worker = service._workers[0]
        ended_because = worker._ended_because

        async def slow():
            await asyncio.sleep(1.0)
            return await ended_because()

        monkeypatch.setattr(worker, "_ended_because", slow)
        os.kill(worker.stats().pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        job = await ended(service, await service.submit(request("work")))
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 1)


async def test_reports_of_progress_do_not_pile_up(running, monkeypatch):
    async with running() as service:
        report, at_work, most = service.store.report, threading.Semaphore(1), []

        def slow(job, progress, message):
            most.append(at_work.acquire(blocking=False))
            time.sleep(0.8)
            at_work.release()
            return report(job, progress, message)

        monkeypatch.setattr(service.store, "report", slow)
        job = await ended(service, await service.submit(request("work", steps=40, seconds=4.0)))
        assert job.state is JobState.SUCCEEDED
        assert len(most) >= 2
        assert all(most)  # one after the other


async def test_a_repetition_that_begins_before_its_release_returns_keeps_its_lease(running, monkeypatch, tmp_path):
    async with running(devices=("cpu", "cpu"), lease_s=2.0) as service:
        release, lease_s = service.store.release, service.settings.lease_s

        def slow(*arguments, **named):
            state = release(*arguments, **named)
            time.sleep(0.5 * lease_s)
            return state

        monkeypatch.setattr(service.store, "release", slow)
        once = {"how": "kill", "once": str(tmp_path / "once"), "seconds": 2.5 * lease_s}
        job = await ended(service, await service.submit(request("work", **once)))
        assert (job.state, job.attempts) == (JobState.SUCCEEDED, 2)


async def test_a_submission_of_which_the_store_says_nothing_is_not_repeated(running, monkeypatch):
    async with running() as service:
        add = service.store.add

        def cut(*arguments, **named):
            add(*arguments, **named)
            raise ConnectionResetError(104, "Connection reset by peer")

        monkeypatch.setattr(service.store, "add", cut)
        with pytest.raises(StoreUnavailable) as caught:
            await service.submit(request("work"))
        assert caught.value.retry_after_s is None
        assert len(await service.list(None)) == 1


async def test_a_server_that_stops_claims_no_job(running):
    async with running() as service:
        train = await started(service, await service.submit(request("train", steps=1000, seconds=200.0)))
        service.stop_claiming()
        later = await service.submit(request("work"))
        async with asyncio.timeout(60.0):
            while (await service.get(train.id, None)).state is not JobState.QUEUED:
                await asyncio.sleep(0.02)
        np.testing.assert_array_equal((await service.call(request("double")))["y"], 2 * X)
        await asyncio.sleep(1.0)
        assert (await service.get(later.id, None)).attempts == 0
        assert service.drain_left_s(2.0) <= 1.0  # counted from stop_claiming
        await service.drain(2.0)


async def test_a_server_that_stops_as_its_worker_is_woken_ends(running, monkeypatch):
    async with asyncio.timeout(120.0), running() as service:
        worker = service._workers[0]

        async def close():
            await type(worker).close(worker)
            worker.wake.set()
            await asyncio.sleep(0)  # the event's waiter is done when `drain` cancels the task around it

        monkeypatch.setattr(worker, "close", close)
        await asyncio.sleep(0.2)  # it waits for a job


async def test_results_of_earlier_attempts_go_with_the_job(running):
    async with running() as service:
        jobs = [await service.submit(request("work", steps=2, seconds=0.4, how=how)) for how in ("", "raise")]
        folders = [Path(service.settings.directory, "jobs", job.id) for job in jobs]
        for folder in folders:
            (folder / "result.0").write_bytes(b"secret")
        for job in jobs:
            await ended(service, job)
        async with asyncio.timeout(60.0):
            while folders[1].exists():
                await asyncio.sleep(0.02)
        assert [path.name for path in folders[0].iterdir()] == ["result.1"]


async def test_the_signal_to_stop_ends_claims_before_connections_end(settings):
    app = create_app(settings)

    async with app.router.lifespan_context(app):
        for close in app.state.on_stop:
            close()
        async with asyncio.timeout(60.0):
            while app.state.jobs._claiming:
                await asyncio.sleep(0.02)
        assert app.state.jobs._accepting


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), TimeLimitExceeded("late")])
def test_a_deadline_is_not_the_clients_delay(error):
    assert refusal_of(error).status == 504
