"""Models that mix examples behind equal shapes are refused; the check leaves no trace in a run."""

import dataclasses
import gc
import random
import warnings
import weakref
from collections import OrderedDict

import numpy as np
import pytest
import torch
from loops import classify, mlp, parameters, points, private, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from accelerant.errors import ConfigError, UnsupportedCase
from accelerant.privacy.dp.training import separation
from accelerant.privacy.dp.training.separation import _patterns
from modules import module
from refusals import assert_raises


class Rearranged(nn.Module):
    """Calls its inner layer on rows that `change` rearranges, and puts them back by `back`."""

    def __init__(self, change, back, features=6):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(features, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.change, self.back = change, back

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(self.back(self.inner(self.change(h)).tanh()))


def swapped(h):
    """The last two rows, exchanged."""
    return torch.cat([h[:-2], h[-2:].flip(0)])


class Shuffled(Rearranged):
    """In train mode the inner layer gets the rows in random order."""

    def __init__(self):
        super().__init__(None, None)

    def forward(self, x):
        order = torch.randperm(len(x)) if self.training else torch.arange(len(x))
        h = self.inner(self.first(x).tanh()[order]).tanh()
        return self.last(h[order.argsort()])


def loop(model, data, loss=classify, rows=8, steps=1, **options):
    """An ordinary loop without noise over parts of `rows` rows."""
    with private(model, 1.0, **options) as training:
        train(training, data, steps, loss, microbatch=rows)
        return training


def transposed(h):
    return h.transpose(0, 1)


@pytest.mark.parametrize("rows", [2, 3, 8])
def test_a_transposed_layer_is_refused_where_positions_are_as_many_as_examples(rows):
    """Each example's gradient would be spread over all, and the sum move by `rows` times the bound."""
    model = Rearranged(transposed, transposed)
    x, y = torch.randn(24, rows, 6), torch.randint(3, (24, rows))
    before = parameters(model)

    def loss(model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    with pytest.raises(UnsupportedCase, match=r"depends on the other rows of the batch in inner: .*transposition"):
        loop(model, (x, y), loss, rows)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(model), strict=True))


@pytest.mark.parametrize(("change", "back"), [
    (lambda h: h.flip(0), lambda h: h.flip(0)),
    (lambda h: h.roll(1, 0), lambda h: h.roll(-1, 0)),
    (lambda h: h.roll(4, 0), lambda h: h.roll(-4, 0)),
    (swapped, swapped),
    (lambda h: h.flip(0), lambda h: h),  # and not put back: the mask would be of other rows
])  # fmt: skip
def test_permuted_rows_are_refused(change, back):
    """By half of an example's gradient in another's norm, and half in its own, both pass the bound."""
    with pytest.raises(UnsupportedCase, match=r"depends on the other rows of the batch in .*inner"):
        loop(Rearranged(change, back), points())


@pytest.mark.parametrize("mix", [
    lambda h: h - h.mean(0),
    lambda h: h - h[:1],
    lambda h: h + h[-1:],
    lambda h: h.cumsum(0),
    lambda h: h / h.std(),
    lambda h: h + 0.01 * h.roll(1, 0),
    lambda h: h * (h * h.roll(1, 0)).sum(1, keepdim=True).sign(),  # no norm changes
    lambda h: h * h.roll(1, 0)[:, :1].sign(),
])  # fmt: skip
def test_mixed_rows_are_refused(mix):
    torch.manual_seed(0)  # the signs of rows could be all the same
    with pytest.raises(UnsupportedCase, match="depends on the other rows of the batch in first"):
        loop(Rearranged(mix, lambda h: h), points())


@pytest.mark.parametrize("choose", [
    lambda x: len(x) % 2 == 0,
    lambda x: x.mean() > 0.15,
    lambda x: x.mean() < -0.15,
    lambda x: x.abs().max() > x[0].abs().max(),
])  # fmt: skip
@pytest.mark.parametrize("use", [
    lambda h, chosen: h + chosen, lambda h, chosen: h * (1 - 2 * chosen), lambda h, chosen: h / len(h) ** chosen,
])  # fmt: skip
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_choice_by_the_rows_or_their_number_is_refused(choose, use, reduction):
    """One more row could change the gradients of all."""
    torch.manual_seed(0)
    model = Rearranged(None, lambda h: h)
    model.change = lambda h: use(h, float(choose(model.x)))
    model.register_forward_pre_hook(lambda model, args: setattr(model, "x", args[0]))
    with pytest.raises(UnsupportedCase, match="depends on the other rows of the batch"):
        loop(model, points(8), loss_reduction=reduction)


