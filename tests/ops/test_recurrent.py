"""LSTM and GRU through the library, against the mathematics written out."""

import pytest
import torch

from accelerant.ops.recurrent.op import gru, lstm
from accelerant.runtime.ledger import ledger

OPTIONS = {"bias": True, "layers": 1, "dropout": 0.0, "training": False, "bidirectional": False}


def lstm_reference(x, h, c, weights):
    """Return y (B, T, hidden) and the last h and c, of x (B, T, inputs), h and c (B, hidden).

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers, Schmidhuber and Cummins 2000, as cuDNN.
    """
    w_in, w_hidden, b_in, b_hidden = weights
    ys = []
    for step in x.unbind(1):
        i, f, g, o = (step @ w_in.T + b_in + h @ w_hidden.T + b_hidden).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        ys.append(h)
    return torch.stack(ys, 1), h, c


def gru_reference(x, h, weights):
    """Return y (B, T, hidden) and the last h, of x (B, T, inputs) and h (B, hidden).

    Source: Cho et al. 2014, arXiv:1406.1078, with the reset gate after the product, as cuDNN.
    """
    w_in, w_hidden, b_in, b_hidden = weights
    ys = []
    for step in x.unbind(1):
        (r, z, n), (hr, hz, hn) = (step @ w_in.T + b_in).chunk(3, -1), (h @ w_hidden.T + b_hidden).chunk(3, -1)
        r, z = (r + hr).sigmoid(), (z + hz).sigmoid()
        h = (1 - z) * (n + r * hn).tanh() + z * h
        ys.append(h)
    return torch.stack(ys, 1), h


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
