import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from accelerant.config import override
from accelerant.errors import FormatError
from accelerant.nn.train import tokens as module
from accelerant.nn.train.tokens import (
    BPETokenizer,
    ByteTokenizer,
    Document,
    last_cut,
    load_bpe,
    train_bpe,
    train_bpe_on,
)
from refusals import assert_raises

TEXTS = ["def f(x):\n    return x + 1\n", "naïve café — 日本語\n", "def g(y):\n    return y\n"]
DOCUMENTS = tuple(Document(str(i), text.encode()) for i, text in enumerate(TEXTS))
SHA256 = "0" * 64


@pytest.fixture(autouse=True)
def cache(tmp_path):
    with override(cache_dir=tmp_path / "cache"):
        yield tmp_path / "cache"


def test_bytes_come_back():
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(DOCUMENTS)
    assert tokenizer.decode(tokens.tolist()) == "\n".join(TEXTS)
    assert tokenizer.byte_lengths[tokens].sum() == len("\n".join(TEXTS).encode())


def test_bpe_comes_back_and_knows_its_bytes():
    tokenizer = train_bpe(DOCUMENTS, SHA256, 300)
    tokens = tokenizer.encode(DOCUMENTS)
    assert tokenizer.decode(tokens.tolist()) == "".join(text + "<|endoftext|>" for text in TEXTS)
    assert tokenizer.byte_lengths[tokens].sum() == sum(len(text.encode()) for text in TEXTS)
    assert tokenizer.vocab_size <= 300
    assert len(tokens) < sum(len(text.encode()) for text in TEXTS)


def test_bpe_is_trained_once(cache, monkeypatch):
    first = train_bpe(DOCUMENTS, SHA256, 280).to_json()
    assert len(list(cache.rglob("*.json"))) == 1
    monkeypatch.setattr("accelerant.nn.train.tokens.train_bpe_on", lambda *_: pytest.fail("trained again"))
    assert train_bpe(DOCUMENTS, SHA256, 280).to_json() == first


def test_a_torn_cache_is_trained_again(cache):
    first = train_bpe(DOCUMENTS, SHA256, 280).to_json()
    (path,) = cache.rglob("*.json")
    path.write_text(path.read_text()[:100])
    assert train_bpe(DOCUMENTS, SHA256, 280).to_json() == first
    assert load_bpe(path).to_json() == first


def changed(**changes):
    """Return a small tokenizer.json with other fields; `model` has those of its model."""
    content = json.loads(train_bpe(DOCUMENTS, SHA256, 280).to_json())
    content["model"] |= changes.pop("model", {})
    return json.dumps(content | changes)


TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
}
PADDING = {"direction": "Right", "pad_to_multiple_of": 8, "pad_id": 0, "pad_type_id": 0, "pad_token": "!"}