@pytest.mark.parametrize("model", [
    nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    Rearranged(lambda h: h - h.mean(1, keepdim=True) * len(h) / max(len(h), 1), lambda h: h),
])  # fmt: skip
def test_a_model_whose_rows_have_the_same_gradients_alone_is_not_refused(model):
    loop(model, points(24), steps=9)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(("value", "places"), [(torch.nan, [0]), (torch.inf, [0, 5]), (-torch.inf, [3, 4])])
@pytest.mark.parametrize("mix", [
    lambda h: h - h.mean(0), lambda h: h.softmax(0), lambda h: h / h.detach().norm(), lambda h: h + 0 * h.sum(),
])  # fmt: skip
def test_rows_that_are_not_finite_hide_no_mixture(mix, value, places):
    """With one, no gradient is finite, whatever rows take the place of others."""
    x, y = points(8)
    x[places] *= value
    with pytest.raises(UnsupportedCase, match="depends on the other rows of the batch"):
        loop(Rearranged(lambda h: mix(h.atanh()), lambda h: h), (x, y))
    loop(Rearranged(lambda h: h.exp(), lambda h: h), (x, y))


@pytest.mark.parametrize("place", [0, 5])
def test_a_row_that_is_far_larger_hides_no_mixture(place):
    x, y = points(8)
    x[place] *= 1e20
    centered = module(lambda m, x: F.batch_norm(x, None, None, training=True))
    with pytest.raises(UnsupportedCase, match="depends on the other rows of the batch"):
        loop(nn.Sequential(nn.Linear(6, 6), centered, nn.Linear(6, 3)), (x, y))


class Scaled(nn.Module):
    """Takes a second input of as many columns as there are rows, and mixes examples through it alone."""

    def __init__(self, mix):
        super().__init__()
        self.first, self.last, self.mix = nn.Linear(6, 8), nn.Linear(8, 3), mix

    def forward(self, x, other):
        return self.last(self.mix(self.first(x).tanh(), other))


@pytest.mark.parametrize("mix", [
    lambda h, other: h * other.mean(0),  # (rows, 8) by (8,)
    lambda h, other: h * other.mean(),
    lambda h, other: h + other.T,
    lambda h, other: h + other.flip(0),
    lambda h, other: other @ h,
])  # fmt: skip
def test_rows_that_are_mixed_through_a_second_input_are_refused(mix):
    """Of (rows, rows), as a mask of positions may be by chance."""
    x, y = points()
    other = torch.randn(40, 8)

    def loss(model, x, y, other):
        return F.cross_entropy(model(x, other), y)

    with pytest.raises(UnsupportedCase, match=r"batch in .*last.* one of shape \(8, 8\) may be such an input"):
        loop(Scaled(mix), (x, y, other), loss, rows=8)


def test_rows_that_are_shuffled_in_train_mode_are_refused():
    for seed in range(5):
        torch.manual_seed(seed)
        assert_raises(UnsupportedCase, "in inner", lambda: loop(Shuffled(), points()))


