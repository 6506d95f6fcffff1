"""quantize(mode="exact"): one integer result on every path, close to the model in floating point."""

import operator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from accelerant import nn as ann
from accelerant.errors import ConfigError, RangeError, ShapeError, UnsupportedDtype
from accelerant.nn.exact import ExactNetwork
from accelerant.zk.inference.proofs import integer_network
from refusals import assert_raises
from residual_network import ResNet


def mlp(activation=None, widths=(64, 128, 64, 10)):
    torch.manual_seed(0)
    layers = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), activation or nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def exact(model, examples):
    return ann.quantize(model, mode="exact", examples=examples).model


def test_torch_and_the_prover_agree_on_100_000_inputs():
    network = exact(mlp(widths=(16, 32, 8)), torch.randn(256, 16))
    x = torch.randint(-128, 128, (100_000, 16), dtype=torch.int8)
    assert np.array_equal(network(x).numpy(), integer_network(network)(x.numpy()))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh(), nn.Sigmoid(), nn.LeakyReLU(0.2)])
def test_close_to_floating_point(activation):
    model, x = mlp(activation), torch.randn(512, 64)
    y, ours = model(x).detach(), exact(model, x)(x)
    assert ours.dtype == torch.float32
    assert (ours - y).square().mean() < 0.002 * y.square().mean()  # 0.00006 to 0.00065 measured


@pytest.mark.parametrize("seed", range(8))
def test_channels_of_any_magnitudes(seed):
    """Channels of 1 to 512 inputs, with small weights where they are many: as close as alone, but for half a unit."""
    torch.manual_seed(seed)
    model, x = nn.Sequential(nn.Linear(512, 6)), torch.rand(256, 512)
    with torch.no_grad():
        counts = torch.cat([torch.tensor([1, 512]), 2 ** torch.randint(0, 10, (4,))])
        weight = (torch.arange(512) < counts[:, None]) * (torch.rand(6, 512) + 0.1) / counts[:, None]
        model[0].weight.copy_(weight)
        model[0].bias.copy_(torch.randn(6) * torch.exp2(torch.randint(0, 7, (6,))) / counts)
    network, y = exact(model, x), model(x).detach()
    ours = network(x)
    for channel in range(6):
        alone = nn.Sequential(nn.Linear(512, 1))
        with torch.no_grad():
            alone[0].weight.copy_(model[0].weight[channel : channel + 1])
            alone[0].bias.copy_(model[0].bias[channel : channel + 1])
        error = (exact(alone, x)(x)[:, 0] - y[:, channel]).abs().max()
        assert (ours[:, channel] - y[:, channel]).abs().max() <= 2 * error + 0.51 * network.output_scale
    multipliers = integer_network(network).network.layers[0].by_channel
    assert len(set(multipliers)) > 1
    assert min(multipliers) >= 1


def test_nested_models_linear_layers_in_a_row_and_no_bias():
    inner = nn.Sequential(ann.Linear(6, 5, bias=False), nn.Dropout(), nn.Linear(5, 4), nn.ReLU())
    model = nn.Sequential(nn.Identity(), inner, nn.Linear(4, 3)).eval()
    report = ann.quantize(model, mode="exact", examples=torch.randn(64, 6))
    assert report.replaced == ("1.0", "1.2", "2")
    assert report.model(torch.zeros(2, 3, 6, dtype=torch.int8)).shape == (2, 3, 3)
    assert type(model[1][0]) is ann.Linear
    assert "3 linear layers in 8-bit integers (exact), 0 left" in str(report)


def test_extremes():
    """Weights and examples of zero; one input; an output much larger than its inputs."""
    zero = nn.Linear(3, 2)
    nn.init.zeros_(zero.weight)
    nn.init.zeros_(zero.bias)
    assert exact(nn.Sequential(zero), torch.zeros(1, 3))(torch.ones(1, 3)).tolist() == [[0, 0]]
    for value in (1e-6, 1.0, 1e6):
        one = nn.Linear(1, 1, bias=False)
        nn.init.constant_(one.weight, value)
        y = exact(nn.Sequential(one), torch.tensor([[1.0]]))(torch.tensor([[1.0]]))
        assert y.item() == pytest.approx(value, rel=0.01)


