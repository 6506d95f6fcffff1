"""The curve's kernels, exactly: the CPU's in both forms, C on PoCL and on NVIDIA; and the registers that they take."""

import dataclasses
import itertools
import random
import re

import numpy as np
import pytest
from kernel_points import packed, unpacked, words_of
from small_orders import of_small_orders, point_out_of_subgroup

from accelerant.algebra.curve.launch import ADDS, BLOCK, ENTRIES, grid_and_block, kernel_source, point_text, prefixed
from accelerant.algebra.curve.llvm_kernels import curve_kernels
from accelerant.algebra.curve.parameters import CURVES, Endomorphism, curve_of, endomorphism
from accelerant.algebra.curve.weierstrass import add, encode_points, in_subgroup, multiply, negate
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, KernelSource, portable_header
from requirements import require_backend, require_form

FORMS = ("scalar", "vector")
QUICK = (("scalar", "bn254_g1"), ("vector", "bn254_g1"), ("vector", "bn254_g2"), ("vector", "bls12_381_g1"))
"""Cases on the CPU whose compilation is soon done; between them every formula and both sizes of limbs.

PoCL takes one to four seconds to compile another: quick is one that only devices run.
"""


GUARD = 64
"""Words behind what a kernel writes, more than one element."""


def each(places):
    """Places and curves: a form of the CPU's kernels, or a device."""

    def marked(place, name):
        if place == "cuda":
            marks = [pytest.mark.gpu]
        elif place == "opencl":
            marks = [] if places[0] == place and name == "bn254_g1" else [pytest.mark.slow, pytest.mark.sample(3)]
        else:
            marks = [] if (place, name) in QUICK else [pytest.mark.slow]
        return pytest.param(place, name, marks=marks, id=f"{place}-{name}")

    return pytest.mark.parametrize(("place", "name"), [marked(place, name) for place in places for name in CURVES])


each_place = each((*FORMS, "opencl", "cuda"))


def few_points(curve, seed=0):
    """Of the subgroup: infinity, the generator and its opposite among them."""
    draw = random.Random(f"{curve.name} {seed}")
    few = [multiply(curve, draw.randrange(curve.order), curve.generator) for _ in range(8)]
    return [*few, None, curve.generator, negate(curve, curve.generator), negate(curve, few[0])]


def some_points(curve, count, seed=0):
    draw, few = random.Random(seed), few_points(curve, seed)
    return [draw.choice(few) for _ in range(count)]


def outside(curve):
    """A point out of the subgroup, where there is one."""
    return point_out_of_subgroup(curve) if curve.cofactor != 1 else curve.generator


def compiled(place, curve, entry):
    """The provider of a place and its kernel of an entry."""
    if place not in FORMS:
        provider = registry.create(require_backend(place))
        return provider, provider.compile(kernel_source(curve, entry))
    require_form(place)
    provider, kernels = registry.create("cpu"), {"llvm": curve_kernels(curve.name, entry, place)}
    return provider, provider.compile(KernelSource(f"{entry}_{curve.name}_{place}", kernels, {entry: ENTRIES[entry]}))


def run(place, curve, entry, arrays, out, scalars, n, chunk=1, in_place=None):
    """What an entry writes into `out`, or into one of the arrays; it must not write more."""
    provider, kernel = compiled(place, curve, entry)
    given = [provider.copy_to_device(array) for array in arrays]
    z = provider.copy_to_device(np.concatenate([out.reshape(-1), np.full(GUARD, 2**61, out.dtype)]))
    if in_place is not None:
        z = given[in_place]
    sizes = (len(out) + (in_place is None), 1) if place in FORMS else grid_and_block(entry, n, chunk)
    provider.launch(kernel, *((size,) for size in sizes), (*given, z, *scalars))
    provider.synchronize()
    if in_place is None:
        assert (provider.copy_to_host(z, out.dtype, (out.size + GUARD,))[-GUARD:] == 2**61).all()
    return provider.copy_to_host(z, out.dtype, out.shape)


