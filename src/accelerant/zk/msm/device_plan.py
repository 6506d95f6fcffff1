"""How a sum of multiples is cut up on a device: sort.c, accumulate.c and fold.c say what is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.errors import ConfigError, OutOfMemory
from accelerant.zk.msm.program import COUNTERS, LONGEST, TILE, reduce_block

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

MOST_INDICES = 1 << 31
"""Of points, or of a piece's digits: the kernels keep them in 31 bits and a sign."""


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """How a sum is cut up; every field may be tuned.

    Attributes:
        points: of one piece; pieces are summed one after the other.
        window: bits of a digit, c.
        windows: digits of a scalar.
        shared: one set of buckets for all windows, since the points' multiples are at hand.
        segment: the most points that one thread adds up.
        per_thread: log2 of the buckets that a thread of fold.c takes.
        written_out, resident: of program.accumulate_source.
        fold_written_out: of program.fold_source.
    """

    points: int
    window: int
    windows: int
    shared: bool
    segment: int
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
    def heavy(self) -> int:
        """The most buckets that can have more than one segment."""
        return self.entries // self.segment

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
        coordinate = 8 * coordinate_words(curve)
        lists = 3 * (self.segments + max(1, self.heavy))
        numbers = 3 * self.entries + self.keys + COUNTERS + self.tiles + lists
        coordinates = 4 * self.sums + self.sets * (8 * self.blocks(reduce_block(curve)) + 3)
        return 4 * numbers + coordinate * coordinates

    def explain(self, curve: Curve[Any]) -> str:
        """In words."""
        of = "one set of" if self.shared else f"{self.sets} sets of"
        return (
            f"pieces of {self.points:,} points, {self.windows} windows of {self.window} bits, signed, "
            f"{of} {self.buckets:,} buckets, segments of at most {self.segment} points, "
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
        segment: the most points that a thread adds up, 1 to 1024.
        piece: points at once, at most.

    Raises:
        ConfigError: window or segment is out of range.
        OutOfMemory: not even a piece of 1024 points has room.
    """
    if window is not None and not 2 <= window <= _LARGEST_WINDOW:
        raise ConfigError(f"window must be 2 to {_LARGEST_WINDOW} bits, got {window}")
    if segment is not None and not 1 <= segment <= LONGEST:
        raise ConfigError(f"segment must be 1 to {LONGEST} points, got {segment}")
    size = min(n, piece or n)
    while True:
        cut = _cut(curve, size, shared, window, segment)
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
def _cut(curve: Curve[Any], n: int, shared: bool, window: int | None, segment: int | None) -> DevicePlan:
    bits = curve.order.bit_length() + 1  # a carry of signed digits may go beyond the highest

    def cut(c: int) -> DevicePlan:
        windows = -(-bits // c)
        found = DevicePlan(n, c, windows, shared, segment or LONGEST)
        found = replace(found, per_thread=max(1, (found.keys // _THREADS).bit_length()))
        if segment:
            return found
        # Few buckets are split, for more threads; else only those of far more points than usual, and those that one
        # thread would still add up when the others are done.
        most = found.entries // _THREADS
        if found.keys >= _FEW_BUCKETS:
            most = min(4 * found.entries // found.keys, most // 4)
        return replace(found, segment=min(LONGEST, 1 << max(_SHORTEST, most - 1).bit_length()))

    def products(found: DevicePlan) -> int:
        highest = bits - (found.windows - 1) * found.window  # bits of the last digit
        crowded = sum(highest < few for few in _CROWDED_BITS) * n
        return _PRODUCTS_PER_ENTRY * (found.entries + crowded) + _PRODUCTS_PER_BUCKET * found.keys

    return min((cut(c) for c in ([window] if window else range(2, _LARGEST_WINDOW + 1))), key=products)


def coordinate_words(curve: Curve[Any]) -> int:
    """64-bit words of a coordinate."""
    return curve.coordinates.degree * curve.coordinates.base.limbs