def lenet():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(16 * 3 * 3, 32), nn.ReLU(), nn.Linear(32, 10),
    )  # fmt: skip


def test_convolutions():
    model, x = lenet(), torch.randn(64, 1, 20, 20)
    network, y = exact(model, x), model(x).detach()
    assert (network(x) - y).square().mean() < 0.001 * y.square().mean()  # 0.00003 measured
    integers = torch.randint(-128, 128, (50, 1, 20, 20), dtype=torch.int8)
    assert np.array_equal(network(integers).numpy(), integer_network(network)(integers.numpy()))


def same_integers(network, shape, count=20):
    """Compare with the prover's NumPy; all values of int8 occur."""
    x = torch.randint(-128, 128, (count, *shape), dtype=torch.int8)
    return np.array_equal(network(x).numpy(), integer_network(network)(x.numpy()))


def test_residuals_batch_normalization_and_maxima():
    torch.manual_seed(0)
    model, x = ResNet([4, 6], 5, pool=4), torch.randn(64, 1, 16, 16)
    for _ in range(3):
        model(x)  # running statistics
    report = ann.quantize(model.eval(), mode="exact", examples=x)
    network, y = report.model, model(x).detach()
    assert (network(x) - y).square().mean() < 0.005 * y.square().mean()
    assert report.replaced[:3] == ("stem.0", "stem.3", "blocks.0.conv1")
    assert sum(layer.skip > 0 for layer in network) == 2 + 6  # a pool of 2x2 has six
    assert same_integers(network, (1, 16, 16))


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(2, 2, 0), (3, 2, 1), (3, 1, 0), (1, 1, 0), (2, 1, 1)])
def test_maxima_are_exact(kernel, stride, padding):
    """An identity, ReLU and MaxPool2d: the integers are those of torch's pool."""
    conv = nn.Conv2d(2, 2, 1, bias=False)
    nn.init.dirac_(conv.weight)
    pool = nn.MaxPool2d(kernel, stride, padding)
    x = torch.rand(30, 2, 7, 6) * 2 - 1
    before, network = exact(nn.Sequential(conv, nn.ReLU()), x), exact(nn.Sequential(conv, nn.ReLU(), pool), x)
    integers = torch.randint(-128, 128, (50, 2, 7, 6), dtype=torch.int8)
    assert torch.equal(network(integers).double(), pool(before(integers).double()))
    assert same_integers(network, (2, 7, 6))


