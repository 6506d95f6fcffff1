"""patch: each kind of call runs on our ops or as the model was, whichever is measured to be faster."""

import contextlib
import copy
import functools
import gc
import json
import pickle
import threading
import types
import warnings
from unittest.mock import Mock

import pytest
import torch
from patch_models import assert_same, batch, make, outcome
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import accelerant as acl
from accelerant.config import override
from accelerant.errors import FallbackWarning
from accelerant.nn.patching import choice
from accelerant.nn.patching.record import ATTENTION_NAME, RECORD

STEPS = 20  # of one kind, within which it is decided


@pytest.fixture
def _on_our_ops():  # of conftest: here it is measured
    pass


@pytest.fixture(autouse=True)
def _tried(monkeypatch):
    """All calls are tried on a CPU, the shortest and those with few logits too."""
    monkeypatch.setattr(choice, "FEWEST_LOGITS", 0)
    monkeypatch.setattr(choice, "BRIEF_S", 0.0)


class Clock:
    """A clock that only the model's forward passes move: `before` seconds as it was, `ours` on our ops."""

    def __init__(self):
        self.now, self.before, self.ours, self.sides, self.fixed = 0.0, 1.0, 1.0, [], 0.0

    def __call__(self):
        return self.now

    def tick(self, ours, elements):
        self.sides.append(ours)
        self.now += self.fixed + (self.ours if ours else self.before) * elements


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(choice, "_CLOCK", found)
    return found


class Normed(torch.nn.Module):
    """A norm that patch replaces."""

    def __init__(self, clock=None, trick=None):
        super().__init__()
        self.norm, self.trick = torch.nn.LayerNorm(4), trick
        self._clock = clock

    def forward(self, x):
        if self._clock is not None:
            self._clock.tick(is_ours(self), x.shape[0])
        if self.trick is not None:
            self.trick(x)
        return self.norm(x)


def is_ours(net):
    forward = net.norm.__dict__.get("forward")
    return forward is not None and forward.__func__ is not torch.nn.LayerNorm.forward


def rows(count=8):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(count))


def run(net, steps=STEPS, train=True, count=8):
    for step in range(steps):
        with torch.set_grad_enabled(train):
            y = net(rows(count(step) if callable(count) else count))
        if train:
            y.square().sum().backward()


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("before", "ours", "wins", "said"), [
    (1.0, 1.12, False, "as it was, 12% faster here"), (1.0, 1.03, False, "as it was, 3% faster here"),
    (1.01, 1.0, False, "as it was, equal within 5%"), (1.04, 1.0, False, "as it was, equal within 5%"),
    (1.07, 1.0, True, "on our ops, 7% faster here"), (1.3, 1.0, True, "on our ops, 30% faster here"),
])  # fmt: skip
def test_the_faster_side_is_chosen_and_said(clock, train, before, ours, wins, said):
    clock.before, clock.ours = before, ours
    net = Normed(clock)
    report = acl.nn.patch(net)
    run(net, train=train)
    run(net, 3, train=train)
    assert clock.sides[STEPS:] == [wins] * 3
    assert clock.sides[:9] == [False, False, True, True, True, False, False, True, True]  # in turns
    mode = "training" if train else "training mode without gradients"
    assert report.choices == {f"{mode}, float32, up to 32 elements (cpu)": said}
    assert f"up to 32 elements (cpu): {said}" in str(report)
    assert said in report._repr_html_()
    assert json.loads(json.dumps(report.to_dict()))["choices"] == report.choices


