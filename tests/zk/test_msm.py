"""Sums of multiples on the CPU: zk.msm and what it is made of, against the group law on Python integers."""

import functools
import math
import random
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import accelerant
from accelerant.algebra.curve import launch
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import decode_points, encode_points, multiply
from accelerant.algebra.field.field import FieldArray
from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.field.words import encode
from accelerant.algebra.msm import cpu
from accelerant.algebra.msm.cpu import CpuBases, CpuMsmPlan, cpu_plan, kernel_source
from accelerant.errors import ConfigError, FormatError, OutOfMemory, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.zk import multi_scalar as op
from accelerant.zk.multi_scalar import FixedBase, msm
from refusals import assert_raises
from requirements import require_form

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
from vectors import MSM_ANSWERS, msm_multipliers, msm_scalars

FORMS = ("scalar", "vector")
_QUICK = (("bn254_g1", "scalar"), ("bn254_g1", "vector"), ("bls12_381_g1", "vector"))
"""Cases whose compilation is soon done."""

CASES = [
    pytest.param(curve, form, marks=[] if (curve, form) in _QUICK else [pytest.mark.slow], id=f"{curve}-{form}")
    for curve in ("bn254_g1", "bn254_g2", "bls12_381_g1", "bls12_381_g2")
    for form in FORMS
]
each_form = pytest.mark.parametrize("form", FORMS)


def montgomery(curve, points):
    """Words (n, words of a point) as CpuBases takes them."""
    words = launch.to_montgomery(HOST, curve, encode_points(curve, points))
    return words.reshape(len(points), math.prod(curve.shape))


def affine(curve, words):
    canonical = launch.from_montgomery(HOST, curve, np.ascontiguousarray(words).reshape(-1, *curve.shape))
    return decode_points(curve, canonical)[0]


def total(name, form, scalars, points, chosen=None):
    require_form(form)
    curve = curve_of(name)
    return affine(curve, CpuBases(curve, montgomery(curve, points), form).msm(encode(curve.scalars, scalars), chosen))


@functools.cache
def generated(name, n):
    """Canonical words of n points m_i G, by curve_mul."""
    group = accelerant.zk.curve(name)
    return group.mul(group.generator, msm_multipliers(n))


def expected(name, scalars, multipliers):
    curve = curve_of(name)
    factor = sum(s * m for s, m in zip(scalars, multipliers, strict=True)) % curve.order
    return multiply(curve, factor, curve.generator)


def numbered(n):
    """n points m_i G of bn254_g1 as CpuBases takes them, scalars, and their sum."""
    curve = curve_of("bn254_g1")
    points, scalars = launch.to_montgomery(HOST, curve, generated(curve.name, n)), msm_scalars(curve, n)
    wanted = expected(curve.name, scalars, msm_multipliers(n))
    return curve, points.reshape(n, -1), encode(curve.scalars, scalars), wanted


@functools.cache
def few(name):
    """Points with multipliers: infinity, G, -G, G again, and others with opposites."""
    curve, rng = curve_of(name), random.Random(name)
    multipliers = [0, 1, -1, 1, 2, -2]
    while len(multipliers) < 24:
        m = rng.randrange(curve.order)
        multipliers += [m, -m, m] if len(multipliers) % 2 else [m]
    return multipliers, [multiply(curve, m, curve.generator) for m in multipliers]


