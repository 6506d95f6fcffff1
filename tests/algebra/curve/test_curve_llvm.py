"""The CPU's curve kernels against the group law on Python integers: every entry, curve and form of arithmetic."""

from __future__ import annotations

import functools
import platform
import random
import re

import llvmlite.binding as llvm
import numpy as np
import pytest
from kernel_points import packed, unpacked, words_of

from accelerant.algebra.curve.launch import ENTRIES
from accelerant.algebra.curve.llvm_kernels import curve_kernels
from accelerant.algebra.curve.llvm_points import public_digits
from accelerant.algebra.curve.parameters import curve_of
from accelerant.algebra.curve.weierstrass import add, in_subgroup, multiply, negate
from accelerant.algebra.field.memory_space import HOST
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.providers.cpu import _LEVEL, _PASSES

FORMS = ("scalar", "vector")
_QUICK = (("bn254_g1", "scalar"), ("bn254_g1", "vector"), ("bn254_g2", "vector"), ("bls12_381_g1", "vector"))
"""Cases whose compilation is soon done; between them every formula and both sizes of limbs."""

CASES = [
    pytest.param(curve, form, marks=[] if (curve, form) in _QUICK else [pytest.mark.slow], id=f"{curve}-{form}")
    for curve in ("bn254_g1", "bn254_g2", "bls12_381_g1", "bls12_381_g2")
    for form in FORMS
]
each_form = pytest.mark.parametrize("form", FORMS)
each_case = pytest.mark.parametrize(("name", "form"), CASES)


@functools.cache
def compiled(name, entry, form):
    if form == "vector" and not llvm.get_host_cpu_features().get("avx512ifma"):
        pytest.skip("this processor has no AVX512-IFMA")
    source = KernelSource(
        f"{entry}_{name}_{form}",
        {"llvm": curve_kernels(name, entry, form)},
        {entry: ENTRIES[entry]},
    )
    return registry.create("cpu").compile(source)


