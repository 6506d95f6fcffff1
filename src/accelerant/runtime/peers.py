"""Memory that the GPUs of one host read and write in each other, and sums in it.

PeerSum sums small arrays by one kernel (accelerant.distributed.triton_kernels). PeerSums sums large ones by copy
engines, which leave the multiprocessors to a product beside them:

    process r of p   copies part r of the array from each other process, adds these to its own part r,
                 then copies each other part from the process that has its sum

As in a ring all_reduce, each process receives 2 (p - 1) / p of the array. The barrier of torch's symmetric memory is
one block on the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from accelerant.errors import LaunchError, UnsupportedCase
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.ledger import FallbackRecord, ledger

_PATIENCE_S = 600  # longest wait of a GPU for the others, after which its process fails; NCCL's default
_ALIGNED = 16  # bytes: boundaries of the parts


class PeerMemory:
    """An array of zeros in each process of a group, which the others can reach; all create it alike.

    Attributes:
        own: this process's array, of one dimension.
        rank, size: of this process in the group, and number of processes.
        addresses: of each process's array, as mapped here.

    Raises:
        UnsupportedCase: in every process: no GPUs of one host, or the driver maps no memory of other processes.
    """

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
    """Return the value of each process."""
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
    """Sums of parts of a PeerMemory over its processes, in place, which all processes start in the same order.

    `longest` is the number of elements of the longest part.
    """

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

    Calls are on one stream, or captured in graphs that run on one. NCCL or gloo sum what it does not take; where the
    GPUs cannot reach each other, the ledger gets the reason. After `patience_s` seconds in vain this process's work on
    the GPU fails, and `silent_peer` names the other one.
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
    word = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    _missing.append((word, ranks, patience_s))
    return torch.tensor([*addresses, word.data_ptr(), int(patience_s * 1e9)], device=device)


def _launch_sum(x: Tensor, addresses: Tensor, numbers: Tensor, rank: int, size: int) -> None:
    _require_all()
    words = x.numel() * x.element_size() // 4
    constants = {"ROOM": _ROOM, "RANK": rank, "SIZE": size, "WIDE": x.dtype == torch.float32, "BLOCK": _BLOCK}
    _KERNEL.launch((-(-words // _BLOCK),), (x, addresses, numbers, words), constants, num_warps=_WARPS)
