"""Federated averaging in one process."""

import json
import math

import pytest
import torch
from torch import nn

from accelerant.cli.app import main
from accelerant.errors import BudgetExceeded, ConfigError, DivergenceError, ProtocolError, ShapeError
from accelerant.privacy import federated, mpc
from accelerant.privacy.dp import Budget, PrivacyLedger
from accelerant.privacy.mpc.secagg.messages import STAGES
from accelerant.privacy.mpc.secagg.protocol import make_identities
from refusals import assert_raises

torch.manual_seed(0)
INPUTS = torch.randn(120, 4)
DATA = INPUTS, (INPUTS[:, 0] > INPUTS[:, 1]).long()


def model():
    torch.manual_seed(1)
    return nn.Linear(4, 2)


def test_a_round_is_the_mean_of_local_training():
    """One full-batch step of every client: the same as one step on all rows, but for the rounding."""
    start, arrays = model(), tuple(each.numpy() for each in DATA)
    trained, report = federated.simulate(start, arrays, clients=4, rounds=1, batch_size=1000, learning_rate=0.5)
    plain = model()
    nn.functional.cross_entropy(plain(DATA[0]), DATA[1]).backward()
    with torch.no_grad():
        for p, q, r in zip(plain.parameters(), trained.parameters(), start.parameters(), strict=True):
            assert torch.allclose(p - 0.5 * p.grad, q, atol=1e-6)
            assert not torch.equal(q, r)
    assert report.survivors == [(0, 1, 2, 3)]
    assert report.epsilon == math.inf
    assert json.loads(json.dumps(report.to_dict()))["epsilon"] is None


def test_another_default_device_of_torch_changes_nothing():
    expected = federated.simulate(model(), DATA, clients=4, rounds=1).report
    start = model()
    with torch.device("meta"):
        found = federated.simulate(start, DATA, clients=4, rounds=1).report
        assert mpc.secure_aggregate([[1, 2]] * 3, 2).total.tolist() == [3, 6]
        shares = mpc.shamir.split([5, 7], threshold=2, count=3)
        assert mpc.shamir.combine(shares[1:]).tolist() == [5, 7]
    assert found.losses == expected.losses
    assert found.accuracies == expected.accuracies


def test_a_client_killed_in_a_round():
    _, report = federated.simulate(
        model(), DATA, clients=6, rounds=3, learning_rate=1.0, leaving={1: {"mask": [2]}, 2: {"unmask": [0]}}
    )
    assert report.survivors == [tuple(range(6)), (0, 1, 3, 4, 5), tuple(range(6))]
    assert report.accuracies[-1] > 0.9
    assert report.losses[-1] < report.losses[0]
    assert report.stages["mask"].clients == 17
    for clients, colluders, threshold in ((6, 0, 4), (9, 0, 6), (9, 4, 7)):  # two thirds, or what colluders ask for
        leaving = {0: {"advertise": range(clients - threshold + 1)}}
        with pytest.raises(ProtocolError, match=rf"{threshold - 1} clients .* advertise, the threshold is {threshold}"):
            federated.simulate(model(), DATA, clients=clients, rounds=1, colluders=colluders, leaving=leaving)


def test_private_rounds_are_charged():
    ledger = PrivacyLedger(unit="client")
    _, report = federated.simulate(
        model(), DATA, clients=4, rounds=2, max_norm=1.0, noise_multiplier=4.0, ledger=ledger, delta=1e-3
    )
    assert report.epsilon == ledger.epsilon(1e-3) == ledger.statement().epsilon < 2
    assert (report.delta, ledger.statement().units) == (1e-3, 4)
    assert sum(event.count for event in ledger.events) == 2
    tight = PrivacyLedger(unit="client", budget=Budget(epsilon=0.1, delta=1e-3))
    with pytest.raises(BudgetExceeded):
        federated.simulate(model(), DATA, clients=4, rounds=1, max_norm=1.0, noise_multiplier=4.0, ledger=tight)


@pytest.mark.parametrize(("delta", "chosen"), [(None, 1e-7), (1e-6, 1e-6)])
def test_delta_is_the_ledgers_unless_it_is_given(delta, chosen):
    ledger = PrivacyLedger(unit="client", budget=Budget(epsilon=20.0, delta=1e-7, method="rdp"))
    _, report = federated.simulate(
        model(), DATA, clients=3, rounds=1, max_norm=1.0, noise_multiplier=4.0, ledger=ledger, delta=delta
    )
    assert (report.delta, report.epsilon) == (chosen, ledger.statement().epsilon)
    assert ledger.statement().delta == chosen


def test_a_ledger_of_examples_is_refused():
    """One example more changes its client's update by up to twice the norm."""
    with pytest.raises(ConfigError, match=r'the sum is over clients.*unit="client"'):
        federated.simulate(
            model(), DATA, clients=3, rounds=1, max_norm=1.0, noise_multiplier=4.0, ledger=PrivacyLedger(), delta=1e-5
        )


def test_buffers_tell_nothing_of_the_data():
    """Running means of the clients' rows are not in the model that is returned."""
    torch.manual_seed(2)
    start = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    trained, _ = federated.simulate(start, DATA, clients=4, rounds=1, max_norm=1.0, noise_multiplier=1.0)
    for name, buffer in trained.named_buffers():
        assert torch.equal(buffer, dict(start.named_buffers())[name]), name
    assert not torch.equal(trained[1].weight, start[1].weight)


