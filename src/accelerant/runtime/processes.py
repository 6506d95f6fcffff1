"""The processes of torch.distributed that work together: exchanges of small values, and agreement before work begins.

Each exchange is one collective of 4 KiB. An error in `agreed` and `on_first`, and a disagreement, is raised in all.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import torch
from torch import Tensor

from accelerant import errors
from accelerant.errors import ConfigError

_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)

_EXCHANGED: Final = 4096
_LONGEST: Final = 500  # characters of an error that another process repeats

OWN_LAUNCH: Final = "accelerant-"
"""Begins the name that our launcher gives a group of processes: its process ID, a random number and the attempt."""


def attempt() -> int:
    """Return how many times a launcher, ours or torchrun, has started the processes again."""
    name, text = os.environ.get("TORCHELASTIC_RUN_ID", ""), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    text = name.rpartition(".")[2] if name.startswith(OWN_LAUNCH) else text
    return int(text) if text.isdecimal() else 0


def launch_id() -> str:
    """Return what names the start of the processes in all its attempts; empty if torchrun was given no name for it."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return "" if name == "none" else name.partition(".")[0] if name.startswith(OWN_LAUNCH) else name


class Processes:
    """The processes that train together; one if torch.distributed is not initialized."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 1
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            self.rank, self.size = torch.distributed.get_rank(), torch.distributed.get_world_size()

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which alone writes files and, in private training, draws the noise."""
        return self.rank == 0

    def exchange(self, value: object) -> list[Any]:
        """Return the value of each process, in the order of ranks: one collective of 4 KiB of JSON each."""
        text = json.dumps(value, ensure_ascii=False).encode(errors="replace")  # a name of a file need not be UTF-8
        if len(text) > _EXCHANGED:
            raise ConfigError(f"processes exchange at most {_EXCHANGED} bytes, got {len(text)}")
        row = torch.frombuffer(bytearray(text.ljust(_EXCHANGED)), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        torch.distributed.all_gather(rows, row, group=_host_group())
        return [json.loads(each.numpy().tobytes()) for each in rows]

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each process's numbers, for each of them; the device is not waited for."""
        return self.start_largest(numbers)()

    def start_largest(self, numbers: Sequence[int]) -> Callable[[], list[int]]:
        """Start `largest`, and return a function that waits for its result."""
        if self.size == 1:
            return lambda: list(numbers)
        found = torch.tensor(numbers, dtype=torch.int64)
        largest = torch.distributed.ReduceOp.MAX
        work = torch.distributed.all_reduce(found, largest, group=_host_group(), async_op=True)

        def wait() -> list[int]:
            work.wait()
            return found.tolist()

        return wait

    def of_first(self, numbers: Sequence[int]) -> list[int]:
        """Return rank 0's numbers; each process gives as many."""
        found = torch.tensor(numbers, dtype=torch.int64)
        if self.size > 1:
            torch.distributed.broadcast(found, 0, group=_host_group())
        return found.tolist()

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the processes into each; a device's stream waits, not the host."""
        if self.size > 1:
            torch.distributed.all_reduce(tensor)
        return tensor

    @contextlib.contextmanager
    def agreed(self, settings: dict[str, object], hidden: Mapping[str, str] | None = None) -> Iterator[None]:
        """Run a block in every process, then compare the settings that it leaves; one collective.

        Settings, which the block may fill, have the names that errors show; `hidden` has messages for those whose
        values are secret. A setting that differs is a ConfigError in every process; an error of the block is raised in
        all, with its rank. Errors that all processes raise have the attribute `shared`, so that one can show them for
        all.
        """
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            failed = error
        if self.size == 1:
            return
        shown = {name: _shortened(str(value)) for name, value in settings.items()}
        found = self.exchange([_described(failed), {} if failed else shown])
        if failed is not None:
            raise _shared(failed)
        for rank, (described, _) in enumerate(found):
            _raise_again(described, rank)
        for name in dict.fromkeys(name for _, theirs in found for name in theirs):  # one may lack a setting
            for rank, (_, theirs) in enumerate(found):
                if theirs.get(name) != found[0][1].get(name):
                    if hidden and name in hidden:
                        raise _shared(ConfigError(hidden[name]))
                    values = f"{found[0][1].get(name)} in rank 0, {theirs.get(name)} in rank {rank}"
                    text = f"{name} must be the same in each process: {values} (here {shown.get(name)})"
                    raise _shared(ConfigError(text))

    def on_first(self, action: Callable[[], _T]) -> _T:
        """Return an action's result (JSON) on rank 0, in every process; raise its error in each, so that none waits."""
        if self.size == 1:
            return action()
        answer: Any = None
        failed: Exception | None = None
        if self.first:
            try:
                answer = action()
            except Exception as error:  # noqa: BLE001  raised again below, here and in the others
                failed = error
        described, result = self.exchange([_described(failed), answer])[0]
        if failed is not None:
            raise failed
        _raise_again(described, 0)
        found: _T = result
        return found

    def sum_to_first_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each tensor over the processes into that of rank 0; elsewhere the values are undefined afterwards."""
        self._all(torch.distributed.reduce, tensors)

    def from_first_(self, tensors: Sequence[Tensor]) -> None:
        """Copy rank 0's values into each tensor."""
        self._all(torch.distributed.broadcast, tensors)

    def _all(self, collective: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        if self.size == 1:
            return
        whole = [tensor if tensor.is_contiguous() else tensor.contiguous() for tensor in tensors]
        for work in [collective(tensor, 0, async_op=True) for tensor in whole]:
            work.wait()
        for tensor, sent in zip(tensors, whole, strict=True):
            if sent is not tensor:
                tensor.copy_(sent)


_host: list[Any] = []  # the default group, and the one for its tensors on the host


def _host_group() -> Any:
    """Return a group for tensors of the host: the default one, or one of gloo, which all processes make together."""
    default = torch.distributed.group.WORLD
    if "cpu:" in torch.distributed.get_backend_config():
        return default
    if not _host or _host[0] is not default:
        _host[:] = default, torch.distributed.new_group(backend="gloo")
    return _host[1]


def _described(error: Exception | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)[:_LONGEST]]


def _shared(error: _E) -> _E:
    """Return an error that is raised in every process, marked as such."""
    vars(error)["shared"] = True
    return error


def _raise_again(error: list[str] | None, rank: int) -> None:
    """Raise an error of another process."""
    if error is not None:
        kind = getattr(errors, error[0], errors.ProtocolError)
        raise _shared(kind.__new__(kind, f"rank {rank}: {error[1]}"))  # its __init__ may take other arguments


def _shortened(text: str) -> str:
    """Return a text of at most 100 characters, equal only for equal texts."""
    return text if len(text) <= 100 else f"{text[:40]}... (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:32]})"


# --- failures --------------------------------------------------------------------------------------------------------


_BEAT_S: Final = 0.5
_SAMPLE_S: Final = 5.0  # without a beat, where a collective has failed
_ENDED: Final = 1 << 40
_STORE_ENDED: Final = 0, "ProtocolError", "it holds the store, and has ended"

_watches = itertools.count()


class Watch:
    """Ends the work of all processes when one of them fails; a context manager, entered by all in the same order.

    An error in the block of one is raised there, and in the others with the rank in front, in place of the error of the
    collective that waited for it; so is the silence of a process for `silent_s` seconds. A process that hangs on the
    device for `grace_s` seconds afterwards is ended with that line and status 1.
    """

    def __init__(self, *, silent_s: float = 60.0, grace_s: float = 15.0) -> None:
        self._processes, self._silent_s, self._grace_s = Processes(), silent_s, grace_s
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._seen: tuple[int, str, str] | None = None  # the failure, as long as there was a store

    def __enter__(self) -> Watch:
        if self._processes.size > 1:
            from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

            store = _get_default_store().clone()  # type: ignore[attr-defined]  # that no wait of the main thread blocks
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # torchrun keeps the store from one to the next
            self._store = PrefixStore(f"accelerant-watch-{attempt}-{next(_watches)}", store)
            self._thread = threading.Thread(target=self._run, name="accelerant-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._thread is None:
            return
        try:
            if error is not None:
                self._explain(error)
        finally:
            self._ended.set()
            self._thread.join()

    def _run(self) -> None:
        """Count, and look at the others: rank 0 at all, all at rank 0."""
        rank, seen = self._processes.rank, dict[int, tuple[int, float]]()
        watched = [each for each in range(self._processes.size if rank == 0 else 1) if each != rank]
        with contextlib.suppress(RuntimeError):  # torch's errors of a store whose process has ended
            while not self._ended.wait(_BEAT_S):
                self._seen = self._failed()
                if self._seen is not None:
                    break
                self._store.add(f"beat-{rank}", 1)
                now = time.monotonic()
                for other in watched:
                    count = self._store.add(f"beat-{other}", 0)
                    if other not in seen or count != seen[other][0]:
                        seen[other] = count, now
                    elif count < _ENDED and now - seen[other][1] > self._silent_s:
                        self._silent(other, self._silent_s)
        if not self._ended.wait(self._grace_s):
            with contextlib.suppress(RuntimeError):
                self._seen = self._seen or self._failed()
            failed = self._seen or _STORE_ENDED
            print(f"error: rank {failed[0]}: {failed[2]}", file=sys.stderr, flush=True)
            os._exit(1)
        with contextlib.suppress(RuntimeError):
            self._store.add(f"beat-{rank}", _ENDED)

    def _fail(self, rank: int, message: str, kind: str = "ProtocolError") -> None:
        """Note that a process has failed; the first note counts."""
        if self._store.add("failures", 1) == 1:
            self._store.set("failed", json.dumps([rank, kind, message[:500]]))

    def _silent(self, rank: int, seconds: float) -> None:
        self._fail(rank, f"no sign of life for {seconds:.0f} s: it was killed, hangs, or cannot be reached")

    def _failed(self) -> tuple[int, str, str] | None:
        """Return the rank of the process that failed first, its kind of error, and its message."""
        return tuple(json.loads(self._store.get("failed"))) if self._store.check(["failed"]) else None

    def _explain(self, error: BaseException) -> None:
        """Tell the others of an error; raise that of another process if this one only waited for it."""
        from accelerant.runtime.peers import silent_peer  # it imports Triton's launcher

        text, first = str(error), self._processes.first
        peer = silent_peer()
        waited = (
            peer is not None
            or isinstance(error, torch.distributed.DistError)
            or (isinstance(error, RuntimeError | OSError) and re.search(r"gloo|NCCL|by peer", text))
        )
        try:
            if not waited:
                kind = type(error).__name__
                self._fail(self._processes.rank, text if hasattr(errors, kind) else f"{kind}: {text}", kind)
                if first:
                    time.sleep(2 * _BEAT_S)  # in which the others read it: the store ends with this process
                else:
                    vars(error)["shared"] = True  # rank 0 shows it, too
                return
            ranks = range(self._processes.size)
            counts = [self._store.add(f"beat-{rank}", 0) for rank in ranks]
            until = time.monotonic() + _SAMPLE_S
            while self._failed() is None and time.monotonic() < until:
                time.sleep(_BEAT_S / 5)
            for rank in ranks:
                if self._failed() is None and counts[rank] == self._store.add(f"beat-{rank}", 0):
                    self._silent(rank, _SAMPLE_S)
            if self._failed() is None and peer is not None:
                self._fail(*peer)
            failed = self._failed()
        except RuntimeError:
            failed = self._seen or _STORE_ENDED
        if failed is not None:
            rank, name, message = failed
            cause = getattr(errors, name, errors.ProtocolError)
            again = cause.__new__(cause, f"rank {rank}: {message}")  # without __init__, which takes other arguments
            if not first and (rank or name != "ProtocolError"):  # rank 0 was not killed
                vars(again)["shared"] = True
            raise again from error
