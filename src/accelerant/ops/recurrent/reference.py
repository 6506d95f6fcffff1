"""Reference of one layer in one direction in plain PyTorch; the tests' oracle in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gru_reference", "lstm_reference"]


def lstm_reference(x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
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


def gru_reference(x: Tensor, h: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
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
