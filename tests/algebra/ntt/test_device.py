"""The passes in C: on OpenCL, with few rows and columns so that all of a plan is met, and what they take on NVIDIA."""

import ctypes
import itertools
import random
import re
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from ptx_emulator import WORD, execute, parsed

from accelerant.algebra.field.memory_space import HOST, space_at
from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.program import montgomery_radix
from accelerant.algebra.field.words import decode, encode
from accelerant.algebra.ntt import launch as ntt_launch
from accelerant.algebra.ntt.launch import (
    LOG_MOST,
    DeviceNttPlan,
    Division,
    Tables,
    device_tables,
    division_of,
    pass_tables,
    roots_of,
    run,
)
from accelerant.algebra.ntt.plan import ORDERS, Tile, Variant, has_quotients, kernel_source, make_passes, ntt_reference
from accelerant.errors import ConfigError, LaunchError
from refusals import assert_raises
from requirements import require_backend
from vectors import TRANSFORM_BASE, field_elements

NAMES = ("goldilocks", "babybear", "bn254_fr", "bls12_381_fr")


OF_WEBGPU = pytest.param("webgpu", marks=[pytest.mark.slow, pytest.mark.soak])  # lavapipe takes seconds a program


@pytest.fixture(params=["opencl", OF_WEBGPU, pytest.param("cuda", marks=pytest.mark.gpu)])
def space(request):
    return space_at(require_backend(request.param))


def check(space, field, log_n, batch, division=None, in_place=False, x=None, **options):
    n = 1 << log_n
    x = field_elements(field, batch * n, TRANSFORM_BASE) if x is None else x
    plan = DeviceNttPlan(space, field, log_n, division=division, **options)
    words = space.load(encode(field, x))
    out = words if in_place else space.load(np.full_like(encode(field, x), 7))
    run(plan, space, words, out, batch * n)
    rows = (x[at : at + n] for at in range(0, batch * n, n))
    assert decode(field, space.store(out)) == [
        y for row in rows for y in ntt_reference(row, field=field.name, **options)
    ]
    assert in_place or decode(field, space.store(words)) == x
    return plan


def slow(name, order):
    """The two large fields have as many limbs: the second only repeats the first."""
    marks = [pytest.mark.slow, pytest.mark.soak] if name == "bls12_381_fr" else [pytest.mark.slow]
    return pytest.param(name, order, marks=marks)


def cases():
    """Each takes PoCL one to three programs, of one to four seconds for large fields."""
    for name in NAMES:
        for order in ORDERS:
            yield ("babybear", order) if (name, order) == ("babybear", "natural") else slow(name, order)


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "order"), list(cases()))
def test_three_passes(space, name, order):
    """Of 8, 4 and 4 rows: radices that fill a pass and do not; split twiddles in the first; a coset; in place."""
    field, division = FIELDS[name], Division(rows=2, tile=4, radix=2, table=4)
    options = {"inverse": False, "coset": 5, "order": order}
    plan = check(space, field, 7, 1, division, in_place=True, **options)
    assert sorted(step.log_rows for step in plan.passes) == [2, 2, 3]