def test_a_layer_behind_a_zero_matrix_is_looked_at_again():
    """As with LoRA's: at the first pass none of its gradients is anything but zero."""
    model = Rearranged(transposed, transposed)
    nn.init.zeros_(model.last.weight)
    x, y = torch.randn(24, 8, 6), torch.randint(3, (24, 8))

    def loss(model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    with private(model, 1.0) as training, pytest.raises(UnsupportedCase, match="in inner"):  # noqa: PT012
        for batch in training.batches((x, y), microbatch=8, steps=2):
            loss(model, *batch.tensors).backward()
            if training.step():
                assert training.optimizer.steps == 1


class InTraining(Rearranged):
    """Mixes rows in train mode alone."""

    def forward(self, x):
        h = self.first(x).tanh()
        return self.last(h - h.mean(0) if self.training else h) + 0 * self.inner(h).sum(1, keepdim=True)


def test_a_model_that_was_checked_in_eval_mode_is_checked_in_train_mode():
    (x, y), model = points(), InTraining(None, None)
    with private(model, 1.0):
        classify(model.eval(), x, y).backward()
        assert_raises(UnsupportedCase, "in last", lambda: model.train()(x))


def test_a_batch_of_one_is_checked_when_there_are_two():
    model = Rearranged(lambda h: h.flip(0), lambda h: h.flip(0))
    with private(model, 1.0, expected_batch_size=4) as training:
        x, y = points()
        classify(model, x[:1], y[:1]).backward()
        training.optimizer.zero_grad()
        assert_raises(UnsupportedCase, "in inner", lambda: model(x[:2]))


class Rounded(torch.autograd.Function):
    """Attention that rounds the gradient of q as kernels do, at random."""

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, q, k, v, share, generator):
        weights = (q.float() @ k.float().mT).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        ctx.share, ctx.generator = share, generator
        return (weights @ v.float()).to(q.dtype)

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, dy):
        q, k, v, weights = ctx.saved_tensors
        dv, ds = weights.mT @ dy.float(), dy.float() @ v.float().mT
        ds = weights * (ds - (ds * weights).sum(-1, keepdim=True))
        if ctx.share is None:
            dq = torch.zeros_like(q)
            for block in torch.randperm(8, generator=ctx.generator):
                dq += (ds[..., block::8] @ k.float()[..., block::8, :]).to(q.dtype)
        else:
            dq = ds @ k.float()
            off = torch.rand(dq.shape, generator=ctx.generator) < ctx.share
            dq += off * torch.randn(dq.shape, generator=ctx.generator).sign() * dq.abs() / 2**8
        return dq.to(q.dtype), (ds.mT @ q.float()).to(q.dtype), dv.to(q.dtype), None, None


class Rounding(nn.Module):
    def __init__(self, share, seed, mix=0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.q, self.k, self.v, self.last = (
            nn.Linear(*size) for size in ((6, 16), *[(16, 16)] * 3, (16, 3))
        )
        self.share, self.mix, self.generator = share, mix, torch.Generator().manual_seed(seed)

    def forward(self, x):
        h = self.first(x).tanh()
        h = h + self.mix * h.mean(0)
        return self.last(h + Rounded.apply(self.q(h), self.k(h), self.v(h), self.share, self.generator))


def refusals(trials, **settings):
    """How many of so many models with seeds of their own are refused."""
    count = 0
    for seed in range(trials):
        model = Rounding(seed=seed, **settings)
        with private(model, 1.0, expected_batch_size=8), warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                model(torch.randn(8, 16, 6))
            except UnsupportedCase:
                count += 1
    return count


@pytest.mark.sample(5)
@pytest.mark.parametrize("share", [None, 1e-4, 1e-3, 1e-2, 0.1])
@pytest.mark.parametrize("low", [True, False])
def test_rounding_at_random_is_not_taken_for_a_mixture(share, low):
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert not refusals(6, share=share)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("mix", [1e-3, 1e-2, 0.03, 0.1])
@pytest.mark.parametrize(("share", "low"), [(None, True), (1e-3, True), (1e-2, False)])
def test_a_small_mixture_is_refused_beside_rounding(mix, share, low):
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        assert refusals(1, share=share, mix=mix) == 1


# --- losses ----------------------------------------------------------------------------------------------------------
def one_hot(y):
    return F.one_hot(y, 3).float()


@pytest.mark.parametrize(("loss", "found"), [
    (lambda out, y: F.cross_entropy(out, y, reduction="sum"), "sum"),
    (lambda out, y: F.cross_entropy(out, y, reduction="none").sum(), "sum"),
    (lambda out, y: -out.log_softmax(1).gather(1, y[:, None]).sum(), "sum"),
    (lambda out, y: F.mse_loss(out, one_hot(y), reduction="sum") + F.cross_entropy(out, y, reduction="sum"), "sum"),
    (lambda out, y: F.cross_entropy(out, y).sum(), "mean"),
    (lambda out, y: F.binary_cross_entropy_with_logits(out, one_hot(y)), "mean"),
    (lambda out, y: (out - one_hot(y)).square().sum(1).mean(), "mean"),
])  # fmt: skip
def test_a_loss_of_the_other_reduction_is_refused(loss, found):
    """The bound would change with the number of rows, which one example changes: for all rows together, by 2 C."""
    wanted = {"sum": "mean", "mean": "sum"}[found]
    x, y = points(8)
    for given, refused in ((wanted, True), (found, False)):
        model = mlp()
        with private(model, 1.0, loss_reduction=given, expected_batch_size=8):
            value = loss(model(x), y)
            if refused:
                with pytest.raises(ConfigError, match=f"is a {found} over the batch .*Give loss_reduction='{found}'"):
                    value.backward()
            else:
                value.backward()


@pytest.mark.parametrize("loss", [
    lambda out, y: F.cross_entropy(out, y, reduction="sum") / len(y),
    lambda out, y: (F.cross_entropy(out, y, reduction="none") / len(y)).sum(),
    lambda out, y: (F.cross_entropy(out, y, reduction="none") * torch.full((len(y),), 1 / len(y))).sum(),
    lambda out, y: (out.square() / len(y)).sum(1).sum(),
    lambda out, y: (F.cross_entropy(out, y, reduction="none") / len(y) + out.square().sum(1) / len(y)).sum(),
    lambda out, y: torch.stack([F.cross_entropy(out, y), out.square().sum(1).mean()]).sum(),
])  # fmt: skip
def test_a_sum_that_is_divided_may_be_a_mean(loss):
    x, y = points(8)
    model = mlp()
    with private(model, 1.0, expected_batch_size=8) as training:
        loss(model(x), y).backward()
        assert training.optimizer.tracker.passes == 1


class Losing(nn.Module):
    """Returns its loss, and beside it what it computed it from."""

    def __init__(self, loss, probability):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Dropout(probability), nn.Linear(8, 3))
        self.loss = loss

    def forward(self, x, y):
        out = self.layers(x)
        return self.loss(out, y), out


