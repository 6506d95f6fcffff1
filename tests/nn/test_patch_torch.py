"""patch on models of torch.nn's layers: parity, what is left alone, copies, unpatch; transformers is not needed."""

import copy
import inspect
import io
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accelerant as acl
from accelerant.errors import ConfigError
from accelerant.runtime.ledger import ledger
from accelerant.runtime.streams.graphs import ahead_of_capture
from refusals import assert_raises

TIGHT = {"rtol": 2e-5, "atol": 2e-6}


class Net(nn.Module):
    """Some of each layer that patch replaces, without dropout."""

    def __init__(self, *, norm_first=True, batch_first=True, activation="gelu", device=None):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(20, 16, padding_idx=3)
        self.body = nn.Sequential(
            nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU("tanh"), nn.Linear(32, 16), nn.SiLU(), nn.RMSNorm(16)
        )
        options = {"dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first, "activation": activation}
        layer = nn.TransformerEncoderLayer(16, 4, 24, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24, **options), 1)
        self.head = nn.Sequential(nn.Linear(16, 5), nn.LogSoftmax(-1))
        self.weights = nn.Softmax(dim=1)
        self.dropout = nn.Dropout(0.0)
        self.losses = nn.ModuleList(
            (nn.CrossEntropyLoss(), nn.MSELoss(), nn.L1Loss(), nn.BCELoss(), nn.BCEWithLogitsLoss())
        )
        self.batch_first = batch_first
        self.to(device)

    def forward(self, tokens, targets):
        x = self.dropout(self.body(self.table(tokens)))
        padding = torch.zeros(tokens.shape, dtype=torch.bool, device=tokens.device)
        padding[0, -2:] = True
        x = x if self.batch_first else x.transpose(0, 1)
        memory = self.encoder(x, src_key_padding_mask=padding)
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.decoder(x, memory, tgt_mask=later, memory_key_padding_mask=padding)
        x = x if self.batch_first else x.transpose(0, 1)
        z = self.head(x) * self.weights(x)[..., :5]
        entropy, squared, absolute, binary, logits = self.losses
        goal = F.one_hot(targets, 5).to(z.dtype)
        loss = entropy(z.flatten(0, 1), targets.flatten()) + squared(z, goal) + absolute(z, goal)
        return loss + binary(z.sigmoid(), goal) + logits(z, goal), z


def inputs(device=None):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(high, (3, 6), generator=generator).to(device) for high in (20, 5)]


def outcome(model, *given):
    model.zero_grad()
    loss, z = model(*given)
    loss.backward()
    return [loss.detach(), z.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


def same(found, wanted, **tolerance):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or {"rtol": 0, "atol": 0}))


@pytest.mark.parametrize("activation", ["gelu", "relu"])
@pytest.mark.parametrize(("norm_first", "batch_first"), [(True, True), (False, False)])
def test_outputs_gradients_and_state_stay_until_unpatch_restores_all(norm_first, batch_first, activation):
    model = Net(norm_first=norm_first, batch_first=batch_first, activation=activation)
    before, state = outcome(model, *inputs()), model.state_dict()
    report = acl.nn.patch(model)
    assert list(model.state_dict()) == list(state)
    assert all(x.data_ptr() == y.data_ptr() for x, y in zip(model.state_dict().values(), state.values(), strict=True))
    ledger().reset()
    same(outcome(model, *inputs()), before, **TIGHT)
    counts = {
        "embedding": 1, "mlp": 1 + 3 * (activation == "gelu"), "norm": 9, "activation": 2, "attention": 4,
        "residual": 3, "dropout": 11, "softmax": 2, "loss": 5,
    }  # fmt: skip
    assert report.counts == counts
    ran = {row["op"] for row in ledger().to_dict()["ops"]}
    assert {
        "embedding_fwd", "linear_gelu_fwd", "attention_masked_fwd", "add_layer_norm_fwd", "rms_norm_fwd", "silu_fwd",
        "softmax_fwd", "log_softmax_fwd", "cross_entropy_fwd", "mse_loss_fwd", "l1_loss_fwd",
        "binary_cross_entropy_fwd", "binary_cross_entropy_with_logits_fwd",
    } <= ran  # fmt: skip
    assert not report.fallbacks
    with torch.no_grad():
        z = model.eval()(*inputs())[1]
        torch.testing.assert_close(z, before[1], **TIGHT)
    acl.nn.unpatch(model.train())
    same(outcome(model, *inputs()), before)
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_every_leaf_is_in_the_report_once():
    model = Net()
    report = acl.nn.patch(model)
    named = [each.name for each in (*report.changed, *report.left)]
    leaves = {name for name, module in model.named_modules() if next(module.children(), None) is None}
    assert leaves <= set(named)
    assert len({(each.name, each.kind) for each in report.changed}) == len(report.changed)
    assert {each.reason for each in report.left} == {"its product is the vendor library's, which Accelerant uses too"}
    assert "dropout draws other random numbers" not in str(report)  # p is 0
    assert acl.nn.patch(model) is report