def launch(name, entry, form, indices, *args):
    """One call; arrays are passed by address."""
    kernel = compiled(name, entry, form)
    values = [HOST.pointer(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
    registry.create("cpu").launch(kernel, (indices,), (1,), values)


@functools.cache
def sample(name, count=23):
    """Infinity, points of the subgroup and of the curve, and opposites of some."""
    curve = curve_of(name)
    rng = random.Random(name)
    points = [None, curve.generator, negate(curve, curve.generator)]
    points += stray(name, 2)
    while len(points) < count:
        point = multiply(curve, rng.randrange(curve.order), curve.generator)
        points += [point, negate(curve, point)]
    return points[:count]


@functools.cache
def stray(name, count):
    """Points of the curve, out of the subgroup where there are such."""
    curve = curve_of(name)
    k, found, step = curve.coordinates, [], 1
    while len(found) < count:
        x = k.join([step, *[1] * (k.degree - 1)])
        y = k.sqrt(curve.right_side(x))
        if y is not None:
            found.append((x, y))
        step += 1
    return found


@each_case
def test_sums_of_any_two_points(name, form):
    """Every pair of the sample, among them equal, opposite and infinite ones; not a multiple of a pack."""
    curve, points = curve_of(name), sample(name, 13)
    pairs = [(p, q) for p in points for q in points]
    x, y = (packed(curve, [pair[i] for pair in pairs]) for i in range(2))
    expected = [add(curve, p, q) for p, q in pairs]
    z = np.full_like(x, 7)
    launch(name, "curve_add", form, len(pairs), x, y, z, len(pairs))
    assert unpacked(curve, z) == expected
    for z in (x.copy(), y.copy()):
        launch(name, "curve_add", form, len(pairs), *((z, y) if (z == x).all() else (x, z)), z, len(pairs))
        assert unpacked(curve, z) == expected


@each_form
@pytest.mark.parametrize("n", [1, 7, 8, 9, 2048, 2049, 4100])
def test_sums_of_any_number_of_points(form, n):
    """One, about a pack, and more than share an inversion; nothing is written beyond n."""
    name = "bn254_g1"
    curve, points = curve_of(name), sample(name)
    x, y = (packed(curve, [points[i * step % len(points)] for i in range(n)]) for step in (1, 3))
    z = np.full((n + 3, *x.shape[1:]), 7, np.uint64)
    launch(name, "curve_add", form, n + 3, x, y, z, n)
    table = {(i, j): add(curve, points[i], points[j]) for i in range(len(points)) for j in range(len(points))}
    expected = [table[i % len(points), i * 3 % len(points)] for i in range(n)]
    assert unpacked(curve, z[:n]) == expected
    assert (z[n:] == 7).all()


@each_case
def test_opposites(name, form):
    curve, points = curve_of(name), sample(name)
    x = packed(curve, points)
    z = np.full((len(x) + 2, *x.shape[1:]), 7, np.uint64)
    launch(name, "curve_neg", form, len(z), x, z, len(x))
    assert unpacked(curve, z[:-2]) == [negate(curve, point) for point in points]
    assert (z[-2:] == 7).all()
    launch(name, "curve_neg", form, len(x), x, x, len(x))
    assert (x == z[:-2]).all()


@each_case
def test_multiples(name, form):
    """Edges of 256 bits, the order and its neighbours, for points in and out of the subgroup and for infinity."""
    curve, rng = curve_of(name), random.Random(form)
    r = curve.order
    scalars = [0, 1, 2, 15, 16, r - 1, r, r + 1, 2**255, 2**256 - 1, rng.randrange(2**256), rng.randrange(r)]
    points = [curve.generator] * len(scalars) + stray(name, 1) * 4 + [None] * 2
    scalars += [r, 2**256 - 1, 1, 0, 5, 0]
    x, s = packed(curve, points), words_of(scalars)
    z = np.full((len(x) + 1, *x.shape[1:]), 7, np.uint64)
    launch(name, "curve_mul", form, len(z), x, s, z, len(x), 1, 1)
    assert unpacked(curve, z[:-1]) == [
        multiply(curve, scalar, point) for scalar, point in zip(scalars, points, strict=True)
    ]
    assert (z[-1] == 7).all()


@each_form
@pytest.mark.parametrize(("x_step", "scalar_step"), [(0, 1), (1, 0), (0, 0)])
def test_one_point_or_one_scalar_for_all(form, x_step, scalar_step):
    curve, n = curve_of("bn254_g1"), 11
    points, scalars = sample("bn254_g1")[3 : 3 + n], [3 + i for i in range(n)]
    x, s = packed(curve, points), words_of(scalars)
    z = np.empty_like(x)
    launch("bn254_g1", "curve_mul", form, n, x, s, z, n, x_step, scalar_step)
    assert unpacked(curve, z) == [multiply(curve, scalars[i * scalar_step], points[i * x_step]) for i in range(n)]


def firsts(name, entry, form, points, chunk):
    x = packed(curve_of(name), points)
    out = np.full(-(-len(points) // chunk) + 1, 7, np.int64)
    launch(name, entry, form, len(out), x, out, len(x), chunk)
    assert out[-1] == 7
    return out[:-1].tolist()


def expected_firsts(bad, chunk):
    n = len(bad)
    return [next((i for i in range(c, min(n, c + chunk)) if bad[i]), n) for c in range(0, n, chunk)]


@each_case
@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_points_off_the_curve(name, form, chunk):
    curve, points = curve_of(name), [*sample(name), *sample(name)]
    k = curve.coordinates
    wrong = {
        3: (k.zero, k.one),
        20: (k.one, k.zero),
        21: (points[5][0], k.add(points[5][1], k.one)),
        40: (k.one, k.one),
    }
    for i, point in wrong.items():
        points[i] = point
    bad = [point is not None and not curve.is_on_curve(point) for point in points]
    assert sum(bad) >= 3
    assert firsts(name, "curve_off_curve", form, points, chunk) == expected_firsts(bad, chunk)


@each_case
def test_points_out_of_the_subgroup(name, form):
    """By the definition: r P is not infinity. Also points whose order is a factor of the cofactor."""
    curve = curve_of(name)
    points = [*sample(name, 7), *stray(name, 9)]
    points += [multiply(curve, curve.order, point) for point in stray(name, 4)]
    points += [multiply(curve, curve.cofactor, point) for point in stray(name, 4)]
    bad = [not in_subgroup(curve, point) for point in points]
    assert any(bad) == (curve.cofactor != 1)
    for chunk in (1, 6):
        assert firsts(name, "curve_off_subgroup", form, points, chunk) == expected_firsts(bad, chunk)


@functools.cache
def built(name, form, cpu):
    """Optimized IR and machine code of curve_mul for an x86 processor, by the options of the CPU's provider."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, opt=_LEVEL, reloc="pic", codemodel="default"
    )
    module = llvm.parse_assembly(curve_kernels(name, "curve_mul", form).build(""))
    module.triple, module.data_layout = target.triple, str(target.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=_LEVEL)
    for option in _PASSES:
        setattr(options, option, True)
    builder = llvm.create_pass_builder(target, options)
    builder.getModulePassManager().run(module, builder)
    return str(module), target.emit_assembly(module)


def each_build(test):
    builds = [("scalar", "x86-64"), ("scalar", "znver4"), ("vector", "znver4"), ("vector", "icelake-server")]
    cases = [("bn254_g1", *build) for build in builds]
    for number, build in enumerate(builds):
        mark = pytest.mark.soak if number % 2 else pytest.mark.slow
        cases.append(pytest.param("bls12_381_g2", *build, marks=mark))
    test = pytest.mark.parametrize(("name", "form", "cpu"), cases)(test)
    is_x86 = platform.machine().lower() in ("x86_64", "amd64")
    return pytest.mark.skipif(not is_x86, reason="reads x86's instructions")(test)


@each_build
def test_multiples_branch_on_no_scalar_and_no_point(name, form, cpu):
    """The machine code has no conditional jump but those of five loops: the digits of the inversion's exponent, packs,
    the table, the digits, the choice. LLVM may unroll the last one wholly, with a volatile mask for each entry.
    """
    text, code = built(name, form, cpu)
    unrolled = text.count("store volatile") == 16
    jumps = re.findall(r"^\s+(j(?!mp)\w+)", code, re.MULTILINE)
    assert len(jumps) == 5 - unrolled, jumps


@each_build
def test_multiples_read_no_memory_under_a_mask(name, form, cpu):
    """But for constants of the program: what is read does not depend on the lanes that a digit chooses."""
    lines = [line.split("#")[0].strip() for line in built(name, form, cpu)[1].splitlines()]
    masked = [line for line in lines if ("{%k" in line and "(" in line) or re.match(r"v?p?maskmov|vp?gather", line)]
    assert [line for line in masked if not re.search(r"\.LCPI\w+\(%rip\)", line)] == []


@pytest.mark.parametrize("number", [1, 2, 7, 0xD201000000010000, (1 << 127) - 1, 0x5A3B_91C7_0000_FFFF_1234_5678])
def test_public_digits(number):
    digits, odd = public_digits(number)
    assert sum(digit << j for j, digit in enumerate(digits)) == number
    assert all(digit == 0 or (digit % 2 and abs(digit) < 2 * odd) for digit in digits)
    assert odd in (1, 4)
    assert odd == 1 or sum(map(bool, digits)) + odd < sum(map(bool, public_digits_without_table(number)))


def public_digits_without_table(number):
    """The non-adjacent form."""
    digits = []
    while number:
        digit = 2 - number % 4 if number % 2 else 0
        digits.append(digit)
        number = (number - digit) // 2
    return digits


def test_what_a_builder_refuses():
    with pytest.raises(ConfigError, match=r"unknown entry 'curve_sub'; known are curve_add, "):
        curve_kernels("bn254_g1", "curve_sub").build("")
    with pytest.raises(ConfigError, match="unknown curve 'bn255_g1'"):
        curve_kernels("bn255_g1", "curve_add").build("")
    with pytest.raises(ConfigError, match="unknown form 'wide'"):
        curve_kernels("bn254_g1", "curve_add", "wide").build("")


def test_the_key_is_the_program():
    keys = {curve_kernels(name, "curve_add", form).key for name in ("bn254_g1", "bn254_g2") for form in FORMS}
    assert len(keys) == 4
    assert curve_kernels("bn254_g1", "curve_add", "scalar").key == curve_kernels("bn254_g1", "curve_add", "scalar").key


def test_a_source_may_have_all_entries():
    text = curve_kernels("bn254_g1", form="scalar").build("")
    assert all(f"define  void @{entry}(" in text for entry in ENTRIES if entry != "curve_inward")  # for devices