def test_a_clear_difference_is_decided_sooner(clock):
    clock.ours = 2.0
    net = Normed(clock)
    acl.nn.patch(net)
    run(net)
    assert clock.sides[2 * (1 + min(choice.CLEAR)) :] == [False] * (STEPS - 2 * (1 + min(choice.CLEAR)))


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("most_s", "tried"), [(8.1, False), (7.9, True)])
def test_on_a_cpu_the_shortest_calls_run_as_it_was(clock, monkeypatch, train, most_s, tried):
    monkeypatch.setattr(choice, "BRIEF_S", most_s)
    clock.ours = 0.5
    net = Normed(clock)
    report = acl.nn.patch(net)
    run(net, train=train)
    assert any(clock.sides) is tried
    said = ["on our ops, 100% faster here" if tried else "as it was, too short for a trial"]
    assert [*report.choices.values()] == said


def test_the_shortest_calls_run_without_a_look_until_a_longer_one(clock, monkeypatch):
    monkeypatch.setattr(choice, "BRIEF_S", 8.1)
    clock.ours, looks, look = 0.5, [], choice.Choice.__call__
    monkeypatch.setattr(choice.Choice, "__call__", lambda *args: looks.append(args) or look(*args))
    net = Normed(clock)
    report = acl.nn.patch(net)
    run(net)
    before = len(looks)
    run(net, 3)
    assert (before, len(looks), any(clock.sides)) == (3, 3, False)
    run(net, 1, train=False)
    assert len(looks) == 4
    run(net, count=40)
    assert clock.sides[-1] is True
    run(net, 1)
    assert clock.sides[-1] is False
    assert [text.partition(",")[0] for text in report.choices.values()] == ["as it was", "on our ops"]
    other = Normed(trick=lambda x: clock.tick(False, 1))
    acl.nn.patch(other)
    run(other, 4)
    assert other.__dict__[choice.RECORD].choice.brief == [-1, 32]
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.jit.trace(other, rows())
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    for count in (8, 40):
        assert torch.allclose(compiled(rows(count)), Normed().norm(rows(count)), atol=1e-6)


def test_short_calls_whose_second_argument_grows_are_looked_at(clock, monkeypatch):
    class Pair(Normed):
        def forward(self, query, memory):
            return super().forward(memory)

    monkeypatch.setattr(choice, "BRIEF_S", 8.1)
    clock.ours = 0.5
    net = Pair(clock)
    acl.nn.patch(net)
    with torch.no_grad():
        for count in [8] * STEPS + [40] * STEPS:
            net(rows(8), rows(count))
            assert clock.sides[-1] is False or count == 40
    assert clock.sides[-1] is True


def test_shapes_of_another_class_are_measured_again(clock):
    net = Normed(clock)
    report = acl.nn.patch(net)
    clock.ours = 0.5
    run(net)
    clock.ours = 2.0  # of larger tensors, say
    run(net, count=40)
    run(net.eval(), train=False, count=40)
    run(net.train(), 1)
    assert clock.sides[-1] is True
    assert [text.partition(",")[0] for text in report.choices.values()] == ["on our ops", "as it was", "as it was"]


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_on_a_cpu_a_model_of_transformers_has_only_a_large_loss_on_our_ops(family, monkeypatch):
    model, inputs = make(family), batch(family)
    wanted, logits = outcome(model, inputs), inputs["labels"].numel() * model.config.vocab_size
    for fewest, sides in ((logits + 1, {False}), (logits, {False, True})):
        monkeypatch.setattr(choice, "FEWEST_LOGITS", fewest)
        record, seen = acl.nn.patch(model) and model.__dict__[RECORD], set()
        attention = model.config._attn_implementation
        for _ in range(6):
            assert_same(outcome(model, inputs), wanted, rtol=1e-4, atol=1e-5)
            seen.add((record.ours, record.body, model.config._attn_implementation))
        assert seen == {(side, False, "sdpa") for side in sides}
        if len(sides) == 1:
            acl.nn.unpatch(model)
    del inputs["labels"]
    if family == "t5":
        inputs["decoder_input_ids"] = inputs["input_ids"]
    model.eval()(**inputs)
    assert list(record.report.choices.values())[-1] == "as it was, which is faster on a CPU"
    with override(race="off"):
        model(**inputs)
    assert (record.ours, record.body, model.config._attn_implementation) == (True, True, attention)


