"""A proving key on one device or on several.

All kernels are launched before the host waits: each sum on a queue of its own, and the quotient with the sum of H on
another, which has priority, so that sums overlap. On CUDA the launches become CUDA graphs at the third proof, and once
more where two proofs are under way. Where the device has too little memory for all points, some sections stay on the
host and are streamed for each proof.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.curve.weierstrass import Curve
from accelerant.algebra.field.memory_space import HOST, MemorySpace
from accelerant.algebra.field.parameters import Field
from accelerant.algebra.msm import device
from accelerant.algebra.msm.device import DeviceBases, PendingMsm, start_msm
from accelerant.algebra.msm.device_plan import coordinate_words, device_plan
from accelerant.errors import LaunchError, OutOfMemory
from accelerant.runtime.host import fork_safe
from accelerant.runtime.ledger import FallbackRecord, RecordedLaunch, ledger
from accelerant.zk.formats.circuit import Witness
from accelerant.zk.formats.zkey import Zkey
from accelerant.zk.groth16 import keys
from accelerant.zk.groth16.keys import U64, Stages
from accelerant.zk.multi_scalar import msm_record

if TYPE_CHECKING:
    from accelerant.runtime.provider import Event
    from accelerant.runtime.streams.graphs import Graph
    from accelerant.runtime.streams.stream import Stream  # which imports torch

T = TypeVar("T")
Words = Any
Mark = Any  # A point in a queue's work, a CUDA event; None where there is one queue
Spans = dict[str, tuple[Mark, Mark]]
Part = tuple[int, int]  # (i, n): the i-th of n equal parts
_MEMORY_SHARE = 0.8  # Largest share of the free memory that a key takes
_LAUNCH_ORDER = ("B2", "A", "C", "B1", "quotient", "H")  # Order of launches. H waits for the quotient.

_QUEUES = {"quotient": 0, "H": 0, "B2": 1, "A": 2, "C": 3, "B1": 4}
_INPUT = 5  # The queue that copies the witness; it does not wait for other queues' work on the previous one
_SCALAR_BYTES, _VECTORS = 32, 6  # upper bound on vectors of the size of the domain and the witness
_KEPT_FIRST = ("H", "A", "C", "B1", "B2")  # priority where memory is short; B2 hides its copy best
_G2_COST = 3  # Time of a point of G2 in a sum, in those of G1
_SLACK = 1.1  # How much more than its fair share a device may take for the sake of a whole section
_STREAMED_CHUNKS = 3  # Chunks of streamed points on the device: one in use, two being copied
_EAGER_PROOFS = 2  # Proofs before sums are captured: a key may serve one
_CAPTURED_SETS = 2  # Sets of vectors whose sums are captured: prove_many has two proofs under way
_CAPTURED_SHARE = 0.25  # Largest share of a device's room that may be the captured sums' vectors
_COPIERS, _PARTS = 4, 8  # threads that copy a witness; parts that devices read when copied
_COPIES_IN_FLIGHT = 2  # Largest number of chunks that are copied before the device has used them

_NO_LIMIT = 1 << 62
_U64 = np.dtype(np.uint64)


class KeyPart:
    """The part of a key in one memory space, `space`; `sections` are those of which it has points."""

    def __init__(
        self, zkey: Zkey, space: MemorySpace, stages: Stages, parts: Mapping[str, Part], *,
        free_bytes: int | None = None, overlap: bool = True,
    ) -> None:  # fmt: skip
        """Copy a part of a key, which may be closed afterwards, to a device.

        `parts` maps a section to (i, n), the i-th of n parts of its points. At most free_bytes are taken. Without
        `overlap` all sums use one queue.
        """
        self.space, self.label = space, space.label
        family = family_of(zkey.family)
        self._field, self._n_public = keys.snarkjs_scalar_field(family), zkey.n_public
        self._queues = Queues(space, _INPUT + 1)
        self._read: Mark = None
        room = int(_MEMORY_SHARE * space.provider.memory(space.index).free_bytes) if free_bytes is None else free_bytes
        self.sections = [name for name in _LAUNCH_ORDER if name in parts]
        self._rows: keys.DeviceMatrix | None = None
        with stages("key: constraints"):
            if "H" in parts:
                rows = keys.SparseMatrix.from_coefficients(self._field, zkey.domain_size, zkey.coefficients)
                self._rows = keys.DeviceMatrix(space, rows, functools.partial(self._queues.load, 0))
                room -= self._rows.size_bytes
                del rows
        with stages("key: points"):
            first, words = {"C": zkey.n_public + 1}, zkey.points
            points = {
                name: SectionPoints(family.g2 if name == "B2" else family.g1, words[name], first.get(name, 0), part)
                for name, part in parts.items()
            }
            vectors = _SCALAR_BYTES * _VECTORS * (zkey.domain_size + zkey.n_vars)
            captures = overlap and self._queues.captures and _CAPTURED_SETS * vectors <= _CAPTURED_SHARE * room
            allowed = budgets(points, room - vectors * (1 + _CAPTURED_SETS * captures))
            overlap = overlap and allowed.scratch is None  # where memory is short, sums run one after the other
            self._captures, self._eager_proofs = captures and overlap, 0
            self._captured: list[_Vectors] = []
            queues, self._input = (_QUEUES, _INPUT) if overlap else (dict.fromkeys(keys.SECTIONS, 0), 0)
            # Allocated on the queue that reads it, so that its memory is not reused early if a proof is abandoned
            self._public = self._queues.load(self._input, np.arange(1, 1 + zkey.n_public, dtype=np.uint32))
            self._sections = {
                name: _DeviceSection(self._queues, queues[name], self._field, points.pop(name), allowed, name)
                for name in self.sections
            }
            space.provider.synchronize(space.index)

    def receive(self, values: U64) -> tuple[Callable[[int, int], object], Callable[[Stages], keys.KeySums]]:
        """Return functions that copy values first to last of a pinned witness, and that then start its sums."""
        queues = self._queues
        if not queues.captures:
            return (lambda *_: None), lambda stages: self._start(_Vectors(self.space.load(values)), stages)
        import torch

        vectors, source = self._vectors(len(values)), torch.from_numpy(values.view(np.int64))

        def copy(first: int, last: int) -> None:
            with queues.queue(self._input):
                vectors.witness[first:last].copy_(source[first:last], non_blocking=True)

        return copy, functools.partial(self._start, vectors)

    def _start(self, vectors: _Vectors, stages: Stages) -> keys.KeySums:
        """Launch all kernels on a witness that the input's queue copies."""
        queues, space, field, spans = self._queues, self.space, self._field, Spans()
        witness, n = vectors.witness, int(vectors.witness.shape[0])
        in_use: list[Any] = [witness]  # kept alive until all queues have read them
        self._read = copied = queues.mark(self._input)
        with queues.queue(self._input):
            unreduced = queues.fetch(self._input, keys.unreduced_blocks(space, field, witness, n))
            public = queues.fetch(self._input, keys.gather(space, field, witness, self._public, self._n_public))
        pending: dict[str, Callable[[], U64]] = {}
        for name in _LAUNCH_ORDER:
            if name == "quotient" and self._rows is not None:
                queues.wait(0, copied)
                with queues.queue(0):
                    start = queues.mark(0)
                    if vectors.graph is None:
                        in_use.append(self._rows.quotient(witness))
                    else:
                        vectors.graph.replay()
                        in_use.append(vectors.quotient)
                    spans["quotient"] = start, queues.mark(0)
            elif name in self.sections:
                scalars = (in_use[-1], spans["quotient"][1]) if name == "H" else (witness, copied)
                pending[name] = self._sections[name].begin(*scalars, spans, vectors.sums.get(name))
        vectors.ends = [queues.mark(self._input), *(end for _, end in spans.values())]

        def inputs_() -> U64:
            with stages("device"):
                if unreduced().any():
                    for name in self.sections:  # they read the witness
                        pending[name]()
                    raise keys.UnreducedError
                return public()

        def sum_(name: str) -> U64:
            with stages("device"):
                return pending[name]()

        def times() -> dict[str, float]:
            in_use.clear()
            found = {name: queues.span_s(*marks) for name, marks in spans.items()}
            return {name: seconds for name, seconds in found.items() if seconds is not None}

        return keys.KeySums(inputs_, sum_, times)

    def _vectors(self, n: int) -> _Vectors:
        """Return vectors for n values: a free captured set, else new ones, captured from the third call on."""
        for vectors in self._captured:
            if all(end.done() for end in vectors.ends):
                return vectors
        with self._queues.queue(self._input):  # allocated on the queue that writes it
            vectors = _Vectors(self.space.empty((n, 4), _U64))
        if not self._captures or len(self._captured) == _CAPTURED_SETS:
            return vectors
        self._eager_proofs += 1
        if self._eager_proofs <= _EAGER_PROOFS:
            return vectors
        from accelerant.runtime.streams.graphs import without_collection

        try:
            with without_collection(collect=False):
                if self._rows is not None:
                    quotient = self._queues.captured(0, "quotient", self._rows.quotient, vectors.witness)
                    vectors.quotient, vectors.graph = quotient
                for name, section in self._sections.items():
                    section.capture(vectors.quotient if name == "H" else vectors.witness, vectors.sums)
        except (RuntimeError, LaunchError, OutOfMemory) as error:  # torch's errors of a capture are RuntimeErrors
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            ledger().fallback(FallbackRecord("msm", f"proof on {self.label}", "graph", "eager", reason))
            self._captures = False
            return _Vectors(vectors.witness)
        self._captured.append(vectors)
        return vectors

    def await_read(self) -> None:
        """Wait until the last witness has been read; DeviceLost in a forked child, which has no threads that read."""
        if self._read is None:
            self.space.provider.memory(self.space.index)
        else:
            self._read.synchronize()

    def explain(self) -> str:
        """See HostKey."""
        return "\n".join(
            f"{name}: {self._sections[name].explain()}" for name in keys.SECTIONS if name in self._sections
        )


