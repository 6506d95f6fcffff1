import functools

import pytest
import torch
from clip_checks import MODES, Chain, check, loss_of, per_example
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from accelerant import nn as our
from accelerant.errors import UnsupportedCase
from accelerant.privacy.dp.clipping import LayerRule, PerExampleClipper, register, rules
from accelerant.privacy.dp.clipping.layers import scale_shift
from modules import module

modes = pytest.mark.parametrize("norms", MODES)
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
quick = settings(max_examples=8, deadline=None, derandomize=True)
few = st.integers(1, 6)


@pytest.mark.sample(3)
@dtypes
@modes
@given(B=few, T=few, K=few, N=few, bias=st.booleans(), ours=st.booleans())
@quick
def test_linear(B, T, K, N, bias, ours, norms, dtype):
    layer = (our.Linear if ours else nn.Linear)(K, N, bias=bias)
    check(Chain(layer), [torch.randn(B, T, K)], loss_of, norms=norms, dtype=dtype)


@dtypes
@modes
@pytest.mark.parametrize("shape", [(3,), (2, 4, 3), (0, 3)])
def test_linear_of_other_dimensions(shape, norms, dtype):
    model = Chain(nn.Linear(3, 5))
    if 0 in shape:  # no positions: every gradient is 0, and so is every norm
        x = torch.randn(2, *shape, dtype=dtype)
        with_clipper(model.to(dtype), x, norms)
        assert float(model.layers[0].weight.grad.abs().sum()) == 0
    else:
        check(model, [torch.randn(4, *shape)], loss_of, norms=norms, dtype=dtype)


def with_clipper(model, x, norms="auto"):
    clipper = PerExampleClipper(model, max_grad_norm=1.0, norms=norms)
    model(x).sum().backward()
    clipper.detach()
    return clipper


@modes
def test_a_batch_of_no_examples_adds_nothing(norms):
    model = Chain(nn.Linear(3, 5), nn.LayerNorm(5))
    clipper = with_clipper(model, torch.randn(0, 4, 3), norms)
    assert clipper.norms.shape == (0,)
    assert all(float(each.grad.abs().sum()) == 0 for each in model.parameters())


@pytest.mark.sample(3)
@dtypes
@modes
@given(B=few, T=few, V=few, D=few, padding=st.booleans())
@quick
def test_embedding(B, T, V, D, padding, norms, dtype):
    layer = nn.Embedding(V + 1, D, padding_idx=0 if padding else None)
    tokens = torch.randint(V + 1, (B, T))
    tokens[:, 0] = V  # an example of padding alone has no gradient, and no relative error
    check(Chain(layer, nn.Linear(D, 2)), [tokens], loss_of, norms=norms, dtype=dtype)


@pytest.mark.sample(5)
@dtypes
@modes
@pytest.mark.parametrize("layer", [
    lambda: nn.LayerNorm(6), lambda: nn.LayerNorm(6, bias=False), lambda: nn.LayerNorm((5, 6)),
    lambda: our.LayerNorm(6), lambda: our.LayerNorm(6, bias=False), lambda: nn.RMSNorm(6),
    lambda: nn.RMSNorm((5, 6), eps=1e-3), lambda: our.RMSNorm(6), lambda: nn.GroupNorm(1, 5),
    lambda: nn.InstanceNorm1d(5, affine=True),
])  # fmt: skip
def test_norms(layer, norms, dtype):
    layer = layer()
    with torch.no_grad():
        for each in layer.parameters():
            each.add_(torch.rand_like(each))
    check(Chain(nn.Linear(4, 6), layer), [torch.randn(4, 5, 4)], loss_of, norms=norms, dtype=dtype)


convolution_options = st.fixed_dictionaries(
    {
        "kernel_size": st.integers(1, 3), "stride": st.integers(1, 2), "padding": st.integers(0, 2),
        "dilation": st.integers(1, 2), "groups": st.sampled_from([1, 2]), "bias": st.booleans(),
    }
)  # fmt: skip


