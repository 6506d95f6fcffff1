"""The curve's C kernels, exactly: on PoCL, on NVIDIA where there is a GPU; and the registers that they take.

The oracle is the group law on Python integers. What takes long to compile is marked slow.
"""

import dataclasses
import itertools
import random
import re

import numpy as np
import pytest
from kernel_points import packed, unpacked, words_of
from small_orders import of_small_orders, point_out_of_subgroup

from accelerant.algebra.curve.encoding import encode_points
from accelerant.algebra.curve.launch import ADDS, BLOCK, ENTRIES, grid_and_block, kernel_source, point_text, prefixed
from accelerant.algebra.curve.parameters import CURVES, Endomorphism, curve_of, endomorphism
from accelerant.algebra.curve.weierstrass import add, in_subgroup, multiply, negate
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import CUDA_TARGETS, KernelSource, portable_header
from requirements import require_backend

QUICK = {("opencl", "bn254_g1", entry) for entry in ("curve_add", "curve_mul", "curve_off_curve", "curve_inward")}
QUICK |= {("opencl", "bls12_381_g1", "curve_off_subgroup")}
"""One of each kind. PoCL takes one to four seconds to compile another."""


@pytest.fixture
def provider(request):
    return registry.create(require_backend(request.param))


def each(entry):
    """Backend and curve of a test of an entry."""

    def marked(backend, name):
        quick = (backend, name, entry) in QUICK
        marks = [pytest.mark.gpu] if backend == "cuda" else [] if quick else [pytest.mark.slow]
        return pytest.param(backend, name, marks=marks, id=f"{backend}-{name}")

    return [marked(backend, name) for backend in ("opencl", "cuda") for name in CURVES]


def some_points(curve, count, seed=0):
    """Of the subgroup: infinity, the generator and its opposite among them, and points that occur twice."""
    draw = random.Random(f"{curve.name} {seed}")
    few = [multiply(curve, draw.randrange(curve.order), curve.generator) for _ in range(8)]
    few += [None, curve.generator, negate(curve, curve.generator), negate(curve, few[0])]
    return [draw.choice(few) for _ in range(count)]


def run(provider, curve, entry, arrays, out, scalars, n, chunk=1, in_place=None):
    """What an entry writes into `out`, or into one of the arrays; it must not write more."""
    kernel = provider.compile(kernel_source(curve, entry))
    given = [provider.copy_to_device(array) for array in arrays]
    z = provider.copy_to_device(np.concatenate([out.reshape(-1), np.full(4, 2**61, out.dtype)]))
    if in_place is not None:
        z = given[in_place]
    provider.launch(kernel, *((size,) for size in grid_and_block(entry, n, chunk)), (*given, z, *scalars))
    provider.synchronize()
    if in_place is None:
        assert provider.copy_to_host(z, out.dtype, (out.size + 4,))[-4:].tolist() == [2**61] * 4
    return provider.copy_to_host(z, out.dtype, out.shape)


# --- running ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "name"), each("curve_add"), indirect=["provider"])
@pytest.mark.sample(3)
def test_sums(provider, name):
    """Of any two points: equal, opposite, infinite; with one inversion for many, in place too."""
    curve = curve_of(name)
    for n in (1, BLOCK + 1, BLOCK * ADDS + 7):
        x, y = some_points(curve, n), some_points(curve, n, seed=1)
        few = {(p, q): add(curve, p, q) for p, q in zip(x, y, strict=True)}
        expected = [few[pair] for pair in zip(x, y, strict=True)]
        arrays = packed(curve, x), packed(curve, y)
        for in_place in (None, 0, 1) if n == BLOCK + 1 else (None,):
            out = np.zeros_like(arrays[0])
            found = run(provider, curve, "curve_add", arrays, out, (n,), n, in_place=in_place)
            assert unpacked(curve, found) == expected


@pytest.mark.parametrize(("provider", "name"), each("curve_neg"), indirect=["provider"])
@pytest.mark.sample(3)
def test_opposites(provider, name):
    curve = curve_of(name)
    x = some_points(curve, BLOCK + 3)
    array = packed(curve, x)
    found = run(provider, curve, "curve_neg", [array], np.zeros_like(array), (len(x),), len(x))
    assert unpacked(curve, found) == [negate(curve, p) for p in x]


