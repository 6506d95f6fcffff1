"""Opacus as a second opinion: norms, clipped sums, steps without noise, and its accountant."""

import copy
import math

import pytest
import torch
from loops import private, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from accelerant.errors import BudgetExceeded, ConfigError, UnsupportedCase
from accelerant.privacy import dp
from accelerant.privacy.dp.ledger.accounting import PrivacyEvent, rdp_values, release_of, spent
from refusals import assert_raises

opacus = pytest.importorskip("opacus")
accountants = pytest.importorskip("opacus.accountants")
analysis = pytest.importorskip("opacus.accountants.analysis.rdp")
optimizers = pytest.importorskip("opacus.optimizers")
ghosts = pytest.importorskip("opacus.utils.fast_gradient_clipping_utils")

pytestmark = [
    pytest.mark.filterwarnings("ignore:Full backward hook"),
    pytest.mark.filterwarnings("ignore:Optimal order is the"),
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning:opacus"),
]

B, RATE = 12, 0.3
BOUNDS = {"mlp": 2.3, "cnn": 2.3, "words": 0.69}
"""Clipping norms, about the medians of the examples' norms."""


class Words(nn.Module):
    """Embedding, LayerNorm over each position, mean, and a layer without bias."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 6)
        self.norm = nn.LayerNorm(6)
        self.output = nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.output(torch.tanh(self.norm(self.embedding(x))).mean(1))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


def inputs(name):
    generator = torch.Generator().manual_seed(5)
    shapes = {"mlp": (B, 6), "cnn": (B, 2, 8, 8)}
    if name == "words":  # some words several times in a row
        return torch.randint(20, (B, 9), generator=generator)
    return torch.randn(shapes[name], generator=generator)


def problem(name):
    torch.manual_seed(0)
    model = {"mlp": mlp, "cnn": cnn, "words": Words}[name]()
    labels = torch.randint(3, (B,), generator=torch.Generator().manual_seed(6))
    return model, inputs(name), labels, BOUNDS[name]


def by_hooks(model, x, y, bound):
    """Norms and clipped sums of Opacus's GradSampleModule, and the model after a step of plain SGD without noise."""
    wrapped = opacus.GradSampleModule(model)
    optimizer = optimizers.DPOptimizer(
        torch.optim.SGD(model.parameters(), lr=RATE), noise_multiplier=0.0, max_grad_norm=bound, expected_batch_size=B
    )
    F.cross_entropy(wrapped(x), y).backward()
    norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in model.parameters()]).norm(dim=0)
    optimizer.step()
    return norms, [p.summed_grad for p in model.parameters()]


def by_ghosts(model, x, y, bound):
    """Norms and clipped sums of Opacus's ghost clipping."""
    wrapped = opacus.GradSampleModuleFastGradientClipping(model, max_grad_norm=bound, use_ghost_clipping=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    optimizer.loss_reduction = "mean"  # of a private optimizer, which would step
    ghosts.DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss())(wrapped(x), y).backward()
    return wrapped.per_sample_gradient_norms, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("theirs", [by_hooks, by_ghosts])
@pytest.mark.parametrize("name", ["mlp", "cnn", "words"])
def test_norms_and_clipped_sums_are_opacus_ones(name, theirs):
    model, x, y, bound = problem(name)
    norms, sums = theirs(copy.deepcopy(model), x, y, bound)
    clipper = dp.PerExampleClipper(model, max_grad_norm=bound)
    F.cross_entropy(model(x), y).backward()
    torch.testing.assert_close(clipper.norms, norms, rtol=1e-5, atol=1e-6)
    assert 0 < int((norms > bound).sum()) < B
    for param, total in zip(model.parameters(), sums, strict=True):
        torch.testing.assert_close(param.grad, total, rtol=1e-5, atol=5e-6)


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("name", ["mlp", "cnn", "words"])
def test_a_step_without_noise_is_opacus_step(name, microbatch):
    model, x, y, bound = problem(name)
    other = copy.deepcopy(model)
    by_hooks(other, x, y, bound)
    with private(model, 1.0, lr=RATE, max_grad_norm=bound) as training:  # rate 1: every example is in the draw
        train(training, (x, y), 1, microbatch=microbatch)
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_noise_has_opacus_spread():
    """Both divide sigma C by the batch: 4,000 draws, six standard errors of a deviation."""
    spread = []
    for ours in (True, False):
        model = nn.Linear(1999, 2)
        before = [p.detach().clone() for p in model.parameters()]
        x, y = torch.zeros(4, 1999), torch.tensor([0, 1, 0, 1])  # gradients of the weight are zero
        if ours:
            with private(model, 1.0, lr=1.0, noise_multiplier=1.5, max_grad_norm=0.5) as training:
                train(training, (x, y), 1)
        else:
            wrapped = opacus.GradSampleModule(model)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = optimizers.DPOptimizer(inner, noise_multiplier=1.5, max_grad_norm=0.5, expected_batch_size=4)
            F.cross_entropy(wrapped(x), y).backward()
            optimizer.step()
        spread.append(float((model.weight.detach() - before[0]).std()))
    near = 6 / math.sqrt(2 * 3998)
    for found in spread:  # ours has 1/64 more: what rounding to the grid adds to the sensitivity
        assert found == pytest.approx(1.5 * 0.5 / 4, rel=near + 1 / 64)


