"""The private step: what it releases, what it refuses, what it leaves alone."""

import contextlib
import copy
import dataclasses
import gc
import pickle
import warnings

import pytest
import torch
from loops import classify, clipped_sums, mlp, parameters, points, private, tiny_gpt, train
from torch.nn import functional as F

from accelerant.errors import BudgetExceeded, ConfigError, UnsupportedCase
from accelerant.nn.optim import AdamW
from accelerant.privacy import dp
from refusals import assert_raises

BOUND = 0.5


def drawn_steps(training, data, loss, **options):
    """An ordinary loop; the parts of each draw, in tensors without padding."""
    draws, parts = [], []
    for batch in training.batches(data, **options):
        loss(training.model, *batch.tensors).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()
        keep = slice(None) if batch.mask is None else batch.mask
        parts.append(tuple(each[keep] for each in batch.tensors))
        if batch.last:
            draws.append(tuple(torch.cat(column) for column in zip(*parts, strict=True)))
            parts = []
    return draws


def total(model, x, y):
    return F.cross_entropy(model(x), y, reduction="sum")


def sentences():
    tokens = torch.randint(11, (10, 9), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(("make", "loss", "microbatch"), [
    *((mlp, classify, microbatch) for microbatch in (None, 1, 3, 64)),
    (mlp, total, 7),
    (tiny_gpt, lambda model, x, y: model.loss(x, y), 4),
    (tiny_gpt, lambda model, x, y: F.cross_entropy(model(x).flatten(0, 1), y.flatten()), 4),
])  # fmt: skip
def test_an_ordinary_loop_is_a_loop_of_microbatches_of_one(make, loss, microbatch):
    data, model = points() if make is mlp else sentences(), make()
    plain, reduction = copy.deepcopy(model), "sum" if loss is total else "mean"
    expected = 7.5  # which no realized size is
    with private(model, 0.2, lr=0.3, expected_batch_size=expected, loss_reduction=reduction) as training:
        draws = drawn_steps(training, data, loss, microbatch=microbatch, steps=4)
    for rows in draws:
        for p, each in zip(plain.parameters(), clipped_sums(plain, loss, rows, BOUND), strict=True):
            p.data -= (0.3 * each / expected).float()
    for ours, theirs in zip(parameters(model), parameters(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("when", ["before", "after", "between"])
def test_hooks_of_gradients_run_on_the_noisy_mean(when):
    """Registered before make_private, after it, or between forward and backward; removed by their handle."""
    data, model = points(), mlp()
    weight, seen = model[0].weight, []

    def clamp(gradient):
        seen.append(gradient.clone())
        return gradient.clamp(-(2.0**-10), 2.0**-10)

    def hook():
        return weight.register_hook(clamp)

    handle = hook() if when == "before" else None
    with private(model, 0.5, noise_multiplier=1.0) as training:
        handle = hook() if when == "after" else handle
        for number, batch in enumerate(training.batches(data, steps=3, microbatch=8)):
            loss = classify(model, *batch.tensors)
            if number == 0 and when == "between":
                handle = hook()
            loss.backward()
            training.optimizer.step()
            if training.optimizer.stepped:
                assert float(weight.grad.abs().max()) <= 2.0**-10
                assert float(seen[-1].abs().max()) > 1e-2  # noise too
            training.optimizer.zero_grad()
    assert len(seen) == 3
    classify(model, *data).backward()  # after it they are ordinary hooks again
    assert len(seen) == 4
    assert float(weight.grad.abs().max()) <= 2.0**-10
    handle.remove()
    classify(model, *data).backward()
    assert len(seen) == 4


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_entropy")
def test_what_is_added_is_the_noise_and_only_once_a_draw():
    """The same draw in parts of 1 and of 40: noise of std * C / expected in each parameter, whatever the parts."""
    data, spread, clean = points(), {}, clipped_sums(mlp(), classify, points(), BOUND)
    for microbatch in (1, 40):
        found, model = [], mlp()
        initial = copy.deepcopy(model.state_dict())
        with private(model, 1.0, noise_multiplier=2.0, microbatch=microbatch) as training:
            for _ in range(12):
                model.load_state_dict(initial)
                before = parameters(model)
                drawn_steps(training, data, classify, steps=1)
                found += [(b - a) * 40 - c for b, a, c in zip(before, parameters(model), clean, strict=True)]
        drawn = torch.cat([each.flatten() for each in found])
        spread[microbatch] = float(drawn.std())
        assert abs(float(drawn.mean())) < 5 * 1.0 / len(drawn) ** 0.5
    for std in spread.values():  # 996 draws: 5 deviations of an estimated deviation are 11%
        assert std == pytest.approx(2.0 * BOUND * (1 + 1 / 64), rel=0.11)


@pytest.mark.parametrize("backward", [True, False])
def test_an_empty_draw_is_a_step_of_noise(backward):
    data, model = points(5), mlp()
    with private(model, 1e-9, noise_multiplier=1.0, expected_batch_size=4.0) as training:
        before = parameters(model)
        for batch in training.batches(data, steps=3):
            assert batch.examples == 0
            if backward:
                classify(model, *batch.tensors).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert training.optimizer.steps == 3
        assert sum(event.count for event in training.ledger.events) == 3
    assert all(bool((a != b).any()) for a, b in zip(before, parameters(model), strict=True))


@pytest.mark.usefixtures("fixed_entropy")
def test_a_parameter_that_the_batch_does_not_reach_gets_noise():
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(4, 2))
    data = (torch.zeros(6, 1, dtype=torch.long), torch.zeros(6, dtype=torch.long))
    before = model[0].weight.detach().clone()
    with private(model, 1.0, noise_multiplier=1.0) as training:
        drawn_steps(training, data, classify, steps=1)
    assert bool((model[0].weight[1:] != before[1:]).all())


def test_the_noisy_mean_is_in_grad_until_the_next_forward_pass():
    (x, y), model = points(), mlp()
    before = parameters(model)
    with private(model, 1.0, noise_multiplier=1.0, expected_batch_size=40) as training:
        for batch in training.batches((x, y), steps=2):  # without zero_grad: each step is of its own draw
            classify(model, *batch.tensors).backward()
            training.optimizer.step()
            after = parameters(model)
            for a, b, p in zip(before, after, model.parameters(), strict=True):
                torch.testing.assert_close(a - b, p.grad.double(), rtol=1e-3, atol=1e-6)
            before = after
        model(x)
        assert all(p.grad is None for p in model.parameters())


def test_a_sum_on_top_of_the_last_step_is_refused():
    """A model's own `loss` is no forward pass that a hook would see, and the batches are not ours."""
    model, tokens = tiny_gpt(), torch.randint(11, (6, 9))
    with private(model, 1.0, noise_multiplier=1.0, expected_batch_size=6) as training:
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        with pytest.warns(UserWarning, match="not drawn"):
            training.optimizer.step()
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        assert_raises(ConfigError, "noisy mean of the last step", loss.backward)
        training.optimizer.zero_grad()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        training.optimizer.step()
        assert training.optimizer.steps == 2


def test_virtual_steps_say_when_they_step_and_change_no_parameter_before():
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        before, made = parameters(model), []
        for batch in training.batches(data, microbatch=16, steps=2):
            classify(model, *batch.tensors).backward()
            made.append(training.step())
            assert training.optimizer.stepped == made[-1]
            after = parameters(model)
            assert any(torch.equal(a, b) for a, b in zip(before, after, strict=True)) != made[-1]
            before = after
        assert made == [False, False, True] * 2
        assert all(p.grad is None for p in model.parameters())


def test_zero_grad_before_backward_serves_as_well():
    data, results = points(), []
    for first in (True, False):
        model = mlp()
        with private(model, 1.0) as training:
            for batch in training.batches(data, microbatch=16, steps=2):
                if first:
                    training.optimizer.zero_grad()
                classify(model, *batch.tensors).backward()
                training.optimizer.step()
        results.append(parameters(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize("bounds", [(1e-3, 1e-3, 1e-3), (1e-3, 100.0, 1e-3)])
def test_the_noise_is_of_the_largest_bound_of_a_draws_parts(bounds):
    """The first part was clipped to 100; what is set after it does not shrink the noise on its sum."""
    data, model = points(), mlp()
    with private(model, 1.0, noise_multiplier=1.0, max_grad_norm=100.0) as training:
        for _ in range(2):  # the next draw begins anew
            for batch, bound in zip(training.batches(data, microbatch=16, steps=1), bounds, strict=True):
                classify(model, *batch.tensors).backward()
                training.clipper.max_grad_norm = bound
                training.optimizer.step()
            noise = torch.cat([p.grad.flatten() for p in model.parameters()])
            assert float(noise.std()) == pytest.approx(100 / 40, rel=0.3)  # of 83 numbers
            training.optimizer.zero_grad()
            training.clipper.max_grad_norm = 100.0
        training.clipper.max_grad_norm = 1e-3
        drawn_steps(training, data, classify, steps=1)
        assert training.optimizer._bound == 0.0
        assert float(training.optimizer._plan(40.0).scale) < 2e-3


def test_a_parameter_that_no_pass_reaches_gets_noise_as_well():
    """Whether a batch reaches it depends on the batch: a gradient of zeros, or of None, would tell."""
    data, model = points(), mlp()
    model.unused = torch.nn.Linear(8, 5)
    model.forward = lambda x: model[2](model[1](model[0](x)))
    before = parameters(model.unused)
    with private(model, 1.0, noise_multiplier=1.0, max_grad_norm=1.0) as training:
        for batch in training.batches(data, steps=1):
            classify(model, *batch.tensors).backward()
            training.optimizer.step()
            for p, was in zip(model.unused.parameters(), before, strict=True):
                assert float(p.grad.abs().median()) > 0  # on a grid, one number in 5,000 is 0
                assert not torch.equal(p.detach().double(), was)


def test_a_batch_of_ones_own_is_accounted_without_amplification_and_said_once():
    x, y = points()
    model = mlp()
    with private(model, 0.1, noise_multiplier=5.0, expected_batch_size=10) as training:
        classify(model, x[:10], y[:10]).backward()
        with pytest.warns(UserWarning, match="not drawn by the sampler"):
            training.optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            classify(model, x[10:20], y[10:20]).backward()
            training.optimizer.step()
        (event,) = training.ledger.events
        assert (event.sampling, event.sample_rate, event.count) == ("unknown", 1.0, 2)


@pytest.mark.slow
def test_the_budget_ends_the_training_before_the_step():
    data, model = points(), mlp()
    ledger = dp.PrivacyLedger(budget=dp.Budget(epsilon=2.0, delta=1e-5, method="rdp"))
    with private(model, 0.5, noise_multiplier=2.0, ledger=ledger) as training:
        assert_raises(BudgetExceeded, None, drawn_steps, training, data, classify, steps=500)
        kept, steps = parameters(model), training.optimizer.steps
        assert 0 < steps < 500
        assert training.epsilon() <= 2.0
        assert sum(event.count for event in ledger.events) == steps
    assert all(torch.equal(a, b) for a, b in zip(kept, parameters(model), strict=True))


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, AdamW])
def test_optimisers_and_schedulers_of_torch_and_of_ours(make):
    data, model = points(), mlp()
    inner = make(model.parameters(), lr=0.01)
    with private(model, 0.5, optimizer=inner, noise_multiplier=1.0) as training:
        scheduler = torch.optim.lr_scheduler.StepLR(training.optimizer, 1, gamma=0.5)
        for batch in training.batches(data, steps=2):
            classify(model, *batch.tensors).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                training.optimizer.step()
                scheduler.step()
        assert inner.param_groups[0]["lr"] == pytest.approx(0.0025)
        assert training.optimizer.param_groups is inner.param_groups
        saved = training.optimizer.state_dict()
        training.optimizer.load_state_dict(saved)


def test_our_optimiser_clips_the_noisy_mean():
    data, model = points(), mlp()
    inner = AdamW(model.parameters(), lr=0.01, max_grad_norm=1e-3)
    with private(model, 0.5, optimizer=inner, noise_multiplier=1.0) as training:
        drawn_steps(training, data, classify, steps=1)
        assert float(training.optimizer.grad_norm) > 1e-3


# --- what is refused -------------------------------------------------------------------------------------------------
def test_a_second_backward_pass_over_the_same_rows_is_refused():
    data, model = points(), mlp()
    with private(model, 0.5) as training:
        for batch in training.batches(data, steps=1):
            classify(model, *batch.tensors).backward()
            classify(model, *batch.tensors).backward()
            assert_raises(ConfigError, "more than once", training.optimizer.step)
            break


def test_a_draw_that_was_left_does_not_run_into_the_next():
    """Parts of two draws in one sum could hold an example twice."""
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        for batch in training.batches(data, microbatch=16, steps=1):
            classify(model, *batch.tensors).backward()
            break
        again = training.batches(data, microbatch=16, steps=1)
        assert_raises(ConfigError, "gives these up", lambda: next(again))
        training.optimizer.zero_grad()
        train(training, data, 1, microbatch=16)
        assert training.optimizer.steps == 1


def test_a_step_without_backward_is_refused():
    data, model = points(), mlp()
    with private(model, 1.0, expected_batch_size=40) as training:
        assert_raises(ConfigError, "without a backward pass", training.optimizer.step)
        for _ in training.batches(data, steps=1):
            assert_raises(ConfigError, "without a backward pass", training.optimizer.step)


def test_gradients_from_before_are_not_released():
    data, model = points(), mlp()
    classify(model, *data).backward()
    with private(model, 1.0) as training:
        assert all(p.grad is None for p in model.parameters())
        model[0].weight.grad = torch.ones_like(model[0].weight)
        assert_raises(ConfigError, "before the first backward pass", lambda: next(training.batches(data, steps=1)))
        training.optimizer.zero_grad()
        next(training.batches(data, steps=1))
        model[0].weight.grad = torch.ones_like(model[0].weight)
        loss = classify(model, *data)
        assert_raises(ConfigError, "set by hand", loss.backward)


def test_a_parameter_that_was_frozen_is_not_updated_unclipped():
    data, model = points(), mlp()
    model[0].weight.requires_grad_(False)
    with private(model, 1.0) as training:
        kept = model[0].weight.detach().clone()
        drawn_steps(training, data, classify, steps=1)
        assert torch.equal(model[0].weight, kept)
        for batch in training.batches(data, steps=1):
            loss = classify(model, *batch.tensors)
            loss.backward()
            model[0].weight.requires_grad_(True)
            model[0].weight.grad = torch.ones_like(kept)
            assert_raises(ConfigError, "not clipped", training.optimizer.step)


def replace(grad):
    grad.data = 2 * torch.ones(grad.shape)


REFUSED = [
    lambda grad: grad.mul_(2), lambda grad: grad.data.mul_(2), lambda grad: grad.detach().mul_(2),
    lambda grad: grad.numpy().__imul__(2), lambda grad: torch.from_dlpack(grad).mul_(2),
    lambda grad: grad.untyped_storage().fill_(1), lambda grad: torch._foreach_mul_([grad], 2.0),
    lambda grad: torch.add(grad, grad, out=grad), torch.distributed.all_reduce,
    lambda grad: torch.zeros_like(grad).sub_(grad),
]  # fmt: skip


def test_no_write_to_a_gradient_reaches_the_sum():
    """A sum over two processes before the step would double the sensitivity, whatever way it is written."""
    data, moved = points(), []
    for writes in ([], REFUSED, [replace]):
        model = mlp()
        with private(model, 1.0) as training:
            for batch in training.batches(data, microbatch=16, steps=1):
                classify(model, *batch.tensors).backward()
                for write in writes:
                    expected = contextlib.nullcontext()
                    if write is not replace:
                        expected = pytest.raises(ConfigError, match="has added noise")
                    with expected:
                        write(model[0].weight.grad)
                training.optimizer.step()
                training.optimizer.zero_grad()
        moved.append(parameters(model))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*moved, strict=True))


