import pytest
import torch
import torch.nn.functional as F

from accelerant.errors import ConfigError, ShapeError
from accelerant.nn import MLP, LayerNorm, Linear, MultiHeadAttention, TransformerBlock


def test_linear_is_torchs_linear():
    torch.manual_seed(0)
    layer = Linear(6, 5)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 6)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


def test_linear_without_bias_keeps_a_single_row():
    layer = Linear(4, 3, bias=False)
    x = torch.randn(4)
    assert layer.bias is None
    torch.testing.assert_close(layer(x), layer.weight @ x)


def test_layer_norm_is_torchs_layer_norm():
    torch.manual_seed(0)
    layer = LayerNorm(8, eps=1e-3)
    torch.nn.init.normal_(layer.weight)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(layer(x), F.layer_norm(x, (8,), layer.weight, layer.bias, 1e-3))


def test_mlp_goes_through_the_tanh_gelu():
    torch.manual_seed(0)
    layer = MLP(4, hidden=9)
    x = torch.randn(3, 4)
    up = F.linear(x, layer.up.weight, layer.up.bias)
    expected = F.linear(F.gelu(up, approximate="tanh"), layer.down.weight, layer.down.bias)
    torch.testing.assert_close(layer(x), expected)


def test_attention_is_the_masked_softmax_average():
    torch.manual_seed(0)
    layer = MultiHeadAttention(8, 2)
    torch.nn.init.normal_(layer.qkv.weight)  # large enough that attention is far from uniform
    x = torch.randn(2, 5, 8)
    q, k, v = F.linear(x, layer.qkv.weight, layer.qkv.bias).split(8, dim=-1)
    heads = []
    for h in range(2):
        part = slice(4 * h, 4 * h + 4)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / 2.0
        scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    expected = F.linear(torch.cat(heads, -1), layer.projection.weight, layer.projection.bias)
    torch.testing.assert_close(layer(x), expected)


def test_block_is_the_identity_when_its_projections_are_zero():
    block = TransformerBlock(8, 2)
    for layer in (block.attention.projection, block.mlp.down):
        torch.nn.init.zeros_(layer.weight)
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(block(x), x)


def test_autocast_computes_low_and_leaves_gradients_in_the_master_dtype():
    layer = Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(2, 8))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Linear(4, 3), (2, 5)),
        (LayerNorm(4), (2, 5)),
        (MultiHeadAttention(4, 2), (3, 4)),
        (MultiHeadAttention(4, 2), (1, 3, 5)),
    ],
)
def test_wrong_shapes_are_refused(layer, shape):
    with pytest.raises(ShapeError, match=r"takes \("):
        layer(torch.zeros(shape))


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match="multiple of heads, got width 6 and 4"):
        MultiHeadAttention(6, 4)