@pytest.mark.parametrize("probability", [0.0, 0.5])
@pytest.mark.parametrize(("loss", "shown"), [
    (lambda out, y: F.cross_entropy(out, y), None),
    (lambda out, y: F.cross_entropy(out, y) + out.square().sum(1).mean(), None),
    (lambda out, y: F.cross_entropy(out, y) + 0.5 * out.square().sum(), "neither mean nor sum"),
    (lambda out, y: F.cross_entropy(out, y, reduction="sum") / 7, "a sum"),
])  # fmt: skip
def test_a_loss_that_the_model_returns_is_reduced_as_was_said(loss, shown, probability):
    x, y = points(8)
    for after in (lambda value: value, lambda value: value / len(x)):  # a sum may be divided outside
        model = Losing(loss, probability)
        with private(model, 1.0, expected_batch_size=8):
            value = after(model(x, y)[0])
            if shown and after(1.0) == 1.0:
                assert_raises(ConfigError, f"the loss is no mean .* show {shown}", value.backward)
            else:
                value.backward()
        assert model.layers[1].training


def test_sums_that_a_model_returns_beside_its_loss_may_be_logged():
    x, y = points(8)
    model = Losing(lambda out, y: (F.cross_entropy(out, y), out.square().sum()), 0.0)
    with private(model, 1.0, expected_batch_size=8) as training:
        model(x, y)[0][0].backward()
        assert training.optimizer.tracker.passes == 1


def test_a_model_whose_parts_are_called_is_named_as_unchecked():
    x, y = points(8)
    model = mlp()
    with private(model, 1.0, expected_batch_size=8), pytest.warns(UserWarning, match="parts were called"):
        F.cross_entropy(model[2](model[1](model[0](x))), y).backward()


# --- models that are accepted ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [AssertionError, ZeroDivisionError, SystemError, torch.OutOfMemoryError])
def test_a_model_that_refuses_other_sizes_in_its_own_words_trains(error):
    x, y = points(8)

    def forward(self, x):
        if len(x) < 8:
            raise error("too few rows")
        return self.inner(x)

    model = module(forward, inner=mlp())
    with private(model, 1.0, expected_batch_size=8), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        F.cross_entropy(model(x), y).backward()
    assert any("memory ran out" in str(each.message) for each in said) is (error is torch.OutOfMemoryError)


