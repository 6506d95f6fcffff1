"""The processes of torch.distributed that work together: exchanges of small values, agreement, sums between their GPUs.

Each exchange is one collective of 4 KiB. An error in `agreed` and `on_first`, and a disagreement, is raised in all.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from accelerant import errors
from accelerant.errors import ConfigError, LaunchError, UnsupportedCase
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.ledger import FallbackRecord, ledger

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
        """Run a block in every process, then compare the settings it leaves; all raise an error, or a difference."""
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
    if error is not None:
        raise _shared(_of_rank(rank, *error))


def _of_rank(rank: int, kind: str, message: str) -> Exception:
    """Return an error of another process, of Accelerant's class of that name."""
    cause: type[Exception] = getattr(errors, kind, errors.ProtocolError)
    return cause.__new__(cause, f"rank {rank}: {message}")  # its __init__ may take other arguments


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
    """Ends the work of all processes when one of them fails, or is silent; entered by all in the same order.

    The error is raised in all blocks, in the others with the rank in front. A process that hangs on the device for
    `grace_s` seconds afterwards is ended with status 1.
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
                    _shared(error)  # rank 0 shows it, too
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
            again = _of_rank(rank, name, message)
            if not first and (rank or name != "ProtocolError"):  # rank 0 was not killed
                _shared(again)
            raise again from error


_PATIENCE_S = 600  # longest wait of a GPU for the others, after which its process fails; NCCL's default
_ALIGNED = 16  # bytes: boundaries of the parts


class PeerMemory:
    """An array of zeros in each process of a group, mapped at `addresses`; UnsupportedCase in all without it."""

    def __init__(self, elements: int, dtype: torch.dtype, device: torch.device, group: Any = None) -> None:
        group = torch.distributed.group.WORLD if group is None else group
        if device.type != "cuda" or torch.version.hip:
            raise UnsupportedCase(f"torch has no symmetric memory on {device}")
        hosts = _exchanged((platform.node(), _boot()), group)
        if others := sorted({name for name, _ in set(hosts) - {hosts[0]}}):
            raise UnsupportedCase(f"the processes are on several hosts, {hosts[0][0]} and {', '.join(others)}")
        size = elements * dtype.itemsize
        with _together(group, f"cannot share {size:,} bytes"):  # the rendezvous waits for all processes
            # No public names yet. Arrays of torch's `empty` may share their block, and with it the barrier.
            from torch._C._distributed_c10d import _SymmetricMemory as Symmetric

            self.own = Symmetric.empty_strided_p2p((elements,), (1,), dtype, device)
        with _together(group, f"cannot map the others' {size:,} bytes"):
            self._handle: Any = Symmetric.rendezvous(self.own, group.group_name)
            self.own.zero_()
            torch.cuda.synchronize(device)
        self.rank, self.size = int(self._handle.rank), int(self._handle.world_size)
        self.addresses: list[int] = list(self._handle.buffer_ptrs)

    def part(self, rank: int, first: int, count: int) -> Tensor:
        """Return elements of a process's array."""
        if rank == self.rank:
            return self.own[first : first + count]
        part: Tensor = self._handle.get_buffer(rank, (count,), self.own.dtype, first)
        return part

    def barrier(self) -> None:
        """Let the current stream wait until every process's stream has come here."""
        self._handle.barrier(timeout_ms=1000 * _PATIENCE_S)


@contextmanager
def _together(group: Any, what: str) -> Iterator[None]:
    """Run a block in every process, and raise UnsupportedCase in all if it fails in one."""
    failed = None
    try:
        yield
    except (ImportError, RuntimeError) as error:
        failed = str(error).splitlines()[0]
    for rank, theirs in enumerate(_exchanged(failed, group)):
        if theirs:
            raise UnsupportedCase(f"rank {rank} {what}: {theirs}")