def test_copies_pickles_and_files(tmp_path):
    model = Net()
    acl.nn.patch(model)
    found = outcome(model, *inputs())
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert twin.body.forward.__self__ is twin.body
        same(outcome(twin, *inputs()), found)
        acl.nn.unpatch(twin)
        same(outcome(twin, *inputs()), found, **TIGHT)
        assert "forward" in model.body.__dict__
    plain = Net()
    plain.load_state_dict(model.state_dict())


class Inner(nn.Module):
    """A module of the user around some of torch's, in which torch.fx traces the Sequential."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 8), nn.GELU("tanh"), nn.Linear(8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of x and the body's result."""
        return x + self.body(x)


CALLERS = {
    "script": lambda model, x: torch.jit.script(model)(x),
    "trace": lambda model, x: torch.jit.trace(model, x)(x),
    "fx": lambda model, x: torch.fx.symbolic_trace(model)(x),
    "functional_call": lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)),
    "export": lambda model, x: torch.export.export(model, (x,)).module()(x),
    "strict export": lambda model, x: torch.export.export(model, (x,), strict=True).module()(x),
}
SLOW = pytest.mark.slow  # torch imports its compiler
CALLER = pytest.mark.parametrize(
    "caller", [pytest.param(name, marks=SLOW if "export" in name else ()) for name in CALLERS]
)
MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU()),
    "user": Inner,
    "encoder": lambda: nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, activation="gelu"),
}


@pytest.mark.sample(3, 1)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated:DeprecationWarning")
@pytest.mark.parametrize("graph", [None, True])
@CALLER
@pytest.mark.parametrize("name", MODULES)
def test_what_reads_the_forward_finds_torchs(name, caller, graph):
    if (name, caller) == ("encoder", "fx"):
        pytest.skip("torch.fx cannot trace torch's own encoder")
    model, x = MODULES[name](), torch.randn(2, 3, 16)
    wanted = model(x)
    functions = {path: module.forward for path, module in model.named_modules()}
    acl.nn.patch(model, graph=graph)
    result = CALLERS[caller](model, x)
    torch.testing.assert_close(result, wanted, **TIGHT)
    assert model(x).grad_fn is not None
    for path, module in model.named_modules():
        ours, own = module.forward, functions[path]
        assert inspect.signature(ours) == inspect.signature(own)
        assert (ours.__name__, ours.__qualname__, ours.__doc__) == (own.__name__, own.__qualname__, own.__doc__)
        assert inspect.getsource(ours) == inspect.getsource(own)
        assert inspect.ismethod(ours)
        assert inspect.iscode(ours.__code__)


def test_accelerate_in_mixed_precision_and_the_way_back():
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # another test's Accelerator has float32
    model, x = MODULES["sequential"](), torch.randn(2, 3, 16)
    wanted = model(x)
    acl.nn.patch(model)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    assert accelerator.prepare(model)(x).dtype == torch.float32
    assert_raises(ConfigError, "was replaced after patch", acl.nn.unpatch, model)
    accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    torch.testing.assert_close(model(x), wanted, **TIGHT)
    acl.nn.unpatch(model)
    assert "forward" not in model.__dict__


@pytest.mark.slow
def test_an_exported_program_needs_no_accelerant():
    model, x = MODULES["encoder"](), torch.randn(2, 3, 16)
    acl.nn.patch(model)
    program = torch.export.export(model, (x,))
    assert not [str(node.target) for node in program.graph.nodes if "accelerant" in str(node.target)]


class OtherNorm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x) + 1