@pytest.mark.parametrize("fixed", [0.0, 1000.0])
@pytest.mark.parametrize("faster", [True, False])
def test_lengths_may_vary_within_a_class(clock, fixed, faster):
    """Time that grows with the elements, and time that hardly does."""
    clock.fixed, clock.ours = fixed, 0.9 if faster else 1.1
    if fixed:
        clock.ours = 1 + (clock.ours - 1) * 20
    net = Normed(clock)
    report = acl.nn.patch(net)
    generator = torch.Generator().manual_seed(0)
    run(net, count=lambda _: int(torch.randint(33, 64, (), generator=generator)))
    run(net, 2, count=40)
    assert clock.sides[-1] is faster, report


def test_without_one_thread_the_clock_is_the_walls(monkeypatch, clock):
    """Threads share work: the time of one says little."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    net = Normed(clock)
    acl.nn.patch(net)
    run(net)
    assert clock.sides.count(True) >= min(choice.CLEAR)
    (trial,) = net.__dict__[RECORD].choice._trials.values()
    assert trial.now() > 0.0


# --- between a forward pass and its backward pass ---------------------------------------------------------------------
def test_no_switch_before_a_backward_pass(clock):
    net = Normed(clock)
    acl.nn.patch(net)
    for _ in range(STEPS):
        one, two = net(rows()), net(rows())
        assert clock.sides[-1] == clock.sides[-2]
        (one.sum() + two.sum()).backward()
    assert {*clock.sides} == {True, False}
    (trial,) = net.__dict__[RECORD].choice._trials.values()
    assert trial.ours is not None


def test_a_graph_that_is_kept_may_run_again_and_is_waited_for(clock):
    net = Normed(clock)
    acl.nn.patch(net)
    run(net, 3)
    y = net(rows()).sum()
    y.backward(retain_graph=True)
    side = clock.sides[-1]
    run(net, 3)
    assert clock.sides[-3:] == [side] * 3
    y.backward()
    run(net)
    assert {*clock.sides[-STEPS:]} == {True, False}


def test_a_new_kind_waits_for_calls_that_were_not_watched(clock):
    """Once all is decided, backward passes are not watched: a call of another kind begins on the side that is there."""
    net = Normed(clock)
    acl.nn.patch(net)
    clock.ours = 2.0
    run(net)
    one, two = net(rows()), net(rows(100))
    assert clock.sides[-2:] == [False, False]
    (one.sum() + two.sum()).backward()
    for _ in range(STEPS):
        one, two = net(rows()), net(rows(100))
        assert clock.sides[-1] == clock.sides[-2]
        (one.sum() + two.sum()).backward()


def test_outputs_that_are_dropped_are_not_waited_for(clock):
    net = Normed(clock)
    acl.nn.patch(net)
    for _ in range(STEPS):
        net(rows())
    assert {*clock.sides} == {True, False}


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_checkpoints_run_the_code_that_they_ran(reentrant, accumulate):
    """A checkpoint that is not reentrant raises if its second run differs."""
    model = make("llama")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    other = copy.deepcopy(model)
    report = acl.nn.patch(model)
    for step in range(24 // accumulate):
        for part in range(accumulate):
            inputs = batch("llama", seed=step + part)
            losses = [each(**inputs).loss for each in (model, other)]
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
        for each in (model, other):
            for param in each.parameters():
                param.data.sub_(param.grad, alpha=0.01)
                param.grad = None
    assert report.choices


def test_a_checkpoint_around_the_model_runs_what_it_ran(clock):
    net = Normed(clock)
    acl.nn.patch(net)
    for _ in range(STEPS):
        checkpoint(net, rows().requires_grad_(), use_reentrant=False).sum().backward()
        assert clock.sides[-1] == clock.sides[-2]
    assert {*clock.sides} == {True, False}


# --- calls that are not measured --------------------------------------------------------------------------------------
@pytest.mark.parametrize("context", [
    lambda: override(deterministic=True), lambda: override(race="off"),
    lambda: FlopCounterMode(display=False),
], ids=["deterministic", "race off", "a mode"])  # fmt: skip
def test_some_calls_are_on_our_ops_always(clock, context):
    clock.ours = 2.0
    net = Normed(clock)
    report = acl.nn.patch(net)
    with context():
        run(net)
    assert clock.sides == [True] * STEPS
    assert not report.choices
    run(net)
    assert clock.sides[-1] is False
    with context():
        run(net, 1)
    assert clock.sides[-1] is False  # what is decided stays


def test_graphs_that_were_asked_for_are_not_measured(clock):
    clock.ours = 2.0
    net = Normed(clock)
    acl.nn.patch(net, graph=True)
    with pytest.warns(FallbackWarning, match="no CUDA graph") as caught:
        run(net)
    assert {each.filename for each in caught} == {__file__}
    assert clock.sides == [True] * STEPS


def test_a_compiled_or_exported_model_is_not_measured():
    net = Normed()
    report = acl.nn.patch(net)
    compiled = torch.compile(net, backend="eager", fullgraph=True)
    for _ in range(STEPS):
        torch.testing.assert_close(compiled(rows()), Normed()(rows()))
    torch.export.export(net, (rows(),)).module()(rows())
    torch.jit.trace(net, rows())
    assert not report.choices


@pytest.mark.parametrize("steps", [0, 1, STEPS])
def test_a_trace_with_symbolic_sizes(steps):
    """Before a trial, in its middle, and once a call's kind is found by its sizes."""
    net = Normed()
    acl.nn.patch(net)
    run(net, steps, train=False)
    traced = make_fx(net, tracing_mode="symbolic", _allow_non_fake_inputs=True)(rows())
    torch.testing.assert_close(traced(rows(5)), Normed()(rows(5)))
    run(net, 1, train=False)


