"""time_limit: who keeps it, how far they came, and that nothing is left half-written."""

import time

import numpy as np
import pytest
import torch
from torch import nn

from accelerant import Accelerator, AcceleratorConfig, zk
from accelerant.accelerator import facade
from accelerant.algebra.msm import cpu
from accelerant.algebra.ntt import launch as ntt_launch
from accelerant.errors import ConfigError, TimeLimitExceeded
from accelerant.nn.train import TrainConfig, Trainer, fit
from accelerant.runtime import time_limit as module
from accelerant.runtime.time_limit import check_time, is_limited, time_limit
from refusals import assert_raises


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still for a number of readings, which the test sets, and then is an hour later."""
    readings = [0]

    class Clock:
        @staticmethod
        def monotonic():
            readings[0] -= 1
            return 0.0 if readings[0] >= 0 else 3600.0

    monkeypatch.setattr(module, "time", Clock)
    return readings


def test_the_earlier_of_two_limits_holds_and_says_how_far_the_block_came():
    assert not is_limited()
    check_time("without a limit")
    waits = []
    with time_limit(1e-4, "proof"), time_limit(100, "inner"):
        time.sleep(1e-3)
        with pytest.raises(TimeLimitExceeded, match=r"^proof: 0\.\d+ s of at most 0\.0001 s after 1 of 3 passes$"):
            check_time("after 1 of 3 passes", lambda: waits.append(1))
    assert waits == [1]
    with time_limit(100), time_limit(1e-4, "inner"), time_limit(None, "none"):
        time.sleep(1e-3)
        assert_raises(TimeoutError, r"^inner: ", check_time, "here")
    assert not is_limited()
    for value in (0, -1, float("nan"), True):
        with pytest.raises(ConfigError, match="timeout must be above 0"), time_limit(value):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("order", ["natural", "natural_to_bit_reversed"])
def test_a_transform_ends_between_passes_and_leaves_its_output_as_it_was(clock, order):
    x = np.arange(1 << 12, dtype=np.uint64)
    wanted = zk.ntt(x, "goldilocks", order=order)
    out = x.copy()
    clock[0] = 1
    with time_limit(60, "block"), pytest.raises(TimeLimitExceeded, match="after 1 of 2 passes"):
        zk.ntt(out, "goldilocks", order=order, out=out)
    np.testing.assert_array_equal(out, x)
    clock[0] = 100
    with time_limit(60, "block"):
        zk.ntt(out, "goldilocks", order=order, out=out)
    np.testing.assert_array_equal(out, wanted)
    assert ntt_launch.is_limited is is_limited


@pytest.mark.slow
def test_a_sum_of_multiples_ends_between_tasks_and_between_sums(clock, monkeypatch):
    monkeypatch.setattr(cpu, "_ENTRIES_BETWEEN_CHECKS", 1)
    monkeypatch.setattr(cpu, "_GROUP_POINTS", 1)
    monkeypatch.setattr(cpu, "usable_cores", lambda: 1)
    group = zk.curve("bn254_g1")
    points = group.mul(group.generator, list(range(1, 304)))
    scalars = [2**200 + 7 * i for i in range(303)]
    wanted = zk.msm(scalars, points)
    clock[0] = 1
    with time_limit(60), pytest.raises(TimeLimitExceeded, match=r"after \d+ of \d+ tasks of 303 points"):
        zk.msm(scalars, points)
    clock[0] = 1000
    with time_limit(60):
        np.testing.assert_array_equal(zk.msm(scalars, points), wanted)
    monkeypatch.undo()
    with time_limit(1e-9), pytest.raises(TimeLimitExceeded, match="after 1 of 2 sums"):
        zk.msm([scalars, scalars], points)


@pytest.mark.parametrize(
    ("name", "shapes", "rows"),
    [("gelu", [(40, 8)], 40), ("attention", [(2, 5, 6, 8)] * 3, 10), ("conv2d", [(4, 2, 6, 6), (3, 2, 3, 3)], 4)],
    ids=["gelu", "attention", "conv2d"],
)
def test_long_calls_are_divided_so_that_they_keep_the_limit(name, shapes, rows, monkeypatch):
    """By rows, by batch and heads, by images; parts give what the whole call gives."""
    monkeypatch.setitem(facade._WORK_BETWEEN_CHECKS, "cpu", 1)
    arrays = [torch.randn(shape) for shape in shapes]
    with Accelerator("cpu") as acc:
        whole = getattr(acc, name)(*arrays)
    with Accelerator("cpu", config=AcceleratorConfig(timeout_s=600)) as acc:
        torch.testing.assert_close(getattr(acc, name)(*arrays), whole)
    with Accelerator("cpu", config=AcceleratorConfig(timeout_s=1e-9)) as acc:
        assert_raises(TimeLimitExceeded, f"after 0 of {rows} rows", lambda: getattr(acc, name)(*arrays))
        assert acc.metrics()[name]["errors"] == 1


def test_attention_with_other_results_is_divided_too(monkeypatch):
    monkeypatch.setitem(facade._WORK_BETWEEN_CHECKS, "cpu", 1)
    q, k, v = torch.randn(3, 2, 3, 6, 8).unbind()
    with Accelerator("cpu") as acc:
        whole = acc.attention(q, k, v, return_lse=True)
    with Accelerator("cpu", config=AcceleratorConfig(timeout_s=600)) as acc:
        for y, z in zip(acc.attention(q, k, v, return_lse=True), whole, strict=True):
            torch.testing.assert_close(y, z)
        few = acc.attention(q, k[:, :1], v[:, :1])  # grouped queries: by batch only
    torch.testing.assert_close(few, torch.stack([acc_free(q[i], k[i, :1], v[i, :1]) for i in range(2)]))


def acc_free(q, k, v):
    """Attention of the heads of one example, from torch's functions."""
    return nn.functional.scaled_dot_product_attention(q, k.expand_as(q), v.expand_as(q))


