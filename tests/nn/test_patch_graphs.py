"""patch with CUDA graphs: calls replayed from graphs equal eager calls, and what cannot be captured runs eagerly."""

import copy
import pickle
import random
import re
import threading
import warnings
from functools import partial

import patch_models
import pytest
import torch
import torch.nn.functional as F
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel

import accelerant as acl
from accelerant.config import override
from accelerant.errors import FallbackWarning, LaunchError
from accelerant.nn.patching import capture, graphs
from accelerant.nn.patching.buckets import NotYet
from accelerant.runtime.ledger import ledger
from refusals import assert_raises

BEFORE = graphs.EAGER_CALLS


class Rerun:
    """The interface of Graph on a CPU: replays run a copy of the model as it was, over the same memory."""

    def __init__(self, name):
        self.name, self.pool, self.following, self.sharing = name, self, None, []

    def capture(self, fn, *, warm_up, pool=None, quick=False):
        captured = fn.__self__
        buffers = [(x, x.clone()) for x in captured._run.args[0].buffers()]
        with torch.random.fork_rng():
            results = fn()
        for x, value in buffers:  # a capture runs nothing
            x.data.copy_(value)
        if fn.__name__ == "_run_forward":
            self.pool = self if pool is None else pool
            self.pool.sharing.append(self)
            model = captured._run.args[0]
            held = [*model.parameters(), *model.buffers()]
            self.run = partial(captured._run.func, copy.deepcopy(model, {id(x): x for x in held}))
        else:
            (first,) = [graph for graph in pool.sharing if graph.captured is captured]
            first.following, self.run = self, first.run
        self.fn, self.captured, self.needed = fn, captured, captured._needed
        self.memory = [x.detach() if x is not None and x.requires_grad else x for x in results]
        return results

    def replay(self):
        for graph in self.pool.sharing if self.following is not None else ():
            for shared in (*graph.memory, *(graph.following.memory if graph.following else ())):
                if shared is not None:  # one pool: what another pass left may lie where this one writes
                    shared.fill_(float("nan"))
        rebuild, run = self.captured._rebuild, self.captured._run
        self.captured._needed, self.captured._run = self.needed, self.run
        with (
            torch.inference_mode(False),
            torch.set_grad_enabled(self.captured._graded),
            torch.random.fork_rng(),
        ):  # a replay draws nothing on the host
            results = self.fn()
        self.captured._rebuild, self.captured._run = rebuild, run
        with torch.no_grad():
            for to, found in zip(self.memory, results, strict=True):
                if to is not None:
                    to.copy_(found)


class Event:
    """A moment of a device; each is `Event.apart_ms` after the one before."""

    now_ms, apart_ms = 0.0, 1e-3

    def __init__(self):
        Event.now_ms += Event.apart_ms
        self.at_ms = Event.now_ms

    def query(self):
        return True

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(capture, "Graph", Rerun)
    monkeypatch.setattr(graphs, "_event", Event)
    monkeypatch.setattr(graphs, "_allocated_bytes", lambda: 0)
    monkeypatch.setattr(Event, "apart_ms", 1e-3)
    monkeypatch.setattr(graphs, "_free_bytes", lambda: 1 << 30)
    monkeypatch.setattr(capture, "DEVICE", "cpu")


@pytest.fixture
def model():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def ids(seed=0, length=16):
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))


def trained(model, steps=8, accumulate=1, amp=False, logits=False, set_to_none=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        for part in range(accumulate):
            x = ids(step * accumulate + part)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=amp):
                output = model(input_ids=x, labels=x)
            loss = output.loss + output.logits.float().square().mean() if logits else output.loss
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
        losses.append(loss.item())
    return losses


def test_memory_of_a_graph_that_was_dropped_is_not_shared(model, monkeypatch):
    pools, capture_it, missing = [], Rerun.capture, [True]

    def captured(self, fn, *, warm_up, pool=None, quick=False):
        pools.append(pool)
        return capture_it(self, fn, warm_up=warm_up, pool=pool, quick=quick)

    def await_kernels(self):
        if missing and missing.pop():
            raise NotYet("a kernel is compiled")

    monkeypatch.setattr(Rerun, "capture", captured)
    monkeypatch.setattr(graphs.Graphs, "_await_kernels", await_kernels)
    report = acl.nn.patch(model, graph=True)
    trained(model)
    assert [pool is None for pool in pools] == [True, False] * 2
    assert pools[1] is not pools[3]
    assert report.graphs["eager: a kernel is compiled"] == report.graphs["captured"] == 1


