"""How a sum of multiples is cut up on a device: sort.c, affine.c, accumulate.c and fold.c say what is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.errors import ConfigError, OutOfMemory
from accelerant.zk.msm.program import AFFINE_BLOCK, COUNTERS, LONGEST, TILE, reduce_block

__all__ = ["MOST_INDICES", "DevicePlan", "coordinate_words", "device_plan"]

_PRODUCTS_PER_ENTRY = 10
_PRODUCTS_PER_BUCKET = 30
"""What a window is chosen by: one addition of an affine point, and two and a share of others of fold.c. On an H200 an
entry takes 0.17 ns, a bucket 0.5 to 0.7."""

_CROWDED_BITS = (6, 10)
"""A highest digit of fewer bits puts all points into few buckets, which are counted one after the other and added up in
parts: as if there were so many digits more. On an H200, 2^18 points of BN254, windows of 14, 15 bits: 1.64, 1.42 ms."""

_LARGEST_WINDOW = 22
_FEW_BUCKETS, _THREADS = 1 << 15, 1 << 16
"""Threads that a large device holds are some 2^16; with fewer buckets than half, segments are made as short as gives it
that many."""

_SHORTEST = 8
"""Points of a segment, at least: adding up two segments costs an addition of 1.4 times as many products."""

_SMALLEST_PIECE = 1024

ROUNDS: dict[int, tuple[tuple[int, int], ...]] = {12: ((3 << 23, 2),)}
"""32-bit limbs of a coordinate -> (entries of a piece, rounds of affine.c), the most entries first: from so many on, so
many rounds; none for other limbs. Scratch grows with them: 2^22 points of BLS12-381 take 8.4 GB for 1.0. Measured on
an H200, ms without rounds and with 1, 2, 3 or 4, "kept" over points whose multiples are there:

    BN254 G1             2^20    4.12   1: 4.46    2: 4.58
                         2^22   13.69   2: 14.41   3: 14.87
                         2^23   26.40   3: 29.3
                   kept  2^20    3.70   2: 4.21
                         2^22   12.77   2: 13.64
    BLS12-381 G1         2^20    8.30   1: 8.11    2: 8.22
                         2^21   15.20   2: 14.41
                         2^22   29.04   2: 26.29   3: 26.63   4: 27.9
                   kept  2^20    7.09   2: 7.54
                         2^21   13.53   2: 12.62
                         2^22   24.67   2: 23.24   3: 23.50   4: 24.5
                         2^23   47.70   2: 44.81

