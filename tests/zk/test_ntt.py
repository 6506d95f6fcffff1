"""zk.ntt against sums of Python integers: every order, kind of array and refusal, on the CPU and on OpenCL."""

import functools
import itertools
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from accelerant.algebra.field.memory_space import HOST
from accelerant.algebra.ntt import launch
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedDtype
from accelerant.runtime.ledger import ledger
from accelerant.zk import field as field_of
from accelerant.zk.multi_scalar import ntt
from refusals import assert_raises
from requirements import require_backend

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
from dft_reference import ntt_dft_reference

from vectors import TRANSFORM_BASE, field_elements

NAMES = ("goldilocks", "babybear", "bn254_fr", "bls12_381_fr")
FORTH, BACK = "natural_to_bit_reversed", "bit_reversed_to_natural"

KNOWN = {
    ("goldilocks", 10): 0x1D6653CA71DB223,
    ("babybear", 10): 0x1C4C5F9,
    ("bn254_fr", 10): 0x92B6629DEB48653CA8C05C52B18A23B8A091C93890BB8958801AD17D61D8FFC,
    ("bls12_381_fr", 10): 0x65C63AF8A1485AFA72D607381DB46BC13B95B0E195B3FE0C1EF1FE950DCA7398,
    ("goldilocks", 16): 0xA8BEB1BA804ADB58,
    ("bn254_fr", 14): 0x142B9B9C6318B2D2F2B4A63F121138BB52D25C074FB06C947B0837E3CD1CF1A9,
}
"""(field, k) -> y_1 of the 2^k inputs below, by Horner's rule on Python integers at w."""


def inputs(field, n):
    return field_elements(field, n, TRANSFORM_BASE)


LIKE_BN254 = pytest.param("bls12_381_fr", marks=pytest.mark.slow)
"""Its programs are bn254_fr's with other constants; each takes LLVM some 0.4 s."""


@pytest.fixture(params=[*NAMES[:-1], LIKE_BN254])
def field(request):
    return field_of(request.param)


# --- answers ---------------------------------------------------------------------------------------------------------
@pytest.mark.slow
def test_small_transforms_are_the_sums(field):
    for log_n, inverse, coset in itertools.product(range(1, 6), (False, True), (None, field.generator)):
        x = inputs(field.parameters, 1 << log_n)
        found = ntt(field.encode(x), field.name, inverse=inverse, coset=coset)
        assert field.decode(found) == ntt_dft_reference(x, field=field.name, inverse=inverse, coset=coset or 1)


@pytest.mark.parametrize(("name", "log_n"), KNOWN, ids=lambda value: str(value))
@pytest.mark.sample(3)
def test_known_answers(name, log_n):
    field = field_of(name)
    y = ntt(field.encode(inputs(field.parameters, 1 << log_n)), field)
    assert field.decode(y[1]) == KNOWN[name, log_n]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["babybear", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES[::2])])
def test_products_of_polynomials(name):
    """Against one product of large integers: coefficients are apart by more bits than their sums have."""
    field = field_of(name)
    half, bits = 2048, 2 * field.modulus.bit_length() + 12
    a, b = inputs(field.parameters, half), inputs(field.parameters, 2 * half)[half:]
    padded = [field.encode([*each, *[0] * half]) for each in (a, b)]
    y = field.mul(*(ntt(each, field, order=FORTH) for each in padded))
    found = field.decode(ntt(y, field, order=BACK, inverse=True))
    packed = [sum(value << bits * i for i, value in enumerate(each)) for each in (a, b)]
    product = packed[0] * packed[1]
    assert found == [(product >> bits * i & (1 << bits) - 1) % field.modulus for i in range(2 * half)]


# --- arrays ----------------------------------------------------------------------------------------------------------
def test_batches_are_transforms_of_their_rows(field):
    x = field.random((2, 3, 64))
    y = ntt(x, field.name)
    assert y.shape == x.shape
    for i, j in np.ndindex(2, 3):
        assert (y[i, j] == ntt(x[i, j], field)).all()
    assert ntt(x[:0], field).shape == x[:0].shape


