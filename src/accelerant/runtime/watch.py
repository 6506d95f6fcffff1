"""Failures of one process of torch.distributed end the work of all, with one line that names the rank.

The processes tell each other through the store over which they met.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
import threading
import time
from typing import Final

from torch.distributed import DistError, PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from accelerant import errors
from accelerant.runtime.peers import silent_peer
from accelerant.runtime.processes import Processes

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
        text, first = str(error), self._processes.first
        peer = silent_peer()
        waited = (
            peer is not None
            or isinstance(error, DistError)
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
