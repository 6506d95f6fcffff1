"""What a pass may meet: masks, norms that are not finite, several passes, what is refused."""

import copy

import pytest
import torch
from clip_checks import MODES, Chain, check, clipped, gradient_of, loss_of, per_example
from torch import nn
from torch.utils.checkpoint import checkpoint

from accelerant.errors import ConfigError, ShapeError, UnsupportedCase
from accelerant.ops._per_example import announce, sink_of
from accelerant.privacy.dp.clipping import PerExampleClipper
from modules import module
from refusals import assert_raises

modes = pytest.mark.parametrize("norms", MODES)


def small():
    """Every kind of piece: rows, a lookup, formed gradients."""
    return Chain(nn.Embedding(7, 4), nn.Linear(4, 6), nn.LayerNorm(6), nn.Conv1d(3, 2, 2)).double()


def batch(B=5):
    return torch.randint(7, (B, 3))


def run(model, x, **options):
    """The sum that a pass leaves, and its clipper."""
    model.zero_grad()
    settings = {key: options.pop(key) for key in ("mask", "loss_scale") if key in options}
    clipper = PerExampleClipper(model, **{"max_grad_norm": 1.0, **options})
    for key, value in settings.items():
        setattr(clipper, key, value)
    loss_of(model, x).backward()
    clipper.detach()
    return gradient_of(model), clipper


def assert_same(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# --- what comes out --------------------------------------------------------------------------------------------------
@modes
def test_microbatches_make_no_difference(norms):
    model, x = small(), batch(6)
    whole, _ = run(model, x, norms=norms)
    for size in (1, 2, 3, 4):
        clipper = PerExampleClipper(model, max_grad_norm=1.0, norms=norms)
        model.zero_grad()
        for part in x.split(size):
            loss_of(model, part).backward()
        clipper.detach()
        assert_same(gradient_of(model), whole)


@modes
def test_the_same_bits_each_time(norms):
    """Also in another order of the parameters in memory: nothing follows their addresses."""
    model, x = small().float(), batch(6)
    found = [run(copy.deepcopy(model), x, norms=norms)[0] for _ in range(4)]
    assert all(torch.equal(found[0], other) for other in found[1:])


@modes
def test_nobody_is_clipped_under_a_large_bound(norms):
    model, x = small(), batch()
    found, clipper = run(model, x, norms=norms, max_grad_norm=1e9)
    assert_same(found, per_example(model, [x], loss_of).sum(0))
    assert clipper.factors.tolist() == [1.0] * 5


@modes
def test_an_example_without_gradient_is_not_divided_by(norms):
    model = Chain(nn.Embedding(4, 3, padding_idx=0)).double()
    found, clipper = run(model, torch.tensor([[0, 0], [1, 2]]), norms=norms)
    assert clipper.norms[0] == 0
    assert clipper.factors[0] == 1
    assert torch.isfinite(found).all()


@modes
def test_loss_reduction(norms):
    model, x = small(), batch()
    mean, _ = run(model, x, norms=norms)
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=1.0, norms=norms, loss_reduction="sum")
    (loss_of(model, x) * 5).backward()
    clipper.detach()
    assert_same(gradient_of(model), mean)


@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)])
def test_loss_scale(scale):
    model, x = small(), batch()
    expected, plain = run(model, x)
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    clipper.loss_scale = scale
    (loss_of(model, x) * scale).backward()
    clipper.detach()
    assert_same(gradient_of(model), expected)
    assert_same(clipper.norms, plain.norms)


@modes
def test_masked_examples_add_exactly_nothing(norms):
    model, x = small(), batch()
    rows = per_example(model, [x], loss_of)
    mask = torch.tensor([True, False, True, True, False])
    expected, _ = clipped(rows[mask], 1.0)
    found, clipper = run(model, x, norms=norms, mask=mask)
    assert_same(found, expected)
    assert clipper.factors[~mask].tolist() == [0, 0]
    nothing, _ = run(model, x, norms=norms, mask=torch.zeros(5, dtype=torch.bool))
    assert nothing.abs().sum() == 0


