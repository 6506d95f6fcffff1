"""The field kernels, exactly: NVIDIA's carry chains by an emulator, everything where it can run, and what it takes."""

import random
import re
from functools import cache

import numpy as np
import pytest
from ptx_emulator import WORD, execute, parsed

from accelerant.algebra.field import program
from accelerant.algebra.field.parameters import FIELDS, Field
from accelerant.algebra.field.program import BLOCK, entries, field_text, grid_and_block, kernel_source, montgomery_radix
from accelerant.errors import ConfigError
from accelerant.runtime import registry
from accelerant.runtime.compilation.kernel import KernelSource, portable_header
from requirements import require_backend

LARGE = [field for field in FIELDS.values() if field.limbs > 1]


def edges(field):
    """Where carries and reductions change: ends of the range, of limbs, and limbs all set."""
    p, radix = field.modulus, montgomery_radix(field)
    found = [0, 1, 2, p - 1, p - 2, p // 2, p // 2 + 1, radix % p, -radix % p, radix**2 % p]
    for k in range(16, field.bits, 16):
        found += [2**k, 2**k - 1, p - 2**k, p - 2**k + 1, (p >> k << k) - 1, p >> k << k]
    found += [sum(WORD << 64 * i for i in range(5)) & (1 << field.bits - 1) - 1]
    return list(dict.fromkeys(value for value in found if 0 <= value < p))


def elements(field, count, seed=0):
    """So many: the edges in disorder first, then random ones."""
    draw = random.Random(f"{field.name} {count} {seed}")
    first = edges(field)
    draw.shuffle(first)
    return (first + [draw.randrange(field.modulus) for _ in range(count)])[:count]


def packed(field, values):
    dtype = np.dtype(f"<u{field.word_bits // 8}")
    data = b"".join(value.to_bytes(field.size_bytes, "little") for value in values)
    return np.frombuffer(data, dtype).reshape(len(values), field.limbs)


def unpacked(field, array):
    data, size = np.ascontiguousarray(array).tobytes(), field.size_bytes
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


# --- NVIDIA's carry chains, emulated ---------------------------------------------------------------------------------
@cache
def chains(field):
    """Operation -> the instructions of its asm statement, as the program holds them."""
    text = kernel_source(field, "field_mul").dialects["cuda"].build("sm_90")
    macros = re.findall(rf'#define {field.name}_PTX_(\w+)\(z, .*?\) asm\("{{(.*?)}}"', text)
    return {name: parsed(body) for name, body in macros}


def emulate(instructions, limbs, *operands):
    """What the carry chains give, and which instructions lost a carry; names are set once."""
    names = [target for _, target, *_ in instructions if target[0] != "%"]
    assert len(names) == len(set(names))
    registers = {f"%{limbs + i}": limb for i, limb in enumerate(limb for operand in operands for limb in operand)}
    wrapped = execute(instructions, registers)
    return [registers[f"%{i}"] for i in range(limbs)], wrapped


@pytest.mark.parametrize("field", LARGE, ids=lambda field: field.name)
@pytest.mark.sample(3)
def test_carry_chains_are_exact(field):
    limbs, p, radix = 2 * field.limbs, field.modulus, montgomery_radix(field)
    back = pow(radix, -1, p)
    values = elements(field, 48)

    def run(name, *operands):
        found, lost = emulate(chains(field)[name], limbs, *(field.words(operand, 32, limbs) for operand in operands))
        # the borrow mask is 0 - 1, m may be 0 - the lowest limb, and a difference below 0 plus p wraps back into range
        assert set(lost) <= ({"subc.u32", "addc.u32"} if name == "SUB" else {"subc.u32", "sub.u32"})
        return sum(limb << 32 * i for i, limb in enumerate(found))

    for x, y in zip(values * 2, values[1:] + values[:1] + values[::-1], strict=True):
        assert run("ADD", x, y) == (x + y) % p
        assert run("SUB", x, y) == (x - y) % p
        assert run("MUL", x, y) == x * y * back % p
    for x in values:
        assert run("SQUARE", x) == x * x * back % p
    for x in values[::4]:
        for y in (p, radix - 1, radix // 2):  # any number of the limbs, as second factor
            assert run("MUL", x, y) == x * y * back % p
    assert ("DOT2" in chains(field)) == ("SHOUP" in chains(field)) == (p < radix >> 2)
    for x, y, v, w in zip(values, values[::-1], values[7:] + values[:7], values[3:] + values[:3], strict=True):
        if "DOT2" in chains(field):
            assert run("DOT2", x, y, v, w) == (x * y + v * w) * back % p
            assert run("DOT2", p - 1, p - 1, p - 1, w) == (1 - w) * back % p


def shoup(field, x, w, cut=True):
    """X w - q p, with q as a product by a constant sums it; its lower half, where it is cut."""
    n = 2 * field.limbs
    radix = 1 << 32 * n
    v = w * radix // field.modulus
    limbs, others = field.words(x, 32, n), field.words(v, 32, n)
    q = sum(a * b << 32 * (i + j) for i, a in enumerate(limbs) for j, b in enumerate(others) if i + j >= n - 2) // radix
    return (x * w - q * field.modulus) % radix if cut else x * w - q * field.modulus


def unreduced_pairs(field):
    """Numbers of so many limbs, close to multiples of p, of 2^32 and to the end, with factors below p."""
    p, radix = field.modulus, montgomery_radix(field)
    draw = random.Random(field.name)
    some = elements(field, 14)
    ends = [k * p + more for k in range(1, 5) for more in (-2, -1, 0, 1)] + [radix - 1, radix - 2, radix >> 1]
    ends += [radix - (1 << 32 * i) for i in range(1, 2 * field.limbs)]
    first = [x for x in [*some, *ends, *(draw.randrange(4 * p) for _ in range(20))] if x < radix]
    second = [0, 1, p - 1, p >> 1, *some[:4]]
    return [(x, w) for x in first for w in second]


LAZY = [field for field in LARGE if field.bits <= 64 * field.limbs - 2]


@pytest.mark.slow
@pytest.mark.parametrize("field", LAZY, ids=lambda field: field.name)
def test_carry_chains_of_what_is_not_reduced(field):
    """Products by constants, whose highest limb alone loses carries, and lazy sums."""
    n, p, radix = 2 * field.limbs, field.modulus, montgomery_radix(field)

    def run(name, *operands, lost=()):
        found, wrapped = emulate(chains(field)[name], n, *(field.words(operand, 32, n) for operand in operands))
        assert set(wrapped) <= set(lost)
        return sum(limb << 32 * i for i, limb in enumerate(found))

    highest = ("madc.hi.u32", "madc.lo.u32", "mad.lo.u32", "addc.u32")
    for x, w in unreduced_pairs(field):
        found = run("SHOUP", x, w, w * radix // p, lost=highest)
        assert found == shoup(field, x, w) == shoup(field, x, w, cut=False)
        assert found % p == x * w % p
        assert (found - p) * radix < (x + (radix >> 28)) * p  # below (1 + x / R + 2^-28) p
        assert run("LAZY_REDUCE", x, lost=("subc.u32",)) == (x - 2 * p if x >= 2 * p else x)
        if x < 2 * p:
            assert run("LAZY_ADD", x, 2 * p - 1 - w) == x + 2 * p - 1 - w
            assert run("LAZY_SUB", x, 2 * p - 1 - w) == x + w + 1
            assert run("LAZY_SUB", 2 * p - 1 - w, x) == 4 * p - 1 - w - x


@pytest.mark.parametrize("field", LAZY, ids=lambda field: field.name)
def test_products_by_any_limbs(field):
    """The instruction itself, of factors and quotients that belong to no constant: all limbs set, and single ones."""
    n, p, radix = 2 * field.limbs, field.modulus, montgomery_radix(field)
    single = [WORD << 32 * i for i in range(n)]
    values = [0, radix - 1, *single[::2], *(radix - 1 - each for each in single)]
    for i, x in enumerate(values):
        for v in values:
            w = values[i * 7 % len(values)]
            limbs, others = field.words(x, 32, n), field.words(v, 32, n)
            kept = (a * b << 32 * (j + k) for j, a in enumerate(limbs) for k, b in enumerate(others) if j + k >= n - 2)
            found, _ = emulate(chains(field)["SHOUP"], n, limbs, field.words(w, 32, n), others)
            assert sum(limb << 32 * k for k, limb in enumerate(found)) == (x * w - sum(kept) // radix * p) % radix


@pytest.mark.parametrize("field", LARGE, ids=lambda field: field.name)
def test_carry_chains_are_as_short_as_said(field):
    """Wide products, each of which is two of PTX's, and low ones: see field/program.py."""
    n = 2 * field.limbs
    each = 0 if field.modulus & WORD == 1 else n  # for m, or differences
    said = {"MUL": (2 * n * n, each), "SQUARE": (n * (n + 1) // 2 + n * n, each)}
    if field in LAZY:
        said |= {"DOT2": (3 * n * n, each), "SHOUP": (n * n - (n - 2) * (n - 1) // 2 + n * (n - 1), 2 * n)}
        assert n != 8 or said["SHOUP"] == (99, 16)
    for name, (wide, low) in said.items():
        kinds = [line[0].split(".") for line in chains(field)[name]]
        assert sum(kind[0] in ("mul", "mad", "madc") and "hi" in kind for kind in kinds) == wide
        assert sum(kind[0] in ("mul", "mad", "madc") and "lo" in kind for kind in kinds) == wide + low


# --- texts -----------------------------------------------------------------------------------------------------------
def test_a_program_can_hold_several_fields(compile_cuda):
    """Each under its prefix, in one text; here the two fields of a curve, with carry chains."""
    texts = [field_text(FIELDS[f"bn254_{prefix}"], prefix, "cuda") for prefix in ("fq", "fr")]
    kernel = (
        "ACL_KERNEL void both(u64 *x, u64 *y) { fq_store(x, 0, fq_square(fq_load(x, 0))); fr_store(y, 0, fr_one()); }"
    )
    text = "".join([portable_header(), *texts, kernel])
    assert "FIELD" not in text.partition(texts[0])[2]
    binary = compile_cuda(KernelSource("both", {"cuda": text}, {"both": ("*u64", "*u64")}), "sm_90")
    assert binary.resources["both"].spill_bytes == 0


def test_an_entrys_program_has_that_entry_alone():
    field = FIELDS["bn254_fr"]
    for entry in entries(field):
        source = kernel_source(field, entry)
        assert (source.name, list(source.entries)) == (f"{entry}_bn254_fr", [entry])
        for text in (source.dialects["portable"], source.dialects["cuda"].build("sm_90")):
            text = text.rpartition("#define bn254_fr_BLOCK")[2]
            found = re.findall(r"^(?:bn254_fr_MAP2?\(|ACL_KERNEL void )(field_\w+)", text, re.MULTILINE)
            assert set(found) == {entry}
    assert set(kernel_source(field).entries) == set(entries(field))


def test_unknown_dialects_and_entries_are_refused():
    with pytest.raises(ConfigError, match="dialects portable and cuda, got 'metal'"):
        field_text(FIELDS["babybear"], "f", "metal")
    with pytest.raises(ConfigError, match="babybear has no entry 'field_root'; it has field_add"):
        kernel_source(FIELDS["babybear"], "field_root")


@pytest.mark.parametrize(("modulus", "generator"), [(2**256 - 2**32 - 977, 3), (2**130 - 5, 2), (2**32 - 5, 2)])
def test_moduli_that_the_arithmetic_does_not_fit_are_refused(modulus, generator):
    """No spare bit, and three words."""
    with pytest.raises(ConfigError, match=f"got {modulus.bit_length()} bits"):
        field_text(Field("other", modulus, generator), "other", "cuda")


# --- running ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def provider(request):
    return registry.create(require_backend(request.param))


def run(provider, source, entry, field, arrays, count, scalars, n, chunk=1, dtype=None, in_place=False):
    """What an entry writes: so many elements, or numbers of a dtype; it must not write more."""
    kernel = provider.compile(source, entry=entry)
    dtype = np.dtype(dtype or f"u{field.word_bits // 8}")
    hosted = [array if isinstance(array, np.ndarray) else packed(field, array) for array in arrays]
    given = [provider.copy_to_device(array) for array in hosted]
    size = count * (field.size_bytes if dtype.kind == "u" else dtype.itemsize)
    out = given[0] if in_place else provider.copy_to_device(np.full(size + 32, 0xFF, np.uint8))
    grid, block = ((size,) for size in grid_and_block(entry, n, chunk))
    pointers = [given[0], out, *given[1:]] if entry.startswith("field_pow") else [*given, out]
    provider.launch(kernel, grid, block, (*pointers, *scalars))
    provider.synchronize()
    written = provider.copy_to_host(out, np.uint8, (size,))
    if not in_place:
        assert provider.copy_to_host(out, np.uint8, (size + 32,))[size:].tolist() == [0xFF] * 32
    return unpacked(field, written) if dtype.kind == "u" else written.view(dtype).tolist()


FUNCTIONS = {
    "F_add(a, b)": lambda a, b, p, radix, back: (a + b) % p,
    "F_sub(a, b)": lambda a, b, p, radix, back: (a - b) % p,
    "F_mul(a, b)": lambda a, b, p, radix, back: a * b * back % p,
    "F_to_montgomery(a)": lambda a, b, p, radix, back: a * radix % p,
    "F_select(F_is_zero(a), F_one(), b)": lambda a, b, p, radix, back: b if a else radix % p,
    "F_select(0 - F_is_reduced(a), F_zero(), b)": lambda a, b, p, radix, back: 0,
    # the C dialect's are products too; tested with the entries, since compiling one takes PoCL a second
    "F_square(a)": lambda a, b, p, radix, back: a * a * back % p,
    "F_from_montgomery(a)": lambda a, b, p, radix, back: a * back % p,
}


ALIKE = ("bn254_fr", "bls12_381_fr")
"""Fields of four words as bn254_fq is: the same programs with other constants."""


OF_WEBGPU = {("bn254_fr", "field_dot_montgomery"), *((name, None) for name in ("goldilocks", "babybear"))}
"""Kernels in WGSL that are slow tests; the others are the same text with other constants.

Lavapipe takes seconds for one of large elements: that one has their arithmetic but for inversions, which BabyBear has.
"""


def slow_but(chosen, *values):
    """A parameter, marked as slow where it is not one of the chosen, as soak where a field is alike, as a GPU's."""
    repeats = [pytest.mark.soak] if values[1] in ALIKE and values[0] != "webgpu" else []
    if values[0] == "webgpu" and (
        not OF_WEBGPU & {values[1:3], (values[1], None)} or values[1:3] == ("goldilocks", "field_inv")
    ):
        repeats = [pytest.mark.soak]
    marks = [pytest.mark.gpu] if values[0] == "cuda" else [] if values in chosen else [pytest.mark.slow, *repeats]
    return pytest.param(*values, marks=marks, id="-".join(values))


OWN_PROGRAMS = {("opencl", name) for name in ("goldilocks", "babybear", "bn254_fq")} | {("cpu", "goldilocks")}


@pytest.mark.parametrize(
    ("provider", "name"),
    [slow_but(OWN_PROGRAMS, backend, name) for backend in ("cpu", "opencl", "cuda") for name in FIELDS],
    indirect=["provider"],
)
@pytest.mark.sample(3)
def test_arithmetic_in_a_program_of_ones_own(provider, name):
    """What field_text gives, under a prefix, in the dialect that the device prefers."""
    field = FIELDS[name]
    functions = list(FUNCTIONS)[: len(FUNCTIONS) if provider.name == "cuda" else -2]
    stores = "".join(f"F_store(z, {k} * n + i, {call});" for k, call in enumerate(functions))
    arguments = "ACL_GLOBAL const F_WORD *x, ACL_GLOBAL const F_WORD *y, ACL_GLOBAL F_WORD *z, i64 n"
    guarded = f"if (i < n) {{ F a = F_load(x, i); F b = F_load(y, i); {stores} }}"
    kernel = f"ACL_KERNEL void probe({arguments}) {{ i64 i = acl_global_id(); {guarded} }}"
    e = f"*u{field.word_bits}"
    dialects = {"portable": field_text(field, "F", "portable") + kernel}
    if provider.name == "cuda":
        dialects["cuda"] = portable_header() + field_text(field, "F", "cuda") + kernel
    source = KernelSource("probe", dialects, {"probe": (e, e, e, "i64")})
    some = elements(field, 60)
    pairs = [(x, y) for x in some[:12] for y in some[:12]] + [(x, y) for x in some for y in reversed(some[-6:])]
    x, y = (list(part) for part in zip(*pairs, strict=True))
    p, radix = field.modulus, montgomery_radix(field)
    back = pow(radix, -1, p)
    found = run(provider, source, "probe", field, [x, y], len(functions) * len(x), (len(x),), len(x))
    for k, call in enumerate(functions):
        expected = [FUNCTIONS[call](a, b, p, radix, back) for a, b in pairs]
        assert found[k * len(x) : (k + 1) * len(x)] == expected, call


LAZY_CALLS = {
    "F_shoup(x, w, v)": shoup,
    "F_lazy_reduce(x)": lambda field, x, w: x - 2 * field.modulus * (x >= 2 * field.modulus),
    "F_lazy_add(F_lazy_reduce(x), w)": lambda field, x, w: x - 2 * field.modulus * (x >= 2 * field.modulus) + w,
    "F_lazy_sub(F_lazy_reduce(w), w)": lambda field, x, w: 2 * field.modulus,
    "F_lazy_sub(w, F_shoup(x, w, v))": lambda field, x, w: w - shoup(field, x, w) + 2 * field.modulus,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider", "name"),
    [slow_but({("opencl", "bn254_fr")}, backend, each.name) for backend in ("opencl", "cuda") for each in LAZY],
    indirect=["provider"],
)
def test_what_is_not_reduced_in_a_program(provider, name):
    """Products by constants and lazy sums, of numbers below 4 p."""
    field = FIELDS[name]
    stores = "".join(f"F_store(z, {k} * n + i, {call});" for k, call in enumerate(LAZY_CALLS))
    loads = "".join(f"F {each} = F_load({each}s, i); " for each in "xwv")
    arguments = "".join(f"ACL_GLOBAL const F_WORD *{each}s, " for each in "xwv")
    kernel = f"ACL_KERNEL void probe({arguments}ACL_GLOBAL F_WORD *z, i64 n) {{ i64 i = acl_global_id(); "
    kernel += f"if (i < n) {{ {loads}{stores} }} }}"
    dialects = {"portable": field_text(field, "F", "portable") + kernel}
    if provider.name == "cuda":
        dialects["cuda"] = portable_header() + field_text(field, "F", "cuda") + kernel
    source = KernelSource("probe", dialects, {"probe": (*["*u64"] * 4, "i64")})
    pairs = [(x, w) for x, w in unreduced_pairs(field) if x < 4 * field.modulus]
    arrays = [[x for x, _ in pairs], [w for _, w in pairs]]
    arrays.append([w * montgomery_radix(field) // field.modulus for w in arrays[1]])
    n = len(pairs)
    found = run(provider, source, "probe", field, arrays, len(LAZY_CALLS) * n, (n,), n)
    for k, (call, expected) in enumerate(LAZY_CALLS.items()):
        assert found[k * n : (k + 1) * n] == [expected(field, x, w) for x, w in pairs], call


OPERATIONS = {
    "add": lambda a, b, p, exponent: (a + b) % p,
    "sub": lambda a, b, p, exponent: (a - b) % p,
    "mul": lambda a, b, p, exponent: a * b % p,
    "square": lambda a, b, p, exponent: a * a % p,
    "neg": lambda a, b, p, exponent: -a % p,
    "inv": lambda a, b, p, exponent: pow(a, p - 2, p),
    "pow": lambda a, b, p, exponent: pow(a, exponent, p),
    "reduce": lambda a, b, p, exponent: a % p,
}


def expected_of(entry, field, x, y, exponent):
    """On Python integers, from what an entry is given: canonical elements, or x R where it says Montgomery."""
    p, radix = field.modulus, montgomery_radix(field)
    back = pow(radix, -1, p)
    op = entry.removeprefix("field_")
    if op == "to_montgomery":
        return [a * radix % p for a in x]
    if op == "from_montgomery":
        return [a * back % p for a in x]
    inside = op.endswith("_montgomery")
    op = op.removesuffix("_montgomery")
    if inside:
        x, y = ([a * back % p for a in part] for part in (x, y))
    z = [OPERATIONS[op](a, b, p, exponent) for a, b in zip(x, y, strict=True)]
    return [a * radix % p for a in z] if inside else z


ENTRIES = list(entries(FIELDS["babybear"]))
BY_CHUNK = ("field_sum", "field_dot", "field_dot_montgomery", "field_unreduced")
QUICK = {("opencl", "babybear", entry) for entry in ("field_inv", "field_dot")}
QUICK |= {("webgpu", "goldilocks", "field_mul"), ("webgpu", "babybear", "field_unreduced")}
"""One of each kind: the others differ in the function of the field that they call. PoCL takes a second for each."""


def each(wanted, backends=("opencl", "cuda", "webgpu")):
    return [
        slow_but(QUICK, backend, name, entry)
        for backend in backends
        for name in FIELDS
        for entry in ENTRIES
        if wanted(entry)
    ]


def unreduced(field, value):
    """A number of the same words that is not below p, where there is room for one."""
    return min(value + field.modulus, 2 ** (8 * field.size_bytes) - 1)


@pytest.mark.sample(7, 3)
@pytest.mark.parametrize(
    ("provider", "name", "entry"), each(lambda entry: entry not in BY_CHUNK), indirect=["provider"]
)
def test_entries_are_exact(provider, name, entry):
    field, source = FIELDS[name], kernel_source(FIELDS[name], entry)
    exponents = (0, 1, 0x1_0000_0000_0000_0005, field.modulus - 2) if "pow" in entry else (0,)
    for n in (0, 1, 255, 257, *((BLOCK * program.INVERSES + 300,) if "inv" in entry else ())):
        x, y = elements(field, n), elements(field, n, seed=1)
        if entry in ("field_reduce", "field_to_montgomery"):
            x = [unreduced(field, value) if i % 3 == 0 else value for i, value in enumerate(x)]
        for exponent in exponents:
            arrays, scalars = [x], (n,)
            if len(source.entries[entry]) == 4:
                arrays = [x, y]
            elif "pow" in entry:
                words = exponent.to_bytes(-(-field.bits // 64) * 8 + 8, "little")
                arrays, scalars = [x, np.frombuffer(words, np.uint64)], (exponent.bit_length(), n)
            expected = expected_of(entry, field, x, y, exponent)
            for in_place in (False, True)[: 1 + (n == 257)]:
                found = run(provider, source, entry, field, arrays, n, scalars, max(1, n), in_place=in_place)
                assert found == expected, (n, exponent, in_place)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("provider", "name", "entry"), each(lambda entry: entry in BY_CHUNK[:3]), indirect=["provider"]
)
def test_sums_are_exact(provider, name, entry):
    """Chunks of one element, of fewer and of more than a block's threads, the last one short; extra ones do nothing."""
    field, source = FIELDS[name], kernel_source(FIELDS[name], entry)
    p, back = field.modulus, pow(montgomery_radix(field), -1, field.modulus)
    for n, chunk in ((1, 2), (255, 7), (257, 300), (1500, 600)):
        x, y = [p - 1] * (n // 2) + elements(field, n - n // 2), elements(field, n, seed=1)
        terms = (
            x
            if entry == "field_sum"
            else [a * b * (back if "montgomery" in entry else 1) for a, b in zip(x, y, strict=True)]
        )
        count = -(-n // chunk)
        arrays = [x] if entry == "field_sum" else [x, y]
        found = run(provider, source, entry, field, arrays, count, (n, chunk), n + 2 * chunk, chunk)
        assert found == [sum(terms[c * chunk : (c + 1) * chunk]) % p for c in range(count)]


@pytest.mark.parametrize(
    ("provider", "name", "entry"), each(lambda entry: entry == "field_unreduced"), indirect=["provider"]
)
def test_the_first_unreduced_element_of_each_chunk_is_found(provider, name, entry):
    field, source = FIELDS[name], kernel_source(FIELDS[name], entry)
    p, last = field.modulus, 2 ** (8 * field.size_bytes) - 1
    for n, chunk, wrong in (
        (300, 301, ()),
        (1, 2, (0,)),
        (700, 300, (3, 260, 299)),
        (700, 300, (299, 300, 699)),
        (700, 300, (650, 600)),
    ):
        x = elements(field, n)
        for i in wrong:
            x[i] = (p, last, p + 1)[i % 3]
        found = run(provider, source, entry, field, [x], -(-n // chunk), (n, chunk), n, chunk, dtype=np.int64)
        firsts = [min((i for i in wrong if c * chunk <= i < (c + 1) * chunk), default=n) for c in range(-(-n // chunk))]
        assert found == firsts
        assert min(found) == next((i for i, value in enumerate(x) if value >= p), n)


CHECKED = ("field_add", "field_sub", "field_mul", "field_neg", "field_square")
ON_DEVICES = each(lambda entry: entry in CHECKED, ("opencl", "cuda"))  # for WebGPU arguments are checked before


@pytest.mark.sample(5)
@pytest.mark.parametrize(("provider", "name", "entry"), ON_DEVICES, indirect=["provider"])
def test_checked_programs_see_elements_that_are_not_reduced(provider, name, entry):
    """In either argument, at both ends; results of reduced ones are the entry's."""
    field, source, n = FIELDS[name], kernel_source(FIELDS[name], entry, True), 300
    kernel = provider.compile(source, entry=entry)
    count = source.entries[entry].count(f"*u{field.word_bits}") - (field.word_bits == 32) - 1
    given = [elements(field, n, seed=seed) for seed in range(2)][:count]
    grid, block = ((size,) for size in grid_and_block(entry, n, BLOCK))
    for which, at in ((0, None), (0, 0), (0, n - 1), (count - 1, 256)):
        arrays = [list(values) for values in given]
        if at is not None:
            arrays[which][at] = unreduced(field, arrays[which][at] % 3)
        buffers = [provider.copy_to_device(packed(field, values)) for values in arrays]
        out = provider.copy_to_device(packed(field, given[0]))
        verdict = provider.copy_to_device(np.zeros(1, np.uint32))
        provider.launch(kernel, grid, block, (*buffers, out, verdict, n))
        assert provider.copy_to_host(verdict, np.uint32, (1,)).tolist() == [int(at is not None)]
        if at is None:
            written = provider.copy_to_host(out, np.dtype(f"u{field.word_bits // 8}"), (n * field.limbs,))
            assert unpacked(field, written) == expected_of(entry, field, *(given * 2)[:2], 0)


@pytest.mark.gpu
@pytest.mark.parametrize("field", LARGE, ids=lambda field: field.name)
def test_words_that_are_aligned_to_eight_bytes_only(field):
    """The wide loads need sixteen: the kernels look."""
    torch = pytest.importorskip("torch")
    provider, n = registry.create("cuda"), 300
    x, y = elements(field, n), elements(field, n, seed=1)
    whole = [torch.zeros(n * field.limbs + 1, dtype=torch.int64, device="cuda") for _ in range(3)]
    shifted = [each[1:] for each in whole]
    for tensor, values in zip(shifted[:2], (x, y), strict=True):
        tensor.copy_(torch.from_numpy(packed(field, values).reshape(-1).view(np.int64).copy()))
    kernel = provider.compile(kernel_source(field, "field_mul"))
    provider.launch(kernel, *((size,) for size in grid_and_block("field_mul", n)), (*shifted, n))
    found = unpacked(field, shifted[2].cpu().numpy())
    assert found == [a * b % field.modulus for a, b in zip(x, y, strict=True)]
