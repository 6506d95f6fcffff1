"""The service under load: requests a second and latency, what it adds to a call, overload, and faults."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from accelerant.bench.record import OURS, Row
from accelerant.bench.suite import Suite, SuiteCase, SuiteRun, option
from accelerant.bench.timer import Timing
from accelerant.cli.bench import run_command
from accelerant.errors import AccelerantError
from accelerant.zk import field, ntt
from benchmarks.service_load import (
    Answer,
    Connection,
    Endpoint,
    connections,
    infer,
    outputs_of,
    run_loop,
    started,
)

__all__ = ["ServiceSuite"]

_PATH = "/v2/models/{}/infer"
_ROUNDS = 5
_ECHO_SHARE = 0.6
"""Requests a second to reach, as a share of those of a FastAPI application that returns the bodies it gets."""

_GROWTH_MIB = 16.0
"""Growth of the server's and the worker's memory over the rounds to stay within."""

_QUEUE = 16
_SAMPLES = 200
_KILL_EVERY_S = 20.0


@dataclass(frozen=True)
class ServiceSuite(Suite):
    """Measure `accelerant serve`: requests a second beside a FastAPI echo, latency, overload, and killed workers."""

    name = "service"
    examples: ClassVar[tuple[str, ...]] = ("", "--minutes 30", "--requests 10000 --out service.json")

    requests: int = option(1000, "Requests of a round.", min=1)
    clients: int = option(64, "Connections, each with one request at a time.", min=1)
    elements: int = option(1024, "Elements of a product in the default field.", min=1)
    minutes: float = option(1.0, "Minutes of mixed traffic with a worker killed every 20 s; 0 for none.", min=0.0)

    def cases(self, run: SuiteRun) -> list[SuiteCase]:
        """Return the cases."""
        cases = [
            SuiteCase("throughput", self._throughput),
            SuiteCase("overhead", self._overhead),
            SuiteCase("overload", self._overload),
        ]
        return [*cases, SuiteCase("faults", self._faults)] if self.minutes else cases

    def _products(self) -> tuple[bytes, bytes, Callable[[], object]]:
        """Return a request of products, the bytes of its result, and the library's call."""
        goldilocks = field("goldilocks")
        x, y = goldilocks.random(self.elements), goldilocks.random(self.elements)
        wanted = np.asarray(goldilocks.mul(x, y)).tobytes()
        return infer(_PATH.format("field_mul"), {"x": x, "y": y}), wanted, partial(goldilocks.mul, x, y)

    def _row(self, op: str, case: str, **values: object) -> Row:
        return Row(self.name, op, case, OURS, "accelerant serve", **values)  # type: ignore[arg-type]

    # --- speed -------------------------------------------------------------------------------------------------------

    def _throughput(self, run: SuiteRun) -> None:
        """Measure rounds of requests in turns with the echo; and the memory from the first to the last."""
        request, wanted, _ = self._products()
        echo = request.replace(_PATH.format("field_mul").encode(), b"/echo", 1)
        _, _, body = echo.partition(b"\r\n\r\n")
        case = f"{self.elements:,} elements, {self.clients} clients"
        run.progress(f"field_mul, {case}")
        spent: dict[str, list[float]] = {"ours": [], "echo": []}  # ms a request
        latencies: list[float] = []

        async def rounds(ours: Endpoint, other: Endpoint) -> float:
            async with connections(ours, self.clients) as to_ours, connections(other, self.clients) as to_echo:
                turns = {
                    "ours": (to_ours, request, lambda answer: outputs_of(answer) == wanted),
                    "echo": (to_echo, echo, lambda answer: answer.body == body),
                }
                first = 0.0
                for number in range(_ROUNDS + 1):  # the first warms up
                    for name, (clients, sent, right) in turns.items():
                        times, seconds = await _round(clients, sent, self.requests, right)
                        if number:
                            spent[name].append(seconds * 1e3 / self.requests)
                            latencies.extend(times if name == "ours" else ())
                    if not number:
                        first = ours.memory_mib()
                return ours.memory_mib() - first

        with started("accelerant", _device(run)) as ours, started("echo") as other:
            grown = run_loop(lambda: rounds(ours, other))
        load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores" if hasattr(os, "getloadavg") else ""
        timings = {name: Timing.of(values) for name, values in spent.items()}
        rates = {name: f"{1e3 / timing.p50_ms:,.0f} requests/s" for name, timing in timings.items()}
        share = timings["echo"].p50_ms / timings["ours"].p50_ms
        note = f"{rates['ours']}, {share:.2f} of the echo's; {len(latencies):,} requests, no error; {load}"
        run.add(
            self._row("field_mul", case, target_x=_ECHO_SHARE, note=note).timed(timings["ours"]),
            Row(self.name, "field_mul", case, "fastapi", "echo of the same bodies", note=rates["echo"]).timed(
                timings["echo"]
            ),
            self._row("latency", case, note=_quantiles(latencies)).timed(_timing(latencies)),
            self._row("memory", case, unit="MiB", target=_GROWTH_MIB, p20=grown, p50=grown, p80=grown,
                      note=f"growth from {self.requests:,} requests to {(_ROUNDS + 1) * self.requests:,}"),
        )  # fmt: skip

    def _overhead(self, run: SuiteRun) -> None:
        """Measure one client's requests beside the library's call in this process."""
        request, wanted, call = self._products()
        case = f"{self.elements:,} elements, 1 client"
        run.progress(f"field_mul, {case}")

        async def one(endpoint: Endpoint) -> list[float]:
            async with connections(endpoint, 1) as clients:
                right = lambda answer: outputs_of(answer) == wanted  # noqa: E731
                await _round(clients, request, 50, right)
                return (await _round(clients, request, max(100, self.requests // 4), right))[0]

        with started("accelerant", _device(run)) as endpoint:
            times = run_loop(lambda: one(endpoint))
        plain = []
        for _ in range(200):
            began = time.perf_counter()
            call()
            plain.append((time.perf_counter() - began) * 1e3)
        service, library = _timing(times), Timing.of(plain[100:])
        note = f"{service.p50_ms - library.p50_ms:.2f} ms more than the call in a process; {_quantiles(times)}"
        run.add(
            self._row("request", case, note=note).timed(service),
            Row(self.name, "call", case, OURS, "field.mul on the CPU").timed(library),
        )

    # --- overload ----------------------------------------------------------------------------------------------------

    def _overload(self, run: SuiteRun) -> None:
        """Send ten times what the queue holds: each request is answered rightly or refused, and no job is lost."""
        request, wanted, _ = self._products()
        data = np.arange(1 << 12, dtype=np.uint64)
        transformed = np.asarray(ntt(data, "goldilocks")).tobytes()
        job = infer(_PATH.format("ntt"), {"x": data}, headers="Prefer: respond-async\r\n")
        run.progress("overload")
        tally: Counter[str] = Counter()

        async def main(endpoint: Endpoint) -> None:
            async with connections(endpoint, 10 * _QUEUE) as clients:
                for name, sent, good in (("calls", request, 200), ("jobs", job, 202)):
                    answers = [one for _ in range(3) for one in await asyncio.gather(*(c.send(sent) for c in clients))]
                    for answer in answers:
                        if answer.status == 429:
                            _require(int(answer.headers.get(b"retry-after", b"0")) >= 1, "a 429 has no Retry-After")
                        else:
                            _require(answer.status == good, f"{name} were answered with status {answer.status}")
                        tally[f"{name} {answer.status}"] += 1
                        if answer.status == 200:
                            _require(outputs_of(answer) == wanted, "a product is wrong")
                        if answer.status == 202:
                            await _finished(clients[0], answer.json()["job"]["id"], transformed)

        with started("accelerant", _device(run), queue_jobs=_QUEUE, concurrency=1000) as endpoint:
            run_loop(lambda: main(endpoint))
        for name, good in (("calls", 200), ("jobs", 202)):
            done, refused = tally[f"{name} {good}"], tally[f"{name} 429"]
            _require(refused > 0, f"no {name} were refused")
            share = 100.0 * refused / (done + refused)
            run.add(self._row(
                "overload", f"{name}, 10 times the queue's {_QUEUE}", unit="% refused", p20=share, p50=share, p80=share,
                note=f"{done} done with the right result, {refused} refused with 429, none lost",
            ))  # fmt: skip

    # --- faults ------------------------------------------------------------------------------------------------------

    def _faults(self, run: SuiteRun) -> None:
        """Send mixed traffic while workers are killed: each request ends in a true result or a stated failure."""
        traffic = list(_traffic())
        tally: Counter[str] = Counter()
        run.progress(f"{self.minutes:g} min of mixed traffic, with a worker killed every {_KILL_EVERY_S:g} s")
        memory: list[float] = []

        async def client(connection: Connection, number: int, until: float) -> None:
            generator = random.Random(number)
            while time.monotonic() < until:
                name, request, wanted = generator.choice(traffic)
                answer = await connection.send(request)
                if answer.status == 202:
                    ended = await _finished(connection, answer.json()["job"]["id"], wanted, may_fail=True)
                    tally["failures stated" if ended else "jobs"] += 1
                elif answer.status == 200:
                    _require(outputs_of(answer) == wanted, f"the result of {name} is wrong")
                    tally["calls"] += 1
                else:
                    _require(answer.status in (429, 503), f"{name} was answered with {answer.status}: {answer.body!r}")
                    tally["refused" if answer.status == 429 else "failures stated"] += 1

        async def kills(endpoint: Endpoint, until: float) -> None:
            every_s = min(_KILL_EVERY_S, 60.0 * self.minutes / 2)
            while until - time.monotonic() > every_s:
                await asyncio.sleep(every_s)
                memory.append(endpoint.memory_mib())
                for pid in endpoint.workers():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM)
                    tally["kills"] += 1

        async def main(endpoint: Endpoint) -> None:
            until = time.monotonic() + 60.0 * self.minutes
            async with connections(endpoint, 16) as clients:
                work = [client(connection, number, until) for number, connection in enumerate(clients)]
                await asyncio.gather(*work, kills(endpoint, until))

        with started("accelerant", _device(run)) as endpoint:
            run_loop(lambda: main(endpoint))
        answered = tally["calls"] + tally["jobs"]
        _require(answered > 0 and tally["kills"] > 0, f"the traffic did not run: {dict(tally)}")
        rate = answered / (60.0 * self.minutes)
        note = f"{tally['kills']} workers killed; {tally['calls']:,} calls and {tally['jobs']:,} jobs right, "
        note += f"{tally['failures stated']} failures stated, {tally['refused']} refused with 429, none lost"
        if len(memory) > 1:
            note += f"; {memory[0]:.0f} MiB of memory before the first kill, {memory[-1]:.0f} before the last"
        run.add(self._row("faults", f"{self.minutes:g} min, 16 clients", unit="requests/s", better="higher", p20=rate,
                          p50=rate, p80=rate, note=note))  # fmt: skip


def _device(run: SuiteRun) -> str:
    return "cpu" if run.device.backend == "cpu" else run.device.label


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise AccelerantError(otherwise)


def _timing(times: list[float]) -> Timing:
    """Return the quantiles of latencies, and at most 200 of them, evenly by rank, as samples."""
    timing = Timing.of(times)
    ordered = sorted(timing.samples)
    return replace(timing, samples=tuple(ordered[:: -(-len(ordered) // _SAMPLES)]))


def _quantiles(times: list[float]) -> str:
    p50, p99 = np.percentile(times, [50, 99])
    return f"p50 {p50:.2f} ms, p99 {p99:.2f} ms"


async def _round(
    clients: list[Connection], request: bytes, count: int, right: Callable[[Answer], bool]
) -> tuple[list[float], float]:
    """Send a request so many times; return the milliseconds of each, and the seconds of all."""
    numbers: Iterator[int] = iter(range(count))
    times: list[float] = []

    async def client(connection: Connection) -> None:
        for _ in numbers:
            began = time.perf_counter()
            answer = await connection.send(request)
            times.append((time.perf_counter() - began) * 1e3)
            _require(answer.status == 200, f"a request was answered with status {answer.status}: {answer.body[:200]!r}")
            _require(right(answer), "an answer is wrong")

    began = time.perf_counter()
    await asyncio.gather(*map(client, clients))
    return times, time.perf_counter() - began


async def _finished(connection: Connection, id: str, wanted: bytes, *, may_fail: bool = False) -> bool:
    """Wait for a job's end and check its result; return whether it failed with a reason, where it may."""
    until = time.monotonic() + 120.0
    while (job := (await connection.get(f"/jobs/{id}")).json())["state"] in ("queued", "running"):
        _require(time.monotonic() < until, f"job {id} is {job['state']} after two minutes")
        await asyncio.sleep(0.05)
    if job["state"] == "failed" and may_fail:
        _require("WorkerLost" in job["error"], f"job {id} failed: {job['error']}")
        return True
    _require(job["state"] == "succeeded", f"job {id} is {job['state']}: {job['error']}")
    answer = await connection.send(
        f"GET /jobs/{id}/result HTTP/1.1\r\nHost: localhost\r\nAccept: application/octet-stream\r\n\r\n".encode()
    )
    _require(answer.status == 200 and outputs_of(answer) == wanted, f"the result of job {id} is wrong")
    return False


def _traffic() -> Iterator[tuple[str, bytes, bytes]]:
    """Yield operations of several kinds and sizes: name, request, bytes of the result."""
    goldilocks, scalars = field("goldilocks"), field("bn254_fr")
    for size in (1, 100, 1024, 20_000):
        x, y = goldilocks.random(size), goldilocks.random(size)
        yield (
            "field_mul",
            infer(_PATH.format("field_mul"), {"x": x, "y": y}),
            np.asarray(goldilocks.mul(x, y)).tobytes(),
        )
    a, b = scalars.random(300), scalars.random(300)
    request = infer(_PATH.format("field_add"), {"x": a, "y": b}, field="bn254_fr")
    yield "field_add", request, np.asarray(scalars.add(a, b)).tobytes()
    for power in (10, 16):
        x = goldilocks.random(1 << power)
        wanted = np.asarray(ntt(x, "goldilocks")).tobytes()
        for headers in ("", "Prefer: respond-async\r\n"):
            yield "ntt", infer(_PATH.format("ntt"), {"x": x}, headers=headers), wanted


if __name__ == "__main__":
    run_command(ServiceSuite)
