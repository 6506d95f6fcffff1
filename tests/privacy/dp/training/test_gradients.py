"""Privatizer: clip, sum on the grid, noise, divide."""

import itertools
import math

import numpy as np
import pytest
import torch
from loops import classify, mlp, parameters, points, private, train

from accelerant.errors import BudgetExceeded, ConfigError, ShapeError, UnsupportedDtype
from accelerant.privacy import dp
from accelerant.privacy.dp.noise import SecureSource
from accelerant.privacy.dp.noise.mechanisms import NoisySum
from refusals import assert_raises


def make(**changes):
    return dp.Privatizer(**{"noise_multiplier": 0.0, "max_grad_norm": 1.0, "expected_batch_size": 4.0, **changes})


def gradients(count=7, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-2, 2, count)[:, None]
    return {
        "weight": (torch.randn(count, 3, 2, generator=generator) * scale[:, :, None]).to(dtype),
        "bias": (torch.randn(count, 2, generator=generator) * scale).to(dtype),
    }


def clipped(named, bounds):
    """Sums in float64 of gradients clipped together (one bound) or by tensor."""
    wide = {name: each.double().flatten(1) for name, each in named.items()}
    norms = {name: each.norm(dim=1) for name, each in wide.items()}
    if not isinstance(bounds, dict):
        together = torch.stack([each**2 for each in norms.values()]).sum(0).sqrt()
        norms, bounds = dict.fromkeys(norms, together), dict.fromkeys(norms, bounds)
    factors = {name: torch.minimum(torch.ones_like(norms[name]), bounds[name] / norms[name]) for name in named}
    return {n: (wide[n] * factors[n][:, None]).sum(0).reshape(named[n].shape[1:]) for n in named}