@pytest.mark.parametrize(("counted", "reads"), [
    (lambda x: torch.topk(x, 2).indices.reshape(-1), False),
    (lambda x: x.topk(2, dim=-1)[1].view(-1).flatten(), False),
    (lambda x: torch.topk(x[:, :3], 2, -1)[1].flatten(), False),  # a shorter row than minlength
    (lambda x: torch.topk(x, 2, dim=0).indices.reshape(-1), True),  # of six rows
    (lambda x: torch.topk(x, 2).indices.reshape(-1).add_(3), True),
    (lambda x: torch.topk(x, 2).indices.reshape(-1) + 3, True),
    (lambda x: x.reshape(-1).abs().long(), True),
])  # fmt: skip
def test_bincount_reads_its_length_in_a_capture_unless_a_selection_bounds_it(counted, reads):
    x, work = torch.randn(6, 4), capture.HostWork("cpu")

    def counts():
        return torch.bincount(counted(x), minlength=4)

    with work.noted():
        counts()
    x.normal_()  # a replay's values are others
    wanted = counts()
    with work.repeated(), profile() as ran:
        torch.testing.assert_close(counts(), wanted)
    assert any(event.key == "aten::bincount" for event in ran.key_averages()) is reads


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize(("options", "checkpointing"), [
    ({}, False), ({"accumulate": 2}, False), ({"amp": True}, False), ({"logits": True}, False),
    ({"set_to_none": False}, False), ({"accumulate": 2}, True),
], ids=["plain", "accumulation", "autocast", "logits", "zeroed", "checkpointing"])  # fmt: skip
def test_training_from_graphs_is_training_without(model, options, checkpointing):
    if checkpointing:
        model.gradient_checkpointing_enable()
    other = copy.deepcopy(model)
    acl.nn.patch(model)
    report = acl.nn.patch(other, graph=True)
    assert trained(other, **options) == pytest.approx(trained(model, **options), rel=1e-6)
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two)  # a tied weight's two gradients are summed in another order
    calls = 8 * options.get("accumulate", 1)
    assert report.graphs == {"captured": 1, "replayed": calls - BEFORE, "eager: before the capture": BEFORE}


class Net(torch.nn.Module):
    """A norm, a branch that only the second output depends on, and options that users change."""

    def __init__(self):
        super().__init__()
        self.norm, self.head, self.other = torch.nn.LayerNorm(4), torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)
        self.register_buffer("shift", torch.zeros(4))
        self.scale, self.options, self.trick = 1.0, {"power": 1}, None

    def forward(self, x, factor=1.0):
        if self.trick is not None:
            self.trick(x)
        y = self.norm(x + self.shift) * self.scale * factor
        return self.head(y ** self.options["power"]), self.other(y)


@pytest.fixture
def net():
    torch.manual_seed(0)
    found = Net().train()
    found.report = acl.nn.patch(found, graph=True)
    return found


def rows(seed=0, count=5):
    return torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))


def warmed(net, calls=BEFORE + 1, count=5, leaf=False):
    for call in range(calls):
        net(rows(call, count).requires_grad_(leaf))[0].sum().backward()
    net.zero_grad()
    return net


def gradients(net, x, plain=False):
    """Gradients of a call, from the graphs or by the class's own forward."""
    net.zero_grad()
    outputs = Net.forward(net, x) if plain else net(x)
    (outputs[0].square().sum() + outputs[1].sum()).backward()
    return [param.grad for param in net.parameters()]


def assert_right(net, x):
    replayed = net.report.graphs["replayed"]
    for one, two in zip(gradients(net, x), gradients(net, x, plain=True), strict=True):
        torch.testing.assert_close(one, two)
    assert net.report.graphs["replayed"] == replayed + 1


def test_an_output_without_gradient_leaves_its_parameters_without(net):
    net.requires_grad_(True)
    warmed(net)
    net(rows(9))[0].sum().backward()
    assert net.report.graphs["replayed"] == 2
    assert net.other.weight.grad is None
    assert net.head.weight.grad is not None
    assert_right(net, rows(10))
    assert net.other.weight.grad is not None
    # The gradient that the other output had in that pass is none of the next one's.
    found = []
    for plain in (False, True):
        net.zero_grad()
        (Net.forward(net, rows(11)) if plain else net(rows(11)))[0].sum().backward()
        found.append(net.norm.weight.grad.clone())
    torch.testing.assert_close(*found)
    assert net.report.graphs["replayed"] == 4


def test_outputs_and_gradients_that_the_user_keeps_are_not_overwritten(net):
    warmed(net)
    first = [out.detach() for out in net(rows(1))]
    values, grads = [out.clone() for out in first], gradients(net, rows(2))
    copies = [grad.clone() for grad in grads]
    net(rows(3))
    gradients(net, rows(4))
    assert all(map(torch.equal, first, values))
    assert all(map(torch.equal, grads, copies))


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
@pytest.mark.parametrize("use", ["set to none", "accumulated", "kept", "viewed"])
def test_gradients_lie_in_the_graphs_memory_while_the_next_call_finds_them_unused(net, use):
    warmed(net)
    seen, kept = set(), []
    for step in range(4):
        net(rows(step))[0].sum().backward()
        seen.add(net.head.bias.grad.data_ptr())
        if use == "kept":
            kept.append(net.head.weight.grad)
        elif use == "viewed":
            kept.append(net.head.weight.grad[0])
        values = [x.clone() for x in kept]
        if use != "accumulated":
            net.zero_grad()
        net(rows(step + 10))
        assert all(map(torch.equal, kept, values))
    lent = net.__dict__["_accelerant_patch"].graphs._captured
    assert (len(seen) == 1) == (use == "set to none")
    assert all(each.pool.lends == (use == "set to none") for each in lent.values())
    eager = net.report.graphs["eager: gradients of an earlier call are kept"]
    assert (eager > 0) == (use in ("kept", "viewed"))
    net.zero_grad()
    kept.clear()
    assert_right(net, rows(5))


def test_a_view_of_a_gradient_stays_one_while_gradients_are_zeroed_in_place(net):
    warmed(net)
    found = []
    for plain in (True, False):
        net.zero_grad()
        views = None
        for step in range(3):
            (Net.forward(net, rows(step)) if plain else net(rows(step)))[0].sum().backward()
            views = views or [param.grad.view(-1) for param in (net.head.weight, net.head.bias)]
            for view in views:  # as a sum over processes changes gradients
                view.mul_(0.5)
            found.append([param.grad.clone() for param in (net.head.weight, net.head.bias)])
            net.zero_grad(set_to_none=False)
    for one, two in zip(found[:3], found[3:], strict=True):
        torch.testing.assert_close(one, two)


