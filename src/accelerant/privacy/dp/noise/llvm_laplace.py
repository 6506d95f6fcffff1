"""Discrete Laplace noise on the CPU as LLVM IR; discrete.py defines it bit for bit.

Layout: an index of the launch is lanes() draws side by side.
Time:   does not depend on what is drawn: each digit is compared, and the pool is read, whatever comes out.
Bound:  arithmetic: four blocks of keystream a draw of up to 29 digits, and about 20 instructions a digit.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.random.chacha20 import BLOCK_WORDS
from accelerant.privacy.random.llvm_kernels import KeystreamBlocks, VectorKernel, host_vectors
from accelerant.runtime.compilation.llvm import FunctionBuilder, Operand, Value, Variable, lane_constants, vector

__all__ = ["LaplaceKernel"]

_POOL_WORDS = 6
"""Words of the first block that become the pool, three numbers of 64 bits."""


@dataclass(frozen=True, slots=True)
class LaplaceKernel(VectorKernel):
    """A Builder of laplace_steps; arguments as kernel.c has them.

    The memory of `out` has room for whole vectors.
    """

    @property
    def least_share(self) -> int:
        """Indices from which on another thread is worth while: about 10 us."""
        return 16

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        arguments = ["i64 %begin", "i64 %end", "ptr noalias readonly %state", "ptr noalias readonly %first"]
        arguments += ["ptr noalias readonly %thresholds", "ptr noalias %out", "i64 %n"]
        arguments += ["i32 %digits", "i32 %blocks", "i32 %one"]
        code = FunctionBuilder("laplace_steps", arguments, linkage="", attributes="nounwind")
        blocks = KeystreamBlocks(code, self.vectors or host_vectors())
        count = blocks.lanes
        numbers = vector("i64", count)
        per_draw, digits = (code.convert("zext", argument, "i64") for argument in ("%blocks", "%digits"))
        last = code.op("add", code.op("shl", digits, 1), _POOL_WORDS)
        strides = code.op("mul", code.broadcast(per_draw, count), lane_constants("i64", range(count)))
        with code.loop("%begin", "%end") as index:
            draws = code.op("mul", index, count)
            counters = blocks.counters(code.op("mul", draws, per_draw), strides)
            word = code.variable("i64", 0)
            pool = [code.variable(numbers, 0) for _ in range(3)]
            total = code.variable(numbers, 0)
            with code.loop(0, per_draw) as number:
                blocks.generate(code.op("add", counters, code.broadcast(number, count)))
                begins = code.compare("eq", number, 0)
                for variable, fresh in zip(pool, _fresh_pool(blocks), strict=True):
                    variable.set(code.select(begins, fresh, variable.get()))
                begin = code.select(begins, _POOL_WORDS, word.get())
                end = code.smin(code.op("add", code.op("mul", number, BLOCK_WORDS), BLOCK_WORDS), last)
                with code.loop(begin, end) as i:
                    total.set(code.op("add", total.get(), _digit(blocks, i, digits, pool)))
                word.set(end)
            code.store(numbers, total.get(), code.at("i64", "%out", draws), align=8)
        code.ret()
        return blocks.program()


def _fresh_pool(blocks: KeystreamBlocks) -> list[Value]:
    """Return the pool's three numbers, each of two words of a draw's first block."""
    code = blocks.code
    wide = [code.convert("zext", blocks.word(i), "i64") for i in range(_POOL_WORDS)]
    return [code.op("or", code.op("shl", wide[i], 32), wide[i + 1]) for i in range(0, _POOL_WORDS, 2)]


def _digit(blocks: KeystreamBlocks, i: Value, digits: Value, pool: list[Variable]) -> Value:
    """Append the comparison of word i with its digit's threshold, ties decided by the pool; return its share."""
    code, count = blocks.code, blocks.lanes
    word = blocks.word(code.op("and", i, BLOCK_WORDS - 1))
    number = code.op("sub", i, _POOL_WORDS)
    second = code.compare("uge", number, digits)
    digit = code.select(second, code.op("sub", number, digits), number)
    middle = code.op("add", digits, digit)
    upper, *rest = (
        code.load("i32", "%thresholds", at, align=4) for at in (digit, middle, code.op("add", digits, middle))
    )
    high, low = (code.convert("zext", part, "i64") for part in rest)
    threshold = code.broadcast(upper, count)
    remainder = code.broadcast(code.op("or", code.op("shl", high, 32), low), count)
    equal = code.compare("eq", word, threshold)
    values = [variable.get() for variable in pool]
    tie = code.op("and", equal, code.compare("ult", values[0], remainder))
    below = code.op("or", code.compare("ult", word, threshold), tie)
    rest_of_pool: list[Operand] = [*values[1:], 0]
    for variable, value, following in zip(pool, values, rest_of_pool, strict=True):
        variable.set(code.select(equal, following, value))
    weight = code.i64("shl", 1, digit)
    signed = code.select(second, code.i64("sub", 0, weight), weight)
    return code.select(below, code.broadcast(signed, count), 0)
