import pytest
import torch
from clip_checks import MODES, check
from torch import nn

from accelerant.nn import GPT, CharRNN, CharRNNConfig, GPTConfig, Llama, LlamaConfig
from modules import module

modes = pytest.mark.parametrize("norms", MODES)
V = 13


def tokens(B, T):
    return [torch.randint(V, (B, T)), torch.randint(V, (B, T))]


def by_method(model, idx, targets):
    return model.loss(idx, targets)


def by_logits(model, idx, targets):
    return nn.functional.cross_entropy(model(idx).flatten(0, 1), targets.flatten())


@pytest.mark.sample(3)
@modes
@pytest.mark.parametrize("T", [3, 4, 5])  # of 4 examples: as many positions as examples, too
@pytest.mark.parametrize("loss", [by_method, by_logits])
def test_gpt_with_its_tied_output_layer(T, loss, norms):
    model = GPT(GPTConfig(vocab_size=V, context=6, layers=2, heads=2, width=8))
    check(model, tokens(4, T), loss, norms=norms)


@pytest.mark.parametrize("B", [1, 4])
def test_gpt_in_float32(B):
    model = GPT(GPTConfig(vocab_size=V, context=6, layers=1, heads=2, width=8))
    check(model, tokens(B, 5), by_method, dtype=torch.float32, tolerance=2e-6)


@pytest.mark.parametrize("frozen", ["wte", "wpe", "norm_1", "qkv"])
def test_gpt_with_a_frozen_part(frozen):
    model = GPT(GPTConfig(vocab_size=V, context=6, layers=1, heads=2, width=8))
    for name, each in model.named_parameters():
        each.requires_grad_(frozen not in name)
    check(model, tokens(4, 5), by_method)


@pytest.mark.sample(3)
@modes
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("loss", [by_method, by_logits])
def test_llama(tied, loss, norms):
    config = LlamaConfig(vocab_size=V, context=8, layers=2, heads=2, kv_heads=1, width=8, hidden=12, tied=tied)
    check(Llama(config), tokens(4, 5), loss, norms=norms)


@modes
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_char_rnn(cell, norms):
    config = CharRNNConfig(vocab_size=V, context=6, layers=2, width=8, cell=cell)
    check(CharRNN(config), tokens(4, 5), by_method, norms=norms)


@modes
def test_a_tied_table_of_torch(norms):
    table, head = nn.Embedding(V, 6), nn.Linear(6, V, bias=False)
    head.weight = table.weight
    check(
        module(lambda m, idx: m.head(m.table(idx).tanh()), table=table, head=head), tokens(4, 5), by_logits, norms=norms
    )


# --- transformers ----------------------------------------------------------------------------------------------------
def of_transformers(name):
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": V, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "intermediate_size": 12}
    none = {"bos_token_id": None, "eos_token_id": None}
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=V,
            n_positions=8,
            n_embd=8,
            n_layer=2,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            **none,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config)
    if name == "llama":
        config = transformers.LlamaConfig(**small, intermediate_size=12, num_key_value_heads=1, **none)
        return transformers.LlamaForCausalLM(config)
    if name in ("mistral", "qwen2", "qwen3"):
        title = name.capitalize()
        head_dim = {} if name == "qwen2" else {"head_dim": 4}
        config = getattr(transformers, f"{title}Config")(
            **small, intermediate_size=12, num_key_value_heads=1, **head_dim, **none
        )
        return getattr(transformers, f"{title}ForCausalLM")(config)
    if name == "vit":
        del small["vocab_size"]
        config = transformers.ViTConfig(**small, **quiet, image_size=8, patch_size=4, num_labels=3)
        return transformers.ViTForImageClassification(config)
    config = transformers.BertConfig(**small, **quiet, max_position_embeddings=8)
    kind = transformers.BertForMaskedLM if name == "bert" else transformers.BertForSequenceClassification
    return kind(config)


@pytest.mark.sample(3)
@modes
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_language_models_of_transformers(name, norms):
    model = of_transformers(name)
    check(model, tokens(4, 4)[:1], lambda model, idx: model(input_ids=idx, labels=idx).loss, norms=norms)


@pytest.mark.parametrize("name", ["mistral", "qwen2", "qwen3"])
def test_other_language_models_of_transformers(name):
    model = of_transformers(name)
    check(model, tokens(4, 4)[:1], lambda model, idx: model(input_ids=idx, labels=idx).loss)


@modes
def test_classifiers_of_transformers(norms):
    labels = torch.tensor([0, 1, 1, 0])

    def loss(model, x, y):
        key = "input_ids" if x.dtype == torch.int64 else "pixel_values"
        return model(**{key: x}, labels=y).loss

    check(of_transformers("bert classifier"), [*tokens(4, 5)[:1], labels], loss, norms=norms)
    check(of_transformers("vit"), [torch.randn(4, 3, 8, 8), labels], loss, norms=norms)


@pytest.mark.parametrize("layers", [1, 2])
def test_adapters_of_low_rank(layers):
    """LoRA: the base is frozen, and costs nothing: its forward stays its own."""

    def adapted():
        base, down, up = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        return module(lambda m, x: m.base(x) + m.up(m.down(x)), base=base, down=down, up=up)

    model = nn.Sequential(*(adapted() for _ in range(layers)))
    clipper = check(model, [torch.randn(4, 5, 8)], lambda model, x: model(x).sin().sum((1, 2)).mean())
    assert [name for name, _ in clipper.parameters] == [
        f"{i}.{part}.weight" for i in range(layers) for part in ("down", "up")
    ]


@pytest.mark.slow
def test_torch_compile_leaves_what_feeds_the_sink_to_python():
    from accelerant.privacy.dp.clipping import PerExampleClipper

    torch._dynamo.reset()
    model = GPT(GPTConfig(vocab_size=V, context=6, layers=1, heads=2, width=8)).double()
    idx, targets = tokens(3, 4)
    clipper = PerExampleClipper(model, max_grad_norm=0.1)
    by_logits(model, idx, targets).backward()
    expected, norms = [each.grad.clone() for each in model.parameters()], clipper.norms
    model.zero_grad()
    by_logits(torch.compile(model, backend="aot_eager"), idx, targets).backward()
    assert clipper.norms is not norms
    torch.testing.assert_close(clipper.norms, norms)
    for each, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(each.grad, grad)


def swin(hf):
    config = hf.SwinConfig(image_size=16, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=2)
    return hf.SwinModel(config), torch.randn(3, 3, 16, 16)


def t5(hf):
    config = hf.T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=12, num_layers=2, num_heads=2)
    return hf.T5EncoderModel(config), torch.randint(20, (4, 5))


def opt(hf):
    config = hf.OPTConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, ffn_dim=12, word_embed_proj_dim=8,
        max_position_embeddings=16,
    )  # fmt: skip
    return hf.OPTModel(config), torch.randint(2, 20, (4, 5))


def wav2vec2(hf):
    config = hf.Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, conv_dim=[8], conv_stride=[5],
        conv_kernel=[10], num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
    )  # fmt: skip
    return hf.Wav2Vec2Model(config), torch.randn(3, 100)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("make", [swin, t5, opt, wav2vec2])
def test_models_that_share_or_fold_what_their_layers_get(make):
    """Windows or positions as rows of the batch, a table of distances, a weight norm: each example runs by itself."""
    torch.manual_seed(0)
    model, x = make(pytest.importorskip("transformers"))
    check(model.eval(), [x], lambda m, x: m(x).last_hidden_state.flatten(1).sin().sum(1).mean())
