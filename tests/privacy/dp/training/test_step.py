"""PrivateStep beside an ordinary loop; on a GPU replayed beside eager."""

import pytest
import torch
from torch import nn

from accelerant.errors import BudgetExceeded, ConfigError, FallbackWarning, LaunchError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from accelerant.nn.optim import SGD
from accelerant.privacy.dp import make_private
from accelerant.privacy.dp.sampling import Draw, DrawnBatch
from accelerant.privacy.dp.training import step as step_module
from accelerant.privacy.dp.training.step import PrivateStep
from refusals import assert_raises

CONFIG = GPTConfig(vocab_size=50, context=16, layers=2, heads=2, width=32)


def rows(count, device="cpu"):
    torch.manual_seed(1)
    drawn = torch.randint(0, 50, (count, 13)).to(device)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def private_gpt(device="cpu", noise=0.0, **more):
    torch.manual_seed(0)
    model = GPT(CONFIG).to(device)
    return make_private(
        model,
        SGD(model.parameters(), lr=0.1),
        noise_multiplier=noise,
        delta=1e-5,
        max_grad_norm=0.5,
        sample_rate=0.5,
        expected_batch_size=6,
        **more,
    )


def parts(tensors, *sizes, microbatch):
    """A draw of sizes, padded, as PoissonBatches has it."""
    draw = Draw(sum(sizes))
    for number, size in enumerate(sizes):
        count = torch.zeros(microbatch, dtype=torch.long)
        start = sum(sizes[:number])
        count[:size] = torch.arange(start, start + size)
        yield DrawnBatch(
            tuple(each[count.to(each.device)] for each in tensors),
            torch.arange(microbatch) < size,
            number == len(sizes) - 1,
            size,
            microbatch,
            draw,
        )


def weights(private):
    return torch.cat([each.detach().cpu().flatten() for each in private.model.parameters()])


def test_the_step_is_that_of_a_loop():
    tensors = rows(6)
    loop, stepped = private_gpt(), private_gpt()
    step = PrivateStep(stepped, stepped.model.loss)
    for _ in range(3):
        loop.use(DrawnBatch(tensors, None, True, 6, 6, Draw(6)))
        loop.model.loss(*tensors).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        found = [step(each, 0.1) for each in parts(tensors, 4, 2, microbatch=4)]
        assert found[0] is None
        assert found[1].examples == 6
    assert stepped.optimizer.steps == 3
    torch.testing.assert_close(weights(stepped), weights(loop), rtol=1e-5, atol=1e-6)
    assert [(each.sampling, each.count) for each in stepped.ledger.events] == [
        (each.sampling, each.count) for each in loop.ledger.events
    ]


def test_an_empty_draw_is_a_step_of_noise():
    private = private_gpt(noise=1.0)
    before = weights(private)
    step = PrivateStep(private, private.model.loss)
    found = step(next(parts(rows(4), 0, microbatch=4)), 0.1)
    assert found.examples == 0
    assert private.optimizer.steps == 1
    assert not torch.equal(weights(private), before)


@pytest.mark.slow
def test_a_step_past_the_budget_changes_nothing():
    private = private_gpt(noise=None, target_epsilon=1.0, steps=1)
    step = PrivateStep(private, private.model.loss)
    step(next(parts(rows(4), 4, microbatch=4)), 0.1)
    before = weights(private)
    assert_raises(BudgetExceeded, None, lambda: step(next(parts(rows(4), 4, microbatch=4)), 0.1))
    assert torch.equal(weights(private), before)


def test_sums_that_were_cleared_come_back_to_their_memory():
    """A captured graph writes to it: what it holds is released, and must hold nothing of a draw that was given up."""
    private = private_gpt()
    step = PrivateStep(private, private.model.loss)
    step(next(parts(rows(4), 4, microbatch=4)), 0.0)
    kept = list(private.optimizer.sums.values())
    given_up = next(parts(rows(4), 4, microbatch=4))
    private.use(given_up)
    step._run_part(given_up)
    private.optimizer.zero_grad()
    assert not private.optimizer.sums
    assert all(each.grad is None for each in private.model.parameters())
    found = []
    private.optimizer.register_step_pre_hook(lambda *_: found.extend(each.clone() for each in kept))
    step(next(parts(rows(4), 4, microbatch=4)), 0.0)
    assert all(a is b for a, b in zip(private.optimizer.sums.values(), kept, strict=True))
    assert all(each.grad is None for each in private.model.parameters())
    assert 0 < float(torch.stack([each.norm() for each in found]).norm()) <= 4 * 0.5 / 6 + 1e-6


def test_a_part_that_failed_is_not_released():
    """By layer, sums are made on the way, into memory that the next pass would add to."""
    private = private_gpt(clipping="per_layer")
    step = PrivateStep(private, private.model.loss)
    step(next(parts(rows(4), 4, microbatch=4)), 0.0)
    total = next(iter(private.optimizer.sums.values()))
    total.add_(1.0)
    assert_raises(ConfigError, "a pass that failed", lambda: step(next(parts(rows(4), 4, microbatch=4)), 0.0))


class Recorded:
    """In the place of a graph: like a capture, the call raises the versions of what it writes to."""

    def __init__(self, name):
        pass

    def capture(self, fn, *args, warm_up):
        return fn(*args)

    def replay(self):
        pass


