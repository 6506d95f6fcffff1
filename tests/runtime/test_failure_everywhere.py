"""A device that fails in any of a computation's calls: a right answer by fallback, or an error; never a wrong one.

The provider computes on the CPU, and fails in its n-th call of a method, for every n; test_failure.py has launches of
Triton's kernels.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import accelerant as acl
from accelerant.errors import DeviceLost, FallbackWarning, LaunchError, OutOfMemory
from accelerant.runtime.ledger import ledger
from accelerant.testing import fake_provider

pytestmark = pytest.mark.slow

CALLS = ("copy_to_device", "launch", "copy_to_host", "synchronize", "record_event")
METHODS = ("allocate", *CALLS)


class Sum:
    """A sum of multiples of 8 points, and its answer."""

    def __init__(self):
        group = acl.zk.curve("bn254_g1")
        self.points = group.mul(group.generator, list(range(1, 9)))
        self.scalars = np.array([[k + 2, 0, 0, 1 << k] for k in range(8)], np.uint64)
        total = sum((k + 1) * (k + 2 + (1 << 192 + k)) for k in range(8))
        self.answer = group.mul(group.generator, [total % group.order])[0]

    def check(self, accelerator):
        """Compute the sum, of inputs that must stay as they are."""
        before = self.scalars.copy(), self.points.copy()
        try:
            np.testing.assert_array_equal(accelerator.msm(self.scalars, self.points), self.answer)
        finally:
            np.testing.assert_array_equal(self.scalars, before[0])
            np.testing.assert_array_equal(self.points, before[1])


@pytest.fixture(scope="module")
def msm():
    return Sum()


@pytest.fixture
def fake(msm):
    """A device that has computed the sum once, and the calls that this takes."""
    with fake_provider() as provider:
        accelerator = acl.Accelerator("fake", fallback=False)
        msm.check(accelerator)
        before = provider.counts.copy()
        msm.check(accelerator)
        yield provider, provider.counts - before
        assert not provider._failures or not any(provider._failures.values())  # every planned one came


@pytest.mark.parametrize("method", CALLS)
def test_a_sum_falls_back_to_the_right_answer_wherever_its_device_fails(fake, msm, method):
    provider, calls = fake
    accelerator = acl.Accelerator("fake")
    assert calls[method] >= 1
    for n in range(calls[method]):
        ledger().reset()
        provider.fail(method, LaunchError("refused"), after=n)
        with pytest.warns(FallbackWarning, match="msm: fake:0 is not used, cpu is"):
            msm.check(accelerator)
        (entry,) = ledger().to_dict()["fallbacks"]
        assert (entry["op"], entry["wanted"], entry["ran"], entry["count"]) == ("msm", "fake:0", "cpu", 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error", FallbackWarning)
            msm.check(accelerator)  # the device serves again


@pytest.mark.parametrize("policy", ["allow", "forbid"])
def test_memory_that_is_exhausted_anywhere_gives_the_right_answer_in_smaller_parts_or_an_error(fake, msm, policy):
    provider, calls = fake
    accelerator = acl.Accelerator("fake", fallback=policy)
    for n in range(calls["allocate"]):
        provider.fail("allocate", OutOfMemory("full"), after=n)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            try:
                msm.check(accelerator)
            except OutOfMemory:
                assert policy == "forbid"
        assert provider.counts["allocate"] > n
        msm.check(acl.Accelerator("fake", fallback=False))


@pytest.mark.parametrize("method", CALLS)
def test_without_fallback_it_raises_and_the_next_sum_is_right(fake, msm, method):
    provider, calls = fake
    accelerator = acl.Accelerator("fake", fallback=False)
    for n in range(calls[method]):
        provider.fail(method, LaunchError("refused"), after=n)
        with pytest.raises(LaunchError, match="refused"):
            msm.check(accelerator)
        msm.check(accelerator)


@pytest.mark.parametrize("method", METHODS)
def test_a_lost_device_is_an_error_under_every_policy(fake, msm, method):
    provider, calls = fake
    for n in range(0, calls[method], 3):
        for policy in ("allow", "warn", "forbid"):
            provider.fail(method, DeviceLost("gone"), after=n)
            with warnings.catch_warnings():
                warnings.simplefilter("error", FallbackWarning)
                with pytest.raises(DeviceLost, match="gone"):
                    msm.check(acl.Accelerator("fake", fallback=policy))


def test_a_kernel_that_does_not_compile_is_left_to_the_cpu(msm):
    with fake_provider() as first:
        msm.check(acl.Accelerator("fake", fallback=False))
        total = first.counts["compile"]
    assert total >= 10
    for n in range(total):
        ledger().reset()
        with fake_provider() as provider:
            provider.fail("compile", acl.errors.CompileError("no registers left"), after=n)
            with pytest.warns(FallbackWarning, match="no registers left"):
                msm.check(acl.Accelerator("fake"))
            msm.check(acl.Accelerator("fake", fallback=False))
