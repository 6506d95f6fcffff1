"""Losses whose examples change one another's share are refused; the others pass, and one row moves the sum by C."""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from loops import private, tiny_gpt
from torch import nn
from torch.nn import functional as F

from accelerant import ops
from accelerant.errors import ConfigError, UnsupportedCase
from refusals import assert_raises

CLASSES, LENGTH = 5, 6
WEIGHTS = torch.tensor([1.0, 50.0, 1.0, 2.0, 1.0])


class Tagger(nn.Module):
    """Classifies each of a row's positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def rows(count=24, seed=0):
    """Inputs, labels of each position, a mask of the positions that count, and their number."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, LENGTH, 4, generator=generator)
    y = torch.randint(CLASSES, (count, LENGTH), generator=generator)
    lengths = torch.randint(1, LENGTH + 1, (count,), generator=generator)
    return x, y, torch.arange(LENGTH)[None] < lengths[:, None], lengths


def flat(out, y, **options):
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), **options)


def each(out, y):
    return F.cross_entropy(out.transpose(1, 2), y, reduction="none")


def masked(y, mask):
    return torch.where(mask, y, -100)


class Own(torch.autograd.Function):
    """A cross entropy with a gradient of its own; divided by `count`."""

    @staticmethod
    def forward(ctx, out, y, count):
        p = out.softmax(-1)
        ctx.save_for_backward(p, y, torch.as_tensor(count))
        return -p.gather(-1, y[..., None]).log().sum() / count

    @staticmethod
    def backward(ctx, dy):
        p, y, count = ctx.saved_tensors
        return dy * (p - F.one_hot(y, CLASSES)) / count, None, None


def balanced(out, y, mask, n):
    positive = (y == 0).float()
    ratio = (positive == 0).sum() / (positive == 1).sum().clamp(min=1)
    return F.binary_cross_entropy_with_logits(out[..., 0], positive, pos_weight=ratio)


def contrastive(out, y, mask, n):
    z = F.normalize(out.mean(1), dim=1)
    return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))


def written(out, y, mask, n):
    value = each(out, y)
    value[~mask] = 0
    return value.sum() / mask.sum()


def vae(out, y, mask, n):
    return (out[..., 0] - y).square().sum(1).mean() + 0.5 * out[..., 1].square().sum() / len(y)


def looped(out, y, mask, n):
    return sum(each(out[i : i + 1], y[i : i + 1])[0, :k].mean() for i, k in enumerate(n.tolist())) / len(y)


def logged(out, y, mask, n):
    value = flat(out, y)
    assert value.item() > 0
    assert ((out.argmax(-1) == y) & mask).sum().item() >= 0
    return value


def multi(out, y, mask, n):
    first, second = flat(out, y), out.square().mean()
    predicted = out.detach().argmax(-1).numpy()
    shown = [first.item(), float(second), (predicted == y.numpy()).mean(), f"{first:.3f}"]
    shown.append(((out.argmax(-1) == y).float().mean() * 0 + 0.5).item())  # an accuracy that is the factor
    assert all(map(np.isfinite, shown[:3]))
    assert y.min() >= 0
    return first + 0.5 * second


def selected(out, y, mask, n):
    losses = [loss for loss, label in zip(each(out, y).mean(1), y[:, 0], strict=True) if label == 0]
    return torch.stack(losses).mean()


def by_class(make):
    def loss(out, y, mask, n):
        counts = [max(1, int((y == label).sum())) for label in range(CLASSES)]
        return flat(out, y, weight=make([y.numel() / count for count in counts]), reduction="none").mean()

    return loss


