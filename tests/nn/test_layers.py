from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils import prune

from accelerant.errors import ConfigError, ShapeError
from accelerant.nn import MLP, LayerNorm, Linear, MultiHeadAttention, TransformerBlock, layers
from accelerant.runtime.ledger import ledger
from refusals import assert_raises


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


@pytest.mark.parametrize(("layer", "shape"), [
    (Linear(4, 3), (2, 5)), (LayerNorm(4), (2, 5)), (MultiHeadAttention(4, 2), (3, 4)),
    (MultiHeadAttention(4, 2), (1, 3, 5)),
])  # fmt: skip
def test_wrong_shapes_are_refused(layer, shape):
    assert_raises(ShapeError, r"takes \(", layer, torch.zeros(shape))


# --- as torch's layers, with their weights ---------------------------------------------------------------------------
TANH = partial(F.gelu, approximate="tanh")


def copied(ours, theirs):
    """Copy torch's parameters, large enough to be far from uniform, into our attention; return pairs of them."""
    packed = theirs.in_proj_weight, theirs.in_proj_bias
    for each in packed:
        torch.nn.init.normal_(each, std=0.5)
    if ours.context_width is None:
        pairs = [(ours.qkv.weight, packed[0]), (ours.qkv.bias, packed[1])]
    else:
        width = ours.width
        pairs = [(ours.query.weight, packed[0][:width]), (ours.query.bias, packed[1][:width])]
        pairs += [(ours.key_value.weight, packed[0][width:]), (ours.key_value.bias, packed[1][width:])]
    return copy([*pairs, *linears((ours.projection, theirs.out_proj))])


def linears(*layers):
    return [(getattr(a, name), getattr(b, name)) for a, b in layers for name in ("weight", "bias")]


def copy(pairs):
    with torch.no_grad():
        for one, other in pairs:
            one.copy_(other)
    return pairs


def same(y, z, x, x2):
    """Results, and gradients of the inputs."""
    torch.testing.assert_close(y, z, rtol=1e-4, atol=1e-5)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    y.backward(dy)
    z.backward(dy)
    for one, other in zip(x, x2, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=2e-5)


def leaves(*shapes):
    drawn = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate(shapes)]
    return [[each.clone().requires_grad_() for each in drawn] for _ in range(2)]


PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
HIDDEN = torch.rand(5, 7, generator=torch.Generator().manual_seed(8)) < 0.3
HIDDEN[:, 0] = False


@pytest.mark.parametrize("masks", ["none", "causal", "bool", "numbers", "padding", "all"])
@pytest.mark.parametrize("cross", [False, True], ids=["self", "cross"])
def test_attention_is_torchs(cross, masks):
    if masks == "causal" and cross:
        pytest.skip("cross-attention has no positions to hide")
    torch.manual_seed(0)
    ours = MultiHeadAttention(16, 4, causal=masks in ("causal", "all"), context_width=16 if cross else None)
    theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    pairs = copied(ours, theirs)
    (x, context), (x2, context2) = leaves((2, 5 if cross else 7, 16), (2, 7, 16))
    queries = 5 if cross else 7
    hidden = HIDDEN[:queries] if cross else torch.cat([HIDDEN, HIDDEN[:2]])
    numbers = torch.randn(queries, 7, generator=torch.Generator().manual_seed(1))
    bools, padding = masks in ("bool", "all"), PADDING if masks in ("padding", "all") else None
    mask = ~hidden if bools else numbers if masks == "numbers" else None
    torchs = hidden if bools else numbers if masks == "numbers" else None
    if ours.causal and not cross:
        later = torch.ones(7, 7, dtype=torch.bool).triu(1)
        torchs = later if torchs is None else torchs | later
    y = ours(x, context if cross else None, mask=mask, key_padding_mask=padding)
    keys = context2 if cross else x2
    z, _ = theirs(x2, keys, keys, attn_mask=torchs, key_padding_mask=padding, need_weights=False)
    same(y, z, (x, context) if cross else (x,), (x2, context2) if cross else (x2,))
    for one, _ in pairs:
        assert one.grad is not None
    ran = {row["op"] for row in ledger().to_dict()["ops"]}
    assert ("sdpa_fwd" if masks in ("none", "causal") else "attention_masked_fwd") in ran


def of_encoder(ours, theirs):
    pairs = copied(ours.attention, theirs.self_attn)
    return pairs + copy(linears(
        (ours.mlp.up, theirs.linear1), (ours.mlp.down, theirs.linear2), (ours.norm_1, theirs.norm1),
        (ours.norm_2, theirs.norm2),
    ))  # fmt: skip


