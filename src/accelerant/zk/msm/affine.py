"""Rounds of affine additions in pairs, between the sort and the sums of segments: affine.c says how.

What they cost, on paper. An addition takes 5M + 1S, of which 3M are its share of one inverse, where one in XYZZ
coordinates takes 8M + 2S: on an H200, at 57.8e9 products of BN254 a second, 0.10 ns for 0.16. Of r rounds a bucket of k
points has (1 - 2^-r) k of the first kind, and (2^r - 1) / 2 on the average for points at infinity that make the last
unit whole; k / 2^r are left for the second kind. So a bucket of 64 is, in additions of the first kind, 99 without
rounds, and with 1 to 4 of them 83, 73, 71 and 73.

Bytes a pair of BN254: msm_affine_begin 168 (two entries; two x at random places, for which memory gives 64 bytes
each; a product), the first round 248 (entries, points, a product; the sum, half a product), the others 240 each. An
inverse by divsteps takes some 20 us, in which a block is idle; 64 threads and more share one, and the launch of each
round's inverses takes so long once.

What they cost, measured: 2^22 points of BN254, windows of 17 bits, three rounds, ms on an H200. Without rounds
msm_accumulate alone takes 9.8.

                on paper    measured
    begin           1.4        2.02
    round 0         3.1        4.67
    round 1         1.7        1.90
    round 2        0.75        0.83
    accumulate     1.25        1.18

That is 10.6 for 8.2, without inverses, and BN254 loses 6 to 14% by any number of rounds. The paper takes the products
to hide the memory. Where points are gathered, in begin and round 0, they do not: what is measured is about the sum of
both, 0.6 + 1.3 and 3.1 + 1.8 at 4.28 TB/s. The multiplier waits there for reads at random addresses and for the many
32-bit moves between products. Where rows stand side by side the paper is right to within 12%. BLS12-381's products cost
2.2 times as much, its bytes 1.5 times: there two rounds gain 6 to 9% at 2^22 points. device_plan.ROUNDS has all that
was measured, and decides.

Also tried, for BN254: blocks that make their own inverses, so that a round is one kernel and no product is written or
read again. Round 0 then takes 7.3 to 8.5 ms: a block waits for its inverse, and there is no room for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from accelerant.algebra.curve.weierstrass import Curve
from accelerant.zk.msm.device_plan import DevicePlan, coordinate_words
from accelerant.zk.msm.program import AFFINE_BLOCK, INVERT_BLOCK, INVERT_EACH, Launch, affine_source

__all__ = ["last_rows", "launches", "shapes"]

_U64 = np.dtype(np.uint64)
_INVERT_THREADS = 1 << 15
"""Threads that make inverses take as many products each as leaves no more of them than so many."""


def shapes(curve: Curve[Any], plan: DevicePlan) -> Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]:
    """Scratch arrays, by name: sums of pairs and products of runs of two rounds, one before the other."""
    coordinate = coordinate_words(curve)
    found = {"totals": ((plan.affine_threads, coordinate), _U64)} if plan.rounds else {}
    for k, count in enumerate(plan.affine_pairs):
        if count:
            found |= {f"rows{k}": ((count, 2 * coordinate), _U64), f"before{k}": ((count, coordinate), _U64)}
    return found


def last_rows(plan: DevicePlan) -> str:
    """The array that has one affine point a unit in the end: that of unit u is at u."""
    return f"rows{(plan.rounds - 1) % 2}"


def launches(curve: Curve[Any], p: DevicePlan, first: int) -> Iterator[Launch]:
    """All rounds of a plan that has some.

    Args:
        curve: of the points.
        p: the plan.
        first: row of "points" from which entries count.
    """
    source = affine_source(curve, p.written_out, p.resident)
    threads, blocks = p.affine_threads, p.affine_threads // AFFINE_BLOCK
    cut = (p.keys, first, threads, p.affine_units)
    begin = ("points", "places", "counts", "before0", "totals")
    yield Launch(source, "msm_affine_begin", blocks, AFFINE_BLOCK, begin, (*cut, p.rounds))
    each = min(INVERT_EACH, -(-threads // _INVERT_THREADS))
    rows = "points"
    for k in range(p.rounds):
        groups = -(-threads // (INVERT_BLOCK * each))
        yield Launch(source, "msm_affine_invert", groups, INVERT_BLOCK, ("totals",), (threads, each))
        after = f"before{1 - k % 2}" if k + 1 < p.rounds else f"before{k % 2}"  # the last round writes none
        arrays = (rows, "places", "counts", f"before{k % 2}", "totals", f"rows{k % 2}", after)
        yield Launch(source, "msm_affine_round", blocks, AFFINE_BLOCK, arrays, (*cut, k, p.rounds))
        rows = f"rows{k % 2}"