def test_an_update_by_hand_before_the_step_is_refused():
    (x, y), model = points(), mlp()
    before = parameters(model)
    with private(model, 1.0, noise_multiplier=1.0, expected_batch_size=40) as training:
        classify(model, x, y).backward()
        with pytest.raises(ConfigError, match=r"not in \.grad until"):
            model[0].weight.data -= 0.1 * model[0].weight.grad
        assert_raises(ConfigError, "clip after the noise", torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        assert repr(model[0].weight.grad).endswith("until step() has added the noise)")
        assert (model[0].weight.grad.ndim, model[0].weight.grad.nbytes, model[0].weight.grad.is_cuda) == (2, 192, False)
        model[0].weight.grad = torch.ones_like(model[0].weight)  # put in its place
        assert_raises(ConfigError, "changed or cleared", training.optimizer.step)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))


def test_a_model_that_is_moved_between_backward_and_step_is_updated():
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        for batch in training.batches(data, steps=1):
            classify(model, *batch.tensors).backward()
            before = parameters(model.double())
            training.optimizer.step()
        assert any(bool((a != b).any()) for a, b in zip(before, parameters(model), strict=True))


def test_gradients_cleared_between_parts_are_found():
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        batches = training.batches(data, microbatch=16, steps=1)
        classify(model, *next(batches).tensors).backward()
        model.zero_grad()
        loss = classify(model, *next(batches).tensors)
        assert_raises(ConfigError, "changed or cleared", loss.backward)


