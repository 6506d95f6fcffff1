"""The CPU's field kernels against Python integers: every entry, every field, one element at a time and several."""

import functools
import platform
import random
import re

import llvmlite.binding as llvm
import numpy as np
import pytest

from accelerant.algebra.field.llvm_kernels import ENTRIES, FORMS, field_kernels, host_form, packed_field
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import entries
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource
from accelerant.runtime.compilation.llvm import FunctionBuilder, program
from refusals import assert_raises
from requirements import require_form

N, FEW = 10_007, 2_003
"""No multiples of a register's 8 or 16 elements; FEW are more than share an inversion."""

ALIKE = {"bn254_fr", "bls12_381_fr"}
"""Fields of four words as bn254_fq is: the same program with other constants, so they are among the slow tests."""

CASES = [
    pytest.param((name, form), id=f"{name}-{form}", marks=[pytest.mark.slow] if name in (*ALIKE, "mersenne61") else [])
    for name in FIELDS
    for form in FORMS
]


@functools.cache
def compiled(name, form):
    """All entries, compiled and loaded once."""
    require_form(form, FIELDS[name].limbs)
    builder = field_kernels(name, form=form)
    source = KernelSource(f"field_{name}_{form}", {"llvm": builder}, entries(FIELDS[name]))
    return {entry: registry.create("cpu").compile(source, entry=entry).handle for entry in source.entries}


class Runner:
    """Kernels of one field and form on lists of integers."""

    def __init__(self, name, form):
        self.field, self.form = FIELDS[name], form
        self.p = self.field.modulus
        self.kernels = compiled(name, form)
        self.radix = packed_field(self.field, form).memory_radix
        self.unradix = pow(self.radix, -1, self.p)
        self.top = 1 << 8 * self.field.size_bytes

    def words(self, values):
        text = b"".join(value.to_bytes(self.field.size_bytes, "little") for value in values)
        return np.frombuffer(text, f"<u{self.field.word_bits // 8}").copy()

    def __call__(self, entry, x, *others, n=None, parts=((0, N + 300),)):
        """The elements that an entry writes, and that it writes no more; in parts, as threads would do them."""
        n = len(x) if n is None else n
        arrays = [self.words(values) for values in (x, *others)]
        z = np.full(len(arrays[0]) + 32, 7, arrays[0].dtype)
        for begin, end in parts:
            self.kernels[entry](begin, end, *(array.ctypes.data for array in (*arrays, z)), n)
        assert (z[n * self.field.limbs :] == 7).all()
        return z[: n * self.field.limbs]

    def check(self, got, expected):
        """Exact equality; names the first element that differs."""
        wanted = self.words(expected)
        different = np.flatnonzero((got != wanted).reshape(-1, self.field.limbs).any(axis=1))
        assert not len(different), f"{len(different)} differ, first {different[0]}"


@pytest.fixture
def run(request):
    return Runner(*request.param)


def each_case(test):
    return pytest.mark.parametrize("run", CASES, indirect=True)(test)


