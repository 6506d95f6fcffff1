"""Jobs: one function of many items, on worker processes of this host or on the nodes of a Ray cluster.

A worker that dies is replaced, and what it had not answered is handed out again: the item that it worked on alone, so
that an item which ends its workers is found, and is given up after three. Each item has one outcome.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import pickle
import pickletools
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NamedTuple

from accelerant.errors import AccelerantError, ConfigError, MissingDependency
from accelerant.runtime.host import fork_safe, python_child, set_usable_cores, usable_cores

Engine = Literal["local", "ray"]
Prepare = Callable[[], Callable[[Any], Any]]

_ATTEMPTS = 3  # workers that one item may end, and starts in a row that may fail, before it is given up
_QUICK_S = 0.05
"""An item that takes less is followed by one that waits in the worker, so that messages cost no time of it."""

_READY = -1  # in place of an item's index, of the reply to the start
_GPUS = ("cuda", "rocm")
_STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class JobResult:
    """The result of an item, or its error: what the function raised, or that workers died with it."""

    index: int
    value: Any = None
    error: Exception | None = None


def engine_of(engine: str | None, address: str | None = None) -> Engine:
    """Return the engine of a name; None is Ray where this process is connected to it or an address is given."""
    if engine not in (None, "local", "ray"):
        raise ConfigError(f'engine must be "local", "ray" or None, got {engine!r}')
    if engine == "local" and address is not None:
        raise ConfigError(f"engine is local, and an address of Ray is given: {address!r}")
    connected = "ray" in sys.modules and sys.modules["ray"].is_initialized()
    return "ray" if engine == "ray" or (engine is None and (connected or address is not None)) else "local"


def run_jobs(
    prepare: Prepare,
    items: Sequence[Any],
    *,
    engine: Engine = "local",
    address: str | None = None,
    backend: str = "cpu",
    devices: int = 1,
    workers: int | None = None,
    whole_host: bool = False,
    threads: int = 1,
) -> Generator[JobResult, None, None]:
    """Yield the outcome of each item, as it ends, from worker processes of this host or of a Ray cluster.

    `prepare`, called once by each worker, returns the function of an item; a worker on a GPU has `threads` items at
    once. ConfigError: something cannot be pickled, or there is no cluster or GPU.
    """
    if workers is not None and (type(workers) is not int or workers < 1):
        raise ConfigError(f"workers must be a whole number of at least 1, got {workers!r}")
    if not items:
        return
    packed = _dumps(prepare, "the function")
    share = _Share(backend, devices, workers, whole_host, threads, len(items))
    pool: _RayPool | _LocalPool = _RayPool(packed, share, address) if engine == "ray" else _LocalPool(packed, share)
    with contextlib.closing(pool):
        yield from _Schedule(pool, items).outcomes()


class _Share(NamedTuple):
    """Arguments of run_jobs that determine the workers."""

    backend: str
    devices: int
    workers: int | None
    whole_host: bool
    threads: int
    most: int

    @property
    def on_gpu(self) -> bool:
        return self.backend in _GPUS

    @property
    def concurrency(self) -> int:
        return self.threads if self.on_gpu else 1


# --- the worker's side -----------------------------------------------------------------------------------------------
class _Reply(NamedTuple):
    """The answer to an item, by its index, or to the start; `data` is a pickled value, or exception."""

    item: int
    ok: bool
    data: bytes
    seconds: float


class _Worker:
    """The function of the items in a process that was started for it."""

    def __init__(
        self, prepare: bytes, environment: dict[str, str], cores: int | None, paths: Sequence[str] = ()
    ) -> None:
        os.environ.update(environment)  # before torch is imported
        sys.path += [path for path in paths if path not in sys.path]
        set_usable_cores(cores)
        self._prepare, self._function = prepare, None

    def ready(self) -> _Reply:
        """Prepare the function."""

        def start() -> None:
            self._function = pickle.loads(self._prepare)()

        return _answered(_READY, start)

    def run(self, index: int, item: bytes) -> _Reply:
        """Call the function."""
        return _answered(index, lambda: self._function(pickle.loads(item)))  # type: ignore[misc]


def _answered(index: int, call: Callable[[], Any]) -> _Reply:
    start = time.perf_counter()
    try:
        ok, data = True, _dumps(call(), "the result")
    except BaseException as error:  # noqa: BLE001 - sent to who asked; a pool's thread would keep SystemExit for itself
        ok, data = False, _packed(error)
    return _Reply(index, ok, data, time.perf_counter() - start)


def _packed(error: BaseException) -> bytes:
    """Return an exception pickled, with its traceback as a note; as AccelerantError if it does not survive that."""
    note = "in a worker:\n" + "".join(traceback.format_exception(error)).rstrip()
    with contextlib.suppress(Exception):  # any that its class raises; a frozen dataclass takes no note
        error.add_note(note)
        data = pickle.dumps(error)
        if isinstance(error, Exception) and type(pickle.loads(data)) is type(error):
            return data
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - of its class's own method
        text = "its text cannot be made"
    replacement = AccelerantError(f"{type(error).__name__}: {text}")
    replacement.add_note(note)
    return pickle.dumps(replacement)


def _of_main(data: bytes) -> bool:
    """Return whether a pickle refers to the main program; a longer text that has its name does not."""
    return b"__main__" in data and any(argument == "__main__" for _, argument, _ in pickletools.genops(data))


def _dumps(value: Any, name: str) -> bytes:
    """Return a value pickled; by cloudpickle, if there is one, where pickle cannot, or refers to the main program."""
    try:
        data = pickle.dumps(value)
        if not _of_main(data):
            return data
        reason = "it is of the main program, which workers do not import"
    except Exception as error:  # noqa: BLE001 - of any class's own methods
        reason = str(error)
    for module in ("cloudpickle", "ray"):
        if importlib.util.find_spec(module) is not None:
            loaded = importlib.import_module("cloudpickle" if module == "cloudpickle" else "ray.cloudpickle")
            try:
                return bytes(loaded.dumps(value))
            except Exception as error:  # noqa: BLE001 - likewise
                raise ConfigError(f"{name} cannot be sent to a worker: {error}") from None
    raise ConfigError(f"{name} cannot be sent to a worker: {reason}. Move it to a module, or pip install cloudpickle")


_CHILD = "from accelerant.runtime.jobs import _serve; _serve()"


def _serve() -> None:
    """Answer requests of standard input until it ends: first _Worker's arguments, then indices and items."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the parent ends this one
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the function prints
    with open(os.devnull, "r+b") as nothing:  # what it, and programs that it starts, read: not the requests
        os.dup2(nothing.fileno(), 0)
    unused = os.open(os.devnull, os.O_RDWR)
    if hasattr(os, "register_at_fork"):  # a child that outlives this process would hide its end
        os.register_at_fork(after_in_child=lambda: os.dup2(unused, replies.fileno()))
    lock = fork_safe(threading.Lock())

    def send(reply: _Reply) -> None:
        with lock, contextlib.suppress(BrokenPipeError):  # the parent is gone
            _write(replies, pickle.dumps(tuple(reply)))

    arguments = pickle.loads(_read(requests))
    threads = arguments.pop()
    worker = _Worker(*arguments)
    send(worker.ready())
    with ThreadPoolExecutor(threads) as pool:
        while request := _read(requests):
            pool.submit(lambda given: send(worker.run(*given)), pickle.loads(request))


