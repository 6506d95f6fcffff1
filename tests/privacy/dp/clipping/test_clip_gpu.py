"""On a GPU: fused blocks, kernels and graphs give what the loop over single examples gives on the CPU, in float64."""

import pytest
import torch
from clip_checks import MODES, Chain, clipped, gradient_of, per_example
from torch import nn

from accelerant.nn import GPT, GPTConfig
from accelerant.privacy.dp.clipping import PerExampleClipper

pytestmark = pytest.mark.gpu
modes = pytest.mark.parametrize("norms", MODES)
V = 100


def by_method(model, idx, targets):
    return model.loss(idx, targets)


def prepared(tied, context=48):
    torch.manual_seed(0)
    config = GPTConfig(vocab_size=V, context=context, layers=2, heads=2, width=64, tied=tied)
    model = GPT(config).double()
    data = [torch.randint(V, (6, context)), torch.randint(V, (6, context))]
    rows = per_example(model, data, by_method)
    bound = 0.9 * float(rows.norm(dim=1).median())
    return model, data, rows, bound


@modes
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 5e-2)])
def test_gpt(dtype, tolerance, tied, norms):
    """float32 products are by torch's setting: without TF32 the error is that of rounding alone."""
    model, data, rows, bound = prepared(tied)
    expected, lengths = clipped(rows, bound)
    model = model.float().cuda()
    clipper = PerExampleClipper(model, max_grad_norm=bound, norms=norms)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model.loss(*[x.cuda() for x in data])
    loss.backward()
    torch.testing.assert_close(clipper.norms.double().cpu(), lengths, rtol=tolerance, atol=0)
    error = float((gradient_of(model).cpu() - expected).norm() / expected.norm())
    assert error < tolerance


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-4), (torch.bfloat16, 5e-2)])
def test_a_head_that_is_formed_with_the_loss(dtype, tolerance, tied, scale):
    """Sequences are longer than the model is wide; the loss is scaled after its gradient was made."""
    model, data, rows, bound = prepared(tied, context=96)
    expected, lengths = clipped(scale * rows, bound)
    model = model.float().cuda()
    clipper = PerExampleClipper(model, max_grad_norm=bound)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = model.loss(*[x.cuda() for x in data])
    (scale * loss).backward()
    torch.testing.assert_close(clipper.norms.double().cpu(), lengths, rtol=tolerance, atol=0)
    assert float((gradient_of(model).cpu() - expected).norm() / expected.norm()) < tolerance


@modes
def test_masks_and_what_is_not_finite(norms):
    model, data, _, bound = prepared(False)
    model = model.float().cuda()
    mask = torch.tensor([True, True, False, True, False, True])
    clipper = PerExampleClipper(model, max_grad_norm=bound, norms=norms)
    clipper.mask = mask.cuda()
    with torch.no_grad():
        model.wpe.weight[0] = 1.0
    model.loss(*[x.cuda() for x in data]).backward()
    assert clipper.factors.cpu()[~mask].tolist() == [0, 0]
    found = gradient_of(model)
    model.zero_grad()
    clipper.mask = None
    with torch.no_grad():
        model.wte.weight[V - 1] = float("nan")
    poisoned = [data[0].clone().clamp(max=V - 2), data[1].clamp(max=V - 2)]
    poisoned[0][2, 5] = poisoned[0][4, 0] = V - 1
    model.loss(*[x.cuda() for x in poisoned]).backward()
    assert int(clipper.nonfinite) == 2
    assert torch.isfinite(found).all()
    assert all(torch.isfinite(each.grad).all() for each in model.parameters())


@modes
def test_a_captured_pass(norms):
    """In a graph of one forward and backward pass, what is not finite stays out, too, and inputs may change."""
    torch.manual_seed(0)
    model = Chain(nn.Linear(32, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 16)).cuda()
    clipper = PerExampleClipper(model, max_grad_norm=0.5, norms=norms)
    x = torch.randn(8, 20, 32, device="cuda")

    def step():
        model.zero_grad(set_to_none=True)
        model(x).square().sum((1, 2)).mean().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    factors, captured = clipper.factors, [each.grad for each in model.parameters()]
    for poison, bound in ((False, 0.5), (True, 0.25)):
        x.normal_()
        clipper.max_grad_norm = bound
        if poison:
            x[3, 2, 1] = float("nan")
        graph.replay()
        step()
        for found, each in zip(captured, model.parameters(), strict=True):
            torch.testing.assert_close(found, each.grad, rtol=1e-4, atol=1e-6)
            assert torch.isfinite(found).all()
        torch.testing.assert_close(factors, clipper.factors)
        assert bool(factors[3] == 0) == poison


@modes
def test_layers_of_torch(norms):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    )
    x, y = torch.randn(5, 3, 8, 8), torch.randint(10, (5,))

    def loss(model, x, y):
        return nn.functional.cross_entropy(model(x), y)

    rows = per_example(model.double(), [x.double(), y], loss)
    bound = 0.9 * float(rows.norm(dim=1).median())
    expected, lengths = clipped(rows, bound)
    model = model.float().cuda()
    clipper = PerExampleClipper(model, max_grad_norm=bound, norms=norms)
    loss(model, x.cuda(), y.cuda()).backward()
    torch.testing.assert_close(clipper.norms.double().cpu(), lengths, rtol=5e-3, atol=0)  # cuDNN may take TF32
    error = float((gradient_of(model).cpu() - expected).norm() / expected.norm())
    assert error < 5e-3