HOSTED = {
    "a count by NumPy": lambda out, y, mask, n: (each(out, y) * mask).sum() / int(mask.numpy().sum()),
    "a count by asarray": lambda out, y, mask, n: (each(out, y) * mask).sum() / np.asarray(n).sum(),
    "a count by Python": lambda out, y, mask, n: (each(out, y) * mask).sum() / sum(map(sum, mask.tolist())),
    "counts added up": lambda out, y, mask, n: (each(out, y) * mask).sum() / sum(int(row.sum()) for row in mask),
    "a count and 1": lambda out, y, mask, n: (each(out, y) * mask).sum() / (mask.sum().item() + 1),
    "a count as alpha": lambda out, y, mask, n: torch.add(
        torch.zeros(()), (each(out, y) * mask).sum(), alpha=1 / int(mask.numpy().sum())
    ),
    "a count as a size": lambda out, y, mask, n: (
        (each(out, y) * mask).sum() / torch.ones(int(mask.numpy().sum())).sum()
    ),
    "a count that fills": lambda out, y, mask, n: (
        (each(out, y) * mask).sum() / torch.full((), float(mask.numpy().sum()))
    ),
    "a ratio of lengths": lambda out, y, mask, n: flat(out, y) * (len(y[y == 0]) / len(y[y == 1])),
    "weights of classes": by_class(torch.tensor),
    "weights of classes, old": by_class(torch.Tensor),
    "weights of classes by NumPy": by_class(lambda weights: torch.from_numpy(np.float32(weights))),
    "the worst by NumPy": lambda out, y, mask, n: (
        each(out, y).mean(1)[np.argsort(-each(out, y).mean(1).detach().numpy())[:5]].mean()
    ),
    "rows of a list": lambda out, y, mask, n: each(out, y)[[i for i in range(len(y)) if n[i] > 3]].mean(),
    "rows that Python selects": selected,
    "a softmax by NumPy": lambda out, y, mask, n: (
        each(out, y).mean(1) * torch.from_numpy(np.exp(each(out, y).mean(1).detach().numpy()))
    ).sum(),
    "a loss and 3": lambda out, y, mask, n: each(out, y).sum() / (each(out, y).sum().item() + 3),
}  # fmt: skip


MIXING = {
    "class weights": lambda out, y, mask, n: flat(out, y, weight=WEIGHTS),
    "class weights of nll_loss": lambda out, y, mask, n: F.nll_loss(
        out.log_softmax(-1).flatten(0, 1), y.flatten(), weight=WEIGHTS
    ),
    "class weights and smoothing": lambda out, y, mask, n: flat(out, y, weight=WEIGHTS, label_smoothing=0.1),
    "ignored": lambda out, y, mask, n: flat(out, masked(y, mask)),
    "ignored and smoothing": lambda out, y, mask, n: flat(out, masked(y, mask), label_smoothing=0.1),
    "ignored by our op": lambda out, y, mask, n: ops.cross_entropy(out, masked(y, mask)),
    "masked": lambda out, y, mask, n: (each(out, y) * mask).sum() / mask.sum(),
    "masked by index": lambda out, y, mask, n: each(out, y)[mask].mean(),
    "rows by index": lambda out, y, mask, n: F.cross_entropy(out[mask], y[mask]),
    "over len": lambda out, y, mask, n: F.cross_entropy(out[mask], y[mask], reduction="sum") / len(y[mask]),
    "over shape": lambda out, y, mask, n: F.cross_entropy(out[mask], y[mask], reduction="sum") / y[mask].shape[0],
    "over numel": lambda out, y, mask, n: F.cross_entropy(out[mask], y[mask], reduction="sum") / y[mask].numel(),
    "over item": lambda out, y, mask, n: (each(out, y) * mask).sum() / max(mask.sum().item(), 1),
    "times inverse": lambda out, y, mask, n: (each(out, y) * mask).sum() * (1 / int(mask.sum())),
    "over a list's sum": lambda out, y, mask, n: (each(out, y) * mask).sum() / sum(n.tolist()),
    "clipped at the median": lambda out, y, mask, n: each(out, y).clamp(max=each(out, y).median().item()).mean(),
    "over a new tensor": lambda out, y, mask, n: (each(out, y) * mask).sum() / torch.tensor(int(mask.sum())),
    "own log_softmax": lambda out, y, mask, n: (
        -(out.log_softmax(-1).gather(-1, y[..., None])[..., 0] * mask).sum() / mask.float().sum().clamp(min=1)
    ),
    "own function": lambda out, y, mask, n: Own.apply(out, y, mask.sum()),
    "weights over their sum": lambda out, y, mask, n: (each(out, y) * WEIGHTS[y]).sum() / WEIGHTS[y].sum(),
    "shares of the batch": lambda out, y, mask, n: (each(out, y).mean(1) * (n / n.sum())).sum(),
    "softmax over rows": lambda out, y, mask, n: (each(out, y).mean(1) * n.float().softmax(0)).sum(),
    "balanced pos_weight": balanced,
    "contrastive": contrastive,
    "written in place": written,
    "centered": lambda out, y, mask, n: (out - out.mean(0)).square().mean(),
    "targets over their spread": lambda out, y, mask, n: (
        ((out.mean((1, 2)) - n) / n.float().std()).square().mean()
    ),
    "the worst row": lambda out, y, mask, n: each(out, y).mean(1).max(),
    "over itself": lambda out, y, mask, n: flat(out, y) / flat(out, y).detach(),
    "sorted": lambda out, y, mask, n: F.mse_loss(out.mean((1, 2)).sort()[0], n.float().sort()[0]),
    "ctc over all lengths": lambda out, y, mask, n: (
        F.ctc_loss(out.log_softmax(-1).transpose(0, 1), y.clamp(min=1), torch.full((len(y),), LENGTH), (n + 1) // 2,
                   reduction="sum") / n.sum()
    ),
}  # fmt: skip