def test_calls_inside_of_calls_and_exceptions(clock):
    net = Normed(clock)
    report = acl.nn.patch(net)
    net.trick = lambda x: net(x[: len(x) // 2]) if len(x) > 2 else None
    run(net)
    assert report.choices

    net.trick = Mock(side_effect=ValueError("of the user"))
    with pytest.raises(ValueError, match="of the user"):
        net(rows(100))
    net.trick = None
    run(net, count=100)
    assert len(report.choices) == 2


def test_memory_that_runs_out_as_it_was_leaves_our_ops(clock):
    def trick(x):
        if not is_ours(net):
            raise torch.OutOfMemoryError("as it was")

    net = Normed(clock, trick)
    acl.nn.patch(net)
    run(net)
    assert clock.sides[-3:] == [True] * 3
    assert "memory" in str(net.__dict__[RECORD].report)


def test_threads_never_see_a_switch():
    inside, leave = threading.Event(), threading.Event()

    def wait(x):
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            leave.wait(60)

    net = Normed(trick=wait)
    acl.nn.patch(net)
    run(net, 2, train=False)
    thread = threading.Thread(target=run, args=(net, 1, False))
    thread.start()
    inside.wait(60)
    sides = set()
    for _ in range(STEPS):
        run(net, 1, train=False)
        sides.add(is_ours(net))
    leave.set()
    thread.join()
    assert len(sides) == 1
    run(net, train=False)
    assert net.__dict__[RECORD].report.choices


# --- copies, unpatch --------------------------------------------------------------------------------------------------
def begun(steps):
    net = Normed()
    acl.nn.patch(net)
    run(net, steps)
    return net


@pytest.mark.parametrize("steps", [3, 2])  # ends on our ops, and as it was
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda net: pickle.loads(pickle.dumps(net))])
def test_copies_in_the_middle_of_a_trial(steps, copied):
    net = begun(steps)
    assert is_ours(net) is (steps == 3)
    other = copied(net)
    assert is_ours(other)
    run(other)
    assert other.__dict__[RECORD].report.choices
    acl.nn.unpatch(other)
    assert "forward" not in vars(other) | vars(other.norm)
    torch.testing.assert_close(other(rows()), net(rows()))