def test_gradients_are_copied_for_hooks_which_may_use_them_on_another_stream(net):
    warmed(net)
    (captured,) = net.__dict__["_accelerant_patch"].graphs._captured.values()
    own = {storage.data_ptr() for storage in captured.pool._lent.values()}
    seen = []
    for hooked in (False, True):
        if hooked:
            net.norm.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.data_ptr()))
        net(rows())[0].sum().backward()
        assert (net.norm.weight.grad.data_ptr() in own) is not hooked
        net.zero_grad()
    assert not own & set(seen)


class Hoards(torch.autograd.Function):
    kept = None

    @staticmethod
    def forward(ctx, weight, x):
        ctx.save_for_backward(x)
        return x * weight

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        found = (dy * x).sum(0)
        Hoards.kept = found.detach()
        return found, None


class HoardingScale(torch.nn.LayerNorm):
    def forward(self, x):
        return Hoards.apply(self.weight, x)


def test_memory_that_a_capture_leaves_in_use_is_not_lent(net):
    net.norm = HoardingScale(4)
    warmed(net)
    Hoards.kept = None  # as the collection of garbage may do later
    for step in range(2):
        net(rows(step))[0].sum().backward()
    found = net.norm.weight.grad
    net.zero_grad()
    for step in range(2):
        Net.forward(net, rows(step))[0].sum().backward()
    torch.testing.assert_close(found, net.norm.weight.grad)


CHANGES = {
    "attribute": lambda net: setattr(net, "scale", 3.0),
    "options": lambda net: net.options.update(power=2),
    "buffer": lambda net: setattr(net, "shift", torch.ones(4)),
    "memory": lambda net: setattr(net.head.weight, "data", torch.randn(3, 4)),
    "module": lambda net: setattr(net, "other", torch.nn.Linear(4, 2, bias=False)),
    "frozen": lambda net: net.norm.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_a_changed_model_is_captured_again(net, change):
    warmed(net)
    CHANGES[change](net)
    warmed(net, BEFORE + 2)
    assert net.report.graphs["captured"] == 2
    if change == "frozen":
        assert all(param.grad is None for param in net.norm.parameters())
        net.norm.requires_grad_(True)
        warmed(net, BEFORE + 2)
    assert_right(net, rows(7))


def test_values_changed_in_place_are_seen_without_a_capture(net):
    warmed(net)
    with torch.no_grad():
        net.shift.add_(1)
    net.load_state_dict({name: value * 2 for name, value in net.state_dict().items()})
    assert_right(net, rows(7))
    assert net.report.graphs["captured"] == 1


@pytest.mark.parametrize(("trick", "reason"), [
    (lambda net, x: float(torch.rand([])), "random numbers on the host"),
    (lambda net, x: x.add_(1), "writes into its arguments"),
    (lambda net, x: setattr(net, "scale", net.scale + 1), "changes modules or their"),
])  # fmt: skip
def test_a_forward_that_a_replay_would_not_repeat_runs_eagerly(net, trick, reason):
    net.trick = lambda x: trick(net, x)
    with pytest.warns(FallbackWarning, match=reason):
        warmed(net)
    assert not net.report.graphs["captured"]


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["t5", "whisper", "gemma3", "mistral"])
def test_families_with_caches_and_layers_left_out_are_captured(family):
    """T5 and Whisper make two caches, windows have caches of their own; Whisper draws whether layers are left out."""
    found = []
    for graph in (False, True):
        model, losses = patch_models.make(family), []
        report = acl.nn.patch(model, graph=graph)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(2)
        for step in range(BEFORE + 2):
            loss = model(**patch_models.batch(family, seed=step)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found.append((losses, torch.rand(2).tolist()))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-5)
    assert found[1][1] == found[0][1]
    assert (report.graphs["captured"], report.graphs["replayed"]) == (1, 2)


class Dropped(Net):
    """A norm that is left out at random, as layers are, and a constant made in each call."""

    chance, factor = 0.0, 1.0

    def forward(self, x):
        draw = torch.rand([])
        y = x if self.training and draw < self.chance else self.norm(x)
        return self.head(y * torch.tensor([0.5, 1.0, 2.0, self.factor], device=x.device)), self.other(y)


