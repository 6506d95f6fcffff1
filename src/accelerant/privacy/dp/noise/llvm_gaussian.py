"""Discrete Gaussian noise on the CPU as LLVM IR; reference.py defines it bit for bit.

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

from accelerant.privacy.dp.noise.llvm_lines import Lines
from accelerant.privacy.dp.noise.reference import POOL, draws_of_unit
from accelerant.privacy.dp.noise.table import CELL_FIELD, COMPARED, COMPARED_REST, TRIGGER
from accelerant.privacy.random.llvm_kernels import (
    LOOP_END,
    VectorKernel,
    block_function,
    has_wide_permutes,
    lanes,
    next_block,
    prologue,
    splat,
    spread,
)

__all__ = ["GaussianKernel"]

_ENTRIES = 512
_TOGETHER = 2
"""Lookups side by side, which share the loads of the table. With 5 a draw of five terms takes 1.4 times as long, for
want of registers."""

_MOST = 2.0**46
_INTEGER = 2.0**23


def _lookups(t: Lines, tables: list[int], words: list[str]) -> list[str]:
    """Entries of the words' cells, of table tables[i] (0: the first, 1 to 3: the remainder's) for word i."""
    shifted = [t.operation("lshr", word, t.word(7)) for word in words]
    if not has_wide_permutes():
        return [
            _gather(t, table, t.operation("and", at, t.word(511))) for table, at in zip(tables, shifted, strict=True)
        ]
    V = t.vector("i32")
    bits = []
    for word in words:
        kept = [t.operation("and", word, t.word(1 << bit)) for bit in (12, 13, 14, 15)]
        bits.append([t.new(f"icmp ne {V} {each}, zeroinitializer") for each in kept])

    def tree(level: int, first: int) -> list[str]:
        """The entries among 32 << level cells from `first` on."""
        if level == 0:
            found = []
            for table, at in zip(tables, shifted, strict=True):
                base = (table * _ENTRIES + first) // 16
                low, high = (t.load_word("%tables", base + i, align=4) for i in (0, 1))
                found.append(t.new(f"call {V} @llvm.x86.avx512.vpermi2var.d.512({V} {low}, {V} {at}, {V} {high})"))
            return found
        below, above = tree(level - 1, first), tree(level - 1, first + (16 << level))
        return [t.select(bits[i][level - 1], above[i], below[i]) for i in range(len(words))]

    return tree(4, 0)


def _gather(t: Lines, table: int, at: str) -> str:
    """By addresses."""
    V = t.vector("i32")
    wide = t.new(f"zext {V} {at} to {t.vector('i64')}")
    places = t.new(
        f"getelementptr inbounds i32, ptr %tables, {t.vector('i64')} "
        f"{t.operation('add', wide, splat('i64', table * _ENTRIES, t.count), 'i64')}"
    )
    every = splat("i1", "true", t.count)
    return t.new(
        f"call {V} @llvm.masked.gather.v{t.count}i32.v{t.count}p0({t.vector('ptr')} {places}, i32 4, "
        f"{t.vector('i1')} {every}, {V} poison)"
    )


def _pool(t: Lines) -> tuple[str, str]:
    """Five magnitudes of 9 bits, from bit 7 on, of 64 in two words; from the block of keystream in %word."""
    V = t.vector("i32")
    low, high = "zeroinitializer", "zeroinitializer"
    for slot in range(POOL):
        words = [t.load_word("%word", 3 * slot + i) for i in range(3)]
        entries = _lookups(t, [1, 2, 3], [words[0]] * 3)
        mine, threshold = (t.operation("and", x, t.word(COMPARED_REST)) for x in (words[0], entries[0]))
        pairs = [(mine, threshold), (words[1], entries[1]), (words[2], entries[2])]
        below = t.new(f"icmp ult {V} {pairs[2][0]}, {pairs[2][1]}")
        for x, y in (pairs[1], pairs[0]):
            less, equal = t.new(f"icmp ult {V} {x}, {y}"), t.new(f"icmp eq {V} {x}, {y}")
            both = t.operation("and", equal, below, "i1")
            below = t.operation("or", less, both, "i1")
        found = t.operation("and", t.select(below, words[0], entries[0]), t.word(CELL_FIELD))
        shift = 9 * slot
        if shift < 32:
            low = t.operation("or", low, t.operation("shl", found, t.word(shift)))
        if shift + 16 > 32:
            moved = t.operation("shl" if shift > 32 else "lshr", found, t.word(abs(32 - shift)))
            high = t.operation("or", high, moved)
    return low, high


def _sample(t: Lines, word: str, entry: str, pool: tuple[str, str]) -> tuple[str, tuple[str, str]]:
    """A base sample, and the pool afterwards."""
    V, (low, high) = t.vector("i32"), pool
    compared = t.operation("and", word, t.word(COMPARED))
    threshold = t.operation("and", entry, t.word(COMPARED))
    chosen = t.select(t.new(f"icmp ult {V} {compared}, {threshold}"), word, entry)
    ones = t.operation("and", word, t.word(TRIGGER))
    trigger = t.new(f"icmp eq {V} {ones}, {t.word(TRIGGER)}")
    chosen = t.select(trigger, low, chosen)
    next_low = t.new(f"call {V} @llvm.fshr.v{t.count}i32({V} {high}, {V} {low}, {V} {t.word(9)})")
    next_high = t.operation("lshr", high, t.word(9))
    pool = t.select(trigger, next_low, low), t.select(trigger, next_high, high)
    magnitude = t.operation("lshr", t.operation("and", chosen, t.word(CELL_FIELD)), t.word(7))
    sign = t.operation("ashr", word, t.word(31))
    return t.operation("sub", t.operation("xor", magnitude, sign), sign), pool


@dataclass(frozen=True, slots=True)
class GaussianKernel(VectorKernel):
    """A Builder of gaussian_steps or gaussian_add; arguments as kernel.c has them.

    Attributes:
        terms: base samples of a draw.
        adds: gaussian_add.
    """

    terms: int
    adds: bool

    @property
    def entry(self) -> str:
        """The function's name."""
        return "gaussian_add" if self.adds else "gaussian_steps"

    @property
    def least_share(self) -> int:
        """Indices from which on another thread is worth while: about 10 us."""
        return 2

    def build(self, target: str) -> str:
        """LLVM IR."""
        count = lanes()
        pool = Lines(count, prefix="p")
        low, high = _pool(pool)
        body = Lines(count)
        after = self._draws(body)
        V = f"<{count} x i32>"
        declared = f"declare {V} @llvm.fshr.v{count}i32({V}, {V}, {V})\n"
        if has_wide_permutes():
            declared += f"declare {V} @llvm.x86.avx512.vpermi2var.d.512({V}, {V}, {V})\n"
        else:
            declared += (
                f"declare {V} @llvm.masked.gather.v{count}i32.v{count}p0(<{count} x ptr>, i32, <{count} x i1>, {V})\n"
            )
        element, suffix = ("float", "f32") if self.adds else ("i64", "i64")
        E, B = f"<{count} x {element}>", f"<{count} x i1>"
        declared += f"declare {E} @llvm.masked.load.v{count}{suffix}.p0(ptr, i32, {B}, {E})\n"
        declared += f"declare void @llvm.masked.store.v{count}{suffix}.p0({E}, ptr, i32, {B})\n"
        return _PROGRAM.format(
            entry=self.entry,
            more=", float %inverse, float %outward" if self.adds else "",
            V=V,
            Q=f"<{count} x i64>",
            count=count,
            numbers=f"<{', '.join(f'i64 {16 * i}' for i in range(count))}>",
            prologue=prologue(count),
            froms=spread(count, "from"),
            steps=spread(count, "number"),
            first_block=next_block(count, "%counters", "_0"),
            block=next_block(count, "%counter", "_1"),
            pool=pool.text(),
            low=low,
            high=high,
            body=body.text(),
            after_low=after[0],
            after_high=after[1],
            parts=32 // count,
            group_elements=32 * draws_of_unit(self.terms),
            stride=32 * (16 // self.terms),
            end=LOOP_END,
            function=block_function(count),
            declared=declared,
        )

    def _draws(self, t: Lines) -> tuple[str, str]:
        """The draws of a block of keystream in %word, from element %at on; the pool afterwards."""
        pool = "%low", "%high"
        factors = [t.broadcast("i32", f"%k{i}") for i in range(1, self.terms)]
        used = 16 // self.terms * self.terms
        words: list[str] = []
        entries: list[str] = []
        for draw in range(16 // self.terms):
            z = ""
            for i in range(self.terms):
                at = self.terms * draw + i
                if at == len(words):
                    words += [t.load_word("%word", at + j) for j in range(min(_TOGETHER, used - at))]
                    entries += _lookups(t, [0] * (len(words) - at), words[at:])
                sample, pool = _sample(t, words[at], entries[at], pool)
                z = t.operation("add", z, t.operation("mul", sample, factors[i - 1])) if i else sample
            self._store(t, draw, z)
        return pool

    def _store(self, t: Lines, draw: int, z: str) -> None:
        """Whole vectors as they are, the last ones with a mask."""
        at = t.new(f"add i64 %at, {32 * draw}")
        end = t.new(f"add i64 {at}, {t.count}")
        inside = t.new(f"icmp sle i64 {end}, %n")
        element = "float" if self.adds else "i64"
        place = t.new(f"getelementptr inbounds {element}, ptr %x, i64 {at}")
        Z = t.new(f"sext {t.vector('i32')} {z} to {t.vector('i64')}")
        t.add(f"br i1 {inside}, label %whole{draw}, label %rest{draw}")
        for label, masked in (("whole", False), ("rest", True)):
            t.add(f"{label}{draw}:")
            self._access(t, place, at, Z, masked)
            t.add(f"br label %stored{draw}")
        t.add(f"stored{draw}:")

    def _access(self, t: Lines, place: str, at: str, Z: str, masked: bool) -> None:
        element, suffix, size = ("float", "f32", 4) if self.adds else ("i64", "i64", 8)
        E, B, which = t.vector(element), t.vector("i1"), ""
        if masked:
            left = t.broadcast("i64", t.new(f"sub i64 %n, {at}"))
            lane = f"<{', '.join(f'i64 {i}' for i in range(t.count))}>"
            which = t.new(f"icmp slt {t.vector('i64')} {lane}, {left}")
        y = Z
        if self.adds:
            where = f"ptr {place}, i32 {size}, {B} {which}, {E} zeroinitializer"
            x = t.new(
                f"call {E} @llvm.masked.load.v{t.count}{suffix}.p0({where})"
                if masked
                else f"load {E}, ptr {place}, align {size}"
            )
            total = t.operation("add", _steps(t, x), Z, "i64")
            y = t.new(f"sitofp {t.vector('i64')} {total} to {E}")
            y = t.operation("fmul", y, t.broadcast("float", "%outward"), "float")
        t.add(
            f"call void @llvm.masked.store.v{t.count}{suffix}.p0({E} {y}, ptr {place}, i32 {size}, {B} {which})"
            if masked
            else f"store {E} {y}, ptr {place}, align {size}"
        )


def _steps(t: Lines, x: str) -> str:
    """sampler.h's to_steps."""
    F, number = t.vector("float"), t.number

    def compare(how: str, a: str, b: str) -> str:
        return t.new(f"fcmp {how} {F} {a}, {b}")

    y = t.operation("fmul", x, t.broadcast("float", "%inverse"), "float")
    negative = compare("olt", y, "zeroinitializer")
    size = t.select(negative, t.new(f"fneg {F} {y}"), y, "float")
    moved = t.operation("fsub", t.operation("fadd", size, number(_INTEGER), "float"), number(_INTEGER), "float")
    whole = t.select(compare("olt", size, number(_INTEGER)), moved, size, "float")
    whole = t.select(compare("olt", whole, number(_MOST)), whole, number(_MOST), "float")
    whole = t.select(compare("oeq", y, y), whole, "zeroinitializer", "float")
    signed = t.select(negative, t.new(f"fneg {F} {whole}"), whole, "float")
    return t.new(f"fptosi {F} {signed} to {t.vector('i64')}")


_PROGRAM = """
define void @{entry}(i64 %begin, i64 %end, ptr noalias readonly %state, ptr noalias readonly %first,
                     ptr noalias readonly %tables, ptr noalias %x, i64 %n, i32 %k1, i32 %k2, i32 %k3, i32 %k4,
                     i32 %one{more}) {{
entry:
{prologue}
  %any = icmp slt i64 %begin, %end
  br i1 %any, label %loop, label %done
loop:
  %index = phi i64 [ %begin, %entry ], [ %next, %made ]
  %units = mul i64 %index, {count}
  %blocks = mul i64 %units, 16
  %from = add i64 %base, %blocks
{froms}
  %counters = add {Q} %froms, {numbers}
  %group = udiv i64 %index, {parts}
  %part = urem i64 %index, {parts}
  %offset = mul i64 %part, {count}
  %elements = mul i64 %group, {group_elements}
  %place = add i64 %elements, %offset
{first_block}
{pool}
  br label %block
block:
  %number = phi i64 [ 1, %loop ], [ %number_next, %block_end ]
  %at = phi i64 [ %place, %loop ], [ %at_next, %block_end ]
  %low = phi {V} [ {low}, %loop ], [ {after_low}, %block_end ]
  %high = phi {V} [ {high}, %loop ], [ {after_high}, %block_end ]
{steps}
  %counter = add {Q} %counters, %numbers
{block}
{body}
  br label %block_end
block_end:
  %at_next = add i64 %at, {stride}
  %number_next = add i64 %number, 1
  %go_on = icmp ult i64 %number_next, 16
  br i1 %go_on, label %block, label %made
made:
{end}
{function}
{declared}
"""
