"""make_private: what it checks before anything is attached, what it finds, what a checkpoint holds."""

import copy
import gc
import math
import pickle
import warnings

import numpy as np
import pytest
import torch
from loops import classify, mlp, parameters, points, private, train
from torch import nn
from torch.nn import functional as F
from torch.optim import optimizer as optimizer_module
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from accelerant.errors import BudgetExceeded, ConfigError, FormatError, ShapeError, UnsupportedCase
from accelerant.privacy import dp, mpc
from accelerant.privacy.dp.noise.discrete import charge
from accelerant.privacy.dp.training import private as private_module
from modules import module
from refusals import assert_raises

GOOD = {"noise_multiplier": 1.0, "delta": 1e-5, "max_grad_norm": 1.0, "sample_rate": 0.1}


@pytest.mark.parametrize(("changes", "message"), [
    ({"noise_multiplier": None}, "either noise_multiplier or target_epsilon"),
    ({"target_epsilon": 1.0, "steps": 5}, "either noise_multiplier or target_epsilon"),
    ({"noise_multiplier": None, "target_epsilon": 1.0}, "give steps"),
    ({"noise_multiplier": None, "target_epsilon": 0.0, "steps": 5}, "target_epsilon must be .*0"),
    ({"noise_multiplier": -0.5}, "noise_multiplier must be .*-0.5"),
    ({"noise_multiplier": float("inf")}, "noise_multiplier must be .*inf"),
    ({"steps": 0}, "steps must be .*0"),
    ({"microbatch": 2.5}, "microbatch must be .*2.5"),
    ({"delta": 0.0}, "delta must be .*0"),
    ({"delta": 1.5}, "delta must be .*1.5"),
    ({"max_grad_norm": 0.0}, "max_grad_norm must be .*0"),
    ({"max_grad_norm": {}}, "names no layer"),
    ({"max_grad_norm": 1e-25}, r"max_grad_norm must be 1e-10 to 1e\+30, .*got 1e-25.*Multiply the loss"),
    ({"max_grad_norm": 1e200}, r"max_grad_norm must be 1e-10 to 1e\+30, .*got 1e\+200"),
    ({"sample_rate": 0.0}, "sample_rate must be .*0"),
    ({"sample_rate": 1.1}, "sample_rate must be .*1.1"),
    ({"expected_batch_size": -3}, "expected_batch_size must be .*-3"),
    ({"loss_reduction": "none"}, "loss_reduction must be .*'none'"),
    ({"clipping": "round"}, "clipping must be .*'round'"),
    ({"clipping": 3}, "clipping must be .*3"),
    ({"ledger": 7}, "ledger must be .*int"),
])  # fmt: skip
def test_arguments_are_checked_before_anything_is_attached(changes, message):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert_raises(ConfigError, message, dp.make_private, model, optimizer, **{**GOOD, **changes})
    x, y = points()
    classify(model, x, y).backward()
    ordinary = [p.grad.clone() for p in model.parameters()]
    plain = mlp()
    classify(plain, x, y).backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(ordinary, plain.parameters(), strict=True))


