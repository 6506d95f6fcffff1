"""Sums of small arrays over the GPUs of one host, in one kernel; see triton_kernels.py."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from accelerant.errors import UnsupportedCase
from accelerant.ops._launch import ceil_div
from accelerant.runtime.compilation.triton import TritonKernel, refuses_triton
from accelerant.runtime.ledger import FallbackRecord, ledger
from accelerant.runtime.peers import PeerMemory

__all__ = ["PeerSum"]

_ROOM = 1 << 14
"""Words of 4 bytes of the longest array; NCCL is faster for longer ones."""

_WARPS = 4
_BLOCK = 32 * _WARPS  # a word a thread, so that a warp writes 256 bytes in a row

_KERNEL = TritonKernel("accelerant.distributed.triton_kernels", "peer_sum")


class PeerSum:
    """Sums small arrays over the processes of a mesh, all of which call it with equal shapes in the same order.

    Calls are on one stream, or captured in graphs that run on one. NCCL or gloo sum what it does not take.

    Args:
        mesh: of one dimension. Every process creates it; where their GPUs cannot reach each other, the ledger gets the
            reason, and it takes nothing.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._group, self._memory = mesh.get_group(), None
        if mesh.device_type != "cuda" or mesh.size() == 1:
            return
        device = torch.device("cuda", torch.cuda.current_device())
        try:
            if reason := refuses_triton(device):
                raise UnsupportedCase(reason)
            self._memory = PeerMemory(2 * mesh.size() * _ROOM, torch.int64, device, self._group)
        except UnsupportedCase as error:
            ledger().fallback(FallbackRecord("tensor_parallel", "small sums", "peer_sum", "NCCL", str(error)))
            return
        self._addresses = torch.tensor(self._memory.addresses, device=device)
        self._numbers = torch.zeros(_ROOM // _BLOCK, dtype=torch.int32, device=device)

    def takes(self, x: Tensor) -> bool:
        """Return whether one kernel sums such an array."""
        size = x.numel() * x.element_size()
        return (
            self._memory is not None and x.is_cuda and x.is_contiguous() and 0 < size <= 4 * _ROOM and not size % 4
            and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and not x.data_ptr() % 4
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """Sum an array over the processes, in place, and return it; in float32, in the order of processes."""
        if self._memory is None or not self.takes(x):
            torch.distributed.all_reduce(x, group=self._group)
            return x
        words = x.numel() * x.element_size() // 4
        constants = {
            "ROOM": _ROOM, "RANK": self._memory.rank, "SIZE": self._memory.size, "WIDE": x.dtype == torch.float32,
            "BLOCK": _BLOCK,
        }  # fmt: skip
        args = (x, self._addresses, self._numbers, words)
        _KERNEL.launch((ceil_div(words, _BLOCK),), args, constants, num_warps=_WARPS)
        return x