@pytest.mark.parametrize("chance", [0.0, 1.0, 0.5])
@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_draws_that_decide_nothing_are_repeated_by_replays(chance):
    net = Dropped().train()
    net.chance = chance
    plain = copy.deepcopy(net)
    report = acl.nn.patch(net, graph=True)
    found = []
    for each in (plain, net):
        torch.manual_seed(3)
        each.zero_grad()
        for step in range(BEFORE + 3):
            outputs = each(rows(step))
            (outputs[0].square().sum() + outputs[1].sum()).backward(retain_graph=step == BEFORE + 1)
            if step == BEFORE + 1:  # the call runs again
                outputs[0].sum().backward()
        found.append([torch.rand(3), *(p.grad for p in each.parameters() if p.grad is not None)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    assert report.graphs["captured"] == (chance != 0.5)


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_values_that_the_host_copies_are_kept_by_content():
    net = Dropped().train()
    report = acl.nn.patch(net, graph=True)
    for factor in (1.0, 3.0):
        net.factor = factor
        for step in range(BEFORE + 2):
            found = net(rows(step))[0]
        torch.testing.assert_close(found, Dropped.forward(net, rows(step))[0])
        (line,) = net.__dict__["_accelerant_patch"].graphs._lines.values()
        (kept,) = line.trials[0].work._constants.values()
        assert kept.tolist() == [0.5, 1.0, 2.0, factor]
    assert report.graphs["captured"] == 2


def test_a_tensor_of_the_host_that_was_written_to_is_seen(monkeypatch):
    net = Net()
    net.scale = torch.tensor(2.0)
    state = capture.State(net)
    net.scale.mul_(2)
    assert state.holds()  # a graph reads it
    monkeypatch.setattr(capture, "DEVICE", "cuda")
    state = capture.State(net)
    assert state.holds()
    net.scale.mul_(2)
    assert not state.holds()


def test_parameters_changed_in_place_before_the_backward_pass_raise_as_torch_does(net):
    warmed(net)
    y = net(rows())[0].sum()
    with torch.no_grad():
        net.head.weight.mul_(2)
    assert_raises(RuntimeError, "modified by an inplace operation", y.backward)


def moved(net, y):
    net.head.weight.data = net.head.weight.data.clone()
    y.sum().backward()


def kept(net, y):
    y.sum().backward(retain_graph=True)
    net.eval()
    y.square().sum().backward()
    net.train()


def differentiated(net, y):
    found = torch.autograd.grad(y.square().sum(), net.norm.weight, create_graph=True)
    found[0].square().sum().backward()


def after_another(net, y):
    y.sum().backward(retain_graph=True)
    net(rows(4).requires_grad_(True))[0].sum().backward()
    y.square().sum().backward()


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
@pytest.mark.parametrize("backward", [moved, kept, differentiated, after_another])
def test_what_a_backward_graph_cannot_do_runs_the_call_again(net, backward):
    warmed(net, leaf=True)
    found = []
    for plain in (False, True):
        net.zero_grad()
        x = rows(3).requires_grad_(True)
        y = (Net.forward(net, x) if plain else net(x))[0]
        backward(net, y)
        found.append([x.grad, *(param.grad for param in net.parameters())])
    assert net.report.graphs["replayed"] >= 1
    for one, two in zip(*found, strict=True):
        assert (one is None) == (two is None)
        if one is not None:
            torch.testing.assert_close(one, two)
    replayed = net.report.graphs["replayed"]
    net(rows().requires_grad_(True))  # its key stays eager
    assert net.report.graphs["replayed"] == replayed


@pytest.mark.parametrize("kind", ["batch norm", "spectral norm"])
def test_a_call_that_runs_again_begins_with_the_buffers_that_it_had_and_leaves_them(kind):
    found = []
    for graph in (False, True):
        torch.manual_seed(0)
        first, norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
        if kind == "spectral norm":
            first, norm = torch.nn.utils.parametrizations.spectral_norm(first), torch.nn.Tanh()
        net = torch.nn.Sequential(first, norm, torch.nn.Linear(4, 2)).train()
        report = acl.nn.patch(net, graph=graph)
        for step in range(BEFORE + 2):
            net(rows(step).requires_grad_(True)).square().sum().backward()
        x = rows(9).requires_grad_(True)
        (dx,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
        dx.square().sum().backward()
        found.append([x.grad, *(param.grad for param in net.parameters()), *net.buffers()])
    assert report.graphs["replayed"] == 3
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


class Towers(Net):
    def forward(self, x):
        return self.head(self.norm(x)), self.other(x)


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_outputs_without_a_common_history_have_backward_passes_of_their_own():
    torch.manual_seed(0)
    net = Towers().train()
    net.report = acl.nn.patch(net, graph=True)
    warmed(net)
    found = []
    for plain in (True, False):
        net.zero_grad()
        outputs = Towers.forward(net, rows()) if plain else net(rows())
        for out in outputs:
            out.square().sum().backward()
            with torch.no_grad():
                net.norm.weight.add_(0.0)  # the other tower's
        with pytest.raises(RuntimeError, match="second time"):
            outputs[1].sum().backward()
        found.append([param.grad for param in net.parameters()])
    assert net.report.graphs["replayed"] == 2
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)
    net = Towers().train()
    net.report = acl.nn.patch(net, graph=True)
    one, two = warmed(net)(rows())
    one.sum().backward()
    with torch.no_grad():
        net.other.weight.add_(1.0)
    assert_raises(RuntimeError, "inplace operation: a parameter of Towers", lambda: two.sum().backward())


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_a_second_backward_pass_needs_what_the_first_one_had(net):
    warmed(net)
    y = net(rows())[0].sum()
    y.backward()
    assert_raises(RuntimeError, "second time", y.backward)
    x = rows()
    y = net(x)[0].sum()
    y.backward(retain_graph=True)
    x.add_(1)
    assert_raises(RuntimeError, "inplace operation: an argument of Net", y.backward)
    warmed(net, count=4)
    y = net(rows(count=4))[0].sum()
    y.backward(retain_graph=True)
    net.scale = 3.0
    assert_raises(LaunchError, r"were changed between .* patch\(model, graph=False\)", y.backward)


def test_a_few_shapes_have_graphs_and_others_run_eagerly(net, monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 4)
    for count in range(1, graphs.MOST_GRAPHS + 1):
        for _ in range(BEFORE + 1):
            net(rows(count=count))[0].sum().backward()
    other = rows(count=graphs.MOST_GRAPHS + 1)
    for _ in range(BEFORE):
        net(other)[0].sum().backward()
    with pytest.warns(FallbackWarning, match="4 other shapes or values of arguments have graphs"):
        net(other)[0].sum().backward()
    for _ in range(graphs._IDLE_CALLS):  # the others are no longer called
        net(other)
    assert net.report.graphs["captured"] == graphs.MOST_GRAPHS + 1
    assert_right(net, other)
    assert_right(net, rows(count=3))


def test_arguments_that_differ_in_each_call_are_reported(net):
    for step in range(graphs._MOST_KEYS):
        net(rows(), factor=step / 100)
    with pytest.warns(FallbackWarning, match="more than 64 shapes and values"):
        net(rows(), factor=2.0)
    assert len(net.__dict__["_accelerant_patch"].graphs._lines) <= graphs._MOST_KEYS


def test_only_calls_on_compiled_kernels_count_before_the_capture(net, monkeypatch):
    missed = 0
    monkeypatch.setattr(graphs.background, "misses", lambda: missed)
    for call in range(2 + BEFORE):
        net(rows())
        missed += call < 2
    assert net.report.graphs == {"eager: before the capture": 2 + BEFORE}
    net(rows())
    assert net.report.graphs["captured"] == 1


def test_evaluation_and_generation_run_eagerly_and_are_no_fallback(net):
    warmed(net)
    with torch.no_grad():
        expected = net(rows())
    net.eval()
    assert all(map(torch.equal, net(rows()), expected))
    net.train()
    assert_right(net, rows())
    assert set(net.report.graphs) == {"captured", "replayed", "eager: before the capture"}


def test_modes_and_transforms_see_each_operation(net):
    warmed(net)
    with FlopCounterMode(display=False) as counter, pytest.warns(FallbackWarning, match="mode or a transform"):
        net(rows())
    assert counter.get_total_flops() == 2 * 5 * 4 * (3 + 2)
    weights = {name: param.detach() for name, param in net.named_parameters()}
    with warnings.catch_warnings(action="ignore"):
        found = torch.func.grad(lambda w: torch.func.functional_call(net, w, (rows(),))[0].sum())(weights)
    net(rows())[0].sum().backward()
    torch.testing.assert_close(found["head.weight"], net.head.weight.grad)


def test_a_patched_model_on_another_device_runs_eagerly(net, monkeypatch):
    monkeypatch.setattr(capture, "DEVICE", "cuda")
    with pytest.warns(FallbackWarning, match="parameters are on cpu: graphs take plain ones on the current CUDA"):
        net(rows())


@pytest.mark.slow
def test_under_torch_compile_there_is_no_graph_break(model):
    report = acl.nn.patch(model, graph=True)
    torch.compile(model, backend="eager", fullgraph=True)(input_ids=ids(), labels=ids()).loss.backward()
    assert not report.graphs


def test_a_checkpoint_around_the_model_runs_eagerly(net):
    warmed(net)
    with pytest.warns(FallbackWarning, match="saved tensors have hooks"):
        y = torch.utils.checkpoint.checkpoint(net, rows(), use_reentrant=False)
    y[0].sum().backward()


def test_a_failed_capture_is_reported_and_the_model_goes_on(net, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(Rerun, "capture", fail)
    with pytest.warns(FallbackWarning, match="the capture failed with RuntimeError: operation not permitted when str"):
        warmed(net)
    replayed = net.report.graphs["replayed"]
    net(rows())[0].sum().backward()
    assert not replayed
    assert net.head.weight.grad is not None
    with acl.config.override(fallback="forbid"), pytest.raises(LaunchError, match="cannot be a CUDA graph"):
        net(rows())


def test_hooks_of_parameters_and_of_the_model_itself_are_called(net):
    warmed(net)
    seen = []
    net.head.weight.register_hook(lambda grad: seen.append("gradient"))
    net.head.weight.register_post_accumulate_grad_hook(lambda param: seen.append("accumulated"))
    net.register_forward_hook(lambda *_: seen.append("forward"))
    for _ in range(BEFORE + 2):
        seen.clear()
        net(rows())[0].sum().backward()
    assert seen == ["forward", "gradient", "accumulated"]
    assert net.report.graphs["replayed"] >= 1


class Loop:
    """What a user may do between and around calls; each does the same to a model with graphs and to one without."""

    def __init__(self, net, rng):
        self.net, self.rng = net, rng
        self.kept, self.seen = [], []
        self.make_optimizer()

    def make_optimizer(self):
        kind = self.rng.choice([partial(torch.optim.SGD, momentum=0.9), torch.optim.AdamW, torch.optim.Adagrad])
        params = [param for param in self.net.parameters() if param.requires_grad]
        self.optimizer = kind(params, lr=0.01)

    def call(self):
        count = self.rng.choice([5, 5, 5, 5, 3])
        x = torch.randn(count, 4, generator=torch.Generator().manual_seed(self.rng.randrange(1000)))
        if self.rng.random() < 0.1:
            x.requires_grad_(True)
        return self.net(x)

    def train(self):
        outputs = self.call()
        weights = self.rng.choice([(1, 0), (0, 1), (1, 1), (1, 1)])
        loss = sum(out.square().sum() for out, weight in zip(outputs, weights, strict=True) if weight)
        self.seen += [*outputs, loss]
        if loss.requires_grad:
            loss.backward()

    def step(self):
        if self.rng.random() < 0.5:
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=self.rng.random() < 0.7)

    def train_and_step(self):
        self.train()
        self.step()

    def two_calls(self):
        one, two = self.call(), self.call()
        (one[0].sum() * two[1].sum()).backward()

    def forward_only(self):
        self.seen += self.call()

    def keep(self):
        self.kept = [*self.kept[-4:], self.call()[0]]

    def late_backward(self):
        for out in self.kept[-1:]:
            if out.requires_grad:
                self.kept.clear()
                out.sum().backward()

    def twice(self):
        out = self.call()[0]
        if out.requires_grad:
            out.sum().backward(retain_graph=True)
            self.net.train(self.rng.random() < 0.5)
            if self.rng.random() < 0.5:
                self.seen += self.call()
            out.tanh().sum().backward()
            self.net.train()

    def penalty(self):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(self.rng.randrange(1000))).requires_grad_(True)
        (found,) = torch.autograd.grad(self.net(x)[0].tanh().sum(), x, create_graph=True)
        self.seen.append(found)
        found.tanh().sum().backward()

    def write_output(self):
        out = self.call()[0]
        (out * 2).sum().backward()
        with torch.no_grad():
            out.zero_()

    def evaluate(self):
        self.net.eval()
        with torch.no_grad():
            self.seen += self.call()
        self.net.train()

    def freeze(self):
        param = self.rng.choice(list(self.net.parameters()))
        param.requires_grad_(not param.requires_grad)

    def replace(self):
        layer = self.rng.choice([self.net.head, self.net.other])
        value = layer.weight.detach() * 0.9
        if self.rng.random() < 0.5:
            layer.weight.data = value
        else:
            layer.weight = torch.nn.Parameter(value)
        self.make_optimizer()

    def load(self):
        values = {name: value * 0.95 for name, value in self.net.state_dict().items()}
        self.net.load_state_dict(values, assign=self.rng.random() < 0.3)
        self.make_optimizer()

    def change(self):
        self.net.scale = self.rng.choice([0.5, 1.0, 2.0])
        self.net.options["power"] = self.rng.choice([1, 2])

    def shift(self):
        if self.rng.random() < 0.5:
            self.net.shift.add_(0.1)
        else:
            self.net.shift = self.net.shift * 0.5

    def hook(self):
        handle = self.net.norm.register_forward_hook(lambda module, args, out: out * 0.5)
        self.train()
        handle.remove()

    def keep_gradients(self):
        grads = [param.grad for param in self.net.parameters() if param.grad is not None]
        kept = [(grad, grad.clone()) for grad in grads]
        self.net.zero_grad()
        self.train()
        for grad, value in kept:
            torch.testing.assert_close(grad, value, equal_nan=True)

    ACTIONS = (
        [train_and_step] * 30 + [train] * 12 + [step] * 3 + [two_calls] * 3 + [forward_only] * 3 + [keep, late_backward]
        + [twice, penalty, write_output, evaluate, freeze, replace, load, change, shift, hook, keep_gradients]
    )  # fmt: skip

    def act(self):
        """Do something; return its name, and whether it failed as a backward pass after a change of parameters does."""
        action = self.rng.choice(self.ACTIONS)
        self.seen.clear()
        try:
            action(self)
        except LaunchError:
            return action.__name__, True
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            return action.__name__, True
        return action.__name__, False


def compare(one, two, example):
    """Compare what was seen, parameters and gradients."""
    found = [[*loop.seen, *(x for p in loop.net.parameters() for x in (p, p.grad))] for loop in (one, two)]
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None), example
        if a is not None:
            torch.testing.assert_close(b, a, msg=f"{example}: {a} and {b}")


