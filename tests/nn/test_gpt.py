import math

import pytest
import torch
import torch.nn.functional as F

from accelerant.errors import ConfigError, ShapeError, UnsupportedDtype
from accelerant.nn import GPT, GPTConfig
from refusals import assert_raises

CONFIG = GPTConfig(vocab_size=70, context=8, layers=2, heads=2, width=16)


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = GPT(CONFIG)
    for parameter in model.parameters():  # larger than at the start, so that every part matters
        parameter.data[: CONFIG.vocab_size] += 0.1 * torch.randn_like(parameter.data[: CONFIG.vocab_size])
    return model


def tokens(*shape):
    return torch.randint(CONFIG.vocab_size, shape, generator=torch.Generator().manual_seed(1))


def reference_loss(p, idx, targets):
    """GPT-2 written out over a dictionary of parameters, in their dtype."""
    x = p["wte.weight"][idx] + p["wpe.weight"][: idx.shape[1]]
    for i in range(CONFIG.layers):
        b = f"blocks.{i}."
        y = F.layer_norm(x, (16,), p[b + "norm_1.weight"], p[b + "norm_1.bias"])
        q, k, v = F.linear(y, p[b + "attention.qkv.weight"], p[b + "attention.qkv.bias"]).split(16, -1)
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in (q, k, v))
        mask = torch.ones(idx.shape[1], idx.shape[1]).triu(1).bool()
        a = (q @ k.transpose(-1, -2) / math.sqrt(8)).masked_fill(mask, -torch.inf).softmax(-1) @ v
        a = a.transpose(1, 2).flatten(-2)
        x = x + F.linear(a, p[b + "attention.projection.weight"], p[b + "attention.projection.bias"])
        y = F.layer_norm(x, (16,), p[b + "norm_2.weight"], p[b + "norm_2.bias"])
        y = F.gelu(F.linear(y, p[b + "mlp.up.weight"], p[b + "mlp.up.bias"]), approximate="tanh")
        x = x + F.linear(y, p[b + "mlp.down.weight"], p[b + "mlp.down.bias"])
    logits = F.layer_norm(x, (16,), p["norm.weight"], p["norm.bias"]) @ p["wte.weight"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_loss_and_gradients_match_a_plain_float64_model(model):
    idx, targets = tokens(3, 8), tokens(3, 8).flip(0)
    loss = model.loss(idx, targets)
    loss.backward()
    plain = {name: value.double().requires_grad_() for name, value in model.state_dict().items()}
    expected = reference_loss(plain, idx, targets)
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=1e-6)
    for name, parameter in model.named_parameters():
        gradient = parameter.grad[: plain[name].shape[0]].double()
        torch.testing.assert_close(gradient, plain[name].grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_loss_is_the_cross_entropy_of_the_logits(model):
    idx, targets = tokens(2, 5), tokens(2, 5)
    targets[0, 1] = -100
    expected = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model.loss(idx, targets), expected)


def test_a_later_token_does_not_change_earlier_logits(model):
    idx = tokens(1, 8)
    other = idx.clone()
    other[0, 5] = (other[0, 5] + 1) % CONFIG.vocab_size
    before, after = model(idx), model(other)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-6)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


def test_the_output_layer_is_the_embedding(model):
    assert not [name for name, _ in model.named_parameters() if "head" in name]
    before = model(tokens(1, 4))
    model.wte.weight.data[3] *= 2.0
    after = model(torch.where(tokens(1, 4) == 3, 4, tokens(1, 4)))
    torch.testing.assert_close(after[..., 3], 2 * before[..., 3])


def test_padding_is_invisible(model):
    assert CONFIG.padded_vocab_size == 128
    assert model(tokens(2, 3)).shape == (2, 3, 70)
    assert model.state_dict()["wte.weight"].shape == (70, 16)
    assert model.parameter_count() == sum(value.numel() for value in model.state_dict().values())


def test_padding_stays_zero_through_training(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(tokens(2, 8), tokens(2, 8)).backward()
        optimizer.step()
    assert torch.count_nonzero(model.wte.weight[70:]) == 0
    generated = model.generate(tokens(4, 1), 20, temperature=10.0, seed=0)
    assert generated.max() < 70


def test_state_dict_comes_back_exactly(model):
    other = GPT(CONFIG)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens(2, 6)), model(tokens(2, 6)))
    assert torch.count_nonzero(other.wte.weight[70:]) == 0


