"""Cryptographically secure random words: ChaCha20 under a key of the system's entropy, on CPUs and CUDA devices.

chacha20_blocks, in NumPy integers, is the reference of every kernel's keystream. A block is 16 words of 32 bits,
computed from 8 words of key and 4 of input: in Bernstein's layout a counter and a nonce of 64 bits each, in RFC 8439 of
32 and 96. A stream is a key and a 64-bit counter of blocks that only grows; forks, copies and pickles get a fresh key.
On a CUDA device a kernel of one thread reserves counters, so each replay of a captured graph draws new words.

The CPU's kernel is LLVM IR: each lane of a vector computes one block.

    words[16 i + j] = word j of the block of counter first + i

Layout: state word j of LANES blocks is one vector, so that a quarter round needs no shuffles. 16 lanes where there are
32 vectors of 512 bits; 8 with AVX2, 4 elsewhere.

Source: Nir and Langley 2018, RFC 8439, section 2.3; Bernstein 2008, "ChaCha, a variant of Salsa20".
"""

from __future__ import annotations

import functools
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import Builder, Kernel, KernelSource, builder_key
from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    Operand,
    Value,
    constant,
    lane_constants,
    program,
    vector,
)
from accelerant.runtime.host import fork_safe
from accelerant.runtime.provider import ComputeProvider
from accelerant.runtime.streams.stream import capturing

__all__ = ["SecureStream"]

