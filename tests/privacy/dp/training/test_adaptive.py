"""The adaptive clipping norm: it finds the quantile, and what it costs is in the event."""

import itertools
import math

import pytest
import torch
from loops import classify, mlp, points, private

from accelerant.errors import ConfigError
from accelerant.privacy import dp


def train(training, data, steps, **options):
    for batch in training.batches(data, steps=steps, **options):
        classify(training.model, *batch.tensors).backward()
        training.optimizer.step()
        training.optimizer.zero_grad()


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantile": 0.0}, "quantile must be .*0"),
        ({"quantile": 1.0}, "quantile must be below 1"),
        ({"learning_rate": -1.0}, "learning_rate must be .*-1"),
        ({"count_std": 0.0}, "count_std must be .*0"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        dp.AdaptiveClipping(**changes)


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