def test_answers_are_of_the_inputs_kind():
    field = field_of("bn254_fr")
    x = field.random((2, 16))
    y = ntt(x, field)
    assert (ntt(torch.from_numpy(x.copy()), field).numpy() == y).all()
    assert (ntt(x[:, ::-1], field) == ntt(x[:, ::-1].copy(), field)).all()
    assert field.decode(ntt(field.decode(x), field)) == field.decode(y)
    resident = field.array(x)
    found = ntt(resident, inverse=False, coset=field.array(3))
    assert (found.canonical() == ntt(x, field, coset=field.encode(3))).all()
    assert (ntt(found, "bn254_fr", coset=3, inverse=True) == x).all()
    tensors = field.array(torch.from_numpy(x.copy()))
    assert (ntt(tensors).canonical().numpy() == y).all()


@pytest.mark.parametrize("order", ["natural", FORTH, BACK])
@pytest.mark.sample(3)
def test_in_place_and_into_other_memory(order):
    field = field_of("goldilocks")
    for log_n in (3, 12):
        x = field.random((2, 1 << log_n))
        y = ntt(x, field, order=order)
        for kind in (lambda a: a, torch.from_numpy):
            here, there = kind(x.copy()), kind(np.zeros_like(x))
            assert ntt(here, field, order=order, out=there) is there
            assert (np.asarray(here) == x).all()
            assert ntt(here, field, order=order, out=here) is here
            assert (np.asarray(here) == y).all()
            assert (np.asarray(there) == y).all()


@pytest.mark.parametrize("name", ["goldilocks", "babybear"])
def test_memory_on_the_cpu_begins_at_any_word(name):
    field = field_of(name)
    for kind in (lambda a: a, torch.from_numpy):
        memory = np.zeros(12, field.dtype)
        for at in range(4):
            x = field.random(8)
            out = kind(memory)[at : at + 8]
            assert ntt(kind(x), field, out=out) is out
            assert (np.asarray(out) == ntt(x, field)).all()


def test_arrays_of_objects_are_integers(field):
    values = [[1, 2, 3, field.modulus - 1], [5, 6, 7, 8]]
    y, objects = ntt(values, field), np.array(values, object)
    assert (ntt(objects, field) == y).all()
    out = np.empty_like(y)
    assert ntt(objects, field, out=out) is out
    assert (out == y).all()
    assert (ntt(objects + field.modulus, field, reduce=True) == y).all()
    assert objects.tolist() == values


@pytest.mark.parametrize("name", ["goldilocks", "bn254_fr"])
def test_kinds_of_cosets(name):
    """One element, however it is given."""
    field = field_of(name)
    x = field.random(4)
    y = ntt(x, field, coset=5)
    words = field.encode(5)
    for coset in (np.int64(5), words, torch.from_numpy(words), field.array(5), np.array(5, object)):
        assert (ntt(x, field, coset=coset) == y).all()


@pytest.mark.parametrize("name", ["goldilocks", "bn254_fr"])
def test_cosets_that_are_none(name):
    """All are errors of the coset: whatever is below the modulus is an element, of this field."""
    field, other = field_of(name), field_of("babybear")
    x = field.random(4)
    beyond = np.array(field.parameters.words(field.modulus + 1, 64, field.limbs), np.uint64)
    beyond = beyond if field.limbs > 1 else beyond[0]
    for words in (np.asarray(beyond), torch.from_numpy(np.array(beyond))):
        with pytest.raises(ConfigError, match=rf"coset must be from 1 to below .*, got {field.modulus + 1}$"):
            ntt(x, field, coset=words)
    with pytest.raises(ConfigError, match=rf"coset must be an element of {name}, got one of babybear"):
        ntt(x, field, coset=other.array(5))
    with pytest.raises(ConfigError, match=rf"coset must be an element of {name}, got one of babybear"):
        ntt(field.array(x), coset=other.array(5))
    with pytest.raises(UnsupportedDtype, match=f"coset must be one element of {name}, got FieldArray"):
        ntt(x, field, coset=field.array([5]))
    assert_raises(UnsupportedDtype, "coset must be uint64, got uint32", lambda: ntt(x, field, coset=other.encode(5)))


