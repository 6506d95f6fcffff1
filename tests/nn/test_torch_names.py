"""The classes that have a name of torch.nn or torch.optim are used as torch's are."""

import copy
import inspect
import pickle

import pytest
import torch
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import accelerant
from accelerant import nn
from accelerant.errors import ConfigError, ShapeError
from refusals import assert_raises

IMAGE, ROWS, SEQUENCES = (2, 4, 9, 11), (3, 5, 8), (5, 2, 8)
CALLS = {
    "linear": ("Linear", (8, 6), {}, ROWS),
    "linear without bias, a single row": ("Linear", (8, 6, False), {}, (8,)),
    "layer norm with bias": ("LayerNorm", (8,), {"eps": 1e-3}, ROWS),
    "layer norm": ("LayerNorm", (8, 1e-3, True, False), {}, ROWS),
    "layer norm of two dimensions": ("LayerNorm", ([5, 8],), {}, ROWS),
    "layer norm without weights": ("LayerNorm", (8,), {"elementwise_affine": False}, ROWS),
    "rms norm": ("RMSNorm", (8,), {}, ROWS),
    "rms norm of two dimensions": ("RMSNorm", ((5, 8), 1e-3), {}, ROWS),
    "rms norm without weights": ("RMSNorm", (8, None, False), {"dtype": torch.float64}, ROWS),
    "convolution": ("Conv2d", (4, 8, 3, 1, 1), {}, IMAGE),
    "same, dilation": ("Conv2d", (4, 6, (3, 5)), {"padding": "same", "dilation": 2}, IMAGE),
    "groups": ("Conv2d", (4, 8, (3, 5), (2, 1), (1, 0), 2, 2, False), {}, IMAGE),
    **{mode: ("Conv2d", (4, 6, 3, 2, (1, 2)), {"padding_mode": mode}, IMAGE) for mode in ("reflect", "circular")},
    "replicate, same": ("Conv2d", (4, 6, (2, 3), 1, "same", 2, 1, True, "replicate"), {}, IMAGE),
    "a single image": ("Conv2d", (4, 6, 3), {"padding": 1, "padding_mode": "circular"}, IMAGE[1:]),
    "max pool": ("MaxPool2d", (2, 2), {}, IMAGE),
    "max pool with all": ("MaxPool2d", (3, 2, 1, 2, True, True), {}, IMAGE),
    "average pool": ("AvgPool2d", (2, 2), {}, IMAGE),
    "average pool with all": ("AvgPool2d", (3, 2, 1, True, False, 5), {}, IMAGE),
    **{f"{name}, {options}": (name, (), {"input_size": 8, "hidden_size": 4, **options}, SEQUENCES)
       for name in ("LSTM", "GRU", "RNN")
       for options in ({}, {"num_layers": 2}, {"num_layers": 2, "batch_first": True, "bidirectional": True},
                       {"bias": False})},
    "relu": ("RNN", (8, 4, 2, "relu", False, True), {}, SEQUENCES),
    "projections": ("LSTM", (8, 4), {"proj_size": 3}, SEQUENCES),
}  # fmt: skip


def tensors(found):
    return [found] if isinstance(found, torch.Tensor) else [each for part in found for each in tensors(part)]


@pytest.mark.parametrize(("name", "args", "options", "shape"), CALLS.values(), ids=CALLS)
def test_a_layer_is_torchs(name, args, options, shape):
    torch.manual_seed(0)
    ours, theirs = (getattr(each, name)(*args, **options) for each in (nn, torch.nn))
    assert isinstance(ours, type(theirs))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape, dtype=options.get("dtype", torch.float32))
    one, two = (x.clone().requires_grad_() for _ in range(2))
    for found, wanted in zip(tensors(ours(one)), tensors(theirs(two)), strict=True):
        torch.testing.assert_close(found, wanted)
        if found.requires_grad:
            found.square().sum().backward(retain_graph=True)
            wanted.square().sum().backward(retain_graph=True)
    for mine, their in zip((one, *ours.parameters()), (two, *theirs.parameters()), strict=True):
        torch.testing.assert_close(mine.grad, their.grad, rtol=1e-4, atol=2e-5)
    assert name == "Linear" or repr(ours) == repr(theirs)


