import gc
import math
import random
import statistics
import threading
import time
import weakref
from unittest.mock import Mock

import pytest
import torch

from accelerant.errors import DeviceLost
from accelerant.runtime.dispatch import race as module
from accelerant.runtime.dispatch.race import fastest, obstacle, race
from clock import Clock

CPU = torch.device("cpu")
CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(module, "time", CLOCK)


def sleeping(seconds, calls=None):
    def run():
        if calls is not None:
            calls.append(seconds)
        CLOCK.sleep(seconds)

    return run


def raising(error):
    return Mock(side_effect=error)


def test_the_faster_has_the_lower_time_whatever_the_order():
    for runs in (
        [("slow", sleeping(4e-3)), ("fast", sleeping(5e-4))],
        [("fast", sleeping(5e-4)), ("slow", sleeping(4e-3))],
    ):
        found = race(runs, CPU, budget_s=0.01)
        assert list(found.ms) == [name for name, _ in runs]
        assert 0.5 <= found.ms["fast"] < found.ms["slow"]
        assert not found.failed


def test_who_is_far_behind_is_not_timed_further():
    calls = []
    found = race([("fast", sleeping(1e-4)), ("slow", sleeping(0.05, calls))], CPU, budget_s=0.01)
    assert found.ms["slow"] > 50
    assert len(calls) == 3


def test_who_raises_is_out_with_the_reason_and_holds_no_memory():
    blocks = []

    class Block:
        pass

    def greedy():
        block = Block()
        blocks.append(weakref.ref(block))
        raise ValueError("too odd")

    later = iter(range(5))

    def at_last():
        if next(later, None) is None:
            raise RuntimeError("only five times")

    found = race([("greedy", greedy), ("plain", sleeping(1e-4)), ("weary", at_last)], CPU, budget_s=0.01)
    assert list(found.ms) == ["plain"]
    assert {name: str(error) for name, error in found.failed.items()} == {
        "greedy": "too odd",
        "weary": "only five times",
    }
    gc.collect()
    assert [block() for block in blocks] == [None]


def test_results_are_dropped():
    alive = []

    def allocates():
        assert not any(each() is not None for each in alive)
        x = torch.ones(10)
        alive.append(weakref.ref(x))
        return x

    race([("a", allocates), ("b", allocates)], CPU, budget_s=0.001)
    assert len(alive) > 10
    assert not any(each() is not None for each in alive)


def test_a_lost_device_ends_the_race():
    with pytest.raises(DeviceLost, match="gone"):
        race(
            [("a", raising(RuntimeError("unspecified launch failure"))), ("b", sleeping(1e-4))],
            CPU,
            lost=lambda error: DeviceLost("gone"),
        )
    assert race([("a", sleeping(1e-4))], CPU) is not None  # the turn was given back


def test_generators_are_put_back_and_no_graph_is_made():
    x = torch.ones(3, requires_grad=True)
    seen = []
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    race([("a", lambda: seen.append((x * torch.rand(3)).requires_grad))], CPU, budget_s=0.001)
    assert torch.equal(torch.rand(2), expected)
    assert not any(seen)


def test_one_race_at_a_time_but_one_within_another():
    inner = []
    race([("outer", lambda: inner.append(race([("inner", sleeping(1e-5))], CPU, budget_s=1e-4)))], CPU, budget_s=1e-3)
    assert all(found is not None for found in inner)

    began, done, other = threading.Event(), threading.Event(), []

    def waits():
        began.set()
        done.wait(60)

    thread = threading.Thread(target=lambda: race([("waits", waits)], CPU, budget_s=1e-3))
    thread.start()
    began.wait(60)
    other.append(race([("second", sleeping(1e-5))], CPU))
    done.set()
    thread.join()
    assert other == [None]