OVERLAPS = {
    "every other word": lambda base: (base[::2], base[4:8]),
    "every other word, the same beginning": lambda base: (base[::2], base[:4]),
    "transposed": lambda base: (base[:4].reshape(2, 2).T, base[:4].reshape(2, 2)),
    "one apart": lambda base: (base[:4], base[1:5]),
}


@pytest.mark.parametrize("kind", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_an_answer_goes_over_no_part_of_the_input(overlap, kind):
    """By what both reach in memory, not by their sizes."""
    base = np.arange(8, dtype=np.uint64)
    x, out = OVERLAPS[overlap](kind(base))
    assert_raises(ShapeError, "here it overlaps x", ntt, x, "goldilocks", out=out)
    assert base.tolist() == list(range(8))


def test_an_answer_may_go_beside_the_input():
    base = np.arange(8, dtype=np.uint64)
    expected = ntt(base[3::-1].copy(), "goldilocks")
    assert (ntt(base[3::-1], "goldilocks", out=base[4:]) == expected).all()
    assert base[:4].tolist() == [0, 1, 2, 3]
    assert_raises(ShapeError, "here it overlaps x", lambda: ntt(base[3::-1], "goldilocks", out=base[:4]))


def test_what_is_not_reduced_may_be():
    field = field_of("babybear")
    x = np.array([field.modulus + 3, 2], np.uint32)
    assert ntt(x, field, reduce=True).tolist() == [5, 1]
    assert ntt([field.modulus + 3, -1], field, reduce=True).tolist() == [2, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "n"), [("babybear", 4), *(pytest.param(name, 64, marks=pytest.mark.slow) for name in NAMES[:3])]
)
def test_on_opencl(name, n):
    """PoCL compiles a pass of so many rows for some seconds, of four for one."""
    require_backend("opencl")
    field = field_of(name)
    x = field.random((3, n))
    y = ntt(x, field, coset=5)
    assert (ntt(x, field, coset=5, device="opencl") == y).all()


@pytest.mark.slow
def test_field_arrays_stay_on_opencl():
    """PoCL compiles five programs."""
    require_backend("opencl")
    field = field_of("babybear")
    x = field.random((3, 64))
    resident = field.array(x, device="opencl")
    found = ntt(resident, coset=5)
    assert found.device == "opencl:0"
    assert (found.canonical() == ntt(x, field, coset=5)).all()


def test_calls_are_in_the_ledger():
    field = field_of("bn254_fr")
    x = field.random((2, 32))
    ledger().reset()
    ntt(ntt(x, field, coset=3), field, inverse=True, order=FORTH)
    rows = {row["case"]: row for row in ledger().to_dict()["ops"]}
    assert set(rows) == {"2x32 bn254_fr coset", f"2x32 bn254_fr inverse {FORTH}"}
    row = rows["2x32 bn254_fr coset"]
    assert (row["op"], row["bytes"], row["flops"], row["calls"]) == ("ntt", 2 * 2 * 32 * 32, 2 * 16 * 5, 1)


def test_plans_are_kept_and_retired(monkeypatch):
    field = field_of("goldilocks")
    plans = launch._Plans()
    monkeypatch.setattr(launch, "_plans", plans)
    x = field.random(256)
    for coset in (None, 3, None, 5):
        ntt(x, field, coset=coset)
    assert [key[5] for key in plans._kept] == [3, 1, 5]
    # Half as many roots as points at least; a coset's powers and, where the CPU has wide vectors, twiddles besides.
    assert all(128 * 8 <= plan.size_bytes <= 2 * 256 * 8 for plan in plans._kept.values())
    kept = list(plans._kept.values())
    ntt(x, field)
    assert list(plans._kept.values()) == [kept[0], kept[2], kept[1]]
    monkeypatch.setattr(launch, "_TABLES_LIMIT_BYTES", 2 * kept[0].size_bytes)
    ntt(x, field, coset=7)
    assert [key[5] for key in plans._kept] == [1, 7]