def test_hooks_parametrizations_and_subclasses_are_left_and_named():
    model = nn.Sequential(
        nn.LayerNorm(8), OtherNorm(8), nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.SiLU(inplace=True),
        nn.LayerNorm((3, 8)), nn.Softmax(), nn.Embedding(4, 8, max_norm=1.0), nn.MultiheadAttention(8, 2, kdim=4),
        nn.CrossEntropyLoss(weight=torch.ones(8)), nn.Dropout(0.5, inplace=True),
    )  # fmt: skip
    seen = []
    model[0].register_forward_hook(lambda *_: seen.append("norm"))
    torch.nn.utils.parametrizations.weight_norm(model[4], "weight", dim=0)
    model[3].forward = lambda x: x * 2
    left = {each.name: each.reason for each in acl.nn.patch(model).left}
    wanted = {
        "0": "has hooks", "1": "is a subclass of LayerNorm", "2": "vendor library", "3": "was replaced by another",
        "4": "has parametrizations", "5": "writes over its input", "6": "normalizes over (3, 8)", "7": "has no dim",
        "8": "has max_norm=1.0", "9": "another width", "10": "weights of classes", "11": "writes over its input",
    }  # fmt: skip
    assert all(text in left[name] for name, text in wanted.items())
    x = torch.randn(2, 8)
    torch.testing.assert_close(model[0](x), F.layer_norm(x, (8,)))
    assert seen == ["norm"]


@pytest.mark.parametrize("part", ["body.1", "body.2", "encoder.layers.0.linear1", "encoder.layers.1.norm2"])
def test_hooks_of_layers_inside_a_fused_one_run(part):
    model = Net()
    before = outcome(model, *inputs())
    acl.nn.patch(model)
    seen = []
    model.get_submodule(part).register_forward_hook(lambda *_: seen.append(part))
    same(outcome(model, *inputs()), before, **TIGHT)
    assert seen == [part]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_default_eps_of_rms_norm_is_torchs(dtype):
    norm, x = nn.Sequential(nn.RMSNorm(64)).to(dtype), torch.linspace(-0.02, 0.02, 64).to(dtype)[None]
    wanted = norm(x)
    acl.nn.patch(norm)
    torch.testing.assert_close(norm(x), wanted)


def test_a_wrapper_undoes_the_patch_of_what_it_wraps():
    model = Net()
    acl.nn.patch(model)
    acl.nn.unpatch(torch.compile(model, backend="eager"))
    assert acl.nn.patch(model).counts["attention"] == 4


def test_a_sequence_whose_first_layer_takes_a_list():
    class Joined(nn.Module):
        def forward(self, parts):
            return torch.cat(parts, -1)

    net, parts = nn.Sequential(Joined(), nn.Linear(8, 4), nn.GELU()), [torch.ones(2, 4)] * 2
    wanted = net(parts)
    acl.nn.patch(net)
    torch.testing.assert_close(net(parts), wanted)


def test_options_and_what_cannot_be_patched():
    report = acl.nn.patch(Net(), loss=False, embedding=False)
    assert not {"loss", "embedding"} & report.counts.keys()
    assert {"patch(model, loss=False)", "patch(model, embedding=False)"} <= {each.reason for each in report.left}
    with pytest.warns(UserWarning, match=r"patch changed nothing in Linear"):
        acl.nn.patch(nn.Linear(2, 2))
    assert_raises(ConfigError, r"patch takes a torch\.nn\.Module, got int", acl.nn.patch, 3)


