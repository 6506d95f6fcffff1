"""Modules with parameters of their own, and results that all examples share: by example, against single examples."""

import copy
import io
import pickle

import pytest
import torch
import torch.nn.functional as F
from clip_checks import Chain, check, loss_of, per_example
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from accelerant import nn as our
from accelerant.errors import ShapeError, UnsupportedCase
from accelerant.nn import GPT, GPTConfig
from accelerant.privacy import dp
from accelerant.privacy.dp.clipping import PerExampleClipper
from modules import module
from refusals import assert_raises


def vision_transformer():
    def block():
        def forward(m, x):
            y = m.norm(x)
            x = x + m.scale(m.attention(y, y, y, need_weights=False)[0])
            return x + m.mlp(m.norm(x)) * m.gamma

        scale = module(lambda m, x: x * m.gamma, gamma=(4,))
        attention = nn.MultiheadAttention(4, 2, batch_first=True)
        mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        return module(forward, norm=nn.LayerNorm(4), attention=attention, mlp=mlp, scale=scale, gamma=(4,))

    def forward(m, x):
        x = m.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((m.cls_token.expand(x.shape[0], -1, -1), x), 1) + m.positions
        return m.head(m.blocks(x)[:, 0])

    layers = {"embed": nn.Conv2d(2, 4, 2, 2), "blocks": nn.Sequential(block(), block()), "head": nn.Linear(4, 3)}
    return module(forward, **layers, cls_token=(1, 1, 4), positions=(1, 5, 4))


def learned_state(m, x):
    y, h = m.rnn(x, m.h.expand(-1, x.shape[0], -1).contiguous())
    z = m.attention(m.queries.expand(x.shape[0], -1, -1), y, y)[0]
    return torch.cat((z.flatten(1), h[0]), 1)


def attends_in_windows(m, x):
    """Windows are rows of the batch, and a table of distances is added to the scores, as in Swin."""
    y = m.layer(x.unflatten(1, (2, 3)).flatten(0, 1)).unflatten(2, (2, 2)).transpose(1, 2)
    bias = m.table[(torch.arange(3)[:, None] - torch.arange(3) + 2).flatten()].unflatten(0, (3, 3)).permute(2, 0, 1)
    y = F.scaled_dot_product_attention(y, y, y, attn_mask=bias[None])
    return y.transpose(1, 2).reshape(x.shape)


def attends_to_own(m, x):
    k = m.layer(x).unflatten(2, (2, 2)).transpose(1, 2)
    return F.scaled_dot_product_attention(m.queries.expand(x.shape[0], -1, -1, -1), k, k).flatten(1)


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def low_rank():
    layer = nn.Linear(4, 3)
    parametrize.register_parametrization(
        layer, "weight", module(lambda m, weight: weight + m.a @ m.b, a=(3, 1), b=(1, 4))
    )
    return layer


def tied(forward):
    model = module(forward, layer=nn.Linear(4, 4), bias=(4,))
    model.w = model.layer.weight
    return model


def norm_of_own(m, x):
    return F.layer_norm(x, (4,), m.weight, None) * (x.square().mean(-1, keepdim=True) + 0.1).rsqrt() * m.scale