APART = {
    "cross entropy": lambda out, y, mask, n: flat(out, y),
    "of positions in dimension 2": lambda out, y, mask, n: F.cross_entropy(out.transpose(1, 2), y),
    "of the last position": lambda out, y, mask, n: F.cross_entropy(out[:, -1], y[:, -1]),
    "of each row's last": lambda out, y, mask, n: F.cross_entropy(
        out[torch.arange(len(n)), n - 1], y[torch.arange(len(n)), n - 1]
    ),
    "smoothing": lambda out, y, mask, n: flat(out, y, label_smoothing=0.1),
    "equal class weights": lambda out, y, mask, n: flat(out, y, weight=torch.full((CLASSES,), 2.0)),
    "class weights, mean of all": lambda out, y, mask, n: flat(out, y, weight=WEIGHTS, reduction="none").mean(),
    "as many ignored in each row": lambda out, y, mask, n: flat(out, masked(y, torch.arange(LENGTH)[None] > 1)),
    "mean of each row's own": lambda out, y, mask, n: ((each(out, y) * mask).sum(1) / mask.sum(1)).mean(),
    "masked over rows": lambda out, y, mask, n: (each(out, y) * mask).sum() / len(y),
    "masked over all": lambda out, y, mask, n: (each(out, y) * mask).mean(),
    "masked in place": lambda out, y, mask, n: each(out, y).mul_(mask).mean(),
    "weights of rows": lambda out, y, mask, n: (each(out, y).mean(1) * n).mean(),
    "binary": lambda out, y, mask, n: F.binary_cross_entropy_with_logits(out[..., 0], (y == 0).float()),
    "fixed pos_weight": lambda out, y, mask, n: F.binary_cross_entropy_with_logits(
        out, F.one_hot(y, CLASSES).float(), pos_weight=WEIGHTS
    ),
    "squares": lambda out, y, mask, n: F.mse_loss(out[..., 0], y.float()),
    "our squares": lambda out, y, mask, n: ops.mse_loss(out[..., 0], y.float()),
    "our cross entropy": lambda out, y, mask, n: ops.cross_entropy(out, y),
    "smooth l1": lambda out, y, mask, n: F.smooth_l1_loss(out.mean((1, 2)), n.float()),
    "batchmean": lambda out, y, mask, n: F.kl_div(
        out.log_softmax(-1), F.one_hot(y, CLASSES).float(), reduction="batchmean"
    ),
    "ctc": lambda out, y, mask, n: F.ctc_loss(
        out.log_softmax(-1).transpose(0, 1), y.clamp(min=1), torch.full((len(y),), LENGTH), (n + 1) // 2
    ),
    "gaussian": lambda out, y, mask, n: F.gaussian_nll_loss(out[..., 0], y.float(), out[..., 1].exp()),
    "poisson": lambda out, y, mask, n: F.poisson_nll_loss(out[..., 0], y.float()),
    "margin": lambda out, y, mask, n: F.multi_margin_loss(out[:, 0], y[:, 0]),
    "cosine": lambda out, y, mask, n: F.cosine_embedding_loss(out[:, 0], out[:, 1], (n > 3) * 2 - 1),
    "two terms": vae,
    "temperature": lambda out, y, mask, n: flat(out / torch.tensor(2.0), y) / torch.tensor(4.0),
    "focal": lambda out, y, mask, n: ((1 - (-each(out, y)).exp()) ** 2 * each(out, y)).mean(),
    "row by row": looped,
    "logged": logged,
    "losses and accuracies are shown first": multi,
    "own function": lambda out, y, mask, n: Own.apply(out, y, y.numel()),
    "noise": lambda out, y, mask, n: flat(out + 0.1 * torch.randn_like(out), y),
    "dropout": lambda out, y, mask, n: flat(F.dropout(out, 0.5), y),
}  # fmt: skip


