"""Llama against transformers' LlamaForCausalLM, with random weights."""

import copy

import pytest
import torch
import torch.nn.functional as F

from accelerant import nn as ann
from accelerant.errors import ConfigError, FormatError, ShapeError, UnsupportedCase, UnsupportedDtype
from accelerant.nn import Llama, LlamaConfig
from accelerant.ops.rope import Llama3Scaling
from modules import module
from refusals import assert_raises

transformers = pytest.importorskip("transformers")

SCALING = {
    "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
CONFIG = LlamaConfig(
    vocab_size=101, context=64, layers=2, heads=4, kv_heads=2, width=32, hidden=48, rope_base=1000.0, rope_scaling=None
)


def theirs(*, scaling=None, **changes):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0} | (scaling or {})
    fields = {
        "vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "rope_parameters": rope,
        "initializer_range": 0.2, "attn_implementation": "eager",
    } | changes  # fmt: skip
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


KINDS = pytest.mark.parametrize("changes", [
    {}, {"scaling": SCALING}, {"tie_word_embeddings": True}, {"head_dim": 12}, {"num_key_value_heads": 4},
    {"num_key_value_heads": 1},
], ids=["plain", "scaled", "tied", "head width", "as many kv heads", "one kv head"])  # fmt: skip


def tokens(*shape):
    return torch.randint(101, shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def model():
    torch.manual_seed(0)
    model = Llama(CONFIG)
    for parameter in model.parameters():  # larger than at the start, so that every part matters
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model.eval()


# --- parity ----------------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@KINDS
def test_logits_and_gradients_are_transformers(changes):
    other = theirs(**changes)
    model = Llama.from_pretrained(other)
    idx = tokens(3, 40)
    with torch.no_grad():
        torch.testing.assert_close(model(idx), other(idx).logits, rtol=0, atol=1e-4)
    targets = torch.cat([idx[:, 1:], torch.full((3, 1), -100)], 1)
    model.loss(idx, targets).backward()
    F.cross_entropy(other(idx).logits.flatten(0, 1), targets.flatten()).backward()
    gradients = copy.deepcopy(other)  # the gradients, laid out as weights are
    with torch.no_grad():
        for to, of in zip(gradients.parameters(), other.parameters(), strict=True):
            to.copy_(of.grad)
    expected = Llama.from_pretrained(gradients).state_dict()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sample(3)
@KINDS
def test_folders_go_both_ways(changes, tmp_path):
    other = theirs(**changes)
    other.save_pretrained(tmp_path / "theirs")
    model = Llama.from_pretrained(tmp_path / "theirs")
    idx = tokens(2, 20)
    with torch.no_grad():
        expected = other(idx).logits
        torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-4)
        model.save_pretrained(tmp_path / "ours")
        again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
        assert type(again) is transformers.LlamaForCausalLM
        torch.testing.assert_close(again(idx).logits, expected, rtol=0, atol=1e-5)
        assert torch.equal(Llama.from_pretrained(tmp_path / "ours")(idx), model(idx))


def test_shards_of_either_side(tmp_path):
    other = theirs()
    other.save_pretrained(tmp_path / "theirs", max_shard_size="20kB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").is_file()
    idx = tokens(2, 20)
    with torch.no_grad():
        expected = other(idx).logits
        model = Llama.from_pretrained(tmp_path / "theirs")
        torch.testing.assert_close(model(idx), expected, rtol=0, atol=1e-4)
        model.save_pretrained(tmp_path / "ours", max_shard_bytes=20_000)
        assert len(list((tmp_path / "ours").glob("model-*.safetensors"))) > 2
        again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "ours")
        torch.testing.assert_close(again(idx).logits, expected, rtol=0, atol=1e-5)