def test_closures_scalers_groups_and_copies_are_refused():
    model = mlp()
    x, y = points()
    with private(model, 1.0, expected_batch_size=40) as training:
        optimizer = training.optimizer
        assert_raises(UnsupportedCase, "closure", optimizer.step, lambda: None)
        with pytest.raises(UnsupportedCase, match="cannot be added"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        for duplicate in (pickle.dumps, copy.deepcopy):
            assert_raises(TypeError, "state_dict", duplicate, optimizer)
        optimizer.grad_scale = torch.ones(())
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(classify(model, x, y)).backward()
        assert_raises(UnsupportedCase, "GradScaler", optimizer.step)
        del optimizer.grad_scale
        assert_raises(UnsupportedCase, "GradScaler", scaler.step, optimizer)


def test_batches_of_ones_own_need_an_expected_size():
    x, y = points()
    model = mlp()
    with private(model, 1.0) as training:
        F.cross_entropy(model(x), y).backward()
        assert_raises(ConfigError, "expected_batch_size", training.optimizer.step)


@pytest.mark.parametrize("second", [False, True])
def test_no_optimizer_steps_past_the_private_one(second):
    """The habit of calling step() on the variable of before: neither noise nor ledger would have part in it."""
    (x, y), model = points(), mlp()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    with private(model, 1.0, optimizer=inner, noise_multiplier=1.0, expected_batch_size=40) as training:
        other = torch.optim.Adam(model.parameters()) if second else inner
        before = parameters(model)
        classify(model, x, y).backward()
        assert_raises(ConfigError, f"{type(other).__name__}.step.. would update by a sum", other.step)
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
        with pytest.warns(UserWarning, match="not drawn"):
            training.optimizer.step()
        other.step()  # by the noisy mean, which is public
        classify(model, x, y).backward()
    assert all(p.grad is None for p in model.parameters())  # what no step released
    classify(model, x, y).backward()
    inner.step()  # an ordinary training again


def test_the_padding_of_a_batch_stays_out_when_its_iterator_is_gone():
    data, model = points(), mlp()
    with private(model, 0.2) as training:
        batch = next(training.batches(data, microbatch=64))
        classify(model, *batch.tensors).backward()
        assert torch.equal(training.clipper.factors > 0, batch.mask)
        training.optimizer.step()
        assert training.clipper.mask is None
        (event,) = training.ledger.events
        assert event.sampling == "poisson"


@pytest.mark.parametrize("rate", [0.2, 1e-9])
def test_batches_are_taken_one_at_a_time(rate):
    """Fetched ahead, a batch would be clipped with the mask of the next."""
    data, model = points(), mlp()
    with private(model, rate, expected_batch_size=8) as training:
        assert_raises(ConfigError, "one at a time", lambda: list(training.batches(data, microbatch=64, steps=2)))
        batches = training.batches(data, microbatch=64, steps=2)
        next(batches)
        assert_raises(ConfigError, "leave none out", lambda: next(batches))


class Turned(torch.nn.Module):
    """Its input has the examples second, and so have its layers."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)


def test_fewer_rows_than_were_drawn_are_refused():
    """Five positions of all examples would be clipped in place of 40 examples."""
    model = Turned()
    with private(model, 1.0) as training:
        batch = next(training.batches((torch.randn(40, 5, 6),), steps=1))
        model(batch.tensors[0].transpose(0, 1)).mean().backward()
        assert_raises(ConfigError, "5 rows went through backward passes, the batch has 40", training.optimizer.step)
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        batches = training.batches(data, microbatch=32, steps=1)
        classify(model, *next(batches).tensors).backward()
        next(batches)  # 8 rows, which get no backward pass
        assert_raises(ConfigError, "0 rows went through", training.optimizer.step)


def test_a_parameter_that_was_frozen_since_stays_as_it_is():
    data, model = points(), mlp()
    with private(model, 1.0, noise_multiplier=1.0) as training:
        drawn_steps(training, data, classify, steps=1)
        kept = model[0].weight.detach().clone()
        model[0].weight.requires_grad_(False)
        drawn_steps(training, data, classify, steps=1)
        assert torch.equal(model[0].weight, kept)


class Failing(torch.autograd.Function):
    """Passes values on; its backward pass fails, as one that finds no memory does."""

    fails = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        if Failing.fails:
            raise RuntimeError("no memory")
        return dy


def test_what_a_failed_pass_has_summed_is_not_released():
    """By layer, sums are made on the way: the same batch again would count its examples twice."""
    (x, y), model = points(), mlp()

    def loss():
        return F.cross_entropy(model[2](Failing.apply(model[1](model[0](x)))), y)

    with private(model, 1.0, clipping="per_layer", expected_batch_size=40) as training:
        Failing.fails = True
        first = loss()
        assert_raises(RuntimeError, "no memory", first.backward)
        Failing.fails = False
        again = loss()
        assert_raises(ConfigError, "a pass that failed", again.backward)
        training.optimizer.zero_grad()
        loss().backward()
        Failing.fails = True  # of several passes, likewise
        again = loss()
        assert_raises(RuntimeError, "no memory", again.backward)
        assert_raises(ConfigError, "a pass that failed", training.optimizer.step)


def test_a_draw_makes_one_step():
    """A list of draws, gone through in each epoch, is no new sample each time."""
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training:
        kept = list(training._draws(data, microbatch=8, steps=2))

        def epoch():
            for batch in kept:
                training.use(batch)
                classify(model, *batch.tensors).backward()
                training.step()

        epoch()
        assert training.optimizer.steps == 2
        assert_raises(ConfigError, "has made a step already", epoch)


def test_a_target_holds_beside_other_releases_in_the_ledger():
    """The ledger has no budget; the target is the training's own."""
    data, ledger, model = points(), dp.PrivacyLedger(), mlp()
    with private(model, 1.0, target_epsilon=1.0, steps=1, ledger=ledger, expected_batch_size=40) as training:
        ledger.record(dp.PrivacyEvent("gaussian", 8.0))
        assert not training.optimizer.affordable()
        before = parameters(model)
        with pytest.raises(BudgetExceeded, match=r"budget is epsilon 1 at delta 1e-05: 0\.434"):
            drawn_steps(training, data, classify, steps=1)
        assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))
        assert (training.optimizer.steps, len(ledger.events)) == (0, 1)


