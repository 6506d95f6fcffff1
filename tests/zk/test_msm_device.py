"""Sums of multiples by the C kernels, exactly: on PoCL, on NVIDIA where there is a GPU; and the registers they take."""

import functools
import itertools
import math
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest

from accelerant.algebra.curve.launch import to_montgomery
from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import encode_points, multiply
from accelerant.algebra.field.memory_space import HOST, space_at
from accelerant.algebra.field.program import montgomery_radix
from accelerant.algebra.msm import device
from accelerant.algebra.msm import device_plan as device_plans
from accelerant.algebra.msm.device import DeviceBases, MsmRunner, start_msm
from accelerant.algebra.msm.device_plan import (
    INVERT_BLOCK,
    MAX_INDICES,
    MAX_SEGMENT_UNITS,
    DeviceMsmPlan,
    MsmChunk,
    accumulate_source,
    affine_source,
    bins_source,
    device_plan,
    fold_source,
    multiples_source,
    prepare,
    scratch_shapes,
    sort_launches,
    sort_source,
)
from accelerant.errors import ConfigError, FormatError, OutOfMemory
from accelerant.runtime import ledger as ledger_module
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, portable_header
from accelerant.runtime.provider import MemoryInfo
from accelerant.zk import curve as zk_curve
from accelerant.zk.multi_scalar import FixedBase, msm, run_sums
from refusals import assert_raises
from requirements import require_backend

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
import kernel_points
from kernel_points import words_of

import vectors  # the inputs of known answers


@pytest.fixture
def space(request):
    return space_at(require_backend(request.param))


SOAK = [pytest.mark.slow, pytest.mark.soak]
SLOW = {"bn254_g1": [pytest.mark.slow], "bls12_381_g2": [pytest.mark.slow], "bls12_381_g1": SOAK, "bn254_g2": SOAK}
"""PoCL takes half a minute a curve. The first has the fewest limbs and is over Fq, the second the most and over Fq2."""

PLACES = [
    pytest.param(backend, name, id=f"{backend}-{name}", marks=[pytest.mark.gpu] if backend == "cuda" else SLOW[name])
    for backend in ("opencl", "cuda")
    for name in CURVES
]


MANY = 100
"""Points of the larger sums: all in one bucket, they are more segments of three than one thread sums."""

NONE = 2**32 - 1
"""What makes a bucket's last unit whole."""


def packed(curve, points):
    """(n, words) in Montgomery form."""
    return kernel_points.packed(curve, points).reshape(len(points), math.prod(curve.shape))


def unpacked(curve, words):
    assert words.dtype == np.uint64
    return kernel_points.unpacked(curve, words.reshape(1, *curve.shape))[0]


@functools.cache
def point(curve, logarithm):
    """That multiple of the generator."""
    return multiply(curve, logarithm, curve.generator)


@functools.cache
def few(curve):
    """Logarithms of some points."""
    draw = random.Random(curve.name)
    return [draw.randrange(curve.order) for _ in range(6)]


def some(curve, n):
    """Scalars, and points by their logarithms: duplicates, opposites and infinity among them."""
    draw, known = random.Random(n), few(curve)
    logarithms = [draw.choice([*known, 0, *(curve.order - log for log in known[:3])]) for _ in range(n)]
    return [draw.randrange(curve.order) for _ in range(n)], logarithms