CASES = [(256 / 60000, 1.1, 14062), (0.01, 2.5, 50), (0.01, 0.8, 1000), (0.2, 4.0, 300), (1.0, 20.0, 40)]


@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_renyi_divergences_are_opacus_ones(rate, noise, steps):
    """At fractional orders dp-accounting adds the sizes of terms of both signs: an upper bound, so never below."""
    whole, between = [2, 3, 5, 8, 16, 32, 63], [1.5, 2.5, 4.5, 9.5]
    event = PrivacyEvent("gaussian", noise, "poisson", rate)
    theirs = analysis.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=whole)
    assert [steps * each for each in rdp_values(release_of(event), tuple(whole))] == pytest.approx(
        list(theirs), rel=1e-6
    )
    theirs = analysis.compute_rdp(q=rate, noise_multiplier=noise, steps=steps, orders=between)
    assert all(
        steps * ours >= other * (1 - 1e-6)
        for ours, other in zip(rdp_values(release_of(event), tuple(between)), theirs, strict=True)
    )


@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_epsilon_at_opacus_orders_is_opacus_epsilon(rate, noise, steps):
    orders = accountants.RDPAccountant.DEFAULT_ALPHAS
    ours = [
        steps * each for each in rdp_values(release_of(PrivacyEvent("gaussian", noise, "poisson", rate)), tuple(orders))
    ]
    found, _ = analysis.get_privacy_spent(orders=orders, rdp=ours, delta=1e-5)
    accountant = accountants.RDPAccountant()
    accountant.history = [(noise, rate, steps)]
    assert found == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("rate", "noise", "steps"), CASES)
def test_epsilon_is_no_larger_than_opacus_and_not_far_below(rate, noise, steps):
    """RDP over more orders is at most theirs; PLD is what their PRV accountant comes to."""
    events = [PrivacyEvent("gaussian", noise, "poisson", rate, steps)]
    theirs = {}
    for name in ("rdp", "prv"):
        accountant = accountants.create_accountant(name)
        accountant.history = [(noise, rate, steps)]
        theirs[name] = accountant.get_epsilon(1e-5)
    assert spent(events, 1e-5, method="rdp").epsilon == pytest.approx(theirs["rdp"], rel=0.02)
    assert spent(events, 1e-5, method="rdp").epsilon <= theirs["rdp"] * 1.001
    pld = spent(events, 1e-5, method="pld").epsilon
    assert pld == pytest.approx(theirs["prv"], abs=0.02)  # whose error is 0.01


# --- PrivacyEngine: a program of Opacus after its import was changed --------------------------------------------------
def loader(batch_size=16, rows=64, **options):
    x, y = torch.randn(rows, 6), torch.arange(rows) % 3
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)


def engine_of(package, **options):
    model = mlp()
    engine = package.PrivacyEngine(accountant="rdp")
    given = {"module": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "max_grad_norm": 1.0}
    return engine, engine.make_private(**{**given, "data_loader": loader(), "noise_multiplier": 1.0, **options})


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:.*delta 1e-05 is not below")
def test_a_program_of_opacus_runs_with_another_import():
    """The loop is the same text; epsilon and the number of steps are as theirs, and each draw is a Poisson draw."""
    found = []
    for package in (opacus, dp):
        engine, (model, optimizer, batches) = engine_of(package)
        sizes = []
        for _ in range(3):
            for x, y in batches:
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                sizes.append(len(x))
        found.append(
            (len(batches), len(sizes), engine.get_epsilon(delta=1e-5), engine.accountant.get_epsilon(delta=1e-5))
        )
    (theirs, ours) = found
    assert ours[:2] == theirs[:2] == (4, 12)
    assert ours[2] == ours[3] == pytest.approx(theirs[2], rel=1e-3)
    assert {(event.mechanism, event.sampling, event.sample_rate) for event in engine.ledger.events} == {
        ("discrete_gaussian", "poisson", 0.25)
    }
    assert len(set(sizes)) > 1


