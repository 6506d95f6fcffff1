"""The reference: a loop over microbatches of one, in float64; and the comparison."""

import torch
from torch import nn

from accelerant.privacy.dp.clipping import PerExampleClipper

MODES = ("auto", "ghost", "instantiate")


def per_example(model, inputs, loss_of):
    """Each example's gradient, (B, parameters), in float64."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    rows = []
    for i in range(inputs[0].shape[0]):
        loss = loss_of(model, *[x[i : i + 1] for x in inputs])
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        flat = [
            torch.zeros(each.numel(), dtype=torch.float64) if g is None else g.double().flatten()
            for g, each in zip(found, parameters, strict=True)
        ]
        rows.append(torch.cat(flat))
    return torch.stack(rows)


def clipped(rows, bound):
    norms = rows.norm(dim=1)
    return (rows * (bound / norms).clamp(max=1)[:, None]).sum(0), norms


def gradient_of(model):
    return torch.cat(
        [
            (torch.zeros_like(each) if each.grad is None else each.grad).double().flatten()
            for each in model.parameters()
            if each.requires_grad
        ]
    )


def check(model, inputs, loss_of, *, dtype=torch.float64, tolerance=None, norms="auto", reduction="mean", **options):
    """The clipped sum of one backward pass is that of the loop; half of the examples are clipped."""
    # Norms of gradients that are not formed are upper bounds, wider by the rounding of up to 63 products in float32.
    single = 1e-6 if norms == "instantiate" else 8e-6
    tolerance = tolerance or {torch.float64: 1e-10, torch.float32: single}[dtype]
    model = model.double()
    wide = [x.double() if x.is_floating_point() else x for x in inputs]
    rows = per_example(model, wide, loss_of)
    bound = 0.9 * float(rows.norm(dim=1).median())
    expected, lengths = clipped(rows, bound)
    model = model.to(dtype)
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=bound, norms=norms, loss_reduction=reduction, **options)
    try:
        loss_of(model, *[x.to(dtype) if x.is_floating_point() else x for x in inputs]).backward()
        found = gradient_of(model)
        error = float((found - expected).norm()) / max(float(expected.norm()), bound)  # two examples may cancel
        assert error < tolerance, f"relative error {error:.1e}"
        torch.testing.assert_close(clipper.norms.double(), lengths, rtol=tolerance, atol=0)
        assert 0 < int((clipper.factors < 1).sum()) <= lengths.shape[0]
    finally:
        clipper.detach()
        model.zero_grad()
    return clipper


class Chain(nn.Module):
    """Layers one after another; of a tuple the first is passed on."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            x = x[0] if isinstance(x, tuple) else x
        return x


def loss_of(model, x):
    """Something that weighs each output differently, for each example by itself."""
    y = model(x).flatten(1)
    return (y * torch.linspace(3, -2, y.shape[1], dtype=y.dtype)).sum(1).add(y.sin().sum(1)).mean()