def test_model_and_optimizer_must_fit():
    model, other = mlp(), mlp()
    with pytest.raises(ConfigError, match="is not the model's"):
        private(model, optimizer=torch.optim.SGD([*model.parameters(), other[0].weight], lr=1.0))
    with pytest.raises(ConfigError, match="bias requires a gradient and is not in the optimizer"):
        private(model, optimizer=torch.optim.SGD([model[0].weight, *model[2].parameters()], lr=1.0))
    assert_raises(ConfigError, r"must be a torch\.optim\.Optimizer", private, model, optimizer="sgd")
    with pytest.raises(ConfigError, match=r"must be a torch\.nn\.Module"):
        dp.make_private("model", torch.optim.SGD(model.parameters(), lr=1.0), **GOOD)
    for p in other.parameters():
        p.requires_grad_(False)
    assert_raises(ConfigError, "no parameter that requires a gradient", private, other)
    training = private(model)
    assert_raises(ConfigError, "private already", private, model)
    training.close()
    private(model).close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_parameters_of_16_bits_are_refused(dtype):
    """Eight bits of a sum of 1024 clipped gradients of norm 1: rounding moves it by more than an example does."""
    assert_raises(UnsupportedCase, r"0\.weight is torch.*autocast", lambda: private(mlp().to(dtype)))
    model = mlp().to(dtype).requires_grad_(False)
    private(torch.nn.Sequential(model, torch.nn.Linear(3, 2))).detach()  # frozen ones have no sum


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_that_become_16_bits_wide_are_refused_before_the_next_draw(dtype):
    (x, y), model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training:
        train(training, (x, y), steps=1)
        batches = training.batches((x, y), sampler=(sampler := dp.PoissonSampler(len(x), 0.5)))
        draws = training._draws((x, y))
        batch = next(iter(draws))
        model[2].to(dtype)
        for refused in (
            lambda: next(batches),
            lambda: training._draws((x, y)),
            lambda: training.use(batch, draws),
            lambda: model(x),
        ):
            assert_raises(UnsupportedCase, rf"2\.weight is {dtype}.*autocast", refused)
        assert sampler.draws == 0
        model[2].float()
        train(training, (x, y), steps=1)
        batch = next(training.batches((x, y), steps=1))
        classify(model, *batch.tensors).backward()
        model.to(dtype)  # in place, the gradients, too
        before = [each.detach().clone() for each in model.parameters()]
        assert_raises(UnsupportedCase, r"0\.weight is", training.step)
        assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
        assert sum(event.count for event in training.ledger.events) == 2


def test_a_frozen_batch_norm_trains_until_it_is_put_to_train_mode():
    (x, y), model = points(), mlp()
    model.insert(1, torch.nn.BatchNorm1d(8).eval().requires_grad_(False))
    with private(model, 0.5, noise_multiplier=1.0) as training:
        train(training, (x, y), steps=1)
        model.train()
        with pytest.raises(UnsupportedCase, match=r"1 \(BatchNorm1d\) was put into train mode"):
            next(training.batches((x, y), steps=1))
        model[1].eval()
        batch = next(training.batches((x, y), steps=1))
        classify(model, *batch.tensors).backward()
        model.train()
        assert_raises(UnsupportedCase, "train mode", training.step)
        training.optimizer.zero_grad()
        model[1].eval().running_mean = model[1].running_var = None
        assert_raises(UnsupportedCase, r"1 \(BatchNorm1d\) has no running statistics", training._draws, (x, y))
        assert sum(event.count for event in training.ledger.events) == 1


def test_a_private_training_is_not_pickled_and_its_model_is():
    model = mlp()
    with private(model) as training:
        for duplicate in (pickle.dumps, copy.deepcopy):
            assert_raises(TypeError, r"save state_dict\(\)", duplicate, training)
        other = pickle.loads(pickle.dumps(model))
        with private(other):  # ordinary, and so may be made private itself
            pass


def test_the_ledger_is_charged_for_tables_and_tails():
    """In delta, at the epsilon that events are charged for: no bare distance in total variation."""
    data, model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training:
        for batch in training.batches(data, steps=1):
            classify(model, *batch.tensors).backward()
            plan = training.optimizer.prepare()
        (event,) = training.ledger.events
        cost = charge(plan.scale, grid=plan.grid, dimensions=sum(p.numel() for p in model.parameters()))
        assert cost.delta <= event.delta <= 2 * cost.delta


def test_layers_that_mix_examples_are_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert_raises(UnsupportedCase, "BatchNorm", private, model)
    x, y = points()
    classify(model, x, y).backward()  # as it was
    wrapped = nn.DataParallel(mlp())
    assert_raises(UnsupportedCase, "give its module", private, wrapped)


@pytest.mark.slow
def test_the_noise_for_a_target_is_enough_and_no_more(tmp_path):
    data, model = points(), mlp()
    options = {"target_epsilon": 3.0, "steps": 12, "ledger": tmp_path / "spent.jsonl"}
    with private(model, 1.0, **options) as training:  # a rate of 1 is soon accounted
        train(training, data)  # the planned steps
        assert training.optimizer.steps == 12
        assert 2.95 < training.epsilon() <= 3.0
        first = training.noise_multiplier
        assert_raises(BudgetExceeded, None, train, training, data, steps=3)
    # The same data again, for more: what was spent counts, so the noise is more.
    options["target_epsilon"] = 3.5
    with pytest.raises(ConfigError, match=r"has the budget epsilon 3 at delta 1e-05, and epsilon 3.5 .* is looser"):
        private(mlp(), 1.0, **options)
    dp.PrivacyLedger(options["ledger"], budget=dp.Budget(epsilon=3.5, delta=1e-5), loosen_budget=True).close()
    with private(mlp(), 1.0, **options) as training:
        assert training.noise_multiplier > 1.05 * first
        train(training, data)
        assert 3.4 < training.epsilon() <= 3.5
    assert_raises(BudgetExceeded, "holds epsilon", lambda: private(mlp(), 1.0, **{**options, "target_epsilon": 2.0}))