@pytest.mark.parametrize("bounds", [0.7, {"weight": 0.4, "bias": 3.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_without_noise_it_is_the_clipped_mean(bounds, dtype):
    named = gradients(dtype=dtype)
    privatizer = make(max_grad_norm=bounds)
    means = privatizer(named)
    for name, total in clipped(named, bounds).items():
        torch.testing.assert_close(means[name], (total / 4).to(dtype))
    assert 0 < privatizer.clipped < 1
    wanted = 0.7 if isinstance(bounds, float) else math.hypot(0.4, 3.0)
    assert privatizer.sensitivity == pytest.approx(wanted)


@pytest.mark.usefixtures("fixed_entropy")
def test_a_tensor_alone_and_an_empty_batch():
    named = gradients()["bias"]
    assert make()(named).shape == (2,)
    assert torch.equal(make()(named[:0]), torch.zeros(2))
    noisy = make(noise_multiplier=1.0)(torch.zeros(0, 1000))
    assert float(noisy.std()) * 4 == pytest.approx(1.0, rel=0.12)  # 5 deviations of an estimated deviation


def test_a_parameter_may_be_a_scalar():
    mean = make(max_grad_norm=5.0)({"scale": torch.tensor([1.0, 2.0, 3.0, 6.0]), "weight": torch.zeros(4, 3)})
    assert mean["scale"] == torch.tensor((1.0 + 2.0 + 3.0 + 5.0) / 4)


def test_what_comes_out_is_on_the_grid_of_the_noise():
    """Nothing of the floating-point sum is left in the low bits."""
    privatizer = make(noise_multiplier=1.0, expected_batch_size=1.0)
    found = privatizer(gradients(dtype=torch.float64)["bias"])
    release = privatizer.ledger.events[0]
    assert release.mechanism == "discrete_gaussian"
    assert not release.idealised
    steps = found / 2.0**-20  # far finer than any grid that two dimensions get
    assert torch.equal(steps, steps.round())


@pytest.mark.usefixtures("fixed_entropy")
def test_the_noise_is_that_of_the_multiplier():
    privatizer = make(noise_multiplier=3.0, max_grad_norm=2.0, expected_batch_size=1.0)
    found = torch.cat([privatizer(torch.zeros(1, 500)) for _ in range(4)])
    assert float(found.std()) == pytest.approx(6.0 * (1 + 1 / 64), rel=0.085)  # 5 deviations of 2,000 draws' deviation


def test_gradients_that_are_not_finite_count_as_nothing():
    named = gradients()
    named["weight"][2, 0, 0] = float("nan")
    named["bias"][4, 1] = float("inf")
    privatizer = make()
    means = privatizer(named)
    keep = [0, 1, 3, 5, 6]
    wanted = clipped({name: each[keep] for name, each in named.items()}, 1.0)
    for name, total in wanted.items():
        torch.testing.assert_close(means[name], (total / 4).float())
    assert privatizer.dropped == 2


def test_events_and_the_budget():
    ledger = dp.PrivacyLedger(budget=dp.Budget(epsilon=1.5, delta=1e-5, method="rdp"))
    privatizer = make(noise_multiplier=4.0, sampling="poisson", sample_rate=0.5, ledger=ledger)
    assert_raises(BudgetExceeded, None, lambda: [privatizer(gradients()) for _ in range(200)])
    (event,) = ledger.events
    assert (event.noise_multiplier, event.sampling, event.sample_rate) == (4.0, "poisson", 0.5)
    assert ledger.epsilon(1e-5) <= 1.5
    fast = make(noise_multiplier=1.0, insecure=True)
    fast(gradients())
    assert fast.ledger.events[0].secure is False
    assert fast.ledger.events[0].idealised


@pytest.mark.parametrize("bound", [1e-100, 1e100])
def test_the_least_and_the_largest_norm_are_clipped_to(bound):
    privatizer = make(max_grad_norm=bound)
    found = privatizer(torch.full((4, 1), 1e3 * bound, dtype=torch.float64))
    assert (float(found), privatizer.clipped) == (pytest.approx(bound, rel=1e-12), 1.0)


def test_noise_that_rounds_to_none_is_refused():
    """Else the ledger would count a release of the bare sum as one with noise."""
    with pytest.raises(ConfigError, match="noise of 1e-05 times the sensitivity 5e-324 leaves"):
        NoisySum(SecureSource(), 1e-5, 1).plan(5e-324)
    for bound in (1e-60, 1e60):
        with pytest.raises(ConfigError, match=r"from 2\^-120 to 2\^120"):
            make(noise_multiplier=1.0, max_grad_norm=bound, insecure=True)(torch.ones(1, 4, dtype=torch.float64))


def test_tensors_are_checked():
    assert_raises(ShapeError, "as many in each", lambda: make()({"a": torch.zeros(2, 3), "b": torch.zeros(3, 3)}))
    assert_raises(ShapeError, "examples", lambda: make()(torch.zeros(())))
    assert_raises(UnsupportedDtype, "int64", lambda: make()(torch.zeros(2, 2, dtype=torch.int64)))
    assert_raises(ConfigError, "max_grad_norm names", lambda: make(max_grad_norm={"a": 1.0})({"b": torch.zeros(2, 2)}))
    assert_raises(ConfigError, "name no tensor", lambda: make()({}))


@pytest.mark.parametrize(("gradients", "message"), [
    (None, "torch tensors or NumPy arrays, they got NoneType"),
    ([0.5, 1.0], "torch tensors or NumPy arrays, 0 got float"),
    ({"weight": np.zeros((3, 2), int)}, "floating point of at most 64 bits, weight got int64"),
    (np.zeros((3, 2), object), "they got object"),
    (np.ma.masked_array(np.zeros((3, 2))), "masked array"),
], ids=["none", "numbers", "whole", "objects", "masked"])  # fmt: skip
def test_gradients_are_tensors_or_arrays(gradients, message):
    privatizer = dp.Privatizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=3)
    for call in (privatizer, lambda given: privatizer.release_sum(given, sensitivity=1.0)):
        assert_raises(UnsupportedDtype, message, call, gradients)
    assert not privatizer.ledger.events


def test_arrays_and_lists_come_back_as_they_were_given():
    named = gradients()
    wanted = make()(named)
    for dtype in (np.float16, np.dtype(">f4"), np.float64):
        means = make()({name: each.numpy().astype(dtype) for name, each in named.items()})
        assert all(isinstance(each, np.ndarray) for each in means.values())
        assert means["bias"].dtype == np.dtype(dtype).newbyteorder("=")
        for name, each in wanted.items():
            np.testing.assert_allclose(means[name], each.numpy(), rtol=2e-3, atol=1e-3)  # float16's rounding
    backwards = named["bias"].numpy()[::-1]  # torch has no negative strides
    backwards.flags.writeable = False
    weight, bias = make()((named["weight"].flip(0).requires_grad_(), backwards))
    assert isinstance(bias, np.ndarray)
    assert not weight.requires_grad
    torch.testing.assert_close(weight, wanted["weight"])
    np.testing.assert_allclose(bias, wanted["bias"].numpy(), rtol=1e-6)


# --- a target epsilon ------------------------------------------------------------------------------------------------
def planned(**changes):
    given = {"epsilon": 2.0, "delta": 1e-5, "max_grad_norm": 1.0, "steps": 5, "sample_rate": 1.0}
    return dp.Privatizer(**{**given, "expected_batch_size": 4.0, **changes})


@pytest.mark.parametrize("rate", [1.0, pytest.param(0.1, marks=pytest.mark.slow)])  # the accountant takes seconds
def test_the_planned_steps_end_at_the_target(tmp_path, rate):
    """A step and a released sum cost the same; the one after the last is refused, and nothing is recorded."""
    privatizer = planned(sample_rate=rate, ledger=tmp_path / "spent.jsonl")
    for step in range(5):
        if step == 2:
            privatizer.release_sum(np.ones(3), sensitivity=7.0)
        else:
            assert privatizer.step(gradients())["bias"].shape == (2,)
    assert 1.99 < privatizer.epsilon() <= 2.0
    assert privatizer.epsilon() == privatizer.ledger.epsilon(1e-5)
    for call in (lambda: privatizer.step(gradients()), lambda: privatizer.release_sum(np.ones(3), sensitivity=1.0)):
        assert_raises(BudgetExceeded, r"all 5 planned steps were made: epsilon .* at delta 1e-05", call)
    events = privatizer.ledger.events
    assert (privatizer.made, sum(event.count for event in events)) == (5, 5)
    assert {(event.mechanism, event.sampling, event.sample_rate, event.noise_multiplier) for event in events} == {
        ("discrete_gaussian", "poisson", rate, privatizer.noise_multiplier)
    }
    assert {event.idealised for event in events} == {False, True}  # the sum was made elsewhere
    privatizer.ledger.close()
    with dp.PrivacyLedger(tmp_path / "spent.jsonl") as ledger:
        assert sum(event.count for event in ledger.events) == 5
        assert_raises(BudgetExceeded, "already: 5 more steps cannot end at 1", planned, epsilon=1.0, ledger=ledger)


def test_others_that_spend_the_ledgers_budget_end_it_sooner():
    ledger = dp.PrivacyLedger()
    privatizer = planned(ledger=ledger)
    privatizer.step(gradients())
    ledger.record(dp.PrivacyEvent("gaussian", 1.0))
    assert_raises(BudgetExceeded, "the budget is epsilon 2", lambda: privatizer.step(gradients()))
    assert privatizer.made == 1


@pytest.mark.usefixtures("fixed_entropy")
def test_the_noise_of_a_released_sum_is_that_of_its_sensitivity():
    privatizer = planned()
    noise = privatizer.release_sum(torch.full((2000,), 3.0), sensitivity=5.0) - 3.0
    assert float(noise.std()) == pytest.approx(5.0 * privatizer.noise_multiplier, rel=0.1)  # 5 deviations and the grid
    assert abs(float(noise.mean())) < 5 * float(noise.std()) / 2000**0.5


def test_one_example_moves_the_sum_by_at_most_the_norm(monkeypatch):
    """Added or removed: a search over scales, cancelling values and last bits, in the arithmetic of the release."""
    monkeypatch.setattr(NoisySum, "add_", lambda self, tensors, plan, factor: None)  # the sum before noise and divisor
    generator = torch.Generator().manual_seed(0)
    privatizer, worst = planned(steps=1000, max_grad_norm=0.7), 0.0

    def summed(*tensors):
        return torch.cat([each.flatten() for each in privatizer.step(list(tensors))])

    for _ in range(60):
        scale = 10.0 ** torch.empty(4, 1, dtype=torch.float64).uniform_(-6, 12, generator=generator)
        rows = torch.randn(4, 5, generator=generator, dtype=torch.float64) * scale
        rows[1] = -rows[0] * (1 + 2.0**-40)
        parts = rows[:, :2], rows[:, 2:]
        change = summed(*parts) - summed(*(each[1:] for each in parts))
        worst = max(worst, float(change.norm()) / 0.7)
    grid = NoisySum(privatizer._source, privatizer.noise_multiplier, 5).plan(0.7).grid
    assert 0.99 < worst <= 1.0 + 5**0.5 / 2 * grid / 0.7  # each number is rounded to the grid; the noise is wider by it


def test_it_is_the_step_of_private_training():
    """A linear model: gradients of examples by hand, against make_private's optimizer, both without noise."""
    x, y = points()
    model = mlp()[0]
    rows = (model(x) - y[:, None]).detach()
    privatizer = planned(steps=1, max_grad_norm=0.5, expected_batch_size=40.0)
    privatizer._multiplier, privatizer.ledger = 0.0, dp.PrivacyLedger()  # the budget of its own would refuse no noise
    privatizer._allowance = None
    weight, bias = privatizer.step([rows[:, :, None] * x[:, None, :], rows])
    with private(model, 1.0) as training:
        before = parameters(model)
        for batch in training.batches((x, y), steps=1):
            ((model(batch.tensors[0]) - batch.tensors[1][:, None]).square().sum(1) / 2).mean().backward()
            training.optimizer.step()
    for mean, old, new in zip((weight, bias), before, parameters(model), strict=True):
        torch.testing.assert_close(mean.double(), old - new, rtol=1e-5, atol=1e-7)


def test_sums_are_checked_before_anything_is_recorded():
    privatizer = planned()
    with pytest.raises(ConfigError, match="not finite: leave out"):
        privatizer.release_sum({"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}, sensitivity=1.0)
    for sensitivity in (0.0, math.inf, None):
        with pytest.raises(ConfigError, match="sensitivity must be"):
            privatizer.release_sum(torch.ones(2), sensitivity=sensitivity)
    assert_raises(ShapeError, "as many in each", privatizer.step, [np.zeros((2, 3)), np.zeros((3, 3))])
    assert not privatizer.ledger.events
    assert privatizer.made == 0


@pytest.mark.gpu
def test_gradients_on_a_gpu_stay_there():
    privatizer = planned()
    named = {name: each.cuda() for name, each in gradients().items()}
    assert {each.device.type for each in privatizer.step(named).values()} == {"cuda"}
    assert privatizer.release_sum(named["bias"].sum(0), sensitivity=1.0).device.type == "cuda"
    with pytest.raises(ConfigError, match=r"on one device, got .*'bias': 'cpu'"):
        privatizer.step({**named, "bias": gradients()["bias"]})
    assert privatizer.made == 2


# --- the adaptive clipping norm: it finds the quantile, and what it costs is in the event -----------------------------
@pytest.mark.parametrize("start", [0.01, 30.0])
@pytest.mark.sample(2)
def test_the_norm_goes_to_the_quantile(start):
    """Without noise and with a learning rate of 0 the norms stay: the clipping norm ends at their quantile."""
    data, model = points(60), mlp()
    clipping = dp.AdaptiveClipping(quantile=0.25, learning_rate=0.5)
    with private(model, 1.0, lr=0.0, max_grad_norm=start, clipping=clipping) as training:
        train(training, data, 60, microbatch=32)
        norm = training.clipper.max_grad_norm
        inside = 0.0
        plain = mlp()
        for x, y in zip(*data, strict=True):
            grads = torch.autograd.grad(classify(plain, x[None], y[None]), list(plain.parameters()))
            inside += float(math.sqrt(sum(float((g**2).sum()) for g in grads)) <= norm)
        assert inside / 60 == pytest.approx(0.25, abs=0.1)


def test_the_gradients_get_what_the_count_leaves():
    """Theorem 1 of Andrew et al.: z^-2 = z_delta^-2 + (2 count_std)^-2, and z is what the ledger gets."""
    data, model = points(), mlp()
    clipping = dp.AdaptiveClipping(count_std=1.5)
    with private(model, 0.5, noise_multiplier=1.2, clipping=clipping, max_grad_norm=1.0) as training:
        train(training, data, 3)
        events = training.ledger.events  # the distance of the tables may differ as the clipping norm moves
        assert {event.noise_multiplier for event in events} == {1.2}
        assert sum(event.count for event in events) == 3
        assert "count of multiplier 3" in events[0].note
        z_delta = training.optimizer._adaptive.gradient_multiplier
        assert z_delta**-2 + (2 * 1.5) ** -2 == pytest.approx(1.2**-2)
        assert training.clipper.max_grad_norm != 1.0


def test_the_event_is_charged_for_the_noise_of_the_count_as_well():
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.2, clipping="adaptive") as training:
        for batch in training.batches(data, steps=1):
            classify(model, *batch.tensors).backward()
            plan = training.optimizer.prepare()
        count = training.optimizer._adaptive.delta
        assert [event.delta for event in training.ledger.events] == [plan.delta + count]
        assert min(count, plan.delta) > 0


def test_the_count_costs_two_per_cent_by_default():
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=2.0, clipping="adaptive") as training:
        train(training, data, 1)
        z_delta = training.optimizer._adaptive.gradient_multiplier
        assert 2.0 < z_delta <= 2.0 * 1.0207


def test_a_whole_number_is_a_norm_too():
    with private(mlp(), 0.5, max_grad_norm=1, clipping="adaptive", noise_multiplier=1.0) as training:
        train(training, points(), 2)
        training.clipper.max_grad_norm = 2
        train(training, points(), 2)
        assert training.clipper.max_grad_norm != 2


def test_padding_is_not_counted():
    """All norms are below the clipping norm: it falls by exp(-0.2 (1 - 0.5)) a step, whatever the padding."""
    data, model = points(10), mlp()
    with private(model, 1.0, lr=0.0, clipping="adaptive", max_grad_norm=1e6) as training:
        train(training, data, 1, microbatch=64)
        assert training.clipper.max_grad_norm == pytest.approx(1e6 * math.exp(-0.1))


@pytest.mark.parametrize(("start", "loss_scale", "end"), [(1.2e-10, 0.0, 1e-10), (0.9e30, 1e15, 1e30)])
def test_the_norm_stays_where_float32_has_its_squares(start, loss_scale, end):
    """It shrinks below gradients of 0, and grows beyond none that is finite."""
    data, model = points(10), mlp()
    with private(model, 1.0, lr=0.0, clipping=dp.AdaptiveClipping(learning_rate=2.0), max_grad_norm=start) as training:
        for batch in training.batches(data, steps=3):
            (classify(model, *batch.tensors) * loss_scale).backward()
            if loss_scale:
                training.optimizer._adaptive._below = -training.optimizer._adaptive._below
            training.optimizer.step()
            training.optimizer.zero_grad()
        assert training.clipper.max_grad_norm == end


def test_checkpoints_keep_the_norm():
    data, model = points(), mlp()
    with private(model, 0.5, clipping="adaptive") as training:
        train(training, data, 4)
        state = training.state_dict()
    with private(mlp(), 0.5, clipping="adaptive") as other:
        other.load_state_dict(state)
        assert other.clipper.max_grad_norm == state["max_grad_norm"] != 0.5
        assert other.optimizer.steps == 4


@pytest.mark.parametrize(("make", "changes", "message"), [
    (make, {"noise_multiplier": -1.0}, "noise_multiplier must be .*-1"),
    (make, {"max_grad_norm": 0.0}, "max_grad_norm must be .*0"),
    (make, {"max_grad_norm": {}}, "names no tensor"),
    (make, {"max_grad_norm": 1e-170}, "max_grad_norm must be 1e-100 to 1e\\+100, .*got 1e-170"),  # the square is 0
    (make, {"max_grad_norm": {"a": 1.0, "b": 1e200}}, "max_grad_norm must be 1e-100 to 1e\\+100, .*'b': 1e\\+200"),
    (make, {"expected_batch_size": float("nan")}, "expected_batch_size must be .*nan"),
    (make, {"sampling": "sometimes"}, "sampling must be .*'sometimes'"),
    (make, {"sampling": "poisson"}, "sample_rate goes with"),
    (make, {"sample_rate": 0.5}, "sample_rate goes with"),
    (make, {"sampling": "poisson", "sample_rate": 1.5}, "sample_rate must be .*1.5"),
    (planned, {"epsilon": 0.0}, "epsilon must be .*0"),
    (planned, {"delta": 0.7}, "delta must be .*0.7"),
    (planned, {"steps": 1.5}, "steps must be a whole number.*1.5"),
    (planned, {"sample_rate": 0.0}, "sample_rate must be .*0"),
    (planned, {"expected_batch_size": None}, "expected_batch_size must be .*None"),
    (planned, {"max_grad_norm": -1.0}, "max_grad_norm must be .*-1"),
    (dp.AdaptiveClipping, {"quantile": 0.0}, "quantile must be .*0"),
    (dp.AdaptiveClipping, {"quantile": 1.0}, "quantile must be below 1"),
    (dp.AdaptiveClipping, {"learning_rate": -1.0}, "learning_rate must be .*-1"),
    (dp.AdaptiveClipping, {"count_std": 0.0}, "count_std must be .*0"),
])  # fmt: skip
def test_arguments_are_checked(make, changes, message):
    assert_raises(ConfigError, message, make, **changes)


def test_too_little_noise_on_the_count_is_refused_before_the_step():
    data, model = points(), mlp()
    options = {"noise_multiplier": 4.0, "clipping": dp.AdaptiveClipping(count_std=1.0)}
    with (
        private(model, 0.5, **options) as training,
        pytest.raises(ConfigError, match="above half the noise multiplier"),
    ):
        train(training, data, 1)
    with pytest.raises(ConfigError, match="starts from one max_grad_norm"):
        private(mlp(), 0.5, clipping="adaptive", max_grad_norm={"0": 1.0, "2": 1.0})


def test_few_expected_examples_move_the_norm_by_no_more_than_it_can_bear():
    """A thousandth of an example a draw: the count over it is noise in the thousands, and exp of that no number."""
    data, model = points(), mlp()
    with private(model, 0.1, noise_multiplier=1.0, clipping="adaptive", expected_batch_size=1e-3) as training:
        norms = [training.clipper.max_grad_norm]
        for _ in range(3):
            train(training, data, 1)
            norms.append(training.clipper.max_grad_norm)
    assert all(abs(math.log(b / a)) <= 2.0 + 1e-9 for a, b in itertools.pairwise(norms))