def test_parts_of_two_draws_do_not_meet_where_the_loop_says_what_it_uses():
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        first, second = (next(iter(training._draws(data, microbatch=16, steps=1))) for _ in range(2))
        training.use(first)
        classify(model, *first.tensors).backward()
        assert_raises(ConfigError, "one step belongs to each draw", training.use, second)


# --- choices that depend on the data ---------------------------------------------------------------------------------
@pytest.mark.parametrize("attribute", ["norms", "factors", "layer_norms"])
def test_a_bound_that_is_set_after_norms_were_read_is_warned_of(attribute):
    data, model = points(), mlp()
    with private(model, 1.0) as training:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training.clipper.max_grad_norm = 0.4  # as planned
            drawn_steps(training, data, classify, steps=1)
            training.clipper.max_grad_norm = 0.3
        getattr(training.clipper, attribute)
        with pytest.warns(UserWarning, match="a bound that follows them reveals them"):
            training.clipper.max_grad_norm = 0.2
        assert training.clipper.sensitivity == 0.2


def test_a_schedule_by_a_metric_is_warned_of():
    with private(mlp(), 1.0) as training:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 10)
        with pytest.warns(UserWarning, match="ReduceLROnPlateau follows a metric") as caught:
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(training.optimizer)
        assert caught[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            plateau.step(1.0)


def stepped(training, data, keeps, steps):
    """Draws in iterators of their own, of which some are given up."""
    for _ in range(steps):
        batch = next(training.batches(data, steps=1))
        classify(training.model, *batch.tensors).backward()
        if keeps(batch):
            training.optimizer.step()
        training.optimizer.zero_grad()


def test_draws_that_were_given_up_until_one_suits_are_warned_of():
    """Small draws only, say: each row would be in fewer of them than the ledger's rate says."""
    data, model = points(), mlp()
    with private(model, 1.0, noise_multiplier=1.0) as training:
        chosen = iter([True, False, True, False, True])
        with pytest.warns(UserWarning, match="given up without a step.*Make a step of each draw"):
            stepped(training, data, lambda batch: next(chosen), 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            stepped(training, data, lambda batch: next(chosen), 2)
        batches = training.batches(data, steps=2)
        classify(model, *next(batches).tensors).backward()
        training.optimizer.zero_grad()
        assert_raises(ConfigError, "leave none out", lambda: next(batches))


def used(training, draws):
    for batch in draws:
        training.use(batch)
        classify(training.model, *batch.tensors).backward()
        training.step()


@pytest.mark.parametrize("taken", [slice(1, None), slice(0, None, 2)])
def test_draws_that_were_left_out_are_warned_of(taken):
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training:
        draws = list(training._draws(data, steps=4))
        with pytest.warns(UserWarning, match="a draw was left out"):
            used(training, draws[taken])


def test_draws_in_order_are_not_warned_of():
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training, warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (3, 1, 2):
            drawn_steps(training, data, classify, steps=steps, microbatch=8)
            used(training, list(training._draws(data, steps=2, microbatch=8)))
        assert training.optimizer.steps == 12


def test_a_part_of_a_draw_is_refused_as_a_draw():
    data, model = points(), mlp()
    with private(model, 1.0, noise_multiplier=1.0) as training:
        part = next(iter(training._draws(data, microbatch=16)))
        training.use(dataclasses.replace(part, last=True))
        classify(model, *part.tensors).backward()
        assert_raises(ConfigError, "16 of the draw's 40 rows were used", training.step)
        training.optimizer.zero_grad()
        whole = next(iter(training._draws(data)))
        some = tuple(each[:10] for each in whole.tensors)
        training.use(dataclasses.replace(whole, tensors=some, examples=10, rows=10))
        classify(model, *some).backward()
        assert_raises(ConfigError, "10 of the draw's 40 rows were used", training.step)
        assert not training.ledger.events


def test_a_batch_that_is_said_to_be_drawn_is_accounted_without_amplification():
    x, y = points()
    model = mlp()
    with private(model, 0.1, noise_multiplier=1.0, expected_batch_size=4) as training:
        training.use(dp.DrawnBatch((x[:4], y[:4]), torch.arange(4) < 3, True, 3, 4))
        classify(model, x[:4], y[:4]).backward()
        with pytest.warns(UserWarning, match="not drawn by the sampler"):
            training.step()
        assert [event.sampling for event in training.ledger.events] == ["unknown"]
        assert training.clipper.mask is None


@pytest.mark.filterwarnings("ignore:.*find_unused_parameters")
def test_a_model_that_is_wrapped_after_make_private_is_refused(tmp_path):
    """Its gradients' sums over the processes would be taken before clipping, or twice."""
    (x, y), model = points(), mlp()
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        with private(model, 1.0) as training:
            wrapped = torch.nn.parallel.DistributedDataParallel(model)
            with torch.no_grad():
                wrapped(x)
            assert_raises(UnsupportedCase, "DistributedDataParallel adds gradients up", wrapped, x)
            classify(model, x, y).backward()
            assert training.optimizer.tracker.passes == 1
            replica = model._replicate_for_data_parallel()
            replica._is_replica = True
            assert_raises(UnsupportedCase, "DataParallel adds gradients up", replica, x)
    finally:
        wrapped = None  # one that outlives its group may wait for the group's threads for ever
        gc.collect()
        torch.distributed.destroy_process_group()
