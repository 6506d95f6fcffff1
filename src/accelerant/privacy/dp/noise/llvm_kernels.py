"""Noise on the CPU as LLVM IR: the discrete distributions of discrete.py bit for bit, and the variates of philox.cuh.

    gaussian_steps  out <- Z                                     out i64
    gaussian_add    x <- (round(x / grid) + Z) * grid * scale    x float32
    laplace_steps   out <- Z                                     out i64
    philox_add      x <- (x + width * z) * outward               z from N(0, 1), or of density exp(-|z|) / 2

Layout: an index of a Gaussian launch is one unit in each of lanes() lanes; with each draw they write adjacent elements.
        An index of a Laplace launch is one draw in each lane; one of a Philox launch is a counter in each lane, for
        four adjacent elements each.
Time does not depend on the drawn values. Only without AVX-512 does Gaussian noise read a table of 2 KiB at secret
addresses, from the first-level cache.

Philox 4x32-10 and Box-Muller are for research, not for a privacy claim: ln u = e ln 2 + ln(1 + f), f in
[sqrt(1/2) - 1, sqrt(2) - 1], by f - f^2 / 2 + f^3 P(f); sin(2 pi v) = v S(v^2) of |v| <= 1/4; P of degree 8 and S of
degree 4, fitted for the least largest error: 2e-10 and 4e-9 before rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

from accelerant.privacy.dp.noise import discrete
from accelerant.privacy.random.stream import (
    BLOCK_WORDS,
    KeystreamBlocks,
    Load,
    VectorKernel,
    host_vectors,
    lanes,
    update_elements,
)
from accelerant.runtime.compilation.llvm import (
    FunctionBuilder,
    Operand,
    Value,
    Variable,
    constant,
    lane_constants,
    philox,
    program,
    suffix,
    vector,
)

# --- Philox -----------------------------------------------------------------------------------------------------------


_LOGARITHM = (
    0.33333298563957214, -0.25000008940696716, 0.20002824068069458, -0.16668526828289032, 0.14207574725151062,
    -0.12389998883008957, 0.11952442675828934, -0.11787271499633789, 0.06747034937143326,
)  # fmt: skip
_SINE = (6.283185005187988, -41.34165573120117, 81.60102081298828, -76.55010986328125, 39.53886795043945)
_LN2 = 0.6931471824645996
_SQRT_HALF_BITS = 0x3F3504F3
_STEP = 2.0**-32


def _float(code: FunctionBuilder, name: str, x: Value, *others: Operand) -> Value:
    operands = [other if isinstance(other, Value) else constant(x.type, float(other)) for other in others]
    return code.intrinsic(x.type, f"llvm.{name}.{suffix(x.type)}", x, *operands)


def _polynomial(code: FunctionBuilder, coefficients: tuple[float, ...], x: Value) -> Value:
    """Append Horner's rule."""
    y = constant(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y = _float(code, "fmuladd", y, x, coefficient)
    return y


def _logarithm(code: FunctionBuilder, word: Value) -> Value:
    """Return approximately -ln((word + 1) / 2^32)."""
    u = _float(code, "fmuladd", code.convert("uitofp", word, "float"), _STEP, _STEP)
    bits = code.bitcast(u, word.type)
    exponent = code.op("ashr", code.op("sub", bits, _SQRT_HALF_BITS), 23)
    mantissa = code.op("sub", bits, code.op("shl", exponent, 23))
    f = code.op("fsub", code.bitcast(mantissa, u.type), 1.0)
    square = code.op("fmul", f, f)
    cubic = code.op("fmul", code.op("fmul", square, f), _polynomial(code, _LOGARITHM, f))
    small = code.op("fadd", f, _float(code, "fmuladd", square, -0.5, cubic))
    whole = code.convert("sitofp", exponent, "float")
    return code.fneg(_float(code, "fmuladd", whole, _LN2, small))


def _sine(code: FunctionBuilder, v: Value) -> Value:
    """Return sin(2 pi v) of |v| <= 1/4."""
    return code.op("fmul", v, _polynomial(code, _SINE, code.op("fmul", v, v)))


def _normal_pair(code: FunctionBuilder, first: Value, second: Value) -> list[Value]:
    """Append Box-Muller: the radius from one word, the angle 2 pi (r - 1/2) from the upper 23 bits of the other."""
    radius = _float(code, "sqrt", code.op("fmul", _logarithm(code, first), 2.0))
    upper = code.op("or", code.op("lshr", second, 9), 0x3F800000)
    turn = code.op("fsub", code.bitcast(upper, radius.type), 1.5)
    from_quarter = code.op("fsub", 0.25, _float(code, "fabs", turn))
    cosine = _sine(code, from_quarter)
    folded = code.op("fsub", 0.25, _float(code, "fabs", from_quarter))
    sine = _sine(code, _float(code, "copysign", folded, turn))
    return [code.op("fmul", radius, wave) for wave in (cosine, sine)]


def _laplace(code: FunctionBuilder, word: Value) -> Value:
    """Return a variate whose size has 31 bits of the word, and whose sign is the uppermost."""
    size = _logarithm(code, code.op("shl", word, 1))
    sign = code.op("and", word, 0x80000000)
    return code.bitcast(code.op("xor", code.bitcast(size, word.type), sign), size.type)


def _interleaved(code: FunctionBuilder, z: list[Value], count: int) -> Value:
    """Return four vectors as one, whose elements 4 i to 4 i + 3 are those of lane i."""
    first, second = (code.shuffle(z[i], z[i + 1], range(2 * count)) for i in (0, 2))
    joined = code.shuffle(first, second, range(4 * count))
    order = [(p % 4 // 2) * 2 * count + p // 4 + (p % 2) * count for p in range(4 * count)]
    return code.shuffle(joined, None, order)


@dataclass(frozen=True, slots=True)
class PhiloxKernel(VectorKernel):
    """A Builder of philox_add(begin, end, x, keys, first, stream, n, width, outward); normal or Laplace variates."""

    laplace: bool = False

    @property
    def least_share(self) -> int:
        """The fewest indices that are worth another thread: about 10 us."""
        return 8192 // (4 * lanes())

    def build(self, target: str) -> str:
        """Return LLVM IR."""
        count = (self.vectors or host_vectors()).lanes
        elements = 4 * count
        scalars = ("i64 %first", "i64 %stream", "i64 %n", "float %width", "float %outward")
        code = self.function("philox_add", "ptr noalias %x", "ptr noalias readonly %keys", *scalars)
        stream = code.broadcast("%stream", count)
        width, outward = (code.broadcast(scalar, elements) for scalar in ("%width", "%outward"))

        def key(i: int, word: int) -> Value:
            loaded = code.load("i32", "%keys", 2 * i + word, align=4)
            return code.broadcast(code.convert("zext", loaded, "i64"), count)

        with code.loop("%begin", "%end") as index:
            first = code.op("add", "%first", code.op("mul", index, count))
            counters = code.op("add", code.broadcast(first, count), lane_constants("i64", range(count)))
            counter = [counters, code.op("lshr", counters, 32), stream, constant(counters.type, 0)]
            words = [code.convert("trunc", word, "i32") for word in philox(code, counter, key)]
            if self.laplace:
                z = [_laplace(code, word) for word in words]
            else:
                z = [*_normal_pair(code, *words[:2]), *_normal_pair(code, *words[2:])]
            noise = _interleaved(code, z, count)

            def add(load: Load, noise: Value = noise) -> Value:
                return code.op("fmul", _float(code, "fmuladd", noise, width, load()), outward)

            update_elements(code, "float", elements, "%x", code.op("mul", index, elements), add)
        code.ret()
        return program([code])


# --- discrete noise ---------------------------------------------------------------------------------------------------


_TOGETHER = 2
"""Lookups that share loads of the table. With 5, registers run out: a draw of five terms takes 1.4 times as long."""

_MOST = 2.0**46
_INTEGER = 2.0**23
_POOL_WORDS = 2 * discrete.LAPLACE_POOL
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
            index = code.op(
                "add", code.convert("zext", code.op("and", cell, discrete.CELLS - 1), "i64"), table * discrete.CELLS
            )
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
                base = (table * discrete.CELLS + first) // 16
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
    for slot in range(discrete.POOL):
        words = [blocks.word(3 * slot + i) for i in range(3)]
        entries = _lookups(blocks, [1, 2, 3], [words[0]] * 3)
        compared, threshold = (code.op("and", x, discrete.COMPARED_REST) for x in (words[0], entries[0]))
        below = code.compare("ult", words[2], entries[2])
        for x, y in ((words[1], entries[1]), (compared, threshold)):
            less, equal = code.compare("ult", x, y), code.compare("eq", x, y)
            below = code.op("or", less, code.op("and", equal, below))
        magnitude = code.op("and", code.select(below, words[0], entries[0]), discrete.CELL_FIELD)
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
    compared, threshold = code.op("and", word, discrete.COMPARED), code.op("and", entry, discrete.COMPARED)
    chosen = code.select(code.compare("ult", compared, threshold), word, entry)
    triggered = code.compare("eq", code.op("and", word, trigger), trigger)
    chosen = code.select(triggered, low, chosen)
    next_low = code.intrinsic(word.type, f"llvm.fshr.{suffix(word.type)}", high, low, constant(word.type, 9))
    pool = code.select(triggered, next_low, low), code.select(triggered, code.op("lshr", high, 9), high)
    magnitude = code.op("lshr", code.op("and", chosen, discrete.CELL_FIELD), 7)
    sign = code.op("ashr", word, 31)
    return code.op("sub", code.op("xor", magnitude, sign), sign), pool


@dataclass(frozen=True, slots=True)
class GaussianKernel(VectorKernel):
    """A Builder of gaussian_steps or gaussian_add; a word with all bits of `trigger` takes its sample from the pool."""

    terms: int
    adds: bool
    trigger: int = discrete.TRIGGER
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
            group = code.op("mul", code.op("udiv", index, parts), 32 * discrete.draws_of_unit(self.terms))
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
            pool = [code.variable(numbers, 0) for _ in range(discrete.LAPLACE_POOL)]
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
    """Append the comparison of a word with its digit's threshold, ties by the pool; return the digit's term."""
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