def test_older_files_have_their_rope_elsewhere(tmp_path):
    import json

    other = theirs(scaling=SCALING)
    other.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields.pop("rope_parameters")
    fields["rope_theta"] = rope.pop("rope_theta")
    fields["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(fields))
    model = Llama.from_pretrained(tmp_path)
    assert model.config.rope_scaling == Llama3Scaling(4.0, 1.0, 4.0, 16)
    with torch.no_grad():
        torch.testing.assert_close(model(tokens(1, 50)), other(tokens(1, 50)).logits, rtol=0, atol=1e-4)


def test_dtype_and_device_can_be_asked_for(tmp_path):
    other = theirs().to(torch.bfloat16)
    other.save_pretrained(tmp_path)
    assert {p.dtype for p in Llama.from_pretrained(tmp_path).parameters()} == {torch.bfloat16}
    model = Llama.from_pretrained(tmp_path, dtype=torch.float64, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    torch.testing.assert_close(model.embed.weight, other.model.embed_tokens.weight.double(), rtol=0, atol=0)


@pytest.mark.parametrize(("changes", "words"), [
    ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
    ({"attention_bias": True}, "attention_bias must be False, got True"),
    ({"mlp_bias": True}, "mlp_bias must be False, got True"),
    ({"is_causal": False}, "is_causal must be True, got False"),
    ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type must be .* got 'yarn'"),
])  # fmt: skip
def test_an_unsupported_option_is_named(changes, words):
    assert_raises(UnsupportedCase, words, lambda: Llama.from_pretrained(theirs(**changes)))


def test_another_kind_of_model_is_refused():
    gpt = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1, vocab_size=9))
    with pytest.raises(UnsupportedCase, match=r"model_type must be 'llama' or .* 'mistral', got 'gpt2'"):
        Llama.from_pretrained(gpt)


def test_a_head_that_is_not_the_embedding_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    theirs(tie_word_embeddings=True).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    assert_raises(FormatError, r"'lm_head.weight' differs from 'embed_tokens.weight'", Llama.from_pretrained, tmp_path)