@pytest.mark.slow
@pytest.mark.search(20)
@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_any_sequence_of_a_users_actions_gives_what_it_gives_without_graphs(rng, record_property, monkeypatch):
    monkeypatch.setattr(graphs, "EAGER_CALLS", 1)
    examples = replayed = 0
    for _ in range(3):
        seed, loops = rng.randrange(1 << 30), []
        for graph in (False, True):
            torch.manual_seed(seed)
            net = Net().train()
            report = acl.nn.patch(net, graph=graph)
            loops.append(Loop(net, random.Random(seed)))
        for number in range(60):
            names, failed = zip(*[loop.act() for loop in loops], strict=True)
            if any(failed):  # the other may have gone on: eagerly, not every changed parameter is needed
                break
            if not all(param.isfinite().all() for param in loops[0].net.parameters()):  # squares of squares
                break
            compare(*loops, (seed, number, names))
            examples += 1
        replayed += report.graphs["replayed"]
    assert replayed > 15
    record_property("examples", examples)


def test_copies_and_pickles_have_graphs_of_their_own(net):
    warmed(net)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        with torch.no_grad():
            other.head.weight.mul_(3)
        warmed(other)
        assert_right(other, rows())
        assert other.__dict__["_accelerant_patch"].graphs._captured
    assert_right(net, rows())