def test_transformers_need_not_be_installed(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    model = Net()
    assert acl.nn.patch(model).counts["attention"] == 4
    acl.nn.unpatch(model)


def test_calls_that_torch_keeps_are_counted_with_the_reason():
    layer = nn.MultiheadAttention(16, 4, dropout=0.1, batch_first=True)
    x = torch.randn(2, 5, 16)
    report = acl.nn.patch(layer)
    y, weights = layer.eval()(x, x, x)
    assert weights.shape == (2, 5, 5)
    torch.testing.assert_close(layer(x, x, x, need_weights=False)[0], y, **TIGHT)
    layer.train()(x, x, x, need_weights=False)
    assert report.fallbacks == {
        "need_weights=True: torch's alone returns the weights": 1, "dropout of the attention weights (p = 0.1)": 1
    }  # fmt: skip
    assert "attention by torch, 1 times: need_weights" in str(report)


@pytest.mark.parametrize("separate", [False, True], ids=["self", "cross"])
def test_masks_of_attention(separate):
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4)
    q = torch.randn(5, 2, 16)
    k = torch.randn(7, 2, 16) if separate else q
    keys = len(k)
    hidden, numbers = torch.rand(5, keys) < 0.3, torch.randn(8, 5, keys)
    hidden[:, 0] = False
    padding = torch.zeros(2, keys, dtype=torch.bool)
    padding[1, -2:] = True
    cases = [
        {}, {"attn_mask": hidden}, {"attn_mask": numbers}, {"key_padding_mask": padding},
        {"attn_mask": hidden, "key_padding_mask": padding}, {"attn_mask": numbers, "key_padding_mask": padding.float()},
    ]  # fmt: skip
    wanted = [layer(q, k, k, need_weights=False, **case)[0] for case in cases]
    report = acl.nn.patch(layer)
    for case, each in zip(cases, wanted, strict=True):
        torch.testing.assert_close(layer(q, k, k, need_weights=False, **case)[0], each, **TIGHT)
    assert not report.fallbacks


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_options_of_losses_and_layers_are_those_of_torch(reduction):
    generator = torch.Generator().manual_seed(2)
    z, y = torch.randn(6, 5, generator=generator), torch.rand(6, 5, generator=generator)
    classes, tokens = torch.tensor([0, 2, 4, 2, 1, 3]), torch.tensor([[0, 3], [2, 3]])
    weight = torch.rand(5, generator=generator)
    cases = [
        *((nn.CrossEntropyLoss(**options, reduction=reduction), z, classes) for options in (
            {}, {"ignore_index": 2}, {"label_smoothing": 0.3}, {"ignore_index": 2, "label_smoothing": 0.3},
            {"weight": weight}, {"weight": weight, "ignore_index": 2},
        )),
        (nn.MSELoss(reduction=reduction), z, y), (nn.L1Loss(reduction=reduction), z, y),
        (nn.BCELoss(reduction=reduction), z.sigmoid(), y), (nn.BCELoss(weight, reduction=reduction), z.sigmoid(), y),
        (nn.BCEWithLogitsLoss(weight, reduction=reduction, pos_weight=2 * weight), z, y),
        (nn.BCEWithLogitsLoss(reduction=reduction, pos_weight=2 * weight), z, y),
        (nn.LayerNorm(5, eps=0.5), z), (nn.LayerNorm(5, bias=False), z), (nn.RMSNorm(5, eps=0.5), z),
        (nn.GELU("tanh"), z), (nn.GELU(), z), (nn.SiLU(), z), (nn.Softmax(0), z), (nn.LogSoftmax(0), z),
        (nn.Embedding(4, 3, padding_idx=3), tokens), (nn.Embedding(4, 3, max_norm=0.5), tokens),
        (nn.Embedding(4, 3, scale_grad_by_freq=True), tokens),
    ]  # fmt: skip
    for module, *given in cases:
        plain = copy.deepcopy(module)
        acl.nn.patch(module)
        found = []
        for each in (module, plain):
            inputs = [x.clone().requires_grad_(x.is_floating_point()) for x in given]
            result = each(*inputs)
            (result * torch.linspace(1, 2, result.numel()).view(result.shape)).sum().backward()
            found.append([result, *(x.grad for x in (*inputs, *each.parameters()))])
        for one, two in zip(*found, strict=True):
            torch.testing.assert_close(one, two, **TIGHT, msg=lambda text, plain=plain: f"{plain}: {text}")


DTYPES = list(dict.fromkeys(each for each in vars(torch).values() if isinstance(each, torch.dtype)))


LAYERS = {
    "layer_norm": lambda dtype: nn.LayerNorm(8, dtype=dtype), "rms_norm": lambda dtype: nn.RMSNorm(8, dtype=dtype),
    "mlp": lambda dtype: nn.Sequential(nn.Linear(8, 4, dtype=dtype), nn.GELU()), "dropout": lambda _: nn.Dropout(0.0),
    "attention": lambda dtype: nn.MultiheadAttention(8, 2, dtype=dtype), "embedding": lambda _: nn.Embedding(9, 4),
    "silu": lambda _: nn.SiLU(), "gelu": lambda _: nn.GELU(), "softmax": lambda _: nn.Softmax(-1),
    "log_softmax": lambda _: nn.LogSoftmax(-1), "mse": lambda _: nn.MSELoss(), "l1": lambda _: nn.L1Loss(),
    "bce": lambda _: nn.BCELoss(), "bce_logits": lambda _: nn.BCEWithLogitsLoss(),
    "ce": lambda _: nn.CrossEntropyLoss(),
}  # fmt: skip