Those with rounds that are not "kept" had another sort, since dropped, with which those at 2^22, 2^23 and 2^22 without
rounds took 13.50, 27.74 and 28.77. Why BN254 loses is in affine.py, whose rounds are for curves over Fq."""

_ROUNDS_FILL = 13
"""Units of a bucket, on the average: with fewer, rounds pad too much. Above, 2^20 points of BLS12-381 have buckets of
26 points ("kept") and of 32, and two rounds lose 6% and gain 1%; 2^21 have those of 52 and 64, and gain 7% and 5%."""

_ROUNDS_SHARE = (1.0, 0.97, 0.9)
"""Of an entry's products, what it costs in time with no round, one, and more: 19.8 and 17.9 ms with none and two, over
2^22 points of BLS12-381 whose multiples are there."""

_MOST_ROUNDS = 5
_AFFINE_ENTRIES = 64
"""Entries of a thread of affine.c: enough that its share of an inverse is small, and that threads fill a device."""

MOST_INDICES = (1 << 31) - 1
"""Of points, or of a piece's digits: the kernels keep them in 31 bits and a sign."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """How a sum is cut up; every field may be tuned.

    Attributes:
        points: of one piece; pieces are summed one after the other.
        window: bits of a digit, c.
        windows: digits of a scalar.
        shared: one set of buckets for all windows, since the points' multiples are at hand.
        rounds: of affine.c, before the segments are added up.
        segment: the most units that one thread adds up; a unit is 2^rounds points of a bucket.
        per_thread: log2 of the buckets that a thread of fold.c takes.
        written_out, resident: of program.accumulate_source.
        fold_written_out: of program.fold_source.
    """

    points: int
    window: int
    windows: int
    shared: bool
    segment: int
    rounds: int = 0
    per_thread: int = 1
    written_out: bool | None = None
    resident: int | None = None
    fold_written_out: bool = False

    @property
    def buckets(self) -> int:
        """Of one set."""
        return 1 << self.window - 1

    @property
    def sets(self) -> int:
        """Of buckets."""
        return 1 if self.shared else self.windows

    @property
    def keys(self) -> int:
        """Buckets of all sets."""
        return self.sets * self.buckets

    @property
    def entries(self) -> int:
        """Digits of a piece."""
        return self.windows * self.points

    @property
    def units(self) -> int:
        """The most there can be, of 2^rounds entries of a bucket."""
        return (self.entries + min(self.keys, self.entries) * ((1 << self.rounds) - 1)) >> self.rounds

    @property
    def places(self) -> int:
        """Entries, and what pads them to units."""
        return self.units << self.rounds

    @property
    def affine_units(self) -> int:
        """Units of a thread of affine.c."""
        return max(1, _AFFINE_ENTRIES >> self.rounds)

    @property
    def affine_threads(self) -> int:
        """Of affine.c; 0 without rounds."""
        return -(-self.units // (self.affine_units * AFFINE_BLOCK)) * AFFINE_BLOCK if self.rounds else 0

    @property
    def affine_pairs(self) -> tuple[int, int]:
        """Pairs of the first and of the second round, or as many as the third and fourth have room in; 0 of none."""
        first = self.affine_threads * self.affine_units << self.rounds >> 1
        return first, first // 2 if self.rounds > 1 else 0

    @property
    def heavy(self) -> int:
        """The most buckets that can have more than one segment."""
        return self.units // self.segment

    @property
    def segments(self) -> int:
        """The most there can be."""
        return min(self.keys, self.entries) + self.heavy

    @property
    def sums(self) -> int:
        """Points in XYZZ coordinates: one a bucket, and the partial sums of heavy buckets."""
        return self.keys + 2 * self.heavy

    @property
    def tiles(self) -> int:
        """Of keys."""
        return -(-self.keys // TILE)

    def blocks(self, threads: int) -> int:
        """Blocks a set of msm_reduce's first launch."""
        return -(-self.buckets // (threads << self.per_thread))

    def size_bytes(self, curve: Curve[Any]) -> int:
        """Memory of the device, besides points and scalars."""
        return _size_bytes(self, 8 * coordinate_words(curve), reduce_block(curve))

    def explain(self, curve: Curve[Any]) -> str:
        """In words."""
        of = "one set of" if self.shared else f"{self.sets} sets of"
        rounds = f"{self.rounds} rounds of affine additions in pairs, " * bool(self.rounds)
        return (
            f"pieces of {self.points:,} points, {self.windows} windows of {self.window} bits, signed, "
            f"{of} {self.buckets:,} buckets, {rounds}segments of at most {self.segment << self.rounds} points, "
            f"{self.size_bytes(curve) / 1e6:,.1f} MB of scratch"
        )


def device_plan(
    curve: Curve[Any],
    n: int,
    free_bytes: int,
    *,
    shared: bool = False,
    window: int | None = None,
    segment: int | None = None,
    rounds: int | None = None,
    per_thread: int | None = None,
    piece: int | None = None,
    written_out: bool | None = None,
    resident: int | None = None,
    fold_written_out: bool = False,
) -> DevicePlan:
    """The window that takes the fewest products, then as many points at once as have room.

    Args:
        curve: of the points.
        n: points, at least 1.
        free_bytes: memory of the device that may be used.
        shared, per_thread, written_out, resident, fold_written_out: see DevicePlan.
        window: bits of a digit, 2 to 22.
        segment: the most units that a thread adds up, 1 to 1024.
        rounds: of affine.c, 0 to 5, over Fq2 0; if not given as ROUNDS has it, or none where they have no room.
        piece: points at once, at most.

    Raises:
        ConfigError: window, segment or rounds is out of range.
        OutOfMemory: not even a piece of 1024 points has room.
    """
    if window is not None and not 2 <= window <= _LARGEST_WINDOW:
        raise ConfigError(f"window must be 2 to {_LARGEST_WINDOW} bits, got {window}")
    if segment is not None and not 1 <= segment <= LONGEST:
        raise ConfigError(f"segment must be 1 to {LONGEST} units, got {segment}")
    most_rounds = _MOST_ROUNDS if curve.coordinates.degree == 1 else 0
    if rounds is not None and not 0 <= rounds <= most_rounds:
        raise ConfigError(f"rounds must be 0 to {most_rounds} on {curve.name}, got {rounds}")
    size, sort = min(n, piece or n), (curve.order.bit_length(), 2 * coordinate_words(curve))
    while True:
        cut = _cut(sort, size, shared, window, segment, rounds)
        if rounds is None and cut.rounds and cut.size_bytes(curve) > free_bytes:
            cut = _cut(sort, size, shared, window, segment, 0)
        found = replace(
            cut,
            per_thread=cut.per_thread if per_thread is None else per_thread,
            written_out=written_out,
            resident=resident,
            fold_written_out=fold_written_out,
        )
        needed = found.size_bytes(curve)
        if needed <= free_bytes and found.entries <= MOST_INDICES:
            return found
        if size <= _SMALLEST_PIECE:
            raise OutOfMemory(
                f"a sum of multiples in pieces of {size} points takes {needed:,} bytes of scratch, and {free_bytes:,} "
                f"are free; a smaller window than {found.window} bits takes less"
            )
        size = -(-size // 2)


@functools.lru_cache(maxsize=256)
def _size_bytes(p: DevicePlan, coordinate: int, threads: int) -> int:
    lists = 3 * (p.segments + max(1, p.heavy))
    numbers = 2 * p.entries + p.places + p.keys + COUNTERS + p.tiles + lists
    coordinates = 4 * p.sums + p.sets * (8 * p.blocks(threads) + 3)
    coordinates += 3 * sum(p.affine_pairs) + p.affine_threads
    return 4 * numbers + coordinate * coordinates


@functools.lru_cache(maxsize=256)
def _cut(
    sort: tuple[int, int], n: int, shared: bool, window: int | None, segment: int | None, rounds: int | None
) -> DevicePlan:
    """Of curves of one sort: the bits of the order, and the 32-bit limbs of a coordinate."""
    bits = sort[0] + 1  # a carry of signed digits may go beyond the highest

    def cut(c: int) -> DevicePlan:
        windows = -(-bits // c)
        found = DevicePlan(n, c, windows, shared, segment or LONGEST)
        per_thread = max(1, (found.keys // _THREADS).bit_length())
        found = replace(found, per_thread=per_thread, rounds=_rounds(found, sort[1]) if rounds is None else rounds)
        if segment:
            return found
        # Few buckets are split, for more threads; else only those of far more points than usual, and those that one
        # thread would still add up when the others are done.
        most = found.units // _THREADS
        if found.keys >= _FEW_BUCKETS:
            most = min(4 * found.units // found.keys, most // 4)
        return replace(found, segment=min(LONGEST, 1 << max(_SHORTEST, most - 1).bit_length()))

    def products(found: DevicePlan) -> float:
        highest = bits - (found.windows - 1) * found.window  # bits of the last digit
        crowded = sum(highest < few for few in _CROWDED_BITS) * n
        per_entry = _PRODUCTS_PER_ENTRY * _ROUNDS_SHARE[min(found.rounds, 2)]
        return per_entry * (found.entries + crowded) + _PRODUCTS_PER_BUCKET * found.keys

    return min((cut(c) for c in ([window] if window else range(2, _LARGEST_WINDOW + 1))), key=products)


def _rounds(cut: DevicePlan, limbs: int) -> int:
    """By ROUNDS, but no more than fill."""
    usual = next((rounds for least, rounds in ROUNDS.get(limbs, ()) if cut.entries >= least), 0)
    return min(usual, max(0, (cut.entries // (_ROUNDS_FILL * cut.keys)).bit_length() - 1))


def coordinate_words(curve: Curve[Any]) -> int:
    """64-bit words of a coordinate."""
    return curve.coordinates.degree * curve.coordinates.base.limbs