def test_a_call_before_the_backward_pass_of_another_runs_eagerly(model):
    report = acl.nn.patch(model, graph=True)
    trained(model, BEFORE + 1)
    one = model(input_ids=ids(1), labels=ids(1)).loss
    with pytest.warns(FallbackWarning, match="still to come"):
        two = model(input_ids=ids(2), labels=ids(2)).loss
    (one + two).backward()
    assert report.graphs["eager: the backward pass of an earlier call is still to come"] == 1


def test_replaced_parameters_are_captured_anew(model):
    report = acl.nn.patch(model, graph=True)
    trained(model, BEFORE + 1)
    model.transformer.wte.weight = model.lm_head.weight = torch.nn.Parameter(torch.randn(64, 32))
    with pytest.warns(FallbackWarning, match="keep changing"):
        trained(model, BEFORE + 2)
    assert report.graphs["captured"] == 2
    assert model.lm_head.weight.grad is None  # zeroed, and not left to a parameter that is gone


def test_hooks_and_caches_run_eagerly(model):
    report = acl.nn.patch(model, graph=True)
    hook = model.transformer.h[0].register_forward_hook(lambda *_: None)
    with pytest.warns(FallbackWarning, match="a GPT2Block has hooks"):
        trained(model, 1)
    hook.remove()
    for _ in range(BEFORE):
        model(input_ids=ids(), labels=ids(), use_cache=True)
    with pytest.warns(FallbackWarning, match="its output contains a DynamicCache"):
        model(input_ids=ids(), labels=ids(), use_cache=True)
    assert not report.graphs["replayed"]