def _write(stream: BinaryIO, data: bytes) -> None:
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def _read(stream: BinaryIO) -> bytes:
    """Return a message; empty at the end of the stream."""
    size = int.from_bytes(stream.read(8), "little")
    data = stream.read(size)
    return data if len(data) == size else b""


# --- the schedule ----------------------------------------------------------------------------------------------------
class _Schedule:
    """The items that wait, and those that each worker has."""

    def __init__(self, pool: _RayPool | _LocalPool, items: Sequence[Any]) -> None:
        self._pool, self._items, self._threads = pool, items, pool.share.concurrency
        self._waiting = deque(range(len(items)))
        self._lost: Counter[int] = Counter()
        self._busy: dict[int, list[int]] = {}
        """Items of the workers that are ready, in the order in which they were sent."""
        self._depth = self._threads
        self._failed_starts = 0

    def outcomes(self) -> Iterator[JobResult]:
        """Yield each item's outcome."""
        for worker in range(self._pool.count):
            self._pool.start(worker)
        left = len(self._items)
        while left:
            for worker, reply in self._pool.wait():
                for outcome in self._died(worker, reply) if isinstance(reply, str) else self._replied(worker, reply):
                    left -= 1
                    yield outcome
            yield from (bad := list(self._hand_out()))
            left -= len(bad)

    def _replied(self, worker: int, reply: _Reply) -> Iterator[JobResult]:
        value, error = None, None
        try:
            value = pickle.loads(reply.data)
        except Exception as reason:  # noqa: BLE001 - of its class's own methods
            error = AccelerantError(f"its result cannot be read here: {type(reason).__name__}: {reason}")
        if not reply.ok and error is None:
            value, error = None, value
        if reply.item == _READY:
            if error is not None:
                raise error
            self._busy[worker], self._failed_starts = [], 0
            return
        self._busy[worker].remove(reply.item)
        self._depth = self._threads + (reply.seconds < _QUICK_S)
        yield JobResult(reply.item, value, error)

    def _died(self, worker: int, reason: str) -> Iterator[JobResult]:
        """Hand a dead worker's items out again, and replace it."""
        if worker not in self._busy:
            self._failed_starts += 1
            if self._failed_starts >= _ATTEMPTS * self._pool.count:
                raise AccelerantError(f"workers die before they are ready: {reason}")
        items = self._busy.pop(worker, [])
        self._lost.update(items[: self._threads])  # the others waited
        for index in reversed(items):
            if self._lost[index] < _ATTEMPTS:
                self._waiting.appendleft(index)
            else:
                yield JobResult(index, error=AccelerantError(f"{_ATTEMPTS} workers died with it; the last: {reason}"))
        self._pool.start(worker)

    def _hand_out(self) -> Iterator[JobResult]:
        """Send items, one a worker before a second to any; yield those that cannot be pickled."""
        for level in range(self._depth):
            for worker, items in self._busy.items():
                if not self._waiting:
                    return
                suspect = self._lost[self._waiting[0]] or any(self._lost[index] for index in items)
                if len(items) > level or (items and suspect):
                    continue
                index = self._waiting.popleft()
                try:
                    item = _dumps(self._items[index], "the item")
                except ConfigError as error:
                    yield JobResult(index, error=error)
                    continue
                items.append(index)
                self._pool.send(worker, index, item)