class Many(nn.Module):
    """Takes a mapping and keywords, returns a named tuple, draws random numbers of three kinds, counts calls."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.calls, self.seen = 0, []
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, inputs, *, scale):
        self.calls += 1
        self.mean.mul_(0.9).add_(inputs["x"].detach().mean(0), alpha=0.1)
        self.mean_of_last = inputs["x"].detach().mean()
        noise = random.random() + float(np.random.rand())
        h = F.dropout(self.body(inputs["x"]), 0.5, self.training) * (scale + noise)[:, None]
        return OrderedDict(logits=self.head(h.tanh()), hidden=[h])


def seeded():
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)


def test_the_check_leaves_no_trace():
    (x, y), found = points(8), []
    for check in (True, False):
        torch.manual_seed(0)
        model = Many()
        with warnings.catch_warnings(), private(model, 1.0, expected_batch_size=8) as training:
            warnings.simplefilter("error")
            first = training.optimizer.separation
            first._modes[True].done, first._called = not check, True
            seeded()
            loss = F.cross_entropy(model({"x": x, "name": "rows"}, scale=torch.ones(8))["logits"], y)
            loss.backward()
            assert not first.pending
            assert training.optimizer.tracker.passes == 1
            drawn = (random.random(), float(np.random.rand()), float(torch.rand(())))
            found.append((loss.item(), drawn, model.calls, model.mean.clone(), training.clipper.norms.clone()))
            assert training.clipper.nonfinite == 0
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert found[0][2] == 1


@pytest.mark.parametrize(("model", "data"), [
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)), points),
    (lambda: nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(16, 3)), points),
    (lambda: nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.LayerNorm(8), nn.Linear(8, 3)), points),
])  # fmt: skip
def test_models_that_keep_examples_apart_train(model, data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loop(model(), data(), steps=2).optimizer.steps == 2


@dataclasses.dataclass(slots=True)
class Result:
    logits: torch.Tensor


class Listing(nn.Module):
    """Keeps what its loss needs in lists; takes a mask of positions; returns an object without a mapping."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.kept = nn.Linear(6, 8), nn.Linear(8, 3), []

    def forward(self, x, mask):
        h = (mask @ self.first(x.to_dense() if x.is_sparse else x)).tanh()
        self.kept.append(h.square().mean((1, 2)))
        return Result(self.last(h.mean(1)))


class Attending(Listing):
    """Its mask has to be as large as its scores."""

    def forward(self, x, mask):
        h = self.first(x)
        self.kept.append(h.square().mean((1, 2)))
        return Result(self.last(F.scaled_dot_product_attention(h, h, h, attn_mask=mask.bool()).mean(1)))


def listed(model, x, y, leading=()):
    model.kept.clear()
    mask = torch.ones(*leading, x.shape[1], x.shape[1]).tril()
    return F.cross_entropy(model(x, mask).logits, y) + torch.stack(model.kept).sum(0).mean()


@pytest.mark.parametrize(("model", "loss", "positions"), [
    (Listing, listed, 3),
    (Attending, listed, 4),  # as many as rows; of another number of rows the mask is refused by the model
    (Listing, lambda model, x, y: listed(model, x, y, (1,)), 4),
    (Listing, lambda model, x, y: listed(model, x.to_sparse(), y), 3),
    (Listing, lambda model, x, y: checkpoint(listed, model, x, y, use_reentrant=False), 3),
])  # fmt: skip
def test_the_check_stops_no_ordinary_program(model, loss, positions):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data = torch.randn(8, positions, 6), torch.randint(3, (8,))
        training = loop(model(), data, loss, rows=4)
    assert training.optimizer.steps == 1
    assert not training.optimizer.separation.pending


def test_a_layer_whose_gradients_never_change_costs_no_comparison_of_rows(monkeypatch):
    model, compared = mlp(), []
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    with private(model, 1.0, expected_batch_size=8) as training:
        known = separation._other_rows
        monkeypatch.setattr(separation, "_other_rows", lambda *given: compared.append(given) or known(*given))
        for _ in range(9):
            model(points(8)[0])
        assert training.optimizer.separation.pending
    assert len(compared) == 4


def test_equal_rows_show_nothing_and_the_next_batch_is_checked():
    model = Rearranged(lambda h: h.flip(0), lambda h: h.flip(0))
    with private(model, 1.0, expected_batch_size=4) as training:
        F.cross_entropy(model(torch.ones(4, 6)), torch.zeros(4, dtype=torch.long)).backward()
        training.optimizer.zero_grad()
        assert_raises(UnsupportedCase, "in inner", model, torch.randn(4, 6))


