"""Discrete Gaussian noise on the CPU as LLVM IR; discrete.py defines it bit for bit.

    gaussian_steps  out <- Z                                     out i64
    gaussian_add    x <- (round(x / grid) + Z) * grid * scale    x float32

Layout: an index of the launch is lanes() units side by side, which touch as many neighbouring elements with each draw.
Time:   does not depend on what is drawn where the processor permutes words of two registers (AVX-512): a lookup takes
        all 512 entries, 16 permutations and 15 selections of them. Elsewhere a table of 2 KiB is read at secret
        addresses, from the first-level cache.
Bound:  arithmetic: 4.3 words of keystream a draw of four terms, 61 instructions for a vector of each, and about 45 for
        a base sample with its lookup.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.dp.noise.discrete import CELL_FIELD, COMPARED, COMPARED_REST, POOL, TRIGGER, draws_of_unit
from accelerant.privacy.random.chacha20 import BLOCK_WORDS
from accelerant.privacy.random.llvm_kernels import KeystreamBlocks, VectorKernel, host_vectors
from accelerant.runtime.compilation.llvm import FunctionBuilder, Value, constant, lane_constants, vector

__all__ = ["GaussianKernel"]

_ENTRIES = 512
_TOGETHER = 2
"""Lookups side by side, which share the loads of the table. With 5 a draw of five terms takes 1.4 times as long, for
want of registers."""

_MOST = 2.0**46
_INTEGER = 2.0**23


def _lookups(blocks: KeystreamBlocks, tables: list[int], words: list[Value]) -> list[Value]:
    """Return the entries of the words' cells, of table tables[i] (0: the first, 1 to 3: the remainder's) for word i."""
    code = blocks.code
    shifted = [code.op("lshr", word, 7) for word in words]
    if not blocks.vectors.wide_permutes:
        return [
            _gather(code, table, code.op("and", cell, _ENTRIES - 1))
            for table, cell in zip(tables, shifted, strict=True)
        ]
    kind = words[0].type
    bits = [[code.op("and", word, 1 << bit) for bit in (12, 13, 14, 15)] for word in words]
    chosen = [[code.compare("ne", bit, 0) for bit in of_word] for of_word in bits]

    def tree(level: int, first: int) -> list[Value]:
        """Return the entries among 32 << level cells from `first` on."""
        if level == 0:
            found = []
            for table, cell in zip(tables, shifted, strict=True):
                base = (table * _ENTRIES + first) // 16
                low, high = (code.load(kind, "%tables", base + i, align=4) for i in (0, 1))
                found.append(code.intrinsic(kind, "llvm.x86.avx512.vpermi2var.d.512", low, cell, high))
            return found
        below, above = tree(level - 1, first), tree(level - 1, first + (16 << level))
        return [code.select(chosen[i][level - 1], above[i], below[i]) for i in range(len(words))]

    return tree(4, 0)


def _gather(code: FunctionBuilder, table: int, cells: Value) -> Value:
    """Append reads of a table's cells by address."""
    count = int(cells.type[1:].split(" ")[0])
    cell = code.op("add", code.convert("zext", cells, "i64"), table * _ENTRIES)
    pointers = vector("ptr", count)
    addresses = code(f"getelementptr inbounds i32, ptr %tables, {cell.type} {cell}", pointers)
    every = constant(vector("i1", count), True)
    name = f"llvm.masked.gather.v{count}i32.v{count}p0"
    return code.intrinsic(cells.type, name, addresses, constant("i32", 4), every, Value("poison", cells.type))


def _pool(blocks: KeystreamBlocks) -> tuple[Value, Value]:
    """Return five magnitudes of 9 bits, from bit 7 on, of 64 in two words, of a block of keystream."""
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
    """Return a base sample, and the pool afterwards."""
    low, high = pool
    compared, threshold = code.op("and", word, COMPARED), code.op("and", entry, COMPARED)
    chosen = code.select(code.compare("ult", compared, threshold), word, entry)
    triggered = code.compare("eq", code.op("and", word, trigger), trigger)
    chosen = code.select(triggered, low, chosen)
    count = f"v{word.type[1:].split(' ')[0]}i32"
    next_low = code.intrinsic(word.type, f"llvm.fshr.{count}", high, low, constant(word.type, 9))
    next_high = code.op("lshr", high, 9)
    pool = code.select(triggered, next_low, low), code.select(triggered, next_high, high)
    magnitude = code.op("lshr", code.op("and", chosen, CELL_FIELD), 7)
    sign = code.op("ashr", word, 31)
    return code.op("sub", code.op("xor", magnitude, sign), sign), pool


@dataclass(frozen=True, slots=True)
class GaussianKernel(VectorKernel):
    """A Builder of gaussian_steps or gaussian_add; arguments as kernel.c has them.

    Attributes:
        terms: base samples of a draw.
        adds: gaussian_add.
        trigger: the bits of a word that, all set, take the sample from the pool.
    """

    terms: int
    adds: bool
    trigger: int = TRIGGER

    @property
    def entry(self) -> str:
        """The function's name."""
        return "gaussian_add" if self.adds else "gaussian_steps"

    @property
    def least_share(self) -> int:
        """Indices from which on another thread is worth while: about 10 us."""
        return 2

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        arguments = ["i64 %begin", "i64 %end", "ptr noalias readonly %state", "ptr noalias readonly %first"]
        arguments += ["ptr noalias readonly %tables", "ptr noalias %x", "i64 %n", *(f"i32 %k{i}" for i in range(1, 5))]
        arguments += ["i32 %one", *(("float %inverse", "float %outward") if self.adds else ())]
        code = FunctionBuilder(self.entry, arguments, linkage="", attributes="nounwind")
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
        """Append the draws of a block of keystream, for elements from `first` on; return the pool afterwards."""
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
            assert z is not None
            self._store(code, code.op("add", first, 32 * draw), z, blocks.lanes)
        return pool

    def _store(self, code: FunctionBuilder, at: Value, z: Value, count: int) -> None:
        """Append stores of whole vectors as they are, of the last ones with a mask."""
        element, size = ("float", 4) if self.adds else ("i64", 8)
        kind = vector(element, count)
        address = code.at(element, "%x", at)
        wide = code.convert("sext", z, "i64")
        for whole in code.branches(code.compare("sle", code.op("add", at, count), "%n")):
            if not whole:
                left = code.broadcast(code.op("sub", "%n", at), count)
                inside = code.compare("slt", lane_constants("i64", range(count)), left)
            y = wide
            if self.adds:
                x = code.load(kind, address, align=size) if whole else code.masked_load(kind, address, inside, size)
                y = code.convert("sitofp", code.op("add", _steps(code, x, count), wide), "float")
                y = code.op("fmul", y, code.broadcast("%outward", count))
            if whole:
                code.store(kind, y, address, align=size)
            else:
                code.masked_store(y, address, inside, size)


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