@pytest.mark.parametrize("kind", ["memory", "path", "budget of another delta", "after a training of another delta"])
def test_one_delta_is_stated_everywhere(tmp_path, kind):
    """That of make_private: in epsilon(), the ledger and its file, the statement and its JSON."""
    path = None if kind == "memory" else tmp_path / "privacy.jsonl"
    if kind == "budget of another delta":
        path = dp.PrivacyLedger(path, budget=dp.Budget(epsilon=50.0, delta=1e-6, method="rdp"))
    elif path and "after" in kind:
        private(mlp(), 1.0, noise_multiplier=8.0, delta=1e-6, ledger=path).close()
    with private(mlp(), 1.0, noise_multiplier=8.0, delta=1e-7, ledger=path) as training:
        train(training, points(), steps=2)
        ledger = training.ledger
        wanted = dp.PrivacyLedger.epsilon(ledger, 1e-7)
        books = [ledger] if ledger.path is None else [ledger, dp.PrivacyLedger.read(ledger.path)]
        for book in books:
            statement = book.statement()
            assert (training.epsilon(), book.epsilon(), statement.epsilon) == (wanted,) * 3
            assert (training.delta, book.delta, statement.delta) == (1e-7,) * 3
            assert statement.units == 40
            assert [delta for delta, _ in statement.others] == ([1e-6] if "other" in kind else [])
            assert "No delta was chosen" not in str(statement)