class Poisoned(nn.Module):
    """Examples with a negative token give what is not finite in every layer."""

    def __init__(self, value):
        super().__init__()
        self.inner, self.value = small(), value

    def forward(self, x):
        poison = torch.zeros(x.shape[0], 1, 1, dtype=torch.float64)
        poison[(x < 0).any(1)] = self.value
        h = x.clamp(min=0)
        for layer in self.inner.layers:
            h = layer(h) + poison
        return h


@modes
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_left_out_and_counted(value, masked, norms):
    model, x = Poisoned(value), batch()
    good = torch.tensor([True, False, True, True, True])
    expected, _ = run(model, x, norms=norms, mask=good)
    x[1, 0] = -1
    found, clipper = run(model, x, norms=norms, mask=good if masked else None)
    assert_same(found, expected)
    assert torch.isfinite(found).all()
    assert clipper.factors[1] == 0
    assert int(clipper.nonfinite) == (0 if masked else 1)


def test_nonfinite_counts_over_passes():
    model, x = Poisoned(float("nan")), batch()
    x[:2, 0] = -1
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    for _ in range(3):
        loss_of(model, x).backward()
    assert int(clipper.nonfinite) == 6


@modes
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("bound", [2e-10, 1e-3, 1e30])
def test_norms_of_tiny_and_huge_gradients(bound, clipping, norms):
    """Their squares leave the range of float32: no example adds more than the bound, and small norms are not 0."""
    model = Chain(nn.Linear(4, 3), nn.Linear(3, 2)).requires_grad_(True)
    x = torch.randn(1, 3, 4)
    for power in (-40, -30, -24, -18, -12, -8, 0, 12, 18, 24, 37):
        model.zero_grad()
        clipper = PerExampleClipper(model, max_grad_norm=bound, clipping=clipping, norms=norms)
        (model(x).double().sum() * 10.0**power).backward()
        clipper.detach()
        assert float(gradient_of(model).norm()) <= bound
        if -30 <= power < 18:
            assert float(clipper.norms) > 0
            assert int(clipper.nonfinite) == 0
        assert float(clipper.norms) <= bound or float(gradient_of(model).norm()) > 0.98 * bound or power > 17


@modes
@pytest.mark.parametrize("layer", [nn.Linear(1, 2, bias=False), nn.Conv1d(1, 2, 1, bias=False)], ids=["linear", "conv"])
def test_weighted_values_that_float32_rounds_to_few_bits(layer, norms):
    """Inputs of 1e-13 and gradients of 1e31: in float32 the weighted input has 13 bits, and 1.0001 C would be added."""
    for _ in range(8):
        layer.zero_grad()
        clipper = PerExampleClipper(layer, max_grad_norm=1e-10, norms=norms)
        x, scale = (1e-13, 1e31) if isinstance(layer, nn.Linear) else (1e31, 1e-13)  # the other factor is weighted
        (layer(x * (1 + torch.rand(1, 1, 1))) * scale).sum().backward()
        clipper.detach()
        assert 0.999999e-10 < float(gradient_of(layer).norm()) <= 1e-10


def test_what_squares_in_float32_may_lack_is_a_part_of_the_norm():
    """A loss scale of 1e-6 makes 1e-7 of 1e-13, whose square float32 lacks: a gradient that looks like 0 is clipped."""
    model = nn.Linear(3, 2)
    clipper = PerExampleClipper(model, max_grad_norm=1e-10)
    clipper.loss_scale = 1e-6
    (model(torch.randn(2, 3)).sum() * 0).backward()
    assert clipper.norms.tolist() == [0, 0]
    assert (clipper.factors < 1e-2).all()
    clipper.loss_scale = 1.0
    (model(torch.randn(2, 3)).sum() * 0).backward()
    assert (clipper.factors > 0.99).all()


def test_what_is_called_after_a_pass():
    model, x = small(), batch()
    seen = []
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    clipper.on_backward = lambda norms, factors: seen.append((norms, factors))
    loss_of(model, x).backward()
    ((norms, factors),) = seen
    assert norms is clipper.norms
    assert factors is clipper.factors
    torch.testing.assert_close(factors, (1 / norms).clamp(max=1))


