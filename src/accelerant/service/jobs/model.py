"""Jobs as callers see them: the request, the job's record, and the statistics of the queue."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np


class JobState(StrEnum):
    """The states of a job; the last three are final."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def final(self) -> bool:
        """Whether a job in this state stays in it."""
        return self not in (JobState.QUEUED, JobState.RUNNING)


@dataclass(slots=True)
class JobRequest:
    """A validated request: its parameters are JSON, and shapes and dtypes of its inputs have been checked.

    `priority` orders the requests of one key, the highest first; queues are fair between keys. `deadline_s` counts from
    now (None: the settings' for calls, none for jobs); `cost_s` estimates the seconds it takes, by which batches of
    short calls are cut; `kind` is `merge_kind`'s where it is known already.
    """

    operation: str
    parameters: Mapping[str, Any]
    inputs: Mapping[str, np.ndarray] = field(repr=False)
    key_id: str = ""
    priority: int = 0
    deadline_s: float | None = None
    request_id: str = ""
    cost_s: float = 0.0
    kind: tuple[Any, ...] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(array.nbytes for array in self.inputs.values())


def merge_kind(request: JobRequest) -> tuple[Any, ...] | None:
    """Return what calls of an elementwise operation that run as one have in common; None for one that runs alone."""
    arrays = list(request.inputs.items())
    if not arrays or not (shape := arrays[0][1].shape) or any(array.shape != shape for _, array in arrays):
        return None  # joined arrays would broadcast otherwise
    kinds = tuple((name, array.dtype.str) for name, array in arrays)
    return request.operation, json.dumps(dict(request.parameters), sort_keys=True), shape[1:], kinds


@dataclass(frozen=True)
class Job:
    """The record of a job. Times are seconds since the epoch; `progress` is a share from 0 to 1."""

    id: str
    operation: str
    state: JobState
    progress: float
    message: str
    error: str | None
    key_id: str
    priority: int
    attempts: int
    device: str | None
    created: float
    started: float | None
    finished: float | None
    result_bytes: int | None


@dataclass(frozen=True)
class WorkerStats:
    """The state of a worker process; `restarts` counts those that ended, `calls` its short calls, `job` is an id."""

    device: str
    label: str
    alive: bool
    restarts: int
    job: str | None
    calls: int
    pid: int | None


@dataclass(frozen=True)
class QueueStats:
    """Numbers of short calls in memory and of jobs in the store; `jobs`, by state, are some seconds old at most."""

    queued: int
    running: int
    bytes: int
    jobs: dict[str, int]
    workers: tuple[WorkerStats, ...]
