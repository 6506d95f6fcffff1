"""memory_limit_bytes of an Accelerator counts scratch, and runs in parts that keep the limit where it can."""

import dataclasses
import re

import numpy as np
import pytest
import torch

from accelerant import Accelerator, AcceleratorConfig, ops, zk
from accelerant.accelerator import methods
from accelerant.accelerator.batch import split_along_rows
from accelerant.accelerator.methods import METHODS, metas_of, scratch_of, sizes_of
from accelerant.algebra.msm.device_plan import device_plan
from accelerant.errors import OutOfMemory
from accelerant.runtime import registry
from accelerant.runtime.memory.limits import peak_recorded
from accelerant.zk.multi_scalar import scratch_bytes

CPU = registry.find_device("cpu")


def _limited(limit):
    return Accelerator("cpu", config=AcceleratorConfig(memory_limit_bytes=limit))


def _needs(name, arrays, options=None):
    inputs, result = sizes_of(name, arrays, options or {})
    return inputs, result, scratch_of(name, metas_of(name, arrays), options or {}, CPU)


def _op_options(name, **given):
    """Return a call's options as a method passes them."""
    seen = {}

    class Recorded(methods.Operations):
        def _call(self, name, arrays, options):
            seen.update(options)

    getattr(Recorded(), name)(*given.pop("arrays"), **given)
    return seen


@pytest.fixture
def all_scratch(monkeypatch):
    """Count scratch of any size."""
    monkeypatch.setattr(methods, "_SMALL_SCRATCH_BYTES", 0)
    monkeypatch.setattr(methods, "_scratch", {})


@pytest.mark.parametrize(("name", "arrays"), [
    ("cross_entropy", (torch.randn(3000, 40), torch.randint(40, (3000,)))),
    ("attention", tuple(torch.randn(3, 2, 3, 200, 8))),
    ("linear_gelu", (torch.randn(300, 8), torch.randn(20, 8), torch.randn(20))),
], ids=["cross_entropy", "attention", "linear_gelu"])  # fmt: skip
def test_predicted_scratch_is_what_a_call_allocates(name, arrays, all_scratch):
    options = _op_options(name, arrays=arrays)
    inputs, result, scratch = _needs(name, arrays, options)
    assert scratch > 0
    with torch.no_grad(), peak_recorded("cpu") as record:
        kept = getattr(ops, name)(*arrays)
    assert kept is not None
    assert record.growth_bytes == result + scratch
    limit = inputs + result + scratch
    with _limited(limit) as acc:
        torch.testing.assert_close(getattr(acc, name)(*arrays), getattr(ops, name)(*arrays))


def test_a_loss_is_refused_whose_scratch_passes_the_limit(all_scratch):
    arrays = torch.randn(3000, 40), torch.randint(40, (3000,))
    inputs, result, scratch = _needs("cross_entropy", arrays, _op_options("cross_entropy", arrays=arrays))
    message = (
        rf"cross_entropy: inputs, result and scratch take {inputs + result + scratch:,} bytes; the limit is "
        rf"{inputs + result:,}; the largest part is the inputs, {inputs:,} bytes"
    )
    with _limited(inputs + result) as acc, pytest.raises(OutOfMemory, match=re.escape(message)):
        acc.cross_entropy(*arrays)


