"""TrainStep on a CPU: the arithmetic of a step, and what it refuses. tests/nn/test_train_step_gpu.py has the graph."""

import pytest
import torch

from accelerant.config import override
from accelerant.errors import ConfigError, FallbackWarning, LaunchError, ShapeError
from accelerant.nn import GPT, GPTConfig, layers, optim
from accelerant.nn.layers import LowWeights, lowered
from accelerant.nn.train.step import LossScale, Same, StepResult, TrainStep
from accelerant.runtime.ledger import ledger
from refusals import assert_raises

CONFIG = GPTConfig(vocab_size=50, context=8, layers=2, heads=2, width=16)


@pytest.fixture(params=["fused", "layer by layer"])
def fused(request, monkeypatch):
    """Blocks as one function each, as on a GPU, or their layers one by one."""
    monkeypatch.setattr(layers, "FUSED", {"cpu"} if request.param == "fused" else set())


def model():
    torch.manual_seed(0)
    return GPT(CONFIG)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, 50, (3, 8), generator=generator) for _ in range(2)) for _ in range(count)]


def plain(count, accumulate, clip):
    """The same steps in plain PyTorch."""
    one = model()
    optimizer = torch.optim.AdamW(one.parameters(), lr=1.0, weight_decay=0.1)
    found = []
    for step in range(count):
        optimizer.zero_grad()
        losses = [one.loss(*batch) for batch in batches(accumulate, step)]
        (sum(losses) / accumulate).backward()
        norm = torch.nn.utils.clip_grad_norm_(one.parameters(), clip or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        optimizer.step()
        found.append((sum(losses).item() / accumulate, norm.item()))
    return one, found


@pytest.mark.sample(3)
@pytest.mark.parametrize("own", [True, False], ids=["our optimizer", "torch's"])
@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, 0.5), (3, 0.5)])
def test_a_step_is_plain_pytorchs(own, accumulate, clip, fused):
    one = model()
    make = optim.AdamW if own else torch.optim.AdamW
    optimizer = make(one.parameters(), lr=1.0, weight_decay=0.1)
    step = TrainStep(one, optimizer, one.loss, max_grad_norm=clip, accumulate=accumulate)
    results = [step(batches(accumulate, number), 1e-2 / (number + 1)) for number in range(4)]
    other, expected = plain(4, accumulate, clip)
    for result, (loss, norm) in zip(results, expected, strict=True):
        assert isinstance(result, StepResult)
        assert result.loss.item() == pytest.approx(loss, rel=1e-5)
        assert result.grad_norm.item() == pytest.approx(norm, rel=1e-4)
    for name, param in one.named_parameters():
        torch.testing.assert_close(param, other.get_parameter(name), rtol=1e-4, atol=2e-5)


def test_an_optimizer_that_clips_by_itself_is_left_to_it():
    one = model()
    optimizer = optim.AdamW(one.parameters(), max_grad_norm=0.5)
    TrainStep(one, optimizer, one.loss)
    assert optimizer.defaults["max_grad_norm"] == 0.5
    with pytest.raises(ConfigError, match=r"1\.0 here and 0\.5 in the optimizer"):
        TrainStep(one, optimizer, one.loss, max_grad_norm=1.0)


@pytest.mark.sample(3)
@pytest.mark.parametrize("own", [True, False], ids=["our optimizer", "torch's"])
def test_losses_fall_in_float16_with_a_scale_that_starts_too_high(own, fused):
    one = model()
    optimizer = optim.AdamW(one.parameters()) if own else torch.optim.AdamW(one.parameters(), fused=True)
    scale = LossScale(torch.device("cpu"), initial=2.0**40, interval=4)
    step = TrainStep(one, optimizer, one.loss, precision=torch.float16, loss_scale=scale)
    (batch,) = batches(1)
    begun = torch.nn.utils.parameters_to_vector(one.parameters()).detach().clone()
    losses, skipped = [], 0
    for _ in range(40):
        before, result = float(scale.value), step([batch], 1e-2)
        losses.append(result.loss.item())
        if not result.grad_norm.isfinite():
            assert float(scale.value) == before / 2
            skipped += 1
            if skipped == len(losses):  # nothing but overflows so far
                assert torch.equal(begun, torch.nn.utils.parameters_to_vector(one.parameters()))
    assert 10 < skipped == int(scale.skipped) < 30
    assert all(int(state["step"]) == 40 - skipped for state in optimizer.state.values())
    assert losses[-1] < losses[0] - 1
    assert getattr(optimizer, "grad_scale", None) is None