def test_a_model_whose_gradients_do_not_change_is_named_as_unchecked():
    model = mlp()
    nn.init.zeros_(model[0].weight)
    model[0].weight.requires_grad_(False)
    with pytest.warns(UserWarning, match="no row of the input changes any gradient"):
        loop(model, points())


def test_a_model_with_a_generator_of_its_own_is_named_as_unchecked():
    generator = torch.Generator().manual_seed(0)
    model = Rearranged(lambda h: h + torch.randn(h.shape, generator=generator), lambda h: h)
    with pytest.warns(UserWarning, match="two equal passes of the model differ"):
        loop(model, points())


class Averaging(nn.Module):
    """Keeps an average of what it gets, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x)


def test_a_stored_buffer_that_follows_the_examples_is_warned_of():
    (x, y), model = points(8), nn.Sequential(Averaging())
    with private(model, 1.0, expected_batch_size=8):
        with pytest.warns(UserWarning, match=r"the buffer 0\.mean follows the examples") as caught:
            classify(model, x, y).backward()
        assert len(caught) == 1
    assert model[0].calls == 1


def test_a_mixture_that_the_first_batch_does_not_show_is_found_in_the_next():
    """The model returns the mean over the labels that count, as models of transformers do."""
    torch.manual_seed(0)
    x, labels = torch.randn(8, 5, 6), torch.randint(3, (8, 5))
    model = module(
        lambda m, x, labels: F.cross_entropy(m.layer(x).flatten(0, 1), labels.flatten()), layer=nn.Linear(6, 3)
    )
    with private(model, 1.0, expected_batch_size=8) as training, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(x, labels).backward()
        training.step()
        labels[::3, 1:] = -100
        with pytest.raises(UnsupportedCase, match="depends on the other rows"):  # noqa: PT012
            for _ in range(8):  # a random half of the rows may count as much as the other
                model(x, labels).backward()
                training.step()


class Scaling(torch.autograd.Function):
    """Nothing forward; divides gradients by the norm of all rows."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dx):
        return dx / dx.norm()


class Backward(nn.Module):
    """Mixes, or keeps apart, the rows of gradients."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(6, 3)

    def forward(self, x):
        y = self.layer(x)
        if self.kind == "function":
            return Scaling.apply(y)
        if y.requires_grad:
            y.register_hook(
                {"mean": lambda dy: dy - dy.mean(0), "rows": lambda dy: dy / dy.norm(dim=1)[:, None]}[self.kind]
            )
        return y


@pytest.mark.parametrize("kind", ["function", "mean"])
def test_gradients_that_a_hook_or_a_function_mixes_are_refused(kind):
    with pytest.raises(UnsupportedCase, match="depends on the other rows of the batch in layer"):
        loop(Backward(kind), points())


def test_gradients_that_a_hook_changes_row_by_row_pass():
    loop(Backward("rows"), points())


def test_a_result_with_as_many_positions_first_as_rows_passes():
    """As ctc_loss takes them."""

    def both(m, x):
        y = m.layer(x)
        return {"logits": y, "turned": y.transpose(0, 1)}

    x, y, model = torch.randn(24, 8, 6), torch.randint(3, (24, 8)), module(both, layer=nn.Linear(6, 3))
    loop(model, (x, y), lambda model, x, y: F.cross_entropy(model(x)["logits"].flatten(0, 1), y.flatten()))


def test_a_model_that_draws_as_many_random_numbers_as_the_batch_says_passes():
    """They are no state."""

    def drawing(m, x):
        y = m.layer(torch.nn.functional.dropout(x, 0.5))
        torch.rand(1 + int((x[:, 0] > 0).sum()))
        return y

    torch.manual_seed(0)
    loop(module(drawing, layer=nn.Linear(6, 3)), points(), rows=20)


class Remembering(nn.Module):
    """Keeps something of each batch, of which the next ones' results depend."""

    def __init__(self, kind):
        super().__init__()
        self.layer, self.kind = nn.Linear(6, 3), kind
        self.kept = {"attribute": torch.zeros(6), "number": 0.0, "mapping": {"mean": 0.0}, "list": [0.0]}.get(kind)
        self.register_buffer("mean", torch.zeros(6), persistent=kind == "stored")

    def forward(self, x):
        mean = x.detach().mean(0)
        if self.kind in ("stored", "buffer"):
            y = self.layer(x - self.mean)
            self.mean = 0.9 * self.mean + 0.1 * mean
            return y
        if self.kind == "written":
            y = self.layer(x - self.mean)
            self.mean.lerp_(mean, 0.01)
            return y
        if self.kind == "attribute":
            y = self.layer(x - self.kept)
            self.kept.mul_(0.9).add_(mean)
            return y
        if self.kind == "number":
            y, self.kept = self.layer(x - self.kept), float(mean[0])
            return y
        if self.kind in ("mapping", "list"):
            key = "mean" if self.kind == "mapping" else 0
            y = self.layer(x - self.kept[key])
            self.kept[key] = mean
            return y
        if self.kind == "hidden" and self.kept is not None and self.kept.shape == x.shape:
            x = x + 0.1 * self.kept
        if self.kind == "first":
            self.kept = mean if self.kept is None else self.kept
            return self.layer(x - self.kept)
        if self.kind == "cache":
            self.kept = x.detach() if self.kept is None else torch.cat([self.kept, x.detach()])
            return self.layer(x + self.kept.mean(0) / 8)
        self.kept = x.detach()
        return self.layer(x)


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize(
    "kind", ["stored", "buffer", "written", "hidden", "first", "cache", "attribute", "number", "mapping", "list"]
)
@pytest.mark.parametrize("low", [False, True])
def test_a_state_that_follows_the_examples_is_refused(kind, low):
    """A row of 1e3 in one part moved the sum of the next by 12.4 times the bound."""
    torch.manual_seed(0)
    model = nn.Sequential(Remembering(kind))
    with torch.autocast("cpu", torch.bfloat16, enabled=low), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(
            UnsupportedCase, match=r"depends on the .*(batch before.*(0\.(mean|kept)|in no tensor)|other rows)"
        ):
            loop(model, points(), rows=20)
    assert str(model[0].kept) == str(Remembering(kind).kept)
    assert not model[0].mean.any()