BLOCK_WORDS = 16
CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # the characters "expand 32-byte k", little-endian
DOUBLE_ROUNDS = 10
QUARTERS = (
    (0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
    (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14),
)  # fmt: skip

Words = npt.NDArray[np.uint32]


def key_words(key: bytes) -> Words:
    """Return a key of 32 bytes as 8 words."""
    return np.frombuffer(key, "<u4").astype(np.uint32)


def chacha20_blocks(key: Words, inputs: Words) -> Words:
    """Return the blocks of n inputs, (16, n), from a key (8,) and words 12 to 15 of each block's state (4, n)."""
    start = np.empty((BLOCK_WORDS, inputs.shape[1]), np.uint32)
    start[:4] = np.array(CONSTANTS, np.uint32)[:, None]
    start[4:12] = key[:, None]
    start[12:] = inputs
    state = list(start.copy())
    for _ in range(DOUBLE_ROUNDS):
        for a, b, c, d in QUARTERS:
            for left, right, into, bits in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                state[left] += state[right]
                state[into] ^= state[left]
                state[into] = (state[into] << np.uint32(bits)) | (state[into] >> np.uint32(32 - bits))
    return np.stack(state) + start


def chacha20_words(key: Words, first: int, count: int, nonce: int = 0) -> Words:
    """Return (16, count), the blocks of the 64-bit counters from `first`, wrapping at 2^64, under a 64-bit nonce."""
    counters = np.arange(count, dtype=np.uint64) + np.uint64(first)
    inputs = np.empty((4, count), np.uint32)
    inputs[0], inputs[1] = counters & np.uint64(0xFFFFFFFF), counters >> np.uint64(32)
    inputs[2], inputs[3] = nonce & 0xFFFFFFFF, nonce >> 32
    return chacha20_blocks(key, inputs)


_KEY_BYTES = 32
_LAST = 2**64

renewed_after_fork: weakref.WeakSet[Any] = weakref.WeakSet()  # get another key in a fork, by `_renew()`


class SecureStream:
    """A keystream of ChaCha20, with Bernstein's counter of 64 bits, whose blocks are used once.

    Copying, pickling and forking give a stream with a fresh key. May be used from several threads.

    Args:
        key: 32 bytes, for tests; by default from os.urandom. Two streams of one key repeat one another.

    Attributes:
        states: keys and counters in the memory of CUDA devices, by device index (`take`).

    Trust: the key is in this process's memory, and in the memory of each device that draws; a reader of either knows
    the stream. Neither repr nor errors show it.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != _KEY_BYTES:
            raise ConfigError(f"a key has {_KEY_BYTES} bytes, got {len(key)}")
        self._lock = fork_safe(threading.Lock())
        self._counter = 0
        self._renew(key)
        renewed_after_fork.add(self)

    def reserve(self, blocks: int) -> tuple[Words, int]:
        """Reserve counters of blocks, and return the key and the first; ConfigError past a counter of 2^64."""
        with self._lock:
            first = self._counter
            if blocks < 0 or first + blocks > _LAST:
                raise ConfigError(f"a stream has 2^64 blocks: {first} are used, {blocks} more were requested")
            self._counter = first + blocks
            return self._key, first

    def words(self, n: int, device: Any = None) -> Tensor:
        """Return (n,) int32 words of the keystream, with the bits of uint32, on the CPU or a CUDA device."""
        return keystream(self, n, torch.device(device or "cpu"))

    def uniform(self, n: int) -> Tensor:
        """Return (n,) float64 in [0, 1) on the CPU: multiples of 2^-53, all equally likely."""
        wide = self.words(2 * n).numpy().view(np.uint64)
        return torch.from_numpy((wide >> np.uint64(11)) * 2.0**-53)

    def _renew(self, key: bytes | None = None) -> None:
        self._key = key_words(os.urandom(_KEY_BYTES) if key is None else key)
        self._counter = 0
        self.states: dict[int, Tensor] = {}  # keys and counters on CUDA devices, by index (`take`)

    def __reduce__(self) -> tuple[Any, tuple[()]]:  # of copies, too
        return SecureStream, ()

    def __repr__(self) -> str:
        return "SecureStream()"


def _after_fork() -> None:
    for generator in list(renewed_after_fork):
        generator._renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# --- kernels for CPUs -------------------------------------------------------------------------------------------------
Load = Callable[[], Value]


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors that kernels use; whether the processor permutes the words of two registers (AVX-512)."""

    lanes: int
    wide_permutes: bool = False


@functools.cache
def host_vectors() -> Vectors:
    """Return the vectors of this processor."""
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512dq"):
        return Vectors(16, wide_permutes=True)
    return Vectors(8 if features.get("avx2") else 4)


def lanes() -> int:
    """Return the lanes of this processor's vectors."""
    return host_vectors().lanes


class KeystreamBlocks:
    """Vectors of blocks of a keystream, of the function's `ptr %state` and `ptr %first`, or of keys by `rekey`."""

    def __init__(self, code: FunctionBuilder, vectors: Vectors, *, keyed: bool = True) -> None:
        self.code, self.vectors, self.lanes = code, vectors, vectors.lanes
        self._word = vector("i32", self.lanes)
        self._align = 4 * self.lanes
        self._start = code.stack(f"[12 x {self._word}]", align=self._align)
        self._words = code.stack(f"[{BLOCK_WORDS} x {self._word}]", align=self._align)
        if keyed:
            self.rekey("%state")
        self.first = code.load("i64", "%first", align=8) if keyed else constant("i64", 0)

    def rekey(self, state: Operand) -> None:
        """Append loads of key and nonce from a pointer to them; the counter is `generate`'s."""
        for j, word in [*((j, j) for j in range(8)), (10, 8), (11, 9)]:
            self._set(j, self.code.broadcast(self.code.load("i32", state, word, align=4), self.lanes))

    def _set(self, j: int, value: Value) -> None:
        self.code.store(self._word, value, self._start, j, align=self._align)

    def counters(self, offset: Value, strides: Value) -> Value:
        """Append the vector of counters first + offset + strides."""
        return self.code.op("add", self.code.broadcast(self.code.op("add", self.first, offset), self.lanes), strides)

    def generate(self, counters: Value) -> None:
        """Append a call that computes the blocks of a vector of counters."""
        code = self.code
        self._set(8, code.convert("trunc", counters, "i32"))
        self._set(9, code.convert("trunc", code.op("lshr", counters, 32), "i32"))
        code.call("void", "chacha20_block", self._words, self._start)

    def word(self, j: int | Value) -> Value:
        """Append a load of word j of each block."""
        return self.code.load(self._word, self._words, j, align=self._align)

    def program(self) -> str:
        """Return the text of the function and of the function that computes blocks."""
        return program([self.code, self._block_function()])

    def _block_function(self) -> FunctionBuilder:
        """Return the function void @chacha20_block(ptr words, ptr start): 16 vectors from 12."""
        code = FunctionBuilder("chacha20_block", ["ptr noalias %words", "ptr noalias %start"])
        kind, align = self._word, self._align
        start = [constant(kind, value) for value in CONSTANTS]
        start += [code.load(kind, "%start", j, align=align) for j in range(12)]
        state = [code.variable(kind, value) for value in start]
        with code.loop(0, DOUBLE_ROUNDS):
            words = [word.get() for word in state]
            for quarters in (QUARTERS[:4], QUARTERS[4:]):
                for step, bits in enumerate((16, 12, 8, 7)):
                    by = constant(kind, bits)
                    for a, b, c, d in quarters:  # interleaved, since they do not depend on each other
                        into, left, right = (d, a, b) if step % 2 == 0 else (b, c, d)
                        words[left] = code.op("add", words[left], words[right])
                        mixed = code.op("xor", words[into], words[left])
                        words[into] = code.intrinsic(kind, f"llvm.fshl.v{self.lanes}i32", mixed, mixed, by)
            for variable, word in zip(state, words, strict=True):
                variable.set(word)
        for j, (variable, value) in enumerate(zip(state, start, strict=True)):
            code.store(kind, code.op("add", variable.get(), value), "%words", j, align=align)
        code.ret()
        return code


def update_elements(
    code: FunctionBuilder, element: str, count: int, pointer: str, at: Value, compute: Callable[[Load], Value]
) -> None:
    """Append a store of `count` elements from index `at`, below %n, which `compute` makes of a load of old ones."""
    kind, size = vector(element, count), 8 if element == "i64" else 4
    address = code.at(element, pointer, at)
    for whole in code.branches(code.compare("sle", code.op("add", at, count), "%n")):
        if whole:
            code.store(kind, compute(partial(code.load, kind, address, align=size)), address, align=size)
        else:
            left = code.broadcast(code.op("sub", "%n", at), count)
            inside = code.compare("slt", lane_constants("i64", range(count)), left)
            code.masked_store(compute(partial(code.masked_load, kind, address, inside, size)), address, inside, size)


@dataclass(frozen=True, slots=True)
class VectorKernel(ABC):
    """A Builder (runtime/compilation/kernel.py) of programs with vectors of one length, by default the CPU's."""

    vectors: Vectors | None = field(default=None, kw_only=True)
    written_out = True  # everything is vectors already: no optimization but inlining helps
    sources = ("privacy/random", "privacy/dp/noise")  # of the package, on which the text depends

    @property
    def key(self) -> str:
        """See builder_key."""
        return builder_key(replace(self, vectors=self.vectors or host_vectors()), *self.sources)

    @abstractmethod
    def build(self, target: str) -> str:
        """Return LLVM IR."""

    def function(self, name: str, *arguments: str) -> FunctionBuilder:
        """Return the kernel's function, with the range of its indices as first arguments."""
        return FunctionBuilder(name, ["i64 %begin", "i64 %end", *arguments], linkage="", attributes="nounwind")


@dataclass(frozen=True, slots=True)
class KeystreamKernel(VectorKernel):
    """A Builder of chacha20_keystream(begin, end, state, first, words, n, one), an index being lanes() blocks."""

    @property
    def least_share(self) -> int:
        """The fewest indices that are worth another thread: 16 KiB of keystream, about 10 us."""
        return 256 // lanes()

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        inputs = ("ptr noalias readonly %state", "ptr noalias readonly %first")
        code = self.function("chacha20_keystream", *inputs, "ptr noalias %words", "i64 %n", "i32 %one")
        blocks = KeystreamBlocks(code, self.vectors or host_vectors())
        count = blocks.lanes
        with code.loop("%begin", "%end") as index:
            blocks.generate(blocks.counters(code.op("mul", index, count), lane_constants("i64", range(count))))
            to = code.at("i32", "%words", code.op("mul", index, BLOCK_WORDS * count))
            for j in range(BLOCK_WORDS):
                word = blocks.word(j)
                for lane in range(count):
                    code.store("i32", code.lane(word, lane), to, BLOCK_WORDS * lane + j, align=4)
        code.ret()
        return blocks.program()


# --- keystreams on devices --------------------------------------------------------------------------------------------
KEYSTREAM_BLOCK = 256  # Most threads per block of chacha20_keystream; each generates a block of keystream


@functools.cache
def chacha20_text() -> str:
    """Return chacha20.h, to be included after portable.h."""
    return (Path(__file__).parent / "chacha20.h").read_text(encoding="utf-8")


@functools.cache
def keystream_source() -> KernelSource:
    """Return chacha20_keystream(state, first, words, n, one): n words; state is key (8 words) and nonce (2)."""
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
    """Counters of a keystream reserved for the caller, from `first`, (1,) int64; state, (12,) int32, is a secret."""

    state: Tensor
    first: Tensor

    def __repr__(self) -> str:
        return "Taken()"


def take(stream: SecureStream, blocks: int, device: torch.device) -> Taken:
    """Reserve counters of `blocks` blocks for kernels on a device; ConfigError if a capture needs a new key on CUDA."""
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