def test_plans_are_as_many_as_may_be(monkeypatch):
    """However small: a new coset each time would fill the memory with what is beside the tables."""
    field, plans = field_of("goldilocks"), launch._Plans()
    monkeypatch.setattr(launch, "_plans", plans)
    monkeypatch.setattr(launch, "_PLANS_LIMIT", 3)
    x = field.random(2)
    for coset in (2, 3, 4, 5, 3, 6):
        ntt(x, field, coset=coset)
    assert [key[5] for key in plans._kept] == [5, 3, 6]
    assert plans._size_bytes == sum(plan.size_bytes for plan in plans._kept.values()) > 0


class _Plan:
    """In the place of one with tables on a device."""

    def __init__(self, size_bytes=0):
        self.size_bytes, self.retired = size_bytes, False

    def retire(self):
        self.retired = True


def test_a_plan_that_is_there_waits_for_none_that_is_made():
    plans, asked = launch._Plans(), threading.Event()
    kept = plans.get("kept", _Plan)

    def make():
        started.set()
        assert asked.wait(60)
        return _Plan()

    started = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(plans.get, "made", make)
        assert started.wait(60)
        assert plans.get("kept", _Plan) is kept
        asked.set()
        assert plans.get("made", _Plan) is made.result()


def test_threads_that_make_one_plan_get_the_same():
    plans, barrier = launch._Plans(), threading.Barrier(2, timeout=60)

    def make():
        barrier.wait()
        return _Plan(7)

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: plans.get("key", make), range(2))
    assert first is second
    assert plans._size_bytes == 7


def test_dropped_plans_are_retired(monkeypatch):
    """A plan of a device waits then for what reads its tables."""
    plans = launch._Plans()
    monkeypatch.setattr(launch, "_TABLES_LIMIT_BYTES", 10)
    first, second, third = (plans.get(size, functools.partial(_Plan, size)) for size in (6, 4, 9))
    assert [first.retired, second.retired, third.retired] == [True, True, False]
    assert plans._size_bytes == 9
    assert plans.get(6, functools.partial(_Plan, 20)) is not first  # one alone may be too large
    assert list(plans._kept) == [6]


def test_a_transform_whose_plan_is_retired_meanwhile_waits(monkeypatch):
    """Else the tables' memory could be given to others before the device has read them."""
    field, waits = field_of("goldilocks"), []
    monkeypatch.setattr(launch, "_plans", launch._Plans())
    monkeypatch.setattr(HOST.provider, "synchronize", waits.append)
    x = field.random(4)
    y = ntt(x, field)
    assert not waits
    run = launch.run
    monkeypatch.setattr(launch, "run", lambda plan, *rest, **more: (run(plan, *rest, **more), plan.retire())[0])
    assert (ntt(x, field) == y).all()
    assert waits == [0]


def test_threads_transform_at_once():
    """Whatever is kept between calls is shared: kernels, plans, records of the ledger; plans are given up meanwhile."""
    field = field_of("bn254_fr")
    cases = [(field.random((3, 1 << log_n)), coset) for log_n in (1, 5, 9) for coset in (None, 5)]
    wanted = [ntt(x, field, coset=coset) for x, coset in cases]

    def work(seed):
        order = random.Random(seed).sample(range(len(cases)), len(cases))
        found = []
        for i in order * 3:
            x, coset = cases[i][0].copy(), cases[i][1]
            found.append((i, ntt(x, field, coset=coset), ntt(x, field, coset=coset, out=x)))
        return found

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(launch, "_PLANS_LIMIT", 2)
        patch.setattr(launch, "_plans", launch._Plans())
        for found in threads.map(work, range(2)):
            assert all((y == wanted[i]).all() and (here == wanted[i]).all() for i, y, here in found)