# --- generation ------------------------------------------------------------------------------------------------------
@pytest.mark.sample(3)
@KINDS
def test_greedy_tokens_are_transformers(changes):
    other = theirs(**changes)
    model = Llama.from_pretrained(other)
    prompt = tokens(3, 9)
    expected = other.generate(prompt, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert torch.equal(model.generate(prompt, 30, temperature=0), expected)


def test_the_cache_changes_nothing(model):
    prompt = tokens(2, 5)
    assert torch.equal(
        model.generate(prompt, 100, temperature=0), model.generate(prompt, 100, temperature=0, use_cache=False)
    )
    assert torch.equal(model.generate(prompt, 30, seed=3, top_p=0.9), model.generate(prompt, 30, seed=3, top_p=0.9))


@pytest.mark.parametrize("mode", ["weight_only", "dynamic"])
def test_quantised_layers_decode(model, mode, tmp_path):
    model = model.float()
    report = ann.quantize(model, mode=mode, skip=())
    assert len(report.replaced) == 2 * 4 + 1
    prompt = tokens(1, 5)
    cached = model.generate(prompt, 20, temperature=0)
    assert torch.equal(cached, model.generate(prompt, 20, temperature=0, use_cache=False))
    model.save_pretrained(tmp_path)
    again = ann.Llama.from_pretrained(tmp_path)
    if mode == "weight_only":  # without integers nothing rounds the inputs
        torch.testing.assert_close(again(prompt), model(prompt), rtol=1e-4, atol=1e-4)
    ann.quantize(again, mode=mode, skip=())
    torch.testing.assert_close(again(prompt), model(prompt), rtol=1e-5, atol=1e-5)


def test_decoding_rows_matches_the_model(model):
    """Position by position, against the whole sequence at once; in one row and in several."""
    from accelerant.nn.models.language_model import Cache

    for batch in (1, 3):
        idx = tokens(batch, 12)
        with torch.no_grad():
            expected = model(idx)
            cache = Cache.empty(model.cache_shape(), batch, 12, torch.float32, idx.device)
            torch.testing.assert_close(model.prefill(idx[:, :4], cache), expected[:, 3], rtol=1e-4, atol=1e-4)
            for t in range(4, 12):
                torch.testing.assert_close(model.decode(idx[:, t], cache), expected[:, t], rtol=1e-4, atol=1e-4)


# --- the rest --------------------------------------------------------------------------------------------------------
def test_learns(model):
    idx = tokens(4, 32)
    optimizer = ann.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        loss = model.loss(idx[:, :-1], idx[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_defaults_are_llama_3_1_8b():
    with torch.device("meta"):
        model = Llama(LlamaConfig())
        assert model.parameter_count() == 8_030_261_248
        assert model(torch.zeros(1, 8, dtype=torch.int64)).shape == (1, 8, 128256)


def test_a_later_token_does_not_change_earlier_logits(model):
    idx = tokens(1, 8)
    other = idx.clone()
    other[0, 5] = (other[0, 5] + 1) % 101
    before, after = model(idx), model(other)
    torch.testing.assert_close(before[:, :5], after[:, :5], rtol=0, atol=1e-5)
    assert (before[:, 5:] - after[:, 5:]).abs().max() > 1e-3


@pytest.mark.parametrize(("changes", "words"), [
    ({"layers": 0}, "layers must be at least 1"), ({"kv_heads": 3}, "kv_heads must divide heads"),
    ({"width": 30}, "multiple of heads"), ({"width": 36}, "even width, got 9"),
    ({"head_width": 7}, "even width, got 7"), ({"rope_base": 0.0}, "rope_base must be above 0"),
    ({"eps": -1.0}, "eps must be 0 or more"),
])  # fmt: skip
def test_config_refuses(changes, words):
    fields = CONFIG.to_dict() | changes
    assert_raises(ConfigError, words, LlamaConfig, **fields)


def test_input_is_checked(model):
    assert_raises(ShapeError, "at most 64 tokens fit the context, got 65", lambda: model(tokens(1, 65)))
    assert_raises(ShapeError, r"must be \(batch, time\)", lambda: model(tokens(3)))
    assert_raises(UnsupportedDtype, r"int32 or int64, got torch.float32", model, torch.zeros(1, 2))
    assert_raises(ShapeError, "shape of idx", lambda: model.loss(tokens(1, 4), tokens(1, 3)))


def test_a_hook_is_heard_while_generating(model):
    prompt = tokens(1, 5)
    before = model.generate(prompt, 12, temperature=0)
    handle = model.blocks[0].mlp.down.register_forward_hook(lambda module, args, y: -y)
    hooked = model.generate(prompt, 12, temperature=0)
    assert torch.equal(hooked, model.generate(prompt, 12, temperature=0, use_cache=False))
    assert not torch.equal(hooked, before)
    handle.remove()
    assert torch.equal(model.generate(prompt, 12, temperature=0), before)


def test_a_replaced_layer_is_called_while_generating(model):
    class Doubled(ann.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def adapter(base):
        return module(lambda m, x: m.base(x) + x.flip(-1)[..., : m.base.weight.shape[0]], base=base)

    model = copy.deepcopy(model)
    block = model.blocks[0]
    block.mlp.down.__class__ = Doubled
    block.attention.projection = adapter(block.attention.projection)
    prompt = torch.arange(12).view(2, 6)
    cached = model.generate(prompt, 20, temperature=0)
    assert torch.equal(cached, model.generate(prompt, 20, temperature=0, use_cache=False))


def test_a_replaced_part_is_called_while_generating(model):
    class Doubled(type(model.blocks[0].mlp)):
        def forward(self, x):
            return 2 * super().forward(x)

    model = copy.deepcopy(model)
    model.blocks[0].mlp.__class__ = Doubled
    prompt = torch.arange(12).view(2, 6)
    cached = model.generate(prompt, 20, temperature=0)
    assert torch.equal(cached, model.generate(prompt, 20, temperature=0, use_cache=False))
