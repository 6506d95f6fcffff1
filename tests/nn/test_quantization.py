import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import accelerant.nn as ann
from accelerant import ops
from accelerant.errors import ConfigError, ShapeError
from accelerant.nn.layers import Linear
from refusals import assert_raises

MODES = pytest.mark.parametrize("mode", ["weight_only", "dynamic"])


def small_gpt():
    torch.manual_seed(0)
    return ann.GPT(ann.GPTConfig(vocab_size=97, context=32, layers=2, heads=2, width=64))


def trained_gpt():
    """A GPT that knows something, so that its loss is below that of a guess: each token is 7 after the last."""
    model = small_gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        idx = counting(8)
        model.loss(idx[:, :-1], idx[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def counting(rows):
    return (torch.randint(0, 97, (rows, 1)) + 7 * torch.arange(25)) % 97


# --- the layer -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", [nn.Linear, Linear])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dynamic", [True, False])
def test_layer_is_close_to_the_one_it_is_made_of(kind, bias, dynamic):
    linear = kind(300, 40, bias=bias)
    if bias:
        nn.init.normal_(linear.bias)
    layer = ann.LinearInt8.from_linear(linear, dynamic=dynamic)
    x = torch.randn(2, 5, 300)
    y, wanted = layer(x), linear(x)
    assert y.shape == wanted.shape
    assert (y - wanted).norm() < 0.02 * wanted.norm()
    q, scale = ops.quantize_int8(linear.weight)
    torch.testing.assert_close(y, ops.linear_int8(x, q, scale, linear.bias, dynamic=dynamic))
    assert [name for name, _ in layer.named_parameters()] == ["bias"] * bias
    assert f"300, 40, bias={bias}, dynamic={dynamic}" in repr(layer)


def test_gradient_goes_through():
    layer = ann.LinearInt8.from_linear(nn.Linear(8, 4))
    x = torch.randn(3, 8, requires_grad=True)
    dy = torch.randn(3, 4)
    layer(x).backward(dy)
    torch.testing.assert_close(x.grad, dy @ (layer.weight_int8 * layer.scale[:, None]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scale_stays_float32(dtype):
    layer = ann.LinearInt8.from_linear(nn.Linear(30, 4))
    scale = layer.scale.clone()
    layer.to(dtype)
    assert (layer.weight_int8.dtype, layer.scale.dtype, layer.bias.dtype) == (torch.int8, torch.float32, dtype)
    assert torch.equal(layer.scale, scale)
    assert layer(torch.randn(3, 30, dtype=dtype)).dtype == dtype
    assert layer(torch.randn(3, 30)).dtype == torch.float32  # whatever the bias is


def test_autocast():
    layer = ann.LinearInt8.from_linear(nn.Linear(30, 4))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(3, 30)).dtype == torch.bfloat16


def test_layer_refuses_another_width():
    with pytest.raises(ShapeError, match=r"LinearInt8 takes \(..., 8\), got \(3, 7\)"):
        ann.LinearInt8(8, 4)(torch.randn(3, 7))
    assert_raises(ConfigError, "got 0 and 4", ann.LinearInt8, 0, 4)


# --- models ----------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@MODES
def test_gpt_keeps_its_logits_and_its_loss(mode):
    model = trained_gpt().eval()
    idx = counting(16)
    logits, loss = model(idx[:, :-1]), model.loss(idx[:, :-1], idx[:, 1:])
    assert loss < 0.5 * math.log(97)
    report = ann.quantize(model, mode=mode)
    assert report.model is model
    assert len(report.replaced) == 8
    assert not report.skipped
    assert all(isinstance(model.get_submodule(name), ann.LinearInt8) for name in report.replaced)
    found, after = model(idx[:, :-1]), model.loss(idx[:, :-1], idx[:, 1:])
    assert (found - logits).norm() < 0.03 * logits.norm()
    assert abs(after - loss) < 0.02
    assert (found.argmax(-1) == logits.argmax(-1)).float().mean() > 0.98


def test_bytes():
    model = small_gpt()
    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, Linear))
    outputs = sum(each.out_features for each in model.modules() if isinstance(each, Linear))
    before = sum(each.nbytes for each in model.parameters())
    report = ann.quantize(model)
    assert report.bytes_before == before
    assert report.bytes_after == before - 3 * weights + 4 * outputs
    assert "8 linear layers in 8-bit integers (weight_only), 0 left" in str(report)


@pytest.mark.slow
@MODES
def test_state_dict_round_trip(mode, tmp_path):
    model, other = trained_gpt().eval(), small_gpt().eval()
    ann.quantize(model, mode=mode)
    ann.quantize(other, mode=mode)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    other.load_state_dict(torch.load(tmp_path / "model.pt"))
    idx = counting(3)
    assert torch.equal(model(idx), other(idx))
    assert {tensor.dtype for name, tensor in other.state_dict().items() if "mlp.up.weight_int8" in name} == {torch.int8}


def test_what_is_left_still_learns():
    model = small_gpt()
    ann.quantize(model)
    idx = counting(4)
    model.loss(idx[:, :-1], idx[:, 1:]).backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in model.parameters())
    assert model.wpe.weight.grad[:24].any(1).all()


def test_copy_leaves_the_model():
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    report = ann.quantize(model, inplace=False)
    assert isinstance(model[0], nn.Linear)
    assert isinstance(report.model[0], ann.LinearInt8)
    assert report.replaced == ("0", "2")
    assert report.bytes_before > report.bytes_after