@pytest.mark.parametrize(("family", "window"), [
    ("gpt2", None), ("qwen3", None), ("gemma3", 64), ("mistral", 64), ("gemma3", 17), ("mistral", 12), ("mistral", 5),
])  # fmt: skip
def test_states_and_cache_of_texts_of_varying_lengths(family, window):
    """As of a model that embeds texts: its cache is the caller's, who may go on with it."""
    patched = patch_models.make(family, **({} if window is None else {"sliding_window": window})).base_model.eval()
    plain = copy.deepcopy(patched)
    with override(race="off"), torch.no_grad():
        report = acl.nn.patch(patched)
        for step in range(18):
            length = 9 + step % 5 + 4 * (step // 12)
            inputs = {"input_ids": patch_models.batch(family, B=3, S=length, seed=step)["input_ids"]}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            inputs["attention_mask"][0, -3:] = 0
            wanted, found = plain(**inputs), patched(**inputs)
            caches = wanted.past_key_values, found.past_key_values
            torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state, rtol=1e-4, atol=1e-5)
            for one, other in zip(*[cache.layers for cache in caches], strict=True):
                assert vars(one).keys() == vars(other).keys()
                assert one.get_seq_length() == other.get_seq_length() == length
                torch.testing.assert_close((other.keys, other.values), (one.keys, one.values), rtol=1e-4, atol=1e-5)
            mask = F.pad(inputs["attention_mask"], (0, 1), value=1)
            nexts = [
                each(input_ids=inputs["input_ids"][:, :1], attention_mask=mask, past_key_values=cache).last_hidden_state
                for each, cache in zip((plain, patched), caches, strict=True)
            ]
            torch.testing.assert_close(*nexts, rtol=1e-4, atol=1e-5)
    if window in (None, 17, 64):
        assert report.graphs["captured"] > 1
        assert report.graphs["replayed"] > 6
    assert ("last tokens of long calls" in str(report)) is (window == 17)


def test_unpatch_restores_the_forward(model):
    acl.nn.patch(model, graph=True)
    acl.nn.unpatch(model)
    assert "forward" not in model.__dict__


@pytest.fixture
def quiet():
    """No warning and no error tells of a call that runs eagerly where nobody asked for graphs."""
    with acl.config.override(fallback="forbid"), warnings.catch_warnings(action="error", category=FallbackWarning):
        yield


def test_by_default_a_model_whose_device_waits_for_the_host_has_graphs(model, quiet):
    other = copy.deepcopy(model)
    acl.nn.patch(model, graph=False)
    report = acl.nn.patch(other)
    assert trained(other) == pytest.approx(trained(model), rel=1e-6)
    assert report.graphs == {"captured": 1, "replayed": 8 - BEFORE, "eager: before the capture": BEFORE}
    one = other(input_ids=ids(1), labels=ids(1)).loss
    two = other(input_ids=ids(2), labels=ids(2)).loss
    (one + two).backward()
    assert report.graphs["eager: the backward pass of an earlier call is still to come"] == 1


@pytest.mark.parametrize(("apart_ms", "free", "reason"), [
    (1e9, 1 << 30, "does not wait for the host"), (1e-3, 1 << 16, r"would hold 5\.\de-05 GiB, more than 1 / 4"),
])  # fmt: skip
def test_by_default_a_graph_that_costs_more_than_it_saves_is_not_kept(
    model, quiet, monkeypatch, apart_ms, free, reason
):
    monkeypatch.setattr(Event, "apart_ms", apart_ms)
    monkeypatch.setattr(graphs, "_free_bytes", lambda: free)
    report = acl.nn.patch(model)
    trained(model, BEFORE + 1)
    checked = []
    monkeypatch.setattr(capture.State, "holds", lambda self: checked.append(self))
    trained(model, 40)
    assert report.graphs.pop("eager: before the capture") == BEFORE
    ((outcome, calls),) = report.graphs.items()
    assert calls == 41
    assert re.search(reason, outcome)
    assert not checked  # the decision is final, and costs the calls that follow nothing
    assert any(entry.reason == outcome.removeprefix("eager: ") for entry in ledger()._fallbacks)


def test_by_default_memory_that_runs_out_is_taken_from_the_graphs(model, quiet, monkeypatch):
    report = acl.nn.patch(model)
    trained(model, BEFORE + 1)
    graphs_of = model.__dict__["_accelerant_patch"].graphs
    forward, failures = graphs_of._forward, [torch.OutOfMemoryError("no memory")]

    def scarce(*args, **kwargs):
        if failures:
            raise failures.pop()
        return forward(*args, **kwargs)

    monkeypatch.setattr(graphs_of, "_forward", scarce)
    loss = model(input_ids=ids(1, 8), labels=ids(1, 8)).loss
    loss.backward()
    assert not failures
    assert not graphs_of._captured
    trained(model, 2)
    assert report.graphs["eager: memory ran out beside the graphs"] == 2
    failures.append(torch.OutOfMemoryError("no memory"))
    assert_raises(torch.OutOfMemoryError, None, lambda: model(input_ids=ids(), labels=ids()))