def test_training_ends_after_a_step_with_a_checkpoint(tmp_path, clock):
    torch.manual_seed(0)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    model = nn.Linear(4, 1)
    started = {name: value.clone() for name, value in model.state_dict().items()}
    config = TrainConfig(steps=8, batch_size=8, out=str(tmp_path / "run"), timeout_s=60, device="cpu")
    clock[0] = 4
    trainer = Trainer(model, config)
    raised = assert_raises(TimeLimitExceeded, r"training: .* s of at most 60 s after step 4 of 8", trainer.fit, x, y)
    assert "resume=True continues from it" in raised.__notes__[0]
    assert len(trainer.history.records) == 4
    clock[0] = 1000
    history = Trainer(model, config).fit(x, y, resume=True)
    assert (history.resumed_from, history.steps) == (4, 8)
    whole = nn.Linear(4, 1)
    whole.load_state_dict(started)
    fit(whole, x, y, TrainConfig(steps=8, batch_size=8, device="cpu"))
    assert torch.equal(whole.weight, model.weight)
    clock[0] = 1
    with time_limit(5, "search"), pytest.raises(TimeLimitExceeded, match=r"search: .* after step 1 of 8"):
        fit(nn.Linear(4, 1), x, y, TrainConfig(steps=8, batch_size=8, device="cpu"))
    clock[0] = 8
    with time_limit(5, "search"):  # a training whose last step was too late is whole, and is returned
        assert fit(nn.Linear(4, 1), x, y, TrainConfig(steps=8, batch_size=8, device="cpu")).steps == 8


@pytest.mark.gpu
def test_limits_hold_on_a_gpu():
    x = torch.arange(1 << 14, device="cuda")
    for _ in range(2):
        with time_limit(1e-9), pytest.raises(TimeLimitExceeded, match="after 1 of"):
            zk.ntt(x.view(torch.uint64), "goldilocks")
    assert torch.equal(x, torch.arange(1 << 14, device="cuda"))