@pytest.mark.filterwarnings("ignore:.*delta 1e-05 is not below")
def test_a_target_ends_the_training(tmp_path):
    model = mlp()
    engine = dp.PrivacyEngine(ledger=tmp_path / "spent.jsonl")
    model, optimizer, batches = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), data_loader=loader(), max_grad_norm=1.0,
        target_epsilon=3.0, target_delta=1e-5, epochs=2,
    )  # fmt: skip

    def epoch():
        for x, y in batches:
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    epoch()
    epoch()
    assert_raises(BudgetExceeded, None, epoch)
    assert optimizer.steps == 8
    assert 2.99 < engine.get_epsilon(1e-5) <= 3.0
    engine.ledger.close()
    assert dp.PrivacyLedger.read(tmp_path / "spent.jsonl").epsilon(1e-5) == engine.get_epsilon(1e-5)


@pytest.mark.filterwarnings("ignore:.*delta 1e-05 is not below")
def test_rows_come_as_the_loader_collates_them():
    """Pairs in a list, tensors alone, and what a collate_fn makes; a draw in parts is one step."""

    def rows(items):
        return {"x": torch.stack([x for x, _ in items]), "y": torch.tensor([y for _, y in items])}

    pairs = [(torch.randn(6), i % 3) for i in range(64)]
    _, (_, _, batches) = engine_of(dp, data_loader=DataLoader(pairs, batch_size=16))
    x, y = next(iter(batches))
    assert (x.shape[1:], y.dtype) == ((6,), torch.int64)
    _, (_, _, batches) = engine_of(dp, data_loader=DataLoader([x for x, _ in pairs], batch_size=16))
    assert next(iter(batches)).shape[1:] == (6,)
    options = {"data_loader": DataLoader(pairs, batch_size=32, collate_fn=rows), "microbatch": 8}
    _, (model, optimizer, batches) = engine_of(dp, **options)
    parts = 0
    for batch in batches:
        assert batch["x"].shape == (8, 6)
        F.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        parts += 1
    assert optimizer.steps == len(batches) == 2 < parts


@pytest.mark.parametrize(("options", "message"), [
    ({"poisson_sampling": False}, "poisson_sampling=False: the accountant's epsilon is that of Poisson sampling"),
    ({"batch_first": False}, "batch_first=False"), ({"noise_generator": torch.Generator()}, "noise_generator="),
    ({"grad_sample_mode": "ghost"}, "grad_sample_mode='ghost': norms are computed"),
    ({"data_loader": loader(sampler=SubsetRandomSampler(range(9)))}, "draws by a SubsetRandomSampler"),
    ({"data_loader": loader(batch_size=1, batch_sampler=[[0, 1]])}, "in a list, and Poisson draws"),
    ({"data_loader": loader(1, batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 3, False))}, "by a Subset"),
    ({"data_loader": loader(sampler=SequentialSampler(range(9)))}, "by a SequentialSampler of 9 rows in"),
    ({"data_loader": loader(sampler=RandomSampler(range(9), num_samples=90))}, "by a RandomSampler of 90 rows"),
    ({"data_loader": [1]}, "data_loader must be a torch DataLoader, got list"),
])  # fmt: skip
def test_what_opacus_takes_and_would_void_the_guarantee_is_refused(options, message):
    assert_raises((ConfigError, UnsupportedCase), message, engine_of, dp, **options)


def test_an_accountant_that_may_underestimate_is_refused():
    assert_raises(ConfigError, "accountant must be one of prv, pld, rdp, got 'gdp'", dp.PrivacyEngine, accountant="gdp")
    with pytest.raises(ConfigError, match="found by privacy loss distributions"):
        dp.PrivacyEngine(accountant="rdp").make_private_with_epsilon(
            module=mlp(), optimizer=None, data_loader=loader(), max_grad_norm=1.0, target_epsilon=1.0,
            target_delta=1e-5, epochs=1,
        )  # fmt: skip