CASES = {
    "scale": (lambda: module(lambda m, x: m.a(x) * m.scale, a=nn.Linear(4, 4), scale=(4,)), (5, 3, 4)),
    "vision-transformer": (vision_transformer, (5, 2, 4, 4)),
    "linear": (lambda: module(lambda m, x: F.linear(x, m.weight, m.bias).sin(), weight=(3, 4), bias=(3,)), (5, 2, 4)),
    "low-rank": (
        lambda: module(lambda m, x: m.a(x) + torch.einsum("btk,rk->btr", x, m.A) @ m.B.t(), a=nn.Linear(4, 3),
                       A=(2, 4), B=(3, 2)), (5, 2, 4)),
    "norm": (lambda: module(norm_of_own, weight=(4,), scale=()), (5, 3, 4)),
    "mixture": (
        lambda: module(lambda m, x: sum(w * x**k for k, w in enumerate(m.w[0].softmax(0))) * m.w[1].exp(),
                       w=nn.ParameterList([torch.rand(3), torch.rand(())])), (5, 2, 4)),
    "mapping": (lambda: module(lambda m, x: x @ m.w["a"], w=nn.ParameterDict({"a": torch.rand(4, 2)})), (5, 2, 4)),
    "temperature": (
        lambda: module(lambda m, x: m.a(x) * m.t(x), a=nn.Linear(4, 3), t=module(lambda m, x: m.t.exp(), t=())),
        (5, 2, 4)),
    "shared-rows": (
        lambda: module(lambda m, x: m.a(x) + m.p(x)[0], a=nn.Linear(4, 4),
                       p=module(lambda m, x: m.p[:, : x.shape[1]], p=(1, 6, 4))), (5, 2, 4)),
    "sequence-first": (
        lambda: module(lambda m, x: m.a(x.transpose(0, 1) + m.p).transpose(0, 1), a=nn.Linear(4, 2), p=(3, 1, 4)),
        (5, 3, 4)),
    "tied": (lambda: tied(lambda m, x: m.layer(x) @ m.w + m.bias), (5, 3, 4)),
    "other-name": (lambda: tied(lambda m, x: F.linear(m.layer(x), m.w) + m.bias), (5, 3, 4)),
    "learned-state": (
        lambda: module(learned_state, rnn=nn.GRU(3, 4, batch_first=True), h=(1, 1, 4), queries=(2, 4),
                       attention=nn.MultiheadAttention(4, 1, batch_first=True)), (5, 6, 3)),
    "attention": (lambda: module(attends_to_own, layer=nn.Linear(4, 4), queries=(1, 2, 3, 2)), (5, 6, 4)),
    "windows": (lambda: module(attends_in_windows, layer=nn.Linear(4, 4), table=(5, 2)), (4, 6, 4)),
    "own-kernels": (
        lambda: module(lambda m, x: m.pool(x * m.s), pool=our.MaxPool2d(2), s=(4,)), (5, 2, 4, 4)),
    "prelu": (lambda: Chain(nn.Linear(4, 3), nn.PReLU()), (5, 2, 4)),
    "prelu-channels": (lambda: Chain(nn.Conv1d(4, 3, 1), nn.PReLU(3)), (5, 4, 2)),
    "conv3d": (lambda: Chain(nn.Conv3d(2, 4, (2, 1, 2), stride=(1, 2, 1), padding=1, groups=2)), (4, 2, 3, 4, 3)),
    "conv3d-same": (lambda: Chain(nn.Conv3d(2, 3, 3, padding="same", padding_mode="circular")), (3, 2, 3, 3, 3)),
    "transpose1d": (
        lambda: Chain(nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)), (4, 4, 5)),
    "transpose2d": (lambda: Chain(nn.ConvTranspose2d(4, 2, 3, stride=2, dilation=2, bias=False)), (4, 4, 3, 2)),
    "transpose3d": (lambda: Chain(nn.ConvTranspose3d(2, 3, 2)), (4, 2, 3, 2, 3)),
    "weight-norm": (lambda: Chain(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)), (5, 4)),
    "weight-norm-conv": (lambda: Chain(parametrizations.weight_norm(nn.Conv1d(4, 3, 2), dim=None)), (5, 4, 6)),
    "orthogonal": (lambda: Chain(parametrizations.orthogonal(nn.Linear(4, 4))), (5, 2, 4)),
    "parametrized": (lambda: Chain(low_rank()), (5, 2, 4)),
    "pruned": (lambda: Chain(prune.l1_unstructured(nn.Linear(4, 4), "weight", 3)), (5, 2, 4)),
    "subclass": (lambda: Chain(Doubled(4, 3)), (5, 2, 4)),
    "bilinear": (lambda: module(lambda m, x: m.b(x, x * x), b=nn.Bilinear(4, 4, 3)), (5, 2, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_single_examples(name):
    make, shape = CASES[name]
    check(make(), [torch.randn(shape)], loss_of)


class ScaledEmbedding(nn.Embedding):
    """As BART's: an attribute of its own, and the weight of another layer."""

    def forward(self, tokens):
        return super().forward(tokens) * 3.0


def test_a_tied_layer_whose_forward_calls_its_base_class():
    shared, scaled, head = nn.Embedding(7, 4), ScaledEmbedding(7, 4, padding_idx=1), nn.Linear(4, 7, bias=False)
    scaled.weight = head.weight = shared.weight
    model = module(lambda m, t: m.head(m.scaled(t).tanh()), shared=shared, scaled=scaled, head=head)
    check(model, [torch.randint(7, (4, 5))], loss_of)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_weight_norm_by_hooks():
    model = Chain(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2))
    check(model, [torch.randn(5, 2, 4)], loss_of)
    assert model.layers[0].weight.shape == (3, 4)


@pytest.mark.parametrize("name", ["vision-transformer", "tied", "weight-norm", "transpose1d"])
def test_clipping_by_layer(name):
    """Each layer's part has its own bound; the sum of squares of the parts' bounds is the whole's."""
    make, shape = CASES[name]
    model, x = make().double(), torch.randn(shape, dtype=torch.float64)
    clipper = PerExampleClipper(model, max_grad_norm=1e-2, clipping="per_layer", loss_reduction="sum")
    loss_of(model, x[:1]).backward()
    parts = {}
    for parameter_name, parameter in clipper.parameters:
        parts.setdefault(parameter_name.rpartition(".")[0], []).append(parameter.grad.flatten())
    bound = 1e-2 / len(parts) ** 0.5
    for each in parts.values():
        assert float(torch.cat(each).norm()) == pytest.approx(bound, rel=1e-6)


@pytest.mark.parametrize("name", ["vision-transformer", "scale", "prelu", "conv3d", "weight-norm", "low-rank"])
def test_autocast(name):
    make, shape = CASES[name]
    model, x = make(), torch.randn(shape)

    def loss(model, rows):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(model, rows).float()

    rows = per_example(model, [x], loss)
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    loss(model, x).backward()
    torch.testing.assert_close(clipper.norms.double(), rows.norm(dim=1), rtol=3e-2, atol=0)
    assert all(each.grad.dtype == torch.float32 for each in model.parameters())


def test_dropout_is_drawn_for_each_example_and_the_forward_pass_is_that_of_the_model():
    model = module(lambda m, x: F.dropout(x * m.scale, 0.5), scale=(4,)).double()
    x = torch.randn(6, 8, 4, dtype=torch.float64)
    clipper = PerExampleClipper(model, max_grad_norm=1e9, loss_reduction="sum")
    y = model(x)
    y.sum().backward()
    rows = (y.detach() / model.scale.detach()).sum(1)  # what was kept of the input
    torch.testing.assert_close(clipper.norms, rows.norm(dim=1))
    torch.testing.assert_close(model.scale.grad, rows.sum(0))
    kept = (y != 0).flatten(1).double()
    assert not torch.equal(kept[0], kept[1])


# --- what all examples share -----------------------------------------------------------------------------------------
class Positions(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.table, self.places, self.out = nn.Embedding(7, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.use = use

    def forward(self, tokens):
        B, T = tokens.shape
        return self.out(self.use(self.table(tokens), self.places, B, T))


USES = {
    "added": lambda h, places, B, T: h + places(torch.arange(T)),
    "added-first": lambda h, places, B, T: places(torch.arange(T)) + h,
    "with-a-dimension": lambda h, places, B, T: h + places(torch.arange(T))[None],
    "of-one-row": lambda h, places, B, T: h + places(torch.arange(T)[None]),
    "one row, repeated": lambda h, places, B, T: h * places(torch.arange(T)[None]).repeat(B, 1, 1),
    "repeated": lambda h, places, B, T: h * places(torch.arange(T)).unsqueeze(0).repeat(B, 1, 1),
    "concatenated": lambda h, places, B, T: torch.cat((h, places(torch.arange(T)).expand(B, -1, -1)), 1),
    "normalised": lambda h, places, B, T: h + F.layer_norm(places(torch.arange(T)), (4,)),
    "reversed": lambda h, places, B, T: h + places(torch.arange(T - 1, -1, -1)),
    "later": lambda h, places, B, T: h + places(torch.arange(2, T + 2)),
}


@pytest.mark.sample(3, 1)
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(("B", "T"), [(4, 5), (5, 5), (5, 1)])
def test_positions(use, B, T):
    """Also of a batch with as many examples as positions; other batches come before and after it."""
    model = Positions(USES[use])
    check(model, [torch.randint(7, (B, T))], loss_of)
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    for count in (4, B, 6):
        x = torch.randint(7, (count, T))
        plain = copy.deepcopy(model)
        loss_of(model, x).backward()
        rows = per_example(plain, [x], loss_of)
        torch.testing.assert_close(clipper.norms.double(), rows.norm(dim=1))


def test_a_table_of_distances():
    def use(h, places, B, T):
        return h + places((torch.arange(T)[:, None] - torch.arange(T)).abs()).mean(1)

    check(Positions(use), [torch.randint(7, (4, 5))], loss_of)


def test_a_token_for_each_example_in_their_order():
    """(0, 1, 2, ...) as an input is one token for each example, not a position."""
    model = module(lambda m, x: m.table(x[:, 0]), table=nn.Embedding(5, 3))
    check(model, [torch.arange(5)[:, None]], loss_of)
    check(Chain(nn.Embedding(5, 3)), [torch.arange(5)], loss_of)


def test_a_value_that_a_layer_returns_for_all_examples():
    model = module(lambda m, x: m.a(x) * m.t.value(), a=nn.Linear(4, 3), t=Value())
    check(model, [torch.randn(5, 2, 4)], loss_of)


class Value(nn.Module):
    def __init__(self):
        super().__init__()
        self.t = nn.Parameter(torch.tensor(0.3))

    def forward(self):
        return self.t.exp()

    def value(self):
        return self()


@pytest.mark.sample(3)
@pytest.mark.slow
@pytest.mark.parametrize("use", ["added", "with-a-dimension", "reversed", "scale", "temperature"])
def test_torch_compile(use):
    """The first pass of the model is not compiled, later ones are where they need no region."""
    if use in USES:
        model, shape, x = Positions(USES[use]), (5, 5), torch.randint(7, (5, 5))
    else:
        model, shape = CASES[use][0](), CASES[use][1]
        x = torch.randn(shape)
    plain = copy.deepcopy(model)
    torch._dynamo.reset()
    clipper = PerExampleClipper(model, max_grad_norm=1.0)
    compiled = torch.compile(model, backend="aot_eager")
    for rows in (4, 5, 3):
        loss_of(compiled, x[:rows]).backward()
        norms = per_example(plain, [x[:rows]], loss_of).norm(dim=1)
        torch.testing.assert_close(clipper.norms.double(), norms, rtol=1e-4, atol=0)


# --- refusals --------------------------------------------------------------------------------------------------------
def keeps(m, x):
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return (x - m.mean) * m.scale


def keeps_an_attribute(m, x):
    m.last = x * m.scale
    return m.last


def writes(m, x):
    y = torch.zeros(x.shape)
    y[:] = x * m.scale
    return y


@pytest.mark.parametrize(("forward", "match"), [
    (lambda m, x: (x - x.mean(0)) * m.scale, "is not that of each by itself.*must not mix them"),
    (lambda m, x: x.flip(0) * m.scale, "is not that of each by itself.*must not mix them"),
    (lambda m, x: F.dropout(x, 0.5, m.training) * m.scale - x.mean(0),
     "is not that of each by itself.*must not mix them"),
    (keeps, "keeps in mean what it computed from the examples"),
    (keeps_an_attribute, "keeps in last what it computed"),
    (writes, "cannot run for each example by itself"),
    (lambda m, x: x * m.scale if x.sum().item() else x, r"cannot run for each example by itself.*item\(\)"),
    (  # torch 2.11's own refusal names what checkpoint() calls
        lambda m, x: checkpoint(lambda y: (y * m.scale).sin(), x, use_reentrant=False),
        r"checkpoint\(\), or other|cannot run for each example by itself.*_NoopSaveInputs",
    ),
    (lambda m, x: x, "scale is not used by the forward pass of its Own"),
    (lambda m, x: x * next(m.parameters()), "scale is not used by the forward pass of its Own"),
])  # fmt: skip
def test_what_is_not_of_each_example_by_itself_is_refused_by_name(forward, match):
    model = module(forward, scale=(4,))
    model.register_buffer("mean", torch.zeros(4), persistent=False)
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(UnsupportedCase, f"(?s){match}", model, torch.randn(5, 3, 4))
    assert torch.equal(model.mean, torch.zeros(4))


def test_other_refusals():
    with pytest.raises(UnsupportedCase, match=r"ParameterList.*it has no forward"):
        PerExampleClipper(nn.ParameterList([torch.zeros(3)]), max_grad_norm=1.0)
    model = module(lambda m, x: m.rnn(x * m.s)[0], rnn=nn.GRU(3, 4), s=(3,))
    PerExampleClipper(model, max_grad_norm=1.0)
    with pytest.raises(UnsupportedCase, match=r"GRU\(3, 4\) is called where modules with parameters of their own"):
        model(torch.randn(5, 2, 3))
    model = Positions(lambda h, places, B, T: USES["one row, repeated"](h, places, B, T) if h.sum().item() else h)
    PerExampleClipper(model, max_grad_norm=1.0)
    with pytest.raises(UnsupportedCase, match=r"then the model raised: The size of tensor.*item\(\)"):
        model(torch.randint(7, (4, 5)))
    with pytest.raises(UnsupportedCase, match=r"0 \(EmbeddingBag\): sparse gradients are not made"):
        PerExampleClipper(nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True)), max_grad_norm=1.0)


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_distances_of_as_many_positions_as_examples_are_shared(rows):
    """As those of T5: an Embedding of (T, T), for as many examples."""

    def relative(m, x):
        places = torch.arange(x.shape[1])
        bias = m.table(places[None] - places[:, None] + 4).permute(2, 0, 1)[None]
        return m.last(((x @ x.mT)[:, None] + bias).softmax(-1) @ x[:, None])

    model = module(relative, table=nn.Embedding(9, 2), last=nn.Linear(3, 4))
    check(model, [torch.randn(rows, 4, 3)], loss_of)


def test_a_layer_may_be_dropped_at_random_for_all_examples():
    def forward(m, x):
        drawn = [torch.rand([]), torch.rand(()), torch.randn([])]
        return x * m.scale if all(each < 9 for each in drawn) else x

    check(Chain(nn.Linear(4, 4), module(forward, scale=(4,))), [torch.randn(5, 3, 4)], loss_of)


def test_examples_in_another_dimension():
    """A module that gets them in dimension 1 runs with the whole model for each example; alone it is refused."""
    inner = module(lambda m, x: x * m.scale, scale=(4,))
    model = module(lambda m, x: m.inner(x.transpose(0, 1)).transpose(0, 1), inner=inner)
    check(model, [torch.randn(5, 3, 4)], loss_of)
    model.forward = lambda x: inner(x.transpose(0, 1)).transpose(0, 1)
    PerExampleClipper(model, max_grad_norm=1.0)
    with pytest.raises(ShapeError, match=r"Own.* got \[\(3, 5, 4\)\], without a first dimension of 5 examples"):
        model(torch.randn(5, 3, 4))


def test_a_number_that_all_examples_share_is_no_result_of_a_model():
    """A loss may use it for several examples, whose gradients would be shared out among all."""
    model = module(lambda m, x: (m.a(x), m.t.exp()), a=nn.Linear(4, 3), t=())
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(UnsupportedCase, "returns a number that all examples share", model, torch.randn(5, 4))


def test_a_loss_that_a_model_returns():
    def loss(m, x):
        return (m.a(x).sin() * m.t.exp()).sum(1).mean()

    model = module(loss, a=nn.Linear(4, 3), t=())
    check(model, [torch.randn(5, 4)], lambda m, x: m(x))
    model = module(lambda m, x: loss(m, x) * x.shape[0], a=nn.Linear(4, 3), t=())
    check(model, [torch.randn(5, 4)], lambda m, x: m(x), reduction="sum")
    model = module(lambda m, x: (m.a(x) * m.t).sum() / (x > 0).sum(), a=nn.Linear(4, 3), t=())  # over all entries
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(UnsupportedCase, "is not that of each by itself", model, torch.randn(5, 4))


def test_a_number_that_a_layer_computes_from_the_batch():
    """A mean over the batch would pass each example's gradient to all; a mask of its own is no mask for the batch."""
    t = module(lambda m, x: (x * m.t).mean(), t=())
    model = module(lambda m, x: m.a(x) * m.t(x), a=nn.Linear(4, 3), t=t)
    PerExampleClipper(model, max_grad_norm=1.0)
    assert_raises(UnsupportedCase, "is not that of each by itself", model, torch.randn(5, 2, 4))

    def masked(m, x):
        return m.attention(x * m.s, x, x, attn_mask=x[0] @ x[0].t())[0]

    model = module(masked, attention=nn.MultiheadAttention(4, 1, batch_first=True), s=())
    PerExampleClipper(model, max_grad_norm=1.0)
    with pytest.raises(UnsupportedCase, match=r"an argument \(3, 3\) of MultiheadAttention has no dimension"):
        model(torch.randn(3, 3, 4))


def test_after_a_refusal_nothing_is_left_over():
    """No substitute stays in the module, no region runs on, and the next pass counts once."""
    model = module(lambda m, x: (x * m.scale) if x.shape[1] == 3 else x.sum().item() * m.scale, scale=(4,)).double()
    clipper = PerExampleClipper(model, max_grad_norm=1.0, loss_reduction="sum")
    assert_raises(UnsupportedCase, "each example by itself", model, torch.randn(5, 2, 4, dtype=torch.float64))
    assert type(model._parameters) is dict
    x = torch.randn(5, 3, 4, dtype=torch.float64)
    model(x).sum().backward()
    torch.testing.assert_close(clipper.norms, x.sum(1).norm(dim=1))
    assert torch._C._functorch.maybe_current_level() is None


def test_a_second_backward_pass():
    model = module(lambda m, x: x * m.scale, scale=(4,))
    PerExampleClipper(model, max_grad_norm=1.0)
    model(torch.randn(5, 4))
    loss = model(torch.randn(5, 4)).sum()
    loss.backward(retain_graph=True)
    assert_raises(UnsupportedCase, r"call backward\(\) once", loss.backward)


def test_a_module_in_a_checkpoint():
    def saves(m, x):
        return checkpoint(lambda h: m.b(h.tanh()), m.a(x), use_reentrant=False)

    inner = module(lambda m, x: (m.c(x) * m.s).sin(), c=nn.Linear(4, 4), s=(4,))
    check(module(saves, a=nn.Linear(4, 4), b=inner), [torch.randn(4, 2, 4)], loss_of)


@pytest.mark.parametrize("name", ["vision-transformer", "weight-norm", "prelu", "mixture"])
def test_make_private_and_copies(name):
    """The checks before the first step accept it, a step moves all parameters, and a copy is an ordinary model."""
    make, shape = CASES[name]
    model, x = make(), torch.randn(24, *shape[1:])
    before = [each.detach().clone() for each in model.parameters()]
    private = dp.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.0, delta=1e-5, max_grad_norm=1.0,
        sample_rate=0.5,
    )  # fmt: skip
    for batch in private.batches((x,), steps=2, microbatch=8):
        loss_of(model, batch.tensors[0]).backward()
        private.optimizer.step()
        private.optimizer.zero_grad()
    assert all(not torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    again = copy.deepcopy(model)
    loss_of(again, x).backward()
    assert all(each.grad is not None for each in again.parameters())
    private.detach()
    assert "forward" not in model.__dict__
    torch.testing.assert_close(model(x), again(x))


# --- copies and files of a model are ordinary models ------------------------------------------------------------------
def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


class Own(nn.Linear):
    """A class that says itself what its state is."""

    def __getstate__(self):
        return {**self.__dict__, "told": True}


def seen(module, *_):
    module.calls = getattr(module, "calls", 0) + 1


ways = pytest.mark.parametrize("way", [copy.deepcopy, pickled, saved])


@ways
def test_a_copy_has_nothing_of_the_clipper(way):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(4).eval().requires_grad_(False)
    model, x = Chain(nn.Linear(6, 4), norm, Own(4, 3)), torch.randn(5, 6)
    model.register_forward_pre_hook(seen)  # the user's own goes along
    plain = [set(module.__dict__) for module in copy.deepcopy(model).modules()]
    loss_of(model, x).backward()
    expected = [each.grad.clone() for each in model.parameters() if each.requires_grad]
    model.zero_grad()
    clipper = PerExampleClipper(model, max_grad_norm=1e-3)
    other = way(model)
    assert clipper.norms is None
    other.layers[2].__dict__.pop("told")
    for each, names in zip(other.modules(), plain, strict=True):
        assert set(each.__dict__) - {"told", "calls"} == names - {"told", "calls"}
        assert not each._forward_hooks
        assert not each._forward_hooks_always_called
        assert not each._forward_pre_hooks_with_kwargs
        assert len(each._forward_pre_hooks) == (each is other)
    loss_of(other, x).backward()
    for each, gradient in zip([p for p in other.parameters() if p.requires_grad], expected, strict=True):
        torch.testing.assert_close(each.grad, gradient)
    assert clipper.norms is None
    other.zero_grad()
    again = PerExampleClipper(other, max_grad_norm=1e-3)
    for one, two in ((model, clipper), (other, again)):
        loss_of(one, x).backward()
        assert two.norms is not None
    torch.testing.assert_close(again.norms, clipper.norms)


@ways
def test_a_language_model_s_copy_learns_as_it_did(way):
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=7, context=6, layers=1, heads=2, width=8))
    tokens = torch.randint(7, (2, 6))
    expected = torch.autograd.grad(model.loss(tokens, tokens), list(model.parameters()))
    PerExampleClipper(model, max_grad_norm=1e-3)
    other = way(model)
    assert set(other.__dict__) == set(GPT(model.config).__dict__)
    found = torch.autograd.grad(other.loss(tokens, tokens), list(other.parameters()))
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