@pytest.mark.parametrize("changes", [
    {"truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}},
    {"padding": {"strategy": {"Fixed": 5000}, **PADDING}},
    {"padding": {"strategy": "BatchLongest", **PADDING}},
    {"post_processor": TEMPLATE},
    {"normalizer": {"type": "NFC"}},
], ids=str)  # fmt: skip
def test_settings_for_prompts_neither_drop_nor_add_tokens(changes):
    expected, tokenizer = train_bpe(DOCUMENTS, SHA256, 280), BPETokenizer(changed(**changes))
    assert np.array_equal(tokenizer.encode(DOCUMENTS), expected.encode(DOCUMENTS))
    pieces = [(TEXTS[0] * 50, False), (TEXTS[1], True)]
    assert np.array_equal(tokenizer.encode_pieces(pieces), expected.encode_pieces(pieces))
    assert tokenizer.encode_text(TEXTS[1]) == expected.encode_text(TEXTS[1])
    assert BPETokenizer(tokenizer.to_json()).to_json() == tokenizer.to_json()


@pytest.mark.parametrize(("changes", "message"), [
    ({"model": {"dropout": 0.5}}, "dropout must be absent, got 0.5"),
    ({"model": {"continuing_subword_prefix": "##"}}, "continuing_subword_prefix must be absent"),
    ({"model": {"type": "WordLevel", "unk_token": "a"}}, "not a BPE but a tokenizer of type 'WordLevel'"),
    ({"model": {"vocab": {"a": 5, "<|endoftext|>": 1 << 30}, "merges": []}}, "tokens are not numbered 0 to 1"),
    ({"model": {"vocab": {"a": 0, "<|endoftext|>": 1}, "merges": []}}, "does not give every text back"),
    ({"model": {"vocab": [1]}}, "not a tokenizer"),
    ({"model": {"merges": [[1, 2]]}}, "not a tokenizer"),
    ({"normalizer": {"type": "Lowercase"}}, "does not give every text back"),
    ({"normalizer": {"type": "Replace", "pattern": {"Regex": "o.*"}, "content": ""}}, "does not give every text"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "does not give every text back"),
    ({"pre_tokenizer": None}, "does not give every text back"),
    ({"decoder": None}, "does not give every text back"),
    ({"decoder": 5}, "not a tokenizer"),
], ids=str)  # fmt: skip
def test_tokenizers_that_lose_text_are_refused(changes, message):
    assert_raises(FormatError, message, lambda: BPETokenizer(changed(**changes)))


def test_the_vocabulary_size_is_part_of_the_key(cache):
    assert train_bpe(DOCUMENTS, SHA256, 270).vocab_size == 270
    assert train_bpe(DOCUMENTS, SHA256, 280).vocab_size == 280
    assert len(list(cache.rglob("*.json"))) == 2


@pytest.mark.parametrize("content", ["", "{}", json.dumps({"version": "1.0"})])
def test_something_else_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    assert_raises(FormatError, "not a tokenizer", load_bpe, path)


def test_a_missing_file_is_refused(tmp_path):
    assert_raises(FormatError, "cannot read the tokenizer", load_bpe, tmp_path / "tokenizer.json")


def test_wide_vocabularies_take_wide_tokens():
    tokenizer = BPETokenizer(train_bpe(DOCUMENTS, SHA256, 280).to_json())
    assert tokenizer.encode(DOCUMENTS).dtype == np.uint16
    tokenizer.vocab_size = 1 << 17
    assert tokenizer.encode(DOCUMENTS).dtype == np.uint32


def test_the_end_marker_in_a_text_is_text():
    text = "a<|endoftext|>b\n<|endoftext|>"
    tokenizer = train_bpe(DOCUMENTS, SHA256, 300)
    tokens = tokenizer.encode([Document("marked", text.encode())])
    end = tokenizer.encode([Document("nothing", b"")])
    assert len(end) == 1
    assert (tokens == end[0]).sum() == 1
    assert tokens[-1] == end[0]
    assert tokenizer.byte_lengths[tokens].sum() == len(text.encode())
    assert tokenizer.decode(tokens[:-1].tolist()) == text
    assert tokenizer.byte_lengths[tokenizer.encode_text(text)].sum() == len(text.encode())


def test_a_long_text_in_pieces_gives_the_tokens_of_the_whole(cache, monkeypatch):
    text = "def f(x):\n\n    return 'it''s'  \n \n\t x\r\n\u00a0\n日本\nend.\n\n\n" * 40
    document = Document("long", text.encode())
    corpus = (document,), "1" * 64
    whole = train_bpe(*corpus, 300)
    expected = whole.encode([document, *DOCUMENTS])
    monkeypatch.setattr(module, "_PIECE", 7)
    monkeypatch.setattr(module, "_BATCH", 50)
    shares = []
    assert whole.encode([document, *DOCUMENTS], shares.append).tolist() == expected.tolist()
    assert len(shares) > 10
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    with override(cache_dir=cache / "other"):
        phases = []
        assert train_bpe(*corpus, 300, phase=phases.append).to_json() == whole.to_json()
    assert phases == ["training the tokenizer (cached for the next run)", "choosing up to 300 tokens"]


ALPHABET = [
    "a", "'s", "1", ".", " ", "  ", "\n", "\t", "\r\n", "\x1c", "\x85", "\u00a0", "\u180e", "\u2028", "\u3000", "日",
    "。", "é",
]  # fmt: skip


@given(st.lists(st.sampled_from(ALPHABET), max_size=30).map("".join), st.integers(0, 40))
def test_a_text_is_cut_where_a_word_ends_anyway(text, since):
    """As GPT-2's pre-tokenizer, which ours is, divides it."""
    place = last_cut(text, min(since, len(text)))
    assert since == 0 or place == 0 or place >= since - 1
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    parts = [word for part in (text[:place], text[place:]) for word, _ in words(part)]
    assert parts == [word for word, _ in words(text)]


@pytest.mark.parametrize(("text", "since", "place"), [
    ("one two three", 0, 7),
    ("one two three", 8, 7),  # the space was the last character then: what follows it was not known
    ("one two three", 9, 0),
    ("日本。\n東京。\n\n大阪", 0, 7),  # no spaces: at the end of a line, before its further line ends
    ("one two  three\n\n", 0, 3),
    ("one", 0, 0),
    ("", 0, 0),
])  # fmt: skip
def test_the_last_place_to_cut(text, since, place, monkeypatch):
    assert last_cut(text, since) == place
    monkeypatch.setattr(module, "_WINDOW", 2)
    assert last_cut(text, since) == place


def test_training_sees_no_word_that_takes_it_long():
    """One of 270 KB took 156 s; by the square of the length."""
    text = "short " + "x" * 1000 + " " * 700 + "end " + "日" * 255
    parts = list(module._bounded(iter([text, "", "plain"])))
    assert "".join(parts) == text + "plain"
    words = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    assert max(end - start for part in parts for _, (start, end) in words(part)) == 257
    assert parts[-1] == "plain"
    tokenizer = train_bpe_on(iter(["ab" * 100_000]), 300)
    assert len(tokenizer.encode_text("ab" * 256)) == 2