# --- sums ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("name", "form"), CASES)
def test_sums_of_few_points(name, form):
    """From none to 24; scalars 0, 1, r - 1 and others; equal and opposite points, and infinity."""
    curve, rng = curve_of(name), random.Random(form)
    multipliers, points = few(name)
    r = curve.order
    for n in (0, 1, 2, 3, 8, 24):
        for scalars in (
            [1] * n,
            [r - 1] * n,
            [0] * n,
            [rng.randrange(r) for _ in range(n)],
            [rng.choice((0, 1, r - 1, 2, r // 2, 1 << 253)) for _ in range(n)],
        ):
            assert total(name, form, scalars, points[:n]) == expected(name, scalars, multipliers[:n])


@pytest.mark.sample(5, 3)
@each_form
@pytest.mark.parametrize("bits", [4, 5, 8, 13])
@pytest.mark.parametrize(("parts", "group"), [(1, 1), (3, 1), (1, 3), (2, 100)])
def test_any_plan_gives_the_same_sum(form, bits, parts, group):
    """Digits that lie in one word and in two, the top one full or nearly empty; ranges that are empty too."""
    curve = curve_of("bn254_g1")
    windows = -(-256 // bits)
    for n in (2, 24):
        multipliers, points = (each[:n] for each in few("bn254_g1"))
        scalars = [curve.order - 1 - i for i in range(n)]
        chosen = CpuMsmPlan(bits, windows, parts, group)
        assert total("bn254_g1", form, scalars, points, chosen) == expected("bn254_g1", scalars, multipliers)


def skewed(kind, r, n):
    rng = random.Random(kind)
    spread = [rng.randrange(r) for _ in range(n)]
    return {
        "equal points": (spread, [7] * n),
        "equal scalars": ([spread[0]] * n, None),
        "ones": ([1] * n, None),
        "r - 1": ([r - 1] * n, None),
        "bits": ([i % 2 for i in range(n)], None),
        "opposites": ([spread[i // 2] for i in range(n)], [(-1) ** i * (i // 2 + 1) for i in range(n)]),
        "all one": ([1] * n, [1] * n),
        "mostly zero": ([spread[i] if i % 97 == 0 else 0 for i in range(n)], None),
    }[kind]


KINDS = ("equal points", "equal scalars", "ones", "r - 1", "bits", "opposites", "all one", "mostly zero")


@pytest.mark.sample(3)
@each_form
@pytest.mark.parametrize("kind", KINDS)
def test_skewed_sums(form, kind):
    """Buckets with most of the points, and with nothing but doublings or opposites."""
    require_form(form)
    n, curve = 1500, curve_of("bn254_g1")
    scalars, multipliers = skewed(kind, curve.order, n)
    if multipliers is None:
        multipliers, words = msm_multipliers(n), generated("bn254_g1", n)
    else:
        group = accelerant.zk.curve("bn254_g1")
        words = group.mul(group.generator, [m % curve.order for m in multipliers])
    points = launch.to_montgomery(HOST, curve, words).reshape(n, -1)
    found = CpuBases(curve, points, form).msm(encode(curve.scalars, scalars))
    assert affine(curve, found) == expected("bn254_g1", scalars, multipliers)


@pytest.mark.slow
def test_more_workers_than_digits(monkeypatch):
    """Ranges of points keep many cores busy; each gives its part of a digit."""
    curve, points, scalars, wanted = numbered(12000)
    assert cpu_plan(curve.order, 12000, 64).parts > 1
    monkeypatch.setattr(cpu, "usable_cores", lambda: 64)
    assert affine(curve, CpuBases(curve, points).msm(scalars)) == wanted


def test_points_beyond_a_task_are_split(monkeypatch):
    monkeypatch.setattr(cpu, "_TASK_POINTS", 700)
    cpu_plan.cache_clear()
    try:
        curve, points, scalars, wanted = numbered(1500)
        assert cpu_plan(curve.order, 1500, 2).parts == 3
        assert affine(curve, CpuBases(curve, points).msm(scalars)) == wanted
    finally:
        cpu_plan.cache_clear()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("workers", [2, 64])
def test_scratch_keeps_to_the_free_memory(workers, shared, monkeypatch):
    """More ranges of points, then fewer workers; the sum stays the same."""
    curve, points, scalars, wanted = numbered(1500)
    monkeypatch.setattr(cpu, "usable_cores", lambda: workers)
    bases = CpuBases(curve, points, shared=cpu_plan(curve.order, 1500, workers, shared=True) if shared else None)
    aligned, taken = cpu._aligned, []
    monkeypatch.setattr(cpu, "_aligned", lambda size: taken.append(size) or aligned(size))
    assert affine(curve, bases.msm(scalars)) == wanted
    monkeypatch.setattr(cpu, "_SMALL_SCRATCH_BYTES", 0)
    monkeypatch.setattr(cpu, "_free_bytes", lambda: taken[0])
    assert affine(curve, bases.msm(scalars)) == wanted
    assert taken[1] <= cpu._SCRATCH_SHARE * taken[0]


def test_a_sum_without_room_is_refused(monkeypatch):
    monkeypatch.setattr(cpu, "_SMALL_SCRATCH_BYTES", 0)
    monkeypatch.setattr(cpu, "_free_bytes", lambda: 2000)
    with pytest.raises(OutOfMemory, match=r"of 20 points takes [\d,]+ bytes of scratch .*; 1,000 may be taken, 50%"):
        msm([1] * 20, generated("bn254_g1", 20))


def test_a_sum_keeps_one_copy_of_the_points(monkeypatch):
    """The Montgomery words that checks ran on are given up when the kernels' form is made."""
    references = []

    class Watched(CpuBases):
        def __init__(self, curve, points):
            references.extend(weakref.ref(each) for each in (points, points.base) if each is not None)
            super().__init__(curve, points)

        def msm(self, scalars, chosen=None):
            assert [reference() is None for reference in references] == [True] * len(references)
            return super().msm(scalars, chosen)

    monkeypatch.setattr(op, "CpuBases", Watched)
    name, n = "bn254_g1", 20
    curve, scalars = curve_of(name), msm_scalars(curve_of(name), n)
    found = msm(scalars, generated(name, n))
    assert (found == encode_points(curve, [expected(name, scalars, msm_multipliers(n))])[0]).all()
    assert references


def test_threads_sum_at_once():
    """Whatever is kept between calls is shared: kernels, plans, records of the ledger, the points of a base."""
    name, sizes = "bn254_g1", (1, 9, 257, 700)
    curve, key = curve_of(name), FixedBase(name, generated(name, 700))
    rows = {n: encode(curve.scalars, msm_scalars(curve, n)) for n in sizes}
    wanted = {n: encode_points(curve, [expected(name, msm_scalars(curve, n), msm_multipliers(n))])[0] for n in sizes}

    def work(seed):
        order = random.Random(seed).sample(sizes, len(sizes)) * 2
        sums = [(n, msm(rows[n], generated(name, 700)[:n], check=False)) for n in order]
        return [*sums, (700, key.msm(rows[700]))]

    with ThreadPoolExecutor(2) as threads:
        for found in threads.map(work, range(2)):
            assert all((total == wanted[n]).all() for n, total in found)


@pytest.mark.parametrize(("name", "k"), [
    ("bn254_g1", 14),
    *(
        pytest.param(*case, marks=pytest.mark.slow if case[1] == 14 else pytest.mark.soak)
        for case in MSM_ANSWERS
        if case != ("bn254_g1", 14)
    ),
])  # fmt: skip
def test_known_answers(name, k):
    curve = curve_of(name)
    points = generated(name, 1 << k)
    found = msm(encode(curve.scalars, msm_scalars(curve, 1 << k)), points, name)
    assert decode_points(curve, found[None])[0] == MSM_ANSWERS[name, k]


@each_form
@pytest.mark.parametrize("bits", [4, 9])
@pytest.mark.parametrize("group", [1, 3])
def test_no_memory_but_a_workers_own_is_written(form, bits, group, monkeypatch):
    """Buckets of one point take the most slots; all in one bucket take the fewest. Beyond the end stands a pattern."""
    require_form(form)
    storages = []

    def aligned(size):
        storage = np.full(size + 4096, 0xA5, np.uint8)
        start = -storage.ctypes.data % 64
        storages.append(storage[start + size :])
        return storage[start : start + size]

    monkeypatch.setattr(cpu, "_aligned", aligned)
    n = 1 << bits - 1
    curve, points, *_ = numbered(n)
    digits = sum(1 << bits * j for j in range(253 // bits))
    for scalars in ([i * digits for i in range(n)], [1] * n):
        found = CpuBases(curve, points, form).msm(
            encode(curve.scalars, scalars), CpuMsmPlan(bits, -(-256 // bits), 1, group)
        )
        assert affine(curve, found) == expected("bn254_g1", scalars, msm_multipliers(n))
    assert len(storages) == 4
    assert all((rest == 0xA5).all() for rest in storages)


def test_too_many_points_are_refused(monkeypatch):
    monkeypatch.setattr(cpu, "SIGN", 20)
    with pytest.raises(UnsupportedCase, match="fewer than 20 points, multiples too; got 20"):
        msm([1] * 20, generated("bn254_g1", 20))


@pytest.mark.parametrize("n", [0, 1, 100, 1 << 12, 1 << 16, 1 << 20, 1 << 24])
@pytest.mark.parametrize("workers", [1, 2, 128])
@pytest.mark.parametrize("name", ["bn254_g1", "bls12_381_g1"])
def test_plans_hold_every_scalar(name, n, workers):
    """The largest scalar plus the shift fits in the digits, which the kernels read from six words."""
    order = curve_of(name).order
    found = cpu_plan(order, n, workers)
    assert order - 1 + found.shift < 1 << found.bits * found.windows <= 1 << 320
    assert found.parts >= n / (1 << 20)


# --- the public function ---------------------------------------------------------------------------------------------
def test_sums_of_arrays_and_of_integers():
    name, n = "bn254_g1", 20
    curve, points, multipliers = curve_of(name), generated(name, n), msm_multipliers(n)
    scalars = msm_scalars(curve, n)
    wanted = encode_points(curve, [expected(name, scalars, multipliers)])[0]
    assert (msm(scalars, points) == wanted).all()
    assert (msm(encode(curve.scalars, scalars), points, check=False) == wanted).all()
    strided = np.zeros((n, 2, 2, 4), np.uint64)
    strided[:, 0] = points
    assert (msm(scalars, strided[:, 0]) == wanted).all()
    tensor = msm(torch.from_numpy(encode(curve.scalars, scalars)), torch.from_numpy(points.copy()))
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.numpy() == wanted).all()


def test_batches():
    name, n = "bn254_g1", 30
    curve, points, multipliers = curve_of(name), generated(name, n), msm_multipliers(n)
    rows = [msm_scalars(curve, n), [1] * n, [0] * n]
    wanted = encode_points(curve, [expected(name, row, multipliers) for row in rows])
    assert (msm(rows, points) == wanted).all()
    assert (msm(encode(curve.scalars, rows), points) == wanted).all()
    assert (FixedBase(name, points).msm(rows) == wanted).all()
    assert msm(np.zeros((0, n, 4), np.uint64), points).shape == (0, 2, 4)


def test_sums_of_nothing():
    empty = np.zeros((0, 2, 4), np.uint64)
    assert (msm(np.zeros((0, 4), np.uint64), empty) == np.zeros((2, 4), np.uint64)).all()
    assert msm(np.zeros((3, 0, 4), np.uint64), empty).tolist() == np.zeros((3, 2, 4)).tolist()
    key = FixedBase("bn254_g1", empty, multiples=True)
    assert (key.msm(np.zeros((0, 4), np.uint64)) == 0).all()
    assert key.msm(np.zeros((2, 0, 4), np.uint64)).shape == (2, 2, 4)


def test_the_ledger_counts_sums():
    points = generated("bn254_g1", 20)
    accelerant.ledger().reset()
    msm([1] * 20, points)
    msm([[1] * 20, [2] * 20], points)
    rows = {row["case"]: row for row in accelerant.ledger().to_dict()["ops"] if row["op"] == "msm"}
    assert set(rows) == {"20 bn254_g1", "2x20 bn254_g1"}
    assert [(row["calls"], row["own"], row["implementation"]) for row in rows.values()] == [(1, True, "llvm")] * 2


BAD = {
    "unreduced scalar": (
        lambda s, p: (s | np.uint64(1 << 63), p),
        FormatError,
        r"^scalars\[0\] \(flattened\) is not below the order of bn254_g1$",
    ),
    "unreduced point": (lambda s, p: (s, p | np.uint64(1 << 63)), FormatError, r"points\[0\] .*not below the modulus"),
    "scalars of another size": (lambda s, p: (s[:-1], p), ShapeError, r"scalars must be \(20, 4\) or \(b, 20, 4\)"),
    "a row of rows": (lambda s, p: (s[None, None], p), ShapeError, "scalars must be"),
    "limbs": (lambda s, p: (s[:, :3], p), ShapeError, "4 limbs of bn254_fr"),
    "signed": (lambda s, p: (s.astype(np.int64), p), UnsupportedDtype, "scalars must be uint64"),
    "signed points": (lambda s, p: (s, p.astype(np.int64)), UnsupportedDtype, "points must be uint64"),
    "no array": (lambda s, p: ("abc", p), UnsupportedDtype, "scalars must be a NumPy array"),
    "points in rows": (lambda s, p: (s, p[None]), ShapeError, r"points must be \(n, 2, 4\), got \(1, 20, 2, 4\)"),
    "x alone": (lambda s, p: (s, p[:, :1]), ShapeError, r"points must be \(..., 2, 4\)"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_refused(kind):
    change, error, text = BAD[kind]
    scalars = encode(curve_of("bn254_g1").scalars, msm_scalars(curve_of("bn254_g1"), 20))
    assert_raises(error, text, lambda: msm(*change(scalars, generated("bn254_g1", 20))))


def test_the_first_scalar_not_below_the_order_is_named():
    curve = curve_of("bn254_g1")
    scalars = encode(curve.scalars, [1] * 20)
    scalars[7] = scalars[9] = curve.scalars.words(curve.order, 64, 4)
    with pytest.raises(FormatError, match=r"^scalars\[7\] \(flattened\) is not below the order of bn254_g1$"):
        msm(scalars, generated("bn254_g1", 20))
    for wrong in (-1, curve.order):
        with pytest.raises(FormatError, match=r"^scalars\[2\] is not from 0 to below the order$"):
            msm([1, 2, wrong], generated("bn254_g1", 3))


def test_sums_of_field_arrays(monkeypatch):
    monkeypatch.setattr(FieldArray, "canonical", None)  # scalars stay on their device
    points = generated("bn254_g1", 3)
    field = accelerant.zk.field("bn254_fr")
    wanted = msm([5, 6, 7], points)
    assert (msm(field.array([5, 6, 7]), points) == wanted).all()
    assert (FixedBase("bn254_g1", points).msm(field.array([[5, 6, 7]]) * 1) == wanted[None]).all()
    with pytest.raises(ConfigError, match="scalars must be of bn254_fr, got a FieldArray of bn254_fq"):
        msm(accelerant.zk.field("bn254_fq").array([5, 6, 7]), points)


def test_a_point_off_the_curve_is_named():
    points = generated("bn254_g1", 20).copy()
    points[11, 1, 0] ^= np.uint64(1)
    assert_raises(FormatError, r"points\[11\] \(flattened\) .* is not on bn254_g1", lambda: msm([1] * 20, points))
    assert_raises(FormatError, r"points\[11\]", FixedBase, "bn254_g1", points)


@pytest.mark.parametrize("kind", ["scalars of another size", "limbs", "signed", "no array", "unreduced scalar"])
def test_scalars_are_looked_at_before_points_are_checked(kind):
    """The check of points takes longer than the sum."""
    points = generated("bn254_g1", 20).copy()
    points[11, 1, 0] ^= np.uint64(1)
    change, error, text = BAD[kind]
    scalars = encode(curve_of("bn254_g1").scalars, msm_scalars(curve_of("bn254_g1"), 20))
    assert_raises(error, text, lambda: msm(*change(scalars, points)))


def test_an_unknown_curve_is_refused():
    assert_raises(ConfigError, "unknown curve 'secp256k1'", msm, [1], np.zeros((1, 2, 4), np.uint64), "secp256k1")
    with pytest.raises(ConfigError, match=r"unknown entry 'msm_sort'; known are msm_enter, "):
        kernel_source("bn254_g1", "msm_sort")


def test_the_key_is_the_program():
    curves = ("bn254_g1", "bls12_381_g1")
    keys = {kernel_source(name, "msm_finish", form).dialects["llvm"].key for name in curves for form in FORMS}
    assert len(keys) == 4


# --- fixed bases -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("multiples", [None, True, False])
def test_fixed_bases_give_the_same_sums(multiples):
    name, n = "bn254_g1", 300
    curve, points, multipliers = curve_of(name), generated(name, n), msm_multipliers(n)
    key = FixedBase(name, points, multiples=multiples)
    for seed in range(2):
        scalars = [random.Random(seed + i).randrange(curve.order) for i in range(n)]
        wanted = encode_points(curve, [expected(name, scalars, multipliers)])[0]
        assert (key.msm(scalars) == wanted).all()
    assert len(key) == n
    assert repr(key) == "FixedBase('bn254_g1', 300 points, cpu)"
    assert_raises(ShapeError, r"scalars must be \(300, 4\)", lambda: key.msm([1] * 299))


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("name", ["bn254_g1", "bls12_381_g2"])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"], ["cpu"] * 3])
def test_several_devices_share_a_sum(name, devices):
    group, rng = accelerant.zk.curve(name), np.random.default_rng(5)
    for n in (0, 1, 2, 150):
        scalars = rng.integers(0, 2**60, (2, n, 4), dtype=np.uint64)
        points = group.mul(group.generator, rng.integers(0, 2**60, (n, 4), dtype=np.uint64))
        points[n // 2 :: 7] = 0
        wanted = msm(scalars, points, name)
        key = FixedBase(name, points, devices=devices)
        assert (msm(scalars, points, name, devices=devices) == wanted).all()
        assert (key.msm(torch.from_numpy(scalars)) == wanted).all()
        assert (key.msm([int.from_bytes(row.tobytes(), "little") for row in scalars[1]]) == wanted[1]).all()
        assert len(key) == n
        assert len(key.explain().splitlines()) == len(devices)


def test_what_several_devices_refuse():
    group = accelerant.zk.curve("bn254_g1")
    scalars = np.arange(20, dtype=np.uint64).reshape(5, 4)
    points = group.mul(group.generator, scalars)
    for wrong in ([], "cpu"):
        assert_raises(ConfigError, "devices must be a list of devices", msm, scalars, points, devices=wrong)
    with pytest.raises(ConfigError, match=r"device not be given; got \['cpu'\], 'cpu'"):
        FixedBase("bn254_g1", points, "cpu", devices=["cpu"])
    off = points.copy()
    off[3, 0, 0] ^= np.uint64(1)
    with pytest.raises(FormatError, match=r"points\[2:5\]\[1\] \(flattened\) is .*, which is not on bn254_g1"):
        msm(scalars, off, devices=["cpu", "cpu"])
    scalars[4] = 2**64 - 1
    with pytest.raises(FormatError, match=r"scalars\[4\] \(flattened\) is not below the order"):
        msm(scalars, points, devices=["cpu", "cpu"])


def test_fixed_bases_do_not_change_with_the_array():
    """The points are copied when they are checked."""
    points = generated("bn254_g1", 10).copy()
    key = FixedBase("bn254_g1", points)
    before = key.msm([3] * 10)
    points[:] = 0
    assert (key.msm([3] * 10) == before).all()


def test_fixed_bases_of_a_tensor_give_tensors():
    key = accelerant.zk.curve("bn254_g1").precompute(torch.from_numpy(generated("bn254_g1", 10).copy()))
    assert isinstance(key.msm([1] * 10), torch.Tensor)


def test_fixed_bases_explain_themselves(monkeypatch):
    points = generated("bn254_g1", 300)
    text = FixedBase("bn254_g1", points).explain()
    assert text.startswith("300 points of bn254_g1 on cpu, in Montgomery form; ")
    assert "windows of" in text
    assert "share" not in text
    assert "windows share buckets" in FixedBase("bn254_g1", points, multiples=True).explain()
    assert "share" not in FixedBase("bn254_g1", points[:0], multiples=True).explain()
    monkeypatch.setattr(cpu, "_MULTIPLES_SHARE", 0.0)
    assert "share" not in FixedBase("bn254_g1", points, multiples=True).explain()


@pytest.mark.parametrize("name", ["bn254_g1", pytest.param("bn254_g2", marks=pytest.mark.slow)])
@each_form
def test_sums_by_multiples(name, form):
    """Windows that share buckets, for any number of ranges; infinity and opposites among the points."""
    require_form(form)
    curve, rng = curve_of(name), random.Random(form)
    multipliers, points = few(name)
    scalars = [0, 1, curve.order - 1, *(rng.randrange(curve.order) for _ in points[3:])]
    for bits, parts in ((5, 1), (8, 3)):
        shared = CpuMsmPlan(bits, -(-256 // bits), parts, shared=True)
        bases = CpuBases(curve, montgomery(curve, points), form, shared)
        for row in (scalars, [curve.order - 1] * len(points), [0] * len(points)):
            assert affine(curve, bases.msm(encode(curve.scalars, row))) == expected(name, row, multipliers)


def test_points_that_come_in_chunks():
    n = 300
    curve, points, scalars, wanted = numbered(n)
    whole = CpuBases(curve, points)
    for size, most in ((1, n), (100, n), (n, n + 50)):
        found = CpuBases.of_chunks(curve, (points[i : i + size].copy() for i in range(0, n, size)), most)
        assert found.n == n
        assert (found._points == whole._points).all()
        assert affine(curve, found.msm(scalars)) == wanted
    assert CpuBases.of_chunks(curve, iter(()), 0).n == 0
    with pytest.raises(ShapeError, match="wanted 299 points at most"):
        CpuBases.of_chunks(curve, iter((points[:200].copy(), points[200:].copy())), n - 1)
