"""Noise in floating point from Philox: quick, and not for a privacy claim.

philox.cuh on CUDA devices, whose counter lies in device memory, so that a captured graph draws anew at each replay;
llvm_philox.py on the CPU.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.ops._launch import multiprocessors
from accelerant.privacy.dp.noise.launch import compiled, index_of, noted, packed_rows
from accelerant.privacy.dp.noise.program import PHILOX_GROUP, PHILOX_THREADS, ROWS, host_philox_source, philox_source
from accelerant.privacy.random.device import compiled_reserve
from accelerant.privacy.random.llvm_kernels import lanes
from accelerant.runtime.streams.stream import capturing

__all__ = ["PhiloxState", "add_philox", "round_keys"]

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_COUNTERS = PHILOX_GROUP // 4
"""Of a group of elements. A tensor begins a new group."""

_ALIGNMENT = 16
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


class PhiloxState:
    """A seed, and the counters of each device.

    Args:
        seed: below 2^64; None for one of the system's entropy.
    """

    def __init__(self, seed: int | None = None) -> None:
        if seed is not None and not 0 <= seed < 2**64:
            raise ConfigError(f"seed must be in [0, 2^64), got {seed}")
        self.seed = int.from_bytes(os.urandom(8), "little") if seed is None else seed
        self.process = os.getpid()
        self._lock = threading.Lock()
        self._counter = 0
        self._counters: dict[int, Tensor] = {}

    def take(self, counters: int) -> int:
        """The first of so many on the CPU."""
        with self._lock:
            first = self._counter
            self._counter += counters
        return first

    def counter_on(self, index: int) -> Tensor:
        """(1,) int64 on a CUDA device: the next counter.

        Raises:
            ConfigError: a graph is being captured before noise was drawn once there.
        """
        with self._lock:
            if index not in self._counters:
                if capturing(index):
                    raise ConfigError("noise is captured before it was drawn once on this device: run a step before")
                self._counters[index] = torch.zeros(1, dtype=torch.int64, device=torch.device("cuda", index))
            return self._counters[index]


def add_philox(
    state: PhiloxState, tensors: Sequence[Tensor], width: float, scale: float, *, laplace: bool, fills: bool = False
) -> None:
    """Make of x (x + width z) scale, of contiguous tensors of one dtype and device.

    Args:
        state: of the seed and counters.
        tensors: float32, bfloat16 or float16; on the CPU float32 alone.
        width: of the noise.
        scale: of the result.
        laplace: z has the density exp(-|z|) / 2 in place of the normal one.
        fills: what is in x counts as 0, and is not read (CUDA devices alone).
    """
    if tensors[0].device.type == "cpu":
        for x in tensors:
            _add_on_host(state, x, width, scale, laplace)
        return
    device = tensors[0].device
    index = index_of(device)
    _, kernel = compiled(philox_source(_NAMES[tensors[0].dtype], laplace=laplace, fills=fills), device)
    provider, reserve = compiled_reserve(index)
    for at in range(0, len(tensors), ROWS):
        members = tensors[at : at + ROWS]
        rows, groups = packed_rows(members, PHILOX_GROUP)
        if groups:
            counter = state.counter_on(index)
            aligned = all(x.data_ptr() % _ALIGNMENT == 0 for x in members)
            first = torch.empty(1, dtype=torch.int64, device=device)
            provider.launch(reserve, (1,), (1,), (counter, first, groups * _COUNTERS))
            blocks = min(8 * multiprocessors(device), -(-groups * 32 // PHILOX_THREADS))
            args = (rows, round_keys(state.seed, index + 1), first, int(aligned), width, scale)
            with noted("philox_noise", members, kernel, sum(map(Tensor.numel, members)), accesses=1 if fills else 2):
                kernel.handle.pack((blocks, 1, 1), args, index).start()


def _add_on_host(state: PhiloxState, x: Tensor, width: float, scale: float, laplace: bool) -> None:
    n = x.numel()
    if n:
        first = state.take(-(-n // PHILOX_GROUP) * _COUNTERS)
        keys = torch.from_numpy(np.frombuffer(round_keys(state.seed, 0), np.int32).copy())
        provider, kernel = compiled(host_philox_source(laplace=laplace), x.device)
        args = (x, keys, first, 0, n, width, scale)
        with noted("philox_noise", [x], kernel, n, accesses=2):
            provider.launch(kernel, (-(-n // (4 * lanes())),), (1,), args)


def round_keys(seed: int, stream: int) -> bytes:
    """The struct Keys of philox.cuh: both words of the key of each of the ten rounds, and the counter's third word."""
    halves = seed & _LOW, seed >> 32
    words = [halves[side] + i * _WEYL[side] & _LOW for i in range(10) for side in (0, 1)]
    return struct.pack("<21I", *words, stream)
