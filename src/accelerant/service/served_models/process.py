"""The server's side of the processes of models: requests and their streams of events, restarts, and metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from accelerant.service.errors import Draining, Refused, ServiceError, WorkerLost
from accelerant.service.jobs import wire
from accelerant.service.jobs.wire import Child
from accelerant.service.settings import ServiceSettings

_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GAUGES = {
    "queued": "Requests that wait for blocks.", "waiting": "Sequences that wait in the engine.",
    "running": "Sequences that are computed.", "blocks_used": "Blocks of the cache in use.",
    "blocks_total": "Blocks of the cache.",
    "prefix_hit_tokens": "Tokens of prompts that were found in the cache, since the start.",
    "prefix_lookup_tokens": "Tokens of prompts that were looked for in the cache, since the start.",
    "preemptions": "Sequences whose blocks were taken by others, since the start.",
}  # fmt: skip


class ModelMetrics(Collector):
    """Metrics of all models, by model."""

    def __init__(self, models: Mapping[str, ModelProcess]) -> None:
        self._models = models
        options: dict[str, Any] = {"labelnames": ("model",), "registry": None}
        self.first = Histogram(
            "accelerant_model_first_token_seconds", "Time from a request to its first token.", buckets=_LATENCY_S,
            **options,
        )  # fmt: skip
        self.between = Histogram(
            "accelerant_model_between_tokens_seconds", "Time between two tokens of an answer.", buckets=_LATENCY_S,
            **options,
        )  # fmt: skip
        self.tokens_in = Counter("accelerant_model_prompt_tokens", "Tokens of prompts.", **options)
        self.tokens_out = Counter("accelerant_model_generated_tokens", "Tokens of answers.", **options)

    def register(self, registry: CollectorRegistry) -> None:
        """Add the metrics to a registry."""
        for one in (self.first, self.between, self.tokens_in, self.tokens_out, self):
            registry.register(one)

    def collect(self) -> Iterator[Metric]:
        """Yield what the models' processes said last."""
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"accelerant_model_{name}", text, labels=["model"])
            for model, process in self._models.items():
                if name in process.metrics:
                    gauge.add_metric([model], process.metrics[name])
            yield gauge
        up = GaugeMetricFamily("accelerant_model_up", "1 while the model's process takes requests.", labels=["model"])
        restarts = GaugeMetricFamily("accelerant_model_restarts", "Starts after the first one.", labels=["model"])
        for model, process in self._models.items():
            up.add_metric([model], int(process.ready.is_set()))
            restarts.add_metric([model], process.restarts)
        yield from (up, restarts)


