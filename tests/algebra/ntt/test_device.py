"""The passes in C: on OpenCL, with few rows and columns so that all of a plan is met, and what they take on NVIDIA."""

from __future__ import annotations

import os
import re
from dataclasses import replace

import numpy as np
import pytest

from accelerant.algebra.field.parameters import FIELDS
from accelerant.algebra.field.places import HOST, place_at
from accelerant.algebra.field.words import decode, encode
from accelerant.algebra.ntt import device
from accelerant.algebra.ntt.device import DevicePasses, Division, division_of
from accelerant.algebra.ntt.launch import run
from accelerant.algebra.ntt.plan import ORDERS, Variant, make_passes
from accelerant.algebra.ntt.program import Tile, kernel_source
from accelerant.algebra.ntt.reference import ntt_reference
from accelerant.runtime import registry
from vectors import TRANSFORM_BASE, field_elements

NAMES = ("goldilocks", "babybear", "bn254_fr", "bls12_381_fr")


@pytest.fixture(params=["opencl", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request):
    reason = registry.reason_absent(request.param)
    if reason:
        pytest.fail(reason) if os.environ.get("CI") == "true" and request.param == "opencl" else pytest.skip(reason)
    return place_at(request.param)


def check(place, field, log_n, batch, division=None, in_place=False, **options):
    n = 1 << log_n
    x = field_elements(field, batch * n, TRANSFORM_BASE)
    plan = DevicePasses(place, field, log_n, division=division, **options)
    words = place.load(encode(field, x))
    out = words if in_place else place.load(np.full_like(encode(field, x), 7))
    run(plan, place, words, out, batch * n)
    rows = (x[at : at + n] for at in range(0, batch * n, n))
    assert decode(field, place.store(out)) == [
        y for row in rows for y in ntt_reference(row, field=field.name, **options)
    ]
    assert in_place or decode(field, place.store(words)) == x
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


@pytest.mark.parametrize(("name", "order"), list(cases()))
def test_three_passes(place, name, order):
    """Of 8, 4 and 4 rows: radices that fill a pass and do not; split twiddles in the first; a coset; in place."""
    field, division = FIELDS[name], Division(rows=2, tile=4, radix=2, table=4)
    options = {"inverse": False, "coset": 5, "order": order}
    plan = check(place, field, 7, 1, division, in_place=True, **options)
    assert sorted(step.log_rows for step in plan.passes) == [2, 2, 3]


@pytest.mark.parametrize(("name", "order"), list(map(slow, NAMES, (ORDERS[1], *ORDERS))))
def test_three_passes_of_the_blocks_that_devices_use(place, name, order):
    """As from 2^17 points on, but for the rows of a pass: the tile, radix and tables are those that are used."""
    field, used = FIELDS[name], division_of(FIELDS[name])
    log_n = used.tile + 1
    division = replace(used, rows=-(-log_n // 3))
    assert len(division.logs(log_n)) == len(used.logs(17)) == 3
    check(place, field, log_n, 1, division, inverse=True, coset=3, order=order)


@pytest.mark.parametrize(("name", "order"), list(map(slow, NAMES, (*ORDERS, ORDERS[0]))))
def test_what_devices_use(place, name, order):
    """One pass and two, with the division that is used; a last block whose columns are not all there."""
    field = FIELDS[name]
    division = division_of(field)
    for log_n, batch in ((1, 3), (3, 300), (6, 5), (division.tile + 1, 1)):
        check(place, field, log_n, batch, inverse=True, coset=field.modulus - 3, order=order)


@pytest.mark.slow
@pytest.mark.parametrize("radix", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("rows", [4, 5, 6, 7])
def test_every_radix(place, radix, rows):
    """Rows that are and are not a power of it."""
    field, division = FIELDS["goldilocks"], Division(rows=rows, tile=rows + 2, radix=radix, table=20)
    check(place, field, rows, 9, division, inverse=False, coset=1, order="natural")
    check(place, field, rows + 3, 1, division, inverse=False, coset=1, order="natural_to_bit_reversed")


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


def test_a_plan_that_is_given_up_waits_for_the_device(monkeypatch):
    """On another stream its tables may still be read, and their memory is the allocator's next."""
    waits = []
    monkeypatch.setattr(device, "_kernel", lambda *args: None)
    monkeypatch.setattr(HOST.provider, "synchronize", lambda index: waits.append((index, plan.given_up)))
    plan = DevicePasses(HOST, FIELDS["babybear"], 3, inverse=False, coset=1, order="natural")
    assert not plan.given_up
    assert plan.size_bytes == 4 * 4  # half the points' roots
    plan.give_up()
    assert waits == [(0, True)]


def test_the_portable_text_asks_for_no_compiler():
    """Whatever differs between compilers stands in portable.h and in device_cuda.h."""
    for field in (FIELDS["bn254_fr"], FIELDS["goldilocks"]):
        text = kernel_source(field, Variant(), Tile(4, 2, 2)).dialects["portable"]
        assert not re.search(r"defined\(|__\w+|get_global_id|threadIdx", text)


FORWARD = Variant(reversed_out=True, twiddle="after")
LAST = Variant(along_in=True, along_out=True, reversed_out=True)
NATURAL = Variant(along_in=True)


@pytest.mark.parametrize("variant", [FORWARD, LAST, NATURAL], ids=["first", "last", "natural"])
@pytest.mark.parametrize("name", ["bn254_fr", "goldilocks", "babybear"])
def test_registers_on_nvidia(name, variant):
    """None spilt, and at least 640 threads on a multiprocessor of 65,536 registers."""
    pytest.importorskip("cuda.core", reason="cuda-core is for Linux and Windows")
    from accelerant.runtime.providers.cuda_compile import compile_cuda

    field = FIELDS[name]
    division = division_of(field)
    tile = Tile(8, division.tile - 8, division.radix, division.resident)
    found = compile_cuda(kernel_source(field, variant, tile), "sm_90").resources["ntt_pass"]
    assert found.spill_bytes == 0
    assert found.registers <= 96
