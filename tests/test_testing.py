"""The provider for users' tests: real results, and times, counts and failures that the test decides."""

import numpy as np
import pytest

import accelerant as acl
from accelerant.algebra.field.program import field_add_source
from accelerant.errors import ConfigError, DeviceLost, FallbackWarning, LaunchError, OutOfMemory
from accelerant.runtime import registry
from accelerant.testing import FakeProvider, fake_provider
from refusals import assert_raises


def work(fake):
    """Some calls; returns the time between two marks."""
    x = np.arange(1000, dtype=np.uint64)
    start = fake.record_event()
    a = fake.copy_to_device(x)
    fake.launch(fake.compile(field_add_source()), (4,), (256,), (a, a, a, 1000))
    assert fake.copy_to_host(a, np.uint64, (1000,)).tolist() == (2 * x).tolist()
    return start.elapsed_ms(fake.record_event())


def test_the_same_calls_take_the_same_time_and_are_counted():
    with fake_provider() as first:
        took = work(first)
        assert took == pytest.approx(0.001 + 2 * 8000e-7 + 0.01 + 1024e-6, abs=1e-12)
        counts = dict(first.counts)
        assert first.counts["launch"] == first.counts["launch field_add"] == first.counts["copy_to_host"] == 1
    with fake_provider() as second:
        assert work(second) == took
        assert second.counts == counts


def test_a_later_block_has_kernels_of_its_own():
    counts = []
    for _ in range(2):
        with fake_provider() as fake:
            assert fake.field_mul([2], [3]).tolist() == [6]
            assert fake.gelu(np.zeros(3, np.float32)).tolist() == [0, 0, 0]
            counts.append({name: fake.counts[name] for name in ("compile", "launch", "allocate")})
    assert counts[0] == counts[1]
    assert counts[0]["compile"] == counts[0]["launch"] == 2


def test_it_is_a_backend_only_inside_its_block():
    with fake_provider(devices=2, memory_bytes=4096) as fake:
        assert [device.label for device in acl.devices() if device.backend == "fake"] == ["fake:0", "fake:1"]
        assert acl.Accelerator("fake:1", fallback=False).field_add([1], [2]).tolist() == [3]
        assert fake.allocate(8, device=1).device == 1
        assert_raises(OutOfMemory, r"4,097 bytes asked on fake:0; 4,096 of 4,096 free", fake.allocate, 4097)
        with pytest.raises(acl.errors.AccelerantError, match="registered already"), fake_provider():
            pass
    assert "fake" not in registry.backends()
    assert not fake.running


def test_a_planned_failure_is_raised_by_the_planned_call():
    with fake_provider() as fake:
        fake.fail("allocate", after=1, times=2)
        fake.allocate(8)
        for _ in range(2):
            assert_raises(LaunchError, "asked to fail in allocate", fake.allocate, 8)
        fake.allocate(8)
        assert_raises(ConfigError, "no method 'alocate'; there are allocate", fake.fail, "alocate")


def test_a_program_sees_failures_as_of_a_real_device():
    with fake_provider() as fake:
        acc = acl.Accelerator("fake")
        fake.fail("launch", OutOfMemory("full"))
        with pytest.warns(FallbackWarning, match="fake:0 is not used, cpu is.*full"):
            assert acc.field_add([1], [2]).tolist() == [3]
        fake.fail("launch", DeviceLost("gone"))
        assert_raises(DeviceLost, "gone", acc.field_add, [1], [2])
        assert acc.metrics()["field_add"]["fallbacks"] == 1


def test_each_registration_makes_a_provider_of_its_own():
    registry.register(FakeProvider)
    try:
        assert registry.create("fake") is registry.create("FAKE")
    finally:
        registry.unregister("fake")
