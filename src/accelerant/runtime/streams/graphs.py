"""CUDA graphs whose ops the ledger counts: captured once, counted at each replay.

graph = Graph("step")
y = graph.capture(model, x)      # each replay overwrites y
x.copy_(following)
graph.replay()
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.compiler import is_compiling

from accelerant.errors import LaunchError
from accelerant.runtime.compilation import background
from accelerant.runtime.dispatch.plan import Decision, observers
from accelerant.runtime.ledger import Ledger, OpKey, ledger
from accelerant.runtime.streams.stream import capturing

_ahead = 0
_autograd_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@contextmanager
def ahead_of_capture() -> Iterator[None]:
    """Make captures_ahead() true inside the block: calls before a capture, and the capture if it has no warm-up."""
    global _ahead  # not a thread's own: backward passes run on others
    _ahead += 1
    try:
        yield
    finally:
        _ahead -= 1


def captures_ahead() -> bool:
    """Return whether calls are captured now or soon, so that what they cost the host does not count.

    False under a checkpoint, whose second run may come after the context of the first, and has to do the same.
    """
    return _ahead > 0 and (is_compiling() or _autograd_hooks(False) is None)


@contextmanager
def counting(is_captured: Callable[[torch.device], bool] = capturing) -> Iterator[Counter[OpKey]]:
    """Count by op the calls inside the block that are captured and not run.

    `is_captured` is called with each call's device in the thread of the call. Captures by autograd's threads therefore
    count, and calls that other threads run meanwhile, or this one on another device, do not.
    """
    calls: Counter[OpKey] = Counter()

    def observe(decision: Decision) -> None:
        if is_captured(torch.device(decision.device)):
            calls[decision.op, decision.implementation, decision.device, decision.case] += 1

    observers.append(observe)
    try:
        yield calls
    finally:
        observers.remove(observe)


_uncollected, _was_on = 0, False


@contextmanager
def without_collection(*, collect: bool = True) -> Iterator[None]:
    """Collect garbage, which takes tens of milliseconds, then disable the collection inside the block.

    Blocks inside do not collect. `collect=False`: nothing that is captured belongs to autograd.

    A gradient's node belongs to the stream of its first use. One that a cycle keeps from an eager step would make the
    capture wait for that stream: "dependency created on uncaptured work in another stream".

    Pinned memory that an earlier capture used is returned with an event on the capture's stream. If a collection
    returns it in the middle of another capture, that event belongs to the capture, and the next allocation of pinned
    memory, .item() included, fails when it queries the event: "invalid argument" (torch 2.11).
    """
    global _uncollected, _was_on
    if collect and not _uncollected:
        gc.collect()
    _uncollected += 1
    if gc.isenabled():
        gc.disable()
        _was_on = True
    try:
        yield
    finally:
        _uncollected -= 1
        if _was_on and not _uncollected:  # the last of the blocks, which may be of several threads
            _was_on = False
            gc.enable()


@contextmanager
def _begun(
    graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream | None, capture_error_mode: str
) -> Iterator[None]:
    """Capture what is inside the block, as torch.cuda.graph does, with the memory that is free already."""
    kind: Any = torch.cuda.graph
    if stream is None and kind.default_capture_stream is None:
        kind.default_capture_stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream or kind.default_capture_stream):
        graph.capture_begin(capture_error_mode=capture_error_mode, **({} if pool is None else {"pool": pool}))
        try:
            yield
        finally:
            graph.capture_end()


class Graph:
    """A CUDA graph with a name in the `graphs` of a ledger, the process's by default."""

    def __init__(self, name: str, *, book: Ledger | None = None) -> None:
        self.name = name
        self._ledger = ledger() if book is None else book
        self._graph: torch.cuda.CUDAGraph | None = None

    def __repr__(self) -> str:
        return f"Graph({self.name!r}{'' if self._graph is None else ', captured'})"

    def capture(
        self, fn: Callable[..., Any], *args: Any, warm_up: int = 3, pool: Any = None,
        on: torch.cuda.Stream | None = None, quick: bool = False, **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Capture the device work of fn, and return its result, in memory that each replay overwrites.

        fn is first called warm_up times (0 if it is known to be ready) on a stream of its own, so that compilation,
        races and lazy initialization, none of which may happen in a capture, are over. Its arguments are in memory that
        stays, and it may not wait for the device or read from it. `pool` is that of a graph which is always replayed
        before this one, and whose memory this one may use. `on` is a stream whose device and priority the work gets;
        by default one of device 0. A `quick` capture neither collects garbage nor gives cached memory back, which take
        most of the time of a small one: for work that shares no autograd graph with earlier steps, where memory is
        free. A second capture raises LaunchError.
        """
        if self._graph is not None:
            raise LaunchError(f"graph {self.name!r} is captured already; make another Graph")
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream), ahead_of_capture(), background.awaited():
            for _ in range(warm_up):
                fn(*args, **kwargs)
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        begin = _begun if quick else torch.cuda.graph
        with (
            counting() as calls, without_collection(collect=not quick), ahead_of_capture() if warm_up else nullcontext()
        ):  # fmt: skip
            try:
                # Other threads may do what a capture forbids, such as pinning memory for the next batch.
                with begin(graph, pool=pool, stream=on, capture_error_mode="thread_local"):
                    result = fn(*args, **kwargs)
            except BaseException:
                torch.cuda.set_stream(current)  # torch.cuda.graph leaves its own current if the capture's end raises
                self._ledger.release(self._ledger.captured(self.name, calls))
                # Ends the capture that a failed one leaves the random number generator in, so that later draws work.
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
                    torch.zeros(1, device="cuda")
                raise
        manifest = self._ledger.captured(self.name, calls)
        weakref.finalize(self, self._ledger.release, manifest)
        self._graph, self._manifest = graph, manifest
        return result

    @property
    def pool(self) -> Any:
        """The memory pool of a captured graph."""
        if self._graph is None:
            raise LaunchError(f"graph {self.name!r} has no pool before its capture")
        return self._graph.pool()

    def replay(self) -> None:
        """Run it on the current stream; raise LaunchError before a capture."""
        if self._graph is None:
            raise LaunchError(f"graph {self.name!r} has nothing to replay: capture comes first")
        self._graph.replay()
        self._manifest.replays += 1