@pytest.mark.parametrize("options", [{}, {"groups": [row // 2 for row in range(40)]}, {"clipping": "adaptive"}])
def test_torchs_default_device_may_be_another_than_the_models(options):
    """As torch.set_default_device sets it: draws, masks and what the checks compare are the host's."""
    model, data = mlp(), points()
    with torch.device("meta"), private(model, 0.5, **options) as training:
        train(training, data, 3, microbatch=8)
        assert training.optimizer.steps == 3


def test_a_closed_ledger_leaves_the_model_as_it_was(tmp_path):
    ledger, model = dp.PrivacyLedger(tmp_path / "privacy.jsonl"), mlp()
    ledger.close()
    assert_raises(ConfigError, "is closed", private, model, noise_multiplier=1.0, ledger=ledger, delta=1e-7)
    assert ledger.delta is None
    with private(model, noise_multiplier=1.0):  # nothing was attached
        pass


@pytest.mark.parametrize(
    ("grouped", "note"), [(False, "each row counts as one user"), (True, "one row of each drawn user")]
)
def test_the_ledger_says_what_a_unit_was(grouped, note):
    """A ledger of users may be of rows that each are one: its reader must see which."""
    groups = torch.arange(40) // 4 if grouped else None
    with private(mlp(), 1.0, noise_multiplier=8.0, ledger=dp.PrivacyLedger(unit="user"), groups=groups) as training:
        train(training, points(), steps=1)
        assert note in str(training.ledger.statement())


@pytest.mark.slow
def test_all_that_is_released_from_the_data_is_in_one_statement(tmp_path):
    """Trainings of users, drawn and not, a query, noise in place, clients: by hand the same events cost as much."""
    path, groups, (x, y) = tmp_path / "privacy.jsonl", torch.arange(40) // 4, points()
    ledger = dp.PrivacyLedger(path, unit="client")
    with private(mlp(), 1.0, noise_multiplier=8.0, delta=1e-6, groups=groups, ledger=ledger) as first:
        train(first, (x, y), steps=2)
        state = first.state_dict()
    with private(mlp(), 1.0, noise_multiplier=9.0, delta=1e-7, ledger=ledger, expected_batch_size=4) as second:
        classify(second.model, x[:4], y[:4]).backward()
        with pytest.warns(UserWarning, match="not drawn"):
            second.optimizer.step()
    dp.release(412, mechanism="gaussian", sensitivity=1, epsilon=0.5, delta=1e-9, ledger=ledger)
    dp.gaussian_noise_(torch.zeros(3), 40.0, sensitivity=1.0, ledger=ledger)
    ones = [torch.ones(3)] * 3
    mpc.secure_aggregate(ones, threshold=2, max_norm=1.0, noise_multiplier=20.0, ledger=ledger)
    ledger._writer._open = False  # what a kill leaves
    ledger._writer._journal.close()
    with (
        dp.PrivacyLedger(path, unit="client") as again,
        private(mlp(), 1.0, noise_multiplier=8.0, delta=1e-7, groups=groups, ledger=again) as resumed,
    ):
        resumed.load_state_dict(state)
    found = dp.PrivacyLedger.read(path)
    multipliers = sorted((event.noise_multiplier, event.count) for event in found.events)
    assert [count for _, count in multipliers] == [2, 1, 1, 1, 1]
    assert [round(noise, 1) for noise, _ in multipliers[:2] + multipliers[3:4]] == [8.0, 9.0, 20.0]
    together = math.fsum(count / noise**2 for noise, count in multipliers) ** -0.5
    for delta in (1e-7, 1e-6):
        by_hand = dp.PrivacyLedger()
        by_hand.record(dp.PrivacyEvent("gaussian", together))
        assert found.epsilon(delta) == pytest.approx(by_hand.epsilon(delta), rel=1e-3)
    statement = found.statement()
    assert (statement.delta, statement.unit, statement.units) == (1e-7, "client", 10)
    assert statement.epsilon == found.epsilon() == resumed.epsilon()
    assert statement.others == ((1e-6, found.epsilon(1e-6)),)
    assert "not closed" in str(statement)


def test_draws_of_a_pass_and_the_expected_batch_size_follow_from_rate_and_data():
    with private(mlp(), 0.25) as training:
        assert training.optimizer.expected_batch_size is None
        train(training, points(40))
        assert (training.optimizer.steps, training.optimizer.expected_batch_size) == (4, 10.0)


@pytest.mark.slow
def test_privacy_by_user():
    """Users are drawn, of each one row; epsilon, the divisor and the statement are of users."""
    data, model = points(30), mlp()
    users = torch.arange(30) // 3
    numbered = (*data, torch.arange(30))
    with private(model, 0.5, noise_multiplier=1.0, groups=users) as training:
        seen = set()
        for batch in training.batches(numbered, steps=8):
            rows = batch.tensors[2][: batch.examples]
            assert len(set(users[rows].tolist())) == batch.examples  # of a user one row at most
            seen.update(rows.tolist())
            classify(model, *batch.tensors[:2]).backward()
            training.step()
        assert len(seen) > 10  # not the same row of a user each time
        assert training.optimizer.expected_batch_size == 5.0
        assert training.ledger.unit == "user"
        assert "one user added or removed" in str(training.ledger.statement())
        (event,) = training.ledger.events
        assert (event.sampling, event.sample_rate, event.count) == ("poisson", 0.5, 8)
        with pytest.raises(ShapeError, match="each of the 29 rows of the data, got 30"):
            training.batches(tuple(each[1:] for each in data))
        assert_raises(ConfigError, "leave sampler out", training.batches, data, sampler=dp.PoissonSampler(30, 0.5))


@pytest.mark.parametrize(("groups", "error", "message"), [
    ([0.0, 1.0], ShapeError, r"groups must be \(N,\) integers or texts, got \(2,\) of float64"),
    ([[0, 1], [2, 3]], ShapeError, r"got \(2, 2\) of int64"),
    ([], ShapeError, r"got \(0,\)"),
    ([1, "1", 2], ShapeError, "integers or texts, got both"),
    (torch.zeros(3), ShapeError, r"groups must be \(N,\) integers, got \(3,\) of torch.float32"),
    (torch.zeros(3, 1, dtype=torch.int64), ShapeError, r"got \(3, 1\)"),
    (torch.zeros(0, dtype=torch.int64), ShapeError, r"got \(0,\)"),
])  # fmt: skip
def test_groups_are_checked_before_anything_is_attached(groups, error, message):
    model = mlp()
    assert_raises(error, message, private, model, groups=groups)
    private(model).close()


@pytest.mark.parametrize("names", [
    list,
    np.array,
    lambda users: [f"user {each}" for each in users],
    lambda users: np.array([f"user {each}" for each in users], dtype=object),
])  # fmt: skip
def test_groups_are_integers_or_texts(names):
    users = names([7, 7, 3, 3, 3, -1])
    with private(mlp(), 1.0, groups=users) as training:
        (batch,) = training.batches((torch.arange(6),), steps=1)
        assert batch.examples == 3
        first, second, third = batch.tensors[0].tolist()
        assert first < 2 <= second < 5 == third


def test_groups_that_are_changed_later_are_those_that_were_given():
    users = torch.arange(40) // 4
    with private(mlp(), 1.0, groups=users) as training:
        users.zero_()
        (batch,) = training.batches(points(), steps=1)
        assert batch.examples == 10


@pytest.mark.parametrize("told", ["make_private", "a sampler"])
def test_of_groups_only_what_was_drawn_is_stepped(told):
    """A batch of one's own may hold many rows of a user: the sum moves by more than the ledger would say."""
    (x, y), users, model = points(), torch.arange(40) // 20, mlp()
    if told == "make_private":
        training = private(model, 0.5, noise_multiplier=1.0, groups=users, expected_batch_size=1)
    else:
        training = private(model, 0.5, noise_multiplier=1.0, ledger=dp.PrivacyLedger(unit="user"))
        training._draws((x, y), sampler=dp.GroupedSampler(users, 0.5))
    with training:
        before = parameters(model)
        classify(model, x, y).backward()
        assert_raises(ConfigError, "several rows of a group", training.step)
        assert not training.ledger.events
        assert all(torch.equal(now, then) for now, then in zip(parameters(model), before, strict=True))


@pytest.mark.parametrize(("sampler", "groups", "message"), [
    (dp.PoissonSampler(40, 1.0), None, r"draws at 1\.0, make_private got sample_rate 0\.5"),
    (dp.GroupedSampler(torch.arange(40) // 4, 0.5, records=2), None, "records must be 1"),
    (dp.GroupedSampler(torch.arange(40) // 4, 0.5), None, "unit is an example"),
    (dp.PoissonSampler(40, 0.5), torch.arange(40) // 4, "draws from them: leave sampler out"),
])  # fmt: skip
def test_a_draw_of_another_sampler_is_looked_at_before_it_is_used(sampler, groups, message):
    """The ledger would be told this training's rate and unit, whatever drew the batch."""
    with private(mlp(), 0.5, groups=groups) as training:
        batch = next(iter(dp.PoissonBatches(points(), sampler)))
        assert_raises(ConfigError, message, training.use, batch)
        with pytest.raises(ConfigError, match=message if groups is None else "leave sampler out"):
            training.batches(points(), sampler=sampler)
        training.use(next(iter(training._draws(points()))))
    with private(mlp(), 0.5) as training:
        training.use(next(iter(dp.PoissonBatches(points(), dp.PoissonSampler(40, 0.5)))))


def test_a_checkpoint_of_other_units_is_refused():
    """What it spent is of rows, say: in a ledger of users it would be too small an epsilon."""
    data, users = points(), torch.arange(40) // 4
    states = {}
    for name, groups in (("rows", None), ("users", users)):
        with private(mlp(), 0.5, noise_multiplier=1.0, groups=groups) as training:
            train(training, data, steps=1)
            states[name] = training.state_dict()
    for groups, refused in ((users, "rows"), (None, "users")):
        with private(mlp(), 0.5, noise_multiplier=1.0, groups=groups) as training:
            with pytest.raises(FormatError, match=r"unit is '(example|user)', this training's is '(user|example)'"):
                training.load_state_dict(states[refused])
            assert not training.ledger.events
    unsaid = {key: value for key, value in states["rows"].items() if key not in ("unit", "grouped")}
    for ledger in (dp.PrivacyLedger(unit="user"), None):
        with (
            private(mlp(), 0.5, noise_multiplier=1.0, groups=users, ledger=ledger) as training,
            pytest.raises(FormatError, match="has groups of rows"),
        ):
            training.load_state_dict(unsaid)
    renamed = [f"user {each}" for each in users.tolist()]
    with private(mlp(), 0.5, noise_multiplier=1.0, groups=renamed) as training:
        training.load_state_dict(states["users"])
        assert sum(event.count for event in training.ledger.events) == 1
    with private(mlp(), 0.5, noise_multiplier=1.0) as training:
        training.load_state_dict(unsaid)


@pytest.mark.parametrize(("data", "options", "error", "message"), [
    (DataLoader(TensorDataset(torch.zeros(4)), shuffle=True), {}, UnsupportedCase, "give its dataset"),
    (iter(range(4)), {}, UnsupportedCase, "range_iterator: a stream"),
    (None, {}, UnsupportedCase, "NoneType"),
    (torch.zeros(4), {"sampler": RandomSampler(range(4))}, UnsupportedCase, "RandomSampler shuffles"),
    (torch.zeros(4), {"sampler": [[0, 1]]}, UnsupportedCase, "list does not say how it draws"),
    (torch.zeros(4), {"microbatch": 0}, ConfigError, "microbatch must be a whole number, 1 or more, got 0"),
    (torch.zeros(0), {}, ConfigError, "size must be"),
])  # fmt: skip
def test_data_and_samplers_that_are_no_poisson_draws_are_refused(data, options, error, message):
    with private(mlp(), 0.5) as training, pytest.raises(error, match=message):
        training.batches(data, **options)


def test_who_is_counted_stands_in_the_ledger():
    users = torch.arange(40) // 4
    assert_raises(ConfigError, "unit is an example", lambda: private(mlp(), groups=users, ledger=dp.PrivacyLedger()))
    with private(mlp(), groups=users, ledger=dp.PrivacyLedger(unit="patient")) as training:
        assert training.ledger.unit == "patient"
    with private(mlp(), 0.5, ledger=dp.PrivacyLedger(unit="user")) as training:
        training.batches(points(), sampler=dp.GroupedSampler(users, 0.5))


def test_a_delta_that_is_not_below_one_over_the_units_is_said_once():
    with private(mlp(), 0.5, delta=0.03) as training:
        with pytest.warns(
            UserWarning, match=r"not below one over the about 40 units \(example\).*one in 33 .*0\.001 or less"
        ):
            training._draws(points())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            training._draws(points())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with private(mlp(), 0.5, delta=0.02) as training:
            training._draws(points())


def test_a_checkpoint_goes_on_and_holds_no_key():
    data, model = points(), mlp()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    ledger = dp.PrivacyLedger()
    with private(model, 0.5, optimizer=inner, noise_multiplier=1.0, ledger=ledger) as training:
        train(training, data, steps=3)
        state = training.state_dict()
        weights = model.state_dict()
        source = training.optimizer._release.source
        assert source._stream._key.tobytes() not in pickle.dumps(state)
    again = mlp(seed=5)
    again.load_state_dict(weights)
    inner = torch.optim.AdamW(again.parameters(), lr=0.5)
    with private(again, 0.5, optimizer=inner, noise_multiplier=1.0, ledger=ledger) as training:
        training.load_state_dict(state)
        assert training.optimizer.param_groups[0]["lr"] == 0.01
        assert training.optimizer.steps == 3
        assert float(inner.state[again[0].weight]["step"]) == 3
        train(training, data, steps=2)
        assert sum(event.count for event in ledger.events) == 5
    with private(mlp(), 0.5, noise_multiplier=2.0) as other:
        assert_raises(FormatError, "noise_multiplier 1", other.load_state_dict, state)
        assert_raises(FormatError, "not the state", other.load_state_dict, {"optimizer": {}})


@pytest.mark.parametrize(("given", "kept"), [(None, None), (7.5, 7.5)])
def test_a_checkpoint_does_not_tell_how_many_examples_there_are(given, kept):
    """Two data sets with an example more or less would have two checkpoints, whatever the noise."""
    with private(mlp(), 0.5, noise_multiplier=1.0, expected_batch_size=given) as training:
        train(training, points(37), steps=1)
        state = training.state_dict()
    assert state["expected_batch_size"] == kept
    assert training.optimizer.expected_batch_size == (given or 18.5)
    with private(mlp(), 0.5, noise_multiplier=1.0) as training:
        training.load_state_dict(state)
        train(training, points(37), steps=1)
        assert training.optimizer.expected_batch_size == (given or 18.5)


def test_detached_the_model_is_ordinary_again():
    x, y = points()
    model = mlp()
    training = private(model, 0.5)
    training.detach()
    classify(model, x, y).backward()
    plain = mlp()
    classify(plain, x, y).backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    assert_raises(ConfigError, "detached", training.batches, (x, y))


def test_a_ledger_of_replaced_units_is_refused():
    """Clipping to C bounds what an example adds; replaced, it changes the sum by up to 2 C."""
    ledger = dp.PrivacyLedger(neighbouring="replace-one")
    assert_raises(ConfigError, "add-or-remove-one", lambda: private(mlp(), 1.0, noise_multiplier=1.0, ledger=ledger))
    with pytest.raises(ConfigError, match="add-or-remove-one"):
        dp.Privatizer(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4, ledger=ledger)


def test_a_copy_of_the_model_is_an_ordinary_one():
    """An average of the parameters, or the best so far, is kept beside the training."""
    (x, y), model = points(), mlp()
    with private(model, 0.5, noise_multiplier=1.0) as training:
        average = torch.optim.swa_utils.AveragedModel(model)
        train(training, (x, y), steps=1)
        average.update_parameters(model)
        twin = copy.deepcopy(model)
        batch = next(training.batches((x, y), steps=1))
        classify(model, *batch.tensors).backward()
        training.optimizer.step()
        noisy = model[0].weight.grad.clone()
        classify(twin, x, y).backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        assert torch.equal(model[0].weight.grad, noisy)
        assert sum(event.count for event in training.ledger.events) == 2


def test_a_failure_at_the_end_of_make_private_leaves_nothing_attached(monkeypatch):
    model = mlp()
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    steps = len(optimizer_module._global_optimizer_pre_hooks)
    with monkeypatch.context() as patch:
        patch.setattr(private_module, "PrivateTraining", None)
        assert_raises(TypeError, None, private, model)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before
    assert not any(param._backward_hooks for param in model.parameters())
    assert len(optimizer_module._global_optimizer_pre_hooks) == steps
    private(model).close()  # and it can be made private


def test_two_trainings_make_no_step_of_one_draw():
    """Each would be amplified as if its draw were its own, but what one does not show of an example the other may."""
    first, second, third = (private(mlp(), 0.5, noise_multiplier=1.0) for _ in range(3))
    batch = next(first.batches(points()))
    assert_raises(ConfigError, "another private training", second.use, batch)
    classify(first.model, *batch.tensors).backward()
    first.step()
    assert_raises(ConfigError, "made a step already", second.use, batch)
    batch = next(first.batches(points()))
    first.close()
    del first
    gc.collect()
    assert_raises(ConfigError, "another private training", third.use, batch)
    for training in (second, third):
        training.close()


def test_a_drawn_batch_has_no_copies_that_could_make_a_second_step():
    training = private(mlp(), 0.5, noise_multiplier=1.0)
    batch = next(training.batches(points()))
    again = copy.deepcopy(batch)
    assert_raises(TypeError, "second step", pickle.dumps, batch)
    classify(training.model, *batch.tensors).backward()
    training.step()
    assert_raises(ConfigError, "has made a step already", training.use, again)
    training.close()


def test_the_rate_of_the_draws_is_the_recorded_one():
    with private(mlp(), 0.5, noise_multiplier=1.0) as training:
        for target in (training, training.optimizer):
            with pytest.raises(AttributeError):
                target.sample_rate = 1.0
        train(training, points(), steps=1)
        assert [event.sample_rate for event in training.ledger.events] == [training.sample_rate] == [0.5]


def test_no_tensor_of_a_step_waits_for_the_garbage_collector():
    """Memory that a cycle keeps is freed at some time, and the next step gets other addresses."""
    layers = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
    model = module(lambda m, x, y: F.cross_entropy(m.layers(x), y), layers=layers)
    data = torch.randn(6, 4), torch.randint(2, (6,))

    def step():
        train(training, data, 1, lambda model, *row: model(*row))

    def tensors():
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    with private(model, 1.0) as training:
        for _ in range(12):  # checks are made in the first ten
            step()
        gc.collect()
        gc.disable()
        try:
            before = tensors()
            step()
            assert tensors() == before
        finally:
            gc.enable()