class _LocalPool:
    """Child processes of this one, by number; a thread for each reads its replies."""

    def __init__(self, prepare: bytes, share: _Share) -> None:
        cores = usable_cores()
        default = share.devices if share.on_gpu else 1 if share.whole_host or share.backend != "cpu" else cores
        self.count = min(share.workers or default, share.most)
        self._prepare, self.share, self._cores = prepare, share, max(1, cores // self.count)
        self._children: dict[int, subprocess.Popen[str]] = {}
        self._replies: queue.SimpleQueue[tuple[int, _Reply | str]] = queue.SimpleQueue()

    def start(self, worker: int) -> None:
        environment = {"ACCELERANT_BACKEND": self.share.backend, "OMP_NUM_THREADS": str(self._cores)}
        if self.share.on_gpu:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            index = worker % self.share.devices
            environment["CUDA_VISIBLE_DEVICES"] = visible[index] if index < len(visible) and visible[0] else str(index)
        child = self._children[worker] = python_child(_CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        threading.Thread(target=self._collect, args=(worker, child), daemon=True).start()
        self._write(worker, [self._prepare, environment, self._cores, self.share.concurrency])

    def send(self, worker: int, index: int, item: bytes) -> None:
        self._write(worker, (index, item))

    def _write(self, worker: int, message: Any) -> None:
        stream = self._children[worker].stdin
        with contextlib.suppress(BrokenPipeError):  # it has died, which its thread finds
            _write(stream.buffer, pickle.dumps(message))  # type: ignore[union-attr]

    def _collect(self, worker: int, child: subprocess.Popen[str]) -> None:
        while data := _read(child.stdout.buffer):  # type: ignore[union-attr]
            self._replies.put((worker, _Reply(*pickle.loads(data))))
        code = child.wait()
        with contextlib.suppress(ValueError):
            self._replies.put((worker, f"process {child.pid} ended by {signal.Signals(-code).name}"))
            return
        self._replies.put((worker, f"process {child.pid} ended with status {code}"))

    def wait(self) -> list[tuple[int, _Reply | str]]:
        """Wait for replies of workers; a text is the reason why one has died."""
        return [self._replies.get()]

    def close(self) -> None:
        for child in self._children.values():
            child.kill()  # either all items are answered, or nobody waits for them
        for child in self._children.values():
            child.wait(_STOP_S)


# --- Ray -------------------------------------------------------------------------------------------------------------
class _RayPool:
    """Actors on the nodes of a Ray cluster."""

    def __init__(self, prepare: bytes, share: _Share, address: str | None) -> None:
        self._ray = ray_module()
        self._prepare, self.share = prepare, share
        self._connected = not self._ray.is_initialized()
        if self._connected:
            connect_ray(address)
        try:
            self._options = self._workers_of_nodes()
        except BaseException:
            self.close()
            raise
        self.count = len(self._options)
        self._actors: dict[int, Any] = {}
        self._calls: dict[Any, int] = {}

    def _workers_of_nodes(self) -> list[dict[str, int]]:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus, cpus = ([int(node.get(kind, 0)) for node in nodes] for kind in ("GPU", "CPU"))
        if self.share.backend == "auto":
            self.share = self.share._replace(backend="cuda" if any(gpus) else "cpu")
        share = self.share
        if share.on_gpu:
            each = [{"num_gpus": 1, "num_cpus": 0}] * sum(gpus)
        elif share.whole_host:
            each = [{"num_cpus": count} for count in cpus if count]
        else:
            each = [{"num_cpus": 1}] * sum(cpus)
        if not each:
            raise ConfigError(f"the Ray cluster has no {'GPU' if share.on_gpu else 'CPU'}: {len(nodes)} nodes")
        wanted = min(share.workers or len(each), share.most)
        return (each * -(-wanted // len(each)))[:wanted]

    def start(self, worker: int) -> None:
        options = self._options[worker]
        environment = {"ACCELERANT_BACKEND": self.share.backend}
        actor = self._ray.remote(_Worker).options(
            **options, max_concurrency=self.share.concurrency, max_restarts=0, scheduling_strategy="SPREAD"
        )
        cores = None if self.share.on_gpu else options["num_cpus"]
        paths = [path for path in sys.path if os.path.isabs(path)]  # the function's module may be in any
        self._actors[worker] = actor.remote(self._prepare, environment, cores, paths)
        self._calls[self._actors[worker].ready.remote()] = worker

    def send(self, worker: int, index: int, item: bytes) -> None:
        self._calls[self._actors[worker].run.remote(index, item)] = worker

    def wait(self) -> list[tuple[int, _Reply | str]]:
        done, rest = self._ray.wait(list(self._calls), num_returns=1)
        done += self._ray.wait(rest, num_returns=len(rest), timeout=0)[0] if rest else []
        events: list[tuple[int, _Reply | str]] = []
        dead: dict[int, str] = {}
        for call in done:
            worker = self._calls.pop(call)
            try:
                events.append((worker, self._ray.get(call)))
            except self._ray.exceptions.RayError as error:
                dead[worker] = str(error).strip().splitlines()[0]
        for worker, reason in dead.items():
            self._calls = {call: other for call, other in self._calls.items() if other != worker}
            self._ray.kill(self._actors[worker])
            events.append((worker, reason))
        return events

    def close(self) -> None:
        for actor in getattr(self, "_actors", {}).values():
            self._ray.kill(actor)
        if self._connected:
            self._ray.shutdown()


def ray_module() -> Any:
    """Return Ray, with its reports of usage off unless the environment says otherwise; MissingDependency without it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise MissingDependency("ray", "ray", "engine='ray'") from None


def connect_ray(address: str | None) -> None:
    """Connect to a cluster, or start one on this host where no address is given and none is found."""
    ray = ray_module()
    host, _, port = (address or "").rpartition(":")
    if host and port.isdecimal() and "/" not in host:  # Ray itself tries for a minute
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=_STOP_S).close()
        except (OSError, OverflowError) as error:
            raise ConfigError(f"there is no Ray cluster at {address!r}: {error}") from None
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        ray.init(address=address or "auto", **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        if address is not None or "RAY_ADDRESS" in os.environ:
            named = address or os.environ["RAY_ADDRESS"]
            raise ConfigError(f"Ray cluster {named!r}: {str(error).strip().splitlines()[0]}") from None
        ray.init(address="local", include_dashboard=False, **quiet)