def shares(n_points: Mapping[str, int], count: int) -> list[dict[str, Part]]:
    """Divide sections among devices; return for each its sections and the parts of their points.

    A section stays whole where it costs no more than a device's fair share of all. The others are cut into the fewest
    equal parts that do; then each part, the most expensive first, goes to the device that has least.
    """
    costs = {name: n * (_G2_COST if name == "B2" else 1) for name, n in n_points.items()}
    fair = max(1.0, sum(costs.values()) / count)
    cuts = {name: min(count, max(1, math.ceil(cost / (_SLACK * fair)))) for name, cost in costs.items()}
    pieces = sorted(((costs[name] / n, name, (i, n)) for name, n in cuts.items() for i in range(n)), reverse=True)
    taken: list[dict[str, Part]] = [{} for _ in range(count)]
    load = [0.0] * count
    for cost, name, part in pieces:
        device = min((i for i in range(count) if name not in taken[i]), key=load.__getitem__)
        taken[device][name] = part
        load[device] += cost
    return taken


@dataclass(slots=True)
class _Vectors:
    """A proof's scalars on a device, captured sums by section, `graph` of the quotient, and marks of the work's end."""

    witness: Words
    quotient: Words = None
    graph: Graph | None = None
    sums: dict[str, tuple[PendingMsm, Graph]] = dataclasses.field(default_factory=dict)
    ends: list[Mark] = dataclasses.field(default_factory=list)