def test_the_norm_in_float16_is_that_of_the_gradients_without_the_scale():
    norms = {}
    for precision in (None, torch.float16):
        one = model()
        step = TrainStep(one, optim.AdamW(one.parameters()), one.loss, max_grad_norm=0.5, precision=precision)
        norms[precision] = step(batches(1), 1e-3).grad_norm.item()
    assert norms[torch.float16] == pytest.approx(norms[None], rel=2e-3)


def test_float16_refuses_what_it_cannot_skip():
    one = model()
    with pytest.raises(
        ConfigError, match=r"skip a step on the device, not SGD: use accelerant.nn.optim, or fused=True"
    ):
        TrainStep(one, torch.optim.SGD(one.parameters()), one.loss, precision=torch.float16)
    with pytest.raises(ConfigError, match="keeps parameters in float32"):
        TrainStep(one.half(), optim.AdamW(one.parameters()), one.loss, precision=torch.float16)
    with pytest.raises(ConfigError, match=r"a loss scale needs a finite factor above 0 .*, got 0\.0, 2000"):
        LossScale(torch.device("cpu"), initial=0.0)


def test_losses_fall_in_bfloat16(fused):
    one = model()
    step = TrainStep(one, optim.AdamW(one.parameters()), one.loss, precision=torch.bfloat16)
    (batch,) = batches(1)
    losses = [step([batch], 1e-2).loss.item() for _ in range(20)]
    assert losses[-1] < losses[0] - 1
    assert {param.grad.dtype for param in one.parameters()} == {torch.float32}


def test_the_rate_is_rounded_to_float32_as_that_of_a_graph():
    one = model()
    optimizer = optim.AdamW(one.parameters())
    TrainStep(one, optimizer, one.loss)(batches(1), 0.1)
    assert optimizer.param_groups[0]["lr"] == torch.tensor(0.1, dtype=torch.float32).double().item() != 0.1


def test_states_are_the_same_by_identity_wherever_they_lie():
    """CPython gives an object the memory, and so the id, of one that is gone."""
    state, other = {}, {}
    assert Same([state, other]) == Same([state, other])
    assert hash(Same([state])) == hash(Same([state]))
    assert Same([state]) != Same([other])
    assert Same([state]) != Same([state, state])
    assert Same([state]) != state
    assert Same([{}]) != Same([{}])


def test_a_step_knows_state_that_was_loaded():
    one = model()
    optimizer = optim.AdamW(one.parameters())
    step = TrainStep(one, optimizer, one.loss)
    step(batches(1), 0.1)
    seen = step._signature(batches(1))
    assert seen == step._signature(batches(1))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen != step._signature(batches(1))


def test_the_rate_is_memory_inside_a_step_for_a_graph_and_a_number_after_it(monkeypatch):
    """As on a GPU, where what is captured reads it at its address."""
    one = model()
    optimizer = optim.AdamW(one.parameters())
    step = TrainStep(one, optimizer, one.loss)
    seen = []

    def aside(run):
        seen.append(optimizer.param_groups[0]["lr"])
        return run()

    monkeypatch.setattr(step, "_wants_graph", True)
    monkeypatch.setattr(step, "_on_side_stream", aside)
    for number in range(2):
        step(batches(1), 0.1 / (number + 1))
    rate = torch.tensor(0.05, dtype=torch.float32).item()
    assert seen[0] is seen[1]
    assert seen[0].item() == rate
    assert type(optimizer.param_groups[0]["lr"]) is float
    saved = optimizer.state_dict()["param_groups"]
    assert [group["lr"] for group in saved] == [rate] * len(saved)
    monkeypatch.setattr(step, "_on_side_stream", lambda _: 1 / 0)
    assert_raises(ZeroDivisionError, None, lambda: step(batches(1), 0.1))
    assert type(optimizer.param_groups[0]["lr"]) is float