# --- shared layers ---------------------------------------------------------------------------------------------------
@modes
@pytest.mark.parametrize("layer", [
    lambda: nn.Linear(4, 4),
    lambda: nn.LayerNorm(4),
    lambda: nn.Conv1d(3, 3, 1),
    lambda: nn.GRU(4, 4, batch_first=True),
    lambda: nn.MultiheadAttention(4, 2, batch_first=True),
])  # fmt: skip
def test_a_layer_called_several_times(layer, norms):
    layer = layer()

    def call(x):
        if isinstance(layer, nn.MultiheadAttention):
            return layer(x, x, x)[0]
        y = layer(x)
        return y[0] if isinstance(y, tuple) else y

    again = module(lambda m, x: call(call(x).tanh() + call(x * x)), layer=layer)
    check(again, [torch.randn(4, 3, 4)], loss_of, norms=norms)


@modes
def test_an_embedding_called_several_times(norms):
    twice = module(lambda m, x: m.table(x).sin() * m.table(x.flip(1)), table=nn.Embedding(5, 3))
    check(twice, [torch.randint(5, (4, 6))], loss_of, norms=norms)


@modes
def test_the_model_called_twice_before_one_backward(norms):
    model = Chain(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))

    def both(model, a, b):
        return (model(a) * model(b)).sum((1, 2)).mean()

    check(model, [torch.randn(4, 2, 3), torch.randn(4, 2, 3)], both, norms=norms)


@modes
def test_checkpointing(norms):
    def saves(m, x):
        return checkpoint(lambda h: m.second(h.tanh()), m.first(x), use_reentrant=False)

    for clipping in ("flat", "per_layer"):
        model = module(saves, first=nn.Linear(3, 4), second=nn.Linear(4, 4)).double()
        x = torch.randn(4, 2, 3, dtype=torch.float64)
        found, _ = run(model, x, norms=norms, clipping=clipping)
        model_2 = copy.deepcopy(model)
        model_2.forward = lambda x, m=model_2: m.second(m.first(x).tanh())
        expected, _ = run(model_2, x, norms=norms, clipping=clipping)
        assert_same(found, expected)


# --- by layer --------------------------------------------------------------------------------------------------------
@modes
@pytest.mark.parametrize("named", [False, True])
def test_per_layer(named, norms):
    model, x = small(), batch()
    names = ["layers.0", "layers.1", "layers.2", "layers.3"]
    bounds = dict(zip(names, (0.1, 0.2, 0.3, 0.4) if named else (0.5,) * 4, strict=True))
    rows = per_example(model, [x], loss_of)
    sizes = [sum(each.numel() for each in layer.parameters()) for layer in model.layers]
    parts = rows.split(sizes, 1)
    expected = torch.cat([clipped(part, bounds[name])[0] for part, name in zip(parts, names, strict=True)])
    found, clipper = run(model, x, norms=norms, clipping="per_layer", max_grad_norm=bounds if named else 1.0)
    assert_same(found, expected)
    assert clipper.sensitivity == pytest.approx(sum(bound**2 for bound in bounds.values()) ** 0.5)
    assert_same(clipper.norms, rows.norm(dim=1))
    for name, part in zip(names, parts, strict=True):
        assert_same(clipper.layer_norms[name], part.norm(dim=1))
        assert (clipper.factors <= (bounds[name] / part.norm(dim=1)).clamp(max=1) + 1e-12).all()


def test_per_layer_keeps_nothing_of_layers_that_are_done():
    """Each layer's sum is in its gradient before the pass is over."""
    model, x = small(), batch()
    clipper = PerExampleClipper(model, max_grad_norm=1.0, clipping="per_layer")
    seen = []
    y = model.layers[0](x)
    y.register_hook(lambda _: seen.append([layer.weight.grad is not None for layer in model.layers]))
    clipper.begin(x)
    for layer in model.layers[1:]:
        y = layer(y)
    y.sum().backward()
    assert seen == [[False, True, True, True]]


