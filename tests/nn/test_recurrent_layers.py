import pytest
import torch
from torch.utils.checkpoint import checkpoint

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn import GRU, LSTM, RNN
from accelerant.runtime.ledger import ledger
from refusals import assert_raises


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_the_state_carries_on(kind):
    torch.manual_seed(0)
    layer, x = kind(3, 4, batch_first=True), torch.randn(2, 6, 3)
    whole, last = layer(x)
    first, state = layer(x[:, :4])
    second, end = layer(x[:, 4:], state)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(end, last)


def test_dropout_is_for_training():
    torch.manual_seed(0)
    layer, x = LSTM(3, 8, 2, batch_first=True, dropout=0.5), torch.randn(2, 5, 3)
    assert not torch.equal(layer(x)[0], layer(x)[0])
    layer.eval()
    assert torch.equal(layer(x)[0], layer(x)[0])


def test_a_reentrant_checkpoint_draws_the_masks_once(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    layer, drawn = LSTM(8, 32, 2, batch_first=True, dropout=0.5), []
    x = torch.randn(3, 20, 8, requires_grad=True)

    def forward(x):
        y, _ = layer(x)
        drawn.append(y.detach())
        return y

    checkpoint(forward, x, use_reentrant=True).sum().backward()
    torch.testing.assert_close(*drawn)


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_a_batch_of_no_rows_has_gradients(kind):
    layer = kind(5, 32, batch_first=True)
    layer(torch.zeros(0, 20, 5))[0].sum().backward()
    assert all(torch.equal(each.grad, torch.zeros_like(each)) for each in layer.parameters())


def test_another_nonlinearity_is_refused():
    assert_raises(ConfigError, "nonlinearity must be tanh or relu, got 'gelu'", RNN, 3, 4, nonlinearity="gelu")


@pytest.mark.parametrize(("kind", "op"), [(LSTM, "lstm_fwd"), (GRU, "gru_fwd"), (RNN, "rnn_fwd")])
def test_the_ledger_counts_it(kind, op):
    ledger().reset()
    kind(3, 4, batch_first=True)(torch.randn(2, 5, 3))
    assert {row["op"]: row["calls"] for row in ledger().to_dict()["ops"]} == {op: 1}


@pytest.mark.parametrize("kind", [LSTM, GRU, RNN])
def test_refuses(kind):
    name = kind.__name__
    for arguments, words in (((0, 4), "at least 1"), ((3, 4, 0), "at least 1")):
        assert_raises(ConfigError, words, kind, *arguments)
    assert_raises(ConfigError, "there is one", kind, 3, 4, dropout=0.1)
    assert_raises(ConfigError, r"below 1, got 1\.5", kind, 3, 4, 2, dropout=1.5)
    layer = kind(3, 4, batch_first=True)
    assert_raises(ShapeError, rf"{name} takes \(B, T, 3\)", layer, torch.zeros(2, 3))
    assert_raises(ShapeError, rf"{name} takes \(B, T, 3\)", layer, torch.zeros(2, 0, 3))
    with pytest.raises(UnsupportedDtype, match="parameters of float32, x is float64"):
        layer(torch.zeros(2, 5, 3, dtype=torch.float64))
    wrong = torch.zeros(1, 3, 4)
    with pytest.raises(ShapeError, match=r"state of .* must be \(1, 2, 4\)"):
        layer(torch.zeros(2, 5, 3), (wrong, wrong) if kind is LSTM else wrong)
    if kind is LSTM:
        with pytest.raises(ShapeError, match="state of LSTM must be 2 tensors, got 1"):
            layer(torch.zeros(2, 5, 3), (torch.zeros(1, 2, 4),))
    double = torch.zeros(1, 2, 4, dtype=torch.float64)
    with pytest.raises(UnsupportedDtype, match=f"x of {name} is float32, its state is float64"):
        layer(torch.zeros(2, 5, 3), (double, double) if kind is LSTM else double)