@pytest.mark.parametrize("family", ["llama", "bert", "mixtral"])
def test_a_copy_and_unpatch_of_a_model_of_transformers_as_it_was(family):
    model, inputs = make(family), batch(family)
    wanted = outcome(model, inputs)
    acl.nn.patch(model)
    record = model.__dict__[RECORD]
    replaced = {id(module): module.__dict__.get("forward") for module in model.modules()}
    record.switch(ours=False)
    assert model.config._attn_implementation == "sdpa"
    other = copy.deepcopy(model)
    assert_same(outcome(other, inputs), wanted, rtol=2e-5, atol=4e-6)
    record.switch(ours=True)
    assert model.config._attn_implementation == ATTENTION_NAME
    assert {id(module): module.__dict__.get("forward") for module in model.modules()} == replaced
    other.__dict__[RECORD].switch(ours=True)
    assert other.config._attn_implementation == ATTENTION_NAME
    for each in (model, other):
        each.__dict__[RECORD].switch(ours=False)
        acl.nn.unpatch(each)
        assert not any("forward" in vars(module) or "_loss_function" in vars(module) for module in each.modules())
        assert_same(outcome(each, inputs), wanted)


@pytest.mark.parametrize("steps", [0, 3, 2])  # before a switch, on our ops, and as it was
def test_a_forward_that_was_replaced_since_stays(steps):
    net = begun(steps)
    mine = net.norm.forward = lambda x: 2 * x * net.norm.weight
    run(net)
    assert net.norm.forward is mine


def test_a_forward_that_was_wrapped_since_stays():
    net = begun(0)
    ours = net.norm.forward.__func__
    mine = net.norm.forward = types.MethodType(functools.wraps(ours)(lambda self, x: ours(self, x)), net.norm)
    run(net)
    assert net.norm.forward is mine


# --- results ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", [
    "llama",
    "bert",
    "vit",
    *[pytest.param(each, marks=pytest.mark.slow) for each in ("t5", "whisper", "gemma3", "phi3")],
])  # fmt: skip
def test_losses_before_during_and_after_a_trial_are_the_models(family):
    model = make(family)
    other = copy.deepcopy(model)
    report = acl.nn.patch(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-2) for each in (model, other)]
    for step in range(STEPS + 2):
        inputs = batch(family, S=13 - step % 2, seed=step)
        losses = []
        for each, optimizer in zip((model, other), optimizers, strict=True):
            loss = each(**inputs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=2e-5, atol=4e-6)
    assert len(report.choices) == 1


def test_generated_tokens_are_the_models():
    model = make("llama").eval()
    ids = batch("llama")["input_ids"][:, :6]
    wanted = model.generate(ids, max_new_tokens=40, do_sample=False)
    report = acl.nn.patch(model)
    for _ in range(2):
        assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), wanted)
    assert report.choices


def test_ddp(tmp_path):
    def trained():
        net = Normed()
        report = acl.nn.patch(net)
        run(torch.nn.parallel.DistributedDataParallel(net))
        return report.choices

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.distributed.destroy_process_group)
        stack.callback(gc.collect)  # a wrapper that outlives its group may wait for the group's threads for ever
        assert trained()


# --- kernels that are being compiled ---------------------------------------------------------------------------------
class Kernels:
    """In place of the compiling processes: calls on our ops lack kernels while `lacking`; they are ready or not."""

    def __init__(self, net):
        self.net, self.lacking, self.ready, self.missed, self.sides = net, True, False, 0, []
        net.trick = self.call

    def call(self, x):
        self.sides.append(is_ours(self.net))
        self.missed += self.lacking and is_ours(self.net)