def total(loss, count, *, drawn=True, microbatch=None, bound=0.2, seed=0):
    """The sum of clipped gradients of so many rows, over the bound."""
    model, data = Tagger(), rows(24, seed)
    data = tuple(column[:count] for column in data)
    with private(model, 1.0, lr=0.0, max_grad_norm=bound, expected_batch_size=1.0) as training:
        batches = training.batches(data, steps=1, microbatch=microbatch) if drawn else [None]
        for batch in batches:
            x, *others = data if batch is None else batch.tensors
            loss(model(x), *others).backward()
            training.optimizer.step()
        return torch.cat([p.grad.flatten() for p in model.parameters()]) / bound


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("places", [[7], [6, 7], list(range(23))])
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("loss", [
    lambda out, y: F.cross_entropy(out, y) + 0.01 * out.norm(),
    lambda out, y: F.cross_entropy(out / out.abs().max().detach(), y),
    lambda out, y: F.cross_entropy(out, y, reduction="none").logsumexp(0) / len(y),
    lambda out, y: (lambda losses: (losses * losses.detach().mean()).mean())(F.cross_entropy(out, y, reduction="none")),
])  # fmt: skip
def test_rows_that_are_not_finite_hide_no_mixture(loss, value, places):
    """With one, no row has a finite gradient, and the step would release nothing of any; without it, all of them."""
    x, y, *_ = rows()
    x[places] = value
    with private(Tagger(), 1.0) as training:
        (batch,) = training.batches((x[:, 0], y[:, 0]), steps=1)
        value = loss(training.model(batch.tensors[0]), batch.tensors[1])
        assert_raises(UnsupportedCase, "the loss mixes the examples of a batch", value.backward)


def test_rows_that_are_not_finite_leave_a_loss_that_keeps_examples_apart():
    x, y, *_ = rows()
    x[3], x[8] = math.nan, math.inf
    model = Tagger()
    with private(model, 1.0, lr=0.0) as training, warnings.catch_warnings():
        warnings.simplefilter("error")
        for batch in training.batches((x[:, 0], y[:, 0]), steps=1):
            F.cross_entropy(model(batch.tensors[0]), batch.tensors[1]).backward()
            assert int(training.clipper.nonfinite) == 2
            training.optimizer.step()


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("loss", MIXING.values(), ids=MIXING)
def test_a_loss_that_mixes_examples_is_refused(loss, drawn):
    with pytest.raises(
        UnsupportedCase, match=r"mixes the examples|divides by the sum of its labels|have different num"
    ):
        total(loss, 24, drawn=drawn)
    assert not torch._C._len_torch_function_stack()


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("loss", APART.values(), ids=APART)
def test_a_loss_that_keeps_examples_apart_passes_and_a_row_moves_the_sum_by_the_bound(loss, drawn):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*loss.*")
        torch.manual_seed(1)
        with_last = total(loss, 24, drawn=drawn)
        torch.manual_seed(1)
        moved = float((with_last - total(loss, 23, drawn=drawn)).norm())
    random = loss in (APART["noise"], APART["dropout"])  # other numbers of rows, other draws
    assert random or moved <= 1 + 1e-5
    assert not torch._C._len_torch_function_stack()


