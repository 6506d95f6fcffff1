"""Discrete Gaussian and Laplace noise on the CPU as LLVM IR; discrete.py defines it bit for bit.

    gaussian_steps  out <- Z                                     out i64
    gaussian_add    x <- (round(x / grid) + Z) * grid * scale    x float32
    laplace_steps   out <- Z                                     out i64

Layout: an index of a Gaussian launch is one unit in each of lanes() lanes; with each draw they write adjacent elements.
        An index of a Laplace launch is one draw in each lane.
Time:   of Laplace noise does not depend on the drawn values: each digit is compared and the pool is read in any case.
        Nor does that of Gaussian noise where the processor permutes words of two registers (AVX-512): a lookup reads
        all 512 entries, by 16 permutations and 15 selections. Elsewhere a table of 2 KiB is read at secret addresses,
        from the first-level cache.
Bound:  arithmetic. Gaussian: 4.3 words of keystream for a draw of four terms, 61 instructions for a vector of each, and
        about 45 for a base sample with its lookup. Laplace: four blocks of keystream for a draw of up to 29 digits, and
        about 20 instructions for a digit.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.dp.noise.discrete import (
    CELL_FIELD,
    CELLS,
    COMPARED,
    COMPARED_REST,
    LAPLACE_POOL,
    POOL,
    TRIGGER,
    draws_of_unit,
)
from accelerant.privacy.random.llvm_kernels import KeystreamBlocks, Load, VectorKernel, host_vectors, update_elements
from accelerant.privacy.random.stream import BLOCK_WORDS
from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    Operand,
    Value,
    Variable,
    constant,
    lane_constants,
    suffix,
    vector,
)

_TOGETHER = 2
"""Lookups that share loads of the table. With 5, registers run out: a draw of five terms takes 1.4 times as long."""

_MOST = 2.0**46
_INTEGER = 2.0**23
_POOL_WORDS = 2 * LAPLACE_POOL
"""Words of a Laplace draw's first block that become the pool, numbers of 64 bits."""

_INPUTS = ("ptr noalias readonly %state", "ptr noalias readonly %first")


def _lookups(blocks: KeystreamBlocks, tables: list[int], words: list[Value]) -> list[Value]:
    """Return the entry of each word's cell, in table tables[i] (0: the first, 1 to 3: the remainder's) for word i."""
    code = blocks.code
    shifted = [code.op("lshr", word, 7) for word in words]
    if not blocks.vectors.wide_permutes:
        every = constant(vector("i1", blocks.lanes), True)
        gather = f"llvm.masked.gather.{suffix(words[0].type)}.v{blocks.lanes}p0"
        found = []
        for table, cell in zip(tables, shifted, strict=True):
            index = code.op("add", code.convert("zext", code.op("and", cell, CELLS - 1), "i64"), table * CELLS)
            pointers = vector("ptr", blocks.lanes)
            addresses = code(f"getelementptr inbounds i32, ptr %tables, {index.type} {index}", pointers)
            rest = Value("poison", cell.type)
            found.append(code.intrinsic(cell.type, gather, addresses, constant("i32", 4), every, rest))
        return found
    kind = words[0].type
    bits = [[code.op("and", word, 1 << bit) for bit in (12, 13, 14, 15)] for word in words]
    chosen = [[code.compare("ne", bit, 0) for bit in of_word] for of_word in bits]

    def tree(level: int, first: int) -> list[Value]:
        """Return the entries among 32 << level cells from `first` on."""
        if level == 0:
            found = []
            for table, cell in zip(tables, shifted, strict=True):
                base = (table * CELLS + first) // 16
                low, high = (code.load(kind, "%tables", base + i, align=4) for i in (0, 1))
                found.append(code.intrinsic(kind, "llvm.x86.avx512.vpermi2var.d.512", low, cell, high))
            return found
        below, above = tree(level - 1, first), tree(level - 1, first + (16 << level))
        return [code.select(chosen[i][level - 1], above[i], below[i]) for i in range(len(words))]

    return tree(4, 0)