def test_training_mode_is_kept():
    model = nn.Sequential(nn.Linear(4, 5)).eval()
    assert not ann.quantize(model).model[0].training


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.lm_head = nn.Linear(4, 7)
        self.tied = nn.Linear(4, 7, bias=False)
        self.tied.weight = self.table.weight
        self.attention = nn.MultiheadAttention(4, 1)
        self.watched = nn.Linear(4, 4)
        self.watched.register_forward_hook(lambda *args: None)
        self.wrapped = nn.Linear(4, 4)
        self.wrapped.forward = lambda x: x
        self.body.append(self.body[0])


def test_each_conv1d_of_transformers_is_left_with_the_reason():
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    report = ann.quantize(nn.Sequential(conv1d(4, 4), nn.Linear(4, 4)), skip=lambda name, layer: not layer.in_features)
    assert report.replaced == ("1",)
    assert "layers of accelerant.nn.GPT.from_pretrained are" in report.skipped["0"]


def test_what_is_left_and_why():
    report = ann.quantize(Head())
    assert report.replaced == ("body.0", "body.1", "body.2")
    assert report.skipped == {
        "lm_head": "named in skip",
        "tied": "its weight is also that of Embedding",
        "attention.out_proj": "NonDynamicallyQuantizableLinear is derived from Linear and may compute something else",
        "watched": "it has hooks",
        "wrapped": "its forward was replaced by another library",
    }
    assert report.model.body[0] is report.model.body[2]
    assert "left tied: its weight is also that of Embedding" in str(report)


def test_an_encoder_of_torch_works_without_gradients():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2).eval()
    x, padding = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        wanted = [encoder(x), encoder(x, src_key_padding_mask=padding)[~padding]]
        ann.quantize(encoder)
        found = [encoder(x), encoder(x, src_key_padding_mask=padding)[~padding]]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.05)


def test_skip_by_name_and_by_function():
    model = small_gpt()
    report = ann.quantize(model, skip=("blocks.0.mlp.up", "qkv"), inplace=False)
    assert set(report.skipped) == {"blocks.0.mlp.up", "blocks.0.attention.qkv", "blocks.1.attention.qkv"}
    report = ann.quantize(model, skip=lambda name, layer: layer.out_features == 256)
    assert set(report.skipped) == {"blocks.0.mlp.up", "blocks.1.mlp.up"}
    assert set(report.skipped.values()) == {"left by the function given as skip"}


def test_on_the_meta_device():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 5))
    ann.quantize(model)
    assert (model[0].weight_int8.device.type, model[0].weight_int8.dtype) == ("meta", torch.int8)


def test_refusals():
    assert_raises(ConfigError, "which alone takes examples, got 'int2'", lambda: ann.quantize(small_gpt(), mode="int2"))
    assert_raises(ConfigError, "ReLU has no linear layer", lambda: ann.quantize(nn.ReLU()))
    assert_raises(ConfigError, r"not a layer: see LinearInt8\.from_linear", lambda: ann.quantize(nn.Linear(3, 4)))


def test_nothing_changes_where_one_weight_is_not_finite():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    with torch.no_grad():
        model[1].weight[2, 0] = math.inf
    assert_raises(ConfigError, "1: a weight of output 2 is not finite", ann.quantize, model)
    assert isinstance(model[0], nn.Linear)


def test_matches_torch_on_a_dequantised_model():
    linear = nn.Linear(40, 30)
    layer = ann.LinearInt8.from_linear(linear)
    x = torch.randn(7, 40)
    torch.testing.assert_close(
        layer(x), functional.linear(x, layer.weight_int8 * layer.scale[:, None], linear.bias), rtol=1e-5, atol=1e-5
    )


# --- 4 bits ----------------------------------------------------------------------------------------------------------
def test_four_bits_serve_layers_of_whole_groups(tmp_path):
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 100), nn.Linear(100, 7)).to(torch.bfloat16)
    x = torch.randn(5, 256, dtype=torch.bfloat16)
    expected = model(x)
    report = ann.quantize(model, mode="int4")
    assert report.replaced == ("0", "2")
    assert report.skipped == {"3": "its 100 inputs are no multiple of 128"}
    assert "4-bit integers (int4)" in str(report)
    assert report.bytes_after < report.bytes_before / 3
    y = model(x)
    assert y.dtype == torch.bfloat16
    assert float((y - expected).norm() / expected.norm()) < 0.2
    layer = model[0]
    assert layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    other = nn.Sequential(ann.LinearInt4(256, 128), nn.ReLU(), ann.LinearInt4(128, 100), nn.Linear(100, 7))
    other.to(torch.bfloat16).load_state_dict(model.state_dict())
    assert other[0].scale.dtype == torch.float32
    assert torch.equal(other(x), y)
    dense = ann.unquantize(model, inplace=False)
    assert type(dense[0]) is nn.Linear
    torch.testing.assert_close(dense(x), y, rtol=3e-2, atol=3e-2)
    floats = ann.quantization.float_state_dict(model)
    assert set(floats) == set(dense.state_dict())
    assert ann.quantize(model, mode="int4", skip=("3",)).skipped["0"] == "it is quantized already"


def test_four_bits_with_zeros_and_in_parts():
    linear = nn.Linear(128, 12)
    layer = ann.LinearInt4.from_linear(linear, symmetric=False)
    assert layer.zero.shape == (12, 1)
    parts = ann.LinearInt4(128, 12, symmetric=False)
    parts.load_rows(linear.weight.detach().split(5))
    assert torch.equal(parts.weight_int4, layer.weight_int4)
    x = torch.randn(3, 128, requires_grad=True)
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(3, -1), rtol=1e-5, atol=1e-5)
    assert_raises(ConfigError, "multiple of 128, got 100 to 3", ann.LinearInt4, 100, 3)
    with torch.no_grad():
        linear.weight[3, 4] = math.nan
    assert_raises(ConfigError, "not finite", ann.LinearInt4.from_linear, linear)
