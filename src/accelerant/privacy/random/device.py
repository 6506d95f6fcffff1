"""Keystreams on devices: programs, compiled kernels, and a stream's key and counter in a device's memory.

On the CPU the caller advances the stream's own counter. On a CUDA device key and counter are in device memory, and a
kernel of one thread reserves counters. So each replay of a captured graph draws new words, and work on several CUDA
streams cannot reserve the same counters.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.privacy.random.llvm_kernels import KeystreamKernel, lanes
from accelerant.privacy.random.stream import SecureStream, Words, chacha20_words
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Builder, Kernel, KernelSource
from accelerant.runtime.provider import ComputeProvider
from accelerant.runtime.streams.stream import capturing

KEYSTREAM_BLOCK = 256
"""Most threads per block of chacha20_keystream; each generates a block of keystream."""


@functools.cache
def chacha20_text() -> str:
    """Return chacha20.h, to be included after portable.h."""
    return (Path(__file__).parent / "chacha20.h").read_text(encoding="utf-8")


@functools.cache
def keystream_source() -> KernelSource:
    """Return chacha20_keystream(state, first, words, n, one): n words from the block `first` on.

    state: key (8 words) and nonce (2); first: u64, in the device's memory, so that each replay of a captured graph
    draws new words; one: 1.
    """
    text = chacha20_text() + (Path(__file__).parent / "kernel.c").read_text(encoding="utf-8")
    arguments = ("*u32", "*u64", "*u32", "i64", "u32")
    dialects: dict[str, str | Builder] = {"portable": text, "llvm": KeystreamKernel()}
    return KernelSource("chacha20_keystream", dialects, {"chacha20_keystream": arguments})


@functools.cache
def reserve_source() -> KernelSource:
    """Return reserve(counter, first, blocks): first <- counter, counter <- counter + blocks, atomically."""
    text = (
        'extern "C" __global__ void reserve(unsigned long long *counter, unsigned long long *first,\n'
        "                                   unsigned long long blocks) {\n"
        "    *first = atomicAdd(counter, blocks);\n}\n"
    )
    return KernelSource("reserve", {"cuda": text}, {"reserve": ("*u64", "*u64", "u64")})


_kernels: dict[tuple[str, str, int], tuple[ComputeProvider, Kernel]] = {}


def compiled(source: KernelSource, device: torch.device) -> tuple[ComputeProvider, Kernel]:
    """Return a source's one kernel on a device, compiled once by the source's name."""
    key = source.name, device.type, index_of(device)
    if key not in _kernels:
        provider = registry.create(device.type)
        _kernels[key] = provider, provider.compile(source, device=key[2])
    return _kernels[key]


def index_of(device: torch.device) -> int:
    """Return the device's index on its backend."""
    if device.type != "cuda":
        return 0
    return torch.cuda.current_device() if device.index is None else device.index


class Taken(NamedTuple):
    """Counters of a keystream that are reserved for the caller: the first one, (1,) int64.

    `state`, (12,) int32, has key and nonce; a secret.
    """

    state: Tensor
    first: Tensor

    def __repr__(self) -> str:
        return "Taken()"


def take(stream: SecureStream, blocks: int, device: torch.device) -> Taken:
    """Reserve counters of `blocks` blocks for kernels on a device.

    On a CUDA device the stream's key is 8 words of `stream`, drawn at the first use. ConfigError if that would be
    during the capture of a graph.
    """
    if device.type != "cuda":
        key, counter = stream.reserve(blocks)
        return Taken(_state(key), torch.from_numpy(np.array([counter], np.uint64).view(np.int64)))
    index = index_of(device)
    state = stream.states.get(index)
    if state is None:
        if capturing(index):
            raise ConfigError(
                "noise is captured before it was drawn once on this device: run a step before the capture"
            )
        key, counter = stream.reserve(1)
        state = _state(chacha20_words(key, counter, 1)[:8, 0]).to(torch.device("cuda", index))
        stream.states[index] = state
    first = torch.empty(1, dtype=torch.int64, device=state.device)
    provider, kernel = compiled(reserve_source(), state.device)
    provider.launch(kernel, (1,), (1,), (state[10:], first, blocks))
    return Taken(state, first)


def _state(key: Words) -> Tensor:
    """Return (12,) int32: key (8 words), nonce (2, zero), counter (2: one of 64 bits, zero)."""
    words = np.zeros(12, np.uint32)
    words[:8] = key
    return torch.from_numpy(words.view(np.int32))


def keystream(stream: SecureStream, n: int, device: torch.device) -> Tensor:
    """Return (n,) int32, new words of the stream."""
    blocks = -(-n // 16)
    taken = take(stream, blocks, device)
    if device.type == "cuda":
        size, grid, block = n, -(-blocks // KEYSTREAM_BLOCK), KEYSTREAM_BLOCK
    else:  # the kernel writes whole vectors of blocks
        grid, block = -(-blocks // lanes()), 1
        size = grid * lanes() * 16
    words = torch.empty(size, dtype=torch.int32, device=taken.state.device)
    if n:
        provider, kernel = compiled(keystream_source(), words.device)
        provider.launch(kernel, (grid,), (block,), (*taken, words, n, 1))
    words[n:].zero_()  # later words of the stream, which would stay in the storage of what is returned
    return words[:n]