def _pool(blocks: KeystreamBlocks) -> tuple[Value, Value]:
    """Return five magnitudes of 9 bits, from bit 7 on of two words, computed from a block of keystream."""
    code = blocks.code
    low = high = constant(vector("i32", blocks.lanes), 0)
    for slot in range(POOL):
        words = [blocks.word(3 * slot + i) for i in range(3)]
        entries = _lookups(blocks, [1, 2, 3], [words[0]] * 3)
        compared, threshold = (code.op("and", x, COMPARED_REST) for x in (words[0], entries[0]))
        below = code.compare("ult", words[2], entries[2])
        for x, y in ((words[1], entries[1]), (compared, threshold)):
            less, equal = code.compare("ult", x, y), code.compare("eq", x, y)
            below = code.op("or", less, code.op("and", equal, below))
        magnitude = code.op("and", code.select(below, words[0], entries[0]), CELL_FIELD)
        shift = 9 * slot
        if shift < 32:
            low = code.op("or", low, code.op("shl", magnitude, shift))
        if shift + 16 > 32:
            high = code.op("or", high, code.op("shl" if shift > 32 else "lshr", magnitude, abs(32 - shift)))
    return low, high


def _sample(
    code: FunctionBuilder, word: Value, entry: Value, pool: tuple[Value, Value], trigger: int
) -> tuple[Value, tuple[Value, Value]]:
    """Return a base sample, and the pool after it."""
    low, high = pool
    compared, threshold = code.op("and", word, COMPARED), code.op("and", entry, COMPARED)
    chosen = code.select(code.compare("ult", compared, threshold), word, entry)
    triggered = code.compare("eq", code.op("and", word, trigger), trigger)
    chosen = code.select(triggered, low, chosen)
    next_low = code.intrinsic(word.type, f"llvm.fshr.{suffix(word.type)}", high, low, constant(word.type, 9))
    pool = code.select(triggered, next_low, low), code.select(triggered, code.op("lshr", high, 9), high)
    magnitude = code.op("lshr", code.op("and", chosen, CELL_FIELD), 7)
    sign = code.op("ashr", word, 31)
    return code.op("sub", code.op("xor", magnitude, sign), sign), pool