@pytest.mark.sample(3)
@pytest.mark.parametrize("dimensions", [1, 2])
@modes
@given(B=few, options=convolution_options, mode=st.sampled_from(["zeros", "reflect", "circular"]))
@quick
def test_convolutions(dimensions, B, options, mode, norms):
    layer = (nn.Conv1d, nn.Conv2d)[dimensions - 1](4, 6, padding_mode=mode, **options)
    check(Chain(layer), [torch.randn(B, 4, *(7, 6)[:dimensions])], loss_of, norms=norms)


@dtypes
@modes
@pytest.mark.parametrize("layer", [
    lambda: nn.Conv2d(4, 6, (3, 2), padding="same", dilation=2),
    lambda: nn.Conv2d(4, 6, 3, padding="valid", groups=2),
    lambda: our.Conv2d(4, 6, (3, 2), padding="same"),
    lambda: our.Conv2d(4, 6, 3, stride=2, padding=1, groups=2),
    lambda: nn.Conv1d(6, 4, 2, padding="same"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolutions_that_pad_by_name(layer, norms, dtype):
    layer = layer()
    shape = (6, 9) if isinstance(layer, nn.Conv1d) else (4, 7, 6)
    check(Chain(layer), [torch.randn(3, *shape)], loss_of, norms=norms, dtype=dtype)


@modes
def test_what_follows_a_layer_may_change_it_in_place(norms):
    model = Chain(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Flatten(),
                  nn.Linear(64, 5), nn.ReLU(inplace=True), nn.Linear(5, 2))  # fmt: skip
    check(model, [torch.randn(3, 3, 6, 6)], loss_of, norms=norms)


@pytest.mark.sample(3)
@modes
@pytest.mark.parametrize("layer", [
    lambda: nn.LSTM(3, 4, 2, batch_first=True, bidirectional=True),
    lambda: nn.LSTM(3, 4, batch_first=True, bias=False),
    lambda: nn.GRU(3, 4, 2, batch_first=True, bidirectional=True),
    lambda: nn.GRU(3, 4, batch_first=True, bias=False),
    lambda: our.LSTM(3, 4, 2, batch_first=True),
    lambda: our.GRU(3, 4, bidirectional=True, batch_first=True),
    lambda: nn.RNN(3, 4, 2, batch_first=True, bidirectional=True),
    lambda: our.RNN(3, 4, nonlinearity="relu", batch_first=True, bias=False),
    lambda: nn.LSTM(3, 5, 2, batch_first=True, bidirectional=True, proj_size=4),
])  # fmt: skip
def test_recurrent(layer, norms):
    layer = layer()
    width = 4 * (2 if layer.bidirectional else 1)
    check(Chain(nn.Linear(2, 3), layer, nn.Linear(width, 2)), [torch.randn(4, 5, 2)], loss_of, norms=norms)


class Sequences(nn.Module):
    """Runs a recurrent layer over sequences of their own lengths, packed, or with the examples second."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        if self.layer.batch_first:
            y, last = self.layer(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
            y = pad_packed_sequence(y, batch_first=True, total_length=x.shape[1])[0]
        else:
            y, last = self.layer(x.transpose(0, 1))
            y = y.transpose(0, 1)
        last = torch.cat(last, 2) if isinstance(last, tuple) else last
        return torch.cat((y.flatten(1), last.transpose(0, 1).flatten(1)), 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("first", [True, False], ids=["packed", "batch second"])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "num_layers": 2}], ids=str)
@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM, functools.partial(nn.LSTM, proj_size=2)])
def test_sequences_of_recurrent_layers(kind, options, first):
    model = Sequences(kind(3, 4, batch_first=first, **options))
    inputs = torch.randn(4, 5, 3), torch.tensor([3, 5, 1, 4])
    expected = model(*inputs)

    def loss(model, *inputs):
        return loss_of(lambda x: model(*x), inputs)

    check(model, inputs, loss, dtype=torch.float32)
    PerExampleClipper(model, max_grad_norm=1.0)
    torch.testing.assert_close(model(*inputs), expected)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_states_of_recurrent_layers(kind):
    def twice(m, x):
        y, state = m.first(x)
        z, last = m.second(x, state)
        last = last if kind is nn.GRU else torch.cat(last)
        return torch.cat((y, z, last.transpose(0, 1)), 1)

    first, second = kind(3, 4, batch_first=True), kind(3, 4, batch_first=True)
    check(module(twice, first=first, second=second), [torch.randn(4, 5, 3)], loss_of)


def test_layers_without_outputs_or_inputs():
    """The smallest cluster's layer has no outputs, and the next no inputs."""
    model = module(lambda m, x: m.head.log_prob(x.sin()), head=nn.AdaptiveLogSoftmaxWithLoss(6, 5, [2, 3]))
    check(model, [torch.randn(4, 6)], loss_of)


class Steps(nn.Module):
    """Calls a cell for each position, the first time without a state."""

    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    def forward(self, x):
        states = [self.cell(x[:, 0])]
        for t in range(1, x.shape[1]):
            states.append(self.cell(x[:, t], states[-1]))
        return torch.stack([torch.cat(each, 1) if isinstance(each, tuple) else each for each in states], 1)


@modes
@pytest.mark.parametrize("cell", [
    nn.LSTMCell, functools.partial(nn.LSTMCell, bias=False), nn.GRUCell, nn.RNNCell,
    functools.partial(nn.RNNCell, bias=False, nonlinearity="relu"),
])  # fmt: skip
def test_cells_of_recurrent_layers(cell, norms):
    model, x = Steps(cell(3, 4)), torch.randn(4, 5, 3)
    expected = model(x)
    check(model, [x], loss_of, norms=norms, dtype=torch.float32)
    PerExampleClipper(model, max_grad_norm=1.0)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    "layer", [lambda: nn.LayerNorm((4, 3)), lambda: our.LayerNorm((4, 3)), lambda: nn.RMSNorm((4, 3))]
)
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_norms_over_several_dimensions_add_up_over_passes(layer, clipping):
    model, x = random_parameters(Chain(layer())), torch.randn(6, 4, 3)
    sums = []
    for parts in ([6], [2, 4]):
        clipper = PerExampleClipper(model, max_grad_norm=0.5, clipping=clipping)
        for part in x.split(parts):
            loss_of(model, part).backward()
        sums.append([parameter.grad for parameter in model.parameters()])
        clipper.detach()
        model.zero_grad()
    for one, two in zip(*sums, strict=True):
        torch.testing.assert_close(one, two)


class Attends(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.own = nn.MultiheadAttention(8, 2, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, batch_first=True, **options)
        self.into = nn.Linear(3, 8)

    def forward(self, x):
        h = self.into(x)
        memory = x[:, :4] if self.cross.kdim == 3 else h[:, :4]
        late = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        y, weights = self.own(h, h, h, attn_mask=late)
        padded = torch.zeros(x.shape[0], 4, dtype=torch.bool)
        padded[:, 3] = True
        z, _ = self.cross(y, memory, memory, key_padding_mask=padded, need_weights=False)
        return torch.cat((z.flatten(1), weights.flatten(1)), 1)


@modes
@pytest.mark.parametrize("options", [{}, {"bias": False}, {"kdim": 3, "vdim": 3}])
def test_attention(options, norms):
    check(Attends(**options), [torch.randn(3, 5, 3)], loss_of, norms=norms)


@pytest.mark.parametrize("options", [{}, {"kdim": 3, "vdim": 3}])
@pytest.mark.parametrize("training", [True, False])
def test_attention_gives_what_torch_gives(options, training):
    model, x = Attends(**options).train(training), torch.randn(3, 5, 3)
    expected = model(x)
    PerExampleClipper(model, max_grad_norm=1.0)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("trained", [
    ["bias"], ["weight"], ["in_proj_weight", "own.out"], ["k_proj_weight"], ["v_proj_weight", "in_proj_bias"],
    ["weight_hh", "bias_ih_l1"], ["weight_ih_l0"],
])  # fmt: skip
def test_parts_of_attention_and_of_recurrent_layers_may_be_frozen(trained):
    layers = [
        nn.Sequential(Attends(**options)) for options in ({}, {"kdim": 3, "vdim": 3})
    ] + [Chain(kind(3, 4, 2, batch_first=True, bidirectional=True)) for kind in (nn.LSTM, nn.GRU)]  # fmt: skip
    for model in layers:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(any(each in name for each in trained))
        if any(parameter.requires_grad for parameter in model.parameters()):
            check(model, [torch.randn(3, 5, 3)], loss_of)


@modes
def test_a_transformer_of_torch(norms):
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.0)
    check(nn.TransformerEncoder(layer, 2), [torch.randn(3, 5, 8)], loss_of, norms=norms)


def test_low_precision_norms_are_of_what_is_summed():
    """In bfloat16 a formed gradient is rounded before its norm is taken, so that the clipped one has the bound's
    length exactly, but for the rounding of the sum itself."""
    model = Chain(nn.Linear(64, 64, bias=False)).bfloat16()
    weight = model.layers[0].weight
    x = torch.randn(1, 8, 64, dtype=torch.bfloat16)
    plain = torch.autograd.grad(loss_of(model, x), weight)[0]
    clipper = PerExampleClipper(model, max_grad_norm=1.0, norms="instantiate")
    loss_of(model, x).backward()
    assert float(clipper.norms[0]) == pytest.approx(float(plain.double().norm()), rel=1e-6)
    assert not clipper.idealised
    torch.testing.assert_close(weight.grad, (plain.float() / plain.double().norm().float()).bfloat16())


def llama_norm():
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    return modeling.LlamaRMSNorm(6, eps=0.5)


def random_parameters(layer):
    with torch.no_grad():
        for each in layer.parameters():
            each.copy_(torch.rand_like(each) + 0.5)
    return layer


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, "autocast"])
@pytest.mark.parametrize("layer", [
    lambda: nn.LayerNorm(6, eps=0.5),
    lambda: nn.RMSNorm(6, eps=0.5),
    lambda: nn.RMSNorm(6),
    lambda: our.LayerNorm(6, eps=0.5),
    lambda: our.RMSNorm(6, eps=0.5),
    lambda: nn.GroupNorm(2, 4, eps=0.5),
    lambda: nn.InstanceNorm1d(4, eps=0.5, affine=True),
    llama_norm,
    lambda: nn.Linear(6, 5),
    lambda: our.Linear(6, 5),
    lambda: nn.Conv1d(4, 5, 2),
    lambda: nn.MultiheadAttention(6, 2, batch_first=True),
])  # fmt: skip
def test_a_layer_computes_what_it_computes_without_a_clipper(layer, precision):
    """In dtype and value, with an eps beside which the input is small; per-example gradients are those of one row."""
    layer, x = random_parameters(layer()), 0.3 * torch.randn(3, 4, 6)
    if precision == torch.bfloat16:
        layer, x = layer.bfloat16(), x.bfloat16()

    def call(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast"):
            y = layer(x, x, x) if isinstance(layer, nn.MultiheadAttention) else layer(x)
        return y[0] if isinstance(y, tuple) else y

    expected = call(x)
    norms = per_example(layer, [x], lambda _, x: call(x).float().sum()).norm(dim=1)
    clipper = PerExampleClipper(layer, max_grad_norm=1.0, loss_reduction="sum")
    y = call(x)
    low = precision != torch.float32
    torch.testing.assert_close(y, expected, rtol=2e-2 * low + 1e-5, atol=2e-2 * low + 1e-6)
    y.float().sum().backward()
    torch.testing.assert_close(clipper.norms.double(), norms, rtol=2e-2 * low + 1e-5, atol=0)


def test_autocast_computes_a_layer_norm_in_float32():
    """As it does on a GPU; a CPU's layer_norm alone would round its result to bfloat16."""
    layer, x = random_parameters(nn.LayerNorm(6)), torch.randn(3, 4, 6).bfloat16()
    norms = per_example(layer, [x], lambda layer, x: layer(x.float()).sin().sum()).norm(dim=1)
    expected = layer(x.float())
    clipper = PerExampleClipper(layer, max_grad_norm=1.0, loss_reduction="sum")
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    y.sin().sum().backward()
    torch.testing.assert_close(clipper.norms.double(), norms, rtol=1e-5, atol=0)


def test_a_scale_in_low_precision_is_summed_in_float32():
    """The gradient of a scale over 4096 positions in bfloat16, as torch's norms accumulate it."""
    layer = nn.GroupNorm(1, 1).bfloat16()
    x = (1 + torch.rand(2, 1, 4096)).bfloat16()
    clipper = PerExampleClipper(layer, max_grad_norm=1e-3, loss_reduction="sum")
    clipper.begin(x)
    scale_shift(x, layer.weight, layer.bias, (1,), clipper, x.dtype).sum().backward()
    expected = torch.stack((x.double().sum((1, 2)), torch.full((2,), 4096.0))).norm(dim=0)
    torch.testing.assert_close(clipper.norms.double(), expected, rtol=1e-5, atol=0)


def frozen(layer):
    """A BatchNorm with statistics of its own, as after training elsewhere."""
    layer(torch.randn(64, layer.num_features, *[5] * (not isinstance(layer, nn.BatchNorm1d)) * 2))
    if layer.affine:
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    return layer.eval().requires_grad_(False)


@modes
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_that_is_frozen_is_a_constant_map(affine, norms):
    image = Chain(nn.Conv2d(2, 3, 3), frozen(nn.BatchNorm2d(3, affine=affine)), nn.Flatten(), nn.Linear(27, 4))
    check(image, [torch.randn(5, 2, 5, 5)], loss_of, norms=norms)
    row = Chain(nn.Linear(6, 4), frozen(nn.BatchNorm1d(4, affine=affine)), nn.Tanh(), nn.Linear(4, 3))
    check(row, [torch.randn(5, 6)], loss_of, norms=norms, dtype=torch.float32)


def test_batch_norm_that_is_put_back_to_train_mode_is_refused_by_name():
    norm = frozen(nn.BatchNorm1d(4))
    model, x, kept = Chain(nn.Linear(6, 4), norm, nn.Linear(4, 3)), torch.randn(5, 6), norm.running_mean.clone()
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    loss_of(model, x).backward()
    model.train()
    for context in (torch.enable_grad(), torch.no_grad()):
        with context, pytest.raises(UnsupportedCase, match=r"layers\.1 \(BatchNorm1d\) was put into train mode"):
            model(x)
    with pytest.raises(UnsupportedCase, match=r"layers\.1"):
        clipper.require_frozen()
    assert torch.equal(norm.running_mean, kept)
    norm.eval()
    loss_of(model, x).backward()
    clipper.detach()
    model.train()
    model(x)
    assert not torch.equal(norm.running_mean, kept)


class Scale(nn.Module):
    """A layer of the user's own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4) + 0.5)

    def forward(self, x):
        return x * self.weight


def test_a_layer_is_added_by_one_class(monkeypatch):
    monkeypatch.setattr(rules, "_rules", dict(rules._rules))
    model, x = Chain(nn.Linear(3, 4), Scale(), nn.Linear(4, 2)).double(), torch.randn(5, 3, dtype=torch.float64)

    @register
    class ScaleRule(LayerRule):
        layers = (Scale,)

        def forward(self, x):
            x, _ = self.examples_first(x)
            return scale_shift(x, self.module.weight, None, (x.dim() - 1,), self.sink, x.dtype)

    check(model, [x], loss_of)
