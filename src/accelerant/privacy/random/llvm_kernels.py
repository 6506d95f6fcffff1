"""ChaCha20 on the CPU as LLVM IR: each lane of a vector computes one block.

    words[16 i + j] = word j of the block of counter first + i

Layout: state word j of LANES blocks is one vector, so that a quarter round needs no shuffles: it takes 12 instructions
        with rotations (AVX-512), 16 without. 16 lanes where there are 32 vectors of 512 bits; 8 with AVX2, 4 elsewhere.
Bound:  arithmetic: 61 vector instructions for a word of every lane.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from accelerant.privacy.random.stream import BLOCK_WORDS, CONSTANTS, DOUBLE_ROUNDS, QUARTERS
from accelerant.runtime.compilation.kernel import builder_key
from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    Operand,
    Value,
    constant,
    lane_constants,
    program,
    vector,
)

Load = Callable[[], Value]


@dataclass(frozen=True, slots=True)
class Vectors:
    """The vectors that kernels use.

    Attributes:
        wide_permutes: whether the processor permutes the words of two registers (AVX-512).
    """

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
    """Vectors of blocks of a keystream, for a function with the arguments `ptr %state` and `ptr %first`.

    A function of several keys has neither (`keyed` is False): it calls `rekey` before `generate`, and counts from 0.
    """

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
    """Append a store of `count` elements, i64 or float, from index `at` on; those beyond %n are masked out.

    Args:
        pointer: to element 0.
        compute: appends the new elements; its argument appends a load of the old ones.
    """
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
    """A Builder (see runtime/compilation/kernel.py) whose program uses vectors of a fixed length.

    Attributes:
        vectors: this processor's if None.
    """

    vectors: Vectors | None = field(default=None, kw_only=True)
    written_out = True  # everything is vectors already: no optimization but inlining helps

    @property
    def key(self) -> str:
        """See builder_key."""
        return builder_key(replace(self, vectors=self.vectors or host_vectors()), "privacy/random", "privacy/dp/noise")

    @abstractmethod
    def build(self, target: str) -> str:
        """Return LLVM IR."""

    def function(self, name: str, *arguments: str) -> FunctionBuilder:
        """Return the kernel's function, with the range of its indices as first arguments."""
        return FunctionBuilder(name, ["i64 %begin", "i64 %end", *arguments], linkage="", attributes="nounwind")


@dataclass(frozen=True, slots=True)
class KeystreamKernel(VectorKernel):
    """A Builder of chacha20_keystream(begin, end, state, first, words, n, one).

    An index is lanes() blocks; words has space for whole blocks of all of them.
    """

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