@pytest.mark.parametrize("loss", HOSTED.values(), ids=HOSTED)
def test_numbers_that_the_host_made_of_the_batch_are_named_as_unchecked(loss):
    with pytest.warns(UserWarning, match="whether the loss treats each example by itself: Python or NumPy read values"):
        total(loss, 24)


@pytest.mark.parametrize("before", [
    lambda x: x - x.mean(0), lambda x: x / x.abs().max(), lambda x: 0.7 * x + 0.3 * x[torch.randperm(len(x))],
    lambda x: x.clone().sub_(x.mean(0)), lambda x: (x - x.mean(0)).tanh() + 1,
])  # fmt: skip
def test_rows_that_are_mixed_before_the_model_are_refused(before):
    assert_raises(UnsupportedCase, r"mixed before the model.* combine no rows$", prepared, before)


def test_what_the_host_made_of_a_batch_for_the_model_is_named_as_unchecked():
    with pytest.warns(UserWarning, match="given what Python or NumPy may have made"):
        prepared(lambda x: torch.from_numpy(x.numpy() - x.numpy().mean(0)))


@pytest.mark.parametrize("before", [
    lambda x: (x - 0.1) / 0.3, lambda x: x - x.mean(2, keepdim=True), lambda x: x.clone().mul_(2),
    lambda x: x.double().float(),
    lambda x: x + 0.1 * torch.randn_like(x), lambda x: F.dropout(x, 0.1), lambda x: x[:, : LENGTH - 1],
    lambda x: torch.where(torch.rand(len(x), 1, 1) < 0.5, x.flip(1), x),
])  # fmt: skip
def test_rows_that_are_prepared_by_themselves_pass(before):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(loss|apart).*")
        prepared(before)


def prepared(before):
    model = Tagger()
    with private(model, 1.0, expected_batch_size=24) as training:
        for batch in training.batches(rows()[:2], steps=1):
            x, y = batch.tensors
            F.cross_entropy(model(before(x))[:, 0], y[:, 0]).backward()
            training.optimizer.step()


def weighted(out, y, gradient, *, engine):
    """Call backward with a gradient, of each row's loss."""
    losses = each(out, y).mean(1)
    if engine:
        torch.autograd.backward([losses], [gradient])
    else:
        losses.backward(gradient)


@pytest.mark.parametrize("engine", [False, True])
def test_the_gradient_that_backward_is_given_is_part_of_the_loss(engine):
    x, y, _, n = rows()
    for gradient, mixes in (
        (lambda n: torch.full((24,), 1 / 24), False),
        (lambda n: n / 72.0, False),
        (lambda n: n / n.sum(), True),
    ):
        model = Tagger()
        with private(model, 1.0, expected_batch_size=24) as training:
            for batch in training.batches((x, y, n), steps=1):
                out, share = model(batch.tensors[0]), gradient(batch.tensors[2])
                if mixes:
                    with pytest.raises(UnsupportedCase, match="mixes the examples"):
                        weighted(out, batch.tensors[1], share, engine=engine)
                    break
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=".*loss.*")
                    weighted(out, batch.tensors[1], share, engine=engine)
                training.optimizer.step()


def test_a_hook_in_the_loss_is_named_as_unchecked():
    x, y, _, _ = rows()
    model = Tagger()
    with private(model, 1.0, expected_batch_size=24):
        out = model(x)
        out.register_hook(lambda gradient: gradient / gradient.norm())
        value = flat(out, y)
        with pytest.warns(UserWarning, match="a hook may change its gradients"):
            value.backward()