def test_the_preferred_wins_a_tie():
    ms = {"own": 1.025, "torch": 1.0, "slow": 2.0}
    assert fastest(ms, ["own", "torch", "slow"]) == "own"
    assert fastest(ms, ["slow", "torch", "own"]) == "torch"
    assert fastest(ms, ["own", "torch"], margin=0.01) == "torch"
    assert fastest(ms, ["slow"]) == "slow"
    assert fastest(ms, ["other"]) is None


class Disturbed:
    """A clock of calls whose true times are known: jitter, a clock that drifts, and now and then a long pause."""

    def __init__(self, seed, true_ms):
        self.random, self.true_ms, self.read = random.Random(seed), true_ms, 0

    def once(self, run):
        self.read += 1
        drift = 1.0 + 0.05 * self.read / 1000
        pause = 0.4 if self.random.random() < 0.04 else 0.0
        return self.true_ms[run()] * (drift * self.random.gauss(1.0, 0.015) + pause)

    def stream_ms(self, run, calls):
        return statistics.fmean(self.once(run) for _ in range(min(calls, 20)))

    def cold_ms(self, run, calls):
        return [self.once(run) for _ in range(calls)]


def chosen(seed, **true_ms):
    runs = [(name, lambda name=name: name) for name in true_ms]
    outcome = module._race(runs, Disturbed(seed, true_ms), 0.03, math.inf, lambda error: None)
    return fastest(outcome.ms, true_ms)


def test_noise_decides_nothing():
    seeds = range(100)
    once = [Disturbed(seed, {"own": 0.067, "torch": 0.071}) for seed in seeds]
    assert any(each.once(lambda: "own") > each.once(lambda: "torch") for each in once)  # as single timings would
    assert {chosen(seed, own=0.067, torch=0.071) for seed in seeds} == {"own"}
    assert {chosen(seed, own=0.068, torch=0.068, other=0.068) for seed in seeds} == {"own"}
    assert {chosen(seed, own=0.075, torch=0.070) for seed in seeds} == {"torch"}


def test_another_begins_each_turn():
    order = []

    class Watch(Disturbed):
        def stream_ms(self, run, calls):
            order.append(run())
            return 1.0

    module._race(
        [(name, lambda name=name: name) for name in "abc"], Watch(0, dict.fromkeys("abc", 1.0)), 0.0, math.inf, None
    )
    turns = order[6:]  # after two single calls of each
    assert ["".join(turns[i : i + 3]) for i in range(0, 12, 3)] == ["abc", "bca", "cab", "abc"]


def test_obstacles(monkeypatch):
    x = torch.ones(2)
    assert obstacle(CPU, (x, None, 3, [x, torch.nn.Parameter(x)])) is None
    assert "plain" in obstacle(CPU, (x, (torch.ones(2, device="meta"),)))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert "mode" in obstacle(CPU, (x,))
    assert "plain" in obstacle(CPU, (mode.from_tensor(x),))
    seen = []
    torch.func.vmap(lambda y: (seen.append(obstacle(CPU, (y,))), y)[1])(torch.ones(2, 2))
    assert "transform" in seen[0]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert "compile" in obstacle(CPU, ())


@pytest.mark.gpu
def test_on_a_gpu_the_longer_of_host_and_device_counts_and_memory_is_given_back():
    device = torch.device("cuda")
    x = torch.randn(2048, 4096, device=device)
    race([("warm", lambda: x * 2)], device)
    torch.cuda.synchronize()
    before, state = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()

    def by_host():
        time.sleep(3e-3)  # events may measure a little less
        return x[0] * 2

    found = race([("once", lambda: x * 2), ("thrice", lambda: torch.rand_like(x) * 2 * 2), ("host", by_host)], device)
    assert found.ms["once"] < found.ms["thrice"]
    assert found.ms["host"] > 2
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)


@pytest.mark.gpu
def test_no_race_in_a_capture():
    device = torch.device("cuda")
    x = torch.ones(8, device=device)
    x + 1
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        assert "captured" in obstacle(device, (x,))
        x + 1
    assert obstacle(device, (x,)) is None
    assert module.MARGIN == 0.03