@pytest.mark.parametrize(("found", "match"), [
    (torch.ones(3, 8, requires_grad=True), r"must be a scalar, got the shape \(3, 8\): take its mean"),
    (torch.ones(0, requires_grad=True), r"the shape \(0,\)"),
    (1.5, "must be a scalar tensor, got float"),
])  # fmt: skip
def test_a_loss_that_is_no_scalar_is_named_before_anything_changes(found, match):
    one = model()
    step = TrainStep(one, optim.AdamW(one.parameters()), lambda *_: found)
    before = [param.detach().clone() for param in one.parameters()]
    assert_raises(ShapeError, match, lambda: step(batches(1), 1e-2))
    assert all(param.grad is None for param in one.parameters())
    assert all(map(torch.equal, before, one.parameters()))


def test_results_stay_as_they_were():
    one = model()
    step = TrainStep(one, optim.AdamW(one.parameters()), one.loss)
    first = step(batches(1, 0), 1e-2)
    kept = [value.item() for value in first]
    step(batches(1, 1), 1e-2)
    assert [value.item() for value in first] == kept


@pytest.mark.parametrize(("options", "match"), [
    ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
    ({"max_grad_norm": 0.0}, "above 0, or None; got 0"),
    ({"max_grad_norm": float("nan")}, "got nan"),
    ({"precision": torch.float64}, "precision must be bfloat16, float16, .* got torch.float64"),
])  # fmt: skip
def test_values_without_a_meaning_are_refused(options, match):
    one = model()
    assert_raises(ConfigError, match, lambda: TrainStep(one, optim.AdamW(one.parameters()), one.loss, **options))


def test_calls_without_a_meaning_are_refused():
    one = model()
    step = TrainStep(one, optim.AdamW(one.parameters()), one.loss, accumulate=2)
    before = [param.detach().clone() for param in one.parameters()]
    assert_raises(ConfigError, "takes 2 batches, got 1", lambda: step(batches(1), 1e-3))
    for rate in (-1.0, float("nan")):
        assert_raises(ConfigError, "learning_rate must be at least 0", step, batches(2), rate)
    assert all(map(torch.equal, before, one.parameters()))


def test_a_graph_that_cannot_be_is_said_once_and_steps_run():
    ledger().reset()
    one = model()
    with pytest.warns(FallbackWarning, match="no CUDA graph, steps run eagerly. parameters are on cpu"):
        step = TrainStep(one, optim.AdamW(one.parameters()), one.loss, graph=True)
    assert step(batches(1), 1e-3).loss.isfinite()
    assert not step.captured
    (entry,) = ledger().to_dict()["fallbacks"]
    assert (entry["op"], entry["wanted"], entry["ran"]) == ("train_step", "graph", "eager")
    with override(fallback="forbid"), pytest.raises(LaunchError, match="parameters are on cpu"):
        TrainStep(one, optim.AdamW(one.parameters()), one.loss, graph=True)


def test_what_stopped_a_capture_is_said_and_not_that_it_was_stopped():
    one = model()
    step = TrainStep(one, optim.AdamW(one.parameters()), one.loss)

    def capture():
        try:
            raise RuntimeError("a copy to the host")
        finally:
            raise RuntimeError("the capture is invalid")

    with pytest.warns(FallbackWarning, match="eagerly. RuntimeError: a copy to the host"):
        assert not step._recorded(capture)


