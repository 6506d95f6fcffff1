"""Keystreams on devices: a stream's key and counter in a device's memory.

On the CPU the caller advances the stream's own counter. On a CUDA device key and counter are in device memory, and a
kernel of one thread reserves counters: so each replay of a captured graph draws new words, and work on several CUDA
streams cannot reserve the same counters.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.privacy.random.chacha20 import chacha20_words
from accelerant.privacy.random.llvm_kernels import lanes
from accelerant.privacy.random.program import KEYSTREAM_BLOCK, keystream_source, reserve_source
from accelerant.privacy.random.stream import SecureStream
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Kernel
from accelerant.runtime.provider import ComputeProvider
from accelerant.runtime.streams.stream import capturing

__all__ = ["Taken", "compiled_reserve", "keystream", "take"]

STATE_WORDS = 12
"""Key (8), nonce (2, zero), counter (2: one of 64 bits)."""


class Taken(NamedTuple):
    """Counters of a keystream that are reserved for the caller.

    Attributes:
        state: (12,) int32: key and nonce; a secret.
        first: (1,) int64: the first counter.
    """

    state: Tensor
    first: Tensor

    def __repr__(self) -> str:
        return "Taken()"


def take(stream: SecureStream, blocks: int, device: torch.device) -> Taken:
    """Reserve the counters of so many blocks, for kernels on a device.

    Raises:
        ConfigError: a graph is being captured before the stream was used on the device.
    """
    if device.type != "cuda":
        key, counter = stream.reserve(blocks)
        words = np.zeros(STATE_WORDS, np.uint32)
        words[:8] = key
        counters = np.array([counter], np.uint64)
        return Taken(torch.from_numpy(words.view(np.int32)), torch.from_numpy(counters.view(np.int64)))
    index = torch.cuda.current_device() if device.index is None else device.index
    state = _state_on(stream, index)
    first = torch.empty(1, dtype=torch.int64, device=state.device)
    provider, kernel = compiled_reserve(index)
    provider.launch(kernel, (1,), (1,), (state[10:], first, blocks))
    return Taken(state, first)


def _state_on(stream: SecureStream, index: int) -> Tensor:
    """Return a device's key, 8 words of the stream, and its counter."""
    state = stream.states.get(index)
    if state is None:
        if capturing(index):
            raise ConfigError(
                "noise is captured before it was drawn once on this device: run a step before the capture"
            )
        key, first = stream.reserve(1)
        words = np.zeros(STATE_WORDS, np.uint32)
        words[:8] = chacha20_words(key, first, 1)[:8, 0]
        state = stream.states[index] = torch.from_numpy(words.view(np.int32)).to(torch.device("cuda", index))
    return state


def keystream(stream: SecureStream, n: int, device: torch.device) -> Tensor:
    """Return (n,) int32, new words of the stream."""
    blocks = -(-n // 16)
    taken = take(stream, blocks, device)
    if device.type != "cuda":
        together = lanes()
        indices = -(-blocks // together)
        words = torch.empty(indices * together * 16, dtype=torch.int32)
        provider, kernel = _compiled("cpu", 0)
        if n:
            provider.launch(kernel, (indices,), (1,), (*taken, words, n, 1))
        return words[:n]
    words = torch.empty(n, dtype=torch.int32, device=taken.state.device)
    provider, kernel = _compiled("cuda", words.get_device())
    if n:
        provider.launch(kernel, (-(-blocks // KEYSTREAM_BLOCK),), (KEYSTREAM_BLOCK,), (*taken, words, n, 1))
    return words


@functools.cache
def _compiled(backend: str, index: int) -> tuple[ComputeProvider, Kernel]:
    provider = registry.create(backend)
    return provider, provider.compile(keystream_source(), device=index)


@functools.cache
def compiled_reserve(index: int) -> tuple[ComputeProvider, Kernel]:
    """Return the kernel that reserves counters on a CUDA device."""
    provider = registry.create("cuda")
    return provider, provider.compile(reserve_source(), device=index)