# --- refusals --------------------------------------------------------------------------------------------------------
WORDS = np.arange(8, dtype=np.uint64)

REFUSED = [
    ({"x": [1], "field": "babybear"}, ShapeError, r"power of two of points from 2 to 2\^27, got 1$"),
    ({"x": [], "field": "babybear"}, ShapeError, "got 0$"),
    ({"x": [1, 2, 3], "field": "goldilocks"}, ShapeError, "got 3$"),
    ({"x": [0] * 4, "field": "bn254_fq"}, ShapeError, r"ntt over bn254_fq takes a power of two .* to 2\^1, got 4"),
    ({"x": 5, "field": "babybear"}, ShapeError, r"x of shape \(\) has none"),
    ({"x": WORDS[:4], "field": "bn254_fr"}, ShapeError, r"x of shape \(4,\) has none"),
    ({"x": WORDS.reshape(4, 2), "field": "bn254_fr"}, ShapeError, "must end in an axis of the 4 limbs"),
    ({"x": WORDS.astype(np.int64), "field": "goldilocks"}, UnsupportedDtype, "must be uint64, got int64"),
    ({"x": WORDS, "field": "babybear"}, UnsupportedDtype, "must be uint32, got uint64"),
    ({"x": WORDS - np.uint64(1), "field": "goldilocks"}, FormatError, r"x\[0\] \(flattened\) is 18446744073709551615"),
    ({"x": [1, -1], "field": "goldilocks"}, FormatError, r"x\[1\] \(flattened\) is -1, negative"),
    ({"x": WORDS}, ConfigError, "ntt needs field="),
    ({"x": WORDS, "field": "bn128"}, ConfigError, "unknown field 'bn128'"),
    ({"x": WORDS, "field": "goldilocks", "order": "reversed"}, ConfigError, "one of natural, .*, got 'reversed'"),
    ({"x": WORDS, "field": "goldilocks", "coset": 0}, ConfigError, "coset must be from 1 to below .*, got 0"),
    ({"x": WORDS, "field": "babybear", "coset": 2013265921}, ConfigError, "got 2013265921"),
    ({"x": WORDS, "field": "goldilocks", "coset": 1.5}, UnsupportedDtype, "coset must be one element of .*, got float"),
    ({"x": WORDS, "field": "goldilocks", "coset": WORDS}, UnsupportedDtype, "coset must be one element"),
    ({"x": WORDS, "field": "goldilocks", "out": WORDS[:4]}, ShapeError, r"out must have x's shape \(8,\)"),
    ({"x": WORDS[:4], "field": "goldilocks", "out": WORDS[::2]}, ShapeError, "contiguous"),
    ({"x": WORDS, "field": "goldilocks", "out": torch.zeros(8)}, UnsupportedDtype, "x's kind, ndarray, got Tensor"),
    (
        {"x": WORDS, "field": "goldilocks", "out": np.zeros(8)},
        UnsupportedDtype,
        "out must be uint64, as x is, got float64",
    ),
    ({"x": WORDS, "field": "goldilocks", "out": WORDS, "device": "cpu"}, ConfigError, "out= or device=, not both"),
]


@pytest.mark.parametrize(("call", "error", "match"), REFUSED, ids=range(len(REFUSED)))
def test_refusals(call, error, match):
    ledger().reset()
    assert_raises(error, match, ntt, **call)
    assert WORDS.tolist() == list(range(8))
    assert ledger().to_dict()["ops"] == []


def test_field_arrays_are_refused_where_they_cannot_be():
    x = field_of("goldilocks").array(WORDS)
    assert_raises(ConfigError, "x is an array of goldilocks, not of 'babybear'", ntt, x, "babybear")
    assert_raises(ConfigError, "ntt takes no out= for one", ntt, x, out=x)
    assert_raises(ShapeError, "got 3", lambda: ntt(x[:3]))