def test_a_capture_is_no_change_of_the_sums(monkeypatch):
    monkeypatch.setattr(step_module, "Graph", Recorded)
    monkeypatch.setattr(PrivateStep, "_obstacle", lambda *_: None)
    monkeypatch.setattr(PrivateStep, "_on_side_stream", lambda _, run: run())
    private = private_gpt()
    step = PrivateStep(private, private.model.loss)
    for _ in range(step_module.EAGER_STEPS + 2):
        for each in parts(rows(4), 2, 2, microbatch=2):
            step(each, 0.1)
    assert step.captured
    first, last = parts(rows(4), 2, 2, microbatch=2)
    step(first, 0.1)
    next(iter(private.optimizer.sums.values())).add_(1.0)
    assert_raises(ConfigError, "a pass that failed", step, last, 0.1)


def test_graphs_of_a_model_that_was_changed_are_dropped():
    """A replay would write to the memory where they were."""
    private = private_gpt()
    step = PrivateStep(private, private.model.loss)
    step(next(parts(rows(4), 4, microbatch=4)), 0.1)
    weight = next(private.model.parameters())
    for change in (
        lambda: setattr(weight, "data", weight.data.clone()),
        lambda: private.optimizer.sums.update({id(weight): torch.zeros_like(weight)}),
        private.model.eval,
        lambda: weight.requires_grad_(False),
    ):
        step._part, step._captured_layout = object(), step._layout()
        step._keep_sums()
        assert step.captured
        change()
        step._keep_sums()
        assert not step.captured


def test_the_rate_is_a_number_of_32_bits_before_and_after_a_step():
    private = private_gpt()
    step = PrivateStep(private, private.model.loss)
    step(next(parts(rows(4), 4, microbatch=4)), 0.1)
    assert [group["lr"] for group in private.optimizer.param_groups] == [torch.tensor(0.1).item()]


def test_a_model_that_became_16_bits_wide_is_refused_before_the_step():
    private = private_gpt(noise=1.0)
    step = PrivateStep(private, private.model.loss)
    private.model.to(torch.bfloat16)
    before = weights(private)
    assert_raises(UnsupportedCase, r"wte\.weight is torch.bfloat16", step, next(parts(rows(4), 4, microbatch=4)), 0.1)
    assert torch.equal(weights(private), before)
    assert not private.ledger.events


def test_refusals():
    private = private_gpt()
    assert_raises(ConfigError, "float16", PrivateStep, private, private.model.loss, precision=torch.float16)
    step = PrivateStep(private, private.model.loss)
    batch = next(parts(rows(4), 4, microbatch=4))
    assert_raises(ConfigError, "-1", step, batch, -1.0)
    assert_raises(ConfigError, "Tensor", lambda: step(DrawnBatch(batch.tensors[0], None, True, 4, 4), 0.1))


def test_a_graph_that_cannot_be_is_said(forbidding):
    private = private_gpt()
    with pytest.warns(FallbackWarning, match="graphs are CUDA's"):
        PrivateStep(private, private.model.loss, graph=True)
    with forbidding, pytest.raises(LaunchError, match="cpu"):
        PrivateStep(private, private.model.loss, graph=True)


@pytest.fixture
def forbidding():
    from accelerant.config import override
    from accelerant.runtime.ledger import ledger

    ledger().reset()
    return override(fallback="forbid")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_replays_are_the_eager_steps(precision):
    tensors = rows(6, "cuda")
    found = []
    for graph in (False, None):
        private = private_gpt("cuda")
        step = PrivateStep(private, private.model.loss, precision=precision, graph=graph)
        for _ in range(8):
            for each in parts(tensors, 4, 2, microbatch=4):
                step(each, 0.1)
        assert step.captured is (graph is None)
        assert private.optimizer.steps == 8
        found.append(weights(private))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-5 if precision is None else 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.usefixtures("fixed_entropy")
def test_each_replay_has_its_own_noise(secure):
    model = nn.Linear(300, 300).cuda()
    nn.init.zeros_(model.weight)
    private = make_private(
        model,
        SGD(model.parameters(), lr=1.0),
        noise_multiplier=2.0,
        delta=1e-5,
        max_grad_norm=0.5,
        sample_rate=0.5,
        expected_batch_size=4,
        secure=secure,
    )
    x = torch.zeros(4, 300, device="cuda")
    step = PrivateStep(private, lambda x: model(x).sum() / 4)
    jumps, before = [], model.weight.detach().clone()
    for _ in range(12):
        step(DrawnBatch((x,), torch.zeros(4, dtype=torch.bool), True, 0, 4, Draw(0)), 1.0)
        jumps.append((model.weight.detach() - before).flatten())
        before = model.weight.detach().clone()
    assert step.captured
    stacked = torch.stack(jumps).double()
    assert stacked.std(1).sub(2.0 * 0.5 / 4).abs().max() < 0.25 * 0.02  # secure noise is 0.9 % wider, for rounding
    close = torch.corrcoef(stacked) - torch.eye(12, device="cuda")
    assert close.abs().max() < 0.02  # 90,000 numbers: 6 standard deviations of a correlation
