"""Tokenizers of model folders against transformers', and chat templates that are not to be trusted."""

import json
import os
import random
import signal
import threading
import time

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from accelerant.errors import ConfigError, FormatError, TimeLimitExceeded, UnsupportedCase
from accelerant.nn.models.tokenizer import ModelTokenizer
from accelerant.runtime.bounded_template import LIMIT_S
from refusals import assert_raises

transformers = pytest.importorskip("transformers")

CORPUS = [
    "def add(a, b):\n    return a + b",
    "The quick brown fox jumps over the lazy dog. Größe, naïve, 日本語 😀",
] * 20
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]

TEMPLATES = {
    "headers": (
        "{{- bos_token }}\n{%- for message in messages %}\n    {{- '<|user|>' + message['role'] + '\\n\\n' }}\n"
        "    {{- message['content'] | trim + '<|end|>' }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}\n    {{- '<|assistant|>' }}\n{%- endif %}"
    ),
    "marked lines": (
        "{% if messages[0]['role'] != 'system' %}<|user|>system\nBe brief.<|end|>\n{% endif %}"
        "{% for message in messages %}{% set role = message.role %}<|user|>{{ role }}\n{{ message.content }}<|end|>\n"
        "{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "instructions": (
        "{%- set rest = messages[1:] if messages[0].role == 'system' else messages %}{{ bos_token }}\n"
        "{%- for m in rest %}\n{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}\n"
        "{{- raise_exception('roles must alternate') }}\n{%- endif %}\n"
        "{%- if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ '[/INST]' }}{% else %}"
        "{% generation %}{{ ' ' ~ m.content ~ eos_token }}{% endgeneration %}{% endif %}\n{%- endfor %}"
    ),
}
"""Of the kinds of Llama 3, Qwen2 and Mistral."""


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def metaspace():
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    pieces = ["<unk>", *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=pieces, show_progress=False)
    tokenizer.train_from_iterator([text.replace(" ", "▁") for text in CORPUS[:1]], trainer)
    data = json.loads(tokenizer.to_str())
    data["added_tokens"] = [each for each in data["added_tokens"] if not each["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(data))


@pytest.fixture(params=["byte level", "metaspace"])
def folder(request, tmp_path):
    tokenizer = byte_level() if request.param == "byte level" else metaspace()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(tmp_path)
    return tmp_path


def drawn_texts(seed, count):
    """Yield texts of all planes of Unicode, with spaces, controls and what the tokenizers know."""
    draw = random.Random(seed)
    kinds = [
        lambda: chr(draw.randrange(32, 127)),
        lambda: chr(draw.randrange(0xA0, 0x2FFF)),
        lambda: chr(draw.randrange(0x10000, 0x1F9FF)),
        lambda: draw.choice(["  ", "\n", " the", "\t", "日", "é", "👩\u200d👧", "\ufffd", "."]),
    ]
    for _ in range(count):
        yield "".join(draw.choice(kinds)() for _ in range(draw.randrange(1, 40)))


def streamed(tokenizer, ids):
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.flush()]


# --- tokens ----------------------------------------------------------------------------------------------------------
def test_tokens_are_transformers(folder):
    ours, theirs = ModelTokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in drawn_texts(0, 50):
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.eos_ids == (theirs.eos_token_id,)
    assert ours.bos_id == theirs.bos_token_id


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_is_the_whole_text(folder, seed):
    tokenizer = ModelTokenizer(folder)
    for text in drawn_texts(seed, 60):
        ids = tokenizer.encode(text)
        parts = streamed(tokenizer, ids)
        assert "".join(parts) == tokenizer.decode(ids)
        assert not any("\ufffd" in part for part in parts) or "\ufffd" in text


def test_a_stream_of_no_text_ends(folder):
    tokenizer = ModelTokenizer(folder)
    incomplete = tokenizer.encode("語", special=False)[-2:-1]
    began = time.process_time()
    text = "".join(streamed(tokenizer, incomplete * 2000 + [tokenizer.bos_id] * 2000))
    assert time.process_time() - began < 5
    assert set(text) <= {"\ufffd"}


def test_the_first_characters_wait_for_their_last_byte(folder):
    tokenizer = ModelTokenizer(folder)
    ids = tokenizer.encode("a🙃b", special=False)
    parts = streamed(tokenizer, ids)
    assert "".join(parts) == "a🙃b"
    assert parts.count("") >= 3  # three of the four bytes


def test_what_ends_a_text_is_of_the_first_file_that_says_so(folder):
    (folder / "config.json").write_text('{"eos_token_id": 4}')
    assert ModelTokenizer(folder).eos_ids == (4,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert ModelTokenizer(folder).eos_ids == (2, 3)


def test_a_lone_surrogate_is_refused(folder):
    assert_raises(ConfigError, "Unicode", lambda: ModelTokenizer(folder).encode("a\ud800"))


PANICS = {"decoder": {"type": "Strip", "content": " ", "start": 5, "stop": 5},
          "normalizer": {"type": "Replace", "pattern": {"Regex": "(x+x+)+y"}, "content": ""}}  # fmt: skip


@pytest.mark.parametrize("part", PANICS)
def test_a_tokenizer_that_panics_is_named(tmp_path, part):
    inner = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, " ": 1}, "unk_token": "a"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner | {part: PANICS[part]}))
    tokenizer = ModelTokenizer(tmp_path)
    with pytest.raises(FormatError, match=f"the tokenizer of {tmp_path} fails: "):
        tokenizer.decode([1]) if part == "decoder" else tokenizer.encode("x" * 30)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff", b'{"model": {"type": "BPE"}}', b"{" * 5000])
def test_a_broken_tokenizer_is_named(folder, content):
    path = folder / "tokenizer.json"
    path.unlink() if content is None else path.write_bytes(content)
    assert_raises(FormatError, r"tokenizer\.json", ModelTokenizer, folder)


# --- chat templates --------------------------------------------------------------------------------------------------
CHATS = [
    [{"role": "user", "content": " Hi <b>& \"you\" 'there' 日本 "}],
    [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}],
    [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": ""}],
]


@pytest.mark.sample(2, 1)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_conversations_are_transformers(folder, kind):
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    theirs.chat_template = TEMPLATES[kind]
    theirs.save_pretrained(folder)
    assert (folder / "chat_template.jinja").is_file()
    ours = ModelTokenizer(folder)
    for chat in CHATS:
        for prompt in (True, False):
            expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
            assert ours.chat_text(chat, add_generation_prompt=prompt) == expected
            ids = theirs.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
            assert ours.apply_chat(chat, add_generation_prompt=prompt) == ids


def with_template(folder, template):
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": template}))
    return ModelTokenizer(folder)


@pytest.fixture
def plain(tmp_path):
    tokenizer = byte_level()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(tmp_path)
    return tmp_path


def test_templates_by_name(plain):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    assert with_template(plain, named).chat_text(CHATS[1]) == "Be kind.!"
    assert not with_template(plain, [{"name": [], "template": "no"}]).has_chat_template


def test_a_folder_without_a_template_says_so(plain):
    assert_raises(UnsupportedCase, "has no chat template", lambda: ModelTokenizer(plain).apply_chat(CHATS[0]))


def test_what_a_template_refuses_is_said(plain):
    tokenizer = with_template(plain, TEMPLATES["instructions"])
    assert_raises(ConfigError, r"refuses the messages: .*roles must alternate", tokenizer.apply_chat, CHATS[0] * 2)


HOSTILE = {
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "quick to fill memory": "{{ 'a' * 99999999999 }}",
    "slow to fill memory": "{% set n = namespace(s='ab') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}{{ n.s }}",
    "wide": "{{ 'a'.ljust(9999999999) }}",
    "padded": "{{ 'a' | center(9999999999) }}",
    "a long list": "{% set n = namespace(l=[1]) %}{% for i in range(60) %}{% set n.l = n.l + n.l %}{% endfor %}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "recursive": "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "a long range": "{% for a in range(10 ** 9) %}{% endfor %}",
    "a long text": "{% for a in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.getcwd() }}",
    "internals": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "internals of a function": "{{ raise_exception.__globals__['sys'].exit() }}",
    "no template": "{% for %}",
    "changes": "{{ messages.append(1) }}",
    "lone surrogate": "{{ '\\ud800' | tojson | from_json }}",
}


def spent_by_children():
    """The processor's time of the processes that have ended, which others' load does not change."""
    ended = os.times()
    return ended.children_user + ended.children_system


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_template_ends_in_an_error(plain, kind):
    tokenizer = with_template(plain, TEMPLATES["headers"])
    expected = tokenizer.chat_text(CHATS[0])  # starts the process that renders
    hostile = with_template(plain, HOSTILE[kind])
    hostile._template._child, hostile._template._owner = tokenizer._template._child, tokenizer._template._owner
    began = spent_by_children()
    with pytest.raises((FormatError, TimeLimitExceeded), match=r"chat_template of .*tokenizer_config\.json"):
        hostile.chat_text(CHATS[0])
    assert spent_by_children() - began < 3  # a second, and the start of a process that was ended
    assert tokenizer.chat_text(CHATS[0]) == expected  # in another process where the first was killed


def test_a_template_is_rendered_however_long_its_process_waits_for_a_processor(plain):
    tokenizer = with_template(plain, TEMPLATES["headers"])
    expected = tokenizer.chat_text(CHATS[0])
    pid = tokenizer._template._child.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.2 * LIMIT_S, os.kill, (pid, signal.SIGCONT)).start()
    assert tokenizer.chat_text(CHATS[0]) == expected
    assert tokenizer._template._child.pid == pid