def test_evaluation_writes_nothing_into_the_model():
    """A forward pass scales the rows that it looks up down to `max_norm`: those that the data have."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(20, 8, max_norm=1.0), nn.Flatten(), nn.Linear(16, 2))
    with torch.no_grad():
        net[0].weight.mul_(3)
    data = torch.randint(0, 10, (40, 2)), torch.randint(0, 2, (40,))
    trained, _ = federated.simulate(net, data, clients=4, rounds=1, max_norm=0.01, noise_multiplier=2.0)
    assert (trained[0].weight.norm(dim=1) > 1.01).all()


def test_bad_arguments():
    assert_raises(ShapeError, "a row for each", lambda: federated.simulate(model(), DATA, clients=121))
    assert_raises(ConfigError, "rounds", lambda: federated.simulate(model(), DATA, clients=4, rounds=0))
    assert_raises(ConfigError, "max_norm", lambda: federated.simulate(model(), DATA, clients=4, noise_multiplier=1.0))


@pytest.mark.slow
def test_the_command_trains_ten_clients_on_digits(capsys):
    exit_ = assert_raises(SystemExit, None, main, ["train", "--federated", "--steps", "3", "--json"])
    assert exit_.code == 0
    plain, private = json.loads(capsys.readouterr().out).values()
    assert plain["accuracies"][-1] > 0.85
    assert plain["epsilon"] is None
    assert 0 < private["epsilon"] < 10
    assert [len(each) for each in private["survivors"]] == [10, 9, 10]
    exit_ = assert_raises(SystemExit, None, main, ["train", "--federated", "--private"])
    assert exit_.code == 2
    assert "not --private" in capsys.readouterr().err


def test_a_suspended_round_is_taken_once(tmp_path):
    """Between messages a client of Flower waits in a file, which two processes never both get."""
    setup = mpc.SecureAggregation(3, 2, 2, max_abs=1.0)
    signing, keys = make_identities(3)

    def party(i):
        return setup.client(i, signing[i], keys, state_path=tmp_path / str(i))

    server, answers = setup.server(0, keys), dict.fromkeys(range(3), b"")
    for stage in STAGES:
        for i, answer in answers.items():
            client = party(i)
            if stage == "advertise":
                sent = client.advertise(0)
            else:
                client.resume()
                assert not (tmp_path / f"{i}.round").exists()
                with pytest.raises(ProtocolError, match="no suspended round"):
                    party(i).resume()
                update = (torch.ones(2),) if stage == "mask" else ()
                step = {"share": "share_keys", "mask": "masked_input"}.get(stage, stage)
                sent = getattr(client, step)(answer, *update)
            if stage != "unmask":
                client.suspend()
                assert (tmp_path / f"{i}.round").stat().st_mode & 0o777 == 0o600
            server.receive(sent)
        answers = server.advance()
    assert server.finish().sum.tolist() == [3.0, 3.0]
    assert_raises(ConfigError, "needs a round", lambda: party(0).suspend())
    abandoned = party(0)
    abandoned.advertise(1)
    abandoned.suspend()
    party(0).advertise(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize(("leaving", "message"), [
    ({"mask": [5]}, r"leaving\['mask'\]: clients are 0 to 4, got 5"),
    ({"mask": [1], "unmask": [-1]}, r"leaving\['unmask'\]: clients are 0 to 4, got -1"),
    ({"mask": [1.0]}, "got 1.0"),
    ({"mask": [True]}, "got True"),
    ({"mask": "01"}, "must be a list of clients, got '01'"),
    ({"mask": 1}, "must be a list of clients, got 1"),
    ({1: "mask"}, "leaving has stages advertise, .*, got 1"),
    ([1], "leaving must be {stage: clients}"),
])  # fmt: skip
def test_clients_that_leave_are_there(leaving, message):
    assert_raises(ConfigError, message, lambda: mpc.secure_aggregate([torch.ones(3)] * 5, threshold=3, leaving=leaving))
    assert_raises(ConfigError, message, federated.simulate, model(), DATA, clients=5, rounds=1, leaving={0: leaving})


def test_rounds_that_clients_leave_are_there():
    with pytest.raises(ConfigError, match="leaving: rounds are 0 to 1, got 2"):
        federated.simulate(model(), DATA, clients=5, rounds=2, leaving={2: {"mask": [1]}})


def test_rows_and_updates_that_are_not_finite_are_named():
    inputs = INPUTS.clone()
    inputs[17, 2], inputs[40, 0] = math.nan, math.inf
    with pytest.raises(DivergenceError, match=r"row 17 of the inputs has .* NaN or infinite \(2 such rows\)"):
        federated.simulate(model(), (inputs, DATA[1]), clients=4)
    targets = INPUTS[:, :2].clone()
    targets[119] = math.nan
    with pytest.raises(DivergenceError, match="row 119 of the targets"):
        federated.simulate(model(), (INPUTS, targets), clients=4, loss=nn.functional.mse_loss)
    with pytest.raises(DivergenceError, match="client 0: the update has elements that are NaN"):
        federated.simulate(model(), DATA, clients=4, loss=lambda outputs, _: (outputs * math.nan).sum())