@functools.cache
def operands(name, count=N):
    """x and y: all pairs of edges, then random pairs; below p."""
    field = FIELDS[name]
    p, bits = field.modulus, field.word_bits
    powers = [1 << k for k in range(0, field.bits, 13)] + [1 << k for k in range(bits, field.bits, bits)]
    powers += [1 << k for k in range(52, field.bits, 52)] + [1 << field.bits - 1]
    near = [v for power in powers for v in (power - 1, power, p - power)]
    edges = list(dict.fromkeys(v % p for v in (0, 1, 2, p - 1, p - 2, p // 2, p // 2 + 1, *near)))
    rng = random.Random(name)
    pairs = [(x, y) for x in edges for y in edges]
    pairs = rng.sample(pairs, min(len(pairs), count // 2))
    pairs = [(0, 0), (p - 1, p - 1), (0, p - 1), (p - 1, 0), (1, p - 1), *pairs]
    pairs += [(rng.randrange(p), rng.randrange(p)) for _ in range(count - len(pairs))]
    return [x for x, _ in pairs], [y for _, y in pairs]


def test_the_entries_are_those_of_the_other_dialects():
    for field in FIELDS.values():
        own = {f"field_{name}": arguments for name, (arguments, _) in ENTRIES.items()}
        theirs = entries(field)
        assert set(own) == set(theirs)
        for entry, arguments in own.items():
            assert len(arguments) == len(theirs[entry])
            scalars = [argument in ("n", "chunk", "bits") for argument in arguments]
            assert scalars == [kind == "i64" for kind in theirs[entry]]


@pytest.mark.sample(3)
@each_case
def test_sums_and_products(run):
    x, y = operands(run.field.name)
    p, r, u = run.p, run.radix, run.unradix
    pairs = list(zip(x, y, strict=True))
    run.check(run("field_add", x, y), [(a + b) % p for a, b in pairs])
    run.check(run("field_sub", x, y), [(a - b) % p for a, b in pairs])
    run.check(run("field_mul", x, y), [a * b % p for a, b in pairs])
    run.check(run("field_mul_montgomery", x, y), [a * b * u % p for a, b in pairs])
    run.check(run("field_neg", x), [-a % p for a in x])
    run.check(run("field_square", x), [a * a % p for a in x])
    run.check(run("field_square_montgomery", x), [a * a * u % p for a in x])
    run.check(run("field_to_montgomery", x), [a * r % p for a in x])
    run.check(run("field_from_montgomery", x), [a * u % p for a in x])


@pytest.mark.sample(2, 1)
@each_case
def test_operands_that_are_not_reduced(run):
    """Any words are reduced where an entry says so, and may be the second factor."""
    p, top = run.p, run.top
    n, rng = FEW, random.Random(3)
    edges = [0, p - 1, p, p + 1, 2 * p - 1, top - p, top - 1, top >> 1, (top >> 1) - 1]
    wild = [v % top for v in edges] * 4 + [rng.randrange(top) for _ in range(n - 4 * len(edges))]
    x, _ = operands(run.field.name)
    x = x[: n - 8] + [p - 1] * 8
    run.check(run("field_reduce", wild), [v % p for v in wild])
    run.check(run("field_to_montgomery", wild), [v * run.radix % p for v in wild])
    run.check(run("field_from_montgomery", wild), [v * run.unradix % p for v in wild])
    for entry, factor in (("field_mul", 1), ("field_mul_montgomery", run.unradix)):
        run.check(run(entry, x, wild), [a * v * factor % p for a, v in zip(x, wild, strict=True)])
        run.check(run(entry, [p - 1] * n, wild), [-v * factor % p for v in wild])


@each_case
def test_inverses(run):
    x = operands(run.field.name)[0][-FEW:]
    x[0] = x[777] = x[-1] = 0
    expected = [pow(a, -1, run.p) if a else 0 for a in x]
    run.check(run("field_inv", x), expected)
    run.check(run("field_inv", x, parts=((0, 5), (5, 6), (6, 1035), (1035, FEW + 1))), expected)
    run.check(run("field_inv_montgomery", x), [a * run.radix**2 % run.p for a in expected])
    run.check(run("field_inv", [0] * 3), [0] * 3)


@each_case
def test_powers(run):
    x, _ = operands(run.field.name)
    x = x[:50]
    for exponent in (0, 1, 2, 3, 2**64 - 1, 2**64, 2**130 + 5, run.p - 1, run.p - 2):
        words = np.frombuffer(exponent.to_bytes(8 * (exponent.bit_length() // 64 + 1), "little"), np.uint64)
        for entry, factor in (("field_pow", 1), ("field_pow_montgomery", run.radix)):
            array, z = run.words(x), np.empty_like(run.words(x))
            pointers = (array.ctypes.data, z.ctypes.data, words.ctypes.data)
            run.kernels[entry](0, 1 << 40, *pointers, exponent.bit_length(), len(x))
            unfactor = pow(factor, -1, run.p)
            run.check(z, [pow(a * unfactor, exponent, run.p) * factor % run.p for a in x])


@each_case
@pytest.mark.parametrize("chunk", [1, 16, 500, 10**9])
def test_sums_and_dots_of_chunks(run, chunk):
    x, y = (values[:FEW] for values in operands(run.field.name))
    starts = range(0, FEW, chunk)
    for entry, arrays, terms in (
        ("field_sum", (x,), x),
        ("field_dot", (x, y), [a * b for a, b in zip(x, y, strict=True)]),
        ("field_dot_montgomery", (x, y), [a * b * run.unradix for a, b in zip(x, y, strict=True)]),
    ):
        given = [run.words(values) for values in arrays]
        z = np.full(len(starts) * run.field.limbs + 32, 7, given[0].dtype)
        for begin, end in ((0, 1), (1, len(starts) + 9)):
            pointers = [array.ctypes.data for array in (*given, z)]
            run.kernels[entry](begin, end, *pointers, FEW, chunk)
        assert (z[len(starts) * run.field.limbs :] == 7).all()
        run.check(z[: len(starts) * run.field.limbs], [sum(terms[at : at + chunk]) % run.p for at in starts])


@each_case
def test_the_first_element_not_reduced(run):
    x, _ = operands(run.field.name)
    x = list(x)
    x[1007], x[1005], x[N - 1] = run.p, run.top - 1, run.p
    array = run.words(x)
    first = np.full(103, -1, np.int64)
    run.kernels["field_unreduced"](0, 200, array.ctypes.data, first.ctypes.data, N, 100)
    assert first.tolist() == [1005 if c == 10 else N - 1 if c == 100 else N for c in range(101)] + [-1, -1]


@each_case
def test_arrays_may_be_the_same(run):
    x = operands(run.field.name)[0][-FEW:]
    for entry, pointers, expected in (
        ("field_mul", 3, [a * a % run.p for a in x]),
        ("field_inv", 2, [pow(a, -1, run.p) if a else 0 for a in x]),
    ):
        array = run.words(x)
        run.kernels[entry](0, FEW, *[array.ctypes.data] * pointers, FEW)
        run.check(array, expected)


@each_case
@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 15, 16, 17])
def test_every_remainder_of_a_register(run, n):
    """Nothing beyond n is written (the runner looks), nor before begin; nor is anything read past the end."""
    x, y = (values[40 : 40 + n] for values in operands(run.field.name))
    run.check(run("field_mul", x, y), [a * b % run.p for a, b in zip(x, y, strict=True)])
    run.check(run("field_add", x, y, parts=((3, n), (0, 3))), [(a + b) % run.p for a, b in zip(x, y, strict=True)])


@pytest.mark.parametrize("run", [("bn254_fq", form) for form in FORMS], indirect=True, ids=FORMS)
def test_a_launch_over_all_cores(run):
    provider = registry.create("cpu")
    entry = "field_mul_montgomery"
    builder = field_kernels(run.field.name, entry, form=run.form)
    kernel = provider.compile(KernelSource("one", {"llvm": builder}, {entry: entries(run.field)[entry]}))
    x, y = (values * 4 for values in operands(run.field.name))
    a, b = (provider.copy_to_device(run.words(values)) for values in (x, y))
    z = provider.allocate(a.size_bytes)
    provider.launch(kernel, (-(-len(x) // 256),), (256,), (a, b, z, len(x)))
    got = provider.copy_to_host(z, run.words([0]).dtype, (len(x) * run.field.limbs,))
    run.check(got, [s * t * run.unradix % run.p for s, t in zip(x, y, strict=True)])


@pytest.mark.parametrize("case", CASES)
def test_the_functions_serve_other_kernels(case):
    """A kernel of one's own, (x - y)(x + y) / L: what NTT and curves do with a form."""
    name, form = case
    field = FIELDS[name]
    require_form(form, field.limbs)
    packed = packed_field(field, form)
    arguments = ["i64 %begin", "i64 %end", "ptr %x", "ptr %y", "ptr %z"]
    code = FunctionBuilder("difference", arguments, linkage="", attributes="nounwind")
    x, y = (packed.load(code, pointer, "%begin", "%end") for pointer in ("%x", "%y"))
    factors = (packed.call(code, operation, x, y) for operation in ("sub", "add"))
    packed.store(code, "%z", "%begin", "%end", packed.call(code, "mul", *factors))
    code.ret()
    text = program([*packed.functions(), code])
    source = KernelSource(f"difference_{name}_{form}", {"llvm": text}, {"difference": ("*u64", "*u64", "*u64")})
    kernel = registry.create("cpu").compile(source)
    words = Runner.words
    count = packed.lanes
    owner = type("Owner", (), {"field": field})
    xs, ys = (values[:count] for values in operands(name))
    a, b = words(owner, xs), words(owner, ys)
    z = np.empty_like(a)
    kernel.handle(0, count, *(array.ctypes.data for array in (a, b, z)))
    unradix = pow(packed.radix, -1, field.modulus)
    expected = [(s * s - t * t) * unradix % field.modulus for s, t in zip(xs, ys, strict=True)]
    np.testing.assert_array_equal(z, words(owner, expected))


@pytest.mark.parametrize("name", ["bn254_fq", "bls12_381_fq"])
@pytest.mark.parametrize("entry", ["field_add", "field_sub", "field_neg", "field_mul_montgomery"])
@pytest.mark.skipif(platform.machine().lower() not in ("x86_64", "amd64"), reason="reads x86's jumps")
def test_no_branch_on_an_element(name, entry):
    """The machine code of the scalar form has no conditional jump but the loop's two, whatever LLVM made of masks."""
    target = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    module = llvm.parse_assembly(field_kernels(name, entry, "scalar").build(""))
    builder = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    jumps = re.findall(r"^\s+(j(?!mp)\w+)", target.emit_assembly(module), re.MULTILINE)
    assert 1 <= len(jumps) <= 2, jumps


def test_the_form_that_this_processor_gets():
    features = llvm.get_host_cpu_features()
    for field in FIELDS.values():
        needed = "avx512ifma" if field.limbs > 1 else "avx512dq"
        assert host_form(field) == ("vector" if features.get(needed) else "scalar")
        assert field_kernels(field.name).key == field_kernels(field.name, form=host_form(field)).key


def test_what_is_unknown_is_refused():
    assert_raises(ConfigError, "'secp256k1'", lambda: field_kernels("secp256k1").build(""))
    assert_raises(ConfigError, "'field_cube'", lambda: field_kernels("bn254_fr", "field_cube").build(""))
    assert_raises(ConfigError, "'wide'", lambda: field_kernels("bn254_fr", form="wide").build(""))


def test_one_entry_is_its_own_program():
    for name in FIELDS:
        text = field_kernels(name, "field_add", "scalar").build("")
        assert re.findall(r"^define +void @(field_\w+)", text, re.MULTILINE) == ["field_add"]