# --- settings --------------------------------------------------------------------------------------------------------
def test_the_bound_may_change_between_passes():
    model, x = small(), batch()
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    clipper.max_grad_norm = 0.25
    assert clipper.sensitivity == 0.25
    loss_of(model, x).backward()
    clipper.detach()
    expected, _ = clipped(per_example(model, [x], loss_of), 0.25)
    assert_same(gradient_of(model), expected)


@pytest.mark.parametrize(("options", "match"), [
    ({"max_grad_norm": 0.0}, "above 0"),
    ({"max_grad_norm": -1.0}, "above 0"),
    ({"max_grad_norm": float("nan")}, "above 0"),
    ({"max_grad_norm": float("inf")}, "above 0"),
    ({"max_grad_norm": 1e-25}, "1e-10 to 1e\\+30, .* got 1e-25.*Multiply the loss by a constant"),
    ({"max_grad_norm": 1e31}, "1e-10 to 1e\\+30"),
    ({"max_grad_norm": 1.9e-10, "clipping": "per_layer"}, "1e-10 to 1e\\+30, for each layer too"),
    ({"max_grad_norm": {"layers.0": 1.0}}, "flat clipping takes one number"),
    ({"max_grad_norm": {"layers.0": 1.0}, "clipping": "per_layer"}, r"missing \['layers.1'"),
    ({"clipping": "global"}, "'flat' or 'per_layer', got 'global'"),
    ({"loss_reduction": "none"}, "'mean' or 'sum', got 'none'"),
    ({"norms": "fast"}, "auto, ghost, instantiate"),
])  # fmt: skip
def test_settings_without_meaning(options, match):
    model = small()
    assert_raises(ConfigError, match, PerExampleClipper, model, **{"max_grad_norm": 1.0, **options})
    assert all(sink_of(each) is None for each in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.parametrize("norms", ["ghost", "instantiate"])
def test_idealised(norms):
    """Only where some layer's gradients were not formed; of an embedding the rows that an example uses are."""
    model = small()
    _, clipper = run(model, batch(), norms=norms)
    assert clipper.idealised == (norms == "ghost")
    _, clipper = run(Chain(model.layers[0]), batch())
    assert not clipper.idealised
    _, clipper = run(Chain(nn.Linear(2, 50)).double(), torch.randn(3, 1, 2, dtype=torch.float64))
    assert clipper.idealised


def test_detach_gives_the_model_back():
    model, x = small(), batch()
    expected = gradient_after(model, x)
    before = [set(module.__dict__) for module in model.modules()]
    _, clipper = run(model, x)
    clipper.detach()
    assert [set(module.__dict__) for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert_same(gradient_after(model, x), expected)


def gradient_after(model, x):
    model.zero_grad()
    loss_of(model, x).backward()
    return gradient_of(model)


def test_one_clipper_at_a_time():
    model = small()
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(ConfigError, "clipped already", PerExampleClipper, model, max_grad_norm=1.0)


# --- passes that cannot be, and those that are not ours ---------------------------------------------------------------
def test_without_gradients_the_model_is_as_it_was():
    model, x = small(), batch()
    expected = model(x)
    PerExampleClipper(model, max_grad_norm=1.0)
    with torch.no_grad():
        found = model(x)
    assert_same(found, expected)
    assert not found.requires_grad


def test_a_forward_pass_that_was_dropped():
    model, x = small(), batch()
    expected, _ = run(model, x, clipping="per_layer")
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=1.0, clipping="per_layer")
    model(batch())
    loss_of(model, x).backward()
    clipper.detach()
    assert_same(gradient_of(model), expected)


def test_gradients_of_inputs_alone_touch_no_parameter():
    model = Chain(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(loss_of(model, x), x)
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    (found,) = torch.autograd.grad(loss_of(model, x), x)
    assert_same(found, expected)
    assert clipper.norms is None
    assert all(each.grad is None for each in model.parameters())
    loss_of(model, x).backward()  # and those of the input beside the clipped ones
    assert_same(x.grad, expected)
    assert clipper.norms is not None


@pytest.mark.parametrize(("layer", "shape"), [
    (lambda: nn.Linear(4, 3), (2, 4)),
    (lambda: nn.LayerNorm(4), (2, 4)),
    (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    (lambda: nn.Conv1d(4, 3, 2), (2, 4, 3)),
    (lambda: nn.LSTM(4, 3, batch_first=True), (2, 5, 4)),
    (lambda: nn.GRU(4, 3, batch_first=True), (2, 5, 4)),
    (lambda: nn.Embedding(5, 3), (2, 4)),
    (lambda: nn.MultiheadAttention(4, 2, kdim=4, vdim=4, batch_first=True), (2, 5, 4)),
])  # fmt: skip
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_second_backward_pass_after_a_forward_pass_that_was_dropped(layer, shape, clipping):
    """The dropped one's contributions are still announced; each example would add up to 2 C."""
    model = Chain(layer())
    x = torch.randint(5, shape) if isinstance(model.layers[0], nn.Embedding) else torch.randn(shape)
    if isinstance(model.layers[0], nn.MultiheadAttention):
        attention = model.layers[0]
        model.forward = lambda x: attention(x, x, x)[0]
    PerExampleClipper(model, max_grad_norm=1.0, clipping=clipping)
    model(x)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    assert_raises(UnsupportedCase, "call backward\\(\\) once", loss.backward)


def test_a_second_pass_is_refused_to_functions_that_do_not_look():
    """As those of accelerant.ops that feed a sink do not: what was not announced is not taken."""

    class Feeds(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            sink_of(weight).expect(weight)
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, dy):
            x, weight = ctx.saved_tensors
            sink_of(weight).linear(weight, None, dy, x, dy.shape[0])
            return None, None

    model = nn.Linear(3, 2, bias=False)
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    first, second = (Feeds.apply(torch.randn(4, 3), model.weight).sum() for _ in range(2))
    first.backward(retain_graph=True)
    second.backward(retain_graph=True)
    assert clipper.norms is not None
    assert_raises(UnsupportedCase, "call backward\\(\\) once", first.backward)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")
def test_a_pass_to_be_differentiated_is_refused():
    model, x = small(), batch()
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(UnsupportedCase, "create_graph", lambda: loss_of(model, x).backward(create_graph=True))


def test_reentrant_checkpointing_is_refused():
    model = Chain(nn.Linear(3, 4), nn.Linear(4, 2))
    PerExampleClipper(model, max_grad_norm=1.0)
    x = torch.randn(2, 3, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=True)
    assert_raises(UnsupportedCase, "use_reentrant=False", lambda: y.sum().backward())


def test_a_parameter_used_past_its_layer_is_refused_in_the_pass():
    model = module(lambda m, x: m.table(x) @ m.table.weight.t(), table=nn.Embedding(7, 4))
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(UnsupportedCase, r"table\.weight is used outside", lambda: model(batch()).sum().backward())
    assert model.table.weight.grad is None


def test_hooks_of_gradients_are_for_the_noisy_mean():
    """Before the noise they would change, or learn, the sum; autograd itself has no gradient for them."""
    model = small()
    handle = model.layers[1].weight.register_hook(lambda g: g.clamp(-1, 1))
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    with pytest.raises(UnsupportedCase, match=r"layers\.1\.weight has a hook .*on the noisy mean"):
        loss_of(model, batch()).backward()
    handle.remove()
    loss_of(model, batch()).backward()
    clipper.detach()
    model.layers[1].weight.register_post_accumulate_grad_hook(print)
    with pytest.raises(UnsupportedCase, match=r"layers\.1\.weight has a hook of register_post_accumulate"):
        PerExampleClipper(model, max_grad_norm=1.0)
    assert all(sink_of(each) is None for each in model.parameters())
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_after_an_error_the_next_pass_is_whole():
    model, x = small(), batch()
    expected, _ = run(model, x)
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    y = loss_of(model, x)
    clipper.mask = torch.ones(3, dtype=torch.bool)
    assert_raises(ShapeError, r"mask must be \(5,\)", y.backward)
    clipper.mask = None
    loss_of(model, x).backward()
    clipper.detach()
    assert_same(gradient_of(model), expected)


class OtherBatchNorm(nn.BatchNorm1d):
    """By the batch's own mean, in eval mode too."""

    def forward(self, x):
        return x - x.mean(0)


def replaced(layer):
    layer.forward = lambda x: x - x.mean(0)
    return layer


@pytest.mark.parametrize(("layer", "match"), [
    (lambda: nn.BatchNorm2d(3), r"layers\.0 \(BatchNorm2d\): it mixes the examples.*GroupNorm"),
    (lambda: nn.BatchNorm1d(3, affine=False), "it mixes the examples"),
    (lambda: nn.SyncBatchNorm(3), "it mixes the examples"),
    (lambda: nn.BatchNorm1d(3).eval(), r"layers\.0 \(BatchNorm1d\): in eval mode it must be frozen"),
    (lambda: nn.BatchNorm1d(3).requires_grad_(False), "it mixes the examples"),
    (lambda: nn.BatchNorm1d(3, track_running_stats=False).eval().requires_grad_(False), "it mixes the examples"),
    (lambda: OtherBatchNorm(3).eval().requires_grad_(False), "it mixes the examples"),
    (lambda: replaced(nn.BatchNorm1d(3).eval().requires_grad_(False)), "it mixes the examples"),
    (lambda: nn.InstanceNorm1d(3, track_running_stats=True), "track_running_stats=False"),
    (lambda: nn.Embedding(4, 3, max_norm=1.0), "max_norm"),
    (lambda: nn.Embedding.from_pretrained(torch.ones(4, 3), max_norm=1.0), "max_norm"),  # frozen
    (lambda: nn.EmbeddingBag(4, 3, max_norm=1.0).requires_grad_(requires_grad=False), "max_norm"),
    (lambda: nn.Embedding(4, 3, sparse=True), "sparse=False"),
    (lambda: nn.Embedding(4, 3, scale_grad_by_freq=True), "scale_grad_by_freq"),
    (lambda: nn.Linear(3, 4, dtype=torch.complex64), r"layers\.0\.weight is torch.complex64, .*view_as_complex"),
    (lambda: nn.ParameterList([torch.zeros(3, dtype=torch.complex128)]), r"layers\.0\.0 is torch.complex128"),
    (lambda: nn.MultiheadAttention(4, 2), "batch_first=True"),
    (lambda: nn.MultiheadAttention(4, 2, batch_first=True, add_bias_kv=True), "bias_k"),
    (lambda: nn.utils.spectral_norm(nn.Conv1d(3, 3, 1)), r"its weight is computed from weight_orig"),
])  # fmt: skip
def test_layers_that_cannot_be_exact_are_refused_by_name(layer, match):
    model = Chain(layer())
    assert_raises(UnsupportedCase, f"(?s){match}", PerExampleClipper, model, max_grad_norm=1.0)


def test_every_refusal_is_in_one_message():
    with pytest.raises(UnsupportedCase) as caught:
        PerExampleClipper(Chain(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.MultiheadAttention(4, 2)), max_grad_norm=1.0)
    assert "layers.0" in str(caught.value)
    assert "layers.2" in str(caught.value)
    assert "layers.1" not in str(caught.value)


def test_a_frozen_layer_of_an_unknown_kind_is_none_of_its_business():
    model = Chain(nn.Linear(3, 3), nn.PReLU().requires_grad_(False))
    check(model, [torch.randn(3, 4, 3)], loss_of)


class Centred(nn.Linear):
    """Its weight is computed from another parameter; torch's forward serves it."""

    weight = property(lambda self: self.raw - self.raw.mean())

    def __init__(self):
        super().__init__(3, 3)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())


class Constant(nn.Linear):
    """Its weight is a plain tensor, which a hook computes."""

    def __init__(self):
        super().__init__(3, 3)
        self.raw = nn.Parameter(self.weight.detach())
        del self.weight
        self.register_forward_pre_hook(lambda module, _: setattr(module, "weight", module.raw.tanh()))


@pytest.mark.parametrize("layer", [Centred, Constant])
def test_a_weight_that_is_computed_from_a_parameter_is_refused(layer):
    """The layer's rule would give the computed weight's gradient to nobody."""
    model, x = Chain(layer(), nn.Linear(3, 2)), torch.randn(4, 5, 3)
    model(x)
    PerExampleClipper(model, max_grad_norm=1.0)
    with torch.no_grad():
        model(x)
    with pytest.raises(
        UnsupportedCase, match=rf"layers\.0\.raw is not used by the forward pass of its {layer.__name__}"
    ):
        model(x)


def test_examples_must_come_first():
    model = module(lambda m, x: m.inner(x.transpose(0, 1)), inner=nn.Linear(3, 2))
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(ShapeError, "the batch of 4 examples", model, torch.randn(4, 5, 3))


def test_a_part_of_the_model_called_after_the_whole():
    """Its input alone says how many examples there are: one is not taken for a piece that all of four share."""
    model = Chain(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    clipper = PerExampleClipper(model, max_grad_norm=1e-3)
    x = torch.randn(4, 5, 3, dtype=torch.float64)
    loss_of(model, x).backward()
    model.zero_grad()
    y = model.layers[0](x[:1])
    assert y.shape == (1, 5, 4)
    y.sin().sum().backward()
    assert clipper.norms.shape == (1,)
    total = torch.cat([each.grad.flatten() for each in model.layers[0].parameters()])
    assert float(total.norm()) == pytest.approx(1e-3)


def test_a_forward_pass_that_fails_is_over():
    model = Chain(nn.Linear(3, 4), nn.Linear(5, 2))
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(RuntimeError, None, model, torch.randn(4, 5, 3))
    assert clipper.batch is None


def test_what_is_unfrozen_later_is_not_left_unclipped():
    model, x = small(), batch()
    model.layers[1].requires_grad_(False)
    PerExampleClipper(model, max_grad_norm=1.0)
    loss_of(model, x).backward()
    model.layers[1].requires_grad_(True)
    with pytest.raises(UnsupportedCase, match=r"layers\.1\.weight takes gradients, but did not"):
        loss_of(model, x).backward()


def test_a_layer_put_in_later_is_not_left_unclipped():
    model, x = small(), batch()
    PerExampleClipper(model, max_grad_norm=1.0)
    model.layers[3] = nn.Linear(6, 2).double()
    assert_raises(UnsupportedCase, r"layers\.3\.weight takes gradients", lambda: loss_of(model, x).backward())


@modes
def test_what_is_frozen_later_gets_no_gradient(norms):
    model, x = small(), batch()
    clipper = PerExampleClipper(model, max_grad_norm=1.0, norms=norms)
    model.layers[1].requires_grad_(False)
    loss_of(model, x).backward()
    clipper.detach()
    assert all(each.grad is None for each in model.layers[1].parameters())
    expected, _ = clipped(per_example(model, [x], loss_of), 1.0)
    assert_same(gradient_of(model), expected)


def test_announcing_checks_where_the_examples_are():
    """For functions that see (examples, ...) and feed a sink of their own accord."""

    class Announces(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 2, bias=False)
            self.seen = None

        def forward(self, x, turned):
            self.seen = announce(sink_of(self.inner.weight), x.transpose(0, 1) if turned else x, self.inner.weight)
            return x

    model = Announces()
    PerExampleClipper(model, max_grad_norm=1.0)
    model(torch.randn(4, 5, 3), False)
    assert model.seen == 4
    assert_raises(ShapeError, r"got \(5, 4, 3\).*batch of 4 examples", model, torch.randn(4, 5, 3), True)


def test_sequences_that_are_not_of_the_batch_are_refused():
    model = Chain(nn.LSTM(3, 4))
    PerExampleClipper(model, max_grad_norm=1.0)
    with pytest.raises(ShapeError, match=r"LSTM.* got \(2, 5, 3\), whose first dimension is not the batch of 5"):
        model(torch.randn(5, 2, 3))