def test_an_automatic_graph_says_nothing_where_there_is_none(recwarn):
    one = model()
    TrainStep(one, optim.AdamW(one.parameters()), one.loss)
    assert not recwarn.list


# --- copies in low precision -----------------------------------------------------------------------------------------
def test_copies_are_made_anew_each_time_and_hold_inside_alone():
    weight, low = torch.nn.Parameter(torch.ones(3)), LowWeights(torch.bfloat16)
    with low.refreshed():
        first = lowered(weight, torch.bfloat16)
        assert lowered(weight, torch.bfloat16) is first
        assert lowered(weight, torch.float16).dtype == torch.float16
        assert lowered(weight, torch.float32).data_ptr() == weight.data_ptr()
    weight.data.fill_(2.0)
    with low.refreshed():
        assert lowered(weight, torch.bfloat16) is first
        assert first.tolist() == [2.0] * 3
    assert lowered(weight, torch.bfloat16) is not first


def test_a_graph_of_older_copies_is_not_gone_back_through(fused):
    """Copies are written over in the next step: autograd must see that."""
    if not layers.FUSED:
        pytest.skip("layer by layer, autograd keeps the cast weights itself")
    one, low = model(), LowWeights(torch.bfloat16)
    (batch,) = batches(1)
    with low.refreshed(), torch.autocast("cpu", torch.bfloat16):
        loss = one.loss(*batch)
    with low.refreshed():
        pass
    assert_raises(RuntimeError, "modified by an inplace operation", loss.backward)


# --- which layers run as one function --------------------------------------------------------------------------------
def ops_of(run):
    ledger().reset()
    run()
    return {row["op"] for row in ledger().to_dict()["ops"]}


@pytest.mark.parametrize("where", ["mlp.up", "norm_1", "attention"])
def test_a_hook_is_called(where, monkeypatch):
    monkeypatch.setattr(layers, "FUSED", {"cpu"})
    one, seen = model(), []
    (batch,) = batches(1)
    assert "block_norm_bwd" in ops_of(lambda: one.loss(*batch).backward())
    handle = one.blocks[0].get_submodule(where).register_forward_hook(lambda *_: seen.append(where))
    expected = one.loss(*batch)
    assert seen == [where]
    handle.remove()
    torch.testing.assert_close(one.loss(*batch), expected, rtol=1e-6, atol=1e-6)


def test_a_replaced_layer_is_called(monkeypatch):
    monkeypatch.setattr(layers, "FUSED", {"cpu"})
    one = model()
    (batch,) = batches(1)
    before = one.loss(*batch)

    class Doubled(layers.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    new = Doubled(64, 16)
    new.load_state_dict(one.blocks[1].mlp.down.state_dict())
    one.blocks[1].mlp.down = new
    assert one.loss(*batch) != before


def test_gradient_checkpointing_is_kept(monkeypatch):
    monkeypatch.setattr(layers, "FUSED", {"cpu"})
    one, seen = model(), []
    (batch,) = batches(1)
    one.loss(*batch).backward()
    expected = [param.grad.clone() for param in one.parameters()]
    for block in one.blocks:
        forward = block.forward

        def again(x, forward=forward):
            seen.append(x)
            return torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)

        block.forward = again
    one.zero_grad()
    one.loss(*batch).backward()
    assert len(seen) == 2
    for param, grad in zip(one.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_nothing_is_kept_without_gradients(monkeypatch):
    monkeypatch.setattr(layers, "FUSED", {"cpu"})
    one = model()
    (batch,) = batches(1)
    with torch.no_grad():
        loss = one.loss(*batch)
    torch.testing.assert_close(loss, one.loss(*batch).detach())
    assert not loss.requires_grad


@pytest.mark.slow
def test_a_compiled_model_takes_the_layers_one_by_one(monkeypatch):
    monkeypatch.setattr(layers, "FUSED", {"cpu"})
    one = model()
    (batch,) = batches(1)
    compiled = torch.compile(one.loss, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*batch), one.loss(*batch), rtol=1e-5, atol=1e-5)
