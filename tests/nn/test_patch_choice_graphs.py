"""patch: calls from CUDA graphs, here the stand-in for them, are compared with the model as it was."""

import copy

import pytest
import torch
from patch_models import assert_same, batch, make, outcome
from test_patch_choice import STEPS, Clock, _on_our_ops  # noqa: F401  the latter a fixture
from test_patch_graphs import on_cpu  # noqa: F401  a fixture

import accelerant as acl
from accelerant.nn.patching import buckets, choice
from accelerant.nn.patching.record import RECORD


@pytest.fixture
def graphed(monkeypatch):
    """A patched GPT-2 whose steps run from the stand-in for graphs, by the clock; `sides` has 2 for a replay."""
    run, clock = choice.Choice._run, Clock()
    monkeypatch.setattr(choice, "_CLOCK", clock)

    def ticking(self, model, record, args, kwargs):
        before, side = record.report.graphs["replayed"], int(record.ours)
        result = run(self, model, record, args, kwargs)
        side += record.report.graphs["replayed"] - before
        clock.sides.append(side)
        clock.now += (clock.before, 1.0, clock.ours)[side]
        return result

    monkeypatch.setattr(choice.Choice, "_run", ticking)
    model = make("gpt2")
    return model, acl.nn.patch(model), copy.deepcopy(model), clock


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(("before", "ours", "side"), [(0.9, 0.3, 2), (0.9, 1.2, 0), (0.9, 0.95, 0), (1.2, 1.1, 2)])
def test_graphs_are_our_side_once_they_are_captured(graphed, before, ours, side):
    model, report, other, clock = graphed
    clock.before, clock.ours = before, ours
    acl.nn.unpatch(other)
    for step in range(STEPS + 3):
        inputs = batch("gpt2", seed=step)
        assert_same(outcome(model, inputs), outcome(other, inputs), rtol=2e-5, atol=4e-6)
    assert clock.sides[:4] == [1, 1, 1, 2]
    assert clock.sides[STEPS:] == [side] * 3, report
    assert clock.sides.count(0) >= min(choice.CLEAR)
    assert bool(model.__dict__[RECORD].graphs._captured) is (side == 2)  # no memory for graphs that lose
    assert len(report.choices) == 1


def test_sides_take_turns_where_lengths_have_no_graphs(graphed, monkeypatch):
    monkeypatch.setattr(buckets, "obstacle", lambda model: "for the test")
    model, report, _, clock = graphed
    clock.before = 0.9
    for rows, most in ((2, choice.MOST_EAGER + choice.LAPS), (8, choice.LAPS)):  # two kinds, by their sizes
        began = len(clock.sides)
        for step in range(45):
            outcome(model, batch("gpt2", B=rows, S=33 + step % 31, seed=step))
        sides = clock.sides[began:]
        assert 0 < sides.count(1) <= most
        assert sides[:12].count(0) >= 4
        assert sides[-9:] == [0] * 9, report
    assert len(report.choices) == 2


def test_a_model_whose_graphs_are_gone_is_measured_again(graphed, monkeypatch):
    model, report, _, clock = graphed
    clock.before, clock.ours = 0.9, 0.3
    for step in range(STEPS):
        outcome(model, batch("gpt2", seed=step))
    assert clock.sides[-3:] == [2] * 3
    model.__dict__[RECORD].graphs._off = "for the test"
    for step in range(choice.MOST_EAGER + STEPS + 3):
        outcome(model, batch("gpt2", seed=step))
    assert clock.sides[-3:] == [0] * 3, report
    assert not model.__dict__[RECORD].graphs._captured  # no memory for them
    assert len(report.choices) == 1


def test_without_memory_for_it_nothing_runs_as_it_was(graphed, monkeypatch):
    monkeypatch.setattr(choice, "_has_room", lambda model, trial, kwargs: False)
    model, report, _, clock = graphed
    clock.before = 0.1
    for step in range(STEPS + 3):
        outcome(model, batch("gpt2", seed=step))
    assert 0 not in clock.sides
    assert "memory" in str(report)


@pytest.mark.parametrize(("ours", "side"), [(0.3, 2), (1.2, 0)])
def test_both_sides_take_turns_at_adding_tokens_to_a_cache(graphed, ours, side):
    model, report, other, clock = graphed
    acl.nn.unpatch(other)
    clock.before, clock.ours = 0.9, ours
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
    for seed in range(4):
        ids = batch("gpt2", S=5, seed=seed)["input_ids"]
        wanted, found = (
            each.eval().generate(ids, attention_mask=torch.ones_like(ids), **options) for each in (other, model)
        )
        assert torch.equal(found, wanted)
    assert clock.sides.count(0) > 3 < clock.sides.count(2)
    assert clock.sides[-15:] == [side] * 15
    assert [choice.partition(",")[0] for choice in report.choices.values()][-1] == ("as it was", "", "on our ops")[side]
