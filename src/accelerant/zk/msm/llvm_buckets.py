"""Buckets of a multi-scalar multiplication in LLVM IR: which point goes where, and in what order they are added.

A task is a range of points and of windows (digits). Digits are signed, d in [-2^(c-1), 2^(c-1)), and point i goes to
the bucket |d|, as -P where d < 0. Each window of a task has a set of buckets, or all share one. Digits come from the
scalar plus h = sum 2^(c-1) 2^(c j): the digits of that, less 2^(c-1) each, are those of the scalar, and no carry is
left to find (msm_recode in llvm_kernels.py has added it).

    sort         entries by bucket: count, add up, distribute. An entry is the index of its point, bit 31 the sign.
    first_round  pairs of each bucket: entry k with entry k + h, h half of the bucket's size rounded up. Sums go to
                 slots, h for a bucket; the one left over of an odd number is copied to its slot.
    next_round   the same among a bucket's slots, in place: slot k += slot k + h. What is left over stays where it is.

Each round halves every bucket, however they are filled, until all have one slot; its additions are independent, so that
they share inversions. Slot 0 is infinity, and is what an empty bucket has.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from accelerant.runtime.compilation.llvm import FunctionBuilder, Value, Variable, constant

__all__ = ["SIGN", "Task", "Work", "first_round", "next_round", "sort"]

SIGN = 1 << 31
"""Set in an entry whose point is to be subtracted."""

_WORD = "i32"


@dataclass(frozen=True, slots=True)
class Work:
    """A worker's memory: pointers to arrays of i32, but the last.

    Attributes:
        ends: one for each bucket, set by set, 0 too: where its entries end; that of bucket 0 is where those of 1 begin.
        slots: the same: a bucket's first slot.
        left: the same: how many slots of a bucket are not added up yet.
        single, place: entries left over in the first round, one for a bucket at most, and their slots.
        entries: by bucket, of the whole task.
        a, b, z: pairs: sources (entries or slots) and the slot of their sum.
        points: affine points, the slots.
    """

    ends: str
    slots: str
    left: str
    single: str
    place: str
    entries: str
    a: str
    b: str
    z: str
    points: str

    @classmethod
    def names(cls) -> list[str]:
        """Of the attributes."""
        return [field.name for field in fields(cls)]


@dataclass(frozen=True, slots=True)
class Task:
    """Values, i64 all, that a task is made of.

    Attributes:
        windows: the first digit and the one after the last.
        points: the first point and the one after the last.
        stride: what the digit's number is multiplied by and added to a point's index: multiples of a point by the
            digits' weights may stand one after another.
        n: points in all, the length of a column of words.
        bits: of a digit.
        buckets: 2^(c - 1).
        sets: of buckets.
        step: from a window's set to the next one's in Work's arrays: buckets + 1, or 0 where all share one.
    """

    windows: tuple[str, str]
    points: tuple[str, str]
    stride: str
    n: str
    bits: str
    buckets: str
    sets: str
    step: str

    def all_buckets(self, code: FunctionBuilder) -> str:
        """How many there are in all sets, with each one's bucket 0."""
        return code.i64("mul", self.sets, code.i64("add", self.buckets, 1))


def _load(code: FunctionBuilder, pointer: str, index: str | int) -> Value:
    return code.convert("zext", code.load(_WORD, pointer, index), "i64")


def _store(code: FunctionBuilder, value: str, pointer: str, index: str | int) -> None:
    code.store(_WORD, code.convert("trunc", Value(value, "i64"), "i32"), pointer, index)


def sort(code: FunctionBuilder, task: Task, work: Work, columns: str) -> None:
    """Fill work.ends and work.entries; bucket 0, of digits that add nothing, comes first in each set."""
    after = task.all_buckets(code)
    size = code.i64("mul", after, 4)
    zero, volatile = constant("i8", 0), constant("i1", False)
    code.intrinsic("void", "llvm.memset.p0.i64", work.ends, zero, size, volatile)
    for distribute in (False, True):
        with code.loop(*task.windows) as window:
            digit = _Digits(code, task, columns, window)
            base = code.i64("mul", window, task.stride)
            first = code.i64("mul", code.i64("sub", window, task.windows[0]), task.step)
            with code.loop(*task.points) as i:
                magnitude, negative = digit.of(i)
                bucket = code.i64("add", first, magnitude)
                place = _load(code, work.ends, bucket)
                _store(code, code.i64("add", place, 1), work.ends, bucket)
                if distribute:
                    sign = code.i64("and", negative, SIGN)
                    entry = code.i64("or", code.i64("add", base, i), sign)
                    _store(code, entry, work.entries, place)
        if not distribute:
            total = code.variable("i64", "0")
            with code.loop(0, after) as bucket:
                count = _load(code, work.ends, bucket)
                _store(code, total.get(), work.ends, bucket)
                total.set(code.i64("add", total.get(), count))