@dataclass(slots=True, eq=False)
class Stream:
    """The events of a request, each a dict of `worker.ModelWorker.note`, as they come."""

    id: int
    choices: int
    queue: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    started: float = field(default_factory=time.monotonic)
    latest: dict[int, float] = field(default_factory=dict)
    ended: bool = False

    async def events(self) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield the events that have come, until all choices have ended; raise what went wrong."""
        left = self.choices
        while left:
            found = [await self.queue.get()]
            while not self.queue.empty():
                found.append(self.queue.get_nowait())
            for event in found:
                if isinstance(event, Exception):
                    self.ended = True
                    raise event
                left -= "reason" in event
            self.ended = not left
            yield found


class ModelProcess(Child):
    """The process of a model.

    Attributes:
        info: what the process says of its model: task ("generate" or "embed"), context, label of its device.
        metrics: of its engine, a second old at most.
    """

    start_s: ClassVar[float] = 3600.0  # a large model is read from a slow disk, and made int8
    loads_within_s: ClassVar[float] = 120.0
    """How long a request waits for a process that starts again."""

    def __init__(self, name: str, given: Mapping[str, Any]) -> None:
        super().__init__(f"model {name}", "accelerant.service.served_models.worker")
        self.model, self._given = name, given
        self.info: dict[str, Any] = {}
        self.metrics: dict[str, float] = {}
        self.created = int(time.time())
        self.observed: ModelMetrics | None = None
        self._numbers = itertools.count(1)
        self._streams: dict[int, Stream] = {}

    def arguments(self) -> list[str]:
        """Return the folder and the engine's options."""
        return [f"--model={json.dumps(dict(self._given))}"]

    @property
    def in_progress(self) -> int:
        """The number of requests that have not ended."""
        return len(self._streams)

    async def submit(self, choices: int, **request: Any) -> Stream:
        """Send a request; return its stream. Refused if the process does not start again soon."""
        if not self.ready.is_set():
            try:
                async with asyncio.timeout(self.loads_within_s):
                    await self.ready.wait()
            except TimeoutError:
                reason = self.failure or "its process is starting"
                raise Refused(503, "ModelNotReady", f"{self.name}: {reason}", retry_after_s=10) from None
        stream = Stream(next(self._numbers), choices)
        self._streams[stream.id] = stream
        self._send(wire.frame({"kind": "submit", "id": stream.id, **request}, {}))
        return stream

    def end(self, stream: Stream) -> None:
        """Forget a stream; what is not finished is cancelled."""
        if self._streams.pop(stream.id, None) is not None and not stream.ended:
            self._send(wire.frame({"kind": "cancel", "id": stream.id}, {}))

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End all streams with an error."""
        for stream in list(self._streams.values()):
            stream.queue.put_nowait(error())

    # --- from the process --------------------------------------------------------------------------------------------
    def _began(self, head: dict[str, Any]) -> None:
        self.info = {name: value for name, value in head.items() if name not in ("kind", "arrays")}

    def _heard(self, head: dict[str, Any], body: memoryview) -> None:
        kind = head["kind"]
        if kind == "events":
            for event in head["events"]:
                if (stream := self._streams.get(event["id"])) is not None:
                    self._observe(stream, event)
                    stream.queue.put_nowait(event)
        elif kind == "metrics":
            self.metrics = {name: head[name] for name in _GAUGES if name in head}
            if len(body):
                self._ledger = bytes(body)
        elif (stream := self._streams.get(head["id"])) is not None:
            if kind == "refused":
                error = Refused(
                    head["status"], head["error"], head["message"], head.get("retry_after_s"), param=head.get("param")
                )
                stream.queue.put_nowait(error)
            elif kind == "vectors":
                vectors = wire.restored(head["arrays"], body)["vectors"]
                if self.observed is not None:
                    self.observed.tokens_in.labels(self.model).inc(head["tokens"])
                stream.queue.put_nowait({"reason": "stop", "vectors": np.array(vectors), "tokens": head["tokens"]})

    def _observe(self, stream: Stream, event: Mapping[str, Any]) -> None:
        if (metrics := self.observed) is None or "prompt" in event or "echo" in event:
            return
        now, index = time.monotonic(), event["index"]
        if "reason" in event:
            prompt, generated, _ = event["usage"]
            metrics.tokens_in.labels(self.model).inc(0 if stream.latest.get(-1) else prompt)
            metrics.tokens_out.labels(self.model).inc(generated)
            stream.latest[-1] = now
        elif index in stream.latest:
            metrics.between.labels(self.model).observe(now - stream.latest[index])
        elif not stream.latest:
            metrics.first.labels(self.model).observe(now - stream.started)
        stream.latest[index] = now

    def _gone(self, reason: str) -> None:
        self.metrics = {}
        self.fail_all(lambda: WorkerLost(reason))


class ServedModels:
    """The models that the settings name, each in a process of its own."""

    def __init__(self, settings: ServiceSettings) -> None:
        devices = list(settings.devices) or ["auto"]
        self.settings, self.draining = settings, False
        self.processes: dict[str, ModelProcess] = {}
        for number, (name, folder) in enumerate(settings.served.items()):
            given = {
                "folder": str(folder), "device": devices[number % len(devices) if settings.gpus == 1 else 0],
                "devices": devices[: settings.gpus], "gpus": settings.gpus, "quantize": settings.quantize,
                "fast": settings.fast, "cache_tokens": settings.cache_tokens, "block_size": settings.block_size,
                "max_batch_tokens": settings.max_batch_tokens, "speculate": settings.speculate,
                "most_waiting": settings.queue_jobs,
            }  # fmt: skip
            self.processes[name] = ModelProcess(name, given)
        self.metrics = ModelMetrics(self.processes)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the processes, and wait until all are ready; ServiceError, with the reason, if one cannot start."""
        for process in self.processes.values():
            process.observed = self.metrics
            self._tasks.append(asyncio.create_task(process.run()))
        for process in self.processes.values():
            while not process.ready.is_set():
                if process.failure:
                    await self.close()
                    raise ServiceError(f"{process.name} does not start: {process.failure}")
                await asyncio.sleep(0.02)

    def ledgers(self) -> list[dict[str, Any]]:
        """Return the ledgers of the processes; one that was restarted begins anew."""
        return [process.ledger for process in self.processes.values() if process.ledger]

    def named(self, name: str, task: str) -> ModelProcess:
        """Return the process of a model; Refused if there is none, it does something else, or the server stops."""
        if self.draining:
            raise Draining("the server is stopping")
        process = self.processes.get(name)
        if process is None:
            known = ", ".join(self.processes) or "none: start the service with --model FOLDER"
            raise Refused(404, "ModelNotFound", f"there is no model {name[:80]!r}; there are {known}", param="model")
        if process.info.get("task", task) != task:
            what = {"generate": "a language model: use /v1/completions", "embed": "an encoder: use /v1/embeddings"}
            raise Refused(400, "WrongModel", f"{name!r} is {what[process.info['task']]}", param="model")
        return process

    async def settle(self, left_s: Callable[[], float]) -> None:
        """Wait until no request is in progress, for as long as there is time; then end those that are."""
        while any(process.in_progress for process in self.processes.values()) and left_s() > 0:
            await asyncio.sleep(0.02)
        for process in self.processes.values():
            process.fail_all(lambda: Draining("the server stopped before the answer had ended"))

    async def close(self) -> None:
        """End the processes."""
        for process in self.processes.values():
            await process.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)