def test_calls_run_in_parts_that_keep_the_limit(all_scratch, monkeypatch):
    arrays = torch.randn(400, 8), torch.randn(20, 8), torch.randn(20)
    options = _op_options("linear_gelu", arrays=arrays)
    inputs, result, scratch = _needs("linear_gelu", arrays, options)
    wanted, rows, run = ops.linear_gelu(*arrays), [], METHODS["linear_gelu"].run

    def counted(x, *rest, **options):
        if x.device.type == "cpu" and type(x) is torch.Tensor:
            rows.append(x.shape[0])
        return run(x, *rest, **options)

    monkeypatch.setitem(METHODS, "linear_gelu", dataclasses.replace(METHODS["linear_gelu"], run=counted))
    with _limited(inputs + result + scratch // 2) as acc:
        torch.testing.assert_close(acc.linear_gelu(*arrays), wanted)
    assert rows == [100] * 4
    with _limited(inputs + result) as acc, pytest.raises(OutOfMemory, match="linear_gelu: inputs, result and scratch"):
        acc.linear_gelu(*arrays)
    assert len(rows) == 4


@pytest.mark.slow
def test_transforms_run_in_parts_whose_scratch_fits():
    x = np.arange(16 << 12, dtype=np.uint64).reshape(16, -1)
    options = {"field": "goldilocks", "inverse": False, "coset": None, "order": "natural"}
    inputs, result, scratch = _needs("ntt", (x,), options)
    assert inputs == result == scratch == x.nbytes
    assert _needs("ntt", (x,), {**options, "order": "natural_to_bit_reversed"})[2] == 0
    cut = split_along_rows("ntt", metas_of("ntt", (x,)), options)
    assert cut.rows == 16
    wanted = zk.ntt(x, "goldilocks")
    with _limited(2 * x.nbytes + scratch // 2) as acc:
        np.testing.assert_array_equal(acc.ntt(x), wanted)
    with _limited(2 * x.nbytes) as acc:
        message = r"ntt: inputs, result and scratch take .* bytes; the limit is .*; the largest part is the inputs"
        with pytest.raises(OutOfMemory, match=message):
            acc.ntt(x)
        np.testing.assert_array_equal(acc.ntt(x, order="natural_to_bit_reversed"), zk.ntt(
            x, "goldilocks", order="natural_to_bit_reversed"
        ))  # fmt: skip


@pytest.mark.slow
def test_sums_of_multiples_run_in_parts_whose_scratch_fits():
    group = zk.curve("bn254_g1")
    points = group.mul(group.generator, list(range(1, 2001)))
    scalars = np.arange(8000, dtype=np.uint64).reshape(2000, 4) % 2**60
    options = {"curve": "bn254_g1", "check": True}
    inputs, result, scratch = _needs("msm", (scalars, points), options)
    assert scratch == scratch_bytes("bn254_g1", 2000, "cpu") > 2 * points.nbytes
    half = scratch_bytes("bn254_g1", 1000, "cpu")
    wanted = zk.msm(scalars, points)
    with _limited(inputs + 2 * result + half) as acc:
        np.testing.assert_array_equal(acc.msm(scalars, points), wanted)
        both = acc.msm(np.stack([scalars, scalars[::-1]]), points[:2000])
    np.testing.assert_array_equal(both, zk.msm(np.stack([scalars, scalars[::-1]]), points))
    with _limited(inputs + result) as acc, pytest.raises(OutOfMemory, match=r"msm: .* the largest part is the"):
        acc.msm(scalars, points)


def test_scratch_of_sums_on_a_device_is_that_of_its_plan(monkeypatch):
    curve = zk.curve("bn254_g1").parameters
    opencl = [device for device in registry.devices() if device.backend == "opencl" and not device.reason]
    if not opencl:
        pytest.skip("no OpenCL device")
    size = scratch_bytes("bn254_g1", 1 << 12, opencl[0])
    assert size == (1 << 12) * 64 + device_plan(curve, 1 << 12, 1 << 62).size_bytes(curve)
    assert scratch_bytes("bn254_g1", 0, "cpu") == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["attention", "cross_entropy"])
def test_a_gpus_limit_counts_scratch_and_a_call_keeps_it(name):
    arrays = {
        "attention": tuple(torch.randn(3, 8, 16, 1024, 64, device="cuda", dtype=torch.bfloat16)),
        "cross_entropy": (torch.randn(4096, 50_000, device="cuda"), torch.randint(50_000, (4096,), device="cuda")),
    }[name]
    options = _op_options(name, arrays=arrays)
    inputs, result = sizes_of(name, arrays, options)
    scratch = scratch_of(name, metas_of(name, arrays), options, registry.find_device("cuda"))
    with peak_recorded("cuda") as record:
        kept = getattr(ops, name)(*arrays)
    del kept
    assert record.growth_bytes <= result + scratch + (1 << 20)
    config = AcceleratorConfig(memory_limit_bytes=inputs + result + scratch)
    with Accelerator("cuda", config=config) as acc:
        torch.testing.assert_close(getattr(acc, name)(*arrays), getattr(ops, name)(*arrays))
