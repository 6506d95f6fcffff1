"""Random and crafted inputs to everything of zk that is exact, against Python's integers; long under `make soak`."""

import functools
import itertools
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import soak
from accelerant import zk
from accelerant.algebra.curve.parameters import CURVES, curve_of
from accelerant.algebra.curve.weierstrass import (
    add,
    decode_points,
    in_subgroup,
    multiply,
    negate,
    points_from_bytes,
    points_to_bytes,
)
from accelerant.algebra.curve.weierstrass import point_bytes as point_size
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.ntt.plan import ORDERS, ntt_reference
from accelerant.errors import FormatError
from accelerant.zk.multi_scalar import FixedBase, msm, ntt
from refusals import assert_raises

sys.path.append(str(Path(__file__).parents[1] / "algebra"))
from small_orders import checked, of_cofactor, of_small_orders, point_out_of_subgroup

pytestmark = pytest.mark.search(5)

fuzzed = settings(
    max_examples=60 if soak.MINUTES else 12,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


DEVICES = os.environ.get("SOAK_DEVICES")
on_devices = pytest.mark.parametrize(
    "device", DEVICES.split(",") if DEVICES else ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)


@pytest.fixture(autouse=True)
def examples(request, monkeypatch, record_property):
    """Count the examples of a test."""
    handle, tried = request.function.hypothesis, itertools.count()

    @functools.wraps(handle.inner_test)
    def counted(*args, **kwargs):
        next(tried)
        return counted.__wrapped__(*args, **kwargs)

    monkeypatch.setattr(handle, "inner_test", counted)
    yield
    record_property("examples", next(tried))


def each(name, all_of, few):
    """A test for each of these; of all but a few only in a soak."""
    return pytest.mark.parametrize(
        name, [value if value in few else pytest.param(value, marks=pytest.mark.soak) for value in all_of]
    )


small = st.integers(-2, 2)


@st.composite
def below(draw, p):
    """Elements: small, around words' ends and the modulus, around Montgomery's radix, or any."""
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return draw(st.integers(0, p - 1))
    if kind == 1:
        return draw(st.sampled_from([0, 1, 2, p // 2, p // 2 + 1, p - 2, p - 1]))
    if kind == 2:
        return (2 ** draw(st.integers(0, p.bit_length() + 130)) + draw(st.integers(-2, 2))) % p
    ones = (1 << draw(st.integers(0, p.bit_length()))) - 1
    return (ones << draw(st.integers(0, p.bit_length()))) % p


# --- fields ----------------------------------------------------------------------------------------------------------
@each("name", FIELDS, ["babybear", "goldilocks", "bn254_fr"])
@on_devices
@fuzzed
@given(data=st.data())
def test_field_operations(name, device, data):
    field = zk.field(name)
    p = field.modulus
    n = data.draw(st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33]))
    x, y = (data.draw(st.lists(below(p), min_size=n, max_size=n)) for _ in range(2))
    exponent = data.draw(st.one_of(st.integers(-3, 70), st.integers(p - 3, p + 3), st.integers(2**64 - 1, 2**130)))
    units = [value or 1 for value in x]
    exact = {
        "add": [(a + b) % p for a, b in zip(x, y, strict=True)],
        "sub": [(a - b) % p for a, b in zip(x, y, strict=True)],
        "mul": [a * b % p for a, b in zip(x, y, strict=True)],
    }
    a, b = field.encode(x), field.encode(y)
    for op, expected in exact.items():
        assert field.decode(getattr(field, op)(a, b, device=device)) == expected, op
    assert field.decode(field.square(a, device=device)) == [value * value % p for value in x]
    assert field.decode(field.neg(a, device=device)) == [-value % p for value in x]
    assert field.decode(field.inv(field.encode(units), device=device)) == [pow(value, -1, p) for value in units]
    assert field.decode(field.pow(field.encode(units), exponent, device=device)) == [
        pow(value, exponent, p) for value in units
    ]
    assert field.decode(field.sum(a, device=device)) == sum(x) % p
    assert field.decode(field.dot(a, b, device=device)) == sum(exact["mul"]) % p
    u, v, w = (field.array(each, device=device) for each in (x, y, units))
    resident = ((u + v) * u - v * 3) ** 2 / w
    assert resident.ints() == [
        pow((s + t) * s - 3 * t, 2, p) * pow(unit, -1, p) % p for s, t, unit in zip(x, y, units, strict=True)
    ]


@each("name", FIELDS, ["babybear", "bn254_fr"])
@fuzzed
@given(data=st.data())
def test_words_of_strangers(name, data):
    """Words are elements below p and come back the same, or the first that is not is named."""
    field = zk.field(name)
    p, bits = field.modulus, field.parameters.word_bits * field.limbs
    near = st.builds(lambda value, d: max(0, min(2**bits - 1, value + d)), st.sampled_from([0, p, 2**bits - 1]), small)
    values = data.draw(st.lists(st.one_of(st.integers(0, 2**bits - 1), below(p), near), min_size=1, max_size=20))
    raw = b"".join(value.to_bytes(bits // 8, "little") for value in values)
    words = np.frombuffer(raw, field.dtype).reshape((-1, field.limbs) if field.limbs > 1 else -1).copy()
    wrong = next((i for i, value in enumerate(values) if value >= p), None)
    assert field.decode(words, reduce=True) == [value % p for value in values]
    if wrong is None:
        assert field.decode(words) == values
        assert np.array_equal(field.encode(values), words)
        assert np.array_equal(field.array(words).canonical(), words)
    else:
        assert_raises(FormatError, rf"x\[{wrong}\]", field.neg, words)
        assert_raises(FormatError, rf"x\[{wrong}\]", field.encode, values)


# --- transforms ------------------------------------------------------------------------------------------------------
@each("name", [name for name, field in FIELDS.items() if field.two_adicity > 10], ["goldilocks"])
@on_devices
@fuzzed
@given(data=st.data())
@pytest.mark.slow
def test_transforms(name, device, data):
    field = zk.field(name)
    p = field.modulus
    log_n = data.draw(st.integers(1, 11)) if soak.MINUTES else 4  # each size has programs of its own
    values = data.draw(st.lists(below(p), min_size=1, max_size=24))
    seed = data.draw(st.integers(0, 2**32))
    n = 1 << log_n
    x = [values[(i * i + seed) % len(values)] * (i + 1) % p for i in range(n)]
    inverse, order = data.draw(st.booleans()), data.draw(st.sampled_from(ORDERS))
    coset = data.draw(st.one_of(st.just(1), below(p).filter(bool)))
    options = {"inverse": inverse, "coset": coset, "order": order, "device": device}
    y = ntt(field.encode(x), field=name, **options)
    assert field.decode(y) == ntt_reference(x, field=name, inverse=inverse, coset=coset, order=order)
    back = {"natural": "natural", ORDERS[1]: ORDERS[2], ORDERS[2]: ORDERS[1]}[order]
    assert ntt(field.array(y, device=device), inverse=not inverse, coset=coset, order=back).ints() == x


# --- curves ----------------------------------------------------------------------------------------------------------
def multiples(curve):
    """What the generator is multiplied by: near 0, so that points are equal, opposite and infinity, or any."""
    return st.one_of(st.integers(-3, 3), st.integers(0, curve.order - 1))


@each("name", CURVES, ["bn254_g1"])
@on_devices
@fuzzed
@given(data=st.data())
def test_the_group(name, device, data):
    curve, group = curve_of(name), zk.curve(name)
    n = data.draw(st.integers(1, 9))
    p, q = (
        [multiply(curve, k, curve.generator) for k in data.draw(st.lists(multiples(curve), min_size=n, max_size=n))]
        for _ in range(2)
    )
    scalars = data.draw(
        st.lists(st.one_of(st.integers(0, 2**256 - 1), below(curve.order), st.integers(0, 4)), min_size=n, max_size=n)
    )
    x, y = group.encode(p), group.encode(q)
    assert group.decode(group.add(x, y, device=device)) == [add(curve, a, b) for a, b in zip(p, q, strict=True)]
    assert group.decode(group.sub(x, y, device=device)) == [
        add(curve, a, negate(curve, b)) for a, b in zip(p, q, strict=True)
    ]
    assert group.decode(group.double(x, device=device)) == [add(curve, a, a) for a in p]
    assert group.decode(group.neg(x, device=device)) == [negate(curve, a) for a in p]
    assert group.decode(group.mul(x, scalars, device=device)) == [
        multiply(curve, s, a) for s, a in zip(scalars, p, strict=True)
    ]
    total = None
    for a in p:
        total = add(curve, total, a)
    assert group.decode(group.sum(x, device=device)) == total


@each("name", CURVES, ["bn254_g1"])
@on_devices
@fuzzed
@given(data=st.data())
def test_sums_of_multiples(name, device, data):
    """Few different points and scalars among many: buckets meet their own points, their opposites and infinity."""
    curve, group = curve_of(name), zk.curve(name)
    r = curve.order
    bases = data.draw(st.lists(multiples(curve), min_size=1, max_size=6))
    factors = data.draw(st.lists(st.one_of(below(r), st.integers(0, 2)), min_size=1, max_size=6))
    n = data.draw(st.sampled_from([0, 1, 2, 3, 5, 8, 9, 31, 64, 100, 300]))
    rows = data.draw(st.integers(1, 2))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    which, by = rng.integers(len(bases), size=n), rng.integers(len(factors), size=(rows, n))
    words = group.encode([multiply(curve, k, curve.generator) for k in bases])[which]
    scalars = group.scalar_field.encode(factors)[by]
    exact = [
        multiply(curve, sum(factors[s] * bases[k] for s, k in zip(row, which, strict=True)) % r, curve.generator)
        for row in by
    ]
    assert group.decode(FixedBase(name, words, device).msm(scalars)) == exact
    if device == "cpu":
        assert group.decode(msm(scalars, words, name)) == exact


# --- bytes of strangers ----------------------------------------------------------------------------------------------
LAYOUTS = ("evm", "uncompressed", "compressed")


@st.composite
def points(draw, curve):
    """Of the subgroup, or any of the curve, which has others where its cofactor is not 1."""
    if draw(st.booleans()):
        return multiply(curve, draw(multiples(curve)), curve.generator)
    k = curve.coordinates
    parts = [draw(below(k.base.modulus)) for _ in range(k.degree)]
    while True:
        x = k.join(parts)
        y = k.sqrt(curve.right_side(x))
        if y is not None:
            return (x, y) if draw(st.booleans()) else (x, k.neg(y))
        parts[0] = (parts[0] + 1) % k.base.modulus


@st.composite
def point_bytes(draw, curve, layout):
    """A valid encoding, whole or damaged; or no encoding at all."""
    good = bytearray(points_to_bytes(curve, [draw(points(curve))], layout))
    kind = draw(st.integers(0, 6))
    if kind in (0, 6):
        return bytes(good)
    if kind == 1:  # flags and high bits
        good[draw(st.integers(0, len(good) - 1)) if draw(st.booleans()) else 0] ^= 1 << draw(st.integers(0, 7))
        return bytes(good)
    if kind == 2:  # of another length
        return bytes(good)[: draw(st.integers(0, len(good) - 1))] if draw(st.booleans()) else bytes(good) + b"\0"
    if kind == 3:  # coefficients at the modulus
        size = len(points_to_bytes(curve, [None], layout))
        q = curve.coordinates.base.modulus
        value = (q + draw(small)).to_bytes(curve.coordinates.base.size_bytes, "big")
        at = draw(st.integers(0, size - len(value)))
        good[at : at + len(value)] = value
        return bytes(good)
    if kind == 4:
        return draw(st.binary(min_size=len(good), max_size=len(good)))
    return bytes(draw(st.sampled_from([0, 0x40, 0x80, 0xC0, 0xA0, 0xFF])) for _ in range(1)) + bytes(len(good) - 1)


@pytest.mark.sample(3)
@each("name", CURVES, ["bn254_g1", "bls12_381_g1", "bn254_g2"])
@pytest.mark.parametrize("layout", LAYOUTS)
@fuzzed
@given(data=st.data())
def test_bytes_are_a_point_that_has_them_or_are_refused(name, layout, data):
    curve = curve_of(name)
    raw = data.draw(point_bytes(curve, layout))
    points, refused = outcome(lambda: points_from_bytes(curve, raw, layout))
    assert refused or points_to_bytes(curve, points, layout) == raw


def outcome(call):
    """What it gives, and the words of a FormatError."""
    try:
        return call(), ""
    except FormatError as error:
        return None, str(error)


@each("name", CURVES, ["bn254_g1"])
@fuzzed
@given(data=st.data())
def test_kernels_judge_points_as_pythons_integers_do(name, data):
    curve, group = curve_of(name), zk.curve(name)
    layout = data.draw(st.sampled_from(LAYOUTS))
    raw = b"".join(data.draw(st.lists(point_bytes(curve, layout), min_size=1, max_size=5)))
    expected, refused = outcome(lambda: checked(curve, points_from_bytes(curve, raw, layout)))
    words, also_refused = outcome(lambda: group.from_bytes(raw, layout))
    assert bool(refused) == bool(also_refused)
    if also_refused.startswith("points["):  # kernels name the first off the curve, else the first off the subgroup
        index, size = int(also_refused[7 : also_refused.index("]")]), point_size(curve, layout)
        assert outcome(lambda: checked(curve, points_from_bytes(curve, raw[index * size :][:size], layout)))[1]
    if not refused:
        assert decode_points(curve, words) == expected
        assert group.to_bytes(words, layout) == raw


@each("name", CURVES, ["bn254_g1"])
@fuzzed
@given(data=st.data())
def test_words_of_points_are_refused_where_python_refuses_them(name, data):
    """One word of some good points changed: mostly off the curve, sometimes not below the modulus."""
    curve, group = curve_of(name), zk.curve(name)
    multipliers = data.draw(st.lists(multiples(curve), min_size=1, max_size=6))
    words = group.encode([multiply(curve, k, curve.generator) for k in multipliers])
    at = data.draw(st.integers(0, words.size - 1))
    word = np.uint64(data.draw(st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**64 - 1]))))
    assume(words.reshape(-1)[at] != word)
    words.reshape(-1)[at] = word
    expected, refused = outcome(lambda: checked(curve, decode_points(curve, words)))
    if refused:
        with pytest.raises(FormatError, match=rf"points\[{at // words[0].size}\]"):
            msm([1] * len(multipliers), words, name, check=True)
        return
    total = None
    for point in expected:
        total = add(curve, total, point)
    assert group.decode(msm([1] * len(multipliers), words, name)) == total


def curve_points(curve):
    """Points that a stranger may send, by kind; each is on the curve but those "off"."""
    k, outside = curve.coordinates, point_out_of_subgroup(curve) if curve.cofactor > 1 else curve.generator
    x, y = curve.generator
    found = {
        "infinity": [None],
        "subgroup": [
            curve.generator,
            negate(curve, curve.generator),
            multiply(curve, curve.order // 3, curve.generator),
        ],
        "off": [(x, k.add(y, k.one)), (y, x), (k.zero, k.one), (k.one, k.zero), (k.neg(x), y)],
    }
    if curve.cofactor > 1:
        small = of_small_orders(curve) or [of_cofactor(curve, 1)]
        found |= {"outside": [outside], "cofactor": small, "mixed": [add(curve, curve.generator, p) for p in small]}
    return {kind: points for kind, points in found.items() if points}


SENT = functools.cache(lambda name: curve_points(curve_of(name)))


@pytest.mark.slow
@each("name", CURVES, ["bls12_381_g1"])
@on_devices
@fuzzed
@given(data=st.data())
def test_hostile_points_are_refused_and_the_others_summed(name, device, data):
    """Each check refuses exactly what it says, wherever points enter; a sum that passes is the group law's."""
    curve, group, sent = curve_of(name), zk.curve(name), SENT(name)
    n, kinds = data.draw(st.sampled_from([1, 2, 7, 130])), list(sent)
    some = data.draw(st.lists(st.sampled_from(kinds).flatmap(lambda kind: st.sampled_from(sent[kind])), max_size=7))
    points = ([None, *sent["subgroup"]] * n)[:n]
    for point in some[:n]:
        points[data.draw(st.integers(0, n - 1))] = point
    scalars = data.draw(st.lists(below(curve.order), min_size=n, max_size=n))
    on = [curve.is_on_curve(point) for point in points]
    inside = [each and in_subgroup(curve, point) for each, point in zip(on, points, strict=True)]
    exact = functools.reduce(functools.partial(add, curve), map(functools.partial(multiply, curve), scalars, points))
    # On a curve of even order the kernels add points of the subgroup only.
    passed = {"curve": on if curve.cofactor % 2 else inside, "subgroup": inside}
    words = group.encode(points)
    if device == "cuda":
        words = torch.from_numpy(words).cuda()

    def summed(check):
        if device in ("cpu", "cuda"):
            yield lambda: msm(scalars, words, name, **({} if check == "curve" else {"check": check}))
        options = {} if check == "subgroup" else {"check": check}
        yield lambda: group.precompute(words, device=device, **options).msm(scalars)

    for check, good in passed.items():
        for call in summed(check):
            total, refused = outcome(call)
            wrong = on if False in on else good
            if False in wrong:
                what = "is not on" if False in on else "is out of the subgroup of"
                assert refused.startswith(f"points[{wrong.index(False)}] (flattened) is ")
                assert refused.endswith(f", which {what} {name}")
            else:
                assert group.decode(total) == exact
    raw = points_to_bytes(curve, points, "uncompressed")
    for call in (lambda: group.from_bytes(raw, "uncompressed"), lambda: group.mul(words, 1, device=device)):
        assert bool(outcome(call)[1]) == (False in inside)
