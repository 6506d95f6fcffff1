"""Memory that the GPUs of one host read and write in each other, and sums of large arrays by their copy engines.

NCCL's sums run on multiprocessors, which a product beside them lacks. Copy engines move the bytes without them; only
the additions, of 1 / p of the array in each of p processes, are a kernel:

    process r of p   copies part r of the array from each other process, adds these to its own part r,
                     then copies each other part from the process that has its sum

As in a ring all_reduce, each process receives 2 (p - 1) / p of the array. Torch's symmetric memory maps the others'
memory; its barrier is one block on the device, so all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from accelerant.errors import UnsupportedCase

__all__ = ["PeerMemory", "PeerSums"]

_PATIENCE_MS = 600_000
"""Longest wait of a GPU for the others, after which its process fails; NCCL's default."""

_ALIGNED = 16  # bytes: boundaries of the parts


class PeerMemory:
    """An array of zeros in each process of a group, which the other processes can reach.

    Every process of the group creates it, with the same arguments.

    Args:
        elements: of each process's array.
        group: the processes; None for all.

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
        failed = None
        try:
            # No public names yet. Arrays of torch's `empty` may share their block, and with it the barrier.
            from torch._C._distributed_c10d import _SymmetricMemory as Symmetric

            self.own = Symmetric.empty_strided_p2p((elements,), (1,), dtype, device)
            self._handle: Any = Symmetric.rendezvous(self.own, group.group_name)
            self.own.zero_()
            torch.cuda.synchronize(device)
        except (ImportError, RuntimeError) as error:
            failed = str(error).splitlines()[0]
        for rank, theirs in enumerate(_exchanged(failed, group)):
            if theirs:
                raise UnsupportedCase(f"rank {rank} cannot share memory: {theirs}")
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
        self._handle.barrier(timeout_ms=_PATIENCE_MS)


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

    Args:
        memory: the arrays.
        longest: elements of the longest part.

    Attributes:
        memory: the arrays.
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