@pytest.mark.parametrize("name", ["class weights", "masked", "over item"])
def test_a_loss_that_mixes_examples_is_refused_in_padded_parts(name):
    assert_raises(UnsupportedCase, None, total, MIXING[name], 24, microbatch=7)


@pytest.mark.parametrize("weight", [5.0, 20.0, 1000.0])
def test_class_weights_name_the_remedy(weight):
    """One row moved the sum by 3.4, 11.7 and 31.4 times the bound."""
    loss = nn.CrossEntropyLoss(weight=torch.tensor([weight, 1.0]))
    x, y = torch.randn(33, 4), torch.ones(33, dtype=torch.long)
    y[32] = 0
    model = nn.Linear(4, 2)
    with private(model, 1.0, expected_batch_size=1) as training:
        (batch,) = [training.use(each) or each for each in training._draws((x, y), steps=1)]
        value = loss(model(batch.tensors[0]), batch.tensors[1])
        with pytest.raises(UnsupportedCase, match=r"weight= of cross_entropy.*reduction='none'.*loss_reduction='sum'"):
            value.backward()


def test_a_mean_times_its_divisor_is_a_sum():
    """So `accelerant train --private` sums, with padded rows ignored."""
    x, y, mask, _ = rows()
    for loss in (
        lambda out: flat(out, masked(y, mask)) * mask.sum(),
        lambda out: flat(out, y, weight=WEIGHTS) * WEIGHTS[y].sum(),
    ):
        model = Tagger()
        with private(model, 1.0, expected_batch_size=24, loss_reduction="sum") as training:
            loss(model(x)).backward()
            assert training.optimizer.tracker.passes == 1


@pytest.mark.parametrize(("given", "shown", "loss"), [
    ("mean", "neither mean nor sum", lambda out, y: flat(out, y) + 0.5 * out.pow(2).sum()),
    ("mean", "neither mean nor sum", lambda out, y: each(out, y).mean(1).cumsum(0).mean()),
    ("mean", "a sum", lambda out, y: flat(out, y, reduction="sum") / 64),
    ("mean", "a sum", lambda out, y: torch.dot(out[:, 0, 0] - y[:, 0], out[:, 0, 0] - y[:, 0])),
    ("sum", "a mean", lambda out, y: 64 * flat(out, y)),
    ("sum", "neither mean nor sum", lambda out, y: flat(out, y) + 0.5 * out.pow(2).sum()),
])  # fmt: skip
def test_a_term_that_is_not_reduced_as_was_said_is_refused(given, shown, loss):
    """A row that is removed changes the factors of all others: the sum moves by up to twice the bound."""
    x, y, *_ = rows()
    with private(Tagger(), 1.0, expected_batch_size=24, loss_reduction=given) as training:
        value = loss(training.model(x), y)
        with pytest.raises(ConfigError, match=f"the loss is no {given} over the rows.* show {shown}|is a mean over"):
            value.backward()


@pytest.mark.parametrize(("count", "loss"), [
    (23, lambda out, y: flat(out.bfloat16(), y)),
    (23, lambda out, y: (out.half() - 1).square().mean()),
    (5, lambda out, y: flat(out, y, reduction="sum") / out.shape[0]),  # as many rows as classes
    (6, lambda out, y: each(out, y).sum() / out.size(0)),
    (24, lambda out, y: torch.stack([flat(out[i : i + 1], y[i : i + 1]) for i in range(24)]).mean()),
])  # fmt: skip
@pytest.mark.parametrize("given", ["mean", "sum"])
def test_reductions_in_low_precision_and_by_ambiguous_numbers_pass(given, count, loss):
    x, y, *_ = rows(count)
    with private(Tagger(), 1.0, expected_batch_size=24, loss_reduction=given) as training:
        value = loss(training.model(x), y)
        (value if given == "mean" else value * count).backward()
        assert training.optimizer.tracker.passes == 1