class _Digits:
    """A window's digits, from the two columns of words that they may lie in."""

    def __init__(self, code: FunctionBuilder, task: Task, columns: str, window: str) -> None:
        self._code = code
        at = code.i64("mul", window, task.bits)
        low = code.i64("mul", code.i64("lshr", at, 6), task.n)
        self._low = code.at("i64", columns, low)
        self._high = code.at("i64", self._low, task.n)
        self._shift = code.i64("and", at, 63)
        self._mask = code.i64("sub", code.i64("shl", 1, task.bits), 1)
        self._half = task.buckets

    def of(self, i: str) -> tuple[str, str]:
        """The magnitude of point i's digit, and all ones where the digit is negative, else 0."""
        code = self._code
        low, high = code.load("i64", self._low, i), code.load("i64", self._high, i)
        word = code.intrinsic("i64", "llvm.fshr.i64", high, low, self._shift)
        digit = code.i64("sub", code.i64("and", word, self._mask), self._half)
        negative = code.i64("ashr", digit, 63)
        return code.i64("sub", code.i64("xor", digit, negative), negative), negative


def first_round(code: FunctionBuilder, task: Task, work: Work) -> tuple[str, str]:
    """Fill work.slots, work.left, the pairs and what is left over; how many pairs, and how many of the latter."""
    slot, pairs, singles = (code.variable("i64", first) for first in ("1", "0", "0"))
    begin = code.variable("i64", "0")
    with code.loop(0, task.sets) as number:
        zero = code.i64("mul", number, code.i64("add", task.buckets, 1))
        _store(code, "0", work.left, zero)
        begin.set(_load(code, work.ends, zero))
        first = code.i64("add", zero, 1)
        with code.loop(first, code.i64("add", first, task.buckets)) as bucket:
            end, start = _load(code, work.ends, bucket), begin.get()
            _first_pairs(code, work, bucket, (start, end), (slot, pairs, singles))
            begin.set(end)
    return pairs.get(), singles.get()


def _first_pairs(
    code: FunctionBuilder,
    work: Work,
    bucket: str,
    entries: tuple[str, str],
    counts: tuple[Variable, Variable, Variable],
) -> None:
    """Those of a bucket, and how far slots, pairs and singles are filled after it."""
    (start, end), (slot, pairs, singles) = entries, counts
    size, first, at = code.i64("sub", end, start), slot.get(), pairs.get()
    half, count = code.i64("lshr", code.i64("add", size, 1), 1), code.i64("lshr", size, 1)
    _store(code, code.select(code.compare("eq", size, 0), 0, first), work.slots, bucket)
    _store(code, half, work.left, bucket)
    with code.loop(0, count) as k:
        here = code.i64("add", start, k)
        pair = code.i64("add", at, k)
        _store(code, _load(code, work.entries, here), work.a, pair)
        _store(code, _load(code, work.entries, code.i64("add", here, half)), work.b, pair)
        _store(code, code.i64("add", first, k), work.z, pair)
    with code.when(code.compare("ne", half, count)):
        alone = singles.get()
        _store(code, _load(code, work.entries, code.i64("add", start, count)), work.single, alone)
        _store(code, code.i64("add", first, count), work.place, alone)
        singles.set(code.i64("add", alone, 1))
    pairs.set(code.i64("add", at, count))
    slot.set(code.i64("add", first, half))


def next_round(code: FunctionBuilder, task: Task, work: Work) -> str:
    """Fill the pairs and lower work.left; their number, 0 where each bucket has one slot or none."""
    pairs = code.variable("i64", "0")
    with code.loop(1, task.all_buckets(code)) as bucket:
        size = _load(code, work.left, bucket)
        with code.when(code.compare("ugt", size, 1)):
            half = code.i64("lshr", code.i64("add", size, 1), 1)
            _store(code, half, work.left, bucket)
            first, at = _load(code, work.slots, bucket), pairs.get()
            count = code.i64("sub", size, half)
            with code.loop(0, count) as k:
                here, pair = code.i64("add", first, k), code.i64("add", at, k)
                _store(code, here, work.a, pair)
                _store(code, code.i64("add", here, half), work.b, pair)
                _store(code, here, work.z, pair)
            pairs.set(code.i64("add", at, count))
    return pairs.get()