def test_an_input_without_tensors_is_named_as_unchecked():
    """The model looks its rows up by names."""
    x, y = points()
    model = module(lambda m, names: m.layer(torch.stack([x[name] for name in names])), layer=nn.Linear(6, 3))
    with private(model, 1.0, expected_batch_size=4), pytest.warns(UserWarning, match="has no tensor with dimensions"):
        F.cross_entropy(model([0, 1, 2, 3]), y[:4]).backward()


class Typed(nn.Module):
    """Reads a parameter's dtype, for which torch.compile describes the parameter and its gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.first(x.to(self.first.weight.dtype)).tanh())


@pytest.mark.slow
def test_a_compiled_model_is_checked_and_trains_in_parts():
    refused, accepted = Rearranged(lambda h: h.flip(0), lambda h: h.flip(0)), Typed()
    with pytest.raises(UnsupportedCase, match="in inner"):
        loop(refused, points(), lambda model, x, y: classify(torch.compile(model, backend="aot_eager"), x, y))
    compiled = torch.compile(accepted, backend="aot_eager")
    training = loop(accepted, points(), lambda _, x, y: classify(compiled, x, y), steps=2)
    assert training.optimizer.steps == 2
    assert not training.optimizer.separation.pending


@pytest.mark.parametrize("rows", [2, 3, 4, 20, 21, 64])
def test_some_pass_replaces_one_row_of_two_and_keeps_the_other(rows):
    masks = torch.stack(_patterns(rows))
    assert masks.shape[1] == rows
    apart = (masks[:, :, None] & ~masks[:, None, :]).any(0)
    assert bool((apart | torch.eye(rows, dtype=torch.bool)).all())
    assert len(masks) <= 8


def test_the_losses_of_a_running_pass_are_found_without_a_cycle():
    """A cycle over the frames would keep the variables of the loop until the garbage collector runs."""
    found = []

    def loop():
        activation = torch.ones(3)
        x = torch.ones(2, requires_grad=True)
        x.register_hook(lambda _: found.extend(separation.running_losses()))
        loss = x.sum()
        loss.backward()
        assert found.pop()[0] is loss
        return weakref.ref(activation)

    gc.disable()
    try:
        assert loop()() is None
    finally:
        gc.enable()