def test_a_call_that_begins_anew_with_the_graphs_memory_updates_buffers_once(quiet, monkeypatch):
    net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Tanh()).train()
    acl.nn.patch(net)
    for step in range(BEFORE + 1):
        net(rows(step)).sum().backward()
    graphs_of = net.__dict__["_accelerant_patch"].graphs
    assert graphs_of._captured
    forward, failures = graphs_of._forward, [torch.OutOfMemoryError("no memory")]

    def scarce(*args, **kwargs):
        y = forward(*args, **kwargs)
        if failures:
            raise failures.pop()
        return y

    monkeypatch.setattr(graphs_of, "_forward", scarce)
    net(rows(0, 7)).sum().backward()
    assert not graphs_of._captured
    assert net[0].num_batches_tracked == BEFORE + 2


def test_by_default_a_models_graphs_share_a_quarter_of_the_memory(model, quiet, monkeypatch):
    monkeypatch.setattr(graphs, "_free_bytes", lambda: 1 << 18)  # gradients take 62 KiB
    report = acl.nn.patch(model)
    for rows in (2, 1):
        for _ in range(BEFORE + 2):
            model(input_ids=ids()[:rows], labels=ids()[:rows]).loss.backward()
    assert report.graphs["captured"] == 1
    assert sum(calls for outcome, calls in report.graphs.items() if "more than 1 / 4" in outcome) == 2


def test_by_default_a_model_that_keeps_changing_is_left_alone_in_the_end(model, quiet):
    report = acl.nn.patch(model)
    for _ in range(2 * graphs._CREDIT):
        model.lm_head.weight.data = model.lm_head.weight.data.clone()
        trained(model, 1)
    assert report.graphs["eager: few calls could run from graphs"] > graphs._CREDIT / 2
    assert not report.graphs["captured"]


def test_by_default_only_known_code_is_captured(model, quiet):
    net = Net().train()
    report = acl.nn.patch(net)
    warmed(net)
    assert not report.graphs
    assert "no CUDA graphs by default: the code of Net may do more" in report.notes[-1]
    report = acl.nn.patch(model)
    model.lm_head = Net()
    model.lm_head.forward = torch.nn.Linear(32, 64).forward
    trained(model, BEFORE + 1)
    assert not report.graphs["captured"]
    assert any("the code of Net may do more than its operations" in outcome for outcome in report.graphs)


def mine(module, query, key, value, attention_mask, **_):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2), None


def test_by_default_an_attention_function_of_the_user_is_not_captured(model, quiet):
    AttentionInterface.register("mine", mine)
    model.set_attn_implementation("mine")
    report = acl.nn.patch(model)
    trained(model, BEFORE + 1)
    assert not report.graphs
    assert "no CUDA graphs by default: the code of mine may" in report.notes[-1]


def test_by_default_a_forward_that_was_replaced_in_its_class_is_not_captured(model, quiet, monkeypatch):
    kind = type(model.transformer.h[0].mlp)
    inner = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: inner(self, x))
    report = acl.nn.patch(model)
    trained(model, BEFORE + 1)
    assert not report.graphs
    assert "lambda" in report.notes[-1]


@pytest.mark.parametrize("by_torch", [False, True])
def test_by_default_a_deterministic_run_does_not_depend_on_measured_times(model, quiet, by_torch):
    report = acl.nn.patch(model)
    torch.use_deterministic_algorithms(by_torch)
    try:
        with acl.config.override(deterministic=not by_torch):
            trained(model, BEFORE + 1)
    finally:
        torch.use_deterministic_algorithms(False)
    assert report.graphs == {"eager: results may not depend on measured times (deterministic)": BEFORE + 1}
    trained(model, BEFORE + 1)
    assert report.graphs["replayed"] == 1


def test_by_default_threads_do_not_share_graphs(model, quiet):
    report = acl.nn.patch(model)
    trained(model, BEFORE + 1)
    thread = threading.Thread(target=trained, args=(model, BEFORE))
    thread.start()
    thread.join()
    assert report.graphs == {"captured": 1, "replayed": 1, "eager: before the capture": 2 * BEFORE}


@pytest.mark.filterwarnings("ignore::accelerant.errors.FallbackWarning")
def test_a_capture_takes_no_parameters_from_the_calls_of_other_threads(net):
    params, main = list(net.parameters()), threading.current_thread()
    captures, called, found = threading.Event(), threading.Event(), []

    def meet(x):
        if threading.current_thread() is main and not captures.is_set():
            captures.set()
            called.wait(0.3)

    def other():
        captures.wait()
        y = sum(out.sum() for out in net(rows()))
        called.set()
        found.extend(torch.autograd.grad(y, params, allow_unused=True))

    net.trick = meet
    captures.set()
    warmed(net, BEFORE)
    captures.clear()
    thread = threading.Thread(target=other)
    thread.start()
    warmed(net, 1)
    thread.join()
    assert net.report.graphs["captured"] == 1
    assert all(grad is not None for grad in found)


def test_nothing_is_captured_while_another_thread_runs_the_model(net):
    """The capture would give the parameters of its copy to that call."""
    main, runs, ends = threading.current_thread(), threading.Event(), threading.Event()

    def meet(x):
        if threading.current_thread() is not main:
            runs.set()
            ends.wait(60)

    net.trick = meet
    warmed(net, BEFORE)
    thread = threading.Thread(target=net, args=(rows(),))
    thread.start()
    assert runs.wait(60)
    try:
        with pytest.warns(FallbackWarning, match="another thread runs the model"):
            warmed(net, 1)
        assert net.report.graphs["captured"] == 0
    finally:
        ends.set()
        thread.join()
    warmed(net, 1)
    assert net.report.graphs["captured"] == 1
