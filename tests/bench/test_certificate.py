"""The parity certificate: what holds is signed off, what is wrong fails it, and what was changed does not load."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch

from accelerant.bench import certificate as certificates
from accelerant.bench.certificate import EXACT, Certificate, Found, certify, checks, compare
from accelerant.cli import main
from accelerant.errors import ConfigError, FormatError
from accelerant.ops.registry import Tolerance, public_ops
from accelerant.runtime import registry
from accelerant.runtime.dispatch import operations
from accelerant.testing import FakeProvider, fake_provider
from refusals import assert_raises

CPU = [registry.find_device("cpu")]


def rows(certificate):
    return {(row.op, row.dtype): row for row in certificate.rows}


def test_every_public_op_and_every_kind_of_integer_op_is_checked():
    planned = checks()
    assert set(public_ops()) <= {check.op for check in planned}
    assert {"adamw_step", "ntt", "msm", "curve_add", "bigint_pow", "chacha20", "shamir"} <= {c.op for c in planned}
    assert all(check.cases and not check.left_out for check in planned)
    quick = checks(quick=True)
    assert {check.op for check in quick} == {check.op for check in planned}
    assert len(quick) < len(planned)


def test_a_row_says_what_ran_and_how_far_it_is_from_the_reference():
    found = rows(certify(CPU, ops=["gelu", "field_mul"], quick=True))
    row = found["gelu", "float32"]
    assert (row.verdict, row.backend, row.device, row.implementation) == ("within", "cpu", "cpu:0", "torch")
    assert 0 < row.error < 1e-5
    assert 0 < row.of_tolerance <= 1
    assert row.tolerance[0] > 0
    assert (row.cases, row.fallbacks) == (1, 0)
    exact = found["field_mul", "goldilocks"]
    assert (exact.verdict, exact.implementation, exact.error, exact.exact) == ("exact", "llvm (own)", 0.0, True)


def test_a_wrong_implementation_fails_the_certificate(monkeypatch):
    """One element of a result is off by a thousandth."""
    forward = operations()["softmax_fwd"]
    (implementation,) = [each for each in forward.implementations if each.name == "torch"]
    calls = []

    def wrong(*args):
        y = implementation.run(*args)
        calls.append(args)
        if y.numel():
            y = y.clone()
            y.view(-1)[-1] += 1e-3
        return y

    others = tuple(dataclasses.replace(each, run=wrong) if each is implementation else each
                   for each in forward.implementations)  # fmt: skip
    monkeypatch.setattr(forward, "implementations", others)
    forward.forget()
    try:
        certificate = certify(CPU, ops=["softmax"], quick=True)
    finally:
        monkeypatch.undo()
        forward.forget()
    assert calls
    (row,) = certificate.wrong
    assert (row.op, row.dtype, row.implementation) == ("softmax", "float32", "torch")
    assert "y is 0.001 from the reference" in row.note
    assert row.of_tolerance > 10


class WrongOnce(FakeProvider):
    """Adds 1 to the last word of one result."""

    name = "fake"

    def copy_to_host(self, buffer, dtype, shape):
        array = super().copy_to_host(buffer, dtype, shape)
        if np.dtype(dtype) == np.uint64 and array.size == 300 and self.counts["launch field_mul"]:
            array.reshape(-1)[-1] ^= 1
        return array


@pytest.fixture
def wrong_device():
    registry.register(WrongOnce())
    yield registry.find_device("fake")
    registry.unregister("fake")


def test_a_wrong_provider_fails_the_certificate_and_the_command(wrong_device, tmp_path, capsys):
    arguments = ["doctor", "--certify", "--quick", "--device", "fake", "--op", "field_mul", "--op", "field_sub"]
    ended = assert_raises(SystemExit, None, main, [*arguments, "--out", str(tmp_path)])
    assert ended.code == 1
    shown = capsys.readouterr().out
    assert "300 elements: y is not the reference's" in shown
    certificate = Certificate.load(tmp_path / "certificate.json")
    assert {(row.op, row.dtype) for row in certificate.wrong} == {("field_mul", "goldilocks")}
    page = (tmp_path / "certificate.html").read_text()
    assert "fails" in page
    assert certificate.sha256 in page


@pytest.mark.parametrize(("error", "verdict", "note"), [
    (RuntimeError("the bus is gone"), "wrong", "1 elements: RuntimeError: the bus is gone"),
    (NotImplementedError("later"), "wrong", "1 elements: NotImplementedError: later"),
    (NotImplementedError("\"add\" not implemented for 'Half'"), "not served", "\"add\" not implemented for 'Half'"),
])  # fmt: skip
def test_a_call_that_raises_is_wrong_and_one_that_is_refused_is_not_served(error, verdict, note):
    with fake_provider() as fake:
        fake.fail("launch", error, times=1)
        found = rows(certify([registry.find_device("fake")], ops=["field_add", "gelu"], quick=True))
    assert found["field_add", "babybear"].verdict == "exact"
    broken = [row for row in found.values() if row.op == "field_add" and row.verdict != "exact"]
    assert [(row.verdict, row.note) for row in broken] == [(verdict, note)]
    assert found["gelu", "float32"].verdict == "not served"
    assert found["gelu", "float32"].note


def test_what_was_changed_does_not_load(tmp_path, capsys):
    certificate = certify(CPU, ops=["relu"], quick=True)
    path, _ = certificate.save(tmp_path)
    assert Certificate.load(path) == certificate
    ended = assert_raises(SystemExit, None, main, ["doctor", "--check", str(path)])
    assert ended.code == 0
    assert certificate.sha256 in capsys.readouterr().out
    content = json.loads(path.read_text())
    content["rows"][0]["verdict"] = "exact"
    path.write_text(json.dumps(content))
    assert_raises(FormatError, "was changed: its SHA-256 is", Certificate.load, path)
    path.write_text("[]")
    assert_raises(FormatError, "is no certificate", Certificate.load, path)


@pytest.mark.slow
def test_unknown_ops_and_absent_devices_are_refused():
    assert_raises(ConfigError, "no op abacus; there are adamw_step, add, ", certify, CPU, ops=["gelu", "abacus"])
    assert_raises(ConfigError, "no device", certify, [device for device in registry.devices() if not device.available])


def test_errors_and_shares():
    tolerance = Tolerance(1e-3, 1e-2)
    reference = torch.tensor([1.0, 10.0, math.nan, math.inf], dtype=torch.float64)
    y = reference.clone().float()
    assert compare(Found(y, reference), tolerance) == (0.0, 0.0)
    y[0] += 0.101
    error, share = compare(Found(y, reference), tolerance)
    assert error == pytest.approx(0.0101, rel=1e-3)
    assert share == pytest.approx(0.101 / (0.1 + 1e-3), rel=1e-3)
    y[3] = 1.0
    assert compare(Found(y, reference), tolerance)[1] == math.inf
    assert compare(Found(y[:2], reference), tolerance)[1] == math.inf
    assert compare(Found(torch.tensor([math.nan]), torch.zeros(1, dtype=torch.float64)), tolerance)[1] == math.inf
    assert compare(Found([1, 2], [1, 3]), EXACT) == (math.inf, math.inf)
    assert compare(Found([1, 2], [1, 2]), EXACT) == (0.0, 0.0)
    big = torch.tensor([math.inf], dtype=torch.float16)
    assert compare(Found(big, torch.tensor([70000.0], dtype=torch.float64)), tolerance)[1] == 0.0


def test_the_page_escapes_and_lists_every_row():
    certificate = certify(CPU, ops=["relu", "field_add"], quick=True)
    text = certificates.build_page(certificate)
    assert "http" not in text
    for row in certificate.rows:
        assert f'<td class="">{row.op}</td>' in text