@dataclass(frozen=True, slots=True)
class GaussianKernel(VectorKernel):
    """A Builder of gaussian_steps or gaussian_add; arguments as kernel.c has them.

    Attributes:
        trigger: a word with all of these bits set takes its sample from the pool.
    """

    terms: int
    adds: bool
    trigger: int = TRIGGER
    least_share = 2  # the fewest indices that are worth another thread: about 10 us

    @property
    def entry(self) -> str:
        """The function's name."""
        return "gaussian_add" if self.adds else "gaussian_steps"

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        scalars = ["i64 %n", *(f"i32 %k{i}" for i in range(1, 5)), "i32 %one"]
        scalars += ["float %inverse", "float %outward"] if self.adds else []
        code = self.function(self.entry, *_INPUTS, "ptr noalias readonly %tables", "ptr noalias %x", *scalars)
        blocks = KeystreamBlocks(code, self.vectors or host_vectors())
        count, words = blocks.lanes, vector("i32", blocks.lanes)
        parts = 32 // count
        with code.loop("%begin", "%end") as index:
            strides = lane_constants("i64", range(0, BLOCK_WORDS * count, BLOCK_WORDS))
            counters = blocks.counters(code.op("mul", index, BLOCK_WORDS * count), strides)
            group = code.op("mul", code.op("udiv", index, parts), 32 * draws_of_unit(self.terms))
            at = code.variable("i64", code.op("add", group, code.op("mul", code.op("urem", index, parts), count)))
            blocks.generate(counters)
            pool = [code.variable(words, word) for word in _pool(blocks)]
            with code.loop(1, 16) as number:
                blocks.generate(code.op("add", counters, code.broadcast(number, count)))
                first = at.get()
                after = self._draws(blocks, first, (pool[0].get(), pool[1].get()))
                for variable, word in zip(pool, after, strict=True):
                    variable.set(word)
                at.set(code.op("add", first, 32 * (BLOCK_WORDS // self.terms)))
        code.ret()
        return blocks.program()

    def _draws(self, blocks: KeystreamBlocks, first: Value, pool: tuple[Value, Value]) -> tuple[Value, Value]:
        """Append the draws of a block of keystream, for elements from `first` on; return the pool after them."""
        code = blocks.code
        factors = [code.broadcast(f"%k{i}", blocks.lanes) for i in range(1, self.terms)]
        used = BLOCK_WORDS // self.terms * self.terms
        words: list[Value] = []
        entries: list[Value] = []
        for draw in range(BLOCK_WORDS // self.terms):
            z: Value | None = None
            for i in range(self.terms):
                position = self.terms * draw + i
                if position == len(words):
                    words += [blocks.word(position + j) for j in range(min(_TOGETHER, used - position))]
                    entries += _lookups(blocks, [0] * (len(words) - position), words[position:])
                sample, pool = _sample(code, words[position], entries[position], pool, self.trigger)
                z = sample if z is None else code.op("add", z, code.op("mul", sample, factors[i - 1]))
            assert z is not None  # for the type checker: a draw has at least one term
            self._store(code, code.op("add", first, 32 * draw), z, blocks.lanes)
        return pool

    def _store(self, code: FunctionBuilder, at: Value, z: Value, count: int) -> None:
        wide = code.convert("sext", z, "i64")

        def add(load: Load) -> Value:
            y = code.convert("sitofp", code.op("add", _steps(code, load(), count), wide), "float")
            return code.op("fmul", y, code.broadcast("%outward", count))

        if self.adds:
            update_elements(code, "float", count, "%x", at, add)
        else:
            update_elements(code, "i64", count, "%x", at, lambda load: wide)


def _steps(code: FunctionBuilder, x: Value, count: int) -> Value:
    """Append sampler.h's to_steps."""
    y = code.op("fmul", x, code.broadcast("%inverse", count))
    negative = code.compare("olt", y, 0.0)
    size = code.select(negative, code.fneg(y), y)
    rounded = code.op("fsub", code.op("fadd", size, _INTEGER), _INTEGER)
    whole = code.select(code.compare("olt", size, _INTEGER), rounded, size)
    whole = code.select(code.compare("olt", whole, _MOST), whole, _MOST)
    whole = code.select(code.compare("oeq", y, y), whole, 0.0)
    signed = code.select(negative, code.fneg(whole), whole)
    return code.convert("fptosi", signed, "i64")


@dataclass(frozen=True, slots=True)
class LaplaceKernel(VectorKernel):
    """A Builder of laplace_steps; arguments as kernel.c has them.

    The memory of `out` has space for whole vectors.
    """

    least_share = 16  # the fewest indices that are worth another thread: about 10 us

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        memory = (*_INPUTS, "ptr noalias readonly %thresholds", "ptr noalias %out")
        code = self.function("laplace_steps", *memory, "i64 %n", "i32 %digits", "i32 %blocks", "i32 %one")
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
            pool = [code.variable(numbers, 0) for _ in range(LAPLACE_POOL)]
            total = code.variable(numbers, 0)
            with code.loop(0, per_draw) as block:
                blocks.generate(code.op("add", counters, code.broadcast(block, count)))
                begins = code.compare("eq", block, 0)
                halves = [code.convert("zext", blocks.word(i), "i64") for i in range(_POOL_WORDS)]
                for i, number in enumerate(pool):
                    fresh = code.op("or", code.op("shl", halves[2 * i], 32), halves[2 * i + 1])
                    number.set(code.select(begins, fresh, number.get()))
                begin = code.select(begins, _POOL_WORDS, word.get())
                end = code.smin(code.op("add", code.op("mul", block, BLOCK_WORDS), BLOCK_WORDS), last)
                with code.loop(begin, end) as position:
                    total.set(code.op("add", total.get(), _digit(blocks, position, digits, pool)))
                word.set(end)
            code.store(numbers, total.get(), code.at("i64", "%out", draws), align=8)
        code.ret()
        return blocks.program()


def _digit(blocks: KeystreamBlocks, position: Value, digits: Value, pool: list[Variable]) -> Value:
    """Append the comparison of a word with its digit's threshold; return the digit's term of the draw.

    The pool decides ties.
    """
    code, count = blocks.code, blocks.lanes
    word = blocks.word(code.op("and", position, BLOCK_WORDS - 1))
    number = code.op("sub", position, _POOL_WORDS)
    second = code.compare("uge", number, digits)
    digit = code.select(second, code.op("sub", number, digits), number)
    middle = code.op("add", digits, digit)
    places = (digit, middle, code.op("add", digits, middle))
    upper, *rest = (code.load("i32", "%thresholds", place, align=4) for place in places)
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