CLASSES = (
    *((torch.nn, nn, name) for name in ("Linear", "LayerNorm", "RMSNorm", "Conv2d", "MaxPool2d", "AvgPool2d")),
    (torch.nn, nn, "MultiheadAttention"), *((torch.optim, nn.optim, name) for name in ("Adam", "AdamW", "SGD")),
)  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours", "name"), CLASSES, ids=lambda each: each if isinstance(each, str) else "")
def test_arguments_have_torchs_names_positions_and_defaults(theirs, ours, name):
    wanted, found = (inspect.signature(getattr(each, name)).parameters for each in (theirs, ours))
    for place, (parameter, of_torch) in enumerate(wanted.items()):
        if parameter not in found and any(each.kind is each.VAR_KEYWORD for each in found.values()):
            continue  # those of AdamW, in Adam
        assert found[parameter].kind == of_torch.kind, parameter
        assert found[parameter].default == of_torch.default, parameter
        if of_torch.kind is of_torch.POSITIONAL_OR_KEYWORD:
            assert list(found)[place] == parameter
    if theirs is torch.nn:
        assert list(inspect.signature(getattr(ours, name).forward).parameters) == list(
            inspect.signature(getattr(theirs, name).forward).parameters
        )


def test_recurrent_layers_have_torchs_positions():
    for name in ("LSTM", "GRU", "RNN"):
        args = (8, 4, 2, *(("relu",) if name == "RNN" else ()), False, True, 0.5, True)
        ours, theirs = (getattr(each, name)(*args) for each in (nn, torch.nn))
        assert repr(ours) == repr(theirs)
        assert list(ours.state_dict()) == list(theirs.state_dict())
    assert_raises(ConfigError, "GRU has no projections: proj_size is for LSTM", nn.GRU, 8, 4, proj_size=2)
    with pytest.raises(ShapeError, match=r"LSTM takes \(T, B, 8\), T at least 1, got \(0, 2, 8\)"):
        nn.LSTM(8, 4)(torch.zeros(0, 2, 8))


def test_recurrent_layers_take_packed_sequences():
    ours, theirs = nn.GRU(8, 4), torch.nn.GRU(8, 4)
    ours.load_state_dict(theirs.state_dict())
    packed = pack_padded_sequence(torch.randn(SEQUENCES), torch.tensor([5, 3]))
    (one, _), (two, _) = (pad_packed_sequence(layer(packed)[0]) for layer in (ours, theirs))
    torch.testing.assert_close(one, two)