def test_a_factor_that_may_be_the_number_of_rows_is_judged_by_batches_of_other_sizes():
    factor, scaled = (
        8,
        {"a constant": lambda out, y: flat(out, y) / factor, "rows": lambda out, y: flat(out, y) / len(y)},
    )
    for name, loss in scaled.items():
        with private(Tagger(), 1.0, expected_batch_size=8, loss_reduction="mean") as training:
            for count in (8, 8, 9):
                x, y, *_ = rows(count)
                value = loss(training.model(x), y) + 0 * len(x)
                if (name, count) == ("rows", 9):
                    assert_raises(ConfigError, "neither mean nor sum", value.backward)
                else:
                    value.backward()
                training.optimizer.zero_grad()


def batches_of(loss, sizes, **options):
    """Run a loss over batches of these sizes; return the warnings about it."""
    x, y, *_ = rows(64)
    with (
        private(Tagger(), 1.0, expected_batch_size=8, **options) as training,
        warnings.catch_warnings(record=True) as found,
    ):
        warnings.simplefilter("always")
        for step, size in enumerate(sizes):
            chosen = torch.randperm(64, generator=torch.Generator().manual_seed(step))[:size]
            loss(training.model(x[chosen]), y[chosen], step).backward()
            training.optimizer.zero_grad()
    return [str(each.message) for each in found if "the loss" in str(each.message)]


@pytest.mark.parametrize(("loss", "options"), [
    (lambda out, y, step: flat(out, y, reduction="sum") / len(y) ** 2 / 6, {}),
    (lambda out, y, step: flat(out, y) * (2 if y[:, 0].double().mean() > 2 else 1), {}),
    (lambda out, y, step: 3 * value if (value := flat(out, y)) > 1.7 else value, {}),
    (lambda out, y, step: flat(out, y) if out[:, 0, 0].max() > 0.8 else flat(out, y).square(), {}),
    (lambda out, y, step: sum(flat(out[i : i + 1], y[i : i + 1]) for i in range(len(y))), {}),
    (lambda out, y, step: sum(F.cross_entropy(a, b) for a, b in zip(out, y, strict=True)), {}),
    (lambda out, y, step: sum(flat(out[i : i + 1], y[i : i + 1]) for i in range(len(y))) / len(y),
     {"loss_reduction": "sum"}),
])  # fmt: skip
def test_a_loss_that_follows_the_rows_or_their_number_is_refused(loss, options):
    with pytest.raises((UnsupportedCase, ConfigError), match=r"have other gradients|mixes|show a|neither"):
        batches_of(loss, [8, 5, 9, 2, 6, 7, 3, 12, 8], **options)


@pytest.mark.parametrize("loss", [
    lambda out, y, step: 3 * value if (value := flat(out, y)).item() > 1.7 else value,
    lambda out, y, step: flat(out, y) * math.sqrt(len(y)),
])  # fmt: skip
def test_numbers_that_may_follow_the_rows_are_warned_of(loss):
    assert "may follow sizes or values" in batches_of(loss, [8, 5, 9, 2, 6, 7, 3, 12, 8])[0]


@pytest.mark.parametrize("loss", [
    lambda out, y, step: sum(flat(out[i : i + 1], y[i : i + 1]) for i in range(len(y))) / len(y),
    lambda out, y, step: torch.stack([F.cross_entropy(a, b) for a, b in zip(out, y, strict=True)]).mean(),
    lambda out, y, step: flat(out, y) + 0 * step if bool(out.isfinite().all()) else 0 * out.sum(),
    lambda out, y, step: flat(out, y) + torch.tensor(1.0 + step) * out.square().mean(),
])  # fmt: skip
def test_batches_of_other_sizes_show_no_fault_where_there_is_none(loss):
    assert not batches_of(loss, [8, 5, 9, 2, 6, 7, 3, 12, 16])