@pytest.fixture
def kernels(clock, monkeypatch):
    found = Kernels(Normed(clock))
    monkeypatch.setattr(choice.background, "misses", lambda: found.missed)
    monkeypatch.setattr(choice.background, "is_ready", lambda: found.ready)
    return found


@pytest.mark.parametrize("train", [True, False])
def test_while_kernels_are_compiled_a_model_runs_as_it_was_and_is_not_measured(kernels, clock, train):
    report = acl.nn.patch(kernels.net)
    clock.ours = 0.5
    run(kernels.net, 30, train)
    assert kernels.sides == [False] * 2 + [True] + [False] * 27, "the first call on our ops asks for the kernels"
    assert not report.choices
    kernels.ready, kernels.lacking = True, False
    kernels.sides.clear()
    run(kernels.net, STEPS, train)
    assert kernels.sides[-1]
    assert list(report.choices.values()) == ["on our ops, 100% faster here"]


def test_other_kinds_of_calls_stay_where_they_are(kernels, clock):
    acl.nn.patch(kernels.net)
    clock.ours, kernels.lacking = 0.5, False
    run(kernels.net)
    kernels.lacking = True
    run(kernels.net, 4, train=False)
    kernels.lacking = False
    kernels.sides.clear()
    run(kernels.net, 4)
    assert all(kernels.sides)
    kernels.sides.clear()
    run(kernels.net, 4, train=False)
    assert not any(kernels.sides)


def test_a_model_that_lacks_memory_as_it_was_stays_on_our_ops_while_they_are_compiled(kernels):
    acl.nn.patch(kernels.net)
    run(kernels.net, 1)

    def trick(x):
        kernels.call(x)
        if not is_ours(kernels.net):
            raise torch.OutOfMemoryError("as it was")

    kernels.net.trick = trick
    kernels.sides.clear()
    run(kernels.net, 4)
    assert kernels.sides == [False] + [True] * 4


def test_free_memory_is_asked_for_again_where_it_is_scarce(monkeypatch):
    free, asked = [800], []
    monkeypatch.setattr(choice, "_free_bytes", lambda: asked.append(None) or free[0])
    trial = choice._Trial((True, True, torch.device("cuda"), torch.float32, 0, 0), settled=True, body=True)
    labels = {"labels": torch.zeros(2, dtype=torch.long)}
    model = types.SimpleNamespace(config=types.SimpleNamespace(vocab_size=4))  # 8 logits, 96 bytes
    assert [choice._has_room(model, trial, labels) for _ in range(3)] == [True] * 3
    assert len(asked) == 1
    model.config.vocab_size = 8
    assert [choice._has_room(model, trial, labels) for _ in range(3)] == [True] * 3
    free[0] = 192
    assert not choice._has_room(model, trial, labels)
    assert len(asked) == 5


def test_a_model_that_no_process_has_compiled_for_runs_as_it_was_first(monkeypatch, tmp_path):
    model, now = make("gpt2"), [0.0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(choice.background, "is_started", lambda: True)
    monkeypatch.setattr(choice.time, "monotonic", lambda: now[0])
    device = torch.device("cuda")

    def early(device=device):
        trial = choice._Trial((True, True, device, torch.bfloat16, 1, 1), True, True)
        return choice.Choice(None, False), trial

    with override(cache_dir=tmp_path):
        each, trial = early()
        assert sum(each._is_early(model, trial) for _ in range(100)) == choice.EARLY_CALLS - 1
        each, trial = early()
        assert each._is_early(model, trial)
        now[0] += choice.EARLY_S
        assert not each._is_early(model, trial)
        each, trial = early(torch.device("cpu"))
        assert not each._is_early(model, trial)
        choice.remember(model)
        each, trial = early()
        assert not each._is_early(model, trial)
        each, trial = early()
        assert each._is_early(make("gpt2", n_embd=96), trial), "another width has other kernels"