def test_a_state_dict_of_another_vocabulary_is_refused(model):
    with pytest.raises(RuntimeError, match=r"size mismatch for wte"):
        GPT(GPTConfig(vocab_size=71, context=8, layers=2, heads=2, width=16)).load_state_dict(model.state_dict())


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, context=64, layers=8, heads=4, width=128))
    block = model.blocks[3]
    assert block.attention.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)  # sqrt(2 * 8) residual branches
    assert torch.count_nonzero(block.mlp.up.bias) == 0
    loss = model.loss(torch.arange(64)[None], torch.arange(1, 65)[None])
    assert loss.item() == pytest.approx(math.log(256), abs=0.3)


def test_initial_weights_may_have_another_deviation():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=256, context=64, layers=8, heads=4, width=128))
    model.reset_parameters(0.05)
    block = model.blocks[3]
    for weight in (model.wte.weight, block.attention.qkv.weight, block.mlp.up.weight):
        assert weight.std().item() == pytest.approx(0.05, rel=0.05)
    assert block.mlp.down.weight.std().item() == pytest.approx(0.05 / 4, rel=0.05)


def test_defaults_are_gpt2_124m():
    with torch.device("meta"):
        assert GPT(GPTConfig()).parameter_count() == 124_439_808


def test_generate_repeats_with_the_seed_and_differs_without(model):
    prompt = tokens(2, 3)
    first = model.generate(prompt, 12, seed=7)
    assert torch.equal(first, model.generate(prompt, 12, seed=7))
    assert torch.equal(first, model.generate(prompt, 12, generator=torch.Generator().manual_seed(7)))
    assert not torch.equal(first, model.generate(prompt, 12, seed=8))
    assert torch.equal(first[:, :3], prompt)
    assert first.shape == (2, 15)


def test_generate_greedily_takes_the_likeliest(model):
    prompt = tokens(1, 3)
    expected = model(prompt)[0, -1].argmax()
    assert model.generate(prompt, 1, temperature=0)[0, -1] == expected
    assert model.generate(prompt, 1, top_k=1, seed=0)[0, -1] == expected


@pytest.mark.slow
def test_generate_samples_the_models_distribution(model):
    prompt = tokens(1, 3).expand(20000, 3)
    drawn = model.generate(prompt, 1, top_k=5, seed=0)[:, -1]
    top = model(prompt[:1])[0, -1].topk(5)
    frequency = torch.stack([(drawn == token).float().mean() for token in top.indices])
    torch.testing.assert_close(frequency, top.values.softmax(-1).detach(), rtol=0, atol=0.02)
    assert frequency.sum() == 1


def test_generate_leaves_the_mode_and_gradients_alone(model):
    model.train()
    assert not model.generate(tokens(1, 2), 2, seed=0).requires_grad
    assert model.training


@pytest.mark.parametrize(("arguments", "message"), [
    ({"max_new_tokens": -1}, "max_new_tokens must be 0 or more, got -1"),
    ({"max_new_tokens": 1, "temperature": -0.5}, "temperature must be 0 or more"),
    ({"max_new_tokens": 1, "temperature": math.nan}, "temperature must be 0 or more"),
    ({"max_new_tokens": 1, "top_k": 0}, "top_k must be at least 1"),
    ({"max_new_tokens": 1, "seed": 0, "generator": torch.Generator()}, "not both"),
])  # fmt: skip
def test_generate_refuses(model, arguments, message):
    assert_raises(ConfigError, message, lambda: model.generate(tokens(1, 2), **arguments))


def test_input_is_checked(model):
    assert_raises(ShapeError, "at most 8 tokens fit the context, got 9", lambda: model(tokens(1, 9)))
    assert_raises(ShapeError, r"must be \(batch, time\)", lambda: model(tokens(3)))
    assert_raises(ShapeError, "at least one token", lambda: model(tokens(2, 0)))
    assert_raises(UnsupportedDtype, r"int32 or int64, got torch.float32", model, torch.zeros(1, 2))
    assert_raises(ShapeError, "shape of idx", lambda: model.loss(tokens(1, 4), tokens(1, 3)))


@pytest.mark.parametrize("field", ["vocab_size", "context", "layers", "heads", "width"])
def test_config_refuses_zero_and_heads_that_do_not_divide(field):
    assert_raises(ConfigError, f"{field} must be at least 1, got 0", GPTConfig, **{field: 0})
    assert_raises(ConfigError, "multiple of heads", GPTConfig, width=10, heads=3)


def test_generate_past_the_context_reads_its_end(model):
    long = tokens(1, 20)
    expected = model(long[:, -8:])[0, -1].argmax()
    assert model.generate(long, 1, temperature=0)[0, -1] == expected