# --- running ---------------------------------------------------------------------------------------------------------
@each_place
def test_sums(place, name):
    """Of any two points: equal, opposite, infinite; about a pack, and with several inversions; in place too."""
    curve, draw = curve_of(name), np.random.default_rng(0)
    points = [*few_points(curve), outside(curve)]
    words, sums = packed(curve, points), packed(curve, [add(curve, p, q) for p in points for q in points])
    for n in (1, 7, 8, 9, BLOCK + 1, BLOCK * ADDS + 7, 4100):
        i, j = draw.integers(len(points), size=(2, n))
        for in_place in (None, 0, 1) if n == BLOCK + 1 else (None,):
            arrays, out = (words[i], words[j]), np.zeros((n, *curve.shape), np.uint64)
            found = run(place, curve, "curve_add", arrays, out, (n,), n, in_place=in_place)
            assert np.array_equal(found, sums[i * len(points) + j])


@each_place
def test_opposites(place, name):
    curve = curve_of(name)
    x = [*some_points(curve, BLOCK + 2), outside(curve)]
    array = packed(curve, x)
    for in_place in (None, 0):
        out = np.zeros_like(array)
        found = run(place, curve, "curve_neg", [array], out, (len(x),), len(x), in_place=in_place)
        assert unpacked(curve, found) == [negate(curve, p) for p in x]


def some_scalars(curve):
    """Ends of ranges, of digits, and numbers that are not reduced."""
    r, draw = curve.order, random.Random(curve.name)
    digits = [int(f"{digit:x}" * 64, 16) for digit in (1, 7, 8, 9, 15)]
    near = [0, 1, 2, 7, 8, 9, 15, 16, 17, r - 1, r, r + 1, 2 * r, 2**255, 2**256 - 1]
    return [*near, *digits, *(draw.randrange(2**256) for _ in range(3))]


@each_place
def test_multiples(place, name):
    """By any number below 2^256, not reduced: of points in and out of the subgroup, and of infinity."""
    curve, scalars = curve_of(name), some_scalars(curve_of(name))
    n, other = len(scalars), outside(curve)
    cases = [([some_points(curve, 1)[0]] * (n - 2) + [None, other], 1, scalars, 1), ([other] * n, 0, scalars, 1)]
    cases += [(some_points(curve, n, seed=2), 1, [scalars[-1]] * n, 0), ([other] * n, 0, [scalars[-1]] * n, 0)]
    for points, x_step, factors, scalar_step in cases:
        arrays = packed(curve, points[: None if x_step else 1]), words_of(factors[: None if scalar_step else 1])
        out = np.zeros((n, *curve.shape), np.uint64)
        found = run(place, curve, "curve_mul", arrays, out, (n, x_step, scalar_step), n)
        assert unpacked(curve, found) == [multiply(curve, s, p) for s, p in zip(factors, points, strict=True)]


