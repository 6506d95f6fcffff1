"""Opacus as a second opinion: per-example gradients by its GradSampleModule, of the layers that it has."""

import copy

import pytest
import torch
from clip_checks import MODES, Chain, loss_of
from torch import nn

from accelerant.privacy.dp.clipping import PerExampleClipper

opacus = pytest.importorskip("opacus")
modes = pytest.mark.parametrize("norms", MODES)


def by_opacus(model, x, bound):
    wrapped = opacus.GradSampleModule(copy.deepcopy(model), loss_reduction="mean")
    loss_of(wrapped, x).backward()
    rows = torch.cat([each.grad_sample.flatten(1) for each in wrapped.parameters()], 1)
    norms = rows.norm(dim=1)
    return (rows * (bound / norms).clamp(max=1)[:, None]).sum(0), norms


@modes
@pytest.mark.parametrize(
    ("layers", "shape"),
    [
        ((nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), (5, 4)),
        ((nn.Linear(4, 6), nn.LayerNorm(6)), (5, 3, 4)),
        ((nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 2, 2, dilation=2)),
         (4, 3, 7, 8)),
        ((nn.Conv1d(4, 6, 3, groups=2, padding=1), nn.InstanceNorm1d(6, affine=True)), (4, 4, 9)),
        ((nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 2, 1)), (3, 4, 6, 5)),
        ((nn.RMSNorm(5),), (4, 3, 5)),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_layers(layers, shape, norms):
    torch.manual_seed(0)
    model, x = Chain(*layers).double(), torch.randn(shape, dtype=torch.float64)
    compare(model, x, norms)


@modes
@pytest.mark.filterwarnings("ignore")
def test_an_embedding_before_a_linear_layer(norms):
    torch.manual_seed(0)
    model = Chain(nn.Embedding(9, 4), nn.Linear(4, 3)).double()  # with padding_idx Opacus 1.6 gives that row a gradient
    compare(model, torch.randint(9, (5, 6)), norms)


def compare(model, x, norms):
    _, lengths = by_opacus(model, x, 1.0)
    bound = float(lengths.median())
    expected, lengths = by_opacus(model, x, bound)
    clipper = PerExampleClipper(model, max_grad_norm=bound, norms=norms)
    loss_of(model, x).backward()
    clipper.detach()
    torch.testing.assert_close(clipper.norms, lengths, rtol=1e-10, atol=0)
    found = torch.cat([each.grad.flatten() for each in model.parameters()])
    model.zero_grad()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