class Graph(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.a, self.b, self.function = nn.Linear(3, 3), nn.Linear(3, 3), forward
        self.drop = nn.Dropout()

    def forward(self, x):
        return self.function(self, x)


@pytest.mark.parametrize(("forward", "message"), [
    (lambda m, x: m.a(x) + x, "add: .*adds the output of an earlier layer"),
    (lambda m, x: m.a(x) + 1, "add: .*adds the output of an earlier layer"),
    (lambda m, x: m.a(x) * m.b(x), "mul: .*does not represent"),
    (lambda m, x: torch.relu(m.b(m.a(x))) + m.a(x).relu(), "add: .*before its function"),
    (lambda m, x: m.a(x) if x.sum() > 0 else x, "traces the model by torch.fx, and Graph failed"),
    (lambda m, x: (m.a(x), m.b(x)), "whose output is one tensor"),
    (lambda m, x: (m.b(x), m.a(x))[0], "whose output is one tensor"),
    (lambda m, x: torch.relu(x), "no layer is before it"),
    (lambda m, x: m.b(torch.relu(m.drop(y := m.a(x)))) + m.a(y), r"relu \(ReLU\): .*it is neither"),
    (lambda m, x: m.b(m.a(x)[:, [1, 0, 2]]), "getitem: .*does not represent"),
    (lambda m, x: m.a(x[:, [1, 0, 2]]), "getitem: .*does not represent"),
    (lambda m, x: m.a(x)[:, [1, 0, 2]], "getitem: .*does not represent"),
    (lambda m, x: m.a(x)[:, :3].flatten(1), "getitem: .*does not represent"),
    (lambda m, x: m.a(x.T), "getattr_1: .*does not represent"),
    (lambda m, x: m.a(input=x), "a: .*called with one input"),
    (lambda m, x: m.a((y := m.b(x)).add_(m.a(y))) + y, "add_: .*a sum in place of what is used later"),
    (lambda m, x: m.a(operator.iadd(y := m.b(x), m.a(y))) + y, "iadd: .*a sum in place of what is used later"),
])  # fmt: skip
def test_graphs_that_it_does_not_represent_are_refused(forward, message):
    assert_raises(ConfigError, message, lambda: exact(Graph(forward), torch.ones(2, 3)))


def test_a_layer_by_itself_and_a_step_that_is_used_twice():
    assert exact(nn.Linear(3, 2), torch.randn(5, 3)).input_shape == (3,)
    x = torch.randn(200, 3)
    for forward in (
        lambda m, x: m.b(y := m.a(x).relu()) + y,
        lambda m, x: torch.add(y := m.a(x), m.b(y)).relu(),
        lambda m, x: torch.tanh(m.b(m.a(x)) + m.a(x)),
        lambda m, x: m.a(operator.iadd(y := m.b(x), m.a(y))),
    ):
        model = Graph(forward)
        network = exact(model, x)
        assert (network(x) - model(x)).square().mean() < 0.01 * model(x).square().mean()
        assert same_integers(network, (3,))


def test_an_image_as_the_output():
    model, x = nn.Sequential(nn.Conv2d(2, 3, (3, 2), stride=2, padding=1), nn.ReLU()), torch.randn(8, 2, 7, 6)
    network = exact(model, x)
    y = network(network.quantize_input(x))
    assert y.shape == model(x).shape == (8, 3, 4, 4)
    assert np.array_equal(y.numpy(), integer_network(network)(network.quantize_input(x).numpy()))
    assert (network(x) - model(x)).abs().max() < 0.05 * model(x).abs().max()


@pytest.mark.parametrize(("layers", "message"), [
    ([nn.Conv2d(2, 2, 3, groups=2)], "0: .*without groups"),
    ([nn.Conv2d(2, 2, 3, dilation=2)], "0: .*without groups, dilation"),
    ([nn.Conv2d(2, 2, 3, stride=(1, 2))], r"0: .*one number for both directions, got stride \(1, 2\)"),
    ([nn.Conv2d(2, 2, 3, padding="same")], "0: .*one number for both directions, got padding 'same'"),
    ([nn.Conv2d(2, 2, 9)], r"0: it takes 2 channels, and an image of \(2, 6, 6\) comes"),
    ([nn.Conv2d(3, 2, 1)], r"0: it takes 3 channels"),
    ([nn.AvgPool2d(2, padding=1)], "0: .*pools without padding"),
    ([nn.Conv2d(2, 2, (1, 3), padding=1)], "0: it has the padding 1"),
    ([nn.MaxPool2d(2)], r"0 \(MaxPool2d\).*at least 0, as those of a ReLU"),
    ([nn.Conv2d(2, 2, 1), nn.Tanh(), nn.MaxPool2d(2)], r"2 \(MaxPool2d\).*at least 0"),
    ([nn.Conv2d(2, 2, 1), nn.ReLU(), nn.MaxPool2d(2, dilation=2)], r"2 \(MaxPool2d\).*without dilation"),
    ([nn.Conv2d(2, 2, 1), nn.ReLU(), nn.MaxPool2d(7)], r"2: it has a kernel of 7, and an image of \(2, 6, 6\)"),
    ([nn.Conv2d(2, 2, 1), nn.Linear(72, 2)], r"1: it takes 72 inputs, and an image of \(2, 6, 6\) comes"),
    ([nn.Conv2d(2, 2, 1), nn.Flatten(2), nn.Linear(36, 2)], r"1 \(Flatten\)"),
])  # fmt: skip
def test_images_that_it_does_not_represent_are_refused_by_name(layers, message):
    assert_raises(ConfigError, message, lambda: exact(nn.Sequential(*layers), torch.ones(1, 2, 6, 6)))
    with pytest.raises(ShapeError, match=r"examples must be \(batch, channels, height, width\)"):
        exact(nn.Sequential(nn.Conv2d(2, 2, 1)), torch.ones(1, 2))


class Odd(nn.Linear):
    """Could compute anything."""


@pytest.mark.parametrize(("model", "message"), [
    (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.BatchNorm1d(2)), r"2 \(BatchNorm1d\).*it is neither"),
    (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)), "0: its batch normalization has"),
    (nn.Sequential(nn.Sequential(nn.Conv3d(1, 1, 1))), r"0.0 \(Conv3d\)"),
    (nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), r"0 \(ReLU\).*no layer is before it"),
    (nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.GELU()), r"2 \(GELU\)"),
    (nn.Sequential(Odd(2, 2)), r"0 \(Odd\)"),
    (nn.Sequential(nn.Identity()), "no linear layer"),
    (nn.Sequential(nn.Linear((1 << 16) + 1, 1)), r"sums of 65537 products could pass int32"),
])  # fmt: skip
def test_what_it_does_not_represent_is_refused_by_name(model, message):
    with pytest.raises(ConfigError, match=message):
        exact(model, torch.ones(1, getattr(model[0] if isinstance(model, nn.Sequential) else model, "in_features", 2)))


