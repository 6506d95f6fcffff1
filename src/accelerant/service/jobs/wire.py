"""Jobs as callers see them; named arrays and JSON as bytes: messages to workers, files of inputs and results.

    frame = length of head (4 bytes), length of body (8 bytes), head (JSON), body (arrays end to end)

The head lists each array's name, dtype and shape. Nothing is pickled. Numbers are little-endian; texts and files are
arrays of uint8.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from accelerant.errors import FormatError, UnsupportedDtype

PREFIX = struct.Struct("<IQ")
Buffers = list[bytes | memoryview]


def described(arrays: Mapping[str, np.ndarray]) -> tuple[list[list[Any]], Buffers]:
    """Return the description of arrays for the head, [name, dtype, shape, bytes] of each, and their bytes."""
    entries: list[list[Any]] = []
    buffers: Buffers = []
    for name, array in arrays.items():
        if array.dtype.kind not in "biufc":
            raise UnsupportedDtype(f"array {name!r} has dtype {array.dtype}, which is no number")
        data = bytes_of(array)
        entries.append([name, array.dtype.newbyteorder("<").str, list(array.shape), len(data)])
        buffers.append(data)
    return entries, buffers


def bytes_of(array: np.ndarray) -> memoryview:
    """Return the bytes of an array that `described` has described."""
    if not (array.flags.c_contiguous and array.dtype.str[0] != ">"):
        array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def restored(entries: Iterable[Sequence[Any]], body: memoryview | bytes) -> dict[str, np.ndarray]:
    """Return the arrays that `described` described, as views of the body."""
    arrays, offset = {}, 0
    for name, kind, shape, size in entries:
        arrays[name] = np.frombuffer(memoryview(body)[offset : offset + size], np.dtype(kind)).reshape(shape)
        offset += size
    if offset != len(body):
        raise FormatError(f"the arrays take {offset} bytes, the body has {len(body)}")
    return arrays


_encoded = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make one in each call


def prefix(head: Mapping[str, Any], size_bytes: int) -> bytes:
    """Return the bytes of a frame ahead of its body of `size_bytes`, at a multiple of 16 from the head's start."""
    text = _encoded(head).encode()
    text += b" " * (-len(text) % 16)  # fields copy arrays that are not aligned
    return PREFIX.pack(len(text), size_bytes) + text


def frame(head: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Buffers:
    """Return a frame whose head is `head` and the arrays' description under "arrays"."""
    entries, buffers = described(arrays)
    return [prefix({**head, "arrays": entries}, sum(map(len, buffers))), *buffers]


def write_file(path: Path, arrays: Mapping[str, np.ndarray]) -> int:
    """Write arrays to a new private file and return their bytes, when they are on the disk; an error leaves no file."""
    buffers = frame({}, arrays)
    opened = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(opened, "wb") as file:
            file.writelines(buffers)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        wipe(path)
        raise
    return sum(map(len, buffers))


def read_file(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a file; raise FormatError if it is cut short."""
    content = memoryview(path.read_bytes())
    if len(content) >= PREFIX.size:
        head_bytes, body_bytes = PREFIX.unpack(content[: PREFIX.size])
        if len(content) == PREFIX.size + head_bytes + body_bytes:
            head = json.loads(bytes(content[PREFIX.size : PREFIX.size + head_bytes]))
            return restored(head["arrays"], content[PREFIX.size + head_bytes :])
    raise FormatError(f"{path.name} is cut short: it has {len(content)} bytes")


def wipe(path: Path) -> None:
    """Overwrite a file or folder with zeros, and remove it, if there; copy-on-write and flash may keep old blocks."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            for inner in path.iterdir():
                wipe(inner)
            path.rmdir()
        else:
            with contextlib.suppress(OSError), open(path, "r+b", buffering=0) as file:  # removed in any case
                left = os.fstat(file.fileno()).st_size
                while left > 0:
                    left -= file.write(bytes(min(left, 1 << 20)))
                os.fsync(file.fileno())
            path.unlink()


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

    `priority` orders the requests of one key. `deadline_s` counts from now (None: the settings' for calls, none for
    jobs); `cost_s` estimates its seconds; `kind` is `merge_kind`'s where it is known already.
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
