"""LSTM and GRU through the library, against the mathematics written out."""

import pytest
import torch

from accelerant.ops.recurrent.op import gru, gru_reference, lstm, lstm_reference
from accelerant.runtime.ledger import ledger

OPTIONS = {"bias": True, "layers": 1, "dropout": 0.0, "training": False, "bidirectional": False}


def weights(gates, inputs=5, hidden=4):
    shapes = ((gates * hidden, inputs), (gates * hidden, hidden), (gates * hidden,), (gates * hidden,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("T", [1, 6])
def test_matches_the_reference_with_its_gradients(T):
    x, h, c = torch.randn(3, T, 5).double().requires_grad_(), torch.randn(3, 4).double(), torch.randn(3, 4).double()
    for gates, call, reference in (
        (4, lambda w: lstm(x, (h[None], c[None]), w, **OPTIONS), lambda w: lstm_reference(x, h, c, w)),
        (3, lambda w: gru(x, h[None], w, **OPTIONS), lambda w: gru_reference(x, h, w)),
    ):
        w = weights(gates)
        found, expected = call(w), reference(w)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.view(other.shape), other)
        gradients = [torch.autograd.grad(y[0].sin().sum(), [x, *w]) for y in (found, expected)]
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other)


def test_the_ledger_counts_them():
    x, h = torch.randn(2, 3, 5), torch.zeros(1, 2, 4)
    w = [each.float() for each in weights(3)]
    gru(x, h, w, **OPTIONS)
    (row,) = (row for row in ledger().to_dict()["ops"] if row["op"] == "gru_fwd")
    assert row["calls"] == 1
    assert row["implementation"] == "torch"
    assert row["flops"] == 2 * 2 * 3 * (12 * 5 + 12 * 4 + 24)
