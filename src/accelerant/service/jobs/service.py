"""JobService: short calls and durable jobs on the workers of a server.

A short call stays in memory: queue, worker, answer. A job is durable when `submit` returns: its arrays are a file in
the service's private directory, its record a row of the store. An accepted request outlives failures:

    worker or device lost    the request runs once more, on another device if there is one; the second loss fails it
                             with the reason. Progress of a resumable job between two losses starts the count anew. A
                             loss with another cause, such as a call that ran beside the job, is not counted at first
    store away               work goes on for as long as the lease, and what has ended is written when the store is back
    server stops (SIGTERM)   `drain`: running work ends, resumable jobs save their state and go back to the queue
    server killed            its jobs go back to the queue when their leases expire, on any server of the same store

    directory/jobs/ID/inputs        removed with the state of the job's work when it ends
                     /work/         Context.directory
                     /result.N      the result of attempt N, kept for the retention
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from sqlalchemy.exc import DBAPIError

from accelerant.errors import ConfigError
from accelerant.service import errors
from accelerant.service.jobs import wire
from accelerant.service.jobs.queue import Call, CallQueue, WorkerProcess
from accelerant.service.jobs.store import Claim, JobStore
from accelerant.service.jobs.wire import Job, JobRequest, JobState, QueueStats, merge_kind
from accelerant.service.jobs.worker import load_operations

if TYPE_CHECKING:
    from accelerant.service.operations import OpSpec
    from accelerant.service.settings import ServiceSettings

_log = logging.getLogger("accelerant.service")
_T = TypeVar("_T")

_STORE_ERRORS = (DBAPIError, OSError)
"""Errors of a store that cannot be reached, among them those of the socket that pg8000 lets through."""

_STORE = "the job store"

_PRUNE_S = 30.0  # time between two removals of old jobs
_LATE_S = 0.02  # time between two looks at the deadlines of the calls
_ORPHAN_S = 3600.0  # age of a folder from which it is of no job that is being added
_END_S = 600.0  # time for which a server tries to write how a job ended, while the store is away
_MOST_EXCUSED = 5  # attempts of a job of which a loss is not counted that had another cause


class JobService:
    """The queue and workers of a server process, for one event loop; `operations` is their "module:attribute"."""

    def __init__(
        self, settings: ServiceSettings, *, operations: str = "accelerant.service.operations:OPERATIONS"
    ) -> None:
        self.settings = settings
        self._place = ",".join((operations, *settings.ops))
        self.operations = load_operations(self._place)
        self._queue = CallQueue(settings.queue_jobs, settings.queue_bytes)
        self._directory = Path(settings.directory)
        self._lease_s = settings.lease_s
        self._store: JobStore | None = None
        self._workers: list[WorkerProcess] = []
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="store")
        self._disk_threads = ThreadPoolExecutor(4, thread_name_prefix="files")
        self._lease_thread = ThreadPoolExecutor(1, thread_name_prefix="lease")  # which wait for no list and no file
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str, tuple[Claim, WorkerProcess]] = {}
        self._reporting: set[str] = set()  # jobs whose progress is being written
        self._wiped: set[str] = set()  # ended jobs without inputs
        self._busy = 0  # workers that claim or run a job
        self._accepting = False
        self._drained = False
        self._claiming = False
        self._fed_soon = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._stopped: float | None = None  # when `stop_claiming` was called
        self._hurried = False
        self._away: dict[str, float] = {}  # what fails, and since when
        self._renewed = time.monotonic()
        self._counts: tuple[dict[str, int], int] = ({}, 0)
        self._subscribers: set[asyncio.Queue[dict[str, Any] | None]] = set()  # None ends them
        self._seconds = 1.0  # of a job, averaged over the latest

    # --- life --------------------------------------------------------------------------------------------------------
    async def start(self) -> None:
        """Open the store, take over what was left, start workers until one is ready; ConfigError, ServiceError."""
        volume = await self._in_thread(open_directory, self._directory)
        resumable = {name for name, operation in self.operations.items() if operation.resumable}
        self._store = JobStore(
            self.settings.state_url, owner=secrets.token_hex(16), volume=volume, resumable=resumable,
            lease_s=self._lease_s,
        )  # fmt: skip
        await self._in_thread(self._store.upgrade)
        devices = list(self.settings.devices) or ["auto"]
        for number, device in enumerate(devices):
            self._add_worker(device, device if devices.count(device) == 1 else f"{device}#{number}")
        await self._first_ready()
        self._accepting = self._claiming = True
        self._wake()
        self._spawn(self._watch())
        self._spawn(self._hold())
        self._spawn(self._tidy())

    def _add_worker(self, device: str, name: str) -> None:
        worker = WorkerProcess(
            device, name, self._place, started=self._started, idle=self._measured, lost=self._lost,
            progressed=self._progressed,
        )  # fmt: skip
        self._workers.append(worker)
        self._spawn(worker.run())
        self._spawn(self._job_loop(worker))

    def _started(self, others: list[str]) -> None:
        """Give the other devices of an automatic choice workers, and the new worker calls."""
        for device in others:
            if all(worker.device != device for worker in self._workers):
                self._add_worker(device, device)
        self._feed()

    async def _first_ready(self) -> None:
        while not any(worker.ready.is_set() for worker in self._workers):
            if all(worker.failure for worker in self._workers):
                reason = self._workers[0].failure
                await self.drain(0.0)
                raise errors.ServiceError(f"no worker starts: {reason}; its messages are above")
            await asyncio.sleep(0.02)

    def stop_claiming(self) -> None:
        """Start no more jobs, and ask the resumable ones that run to save their state. Requests are still answered."""
        if self._stopped is not None:
            return
        self._stopped, self._claiming = time.monotonic(), False
        for claim, worker in self._running.values():
            if self.operations[claim.job.operation].resumable:
                worker.tell_job("stop", reason="drain")

    def stop_accepting(self) -> None:
        """Refuse new calls and jobs; what is there goes on, and is answered about."""
        self._accepting = False

    def hurry(self) -> None:
        """Wait for nothing that runs: a drain ends at once."""
        self._hurried = True

    def drain_left_s(self, timeout_s: float) -> float:
        """Return what is left of a drain's time, which counts from `stop_claiming`."""
        return 0.0 if self._hurried or self._stopped is None else self._stopped + timeout_s - time.monotonic()

    async def settle(self, timeout_s: float, after_s: float = 0.0) -> None:
        """Wait until nothing runs, and, if something did, for `after_s` more; in all for the time of a drain."""
        last = -math.inf  # when something ran
        while self.drain_left_s(timeout_s) > 0:
            if self._busy or self._queue.held:
                last = time.monotonic()
            elif time.monotonic() >= last + after_s:
                return
            await asyncio.sleep(0.02)

    def end_calls(self) -> None:
        """Fail the calls that wait or run: their clients are answered before the connections end."""
        for call in self._queue.calls:
            if not call.future.done():
                call.future.set_exception(errors.Draining("the server stopped before the call had ended"))
        self._queue.clear()

    async def drain(self, timeout_s: float) -> None:
        """Take no new work, end what runs within the time since `stop_claiming`, and stop the workers.

        Resumable jobs are asked to save their state at once and go back to the queue, where the next server finds them;
        so do the jobs that do not end in time. Calls that do not end in time fail. A second drain does nothing.
        """
        if self._drained:
            return
        self._drained = True
        self.stop_accepting()
        self.stop_claiming()
        await self.settle(timeout_s)
        self.end_calls()
        for worker in self._workers:
            await worker.close()
        end = time.monotonic() + self._lease_s
        while self._busy and self._store is not None and time.monotonic() < end:
            await asyncio.sleep(0.02)  # until the store knows that their jobs are queued again
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._store is not None:
            await self._in_thread(self._store.close)
        for queue in self._subscribers:
            _put(queue, None)
        for threads in (self._threads, self._disk_threads, self._lease_thread):
            threads.shutdown(wait=False)

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task

    async def _watched(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """Use the store and the files in a thread; log the first error of an outage, and its end."""
        began, files = time.monotonic(), f"files, in {getattr(function, '__name__', 'work')}"
        try:
            found = await self._in_thread(function, *arguments, **named)
        except _STORE_ERRORS as error:
            what = files if getattr(error, "filename", None) is not None else _STORE
            if what not in self._away:
                self._away[what] = time.monotonic()
                reason = error.orig if isinstance(error, DBAPIError) else error
                _log.error("%s: %s; nothing more is logged until this works again", what, reason)
            raise
        for what in (files,) if function is wire.wipe else (files, _STORE):
            if (since := self._away.get(what, math.inf)) < began:  # a call that began before it says nothing
                del self._away[what]
                _log.info("%s: works again, after %.1f s", what, time.monotonic() - since)
        return found

    async def _stored(self, function: Callable[..., _T], *arguments: Any, **named: Any) -> _T:
        """Use the store for a caller."""
        try:
            return await self._watched(function, *arguments, **named)
        except _STORE_ERRORS:
            raise errors.StoreUnavailable("the job store cannot be reached; try again later") from None

    async def _tried(
        self, function: Callable[..., _T], *arguments: Any, repeat_s: float = 0.0, **named: Any
    ) -> _T | None:
        """Use the store and the files for this server; where they fail, repeat for so long, then return None."""
        end = time.monotonic() + repeat_s
        while True:
            with contextlib.suppress(*_STORE_ERRORS):
                return await self._watched(function, *arguments, **named)
            if time.monotonic() >= end:
                return None
            await asyncio.sleep(0.5)

    async def _in_thread(
        self, function: Callable[..., _T], *arguments: Any, threads: ThreadPoolExecutor | None = None, **named: Any
    ) -> _T:
        work = partial(function, *arguments, **named)
        return await asyncio.get_running_loop().run_in_executor(threads or self._threads, work)

    async def _on_disk(self, function: Callable[..., _T], *arguments: Any) -> _T:
        return await self._in_thread(function, *arguments, threads=self._disk_threads)

    @property
    def store(self) -> JobStore:
        """The store, once the service has started."""
        if self._store is None:
            raise errors.Draining("the service has not started")
        return self._store

    def _require_accepting(self, operation: str) -> OpSpec:
        if not self._accepting:
            raise errors.Draining("the server is stopping")
        if operation not in self.operations:
            raise ConfigError(f"no operation {operation[:100]!r}; there are {', '.join(sorted(self.operations))}")
        return self.operations[operation]

    # --- short calls -------------------------------------------------------------------------------------------------
    async def call(self, request: JobRequest) -> dict[str, np.ndarray]:
        """Run a short call as `call_on` does, and return its result."""
        return (await self.call_on(request))[0]

    async def call_on(self, request: JobRequest) -> tuple[dict[str, np.ndarray], str]:
        """Run a short call; return its result, with arrays that may be read-only, and the label of the device."""
        operation, loop = self._require_accepting(request.operation), asyncio.get_running_loop()
        deadline = time.monotonic() + self._limit_s(request)
        kind = request.kind or (merge_kind(request) if operation.elementwise else None)
        call = Call(request, deadline, kind, loop.create_future(), request.size_bytes)
        self._queue.put(call)
        if not self._fed_soon:  # after the other requests that the event loop has ready, for larger batches
            self._fed_soon = True
            loop.call_soon(self._feed)
        if call.deadline < self._alarm_at:
            self._set_alarm(call.deadline)
        return await call.future, call.device

    def _limit_s(self, request: JobRequest) -> float:
        return self.settings.deadline_s if request.deadline_s is None else request.deadline_s

    def _set_alarm(self, deadline: float) -> None:
        """Look at the calls' deadlines when the first one passes: one timer for all costs less than one each."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = deadline
        self._alarm = asyncio.get_running_loop().call_later(deadline - time.monotonic(), self._end_late)

    def _end_late(self) -> None:
        self._alarm, self._alarm_at, now = None, math.inf, time.monotonic()
        for call in self._queue.calls:
            if call.deadline <= now and not call.future.done():
                late = f"{call.request.operation} did not end within {self._limit_s(call.request):g} s"
                call.future.set_exception(errors.DeadlineExceeded(late))
        if left := [call.deadline for call in self._queue.calls if not call.future.done()]:
            self._set_alarm(max(min(left), now + _LATE_S))  # not once for each of many

    def _feed(self) -> None:
        self._fed_soon = False
        ready = [worker for worker in self._workers if worker.ready.is_set()]
        for worker in ready:
            if not worker.launches and (calls := self._queue.take(worker.name, alone=len(ready) == 1)):
                worker.send_calls(calls)

    def _measured(self, calls: int, seconds: float) -> None:
        self._queue.measured(calls, seconds)
        self._feed()

    def _lost(self, worker: WorkerProcess, reason: str, calls: list[Call]) -> None:
        """Repeat the calls of a lost worker, or fail those that lost their second."""
        for call in calls:
            call.losses += 1
            call.avoid = worker.name
            if call.losses > 1 and not call.future.done():
                call.future.set_exception(errors.WorkerLost(f"{reason}, for the second time"))
            else:
                self._queue.put_back(call)
        self._feed()

    # --- jobs: callers -----------------------------------------------------------------------------------------------
    async def submit(self, request: JobRequest) -> Job:
        """Accept a job, durable when this returns; QueueFull for too many or large ones, StoreUnavailable else."""
        self._require_accepting(request.operation)
        id = secrets.token_hex(16)
        try:
            await self._on_disk(self._write_inputs, id, request.inputs)
        except OSError as error:  # such as a full disk, which half a file would keep full
            await self._on_disk(wire.wipe, self._folder(id))
            _log.error("the inputs of a job cannot be written: %s", error)
            raise errors.StoreUnavailable(f"the inputs cannot be kept: {error.strerror}") from None
        row = {
            "id": id, "operation": request.operation, "parameters": json.dumps(dict(request.parameters)),
            "key_id": request.key_id, "priority": request.priority, "request_id": request.request_id,
            "deadline": None if request.deadline_s is None else time.time() + request.deadline_s,
            "input_bytes": request.size_bytes,
        }  # fmt: skip
        try:
            bounds = {"most_jobs": self.settings.queue_jobs, "most_bytes": self.settings.queue_bytes}
            job = await self._stored(self.store.add, row, retry_after_s=min(60.0, max(1.0, self._seconds)), **bounds)
        except errors.QueueFull:
            await self._on_disk(wire.wipe, self._folder(id))
            raise
        except errors.StoreUnavailable as error:
            error.retry_after_s = None  # the job may have been added nevertheless: a repetition would run it twice
            raise
        self._wake()
        self._publish(job)
        return job

    async def get(self, id: str, key_id: str | None) -> Job:
        """Return a job of a key, or of any key if `key_id` is None; raise JobNotFound."""
        return await self._stored(self.store.get, id, key_id)

    async def list(
        self, key_id: str | None, state: JobState | None = None, limit: int = 100, before: str | None = None
    ) -> list[Job]:
        """Return jobs, the newest first; `before` is the id of the last one of the page before."""
        return await self._stored(self.store.jobs, key_id, state, limit, before)

    async def result(self, id: str, key_id: str | None) -> dict[str, np.ndarray]:
        """Return the result of a job; raises JobNotFinished, JobFailed or Cancelled with the reason, or ResultGone."""
        job = await self.get(id, key_id)
        if not job.state.final:
            raise errors.JobNotFinished(f"job {id} is {job.state}; its result is not there yet")
        if job.state is JobState.CANCELLED:
            raise errors.Cancelled(f"job {id} was cancelled")
        if job.state is JobState.FAILED:
            raise errors.JobFailed(job.error or "it failed")
        try:
            if job.result_bytes is None:
                raise FileNotFoundError
            return await self._on_disk(wire.read_file, self._result_file(job))
        except FileNotFoundError:
            raise errors.ResultGone(
                f"the result of job {id} is gone: {job.message or 'its file is not here'}"
            ) from None

    async def cancel(self, id: str, key_id: str | None) -> Job:
        """Cancel a queued job; ask a running one to end when it next reports its progress. Others stay as they are."""
        job = await self.get(id, key_id)
        if not job.state.final:
            if await self._stored(self.store.cancel, id):
                await self._on_disk(self._wipe_all_but, id, None)
            elif id in self._running:
                self._running[id][1].tell_job("stop", reason="cancel")
            job = await self.get(id, key_id)
            self._publish(job)
        return job

    # --- jobs: workers -----------------------------------------------------------------------------------------------
    async def _job_loop(self, worker: WorkerProcess) -> None:
        while True:
            await worker.ready.wait()
            worker.wake.clear()
            self._busy += 1
            try:
                if await self._claim_and_run(worker):
                    continue
            except Exception:  # noqa: BLE001 - logged; the worker goes on with other jobs
                _log.exception("running a job on %s failed", worker.name)
            finally:
                self._busy -= 1
            with contextlib.suppress(TimeoutError):
                # wait_for of Python 3.11 may lose the cancellation by `drain`
                async with asyncio.timeout(self._poll_s):
                    await worker.wake.wait()

    async def _claim_and_run(self, worker: WorkerProcess) -> bool:
        """Run the next job, if there is one, and return whether there was."""
        if not self._claiming:
            return False
        free = [other for other in self._workers if other is not worker and other.ready.is_set() and other.job is None]
        claim = await self._tried(self.store.claim, worker.name, self.operations, alone=not free)
        if claim is None:
            return False
        if self._stopped is not None:  # since the claim was begun
            await self._tried(self.store.release, claim.job, repeat_s=self._lease_s)
            return False
        await self._run(claim, worker)
        return True

    async def _run(self, claim: Claim, worker: WorkerProcess) -> None:
        job, folder = claim.job, self._folder(claim.job.id)
        if (earlier := self._running.get(job.id)) is not None and earlier[1].job == job.id:
            earlier[1].kill("another attempt of its job has begun", blameless=True)
        self._running[job.id] = claim, worker
        self._publish(job)
        began = time.monotonic()
        try:
            if not self.operations[job.operation].resumable:
                await self._tried(wire.wipe, folder / "work")
            message = {
                "id": job.id, "attempt": job.attempts, "operation": job.operation, "parameters": claim.parameters,
                "deadline": claim.deadline, "directory": str(folder / "work"), "inputs": str(folder / "inputs"),
                "result": str(self._result_file(job)), "lease": time.time() + self._lease_s,
            }  # fmt: skip
            ended = await worker.run_job(message, claim.deadline)
            self._seconds += 0.2 * (time.monotonic() - began - self._seconds)
            await self._tried(self._write_end, job, ended, repeat_s=_END_S)
        finally:
            if job.id in self._running and self._running[job.id][1] is worker:  # another may repeat it already
                del self._running[job.id]
        with contextlib.suppress(errors.ServiceError):
            self._publish(await self.get(job.id, None))
        self._wake()

    def _write_end(self, job: Job, ended: Mapping[str, Any]) -> None:
        """Write how an attempt ended; wipe what a job that has ended leaves."""
        result: Path | None = None
        if "lost" in ended or "suspended" in ended:
            lost = "" if self._drained else str(ended.get("lost", ""))
            excused = ended.get("blameless") and job.attempts <= _MOST_EXCUSED
            state = self.store.release(job, lost=lost, counted=ended.get("begun", True) and not excused)
            over = state is not None and state.final
        elif error := ended.get("error"):
            if error[0] == "Cancelled":
                over = self.store.finish(job, JobState.CANCELLED)
            else:
                over = self.store.finish(job, JobState.FAILED, error=": ".join(error))
        else:
            result = self._result_file(job)
            over = self.store.finish(job, JobState.SUCCEEDED, result_bytes=ended["result_bytes"])
            if not over:
                wire.wipe(result)
        if over:
            self._wipe_all_but(job.id, result)

    def _progressed(self, head: Mapping[str, Any]) -> None:
        if (entry := self._running.get(head["id"])) is not None:
            job = replace(entry[0].job, progress=head["progress"], message=head["message"])
            self._running[job.id] = replace(entry[0], job=job), entry[1]
            self._publish(job)
            if job.id not in self._reporting:
                self._reporting.add(job.id)
                self._spawn(self._report(job.id))

    async def _report(self, id: str) -> None:
        """Write the latest progress of a job; what is reported meanwhile is the next to be written."""
        written: Job | None = None
        try:
            while (entry := self._running.get(id)) is not None and entry[0].job is not written:
                written = entry[0].job
                await self._tried(self.store.report, written, written.progress, written.message)
        finally:
            self._reporting.discard(id)

    # --- keeping the store -------------------------------------------------------------------------------------------
    @property
    def _poll_s(self) -> float:
        return min(1.0, self._lease_s / 4)

    async def _watch(self) -> None:
        """Take over the jobs of servers that are gone."""
        while True:
            await self._tried(self._watch_once)
            await asyncio.sleep(self._poll_s)

    async def _tidy(self) -> None:
        """Remove what is old, which may take long: the jobs of servers that are gone do not wait for it."""
        while True:
            await self._tried(self._prune)
            await self._tried(self._remove_orphans)
            await asyncio.sleep(_PRUNE_S)

    async def _hold(self) -> None:
        """Renew the leases of the jobs that run here."""
        self._renewed = time.monotonic()
        renewal = self._spawn(self._renew())
        while True:
            await asyncio.wait({renewal}, timeout=self._lease_s / 2)  # what takes longer may still succeed
            if time.monotonic() - self._renewed > self._lease_s:  # the store is out of reach: others run our jobs
                for id, (_, worker) in self._running.items():
                    if worker.job == id:
                        reason = f"the worker of {worker.name} was ended: the job store cannot be reached"
                        worker.kill(reason, blameless=True)
            await asyncio.sleep(self._poll_s)
            if renewal.done():
                renewal = self._spawn(self._renew())

    async def _renew(self) -> None:
        running = dict(self._running)
        until = time.time() + self._lease_s
        jobs = [claim.job for claim, _ in running.values()]
        answer = await self._tried(self.store.renew, jobs, threads=self._lease_thread)
        if answer is None:
            return
        self._renewed = time.monotonic()
        held, cancelled = answer
        for id, (claim, worker) in running.items():
            now = self._running.get(id)
            if now is None or now[0].job.attempts != claim.job.attempts or worker.job != id:
                continue  # it has ended since, or is not sent yet
            if id not in held:
                worker.kill(f"the worker of {worker.name} was ended: another server has its job", blameless=True)
            elif id in cancelled:
                worker.tell_job("stop", reason="cancel")
            else:
                worker.tell_job("lease", until=until)

    def _watch_once(self) -> None:
        self._counts = self.store.counts()
        for id, state in self.store.take_over(set(self._running)):
            _log.warning("job %s: its server ended; it is %s", id, state)
            if state.final:
                self._wipe_all_but(id, None)
        for id in self.store.expire():
            self._wipe_all_but(id, None)

    def _prune(self) -> None:
        removed, gone = self.store.prune(self.settings.retention_s, self.settings.stored_bytes)
        for id in removed:
            wire.wipe(self._folder(id))
        for id in gone:
            self._wipe_all_but(id, None)

    def _remove_orphans(self) -> None:
        """Remove what servers left that were killed before they added a job, or after they ended one."""
        folders: dict[str, float] = {}
        for path in (self._directory / "jobs").iterdir():
            with contextlib.suppress(FileNotFoundError):  # another server has removed it
                folders[path.name] = path.stat().st_mtime
        states = self.store.states(folders)
        self._wiped &= folders.keys()
        for id, changed in folders.items():
            if id not in states and time.time() - changed > _ORPHAN_S:
                wire.wipe(self._folder(id))
            elif id in states and states[id].final and id not in self._wiped:
                self._wipe_inputs(id)
                self._wiped.add(id)

    # --- files -------------------------------------------------------------------------------------------------------
    def _folder(self, id: str) -> Path:
        return self._directory / "jobs" / id

    def _result_file(self, job: Job) -> Path:
        return self._folder(job.id) / f"result.{job.attempts}"

    def _write_inputs(self, id: str, inputs: Mapping[str, np.ndarray]) -> None:
        folder = self._folder(id)
        folder.mkdir(mode=0o700)
        wire.write_file(folder / "inputs", inputs)

    def _wipe_inputs(self, id: str) -> None:
        wire.wipe(self._folder(id) / "inputs")
        wire.wipe(self._folder(id) / "work")
        with contextlib.suppress(OSError):  # a result is in it
            self._folder(id).rmdir()

    def _wipe_all_but(self, id: str, result: Path | None) -> None:
        """Wipe the files of a job that has ended, also the results of earlier attempts."""
        for file in self._folder(id).glob("result.*"):
            if file != result:
                wire.wipe(file)
        self._wipe_inputs(id)

    # --- statistics and events ---------------------------------------------------------------------------------------
    def stats(self) -> QueueStats:
        """Return the state of queue and workers."""
        states, size = self._counts
        waiting = len(self._queue)
        return QueueStats(
            queued=waiting + states.get(JobState.QUEUED, 0),
            running=self._queue.held - waiting + states.get(JobState.RUNNING, 0),
            bytes=self._queue.held_bytes + size,
            jobs={state.value: states.get(state.value, 0) for state in JobState},
            workers=tuple(worker.stats() for worker in self._workers),
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the workers' devices. Any thread may ask."""
        return tuple(worker.label for worker in list(self._workers))

    def ledgers(self) -> tuple[dict[str, Any], ...]:
        """Return the ledgers of the worker processes, some seconds old; a process that was restarted begins anew."""
        return tuple(worker.ledger for worker in self._workers if worker.ledger)

    async def subscribe(self) -> AsyncIterator[dict[str, Any]]:
        """Yield each job that changes, as a dictionary; a slow reader misses the oldest."""
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue(1000)
        self._subscribers.add(queue)
        try:
            while (job := await queue.get()) is not None:
                yield job
        finally:
            self._subscribers.discard(queue)

    def _publish(self, job: Job) -> None:
        for queue in self._subscribers:
            _put(queue, asdict(job))

    def _wake(self) -> None:
        for worker in self._workers:
            worker.wake.set()


def _put(queue: asyncio.Queue[dict[str, Any] | None], job: dict[str, Any] | None) -> None:
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(job)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.error("a task of the job service failed", exc_info=error)


def open_directory(directory: Path) -> str:
    """Create the private directory, and return the name of the volume, which its first server gave it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"directory {directory} cannot be made: {error.strerror}") from None
    (directory / "jobs").mkdir(mode=0o700, exist_ok=True)
    status = directory.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise ConfigError(
            f"{directory} must be this user's alone (mode 700), since inputs are kept there; its mode is "
            f"{status.st_mode & 0o777:o}"
        )
    named = directory / "volume"
    with contextlib.suppress(FileExistsError):
        content = directory / f".volume.{secrets.token_hex(8)}"
        content.write_text(secrets.token_hex(16), encoding="ascii")
        try:
            os.link(content, named)
        finally:
            content.unlink()
    return named.read_text(encoding="ascii")