def some_scalars(curve):
    """Ends of ranges, of digits, and numbers that are not reduced."""
    r, draw = curve.order, random.Random(curve.name)
    digits = [int(f"{digit:x}" * 64, 16) for digit in (1, 7, 8, 9, 15)]
    near = [0, 1, 2, 7, 8, 9, 15, 16, 17, r - 1, r, r + 1, 2 * r, 2**255, 2**256 - 1]
    return [*near, *digits, *(draw.randrange(2**256) for _ in range(3))]


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "name"), each("curve_mul"), indirect=["provider"])
@pytest.mark.sample(3)
def test_multiples(provider, name):
    """By any number below 2^256, not reduced: of points in and out of the subgroup, and of infinity."""
    curve, scalars = curve_of(name), some_scalars(curve_of(name))
    other = point_out_of_subgroup(curve) if curve.cofactor != 1 else curve.generator
    n = len(scalars)
    cases = [([some_points(curve, 1)[0]] * (n - 2) + [None, other], 1, scalars, 1), ([other] * n, 0, scalars, 1)]
    cases.append((some_points(curve, n, seed=2), 1, [scalars[-1]] * n, 0))
    for points, x_step, factors, scalar_step in cases:
        arrays = packed(curve, points[: None if x_step else 1]), words_of(factors[: None if scalar_step else 1])
        out = np.zeros((n, *curve.shape), np.uint64)
        found = run(provider, curve, "curve_mul", arrays, out, (n, x_step, scalar_step), n)
        assert unpacked(curve, found) == [multiply(curve, s, p) for s, p in zip(factors, points, strict=True)]


def firsts(provider, curve, entry, points, chunk):
    n, count = len(points), -(-len(points) // chunk)
    return run(
        provider, curve, entry, [packed(curve, points)], np.full(count, -1, np.int64), (n, chunk), n, chunk
    ).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "name"), each("curve_off_curve"), indirect=["provider"])
@pytest.mark.sample(3)
def test_points_off_the_curve_are_found(provider, name):
    curve = curve_of(name)
    k = curve.coordinates
    points = some_points(curve, BLOCK + 20)
    assert firsts(provider, curve, "curve_off_curve", points, 64) == [len(points)] * 3
    x, y = curve.generator
    # not on it: one coordinate 0, exchanged, one more, a point of another curve
    for wrong in ((k.zero, y), (x, k.zero), (y, x), (x, k.add(y, k.one)), (k.one, k.one)):
        bad = [*points[:70], wrong, *points[71:130], wrong, *points[131:]]
        assert firsts(provider, curve, "curve_off_curve", bad, 64) == [len(bad), 70, 130]
        assert firsts(provider, curve, "curve_off_curve", bad, 4096) == [70]
    each = [len(bad)] * len(bad)
    each[70], each[130] = 70, 130
    assert firsts(provider, curve, "curve_off_curve", bad, 1) == each


@pytest.mark.parametrize(("provider", "name"), each("curve_inward"), indirect=["provider"])
@pytest.mark.sample(3)
def test_arguments_of_a_sum_are_converted_and_checked(provider, name):
    """More points than scalars, and fewer; the verdict of each wrong coefficient, point and scalar."""
    curve = curve_of(name)
    k, q, r = curve.coordinates, curve.coordinates.base.modulus, curve.order
    points = some_points(curve, BLOCK + 20)
    words = encode_points(curve, points)
    scalars = np.array([curve.scalars.words(s, 64, 4) for s in (0, 1, r - 1, r >> 64 << 64)] * 50, np.uint64)

    def found(words, scalars):
        x, factors = (provider.copy_to_device(array) for array in (words, scalars))
        z, verdict = (provider.copy_to_device(np.zeros_like(array)) for array in (words, np.zeros(1, np.uint32)))
        kernel, sizes = provider.compile(kernel_source(curve, "curve_inward")), (len(words), len(scalars))
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


@pytest.mark.slow
@pytest.mark.parametrize(("provider", "name"), each("curve_off_subgroup"), indirect=["provider"])
@pytest.mark.sample(3)
def test_points_out_of_the_subgroup_are_found(provider, name):
    """By the definition, r P = infinity: sums of points in and out of it, and every small order that the curve has."""
    curve = curve_of(name)
    points = some_points(curve, 20)
    assert firsts(provider, curve, "curve_off_subgroup", points, 8) == [20] * 3
    if curve.cofactor == 1:
        return
    other = point_out_of_subgroup(curve)
    without = multiply(curve, curve.order, other)  # of an order that divides the cofactor
    wrong = [other, without, *of_small_orders(curve)]
    assert None not in wrong
    wrong += [add(curve, point, curve.generator) for point in wrong]
    for point in wrong:
        assert not in_subgroup(curve, point)
    cleared = multiply(curve, curve.cofactor, other)
    assert firsts(provider, curve, "curve_off_subgroup", [*points, cleared, *wrong], 1) == [
        *[len(points) + 1 + len(wrong)] * (len(points) + 1),
        *range(len(points) + 1, len(points) + 1 + len(wrong)),
    ]


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
    "bn254_g1": (104, 32, 128, 64, 64, 24),
    "bn254_g2": (208, 56, 255, 128, 128, 255),
    "bls12_381_g1": (144, 40, 176, 88, 88, 216),
    "bls12_381_g2": (255, 64, 255, 176, 176, 255),
}
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
