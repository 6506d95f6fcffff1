"""patch(graph=True): calls replayed from graphs equal eager calls, and what cannot be captured runs eagerly.

Without a GPU a graph's replay runs the captured function again, and writes its results over those of the capture.
"""

import contextlib
import copy

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import accelerant as acl
from accelerant.errors import FallbackWarning
from accelerant.nn._patch import graphs

BEFORE = graphs.EAGER_CALLS


class Rerun:
    """The interface of Graph on a CPU; results stay in the same memory as those of a graph do."""

    pool = leaves = None

    def __init__(self, name):
        self.name = name

    def capture(self, fn, *, warm_up, pool=None):
        captured, results = fn.__self__, fn()
        self.fn, self.captured = fn, captured
        self.memory = [None if x is None else x.detach() for x in results]
        self.needed = [self.leaves.get(x, x) for x in captured._needed]  # the model's own parameters
        return results

    def replay(self):
        self.captured._needed = self.needed
        with torch.enable_grad():
            results = self.fn()
        with torch.no_grad():
            for to, found in zip(self.memory, results, strict=True):
                if to is not None:
                    to.copy_(found)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    own_leaves = graphs._own_leaves

    @contextlib.contextmanager
    def noted(model):
        with own_leaves(model) as leaves:
            monkeypatch.setattr(Rerun, "leaves", leaves)
            yield leaves

    monkeypatch.setattr(graphs, "Graph", Rerun)
    monkeypatch.setattr(graphs, "_DEVICE", "cpu")
    monkeypatch.setattr(graphs, "_own_leaves", noted)
    monkeypatch.setattr(graphs, "_synchronisations", lambda: contextlib.nullcontext([]))


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


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate": 2}, {"amp": True}, {"logits": True}, {"set_to_none": False}],
    ids=["plain", "accumulation", "autocast", "logits", "zeroed"],
)
def test_training_from_graphs_is_training_without(model, options):
    other = copy.deepcopy(model)
    acl.nn.patch(model)
    report = acl.nn.patch(other, graph=True)
    assert trained(other, **options) == pytest.approx(trained(model, **options), rel=1e-6)
    for one, two in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, two)  # a tied weight's two gradients are summed in another order
    calls = 8 * options.get("accumulate", 1)
    assert report.graphs == {"captured": 1, "replayed": calls - BEFORE, "eager: before the capture": BEFORE}


def test_gradients_that_the_user_keeps_are_not_overwritten(model):
    acl.nn.patch(model, graph=True)
    trained(model, BEFORE + 1)
    found = []
    for seed in (1, 2):
        model.zero_grad()
        model(input_ids=ids(seed), labels=ids(seed)).loss.backward()
        found.append([param.grad for param in model.parameters()])
    acl.nn.unpatch(model)
    for seed, grads in zip((1, 2), found, strict=True):
        model.zero_grad()
        model(input_ids=ids(seed), labels=ids(seed)).loss.backward()
        for grad, param in zip(grads, model.parameters(), strict=True):
            torch.testing.assert_close(grad, param.grad, rtol=1e-4, atol=1e-5)  # unpatched: other kernels


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
    trained(model, BEFORE + 1)
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


def test_unpatch_restores_the_forward(model):
    acl.nn.patch(model, graph=True)
    acl.nn.unpatch(model)
    assert "forward" not in model.__dict__