@pytest.mark.parametrize("way", ["layer by layer", "by torch", "fused"])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_block_is_torchs_encoder_layer(norm_first, causal, padded, way, monkeypatch):
    fused = way == "fused"
    monkeypatch.setattr(layers, "FUSED", {"cpu"} if fused else set())
    torch.manual_seed(0)
    ours = TransformerBlock(16, 4, d_ff=24, norm_first=norm_first, causal=causal)
    called = []
    if way == "layer by layer":  # the hook's layer is called, so that all are
        ours.mlp.up.register_forward_hook(lambda *_: called.append(1))
    theirs = torch.nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.0, activation=TANH, batch_first=True, norm_first=norm_first
    )
    of_encoder(ours, theirs)
    (x,), (x2,) = leaves((2, 7, 16))
    padding = PADDING if padded else None
    later = torch.ones(7, 7, dtype=torch.bool).triu(1) if causal else None
    y = ours(x, key_padding_mask=padding)
    same(y, theirs(x2, src_mask=later, src_key_padding_mask=padding), (x,), (x2,))
    assert ours.mlp.up.out_features == 24
    assert bool(called) is (way == "layer by layer")
    assert ours.fuses(x) is (fused and norm_first and causal)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_block_by_torch_is_as_exact_as_its_layers(norm_first, dtype, autocast):
    torch.manual_seed(0)
    block = TransformerBlock(16, 4, norm_first=norm_first).to(dtype)
    x, dy = torch.randn(3, 40, 16).to(dtype), torch.randn(3, 40, 16).double()

    def outcome(block):
        with torch.autocast(
            "cpu", dtype=torch.bfloat16, enabled=autocast and block.mlp.up.weight.dtype != torch.float64
        ):
            y = block(x.to(block.mlp.up.weight.dtype))
        return [each.double() for each in (y.detach(), *torch.autograd.grad(y, [*block.parameters()], dy.to(y.dtype)))]

    exact, ours = outcome(deepcopy(block).double()), outcome(block)
    assert block._is_whole(x)
    block.mlp.up.register_forward_hook(lambda *_: None)
    assert not block._is_whole(x)
    errors = [[(a - b).norm() for a, b in zip(each, exact, strict=True)] for each in (ours, outcome(block))]
    for error, by_layers, wanted in zip(*errors, exact, strict=True):
        assert error <= 1.5 * by_layers + 1e-6 * wanted.norm()


@pytest.mark.parametrize(("rows", "in_float32"), [(5, True), (2000, False)])
def test_a_block_by_torch_is_one_call_of_the_ledger(rows, in_float32):
    block, x = TransformerBlock(16, 4), torch.randn(2, rows, 16).bfloat16()
    ledger().reset()
    for _ in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = block(x)
            assert torch.is_autocast_enabled("cpu")
        y.sum().backward()
    found = {row["op"]: row for row in ledger().to_dict()["ops"] if row["calls"]}
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, block(x.float()).bfloat16()) is in_float32
    forward = found["torch_block_fwd"]
    assert forward["case"] == f"2x{rows}x16 bfloat16 4 heads causal d_ff 64"
    assert forward["flops_per_call"] == 2 * rows * (2 * 3072 + 2 * 16 * (rows + 1))  # of weights, and of pairs
    assert [each["implementation"] for each in forward["refused"]] == ["layers"]
    assert {op: row["calls"] for op, row in found.items()} == {"torch_block_fwd": 3, "torch_block_bwd": 3}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_block_of_many_rows_takes_float32_under_autocast(norm_first, dtype):
    block, x = TransformerBlock(64, 4, norm_first=norm_first), torch.randn(4, 40, 64)
    with torch.autocast("cpu", dtype):
        y = block(x)
    assert y.dtype == (torch.float32 if norm_first else dtype)
    assert (y - block(x)).norm() < 0.02 * y.norm()