@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"bias": False}, {"kdim": 6, "vdim": 5},
                                     {"add_bias_kv": True, "add_zero_attn": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("call", [
    {}, {"need_weights": False}, {"average_attn_weights": False}, {"need_weights": False, "padding": True},
    {"need_weights": False, "attn_mask": torch.ones(4, 5, dtype=torch.bool).triu(1)},
    {"need_weights": False, "attn_mask": torch.randn(4, 5, generator=torch.Generator().manual_seed(1))},
])  # fmt: skip
def test_multihead_attention_is_torchs(options, call):
    torch.manual_seed(0)
    ours, theirs = (each.MultiheadAttention(8, 2, **options) for each in (nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    lengths = (4, 5, 5)
    widths = (8, options.get("kdim", 8), options.get("vdim", 8))
    qkv = [torch.randn(length, 3, width) for length, width in zip(lengths, widths, strict=True)]
    if options.get("batch_first"):
        qkv = [each.transpose(0, 1) for each in qkv]
    call = dict(call)
    if call.pop("padding", False):
        call["key_padding_mask"] = torch.tensor([[False] * 5, [False] * 3 + [True] * 2, [False] * 5])
    found, wanted = ours(*qkv, **call), theirs(*qkv, **call)
    torch.testing.assert_close(found[0], wanted[0])
    assert (found[1] is None) == (wanted[1] is None)
    if wanted[1] is not None:
        torch.testing.assert_close(found[1], wanted[1])


def test_self_attention_by_torchs_names_is_causal_with_its_mask():
    torch.manual_seed(0)
    ours, theirs = (each.MultiheadAttention(8, 2, batch_first=True) for each in (nn, torch.nn))
    ours.load_state_dict(theirs.state_dict())
    x, mask = torch.randn(2, 5, 8), torch.nn.Transformer.generate_square_subsequent_mask(5)
    call = {"attn_mask": mask, "is_causal": True, "need_weights": False}
    torch.testing.assert_close(ours(x, x, x, **call)[0], theirs(x, x, x, **call)[0])


@pytest.mark.parametrize("name", [
    "Embedding", "GELU", "Dropout", "CrossEntropyLoss", "Softmax", "SiLU", "ReLU", "Sigmoid", "Tanh", "Sequential",
    "ModuleList", "ModuleDict", "MSELoss", "BCEWithLogitsLoss", "L1Loss", "BatchNorm2d", "GroupNorm", "Flatten",
    "Identity", "Conv1d", "ConvTranspose2d", "TransformerEncoder", "Module", "Parameter", "functional", "init", "utils",
])  # fmt: skip
def test_what_is_torchs_alone_is_there(name):
    assert getattr(nn, name) is getattr(torch.nn, name)
    assert name in dir(nn) or name in ("Module", "Parameter", "functional", "init", "utils")


@pytest.mark.parametrize("name", ["RMSprop", "Adagrad", "lr_scheduler", "Optimizer"])
def test_what_is_torchs_alone_is_in_optim(name):
    assert getattr(nn.optim, name) is getattr(torch.optim, name)


@pytest.mark.parametrize(("name", "args"), [
    ("Linear", (8, 6)), ("LayerNorm", (8,)), ("RMSNorm", (8,)), ("Conv2d", (4, 8, 3)), ("LSTM", (8, 4)),
    ("GRU", (8, 4)), ("RNN", (8, 4)), ("MultiheadAttention", (8, 2)),
])  # fmt: skip
def test_a_layer_is_made_on_a_device_in_a_dtype_and_copied(name, args):
    layer = getattr(nn, name)(*args, device="meta", dtype=torch.bfloat16)
    assert {(each.device.type, each.dtype) for each in layer.parameters()} == {("meta", torch.bfloat16)}
    layer = getattr(nn, name)(*args)
    for copied in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert repr(copied) == repr(layer)
        assert list(copied.state_dict()) == list(layer.state_dict())


@pytest.mark.parametrize(("make", "words"), [
    (lambda: nn.LSTM(inputs=3, hidden=4), r"LSTM\(\) has no argument (inputs|hidden)= any more: it is \w+_size="),
    (lambda: nn.GRU(3, 4, wide=True), r"GRU\(\) got an unexpected keyword argument 'wide'"),
    (lambda: nn.LSTM(3, 4, nonlinearity="relu"), r"LSTM\(\) got an unexpected keyword argument 'nonlinearity'"),
    (lambda: nn.RNN(3, 4, layers=2), r"RNN\(\) has no argument layers= any more: it is num_layers= now"),
    (lambda: nn.LayerNorm(width=4), r"LayerNorm\(\) has no argument width= any more: it is normalized_shape= now"),
    (lambda: nn.RMSNorm(width=4), r"RMSNorm\(\) has no argument width= any more: it is normalized_shape= now"),
])  # fmt: skip
def test_names_of_before_name_those_of_today(make, words):
    assert_raises(TypeError, words, make)


def test_names_of_transformers_and_of_torchs_encoder_layer_are_understood():
    assert nn.GPTConfig(n_layer=2, n_head=4, n_embd=8, n_positions=16) == nn.GPTConfig(
        layers=2, heads=4, width=8, context=16
    )
    llama = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8}
    assert nn.LlamaConfig(**llama, intermediate_size=16) == nn.LlamaConfig(
        layers=2, heads=4, kv_heads=2, width=8, hidden=16
    )
    block = nn.TransformerBlock(d_model=8, nhead=2, dim_feedforward=24)
    assert (block.attention.width, block.attention.heads, block.mlp.up.out_features) == (8, 2, 24)
    with pytest.raises(TypeError, match="got heads= and nhead=, which are the same: give one"):
        nn.TransformerBlock(8, heads=2, nhead=2)
    with pytest.raises(TypeError, match=r"has no argument batch_first=: write nn\.MultiheadAttention"):
        nn.MultiHeadAttention(8, 2, batch_first=True)


def test_a_padding_mode_that_torch_has_not_is_refused():
    with pytest.raises(ConfigError, match="padding_mode must be zeros or reflect or replicate or circular, got 'wrap'"):
        nn.Conv2d(3, 4, 3, padding_mode="wrap")


def test_unquantize_restores_linear_layers():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)), torch.randn(4, 8)
    quantized = nn.quantize(model, inplace=False).model
    restored = nn.unquantize(quantized, inplace=False)
    assert [type(layer) for layer in restored] == [torch.nn.Linear, torch.nn.ReLU, torch.nn.Linear]
    assert isinstance(quantized[0], nn.LinearInt8)
    torch.testing.assert_close(restored(x), quantized(x), rtol=1e-4, atol=1e-5)
    assert restored[0].weight.requires_grad
    assert nn.unquantize(quantized) is quantized
    assert list(quantized.state_dict()) == list(model.state_dict())
    with pytest.raises(ConfigError, match="takes a model that has LinearInt8 layers, not a layer"):
        nn.unquantize(nn.LinearInt8(3, 4))