class DeviceKey:
    """A HostKey's counterpart on one device, or on several with some sections each or parts of them: see `shares`."""

    def __init__(self, zkey: Zkey, spaces: Sequence[MemorySpace], stages: Stages, **options: Any) -> None:
        """Copy a part of the key to each device; other arguments and errors as KeyPart."""
        self._family = family_of(zkey.family)
        parts = shares({name: len(words) for name, words in zkey.points.items()}, len(spaces))
        used = [(space, part) for space, part in zip(spaces, parts, strict=True) if part]
        self._parts = [KeyPart(zkey, space, stages, part, **options) for space, part in used]
        self._witness, self._lock = _host_words((zkey.n_vars, 4), spaces), fork_safe(threading.Lock())
        self.label = "+".join(part.label for part in self._parts)
        self._threads = ThreadPoolExecutor(_COPIERS, thread_name_prefix="accelerant-groth16")

    def begin(self, witness: Witness, stages: Stages) -> keys.KeySums:
        """See HostKey. One thread launches on all devices: several would wait for the interpreter's lock.

        All devices read one pinned copy: if the file changed in between, r and s would not hide sums of parts of two
        witnesses.
        """
        own = [Stages() for _ in self._parts]
        with self._lock:
            with stages("witness"):
                for part in self._parts:
                    part.await_read()
                bounds = [len(self._witness) * i // _PARTS for i in range(_PARTS + 1)]
                rows = list(itertools.pairwise(bounds))
                copied = self._witness
                read = [self._threads.submit(witness.copy_values, i, copied[i:j]) for i, j in rows]
                try:
                    copies, starts = zip(*[part.receive(self._witness) for part in self._parts], strict=True)
                    for done, some in zip(read, rows, strict=True):
                        done.result()
                        for copy in copies:
                            copy(*some)
                finally:  # no thread still writes when the next witness comes
                    wait(read)
            with stages("launches"):
                pending = [start(each) for start, each in zip(starts, own, strict=True)]
        stages.compiled("launches", sum(each.compile_s for each in own))

        def public() -> U64:
            with stages("device"):
                for part in pending[1:]:
                    with suppress(keys.UnreducedError):  # the first raises it, too
                        part.public()
                inputs: U64 = pending[0].public()
                return inputs

        def sum_(name: str) -> U64:
            curve: Curve[Any] = self._family.g2 if name == "B2" else self._family.g1
            holders = (sums for part, sums in zip(self._parts, pending, strict=True) if name in part.sections)
            with stages("device"):
                points = (sums.sum(name).reshape(1, *curve.shape) for sums in holders)
                total: U64 = functools.reduce(functools.partial(launch.add, HOST, curve), points)
            return total

        def spans() -> dict[str, float]:
            return {
                f"{part.label} {name}" if len(pending) > 1 else name: seconds
                for part, sums in zip(self._parts, pending, strict=True)
                for name, seconds in sums.spans().items()
            }

        return keys.KeySums(public, sum_, spans)

    def explain(self) -> str:
        """See HostKey; one line per section and device."""
        return "\n".join(part.explain() for part in self._parts)


def _host_words(shape: tuple[int, ...], spaces: Sequence[MemorySpace]) -> U64:
    """Return uninitialized words, in pinned memory if all devices are CUDA's."""
    if any(space.backend != "cuda" for space in spaces):
        return np.empty(shape, np.uint64)
    import torch

    words: U64 = torch.empty(shape, dtype=torch.int64, pin_memory=True).numpy().view(np.uint64)
    return words


# --- sections --------------------------------------------------------------------------------------------------------
class SectionPoints:
    """A section's finite points, Montgomery form, on the host; `indices` of their scalars are None for all."""

    def __init__(self, curve: Curve[Any], words: U64, first: int = 0, part: tuple[int, int] = (0, 1)) -> None:
        """Select the finite points in the i-th of n parts, part = (i, n); scalar `first` multiplies the first point."""
        self.curve = curve
        index, count = part
        start, stop = (len(words) * i // count for i in (index, index + 1))
        words, first = words[start:stop], first + start
        finite = words.any(axis=1)
        all_finite = bool(finite.all())
        self.words = words if all_finite else words[finite]
        whole = all_finite and not first and count == 1
        self.indices = None if whole else (first + np.flatnonzero(finite)).astype(np.uint32)

    def scratch_bytes(self, limit: int, rounds: int | None = 0) -> int:
        """Return the scratch memory of a sum in chunks of at most `limit` points; rounds as for device_plan."""
        n = min(len(self.words), limit)
        return device_plan(self.curve, n, _NO_LIMIT, rounds=rounds).size_bytes(self.curve) if n else 0

    @property
    def multiples_bytes(self) -> int:
        """Memory of the points with their multiples."""
        n = len(self.words)
        return self.words.nbytes * device_plan(self.curve, n, _NO_LIMIT, shared=True).windows if n else 0

    @property
    def chunk(self) -> int:
        """Largest number of points that is streamed at once."""
        return device.STREAMED_BYTES // (16 * coordinate_words(self.curve))


class Budgets(NamedTuple):
    """Device memory granted to sections."""

    points: Mapping[str, int | None]  # section -> bytes for its points and their multiples; None where it is streamed
    scratch: int | None  # bytes for the scratch of one sum; None where each section keeps its scratch between sums
    rounds: int | None = 0  # affine rounds of sums over stored points: 0, or None for as many as pay


def budgets(points: Mapping[str, SectionPoints], room: int) -> Budgets:
    """Divide `room` bytes: points with multiples, else plain points, else as many sections as fit; rounds come last."""
    plain = {name: section.words.nbytes for name, section in points.items()}
    with_rounds = sum(
        section.scratch_bytes(len(section.words), None) + section.multiples_bytes for section in points.values()
    )
    rounds = None if with_rounds <= room else 0
    scratch = sum(section.scratch_bytes(len(section.words), rounds) for section in points.values())
    if (left := room - sum(plain.values()) - scratch) >= 0:
        total = max(1, sum(plain.values()))
        return Budgets({name: size + left * size // total for name, size in plain.items()}, None, rounds)
    scratch = max(section.scratch_bytes(section.chunk) for section in points.values())
    room -= scratch + _STREAMED_CHUNKS * device.STREAMED_BYTES
    stored: dict[str, int | None] = {}
    for name in filter(plain.__contains__, _KEPT_FIRST):
        stored[name] = 0 if plain[name] <= room else None
        room -= plain[name] if plain[name] <= room else 0
    return Budgets(stored, scratch)


class _DeviceSection:
    """The points of a section on the device, or on the host where they do not fit, and the queue of their sums."""

    def __init__(
        self, queues: Queues, queue: int, field: Field, points: SectionPoints, allowed: Budgets, name: str
    ) -> None:
        self._queues, self._queue, self._field, self._name = queues, queue, field, name
        self._curve, self._n, self._scratch = points.curve, len(points.words), allowed.scratch
        self._indices = None if points.indices is None else queues.load(queue, points.indices)
        self._bases: DeviceBases | None = None
        self._streamed = np.empty((0, 0), np.uint64)
        if (free_bytes := allowed.points[name]) is None:
            self._streamed = np.array(points.words, np.uint64)  # a copy: the file may be closed
            return
        with queues.queue(queue):
            words, rounds, keep = queues.load(queue, points.words), allowed.rounds, allowed.scratch is None
            self._bases = DeviceBases(
                queues.space, points.curve, words, free_bytes=free_bytes, keep_scratch=keep, rounds=rounds
            )

    def begin(
        self, values: Words, after: Mark, spans: Spans, captured: tuple[PendingMsm, Graph] | None
    ) -> Callable[[], U64]:
        """Launch a sum of `values`, there from mark `after` on, or its capture; return a function that waits for it."""
        queues, queue = self._queues, self._queue
        queues.wait(queue, after)
        with queues.queue(queue):
            first = queues.mark(queue)
            if captured is None:
                pending = self._start(values)
            else:
                pending, graph = captured
                graph.replay()
            results = [queues.fetch(queue, words) for words in pending.results]
            spans[f"sum {self._name}"] = first, queues.mark(queue)
        return lambda: pending.finish([fetch() for fetch in results])

    def _start(self, values: Words) -> PendingMsm:
        """Launch a sum on the current queue."""
        space = self._queues.space
        record = msm_record(space, self._curve, self._n, 1)
        with RecordedLaunch(record, space.provider, space.index):
            if self._indices is not None:
                values = keys.gather(space, self._field, values, self._indices, self._n)
            if self._bases is not None:
                return self._bases.start(values)
            load = functools.partial(self._queues.load, self._queue)
            return start_msm(space, self._curve, values, self._streamed, free_bytes=self._scratch, load=load)

    def capture(self, values: Words, sums: dict[str, tuple[PendingMsm, Graph]]) -> None:
        """Capture the launches of a sum of scalars that stay in memory; between chunks, if any, the host may wait."""
        if self._bases is not None and self._bases.plan is not None and self._bases.plan.points >= self._n:
            sums[self._name] = self._queues.captured(self._queue, f"sum {self._name}", self._start, values)

    def explain(self) -> str:
        label = self._queues.space.label
        if self._bases is None:
            return f"{self._n} points of {self._curve.name}, streamed to {label} for each sum"
        return f"{self._n} points of {self._curve.name} on {label}; {self._bases.explain()}"


# --- queues ----------------------------------------------------------------------------------------------------------
class Queues:
    """Command queues of a device, the first with priority: CUDA streams, which wait for marks only; elsewhere one."""

    def __init__(self, space: MemorySpace, count: int) -> None:
        self.space = space
        self._streams: Sequence[Stream] = ()
        if space.backend == "cuda":
            from accelerant.runtime.streams.stream import Stream

            # One more for copies, which must not wait for the work of a queue
            self._streams = [Stream(space.label, priority=-1 if number == 0 else 0) for number in range(count + 1)]
        self.captures = bool(self._streams)  # whether launches can be captured
        self._copied: deque[Event] = deque()
        self._results: dict[Any, list[Any]] = {}

    def captured(self, number: int, name: str, call: Callable[..., T], *args: Any) -> tuple[T, Graph]:
        """Return the result of a call that launches on a queue, in memory that replays of the graph write."""
        from accelerant.runtime.streams.graphs import Graph

        graph, stream = Graph(name), self._streams[number]
        with stream:
            result: T = graph.capture(call, *args, warm_up=0, on=stream.torch_stream)
        return result, graph

    @contextmanager
    def queue(self, number: int) -> Iterator[None]:
        """Issue the launches, loads and fetches of the block to a queue."""
        if not self._streams:
            yield
            return
        with self._streams[number]:
            yield

    def mark(self, number: int) -> Mark:
        """Mark the end of the work issued to a queue so far."""
        return self._streams[number].record() if self._streams else None

    def wait(self, number: int, mark: Mark) -> None:
        """Let the later work of a queue wait for another queue's mark."""
        if self._streams:
            self._streams[number].wait(mark)

    def load(self, number: int, words: npt.NDArray[Any]) -> Words:
        """Copy words from the host, which may change them then, through pinned memory, at most a few chunks ahead."""
        if not self._streams or not words.size:
            return self.space.load(np.ascontiguousarray(words))
        import torch

        from accelerant.runtime.streams.transfer import copy_async

        if len(self._copied) >= _COPIES_IN_FLIGHT:
            self._copied.popleft().synchronize()
        self._copied.append(self._streams[number].record())
        raw = words.view(np.uint8)  # words in a file may be unaligned, which torch refuses
        copied = copy_async(raw, stream=self._streams[-1]).value_on(self._streams[number])
        return copied.view({8: torch.int64, 4: torch.int32}[words.itemsize])

    def fetch(self, number: int, words: Words) -> Callable[[], npt.NDArray[Any]]:
        """Start a copy to the host; return a function that waits for it and returns unsigned words."""
        if not self._streams:
            return lambda: self.space.store(words)
        import torch

        free = self._results.setdefault((number, words.shape, words.dtype), [])
        new = functools.partial(torch.empty, words.shape, dtype=words.dtype, pin_memory=True)
        target = _Result(free, free.pop() if free else new())
        with self.queue(number):
            target.words.copy_(words, non_blocking=True)
        done = self._streams[number].record()

        def wait() -> npt.NDArray[Any]:
            done.synchronize()
            values: npt.NDArray[Any] = target.words.numpy().copy()
            return values.view(f"u{values.itemsize}")

        return wait

    def span_s(self, first: Mark, last: Mark) -> float | None:
        """Return the seconds between two marks, waiting for them; None where there are no marks."""
        if last is None:
            return None
        last.synchronize()
        return float(first.elapsed_ms(last)) / 1e3


class _Result:
    """Pinned memory that later results of a queue use, never freed: torch would record an event on a captured queue."""

    def __init__(self, free: list[Any], words: Any) -> None:
        self._free, self.words = free, words

    def __del__(self) -> None:
        self._free.append(self.words)