@pytest.mark.parametrize(("name", "order"), list(map(slow, NAMES, (ORDERS[1], *ORDERS))))
@pytest.mark.sample(3)
def test_three_passes_of_the_blocks_that_devices_use(space, name, order):
    """As of many points, but for the rows of a pass: the tile, radix and tables are those that are used."""
    field, used = FIELDS[name], division_of(FIELDS[name])
    log_n = used.tile + 1
    division = replace(used, rows=-(-log_n // 3))
    assert len(division.logs(log_n)) == len(used.logs(LOG_MOST)) == 3
    check(space, field, log_n, 1, division, inverse=True, coset=3, order=order)


@pytest.mark.parametrize(("name", "order"), list(map(slow, NAMES, (*ORDERS, ORDERS[0]))))
@pytest.mark.sample(3)
def test_what_devices_use(space, name, order):
    """One pass and two, with the division that is used; a last block whose columns are not all there."""
    field = FIELDS[name]
    division = division_of(field)
    for log_n, batch in ((1, 3), (3, 300), (6, 5), (division.tile + 1, 1)):
        check(space, field, log_n, batch, inverse=True, coset=field.modulus - 3, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goldilocks", "bn254_fr", "bls12_381_fr"])
@pytest.mark.sample(3)
def test_values_at_the_bounds(space, name):
    """What is not reduced grows most where all elements are p - 1 or close to it; as many levels as a block has."""
    field, n = FIELDS[name], 1 << division_of(FIELDS[name]).tile
    p = field.modulus
    edges = [0, 1, p - 1, p - 2, p >> 1, (p >> 1) + 1, (1 << field.bits - 1) - 1, p - (1 << 29)]
    columns = ([p - 1] * n, [0] * n, [p - 1, 0] * (n // 2), [p - 1 - i % 7 for i in range(n)])
    x = [value for column in columns for value in column] + [edges[i * i % 11 % 8] for i in range(n)]
    check(space, field, n.bit_length() - 1, 5, x=x, inverse=False, coset=1, order="natural_to_bit_reversed")


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("radix", [1, 3, *(pytest.param(radix, marks=pytest.mark.soak) for radix in (2, 4))])
@pytest.mark.parametrize("rows", [4, 5, 6, 7])
def test_every_radix(space, radix, rows):
    """Rows that are and are not a power of it."""
    field, division = FIELDS["goldilocks"], Division(rows=rows, tile=rows + 2, radix=radix, table=20)
    check(space, field, rows, 9, division, inverse=False, coset=1, order="natural")
    check(space, field, rows + 3, 1, division, inverse=False, coset=1, order="natural_to_bit_reversed")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [("bn254_fr", 7), pytest.param("bls12_381_fr", 7, marks=pytest.mark.soak)])
def test_an_odd_number_of_levels(space, name, rows):
    """The second group has one level where threads have elements for two; before and after it, two."""
    field, division = FIELDS[name], Division(rows=rows, tile=rows + 1, radix=2, table=20)
    assert "#define NTT_FIRST 2\n" in kernel_source(field, Variant(), Tile(rows, 1, 2)).dialects["portable"]
    check(space, field, rows, 3, division, inverse=False, coset=1, order="natural")


@pytest.mark.parametrize("field", [FIELDS[name] for name in NAMES], ids=lambda field: field.name)
@pytest.mark.parametrize("log_n", range(1, 28))
def test_divisions_fit_every_device(field, log_n):
    """Blocks of at most 256 threads and 48 KiB, whose columns are neighbours; three passes at most."""
    division = division_of(field)
    logs = division.logs(log_n)
    assert sum(logs) == log_n
    assert len(logs) <= 3
    for order in ORDERS:
        for step in make_passes(field, logs, inverse=False, coset=1, order=order, log_table=division.table):
            tile = division.shape(step)
            assert tile.threads <= 256
            elements = 1 << tile.rows + tile.columns
            assert (elements + (elements >> tile.radix)) * field.size_bytes <= 48 * 1024
            assert tile.columns <= step.digits[0]
            assert tile.radix <= tile.rows == step.log_rows


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_a_first_pass_that_checks_sees_elements_that_are_not_reduced(space, name, order):
    """By its verdict alone: at both ends and between, in each row; the sums of others are those of the plain pass."""
    field, log_n = FIELDS[name], 7
    x = encode(field, field_elements(field, 2 << log_n, TRANSFORM_BASE))
    plan = DeviceNttPlan(space, field, log_n, inverse=False, coset=1, order=order)
    sums, last = [space.load(np.zeros_like(x)) for _ in range(2)], np.iinfo(x.dtype).max
    plan.launch(0, space.load(x), sums[0], 2 << log_n)
    for at in (None, 0, 77, 1 << log_n, (2 << log_n) - 1):
        wrong, verdict = x.copy(), space.load(np.zeros(1, np.uint32))
        if at is not None:
            wrong[at] = last
        plan.launch(0, space.load(wrong), sums[1], 2 << log_n, verdict)
        assert space.store(verdict).tolist() == [int(at is not None)]
        assert at is not None or np.array_equal(*map(space.store, sums))


def test_a_plan_that_is_given_up_waits_for_the_device(monkeypatch):
    """On another stream its tables may still be read, and their memory is the allocator's next."""
    waits = []
    monkeypatch.setattr(ntt_launch, "_device_kernel", lambda *args: None)
    plan = DeviceNttPlan(HOST, FIELDS["babybear"], 3, inverse=False, coset=1, order="natural")
    monkeypatch.setattr(HOST.provider, "synchronize", lambda index: waits.append((index, plan.retired)))
    assert not plan.retired
    assert plan.size_bytes == 4 * 4  # half the points' roots
    plan.retire()
    assert waits == [(0, True)]


def test_pointed_launches_have_what_others_have(monkeypatch):
    """NVIDIA's launches, kept but for the elements' pointers, with a driver that notes what it is given."""
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    torch = pytest.importorskip("torch")
    from accelerant.runtime.providers import cuda_launch

    field, given, asked = FIELDS["babybear"], [], []
    kinds = kernel_source(field, Variant(), Tile(4, 2, 2)).entries["ntt_pass"]
    handle = cuda_launch.LoadedKernel("ntt_pass", 7, kinds)

    def note(shape, address):
        pointers = (ctypes.c_void_p * len(kinds)).from_address(address)
        given.append((shape, [ctypes.c_uint64.from_address(each).value for each in pointers]))

    def plainly(function, *arguments):
        *shape, stream, address, extra = arguments
        assert (int(function), shape[2:3] + shape[4:], stream, extra) == (7, [1, 1, 1, 0], 0, 0)
        note((*shape[:1], *shape[3:4]), address)
        return (0,)

    def overlapping(config, function, address, extra):
        assert (int(function), int(config.hStream), config.sharedMemBytes, extra) == (7, 0, 0, 0)
        assert (config.gridDimY, config.gridDimZ, config.blockDimY, config.blockDimZ) == (1, 1, 1, 1)
        (attribute,) = config.attrs
        assert attribute.id.name.endswith("PROGRAMMATIC_STREAM_SERIALIZATION")
        assert attribute.value.programmaticStreamSerializationAllowed == 1
        note((config.gridDimX, config.blockDimX), address)
        return (0,)

    monkeypatch.setattr(cuda_launch, "make_ready", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)

    def launch(kernel, grid, block, args):
        asked.append(((*grid, *block), [arg.data_ptr() if hasattr(arg, "data_ptr") else arg for arg in args]))

    tables = Tables(*(torch.zeros(4, dtype=torch.int64) for _ in range(5)))
    monkeypatch.setattr(ntt_launch, "device_tables", lambda *args: tables)
    provider = SimpleNamespace(launch=launch, synchronize=lambda index: None)
    monkeypatch.setattr(ntt_launch, "_device_kernel", lambda *args: args[4].kernel)

    def made(kernel):
        space = SimpleNamespace(provider=provider, backend="cuda", index=0, pointer=lambda words: words, kernel=kernel)
        return DeviceNttPlan(space, field, 13, inverse=True, coset=3, order="natural")

    plans = [made(SimpleNamespace(handle=None))]
    plans += [made(SimpleNamespace(handle=handle, target=target)) for target in ("sm_86", "sm_90a")]
    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuLaunchKernel", plainly)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", overlapping)
    for elements, n in ((1 << 13, 0), (1 << 13, 1), (3 << 13, 1), (1 << 13, 0)):
        x, z = torch.zeros(4), torch.zeros(4)
        for plan in plans:
            plan.launch(n, x, z, elements)
        assert given[-1] == given[-2] == asked[-1]
        assert asked[-1][1][:2] == [x.data_ptr(), z.data_ptr()]
    assert (len(given), len(asked)) == (8, 4)
    assert_raises(LaunchError, "wanted a buffer, got int", lambda: plans[1].launch(1, 5, torch.zeros(4), 2 << 13))


def test_a_pointed_launch_of_two_threads(monkeypatch):
    """Each has pointers of its own, also while the driver reads those of the other."""
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    torch = pytest.importorskip("torch")
    from accelerant.runtime.providers import cuda_launch

    handle = cuda_launch.LoadedKernel("both", 7, ("*u64", "*u64", "i64"))
    monkeypatch.setattr(cuda_launch, "make_ready", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    found, both = {}, threading.Barrier(2)

    def read(*arguments):
        both.wait(60)  # both threads have set their pointers
        pointers = (ctypes.c_void_p * 3).from_address(arguments[-2])
        mine = [ctypes.c_uint64.from_address(each).value for each in pointers]
        both.wait(60)
        found[threading.current_thread().name] = mine
        return (0,)

    from cuda.bindings import driver

    monkeypatch.setattr(driver, "cuLaunchKernel", read)
    x = torch.zeros(4)
    ready = handle.point((1, 1, 1), (x, x, 5), 0, 32)
    threads = [threading.Thread(target=ready.start, args=(each, each + 1), name=str(each)) for each in (16, 32)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert found == {"16": [16, 17, 5], "32": [32, 33, 5]}


def test_the_portable_text_asks_for_no_compiler():
    """Whatever differs between compilers stands in portable.h and in device_cuda.h."""
    for field in (FIELDS["bn254_fr"], FIELDS["goldilocks"]):
        text = kernel_source(field, Variant(), Tile(4, 2, 2)).dialects["portable"]
        assert not re.search(r"defined\(|__\w+|get_global_id|threadIdx", text)


def test_a_radix_above_that_of_the_roots():
    assert_raises(ConfigError, "at most 4", lambda: kernel_source(FIELDS["babybear"], Variant(), Tile(8, 2, 5)))


def test_goldilocks_shifts_are_roots():
    for inverse in (False, True):
        text = kernel_source(FIELDS["goldilocks"], Variant(), Tile(8, 4, 4), inverse).dialects["portable"]
        shift = int(re.search(r"#define NTT_SHIFT (\d+)", text)[1])
        p, root = FIELDS["goldilocks"].modulus, FIELDS["goldilocks"].root_of_unity(16)
        assert pow(2, shift, p) == pow(root, -1 if inverse else 1, p)


@pytest.mark.sample(5)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NAMES)
def test_tables_that_a_device_makes_are_those_of_the_host(space, name, order):
    """Twiddles whole and split, of a few columns and of many, and what stands before and after; with and without g."""
    field = FIELDS[name]
    options = itertools.product((False, True), (1, field.modulus - 2), ((5, 4), (3, 9)), (24, 8))
    for inverse, coset, logs, log_table in options:
        steps = make_passes(field, logs, inverse=inverse, coset=coset, order=order, log_table=log_table)
        for step in steps:
            found = device_tables(space, field, step, Tile(step.log_rows, 0, 2))
            wanted = pass_tables(field, step, montgomery_radix(field))
            for kind in ("before", "after", "low", "high"):
                here, there = getattr(wanted, kind), getattr(found, kind)
                assert (here is None) == (there is None)
                assert here is None or (space.store(there).reshape(here.shape) == here).all(), (kind, logs, inverse)


def test_roots_with_quotients():
    """Where 4 p leaves room below R: then each is followed by floor(w R / p), and not in Montgomery form."""
    assert [name for name in NAMES if has_quotients(FIELDS[name])] == ["bn254_fr"]
    field, radix = FIELDS["bn254_fr"], 1 << 256
    (step,) = make_passes(field, (5,), inverse=False, coset=1, order="natural", log_table=24)
    roots = roots_of(field, step, Tile(5, 0, 2))
    assert roots.shape == (16, 2, 4)
    for block, (w, quotient) in enumerate(roots):
        exponent = int(f"{block:04b}"[::-1], 2)
        root = pow(field.root_of_unity(32), exponent, field.modulus)
        assert int.from_bytes(w.tobytes(), "little") == root
        assert int.from_bytes(quotient.tobytes(), "little") == root * radix // field.modulus


FORWARD = Variant(reversed_out=True, twiddle="after")
LAST = Variant(along_in=True, along_out=True, reversed_out=True)


@pytest.mark.sample(7)
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("variant", [FORWARD, LAST, Variant(along_in=True)], ids=["first", "last", "natural"])
@pytest.mark.parametrize("name", ["bn254_fr", "bls12_381_fr", "goldilocks", "babybear"])
def test_registers_on_nvidia(name, variant, architecture, compile_cuda):
    """On a multiprocessor of 65,536 registers six blocks of 128 threads, two to four of 256."""
    field = FIELDS[name]
    division = division_of(field)
    resident = division.resident
    if variant == LAST and division.resident_along is not None:
        resident = division.resident_along
    tile = Tile(8, division.tile - 8, division.radix, resident)
    source = kernel_source(field, variant, tile, checked=variant == FORWARD)
    found = compile_cuda(source, architecture).resources["ntt_pass"]
    spills = name == "goldilocks" and variant == LAST
    assert found.spill_bytes <= (48 if spills else 0)
    assert found.registers <= (128 if name == "goldilocks" else 80)


# Goldilocks's carry chains, emulated: their instructions as the program holds them, on edges and on random numbers.

P = FIELDS["goldilocks"].modulus


def instructions(name):
    """Of the asm statement of a function, its macros replaced: [operation, operands...]."""
    text = kernel_source(FIELDS["goldilocks"], Variant(), Tile(4, 2, 2)).dialects["cuda"].build("sm_90")
    joined = text.replace("\\\n", " ")
    macros = dict(re.findall(r"#define (GOLDILOCKS_\w+) (.*)", joined))
    body = re.search(rf" F {name}\([^)]*\) {{[^}}]*?GOLDILOCKS_DO\((.*?)\);\n}}", joined, re.DOTALL)[1]
    body = f"GOLDILOCKS_BEGIN {body}"
    while "GOLDILOCKS" in body:
        body = re.sub(r"\bGOLDILOCKS_\w+", lambda found: macros[found[0]], body)
    return parsed("".join(re.findall(r'"([^"]*)"', body)).strip(" {}"))


def emulate(lines, x, y):
    registers = {"%1": x, "%2": y, "%3": WORD}
    execute(lines, registers)
    return registers["%0"]


EDGES = [0, 1, 2, WORD - 1, WORD, WORD + 1, 2**33, 2**63, P // 2, P // 2 + 1, P - WORD, P - 2**32, P - 2, P - 1]


WORDS = [*EDGES, P, P + 1, P + WORD - 2, 2**64 - 2**31, 2**64 - 1]
"""Any words, not only elements below the modulus."""


@pytest.mark.parametrize("name", ["add", "sub", "mul"])
def test_carry_chains_are_exact(name):
    """Of a sum or difference one operand is any word, and so is the result; a product takes any and is reduced."""
    lines = instructions(f"goldilocks_{name}")
    function = {"add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y}[name]
    draw = random.Random(name)
    second, top = (WORDS, 2**64) if name == "mul" else (EDGES, P)
    pairs = [(x, y) for x in WORDS for y in second]
    pairs += [(draw.randrange(2**64), draw.randrange(top)) for _ in range(3000)]
    for x, y in pairs:
        found = emulate(lines, x, y)
        assert found % P == function(x, y) % P, (x, y)
        assert found < (P if name == "mul" else 2**64), (x, y)


@pytest.mark.parametrize("name", ["goldilocks_reduced", "ntt_raised", "ntt_folded"])
def test_what_exceeds_a_word_is_folded(name):
    """x; x + 2^64 y, y of 32 bits; x + 2^64 y, y of 64 bits."""
    lines, draw = instructions(name), random.Random(name)
    high = {"goldilocks_reduced": [0], "ntt_raised": [0, 1, 2**31, WORD - 1, WORD], "ntt_folded": WORDS}[name]
    pairs = [(x, y) for x in WORDS for y in high]
    pairs += [(draw.randrange(2**64), draw.randrange(max(high) + 1)) for _ in range(3000)]
    for x, y in pairs:
        assert emulate(lines, x, y) == (x + (y << 64)) % P, (x, y)


def test_carry_chains_are_as_short_as_said():
    """Without moves, the halves of a wide multiply as one: the header's numbers."""
    for name, count in (("add", 4), ("sub", 5), ("mul", 16)):
        kinds = [operation for operation, *_ in instructions(f"goldilocks_{name}") if not operation.startswith("mov")]
        assert len([kind for kind in kinds if ".hi" not in kind]) == count


def test_reductions_that_borrow_and_carry():
    """Products whose lowest 64 bits are less than the highest 32, which random ones never have, and sums past 2^64."""
    lines, draw = instructions("goldilocks_mul"), random.Random(3)
    for _ in range(1000):
        x, y = (draw.randrange(2**31, 2**32 - 1) << 32 for _ in range(2))
        assert (x * y) & (2**64 - 1) < x * y >> 96
        assert emulate(lines, x, y) == x * y % P
        y = (2**64 - 1 - draw.randrange(2**33)) % P
        x = (2**64 - 1 - draw.randrange(2**33)) % P
        assert emulate(lines, x, y) == x * y % P