def _exchanged(value: Any, group: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(found, value, group=group)
    return found


def _boot() -> str:
    """Return what differs between hosts, and between containers that share a name."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


class PeerSums:
    """Sums, in place, of parts of a PeerMemory of at most `longest` elements; all processes start them in one order."""

    def __init__(self, memory: PeerMemory, longest: int) -> None:
        self.memory = memory
        device, dtype, p = memory.own.device, memory.own.dtype, memory.size
        self._aligned = _ALIGNED // dtype.itemsize
        self._received = torch.empty(p - 1, longest // p + 2 * self._aligned, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device, priority=-1)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run the block's kernels, which fill a part before its sum, after the current stream's work and beside it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def start(self, first: int, count: int) -> None:
        """Sum `count` elements from `first` on, a multiple of 16, after the current stream's work so far."""
        memory, p = self.memory, self.memory.size
        bounds = [first + count * i // p // self._aligned * self._aligned for i in range(p)] + [first + count]
        others = [(memory.rank + i) % p for i in range(1, p)]
        low, high = bounds[memory.rank : memory.rank + 2]
        with self.beside():
            memory.barrier()
            mine, received = memory.part(memory.rank, low, high - low), self._received[:, : high - low]
            for part, other in zip(received, others, strict=True):
                part.copy_(memory.part(other, low, high - low))
            for part in received:
                mine.add_(part)
            memory.barrier()
            for other in others:
                low, high = bounds[other : other + 2]
                memory.part(memory.rank, low, high - low).copy_(memory.part(other, low, high - low))

    def finish(self) -> None:
        """Let the current stream wait for all sums, and for the other processes to have read them."""
        with torch.cuda.stream(self._stream):
            self.memory.barrier()
        torch.cuda.current_stream().wait_stream(self._stream)


# --- small arrays ----------------------------------------------------------------------------------------------------
_ROOM = 1 << 14  # words of 4 bytes of the longest array; NCCL is faster for longer ones
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of arrays whose sums are those of float32
_WARPS = 4
_BLOCK = 32 * _WARPS  # a word a thread, so that a warp writes 256 bytes in a row

_KERNEL = TritonKernel("accelerant.distributed.triton_kernels", "peer_sum")

_missing: list[tuple[Tensor, list[int], float]] = []
"""Words of pinned memory that are 1 + the number of the process for which a kernel has waited in vain, the ranks of
such numbers, and the limits in seconds. They are never freed: a kernel may write late."""


def silent_peer() -> tuple[int, str] | None:
    """Return the rank for which a sum of this process has waited in vain, and a message; None without one."""
    for word, ranks, patience_s in _missing:
        if number := int(word):
            return ranks[number - 1], f"has sent nothing for a sum within {patience_s:g} s: it has ended, or hangs"
    return None


class PeerSum:
    """Sums small arrays over the processes of a mesh, all of which call it with equal shapes in the same order.

    NCCL or gloo sum what it does not take. After `patience_s` seconds in vain this process's work on the GPU fails, and
    `silent_peer` names the other one.
    """

    def __init__(self, mesh: DeviceMesh, *, patience_s: float = _PATIENCE_S) -> None:
        self._group, self._memory = mesh.get_group(), None
        if mesh.device_type != "cuda" or mesh.size() == 1:
            return
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            if reason := refuses_triton(device):
                raise UnsupportedCase(reason)
            self._memory = PeerMemory(4 * mesh.size() * _ROOM, torch.int64, device, self._group)
        except UnsupportedCase as error:
            ledger().fallback(FallbackRecord("tensor_parallel", "small sums", "peer_sum", "NCCL", str(error)))
            return
        self._addresses = _for_kernel(self._memory.addresses, mesh.mesh.flatten().tolist(), patience_s, device)
        self._numbers = torch.zeros(_ROOM // _BLOCK, dtype=torch.int32, device=device)
        self._output_numbers = torch.zeros(_ROOM, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        """Return whether one kernel sums such an array."""
        size = x.numel() * x.element_size()
        return (
            self._memory is not None and x.is_cuda and x.is_contiguous() and 0 < size <= 4 * _ROOM and not size % 4
            and x.dtype in _DTYPES and not x.data_ptr() % 4
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Sum an array over the processes, in place, and return it; in float32, in the order of processes."""
        if self._memory is None or not self.takes(x):
            torch.distributed.all_reduce(x, group=self._group)
            return x
        _launch_sum(x, self._addresses, self._numbers, self._memory.rank, self._memory.size)
        return x

    def takes_outputs(self, count: int, dtype: torch.dtype) -> bool:
        """Return whether `launch_outputs` can sum so many outputs of a kernel."""
        return self._memory is not None and count <= _ROOM and not count % 16 and dtype in _DTYPES

    def launch_outputs(
        self, kernel: TritonKernel, grid: tuple[int], tensors: tuple[Tensor, ...], sizes: tuple[int, ...],
        constants: Mapping[str, int], num_warps: int,
    ) -> None:  # fmt: skip
        """Launch a kernel that sums its outputs itself (linear_sum of accelerant.distributed.triton_kernels)."""
        assert self._memory is not None  # for the type checker: takes_outputs was True
        _require_all()
        args: tuple[Tensor | int, ...] = (*tensors, self._addresses, self._output_numbers, *sizes)
        own = {"ROOM": _ROOM, "RANK": self._memory.rank, "SIZE": self._memory.size}
        kernel.launch(grid, args, {**own, **constants}, num_warps=num_warps)


def _require_all() -> None:
    if silent := silent_peer():
        raise LaunchError(f"rank {silent[0]} {silent[1]}")


def _for_kernel(addresses: list[int], ranks: list[int], patience_s: float, device: torch.device) -> Tensor:
    """Return the addresses of all processes' memory and of a new word in _missing, and the limit in ns."""
    word = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    _missing.append((word, ranks, patience_s))
    return torch.tensor([*addresses, word.data_ptr(), int(patience_s * 1e9)], device=device)


def _launch_sum(x: Tensor, addresses: Tensor, numbers: Tensor, rank: int, size: int) -> None:
    _require_all()
    words = x.numel() * x.element_size() // 4
    constants = {"ROOM": _ROOM, "RANK": rank, "SIZE": size, "WIDE": x.dtype == torch.float32, "BLOCK": _BLOCK}
    _KERNEL.launch((-(-words // _BLOCK),), (x, addresses, numbers, words), constants, num_warps=_WARPS)