def test_a_block_takes_parameters_in_any_order_and_dtype_that_its_layers_take():
    block, x = TransformerBlock(16, 4), torch.randn(2, 5, 16)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter)
    expected = block(x)
    for layer in (block.norm_1, block.mlp.up):
        prune.remove(prune.identity(layer, "weight"), "weight")
        assert list(layer._parameters) == ["bias", "weight"]
    torch.testing.assert_close(block(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_raises(RuntimeError, "Long", lambda: block(x.long()))
        expected = block(x)
        for name, parameter in block.named_parameters():
            if name.endswith("bias"):
                parameter.data = parameter.data.bfloat16()
        assert (block(x) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_a_block_with_cross_attention_is_torchs_decoder_layer(norm_first):
    torch.manual_seed(0)
    ours = TransformerBlock(16, 4, d_ff=24, norm_first=norm_first, context_width=16)
    theirs = torch.nn.TransformerDecoderLayer(
        16, 4, 24, dropout=0.0, activation=TANH, batch_first=True, norm_first=norm_first
    )
    copied(ours.attention, theirs.self_attn)
    copied(ours.cross_attention, theirs.multihead_attn)
    copy(linears(
        (ours.mlp.up, theirs.linear1), (ours.mlp.down, theirs.linear2), (ours.norm_1, theirs.norm1),
        (ours.norm_context, theirs.norm2), (ours.norm_2, theirs.norm3),
    ))  # fmt: skip
    (x, context), (x2, context2) = leaves((2, 5, 16), (2, 7, 16))
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    z = theirs(x2, context2, tgt_mask=later, memory_mask=HIDDEN, memory_key_padding_mask=PADDING)
    same(ours(x, context, context_mask=~HIDDEN, context_padding_mask=PADDING), z, (x, context), (x2, context2))


def test_dropout_is_in_training_only_and_follows_the_seed():
    torch.manual_seed(0)
    block = TransformerBlock(16, 2, dropout=0.5)
    whole = TransformerBlock(16, 2)
    whole.load_state_dict(block.state_dict())
    x = torch.randn(2, 6, 16)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(block(x))
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
    assert not block.is_gpt2
    assert "dropout" in {row["case"].split()[-1] for row in ledger().to_dict()["ops"] if row["op"] == "sdpa_fwd"}
    torch.testing.assert_close(block.eval()(x), whole(x))
    mean = torch.stack([MultiHeadAttention.forward(block.attention.train(), x) for _ in range(100)]).mean(0)
    torch.testing.assert_close(mean, block.attention.eval()(x), rtol=0, atol=0.05)


def test_a_position_that_attends_to_nothing_gets_the_projection_of_zeros():
    for dropout in (0.0, 0.3):
        layer = MultiHeadAttention(8, 2, causal=False, dropout=dropout)
        torch.nn.init.normal_(layer.projection.bias)
        mask = torch.ones(4, 4, dtype=torch.bool)
        mask[1] = False
        y = layer(torch.randn(1, 4, 8), mask=mask)
        torch.testing.assert_close(y[0, 1], layer.projection.bias)


@pytest.mark.parametrize(("make", "call", "message"), [
    (lambda: MultiHeadAttention(8, 2), {"context": torch.zeros(2, 3, 8)}, r"takes no context, got \(2, 3, 8\)"),
    (lambda: MultiHeadAttention(8, 2, context_width=6), {}, r"takes a context \(batch, time, 6\), got none"),
    (lambda: MultiHeadAttention(8, 2, context_width=6), {"context": torch.zeros(3, 3, 6)},
     r"context must be \(2, time, 6\), got \(3, 3, 6\)"),
    (lambda: TransformerBlock(8, 2), {"context": torch.zeros(2, 3, 8)}, "TransformerBlock takes no context"),
    (lambda: MultiHeadAttention(8, 2), {"key_padding_mask": torch.zeros(2, 5)},
     r"key_padding_mask must be \(2, 4\) bool, got \(2, 5\) float32"),
    (lambda: TransformerBlock(8, 2), {"mask": torch.ones(3, 4).bool()}, r"mask must broadcast .*, got \(3, 4\)"),
])  # fmt: skip
def test_contexts_and_masks_that_do_not_fit_are_refused(make, call, message):
    assert_raises(ShapeError, message, lambda: make()(torch.zeros(2, 4, 8), **call))


def test_values_out_of_range_are_refused():
    assert_raises(ConfigError, "multiple of heads, got width 6 and 4", MultiHeadAttention, 6, 4)
    assert_raises(ConfigError, r"dropout must be at least 0 and below 1, got 1\.0", TransformerBlock, 8, 2, dropout=1.0)
    assert_raises(ConfigError, "at least one input and output, got 8 and 0", TransformerBlock, 8, 2, d_ff=0)


def test_parameters_are_those_of_a_gpt_block_by_default():
    parts = ("norm_1", "attention.qkv", "attention.projection", "norm_2", "mlp.up", "mlp.down")
    names = [f"{part}.{kind}" for part in parts for kind in ("weight", "bias")]
    assert list(TransformerBlock(8, 2).state_dict()) == names
    more = set(TransformerBlock(8, 2, context_width=4).state_dict()) - set(names)
    assert {name.rsplit(".", 1)[0] for name in more} == {
        "norm_context", "cross_attention.query", "cross_attention.key_value", "cross_attention.projection"
    }  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("norm_first", [True, False], ids=["pre-norm", "post-norm"])
def test_blocks_on_a_gpu_are_those_of_the_cpu(norm_first):
    torch.manual_seed(0)
    block = TransformerBlock(128, 2, d_ff=192, norm_first=norm_first, causal=False, context_width=128)
    whole = TransformerBlock(128, 2, norm_first=norm_first, causal=False)
    x, context = torch.randn(2, 7, 128), torch.randn(2, 7, 128)
    calls = (
        lambda device: block.to(device)(x.to(device), context.to(device), context_padding_mask=PADDING.to(device)),
        lambda device: whole.to(device)(x.to(device), key_padding_mask=PADDING.to(device)),
        lambda device: whole.to(device)(x.to(device)),
    )
    for call in calls:
        torch.testing.assert_close(call("cuda").cpu(), call("cpu"), rtol=1e-3, atol=1e-4)
    ran = {(row["op"], row["implementation"]) for row in ledger().to_dict()["ops"]}
    assert any(op == "attention_masked_fwd" and name.startswith("triton") for op, name in ran)  # on sm_90 split float32