def test_optimizers_understand_the_learning_rate_by_its_long_name():
    parameter = torch.nn.Parameter(torch.ones(3))
    for kind in (nn.optim.Adam, nn.optim.AdamW, nn.optim.SGD):
        assert kind([parameter], learning_rate=0.5).param_groups[0]["lr"] == 0.5
        with pytest.raises(TypeError, match="got lr= and learning_rate=, which are the same"):
            kind([parameter], lr=0.5, learning_rate=0.5)


@pytest.mark.parametrize(("read", "words"), [
    (lambda: nn.optim.Adamm, r"module 'accelerant\.nn\.optim' has no attribute 'Adamm'"),
    (lambda: nn.Emmbedding, r"module 'accelerant\.nn' has no attribute 'Emmbedding'"),
    (lambda: accelerant.optimize, r"accelerant\.optimize is accelerant\.nn\.patch now"),
    (lambda: nn.train.Outcome, r"Outcome is accelerant\.nn\.train\.TrainingOutcome now"),
])  # fmt: skip
def test_a_name_that_is_not_there_is_refused(read, words):
    assert_raises(AttributeError, words, read)


def test_dtypes_are_understood_by_their_names(tmp_path):
    gpt = nn.GPT(nn.GPTConfig(vocab_size=8, context=4, layers=1, heads=1, width=8))
    gpt.save_pretrained(tmp_path)
    gpt.save_pretrained(save_directory=tmp_path)
    for name in ("bf16", "bfloat16", torch.bfloat16):
        assert next(nn.GPT.from_pretrained(tmp_path, dtype=name).parameters()).dtype == torch.bfloat16
    optimizer = nn.optim.AdamW(gpt.parameters(), state_dtype="fp32")
    step = nn.train.TrainStep(gpt, optimizer, gpt.loss, precision="bf16", reduce_dtype="float")
    assert step([torch.zeros(2, 1, 4, dtype=torch.int64).unbind()], learning_rate=0.1).loss.isfinite()
    for make in (lambda: nn.GPT.from_pretrained(tmp_path, dtype="bf17"), lambda: nn.optim.SGD([], state_dtype="nn")):
        assert_raises(ConfigError, "a dtype must be one of torch's or its name", make)
    with pytest.raises(TypeError, match=r"save_pretrained\(\) has no argument path= any more: it is out= now"):
        gpt.save_pretrained(path=tmp_path)