def of_dtype(values, dtype):
    try:
        return values.to(dtype)
    except (RuntimeError, NotImplementedError):  # torch has no cast to packed and quantized ones
        return None


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("layer", LAYERS)
def test_every_dtype_gives_torchs_result_or_error(layer, training):
    """And nothing is silent: what torch serves in our place is in the ledger."""
    values = torch.linspace(-3, 3, 48).view(2, 3, 8)

    def result(module, given, options):
        try:
            y = module(*given, **options)
        except Exception as error:
            return type(error)
        return y[0] if isinstance(y, tuple) else y

    taken = 0
    for dtype in DTYPES:
        x = of_dtype(values, dtype)
        try:
            module = LAYERS[layer](None)
            module = module.to(dtype) if dtype.is_floating_point or dtype.is_complex else module
        except NotImplementedError:
            continue
        if x is None:
            continue
        if isinstance(module, nn.Embedding):
            module = nn.Embedding.from_pretrained(x[0])
            given, options = (torch.tensor([[1, 2], [0, 2]]),), {}
        elif isinstance(module, nn.MultiheadAttention):
            given, options = (x, x, x), {"need_weights": False}
        elif isinstance(module, nn.CrossEntropyLoss):
            given, options = (x[0], torch.tensor([1, 0, 2])), {}
        else:
            given, options = (x, x) if "Loss" in type(module).__name__ else (x,), {}
        module.train(training)
        wanted = result(module, given, options)
        acl.nn.patch(module)
        ledger().reset()
        found = result(module, given, options)
        if isinstance(wanted, type):
            assert found is wanted, dtype
            continue
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        wide = torch.complex128 if dtype.is_complex else torch.float64
        torch.testing.assert_close(found.to(wide), wanted.to(wide), rtol=1e-2, atol=1e-2, equal_nan=True)
        taken += sum(row["count"] for row in ledger().to_dict()["fallbacks"] if row["op"] == "patch")
    assert taken or layer not in ("silu", "dropout", "embedding")


def test_losses_of_other_shapes_are_torchs():
    images, classes = torch.randn(2, 4, 3, 3), torch.randint(4, (2, 3, 3))
    pairs = [(nn.CrossEntropyLoss(), images, classes),
             (nn.CrossEntropyLoss(), images[..., 0, 0], images[..., 1, 1].softmax(1)),
             (nn.BCEWithLogitsLoss(pos_weight=torch.rand(3)), images, images.sigmoid())]  # fmt: skip
    for loss, x, t in pairs:
        wanted = loss(x, t)
        acl.nn.patch(loss)
        torch.testing.assert_close(loss(x, t), wanted, **TIGHT)


def test_dropout_has_its_rate_and_the_report_says_that_numbers_differ():
    layer = nn.Dropout(0.25)
    report = acl.nn.patch(layer)
    assert "note: dropout draws other random numbers than torch's" in str(report)
    y = layer(torch.ones(40_000))
    assert 0.23 < float((y == 0).float().mean()) < 0.27
    assert torch.equal(layer.eval()(y), y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_dtypes_are_torchs(dtype):
    model = Net()
    model.losses[3] = nn.MSELoss()  # autocast refuses BCELoss on a GPU
    found = []
    for _ in range(2):
        with torch.autocast("cpu", dtype):
            loss, z = model(*inputs())
        found.append((loss, z))
        acl.nn.patch(model)
    (loss, z), (ours, zs) = found
    assert (loss.dtype, z.dtype) == (ours.dtype, zs.dtype)
    torch.testing.assert_close(zs, z, rtol=0.05, atol=0.05)


def test_nested_tensors_of_the_encoder_in_evaluation():
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[0, 4:] = True
    x = torch.randn(3, 6, 16)
    with torch.no_grad():
        wanted = model(x, src_key_padding_mask=padding)
        acl.nn.patch(model)
        found = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(found[~padding], wanted[~padding], **TIGHT)


@pytest.mark.slow
def test_compiles_whole():
    model = Net()
    before = outcome(model, *inputs())
    acl.nn.patch(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    loss, z = compiled(*inputs())
    torch.testing.assert_close((loss.detach(), z.detach()), tuple(before[:2]), **TIGHT)


@pytest.mark.gpu
def test_on_a_gpu_our_kernels_run():
    model = Net(device="cuda")
    before = outcome(model, *inputs("cuda"))
    acl.nn.patch(model)
    ledger().reset()
    same(outcome(model, *inputs("cuda")), before, rtol=1e-3, atol=1e-4)  # few elements, by torch's functions
    with ahead_of_capture():
        same(outcome(model, *inputs("cuda")), before, rtol=1e-3, atol=1e-4)
    ran = {row["op"]: row["implementation"] for row in ledger().to_dict()["ops"]}
    for op in ("attention_masked_fwd", "attention_masked_bwd", "mse_loss_fwd", "mse_loss_bwd", "l1_loss_fwd"):
        assert ran[op].startswith("triton")  # float32 attention on sm_90 is that of split products
