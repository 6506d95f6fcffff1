"""Tapes on disk: what comes back is what was recorded."""

from __future__ import annotations

import json

import numpy as np
import pytest

from accelerant.algebra.curve import pairing, tape
from accelerant.algebra.curve.parameters import family_of
from accelerant.algebra.field.parameters import FIELDS
from accelerant.runtime.compilation.cache import KernelCache


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setattr(tape, "KernelCache", lambda: KernelCache(tmp_path))
    return tmp_path


def same(a, b):
    """Tapes have no equality of their own."""
    plain = [(t.field, t.registers, t.constants, t.products, t.code.tolist(), t.schedule.tolist()) for t in (a, b)]
    return plain[0] == plain[1]


KINDS = {
    "miller": lambda family: pairing.miller_tape.__wrapped__(family, 2),
    "product": pairing.product_tape.__wrapped__,
    "final": pairing.final_tape.__wrapped__,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["bn254", "bls12_381"])
def test_what_is_read_is_what_was_recorded(folder, kind, name):
    family, calls = family_of(name), []
    made = KINDS[kind](family)

    def make():
        calls.append(kind)
        return made

    for _ in range(2):
        found = tape.cached(f"{kind}_{name}", FIELDS[f"{name}_fq"], make)
        assert same(found.tape, made.tape)
        assert found.tape.code.dtype == np.int32
        assert found.tape.schedule.dtype == np.int64
        assert (found.inputs, found.outputs) == (made.inputs, made.outputs)
    assert len(calls) == 1
    assert len(list(folder.iterdir())) == 1


def test_a_damaged_entry_is_recorded_again(folder):
    family = family_of("bn254")
    field, calls = FIELDS["bn254_fq"], []

    def make():
        calls.append(1)
        return pairing.product_tape.__wrapped__(family)

    first = tape.cached("t", field, make)
    code = next(folder.iterdir()) / "code"
    code.write_bytes(bytes([code.read_bytes()[0] ^ 1]) + code.read_bytes()[1:])
    assert same(tape.cached("t", field, make).tape, first.tape)
    assert len(calls) == 2


def test_nothing_that_a_tape_is_lies_beside_the_checksum(folder):
    """With other constants, or registers beyond the memory, all would be computed wrong."""
    family = family_of("bn254")
    field, first = FIELDS["bn254_fq"], pairing.product_tape.__wrapped__(family)
    tape.cached("t", field, lambda: first)
    path = next(folder.iterdir()) / "report.json"
    report = json.loads(path.read_text())
    assert not report["metadata"]
    report["metadata"] = {"schedule": 0, "registers": 1, "constants": ["5"], "products": 0, "places": {}}
    path.write_text(json.dumps(report))
    assert same(tape.cached("t", field, lambda: first).tape, first.tape)