def cases(curve):
    """Scalars and logarithms of points."""
    r, (log, *_) = curve.order, few(curve)
    edges = [0, 1, 2, r - 1, r - 2, r // 2, r // 2 + 1, 2**128, 2**253, sum(1 << 7 * j + 6 for j in range(36))]
    found = [some(curve, n) for n in (0, 1, 2, 33, MANY)]
    found.append((edges * 4, some(curve, 4 * len(edges))[1]))
    found.append(([r - 1] * MANY, [log] * MANY))
    found.append(([1] * MANY, some(curve, MANY)[1]))
    found.append(([0] * 40, some(curve, 40)[1]))
    found.append(([i % 2 for i in range(MANY)], some(curve, MANY)[1]))
    found.append((some(curve, 40)[0], [0] * 40))
    found.append(([5] * 40, [log, r - log] * 20))
    found.append(([5] * MANY, [log, log, r - log, 0] * (MANY // 4)))
    return found


def cases_at(space, curve):
    """Every case; on PoCL, where points take milliseconds, every fourth, and 40 points of it at most."""
    if space.backend != "opencl":
        return cases(curve)
    return [(scalars[:40], logarithms[:40]) for scalars, logarithms in cases(curve)[::4]]


def expected_of(curve, scalars, logarithms):
    total = sum(scalar * log for scalar, log in zip(scalars, logarithms, strict=True))
    return point(curve, total % curve.order)


def some_rounds(curve, *rounds):
    """Rounds of affine additions that a curve has: those over Fq2 have none."""
    return rounds if curve.coordinates.degree == 1 else (0,)


def check(space, curve, scalars, logarithms, there, **options):
    """Device_msm against the oracle, from arrays of the host, or from words that are at the space already."""
    arrays = words_of(scalars), packed(curve, [point(curve, log) for log in logarithms])
    if there:
        arrays = tuple(space.load(array) for array in arrays)
    found = unpacked(curve, start_msm(space, curve, *arrays, **options).finish())
    assert found == expected_of(curve, scalars, logarithms)


# --- the sort --------------------------------------------------------------------------------------------------------
def sorted_by(space, curve, plan, scalars):
    """What sort.c makes of scalars: the keys' sums as lists of (space, sign), after checks that hold for all."""
    work, n = MsmRunner(space, curve, plan), len(scalars)
    launches = prepare(space, sort_launches(curve, plan, MsmChunk(n, n, 0, 0)))
    work.run(launches, {"scalars": space.load(words_of(scalars))})
    counts, entries, segments, heavy, sums = (
        space.store(work.array(name)) for name in ("counts", "sorted", "segments", "heavy", "sums")
    )
    counters = counts[plan.keys :]
    segments, heavy = (
        segments[: counters[MAX_SEGMENT_UNITS + 1]].tolist(),
        heavy[: counters[MAX_SEGMENT_UNITS + 2]].tolist(),
    )
    lengths = [length for _, length, _ in segments]
    assert lengths == sorted(lengths, reverse=True)
    assert all(0 < length <= plan.segment for length in lengths)
    units = entries[: int(counters[MAX_SEGMENT_UNITS + 4]) << plan.rounds].reshape(-1, 1 << plan.rounds)
    assert len(units) == sum(lengths)
    assert (units[:, 0] != NONE).all()
    assert ((units[:, 1:] == NONE) >= (units[:, :-1] == NONE)).all()
    at = {target: units[begin : begin + length].ravel().tolist() for begin, length, target in segments}
    at = {target: [entry for entry in entries if entry != NONE] for target, entries in at.items()}
    assert len(at) == len(segments)
    assert sorted(begin for begin, _, _ in segments) == list(itertools.accumulate([0, *sorted_lengths(segments)]))[:-1]
    content = {target: entries for target, entries in at.items() if target < plan.keys}
    for key, first, parts in heavy:
        assert parts > 1
        content[key] = [entry for part in range(parts) for entry in at[first + part]]
        assert all(len(at[first + part]) == plan.segment << plan.rounds for part in range(parts - 1))
    assert len(content) == len(segments) - sum(parts - 1 for _, _, parts in heavy)
    empty = [key for key in range(plan.keys) if key not in content]
    assert not sums[empty].any()
    return {key: [(entry & 2**31 - 1, -1 if entry >> 31 else 1) for entry in found] for key, found in content.items()}


def sorted_lengths(segments):
    """In the order in which they begin."""
    return [length for _, length, _ in sorted(segments)]


@pytest.fixture
def sort(request, monkeypatch):
    """Sort by single counters, by bins, or by bins of several pieces in windows of several bins."""

    def forget():
        caches = (sort_source, bins_source, scratch_shapes)
        for cache in caches:
            cache.cache_clear()
        for backend in ("opencl", "cuda"):  # a source's name determines its text
            ledger_module.forget(backend)

    with monkeypatch.context() as patched:
        if request.param != "counters":
            patched.setattr(device_plans, "_BINNED_ENTRIES", 1)
        if request.param == "small bins":
            for name, value in {"SORT_BLOCK": 16, "PIECE": 16, "MAX_WINDOW_BINS": 16, "TILE": 64}.items():
                patched.setattr(device_plans, name, value)
        forget()
        yield
    forget()


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("sort", ["counters", "bins", "small bins"], indirect=True)
@pytest.mark.parametrize("space", ["opencl", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True)
def test_the_sort_fills_the_buckets(space, sort):
    """Each point is where its digits say: the weighted sums of logarithms are the scalars' sum."""
    curve = curve_of("bn254_g1")
    cuts = (
        {}, {"window": 5, "segment": 3}, {"window": 11, "segment": 16, "shared": True},
        {"window": 4, "segment": 2, "rounds": 2}, {"window": 6, "rounds": 3, "shared": True},
    )  # fmt: skip
    for scalars, logarithms in cases(curve):
        for options in cuts if scalars else ():
            n, plan = len(scalars), device_plan(curve, len(scalars), 1 << 30, **options)
            total = 0
            for key, entries in sorted_by(space, curve, plan, scalars).items():
                w, bucket = divmod(key, plan.buckets)
                for index, sign in entries:
                    level, i = divmod(index, n)
                    assert level == 0 or plan.shared
                    total += sign * (bucket + 1) * logarithms[i] << plan.window * (w + level)
            assert total == sum(scalar * log for scalar, log in zip(scalars, logarithms, strict=True))


# --- sums ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("space", "name"), PLACES, indirect=["space"])
def test_sums_are_exact(space, name):
    """Any scalars and points; windows and segments of few points too, so that buckets are cut up."""
    curve = curve_of(name)
    every = (1, 2, 5) if curve.coordinates.degree == 1 else ()
    for i, (scalars, logarithms) in enumerate(cases(curve)):
        options = {} if i % 3 else {"window": 5, "segment": 3}
        check(space, curve, scalars, logarithms, there=i % 2 == 0, **options)
        for rounds in every[i % 3 :][:1] if space.backend == "opencl" else every:  # PoCL has each number in turn
            check(space, curve, scalars, logarithms, there=i % 2 == 0, rounds=rounds, **options)


@pytest.mark.parametrize(
    ("space", "name"), [case for case in PLACES if case.values[1].endswith("_g1")], indirect=["space"]
)
def test_inverses_are_exact(space, name):
    """Of one element alone, which is what divsteps.h gets; then of many, by threads that have some, one or none."""
    curve = curve_of(name)
    field = curve.coordinates.base
    p, radix, draw = field.modulus, montgomery_radix(field), random.Random(name)
    kernel = space.provider.compile(affine_source(curve), entry="msm_affine_invert", device=space.index)
    values = [1, 2, p - 1, p - 2, (p + 1) // 2, 2**30, 2**30 - 1, 2**240 + 1, radix % p, pow(radix, -1, p)]
    values += [draw.randrange(1, p) for _ in range(6)]
    for chosen in (*([value] for value in values), (values * 300)[: 16 * INVERT_BLOCK + 3]):
        words = [word for value in chosen for word in field.words(value * radix % p, 64, field.limbs)]
        totals = space.load(np.array(words, np.uint64).reshape(len(chosen), -1))
        groups, each = (1, 1) if len(chosen) == 1 else (3, 8)
        space.provider.launch(kernel, (groups,), (INVERT_BLOCK,), (space.pointer(totals), len(chosen), each))
        rows = space.store(totals).tolist()
        found = [sum(word << 64 * i for i, word in enumerate(row)) * pow(radix, -1, p) % p for row in rows]
        assert all(value * inverse % p == 1 for value, inverse in zip(chosen, found, strict=True))


@pytest.mark.parametrize(("space", "name"), PLACES, indirect=["space"])
def test_sums_in_chunks_are_exact(space, name):
    """What has no room at once; from words at the space, and streamed from the host."""
    curve = curve_of(name)
    for n, chunk in ((60, 20), (60, 59), (9, 1)):
        for there in (False, True):
            check(
                space,
                curve,
                *some(curve, n),
                there=there,
                window=5,
                chunk=chunk,
                rounds=some_rounds(curve, 2 * there)[0],
            )


@pytest.mark.parametrize(("space", "name"), PLACES, indirect=["space"])
@pytest.mark.sample(2)
def test_every_cut_gives_the_same(space, name):
    """Windows up to several launches of msm_reduce, segments of one point and of the most, all that one may tune."""
    curve = curve_of(name)
    scalars, logarithms = some(curve, MANY)
    alike = [1] * 290 + scalars[:10], some(curve, 300)[1]  # a bucket of more segments than a block has threads
    for window in (2, 5, 11):
        check(space, curve, scalars, logarithms, there=True, window=window)
    for segment in (1, 2, 16, 17, MAX_SEGMENT_UNITS):
        check(space, curve, *alike, there=True, window=7, segment=segment)
    for rounds in some_rounds(curve, *range(6)):
        check(space, curve, scalars, logarithms, there=True, window=4, segment=2, rounds=rounds)
        check(space, curve, *alike, there=True, window=7, rounds=rounds)
    for per_thread in (0, 1, 5):
        check(space, curve, scalars, logarithms, there=True, window=10, per_thread=per_thread)
    if space.backend == "cuda":  # the C text is the same
        options = {"inlined": True, "resident": 256, "fold_inlined": True}
        check(space, curve, scalars, logarithms, there=True, **options)
        check(space, curve, scalars, logarithms, there=True, rounds=some_rounds(curve, 3)[0], **options)


@pytest.mark.parametrize(("space", "name"), PLACES, indirect=["space"])
@pytest.mark.sample(2)
def test_sums_over_fixed_points_are_exact(space, name):
    """With the points' multiples, and without where they have no room."""
    curve = curve_of(name)
    for scalars, logarithms in cases_at(space, curve):
        expected = expected_of(curve, scalars, logarithms)
        points = [point(curve, log) for log in logarithms]
        cuts = (
            {},
            {"window": 5, "segment": 7},
            {"window": 6, "chunk": 15, "rounds": some_rounds(curve, 2)[0]},
            {"free_bytes": 0},
        )
        for options in cuts:
            bases = DeviceBases(space, curve, packed(curve, points), **options)
            assert unpacked(curve, bases.msm(space.load(words_of(scalars)))) == expected
            assert unpacked(curve, bases.msm(words_of(scalars))) == expected
            kept = "free_bytes" not in options and bool(points)
            assert bases.explain().startswith("the points' multiples" if kept else "chunks" if points else "no points")


@pytest.mark.parametrize(("space", "name"), PLACES, indirect=["space"])
@pytest.mark.sample(2)
def test_several_devices_share_a_sum(space, name):
    """This one, the last one of its kind, and the CPU, which may have no point."""
    curve, others = curve_of(name), [space.label, "cpu", space.provider.devices()[-1]]
    for scalars, logarithms in cases_at(space, curve):
        points = encode_points(curve, [point(curve, log) for log in logarithms])
        words = words_of(scalars)
        expected = msm(words, points, name)
        assert (msm(words, points, name, devices=others) == expected).all()
        assert (FixedBase(name, points, devices=others).msm(np.stack([words] * 2)) == expected).all()
        if space.backend == "cuda":
            import torch

            on_gpu = [torch.from_numpy(each).cuda() for each in (words, points)]
            shared = msm(*on_gpu, name, devices=others)
            assert shared.device == on_gpu[1].device
            assert (shared.cpu().numpy() == expected).all()


KNOWN = [
    pytest.param(backend, name, id=f"{backend}-{name}", marks=[pytest.mark.gpu] if backend == "cuda" else SLOW[name])
    for backend, (name, k) in itertools.product(("opencl", "cuda"), vectors.MSM_ANSWERS)
    if k == 14
]


@pytest.mark.parametrize(("space", "name"), KNOWN, indirect=["space"])
def test_known_answers(space, name):
    """2^14 points; on PoCL, where one takes seconds, a single sum."""
    curve, n = curve_of(name), 1 << 14
    group, scalars = zk_curve(name), words_of(vectors.msm_scalars(curve, n))
    points = to_montgomery(HOST, curve, group.mul(group.generator, vectors.msm_multipliers(n))).reshape(n, -1)
    expected = vectors.MSM_ANSWERS[name, 14]
    if space.backend == "opencl":
        assert unpacked(curve, start_msm(space, curve, scalars, points).finish()) == expected
        return
    for rounds in some_rounds(curve, 0, 3):
        assert unpacked(curve, start_msm(space, curve, scalars, points, rounds=rounds).finish()) == expected
        assert unpacked(curve, DeviceBases(space, curve, points, rounds=rounds).msm(scalars)) == expected
    # All scalars the same: few buckets, of many segments.
    last = np.tile(words_of([curve.order - 1]), (n, 1))
    expected = multiply(curve, -sum(vectors.msm_multipliers(n)) % curve.order, curve.generator)
    for rounds in some_rounds(curve, 0, 3):
        assert unpacked(curve, start_msm(space, curve, last, points, rounds=rounds).finish()) == expected


# --- plans -----------------------------------------------------------------------------------------------------------
def check_room(plan, filling):
    """Lists hold the segments and partial sums of buckets: (points of a bucket, how many such buckets)."""
    units = [(-(-size >> plan.rounds), count) for size, count in filling]
    assert sum(size * count for size, count in units) <= plan.units
    parts = [(-(-size // plan.segment), count) for size, count in units]
    assert sum(part * count for part, count in parts) <= plan.segments
    assert sum(part * count for part, count in parts if part > 1) <= plan.sums - plan.keys
    assert sum(count for part, count in parts if part > 1) <= plan.heavy


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", CURVES)
def test_plans_have_room_for_the_worst_scalars(name, shared):
    """Digits of every scalar fit in the windows; lists hold all segments, whatever the buckets' sizes."""
    curve = curve_of(name)
    for n in (1, 2, 1000, 1 << 16, (1 << 20) + 1, 1 << 24):
        plan = device_plan(curve, n, 1 << 40, shared=shared)
        assert plan.points == n
        assert plan.window * plan.windows > curve.order.bit_length()
        assert plan.entries == n * plan.windows <= MAX_INDICES
        draw = random.Random(n)
        for share in (0.0, 0.5, 1.0):  # so much of the entries is in one bucket, the others spread over some
            left = plan.entries - int(share * plan.entries)
            most = 4 * plan.segment << plan.rounds
            counts = [plan.entries - left, *(draw.randrange(most) for _ in range(min(plan.keys - 1, 500)))]
            counts = [count for count in counts if (left := left - count) > 0 or count == counts[0]]
            check_room(plan, [(count, 1) for count in counts if count])
        assert plan.size_bytes(curve) >= 12 * plan.entries


def worst_fillings(plan):
    """(points of a bucket, how many such buckets): sizes just beyond a segment's, and all of one size otherwise."""
    most = plan.entries - min(plan.keys, plan.entries) + 1
    yield [(most, 1), (1, plan.entries - most)]
    units = 1 << plan.rounds
    for size in (1, plan.segment, units + 1, *(k * plan.segment * units + 1 for k in (1, 2, 3, 7))):
        count = min(plan.keys - 1, plan.entries // size)
        rest = plan.entries - size * count
        yield [(size, count), (rest, 1)]
        short = min(rest, plan.keys - 1 - count)
        yield [(size, count), (1, short), (rest - short, 1)]


@pytest.mark.parametrize("options", [
    {}, {"window": 2, "segment": 1}, {"window": 4, "segment": 2}, {"segment": 5}, {"rounds": 1},
    {"segment": 3, "rounds": 4},
])  # fmt: skip
@pytest.mark.parametrize("shared", [False, True])
def test_plans_have_room_for_buckets_just_beyond_a_segment(shared, options):
    """Buckets of k L + 1 points are the most segments for their points, of L + 1 the most partial sums."""
    for n in (1, 2, 3, 7, 40, 1000, (1 << 16) + 1, 1 << 22):
        plan = device_plan(curve_of("bn254_g1"), n, 1 << 42, shared=shared, **options)
        for filling in worst_fillings(plan):
            assert sum(size * count for size, count in filling) == plan.entries
            check_room(plan, filling)


class _Device:
    """A memory space and its provider, which records the calls."""

    backend, index = "cuda", 0

    def __init__(self, free_bytes, **properties):
        self.free_bytes, self.calls, self.properties = free_bytes, [], properties
        self.provider = self

    def devices(self):
        return [SimpleNamespace(properties=self.properties)]

    def memory(self, index):
        return MemoryInfo(1 << 40, self.free_bytes, 0, 0, 0)

    def synchronize(self, index):
        self.calls.append("synchronize")


class _Summing:
    """An MsmRunner that records the plans of sums."""

    plans: ClassVar[list[DeviceMsmPlan]] = []

    def __init__(self, space, curve, plan, load=None):
        if plan.size_bytes(curve) > 0.8 * space.free_bytes:
            raise OutOfMemory("no room for a plan")
        self.plans.append(plan)

    def start(self, scalars, points, n):
        return SimpleNamespace(finish=lambda: None)


@pytest.fixture
def stand_in(monkeypatch):
    """A device without kernels."""
    space = _Device(1 << 36)
    monkeypatch.setattr(device, "_multiples", lambda *args: space.calls.append("multiples"))
    monkeypatch.setattr(device, "MsmRunner", _Summing)
    monkeypatch.setattr(_Summing, "plans", [])
    return space


@pytest.mark.parametrize("options", [{}, {"free_bytes": 0}])
def test_fixed_points_are_there_when_they_are_returned(stand_in, options):
    """A sum on another stream of the device would read multiples that are not computed yet."""
    bases = DeviceBases(stand_in, curve_of("bn254_g1"), SimpleNamespace(shape=(1 << 10, 8)), **options)
    assert stand_in.calls == ["multiples"] * bases.plan.shared + ["synchronize"]


@pytest.mark.parametrize("options", [{}, {"free_bytes": 0}, {"window": 12, "segment": 9}])
def test_fixed_points_are_summed_in_what_is_free(stand_in, options):
    """Pieces become smaller where others have taken the memory since; the windows stay those of the multiples."""
    curve = curve_of("bn254_g1")
    bases = DeviceBases(stand_in, curve, SimpleNamespace(shape=(1 << 20, 8)), **options)
    size = bases.plan.size_bytes(curve)
    for free_bytes in (1 << 36, size, size // 3, 1 << 36):
        stand_in.free_bytes = free_bytes
        bases.msm(None)
        plan = _Summing.plans[-1]
        assert plan.size_bytes(curve) <= 0.8 * free_bytes
        assert plan.shared == bases.plan.shared
        assert not plan.shared or (plan.window, plan.windows) == (bases.plan.window, bases.plan.windows)
        assert "segment" not in options or (plan.segment, plan.window) == (9, 12)
    assert [plan.points < 1 << 20 for plan in _Summing.plans] == [False, True, True, False]
    stand_in.free_bytes = 1000
    assert_raises(OutOfMemory, "and 800 are free", bases.msm, None)


@pytest.mark.parametrize(("held", "binned"), [(None, True), (48 << 10, True), (32 << 10, False)])
def test_bins_are_for_devices_with_the_local_memory_of_their_blocks(stand_in, held, binned):
    stand_in.properties = {"shared_bytes_per_block": held}
    points = SimpleNamespace(shape=(1 << 20, 8))
    assert DeviceBases(stand_in, curve_of("bn254_g1"), points).plan.binned == binned
    start_msm(stand_in, curve_of("bn254_g1"), points, points)
    assert _Summing.plans[-1].binned == binned


def test_rounds_fit_their_memory(monkeypatch):
    """By the table where buckets have points enough and the memory room, else none: never smaller chunks for them."""
    monkeypatch.setattr(device_plans, "ROUNDS", {8: ((1 << 25, 2), (1 << 20, 1)), 12: ((1 << 20, 1),)})
    device_plans._best_plan.cache_clear()
    curve = curve_of("bn254_g1")
    try:
        plans = {k: device_plan(curve, 1 << k, 1 << 40) for k in (10, 18, 20, 22)}
        assert {k: plan.rounds for k, plan in plans.items()} == {10: 0, 18: 0, 20: 1, 22: 2}
        assert "2 rounds of affine additions in pairs, segments" in plans[22].explain(curve)
        assert "rounds" not in plans[10].explain(curve)
        assert device_plan(curve_of("bls12_381_g1"), 1 << 22, 1 << 40).rounds == 1
        crowded = device_plan(curve, 1 << 18, 1 << 40, window=18)
        assert crowded.rounds == 0  # 2 points a bucket
        without = device_plan(curve, 1 << 22, plans[22].size_bytes(curve) - 1)
        assert (without.rounds, without.points) == (0, 1 << 22)
        assert without.size_bytes(curve) < plans[22].size_bytes(curve) / 2
    finally:
        device_plans._best_plan.cache_clear()


@pytest.mark.parametrize(("name", "log_n", "shared", "rounds"), [
    ("bn254_g1", 22, False, 0), ("bn254_g1", 22, True, 0), ("bls12_381_g1", 20, False, 0),
    ("bls12_381_g1", 20, True, 0), ("bls12_381_g1", 22, False, 2), ("bls12_381_g1", 22, True, 2),
    ("bls12_381_g1", 21, False, 2), ("bls12_381_g1", 21, True, 2), ("bls12_381_g1", 23, False, 2),
    ("bls12_381_g1", 23, True, 2), ("bn254_g2", 22, False, 0), ("bls12_381_g2", 22, False, 0),
])  # fmt: skip
def test_rounds_are_where_they_were_measured_to_pay(name, log_n, shared, rounds):
    assert device_plan(curve_of(name), 1 << log_n, 1 << 40, shared=shared).rounds == rounds


@pytest.mark.parametrize("name", CURVES)
def test_a_plan_counts_its_memory(name):
    """Every array, and what the kernels give."""
    curve = curve_of(name)
    rounds = [{"rounds": rounds, "shared": rounds == 2} for rounds in some_rounds(curve, 1, 2, 3)]
    for n, options in ((1 << 16, {}), *((1 << 16, each) for each in rounds), (1 << 16, {"window": 13}), (1 << 20, {})):
        plan = device_plan(curve, n, 1 << 40, **options)
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in scratch_shapes(name, plan).values()]
        results = plan.sets * 3 * math.prod(curve.shape) // 2 * 8
        assert sum(sizes) + results == plan.size_bytes(curve)


@pytest.mark.parametrize("rounds", range(6))
def test_threads_have_all_units(rounds):
    """Of every number of units that a plan allows for; pairs of all rounds have room, two rounds' at a time."""
    for n in (1, 3, 1000, 1 << 18):
        plan = device_plan(curve_of("bn254_g1"), n, 1 << 40, rounds=rounds)
        assert plan.padded_entries == plan.units << rounds
        assert plan.affine_threads * plan.affine_units >= plan.units * (rounds > 0)
        for k in range(rounds):
            assert plan.affine_threads * plan.affine_units << rounds - 1 - k <= plan.affine_pairs[k % 2]


def test_scalars_are_checked_while_their_sum_is_made():
    """The check waits for the device, which has the sums to do by then; no sum is left unfinished."""
    events = []

    def run(row):
        events.append("start")
        return SimpleNamespace(finish=lambda: events.append("finish") or np.zeros(8, np.uint64))

    def check():
        events.append("check")
        return FormatError("a scalar is wrong")

    rows = [np.zeros((3, 4), np.uint64)] * 2
    assert_raises(FormatError, "a scalar is wrong", lambda: run_sums(HOST, curve_of("bn254_g1"), rows, run, check))
    assert events == ["start", "start", "check", "finish", "finish"]
    assert not run_sums(HOST, curve_of("bn254_g1"), rows, run).any()


@pytest.mark.gpu
def test_arguments_on_a_gpu_are_checked():
    import torch

    require_backend("cuda")
    curve = curve_of("bn254_g1")
    words = encode_points(curve, [point(curve, log) for log in few(curve)])
    points, scalars = torch.from_numpy(words).cuda(), words_of([1, 2, 3, curve.order, 5, curve.order + 1])
    for run in (lambda s: msm(s, points, curve.name), FixedBase(curve.name, points).msm):
        with pytest.raises(FormatError, match=r"^scalars\[3\] \(flattened\) is not below the order of bn254_g1$"):
            run(torch.from_numpy(scalars).cuda())
    for place, word, wrong in (((4, 1, 3), 2**64 - 1, "not below the modulus"), ((2, 0, 0), 5, "not on bn254_g1")):
        bad = words.copy()
        bad[place] = word
        for given in (torch.from_numpy(bad).cuda(), torch.from_numpy(np.repeat(bad, 2, axis=0)).cuda()[::2]):
            with pytest.raises(FormatError, match=rf"^points\[{place[0]}\] \(flattened\).* {wrong}"):
                msm(words_of([1] * 6), given, curve.name)


def test_windows_grow_with_the_points():
    curve = curve_of("bn254_g1")
    windows = [device_plan(curve, 1 << k, 1 << 40).window for k in range(0, 25, 4)]
    assert windows == sorted(windows)
    assert windows[0] < 8 < 14 < windows[-2]
    assert device_plan(curve, 1 << 20, 1 << 40, shared=True).window > device_plan(curve, 1 << 20, 1 << 40).window


def test_a_plan_keeps_to_the_memory():
    curve, n = curve_of("bls12_381_g2"), 1 << 20
    whole = device_plan(curve, n, 1 << 40)
    part = device_plan(curve, n, whole.size_bytes(curve) // 3)
    assert part.size_bytes(curve) <= whole.size_bytes(curve) // 3
    assert n // 8 <= part.points < n
    assert f"chunks of {part.points:,} points" in part.explain(curve)
    with pytest.raises(OutOfMemory, match=r"chunks of 1024 points takes [\d,]+ bytes of scratch, and 1,000 are free"):
        device_plan(curve, 1 << 12, 1000)


@pytest.mark.parametrize(("name", "options", "message"), [
    ("bn254_g1", {"window": 1}, "window must be 2 to 22 bits, got 1"),
    ("bn254_g1", {"segment": 1025}, "segment must be 1 to 1024 units"),
    ("bn254_g1", {"rounds": 6}, "rounds must be 0 to 5 on bn254_g1, got 6"),
    ("bn254_g2", {"rounds": 1}, "rounds must be 0 to 0 on bn254_g2, got 1"),
])  # fmt: skip
def test_what_cannot_be_is_refused(name, options, message):
    assert_raises(ConfigError, message, lambda: device_plan(curve_of(name), 10, 1 << 30, **options))


# --- what a GPU gives ------------------------------------------------------------------------------------------------
BUDGETS = {
    "bn254_g1": {
        "msm_accumulate": (128, 0), "msm_combine": (104, 16), "msm_reduce": (144, 0), "msm_multiples": (104, 16),
        "msm_affine_begin": (96, 0), "msm_affine_invert": (88, 0), "msm_affine_round": (128, 0),
    },
    "bn254_g2": {
        "msm_accumulate": (255, 0), "msm_combine": (176, 8), "msm_reduce": (255, 0), "msm_multiples": (200, 0),
    },
    "bls12_381_g1": {
        "msm_accumulate": (168, 48), "msm_combine": (160, 0), "msm_reduce": (192, 0), "msm_multiples": (152, 0),
        "msm_affine_begin": (128, 0), "msm_affine_invert": (136, 0), "msm_affine_round": (168, 0),
    },
    "bls12_381_g2": {
        "msm_accumulate": (255, 512), "msm_combine": (255, 0), "msm_reduce": (255, 80), "msm_multiples": (255, 128),
    },
}  # fmt: skip
"""Registers of a thread and bytes that it spills, at most: just above what ptxas 13.0 gives for sm_80 and sm_90a. For
msm_accumulate what it is told, see program.ACCUMULATION."""


def resources_of(source, target):
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.compilation.cuda import compile_cuda

    return compile_cuda(source, target).resources


@pytest.mark.parametrize("target", [pytest.param("sm_80", marks=pytest.mark.soak), "sm_90a"])
@pytest.mark.slow
def test_nvrtc_compiles_the_sort(target):
    for source, registers, shared_bytes in ((sort_source(), 40, 10 << 10), (bins_source(), 88, 44 << 10)):
        for entry, resources in resources_of(source, target).items():
            assert 0 < resources.registers <= registers, entry
            assert resources.spill_bytes == resources.stack_bytes == 0
            assert resources.shared_bytes <= shared_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "name"),
    [
        pytest.param(
            target,
            name,
            marks=[] if (target, name) in (("sm_90a", "bn254_g1"), ("sm_80", "bls12_381_g2")) else [pytest.mark.soak],
        )
        for target in ("sm_80", "sm_90a")
        for name in CURVES
    ],
)
def test_nvrtc_compiles_with_few_registers(target, name):
    curve = curve_of(name)
    of_rows = functools.partial(accumulate_source, rows=True)
    makes = (accumulate_source, fold_source, multiples_source)
    for make in (*makes, of_rows, affine_source) if curve.coordinates.degree == 1 else makes:
        for entry, resources in resources_of(make(curve), target).items():
            registers, spill_bytes = BUDGETS[name][entry]
            assert 0 < resources.registers <= registers, entry
            assert resources.spill_bytes <= spill_bytes, entry
            assert resources.shared_bytes <= 25 << 10


@pytest.mark.sample(len(CUDA_TARGETS))
@pytest.mark.slow
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_nvrtc_compiles_for_each_target(target):
    for source in (
        sort_source(),
        bins_source(),
        *(make(curve_of("bn254_g1")) for make in (accumulate_source, affine_source)),
    ):
        assert target in source.targets
        for entry, resources in resources_of(source, target).items():
            assert 0 < resources.registers <= 128, entry
            assert resources.spill_bytes <= 16, entry


def test_barriers_on_amd_have_a_fence_on_either_side(tmp_path):
    """What was written before is released, what is read after is acquired: local memory is read and written around."""
    clang = shutil.which("clang-19")
    if clang is None:
        pytest.skip("clang-19 is not installed")
    text, code = tmp_path / "sort.hip", tmp_path / "sort.ll"
    text.write_text(f"{portable_header()}\n{sort_source().dialects['portable']}")
    for_device = ["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output", "--offload-arch=gfx90a"]
    options = [*for_device, "-nogpuinc", "-nogpulib", "-O3", "-S", "-emit-llvm"]
    subprocess.run([clang, *options, text, "-o", code], check=True, timeout=120)
    lines = [line.strip() for line in code.read_text().splitlines()]
    barriers = [i for i, line in enumerate(lines) if "call void @llvm.amdgcn.s.barrier()" in line]
    assert len(barriers) >= 8
    for i in barriers:
        assert lines[i - 1] == 'fence syncscope("workgroup") release'
        assert lines[i + 1] == 'fence syncscope("workgroup") acquire'


def test_the_texts_ask_for_no_compiler():
    """Whatever differs between compilers stands in the header, or in the field's text."""
    curve = curve_of("bls12_381_g2")
    sources = [make(curve) for make in (accumulate_source, fold_source, multiples_source)]
    for source in (sort_source(), bins_source(), affine_source(curve_of("bls12_381_g1")), *sources):
        text = source.dialects["portable"].partition("#define MSM_LENGTH")[2]
        assert "ACL_KERNEL" in text
        assert not re.search(r"#\s*if|#\s*el|defined|\b__\w+|get_global_id|threadIdx", text)
        assert not re.search(r"\b(COORD|BASE|FIELD)(_|\b)", text)