@pytest.mark.parametrize("loss", [
    lambda out, y, step: flat(out, y) * (1 + step / 7),
    lambda out, y, step: flat(out, y, label_smoothing=0.05 * step),
    lambda out, y, step: F.huber_loss(out, torch.ones_like(out), delta=1.0 / (1 + step)),
    lambda out, y, step: F.softplus(out, beta=1 + step).mean(),
    lambda out, y, step: out[..., step % 3].square().mean(),
    lambda out, y, step: out.narrow(-1, step % 2, 1).square().mean(),
])  # fmt: skip
def test_a_schedule_is_no_fault(loss):
    assert not batches_of(loss, [8] * 9)


def test_gradients_that_are_rounding_alone_show_no_reduction():
    x, *_ = rows()
    with private(Tagger(), 1.0, expected_batch_size=24) as training, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*loss.*")
        out = training.model(x)
        F.kl_div(out.log_softmax(-1), out.detach().softmax(-1), reduction="batchmean").backward()


def test_class_weights_are_refused_before_a_batch_shows_them():
    """All labels of the first batches may be of the class that is not rare."""
    x, y, _, _ = rows()
    model = Tagger()
    with private(model, 1.0, expected_batch_size=24):
        value = flat(model(x), torch.zeros_like(y), weight=WEIGHTS)
        assert_raises(UnsupportedCase, "weight= of cross_entropy", value.backward)


@pytest.mark.parametrize("padded", [False, True])
def test_labels_that_a_model_ignores_itself_are_refused(padded):
    model, tokens = tiny_gpt(), torch.randint(11, (6, 9))
    targets = tokens[:, 1:].clone()
    targets[2:, :5] = -100
    with private(model, 1.0, expected_batch_size=6, loss_reduction="sum" if padded else "mean"):
        if padded:
            (model.loss(tokens[:, :-1], targets) * (targets != -100).sum()).backward()
        else:
            with pytest.raises(UnsupportedCase, match="have different numbers of them"):
                model.loss(tokens[:, :-1], targets)


@pytest.mark.parametrize("rows", [0, 1])
def test_a_model_may_ignore_labels_of_a_batch_of_one_row_or_none(rows):
    model, tokens = tiny_gpt(), torch.randint(11, (rows, 9))
    targets = tokens[:, 1:].clone()
    targets[:, :5] = -100
    with private(model, 1.0, expected_batch_size=6) as training:
        model.loss(tokens[:, :-1], targets).backward()
        training.step()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_a_count_that_begins_to_differ_is_found_in_the_first_steps():
    x, y, _, _ = rows()
    counts = torch.ones(24, LENGTH)
    model = Tagger()
    with private(model, 1.0, expected_batch_size=24) as training:
        for step in range(3):
            if step == 2:
                counts[3, 1:] = 0
            value = (each(model(x), y) * counts).sum() / counts.sum()
            if step < 2:
                value.backward()
                training.step()
        assert_raises(UnsupportedCase, "mixes the examples", value.backward)
        assert training.optimizer.steps == 2


def test_the_mode_of_a_device_ends_as_it_began():
    x, y, _, _ = rows()
    model = Tagger()
    with private(model, 1.0, expected_batch_size=24) as training:
        with torch.device("cpu"):
            out = model(x)
        flat(out, y).backward()
        training.step()
    assert not torch._C._len_torch_function_stack()


@pytest.mark.parametrize(("factor", "repeatable"), [(1 + 5e-5, True), (1 + 5e-4, False), (math.nan, False)])
def test_a_loss_that_cannot_be_repeated_is_named_as_unchecked(factor, repeatable):
    """Rounding may differ by 1e-4 of a loss in float32, as by sums in another order."""
    x, y, _, _ = rows()
    model, factors = Tagger(), itertools.chain([1.0], itertools.repeat(factor))

    def changing(value):
        return value.detach().clone().apply_(lambda number: number * next(factors))

    with private(model, 1.0, expected_batch_size=24), warnings.catch_warnings(record=True) as caught:
        (flat(model(x), y) + changing(torch.tensor(100.0))).backward()
    assert repeatable == (not any("whether the loss treats each" in str(each.message) for each in caught))