def firsts(place, curve, entry, points, chunk):
    n, count = len(points), -(-len(points) // chunk)
    out = np.full(count, -1, np.int64)
    return run(place, curve, entry, [packed(curve, points)], out, (n, chunk), n, chunk).tolist()


def expected_firsts(bad, n, chunk):
    """Of each chunk the least index among `bad`, or n."""
    return [min((i for i in bad if c <= i < c + chunk), default=n) for c in range(0, n, chunk)]


@each_place
def test_points_off_the_curve_are_found(place, name):
    curve = curve_of(name)
    k = curve.coordinates
    points = [*some_points(curve, BLOCK + 19), outside(curve)]
    assert firsts(place, curve, "curve_off_curve", points, 64) == [len(points)] * 3
    x, y = curve.generator
    # not on it: one coordinate 0, exchanged, one more, a point of another curve
    for wrong in ((k.zero, y), (x, k.zero), (y, x), (x, k.add(y, k.one)), (k.one, k.one)):
        bad = [*points[:70], wrong, *points[71:130], wrong, *points[131:]]
        for chunk in (1, 5, 64, 4096):
            wanted = expected_firsts((70, 130), len(bad), chunk)
            assert firsts(place, curve, "curve_off_curve", bad, chunk) == wanted


@each(("opencl", "cuda"))
def test_arguments_of_a_sum_are_converted_and_checked(place, name):
    """More points than scalars, and fewer; the verdict of each wrong coefficient, point and scalar."""
    curve = curve_of(name)
    provider, kernel = compiled(place, curve, "curve_inward")
    k, q, r = curve.coordinates, curve.coordinates.base.modulus, curve.order
    points = some_points(curve, BLOCK + 20)
    words = encode_points(curve, points)
    scalars = np.array([curve.scalars.words(s, 64, 4) for s in (0, 1, r - 1, r >> 64 << 64)] * 50, np.uint64)

    def found(words, scalars):
        x, factors = (provider.copy_to_device(array) for array in (words, scalars))
        z, verdict = (provider.copy_to_device(np.zeros_like(array)) for array in (words, np.zeros(1, np.uint32)))
        sizes = len(words), len(scalars)
        grid, block = grid_and_block("curve_inward", max(sizes))
        provider.launch(kernel, (grid,), (block,), (x, z, factors, verdict, *sizes))
        return provider.copy_to_host(z, np.uint64, words.shape), provider.copy_to_host(verdict, np.uint32, (1,))[0]

    for some in (scalars, scalars[:5]):
        converted, wrong = found(words, some)
        assert np.array_equal(converted, packed(curve, points))
        assert wrong == 0
    for s in (r, r + 1, 2**256 - 1):
        bad = scalars.copy()
        bad[-1] = curve.scalars.words(s, 64, 4)
        assert found(words, bad)[1] == 1
    x, y = curve.generator
    for point in ((k.zero, y), (x, k.zero), (y, x), (x, k.add(y, k.one))):
        bad = words.copy()
        bad[-1] = encode_points(curve, [point])[0]
        assert found(bad, scalars)[1] == 1
    for part in range(2 * k.degree):  # a coefficient plus q: the same point
        bad = words.copy()
        coefficient = bad[7].reshape(-1, k.base.limbs)[part]
        coefficient[:] = k.base.words(int.from_bytes(coefficient.tobytes(), "little") + q, 64, k.base.limbs)
        assert found(bad, scalars[:5])[1] == 1


@each_place
def test_points_out_of_the_subgroup_are_found(place, name):
    """By the definition, r P = infinity: sums of points in and out of it, and every small order that the curve has."""
    curve = curve_of(name)
    points, wrong = some_points(curve, 20), []
    if curve.cofactor != 1:
        other = point_out_of_subgroup(curve)
        points.append(multiply(curve, curve.cofactor, other))
        # The second is of an order that divides the cofactor
        wrong = [other, multiply(curve, curve.order, other), *of_small_orders(curve)]
        wrong += [add(curve, point, curve.generator) for point in wrong]
    assert [in_subgroup(curve, point) for point in points + wrong] == [True] * len(points) + [False] * len(wrong)
    n = len(points) + len(wrong)
    for chunk in (1, 6, 8):
        wanted = expected_firsts(range(len(points), n), n, chunk)
        assert firsts(place, curve, "curve_off_subgroup", points + wrong, chunk) == wanted


@pytest.mark.parametrize("name", CURVES)
def test_the_endomorphism_tells_the_subgroup(name):
    """What the kernels compute, on Python integers."""
    curve = curve_of(name)
    found = endomorphism(curve)
    if curve.cofactor == 1:
        assert found is None
        return
    points = [point for point in some_points(curve, 8) if point is not None]
    for point in [*points, point_out_of_subgroup(curve), add(curve, points[0], point_out_of_subgroup(curve))]:
        image = found.apply(curve, point)
        assert curve.is_on_curve(image)
        assert (image == multiply(curve, found.eigenvalue, point)) == in_subgroup(curve, point)
    assert found.apply(curve, None) is None


def test_other_curves_are_tested_by_a_multiplication_by_r():
    curve = curve_of("bls12_381_g1")
    opposite = dataclasses.replace(curve, generator=negate(curve, curve.generator))
    for other in (dataclasses.replace(curve, name="other_g1"), opposite):
        assert endomorphism(other) == Endomorphism(1, 1, curve.order + 1)


def test_chunks_of_one_point_share_a_block():
    for entry in ("curve_off_curve", "curve_off_subgroup"):
        assert grid_and_block(entry, 1000, 1) == (-(-1000 // BLOCK), BLOCK)
        assert grid_and_block(entry, 1000, 2) == (500, BLOCK)
        assert grid_and_block(entry, 1000, BLOCK) == (-(-1000 // BLOCK), BLOCK)


# --- texts -----------------------------------------------------------------------------------------------------------
def test_an_entrys_program_has_that_entry_alone():
    curve = curve_of("bn254_g2")
    for entry in ENTRIES:
        source = kernel_source(curve, entry)
        assert (source.name, list(source.entries)) == (f"{entry}_bn254_g2", [entry])
        for text in (source.dialects["portable"], source.dialects["cuda"].build("sm_90")):
            assert re.findall(r"^ACL_KERNEL .*void (\w+)\(", text, re.MULTILINE) == [entry]
    assert set(kernel_source(curve).entries) == set(ENTRIES)


@pytest.mark.parametrize("name", CURVES)
def test_the_text_asks_for_no_compiler_and_names_no_placeholder(name):
    """Whatever differs between compilers stands in the header, or in the field's text."""
    text = kernel_source(curve_of(name)).dialects["portable"].partition("fq_exponent")[2]
    assert not re.search(r"#\s*if|#\s*el|defined|\b__\w+|get_global_id|threadIdx", text)
    assert not re.search(r"\b(COORD|BASE|FIELD)(_|\b)", text)


def test_unknown_entries_are_refused():
    with pytest.raises(ConfigError, match="bn254_g1 has no entry 'curve_double'; it has curve_add"):
        kernel_source(curve_of("bn254_g1"), "curve_double")


# --- what a GPU gives ------------------------------------------------------------------------------------------------
REGISTERS = {
    "bn254_g1": (104, 32, 128, 64, 64, 24), "bn254_g2": (208, 56, 255, 128, 128, 255),
    "bls12_381_g1": (144, 40, 176, 88, 88, 216), "bls12_381_g2": (255, 64, 255, 176, 176, 255),
}  # fmt: skip
"""Of each entry, the most a thread may take of NVIDIA's 255; just above what ptxas 13.0 gives for sm_90."""

SPILLS = {"bn254_g2": 64, "bls12_381_g2": 640}
"""Bytes, where registers run out: beside calls of a product of 42 or 144 wide multiply-adds each."""

CURVE_OF = dict(zip(ENTRIES, [*CURVES] * 2, strict=False))
"""The curve for which an entry's budget is tested in each run, for sm_90a: each of both once at least."""

BUDGETS = [
    pytest.param(
        target,
        name,
        entry,
        marks=[pytest.mark.slow] if (target, name) == ("sm_90a", CURVE_OF[entry]) else [pytest.mark.soak],
        id=f"{target}-{name}-{entry}",
    )
    for target, name, entry in itertools.product(("sm_80", "sm_90a"), CURVES, ENTRIES)
]


@pytest.mark.parametrize(("target", "name", "entry"), BUDGETS)
def test_nvrtc_compiles_with_few_registers(target, name, entry, compile_cuda):
    source = kernel_source(curve_of(name), entry)
    assert source.pick(("cuda", "portable", "triton"))[0] == "cuda"
    resources = compile_cuda(source, target).resources[entry]
    assert 0 < resources.registers <= REGISTERS[name][list(ENTRIES).index(entry)]
    assert resources.spill_bytes <= SPILLS.get(name, 0)


@pytest.mark.sample(len(CUDA_TARGETS))
@pytest.mark.slow
@pytest.mark.parametrize("target", CUDA_TARGETS)
def test_nvrtc_compiles_for_each_target(target, compile_cuda):
    source = kernel_source(curve_of("bn254_g1"), "curve_add")
    assert target in source.targets
    resources = compile_cuda(source, target).resources["curve_add"]
    assert 0 < resources.registers <= 128
    assert resources.spill_bytes == 0


@pytest.mark.soak
@pytest.mark.parametrize("name", ["bn254_g1", "bls12_381_g2"])
def test_the_portable_text_compiles_for_nvidia_too(name, compile_cuda):
    """What HIP and OpenCL run; ptxas is the strictest reader at hand."""
    source = kernel_source(curve_of(name), "curve_add")
    portable = dataclasses.replace(source, dialects={"portable": source.dialects["portable"]})
    assert compile_cuda(portable, "sm_80").code[:4] == b"\x7fELF"


def test_points_in_a_program_of_ones_own(compile_cuda):
    """point.h under its prefix, beside a kernel of the caller's."""
    curve = curve_of("bn254_g1")
    kernel = (
        "ACL_KERNEL void twice(u64 *x) { COORD_xyzz p = COORD_xyzz_load(x, 0); COORD_xyzz_double(&p);"
        " COORD_xyzz_store(x, 0, p); }"
    )
    text = portable_header() + point_text(curve, "cuda", called=True) + prefixed(curve, kernel)
    binary = compile_cuda(KernelSource("twice", {"cuda": text}, {"twice": ("*u64",)}), "sm_90")
    assert binary.resources["twice"].spill_bytes == 0