def test_examples_and_values_are_checked():
    model = mlp(widths=(3, 2))
    assert_raises(ConfigError, r"needs examples=", ann.quantize, model, mode="exact")
    for wrong in (torch.ones(3), torch.ones(1, 2), torch.ones(0, 3), [[1.0]]):
        assert_raises(ShapeError, r"examples must be \(batch, 3\)", exact, model, wrong)
    assert_raises(ConfigError, "an infinity or a NaN", exact, model, torch.tensor([[1.0, float("nan"), 0.0]]))
    with pytest.raises(UnsupportedDtype, match=r"examples must be real numbers, got torch\.complex64"):
        exact(model, torch.ones(1, 3, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"which alone takes examples, got 'dynamic' with examples"):
        ann.quantize(model, mode="dynamic", examples=torch.ones(1, 3))
    nn.init.constant_(model[0].bias, 1e9)
    assert_raises(ConfigError, r"0: the bias of output 0, 1e", exact, model, torch.ones(1, 3))
    nn.init.constant_(model[0].bias, float("inf"))
    assert_raises(ConfigError, r"0: a weight or bias is not finite", exact, model, torch.ones(1, 3))


def test_inputs_of_the_network_are_checked():
    network = exact(mlp(widths=(3, 2)), torch.ones(1, 3))
    assert isinstance(network, ExactNetwork)
    with pytest.raises(UnsupportedDtype, match=r"int8 or real numbers, got torch\.int32"):
        network(torch.ones(1, 3, dtype=torch.int32))
    for call in (network, network.quantize_input):
        with pytest.raises(UnsupportedDtype, match="real numbers, got ndarray, which is no tensor"):
            call(np.ones((1, 3), np.float32))
        assert_raises(RangeError, "x has a NaN", call, torch.tensor([[1.0, float("nan"), 0.0]]))
    assert_raises(ShapeError, r"x must be \(\.\.\., 3\), got \(1, 4\)", network, torch.ones(1, 4))
    with pytest.raises(UnsupportedDtype, match=r"takes real numbers, got torch\.int8"):
        network.quantize_input(torch.ones(1, 3, dtype=torch.int8))
