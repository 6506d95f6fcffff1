"""A device that fails in any of a computation's calls: a right answer by fallback, or an error; never a wrong one."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

import accelerant as acl
from accelerant.config import override
from accelerant.errors import DeviceLost, FallbackWarning, LaunchError, OutOfMemory
from accelerant.runtime import registry
from accelerant.runtime.ledger import ledger
from accelerant.testing import fake_provider
from refusals import assert_raises
from requirements import require_backend

pytestmark = pytest.mark.slow

CALLS = ("copy_to_device", "launch", "copy_to_host", "synchronize", "record_event")


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
        assert_raises(LaunchError, "refused", msm.check, accelerator)
        msm.check(accelerator)


@pytest.mark.parametrize("method", ["allocate", *CALLS])
def test_a_lost_device_is_an_error_under_every_policy(fake, msm, method):
    provider, calls = fake
    for n in range(0, calls[method], 3):
        for policy in ("allow", "warn", "forbid"):
            provider.fail(method, DeviceLost("gone"), after=n)
            with warnings.catch_warnings():
                warnings.simplefilter("error", FallbackWarning)
                assert_raises(DeviceLost, "gone", msm.check, acl.Accelerator("fake", fallback=policy))


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


# --- a training step on tensors of a device ---------------------------------------------------------------------------
class Calls:
    """Counts a provider's calls; the one numbered `fails` raises before it does anything."""

    methods = ("allocate", "copy_to_device", "copy_to_host", "launch")

    def __init__(self, provider, monkeypatch):
        self.count, self.total, self.fails, self.error = 0, 0, 0, None
        for method in self.methods:
            monkeypatch.setattr(type(provider), method, self.counted(getattr(type(provider), method)))

    def counted(self, right):
        def call(*args, **options):
            self.count += 1
            if self.count == self.fails:
                raise self.error
            return right(*args, **options)

        return call

    def set(self, fails, error=None):
        self.count, self.fails, self.error = 0, fails, error


@pytest.fixture(params=[pytest.param("opencl", marks=pytest.mark.soak), "webgpu"])  # PoCL compiles for 12 s
def calls(request, monkeypatch):
    return Calls(registry.create(require_backend(request.param)), monkeypatch), request.param


def new_model():
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3)
    model = nn.Sequential(*layers)
    return model, torch.randn(5, 6), torch.randint(0, 3, (5,))


def train(model, x, target, calls=None, fails=0, error=None):
    """Take one step of AdamW, its matrices fused, and return the loss and the parameters on the host."""
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "fused": True}, {"params": vectors, "fused": False}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, foreach=False)
    if calls is not None:
        calls.set(fails, error)
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    if calls is not None:
        calls.total, calls.fails = calls.count, 0
    return [loss.detach().cpu(), *(parameter.detach().cpu() for parameter in model.parameters())]


def on(device):
    model, x, target = new_model()
    return acl.to(model, device), acl.to(x, device), acl.to(target, device)


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
@pytest.mark.parametrize("error", [LaunchError("refused"), OutOfMemory("full")], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.soak)])
def test_a_training_step_is_right_wherever_its_device_fails(calls, error, every):
    counter, device = calls
    expected = train(*new_model())
    train(*on(device))  # compiles
    right = train(*on(device), counter)
    total = counter.total
    assert total >= 60
    for found, wanted in zip(right, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for n in range(1, total + 1, every):
        ledger().reset()
        results = train(*on(device), counter, n, error)
        assert sum(entry["count"] for entry in ledger().to_dict()["fallbacks"]) == 1, n
        for found, wanted in zip(results, right, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=f"after call {n} of {total} failed")


def test_without_fallback_a_training_step_raises(calls):
    counter, device = calls
    train(*on(device))
    train(*on(device), counter)
    total = counter.total
    with override(fallback="forbid"):
        for n in range(1, total + 1, 11):
            assert_raises(LaunchError, "refused", train, *on(device), counter, n, LaunchError("refused"))
            counter.set(0)
    assert_raises(DeviceLost, "gone", lambda: train(*on(device), counter, total // 2, DeviceLost("gone")))
